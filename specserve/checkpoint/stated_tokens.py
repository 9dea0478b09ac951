"""What the files beside a tokenizer's vocabulary say: special tokens, added tokens and their ids, settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, processors

from specserve.checkpoint.folder import read_json
from specserve.errors import ModelError

_FLAGS = ("lstrip", "rstrip", "single_word")


@dataclass(frozen=True, slots=True)
class StatedTokens:
    """`config` is tokenizer_config.json; `special` are texts by role, such as "bos_token"; `by_id` tokens whose id is
    stated; `others` are special tokens that have theirs from the vocabulary, or one after its last."""

    folder: Path
    config: Mapping[str, Any]
    special: dict[str, str]
    by_id: dict[int, AddedToken]
    others: list[str]

    def role(self, name: str, default: str | None) -> str | None:
        """The text of a special token: `default` where no file says anything; a null is none."""
        return self.special.get(name, None if name in self.config else default)


def read_stated(folder: Path) -> StatedTokens:
    """Of tokenizer_config.json, special_tokens_map.json and added_tokens.json, as far as they exist. Raises ModelError
    for what is no token."""
    config, mapped, added = (
        read_json(path) if (path := folder / f"{name}.json").exists() else {}
        for name in ("tokenizer_config", "special_tokens_map", "added_tokens")
    )
    stated = {**mapped, **{key: value for key, value in config.items() if value is not None or key not in mapped}}
    special = {
        role: text for role, value in stated.items() if role.endswith("_token") and (text := _text(value)) is not None
    }
    more = stated.get("additional_special_tokens") or []
    listed = [text for each in more if (text := _text(each)) is not None]
    every = {*special.values(), *listed}
    by_id: dict[int, AddedToken] = {}
    try:
        for text, number in added.items():
            by_id[int(number)] = AddedToken(text, normalized=False, special=text in every)
        for number, entry in (config.get("added_tokens_decoder") or {}).items():
            flags = {flag: bool(entry.get(flag, False)) for flag in _FLAGS}
            is_special = bool(entry.get("special", False)) or entry["content"] in every
            by_id[int(number)] = AddedToken(entry["content"], normalized=False, special=is_special, **flags)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise ModelError(f"{folder}: its files state added tokens that are none: {error}.") from error
    return StatedTokens(
        folder, config, special, dict(sorted(by_id.items())), list(dict.fromkeys([*special.values(), *listed]))
    )


def _text(value: Any) -> str | None:
    content = value.get("content") if isinstance(value, Mapping) else value
    return content if isinstance(content, str) and content else None


def add_tokens(tokenizer: Tokenizer, stated: StatedTokens, own: Mapping[str, AddedToken]) -> None:
    """Give it the tokens that are found whole in a text: `own` of its vocabulary, and all that are stated. Raises
    ModelError where one would not have its id."""
    tokens = dict(own) | {token.content: token for token in stated.by_id.values()}
    for text in stated.others:
        tokens.setdefault(text, AddedToken(text, normalized=False, special=True))
    ids = {token.content: number for number, token in stated.by_id.items()}
    size = tokenizer.get_vocab_size()
    known = {text: number for text in tokens if (number := tokenizer.token_to_id(text)) is not None}
    places = known | ids
    # Those without an id come last, in the order in which they are stated.
    for text in sorted(tokens, key=lambda text: places.get(text, size + len(ids))):
        tokenizer.add_tokens([tokens[text]])
        if text in ids and (found := tokenizer.token_to_id(text)) != ids[text]:
            raise ModelError(
                f"{stated.folder}: its files give the added token {text!r} the id {ids[text]}, and the vocabulary "
                f"gives it {found}."
            )


def post_processor(tokenizer: Tokenizer, before: str | None, after: str | None) -> processors.PostProcessor | None:
    """What puts these tokens around a text."""
    ids = {text: tokenizer.token_to_id(text) for text in (before, after) if text is not None}
    if not ids:
        return None
    front, back = [before] if before else [], [after] if after else []
    return processors.TemplateProcessing(
        single=[*front, "$A", *back],
        pair=[*front, "$A", *back, *front, "$B", *back],
        special_tokens=list(ids.items()),
    )
