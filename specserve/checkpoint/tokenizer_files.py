"""Makes a folder with tokenizer.json of one that has only a tokenizer's older files.

Which files, and how they are read, the tokenizer's class says: it is a name in tokenizer_config.json here and never
code, whatever the folder holds. Weights and all else are linked to, not copied.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from tokenizers import Tokenizer

from specserve.checkpoint.byte_level_tokenizer import gpt2_tokenizer, qwen2_tokenizer, qwen_tokenizer
from specserve.checkpoint.folder import MADE_OF, read_json
from specserve.checkpoint.sentencepiece_tokenizer import sentencepiece_tokenizer
from specserve.checkpoint.stated_tokens import StatedTokens, read_stated
from specserve.errors import ModelError

# Raise it when the same files give another tokenizer: folders that were made earlier are then not used.
TOKENIZER_VERSION = 1
_WRITTEN = frozenset(["tokenizer.json", "tokenizer_config.json"])
_ALONE = frozenset(["PreTrainedTokenizer", "TokenizersBackend"])  # classes that have tokenizer.json and nothing else

Build: TypeAlias = Callable[[StatedTokens, str], tuple[Tokenizer, dict[str, str]]]


@dataclass(frozen=True, slots=True)
class _Rule:
    """The files that a class of tokenizers is made of, and who makes it."""

    files: tuple[str, ...]
    build: Build


def _sentencepiece(stated: StatedTokens, kind: str) -> tuple[Tokenizer, dict[str, str]]:
    return sentencepiece_tokenizer(stated)


_SENTENCEPIECE = _Rule(("tokenizer.model",), _sentencepiece)
_GPT2 = _Rule(("vocab.json", "merges.txt"), gpt2_tokenizer)
_QWEN2 = _Rule(("vocab.json", "merges.txt"), qwen2_tokenizer)
_QWEN = _Rule(("qwen.tiktoken",), qwen_tokenizer)

# By class, without "Fast". Those of Baichuan, InternLM and others that come with their models as code encode with
# SentencePiece and put bos and eos around; classes that number its pieces otherwise (XGLM, T5) are not here.
_RULES = {
    "LlamaTokenizer": _SENTENCEPIECE,
    "CodeLlamaTokenizer": _SENTENCEPIECE,
    "GemmaTokenizer": _SENTENCEPIECE,
    "BaichuanTokenizer": _SENTENCEPIECE,
    "InternLMTokenizer": _SENTENCEPIECE,
    "InternLM2Tokenizer": _SENTENCEPIECE,
    "YiTokenizer": _SENTENCEPIECE,
    "GPT2Tokenizer": _GPT2,
    "CodeGenTokenizer": _GPT2,
    "Qwen2Tokenizer": _QWEN2,
    "QWenTokenizer": _QWEN,
}
# By model_type, where no file names a class.
_BY_KIND = {
    **dict.fromkeys(["llama", "mistral", "mixtral", "phi3", "gemma", "gemma2", "gemma3_text"], "LlamaTokenizer"),
    **dict.fromkeys(["gpt2", "opt", "gptj", "gpt_neo", "gpt_bigcode", "starcoder2", "granite"], "GPT2Tokenizer"),
    **dict.fromkeys(["qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "mimo"], "Qwen2Tokenizer"),
    "baichuan": "BaichuanTokenizer",
    "internlm": "InternLMTokenizer",
    "internlm2": "InternLM2Tokenizer",
    "qwen": "QWenTokenizer",
}


@dataclass(frozen=True, slots=True)
class OldTokenizer:
    """A tokenizer that tokenizer.json can be made of: the name of its class, and its files."""

    folder: Path
    name: str
    kind: str  # of the model
    rule: _Rule

    def __str__(self) -> str:
        return " and ".join(self.rule.files)


def old_tokenizer(folder: Path) -> OldTokenizer:
    """Of a folder without tokenizer.json. Raises ModelError, which says what to do, for one whose class is not known
    here, and one whose files are not there."""
    config = _json(folder / "tokenizer_config.json")
    kind = str(_json(folder / "config.json").get("model_type"))
    code = _named(config) or _named(_json(folder / "config.json"))
    stated = config.get("tokenizer_class") or code or _json(folder / "config.json").get("tokenizer_class")
    name = str(stated or _BY_KIND.get(kind, "")).removesuffix("Fast")
    advice = (
        "Load the tokenizer elsewhere with transformers.AutoTokenizer.from_pretrained(...) and save_pretrained it into "
        "the folder"
    )
    rule = _RULES.get(name)
    if rule is not None and all((folder / file).is_file() for file in rule.files):
        return OldTokenizer(folder, name, kind, rule)
    if rule is not None:
        lacking = " and ".join(file for file in rule.files if not (folder / file).is_file())
        raise ModelError(
            f"{folder} has no tokenizer.json, and no {lacking} to make it of for its class {name}. {advice},"
            " or get tokenizer.json from where the model comes from."
        )
    if code is not None:
        raise ModelError(
            f"{folder} has no tokenizer.json, and its tokenizer is the class {name}, Python code that comes with the "
            f"model: specserve runs none. Where you trust its author: {advice[0].lower()}{advice[1:]}, with "
            "trust_remote_code=True, if it has a fast one; or get the tokenizer.json of a version of the model that "
            "transformers knows itself."
        )
    what = (
        f"is of the class {name}" if name and name not in _ALONE else "says no class that its other files are read by"
    )
    raise ModelError(f"{folder} has no tokenizer.json, and its tokenizer {what}. {advice}.")


def make_tokenizer(old: OldTokenizer, target: Path) -> str:
    """Write tokenizer.json and tokenizer_config.json into the folder `target` -> what was made, in words. Raises
    ModelError for files that are broken, and for what tokenizer.json cannot say."""
    stated = read_stated(old.folder)
    tokenizer, special = old.rule.build(stated, old.kind)
    # What names code, and tokens that tokenizer.json has, is not kept.
    kept = {key: value for key, value in stated.config.items() if key not in ("auto_map", "added_tokens_decoder")}
    config = {**kept, **special, "tokenizer_class": "PreTrainedTokenizerFast", MADE_OF: str(old)}
    tokenizer.save(str(target / "tokenizer.json"))
    (target / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False), "utf-8")
    return f"{old}, read as {old.name}, {tokenizer.get_vocab_size():,} tokens"


def with_tokenizer(old: OldTokenizer, target: Path) -> str:
    """`make_tokenizer` in the new folder `target`, with links to what else the model's folder has."""
    target.mkdir()
    made = make_tokenizer(old, target)
    for path in old.folder.iterdir():
        if (path.is_file() and path.name not in _WRITTEN) or path.name == "additional_chat_templates":
            (target / path.name).symlink_to(path.absolute())
    return made


def _json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _named(config: dict[str, Any]) -> str | None:
    """The class that auto_map names, as "module.Class", or a pair of which the second is the fast one."""
    mapped = config.get("auto_map")
    found = mapped.get("AutoTokenizer") if isinstance(mapped, dict) else None
    names = found if isinstance(found, list) else [found]
    return next((name.rpartition(".")[2] for name in names if isinstance(name, str)), None)
