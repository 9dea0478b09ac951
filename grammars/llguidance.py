"""llguidance: a lexer of derivatives and an Earley parser, so compiling is parsing and masks are made when they are
needed, under limits of its own. JSON Schema, regular expressions, choices, Lark and GBNF grammars, structural tags.

Source: github.com/guidance-ai/llguidance. Its matchers report errors instead of raising them, and stay in them: an
error looks like the end of the text, so it is asked for after every call. It refuses by itself what it does not know;
what it knows and gets wrong is refused in _llguidance_words.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from itertools import islice
from random import Random
from typing import Any

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.numpy import fill_next_token_bitmask_par_with_draft_tokens as fill_chain

from specserve.grammars._lark_tags import Embedded, written
from specserve.grammars._llguidance_words import (
    counting_patterns,
    grammar_of,
    of_ebnf,
    regex_grammar,
    schema_grammar,
    schema_of,
)
from specserve.grammars._onward import Onward
from specserve.structured import walk
from specserve.structured.base import RefusedError, Vocabulary
from specserve.structured.schema.bounds import with_ends
from specserve.structured.schema.document import reachable
from specserve.structured.schema.formats import without_annotations
from specserve.structured.schema.lookahead import without_lookaheads
from specserve.structured.schema.rewrite import is_endless, rewritten
from specserve.structured.spec import Structured
from specserve.structured.tags import parse
from specserve.types import Ids

PRIORITY = 20

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
# For answers in a large schema: they come to places that were not tried.
_ROOMY: Any = {
    **_LIMITS,
    "step_max_items": 2 * _LIMITS["step_max_items"],
    "max_items_in_row": 2 * _LIMITS["max_items_in_row"],
}
_LONGEST_REWORDED = 2**16  # characters of a schema: longer ones are compiled as they are, or refused
_LARGE = 64  # schemas in a schema whose tokens are tried: so many choices may be too many at once, late too
_LONG = 2**14  # characters of one, for the same reason
_NUM_TRIED, _NUM_WALKS = 24, 4
# What a grammar takes, measured over ten kinds of constraints of 15 to 6,000 characters with a vocabulary of 49k: when
# it is compiled, and by how much its lexer grows with each of the first masks, at most; after these it hardly does.
_COMPILED_BYTES, _BYTES_PER_CHARACTER, _BYTES_PER_MASK, _GROWING_MASKS = 350_000, 64, 10_000, 120
_MOST_SHOWN = 300  # characters of a reason: some repeat the whole grammar
_REMEMBERED, _SHORT = 4096, 128  # splits of forced texts, and their characters at most: about 4 MB


class LlguidanceBackend:
    """Constraints for one vocabulary."""

    kinds = frozenset({"json_schema", "regex", "choice", "lark", "ebnf", "structural_tag"})

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._executor = LLExecutor(num_threads=1)
        self._onward = Onward(vocabulary)
        self._tokenizer = LLTokenizer(_Tokens(vocabulary), n_vocab=vocabulary.size, eos_token=list(vocabulary.eos_ids))

    def compile(self, asked: Structured) -> LlguidanceGrammar:
        try:
            if asked.kind == "json_schema":
                return self._of_schema(schema_of(asked.text))[0]
            text = self._tags(asked.text) if asked.kind == "structural_tag" else grammar_of(asked)
            return self._made(text, 1)
        except RefusedError:
            raise
        except (ValueError, RecursionError) as error:
            raise RefusedError(f"this cannot be read: {error}.".splitlines()[0]) from error

    def _of_schema(self, schema: Any) -> tuple[LlguidanceGrammar, str]:
        """And what it is made of. What is refused as it is may be enforced in other words."""
        schema = without_lookaheads(without_annotations(schema))
        try:
            if is_endless(schema):
                raise RefusedError("$ref: a value asks for itself inside itself, without end.")
            return self._of_words(schema)
        except RefusedError:
            if len(json.dumps(schema)) > _LONGEST_REWORDED:
                raise
            reworded = rewritten(schema)
            if reworded == schema:
                raise
        return self._of_words(reworded)

    def _of_words(self, schema: Any) -> tuple[LlguidanceGrammar, str]:
        ended = with_ends(schema)
        try:
            return self._of_bounded(ended)
        except RefusedError:  # with many multiples, bounds are too much for one lexer
            if ended is schema:
                raise
        return self._of_bounded(schema)

    def _of_bounded(self, schema: Any) -> tuple[LlguidanceGrammar, str]:
        for pattern in counting_patterns(schema):  # a text may come to them late, and fail there
            self._made(schema_grammar({"type": "string", "pattern": pattern}), 1)
        text = schema_grammar(schema)
        is_large = len(text) > _LONG or len(list(islice(reachable(schema), _LARGE + 1))) > _LARGE
        return self._made(text, _NUM_WALKS if is_large else 0), text

    def _made(self, text: str, num_walks: int) -> LlguidanceGrammar:
        def parsed(limits: dict[str, Any]) -> LlguidanceGrammar:
            def matcher() -> LLMatcher:
                return LLMatcher(self._tokenizer, text, log_level=0, limits=LLParserLimits(**limits))

            first = matcher()
            if first.is_error():
                raise RefusedError(_reason(first))
            if warnings := first.get_grammar_warnings():
                raise RefusedError(" ".join(warnings))
            return LlguidanceGrammar(first, matcher, self._vocabulary, self._executor, len(text))

        grammar = parsed(_LIMITS)
        self._try(grammar, num_walks)
        if num_walks > 1:
            grammar = parsed(_ROOMY)
            self._try(grammar, 0)
        return grammar

    def _tags(self, text: str) -> str:
        """A structural tag; what it has inside must be enforceable by itself."""

        def entry(inner: str) -> dict[str, Any]:
            (found,) = json.loads(inner)["grammars"] if inner.startswith("{") else [{"lark_grammar": inner}]
            return dict(found)

        def part(inner: str) -> dict[str, Any]:
            self._made(inner, 1)
            return entry(inner)

        embedded = Embedded(
            schema=lambda schema: entry(self._of_schema(schema)[1]),
            regex=lambda pattern: part(regex_grammar(pattern)),
            ebnf=lambda grammar: part(of_ebnf(grammar)),
        )
        return str(written(parse(text), self._vocabulary, embedded))

    def _try(self, grammar: LlguidanceGrammar, num_walks: int) -> None:
        """The first mask finds what parsing does not: references that lead nowhere, expressions that never match. A
        second one finds that the first has used up what its lexer, which all states share, may take. Some tokens more
        find what is too much only then: a mask can allow a token after which there are too many choices."""
        row = np.zeros(self._vocabulary.num_words, np.int32)
        try:
            for _ in range(2):
                grammar.start().fill(row)
        except ValueError as error:
            raise RefusedError(f"nothing can begin to fit this: {_said(error)}") from error
        if not row.any():
            raise RefusedError("nothing fits this.")
        for seed in range(num_walks):
            try:
                self._walk(grammar.start(), row, Random(seed) if seed else None)
            except ValueError as error:
                raise RefusedError(f"behind its first tokens an answer could not go on: {_said(error)}") from error
            if not row.any():
                raise RefusedError("it allows tokens behind which nothing fits.")

    def _walk(self, state: LlguidanceState, row: Ids, dice: Random | None) -> None:
        """`row` is the last mask then: it is empty where the way has led to nothing."""
        for _ in range(_NUM_TRIED):
            state.fill(row)
            token = self._onward(row, dice)
            if token is None:
                return
            state.advance(token)


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
        self._num_characters = num_characters
        self._num_masks = 0

    @property
    def num_bytes(self) -> int:
        """Grows with use, as what all states share does."""
        growth = _BYTES_PER_MASK * min(self._num_masks, _GROWING_MASKS)
        return _COMPILED_BYTES + _BYTES_PER_CHARACTER * self._num_characters + growth

    def start(self) -> LlguidanceState:
        if self._failed:
            self._matcher, self._failed = self._again(), False
        return LlguidanceState(self._matcher.deep_copy(), self._vocabulary, self._executor, self)

    def fail(self) -> None:
        """What the states share is full."""
        self._failed = True

    def count_masks(self, count: int) -> None:
        self._num_masks += count


class LlguidanceState:
    """A matcher of its own, which never hears of the end: it takes no end token where nothing else may come. Its
    grammar hears of every mask, and when it fails.

    Where text is forced its mask has the one token that the tokenizer would take; `advance` takes any spelling.

    A matcher (llguidance 1.5.1 to 1.9.1) keeps its last mask for the lexer's state and the number of rows that it had:
    once it was taken back from there, another text can have both, and gets that mask. So the masks of a chain are made
    by a copy, and who goes back behind a mask makes another, which takes its place.
    """

    def __init__(
        self, matcher: LLMatcher, vocabulary: Vocabulary, executor: LLExecutor, grammar: LlguidanceGrammar
    ) -> None:
        self._matcher = matcher
        self._eos_ids = vocabulary.eos_ids
        self._size = vocabulary.size
        self._executor = executor
        self._grammar = grammar
        self._ended = False
        self._num_taken = self._masked_at = 0  # tokens; those that there were when the last mask was made
        self._forced: list[int] | None = None  # until it moves

    def fill(self, row: Ids) -> None:
        if self._ended:
            row[:] = 0
            return
        self._matcher.unsafe_compute_mask_ptr(row.__array_interface__["data"][0], row.nbytes)
        self._masked_at = self._num_taken
        self._grammar.count_masks(1)
        self._check(self._matcher)

    def fill_draft(self, tokens: Ids, parents: Ids, ends: frozenset[int], rows: Ids) -> None:
        if not len(tokens):
            self.fill(rows[0])
            return
        if (parents != np.arange(-1, len(parents) - 1)).any():
            walk.fill_draft(self, tokens, parents, ends, rows)
            return
        rows[:] = 0  # those behind a token that may not stand are not written
        chain = self._until_end(tokens.tolist(), ends)
        if self._ended or not chain:
            self.fill(rows[0])
            return
        assert len(rows) > len(chain), "it writes behind the end of too few rows"
        ahead = self._matcher.deep_copy()
        fill_chain(self._executor, [(ahead, 0, chain)], rows)
        self._grammar.count_masks(len(chain) + 1)
        self._check(ahead)

    def _until_end(self, chain: list[int], ends: frozenset[int]) -> list[int]:
        """The tokens before the first that ends a text, or that the matcher would take for an error."""
        for place, token in enumerate(chain):
            if token in ends or token in self._eos_ids or not 0 <= token < self._size:
                return chain[:place]
        return chain

    def allows(self, token: int) -> bool:
        if self._ended or not 0 <= token < self._size:
            return False
        if token in self._eos_ids:
            return bool(self._matcher.is_accepting())
        forced = self.jump_forward()
        if forced:
            return token == forced[0]
        may_come = self._matcher.validate_tokens([token]) == 1
        self._check(self._matcher)
        return may_come

    def advance(self, token: int) -> bool:
        if self._ended or not 0 <= token < self._size:
            return False
        if token in self._eos_ids:
            self._ended = self._matcher.is_accepting()
            moved = self._ended
        else:
            moved = self._matcher.try_consume_tokens([token]) == 1
        self._forced = None
        self._check(self._matcher)
        self._num_taken += moved
        return moved

    def rollback(self, n: int) -> None:
        if not n:
            return
        self._matcher.rollback(n - self._ended)
        self._ended = False
        self._forced = None
        self._num_taken -= n
        if self._masked_at > self._num_taken:
            self._matcher.compute_bitmask()
            self._masked_at = self._num_taken
        self._grammar.count_masks(1)
        self._check(self._matcher)

    def jump_forward(self) -> list[int]:
        if self._forced is None:
            self._forced = self._find_forced()
        return self._forced

    def _find_forced(self) -> list[int]:
        if self._ended:
            return []
        if self._matcher.is_stopped():
            return [self._eos_ids[0]]
        forced = self._matcher.compute_ff_tokens()
        self._check(self._matcher)
        return forced

    def _check(self, matcher: LLMatcher) -> None:
        """Raise RefusedError where a grammar comes to the limits, ValueError where the library has failed."""
        if matcher.is_error():
            self._grammar.fail()
            raise (ValueError if "panic" in matcher.get_error() else RefusedError)(_reason(matcher))


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


def _said(error: ValueError) -> str:
    return error.reason if isinstance(error, RefusedError) else str(error)


def _reason(matcher: LLMatcher) -> str:
    """What is wrong with an expression, else the first line: the others show where in a grammar of its own making."""
    lines = matcher.get_error().split("\n<", 1)[0].strip().splitlines() or ["the grammar failed without saying why"]
    stated = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    line = (stated or lines)[0].rstrip(".: ")
    return f"{line if len(line) <= _MOST_SHOWN else line[:_MOST_SHOWN] + '...'}."
