"""Rows F48 to F64: clients that leave, full queues, deadlines, memory that runs out, engines and servers that die."""

from __future__ import annotations

import json
import os
import pickle
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from specserve.errors import ModelError
from specserve.server.engine.spawn import EngineSpawner
from specserve.server.http.run import serve
from specserve.server.options import ServeOptions

LONG = {"prompt": "the cat sat", "max_tokens": 400, "temperature": 0, "ignore_eos": True, "return_token_ids": True}


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """A process that stands still for a while."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@contextmanager
def limited(pid: int, kind: int, soft: int) -> Iterator[None]:
    """A process that may have less of something for a while."""
    before = resource.prlimit(pid, kind)
    resource.prlimit(pid, kind, (soft, before[1]))
    try:
        yield
    finally:
        with suppress(ProcessLookupError):  # it may have died of it
            resource.prlimit(pid, kind, before)


def open_requests(case: Any) -> int:
    stats = case.stats()
    return int(stats["num_running"] + stats["num_waiting"])


def aborted(case: Any) -> int:
    return int(case.stats()["requests"]["abort"])


def in_threads(calls: list[Callable[[], Any]]) -> list[Any]:
    """The results of calls that are made at the same time."""
    results: list[Any] = [None] * len(calls)

    def run(index: int) -> None:
        results[index] = calls[index]()

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(250)
    return results


# --- F48 to F51: clients ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("phase", ["F48-queued", "F48-tokenizing", "F48-prefill", "F48-verify"])
def test_clients_that_leave(case: Any, phase: str, stream: bool) -> None:
    """Their requests end with them: each is counted as an abort, and not one runs on to its end."""
    before = case.stats()["requests"]
    body: dict[str, Any] = {**LONG, "stream": stream}
    if phase == "F48-tokenizing":
        body["prompt"] = "the cat sat on the mat and on " * 180  # on a thread, and too long in the end
    elif phase == "F48-prefill":
        body["prompt"] = list(range(90)) * 5
    elif phase == "F48-verify":
        body.update(prompt=[7, 8, 9] * 12, speculative={"drafter": "ngram"}, n=4)
    with stopped(case.served.engine_pid):  # nothing is said meanwhile, so nobody can be done
        talks = [case.raw(case.request(body)) for _ in range(20)]
        if phase == "F48-queued" or phase == "F48-prefill":
            time.sleep(0.1)
        for index, talk in enumerate(talks):
            talk.reset() if index % 2 else talk.close()
        time.sleep(0.1)
    case.served.until(lambda: open_requests(case) <= 4)
    after = case.stats()["requests"]
    assert after["length"] + after["stop"] - before["length"] - before["stop"] < 20, "they were not run to their ends"
    if phase != "F48-tokenizing":
        case.served.until(lambda: aborted(case) > before["abort"])


@pytest.mark.parametrize("phase", ["F48-first-token", "F48-middle", "F48-last-token", "F48-done"])
def test_readers_that_leave(case: Any, phase: str) -> None:
    """A stream is left after its first event, in the middle, before its end mark, and after it."""
    before = case.stats()["requests"]
    marks = {
        "F48-first-token": b"data: ",
        "F48-middle": b"token_ids",
        "F48-last-token": b'"length"',
        "F48-done": b"[DONE]",
    }
    long = (
        {**LONG, "n": 3, "max_tokens": 480} if phase in ("F48-first-token", "F48-middle") else {**LONG, "max_tokens": 5}
    )
    talks = [case.stream(**long) for _ in range(6)]
    for talk in talks:
        talk.until(marks[phase])
        talk.reset()
    case.served.until(lambda: open_requests(case) <= 4)
    after = case.stats()["requests"]
    if phase in ("F48-last-token", "F48-done"):
        assert after["length"] - before["length"] >= 6
    else:
        case.served.until(lambda: aborted(case) > before["abort"])


def test_connect_and_drop(case: Any) -> None:
    """F49: 300 who send nothing, half a request or a whole one, and are gone."""
    request = case.request({**LONG, "stream": True})
    for index in range(300):
        sent = request[: index * 7 % (len(request) + 1)] if index % 3 else request
        talk = case.raw(sent)
        talk.reset() if index % 2 else talk.close()
    case.served.until(lambda: open_requests(case) <= 4)


@pytest.mark.parametrize("stream", [True, False], ids=["F50-stream", "F50-whole"])
def test_clients_that_do_not_read(strict: Any, stream: bool) -> None:
    """Four megabytes and more for somebody who reads nothing, more than the sockets take: the connection is cut, and
    what waited for it is forgotten."""

    def cuts() -> int:
        said = strict.served.said
        return said.count("does not read its answer") + said.count("/v1/chat/completions 499")

    before = cuts()
    body = {"messages": [{"role": "user", "content": "x"}], "n": 8, "max_tokens": 400, "ignore_eos": True, "seed": 1}
    with socket.socket() as silent:
        silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        silent.connect(("127.0.0.1", strict.served.port))
        asked = {**body, "stream": stream, "logprobs": True, "top_logprobs": 20}
        silent.sendall(strict.request(asked, "/v1/chat/completions"))
        strict.served.until(lambda: cuts() > before, 100)


def test_a_full_queue(strict: Any) -> None:
    """F51: twelve are let in, 8 to run and 4 to wait; whoever comes then is told so, and the twelve finish. Counted
    while the engine stands still, so that nobody is done early."""
    with stopped(strict.served.engine_pid):
        free = 12 - 4  # the streams beside it are in
        inside = [strict.stream(**{**LONG, "max_tokens": 30}) for _ in range(free)]
        strict.served.until(lambda: strict.complete().status == 429)
        replies = in_threads([lambda: strict.complete() for _ in range(30)])
        many = strict.complete(prompt=["x"] * 100)
    for reply in [*replies, many]:
        assert (reply.status, reply.error["type"]) == (429, "rate_limit_error")
        assert int(reply.headers["retry-after"]) >= 1
        assert "x-should-retry" not in reply.headers
    ended = [talk.rest() for talk in inside]
    assert [text.count(b"[DONE]") for text in ended] == [1] * free
    assert strict.complete().status == 200


def test_more_than_ever_fits_at_once(strict: Any) -> None:
    """F51-n: thirteen completions of one request have no room in a queue of twelve, now or later."""
    assert strict.complete(n=13).status == 429


# --- F52, F53: deadlines and memory -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def one_context_gib() -> float:
    """GiB of KV of one context and a little more, in the dtype that an engine chooses here."""
    from specserve.ops.choice import choose_ops
    from specserve.ops.device import choose_device

    return 0.00015 * choose_ops(choose_device("auto"), "auto", "auto", 1).kv_dtype.itemsize


@pytest.fixture(scope="module")
def mortal(
    padded: Path, serving_process: Any, tmp_path_factory: pytest.TempPathFactory, one_context_gib: float
) -> Iterator[Any]:
    """A server without patience whose engine dies at its start while a certain file is there."""
    folder = tmp_path_factory.mktemp("mortal")
    fault = folder / "fault"
    (folder / "sitecustomize.py").write_text(
        "import os, sys\n"
        f"if 'specserve.server.engine.process' in sys.orig_argv and os.path.exists({str(fault)!r}):\n"
        "    os._exit(7)\n"
    )
    options = {"max-num-seqs": 16, "max-model-len": 512, "kv-cache-gib": one_context_gib, "stall-timeout-s": 1.5}
    name = "--served-model-name=tiny"
    with ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", f"{folder}:{os.environ.get('PYTHONPATH', '')}")
            served = stack.enter_context(serving_process(padded, folder, name, **options))
        served.fault = fault
        yield served


def engine_is_another(served: Any, before: int) -> None:
    served.until(lambda: served.engine_pid not in (None, before) and served.get("/health").status == 200, 200)


def answers_well(case: Any, known: Any) -> None:
    """The canary, sent again while the server says that it will be back."""
    from_now = time.monotonic()
    while time.monotonic() < from_now + 120:
        reply = case.complete(prompt=[5, 6, 7, 8], max_tokens=24, ignore_eos=True, return_token_ids=True)
        if reply.status == 200:
            break
    assert reply.json["choices"][0]["token_ids"] == known["canary"]


def test_keys_and_salts_do_not_share(strict: Any) -> None:
    """F63: what one key's prompts left in the prefix cache, another's do not find, with the same salt or none."""
    keys = ("sk-first-tenant-key", "sk-second-tenant-key")

    def cached(key: str, prompt: list[int], **fields: Any) -> int:
        reply = strict.post(
            "/v1/completions",
            {"prompt": prompt, "max_tokens": 1, **fields},
            headers={"Authorization": f"Bearer {key}"},
        )
        return int(reply.json["usage"]["prompt_tokens_details"]["cached_tokens"])

    prompt = list(range(100, 190))
    assert [cached(key, prompt) for key in (*keys, *keys)] == [0, 0, 80, 80]
    assert [cached(key, prompt, cache_salt="a") for key in (*keys, *keys)] == [0, 0, 80, 80]
    assert [cached(keys[0], prompt, cache_salt=salt) for salt in ("b", "a", "ab", "b")] == [0, 80, 0, 80]
    for salt in ("a\x00b", "a\n", "x" * 2**19, "", 5):
        reply = strict.complete(cache_salt=salt)
        assert (reply.status, reply.error["param"]) == (400, "cache_salt")


KEY = "sk-first-tenant-key"
WRONG = [
    "", " ", KEY[:-1], KEY + "x", KEY.upper(), "*", "null", "sk-ünïcode", "sk-x\x00", f"{KEY},{KEY}", "x" * 7000,
    "\u202e" + KEY, KEY[1:], KEY.replace("s", "\u0455"),
]  # fmt: skip


def test_keys_that_are_none(strict: Any) -> None:
    """F64"""
    paths = ("/v1/models", "/metrics", "/stats", "/server_info", "/nothing", "/v1/completions")
    for key in WRONG:
        for header in (f"Authorization: Bearer {key}", f"x-api-key: {key}", f"Authorization: Basic {key}"):
            for path in paths:
                head = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{header}\r\n\r\n"
                answer = strict.raw(head.encode()).rest()
                assert re.match(rb"HTTP/1.[01] (401|400) ", answer), (key, path, answer[:200])
                assert b"HTTP/1.1 401" in answer or "\x00" in key


def test_a_key_of_a_megabyte(strict: Any) -> None:
    """F64-1-MB"""
    talk = strict.raw()
    talk.send(f"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {'x' * 2**20}\r\n\r\n".encode())
    assert re.match(rb"HTTP/1.[01] (401|400|431) ", talk.rest())


def test_keys_that_are_right(strict: Any) -> None:
    """F64"""
    for name, value in (
        *(("Authorization", f"Bearer {KEY}"), ("Authorization", f"bearer {KEY}"), ("x-api-key", KEY)),
        *(("Authorization", f"Bearer  {KEY} "), ("X-API-KEY", "sk-second-tenant-key")),
    ):
        assert strict.get("/v1/models", headers={"Authorization": "", name: value}).status == 200, value


# --- F60: what runs out -----------------------------------------------------------------------------------------------


def test_no_descriptors(strict: Any) -> None:
    """F60-descriptors: with as many as it has open, whoever is connected is served, and whoever comes waits until there
    are some again. The streams beside it begin anew meanwhile, and wait too."""
    api = strict.served.process.pid
    talk = strict.raw()
    time.sleep(0.2)
    taken = len(os.listdir(f"/proc/{api}/fd"))
    with limited(api, resource.RLIMIT_NOFILE, taken):
        waiting = [strict.raw(strict.request({**LONG, "max_tokens": 3})) for _ in range(4)]
        talk.send(strict.request({**LONG, "max_tokens": 5}))
        assert b'"length"' in talk.rest()
    for each in waiting:
        assert b'"length"' in each.rest()


def test_no_room_for_the_log(strict: Any) -> None:
    """F60-disk: a log that cannot be written is no reason to serve nobody."""
    api = strict.served.process.pid
    with limited(api, resource.RLIMIT_FSIZE, 0):
        said = strict.served.said
        assert [strict.complete().status for _ in range(5)] == [200] * 5
        assert strict.get("/nothing").status == 404
        assert strict.served.said == said
    assert strict.complete().status == 200
    assert strict.served.said != said


# --- F61, F62: other users and models ---------------------------------------------------------------------------------


def test_nobody_else_can_reach_the_engine(case: Any) -> None:
    """F61: its socket has no name by which it could be found, neither a file's nor an abstract one."""
    engine = case.served.engine_pid
    links = [os.readlink(entry) for entry in Path(f"/proc/{engine}/fd").iterdir()]
    own = {link.removeprefix("socket:[").rstrip("]") for link in links if link.startswith("socket:[")}
    assert own, "it talks to the API process"
    sockets = [line.split() for line in Path(f"/proc/{engine}/net/unix").read_text("utf-8").splitlines()[1:]]
    named = [fields for fields in sockets if fields[6] in own and len(fields) > 7]
    assert not named
    assert own <= {fields[6] for fields in sockets}, "no other kind of socket"


