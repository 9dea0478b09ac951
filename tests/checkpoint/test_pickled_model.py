"""Folders with pytorch_model.bin: converted once, whole or not at all, without running what is in them."""

from __future__ import annotations

import json
import os
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from specserve.checkpoint import catalog
from specserve.checkpoint.installed import installed
from specserve.checkpoint.weights import Weights
from specserve.cli.inspect import inspect
from specserve.doctor import examine
from specserve.errors import ModelError, NotFetchedError
from specserve.kernels.reference import Kernels
from specserve.models.loader import load_model
from specserve.testing import PagedDecoder, write_tiny_model

PROMPT = [5, 1, 200, 17, 30, 42]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPECSERVE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def write_old(folder: Path, *, shards: int = 1, is_zip: bool = True, **overrides: Any) -> dict[str, Tensor]:
    """A tiny model as torch.save wrote it -> its tensors."""
    write_tiny_model(folder, "llama", num_hidden_layers=1, **overrides)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    save(folder, tensors, shards, is_zip)
    return tensors


def save(folder: Path, tensors: dict[str, Tensor], shards: int = 1, is_zip: bool = True) -> None:
    places: dict[str, str] = {}
    for number in range(shards):
        name = "pytorch_model.bin" if shards == 1 else f"pytorch_model-{number + 1:05}-of-{shards:05}.bin"
        own = {key: tensors[key] for key in list(tensors)[number::shards]}
        torch.save(own, folder / name, _use_new_zipfile_serialization=is_zip)
        places |= dict.fromkeys(own, name)
    if shards > 1:
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": places}))


def logits(folder: Path) -> Tensor:
    return PagedDecoder(load_model(folder, Kernels(torch.device("cpu"), torch.float32)), 1, 16).chunks(0, PROMPT, 6)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("is_zip", [True, False])
def test_it_is_the_model_that_was_saved(shards: int, is_zip: bool, tmp_path: Path, home: Path) -> None:
    tensors = write_old(tmp_path / "old", shards=shards, is_zip=is_zip)
    folder = catalog.resolve(str(tmp_path / "old"), progress=False)
    assert folder.parent == home / "models"
    found = Weights(folder)
    assert set(found) == set(tensors) and all(torch.equal(found[name], tensors[name]) for name in tensors)
    write_tiny_model(tmp_path / "new", "llama", num_hidden_layers=1)
    assert torch.equal(logits(folder), logits(tmp_path / "new"))
    assert len(list(folder.glob("*.safetensors"))) == shards
    assert not list(folder.glob("*.bin*"))


def test_it_is_converted_once_and_again_when_it_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = write_old(tmp_path / "old")
    first = catalog.resolve(str(tmp_path / "old"), progress=False)
    with monkeypatch.context() as patch:
        patch.setattr(catalog, "_make_once", lambda *args: pytest.fail("it was converted again"))
        assert catalog.resolve(str(tmp_path / "old"), progress=False, offline=True) == first
    save(tmp_path / "old", tensors | {"model.norm.weight": tensors["model.norm.weight"] * 2})
    os.utime(tmp_path / "old" / "pytorch_model.bin", ns=(1, 1))
    second = catalog.resolve(str(tmp_path / "old"), progress=False)
    assert second != first and torch.equal(Weights(second)["model.norm.weight"], 2 * tensors["model.norm.weight"])
    assert [model.name for model in installed()] == ["old", "old"]


@pytest.mark.parametrize("said", [True, False, None])
def test_a_tied_head_is_kept_once(said: bool | None, tmp_path: Path) -> None:
    """Where config.json does not say, transformers knows what that means: of Llama that nothing is tied."""
    tensors = write_old(tmp_path / "old", tie_word_embeddings=True)
    config = json.loads((tmp_path / "old" / "config.json").read_text())
    config.pop("tie_word_embeddings")
    added = {} if said is None else {"tie_word_embeddings": said}
    (tmp_path / "old" / "config.json").write_text(json.dumps(config | added))
    save(tmp_path / "old", tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]})
    folder = catalog.resolve(str(tmp_path / "old"), progress=False)
    assert ("lm_head.weight" in Weights(folder)) == (not said)
    assert torch.equal(logits(folder), logits(folder))


def test_a_head_that_only_looks_tied_is_kept(tmp_path: Path) -> None:
    tensors = write_old(tmp_path / "old", tie_word_embeddings=True)
    save(tmp_path / "old", tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1})
    folder = catalog.resolve(str(tmp_path / "old"), progress=False)
    with pytest.raises(ModelError, match="tie_word_embeddings"):
        load_model(folder, Kernels(torch.device("cpu"), torch.float32))


def test_tensors_in_another_order_and_of_all_dtypes(tmp_path: Path) -> None:
    tensors = write_old(tmp_path / "old")
    others = {
        "turned": torch.arange(12.0).view(3, 4).T,
        "part": torch.arange(12.0)[3:7],
        "bool": torch.tensor([True, False]),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "number": torch.tensor(5),
        "nothing": torch.zeros(0, 4),
    }
    save(tmp_path / "old", tensors | others)
    found = Weights(catalog.resolve(str(tmp_path / "old"), progress=False))
    for name, tensor in others.items():
        assert torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype


class Code:
    """An object that a pickle would make by calling something."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch executed",)


@pytest.mark.parametrize("is_zip", [True, False])
def test_a_file_that_would_run_code_is_refused(
    is_zip: bool, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tensors = write_old(tmp_path / "old")
    save(tmp_path / "old", tensors | {"code": Code()}, is_zip=is_zip)  # type: ignore[dict-item]
    with pytest.raises(ModelError, match=r"pytorch_model\.bin cannot be read as tensors alone.*save_file"):
        catalog.resolve(str(tmp_path / "old"), progress=False)
    assert not (tmp_path / "executed").exists()
    assert [path.name for path in (home / "models").iterdir() if path.suffix != ".lock"] == []


def test_too_little_room_is_said_before(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_old(tmp_path / "old")
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10, 0, 1000))
    with pytest.raises(ModelError, match=r"takes 0\.00 GiB, and .* has 0\.00 GiB free.*SPECSERVE_HOME"):
        catalog.resolve(str(tmp_path / "old"), progress=False)
    assert not list((home / "models").glob("*/model.safetensors"))


def test_progress_and_log_say_what_it_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    write_old(tmp_path / "old")
    with caplog.at_level("INFO"):
        catalog.resolve(str(tmp_path / "old"))
    assert "old, 0.00 GiB to safetensors, in" in caplog.text
    said = "".join(capsys.readouterr().err.split())
    assert "Convertingpytorch_model.bin,0.00GiBtosafetensors,in" in said


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"a": "../pytorch_model.bin"}, r"only \.bin files of the same folder"),
        ({"a": "other.safetensors"}, r"only \.bin files of the same folder"),
        ({"a": "none.bin"}, r"names none\.bin, which the folder does not have"),
    ],
)
def test_an_index_that_is_wrong_is_refused(change: dict[str, str], words: str, tmp_path: Path) -> None:
    write_old(tmp_path, shards=2)
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": json.loads(index.read_text())["weight_map"] | change}))
    with pytest.raises(ModelError, match=words):
        catalog.resolve(str(tmp_path), progress=False)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    tensors = write_old(tmp_path / "old", shards=2)
    torch.save(tensors, tmp_path / "old" / "pytorch_model-00002-of-00002.bin")
    with pytest.raises(ModelError, match="and in another of its files"):
        catalog.resolve(str(tmp_path / "old"), progress=False)


def test_a_tokenizer_is_made_of_its_older_files(tmp_path: Path) -> None:
    write_old(tmp_path / "old")
    tokenizer = json.loads((tmp_path / "old" / "tokenizer.json").read_text())
    (tmp_path / "old" / "tokenizer.json").unlink()
    (tmp_path / "old" / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    (tmp_path / "old" / "vocab.json").write_text(json.dumps(tokenizer["model"]["vocab"] | {"<|endoftext|>": 300}))
    merges = [" ".join(merge) for merge in tokenizer["model"]["merges"]]
    (tmp_path / "old" / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]))
    folder = catalog.resolve(str(tmp_path / "old"), progress=False)
    made = json.loads((folder / "tokenizer.json").read_text())["model"]
    assert made["vocab"].items() >= tokenizer["model"]["vocab"].items()


def test_without_any_tokenizer_it_is_refused(tmp_path: Path) -> None:
    write_old(tmp_path / "old")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "old" / name).unlink()
    with pytest.raises(ModelError, match=r"has no tokenizer\.json, and no tokenizer\.model"):
        catalog.resolve(str(tmp_path / "old"), progress=False)


def test_a_model_that_brings_code_is_refused_before_it_is_converted(tmp_path: Path, home: Path) -> None:
    write_old(tmp_path / "old")
    config = json.loads((tmp_path / "old" / "config.json").read_text())
    (tmp_path / "old" / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoModel": "a.B"}}))
    with pytest.raises(ModelError, match="auto_map"):
        catalog.resolve(str(tmp_path / "old"), progress=False)
    assert not home.exists()


def test_doctor_says_so_and_changes_nothing(tmp_path: Path, home: Path) -> None:
    write_old(tmp_path / "old")
    with pytest.raises(NotFetchedError, match="which the first start converts"):
        catalog.resolve(str(tmp_path / "old"), convert=False)
    models = examine(str(tmp_path / "old"))[-1]
    assert models.fault is None and "the first start converts" in dict(models.rows)["folder"]
    assert not home.exists()


@pytest.mark.parametrize("shards", [1, 2])
def test_inspect_converts_it(shards: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_old(tmp_path / "old", shards=shards)
    inspect(str(tmp_path / "old"))
    said = capsys.readouterr().out
    assert "llama" in said and "home" in said
