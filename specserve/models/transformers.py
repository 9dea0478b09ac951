"""Any other causal LM: transformers' own code, with our attention over the paged cache, our linear layers, our experts
and our weights. What it does in a step is noted and done again without its Python, as nobody can record what that code
does."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from specserve.cache.storage import KVShape
from specserve.errors import ModelError
from specserve.models.checks import check_size
from specserve.models.config import Config
from specserve.models.generic import skeleton
from specserve.models.generic.experts import (
    PARTS,
    Experts,
    Product,
    RouterLinear,
    RowsApart,
    apart,
    is_router,
    matrices_of,
)
from specserve.models.generic.modules import EXACT, Activation, Embedding, LastInput, Linear, replace
from specserve.models.generic.norms import norm_like
from specserve.models.generic.probe import AttentionShape, Found, matrix, probe
from specserve.models.generic.replay import Replays
from specserve.models.generic.tensors import Names, names_of
from specserve.models.product import RowSlots
from specserve.models.spec import Shapes
from specserve.ops import AttentionRows, Ops, Rotation
from specserve.ops.packing import Lazy, PackedCache, Source, Weight, below, loaded, uncached


@dataclass(frozen=True, slots=True)
class GenericLayer:
    attention: AttentionShape


@dataclass(frozen=True, slots=True, kw_only=True)
class GenericSpec:
    """What the engine has to know of a model that runs through transformers. `config` makes it."""

    architecture: str  # the class of transformers
    vocab_size: int
    hidden_size: int
    max_len: int
    layers: tuple[GenericLayer, ...]
    step_width: int
    config: Config = field(compare=False)
    found: Found = field(repr=False, compare=False)
    names: Names = field(repr=False, compare=False)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def longest_len(self) -> int:
        """How many tokens it was made for."""
        return self.found.max_len

    @property
    def runs(self) -> str:
        """As DecoderSpec.runs."""
        return f"through transformers ({self.architecture})"

    @property
    def note(self) -> str:
        """What is said of it at start."""
        return f"; runs {self.runs}"

    @property
    def kv_shapes(self) -> list[KVShape]:
        return [KVShape(layer.attention.num_kv_heads, layer.attention.head_dim) for layer in self.layers]

    @property
    def tied_embeddings(self) -> bool:
        return self.names.head is None

    def shapes(self) -> Shapes:
        """Every tensor that the model reads, by its name in transformers, and its shape as a checkpoint has it."""
        return self.names.shapes


def spec(config: Config, is_one_thread: bool = True) -> GenericSpec:
    """The model that config.json is of, looked at without its weights. Raises ModelError, with the architecture's name,
    for what cannot run through transformers, and why."""
    found = probe(config, is_one_thread)
    model = skeleton.make(config)
    names = names_of(model, found)
    vocab_size = found.linears[found.head].outputs
    widest = max(max(each.inputs, each.outputs) for name, each in found.linears.items() if name != found.head)
    attention = max(shape.num_heads * shape.head_dim for _, shape in found.layers)
    experts = max((each.step_width for each in found.experts.values()), default=0)
    for name, value in (("vocab_size", vocab_size), ("hidden_size", found.hidden_size)):
        check_size(name, value)
    return GenericSpec(
        architecture=type(model).__name__,
        vocab_size=vocab_size,
        hidden_size=found.hidden_size,
        max_len=found.max_len,
        layers=tuple(GenericLayer(shape) for _, shape in found.layers),
        step_width=8 * found.hidden_size + 6 * widest + 6 * attention + experts,
        config=config,
        found=found,
        names=names,
    )


class _Given(nn.Module):
    """In the place of all that runs before an LM head: returns the hidden states that it was given."""

    def __init__(self, has_experts: bool) -> None:
        super().__init__()
        self._has_experts = has_experts
        self.hidden: Tensor | None = None

    def forward(self, *given: Any, **more: Any) -> Any:
        from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions, MoeModelOutputWithPast

        made: Any = MoeModelOutputWithPast if self._has_experts else BaseModelOutputWithPastAndCrossAttentions
        out = made(last_hidden_state=self.hidden)
        out.router_logits = None  # which code that may have experts asks for where it has none, too
        return out


class TransformersModel:
    """The same interface as models.decoder.Decoder has, over a model of transformers. `weights` maps the names of
    spec.shapes() to tensors."""

    num_adapter_slots = 0  # it takes none
    features_width = 0  # it reads tokens alone

    def __init__(
        self, spec: GenericSpec, weights: Mapping[str, Weight], ops: Ops, cached: PackedCache = uncached
    ) -> None:
        if ops.device.type != "cpu":
            raise ModelError(
                f"{spec.architecture} runs through transformers, whose sums on a GPU depend on the number of rows. "
                "Use --device cpu, or a model that is native."
            )
        if not ops.has_own_threads:
            probe(spec.config, is_one_thread=False)
        self.spec = spec
        own: Ops = copy.copy(ops)
        own.records = False
        self._own_ops, self._is_native = own, ops.records
        self.num_mapped_bytes = 0
        self.origin = ""  # as Decoder's
        self._shared = LastInput(own)
        model: Any = skeleton.make(spec.config)
        self._packed(model, _Packing(spec, weights, self.ops, cached))
        skeleton.lead(model, self._attend)
        base = model.base_model
        self._base = base
        self._embedding = base.get_submodule(spec.found.embedding.removeprefix(f"{model.base_model_prefix}."))
        self._final_norm = None if spec.found.norm is None else model.get_submodule(spec.found.norm)
        self._lm_head: Linear = model.get_submodule(spec.found.head)
        self._layer_of: dict[nn.Module, int] = {}
        self._hook([model.get_submodule(name) for name, _ in spec.found.layers])
        self.replays, self.can_replay = Replays(self._forward, self._shared), False
        self._given = _Given(bool(spec.found.experts))
        setattr(model, model.base_model_prefix, self._given)
        self._model = model
        one = torch.ones(1, max(shape.head_dim for shape in spec.kv_shapes))
        self._unrotated = one, torch.zeros_like(one)

    def _packed(self, model: nn.Module, packing: _Packing) -> None:
        """Replace the model's modules by those that have weights, and fill in all other parameters."""
        found = packing.found
        for name, module in list(model.named_modules()):
            if any(name.startswith(f"{each}.") for each in found.experts):
                continue
            if (experts := found.experts.get(name)) is not None:
                replace(model, name, Experts(packing.experts(name), experts, self._shared))
            elif (shape := matrix(module)) is not None:
                sizes = shape.inputs, shape.outputs
                if is_router(name, shape.outputs, shape.has_bias, found.experts):
                    replace(model, name, RouterLinear(module, self._product(packing, f"{name}.weight", sizes)))
                else:
                    replace(model, name, Linear(module, packing.linear(name), sizes, self._shared))
            elif type(module) is nn.Embedding:
                replace(model, name, Embedding(module, packing.table(name), self._shared))
            elif (exact := EXACT.get(type(module).__name__)) is not None:
                replace(model, name, Activation(module, exact, self.ops.has_own_threads))
        for name in self.spec.names.others:
            owner, _, own = name.rpartition(".")
            values = packing.vector(name)
            module = model.get_submodule(owner)
            if own in module._buffers:
                module._buffers[own] = values
            else:
                setattr(module, own, nn.Parameter(values, requires_grad=False))
        parameters = dict(matrices_of(model))
        products = {
            id(parameters[name]): self._product(packing, name, (shape.inputs, shape.outputs))
            for name, shape in found.products.items()
        }
        self._routers = parameters  # they keep their ids as long as they live
        self._apart = RowsApart(products, self.ops.has_own_threads) if found.is_guarded else None
        if self._is_native:  # elsewhere an op pads rows
            for name, module in list(model.named_modules()):
                if (norm := norm_like(module, self._shared)) is not None:
                    replace(model, name, norm)

    def _product(self, packing: _Packing, name: str, sizes: tuple[int, int]) -> Product:
        return Product(packing.router(name, sizes), sizes, self._shared)

    def _hook(self, layers: list[nn.Module]) -> None:
        self._taps: tuple[int, ...] = ()
        self._tapped: dict[int, Tensor] = {}
        for i, layer in enumerate(layers):
            for module in layer.modules():
                self._layer_of[module] = i

            def keep(module: nn.Module, given: Any, output: Any, i: int = i) -> None:
                if i in self._taps:
                    self._tapped[i] = (output[0] if isinstance(output, tuple) else output)[0]

            layer.register_forward_hook(keep)

    @property
    def ops(self) -> Ops:
        return self._shared.ops

    @ops.setter
    def ops(self, ops: Ops) -> None:
        """With others than its own, as those that note what they are asked for, steps run op by op."""
        self._shared.ops = ops
        self.replays.is_on = self.can_replay and ops is self._own_ops

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        rows: Tensor,
        kv: list[Tensor],
        plan: Any,
        taps: tuple[int, ...] = (),
        features: Tensor | None = None,
        slots: RowSlots | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...]]:
        """As Decoder.forward."""
        return self.replays.run((token_ids, positions, rows), kv, plan, taps)

    def _forward(
        self, token_ids: Tensor, positions: Tensor, rows: Tensor, kv: list[Tensor], plan: Any, taps: tuple[int, ...]
    ) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...]]:
        self._kv, self._plan, self._taps = kv, plan, taps
        self._start = torch.zeros_like(positions)
        try:
            with apart(self._apart):
                out = self._base(input_ids=token_ids[None], position_ids=positions[None], use_cache=False)
            hidden = out[0][0][rows]
            logits = self.lm_head(hidden)
        finally:
            self._shared.forget()
        return hidden, logits, self.ops.argmax(logits), tuple(self._tapped.pop(i) for i in taps)

    def check_rows(self) -> None:
        """Raise ModelError where a row's scores have other bits alone than among others: what was found out without
        weights, and on fewer rows, is tried on this machine as it will run."""
        kv = [torch.zeros(2, 32, *shape, dtype=self.ops.kv_dtype) for shape in self.spec.kv_shapes]
        ids = torch.arange(1, 9) * 7919 % self.spec.vocab_size
        together = self._step(kv, ids, 0)
        alone = torch.cat([*(self._step(kv, ids[i : i + 1], i) for i in range(3)), self._step(kv, ids[3:], 3)])
        if not torch.equal(together.view(torch.int32), alone.view(torch.int32)):
            raise ModelError(f"{self.spec.architecture}, through transformers: a row's scores depend on other rows.")
        if self._is_native:
            self.can_replay = self.replays.is_on = True
            self.can_replay = all(self._replays_equal(kv, ids, together, count) for count in (1, 3))
            self.replays.is_on = self.can_replay

    def _replays_equal(self, kv: list[Tensor], ids: Tensor, expected: Tensor, count: int) -> bool:
        """Whether a step that is noted says of other tokens what they have."""
        for start in (0, 1, 8 - count):  # it comes, is noted, and is run again
            found = self._step(kv, ids[start : start + count], start)
            if not torch.equal(found.view(torch.int32), expected[start : start + count].view(torch.int32)):
                self.replays.stop("run again, one gives other numbers")
                break
        return self.replays.is_on

    @torch.inference_mode()
    def _step(self, kv: list[Tensor], ids: Tensor, start: int) -> Tensor:
        """Scores of a sequence's tokens after its first `start`, whose keys and values are in slots of block 1."""
        count = len(ids)
        layout = AttentionRows.pack([0, count], [start], [[1]], range(-1, count - 1), self.ops.row_multiple)
        rows = torch.arange(layout.num_rows)
        padding = 0, layout.num_rows - count
        tokens, positions = (nn.functional.pad(each, padding) for each in (ids, torch.arange(count) + start))
        return self.forward(tokens, positions, rows, kv, self.ops.plan(layout, 16))[1][:count].contiguous()

    def embed(self, token_ids: Tensor) -> Tensor:
        """The embedding of int64 [n], float32 [n, hidden]."""
        embedded: Tensor = self._embedding(token_ids[None])[0]
        return self._rows(embedded)

    def head(self, residual: Tensor) -> Tensor:
        """As Decoder.head."""
        return self.lm_head(self.final_norm(residual))

    def final_norm(self, residual: Tensor) -> Tensor:
        """As Decoder.final_norm. Raises ModelError where the model has none that stands alone."""
        if self._final_norm is None:
            raise ModelError(f"{self.spec.architecture} has no final norm that a draft head could share.")
        normed: Tensor = self._final_norm(residual[None])[0]
        return self._rows(normed)

    def lm_head(self, hidden: Tensor) -> Tensor:
        """As Decoder.lm_head: with all that the model does to scores."""
        self._given.hidden = hidden[None]
        try:
            logits: Tensor = self._model(input_ids=None, use_cache=False).logits[0]
        finally:
            self._given.hidden = None
        last, self._lm_head.last = self._lm_head.last, None
        if last is not None and last.data_ptr() == logits.data_ptr():
            return last
        return self._rows(logits)

    def _rows(self, x: Tensor) -> Tensor:
        """As ops read them: rows that torch made lie close to each other."""
        return self._shared.rows(*x.shape).copy_(x)

    def _attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, **given: Any) -> Tensor:
        """Of one layer: keys, which are rotated, and values go to the cache."""
        i = self._layer_of[module]
        shape, kv = self.spec.layers[i].attention, self._kv[i]
        d, each = shape.head_dim, (q[0], k[0], v[0])
        qkv = self._shared.rows(q.shape[2], d * sum(map(len, each)))
        for own, part in zip(torch.split(qkv.view(len(qkv), -1, d), [*map(len, each)], 1), each, strict=True):
            own.copy_(part.transpose(0, 1))
        rotation = Rotation(self._start, self._unrotated[0][:, :d], self._unrotated[1][:, :d])
        queries = self.ops.rope_and_cache(qkv, None, rotation, kv, self._plan)
        out = self.ops.attention_floats(queries, kv, self._plan, shape.scale, shape.window)
        return out.reshape(1, len(out), shape.num_heads, d)


