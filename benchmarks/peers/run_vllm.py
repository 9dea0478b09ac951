"""vLLM's offline engine; its speculation is n-gram lookup."""

from __future__ import annotations

import os
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

from wire import Answer, Setup, chosen, precision, received, serve

LOOKUP = {"num_speculative_tokens": "5", "prompt_lookup_max": "4", "prompt_lookup_min": "2"}
KV_CACHE_GIB = "1"


def prepare(setup: Setup) -> None:
    """Start again in the environment vLLM asks for: its OpenMP runtime preloaded, its threads bound to cores.

    One runtime, preloaded, is what its own log demands for speculation. Unbound, it would reserve a core for the
    scheduler, half of a machine with two.
    """
    if "SPECSERVE_PEER_PREPARED" in os.environ:
        return
    libraries = [Path(sysconfig.get_path("data")) / "lib" / "libiomp5.so", *_tcmalloc()]
    cores = sorted(os.sched_getaffinity(0))[: setup.threads]
    settings = {
        "SPECSERVE_PEER_PREPARED": "1",
        "LD_PRELOAD": ":".join(str(path) for path in libraries if path.exists()),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_CPU_KVCACHE_SPACE": KV_CACHE_GIB,
        "VLLM_CACHE_ROOT": str(Path(setup.home) / "cache" / "vllm"),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | settings)


def _tcmalloc() -> list[Path]:
    """The allocator vLLM recommends, if the system has it."""
    return sorted(Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4"))[:1]


class Vllm:
    def __init__(self, setup: Setup) -> None:
        import vllm  # here: it reads its environment when it is imported

        self._vllm = vllm
        self._speculation = _speculation(setup)
        arguments = vllm.EngineArgs(
            model=setup.model,
            dtype=precision(setup, {"bf16": "bfloat16", "f32": "float32"}),
            max_model_len=setup.context,
            max_num_seqs=setup.streams,
            enable_prefix_caching=False,
            speculative_config=self._speculation,
        )
        self._engine = vllm.LLMEngine.from_engine_args(arguments)
        self._number = 0
        self.about: dict[str, Any] = {
            "vllm": vllm.__version__,
            "preloaded": [Path(path).name for path in os.environ["LD_PRELOAD"].split(":") if path],
            "cores": os.environ["VLLM_CPU_OMP_THREADS_BIND"],
            **(self._speculation or {}),
        }

    def generate(self, prompts: list[list[int]], max_tokens: int, ignore_eos: bool) -> Answer:
        params = self._vllm.SamplingParams(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=ignore_eos, detokenize=False
        )
        begun = time.perf_counter()
        for ids in prompts:
            self._engine.add_request(str(self._number), {"prompt_token_ids": ids}, params)
            self._number += 1
        names = [str(number) for number in range(self._number - len(prompts), self._number)]
        done: dict[str, list[int]] = {}
        first: float | None = None
        while len(done) < len(prompts):
            for output in self._engine.step():
                first = first or time.perf_counter() - begun
                if output.finished:
                    done[output.request_id] = list(output.outputs[0].token_ids)
        total = time.perf_counter() - begun
        return Answer(ids=[done[name] for name in names], total_s=total, ttft_s=first if len(prompts) == 1 else None)

    def reset(self) -> None:
        """The prefix cache is off and n-grams are looked up in each sequence alone."""


def _speculation(setup: Setup) -> dict[str, Any] | None:
    if not setup.speculation:
        return None
    return {"method": "ngram", **{name: int(value) for name, value in chosen(LOOKUP, setup.options).items()}}


if __name__ == "__main__":
    prepare(received())
    serve(Vllm)
