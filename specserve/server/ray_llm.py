"""specserve in the place of vLLM in Ray Serve LLM: LLMConfig(server_cls="specserve.server.ray_llm:SpecserveServer").

A replica runs a server of its own on a Unix socket, the one that `specserve serve` runs, and hands it what Ray's
ingress sends:

    python -m specserve.server.ray_llm PARENT FOLDER

It reads a Plan from standard input, listens in FOLDER, leaves there why it failed, and ends with the process PARENT.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from specserve.config import EngineConfig
from specserve.errors import ConfigError, EngineError, SpecserveError, unknown
from specserve.machine.cores import default_threads
from specserve.machine.lifeline import end_with, without_interrupts
from specserve.server.engine.spawn import EngineSpawner
from specserve.server.options import ServeOptions

_LOOK_S = 0.1  # between two looks whether a server that starts is ready
_END_S = 5.0  # that it has to end after it was told to
_FOLDERS, _SOCKET, _CAUSE = "specserve-ray-", "socket", "cause"  # how FOLDERs begin, and files of each
_ABANDONED_S = 60.0  # in which a socket is listened to, if ever
_PROFILE = "`specserve bench profile` measures an engine outside of Ray."
_STREAMS = "stream_batching_interval_ms"

# Options that LLMConfig has another place for, and what belongs to adapters and other hosts.
_ELSEWHERE = frozenset(("model", "lora", "max_loras", "max_lora_rank", "ranks_listen", "ranks_secret_file"))
_OF_ENGINE = frozenset(entry.name for entry in fields(EngineConfig)) - _ELSEWHERE
_OF_SERVER = frozenset(
    (
        *("max_queue", "max_body_mib", "max_tokenize_characters", "scheduling_policy", "share_drafts"),
        *("queue_timeout_s", "request_timeout_s", "start_timeout_s", "stall_timeout_s", "status_interval_s"),
        *("reasoning_format", "generation_config", "chat_template", "default_chat_template_kwargs"),
    )
)


class UnsupportedError(SpecserveError):
    """What other engines of Ray Serve LLM can do. Ray's ingress answers with `status_code`."""

    status_code = 501


class Plan(msgspec.Struct, frozen=True):
    """What a server is told: EngineConfig's fields, and ServeOptions' as JSON has them."""

    engine: dict[str, Any]
    options: dict[str, Any]

    def serve_options(self, folder: Path) -> ServeOptions:
        """On a socket in `folder`, whose owner alone may connect. Raises ConfigError."""
        template = self.options.get("chat_template")
        paths = {"uds": folder / _SOCKET, "chat_template": None if template is None else Path(template)}
        names = tuple(self.options["served_model_name"])
        return ServeOptions(**{**self.options, **paths, "served_model_name": names, "admin": True})


def plan_of(config: Any) -> Plan:
    """What an LLMConfig asks for. Raises ConfigError for what cannot be done, and for options that there are not."""
    _check(config)
    told = config.engine_kwargs
    for name in told:
        if name not in _OF_ENGINE | _OF_SERVER:
            raise ConfigError("engine_kwargs: " + unknown("option", name, _OF_ENGINE | _OF_SERVER))
    loading = config.model_loading_config
    own = {name: value for name, value in told.items() if name in _OF_ENGINE}
    engine = EngineConfig(**own, model=loading.model_source or loading.model_id)
    options = {name: value for name, value in told.items() if name in _OF_SERVER}
    if options.get("chat_template") is not None:
        options["chat_template"] = os.fspath(options["chat_template"])
    values = {entry.name: getattr(engine, entry.name) for entry in fields(EngineConfig)}
    plan = Plan(values, {**options, "served_model_name": [loading.model_id]})
    plan.serve_options(Path("/"))
    return plan


