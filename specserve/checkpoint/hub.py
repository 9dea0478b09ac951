"""Models of a Hugging Face hub: which files of a repository are needed, fetching them into the hub's own cache, and a
record of what was fetched, so that a later start asks no network. Imports no torch."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specserve.checkpoint import pooling
from specserve.checkpoint.fetching import HubFile, fetch, num_bytes_here
from specserve.checkpoint.folder import weight_map
from specserve.checkpoint.home import cache_folder
from specserve.errors import ModelError, NotFetchedError
from specserve.files import locked, read_json

Advance = Callable[[int], object]
Start = Callable[[int], Advance]  # told of all bytes before any is fetched

_NAME = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(?::(?P<file>[\w.-]+))?(?:@(?P<revision>[\w.-]+))?")
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_OLD_INDEX, _OLD_SINGLE = "pytorch_model.bin.index.json", "pytorch_model.bin"
_TEXTS = re.compile(r"[\w.-]+\.(json|jinja|model|tiktoken)|merges\.txt|vocab\.txt")
_OF_OTHERS = re.compile(r"(tf_|flax_|rust_|openvino_|onnx).*|.*\.index\.json|training_args.*|trainer_state.*")
_HEAD = re.compile(r"[\w.-]+\.(safetensors|json|bin|pt)")
_PREFERRED_GGUF = ("Q4_K_M", "Q8_0")  # where nobody says which
_MOST_JSON_BYTES = 2**26
_GB = 10**9


@dataclass(frozen=True, slots=True)
class HubName:
    """`org/name`, `org/name:Q4_K_M` (the GGUF file of that kind, or of that name), each perhaps with `@revision`."""

    text: str
    repo: str
    file: str | None
    revision: str | None


@dataclass(frozen=True, slots=True)
class Pulled:
    """What was fetched under a name: `files` of the folder, with their sizes. `when` is in seconds since the epoch."""

    name: str
    repo: str
    commit: str
    folder: Path
    files: dict[str, int]
    digests: dict[str, str]
    when: float

    @property
    def gguf(self) -> Path | None:
        """The one file that is the model, where it is such a file."""
        return next((self.folder / name for name in self.files if name.endswith(".gguf")), None)

    @property
    def is_whole(self) -> bool:
        """Whether everything is where it was put."""
        return all(_size(self.folder / name) == size for name, size in self.files.items())


def hub_name(text: str) -> HubName | None:
    """None for what is no name of a repository."""
    match = _NAME.fullmatch(text)
    if match is None or text.startswith("."):
        return None
    return HubName(text, match["repo"], match["file"], match["revision"])


def from_hub(
    name: HubName, start: Start, *, head: bool = False, offline: bool = False, refresh: bool = False
) -> Pulled:
    """What the hub has under `name`: a model's files, or with `head` those of a draft head. Fetched unless it was
    before, or with `refresh` if the hub has another version by now. `start` is told how many bytes there are, and what
    it returns is called with those of each piece.

    Raises NotFetchedError where it is not here and `offline` or HF_HUB_OFFLINE forbids to fetch it, ModelError that
    says what to do where the hub does not have it, has nothing of use, wants another token or does not answer, where
    the disk has no room and where a file's digest is wrong.
    """
    kept = record(name.text)
    has_kept = kept is not None and kept.is_whole
    if kept is not None and has_kept and not refresh:
        return kept  # without importing the hub's client
    from huggingface_hub.constants import HF_HUB_OFFLINE

    if offline or HF_HUB_OFFLINE:
        return kept if kept is not None and has_kept else _of_others(name, head)
    path = _record_path(name.text)
    path.parent.mkdir(parents=True, exist_ok=True)
    with _telling(name), locked(path):
        kept = record(name.text)
        if kept is not None and kept.is_whole and not refresh:
            return kept  # another process was first
        pulled = _fetch(name, head, start)
        _write_record(pulled)
    return pulled


def records() -> Iterator[Pulled]:
    """Of all that was fetched, by name."""
    for path in sorted((cache_folder() / "hub").glob("*.json")):
        if (found := _read_record(path)) is not None:
            yield found


def record(name: str) -> Pulled | None:
    """Of what was fetched under this name."""
    return _read_record(_record_path(name))


def forget(pulled: Pulled) -> None:
    """Remove what was fetched under a name, but for files that the repository's other versions in the hub's cache
    share. Raises OSError."""
    others = {each.folder for each in records() if each.name != pulled.name}
    blobs = pulled.folder.parent.parent / "blobs"
    if pulled.folder not in others:
        shutil.rmtree(pulled.folder, ignore_errors=True)
    used = {path.resolve() for path in pulled.folder.parent.glob("*/*")}
    for digest in pulled.digests.values():
        if (blobs / digest).resolve() not in used:
            (blobs / digest).unlink(missing_ok=True)
        (blobs / f"{digest}.incomplete").unlink(missing_ok=True)
    if not any(path.is_dir() for path in pulled.folder.parent.glob("*")):
        shutil.rmtree(pulled.folder.parent.parent, ignore_errors=True)
    _record_path(pulled.name).unlink(missing_ok=True)


# --- fetching ---------------------------------------------------------------------------------------------------------


def _fetch(name: HubName, head: bool, start: Start) -> Pulled:
    from huggingface_hub import HfApi, constants, hf_hub_url
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    info = HfApi().model_info(name.repo, revision=name.revision, files_metadata=True)
    if not re.fullmatch(r"[0-9a-f]{7,64}", str(info.sha)):
        raise ModelError(f"The hub calls the version of {name.repo} {info.sha!r}, which is no commit.")
    files = {file.name: file for file in map(_hub_file, info.siblings or ()) if file is not None}
    root = Path(constants.HF_HUB_CACHE).expanduser() / f"models--{name.repo.replace('/', '--')}"
    folder, blobs, headers = root / "snapshots" / str(info.sha), root / "blobs", build_hf_headers()

    def get(file: HubFile, advance: Advance) -> None:
        fetch(file, hf_hub_url(name.repo, file.name, revision=str(info.sha)), headers, blobs, advance)
        _link(blobs / file.digest, folder / file.name)

    index = next((each for each in (_INDEX, _OLD_INDEX) if each in files), None)
    if index is not None and not head and name.file is None:  # it says which files the weights are in
        get(files[index], lambda num_bytes: None)
    wanted = [files[each] for each in (_head_files(files) if head else _model_files(name, files, folder))]
    _check_disk(name, wanted, blobs)
    advance = start(sum(file.size for file in wanted))
    for file in sorted(wanted, key=lambda file: file.size):
        get(file, advance)
    if name.revision is None:
        (root / "refs").mkdir(exist_ok=True)
        (root / "refs" / "main").write_text(str(info.sha))
    sizes = {file.name: file.size for file in wanted}
    digests = {file.name: file.digest for file in wanted}
    return Pulled(name.text, name.repo, str(info.sha), folder, sizes, digests, time.time())


def _hub_file(sibling: Any) -> HubFile | None:
    """A file in the repository's own folder, or how embeddings are pooled; None for others, and names or digests that
    are none."""
    lfs = sibling.lfs
    digest = str(sibling.blob_id if lfs is None else lfs.sha256)
    is_ours = sibling.rfilename == pooling.CONFIG or re.fullmatch(r"\w[\w.-]*", sibling.rfilename)
    if not is_ours or not re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", digest):
        return None
    return HubFile(sibling.rfilename, int(sibling.size or 0), digest, lfs is not None)


def _model_files(name: HubName, files: Mapping[str, HubFile], folder: Path) -> list[str]:
    """Configuration, tokenizer, and one form of the weights: safetensors, else what torch.save wrote, else GGUF."""
    ggufs = [each for each in files if each.endswith(".gguf")]
    if name.file is not None:
        return [_gguf(name, ggufs)]
    weights = _weights(files, folder)
    if weights:
        texts = [each for each in files if _TEXTS.fullmatch(each) and not _OF_OTHERS.fullmatch(each)]
        if "tokenizer.json" in texts:  # the older forms of it say the same
            texts = [each for each in texts if each.endswith((".json", ".jinja")) and each != "vocab.json"]
        index = _INDEX if _INDEX in files else _OLD_INDEX
        texts += [pooling.CONFIG] if pooling.CONFIG in files else []
        return [*texts, *weights, *([index] if len(weights) > 1 and index in files else [])]
    if not ggufs:
        raise ModelError(
            f"{name.text} has no weights that can be read: neither .safetensors nor pytorch_model.bin nor .gguf files."
        )
    return [_gguf(name, ggufs)]


def _weights(files: Mapping[str, HubFile], folder: Path) -> list[str]:
    for single, index, suffix in ((_SINGLE, _INDEX, ".safetensors"), (_OLD_SINGLE, _OLD_INDEX, ".bin")):
        if single in files:
            return [single]
        if index in files:
            return sorted(set(weight_map(folder / index, suffix).values()) & files.keys())
        if suffix == ".safetensors" and (found := [each for each in files if each.endswith(suffix)]):
            return found
    return []


def _gguf(name: HubName, ggufs: list[str]) -> str:
    """The file that a name means, or the usual one. Raises ModelError that lists what there is."""
    kinds = _PREFERRED_GGUF if name.file is None else (name.file,)
    for kind in kinds:
        wanted = kind.lower().removesuffix(".gguf")
        found = [each for each in ggufs if each.lower().removesuffix(".gguf") == wanted]
        found = found or [each for each in ggufs if re.search(rf"[-._]{re.escape(wanted)}\.gguf$", each.lower())]
        if len(found) == 1:
            return found[0]
    if name.file is None and len(ggufs) == 1:
        return ggufs[0]
    listed = ", ".join(sorted(ggufs)) or "none"
    raise ModelError(
        f"{name.text}: name one GGUF file, such as {name.repo}:Q4_K_M. Those of the repository that are not in parts: "
        f"{listed}."
    )


def _head_files(files: Mapping[str, HubFile]) -> list[str]:
    return [each for each in files if _HEAD.fullmatch(each)]


def _check_disk(name: HubName, wanted: Iterable[HubFile], blobs: Path) -> None:
    missing = sum(file.size - num_bytes_here(file, blobs) for file in wanted)
    blobs.mkdir(parents=True, exist_ok=True)
    if missing > (free := shutil.disk_usage(blobs).free):
        raise ModelError(
            f"{name.text} takes {missing / _GB:.2f} GB more on the disk, and {blobs} has {free / _GB:.2f} GB free. "
            "Make room there (`specserve list`, `specserve rm`), or set HF_HOME elsewhere."
        )


def _link(blob: Path, link: Path) -> None:
    """What huggingface_hub makes of a file that arrived, so that other programs find it, too."""
    link.parent.mkdir(parents=True, exist_ok=True)
    if link.is_symlink() or link.exists():
        if link.resolve() == blob.resolve():
            return
        link.unlink()
    link.symlink_to(os.path.relpath(blob, link.parent))


def _of_others(name: HubName, head: bool) -> Pulled:
    """What another program has put into the hub's cache."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(name.repo, revision=name.revision, local_files_only=True))
    except (LocalEntryNotFoundError, OSError, ValueError) as error:
        raise NotFetchedError(
            f"{name.text} is not in the hub's cache. Run `specserve pull {name.text}` once with a network, and without "
            "HF_HUB_OFFLINE."
        ) from error
    files = {
        path.name: HubFile(path.name, path.stat().st_size, "", True) for path in folder.iterdir() if path.is_file()
    }
    wanted = _head_files(files) if head else _model_files(name, files, folder)
    return Pulled(name.text, name.repo, folder.name, folder, {each: files[each].size for each in wanted}, {}, 0.0)


