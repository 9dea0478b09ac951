"""The engine's process: one thread that obeys commands, steps and reports.

    python -m specserve.server.engine.process SOCKET MEMORY PARENT [REPLICA SHARED BELL ...]

It waits at the descriptor SOCKET, which it has inherited, to be told what to load, counts in the descriptor MEMORY what
it does inside a step, and ends with the process PARENT, which started it, however that one ends. With REPLICA it is the
one of that number of replicas that step together: Lockstep says what SHARED and the BELLs of all are.
"""

from __future__ import annotations

import dataclasses
import gc
import select
import signal
import socket
import sys
import time
from functools import partial

import msgspec

from specserve.adapters import AdapterInfo
from specserve.cache.sizing import GIB
from specserve.config import EngineConfig
from specserve.engine.adapters import UnknownAdapterError
from specserve.engine.build import Built, build
from specserve.engine.compiling import Compiling
from specserve.engine.counters import Counters
from specserve.engine.port import LocalPort
from specserve.engine.request import Request
from specserve.errors import ConfigError, InputError, ModelError, SpecserveError
from specserve.machine.lifeline import end_with
from specserve.machine.pulse import Pulse
from specserve.ops.device import choose_device
from specserve.parallel.exchange import KVExchange
from specserve.parallel.lockstep import Lockstep
from specserve.server.engine.messages import (
    Abort,
    AdapterChanged,
    Command,
    Configure,
    ExpectKV,
    Expire,
    ExportKV,
    Failed,
    Gauges,
    ImportKV,
    KVCommand,
    KVExported,
    KVImported,
    KVWanted,
    LoadAdapter,
    Ready,
    Refused,
    ReleaseKV,
    Report,
    ResetPrefixCache,
    Stepped,
    Stop,
    UnloadAdapter,
    Wake,
)  # fmt: skip
from specserve.server.engine.pipe import Pipe
from specserve.types import Event, SamplingParams

# After a step that gave everybody their first token: where all cores compute, the processes that carry it to the client
# would get one at the end of the next step only (3 ms sooner this way, measured).
_LET_OTHERS_RUN_S = 0.001
_SWITCH_S = 0.0005  # for Python's 0.005, so long would a step wait each time that a grammar is compiled beside it
_IDLE_MS = 1000
_BEHIND_MS = 10
_EXPECTING_S = 0.003  # most prompts are tokenized in less
_LINGER_S = 1.0
_EMPTY_STEPS_S = 1.0  # between two reports that tell of nothing else


class Wire:
    """The engine's end of the socket. A command that is none is dropped: whoever could send one is not ours."""

    def __init__(self, end: socket.socket, bell: int | None = None) -> None:
        """Whoever waits for commands also wakes while there is something to read at `bell`."""
        self._pipe = Pipe(end)
        self._poll = select.poll()
        self._poll.register(self._pipe, select.POLLIN)
        if bell is not None:
            self._poll.register(bell, select.POLLIN)
        self._early: list[Command] = []  # came with the configuration
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(Command).decode

    def send(self, report: Report) -> None:
        self._pipe.send(self._encode(report))

    def commands(self, wait_ms: int) -> list[Command]:
        """What has come, once there is something or the time is over; to stop, once the other end is closed."""
        if self._early:
            early, self._early = self._early, []
            return early
        if self._pipe.is_behind:
            self._pipe.flush()
            wait_ms = min(wait_ms, _BEHIND_MS)
        if self._pipe.fileno() not in (descriptor for descriptor, _ in self._poll.poll(wait_ms)):
            return []
        try:
            messages = self._pipe.receive()
        except EOFError:
            return [Stop()]
        return [command for message in messages for command in self._decoded(message)]

    def _decoded(self, message: bytes) -> list[Command]:
        try:
            return [self._decode(message)]
        except msgspec.DecodeError:
            return []

    def configuration(self) -> Configure:
        """The first command; waits for it. Raises SystemExit when it is to stop."""
        while True:
            commands = self.commands(_IDLE_MS)
            for i, command in enumerate(commands):
                if isinstance(command, Configure):
                    self._early = commands[i + 1 :]
                    return command
                if isinstance(command, Stop):
                    sys.exit(0)

    def close(self) -> None:
        self._pipe.close(_LINGER_S)