def test_one_process_after_another() -> None:
    with EngineSpawner() as spawner:
        spawner.prepare()
        child = spawner.take()
        again = spawner.take()
        assert child.process.poll() is not None
        assert child.end.recv(1) == b"", "the other end went with its process"
        child.end.close()
        again.end.close()
        spawner.prepare()
        assert again.process.poll() is not None
    prepared = spawner.take()
    prepared.end.close()
    assert prepared.process.wait(60) == 0, "nobody will ever tell it what to load"


def test_frames_that_are_none(tmp_path: Path) -> None:
    """F61: whoever should get there anyway cannot make the engine do anything but wait."""
    import msgspec

    from specserve.server.engine.messages import Abort
    from specserve.server.engine.pipe import Pipe
    from specserve.server.engine.process import Wire

    class Evil:
        def __reduce__(self) -> Any:
            return (Path(tmp_path / "evil").touch, ())

    sound = msgspec.msgpack.encode(Abort("3"))
    ours, theirs = socket.socketpair()
    other, wire = Pipe(ours), Wire(theirs)
    frames = [
        b"", b"\x00", sound[:-1], sound + b"x", b"\xff" * 2**20, pickle.dumps(Evil()), b"\x81\xa4type\xa5eval!",
        msgspec.msgpack.encode({"type": "submit", "id": 1}), msgspec.msgpack.encode([1] * 10_000),
        b"\xdd\xff\xff\xff\xff", b"\x91" * 100_000,
    ]  # fmt: skip
    for frame in [*frames, sound]:
        other.send(frame)
    heard: list[Any] = []
    while not heard:
        other.flush()
        heard += wire.commands(1000)
    wire.close()
    other.close()
    assert heard == [Abort("3")]
    assert not (tmp_path / "evil").exists()