def _check(config: Any) -> None:
    """Raises ConfigError for fields of an LLMConfig that mean nothing here."""
    from ray.llm._internal.serve.constants import RAY_SERVE_LLM_ENABLE_DIRECT_STREAMING
    from ray.llm._internal.serve.routing_policies.kv_aware.kv_aware_router import is_kv_aware

    loading, given = config.model_loading_config, config.model_fields_set
    source = loading.model_source
    if source is not None and (not isinstance(source, str) or "://" in source):
        raise ConfigError(
            f"model_loading_config: model_source is {source!r}; it must be a folder that each node has, a hub id or a "
            "name of the catalog. Fetch the model onto the nodes first."
        )
    if getattr(config.accelerator_config, "kind", None) == "tpu":
        raise ConfigError("accelerator_config is of kind tpu; specserve runs on CPUs and on NVIDIA's GPUs.")
    refused = {
        "model_loading_config.tokenizer_source": (loading.tokenizer_source, "The tokenizer is the model's."),
        "lora_config": (config.lora_config, "Adapters that Ray loads are not supported: merge one into the model."),
        "placement_group_config": (
            config.placement_group_config,
            "All processes of a replica run on its node: give deployment_config num_cpus and num_gpus in "
            "ray_actor_options.",
        ),
        "callback_config": ("callback_config" in given, "Callbacks are for what Ray itself loads."),
        "log_engine_metrics": (
            "log_engine_metrics" in given and config.log_engine_metrics,
            "Ray does not have this engine's metrics.",
        ),
        "KVAwareRouter": (is_kv_aware(config), "It needs vLLM's events. Take PrefixCacheAffinityRouter."),
        "RAY_SERVE_LLM_ENABLE_DIRECT_STREAMING": (
            RAY_SERVE_LLM_ENABLE_DIRECT_STREAMING,
            "It needs an application inside the replica. Unset it.",
        ),
    }
    for name, (value, words) in refused.items():
        if value:
            raise ConfigError(f"{name} is not for specserve. {words}")
    for name in config.experimental_configs:
        if name not in (_STREAMS, "num_ingress_replicas"):
            raise ConfigError("experimental_configs: " + unknown("key", name, (_STREAMS, "num_ingress_replicas")))