class _Packing:
    """Packs the tensors of a checkpoint under the names that modules have in transformers."""

    def __init__(self, spec: GenericSpec, weights: Mapping[str, Weight], ops: Ops, cached: PackedCache) -> None:
        self._spec, self._weights, self._ops, self._cached = spec, weights, ops, cached
        self.found = spec.found

    def experts(self, name: str) -> Any:
        shape = self.found.experts[name]
        shapes = shape.shapes(name)
        parts = [part for whole in PARTS.values() for part in whole]
        names = ([f"{name}.{i}.{part}.weight" for i in range(shape.number)] for part in parts)
        gates, ups, downs = ([self._source(each, shapes[each]) for each in own] for own in names)
        return self._ops.pack_experts(gates, ups, downs, below(self._cached, name))

    def router(self, name: str, sizes: tuple[int, int]) -> Any:
        return self._ops.pack_router(self._source(name, (sizes[1], sizes[0])), below(self._cached, name))

    def _source(self, name: str, shape: tuple[int, ...], is_transposed: bool = False) -> Source:
        stored = self._spec.names.tied.get(name, name)

        def read() -> Weight:
            found = self._weights[stored]
            return found.T if is_transposed and isinstance(found, Tensor) else found

        return Lazy(shape, read)

    def linear(self, name: str) -> Any:
        shape, is_head = self._spec.found.linears[name], name == self._spec.found.head
        weight = self._source(f"{name}.weight", (shape.outputs, shape.inputs), shape.is_transposed)
        bias = self._source(f"{name}.bias", (shape.outputs,)) if shape.has_bias else None
        cached = below(self._cached, name)
        return (self._ops.pack_head if is_head else self._ops.pack)(weight, bias, cached)

    def table(self, name: str) -> Tensor:
        shape = self._spec.found.embeddings[name]
        return self._ops.pack_table(self._source(f"{name}.weight", shape), below(self._cached, name))

    def vector(self, name: str) -> Tensor:
        """A parameter of any other module, float32, as torch wants it."""
        shape = self._spec.names.shapes[self._spec.names.tied.get(name, name)]
        source = self._source(name, shape)

        def pack() -> Tensor:
            found = loaded(source)
            values = found if isinstance(found, Tensor) else found[:]
            return values.reshape(size).to(torch.float32, copy=True)

        size = (math.prod(shape),)
        values = self._cached(name, size, torch.float32, pack)
        return values.view(shape)
