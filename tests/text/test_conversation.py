"""Nothing of a conversation is missing in a prompt in silence, whatever the chat template is."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings, strategies as st

from specserve.errors import InputError
from specserve.text.chat import ChatTemplate
from specserve.text.conversation import Rendered, in_order_of_calls
from specserve.text.tool_tags import HERMES, MISTRAL_LIST, QWEN_TAGS
from tests.text.templates import TEMPLATES

OPTIONS = {"add_generation_prompt": True, "continue_final_message": False, "tools": None}
STYLES = {"tags": QWEN_TAGS, "alternating": MISTRAL_LIST, "no tools": None}


@functools.cache
def template(name: str) -> ChatTemplate:
    return ChatTemplate(Path("none"), {"chat_template": TEMPLATES[name]}, {"bos_token": "<s>"})


def rendered(name: str, messages: list[dict[str, Any]], **options: Any) -> Rendered:
    return template(name).render_whole(messages, STYLES.get(name, HERMES), **{**OPTIONS, **options})


# --- any conversation, any field --------------------------------------------------------------------------------------

WORDS = st.sampled_from(
    ["a", "7", "Paris", "the answer", "<think>", "</think>", '"', "\\", "é", "\n", "{", "</s>", "x" * 9]
)
TEXTS = st.lists(WORDS, min_size=1, max_size=4).map("".join)
VALUES = st.recursive(
    st.one_of(TEXTS, st.integers(0, 9), st.booleans(), st.none()),
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(TEXTS, inner, max_size=2)),
    max_leaves=3,
)
IDS = st.sampled_from(["1", "call_1", "abcdefghi", "123456789"])
ARGUMENTS = st.one_of(st.dictionaries(TEXTS, VALUES, max_size=3), TEXTS)
CALLS = st.fixed_dictionaries(
    {"type": st.just("function"), "function": st.fixed_dictionaries({"name": TEXTS, "arguments": ARGUMENTS})},
    optional={"id": IDS, "index": st.integers(0, 3)},
)
ASSISTANT = st.fixed_dictionaries(
    {"role": st.just("assistant"), "content": TEXTS | st.just("")},
    optional={"tool_calls": st.lists(CALLS, min_size=1, max_size=2), "reasoning_content": TEXTS, "name": TEXTS},
)
TOOL = st.fixed_dictionaries(
    {"role": st.just("tool"), "content": TEXTS | st.just("")}, optional={"tool_call_id": IDS, "is_error": st.booleans()}
)
USER = st.fixed_dictionaries({"role": st.just("user"), "content": TEXTS}, optional={"name": TEXTS, "odd": VALUES})
SYSTEM = st.fixed_dictionaries({"role": st.just("system"), "content": TEXTS})
TURNS = st.tuples(USER, ASSISTANT, st.lists(TOOL, max_size=2)).map(lambda turn: [*turn[:2], *turn[2]])
CONVERSATIONS = st.tuples(
    st.lists(SYSTEM, max_size=2), st.lists(TURNS, max_size=2), st.lists(USER | SYSTEM | ASSISTANT, max_size=1), USER
).map(lambda parts: [*parts[0], *(message for turn in parts[1] for message in turn), *parts[2], parts[3]])


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where texts, numbers and booleans lie."""
    if isinstance(value, dict | list):
        for key, entry in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(entry, (*path, key))
    elif value is not None and path[-1] != "type":
        yield path


def changed(messages: list[dict[str, Any]], path: tuple[Any, ...], other: str) -> list[dict[str, Any]]:
    """With another value at the path: a text becomes `other`."""
    made = copy.deepcopy(messages)
    *way, last = path
    place: Any = made
    for key in way:
        place = place[key]
    old = place[last]
    place[last] = not old if isinstance(old, bool) else old + 1 if isinstance(old, int) else other
    return made


def name_of(path: tuple[Any, ...]) -> str:
    names = [key for key in path if isinstance(key, str)]
    if names[:3] == ["tool_calls", "function", "arguments"]:
        names = names[:3]
    elif names[0] != "tool_calls":  # the first name stands for all that is inside
        names = names[:1]
    return ".".join(["messages", *names])


