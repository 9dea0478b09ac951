"""openai's client, versions 2 and 3, on the Responses API: items, events and errors, beside the same chat."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest

# Of an answer that no rounding of the model ends within the tokens that are asked for.
QUESTION = "Write a long story about a lighthouse and its keeper."
MESSAGES: Any = [{"role": "user", "content": QUESTION}]
GREEDY: Any = {"temperature": 0, "max_output_tokens": 40}


@pytest.fixture(autouse=True)
def route(need_route: Callable[[str], None]) -> None:
    need_route("/v1/responses")


@pytest.fixture
def client(url: str, key: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=300) as opened:
        yield opened


@pytest.fixture
def chat(client: openai.OpenAI, model: str) -> Any:
    return client.chat.completions.create(model=model, messages=MESSAGES, temperature=0, max_tokens=40)


def test_text_is_what_chat_says(client: openai.OpenAI, model: str, chat: Any) -> None:
    response = client.responses.create(model=model, input=QUESTION, **GREEDY)
    assert response.output_text == chat.choices[0].message.content
    assert (response.object, response.model, response.error) == ("response", model, None)
    assert chat.choices[0].finish_reason == "length"
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    (item,) = response.output
    assert (item.type, item.role, item.content[0].type) == ("message", "assistant", "output_text")
    assert response.usage.input_tokens == chat.usage.prompt_tokens
    assert response.usage.output_tokens == chat.usage.completion_tokens
    assert response.usage.total_tokens == chat.usage.total_tokens


def test_a_whole_answer_is_completed(client: openai.OpenAI, model: str) -> None:
    response = client.responses.create(model=model, input="Say hi.", temperature=0, max_output_tokens=400)
    assert (response.status, response.incomplete_details) == ("completed", None)
    assert response.usage.output_tokens < 400


def test_instructions_and_items_are_the_conversation(client: openai.OpenAI, model: str) -> None:
    chat = client.chat.completions.create(
        model=model,
        messages=[
            {"role": "system", "content": "You are terse."},
            {"role": "user", "content": "My name is Ada."},
            {"role": "assistant", "content": "Hello Ada."},
            {"role": "user", "content": "Who am I?"},
        ],
        temperature=0,
        max_tokens=30,
    )
    response = client.responses.create(
        model=model,
        instructions="You are terse.",
        input=[
            {"role": "user", "content": "My name is Ada."},
            {"role": "assistant", "content": "Hello Ada."},
            {"role": "user", "content": [{"type": "input_text", "text": "Who am I?"}]},
        ],
        temperature=0,
        max_output_tokens=30,
    )
    assert response.output_text == chat.choices[0].message.content
    assert response.usage.input_tokens == chat.usage.prompt_tokens


def test_an_answer_can_be_sent_back_as_it_came(client: openai.OpenAI, model: str) -> None:
    first = client.responses.create(model=model, input=QUESTION, **GREEDY)
    history: Any = [{"role": "user", "content": QUESTION}, *first.output, {"role": "user", "content": "Go on."}]
    second = client.responses.create(model=model, input=history, **GREEDY)
    assert second.usage.input_tokens > first.usage.input_tokens + first.usage.output_tokens
    assert second.output_text


def test_events(client: openai.OpenAI, model: str, chat: Any) -> None:
    events = list(client.responses.create(model=model, input=QUESTION, stream=True, **GREEDY))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(event.delta for event in events[4:-4])
    assert text == events[-4].text == events[-1].response.output_text == chat.choices[0].message.content
    assert events[-1].response.usage.output_tokens == chat.usage.completion_tokens
    assert len({event.item_id for event in events[4:-4]}) == 1


def test_the_accumulating_stream(client: openai.OpenAI, model: str, chat: Any) -> None:
    with client.responses.stream(model=model, input=QUESTION, **GREEDY) as stream:
        deltas = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    assert deltas == chat.choices[0].message.content
    with client.responses.stream(model=model, input="Say hi.", temperature=0, max_output_tokens=400) as stream:
        final = stream.get_final_response()
    assert (final.status, bool(final.output_text)) == ("completed", True)


def test_logprobs(client: openai.OpenAI, model: str) -> None:
    asked: Any = {"include": ["message.output_text.logprobs"], "top_logprobs": 2, **GREEDY}
    response = client.responses.create(model=model, input=QUESTION, **asked)
    entries = response.output[0].content[0].logprobs
    assert len(entries) == response.usage.output_tokens
    assert all(len(entry.top_logprobs) == 2 and entry.logprob <= 0 for entry in entries)


def test_wrong_fields(client: openai.OpenAI, model: str) -> None:
    for field, value in (("temperature", -1), ("max_output_tokens", 0), ("previous_response_id", "resp_1")):
        asked: Any = {field: value}
        with pytest.raises(openai.BadRequestError) as raised:
            client.responses.create(model=model, input=QUESTION, **asked)
        assert (raised.value.param, raised.value.type) == (field, "invalid_request_error")
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="gpt-none", input=QUESTION)


def test_what_is_not_kept_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve("resp_1")


def test_async_and_a_stream_left_early(
    url: str, key: str, model: str, ask: Any, until_idle: Callable[[], None]
) -> None:
    before = ask("/stats")[1]["requests"]["abort"]

    async def leave() -> None:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=300) as opened:
            stream = await opened.responses.create(
                model=model, input=QUESTION, temperature=1.5, max_output_tokens=6000, stream=True
            )
            async for event in stream:
                if event.type == "response.output_text.delta":
                    break
            await stream.close()

    asyncio.run(leave())
    until_idle()
    assert ask("/stats")[1]["requests"]["abort"] == before + 1
