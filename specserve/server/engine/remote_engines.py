"""The engines elsewhere that a server has: which they are, now and later, and whether they fit together."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeAlias

from specserve.cluster.router import Load, Router
from specserve.config import EngineConfig
from specserve.errors import ConfigError, EngineError, InputError, SpecserveError
from specserve.parallel.address import Address
from specserve.parallel.handshake import LinkError
from specserve.server.engine.client import Observer
from specserve.server.engine.group import ONLY_PREFILL, ReplicaGroup
from specserve.server.engine.keeper import State, Timeouts
from specserve.server.engine.messages import Ready
from specserve.server.engine.remote import Dialer, RemoteEngine

_log = logging.getLogger(__name__)
_OPTION = "--engine"
# What of an engine's `about` decides on its answers beyond rounding, with the option to set.
_DECISIVE = {"dtype": "--dtype", "quantization": "--quantization", "kv_cache_dtype": "--dtype"}
_ROUNDING = ("device", "kernels", "instruction_set", "runs")


Membership: TypeAlias = Callable[["RemoteEngines"], Awaitable[None]]


class RemoteEngines(ReplicaGroup[RemoteEngine]):
    """As an EngineKeeper, of engines at `addresses`, "host:port". `observers` gives each its observer.

    Each is connected to again and again, however it fails. `membership` may add and remove engines for as long as the
    server runs; what it raises ends all. Without it there is an end before the first engine is ready, where all refuse
    for good, or none is ready in time.
    """

    def __init__(
        self,
        addresses: Iterable[str],
        dialer: Dialer,
        observers: Callable[[int], Observer],
        timeouts: Timeouts | None = None,
        membership: Membership | None = None,
        least_tokens: int | None = None,
    ) -> None:
        self._block_size = EngineConfig().block_size
        super().__init__(0, self._block_size, least_tokens)
        self._dialer, self._observers = dialer, observers
        self._timeouts = timeouts or Timeouts()
        self._is_complete = membership is None
        self._begun = time.monotonic()
        self._first = asyncio.Event()  # an engine was ready, or there will be none
        self._was_ready = False
        for address in addresses:
            self.add_engine(address)
        if membership is not None:
            self._begin(self._have_members(membership))

    @property
    def addresses(self) -> list[str]:
        """Of the engines that were not removed."""
        return [str(each.address) for each in self._replicas if each.state is not State.STOPPED]

    @property
    def state(self) -> State:
        if not self._was_ready:
            return State.FAILED if self.finished.done() else State.LOADING
        return State.READY if self._answering() else State.RESTARTING

    @property
    def ready(self) -> Ready | None:
        known = [each.ready for each in (*self._answering(), *self._replicas) if each.ready is not None]
        return known[0] if known else None

    @property
    def num_places(self) -> int:
        """Sequences that run at once in those that take requests."""
        return sum(each.ready.max_num_seqs for each in self._answering() if each.ready is not None)

    @property
    def loads(self) -> dict[str, Load]:
        """What those that take requests have to do, by address."""
        found = {str(each.address): each.load(None) for each in self._taking()}
        return {address: load for address, load in found.items() if load is not None}

    async def wait_until_ready(self) -> Ready:
        """What the first engine said when it was ready. Raises EngineError with the cause when none will be."""
        await self._first.wait()
        if not self._was_ready:
            await asyncio.shield(self.finished)
        assert self.ready is not None, "one was ready"
        return self.ready

    def add_engine(self, address: str) -> None:
        """Have an engine more, as soon as it can be connected to. Raises InputError for an address that is none, or
        that is there already."""
        try:
            parsed = Address.parse(address, _OPTION)
        except ConfigError as error:
            raise InputError(str(error)) from error
        if str(parsed) in self.addresses:
            raise InputError(f"{_OPTION} {parsed} is there already; an engine serves once.")
        number = next((i for i, each in enumerate(self._replicas) if each.is_gone), len(self._replicas))
        if number == len(self._replicas):
            self._router.add_engine()
            self._prompts.add_engine()
        told = self._dialer, self._observers(number), self._timeouts, self.check_alike, self.failed
        engine = RemoteEngine(self, number, parsed, *told)
        self._replicas[number : number + 1] = [engine]
        self._forget(engine)
        engine.finished.add_done_callback(self._one_finished)

    async def remove_engine(self, address: str, drain_s: float = 30.0) -> None:
        """Send an engine nothing new, let what runs there end for so long, and leave it. Raises InputError for one that
        is not there."""
        found = [each for each in self._replicas if each.state is not State.STOPPED and str(each.address) == address]
        if not found:
            raise InputError(f"There is no engine at {address}; there are {', '.join(self.addresses) or 'none'}.")
        found[0].stop_taking()
        await asyncio.shield(self._begin(found[0].remove(drain_s)))

    def became_ready(self, member: RemoteEngine) -> None:
        assert member.ready is not None, "it said so"
        if self._block_size != member.ready.block_size:
            self._block_size = member.ready.block_size
            self._router = Router(len(self._replicas), self._block_size)
            self._prompts.resize(len(self._replicas), self._block_size)
        if not self._was_ready and member.role == "prefill":
            self._forget(member)
            self._look_for_answers()
            return
        if not self._was_ready:
            self.adapters = dict(member.adapters)
            self._was_ready = True
            self._first.set()
            for each in self._taking():  # which only compute prompts
                if each is not member:
                    super().became_ready(each)
        super().became_ready(member)

    def _look_for_answers(self) -> None:
        """Give up where all engines that there will be only compute prompts."""
        if self._is_complete and len(self._taking()) == len(self._replicas) and not self.finished.done():
            self._give_up(ConfigError(f"{_OPTION}: no engine answers: {ONLY_PREFILL}"))
        else:
            _log.info("An engine is ready that only computes prompts; one that answers is waited for.")

    def check_alike(self, ready: Ready) -> None:
        """Raises LinkError for an engine whose answers would not be those of the engines that take requests."""
        others = [each.ready for each in self._taking() if each.ready is not None]
        for answers in (True, False):
            same = [other for other in others if (other.role != "prefill") is answers]
            if same:
                self._check_pair(ready, same[0])

    def _check_pair(self, ready: Ready, other: Ready) -> None:
        """As `check_alike`, of two. One that only computes prompts may draft otherwise: KV of its head is dropped."""
        options = {"max_model_len": "--max-model-len", "block_size": "--block-size", "vocab_size": "--model"}
        if (ready.role == "prefill") == (other.role == "prefill"):
            options |= {"drafter": "--drafter", "drafters": "--drafter"}
        elif ready.drafter != other.drafter:
            first, second = (ready, other) if ready.role == "prefill" else (other, ready)
            _log.warning(
                "Engines that compute prompts draft with %s, and those that answer with %s: KV of a draft head or "
                "draft model is not sent.",
                *(first.drafter, second.drafter),
            )
        pairs = {name: (getattr(ready, name), getattr(other, name), option) for name, option in options.items()}
        pairs |= {name: (ready.about.get(name), other.about.get(name), key) for name, key in _DECISIVE.items()}
        for name, (mine, theirs, option) in pairs.items():
            if mine != theirs:
                raise LinkError(
                    f"Its {name} is {mine}, and that of the other engines {theirs}. Start all with the same {option}.",
                    is_final=True,
                )
        if {ready.role, other.role} == {"prefill", "decode"} and ready.numerics != other.numerics:
            raise LinkError(
                f"Its KV is computed with {ready.numerics}, and that of the other engines with {other.numerics}: "
                "neither could use the other's. Start them with the same --device, --isa, --dtype, --quantization and "
                "--tensor-parallel-size.",
                is_final=True,
            )
        for name in _ROUNDING:
            if ready.about.get(name) != other.about.get(name):
                _log.warning(
                    "Engines differ in %s (%s, %s): answers may differ where two tokens are all but equally likely.",
                    *(name, ready.about.get(name), other.about.get(name)),
                )

    def failed(self, engine: RemoteEngine) -> None:
        """A try has failed, or a connection is over."""
        if self._was_ready or not self._is_complete or self.finished.done():
            return
        failures = [each.failure for each in self._replicas]
        final = [failure for failure in failures if failure is not None and failure.is_final]
        where = f"Engine {engine.address}: "
        if len(final) == len(failures):
            self._give_up(ConfigError(f"{where}{engine.failure}"))
        elif time.monotonic() - self._begun > self._timeouts.start_s:
            self._give_up(
                EngineError(f"No engine was ready after {self._timeouts.start_s:.0f} s. {where}{engine.failure}")
            )

    async def close(self, hurried: bool = False) -> None:
        await super().close(hurried)
        self._first.set()

    async def _have_members(self, membership: Membership) -> None:
        try:
            await membership(self)
        except SpecserveError as error:
            if not self.finished.done():
                self._give_up(error)
        except Exception as error:
            _log.exception("Engines can no longer be added and removed.")
            if not self.finished.done():
                self._give_up(EngineError(f"Engines can no longer be added: {type(error).__name__}: {error}"))

    def _give_up(self, error: SpecserveError) -> None:
        self.finished.set_exception(error)
        self._first.set()
