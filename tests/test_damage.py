"""Whatever stands in a file that a model, a draft head or a store is read from: it is read, or there is one line that
names the file. No other error, no wait, no memory beyond a bound. Files are damaged as hypothesis says:
--hypothesis-profile=thorough tries twenty times as many ways."""

from __future__ import annotations

import hashlib
import json
import random
import re
import shutil
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from safetensors.torch import load_file, save_file

from specserve.checkpoint import catalog
from specserve.drafters.suffix import SuffixDrafter
from specserve.errors import ModelError, SpecserveError, TextError
from specserve.kernels import cpu
from specserve.models import loader
from specserve.models.heads.formats import is_head, read_head, write_head
from specserve.models.heads.loading import HeadLoader
from specserve.models.heads.spec import BlockSpec, EagleSpec, HeadSpec, MedusaSpec, TargetShape
from specserve.models.heads.speculators import Verifier
from specserve.models.spec import DecoderSpec
from specserve.speculation.base import DraftContext
from specserve.testing import llama_spec, tiny_config, write_tiny_model
from specserve.testing.damage import bounded, damaged, damaged_json, damaged_value, replace_by_another_kind
from specserve.text.tokenizer import Tokenizer

MIB, SECONDS = 768, 30.0  # that one reading may take; most of both is that of a busy machine
SMALL = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}


# --- what is damaged --------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own, in which tiny models are worth a file."""
    monkeypatch.setenv("SPECSERVE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(loader, "_WORTH_BYTES", 0)
    return tmp_path / "home"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "m", "gemma3", **SMALL | {"layer_types": None})


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def put(folder: Path, source: Path | None = None) -> Path:
    """A copy, or an empty folder, in the place of what was there."""
    shutil.rmtree(folder, ignore_errors=True)
    if source is None:
        folder.mkdir(parents=True)
    else:
        shutil.copytree(source, folder)
    return folder


def ops() -> cpu.Kernels:
    return cpu.Kernels(torch.bfloat16, "int8", 1)


# --- how --------------------------------------------------------------------------------------------------------------


def damage(path: Path, rng: random.Random) -> None:
    """One file, in a way that its format suggests, or none at all."""
    content = path.read_bytes()
    kind = rng.randint(0, 9)
    if kind == 0:
        replace_by_another_kind(path, rng)
    elif path.suffix in (".json", ".jinja") and kind < 3:
        path.write_bytes(damaged(content, rng))
    elif path.suffix == ".json":
        path.write_text(damaged_json(content.decode(), rng), "utf-8", "surrogatepass")
    elif path.suffix == ".safetensors" and kind < 6:
        path.write_bytes(with_damaged_header(content, rng))
    else:
        path.write_bytes(damaged(content, rng, header=3000))


def with_damaged_header(content: bytes, rng: random.Random) -> bytes:
    size = int.from_bytes(content[:8], "little")
    header = damaged_json(content[8 : 8 + size].decode(), rng).encode()
    return len(header).to_bytes(8, "little") + header + content[8 + size :]


def outcome(place: Path, read: Callable[[], object], reserves: bool = False) -> str:
    """Of a reading: an empty text, or the one line that it ended with. `reserves`: it may ask for more memory than it
    may have, and is refused before it uses any."""
    try:
        with bounded(MIB, SECONDS):
            read()
    except SpecserveError as error:
        line = str(error)
        assert "\n" not in line and len(line) < 2000, line
        assert str(place) in line, line
        causes = list(chain(error))
        assert reserves or not any(isinstance(cause, MemoryError) or "allocate" in str(cause) for cause in causes), (
            causes
        )
        return line
    return ""


def chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


fuzzed = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
SEEDS = st.integers(0, 2**64 - 1)  # of what is done to a file: hypothesis makes no such change simpler


# --- models -----------------------------------------------------------------------------------------------------------


@contextmanager
def naming(folder: Path) -> Iterator[None]:
    """What is said of a template goes to clients, too, and has no path."""
    try:
        yield
    except ModelError as error:
        said = str(error).replace(f"The chat template in {folder.name} is broken: ", f"{folder}: ")
        raise ModelError(said) from error


