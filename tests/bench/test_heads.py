"""`specserve doctor --head`: faults that were planted in heads are found and named, and a healthy head is called so."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from specserve.bench.heads import diagnose as diagnose_module, faults
from specserve.bench.heads.diagnose import TOP_K, Subject, Texts, diagnose, subject, texts_of
from specserve.bench.heads.recording import HeadBench, Recording
from specserve.bench.heads.replay import Replay
from specserve.bench.heads.report import verdict
from specserve.bench.heads.variants import other_taps
from specserve.cli.main import run
from specserve.errors import ConfigError, ModelError
from specserve.models.decoder import Decoder
from specserve.models.heads.formats import write_head
from specserve.models.heads.origin import TargetOrigin
from specserve.models.heads.spec import BlockSpec, EagleSpec, MedusaSpec
from specserve.models.heads.speculators import Verifier
from specserve.models.loader import load_model
from specserve.ops.backend import KernelOptions
from specserve.registry import KERNELS
from specserve.testing import write_tiny_model
from specserve.testing.heads import (
    add_next_token_layer,
    hidden_states,
    matrices,
    random_weights,
    small_layers,
    target_shape,
    trained_eagle,
)
from specserve.text.tokenizer import Tokenizer

ENGINE = {"dtype": "float32", "quantization": "none", "threads": 1, "kv_cache_gib": 0.02}
DEPTH, NUM_PROMPT, MAX_TOKENS = 3, 12, 16
PROMPTS = [[(7 * i + 3 * j * j + j) % 280 for j in range(6 + 5 * i)] for i in range(4)]

Check = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("target") / "tiny", "llama", seed=3, num_hidden_layers=4)


@pytest.fixture(scope="module")
def target(tiny: Path) -> Decoder:
    ops = KERNELS.find("reference").create(KernelOptions(torch.device("cpu"), "float32", "none"))
    return load_model(tiny, ops)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnose_module, "_TIMING_S", 0.02)


def following(token: int, ahead: int = 1) -> int:
    """The tokens of TEXTS follow each other so."""
    for _ in range(ahead):
        token = (5 * token + 7) % 251
    return token


TEXTS = [[following(start, i) for i in range(NUM_PROMPT + MAX_TOKENS)] for start in (1, 60, 90, 200)]


@pytest.fixture
def _says_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The target says TEXTS."""
    recorded = [Recording(text, NUM_PROMPT, {}) for text in TEXTS]
    monkeypatch.setattr(HeadBench, "answers", lambda bench, prompts, max_tokens: recorded)


def bigram(target: Decoder, ahead: int = 1) -> tuple[Any, dict[str, Any]]:
    """An EAGLE-1 head that reads nothing but the token, and says which comes so many places after it in TEXTS."""
    size = target.spec.hidden_size
    vocabulary = target.spec.vocab_size
    spec = EagleSpec(
        version=1, target=target_shape(target), layers=small_layers(target, vocabulary), has_head=True
    )  # fmt: skip
    weights = random_weights(spec.shapes())
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        weights[f"layers.0.{name}.weight"].zero_()
    weights["fc.weight"] = torch.cat((torch.eye(size), torch.zeros(size, size)), 1)
    weights["lm_head.weight"] = knowing(target, ahead)
    return spec, weights


def knowing(target: Decoder, ahead: int) -> Tensor:
    """An LM head, [vocabulary, hidden], that says of a token's embedding which token comes later."""
    table = torch.zeros(target.spec.vocab_size, target.spec.hidden_size)
    embedding, _ = matrices(target)
    for token in range(251):
        table[following(token, ahead)] = 9 * embedding[token] / embedding[token].norm()
    return table


@pytest.fixture
def check(tiny: Path, tmp_path: Path) -> Check:
    """Writes a head, and says what is found."""

    def found(spec: Any, weights: Any, d2t: Any = None, fingerprint: str | None = None, **more: Any) -> dict[str, Any]:
        own = TargetOrigin(tiny).fingerprint() if fingerprint is None else fingerprint
        write_head(tmp_path / "head", spec, weights, d2t, Verifier("tiny", own))
        return diagnosed(subject(str(tiny), str(tmp_path / "head")), **more)

    return found


