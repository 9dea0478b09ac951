"""A process that computes a part of a model, as the command that has started it sees it: ended, stopped, continued."""

from __future__ import annotations

import signal
import subprocess
import threading
from collections.abc import Iterator

import pytest

from specserve.cli import rank as module


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[bytes]]:
    monkeypatch.setattr(module, "_LOOK_S", 0.01)
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_how_it_ended(child: subprocess.Popen[bytes], number: signal.Signals) -> None:
    threading.Timer(0.05, child.send_signal, [number]).start()
    assert module.ended(child) == -number


def test_one_that_is_stopped_and_stays_so_is_killed(
    child: subprocess.Popen[bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    child.send_signal(signal.SIGSTOP)
    assert module.ended(child) == -signal.SIGKILL
    assert "as it was stopped, and is killed" in capsys.readouterr().err


def test_one_that_goes_on_is_left_alone(child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    """However often it is stopped: it is looked at 15 times each time."""
    number = 0

    def pause(_: float) -> None:
        nonlocal number
        number += 1
        if number % 15 == 0:
            child.send_signal(signal.SIGCONT)
            then = signal.SIGSTOP if number < 45 else signal.SIGTERM
            threading.Timer(0.05, child.send_signal, [then]).start()

    monkeypatch.setattr(module.time, "sleep", pause)
    child.send_signal(signal.SIGSTOP)
    assert module.ended(child) == -signal.SIGTERM
    assert number == 45
