"""A model whose layers are in several processes, in the whole engine: its answers are those of one process bit for bit,
whatever drafts; a process that ends is told, leaves nothing, and keeps nobody waiting."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from specserve import LLM, Structured
from specserve.checkpoint.weights import Weights
from specserve.config import EngineConfig
from specserve.engine.build import build
from specserve.engine.request import Request
from specserve.errors import ConfigError, EngineError, ModelError
from specserve.machine.pulse import Pulse, shared_memory
from specserve.parallel.link import Link
from specserve.parallel.overlap import Overlap
from specserve.runtime.executor import Executor
from specserve.runtime.pack import SequenceRows, pack
from specserve.testing import check_integrity, check_under_way, write_adapter, write_tiny_model
from tests.models.test_architectures import write as write_architecture
from tests.parallel.test_tensor_parallel import (
    GREEDY,
    PARAMS,
    PROMPTS,
    Tokens,
    answers,
    answers_with_adapters,
    check_drafter,
    check_end,
    check_nothing_is_left,
    heads,
    make,
)

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("specserve.kernels._native") is None, reason="Built without native kernels."
)
EVERY = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head", "embed_tokens")
SCORED = [dataclasses.replace(each, logprobs=3) for each in PARAMS]


CHOOSE = Overlap.choose


@pytest.fixture(autouse=True)
def overlapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many steps are under way as may be, whatever they take."""

    def choose(self: Overlap, num_seqs: int, context: int, chunk_s: float) -> int:
        self.num = self.most
        return self.num

    monkeypatch.setattr(Overlap, "choose", choose)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), "llama", seed=3)  # of three layers


@pytest.fixture(scope="module")
def expected(tiny: Path) -> Tokens:
    """Of one process, without drafts."""
    with make(tiny, 1) as llm:
        return answers(llm)


