"""Rows C24 to C30 of hostile input: token ids, lengths, Unicode, conversations, templates, and what is no text."""

from __future__ import annotations

import json
import socket
import time
from typing import Any

import pytest

from specserve.testing import SPECIAL_TOKENS, tiny_tokenizer

MIB = 2**20
USER = [{"role": "user", "content": "x"}]


def too_long(reply: Any) -> None:
    assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")
    assert "511" in reply.error["message"]
    assert reply.headers["x-should-retry"] == "false"


# --- C24 to C26: ids and lengths --------------------------------------------------------------------------------------


def test_ids_that_are_none(case: Any) -> None:
    """C24"""
    for token in (-1, 293, 309, 2**31, 2**40, 5.0, 5.5, "5", None, True, [5]):
        for prompt in ([5, token], [[5], [5, token]]):
            reply = case.complete(prompt=prompt)
            assert (reply.status, reply.error["param"]) == (400, "prompt"), token
        reply = case.post("/detokenize", {"tokens": [5, token]})
        assert (reply.status, reply.error["param"]) == (400, "tokens"), token


def test_prompts_as_long_as_the_context(case: Any) -> None:
    """C25"""
    for length in (510, 511, 512, 513):
        for prompt in ([5] * length, "&" * length):
            reply = case.complete(prompt=prompt, max_tokens=50, ignore_eos=True)
            if length < 512:
                assert reply.json["usage"]["completion_tokens"] == 512 - length
                assert reply.json["choices"][0]["finish_reason"] == "length"
            else:
                too_long(reply)


