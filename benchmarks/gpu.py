"""What a GPU does with specserve's kernels: their bits, their times, and the share of its bandwidth that they use; and
with whole engines: whether texts are the same with any drafter, and what steps and tokens take.

    PYTHONPATH=. python benchmarks/gpu.py --part kernels --out results

For the parts kernels and layers nothing needs to be installed but torch and triton. Each part writes DIR/PART.json,
after every section, and prints tables. Times of kernels are those of CUDA graphs: of many launches in a row, each with
weights of its own, which together are larger than L2, so one launch's share is what it adds to a step. They are medians
of several replays.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

PARTS = ("kernels", "layers", "engine")


class Report:
    """Sections of one part: saved whenever one is done, so that what is known survives a time limit."""

    def __init__(self, path: Path) -> None:
        self._path, self._started = path, time.monotonic()
        self.sections: dict[str, Any] = {"device": _device()}
        print(json.dumps(self.sections["device"]), flush=True)

    def section(self, name: str, measure: Callable[[], Any]) -> Any:
        """One that fails is written down as failed, and does not keep the others from running."""
        print(f"\n== {name} (at {time.monotonic() - self._started:.1f} s)", flush=True)
        try:
            self.sections[name] = measure()
        except Exception as error:  # of the kernels and the device: the traceback is the finding
            self.sections[name] = {"failed": f"{type(error).__name__}: {error}"[:2000]}
            print(f"FAILED: {self.sections[name]['failed']}", flush=True)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(self.sections, indent=1), encoding="utf-8")
        return self.sections[name]


def _device() -> dict[str, Any]:
    import triton

    properties = torch.cuda.get_device_properties(0)
    return {
        "name": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "l2_mb": properties.L2_cache_size / 1e6,
        "torch": torch.__version__,
        "triton": triton.__version__,
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, action="append", help="default: all")
    parser.add_argument("--model", default="smollm2-135m", help="of the part engine: catalog name or folder")
    parser.add_argument("--out", type=Path, default=Path("results"))
    return parser.parse_args()


def main() -> None:
    options = parse()
    if not torch.cuda.is_available():
        sys.exit("There is no GPU here that torch can use: this program measures nothing else.")
    if "kernels" in (options.part or PARTS):
        from gpu_kernels import measure_kernels

        measure_kernels(Report(options.out / "kernels.json"))
    if "layers" in (options.part or PARTS):
        from gpu_layers import measure_layers

        measure_layers(Report(options.out / "layers.json"))
    if "engine" in (options.part or PARTS):
        from gpu_engine import measure_engines

        measure_engines(Report(options.out / "engine.json"), options.model)


if __name__ == "__main__":
    main()
