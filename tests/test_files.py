"""Files that others made, as hostile as they can be: what is read of them, what is said of them, what they may cost."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import os
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from specserve import LLM, SamplingParams, Structured, files
from specserve.bench.prompts import load_prompts
from specserve.bench.replay import read_records
from specserve.bench.text import load_text
from specserve.checkpoint import catalog
from specserve.checkpoint.generation_config import stated_by
from specserve.checkpoint.textfile import TextFile
from specserve.checkpoint.weights import Weights
from specserve.cli.main import run
from specserve.errors import CapacityError, ConfigError, InputError, ModelError, SpecserveError
from specserve.models.heads.formats import read_head
from specserve.models.loader import check_tensors
from specserve.server.options import ServeOptions
from specserve.structured import library
from specserve.testing import write_tiny_model
from specserve.testing.damage import bounded
from specserve.text.tokenizer import Tokenizer
from specserve.train.prompts import read_prompts

SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 8}
DEEP = "[" * 100_000
Spoil = Callable[[Path], object]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "model", "llama", **SMALL)


@contextlib.contextmanager
def refused(error: type[SpecserveError], match: str) -> Any:
    """In one line, quickly, and without much memory."""
    with bounded(256, 30.0), pytest.raises(error, match=match) as caught:
        yield
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1100


# --- reading ----------------------------------------------------------------------------------------------------------


def as_pipe(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def as_device(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/zero")


def as_folder(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.mkdir()


def without_end(path: Path) -> None:
    path.unlink(missing_ok=True)
    with path.open("wb") as stream:
        stream.truncate(3 << 30)


KINDS: list[tuple[Spoil, str]] = [(as_pipe, "a pipe"), (as_device, "a device"), (as_folder, "a folder")]


@pytest.mark.parametrize(("spoil", "kind"), KINDS)
def test_only_regular_files_are_read(tmp_path: Path, spoil: Spoil, kind: str) -> None:
    spoil(tmp_path / "file")
    with bounded(64, 30.0), pytest.raises(OSError, match=f"it is {kind}, and only regular files are read"):
        files.read_bytes(tmp_path / "file", 100)


def test_a_file_is_read_up_to_its_bound_and_no_further(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 100)
    assert files.read_bytes(path, 100) == b"x" * 100
    with pytest.raises(OSError, match="more than 99 bytes"):
        files.read_bytes(path, 99)
    without_end(path)
    with bounded(64, 30.0), pytest.raises(OSError, match="more than 16 MiB"):
        files.read_bytes(path, 2**24)


def test_what_a_shell_pipes_is_read_where_the_user_names_the_file(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        ends = os.pipe()
        for end in ends:
            stack.callback(os.close, end)
        os.write(ends[1], b"one\r\ntwo\r")
        writer = os.fdopen(os.dup(ends[1]), "wb")
        os.set_blocking(ends[0], False)
        writer.close()
        with pytest.raises(OSError, match="a pipe"):
            files.read_text(Path(f"/dev/fd/{ends[0]}"), 100)
    read, write = os.pipe()
    os.write(write, b"one\r\ntwo\r")
    os.close(write)
    assert files.read_text(Path(f"/dev/fd/{read}"), 100, pipes=True) == "one\ntwo\n"
    os.close(read)


@pytest.mark.parametrize("text", ["[" * 65 + "]" * 65, '{"a":' * 65 + "1" + "}" * 65, DEEP, '{"a":' * 100_000])
def test_json_that_is_too_deep_is_no_json(text: str) -> None:
    with pytest.raises(ValueError, match="nested more than 64 levels"):
        files.parse_json(text)


def test_json_of_64_levels_is_read() -> None:
    assert files.parse_json("[" * 64 + "7" + "]" * 64) == json.loads("[" * 64 + "7" + "]" * 64)


@pytest.mark.parametrize(
    "error",
    [
        *(TypeError("x"), KeyError("x"), IndexError("x"), OverflowError("x"), RecursionError("x"), RuntimeError("x")),
        *(UnicodeDecodeError("utf-8", b"x", 0, 1, "x"), OSError(5, "x"), struct.error("x"), Exception("x\ny" * 999)),
    ],
)
def test_what_reading_raises_is_one_line_that_names_the_place(error: Exception) -> None:
    with refused(ModelError, "^some/place cannot be read: ") as _, files.reading("some/place"):
        raise error


def test_the_place_is_named_once_and_the_cause_is_kept() -> None:
    with pytest.raises(ModelError, match=r"^some/place/config\.json is wrong$"), files.reading("some/place"):
        raise ModelError("some/place/config.json is wrong")
    with pytest.raises(ModelError, match=r"^some/place: wrong \\x1b\[2J \(2\)$"), files.reading("some/place"):
        raise ModelError("wrong \x1b[2J\n(2)")
    with pytest.raises(ModelError) as caught, files.reading("some/place"):
        raise TypeError("why")
    assert isinstance(caught.value.__cause__, TypeError)
    with pytest.raises(CapacityError, match="more memory than there is"), files.reading("some/place"):
        raise MemoryError


@pytest.mark.parametrize("error", [AssertionError, NameError, ImportError, KeyboardInterrupt, ConfigError, InputError])
def test_mistakes_of_ours_and_other_errors_stay_what_they_are(error: type[BaseException]) -> None:
    with pytest.raises(error, match="why"), files.reading("some/place"):
        raise error("why")


@pytest.mark.parametrize("value", ["x", [1], {}, True, -1, 10**400])
def test_sampling_defaults_of_the_wrong_kind_or_size(tmp_path: Path, value: Any) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": value}))
    with refused(ConfigError, r"generation_config\.json: "):
        stated_by("auto", tmp_path)


# --- a model's files --------------------------------------------------------------------------------------------------


def use(folder: Path) -> None:
    catalog.resolve(str(folder))
    check_tensors(folder)
    Tokenizer(folder)


TEXTS = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")


@pytest.mark.parametrize("name", [*TEXTS, "model.safetensors"])
@pytest.mark.parametrize("spoil", [as_pipe, as_device, as_folder, without_end])
def test_another_kind_of_file_in_the_place_of_a_models(model: Path, name: str, spoil: Spoil) -> None:
    spoil(model / name)
    with refused(ModelError, rf"{name} (cannot be read|is no safetensors file)"):
        use(model)


@pytest.mark.parametrize("name", TEXTS[:-1])
def test_json_that_is_nested_deeply_in_the_place_of_a_models(model: Path, name: str) -> None:
    (model / name).write_text(DEEP)
    with refused(ModelError, name):
        use(model)


@pytest.mark.parametrize(
    "change",
    [
        {"num_hidden_layers": 30_000_000},
        {"num_hidden_layers": "2"},
        {"num_hidden_layers": 2.0},
        {"hidden_size": "x"},
        {"hidden_size": True},
        {"hidden_size": 2**40},
        {"hidden_size": 10**400},
        {"num_attention_heads": 0},
        {"head_dim": [8]},
        {"rms_norm_eps": "small"},
        {"rms_norm_eps": -1.0},
        {"hidden_act": ["silu"]},
        {"rope_theta": {}},
        {"rope_theta": 0},
        {"rope_scaling": [1]},
        {"rope_scaling": {"rope_type": "linear", "factor": "2"}},
        {"rope_scaling": {"rope_type": ["linear"]}},
        {"rope_parameters": 7},
        {"layer_types": 7, "model_type": "mistral", "architectures": []},
        {"layer_types": [[]], "model_type": "mistral", "architectures": []},
        {"head_dim": 0},
        {"num_key_value_heads": 0},
        {"sliding_window": "wide", "model_type": "mistral", "architectures": []},
        {"final_logit_softcapping": "x"},
        {"max_position_embeddings": -1},
        {"architectures": [["LlamaForCausalLM"]], "model_type": "x" * 10_000_000},
    ],
    ids=lambda change: str(change)[:60],
)
def test_a_setting_of_the_wrong_kind_or_size(model: Path, change: dict[str, Any]) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | change))
    with refused(ModelError, str(model)):
        use(model)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer_config.json", {"response_template": 7}),
        ("tokenizer_config.json", {"chat_template": 7}),
        ("tokenizer_config.json", {"chat_template": [{"name": "x"}]}),
        ("generation_config.json", {"eos_token_id": "x"}),
        ("generation_config.json", {"eos_token_id": [1, [2]]}),
        ("generation_config.json", {"eos_token_id": -1}),
        ("generation_config.json", {"eos_token_id": True}),
        ("generation_config.json", {"eos_token_id": 2**40}),
        ("tokenizer.json", {}),
        ("tokenizer.json", {"model": {"type": "BPE", "vocab": [], "merges": {}}}),
    ],
)
def test_the_other_files_with_values_of_the_wrong_kind(model: Path, name: str, content: Any) -> None:
    (model / name).write_text(json.dumps(content))
    with refused(ModelError, name):
        use(model)


def header(path: Path, entries: Any, num_bytes: int = 0) -> None:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(num_bytes))


def entry(shape: Any, *offsets: Any, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": list(offsets)}


@pytest.mark.parametrize(
    "entries",
    [
        {"a": entry([2**60, 0], 0, 16)},
        {"a": entry([2**40], 0, 16)},
        {"a": entry([-4], 0, -16)},
        {"a": entry([-2, -2], 0, 16)},
        {"a": entry([4], 0, 16), "b": entry([4], 0, 16)},
        {"a": entry([2], 0, 8), "b": entry([1], 12, 16)},
        {"a": entry([4], 16, 0)},
        {"a": entry([2**31] * 100_000, 0, 16)},
        {"a": entry("4", 0, 16)},
        {"a": entry([4.0], 0, 16)},
        {"a": entry([4], 0, 16, dtype=4)},
        {"a": entry([4], 0)},
        DEEP.encode(),
        b'{"a": {"x": ' + DEEP.encode(),
    ],
    ids=lambda entries: str(entries)[:60],
)
def test_a_safetensors_header_that_asks_for_more_than_the_file_has(tmp_path: Path, entries: Any) -> None:
    header(tmp_path / "model.safetensors", entries, 16)
    with refused(ModelError, r"model\.safetensors (is no safetensors file|is too long)"):
        Weights(tmp_path)


# --- a head's files ---------------------------------------------------------------------------------------------------


def medusa(hidden: int = 16, vocab: int = 40) -> dict[str, torch.Tensor]:
    return {
        "0.0.linear.weight": torch.zeros(hidden, hidden),
        "0.0.linear.bias": torch.zeros(hidden),
        "0.1.weight": torch.zeros(vocab, hidden),
    }


@pytest.mark.filterwarnings("ignore")  # torch's, of sparse tensors
@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: torch.zeros(1).expand(200_000, 200_000), "takes 160,000,000,000 bytes, and the file has 4 of it"),
        (lambda: torch.sparse_coo_tensor(size=(200_000, 200_000)), "sparse_coo on cpu; only plain tensors"),
        (lambda: torch.empty((200_000, 200_000), device="meta"), "strided on meta; only plain tensors"),
        (lambda: torch.zeros(16, 16, dtype=torch.complex64), "holds torch.complex64; supported are"),
    ],
)
def test_a_pickled_tensor_that_is_more_than_its_bytes(tmp_path: Path, make: Callable[[], Any], match: str) -> None:
    torch.save(medusa() | {"0.0.linear.weight": make()}, tmp_path / "medusa_lm_head.pt")
    with refused(ModelError, match):
        read_head(tmp_path)


def test_many_names_for_one_tensor(tmp_path: Path) -> None:
    tensors = medusa()
    torch.save(tensors | {f"{n}.copy": tensors["0.1.weight"] for n in range(1000)}, tmp_path / "medusa_lm_head.pt")
    with refused(ModelError, "some share their numbers"):
        read_head(tmp_path)


def test_an_archive_that_is_compressed(tmp_path: Path) -> None:
    torch.save(medusa(), tmp_path / "plain")
    with (
        zipfile.ZipFile(tmp_path / "plain") as plain,
        zipfile.ZipFile(tmp_path / "medusa_lm_head.pt", "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for name in plain.namelist():
            packed.writestr(name, plain.read(name))
    with refused(ModelError, "compressed, which torch.save does not do"):
        read_head(tmp_path)


# --- a drafter's store ------------------------------------------------------------------------------------------------

TARGET = {"vocab_size": 9, "hidden_size": 8, "num_layers": 2}
GOOD = {"target": TARGET, "key": "ab" * 32}


def store(path: Path, said: Any, records: bytes = b"") -> TextFile:
    """With a digest that is right: whoever can write the file can compute it."""
    line = said if isinstance(said, bytes) else json.dumps(said).encode()
    body = b"specserve tenant texts 1\n" + line + b"\n" + records
    path.write_bytes(body + hashlib.sha256(body).digest())
    return TextFile(path, TARGET)


def record(count: int, *tokens: int) -> bytes:
    return bytes(32) + struct.pack(f"<Q{len(tokens)}i", count, *tokens)


def test_a_store_that_is_whole(tmp_path: Path) -> None:
    found = store(tmp_path / "texts", GOOD, record(3, 1, 8, -1)).load()
    assert [text.tolist() for _, text in found.texts] == [[1, 8, -1]]


@pytest.mark.parametrize(
    ("said", "records"),
    [
        (DEEP.encode(), b""),
        ([], b""),
        ({}, b""),
        (GOOD | {"target": "x"}, b""),
        (GOOD | {"target": None}, b""),
        (GOOD | {"key": 7}, b""),
        (GOOD | {"key": "xy"}, b""),
        (GOOD | {"more": "x" * 10_000}, b""),
        (GOOD, record(2**64 - 1)),
        (GOOD, record(2**40)),
        (GOOD, record(1)),
        (GOOD, record(1, 9)),
        (GOOD, record(1, -2)),
        (GOOD, b"x" * 39),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_store_that_is_damaged_is_moved_aside(tmp_path: Path, said: Any, records: bytes) -> None:
    file = store(tmp_path / "texts", said, records)
    with bounded(64, 30.0):
        assert file.load().texts == []
    assert (tmp_path / "texts.damaged").exists()


@pytest.mark.parametrize("spoil", [as_pipe, as_device])
def test_another_kind_of_file_in_the_place_of_a_store(tmp_path: Path, spoil: Spoil) -> None:
    spoil(tmp_path / "texts")
    with refused(ConfigError, "texts cannot be read: it is a"):
        TextFile(tmp_path / "texts", TARGET).load()


# --- files that the user names ----------------------------------------------------------------------------------------

READERS: dict[str, Callable[[Path], object]] = {
    "prompts": lambda path: load_prompts(str(path)),
    "records": lambda path: list(read_records(path)),
    "text": lambda path: load_text(str(path)),
    "training prompts": read_prompts,
    "keys": lambda path: ServeOptions(api_key_file=path).keys(),
    "grammar": library.read,
}


@pytest.mark.parametrize("name", list(READERS))
@pytest.mark.parametrize("spoil", [as_device, as_folder, lambda path: path.write_bytes(b"\xff\xfe"), Path.unlink])
def test_what_cannot_be_read_is_one_line(tmp_path: Path, name: str, spoil: Spoil) -> None:
    path = tmp_path / "file.regex"
    path.touch()
    spoil(path)
    with refused(SpecserveError, r"file\.regex"):
        READERS[name](path)


@pytest.mark.parametrize("name", ["prompts", "records", "training prompts"])
def test_a_line_of_json_that_is_nested_deeply(tmp_path: Path, name: str) -> None:
    path = tmp_path / "file.jsonl"
    path.write_text(f"{DEEP}\n")
    with refused(InputError, r"file\.jsonl, line 1"):
        READERS[name](path)


def test_training_prompts_that_unpack_to_more_than_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specserve.train.prompts._MOST_BYTES", 2**20)
    path = tmp_path / "prompts.jsonl.gz"
    path.write_bytes(gzip.compress(bytes(2**28)))
    with refused(InputError, "unpacked it has more than 1,048,576 bytes"):
        read_prompts(path)
    path.write_bytes(gzip.compress(b"x" * 99)[:-12] + b"damaged, surely")
    with refused(InputError, "cannot be read"):
        read_prompts(path)


# --- the command line -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("config.json", as_pipe),
        ("config.json", without_end),
        ("config.json", lambda path: path.write_text(DEEP)),
        ("config.json", lambda path: path.write_text(path.read_text().replace('_layers": 2', '_layers": 30000000'))),
        ("tokenizer_config.json", lambda path: path.write_text('{"response_template": 7}')),
        ("tokenizer.json", as_pipe),
    ],
)
@pytest.mark.parametrize("command", ["inspect {}", "generate --model {} hi"])
def test_a_command_ends_with_one_line(
    model: Path, name: str, spoil: Spoil, command: str, capfd: pytest.CaptureFixture[str]
) -> None:
    spoil(model / name)
    with bounded(512, 60.0):
        assert run(command.format(model).split()) == 2
    out, err = capfd.readouterr()
    assert out == "" and err.startswith("specserve: ") and err.count("\n") == 1 and name in err


@pytest.mark.parametrize("command", ["inspect {}", "generate --model {} hi"])
def test_a_name_that_is_too_long_for_a_file(command: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(command.format("a" * 5000).split()) == 2
    assert "Unknown model" in capfd.readouterr().err


@pytest.mark.parametrize("content", ["a = " + "[" * 100_000, "\0", "model = 7\nmodel = 8"])
def test_a_configuration_that_is_no_toml(tmp_path: Path, content: str, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "options.toml").write_text(content)
    assert run(["generate", "--config", str(tmp_path / "options.toml"), "hi"]) == 2
    err = capfd.readouterr().err
    assert "Cannot read the configuration file" in err and err.count("\n") == 1


# --- ids --------------------------------------------------------------------------------------------------------------


def test_end_ids_that_the_model_does_not_have_end_nothing(model: Path) -> None:
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 2**31 - 1, 300_000]}))
    with LLM(str(model), max_model_len=64) as llm:
        plain = SamplingParams(max_tokens=5, min_tokens=3, temperature=0.0)
        regex = SamplingParams(max_tokens=5, structured=Structured.regex("a{2}"), temperature=0.0)
        outputs = [output.outputs[0] for output in llm.generate(["a", "a"], [plain, regex])]
    assert len(outputs[0].token_ids) >= 3
    assert outputs[1].token_ids[-1] == 5 and outputs[1].finish_reason == "stop"