def use_model(name: str) -> None:
    """All that a start reads of a model, and what it makes of it."""
    folder = catalog.resolve(name, progress=False)
    tokenizer = Tokenizer(folder)
    with suppress(TextError), naming(folder):  # of a text, which fails alone
        tokenizer.decode(tokenizer.encode("a 1\u00e9"))
        _ = tokenizer.reasoning, tokenizer.takes_tools
    for _ in (tokenizer.call_format, tokenizer.bound, tokenizer.longest_spelling):
        pass
    tokenizer.fewest_tokens("a")
    loader.load_model(folder, ops(), min(512, loader.check_tensors(folder).spec.max_len))


@fuzzed
@given(seed=SEEDS)
def test_a_model_folder(model: Path, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    folder = put(tmp_path / "model", model)
    for name in rng.sample(names(model), rng.choice((1, 1, 2))):
        damage(folder / name, rng)
    outcome(folder, lambda: use_model(str(folder)))
    outcome(folder, lambda: is_head(folder))


def test_a_model_folder_that_is_whole(model: Path, tmp_path: Path) -> None:
    folder = put(tmp_path / "model", model)
    assert outcome(folder, lambda: use_model(str(folder))) == ""


@fuzzed
@given(seed=SEEDS)
def test_packed_weights(model: Path, tmp_path: Path, home: Path, seed: int) -> None:
    rng = random.Random(seed)
    folder = put(tmp_path / "model", model)
    shutil.rmtree(home, ignore_errors=True)
    loader.load_model(folder, ops(), 64)
    (path,) = home.rglob("*.packed")
    path.write_bytes(with_damaged_header(path.read_bytes(), rng)) if rng.random() < 0.5 else damage(path, rng)
    assert outcome(folder, lambda: loader.load_model(folder, ops(), 64)) == "" or path.is_dir()


# --- GGUF -------------------------------------------------------------------------------------------------------------

Shape = tuple[int, ...]
_KINDS = {bool: (7, "?"), int: (4, "I"), float: (6, "f")}


def gguf_string(text: str) -> bytes:
    raw = text.encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(raw)) + raw


def gguf_value(value: Any) -> tuple[int, bytes]:
    """Type and bytes of a value; what the format has no type for is a string."""
    if isinstance(value, list) and value and type(value[0]) in (str, *_KINDS):
        kind, _ = gguf_value(value[0])
        same = [each for each in value if type(each) is type(value[0])]
        return 9, struct.pack("<IQ", kind, len(same)) + b"".join(gguf_value(each)[1] for each in same)
    if isinstance(value, bool | int) and not 0 <= value < 2**32:
        return 10, struct.pack("<Q", value % 2**64)
    if type(value) in _KINDS and abs(value) < 3e38:
        kind, form = _KINDS[type(value)]
        return kind, struct.pack(f"<{form}", value)
    return 8, gguf_string(value if isinstance(value, str) else repr(value)[:100])


def gguf_file(metadata: dict[str, Any], infos: list[list[Any]], data: bytes) -> bytes:
    """`infos` are name, shape with the innermost first, type and offset of each tensor."""
    out = b"GGUF" + struct.pack("<IQQ", 3, len(infos), len(metadata))
    for key, value in metadata.items():
        kind, raw = gguf_value(value)
        out += gguf_string(key) + struct.pack("<I", kind) + raw
    for name, shape, kind, offset in infos:
        out += gguf_string(str(name)) + struct.pack("<I", len(shape))
        out += b"".join(struct.pack("<Q", int(n) % 2**64) for n in shape)
        out += struct.pack("<IQ", int(kind) % 2**32, int(offset) % 2**64)
    return out + bytes(-len(out) % 32) + data


