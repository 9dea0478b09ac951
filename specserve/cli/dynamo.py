"""`specserve dynamo`: an engine as a worker of NVIDIA Dynamo, whose frontend tokenizes, routes and speaks HTTP."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from specserve.checkpoint import catalog
from specserve.cli.options import Model, NamedEngineOptions, engine_options, help_of, options_type
from specserve.config import DEFAULT_MODEL, EngineConfig
from specserve.errors import ConfigError, EngineError, InputError
from specserve.help import Help
from specserve.structured.spec import Structured
from specserve.types import SamplingParams, TokenLogprobs

# Of Dynamo's sampling options and stop conditions: those that a request has under the same name.
_SAMPLING = (
    *("n", "temperature", "top_k", "top_p", "min_p", "seed", "repetition_penalty"),
    *("presence_penalty", "frequency_penalty"),
)
_STOPPING = ("max_tokens", "min_tokens", "ignore_eos")
_GROUPS = ("sampling_options", "stop_conditions", "output_options")
_GUIDED = {
    "json": Structured.json,
    "regex": Structured.regex,
    "choice": Structured.choice,
    "grammar": Structured.grammar,
}
_REFUSED = ("multi_modal_data", "prefill_result", "bootstrap_info", "encoder_result")
_FINISHED = {"stop": "stop", "length": "length", "abort": "cancelled"}


@dataclass(frozen=True, kw_only=True)
class DynamoOptions:
    """Where a worker registers, under Dynamo's own names."""

    served_model_name: Annotated[str | None, Help("Name of the model in requests [default: the model].")] = None
    namespace: Annotated[str, Help("Namespace of the worker.")] = "dynamo"
    component: Annotated[str, Help("Component of the worker.")] = "backend"
    endpoint: Annotated[str, Help("Endpoint of the worker.")] = "generate"
    endpoint_types: Annotated[str, Help("APIs that the frontend offers for it.")] = "chat,completions"
    discovery_backend: Annotated[str, Help("Where workers are found: etcd, kubernetes, file or mem.")] = "etcd"
    request_plane: Annotated[str, Help("How requests come: tcp or nats.")] = "tcp"
    event_plane: Annotated[str | None, Help("How events go: nats or zmq [default: Dynamo's].")] = None


if TYPE_CHECKING:
    from specserve.async_llm import AsyncLLM
    from specserve.outputs import Chunk

    WorkerOptions = DynamoOptions
else:
    WorkerOptions = options_type(DynamoOptions, "WorkerOptions", help_of(DynamoOptions, "Operation"))

_WORKER, _ENGINE = WorkerOptions(), NamedEngineOptions()


def dynamo(
    model: Model = DEFAULT_MODEL,
    *,
    worker: Annotated[WorkerOptions, Parameter(name="*")] = _WORKER,
    engine: Annotated[NamedEngineOptions, Parameter(name="*")] = _ENGINE,
) -> None:
    """Run an engine as a worker of NVIDIA Dynamo (pip install ai-dynamo), until SIGINT or SIGTERM."""
    made = engine_class()
    from dynamo.common.backend import Worker

    asyncio.run(Worker(*made.configured(model, worker, engine)).run())


def _parsed(
    model: Model = DEFAULT_MODEL,
    *,
    worker: Annotated[WorkerOptions, Parameter(name="*")] = _WORKER,
    engine: Annotated[NamedEngineOptions, Parameter(name="*")] = _ENGINE,
) -> tuple[str, DynamoOptions, EngineConfig]:
    return model, worker, engine


def engine_class() -> Any:
    """Dynamo's LLMEngine as this engine. Raises ConfigError where Dynamo is not installed."""
    try:
        from dynamo.common import backend
    except ImportError as error:
        raise ConfigError(f"NVIDIA Dynamo cannot be imported: {error}. Install it: pip install ai-dynamo.") from error

    class SpecserveEngine(Requests, backend.LLMEngine):  # type: ignore[misc]
        """One engine in this process, on a thread of its own."""

        @classmethod
        async def from_args(cls, argv: list[str] | None = None) -> tuple[Any, Any]:
            """From the options of `specserve dynamo`."""
            app = App(help_format="plaintext", result_action="return_value")
            app.default(_parsed)
            return cls.configured(*app(argv, exit_on_error=False, print_error=False))

        @classmethod
        def configured(cls, model: str, worker: DynamoOptions, engine: EngineConfig) -> tuple[Any, Any]:
            """The engine, not started yet, and where it registers."""
            options = {entry.name: getattr(worker, entry.name) for entry in fields(DynamoOptions)}
            name = worker.served_model_name or model
            options |= {"served_model_name": name, "model_name": model}
            return cls(engine_options(engine, model=model), name), backend.WorkerConfig(**options)

        async def start(self, worker_id: int) -> Any:
            """Load. Raises what an engine's start raises."""
            from specserve.async_llm import AsyncLLM

            folder = str(await asyncio.to_thread(catalog.resolve, self._options["model"], progress=sys.stderr.isatty()))
            llm = await asyncio.to_thread(AsyncLLM, **{**self._options, "model": folder})
            self._llm, config, engine = llm, llm.config, llm.engine
            registration = backend.LlmRegistration(
                context_length=engine.limits.max_model_len,
                kv_cache_block_size=config.block_size,
                total_kv_blocks=engine.cache.num_blocks,
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=config.max_num_batched_tokens,
            )
            return backend.EngineConfig(
                model=str(catalog.resolve(config.model)), served_model_name=self._name, llm=registration
            )

    return SpecserveEngine