def broken_models(folder: Path, whole: Path) -> dict[str, Path]:
    """Folders that are not to be served, each with one fault."""
    from safetensors.torch import load_file, save_file

    def made(name: str) -> Path:
        copy = folder / name
        copy.mkdir()
        for file in whole.iterdir():
            (copy / file.name).write_bytes(file.read_bytes())
        return copy

    names = ("truncated", "pickle", "auto_map", "outside", "NaN", "overflow")
    models = {name: made(name) for name in names}
    weights = models["truncated"] / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    (models["pickle"] / "model.safetensors").rename(models["pickle"] / "pytorch_model.bin")
    config = models["auto_map"] / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text("utf-8")), "auto_map": {"AutoModel": "a.B"}}), "utf-8")
    (models["outside"] / "model.safetensors").unlink()
    index = {"weight_map": {"lm_head.weight": "../truncated/model.safetensors"}}
    (models["outside"] / "model.safetensors.index.json").write_text(json.dumps(index), "utf-8")
    for name, tensor, value in (
        ("NaN", "model.layers.1.mlp.down_proj.weight", float("nan")),
        ("overflow", "model.norm.weight", 3e38),
    ):
        tensors = load_file(whole / "model.safetensors")
        tensors[tensor].view(-1)[3:7] = value
        save_file(tensors, models[name] / "model.safetensors", {"format": "pt"})
    return models


