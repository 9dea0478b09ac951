"""Builds a tokenizer.json of the model file of a SentencePiece tokenizer: BPE or unigram, with or without bytes for
characters that are no pieces, as SentencePiece itself splits texts.

Merges, which such a file leaves out, follow from its scores (specserve.checkpoint.merges). Symbols that its trainer was
told to keep whole are split off before merging, as they are there, so that no space is put after them.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from specserve.checkpoint.merges import merges_of
from specserve.checkpoint.sentencepiece_file import Piece, PieceType, SentencePieceModel, read_sentencepiece
from specserve.checkpoint.stated_tokens import StatedTokens, add_tokens, post_processor
from specserve.errors import ModelError

_log = logging.getLogger(__name__)
_SPACE = "\u2581"  # how SentencePiece writes a space
_NOT_FOUND = -1e5  # the score of pieces that SentencePiece finds in no text: less than any text's

_ALL = 1 << 16  # blanks that a text can begin with


@dataclass(frozen=True, slots=True)
class _Prefix:
    """Whether a space is put before a text, and `once`: only where it begins, and where it has none; else after each
    control token, too."""

    is_put: bool
    once: bool


def sentencepiece_tokenizer(stated: StatedTokens) -> tuple[Tokenizer, dict[str, str]]:
    """The tokenizer of tokenizer.model, and the texts of its special tokens by role. Raises ModelError for what
    tokenizer.json cannot say."""
    model = _with_stated(read_sentencepiece(stated.folder / "tokenizer.model"), stated)
    prefix = _Prefix(
        model.dummy_prefix and stated.config.get("add_prefix_space") is not False, stated.config.get("legacy") is False
    )
    is_plain = not (prefix.is_put or model.charsmap or model.squeezes_blanks)
    stated_texts = {token.content for token in stated.by_id.values()}
    whole = [p.text for p in model.pieces if p.type == PieceType.USER_DEFINED and p.text not in stated_texts]
    _check(model, whole)
    added = [text for text in whole if is_plain and _SPACE not in text and " " not in text]
    split = [text for text in whole if model.is_bpe and text not in set(added)]
    tokenizer = Tokenizer(_bpe(model, bool(split)) if model.is_bpe else _unigram(model))
    steps = _normalizers(model, prefix)
    if steps:
        tokenizer.normalizer = normalizers.Sequence(steps)
    if splits := _pre_tokenizers(prefix, split):
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits)
    tokenizer.decoder = _decoder(model, prefix)
    own = {p.text: AddedToken(p.text, normalized=False, special=True) for p in model.pieces if _is_control(p)}
    own |= {text: AddedToken(text, normalized=False, special=False) for text in added}
    add_tokens(tokenizer, stated, own)
    special = _special(model, stated)
    adds = {"bos": stated.config.get("add_bos_token", True), "eos": stated.config.get("add_eos_token", False)}
    ends = (special.get(f"{role}_token") if is_added else None for role, is_added in adds.items())
    if (around := post_processor(tokenizer, *ends)) is not None:
        tokenizer.post_processor = around
    return tokenizer, special


def _with_stated(model: SentencePieceModel, stated: StatedTokens) -> SentencePieceModel:
    """With the names that the other files give to its pieces. Raises ModelError where a name is another piece's."""
    pieces = list(model.pieces)
    names = {piece.text for piece in pieces}
    for number, token in stated.by_id.items():
        if number < len(pieces) and pieces[number].text != token.content:
            if token.content in names:
                raise ModelError(
                    f"{stated.folder}: its files give {token.content!r} the id {number}, and tokenizer.model another."
                )
            pieces[number] = Piece(token.content, 0.0, PieceType.CONTROL)
    if twice := [text for text, count in Counter(piece.text for piece in pieces).items() if count > 1]:
        raise ModelError(f"{model.path} has the piece {twice[0]!r} twice.")
    if model.byte_fallback and not names.issuperset(f"<0x{byte:02X}>" for byte in range(256)):
        raise ModelError(f"{model.path} falls back to bytes, and does not have all of them.")
    return replace(model, pieces=pieces)


def _is_control(piece: Piece) -> bool:
    return piece.type in (PieceType.CONTROL, PieceType.UNKNOWN)


