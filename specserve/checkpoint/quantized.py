"""Finds how the matrices of a checkpoint are quantised, and has them by the names that unquantised ones have.

A layout is a module beside this one with a NAME and find(config, infos).
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType

from specserve.checkpoint import awq, compressed_tensors, float8, gptq
from specserve.checkpoint.folder import TensorInfo, read_json
from specserve.checkpoint.layout import Config, Matrix
from specserve.checkpoint.weights import Weights
from specserve.errors import ModelError, unknown
from specserve.ops.packing import Weight

KEY = "quantization_config"
_OLD_KEY = "compression_config"  # the first ones of compressed-tensors
_LAYOUTS: Mapping[str, ModuleType] = {
    "gptq": gptq,
    "awq": awq,
    "compressed-tensors": compressed_tensors,
    "fp8": float8,
}
_USE = "use a GPTQ, AWQ or compressed-tensors version of the model, or the unquantised one"
_REFUSED = {  # by quant_method, and what to do
    "bitsandbytes": "its numbers are on no grid that kernels keep; use the unquantised model with --quantization int4",
    "modelopt": f"NVFP4 and FP8 of ModelOpt are not read; {_USE}",
    "mxfp4": f"MXFP4 is read in the layout of compressed-tensors alone; {_USE}",
    "hqq": _USE,
    "auto-round": "export it in the format auto_gptq or auto_awq, or " + _USE,
    "aqlm": _USE,
    "bitnet": _USE,
    "eetq": _USE,
    "exl2": _USE,
    "exl3": _USE,
    "fbgemm_fp8": _USE,
    "higgs": _USE,
    "quanto": _USE,
    "quark": _USE,
    "quip": _USE,
    "spqr": _USE,
    "torchao": _USE,
    "vptq": _USE,
}
_IN_LAYER = re.compile(r"\.\d+\.")
_ROUTERS = (".gate.weight", ".router.weight", ".shared_expert_gate.weight")
# Beside a config.json without a word of it, from before transformers had a place for it.
_OWN_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}


class QuantizedWeights(Mapping[str, Weight]):
    """The tensors of a folder, its quantised matrices among them, each as `weight` of its module: Quantized where it is
    made of integers, else float32. `infos` has the shape of the matrix, `kind` is None where nothing is quantised, and
    `matrices` has those that are. Raises ModelError naming what contradicts config.json."""

    def __init__(self, folder: Path, config: Config) -> None:
        self._stored = stored = Weights(folder)
        settings, layout = _layout(folder, config)
        self.kind: str | None = None if layout is None else layout.NAME
        self.matrices: Mapping[str, Matrix] = {}
        self.notes: tuple[str, ...] = ()
        self.infos: dict[str, TensorInfo] = dict(stored.infos)
        # All that their numbers depend on beside the files; empty where nothing does.
        self.key = "" if layout is None else json.dumps([layout.NAME, settings], sort_keys=True)
        if layout is None:
            return
        found = layout.find(settings, stored.infos)
        self.matrices, self.notes = found.matrices, found.notes
        parts = {name for matrix in found.matrices.values() for name in matrix.parts.values()} | found.unused
        self.infos = {name: info for name, info in stored.infos.items() if name not in parts}
        for name, matrix in found.matrices.items():
            if name in self.infos:
                raise ModelError(f"{folder} has {name} quantised and not quantised.")
            own = [stored.infos[part] for part in matrix.parts.values()]
            self.infos[name] = TensorInfo(own[0].file, matrix.kind, matrix.shape, sum(info.num_bytes for info in own))

    @property
    def blocks(self) -> frozenset[str]:
        """Tensors that lie in a GGUF file as blocks of whole numbers, and are read as floats."""
        return self._stored.blocks

    @property
    def files(self) -> list[Path]:
        """Where the tensors lie."""
        return list(dict.fromkeys(info.file for info in self._stored.infos.values()))

    @property
    def fits_int4(self) -> bool:
        """Whether int4 keeps the integers of every matrix in the layers but the routers, which kernels do not round."""
        plain = (name for name, info in self.infos.items() if name not in self.matrices and len(info.shape) == 2)
        others = any(_IN_LAYER.search(name) and not name.endswith(_ROUTERS) for name in plain)
        return bool(self.matrices) and not others and all(matrix.fits_int4 for matrix in self.matrices.values())

    def describe(self) -> str:
        """The layout and the formats in it, for people."""
        kinds = Counter(matrix.kind for matrix in self.matrices.values())
        each = "; ".join(kind if len(kinds) == 1 else f"{kind} ({n} of them)" for kind, n in kinds.most_common())
        return f"{self.kind} {each}" if self.matrices else "not quantised"

    def __getitem__(self, name: str) -> Weight:
        matrix = self.matrices.get(name)
        if matrix is None:
            return self._stored[name]
        return matrix.read(**{part: self._stored[stored] for part, stored in matrix.parts.items()})

    def __iter__(self) -> Iterator[str]:
        return iter(self.infos)

    def __len__(self) -> int:
        return len(self.infos)


def _layout(folder: Path, config: Config) -> tuple[Config, ModuleType | None]:
    """Its settings, and who reads it. Raises ModelError for a method that nobody reads."""
    settings, default = config.get(KEY) or config.get(_OLD_KEY), None
    if not settings:
        found = [name for name in _OWN_FILES if (folder / name).exists()]
        if not found:
            return {}, None
        settings, default = read_json(folder / found[0]), _OWN_FILES[found[0]]
    if not isinstance(settings, Mapping):
        raise ModelError(f"config.json gives {KEY} as {settings!r}; it must be an object.")
    method = settings.get("quant_method", default)
    if method is None and (settings.get("load_in_4bit") or settings.get("load_in_8bit")):
        method = "bitsandbytes"
    if isinstance(method, str) and method.lower() in _REFUSED:
        raise ModelError(f"The weights are quantised by {method}, which is not supported: {_REFUSED[method.lower()]}.")
    if not isinstance(method, str) or method not in _LAYOUTS:
        raise ModelError(unknown("quant_method", str(method), _LAYOUTS) + f" Else {_USE}.")
    return settings, _LAYOUTS[method]
