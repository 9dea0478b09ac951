"""Builds tokenizer.json, tokenizer_config.json and generation_config.json from the metadata of a GGUF file.

How text is split before merging is only named in a GGUF (`tokenizer.ggml.pre`) and has to be known for byte-level
vocabularies. Sentencepiece vocabularies have scores in place of merges, which are recovered from them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from specserve.checkpoint.gguf_file import GGUFFile
from specserve.errors import ModelError, unknown

# Token types of tokenizer.ggml.token_type.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_SPACE = "\u2581"  # how sentencepiece writes one

# What ends a document or a turn under any chat format; a file's own eos, eot and eom ids come on top.
END_TOKENS = frozenset(
    ["</s>", "<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>"]
)


def _digits() -> pre_tokenizers.PreTokenizer:
    """Every digit alone, the rest as GPT-2 splits it (SmolLM, StarCoder)."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _split(*patterns: str) -> Callable[[], pre_tokenizers.PreTokenizer]:
    """Each splits what those before it left."""

    def build() -> pre_tokenizers.PreTokenizer:
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns]
        return pre_tokenizers.Sequence([*splits, byte_level])

    return build


# The published splitting rules of cl100k (Llama 3 keeps its groups of up to three digits, Qwen 2 splits every digit),
# of o200k and of Tekken (which tell upper from lower case; Tekken has no contractions), of Falcon and of BLOOM.
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _TAIL
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
_O200K = _CASED.replace("|", _CONTRACTION + "?|") + _CONTRACTION + r"?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _TAIL
_FALCON = (
    r"[\p{P}\$\+<=>\^~\|`]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    r"[0-9][0-9][0-9]",
)
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_TEKKEN = _CASED + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _TAIL


@dataclass(frozen=True, slots=True)
class _Splitting:
    """What one `tokenizer.ggml.pre` stands for. `whole_words`: a word that is in the vocabulary is taken without
    merging. `adds_bos`: what holds when the file does not say."""

    pre_tokenizer: Callable[[], pre_tokenizers.PreTokenizer]
    whole_words: bool = False
    adds_bos: bool = False
    composes: bool = False  # text is brought to Unicode's composed form (NFC) first


_LLAMA3 = _Splitting(_split(_WORDS % r"\p{N}{1,3}"), whole_words=True, adds_bos=True)
_QWEN2 = _Splitting(_split(_WORDS % r"\p{N}"), composes=True)
_CL100K = _Splitting(_split(_WORDS % r"\p{N}{1,3}"))
_NEOX = _Splitting(_gpt2, composes=True)
_BLOOM_LIKE = _Splitting(_split(_BLOOM))
SPLITTINGS = {
    "gpt-2": _Splitting(_gpt2),
    "mpt": _NEOX,
    "olmo": _NEOX,
    "smollm": _Splitting(_digits),
    "starcoder": _Splitting(_digits),
    "refact": _Splitting(_digits),
    "minerva-7b": _Splitting(_digits),
    "falcon": _Splitting(_split(*_FALCON)),
    "bloom": _BLOOM_LIKE,
    "poro-chat": _BLOOM_LIKE,
    "gpt3-finnish": _BLOOM_LIKE,
    "dbrx": _CL100K,
    "smaug-bpe": _CL100K,
    "chatglm-bpe": _CL100K,
    "glm4": _CL100K,
    "gpt-4o": _Splitting(_split(_O200K)),
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _Splitting(_split(_TEKKEN), whole_words=True, adds_bos=True),
}


def tokenizer_files(file: GGUFFile) -> dict[str, str]:
    """The three files, by name. Raises ModelError for a kind of vocabulary or splitting unknown here, or when a control
    token does not survive."""
    kind = str(file.require("tokenizer.ggml.model"))
    if kind not in _BUILDERS:
        raise ModelError(f"{file.path}: " + unknown("tokenizer.ggml.model", kind, _BUILDERS))
    tokenizer = _BUILDERS[kind](file)
    tokenizer.add_tokens(_added_tokens(file, tokenizer))
    tokenizer.post_processor = _post_processor(file)
    _check(file, tokenizer)
    return {
        "tokenizer.json": tokenizer.to_str(pretty=True),
        "tokenizer_config.json": as_json(_tokenizer_config(file)),
        "generation_config.json": as_json(generation_config(file)),
    }


