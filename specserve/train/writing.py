"""Lets the target answer prompts on the engine, many at once, and appends the answers in the order of the jobs."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence

import torch

from specserve.async_llm import AsyncLLM
from specserve.bench.recorder import DirectHost, Recorder
from specserve.errors import EngineError
from specserve.text.tokenizer import Tokenizer
from specserve.train.cache import HiddenCache
from specserve.train.prompts import Job, Jobs, Prompts
from specserve.train.text import WrittenText
from specserve.types import SamplingParams

Say = Callable[[str], None]
_AHEAD = 4  # requests under way for each stream: a long answer at the front keeps no stream idle
_EVERY_S = 10.0  # between two lines of progress


def has_all(text: WrittenText, jobs: Jobs, tokens: int | None) -> bool:
    """Whether there is as much text as was asked for: `tokens` of output, or an answer to every job."""
    return len(text) >= len(jobs) or (tokens is not None and text.num_output_tokens >= tokens)


def prompt_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """A user's message through the chat template; of a model without one, the text itself."""
    if tokenizer.info()["chat_template"] is None:
        return tokenizer.encode(text)
    return tokenizer.chat_ids([{"role": "user", "content": text}]).ids


async def write_text(
    llm: AsyncLLM,
    text: WrittenText,
    prompts: Prompts,
    jobs: Jobs,
    limits: Sequence[int],
    streams: int,
    tokens: int | None,
    say: Say,
    adapter: str | None = None,
    cache: HiddenCache | None = None,
) -> None:
    """Go on with `text` until it `has_all`. `limits` are the most output tokens, and the most of prompt and output: a
    prompt that leaves no room for the former gets no answer. Killed at any point and called again it writes the same
    text, as what a job is follows from its number, and what the target says of it, with `adapter`, from its seed.
    `cache` takes the hidden states of its layers as the engine computes them."""
    recorder = None if cache is None else _record(llm, cache.stored)
    progress = _Progress(text, jobs, tokens, say)
    waiting: deque[asyncio.Task[tuple[list[int], list[int]]]] = deque()
    upcoming = len(text)
    try:
        while not has_all(text, jobs, tokens):
            while upcoming < len(jobs) and len(waiting) < _AHEAD * streams:
                job = jobs[upcoming]
                asked = prompts.prompts[job.prompt].text
                waiting.append(asyncio.create_task(_answer(llm, asked, job, limits, adapter)))
                upcoming += 1
            job, (prompt, output) = jobs[len(text)], await waiting.popleft()
            if cache is not None and recorder is not None and output:
                cache.add(len(text), [*prompt, *output], *recorder.take([*prompt, *output]))
            text.append(job.prompt, job.temperature, prompt, output)
            progress.show()
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
    progress.show(last=True)


def _record(llm: AsyncLLM, layers: Sequence[int]) -> Recorder:
    """Let an engine that has no requests yet, and so nothing to do on its thread, show hidden states."""
    recorder = Recorder(layers, torch.float16)
    llm.engine.use(DirectHost(recorder, llm.engine.limits.vocab_size, llm.config.drafter_timeout_s), 0)
    return recorder


async def _answer(
    llm: AsyncLLM, asked: str, job: Job, limits: Sequence[int], adapter: str | None
) -> tuple[list[int], list[int]]:
    """Ids of a prompt and of its answer, which is empty where there is no room."""
    max_tokens, max_length = limits
    ids = prompt_ids(llm.tokenizer, asked)
    if len(ids) + max_tokens > max_length:
        return [], []
    params = SamplingParams(max_tokens=max_tokens, temperature=job.temperature, seed=job.seed)
    completion = (await llm.generate(ids, params, adapter=adapter)).outputs[0]
    if completion.error is not None:
        raise EngineError(f"The target did not answer prompt {job.prompt}: {completion.error}")
    return ids, completion.token_ids


class _Progress:
    """Says every ten seconds how much there is, how fast it comes and how long the rest will take."""

    def __init__(self, text: WrittenText, jobs: Jobs, tokens: int | None, say: Say) -> None:
        self._text, self._jobs, self._wanted, self._say = text, jobs, tokens, say
        self._first = text.num_output_tokens, len(text)
        self._begun = self._said = time.monotonic()

    def show(self, last: bool = False) -> None:
        now = time.monotonic()
        if not last and now - self._said < _EVERY_S:
            return
        self._said = now
        seconds = max(now - self._begun, 1e-9)
        tokens, answers = self._text.num_output_tokens - self._first[0], len(self._text) - self._first[1]
        left = (len(self._jobs) - len(self._text)) * seconds / max(answers, 1)
        if self._wanted is not None:
            left = min(left, max(0, self._wanted - self._text.num_output_tokens) * seconds / max(tokens, 1))
        self._say(
            f"text: {self._text.num_output_tokens:,} tokens in {len(self._text):,} answers, "
            f"{tokens / seconds:,.0f} tokens/s, {duration(left)} left"
        )


def duration(seconds: float) -> str:
    """Hours and minutes, or seconds below two minutes."""
    minutes = round(seconds / 60)
    return f"{seconds:.0f} s" if seconds < 120 else f"{minutes // 60} h {minutes % 60:02d} min"