@pytest.fixture(scope="module")
def broken(padded: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return broken_models(tmp_path_factory.mktemp("broken"), padded)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        pytest.param("truncated", "is truncated", id="F62-truncated"),
        pytest.param("pickle", "pytorch_model.bin cannot be read as tensors alone", id="F62-pickle"),
        pytest.param("auto_map", "has auto_map", id="F62-auto_map"),
        pytest.param("outside", "only .safetensors files of the same folder", id="F62-outside"),
    ],
)
def test_folders_that_are_refused(broken: dict[str, Path], name: str, reason: str) -> None:
    """Before anything listens."""
    with EngineSpawner() as spawner, pytest.raises(ModelError) as refused:
        serve(
            {"model": str(broken[name]), "max_num_seqs": 4, "drafter": "none"},
            ServeOptions(port=0),
            time.perf_counter(),
            spawner,
        )
    assert reason in str(refused.value)


@pytest.fixture(scope="module")
def refusals(broken: dict[str, Path]) -> dict[str, tuple[int, str]]:
    """The status with which a server for each of three models ends, and all that it said, in one line."""

    def refusal(name: str) -> tuple[int, str]:
        options = ["--port=0", "--threads=1", "--kv-cache-gib=0.01", "--log-level=warning"]
        command = [sys.executable, "-m", "specserve", "serve", str(broken[name]), *options]
        done = subprocess.run(command, capture_output=True, timeout=280)
        return done.returncode, " ".join((done.stdout + done.stderr).decode().split())

    names = ("pickle", "NaN", "overflow")
    return dict(zip(names, in_threads([lambda name=name: refusal(name) for name in names]), strict=True))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        pytest.param("pickle", "pytorch_model.bin cannot be read as tensors alone", id="F62-pickle-served"),
        pytest.param("NaN", "down_proj.weight holds NaN or infinite numbers", id="F62-NaN"),
        pytest.param("overflow", "so its weights are broken", id="F62-overflow"),
    ],
)
def test_models_that_are_refused(refusals: dict[str, tuple[int, str]], name: str, reason: str) -> None:
    """With a status that is not 0 and one line that says why; nobody was served."""
    status, said = refusals[name]
    assert status not in (0, None)
    assert reason in said
    assert said.count("specserve: ") == 1
    assert "Traceback" not in said


