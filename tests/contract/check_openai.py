"""openai's client, versions 2 and 3: what it reads out of answers, whole and streamed, and what it can ask for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest

# Of an answer that no rounding of the model ends within the tokens that are asked for.
MESSAGES: Any = [{"role": "user", "content": "Write a long story about a lighthouse and its keeper."}]
GREEDY: Any = {"temperature": 0, "max_tokens": 40}
PROMPT = "The capital of France is"
ENDLESS: Any = {"max_tokens": 6000, "temperature": 0, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def client(url: str, key: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=300) as opened:
        yield opened


def chat(client: openai.OpenAI, model: str, **more: Any) -> Any:
    return client.chat.completions.create(model=model, messages=MESSAGES, **{**GREEDY, **more})


def complete(client: openai.OpenAI, model: str, prompt: Any = PROMPT, **more: Any) -> Any:
    return client.completions.create(model=model, prompt=prompt, **{**GREEDY, **more})


def test_chat_whole(client: openai.OpenAI, model: str) -> None:
    answer = chat(client, model)
    choice = answer.choices[0]
    assert (answer.object, answer.model, choice.index, choice.message.role) == (
        "chat.completion",
        model,
        0,
        "assistant",
    )
    assert answer.id.startswith("chatcmpl-")
    assert choice.message.content
    assert choice.message.refusal is None
    assert choice.message.tool_calls is None
    assert choice.finish_reason in ("stop", "length")
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert 0 < answer.usage.completion_tokens <= 40


def test_max_tokens_are_counted(client: openai.OpenAI, model: str) -> None:
    answer = chat(client, model, max_tokens=openai.omit, max_completion_tokens=3)
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (3, "length")


def test_chat_streamed_says_what_the_whole_says(client: openai.OpenAI, model: str) -> None:
    whole = chat(client, model)
    chunks = list(chat(client, model, stream=True))
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1
    first, last = chunks[0].choices[0], chunks[-1].choices[0]
    assert (first.delta.role, first.delta.content) == ("assistant", "")
    assert (last.finish_reason, last.delta.content, last.delta.role) == (whole.choices[0].finish_reason, None, None)
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert all(chunk.usage is None for chunk in chunks)


def test_usage_comes_last_when_asked_for(client: openai.OpenAI, model: str) -> None:
    whole = chat(client, model)
    chunks = list(chat(client, model, stream=True, stream_options={"include_usage": True}))
    assert all(chunk.usage is None and chunk.choices for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    speculation = chunks[-1].model_extra["metrics"]["speculative_decoding"]
    histogram = speculation["acceptance_histogram"]
    assert sum(histogram) == speculation["num_spec_steps"]
    assert sum(j * steps for j, steps in enumerate(histogram)) == speculation["num_accepted_draft_tokens"]
    assert len(histogram) == speculation["num_spec_tokens"] + 1


def test_the_accumulating_stream(client: openai.OpenAI, model: str) -> None:
    """Ended by a stop string, as this client takes an end by length for an error."""
    stop = chat(client, model).choices[0].message.content[-5:]
    whole = chat(client, model, stop=stop)
    with client.chat.completions.stream(
        model=model, messages=MESSAGES, stream_options={"include_usage": True}, stop=stop, **GREEDY
    ) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    (done,) = (event for event in events if event.type == "content.done")
    assert done.content == whole.choices[0].message.content
    assert final.choices[0].message.content == whole.choices[0].message.content
    assert final.choices[0].finish_reason == whole.choices[0].finish_reason
    assert final.usage.completion_tokens == whole.usage.completion_tokens


def test_n_and_seed(client: openai.OpenAI, model: str) -> None:
    asked: Any = {"n": 3, "seed": 11, "temperature": 1.0}
    first, again = ([choice.message.content for choice in chat(client, model, **asked).choices] for _ in range(2))
    assert first == again
    assert len(set(first)) == 3
    other = [choice.message.content for choice in chat(client, model, **{**asked, "seed": 12}).choices]
    assert other != first
    streamed = [""] * 3
    for chunk in chat(client, model, stream=True, **asked):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == first


def test_chat_logprobs(client: openai.OpenAI, model: str) -> None:
    answer = chat(client, model, logprobs=True, top_logprobs=3)
    entries = answer.choices[0].logprobs.content
    assert len(entries) == answer.usage.completion_tokens
    text = b"".join(bytes(entry.bytes) for entry in entries).decode()
    assert text.removesuffix("<|im_end|>") == answer.choices[0].message.content
    for entry in entries:
        assert len(entry.top_logprobs) == 3
        top = [alternative.logprob for alternative in entry.top_logprobs]
        assert top == sorted(top, reverse=True)
        assert (entry.top_logprobs[0].token, entry.top_logprobs[0].logprob) == (entry.token, entry.logprob)
        assert entry.logprob <= 0
    streamed = [
        entry
        for chunk in chat(client, model, logprobs=True, top_logprobs=3, stream=True)
        for choice in chunk.choices
        if choice.logprobs
        for entry in choice.logprobs.content
    ]
    assert streamed == entries


@pytest.mark.parametrize("as_list", [False, True])
def test_stop(client: openai.OpenAI, model: str, as_list: bool) -> None:
    text = chat(client, model).choices[0].message.content
    stop = text[len(text) // 2 :][:4]
    choice = chat(client, model, stop=[stop, "never said"] if as_list else stop).choices[0]
    assert choice.message.content == text[: text.index(stop)]
    assert choice.finish_reason == "stop"
    streamed = chat(client, model, stop=[stop], stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == choice.message.content


def test_a_right_prediction_is_accepted(client: openai.OpenAI, model: str) -> None:
    plain = chat(client, model)
    content = plain.choices[0].message.content
    predicted = chat(client, model, prediction={"type": "content", "content": content})
    assert predicted.choices[0].message.content == content
    details = predicted.usage.completion_tokens_details
    speculation = predicted.model_extra["metrics"]["speculative_decoding"]
    assert details.accepted_prediction_tokens == speculation["num_accepted_draft_tokens"] > 20
    assert details.rejected_prediction_tokens == (
        speculation["num_draft_tokens"] - speculation["num_accepted_draft_tokens"]
    )
    assert predicted.usage.completion_tokens == plain.usage.completion_tokens
    assert plain.usage.completion_tokens_details.accepted_prediction_tokens == 0


def test_a_wrong_prediction_changes_nothing(client: openai.OpenAI, model: str) -> None:
    plain = chat(client, model)
    wrong = chat(client, model, prediction={"type": "content", "content": [{"type": "text", "text": "def f(): pass"}]})
    assert wrong.choices == plain.choices
    assert wrong.usage.completion_tokens_details.accepted_prediction_tokens == 0


@pytest.mark.parametrize("speculative", [{"enabled": False}, {"drafter": "none"}, {"num_tokens": 1}])
def test_drafts_change_nothing(client: openai.OpenAI, model: str, speculative: dict[str, Any]) -> None:
    drafted = chat(client, model, max_tokens=120)
    other = chat(client, model, max_tokens=120, extra_body={"speculative": speculative})
    assert other.choices == drafted.choices


def test_completions(client: openai.OpenAI, model: str) -> None:
    answer = complete(client, model, max_tokens=openai.omit)
    assert (answer.object, answer.choices[0].finish_reason) == ("text_completion", "length")
    assert answer.usage.completion_tokens == 16  # OpenAI's default
    streamed = list(complete(client, model, max_tokens=openai.omit, stream=True))
    assert "".join(chunk.choices[0].text for chunk in streamed) == answer.choices[0].text
    assert streamed[-1].choices[0].finish_reason == "length"


def test_echo_with_logprobs(client: openai.OpenAI, model: str) -> None:
    alone = complete(client, model, logprobs=2, max_tokens=8)
    echoed = complete(client, model, logprobs=2, max_tokens=8, echo=True)
    choice, scores = echoed.choices[0], echoed.choices[0].logprobs
    num_prompt = echoed.usage.prompt_tokens
    assert choice.text == PROMPT + alone.choices[0].text
    assert "".join(scores.tokens) == choice.text
    assert len(scores.tokens) == num_prompt + 8
    assert scores.token_logprobs[0] is None
    assert scores.top_logprobs[0] is None
    assert [choice.text[offset:].startswith(t) for offset, t in zip(scores.text_offset, scores.tokens, strict=True)]
    assert scores.token_logprobs[num_prompt:] == alone.choices[0].logprobs.token_logprobs
    assert scores.top_logprobs[num_prompt:] == alone.choices[0].logprobs.top_logprobs


def test_echo_scores_what_was_generated_as_generation_did(client: openai.OpenAI, model: str) -> None:
    """The bits are the same whether a token was drafted and verified, decoded alone, or read as part of a prompt."""
    generated = complete(client, model, logprobs=1, max_tokens=24, extra_body={"return_token_ids": True})
    extra = generated.choices[0].model_extra
    ids = [*extra["prompt_token_ids"], *extra["token_ids"]]
    read = complete(client, model, prompt=ids, logprobs=1, max_tokens=1, echo=True)
    scores = read.choices[0].logprobs.token_logprobs
    assert scores[len(extra["prompt_token_ids"]) : len(ids)] == generated.choices[0].logprobs.token_logprobs


def test_batches_of_texts_and_of_ids(client: openai.OpenAI, model: str, ask: Any) -> None:
    prompts = [PROMPT, "Once upon a time", "1, 2, 3, 4,"]
    alone = [complete(client, model, prompt=prompt).choices[0].text for prompt in prompts]
    ids = [ask("/tokenize", {"prompt": prompt})[1]["tokens"] for prompt in prompts]
    for batch in (prompts, ids):
        together = complete(client, model, prompt=batch)
        assert [(choice.index, choice.text) for choice in together.choices] == list(enumerate(alone))
    streamed = [""] * 3
    for chunk in complete(client, model, prompt=ids, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == alone
    pairs = complete(client, model, prompt=ids[:2], n=2).choices
    assert [choice.text for choice in pairs] == [alone[0], alone[0], alone[1], alone[1]]


def test_logit_bias_and_penalties(client: openai.OpenAI, model: str) -> None:
    favourite = complete(client, model, max_tokens=1, extra_body={"return_token_ids": True}).choices[0]
    (token,) = favourite.model_extra["token_ids"]
    other = complete(client, model, max_tokens=1, logit_bias={str(token): -100}).choices[0]
    assert other.text != favourite.text
    repeated = complete(client, model, prompt="a a a a a a a a", max_tokens=12).choices[0].text
    penalised = complete(client, model, prompt="a a a a a a a a", max_tokens=12, frequency_penalty=2.0).choices[0].text
    assert penalised != repeated


def test_models(client: openai.OpenAI, model: str) -> None:
    listed = client.models.list().data
    assert [card.id for card in listed] == [model]
    card = client.models.retrieve(model)
    assert card == listed[0]
    assert (card.object, card.owned_by) == ("model", "specserve")


def test_headers(client: openai.OpenAI, model: str) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model=model,
        messages=MESSAGES,
        **GREEDY,
        extra_headers={"X-Request-Id": "from-outside-1"},
        extra_body={"sparkle": 1},
        user="someone",
        metadata={"a": "b"},
        store=False,
    )
    assert raw.headers["x-request-id"] == "from-outside-1"
    assert raw.headers["x-specserve-ignored"] == "sparkle"
    answer = raw.parse()
    assert answer._request_id == "from-outside-1"
    other = client.chat.completions.with_raw_response.create(model=model, messages=MESSAGES, **GREEDY)
    assert other.headers["x-request-id"] not in ("", "from-outside-1")
    assert other.parse().choices == answer.choices


def test_a_stream_with_raw_headers(client: openai.OpenAI, model: str) -> None:
    with client.chat.completions.with_streaming_response.create(
        model=model, messages=MESSAGES, stream=True, **GREEDY
    ) as raw:
        assert raw.headers["content-type"].startswith("text/event-stream")
        assert raw.headers["x-request-id"]
        lines = [line for line in raw.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    assert all(line.startswith("data: {") for line in lines[:-1])


def test_developer_and_parts(client: openai.OpenAI, model: str) -> None:
    """OpenAI's newer spellings are the same conversation."""
    old = client.chat.completions.create(
        model=model,
        messages=[{"role": "system", "content": "You are terse."}, {"role": "user", "content": "Say hi."}],
        **GREEDY,
    )
    new = client.chat.completions.create(
        model=model,
        messages=[
            {"role": "developer", "content": [{"type": "text", "text": "You are terse."}]},
            {"role": "user", "content": [{"type": "text", "text": "Say hi."}], "name": "me"},
        ],
        **GREEDY,
    )
    assert new.choices == old.choices
    assert new.usage.prompt_tokens == old.usage.prompt_tokens


