"""Keeps what a caller wrote from being read as control tokens.

A template's text and a caller's become one text before it is tokenized, and there `<|im_end|>` is a control token
whoever wrote it. So a caller's control texts go through the template as one-time marks. What comes out is tokenized by
a second backend, in which every control token has a secret name: the template's own are translated to those, and a
caller's text is text because nothing in it is such a name. It is one text still, so each token of it is what the first
backend makes of harmless text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer as Backend

from specserve.text.encoding import encode
from specserve.text.marks import STRUCTURE, Marks

_BLANK = " \t\r\n\u2581"  # an added token of these alone (Gemma has runs of them) is text like any other


class UnpreparedError(Exception):
    """The second backend has not been made."""


class StandIns:
    """Marks in the place of pieces of text, for one rendering."""

    def __init__(self) -> None:
        self._marks = Marks()
        self._texts: list[str] = []

    def put(self, text: str, spans: Sequence[tuple[int, int]]) -> str:
        """`text` with marks for what lies in `spans`, [start, end) in order and apart."""
        pieces, at = [], 0
        for start, end in spans:
            pieces += [text[at:start], self._marks.mark(len(self._texts))]
            self._texts.append(text[start:end])
            at = end
        return "".join([*pieces, text[at:]])

    def split(self, rendered: str) -> list[str]:
        """What was rendered without the marks: pieces between them and pieces that they stood for, in turn."""
        (first, *pieces), numbers = self._marks.split(rendered)
        return [first, *(part for i, piece in zip(numbers, pieces, strict=True) for part in (self._texts[i], piece))]


class ControlTokens:
    """The added tokens of a tokenizer, special or not, which text from callers must not become."""

    def __init__(self, backend: Backend) -> None:
        added = [token for token in backend.get_added_tokens_decoder().values() if token.content.strip(_BLANK)]
        texts = [token.content for token in added]
        self._backend = backend
        self._texts = texts
        self._whole = _any_of(texts)
        self._longest = max(map(len, texts), default=0)
        self._beginnings = {text[:n] for text in texts for n in range(1, len(text))}
        self._ends = {text[n:] for text in texts for n in range(1, len(text))}
        self._joined = "\0".join(texts)
        # Such tokens are looked for in normalized text, where other spellings may have become theirs.
        normalized = [token.content for token in added if token.normalized] if backend.normalizer else []
        self._normalized = _any_of(map(self._normalize, normalized)) if normalized else None

    @property
    def loaded(self) -> bool:
        """Whether the second backend has been made."""
        return "_renamed" in vars(self)

    def load(self) -> None:
        """Make it."""
        self._renamed  # noqa: B018 (a cached property)

    def may_be_in(self, value: Any) -> bool:
        """Whether any string inside `value` holds a control token, or a part of one where template text could complete
        it."""
        return any(
            self._whole.search(text)
            or (is_free and any(self._edge_spans(text)))
            or (self._normalized and self._normalized.search(self._normalize(text)))
            for text, is_free in _strings(value)
        )

    def hidden(self, value: Any, marks: StandIns, edges: bool, name: Any = None) -> Any:
        """A copy of `value` with marks for control tokens; with `edges` for parts of them too, at the ends of strings.
        `name` is the key that the value is found under."""
        if isinstance(value, str):
            return marks.put(value, self._spans(value, edges and name not in STRUCTURE))
        if isinstance(value, Mapping):
            return {self.hidden(k, marks, False): self.hidden(v, marks, edges, k) for k, v in value.items()}
        if isinstance(value, list | tuple):
            copies = [self.hidden(entry, marks, edges, name) for entry in value]
            return copies if isinstance(value, list) else tuple(copies)
        return value

    def encode(self, parts: Sequence[str], may_load: bool = True) -> list[int]:
        """Ids of the parts as one text. Every second part, from the second on, is text whatever it spells. Raises
        UnpreparedError where the second backend is needed, not there and not to be made now."""
        if not self._normalized and self._found(["".join(parts)]) == self._found(parts[::2], parts[1::2]):
            return encode(self._backend, "".join(parts), add_special_tokens=False)
        if not (may_load or self.loaded):
            raise UnpreparedError
        return self._renamed.encode([part if i % 2 else self._translated(part) for i, part in enumerate(parts)])

    def _found(self, parts: Sequence[str], between: Sequence[str] = ()) -> list[tuple[int, int]]:
        """Where control tokens lie in `parts`, when each is followed by one of `between`."""
        spans, at = [], 0
        for i, part in enumerate(parts):
            spans += [(at + found.start(), at + found.end()) for found in self._whole.finditer(part)]
            at += len(part) + (len(between[i]) if i < len(between) else 0)
        return spans

    def _translated(self, part: str) -> str:
        return self._whole.sub(lambda found: self._renamed.names[found[0]], part)

    @cached_property
    def _renamed(self) -> _Renamed:
        return _Renamed(self._backend, self._texts)  # threads that come at once make two, and one of them stays

    def _normalize(self, text: str) -> str:
        valid = text.encode(errors="replace").decode()  # whoever tokenizes it will tell of half a surrogate
        normalized: str = self._backend.normalizer.normalize_str(valid)
        return normalized

    def _spans(self, text: str, edges: bool) -> list[tuple[int, int]]:
        """What to mark in `text`: [start, end), in order and apart."""
        spans = [found.span() for found in self._whole.finditer(text)]
        return _united([*spans, *self._edge_spans(text)]) if edges else spans

    def _edge_spans(self, text: str) -> Iterator[tuple[int, int]]:
        """The end of a control token that `text` begins with, the beginning of one that it ends with, or all of it when
        it is a piece of one. Templates trim, so blanks around it do not count."""
        core = text.strip()
        if not core:
            return
        first = text.index(core)
        last = first + len(core)
        if len(core) < self._longest and core in self._joined:
            yield first, last
        lengths = range(min(len(core), self._longest - 1), 0, -1)
        if (n := next((n for n in lengths if core[:n] in self._ends), 0)) > 0:
            yield first, first + n
        if (n := next((n for n in lengths if core[-n:] in self._beginnings), 0)) > 0:
            yield last - n, last


class _Renamed:
    """A copy of a backend in which the tokens `texts` have names that nobody outside can know, and nothing else leads
    to their ids."""

    def __init__(self, backend: Backend, texts: Iterable[str]) -> None:
        marks = Marks()
        self.names = {text: marks.mark(i) for i, text in enumerate(texts)}
        state = json.loads(backend.to_str())
        for token in state["added_tokens"]:
            token["content"] = self.names.get(token["content"], token["content"])
        _rename_in_model(state["model"], self.names)
        self._backend = Backend.from_str(json.dumps(state))
        ids = {_id(self._backend, name): _id(backend, text) for text, name in self.names.items()}
        self._original_ids = {mine: first for mine, first in ids.items() if mine != first}

    def encode(self, parts: Sequence[str]) -> list[int]:
        ids = encode(self._backend, "".join(parts), add_special_tokens=False)
        return [self._original_ids.get(token_id, token_id) for token_id in ids] if self._original_ids else ids


def _rename_in_model(model: dict[str, Any], names: Mapping[str, str]) -> None:
    """Unigram models find their tokens in any text, byte-pair ones by merging: neither shall find a control token."""
    if isinstance(model["vocab"], dict):
        model["vocab"] = {names.get(token, token): token_id for token, token_id in model["vocab"].items()}
    else:
        model["vocab"] = [[names.get(token, token), score] for token, score in model["vocab"]]
    if "merges" in model:
        model["merges"] = [pair for pair in model["merges"] if not {*pair, "".join(pair)} & names.keys()]
    if model.get("unk_token") is not None:
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])


def _id(backend: Backend, token: str) -> int:
    token_id: int | None = backend.token_to_id(token)
    assert token_id is not None, "an added token has an id"
    return token_id


def _strings(value: Any) -> Iterator[tuple[str, bool]]:
    """Every string inside `value`, keys too, and whether it is free: neither a key nor a part of the structure."""
    left = [(value, True)]
    while left:
        entry, is_free = left.pop()
        if isinstance(entry, str):
            yield entry, is_free
        elif isinstance(entry, list | tuple):
            left += [(each, is_free) for each in entry]
        elif isinstance(entry, Mapping):
            left += [(key, False) for key in entry]
            left += [(each, key not in STRUCTURE) for key, each in entry.items()]


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Finds the longest of `texts`; as a tree, so that thousands of them cost no more than a few."""

    def pattern(ends: Iterable[str]) -> str:
        by_first: dict[str, list[str]] = {}
        for end in ends:
            by_first.setdefault(end[:1], []).append(end[1:])
        whole = by_first.pop("", None) is not None
        branches = "|".join(re.escape(first) + pattern(rest) for first, rest in by_first.items())
        return branches and (f"(?:{branches})" + "?" * whole if whole or len(by_first) > 1 else branches)

    return re.compile(pattern(set(texts)) or "(?!)")


def _united(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same places with those that overlap joined."""
    united: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if united and start < united[-1][1]:
            united[-1] = (united[-1][0], max(end, united[-1][1]))
        else:
            united.append((start, end))
    return united
