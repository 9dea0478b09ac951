"""What `generate --explain` and `chat --show-drafts` print of steps whose drafts are known."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from specserve.cli.answer import Answer, write
from specserve.cli.explained import Explanation, MarkedText
from specserve.cli.main import run
from specserve.explained import Explained
from specserve.outputs import Chunk
from specserve.testing import write_tiny_model
from specserve.types import SequenceStats

SPELLED = (b"The", b" sky", b" is", b" blue", b" red", b" was", b"\n", b"!")
SMALL = ("--dtype", "float32", "--kv-cache-gib", "0.01", "--max-model-len", "512", "--drafter", "none")
Run = Callable[..., tuple[int, str, str]]


def spelled(token: int) -> bytes:
    return SPELLED[token]


def step(pieces: list[str], **more: Any) -> Chunk:
    """Of a step that drafted " sky is" and " blue" or " red" behind it, or "!\\n" before; suffix and a grammar did."""
    told = Explained(
        **{
            "room": 5, "proposed": {"suffix": 5, "jump_forward": 1}, "num_rows": 8, "seconds": 0.003,
            "tokens": [1, 2, 3, 4, 7, 6], "parents": [-1, 0, 1, 1, -1, 4],
            "sources": [["suffix", "ngram"], ["jump_forward"], ["suffix"], ["ngram"], ["suffix"], ["suffix"]],
            "path": [0, 1],
        } | more
    )  # fmt: skip
    return Chunk("r", 0, "".join(pieces), list(range(len(pieces))), explained=told, pieces=pieces)


def shown(explanation: Explanation, num_tokens: int, **stats: Any) -> list[str]:
    console = Console(width=100, file=io.StringIO())
    console.print(explanation.show(Answer("", num_tokens, SequenceStats(**stats))))
    return [" ".join(line.split()) for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]


# --- the table --------------------------------------------------------------------------------------------------------


def test_a_line_a_step_and_sums() -> None:
    chunks = [
        step(["The"], room=0, proposed={}, num_rows=12, tokens=[], parents=[], sources=[], path=[]),
        step([" sky", " is", "!"], plain_s=0.002, expected_s=0.0025, allowance_s=-0.004),
        step(["!"], room=4, proposed={}, num_rows=1, plain_s=0.002, expected_s=0.002, allowance_s=0.001, seconds=0.001,
             tokens=[], parents=[], sources=[], path=[]),
    ]  # fmt: skip
    explanation = Explanation(spelled)
    assert list(explanation.of(chunks)) == chunks
    by_source = {"suffix": [4, 1], "ngram": [2, 1], "jump_forward": [1, 1]}
    assert shown(explanation, 5, num_steps=3, by_source=by_source) == [
        "step rows proposed verified accepted tokens expected took may lose",
        "1 12 not asked 0 0 1 - 3.00 -",
        "2 8 suffix 5, jump_forward 1 6 2 3 2.50 3.00 -4.00",
        "3 1 nothing 0 0 1 2.00 1.00 1.00",
        "5 tokens in 3 steps, 1.67 tokens a step.",
        "suffix: 1 of 4 draft tokens accepted, 25%.",
        "ngram: 1 of 2 draft tokens accepted, 50%.",
        "jump_forward: 1 of 1 draft tokens accepted, 100%.",
        "2 steps of known cost took 4.0 ms. Without drafts their tokens would have taken about 8.0 ms: 4.0 ms",
        "won.",
    ]


def test_what_was_lost_and_what_is_not_known() -> None:
    lost = Explanation(spelled)
    list(lost.of([step(["!"], path=[], plain_s=0.001, expected_s=0.001, allowance_s=0.0)]))
    assert "2.0 ms lost" in " ".join(shown(lost, 1, num_steps=1))
    fixed, unknown = Explanation(spelled), Explanation(spelled)
    list(fixed.of([step(["!"])]))
    assert "with --no-adaptive drafts are not weighed" in shown(fixed, 1, num_steps=1)[-1]
    list(unknown.of([step(["!"], allowance_s=0.0)]))
    assert "was not known yet" in shown(unknown, 1, num_steps=1)[-1]


def test_a_long_answer_keeps_its_newest_steps_and_all_sums() -> None:
    explanation = Explanation(spelled)
    chunks = (step(["!"], num_rows=i, plain_s=0.002, expected_s=0.002, allowance_s=0.0) for i in range(2000))
    for _ in explanation.of(chunks):
        assert len(explanation._steps) <= 500
    lines = shown(explanation, 2000, num_steps=2000)
    assert lines[0] == "The first 1500 steps are not listed."
    assert [line.split()[:2] for line in lines[2:502]] == [[str(i), str(i - 1)] for i in range(1501, 2001)]
    assert "2000 steps of known cost took 6000.0 ms" in lines[-2]


# --- the text ---------------------------------------------------------------------------------------------------------


def marked(terminal: bool, *chunks: Chunk) -> tuple[str, str]:
    """What is written, and the legend."""
    file = io.StringIO()
    console = Console(
        file=file, width=100, force_terminal=terminal, color_system="standard" if terminal else None, highlight=False
    )
    text = MarkedText(console, spelled)
    for chunk in chunks:
        text.write(chunk)
    written = file.getvalue()
    console.print(text.legend())
    return written, file.getvalue()[len(written) :]


def test_without_colours_marks_tell() -> None:
    said = step([" sky", " is", "!"]), Chunk("r", 0, " More", [9])
    assert marked(False, *said)[0] == "[-!⏎-]{+ sky+}{= is=}[- blue-][- red-]! More"


def test_with_colours_the_text_is_bare_and_the_legend_tells() -> None:
    written, legend = marked(True, step([" sky", " is", "!"]))
    assert written == (
        "\x1b[2;9m!⏎\x1b[0m\x1b[32m sky\x1b[0m\x1b[35m is\x1b[0m\x1b[2;9m blue\x1b[0m\x1b[2;9m red\x1b[0m!"
    )
    assert legend == "drafts: \x1b[32msuffix\x1b[0m, \x1b[35mjump_forward\x1b[0m, \x1b[2;9mrejected\x1b[0m\n"


def test_text_that_was_held_back_is_written() -> None:
    """The end shows what no token of its chunk made visible."""
    last = Chunk("r", 0, "!…", [7], explained=Explained(num_rows=1), pieces=["!"])
    assert marked(False, last)[0] == "!…"


# --- the commands -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("tiny"), "llama", seed=3))


@pytest.fixture
def specserve(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")

    def call(*arguments: str) -> tuple[int, str, str]:
        status = run(arguments)
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


def test_generate_explains_what_a_grammar_forced(specserve: Run, tiny: str) -> None:
    flags = ("--model", tiny, *SMALL, "--choice", "the other stone and the other then", "--max-tokens", "60")
    _, plain, _ = specserve("generate", "hello", *flags)
    status, out, err = specserve("generate", "hello", *flags, "--no-adaptive", "--explain")
    assert (status, out) == (0, plain)
    (sums,) = re.findall(r"jump_forward: (\d+) of (\d+) draft tokens accepted", err)
    steps = [line.split() for line in err.splitlines() if re.match(r" *\d+ +\d+ +(not asked|nothing|jump)", line)]
    drafted = [row for row in steps if row[2] == "jump_forward"]
    assert (str(sum(int(row[-5]) for row in drafted)), str(sum(int(row[-6]) for row in drafted))) == sums
    assert int(sums[0]) > 5
    assert {(row[-3], row[-1]) for row in steps} == {("-", "-")}
    assert "with --no-adaptive drafts are not weighed" in err
    weighed = specserve("generate", "hello", *flags, "--adaptive", "--explain")
    assert weighed[:2] == (0, plain)
    assert re.search(r"steps of known cost took [\d.]+ ms", weighed[2])


def test_explain_is_for_one_prompt(specserve: Run, tiny: str) -> None:
    for more in (("two",), ("--json",)):
        status, _, err = specserve("generate", "one", *more, "--model", tiny, "--explain")
        assert (status, "one prompt" in err) == (2, True)


def test_chat_with_its_marks_taken_off_is_the_same_chat(
    specserve: Run, tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = []
    for more in ((), ("--show-drafts",)):
        monkeypatch.setattr("sys.stdin", io.StringIO("one two one two one two\n"))
        flags = (
            "--model",
            tiny,
            *SMALL[:-1],
            "ngram",
            "--temperature",
            "0",
            "--no-adaptive",
            "--max-tokens",
            "60",
            "--ignore-eos",
        )
        status, out, err = specserve("chat", *flags, *more)
        assert status == 0
        texts.append(out)
    assert texts[1].count("[-") > 0
    assert re.sub(r"\{\+(.*?)\+\}", r"\1", re.sub(r"\[-.*?-\]", "", texts[1]), flags=re.DOTALL) == texts[0]
    assert "drafts: " in err


def test_reasoning_goes_beside_the_answer(capsys: pytest.CaptureFixture[str]) -> None:
    """What is piped on is the answer alone."""
    chunks = [
        Chunk("r", 0, "", [1], reasoning="Hm, "),
        Chunk("r", 0, "", [2], reasoning="[so]."),
        Chunk("r", 0, "Yes", [3, 4]),
        Chunk("r", 0, ".", [5], finish_reason="stop", stats=SequenceStats()),
    ]
    said = write(chunks)
    assert (said.text, said.reasoning, said.num_tokens) == ("Yes.", "Hm, [so].", 5)
    assert capsys.readouterr() == ("Yes.\n", "Hm, [so].\n\n")
