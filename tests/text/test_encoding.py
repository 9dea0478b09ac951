"""Ids of long texts and texts of many ids: the same as of short ones, while other threads run, and what is said where a
tokenizer fails."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from tokenizers import AddedToken, Regex, Tokenizer as Backend, decoders, models, normalizers, pre_tokenizers

from specserve.errors import TextError
from specserve.server.wire.errors import wire_error
from specserve.testing import tiny_tokenizer
from specserve.text.encoding import SHORT, decode, encode

ADDED = ("<|im_start|>", "<|im_end|>", "two words", "<end>")
# Of all scripts, with what tokenizers treat in ways of its own.
PIECES = st.text(max_size=20) | st.sampled_from(
    [*ADDED, "'s", "  ", "\n\n", "12345", "e\u0301", "가각", "👩‍👩‍👧", "\u2581"]
)
TEXTS = st.lists(PIECES, max_size=12).map("".join)


def sentencepiece() -> Backend:
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "h", "i", "\u2581h", "\u2581hi"]
    merges = [("\u2581", "h"), ("\u2581h", "i")]
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = Backend(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(parts)
    backend.add_tokens([AddedToken(text, normalized=text == "<end>", lstrip=text == "two words") for text in ADDED])
    return backend


@pytest.fixture(scope="module")
def backends(smollm2: Path) -> dict[str, Backend]:
    real = Backend.from_file(str(smollm2 / "tokenizer.json"))
    return {"real": real, "byte-level": tiny_tokenizer(), "sentencepiece": sentencepiece()}


@pytest.mark.parametrize("name", ["real", "byte-level", "sentencepiece"])
@settings(max_examples=100)
@given(text=TEXTS, special=st.booleans())
def test_long_texts_have_the_ids_of_short_ones(
    backends: dict[str, Backend], name: str, text: str, special: bool
) -> None:
    """What tokenizers makes of a text, one that is just long enough included."""
    backend = backends[name]
    for whole in (text, (text or "a") * (SHORT // len(text or "a") + 1)):
        ids = backend.encode(whole, add_special_tokens=special).ids
        assert encode(backend, whole, special) == ids
        assert backend.encode_batch_fast([whole], add_special_tokens=special)[0].ids == ids
        for skip in (False, True):
            assert decode(backend, ids, skip) == backend.decode(ids, skip_special_tokens=skip)
            assert backend.decode_batch([ids], skip_special_tokens=skip) == [backend.decode(ids, skip)]


@contextmanager
def counting() -> Iterator[Callable[[], int]]:
    """A thread that counts on as often as it may run."""
    count, ends, began = 0, threading.Event(), threading.Event()

    def run() -> None:
        nonlocal count
        while not ends.wait(0.001):
            count += 1
            began.set()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        began.wait()
        yield lambda: count
    finally:
        ends.set()
        thread.join()


def test_other_threads_run_meanwhile(backends: dict[str, Backend]) -> None:
    """To encode takes half a second or more, in which one that keeps the lock lets nobody count."""
    backend, text = backends["real"], "the cat sat on the mat. " * 40_000
    with counting() as count:
        before = count()
        ids = encode(backend, text, True)
        after = count()
        assert after - before > 10
        again = decode(backend, ids, False)
        assert count() - after > 3
    assert again == text


def failing(pattern: str) -> Backend:
    backend = tiny_tokenizer()
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    return backend


@pytest.mark.parametrize("text", ["x" * 40 + "z", "ab " * SHORT + "x" * 40 + "z"], ids=["short", "long"])
def test_a_pattern_that_gives_up(text: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(TextError, match=r"tokenizer fails on this text: .*retry-limit") as caught:
        encode(failing(r"(?:x+x+)+y"), text, True)
    failure = wire_error(caught.value)
    assert (failure.status, failure.code, failure.headers["x-should-retry"]) == (500, "text_failed", "false")
    assert "panicked" in capfd.readouterr().err  # the log says where


def test_what_is_no_failure_of_a_tokenizer_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted:
        def encode(self, *_: Any, **__: Any) -> Any:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        encode(Interrupted(), "a", True)  # type: ignore[arg-type]


def test_a_server_has_no_threads_but_its_own() -> None:
    """tokenizers makes none for a long text, so a fork loses none and no warning is written."""
    program = (
        "import os; from specserve.text import encoding; from specserve.testing import tiny_tokenizer\n"
        "encoding.use_own_threads_only()\n"
        "backend, before = tiny_tokenizer(), len(os.listdir('/proc/self/task'))\n"
        "encoding.encode(backend, 'the cat ' * 1000, True)\n"
        "print(len(os.listdir('/proc/self/task')) - before)\n"
        "os._exit(0) if not os.fork() else os.wait()\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert (ran.stdout, ran.stderr) == ("0\n", "")
