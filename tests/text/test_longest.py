"""How much text a token stands for: never less than it does, whatever a tokenizer is made of; and None where it cannot
be said."""

from __future__ import annotations

import unicodedata
from typing import Any

import pytest
from hypothesis import given, strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from specserve.testing import SPECIAL_TOKENS, tiny_tokenizer
from specserve.text.longest import longest_token

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


def shape() -> list[Any]:
    return [
        pytest.param(tiny_tokenizer(), id="byte-level"),
        pytest.param(sentencepiece(), id="sentencepiece"),
        pytest.param(with_part(normalizers.NFC()), id="NFC"),
        pytest.param(with_part(pre_tokenizers.Digits(individual_digits=True)), id="digits"),
        pytest.param(with_part(pre_tokenizers.Split(Regex(r"\s+|\S+"), "isolated")), id="split"),
    ]


@pytest.mark.parametrize("tokenizer", shape())
@given(
    text=st.text(max_size=200)
    | st.text(alphabet="a b<|end>\u0301\u1100\u1161\u11a8\u03b1\u0313\u0300\u0345", max_size=200)
)
def test_no_text_has_fewer_tokens(tokenizer: Tokenizer, text: str) -> None:
    longest = longest_token(tokenizer)
    assert longest is not None
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert len(ids) * longest >= len(text)


def test_the_longest_is_reached() -> None:
    """So texts of that length are no more than a token each."""
    tokenizer = tiny_tokenizer()
    longest = max(SPECIAL_TOKENS, key=len)
    assert longest_token(tokenizer) == len(longest)
    assert len(tokenizer.encode(longest * 10).ids) == 10


def test_four_characters_become_one_at_most() -> None:
    """What the factor for NFC rests on; over all of Unicode."""
    composed = (unicodedata.normalize("NFD", chr(code)) for code in range(0x110000) if not 0xD800 <= code < 0xE000)
    assert max(len(parts) for parts in composed if len(unicodedata.normalize("NFC", parts)) == 1) <= 4


def strips() -> Tokenizer:
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([AddedToken("<mask>", lstrip=True)])
    return tokenizer


@pytest.mark.parametrize(
    "tokenizer",
    [
        pytest.param(sentencepiece(byte_fallback=False), id="unknown-tokens-fuse-has-bytes"),
        pytest.param(Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>")), id="words"),
        pytest.param(strips(), id="an-added-token-takes-blanks"),
        pytest.param(with_part(normalizers.Strip()), id="strip"),
        pytest.param(with_part(normalizers.Replace(Regex(" +"), " ")), id="blanks-become-one"),
        pytest.param(with_part(normalizers.Replace("  ", " ")), id="shorter"),
        pytest.param(with_part(normalizers.NFKC()), id="NFKC"),
        pytest.param(with_part(pre_tokenizers.WhitespaceSplit()), id="blanks-are-dropped"),
        pytest.param(with_part(pre_tokenizers.Split(" ", "removed")), id="split-drops"),
    ],
)
def test_some_have_no_longest(tokenizer: Tokenizer) -> None:
    assert longest_token(tokenizer) is None