def _splitting(file: GGUFFile) -> _Splitting:
    name = str(file.require("tokenizer.ggml.pre"))
    if name not in SPLITTINGS:
        raise ModelError(
            f"{file.path}: "
            + unknown("tokenizer.ggml.pre", name, SPLITTINGS)
            + " Text would be split wrongly: convert "
            "the model anew with a llama.cpp that knows its splitting, or use its Hugging Face folder."
        )
    return SPLITTINGS[name]


def _byte_level(file: GGUFFile) -> Tokenizer:
    splitting = _splitting(file)
    vocab = {token: index for index, token in enumerate(file.strings("tokenizer.ggml.tokens"))}
    merges: list[Any] = [tuple(merge.split(" ", 1)) for merge in file.strings("tokenizer.ggml.merges")]
    try:
        model = models.BPE(vocab=vocab, merges=merges, ignore_merges=splitting.whole_words)
    except Exception as error:  # tokenizers raises bare Exceptions
        raise ModelError(f"{file.path}: its vocabulary and merges do not fit together: {error}.") from error
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = splitting.pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    if splitting.composes:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _sentencepiece(file: GGUFFile) -> Tokenizer:
    """Pieces are merged by the score of what they become, as sentencepiece does it."""
    typed, has_prefix = _typed_tokens(file), bool(file.metadata.get("tokenizer.ggml.add_space_prefix", True))
    scores = file.require("tokenizer.ggml.scores")
    if not isinstance(scores, np.ndarray) or scores.dtype.kind != "f" or len(scores) != len(typed):
        raise ModelError(f"{file.path}: tokenizer.ggml.scores is no list of {len(typed)} numbers.")
    pieces = [token if kind in (_NORMAL, _USER_DEFINED) else "" for token, kind in typed]
    model = models.BPE(
        vocab={token: index for index, (token, _) in enumerate(typed)},
        merges=_merges(pieces, scores.tolist()),
        unk_token=next((token for token, kind in typed if kind == _UNKNOWN), None),
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    scheme = "first" if has_prefix else "never"
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme=scheme, split=False)
    steps: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if has_prefix else steps)
    return tokenizer


def _merges(pieces: list[str], scores: list[float]) -> list[tuple[str, str]]:
    """Every two pieces that are a third one, that of the highest score first."""
    known = {piece: index for index, piece in enumerate(pieces) if piece}
    found: list[tuple[float, int, int, str, str]] = []
    for piece, index in known.items():
        for at in range(1, len(piece)):
            left, right = piece[:at], piece[at:]
            if left in known and right in known:
                found.append((-scores[index], known[left], known[right], left, right))
    return [(left, right) for *_, left, right in sorted(found)]


_BUILDERS = {"gpt2": _byte_level, "llama": _sentencepiece}


def _added_tokens(file: GGUFFile, tokenizer: Tokenizer) -> list[AddedToken]:
    """Control tokens are special; user-defined ones are matched whole as well and are plain text otherwise."""
    known = tokenizer.get_vocab(with_added_tokens=False)
    return [
        AddedToken(token, normalized=False, special=kind == _CONTROL)
        for token, kind in _typed_tokens(file)
        if kind == _CONTROL or (kind == _USER_DEFINED and token in known)
    ]


def _typed_tokens(file: GGUFFile) -> list[tuple[str, int]]:
    tokens, types = file.strings("tokenizer.ggml.tokens"), file.integers("tokenizer.ggml.token_type")
    if len(tokens) != len(types):
        raise ModelError(f"{file.path} has {len(tokens)} tokens and {len(types)} token types.")
    return list(zip(tokens, types, strict=True))


