"""Each constraint is compiled once, whoever asks and however often; what is kept is bounded; failures are kept too."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from specserve.errors import ConfigError
from specserve.registry import GRAMMARS
from specserve.structured import compiler as module
from specserve.structured.base import Backend, Grammar, RefusedError, Vocabulary
from specserve.structured.compiler import Compiler, check_backend
from specserve.structured.spec import Structured
from specserve.testing import LanguageGrammar

WORDS = Vocabulary([b"", b"a", b"b"], (0,), 3, lambda text: [" ab".index(letter) for letter in text])


class Made(LanguageGrammar):
    num_bytes = 1000


class FakeBackend:
    kinds = frozenset({"regex"})

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.pause_s = 0.0

    def compile(self, asked: Structured) -> Grammar:
        self.asked.append(asked.text)
        time.sleep(self.pause_s)
        if asked.text == "bad":
            raise RefusedError("this is bad.")
        if asked.text == "bug" and self.asked.count("bug") == 1:
            raise RuntimeError("a planted fault")
        return Made([[1]])


class FakeRegistry:
    """Backends in their order; of one that is None a package is missing."""

    def __init__(self, found: dict[str, Backend | None]) -> None:
        self.found = found

    def ranked(self) -> list[str]:
        return list(self.found)

    def missing(self, name: str) -> str | None:
        return name if self.found[name] is None else None

    def find(self, name: str) -> Callable[[Vocabulary], Backend | None]:
        return lambda vocabulary: self.found[name]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeBackend:
    backend = FakeBackend()
    monkeypatch.setattr(module, "GRAMMARS", FakeRegistry({"fake": backend}))
    return backend


def compiler(max_bytes: int = 2**20) -> Compiler:
    return Compiler(lambda: Vocabulary([], (0,), 1, lambda text: []), max_bytes=max_bytes)


def test_the_same_is_compiled_once(fake: FakeBackend) -> None:
    made = compiler()
    assert made.compile(Structured.regex("a")) is made.compile(Structured.regex("a"))
    assert made.known(Structured.regex("a"))
    assert not made.known(Structured.regex("b"))
    made.compile(Structured.regex("b"))
    assert fake.asked == ["a", "b"]


def test_a_refusal_is_kept_and_told_to_everybody(fake: FakeBackend) -> None:
    made = compiler()
    for _ in range(3):
        with pytest.raises(RefusedError, match=r"^structured: this is bad\.$"):
            made.compile(Structured.regex("bad"))
    assert fake.asked == ["bad"]


def test_a_fault_of_the_backend_is_not_kept(fake: FakeBackend) -> None:
    made = compiler()
    with pytest.raises(RuntimeError, match="planted"):
        made.compile(Structured.regex("bug"))
    assert made.compile(Structured.regex("bug")) is not None
    assert made.num_bytes == 1000 + sys.getsizeof("bug")


def test_many_who_ask_at_once_wait_for_one(fake: FakeBackend) -> None:
    fake.pause_s = 0.2
    made, found = compiler(), []
    threads = [threading.Thread(target=lambda: found.append(made.compile(Structured.regex("a")))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert fake.asked == ["a"]
    assert len(found) == 8
    assert len(set(map(id, found))) == 1


def test_what_is_kept_is_bounded_and_what_was_used_last_stays(fake: FakeBackend) -> None:
    made = compiler(max_bytes=5300)
    for i in range(10_000):
        made.compile(Structured.regex(f"{i:04}"))
        made.compile(Structured.regex("used"))
        assert made.num_bytes <= 5300
    assert fake.asked.count("used") == 1
    assert made.known(Structured.regex("9999"))
    assert not made.known(Structured.regex("9000"))


def test_what_grows_with_use_is_counted_when_something_new_comes(fake: FakeBackend) -> None:
    made = compiler(max_bytes=5300)
    grown = made.compile(Structured.regex("grown"))
    for name in ("a", "b"):
        made.compile(Structured.regex(name))
    grown.num_bytes += 3000
    made.compile(Structured.regex("c"))
    assert made.num_bytes <= 5300
    assert [made.known(Structured.regex(name)) for name in ("grown", "a", "b", "c")] == [False, True, True, True]


def test_a_kind_that_no_backend_takes_is_refused(fake: FakeBackend) -> None:
    with pytest.raises(RefusedError, match="lark is not supported"):
        compiler().compile(Structured.grammar("start: X"))


class PickyBackend:
    """Takes what begins with its own letter."""

    def __init__(self, letter: str, kinds: frozenset[str]) -> None:
        self.letter = letter
        self.kinds = kinds

    def compile(self, asked: Structured) -> Grammar:
        if not asked.text.startswith(self.letter):
            raise RefusedError(f"it does not begin with {self.letter}. {'Really. ' * 99}")
        return Made([[ord(self.letter)]])


@pytest.fixture
def picky(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    both = frozenset({"regex", "lark"})
    found: dict[str, Backend | None] = {
        "a": PickyBackend("a", both),
        "gone": None,
        "b": PickyBackend("b", both),
        "c": PickyBackend("c", both - {"lark"}),
    }
    monkeypatch.setattr(module, "GRAMMARS", FakeRegistry(found))
    return compiler()


def test_auto_takes_the_first_that_can_enforce_it(picky: Compiler) -> None:
    for letter in "abc":
        made = picky.compile(Structured.regex(letter))
        assert isinstance(made, Made)
        assert made.sentences == [(ord(letter),)]


def test_when_all_refuse_each_is_heard_shortly_the_first_at_the_front(picky: Compiler) -> None:
    with pytest.raises(RefusedError, match=r"^structured: a: it does not .* b: it does not .* c: it does not") as said:
        picky.compile(Structured.regex("x"))
    assert len(str(said.value)) < 1000
    with pytest.raises(RefusedError, match=r"^structured: a: it does not .* b: it does not begin") as said:
        picky.compile(Structured.grammar("c"))
    assert "begin with c" not in str(said.value)


NEEDED = {"llguidance": "llguidance", "xgrammar": "xgrammar", "outlines": "outlines_core"}  # by backend


@pytest.fixture
def uninstall(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes packages as if they were not installed."""

    def hide(*packages: str) -> None:
        for name in [name for name in sys.modules if name.startswith("specserve.grammars.")]:
            monkeypatch.delitem(sys.modules, name)
        for package in packages:
            monkeypatch.setitem(sys.modules, package, None)  # what is None there cannot be imported

    return hide