class Requests:
    """What Dynamo asks of an engine that has started. What its frontend does itself with tokens is not done here: stop
    texts, text, reasoning, calls of tools."""

    def __init__(self, options: Mapping[str, Any], name: str) -> None:
        self._options, self._name = options, name
        self._llm: AsyncLLM | None = None
        self._stopped: dict[str, asyncio.Event] = {}  # of open requests, by the id of their context

    async def generate(self, request: Mapping[str, Any], context: Any) -> AsyncGenerator[dict[str, Any], None]:
        """Tokens as steps bring them. Raises InputError for what cannot be done, EngineError for what failed."""
        assert self._llm is not None, "it has started"
        prompt_ids = token_ids(request["token_ids"])
        stopped = self._stopped[context.id()] = asyncio.Event()
        num_tokens = 0
        try:
            stream = self._llm.stream({"prompt_token_ids": prompt_ids}, sampling_params(request))
            async for chunk in until(stopped, stream):
                num_tokens += len(chunk.token_ids)
                yield told(chunk, len(prompt_ids), num_tokens)
            if stopped.is_set():
                yield {"token_ids": [], "index": 0, "finish_reason": "cancelled"} | usage(len(prompt_ids), num_tokens)
        finally:
            del self._stopped[context.id()]

    async def abort(self, context: Any) -> None:
        """Nobody waits for this request any more."""
        if (stopped := self._stopped.get(context.id())) is not None:
            stopped.set()

    async def is_quiescent(self) -> bool:
        """Whether there is nothing that `cleanup` would cut off."""
        return not self._stopped

    async def cleanup(self) -> None:
        """End the engine, if there is one."""
        llm, self._llm = self._llm, None
        if llm is not None:
            await llm.close()


async def until(stopped: asyncio.Event, stream: AsyncIterator[Chunk]) -> AsyncGenerator[Chunk, None]:
    """What comes before it is stopped; the request ends with this."""
    stopping = asyncio.ensure_future(stopped.wait())
    coming: asyncio.Future[Chunk] | None = None
    try:
        while True:
            coming = asyncio.ensure_future(anext(stream))
            await asyncio.wait([coming, stopping], return_when=asyncio.FIRST_COMPLETED)
            if stopped.is_set():
                return
            try:
                yield coming.result()
            except StopAsyncIteration:
                return
    finally:
        for task in (stopping, coming):
            if task is not None:
                task.cancel()
        await asyncio.gather(*(task for task in (stopping, coming) if task is not None), return_exceptions=True)
        await stream.aclose()  # type: ignore[attr-defined]


def token_ids(ids: Any) -> list[int]:
    """As a list; Dynamo packs long ones as int32."""
    return memoryview(ids).cast("B").cast("i").tolist() if isinstance(ids, bytes | bytearray | memoryview) else ids


def sampling_params(request: Mapping[str, Any]) -> SamplingParams:
    """What a request asks for. Raises InputError for what cannot be done."""
    for name in _REFUSED:
        if request.get(name):
            raise InputError(f"{name}: this worker reads text alone, and computes prompts itself.", name)
    sampling, stopping, output = (request.get(name) or {} for name in _GROUPS)
    if sampling.get("use_beam_search"):
        raise InputError("use_beam_search: this worker has no way to send beams.", "use_beam_search")
    if output.get("prompt_logprobs") is not None:
        raise InputError("prompt_logprobs: this worker sends those of the answer alone.", "prompt_logprobs")
    named = {name: sampling[name] for name in _SAMPLING if sampling.get(name) is not None}
    named |= {name: stopping[name] for name in _STOPPING if stopping.get(name) is not None}
    ids = {*(stopping.get("stop_token_ids") or ()), *(stopping.get("stop_token_ids_hidden") or ())}
    return SamplingParams(
        **{"max_tokens": None, **named},
        stop_token_ids=sorted(ids),
        logprobs=output.get("logprobs"),
        structured=structured(sampling.get("guided_decoding") or {}),
    )


def structured(guided: Mapping[str, Any]) -> Structured | None:
    """Raises InputError for a constraint of another kind, and for several."""
    given = {name: value for name, value in guided.items() if value is not None and name != "backend"}
    if not given:
        return None
    if len(given) > 1 or not given.keys() <= _GUIDED.keys():
        names = ", ".join(sorted(given))
        raise InputError(f"guided_decoding has {names}; one of {', '.join(_GUIDED)} is taken.", "guided_decoding")
    ((name, value),) = given.items()
    return _GUIDED[name](value)


def told(chunk: Chunk, num_prompt: int, num_tokens: int) -> dict[str, Any]:
    """A step's tokens of a completion as Dynamo wants them. Raises EngineError for one that failed."""
    if chunk.finish_reason == "error":
        raise EngineError(chunk.error or "The completion failed.")
    made: dict[str, Any] = {"token_ids": chunk.token_ids, "index": chunk.index}
    if chunk.logprobs is not None:
        made["log_probs"] = [each.logprob for each in chunk.logprobs]
        made["top_logprobs"] = [_best(each) for each in chunk.logprobs]
    if chunk.finish_reason is not None:
        made |= {"finish_reason": _FINISHED[chunk.finish_reason]} | usage(num_prompt, num_tokens)
    return made


def _best(entry: TokenLogprobs) -> list[dict[str, Any]]:
    """The token itself and the best; the frontend knows their texts."""
    ranked = {entry.token: (entry.rank, entry.logprob)}
    ranked |= {token: (rank, value) for rank, (token, value) in enumerate(entry.top.items(), start=1)}
    return [
        {"rank": rank, "token_id": token, "token": None, "logprob": value} for token, (rank, value) in ranked.items()
    ]


def usage(num_prompt: int, num_tokens: int) -> dict[str, Any]:
    counts = {"prompt_tokens": num_prompt, "completion_tokens": num_tokens, "total_tokens": num_prompt + num_tokens}
    return {"completion_usage": counts}
