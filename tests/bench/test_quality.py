"""Perplexity against float32 on windows of a text: exact where nothing is rounded, by hand where it can be."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from specserve.bench import quality as module
from specserve.bench.quality import Scores, quality, quality_table
from specserve.bench.text import load_text, prompt, windows
from specserve.cli.main import run
from specserve.errors import ConfigError, EngineError, InputError
from specserve.llm import LLM
from specserve.models.loader import load_model
from specserve.ops import choice
from specserve.testing import Feed, PagedDecoder, tiny_tokenizer, write_tiny_model
from specserve.types import TokenLogprobs

SIZE, TOKENS = 40, 150
KEYS = {"model", "device", "kernels", "windows", "tokens", "reference", "runs", "interrupted"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model", "llama")


def options(folder: Path, **more: Any) -> dict[str, Any]:
    return {"model": str(folder), "kv_cache_gib": 0.02, "max_model_len": 512, "threads": 1, **more}


def cut(llm: LLM) -> list[list[int]]:
    return windows(llm.tokenizer, load_text()[: 16 * TOKENS], SIZE, TOKENS)


@pytest.fixture
def native() -> None:
    pytest.importorskip("specserve.kernels._native", reason="Built without native kernels.")


@pytest.mark.parametrize("kernels", ["native", "without_native"])
@pytest.mark.parametrize("batched", [512, 16])
def test_float32_against_itself_is_exactly_one(
    folder: Path, kernels: str, batched: int, request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue(kernels)
    found = quality(options(folder, dtype="float32", max_num_batched_tokens=batched, max_num_seqs=4), ["none"], cut)
    assert set(found) == KEYS
    (only,) = found["runs"]
    assert (only["ratio"], only["top1_agreement"]) == (1.0, 1.0)
    assert only["perplexity"] == found["reference"]["perplexity"]
    assert (only["dtype"], only["quantization"]) == ("float32", "none")
    assert found["windows"] == 4
    assert found["tokens"] == TOKENS - 4  # the first of each window has nothing before it


def test_perplexity_is_that_of_the_logits(folder: Path, without_native: None) -> None:
    """Worked out in float64 from a decoder driven by hand."""
    found = quality(options(folder), ["none"], cut)
    ops = choice.choose_ops(torch.device("cpu"), "float32", "none", 1)
    logprobs: list[float] = []
    for ids in windows(TinyEncoder(), load_text()[: 16 * TOKENS], SIZE, TOKENS):
        (logits,) = PagedDecoder(load_model(folder, ops), 1, 64).step(Feed(0, ids + [0] * (-len(ids) % 4)))
        laws = logits.double().log_softmax(-1)
        logprobs += [float(laws[i, token]) for i, token in enumerate(ids[1:])]
    expected = math.exp(-sum(logprobs) / len(logprobs))
    assert found["reference"]["perplexity"] == pytest.approx(expected, rel=1e-5)


def test_rounding_costs_something_and_is_told_apart(folder: Path, native: None) -> None:
    found = quality(options(folder, dtype="bfloat16"), ["none", "int8", "int4"], cut)
    assert [(r["dtype"], r["quantization"]) for r in found["runs"]] == [
        ("bfloat16", "none"),
        ("bfloat16", "int8"),
        ("bfloat16", "int4"),
    ]
    base = found["reference"]["perplexity"]
    assert len({base, *(r["perplexity"] for r in found["runs"])}) == 4
    assert all(r["ratio"] == r["perplexity"] / base for r in found["runs"])
    agreement = [r["top1_agreement"] for r in found["runs"]]
    assert 1 > agreement[0] > agreement[2] > 0
    json.dumps(found)


def test_quantizations_alone_leave_activations_in_float32(folder: Path, native: None) -> None:
    (only,) = quality(options(folder, dtype="float32"), ["int8"], cut)["runs"]
    assert only["dtype"] == "float32"
    assert only["ratio"] != 1.0


def test_progress_counts_every_window_of_every_run(folder: Path) -> None:
    told: list[tuple[str, int]] = []
    quality(options(folder, dtype="float32"), ["none"], cut, lambda weights, total: told.append((weights, total)))
    assert told == [("float32", 8)] * 8


def test_scores_by_hand() -> None:
    first = Scores([math.log(0.5), math.log(0.125)], [3, 4])
    assert first.perplexity == pytest.approx(4.0)
    assert first.agreement(Scores([0.0, 0.0], [3, 5])) == 0.5
    with pytest.raises(ValueError, match="shorter"):
        first.agreement(Scores([0.0], [3]))


class Says:
    """An LLM that says the same of every prompt."""

    def __init__(self, logprob: float, reason: str = "length") -> None:
        entry = TokenLogprobs(7, logprob, 2, {9: -0.1})
        end = SimpleNamespace(finish_reason=reason, error="why")
        self.output = SimpleNamespace(prompt_logprobs=[None, entry, entry], outputs=[end])

    def generate(self, prompts: Any, params: Any) -> list[Any]:
        assert (params.prompt_logprobs, params.max_tokens, params.temperature) == (1, 1, 0.0)
        return [self.output]


def test_the_likeliest_token_is_not_the_one_that_came() -> None:
    scores = module._score(Says(-2.5), [[1, 2, 3]], lambda: None)  # type: ignore[arg-type]
    assert (scores.logprobs, scores.best) == ([-2.5, -2.5], [9, 9])


@pytest.mark.parametrize(("fake", "message"), [(Says(math.nan), "NaN"), (Says(-1.0, "error"), "why")])
def test_a_model_that_fails_is_no_figure(fake: Says, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        module._score(fake, [[1, 2, 3]], lambda: None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("quantizations", "message"),
    [(["int9"], "int8"), ([], "at least one"), (["none", "none"], "each once"), (["none", "int16"], "int16")],
)
def test_wrong_quantizations_cost_no_load(
    quantizations: list[str], message: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LLM", None)
    with pytest.raises(ConfigError, match=message):
        quality(options(folder), quantizations, cut)


def test_weights_that_the_kernels_lack_cost_no_load(
    folder: Path, without_native: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LLM", None)
    with pytest.raises(
        ConfigError,
        match=r"int8\. cpu needs .*C\+\+ compiler .*reference has no int8 weights",
    ):
        quality(options(folder), ["none", "int8"], cut)


def test_a_window_longer_than_the_context_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="A window of 40 tokens is more than the 39"):
        quality(options(folder, max_model_len=40), ["none"], cut)
    assert quality(options(folder, max_model_len=41, dtype="float32"), ["none"], cut)["windows"] == 4


class TinyEncoder:
    """The tiny models' tokenizer; with `bos_id` one that wants it at the beginning."""

    def __init__(self, bos_id: int | None = None) -> None:
        self.bos_id = bos_id
        self.backend = tiny_tokenizer()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        opening = [self.bos_id] if self.bos_id is not None and add_special_tokens else []
        return opening + list(self.backend.encode(text).ids)


