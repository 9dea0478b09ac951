"""Requests through a port of this process: each ends once, with events or with an error, whatever ends it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from specserve.config import EngineConfig
from specserve.engine.build import Built, build
from specserve.engine.compiling import Compiling
from specserve.engine.port import EnginePort, LocalPort, QueueTimeoutError, ThreadPort
from specserve.engine.request import Request
from specserve.errors import EngineError, InputError, SpecserveError
from specserve.structured.base import Grammar
from specserve.structured.spec import Structured
from specserve.testing import write_tiny_model
from specserve.types import Event, SamplingParams

Got = list[Event | SpecserveError]
SCHEMA = Structured.choice(["yes", "no"])


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = write_tiny_model(tmp_path_factory.mktemp("tiny"), "llama", seed=3)
    options: dict[str, Any] = {"drafter": "none", "max_step_ms": 1e9}  # how many steps there are hangs on no time
    return build(EngineConfig(model=str(folder), dtype="float32", max_model_len=128, max_num_seqs=2, **options))


class Held(Compiling):
    """Compiles when it is let."""

    def __init__(self, built: Built) -> None:
        super().__init__(built.compiler, None)
        self.may_go_on = threading.Event()

    def compile(self, request: Request) -> Grammar | None:
        self.may_go_on.wait(60)
        return super().compile(request)


@pytest.fixture
def held(built: Built) -> Iterator[Held]:
    compiling = Held(built)
    yield compiling
    compiling.may_go_on.set()
    compiling.close()


def asking(name: str, num_tokens: int = 4, **more: object) -> Request:
    params = SamplingParams(temperature=0, max_tokens=num_tokens, **more)  # type: ignore[arg-type]
    return Request(id=name, prompt_ids=[5, 6, 7], params=params)


def ends(got: Got) -> list[tuple[int, str | None]]:
    return [(event.index, event.finish_reason) for event in got if isinstance(event, Event) and event.finish_reason]


def run(port: LocalPort) -> None:
    end = time.monotonic() + 60
    while port.wait_s is not None:
        assert time.monotonic() < end
        port.step()


def test_a_structured_request_joins_in_when_its_grammar_is_ready(built: Built, held: Held) -> None:
    port = LocalPort(built.engine, held)
    free, bound = Got(), Got()
    port.submit(asking("bound", 20, structured=SCHEMA), bound.append)
    port.submit(asking("free"), free.append)
    while not ends(free):
        assert port.step(), "no step waits for a grammar"
    assert (port.wait_s, port.step(), bound) == (0.001, False, [])
    held.may_go_on.set()
    run(port)
    assert ends(bound) == [(0, "stop")]
    tokens = [token for event in bound if isinstance(event, Event) for token in event.tokens]
    assert built.tokenizer.decode(tokens, skip_special_tokens=True) in ("yes", "no")


@pytest.mark.parametrize(("structured", "why"), [(None, "token id 999"), (Structured.regex("("), "structured")])
def test_what_is_refused_gets_the_error_and_nothing_else(built: Built, structured: Structured | None, why: str) -> None:
    port, got = LocalPort(built.engine, Compiling(built.compiler, None)), Got()
    params = SamplingParams(structured=structured)
    port.submit(Request(id="x", prompt_ids=[5] if structured else [999], params=params), got.append)
    run(port)
    (error,) = got
    assert isinstance(error, InputError)
    assert why in str(error)
    assert not port.engine.requests


def test_an_abort_while_the_grammar_is_compiled_ends_every_completion(built: Built, held: Held) -> None:
    port, got = LocalPort(built.engine, held), Got()
    port.submit(asking("x", n=2, structured=SCHEMA), got.append)
    port.abort("x")
    assert ends(got) == [(0, "abort"), (1, "abort")]
    held.may_go_on.set()
    run(port)
    port.abort("x")
    assert len(got) == 2, "nothing follows the end"


def test_what_has_not_begun_expires(built: Built, held: Held) -> None:
    port = LocalPort(built.engine, held)
    got: dict[str, Got] = {name: [] for name in ("runs", "waits", "compiles")}
    port.submit(asking("runs", n=2), got["runs"].append)
    port.step()
    port.submit(asking("waits"), got["waits"].append)
    port.submit(asking("compiles", structured=SCHEMA), got["compiles"].append)
    for name in (*got, "unknown"):
        port.expire(name)
    run(port)
    assert ends(got["runs"]) == [(0, "length"), (1, "length")]
    for name in ("waits", "compiles"):
        (error,) = got[name]
        assert isinstance(error, QueueTimeoutError)
    assert built.engine.cache.num_free == built.engine.cache.num_blocks


def test_a_listener_may_abort(built: Built) -> None:
    """What a stop string does: each completion ends once, also one whose own end came in the same step."""
    port, got = LocalPort(built.engine, Compiling(built.compiler, None)), Got()

    def listener(event: Event | SpecserveError) -> None:
        got.append(event)
        if isinstance(event, Event) and event.index == 0 and event.finish_reason is None:
            port.abort("x", 0)

    port.submit(asking("x", 1, n=2, ignore_eos=True), got.append)
    port.submit(asking("y", 3, n=2, ignore_eos=True), lambda event: None)
    run(port)
    assert ends(got) == [(0, "length"), (1, "length")]
    got.clear()
    port.submit(asking("x", 3, n=2, ignore_eos=True), listener)
    run(port)
    assert sorted(ends(got)) == [(0, "abort"), (1, "length")]


def raising(got: Got) -> Callable[[Event | SpecserveError], object]:
    """A listener that takes what comes, and raises with it each time."""

    def listener(event: Event | SpecserveError) -> None:
        got.append(event)
        raise KeyError(len(got))

    return listener


def test_a_listener_that_raises_costs_nobody_an_event(built: Built) -> None:
    """Of four requests two have such listeners: all four get what each gets alone, and each step raises."""
    names = ("a", "b", "c", "d")
    port, got = LocalPort(built.engine, Compiling(built.compiler, None)), {name: Got() for name in names}
    port.submit(asking("alone", 6, ignore_eos=True), got["a"].append)
    run(port)
    alone = [event.tokens for event in got["a"] if isinstance(event, Event)]
    got["a"].clear()
    for name in names:
        listener = raising(got[name]) if name in "bd" else got[name].append
        port.submit(asking(name, 6, ignore_eos=True), listener)
    num_raised = 0
    while port.wait_s is not None:
        try:
            port.step()
        except KeyError:
            num_raised += 1
    assert num_raised == 12, "two seats, one of them always such a listener's"
    for name in names:
        assert [event.tokens for event in got[name] if isinstance(event, Event)] == alone
        assert ends(got[name]) == [(0, "length")]
    for name in "ab":
        port.submit(asking(name, n=2), raising(got[name]))
    with pytest.raises(KeyError):
        port.abort("a")
    assert ends(got["a"])[1:] == [(0, "abort"), (1, "abort")]
    port.submit(asking("c"), got["c"].append)
    with pytest.raises(KeyError):
        port.fail(EngineError("gone"))
    assert [type(got[name][-1]) for name in "bc"] == [EngineError, EngineError]
    port.abort("b")
    port.abort("c")


def test_of_grammars_that_are_ready_at_once_each_is_let_in_or_refused(built: Built, held: Held) -> None:
    """Two of three are refused, and the first one's listener raises: the other hears of it in the same step."""
    port, got = LocalPort(built.engine, held), {name: Got() for name in ("raises", "refused", "runs")}
    for name, listener in (("raises", raising(got["raises"])), ("refused", got["refused"].append)):
        port.submit(asking(name, structured=Structured.regex("(")), listener)
    port.submit(asking("runs", 20, structured=SCHEMA), got["runs"].append)
    held.may_go_on.set()
    until(lambda: all(compiled.done() for _, compiled in held._waiting.values()))
    with pytest.raises(KeyError):
        port.step()
    for name in ("raises", "refused"):
        (error,) = got[name]
        assert isinstance(error, InputError), name
    run(port)
    assert ends(got["runs"]) == [(0, "stop")]


