"""Which bounds meet in one number, by branches and references."""

from __future__ import annotations

import pytest

from specserve.structured.schema.bounds import check_bounds
from specserve.structured.spec import RefusedError


def test_bounds_are_compared_where_both_apply() -> None:
    """Each bound with the few that are near it, though every branch is come to from two sides."""
    bounds = {"anyOf": [{"exclusiveMinimum": 10 * i, "maximum": 10 * i + 9} for i in range(2000)]}
    schema = {"type": "number", "allOf": [{"$ref": "#/$defs/b"}, {"$ref": "#/$defs/b"}], "$defs": {"b": bounds}}
    check_bounds(schema, schema)
    near = {"type": "number", "$ref": "#/$defs/b", "maximum": 0.5,
            "$defs": {"b": {"anyOf": [{"exclusiveMinimum": 5}, {"exclusiveMinimum": 0}]}}}  # fmt: skip
    with pytest.raises(RefusedError, match="exclusiveMinimum"):
        check_bounds(near, near)
    apart = {"type": "number", "anyOf": [{"$ref": "#/$defs/b"}, {"$ref": "#/$defs/b", "maximum": 0.5}],
             "$defs": {"b": {"exclusiveMinimum": 0}}}  # fmt: skip
    with pytest.raises(RefusedError, match="exclusiveMinimum"):
        check_bounds(apart, apart)