@given(st.integers(2, 30), st.integers(2, 60), st.integers(0, 40), st.sampled_from([None, 1]))
def test_windows_are_the_text_in_order(size: int, num_tokens: int, length: int, bos_id: int | None) -> None:
    encoder = TinyEncoder(bos_id)
    text = "".join(chr(97 + i * 7 % 26) for i in range(length))
    ids = encoder.encode(text, add_special_tokens=False)[:num_tokens]
    if size > num_tokens:
        with pytest.raises(ConfigError, match=f"The window is {size}"):
            windows(encoder, text, size, num_tokens)
        return
    if len(ids) < 2:
        with pytest.raises(InputError, match=f"{len(ids)} tokens"):
            windows(encoder, text, size, num_tokens)
        return
    pieces = windows(encoder, text, size, num_tokens)
    opening = [] if bos_id is None else [bos_id]
    assert all(piece[: len(opening)] == opening for piece in pieces)
    bare = [piece[len(opening) :] for piece in pieces]
    assert all(len(piece) == size for piece in bare[:-1]) and 2 <= len(bare[-1]) <= size
    whole = list(itertools.chain.from_iterable(bare))
    assert whole == ids[: len(whole)]
    assert len(ids) - len(whole) == (1 if len(ids) % size == 1 else 0)


def test_a_tokenizer_with_a_bos_that_it_does_not_write_gets_none() -> None:
    encoder = TinyEncoder(1)
    encoder.encode = lambda text, add_special_tokens=True: [5, 6, 7] if text else []  # type: ignore[method-assign]
    assert windows(encoder, "x", 3, 3) == [[5, 6, 7]]


def test_the_text_that_every_python_has_is_long_and_always_the_same() -> None:
    text = load_text()
    assert text == load_text()
    assert len(text.split()) > 30_000
    assert "The simple form, " in text


def test_the_users_own_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("Grüße, Welt.", encoding="utf-8")
    assert load_text(str(tmp_path / "a.txt")) == "Grüße, Welt."
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe")
    for name in ("b.txt", "absent.txt"):
        with pytest.raises(ConfigError, match=f"{name} cannot be read"):
            load_text(str(tmp_path / name))


def test_a_prompt_has_as_many_tokens_as_asked() -> None:
    encoder = TinyEncoder(1)
    assert prompt(encoder, "xyzw", 3) == encoder.encode("xyzw")[:3]
    with pytest.raises(InputError, match="5 tokens, and the context is to have 6"):
        prompt(encoder, "xyzw", 6)


def test_the_table_fits_a_terminal(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    figures = quality(options(folder, dtype="float32"), ["none"], cut)
    Console(width=80).print(quality_table(figures))
    out = capsys.readouterr().out
    assert "…" not in out
    assert "+0.000%" in out and "100.00%" in out


def test_the_command_prints_a_table_and_writes_the_figures(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.txt").write_text("It was a dark and stormy night; the rain fell in torrents." * 3)
    engine = ("--model", str(folder), "--dtype", "float32", "--kv-cache-gib", "0.02", "--threads", "1")
    flags = ("--quantization", "none", "--text", "own.txt", "--tokens", "60", "--window", "32", "--json", "o.json")
    assert run(("bench", "quality", *engine, *flags)) == 0
    found = json.loads(Path("o.json").read_text())
    assert set(found) == KEYS | {"text", "window"}
    assert (found["tokens"], found["windows"], found["text"], found["window"]) == (58, 2, "own.txt", 32)
    assert f"{found['reference']['perplexity']:.4f}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--quantization", "none,int3"), "int3"),
        (("--quantization", "none, none"), "each once"),
        (("--text", "absent.txt"), "absent.txt"),
        (("--max-num-seqs", "4"), "--max-num-seqs"),
        (("--window", "0"), "--window"),
        (("--tokens", "1.5"), "not a whole number"),
    ],
)
def test_the_command_refuses(
    flags: tuple[str, ...],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(("bench", "quality", *flags)) == 2
    assert message in capsys.readouterr().err
