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


def with_events(value: Any) -> Any:
    """The document with its streams as schemathesis reads them in OpenAPI 3.1: `schema` is that of an event, whose data
    is JSON, an error's too, or the end mark."""
    if isinstance(value, list):
        return [with_events(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    if "x-itemSchema" not in value:
        return {name: with_events(entry) for name, entry in value.items()}
    payload = {"contentMediaType": "application/json", "contentSchema": value["x-itemSchema"]}
    data = {"type": "string", "if": {"const": "[DONE]"}, "then": True, "else": payload}
    return {"type": "object", "properties": {"data": data}, "required": ["data"]}


# One test for each method of each path is made when this is imported, so the document is needed now.
schema = schemathesis.openapi.from_dict(with_events(document()))
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
