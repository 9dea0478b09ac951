"""A checkpoint's tensors under a model's own names, checked before any is read."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from specserve.checkpoint.quantized import QuantizedWeights
from specserve.errors import ModelError
from specserve.models.fusing import QKV, split_rows
from specserve.models.spec import DecoderSpec
from specserve.models.transformers import GenericSpec
from specserve.ops.packing import Quantized, Weight, rows_of

# Tensors that old checkpoints carry and no decoder reads: they follow from the configuration.
_HARMLESS = re.compile(r".*\.rotary_emb\.inv_freq")
# Experts as transformers 5 keeps them, [experts, rows, columns] a tensor: each one's rows are those of several layers.
_STACKED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_FLOATS = ("F32", "BF16", "F16")  # safetensors' spelling

AnySpec = DecoderSpec | GenericSpec


class CheckedTensors(Mapping[str, Weight]):
    """A checkpoint's tensors under the names of spec.shapes(); `rename` turns a stored name into one of these, or None
    for one that is not needed. `fused` has the layers whose rows are those of several layers, one after the other, and
    `by_head` those with queries, keys and values as fusing.rows_by_head has them; with `is_transposed` the matrices of
    layers are stored as [in, out]. Names, shapes and dtypes are checked at once, from the files' headers, and tensors
    and their numbers when they are taken. Raises ModelError naming the tensor."""

    def __init__(
        self,
        spec: AnySpec,
        weights: QuantizedWeights,
        rename: Callable[[str], str | None],
        fused: Mapping[str, tuple[str, ...]],
        folder: Path,
        by_head: Sequence[str] = (),
        is_transposed: bool = False,
    ) -> None:
        self.spec = spec
        self._is_transposed = is_transposed
        self._shapes = spec.shapes()
        self.quantized = weights
        self._folder = folder
        self._rename, self._fused, self._by_head = rename, fused, by_head
        names = {rename(stored): stored for stored in weights if not _HARMLESS.fullmatch(stored)}
        self._stored = {name: stored for name, stored in names.items() if name is not None}
        self._rows: dict[str, slice | Tensor] = {}  # of what is stored with others
        self._experts: dict[str, int] = {}  # of what is stored with others' rows in one tensor, the number of its own
        self._whole: dict[str, tuple[int, ...]] = {}  # the shape of what is stored with others, by its stored name
        self._split()
        self._split_experts()
        # Some tools store a tied head a second time.
        native = {"lm_head.weight": "model.embed_tokens.weight"} if spec.tied_embeddings else {}
        tied = spec.names.tied if isinstance(spec, GenericSpec) else native
        self._seconds = {own: self._stored.pop(name) for name, own in tied.items() if name in self._stored}
        self._check_names()
        for name in self._shapes:
            self._check_tensor(name)

    def parts(self, stored: str) -> list[tuple[str, slice | Tensor]]:
        """Under which names of spec.shapes() the rows of a stored tensor are, and which are whose. A tensor that the
        model does not have keeps its name."""
        name = self._rename(stored) or stored
        spec = self.spec if isinstance(self.spec, DecoderSpec) else None
        for whole, parts in self._fused.items():
            if f".{whole}." in name:
                return split_rows(name, whole, parts, self._shapes)
        for whole in self._by_head:
            if f".{whole}." in name:
                return split_rows(name, whole, QKV, self._shapes, spec)
        return [(name, slice(None))]

    def _split(self) -> None:
        for name, stored in [*self._stored.items()]:
            if not any(f".{whole}." in name for whole in (*self._fused, *self._by_head)):
                continue
            del self._stored[name]
            num_rows, columns = 0, list[int]()
            for part, own in self.parts(stored):
                rows, *columns = self._shapes.get(part, (0,))
                self._take_part(part, stored, own)
                num_rows += rows
            self._whole[stored] = (num_rows, *columns)

    def _split_experts(self) -> None:
        for name in [name for name in self._stored if name.rpartition(".")[2] in _STACKED]:
            experts, _, whole = name.rpartition(".")
            numbers = 0
            while f"{experts}.{numbers}.down_proj.weight" in self._shapes:
                numbers += 1
            if not numbers:
                continue  # a tensor too many
            stored, start, columns = self._stored.pop(name), 0, 0
            for part in _STACKED[whole]:
                rows, columns = self._shapes[f"{experts}.0.{part}.weight"]
                for number in range(numbers):
                    own = f"{experts}.{number}.{part}.weight"
                    self._take_part(own, stored, slice(start, start + rows))
                    self._experts[own] = number
                start += rows
            self._whole[stored] = (numbers, start, columns)

    def _take_part(self, part: str, stored: str, rows: slice | Tensor) -> None:
        if part in self._stored:
            raise ModelError(f"{self._folder} has {stored} and {self._stored[part]}, a part of it.")
        self._stored[part], self._rows[part] = stored, rows

    @property
    def files(self) -> list[Path]:
        """Where the tensors lie."""
        return self.quantized.files

    @property
    def blocks(self) -> list[str]:
        """Tensors that lie in a GGUF file as blocks of whole numbers."""
        return [name for name, stored in self._stored.items() if stored in self.quantized.blocks]

    @property
    def num_bytes(self) -> int:
        return sum(self.quantized.infos[stored].num_bytes for stored in set(self._stored.values()))

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(shape) for shape in self._shapes.values())

    def _check_names(self) -> None:
        if missing := [name for name in self._shapes if name not in self._stored]:
            raise ModelError(
                f"{self._folder} lacks {_some(missing)}: the checkpoint is incomplete or of another model."
            )
        for name in [name for name in self._stored if name not in self._shapes and self._is_zero_bias(name)]:
            del self._stored[name]
        if strange := [stored for name, stored in self._stored.items() if name not in self._shapes]:
            raise ModelError(f"{self._folder} has {_some(strange)}, which config.json does not account for.")

    def _is_zero_bias(self, name: str) -> bool:
        """Old tools give every quantised matrix a bias, of zeros where the model has none."""
        stored = self._stored[name]
        weight = f"{stored.removesuffix('.bias')}.weight"
        return stored.endswith(".bias") and weight in self.quantized.matrices and not self.quantized[stored][:].any()

    def _check_tensor(self, name: str) -> None:
        stored = self._stored[name]
        wanted = self._whole.get(stored, self._shapes[name])
        info = self.quantized.infos[stored]
        if self._is_stored_transposed(name):
            wanted = wanted[::-1]
        if info.shape != wanted:
            raise ModelError(f"{self._folder}: {stored} has shape {info.shape}; config.json implies {wanted}.")
        if info.dtype not in _FLOATS and stored not in self.quantized.matrices:
            raise ModelError(f"{self._folder}: {stored} holds {info.dtype}; supported are {', '.join(_FLOATS)}.")

    def _is_stored_transposed(self, name: str) -> bool:
        is_matrix = name.startswith("model.layers.") and len(self._shapes[name]) == 2
        return self._is_transposed and is_matrix and self._stored[name] not in self.quantized.matrices

    def _check_numbers(self, name: str, weight: Weight) -> None:
        """Packing would make numbers of them, and answers that are wrong without a word."""
        tensor = weight.scales if isinstance(weight, Quantized) else weight
        if not all(bound.isfinite() for bound in torch.aminmax(tensor)):
            raise ModelError(
                f"{self._folder}: {self._stored[name]} holds NaN or infinite numbers, so its file is damaged or its "
                "training went wrong. Get it again."
            )

    def _check_second(self, stored: str, table: Weight) -> None:
        """One that differs would silently be lost."""
        if not torch.equal(self.quantized[stored][:], table[:]):
            raise ModelError(
                f"{self._folder}: config.json ties {stored} to the embeddings, and the file has another one. "
                "Set tie_word_embeddings to false if the stored head is meant."
            )

    def __getitem__(self, name: str) -> Weight:
        weight = self.quantized[self._stored[name]]
        if name in self._experts:
            assert isinstance(weight, Tensor), "a quantised matrix has a tensor of its own"
            weight = weight[self._experts[name]]
        if self._is_stored_transposed(name):
            assert isinstance(weight, Tensor), "quantised matrices are [out, in]"
            weight = weight.T
        if name in self._rows:
            weight = rows_of(weight, self._rows[name])
        self._check_numbers(name, weight)
        if name in self._seconds:
            self._check_second(self._seconds[name], weight)
        return weight

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more tensors" if len(names) > 4 else "")
