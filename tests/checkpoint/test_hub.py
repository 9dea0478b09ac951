"""Models of a hub: what is fetched, what is kept of a download that was cut, what is refused, and that later starts ask
nobody. The hub is a server on loopback; its client is the real one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from specserve.checkpoint import catalog, entries, fetching, hub as hubs, installed
from specserve.checkpoint.folder import check_folder
from specserve.cli.main import run
from specserve.errors import ModelError, NotFetchedError
from specserve.testing import write_tiny_model
from tests.checkpoint.hubs import TOKEN, Hub, digest, serving
from tests.checkpoint.sentencepiece_models import trained
from tests.checkpoint.test_catalog import write_gguf
from tests.checkpoint.test_pickled_model import write_old

REPO = "someone/tiny"


@pytest.fixture(scope="session")
def model_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = write_tiny_model(tmp_path_factory.mktemp("hub") / "model", "llama")
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def hub(model_files: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """With one repository, REPO, and an empty cache."""
    others = {"README.md": b"x", "consolidated.safetensors": b"the weights a second time", "pytorch_model.bin": b"y"}
    with serving(Hub({REPO: {**model_files, **others}})) as hub:
        monkeypatch.setenv("SPECSERVE_HOME", str(tmp_path / "home"))
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
        monkeypatch.setattr("huggingface_hub.hf_api.ENDPOINT", hub.url, raising=False)
        monkeypatch.setattr(
            "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE",
            hub.url + "/{repo_id}/resolve/{revision}/{filename}",
        )
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hf"))
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setattr(fetching, "_RETRY_S", 0.0)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield hub
        huggingface_hub.close_session()


def names(hub: Hub) -> set[str]:
    return {name for name, _ in hub.requests}


def stop_after(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    """The next download ends by Ctrl-C when so many bytes have arrived."""
    whole, count = hubs.fetch, 0

    def cut(file: Any, url: str, headers: Any, folder: Path, advance: Any) -> None:
        def watched(more: int) -> None:
            nonlocal count
            count += more
            advance(more)
            if count >= num_bytes:
                raise KeyboardInterrupt

        whole(file, url, headers, folder, watched)

    monkeypatch.setattr(hubs, "fetch", cut)
    monkeypatch.setattr(fetching, "_CHUNK_BYTES", 4096)


# --- what is fetched --------------------------------------------------------------------------------------------------


def test_what_is_needed_is_fetched_and_nothing_else_and_once(hub: Hub, model_files: dict[str, bytes]) -> None:
    folder = check_folder(catalog.resolve(REPO, progress=False))
    assert names(hub) == set(model_files)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == model_files
    hub.requests.clear()
    hub.status = 500
    assert catalog.resolve(REPO, progress=False) == folder
    assert catalog.resolve(REPO, progress=False, offline=True) == folder
    assert hub.requests == []


def test_older_files_of_a_tokenizer_are_fetched_where_there_is_no_tokenizer_json(
    hub: Hub, model_files: dict[str, bytes]
) -> None:
    older = {"tokenizer.model": trained("bpe", True), "qwen.tiktoken": b"1", "merges.txt": b"2", "modeling.py": b"3"}
    hub.repos[REPO] = {**model_files, **older}
    catalog.resolve(REPO, progress=False)
    assert not names(hub) & set(older)
    hub.repos[REPO] = {name: data for name, data in hub.repos[REPO].items() if name != "tokenizer.json"}
    hub.repos[REPO]["tokenizer_config.json"] = b'{"tokenizer_class": "LlamaTokenizer"}'
    folder = catalog.resolve(REPO, progress=False, refresh=True)
    assert (folder / "tokenizer.json").exists()
    assert names(hub) >= {"tokenizer.model", "qwen.tiktoken", "merges.txt"} and "modeling.py" not in names(hub)


def test_other_programs_find_it_in_the_hub_s_cache(hub: Hub) -> None:
    folder = catalog.resolve(REPO, progress=False)
    found = huggingface_hub.try_to_load_from_cache(REPO, "config.json")
    assert isinstance(found, str) and Path(found) == folder / "config.json"
    assert (folder / "model.safetensors").resolve().parent.name == "blobs"


def test_what_other_programs_fetched_is_found_offline(hub: Hub, tmp_path: Path) -> None:
    folder = catalog.resolve(REPO, progress=False)
    shutil.rmtree(tmp_path / "home")
    assert catalog.resolve(REPO, progress=False, offline=True) == folder
    hub.requests.clear()
    catalog.resolve(REPO, progress=False)
    assert hub.requests == [], "the files are there"


def test_shards_are_those_of_the_index(hub: Hub, model_files: dict[str, bytes]) -> None:
    weights = model_files["model.safetensors"]
    shards = {f"model-0000{i}-of-00002.safetensors": weights for i in (1, 2)}
    places = dict(zip("ab", shards, strict=True))
    files = {name: data for name, data in model_files.items() if name != "model.safetensors"}
    index = json.dumps({"weight_map": places}).encode()
    hub.repos[REPO] = {
        **files,
        **shards,
        "model.safetensors.index.json": index,
        "consolidated.safetensors": weights,
        "model.fp32-00001-of-00009.safetensors": weights,
    }
    name = hubs.hub_name(REPO)
    assert name is not None
    pulled = hubs.from_hub(name, lambda total: lambda more: None)
    assert set(pulled.files) == {*files, *shards, "model.safetensors.index.json"}


def test_an_old_checkpoint_is_fetched_where_there_is_nothing_else(hub: Hub, tmp_path: Path) -> None:
    write_old(tmp_path / "old", shards=2)
    files = {path.name: path.read_bytes() for path in (tmp_path / "old").iterdir()}
    hub.repos[REPO] = {**files, "training_args.bin": b"x", "tf_model.h5": b"y"}
    folder = catalog.resolve(REPO, progress=False)
    assert names(hub) == set(files) - ({"vocab.json", "merges.txt"} if "tokenizer.json" in files else set())
    assert folder.parent == tmp_path / "home/models", "it is converted"
    hub.status = 500
    assert catalog.resolve(REPO, progress=False) == folder
    assert [model.name for model in installed.installed()] == [REPO]
    assert run(["rm", REPO, "--yes"]) == 0
    assert not folder.exists()


def test_a_gguf_file_by_kind_or_name(hub: Hub, tmp_path: Path) -> None:
    data = write_gguf(tmp_path / "m.gguf").read_bytes()
    hub.repos[REPO] = {"Tiny-Q8_0.gguf": data, "Tiny-Q4_K_M.gguf": data[:-1] + b"x", "README.md": b""}
    check_folder(catalog.resolve(f"{REPO}:Q8_0", progress=False))
    assert names(hub) == {"Tiny-Q8_0.gguf"}
    check_folder(catalog.resolve(f"{REPO}:tiny-q8_0.gguf", progress=False))
    assert names(hub) == {"Tiny-Q8_0.gguf"}, "the same file"
    check_folder(catalog.resolve(REPO, progress=False))
    assert names(hub) == {"Tiny-Q8_0.gguf", "Tiny-Q4_K_M.gguf"}, "the usual one, where nobody says which"
    with pytest.raises(ModelError, match=r"Q5_0: name one GGUF file.*Tiny-Q4_K_M\.gguf, Tiny-Q8_0\.gguf"):
        catalog.resolve(f"{REPO}:Q5_0", progress=False)
    assert [model.name for model in installed.installed()] == [REPO, f"{REPO}:Q8_0", f"{REPO}:tiny-q8_0.gguf"]


def test_a_catalog_name_is_its_hub_id(hub: Hub, model_files: dict[str, bytes]) -> None:
    hub.repos["Qwen/Qwen3-0.6B"] = model_files
    folder = catalog.resolve("qwen3-0.6b", progress=False)
    assert catalog.resolve("qwen3:0.6b", progress=False) == catalog.resolve("Qwen/Qwen3-0.6B", progress=False) == folder
    assert [(model.name, model.hub_id) for model in installed.installed()] == [("qwen3-0.6b", "Qwen/Qwen3-0.6B")]


def test_run_fetches_and_answers_and_the_next_asks_nobody(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    hub.repos["Qwen/Qwen3-0.6B"] = hub.repos[REPO]
    small = ["--dtype", "float32", "--kv-cache-gib", "0.01", "--max-model-len", "1024"]
    small += ["--max-tokens", "4", "--temperature", "0"]
    assert run(["run", "qwen3:0.6b", "Hello", *small]) == 0
    said = capsys.readouterr().out
    assert said.strip() and hub.requests
    hub.requests.clear()
    hub.status = 500
    assert run(["run", "qwen3-0.6b", "Hello", *small]) == 0
    assert capsys.readouterr().out == said and hub.requests == []


def test_a_newer_version_is_fetched_by_pull_alone(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    first = catalog.pull(REPO)
    assert f"Downloading {REPO}" in capsys.readouterr().err
    hub.repos[REPO] = {**hub.repos[REPO], "generation_config.json": b"{}"}
    assert catalog.resolve(REPO, progress=False) == first
    hub.requests.clear()
    second = catalog.pull(REPO)
    assert second != first and (second / "generation_config.json").read_text() == "{}"
    assert names(hub) == {"generation_config.json"}, "what has not changed is there"
    assert catalog.resolve(REPO, progress=False) == second


def test_a_revision(hub: Hub) -> None:
    commit = hub.commit(REPO)
    assert catalog.resolve(f"{REPO}@{commit}", progress=False).name == commit
    with pytest.raises(ModelError, match="has no revision 'v9'"):
        catalog.resolve(f"{REPO}@v9", progress=False)


def test_names_of_files_lead_nowhere_else(hub: Hub, tmp_path: Path) -> None:
    hub.repos[REPO] |= {"../../../../evil.json": b"{}", "sub/more.json": b"{}", "..json": b"{}"}
    catalog.resolve(REPO, progress=False)
    assert not list(tmp_path.rglob("evil.json")) and not names(hub) & {"sub/more.json", "..json"}


# --- cut, resumed, checked --------------------------------------------------------------------------------------------


def test_a_download_that_was_cut_at_half_goes_on_from_there(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    size = len(hub.repos[REPO]["model.safetensors"])
    with monkeypatch.context() as patch:
        stop_after(patch, size // 2)
        with pytest.raises(KeyboardInterrupt):
            catalog.resolve(REPO, progress=False)
    assert installed.installed() == []
    hub.requests.clear()
    folder = catalog.resolve(REPO, progress=False)
    assert (folder / "model.safetensors").read_bytes() == hub.repos[REPO]["model.safetensors"]
    assert len(hub.requests) == 1 or all(start == 0 for name, start in hub.requests if name != "model.safetensors")
    [begin] = [start for name, start in hub.requests if name == "model.safetensors"]
    assert size // 4 < begin < size


def test_pull_that_is_interrupted_says_that_it_goes_on(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        stop_after(patch, len(hub.repos[REPO]["model.safetensors"]) // 2)
        assert run(["pull", REPO]) == 130
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.endswith("Interrupted. The same command goes on where it stopped.\n")
    hub.requests.clear()
    assert run(["pull", REPO]) == 0
    assert max(start for _, start in hub.requests) > 0


def test_a_process_that_is_killed_at_half_is_resumed_by_the_next(hub: Hub, tmp_path: Path) -> None:
    """By name on the command line, with the environment variables that users set."""
    data = os.urandom(2**23)
    hub.repos["Qwen/Qwen3-0.6B"] = {**hub.repos[REPO], "model.safetensors": data}
    hub.cut = 99
    environment = os.environ | {
        "SPECSERVE_HOME": str(tmp_path / "other"),
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(tmp_path / "hf-home"),
        "HF_HUB_OFFLINE": "0",
    }
    command = [sys.executable, "-m", "specserve", "pull", "qwen3-0.6b"]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    partial = tmp_path / "hf-home/hub/models--Qwen--Qwen3-0.6B/blobs" / f"{digest(data, True)}.incomplete"
    deadline = time.monotonic() + 60
    while not (partial.exists() and partial.stat().st_size >= 2**22) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.kill()
    process.wait()
    kept = partial.stat().st_size
    assert len(data) // 2 <= kept < len(data)
    hub.cut = 0
    hub.requests.clear()
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert "model.safetensors" in done.stderr, "it is no model, which is found when it is whole"
    assert [start for name, start in hub.requests if name == "model.safetensors"] == [kept]
    assert partial.with_suffix("").read_bytes() == data


def test_a_connection_that_breaks_is_made_again(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "_CHUNK_BYTES", 4096)
    hub.cut = 3
    folder = catalog.resolve(REPO, progress=False)
    check_folder(folder)
    assert any(start for _, start in hub.requests)


def test_one_that_breaks_always_is_an_error_that_says_what_is_kept(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "_RETRIES", 1)
    monkeypatch.setattr(hub.__class__, "cut", property(lambda self: 9, lambda self, value: None))
    hub.repos[REPO]["model.safetensors"] = b"x"  # of which half is nothing
    with pytest.raises(ModelError, match=r"cannot be fetched.*goes on from there") as caught:
        catalog.resolve(REPO, progress=False)
    assert "\n" not in str(caught.value)


def test_a_server_that_sends_whole_files_is_no_problem(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        stop_after(patch, len(hub.repos[REPO]["model.safetensors"]) // 2)
        with pytest.raises(KeyboardInterrupt):
            catalog.resolve(REPO, progress=False)
    hub.ignores_ranges = True
    folder = catalog.resolve(REPO, progress=False)
    assert (folder / "model.safetensors").read_bytes() == hub.repos[REPO]["model.safetensors"]


@pytest.mark.parametrize(("name", "kind"), [("model.safetensors", "SHA-256"), ("config.json", "git digest")])
def test_other_bytes_than_announced_are_not_used(hub: Hub, tmp_path: Path, name: str, kind: str) -> None:
    hub.wrong = {name}
    with pytest.raises(ModelError, match=rf"{name} arrived with the {kind}.*fetch it again"):
        catalog.resolve(REPO, progress=False)
    assert not list(tmp_path.rglob(f"{digest(hub.repos[REPO][name], kind == 'SHA-256')}*"))
    hub.wrong = set()
    check_folder(catalog.resolve(REPO, progress=False))


def test_what_was_removed_or_shortened_since_is_fetched_again(hub: Hub) -> None:
    folder = catalog.resolve(REPO, progress=False)
    blob = (folder / "model.safetensors").resolve()
    blob.write_bytes(blob.read_bytes()[:-1])
    hub.requests.clear()
    check_folder(catalog.resolve(REPO, progress=False))
    assert names(hub) == {"model.safetensors"}


# --- what is said -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "code", "complaint"),
    [
        (401, "", "The hub has no someone/tiny, or it is private.*HF_TOKEN"),
        (404, "RepoNotFound", "The hub has no someone/tiny.*specserve list --all"),
        (403, "GatedRepo", "is gated: accept its terms.*HF_TOKEN"),
        (403, "", "cannot be fetched from the hub: 403 Forbidden"),
        (500, "", "cannot be fetched from the hub: .*500"),
    ],
)
def test_refusals_say_what_to_do(hub: Hub, status: int, code: str, complaint: str) -> None:
    hub.status, hub.code = status, code
    with pytest.raises(ModelError, match=complaint) as caught:
        catalog.resolve(REPO, progress=False)
    assert "\n" not in str(caught.value)


def test_a_gated_model_with_a_token(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.gated = {REPO}
    for token in (None, "of another account"):
        if token is not None:
            monkeypatch.setenv("HF_TOKEN", token)
        with pytest.raises(ModelError, match=r"is gated: accept its terms.*HF_TOKEN"):
            catalog.resolve(REPO, progress=False)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    check_folder(catalog.resolve(REPO, progress=False))


def test_a_hub_that_does_not_answer(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("huggingface_hub.constants.ENDPOINT", "huggingface_hub.hf_api.ENDPOINT"):
        monkeypatch.setattr(name, "http://127.0.0.1:9", raising=False)
    with pytest.raises(ModelError, match="cannot be fetched from the hub"):
        catalog.resolve(REPO, progress=False)


@pytest.mark.parametrize("by", ["argument", "variable"])
def test_offline_nothing_is_asked(hub: Hub, monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", by == "variable")
    with pytest.raises(NotFetchedError, match=f"{REPO} is not in the hub's cache. Run `specserve pull {REPO}`"):
        catalog.resolve(REPO, progress=False, offline=by == "argument")
    assert hub.requests == []


def test_a_full_disk_is_noticed_before(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 10))  # type: ignore[attr-defined]
    with pytest.raises(ModelError, match=r"takes 0\.00 GB more on the disk.*HF_HOME"):
        catalog.resolve(REPO, progress=False)
    assert hub.requests == []


def test_a_repository_without_weights(hub: Hub) -> None:
    hub.repos[REPO] = {"config.json": b"{}"}
    with pytest.raises(ModelError, match="has no weights that can be read"):
        catalog.resolve(REPO, progress=False)


# --- what is here -----------------------------------------------------------------------------------------------------


def test_list_and_rm(hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hub.repos["Qwen/Qwen3-0.6B"] = hub.repos[REPO]
    for name in (REPO, "qwen3-0.6b"):
        catalog.resolve(name, progress=False)
    assert run(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["name", "qwen3-0.6b", REPO]
    assert run(["list", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told[0]["num_bytes"] > len(hub.repos[REPO]["model.safetensors"])
    assert abs(told[0]["when"] - time.time()) < 60
    assert run(["rm", REPO]) == 2
    assert "give --yes" in capsys.readouterr().err
    assert run(["rm", REPO, "--yes"]) == 0
    assert capsys.readouterr().out.startswith(f"Removed {REPO}: ")
    assert [model.name for model in installed.installed()] == ["qwen3-0.6b"]
    assert not (tmp_path / "hf/models--someone--tiny").exists()
    check_folder(catalog.resolve("qwen3-0.6b", progress=False, offline=True))
    assert run(["rm", REPO, "--yes"]) == 2
    assert "Unknown installed model" in capsys.readouterr().err


def test_rm_asks(hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    catalog.resolve(REPO, progress=False)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    for answer, left in (("n", 1), ("", 1), ("y", 0)):
        monkeypatch.setattr("builtins.input", lambda said=answer: said)
        assert run(["rm", REPO]) == 0
        assert len(installed.installed()) == left


def test_rm_of_one_version_keeps_what_another_shares(hub: Hub) -> None:
    first = f"{REPO}@{hub.commit(REPO)}"
    catalog.resolve(first, progress=False)
    hub.repos[REPO] = {**hub.repos[REPO], "generation_config.json": b"{}"}
    folder = catalog.resolve(REPO, progress=False)
    assert run(["rm", first, "--yes"]) == 0
    check_folder(folder)
    assert [model.name for model in installed.installed()] == [REPO]


def test_the_catalog_is_listed_with_figures(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["list", "--all"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(entries.MODELS) + 1
    assert run(["list", "--all", "--json"]) == 0
    told = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert told["qwen3-8b"]["draft_head"]["drafter"] == "eagle"
    assert told["qwen3-8b"]["memory_bytes"]["int4"] < told["qwen3-8b"]["memory_bytes"]["int8"] < 12e9
