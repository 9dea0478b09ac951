"""Packed weights on disk: a second start reads no tensor and computes the same bits, whatever is wrong with the file is
noticed and mended, and nothing that goes wrong with the cache costs more than the cache."""

from __future__ import annotations

import errno
import gc
import importlib
import importlib.util
import json
import logging
import os
import resource
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from specserve.checkpoint import catalog
from specserve.checkpoint.installed import installed
from specserve.checkpoint.packed import PackedWeights
from specserve.checkpoint.weights import Weights, read_config
from specserve.errors import CapacityError, ModelError
from specserve.kernels.reference import Kernels as Reference
from specserve.models import loader
from specserve.models.decoder import Decoder
from specserve.models.loader import check_memory, load_model, num_packed_bytes
from specserve.models.reader import WeightReader
from specserve.ops.packing import Lazy, below
from specserve.testing import PagedDecoder, write_tiny_model
from tests.checkpoint.test_gguf import random_tensors, write_gguf

if importlib.util.find_spec("specserve.kernels._native") is None and os.environ.get("SPECSERVE_REQUIRE_NATIVE") != "1":
    pytest.skip("Built without native kernels, and no others keep packed weights.", allow_module_level=True)
cpu: Any = importlib.import_module("specserve.kernels.cpu")

PROMPT = torch.randint(0, 265, (30,), generator=torch.Generator().manual_seed(5)).tolist()
ODD = {"hidden_size": 60, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 12, "intermediate_size": 77}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"tie_word_embeddings": False}),
    "llama-odd-biased": ("llama", {**ODD, "attention_bias": True, "mlp_bias": True, "vocab_size": 301}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "mistral": ("mistral", {"sliding_window": 7, "num_key_value_heads": 1}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"tie_word_embeddings": False}),
    "gemma3": ("gemma3", {**ODD, "sliding_window": 6}),
    "gemma3-untied": ("gemma3", {"tie_word_embeddings": False, "attention_bias": True}),
}
WEIGHTS = ("float32", "bfloat16", "int8", "int4")


@pytest.fixture(autouse=True, scope="module")
def single_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own, in which tiny models are worth a file."""
    monkeypatch.setenv("SPECSERVE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(loader, "_WORTH_BYTES", 0)
    return tmp_path / "home"


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The tensors that were read from safetensors."""
    names: list[str] = []
    plain = Weights.__getitem__

    def counted(self: Weights, name: str) -> torch.Tensor:
        names.append(name)
        return plain(self, name)

    monkeypatch.setattr(Weights, "__getitem__", counted)
    return names


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "model", "qwen3")


def write(folder: Path, case: str, seed: int = 1) -> Path:
    architecture, overrides = CASES[case]
    return write_tiny_model(folder, architecture, seed, **overrides)


def make_ops(weights: str = "int8") -> Any:
    dtype = torch.float32 if weights == "float32" else torch.bfloat16
    return cpu.Kernels(dtype, weights if weights.startswith("int") else "none", 1)


def logits(model: Decoder) -> torch.Tensor:
    return PagedDecoder(model, 1, 48).chunks(0, PROMPT, 11)


def unkept(folder: Path, weights: str = "int8") -> torch.Tensor:
    """What a model computes that was never on disk."""
    tensors = load_file(folder / "model.safetensors")
    config = read_config(folder)
    return logits(Decoder(loader.find_architecture(config).spec(config), tensors, make_ops(weights)))


def files(folder: Path) -> list[Path]:
    """All there but locks."""
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock")


def only_file(home: Path) -> Path:
    (path,) = files(home / "packed")
    return path


# The second start


