"""The whole way: text, training that is killed and goes on, and the files that are left."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from specserve.adapters import AdapterSource
from specserve.checkpoint.weights import Weights
from specserve.cli.main import run
from specserve.errors import CapacityError, ConfigError, ModelError
from specserve.llm import LLM
from specserve.models.heads import zoo
from specserve.models.heads.formats import read_head
from specserve.models.heads.origin import TargetOrigin
from specserve.models.lora import read_adapter
from specserve.testing import write_adapter
from specserve.train import cache, loop
from specserve.train.config import TrainingOptions
from specserve.train.loop import Training
from specserve.train.run import train
from specserve.train.target import Target
from specserve.train.text import INDEX
from specserve.types import SamplingParams

Make = Callable[..., TrainingOptions]


def quiet(line: str) -> None: ...


@pytest.mark.parametrize("kind", ["eagle", "medusa"])
def test_what_a_run_leaves(tiny: Path, engine: dict[str, Any], options: Make, kind: str) -> None:
    said: list[str] = []
    chosen = options(epochs=1.0)
    train(kind, str(tiny), engine, chosen, said.append)
    check_files(chosen.out, kind)
    assert any("tokens/s" in line for line in said)


def test_a_killed_run_ends_as_one_that_was_not(
    tiny: Path, engine: dict[str, Any], options: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = options(out=tmp_path / "whole", text=tmp_path / "text")
    train("block", str(tiny), engine, whole, quiet)
    check_files(whole.out, "block")
    killed = options(out=tmp_path / "killed", text=tmp_path / "text")
    plain, turns = Training._note, [0]

    def failing(self: Training, line: dict[str, Any]) -> None:
        plain(self, line)
        turns[0] += 1
        if turns[0] in (4, 9):
            raise KeyboardInterrupt  # behind a step that no checkpoint has

    monkeypatch.setattr(Training, "_note", failing)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            train("block", str(tiny), engine, killed, quiet)
    train("block", str(tiny), engine, killed, quiet)
    curves = [(options.out / "curve.jsonl").read_text() for options in (whole, killed)]
    assert curves[0] == curves[1]
    lines = [json.loads(line) for line in curves[0].splitlines()]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    assert len(lines[-1]["acceptance"]) == 3
    heads = [Weights(options.out) for options in (whole, killed)]
    assert all(torch.equal(heads[0][name], heads[1][name]) for name in heads[0])


def test_cached_hidden_states_are_those_that_are_computed(
    tiny: Path, engine: dict[str, Any], options: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    runs = [
        options(out=tmp_path / name, text=tmp_path / "text", cache_hidden=name != "plain", epochs=1.0)
        for name in ("plain", "cached", "killed")
    ]
    for run_options in runs[:2]:
        train("eagle", str(tiny), engine, run_options, said.append)
    assert any("hidden states: 0.00 GiB" in line for line in said)
    plain_save = Training._save

    def failing(self: Training) -> None:
        plain_save(self)
        if self.step == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(Training, "_save", failing)
    with pytest.raises(KeyboardInterrupt):
        train("eagle", str(tiny), engine, runs[2], quiet)
    train("eagle", str(tiny), engine, runs[2], quiet)
    texts = [(run_options.out / "curve.jsonl").read_text() for run_options in runs]
    assert texts[1] == texts[2]
    losses = [[json.loads(line)["loss"] for line in text.splitlines()] for text in texts[:2]]
    assert losses[0] == pytest.approx(losses[1], rel=0.01)
    monkeypatch.setattr(cache.shutil, "disk_usage", lambda folder: SimpleNamespace(free=10))
    with pytest.raises(CapacityError, match="Leave it out"):
        train(
            "eagle",
            str(tiny),
            engine,
            options(out=tmp_path / "full", text=tmp_path / "other", cache_hidden=True),
            quiet,
        )


def check_files(folder: Path, kind: str) -> None:
    head = read_head(folder)
    assert head.spec.kind == kind
    assert head.spec.target.vocab_size > 200
    recipe = (folder / "RECIPE.md").read_text()
    for part in ("| odd |", "| all |", "| machine |", "draft vocabulary | 200 ids", "## Curve"):
        assert part in recipe


def test_a_finished_run_does_nothing_again(tiny: Path, engine: dict[str, Any], options: Make) -> None:
    chosen = options()
    train("eagle", str(tiny), engine, chosen, quiet)
    curve = (chosen.out / "curve.jsonl").read_bytes()
    train("eagle", str(tiny), engine, chosen, quiet)
    assert (chosen.out / "curve.jsonl").read_bytes() == curve


def test_a_folder_of_another_run_is_left_alone(
    tiny: Path, engine: dict[str, Any], options: Make, tmp_path: Path
) -> None:
    train("eagle", str(tiny), engine, options(tokens=400), quiet)
    with pytest.raises(ConfigError, match="layers was 1 and is now 2"):
        train("eagle", str(tiny), engine, options(tokens=400, layers=2), quiet)
    with pytest.raises(ConfigError, match="kind was 'eagle' and is now 'block'"):
        train("block", str(tiny), engine, options(tokens=400), quiet)
    with pytest.raises(ConfigError, match="answers was"):
        train("eagle", str(tiny), engine, options(tokens=600), quiet)
    other = options(out=tmp_path / "other", text=options().out / "text", seed=9)
    with pytest.raises(ConfigError, match="text holds another run: seed was 0 and is now 9"):
        train("eagle", str(tiny), engine, other, quiet)
    (tmp_path / "strange").mkdir()
    (tmp_path / "strange/model.safetensors").touch()
    with pytest.raises(ConfigError, match="holds something else"):
        train("eagle", str(tiny), engine, options(out=tmp_path / "strange"), quiet)


def test_a_head_for_an_adapter(tiny: Path, engine: dict[str, Any], options: Make, tmp_path: Path) -> None:
    """It learns what the model writes with the adapter, of any rank, and drafts for it from then on."""
    shapes = {name: info.shape for name, info in Weights(tiny).infos.items()}
    adapter = write_adapter(tmp_path / "sql", shapes, rank=80, targets=("q_proj", "down_proj", "lm_head"))
    source = AdapterSource("sql", str(adapter))
    chosen = options(out=adapter / "head", temperatures=(0.0,), epochs=1.0)
    found = train("eagle", str(tiny), engine, chosen, quiet, source)
    assert found["model"] == f"{tiny} with adapter sql"
    assert f"{tiny} with adapter sql, float32" in (chosen.out / "RECIPE.md").read_text()
    with pytest.raises(ConfigError, match=r"holds another run: adapter was '[0-9a-f]{64}' and is now None"):
        train("eagle", str(tiny), engine, chosen, quiet)
    answers = split_text(chosen.out / "text")
    target = Target(tiny, 96, adapter=read_adapter(adapter, tiny), **engine)
    for start, tokens in answers[:4]:
        (hidden,) = target.hidden([tokens], [target.last_layer])
        said = target.distributions(hidden[start - 1 : -1, 0], torch.arange(target.spec.vocab_size)).argmax(-1)
        assert said.tolist() == tokens[start:].tolist()
    own = {"max_model_len": 96, "adaptive": False, "lora": f"sql={adapter}", "max_lora_rank": 80, **engine}
    with LLM(str(tiny), drafter="eagle", drafter_options={"head": str(chosen.out)}, **own) as llm:
        assert llm.adapters()["sql"].head == str(chosen.out)
        params = SamplingParams(max_tokens=16, temperature=0)
        outputs = llm.generate([tokens[:start].tolist() for start, tokens in answers], params, adapter="sql")
    assert [each.outputs[0].token_ids for each in outputs] == [tokens[start:].tolist() for start, tokens in answers]
    assert all(each.outputs[0].stats.num_draft_tokens for each in outputs)


def split_text(folder: Path) -> list[tuple[int, Any]]:
    """Of each answer in a folder of text where it begins, and its tokens with the prompt's."""
    tokens, found = np.fromfile(folder / "tokens.bin", np.uint16), []
    for each in np.fromfile(folder / "index.bin", INDEX):
        start, num_prompt = int(each["start"]), int(each["num_prompt"])
        found.append((num_prompt, tokens[start : start + num_prompt + int(each["num_output"])]))
    return found


