"""What drafters are promised: the hidden states of the layers they need, and KV for a model of their own that is right
whatever happens to a sequence."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from msgspec.structs import replace
from torch import Tensor

import specserve.drafters
from specserve.config import EngineConfig
from specserve.drafters.ngram import NgramDrafter
from specserve.engine.build import build
from specserve.engine.engine import Engine
from specserve.engine.request import Request
from specserve.errors import ConfigError, InputError
from specserve.models.decoder import Decoder
from specserve.models.loader import load_model
from specserve.registry import DRAFTERS
from specserve.runtime.executor import local
from specserve.speculation.base import Needs, StepReport
from specserve.speculation.host import DraftHost
from specserve.speculation.lookup import prepare
from specserve.speculation.models import DraftInput
from specserve.testing import (
    Feed,
    PagedDecoder,
    ScriptedDrafter,
    check_integrity,
    path_to,
    tiny_config,
    write_tiny_model,
)
from specserve.types import SamplingParams

VOCAB = tiny_config("llama")["vocab_size"]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
SEEDED = SamplingParams(temperature=1.0, seed=4, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("target"), "llama", seed=3)


@pytest.fixture(scope="module")
def tinier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the same vocabulary and another shape, whose heads and layers are fewer."""
    shape = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    return write_tiny_model(tmp_path_factory.mktemp("draft"), "llama", seed=8, **shape)


