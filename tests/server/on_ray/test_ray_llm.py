"""specserve as an engine of Ray Serve LLM: what its ingress answers, what ends when clients leave or processes die."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any

import pytest

from specserve.llm import LLM
from specserve.server import ray_llm
from specserve.testing import write_tiny_model
from specserve.types import SamplingParams
from tests.processes import is_alive

pytestmark = [pytest.mark.ray, pytest.mark.timeout(500)]

APP = Path(__file__).with_name("llm_app.py")
SERVER, ENGINE = "specserve.server.ray_llm", "specserve.server.engine.process"
OPTIONS: dict[str, Any] = {"threads": 1, "max_num_seqs": 4, "kv_cache_gib": 0.05, "max_model_len": 2048}
PROMPT = "Hello there"
GREEDY: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
LONG: dict[str, Any] = {**GREEDY, "max_tokens": 2000, "stream": True}
HEALTH_S = 5  # between two of Ray's looks; three that find no engine, and it replaces the replica
BACK_S = 150.0  # vLLM's classes alone take a replica half a minute to import


class App:
    """What was deployed. `port` is that of Ray's proxy."""

    def __init__(self, cluster: Any) -> None:
        self.cluster = cluster
        with socket.create_server(("127.0.0.1", 0)) as found:
            self.port = found.getsockname()[1]
        command = [sys.executable, str(APP), cluster.address, str(self.port)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, **order: Any) -> dict[str, Any]:
        """{"is": value} or {"error": text}."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        found: dict[str, Any] = json.loads(self.process.stdout.readline())
        return found

    def close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(60)
        self.process.stdout.close()

    def send(self, path: str, body: dict[str, Any]) -> tuple[HTTPConnection, HTTPResponse]:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=120)
        data = json.dumps({"model": "tiny", **body}).encode()
        connection.request("POST", path, data, {"Content-Type": "application/json"})
        return connection, connection.getresponse()

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, str]:
        connection, response = self.send(path, body)
        with connection.sock or response:
            return response.status, response.read().decode()

    def completed(self) -> str:
        """The text that GREEDY gets; "" where it gets none."""
        try:
            status, text = self.post("/v1/completions", GREEDY)
        except OSError:
            return ""
        found: str = json.loads(text)["choices"][0]["text"] if status == 200 else ""
        return found

    def pid(self, module: str) -> int:
        """The one process of a replica that runs this module."""
        (found,) = self.cluster.processes("head", module)
        pid: int = found
        return pid

    def replica(self) -> tuple[int, Path]:
        """Its process, and where its server listens."""
        *_, pid, folder, _ = Path(f"/proc/{self.pid(SERVER)}/cmdline").read_text("utf-8").split("\0")
        return int(pid), Path(folder)

    def metric(self, name: str) -> float:
        """Of the replica's server, which Ray's proxy does not show."""
        connection = HTTPConnection("localhost")
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.connect(str(self.replica()[1] / "socket"))
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().decode().splitlines()
        connection.close()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("ray-llm") / "model", "llama")


@pytest.fixture(scope="module")
def config(model: Path) -> dict[str, Any]:
    return {
        "model_loading_config": {"model_id": "tiny", "model_source": str(model)},
        "engine_kwargs": OPTIONS,
        "deployment_config": {"health_check_period_s": HEALTH_S},
    }


@pytest.fixture(scope="module")
def app(llm_cluster: Any, config: dict[str, Any]) -> Iterator[App]:
    made = App(llm_cluster)
    try:
        assert made.ask(deploy=config) == {"is": None}
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def expected(model: Path) -> str:
    with LLM(str(model), **OPTIONS, drafter="none") as llm:
        params = SamplingParams(**{name: value for name, value in GREEDY.items() if name != "prompt"})
        (found,) = llm.generate([PROMPT], params)
    return found.outputs[0].text


def wait_for(condition: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never was so"
        time.sleep(0.05)


def events(text: str) -> list[Any]:
    data = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    assert data.pop() == "[DONE]"
    return [json.loads(each) for each in data]


def test_answers_are_those_of_an_engine_here(app: App, expected: str) -> None:
    status, text = app.post("/v1/completions", {**GREEDY, "speculative": {"drafter": "ngram"}})
    found = json.loads(text)
    assert status == 200 and found["choices"][0]["text"] == expected
    assert found["model"] == "tiny" and found["usage"]["completion_tokens"] == 24
    assert found["metrics"]["speculative_decoding"]["mean_acceptance_length"] >= 1, "fields of ours come back"


def test_streams_have_the_same_text(app: App, expected: str) -> None:
    status, text = app.post("/v1/completions", {**GREEDY, "stream": True, "stream_options": {"include_usage": True}})
    *chunks, last = events(text)
    assert status == 200 and last["usage"]["completion_tokens"] == 24
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == expected


def test_conversations_and_their_constraints(app: App) -> None:
    schema = {"enum": [{"a": True}, {"a": False}]}
    body = {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi."}]}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}},
        "temperature": 0,
        "max_tokens": 64,
    }
    status, text = app.post("/v1/chat/completions", body)
    assert status == 200, text
    whole = json.loads(text)["choices"][0]["message"]["content"]
    assert set(json.loads(whole)) == {"a"}
    status, text = app.post("/v1/chat/completions", {**body, "stream": True})
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events(text)) == whole


def test_tokens_and_texts(app: App) -> None:
    status, text = app.post("/tokenize", {"prompt": PROMPT})
    found = json.loads(text)
    assert status == 200 and found["count"] == len(found["tokens"]) and found["max_model_len"] == 2048
    status, text = app.post("/detokenize", {"tokens": found["tokens"]})
    assert status == 200 and json.loads(text)["prompt"] == PROMPT


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/v1/completions", {**GREEDY, "max_tokens": -3}, 400, "max_tokens is -3; it must be at least 0."),
        ("/v1/completions", {**GREEDY, "speculative": {"drafter": "no"}}, 400, "Unknown drafter 'no'."),
        ("/v1/score", {"text_1": "a", "text_2": "b"}, 501, "specserve serves no models that score."),
        ("/v1/embeddings", {"input": "a"}, 400, "This server gives no embeddings"),
    ],
)
def test_errors_have_their_status_and_say_what_is_wrong(
    app: App, path: str, body: dict[str, Any], status: int, words: str, stream: bool
) -> None:
    found, text = app.post(path, {**body, "stream": stream})
    assert found == status and words in json.loads(text)["error"]["message"]


@pytest.mark.parametrize(
    ("method", "words"),
    [("sleep", "sleep: specserve does not do that"), ("collective_rpc", "collective_rpc: specserve does not do that")],
)
def test_what_it_does_not_do_is_refused(app: App, method: str, words: str) -> None:
    assert words in app.ask(call=method)["error"]


def test_what_ray_asks(app: App) -> None:
    assert app.ask(call="is_sleeping") == app.ask(call="is_paused") == {"is": False}
    assert app.ask(call="check_health") == app.ask(call="reset_prefix_cache") == {"is": None}
    assert app.ask(call="llm_config") == {"is": "tiny"}


def test_whoever_leaves_ends_the_request(app: App) -> None:
    aborted = 'specserve:request_success_total{finished_reason="abort"'
    before = app.metric(aborted)
    connection, response = app.send("/v1/completions", LONG)
    assert response.readline().startswith(b"data: ")
    response.close()
    connection.close()
    wait_for(lambda: app.metric(aborted) == before + 1, 10)


def test_an_engine_that_is_lost_is_told_of_and_comes_back(app: App, expected: str) -> None:
    server, engine = app.pid(SERVER), app.pid(ENGINE)
    connection, response = app.send("/v1/completions", LONG)
    assert response.readline().startswith(b"data: ")
    os.kill(engine, signal.SIGKILL)
    wait_for(lambda: "takes no requests; its state is restarting" in app.ask(call="check_health").get("error", ""), 5)
    *_, last = events(response.read().decode())
    assert "status -9" in last["error"]["message"]
    connection.close()
    wait_for(lambda: app.completed() == expected, BACK_S)
    assert app.ask(call="check_health") == {"is": None}
    assert app.pid(SERVER) == server, "it has started the next engine itself, before Ray gave it up"


def test_a_replica_whose_server_is_lost_is_replaced(app: App, expected: str) -> None:
    server, engine = app.pid(SERVER), app.pid(ENGINE)
    connection, response = app.send("/v1/completions", LONG)
    assert response.readline().startswith(b"data: ")
    os.kill(server, signal.SIGKILL)
    *_, last = events(response.read().decode())
    assert "The replica's server was lost" in last["error"]["message"]
    connection.close()
    assert "The replica's server has ended. Its status is -9." in app.ask(call="check_health")["error"]
    wait_for(lambda: app.completed() == expected, BACK_S)
    assert not is_alive(engine)


def test_a_replica_that_is_killed_is_replaced(app: App, expected: str) -> None:
    server, (replica, _) = app.pid(SERVER), app.replica()
    os.kill(replica, signal.SIGKILL)
    wait_for(lambda: not is_alive(server), BACK_S)
    wait_for(lambda: app.completed() == expected, BACK_S)


def test_folders_of_servers_that_were_killed_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_llm.tempfile, "gettempdir", lambda: str(tmp_path))
    listened_to, new, abandoned = (tmp_path / f"specserve-ray-{name}" / "socket" for name in ("a", "b", "c"))
    with ExitStack() as stack:
        for path in (listened_to, new, abandoned):
            path.parent.mkdir()
            stack.enter_context(made := socket.socket(socket.AF_UNIX)).bind(str(path))
            if path == listened_to:
                made.listen()
            if path != new:
                os.utime(path, (0, 0))
        ray_llm.remove_abandoned()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["specserve-ray-a", "specserve-ray-b"]


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"engine_kwargs": {"gpu_memory_utilization": 0.9}}, "engine_kwargs: Unknown option 'gpu_memory_utilization'."),
        ({"engine_kwargs": {"max_num_seq": 4}}, "Did you mean 'max_num_seqs'?"),
        ({"engine_kwargs": {"max_num_seqs": 0}}, "max_num_seqs is 0; it must be a whole number of at least 1."),
        ({"engine_kwargs": {"max_queue": -1}}, "max_queue is -1"),
        ({"lora_config": {"max_num_adapters_per_replica": 2}}, "lora_config is not for specserve."),
        ({"placement_group_config": {"bundles": [{"CPU": 1}]}}, "give deployment_config num_cpus"),
        ({"experimental_configs": {"num_ingress": 1}}, "experimental_configs: Unknown key 'num_ingress'."),
        ({"log_engine_metrics": True}, "log_engine_metrics is not for specserve."),
        ({"model_loading_config": {"model_id": "a", "model_source": "s3://b/c"}}, "model_source is 's3://b/c'"),
    ],
)
def test_options_that_there_are_not_are_refused(
    app: App, config: dict[str, Any], changed: dict[str, Any], words: str
) -> None:
    found = app.ask(place={**config, **changed})
    assert found.get("error", "").startswith("ConfigError") and words in found["error"]


@pytest.mark.parametrize(
    ("engine", "actor", "threads", "device", "resources"),
    [
        ({"threads": 3}, {}, 3, "cpu", {"num_cpus": 3}),
        ({"threads": 3, "tensor_parallel_size": 2}, {}, 3, "cpu", {"num_cpus": 6}),
        ({"tensor_parallel_size": 2}, {"num_cpus": 8}, 4, "cpu", {"num_cpus": 8}),
        ({"threads": 1, "device": "cuda"}, {}, 1, "cuda", {"num_cpus": 1, "num_gpus": 1}),
        ({"threads": 1}, {"num_gpus": 1}, 1, "cuda", {"num_cpus": 1, "num_gpus": 1}),
    ],
)
def test_a_replica_has_a_cpu_for_each_thread(
    app: App,
    config: dict[str, Any],
    engine: dict[str, Any],
    actor: dict[str, Any],
    threads: int,
    device: str,
    resources: dict[str, Any],
) -> None:
    told = {**config, "engine_kwargs": engine, "deployment_config": {"ray_actor_options": actor}}
    found = app.ask(place=told)["is"]
    assert found["engine_kwargs"] == {**engine, "threads": threads, "device": device}
    assert {name: found["actor"].get(name) for name in resources} == resources
