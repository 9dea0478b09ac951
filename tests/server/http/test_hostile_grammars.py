"""Constraints that nobody should send, row D of what a server must survive: refused within the limits or answered, and
nobody beside them notices. The oracle is conftest's."""

from __future__ import annotations

import json
import os
import signal
import time
from typing import Any

BESIDE = 4  # streams that run beside a case
DEEP = 30  # levels of nesting that a body may have, and some that only the compiler sees


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"], "additionalProperties": False}
    return schema


def refused(case: Any, fields: dict[str, Any]) -> str:
    """The message; the field that is named is one that was sent."""
    reply = case.complete(**fields)
    assert (reply.status, reply.error["type"]) == (400, "invalid_request_error"), (str(fields)[:200], reply.body[:300])
    assert reply.error["param"].partition(".")[0] in fields
    message: str = reply.error["message"]
    assert len(message) < 500
    return message


def answered_or_refused(case: Any, fields: dict[str, Any]) -> None:
    reply = case.complete(max_tokens=40, **{"temperature": 1, "seed": 1, **fields})
    assert reply.status in (200, 400), (str(fields)[:200], reply.body[:300])
    assert reply.status == 200 or reply.error["param"] in fields


WRONG: list[tuple[str, Any]] = [
    ("guided_json", 5),
    ("guided_json", []),
    ("guided_json", ""),
    ("guided_json", "{"),
    ("guided_json", {"type": 17}),
    ("guided_json", {"pattern": "["}),
    ("guided_json", {"type": "string", "pattern": "["}),
    ("guided_json", {"properties": []}),
    ("guided_json", {"required": "a"}),
    ("guided_regex", ""),
    ("guided_regex", "["),
    ("guided_regex", {}),
    ("guided_choice", []),
    ("guided_choice", ""),
    ("guided_choice", {}),
    ("guided_choice", [""]),
    ("guided_grammar", ""),
    ("guided_grammar", {}),
    ("guided_grammar", "start: ("),
    ("ebnf", 'root ::= "a'),
    ("structural_tag", {}),
    ("structural_tag", {"format": {}}),
    ("structural_tag", ""),
    ("response_format", {}),
    ("response_format", {"type": "json_schema"}),
    ("structured_outputs", {}),
    ("structured_outputs", {"json": 5}),
]


def test_wrong_shapes(case: Any) -> None:
    """D31"""
    for name, value in WRONG:
        refused(case, {name: value})
    for name in ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "ebnf", "response_format"):
        assert case.complete(**{name: None}).status == 200, name
    assert case.complete(guided_json={}).status == 200, "any JSON"


def test_what_cannot_be_enforced_says_what(case: Any) -> None:
    """D32"""
    for schema, word in (
        ({"type": "object", "unevaluatedProperties": {"$dynamicRef": "#x"}}, ""),
        ({"$dynamicRef": "#x"}, "$dynamicRef"),
        ({"type": "string", "pattern": "(?!a)b"}, "look"),
        ({"type": "string", "pattern": "(a)\\1"}, ""),
        ({"type": "string", "format": "json-pointer"}, "json-pointer"),
    ):
        assert word in refused(case, {"guided_json": schema}), schema
    refused(case, {"regex": "(?<=a)b"})
    refused(case, {"regex": "(a)\\1"})


def test_references(case: Any) -> None:
    """D33"""
    for schema in (
        {"$ref": "#"},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        {"$ref": "#/$defs/nothing"},
        {"$ref": "http://127.0.0.1:1/a.json"},
        {"$ref": "file:///etc/passwd"},
        {"properties": {"a": {"$ref": "http://127.0.0.1:1/a.json"}}, "type": "object"},
    ):
        refused(case, {"guided_json": schema})
    productive = {
        "$ref": "#/$defs/tree",
        "$defs": {"tree": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2}},
    }
    answered_or_refused(case, {"guided_json": productive})


