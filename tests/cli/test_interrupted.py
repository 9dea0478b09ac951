"""Ctrl-C: every command that takes long keeps what it has, says what that is, and ends with 130. The signal is a real
one, in this process at a known place, or for a process of its own at a terminal."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from specserve.bench import profile, quality, verify_cost
from specserve.cli.main import run
from specserve.llm import LLM
from specserve.structured import suite
from specserve.testing import write_tiny_model
from specserve.train.loop import Training
from specserve.train.text import INDEX, WrittenText

Outcome = tuple[int, str, str]
Run = Callable[..., Outcome]
SMALL = ("--dtype", "float32", "--kv-cache-gib", "0.01", "--max-model-len", "1024")
STEPS = (*SMALL, "--context", "20", "--repeats", "9", "--json", "out.json")
TRAINING = {
    "--max-tokens": "16",
    "--max-length": "96",
    "--temperature": "0",
    "--streams": "4",
    "--depth": "2",
    "--draft-vocab-size": "200",
    "--batch-tokens": "160",
    "--epochs": "1",
    "--device": "cpu",
    "--threads": "1",
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("interrupted") / "tiny", "llama"))


@pytest.fixture
def specserve(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Runs the command line in an empty folder; gives status, standard output and standard error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SPECSERVE_HOME", str(tmp_path / "home"))

    def call(*arguments: str) -> Outcome:
        status = run(arguments)
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return status, captured.out, captured.err

    return call


@pytest.fixture
def ctrl_c(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`ctrl_c(place, name, call, times)`: so many SIGINTs when place.name is called for the `call`-th time."""

    def at(place: Any, name: str, call: int, times: int = 1) -> None:
        plain, count = getattr(place, name), 0

        def called(*arguments: Any, **named: Any) -> Any:
            nonlocal count
            count += 1
            for _ in range(times if count == call else 0):
                os.kill(os.getpid(), signal.SIGINT)
            return plain(*arguments, **named)

        monkeypatch.setattr(place, name, called)

    return at


def written(name: str = "out.json") -> Any:
    return json.loads(Path(name).read_text("utf-8"))


# --- bench ------------------------------------------------------------------------------------------------------------


def test_verify_cost_keeps_whole_rounds(
    specserve: Run, tiny: str, ctrl_c: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify_cost, "read_bandwidth", lambda ops: 4e9)
    ctrl_c(verify_cost, "read_bandwidth", verify_cost.WARM_UP_ROUNDS + 3)  # the round is not whole yet
    status, out, _ = specserve("bench", "verify-cost", "--model", tiny, *STEPS, "--rows", "1,2")
    assert status == 130
    assert out.endswith("Interrupted: the figures are of 2 of 9 rounds.\n")
    assert (written()["interrupted"], written()["repeats"], written()["rows"]) == (True, 2, [1, 2])


def test_profile_keeps_the_steps_before(
    specserve: Run, tiny: str, ctrl_c: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile, "read_bandwidth", lambda ops: 4e9)
    ctrl_c(profile, "_add", 3)  # what has begun to be added is added
    status, out, _ = specserve("bench", "profile", "--model", tiny, *STEPS)
    assert status == 130
    assert out.endswith("Interrupted: the figures are of 3 of 9 steps.\n")
    assert (written()["interrupted"], written()["repeats"]) == (True, 3)
    assert sum(part["share"] for part in written()["parts"]) == pytest.approx(1)


def test_quality_keeps_whole_runs(specserve: Run, tiny: str, ctrl_c: Callable[..., None]) -> None:
    Path("text").write_text("The stone lies still. " * 40)
    flags = ("--text", "text", "--tokens", "120", "--window", "60", "--kv-cache-gib", "0.01", "--json", "out.json")
    ctrl_c(quality, "_score", 3)  # float32, none, int8
    status, out, _ = specserve("bench", "quality", "--model", tiny, *flags, "--quantization", "none,int8")
    assert status == 130
    assert out.endswith("Interrupted: the figures are of 1 of 2 kinds of weights.\n")
    assert written()["interrupted"]
    assert [each["quantization"] for each in written()["runs"]] == ["none"]


