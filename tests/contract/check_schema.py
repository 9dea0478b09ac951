"""schemathesis over /openapi.json: whatever the document allows or forbids is sent, and every answer is one that the
document knows, each event of a stream too. The examples are the same in each run."""

from __future__ import annotations

import json
import os
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.specs.openapi.checks import positive_data_acceptance

EXAMPLES = 25  # for each method of each path, beside those that schemathesis makes of limits and types
MAX_ITEMS = 10_000
URL = os.environ["CONTRACT_TINY_URL"]
HEADERS = {"Authorization": f"Bearer {os.environ['CONTRACT_KEY']}"}


def document() -> Any:
    """The server's document; while that is answered with 404, and only then, all of this is skipped."""
    try:
        with urlopen(Request(f"{URL}/openapi.json", headers=HEADERS), timeout=60) as reply:
            return json.load(reply)
    except HTTPError as error:
        if error.code != 404:
            raise
        pytest.skip("there is no /openapi.json yet", allow_module_level=True)


def readable(value: Any) -> Any:
    """The document as schemathesis is to read it: lists of 10000 entries have no limit, as it would make examples of
    that length, for minutes; and streams are what `_events` makes of them."""
    if isinstance(value, list):
        return [readable(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    if "x-itemSchema" in value:
        return _events(value["x-itemSchema"])
    too_long = value.get("maxItems") == MAX_ITEMS
    return {name: readable(entry) for name, entry in value.items() if not (too_long and name == "maxItems")}


def _events(event: Any) -> Any:
    """In OpenAPI 3.1 `schema` is taken for that of an event, whose data is JSON or the end mark."""
    payload = {"contentMediaType": "application/json", "contentSchema": event}
    data = {"type": "string", "if": {"const": "[DONE]"}, "then": True, "else": payload}
    return {"type": "object", "properties": {"data": data}, "required": ["data"]}


# One test for each method of each path is made when this is imported, so the document is needed now.
schema = schemathesis.openapi.from_dict(readable(document()))
schema.config.update(base_url=URL, headers=HEADERS)


# What the schema allows may still be refused: it has no rules between fields, such as top_logprobs without logprobs.
@schema.parametrize()
@settings(
    max_examples=EXAMPLES,
    derandomize=True,
    deadline=None,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_every_answer_is_in_the_document(case: Any) -> None:
    case.call_and_validate(headers=HEADERS, excluded_checks=[positive_data_acceptance], timeout=120)