def diagnosed(of: Subject, prompts: Any = PROMPTS, **options: Any) -> dict[str, Any]:
    texts = Texts(prompts, None, "these are no texts")
    return diagnose(of, texts, ENGINE, depth=DEPTH, max_tokens=MAX_TOKENS, **options)


def named(figures: dict[str, Any]) -> list[str]:
    assert figures["healthy"] == (not figures["findings"])
    return [each["fault"] for each in figures["findings"]]


# --- heads ------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_says_texts")
def test_a_healthy_head_is_called_healthy(target: Decoder, check: Check) -> None:
    parts: list[str] = []
    figures = check(*bigram(target), on_part=parts.append)
    assert named(figures) == []
    assert "healthy: " in "\n".join(verdict(figures))
    served = figures["served"]
    assert served["by_depth"] == sorted(served["by_depth"], reverse=True)
    assert served["tokens_per_step"] == pytest.approx(1 + sum(served["by_depth"]))
    assert served["by_depth"][0] > 0.9
    assert served["tree"]["nodes"] == TOP_K * DEPTH
    assert all(own <= tree for own, tree in zip(served["by_depth"], served["tree"]["by_depth"], strict=True))
    gains = {row["name"]: row["gain"] for row in figures["variants"]}
    assert gains["token ids one place earlier"] < -1 and gains["token ids one place later"] < -1
    assert gains["hidden states one place earlier"] == gains["layers 2"] == 0  # it reads none
    cost = figures["cost"]
    assert len(cost["propose_ms"]) == len(cost["speedup"]) == DEPTH == len(cost["verify_ms"]) - 1
    assert cost["speedup"][cost["best"] - 1] == max(cost["speedup"])
    assert (figures["places"], figures["prompts"]) == (4 * (MAX_TOKENS - 1), 4)
    assert parts[0] == "answers of the target" and "trees" in parts
    assert len(figures["left_out"]) == 2  # the template, and rounding: all is float32
    json.dumps(figures)


@pytest.mark.usefixtures("_says_texts")
def test_token_ids_that_are_shifted_are_found(target: Decoder, check: Check) -> None:
    """One that learned to read token i beside hidden state i."""
    figures = check(*bigram(target, ahead=2))
    assert named(figures)[0] == "ids"
    assert "one place earlier" in figures["findings"][0]["says"]
    assert "it must read token i + 1" in figures["findings"][0]["todo"]
    assert figures["served"]["accepted"] < 0.1


@pytest.mark.usefixtures("_says_texts")
def test_a_head_that_repeats_what_it_reads_is_found(target: Decoder, check: Check) -> None:
    figures = check(*bigram(target, ahead=0))
    assert {"ids", "places"} <= set(named(figures))  # shown the token that it is to guess, it says that
    assert any("It repeats the token that it reads" in line for line in verdict(figures))


def solved(target: Decoder, layers: tuple[int, ...], goals: Tensor, ahead: int = 2, is_normed: bool = False) -> Tensor:
    """A matrix [goal, layers * hidden] that makes of the target's states at token i of TEXTS the row of `goals` of
    token i + `ahead`: there are more numbers than places."""
    rows, wanted = [], []
    for text in TEXTS:
        states = torch.cat([target.final_norm(x) if is_normed else x for x in hidden_states(target, text, layers)], -1)
        last = len(text) - ahead
        rows.append(states[NUM_PROMPT - 1 : last])
        wanted.append(goals[text[NUM_PROMPT - 1 + ahead :]])
    return torch.linalg.lstsq(torch.cat(rows).double(), torch.cat(wanted).double()).solution.T.float()


