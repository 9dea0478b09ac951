"""The picture of a comparison with other engines."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")
BARS = Path(__file__).parents[2] / "benchmarks" / "peers" / "bars.py"


def run_of(engine: str, rates: list[float], *, speculation: bool) -> dict[str, Any]:
    middle = sorted(rates)[len(rates) // 2]
    more = {"tokens_per_second": middle, "tokens_per_second_by_repeat": rates}
    return {"engine": engine, "speculation": speculation} | more


RESULT = {
    "model": "a-model",
    "threads": 2,
    "scenarios": [
        {
            "streams": streams,
            "runs": [
                run_of("specserve int8", [101.0 * streams, 111.0, 120.0 * streams], speculation=False),
                run_of("specserve int8", [140.0, 143.0, 150.0], speculation=True),
                run_of("other q8_0", [60.0, 64.0, 66.0], speculation=False),
                {"engine": "other q8_0", "speculation": True, "unsupported": "no drafts"},
            ],
        }
        for streams in (1, 8)
    ],
}


def draw(result: Path, plot: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BARS), str(result), str(plot)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_bars_show_engines_modes_and_rates(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text(json.dumps(RESULT))
    for name in ("one.svg", "two.svg"):
        done = draw(tmp_path / "result.json", tmp_path / name)
        assert done.returncode == 0, done.stderr
    picture = (tmp_path / "one.svg").read_text()
    for text in ("specserve int8", "other q8_0", "1 stream", "8 streams", "143", "64", "plain decoding", "a-model"):
        assert text in picture
    assert picture == (tmp_path / "two.svg").read_text(), "the same figures are the same file"


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        ("{}", "plot.svg", "cannot be drawn: KeyError"),
        ("[", "plot.svg", "cannot be drawn: JSONDecodeError"),
        (json.dumps(RESULT), "plot.txt", "needs a name that ends in .svg"),
    ],
)
def test_what_cannot_be_drawn_ends_in_words(tmp_path: Path, text: str, name: str, message: str) -> None:
    (tmp_path / "result.json").write_text(text)
    done = draw(tmp_path / "result.json", tmp_path / name)
    assert done.returncode == 1
    assert message in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / name).exists()
