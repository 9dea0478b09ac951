"""Frames in memory that another process reads: whole, unchanged, and gone when they are let go of."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from specserve.parallel.frame import TransferError
from specserve.parallel.shared_frames import SharedFrames, read_shared


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_another_process_reads_what_was_written() -> None:
    pieces = [random.Random(i).randbytes(i % 7 * 1000) for i in range(2000)]
    frames = SharedFrames()
    path, size = frames.put("r", pieces)
    assert size == sum(map(len, pieces))
    code = "import sys; from specserve.parallel.shared_frames import read_shared\n"
    code += f"sys.stdout.buffer.write(read_shared({path!r}, {size}))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == b"".join(pieces)
    assert read_shared(path, size) == b"".join(pieces)
    frames.close()


def test_nothing_is_left_of_frames_that_were_let_go() -> None:
    before = num_descriptors()
    frames = SharedFrames()
    for i in range(20):
        path, size = frames.put(f"r{i % 4}", [bytes(10_000)])
    kept = read_shared(path, size)
    assert len(frames) == 4
    frames.drop("r0")
    frames.drop("r0")
    frames.drop("unknown")
    frames.close()
    assert len(frames) == 0
    assert kept == bytes(10_000), "who reads may go on"
    with pytest.raises(FileNotFoundError):
        read_shared(path, size)
    del kept
    assert num_descriptors() == before


def test_what_is_read_cannot_change(tmp_path: Path) -> None:
    frames = SharedFrames()
    path, size = frames.put("r", [b"numbers"])
    descriptor = os.open(path, os.O_RDWR)
    with pytest.raises(PermissionError):
        os.write(descriptor, b"x")
    with pytest.raises(PermissionError):
        os.ftruncate(descriptor, 1)
    os.close(descriptor)
    for wrong in (size + 1, size - 1, 0):
        with pytest.raises(TransferError, match="not what was said"):
            read_shared(path, wrong)
    other = tmp_path / "file"
    other.write_bytes(b"numbers")
    with pytest.raises(TransferError, match="not what was said"):
        read_shared(str(other), size)
    pipe, end = os.pipe()
    with pytest.raises(TransferError, match="not what was said"):
        read_shared(f"/proc/self/fd/{pipe}", size)
    os.close(pipe)
    os.close(end)
    frames.close()
