"""Random JSON Schemas against an oracle: what a grammar lets through must be valid for jsonschema-rs (draft 2020-12,
formats asserted), and what is valid should be let through. No model runs: texts are random walks under a
grammar's own masks.

    python benchmarks/structured/fuzz.py --seconds 600 --seed 1 --seeds suite.json tools.jsonl

Half of the schemas are made up, half are mutations of those in `--seeds`: a list of groups as `grammar check` takes, or
JSON lines with tools under "function", as in BFCL. A text that is not valid is printed with its schema, and the exit
status is 1. A valid instance that cannot be said is only counted and shown: grammars may be narrower than schemas.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonschema_rs
import numpy as np

from specserve.structured.base import Grammar, RefusedError, Vocabulary
from specserve.structured.compiler import Compiler
from specserve.structured.schema.document import walk
from specserve.structured.spec import Structured
from specserve.structured.suite import _spellings as spellings
from specserve.structured.vocabulary import vocabulary
from specserve.structured.worker import accepts
from specserve.testing import write_tiny_model
from specserve.text.tokenizer import Tokenizer

WALKS, STEPS, INSTANCES = 4, 160, 6  # for each schema
NAMES = ("a", "b", "kind", "id", "é", "x-1")
TEXTS = ("", "a", "b", "ab", "kind", "é", "2026-02-30", "1.5", "aaaa", 'q"\\')
NUMBERS = (0, 1, -1, 2, 3, 5, 10, 0.5, 1.5, -0.5, 2.0, 100, 0.1, 1000)
PATTERNS = ("^a", "b$", "^a+$", "a|b", "^[a-c]{1,3}$", "", ".*", "^x-", "[0-9]", "^.b")
FORMATS = ("date", "time", "date-time", "uuid", "email", "ipv4", "ipv6", "hostname", "duration", "uri", "regex")
TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
OLD_TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": "string"}


class Schemas:
    """Random schemas; equal generators give equal ones."""

    def __init__(self, random_: random.Random, seeds: list[Any]) -> None:
        self._random = random_
        self._seeds = seeds
        self._keywords: dict[str, Callable[[int], Any]] = {
            "type": lambda _: self._type(),
            "const": lambda _: self.value(2),
            "enum": lambda _: [self.value(1) for _ in range(self._random.randint(1, 4))],
            **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), lambda _: self._number()),
            "multipleOf": lambda _: abs(self._number()) or 1,
            **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties",
                             "minContains", "maxContains"), lambda _: self._random.randint(0, 3)),
            "pattern": lambda _: self._random.choice(PATTERNS),
            "format": lambda _: self._random.choice(FORMATS),
            "uniqueItems": lambda _: self._random.random() < 0.7,
            "required": lambda _: self._random.sample(NAMES, self._random.randint(1, 2)),
            "properties": lambda depth: self._named(NAMES, depth),
            "patternProperties": lambda depth: self._named(PATTERNS, depth, 2),
            "dependentRequired": lambda _: {name: self._random.sample(NAMES, 1) for name in self._names(2)},
            "dependentSchemas": lambda depth: self._named(NAMES, depth, 2),
            **dict.fromkeys(("allOf", "anyOf", "oneOf", "prefixItems"), self._several),
            **dict.fromkeys(("not", "if", "then", "else", "contains", "items", "propertyNames"), self.schema),
            **dict.fromkeys(("additionalProperties", "unevaluatedProperties", "unevaluatedItems"), self._rest),
            "$ref": lambda _: self._random.choice(("#", "#/$defs/d", "#/$defs/e", "#d")),
        }  # fmt: skip
        self._weights = [3.0 if name in ("type", "properties", "required", "$ref") else 1.0 for name in self._keywords]

    def root(self) -> Any:
        """A whole document."""
        if self._seeds and self._random.random() < 0.5:
            return self._mutated(copy.deepcopy(self._random.choice(self._seeds)))
        schema = self.schema(3)
        if isinstance(schema, dict) and "$ref" in json.dumps(schema):
            schema["$defs"] = {"d": self._anchored(self.schema(2)), "e": self.schema(2)}
        return schema

    def schema(self, depth: int) -> Any:
        if depth <= 0 or self._random.random() < 0.08:
            return self._random.choice((True, True, False, {}, {"type": self._random.choice(TYPES[:5])}))
        names = self._random.choices(list(self._keywords), self._weights, k=self._random.randint(1, 4))
        found = {name: self._keywords[name](depth - 1) for name in dict.fromkeys(names)}
        if self._random.random() < 0.5:
            found |= self._shaped(found)
        return found

    def value(self, depth: int) -> Any:
        """A random instance."""
        kind = self._random.choice(TYPES if depth > 0 else TYPES[:5])
        if kind == "array":
            return [self.value(depth - 1) for _ in range(self._random.randint(0, 3))]
        if kind == "object":
            return {name: self.value(depth - 1) for name in self._names(3)}
        scalars = {"null": None, "boolean": self._random.random() < 0.5, "string": self._random.choice(TEXTS)}
        return scalars.get(kind, self._number())

    def instance(self, schema: Any, depth: int = 4) -> Any:
        """A value that a schema is about; it may fit."""
        if not isinstance(schema, dict) or depth <= 0 or self._random.random() < 0.1:
            return self.value(2)
        if "const" in schema:
            return schema["const"]
        if isinstance(schema.get("enum"), list) and schema["enum"]:
            return self._random.choice(schema["enum"])
        inner = [each for name in ("anyOf", "oneOf", "allOf") for each in schema.get(name, ())]
        if inner and self._random.random() < 0.6:
            return self.instance(self._random.choice(inner), depth - 1)
        if "properties" in schema or schema.get("type") == "object":
            named = schema.get("properties", {}).items()
            return {name: self.instance(each, depth - 1) for name, each in named if self._random.random() < 0.7}
        if schema.keys() & {"items", "prefixItems", "contains"} or schema.get("type") == "array":
            items = [*schema.get("prefixItems", ()), schema.get("items", True), schema.get("contains", True)]
            return [self.instance(each, depth - 1) for each in items[: self._random.randint(0, 4)]]
        return self._random.choice(TEXTS) if schema.get("type") == "string" else self.value(2)

    def _shaped(self, schema: dict[str, Any]) -> dict[str, Any]:
        """What people write beside some keywords."""
        if schema.keys() & {"properties", "required", "dependentRequired"}:
            return {"type": "object", "additionalProperties": self._random.random() < 0.4}
        if schema.keys() & {"items", "prefixItems", "contains", "uniqueItems"}:
            return {"type": "array", "maxItems": self._random.randint(0, 4)}
        return {"type": "string"} if schema.keys() & {"pattern", "format", "maxLength"} else {"type": self._type()}

    def _mutated(self, schema: Any) -> Any:
        places = list(walk(schema))
        for _ in range(self._random.randint(1, 3) if places else 0):
            place = self._random.choice(places)
            name = self._random.choices(list(self._keywords), self._weights)[0]
            roll = self._random.random()
            if roll < 0.3 and place:
                place.pop(self._random.choice(list(place)))
            elif roll < 0.8:
                place[name] = self._keywords[name](2)
            else:
                was = dict(place)
                place.clear()
                place[self._random.choice(("allOf", "anyOf", "oneOf"))] = [was, self.schema(2)]
        return schema

    def _anchored(self, schema: Any) -> Any:
        return {**schema, "$anchor": "d"} if isinstance(schema, dict) else schema

    def _type(self) -> Any:
        return self._random.choice(TYPES) if self._random.random() < 0.8 else self._random.sample(TYPES, 2)

    def _number(self) -> float:
        return self._random.choice(NUMBERS)

    def _names(self, most: int) -> list[str]:
        return self._random.sample(NAMES, self._random.randint(0, most))

    def _named(self, names: tuple[str, ...], depth: int, most: int = 3) -> dict[str, Any]:
        return {name: self.schema(depth) for name in self._random.sample(names, self._random.randint(1, most))}

    def _several(self, depth: int) -> list[Any]:
        return [self.schema(depth) for _ in range(self._random.randint(1, 3))]

    def _rest(self, depth: int) -> Any:
        return False if self._random.random() < 0.7 else self.schema(depth)


@dataclass(slots=True)
class Found:
    """What came of all schemas."""

    counts: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    wrong_accepts: list[tuple[Any, str]] = field(default_factory=list)
    wrong_rejects: list[tuple[Any, str]] = field(default_factory=list)
    broken: list[tuple[Any, str]] = field(default_factory=list)


class Fuzz:
    """Tries schemas one after the other."""

    def __init__(self, words: Vocabulary, seed: int, seeds: list[Any]) -> None:
        self.found = Found()
        self._random = random.Random(seed)
        self._schemas = Schemas(self._random, seeds)
        self._words = words
        self._backend = Compiler(lambda: words, "llguidance", max_bytes=0)
        ending = {i for i, text in enumerate(words.tokens) if set(text) <= set(b'"}]') and text}
        self._ending = np.isin(np.arange(words.size), list(ending))

    def one(self) -> None:
        schema = self._schemas.root()
        self.found.counts["schemas"] += 1
        try:
            validator = jsonschema_rs.Draft202012Validator(schema, validate_formats=True)
        except (ValueError, jsonschema_rs.ReferencingError):
            self.found.counts["no schemas"] += 1
            return
        try:
            grammar = self._backend.compile(Structured.json(schema))
        except RefusedError as error:
            self.found.counts["refused"] += 1
            self.found.refusals[str(error)[:60]] += 1
            return
        except Exception as error:
            self.found.broken.append((schema, f"compile: {error!r}"))
            return
        self.found.counts["compiled"] += 1
        self._walks(schema, validator, grammar)
        self._instances(schema, validator, grammar)

    def _walks(self, schema: Any, validator: Any, grammar: Grammar) -> None:
        for _ in range(WALKS):
            try:
                text = self._walk(grammar)
            except ValueError as error:
                self.found.broken.append((schema, f"walk: {error}"))
                return
            self.found.counts["walks"] += 1
            if text is None:
                continue
            self.found.counts["texts"] += 1
            try:
                value = json.loads(text, parse_float=_double)
            except OverflowError:
                self.found.counts["numbers beyond doubles"] += 1
                continue
            if not validator.is_valid(value):
                self.found.wrong_accepts.append((schema, text))
                return

    def _walk(self, grammar: Grammar) -> str | None:
        """A finished text; None if there was no end after so many tokens."""
        state, row, said = grammar.start(), np.zeros(self._words.num_words, np.int32), list[int]()
        for i in range(STEPS):
            state.fill(row)
            allowed = np.unpackbits(row.view(np.uint8), bitorder="little")[: self._words.size].astype(bool)
            ends = [token for token in self._words.eos_ids if allowed[token]]
            if ends and (self._random.random() < 0.3 + i / STEPS or allowed.sum() == len(ends)):
                return b"".join(self._words.tokens[token] for token in said).decode("utf-8", "surrogateescape")
            near_end = allowed & self._ending
            chosen = near_end if near_end.any() and self._random.random() < 0.15 + i / STEPS else allowed
            tokens = np.flatnonzero(chosen)
            tokens = tokens[~np.isin(tokens, self._words.eos_ids)]
            if not len(tokens):
                raise ValueError(f"nothing may come after {len(said)} tokens")
            token = int(self._random.choice(list(tokens)))
            if not state.advance(token):
                raise ValueError(f"token {token} of the mask may not come")
            said.append(token)
        return None

    def _instances(self, schema: Any, validator: Any, grammar: Grammar) -> None:
        for _ in range(INSTANCES):
            value = self._schemas.instance(schema)
            if not validator.is_valid(value):
                continue
            self.found.counts["valid instances"] += 1
            texts = list(spellings(value))
            if not any(accepts(grammar, text, self._words) for text in texts):
                self.found.wrong_rejects.append((schema, texts[0]))
                return


def _double(text: str) -> float:
    """Only what a double holds well enough for the oracle to judge: JSON has numbers of any size and precision."""
    found = float(text)
    if abs(found) >= 2**52:
        raise OverflowError(text)
    return found


def seeds_of(files: list[Path]) -> Iterator[Any]:
    """The schemas in suites of groups, and the parameters of tools."""
    for file in files:
        text = file.read_text("utf-8")
        if file.suffix == ".json":
            yield from (group["schema"] for group in json.loads(text))
            continue
        for line in text.splitlines():
            yield from (_modern(tool["parameters"]) for tool in json.loads(line)["function"])


def _modern(value: Any) -> Any:
    """Types by their names in JSON Schema."""
    if isinstance(value, list):
        return [_modern(inner) for inner in value]
    if not isinstance(value, dict):
        return value
    found = {name: _modern(inner) for name, inner in value.items()}
    if isinstance(found.get("type"), str):
        found["type"] = OLD_TYPES.get(found["type"], found["type"])
    return found


def tell(found: Found, verbose: bool) -> None:
    print("; ".join(f"{name} {count}" for name, count in found.counts.items()))
    sizes = len(found.wrong_accepts), len(found.broken), len(found.wrong_rejects)
    print("wrong accepts {}; broken {}; wrong rejects {}".format(*sizes))
    for name, failures in (("WRONG ACCEPT", found.wrong_accepts), ("BROKEN", found.broken)):
        for schema, text in failures:
            print(f"{name} {text!r} of {json.dumps(schema)}")
    if verbose:
        for schema, text in found.wrong_rejects:
            print(f"reject {text!r} of {json.dumps(schema)}")
        for reason, count in found.refusals.most_common(60):
            print(f"{count:6} {reason}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--schemas", type=int, default=10**9, help="at most so many")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=Path, nargs="*", default=[], help="files with schemas to be mutated")
    parser.add_argument("--verbose", action="store_true", help="show rejects of valid instances, and refusals")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = Tokenizer(write_tiny_model(Path(folder) / "tiny", "llama"))
    fuzz = Fuzz(vocabulary(tokenizer, tokenizer.vocab_size), options.seed, list(seeds_of(options.seeds)))
    end = time.monotonic() + options.seconds
    while time.monotonic() < end and fuzz.found.counts["schemas"] < options.schemas:
        fuzz.one()
    tell(fuzz.found, options.verbose)
    return 1 if fuzz.found.wrong_accepts or fuzz.found.broken else 0


if __name__ == "__main__":
    sys.exit(main())
