"""Reads prompts, holds some of them out, and says in which order and how the target answers them."""

from __future__ import annotations

import gzip
import hashlib
import io
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from specserve.errors import InputError
from specserve.files import parse_json, read_bytes

_ONE_IN = 50  # prompts that are held out
_MOST_BYTES = 2**30
_GZIP = b"\x1f\x8b"


@dataclass(frozen=True)
class TrainingPrompt:
    """A user's message, and what kind of it."""

    text: str
    category: str

    @cached_property
    def digest(self) -> int:
        """64 bits of the text: the same wherever and beside whatever it stands."""
        return int.from_bytes(
            hashlib.blake2b(self.text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big"
        )


@dataclass(frozen=True)
class Prompts:
    """The prompts of a file, each text once."""

    prompts: Sequence[TrainingPrompt]

    @cached_property
    def digest(self) -> str:
        """Of all texts, in their order."""
        whole = hashlib.blake2b(digest_size=16)
        for prompt in self.prompts:
            whole.update(prompt.digest.to_bytes(8, "big"))
        return whole.hexdigest()

    @cached_property
    def held_out(self) -> frozenset[int]:
        """Indexes of prompts that are measured on and never trained on: one in 50 by its digest, and never none."""
        chosen = [i for i, prompt in enumerate(self.prompts) if prompt.digest % _ONE_IN == 0]
        return frozenset(chosen or [min(range(len(self.prompts)), key=lambda i: self.prompts[i].digest)])


@dataclass(frozen=True, slots=True)
class Job:
    """One answer to be written: to prompt number `prompt`, sampled at `temperature` with `seed`."""

    prompt: int
    temperature: float
    seed: int


class Jobs(Sequence[Job]):
    """All answers: each prompt's at each temperature. `GROUP` prompts at a time, in an order drawn once, are answered
    in as many turns as there are temperatures; a turn answers each of the group and has all temperatures in equal
    parts. From the second turn on the engine finds the prompts in its prefix cache, which keeps a few hundred. What a
    job is follows from its number, the seed and the prompts alone."""

    GROUP = 128

    def __init__(self, prompts: Prompts, temperatures: Sequence[float], seed: int) -> None:
        self._prompts = prompts
        self._temperatures = temperatures
        self._seed = seed
        self._order = np.random.Generator(np.random.PCG64([seed, 0])).permutation(len(prompts.prompts))

    def __len__(self) -> int:
        return len(self._order) * len(self._temperatures)

    def __getitem__(self, number: int) -> Job:  # type: ignore[override]  # nobody slices it
        if not 0 <= number < len(self):
            raise IndexError(number)
        group, within = divmod(number, self.GROUP * len(self._temperatures))
        members = self._order[group * self.GROUP : (group + 1) * self.GROUP]
        turn, place = divmod(within, len(members))
        prompt = int(members[place])
        temperature = self._temperatures[(place + turn) % len(self._temperatures)]
        seed = digest64(f"{self._seed}/{turn}/{self._prompts.prompts[prompt].digest}") >> 1
        return Job(prompt, temperature, seed)


def digest64(text: str) -> int:
    """64 bits of a text, which may hold lone surrogates."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")


def read_prompts(path: Path) -> Prompts:
    """The prompts of JSON lines, gzipped or not, each with `prompt` or `turns` (the first is asked) and perhaps
    `category`. Raises InputError naming the file and the line."""
    try:
        content = read_bytes(path, _MOST_BYTES, pipes=True)
        text = (_unpacked(content) if content.startswith(_GZIP) else content).decode("utf-8")
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise InputError(f"--prompts: {path} cannot be read: {error}.", "prompts") from error
    found: dict[str, TrainingPrompt] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            prompt = _prompt(line, f"{path}, line {number}")
            found.setdefault(prompt.text, prompt)
    if len(found) < 2:
        raise InputError(
            f"--prompts: {path} has {len(found)} prompts; one is held out, so it takes at least 2.", "prompts"
        )
    return Prompts(list(found.values()))


def _unpacked(content: bytes) -> bytes:
    """At most so many bytes too: a file of a MiB may become a GiB."""
    with gzip.GzipFile(fileobj=io.BytesIO(content)) as stream:
        unpacked = stream.read(_MOST_BYTES + 1)
    if len(unpacked) > _MOST_BYTES:
        raise OSError(f"unpacked it has more than {_MOST_BYTES:,} bytes, and no more is read")
    return unpacked


def _prompt(line: str, where: str) -> TrainingPrompt:
    try:
        record = parse_json(line)
        text = record["prompt"] if "prompt" in record else record["turns"][0]
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise InputError(f"--prompts: {where} is no JSON object with prompt or turns: {error!r}.", "prompts") from error
    if not isinstance(text, str) or not text:
        raise InputError(f"--prompts: {where}: the prompt is {text!r}; it must be text.", "prompts")
    return TrainingPrompt(text, str(record.get("category", "all")))