def placed(config: Any) -> dict[str, Any]:
    """Options of a replica's actor: a CPU for each thread of each process that shares a step, and a GPU for each that
    uses one; stages share them. Where nothing is said of threads they divide the CPUs that are asked for, else the
    cores of this machine. What was decided is added to the engine_kwargs, for a replica is made on another machine.
    Raises ConfigError."""
    engine = EngineConfig(**plan_of(config).engine)
    actor = dict(config.deployment_config.get("ray_actor_options") or {})
    num_ranks = engine.tensor_parallel_size
    threads = engine.threads or max(1, int(actor.get("num_cpus") or default_threads()) // num_ranks)
    wants_gpu = engine.device == "auto" and (config.accelerator_type or actor.get("num_gpus"))
    device = "cuda" if wants_gpu or engine.device.startswith("cuda") else "cpu"  # Ray chooses which
    actor.setdefault("num_cpus", threads * num_ranks)
    if device == "cuda":
        actor.setdefault("num_gpus", num_ranks)
    if config.accelerator_type:
        actor.setdefault("accelerator_type", config.accelerator_type)
    config.update_engine_kwargs(threads=threads, device=device)
    return actor


def remove_abandoned() -> None:
    """Folders of servers that nobody listens in any more: where a replica is killed, Ray kills its server with it."""
    for path in Path(tempfile.gettempdir()).glob(f"{_FOLDERS}*/{_SOCKET}"):
        with suppress(OSError), socket.socket(socket.AF_UNIX) as probe:  # another user's stay
            probe.setblocking(False)
            if time.time() - path.stat().st_mtime < _ABANDONED_S:
                continue
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                shutil.rmtree(path.parent)


def _refused(name: str, words: str) -> Callable[..., Awaitable[None]]:
    async def method(self: SpecserveServer, *_: Any, **__: Any) -> None:
        raise UnsupportedError(f"{name}: specserve does not do that. {words}")

    return method


class SpecserveServer:
    """A deployment's replica, with the methods of Ray's LLMServerProtocol. What it yields is of Ray's own classes,
    which are vLLM's: the ingress knows answers by them."""

    sleep = _refused("sleep", "Set the deployment's replicas to 0 to free its memory.")
    wakeup = _refused("wakeup", "It never sleeps.")
    pause = _refused("pause", "Hold requests back where they come from.")
    resume = _refused("resume", "It is never paused.")
    start_profile = _refused("start_profile", _PROFILE)
    stop_profile = _refused("stop_profile", _PROFILE)
    collective_rpc = _refused("collective_rpc", "Its processes take no calls.")

    async def __init__(self, llm_config: Any) -> None:  # type: ignore[misc]
        """Ray awaits it, and then the replica takes requests. Raises ConfigError for an LLMConfig that cannot be
        obeyed, EngineError with the cause where there is no engine."""
        self._process: subprocess.Popen[bytes] | None = None
        self._config = llm_config
        plan = plan_of(llm_config)
        remove_abandoned()
        self._folder = Path(tempfile.mkdtemp(prefix=_FOLDERS))  # its owner's alone; a socket's path must be short
        self._session = aiohttp.ClientSession(
            "http://localhost",
            connector=aiohttp.UnixConnector(str(self._folder / _SOCKET), limit=0),
            timeout=aiohttp.ClientTimeout(total=None),  # the server has its own
        )
        try:
            await self._start(plan)
        except BaseException:
            self._end()  # Ray ends the process without a word to this
            raise

    @classmethod
    def get_deployment_options(cls, llm_config: Any) -> dict[str, Any]:
        """What `deployment_config` says, and where a replica can run. Raises ConfigError."""
        import ray

        actor = placed(llm_config)
        environments = (
            ray.get_runtime_context().runtime_env,
            actor.get("runtime_env"),
            llm_config.runtime_env,
        )
        actor["runtime_env"] = {name: value for each in environments for name, value in (each or {}).items()}
        return {**llm_config.deployment_config, "ray_actor_options": actor}

    async def chat(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        """A ChatCompletionResponse, or lists of events as text, or an ErrorResponse; so do the others, with theirs."""
        return self._streamed("/v1/chat/completions", "ChatCompletionResponse", request, raw_request_info)

    async def completions(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        return self._streamed("/v1/completions", "CompletionResponse", request, raw_request_info)

    async def embeddings(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        return self._answer("/v1/embeddings", "EmbeddingResponse", request, raw_request_info)

    async def tokenize(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        return self._answer("/tokenize", "TokenizeResponse", request, raw_request_info)

    async def detokenize(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        return self._answer("/detokenize", "DetokenizeResponse", request, raw_request_info)

    async def score(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        return _only(
            error_response(UnsupportedError.status_code, {"message": "specserve serves no models that score."})
        )

    async def transcriptions(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        return _only(error_response(UnsupportedError.status_code, {"message": "specserve reads no audio."}))

    async def check_health(self) -> None:
        """Raises EngineError while the engine cannot take requests: where it was lost another one is started, and after
        three such answers Ray replaces the replica."""
        self._check_process()
        try:
            async with self._session.get("/health") as response:
                if response.status != 200:
                    raise EngineError(
                        f"The engine takes no requests; its state is {(await response.json())['status']}."
                    )
        except aiohttp.ClientError as error:
            raise EngineError(f"The replica's server does not answer: {error}.") from error

    async def reset_prefix_cache(self) -> None:
        """Forget the KV of all prompts. Raises EngineError where there is no engine."""
        async with self._session.post("/reset_prefix_cache", json={}) as response:
            if response.status != 200:
                raise EngineError((await response.json())["error"]["message"])

    async def is_sleeping(self) -> bool:
        return False

    async def is_paused(self) -> bool:
        return False

    async def llm_config(self) -> Any:
        return self._config

    def __del__(self) -> None:
        """Ray calls it at the end of a replica whose requests have ended."""
        self._end()

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _start(self, plan: Plan) -> None:
        command = [sys.executable, "-m", "specserve.server.ray_llm", str(os.getpid()), str(self._folder)]
        with without_interrupts():
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE)
        assert self._process.stdin is not None, "it is a pipe"
        with suppress(BrokenPipeError), self._process.stdin as told:  # it has ended, and is asked why below
            told.write(msgspec.json.encode(plan))
        while True:
            try:
                await self.check_health()
                return
            except EngineError:
                self._check_process()
                await asyncio.sleep(_LOOK_S)

    def _check_process(self) -> None:
        """Raises EngineError with the cause once the server has ended."""
        assert self._process is not None, "it was started"
        if (status := self._process.poll()) is not None:
            cause = self._folder / _CAUSE
            said = cause.read_text("utf-8") if cause.exists() else f"Its status is {status}."
            raise EngineError(f"The replica's server has ended. {said}")

    def _streamed(self, path: str, kind: str, request: Any, info: Any) -> AsyncGenerator[Any, None]:
        from ray.llm._internal.serve.constants import MODEL_RESPONSE_BATCH_TIMEOUT_MS
        from ray.llm._internal.serve.utils.batcher import Batcher

        found = self._answer(path, kind, request, info)
        if not request.stream:
            return found
        interval = self._config.experimental_configs.get(_STREAMS)
        batched: AsyncGenerator[Any, None] = Batcher(
            found, interval_ms=MODEL_RESPONSE_BATCH_TIMEOUT_MS if interval is None else interval
        ).stream()
        return batched

    async def _answer(self, path: str, kind: str, request: Any, info: Any) -> AsyncGenerator[Any, None]:
        """Whoever stops listening closes the connection, and with it ends the request."""
        from ray.llm._internal.serve.core.configs import openai_api_models

        has_begun = False
        try:
            async with self._session.post(path, json=body_of(request), headers=_headers(info)) as response:
                if response.status != 200:
                    yield error_response(response.status, (await response.json())["error"])
                elif response.content_type == "text/event-stream":
                    async for text in _events(response.content):
                        has_begun = True
                        yield text
                else:
                    yield getattr(openai_api_models, kind).model_validate_json(await response.read())
        except aiohttp.ClientError as error:
            failure = {"message": f"The replica's server was lost: {error}. Send the request again."}
            lost = error_response(503, {**failure, "type": "service_unavailable"})
            yield f"data: {lost.model_dump_json()}\n\n" if has_begun else lost


def body_of(request: Any) -> dict[str, Any]:
    """What the client has sent, without vLLM's defaults, which are not ours."""
    found: dict[str, Any] = request.model_dump(mode="json", by_alias=True, exclude_unset=True)
    return found


def error_response(status: int, error: Mapping[str, Any]) -> Any:
    """Ray's own of an error object as OpenAI has it. The ingress answers with its code."""
    from ray.llm._internal.serve.core.configs.openai_api_models import ErrorInfo, ErrorResponse

    kind = error.get("type") or "invalid_request_error"
    return ErrorResponse(error=ErrorInfo(message=error["message"], type=kind, param=error.get("param"), code=status))


def _headers(info: Any) -> dict[str, str]:
    """The request's id, for the server's log."""
    sent = {name.lower(): value for name, value in (info.headers if info else {}).items()}
    return {"X-Request-Id": sent["x-request-id"]} if "x-request-id" in sent else {}


async def _events(stream: aiohttp.StreamReader) -> AsyncGenerator[str, None]:
    """Whole events; a piece of the stream may end within a character."""
    rest = b""
    async for piece in stream.iter_any():
        whole, end, rest = (rest + piece).rpartition(b"\n\n")
        if end:
            yield (whole + end).decode()


async def _only(answer: Any) -> AsyncGenerator[Any, None]:
    yield answer


def main(parent: int, folder: Path) -> None:
    """The server of a replica."""
    begun = time.perf_counter()
    end_with(parent)
    plan = msgspec.json.decode(sys.stdin.buffer.read(), type=Plan)
    with EngineSpawner() as spawner:
        spawner.prepare()  # before the imports below, which take as long as its own
        from specserve.server.http.run import serve
        from specserve.server.logs import configure

        configure("text", "info")
        try:
            serve(plan.engine, plan.serve_options(folder), begun, spawner)
        except SpecserveError as error:
            (folder / _CAUSE).write_text(str(error), "utf-8")
            sys.exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
