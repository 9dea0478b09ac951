"""Tiny SentencePiece models, trained on sentences that stand here, and folders with their files."""

from __future__ import annotations

import io
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

SENTENCES = (
    "the engine drafts a token and the target verifies it in one step",
    "a draft that stands is kept and a draft that does not is dropped",
    "every step is a verify step, and the text is the same with any drafter",
    'print("hello, world")  # two  spaces and [brackets] {"name": 12.5}',
    "the cat sat on the mat; the other cat sat on the other mat.",
    "streams of tokens end at a stop string, or at the end of the text",
    "naïve café, straße, 日本語のテキスト、日本の日本語",
)
HOSTILE = [
    "",
    "a",
    " ",
    "   ",
    " the cat",
    "the cat ",
    "  two  spaces  ",
    "\n\t\x00\x7f\r\n",
    "👩‍👩‍👧 ё 日本語",
    "\u2581\u2581a\u2581",
    "e\u0301\u0323 \u200b\ufeff\u00a0\u3000",
    "\U0010ffff\ufffe",
    "ﬁ Å Ⅷ ｆｕｌｌ",
    "[brackets] <eoh>",
]


@cache
def trained(kind: str, byte_fallback: bool, symbols: tuple[str, ...] = (), **options: Any) -> bytes:
    """The file of a model. Skips the test where sentencepiece is not installed."""
    spm = pytest.importorskip("sentencepiece")
    written = io.BytesIO()
    settings = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, **options}
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES * 4),
        model_writer=written,
        vocab_size=420 if byte_fallback else 160,
        model_type=kind,
        byte_fallback=byte_fallback,
        character_coverage=0.98,
        user_defined_symbols=list(symbols),
        hard_vocab_limit=False,
        minloglevel=2,
        **settings,
    )
    return written.getvalue()


def write(folder: Path, model: bytes, kind: str = "llama", **files: Any) -> Path:
    """A folder with tokenizer.model, and other files by name, which are JSON."""
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.model").write_bytes(model)
    for name, content in {"config": {"model_type": kind}, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(content), "utf-8")
    return folder


def processor(model: bytes) -> Any:
    return pytest.importorskip("sentencepiece").SentencePieceProcessor(model_proto=model)