class EngineProcess:
    """Carries commands from the wire to the engine, and its events back after each step."""

    def __init__(
        self,
        wire: Wire,
        port: LocalPort,
        pulse: Pulse | None = None,
        exchange: KVExchange | None = None,
        lockstep: Lockstep | None = None,
    ) -> None:
        self._wire = wire
        self._port = port
        self._pulse, self._exchange, self._lockstep = pulse, exchange, lockstep
        self._num_joined, self._report_at = 0, 0.0  # as reported, and when to again, time.monotonic()
        self._events: list[Event] = []  # not sent yet
        self._stopping = False
        self._num_awaiting = 0  # as reported
        self._awake_until = 0.0  # time.monotonic()

    def run(self) -> None:
        self._port.prepare()  # for 0.1 s of it Python does nothing else: now, and not beside a stream
        while not self._stopping:
            for command in self._wire.commands(self._wait_ms()):
                self._obey(command)
            stepped, num_awaiting = self._port.step(), self._port.num_awaiting
            has_news = not stepped and self._has_joined()
            if has_news or stepped or self._events or num_awaiting != self._num_awaiting:
                self._num_awaiting = num_awaiting
                self._report()
            if self._pulse is not None and num_awaiting:
                self._pulse.beat()  # it lives, and waits for another engine

    def _has_joined(self) -> bool:
        """Takes a step without rows if other replicas have begun one; whether to report such, which is now and then."""
        if self._lockstep is None:
            return False
        self._lockstep.join()
        if self._lockstep.num_empty_steps == self._num_joined or time.monotonic() < self._report_at:
            return False
        self._num_joined, self._report_at = self._lockstep.num_empty_steps, time.monotonic() + _EMPTY_STEPS_S
        return True

    def _wait_ms(self) -> int:
        if time.monotonic() < self._awake_until:
            return 0
        wait_s = self._port.wait_s
        return _IDLE_MS if wait_s is None else int(1000 * wait_s)

    def _obey(self, command: Command) -> None:
        match command:
            case Request():
                self._port.submit(command, partial(self._notify, command.id))
            case Wake():
                self._awake_until = time.monotonic() + _EXPECTING_S
            case Abort():
                self._port.abort(command.id, command.index)
            case Expire():
                self._port.expire(command.id)
            case ResetPrefixCache():
                self._port.reset_prefix_cache()
            case LoadAdapter():
                self._port.load_adapter(command.source, command.replaces, partial(self._tell, command.number))
            case UnloadAdapter():
                self._port.unload_adapter(command.name, partial(self._tell, command.number))
            case ExportKV() | ReleaseKV() | ImportKV() | ExpectKV():
                self._exchange_kv(command)
            case Stop():
                self._stopping = True

    def _exchange_kv(self, command: KVCommand | ExpectKV) -> None:
        assert self._exchange is not None, "an engine is told so that may be asked for KV"
        match command:
            case ExportKV(id, tokens, salt, adapter, first_block):
                self._exchange.export(id, tokens, salt, adapter, first_block)
            case ReleaseKV(id):
                self._exchange.release(id)
            case ImportKV(id, path, num_bytes, reason):
                self._exchange.take(id, path, num_bytes, reason)
            case ExpectKV(id, within_s):
                self._exchange.connector.expect(id, within_s)

    def _tell(self, number: int, found: AdapterInfo | SpecserveError) -> None:
        if isinstance(found, SpecserveError):
            is_missing = isinstance(found, UnknownAdapterError)
            self._wire.send(AdapterChanged(number, None, str(found), is_missing))
        else:
            self._wire.send(AdapterChanged(number, found))

    def _notify(self, request_id: str, event: Event | SpecserveError) -> None:
        if isinstance(event, Event):
            self._events.append(event)
        else:
            assert isinstance(event, InputError), "an engine that fails ends this process"
            self._wire.send(Refused(request_id, str(event), event.param, event.code))

    def _report(self) -> None:
        events, self._events = self._events, []
        self._wire.send(Stepped(events, self._gauges()))
        if events and all(map(self._is_first, events)):
            time.sleep(_LET_OTHERS_RUN_S)

    def _is_first(self, event: Event) -> bool:
        """Whether it has a completion's first token, and more will come."""
        group = self._port.engine.requests.get(event.request_id, ())
        return any(seq.index == event.index and seq.stats.num_steps == 1 for seq in group)

    def _gauges(self) -> Gauges:
        engine = self._port.engine
        counters, stats = engine.counters, engine.cache.stats
        step_s, prompt_token_s, context_token_s = engine.scheduler.speeds
        return Gauges(
            num_running=len(engine.scheduler.running),
            num_waiting=len(engine.scheduler.waiting) + len(engine.scheduler.awaiting.seqs),
            num_free_blocks=engine.cache.num_free,
            num_blocks=engine.cache.num_blocks,
            num_steps=counters.num_steps,
            num_rows=counters.num_rows,
            num_advanced=counters.num_advanced,
            num_preemptions=counters.num_preemptions,
            num_prefix_query_tokens=stats.num_prefix_query_tokens,
            num_prefix_hit_tokens=stats.num_prefix_hit_tokens,
            num_drafts_dropped=counters.num_drafts_dropped,
            seconds=counters.seconds,
            draft_seconds=counters.draft_seconds,
            num_adapter_loads=engine.adapters.num_loads,
            num_adapter_evictions=engine.adapters.num_evictions,
            num_prompts_received=engine.scheduler.awaiting.num_prompts,
            num_prompt_tokens_received=engine.scheduler.awaiting.num_tokens,
            num_transfer_failures=engine.scheduler.awaiting.num_failures,
            transfer_s=engine.scheduler.awaiting.seconds,
            step_s=step_s,
            prompt_token_s=prompt_token_s,
            context_token_s=context_token_s,
            backlog_s=engine.scheduler.backlog_s,
            num_empty_steps=0 if self._lockstep is None else self._lockstep.num_empty_steps,
        )


