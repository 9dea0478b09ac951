"""Types of the compiled module: see kernels/cpu/module.cpp. Addresses are those of memory that the caller keeps."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

def instruction_sets() -> list[str]: ...
def tile_bytes(format: int, inputs: int) -> int: ...
def pack(format: int, rows: int, outputs: int, inputs: int, out: int) -> None: ...
def pack_groups(format: int, numbers: int, scales: int, minima: int, outputs: int, inputs: int, out: int) -> None: ...
def copy_numbers(arrays: list[int], sources: NDArray[np.int64], targets: NDArray[np.int64], bytes: int) -> None: ...
def pause_often(run_us: int, pause_us: int) -> None: ...
def pause_no_more() -> None: ...
def weight(format: int, outputs: int, inputs: int, data: int) -> Weight: ...
def activation(kind: int, width: int, data: int, scales: int, sums: int) -> Activation: ...
def adapters(bank: int, slots: int, shrunk: int, stride: int, is_bfloat16: bool) -> Adapters: ...

class Adapters: ...

class Weight:
    outputs: int
    inputs: int

class Activation:
    width: int

class PrefetchChoice:
    def next(self, rows: int) -> bool: ...
    def took(self, seconds: float) -> None: ...
    is_on: bool

class ThreadPool:
    def __init__(self, threads: int) -> None: ...
    threads: int
    def set_pulse(self, counter: int) -> None: ...

class Peers:
    def __init__(
        self, memory: int, rank: int, count: int, bytes: int, gather: Callable[[int, int], bool] | None = None
    ) -> None: ...
    @staticmethod
    def size(count: int, bytes: int) -> int: ...
    @staticmethod
    def place_at(count: int, bytes: int, rank: int, places: int) -> int: ...
    def leave(self) -> None: ...
    has_left: bool

class ExpertPeers:
    def __init__(
        self, memory: int, rank: int, count: int, max_rows: int, per_token: int, kind: int, width: int, outputs: int
    ) -> None: ...
    @staticmethod
    def size(count: int, max_rows: int, per_token: int, kind: int, width: int, outputs: int) -> int: ...
    def leave(self) -> None: ...
    has_left: bool

class Verifier:
    def __init__(self, pool: ThreadPool, instruction_set: str) -> None: ...
    def verify(
        self,
        scores: int,
        stride: int,
        vocab: int,
        best: int,
        hashed: int,
        masks: int,
        starts: NDArray[np.int64],
        rows: NDArray[np.int64],
        seqs: NDArray[np.int64],
        laws: NDArray[np.float64],
        q: list[tuple[int, int]],
        verification: int,
        out: NDArray[np.int64],
    ) -> None: ...
    def score(
        self,
        scores: int,
        stride: int,
        vocab: int,
        count: int,
        rows: int,
        tokens: int,
        k: int,
        unit: float,
        peak: int,
        total: int,
        ranks: int,
        best: int,
        logits: int,
    ) -> None: ...

def read_bandwidth(pool: ThreadPool, memory: int, bytes: int, passes: int) -> float: ...

class Plan:
    def __init__(
        self,
        query_starts: NDArray[np.int32],
        cached: NDArray[np.int32],
        block_tables: NDArray[np.int32],
        parents: NDArray[np.int32],
        block_size: int,
        max_rows_per_block: int,
    ) -> None: ...
    def broken_rows(self) -> list[int]: ...

class Program:
    def __init__(self, pool: ThreadPool, instruction_set: str) -> None: ...
    def embed(
        self,
        ids: int,
        table: int,
        is_bfloat16: bool,
        hidden: int,
        scale: float,
        positions: int,
        position_table: int,
        norm: tuple[int, int, bool],
        eps: float,
        out: int,
    ) -> None: ...
    def fused_add_norm(
        self,
        residual: int,
        delta: int,
        post: int,
        norm: tuple[int, int, bool],
        eps: float,
        hidden: int,
        out: Activation,
    ) -> None: ...
    def joined_norms(self, parts: list[tuple[int, int, int]], eps: float, out: Activation) -> None: ...
    def norm_projections(self, qkv: int, stride: int, q: int, k: int, q_norm: int, k_norm: int, eps: float) -> None: ...
    def gather_rows(
        self, rows: int, residual: int, delta: int, post: int, eps: float, hidden: int, out: int
    ) -> None: ...
    def tap(self, rows: int, residual: int, delta: int, post: int, eps: float, hidden: int, out: int) -> None: ...
    def linear(self, weight: Weight, x: Activation, bias: int, out: int, adapters: Adapters) -> None: ...
    def gated(
        self,
        weight: Weight,
        x: Activation,
        bias: int,
        activation: int,
        is_gated: bool,
        out: Activation,
        adapters: Adapters,
    ) -> None: ...
    def find_adapters(self, slots: int, any: int) -> None: ...
    def shrink(self, format: int, x: Activation, adapters: Adapters, any: int) -> None: ...
    def embed_adapters(
        self, ids: int, residual: int, hidden: int, scale: float, adapters: Adapters, any: int
    ) -> None: ...
    def rope_and_cache(
        self,
        qkv: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        q_norm: int,
        k_norm: int,
        eps: float,
        positions: int,
        cos: int,
        sin: int,
        q: int,
        number: int,
        in_groups: bool,
        keys: int,
        values: int,
    ) -> None: ...
    def attention(
        self,
        q: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        number: int,
        in_groups: bool,
        keys: int,
        values: int,
        scale: float,
        slopes: int,
        window: int,
        out: Activation,
    ) -> None: ...
    def quantize_activation(self, x: int, out: Activation) -> None: ...
    def argmax(self, x: int, n: int, best: int) -> None: ...
    def top_k(self, x: int, n: int, k: int, best: int, tokens: int) -> None: ...
    def draw(
        self,
        logits: int,
        width: int,
        rows: int,
        bias: int,
        n: int,
        ids: int,
        hashed: int,
        temperature: int,
        keys: int,
        tokens: int,
        confidence: int,
    ) -> None: ...
    def route(
        self,
        scores: int,
        experts: int,
        has_share: bool,
        top_k: int,
        is_normalized: bool,
        chosen: int,
        weights: int,
        share: int,
    ) -> None: ...
    def experts(
        self,
        chosen: int,
        weights: int,
        share: int,
        shared: int,
        experts: int,
        top_k: int,
        max_rows: int,
        num_active: int,
        order: int,
        x: Activation,
        by_pair: Activation,
        gate_up: Weight,
        activation: int,
        between: Activation,
        down: Weight,
        pairs_out: int,
        out: int,
    ) -> None: ...
    def peer_experts(
        self,
        peers: ExpertPeers,
        chosen: int,
        weights: int,
        share: int,
        shared: int,
        first: int,
        experts: int,
        top_k: int,
        num_active: int,
        num_pairs: int,
        order: int,
        most_pairs: int,
        x: Activation,
        by_pair: Activation,
        gate_up: Weight,
        activation: int,
        between: Activation,
        down: Weight,
        pairs_out: int,
        out: int,
    ) -> None: ...
    def softcap(self, x: int, width: int, cap: float) -> None: ...
    def share_broken(self, peers: Peers) -> None: ...
    def sum_peers(self, peers: Peers, x: int, width: int) -> None: ...
    def gather_peers(self, peers: Peers, x: int, stride: int, widths: list[int], out: int, out_stride: int) -> None: ...
    def rows_from(self, count: int) -> None: ...
    def run(self, rows: int, gathered: int = 0, plan: Plan | None = None) -> None: ...
    def start(self, rows: int, gathered: int = 0, plan: Plan | None = None) -> None: ...
    def finish(self) -> None: ...
    def profile(self, rows: int, gathered: int = 0, plan: Plan | None = None) -> list[float]: ...
    def names(self) -> list[str]: ...
