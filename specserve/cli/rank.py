"""`specserve rank`: computes a part of a model that is served on another host."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from specserve.cli.options import GROUPS, Model
from specserve.config import DEFAULT_MODEL
from specserve.errors import ConfigError
from specserve.machine.cores import default_threads
from specserve.machine.lifeline import without_interrupts

_ENGINE, _AGAIN_S = GROUPS["Engine"], 1.0
_STOPPED_LOOKS, _LOOK_S = 20, 0.5  # 10 s: about what a server waits for an engine that does not move


def rank(
    model: Model = DEFAULT_MODEL,
    *,
    join: Annotated[str, Parameter(group=_ENGINE, help="HOST:PORT, the --ranks-listen of the model's first process.")],
    secret_file: Annotated[
        Path, Parameter(group=_ENGINE, help="File with the secret that both know; at least 16 characters.")
    ],
    threads: Annotated[
        int | None, Parameter(group=_ENGINE, help="CPU threads [default: the cores it may use].")
    ] = None,
) -> None:
    """Compute a part of a model whose first process is on another host (--tensor-parallel-size with --ranks-listen),
    until SIGINT or SIGTERM. When that one ends, wait for the next."""
    from specserve.parallel.address import Address
    from specserve.parallel.security import read_secret

    read_secret(secret_file, "--secret-file")
    where = str(Address.parse(join, "--join"))
    if threads is not None and threads < 1:
        raise ConfigError(f"--threads is {threads}; it must be at least 1.")
    given = [where, str(secret_file), model, str(threads or default_threads()), str(os.getpid())]
    while True:
        # A process for each model that it joins: nothing is left of one when the next begins.
        with without_interrupts():
            process = subprocess.Popen([sys.executable, "-m", "specserve.parallel.joined", *given])
        status = ended(process)
        if status > 0:
            sys.exit(status)
        if status < 0:
            print(f"specserve: Signal {-status} has ended the process; another one joins.", file=sys.stderr)
            time.sleep(_AGAIN_S)


def ended(process: subprocess.Popen[bytes]) -> int:
    """The status of a child, once it has ended. One that is stopped and does not go on within 10 s is killed: the
    model's other processes have given it up by then, and wait for another."""
    looks = 0  # at one that stands still; they are counted as Ctrl-Z stops this process, too
    while True:
        how = os.WEXITED | os.WSTOPPED | os.WNOWAIT | (os.WNOHANG if looks else 0)
        seen = os.waitid(os.P_PID, process.pid, how)
        if seen is None:  # it goes on
            looks = 0
        elif seen.si_code != os.CLD_STOPPED:
            return process.wait()
        elif looks == _STOPPED_LOOKS:
            print("specserve: The process stands still, as it was stopped, and is killed.", file=sys.stderr)
            process.kill()
            return process.wait()
        else:
            looks += 1
            time.sleep(_LOOK_S)
