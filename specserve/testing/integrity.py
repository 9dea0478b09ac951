"""Every invariant of the block pool and the block tables, checked by walking all of them. Changes nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Many

from specserve.cache import prefix
from specserve.cache.cache import KVCache, begun
from specserve.cache.pool import BlockPool
from specserve.engine.scheduler import Scheduler
from specserve.types import ScheduledSeq, Sequence


def check_integrity(cache: KVCache, seqs: Many[Sequence], awaiting: Many[Sequence] = ()) -> None:
    """Raise AssertionError with a sentence for the first invariant that does not hold; `seqs` and those that are
    `awaiting` KV are all that hold blocks. Blocks are named as `prefix.span` says."""
    everyone = [*seqs, *awaiting]
    _check_free_list(cache.pool)
    _check_references(cache.pool, everyone)
    _check_published(cache.pool)
    _check_filled(cache.pool, cache.block_size, everyone)
    for seq in everyone:
        _check_table(cache.pool, cache.block_size, seq, int(cache.reads_next))
    for seq in awaiting:
        _check_awaited(cache, seq, seqs)


def check_under_way(scheduler: Scheduler) -> None:
    """Raise AssertionError with a sentence for the first invariant of steps under way that does not hold: no slot is
    written by two of them, each is its sequence's own, and each sequence's tokens come in their order."""
    steps, size, cache = scheduler.under_way, scheduler.cache.block_size, scheduler.cache
    _require(len(steps) <= scheduler.overlap.most, f"{len(steps)} steps are under way.")
    shares: dict[Sequence, list[ScheduledSeq]] = {}
    for each in (each for step in steps for each in step.seqs if not each.seq.finished):
        shares.setdefault(each.seq, []).append(each)
    for seq in (*scheduler.waiting, *scheduler.awaiting.seqs, *(seq for seq in scheduler.running if seq not in shares)):
        _require(not seq.under_way, f"{seq.request_id}/{seq.index} is in no step, and counts {seq.under_way} tokens.")
    written: dict[int, str] = {}
    for seq, own in shares.items():
        name, at = f"{seq.request_id}/{seq.index}", seq.cached
        _require(seq in scheduler.running, f"{name} is under way and does not run.")
        for each in own:
            _require(each.start == at, f"{name} goes on at {each.start}, and the step before it ends at {at}.")
            at += each.num_new
            _require(each.sampled == (at == len(seq.tokens)), f"{name} is sampled at {at} of {len(seq.tokens)} tokens.")
            _require(not len(each.draft) or each.sampled, f"{name} has a draft and is not sampled.")
            for index in range(each.start, at + len(each.draft)):
                block = seq.blocks.ids[index // size]
                slot = block * size + index % size
                _require(slot not in written, f"{name} and {written.get(slot)} write slot {slot}.")
                _require(cache.pool.references[block] == 1, f"{name} writes block {block}, which others hold.")
                _require(cache.pool.digest(block) is None, f"{name} writes block {block}, which is published.")
                written[slot] = name
        _require(at == begun(seq), f"{name} counts {begun(seq)} tokens begun, and its steps end at {at}.")


def _require(condition: bool, sentence: str) -> None:
    if not condition:
        raise AssertionError(sentence)  # not an assert statement: `python -O` must not turn the check off


def _check_free_list(pool: BlockPool) -> None:
    """Forwards and backwards the list holds the same blocks, as many as it says, and exactly the unreferenced ones."""
    forwards = pool.free.walk(forwards=True)
    _require(forwards == pool.free.walk(forwards=False)[::-1], "The free list differs forwards and backwards.")
    _require(len(forwards) == len(pool.free), f"The free list says {len(pool.free)} blocks and links {len(forwards)}.")
    unreferenced = {block for block, count in enumerate(pool.references) if count == 0 and block != 0}
    _require(set(forwards) == unreferenced, f"Free and unreferenced differ in {sorted(set(forwards) ^ unreferenced)}.")


def _check_references(pool: BlockPool, seqs: Many[Sequence]) -> None:
    held = Counter(block for seq in seqs for block in seq.blocks.ids)
    _require(held[0] == 0 and pool.references[0] == 0, "The null block was handed out.")
    for block, count in enumerate(pool.references):
        _require(held[block] == count, f"Block {block} counts {count} references and {held[block]} tables hold it.")


def _check_awaited(cache: KVCache, seq: Sequence, others: Many[Sequence]) -> None:
    """It does nothing else, and has blocks for what is to come: its own alone, with nothing in them yet."""
    name, first = f"{seq.request_id}/{seq.index}", seq.cached // cache.block_size
    _require(seq not in others, f"{name} awaits KV and runs or waits, too.")
    _require(not seq.finished, f"{name} has ended and awaits KV.")
    _require(seq.num_elsewhere > seq.cached, f"{name} awaits KV of {seq.num_elsewhere} tokens and has {seq.cached}.")
    awaited = seq.blocks.ids[first:]
    _require(bool(awaited) and seq.cached % cache.block_size == 0, f"{name} awaits KV and has no whole block for it.")
    for block in awaited:
        _require(cache.pool.references[block] == 1, f"Block {block} is awaited by {name} and others hold it.")
        _require(cache.pool.digest(block) is None, f"Block {block} is found before what {name} awaits is in it.")
        _require(cache.pool.filled[block] == 0, f"Block {block} counts tokens before what {name} awaits is in it.")


def _check_published(pool: BlockPool) -> None:
    """Digest to block and block to digest are inverse to each other, and block 0 has none."""
    named = list(pool.digests())
    _require(len(named) == pool.num_published, f"{pool.num_published} digests name {len(named)} blocks.")
    for block, digest in named:
        _require(block != 0, "The null block is published.")
        _require(pool.find(digest) == block, f"Block {block} is published, and its digest finds {pool.find(digest)}.")


def _check_filled(pool: BlockPool, block_size: int, seqs: Many[Sequence]) -> None:
    """A block counts at least what each of its holders has in it, and the total is that of referenced blocks."""
    total = sum(filled for filled, count in zip(pool.filled, pool.references, strict=True) if count)
    _require(total == pool.num_filled, f"The blocks in use hold {total} tokens, and {pool.num_filled} are counted.")
    for seq in seqs:
        for i, block in enumerate(seq.blocks.ids):
            own = min(max(seq.cached - i * block_size, 0), block_size)
            counted = pool.filled[block]
            _require(own <= counted <= block_size, f"Block {block} counts {counted} tokens, and holds {own} of one.")


def _check_table(pool: BlockPool, block_size: int, seq: Sequence, num_ahead: int) -> None:
    name, ids, hashes = f"{seq.request_id}/{seq.index}", seq.blocks.ids, seq.blocks.hashes
    _require(len(set(ids)) == len(ids), f"The table of {name} holds a block twice: {ids}.")
    _require(0 <= seq.cached <= len(ids) * block_size, f"{name} has {seq.cached} tokens cached in {len(ids)} blocks.")
    drafted, num_drafted = [pool.drafted[block] for block in ids], seq.blocks.num_drafted
    _require(  # while it is under way nodes of its draft have such KV, too
        seq.draft_cached <= seq.cached or seq.under_way > 0,
        f"{name} has {seq.cached} tokens cached and draft KV of {seq.draft_cached}.",
    )
    _require(num_drafted <= seq.draft_cached // block_size, f"{name} counts {num_drafted} blocks with draft KV.")
    _require(all(drafted[:num_drafted]), f"Blocks of {name} that have all their draft KV do not say so.")
    _require(len(hashes) <= seq.cached // block_size, f"{name} named {len(hashes)} blocks with {seq.cached} cached.")
    expected = list(prefix.chain(seq.salt, seq.tokens, block_size, len(hashes), num_ahead=num_ahead))
    _require(hashes == expected, f"The digests of {name} are not those of its tokens.")
    for block, digest in zip(ids, hashes, strict=False):  # blocks after the last digest have none
        published = pool.digest(block)
        _require(published in (None, digest), f"Block {block} of {name} is published as other tokens than it holds.")
