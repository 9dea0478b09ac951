"""`specserve dynamo` with Dynamo itself: its runtime, its frontend, and what they ask of an engine."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from specserve.cli.dynamo import sampling_params, token_ids
from specserve.cli.main import run
from specserve.errors import InputError
from specserve.llm import LLM
from specserve.structured.spec import Structured
from specserve.testing import write_tiny_model
from specserve.types import SamplingParams

START_S = 60.0
OPTIONS: dict[str, Any] = {"threads": 1, "max_num_seqs": 4, "kv_cache_gib": 0.02, "max_model_len": 1024}
GREEDY = SamplingParams(temperature=0, max_tokens=24)
PROMPT = "Hello there"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("dynamo") / "model", "llama")


@pytest.fixture(scope="module")
def expected(model: Path) -> Any:
    """The answer to PROMPT."""
    with LLM(str(model), **OPTIONS, drafter="none") as llm:
        (found,) = llm.generate([PROMPT], GREEDY)
    return found


def test_what_a_request_asks_for_becomes_parameters() -> None:
    found = sampling_params(
        {
            "sampling_options": {"temperature": 0.5, "top_k": -1, "seed": 7, "n": 2, "top_p": None, "best_of": None},
            "stop_conditions": {"max_tokens": 9, "stop_token_ids_hidden": [2, 1], "stop_token_ids": [3], "stop": ["a"]},
            "output_options": {"logprobs": 2, "prompt_logprobs": None},
        }
    )
    assert found == SamplingParams(
        temperature=0.5, top_k=-1, seed=7, n=2, max_tokens=9, stop_token_ids=[1, 2, 3], logprobs=2
    )
    assert sampling_params({}) == SamplingParams(max_tokens=None)


@pytest.mark.parametrize(
    ("guided", "structured"),
    [
        ({"json": {"type": "object"}}, Structured.json({"type": "object"})),
        ({"regex": "a+", "backend": "xgrammar", "choice": None}, Structured.regex("a+")),
        ({"choice": ["a", "b"]}, Structured.choice(["a", "b"])),
        ({"grammar": 'start: "a"'}, Structured.grammar('start: "a"')),
    ],
)
def test_constraints_are_ours(guided: dict[str, Any], structured: Structured) -> None:
    assert sampling_params({"sampling_options": {"guided_decoding": guided}}).structured == structured


@pytest.mark.parametrize(
    ("request_", "name"),
    [
        ({"multi_modal_data": {"image_url": []}}, "multi_modal_data"),
        ({"prefill_result": {"disaggregated_params": {}}}, "prefill_result"),
        ({"sampling_options": {"use_beam_search": True}}, "use_beam_search"),
        ({"output_options": {"prompt_logprobs": 1}}, "prompt_logprobs"),
        ({"sampling_options": {"guided_decoding": {"json": {}, "regex": "a"}}}, "guided_decoding"),
        ({"sampling_options": {"guided_decoding": {"structural_tag": "{}"}}}, "guided_decoding"),
        ({"sampling_options": {"temperature": -1}}, "temperature"),
    ],
)
def test_what_cannot_be_done_is_refused(request_: dict[str, Any], name: str) -> None:
    with pytest.raises(InputError, match=name):
        sampling_params(request_)


def test_token_ids_may_be_packed() -> None:
    ids = [0, 1, 70_000]
    assert token_ids(ids) == ids
    assert token_ids(b"".join(token.to_bytes(4, "little") for token in ids)) == ids


# --- with Dynamo ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def backend() -> Any:
    if importlib.util.find_spec("dynamo") is None and not os.environ.get("SPECSERVE_REQUIRE_DYNAMO"):
        pytest.skip("NVIDIA Dynamo is not installed: make dynamo")
    from specserve.cli.dynamo import engine_class

    return engine_class()


def arguments(model: Path) -> list[str]:
    return [str(model), *(f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items())]


@asynccontextmanager
async def started(backend: Any, model: Path) -> AsyncIterator[tuple[Any, Any]]:
    """An engine that Dynamo's arguments made, and what it registers with."""
    engine, _ = await backend.from_args([*arguments(model), "--served-model-name=tiny"])
    try:
        yield engine, await engine.start(7)
    finally:
        await engine.cleanup()
        await engine.cleanup()  # a second call is none


def a_request(expected: Any, **stop: Any) -> dict[str, Any]:
    return {
        "token_ids": expected.prompt_token_ids,
        "sampling_options": {"temperature": 0},
        "stop_conditions": {"max_tokens": 24, **stop},
    }


def tokens_of(chunks: list[dict[str, Any]]) -> list[int]:
    return [token for chunk in chunks for token in chunk["token_ids"]]


