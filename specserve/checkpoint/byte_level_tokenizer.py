"""Builds a tokenizer.json of the older files of byte-level tokenizers: vocab.json with merges.txt, as GPT-2 and many
after it have, and the ranks of tiktoken, as the first Qwen has.

How text is split before merging stands in none of these files: the tokenizer's class says it, and for some that say
GPT2Tokenizer and split otherwise the kind of model.
"""

from __future__ import annotations

import base64
import binascii
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from specserve import files
from specserve.checkpoint.byte_alphabet import byte_alphabet
from specserve.checkpoint.folder import read_json
from specserve.checkpoint.gguf_tokenizer import SPLITTINGS
from specserve.checkpoint.merges import merges_of
from specserve.checkpoint.stated_tokens import StatedTokens, add_tokens, post_processor
from specserve.errors import ModelError

_MOST_BYTES = 1 << 26
_END = "<|endoftext|>"  # what GPT-2 begins, ends and pads with, where no file says otherwise
_WITH_DIGITS_APART = frozenset(["gpt_bigcode", "starcoder2", "granite", "granitemoe"])
_SPLIT_ELSEWHERE = {"olmo2": "OLMo 2", "olmo3": "OLMo 3"}  # their files say GPT2Tokenizer, too
_WITH_BOS = frozenset(["opt"])
_CHAT_ENDS = ("<|im_start|>", "<|im_end|>")
_NUM_EXTRAS = 205  # of Qwen's further control tokens

# The format of Qwen's chats, which its own code has in place of a template.
_CHATML = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def gpt2_tokenizer(stated: StatedTokens, kind: str) -> tuple[Tokenizer, dict[str, str]]:
    """The tokenizer of vocab.json and merges.txt for a model of this `model_type`, and the texts of its special tokens
    by role. Raises ModelError for files that are broken, and for kinds of models that split in a way that they do not
    say."""
    if kind in _SPLIT_ELSEWHERE:
        raise ModelError(
            f"{stated.folder} has no tokenizer.json, which alone says how {_SPLIT_ELSEWHERE[kind]} splits text. Get "
            "that file from the model's author."
        )
    tokenizer = _of_merges(stated)
    blank = bool(stated.config.get("add_prefix_space", False))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=blank, use_regex=True)
    if kind in _WITH_DIGITS_APART:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    else:
        tokenizer.pre_tokenizer = byte_level
    return _finished(tokenizer, stated, adds_bos=bool(stated.config.get("add_bos_token", kind in _WITH_BOS)))


def qwen2_tokenizer(stated: StatedTokens, kind: str) -> tuple[Tokenizer, dict[str, str]]:
    """As `gpt2_tokenizer`, of vocab.json and merges.txt of Qwen 2 and those after it."""
    tokenizer = _of_merges(stated)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = SPLITTINGS["qwen2"].pre_tokenizer()
    return _finished(tokenizer, stated, adds_bos=False)


def qwen_tokenizer(stated: StatedTokens, kind: str) -> tuple[Tokenizer, dict[str, str]]:
    """The tokenizer of qwen.tiktoken, as github.com/QwenLM/Qwen describes it: the control tokens come after the last
    rank. Texts of special tokens by role, and under chat_template the format of chats, where
    generation_config.json says that the model knows it. Raises ModelError for a file that is broken."""
    path = stated.folder / "qwen.tiktoken"
    ranks = _ranks(stated)
    alphabet = {byte: letter for letter, byte in byte_alphabet().items()}

    def spelled(token: bytes) -> str:
        return "".join(alphabet[byte] for byte in token)

    merges, unreached = merges_of(ranks, ranks, ranks)
    if unreached or sorted(ranks.values()) != list(range(len(ranks))):
        raise ModelError(f"{path} is damaged: its tokens do not come of one another, or ranks are missing.")
    vocab = {spelled(token): rank for token, rank in ranks.items()}
    pairs = [(spelled(left), spelled(right)) for left, right in merges]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs, ignore_merges=True))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = SPLITTINGS["qwen2"].pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    control = [_END, *_CHAT_ENDS, *(f"<|extra_{i}|>" for i in range(_NUM_EXTRAS))]
    add_tokens(tokenizer, stated, {text: AddedToken(text, normalized=False, special=True) for text in control})
    settings = stated.folder / "generation_config.json"
    is_chat = settings.exists() and read_json(settings).get("chat_format") == "chatml"
    special = {"eos_token": _CHAT_ENDS[1] if is_chat else _END, "pad_token": _END} | stated.special
    has_template = "chat_template" in stated.config or (stated.folder / "chat_template.jinja").exists()
    return tokenizer, special | ({"chat_template": _CHATML} if is_chat and not has_template else {})


def _of_merges(stated: StatedTokens) -> Tokenizer:
    folder = stated.folder
    vocab = read_json(folder / "vocab.json", _MOST_BYTES)
    try:
        lines = files.read_text(folder / "merges.txt", _MOST_BYTES).split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{folder / 'merges.txt'} cannot be read: {error}.") from error
    merges: list[Any] = [tuple(line.split(" ")) for line in lines if line and not line.startswith("#version")]
    try:
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    except Exception as error:  # tokenizers raises bare Exceptions
        raise ModelError(f"{folder}: vocab.json and merges.txt do not fit together: {error}.") from error
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _finished(tokenizer: Tokenizer, stated: StatedTokens, adds_bos: bool) -> tuple[Tokenizer, dict[str, str]]:
    has_end = tokenizer.token_to_id(_END) is not None or any(t.content == _END for t in stated.by_id.values())
    default = _END if has_end else None
    texts = {role: stated.role(role, default) for role in ("bos_token", "eos_token")}
    special = stated.special | {role: text for role, text in texts.items() if text is not None}
    own = {text: AddedToken(text, normalized=False, special=True) for text in special.values()}
    add_tokens(tokenizer, stated, own)
    if (around := post_processor(tokenizer, special.get("bos_token") if adds_bos else None, None)) is not None:
        tokenizer.post_processor = around
    return tokenizer, special


def _ranks(stated: StatedTokens) -> dict[bytes, int]:
    """Lines of a token in base 64 and its rank."""
    path = stated.folder / "qwen.tiktoken"
    try:
        lines = files.read_bytes(path, _MOST_BYTES).split(b"\n")
        pairs = [line.split() for line in lines if line.strip()]
        return {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}.") from error
    except (ValueError, binascii.Error) as error:
        raise ModelError(f"{path} is damaged: {error}.") from error
