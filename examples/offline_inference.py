"""Complete a few prompts with any model: `python examples/offline_inference.py facebook/opt-125m`, or a folder."""

import sys

from specserve import LLM, SamplingParams

prompts = [
    "Good morning, my name is",
    "The largest city of Italy is",
    "In the year 2100, computers",
    "Rain is made of",
]
sampling = SamplingParams(temperature=0.8, top_p=0.95)  # of at most 16 tokens, unless max_tokens says more

model = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"
with LLM(model) as llm:
    for output in llm.generate(prompts, sampling):
        print(f"{output.prompt!r} -> {output.outputs[0].text!r}")
