"""A model in several processes, in the whole engine: its answers have the same bits alone, in any batch and with any
drafter; they are those of one process; and a process that ends is told, leaves nothing, and keeps nobody waiting."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from specserve import LLM, SamplingParams, Structured
from specserve.checkpoint.weights import Weights
from specserve.errors import ConfigError, EngineError, ModelError
from specserve.models.decoder import Decoder
from specserve.models.heads.formats import write_head
from specserve.models.heads.speculators import Verifier
from specserve.models.loader import load_model
from specserve.ops.choice import choose_ops
from specserve.testing import write_adapter, write_tiny_model
from specserve.testing.heads import trained_block, trained_eagle, trained_medusa

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("specserve.kernels._native") is None, reason="Built without native kernels."
)
ROOT = Path(__file__).resolve().parents[2]
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
SAMPLED = dataclasses.replace(GREEDY, temperature=0.8, seed=11)
PROMPTS = [[(5 + 7 * i + 3 * j * j) % 40 for j in range(6 + 9 * i)] for i in range(6)]
PARAMS = [(GREEDY, SAMPLED)[i % 2] for i in range(len(PROMPTS))]
Tokens = list[list[int]]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), "llama", seed=3)


def make(model: Path, size: int, **options: Any) -> LLM:
    defaults: dict[str, Any] = {"dtype": "float32", "max_model_len": 160, "threads": 1, "drafter": "none"}
    return LLM(str(model), tensor_parallel_size=size, **{**defaults, **options})


def answers(llm: LLM, **options: Any) -> Tokens:
    return [each.outputs[0].token_ids for each in llm.generate(PROMPTS, PARAMS, **options)]


@pytest.fixture(scope="module")
def expected(tiny: Path) -> Tokens:
    """Of two processes, one request after the other, without drafts."""
    with make(tiny, 2, prefix_caching=False) as llm:
        return [
            llm.generate(prompt, params)[0].outputs[0].token_ids for prompt, params in zip(PROMPTS, PARAMS, strict=True)
        ]


def test_two_processes_say_what_one_says(tiny: Path, expected: Tokens) -> None:
    with make(tiny, 1) as llm:
        assert answers(llm) == expected


def heads(tiny: Path, folder: Path, expected: Tokens) -> dict[str, Path]:
    target = load_model(tiny, choose_ops(torch.device("cpu"), "float32", "none", 1))
    assert isinstance(target, Decoder)
    texts = [prompt + tokens for prompt, tokens in zip(PROMPTS, expected, strict=True)]
    found = {}
    for name, (spec, weights, d2t) in {
        "eagle": trained_eagle(target, texts, 3, steps=30),
        "eagle-1": trained_eagle(target, texts, 1, steps=30),  # shares the target's LM head
        "block": trained_block(target, texts, 60, has_anchor_inputs=True),
        "medusa": trained_medusa(target, texts, 30),
    }.items():
        found[name] = folder / name
        found[name].mkdir()
        write_head(found[name], spec, weights, d2t, Verifier(str(tiny)))
    return found


@pytest.fixture(scope="module")
def trained(tiny: Path, expected: Tokens, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return heads(tiny, tmp_path_factory.mktemp("heads"), expected)


@pytest.mark.parametrize(
    "options",
    [
        {"drafter": "recycle", "adaptive": False, "max_num_batched_tokens": 16},
        pytest.param({"drafter": "suffix", "adaptive": False}, marks=pytest.mark.thorough),
        {"drafter": "eagle", "adaptive": False, "drafter_options": {"top_k": 2}},
        pytest.param({"drafter": "eagle-1", "adaptive": False}, marks=pytest.mark.thorough),
        {"drafter": "block", "adaptive": False},
        {"drafter": "medusa", "adaptive": False, "kv_cache_gib": 16 * 2**14 / 2**30},
        {"drafter": "draft_model", "adaptive": False},
    ],
    ids=lambda options: options["drafter"],
)
def test_drafters_change_no_bit(
    tiny: Path, expected: Tokens, trained: dict[str, Path], options: dict[str, Any]
) -> None:
    check_drafter(tiny, expected, trained, options, 2)


def check_drafter(
    tiny: Path, expected: Tokens, trained: dict[str, Path], options: dict[str, Any], size: int, **others: Any
) -> None:
    """The engine of these options says what is expected, and some of its drafts are accepted."""
    name = options["drafter"]
    given = {"model": str(tiny)} if name == "draft_model" else {}
    given |= {"head": str(trained[name])} if name in trained else {}
    own = {**options, "drafter": name.rstrip("-1"), "drafter_options": {**options.get("drafter_options", {}), **given}}
    with make(tiny, size, **own, **others) as llm:
        for _ in range(2):  # the second time from the prefix cache
            outputs = llm.generate(PROMPTS, PARAMS)
            assert [each.outputs[0].token_ids for each in outputs] == expected
        assert sum(each.outputs[0].stats.num_accepted_tokens for each in outputs) > 0


def test_a_prediction_changes_no_bit(tiny: Path, expected: Tokens) -> None:
    with make(tiny, 2, adaptive=False) as llm:
        for prompt, params, tokens in zip(PROMPTS, PARAMS, expected, strict=True):
            (answer,) = llm.generate(prompt, params, prediction=[*tokens[:9], 1, 2, *tokens[11:]])[0].outputs
            assert answer.token_ids == tokens
            assert answer.stats.accepted_prediction_tokens > 0


def test_the_real_model_says_the_same_but_for_ties(smollm2: Path) -> None:
    """In fp32 sums of two parts round otherwise than sums of one: where answers part, the two tokens are as likely."""
    texts = ["The capital of France is", "def fibonacci(n):", "1, 2, 3, 4,", "Once upon a time, in a small village,"]
    params = SamplingParams(temperature=0, max_tokens=48, logprobs=2, ignore_eos=True)
    found = []
    for size in (1, 2):
        with make(smollm2, size, drafter="ngram", max_model_len=256, quantization="none") as llm:
            found.append([each.outputs[0] for each in llm.generate(texts, params)])
    for one, two in zip(*found, strict=True):
        parted = next(
            (i for i, pair in enumerate(zip(one.token_ids, two.token_ids, strict=True)) if len(set(pair)) > 1), None
        )
        same = len(one.token_ids) if parted is None else parted
        assert same > 0
        for i in range(same):
            assert abs(one.logprobs[i].logprob - two.logprobs[i].logprob) < 1e-3
        if parted is not None:
            best, next_best = sorted(one.logprobs[parted].top.values(), reverse=True)[:2]
            assert best - next_best < 1e-3, f"answers part at token {parted}"


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantised_weights(tiny: Path, quantization: str) -> None:
    how = {"quantization": quantization, "dtype": "auto"}
    with make(tiny, 2, **how, prefix_caching=False) as llm:
        alone = [llm.generate(prompt, GREEDY)[0].outputs[0].token_ids for prompt in PROMPTS]
        together = [each.outputs[0].token_ids for each in llm.generate(PROMPTS, GREEDY, drafter="ngram")]
    assert alone == together


def test_four_processes_with_experts_grammars_and_beams(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "moe", "qwen2_moe", seed=2, num_key_value_heads=2)
    schema = Structured.json({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
    constrained = dataclasses.replace(GREEDY, ignore_eos=False, max_tokens=40, structured=schema)
    found = []
    for size in (1, 4):
        with make(folder, size, drafter="ngram") as llm:
            found.append(
                (
                    answers(llm),
                    [each.outputs[0].token_ids for each in llm.generate(PROMPTS[:2], constrained)],
                    [each.token_ids for each in llm.beam_search(PROMPTS[1], GREEDY, beam_width=3)[0].outputs],
                )
            )
    assert found[0] == found[1]


def test_adapters(tiny: Path, tmp_path: Path) -> None:
    shapes = {name: info.shape for name, info in Weights(tiny).infos.items()}
    every = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head", "embed_tokens")
    paths = {name: write_adapter(tmp_path / name, shapes, 3 + i, every, seed=i) for i, name in enumerate("ab")}
    too_high = write_adapter(tmp_path / "c", shapes, 80, every)
    found = [answers_with_adapters(make(tiny, size, max_loras=2, drafter="ngram"), paths, too_high) for size in (1, 2)]
    assert found[0][0] == found[1][0]
    assert found[0][1] <= found[1][1] < 2 * found[0][1], "each process has a part of it"


def answers_with_adapters(llm: LLM, paths: dict[str, Path], too_high: Path) -> tuple[Tokens, int]:
    """With adapters a and b beside each other, and with b in the place of a; how many bytes both take. Then the engine
    ends."""
    with llm:
        infos = [llm.load_adapter(name, path) for name, path in paths.items()]
        found = answers(llm, adapter=["a", None, "b", "a", "b", None])
        llm.unload_adapter("a")
        llm.load_adapter("a", paths["b"])
        found += answers(llm, adapter="a")
        with pytest.raises(ModelError, match="rank 80"):
            llm.load_adapter("c", too_high)
    return found, sum(info.num_bytes for info in infos)


def test_adapters_come_and_go_beside_steps(tiny: Path, tmp_path: Path) -> None:
    shapes = {name: info.shape for name, info in Weights(tiny).infos.items()}
    path = write_adapter(tmp_path / "a", shapes, 48, ("q_proj", "o_proj", "down_proj", "lm_head", "embed_tokens"))
    done = threading.Event()
    with make(tiny, 2, max_loras=1) as llm:
        expected = answers(llm)

        def load() -> None:
            while not done.is_set():
                llm.load_adapter("a", path)
                llm.unload_adapter("a")

        thread = threading.Thread(target=load)
        thread.start()
        try:
            for _ in range(20):
                assert answers(llm) == expected
        finally:
            done.set()
            thread.join()


@pytest.fixture
def divided(tiny: Path) -> Iterator[LLM]:
    with make(tiny, 2) as llm:
        yield llm


def processes(llm: LLM) -> list[int]:
    return [each.pid for each in llm.engine.executor._ranks._processes]  # type: ignore[attr-defined]


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_a_process_that_ends_is_told(divided: LLM) -> None:
    check_end(divided, 1)


def check_end(llm: LLM, rank: int) -> None:
    """That process is killed within a step, and every call says so, soon."""
    stream = llm.stream(PROMPTS[0], dataclasses.replace(GREEDY, max_tokens=100))
    next(stream)
    begun = time.monotonic()
    os.kill(processes(llm)[rank - 1], signal.SIGKILL)
    with pytest.raises(EngineError, match=f"Process {rank} of the model has ended: it was killed, or crashed"):
        for _ in stream:
            pass
    assert time.monotonic() - begun < 5
    with pytest.raises(EngineError):
        llm.generate(PROMPTS[0], GREEDY)


def test_nothing_is_left(tiny: Path, num_rounds: int) -> None:
    check_nothing_is_left(tiny, 2, max(2, num_rounds))


def check_nothing_is_left(model: Path, size: int, num_rounds: int, **options: Any) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for round_ in range(num_rounds):
        with make(model, size, **options) as llm:
            pids = processes(llm)
            llm.generate(PROMPTS[0], GREEDY)
            if round_ % 2 == 1:
                os.kill(pids[-1], signal.SIGKILL)
        del llm
        assert all(map(is_gone, pids))
    assert len(os.listdir("/proc/self/fd")) <= before + 2


def test_what_cannot_be_is_said_before_anything_is_loaded(tiny: Path) -> None:
    with pytest.raises(ConfigError, match="it may be 1, 2, 4"):
        make(tiny, 3)
    for size in (0, -1, 65):
        with pytest.raises(ConfigError, match="tensor_parallel_size"):
            make(tiny, size)
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError):
            make(tiny, 2, device="cuda")


def test_what_goes_wrong_in_another_process_is_its_own_error(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from specserve.parallel import ranks

    sent = ranks.Connection.send

    def misleading(self: Any, message: Any) -> None:
        if isinstance(message, ranks.Load):
            message.folder += "-gone"
        sent(self, message)

    monkeypatch.setattr(ranks.Connection, "send", misleading)
    with pytest.raises(ModelError, match="-gone"):
        make(tiny, 2)


def test_the_other_processes_decide_nothing() -> None:
    """They know models and steps, and nothing that plans, drafts, samples or schedules: what they compute follows from
    what they are sent alone."""
    names = ("rank", "stages", "layout")  # not link.py, which looks at the clock to tell the first process what it took
    sources = [(ROOT / f"specserve/parallel/{name}.py").read_text("utf-8") for name in names]
    nodes = [node for source in sources for node in ast.walk(ast.parse(source))]
    known = {
        node.module
        for node in nodes
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("specserve.")
    }
    assert known == {
        "specserve.cache.storage",
        "specserve.errors",
        "specserve.machine.lifeline",
        "specserve.machine.pulse",
        "specserve.models.adapted",
        "specserve.models.decoder",
        "specserve.models.loader",
        "specserve.models.product",
        "specserve.models.sharding",
        "specserve.models.stages",
        "specserve.ops",
        "specserve.ops.blocks",
        "specserve.ops.capture",
        "specserve.ops.choice",
        "specserve.ops.peers",
        "specserve.parallel.layout",
        "specserve.parallel.link",
        "specserve.parallel.messages",
        "specserve.parallel.stages",
        "specserve.runtime.pack",
        "specserve.runtime.runner",
    }
    attributes = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    assert not attributes & {"environ", "time", "perf_counter", "random", "monotonic", "cpu_count"}
