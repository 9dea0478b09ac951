"""Flash attention of other packages: which one is taken, what is refused, and that it reads the cache as our own does.
No GPU has run them here: on the faked device a function with the signature of torch's stands for it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import varlen

import specserve.kernels._triton_flash as flash
from specserve.config import EngineConfig
from specserve.errors import ConfigError
from specserve.llm import LLM
from specserve.ops import AttentionRows, Ops
from specserve.ops.choice import choose_ops
from specserve.ops.selftest import self_test
from specserve.ops.selftest.trust import choose_attention
from specserve.ops.selftest.uses import Uses
from specserve.registry import KERNELS
from specserve.testing import fake_cuda, write_tiny_model
from specserve.types import SamplingParams

USES = Uses(64, 96, 4, 2, 16, frozenset({"window"}))
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device, whose own it would take")


class Stand:
    """torch's varlen_attn of causal chains, in float64 and without a look at numbers on the host."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.error = 0.0

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor | None, max_q: int,
        max_k: int, *, scale: float, window_size: tuple[int, int], enable_gqa: bool, seqused_k: Tensor,
        block_table: Tensor, num_splits: int,
    ) -> Tensor:  # fmt: skip
        self.num_calls += 1
        assert (cu_seq_k, enable_gqa, num_splits, window_size[1]) == (None, True, 1, 0)
        assert all(each.dtype == torch.int32 for each in (cu_seq_q, seqused_k, block_table))
        rows = torch.arange(len(query), device=query.device)
        seq = torch.searchsorted(cu_seq_q[1:].long().contiguous(), rows, right=True).clamp(max=len(seqused_k) - 1)
        last = seqused_k[seq] - (cu_seq_q[seq + 1] - rows)  # position of the row
        at = torch.arange(max_k, device=query.device)
        is_seen = at <= last[:, None]
        if window_size[0] >= 0:
            is_seen = is_seen & (at >= last[:, None] - window_size[0])
        page = key.shape[1]
        slots = torch.where(is_seen, block_table[seq][:, at // page] * page + at % page, 0)
        k, v = (each.flatten(0, 1)[slots].double() for each in (key, value))
        own = query.double().view(len(query), key.shape[2], -1, query.shape[2])
        scores = torch.einsum("rhsd,rlhd->rhsl", own, k) * scale
        shares = scores.masked_fill(~is_seen[:, None, None], -torch.inf).softmax(-1).nan_to_num(0)
        found = torch.einsum("rhsl,rlhd->rhsd", shares, v).reshape(query.shape)
        return (found + self.error).to(query.dtype)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specserve.ops.selftest.trust.self_test", partial(self_test, num_rows=3))


@pytest.fixture
def stand(monkeypatch: pytest.MonkeyPatch) -> Stand:
    made = Stand()
    monkeypatch.setattr(varlen, "varlen_attn", made)
    return made


@pytest.fixture
def ops(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ops]:
    monkeypatch.delenv("SPECSERVE_ISA", raising=False)
    with fake_cuda() as device:
        yield choose_ops(device, "bfloat16", "none", 1)


def test_what_there_is_is_known_by_its_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    found = flash.candidates(torch.bfloat16, 256)
    assert list(found) == ["fa3", "fa2", "torch"]
    if torch.__version__ >= "2.13":
        assert isinstance(found["torch"], flash.Flash)
    assert "cannot be imported" in str(found["fa3"])

    def older(query: Any, key: Any, value: Any, cu_seq_q: Any, cu_seq_k: Any, max_q: int, max_k: int, *, scale: Any,
              window_size: Any) -> None: ...  # fmt: skip

    monkeypatch.setattr(varlen, "varlen_attn", older)
    assert flash.candidates(torch.bfloat16, 256)["torch"] == (
        "takes no enable_gqa, seqused_k, block_table in the release that is installed"
    )
    monkeypatch.delattr(varlen, "varlen_attn")
    assert "cannot be imported" in str(flash.candidates(torch.bfloat16, 256)["torch"])


def test_what_it_cannot_read_is_said(stand: Stand) -> None:
    assert flash.candidates(torch.float32, 256)["torch"] == "multiplies bfloat16 alone: use --dtype bfloat16"
    assert "use --block-size 256" in str(flash.candidates(torch.bfloat16, 16)["torch"])
    assert isinstance(flash.candidates(torch.bfloat16, 512)["torch"], flash.Flash)


def as_fa2(stand: Stand) -> Callable[..., Tensor]:
    def flash_attn_varlen_func(
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
        max_seqlen_k: int, softmax_scale: float, causal: bool, window_size: tuple[int, int], block_table: Tensor,
    ) -> Tensor:  # fmt: skip
        assert causal
        lengths = cu_seqlens_k[1:] - cu_seqlens_k[:-1]
        return stand(q, k, v, cu_seqlens_q, None, max_seqlen_q, max_seqlen_k, scale=softmax_scale, enable_gqa=True,
                     window_size=window_size, seqused_k=lengths, block_table=block_table, num_splits=1)  # fmt: skip

    return flash_attn_varlen_func


def as_fa3(stand: Stand) -> Callable[..., Tensor]:
    def flash_attn_with_kvcache(
        q: Tensor, k_cache: Tensor, v_cache: Tensor, cache_seqlens: Tensor, page_table: Tensor, cu_seqlens_q: Tensor,
        max_seqlen_q: int, softmax_scale: float, causal: bool, window_size: tuple[int, int], num_splits: int,
    ) -> Tensor:  # fmt: skip
        assert causal
        most = page_table.shape[1] * k_cache.shape[1]
        return stand(q, k_cache, v_cache, cu_seqlens_q, None, max_seqlen_q, most, scale=softmax_scale, enable_gqa=True,
                     window_size=window_size, seqused_k=cache_seqlens, block_table=page_table,
                     num_splits=num_splits)  # fmt: skip

    return flash_attn_with_kvcache


@no_gpu
@pytest.mark.parametrize(("name", "block_size"), [("fa3", 16), ("fa2", 256), ("torch", 256)])
def test_each_passes_the_self_test_or_is_refused(
    ops: Ops, stand: Stand, monkeypatch: pytest.MonkeyPatch, name: str, block_size: int
) -> None:
    packages = {
        "fa3": ("flash_attn_interface", SimpleNamespace(flash_attn_with_kvcache=as_fa3(stand))),
        "fa2": ("flash_attn", SimpleNamespace(flash_attn_varlen_func=as_fa2(stand))),
    }
    if name in packages:
        monkeypatch.setitem(sys.modules, *packages[name])
    said = choose_attention(ops, "flash", USES, block_size)
    assert ops.flash == name
    assert f"Attention of prompts and chains is {name}'s flash attention" in said
    assert "only where tiles are equal" in said
    stand.error = 0.5
    with pytest.raises(ConfigError, match=f"{name} fails the self-test on cuda:0: 2 of 2 checks failed"):
        choose_attention(ops, "flash", USES, block_size)
    assert ops.flash == ""
    assert "Attention is exact, as" in choose_attention(ops, "auto", USES, block_size)
    assert choose_attention(ops, "exact", USES, block_size) == ""


@no_gpu
def test_trees_blocks_and_alibi_are_our_own_kernels(ops: Ops, stand: Stand) -> None:
    ops.use_flash("torch", 256)
    kv = torch.zeros((2, 4 * 256, 2, 16), dtype=torch.bfloat16, device=ops.device)
    q = torch.zeros((4, 4, 16), device=ops.device)
    slopes = ops.pack_vector(torch.ones(4))
    for parents, own, is_flash in (
        ([-1, 0, 1, 2], None, True),
        ([-1, 0, 0, 2], None, False),
        ([3, 0, 1, 2], None, False),
        ([-1, 0, 1, 2], slopes, False),
    ):
        before, rows = stand.num_calls, AttentionRows.pack([0, 4], [5], [[1]], parents, 1)
        ops.attention(q, kv, ops.plan(rows, 256), 1.0, None, own)
        assert (stand.num_calls > before) == is_flash
    with pytest.raises(ConfigError, match="--attention flash: the model's attention has ALiBi"):
        choose_attention(ops, "flash", Uses(forms=frozenset({"alibi"})), 256)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("flash") / "tiny", "gemma3", seed=3)  # has windows


@no_gpu
def test_an_engine_with_it(
    tiny: Path, stand: Stand, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Prompts, chains and trees in captured steps: numbers of the stand-in are those of exact attention's."""
    monkeypatch.delenv("SPECSERVE_ISA", raising=False)
    options: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": 96, "threads": 1, "adaptive": False}
    options |= {"block_size": 256, "device": "cuda", "max_num_seqs": 2}
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    prompts = ["Tell of the first one.", "Say it again, say it again, say it"]
    found = []
    with fake_cuda():
        monkeypatch.setattr(KERNELS.find("triton"), "buckets", (8,))
        monkeypatch.setattr("specserve.models.uses.trusted", lambda ops, *asked, **named: SimpleNamespace(
            ops=ops, lines=()))  # fmt: skip
        for attention in ("exact", "flash"):
            with LLM(str(tiny), attention=attention, drafter="auto", **options) as llm:
                found.append([each.outputs[0].token_ids for each in llm.generate(prompts, [params] * 2)])
                assert ("flash attention of torch" in llm.summary) == (attention == "flash")
    assert found[0] == found[1]
    assert stand.num_calls
    assert "only where tiles are equal" in caplog.text


def test_a_cpu_has_none(tiny: Path) -> None:
    with pytest.raises(ConfigError, match="--attention flash is for GPUs, and this engine runs on the CPU"):
        LLM(str(tiny), device="cpu", attention="flash")
    with pytest.raises(ConfigError, match="Give --no-bit-identity with it"):
        EngineConfig(attention="auto")
    assert EngineConfig(attention="auto", bit_identity=False).attention == "auto"
    with pytest.raises(ConfigError, match="--attention"):
        EngineConfig(attention="fast")
