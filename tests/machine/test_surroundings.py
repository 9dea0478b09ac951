"""Programs that are started with closed streams, or where there is no folder any more."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

LOOK = """
import json, os, socket, sys
from specserve.machine.surroundings import leave_removed_folder, open_standard_streams
open_standard_streams()
leave_removed_folder()
made = socket.socket()
print("to nobody"); print("to nobody", file=sys.stderr)
found = {
    "descriptors": [os.readlink(f"/proc/self/fd/{n}") for n in range(3)],
    "socket": made.fileno(),
    "inherited": [os.get_inheritable(n) for n in range(3)],
    "streams": [s.fileno() for s in (sys.stdin, sys.stdout, sys.stderr)],
    "folder": os.getcwd(),
}
open(sys.argv[1], "w").write(json.dumps(found))
"""


def started(path: Path, closed: tuple[int, ...], folder: Path) -> dict[str, Any]:
    """What a program finds that is started with these descriptors closed."""
    shell = " ".join(f"{number}<&-" for number in closed)
    command = ["sh", "-c", f'exec "$@" {shell}', "sh", sys.executable, "-c", LOOK, str(path)]
    subprocess.run(command, check=True, timeout=60, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True)
    found: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return found


@pytest.mark.parametrize("closed", [(), (0,), (1,), (2,), (0, 2), (0, 1, 2)])
def test_closed_streams_are_opened(closed: tuple[int, ...], tmp_path: Path) -> None:
    found = started(tmp_path / "found", closed, tmp_path)
    assert [found["descriptors"][number] for number in closed] == ["/dev/null"] * len(closed)
    assert (found["inherited"], found["streams"]) == ([True] * 3, [0, 1, 2])
    assert found["socket"] > 2
    assert found["folder"] == str(tmp_path)


def test_a_removed_folder_is_left_and_told(tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    script = f'cd {folder} && rmdir {folder} && exec {sys.executable} -c "$0" {tmp_path / "found"}'
    done = subprocess.run(["sh", "-c", script, LOOK], check=True, timeout=60, capture_output=True, text=True)
    assert json.loads((tmp_path / "found").read_text("utf-8"))["folder"] == "/"
    assert "The working folder was removed" in done.stderr


def test_no_folder_that_is_there_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from specserve.machine.surroundings import leave_removed_folder

    monkeypatch.chdir(tmp_path)
    leave_removed_folder()
    assert os.getcwd() == str(tmp_path)
