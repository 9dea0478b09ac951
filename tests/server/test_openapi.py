"""The document says what the server does: what it allows is taken, what it forbids is refused, what is sent back is in
it. Values are drawn from the document itself."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings, strategies as st
from pydantic.json_schema import SkipJsonSchema

from specserve.errors import InputError
from specserve.outputs import Chunk, CompletionOutput, RequestOutput
from specserve.server.http.routes import ROUTES
from specserve.server.openapi import Route, document
from specserve.server.wire.anthropic_api.models import model_info, model_page
from specserve.server.wire.anthropic_api.requests import CountTokensRequest, MessagesRequest, anthropic_error
from specserve.server.wire.anthropic_api.stream import count_tokens_body, message_body
from specserve.server.wire.errors import (
    WireError,
    model_not_found,
    overloaded,
    timed_out,
    unauthorized,
    unavailable,
    wire_error,
)
from specserve.server.wire.fields import Limits, Wire
from specserve.server.wire.json.pieces import json_text
from specserve.server.wire.ollama_api.answers import OllamaStream, answer_body, empty_body
from specserve.server.wire.ollama_api.requests import (
    EmbedRequest,
    GenerateRequest,
    OldEmbedRequest,
    OllamaChatRequest,
    ShowRequest,
    ollama_error,
)
from specserve.server.wire.openai.embeddings import EmbeddingRequest
from specserve.server.wire.openai.replies import Reply, chat_body, completion_body, model_card, model_list
from specserve.server.wire.openai.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    LoadAdapterRequest,
    ResetPrefixCacheRequest,
    UnloadAdapterRequest,
    read,
)
from specserve.server.wire.openai.responses import LOGPROBS, ResponsesRequest
from specserve.server.wire.openai.responses_stream import response_body
from specserve.server.wire.openai.sampling_fields import SamplingFields
from specserve.server.wire.openai.stream import DONE, ChatStream, CompletionStream
from specserve.server.wire.openai.tokenization import DetokenizeRequest, detokenize_body, read_tokenize, tokenize_body
from specserve.server.wire.openai.unsupported import REFUSED
from specserve.server.wire.translated import read_translated
from specserve.types import SequenceStats, TokenLogprobs

Json = dict[str, Any]

LIMITS = Limits(vocab_size=1000, max_model_len=256, max_completions=8, drafters=frozenset({"ngram", "prediction"}))
DOCUMENT = document(ROUTES, "tiny", LIMITS, ["ngram", "prediction"], True)
PLAIN = document(ROUTES, "tiny", Limits(vocab_size=10, max_model_len=8), [], False)

READ: dict[str, Callable[[bytes], Wire]] = {
    "/v1/chat/completions": lambda body: read(ChatCompletionRequest, body, LIMITS),
    "/v1/completions": lambda body: read(CompletionRequest, body, LIMITS),
    "/tokenize": lambda body: read_tokenize(body, LIMITS),
    "/reset_prefix_cache": lambda body: read(ResetPrefixCacheRequest, body, LIMITS),
    "/v1/embeddings": lambda body: read(EmbeddingRequest, body, LIMITS),
    "/api/embed": lambda body: read(EmbedRequest, body, LIMITS),
    "/api/embeddings": lambda body: read(OldEmbedRequest, body, LIMITS),
    "/v1/load_lora_adapter": lambda body: read(LoadAdapterRequest, body, LIMITS),
    "/v1/unload_lora_adapter": lambda body: read(UnloadAdapterRequest, body, LIMITS),
    "/detokenize": lambda body: read(DetokenizeRequest, body, LIMITS),
    "/v1/messages": lambda body: read_translated(MessagesRequest, body, LIMITS).as_chat(LIMITS),
    "/v1/messages/count_tokens": lambda body: read_translated(CountTokensRequest, body, LIMITS).as_chat(LIMITS),
    "/v1/responses": lambda body: read_translated(ResponsesRequest, body, LIMITS).as_chat(LIMITS),
    "/api/chat": lambda body: read_translated(OllamaChatRequest, body, LIMITS).as_wire(LIMITS),
    "/api/generate": lambda body: read_translated(GenerateRequest, body, LIMITS).as_wire(LIMITS),
    "/api/show": lambda body: read(ShowRequest, body, LIMITS),
}
REQUESTS = [route for route in ROUTES if route.request is not None]
USER = {"role": "user", "content": "Hi"}

# What JSON Schema does not say: rules between fields, and what it has no word for. {part of the message: (path, a body
# that the document allows and the server refuses so)}
CROSS_FIELD: dict[str, tuple[str, Json]] = {
    "above max_tokens": ("/v1/completions", {"prompt": "a", "min_tokens": 17}),
    ", and they mean the same. Send one of them": (
        "/v1/chat/completions",
        {"messages": [USER], "max_tokens": 6, "max_completion_tokens": 5},
    ),
    "top_logprobs needs logprobs true": ("/v1/chat/completions", {"messages": [USER], "top_logprobs": 1}),
    "top_logprobs needs include": ("/v1/responses", {"input": "a", "top_logprobs": 1}),
    "stream_options needs stream true": ("/v1/completions", {"prompt": "a", "stream_options": {}}),
    "speculative.explain needs stream true": ("/v1/completions", {"prompt": "a", "speculative": {"explain": True}}),
    "speculative.explain is for streams of": ("/v1/responses", {"input": "a", "speculative": {"explain": True}}),
    "continue_final_message goes on": ("/v1/chat/completions", {"messages": [USER], "continue_final_message": True}),
    "beam_width needs use_beam_search true": ("/v1/completions", {"prompt": "a", "beam_width": 2}),
    "is for beam search. Set": ("/v1/completions", {"prompt": "a", "length_penalty": 2}),
    "above beam_width, ": ("/v1/completions", {"prompt": "a", "use_beam_search": True, "beam_width": 2, "n": 3}),
    "beam search compares texts": ("/v1/completions", {"prompt": "a", "use_beam_search": True, "presence_penalty": 1}),
    "prompts times beam_width": ("/v1/completions", {"prompt": ["a"] * 3, "use_beam_search": True, "beam_width": 4}),
    "prompts times n": ("/v1/completions", {"prompt": ["a"] * 3, "n": 3}),
    "asks for no drafts": (
        "/v1/completions",
        {"prompt": "a", "speculative": {"enabled": True, "drafter": "none"}},
    ),
    "prompt and messages were both sent": ("/tokenize", {"prompt": "a", "messages": [USER]}),
    "more than once; each tool needs a name": (
        "/v1/chat/completions",
        {"messages": [USER], "tools": [{"function": {"name": "f"}}] * 2},
    ),
    "messages have those": (
        "/v1/messages/count_tokens",
        {"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "a"}]}]},
    ),
    "it must be text or a list of content blocks": (
        "/v1/messages",
        {"messages": [{"role": "user", "content": []}], "max_tokens": 5},
    ),
    "ends with a tool_use block": (
        "/v1/messages/count_tokens",
        {
            "messages": [
                {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]},
            ]
        },
    ),
    "messages has 0 messages": ("/v1/messages/count_tokens", {"messages": [{"role": "assistant", "content": ""}]}),
    "output_config.format mean the same and differ": (
        "/v1/messages/count_tokens",
        {
            "messages": [USER],
            "output_format": {"type": "json_schema", "schema": {}},
            "output_config": {"format": {"type": "json_object"}},
        },
    ),
    "asks for a call and there are no tools": ("/v1/responses", {"input": "a", "tool_choice": "required"}),
    "tool_choice: Unknown tool": (
        "/v1/chat/completions",
        {
            "messages": [USER],
            "tools": [{"function": {"name": "f"}}],
            "tool_choice": {"type": "function", "function": {"name": "g"}},
        },
    ),
    "both say what the answer must be": ("/v1/completions", {"prompt": "a", "regex": "a", "ebnf": "a"}),
    "structured_outputs says nothing": ("/v1/completions", {"prompt": "a", "structured_outputs": {}}),
    "; it must have one of json, json_object": (
        "/v1/completions",
        {"prompt": "a", "structured_outputs": {"json": {}, "regex": "a"}},
    ),
    "structured output ends where its grammar does": (
        "/v1/completions",
        {"prompt": "a", "regex": "a", "ignore_eos": True},
    ),
    "the schema is no JSON": ("/v1/completions", {"prompt": "a", "json_schema": "{"}),
    "is no JSON: ": ("/v1/completions", {"prompt": "a", "structural_tag": "{"}),
    "it must be a structural tag": ("/v1/completions", {"prompt": "a", "structural_tag": "1"}),
    "the type tool needs one": (
        "/v1/messages/count_tokens",
        {"messages": [USER], "tool_choice": {"type": "tool"}},
    ),
    "which an answer that may call tools does not have": (
        "/v1/responses",
        {"input": "a", "include": [LOGPROBS], "tools": [{"type": "function", "name": "f"}]},
    ),
    "so there is no place for system": ("/api/generate", {"prompt": "a", "system": "b", "raw": True}),
    "which asks for nothing": ("/v1/completions", {"prompt": "a", "max_tokens": 0}),
    # no word for it
    "keys are token ids from": ("/v1/completions", {"prompt": "a", "logit_bias": {"1000": 1}}),
    "holds control characters": ("/v1/completions", {"prompt": "a", "request_id": "\n"}),
}


def request_schema(path: str, made: Json = DOCUMENT) -> Json:
    schema: Json = made["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    return schema


def reply_schema(method: str, path: str, status: str = "200", media: str = "application/json") -> Json:
    schema: Json = DOCUMENT["paths"][path][method]["responses"][status]["content"][media]["schema"]
    return schema


def every(value: Any) -> Iterator[Json]:
    """All objects in a JSON value."""
    if isinstance(value, dict):
        yield value
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from every(item)


# --- JSON Schema, as much of it as the document uses ------------------------------------------------------------------

ANNOTATIONS = {"title", "description", "default", "examples", "contentMediaType"}
KEYWORDS = {
    *("$ref", "anyOf", "type", "enum", "const", "minimum", "maximum", "exclusiveMaximum", "minLength", "maxLength"),
    *("items", "minItems", "maxItems", "properties", "required", "additionalProperties", "propertyNames"),
    *("maxProperties", "pattern"),
}
TYPES: dict[str, Callable[[Any], bool]] = {
    "null": lambda value: value is None,
    "boolean": lambda value: isinstance(value, bool),
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "string": lambda value: isinstance(value, str),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
}


def resolved(schema: Json) -> Json:
    """The schema itself or what it refers to; an unknown keyword is an error of this test."""
    assert set(schema) <= KEYWORDS | ANNOTATIONS, schema
    if "$ref" not in schema:
        return schema
    assert set(schema) - ANNOTATIONS == {"$ref"}, schema
    found: Json = DOCUMENT["components"]["schemas"][schema["$ref"].removeprefix("#/components/schemas/")]
    return resolved(found)


def types_of(schema: Json) -> list[str]:
    types = schema.get("type", list(TYPES))
    return types if isinstance(types, list) else [types]


def allows(schema: Json, value: Any, closed: bool = False) -> bool:
    """Whether `value` is valid; `closed`: without properties that are not named, as our own bodies shall be."""
    schema = resolved(schema)
    if "anyOf" in schema and not any(allows(branch, value, closed) for branch in schema["anyOf"]):
        return False
    if not any(TYPES[kind](value) for kind in types_of(schema)):
        return False
    if value not in schema.get("enum", [value]) or value != schema.get("const", value):
        return False
    if isinstance(value, str):
        fits = re.search(schema.get("pattern", ""), value) is not None
        return fits and schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value))
    if isinstance(value, list):
        sized = schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value))
        return sized and all(allows(schema.get("items", {}), item, closed) for item in value)
    if isinstance(value, dict):
        return allows_object(schema, value, closed)
    return not TYPES["number"](value) or allows_number(schema, value)


def allows_number(schema: Json, value: float) -> bool:
    within = schema.get("minimum", value) <= value <= schema.get("maximum", value)
    return within and value < schema.get("exclusiveMaximum", float("inf"))


def allows_object(schema: Json, value: Json, closed: bool) -> bool:
    fields, names = schema.get("properties", {}), schema.get("propertyNames", {})
    others = schema.get("additionalProperties", not (closed and fields))
    if not set(schema.get("required", ())) <= set(value) or len(value) > schema.get("maxProperties", len(value)):
        return False
    return all(
        allows(names, name) and (allows(fields[name], item, closed) if name in fields else allows_other(others, item))
        for name, item in value.items()
    )


def allows_other(others: bool | Json, value: Any) -> bool:
    return others if isinstance(others, bool) else allows(others, value)


def drawn(schema: Json) -> st.SearchStrategy[Any]:
    """Values that the schema allows."""
    schema = resolved(schema)
    if "anyOf" in schema:
        own = {name: value for name, value in schema.items() if name != "anyOf"}
        return st.one_of([drawn(both(own, resolved(branch))) for branch in schema["anyOf"]])
    if "enum" in schema or "const" in schema:
        return st.sampled_from([schema["const"]] if "const" in schema else schema["enum"])
    return st.one_of([OF_TYPE[kind](schema) for kind in types_of(schema)]) if "type" in schema else ANYTHING


def both(schema: Json, branch: Json) -> Json:
    """What two schemas ask for together; where both speak of the same, the branch asks for more."""
    fields = schema.get("properties", {})
    narrowed = {name: {**fields.get(name, {}), **field} for name, field in branch.get("properties", {}).items()}
    required = [*schema.get("required", ()), *branch.get("required", ())]
    return {**schema, **branch, "properties": {**fields, **narrowed}, "required": required}


def drawn_integer(schema: Json) -> st.SearchStrategy[int]:
    most = [schema["maximum"]] if "maximum" in schema else []
    most += [schema["exclusiveMaximum"] - 1] if "exclusiveMaximum" in schema else []
    return st.integers(schema.get("minimum"), min(most, default=None))


def drawn_number(schema: Json) -> st.SearchStrategy[float]:
    bounds = {"min_value": schema.get("minimum"), "max_value": schema.get("maximum")}
    return st.floats(**bounds, allow_nan=False, allow_infinity=False)


def drawn_string(schema: Json) -> st.SearchStrategy[str]:
    if "pattern" in schema:
        return st.from_regex(schema["pattern"].replace("$", r"\Z"))
    least = schema.get("minLength", 0)
    return st.text(min_size=least, max_size=min(schema.get("maxLength", least + 8), least + 8))


def drawn_array(schema: Json) -> st.SearchStrategy[list[Any]]:
    least = schema.get("minItems", 0)
    return st.lists(drawn(schema.get("items", {})), min_size=least, max_size=min(schema.get("maxItems", 3), least + 2))


@st.composite
def drawn_object(draw: st.DrawFn, schema: Json) -> Json:
    """What is required, a few of what is not, and a name that nobody knows where that is allowed."""
    fields, others = schema.get("properties", {}), schema.get("additionalProperties", True)
    optional = sorted(set(fields) - set(schema.get("required", ())))
    chosen = draw(st.lists(st.sampled_from(optional), unique=True, max_size=4)) if optional else []
    value = {name: draw(drawn(fields[name])) for name in [*schema.get("required", ()), *chosen]}
    if others is not False and draw(st.booleans()):
        name = draw(drawn_string(schema["propertyNames"])) if "propertyNames" in schema else "not_known"
        value[name] = draw(drawn({} if others is True else others))
    return value


OF_TYPE: dict[str, Callable[[Json], st.SearchStrategy[Any]]] = {
    "null": lambda schema: st.none(),
    "boolean": lambda schema: st.booleans(),
    "integer": drawn_integer,
    "number": drawn_number,
    "string": drawn_string,
    "array": lambda schema: st.deferred(lambda: drawn_array(schema)),
    "object": drawn_object,
}
LONGEST = 2000  # entries of a list that is tried; a conversation may have more
ANYTHING = st.sampled_from([None, True, 0, 1.5, "text", [1], {"a": "b"}])


def nodes(schema: Json, value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], Json]]:
    """Every place in `value`, with the schemas that speak of it."""
    schema = resolved(schema)
    yield path, schema
    for branch in schema.get("anyOf", ()):
        if allows(branch, value):
            yield from nodes(branch, value, path)
    if isinstance(value, dict):
        for name in value:
            if name in schema.get("properties", {}):
                yield from nodes(schema["properties"][name], value[name], (*path, name))
    if isinstance(value, list) and "items" in schema:
        for index, item in enumerate(value):
            yield from nodes(schema["items"], item, (*path, index))


def wrong(schema: Json, value: Any) -> Iterator[Any]:
    """What could be wrong in the place of `value`: another type, beyond a bound, a name too many or too few."""
    yield from (None, True, 5, 5.5, "no such text", [5], [[5]], {"no such name": 5}, "", [], {})
    yield from (schema[name] - 1 for name in ("minimum",) if name in schema)
    yield from (schema[name] + 1 for name in ("maximum", "exclusiveMaximum") if name in schema)
    if "maxLength" in schema:
        yield "x" * (schema["maxLength"] + 1)
    if isinstance(value, list) and value and schema.get("maxItems", LONGEST) < LONGEST:
        yield value[:1] * (schema["maxItems"] + 1)
    if isinstance(value, dict):
        yield from ({k: v for k, v in value.items() if k != name} for name in value)
        yield {**value, "no such name": 5}


def replaced(value: Any, path: tuple[str | int, ...], other: Any) -> Any:
    if not path:
        return other
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = replaced(value[path[0]], path[1:], other)
    return copy


def one_of(draw: st.DrawFn, values: list[Any]) -> Any:
    """As sampled_from, which writes down what it chooses from."""
    return values[draw(st.integers(0, len(values) - 1))]


@st.composite
def broken(draw: st.DrawFn, schema: Json) -> Any:
    """A value that the schema allows but for one place."""
    value = draw(drawn(schema))
    path, place = one_of(draw, list(nodes(schema, value)))
    there = value
    for step in path:
        there = there[step]
    changed = replaced(value, path, one_of(draw, list(wrong(place, there))))
    assume(not allows(schema, changed))
    return changed


def extreme(schema: Json) -> Iterator[Any]:
    """What is just allowed, as far as the bounds say."""
    yield from (schema[name] for name in ("minimum", "maximum", "const") if name in schema)
    yield from (schema[name] - 1 for name in ("exclusiveMaximum",) if name in schema)
    yield from schema.get("enum", ())
    yield from ("x" * schema[name] for name in ("minLength", "maxLength") if name in schema)
    listed = "items" in schema and schema.get("maxItems", 0) <= LONGEST
    for item in extreme(resolved(schema["items"])) if listed else ():
        yield from ([item] * schema[name] for name in ("minItems", "maxItems") if name in schema)
        yield [item] * (schema.get("maxItems", 1) + 1)
    for branch in schema.get("anyOf", ()):
        yield from extreme(resolved(branch))
        yield from wrong(resolved(branch), None)


# --- requests ---------------------------------------------------------------------------------------------------------

MANY = settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
LEAST: dict[str, Json] = {
    "/v1/chat/completions": {"messages": [USER]},
    "/v1/completions": {"prompt": "a"},
    "/tokenize": {"messages": [USER]},
    "/detokenize": {"tokens": []},
    "/reset_prefix_cache": {},
    "/v1/embeddings": {"input": "a"},
    "/api/embed": {"input": "a"},
    "/api/embeddings": {"prompt": "a"},
    "/v1/load_lora_adapter": {"lora_name": "a", "lora_path": "b"},
    "/v1/unload_lora_adapter": {"lora_name": "a"},
    "/v1/messages": {"messages": [USER], "max_tokens": 5},
    "/v1/messages/count_tokens": {"messages": [USER]},
    "/v1/responses": {"input": "a"},
    "/api/chat": {"messages": [USER]},
    "/api/generate": {"prompt": "a"},
    "/api/show": {},
}


def sent(path: str, body: Json) -> Wire:
    return READ[path](json.dumps(body).encode())


def objects(path: str) -> list[Json]:
    """The schemas of a request, several where it has several forms."""
    schema = request_schema(path)
    return [resolved(form) for form in schema.get("anyOf", [schema])]


def taken(path: str, body: Json) -> bool:
    """Whether the server takes it, or refuses it for a rule that the document cannot state."""
    try:
        sent(path, body)
    except InputError as error:
        return any(message in str(error) for message in CROSS_FIELD)
    return True


def assert_refused(path: str, body: Any) -> None:
    try:
        sent(path, body)
    except InputError:
        return
    pytest.fail(f"taken, though the document forbids it: {str(body)[:500]}")


@pytest.mark.parametrize("path", READ)
def test_every_field_is_held_to_its_bounds(path: str) -> None:
    """One field at a time, just within its bounds, just beyond them, and of every other type."""
    for form in objects(path):
        for name, field in form["properties"].items():
            for value in [*extreme(resolved(field)), *wrong(resolved(field), None)]:
                least = LEAST[path] if set(form.get("required", ())) <= set(LEAST[path]) else {}
                body = {**least, name: value}
                if allows(request_schema(path), body):
                    assert taken(path, body), (name, value)
                else:
                    assert_refused(path, body)


@pytest.mark.parametrize("path", READ)
@MANY
@given(data=st.data())
def test_what_the_document_allows_is_taken(path: str, data: st.DataObject) -> None:
    body = data.draw(drawn(request_schema(path)))
    assert allows(request_schema(path), body)
    assert taken(path, body)


@pytest.mark.parametrize("path", READ)
@MANY
@given(data=st.data())
def test_what_the_document_forbids_is_refused(path: str, data: st.DataObject) -> None:
    body = data.draw(broken(request_schema(path)))
    assert_refused(path, body)


@pytest.mark.parametrize("role", ["user", "assistant", "tool"])
@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": []}, {"content": ""}])
def test_an_answer_alone_may_be_without_text(role: str, content: Json) -> None:
    path, body = "/v1/chat/completions", {"messages": [{"role": role, **content}]}
    assert (
        allows(request_schema(path), body) == taken(path, body) == (role == "assistant" or content == {"content": ""})
    )


@pytest.mark.parametrize("message", CROSS_FIELD)
def test_rules_between_fields_are_the_only_ones_beside_the_document(message: str) -> None:
    path, body = CROSS_FIELD[message]
    assert allows(request_schema(path), body)
    with pytest.raises(InputError, match=re.escape(message)):
        sent(path, body)


# --- the document itself ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("made", [DOCUMENT, PLAIN], ids=["with keys", "plain"])
def test_the_document_is_valid(made: Json) -> None:
    validator = pytest.importorskip("openapi_spec_validator")
    validator.validate(json.loads(json.dumps(made)))


@pytest.mark.parametrize("made", [DOCUMENT, PLAIN], ids=["with keys", "plain"])
def test_it_is_json_and_refers_to_nothing_that_is_not_there(made: Json) -> None:
    assert json.loads(json.dumps(made, allow_nan=False)) == made
    for schema in every(made):
        assert "x-limits" not in schema
        if "$ref" in schema:
            _, components, kind, name = schema["$ref"].split("/")
            assert name in made[components][kind]
    names = [operation["operationId"] for path in made["paths"].values() for operation in path.values()]
    assert len(names) == len(set(names)) == len(ROUTES)


def test_every_route_is_in_it_and_nothing_else() -> None:
    told = {(method.upper(), path) for path, methods in DOCUMENT["paths"].items() for method in methods}
    assert told == {(route.method, route.path) for route in ROUTES}


def test_bounds_are_those_of_this_server() -> None:
    for made, vocab_size, most, names in ((DOCUMENT, 1000, 8, ["ngram", "prediction"]), (PLAIN, 10, 128, [])):
        schemas = made["components"]["schemas"]
        fields = schemas["CompletionRequest"]["properties"]
        assert fields["stop_token_ids"]["items"]["exclusiveMaximum"] == vocab_size
        assert fields["allowed_token_ids"]["maxItems"] == vocab_size
        assert fields["n"]["maximum"] == most
        assert [branch.get("maxItems") for branch in fields["prompt"]["anyOf"]] == [None, None, most, most]
        assert schemas["Speculative"]["properties"]["drafter"]["enum"] == [*names, "none", None]
        assert (fields["priority"]["minimum"], fields["priority"]["maximum"]) == (0, 0)
    assert fields["min_tokens"]["exclusiveMaximum"] == 8
    ranked = document(ROUTES, "tiny", dataclasses.replace(LIMITS, max_priority=9), [], False)
    priority = ranked["components"]["schemas"]["CompletionRequest"]["properties"]["priority"]
    assert (priority["minimum"], priority["maximum"]) == (-9, 9)
    assert (fields["temperature"]["minimum"], fields["temperature"]["maximum"]) == (0.0, 100.0)


@pytest.mark.parametrize("route", REQUESTS, ids=lambda route: route.name)
def test_every_field_is_in_it_and_says_what_it_is(route: Route) -> None:
    for kind in typing.get_args(route.request) or [route.request]:
        fields = DOCUMENT["components"]["schemas"][kind.__name__]["properties"]
        refused = {name for name, field in kind.model_fields.items() if SkipJsonSchema() in field.metadata}
        assert set(fields) == set(kind.model_fields) - refused
        assert [name for name, field in fields.items() if not field.get("description")] == []


def test_what_is_refused_whatever_it_says_is_not_in_it() -> None:
    for kind in ("ChatCompletionRequest", "CompletionRequest", "TokenizeChatRequest"):
        fields = set(DOCUMENT["components"]["schemas"][kind]["properties"])
        assert not fields & set(REFUSED)


@pytest.mark.parametrize("route", REQUESTS, ids=lambda route: route.name)
def test_examples_work(route: Route) -> None:
    body = DOCUMENT["paths"][route.path]["post"]["requestBody"]["content"]["application/json"]["example"]
    assert body == ({} if "lora_name" in route.example else {"model": "tiny"}) | dict(route.example)
    assert allows(request_schema(route.path), body)
    assert sent(route.path, body).model_extra == {}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_defaults_are_what_happens_without_the_field(path: str) -> None:
    plain = sent(path, LEAST[path])
    assert isinstance(plain, SamplingFields)
    for name, field in resolved(request_schema(path))["properties"].items():
        if "default" in field:
            stated = sent(path, {**LEAST[path], name: field["default"]})
            assert isinstance(stated, SamplingFields)
            assert stated.sampling_params == plain.sampling_params
            assert getattr(stated, name) in (getattr(plain, name), field["default"])


def test_keys() -> None:
    assert DOCUMENT["security"] == [{"bearer": []}, {"header": []}]
    assert DOCUMENT["components"]["securitySchemes"]["header"]["name"] == "x-api-key"
    operations = {path: next(iter(methods.values())) for path, methods in DOCUMENT["paths"].items()}
    opened = {path for path, operation in operations.items() if operation.get("security") == []}
    assert opened == {"/live", "/health", "/ready", "/docs", "/", "/static/{name}"}
    assert {path for path, operation in operations.items() if "401" not in operation["responses"]} == opened
    assert PLAIN["security"] == []
    assert "securitySchemes" not in PLAIN["components"]
    assert not any("401" in op["responses"] for methods in PLAIN["paths"].values() for op in methods.values())


# --- what is sent back ------------------------------------------------------------------------------------------------


class Letters:
    """Token i is the letter with that code."""

    special_ids = frozenset({0})

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])


def scored(*ids: int) -> list[TokenLogprobs]:
    return [TokenLogprobs(token, -0.5, 1, {token: -0.5, 98: -1.0}) for token in ids]


def result(with_logprobs: bool, num_completions: int = 1) -> RequestOutput:
    """With log-probabilities it also tells of drafts."""
    longest = 2 if with_logprobs else 0
    stats = SequenceStats(arrived=1.0, first_token=2.0, finished=3.0, num_steps=1, longest_draft=longest)
    completions = [
        CompletionOutput(i, "ab", [97, 98], scored(97, 98) if with_logprobs else None, "stop", "x", stats=stats)
        for i in range(num_completions)
    ]
    return RequestOutput("r", "c", [99, 99], completions, [None, *scored(99)] if with_logprobs else None)


def chunks(output: RequestOutput) -> Iterator[Chunk]:
    for completion in output.outputs:
        whole = completion.logprobs
        yield Chunk("r", completion.index, "a", [97], whole and whole[:1])
        yield Chunk("r", completion.index, "b", [98], whole and whole[1:], "stop", "x", stats=completion.stats)


def as_sent(body: Mapping[str, Any]) -> Any:
    return json.loads(json_text(body))


REPLIES = [
    Reply(
        id="x",
        created=1,
        model="tiny",
        vocabulary=Letters(),
        echo=e,
        return_token_ids=i,
        include_usage=u,
    )
    for e, i, u in itertools.product([False, True], [False, True], [False, True])
]


@pytest.mark.parametrize("with_logprobs", [False, True])
@pytest.mark.parametrize("reply", REPLIES, ids=range(len(REPLIES)))
def test_whole_answers_are_as_the_document_says(reply: Reply, with_logprobs: bool) -> None:
    chat = chat_body(reply, result(with_logprobs, 2), 9.0)
    assert allows(reply_schema("post", "/v1/chat/completions"), as_sent(chat), closed=True)
    text = completion_body(reply, [result(with_logprobs), result(with_logprobs)], 9.0)
    assert allows(reply_schema("post", "/v1/completions"), as_sent(text), closed=True)


@pytest.mark.parametrize("with_logprobs", [False, True])
@pytest.mark.parametrize("reply", REPLIES, ids=range(len(REPLIES)))
@pytest.mark.parametrize("kind", [ChatStream, CompletionStream])
def test_streams_are_as_the_document_says(kind: Any, reply: Reply, with_logprobs: bool) -> None:
    output = result(with_logprobs, 2)
    stream = kind(reply, output if kind is ChatStream else [output])
    path = "/v1/chat/completions" if kind is ChatStream else "/v1/completions"
    schema = reply_schema("post", path, media="text/event-stream")["x-itemSchema"]
    events = [event for chunk in chunks(output) for event in stream.push(chunk)] + stream.end(9.0)
    assert events[-1] == DONE
    for event in events[:-1]:
        assert allows(schema, json.loads(event), closed=True), event
    assert len(events) > 4


@pytest.mark.parametrize("with_logprobs", [False, True])
@pytest.mark.parametrize("reply", REPLIES, ids=range(len(REPLIES)))
def test_answers_in_other_words_are_as_the_document_says(reply: Reply, with_logprobs: bool) -> None:
    message = message_body(reply, result(with_logprobs), 9.0)
    assert allows(reply_schema("post", "/v1/messages"), message, closed=True)
    asked = read_translated(ResponsesRequest, b'{"input": "a", "tools": [{"type": "function", "name": "f"}]}', LIMITS)
    response = response_body(reply, asked, result(with_logprobs), 9.0)
    assert allows(reply_schema("post", "/v1/responses"), as_sent(response), closed=True)


@pytest.mark.parametrize("with_logprobs", [False, True])
@pytest.mark.parametrize("kind", ["chat", "generate"])
def test_answers_to_ollamas_clients_are_as_the_document_says(kind: Any, with_logprobs: bool) -> None:
    path, reply = f"/api/{kind}", REPLIES[0]
    for body in (answer_body(reply, kind, result(with_logprobs), 9.0), empty_body("tiny", kind)):
        assert allows(reply_schema("post", path), as_sent(body), closed=True)
    schema = reply_schema("post", path, media="application/x-ndjson")["x-itemSchema"]
    output = result(with_logprobs)
    stream = OllamaStream(reply, kind, output)
    lines = [line for chunk in chunks(output) for line in stream.push(chunk)] + stream.end(9.0)
    assert [json.loads(line)["done"] for line in lines] == [False, False, True]
    for line in [*lines, stream.ping().decode()]:
        assert allows(schema, json.loads(line), closed=True), line


def test_small_answers_are_as_the_document_says() -> None:
    rows = [
        ("get", "/v1/models", model_list(["tiny"], 1, 256, "natively")),
        ("get", "/v1/models/{id}", model_card("tiny", 1, 256, "natively")),
        ("get", "/v1/models", model_page(["tiny"], 1, 256, {})),
        ("get", "/v1/models/{id}", model_info("tiny", 1, 256)),
        ("post", "/tokenize", as_sent(tokenize_body([1], 256))),
        ("post", "/tokenize", as_sent(tokenize_body([1], 256, str))),
        ("post", "/detokenize", as_sent(detokenize_body("a"))),
        ("post", "/v1/messages/count_tokens", count_tokens_body(1)),
    ]
    for method, path, body in rows:
        assert allows(reply_schema(method, path), body, closed=True)
        assert not allows(reply_schema(method, path), {**body, "more": 1}, closed=True)


@pytest.mark.parametrize(
    "error",
    [
        unauthorized(),
        model_not_found("x", ["tiny"]),
        overloaded("Full."),
        timed_out(504, "Late."),
        unavailable("Stopping."),
        wire_error(ValueError()),
        wire_error(InputError("n is 0.", "n")),
    ],
    ids=lambda error: error.status,
)
def test_errors_are_as_the_document_says(error: WireError) -> None:
    for path, body in (
        ("/v1/chat/completions", error.body),
        ("/v1/messages", anthropic_error(error, "x")),
        ("/api/chat", ollama_error(error)),
    ):
        responses = DOCUMENT["paths"][path]["post"]["responses"]
        told = DOCUMENT["components"]["responses"][responses[str(error.status)]["$ref"].split("/")[-1]]
        assert allows(told["content"]["application/json"]["schema"], body, closed=True)
        assert ("Retry-After" in error.headers) == ("Retry-After" in told.get("headers", {}))
