"""Prompt sets: what is read, what is refused, and an even pick."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from specserve.bench.prompts import Prompt, load_prompts, spread
from specserve.errors import ConfigError, InputError


def test_the_bundled_set_has_all_kinds() -> None:
    prompts = load_prompts()
    assert Counter(prompt.category for prompt in prompts) == dict.fromkeys(
        ("summarization", "rag", "translation", "coding", "chat", "math"), 2
    )
    assert len({prompt.text for prompt in prompts}) == len(prompts)


def test_prompts_and_first_turns_are_read(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    lines = [{"prompt": "a", "category": "x", "id": 7}, {"turns": ["b", "c"]}]
    path.write_text("\n\n".join(json.dumps(line) for line in lines) + "\n")
    assert load_prompts(str(path)) == [Prompt("a", "x"), Prompt("b", "all")]


@pytest.mark.parametrize(
    "line", ["{", "[]", "{}", '{"prompt": 3}', '{"prompt": ""}', '{"turns": []}', '{"turns": "abc"}']
)
def test_bad_lines_are_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line + "\n")
    with pytest.raises(InputError, match="line 2"):
        load_prompts(str(path))


def test_files_without_prompts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.jsonl"):
        load_prompts(str(tmp_path / "none.jsonl"))
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(InputError, match="no prompts"):
        load_prompts(str(tmp_path / "empty.jsonl"))
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"binary\.jsonl"):
        load_prompts(str(tmp_path / "binary.jsonl"))


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=30), st.integers(1, 40))
def test_spread_is_even_ordered_and_the_same_every_time(categories: list[str], limit: int) -> None:
    prompts = [Prompt(str(index), category) for index, category in enumerate(categories)]
    chosen = spread(prompts, limit)
    assert chosen == spread(prompts, limit)
    assert len(chosen) == min(limit, len(prompts))
    assert chosen == [prompt for prompt in prompts if prompt in chosen]
    sizes, taken = Counter(categories), Counter(prompt.category for prompt in chosen)
    short = [taken[name] for name in sizes if taken[name] < sizes[name]]  # categories with prompts left over
    assert all(max(taken.values()) <= count + 1 for count in short)


def test_spread_reaches_over_a_category() -> None:
    prompts = [Prompt(str(index), "x") for index in range(10)]
    assert [prompt.text for prompt in spread(prompts, 2)] == ["0", "5"]
    assert spread(prompts, None) == prompts
    with pytest.raises(ConfigError, match="limit is 0"):
        spread(prompts, 0)
