"""What `--share` runs of the slow tests."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SLOW = (ROOT / "tests" / "slow.txt").read_text("utf-8").split()
SOME = "tests/bench/test_serve.py"  # a slow test among others


def collected(*options: str) -> list[str]:
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", *options, SOME]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=200).stdout
    return [line for line in said.splitlines() if "::" in line]


def is_slow(test: str) -> bool:
    return test.partition("::")[0] in SLOW or test.partition("[")[0] in SLOW


def test_each_slow_test_is_in_one_share_and_others_in_all() -> None:
    everything = collected()
    shares = [collected(f"--share={number}/2") for number in range(2)]
    slow = [test for share in shares for test in share if is_slow(test)]
    assert sorted(slow) == sorted(filter(is_slow, everything))
    for share in shares:
        assert [test for test in share if not is_slow(test)] == [test for test in everything if not is_slow(test)]
        assert abs(sum(map(is_slow, share)) - len(slow) / 2) < 1


def test_what_is_no_share_is_refused() -> None:
    with pytest.raises(subprocess.CalledProcessError) as found:
        collected("--share=3/3")
    assert "is no share: I/N" in found.value.stderr


def test_slow_tests_exist_and_are_named_once() -> None:
    assert sorted(set(SLOW)) == SLOW
    for entry in SLOW:
        file, _, name = entry.partition("::")
        assert not name or file not in SLOW, f"{entry}: all of its file is slow"
        source = ast.parse((ROOT / file).read_text("utf-8"))
        found = {node.name for node in ast.walk(source) if isinstance(node, ast.FunctionDef)}
        assert not name or name in found, entry
