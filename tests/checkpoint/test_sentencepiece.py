"""A tokenizer.json made of a SentencePiece model gives the ids and texts of SentencePiece itself."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings, strategies as st

from specserve.checkpoint.merges import merges_of
from specserve.checkpoint.sentencepiece_file import read_sentencepiece
from specserve.checkpoint.tokenizer_files import make_tokenizer, old_tokenizer
from specserve.errors import ModelError
from specserve.text.tokenizer import Tokenizer
from tests.checkpoint.sentencepiece_models import HOSTILE, SENTENCES, processor, trained, write

SYMBOLS = ("<eoh>", "<x>", "\u2581\u2581")
KINDS = [
    pytest.param(kind, fallback, symbols, id=f"{kind}-{'bytes' if fallback else 'unk'}-{len(symbols)}")
    for kind in ("bpe", "unigram")
    for fallback in (True, False)
    for symbols in ((), SYMBOLS if kind == "bpe" else SYMBOLS[:2])
]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"add_dummy_prefix": False},
    {"remove_extra_whitespaces": True},
    {"add_dummy_prefix": False, "remove_extra_whitespaces": True},
]
ALPHABET = "athesn <>eohx\u2581\n日é👩[]."
TEXTS = st.text(st.sampled_from(ALPHABET), max_size=24) | st.lists(
    st.sampled_from([*" ".join(SENTENCES).split(" "), *SYMBOLS]), max_size=8
).map(" ".join)


def made(folder: Path, model: bytes, **files: Any) -> Tokenizer:
    make_tokenizer(old_tokenizer(write(folder, model, **files)), folder)
    return Tokenizer(folder)


@pytest.mark.parametrize("options", OPTIONS, ids=["prefix", "plain", "prefix-squeezed", "squeezed"])
@pytest.mark.parametrize(("kind", "fallback", "symbols"), KINDS)
def test_ids_and_texts_are_those_of_sentencepiece(
    tmp_path_factory: pytest.TempPathFactory, kind: str, fallback: bool, symbols: tuple[str, ...], options: Any
) -> None:
    model = trained(kind, fallback, symbols, **options)
    theirs, ours = processor(model), made(tmp_path_factory.mktemp("made"), model)
    assert ours.vocab_size == theirs.vocab_size()
    assert (ours.bos_id, ours.eos_id) == (theirs.bos_id(), theirs.eos_id())
    decodes = not (options.get("remove_extra_whitespaces") and symbols)

    def same(text: str) -> None:
        ids = theirs.encode(text)
        assert ours.encode(text, add_special_tokens=False) == ids
        if decodes:
            kept = [token for token in ids if token != theirs.unk_id()]  # which they write as a question mark
            assert ours.decode(ids) == theirs.decode(kept)

    @settings(max_examples=100)
    @given(text=TEXTS)
    def check(text: str) -> None:
        assume("<s>" not in text)  # a control token here, and text there
        same(text)

    for text in HOSTILE:
        same(text)
    check()


def test_bytes_that_are_no_characters_are_replaced_and_no_others(tmp_path: Path) -> None:
    model = trained("bpe", True)
    theirs, ours = processor(model), made(tmp_path, model)
    byte = [theirs.piece_to_id(f"<0x{value:02X}>") for value in range(256)]
    for values in ([0xE6], [0x80, 0xFF], [0xFF, 0xC3, 0xA9], [0x41, 0xE2], [0xE2, 0x41]):
        ids = [theirs.piece_to_id("\u2581the"), *(byte[value] for value in values), theirs.piece_to_id("\u2581a")]
        assert b"".join(map(ours.token_bytes, ids)) == b" the" + bytes(values) + b" a"
        assert ours.decode(ids) == theirs.decode(ids)


def test_bos_eos_and_added_tokens_are_as_stated(tmp_path: Path) -> None:
    model = trained("bpe", True)
    size = processor(model).vocab_size()
    added = {str(size): {"content": "<|im_start|>", "special": True}, str(size + 1): {"content": "<tool>"}}
    config = {"tokenizer_class": "LlamaTokenizerFast", "add_eos_token": True, "added_tokens_decoder": added}
    ours = made(tmp_path, model, tokenizer_config=config, special_tokens_map={"pad_token": {"content": "<|im_start|>"}})
    the = processor(model).encode("the")
    assert ours.encode("the") == [1, *the, 2]
    assert ours.encode("<s><|im_start|>the<tool>the", add_special_tokens=False) == [1, size, *the, size + 1, *the]
    assert ours.special_ids == {0, 1, 2, size}
    assert ours.info()["pad_token"] == "<|im_start|>"
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["made_of"] == "tokenizer.model"


def test_a_piece_may_be_given_another_name(tmp_path: Path) -> None:
    """As InternLM 2 names reserved pieces."""
    model = trained("bpe", True, ("[UNUSED_1]",))
    number = processor(model).piece_to_id("[UNUSED_1]")
    config = {"added_tokens_decoder": {str(number): {"content": "<|im_end|>", "special": True}}}
    ours = made(tmp_path, model, tokenizer_config=config)
    assert ours.encode("<|im_end|>", add_special_tokens=False) == [number]
    assert number not in ours.encode("[UNUSED_1]")


def test_without_legacy_only_a_texts_beginning_has_a_space(tmp_path: Path) -> None:
    model = trained("bpe", True)
    theirs = processor(model)
    ours = made(tmp_path / "new", model, tokenizer_config={"tokenizer_class": "LlamaTokenizer", "legacy": False})
    old = made(tmp_path / "old", model, tokenizer_config={"tokenizer_class": "LlamaTokenizer"})
    bare = theirs.encode("the", out_type=str)[0].removeprefix("\u2581")
    assert [ours.decode([token]) for token in ours.encode("the</s>the")][-1] != "\u2581"
    assert b"".join(map(ours.token_bytes, ours.encode("the</s>the", False))) == b" the</s>the"
    assert b"".join(map(old.token_bytes, old.encode("the</s>the", False))) == b" the</s> the"
    assert bare == "the"


@pytest.mark.parametrize(
    ("added", "words"),
    [({"<a>": 9999}, "the id 9999"), ({"the": 1}, "tokenizer.model another"), ({"x": "y"}, "state added tokens")],
)
def test_added_tokens_that_cannot_have_their_ids_are_refused(tmp_path: Path, added: Any, words: str) -> None:
    model = message(*(piece(text) for text in ("<unk>", "<s>", "</s>", "the")))
    with pytest.raises(ModelError, match=words):
        made(tmp_path, model, added_tokens=added)


def test_normalization_of_unicode_is_said_to_be_less_exact(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = trained("unigram", True, normalization_rule_name="nmt_nfkc")
    theirs, ours = processor(model), made(tmp_path, model)
    assert "Combining marks" in caplog.text
    for text in (*SENTENCES, "ﬁ Å Ⅷ ｆｕｌｌ\u3000w \u200b x", "½ ㎏"):
        assert ours.encode(text, False) == theirs.encode(text)


def test_scores_that_several_have_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pieces = [piece("<unk>", 0.0, 2), *map(piece, "abc"), piece("ab", -1.0), piece("bc", -1.0), piece("cab", -3.0)]
    made(tmp_path, message(*pieces, trainer=b"\x18\x02"))
    assert "2 pieces have a score that others have too" in caplog.text


# --- files that are broken, written by hand ---------------------------------------------------------------------------


def field(number: int, content: bytes) -> bytes:
    return bytes([number << 3 | 2, len(content)]) + content


def piece(text: str, score: float = -1.0, kind: int = 1) -> bytes:
    kind = {"<unk>": 2, "<s>": 3, "</s>": 3}.get(text, kind)
    return field(1, text.encode()) + b"\x15" + struct.pack("<f", score) + bytes([0x18, kind])


def message(*pieces: bytes, trainer: bytes = b"\x18\x02", normalizer: bytes = b"\x20\x00") -> bytes:
    """BPE, and blanks are kept, where nothing else is said."""
    return b"".join(field(1, each) for each in pieces) + field(2, trainer) + field(3, normalizer)


UNK = piece("<unk>")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "has no pieces"),
        (b"\x0a\xff", "damaged"),
        (b"\x0a\x7fabc", "damaged"),
        (b"\x0b", "wire type 3"),
        (b"\xff" * 20, "without end"),
        (message(piece("a")), "no unknown piece"),
        (message(UNK, field(1, b"\xff")), "damaged"),
        (message(UNK, piece("a", float("nan"))), "no number"),
        (message(UNK, piece("a", kind=9)), "damaged"),
        (message(UNK, piece("a"), trainer=b"\x18\x03"), "words or characters"),
        (message(UNK, piece("a", kind=5)), "unused pieces"),
        (message(UNK, piece("a"), trainer=b"\x18\x02\xc0\x01\x01"), "spaces after words"),
        (message(UNK, piece("a"), normalizer=b"\x28\x00"), "keeps spaces"),
        (message(UNK, piece("a")) + field(5, field(2, b"x")), "was decoded"),
        (message(UNK, piece("a"), piece("a")), "twice"),
        (message(UNK, piece("a"), trainer=b"\x18\x02\x98\x02\x01"), "not have all of them"),
        (message(UNK, piece("a"), piece("\u2581\u2581", kind=4), trainer=b"\x18\x01"), "keeps '\u2581\u2581' whole"),
    ],
)
def test_files_that_are_damaged_or_not_understood_are_refused(tmp_path: Path, content: bytes, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        made(tmp_path, content)


def test_any_cut_of_a_file_is_refused_or_read(tmp_path: Path) -> None:
    content = message(UNK, piece("<s>"), piece("</s>"), piece("a"), piece("b"), piece("ab"))
    outcomes = set()
    for end in range(len(content)):
        write(tmp_path, content[:end])
        try:
            outcomes.add(len(read_sentencepiece(tmp_path / "tokenizer.model").pieces))
        except ModelError:
            outcomes.add(0)
    assert outcomes == {0, 1, 2, 3, 4, 5, 6}


def test_merges_lead_to_every_token_or_are_said_not_to() -> None:
    ranks = {"a": 9.0, "b": 9.0, "c": 9.0, "ab": 0.0, "bc": 1.0, "abc": 2.0, "bcb": 3.0, "abcb": 4.0, "xb": 5.0}
    merges, unreached = merges_of(ranks, ranks, ranks)
    assert merges == [("a", "b"), ("b", "c"), ("ab", "c"), ("bc", "b"), ("abc", "b")]
    assert unreached == ["xb"]
