"""The op contract: names, shapes and dtypes of everything a model or the sampler may ask of a device. A backend is one
file in kernels/; specserve.ops.backend says what it declares.

Every op is row-invariant: row i of the result depends on row i of the input alone, bit for bit, whatever the number of
rows. Callers pad rows to a multiple of `row_multiple`; that padding is what lets a library GEMM keep the promise.

Ops are as large as the passes over memory that a fast backend wants to save. What one op returns for another to read
(typed Any) is the backend's own affair. A result is valid until the next call of the same op.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specserve.machine.pulse import Pulse
from specserve.ops.adapters import AdapterOps, RowAdapters as RowAdapters
from specserve.ops.flash import FlashOps
from specserve.ops.packing import PackedCache, Source, uncached
from specserve.ops.peers import PeerOps, Peers as Peers
from specserve.ops.pieces import Memory, Pieces
from specserve.ops.rows import AttentionRows as AttentionRows
from specserve.types import Ids

NOT_FINITE, NO_TOKEN_LEFT = -1, -2  # what stands in place of a token in a row that has none
ACTIVATIONS = ("silu", "gelu_tanh", "relu", "gelu")  # gelu is that of erf (arXiv 1606.08415), gelu_tanh close to it
MOST_TOP_K = 16  # tokens of a row that `top_k` is asked for

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class DraftArrays(NamedTuple):
    """The drafts of n sequences and how they are verified: arrays on the host. A sequence has one row for what follows
    its last token and one for what follows each node of its draft, parents before children. Few arrays, as each takes
    as long to make as twenty numbers."""

    starts: NDArray[np.int64]  # [n + 1] the first row of each, and how many rows there are
    rows: NDArray[np.int64]  # [3, rows] see the next three
    seqs: NDArray[np.int64]  # [3, n] seeds modulo 2^64; top_k, 0: all tokens; whether the scores are not the logits
    laws: NDArray[np.float64]  # [3, n] temperature, 0: greedy; min_p; top_p
    q: dict[int, Tensor]  # of sequences, float [nodes, vocab]: what nodes were drawn from; the others' are one-hot

    @property
    def tokens(self) -> NDArray[np.int64]:
        """Of the node before each row; 0 in first rows."""
        return np.asarray(self.rows[0])

    @property
    def parents(self) -> NDArray[np.int64]:
        """The row that judges this node; -1 in first rows."""
        return np.asarray(self.rows[1])

    @property
    def positions(self) -> NDArray[np.int64]:
        """In prompt and output, of the token that follows the node."""
        return np.asarray(self.rows[2])

    def is_tried(self, verification: str) -> NDArray[np.bool_]:
        """Whose nodes are accepted or rejected one by one, not compared with samples of the target, bool [n]."""
        return np.asarray((np.diff(self.starts) > 1) & (self.laws[0] > 0) & (verification != "coupled"))


class Verified(NamedTuple):
    """What the target says of the drafts of n sequences: arrays on the host. A sequence emits counts[i] tokens: the
    nodes kept, one fewer, and one more; both lie in `tokens` and `nodes` from its first row on. It emits none where
    that row has no token, but the reason; what else is in the arrays is 0."""

    tokens: NDArray[np.int64]  # [rows]; NOT_FINITE and NO_TOKEN_LEFT are reasons
    nodes: NDArray[np.int64]  # [rows], of the draft
    counts: NDArray[np.int64]  # [n]


class DrawArrays(NamedTuple):
    """How n tokens of drafts are drawn: tensors [n] on the device."""

    rows: Tensor  # int64, which row of the logits
    temperature: Tensor  # float64; 0: greedy
    keys: Tensor  # int64, of the noise


class Drawn(NamedTuple):
    """Two tokens for each of n drafts, of which the first is taken, tensors [n] on the device. A share is that of
    exp(score) in the sum over all entries: scores at the temperature, at 1 where that is 0, with their noise."""

    tokens: Tensor  # int64
    share: Tensor  # float32
    second: Tensor  # int64, what would be drawn if the first could not be
    second_share: Tensor  # float32


@dataclass(frozen=True, slots=True)
class RowScores:
    """What the log-probabilities of n rows follow from: arrays on the host. A row whose peak is not finite has nothing
    else."""

    peaks: NDArray[np.float32]  # [n] the highest logit; NaN where the row holds one
    totals: NDArray[np.int64]  # [n] the sum of e^(logit - peak), each rounded to a multiple of 2^-fraction_bits
    ranks: NDArray[np.int64]  # [n] 1 and how many logits are above that of the row's token
    best: NDArray[np.int64]  # [n, k] the k best, best first, of equals the lower id
    logits: NDArray[np.float32]  # [n, 1 + k] of the row's token, then of the best


def fraction_bits(vocab_size: int) -> int:
    """How fine RowScores.totals are: so that neither a sum of integers overflows nor one of them a float64."""
    return min(50, 62 - vocab_size.bit_length())


class Input(NamedTuple):
    """What a recorded function reads of each row: a number from the host, or numbers that are on the device."""

    dtype: torch.dtype
    columns: int = 0  # 0: one number from the host; else so many, float32
    is_gathered: bool = False  # of the rows that `gather_rows` leaves
    padding: int = 0  # the number of rows that only fill up a recording


class Recording(Protocol[T_co]):
    """A function's ops, recorded once with inputs of their own, to be run on what these hold."""

    @property
    def found(self) -> T_co:
        """What the function returned; each run overwrites it. Asked for once a run is started."""

    def takes(self, plan: Any) -> bool:
        """Whether it has room for that plan."""

    def fill(self, inputs: Sequence[NDArray[Any] | Tensor]) -> None:
        """Copy these to its inputs, as many rows as there are. No run may be under way."""

    def start(self, num_rows: int, num_gathered: int, plan: Any) -> None:
        """Begin to run them on the first `num_rows` rows, and those after `gather_rows` on `num_gathered` rows."""

    def finish(self) -> None:
        """Run what is left of them. Until then nobody may touch their tensors."""