def test_grammar_check_keeps_the_schemas_before(specserve: Run, tiny: str, ctrl_c: Callable[..., None]) -> None:
    entry = {"schema": {"type": "integer"}, "tests": [{"data": 1, "valid": True}, {"data": "a", "valid": False}]}
    Path("suite.json").write_text(json.dumps([entry] * 5))
    ctrl_c(suite, "_checked", 3)
    status, out, _ = specserve("grammar", "check", "suite.json", "--model", tiny, "--json", "out.json")
    assert status == 130
    assert out.endswith("Interrupted: the figures are of 2 of 5 schemas.\n")
    assert (written()["interrupted"], len(written()["groups"])) == (True, 2)


@pytest.mark.parametrize(
    ("command", "place", "name"),
    [
        (("verify-cost", "--rows", "1,2"), verify_cost, "read_bandwidth"),
        (("profile",), profile, "_add"),
        (("quality", "--quantization", "none"), quality, "_score"),
    ],
)
def test_before_the_first_figures_nothing_is_written(
    specserve: Run, tiny: str, ctrl_c: Callable[..., None], command: tuple[str, ...], place: Any, name: str
) -> None:
    Path("text").write_text("The stone lies still. " * 40)
    ctrl_c(place, name, 1, times=2)  # the second does not wait
    flags = ("--model", tiny, "--text", "text", "--kv-cache-gib", "0.01", "--json", "out.json")
    assert specserve("bench", *command, *flags)[:2] == (130, "")
    assert not Path("out.json").exists()


def test_bench_at_a_terminal(tiny: str, tmp_path: Path) -> None:
    flags = ("--model", tiny, *SMALL, "--limit", "2", "--repeats", "2000", "--max-tokens", "8")
    with terminal(tmp_path, "bench", "--drafter", "ngram", *flags, "--json", "out.json") as process:
        process.until(lambda: re.search(r"[1-9]\d/8000", process.shown()) is not None)
        process.interrupt()
    figures = written(str(tmp_path / "out.json"))
    assert (process.status, figures["interrupted"]) == (130, True)
    first, second = figures["runs"]
    assert first["output_tokens"] == second["output_tokens"] > 0
    assert "Interrupted: the figures are of " in process.out()
    assert "Traceback" not in process.shown()


# --- generate ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_json", [False, True])
def test_generate_keeps_answers_that_had_ended(
    specserve: Run, tiny: str, ctrl_c: Callable[..., None], is_json: bool
) -> None:
    """One runs after the other, and the third has begun."""
    prompts = ("one", "two", "three", "four")
    flags = ("--model", tiny, *SMALL, "--max-num-seqs", "1", "--max-tokens", "8", "--ignore-eos", "--drafter", "none")
    flags += ("--temperature", "0")
    json_flag = ("--json",) if is_json else ()
    whole = specserve("generate", *prompts, *flags, *json_flag)[1].splitlines(keepends=True)
    ctrl_c(LLM, "_step", 20)
    status, out, err = specserve("generate", *prompts, *flags, *json_flag)
    assert status == 130
    assert err.endswith("Interrupted: 2 of 4 prompts were answered to the end.\n")
    if is_json:
        texts = [[json.loads(line)["text"] for line in lines] for lines in (out.splitlines(), whole)]
        assert texts[0] == texts[1][:2]
    else:
        assert out and "".join(whole).startswith(out)


# --- train ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def training(tiny: str) -> Callable[[str], list[str]]:
    """The command that trains a head of the same text, in a folder of its own; in the working folder of `specserve`."""

    def command(out: str) -> list[str]:
        lines = [json.dumps({"prompt": f"Tell of the {number}th one."}) for number in range(24)]
        Path("prompts.jsonl").write_text("\n".join(lines) + "\n", "utf-8")
        flags = {"--model": tiny, "--prompts": "prompts.jsonl", "--out": out, "--text": "text", **TRAINING}
        return ["train", "eagle", *(part for pair in flags.items() for part in pair)]

    return command