@pytest.fixture(scope="module")
def trained(tiny: Path, expected: Tokens, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return heads(tiny, tmp_path_factory.mktemp("heads"), expected)


def scored(llm: LLM, **options: Any) -> list[Any]:
    """Tokens with the numbers behind them, which hide no bit."""
    found = [each.outputs[0] for each in llm.generate(PROMPTS, SCORED, **options)]
    return [(each.token_ids, repr(each.logprobs)) for each in found]


@pytest.mark.parametrize(
    "how", ["float32", *(pytest.param(how, marks=pytest.mark.thorough) for how in ("bfloat16", "int4")), "int8"]
)
def test_stages_have_the_bits_of_one_process(tiny: Path, how: str) -> None:
    is_float = how in ("float32", "bfloat16")
    options = {"dtype": how} if is_float else {"dtype": "auto", "quantization": how}
    found = []
    for stages in (1, 2):
        with make(tiny, 1, pipeline_parallel_size=stages, **options) as llm:
            found.append(scored(llm))
            assert scored(llm, drafter="ngram") == found[-1]
    assert found[0] == found[1]


@pytest.mark.parametrize("stages", [pytest.param(2, marks=pytest.mark.thorough), 3])
def test_drafters_that_look_up_change_no_bit(tiny: Path, expected: Tokens, stages: int) -> None:
    choice = dataclasses.replace(GREEDY, ignore_eos=False, structured=Structured.choice(["then", "other", "stone"]))
    with make(tiny, 1) as llm:
        chosen = llm.generate(PROMPTS[0], choice)[0].outputs[0].token_ids
    with make(
        tiny, 1, pipeline_parallel_size=stages, drafter="recycle", adaptive=False, max_num_batched_tokens=16
    ) as llm:
        for drafter in ("recycle", "ngram", "suffix"):
            assert answers(llm, drafter=drafter) == expected
        for prompt, params, tokens in zip(PROMPTS, PARAMS, expected, strict=True):
            (answer,) = llm.generate(prompt, params, prediction=[*tokens[:9], 1, 2, *tokens[11:]])[0].outputs
            assert answer.token_ids == tokens
            assert answer.stats.accepted_prediction_tokens > 0
        outputs = llm.generate(PROMPTS[0], choice, drafter="grammar")[0].outputs[0]
        assert outputs.token_ids == chosen
        assert outputs.stats.num_accepted_tokens > 0


@pytest.mark.each_choice
@pytest.mark.parametrize("size", [1, 2], ids=["2 stages", "2 stages of 2"])
@pytest.mark.parametrize("drafter", ["eagle", "eagle-1", "block", "medusa", "draft_model"])
def test_drafters_that_run_models_change_no_bit(
    tiny: Path, expected: Tokens, trained: dict[str, Path], drafter: str, size: int
) -> None:
    options = {"drafter": drafter, "adaptive": False}
    options |= {"kv_cache_gib": 16 * 2**14 / 2**30} if drafter == "medusa" else {}
    check_drafter(tiny, expected, trained, options, size, pipeline_parallel_size=2)


def test_experts_grammars_and_beams(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "moe", "qwen2_moe", seed=2, num_key_value_heads=2)
    schema = Structured.json({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
    constrained = dataclasses.replace(GREEDY, ignore_eos=False, max_tokens=40, structured=schema)
    found = []
    for size, stages in ((1, 1), (1, 3), (2, 2)):
        with make(folder, size, pipeline_parallel_size=stages, drafter="ngram") as llm:
            found.append(
                (
                    answers(llm),
                    [each.outputs[0].token_ids for each in llm.generate(PROMPTS[:2], constrained)],
                    [each.token_ids for each in llm.beam_search(PROMPTS[1], GREEDY, beam_width=3)[0].outputs],
                )
            )
    assert found[0] == found[1] == found[2]


def test_a_model_that_cannot_be_divided_within_layers(tmp_path: Path) -> None:
    folder = write_architecture(tmp_path / "m", "olmo2")
    found = []
    for stages in (1, 2):
        with make(folder, 1, pipeline_parallel_size=stages) as llm:
            found.append(scored(llm))
    assert found[0] == found[1]


def test_adapters(tiny: Path, tmp_path: Path) -> None:
    shapes = {name: info.shape for name, info in Weights(tiny).infos.items()}
    paths = {name: write_adapter(tmp_path / name, shapes, 3 + i, EVERY, seed=i) for i, name in enumerate("ab")}
    too_high = write_adapter(tmp_path / "c", shapes, 80, EVERY)
    found = [
        answers_with_adapters(
            make(tiny, size, pipeline_parallel_size=stages, max_loras=2, drafter="ngram"), paths, too_high
        )
        for size, stages in ((1, 1), (1, 2), (2, 2))
    ]
    assert found[0][0] == found[1][0] == found[2][0]
    assert found[0][1] == found[1][1], "each process has the layers that are its own"


def test_an_adapter_of_layers_elsewhere_that_take_none_is_refused(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "moe", "qwen2_moe", seed=2)
    shapes = {name: info.shape for name, info in Weights(folder).infos.items()}
    last = {name: shape for name, shape in shapes.items() if "layers.2." in name}
    with make(folder, 1, pipeline_parallel_size=2, max_loras=2) as llm:
        assert llm.engine.executor._ranks.layout.stages[-1][-1] == 2  # type: ignore[attr-defined]
        with pytest.raises(ModelError, match="takes no adapters in this model"):
            llm.load_adapter("a", write_adapter(tmp_path / "a", last, 4, ("down_proj",)))
        llm.load_adapter("b", write_adapter(tmp_path / "b", last, 4, ("q_proj",)))
        assert len(answers(llm, adapter="b")) == len(PROMPTS)


def test_what_an_executor_shows_has_the_bits_of_one_process(tiny: Path) -> None:
    """Layers of all stages, which change between steps, and slots that are copied in all."""

    def shown(executor: Executor) -> list[torch.Tensor]:
        found = []
        for taps, top_k in (((), 0), ((0, 2), 3), ((1,), 0), ((0, 1, 2), 5)):
            executor.set_outputs(taps, top_k)
            executor.start(pack([SequenceRows([5, 6, 7, 8], 0, [1], num_logits=2)], executor.row_multiple))
            executor.finish(lambda best: None)
            executor.copy_slots([16, 17, 18, 19], [32, 33, 34, 35])
            executor.start(pack([SequenceRows([9, 3], 4, [2], num_logits=2)], executor.row_multiple))
            output = executor.finish(lambda best: None)
            assert output.hidden is not None and [*output.taps] == [*taps]
            assert (output.top is None) == (top_k == 0)
            found += [output.hidden.clone(), *(tap.clone() for tap in output.taps.values())]
            found += [] if output.top is None else [torch.from_numpy(output.top.copy())]
        return found

    found = []
    for stages in (1, 2, 3):
        with make(tiny, 1, pipeline_parallel_size=stages) as llm:
            found.append(shown(llm.engine.executor))
    for others in found[1:]:
        assert len(found[0]) == len(others) == 4 + 6 + 2
        assert all(map(torch.equal, found[0], others))


def test_steps_under_way_have_the_bits_of_one_at_a_time(tiny: Path) -> None:
    """Of other sequences, of what follows in one of them, and of slots that were copied in between."""
    rows = [
        SequenceRows([5, 6, 7, 8], 0, [1], num_logits=2),
        SequenceRows([9, 3, 4], 0, [2], num_logits=3),
        SequenceRows([2, 4, 9], 4, [1], num_logits=1),  # after the first
        SequenceRows([1, 1], 7, [3], num_logits=2),  # after that, in a copy of it
        SequenceRows([8], 3, [2], num_logits=1),
    ]

    def run(executor: Executor, most: int) -> list[torch.Tensor]:
        executor.set_outputs((0, 2), 0)
        found, left = list[torch.Tensor](), len(rows)

        def finish() -> None:
            output = executor.finish(lambda best: None)
            assert output.hidden is not None
            found.extend([output.hidden.clone(), *(tap.clone() for tap in output.taps.values())])

        for i, each in enumerate(rows):
            if i - len(rows) + left == most:
                left -= 1
                finish()
            if i == 3:
                executor.copy_slots([*range(16, 23)], [*range(48, 55)])
            executor.start(pack([each], executor.row_multiple))
        for _ in range(left):
            finish()
        return found

    found = []
    for stages, most in ((1, 1), (2, 2), (3, 3)):
        with make(tiny, 1, pipeline_parallel_size=stages) as llm:
            assert llm.engine.executor.most_under_way == stages
            found.append(run(llm.engine.executor, most))
    assert len(found[0]) == 15
    for others in found[1:]:
        assert len(others) == 15 and all(map(torch.equal, found[0], others))


def test_requests_end_at_any_moment(tiny: Path, expected: Tokens) -> None:
    """Their blocks go to others while the steps that write them are under way."""
    draws = random.Random(5)
    with make(tiny, 1, pipeline_parallel_size=3, kv_cache_gib=22 * 2**14 / 2**30, max_num_batched_tokens=16) as llm:
        engine, found, num_begun = llm.engine, dict[str, list[int]](), 0
        while num_begun < 60 or engine.has_work:
            if num_begun < 60 and len(engine.requests) < 7 and draws.random() < 0.7:
                i = num_begun % len(PROMPTS)
                engine.add(Request(id=f"{num_begun}", prompt_ids=PROMPTS[i], params=PARAMS[i]))
                num_begun += 1
            if engine.requests and draws.random() < 0.15:
                engine.abort(draws.choice(sorted(engine.requests)))
            for event in engine.step() if engine.has_work else ():
                found.setdefault(event.request_id, []).extend(event.tokens)
            check_integrity(engine.cache, engine.scheduler.running)
            check_under_way(engine.scheduler)
        assert engine.cache.num_free == engine.cache.num_blocks
    whole = [expected[int(name) % len(PROMPTS)][: len(tokens)] for name, tokens in found.items()]
    assert [*found.values()] == whole and sum(len(tokens) == 20 for tokens in whole) > 5


def test_by_measure_one_stream_has_one_step_at_a_time(
    tiny: Path, expected: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Overlap, "choose", CHOOSE)
    with make(tiny, 1, pipeline_parallel_size=2) as llm:
        for _ in range(3):
            assert answers(llm) == expected
        stream = llm.stream([5, 6, 7], GREEDY)
        for _ in stream:
            assert not llm.engine.scheduler.under_way


@pytest.mark.parametrize("rank", [1, 2])
def test_a_process_that_ends_is_told(tiny: Path, rank: int) -> None:
    with make(tiny, 1, pipeline_parallel_size=3) as llm:
        check_end(llm, rank)


def test_a_process_that_ends_while_steps_are_under_way_is_told(tiny: Path) -> None:
    with make(tiny, 1, pipeline_parallel_size=3) as llm:
        for i, each in enumerate(PROMPTS):
            params = dataclasses.replace(GREEDY, max_tokens=100)
            llm.engine.add(Request(id=f"{i}", prompt_ids=each, params=params))
        for _ in range(8):
            llm.engine.step()
        assert len(llm.engine.scheduler.under_way) == 2
        check_end(llm, 2)


def test_one_of_a_stage_of_several_that_ends_is_told(tiny: Path) -> None:
    with make(tiny, 2, pipeline_parallel_size=2) as llm:
        check_end(llm, 3)


def test_after_a_step_that_was_cut_off_there_is_no_other(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a second Ctrl-C: what the other processes have sent is of that step."""

    def cut_off(self: Any) -> None:
        raise KeyboardInterrupt

    with make(tiny, 1, pipeline_parallel_size=2) as llm:
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(Link, "receive", cut_off)
            llm.generate(PROMPTS[0], GREEDY)
        with pytest.raises(EngineError, match="was interrupted halfway"):
            llm.generate(PROMPTS[0], GREEDY)


def test_nothing_is_left(tiny: Path, num_rounds: int) -> None:
    check_nothing_is_left(tiny, 1, max(2, num_rounds), pipeline_parallel_size=3)


def test_what_cannot_be_is_said_before_anything_is_loaded(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def begun(*given: Any, **named: Any) -> None:
        raise AssertionError("a process is started")

    monkeypatch.setattr(subprocess, "Popen", begun)
    with pytest.raises(ConfigError, match=r"is 4, and the model has 3 layers: it may be at most 3\."):
        make(tiny, 1, pipeline_parallel_size=4)
    with pytest.raises(ConfigError, match="it may be 1, 2, 4"):
        make(tiny, 3, pipeline_parallel_size=2)
    for size in (0, -1, 65):
        with pytest.raises(ConfigError, match="pipeline_parallel_size"):
            make(tiny, 1, pipeline_parallel_size=size)
    with pytest.raises(ConfigError, match="tensor_parallel_size times pipeline_parallel_size is 66"):
        make(tiny, 33, pipeline_parallel_size=2)
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError):
            make(tiny, 1, pipeline_parallel_size=2, device="cuda")


def test_kv_is_counted_and_read_in_all_processes(tiny: Path) -> None:
    """A block's bytes are those that one process has."""
    sizes, blocks = [], []
    for stages in (1, 2):
        built = build(
            EngineConfig(
                model=str(tiny), pipeline_parallel_size=stages, kv_cache_gib=0.01, max_model_len=160, drafter="none"
            )
        )
        sizes.append((built.num_kv_bytes, built.engine.executor.num_blocks))
        built.engine.add(Request(id="r", prompt_ids=list(range(40)), params=GREEDY))
        built.engine.step()
        blocks.append(built.engine.executor.read_blocks([1, 2]))
    assert sizes[0] == sizes[1]
    assert "2 processes" in built.summary
    assert blocks[0] == blocks[1] and any(blocks[0][1])
    built.engine.executor.write_blocks([2, 1], blocks[0])
    assert built.engine.executor.read_blocks([1, 2]) == blocks[0][::-1]


def test_whoever_watches_the_engine_sees_what_other_stages_do(tiny: Path) -> None:
    """The first process waits for them as long as it takes, and is not taken for one that hangs."""
    descriptor = shared_memory()
    pulse = Pulse(descriptor)
    built = build(
        EngineConfig(model=str(tiny), pipeline_parallel_size=2, max_model_len=160, drafter="none"), pulse=descriptor
    )
    os.close(descriptor)
    before = pulse.count
    built.engine.add(Request(id="r", prompt_ids=PROMPTS[0], params=GREEDY))
    while built.engine.has_work:
        built.engine.step()
    assert pulse.count > before
