"""Runs a causal LM of transformers once without its weights, and says what it is made of, or why it is not served.

Every layer but the linear ones and the embeddings, for which cheap stand-ins compute row by row, runs as it is on a few
rows, twice, then on some of these rows in another order. So whatever mixes rows, keeps state or looks past its
positions shows itself: attention, which alone may, is a stand-in, too."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace as replaced
from typing import Any

import torch
from torch import Tensor, nn

from specserve.errors import ModelError
from specserve.models.checks import check_size
from specserve.models.generic import skeleton
from specserve.models.generic.allowed import Watch
from specserve.models.generic.experts import ExpertsShape, ExpertsStub, RowsApart, experts_in, matrices_of
from specserve.models.generic.modules import EXACT, Activation, replace

_ROWS, _SOME = 9, (7, 1, 5)  # of the trial; those that run again alone, in this order: not the one at the last position
_UNREAD = frozenset(
    ["dropout", "is_causal", "position_ids", "cache_position", "use_cache", "output_attentions", "training"]
)


@dataclass(frozen=True, slots=True)
class AttentionShape:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None


@dataclass(frozen=True, slots=True)
class Matrix:
    """A linear layer: its inputs and outputs, and whether a checkpoint has it as [in, out]."""

    inputs: int
    outputs: int
    is_transposed: bool
    has_bias: bool


@dataclass(slots=True)
class Found:
    """What a model is made of; modules by their names."""

    layers: list[tuple[str, AttentionShape]] = field(default_factory=list)  # each of whose outputs is a residual stream
    linears: dict[str, Matrix] = field(default_factory=dict)
    embeddings: dict[str, tuple[int, int]] = field(default_factory=dict)  # rows and columns
    experts: dict[str, ExpertsShape] = field(default_factory=dict)
    products: dict[str, Matrix] = field(default_factory=dict)  # parameters that a module multiplies rows with by itself
    is_guarded: bool = False  # whether its code runs within RowsApart
    embedding: str = ""  # that of token ids
    head: str = ""
    norm: str | None = None  # from the last layer's output to the hidden states; None: it is none that stands alone
    hidden_size: int = 0
    max_len: int = 0


def matrix(module: Any) -> Matrix | None:
    """None for what is no linear layer."""
    if type(module) is nn.Linear:
        return Matrix(module.in_features, module.out_features, False, module.bias is not None)
    if type(module).__name__ == "Conv1D" and hasattr(module, "nf"):  # transformers' own, of GPT-2
        inputs, outputs = module.weight.shape
        return Matrix(inputs, outputs, True, True)
    return None


def probe(config: Mapping[str, Any], is_one_thread: bool = True) -> Found:
    """`is_one_thread`: whether torch will run with one. Raises ModelError with the architecture's name and all reasons
    against it that were found."""
    kind = config.get("model_type")
    trial = None
    try:
        trial = _Trial(config, is_one_thread)
        found = trial.run()
        reasons = [*trial.reasons, *trial.watch.reasons]
    except ModelError as error:
        reasons = ([] if trial is None else [*trial.reasons, *trial.watch.reasons]) + [str(error)]
    except Exception as error:  # of code that is not ours, on modules that are not its own
        reasons = [*trial.reasons, *trial.watch.reasons] if trial is not None else []
        reasons = reasons or [f"its code stops with {type(error).__name__}: {str(error).splitlines()[0][:200]}"]
    if reasons:
        more = f", and {len(reasons) - 3} more reasons" if len(reasons) > 3 else ""
        raise ModelError(
            f"A model of type {kind!r} has no native implementation, and cannot run through transformers: "
            + "; ".join((reason[0].lower() + reason[1:]).rstrip(".,") for reason in reasons[:3])
            + more
            + "."
        )
    return found


class _Stub(nn.Module):
    """In the place of a linear layer: outputs are inputs in another order, each times a number of its own."""

    def __init__(self, like: nn.Module | nn.Parameter, shape: Matrix, trial: _Trial) -> None:
        super().__init__()
        self.in_features, self.out_features, self.weight = shape.inputs, shape.outputs, getattr(like, "weight", None)
        self.was_run = False
        self._trial = trial
        outputs = torch.arange(shape.outputs)
        self._from = (outputs * 7919 + outputs // shape.inputs) % shape.inputs
        self._times = torch.where(outputs % 3 == 0, -0.9, 1.1) + outputs % 17 * 0.01

    def forward(self, x: Tensor) -> Tensor:
        self.was_run = True
        with self._trial.watch.ours():
            return x.float()[..., self._from] * self._times


class _Table(nn.Module):
    """In the place of an embedding."""

    def __init__(self, like: nn.Embedding, trial: _Trial) -> None:
        super().__init__()
        self.weight, self.padding_idx = like.weight, like.padding_idx
        self.num_embeddings, self.embedding_dim = like.num_embeddings, like.embedding_dim
        self._trial = trial

    def forward(self, ids: Tensor) -> Tensor:
        assert int(ids.max()) < self.num_embeddings, f"position {int(ids.max())} is beyond a table"
        with self._trial.watch.ours():
            columns = torch.arange(1, self.embedding_dim + 1)
            return torch.sin((ids[..., None] % 1009 + 1) * columns * 0.37)


class _Trial:
    """One model, and what is found out about it."""

    def __init__(self, config: Mapping[str, Any], is_one_thread: bool) -> None:
        self.reasons: dict[str, None] = {}
        self._running: list[str] = []  # modules, the outermost first
        self.watch = Watch(lambda: self._running[-1] if self._running else "the model", is_one_thread)
        self._masks: dict[int, tuple[Tensor, Callable[..., Tensor]]] = {}
        self._calls: list[tuple[nn.Module, AttentionShape]] = []
        self.model = skeleton.make(config, self._mask)
        self._base: Any = self.model.base_model
        if self._base is self.model:
            raise ModelError("It has no part that ends before the LM head.")
        self._config = self.model.config.get_text_config()
        self._outputs: dict[nn.Module, Tensor] = {}
        self._is_one_thread = is_one_thread
        self._apart = RowsApart({}, is_one_thread)

    def run(self) -> Found:
        found = self._replaced()
        skeleton.lead(self.model, self._attend)
        self._hook()
        found.max_len = getattr(self._config, "max_position_embeddings", None) or 0
        if not found.max_len:
            raise ModelError("config.json has no max_position_embeddings, which says how many tokens it was made for.")
        check_size("max_position_embeddings", found.max_len)
        num_ids = self.model.get_input_embeddings().num_embeddings
        ids = torch.arange(1, _ROWS + 1) * 7919 % num_ids
        positions = torch.tensor([0, 1, 2, 3, 7, 1, 100, 5, 4]).clamp(max=found.max_len - 1)
        positions[2] = found.max_len - 1
        with torch.no_grad():  # not inference_mode, where composed functions are not seen as what they do
            whole = self._forward(ids, positions)
            layers = self._layers()
            self._find_ends(found, layers)
            self._compare(whole, self._forward(ids, positions), slice(None), "keeps state between steps")
            some = list(_SOME)
            self._compare(whole, self._forward(ids[some], positions[some]), some, "depends on the rows beside it")
            self._forward(ids, positions, self.model)
        found.layers = [(name, shape) for (name, _), (_, shape) in zip(layers, self._calls, strict=True)]
        found.hidden_size = whole[-1].shape[-1]
        found.is_guarded = self._apart.was_asked
        self._check_reached(found)
        return found

    def _replaced(self) -> Found:
        found, model = Found(), self.model
        for name, module in list(model.named_modules()):
            if any(name.startswith(f"{each}.") for each in found.experts):
                continue
            if (experts := experts_in(module)) is not None:
                found.experts[name] = experts
                replace(model, name, ExpertsStub(experts, self.watch.ours))
            elif (shape := matrix(module)) is not None:
                found.linears[name] = shape
                replace(model, name, _Stub(module, shape, self))
            elif type(module) is nn.Embedding:
                found.embeddings[name] = (module.num_embeddings, module.embedding_dim)
                replace(model, name, _Table(module, self))
            elif (exact := EXACT.get(type(module).__name__)) is not None:
                replace(model, name, Activation(module, exact, self._is_one_thread))
        for module in model.modules():
            if not isinstance(module, _Stub | _Table | ExpertsStub):
                _materialize(module)
        self._apart = RowsApart(dict(self._products(found)), self._is_one_thread)
        return found

    def _products(self, found: Found) -> Iterator[tuple[int, Callable[[Tensor], Tensor]]]:
        """What stands in for products with parameters of modules that are no linear layers, by the parameters' ids."""
        for name, parameter in matrices_of(self.model):
            shape = Matrix(parameter.shape[1], parameter.shape[0], False, False)
            stub = _Stub(parameter, shape, self)

            def product(x: Tensor, name: str = name, shape: Matrix = shape, stub: _Stub = stub) -> Tensor:
                found.products[name] = shape
                product: Tensor = stub(x)
                return product

            yield id(parameter), product

    def _hook(self) -> None:
        names = {module: name for name, module in self.model.named_modules()}

        def enter(module: nn.Module, *given: Any) -> None:
            self._running.append(names[module] or "the model")

        def leave(module: nn.Module, given: Any, output: Any) -> None:
            self._running.pop()
            first = output[0] if isinstance(output, tuple) and output else output
            if isinstance(first, Tensor):
                self._outputs[module] = first

        for module in names:
            module.register_forward_pre_hook(enter)
            module.register_forward_hook(leave)

    def _forward(self, ids: Tensor, positions: Tensor, model: Any = None) -> list[Tensor]:
        """All that rows come to: what each attention reads, each layer's output, the hidden states."""
        self._calls = []
        self._read: list[Tensor] = []
        self._outputs.clear()
        mask = torch.ones(1, len(ids), dtype=torch.long)
        with self.watch, self._apart:
            out = (model or self._base)(
                input_ids=ids[None], position_ids=positions[None], attention_mask=mask, use_cache=False
            )
        self._hidden = out[0]
        return [*self._read, out[0][0]]

    def _mask(self, *given: Any, mask_function: Callable[..., Tensor], **more: Any) -> Tensor:
        mask = torch.zeros(1, 1, _ROWS, _ROWS, dtype=torch.bool)
        self._masks[id(mask)] = mask, mask_function
        return mask

    def _attend(
        self,
        module: nn.Module,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        *,
        scaling: Any = None,
        sliding_window: Any = None,
        softcap: Any = None,
        s_aux: Any = None,
        **more: Any,
    ) -> Tensor:
        with self.watch.ours():
            heads, kv_heads, d = q.shape[1], k.shape[1], k.shape[3]
            refused = self.reasons.setdefault
            if any(module is each for each, _ in self._calls):
                refused("a layer calls attention twice")
            if v.shape != k.shape or q.shape[3] != d:
                refused(f"its heads have {q.shape[3]} numbers of a query, {d} of a key and {v.shape[3]} of a value")
            elif d % 4 or heads % kv_heads:
                refused(f"{heads} heads of {d} for {kv_heads} of keys: they must be shared evenly, and d be 4 times n")
            if softcap is not None:
                refused("its attention scores are soft-capped")
            if s_aux is not None:
                refused("its attention has sinks")
            if scaling is not None and not isinstance(scaling, float | int):
                refused("its attention has a scale for each head")
            strange = [name for name, value in more.items() if name not in _UNREAD and not _is_nothing(value)]
            if strange or more.get("is_causal") is False:
                refused(f"its attention is given {', '.join(strange) or 'is_causal=False'}, which nothing here reads")
            if (why := self._unlike(module, mask, sliding_window)) is not None:
                refused(why)
            scale = d**-0.5 if scaling is None or self.reasons else float(scaling)
            self._calls.append((module, AttentionShape(heads, kv_heads, d, scale, sliding_window)))
            self._read += [each[0].transpose(0, 1).flatten(1) for each in (q, k, v)]
            if v.shape != k.shape or heads % kv_heads:
                raise ModelError("; ".join(self.reasons))
            return (v.repeat_interleave(heads // kv_heads, 1) + 0.5 * q).transpose(1, 2).contiguous()

    def _unlike(self, module: nn.Module, mask: Tensor | None, window: int | None) -> str | None:
        """Why a mask is none that attention over the cache has: each row sees the rows before it, with a window the
        latest."""
        if mask is None:
            return None if getattr(module, "is_causal", False) else "its attention says nothing of who sees whom"
        if id(mask) not in self._masks:
            return "it makes attention masks, or biases as ALiBi's, of its own"
        function, zero = self._masks[id(mask)][1], torch.tensor(0)
        edge = window or 5
        rows = {0, 1, 6, edge - 1, edge, edge + 1, 3 * edge, 100, 5000, 20_000}
        for row in sorted(rows):
            for other in {0, 1, row - 1, row, row + 1, row - edge - 1, row - edge, row - edge + 1, row // 2}:
                if other < 0:
                    continue
                sees = other <= row and (window is None or other > row - window)
                if bool(function(zero, zero, torch.tensor(row), torch.tensor(other))) != sees:
                    seen = "all rows before it" if window is None else f"a window of {window}, as it says"
                    return f"in its attention a row does not see {seen}, and no others"
        return None

    def _layers(self) -> list[tuple[str, nn.Module]]:
        """The modules of lists that hold one attention each, in the order in which they run."""
        names = {module: name for name, module in self.model.named_modules()}
        found = []
        for module, _ in self._calls:
            parts = names[module].split(".")
            paths = [".".join(parts[:n]) for n in range(1, len(parts) + 1)]
            inside = (p for p in paths[1:] if isinstance(self.model.get_submodule(p.rpartition(".")[0]), nn.ModuleList))
            if (path := next(inside, None)) is None:
                raise ModelError("Its attention lies in no list of layers.")
            found.append((path, self.model.get_submodule(path)))
        if not found:
            raise ModelError("Its layers do not call attention through transformers' interface.")
        if len({path for path, _ in found}) < len(found):
            raise ModelError("A layer of it has more than one attention.")
        together = self.model.get_submodule(found[0][0].rpartition(".")[0])
        if any(path.rpartition(".")[0] != found[0][0].rpartition(".")[0] for path, _ in found):
            raise ModelError("Its layers lie in several lists.")
        if len(together) != len(found):
            raise ModelError(f"Of its {len(together)} layers {len(found)} have attention through the interface.")
        return found

    def _find_ends(self, found: Found, layers: list[tuple[str, nn.Module]]) -> None:
        """The embedding, the norm after the last layer, and the LM head."""
        names = {module: name for name, module in self.model.named_modules()}
        found.embedding = names[self.model.get_input_embeddings()]
        head = self.model.get_output_embeddings()
        if head is None or names.get(head) not in found.linears:
            raise ModelError("Its LM head is no linear layer.")
        found.head = names[head]
        last = self._outputs.get(layers[-1][1])
        for module, output in self._outputs.items():
            is_inside = names[module].startswith(layers[-1][0].rpartition(".")[0])
            if (
                output.shape == self._hidden.shape
                and torch.equal(output, self._hidden)
                and module is not self._base
                and not is_inside
                and last is not None
            ):
                with self.watch.ours():
                    again = module(last)
                if isinstance(again, Tensor) and torch.equal(again.view(self._hidden.shape), self._hidden):
                    found.norm = names[module]

    def _compare(self, whole: list[Tensor], other: list[Tensor], rows: Any, what: str) -> None:
        if len(whole) != len(other):
            raise ModelError("It calls attention another number of times with other rows.")
        for i, (one, two) in enumerate(zip(whole, other, strict=True)):
            if not torch.equal(one[rows], two):
                raise ModelError(f"What layer {min(i // 3, len(self._calls) - 1)} reads or returns {what}.")

    def _check_reached(self, found: Found) -> None:
        unused = [name for name, each in self.model.named_modules() if isinstance(each, _Stub) and not each.was_run]
        for name, experts in found.experts.items():
            stub: Any = self.model.get_submodule(name)
            found.experts[name] = replaced(experts, per_token=stub.per_token)
            unused += [] if stub.per_token else [name]
        if unused:
            raise ModelError(f"A step does not reach {', '.join(unused[:3])}, of {len(unused)} linear layers.")


def _materialize(module: nn.Module) -> None:
    """Numbers for parameters that are not there: of norms about 1, and small ones. Large ones, as of experts, stay
    without: who multiplies with one is refused for that."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        if parameter.device.type == "meta" and parameter.numel() < 2**24:
            values = torch.sin(torch.arange(parameter.numel()) * 1.7).view(parameter.shape) * 0.1
            is_norm = name == "weight" and parameter.dim() == 1
            setattr(module, name, nn.Parameter(values + 1 if is_norm else values, requires_grad=False))


def _is_nothing(value: Any) -> bool:
    return value is None or value is False or (isinstance(value, int | float) and value == 0)
