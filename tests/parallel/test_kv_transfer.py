"""A prompt's KV from one engine is to another as if it had computed it: the same text, the same drafts accepted."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs

from specserve.checkpoint.weights import Weights
from specserve.config import EngineConfig
from specserve.engine.adapters import UnknownAdapterError
from specserve.engine.build import Built, build
from specserve.engine.request import Request
from specserve.errors import ConfigError
from specserve.models.decoder import Decoder
from specserve.models.heads.formats import write_head
from specserve.models.heads.speculators import Verifier
from specserve.models.loader import load_model
from specserve.ops.choice import choose_ops
from specserve.parallel.frame import TransferError, decode, encode
from specserve.parallel.kv_transfer import PrefixTransfer
from specserve.runtime.executor import local
from specserve.testing import check_integrity, write_adapter, write_tiny_model
from specserve.testing.causal_models import write_tiny_causal_model
from specserve.testing.heads import trained_block, trained_eagle
from specserve.types import SamplingParams, SequenceStats

BLOCK = 16
BLOCK_GIB = 3 * 2 * BLOCK * 2 * 16 * 4 / 2**30  # of the tiny model's layers in float32
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
SAMPLED = dataclasses.replace(GREEDY, temperature=0.8, seed=11)
PROMPT = [(7 * i + 3 * i * i) % 280 for i in range(5 * BLOCK + 7)]
PRECISIONS: Mapping[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "float32", "quantization": "int8"},
}
_ids = itertools.count()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), "llama", seed=3)


@pytest.fixture(scope="module")
def heads(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """That learned what the model says after the prompt; "other" is an EAGLE head that learned less."""
    target = load_model(tiny, choose_ops(torch.device("cpu"), "float32", "none", 1))
    assert isinstance(target, Decoder)
    texts = [PROMPT[:stop] + run(make(tiny), PROMPT[:stop])[0] for stop in (30, 50, len(PROMPT))]
    texts.append(PROMPT + run(make(tiny, **PRECISIONS["int8"]), PROMPT)[0])
    trained = {
        "eagle": trained_eagle(target, texts, 3, 40),
        "other": trained_eagle(target, texts, 3, 5),
        "block": trained_block(target, texts, 60, has_anchor_inputs=True),
    }
    found = {}
    for name, (spec, weights, d2t) in trained.items():
        found[name] = tmp_path_factory.mktemp(name)
        write_head(found[name], spec, weights, d2t, Verifier(str(tiny)))
    return found


@pytest.fixture(scope="module")
def adapter(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    shapes = {name: info.shape for name, info in Weights(tiny).infos.items()}
    return write_adapter(tmp_path_factory.mktemp("adapters") / "x", shapes, seed=1)


def make(tiny: Path, **options: Any) -> Built:
    usual: dict[str, Any] = {"max_model_len": 160, "max_step_ms": 1e9, "adaptive": False, "threads": 1}
    usual |= {"dtype": "float32", "drafter": "none", "block_size": BLOCK}
    return build(EngineConfig(model=str(tiny), **{**usual, **options}))


def drafting(kind: str, head: Path) -> dict[str, Any]:
    return {"drafter": kind, "drafter_options": {"head": str(head)}}


def run(
    built: Built, prompt: list[int], params: SamplingParams = GREEDY, **fields: Any
) -> tuple[list[int], SequenceStats]:
    """The tokens that one request gets, and what is counted of it."""
    engine, tokens = built.engine, list[int]()
    engine.add(Request(id=f"r{next(_ids)}", prompt_ids=prompt, params=params, **fields))
    while engine.has_work:
        for event in engine.step():
            assert event.error is None
            tokens += event.tokens
            stats = event.stats
        check_integrity(engine.cache, engine.scheduler.running)
    assert engine.policy.num_dropped == 0
    assert stats is not None
    return tokens, stats


def prefill(built: Built, **fields: Any) -> PrefixTransfer:
    """Compute the prompt and one token, as whoever only prefills does."""
    run(built, PROMPT, dataclasses.replace(GREEDY, max_tokens=1), **fields)
    return built.prefix_transfer()


def exported(transfer: PrefixTransfer, tokens: list[int] = PROMPT, **named: Any) -> bytes:
    frame = transfer.export_prefix(tokens, **named)
    assert frame is not None
    return frame


def hand_over(source: PrefixTransfer, target: Built, **named: Any) -> int:
    found = target.prefix_transfer().import_prefix(exported(source, **named))
    check_integrity(target.engine.cache, [])
    assert target.engine.cache.num_free == target.engine.cache.num_blocks, "what came may be evicted"
    return found


def drafts(stats: SequenceStats) -> tuple[Any, ...]:
    return stats.num_steps, stats.drafted_by_position, stats.accepted_by_position


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_text_over_kv_from_elsewhere_has_the_same_bits(tiny: Path, precision: str, params: SamplingParams) -> None:
    scored = dataclasses.replace(params, logprobs=3)
    alone, there = make(tiny, **PRECISIONS[precision]), make(tiny, **PRECISIONS[precision])
    expected, stats = run(alone, PROMPT, scored)
    assert stats.num_prefix_cached_tokens == 0
    assert hand_over(prefill(make(tiny, **PRECISIONS[precision])), there) == 5 * BLOCK
    tokens, stats = run(there, PROMPT, scored)
    assert tokens == expected
    assert stats.num_prefix_cached_tokens == 5 * BLOCK
    assert kv_of(alone, PROMPT) == kv_of(there, PROMPT)


def kv_of(built: Built, tokens: list[int]) -> list[bytes]:
    """Of the cached blocks of these tokens."""
    return [bytes(block) for block in decode(exported(built.prefix_transfer(), tokens))[1]]


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 24}], ids=["whole", "chunks"])
@pytest.mark.parametrize("kind", ["eagle", "block"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_acceptance_over_kv_of_a_head_is_that_of_one_engine(
    tiny: Path, heads: dict[str, Path], precision: str, kind: str, options: dict[str, Any]
) -> None:
    options = {**PRECISIONS[precision], **drafting(kind, heads[kind]), **options}
    expected, one = run(make(tiny, **options), PROMPT)
    there = make(tiny, **options)
    source = prefill(make(tiny, **options))
    assert decode(exported(source))[0].num_drafted == 5 * BLOCK
    assert hand_over(source, there) == 5 * BLOCK
    tokens, stats = run(there, PROMPT)
    assert stats.num_prefix_cached_tokens == 5 * BLOCK
    assert tokens == expected
    assert stats.num_accepted_tokens > 0
    assert drafts(stats) == drafts(one)


@pytest.mark.parametrize(
    ("source", "target"),
    [("none", "eagle"), ("other", "eagle"), ("eagle", "none"), ("eagle", "other"), ("eagle", "block")],
)
def test_a_head_has_no_kv_of_another(tiny: Path, heads: dict[str, Path], source: str, target: str) -> None:
    """The text is the same, from the target's KV; draft layers of who has none, or another's, count as missing."""

    def options(name: str) -> dict[str, Any]:
        return {} if name == "none" else drafting("eagle" if name == "other" else name, heads[name])

    expected, _ = run(make(tiny), PROMPT)
    there = make(tiny, **options(target))
    assert hand_over(prefill(make(tiny, **options(source))), there) == 5 * BLOCK
    assert not any(there.engine.cache.pool.drafted)
    tokens, stats = run(there, PROMPT)
    assert tokens == expected
    assert stats.num_prefix_cached_tokens == 5 * BLOCK
    assert stats.num_accepted_tokens == 0, "a head that lacks a prompt's KV does not draft"


def test_the_kv_of_a_head_is_added_to_blocks_that_lack_it(tiny: Path, heads: dict[str, Path]) -> None:
    options = drafting("eagle", heads["eagle"])
    there = make(tiny, **options)
    assert hand_over(prefill(make(tiny)), there) == 5 * BLOCK
    before, used = kv_of(there, PROMPT), len([*there.engine.cache.pool.digests()])
    assert hand_over(prefill(make(tiny, **options)), there) == 5 * BLOCK
    assert [block[: len(own)] for block, own in zip(kv_of(there, PROMPT), before, strict=True)] == before
    assert len([*there.engine.cache.pool.digests()]) == used, "in the same blocks"
    assert drafts(run(there, PROMPT)[1]) == drafts(run(make(tiny, **options), PROMPT)[1])


def test_a_draft_model_reads_a_prompt_that_came_without_its_kv(tiny: Path) -> None:
    """It reads only where it drafts: who just prefills has none, who answered has some."""
    options = {"drafter": "draft_model", "draft_model": str(tiny)}
    expected, one = run(make(tiny, **options), PROMPT)
    source = make(tiny, **options)
    transfer = prefill(source)
    assert decode(exported(transfer))[0].num_drafted == 0
    run(source, PROMPT)
    assert decode(exported(transfer))[0].num_drafted == 5 * BLOCK
    for frame in (exported(prefill(make(tiny, **options))), exported(transfer)):
        there = make(tiny, **options)
        assert there.prefix_transfer().import_prefix(frame) == 5 * BLOCK
        tokens, stats = run(there, PROMPT)
        assert stats.num_prefix_cached_tokens == 5 * BLOCK
        assert stats.num_accepted_tokens > 0
        assert (tokens, drafts(stats)) == (expected, drafts(one))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_models_that_run_through_transformers_hand_on_theirs(tmp_path: Path, dtype: str) -> None:
    pytest.importorskip("transformers")
    folder = write_tiny_causal_model(tmp_path / "generic", "stablelm")
    expected, _ = run(make(folder, dtype=dtype), PROMPT)
    there = make(folder, dtype=dtype)
    assert hand_over(prefill(make(folder, dtype=dtype)), there) == 5 * BLOCK
    tokens, stats = run(there, PROMPT)
    assert (tokens, stats.num_prefix_cached_tokens) == (expected, 5 * BLOCK)


def test_kv_of_a_drafter_that_was_replaced_is_nobodys(tiny: Path, heads: dict[str, Path]) -> None:
    options = drafting("eagle", heads["eagle"])
    source, there = make(tiny, **options), make(tiny, **options)
    transfer, taking = prefill(source), there.prefix_transfer()
    frame = exported(transfer)
    for built in (source, there):
        built.engine.use(make(tiny).engine.policy.own, 0)
    assert taking.import_prefix(frame) == 5 * BLOCK
    assert not any(there.engine.cache.pool.drafted)
    run(source, PROMPT)
    assert decode(exported(transfer))[0].num_drafted == 0


def test_requests_have_the_kv_of_their_adapter_and_salt_alone(tiny: Path, adapter: Path) -> None:
    options = {"lora": (f"x={adapter}",)}
    source, there = make(tiny, **options), make(tiny, **options)
    expected = run(make(tiny, **options), PROMPT, adapter="x", salt=b"s")[0]
    plain = run(make(tiny, **options), PROMPT)[0]
    assert plain != expected
    transfer = prefill(source, adapter="x", salt=b"s")
    assert transfer.export_prefix(PROMPT) is None
    assert transfer.export_prefix(PROMPT, b"s") is None
    assert transfer.export_prefix(PROMPT, adapter="x") is None
    with pytest.raises(UnknownAdapterError):
        transfer.export_prefix(PROMPT, adapter="y")
    assert hand_over(transfer, there, salt=b"s", adapter="x") == 5 * BLOCK
    for fields, cached, text in (
        ({}, 0, plain),
        ({"salt": b"s"}, 0, plain),
        ({"adapter": "x"}, 0, expected),
        ({"adapter": "x", "salt": b"s"}, 5 * BLOCK, expected),
    ):
        tokens, stats = run(there, PROMPT, **fields)
        assert (tokens, stats.num_prefix_cached_tokens) == (text, cached)


def test_kv_of_the_head_that_an_adapter_brings_comes_along(tiny: Path, adapter: Path, heads: dict[str, Path]) -> None:
    options = drafting("eagle", heads["eagle"]) | {"lora": (f"x={adapter},head={heads['other']}",)}
    expected, one = run(make(tiny, **options), PROMPT, adapter="x")
    there = make(tiny, **options)
    assert hand_over(prefill(make(tiny, **options), adapter="x"), there, adapter="x") == 5 * BLOCK
    tokens, stats = run(there, PROMPT, adapter="x")
    assert stats.num_prefix_cached_tokens == 5 * BLOCK
    assert (tokens, drafts(stats)) == (expected, drafts(one))
    assert sum(stats.drafted_by_position) > 0
    another = make(tiny, **options | {"lora": (f"x={adapter}",)})
    refused(another, exported(prefill(there, adapter="x"), adapter="x"), "adapter", "not loaded here")


def test_a_frame_of_an_adapter_that_is_not_loaded_is_refused(tiny: Path, adapter: Path) -> None:
    frame = exported(prefill(make(tiny, lora=(f"x={adapter}",)), adapter="x"), adapter="x")
    refused(make(tiny), frame, "adapter", "not loaded here")


def refused(there: Built, frame: bytes, code: str, says: str) -> None:
    """With nothing written, nor published."""
    before = [layer.clone() for layer in local(there.engine.executor).storage.layers]
    with pytest.raises(TransferError, match=says) as caught:
        there.prefix_transfer().import_prefix(frame)
    assert caught.value.code == code
    check_integrity(there.engine.cache, [])
    assert there.engine.cache.pool.num_published == 0
    for layer, old in zip(local(there.engine.executor).storage.layers, before, strict=True):
        assert torch.equal(layer, old)


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        ({"dtype": "bfloat16"}, "model", "numerics"),
        ({"quantization": "int8"}, "model", "numerics: cpu .* none; this engine's: cpu .* int8"),
        ({"block_size": 32}, "block_size", "block_size: 16; this engine's: 32"),
        ({"max_model_len": 64, "kv_cache_gib": 5.5 * BLOCK_GIB}, "too_long", "5 blocks; the cache has 4"),
    ],
)
def test_kv_that_another_engine_would_not_have_computed_is_refused(
    tiny: Path, options: dict[str, Any], code: str, says: str
) -> None:
    there = make(tiny, **options)
    refused(there, exported(prefill(make(tiny))), code, says)


def test_kv_of_another_model_is_refused(tiny: Path, tmp_path: Path) -> None:
    """Of the same sizes, too, and only by its files: not by where they lie."""
    frame = exported(prefill(make(tiny)))
    refused(make(write_tiny_model(tmp_path / "other", "llama", seed=4)), frame, "model", "frame's model")
    same = make(write_tiny_model(tmp_path / "same", "llama", seed=3))
    assert same.prefix_transfer().import_prefix(frame) == 5 * BLOCK


@pytest.mark.parametrize("kernels", ["reference", "cpu"])
def test_kv_computed_by_other_kernels_is_refused(tiny: Path, kernels: str) -> None:
    made = make(tiny)
    frame = exported(prefill(made))
    header, blocks = decode(frame)
    assert made.ops.name == "cpu"
    words = header.numerics.replace("cpu", kernels, 1)
    again = encode(structs.replace(header, numerics=words), map(bytes, blocks))
    there = make(tiny)
    if kernels == "cpu":
        assert there.prefix_transfer().import_prefix(again) == 5 * BLOCK
    else:
        refused(there, again, "model", "numerics: reference")


Change = Callable[[Any, list[bytes]], tuple[Any, list[bytes]]]
CHANGES: dict[str, tuple[Change, str, str]] = {
    "tokens": (
        lambda h, blocks: (structs.replace(h, tokens=h.tokens[4:] + h.tokens[:4]), blocks),
        "corrupt",
        "named otherwise",
    ),
    "salt": (lambda h, blocks: (structs.replace(h, salt=b"other"), blocks), "corrupt", "named otherwise"),
    "shape": (
        lambda h, blocks: (
            structs.replace(h, target=h.target[:1]),
            [each[: h.target_bytes // len(h.target)] for each in blocks],
        ),
        "shape",
        "1 layers of 2 heads of 16; this engine's: 3 layers of 2 heads of 16",
    ),
    "nan": (
        lambda h, blocks: (h, [*blocks[:-1], np.float32(np.nan).tobytes() + blocks[-1][4:]]),
        "corrupt",
        "NaN or infinite",
    ),
    "infinite": (
        lambda h, blocks: (h, [blocks[0][:-4] + np.float32(-np.inf).tobytes(), *blocks[1:]]),
        "corrupt",
        "NaN",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_frame_that_was_made_wrong_is_refused(tiny: Path, change: str) -> None:
    function, code, says = CHANGES[change]
    header, blocks = decode(exported(prefill(make(tiny))))
    refused(make(tiny), encode(*function(header, [bytes(block) for block in blocks])), code, says)


def test_only_free_blocks_are_taken(tiny: Path) -> None:
    """What runs keeps its own. What was cached gives way, but for the blocks that the frame has, too."""
    small = {"max_model_len": 112, "kv_cache_gib": 8.5 * BLOCK_GIB}
    frame, there = exported(prefill(make(tiny))), make(tiny, **small)
    engine, transfer = there.engine, there.prefix_transfer()
    assert engine.cache.num_blocks == 7
    other = [(5 * i + 1) % 280 for i in range(4 * BLOCK)]
    expected = run(make(tiny, **small), other)[0]
    engine.add(Request(id="running", prompt_ids=other, params=GREEDY))
    tokens = [token for event in engine.step() for token in event.tokens]
    free = engine.cache.num_free
    assert 0 < free < 5
    assert transfer.import_prefix(frame) == free * BLOCK
    check_integrity(engine.cache, engine.scheduler.running)
    while engine.has_work:
        tokens += [token for event in engine.step() for token in event.tokens]
        check_integrity(engine.cache, engine.scheduler.running)
    assert tokens == expected
    assert transfer.import_prefix(frame) == 5 * BLOCK
    check_integrity(engine.cache, [])
    assert run(there, PROMPT[: 5 * BLOCK + 1], dataclasses.replace(GREEDY, max_tokens=4))[
        1
    ].num_prefix_cached_tokens == (5 * BLOCK)


def test_blocks_that_are_cached_are_not_written_again(tiny: Path) -> None:
    source, there = make(tiny), make(tiny)
    run(there, PROMPT[: 2 * BLOCK + 1])
    pool, frame = there.engine.cache.pool, exported(prefill(source))
    known = dict(pool.digests())
    assert there.prefix_transfer().import_prefix(frame) == 5 * BLOCK
    assert known.items() <= dict(pool.digests()).items()
    assert pool.num_published == len(known) + 3
    assert there.prefix_transfer().import_prefix(frame) == 5 * BLOCK
    assert pool.num_published == len(known) + 3


def test_a_write_that_fails_leaves_the_cache_whole(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    frame, there = exported(prefill(make(tiny))), make(tiny)

    def fail(ids: list[int], data: list[bytes]) -> None:
        raise OSError("a rank died")

    monkeypatch.setattr(there.engine.executor, "write_blocks", fail)
    with pytest.raises(OSError, match="rank died"):
        there.prefix_transfer().import_prefix(frame)
    check_integrity(there.engine.cache, [])
    assert there.engine.cache.pool.num_published == 0


def test_nothing_is_exported_of_a_prompt_that_is_not_cached(tiny: Path) -> None:
    transfer = prefill(make(tiny))
    assert transfer.export_prefix([]) is None
    assert transfer.export_prefix(PROMPT[: BLOCK - 1]) is None
    assert transfer.export_prefix([PROMPT[0] + 1, *PROMPT[1:]]) is None
    assert decode(exported(transfer, PROMPT[: 2 * BLOCK + 3]))[0].num_tokens == 2 * BLOCK


def test_without_a_prefix_cache_there_is_no_transfer(tiny: Path) -> None:
    with pytest.raises(ConfigError, match="prefix_caching is off"):
        make(tiny, prefix_caching=False).prefix_transfer()


@pytest.mark.skipif(
    importlib.util.find_spec("specserve.kernels._native") is None, reason="Built without native kernels."
)
def test_kv_of_a_model_in_several_processes(tiny: Path, heads: dict[str, Path]) -> None:
    """From two processes to four, two a stage, with that of a head; not to one, which adds in another order."""
    options = drafting("eagle", heads["eagle"])
    two = make(tiny, tensor_parallel_size=2, **options)
    four = make(tiny, tensor_parallel_size=2, pipeline_parallel_size=2, **options)
    expected, stats = run(two, PROMPT, SAMPLED)
    assert hand_over(two.prefix_transfer(), four) == 5 * BLOCK
    found, seen = run(four, PROMPT, SAMPLED)
    assert found == expected
    assert seen.num_prefix_cached_tokens == 5 * BLOCK and drafts(seen) == drafts(stats)
    with pytest.raises(TransferError, match=r"numerics: .*--tensor-parallel-size 2; this engine's: "):
        hand_over(four.prefix_transfer(), make(tiny))