def gguf_parts() -> tuple[dict[str, Any], list[list[Any]], bytes]:
    """A whole model of one layer."""
    letters = [chr(code) for code in [*range(33, 127), *range(161, 173), *range(174, 324)]]
    tokens = [*letters, "ab", "<|im_end|>"]
    metadata: dict[str, Any] = {
        "general.architecture": "llama",
        "general.alignment": 32,
        "llama.context_length": 64,
        "llama.block_count": 1,
        "llama.embedding_length": 16,
        "llama.feed_forward_length": 32,
        "llama.attention.head_count": 2,
        "llama.attention.head_count_kv": 1,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 10000.0,
        "llama.rope.dimension_count": 8,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * (len(tokens) - 1) + [3],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": len(tokens) - 1,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": "{{ messages }}",
    }
    shapes: dict[str, Shape] = {
        "token_embd.weight": (16, len(tokens)),
        "blk.0.attn_norm.weight": (16,),
        "blk.0.ffn_norm.weight": (16,),
        "blk.0.attn_q.weight": (16, 16),
        "blk.0.attn_k.weight": (16, 8),
        "blk.0.attn_v.weight": (16, 8),
        "blk.0.attn_output.weight": (16, 16),
        "blk.0.ffn_gate.weight": (16, 32),
        "blk.0.ffn_up.weight": (16, 32),
        "blk.0.ffn_down.weight": (32, 16),
        "output_norm.weight": (16,),
    }
    infos: list[list[Any]] = []
    data = b""
    generator = torch.Generator().manual_seed(0)
    for name, shape in shapes.items():
        infos.append([name, list(shape), 0, len(data)])
        data += torch.randn(shape, generator=generator).numpy().tobytes()
    return metadata, infos, data


def test_a_gguf_file_that_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_file(*gguf_parts()))
    assert outcome(tmp_path, lambda: use_model(str(path))) == ""


Parts = tuple[dict[str, Any], list[list[Any]]]


def empty(parts: Parts) -> None:
    parts[1][5][1] = [0, 2**60]


def sharing(parts: Parts) -> None:
    for info in parts[1][4:6]:
        info[3] = parts[1][3][3]


def says(**values: Any) -> Callable[[Parts], None]:
    return lambda parts: parts[0].update({key.replace("__", "."): value for key, value in values.items()})


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (empty, "has shape .*, which is empty"),
        (sharing, "begins at byte .*, within"),
        (lambda parts: parts[1][5].__setitem__(1, [2**62, 4]), "is truncated"),
        (lambda parts: parts[1][5].__setitem__(3, 2**63), "is truncated"),
        (says(llama__block_count=30_000_000), "30,000,000 layers, and it has 11 tensors"),
        (says(llama__block_count=1.5), "must be a whole number"),
        (says(llama__block_count=[1, 1]), "must be one positive number"),
        (says(llama__attention__head_count=0.5), "must be a whole number"),
        (says(general__architecture=["llama"]), "Unknown GGUF architecture"),
        (says(general__alignment=[32]), "general.alignment is"),
        (says(tokenizer__ggml__tokens="x"), "tokens is no list of strings"),
        (says(tokenizer__ggml__tokens=[1, 2]), "tokens is no list of strings"),
        (says(tokenizer__ggml__token_type=["x"]), "token_type is no list of whole numbers"),
        (says(tokenizer__ggml__token_type=[0.5]), "token_type is no list of whole numbers"),
        (says(tokenizer__ggml__merges=7), "merges is no list of strings"),
        (says(tokenizer__ggml__merges=["ab"]), "vocabulary and merges do not fit"),
        (says(tokenizer__ggml__eos_token_id=[1]), "eos_token_id is"),
        (says(tokenizer__chat_template=[1]), "chat_template is no text"),
        (says(x=[0] * (2**20 + 1)), "a list has 1,048,577 values"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_gguf_file_that_asks_for_more_than_it_has(
    tmp_path: Path, home: Path, change: Callable[[Parts], None], match: str
) -> None:
    metadata, infos, data = gguf_parts()
    change((metadata, infos))
    (tmp_path / "m.gguf").write_bytes(gguf_file(metadata, infos, data))
    assert re.search(match, outcome(tmp_path / "m.gguf", lambda: use_model(str(tmp_path / "m.gguf"))))
    assert not list(home.rglob("*.safetensors")), "nothing is written of it"


@fuzzed
@given(seed=SEEDS)
def test_a_gguf_file(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    path = put(tmp_path / "files") / "m.gguf"
    metadata, infos, data = gguf_parts()
    if rng.random() < 0.6:
        metadata = damaged_value(metadata, rng) or metadata
    if rng.random() < 0.6:
        infos = damaged_value(infos, rng)
    try:
        content = gguf_file(metadata, infos, data)
    except (TypeError, ValueError, AttributeError, OverflowError):  # not what such a file can say
        content = gguf_file(*gguf_parts())
    path.write_bytes(damaged(content, rng, header=2000) if rng.random() < 0.3 else content)
    if rng.random() < 0.05:
        replace_by_another_kind(path, rng)
    outcome(tmp_path, lambda: use_model(str(path)))


# --- heads ------------------------------------------------------------------------------------------------------------


def layers(vocab_size: int, **more: Any) -> DecoderSpec:
    return llama_spec(
        vocab_size=vocab_size,
        hidden_size=16,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        intermediate_size=32,
        max_len=64,
        **more,
    )


def heads() -> dict[str, HeadSpec]:
    vocab = tiny_config("llama")["vocab_size"]
    target = TargetShape(hidden_size=16, num_layers=2, vocab_size=vocab)
    return {
        "eagle": EagleSpec(version=3, target=target, layers=layers(20), hidden_layers=(0, 1), has_head=True),
        "eagle1": EagleSpec(version=1, target=target, layers=layers(vocab)),
        "block": BlockSpec(
            target=target,
            layers=layers(vocab, qk_norm=True),
            hidden_layers=(0, 1),
            block_size=4,
            mask_token_id=3,
            bigram_rank=3,
            has_confidence=True,
        ),
        "medusa": MedusaSpec(target=target, num_heads=2, draft_vocab_size=vocab),
    }


def random_tensors(spec: HeadSpec) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=generator) for name, shape in spec.shapes().items()}


