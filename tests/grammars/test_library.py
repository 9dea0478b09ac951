"""The library's grammars against their own examples, with every backend that takes them, and against whoever knows the
format better: what can be said there must be what Python, SQLite and others read."""

from __future__ import annotations

import ast
import configparser
import csv
import io
import ipaddress
import json
import keyword
import random
import re
import sqlite3
import uuid
import warnings
import xml.etree.ElementTree
from collections.abc import Callable
from contextlib import closing
from datetime import date, datetime
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest

from specserve.errors import InputError
from specserve.registry import GRAMMARS
from specserve.structured import library
from specserve.structured.base import Backend, Grammar, Vocabulary
from specserve.structured.compiler import Compiler
from specserve.structured.spec import Structured
from specserve.structured.vocabulary import vocabulary
from specserve.text.tokenizer import Tokenizer

NAMES = library.names()
LEAST = 8  # examples of either sort
EOS = 256
BYTES = Vocabulary([*(bytes([byte]) for byte in range(256)), b""], (EOS,), 257, lambda text: list(text.encode()))


@cache
def backend(name: str) -> Backend:
    found: Backend = GRAMMARS.find(name)(BYTES)
    return found


@cache
def taken(kind: str) -> list[str]:
    """The backends that are installed and take a kind."""
    return [name for name in GRAMMARS.names() if GRAMMARS.missing(name) is None and kind in backend(name).kinds]


PAIRS = [(name, maker) for name in NAMES for maker in taken(library.find(name).kind)]


@cache
def compiled(maker: str, name: str) -> Grammar:
    return backend(maker).compile(Structured.named(name))


def accepts(maker: str, name: str, text: str) -> bool:
    state = compiled(maker, name).start()
    return all(state.advance(token) for token in (*text.encode(), EOS))


def test_every_grammar_has_examples_and_a_backend() -> None:
    for name in NAMES:
        entry = library.find(name)
        assert len(entry.valid) >= LEAST and len(entry.invalid) >= LEAST, name
        assert not set(entry.valid) & set(entry.invalid), name
        assert entry.description.endswith(".") and len(entry.description) < 120, name
        assert "llguidance" in taken(entry.kind), name
    files = {file.stem for file in library._folder().iterdir()}
    assert files == set(NAMES), "every file belongs to a grammar"


@pytest.mark.parametrize(("name", "maker"), PAIRS)
def test_what_is_valid_is_accepted_to_its_end_and_what_is_not_is_not(name: str, maker: str) -> None:
    entry = library.find(name)
    assert [text for text in entry.valid if not accepts(maker, name, text)] == []
    assert [text for text in entry.invalid if accepts(maker, name, text)] == []


# --- who knows better -------------------------------------------------------------------------------------------------