# --- F54 to F59: engines that die -------------------------------------------------------------------------------------
# In this order, on one server: the last leaves none.


def test_more_blocks_than_there_are(mortal: Any, guard: Any) -> None:
    """C26: a context that the cache cannot hold is refused at the start, so a prompt either fits or is too long."""
    with guard(mortal) as case:
        blocks = case.stats()["kv_cache"]["num_blocks"]
        assert blocks * 16 < 4 * 512, "four contexts do not fit"
        assert case.complete(prompt=[5] * 511, max_tokens=1).status == 200
        reply = case.complete(prompt=[5] * (blocks * 16))
        assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")


def test_a_cache_that_is_too_small(mortal: Any, guard: Any) -> None:
    """F53: ten requests share the room of four. All are computed to their ends, and each says what it says
    alone, whatever was dropped and computed again."""
    own = {"max_tokens": 100, "logprobs": 1}
    bodies = [{**LONG, **own, "prompt": [index * 5 + 1] * (20 + index)} for index in range(10)]
    with guard(mortal) as case:
        alone = [case.complete(**body).json["choices"] for body in bodies]
        before = case.stats()["kv_cache"]["num_preemptions"]
        together = in_threads([lambda body=body: case.complete(**body) for body in bodies])
        assert [reply.json["choices"] for reply in together] == alone
        assert case.stats()["kv_cache"]["num_preemptions"] > before


