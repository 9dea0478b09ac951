"""Whole answers of the asyncio SDK: their events come in lots, and say what they say one by one."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from specserve import LLM, AsyncLLM, SamplingParams
from specserve.errors import EngineError, SpecserveError
from specserve.outputs import Gathered
from specserve.testing import write_tiny_model
from specserve.types import Event


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), "llama", seed=3)


def test_lots_end_with_a_completion_and_at_64_tokens() -> None:
    told: list[Event | SpecserveError] = []
    listen = Gathered(told.append)
    for token in range(63):
        listen(Event("r", token % 2, [token]))
    assert told == []
    listen(Event("r", 1, [63]))
    assert told == [Event("r", 0, list(range(0, 64, 2))), Event("r", 1, list(range(1, 64, 2)))]
    told.clear()
    listen(Event("r", 0, [64], [(1, b"a")], prompt_logprobs=[(2, b"p")]))
    listen(Event("r", 1, [65, 66]))
    listen(Event("r", 0, [67, 68], [(2, b"b")], finish_reason="stop", stop_reason=68))
    both = Event("r", 0, [64, 67, 68], [(1, b"a"), (2, b"b")], [(2, b"p")], "stop", 68)
    assert told == [both, Event("r", 1, [65, 66])]
    told.clear()
    listen(Event("r", 1, [69]))
    error = EngineError("it failed")
    listen(error)
    assert told == [error], "what came before it is no part of an answer"


PARAMS = [
    SamplingParams(max_tokens=150, temperature=0, ignore_eos=True, logprobs=1, prompt_logprobs=2),
    SamplingParams(max_tokens=90, temperature=1, seed=4, n=3, logprobs=0, ignore_eos=True),
    SamplingParams(max_tokens=40, temperature=0.7, seed=9, stop_token_ids=list(range(40))),
    SamplingParams(max_tokens=40, temperature=1, seed=2, n=2, stop=["a", "e"]),
]


@pytest.mark.parametrize("params", PARAMS, ids=["long", "several", "stop tokens", "stop strings"])
def test_a_whole_answer_is_that_of_the_synchronous_sdk(tiny: Path, params: SamplingParams) -> None:
    with LLM(str(tiny), dtype="float32", max_model_len=256, adaptive=False) as llm:
        (wanted,) = llm.generate("abc", params)

    async def main() -> None:
        async with AsyncLLM(str(tiny), dtype="float32", max_model_len=256, adaptive=False) as served:
            found = await served.generate("abc", params)
            assert [each.stats.num_steps for each in found.outputs] == [each.stats.num_steps for each in wanted.outputs]
            for each, other in zip(found.outputs, wanted.outputs, strict=True):
                each.stats = other.stats  # times differ
            assert found.outputs == wanted.outputs
            assert found.prompt_logprobs == wanted.prompt_logprobs
            assert found.prompt_token_ids == wanted.prompt_token_ids

    asyncio.run(asyncio.wait_for(main(), 60))
