"""Which tokens would complete a bad word: words are prepared once, and looked up in a text from its end.

The stems that a text ends with are, backwards, those that it begins with. These are all found from one of them, the
longest; and that is found by bisection among the sorted stems, so that no step depends on how many words there are.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence as Many

import numpy as np

from specserve.types import BadWords, Draft

_WIDTH = 4  # bytes of an id
_FIRST_REACH = 32  # tokens of the text to look at, unless a stem matches them all and goes on


def of_texts(texts: Many[str], encode: Callable[[str], list[int]]) -> BadWords | None:
    """Each text as it is written at the start of another and after a space, as vLLM does; None for no texts. May take a
    second: it is the work of `encode`, and grows with the texts."""
    forms = (form for text in texts for form in (text.lstrip(), " " + text.lstrip()))
    return of_ids(map(encode, forms)) if texts else None


def of_ids(words: Iterable[Many[int]]) -> BadWords:
    """An empty word, which some texts come to, is none."""
    lasts: dict[bytes, set[int]] = defaultdict(set)
    for word in words:
        if len(word):
            lasts[np.array(word[-2::-1], np.int32).tobytes()].add(word[-1])
    always = lasts.pop(b"", set())
    made = BadWords(sorted(always), [], [], [])
    around: list[int] = []  # stems that the next may begin with, and what they forbid
    forbidden = set(always)
    for stem in sorted(lasts):
        while around and not stem.startswith(made.stems[around[-1]]):
            forbidden.difference_update(made.lasts[around.pop()])
        if new := lasts[stem] - forbidden:
            forbidden |= new
            made.above.append(around[-1] if around else -1)
            around.append(len(made.stems))
            made.stems.append(stem)
            made.lasts.append(sorted(new))
    return made


def forbidden(words: BadWords, tokens: Many[int], draft: Draft) -> list[tuple[int, list[int]]]:
    """For each row of a draft that follows `tokens`, where there are any: the row and the tokens that would complete a
    word there, beside those that always do."""
    if not words.stems:
        return []
    reach = _FIRST_REACH
    while True:
        texts = _backwards(tokens, draft, reach)
        if reach >= len(tokens) or not any(_goes_on(words.stems, text) for text in texts):
            break
        reach *= 8
    found = ((row, _completing(words, text)) for row, text in enumerate(texts))
    return [(row, ids) for row, ids in found if ids]


def _backwards(tokens: Many[int], draft: Draft, reach: int) -> list[bytes]:
    """What comes before each row, the last token first: all of the draft, and `reach` of `tokens`."""
    texts = [np.array(tokens[: -reach - 1 : -1], np.int32).tobytes()]
    own = draft.tokens.astype(np.int32).tobytes()
    for node, parent in enumerate(draft.parents.tolist()):
        texts.append(own[_WIDTH * node : _WIDTH * (node + 1)] + texts[parent + 1])
    return texts


def _goes_on(stems: list[bytes], text: bytes) -> bool:
    """Whether a stem begins with all of a text and is longer."""
    after = bisect_right(stems, text)
    return after < len(stems) and stems[after].startswith(text)


def _completing(words: BadWords, text: bytes) -> list[int]:
    """The last stem up to `text` begins with all those that `text` begins with: what sorts between one of these and the
    text begins with it too."""
    at = bisect_right(words.stems, text) - 1
    shared = _num_shared(words.stems[at], text) if at >= 0 else 0
    while at >= 0 and len(words.stems[at]) > shared:
        at = words.above[at]
    ids: list[int] = []
    while at >= 0:
        ids += words.lasts[at]
        at = words.above[at]
    return ids


def _num_shared(a: bytes, b: bytes) -> int:
    """Bytes of the ids with which both begin."""
    num = min(len(a), len(b)) // _WIDTH
    differ = np.frombuffer(a, np.int32, num) != np.frombuffer(b, np.int32, num)
    return _WIDTH * (int(differ.argmax()) if differ.any() else num)
