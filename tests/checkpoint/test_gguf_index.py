"""GGUF files that are read as they are: the numbers of the converted folder; indexes and files that are damaged or
gone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from specserve.checkpoint import catalog
from specserve.checkpoint.folder import check_folder
from specserve.checkpoint.gguf import adopt, convert
from specserve.checkpoint.weights import Weights
from specserve.cli.inspect import inspect
from specserve.errors import ModelError
from specserve.train.prompts import Prompts
from specserve.train.run import _origin
from tests.checkpoint.gguf_layouts import write_published
from tests.checkpoint.test_gguf import write_gguf
from tests.checkpoint.test_gguf_families import CASES, tiny


def same(folder: Path, other: Path) -> None:
    ours, theirs = Weights(folder), Weights(other)
    assert list(ours) == list(theirs) or set(ours) == set(theirs)
    for name, value in theirs.items():
        assert ours[name].dtype == value.dtype and torch.equal(ours[name], value), name
        assert (ours.infos[name].shape, ours.infos[name].dtype) == (theirs.infos[name].shape, theirs.infos[name].dtype)


KINDS = ("F32", "F16", "BF16", "Q8_0", "Q4_1")
# One family in all kinds, the others in two each, so that neighbours have others.
STORED = [
    (case, kind)
    for at, case in enumerate(CASES)
    for kind in (KINDS[at % 5], KINDS[(at + 3) % 5], *KINDS[: 5 * (at < 1)])
]


@pytest.mark.parametrize(("case", "kind"), dict.fromkeys(STORED))
def test_the_file_itself_has_the_numbers_of_what_is_converted(tmp_path: Path, case: str, kind: str) -> None:
    path = write_published(tiny(tmp_path / "meant", case), tmp_path / "m.gguf", kind, **CASES[case][2])
    adopt(path, tmp_path / "adopted")
    convert(path, tmp_path / "out")
    same(tmp_path / "adopted", tmp_path / "out")
    assert (tmp_path / "adopted/model.gguf").resolve() == path
    assert bool(Weights(tmp_path / "adopted").blocks) == kind.startswith("Q")


def test_other_programs_get_safetensors(tmp_path: Path) -> None:
    adopt(write_gguf(tmp_path / "m.gguf"), tmp_path / "adopted")
    written = catalog.as_safetensors(tmp_path / "adopted", tmp_path / "written")
    same(tmp_path / "adopted", written)
    modified = (written / "config.json").stat().st_mtime_ns
    assert catalog.as_safetensors(tmp_path / "adopted", tmp_path / "written") == written
    assert (written / "config.json").stat().st_mtime_ns == modified
    assert catalog.as_safetensors(written, tmp_path / "none") == written


def test_inspect_says_what_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And no head, though heads are looked for first."""
    adopt(write_gguf(tmp_path / "m.gguf"), tmp_path / "adopted")
    inspect(str(tmp_path / "adopted"))
    said = " ".join(capsys.readouterr().out.split())
    assert "type llama" in said and "runs natively" in said


def test_training_tells_one_file_from_another(tmp_path: Path) -> None:
    found = set()
    for name in ("a", "b"):
        path = write_gguf(tmp_path / f"{name}.gguf", general__name=name * 50 * (1 + (name == "b")))
        adopt(path, tmp_path / name)
        found.add(_origin(tmp_path / name, {}, Prompts([]))["target"])
    assert len(found) == 2


def test_a_file_that_moves_in_takes_no_place_twice(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    size = path.stat().st_size
    adopt(path, tmp_path / "adopted", move=True)
    assert not path.exists() and (tmp_path / "adopted/model.gguf").stat().st_size == size
    check_folder(tmp_path / "adopted")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda index: index.update(size=index["size"] + 1), "should have"),
        (lambda index: index["tensors"][0].update(begin=10**9), "after the end"),
        (lambda index: index["tensors"][0].update(begin=-1), "is no index"),
        (lambda index: index["tensors"][0].update(kind="Q9"), "is no index"),
        (lambda index: index["tensors"][0].update(shape=[7.5]), "is no index"),
        (lambda index: index["tensors"][0].update(shape=[7, 7]), "is no index"),
        (lambda index: index["tensors"][0].update(source=[]), "is no index"),
        (lambda index: index["tensors"][0].update(order=10**6), "is no index"),
        (lambda index: index["tensors"][0].update(order=[0, 10**12]), "is no index"),
        (lambda index: index["orders"][0].append(10**6), "is no index"),
        (lambda index: index["tensors"][0].pop("name"), "is no index"),
        (lambda index: index.pop("tensors"), "is no index"),
    ],
)
def test_an_index_that_is_damaged_is_refused(tmp_path: Path, change: Callable[[Any], None], message: str) -> None:
    adopt(write_gguf(tmp_path / "m.gguf"), tmp_path / "adopted")
    path = tmp_path / "adopted/model.gguf.json"
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))
    with pytest.raises(ModelError, match=message):
        check_folder(tmp_path / "adopted")


def test_a_file_that_is_gone_is_asked_for_and_found_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECSERVE_HOME", str(tmp_path / "home"))
    path = write_gguf(tmp_path / "m.gguf")
    folder = catalog.resolve(str(path), progress=False)
    (tmp_path / "sub").mkdir()
    path.rename(tmp_path / "sub/m.gguf")
    with pytest.raises(ModelError, match="Is the GGUF file still there"):
        check_folder(folder)
    assert catalog.resolve(str(tmp_path / "sub/m.gguf"), progress=False) == folder
    check_folder(folder)