def test_an_engine_is_what_dynamo_wants(backend: Any, model: Path, expected: Any) -> None:
    from dynamo._core import Context
    from dynamo.common.backend import LLMEngine

    async def live() -> None:
        async with started(backend, model) as (engine, registered):
            assert isinstance(engine, LLMEngine)
            assert (registered.model, registered.served_model_name) == (str(model), "tiny")
            assert (registered.llm.context_length, registered.llm.max_num_seqs) == (1024, 4)
            assert registered.llm.total_kv_blocks * registered.llm.kv_cache_block_size >= 1024
            chunks = [chunk async for chunk in engine.generate(a_request(expected), Context("a"))]
            assert tokens_of(chunks) == expected.outputs[0].token_ids
            assert [chunk["finish_reason"] for chunk in chunks if "finish_reason" in chunk] == ["length"]
            counts = chunks[-1]["completion_usage"]
            assert counts["total_tokens"] == len(expected.prompt_token_ids) + 24
            assert await engine.is_quiescent()

    asyncio.run(live())


def test_a_request_that_is_aborted_ends_at_once(backend: Any, model: Path, expected: Any) -> None:
    from dynamo._core import Context

    async def live() -> None:
        async with started(backend, model) as (engine, _):
            context, chunks = Context("a"), []
            async for chunk in engine.generate(a_request(expected, max_tokens=900, ignore_eos=True), context):
                chunks.append(chunk)
                if len(chunks) == 3:
                    assert not await engine.is_quiescent()
                    await engine.abort(context)
            assert chunks[-1]["finish_reason"] == "cancelled"
            assert len(chunks) == 4
            assert await engine.is_quiescent()
            await engine.abort(context)  # of one that has ended
            again = [chunk async for chunk in engine.generate(a_request(expected), Context("b"))]
            assert tokens_of(again) == expected.outputs[0].token_ids

    asyncio.run(live())


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        port: int = found.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def frontend(backend: Any, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of Dynamo's frontend, which has found a worker."""
    folder, port = tmp_path_factory.mktemp("found"), free_port()
    where = ["--discovery-backend=file", "--event-plane=zmq"]
    words = [
        ["specserve", "dynamo", *arguments(model), "--served-model-name=tiny", *where],
        ["dynamo.frontend", *where, f"--http-port={port}", "--http-host=127.0.0.1"],
    ]
    log = (folder / "log").open("w")
    environment = {**os.environ, "DYN_FILE_KV": str(folder / "kv"), "DYN_LOG": "warn"}
    running = [
        subprocess.Popen([sys.executable, "-m", *each], stdout=log, stderr=log, env=environment) for each in words
    ]
    try:
        end = time.monotonic() + START_S
        while "tiny" not in _models(port):
            assert all(each.poll() is None for each in running), (folder / "log").read_text()
            assert time.monotonic() < end, (folder / "log").read_text()
            time.sleep(0.2)
        yield port
        running[0].terminate()
        assert running[0].wait(START_S) == 0, (folder / "log").read_text()
    finally:
        for each in running:
            each.kill()
            each.wait()
        log.close()


def _models(port: int) -> list[str]:
    try:
        return [each["id"] for each in asked(port, "GET", "/v1/models")[1]["data"]]
    except OSError:
        return []


def asked(port: int, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(method, path, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


def completion(port: int, **fields: Any) -> tuple[int, Any]:
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 24, "temperature": 0, **fields}
    return asked(port, "POST", "/v1/completions", body)


def test_its_frontend_gives_the_same_answers(frontend: int, expected: Any) -> None:
    status, found = completion(frontend)
    assert (status, found["choices"][0]["text"]) == (200, expected.outputs[0].text)
    assert found["usage"]["completion_tokens"] == 24
    seeded = {"temperature": 1, "seed": 3, "logprobs": 1}
    _, first = completion(frontend, **seeded)
    assert completion(frontend, **seeded)[1]["choices"] == first["choices"]
    assert first["choices"][0]["text"] != found["choices"][0]["text"]
    assert all(value <= 0 for value in first["choices"][0]["logprobs"]["token_logprobs"])
    _, several = completion(frontend, n=2, **seeded)
    assert [each["index"] for each in several["choices"]] == [0, 1]


def test_its_frontend_is_told_what_is_refused(frontend: int) -> None:
    assert completion(frontend, prompt=[5] * 2000)[0] == 400
    assert completion(frontend)[0] == 200


@pytest.mark.skipif(importlib.util.find_spec("dynamo") is not None, reason="it is installed here")
def test_without_dynamo_the_command_says_what_to_install(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    assert run(["dynamo", str(model)]) == 2
    assert "pip install ai-dynamo" in capsys.readouterr().err
