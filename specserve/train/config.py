"""What a training run is told, checked once; loads no torch, as the command line reads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from specserve.errors import ConfigError
from specserve.files import read_json
from specserve.help import Help

KINDS = ("eagle", "block", "medusa")
_MOST_IDENTITY_BYTES = 2**20
_PLACES = ("out", "text", "prompts", "init_from")
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

    prompts: Annotated[
        Path, Help("JSON lines with prompt or turns (the first is asked), perhaps category; may be gzipped.", "Text")
    ]
    out: Annotated[
        Path,
        Help("Folder for the head, its recipe and curve; a run that it holds is continued.", "Output"),
    ]
    text: Annotated[
        Path | None,
        Help("Folder of the text that the target writes; several heads may share one [default: OUT/text].", "Text"),
    ] = None
    tokens: Annotated[
        int | None, Help("Stop writing at so many output tokens [default: each prompt at each temperature].", "Text")
    ] = None
    max_tokens: Annotated[int, Help("Most output tokens of an answer.", "Text")] = 256
    max_length: Annotated[int, Help("Most tokens of a prompt and its answer; longer prompts are left out.", "Text")] = (
        1024
    )
    temperatures: Annotated[
        tuple[float, ...],
        Help("0 is greedy; may be repeated: each prompt is answered at each [default: 0, 0.7, 1].", "Text"),
    ] = (0.0, 0.7, 1.0)
    streams: Annotated[int, Help("Answers that are written at once.", "Text")] = 32
    seed: Annotated[int, Help("Seed of sampled answers, the order of data and the head's first weights.")] = 0
    init_from: Annotated[
        str | None,
        Help("Begin with this head's weights and draft vocabulary: a folder or a hub id [default: random].", "Head"),
    ] = None
    layers: Annotated[int, Help("Decoder layers; medusa: residual blocks of each head.", "Head")] = 1
    depth: Annotated[
        int, Help("Tokens of a draft: steps of the training-time test, rows of a block, or Medusa heads.", "Head")
    ] = 5
    hidden_layers: Annotated[
        tuple[int, ...],
        Help("Layer of the target that the head reads, from 0; may be repeated [default: by kind].", "Head"),
    ] = ()
    draft_vocab_size: Annotated[int, Help("Ids that the head proposes from: the most frequent ones.", "Head")] = 8192
    qk_norm: Annotated[bool, Help("Norm queries and keys.", "Head")] = True
    causal: Annotated[bool, Help("block: rows see only those before them.", "Head")] = False
    bigram_rank: Annotated[int, Help("block: rank of the bias on the token before; 0 is none.", "Head")] = 128
    anchor_inputs: Annotated[
        bool, Help("block: each row reads the target's newest hidden state directly; for specserve alone.", "Head")
    ] = True
    anchors: Annotated[int, Help("Drafts that each answer of a step trains, from tokens drawn from it.")] = 32
    cache_hidden: Annotated[
        bool,
        Help(
            "Keep hidden states on disk as the engine that writes the text computes them: no step computes them again."
        ),
    ] = False
    epochs: Annotated[float, Help("How often each answer is read.")] = 3.0
    batch_tokens: Annotated[int, Help("Most tokens of a step's answers, padding included.")] = 2048
    learning_rate: Annotated[float, Help("The highest; of Muon and AdamW alike.")] = 1e-3
    decay: Annotated[Literal["cosine", "linear"], Help("How the learning rate falls to 0.")] = "cosine"
    warmup: Annotated[float, Help("Share of the steps in which the learning rate rises.")] = 0.04
    clip: Annotated[float, Help("Largest norm of the gradients.")] = 1.0
    cross_entropy: Annotated[float, Help("Its part of the loss; the rest is total variation.")] = 0.1
    evaluate_every: Annotated[int, Help("Steps between two measurements of acceptance.")] = 200
    checkpoint_minutes: Annotated[float, Help("Minutes between two checkpoints.")] = 10.0
    int8: Annotated[
        bool,
        Help("Store int8 matrices without those of the target: a quarter of the size, for specserve alone.", "Output"),
    ] = False

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
        if not good:
            allowed = "one number or several, each at least 0"
            raise ConfigError(f"--temperature is {self.temperatures!r}; it must be {allowed}.")
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
