"""Hidden states on disk: those of the engine that wrote the text are those that the target computes, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from specserve.errors import CapacityError
from specserve.train import cache as module
from specserve.train.cache import BLOCK_SIZE, HiddenCache
from specserve.train.config import TrainingOptions
from specserve.train.run import train
from specserve.train.target import Target
from specserve.train.text import INDEX

LAYERS, HIDDEN = (0, 2), 4


def states(first: int, count: int) -> torch.Tensor:
    """Those of tokens `first` and so on, all different."""
    numbers = torch.arange(first * 8, (first + count) * 8, dtype=torch.float32)
    return (1 + numbers).half().view(count, len(LAYERS), HIDDEN)


def tokens(count: int, last: int = 7) -> list[int]:
    return [*range(100, 100 + count - 1), last]


def test_what_answers_begin_with_is_stored_once(tmp_path: Path) -> None:
    with HiddenCache(tmp_path, LAYERS, HIDDEN) as cache:
        cache.add(0, tokens(40), 0, states(0, 39))
        rows = cache.num_bytes
        cache.add(1, tokens(36, last=8), 2 * BLOCK_SIZE, states(32, 3))
        assert cache.num_bytes - rows == 3 * 2 * len(LAYERS) * HIDDEN
        cache.add(2, tokens(40), 31, states(31, 8))  # the whole prompt was there, and its last token is computed again
        for answer, count in ((0, 40), (1, 36), (2, 40)):
            found = cache.read(answer)
            assert torch.equal(found[:-1], states(0, count - 1).float())
            assert not found[-1].any(), "nothing follows the last token"


def test_states_behind_blocks_that_nobody_added_are_not_kept(tmp_path: Path) -> None:
    with HiddenCache(tmp_path, LAYERS, HIDDEN) as cache:
        cache.add(0, tokens(40), BLOCK_SIZE, states(BLOCK_SIZE, 39 - BLOCK_SIZE))
        assert 0 not in cache
        cache.add(1, tokens(20), 0, states(0, 19))
        cache.add(2, tokens(40), 2 * BLOCK_SIZE, states(32, 7))  # the second block of 1 ends with what has no state
        assert 1 in cache
        assert 2 not in cache
        other = [1, *tokens(40)[1:]]
        cache.add(3, other, BLOCK_SIZE, states(BLOCK_SIZE, 39 - BLOCK_SIZE))
        assert 3 not in cache, "another prompt's block"


def test_what_a_killed_writer_left_half_is_dropped(tmp_path: Path) -> None:
    with HiddenCache(tmp_path, LAYERS, HIDDEN) as cache:
        cache.add(0, tokens(20), 0, states(0, 19))
        folder = cache.folder
    for path in folder.iterdir():
        with path.open("ab") as file:
            file.write(b"abc")
    with HiddenCache(tmp_path, LAYERS, HIDDEN) as cache:
        cache.add(1, tokens(30), 0, states(0, 29))
        cache.add(0, tokens(12), 0, states(5, 11))  # written again
    with HiddenCache(tmp_path, LAYERS, HIDDEN) as cache:
        assert torch.equal(cache.read(1)[:-1], states(0, 29).float())
        assert torch.equal(cache.read(0)[:-1], states(5, 11).float())


def test_a_head_that_reads_some_of_the_layers_reads_the_same_folder(tmp_path: Path) -> None:
    with HiddenCache(tmp_path, (5, 1, 3, 5), HIDDEN) as cache:
        assert cache.stored == (1, 3, 5)
        assert cache.folder.name == "hidden-1-3-5"
        kept = torch.randn(19, 3, HIDDEN).half()
        cache.add(0, tokens(20), 0, kept)
        assert torch.equal(cache.read(0)[:-1], kept[:, [2, 0, 1, 2]].float())
    with HiddenCache(tmp_path, (2, 3), HIDDEN):
        pass
    for layers, columns, folder in (((5, 3), [2, 1], "hidden-1-3-5"), ((3,), [], "hidden-2-3")):
        with HiddenCache(tmp_path, layers, HIDDEN) as cache:
            assert cache.folder.name == folder, "the smallest that has them"
            assert (0 in cache) == bool(columns)
            if columns:
                assert torch.equal(cache.read(0)[:-1], kept[:, columns].float())
    assert len(list(tmp_path.glob("hidden-*"))) == 2


def test_a_disk_that_fills_up_is_refused_before_it_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with HiddenCache(tmp_path, LAYERS, HIDDEN) as cache:
        cache.add(0, tokens(20), 0, states(0, 19))
        monkeypatch.setattr(module.shutil, "disk_usage", lambda folder: SimpleNamespace(free=2**30))
        monkeypatch.setattr(module, "_UNCHECKED_BYTES", 1)
        with pytest.raises(CapacityError, match=r"--cache-hidden needs 1.00 GiB more and 1.00 GiB are free"):
            cache.add(1, tokens(30), 0, states(0, 29))
        assert 0 in cache
        assert 1 not in cache


@pytest.mark.parametrize("kind", ["block", "medusa"])
def test_the_engine_that_writes_gives_what_the_target_computes(
    kind: str,
    tiny: Path,
    engine: dict[str, Any],
    options: Callable[..., TrainingOptions],
    target: Target,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "prompts.jsonl"
    lines = [{"prompt": f"Here is a rather long beginning that prompts have in common, and {n}."} for n in range(12)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    computed: list[int] = []
    plain = Target.hidden

    def counted(self: Target, sequences: Any, layers: Any) -> list[torch.Tensor]:
        computed.append(len(sequences))
        return plain(self, sequences, layers)

    monkeypatch.setattr(Target, "hidden", counted)
    chosen = options(prompts=path, cache_hidden=True, epochs=1.0, max_length=128)
    train(kind, str(tiny), engine, chosen, lambda line: None)
    assert not any(computed), "all were recorded"
    text = chosen.text_folder
    records, stored = np.fromfile(text / "index.bin", INDEX), np.fromfile(text / "tokens.bin", np.uint16)
    folder = next(text.glob("hidden-*"))
    layers = tuple(map(int, folder.name.split("-")[1:]))
    with HiddenCache(text, layers, target.spec.hidden_size) as cache:
        assert cache.num_bytes < 0.8 * stored.size * 2 * len(layers) * target.spec.hidden_size, "prompts were shared"
        for number, record in enumerate(records):
            start, count = int(record["start"]), int(record["num_prompt"]) + int(record["num_output"])
            said = plain(target, [stored[start : start + count]], layers)[0]
            assert torch.equal(cache.read(number)[:-1], said[:-1].half().float())
    if kind == "block":
        other = options(prompts=path, cache_hidden=True, epochs=1.0, max_length=128, text=text, out=tmp_path / "other")
        train("medusa", str(tiny), engine, other, lambda line: None)
        assert not any(computed), "what it reads is among the block head's layers"
