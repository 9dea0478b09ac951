"""Which tokens follow which, as a table of low rank: where the bigram bias of a block head begins."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from specserve.train.batches import Answer
from specserve.train.block import BlockHead

_ITERATIONS = 4  # of the subspace of the largest singular values


def begin_bigram(head: BlockHead, answers: Sequence[Answer], seed: int) -> None:
    """Let the head's bias begin with how much likelier each token was in `answers` behind the one before it than
    elsewhere (positive pointwise mutual information), as far as the bias's rank reaches. The same bits for the same
    seed."""
    table = _information(head, answers)
    rank = min(head.spec.bigram_rank, *table.shape)
    if not rank or not table.values().numel():
        return
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        left, sizes, right = torch.svd_lowrank(table, q=rank, niter=_ITERATIONS)
    with torch.no_grad():
        head.bigram_in.weight[:, :rank] = left * sizes.sqrt()
        head.bigram_out.weight[:, :rank] = right * sizes.sqrt()


def _information(head: BlockHead, answers: Sequence[Answer]) -> Tensor:
    """Sparse float32 [vocab, draft vocabulary], 0 where a pair did not occur or only as often as by chance."""
    outputs = [answer.tokens[answer.num_prompt - 1 :].astype(np.int64) for answer in answers]
    before = torch.from_numpy(np.concatenate([each[:-1] for each in outputs]))
    behind = head.places(torch.from_numpy(np.concatenate([each[1:] for each in outputs])))
    pairs = torch.stack([before, behind])[:, behind >= 0]
    shape = head.spec.target.vocab_size, head.spec.layers.vocab_size
    with torch.sparse.check_sparse_tensor_invariants(enable=False):  # type: ignore[no-untyped-call]
        counts = torch.sparse_coo_tensor(pairs, torch.ones(pairs.shape[1]), shape).coalesce()
        (rows, columns), found = counts.indices(), counts.values()
        of_row = torch.zeros(shape[0]).index_add_(0, rows, found)
        of_column = torch.zeros(shape[1]).index_add_(0, columns, found)
        information = (found * found.sum() / (of_row[rows] * of_column[columns])).log().clamp_min(0)
        return torch.sparse_coo_tensor(counts.indices(), information, shape).coalesce()
