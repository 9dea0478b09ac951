"""Cached prefixes from engine to engine: what one has computed of a prompt, another need not compute.

Only between steps, on the thread that calls Engine.step: blocks are read and written where the cache says they lie.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence as Many
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np

from specserve.adapters import AdapterInfo, LoadedAdapter
from specserve.cache import prefix
from specserve.cache.cache import KVCache
from specserve.cache.storage import KVShape
from specserve.errors import ConfigError
from specserve.models.spec import ModelSpec
from specserve.ops import Ops
from specserve.parallel.frame import (
    MOST_TOKENS,
    DType,
    Header,
    TransferCode,
    TransferError,
    decode,
    parts,
    token_bytes,
)
from specserve.runtime.executor import Executor
from specserve.types import Sequence

_log = logging.getLogger(__name__)
_WEIGHTS = ("config.json", "quant*_config.json", "*.safetensors", "*.bin", "*.pt", "*.gguf")
# By dtype: numbers as integers, and the bits of the exponent, which are all set in what is NaN or infinite.
_EXPONENTS = {"float32": ("<u4", 0x7F800000), "bfloat16": ("<u2", 0x7F80), "float16": ("<u2", 0x7C00)}


def digest_of(sources: Iterable[tuple[str, Path]]) -> str:
    """Of models by what reads them and the folder they are read from, hex: the same files give the same one wherever
    they lie. Reads them all, at some hundred MB a second."""
    whole = hashlib.sha256()
    for kind, folder in sources:
        whole.update(f"{kind}\0".encode())
        for path in sorted({path for pattern in _WEIGHTS for path in folder.glob(pattern)}):
            with path.open("rb") as file:
                whole.update(f"{path.name}\0".encode() + hashlib.file_digest(file, "sha256").digest())
    return whole.hexdigest()


@dataclass(frozen=True, slots=True)
class KVFormat:
    """What the bits of an engine's KV depend on, beside tokens, salt and adapter, and how large they are: fields as in
    Header."""

    model: str
    numerics: str
    dtype: DType
    target: list[tuple[int, int]]
    draft: list[tuple[int, int]]
    head: str

    @classmethod
    def of(
        cls,
        folder: Path,
        ops: Ops,
        target: ModelSpec,
        draft: list[KVShape],
        heads: Iterable[tuple[str, Path]],
        width: int = 1,
    ) -> KVFormat:
        """Of the whole target in a folder, whose layers so many processes compute together, and of what drafts with KV
        of its own, with the folders that it was read from."""
        together = f"--tensor-parallel-size {width}" if width > 1 else ""  # which adds in another order
        words = ops.name, ops.instruction_set, str(ops.dtype).removeprefix("torch."), ops.quantization, target.note
        return cls(
            model=digest_of([("target", folder)]),
            numerics=" ".join(word for word in (*words, together) if word),
            dtype=msgspec.convert(str(ops.kv_dtype).removeprefix("torch."), DType),
            target=[(*shape,) for shape in target.kv_shapes],
            draft=[(*shape,) for shape in draft],
            head=digest_of(heads) if draft else "",
        )


def _sizes(shapes: list[tuple[int, int]]) -> str:
    """In words, the same for the same shapes alone."""
    runs = [(shape, len(list(alike))) for shape, alike in itertools.groupby(shapes)]
    return ", ".join(f"{count} layers of {heads} heads of {width}" for (heads, width), count in runs)


class KnownAdapters(Protocol):
    """Those that are loaded; engine.adapters.Adapters says what is what."""

    @property
    def listed(self) -> Mapping[str, AdapterInfo]: ...
    def find(self, name: str) -> LoadedAdapter: ...


class PrefixTransfer:
    """Makes frames of the prefixes that an engine has cached, and caches those of others. `head_drafts`: whether what
    wrote `format.head`'s layers still drafts; where it does not they are nobody's.

    A frame serves the requests alone that could have used the blocks where it comes from: those with the same model,
    numerics, salt and adapter. KV of a draft head goes along as far as it is there, and is dropped by an engine with
    another head, or none."""

    def __init__(
        self,
        cache: KVCache,
        executor: Executor,
        adapters: KnownAdapters,
        format: KVFormat,
        head_drafts: Callable[[], bool],
    ) -> None:
        if not cache.prefix_caching:
            raise ConfigError("Prefixes are handed on from the prefix cache, and prefix_caching is off. Switch it on.")
        self.format = format
        self._cache, self._executor, self._adapters, self._head_drafts = cache, executor, adapters, head_drafts
        self._dropped = ""  # the head whose KV was dropped last

    def export_prefix(self, tokens: Many[int], salt: bytes = b"", adapter: str | None = None) -> bytes | None:
        """A frame of the full blocks that are cached of a prompt's first tokens, None where there are none. Raises
        UnknownAdapterError, and TransferError for more than a frame may hold."""
        found = self.export_parts(tokens, salt, adapter)
        return None if found is None else b"".join(found)

    def export_parts(
        self, tokens: Many[int], salt: bytes = b"", adapter: str | None = None, first_block: int = 0
    ) -> list[bytes] | None:
        """As `export_prefix`, in pieces and without the blocks before `first_block`."""
        digest = None if adapter is None else self._adapters.find(adapter).digest
        salted, size, pool = prefix.salted(salt, digest), self._cache.block_size, self._cache.pool
        blocks: list[int] = []
        for name in self._names(salted, tokens, min(len(tokens), MOST_TOKENS) // size):
            block = pool.find(name)
            if block is None:
                break
            blocks.append(block)
        if len(blocks) <= first_block:
            return None
        num_drafted = next((i for i, block in enumerate(blocks) if not pool.drafted[block]), len(blocks))
        num_drafted *= bool(self._head())
        header = Header(
            model=self.format.model,
            numerics=self.format.numerics,
            dtype=self.format.dtype,
            block_size=size,
            salt=salt,
            adapter="" if digest is None else digest.hex(),
            tokens=token_bytes(tokens[: len(blocks) * size + 1]),
            digests=list(prefix.chain(salted, tokens, size, len(blocks))),
            target=self.format.target,
            draft=self.format.draft,
            head=self._head(),
            num_drafted=num_drafted * size,
            num_skipped=first_block * size,
        )
        read = self._executor.read_blocks(blocks[first_block:])
        return parts(header, (block[:size] for block, size in zip(read, header.block_sizes(), strict=True)))

    def import_prefix(self, frame: bytes) -> int:
        """Cache the prefix of a frame, as far as blocks are free; returns how many of its tokens are cached then. What
        is cached already is not written again. Raises TransferError, and nothing was written then."""
        header, data = decode(frame)
        self._check(header)
        if header.adapter and header.adapter not in {info.digest for info in self._adapters.listed.values()}:
            raise TransferError(
                "adapter", f"The frame is of the adapter with the digest {header.adapter}, which is not loaded here."
            )
        if len(header.digests) > self._cache.num_blocks:
            raise TransferError(
                "too_long", f"The frame has {len(header.digests)} blocks; the cache has {self._cache.num_blocks}."
            )
        adapter = bytes.fromhex(header.adapter) if header.adapter else None
        salted, tokens, size = prefix.salted(header.salt, adapter), header.token_ids, self._cache.block_size
        if list(prefix.chain(salted, tokens, size, len(header.digests))) != header.digests:
            raise TransferError(
                "corrupt", "The frame's blocks are named otherwise than its tokens, salt and adapter say."
            )
        for block in data:
            self._check_finite(block)
        names = list(self._names(salted, tokens, len(header.digests)))
        return size * self._store(names, self._readable(header, data), header.first_block)

    def opened(self, frame: bytes | memoryview) -> tuple[Header, list[memoryview]]:
        """A frame's content, found to be consistent and to hold numbers alone. On any thread, beside steps; it reads
        the frame twice. Raises TransferError."""
        header, data = decode(frame)
        if header.dtype == self.format.dtype:  # else it is refused later, with the reason
            for block in data:
                self._check_finite(block)
        return header, data

    def fitting(self, header: Header, data: list[memoryview], seq: Sequence) -> list[tuple[memoryview, bool]]:
        """What the blocks of a sequence are to hold from `header.first_block` on, each with whether KV of our draft
        head is part of it. Raises TransferError where the frame is not of that sequence's first tokens, with its salt
        and adapter, or not as this engine would have computed it."""
        self._check(header)
        size = self._cache.block_size
        num_blocks = min(len(header.digests), (len(seq.tokens) - 1) // size)
        if list(prefix.chain(seq.salt, seq.tokens, size, num_blocks)) != header.digests[:num_blocks]:
            raise TransferError("corrupt", "The frame is of other tokens, of another salt or of another adapter.")
        return self._readable(header, data)[: num_blocks - header.first_block]

    def write(self, blocks: Many[int], data: Many[tuple[memoryview, bool]]) -> None:
        """Let blocks that nobody else sees hold what is `fitting`."""
        for is_drafted in (True, False):
            some = [i for i, (_, drafted) in enumerate(data) if drafted is is_drafted]
            if some:
                self._executor.write_blocks([blocks[i] for i in some], [bytes(data[i][0]) for i in some])

    def _readable(self, header: Header, data: list[memoryview]) -> list[tuple[memoryview, bool]]:
        """Each block of a frame as far as it is for this engine, and whether that is KV of a draft head, too."""
        own = self._head()
        num_drafted = header.num_drafted // header.block_size if header.head == own != "" else 0
        if header.num_drafted and header.head not in (own, self._dropped):
            self._dropped = header.head
            ours = f"another one ({own[:12]})" if own else "none"
            _log.info("KV of draft head %s is dropped: this engine drafts with %s.", header.head[:12], ours)
        return [
            (block, True) if i < num_drafted else (block[: header.target_bytes], False)
            for i, block in enumerate(data, start=header.first_block)
        ]

    def _head(self) -> str:
        return self.format.head if self._head_drafts() else ""

    def _names(self, salted: bytes, tokens: Many[int], num_blocks: int) -> Iterable[bytes]:
        """What the first blocks of these tokens are published under, of those whose name is known."""
        num_ahead = int(self._cache.reads_next)
        size = self._cache.block_size
        num_blocks = min(num_blocks, max(len(tokens) - num_ahead, 0) // size)
        return prefix.chain(salted, tokens, size, num_blocks, num_ahead=num_ahead)

    def _check(self, header: Header) -> None:
        """Raises TransferError for KV that is not as this engine would have it."""
        own = self.format
        asked: list[tuple[TransferCode, str, object, object]] = [
            ("model", "model", header.model, own.model),
            ("model", "numerics", header.numerics, own.numerics),
            ("dtype", "KV dtype", header.dtype, own.dtype),
            ("block_size", "block_size", header.block_size, self._cache.block_size),
            ("shape", "KV", _sizes(header.target), _sizes(own.target)),
        ]
        if header.num_drafted and header.head == self._head():
            asked.append(("shape", "KV of the draft head", _sizes(header.draft), _sizes(own.draft)))
        for code, what, theirs, ours in asked:
            if theirs != ours:
                raise TransferError(
                    code, f"The frame's {what}: {theirs}; this engine's: {ours}. Start both engines alike."
                )

    def _check_finite(self, block: memoryview) -> None:
        """A cache holds finite numbers alone: what a row does not see is multiplied by 0."""
        kind, exponent = _EXPONENTS[self.format.dtype]
        if ((np.frombuffer(block, kind) & exponent) == exponent).any():
            raise TransferError("corrupt", "The frame holds KV that is NaN or infinite.")

    def _store(self, names: list[bytes], data: list[tuple[memoryview, bool]], first: int) -> int:
        """Publish blocks under these names, the first ones where not all find a place; returns how many there are.
        `data` is of those from the block `first` on. Those that are here are held first, as what is written takes the
        place of what was used least recently."""
        pool = self._cache.pool
        found = [pool.find(name) for name in names]
        for known in found:
            if known is not None:
                pool.take(known)
        written: dict[int, int] = {}  # by block, which of `data`
        for i, known in enumerate(found):
            if known is None:
                if i < first or not len(pool.free):
                    break
                found[i] = new = pool.allocate()
                written[new] = i - first
            elif i >= first and data[i - first][1] and not pool.drafted[known] and pool.references[known] == 1:
                written[known] = i - first  # with a head's KV, which it lacks; nobody reads it now
        try:
            self.write([*written], [data[i] for i in written.values()])
            for block, i in written.items():
                pool.fill(block, self._cache.block_size)
                pool.drafted[block] = data[i][1]
                if pool.digest(block) is None:
                    pool.publish(block, names[first + i])
        finally:
            for each in reversed(found):  # the last block is evicted before the first
                if each is not None:
                    pool.release(each)
        return found.index(None) if None in found else len(found)
