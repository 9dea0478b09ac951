"""Lark grammars in the part of the syntax that backends read alike: rules, texts, expressions, repetitions."""

from __future__ import annotations

import re

from specserve.grammars._pattern import exact
from specserve.structured.base import RefusedError

_MOST_CHARACTERS = 100_000
_MOST_RULES = 1000
_PIECE = re.compile(
    r'(?P<text>"(?:\\.|[^"\\\n])*"i?)'
    r"|(?P<regex>/(?:\\.|[^/\\\n])+/(?P<flags>[a-z]*))"
    r"|(?P<rest>//[^\n]*|[\w\s:|()\[\]*+?{},.!-])",
    re.ASCII,
)


def lark(text: str) -> str:
    """The grammar, its expressions as those of _pattern. Raises RefusedError for what is not read alike."""
    if len(text) > _MOST_CHARACTERS or text.count(":") > _MOST_RULES:
        raise RefusedError(f"at most {_MOST_CHARACTERS} characters and {_MOST_RULES} rules are taken.")
    pieces, end = [], 0
    while end < len(text):
        found = _PIECE.match(text, end)
        if found is None:
            raise RefusedError(f"{text[end : end + 20].splitlines()[0]!r} in a Lark grammar is not enforced exactly.")
        if found["flags"]:
            raise RefusedError(f"the flags {found['flags']} of an expression are not enforced exactly.")
        pieces.append(f"/{exact(found['regex'][1:-1])}/" if found["regex"] else found[0])
        end = found.end()
    return "".join(pieces)
