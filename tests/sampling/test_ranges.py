"""Sampling parameters hold numbers within their ranges, and are refused in words for everything else."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from typing import Any, get_type_hints

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, strategies as st

from specserve.engine.request import Limits, Request, sequences
from specserve.errors import InputError
from specserve.types import RANGES, SamplingParams

HUGE = 10**5000  # more digits than Python writes
edges = st.sampled_from([edge for _, low, high in RANGES.values() for edge in (low, high)])
huge = st.builds(lambda sign, power: sign * 10**power, st.sampled_from([-1, 1]), st.integers(18, 5000))
whole = st.integers() | huge | edges.map(int) | edges.map(lambda edge: int(edge) + 1) | edges.map(lambda e: int(e) - 1)
others = (
    st.booleans()
    | st.complex_numbers()
    | st.text(max_size=3)
    | st.sampled_from([Decimal(1), Fraction(1), [1], np.ones(1), np.ones(2), object()])
)
from_numpy = st.builds(
    lambda kind, value: kind(value),
    st.sampled_from([np.float64, np.float32, np.float16, np.int64, np.int8, np.uint8, np.bool_]),
    st.sampled_from([0, 1, 2, 127]),
) | st.floats(width=16).map(np.float64)
values = whole | st.floats() | edges.map(float) | others | from_numpy


def test_every_number_has_a_range() -> None:
    numbers = (int, float, int | None, float | None)
    assert set(RANGES) == {name for name, kind in get_type_hints(SamplingParams).items() if kind in numbers}


@pytest.mark.parametrize("name", [*RANGES, "logit_bias"])
@given(value=values)
@example(value=HUGE)
@example(value=-HUGE)
@example(value=float("nan"))
@example(value=float("inf"))
@example(value=True)
@example(value=np.float64("nan"))
def test_a_number_is_held_as_it_is_or_refused_in_words(name: str, value: Any) -> None:
    """Whatever is given: a number of the field's type within its range, or an InputError that names the field."""
    kind, low, high = RANGES.get(name, (float, -100.0, 100.0))
    fits = type(value) in ((int,) if kind is int else (int, float, np.float64)) and bool(low <= value <= high)
    fields: dict[str, Any] = {"max_tokens": None, name: {3: value} if name == "logit_bias" else value}
    fields |= {"beam_width": 1} if name == "length_penalty" else {}
    if not fits:
        with pytest.raises(InputError) as refused:
            SamplingParams(**fields)
        said = str(refused.value)
        assert refused.value.param == name
        assert said.startswith(f"{name}[3] is " if name == "logit_bias" else f"{name} is ")
        assert f"it must be a {'whole' if kind is int else 'finite'} number from " in said
        assert len(said) < 250
        return
    params = SamplingParams(**fields)
    assert getattr(params, name) is fields[name]
    if type(value) in (int, float):
        msgspec.msgpack.encode(Request(id="r", prompt_ids=[1], params=params))  # as servers hand it to engines


@pytest.mark.parametrize("name", ["logit_bias", "stop_token_ids", "allowed_token_ids", "prompt", "prediction"])
@pytest.mark.parametrize("token", [HUGE, -HUGE, True, 1.5, float("nan"), np.int64(3), "3"], ids=type)
def test_a_token_id_is_refused_in_words(name: str, token: Any) -> None:
    own: dict[str, Any] = {
        "prompt": {"prompt_ids": [token]},
        "prediction": {"prediction": (token,)},
        "logit_bias": {"params": SamplingParams(logit_bias={token: 1.0})},
    }.get(name) or {"params": SamplingParams(**{name: [token]})}
    request = Request(**{"id": "r", "prompt_ids": [1], "params": SamplingParams()} | own)
    with pytest.raises(InputError, match=r"ids are whole numbers from 0 to 9\.") as refused:
        sequences(request, Limits(vocab_size=10, max_model_len=99, eos_ids=frozenset()))
    assert refused.value.param == name


def test_limits_are_written_out() -> None:
    with pytest.raises(InputError, match="must be a whole number from 1 to 9223372036854775807"):
        SamplingParams(max_tokens=0)


@pytest.mark.parametrize("name", ["stop", "bad_words", "stop_token_ids", "allowed_token_ids", "logit_bias"])
@pytest.mark.parametrize("value", [5, 0.5, True, object()], ids=lambda value: type(value).__name__)
def test_what_is_no_list_is_refused_in_words(name: str, value: Any) -> None:
    with pytest.raises(InputError, match=f"^{name} is .*; it must be a ") as refused:
        SamplingParams(**{name: value})
    assert refused.value.param == name


@pytest.mark.parametrize("name", ["stop", "bad_words"])
@pytest.mark.parametrize("value", [[5], ["a", None], [""]])
def test_texts_that_are_none_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InputError, match=f"^{name} holds .*; it takes texts") as refused:
        SamplingParams(**{name: value})
    assert refused.value.param == name


@pytest.mark.parametrize("name", ["stop_token_ids", "allowed_token_ids"])
def test_arrays_are_lists(name: str) -> None:
    """Of which the ids are told to be of another type than Python's."""
    params = SamplingParams(**{name: np.arange(2)})
    with pytest.raises(InputError, match=f"^{name} holds .*; token ids are whole numbers"):
        params.check_ids(9)


def test_a_text_is_a_list_of_one_and_none_is_nothing() -> None:
    taken = SamplingParams(stop=None, bad_words="no", stop_token_ids=None)  # type: ignore[arg-type]
    assert (taken.stop, taken.bad_words, taken.stop_token_ids) == ((), ("no",), ())
