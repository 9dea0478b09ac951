"""Drafters by name: files, entry points, near misses, and options that are checked before anything is loaded."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

import specserve.drafters
from specserve import registry
from specserve.bench.drive import NoTarget
from specserve.errors import ConfigError
from specserve.registry import DRAFTERS
from specserve.speculation.lookup import prepare

NO_TARGET: Any = NoTarget()
VERBS = "".join(f"\n    def {verb}(self, *args): pass" for verb in DRAFTERS.parts)


def create(name: str, options: dict[str, Any]) -> Any:
    make = prepare(name, options)
    return None if make is None else make(NO_TARGET)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A further folder of drafters, as a checkout has beside the installed one."""
    monkeypatch.setattr(specserve.drafters, "__path__", [*specserve.drafters.__path__, str(tmp_path)])
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith("specserve.drafters."):
            del sys.modules[name]
            vars(specserve.drafters).pop(name.rpartition(".")[2], None)


def test_a_file_is_found_by_its_name() -> None:
    assert "ngram" in DRAFTERS.names()
    assert DRAFTERS.find("ngram").__name__ == "NgramDrafter"


def test_names_are_listed_without_importing(folder: Path) -> None:
    (folder / "broken.py").write_text("raise RuntimeError('imported')\n")
    (folder / "zoo").mkdir()
    (folder / "zoo" / "RECIPE.md").write_text("weights are no drafter\n")
    assert "broken" in DRAFTERS.names()
    assert "zoo" not in DRAFTERS.names()


def test_an_unknown_name_has_near_misses() -> None:
    with pytest.raises(ConfigError, match=r"Unknown drafter 'ngrm'\. Did you mean 'ngram'.*\? Known: .*ngram.*none"):
        prepare("ngrm", {})
    for name in ("../ngram", "ngram.NgramDrafter", ""):
        with pytest.raises(ConfigError, match="Unknown drafter"):
            DRAFTERS.find(name)


def test_a_new_file_is_a_drafter_at_once(folder: Path) -> None:
    text = "from specserve.drafters.ngram import NgramDrafter\nclass _HiddenDrafter: pass\nclass OtherDrafter:" + VERBS
    (folder / "other.py").write_text(text)
    assert DRAFTERS.find("other").__name__ == "OtherDrafter"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\n", r"exactly one public class named \.\.\.Drafter; it has none"),
        (f"class ADrafter:{VERBS}\nclass BDrafter:{VERBS}\n", "it has ADrafter, BDrafter"),
        ("class ADrafter:\n    def begin(self, seq): pass\n", "has no propose, observe, end"),
        ("import a_package_that_is_not_there\n", "needs the package 'a_package_that_is_not_there'"),
    ],
)
def test_a_file_that_is_no_drafter_says_why(folder: Path, text: str, message: str) -> None:
    (folder / "wrong.py").write_text(text)
    with pytest.raises(ConfigError, match=message):
        DRAFTERS.find("wrong")


def test_entry_points_come_after_files(monkeypatch: pytest.MonkeyPatch) -> None:
    points = {
        "ngram": EntryPoint("ngram", "nowhere:Missing", DRAFTERS.package),
        "plugin": EntryPoint("plugin", "specserve.drafters.ngram:NgramDrafter", DRAFTERS.package),
        "nothing": EntryPoint("nothing", "builtins:dict", DRAFTERS.package),
    }
    monkeypatch.setattr(registry, "declared", lambda group: points.values() if group == DRAFTERS.package else [])
    assert {"ngram", "plugin"} <= set(DRAFTERS.names())
    assert DRAFTERS.find("plugin") is DRAFTERS.find("ngram")
    with pytest.raises(ConfigError, match="has no begin, propose, observe, end"):
        DRAFTERS.find("nothing")


def test_options_reach_the_drafter_and_unknown_ones_do_not() -> None:
    assert create("none", {}) is None
    drafter = create("ngram", {"prompt_lookup_max": 3, "prompt_lookup_min": 2})
    assert list(drafter._sizes) == [3, 2]
    with pytest.raises(ConfigError, match=r"'prompt_lookup_mxa'\. Did you mean 'prompt_lookup_max'"):
        create("ngram", {"prompt_lookup_mxa": 3})
    with pytest.raises(ConfigError, match="'none' and takes no options, got prompt_lookup_max"):
        create("none", {"prompt_lookup_max": 3})


def test_a_missing_option_is_named(folder: Path) -> None:
    (folder / "needy.py").write_text(
        f"class NeedyDrafter:\n    def __init__(self, context, model, **more): pass{VERBS}\n"
    )
    with pytest.raises(ConfigError, match=r"needs model\. Its options: model"):
        create("needy", {"anything": 1})
    assert create("needy", {"model": "m", "anything": 1}) is not None