LONG_TEXTS = {
    "one-letter": "a" * (8 * MIB),
    "words": "the cat sat on " * (MIB // 2),
    "spaces": " " * (8 * MIB),
    "marks": "a\u0301\u0323" * MIB,
    "control-tokens": "<|end|>" * MIB,
    "NUL": "\x00" * (2 * MIB),
}


@pytest.mark.parametrize("name", LONG_TEXTS, ids=lambda name: f"C25-8-MB-{name}")
def test_texts_of_megabytes(case: Any, name: str) -> None:
    """They are refused before they are tokenized, which would take seconds of a core, wherever they come in. What they
    hold makes a difference where a text comes in alone; one of them stands for all in the other places."""
    text = LONG_TEXTS[name]
    before = cpu_seconds(case.served.process.pid)
    too_long(case.complete(prompt=text))
    too_long(case.chat(text))
    if name == "words":
        too_long(case.chat([{"type": "text", "text": text[: MIB // 2]}, {"type": "text", "text": text[MIB // 2 :]}]))
        predicted = case.chat("x", prediction={"type": "content", "content": text})
        assert (predicted.status, predicted.error["param"]) == (400, "prediction")
        too_long(case.complete(prompt=["x", text[: MIB // 4], "y"]))
    # Up to five times 8 MB of JSON, and streams beside it. To tokenize one of these texts takes more.
    assert cpu_seconds(case.served.process.pid) - before < 10


def cpu_seconds(pid: int) -> float:
    """What a process has used so far."""
    with open(f"/proc/{pid}/stat", encoding="utf-8") as stream:
        fields = stream.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def test_a_text_that_is_counted_alone(case: Any) -> None:
    """C25-tokenize: /tokenize counts texts that are no prompts, up to a limit; prompts are answered meanwhile. That a
    long one holds nobody up is in bounded/."""
    text = "the cat sat on " * (MIB // 15)
    case.api_mib = 200  # allocators keep what a million tokens took, and use it again: it does not grow further
    counted = case.raw(case.request({"prompt": text}, "/tokenize"))
    prompt = "and then " * 40
    replies = [case.complete(prompt=prompt, max_tokens=2) for _ in range(20)]
    assert [reply.status for reply in replies] == [200] * 20
    told = json.loads(counted.rest().partition(b"\r\n\r\n")[2])
    assert told["count"] == len(told["tokens"])
    back = case.post("/detokenize", {"tokens": told["tokens"]})
    assert back.json["prompt"] == text


def test_texts_that_are_too_long_to_count(case: Any) -> None:
    """C25-limits: no context bounds them, so a number of characters does, wherever they come in."""
    text = "the cat sat on " * (4 * MIB // 15)
    for path, fields in (
        ("/tokenize", {"prompt": text}),
        ("/tokenize", {"messages": [{"role": "user", "content": text}]}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": text}]}),
    ):
        reply = case.post(path, fields)
        param = "prompt" if "prompt" in fields else "messages"
        assert (reply.status, reply.error["type"]) == (400, "invalid_request_error")
        assert f"{param} has more than {MIB} characters" in reply.error["message"]
        assert "--max-tokenize-characters" in reply.error["message"]


def test_a_text_that_just_fits(case: Any) -> None:
    """C25-long-tokens: 511 tokens of the longest that the tokenizer has are a prompt; no bound refuses them."""
    control = max(SPECIAL_TOKENS, key=len)
    reply = case.complete(prompt=control * 511, max_tokens=1)
    assert (reply.status, reply.json["usage"]["prompt_tokens"]) == (200, 511)
    too_long(case.complete(prompt=control * 512, max_tokens=1))


def test_a_conversation_of_small_parts(case: Any) -> None:
    """C25-many-small-texts: it is long all the same, wherever its text stands."""
    too_long(case.post("/v1/chat/completions", {"messages": USER * 10_000}))  # as many as there may be
    named = [{**USER[0], "name": "x" * MIB, "reasoning_content": "y" * MIB}]
    reply = case.post("/v1/chat/completions", {"messages": named, "max_tokens": 2})
    assert reply.status == 200, "the template does not show them"


# --- C27: text --------------------------------------------------------------------------------------------------------

TEXTS = {
    "lone-surrogate": "a\ud800b",
    "two-halves": "\udc00\ud800",
    "NUL": "a\x00b",
    "controls": "".join(map(chr, (*range(12), *range(13, 32)))),  # U+000C is the token that breaks this model
    "unassigned": "\U000e0000\ufffe\uffff\U0010ffff",
    "right-to-left": "\u202eabc\u202c\u200f\u200b\ufeff",
    "marks": "a" + "\u0301" * 150,
    "family": "👩‍👩‍👧‍👦" * 12,
    "one-letter": "a" * 400,
    "control-tokens": "".join(SPECIAL_TOKENS) + "<|im_end|></s>",
    "template": "{{ ''.__class__ }}{% for x in range(10**12) %}x{% endfor %}",
    "json": '"}], "max_tokens": 1000000, "x": [{"',
    "event": "\n\ndata: [DONE]\n\n",
}


@pytest.mark.parametrize("name", TEXTS, ids=lambda name: f"C27-{name}")
def test_any_text_is_a_prompt(case: Any, name: str) -> None:
    """What is no Unicode counts as U+FFFD; everything else comes to the model as it is."""
    text = TEXTS[name]
    clean = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    for reply, plain in (
        (case.complete(prompt=text, echo=True), case.complete(prompt=clean, echo=True)),
        (case.chat(text), case.chat(clean)),
    ):
        assert reply.status == 200
        assert reply.json["choices"] == plain.json["choices"]
        assert reply.json["usage"]["prompt_tokens"] == plain.json["usage"]["prompt_tokens"]
    events = case.complete(prompt=text, stream=True).events
    assert events[-1] == "[DONE]"
    assert events.count("[DONE]") == 1


@pytest.mark.parametrize("control", [*SPECIAL_TOKENS, "<|st<|end|>art|>"], ids=lambda text: f"C27-{text}")
def test_users_write_no_control_tokens(case: Any, control: str) -> None:
    """In a conversation they are text, whoever wrote them and in whatever field; in a plain prompt they are tokens."""
    tokenizer = tiny_tokenizer()
    controls = {tokenizer.token_to_id(token) for token in SPECIAL_TOKENS}

    def count(messages: list[dict[str, Any]]) -> int:
        tokens = case.post("/tokenize", {"messages": messages}).json["tokens"]
        return sum(token in controls for token in tokens)

    for place in (
        {"content": f"a{control}b"},
        {"content": control * 5},
        {"content": [{"type": "text", "text": control}]},
    ):
        assert count([{"role": "user", **place}]) == count([{"role": "user", "content": "a"}])
    plain = case.post("/tokenize", {"prompt": control, "add_special_tokens": False}).json["tokens"]
    assert any(token in controls for token in plain)


# --- C28 to C30: conversations ----------------------------------------------------------------------------------------


def no_conversation(case: Any, messages: Any, *paths: str) -> None:
    for path in paths or ("/v1/chat/completions", "/tokenize"):
        reply = case.post(path, {"messages": messages})
        assert (reply.status, reply.error["type"]) == (400, "invalid_request_error"), str(messages)[:200]
        assert str(reply.error["param"]).startswith("messages"), str(messages)[:200]


def test_conversations_without_end(case: Any) -> None:
    """C28-100000, and one more than there may be of messages, parts and calls"""
    no_conversation(case, USER * 100_000, "/v1/chat/completions")
    no_conversation(case, USER * 10_001)
    no_conversation(case, [{"role": "user", "content": [{"type": "text", "text": "x"}] * 10_001}])
    no_conversation(case, [{"role": "assistant", "content": "x", "tool_calls": [{}] * 129}])


def test_conversations_that_are_none(case: Any) -> None:
    """C28"""
    for messages in ([], "x", {"role": "user", "content": "x"}, ["x"], [None]):
        no_conversation(case, messages)
    for role in ("wizard", None, ["user"]):
        no_conversation(case, [{"role": role, "content": "x"}])
    for message in ({"content": "x"}, {"role": "user"}):
        no_conversation(case, [message])
    audio = {"type": "input_audio", "input_audio": {}}
    for content in (None, 5, {"text": "x"}, [], ["x"], [{"type": "text"}], [audio]):
        no_conversation(case, [{"role": "user", "content": content}])
    for function in ({"name": 5}, {"arguments": "{}"}, "f"):
        no_conversation(case, [{"role": "assistant", "tool_calls": [{"function": function}]}])


def test_templates_from_outside(case: Any) -> None:
    """C29"""
    names: list[dict[str, Any]] = [{"messages": []}, {"tokenize": True}, {"chat_template": "x"}, {"eos_token": "x"}]
    values: list[Any] = [*names, {"self": 1}, {"a b": 1}, {f"a{i}": 1 for i in range(65)}, []]
    for fields in (
        {"chat_template": "{{ ''.__class__.__mro__ }}"},
        {"chat_template": "{% for i in range(10**12) %}x{% endfor %}"},
        {"continue_final_message": True},
        *({"chat_template_kwargs": value} for value in values),
    ):
        reply = case.chat(**fields)
        assert (reply.status, reply.error["param"]) == (400, next(iter(fields))), fields


def test_values_for_the_template_are_values(case: Any) -> None:
    """C29-values: text that looks like a template is not run."""
    values = {"a": "{{ ''.__class__ }}", "range": 10**12, "cycler": "x", "namespace": None, "b": ["'a'*10**10"] * 100}
    plain = case.chat().json["choices"]
    assert case.chat(chat_template_kwargs=values).json["choices"] == plain


@pytest.fixture(scope="module")
def trap() -> Any:
    """A socket that a server would have to connect to. `caught` is how many did."""

    class Trap:
        def __init__(self) -> None:
            self.socket = socket.create_server(("127.0.0.1", 0))
            self.socket.setblocking(False)
            self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}/a.png"

        def caught(self) -> bool:
            time.sleep(0.05)
            try:
                self.socket.accept()
            except BlockingIOError:
                return False
            return True

    made = Trap()
    yield made
    made.socket.close()


def parts(url: str) -> list[dict[str, Any]]:
    """A part of every kind that points somewhere."""
    return [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "input_image", "image_url": url},
        {"type": "video_url", "video_url": {"url": url}},
        {"type": "audio_url", "audio_url": {"url": url}},
        {"type": "file", "file": {"file_id": url}},
        {"type": "image_embeds", "image_embeds": url},
    ]


@pytest.mark.parametrize(
    "place", ["trap", "file:///etc/passwd", "data:image/png;base64,AAAA"], ids=lambda p: f"C30-{p}"
)
def test_nothing_is_fetched(case: Any, trap: Any, place: str) -> None:
    """What points to files and other servers is refused, and none of them is opened."""
    url = trap.url if place == "trap" else place
    for part in parts(url):
        reply = case.chat([{"type": "text", "text": "x"}, part])
        assert (reply.status, reply.error["param"]) == (400, "messages[0].content")
        assert url not in reply.error["message"]
    for fields in ({"prompt_embeds": url}, {"audio": {"url": url}}, {"structured_outputs": {"json": {"$ref": url}}}):
        for reply in (case.chat(**fields), case.complete(**fields)):
            assert (reply.status, reply.error["param"]) == (400, next(iter(fields)))
    assert not trap.caught()


def test_anthropic_and_responses_are_held_to_the_same(case: Any) -> None:
    """C24-to-C30 at the translated endpoints: what they take becomes a conversation, with the same limits."""
    messages = {"model": "tiny", "max_tokens": 4, "messages": USER}
    responses = {"model": "tiny", "max_output_tokens": 4, "input": "x"}
    assert case.post("/v1/messages", messages).status == 200
    assert case.post("/v1/responses", responses).status == 200
    long = "the cat " * (MIB // 8)
    image = {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1:1/a.png"}}
    for path, body in (
        ("/v1/messages", {**messages, "messages": [{"role": "user", "content": long}]}),
        ("/v1/messages", {**messages, "messages": [{"role": "user", "content": [image]}]}),
        ("/v1/messages", {**messages, "messages": USER * 10_001}),
        ("/v1/messages", {**messages, "messages": [{"role": "wizard", "content": "x"}]}),
        ("/v1/messages", {**messages, "max_tokens": -1}),
        ("/v1/messages", {**messages, "temperature": 10**19}),
        ("/v1/responses", {**responses, "input": long}),
        ("/v1/responses", {**responses, "input": [{"role": "user", "content": [{"type": "input_image"}]}]}),
        ("/v1/responses", {**responses, "input": USER * 10_001}),
        ("/v1/responses", {**responses, "max_output_tokens": 0}),
        ("/v1/responses", {**responses, "temperature": "hot"}),
    ):
        reply = case.post(path, body)
        assert reply.status == 400, (path, json.dumps(body)[:200], reply.body[:300])
        assert reply.json["error"]["type"] == "invalid_request_error"
