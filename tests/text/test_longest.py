"""The fewest tokens that a text can have: never more than it has, whatever a tokenizer is made of; and None where it
cannot be said."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from specserve.testing import SPECIAL_TOKENS, tiny_tokenizer
from specserve.text.longest import Bound, bound


def bound_of(tokenizer: Tokenizer) -> Bound | None:
    return bound(tokenizer, max(map(len, tokenizer.get_vocab(with_added_tokens=True))))


BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def sentencepiece(**options: Any) -> Tokenizer:
    """A small tokenizer of Llama 2's kind."""
    words = ["<unk>", *BYTES, "\u2581", "a", "b", "\u2581a", "ab", "\u2581ab"]
    merges = [("\u2581", "a"), ("a", "b"), ("\u2581a", "b")]
    vocabulary = {word: index for index, word in enumerate(words)}
    model = models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, **{"byte_fallback": True, **options})
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    return tokenizer


def with_part(part: Any) -> Tokenizer:
    """The tiny byte-level tokenizer with one more normalizer or pre-tokenizer before its own."""
    tokenizer = tiny_tokenizer()
    if isinstance(part, normalizers.Normalizer):
        tokenizer.normalizer = part
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([part, tokenizer.pre_tokenizer])
    return tokenizer


def without(*characters: str, place: int = 0) -> Tokenizer:
    """The byte-level tokenizer without one byte of each of these, which it leaves out, as SmolLM2's does."""
    state = json.loads(tiny_tokenizer().to_str())
    for character in characters:
        spelled = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(character)
        del state["model"]["vocab"][spelled[0][0][place]]
    return Tokenizer.from_str(json.dumps(state))


def strips() -> Tokenizer:
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([AddedToken("<mask>", lstrip=True, rstrip=True)])
    return tokenizer


def shape() -> list[Any]:
    return [
        pytest.param(tiny_tokenizer(), id="byte-level"),
        pytest.param(sentencepiece(), id="sentencepiece"),
        pytest.param(with_part(normalizers.NFC()), id="NFC"),
        pytest.param(without("\x04", "\x06", "\U00040000"), id="bytes-are-missing"),
        pytest.param(strips(), id="an-added-token-takes-blanks"),
        pytest.param(with_part(pre_tokenizers.Digits(individual_digits=True)), id="digits"),
        pytest.param(with_part(pre_tokenizers.Split(Regex(r"\s+|\S+"), "isolated")), id="split"),
    ]


@pytest.mark.parametrize("tokenizer", shape())
@given(
    text=st.text(max_size=200)
    | st.text(alphabet="\x04\x06\U00040000ab", max_size=200)
    | st.lists(st.sampled_from(["<mask>", " ", "\n", "\u3000", "\x1c", "a"]), max_size=200).map("".join)
    | st.text(alphabet="a b<|end>\u0301\u1100\u1161\u11a8\u03b1\u0313\u0300\u0345", max_size=200)
)
def test_no_text_has_fewer_tokens(tokenizer: Tokenizer, text: str) -> None:
    found = bound_of(tokenizer)
    assert found is not None
    assert len(tokenizer.encode(text, add_special_tokens=False).ids) >= found.fewest_tokens(text)


@pytest.mark.parametrize(
    ("tokenizer", "nothing"), [(tiny_tokenizer(), ""), (without("\x04"), "\x04" * 100), (strips(), " \n" * 100)]
)
def test_the_fewest_are_reached(tokenizer: Tokenizer, nothing: str) -> None:
    """Texts of the longest token have as many, whatever counts for nothing beside them."""
    longest, found = max([*SPECIAL_TOKENS], key=len), bound_of(tokenizer)
    assert found is not None
    assert found.longest == len(longest)
    assert len(tokenizer.encode(longest * 10).ids) == found.fewest_tokens(nothing + longest * 10) == 10


def test_the_real_tokenizer_has_one(smollm2: Path) -> None:
    """It has no tokens for some bytes, and drops them."""
    found = bound_of(Tokenizer.from_file(str(smollm2 / "tokenizer.json")))
    assert found is not None
    assert found.fewest_tokens("\x04" * 1000) == 0
    assert found.fewest_tokens("a" * 1000) == -(-1000 // found.longest) > 10


def test_four_characters_become_one_at_most() -> None:
    """What the factor for NFC rests on; over all of Unicode."""
    composed = (unicodedata.normalize("NFD", chr(code)) for code in range(0x110000) if not 0xD800 <= code < 0xE000)
    assert max(len(parts) for parts in composed if len(unicodedata.normalize("NFC", parts)) == 1) <= 4


@pytest.mark.parametrize(
    "tokenizer",
    [
        pytest.param(sentencepiece(byte_fallback=False), id="unknown-tokens-fuse-has-bytes"),
        pytest.param(Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>")), id="words"),
        pytest.param(without("é", place=1), id="following-bytes-are-missing"),
        pytest.param(with_part(normalizers.Strip()), id="strip"),
        pytest.param(with_part(normalizers.Replace(Regex(" +"), " ")), id="blanks-become-one"),
        pytest.param(with_part(normalizers.Replace("  ", " ")), id="shorter"),
        pytest.param(with_part(normalizers.NFKC()), id="NFKC"),
        pytest.param(with_part(pre_tokenizers.WhitespaceSplit()), id="blanks-are-dropped"),
        pytest.param(with_part(pre_tokenizers.Split(" ", "removed")), id="split-drops"),
    ],
)
def test_some_have_none(tokenizer: Tokenizer) -> None:
    assert bound_of(tokenizer) is None
