"""Models that run through transformers: their scores are transformers' own, their rows have the same bits in any
company, and what cannot be served is refused by its name."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from specserve.errors import CapacityError, ModelError
from specserve.kernels.reference import Kernels
from specserve.models import loader
from specserve.models.heads.origin import TargetOrigin
from specserve.models.loader import (
    check_memory,
    check_tensors,
    find_architecture,
    load_model,
    native_model_types,
    native_spec,
    num_packed_bytes,
    num_weight_bytes,
)
from specserve.models.transformers import TransformersModel
from specserve.ops import Ops
from specserve.testing import PagedDecoder, unequal_rows
from specserve.testing.causal_models import (
    BEGIN,
    END,
    all_kinds,
    tiny_causal_config,
    verdict,
    write_tiny_causal_model,
)

CPU = torch.device("cpu")
PROMPT = torch.randint(0, 293, (45,), generator=torch.Generator().manual_seed(5)).tolist()
KINDS = (
    *("apertus", "arcee", "biogpt", "codegen", "cohere", "cohere2", "exaone4", "gemma", "glm4", "hunyuan_v1_dense"),
    *("ministral", "modernbert-decoder", "nemotron", "olmo", "persimmon", "phi", "seed_oss", "stablelm"),
)


@pytest.fixture(autouse=True, scope="module")
def single_thread() -> None:
    torch.set_num_threads(1)


def native(weights: str) -> Ops:
    cpu = pytest.importorskip("specserve.kernels.cpu", reason="Built without native kernels.")
    dtype = torch.float32 if weights == "float32" else torch.bfloat16
    made: Ops = cpu.Kernels(dtype, weights if weights.startswith("int") else "none", threads=1)
    return made


def transformers_logits(folder: Path, prompt: list[int]) -> torch.Tensor:
    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("ignore")
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
        model, info = loaded
        assert not any(info.values()), f"transformers did not read the folder whole: {info}"
        logits: torch.Tensor = model(torch.tensor([prompt])).logits[0]
        return logits


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Written when they are asked for."""
    root = tmp_path_factory.mktemp("models")

    class Folders(dict[str, Path]):
        def __missing__(self, kind: str) -> Path:
            self[kind] = write_tiny_causal_model(root / kind, kind, seed=3)
            return self[kind]

    return Folders()


@pytest.mark.parametrize("kind", KINDS)
def test_scores_are_transformers_own_and_rows_keep_their_bits(kind: str, folders: dict[str, Path]) -> None:
    folder = folders[kind]
    expected = transformers_logits(folder, PROMPT)
    model = load_model(folder, native("float32"))
    assert isinstance(model, TransformersModel)
    paged = PagedDecoder(model, 2, 48)
    for found in (paged.chunks(0, PROMPT, 45), paged.chunks(1, PROMPT, 10)):
        error = (found - expected).abs().max() / expected.abs().max()
        assert error < 1e-4, f"relative error {error:.1e}"
        assert torch.equal(found.argmax(-1), expected.argmax(-1))
    assert unequal_rows(model) == []


@pytest.mark.each_choice(rounds=2)
@pytest.mark.parametrize("weights", ["bfloat16", "int8", "int4"])
@pytest.mark.parametrize("kind", ["stablelm", "modernbert-decoder", "biogpt"])
def test_rows_keep_their_bits_with_packed_weights(kind: str, weights: str, folders: dict[str, Path]) -> None:
    model = load_model(folders[kind], native(weights))
    assert unequal_rows(model) == []
    expected = transformers_logits(folders[kind], PROMPT)
    found = PagedDecoder(model, 1, 48).chunks(0, PROMPT, 45)
    error = (found - expected).norm() / expected.norm()
    assert error < {"bfloat16": 0.03, "int8": 0.1, "int4": 1.0}[weights], f"relative error {error:.1e}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["cohere2", "phi"])
def test_reference_kernels_serve_them_too(kind: str, dtype: torch.dtype, folders: dict[str, Path]) -> None:
    model = load_model(folders[kind], Kernels(CPU, dtype))
    expected = transformers_logits(folders[kind], PROMPT)
    found = PagedDecoder(model, 1, 48).chunks(0, PROMPT, 45)
    assert (found - expected).abs().max() / expected.abs().max() < (1e-4 if dtype == torch.float32 else 0.05)
    assert unequal_rows(model) == []


# What is refused


def refusal(config: Any) -> str:
    given = config.to_dict() if hasattr(config, "to_dict") else config
    with pytest.raises(ModelError) as error:
        find_architecture({**given, "architectures": None}).spec(given)
    assert repr(given["model_type"]) in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("kind", "overrides", "words"),
    [
        ("gemma2", {}, "soft-capped"),
        ("granite_swa", {}, "sinks"),
        ("minicpm3", {}, "16 of a value"),
        ("xglm", {}, "multiplies matrices with bmm, not in a linear layer, in model.layers.0.self_attn"),
        ("mamba", {}, "convolution"),
        ("bart", {}, "encoder-decoder"),
        ("bert", {"is_decoder": False}, "does not see all rows before it"),
        ("diffllama", {}, "more than one attention"),
        ("lfm2", {"layer_types": ["conv", "full_attention", "conv"]}, "convolution"),
        ("doge", {}, "masks, or biases"),
        ("minimax", {}, "multiplies matrices with bmm, not in a linear layer, in model.layers.1.self_attn"),
        (
            "stablelm",
            {
                "rope_parameters": {
                    "rope_type": "longrope",
                    "rope_theta": 1e4,
                    "partial_rotary_factor": 0.25,
                    "short_factor": [1.0, 1.0],
                    "long_factor": [2.0, 3.0],
                    "factor": 32.0,
                    "original_max_position_embeddings": 64,
                }
            },
            "rows beside it",
        ),
    ],
)
def test_what_is_not_served_is_refused_by_its_name(kind: str, overrides: dict[str, Any], words: str) -> None:
    assert words in refusal(tiny_causal_config(kind, **overrides))