def test_both_stand_still(mortal: Any) -> None:
    """F55-both: a server that was stopped itself, with its engine, finds nothing wrong when it goes on."""
    before, restarts = mortal.engine_pid, mortal.get("/stats").json["num_restarts"]
    talk = mortal.raw(request_of({**LONG, "stream": True, "n": 3}))
    with stopped(mortal.process.pid), stopped(before):
        time.sleep(2)
    text = receive_all(talk)
    mortal.until(mortal.is_idle)
    assert b"no progress" not in text
    assert (mortal.engine_pid, mortal.get("/stats").json["num_restarts"]) == (before, restarts)


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP], ids=["F54-kill-9", "F55-hang"])
def test_an_engine_that_is_lost(mortal: Any, guard: Any, known: Any, fault: int) -> None:
    """Every stream is told so and ends, who comes meanwhile shall come again, and another engine says the same."""
    mortal.until(mortal.is_idle)
    engine = mortal.engine_pid
    from_here = Path(f"/proc/{engine}")
    streams = [mortal.raw(request_of({**LONG, "stream": True, "n": 4, "max_tokens": 480})) for _ in range(6)]
    for talk in streams[:2]:
        assert talk.recv(10)
    os.kill(engine, fault)
    ends = [receive_all(talk) for talk in streams]
    for text in ends:
        assert text.count(b'data: {"error"') + text.count(b'{"error":{') >= 1 or b"[DONE]" in text
        events = [line for line in text.split(b"\n") if line.startswith(b"data: {")]
        for event in events:
            json.loads(event[6:])  # none is half
    assert any(b"The request is lost" in text for text in ends)
    engine_is_another(mortal, engine)
    assert not from_here.exists(), "no orphan"
    with guard(mortal, may_fail=True) as case:
        answers_well(case, known)


def test_no_descriptors_for_another_engine(mortal: Any, known: Any, guard: Any) -> None:
    """F60-no-descriptors-at-a-restart: one start fails, a later one does not."""
    engine, api = mortal.engine_pid, mortal.process.pid
    mortal.until(mortal.is_idle)
    with limited(api, resource.RLIMIT_NOFILE, 12):
        os.kill(engine, signal.SIGKILL)
        mortal.until(lambda: "cannot be started" in mortal.said)
    engine_is_another(mortal, engine)
    with guard(mortal, may_fail=True) as case:
        answers_well(case, known)


def test_no_memory_for_a_step(mortal: Any, known: Any, guard: Any) -> None:
    """F60-memory: an engine that may take no more answers rightly or not at all."""
    mortal.until(mortal.is_idle)
    engine = mortal.engine_pid
    body = {**LONG, "prompt": [3] * 60, "n": 2, "logprobs": 20, "echo": True, "temperature": 1, "seed": 1}
    right = mortal.post("/v1/completions", body).json["choices"]
    size = re.search(r"VmSize:\s+(\d+) kB", Path(f"/proc/{engine}/status").read_text("utf-8"))
    assert size is not None
    with limited(engine, resource.RLIMIT_AS, int(size[1]) * 1024):
        for length in (60, 200, 500):
            reply = mortal.post("/v1/completions", {**body, "prompt": [3] * length})
            if reply.status == 200 and length == 60:
                assert reply.json["choices"] == right
            assert reply.status in (200, 500, 503, 504)
    mortal.until(lambda: mortal.get("/health").status == 200, 200)
    with guard(mortal, may_fail=True) as case:
        answers_well(case, known)


def test_an_engine_that_dies_at_each_start(mortal: Any) -> None:
    """F56: after a few attempts the server ends, with a status that is not 0 and the cause; nothing is left behind."""
    engine = mortal.engine_pid
    mortal.fault.touch()
    os.kill(engine, signal.SIGKILL)
    mortal.until(lambda: mortal.get("/health").status == 503)
    assert mortal.get("/live").status == 200, "nobody kills a server whose engine is started again"
    reply = mortal.post("/v1/completions", LONG)
    assert (reply.status, reply.error["code"], reply.headers["retry-after"]) == (503, "restarting", "1")
    assert mortal.process.wait(250) not in (0, None)
    assert "ended with status 7" in mortal.said
    assert mortal.said.count("Starting another in") >= 3, "it was tried, with pauses"