@pytest.mark.usefixtures("_says_texts")
def test_wrong_taps_are_found_and_the_right_ones_named(target: Decoder, check: Check) -> None:
    """A head whose fc makes a code of the first token, of layers 0, 1 and 2, and whose file says 2, 1 and 0."""
    size = target.spec.hidden_size
    spec = EagleSpec(
        version=3, target=target_shape(target), layers=small_layers(target, 293), hidden_layers=(0, 1, 2), has_head=True
    )
    weights = random_weights(spec.shapes())
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        weights[f"layers.0.{name}.weight"].zero_()
    codes = torch.randn(293, size, generator=torch.Generator().manual_seed(1))
    weights |= {"fc.weight": solved(target, (0, 1, 2), codes), "lm_head.weight": codes, "norm.weight": torch.ones(size)}
    healthy = check(spec, weights)
    assert healthy["served"]["by_depth"][0] > 0.95
    assert "taps" not in named(healthy)
    figures = check(dataclasses.replace(spec, hidden_layers=(2, 1, 0)), weights)
    assert named(figures)[0] == "taps"
    assert "layers 0, 1, 2" in figures["findings"][0]["says"]
    assert any("layers 0, 1, 2" in line for line in verdict(figures))


def with_ids(spec: Any, weights: dict[str, Any], kept: list[int], ids: list[int]) -> tuple[Any, dict[str, Any], Any]:
    """The head with these rows of its LM head, said to be of `ids`."""
    layers = dataclasses.replace(spec.layers, vocab_size=len(kept))
    weights = {**weights, "lm_head.weight": weights["lm_head.weight"][kept]}
    return dataclasses.replace(spec, layers=layers), weights, torch.tensor(ids) - torch.arange(len(ids))


@pytest.mark.usefixtures("_says_texts")
def test_a_vocabulary_that_is_cut_is_found(target: Decoder, check: Check) -> None:
    kept = [token for token in range(251) if token % 3]
    figures = check(*with_ids(*bigram(target), kept, kept))
    assert named(figures) == ["vocabulary"]
    covers = figures["vocabulary"]
    assert covers["size"] == len(kept) and covers["missing"] > 0.2
    assert all(each["id"] % 3 == 0 and each["count"] for each in covers["commonest_missing"])
    assert covers["accepted_within"] > figures["served"]["accepted"] + 0.3


@pytest.mark.usefixtures("_says_texts")
def test_a_vocabulary_whose_map_is_shifted_is_found(target: Decoder, check: Check) -> None:
    kept = list(range(251))
    figures = check(*with_ids(*bigram(target), kept, [token + 1 for token in kept]))
    assert "map" in named(figures)
    assert "+1 ids" in next(each["says"] for each in figures["findings"] if each["fault"] == "map")


@pytest.mark.usefixtures("_says_texts")
def test_a_head_of_another_checkpoint_is_told(target: Decoder, check: Check) -> None:
    assert named(check(*bigram(target), fingerprint="0" * 32)) == ["target"]


@pytest.mark.usefixtures("_says_texts")
def test_medusa_heads_of_later_places_are_found(target: Decoder, check: Check) -> None:
    spec = MedusaSpec(target=target_shape(target), num_heads=DEPTH, draft_vocab_size=293)
    weights = {name: torch.zeros(shape) for name, shape in spec.shapes().items()}
    for head in range(DEPTH):
        weights[f"{head}.1.weight"] = solved(target, (3,), torch.eye(293), 2 + head, is_normed=True)
    whole = check(spec, weights)
    assert named(whole) == []
    assert whole["hidden_layers"] == [3]
    assert min(whole["served"]["by_depth"]) > 0.8
    later = {f"{int(name[0]) - 1}{name[1:]}": weight for name, weight in weights.items() if not name.startswith("0.")}
    assert "places" in named(check(dataclasses.replace(spec, num_heads=DEPTH - 1), later))


