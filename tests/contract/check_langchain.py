"""langchain-openai: chat and completions through its model classes, whole, streamed and in batches."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field

# Of an answer that no rounding of the model ends within the tokens that are asked for.
QUESTION = "Write a long story about a lighthouse and its keeper."


@pytest.fixture
def chat(url: str, key: str, model: str) -> ChatOpenAI:
    return ChatOpenAI(
        model=model, base_url=f"{url}/v1", api_key=key, temperature=0, max_tokens=30, max_retries=0, stream_usage=True
    )


def test_chat(chat: ChatOpenAI, model: str) -> None:
    answer = chat.invoke([SystemMessage("You like to count."), HumanMessage(QUESTION)])
    assert isinstance(answer, AIMessage)
    assert answer.content
    assert answer.response_metadata["finish_reason"] in ("stop", "length")
    assert answer.response_metadata["model_name"] == model
    assert answer.usage_metadata is not None
    assert 0 < answer.usage_metadata["output_tokens"] <= 30


def test_chunks_add_up(chat: ChatOpenAI) -> None:
    whole = chat.invoke(QUESTION)
    chunks = list(chat.stream(QUESTION))
    total: Any = chunks[0]
    for chunk in chunks[1:]:
        total = total + chunk
    assert len(chunks) > 3
    assert total.content == whole.content
    assert total.usage_metadata["output_tokens"] == 30
    assert total.response_metadata["finish_reason"] == "length"


def test_a_chain_and_its_batch(chat: ChatOpenAI) -> None:
    chain = ChatPromptTemplate.from_messages([("user", "Say {word}.")]) | chat | StrOutputParser()
    words = [{"word": word} for word in ("tree", "river", "stone")]
    alone = [chain.invoke(word) for word in words]
    assert chain.batch(words) == alone
    assert asyncio.run(chain.abatch(words)) == alone


def test_completions(url: str, key: str, model: str) -> None:
    llm = OpenAI(model=model, base_url=f"{url}/v1", api_key=key, temperature=0, max_tokens=12, max_retries=0)
    prompt = "The capital of France is"
    text = llm.invoke(prompt)
    assert text
    assert "".join(llm.stream(prompt)) == text
    assert llm.batch([prompt, "1, 2, 3,"])[0] == text


def test_logprobs_and_seed(chat: ChatOpenAI) -> None:
    sampled = chat.bind(temperature=1.0, seed=5, logprobs=True, top_logprobs=2)
    first, again = sampled.invoke(QUESTION), sampled.invoke(QUESTION)
    assert first.content == again.content
    assert len(first.response_metadata["logprobs"]["content"]) == 30


def test_an_error_is_openais(chat: ChatOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        chat.bind(temperature=-1).invoke(QUESTION)
    assert raised.value.param == "temperature"


class City(BaseModel):
    """A city."""

    name: str = Field(max_length=20)
    is_capital: bool


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_an_answer_is_an_object(url: str, key: str, model: str, method: Any) -> None:
    roomy = ChatOpenAI(model=model, base_url=f"{url}/v1", api_key=key, temperature=0, max_tokens=100, max_retries=0)
    assert isinstance(roomy.with_structured_output(City, method=method).invoke("Describe Paris."), City)


def test_a_bound_tool_is_called(url: str, key: str, model: str) -> None:
    roomy = ChatOpenAI(model=model, base_url=f"{url}/v1", api_key=key, temperature=0, max_tokens=100, max_retries=0)
    answer = roomy.bind_tools([City], tool_choice="any", parallel_tool_calls=False).invoke("Describe Paris.")
    assert isinstance(answer, AIMessage)
    (call,) = answer.tool_calls
    assert City.model_validate(call["args"])