# --- F57, F58: servers that end ---------------------------------------------------------------------------------------


def request_of(body: dict[str, Any]) -> bytes:
    text = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(text)}\r\n\r\n".encode() + text


def receive_all(connection: socket.socket) -> bytes:
    connection.settimeout(250)
    received = bytearray()
    try:
        while piece := connection.recv(65536):
            received += piece
    except ConnectionResetError:
        pass
    connection.close()
    return bytes(received)


def gone(pid: int) -> bool:
    try:
        return ") Z " in Path(f"/proc/{pid}/stat").read_text("utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.fixture(scope="module")
def doomed(padded: Path, serving_process: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Three servers that were started at the same time, one for each way to end, and the folder for temporary files
    that is theirs alone."""
    temporary = tmp_path_factory.mktemp("temporary")
    made: dict[str, Any] = {"temporary": temporary}
    let_go = threading.Event()
    ready = threading.Semaphore(0)
    names = ("term", "twice", "kill")

    folders = {name: tmp_path_factory.mktemp(name) for name in names}
    own: dict[str, dict[str, Any]] = {
        "term": {"drain-timeout-s": 100, "scheduling-policy": "priority"},
        "twice": {"drain-timeout-s": 100},
        "kill": {"queue-timeout-s": 0.4, "request-timeout-s": 1.5},
    }

    def run(name: str) -> None:
        options = {"max-num-seqs": 8, "max-model-len": 512, "stall-timeout-s": 1000, **own[name]}
        try:
            with serving_process(padded, folders[name], "--served-model-name=tiny", **options) as served:
                made[name] = served
                ready.release()
                let_go.wait()
        finally:
            ready.release()

    threads = [threading.Thread(target=run, args=(name,)) for name in names]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(temporary))
        for thread in threads:
            thread.start()
        for _ in names:
            ready.acquire(timeout=250)
    yield made
    let_go.set()
    for thread in threads:
        thread.join(60)


def test_priorities_that_the_operator_has_opened(doomed: dict[str, Any]) -> None:
    """Over HTTP, on the one server whose operator has. Each request takes all the room there is; which ended first says
    the server's log, as threads here may be held up."""
    served = doomed["term"]
    asked = {
        "/v1/completions": {"prompt": "x"},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    }
    ids: dict[int, str] = {}

    def ask(path: str, priority: int) -> None:
        body = {**asked[path], "n": 8, "max_tokens": 60, "temperature": 0, "ignore_eos": True, "priority": priority}
        reply = served.post(path, body)
        assert reply.status == 200, reply.body
        ids[priority] = reply.headers["x-request-id"]

    ask("/v1/completions", 7)
    threads = []
    with stopped(served.engine_pid):
        for path, priority in (("/v1/completions", 1), ("/v1/completions", 0), ("/v1/chat/completions", -1)):
            threads.append(threading.Thread(target=ask, args=(path, priority)))
            threads[-1].start()
            time.sleep(0.3)
    for thread in threads:
        thread.join(60)
    served.until(lambda: all(name in served.said for name in ids.values()))
    assert sorted(ids, key=lambda priority: served.said.index(ids[priority])) == [7, -1, 0, 1]


def test_deadlines(doomed: dict[str, Any]) -> None:
    """F52: while the engine stands still, who waits for a first step is told 503 when the queue's time is over, and who
    has begun is told so when the request's own time is: as a status, or as the last event of a stream."""
    served = doomed["kill"]
    begun = [served.raw(request_of({**LONG, "n": 4, "max_tokens": 480, "stream": stream})) for stream in (True, False)]
    assert begun[0].recv(10)
    served.until(lambda: served.get("/stats").json["num_running"] == 8 or served.is_idle())
    with stopped(served.engine_pid):
        late = [served.raw(request_of({**LONG, "stream": stream})) for stream in (True, False)]
        stream, whole = (receive_all(talk) for talk in begun)
    assert b'"timeout_error"' in stream and b"[DONE]" not in stream
    assert whole.startswith(b"HTTP/1.1 504 ") and b'"timeout_error"' in whole
    for text in (receive_all(talk) for talk in late):
        assert text.startswith(b"HTTP/1.1 503 ") and b'"queue_timeout"' in text and b"Retry-After: 1" in text
    served.until(served.is_idle)
    assert served.get("/stats").json["num_restarts"] == 0


def test_the_server_is_killed(doomed: dict[str, Any]) -> None:
    """F57: kill -9, in the middle of streams. The engine ends with it, and nothing of either lies about."""
    served = doomed["kill"]
    engine = served.engine_pid
    talk = served.raw(request_of({**LONG, "stream": True, "n": 8}))
    assert talk.recv(1)
    served.process.kill()
    served.process.wait()
    receive_all(talk)
    end = time.monotonic() + 60
    while not gone(engine) and time.monotonic() < end:
        time.sleep(0.02)
    assert gone(engine)


def test_the_server_is_asked_to_end(doomed: dict[str, Any]) -> None:
    """F58: new requests are told to go elsewhere, those that run finish, those that do not in time are told so, and the
    status is 0."""
    served = doomed["term"]
    engine = served.engine_pid
    short = [served.raw(request_of({**LONG, "stream": True, "n": 2})) for _ in range(3)]
    for talk in short:
        assert talk.recv(1)
    os.kill(engine, signal.SIGSTOP)  # so that they are there still
    served.process.send_signal(signal.SIGTERM)
    served.until(lambda: served.get("/health").status == 503)
    assert served.get("/ready").json == {"status": "draining"}
    assert (served.get("/live").status, served.get("/live").json) == (200, {"status": "draining"})
    reply = served.post("/v1/completions", LONG)
    assert (reply.status, reply.error["code"], reply.headers["retry-after"]) == (503, "draining", "1")
    os.kill(engine, signal.SIGCONT)
    assert [receive_all(talk).count(b"[DONE]") for talk in short] == [1] * 3
    assert served.process.wait(60) == 0
    assert gone(engine)
    assert "Traceback" not in served.said


def test_the_server_is_asked_twice(doomed: dict[str, Any]) -> None:
    """F58-twice: the second signal ends what the first would have let finish; the streams are told so."""
    served = doomed["twice"]
    engine = served.engine_pid
    streams = [served.raw(request_of({**LONG, "stream": True})) for _ in range(3)]
    for talk in streams:
        assert talk.recv(1)
    os.kill(engine, signal.SIGSTOP)
    late = served.raw(request_of({**LONG, "stream": False}))
    time.sleep(0.2)
    served.process.send_signal(signal.SIGTERM)
    served.until(lambda: served.get("/health").status == 503)
    served.process.send_signal(signal.SIGTERM)
    ends = [receive_all(talk) for talk in (*streams, late)]
    for text in ends:
        assert b"The server is ending" in text or b"[DONE]" in text
    assert b"The server is ending" in ends[-1] or b'"draining"' in ends[-1]
    assert served.process.wait(60) == 0
    assert gone(engine)
    assert "Traceback" not in served.said


def test_nothing_is_left(doomed: dict[str, Any]) -> None:
    """F57, F58: no file of any of them, however they ended."""
    for name, number in (("term", signal.SIGTERM), ("twice", signal.SIGTERM), ("kill", signal.SIGKILL)):
        if doomed[name].process.poll() is None:  # where the test that ends it is not run
            engine = doomed[name].engine_pid
            doomed[name].end(number)
            end = time.monotonic() + 60
            while not gone(engine) and time.monotonic() < end:
                time.sleep(0.02)
    assert list(doomed["temporary"].iterdir()) == []
