"""Work that leaves its core to others pauses while it lasts, in processes of their own: it takes SIGALRM."""

from __future__ import annotations

import subprocess
import sys

import pytest

PAUSES = """
import signal, time
from specserve.machine.pausing import pausing
with pausing():
    begun, cpu = time.monotonic(), time.thread_time()
    while (passed := time.monotonic() - begun) < 0.05:
        pass
    print(time.thread_time() - cpu < 0.98 * passed)  # a pause of 0.1 ms after each ms is a tenth of it
print(signal.getitimer(signal.ITIMER_REAL)[0])
"""
LONG_JOBS = """
import io, signal
from specserve.text import worker
class Tokenizer:
    def encode(self, text):
        print(signal.getitimer(signal.ITIMER_REAL)[0] > 0)
        return [1]
jobs = [worker.Job("x", {}, 1.0, is_long=is_long) for is_long in (True, False)]
stream = io.BufferedRWPair(io.BytesIO(b"".join(map(worker.written, jobs))), io.BytesIO())
worker._serve(stream, Tokenizer())
"""


@pytest.mark.parametrize(("program", "said"), [(PAUSES, "True 0.0"), (LONG_JOBS, "True False")])
def test_pauses(program: str, said: str) -> None:
    pytest.importorskip("specserve.kernels._native")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert " ".join(done.stdout.split()) == said