@pytest.mark.parametrize("second", [None, SCHEMA], ids=["free", "structured"])
@pytest.mark.parametrize("first", [None, SCHEMA], ids=["free", "structured"])
def test_an_id_in_use_is_refused_and_whose_it_is_hears_all(
    built: Built, held: Held, first: Structured | None, second: Structured | None
) -> None:
    port, got, other = LocalPort(built.engine, held), Got(), Got()
    port.submit(asking("x", 20, structured=first), got.append)
    port.submit(asking("x", 20, structured=second), other.append)
    with pytest.raises(InputError, match="in use"):
        port.add(asking("x"), None, other.append)
    held.may_go_on.set()
    run(port)
    assert [index for index, _ in ends(got)] == [0]
    (error,) = other
    assert isinstance(error, InputError)
    assert error.param == "request_id"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("structured", [None, SCHEMA], ids=["free", "structured"])
def test_a_request_that_the_engine_fails_to_take_is_told_and_so_are_all(
    built: Built, monkeypatch: pytest.MonkeyPatch, structured: Structured | None
) -> None:
    """Not refused: the engine itself is at fault, and nobody knows in what state it was left."""
    engine, got = built.engine, {name: Got() for name in ("runs", "fails")}

    def add(request: Request, grammar: Grammar | None = None) -> None:
        if request.id == "fails":
            raise RuntimeError("planted")
        type(engine).add(engine, request, grammar)

    monkeypatch.setattr(engine, "add", add)
    thread = ThreadPort(LocalPort(engine, Compiling(built.compiler, None)))
    thread.submit(asking("runs", 100, ignore_eos=True), got["runs"].append)
    thread.submit(asking("fails", structured=structured), got["fails"].append)
    until(lambda: all(got.values()) and isinstance(got["runs"][-1], EngineError))
    (error,) = got["fails"]
    assert isinstance(error, EngineError) and "planted" in str(error)
    thread.close()  # what it raised comes in this test, not in the next
    engine.abort("runs")
    local = LocalPort(engine, Compiling(built.compiler, None))
    with pytest.raises(RuntimeError, match="planted"):
        local.add(asking("fails"), None, got["fails"].append)
    local.fail(EngineError("gone"))
    assert len(got["fails"]) == 1, "who called is told by what was raised"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("failure", [RuntimeError("planted"), SystemExit("planted")])
