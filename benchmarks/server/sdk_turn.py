"""The SDK's side of overhead.py: AsyncLLM in a process of its own answers conversations one after another, and tells
when their chunks came.

A turn as JSON on stdin: {"model", "engine": {...}, "warm_up", "prompts": [...], "max_tokens"}. On stdout, a line for
each prompt: {"first_s", "outside_s", "per_token_s", "tokens"}; outside_s is what first_s has outside of the engine.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

from specserve.async_llm import AsyncLLM
from specserve.types import SamplingParams


async def answer(llm: AsyncLLM, prompt: str, max_tokens: int) -> dict[str, Any]:
    """One conversation, timed as overhead.py times it over HTTP."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    begun = time.perf_counter()
    chunks = llm.stream_chat([{"role": "user", "content": prompt}], params)
    heard = [(time.perf_counter(), chunk) async for chunk in chunks]
    said = [(now, chunk.token_ids) for now, chunk in heard if chunk.token_ids]
    tokens = [token for _, ids in said for token in ids]
    first_s, per_token_s = said[0][0] - begun, (said[-1][0] - said[0][0]) / (len(tokens) - len(said[0][1]))
    stats = heard[-1][1].stats
    assert stats is not None and stats.first_token is not None, "the last chunk tells of all"
    outside_s = first_s - (stats.first_token - stats.arrived)
    return {"first_s": first_s, "outside_s": outside_s, "per_token_s": per_token_s, "tokens": tokens}


async def run(turn: dict[str, Any]) -> None:
    async with AsyncLLM(turn["model"], **turn["engine"]) as llm:
        await answer(llm, turn["warm_up"], turn["max_tokens"])
        for prompt in turn["prompts"]:
            print(json.dumps(await answer(llm, prompt, turn["max_tokens"])), flush=True)


if __name__ == "__main__":
    asyncio.run(run(json.load(sys.stdin)))
