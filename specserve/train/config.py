"""What a training run is told, checked once; loads no torch, as the command line reads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from specserve.errors import ConfigError
from specserve.files import read_json

KINDS = ("eagle", "block", "medusa")
_MOST_IDENTITY_BYTES = 2**20
_PLACES = ("out", "text", "prompts")
# What changes when a run does something or how the head is stored, never what it learns: it may differ when the run
# goes on.
_CHANGEABLE = (*_PLACES, "tokens", "streams", "checkpoint_minutes", "int8")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingOptions:
    """Everything about one head and the text it learns from, but for its kind and the target. Lengths are tokens.

    `depth` is how far a draft reaches: steps of the training-time test (eagle), rows of a block, or heads (medusa).
    `hidden_layers` are those of the target that the head reads, counted from 0; empty: chosen by the kind of head.
    Raises ConfigError naming the option, what it was and what is allowed.
    """

    prompts: Path
    out: Path
    text: Path | None = None  # None: out/text
    tokens: int | None = None
    max_tokens: int = 256
    max_length: int = 1024
    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)
    streams: int = 32
    seed: int = 0
    layers: int = 1
    depth: int = 5
    hidden_layers: tuple[int, ...] = ()
    draft_vocab_size: int = 8192
    qk_norm: bool = True
    causal: bool = False
    bigram_rank: int = 128
    anchors: int = 32
    cache_hidden: bool = False
    epochs: float = 3.0
    batch_tokens: int = 2048
    learning_rate: float = 1e-3
    decay: Literal["cosine", "linear"] = "cosine"
    warmup: float = 0.04
    clip: float = 1.0
    cross_entropy: float = 0.1
    evaluate_every: int = 200
    checkpoint_minutes: float = 10.0
    int8: bool = False

    def __post_init__(self) -> None:
        counts = ("max_tokens", "max_length", "streams", "layers", "depth", "draft_vocab_size", "anchors")
        for name in (*counts, "batch_tokens", "evaluate_every"):
            self._check(name, getattr(self, name) >= 1, "at least 1")
        self._check("seed", 0 <= self.seed < 2**31, "from 0 to 2147483647")
        self._check("tokens", self.tokens is None or self.tokens >= 1, "at least 1")
        self._check("bigram_rank", self.bigram_rank >= 0, "at least 0; 0 is none")
        for name in ("epochs", "learning_rate", "clip"):
            self._check(name, 0 < getattr(self, name) < float("inf"), "a positive number")
        for name in ("warmup", "cross_entropy"):
            self._check(name, 0 <= getattr(self, name) <= 1, "from 0 to 1")
        self._check("checkpoint_minutes", self.checkpoint_minutes >= 0, "at least 0")
        self._check("decay", self.decay in ("cosine", "linear"), "cosine or linear")
        good = bool(self.temperatures) and all(0 <= each < float("inf") for each in self.temperatures)
        self._check("temperatures", good, "one number or several, each at least 0")
        self._check("max_length", self.max_length > self.max_tokens, f"above max_tokens, {self.max_tokens}")

    def _check(self, name: str, good: bool, allowed: str) -> None:
        if not good:
            option = name.replace("_", "-")
            raise ConfigError(f"--{option} is {getattr(self, name)!r}; it must be {allowed}.")

    @property
    def text_folder(self) -> Path:
        return self.text or self.out / "text"

    def text_identity(self) -> dict[str, Any]:
        """What the written text follows from, beside the target and the prompts."""
        names = ("max_tokens", "max_length", "temperatures", "seed")
        return {name: _plain(getattr(self, name)) for name in names}

    def identity(self) -> dict[str, Any]:
        """What the trained head follows from, beside its kind and the text."""
        return {name: _plain(value) for name, value in asdict(self).items() if name not in _CHANGEABLE}


def read_identity(path: Path) -> dict[str, Any]:
    """What an earlier run wrote of itself. Raises ConfigError."""
    try:
        found = read_json(path, _MOST_IDENTITY_BYTES)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}. Name another folder.") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path} holds a JSON {type(found).__name__}; it must hold an object. Name another folder.")
    return found


def check_same(folder: Path, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Raise ConfigError naming what differs between the run that `folder` holds and the one that is asked for."""
    differing = [name for name in {**found, **wanted} if found.get(name) != wanted.get(name)]
    if differing:
        parts = [f"{name} was {found.get(name)!r} and is now {wanted.get(name)!r}" for name in differing]
        raise ConfigError(
            f"{folder} holds another run: {'; '.join(parts)}. Name another folder, or give the same options to go on."
        )


def _plain(value: Any) -> Any:
    """As JSON gives it back."""
    return list(value) if isinstance(value, tuple) else value
