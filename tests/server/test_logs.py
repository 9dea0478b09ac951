"""The log: what a record looks like, whose it is, and what a client's strings cannot do to it."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given, strategies as st

from specserve.errors import ConfigError
from specserve.server.logs import LONGEST_MESSAGE, LONGEST_VALUE, clip, configure, log_request, request_id

LOG = logging.getLogger("specserve.test")
HALF = 1_700_000_000.5
NASTY = 'a\nb\r\x1b[31m\x00\u2028\u202e"\\ ' + "\ud800"


@contextmanager
def captured(format: Any = "json", level: str = "debug") -> Iterator[Callable[[], list[str]]]:
    """The lines logged so far, and a logging as it was afterwards."""
    root = logging.getLogger()
    handlers, old_level, stream = root.handlers[:], root.level, io.StringIO()
    for handler in handlers:
        root.removeHandler(handler)  # or configure would close pytest's own
    try:
        configure(format, level, stream)
        yield lambda: stream.getvalue().splitlines()
    finally:
        logging.captureWarnings(False)
        root.handlers[:] = handlers
        root.setLevel(old_level)


def said(act: Callable[[], object]) -> dict[str, Any]:
    """What one act logs, as JSON."""
    with captured() as lines:
        act()
        (line,) = lines()
        return json.loads(line)


def make(message: str, *arguments: object, **fields: Any) -> logging.LogRecord:
    record = LOG.makeRecord(LOG.name, logging.INFO, "f.py", 1, message, arguments, None, extra=fields)
    record.created = HALF
    return record


def test_a_record_as_json() -> None:
    assert said(lambda: LOG.handle(make("%d blocks", 5, free=3, share=0.5, on=True, none=None))) == {
        "time": "2023-11-14T22:13:20.500Z",
        "level": "info",
        "logger": "specserve.test",
        "message": "5 blocks",
        "free": 3,
        "share": 0.5,
        "on": True,
        "none": None,
    }


def test_a_record_as_text() -> None:
    with captured("text") as lines:
        LOG.handle(make("started", request_id="r1", model="a b", empty="", count=3))
        expected = 'INFO    specserve.test: started request_id=r1 model="a b" empty="" count=3'
        assert lines() == [f"2023-11-14T22:13:20.500Z {expected}"]


def test_an_exception_is_one_field() -> None:
    def fail() -> None:
        try:
            raise ValueError("first\nsecond")
        except ValueError:
            LOG.exception("failed")

    found = said(fail)
    assert found["message"] == "failed"
    assert found["exception"].startswith("Traceback (most recent call last):\n")
    assert found["exception"].endswith("ValueError: first\nsecond")


def test_an_exception_in_text_cannot_pass_for_a_record() -> None:
    with captured("text") as lines:
        try:
            raise ValueError("x\n2026-01-01T00:00:00.000Z INFO    specserve: all is well\x1b[2J")
        except ValueError:
            LOG.exception("failed")
        found = lines()
    assert "failed" in found[0]
    assert all(line.startswith("    ") for line in found[1:])
    assert found[-1].endswith("all is well\\x1b[2J")


def test_a_stack_is_there_when_asked_for() -> None:
    assert "Stack (most recent call last)" in said(lambda: LOG.info("here", stack_info=True))["exception"]


def test_no_exception_is_no_field() -> None:
    assert "exception" not in said(lambda: LOG.error("none", exc_info=True))


@pytest.mark.parametrize("format", ["json", "text"])
def test_client_strings_stay_on_their_line(format: str) -> None:
    with captured(format) as lines:
        LOG.info("from %s", NASTY, extra={"path": NASTY, "other": NASTY * 50})
        (line,) = lines()
    assert line.isprintable()
    if format == "json":
        found = json.loads(line)
        assert found["path"] == 'a\\nb\\r\\x1b[31m\\x00\\u2028\\u202e"\\ \\ud800'
        assert len(found["other"]) == LONGEST_VALUE


def test_long_messages_are_cut() -> None:
    found = said(lambda: LOG.info("%s", "x" * 100_000, extra={"many": ["y"] * 1000}))
    assert found["message"] == "x" * (LONGEST_MESSAGE - 3) + "..."
    assert len(found["many"]) == LONGEST_VALUE


@given(st.text(max_size=400), st.integers(4, 300))
def test_clipped_text_is_short_and_printable(text: str, limit: int) -> None:
    shown = clip(text, limit)
    assert len(shown) <= limit
    assert shown.isprintable()
    assert clip(shown, limit) == shown
    if text.isprintable():
        assert shown == (text if len(text) <= limit else text[: limit - 3] + "...")


def test_not_everything_is_a_json_number() -> None:
    found = said(lambda: LOG.info("x", extra={"nan": float("nan"), "inf": float("-inf"), "odd": {1: 2}}))
    assert (found["nan"], found["inf"], found["odd"]) == ("nan", "-inf", "{1: 2}")


def test_an_extra_field_cannot_pass_for_a_fixed_one() -> None:
    found = said(lambda: LOG.info("true", extra={"level": "critical", "time": "never", "exception": "none"}))
    assert (found["level"], found["level_"], found["time_"], found["exception_"]) == (
        "info", "critical", "never", "none",
    )  # fmt: skip


def test_every_record_says_whose_it_is() -> None:
    """Of the context it is made in, for records of any library; tasks do not mix."""

    async def serve(name: str) -> None:
        request_id.set(name)
        await asyncio.sleep(0)
        logging.getLogger("elsewhere").info(name)

    async def play() -> None:
        await asyncio.gather(*(serve(f"r{i}") for i in range(5)))
        LOG.info("nobody's")

    with captured() as lines:
        asyncio.run(play())
        found = [json.loads(line) for line in lines() if "asyncio" not in line]
    assert [(each["message"], each.get("request_id")) for each in found] == [
        *((f"r{i}", f"r{i}") for i in range(5)),
        ("nobody's", None),
    ]


def test_a_request_id_from_a_client_is_cut() -> None:
    token = request_id.set("x\n" * 1000)
    try:
        assert said(lambda: LOG.info("hi"))["request_id"] == ("x\\n" * 66)[: LONGEST_VALUE - 3] + "..."
    finally:
        request_id.reset(token)


def test_the_level_holds() -> None:
    with captured(level="warning") as lines:
        LOG.info("no")
        LOG.warning("yes")
        assert [json.loads(line)["message"] for line in lines()] == ["yes"]


def test_configuring_again_does_not_log_twice() -> None:
    with captured() as lines:
        stream = io.StringIO()
        configure("json", "info", stream)
        LOG.info("once")
        assert (len(lines()), len(stream.getvalue().splitlines())) == (0, 1)


def test_without_a_stream_it_is_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    with captured():
        configure()
        LOG.info("hello")
        out, err = capsys.readouterr()
    assert (out, err.endswith("INFO    specserve.test: hello\n")) == ("", True)


def test_warnings_are_records() -> None:
    def warn() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            logging.captureWarnings(True)
            warnings.warn("old\nway", DeprecationWarning, stacklevel=1)
            logging.captureWarnings(False)

    found = said(warn)
    assert (found["logger"], found["level"]) == ("py.warnings", "warning")
    assert "old\\nway" in found["message"]


@pytest.mark.parametrize(
    ("format", "level", "words"),
    [
        ("jsn", "info", r"'jsn'\. Did you mean 'json'\? Known: json, text"),
        ("text", "inf", "'inf'. Did you mean 'info'"),
    ],
)
def test_wrong_options_are_named(format: Any, level: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        configure(format, level)


def test_an_answered_request() -> None:
    found = said(
        lambda: log_request(
            method="POST", path="/v1/completions", status=200, milliseconds=12.3456, request_id="r1",
            client="192.0.2.1", key=2, error="engine_error", adapter="fr",
            num_prompt_tokens=5, num_output_tokens=9, mean_acceptance_length=1.8,
        )
    )  # fmt: skip
    assert found.pop("time")
    assert found == {
        "level": "info", "logger": "specserve.access", "message": "POST /v1/completions 200 in 12.3 ms",
        "request_id": "r1", "method": "POST", "path": "/v1/completions", "status": 200, "milliseconds": 12.346,
        "client": "192.0.2.1", "key": 2, "error": "engine_error", "adapter": "fr",
        "num_prompt_tokens": 5, "num_output_tokens": 9, "mean_acceptance_length": 1.8,
    }  # fmt: skip


def test_an_answered_request_leaves_out_what_is_not_known() -> None:
    token = request_id.set("context")
    try:
        found = said(lambda: log_request(method="X" * 999, path="/\n" + "y" * 999, status=503, milliseconds=0.1))
    finally:
        request_id.reset(token)
    assert (found["level"], found["request_id"]) == ("warning", "context")
    assert (len(found["method"]), len(found["path"]), found["path"][:3]) == (LONGEST_VALUE, LONGEST_VALUE, "/\\n")
    assert set(found) == {
        "time", "level", "logger", "message", "request_id", "method", "path", "status", "milliseconds",
    }  # fmt: skip


def test_a_stream_that_cannot_say_a_character_gets_it_written_out() -> None:
    """A service's standard error is often ASCII; a record must not be lost for a prompt in Greek."""
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, "ascii", write_through=True)
    with captured():
        configure("json", "info", stream)
        LOG.info("λόγος", extra={"text": "λ"})
    found = json.loads(raw.getvalue())
    assert (found["message"], found["text"]) == ("λόγος", "λ")
