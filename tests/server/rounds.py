"""Rounds of a server whose processes are killed or stopped in mid-stream: who is told, who goes on, what is back, and
what is held afterwards."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NamedTuple

from tests.processes import Held, held, running, stopped

API, ENGINE = "specserve.server.api_processes.process", "specserve.server.engine.process"
TRIAL = "specserve.structured.worker"
RANK, JOINED, COMMAND = "specserve.parallel.rank", "specserve.parallel.joined", "specserve"
TOLD_S = 3.0  # in which clients of what was killed know, though other tests have the cores
STALL_S = 2.5  # after which what stands still has gone
BACK_S = 120.0
GOES_ON = 20  # tokens after which a stream counts as untouched
POOLS = 4  # threads that are made when they are needed, but no more of them
LOOKED_AT = 300  # tokens of a long answer that are compared
# Two processes of a model add in another order than one: in float32 that shows at ties alone.
OPTIONS = {"max-model-len": 2048, "kv-cache-gib": 0.03, "block-size": 16, "quantization": "none", "dtype": "float32"}
PROMPTS = [[number, 6, 7, 8] * 6 for number in range(5, 9)]
BODIES: list[dict[str, Any]] = [
    {"prompt": prompt, "max_tokens": 24, "ignore_eos": True, "return_token_ids": True, **sampling}
    for prompt in PROMPTS
    for sampling in ({"temperature": 0}, {"temperature": 1, "seed": prompt[0]})
]
STREAM = {"max_tokens": 1900, "ignore_eos": True, "temperature": 0, "stream": True, "return_token_ids": True}


class Stream(threading.Thread):
    """A long answer that is read as it comes. `end` is "" while it comes, "whole", "told" of an error, or "cut"; and
    `ended` when that was, in seconds of time.monotonic()."""

    def __init__(self, served: Any, prompt: list[int]) -> None:
        super().__init__(daemon=True)
        self.prompt, self.tokens = prompt, list[int]()
        self.end, self.ended = "", 0.0
        text = json.dumps({**STREAM, "prompt": prompt})
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        self._connection = served.raw(f"{head}Content-Length: {len(text)}\r\n\r\n{text}".encode(), timeout=BACK_S)
        self.start()

    def run(self) -> None:
        end = "cut"
        with suppress(OSError), self._connection.makefile("rb") as lines:
            for line in lines:
                if line.startswith(b"data: [DONE]") and end != "told":
                    end = "whole"
                    break
                if b'"error"' in line:
                    end = "told"
                    break
                if line.startswith(b"data: {"):
                    for choice in json.loads(line[6:])["choices"]:
                        self.tokens += choice.get("token_ids") or ()
        self.ended, self.end = time.monotonic(), end
        self._connection.close()

    def leave(self) -> None:
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self.join()


class Loss(NamedTuple):
    """What is taken away in a round: by `signal` the process at a `place` among those that run `module`. `takes`: all
    of the streams with it, some of them, or none. It `stays` where it goes on once others have found it stopped."""

    module: str
    signal: signal.Signals
    takes: str = "all"
    place: int = 0
    stays: bool = False


class Rounds:
    """`count` of them with `served`, whose texts are `expected`, in the order of BODIES, and with what is `beside` it
    (ids of processes that others have started): all of it is looked at. The server answers by two processes."""

    def __init__(
        self,
        served: Any,
        expected: list[list[int]],
        count: int,
        beside: Callable[[], Sequence[int]] = tuple,
    ) -> None:
        self.served, self._expected, self._count, self._beside = served, expected, count, beside
        self._told_s = list[float]()  # after which each client of what was lost knew
        self._places: dict[str, list[int]] = {}
        served.until(self.is_whole, BACK_S)
        served.until(lambda: len(running(served.process.pid, TRIAL)) == 2, BACK_S)  # the worker and its copy
        self._long = [self._answer({**BODIES[0], "prompt": prompt, "max_tokens": LOOKED_AT}) for prompt in PROMPTS]
        self.check_texts()
        served.until(served.is_idle)
        self._held = self.held()

    def pids(self, module: str) -> list[int]:
        """Of processes that run this module, here or beside. Who takes the place of another has its place."""
        found = [pid for root in (self.served.process.pid, *self._beside()) for pid in running(root, module)]
        known = self._places.setdefault(module, [])
        come = [pid for pid in found if pid not in known]
        kept = [pid if pid in found else come.pop(0) if come else None for pid in known]
        self._places[module] = [pid if now is None else now for pid, now in zip(known, kept, strict=True)] + come
        return [pid for pid in self._places[module] if pid in found]

    def is_whole(self) -> bool:
        """Whether each process takes requests for each engine."""
        stats, apis = self.served.get("/stats").json, self.pids(API)
        states = {each["state"] for each in stats["api_processes"]}
        return states == {"ready"} and len(apis) == 2 and all(map(self._knows_all, apis))

    def _knows_all(self, api: int) -> bool:
        with stopped(*(pid for pid in self.pids(API) if pid != api)):
            engines = self.served.get("/stats").json.get("replicas", ())
            return all(each["state"] == "ready" for each in engines) and self.served.get("/health").status == 200

    def held(self) -> list[Held]:
        return held(self.served.process.pid, *self._beside())

    def check_texts(self) -> None:
        with ThreadPoolExecutor(len(BODIES)) as pool:
            assert list(pool.map(self._answer, BODIES)) == self._expected

    def _answer(self, body: dict[str, Any]) -> list[int]:
        reply = self.served.post("/v1/completions", body)
        assert reply.status == 200, reply.body
        found: list[int] = reply.json["choices"][0]["token_ids"]
        return found

    def run(self, losses: Sequence[Loss], back: Callable[[], object] = lambda: None) -> None:
        """All rounds, two at least, each loss in its turn; `back` does what others would do to have something
        back that comes from elsewhere. At the end no more is held than before."""
        for number in range(max(2, self._count)):
            self._run(losses[number % len(losses)], back)
        print(f"{len(self._told_s)} clients knew after (seconds):", *(f"{each:.3f}" for each in sorted(self._told_s)))
        until = time.monotonic() + 30
        while (more := _more(self._held, self.held())) and time.monotonic() < until:
            time.sleep(0.05)
        assert not more, more

    def _run(self, loss: Loss, back: Callable[[], object]) -> None:
        """In the middle of streams: their clients know in time, the other streams go on, and then all is as before."""
        pids, counted, restarts = self.pids(loss.module), self._counted(), self._restarts()
        pid = pids[loss.place]

        engines = self.pids(ENGINE)

        def is_another() -> bool:
            now, engines_now = self.pids(loss.module), self.pids(ENGINE)
            is_served_anew = loss.takes != "all" or (engines_now != engines and len(engines_now) == len(engines))
            return is_served_anew and (loss.stays or (pid not in now and len(now) == len(pids)))

        streams = self._streams()
        lengths = [len(each.tokens) for each in streams]
        assert self.served.post("/reset_prefix_cache", {}).status == 200  # others that compute prompts are asked again
        begun = time.monotonic()
        os.kill(pid, loss.signal)
        self._wait_until_told(streams, lengths, loss.takes)
        late = [each.ended - begun for each in streams if each.end not in ("", "whole")]
        self._told_s += late
        assert max(late, default=0.0) < TOLD_S + (STALL_S if loss.signal == signal.SIGSTOP else 0.0), loss
        for each, whole in zip(streams, self._long, strict=True):
            each.leave()
            assert each.tokens[:LOOKED_AT] == whole[: len(each.tokens)]
        if loss.takes != "all":
            self.check_texts()  # others answer meanwhile
        if loss.stays:
            os.kill(pid, signal.SIGCONT)
        back()
        self.served.until(lambda: is_another() and self._restarts() > restarts and self.is_whole(), BACK_S)
        self.check_texts()
        self.served.until(self.served.is_idle)
        # Each request is counted once, whatever it ended in.
        num_asked = len(streams) + len(BODIES) * (1 + (loss.takes != "all"))
        self.served.until(lambda: self._counted() - counted == num_asked)
        assert self._restarts() == restarts + 1, "nothing else has gone"

    def _streams(self) -> list[Stream]:
        """One of each prompt, by turns through the two processes that answer, each in the middle of its answer."""
        streams, apis = list[Stream](), self.pids(API)
        for number, prompt in enumerate(PROMPTS):
            with stopped(apis[number % 2 - 1]):
                streams.append(Stream(self.served, prompt))
                self.served.until(lambda: bool(streams[-1].tokens))
        return streams

    def _wait_until_told(self, streams: Sequence[Stream], lengths: Sequence[int], takes: str) -> None:
        """Until each has ended or has gone on, as many as are to."""
        until = time.monotonic() + STALL_S + 10
        while True:
            lost = [bool(each.end) and each.end != "whole" for each in streams]
            on = [len(each.tokens) >= length + GOES_ON for each, length in zip(streams, lengths, strict=True)]
            is_so = {"all": all(lost), "none": all(on) and not any(lost), "some": any(lost) and any(on)}
            if is_so[takes] and all(one or other for one, other in zip(lost, on, strict=True)):
                return
            assert time.monotonic() < until, f"{[each.end for each in streams]}:\n{self.served.said}"
            time.sleep(0.005)

    def _restarts(self) -> int:
        stats = self.served.get("/stats").json
        return sum(int(each["num_restarts"]) for each in (stats, *stats["api_processes"]))

    def _counted(self) -> int:
        ended: dict[str, int] = self.served.get("/stats").json["requests"]
        return sum(ended.values())


def _more(before: Sequence[Held], after: Sequence[Held]) -> str:
    """What is held that was not: the same processes, of each kind none with more descriptors or more shared memory than
    one of that kind had. Threads of pools are made when they are needed, a few at most."""
    if [each.kind for each in before] != [each.kind for each in after]:
        return f"processes: {[each.kind for each in before]}, and then {[each.kind for each in after]}"
    most = {each.kind: [other for other in before if other.kind == each.kind] for each in before}
    grown = [
        each
        for each in after
        if each.num_descriptors > max(other.num_descriptors for other in most[each.kind])
        or each.num_threads > max(other.num_threads for other in most[each.kind]) + POOLS
        or sum(dict(each.shared_memory).values())
        > max(sum(dict(other.shared_memory).values()) for other in most[each.kind])
    ]
    return f"{grown}, and before: {[most[each.kind] for each in grown]}" if grown else ""