@pytest.mark.usefixtures("_says_texts")
def test_a_block_head_and_rounded_weights(target: Decoder, tiny: Path, tmp_path: Path) -> None:
    spec = BlockSpec(
        target=target_shape(target), layers=small_layers(target, 293), hidden_layers=(0, 2), block_size=4,
        mask_token_id=292, has_head=True, bigram_rank=target.spec.hidden_size,
    )  # fmt: skip
    weights = random_weights(spec.shapes())
    weights["lm_head.weight"].zero_()
    weights["bigram_in.weight"], weights["bigram_out.weight"] = matrices(target)[0], knowing(target, 1)
    write_head(tmp_path, spec, weights, None, Verifier("tiny", TargetOrigin(tiny).fingerprint()))
    of = subject(str(tiny), str(tmp_path))
    figures = diagnose(of, Texts(PROMPTS, PROMPTS), {**ENGINE, "dtype": "bfloat16"}, depth=DEPTH, max_tokens=MAX_TOKENS)
    assert named(figures) == []
    assert figures["kind"] == "block" and figures["served"]["tree"] is None
    assert figures["served"]["by_depth"][-1] > 0.8
    names = [row["name"] for row in figures["variants"]]
    assert {"head in float32", "both in float32", "prompts without the chat template"} <= set(names)
    assert figures["left_out"] == []


