"""llguidance: a lexer of derivatives and an Earley parser, so compiling is parsing and masks are made when they are
needed, under limits of its own. JSON Schema, regular expressions, choices, Lark and GBNF grammars, structural tags.

Source: github.com/guidance-ai/llguidance. Its matchers report errors instead of raising them, and stay in them: an
error looks like the end of the text, so it is asked for after every call. It refuses by itself what it does not know;
what it knows and gets wrong is refused here.
"""

from __future__ import annotations

import bisect
import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.numpy import fill_next_token_bitmask_par_with_draft_tokens as fill_chain

from specserve.constraint import walk
from specserve.constraint.base import RefusedError, Vocabulary
from specserve.constraint.tags import parse
from specserve.grammars._gbnf import START, parse as parse_gbnf
from specserve.grammars._lark_tags import Embedded, written
from specserve.grammars._longest import lark
from specserve.schema.document import check_depth, is_number, reachable
from specserve.schema.formats import exact
from specserve.schema.objects import MANY_UNNAMED
from specserve.schema.rewrite import is_endless, rewritten
from specserve.structured import Structured
from specserve.types import Ids

# Every option, so that no schema can set one by its key "x-guidance". The spelling is that of json.dumps and of most
# training data: left to the model, no separator would be forced, and a model that is at a loss writes white space for
# ever. Without \u escapes a key of an open object has one spelling, and cannot come again as another.
_OPTIONS: Any = {
    "whitespace_flexible": False,
    "whitespace_pattern": None,
    "item_separator": ", ",
    "key_separator": ": ",
    "coerce_one_of": False,
    "lenient": False,
    "json_allowed_escapes": 'nrbtf\\"',
    "json_allow_general_unicode_escapes": False,
}
# A fifth of its defaults, and counted, not timed: the first mask of ((a{100}){100}){100} took
# 68 ms instead of 1475.
_LIMITS: Any = {
    "initial_lexer_fuel": 200_000,
    "step_lexer_fuel": 40_000,
    "step_max_items": 10_000,
    "max_items_in_row": 8_000,  # a fourth: optional properties of one object; the mask of 1,500 of them took 60 ms
    "max_lexer_states": 50_000,
    "verbose_errors": False,
}
_MOST_RULES = 1000  # of a Lark grammar: a chain of 5,000 rules overflows the stack, and the process dies
_MOST_MULTIPLE = 1000  # of multipleOf: its automaton has so many states, and takes seconds
_MOST_SHOWN = 300  # characters of a reason: some repeat the whole grammar
_REMEMBERED, _SHORT = 4096, 128  # splits of forced texts, and their characters at most: about 4 MB
_MOST_NEAR = 100  # pairs of bounds of one number