def read_json(text: str) -> None:
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def read_python(text: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ast.parse(text, mode="eval")


def read_arithmetic(text: str) -> None:
    allowed = (ast.Expression, ast.BinOp, ast.UnaryOp, ast.Constant, ast.operator, ast.unaryop)
    assert all(isinstance(node, allowed) for node in ast.walk(ast.parse(text, mode="eval")))


def read_csv(text: str) -> None:
    list(csv.reader(io.StringIO(text, newline=""), strict=True))


def read_ini(text: str) -> None:
    parser = configparser.RawConfigParser(strict=False, delimiters=("=",), inline_comment_prefixes=None)
    parser.read_string("[first]\n" + text.replace("[DEFAULT]", "[other]"))


def read_date_time(text: str) -> None:
    assert datetime.fromisoformat(text).tzinfo is not None


def read_phone(text: str) -> None:
    assert re.fullmatch(r"\+[1-9]\d{1,14}", text, re.ASCII)


def read_color(text: str) -> None:
    assert len(bytes.fromhex(text[1:] if len(text) > 5 else "".join(2 * c for c in text[1:]))) in (3, 4)


def read_semver(text: str) -> None:
    core, _, build = text.partition("+")
    numbers, dash, names = core.partition("-")
    assert all(part == str(int(part)) for part in numbers.split(".")) and numbers.count(".") == 2
    parts = names.split(".") if dash else []
    assert all(part and not (part.isdigit() and part != str(int(part))) for part in parts)
    assert all((*parts, *(build.split(".") if "+" in text else ())))


def read_url(text: str) -> None:
    parts = urlsplit(text)
    assert parts.scheme in ("http", "https") and parts.hostname
    assert parts.port is None or 1 <= parts.port <= 65535


def read_uuid(text: str) -> None:
    assert str(uuid.UUID(text)) == text.lower()


def read_fen(text: str) -> None:
    board = text.split()[0].split("/")
    assert [sum(int(c) if c.isdigit() else 1 for c in rank) for rank in board] == [8] * 8
    assert not re.search("[0-9][0-9]", text.split()[0])


def read_table(text: str) -> None:
    assert len({len(re.findall(r"\|", line)) for line in text.splitlines()}) == 1


def read_html(text: str) -> None:
    xml.etree.ElementTree.fromstring(f"<body>{text}</body>")


def read_sql(text: str) -> None:
    """SQLite parses it: with names that nobody made it finds the first of them missing, and nothing else wrong."""
    try:
        with closing(sqlite3.connect(":memory:")) as database:
            database.execute(text)
    except sqlite3.OperationalError as error:
        if not str(error).startswith("no such table"):
            raise


ORACLES: dict[str, Callable[[str], object]] = {
    "arithmetic": read_arithmetic,
    "chess-fen": read_fen,
    "csv": read_csv,
    "date": date.fromisoformat,
    "date-time": read_date_time,
    "hex-color": read_color,
    "html": read_html,
    "ini": read_ini,
    "ipv4": ipaddress.IPv4Address,
    "ipv6": ipaddress.IPv6Address,
    "json": read_json,
    "json-lines": lambda text: [read_json(line) for line in text.removesuffix("\n").split("\n")],
    "markdown-table": read_table,
    "phone": read_phone,
    "python-expression": read_python,
    "semver": read_semver,
    "sql": read_sql,
    "url": read_url,
    "uuid": read_uuid,
}
# Invalid here and fine there: their readers know other forms of the same.
WIDER = ("arithmetic", "csv", "date-time", "html", "ini", "markdown-table", "phone", "python-expression", "sql", "url")


@pytest.mark.parametrize("name", sorted(ORACLES))
def test_examples_are_what_others_read(name: str) -> None:
    entry = library.find(name)
    for text in entry.valid:
        ORACLES[name](text)


@pytest.mark.parametrize("name", sorted(set(ORACLES) - set(WIDER)))
def test_what_is_invalid_is_so_to_others(name: str) -> None:
    for text in library.find(name).invalid:
        with pytest.raises((ValueError, AssertionError, IndexError, pytest.fail.Exception)):
            ORACLES[name](text)
            pytest.fail(f"{text!r} is valid")


def said_at_random(maker: str, name: str, chance: random.Random) -> str | None:
    """A text that the masks allow, of ASCII where there is a choice, and often with what closes something; None if it
    has no end soon."""
    state, text, row = compiled(maker, name).start(), bytearray(), np.zeros(9, np.int32)
    for _ in range(200):
        state.fill(row)
        bits = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
        may_come = [int(t) for t in bits if 32 <= t < 127 or t in (10, EOS)] or [int(t) for t in bits]
        assert may_come, f"nothing may follow {bytes(text)!r}"
        closing = [t for t in may_come if t == EOS or t in b"|<\n\"')]} "]
        token = chance.choice(closing if closing and chance.random() < 0.4 else may_come)
        assert state.advance(token)
        if token == EOS:
            return text.decode()
        text.append(token)
    return None


@cache
def said(maker: str, name: str) -> list[str]:
    chance = random.Random(name)
    texts = [said_at_random(maker, name, chance) for _ in range(60)]
    ended = [text for text in texts if text is not None]
    assert len(ended) >= 8, "too few ended to tell anything"
    return ended


@pytest.mark.parametrize(("name", "maker"), PAIRS)
def test_whatever_is_said_every_backend_takes(name: str, maker: str) -> None:
    for other in taken(library.find(name).kind):
        assert [text for text in said(maker, name) if not accepts(other, name, text)] == [], other


@pytest.mark.parametrize(("name", "maker"), [pair for pair in PAIRS if pair[0] in ORACLES])
def test_whatever_is_said_others_read(name: str, maker: str) -> None:
    for text in said(maker, name):
        if name.startswith("date") and text.startswith("0000"):
            continue  # Python's years begin with 1
        ORACLES[name](text)


# --- single rules -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("maker", taken("regex"))
def test_days_are_those_of_the_calendar(maker: str) -> None:
    grammar = compiled(maker, "date")
    for year in (1, 4, 96, 100, 400, 1900, 2000, 2023, 2024, 2100):
        for month in range(14):
            for day in (0, 1, 28, 29, 30, 31, 32):
                state, text = grammar.start(), f"{year:04}-{month:02}-{day:02}"
                try:
                    exists = bool(date(year, month, day))
                except ValueError:
                    exists = False
                assert all(state.advance(token) for token in (*text.encode(), EOS)) == exists, text


@pytest.mark.parametrize("maker", taken(library.find("python-expression").kind))
def test_names_are_no_keywords(maker: str) -> None:
    grammar = compiled(maker, "python-expression")
    others = [word[:-1] for word in keyword.kwlist] + [f"{word}_" for word in keyword.kwlist] + ["a", "_", "x1", "Zz"]
    wrong = []
    for word in {*others, *keyword.kwlist}:
        state = grammar.start()
        is_name = word.isidentifier() and (word not in keyword.kwlist or word in ("None", "True", "False"))
        if all(state.advance(token) for token in (*word.encode(), EOS)) != is_name:
            wrong.append(word)
    assert wrong == []


@pytest.mark.parametrize("maker", taken(library.find("sql").kind))
def test_names_in_sql_are_names_to_sqlite(maker: str) -> None:
    grammar = compiled(maker, "sql")
    words = [
        "fro",
        "from",
        "fromm",
        "select",
        "selec",
        "end",
        "ending",
        "user",
        "users",
        "a1",
        "order_by",
        "group",
        "join",
    ]
    for word in words:
        text = f"SELECT {word} FROM {word} AS {word}"
        state = grammar.start()
        if all(state.advance(token) for token in (*text.encode(), EOS)):
            read_sql(text)
        else:
            assert word in ("from", "select", "end", "user", "group", "join"), word


def test_examples_of_sql_run() -> None:
    """On tables made for each: qualified columns in their tables, all others in the first."""
    for text in library.find("sql").valid:
        plain = re.sub("'(?:[^']|'')*'", "''", text)
        tables = {alias or table: table for table, alias in re.findall(r"(?:FROM|JOIN) (\w+)(?: AS (\w+))?", plain)}
        columns: dict[str, set[str]] = {table: {"rowid_"} for table in tables.values()}
        for owner, column in re.findall(r"([a-z_]\w*)\.(\w+)", plain):
            columns[tables[owner]].add(column)
        columns[next(iter(columns))] |= set(re.findall(r"(?<![.\w])[a-z_]\w*(?![.\w])", plain))
        with closing(sqlite3.connect(":memory:")) as database:
            for table, known in columns.items():
                names = ", ".join(f'"{column}"' for column in sorted(known))
                database.execute(f'CREATE TABLE "{table}" ({names})')
            database.execute(text).fetchall()


def test_examples_are_judged_alike_in_the_tokens_of_a_real_model(smollm2: Path) -> None:
    tokenizer = Tokenizer(smollm2)
    words = vocabulary(tokenizer, tokenizer.vocab_size)
    compilers = [Compiler(lambda: words)] + [Compiler(lambda: words, "outlines")] * ("outlines" in taken("regex"))
    for name, compiler in ((name, compiler) for compiler in compilers for name in NAMES):
        entry = library.find(name)
        if compiler is not compilers[0] and entry.kind != "regex":
            continue
        grammar = compiler.compile(Structured.named(name))
        for text in (*entry.valid, *entry.invalid):
            state = grammar.start()
            accepted = all(state.advance(token) for token in (*words.encode(text), words.eos_ids[0]))
            assert accepted == (text in entry.valid), (name, text)


def test_an_unknown_name_lists_those_that_are_near() -> None:
    with pytest.raises(InputError, match="Did you mean 'date-time'") as caught:
        Structured.named("datetime")
    assert caught.value.param == "structured"
    with pytest.raises(InputError, match="Unknown grammar 'library/date'"):
        Structured.named("library/date")
