"""Heads that adapters bring: they draft for their adapter's sequences exactly as they would as an engine's own, and
change no text."""

from __future__ import annotations

import dataclasses
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from specserve import LLM, SamplingParams
from specserve.adapters import AdapterSource
from specserve.checkpoint.weights import Weights
from specserve.config import EngineConfig
from specserve.engine.build import Built, build
from specserve.engine.request import Request
from specserve.errors import ConfigError, ModelError
from specserve.models.decoder import Decoder
from specserve.models.heads.formats import write_head
from specserve.models.heads.speculators import Verifier
from specserve.models.loader import load_model
from specserve.ops.choice import choose_ops
from specserve.testing import check_integrity, write_adapter, write_tiny_model
from specserve.testing.heads import random_weights, trained_block, trained_eagle, trained_medusa
from specserve.types import SequenceStats

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
SAMPLED = dataclasses.replace(GREEDY, temperature=0.8, seed=11)
KINDS = ("eagle", "block", "medusa")
NUM_EACH = 4
Answers = dict[str, tuple[list[int], SequenceStats]]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), "llama", seed=3)


@pytest.fixture(scope="module")
def adapter(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    shapes = {name: info.shape for name, info in Weights(tiny).infos.items()}
    return write_adapter(tmp_path_factory.mktemp("adapters") / "a", shapes, seed=1)


@pytest.fixture(scope="module")
def plain(tiny: Path, adapter: Path) -> Answers:
    """Without any drafter."""
    return drive(make(tiny, adapter), requests())


@pytest.fixture(scope="module")
def heads(tiny: Path, plain: Answers, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    """By kind, and by whose texts they learned: those of the model, and those of the adapter."""
    target = load_model(tiny, choose_ops(torch.device("cpu"), "float32", "none", 1))
    assert isinstance(target, Decoder)
    train: dict[str, Callable[..., Any]] = {"eagle": trained_eagle, "block": trained_block, "medusa": trained_medusa}
    given = {"eagle": (3, 30), "block": (60,), "medusa": (30,)}
    found = {}
    for kind in KINDS:
        for name in ("plain", "a"):
            texts = [each.prompt_ids + plain[each.id][0] for each in requests() if each.id.startswith(name)]
            spec, weights, d2t = train[kind](target, texts, *given[kind])
            found[kind, name] = tmp_path_factory.mktemp(f"{kind}-{name}")
            write_head(found[kind, name], spec, weights, d2t, Verifier(str(tiny)))
    return found


def make(tiny: Path, adapter: Path, head: str = "", **options: Any) -> Built:
    defaults: dict[str, Any] = {"max_model_len": 160, "max_step_ms": 1e9, "adaptive": False, "threads": 1}
    defaults |= {"dtype": "float32", "drafter": "none", "lora": (f"a={adapter}{head}",)}
    return build(EngineConfig(model=str(tiny), **{**defaults, **options}))


def drafting(kind: str, head: Path) -> dict[str, Any]:
    return {"drafter": kind, "drafter_options": {"head": str(head)}}


def requests(names: tuple[str, ...] = ("plain", "a")) -> list[Request]:
    """Of the model and of the adapter in turn, to the same prompts."""
    return [
        Request(
            id=f"{name} {i}",
            prompt_ids=[(5 + 7 * i + 3 * j) % 40 for j in range(4 + i)],
            params=SAMPLED if i == 2 else GREEDY,
            adapter=None if name == "plain" else name,
        )
        for i in range(NUM_EACH)
        for name in names
    ]


def drive(built: Built, asked: list[Request]) -> Answers:
    engine, found = built.engine, dict[str, tuple[list[int], SequenceStats]]()
    for request in asked:
        engine.add(request)
    while engine.has_work:
        for event in engine.step():
            assert event.error is None
            tokens = found.get(event.request_id, ([], None))[0] + event.tokens
            found[event.request_id] = tokens, event.stats or SequenceStats()
        check_integrity(engine.cache, [*engine.scheduler.running, *engine.scheduler.waiting])
    assert engine.policy.num_dropped == 0
    return found


def drafts(answers: Answers) -> dict[str, tuple[Any, ...]]:
    """What was drafted and accepted, request by request."""
    return {
        name: (stats.num_steps, stats.drafted_by_position, stats.accepted_by_position)
        for name, (_, stats) in answers.items()
    }


@pytest.mark.parametrize("kind", KINDS)
def test_each_sequence_is_drafted_for_by_its_own_head(
    tiny: Path, adapter: Path, plain: Answers, heads: dict[tuple[str, str], Path], kind: str
) -> None:
    own, other = heads[kind, "plain"], heads[kind, "a"]
    found = drive(make(tiny, adapter, f",head={other}", **drafting(kind, own)), requests())
    assert {name: tokens for name, (tokens, _) in found.items()} == {name: each[0] for name, each in plain.items()}
    both = {"plain": own, "a": other}
    alone = {
        name: drafts(drive(make(tiny, adapter, **drafting(kind, head)), requests((name,))))
        for name, head in both.items()
    }
    assert drafts(found) == alone["plain"] | alone["a"]
    swapped = drafts(drive(make(tiny, adapter, **drafting(kind, own)), requests(("a",))))
    assert swapped != alone["a"]
    accepted = sum(stats.num_accepted_tokens for name, (_, stats) in found.items() if name.startswith("a"))
    assert accepted > sum(sum(each[2]) for each in swapped.values())


@pytest.mark.parametrize(
    "options",
    [{"adaptive": True}, {"max_num_batched_tokens": 16}, {"max_model_len": 64, "kv_cache_gib": 9 * 2**14 / 2**30}],
    ids=lambda options: ",".join(options),
)
def test_texts_are_those_without_heads(
    tiny: Path, adapter: Path, plain: Answers, heads: dict[tuple[str, str], Path], options: dict[str, Any]
) -> None:
    built = make(tiny, adapter, f",head={heads['eagle', 'a']}", **drafting("eagle", heads["eagle", "plain"]), **options)
    for _ in range(2):  # the second time from the prefix cache, with the KV of both heads
        found = drive(built, requests())
        assert {name: each[0] for name, each in found.items()} == {name: each[0] for name, each in plain.items()}
    if "kv_cache_gib" in options:
        assert sum(stats.num_preemptions for _, stats in found.values())


def test_a_head_beside_its_adapter_is_found(
    tiny: Path,
    adapter: Path,
    heads: dict[tuple[str, str], Path],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    own = drafting("eagle", heads["eagle", "plain"])
    named = drive(make(tiny, adapter, f",head={heads['eagle', 'a']}", **own), requests(("a",)))
    folder = Path(shutil.copytree(adapter, tmp_path / "a"))
    (folder / "head").mkdir()
    (folder / "head" / "run.json").write_text("{}")  # as a training that is not at its end leaves it
    without = make(tiny, folder, **own)
    assert without.engine.adapters.listed["a"].head == ""
    shutil.copytree(heads["eagle", "a"], folder / "head", dirs_exist_ok=True)
    built = make(tiny, folder, **own)
    assert built.engine.adapters.listed["a"].head == str(folder / "head")
    assert built.engine.adapters.listed["a"].digest != without.engine.adapters.listed["a"].digest
    assert drafts(drive(built, requests(("a",)))) == drafts(named)
    with caplog.at_level(logging.WARNING):
        other = make(tiny, folder, **drafting("medusa", heads["medusa", "plain"]))
    assert "of kind eagle, drafts nothing under --drafter medusa" in caplog.text
    assert other.engine.adapters.listed["a"].head == ""


def test_an_adapter_that_goes_takes_its_head_along(
    tiny: Path, adapter: Path, heads: dict[tuple[str, str], Path]
) -> None:
    built = make(tiny, adapter, **drafting("eagle", heads["eagle", "plain"]))
    engine, source = built.engine, AdapterSource("b", str(adapter), head=str(heads["eagle", "a"]))
    asked = requests(("b",))
    infos = [built.loader.load(source) for _ in range(2)]
    engine.adapters.add(infos[0])
    first = drafts(drive(built, asked))
    engine.adapters.add(infos[1])  # replaces it by what is the same
    assert drafts(drive(built, asked))["b 0"][1:] == first["b 0"][1:]
    (split,) = built.loader.heads._split.values()
    assert list(split.by_adapter) == [infos[0].digest]
    for request in asked:
        engine.add(request)
    engine.step()
    engine.adapters.remove("b")
    assert list(split.by_adapter) == [infos[0].digest], "sequences run with it"
    while engine.has_work:
        engine.step()
    assert (split.by_adapter, split._chosen, built.loader.heads._held) == ({}, {}, {})


def test_a_head_that_cannot_draft_is_refused(
    tiny: Path, adapter: Path, heads: dict[tuple[str, str], Path], tmp_path: Path
) -> None:
    eagle, medusa = heads["eagle", "a"], heads["medusa", "a"]
    with pytest.raises(ConfigError, match=r"drafts under --drafter eagle; this engine drafts with 'none'"):
        make(tiny, adapter, f",head={eagle}")
    with pytest.raises(ConfigError, match=r"drafts under --drafter medusa; this engine drafts with 'eagle'"):
        make(tiny, adapter, f",head={medusa}", **drafting("eagle", eagle))
    with pytest.raises(ModelError, match="There is no draft head"):
        make(tiny, adapter, f",head={tmp_path / 'none'}", **drafting("eagle", eagle))
    for option in ("layers", "hidden_layers"):
        own = eagle if option == "layers" else write_head_of(tiny, tmp_path / "reads-one", 1)
        other = write_head_of(tiny, tmp_path / "deeper", 3, num_layers=2) if option == "layers" else eagle
        built = make(tiny, adapter, **drafting("eagle", own))
        info = built.loader.load(AdapterSource("b", str(adapter), head=str(other)))
        with pytest.raises(ConfigError, match=f"Train it with the same --{option.replace('_', '-')}"):
            built.engine.adapters.add(info)
        built.loader.drop(info)
        assert list(built.engine.adapters.listed) == ["a"]
        assert not built.loader.heads._held


def write_head_of(tiny: Path, folder: Path, version: int, num_layers: int = 1) -> Path:
    """A random EAGLE head, with so many layers."""
    target = load_model(tiny, choose_ops(torch.device("cpu"), "float32", "none", 1))
    assert isinstance(target, Decoder)
    spec, _, d2t = trained_eagle(target, [[1, 2, 3, 4, 5, 6]], version, 1)
    layers = dataclasses.replace(spec.layers, layers=spec.layers.layers * num_layers)
    spec = dataclasses.replace(spec, layers=layers)
    folder.mkdir()
    write_head(folder, spec, random_weights(spec.shapes()), d2t, Verifier(str(tiny)))
    return folder


def test_heads_are_loaded_while_an_llm_runs_and_drafters_change(
    tiny: Path, adapter: Path, heads: dict[tuple[str, str], Path]
) -> None:
    own = drafting("eagle", heads["eagle", "plain"])
    common = {"dtype": "float32", "max_model_len": 160, "threads": 1, "adaptive": False, "max_loras": 2}
    prompt = requests(("a",))[0].prompt_ids
    with LLM(str(tiny), **own, **common) as llm:
        info = llm.load_adapter("a", adapter, head=heads["eagle", "a"])
        assert info.head == str(heads["eagle", "a"])
        first = llm.generate(prompt, GREEDY, adapter="a")[0].outputs[0]
        llm.use_drafter("ngram")
        llm.generate(prompt, GREEDY, adapter="a")
        llm.use_drafter("eagle", head=str(heads["eagle", "plain"]))
        again = llm.generate(prompt, GREEDY, adapter="a")[0].outputs[0]
        assert first.token_ids == again.token_ids
        assert first.stats.accepted_by_position == again.stats.accepted_by_position
        llm.unload_adapter("a")
        plain = llm.load_adapter("a", adapter)
        assert plain.head == ""
        other = llm.generate(prompt, GREEDY, adapter="a")[0].outputs[0]
        assert other.token_ids == first.token_ids
        assert other.stats.accepted_by_position != first.stats.accepted_by_position


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("a=/x", AdapterSource("a", "/x")),
        ("a=/x,pinned", AdapterSource("a", "/x", True)),
        ("a=/x,head=/y", AdapterSource("a", "/x", head="/y")),
        ("a=/x,head=/y,pinned", AdapterSource("a", "/x", True, "/y")),
        ("a=/x,pinned,head=/y", AdapterSource("a", "/x", True, "/y")),
        ("a=/x,1,head=/y", AdapterSource("a", "/x,1", head="/y")),
        ("a=/head=,x", AdapterSource("a", "/head=,x")),
    ],
)
def test_sources(text: str, source: AdapterSource) -> None:
    assert AdapterSource.parse(text) == source
    assert AdapterSource.parse(str(source)) == source


@pytest.mark.parametrize("text", ["a", "a=", "=x", "a=,pinned", "a=,head=/y"])
def test_sources_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match=r"it must be name=path; ,pinned and ,head=path may follow"):
        AdapterSource.parse(text)