def test_nothing_fits(case: Any) -> None:
    """D34"""
    for schema in (
        False,
        {"enum": []},
        {"type": "string", "minLength": 5, "maxLength": 3},
        {"type": "integer", "minimum": 5, "maximum": 3},
        {"type": "array", "minItems": 2, "maxItems": 1},
        {"type": "object", "required": ["a"], "properties": {"a": False}},
    ):
        refused(case, {"guided_json": schema})


def test_deep(case: Any) -> None:
    """D35"""
    for text in ("(" * 30_000 + "a" + ")" * 30_000, "[" * 30_000):
        refused(case, {"regex": text})
    refused(case, {"ebnf": f"root ::= {'(' * 30_000}{chr(34)}a{chr(34)}{')' * 30_000}"})
    refused(case, {"grammar": f"start: {'(' * 30_000}{chr(34)}a{chr(34)}{')' * 30_000}"})
    for levels in (1_000, 10_000):
        text = '{"items":' * levels + "{}" + "}" * levels
        refused(case, {"json_schema": text})
    answered_or_refused(case, {"guided_json": nested(DEEP)})
    assert case.post("/v1/completions", {"prompt": "x", "guided_json": nested(40)}).status == 400, (
        "the body is too deep"
    )


def test_exploding(case: Any) -> None:
    """D36, and beside it the streams go on."""
    for pattern in ("(a+)+b", "(.*a){25}", "a{1,100000}", "(a|aa)*" * 40, ".*a.{30}", "((a{100}){100}){100}"):
        answered_or_refused(case, {"regex": pattern})
        answered_or_refused(case, {"guided_json": {"type": "string", "pattern": pattern}})


def test_huge(case: Any) -> None:
    """D37"""
    case.api_mib = 160  # a megabyte of JSON is some tens of megabytes of Python, once
    words = [f"word{i}" for i in range(100_000)]
    answered_or_refused(case, {"guided_json": {"enum": words}})
    refused(case, {"guided_choice": words})
    for schema in (
        {"type": "string", "maxLength": 10**9},
        {"type": "string", "minLength": 10**6},
        {"type": "array", "items": {"type": "integer"}, "maxItems": 10**9},
        {"type": "integer", "multipleOf": 999_983},
        {"type": "object", "properties": {f"p{i}": {} for i in range(1000)}},
    ):
        answered_or_refused(case, {"guided_json": schema})


def test_many(case: Any) -> None:
    """D38, few of them: benchmarks/structured/memory.py takes 20,000."""
    for i in range(50):
        assert case.complete(guided_json={"const": f"{i}"}, max_tokens=8).json["choices"][0]["text"] == f'"{i}"'
    messages = {refused(case, {"guided_json": {"type": "string", "format": "json-pointer"}}) for _ in range(50)}
    assert len(messages) == 1


def test_without_an_end(case: Any) -> None:
    """D39"""
    for fields in (
        {"guided_json": {"type": "string"}},
        {"regex": r"\s*"},
        {"grammar": 'start: "a" start | "a"'},
        {"guided_json": {"type": "array", "items": {"const": 1}}},
    ):
        reply = case.complete(**fields, max_tokens=300, logit_bias={"0": 0}, temperature=0)
        assert reply.status == 200, reply.body[:300]
        assert reply.json["choices"][0]["finish_reason"] in ("length", "stop")


def test_tools(case: Any) -> None:
    """D40"""

    def asked(tools: Any, choice: Any = "required") -> Any:
        reply = case.chat(tools=tools, tool_choice=choice)
        assert reply.status == 400
        return reply.error["param"]

    def tool(name: str, parameters: Any = None) -> dict[str, Any]:
        return {"type": "function", "function": {"name": name, "parameters": parameters}}

    assert asked([tool(f"f{i}") for i in range(1000)]) == "tools"
    assert asked([tool("f"), tool("f")]) == "tools"
    assert asked([tool('f"')]) == asked([tool("f\n")]) == asked([tool("")]) == "tools"
    assert asked([tool("f", {"type": 17})]) == "tools"
    assert asked([tool("f", {"type": "object", "properties": {"a": {"pattern": "["}}})]) == "tools"
    assert asked([tool("f")], {"type": "function", "function": {"name": "g"}}) == "tool_choice"
    assert asked([], "required") == "tool_choice"


