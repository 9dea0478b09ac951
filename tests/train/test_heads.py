"""Heads with gradients: what each guess may depend on, and that it is what a draft at that depth would be."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from specserve.errors import ConfigError
from specserve.kernels.reference import Kernels
from specserve.models.heads.layers import write_layers
from specserve.models.loader import load_model
from specserve.models.spec import RmsNorm, Rope
from specserve.testing import Feed, PagedDecoder, llama_spec
from specserve.testing.heads import block
from specserve.train.acceptance import measure
from specserve.train.adjacency import begin_bigram
from specserve.train.batches import Answer, Batch, draw_starts, make_batch
from specserve.train.block import BlockHead
from specserve.train.config import TrainingOptions
from specserve.train.eagle import EagleHead
from specserve.train.heads import Guesses, TrainedHead, batch_loss, layers_spec, loss_of
from specserve.train.kinds import head_spec, make_head
from specserve.train.layers import attend, attend_unrolled
from specserve.train.muon import Optimiser, learning_rate, orthogonal
from specserve.train.target import Target

KINDS = ("eagle", "block", "medusa")
IDS = np.arange(3, 253)
LENGTHS = ((20, 6), (26, 9), (15, 13))  # of an answer and the prompt in it
Make = Callable[..., TrainingOptions]


def answers(seed: int = 0) -> list[Answer]:
    draw = np.random.default_rng(seed)
    return [Answer(draw.integers(3, 253, length), prompt, "ab"[prompt % 2]) for length, prompt in LENGTHS]


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def first(kind: str, target: Target, options: TrainingOptions) -> TrainedHead:
    return make_head(head_spec(kind, target.spec, len(IDS), 5, options), target, IDS, options)


@pytest.fixture
def make(target: Target, options: Make) -> Callable[..., TrainedHead]:
    """A head whose every number is random, as those that begin with zeros would hide mistakes."""

    def head(kind: str, **own: Any) -> TrainedHead:
        made = first(kind, target, options(**own))
        draw = torch.Generator().manual_seed(2)
        for each in made.parameters():
            if each.requires_grad:
                each.data += 0.3 / each.shape[-1] ** 0.5 * torch.randn(each.shape, generator=draw)
        return made

    return head


def batch_for(target: Target, head: TrainedHead, which: list[Answer], drafts: int = 20) -> Batch:
    depth = len(head.depth_weights)
    return make_batch(target, which, head.hidden_layers, torch.from_numpy(IDS), depth, drafts, generator())


# --- the target -------------------------------------------------------------------------------------------------------


def test_hidden_states_and_distributions_are_the_models(target: Target, tiny: Path) -> None:
    some = answers()
    states = target.hidden([answer.tokens for answer in some], [0, target.last_layer])
    model = load_model(tiny, Kernels(torch.device("cpu"), torch.float32), 96)
    for answer, state in zip(some, states, strict=True):
        logits = PagedDecoder(model, 1, 96).step(Feed(0, answer.tokens.tolist()))[0]
        found = target.distributions(state[:, 1], torch.from_numpy(IDS))
        torch.testing.assert_close(found, logits.softmax(-1)[:, 3:253], atol=1e-5, rtol=1e-4)
        alone = target.hidden([answer.tokens], [0, target.last_layer])[0]
        assert torch.equal(alone, state)


@pytest.mark.parametrize("drafts", [3, 20])
def test_a_batch_judges_what_the_target_wrote(target: Target, drafts: int) -> None:
    some, ids = answers(), torch.from_numpy(IDS)
    batch = make_batch(target, some, (1,), ids, 2, drafts, generator())
    used: set[int] = set()
    for row, answer in enumerate(some):
        places = batch.is_judged[row].nonzero()[:, 0].tolist()
        assert places == list(range(answer.num_prompt - 1, len(answer.tokens) - 1))
        starts = [start for start in batch.starts[row].tolist() if start >= 0]
        possible = range(answer.num_prompt, len(answer.tokens) - 1)
        assert len(set(starts)) == len(starts) == min(drafts, len(possible))
        assert set(starts) <= set(possible)
        said = target.distributions(target.hidden([answer.tokens], [target.last_layer])[0][:, 0], ids)
        for depth in range(2):
            of_it = [
                (d, place) for a, d, place in zip(*map(Tensor.tolist, batch.judged(depth)), strict=True) if a == row
            ]
            assert of_it == [(d, start + depth) for d, start in enumerate(starts) if start + depth < places[-1] + 1]
            for _, place in of_it:
                kept = int(batch.target_rows[row, place])
                torch.testing.assert_close(batch.target[kept], said[place], atol=1e-6, rtol=1e-5)
                used.add(kept)
    assert used == set(range(len(batch.target))), "nothing else is computed"
    assert int((batch.target_rows >= 0).sum()) == len(used)


def test_drafts_begin_at_tokens_drawn_evenly_and_by_the_generator(target: Target) -> None:
    lengths, prompts = torch.tensor([12, 5]), torch.tensor([2, 4])
    counts = torch.zeros(12)
    draw = torch.Generator().manual_seed(0)
    for _ in range(3000):
        starts = draw_starts(lengths, prompts, 3, draw)
        assert starts[1].tolist() == [-1, -1, -1], "one token of output begins no draft"
        assert starts[0].tolist() == sorted(set(starts[0].tolist()))
        counts[starts[0]] += 1
    assert not counts[:2].any()
    assert not counts[11]
    torch.testing.assert_close(counts[2:11] / 3000, torch.full((9,), 1 / 3), atol=0.035, rtol=0.0)
    pair = [draw_starts(lengths, prompts, 3, generator()) for _ in range(2)]
    assert torch.equal(*pair)


# --- what a guess depends on ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_have_the_names_and_shapes_of_the_spec(make: Any, kind: str) -> None:
    head = make(kind, layers=2)
    assert {name: tuple(each.shape) for name, each in head.state_dict().items()} == head.spec.shapes()


@pytest.mark.parametrize("kind", KINDS)
def test_a_later_token_changes_no_earlier_guess(make: Any, target: Target, kind: str) -> None:
    head = make(kind, layers=1 if kind == "medusa" else 2)
    some = answers()
    tokens, changed = some[1].tokens.copy(), 20
    tokens[changed] = 3 if tokens[changed] != 3 else 4
    others = [some[0], dataclasses.replace(some[1], tokens=tokens), some[2]]
    batches = [batch_for(target, head, which) for which in (some, others)]
    num_same = num_other = 0
    for depth, pair in enumerate(zip(*(head.guesses(each) for each in batches), strict=True)):
        assert torch.equal(pair[0].drafts, pair[1].drafts)
        for i, draft in enumerate(pair[0].drafts.tolist()):
            answer = draft // batches[0].starts.shape[1]
            start = int(batches[0].starts.flatten()[draft])
            # Medusa reads the state before `start`; the bias of a block, and EAGLE, also the tokens drafted since.
            newest = start - 1 if kind == "medusa" else start + depth
            same = torch.equal(pair[0].logits[i], pair[1].logits[i])
            assert same or (answer == 1 and newest >= changed)
            num_same += same and answer == 1
            num_other += not same
    assert num_same
    assert num_other


@pytest.mark.parametrize("kind", KINDS)
def test_an_earlier_token_changes_later_guesses(make: Any, target: Target, kind: str) -> None:
    head = make(kind)
    some = answers()
    tokens = some[1].tokens.copy()
    tokens[0] = 3 if tokens[0] != 3 else 4
    others = [some[0], dataclasses.replace(some[1], tokens=tokens), some[2]]
    pairs = zip(*(head.guesses(batch_for(target, head, which)) for which in (some, others)), strict=True)
    for one, other in pairs:
        own = one.drafts // (one.num_drafts // 3) == 1
        assert (one.logits != other.logits).any(-1)[own].all()
        assert torch.equal(one.logits[~own], other.logits[~own])


@pytest.mark.parametrize("kind", KINDS)
def test_few_drafts_are_guessed_as_all_are(make: Any, target: Target, kind: str) -> None:
    """What is computed for some rows alone is what it is among all."""
    head = make(kind, layers=1 if kind == "medusa" else 2)
    few, everything = (batch_for(target, head, answers(), drafts) for drafts in (3, 20))
    for one, other in zip(head.guesses(few), head.guesses(everything), strict=True):
        starts = everything.starts.flatten().tolist()
        at = {(draft // 20, starts[draft]): i for i, draft in enumerate(other.drafts.tolist())}
        assert len(one.drafts) >= 4
        for i, draft in enumerate(one.drafts.tolist()):
            same = at[draft // 3, int(few.starts.flatten()[draft])]
            for name in ("logits", "target", "truth"):
                torch.testing.assert_close(getattr(one, name)[i], getattr(other, name)[same], atol=1e-5, rtol=1e-4)


def drafted(head: EagleHead, batch: Batch, row: int) -> list[Tensor]:
    """The logits of a draft behind token row + 1 of a batch of one, written as a plain decoder with a KV cache would
    compute them: the rows of the target's hidden states first, then one row after the other of the head's own."""
    tokens, depth = batch.tokens[0], len(head.depth_weights)
    hidden, ids = head.fc(batch.hidden)[0, : row + 1], tokens[1 : row + 2]
    found = []
    for step in range(depth):
        outputs = plain(head, head.embed(ids), hidden)
        found.append(head.lm_head(head.norm(outputs[-1])))
        hidden = torch.cat([hidden, outputs[-1:]])
        ids = torch.cat([ids, tokens[row + 2 + step : row + 3 + step]])
        if len(ids) < len(hidden):
            break
    return found


def plain(head: EagleHead, embedded: Tensor, hidden: Tensor) -> Tensor:
    """All rows at once under a causal mask, [rows, hidden]."""
    positions = torch.arange(len(hidden))
    mask = torch.ones(len(hidden), len(hidden), dtype=torch.bool).tril()
    for number, layer in enumerate(head.layers):
        x = layer.input_layernorm(embedded if number == 0 else hidden)
        if number == 0:
            x = torch.cat([x, layer.hidden_norm(hidden)], -1)
        k, v = layer.self_attn.keys_values(x[None], positions)
        attended = attend(layer.self_attn.queries(x[None], positions), k, v, mask)
        hidden = layer.finish(hidden[None], attended)[0]
    return hidden


@pytest.mark.parametrize("layers", [1, 2])
def test_eagle_guesses_are_what_it_would_draft(make: Any, target: Target, layers: int) -> None:
    """Depth 0, where it reads the target, and those after it, where it reads its own output."""
    head = make("eagle", layers=layers)
    batch = batch_for(target, head, answers()[1:2])
    by_row: dict[int, list[Tensor]] = {}
    for guesses in head.guesses(batch):
        for i, draft in enumerate(guesses.drafts.tolist()):
            by_row.setdefault(int(batch.starts[0, draft]) - 1, []).append(guesses.logits[i])
    length, prompt = LENGTHS[1]
    assert sorted(by_row) == list(range(prompt - 1, length - 2))
    for row, found in by_row.items():
        wanted = drafted(head, batch, row)
        assert len(found) == min(3, length - 2 - row)
        torch.testing.assert_close(torch.stack(found), torch.stack(wanted[: len(found)]), atol=1e-4, rtol=1e-4)


def test_unrolled_attention_of_step_0_is_causal_attention() -> None:
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, 7, 4, generator=draw) for _ in range(3))
    mask = torch.ones(7, 7, dtype=torch.bool).tril()
    wanted = attend(q, k, v, mask)
    torch.testing.assert_close(attend_unrolled(q, torch.arange(7).expand(2, 7), [(k, v)]), wanted)
    rows = torch.tensor([[0, 4, 6], [1, 1, 5]])
    some = torch.stack([each[:, at] for each, at in zip(q, rows, strict=True)])
    found = attend_unrolled(some, rows, [(k, v)])
    torch.testing.assert_close(found, torch.stack([each[:, at] for each, at in zip(wanted, rows, strict=True)]))


@pytest.mark.parametrize("causal", [False, True])
def test_a_block_is_what_it_would_be_alone(make: Any, target: Target, causal: bool) -> None:
    head = make("block", causal=causal, layers=2)
    assert isinstance(head, BlockHead)
    some = answers()
    batch = batch_for(target, head, some, 4)
    together = head(batch)
    for answer, draft in ((0, 0), (1, 3), (2, 0)):
        start = int(batch.starts[answer, draft])
        assert LENGTHS[answer][1] <= start < LENGTHS[answer][0]
        cut = dataclasses.replace(
            batch,
            tokens=batch.tokens[answer : answer + 1, : start + 1],
            hidden=batch.hidden[answer : answer + 1, : start + 1],
            starts=batch.starts[answer : answer + 1, draft : draft + 1],
        )
        torch.testing.assert_close(head(cut)[0, 0], together[answer, draft], atol=1e-5, rtol=1e-4)
        # And as drafters run it.
        hidden = list(batch.hidden[answer, :start].unflatten(1, (len(head.hidden_layers), -1)).unbind(1))
        tables = head.get_buffer("embedding"), head.lm_head.weight
        last = int(batch.tokens[answer, start])
        _, served = block(head.spec, head.state_dict(), *tables, hidden, last, head.spec.block_size)
        torch.testing.assert_close(together[answer, draft], served, atol=1e-5, rtol=1e-4)
    # What stands at row 1 reaches row 0 unless rows see only those before them.
    head.get_buffer("embedding")[head.spec.mask_token_id] += 1
    real = (batch.starts >= 0) & (batch.tokens.gather(1, batch.starts.clamp_min(0)) != head.spec.mask_token_id)
    assert torch.equal(head(batch)[real][:, 0], together[real][:, 0]) == causal


def test_the_bigram_bias_begins_with_what_follows_what(target: Target, options: Make) -> None:
    head = first("block", target, options(bigram_rank=40))
    assert isinstance(head, BlockHead)
    followers = {3: 20, 4: 21, 5: 22}  # beside tokens that stand anywhere
    draw = np.random.default_rng(5)
    pairs = np.concatenate([[each, followers[each]] for each in draw.integers(3, 6, 300)])
    noise = draw.integers(100, 110, 600)
    texts = [np.concatenate([[9], pairs, [noise[i]]]) for i in range(3)] + [np.concatenate([[9], noise])]
    written = [Answer(text, 1, "all") for text in texts]
    begin_bigram(head, written, seed=4)
    with torch.no_grad():
        bias = head.bigram_out(head.bigram_in(torch.arange(target.spec.vocab_size)))
    assert all(int(bias[before].argmax()) == head.places(torch.tensor(behind)) for before, behind in followers.items())
    # The logarithm of how much likelier: behind 3 always, elsewhere never.
    share = 3 * int((pairs == 3).sum()) / sum(len(text) - 1 for text in texts)
    assert float(bias[3].max()) == pytest.approx(-np.log(share), rel=0.02)
    again = first("block", target, options(bigram_rank=40))
    begin_bigram(again, written, seed=4)
    assert torch.equal(again.bigram_out.weight, head.bigram_out.weight)
    few = first("block", target, options(bigram_rank=40))
    before = few.bigram_in.weight.clone()
    begin_bigram(few, [Answer(np.array([1, 2]), 2, "all")], seed=4)  # which has no pair
    assert torch.equal(few.bigram_in.weight, before)


# --- loss and acceptance ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_falls_and_what_is_the_targets_stays(make: Any, target: Target, options: Make, kind: str) -> None:
    head = first(kind, target, options())
    batch = batch_for(target, head, answers())
    before = {name: each.clone() for name, each in head.state_dict().items()}
    optimiser = Optimiser(head, clip=1.0)
    losses = []
    for _ in range(60):
        loss = batch_loss(head, batch, 0.1)
        loss.backward()
        optimiser.step(5e-3)
        losses.append(loss.item())
    assert losses[-1] < 0.75 * losses[0]
    changed = {name for name, each in head.state_dict().items() if not torch.equal(each, before[name])}
    assert set(before) - changed == ({"lm_head.weight"} if kind != "medusa" else set())


def guesses_of(right: list[bool], drafts: list[int], num_drafts: int) -> Guesses:
    logits = torch.tensor([[5.0, 0.0] if each else [0.0, 5.0] for each in right]).reshape(-1, 2)
    count = len(right)
    return Guesses(
        logits, torch.full((count, 2), 0.5), torch.zeros(count, dtype=torch.int64), torch.tensor(drafts), num_drafts
    )


def test_acceptance_counts_drafts_up_to_their_first_wrong_token() -> None:
    class Scripted(TrainedHead):
        def shown(self, batch: Batch) -> Iterator[Any]:
            raise AssertionError("guesses are scripted")

        def guesses(self, batch: Any) -> Iterator[Guesses]:
            yield guesses_of([True, True, False, True], [0, 1, 2, 3], 4)
            yield guesses_of([True, False, True], [0, 1, 2], 4)  # draft 3 ends with its answer

    head = Scripted(np.arange(2), torch.zeros(2, 4))
    batch = SimpleNamespace(categories=["a", "b"], tokens=torch.zeros(1))
    found = measure(head, [batch, batch])  # type: ignore[list-item]
    assert found["all"].by_depth == [0.75, 0.3333]
    assert found["a"].by_depth == [1.0, 0.5]
    assert found["b"].by_depth == [0.5, 0.0]
    assert found["all"].judged == [8, 6]
    assert found["a"].accepted == 1.5


def test_the_loss_is_what_is_rejected_and_cross_entropy() -> None:
    target = torch.tensor([[0.5, 0.2], [0.1, 0.9]])  # a third token has 0.3 of the first
    guesses = Guesses(torch.zeros(2, 2), target, torch.zeros(2, dtype=torch.int64), torch.arange(2), 2)
    loss, accepted = loss_of(guesses, 0.0)
    torch.testing.assert_close(accepted, torch.tensor([0.7, 0.6]))
    assert loss.item() == pytest.approx(0.35)
    assert loss_of(guesses, 1.0)[0].item() == pytest.approx(0.85 * np.log(2), rel=1e-5)
    assert loss_of(guesses_of([], [], 4), 0.1)[0].item() == 0.0


def test_orthogonal_updates_and_the_learning_rate(make: Any) -> None:
    for shape in ((8, 20), (20, 8), (3, 20, 8)):
        sizes = torch.linalg.svdvals(orthogonal(torch.randn(shape, generator=generator())))
        assert sizes.min() > 0.4
        assert sizes.max() < 1.4
    head = make("block")
    assert isinstance(head, BlockHead)
    before = head.anchor_inputs.weight.detach().clone()
    for each in head.parameters():
        each.grad = torch.randn(each.shape, generator=generator())
    Optimiser(head, 1.0).step(0.5)
    updates = head.anchor_inputs.weight.detach() - before
    for update in updates.chunk(head.spec.block_size):  # a product of each row's own
        sizes = torch.linalg.svdvals(update) / (0.5 * 0.2 * max(update.shape) ** 0.5)
        assert sizes.min() > 0.4
        assert sizes.max() < 1.4
    for decay in ("cosine", "linear"):
        rates = [learning_rate(step, 50, 2.0, 0.1, decay) for step in range(50)]
        assert max(rates) == rates[4] == 2.0
        assert rates[4:] == sorted(rates[4:], reverse=True)
        assert 0 < rates[-1] < 0.1


def test_layers_that_the_target_does_not_have(make: Any) -> None:
    with pytest.raises(ConfigError, match="--hidden-layers has \\[7\\]; the target has 0 to 2"):
        make("eagle", hidden_layers=(0, 7))
    with pytest.raises(ConfigError, match="Leave it out"):
        make("medusa", hidden_layers=(0,))


def test_layers_of_a_head_can_be_written_whatever_its_target_is() -> None:
    """Layers that rotate neighbours in a part of each head, or nothing, have no place in the format of heads."""
    target = llama_spec(
        vocab_size=40, hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=96, max_len=32,
        rope=Rope(500.0, interleaved=True, fraction=0.5), norm=RmsNorm(1e-6, offset=1.0), window=9, qkv_bias=True,
    )  # fmt: skip
    target = dataclasses.replace(target, layers=(dataclasses.replace(target.layers[0], position=None), *target.layers))
    found = layers_spec(target, 2, 30, qk_norm=True)
    assert [layer.position for layer in found.layers] == [Rope(500.0)] * 2
    assert write_layers(found, 40)["rope_theta"] == 500.0
