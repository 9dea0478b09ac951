"""The public doubles keep their promises: readable tiny models, lively outputs, a drafter that errs as told."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
import transformers
from hypothesis import given, settings, strategies as st

from specserve.errors import ConfigError
from specserve.kernels.reference import Kernels
from specserve.models.loader import load_model
from specserve.speculation.base import DraftRequest, SequenceReport, SequenceView, StepReport
from specserve.testing import (
    SPECIAL_TOKENS,
    Feed,
    PagedDecoder,
    ScriptedDrafter,
    tiny_config,
    tiny_tokenizer,
    write_tiny_model,
)
from specserve.types import Draft, SamplingParams, Sequence, Verdict

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3", "gemma3")
PROMPT = (3, 1, 4, 1, 5)
SCRIPT = list(range(100, 160))
TOKENIZER = tiny_tokenizer()


def sequence(num_output: int = 0, prompt: tuple[int, ...] = PROMPT) -> Sequence:
    tokens = [*prompt, *SCRIPT[:num_output]]
    return Sequence("r", 0, tokens, len(prompt), SamplingParams(), seed=1, max_tokens=100)


def drafter(**options: float) -> ScriptedDrafter:
    return ScriptedDrafter({PROMPT: SCRIPT}, 200, **options)  # type: ignore[arg-type]


def propose(source: ScriptedDrafter, budget: int, num_output: int = 0) -> tuple[list[int], list[int]]:
    view = SequenceView(sequence(num_output), 200)
    source.begin(view)
    (draft,) = source.propose([DraftRequest(view, budget)])
    source.end(view)
    assert len(draft) <= budget
    assert draft.q is None
    return draft.tokens.tolist(), draft.parents.tolist()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("tied", [False, True])
def test_greedy_outputs_are_lively(architecture: str, tied: bool, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    write_tiny_model(tmp_path, architecture, seed=0, tie_word_embeddings=tied)
    paged = PagedDecoder(load_model(tmp_path, Kernels(torch.device("cpu"), torch.float32)), 1, 128)
    output = [int(paged.step(Feed(0, TOKENIZER.encode("Once upon a time").ids))[0][-1].argmax())]
    while len(output) < 48:
        output.append(int(paged.step(Feed(0, output[-1:]))[0][-1].argmax()))
    assert len(set(output)) >= 16, output


def test_equal_arguments_write_equal_bytes_and_seeds_differ(tmp_path: Path) -> None:
    folders = [write_tiny_model(tmp_path / name, "qwen3", seed) for name, seed in (("a", 1), ("b", 1), ("c", 2))]
    for file in (
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ):
        assert (folders[0] / file).read_bytes() == (folders[1] / file).read_bytes()
    assert (folders[0] / "model.safetensors").read_bytes() != (folders[2] / "model.safetensors").read_bytes()


def test_transformers_reads_tokenizer_and_chat_template(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tokenizer = transformers.AutoTokenizer.from_pretrained(write_tiny_model(tmp_path, "llama"))
    messages = [{"role": "user", "content": "hi"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|start|>user\nhi<|end|>\n<|start|>assistant\n"
    ids = tokenizer(text)["input_ids"]
    assert ids == TOKENIZER.encode(text).ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.eos_token_id in tiny_config("llama")["eos_token_id"]


@settings(max_examples=200)
@given(st.text())
def test_tokenizer_round_trips_any_text(text: str) -> None:
    ids = TOKENIZER.encode(text).ids
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text
    assert all(token < tiny_config("llama")["vocab_size"] for token in ids)


def test_vocabulary_is_exactly_the_models(tmp_path: Path) -> None:
    assert TOKENIZER.get_vocab_size() == tiny_config("gemma3")["vocab_size"]
    assert [TOKENIZER.encode(token).ids for token in SPECIAL_TOKENS] == [
        [TOKENIZER.token_to_id(t)] for t in SPECIAL_TOKENS
    ]
    assert len(TOKENIZER.encode(" the").ids) < 4


def test_unknown_architecture_is_named() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'llama'"):
        tiny_config("lama")


@pytest.mark.parametrize("num_output", [0, 7, 58, 60])
def test_exact_drafter_continues_the_script(num_output: int) -> None:
    tokens, parents = propose(drafter(), 5, num_output)
    assert tokens == SCRIPT[num_output : num_output + 5]
    assert parents == list(range(-1, len(tokens) - 1))


def test_unscripted_prompts_and_empty_budgets_get_empty_drafts() -> None:
    source = drafter()
    known, strange = sequence(), sequence(prompt=(9, 9))
    views = [SequenceView(seq, 200) for seq in (known, strange)]
    for view in views:
        source.begin(view)
    assert [len(draft) for draft in source.propose(list(map(DraftRequest, views, [0, 4])))] == [0, 0]


@settings(max_examples=60)
@given(st.integers(0, 2**32), st.integers(0, 12), st.integers(0, 3), st.integers(0, 60))
def test_a_hopeless_drafter_is_never_right_and_siblings_differ(seed: int, budget: int, decoys: int, start: int) -> None:
    tokens, parents = propose(drafter(accuracy=0.0, seed=seed, decoys=decoys), budget, start)
    assert len(tokens) == (budget if decoys else min(budget, 60 - start)) or start + budget // (decoys + 1) >= 60
    depths: list[int] = []
    for token, parent in zip(tokens, parents, strict=True):
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
        assert token != SCRIPT[start + depths[-1]]
        assert 0 <= token < 200
    assert len(set(zip(tokens, parents, strict=True))) == len(tokens)


@settings(max_examples=60)
@given(st.integers(0, 2**32), st.integers(1, 16), st.integers(1, 3))
def test_an_exact_tree_holds_the_script_as_a_path(seed: int, budget: int, decoys: int) -> None:
    tokens, parents = propose(drafter(seed=seed, decoys=decoys), budget)
    node = -1
    path: list[int] = []
    while children := [i for i, parent in enumerate(parents) if parent == node]:
        right = [i for i in children if tokens[i] == SCRIPT[len(path)]]
        if not right:
            break
        (node,) = right
        path.append(node)
    assert len(path) == -(-budget // (decoys + 1))


def test_accuracy_is_a_rate_and_errors_belong_to_positions() -> None:
    source = drafter(accuracy=0.7, seed=4)
    tokens, _ = propose(source, 60)
    right = sum(token == wanted for token, wanted in zip(tokens, SCRIPT, strict=True))
    assert 30 <= right <= 54  # 42 expected, standard deviation 3.5
    again = [propose(source, 1, start)[0][0] for start in reversed(range(60))]
    assert again[::-1] == tokens


def test_lifecycle_is_counted_and_misuse_is_caught() -> None:
    source, seq = drafter(), sequence()
    view = SequenceView(seq, 200)
    with pytest.raises(AssertionError):
        source.propose([DraftRequest(view, 2)])
    source.begin(view)
    source.propose([DraftRequest(view, 4)])
    verdict = Verdict([100, 101, 7], [0, 1])
    source.observe(StepReport([SequenceReport(view, 0, 1, Draft.chain([100, 101]), verdict, 0)]))
    assert (source.num_drafted, source.num_accepted, source.live) == (4, 2, {view})
    with pytest.raises(AssertionError):
        source.begin(view)
    source.end(view)
    with pytest.raises(AssertionError):
        source.end(view)


@pytest.mark.parametrize("options", [{"accuracy": 1.5}, {"accuracy": float("nan")}, {"decoys": -1}, {"decoys": 199}])
def test_impossible_scripts_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        drafter(**options)
