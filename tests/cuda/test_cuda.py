"""On a CUDA device, or one that is faked: everything lies where it belongs, the promises hold there too, and heads can
be trained."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specserve.bench.profile import profile
from specserve.bench.verify_cost import verify_cost
from specserve.checkpoint.weights import Weights
from specserve.llm import LLM
from specserve.structured.spec import Structured
from specserve.testing import write_adapter, write_tiny_model
from specserve.train.config import TrainingOptions
from specserve.train.loop import Training
from specserve.train.run import train
from specserve.types import SamplingParams

PROMPTS = ["Tell of the first one.", "Say it again, say it again, say it"]
GREEDY = SamplingParams(temperature=0, max_tokens=8, logprobs=2, ignore_eos=True)
SEEDED = SamplingParams(temperature=1, seed=3, top_k=40, top_p=0.9, min_p=0.01, max_tokens=8, ignore_eos=True)
PENALISED = SamplingParams(temperature=0.7, seed=5, n=2, repetition_penalty=1.3, max_tokens=8, ignore_eos=True)
IS_FAKED = not torch.cuda.is_available()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("cuda") / "tiny", "llama", seed=3)


def said(model: Path, device: str, params: list[SamplingParams], **options: Any) -> list[list[list[int]]]:
    """Tokens of each completion of each prompt, all in one batch."""
    chosen = {"dtype": "float32", "max_model_len": 96, "adaptive": False, "threads": 1, **options}
    with LLM(str(model), device=device, **chosen) as llm:
        assert llm.device.startswith(device)
        outputs = llm.generate(PROMPTS * len(params), [each for each in params for _ in PROMPTS])
        return [[each.token_ids for each in output.outputs] for output in outputs]


def test_outputs_are_plain_decoding_s(tiny: Path, cuda: torch.device) -> None:
    mixed = [GREEDY, SEEDED, PENALISED]
    plain = said(tiny, "cuda", mixed, drafter="none")
    alone = [each for params in mixed for each in said(tiny, "cuda", [params], drafter="none", max_num_seqs=1)]
    assert alone == plain
    assert said(tiny, "cuda", mixed, drafter="auto", max_num_batched_tokens=24) == plain
    assert said(tiny, "cuda", mixed, drafter="draft_model", draft_model=str(tiny)) == plain
    if IS_FAKED:  # a GPU adds in another order
        assert said(tiny, "cpu", mixed, isa="auto") == plain


@pytest.mark.parametrize("verification", ["rejection", "block"])
def test_drafts_that_are_drawn(tiny: Path, cuda: torch.device, verification: str) -> None:
    options = {"verification": verification, "drafter": "draft_model", "draft_model": str(tiny)}
    greedy = said(tiny, "cuda", [GREEDY, SEEDED, PENALISED], **options)[: len(PROMPTS)]
    assert greedy == said(tiny, "cuda", [GREEDY], drafter="none")


def test_weights_and_kv_of_bfloat16(tiny: Path, cuda: torch.device) -> None:
    with LLM(str(tiny), device="cuda", max_model_len=96) as llm:
        assert llm.dtype == "bfloat16"
    plain = said(tiny, "cuda", [GREEDY, SEEDED], dtype="bfloat16", drafter="none")
    assert said(tiny, "cuda", [GREEDY, SEEDED], dtype="bfloat16", drafter="auto") == plain


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_weights_in_integers(tiny: Path, cuda: torch.device, quantization: str) -> None:
    options = {"dtype": "bfloat16", "quantization": quantization}
    plain = said(tiny, "cuda", [GREEDY, SEEDED], drafter="none", **options)
    assert said(tiny, "cuda", [GREEDY, SEEDED], drafter="auto", max_num_batched_tokens=24, **options) == plain
    with LLM(str(tiny), device="cuda", max_model_len=96, **options) as llm:
        assert f"in {quantization}" in llm.summary


def test_experts_grammars_adapters_and_drafts_at_once(tmp_path: Path, cuda: torch.device) -> None:
    """What each request says is what it says alone, whatever the others ask for, with any drafter."""
    model = write_tiny_model(tmp_path / "tiny", "mixtral", seed=3, tie_word_embeddings=False)
    shapes = {name: info.shape for name, info in Weights(model).infos.items()}
    lora = f"own={write_adapter(tmp_path / 'own', shapes, 4, ('q_proj', 'v_proj'))}"
    schema = Structured.json({"type": "array", "items": {"enum": ["one", "three"]}, "minItems": 2, "maxItems": 3})
    mixed = [
        GREEDY,
        SEEDED,
        PENALISED,
        *(replace(own, structured=schema, ignore_eos=False) for own in (GREEDY, PENALISED)),
    ]
    each = [(params, adapter) for params in mixed for adapter in (None, "own")]

    def found(device: str, drafter: str, together: bool = True) -> list[list[list[int]]]:
        options: dict[str, Any] = {"dtype": "float32", "max_model_len": 96, "threads": 1, "lora": (lora,)}
        with LLM(
            str(model), device=device, drafter=drafter, adaptive=False, max_num_batched_tokens=40, **options
        ) as llm:
            batches = [each] if together else [[one] for one in each]
            asked = [zip(*batch, strict=True) for batch in batches]
            outputs = [
                output
                for params, names in asked
                for output in llm.generate(PROMPTS[1:] * len(params), list(params), adapter=list(names))
            ]
        return [[choice.token_ids for choice in output.outputs] for output in outputs]

    plain = found("cuda", "none")
    assert len({str(tokens) for tokens in plain[:6]}) == 6, "each asks for something else"
    assert found("cuda", "none", together=False) == plain
    for drafter in ("suffix", "auto"):
        assert found("cuda", drafter) == plain
    if IS_FAKED:  # a GPU adds in another order
        assert found("cpu", "auto") == plain


@pytest.mark.parametrize("kind", ["medusa", "eagle", "block"])
def test_a_head_is_trained_and_drafts(
    tiny: Path, cuda: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The whole command, killed once; then on the CPU, where its curve is the same but for rounding."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"Tell of the {n}th one."}) + "\n" for n in range(8)), "utf-8")
    plain = Training._note

    def failing(self: Training, line: dict[str, Any]) -> None:
        plain(self, line)
        if line["step"] == 2:
            raise KeyboardInterrupt  # behind a step that no checkpoint has

    curves = []
    for device in ("cuda", "cpu"):
        options = TrainingOptions(
            prompts=prompts, out=tmp_path / device, text=tmp_path / "text", temperatures=(0.0,), max_tokens=8,
            max_length=96, streams=4, draft_vocab_size=200, depth=2, anchors=4, bigram_rank=8, epochs=2.0,
            batch_tokens=64, checkpoint_minutes=0.0, cache_hidden=kind == "eagle",
        )  # fmt: skip
        engine = {"device": device, "dtype": "float32", "quantization": "none", "threads": 1}
        if device == "cuda":
            with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                patch.setattr(Training, "_note", failing)
                train(kind, str(tiny), engine, options, lambda line: None)
            engine["device"] = "cpu" if kind == "medusa" else device  # another may go on
        train(kind, str(tiny), engine, options, lambda line: None)
        curves.append([json.loads(line) for line in (options.out / "curve.jsonl").read_text("utf-8").splitlines()])
    there, here = curves
    assert [line["step"] for line in there] == [line["step"] for line in here]
    assert len(here) > 3
    assert [line["loss"] for line in there] == pytest.approx([line["loss"] for line in here], rel=1e-2)
    head = {"drafter": kind, "drafter_options": {"head": str(tmp_path / "cuda")}}
    mixed = [GREEDY, SEEDED]
    assert said(tiny, "cuda", mixed, **head) == said(tiny, "cuda", mixed, drafter="none")
    take_turns(tiny, kind, head)


def test_steps_are_measured_and_taken_apart(tiny: Path, cuda: torch.device) -> None:
    with LLM(str(tiny), device="cuda", dtype="float32", max_model_len=96, threads=1, adaptive=False) as llm:
        ids = llm.tokenizer.encode(PROMPTS[0])[:5]
        parts = {part["part"]: part for part in profile(llm, ids, 2, 2)["parts"]}
        assert parts["attention"]["calls"] == parts["gated"]["calls"] > 1
        assert parts["gated"]["ms"] > 0 < parts["gated"]["bytes"]
        assert verify_cost(llm, ids, [1, 3], 2)["cost"][0] == 1


def take_turns(model: Path, kind: str, head: dict[str, Any]) -> None:
    """Drafters of one engine, whose outputs are captured anew for each, with step times measured at the start."""
    options: dict[str, Any] = {"max_model_len": 96, "threads": 1, "adaptive": True, **head}
    with LLM(str(model), device="cuda", **options) as llm:
        found = []
        for name in ("none", kind, "recycle", "auto", kind):
            llm.use_drafter(name, **(head["drafter_options"] if name == kind else {}))
            found.append([output.outputs[0].token_ids for output in llm.generate(PROMPTS, [GREEDY, SEEDED])])
        assert found == found[:1] * len(found)


@pytest.mark.skipif(not IS_FAKED, reason="there is a CUDA device")
def test_the_faked_device_has_borders(cuda: torch.device) -> None:
    there, here = torch.ones(2, 3, device="cuda"), torch.ones(3)
    assert (there.device, there.is_cuda, there.is_cpu) == (cuda, True, False)
    for wrong in (
        lambda: there + here,
        lambda: there @ here,
        lambda: torch.cat([there[0], here]),
        lambda: here[there[0].long()],
        lambda: there.index_select(0, torch.tensor([1])),
        lambda: there.index_put_((torch.tensor([0]),), here),
        lambda: here.add_(there[0]),
    ):
        with pytest.raises(RuntimeError, match="on the same device"):
            wrong()
    with pytest.raises(TypeError, match="numpy"):
        there.numpy()
    found: list[torch.device] = []
    thread = threading.Thread(target=lambda: found.append((torch.ones(3, device="cuda") + there[0]).device))
    thread.start()
    thread.join()
    assert found == [cuda]


@pytest.mark.skipif(not IS_FAKED, reason="there is a CUDA device")
def test_the_faked_device_computes(cuda: torch.device) -> None:
    there = torch.zeros(2, 3, device="cuda")
    there[[0, 1], [2, 0]] = 2 * torch.ones(2, device="cuda")
    there[0].add_(1)
    assert there.tolist() == [[1, 1, 3], [2, 0, 0]]
    linear = torch.nn.Linear(3, 1).to("cuda")
    linear(there[there[:, 0] > 1].to(torch.float32)).sum().backward()
    assert linear.weight.grad is not None
    assert linear.weight.grad.is_cuda
    assert linear.weight.grad.tolist() == [[2, 0, 0]]
    assert (there + torch.tensor(1.0)).cpu().sum() == 13