class _KVReplies:
    """Tells the other side of the wire what becomes of KV."""

    def __init__(self, wire: Wire) -> None:
        self._send = wire.send

    def wanted(self, request_id: str, first_block: int) -> None:
        self._send(KVWanted(request_id, first_block))

    def exported(self, request_id: str, path: str, num_bytes: int, reason: str) -> None:
        self._send(KVExported(request_id, path, num_bytes, reason))

    def imported(self, request_id: str, num_tokens: int, reason: str) -> None:
        self._send(KVImported(request_id, num_tokens, reason))


def _exchange(built: Built, wire: Wire, timeout_s: float) -> KVExchange:
    """Lets the engine take KV from others, and give them its own."""
    exchange = KVExchange(built.prefix_transfer(), built.engine.cache.block_size, _KVReplies(wire), timeout_s)
    built.engine.scheduler.awaiting.connector = exchange.connector
    return exchange


def main(descriptor: int, memory: int, parent: int, *replica: int) -> int:
    """Load, say so, serve. 0 when told to stop; what went wrong is reported before the process ends."""
    end_with(parent)
    sys.setswitchinterval(_SWITCH_S)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it may reach the whole group; the other side decides
    lockstep = Lockstep(replica[0], replica[1], replica[2:]) if replica else None
    wire = Wire(socket.socket(fileno=descriptor), None if lockstep is None else lockstep.bell)
    try:
        configure = wire.configuration()
        config = EngineConfig(**configure.options)
        begun = time.perf_counter()
        check_shared(config, configure.num_engines)
        built = build(config, num_engines=configure.num_engines, pulse=memory, lockstep=lockstep)
        built.ops.watch(pulse := Pulse(memory))
        exchange = _exchange(built, wire, configure.kv_timeout_s) if configure.kv_timeout_s else None
        loaded = time.perf_counter()
        port = LocalPort(built.engine, Compiling(built.compiler, built.tokenizer.markers), built.loader)
        _warm_up(port)
        phases = {"load": loaded - begun, "warm-up": time.perf_counter() - loaded}
        gc.freeze()  # what was loaded stays; to look at all of it takes 0.1 s, in which nobody gets a token
        wire.send(_ready(built, config, phases, exchange))
        EngineProcess(wire, port, pulse, exchange, lockstep).run()
        port.close()
        if exchange is not None:
            exchange.close()
        return 0
    except SpecserveError as error:
        wire.send(Failed.of(error))
    except Exception as error:
        wire.send(Failed(f"{type(error).__name__}: {error}"))
        raise
    finally:
        if lockstep is not None:
            lockstep.leave()
        wire.close()
    return 1


