"""The Triton sampler against torch's: same noise, same filters, same tokens; interpreted where there is no GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

from specserve.kernels import _torch_sampling as expected, _triton_sampling as found
from specserve.kernels._torch_sampling import SamplingArrays
from specserve.kernels._triton_numbers import INTERPRETED
from specserve.ops import NO_TOKEN_LEFT, NOT_FINITE
from specserve.sampling import noise
from specserve.testing.interpreted import mend_interpreter
from specserve.types import Ids

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")

if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("Triton was imported without TRITON_INTERPRET=1, and there is no GPU", allow_module_level=True)
if INTERPRETED:
    mend_interpreter()

filters = st.tuples(
    st.sampled_from([0.0, 1e-300, 1e-6, 0.3, 1.0, 1.7, 10.0]),  # temperature
    st.sampled_from([0.0, 0.02, 0.5, 1.0]),  # min_p
    st.sampled_from([1e-9, 0.3, 0.9, 0.999, 1.0]),  # top_p
    st.sampled_from([0, 1, 2, 17, 40, 10_000]),  # top_k
)


def arrays(each: list[tuple[float, float, float, int]], rows: list[int]) -> SamplingArrays:
    temperature, min_p, top_p, top_k = zip(*each, strict=True)
    keys = noise.row_keys(rows, rows, [noise.Purpose.SAMPLE] * len(rows)).numpy()
    laws = (np.array(law, np.float64) for law in (temperature, min_p, top_p))
    return SamplingArrays(np.array(rows), *laws, np.array(top_k), keys)


def check(scores: Tensor, sampling: SamplingArrays, masks: Ids | None) -> list[int]:
    hashed = noise.hash_tokens(torch.arange(scores.shape[1]))
    with torch.inference_mode():
        wanted = expected.sample(scores, sampling, hashed, masks).tolist()
        there = found.sample(scores.to(DEVICE), sampling, hashed.to(DEVICE), masks)
        assert there.tolist() == wanted
        for i in range(len(wanted)):  # alone
            assert (
                found.sample(scores.to(DEVICE), sampling[[i]], hashed.to(DEVICE), masks).tolist() == wanted[i : i + 1]
            )
    return wanted


@settings(max_examples=min(20 if INTERPRETED else 100, settings().max_examples))
@given(
    each=st.lists(filters, min_size=1, max_size=5),
    vocab=st.sampled_from([1, 2, 33, 300, 1024, 2049]),
    spread=st.sampled_from([0.0, 0.5, 3.0, 30.0]),
    share=st.sampled_from([None, None, 0.05, 0.5]),
    seed=st.integers(0, 2**16),
)
def test_samples_what_torch_samples(
    each: list[tuple[float, float, float, int]], vocab: int, spread: float, share: float | None, seed: int
) -> None:
    """Scores on a grid make ties at every border; ruled-out tokens are -inf, broken rows have no token."""
    rng = np.random.default_rng(seed)
    scores = torch.from_numpy(rng.standard_normal((len(each) + 2, vocab)).astype(np.float32) * spread * 4).round() / 4
    scores[rng.random((len(each) + 2, vocab)) < 0.2] = -torch.inf
    scores[rng.random(len(each) + 2) < 0.1, -1] = rng.choice([np.nan, np.inf])
    masks = None
    if share is not None:
        bits = rng.random((len(each) + 2, 32 * -(-vocab // 32))) < share
        masks = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
    rows = rng.permutation(len(each) + 2)[: len(each)].tolist()
    check(scores, arrays(each, rows), masks)


def test_rows_without_a_token() -> None:
    scores = torch.randn(4, 2500)
    scores[0, 7], scores[1, 2400], scores[2] = torch.nan, torch.inf, -torch.inf
    wanted = [NOT_FINITE, NOT_FINITE, NO_TOKEN_LEFT]
    for law in ((0.0, 0.0, 1.0, 0), (1.0, 0.1, 0.9, 5)):
        assert check(scores, arrays([law] * 4, [0, 1, 2, 3]), None)[:3] == wanted


def test_what_is_weighed_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(found, "_MOST_WEIGHED", 2 * 700)
    check(torch.randn(5, 700), arrays([(1.0, 0.0, 0.9, 20)] * 5, [4, 2, 0, 1, 3]), None)
