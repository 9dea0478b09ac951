"""Answer from a model and from its LoRA adapters: give folders that PEFT saved, or see what a random adapter says."""

import sys
import tempfile
from pathlib import Path

from specserve import LLM, SamplingParams
from specserve.testing import write_adapter

PROMPT = "The lighthouse stands at the end of the"
PARAMS = SamplingParams(max_tokens=24, temperature=0)

with LLM("smollm2-135m", max_loras=4) as llm, tempfile.TemporaryDirectory() as folder:
    paths = [Path(each) for each in sys.argv[1:]]
    if not paths:
        shapes = {f"model.layers.{layer}.self_attn.q_proj.weight": (576, 576) for layer in range(30)}
        paths = [write_adapter(Path(folder) / "random", shapes, rank=8, targets=["q_proj"], size=0.1)]
    for path in paths:
        info = llm.load_adapter(path.name, path)
        print(f"{info.name}: rank {info.rank}, {info.num_bytes / 1e6:.1f} MB")
    for name in (None, *llm.adapters()):
        output = llm.generate(PROMPT, PARAMS, adapter=name, drafter="ngram")[0].outputs[0]
        print(f"{name or 'the model'}: {output.text.strip()!r}")