def said(value: Any) -> str:
    """Without blanks around it, and without reasoning in front that has no text."""
    return str(value).strip().removeprefix("<think>").lstrip().removeprefix("</think>").lstrip()


@pytest.mark.parametrize("name", sorted(TEMPLATES))
@settings(max_examples=60, deadline=None)
@given(messages=CONVERSATIONS, data=st.data())
def test_a_field_is_in_the_prompt_or_named_or_the_conversation_is_refused(
    name: str, messages: list[dict[str, Any]], data: st.DataObject
) -> None:
    path = data.draw(st.sampled_from(list(leaves(messages))))
    roles = st.sampled_from(
        ["assistant"] if "tool_calls" in messages[path[0]] else ["user", "assistant", "tool", "system"]
    )
    others = changed(messages, path, data.draw(roles if path[-1] == "role" else TEXTS))
    old, new = messages, others
    for key in path:
        old, new = old[key], new[key]
    assume(said(old) != said(new))
    text = messages[path[0]]["content"]
    assume(path[-1] != "role" or (text.strip() and "</think>" not in text))  # without text it is as good as none
    try:
        first, second = rendered(name, messages), rendered(name, others)
    except InputError:
        return
    names = {name_of(path)}
    if path[-1] == "content" and "</think>" in f"{old}{new}":
        names.add("messages.reasoning_content")
    if first.text == second.text:
        assert names & set(first.unread) or names & set(second.unread), (first.text, first.unread)


def test_the_property_finds_a_template_that_lies() -> None:
    """What the property would say of a renderer that looks at nothing."""
    plain = template("no tools").render([{"role": "user", "content": "a", "name": "b"}], **OPTIONS)
    other = template("no tools").render([{"role": "user", "content": "a", "name": "c"}], **OPTIONS)
    assert plain == other
    assert rendered("no tools", [{"role": "user", "content": "a", "name": "b"}]).unread == ("messages.name",)


# --- what becomes of calls --------------------------------------------------------------------------------------------


def call(id: str, arguments: Any, name: str = "weather") -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def turn(*calls: dict[str, Any], content: str = "", ids: list[str] | None = None) -> list[dict[str, Any]]:
    """A question, calls and what they gave."""
    results = [
        {"role": "tool", "tool_call_id": id, "content": f"{id} says 7"} for id in ids or [c["id"] for c in calls]
    ]
    return [
        {"role": "user", "content": "How warm?"},
        {"role": "assistant", "content": content, "tool_calls": list(calls)},
        *results,
    ]


PARIS, ROME = call("callparis", {"city": "Paris"}), call("call_rome", {"city": "Rome"})
WRITTEN = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'


def test_a_template_that_takes_calls_is_given_them_as_they_are() -> None:
    messages = turn(PARIS, content="Let me look.")
    for name in ("hermes", "qwen3", "json", "names and ids"):
        assert rendered(name, messages).text == template(name).render(messages, **OPTIONS)
    assert rendered("hermes", messages).unread == ("messages.tool_calls.id", "messages.tool_call_id")
    assert rendered("names and ids", messages).unread == ()


