"""transformers' `generate`; its speculation is prompt lookup. Several prompts at once go through its continuous
batching."""

from __future__ import annotations

import time
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
from wire import Answer, Setup, Unsupported, chosen, precision, serve

LOOKUP = {"prompt_lookup_num_tokens": "5", "max_matching_ngram_size": "2"}
PAD = 0
PAGE = 256  # tokens of its cache
NO_TOKEN = -1


class FirstToken:
    """A streamer that notes when the first new tokens come; the prompt comes before them."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, ids: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None: ...


class Transformers:
    def __init__(self, setup: Setup) -> None:
        if setup.speculation and setup.streams > 1:
            raise Unsupported("transformers' assisted generation takes one sequence at a time")
        dtype = getattr(torch, precision(setup, {"bf16": "bfloat16", "f32": "float32"}))
        torch.set_num_threads(setup.threads)
        options = chosen(LOOKUP, setup.options) if setup.speculation else {}
        self._speculation = {name: int(value) for name, value in options.items()}
        model: Any = AutoModelForCausalLM.from_pretrained(setup.model, dtype=dtype)
        self._model = model.eval()
        self._end = model.generation_config.eos_token_id
        pages = setup.streams * -(-setup.context // PAGE)
        self._batching = ContinuousBatchingConfig(page_size=PAGE, num_blocks=pages, allow_block_sharing=False)
        self.about: dict[str, Any] = {
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "attention": model.config._attn_implementation,
            "continuous_batching": setup.streams > 1,
            **self._speculation,
        }

    def generate(self, prompts: list[list[int]], max_tokens: int, ignore_eos: bool) -> Answer:
        return (self._one if len(prompts) == 1 else self._several)(prompts, max_tokens, ignore_eos)

    def _several(self, prompts: list[list[int]], max_tokens: int, ignore_eos: bool) -> Answer:
        make: Any = GenerationConfig  # which has no types
        config = make(
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=NO_TOKEN if ignore_eos else self._end,
            pad_token_id=PAD,
        )
        begun = time.perf_counter()
        found = self._model.generate_batch(
            prompts,
            generation_config=config,
            continuous_batching_config=self._batching,
            persistent_manager=True,  # else each call makes its cache anew
        )
        total = time.perf_counter() - begun
        rows = [list(each.generated_tokens) for each in found.values()]
        if len(rows) != len(prompts) or any(each.error for each in found.values()):
            raise RuntimeError("transformers' continuous batching failed; its log says why.")
        return Answer(ids=rows, total_s=total, ttft_s=None)

    def _one(self, prompts: list[list[int]], max_tokens: int, ignore_eos: bool) -> Answer:
        width = len(prompts[0])
        streamer = FirstToken()
        begun = time.perf_counter()
        with torch.inference_mode():
            out = self._model.generate(
                torch.tensor(prompts),
                attention_mask=torch.ones(1, width, dtype=torch.int64),
                do_sample=False,
                max_new_tokens=max_tokens,
                min_new_tokens=max_tokens if ignore_eos else None,
                pad_token_id=PAD,
                streamer=streamer,
                **self._speculation,
            )
        total = time.perf_counter() - begun
        return Answer(ids=out[:, width:].tolist(), total_s=total, ttft_s=streamer.times[1] - begun)

    def reset(self) -> None:
        """No call leaves anything that a later one would find."""


if __name__ == "__main__":
    serve(Transformers)