def test_train_saves_the_step_and_goes_on_from_there(
    specserve: Run, training: Callable[[str], list[str]], ctrl_c: Callable[..., None]
) -> None:
    """The step that runs is finished, though checkpoints are minutes apart; what comes is what would have come."""
    assert specserve(*training("whole"))[0] == 0
    ctrl_c(Training, "_one_step", 4)
    status, out, err = specserve(*training("head"))
    assert (status, out) == (130, "")
    num_steps = len(Path("whole/curve.jsonl").read_text().splitlines())
    assert f"Interrupted: step 4 of {num_steps} is kept in head. The same command goes on from there." in err
    assert specserve(*training("head"))[0] == 0
    assert Path("head/curve.jsonl").read_bytes() == Path("whole/curve.jsonl").read_bytes()
    assert Path("head/model.safetensors").read_bytes() == Path("whole/model.safetensors").read_bytes()


def test_train_that_is_interrupted_twice_keeps_the_checkpoint_before(
    specserve: Run, training: Callable[[str], list[str]], ctrl_c: Callable[..., None]
) -> None:
    ctrl_c(Training, "_one_step", 4, times=2)
    status, _, err = specserve(*training("head"))
    assert status == 130
    assert "Interrupted: the text is kept in head. The same command goes on from there." in err
    assert not Path("head/checkpoint.pt").exists()


def test_train_keeps_answers_that_were_written(
    specserve: Run, training: Callable[[str], list[str]], ctrl_c: Callable[..., None]
) -> None:
    ctrl_c(WrittenText, "append", 5)
    status, _, err = specserve(*training("head"))
    assert status == 130
    assert "in text are kept. The same command goes on from there." in err
    kept = int(err.partition("Interrupted: ")[2].partition(" answers")[0])
    assert 5 <= kept < 24
    before = Path("text/index.bin").read_bytes()
    assert len(before) == kept * INDEX.itemsize
    status, _, err = specserve(*training("head"))
    assert status == 0, err
    assert "head and RECIPE.md: head" in err
    assert Path("text/index.bin").read_bytes().startswith(before)


# --- a process at a terminal ------------------------------------------------------------------------------------------


class Process:
    """specserve with standard error at a terminal, and standard output in a file."""

    status: int

    def __init__(self, folder: Path, *arguments: str) -> None:
        self._screen, end = pty.openpty()
        os.set_blocking(self._screen, False)
        self._out, self._shown = folder / "stdout", b""
        command = [sys.executable, "-m", "specserve", *arguments]
        with self._out.open("wb") as out:
            self._process = subprocess.Popen(
                command, cwd=folder, stdout=out, stderr=end, env=os.environ | {"COLUMNS": "100", "TERM": "xterm"}
            )
        os.close(end)

    def shown(self) -> str:
        try:
            while piece := os.read(self._screen, 2**16):
                self._shown += piece
        except OSError:  # nothing more now, or nothing more at all
            pass
        return self._shown.decode()

    def out(self) -> str:
        return self._out.read_text("utf-8")

    def until(self, condition: Callable[[], bool], seconds: float = 60) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert self._process.poll() is None, self.shown()[-500:]
            assert time.monotonic() < end, self.shown()[-500:]
            time.sleep(0.02)

    def interrupt(self) -> None:
        self._process.send_signal(signal.SIGINT)
        while self._process.poll() is None:
            self.shown()  # a terminal that nobody reads is full at some time
            time.sleep(0.02)
        self.status = self._process.returncode

    def close(self) -> None:
        self._process.kill()  # if it has not ended
        self._process.wait()
        os.close(self._screen)


@contextmanager
def terminal(folder: Path, *arguments: str) -> Iterator[Process]:
    process = Process(folder, *arguments)
    try:
        yield process
        process.shown()
    finally:
        process.close()
