"""anthropic's client: messages, whole and streamed, token counts and its error classes, beside the same chat."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import pytest

# Of an answer that no rounding of the model ends within the tokens that are asked for.
QUESTION = "Write a long story about a lighthouse and its keeper."
MESSAGES: Any = [{"role": "user", "content": QUESTION}]


@pytest.fixture(autouse=True)
def route(need_route: Callable[[str], None]) -> None:
    need_route("/v1/messages")


@pytest.fixture
def client(url: str, key: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=url, api_key=key, max_retries=0, timeout=300) as opened:
        yield opened


@pytest.fixture
def chat(ask: Any, model: str) -> dict[str, Any]:
    body = {"model": model, "messages": MESSAGES, "temperature": 0, "max_tokens": 40}
    status, answer = ask("/v1/chat/completions", body)
    assert status == 200
    return answer


def create(client: anthropic.Anthropic, model: str, **more: Any) -> Any:
    asked: Any = {"model": model, "messages": MESSAGES, "max_tokens": 40, "extra_body": {"temperature": 0}, **more}
    return client.messages.create(**asked)


def num_input(usage: Any) -> int:
    return usage.input_tokens + usage.cache_creation_input_tokens + usage.cache_read_input_tokens


def test_text_is_what_chat_says(client: anthropic.Anthropic, model: str, chat: dict[str, Any]) -> None:
    message = create(client, model)
    (block,) = message.content
    assert (block.type, block.text) == ("text", chat["choices"][0]["message"]["content"])
    assert (message.type, message.role, message.model) == ("message", "assistant", model)
    assert message.id.startswith("msg_")
    assert (message.stop_reason, message.stop_sequence) == ("max_tokens", None)
    assert num_input(message.usage) == chat["usage"]["prompt_tokens"]
    assert message.usage.output_tokens == chat["usage"]["completion_tokens"] == 40
    assert message._request_id


def test_an_end_of_turn_and_a_stop_sequence(client: anthropic.Anthropic, model: str) -> None:
    whole = create(client, model, messages=[{"role": "user", "content": "Say hi."}], max_tokens=400)
    assert (whole.stop_reason, whole.stop_sequence) == ("end_turn", None)
    text = whole.content[0].text
    stop = text[len(text) // 2 :][:4]
    cut = create(
        client, model, messages=[{"role": "user", "content": "Say hi."}], max_tokens=400, stop_sequences=[stop]
    )
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", stop)
    assert cut.content[0].text == text[: text.index(stop)]


def test_system_and_blocks_are_the_conversation(client: anthropic.Anthropic, model: str, ask: Any) -> None:
    messages = [
        {"role": "user", "content": "My name is Ada."},
        {"role": "assistant", "content": "Hello Ada."},
        {"role": "user", "content": "Who am I?"},
    ]
    system = {"role": "system", "content": "You are terse."}
    _, chat = ask(
        "/v1/chat/completions", {"model": model, "messages": [system, *messages], "temperature": 0, "max_tokens": 30}
    )
    blocks = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in messages]
    for said in (messages, blocks):
        answer = create(client, model, system="You are terse.", messages=said, max_tokens=30)
        assert answer.content[0].text == chat["choices"][0]["message"]["content"]
        assert num_input(answer.usage) == chat["usage"]["prompt_tokens"]


def test_the_last_turn_is_continued(client: anthropic.Anthropic, model: str) -> None:
    begun = create(client, model, max_tokens=8)
    more = create(client, model, messages=[*MESSAGES, {"role": "assistant", "content": begun.content[0].text}])
    whole = create(client, model, max_tokens=48)
    assert begun.content[0].text + more.content[0].text == whole.content[0].text


def test_raw_events(client: anthropic.Anthropic, model: str, chat: dict[str, Any]) -> None:
    events = list(create(client, model, stream=True))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert "".join(event.delta.text for event in events[2:-3]) == chat["choices"][0]["message"]["content"]
    assert events[0].message.usage.input_tokens == chat["usage"]["prompt_tokens"]
    assert events[-2].delta.stop_reason == "max_tokens"
    assert events[-2].usage.output_tokens == 40


def test_the_accumulating_stream(client: anthropic.Anthropic, model: str) -> None:
    whole = create(client, model)
    with client.messages.stream(model=model, messages=MESSAGES, max_tokens=40, extra_body={"temperature": 0}) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text == whole.content[0].text
    assert (final.stop_reason, num_input(final.usage)) == (whole.stop_reason, num_input(whole.usage))
    assert final.usage.output_tokens == whole.usage.output_tokens


def test_count_tokens(
    client: anthropic.Anthropic, model: str, chat: dict[str, Any], need_route: Callable[[str], None]
) -> None:
    need_route("/v1/messages/count_tokens")
    assert client.messages.count_tokens(model=model, messages=MESSAGES).input_tokens == chat["usage"]["prompt_tokens"]
    longer = client.messages.count_tokens(model=model, messages=MESSAGES, system="You are terse.")
    assert longer.input_tokens != chat["usage"]["prompt_tokens"]


def test_errors(client: anthropic.Anthropic, url: str, model: str) -> None:
    with pytest.raises(anthropic.BadRequestError) as raised:
        create(client, model, extra_body={"temperature": -1})
    assert raised.value.body["error"]["type"] == "invalid_request_error"
    assert "temperature" in raised.value.message
    assert raised.value.request_id
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        create(client, model, max_tokens=anthropic.omit)
    with pytest.raises(anthropic.NotFoundError) as raised:
        create(client, "claude-none")
    assert raised.value.body["error"]["type"] == "not_found_error"
    with (
        anthropic.Anthropic(base_url=url, api_key="wrong", max_retries=0) as opened,
        pytest.raises(anthropic.AuthenticationError) as raised,
    ):
        create(opened, model)
    assert raised.value.body["error"]["type"] == "authentication_error"


def test_a_bearer_token_is_a_key_too(url: str, key: str, model: str) -> None:
    with anthropic.Anthropic(base_url=url, auth_token=key, max_retries=0) as opened:
        assert create(opened, model, max_tokens=2).usage.output_tokens == 2


def test_async_and_a_stream_left_early(
    url: str, key: str, model: str, ask: Any, until_idle: Callable[[], None]
) -> None:
    before = ask("/stats")[1]["requests"]["abort"]

    async def leave() -> None:
        async with (
            anthropic.AsyncAnthropic(base_url=url, api_key=key, max_retries=0) as opened,
            opened.messages.stream(
                model=model, messages=MESSAGES, max_tokens=6000, extra_body={"temperature": 1.5}
            ) as stream,
        ):
            async for _ in stream.text_stream:
                break

    asyncio.run(leave())
    until_idle()
    assert ask("/stats")[1]["requests"]["abort"] == before + 1


def test_a_tool_that_must_be_called_is(client: anthropic.Anthropic, model: str) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["city", "days"],
        "additionalProperties": False,
    }
    tools: Any = [{"name": "weather", "description": "The weather of some days.", "input_schema": schema}]
    asked: Any = {"model": model, "max_tokens": 100, "messages": MESSAGES, "tools": tools}
    asked["extra_body"] = {"temperature": 0}
    for choice in ({"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "weather"}):
        whole = client.messages.create(**asked, tool_choice=choice)
        (block,) = whole.content
        assert (whole.stop_reason, block.type) == ("tool_use", "tool_use")
        assert set(block.input) == {"city", "days"}
        with client.messages.stream(**asked, tool_choice=choice) as stream:
            pieces = [event.partial_json for event in stream if event.type == "input_json"]
            final = stream.get_final_message()
        assert final.content[0].input == block.input
        assert len(pieces) > 3


def test_models(client: anthropic.Anthropic, model: str) -> None:
    (found,) = client.models.list()
    assert (found.id, found.type, found.lifecycle) == (model, "model", "active")
    assert client.models.retrieve(model) == found
    page = client.models.list(limit=1)
    assert (page.first_id, page.last_id, page.has_more) == (model, model, False)
    with pytest.raises(anthropic.NotFoundError, match="Unknown model"):
        client.models.retrieve("claude")
    with pytest.raises(anthropic.BadRequestError, match="after_id"):
        client.models.list(after_id="claude")