class LlguidanceBackend:
    """Constraints for one vocabulary."""

    kinds = frozenset({"json_schema", "regex", "choice", "lark", "ebnf", "structural_tag"})

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._executor = LLExecutor(num_threads=1)
        self._tokenizer = LLTokenizer(_Tokens(vocabulary), n_vocab=vocabulary.size, eos_token=list(vocabulary.eos_ids))

    def compile(self, asked: Structured) -> LlguidanceGrammar:
        try:
            if asked.kind == "json_schema":
                return self._of_schema(_parsed(asked.text))[0]
            return self._made(self._tags(asked.text) if asked.kind == "structural_tag" else _grammar(asked))
        except RefusedError:
            raise
        except (ValueError, RecursionError) as error:
            raise RefusedError(f"this cannot be read: {error}.".splitlines()[0]) from error

    def _of_schema(self, schema: Any) -> tuple[LlguidanceGrammar, str]:
        """And what it is made of. What is refused as it is may be enforced in other words."""
        try:
            if is_endless(schema):
                raise RefusedError("$ref: a value asks for itself inside itself, without end.")
            text = _schema_grammar(schema)
            return self._made(text), text
        except RefusedError:
            reworded = rewritten(schema)
            if reworded == schema:
                raise
        text = _schema_grammar(reworded)
        return self._made(text), text

    def _made(self, text: str) -> LlguidanceGrammar:
        def parsed() -> LLMatcher:
            return LLMatcher(self._tokenizer, text, log_level=0, limits=LLParserLimits(**_LIMITS))

        matcher = parsed()
        if matcher.is_error():
            raise RefusedError(_reason(matcher))
        if warnings := matcher.get_grammar_warnings():
            raise RefusedError(" ".join(warnings))
        grammar = LlguidanceGrammar(matcher, parsed, self._vocabulary, self._executor, len(text))
        self._try(grammar)
        return grammar

    def _tags(self, text: str) -> str:
        """A structural tag; what it has inside must be enforceable by itself."""

        def entry(inner: str) -> dict[str, Any]:
            (found,) = json.loads(inner)["grammars"] if inner.startswith("{") else [{"lark_grammar": inner}]
            return dict(found)

        def part(inner: str) -> dict[str, Any]:
            self._made(inner)
            return entry(inner)

        embedded = Embedded(
            schema=lambda schema: entry(self._of_schema(schema)[1]),
            regex=lambda pattern: part(LLMatcher.grammar_from_regex(pattern)),
            ebnf=lambda grammar: part(_of_ebnf(grammar)),
        )
        return str(written(parse(text), self._vocabulary, embedded))

    def _try(self, grammar: LlguidanceGrammar) -> None:
        """The first mask finds what parsing does not: references that lead nowhere, expressions that never match. A
        second one finds that the first has used up what its lexer, which all states share, may take."""
        row = np.zeros(self._vocabulary.num_words, np.int32)
        try:
            grammar.start().fill(row)
            grammar.start().fill(row)
        except ValueError as error:
            raise RefusedError(f"nothing can begin to fit this: {error}") from error
        if not row.any():
            raise RefusedError("nothing fits this.")


class LlguidanceGrammar:
    """A matcher that nobody moves. All its states share its lexer, which grows with what they meet; one that has grown
    to its limits would fail all that come, so that they get another."""

    def __init__(
        self,
        matcher: LLMatcher,
        again: Callable[[], LLMatcher],
        vocabulary: Vocabulary,
        executor: LLExecutor,
        num_characters: int,
    ) -> None:
        self._matcher = matcher
        self._again = again
        self._vocabulary = vocabulary
        self._executor = executor
        self._failed = False
        # About 0.1 MiB each, measured over 200 tools; what it grows to while masks are made is bounded by the limits.
        self.num_bytes = 100_000 + 64 * num_characters

    def start(self) -> LlguidanceState:
        if self._failed:
            self._matcher, self._failed = self._again(), False
        return LlguidanceState(self._matcher.deep_copy(), self._vocabulary, self._executor, self._fail)

    def _fail(self) -> None:
        self._failed = True


