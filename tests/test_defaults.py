"""One set of defaults: what the SDK, the command line, the playground and the HTTP APIs ask of the engine for the same
prompt when nothing is said of sampling."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, TypeAlias

import pytest

import specserve.server
from specserve import LLM, AsyncLLM, SamplingParams
from specserve.checkpoint.generation_config import check_named, sampling_params, stated_by
from specserve.cli.main import run
from specserve.errors import ConfigError, InputError
from specserve.prompts import Requests
from specserve.server.wire.anthropic_api.requests import MessagesRequest
from specserve.server.wire.fields import Limits
from specserve.server.wire.ollama_api.requests import GenerateRequest, OllamaChatRequest
from specserve.server.wire.openai.requests import ChatCompletionRequest, CompletionRequest, read
from specserve.server.wire.openai.responses import ResponsesRequest
from specserve.server.wire.translated import read_translated
from specserve.testing import write_tiny_model
from specserve.text.tokenizer import Tokenizer

Asked: TypeAlias = tuple[SamplingParams, list[int]]
STATED = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05}
SIZE: dict[str, Any] = {"kv_cache_gib": 0.01, "max_model_len": 64, "dtype": "float32"}
FLAGS = ("--kv-cache-gib", "0.01", "--max-model-len", "64", "--dtype", "float32")
TEXT = "Hello there"
MESSAGES = [{"role": "user", "content": TEXT}]


@pytest.fixture(scope="module", params=["a model that states values", "a model that states none"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tiny_model(tmp_path_factory.mktemp("defaults") / "model", "llama")
    file = folder / "generation_config.json"
    if "states values" in request.param:
        file.write_text(json.dumps({**json.loads(file.read_text()), **STATED, "do_sample": True, "max_new_tokens": 9}))
    return folder


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Asked]:
    """What is asked of engines in this process."""
    found: list[Asked] = []
    make = Requests._make

    def recorded(self: Requests, text: str | None, ids: list[int], params: SamplingParams, fields: Any) -> Any:
        found.append((params, ids))
        return make(self, text, ids, params, fields)

    monkeypatch.setattr(Requests, "_make", recorded)
    return found


def expected(model: Path, is_chat: bool) -> Asked:
    stated = STATED if "temperature" in json.loads((model / "generation_config.json").read_text()) else {}
    tokenizer = Tokenizer(model)
    ids = tokenizer.encode_chat(MESSAGES) if is_chat else tokenizer.encode(TEXT)
    return SamplingParams(max_tokens=None if is_chat else 16, **stated), ids  # type: ignore[arg-type]


def of_sdk(model: Path, call: Callable[[LLM], Any]) -> None:
    with LLM(str(model), **SIZE) as llm:
        found = call(llm)
        if isinstance(found, Iterator):
            list(found)


def of_async_sdk(model: Path, call: Callable[[AsyncLLM], Any]) -> None:
    async def ask() -> None:
        async with AsyncLLM(str(model), **SIZE) as llm:
            await call(llm)

    asyncio.run(ask())


def of_command(*arguments: str) -> None:
    assert run((*arguments, *FLAGS)) == 0


CHATS: Mapping[str, Callable[[Path], None]] = {
    "LLM.chat": lambda model: of_sdk(model, lambda llm: llm.chat(MESSAGES)),
    "LLM.stream_chat": lambda model: of_sdk(model, lambda llm: llm.stream_chat(MESSAGES)),
    "LLM.sampling_params": lambda model: of_sdk(model, lambda llm: llm.chat(MESSAGES, llm.sampling_params())),
    "AsyncLLM.chat": lambda model: of_async_sdk(model, lambda llm: llm.chat(MESSAGES)),
    "generate": lambda model: of_command("generate", TEXT, "-m", str(model)),
    "generate --json": lambda model: of_command("generate", TEXT, "--json", "-m", str(model)),
    "run": lambda model: of_command("run", str(model), TEXT),
    "chat": lambda model: of_command("chat", str(model)),
}
TEXTS: Mapping[str, Callable[[Path], None]] = {
    "LLM.generate": lambda model: of_sdk(model, lambda llm: llm.generate(TEXT)),
    "LLM.stream": lambda model: of_sdk(model, lambda llm: llm.stream(TEXT)),
    "LLM.sampling_params": lambda model: of_sdk(model, lambda llm: llm.generate(TEXT, llm.sampling_params(chat=False))),
    "AsyncLLM.generate": lambda model: of_async_sdk(model, lambda llm: llm.generate(TEXT)),
    "generate --raw": lambda model: of_command("generate", TEXT, "--raw", "-m", str(model)),
}


@pytest.mark.parametrize("surface", CHATS)
def test_a_conversation_in_this_process(
    model: Path, asked: list[Asked], monkeypatch: pytest.MonkeyPatch, surface: str
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{TEXT}\n"))
    CHATS[surface](model)
    assert asked == [expected(model, is_chat=True)]


@pytest.mark.parametrize("surface", TEXTS)
def test_a_text_in_this_process(model: Path, asked: list[Asked], surface: str) -> None:
    TEXTS[surface](model)
    assert asked == [expected(model, is_chat=False)]


OTHERS: Mapping[str, tuple[Any, dict[str, Any]]] = {
    "responses": (ResponsesRequest, {"input": TEXT}),
    "messages": (MessagesRequest, {"messages": MESSAGES, "max_tokens": 7}),
    "ollama's chat": (OllamaChatRequest, {"messages": MESSAGES}),
    "ollama's generate": (GenerateRequest, {"prompt": TEXT}),
}


class Inputs(HTMLParser):
    """What the fields of the playground say before anyone touches them, by id; None where they are empty."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.values: dict[str, str | None] = {}
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = dict(attributes)
        if tag == "input":
            self.values[str(found["id"])] = found.get("value")


