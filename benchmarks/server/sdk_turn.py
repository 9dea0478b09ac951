"""The SDK's side of overhead.py: AsyncLLM in a process of its own answers conversations one after another, and tells
when their chunks came. Knows no server.

A turn as JSON on stdin: {"model", "engine": {...}, "warm_up", "prompts": [...], "max_tokens"}. On stdout, a line for
each prompt: {"first_s", "per_token_s", "tokens"}.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

from specserve.llm import AsyncLLM
from specserve.types import SamplingParams


async def answer(llm: AsyncLLM, prompt: str, max_tokens: int) -> dict[str, Any]:
    """One conversation, timed as overhead.py times it over HTTP."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    begun = time.perf_counter()
    chunks = llm.stream_chat([{"role": "user", "content": prompt}], params)
    said = [(time.perf_counter(), chunk.token_ids) async for chunk in chunks if chunk.token_ids]
    tokens = [token for _, ids in said for token in ids]
    per_token_s = (said[-1][0] - said[0][0]) / (len(tokens) - len(said[0][1]))
    return {"first_s": said[0][0] - begun, "per_token_s": per_token_s, "tokens": tokens}


async def run(turn: dict[str, Any]) -> None:
    async with AsyncLLM(turn["model"], **turn["engine"]) as llm:
        await answer(llm, turn["warm_up"], turn["max_tokens"])
        for prompt in turn["prompts"]:
            print(json.dumps(await answer(llm, prompt, turn["max_tokens"])), flush=True)


if __name__ == "__main__":
    asyncio.run(run(json.load(sys.stdin)))
