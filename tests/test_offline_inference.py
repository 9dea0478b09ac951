"""A program that completes prompts, with a folder in the shape of OPT's: learned positions, and a byte-level tokenizer
that puts </s> before each text."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from specserve import LLM, SamplingParams
from specserve.testing import tiny_tokenizer, write_tiny_model

PROGRAM = Path(__file__).resolve().parents[1] / "examples/offline_inference.py"
SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")  # ids 0 to 3


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECSERVE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SPECSERVE_KV_CACHE_GIB", "0.1")


def as_published(folder: Path) -> Path:
    """A tiny model in the files that OPT's have: pytorch_model.bin, vocab.json, merges.txt."""
    write_tiny_model(folder, "opt", seed=2, bos_token_id=2, eos_token_id=2, pad_token_id=1)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    model = json.loads(tiny_tokenizer().to_str())["model"]
    spelled = sorted(model["vocab"], key=model["vocab"].get)
    vocabulary = {token: i for i, token in enumerate((*SPECIAL, *spelled))}
    (folder / "vocab.json").write_text(json.dumps(vocabulary), "utf-8")
    merges = "\n".join(" ".join(pair) for pair in model["merges"])
    (folder / "merges.txt").write_text(f"#version: 0.2\n{merges}\n", "utf-8")
    roles = {"unk_token": "</s>", "bos_token": "</s>", "eos_token": "</s>", "pad_token": "<pad>"}
    settings = {"tokenizer_class": "GPT2Tokenizer", "add_bos_token": True, "add_prefix_space": False, **roles}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    for name in ("model.safetensors", "tokenizer.json", "generation_config.json"):
        (folder / name).unlink()
    return folder


@pytest.fixture
def modern(tmp_path: Path) -> Path:
    """The same with safetensors and tokenizer.json, as transformers saves it."""
    import transformers

    folder = as_published(tmp_path / "modern")
    transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(folder)
    transformers.AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder)
    for name in ("pytorch_model.bin", "vocab.json", "merges.txt"):
        (folder / name).unlink(missing_ok=True)
    assert {path.name for path in folder.iterdir()} >= {"model.safetensors", "tokenizer.json"}
    return folder


def test_the_program_runs_with_opt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(PROGRAM), str(as_published(tmp_path / "opt"))])
    runpy.run_path(str(PROGRAM), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    prompts = [line.split(" -> ")[0] for line in lines if " -> " in line]
    assert prompts[0] == "'Good morning, my name is'"
    assert len(prompts) == 4


def test_old_and_new_files_say_the_same_behind_the_leading_token(tmp_path: Path, modern: Path) -> None:
    params = [
        SamplingParams(temperature=0, max_tokens=12, ignore_eos=True),
        SamplingParams(temperature=0.8, top_p=0.95, seed=1, max_tokens=12, ignore_eos=True),
    ]
    found = []
    for folder in (as_published(tmp_path / "old"), modern):
        with LLM(str(folder), max_model_len=64, dtype="float32", quantization="none") as llm:
            outputs = llm.generate(["the cat sat"] * 2, params)
        found.append([(each.prompt_token_ids, each.outputs[0].token_ids, each.outputs[0].text) for each in outputs])
    assert found[0] == found[1]
    ids, _, text = found[0][0]
    assert ids is not None
    assert ids[0] == 2
    assert 2 not in ids[1:]
    assert "</s>" not in text
