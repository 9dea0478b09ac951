"""What every process expects to find at its start and may not: open standard streams, and a working folder."""

from __future__ import annotations

import os
import sys

_OPEN = {"stdin": "r", "stdout": "w", "stderr": "w"}  # by descriptor


def open_standard_streams() -> None:
    """Opens /dev/null in place of standard streams that are closed. The next file or socket would get the number of
    one, and whatever is printed would go there."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) < len(_OPEN):
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    for number, (name, mode) in enumerate(_OPEN.items()):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, mode, closefd=False))


def leave_removed_folder() -> None:
    """Goes to / from a working folder that was removed, and says so: libraries of torch do not load there."""
    try:
        os.getcwd()
    except FileNotFoundError:
        os.chdir("/")
        print("specserve: The working folder was removed. Relative paths begin at / now.", file=sys.stderr)