def test_calls_and_results_become_text_where_the_template_knows_none() -> None:
    found = rendered("no tools", turn(PARIS, content="Let me look."))
    assert found.text == (
        "<|im_start|>user\nHow warm?<|im_end|>\n"
        f"<|im_start|>assistant\nLet me look.\n{WRITTEN}<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\ncallparis says 7\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert set(found.unread) == {"messages.tool_calls.id", "messages.tool_call_id"}


def test_results_and_the_question_after_them_are_one_message_where_roles_alternate() -> None:
    found = rendered("no system", [*turn(PARIS, ROME), {"role": "user", "content": "And now?"}])
    assert found.text.endswith(
        "<start_of_turn>user\n<tool_response>\ncallparis says 7\n</tool_response>\n"
        "<tool_response>\ncall_rome says 7\n</tool_response>\nAnd now?<end_of_turn>\n"
    )


def test_calls_that_the_template_takes_alone_stand_in_the_text_beside_it() -> None:
    found = rendered("one call", turn(PARIS, content="Let me look."))
    assert f"Let me look.\n{WRITTEN}<|eot_id|>" in found.text
    assert "ipython" in found.text  # results stay what they are
    assert "Let me look." not in rendered("one call", turn(PARIS)).text
    assert WRITTEN in rendered("one call", turn(PARIS, ROME)).text  # it refuses two


def test_calls_where_the_template_wants_null_for_no_text() -> None:
    assert "<call>functionweather\n" in rendered("null", turn(PARIS)).text
    assert WRITTEN in rendered("null", turn(PARIS, content="Let me look.")).text


def test_arguments_that_are_no_object() -> None:
    for name in TEMPLATES:
        if name in ("short", "the last", "shouting"):
            continue
        for arguments in ('{"city":', "[1, 2]", "null", "7"):
            text = rendered(name, turn(call("callparis", arguments))).text
            assert arguments in text or json.dumps(arguments)[1:-1] in text


def test_results_come_in_the_order_of_their_calls_where_ids_are_not_shown() -> None:
    swapped = turn(PARIS, ROME, ids=["call_rome", "callparis"])
    for name in ("hermes", "no tools"):
        assert rendered(name, swapped).text == rendered(name, turn(PARIS, ROME)).text
    assert rendered("json", swapped).text != rendered("json", turn(PARIS, ROME)).text
    strange = [*swapped, {"role": "tool", "tool_call_id": "x", "content": "a"}, {"role": "user", "content": "b"}]
    assert in_order_of_calls(strange) == [*turn(PARIS, ROME), *strange[-2:]]


def test_system_messages_before_the_others_are_one_where_the_template_reads_one() -> None:
    messages = [{"role": "system", "content": "Be kind."}, {"role": "system", "content": "Be short."}]
    question = {"role": "user", "content": "Hi"}
    assert rendered("null", [*messages, question]).text == "Be kind.\n\nBe short.<User>Hi<Assistant>"
    assert rendered("no tools", [*messages, question]).text.count("system") == 2
    with pytest.raises(InputError, match="system") as caught:
        rendered("null", [messages[0], question, messages[1], question])
    assert caught.value.param == "messages"


# --- what is named ----------------------------------------------------------------------------------------------------


def test_reasoning_that_the_template_takes_out_is_named() -> None:
    old = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nb"}]
    found = rendered("qwen3", [*old, {"role": "user", "content": "c"}])
    assert "hm" not in found.text
    assert found.unread == ("messages.reasoning_content",)
    assert rendered("qwen3", old).unread == ()  # after the last question it stays


def test_numbers_and_booleans_are_named_where_they_change_nothing() -> None:
    said = [{"role": "user", "content": "a"}, {"role": "tool", "content": "b", "is_error": True, "cost": 2.5}]
    assert rendered("names and ids", said).unread == ("messages.cost",)


def test_roles_are_named_where_the_template_takes_them_for_the_same() -> None:
    assert rendered("no roles", [{"role": "user", "content": "a"}]).unread == ("messages.role",)
    assert rendered("no tools", [{"role": "narrator", "content": "a"}]).unread == ()


def test_values_are_named_that_the_template_does_not_read() -> None:
    question = [{"role": "user", "content": "a"}]
    assert rendered("qwen3", question, enable_thinking=False, reasoning_effort="low").unread == ("reasoning_effort",)


def test_names_with_a_dot_are_told_of_and_kept_from_the_template() -> None:
    found = rendered("json", [{"role": "user", "content": "a", "content.cache_control": True}])
    assert found.unread == ("messages.content.cache_control",)
    assert "cache_control" not in found.text


def test_what_a_template_cuts_off_is_refused() -> None:
    with pytest.raises(InputError, match="would be missing"):
        rendered("short", [{"role": "user", "content": "a much longer text"}])
    with pytest.raises(InputError, match="would be missing"):
        rendered("the last", [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}])


def test_marks_in_a_text_change_nothing() -> None:
    """Digits beside digits, blanks at the ends, and what looks like a mark."""
    for content in ("7", " 7 ", "1" * 100, "\n\t", "x\u2028", "0" * 47):
        messages = [{"role": "user", "content": content}]
        for name in ("no tools", "hermes", "json", "no system"):
            found = rendered(name, messages)
            assert found.text == template(name).render(messages, **OPTIONS)
            assert found.unread == ()
