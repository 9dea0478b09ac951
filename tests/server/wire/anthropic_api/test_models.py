"""The list of models as Anthropic's clients read it."""

from __future__ import annotations

from typing import Any

import pytest

from specserve.errors import InputError
from specserve.server.wire.anthropic_api.models import model_info, model_page

NAMES = ["a", "b", "c", "d", "e"]


def page(**query: str) -> tuple[str, bool]:
    found = model_page(NAMES, 1, 256, query)
    ids = [model["id"] for model in found["data"]]
    assert (found["first_id"], found["last_id"]) == ((ids[0], ids[-1]) if ids else (None, None))
    return "".join(ids), found["has_more"]


def test_pages() -> None:
    assert page() == ("abcde", False)
    assert page(limit="2") == ("ab", True)
    assert page(limit="2", after_id="b") == ("cd", True)
    assert page(limit="2", after_id="d") == ("e", False)
    assert page(after_id="e") == ("", False)
    assert page(limit="2", before_id="e") == ("cd", True)
    assert page(limit="2", before_id="c") == ("ab", False)
    assert page(before_id="a") == ("", False)


@pytest.mark.parametrize(
    ("query", "param"),
    [
        *(({"limit": limit}, "limit") for limit in ("0", "1001", "-1", "x", "", "1.5", "²", "9" * 5000)),
        ({"after_id": "z"}, "after_id"),
        ({"before_id": "z"}, "before_id"),
        ({"after_id": "a", "before_id": "c"}, "before_id"),
    ],
)
def test_pages_that_there_are_none_of(query: dict[str, str], param: str) -> None:
    with pytest.raises(InputError) as caught:
        model_page(NAMES, 1, 256, query)
    assert caught.value.param == param


def test_a_model() -> None:
    assert model_info("a", 0, 256) == {
        "type": "model",
        "id": "a",
        "display_name": "a",
        "created_at": "1970-01-01T00:00:00.000000Z",
        "lifecycle": "active",
        "max_input_tokens": 255,
        "max_tokens": 255,
    }
    assert page(limit="1")[0] == "a"


def test_the_client_reads_it() -> None:
    types = pytest.importorskip("anthropic.types", reason="anthropic is not installed: pip install anthropic")
    whole: Any = model_page(NAMES, 1, 256, {})
    for model in whole["data"]:
        assert types.ModelInfo.model_validate(model).id == model["id"]