class LlguidanceState:
    """A matcher of its own, which never hears of the end: it takes no end token where nothing else may come. `failed`
    is called when it fails.

    Where text is forced its mask has the one token that the tokenizer would take; `advance` takes any spelling.
    """

    def __init__(
        self, matcher: LLMatcher, vocabulary: Vocabulary, executor: LLExecutor, failed: Callable[[], None]
    ) -> None:
        self._matcher = matcher
        self._eos_ids = vocabulary.eos_ids
        self._size = vocabulary.size
        self._executor = executor
        self._failed = failed
        self._ended = False

    def fill(self, row: Ids) -> None:
        if self._ended:
            row[:] = 0
            return
        self._matcher.unsafe_compute_mask_ptr(row.__array_interface__["data"][0], row.nbytes)
        self._check()

    def fill_draft(self, tokens: Ids, parents: Ids, ends: frozenset[int], rows: Ids) -> None:
        if (parents != np.arange(-1, len(parents) - 1)).any():
            walk.fill_draft(self, tokens, parents, ends, rows)
            return
        rows[:] = 0  # those behind a token that may not stand are not written
        chain = self._until_end(tokens.tolist(), ends)
        if self._ended or not chain:
            self.fill(rows[0])
            return
        assert len(rows) > len(chain), "it writes behind the end of too few rows"
        fill_chain(self._executor, [(self._matcher, 0, chain)], rows)
        self._check()

    def _until_end(self, chain: list[int], ends: frozenset[int]) -> list[int]:
        """The tokens before the first that ends a text, or that the matcher would take for an error."""
        for place, token in enumerate(chain):
            if token in ends or token in self._eos_ids or not 0 <= token < self._size:
                return chain[:place]
        return chain

    def advance(self, token: int) -> bool:
        if self._ended or not 0 <= token < self._size:
            return False
        if token in self._eos_ids:
            self._ended = self._matcher.is_accepting()
            moved = self._ended
        else:
            moved = self._matcher.try_consume_tokens([token]) == 1
        self._check()
        return moved

    def rollback(self, n: int) -> None:
        if not n:
            return
        self._matcher.rollback(n - self._ended)
        self._ended = False
        self._check()

    def forced(self) -> list[int]:
        if self._ended:
            return []
        if self._matcher.is_stopped():
            return [self._eos_ids[0]]
        forced = self._matcher.compute_ff_tokens()
        self._check()
        return forced

    def _check(self) -> None:
        if self._matcher.is_error():
            self._failed()
            raise ValueError(_reason(self._matcher))


