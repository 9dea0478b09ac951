"""Training that begins with a head."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specserve.errors import ConfigError, ModelError
from specserve.models.heads.formats import read_head, write_head
from specserve.models.heads.spec import BlockSpec
from specserve.models.heads.speculators import Verifier
from specserve.train.config import TrainingOptions
from specserve.train.run import train

Make = Callable[..., TrainingOptions]
STILL = 1e-9  # a learning rate with which nothing moves


def quiet(line: str) -> None: ...


@pytest.fixture
def run(tiny: Path, engine: dict[str, Any]) -> Callable[[str, TrainingOptions], dict[str, Any]]:
    return lambda kind, chosen: train(kind, str(tiny), engine, chosen, quiet)


@pytest.mark.parametrize(("kind", "int8"), [("eagle", False), ("block", True), ("medusa", False)])
def test_it_goes_on_where_the_head_was(run: Any, options: Make, tmp_path: Path, kind: str, int8: bool) -> None:
    """With other text: what it proposes from and its weights are the first head's, and both recipes are kept."""
    first = options(out=tmp_path / "first", int8=int8, epochs=1.0, draft_vocab_size=120)
    run(kind, first)
    begun = {"init_from": str(first.out), "draft_vocab_size": 120, "seed": 7, "epochs": 1.0}
    chosen = options(out=tmp_path / "second", learning_rate=STILL, **begun)
    run(kind, chosen)
    old, new = read_head(first.out), read_head(chosen.out)
    assert torch.equal(old.d2t, new.d2t)
    for name, tensor in new.weights.items():
        if name != "lm_head.weight" or not int8:
            torch.testing.assert_close(tensor, old.weights[name], atol=1e-6, rtol=0)
    recipe = (chosen.out / "RECIPE.md").read_text()
    assert recipe.count("# Initial head") == 1
    assert recipe.endswith((first.out / "RECIPE.md").read_text().removeprefix("# Recipe\n\n"))
    moved = options(out=tmp_path / "third", text=chosen.out / "text", learning_rate=0.01, **begun)
    run(kind, moved)
    assert not torch.equal(*(read_head(folder).weights[_some_weight(kind)] for folder in (moved.out, chosen.out)))


def _some_weight(kind: str) -> str:
    return "0.0.linear.weight" if kind == "medusa" else "fc.weight"


def test_another_head_is_another_run(run: Any, options: Make, tmp_path: Path) -> None:
    for seed in (0, 1):
        run("medusa", options(out=tmp_path / f"head{seed}", seed=seed, epochs=1.0, draft_vocab_size=100))
    begun = options(out=tmp_path / "out", init_from=str(tmp_path / "head0"), draft_vocab_size=100)
    run("medusa", begun)
    run("medusa", begun)
    with pytest.raises(ConfigError, match=r"init_from was '[0-9a-f]{32}' and is now '[0-9a-f]{32}'"):
        run("medusa", replace(begun, init_from=str(tmp_path / "head1")))
    with pytest.raises(ConfigError, match=r"init_from was '[0-9a-f]{32}' and is now None"):
        run("medusa", replace(begun, init_from=None))


def test_options_that_ask_for_another_head(run: Any, options: Make, tmp_path: Path) -> None:
    """Before any text is written."""
    run("block", options(out=tmp_path / "first", epochs=1.0, draft_vocab_size=100, hidden_layers=(0, 1)))
    cases: list[tuple[dict[str, Any], str]] = [
        ({"layers": 2}, "layers.layers.count is 1, not 2"),
        ({"draft_vocab_size": 90}, "layers.vocab_size is 100, not 90"),
        ({"qk_norm": False}, "layers.layers.0.attention.head_norm is 'RmsNorm', not None"),
        ({"depth": 4}, "block_size is 3, not 4"),
        ({"hidden_layers": (0,)}, "hidden_layers is (0, 1), not (0,)"),
        ({"anchor_inputs": False}, "has_anchor_inputs is True, not False"),
        ({"bigram_rank": 0, "causal": True}, "is_causal is False, not True; bigram_rank is 8, not 0"),
    ]
    for own, message in cases:
        begun = {"draft_vocab_size": 100, "hidden_layers": (0, 1), **own}
        chosen = options(out=tmp_path / "out", init_from=str(tmp_path / "first"), **begun)
        with pytest.raises(ConfigError, match=re.escape(message)):
            run("block", chosen)
        assert not chosen.out.exists()


def test_what_is_no_head_or_of_another_kind(run: Any, options: Make, tmp_path: Path, tiny: Path) -> None:
    run("eagle", options(out=tmp_path / "first", epochs=1.0))
    with pytest.raises(ConfigError, match="a head of kind 'eagle', for train eagle"):
        run("block", options(out=tmp_path / "out", init_from=str(tmp_path / "first")))
    with pytest.raises(ModelError, match="There is no draft head"):
        run("block", options(out=tmp_path / "out", init_from=str(tmp_path / "none")))
    with pytest.raises(ModelError, match="no draft head that is known"):
        run("block", options(out=tmp_path / "out", init_from=str(tiny)))


def test_a_head_with_an_lm_head_and_a_mask_of_its_own(run: Any, options: Make, tmp_path: Path) -> None:
    """As published ones have; the LM head stays what it is and is stored, also with --int8. One that is the target's
    in bfloat16 becomes the target's."""
    run("block", options(out=tmp_path / "first", epochs=1.0))
    found = read_head(tmp_path / "first")
    assert isinstance(found.spec, BlockSpec)
    spec = replace(found.spec, mask_token_id=0)
    own = {**found.weights, "lm_head.weight": found.weights["lm_head.weight"].flip(0)}
    rounded = {**found.weights, "lm_head.weight": found.weights["lm_head.weight"].bfloat16()}
    for name, weights in (("own", own), ("rounded", rounded)):
        write_head(tmp_path / name, spec, weights, found.d2t, Verifier("other", None))
        out = tmp_path / f"on-{name}"
        text = tmp_path / "first/text"
        run("block", options(out=out, text=text, init_from=str(tmp_path / name), learning_rate=STILL, int8=True))
        trained = read_head(out)
        assert isinstance(trained.spec, BlockSpec)
        assert trained.spec.mask_token_id == 0
        assert (trained.spec.has_head, trained.spec.shares_head) == ((True, False) if name == "own" else (False, True))
    kept = read_head(tmp_path / "on-own").weights["lm_head.weight"]
    torch.testing.assert_close(kept, own["lm_head.weight"].float(), atol=0.01, rtol=0.02)
