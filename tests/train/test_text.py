"""What the target writes: the same whenever the writer is killed, and no answer twice or missing."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from specserve.async_llm import AsyncLLM
from specserve.errors import ConfigError, InputError
from specserve.train.batches import Answer, plan_batches
from specserve.train.config import TrainingOptions
from specserve.train.prompts import Jobs, Prompts, TrainingPrompt, read_prompts
from specserve.train.text import INDEX, WrittenText
from specserve.train.vocabulary import choose_ids, count_outputs, offsets
from specserve.train.writing import write_text

IDENTITY = {"seed": 0}
VOCAB = 300


@pytest.fixture(scope="module")
def prompts(prompt_file: Path) -> Prompts:
    return read_prompts(prompt_file)


def written(folder: Path) -> tuple[bytes, bytes]:
    return (folder / "tokens.bin").read_bytes(), (folder / "index.bin").read_bytes()


def write(folder: Path, tiny: Path, prompts: Prompts, tokens: int | None, streams: int = 4, fail: int = 0) -> None:
    """Write text to the end, or raise KeyboardInterrupt behind `fail` answers."""
    jobs = Jobs(prompts, (0.0, 1.0), 7)

    async def run() -> None:
        with WrittenText(folder, IDENTITY, VOCAB) as text:
            if fail:
                append, left = text.append, [fail]

                def failing(*answer: object) -> None:
                    if not left[0]:
                        raise KeyboardInterrupt
                    left[0] -= 1
                    append(*answer)  # type: ignore[arg-type]

                text.append = failing  # type: ignore[method-assign]
            engine = {"device": "cpu", "dtype": "float32", "quantization": "none", "max_model_len": 96}
            async with AsyncLLM(str(tiny), drafter="none", max_num_seqs=streams, **engine) as llm:
                await write_text(llm, text, prompts, jobs, (12, 96), streams, tokens, print)

    asyncio.run(run())


@pytest.mark.parametrize("count", [5, Jobs.GROUP, 2 * Jobs.GROUP + 40])
def test_a_turn_answers_a_group_of_prompts(count: int) -> None:
    temperatures = (0.0, 0.7, 1.0)
    prompts = Prompts([TrainingPrompt(str(i), "all") for i in range(count)])
    jobs = list(Jobs(prompts, temperatures, 7))
    assert len({job.seed for job in jobs}) == len(jobs) == 3 * count
    groups = [min(Jobs.GROUP, count - first) for first in range(0, count, Jobs.GROUP)]
    for first, size in zip(np.cumsum([0, *groups]) * 3, groups, strict=False):
        turns = [jobs[first + turn * size : first + (turn + 1) * size] for turn in range(3)]
        for turn in turns:
            assert [job.prompt for job in turn] == [job.prompt for job in turns[0]]
            counts = [sum(job.temperature == each for job in turn) for each in temperatures]
            assert max(counts) - min(counts) <= 1
        assert all(sorted(job.temperature for job in jobs) == [0, 0.7, 1] for jobs in zip(*turns, strict=True))
    assert {job.prompt for job in jobs} == set(range(count))


def test_text_is_the_same_after_kills(tiny: Path, prompts: Prompts, tmp_path: Path) -> None:
    write(tmp_path / "whole", tiny, prompts, None)
    for fail in (3, 9):
        with pytest.raises(KeyboardInterrupt):
            write(tmp_path / "killed", tiny, prompts, None, streams=2, fail=fail)
    with (tmp_path / "killed/tokens.bin").open("ab") as file:
        file.write(b"half an answer")
    with (tmp_path / "killed/index.bin").open("ab") as file:
        file.write(b"half a record")
    write(tmp_path / "killed", tiny, prompts, None)
    assert written(tmp_path / "killed") == written(tmp_path / "whole")
    index = np.frombuffer(written(tmp_path / "whole")[1], INDEX)
    assert len(index) == 2 * len(prompts.prompts)
    assert {(int(r["prompt"]), float(r["temperature"])) for r in index} == {
        (prompt, temperature) for prompt in range(len(prompts.prompts)) for temperature in (0.0, 1.0)
    }


def test_writing_stops_at_tokens_and_goes_on(tiny: Path, prompts: Prompts, tmp_path: Path) -> None:
    for tokens in (30, 100):
        write(tmp_path, tiny, prompts, tokens)
        with WrittenText(tmp_path, IDENTITY, VOCAB) as text:
            assert tokens <= text.num_output_tokens < tokens + 12
    whole = tmp_path / "whole"
    write(whole, tiny, prompts, 100)
    assert written(tmp_path) == written(whole)


def test_a_record_whose_tokens_are_damaged_is_dropped(tmp_path: Path) -> None:
    with WrittenText(tmp_path, IDENTITY, VOCAB) as text:
        text.append(0, 0.0, [1, 2], [3])
        text.append(1, 0.7, [4], [5, 299])
    content = bytearray((tmp_path / "tokens.bin").read_bytes())
    content[-1] ^= 1
    (tmp_path / "tokens.bin").write_bytes(content)
    with WrittenText(tmp_path, IDENTITY, VOCAB) as text:
        assert len(text) == text.num_output_tokens == 1
        assert text.tokens().tolist() == [1, 2, 3]
        text.append(1, 0.7, [4], [5, 299])
    with WrittenText(tmp_path, IDENTITY, VOCAB) as text:
        assert text.tokens().tolist() == [1, 2, 3, 4, 5, 299]


def test_text_has_one_writer_and_one_origin(tmp_path: Path) -> None:
    with WrittenText(tmp_path, IDENTITY, VOCAB), pytest.raises(ConfigError, match="another process"):
        WrittenText(tmp_path, IDENTITY, VOCAB)
    with pytest.raises(ConfigError, match="seed was 0 and is now 1"):
        WrittenText(tmp_path, {"seed": 1}, VOCAB)


def test_prompts_that_leave_no_room_get_no_answer(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "Hi"}\n{"prompt": "' + "long " * 200 + '"}\n', "utf-8")
    write(tmp_path / "text", tiny, read_prompts(path), None)
    with WrittenText(tmp_path / "text", IDENTITY, VOCAB) as text:
        assert {(int(r["prompt"]), bool(r["num_output"])) for r in text.records} == {(0, True), (1, False)}


def test_prompts_may_be_gzipped_and_turns(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"turns": ["a", "b"], "category": "x"}\n\n{"prompt": "c"}\n{"prompt": "a"}\n'))
    assert [(p.text, p.category) for p in read_prompts(path).prompts] == [("a", "x"), ("c", "all")]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has 0 prompts"),
        (b'{"prompt": "a"}\n{"ask": 1}\n', "line 2"),
        (b'{"prompt": ""}\n', "must be text"),
        (b"\xff", "cannot be read"),
        (b"\x1f\x8bnot gzip", "cannot be read"),
    ],
)
def test_unreadable_prompts(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(content)
    with pytest.raises(InputError, match=message):
        read_prompts(path)


def test_a_missing_file_of_prompts(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        read_prompts(tmp_path / "none.jsonl")


def test_held_out_prompts_do_not_depend_on_the_others(prompts: Prompts) -> None:
    big = Prompts([*prompts.prompts])
    assert big.held_out
    many = read_prompts_of(3000)
    half = Prompts(many.prompts[1500:])
    assert {i + 1500 for i in half.held_out} == {i for i in many.held_out if i >= 1500}
    assert 30 <= len(many.held_out) <= 90


def read_prompts_of(count: int) -> Prompts:
    from specserve.train.prompts import TrainingPrompt

    return Prompts([TrainingPrompt(f"prompt {n}", "all") for n in range(count)])


def test_draft_ids_are_the_most_frequent_and_the_special_ones() -> None:
    answers = [Answer(np.array([9, 9, 9, 5, 5, 3, 2]), 3, "all"), Answer(np.array([8, 3, 5]), 1, "all")]
    counts = count_outputs(answers, 12)
    assert counts.tolist() == [0, 0, 1, 2, 0, 3, 0, 0, 0, 0, 0, 0]
    ids = choose_ids(counts, 4, [11, 10**6])
    assert ids.tolist() == [2, 3, 5, 11]
    assert (np.arange(4) + offsets(ids)).tolist() == ids.tolist()
    assert choose_ids(counts, 100, []).tolist() == list(range(12))


def test_batches_have_every_answer_once_an_epoch() -> None:
    lengths = np.random.default_rng(0).integers(3, 60, 100).tolist()
    plan = plan_batches(lengths, 2, 128, seed=1)
    seen = [i for batch in plan for i in batch]
    assert sorted(seen) == sorted([*range(100), *range(100)])
    assert all(len(batch) == 1 or len(batch) * max(lengths[i] for i in batch) <= 128 for batch in plan)
    assert plan == plan_batches(lengths, 2, 128, seed=1) != plan_batches(lengths, 2, 128, seed=2)
    assert len(plan_batches(lengths, 0.5, 128, seed=1)) < len(plan) / 3


def test_wrong_options(options: Callable[..., TrainingOptions]) -> None:
    with pytest.raises(ConfigError, match="--max-length is 16; it must be above max_tokens"):
        options(max_length=16)
    with pytest.raises(ConfigError, match="--temperature"):
        options(temperatures=())
