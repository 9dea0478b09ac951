"""Who is let in: counts never exceed the room and are given back however a request ends."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from hypothesis import given, strategies as st

from specserve.server.admission import SMALL_BYTES, Admission, BodyBudget
from specserve.server.wire.errors import WireError


def refusal(admission: Admission, num_completions: int = 1) -> WireError:
    with pytest.raises(WireError) as caught:
        admission.check(num_completions)
    return caught.value


def test_as_many_as_there_is_room_for() -> None:
    admission = Admission(3)
    with admission.enter(2), admission.enter(1):
        assert (admission.num_inside, admission.num_requests) == (3, 2)
        full = refusal(admission)
        assert (full.status, full.code, full.headers) == (429, "overloaded", {"Retry-After": "1"})
        assert "3 completions" in full.message
    assert (admission.num_inside, admission.num_requests) == (0, 0)
    admission.check(3)
    assert refusal(admission, 4).status == 429


def test_who_is_refused_takes_no_room() -> None:
    admission = Admission(1)
    with admission.enter(1):
        with pytest.raises(WireError), admission.enter(1):
            pytest.fail("there is no room")
        assert admission.num_inside == 1
    assert admission.num_inside == 0


def test_what_the_engine_has_done_takes_no_room_from_others() -> None:
    """However long its client takes to read it; until so much is read that it would fill the memory."""
    admission = Admission(2)
    with ExitStack() as stack:
        for _ in range(2):
            place = stack.enter_context(admission.enter(1))
            assert refusal(admission, 2).status == 429
            place.end_one()
            place.end_one()  # there is no other
        assert (admission.num_inside, admission.num_unread, admission.num_requests) == (0, 2, 2)
        third = stack.enter_context(admission.enter(2))
        third.end_one()
        assert (admission.num_inside, admission.num_unread) == (2, 2)
        assert refusal(admission).status == 429
    assert (admission.num_inside, admission.num_unread, admission.num_requests) == (0, 0, 0)


def test_room_is_given_back_after_an_error() -> None:
    admission = Admission(1)
    with pytest.raises(ZeroDivisionError), admission.enter(1):
        raise ZeroDivisionError
    assert (admission.num_inside, admission.num_requests) == (0, 0)


def test_nobody_is_let_in_while_draining() -> None:
    admission = Admission(5)
    with admission.enter(1):
        admission.draining = True
        told = refusal(admission)
        assert (told.status, told.code, told.headers) == (503, "draining", {"Retry-After": "1"})
        assert admission.num_requests == 1, "who is in may finish"


def test_no_capacity_is_no_service() -> None:
    assert refusal(Admission(0)).status == 429


@given(st.integers(0, 8), st.lists(st.tuples(st.integers(1, 5), st.integers(0, 6)), max_size=20))
def test_never_more_than_the_capacity(capacity: int, requests: list[tuple[int, int]]) -> None:
    """Neither of what the engine has to do nor of what is read."""
    admission, inside, unread = Admission(capacity), 0, 0
    with ExitStack() as stack:
        for size, num_ended in requests:
            fits = inside + size <= capacity
            try:
                place = stack.enter_context(admission.enter(size))
            except WireError:
                assert not fits
                continue
            assert fits
            freed = min(size, num_ended, capacity - unread)
            for _ in range(num_ended):
                place.end_one()
            inside, unread = inside + size - freed, unread + freed
            assert admission.num_inside == inside <= capacity
            assert admission.num_unread == unread <= capacity
    assert (admission.num_inside, admission.num_unread, admission.num_requests) == (0, 0, 0)


# --- bodies -----------------------------------------------------------------------------------------------------------


def test_large_bodies_share_what_there_is() -> None:
    budget = BodyBudget(3 * SMALL_BYTES)
    with budget.reserve() as first, budget.reserve() as second, budget.reserve() as small:
        first.grow_to(2 * SMALL_BYTES)
        second.grow_to(SMALL_BYTES)  # small as yet, and not counted
        assert budget.num_bytes == 2 * SMALL_BYTES
        with pytest.raises(WireError) as caught:
            second.grow_to(SMALL_BYTES + 1)
        assert (caught.value.status, caught.value.code) == (429, "overloaded")
        assert caught.value.headers == {"Retry-After": "1"}
        small.grow_to(SMALL_BYTES)
        first.grow_to(3 * SMALL_BYTES)
        assert budget.num_bytes == 3 * SMALL_BYTES
    assert budget.num_bytes == 0


@given(st.lists(st.lists(st.integers(1, 4 * SMALL_BYTES), max_size=6), max_size=6))
def test_what_bodies_take_is_what_they_have(pieces: list[list[int]]) -> None:
    capacity = 8 * SMALL_BYTES
    budget, counted = BodyBudget(capacity), 0
    with ExitStack() as stack:
        for body in pieces:
            reservation, size, before = stack.enter_context(budget.reserve()), 0, 0
            for piece in body:
                size += piece
                try:
                    reservation.grow_to(size)
                except WireError:
                    assert counted - before + size > capacity
                    break
                now = size if size > SMALL_BYTES else 0
                counted, before = counted - before + now, now
                assert budget.num_bytes == counted <= capacity
    assert budget.num_bytes == 0