# --- D41: who compiles is killed, or hangs ---------------------------------------------------------------------------


def fresh(number: int, i: int) -> dict[str, Any]:
    return {"guided_json": {"const": f"{int(number)} {i}"}, "max_tokens": 12}


def test_who_compiles_is_killed_between_requests(case: Any) -> None:
    """D41"""
    assert case.complete(**fresh(signal.SIGKILL, 0)).status == 200, "a worker runs"
    for worker in case.served.trial_workers:
        os.kill(worker, signal.SIGKILL)
    time.sleep(0.1)
    for i in range(1, 4):
        reply = case.complete(**fresh(signal.SIGKILL, i))
        assert json.loads(reply.json["choices"][0]["text"]) == f"{int(signal.SIGKILL)} {i}"
    case.start_workers()


def test_who_compiles_hangs(case: Any) -> None:
    """D41. It is replaced, and the constraint, which is not at fault, is tried again."""
    assert case.complete(**fresh(signal.SIGSTOP, 0)).status == 200, "a worker runs"
    first = min(case.served.trial_workers)  # the one for what is cheap; that all of them hang, test_trials.py has
    os.kill(first, signal.SIGSTOP)
    for i in range(1, 4):
        reply = case.complete(**fresh(signal.SIGSTOP, i))
        assert json.loads(reply.json["choices"][0]["text"]) == f"{int(signal.SIGSTOP)} {i}"
    assert first not in case.served.trial_workers
    case.start_workers()


def test_many_at_once(case: Any) -> None:
    """Equal constraints are tried once, whoever leaves takes nothing from the others, and each gets what it gets alone,
    bit for bit: its own tokens of its own prompt and seed, counted rightly."""
    schema = {
        "type": "object",
        "properties": {f"p{i}": {"type": "integer"} for i in range(60)},
        "required": ["p0", "p1"],
    }
    bodies = [
        {
            "prompt": list(range(20 + i, 23 + 3 * i)),
            "max_tokens": 6 + 5 * i,
            "temperature": 1.0,
            "seed": i,
            "logprobs": 2,
            "return_token_ids": True,
            "guided_json": schema,
            "n": 1 + i % 2,
        }
        for i in range(6)
    ]
    leaving = [case.stream(guided_json=schema, ignore_eos=False) for _ in range(2)]
    asking = [case.raw(case.request(body)) for body in bodies]
    for talk in leaving:
        talk.reset()
    together = []
    for talk in asking:
        head, _, body = talk.rest().partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK")
        together.append(json.loads(body))
    for asked, told in zip(bodies, together, strict=True):
        alone = case.post("/v1/completions", asked).json
        assert told["choices"] == alone["choices"]
        usage, choices = told["usage"], told["choices"]
        assert [choice["index"] for choice in choices] == list(range(asked["n"]))
        assert [choice["prompt_token_ids"] for choice in choices] == [asked["prompt"]] * asked["n"]
        num_tokens = sum(len(choice["token_ids"]) for choice in choices)
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(asked["prompt"]), num_tokens)
        assert usage["total_tokens"] == len(asked["prompt"]) + num_tokens
        assert all(len(choice["logprobs"]["tokens"]) == len(choice["token_ids"]) for choice in choices)
        assert all(choice["text"].lstrip().startswith("{") for choice in choices if choice["text"].strip())
    texts = [choice["text"] for told in together for choice in told["choices"]]
    assert len(set(texts)) == len(texts), "so one that got another's would be noticed"
    case.served.until(lambda: case.stats()["num_waiting"] + case.stats()["num_running"] <= BESIDE)
