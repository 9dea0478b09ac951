"""Prompts whose log-probabilities are asked for: how many rows have logits, what a step takes of memory and of time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from specserve.cache import sizing
from specserve.config import EngineConfig
from specserve.engine.build import build
from specserve.engine.engine import Engine
from specserve.engine.request import Request
from specserve.runtime.executor import local
from specserve.runtime.pack import StepInput, most_tokens, num_shared_rows
from specserve.speculation.host import DraftHost
from specserve.testing import ScriptedDrafter, tiny_config, write_tiny_model
from specserve.types import Event, SamplingParams, Sequence

VOCAB = tiny_config("llama")["vocab_size"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), "llama", seed=3)


def prompt(i: int, length: int) -> list[int]:
    return [(7 * i + 3 * j * j + j) % 280 for j in range(length)]


def watched(engine: Engine) -> list[StepInput]:
    """The batches of its steps, as they come."""
    seen: list[StepInput] = []
    start = local(engine.executor).runner.start

    def keep(batch: StepInput) -> None:
        seen.append(batch)
        start(batch)

    local(engine.executor).runner.start = keep  # type: ignore[method-assign]
    return seen


def run(engine: Engine, requests: list[Request]) -> dict[str, list[Event]]:
    events: dict[str, list[Event]] = {}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for event in engine.step():
            events.setdefault(event.request_id, []).append(event)
    return events


def said(events: list[Event]) -> Any:
    tokens = [token for event in events for token in event.tokens]
    return tokens, [event.prompt_logprobs for event in events if event.prompt_logprobs], events[-1].error


def requests() -> list[Request]:
    """Long and short prompts, scored and not, some with an answer of one token."""
    kinds = [{"prompt_logprobs": 3}, {}, {"prompt_logprobs": 0, "logprobs": 2}, {"max_tokens": 1, "prompt_logprobs": 1}]
    return [
        Request(
            id=f"r{i}",
            prompt_ids=prompt(i, (90, 1, 40, 2, 61)[i % 5]),
            params=SamplingParams(**{"temperature": 0.0, "max_tokens": 12, "ignore_eos": True} | kinds[i % 4]),
        )
        for i in range(10)
    ]


@pytest.mark.parametrize("quantization", ["int8", "none"])
@pytest.mark.parametrize("drafted", [False, True])
def test_no_step_has_more_logits_than_there_is_room_for(
    tiny: Path, quantization: str, drafted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what is said, and scored, is the same with any room."""
    options = {"model": str(tiny), "max_model_len": 160, "max_num_seqs": 4, "max_num_batched_tokens": 64}
    wanted = run(build(EngineConfig(**options, quantization=quantization)).engine, requests())
    monkeypatch.setattr(sizing, "LOGITS_BYTES", 4 * VOCAB * 11)
    engine = build(EngineConfig(**options, quantization=quantization)).engine
    if drafted:
        scripts = {tuple(request.prompt_ids): said(wanted[request.id])[0] for request in requests()}
        engine.use(DraftHost(ScriptedDrafter(scripts, VOCAB, accuracy=0.8), VOCAB, 10.0), 6)
    batches = watched(engine)
    found = run(engine, requests())
    assert {name: said(events) for name, events in found.items()} == {
        name: said(events) for name, events in wanted.items()
    }
    judged = [len(batch.logit_rows) for batch in batches]
    assert 8 <= max(judged) <= 11, "a prompt alone has its own row and the seven that are shared"
    assert max(len(batch.rows.parents) for batch in batches) > 11, "prompts that are not scored go on as before"