def test_code_of_a_checkpoint_is_never_asked_for(folders: dict[str, Path], tmp_path: Path) -> None:
    config = json.loads((folders["stablelm"] / "config.json").read_text())
    (tmp_path / "evil.py").write_text("raise SystemExit('it ran')")
    strange = {**config, "auto_map": {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"}}
    assert find_architecture(strange).spec(strange).num_layers == 3
    with pytest.raises(ModelError, match="transformers has none, either"):
        find_architecture({**strange, "model_type": "evil"})


def changed(folder: Path, target: Path, changes: dict[str, torch.Tensor], remove: str = "") -> Path:
    target.mkdir()
    (target / "config.json").write_text((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    tensors.pop(remove, None)
    save_file(tensors | changes, target / "model.safetensors", {"format": "pt"})
    return target


def test_tensors_too_many_and_too_few_are_named(folders: dict[str, Path], tmp_path: Path) -> None:
    folder, name = folders["stablelm"], "model.layers.1.mlp.up_proj.weight"
    with pytest.raises(ModelError, match=f"lacks {name}"):
        check_tensors(changed(folder, tmp_path / "few", {}, name))
    with pytest.raises(ModelError, match=r"has model\.layers\.1\.gate\.weight, which config\.json does not account"):
        check_tensors(changed(folder, tmp_path / "many", {"model.layers.1.gate.weight": torch.zeros(2)}))
    with pytest.raises(ModelError, match=r"shape \(64, 128\); config\.json implies \(128, 64\)"):
        check_tensors(changed(folder, tmp_path / "shape", {name: torch.zeros(64, 128)}))


def test_a_tied_head_that_differs_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    table = load_file(folders["gemma"] / "model.safetensors")["model.embed_tokens.weight"]
    same = changed(folders["gemma"], tmp_path / "same", {"lm_head.weight": table.clone()})
    load_model(same, native("float32"))
    with pytest.raises(ModelError, match="tie_word_embeddings"):
        load_model(changed(folders["gemma"], tmp_path / "other", {"lm_head.weight": table + 1}), native("float32"))


def test_rows_that_differ_on_this_machine_are_refused(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the probe has not noticed: here an attention that adds the number of rows."""
    own = TransformersModel._attend

    def wrong(self: TransformersModel, module: Any, q: torch.Tensor, *given: Any, **more: Any) -> torch.Tensor:
        return own(self, module, q, *given, **more) + 1e-3 * q.shape[2]

    monkeypatch.setattr(TransformersModel, "_attend", wrong)
    with pytest.raises(ModelError, match="depend on other rows"):
        load_model(folders["stablelm"], native("float32"))


# Memory


def test_memory_and_packed_weights(folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folders["phi"]
    ops = native("int8")
    spec = check_tensors(folder).spec
    assert num_weight_bytes(spec, torch.float32) == sum(
        each.nbytes for each in load_file(folder / "model.safetensors").values()
    )
    needed = num_packed_bytes(spec, ops)
    check_memory(spec, ops, needed)
    with pytest.raises(CapacityError, match="int8"):
        check_memory(spec, ops, needed - 1)
    monkeypatch.setenv("SPECSERVE_HOME", str(tmp_path))
    monkeypatch.setattr(loader, "_WORTH_BYTES", 0)
    first, second = load_model(folder, ops), load_model(folder, ops, 100)
    assert (first.num_mapped_bytes, second.num_mapped_bytes) == (0, needed)
    one, two = (PagedDecoder(model, 1, 48).chunks(0, PROMPT, 45) for model in (first, second))
    assert torch.equal(one, two)


def test_what_needs_a_native_model_says_so(folders: dict[str, Path]) -> None:
    with pytest.raises(ModelError, match="StableLmForCausalLM runs through transformers"):
        native_spec(folders["stablelm"])
    with pytest.raises(ModelError, match="runs through transformers"):
        TargetOrigin(folders["stablelm"]).head()
    assert TargetOrigin(folders["stablelm"]).fingerprint() != TargetOrigin(folders["phi"]).fingerprint()


# The table of docs/models.md


def table() -> dict[str, str]:
    text = (Path(__file__).parents[2] / "docs/models.md").read_text("utf-8")
    lines = text.partition(BEGIN)[2].partition(END)[0].splitlines()
    cells = (line.strip("|").split("|") for line in lines if line.startswith("| `") and " | |" not in line)
    return {kind.strip(" `"): verdict.strip() for kind, verdict in cells}


def test_the_table_has_all_causal_models() -> None:
    """What has become native since is no reason to look at all others again."""
    missing = set(all_kinds()) - set(table()) - set(native_model_types())
    assert not missing, "python -m specserve.testing.causal_models docs/models.md"
    assert set(table()) <= set(all_kinds())


@pytest.mark.parametrize(
    "kind",
    [
        "arcee",
        "codegen",
        "deepseek_v2",
        "flex_olmo",
        "gemma2",
        "mamba",
        "marian",
        "nemotron",
        "olmo",
        "roberta",
        "stablelm",
    ],
)
def test_the_table_is_up_to_date(kind: str) -> None:
    assert verdict(kind) == table()[kind]


def test_at_least_twelve_architectures_have_no_file_of_ours() -> None:
    ways = [way for kind, way in table().items() if kind not in native_model_types()]
    assert sum(way == "through transformers" for way in ways) >= 30
    assert all(table()[kind] == "through transformers" for kind in KINDS if kind not in native_model_types())
