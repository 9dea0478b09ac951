"""Weights and config.json from folders that are whole, split, truncated, hostile."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from specserve.checkpoint.folder import check_folder
from specserve.checkpoint.weights import Weights, read_config
from specserve.errors import ModelError

A, B = torch.arange(12.0).reshape(3, 4), torch.full((5,), 2.5, dtype=torch.bfloat16)


def write_config(folder: Path, **config: Any) -> Path:
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"} | config))
    return folder


def split(folder: Path, **weight_map: Any) -> Path:
    save_file({"a": A}, folder / "one.safetensors")
    save_file({"b": B}, folder / "two.safetensors")
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"} | weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def test_one_file_is_a_mapping_of_tensors(tmp_path: Path) -> None:
    save_file({"a": A, "b": B}, tmp_path / "model.safetensors")
    weights = Weights(tmp_path)
    assert set(weights) == {"a", "b"}
    assert len(weights) == 2
    assert torch.equal(weights["a"], A)
    assert weights["b"].dtype == torch.bfloat16
    assert (weights.infos["b"].shape, weights.infos["b"].num_bytes, weights.infos["b"].dtype) == ((5,), 10, "BF16")
    with pytest.raises(KeyError):
        weights["c"]


def test_several_files_by_index_and_without_one(tmp_path: Path) -> None:
    split(tmp_path)
    assert torch.equal(Weights(tmp_path)["b"], B)
    (tmp_path / "model.safetensors.index.json").unlink()
    assert set(Weights(tmp_path)) == {"a", "b"}


def test_files_the_index_does_not_name_are_left_alone(tmp_path: Path) -> None:
    split(tmp_path)
    save_file({"a": A}, tmp_path / "consolidated.safetensors")
    assert set(Weights(tmp_path)) == {"a", "b"}


@pytest.mark.parametrize("size", [0, 5, 8, 40, -1])
def test_a_truncated_file_is_named_with_its_byte_counts(tmp_path: Path, size: int) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": A, "b": B}, path)
    content = path.read_bytes()
    path.write_bytes(content[:size])
    with pytest.raises(ModelError, match=r"model\.safetensors is truncated") as caught:
        Weights(tmp_path)
    assert f"{len(content[:size]):,}" in str(caught.value)


def test_a_file_that_is_too_long_is_refused(tmp_path: Path) -> None:
    save_file({"a": A}, tmp_path / "model.safetensors")
    with (tmp_path / "model.safetensors").open("ab") as stream:
        stream.write(b"more")
    with pytest.raises(ModelError, match="too long"):
        Weights(tmp_path)


@pytest.mark.parametrize("header", [b"no json at all", b"[1, 2]", b'{"a": 3}', b'{"a": {"dtype": "F32"}}', b"\xff\xfe"])
def test_a_header_that_is_garbage_is_refused(tmp_path: Path, header: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ModelError, match=r"model\.safetensors is no safetensors file"):
        Weights(tmp_path)


def test_a_header_that_contradicts_itself_is_refused(tmp_path: Path) -> None:
    header = b'{"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}'
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        Weights(tmp_path)


@pytest.mark.parametrize(
    "name", ["../one.safetensors", "/etc/x.safetensors", "sub/x.safetensors", "..\\x.safetensors", 7]
)
def test_an_index_cannot_point_out_of_its_folder(tmp_path: Path, name: Any) -> None:
    save_file({"b": B}, tmp_path / "one.safetensors")
    (tmp_path / "model").mkdir()
    with pytest.raises(ModelError, match="same folder"):
        Weights(split(tmp_path / "model", b=name))


def test_an_index_cannot_name_a_pickle(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"pytorch_model\.bin"):
        Weights(split(tmp_path, b="pytorch_model.bin"))


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [({"b": "three.safetensors"}, "three"), ({"c": "one.safetensors"}, "'c'"), ({"b": "one.safetensors"}, "'b'")],
)
def test_an_index_that_names_what_is_not_there_is_refused(
    tmp_path: Path, weight_map: dict[str, str], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        Weights(split(tmp_path, **weight_map))


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    save_file({"a": A}, tmp_path / "one.safetensors")
    save_file({"a": A}, tmp_path / "two.safetensors")
    with pytest.raises(ModelError, match="'a' is both in"):
        Weights(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickled_weights_are_refused_with_the_way_out(tmp_path: Path, name: str) -> None:
    torch.save({"a": A}, tmp_path / name)
    with pytest.raises(ModelError, match=rf"{name}.*pickle.*save_pretrained"):
        Weights(tmp_path)


def test_a_folder_without_weights_and_one_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no \.safetensors"):
        Weights(tmp_path)
    with pytest.raises(ModelError, match="not a folder"):
        Weights(tmp_path / "none")


def test_a_multimodal_config_becomes_its_text_models(tmp_path: Path) -> None:
    text = {"model_type": "gemma3_text", "hidden_size": 8}
    write_config(
        tmp_path, model_type="gemma3", text_config=text, vision_config={"hidden_size": 9}, eos_token_id=[1, 106]
    )
    config = read_config(tmp_path)
    assert (config["model_type"], config["hidden_size"], config["eos_token_id"]) == ("gemma3_text", 8, [1, 106])
    assert "text_config" not in config


@pytest.mark.parametrize(
    "where", [{"auto_map": {"AutoModel": "m.M"}}, {"text_config": {"auto_map": {"AutoModel": "m.M"}}}]
)
def test_models_that_bring_code_are_refused(tmp_path: Path, where: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match="auto_map"):
        read_config(write_config(tmp_path, **where))


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "not valid JSON"), ("[]", "JSON list"), ("{}", "no model_type"), (None, "cannot be read")],
)
def test_a_broken_config_is_refused(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match=message):
        read_config(tmp_path)


def test_a_folder_is_complete_only_with_a_tokenizer(tmp_path: Path) -> None:
    save_file({"a": A}, write_config(tmp_path) / "model.safetensors")
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        check_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    assert check_folder(tmp_path) == tmp_path