# Each case with two formats, each format with four cases, as no case packs otherwise than another in a format.
@pytest.mark.parametrize(
    ("case", "weights"), [(case, WEIGHTS[(i + i // 4 + k) % 4]) for i, case in enumerate(CASES) for k in (0, 2)]
)
def test_a_second_start_reads_no_tensor_and_has_the_same_bits(
    case: str, weights: str, tmp_path: Path, home: Path, reads: list[str]
) -> None:
    folder = write(tmp_path / "model", case)
    first = load_model(folder, make_ops(weights))
    assert set(reads) == set(load_file(folder / "model.safetensors"))
    reads.clear()
    second = load_model(folder, make_ops(weights))
    assert reads == []
    in_file = sum(tensor.nbytes for name, tensor in load_file(only_file(home)).items() if ".filler" not in name)
    assert (first.num_mapped_bytes, second.num_mapped_bytes) == (0, in_file)
    wanted = unkept(folder, weights)
    assert torch.equal(logits(first), wanted)
    assert torch.equal(logits(second), wanted)


def test_a_first_start_reads_weights_only_while_it_packs_them(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never more than what one product needs, so that two copies of all weights are not in memory together."""
    plain = Weights.__getitem__
    read: list[weakref.ref[torch.Tensor]] = []
    num_alive: list[int] = []

    def watched(self: Weights, name: str) -> torch.Tensor:
        tensor = plain(self, name)
        read.append(weakref.ref(tensor))
        num_alive.append(sum(reference() is not None for reference in read))
        return tensor

    monkeypatch.setattr(Weights, "__getitem__", watched)
    load_model(folder, make_ops())
    assert max(num_alive) == 3, "queries, keys and values"


def test_the_length_does_not_matter(folder: Path, reads: list[str]) -> None:
    load_model(folder, make_ops(), 64)
    reads.clear()
    assert load_model(folder, make_ops(), 100).spec.max_len == 100
    assert reads == []


def test_every_way_to_store_weights_has_its_own_file(folder: Path, home: Path, reads: list[str]) -> None:
    for weights in WEIGHTS:
        load_model(folder, make_ops(weights))
    assert len(files(home / "packed")) == len({make_ops(weights).layout for weights in WEIGHTS}) == len(WEIGHTS)
    reads.clear()
    for weights in WEIGHTS:
        load_model(folder, make_ops(weights))
    assert reads == []


def test_mapped_weights_are_aligned_and_what_is_written_to_them_stays_here(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", "gemma3")  # whose table does not end where the next part may begin
    load_model(folder, make_ops())
    model: Any = load_model(folder, make_ops())
    layer = model._stack.layers[1]
    tensors = [
        model._embedding,
        model._head.packed.memory,
        layer.norm,
        layer.attention.head_norms.q,
        layer.attention.qkv.packed.memory,
        layer.mlp.down.packed.memory,
    ]
    assert all(tensor.data_ptr() % 64 == 0 for tensor in tensors)
    for tensor in tensors:
        tensor.zero_()
    assert torch.equal(logits(load_model(folder, make_ops())), unkept(folder))


def test_a_second_start_in_a_fresh_process_imports_no_compiler(folder: Path) -> None:
    """Torch computes some ops of its meta device with what torch.compile is made of; importing that takes a second."""
    load_model(folder, make_ops())
    code = (
        "import sys, torch\nfrom pathlib import Path\nfrom specserve.kernels.cpu import Kernels\n"
        "from specserve.models import loader\nloader._WORTH_BYTES = 0\n"
        "model = loader.load_model(Path(sys.argv[1]), Kernels(torch.bfloat16, 'int8', 1))\n"
        "print(model.num_mapped_bytes > 0, 'torch._dynamo' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False"]


def test_the_file_is_safetensors_with_names_and_begins_every_tensor_at_64_bytes(tmp_path: Path, home: Path) -> None:
    load_model(write(tmp_path / "model", "gemma3"), make_ops())
    infos = read_header(only_file(home))
    assert {name.removeprefix("model.layers.0.") for name in infos if name.startswith("model.layers.0.mlp.")} == {
        "mlp.down_proj.linear",
        "mlp.gate_proj+model.layers.0.mlp.up_proj.gated",
    }
    assert {"model.embed_tokens.table", "model.embed_tokens.head", "model.norm.vector"} < infos.keys()
    start = only_file(home).stat().st_size - max(info["data_offsets"][1] for info in infos.values())
    assert [
        name for name, info in infos.items() if (start + info["data_offsets"][0]) % 64 and ".filler" not in name
    ] == []
    assert any(".filler" in name for name in infos), "the table does not end where the next tensor may begin"
    assert infos.keys() == load_file(only_file(home)).keys()


def read_header(path: Path) -> dict[str, Any]:
    content = path.read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    assert "int8" in header.pop("__metadata__")["key"]
    return dict(header)


def test_what_is_small_is_packed_at_every_start(folder: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())
    monkeypatch.setattr(loader, "_WORTH_BYTES", size + 1)
    load_model(folder, make_ops())
    assert not home.exists()
    monkeypatch.setattr(loader, "_WORTH_BYTES", size)
    load_model(folder, make_ops())
    assert only_file(home)


def test_the_reference_keeps_nothing(folder: Path, home: Path) -> None:
    load_model(folder, Reference(torch.device("cpu"), torch.float32))
    assert not home.exists()


# Where the file lies


def test_nothing_is_written_into_a_users_folder(folder: Path, home: Path) -> None:
    before = sorted(folder.rglob("*"))
    load_model(folder, make_ops())
    assert sorted(folder.rglob("*")) == before
    assert only_file(home).parent == home / "packed"


def test_in_the_cache_it_lies_with_its_model_and_counts_as_a_part_of_it(home: Path, reads: list[str]) -> None:
    folder = write(home / "models" / f"mine-0123456789ab-v{catalog.CONVERTER_VERSION}", "llama")
    before = installed()[0].num_bytes
    load_model(folder, make_ops())
    (path,) = folder.glob("*.packed")
    assert installed()[0].num_bytes == before + path.stat().st_size
    assert not (home / "packed").exists()
    reads.clear()
    load_model(folder, make_ops())
    assert reads == []


@pytest.mark.parametrize("kind", ["Q8_0", "F16"])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_embeddings_that_a_gguf_file_has_as_blocks_are_not_kept_twice(
    tmp_path: Path, reads: list[str], weights: str, kind: str
) -> None:
    name, number = "token_embd.weight", gguf.GGMLQuantizationType[kind]
    values = random_tensors("qwen3", 265)
    tensors = values | {name: gguf.quantize(values[name], number)}
    path = write_gguf(tmp_path / "m.gguf", "qwen3", tensors=tensors, kinds={name: kind})
    folder = catalog.resolve(str(path), progress=False)
    expected = unkept(catalog.as_safetensors(folder, tmp_path / "written"), weights)
    for wanted in ({*Weights(folder)}, {"model.embed_tokens.weight"} if kind == "Q8_0" else set()):
        reads.clear()
        assert torch.equal(logits(load_model(folder, make_ops(weights))), expected)
        assert set(reads) == wanted
    with safe_open(next(folder.glob("*.packed")), framework="pt") as file:
        assert ("model.embed_tokens.table" in file.keys()) == (kind == "F16")  # noqa: SIM118


def test_files_of_models_that_are_gone_are_removed(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone, kept, new = (write(tmp_path / name, "llama") for name in ("gone", "kept", "new"))
    with monkeypatch.context() as patch:
        patch.chdir(tmp_path)  # a relative path means nothing elsewhere
        for folder in (gone, kept):
            load_model(Path(folder.name), make_ops())
    for path in gone.iterdir():
        path.unlink()
    gone.rmdir()
    (home / "packed" / "strange.packed").write_bytes(b"?")
    load_model(new, make_ops())
    assert [path.name.partition("-")[0] for path in files(home / "packed")] == ["kept", "new"]


# What is noticed


def truncate(path: Path, size: int) -> None:
    os.truncate(path, size if size >= 0 else path.stat().st_size + size)


def append(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


DAMAGES: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: truncate(path, 0),
    "the header's length alone": lambda path: truncate(path, 8),
    "half of the header": lambda path: truncate(path, int.from_bytes(path.read_bytes()[:8], "little") // 2),
    "half": lambda path: truncate(path, path.stat().st_size // 2),
    "one byte less": lambda path: truncate(path, -1),
    "one byte more": append,
    "something else": lambda path: path.write_bytes(os.urandom(1000)),
    "of the format before": lambda path: path.write_bytes(b"specserve pack 1" + path.read_bytes()),
    "another safetensors file": lambda path: save_file({"model.norm.vector": torch.zeros(64).double()}, path),
    "the same with another order": lambda path: save_file(load_file(path), path, metadata(path)),
}


def metadata(path: Path) -> dict[str, str]:
    with safe_open(path, framework="pt") as file:
        return dict(file.metadata())


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_written_anew(damage: str, folder: Path, home: Path, reads: list[str]) -> None:
    load_model(folder, make_ops())
    whole = only_file(home).read_bytes()
    DAMAGES[damage](only_file(home))
    assert_mended(folder, reads)
    assert only_file(home).read_bytes() == whole


def assert_mended(folder: Path, reads: list[str], weights: str = "int8") -> None:
    """The next start packs anew and is right, and so is the one after it, which does not."""
    reads.clear()
    model = load_model(folder, make_ops(weights))
    assert reads, "packed anew"
    assert model.num_mapped_bytes == 0
    wanted = unkept(folder, weights)
    assert torch.equal(logits(model), wanted)
    reads.clear()
    assert torch.equal(logits(load_model(folder, make_ops(weights))), wanted)
    assert reads == []


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_changed_bit_of_the_header_is_noticed(data: st.DataObject, folder: Path, home: Path) -> None:
    load_model(folder, make_ops())
    whole = only_file(home).read_bytes()
    place = data.draw(st.integers(0, 7) | st.integers(8, 7 + int.from_bytes(whole[:8], "little")))
    changed = bytearray(whole)
    changed[place] ^= 1 << data.draw(st.integers(0, 7))
    only_file(home).write_bytes(changed)
    assert load_model(folder, make_ops()).num_mapped_bytes == 0
    assert only_file(home).read_bytes() == whole


def test_a_changed_source_is_noticed(folder: Path, reads: list[str]) -> None:
    """Of the same size, with other numbers."""
    before = logits(load_model(folder, make_ops()))
    path, size = folder / "model.safetensors", (folder / "model.safetensors").stat().st_size
    save_file({name: tensor.flip(0) for name, tensor in load_file(path).items()}, path, {"format": "pt"})
    assert path.stat().st_size == size
    assert not torch.equal(unkept(folder), before)
    assert_mended(folder, reads)


def test_a_changed_configuration_is_noticed(folder: Path, reads: list[str]) -> None:
    load_model(folder, make_ops())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.01}))
    assert_mended(folder, reads)


def test_another_model_in_the_same_place_is_noticed(folder: Path, tmp_path: Path, reads: list[str]) -> None:
    load_model(folder, make_ops())
    for path in (folder / "config.json", folder / "model.safetensors"):
        path.unlink()
    write(folder, "gemma3")
    assert_mended(folder, reads)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_kernels_that_pack_otherwise_have_another_layout(
    weights: str, folder: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, layout = cpu.alternating, make_ops(weights).layout
    load_model(folder, make_ops(weights))
    monkeypatch.setattr(cpu, "alternating", lambda parts: plain(parts).flip(1))
    assert make_ops(weights).layout != layout
    reads.clear()
    load_model(folder, make_ops(weights))
    assert reads


def test_a_layout_names_one_way_to_pack() -> None:
    layouts = [make_ops(weights).layout for weights in WEIGHTS]
    assert len(set(layouts)) == len(WEIGHTS)
    assert layouts == [make_ops(weights).layout for weights in WEIGHTS]
    for instruction_set in cpu.instruction_sets():
        assert cpu.Kernels(torch.bfloat16, "int8", 2, instruction_set).layout == make_ops("int8").layout


def test_another_version_of_the_packing_is_noticed(
    folder: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    load_model(folder, make_ops())
    monkeypatch.setattr(loader, "PACKING_VERSION", loader.PACKING_VERSION + 1)
    assert_mended(folder, reads)


def test_a_decoder_that_packs_otherwise_is_noticed(
    folder: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though nobody raised the version: values before keys, tensors of the same shapes, have another name."""
    load_model(folder, make_ops())
    plain = WeightReader.linear
    with monkeypatch.context() as patch:
        patch.setattr(WeightReader, "linear", lambda self, *names, **more: plain(self, *names[::-1], **more))
        reads.clear()
        swapped = logits(load_model(folder, make_ops()))
        assert {name.rpartition(".")[0].rpartition(".")[2] for name in reads} == {"q_proj", "k_proj", "v_proj"}
        assert torch.equal(swapped, unkept(folder))
    reads.clear()
    assert torch.equal(logits(load_model(folder, make_ops())), unkept(folder))
    assert reads == [], "the first tensors are still there"


@pytest.mark.parametrize(("shape", "dtype"), [((63,), torch.float32), ((64,), torch.bfloat16)])
def test_a_tensor_of_another_shape_or_dtype_is_packed_anew(tmp_path: Path, shape: Any, dtype: torch.dtype) -> None:
    with open_cache(tmp_path) as cache:
        cache.get("a", (64,), torch.float32, lambda: torch.ones(64))
    with open_cache(tmp_path) as cache:
        wanted = cache.get("a", shape, dtype, lambda: torch.full(shape, 2, dtype=dtype))
        assert torch.equal(wanted, torch.full(shape, 2, dtype=dtype))
    with open_cache(tmp_path) as cache:
        assert torch.equal(cache.get("a", shape, dtype, no_packing), wanted)


# Users other than the decoder


def open_cache(folder: Path, key: Any = "key") -> PackedWeights:
    return PackedWeights(folder / "some.packed", folder, lambda: key, lambda: nullcontext(lambda num_bytes: None))


def no_packing() -> torch.Tensor:
    pytest.fail("packed though it was in the file")


def test_tensors_are_found_by_name_in_any_order_and_by_several_users(tmp_path: Path) -> None:
    """As a drafter that packs weights of its own once the model has been loaded, with what ops return."""
    weight, bias, norm = torch.randn(50, 40), torch.randn(50), torch.randn(40)
    for _ in range(2):
        with open_cache(tmp_path) as cache:
            make_ops().pack_vector(norm, below(cache.get, "model.norm"))
        with open_cache(tmp_path) as cache:
            make_ops().pack(weight, bias, below(cache.get, "drafter.fc"))
    unread = Lazy((50, 40), no_packing), Lazy((50,), no_packing)
    with open_cache(tmp_path) as cache:
        found = make_ops().pack(*unread, below(cache.get, "drafter.fc"))
        found_norm = make_ops().pack_vector(Lazy((40,), no_packing), below(cache.get, "model.norm"))
    wanted = make_ops().pack(weight, bias)
    assert torch.equal(found.memory, wanted.memory)
    assert torch.equal(found.bias, wanted.bias)
    assert torch.equal(found_norm, make_ops().pack_vector(norm))
    assert cache.num_mapped_bytes == found.memory.nbytes + found.bias.nbytes + found_norm.nbytes


def test_a_name_is_packed_once_and_counted_once(tmp_path: Path) -> None:
    packings: list[int] = []
    for _ in range(2):
        with open_cache(tmp_path) as cache:
            for _ in range(2):
                cache.get("a", (64,), torch.float32, lambda: (packings.append(1), torch.ones(64))[1])
    assert packings == [1]
    assert cache.num_mapped_bytes == 256


def test_nothing_is_kept_of_an_earlier_key(tmp_path: Path) -> None:
    with open_cache(tmp_path, "early") as cache:
        cache.get("a", (64,), torch.float32, lambda: torch.ones(64))
    with open_cache(tmp_path, "late") as cache:
        cache.get("b", (64,), torch.float32, lambda: torch.ones(64))
    assert load_file(tmp_path / "some.packed").keys() == {"b"}


# What goes wrong


@contextmanager
def full_disk(num_bytes: int) -> Iterator[None]:
    """Files can grow to so many bytes, as the system has it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def failing(name: str, error: BaseException) -> Iterator[None]:
    def call(*arguments: Any) -> None:
        raise error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, name, call)
        yield


@pytest.mark.parametrize(
    "broken",
    [
        lambda: full_disk(0),
        lambda: full_disk(100_000),
        lambda: failing("fsync", OSError(errno.EIO, "broken")),
        lambda: failing("replace", OSError(errno.EROFS, "read-only")),
    ],
)
def test_a_full_or_broken_disk_costs_the_cache_alone(
    broken: Any, folder: Path, home: Path, reads: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    with broken():
        model = load_model(folder, make_ops())
    assert torch.equal(logits(model), unkept(folder))
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert str(home) in record.getMessage()
    assert "packs the weights anew" in record.getMessage()
    assert files(home) == []
    assert_mended(folder, reads)


def test_a_cache_that_cannot_be_made_costs_the_cache_alone(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SPECSERVE_HOME", str(tmp_path / "file"))
    assert torch.equal(logits(load_model(folder, make_ops())), unkept(folder))
    assert "cannot be written" in caplog.text


def test_a_file_that_cannot_be_read_costs_the_cache_alone(
    folder: Path, home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load_model(folder, make_ops())
    path = only_file(home)
    path.unlink()
    path.mkdir()
    assert torch.equal(logits(load_model(folder, make_ops())), unkept(folder))
    assert "cannot be written" in caplog.text


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError()])
def test_an_interrupted_start_leaves_nothing(
    error: BaseException, folder: Path, home: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: Any) -> torch.Tensor:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(cpu.Kernels, "layout", make_ops().layout)
        patch.setattr(cpu.Kernels, "pack_vector", interrupted)
        patch.setattr(loader, "check_memory", lambda *arguments: None)
        with pytest.raises((type(error), CapacityError)):
            load_model(folder, make_ops())
    assert files(home) == []
    with failing("fsync", error), pytest.raises((type(error), CapacityError)):  # all written, not yet renamed
        load_model(folder, make_ops())
    assert files(home) == []
    assert_mended(folder, reads)


def test_what_a_killed_start_left_is_cleaned_up_and_never_taken_for_whole(
    folder: Path, home: Path, reads: list[str]
) -> None:
    code = (
        "import os, sys, torch\nfrom pathlib import Path\nfrom specserve.kernels.cpu import Kernels\n"
        "from specserve.checkpoint import packed\nfrom specserve.models import loader\nloader._WORTH_BYTES = 0\n"
        "packed.os.fsync = lambda descriptor: os._exit(9)\n"  # all written, not yet renamed
        "loader.load_model(Path(sys.argv[1]), Kernels(torch.bfloat16, 'int8', 1))\n"
    )
    assert subprocess.run([sys.executable, "-c", code, str(folder)]).returncode == 9
    (leftover,) = files(home)
    assert leftover.name.endswith(".partial")
    assert_mended(folder, reads)
    assert only_file(home).name.endswith(".packed")


def test_two_starts_at_once_pack_once(folder: Path, home: Path, reads: list[str]) -> None:
    both = threading.Barrier(2)
    models: list[Decoder] = []

    def start() -> None:
        ops = make_ops()
        both.wait()
        models.append(load_model(folder, ops))

    threads = [threading.Thread(target=start) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(reads) == len(set(reads))
    assert sorted(model.num_mapped_bytes > 0 for model in models) == [False, True]
    assert torch.equal(logits(models[0]), logits(models[1]))
    assert only_file(home)


def test_a_source_that_changes_while_it_is_read_leaves_no_file(
    folder: Path, home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain = Weights.__getitem__

    def touched(self: Weights, name: str) -> torch.Tensor:
        os.utime(folder / "model.safetensors")
        return plain(self, name)

    monkeypatch.setattr(Weights, "__getitem__", touched)
    load_model(folder, make_ops())
    assert "changed while" in caplog.text
    assert files(home) == []


# What is refused, and memory


def test_a_tied_head_stored_twice_must_be_the_same(tmp_path: Path, home: Path, reads: list[str]) -> None:
    folder = write(tmp_path / "model", "llama-tied")
    tensors = load_file(folder / "model.safetensors")
    table = tensors["model.embed_tokens.weight"]
    save_file({**tensors, "lm_head.weight": table + 1}, folder / "model.safetensors")
    for _ in range(2):
        with pytest.raises(ModelError, match="tie_word_embeddings"):
            load_model(folder, make_ops())
        assert files(home) == []
    save_file({**tensors, "lm_head.weight": table.clone()}, folder / "model.safetensors")
    load_model(folder, make_ops())
    reads.clear()
    load_model(folder, make_ops())
    assert reads == []


@pytest.mark.parametrize("stored", WEIGHTS)
@pytest.mark.parametrize("case", ["llama-odd-biased", "gemma3", "qwen2-tied"])
def test_memory_is_counted_to_the_byte(stored: str, case: str, tmp_path: Path) -> None:
    """As the kernels pack: every part of the model, and the rotary tables."""
    ops: Any = make_ops(stored)
    model: Any = load_model(write(tmp_path / "model", case), ops)
    parts = [model._embedding, model._norm, *_memory(model._head)]
    for layer in model._stack.layers:
        vectors = (layer.norm, layer.mlp_norm, layer.post_norm, layer.post_mlp_norm)
        norms = layer.attention.head_norms
        parts += [*vectors, *((norms.q, norms.k) if norms else ())]
        weights = layer.attention.qkv, layer.attention.out, layer.mlp.up, layer.mlp.down
        parts += [part for weight in weights for part in _memory(weight)]
    parts += [table for tables in model._stack.tables.values() for table in tables]
    needed = sum(part.nbytes for part in parts if part is not None)
    assert num_packed_bytes(model.spec, ops) == needed
    check_memory(model.spec, ops, needed)
    with pytest.raises(CapacityError, match=stored):
        check_memory(model.spec, ops, needed - 1)


def _memory(product: Any) -> Iterator[Any]:
    yield from (product.packed.memory, product.packed.bias)


def test_progress_is_drawn_for_packing_alone(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    load_model(folder, make_ops(), progress=True)
    assert "Packing weights" in capfd.readouterr().err
    load_model(folder, make_ops(), progress=True)
    assert capfd.readouterr() == ("", "")
    load_model(folder, make_ops("int4"))
    assert capfd.readouterr() == ("", "")


def test_a_recording_keeps_what_it_points_into() -> None:
    ops = make_ops("float32")
    table, weight, norm = (
        ops.pack_table(torch.randn(9, 40)),
        ops.pack(torch.randn(50, 40)),
        ops.pack_vector(torch.ones(40)),
    )
    ids = torch.tensor([3, 8])
    wanted = ops.linear(ops.fused_add_norm(ops.embed(ids, table, 1.0), None, None, norm, 1e-5), weight).clone()
    with ops.recording() as recording:
        out = ops.linear(ops.fused_add_norm(ops.embed(ids, table, 1.0), None, None, norm, 1e-5), weight)
    alive = [weakref.ref(tensor) for tensor in (table, weight.memory, norm, ids)]
    del table, weight, norm, ids
    gc.collect()
    assert all(reference() is not None for reference in alive)
    recording.start(2, 0, None)
    recording.finish()
    assert torch.equal(out, wanted)
    del recording, out
    gc.collect()
    assert all(reference() is None for reference in alive)
