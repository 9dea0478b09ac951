"""OpenVINO GenAI's continuous batching pipeline on a GGUF file. Its speculation is prompt lookup or, with
`--set openvino.head=FOLDER`, an EAGLE-3 head of specserve's format.
"""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai as genai
from wire import Answer, Setup, chosen, serve

LOOKUP = {"num_assistant_tokens": "5", "max_ngram_size": "3"}
EAGLE = {"num_assistant_tokens": "2"}
KV_CACHE_GB = 1


class FirstToken(genai.StreamerBase):  # type: ignore[misc]  # its types are in its own environment
    """Notes when the first tokens come."""

    def __init__(self) -> None:
        super().__init__()
        self.time: float | None = None

    def write(self, token: Any) -> Any:
        self.time = self.time or time.perf_counter()
        return genai.StreamingStatus.RUNNING

    def end(self) -> None: ...


class OpenVino:
    def __init__(self, setup: Setup) -> None:
        assert setup.gguf is not None, "the comparison gives every peer that reads GGUF its file"
        options = dict(setup.options) if setup.speculation else {}
        head = options.pop("head", None)
        if setup.speculation:
            options = chosen(EAGLE if head else LOOKUP, options)
        self._speculation = {name: int(value) for name, value in options.items()}
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = KV_CACHE_GB
        scheduler.max_num_seqs = setup.streams
        scheduler.enable_prefix_caching = False
        properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": setup.threads}
        self.about: dict[str, Any] = {
            "openvino_genai": genai.__version__,
            "openvino": openvino.__version__,
            **properties,
            **self._speculation,
        }
        model = setup.gguf
        if head:
            model, draft = pair(setup, Path(head))
            properties["draft_model"] = genai.draft_model(draft, "CPU", INFERENCE_NUM_THREADS=setup.threads)
            self.about["head"] = Path(head).name
        elif setup.speculation:
            properties["prompt_lookup"] = self.about["prompt_lookup"] = True
        self._pipeline = genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)

    def generate(self, prompts: list[list[int]], max_tokens: int, ignore_eos: bool) -> Answer:
        config = genai.GenerationConfig(max_new_tokens=max_tokens, ignore_eos=ignore_eos, do_sample=False)
        for name, value in self._speculation.items():
            setattr(config, name, value)
        streamer = FirstToken() if len(prompts) == 1 else None
        begun = time.perf_counter()
        tensors = [openvino.Tensor(np.array([ids], dtype=np.int64)) for ids in prompts]
        results = self._pipeline.generate(tensors, [config] * len(prompts), streamer)
        total = time.perf_counter() - begun
        first = streamer.time - begun if streamer and streamer.time else None
        return Answer(ids=[list(result.m_generation_ids[0]) for result in results], total_s=total, ttft_s=first)

    def reset(self) -> None:
        """The prefix cache is off and n-grams are looked up in each sequence alone."""


def pair(setup: Setup, head: Path) -> tuple[str, str]:
    """The folders of target and draft, made on first use."""
    from openvino_eagle import make_draft, make_target  # torch and the exporter, which nothing else here needs

    assert setup.gguf is not None, "the comparison gives every peer that reads GGUF its file"
    folder, gguf = Path(setup.home) / "openvino" / "eagle", Path(setup.gguf)
    digest = hashlib.sha256((head / "model.safetensors").read_bytes()).hexdigest()
    draft = make_draft(head, Path(setup.model), folder / f"{head.name}.{digest[:12]}")
    return str(make_target(gguf, folder / gguf.stem.replace(".", "-"))), str(draft)


if __name__ == "__main__":
    serve(OpenVino)