@pytest.fixture(autouse=True)
def drafters(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    folder = str(Path(__file__).parent / "drafters")
    monkeypatch.setattr(specserve.drafters, "__path__", [*specserve.drafters.__path__, folder])
    yield
    sys.modules.pop("specserve.drafters.tiny_model", None)
    vars(specserve.drafters).pop("tiny_model", None)


@pytest.fixture(params=["recorded", "eager"])
def kernels(request: pytest.FixtureRequest) -> str:
    """The kernels that record their steps, and those that run them op by op."""
    if request.param == "eager":
        request.getfixturevalue("without_native")
    return str(request.param)


def make(model: Path, **options: Any) -> Engine:
    defaults = {"dtype": "float32", "max_model_len": 160, "max_step_ms": 1e9, "drafter": "none", "adaptive": False}
    return build(EngineConfig(model=str(model), **{**defaults, **options})).engine


def with_blocks(model: Path, blocks: int, **options: Any) -> Engine:
    storage = local(make(model, **options).executor).storage
    per_block = sum(layer.nbytes for layer in storage.layers) // storage.num_blocks
    return make(model, kv_cache_gib=(blocks + 0.5) * per_block / 2**30, **options)


def prompt(i: int, length: int = 0) -> list[int]:
    return [(7 * i + 3 * j * j + j) % 280 for j in range(length or 5 + 13 * i % 60)]


def drive(engine: Engine, requests: list[Request]) -> dict[tuple[str, int], list[int]]:
    tokens: dict[tuple[str, int], list[int]] = {}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for event in engine.step():
            assert event.error is None
            tokens.setdefault((event.request_id, event.index), []).extend(event.tokens)
        check_integrity(engine.cache, engine.scheduler.running)
    assert engine.policy.num_dropped == 0
    assert engine.cache.num_free == engine.cache.num_blocks
    return tokens


def mixed(count: int) -> list[Request]:
    return [Request(id=f"r{i}", prompt_ids=prompt(i), params=SEEDED if i % 3 == 1 else GREEDY) for i in range(count)]


def said_anew(model: Decoder, texts: list[tuple[int, ...]]) -> dict[tuple[int, ...], Tensor]:
    """What a model says behind each text and its beginnings, computed at once: float32 [vocab] each. A row has the same
    bits in any company, so that texts of which another is the beginning say it, too, many to a step."""
    known: dict[tuple[int, ...], Tensor] = {}
    longest: list[tuple[int, ...]] = []
    begun: set[tuple[int, ...]] = set()
    for text in sorted(set(texts), key=len, reverse=True):
        if text not in begun:
            longest.append(text)
            begun |= {text[:end] for end in range(1, len(text) + 1)}
    for start in range(0, len(longest), 8):
        some = longest[start : start + 8]
        logits = PagedDecoder(model, len(some), len(some[0])).step(*(Feed(i, text) for i, text in enumerate(some)))
        for text, rows in zip(some, logits, strict=True):
            known |= {text[: end + 1]: row for end, row in enumerate(rows)}
    return known


# --- layer taps -------------------------------------------------------------------------------------------------------


class TapDrafter(ScriptedDrafter):
    """Notes two layers' outputs of every token of every sequence. What is computed again must be the same bits."""

    needs = Needs(hidden_layers=(0, 2))

    def __init__(self, scripts: Any, **options: Any) -> None:
        super().__init__(scripts, VOCAB, **options)
        self.states: dict[tuple[int, ...], dict[int, tuple[Tensor, ...]]] = {}  # by prompt: by position
        self.starts: list[int] = []
        self.num_again = self.num_preempted = 0

    def observe(self, step: StepReport) -> None:
        super().observe(step)
        self.num_preempted += len(step.preempted)
        for each in step.seqs:
            known = self.states.setdefault(tuple(each.seq.tokens[: each.seq.num_prompt]), {})
            self.starts.append(each.start)
            for position, row in enumerate(each.kept_rows, each.start):
                state = tuple(step.hidden[layer][row].clone() for layer in self.needs.hidden_layers)
                if position in known:
                    self.num_again += 1
                    assert all(map(torch.equal, known[position], state))
                known[position] = state


def tapped(engine: Engine, requests: list[Request], scripts: Any = None, **options: Any) -> TapDrafter:
    drafter = TapDrafter(scripts or {}, **options)
    engine.use(DraftHost(drafter, VOCAB, 30.0), 5)
    drive(engine, requests)
    return drafter


def assert_states(drafter: TapDrafter, outputs: dict[tuple[str, int], list[int]], whole: TapDrafter) -> None:
    """All that was shown is what was shown of each sequence alone, at once and without drafts."""
    for request in mixed(6):
        known, wanted = drafter.states[tuple(request.prompt_ids)], whole.states[tuple(request.prompt_ids)]
        length = len(request.prompt_ids) + len(outputs[request.id, 0]) - 1  # the last token is never computed
        assert sorted(known) == sorted(wanted) == list(range(length))
        assert all(torch.equal(a, b) for i in known for a, b in zip(known[i], wanted[i], strict=True))


def test_every_row_of_every_layer_that_a_drafter_needs(tiny: Path, kernels: str) -> None:
    alone = make(tiny, prefix_caching=False)
    outputs: dict[tuple[str, int], list[int]] = {}
    whole = TapDrafter({})
    alone.use(DraftHost(whole, VOCAB, 30.0), 5)
    for request in mixed(6):
        outputs |= drive(alone, [request])
    _assert_transformers_agrees(tiny, whole, outputs)

    scripts = {tuple(request.prompt_ids): outputs[request.id, 0] for request in mixed(6)}
    for decoys in (0, 1) if kernels == "recorded" else (1,):  # chains and trees
        told = tapped(make(tiny), mixed(6), scripts, accuracy=0.7, decoys=decoys)
        assert told.num_accepted > 10
        assert_states(told, outputs, whole)
    if kernels == "recorded":
        told = tapped(make(tiny, max_num_batched_tokens=16), mixed(6), scripts)
        assert len(told.starts) > 80, "prompts come in chunks"
        assert_states(told, outputs, whole)
    told = tapped(with_blocks(tiny, 14, max_num_batched_tokens=24), mixed(6), scripts, accuracy=0.6)
    assert told.num_preempted > 0
    assert told.num_again > 0
    assert_states(told, outputs, whole)


def test_after_a_prefix_hit_the_rows_that_are_computed_are_shown(tiny: Path, kernels: str) -> None:
    engine, request = make(tiny), Request(id="a", prompt_ids=prompt(3, 50), params=GREEDY)
    first = tapped(engine, [request])
    second = tapped(engine, [replace(request, id="b")])
    assert (first.starts[0], second.starts[0]) == (0, 48)
    (known,), (wanted,) = second.states.values(), first.states.values()
    assert sorted(known) == sorted(wanted)[48:]
    assert all(torch.equal(a, b) for i in known for a, b in zip(known[i], wanted[i], strict=True))


def test_nothing_is_tapped_for_those_that_need_nothing(tiny: Path) -> None:
    engine = make(tiny)
    tapped(engine, mixed(1))
    assert local(engine.executor).runner.taps == (0, 2)
    engine.use(DraftHost(ScriptedDrafter({}, VOCAB), VOCAB, 30.0), 5)
    assert local(engine.executor).runner.taps == ()
    drive(engine, mixed(2))


def test_a_layer_that_the_model_has_not_is_refused_at_the_start(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NgramDrafter, "needs", Needs(hidden_layers=(0, 3)))
    with pytest.raises(ConfigError, match=r"reads layers \[3\]; the model has 0 to 2"):
        make(tiny, drafter="ngram")


def _assert_transformers_agrees(tiny: Path, drafter: TapDrafter, outputs: dict[tuple[str, int], list[int]]) -> None:
    reference = transformers.AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    for request in mixed(6):
        tokens = [*request.prompt_ids, *outputs[request.id, 0]][:-1]
        with torch.inference_mode():
            wanted = reference.model(torch.tensor([tokens]), output_hidden_states=True)
        states = drafter.states[tuple(request.prompt_ids)]
        first, last = (torch.stack([states[i][at] for i in range(len(tokens))]) for at in (0, 1))
        assert torch.allclose(first, wanted.hidden_states[1][0], atol=1e-4)
        with torch.inference_mode():
            assert torch.allclose(reference.model.norm(last), wanted.last_hidden_state[0], atol=1e-4)


# --- best tokens ------------------------------------------------------------------------------------------------------


class TopDrafter(ScriptedDrafter):
    """Notes the best tokens behind every text that was judged, drafts that were rejected too."""

    needs = Needs(top_k=4)

    def __init__(self, scripts: Any, **options: Any) -> None:
        super().__init__(scripts, VOCAB, **options)
        self.said: dict[tuple[int, ...], list[int]] = {}
        self.num_rejected = self.num_unsampled = 0

    def observe(self, step: StepReport) -> None:
        super().observe(step)
        assert step.top is not None
        assert step.top.dtype == np.int32
        self.num_unsampled += sum(each.verdict is None for each in step.seqs)
        for each in step.seqs:
            own = each.seq.tokens[: each.start + each.num_new]
            for node in range(-1, len(each.draft) if each.verdict is not None else -1):
                text = (*own, *each.draft.tokens[path_to(each.draft, node)].tolist())
                best = step.top[each.logits_start + 1 + node].tolist()
                assert self.said.setdefault(text, best) == best
                self.num_rejected += node >= 0 and node not in each.verdict.path


@pytest.mark.parametrize(("kernels", "decoys"), [("recorded", 0), ("recorded", 2), ("eager", 2)], indirect=["kernels"])
def test_the_best_tokens_behind_every_node(tiny: Path, kernels: str, decoys: int) -> None:
    plain = make(tiny)
    outputs = drive(plain, mixed(6))
    scripts = {tuple(request.prompt_ids): outputs[request.id, 0] for request in mixed(6)}
    for make_engine in (make, lambda model: with_blocks(model, 14, max_num_batched_tokens=24)):
        engine, drafter = make_engine(tiny), TopDrafter(scripts, accuracy=0.7, decoys=decoys)
        engine.use(DraftHost(drafter, VOCAB, 30.0), 5)
        scored = Request(id="scored", prompt_ids=prompt(9, 20), params=dataclasses.replace(GREEDY, prompt_logprobs=1))
        found = drive(engine, [*mixed(6), scored])
        assert {key: tokens for key, tokens in found.items() if key[0] != "scored"} == outputs
        assert drafter.num_rejected > 50
        anew = said_anew(local(engine.executor).runner.model, list(drafter.said))
        for text, best in drafter.said.items():
            assert best == np.argsort(-anew[text].numpy(), kind="stable")[:4].tolist()
    assert drafter.num_unsampled > 0
    assert engine.counters.num_preemptions > 0


def test_best_tokens_are_found_only_for_those_that_need_them(tiny: Path) -> None:
    engine = make(tiny)

    def num_ops() -> int:
        (recording,) = local(engine.executor).runner._captured._recordings.values()
        return int(recording.recording.num_ops)  # type: ignore[attr-defined]

    before = num_ops()
    engine.use(DraftHost(TopDrafter({}), VOCAB, 30.0), 5)
    assert num_ops() == before + 1
    engine.use(DraftHost(ScriptedDrafter({}, VOCAB), VOCAB, 30.0), 5)
    assert num_ops() == before
    drive(engine, mixed(2))


def test_a_request_may_name_who_needs_them_where_the_step_shows_them(tiny: Path) -> None:
    named = Request(id="a", prompt_ids=prompt(3, 30), params=GREEDY, drafter="recycle")
    with pytest.raises(InputError, match="'recycle' reads the target's best tokens: it must be the engine's --drafter"):
        make(tiny).add(named)
    wanted = drive(make(tiny), [replace(named, drafter=None)])
    engine = make(tiny, drafter="recycle", drafter_options={"top_k": 4})
    assert drive(engine, [named]) == wanted, "the engine's own"
    engine = make(tiny)
    wide = TopDrafter({})
    wide.needs = Needs(top_k=9)
    engine.use(DraftHost(wide, VOCAB, 30.0), 5)
    drive(engine, [named])
    engine.add(named)
    stats = engine.requests["a"][0].stats
    assert drive(engine, []) == wanted
    assert stats.drafter == "recycle"
    assert stats.num_accepted_tokens > 3


def test_more_best_tokens_than_there_are_is_refused_at_the_start(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NgramDrafter, "needs", Needs(top_k=17))
    with pytest.raises(ConfigError, match="needs the 17 best tokens of a row; there are 16 at most"):
        make(tiny, drafter="ngram")


# --- a model of its own -----------------------------------------------------------------------------------------------


def drafting(model: Path, draft_model: Path, **options: Any) -> tuple[Engine, Any]:
    own = {"model": str(draft_model), **options.pop("drafter_options", {})}
    blocks = options.pop("blocks", None)
    build_one = (lambda **more: with_blocks(model, blocks, **more)) if blocks else (lambda **more: make(model, **more))
    engine = build_one(drafter="tiny_model", drafter_options=own, num_speculative_tokens=4, **options)
    return engine, engine.policy.own._drafter


def assert_right(drafter: Any, least: int = 20) -> None:
    """Its model has said of every text what it says of that text alone, computed at once: the same bits."""
    assert len(drafter.said) >= least
    model: Decoder = drafter.model
    anew = said_anew(model, [tuple(text) for text, _ in drafter.said])
    for text, logits in drafter.said:
        assert torch.equal(anew[tuple(text)], logits), f"behind {len(text)} tokens"
    assert not drafter.live


@pytest.fixture(scope="module")
def expected(tiny: Path) -> dict[tuple[str, int], list[int]]:
    return drive(make(tiny), mixed(6))


@pytest.mark.parametrize(
    ("kernels", "eager", "tree"),
    [*itertools.product(["recorded"], [False, True], [False, True]), ("eager", False, True)],
    indirect=["kernels"],
)
def test_a_model_of_its_own(tiny: Path, tinier: Path, expected: Any, kernels: str, tree: bool, eager: bool) -> None:
    engine, drafter = drafting(tiny, tinier, drafter_options={"tree": tree, "eager": eager})
    if kernels == "recorded":
        assert drive(engine, mixed(6)) == expected
    else:
        drive(engine, mixed(6))
    assert_right(drafter, 60)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"tokens": [VOCAB]}, "reads tokens from 0 to 292"),
        ({"tokens": [-1]}, "reads tokens from 0 to 292"),
        ({"tokens": [1] * 200}, "200 tokens from"),
        ({"start": -1}, "1 tokens from -1 on"),
        ({"start": 2**31}, "1 tokens from 2147483648 on"),
        ({"num_logits": 2}, "1 tokens from"),
        ({"num_logits": -1}, "1 tokens from"),
        ({"parents": [0]}, "follows an earlier one"),
        ({"parents": [-2]}, "follows an earlier one"),
        ({"parents": []}, "follows an earlier one"),
        ({"parents": [-1, 0]}, "follows an earlier one"),
    ],
)
def test_what_native_code_would_follow_out_of_bounds_is_refused(
    tiny: Path, tinier: Path, expected: Any, wrong: dict[str, Any], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine, drafter = drafting(tiny, tinier)

    def propose(requests: list[Any]) -> Any:
        for seq, _ in requests:
            drafter.runner.run([DraftInput(seq, seq.num_draft_cached, [1], is_scratch=True)._replace(**wrong)])

    drafter.propose = propose
    engine.add(mixed(1)[0])
    tokens = [token for _ in range(24) for event in engine.step() for token in event.tokens]
    assert not engine.has_work
    assert tokens == expected["r0", 0]
    assert set(engine.policy.own.dropped) == {"exception"}
    assert message in caplog.text


def test_more_rows_than_a_pass_has_are_refused(tiny: Path, tinier: Path) -> None:
    engine, drafter = drafting(tiny, tinier, max_num_batched_tokens=16)
    seen: list[Exception] = []

    def propose(requests: list[Any]) -> Any:
        (seq, _), *_ = requests
        drafter.runner.catch_up([seq])
        try:
            drafter.runner.run([DraftInput(seq, seq.num_cached, [1], is_scratch=True)] * 17)
        except ValueError as error:
            seen.append(error)
        return []

    drafter.propose = propose
    engine.add(mixed(1)[0])
    while engine.has_work:
        engine.step()
    assert {str(error) for error in seen} == {"A drafter's model reads at most 16 tokens at once."}


def test_a_target_that_drafts_for_itself_is_always_right(tiny: Path, expected: Any) -> None:
    """The same model as draft model: greedy drafts are accepted whole, in chains and in trees."""
    for tree in (False, True):
        engine, drafter = drafting(tiny, tiny, drafter_options={"tree": tree})
        greedy = [request for request in mixed(6) if request.params is GREEDY]
        for request in greedy:
            engine.add(request)
        stats = [engine.requests[request.id][0].stats for request in greedy]
        outputs = drive(engine, [])
        assert all(outputs[key] == expected[key] for key in outputs)
        assert tree or all(s.num_accepted_tokens == s.num_draft_tokens for s in stats)
        assert all(s.num_steps == 1 + (8 if tree else 5) for s in stats), "one token, then 23 by threes, or by fives"
        assert (drafter.num_kept_beside > 0) == tree, "paths of trees are moved"
        assert_right(drafter)


@pytest.mark.parametrize("tree", [False, True])
def test_its_kv_survives_preemption_and_chunks(tiny: Path, expected: Any, tree: bool) -> None:
    options = {"tree": tree, "eager": tree}
    engine, drafter = drafting(tiny, tiny, blocks=14, max_num_batched_tokens=24, drafter_options=options)
    assert drive(engine, mixed(6)) == expected
    assert engine.counters.num_preemptions > 0
    assert_right(drafter)


@pytest.mark.parametrize("eager", [False, True])
def test_its_kv_survives_forks(tiny: Path, tinier: Path, eager: bool) -> None:
    request = Request(id="n", prompt_ids=prompt(3, 45), params=dataclasses.replace(SEEDED, n=3))
    wanted = drive(make(tiny), [request])
    engine, drafter = drafting(tiny, tinier, drafter_options={"eager": eager})
    assert drive(engine, [request]) == wanted
    assert engine.cache.stats.num_forked_blocks > 0
    assert [draft for _, draft in drafter.first_cached] == ([0, 44, 44] if eager else [0, 0, 0])
    assert_right(drafter)


def test_a_prefix_hit_has_as_much_of_it_as_was_computed(tiny: Path, tinier: Path) -> None:
    """Blocks that it has filled are right for whoever finds them; what others have left is computed when it drafts."""
    engine, drafter = drafting(tiny, tinier, drafter_options={"eager": True})
    request = Request(id="a", prompt_ids=prompt(3, 50), params=GREEDY)
    wanted = drive(engine, [request])["a", 0]
    assert drive(engine, [replace(request, id="b")])["b", 0] == wanted
    assert drafter.first_cached == [(0, 0), (48, 48)]
    other = Request(id="c", prompt_ids=prompt(4, 50), params=GREEDY, drafter="none")
    plain = drive(engine, [other])["c", 0]
    assert drive(engine, [replace(other, id="d", drafter=None)])["d", 0] == plain
    assert drafter.first_cached[2:] == [(48, 0)]
    assert drive(engine, [replace(other, id="e", drafter=None)])["e", 0] == plain
    assert drafter.first_cached[3:] == [(48, 48)], "filled since"
    engine.cache.reset_prefix_cache()
    assert drive(engine, [replace(request, id="f")])["f", 0] == wanted
    assert drafter.first_cached[4:] == [(0, 0)]
    assert_right(drafter)


def test_the_cache_is_sized_with_it(tiny: Path, tinier: Path) -> None:
    plain, (engine, _) = make(tiny, kv_cache_gib=0.01), drafting(tiny, tinier, kv_cache_gib=0.01)
    shapes = [tuple(layer.shape[2:]) for layer in local(engine.executor).storage.layers]
    assert len(shapes) == 3 + 1
    assert len(set(shapes)) == 2
    assert engine.cache.num_blocks < plain.cache.num_blocks
    assert sum(layer.nbytes for layer in local(engine.executor).storage.layers) <= 0.01 * 2**30


def test_whoever_needs_a_model_must_be_there_from_the_start(tiny: Path, tinier: Path) -> None:
    engine = make(tiny)
    with pytest.raises(InputError, match="needs model, which no request can give"):
        engine.add(Request(id="a", prompt_ids=[1, 2], params=GREEDY, drafter="tiny_model"))
    maker = prepare("tiny_model", {"model": str(tinier)})
    assert maker is not None
    with pytest.raises(ConfigError, match="must be planned at the start"):
        maker(engine.policy.context)


def test_a_second_model_with_kv_is_refused(tiny: Path, tinier: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the start, and where it would take the place of another that had layers enough for both."""
    engine = drafting(tiny, tinier)[0]
    context = engine.policy.context.reopened()
    context._unused *= 2
    model = load_model(tinier, context.ops)
    context.runner(model)
    with pytest.raises(ConfigError, match="must be planned at the start"):
        context.runner(model)
    drafter = DRAFTERS.find("tiny_model")
    made = drafter.__init__

    @functools.wraps(made)
    def twice(self: Any, context: Any, *args: Any, **options: Any) -> None:
        made(self, context, *args, **options)
        context.runner(self.model)

    monkeypatch.setattr(drafter, "__init__", twice)
    with pytest.raises(ConfigError, match="Two models with KV"):
        drafting(tiny, tinier)