def _post_processor(file: GGUFFile) -> processors.PostProcessor:
    """The bos and eos tokens that go around a text, as the file's flags say."""
    flags = _adds(file)
    tokens = file.strings("tokenizer.ggml.tokens")
    ids = {role: token_id for role in flags if flags[role] and (token_id := _token_id(file, role)) is not None}
    special = {tokens[token_id]: token_id for token_id in ids.values()}
    before = [tokens[ids["bos"]]] if "bos" in ids else []
    after = [tokens[ids["eos"]]] if "eos" in ids else []
    return processors.TemplateProcessing(
        single=[*before, "$A", *after],
        pair=[*before, "$A", *after, *before, "$B", *after],
        special_tokens=list(special.items()),
    )


def _adds(file: GGUFFile) -> dict[str, bool]:
    """Whether bos and eos are added; llama.cpp's defaults where the file does not say."""
    sentencepiece = file.metadata["tokenizer.ggml.model"] == "llama"
    adds_bos = sentencepiece or _splitting(file).adds_bos
    return {
        "bos": bool(file.metadata.get("tokenizer.ggml.add_bos_token", adds_bos)),
        "eos": bool(file.metadata.get("tokenizer.ggml.add_eos_token", False)),
    }


def _check(file: GGUFFile, tokenizer: Tokenizer) -> None:
    """The vocabulary has the file's size, and every control token is read as its own id."""
    size, expected = tokenizer.get_vocab_size(), len(file.strings("tokenizer.ggml.tokens"))
    if size != expected:
        raise ModelError(f"{file.path}: its tokenizer came out with {size} tokens, and the file has {expected}.")
    for index, (token, kind) in enumerate(_typed_tokens(file)):
        if kind == _CONTROL and (ids := tokenizer.encode(token, add_special_tokens=False).ids) != [index]:
            raise ModelError(f"{file.path}: control token {token!r} has id {index}, and is read as {ids}.")


def _token_id(file: GGUFFile, key: str) -> int | None:
    """A token id of the metadata, None when the file has none; ModelError when it is not in the vocabulary."""
    token_id = file.metadata.get(f"tokenizer.ggml.{key}_token_id")
    size = len(file.strings("tokenizer.ggml.tokens"))
    if token_id is not None and not (type(token_id) is int and 0 <= token_id < size):
        raise ModelError(f"{file.path}: tokenizer.ggml.{key}_token_id is {token_id!r}, and there are {size} tokens.")
    return token_id


def end_ids(file: GGUFFile) -> list[int]:
    """Every id that ends a text: the file's eos, eot and eom ids first, then known end tokens of its vocabulary."""
    named = (_token_id(file, role) for role in ("eos", "eot", "eom"))
    stated = [token_id for token_id in named if token_id is not None]
    matched = (_CONTROL, _USER_DEFINED)
    known = [i for i, (token, kind) in enumerate(_typed_tokens(file)) if kind in matched and token in END_TOKENS]
    return list(dict.fromkeys([*stated, *known]))


def generation_config(file: GGUFFile) -> dict[str, Any]:
    ids = {"bos_token_id": _token_id(file, "bos"), "pad_token_id": _token_id(file, "padding")}
    known = {name: token_id for name, token_id in ids.items() if token_id is not None}
    return known | {"eos_token_id": end_ids(file)}


def _tokenizer_config(file: GGUFFile) -> dict[str, Any]:
    tokens = file.strings("tokenizer.ggml.tokens")
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = _token_id(file, key)
        if token_id is not None:
            config[f"{role}_token"] = tokens[token_id]
    config |= {f"add_{role}_token": added for role, added in _adds(file).items()}
    if "tokenizer.chat_template" in file.metadata:
        config["chat_template"] = file.metadata["tokenizer.chat_template"]
        if not isinstance(config["chat_template"], str):
            raise ModelError(f"{file.path}: tokenizer.chat_template is no text.")
    return config


def as_json(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"
