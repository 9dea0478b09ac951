"""The process that speaks to Ray for a server: keeps an actor for each engine, and says where its engine listens.

    python -m specserve.cluster.ray_driver SOCKET PARENT

It reads a Plan and orders at the descriptor SOCKET, JSON on a line each, answers with news, and ends with that or with
the process PARENT. It is no part of the server's process: Ray ends the process that it is used in when the cluster's
head has been gone for a minute, has threads of its own there, and takes over its signals.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import socket
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeVar

import msgspec

from specserve.cluster.launcher import AUTO, End, Joined, Listening, Lost, News, Order, Plan, Start, Unusable, Waiting
from specserve.machine.lifeline import end_with
from specserve.parallel.address import Address

T = TypeVar("T")
_LOOK_S = 0.5  # between two looks for an actor that Ray restarts
_LATE_S = 5.0  # after which an actor that has not begun waits for room
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 30.0  # after a loss; twice as long after each in a row
_CONNECT_S = 10.0
_HEARTBEAT_S, _SILENCE_S = 2.0, 30.0  # between two questions to the cluster's head, and the longest without an answer
_GOOD_S = 60.0  # an engine that lived so long is no failed start


class Driver:
    """Obeys orders with actors of Ray, which must be connected."""

    def __init__(self, plan: Plan, say: Callable[[News], None]) -> None:
        self._plan, self._say = plan, say
        self._keepers: dict[int, asyncio.Task[None]] = {}

    async def obey(self, order: Order) -> None:
        if isinstance(order, Start) and order.number not in self._keepers:
            keeper = _Keeper(self._plan, order.number, self._say)
            self._keepers[order.number] = asyncio.create_task(keeper.run())
        elif isinstance(order, End):
            await self._end(order.number)

    async def close(self) -> None:
        for number in list(self._keepers):
            await self._end(number)

    async def _end(self, number: int) -> None:
        keeper = self._keepers.pop(number, None)
        if keeper is not None:
            keeper.cancel()
            with suppress(asyncio.CancelledError):
                await keeper


class _Keeper:
    """One engine after another under one number."""

    def __init__(self, plan: Plan, number: int, say: Callable[[News], None]) -> None:
        self._plan, self._number, self._say = plan, number, say
        self._pause = _FIRST_PAUSE_S
        self._is_lost = False  # and that was said

    async def run(self) -> None:
        """Until it is cancelled; then nothing of it is left. Ray restarts an actor whose process or node is gone, in a
        place that it finds for all its ranks; one that it gives up is replaced."""
        while True:
            placed: tuple[Any, Any] | None = None
            try:
                placed = self._place()
                await self._watch(placed[1])
            except Exception as error:  # whatever Ray raises: without a keeper there would be no engine for ever
                self._lost(f"{type(error).__name__}: {_first_line(error)}")
                await self._rest(_now())
            finally:
                if placed is not None:
                    _remove(*placed)

    def _place(self) -> tuple[Any, Any]:
        import ray
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        plan = self._plan
        bundle = {"CPU": float(plan.cpus)} | ({"GPU": float(plan.gpus)} if plan.gpus else {})
        group = placement_group([bundle] * plan.num_ranks, strategy="STRICT_PACK")
        module, _, name = plan.actor.partition(":")
        made = ray.remote(getattr(importlib.import_module(module), name)).options(
            num_cpus=plan.cpus,
            num_gpus=plan.gpus,
            max_restarts=-1,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0),
        )
        return group, made.remote(plan.settings)

    async def _watch(self, actor: Any) -> None:
        """Until Ray does not restart it any more."""
        import ray
        from ray.exceptions import ActorDiedError, RayError

        while True:
            try:
                address, cause, final = await self._within(actor.listening.remote())
                begun = _now()
                if address:
                    self._say(Listening(self._number, address))
                    self._is_lost = False
                    cause, final = await actor.ended.remote()
                self._lost(cause, final)
                await self._rest(begun)
                ray.kill(actor, no_restart=False)
            except ActorDiedError as error:
                self._lost(_first_line(error))
                await self._rest(_now())
                return
            except RayError as error:  # Ray restarts it, at once or as soon as it knows that the node is gone
                self._lost(_first_line(error))
                await asyncio.sleep(_LOOK_S)

    def _lost(self, cause: str, final: str = "") -> None:
        """Said once, until there is an engine again."""
        if not self._is_lost:
            self._say(Lost(self._number, cause, final))
        self._is_lost = True

    async def _rest(self, begun: float) -> None:
        """Before another start: the longer, the more engines in a row have ended soon after they began."""
        if _now() - begun > _GOOD_S:
            self._pause = _FIRST_PAUSE_S
        await asyncio.sleep(self._pause)
        self._pause = min(2 * self._pause, _LONGEST_PAUSE_S)

    async def _within(self, answer: Awaitable[T]) -> T:
        """An actor's answer; where it takes long, what it waits for is said once."""
        waiting = asyncio.ensure_future(answer)
        try:
            done, _ = await asyncio.wait([waiting], timeout=_LATE_S)
            if not done:
                self._say(Waiting(self._number, _room(self._plan)))
            return await waiting
        finally:
            waiting.cancel()