def test_next_token_layers_of_a_model(target: Decoder, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model", "llama", seed=3, num_hidden_layers=4)
    norms = dict.fromkeys(("first_input_norm", "final_norm", "fc_input_norms", "norm_output"), True)
    layers = dataclasses.replace(target.spec, layers=target.spec.layers[:1])
    spec, weights, _ = trained_eagle(target, TEXTS[:1], 1, steps=1, layers=layers, **norms)
    add_next_token_layer(folder, spec, weights)
    of = subject(str(folder), str(folder))
    assert of.kind == "mtp"
    figures = diagnose(of, Texts(PROMPTS[:2], None, "no texts"), ENGINE, depth=2, max_tokens=8)
    assert figures["hidden_layers"] == [3]
    assert "training" in named(figures)  # of one step


# --- findings ---------------------------------------------------------------------------------------------------------


def replayed(accepted: list[int], depth: int = 2) -> Replay:
    """Drafts of tokens 1, 2, ... of an answer 1, 2, ... as far as they are accepted, else 0."""
    truth = list(range(1, depth + 2))
    drafted = [[*truth[:each], *[0] * (depth - each)] for each in accepted]
    size = len(accepted)
    return Replay(depth, list(accepted), [depth] * size, drafted, [truth] * size, [0] * size)


def test_a_gain_must_be_more_than_chance_and_worth_a_word() -> None:
    assert faults.is_gain(0.4, 0.1, 1.0)
    assert not faults.is_gain(0.4, 0.2, 1.0)
    assert not faults.is_gain(0.04, 0.001, 0.1)
    assert not faults.is_gain(0.09, 0.001, 1.0)


def test_rounding_and_template() -> None:
    worse, better = replayed([0, 1] * 100), replayed([2, 1] * 100)
    for whose in ("head", "target"):
        (found,) = faults.rounding(worse, better, whose)
        assert found.fault == f"rounding of the {whose}" and "1.00" in found.says
        assert faults.rounding(better, worse, whose) == faults.rounding(better, better, whose) == []
    (found,) = faults.template(worse, better)
    assert found.fault == "template"
    assert faults.template(better, worse) == []


def test_what_has_no_other_fault_has_learned_little() -> None:
    assert [each.fault for each in faults.learned(replayed([0] * 9 + [1]), [])] == ["training"]
    assert faults.learned(replayed([1, 1, 0]), []) == []
    assert faults.learned(replayed([0]), faults.other_target("a", "m", "b")) == []
    assert faults.other_target(None, None, "b") == faults.other_target("b", "m", "b") == []


def test_acceptance_by_depth_is_of_drafts_that_reach_it() -> None:
    found = replayed([2, 1, 0, 0])
    assert found.by_depth() == [0.5, 0.25]
    found.reach = [2, 1, 1, 1]
    assert found.by_depth() == [0.5, 1.0]
    allowed = np.array([[True, True], [False, True], [True, True], [False, False]])
    assert found.by_depth(allowed) == [0.5, 1.0]
    assert replayed([], 2).by_depth() == []
    gain, error = replayed([2, 2]).gain_over(replayed([0, 1]))
    assert (gain, error) == (1.5, pytest.approx(0.5 / 2**0.5))


def test_other_taps_are_of_the_target_and_none_is_the_head_s_own() -> None:
    found = [tuple(each.shown.layers.values()) for each in other_taps((1, 14, 26), 30)]
    assert {(0, 13, 25), (2, 15, 27), (26, 14, 1), (1, 15, 26), (14, 26, 1)} <= set(found)
    assert len(set(found)) == len(found) and (1, 14, 26) not in found
    assert all(0 <= layer < 4 for each in other_taps((0, 1, 3), 4) for layer in each.shown.layers.values())
    assert [tuple(each.shown.layers.values()) for each in other_taps((29,), 30)] == [(28,)]


# --- the command ------------------------------------------------------------------------------------------------------


def doctor(*words: str) -> int:
    return run(("doctor", *words))


def test_the_command_says_it_and_writes_json(
    target: Decoder, tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_head(tmp_path / "head", *bigram(target), None, Verifier("tiny", TargetOrigin(tiny).fingerprint()))
    (tmp_path / "text").write_text("The stone lies still. " * 9)
    flags = ("--head", str(tmp_path / "head"), "--dtype=float32", "--quantization=none", "--kv-cache-gib=0.02")
    out = tmp_path / "out.json"
    assert doctor(str(tiny), *flags, f"--text={tmp_path / 'text'}", "--num-speculative-tokens=2", f"--json={out}") == 0
    told = capsys.readouterr().out
    figures = json.loads(out.read_text())
    assert figures["num_speculative_tokens"] == 2
    for words in ("as served", "hidden states one place earlier", "Cost by phase", "cost: It ", "not compared: "):
        assert words in told


def test_texts_are_in_the_chat_template_and_without(tiny: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer(tiny)
    texts = texts_of(tokenizer, None)
    assert texts.raw is not None and len(texts.prompts) == len(texts.raw) == 12
    assert all(len(own) > len(raw) for own, raw in zip(texts.prompts, texts.raw, strict=True))
    (tmp_path / "text").write_text("The stone lies still. " * 99)
    assert {len(piece) for piece in texts_of(tokenizer, str(tmp_path / "text")).prompts} == {64}
    (tiny / "tokenizer_config.json").rename(tmp_path / "kept")
    try:
        texts = texts_of(Tokenizer(tiny), None)
    finally:
        (tmp_path / "kept").rename(tiny / "tokenizer_config.json")
    assert texts.raw is None and "no chat template" in texts.why_not


def test_what_is_wrong_is_told(target: Decoder, tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec, weights = bigram(target)
    write_head(tmp_path / "head", spec, weights, None, Verifier("tiny", ""))
    other = write_tiny_model(tmp_path / "other", "llama", num_hidden_layers=2)
    cases = {
        (str(tiny), "--head", str(tmp_path / "nosuch")): "There is no draft head",
        (str(tiny), "--head", str(tiny)): "holds no draft head that is known",
        (str(other), "--head", str(tmp_path / "head")): "The draft head was made for a target of 4 layers",
        (str(tiny), "--head", "x", "--tensor-parallel-size=2"): "leave out --port and the options of a layout",
        (str(tiny), "--text", "x"): "--text is what --head is replayed on",
        (str(tiny), "--head", str(tmp_path / "head"), "--text", "nosuch"): "The text in nosuch cannot be read",
    }
    for words, complaint in cases.items():
        assert doctor(*words) == 2
        told = capsys.readouterr()
        assert complaint in told.err, told.err
        assert told.out == ""
    with pytest.raises(ModelError, match="this one has 2"):
        subject(str(other), str(tmp_path / "head"))
    with pytest.raises(ConfigError, match="at least 1"):
        diagnose(subject(str(tiny), str(tmp_path / "head")), Texts(PROMPTS), ENGINE, depth=0)