def _special(model: SentencePieceModel, stated: StatedTokens) -> dict[str, str]:
    own = {"bos_token": model.bos_id, "eos_token": model.eos_id, "unk_token": model.unk_id}
    texts = {role: stated.role(role, model.pieces[i].text if i >= 0 else None) for role, i in own.items()}
    return stated.special | {role: text for role, text in texts.items() if text is not None}


def _bpe(model: SentencePieceModel, splits: bool) -> models.BPE:
    """`splits`: symbols come alone, and are found whole."""
    normal = {piece.text: -piece.score for piece in model.pieces if piece.type == PieceType.NORMAL}
    merges, unreached = merges_of(normal, normal, normal)
    ranks = Counter(rank for text, rank in normal.items() if len(text) > 1)
    equal = sum(count for count in ranks.values() if count > 1)
    if equal or unreached:
        _log.warning(
            "%s: %d pieces have a score that others have too, and %d are never merged of others. Texts with these may "
            "be split otherwise than by SentencePiece; tokenizer.json from the model's author would be better.",
            model.path,
            equal,
            len(unreached),
        )
    return models.BPE(
        vocab={piece.text: i for i, piece in enumerate(model.pieces)},
        merges=merges,
        unk_token=model.pieces[model.unk_id].text,
        fuse_unk=True,
        byte_fallback=model.byte_fallback,
        ignore_merges=splits,
    )


def _unigram(model: SentencePieceModel) -> models.Unigram:
    """Symbols to be kept whole have the best of scores."""

    def score(piece: Piece) -> float:
        if piece.type == PieceType.USER_DEFINED:
            return 0.0
        return piece.score if piece.type == PieceType.NORMAL else _NOT_FOUND

    vocab = [(piece.text, score(piece)) for piece in model.pieces]
    return models.Unigram(vocab, unk_id=model.unk_id, byte_fallback=model.byte_fallback)


def _normalizers(model: SentencePieceModel, prefix: _Prefix) -> list[normalizers.Normalizer]:
    steps: list[normalizers.Normalizer] = [normalizers.Precompiled(model.charsmap)] if model.charsmap else []
    if model.squeezes_blanks:
        steps += [normalizers.Replace(Regex(rf"\A +|[ {_SPACE}]+\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if prefix.is_put and not prefix.once:
        steps.append(normalizers.Prepend(_SPACE))
    if not (prefix.is_put and prefix.once):
        steps.append(normalizers.Replace(" ", _SPACE))
    return steps


def _check(model: SentencePieceModel, whole: Iterable[str]) -> None:
    """Raise ModelError where symbols to be kept whole would not be found as by SentencePiece, and warn of what may
    differ."""
    rules = normalizers.Precompiled(model.charsmap) if model.charsmap else None
    if changed := [text for text in whole if rules and rules.normalize_str(text) != text]:
        raise ModelError(f"{model.path} keeps {changed[0]!r} whole, which its normalization changes.")
    if not model.is_bpe and (blank := [text for text in whole if _SPACE in text]):
        raise ModelError(
            f"{model.path} is a unigram model that keeps {blank[0]!r} whole, whose place tokenizer.json cannot say."
        )
    if rules:
        _log.warning(
            "%s normalizes Unicode by rules of its own. Combining marks, and line breaks of two characters, may be "
            "read otherwise than by SentencePiece.",
            model.path,
        )


def _pre_tokenizers(prefix: _Prefix, split: Iterable[str]) -> list[pre_tokenizers.PreTokenizer]:
    steps: list[pre_tokenizers.PreTokenizer] = []
    if prefix.is_put and prefix.once:
        steps.append(pre_tokenizers.Metaspace(_SPACE, prepend_scheme="first", split=False))
    if longest_first := sorted(split, key=len, reverse=True):
        steps.append(pre_tokenizers.Split(Regex("|".join(map(re.escape, longest_first))), behavior="isolated"))
    return steps


def _decoder(model: SentencePieceModel, prefix: _Prefix) -> decoders.Decoder:
    parts: list[decoders.Decoder] = [decoders.Replace(_SPACE, " ")]
    parts += [decoders.ByteFallback()] if model.byte_fallback else []
    parts.append(decoders.Fuse())
    if prefix.is_put or model.squeezes_blanks:
        parts.append(decoders.Strip(" ", _ALL if model.squeezes_blanks else 1, 0))
    return decoders.Sequence(parts)
