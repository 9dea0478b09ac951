"""Describes the MLPs of a decoder's layers by value: gated, plain, and mixtures of experts."""

from __future__ import annotations

from dataclasses import dataclass

from specserve.errors import ModelError
from specserve.models.checks import check_size

Shapes = dict[str, tuple[int, ...]]
MOST_EXPERTS = 1024  # of a layer: each is several tensors by name, before any file is read


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedMlp:
    """down(activation(gate(x)) * up(x)) (GLU variants, arXiv 2002.05202)."""

    size: int  # features between
    activation: str  # as ops.gated names them
    bias: bool = False  # of all three

    def __post_init__(self) -> None:
        check_size("intermediate_size", self.size)

    @property
    def parts(self) -> tuple[str, ...]:
        """The layers that read what enters."""
        return "gate_proj", "up_proj"

    @property
    def width(self) -> int:
        """Features between that a row goes through."""
        return self.size

    def step_width(self, hidden: int) -> int:
        """How many numbers ops hold at most for each row of a step."""
        return 3 * self.size

    def shapes(self, hidden: int) -> Shapes:
        """Its tensors by their names within a layer's MLP, and their shapes."""
        return _shapes(self, hidden)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainMlp:
    """down(activation(up(x))), the first Transformer's (arXiv 1706.03762)."""

    size: int  # features between
    activation: str  # as ops.activated names them
    bias: bool = True  # of both

    def __post_init__(self) -> None:
        check_size("intermediate_size", self.size)

    @property
    def parts(self) -> tuple[str, ...]:
        return ("up_proj",)

    @property
    def width(self) -> int:
        return self.size

    def step_width(self, hidden: int) -> int:
        return 3 * self.size

    def shapes(self, hidden: int) -> Shapes:
        return _shapes(self, hidden)


def _shapes(mlp: GatedMlp | PlainMlp, hidden: int) -> Shapes:
    shapes: Shapes = {}
    for name, rows, columns in (*((part, mlp.size, hidden) for part in mlp.parts), ("down_proj", hidden, mlp.size)):
        shapes[f"{name}.weight"] = (rows, columns)
        if mlp.bias:
            shapes[f"{name}.bias"] = (rows,)
    return shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsMlp:
    """A sparse mixture of experts (arXiv 1701.06538, 2401.04088): of `num_experts` gated MLPs of one size each row goes
    through the `per_token` whose router scores are highest, of equals the first, and gets their weighted sum."""

    num_experts: int
    per_token: int
    size: int  # features between, of each expert
    activation: str  # as ops.gated names them
    is_normalized: bool  # the weights are a softmax over a row's own experts; else its part of one over all experts
    shared: GatedMlp | None = None  # that every row goes through besides
    has_shared_gate: bool = False  # whose output is multiplied by the sigmoid of a product with each row

    def __post_init__(self) -> None:
        check_size("moe_intermediate_size", self.size)
        for name, value in (("num_experts", self.num_experts), ("num_experts_per_tok", self.per_token)):
            check_size(name, value)
        if self.num_experts > MOST_EXPERTS:
            raise ModelError(f"config.json says {self.num_experts} experts; at most {MOST_EXPERTS} are supported.")
        if self.per_token > self.num_experts:
            raise ModelError(f"num_experts_per_tok is {self.per_token}, and there are {self.num_experts} experts.")
        assert self.shared is not None or not self.has_shared_gate, "a gate is that of a shared expert"

    @property
    def width(self) -> int:
        return self.per_token * self.size + (0 if self.shared is None else self.shared.size)

    def step_width(self, hidden: int) -> int:
        """What a row's experts read, what comes between, and what they return; and the router's scores."""
        return self.per_token * 2 * hidden + 3 * self.width + 2 * self.num_experts + 2 * hidden

    def shapes(self, hidden: int) -> Shapes:
        """As those of GatedMlp, by the names of Qwen's checkpoints."""
        expert = GatedMlp(size=self.size, activation=self.activation).shapes(hidden)
        shapes: Shapes = {"gate.weight": (self.num_experts, hidden)}
        for number in range(self.num_experts):
            shapes |= {f"experts.{number}.{name}": shape for name, shape in expert.items()}
        if self.shared is not None:
            shapes |= {f"shared_expert.{name}": shape for name, shape in self.shared.shapes(hidden).items()}
        if self.has_shared_gate:
            shapes["shared_expert_gate.weight"] = (1, hidden)
        return shapes