def check_shared(config: EngineConfig, num_engines: int) -> None:
    """Raises ConfigError where several engines would share a GPU, or a port."""
    if num_engines > 1 and config.ranks_listen is not None:
        raise ConfigError(
            f"--data-parallel-size is {num_engines}, and processes that join at --ranks-listen belong to one engine. "
            "Leave one of the two out, or start an engine for each (specserve serve, or specserve engine)."
        )
    if num_engines > 1 and choose_device(config.device).type != "cpu":
        raise ConfigError(
            f"--data-parallel-size is {num_engines}, and replicas share a CPU. Start with --device cpu, or one server "
            "for each GPU (CUDA_VISIBLE_DEVICES)."
        )


def _warm_up(port: LocalPort) -> None:
    """Two steps, so that the first request does not pay for what is made once; nothing of them remains. Raises
    ModelError for weights that make no logits: they hold NaN or are infinite."""
    events: list[Event | SpecserveError] = []
    params = SamplingParams(max_tokens=2, ignore_eos=True, top_k=1, seed=0)  # sampled, and the same at each start
    port.submit(Request(id="warm-up", prompt_ids=[0], params=params), events.append)
    while port.step():
        pass
    for event in events:
        if isinstance(event, SpecserveError):
            raise event
        if event.error is not None:
            raise ModelError(f"The model cannot compute its first token, so its weights are broken. {event.error}")
    port.reset_prefix_cache()
    counters, none = port.engine.counters, Counters()
    for each in dataclasses.fields(Counters):  # in their place: others count there, too
        setattr(counters, each.name, getattr(none, each.name))
    port.engine.drafting.draft_seconds.clear()


def _ready(built: Built, config: EngineConfig, phases: dict[str, float], exchange: KVExchange | None) -> Ready:
    engine = built.engine
    refused = engine.policy.nameable()
    return Ready(
        vocab_size=engine.limits.vocab_size,
        max_model_len=engine.limits.max_model_len,
        max_num_seqs=config.max_num_seqs,
        drafter=config.drafter,
        drafters=[name for name, reason in refused.items() if reason is None],
        refused_drafters={name: reason for name, reason in refused.items() if reason is not None},
        summary=built.summary,
        about={
            "device": built.device,
            "dtype": built.dtype,
            "quantization": built.quantization,
            "kv_cache_dtype": str(built.ops.kv_dtype).removeprefix("torch."),
            "threads": str(built.threads),
            "kernels": built.ops.name,
            "runs": built.runs,
            "instruction_set": built.ops.instruction_set,
        },
        phases=phases,
        adapters=list(engine.adapters.listed.values()),
        max_loras=engine.adapters.num_slots,
        kv_cache_gib=built.num_kv_bytes / GIB,
        num_prefix_blocks=engine.cache.num_blocks if config.prefix_caching else 0,
        block_size=config.block_size,
        numerics="" if exchange is None else exchange.numerics,
    )


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