@pytest.fixture(scope="module")
def written_heads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for name, spec in heads().items():
        folder = tmp_path_factory.mktemp("head")
        d2t = torch.arange(20) if name == "eagle" else None
        write_head(folder, spec, random_tensors(spec), d2t, Verifier("t"), int8=name == "block")
        found[name] = folder
    return found


@pytest.fixture
def load_head(model: Path, tmp_path: Path) -> Callable[[Path], None]:
    """Reads a head, and runs it with a target where it fits."""
    llama = write_tiny_model(tmp_path / "target", "llama", **SMALL)
    target = loader.load_model(llama, ops(), 64)
    heads = HeadLoader(llama, target, ops())

    def load(folder: Path) -> None:
        is_head(folder)
        found = read_head(folder, 2)
        for name in found.weights:
            found.weights[name]
        heads.load(str(folder), found.spec.kind)

    return load


@pytest.mark.parametrize("name", list(heads()))
def test_heads_that_are_whole(
    name: str, written_heads: dict[str, Path], load_head: Callable[[Path], None], tmp_path: Path
) -> None:
    folder = put(tmp_path / "head", written_heads[name])
    assert outcome(folder, lambda: load_head(folder)) == ""


@fuzzed
@given(seed=SEEDS)
def test_heads(written_heads: dict[str, Path], load_head: Callable[[Path], None], tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    name = rng.choice(sorted(written_heads))
    folder = put(tmp_path / "head", written_heads[name])
    damage(folder / rng.choice(names(folder)), rng)
    outcome(folder, lambda: load_head(folder))


def test_a_head_whose_int8_matrices_have_other_scales(
    written_heads: dict[str, Path], load_head: Callable[[Path], None], tmp_path: Path
) -> None:
    folder = put(tmp_path / "head", written_heads["block"])
    (path,) = folder.glob("*.safetensors")
    tensors = load_file(path)
    scale = next(name for name in tensors if name.endswith("_scale"))
    save_file(tensors | {scale: tensors[scale].flatten()}, path)
    assert "one scale for each row" in outcome(folder, lambda: load_head(folder))


def strange(tensor: torch.Tensor, rng: random.Random) -> Any:
    """Something else in the place of a tensor, most of it of the same shape."""
    return rng.choice(
        (
            lambda: torch.zeros(1).expand(tensor.shape),
            lambda: torch.zeros(1).expand(2**20, 2**20),
            lambda: torch.zeros(tensor.shape).to_sparse(),
            lambda: torch.sparse_coo_tensor(size=(2**20, 2**20)),
            lambda: torch.empty(tensor.shape, device="meta"),
            lambda: torch.quantize_per_tensor(torch.zeros(tensor.shape), 0.1, 0, torch.qint8),
            lambda: torch.zeros(
                tensor.shape, dtype=rng.choice((torch.complex64, torch.int64, torch.bool, torch.float64))
            ),
            lambda: torch.full(tensor.shape, torch.nan),
            lambda: torch.zeros(()),
            lambda: torch.zeros((0, 2**40)),
            lambda: torch.nn.Parameter(tensor),
            lambda: tensor.T if tensor.dim() == 2 else tensor,
            lambda: {"x": tensor},
            lambda: [tensor],
            lambda: None,
        )
    )()


@fuzzed
@given(seed=SEEDS)
@pytest.mark.filterwarnings("ignore")  # torch's, of quantized tensors
def test_pickled_heads(load_head: Callable[[Path], None], tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    tensors: dict[Any, Any] = random_tensors(heads()["medusa"])
    for name in rng.sample(sorted(tensors), rng.randint(0, 2)):
        tensors[name] = strange(tensors[name], rng)
        match rng.randint(0, 5):
            case 0:
                tensors[rng.choice(("", 7, "999999999999.0.linear.weight", "9" * 5000 + ".1.weight"))] = tensors.pop(
                    name
                )
            case 1:
                tensors |= {f"{n}.more": tensors[name] for n in range(500)}
    folder = put(tmp_path / "head")
    (folder / "config.json").write_text(json.dumps({"medusa_num_heads": 2}))
    path = folder / "medusa_lm_head.pt"
    is_zip = rng.random() < 0.7
    torch.save(tensors, path, _use_new_zipfile_serialization=is_zip)
    if rng.random() < 0.5:
        damage(path, rng)
    outcome(folder, lambda: load_head(folder), reserves=not is_zip)


# --- the suffix store -------------------------------------------------------------------------------------------------


SIZES = {"vocab_size": 9, "hidden_size": 8, "num_layers": 2}
RECORD = bytes(32) + struct.pack("<Qiii", 3, 1, 2, -1)


def write_store(path: Path, header: str, record: bytes) -> None:
    body = b"specserve tenant texts 1\n" + header.encode("utf-8", "surrogatepass") + b"\n" + record
    path.write_bytes(body + hashlib.sha256(body).digest())  # whoever can write the file can compute that


def use_store(path: Path) -> None:
    class Target:
        vocab_size, hidden_size, num_layers, memory_bytes = *SIZES.values(), None

    SuffixDrafter(cast(DraftContext, Target()), store_path=path).close()


@fuzzed
@given(seed=SEEDS)
def test_a_store(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    folder = put(tmp_path / "store")
    path = folder / "texts"
    header = json.dumps({"target": SIZES, "key": "ab" * 32})
    header = damaged_json(header, rng) if rng.random() < 0.5 else header
    write_store(path, header, damaged(RECORD, rng))
    if rng.random() < 0.3:
        damage(path, rng)
    outcome(folder, lambda: use_store(path))


@pytest.mark.parametrize(
    "target",
    [
        {**SIZES, "num_layers": "x" * 3000},
        {**SIZES, "hidden_size": "\n"},
        {**SIZES, "vocab_size": 10**3000},
        {**SIZES, "\n": 1},
        {**SIZES, "num_layers": True},
    ],
)
def test_a_store_of_no_model_is_put_aside(tmp_path: Path, target: dict[str, Any]) -> None:
    folder = put(tmp_path / "store")
    write_store(folder / "texts", json.dumps({"target": target, "key": "ab" * 32}), RECORD)
    assert outcome(folder, lambda: use_store(folder / "texts")) == ""
    assert (folder / "texts.damaged").exists()


def test_a_store_of_another_model_is_told(tmp_path: Path) -> None:
    folder = put(tmp_path / "store")
    target = {**SIZES, "num_layers": 3}
    write_store(folder / "texts", json.dumps({"target": target, "key": "ab" * 32}), RECORD)
    assert "num_layers 3" in outcome(folder, lambda: use_store(folder / "texts"))
