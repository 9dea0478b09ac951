"""What processes that answer HTTP share: counts in one table, settings and errors in messages."""

from __future__ import annotations

import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from specserve.errors import ConfigError, EngineError, InputError, PromptTooLongError, SpecserveError
from specserve.machine.pulse import shared_memory
from specserve.server.admission import SMALL_BYTES, Admission, BodyBudget
from specserve.server.api_processes.messages import Fault, Given, Told, decode_order, encode
from specserve.server.api_processes.table import COORDINATOR, MOST_ROWS, SharedCounts, Table
from specserve.server.engine.client import UnknownAdapterError
from specserve.server.http.listen import tls_files
from specserve.server.options import MOST_API_PROCESSES, ServeOptions
from specserve.server.settings import Settings
from specserve.server.wire.errors import WireError, overloaded, wire_error
from specserve.structured.base import RefusedError
from specserve.text.chat import TemplateOptions

NUM = 3


@pytest.fixture(scope="module")
def memory() -> int:
    return shared_memory()


def tables(memory: int) -> list[Table]:
    """One mapping for each process and for the coordinator, of memory in which nothing is counted."""
    found = [Table(memory, NUM) for _ in range(NUM + 1)]
    for row in range(NUM + 1):
        found[0].clear(row)
    return found


@given(st.integers(0, 8), st.lists(st.tuples(st.integers(1, NUM), st.integers(1, 5), st.integers(0, 6)), max_size=20))
def test_all_together_are_never_more_than_the_capacity(memory: int, capacity: int, requests: list) -> None:
    """Who comes is let in exactly as if one process had counted; what a process had counted goes with it."""
    mapped = tables(memory)
    each = [Admission(capacity, SharedCounts(table, row)) for row, table in enumerate(mapped)]
    alone, places = Admission(capacity), []
    with ExitStack() as stack, ExitStack() as stack_alone:
        for row, size, num_ended in requests:
            outcomes = []
            for admission, entered in ((each[row], stack), (alone, stack_alone)):
                try:
                    outcomes.append(entered.enter_context(admission.enter(size)))
                except WireError as error:
                    outcomes.append(error.message)
            assert isinstance(outcomes[0], str) == isinstance(outcomes[1], str)
            assert not isinstance(outcomes[0], str) or outcomes[0] == outcomes[1]
            for place in outcomes:
                for _ in range(0 if isinstance(place, str) else num_ended):
                    place.end_one()
            places.append(outcomes)
            for admission in each:
                assert (admission.num_inside, admission.num_unread, admission.num_requests) == (
                    alone.num_inside, alone.num_unread, alone.num_requests,
                )  # fmt: skip
        before = [mapped[0].num_requests(row) for row in range(NUM + 1)]
        mapped[0].clear(1)
        assert each[2].num_requests == sum(before) - before[1]
        for column, number in ((1, each[1].num_inside), (2, each[1].num_unread)):
            assert mapped[3].total(column) == number


def test_one_that_comes_in_between_leaves_again(memory: int) -> None:
    first, second = tables(memory)[1:3]

    class Late(SharedCounts):
        """Another process takes the last place between the look and the count."""

        def add(self, **counts: int) -> None:
            if counts.get("requests") == 1:
                SharedCounts(second, 2).add(inside=1, requests=1)
            super().add(**counts)

    admission = Admission(1, Late(first, 1))
    with pytest.raises(WireError) as caught, admission.enter(1):
        pytest.fail("there is no room")
    assert caught.value.status == 429
    assert (admission.num_inside, admission.num_requests) == (1, 1), "the other's"


def test_bodies_share_what_there_is(memory: int) -> None:
    first, second = (BodyBudget(3 * SMALL_BYTES, SharedCounts(t, row)) for row, t in enumerate(tables(memory)[1:3], 1))
    with first.reserve() as one, second.reserve() as other:
        one.grow_to(2 * SMALL_BYTES)
        with pytest.raises(WireError):
            other.grow_to(SMALL_BYTES + 1)
        assert (first.num_bytes, second.num_bytes) == (2 * SMALL_BYTES, 2 * SMALL_BYTES)
    assert second.num_bytes == 0


def test_the_coordinator_has_all_drain_and_its_beat_is_seen(memory: int) -> None:
    mapped = tables(memory)
    admission, counts = Admission(4, SharedCounts(mapped[2], 2)), SharedCounts(mapped[0], COORDINATOR)
    admission.check()
    counts.draining = True
    with pytest.raises(WireError) as caught:
        admission.check()
    assert caught.value.code == "draining"
    counts.draining = False
    admission.check()
    assert mapped[1].last_beat(COORDINATOR) == 0
    mapped[0].beat(COORDINATOR)
    assert mapped[1].last_beat(COORDINATOR) > 0
    assert MOST_API_PROCESSES < MOST_ROWS


ERRORS: list[Exception] = [
    InputError("no", "prompt"),
    PromptTooLongError(9, 8, "why"),
    UnknownAdapterError("There is no adapter 'x'.", "lora_name"),
    RefusedError("structured is odd"),
    EngineError("gone"),
    overloaded("full"),
    WireError(503, "service_unavailable", "later", code="loading", retry_after=2.0),
    OSError("a path of this machine"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_errors_are_told_as_here(error: Exception) -> None:
    told = decode_order(encode(Told(1, fault=Fault.of(error))))
    assert isinstance(told, Told)
    assert told.fault is not None
    found, expected = told.fault.error(), wire_error(error)
    assert isinstance(found, SpecserveError)
    if isinstance(error, RefusedError | UnknownAdapterError | EngineError):
        assert type(found) is type(error)
    got = wire_error(found)
    assert (got.status, got.body, got.headers) == (expected.status, expected.body, expected.headers)


def test_settings_are_the_same_elsewhere() -> None:
    options = ServeOptions(uds=Path("a.sock"), api_key=("x", "y"), served_model_name=("m",), max_body_mib=2.5)
    settings = Settings(
        options=options,
        names=("m", "n"),
        folder="/models/m",
        sampling={"top_p": 0.9},
        template=TemplateOptions("{{ x }}", {"a": [1, {"b": None}]}),
        capacity=12,
        created=5,
        tls=(b"\x00cert", b"key"),
    )
    given_ = Given(settings, 1, 2, "1.1.", 9.5)
    assert decode_order(encode(given_)) == given_


def test_a_key_that_asks_for_a_password_is_refused(tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-passout", "pass:secret", "-subj", "/CN=localhost"]
    subprocess.run([*command, "-keyout", str(key), "-out", str(cert)], check=True, capture_output=True)
    with pytest.raises(ConfigError, match="is encrypted, and with --api-processes"):
        tls_files(ServeOptions(tls_cert=cert, tls_key=key))
    assert tls_files(ServeOptions()) is None