@pytest.mark.parametrize("kept", [None, 5])
@given(
    num_prompt=st.integers(1, 40),
    num_output=st.integers(0, 3),
    cached=st.integers(0, 39),
    scored=st.integers(0, 40),
    room=st.integers(0, 50),
)
@settings(max_examples=300)
def test_the_longest_chunk_for_so_many_rows(
    kept: int | None, num_prompt: int, num_output: int, cached: int, scored: int, room: int
) -> None:
    """Counted row by row: a row has logits if the next token is in the prompt and not scored yet, or if it is the last
    of all. All of a prompt is scored before there is output."""
    tokens = list(range(num_prompt + num_output))
    seq = Sequence("r", 0, tokens, num_prompt, SamplingParams(prompt_logprobs=kept), 0, 99)
    seq.cached = min(cached, len(tokens) - 1)
    seq.prompt_logprobs = [None] * (num_prompt if num_output else min(scored, num_prompt))

    def rows(count: int) -> int:
        nexts = range(seq.cached + 1, seq.cached + count + 1)
        wanted = range(len(seq.prompt_logprobs), num_prompt) if kept is not None else range(0)
        return sum(token in wanted or token == len(tokens) for token in nexts)

    left = len(tokens) - seq.cached
    for count in range(1, left + 1):
        assert num_shared_rows(seq, count) == max(0, rows(count) - 1)
    most = min(left, most_tokens(seq, room))
    assert most >= 1
    assert max(0, rows(most) - 1) <= room
    assert most == left or rows(most + 1) - 1 > room


@pytest.mark.parametrize(("vocab", "seqs", "tokens", "rows"), [(49152, 16, 512, 512), (151_936, 16, 512, 220)])
def test_how_many_rows_have_logits_at_default_settings(vocab: int, seqs: int, tokens: int, rows: int) -> None:
    assert sizing.logit_rows(vocab, seqs, tokens) == rows
    assert sizing.logit_rows(vocab, seqs, 8192) * 4 * vocab <= 2**27
    assert sizing.logit_rows(vocab, 4096, 8192) == 8192
    assert sizing.logit_rows(vocab, 16, 16) == 16


@pytest.mark.parametrize("quantization", ["int8", "none"])
def test_what_a_step_holds_is_reckoned_with_when_the_cache_is_sized(tiny: Path, quantization: str) -> None:
    """All buffers of a recorded step, and a second set of logits."""
    config = EngineConfig(model=str(tiny), quantization=quantization, dtype="float32", max_model_len=160)
    runner = local(build(config).engine.executor).runner
    recordings = runner._captured._recordings.values()
    if not recordings:
        pytest.skip("Only native kernels hold a step's buffers.")
    held = sum(buffer.nbytes for each in recordings for buffer in each.recording.buffers.values())  # type: ignore[attr-defined]
    logits = 4 * runner.max_logit_rows * VOCAB
    spec = runner.model.spec  # type: ignore[attr-defined]
    taken = sizing.step_bytes(config.max_num_batched_tokens, spec.step_width, runner.max_logit_rows, VOCAB)
    assert held + logits <= taken <= 3 * (held + logits)


PROGRAM = """
import json, resource, sys, time
from specserve.config import EngineConfig
from specserve.engine.build import build
from specserve.engine.request import Request
from specserve.types import SamplingParams

engine = build(EngineConfig(model=sys.argv[1], kv_cache_gib=0.1)).engine
ids = [i * 7 % 280 for i in range(600)]
found = []
for name, asked in (("plain", {}), ("scored", {"prompt_logprobs": 20})):
    engine.add(Request(id=name, prompt_ids=ids, params=SamplingParams(temperature=0, max_tokens=1, **asked)))
    longest = 0.0
    while engine.has_work:
        begun = time.thread_time()
        engine.step()
        longest = max(longest, time.thread_time() - begun)
    found.append((longest, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024))
print(json.dumps(found))
"""


def test_scoring_a_prompt_takes_neither_gigabytes_nor_seconds(tmp_path: Path) -> None:
    """What lm-eval sends, at default settings, for a model with a vocabulary of 152k: a step of it took 7 s of the
    engine's thread and 4 GB where 512 rows were scored at a time, in passes over all of them."""
    folder = write_tiny_model(
        tmp_path / "wide", "llama", vocab_size=151_936, hidden_size=32, intermediate_size=64,
        max_position_embeddings=1024,
    )  # fmt: skip
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(folder)], capture_output=True, text=True, check=True)
    (_, before), (seconds, after) = json.loads(done.stdout)
    assert after - before < 400, "MiB"
    assert seconds < 2.0