@pytest.mark.parametrize("backend", NEEDED)
def test_one_that_is_asked_for_by_name_and_is_missing_is_refused_at_once(
    backend: str, uninstall: Callable[..., None]
) -> None:
    uninstall(NEEDED[backend])
    assert GRAMMARS.missing(backend) == NEEDED[backend]
    command = f"needs the package {NEEDED[backend]}, .* pip install 'specserve\\[{backend}\\]'"
    for ask in (lambda: check_backend(backend), lambda: Compiler(lambda: WORDS, backend)):
        with pytest.raises(ConfigError, match=command):
            ask()


@pytest.mark.parametrize("missing", ["llguidance", "xgrammar"])
def test_auto_does_without_one_that_is_missing(missing: str, uninstall: Callable[..., None]) -> None:
    for package in {"llguidance", "xgrammar"} - {missing}:
        pytest.importorskip(package)
    uninstall(missing)
    made = Compiler(lambda: WORDS)
    made.prepare()
    row = np.zeros(1, np.int32)
    made.compile(Structured.regex("ab?")).start().fill(row)
    assert row.tolist() == [0b010]


def test_without_any_the_refusal_says_so(uninstall: Callable[..., None]) -> None:
    uninstall("llguidance", "xgrammar")
    with pytest.raises(RefusedError, match="none of the grammar backends llguidance, xgrammar is installed"):
        Compiler(lambda: WORDS).compile(Structured.regex("a"))


def test_a_module_of_our_own_that_is_missing_is_no_missing_package(uninstall: Callable[..., None]) -> None:
    uninstall("specserve.grammars._lean")
    with pytest.raises(ModuleNotFoundError, match=r"specserve\.grammars\._lean"):
        GRAMMARS.missing("xgrammar")


@pytest.mark.parametrize("backend", GRAMMARS.names())
def test_a_backend_that_can_be_imported_can_be_made(backend: str) -> None:
    """What it needs is asked for when it is imported, and not later: so nobody who has asked is surprised."""
    if GRAMMARS.missing(backend) is not None:
        pytest.skip(f"{GRAMMARS.missing(backend)} is not installed.")
    loaded = set(sys.modules)
    Compiler(lambda: WORDS, backend).prepare()
    ours = set(sys.stdlib_module_names) | {"specserve", "numpy", "torch"}
    assert {name.partition(".")[0] for name in set(sys.modules) - loaded} <= ours


def test_parts_of_backends_are_no_backends() -> None:
    assert "xgrammar" in GRAMMARS.names()
    assert not [name for name in GRAMMARS.names() if name.startswith("_")]


def test_backends_are_files() -> None:
    assert "llguidance" in GRAMMARS.names()
    assert all(name in GRAMMARS.names() for name in GRAMMARS.ranked())
    with pytest.raises(ConfigError, match="llguidance"):
        Compiler(lambda: Vocabulary([], (0,), 1, lambda text: []), "lguidance")


def test_a_backend_that_fails_costs_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of its own is a refusal, logged, and kept like any other."""
    words = Vocabulary([b"a", b""], (1,), 2, lambda text: [0] * len(text))
    compiler = Compiler(lambda: words, "llguidance")
    compiler.prepare()
    backend = compiler._backends["llguidance"]
    assert backend is not None

    def failing(asked: Structured) -> Grammar:
        raise AttributeError("a planted fault")

    monkeypatch.setattr(backend, "compile", failing)
    for _ in range(2):
        with pytest.raises(RefusedError, match=r"this regex is not understood \(AttributeError\)"):
            compiler.compile(Structured.regex("a"))