@dataclass(slots=True)
class Rotation:
    """Where each row stands and what to rotate it by.

    x * cos + swap(x) * sin rotates by halves, where swap exchanges the halves of a head: sin has a minus in the first.
    """

    positions: Tensor  # int64 [rows]
    cos: Tensor  # float32 [max_len, d]
    sin: Tensor  # float32 [max_len, d]
    rows: tuple[Tensor, Tensor] | None = None  # cos and sin of the rows, where a backend keeps them
    slopes: Any = None  # float32 [heads] by pack_vector, of layers with ALiBi, for `attention`


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Weights of the norms of every query head and every key head, or of all of them together, as pack_vector returned
    them."""

    q: Any
    k: Any
    eps: float


class Placed(NamedTuple):
    """Learned vectors of the rows' positions."""

    positions: Tensor  # int64 [rows]
    table: Tensor  # [positions, hidden], as pack_table returned it


class Ops(AdapterOps, FlashOps, PeerOps, Protocol):
    """One device's kernels. `dtype` is that of what is not quantised (float32 or bfloat16); the residual stream, norms
    and rotary embedding are float32, and so are the sums inside products and attention. `kv_dtype` is that of the KV
    cache; what is larger than the largest number of float16 is stored as that."""

    name: str
    row_multiple: int
    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype
    weight_dtype: torch.dtype  # of matrices in memory that are not quantised: float32 where bfloat16 has no products
    instruction_set: str  # as in config.ISAS; "" where there is no choice, as on a GPU
    quantization: str  # how weights are stored, as in config.QUANTIZATIONS
    records: bool  # whether ops can be recorded; else a device runs them one by one
    buckets: Sequence[int]  # ascending, the numbers of rows that recordings have; () where one takes any up to its own
    has_own_threads: bool  # torch's would spin beside them for what little is left to torch

    @property
    def layout(self) -> str | None:
        """Names all that the bytes of packed weights depend on, but for the weights; None: they are not cached.

        With a layout the functions below take every tensor that they pack from `cached`, under the name of its kind,
        and read the weights only when that packs. Then memory from `cached` begins at a multiple of 64 bytes."""

    def pack(self, weight: Source, bias: Source | None = None, cached: PackedCache = uncached) -> Any:
        """A weight [out, in] with its bias [out] as `linear` wants them; called once at load. Of a quantised weight a
        backend packs the integers, or the numbers that they stand for, which it may round to integers of its own."""

    def pack_head(self, weight: Source, bias: Source | None = None, cached: PackedCache = uncached) -> Any:
        """The LM head [vocab, hidden] with its bias [vocab] for `linear`, in no less than 8 bits: its errors are the
        tokens' own."""

    def pack_gated(
        self, gate: Source, up: Source, gate_bias: Source | None, up_bias: Source | None, cached: PackedCache = uncached
    ) -> Any:
        """Two weights [n, in] with their biases as `gated` wants them."""

    def pack_router(self, weight: Source, cached: PackedCache = uncached) -> Any:
        """The weight [experts or one more, in] of a router as `route` wants it: float32, however others are kept."""

    def pack_experts(
        self, gates: Sequence[Source], ups: Sequence[Source], downs: Sequence[Source], cached: PackedCache = uncached
    ) -> Any:
        """The weights of gated MLPs of one size as `experts` wants them: of each [n, in], [n, in] and [out, n]. Raises
        ModelError where a backend has none."""

    def pack_vector(self, values: Source, cached: PackedCache = uncached) -> Any:
        """The weight of an RMS norm [n] as ops want it."""

    def pack_layer_norm(self, weight: Source, bias: Source | None, cached: PackedCache = uncached) -> Any:
        """The weight of a LayerNorm [n] with its bias [n], for `embed`, `fused_add_norm` and `norm` in the place of the
        weight of an RMS norm."""

    def pack_table(self, table: Source, cached: PackedCache = uncached) -> Tensor:
        """A table [vocab, hidden] as `embed` wants it, a copy."""

    def embed(
        self,
        token_ids: Tensor,
        table: Tensor,
        scale: float,
        placed: Placed | None = None,
        norm: Any = None,
        eps: float = 0.0,
    ) -> Tensor:
        """Rows token_ids int64 [rows] of table [vocab, hidden] times scale, plus the learned vectors of their
        positions, then normed as `norm` does -> the residual, float32 [rows, hidden]."""

    def fused_add_norm(self, residual: Tensor, delta: Tensor | None, post: Any, weight: Any, eps: float) -> Any:
        """residual += delta, in place; delta [rows, hidden] is normed first if there is a weight `post` of an RMS norm
        for it. Then the norm of residual for a linear layer to read, or residual itself where `weight` is None."""

    def add(self, residual: Tensor, delta: Tensor) -> None:
        """residual += delta [rows, hidden], in place."""

    def norm_projections(self, qkv: Tensor, norms: HeadNorms, sizes: tuple[int, int]) -> Tensor:
        """qkv [rows, q + k and v] as `linear` returned it, `sizes` = q, k: all queries of a row RMS normed as one
        vector, and all its keys, for `rope_and_cache`; qkv may be overwritten."""

    def gather_rows(self, rows: Tensor, residual: Tensor, delta: Tensor, post: Any, eps: float) -> Tensor:
        """(residual + delta)[rows], rows int64 [n] -> float32 [n, hidden], as `fused_add_norm` adds. What
        follows has n rows; no op may work on all rows of the step after it."""

    def tap(self, layer: int, residual: Tensor, delta: Tensor | None, post: Any, eps: float) -> Tensor:
        """residual + delta of all rows, as `fused_add_norm` adds -> float32 [rows, hidden], which no other layer's
        overwrites, nor any other op's; residual stays as it is."""

    def norm(self, x: Tensor, weight: Any, eps: float) -> Tensor:
        """x float32 [rows, hidden], divided by its root mean square, times weight; or, where that is a LayerNorm's,
        less its mean, divided by its standard deviation, times weight, plus bias -> float32 [rows, hidden]. x may
        be what this op returned last."""

    def joined_norms(self, parts: Sequence[tuple[Tensor, Any]], eps: float) -> Any:
        """Several float32 [rows, n] side by side for a linear layer to read, each normed as `norm` does with its own
        weight, or as it is where that is None."""

    def input_rows(self, rows: int, columns: int) -> Tensor:
        """float32 [rows, columns] of zeros that the host fills before each run of a recording, or of ops one by one."""

    def quantize_activation(self, x: Tensor) -> Any:
        """x float32 [rows, n] for a linear layer to read."""

    def linear(self, x: Any, weight: Any, adapters: RowAdapters | None = None) -> Tensor:
        """x [rows, in] times packed weight^T -> [rows, out], float32 or `dtype`; with b a x of each row's adapter."""

    def gated(self, x: Any, weight: Any, activation: str, adapters: RowAdapters | None = None) -> Any:
        """activation(x gate^T) * (x up^T), for a linear layer to read; activation is "silu" or "gelu_tanh". Adapters
        are added to both products."""

    def activated(self, x: Any, weight: Any, activation: str, adapters: RowAdapters | None = None) -> Any:
        """activation(x weight^T + bias) of what `pack` returned, for a linear layer to read; activation is one of
        ACTIVATIONS. Adapters are added to the product."""

    def route(self, x: Tensor, router: Any, num_experts: int, per_token: int, is_normalized: bool) -> Any:
        """Where rows x float32 [rows, in] go, for `experts`: to the `per_token` experts whose scores x router^T are
        highest, of equals the lower, all float32. Their weights are a softmax of these scores, or of the scores of all
        experts where they are not normalised. A router's row after those of the experts scores a shared expert, whose
        weight is the sigmoid of that; without one it is 1. A row whose scores are not numbers goes anywhere, with
        weights that are none."""

    def router_scores(self, x: Tensor, router: Any) -> Tensor:
        """x float32 [rows, in] times a router^T -> float32 [rows, out], for whoever decides by itself where rows go."""

    def routed(self, chosen: Tensor, weights: Tensor) -> Any:
        """Where rows go, for `experts`, as somebody else decided it: experts int32 [rows, per_token], each less than
        their number and a row's all different, and float32 weights of these, both contiguous and kept by the caller as
        long as it is read. A row's sum goes over its experts in this order."""

    def experts(self, x: Any, weights: Any, routing: Any, activation: str, shared: Tensor | None) -> Tensor:
        """The experts' down(activation(gate(x)) * up(x)) of the rows that go to them, times their weights, added row by
        row from the best score down, and `shared` [rows, out] times its own -> [rows, out], float32. Only of experts
        that a row goes to are weights read."""

    def softcap(self, logits: Tensor, cap: float) -> Tensor:
        """cap * tanh(logits / cap), in place."""

    def argmax(self, logits: Tensor) -> Tensor:
        """The lowest of the best token ids of each row of float32 [rows, vocab], int64 [rows]; -1 where the highest
        logit is infinite or any is NaN."""

    def top_k(self, logits: Tensor, best: Tensor, k: int) -> Tensor:
        """The k best token ids of each row of float32 [rows, vocab], best first, of equals the lower one first, int32
        [rows, k]; all -1 where `best`, which is argmax(logits), is. k is at most MOST_TOP_K and vocab."""

    def draw(
        self, depth: int, logits: Tensor, bias: Tensor | None, how: DrawArrays, ids: Tensor | None, hashed: Tensor
    ) -> Drawn:
        """Tokens of n drafts, which no other depth's overwrite: of logits[how.rows] + bias, float32 [any, vocab] and
        [n, vocab], the best or, where the temperature is not 0, one drawn with the noise of its key. Entry j is token
        ids[j], int64 [vocab], or j where that is None; hashed[j] is entry j's token as noise.hash_tokens has it. Where
        there is none, as scores are not finite, the share is 0 and the token any."""

    def verify(
        self, scores: Tensor, best: Tensor, drafts: DraftArrays, hashed: Tensor, masks: Ids | None, verification: str
    ) -> Verified:
        """What the target says of drafts. `verification` is of config.VERIFICATIONS: with "coupled", and of sequences
        that are greedy or have no draft, a node stands that is the token its row chooses; with "rejection" and "block"
        a sampled sequence's nodes are accepted or rejected with the chance that keeps the target's law, one by one or
        by whole paths. Then one more token follows.

        A row chooses by its scores, float32 [rows or more, vocab], among the tokens whose bit is set in masks int32
        [rows, ceil(vocab / 32)]. Where the temperature is 0 that is the best, of equals the lowest; else temperature,
        min-p, top-k and top-p apply, in this order (vLLM's), and sampling.noise decides by seed, position and hashed
        token ids int64 [vocab]. `best` int64 [rows or more] is argmax(logits), of which only edited scores differ. A
        row has no token, but NOT_FINITE, where its best is -1 or its highest score infinite; NO_TOKEN_LEFT, where all
        are -inf. One caller at a time."""

    def score(self, logits: Tensor, rows: NDArray[np.int64], tokens: NDArray[np.int64], k: int) -> RowScores:
        """How likely tokens int64 [n] are, each under one of `rows` int64 [n] of logits float [all rows, vocab], and
        the k best, k at most vocab: the same bits from every backend. One caller at a time."""

    def copy_kv(self, kvs: Sequence[Tensor], sources: Tensor, targets: Tensor) -> None:
        """Let slots `targets` of every kv [2, slots, kv_heads, d] hold what `sources` hold, int64 [n] each, no target
        named twice; all are read before any is written. How a kv is laid out inside is the backend's own affair."""

    def read_kv(self, kv: Tensor, slots: Tensor) -> Tensor:
        """What slots int64 [n] of a kv [2, slots, kv_heads, d] hold, [2, n, kv_heads, d] in this order, whatever the
        layout inside; bit for bit what was stored."""

    def write_kv(self, kv: Tensor, slots: Tensor, values: Tensor) -> None:
        """Let slots int64 [n] hold these values, as `read_kv` returns them, no slot named twice."""

    def rope_and_cache(self, qkv: Tensor, norms: HeadNorms | None, rotation: Rotation, kv: Tensor, plan: Any) -> Any:
        """qkv [rows, (heads + 2 kv_heads) d]: norm q and k by head, rotate them by halves (GPT-NeoX layout), store k, v
        in kv, a tensor [2, slots, kv_heads, d], at the rows' slots -> q for `attention`. A cache holds finite numbers
        alone: what is NaN or infinite is stored as 0, and the plan remembers its row."""

    def attention(self, q: Any, kv: Tensor, plan: Any, scale: float, window: int | None, slopes: Any = None) -> Any:
        """q over the cached KV -> [rows, heads d] for a linear layer to read. Grouped heads: query head h reads kv head
        h // (heads / kv_heads). `window`: a row sees at most that many latest logical positions. `slopes` float32
        [heads], by pack_vector: a scaled score loses that much for each logical position between the row and what it
        sees (ALiBi, arXiv 2108.12409); in a tree that is a difference of depths."""

    def attention_floats(self, q: Any, kv: Tensor, plan: Any, scale: float, window: int | None) -> Tensor:
        """As `attention`, for whoever computes with it before a linear layer reads it: float32 [rows, heads d]."""

    def plan(self, rows: AttentionRows, block_size: int) -> Any:
        """Everything `rope_and_cache` and `attention` need that does not depend on the layer; once per step."""

    def watch(self, pulse: Pulse) -> None:
        """Let it beat from now on whenever a piece of a step is done, in recorded steps too."""

    def broken_rows(self, plan: Any) -> list[int]:
        """The rows of a step that has run whose keys or values were NaN or infinite in any layer, ascending."""

    def record(
        self, function: Callable[..., T], inputs: Sequence[Input], num_rows: int, num_gathered: int, plan: Any
    ) -> Recording[T]:
        """Record what `function(plan, *inputs)` does, for inputs of so many rows. `plan` is any of those that it will
        run with, for what they have alike; None where it reads none. Only for ops that record; see ops.capture."""

    def pieces(self, memory: Memory) -> AbstractContextManager[Pieces]:
        """Within it ops of this thread are noted, and not run. They read and write `memory`, where their results are;
        inputs lie as `input_rows` has them. Only for ops that record on a CPU."""
