"""Reads files that others made: whole, of at most so many bytes, JSON of bounded depth; and makes whatever goes wrong
with a model's files an error of one line that names them."""

from __future__ import annotations

import json
import mmap
import os
import stat
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from specserve.errors import CapacityError, ModelError, SpecserveError

MOST_JSON_DEPTH = 64
_MIB = 2**20
_MOST_SHOWN = 1000  # characters of an error: a name in a file may have millions
# What only a mistake of ours raises. A value of the wrong type in a file may raise any other.
_OURS = (AssertionError, NameError, ImportError, SyntaxError)
_KINDS = {stat.S_ISDIR: "a folder", stat.S_ISFIFO: "a pipe", stat.S_ISSOCK: "a socket", stat.S_ISCHR: "a device"}


def open_file(path: Path, pipes: bool = False) -> BinaryIO:
    """A regular file to read, or with `pipes` a pipe too, as shells make of `<(command)`. A pipe or a device in the
    place of a model's file would be waited for, or read without end. Raises OSError that says what it is."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOCTTY | (0 if pipes else os.O_NONBLOCK)  # a pipe waits for its writer
    descriptor = os.open(path, flags)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode) or (pipes and stat.S_ISFIFO(mode)):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    kind = next((name for test, name in _KINDS.items() if test(mode)), "no file")
    raise OSError(f"it is {kind}, and only regular files{' and pipes' if pipes else ''} are read")


def check_regular(path: Path) -> None:
    """Raise OSError for what `open_file` does not open. For files that a library opens."""
    open_file(path).close()


def map_file(path: Path) -> memoryview:
    """The content of a file, memory-mapped to be read. Raises OSError."""
    with open_file(path) as stream:
        size = os.fstat(stream.fileno()).st_size
        return memoryview(mmap.mmap(stream.fileno(), size, access=mmap.ACCESS_READ) if size else b"")


def read_bytes(path: Path, most: int, pipes: bool = False) -> bytes:
    """The content of a file. Raises OSError, also for one of more than `most` bytes, of which no more is read."""
    with open_file(path, pipes) as stream:
        size = os.fstat(stream.fileno()).st_size
        pieces, count = list[bytes](), 0
        while size <= most and count <= most and (piece := stream.read(max(_MIB, size + 1 - count))):
            pieces.append(piece)
            count += len(piece)
    if max(size, count) > most:
        raise OSError(f"it has more than {_in_words(most)}, and no more is read")
    return b"".join(pieces)


def read_text(path: Path, most: int, pipes: bool = False) -> str:
    """The UTF-8 text of a file, with line breaks as in Python. Raises OSError and UnicodeDecodeError."""
    return read_bytes(path, most, pipes).decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")


def read_json(path: Path, most: int, pipes: bool = False) -> Any:
    """What the JSON in a file says. Raises OSError and ValueError."""
    return parse_json(read_text(path, most, pipes))


def parse_json(text: str) -> Any:
    """What a JSON text says, of at most MOST_JSON_DEPTH levels: who walks over it need not fear for the stack. Raises
    ValueError."""
    try:
        value = json.loads(text)
    except RecursionError:
        value, is_deep = None, True
    else:
        is_deep = _is_deeper(value, MOST_JSON_DEPTH)
    if is_deep:
        raise ValueError(f"it is nested more than {MOST_JSON_DEPTH} levels deep")
    return value


def _is_deeper(value: Any, limit: int) -> bool:
    level = [value]
    for _ in range(limit):
        inner = (each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list))
        level = [each for group in inner for each in group if isinstance(each, dict | list)]
        if not level:
            return False
    return True


@contextmanager
def reading(place: object) -> Iterator[None]:
    """What the block raises, which reads the files of a model at `place`, becomes a ModelError, or a CapacityError
    where memory does not suffice: one line, not too long, that names the place. Mistakes of ours stay what they are,
    and the error's cause is what was raised."""
    try:
        yield
    except ModelError as error:
        message = _one_line(str(error) if str(error).startswith(str(place)) else f"{place}: {error}")
        if message == str(error):
            raise
        raise ModelError(message) from error
    except SpecserveError:
        raise
    except MemoryError as error:
        raise CapacityError(_one_line(f"{place} cannot be read: it takes more memory than there is.")) from error
    except BaseException as error:
        if isinstance(error, _OURS) or not (isinstance(error, Exception) or _is_panic(error)):
            raise
        raise ModelError(_one_line(f"{place} cannot be read: {_reason(error)}.")) from error


def _is_panic(error: BaseException) -> bool:
    """Of Rust code in tokenizers and safetensors."""
    return type(error).__name__ == "PanicException"


def _reason(error: BaseException) -> str:
    if isinstance(error, RecursionError):
        return "something in it is nested too deeply"
    if isinstance(error, OSError):
        return str(error.strerror or error)
    return f"something in it is damaged, or a value of the wrong kind or size ({type(error).__name__}: {error})"


def _one_line(text: str) -> str:
    if len(text) > _MOST_SHOWN:
        text = f"{text[: _MOST_SHOWN * 2 // 3]} ... {text[-_MOST_SHOWN // 3 :]}"
    shown = " ".join(text.split())
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in shown)


def _in_words(num_bytes: int) -> str:
    return f"{num_bytes // _MIB:,} MiB" if num_bytes >= _MIB else f"{num_bytes:,} bytes"


def locked(path: Path) -> AbstractContextManager[object]:
    """Within it, of all processes that ask, one at a time: the lock is a file beside `path`, .NAME.lock, and goes with
    its process. Raises OSError on entering where there is none to be had, NotImplementedError where the file system
    has no locks."""
    from filelock import FileLock  # takes a tenth of a second, which few starts need

    return FileLock(path.with_name(f".{path.name}.lock"))