@contextmanager
def _telling(name: HubName) -> Iterator[None]:
    """What goes wrong with a hub, as a ModelError of one line that says what to do."""
    from huggingface_hub import errors

    known = "A hub id is org/name; `specserve list --all` shows models by short names."
    try:
        yield
    except errors.GatedRepoError as error:
        raise ModelError(
            f"{name.repo} is gated: accept its terms on its page of the hub, then set HF_TOKEN to a token of that "
            "account (or run `hf auth login`)."
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ModelError(f"{name.repo} has no revision {name.revision!r}.") from error
    except (errors.HFValidationError, OSError) as error:
        if isinstance(error, errors.RepositoryNotFoundError) or _status(error) == 401:
            raise ModelError(
                f"The hub has no {name.repo}, or it is private: check the name, and for a private one set HF_TOKEN. "
                + known
            ) from error
        raise ModelError(f"{name.repo} cannot be fetched from the hub: {_reason(error)}. {known}") from error
    except Exception as error:
        if not any(kind.__name__ == "HTTPError" for kind in type(error).__mro__):  # whichever library it is of
            raise
        raise ModelError(
            f"{name.repo} cannot be fetched from the hub: {_reason(error)}. What has arrived is kept; the same command "
            "goes on from there."
        ) from error


def _status(error: BaseException) -> int | None:
    return getattr(getattr(error, "response", None), "status_code", None)


def _reason(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".: ") if lines else type(error).__name__


# --- records ----------------------------------------------------------------------------------------------------------


def _record_path(name: str) -> Path:
    return cache_folder() / "hub" / f"{name.replace('/', '--').replace(':', '---')}.json"


def _write_record(pulled: Pulled) -> None:
    path = _record_path(pulled.name)
    values = dataclasses.asdict(pulled) | {"folder": str(pulled.folder)}
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(values, indent=1), "utf-8")
    os.replace(partial, path)


def _read_record(path: Path) -> Pulled | None:
    try:
        values = read_json(path, _MOST_JSON_BYTES)
        return Pulled(**values | {"folder": Path(values["folder"])})
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError):  # of another version: what it tells of is fetched again
        return None


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1
