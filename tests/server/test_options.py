"""What a server may be told at start: every refusal names the option, what it was and what is allowed."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from specserve.cli.options import SECTIONS, help_of
from specserve.errors import ConfigError
from specserve.server.http.routes import ROUTES
from specserve.server.options import ServeOptions

WAITS = ("header_timeout_s", "body_timeout_s", "write_timeout_s", "stall_timeout_s", "start_timeout_s")
LIMITS = ("queue_timeout_s", "request_timeout_s", "drain_timeout_s", "status_interval_s")  # 0 is none
NUMBERS = {
    **dict.fromkeys(WAITS, (0.05, 1e6)),
    **dict.fromkeys(LIMITS, (0, 1e6)),
    "port": (0, 65535),
    "data_parallel_size": (1, 64),
    "api_processes": (1, 32),
    "prefill_replicas": (0, 63),
    "max_queue": (0, 2**20),
    "max_body_mib": (0.001, 1024),
    "max_tokenize_characters": (1, 2**30),
    "engine_heartbeat_s": (0.2, 60),
}


BESIDE: dict[str, Any] = {"prefill_replicas": {"data_parallel_size": 64}}  # without which a number is refused


def refusal(**fields: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        ServeOptions(**fields)
    return str(caught.value)


def test_every_number_is_tested_here() -> None:
    assert {name for name, kind in get_type_hints(ServeOptions).items() if kind in (int, float)} == set(NUMBERS)


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_have_limits(name: str) -> None:
    low, high = NUMBERS[name]
    for value in (low, high):
        assert getattr(ServeOptions(**{name: value} | BESIDE.get(name, {})), name) == value
    for value in (low - 1, high * 1.01 + 1, math.nan, math.inf, -math.inf, "5", True, None, [5]):
        said = refusal(**{name: value})
        assert name in said
        assert repr(value) in said
        assert f"{low:g} to {high:g}" in said


def test_engines_and_processes_are_whole() -> None:
    assert "data_parallel_size is 1.5" in refusal(data_parallel_size=1.5)
    assert "api_processes is 1.5" in refusal(api_processes=1.5)
    assert "prefill_replicas is 1.5" in refusal(data_parallel_size=3, prefill_replicas=1.5)


def test_an_engine_is_left_that_answers() -> None:
    for size, prefill in ((1, 1), (2, 2), (2, 3)):
        said = refusal(data_parallel_size=size, prefill_replicas=prefill)
        assert f"--prefill-replicas is {prefill} of {size} engines" in said
    assert "there are none" in refusal(data_parallel_size=2, prefill_min_tokens=5)
    assert ServeOptions(engine=("127.0.0.1:7000",), prefill_min_tokens=5).prefill_min_tokens == 5
    assert "prefill_min_tokens is 0" in refusal(data_parallel_size=2, prefill_replicas=1, prefill_min_tokens=0)
    assert ServeOptions(data_parallel_size=2, prefill_replicas=1, prefill_min_tokens=5).prefill_min_tokens == 5


def test_experts_are_divided_among_engines_that_step_together() -> None:
    assert ServeOptions(data_parallel_size=2, enable_expert_parallel=True).enable_expert_parallel
    assert "Give --data-parallel-size" in refusal(enable_expert_parallel=True)
    both = refusal(data_parallel_size=2, prefill_replicas=1, enable_expert_parallel=True)
    assert "--enable-expert-parallel and --prefill-replicas" in both


@pytest.mark.parametrize(
    ("name", "value", "hint"),
    [
        ("log_format", "jason", "'json'"),
        ("log_format", "", "json, text"),
        ("scheduling_policy", "prio", "fcfs, priority"),
        ("log_level", "warn", "'warning'"),
        ("log_level", "INFO", "debug, error, info, warning"),
        ("log_level", "critical", "debug, error, info, warning"),
    ],
)
def test_words_are_known(name: str, value: str, hint: str) -> None:
    said = refusal(**{name: value})
    assert f"--{name.replace('_', '-')}" in said
    assert hint in said


def test_an_option_that_is_none_is_refused_with_near_misses() -> None:
    assert "'max_queue'" in refusal(max_que=5)


@pytest.mark.parametrize("given", ["tls_cert", "tls_key"])
def test_certificate_and_key_belong_together(given: str) -> None:
    assert "belong together" in refusal(**{given: Path("a.pem")})
    both = ServeOptions(tls_cert=Path("a.pem"), tls_key=Path("b.pem"))
    assert (both.tls_cert, both.tls_key) == (Path("a.pem"), Path("b.pem"))


@pytest.mark.parametrize("key", ["", " ", "\n\t"])
def test_an_empty_key_would_let_everybody_in(key: str) -> None:
    assert "--api-key is empty" in refusal(api_key=("good", key))


@pytest.mark.parametrize("key", ["sk-\u00fc", "sk-\x00", "sk-a\n", " sk-a", "sk-a\tb"])
def test_a_key_that_no_header_can_carry_would_let_nobody_in(key: str) -> None:
    said = refusal(api_key=(key,))
    assert "--api-key" in said
    assert key.strip() not in said, "a key is not shown"
    assert ServeOptions(api_key=("sk-a b",)).keys() == ["sk-a b"]


def test_keys_of_both_sources(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# clés de l'autre équipe\n\n  second \nthird\n", "utf-8")
    assert ServeOptions(api_key=("first",), api_key_file=file).keys() == ["first", "second", "third"]
    assert ServeOptions().keys() == []


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read"),
        (b"\xff\xfe", "cannot be read"),
        (b"", "has no keys"),
        (b"# none\n\n \n", "has no keys"),
        (b"sk-good\nsk-b\xc3\xa4d\n", "line 2"),
    ],
)
def test_a_file_of_keys_that_has_none(tmp_path: Path, content: bytes | None, words: str) -> None:
    """It is read at start: a file that was lost must not open the server."""
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    options = ServeOptions(api_key=("first",), api_key_file=file)
    with pytest.raises(ConfigError) as caught:
        options.keys()
    assert words in str(caught.value)
    assert str(file) in str(caught.value)


def test_mebibytes_are_bytes() -> None:
    assert ServeOptions(max_body_mib=0.5).max_body_bytes == 2**19
    assert ServeOptions().max_body_bytes == 16 * 2**20


def test_options_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        ServeOptions().port = 5  # type: ignore[misc]


def test_every_option_has_a_flag_and_a_text() -> None:
    help_ = help_of(ServeOptions, "Operation")
    assert {entry.name for entry in dataclasses.fields(ServeOptions)} == set(help_)
    assert all(each.text.endswith(".") and each.section in SECTIONS for each in help_.values())


def test_the_help_names_every_route_that_is_open() -> None:
    """What --api-key closes, and what it does not."""
    for text in (help_of(ServeOptions)["api_key"].text, str(ServeOptions.__doc__)):
        (told,) = re.findall(r"(?:only|all routes but) ([^.;]*?) (?:are open|need one)", " ".join(text.split()))
        opened = {route.path.partition("/{")[0] for route in ROUTES if not route.needs_key}
        assert set(re.findall(r"/\w*", told)) == opened