def test_nothing_that_is_queued_reaches_an_engine_that_failed(
    built: Built, monkeypatch: pytest.MonkeyPatch, failure: BaseException
) -> None:
    """Requests that came while the step ran that failed: each is told, whatever another's listener raises."""
    port, stepping, may_fail = (
        LocalPort(built.engine, Compiling(built.compiler, None)),
        threading.Event(),
        threading.Event(),
    )
    got = {name: Got() for name in ("runs", "raises", "queued", "compiles")}
    called: list[str] = []

    def fails() -> bool:
        stepping.set()
        may_fail.wait(60)
        for name in ("submit", "abort", "expire", "reset_prefix_cache"):
            monkeypatch.setattr(port, name, lambda *_, name=name: called.append(name))
        raise failure

    monkeypatch.setattr(port, "step", fails)
    thread = ThreadPort(port)
    thread.submit(asking("runs"), got["runs"].append)
    assert stepping.wait(60)
    thread.submit(asking("raises"), raising(got["raises"]))
    thread.submit(asking("queued"), got["queued"].append)
    thread.submit(asking("compiles", structured=SCHEMA), got["compiles"].append)
    thread.abort("runs")
    thread.expire("queued")
    thread.reset_prefix_cache()
    may_fail.set()
    until(lambda: all(got.values()))
    for (error,) in got.values():
        assert isinstance(error, EngineError) and "planted" in str(error)
    assert called == []
    with pytest.raises(EngineError, match="planted"):
        thread.submit(asking("never"), got["queued"].append)
    thread.close()  # what it raised comes in this test, not in the next
    built.engine.abort("runs")


def test_a_thread_carries_it_all(built: Built) -> None:
    thread = ThreadPort(LocalPort(built.engine, Compiling(built.compiler, None)))
    port: EnginePort = thread
    got: dict[str, Got] = {name: [] for name in ("a", "b", "long", "late")}
    port.submit(asking("a", 20, structured=SCHEMA), got["a"].append)
    port.submit(asking("b"), got["b"].append)
    port.submit(asking("long", 100, ignore_eos=True), got["long"].append)
    until(lambda: bool(got["long"]))
    port.abort("long")
    until(lambda: all(ends(got[name]) for name in ("a", "b", "long")))
    assert (ends(got["a"]), ends(got["b"]), ends(got["long"])) == ([(0, "stop")], [(0, "length")], [(0, "abort")])
    port.submit(asking("late", 100, ignore_eos=True), got["late"].append)
    thread.close()
    assert isinstance(got["late"][-1], EngineError)
    with pytest.raises(EngineError, match="closed"):
        port.submit(asking("never"), got["late"].append)


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)