def of_playground() -> dict[str, Any]:
    """What it sends besides its conversation: fields that are empty are left out (tests/server/playground)."""
    page = (Path(specserve.server.__file__).parent / "static/playground.html").read_text("utf-8")
    values = Inputs(page).values
    names = {"max-tokens": "max_tokens", "temperature": "temperature"}
    return {sent: json.loads(value) for name, sent in names.items() if (value := values[name]) is not None}


@pytest.mark.parametrize("api", [*OTHERS, "chat completions", "playground"])
def test_a_conversation_over_http(model: Path, api: str) -> None:
    limits = Limits(vocab_size=1000, max_model_len=64, sampling=tuple(stated_by("auto", model).items()))
    if api in OTHERS:
        kind, fields = OTHERS[api]
        body = read_translated(kind, json.dumps(fields).encode(), limits).as_chat(limits)
    else:
        fields = {"messages": MESSAGES, **(of_playground() if api == "playground" else {})}
        body = read(ChatCompletionRequest, json.dumps(fields).encode(), limits)
    params, ids = expected(model, is_chat=True)
    params = replace(params, max_tokens=7) if api == "messages" else params  # which this API wants
    assert body.sampling_params == params
    assert Tokenizer(model).chat_ids(body.conversation(), **body.template_options())[1] == ids


def test_a_text_over_http(model: Path) -> None:
    limits = Limits(vocab_size=1000, max_model_len=64, sampling=tuple(stated_by("auto", model).items()))
    body = read(CompletionRequest, json.dumps({"prompt": TEXT}).encode(), limits)
    params, ids = expected(model, is_chat=False)
    assert (body.sampling_params, Tokenizer(model).encode(str(body.prompt[0]))) == (params, ids)


def test_what_is_given_takes_the_place_of_a_default_everywhere(model: Path, asked: list[Asked]) -> None:
    params, _ = expected(model, is_chat=True)
    limits = Limits(vocab_size=1000, max_model_len=64, sampling=tuple(stated_by("auto", model).items()))
    given: tuple[tuple[str, Any], ...] = (("temperature", 0.0), ("top_p", 0.5), ("max_tokens", 3))
    with LLM(str(model), **SIZE) as llm:
        for name, value in given:
            of_command("run", str(model), TEXT, f"--{name.replace('_', '-')}", str(value))
            here = asked.pop()[0]
            body = read(ChatCompletionRequest, json.dumps({"messages": MESSAGES, name: value}).encode(), limits)
            assert here == body.sampling_params == llm.sampling_params(**{name: value})
            whole = SamplingParams(max_tokens=None) if value == 0.0 else params  # greedy is greedy
            assert here == replace(whole, **{name: value})


@pytest.mark.parametrize("source", ["none", "vllm"])
def test_the_model_may_be_left_out_of_it(model: Path, asked: list[Asked], source: str) -> None:
    of_command("run", str(model), TEXT, "--generation-config", source)
    assert asked.pop()[0] == SamplingParams(max_tokens=None)
    with LLM(str(model), generation_config=source, **SIZE) as llm:
        assert llm.sampling_params() == SamplingParams(max_tokens=None)
        assert llm.sampling_params(chat=False) == SamplingParams()
        with pytest.raises(InputError, match="temperature"):
            llm.sampling_params(temperature=-1)


def test_params_that_are_given_are_whole(model: Path, asked: list[Asked]) -> None:
    """As in vLLM: what SamplingParams do not say, they say by their own defaults."""
    with LLM(str(model), **SIZE) as llm:
        llm.chat([MESSAGES, MESSAGES], [SamplingParams(max_tokens=2), SamplingParams(max_tokens=3)])
    assert [params for params, _ in asked] == [SamplingParams(max_tokens=2), SamplingParams(max_tokens=3)]


def test_a_file_that_is_named_is_read_before_a_model_is(tmp_path: Path) -> None:
    for kind in (LLM, AsyncLLM):
        with pytest.raises(ConfigError, match="nowhere"):
            kind("no such model", generation_config=str(tmp_path / "nowhere"))
    check_named("auto")
    assert sampling_params({"n": 2}, {"top_k": 4}, is_chat=True) == SamplingParams(n=2, top_k=4, max_tokens=None)