def _now() -> float:
    return asyncio.get_running_loop().time()


def _room(plan: Plan) -> str:
    """What an engine needs, and what the nodes have."""
    import ray

    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    found = ", ".join(f"{node.get('CPU', 0):g} CPUs and {node.get('GPU', 0):g} GPUs" for node in nodes)
    gpus = f" and {plan.gpus * plan.num_ranks} GPUs" if plan.gpus else ""
    free = ray.available_resources()
    return (
        f"It needs a node with {plan.cpus * plan.num_ranks} CPUs{gpus} free. The cluster has {len(nodes)} nodes, with "
        f"{found}; of all these {free.get('CPU', 0):g} CPUs and {free.get('GPU', 0):g} GPUs are free."
    )


def _remove(group: Any, actor: Any) -> None:
    import ray
    from ray.exceptions import RayError
    from ray.util.placement_group import remove_placement_group

    with suppress(RayError, ValueError):  # Ray has given up on the actor, or on all
        ray.kill(actor)
    with suppress(RayError, ValueError):
        remove_placement_group(group)


def _first_line(error: Exception) -> str:
    """Ray's messages have a page of context."""
    cause = getattr(error, "cause", None) or error
    return next(iter(str(cause).strip().splitlines()), type(error).__name__)


async def drive(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Obey until there is nobody who says anything any more."""
    import ray

    def say(news: News) -> None:
        writer.write(msgspec.json.encode(news) + b"\n")

    plan = msgspec.json.decode(await reader.readline(), type=Plan)
    try:
        _reach(plan.cluster)
        ray.init(address=plan.cluster, log_to_driver=False, logging_level=logging.WARNING)
    except (OSError, RuntimeError, ValueError) as error:  # ConnectionError is an OSError
        say(Unusable(_first_line(error)))
        await writer.drain()
        return
    nodes = sum(node["Alive"] for node in ray.nodes())
    say(Joined(ray.get_runtime_context().gcs_address, nodes))
    driver = Driver(plan, say)
    obeying, leaving = asyncio.create_task(_obey(reader, driver)), asyncio.create_task(_until_gone())
    await asyncio.wait([obeying, leaving], return_when=asyncio.FIRST_COMPLETED)
    if not obeying.done():
        say(Unusable(leaving.result()))
        await writer.drain()
        os._exit(1)  # Ray would be asked for what it does not answer
    leaving.cancel()
    try:
        obeying.result()
    finally:
        await driver.close()
        ray.shutdown()


def _reach(address: str) -> None:
    """Raises OSError where nobody is; Ray would try for minutes."""
    if address != AUTO:
        where = Address.parse(address, "--ray-address")
        socket.create_connection((where.host, where.port), _CONNECT_S).close()


async def _obey(reader: asyncio.StreamReader, driver: Driver) -> None:
    decode = msgspec.json.Decoder(Order).decode
    while line := await reader.readline():
        await driver.obey(decode(line))


async def _until_gone() -> str:
    """Why this process is no part of a cluster any more. A head that is started again without a memory of its own does
    not know those who had joined."""
    import ray
    from ray.exceptions import RayError

    own, heard = ray.get_runtime_context().get_node_id(), _now()
    while _now() - heard < _SILENCE_S:
        await asyncio.sleep(_HEARTBEAT_S)
        try:
            nodes = await asyncio.wait_for(asyncio.to_thread(ray.nodes), _SILENCE_S)
        except (RayError, OSError, RuntimeError):  # TimeoutError is one
            continue
        if not any(node["NodeID"] == own and node["Alive"] for node in nodes):
            return "The cluster has lost this machine."
        heard = _now()
    return f"Its head has not answered for {_SILENCE_S:.0f} s."


async def main(descriptor: int) -> None:
    reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=descriptor))
    with suppress(ConnectionError):
        await drive(reader, writer)
    writer.close()


if __name__ == "__main__":
    end_with(int(sys.argv[2]))
    asyncio.run(main(int(sys.argv[1])))
