"""specserve as one of the engines compared, in this process, through its SDK. Knows nothing of the other engines."""

from __future__ import annotations

import time
from typing import Any

from wire import Answer, Setup, serve

from specserve.config import DTYPES
from specserve.llm import LLM
from specserve.types import SamplingParams
from specserve.version import __version__

NAMES = {"f32": "float32", "bf16": "bfloat16"}


class Specserve:
    """Options: `drafter`, `num_speculative_tokens`; anything else goes to the drafter, numbers as numbers."""

    def __init__(self, setup: Setup) -> None:
        options = dict(setup.options)
        self._drafter = options.pop("drafter", "ngram") if setup.speculation else "none"
        self._num_tokens = int(options.pop("num_speculative_tokens", "5"))
        self._drafter_options = {k: _number(v) for k, v in options.items()} if setup.speculation else {}
        self._llm = LLM(
            setup.model,
            **_weights(setup.weights),
            threads=setup.threads,
            max_model_len=setup.context,
            max_num_seqs=setup.streams,
            prefix_caching=False,
        )
        self.about: dict[str, Any] = {
            "specserve": __version__,
            "dtype": self._llm.dtype,
            "device": self._llm.device,
            "drafter": self._drafter,
            "num_speculative_tokens": self._num_tokens if setup.speculation else 0,
            **self._drafter_options,
        }
        self.reset()

    def generate(self, prompts: list[list[int]], max_tokens: int, ignore_eos: bool) -> Answer:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=ignore_eos)
        begun = time.perf_counter()
        outputs = [output.outputs[0] for output in self._llm.generate(prompts, params)]
        total = time.perf_counter() - begun
        for output in outputs:
            if output.finish_reason == "error":
                raise SystemExit(f"A request failed: {output.error}")
        first = outputs[0].stats.first_token
        assert first is not None, "a finished request has a first token"
        return Answer(
            ids=[output.token_ids for output in outputs],
            total_s=total,
            ttft_s=first - begun if len(prompts) == 1 else None,
        )

    def reset(self) -> None:
        """A new drafter: those that learn across requests begin with nothing."""
        self._llm.use_drafter(self._drafter, self._num_tokens, **self._drafter_options)
        self._llm.reset_prefix_cache()


def _weights(name: str) -> dict[str, Any]:
    """A dtype, or else the name of a quantization, which specserve itself checks."""
    dtype = NAMES.get(name, name)
    return {"dtype": dtype} if dtype in DTYPES else {"quantization": name}


def _number(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


if __name__ == "__main__":
    serve(Specserve)
