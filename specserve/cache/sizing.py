"""How many KV blocks and logits of a step fit: measures free memory, decides, and says why. Allocates nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from specserve.errors import CapacityError
from specserve.machine.cgroups import groups

GIB = 2**30
LOGITS_BYTES = 2**27  # of one step: 682 rows of a vocabulary of 49k, 220 of one of 152k
MAX_SHARE = 0.4  # of free memory, when nobody said how much: weights' pages, activations and the system need the rest
DEVICE_SHARE = 0.9  # of a GPU's, where all that was captured is measured: the sampler and drafters need the rest


def plan_blocks(
    free_bytes: int,
    bytes_per_block: int,
    block_size: int,
    max_model_len: int,
    max_num_seqs: int,
    kv_cache_gib: float | None,
    captured_bytes: Callable[[], int] | None = None,
) -> tuple[int, str]:
    """Blocks to allocate, the null block included, and one sentence that says what was chosen.

    On its own it takes what `max_num_seqs` sequences of `max_model_len` tokens could use, but at most 40 % of free
    memory. Where that is not enough and `captured_bytes` measures what graphs will take, which takes a moment, it is
    at most 90 % of what they leave. `kv_cache_gib` is taken as given. Raises CapacityError if that is not free, or if
    not one sequence of `max_model_len` would fit.
    """
    blocks_per_sequence = math.ceil(max_model_len / block_size)
    if kv_cache_gib is None:
        wanted = max_num_seqs * blocks_per_sequence + 1
        room, reason = int(free_bytes * MAX_SHARE), f"{MAX_SHARE:.0%} of free memory"
        if wanted * bytes_per_block > room and captured_bytes is not None:
            room = max(0, int((free_bytes - (captured := captured_bytes())) * DEVICE_SHARE))
            reason = f"{DEVICE_SHARE:.0%} of what {captured / GIB:.2f} GiB of graphs leave"
        num_blocks = min(wanted, room // bytes_per_block)
        reason = "all sequences at full length" if num_blocks == wanted else reason
    else:
        num_blocks = _explicit(free_bytes, bytes_per_block, kv_cache_gib)
        reason = "kv_cache_gib"
    needed = blocks_per_sequence + 1
    if num_blocks < needed:
        raise CapacityError(
            f"One sequence of max_model_len {max_model_len} needs {needed * bytes_per_block / GIB:.3f} GiB of KV cache "
            f"and there are {num_blocks * bytes_per_block / GIB:.3f} GiB ({reason}; {free_bytes / GIB:.3f} GiB free). "
            + _remedy(num_blocks, needed * bytes_per_block, block_size, free_bytes)
        )
    usable = num_blocks - 1
    return num_blocks, (
        f"KV cache: {usable * block_size} tokens in {usable} blocks of {block_size}, "
        f"{num_blocks * bytes_per_block / GIB:.2f} GiB ({reason}; {free_bytes / GIB:.2f} GiB free)."
    )


def _explicit(free_bytes: int, bytes_per_block: int, kv_cache_gib: float) -> int:
    if kv_cache_gib * GIB > free_bytes:
        largest = math.floor(free_bytes / GIB * 100) / 100
        raise CapacityError(
            f"kv_cache_gib is {kv_cache_gib:g} and {free_bytes / GIB:.2f} GiB are free. "
            f"The largest value that works now is {largest:.2f}; leave it out to have it chosen."
        )
    return int(kv_cache_gib * GIB) // bytes_per_block


def _remedy(num_blocks: int, needed_bytes: int, block_size: int, free_bytes: int) -> str:
    """What to change so that one sequence fits: its length, the cache's size if memory allows, or else the memory."""
    largest = (num_blocks - 1) * block_size
    shorter = f"The largest max_model_len that works is {largest}" if largest > 0 else "No max_model_len works"
    enough = math.ceil(needed_bytes / GIB * 1000) / 1000
    larger = f"set kv_cache_gib to at least {enough:.3f}" if enough * GIB <= free_bytes else "free some memory"
    return f"{shorter}; or {larger}."


def logit_rows(vocab_size: int, max_num_seqs: int, max_num_batched_tokens: int) -> int:
    """For how many rows a step may have logits: as many as fit 128 MiB, but at least one for each sequence and one of a
    draft for each, and no more than a step has rows."""
    return min(max_num_batched_tokens, max(2 * max_num_seqs, LOGITS_BYTES // (4 * vocab_size)))


def step_bytes(max_rows: int, width: int, max_logit_rows: int, vocab_size: int) -> int:
    """What a step works on, weights and KV apart: `width` numbers for every row, logits, and a copy of these that the
    requests' parameters have edited; all float32."""
    return 4 * (max_rows * width + 2 * max_logit_rows * vocab_size)


def share_of(free_bytes: int, taken: int, num_engines: int, root: Path = Path("/")) -> int:
    """What of free memory an engine has for its KV cache that takes so many bytes for a step, where `num_engines` are
    to be alike, this one the first: each of the others needs what this process has for itself by now, too."""
    others = (num_engines - 1) * own_memory(root) if num_engines > 1 else 0
    return max(0, (free_bytes - others) // num_engines - taken)


def own_memory(root: Path = Path("/")) -> int:
    """Bytes that this process has committed and shares with none."""
    return int(_read_table(root / "proc/self/status", ":")["RssAnon"].split()[0]) * 1024


def free_memory(device: torch.device | str, root: Path = Path("/")) -> int:
    """Bytes that can be allocated now. CUDA: what the driver says. Otherwise the smaller of the system's available
    memory and what the control groups (v1 or v2) of this process leave; `root` is the root of the file system.

    Raises CapacityError where the system does not tell.
    """
    device = torch.device(device)
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return max(0, min([_available(root), *_control_group_room(root)]))


def _available(root: Path) -> int:
    try:
        values = _read_table(root / "proc/meminfo", ":")
    except OSError as error:
        raise CapacityError(f"Free memory cannot be measured here: {error}. Only Linux is supported.") from error
    return int(values["MemAvailable"].split()[0]) * 1024


_FILES = {  # by version: the limit, what is used, and what of that can be reclaimed
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}


def _control_group_room(root: Path) -> Iterator[int]:
    """Limit minus usage of every control group that holds this process. Page cache that nobody uses is not usage: the
    system gives it back when memory is asked for."""
    for folder, version in groups("memory", root):
        limit_file, usage_file, reclaimable = _FILES[version]
        if not (folder / limit_file).exists():
            continue  # a root group has no limit
        limit = (folder / limit_file).read_text().strip()
        if limit != "max":
            statistics = _read_table(folder / "memory.stat", " ")
            yield int(limit) - int((folder / usage_file).read_text()) + int(statistics.get(reclaimable, 0))


def _read_table(path: Path, separator: str) -> dict[str, str]:
    """The values of a file of lines by their names, which stand before the separator."""
    lines = path.read_text().splitlines()
    return {name: value for name, _, value in (line.partition(separator) for line in lines)}
