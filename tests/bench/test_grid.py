"""The grid: which cells there are, how turns are taken on one engine, and what is made of the figures."""

from __future__ import annotations

import io
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from rich.console import Console

from specserve.bench import grid as module
from specserve.bench.compare import Plan, Question, Reply
from specserve.bench.grid import Group, cells, figures, groups, measure
from specserve.bench.heatmap import COLOURS, grid_tables, heat_map, worst_line
from specserve.cli.main import run
from specserve.errors import ConfigError, EngineError, InputError
from specserve.llm import LLM
from specserve.runtime.executor import local
from specserve.testing import write_tiny_model
from specserve.types import SamplingParams, SequenceStats

CATEGORIES = ["a", "b", "a", "a", "b", "a", "b", "a"]
# Each begins otherwise, so that no prompt finds another's prefix, and repeats itself, so that n-grams draft.
QUESTIONS = [Question([i + 5, 40, 41, 42, 43] * 5, category) for i, category in enumerate(CATEGORIES)]
SVG = "{http://www.w3.org/2000/svg}"
PARAMS = SamplingParams(max_tokens=12, seed=3, ignore_eos=True)
SMALL = ("--dtype", "float32", "--kv-cache-gib", "0.01", "--max-model-len", "1024", "--threads", "1")
CELL = {
    *("category", "concurrency", "temperature", "drafter", "ratio", "tokens_per_step"),
    *("spread", "seconds", "plain_seconds", "prompts", "repeats"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model", "llama")


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    options: dict[str, Any] = {
        "dtype": "float32",
        "kv_cache_gib": 0.02,
        "max_model_len": 512,
        "threads": 1,
        "adaptive": False,
    }
    with LLM(str(folder), max_num_seqs=4, **options) as made:
        yield made


def plan(*drafters: str, **changes: Any) -> Plan:
    return Plan(drafters=drafters, params=PARAMS, **changes)


def small(*drafters: str, repeats: int = 1, concurrency: tuple[int, ...] = (1, 2)) -> list[Group]:
    return groups(CATEGORIES, ["all"], plan(*drafters, repeats=repeats), concurrency, [0.0, 1.0], 3)


# --- which cells there are --------------------------------------------------------------------------------------------


def test_there_is_a_group_for_every_combination() -> None:
    made = groups(CATEGORIES, ["b", "a"], plan("ngram", repeats=2), [1, 3], [0.0, 1.0], 2)
    found = [(each.category, each.plan.concurrency, each.plan.params.temperature) for each in made]
    assert found == [(c, n, t) for c in "ba" for n in (1, 3) for t in (0.0, 1.0)]
    assert {each.plan.repeats for each in made} == {2}
    assert {replace(each.plan.params, temperature=1.0) for each in made} == {replace(PARAMS, temperature=1.0)}


def test_a_group_has_as_many_prompts_as_asked_for_and_as_run_at_once() -> None:
    made = groups(CATEGORIES, ["a", "b"], plan("ngram"), [1, 3], [0.0], 2)
    assert [each.prompts for each in made] == [[0, 3], [0, 2, 5], [1, 4], [1, 4, 6]]
    assert groups(CATEGORIES, ["b"], plan("ngram"), [1], [0.0], 9)[0].prompts == [1, 4, 6]


def test_all_is_every_category_and_what_is_named_twice_is_measured_once() -> None:
    assert [each.category for each in groups(CATEGORIES, ["all"], plan("x"), [1, 1], [0.0, 0.0], 1)] == ["a", "b"]
    assert len(groups(CATEGORIES, ["a", "a"], plan("x"), [1], [0.0], 1)) == 1


@pytest.mark.parametrize(
    ("changes", "error", "complaint"),
    [
        ({"chosen": ["maths"]}, ConfigError, "Unknown category 'maths'. Did you mean 'math'"),
        ({"concurrency": [1, 3]}, ConfigError, "'qa' has 2 prompts, too few to run 3 at once"),
        ({"concurrency": [0]}, ConfigError, "concurrency is 0"),
        ({"concurrency": []}, ConfigError, "at least one"),
        ({"temperature": []}, ConfigError, "at least one"),
        ({"temperature": [-1.0]}, InputError, "temperature is -1.0"),
        ({"plan": plan("none")}, ConfigError, "at least one drafter"),
    ],
)
def test_grids_that_cannot_be(changes: dict[str, Any], error: type[Exception], complaint: str) -> None:
    asked: dict[str, Any] = {"chosen": ["all"], "plan": plan("ngram"), "concurrency": [1], "temperature": [0.0]}
    with pytest.raises(error, match=complaint):
        groups(["math", "qa", "math", "qa", "math"], **asked | changes, limit=1)


# --- taking turns -----------------------------------------------------------------------------------------------------


def test_all_contenders_take_turns_in_an_order_drawn_anew(llm: LLM) -> None:
    turns: list[tuple[Any, ...]] = []
    used: list[str] = []

    def on_turn(group: Group, name: str) -> None:
        turns.append((str(group), name))

    def on_repeat(group: Group) -> None:
        used.extend({reply.stats.drafter for replies, _ in group.repeats[-1].values() for reply in replies})

    made = small("ngram", "suffix", repeats=3)
    measure(llm, QUESTIONS, made, on_turn, on_repeat)
    assert all(count == 3 for count in Counter(turns).values())
    assert len(set(turns)) == len(made) * 3
    rounds = [turns[i : i + 3] for i in range(0, len(turns), 3)]
    assert all(len({group for group, _ in each}) == 1 and len({name for _, name in each}) == 3 for each in rounds)
    assert {each[0][1] for each in rounds} == {"none", "ngram", "suffix"}
    assert [each[0][0] for each in rounds] == [str(group) for group in made] * 3  # a repeat of all before the next
    assert Counter(used) == dict.fromkeys(("none", "ngram", "suffix"), len(made) * 3)


def test_all_do_the_same_work_and_none_finds_the_prefixes_of_another(llm: LLM) -> None:
    made = small("ngram", repeats=2)
    measure(llm, QUESTIONS, made)
    for taken in (taken for group in made for taken in group.repeats):
        for replies, seconds in taken.values():
            assert seconds > 0
            assert [len(reply.token_ids) for reply in replies] == [PARAMS.max_tokens] * 3
            assert [reply.stats.num_prefix_cached_tokens for reply in replies] == [0, 0, 0]
        assert all(reply.stats.num_draft_tokens == 0 for reply in taken["none"][0])
    assert any(reply.stats.num_draft_tokens for group in made for reply in group.repeats[0]["ngram"][0])


@pytest.mark.parametrize("concurrency", [1, 2, 3])
def test_the_next_prompt_begins_when_one_has_ended(llm: LLM, monkeypatch: pytest.MonkeyPatch, concurrency: int) -> None:
    scheduler, running, waited = llm.engine.scheduler, [], []
    pick = scheduler.pick

    def watched() -> Any:
        step = pick()
        if warm:
            running.append(len(scheduler.running))
            waited.append(len(scheduler.waiting))
        return step

    warm: list[bool] = []
    monkeypatch.setattr(scheduler, "pick", watched)
    made = groups(CATEGORIES, ["a"], plan("ngram"), [concurrency], [0.0], 5)
    measure(llm, QUESTIONS, made, lambda group, name: warm.append(True))
    assert max(running) == concurrency
    assert {at_once for at_once, waiting in zip(running, waited, strict=True) if waiting} == {concurrency}
    assert scheduler.max_num_seqs == 4


def test_cells_have_the_figures_of_every_group(llm: LLM) -> None:
    longer = replace(plan("ngram", "suffix", repeats=2), params=replace(PARAMS, max_tokens=30))  # so that drafts fit
    made = groups(CATEGORIES, ["all"], longer, [1, 2], [0.0, 1.0], 3)
    measure(llm, QUESTIONS, made)
    found = json.loads(json.dumps(figures(made, {"model": "tiny"})))
    assert set(found) == {"cells", "worst", "overall", "settings"}
    assert found["settings"] == {"model": "tiny", "complete": True}
    assert len(found["cells"]) == 2 * len(made)
    assert all(set(cell) == CELL for cell in found["cells"])
    assert found["worst"] in found["cells"]
    assert max(cell["tokens_per_step"] for cell in found["cells"]) > 1


def test_a_changed_output_ends_the_grid(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = local(llm.engine.executor)
    plain = executor.sampler

    class Wrong:
        """Says another token after every draft of the second half."""

        def __call__(self, logits: Any, asked: Any, *rest: Any) -> Any:
            said = plain(logits, asked, *rest)
            for each, verdict in zip(asked.seqs, said.results, strict=True):
                if len(each.draft) and each.params.temperature:
                    verdict.tokens[-1] = (verdict.tokens[-1] + 1) % llm.engine.limits.vocab_size
            return said

    monkeypatch.setattr(executor, "sampler", Wrong())
    made = small("ngram")
    with pytest.raises(EngineError, match=r"'ngram' changed an output \(a, 1 at once, temperature 1\)") as caught:
        measure(llm, QUESTIONS, made)
    assert "from token " in str(caught.value)
    assert [len(group.repeats) for group in made] == [1, 0, *([0] * 6)]
    assert llm.engine.scheduler.max_num_seqs == 4


def test_plain_decoding_that_depends_on_what_runs_at_once_is_noticed(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    take = module.take

    def drifting(llm: LLM, questions: Any, plan: Plan, turn: Any) -> Any:
        replies, wall = take(llm, questions, plan, turn)
        if plan.concurrency == 2:
            replies[1].token_ids[-1] += 1
        return replies, wall

    monkeypatch.setattr(module, "take", drifting)
    made = small("ngram")
    with pytest.raises(EngineError, match=r"'none' changed an output \(a, 2 at once, temperature 0\).*token 12 on"):
        measure(llm, QUESTIONS, made)
    assert [len(group.repeats) for group in made] == [1, 1, *([0] * 6)]


def test_an_interrupt_keeps_what_is_there(llm: LLM) -> None:
    made = small("ngram", repeats=2)
    left = iter(range(11))

    def on_turn(group: Group, name: str) -> None:
        if next(left, None) is None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure(llm, QUESTIONS, made, on_turn)
    assert [len(group.repeats) for group in made] == [1] * 5 + [0] * 3
    found = figures(made, {})
    assert len(found["cells"]) == 5
    assert not found["settings"]["complete"]


# --- figures ----------------------------------------------------------------------------------------------------------


def taken(accepted: int, **seconds: float) -> dict[str, tuple[list[Reply], float]]:
    """A repeat in which drafted requests took 4 steps."""
    return {
        name: (
            [Reply(0, 0, [1], "", SequenceStats(num_steps=4, num_accepted_tokens=accepted if name != "none" else 0))],
            spent,
        )
        for name, spent in seconds.items()
    }


@pytest.fixture
def grid() -> list[Group]:
    made = groups(["<&", "b"], ["all"], plan("x", "y", repeats=3), [1], [0.0, 0.5], 1)
    # A machine that is ten times slower in the second repeat: its ratio counts as much as that of the others.
    for accepted, seconds in ((4, (2, 1, 4)), (2, (20, 5, 80)), (6, (2, 2, 1))):
        made[0].repeats.append(taken(accepted, none=seconds[0], x=seconds[1], y=seconds[2]))
    for group in made[1:3]:
        group.repeats.append(taken(0, none=1, x=0.5, y=1))
    return made


def test_figures_by_hand(grid: list[Group]) -> None:
    found = figures(grid, {"model": "m"})
    first, second = found["cells"][:2]
    assert (first["category"], first["concurrency"], first["temperature"], first["drafter"]) == ("<&", 1, 0.0, "x")
    assert (first["ratio"], first["spread"]) == (2.0, [1.0, 4.0])
    assert (first["seconds"], first["plain_seconds"], first["repeats"], first["prompts"]) == (2, 2, 3, 1)
    assert first["tokens_per_step"] == 1 + (4 + 2 + 6) / 12
    assert (second["drafter"], second["ratio"], second["spread"]) == ("y", 0.5, [0.25, 2.0])
    assert found["worst"] == second
    assert found["overall"] == pytest.approx({"x": 2.0, "y": 0.5 ** (1 / 3)})
    assert found["settings"] == {"model": "m", "complete": False}
    assert len(found["cells"]) == 6  # the last group has no repeat
    assert list(cells(grid)) == found["cells"]


def printed(found: dict[str, Any]) -> str:
    console = Console(width=80, file=io.StringIO())
    for table in grid_tables(found):
        console.print(table)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_tables_have_a_row_a_category_and_name_the_worst(grid: list[Group]) -> None:
    found = figures(grid, {})
    text = printed(found)
    assert "x: 2.00x overall" in text
    assert "y: 0.79x overall" in text
    lines = [line.split() for line in text.splitlines()]
    assert lines.count(["category", "1", "T0", "1", "T0.5"]) == 2
    assert ["<&", "0.50", "1.00"] in lines
    assert ["b", "2.00"] in lines  # and nothing where nothing was measured
    assert worst_line(found) == "Worst cell: 0.50x, y on <&, 1 at once, temperature 0."


def test_tables_of_a_whole_grid_fit_a_terminal() -> None:
    made = groups(["math_reasoning"] * 32, ["all"], plan("x"), [1, 4, 16, 32], [0.0, 1.0], 1)
    for group in made:
        group.repeats.append(taken(1, none=10, x=0.9))
    text = printed(figures(made, {}))
    assert "…" not in text
    assert text.count("11.11") == 9


def test_the_picture_has_every_figure_where_it_belongs(grid: list[Group], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="Plots are an extra.")
    found = figures(grid, {})
    heat_map(tmp_path / "o.svg", found)
    texts = ["".join(element.itertext()) for element in ElementTree.parse(tmp_path / "o.svg").iter(f"{SVG}text")]
    shown = [text for text in texts if re.fullmatch(r"\d+\.\d\d", text)]
    assert Counter(shown) == Counter(f"{cell['ratio']:.2f}" for cell in found["cells"])
    assert texts.count("<&") == texts.count("b") == texts.count("1, 0.5") == 2
    assert [text for text in texts if "plain decoding" in text] == [
        "x: 2.00x plain decoding",
        "y: 0.79x plain decoding",
    ]
    assert worst_line(found) in texts


def test_colours_tell_faster_from_slower(tmp_path: Path) -> None:
    """What a cell is filled with, read back from the pixels of a picture."""
    image = pytest.importorskip("matplotlib.image", reason="Plots are an extra.")
    made = groups(["$a$", "b", "c"], ["all"], plan("x"), [1], [0.0], 1)
    for group, seconds in zip(made, (0.4, 1.0, 5.0), strict=True):
        group.repeats.append(taken(0, none=1, x=seconds))
    heat_map(tmp_path / "o.png", figures(made, {}))
    pixels = (image.imread(tmp_path / "o.png")[..., :3] * 255).round().astype(int).reshape(-1, 3)
    counts = Counter(map(tuple, pixels.tolist()))
    slow, even, fast = (tuple(bytes.fromhex(colour[1:])) for colour in COLOURS)
    areas = [sum(counts[near] for near in counts if max(map(abs, np.subtract(near, colour))) <= 2)
             for colour in (fast, even, slow)]  # fmt: skip
    assert min(areas) > 500
    assert max(areas) < 1.3 * min(areas), "one cell each"


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def grid_command(folder: Path, *flags: str) -> int:
    cheap = ("--limit", "2", "--max-tokens", "8", "--repeats", "1", "--concurrency", "1,2")
    return run(("bench", "grid", "--model", str(folder), *SMALL, "--prompts", "demo", *cheap, *flags))


def test_the_command_writes_figures_and_a_picture(here: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--drafter", "ngram,suffix", "--categories", "rag, math", "--json", "o.json", "--plot", "o.svg")
    status = grid_command(folder, *flags)
    out, err = capsys.readouterr()
    assert status == 0, err
    found = json.loads((here / "o.json").read_text())
    assert len(found["cells"]) == 2 * 2 * 2 * 2
    assert set(found["overall"]) == {"ngram", "suffix"}
    settings = found["settings"]
    assert (settings["model"], settings["max_tokens"], settings["complete"]) == (str(folder), 8, True)
    assert all(word in out for word in ("ngram: ", "suffix: ", "2 T1", "Worst cell: "))
    assert "1/1 rag, 2 at once, temperature 0: ngram " in err
    assert found["cells"][0]["category"] in (here / "o.svg").read_text()


def test_the_command_measures_drafters_that_run_a_model(here: Path, folder: Path) -> None:
    flags = ("--drafter", "ngram,draft_model", "--draft-model", str(folder), "--categories", "math")
    assert grid_command(folder, *flags, "--temperature", "0", "--no-adaptive", "--json", "o.json") == 0
    cells = json.loads((here / "o.json").read_text())["cells"]
    assert {cell["drafter"] for cell in cells} == {"ngram", "draft_model"}
    assert min(cell["tokens_per_step"] for cell in cells if cell["drafter"] == "draft_model") > 2.5, "its own target"


def test_the_command_prints_what_there_is_when_interrupted(
    here: Path, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    take, left = module.take, iter(range(5))

    def interrupted(*arguments: Any) -> Any:
        if next(left, None) is None:
            raise KeyboardInterrupt
        return take(*arguments)

    monkeypatch.setattr(module, "take", interrupted)
    assert grid_command(folder, "--json", "o.json") == 130
    found = json.loads((here / "o.json").read_text())
    assert len(found["cells"]) == 2
    assert not found["settings"]["complete"]
    assert "Worst cell" in capsys.readouterr().out


def test_the_command_says_nothing_when_interrupted_before_the_first_cell(
    here: Path, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "warm_up", interrupted)
    assert grid_command(folder, "--json", "o.json") == 130
    assert capsys.readouterr().out == ""
    assert not (here / "o.json").exists()


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (("--categories", "chatt"), "Did you mean 'chat'"),
        (("--drafter", "ngram,sufix"), "Did you mean 'suffix'"),
        (("--drafter", "none"), "at least one drafter"),
        (("--drafter", "ngram", "ngram"), "named twice"),
        (("--concurrency", "1,x"), '"x" is not a whole number'),
        (("--concurrency", "0"), "concurrency is 0"),
        (("--concurrency", "1,33"), "only max_num_seqs = 32"),
        (("--concurrency", "3"), "too few to run 3 at once"),
        (("--temperature", "0,hot"), "no list of numbers"),
        (("--temperature", "-1"), "temperature is -1"),
        (("--limit", "0"), "--limit"),
        (("--repeats", "0"), "--repeats"),
        (("--max-tokens", "0"), "--max-tokens"),
        (("--prompts", "none.jsonl"), "none.jsonl"),
        (("--json", "nowhere/o.json"), "no folder nowhere"),
        (("--plot", "o.gif"), "ends in .svg, .png, .pdf"),
        (("--model", "smollm-135m"), "Did you mean 'smollm2-135m'"),
        (("--verification", "block"), "--verification"),  # sampled texts would differ
    ],
)
@pytest.mark.usefixtures("here")
def test_errors_are_one_line_and_nothing_is_loaded(
    capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], complaint: str
) -> None:
    asked = {"--prompts": ("demo",), "--concurrency": ("1,2",), flags[0]: flags[1:]}
    status = run(("bench", "grid", *(word for name, values in asked.items() for word in (name, *values))))
    out, err = capsys.readouterr()
    assert (status, out) == (2, "")
    assert complaint in err
    assert err.count("\n") == 1


@pytest.mark.usefixtures("here")
def test_a_plot_needs_matplotlib_before_anything_is_loaded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run(("bench", "grid", "--model", "nowhere", "--prompts", "demo", "--plot", "o.svg")) == 2
    assert capsys.readouterr().err == "specserve: Plots need matplotlib. Install it: pip install 'specserve[plot]'.\n"


def test_the_real_model_says_the_same_in_every_cell(smollm2: Path, here: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "p.jsonl"
    texts = [f"Repeat after me, {n} times: the cat sat on the mat, and the cat sat still." for n in ("two", "three")]
    prompts.write_text("".join(json.dumps({"category": "c", "prompt": text}) + "\n" for text in texts), "utf-8")
    flags = ("--prompts", str(prompts), "--drafter", "ngram", "--concurrency", "1,2", "--max-tokens", "16")
    size = ("--repeats", "1", "--kv-cache-gib", "0.1", "--max-model-len", "512", "--json", "o.json")
    assert run(("bench", "grid", "--model", str(smollm2), *flags, *size)) == 0
    found = json.loads((here / "o.json").read_text())["cells"]
    assert len(found) == 2 * 2
    assert all(cell["tokens_per_step"] >= 1 for cell in found)
    assert max(cell["tokens_per_step"] for cell in found) > 1.1