def test_a_closed_stream_ends_the_work(
    client: openai.OpenAI, model: str, ask: Any, until_idle: Callable[[], None]
) -> None:
    before = ask("/stats")[1]["requests"]["abort"]
    stream = client.chat.completions.create(model=model, messages=MESSAGES, stream=True, **ENDLESS)
    for _, _chunk in zip(range(5), stream, strict=False):
        pass
    stream.close()
    until_idle()
    assert ask("/stats")[1]["requests"]["abort"] == before + 1


def asynchronous(url: str, key: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=300)


def test_async_calls_at_once_are_as_alone(client: openai.OpenAI, url: str, key: str, model: str) -> None:
    prompts = [f"{number} and {number + 1} are" for number in range(8)]
    alone = [complete(client, model, prompt=prompt).choices[0].text for prompt in prompts]

    async def together() -> list[str]:
        async with asynchronous(url, key) as opened:
            calls = (opened.completions.create(model=model, prompt=prompt, **GREEDY) for prompt in prompts)
            return [answer.choices[0].text for answer in await asyncio.gather(*calls)]

    assert asyncio.run(together()) == alone


@pytest.mark.parametrize("stream", [False, True])
def test_async_cancellation_ends_the_work(
    url: str, key: str, model: str, ask: Any, until_idle: Callable[[], None], stream: bool
) -> None:
    before = ask("/stats")[1]["requests"]["abort"]

    async def cancel() -> None:
        async with asynchronous(url, key) as opened:

            async def consume() -> None:
                answer: Any = await opened.chat.completions.create(
                    model=model, messages=MESSAGES, stream=stream, **ENDLESS
                )
                async for _ in answer:
                    pass

            call = asyncio.create_task(consume())
            while not (await asyncio.to_thread(ask, "/stats"))[1]["num_running"]:
                assert not call.done(), "the call ended before it was cancelled"
                await asyncio.sleep(0.01)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call

    asyncio.run(cancel())
    until_idle()
    assert ask("/stats")[1]["requests"]["abort"] == before + 1