def test_too_little_memory(tiny: Path, engine: dict[str, Any], options: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    train("eagle", str(tiny), engine, options(), quiet)
    monkeypatch.setattr(loop, "free_memory", lambda device: 10)
    with pytest.raises(CapacityError, match="Lower --batch-tokens"):
        train("eagle", str(tiny), engine, options(), quiet)


def test_the_command(tiny: Path, prompt_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["train", "eagle", "--model", str(tiny), "--prompts", str(prompt_file), "--out", str(tmp_path / "head")]
    arguments += ["--device", "cpu", "--max-tokens", "8", "--max-length", "64", "--epochs", "1", "--depth", "2"]
    arguments += ["--temperature", "0", "--batch-tokens", "256", "--hidden-layers", "0", "--hidden-layers", "1"]
    assert run(arguments) == 0
    assert "head and RECIPE.md" in capsys.readouterr().err
    assert (tmp_path / "head/config.json").exists()
    assert run([*arguments, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["out"], told["model"]) == (str(tmp_path / "head"), str(tiny))
    assert told["num_steps"] > 0 and len(told["acceptance"]["all"]["by_depth"]) == 2
    assert run([*arguments, "--adapter", "sql"]) == 2
    assert "Name its folder with --lora sql=PATH" in capsys.readouterr().err
    assert run([*arguments, "--layers", "2"]) == 2
    assert "holds another run" in capsys.readouterr().err
    assert run(["train", "hydra", *arguments[2:]]) == 2
    assert run([*arguments[:3], "no-such-model", *arguments[4:]]) == 2
    assert "no-such-model" in capsys.readouterr().err
    assert run([*arguments[:5], str(tmp_path / "none"), *arguments[6:]]) == 2
    assert "cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["block", "eagle", "medusa"])
def test_an_int8_head_is_found_by_its_target(
    tiny: Path, engine: dict[str, Any], options: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """It lacks the target's LM head, drafts with it, and is the head that is written in full otherwise."""
    chosen = options(epochs=1.0, out=tmp_path / "zoo/tiny-head", text=tmp_path / "text", int8=True)
    train(kind, str(tiny), engine, chosen, quiet)
    small = read_head(chosen.out)
    small_tensors = {name: small.weights[name] for name in small.weights}
    monkeypatch.setattr(zoo, "place", lambda: tmp_path / "zoo")
    assert [(each.kind, each.verifier) for each in zoo.heads()] == [(kind, str(tiny))]
    assert zoo.heads()[0].fingerprint == TargetOrigin(tiny).fingerprint()
    answers = []
    for drafter, adaptive in (("none", False), ("auto", False), ("auto", True), (kind, True), (kind, False)):
        with LLM(str(tiny), drafter=drafter, adaptive=adaptive, max_model_len=96, **engine) as llm:
            found = [
                each.outputs[0] for each in llm.generate(["a b", "c"], SamplingParams(max_tokens=24, temperature=0))
            ]
        answers.append([each.token_ids for each in found])
        sources = {source for each in found for source in each.stats.by_source}
        assert (kind in sources) == (drafter == kind) or adaptive
    assert all(each == answers[0] for each in answers)
    assert sum(each.stats.num_draft_tokens for each in found) > 0
    train(kind, str(tiny), engine, dataclasses.replace(chosen, int8=False), quiet)
    whole = read_head(chosen.out)
    if kind != "medusa":
        assert whole.d2t is not None and set(whole.weights) - set(small_tensors) == {"lm_head.weight"}
        ids = torch.arange(len(whole.d2t)) + whole.d2t
        assert torch.equal(whole.weights["lm_head.weight"], TargetOrigin(tiny).head()[ids])
    for name, tensor in small_tensors.items():
        step = whole.weights[name].abs().amax(-1, keepdim=True) / 127
        assert bool(((tensor - whole.weights[name]).abs() <= 0.501 * step).all())


def test_a_target_without_heads_is_told_so(tiny: Path, engine: dict[str, Any]) -> None:
    with (
        pytest.raises(ModelError, match=r"No block head for this target comes with specserve.* specserve train block"),
        LLM(str(tiny), drafter="block", max_model_len=96, **engine),
    ):
        pass