class _Tokens(TokenizerWrapper):
    """What LLTokenizer reads of a vocabulary. How it splits a text decides the masks of forced text."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.eos_token_id = vocabulary.eos_ids[0]
        self.bos_token_id = None
        self.tokens = [*vocabulary.tokens, *[b""] * (vocabulary.size - len(vocabulary.tokens))]
        self.special_token_ids = list(vocabulary.eos_ids)
        self.is_tokenizer_wrapper = True
        self._encode = vocabulary.encode
        self._encode_short = lru_cache(_REMEMBERED)(vocabulary.encode)

    def __call__(self, text: str | bytes) -> list[int]:
        """Asked with the same few texts, names of keys and what stands between them, in most masks and drafts."""
        text = text if isinstance(text, str) else text.decode()
        return self._encode_short(text) if len(text) <= _SHORT else self._encode(text)


def _parsed(text: str) -> Any:
    try:
        schema = json.loads(text)
    except RecursionError as error:
        raise RefusedError("the schema is nested too deeply.") from error
    check_depth(schema)
    return schema


def _schema_grammar(schema: Any) -> str:
    """What LLMatcher takes, of a schema."""
    if schema is False:
        raise RefusedError("nothing fits this schema.")
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise RefusedError("a JSON Schema is an object, true or false.")
    _check_schema(schema)
    return LLMatcher.grammar_from_json_schema(exact(schema), overrides=_OPTIONS)


def _grammar(asked: Structured) -> str:
    """What LLMatcher takes, of anything else."""
    if asked.kind == "regex":
        return LLMatcher.grammar_from_regex(asked.text)
    if asked.kind == "choice":
        return LLMatcher.grammar_from_regex("|".join(_literal(option) for option in json.loads(asked.text)))
    if asked.kind == "ebnf":
        return _of_ebnf(asked.text)
    assert asked.kind == "lark", "kinds has no others"
    return _of_lark(asked.text)


def _of_lark(text: str) -> str:
    if text.count(":") > _MOST_RULES:
        raise RefusedError(f"this grammar has more than {_MOST_RULES} rules.")
    if "%json" in text:
        raise RefusedError("%json inside a grammar is not taken: send the schema itself.")
    return LLMatcher.grammar_from_lark(text)


def _of_ebnf(text: str) -> str:
    return LLMatcher.grammar_from_lark(lark(parse_gbnf(text).bodies, START))


def _literal(text: str) -> str:
    """A regular expression for this text alone; literals in Lark cannot spell every control character."""
    return "".join(c if c.isascii() and c.isalnum() else rf"\x{{{ord(c):x}}}" for c in text)


def _reason(matcher: LLMatcher) -> str:
    """What is wrong with an expression, else the first line: the others show where in a grammar of its own making."""
    lines = matcher.get_error().split("\n<", 1)[0].strip().splitlines() or ["the grammar failed without saying why"]
    stated = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    line = (stated or lines)[0].rstrip(".: ")
    return f"{line if len(line) <= _MOST_SHOWN else line[:_MOST_SHOWN] + '...'}."


# --- what it gets wrong -----------------------------------------------------------------------------------------------


def _check_schema(root: dict[str, Any]) -> None:
    for schema in reachable(root):
        multiple = schema.get("multipleOf")
        if is_number(multiple) and multiple > _MOST_MULTIPLE:
            raise RefusedError(f"multipleOf: {multiple} is more than {_MOST_MULTIPLE}, the most that is enforced.")
        if is_number(least := schema.get("minProperties")) and least > len(_listed(schema.get("required"))) + 1:
            raise RefusedError(MANY_UNNAMED)
        if schema.get("format") == "unknown":
            raise RefusedError("Unknown format: unknown.")  # a name it takes for any text
        _check_bounds(schema, root)


@dataclass(frozen=True, slots=True)
class _Bound:
    """Of a number. `within` names the branch it is in, of each choice around it."""

    name: str
    value: float
    within: dict[int, int]

    def meets(self, other: _Bound) -> bool:
        """Whether both may apply to one number: not from two branches of one choice."""
        return all(other.within.get(choice, branch) == branch for choice, branch in self.within.items())


def _check_bounds(schema: dict[str, Any], root: dict[str, Any]) -> None:
    """A number above (or below) a whole one, with its other bound less than 1 away, may be that whole one here."""
    if schema.get("type") == "integer":
        return
    bounds = list(_bounds(schema, root))
    for name, far, direction in (("exclusiveMinimum", "aximum", 1), ("exclusiveMaximum", "inimum", -1)):
        edges = [bound for bound in bounds if bound.name == name and bound.value == int(bound.value)]
        others = sorted((bound for bound in bounds if bound.name.endswith(far)), key=lambda bound: bound.value)
        near = (pair for edge in edges for pair in _near(edge, others, direction))
        # A few are looked at closely; with more of them, two that are near may meet.
        if any(i >= _MOST_NEAR or edge.meets(other) for i, (edge, other) in enumerate(near)):
            raise RefusedError(f"{name} with the other bound less than 1 away is not enforced exactly.")


def _near(edge: _Bound, others: list[_Bound], direction: int) -> Iterator[tuple[_Bound, _Bound]]:
    """The edge with each of the sorted others that is at most 1 away on its open side."""
    low, high = sorted((edge.value, edge.value + direction))
    start = bisect.bisect_left(others, low, key=lambda bound: bound.value)
    for other in itertools.islice(others, start, None):
        if other.value > high:
            return
        yield edge, other


def _bounds(schema: dict[str, Any], root: dict[str, Any]) -> Iterator[_Bound]:
    """The bounds of a schema and of what applies in the same place. What is come to again, from another branch perhaps,
    is looked at once more as if it were in no branch, and then no more."""
    left, seen = [(schema, dict[int, int]())], dict[int, dict[int, int]]()
    while left:
        found, within = left.pop()
        if not isinstance(found, dict) or seen.get(id(found)) == {}:
            continue
        within = seen[id(found)] = {} if id(found) in seen else within
        for name in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
            value = found.get(name)
            if is_number(value):
                yield _Bound(name, float(value), within)
        left += [(branch, within) for branch in _listed(found.get("allOf"))]
        for name in ("anyOf", "oneOf"):
            branches = _listed(found.get(name))
            left += [(branch, within | {id(branches): i}) for i, branch in enumerate(branches)]
        reference = found.get("$ref")
        if isinstance(reference, str) and reference.startswith("#/"):
            left.append((_at(root, reference), within))


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _at(root: Any, reference: str) -> Any:
    """What a local JSON pointer leads to; None where that is nothing."""
    for step in reference[2:].split("/"):
        root = root.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(root, dict) else None
    return root
