"""Draws what compare.py measured: tokens a second of each engine, plain and with its own speculation, as bars.

python benchmarks/peers/bars.py result.json docs/peers.svg
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specserve.bench.plot import check_plot
from specserve.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {False: "#b9c4cf", True: "#2f7fb8"}  # plain, with speculation
NAMES = {False: "plain decoding", True: "its own speculation"}
INCHES = (7.5, 0.52)  # the width of the figure, and the height of an engine


def draw(path: Path, figures: Mapping[str, Any]) -> None:
    """One group of bars for each number of streams; whiskers reach from the least to the most of all repeats."""
    import matplotlib
    from matplotlib.figure import Figure

    scenarios = figures["scenarios"]
    heights = [len({run["engine"] for run in each["runs"] if _is_measured(run)}) for each in scenarios]
    size = INCHES[0], INCHES[1] * sum(heights) + 0.9 * len(scenarios) + 0.4
    figure = Figure(figsize=size, layout="constrained")
    found = figure.subplots(len(scenarios), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, each in zip(found, scenarios, strict=True):
        _bars(axes, each)
    found[-1].set_xlabel(f"tokens a second, prompts included; {figures['model']}, {figures['threads']} threads")
    found[0].legend(loc="lower right", frameon=False, fontsize=9)
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "specserve"}):
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _is_measured(run: Mapping[str, Any]) -> bool:
    return "tokens_per_second" in run


def _bars(axes: Axes, scenario: Mapping[str, Any]) -> None:
    runs = [run for run in scenario["runs"] if _is_measured(run)]
    engines = list(dict.fromkeys(run["engine"] for run in runs))
    for speculation in (False, True):
        own = [run for run in runs if run["speculation"] is speculation]
        places = [engines.index(run["engine"]) + (0.2 if speculation else -0.2) for run in own]
        rates = [run["tokens_per_second"] for run in own]
        repeats = [run["tokens_per_second_by_repeat"] for run in own]
        spread = [
            [rate - min(all_) for rate, all_ in zip(rates, repeats, strict=True)],
            [max(all_) - rate for rate, all_ in zip(rates, repeats, strict=True)],
        ]
        whiskers = {"ecolor": "#555555", "elinewidth": 0.8}
        axes.barh(
            places, rates, 0.36, xerr=spread, color=COLOURS[speculation], error_kw=whiskers, label=NAMES[speculation]
        )
        for place, rate in zip(places, rates, strict=True):
            axes.text(rate * 0.02, place, f"{rate:.0f}", va="center", fontsize=9, color="#111111")
    axes.set_yticks(range(len(engines)), labels=engines)
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    streams = scenario["streams"]
    axes.set_title(f"{streams} stream{'s' * (streams > 1)}", loc="left", fontsize=10, fontweight="bold")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path, help="what compare.py --json wrote")
    parser.add_argument("plot", type=Path, help="FILE.svg, .png or .pdf")
    options = parser.parse_args()
    try:
        check_plot(options.plot)
        figures = json.loads(options.result.read_text(encoding="utf-8"))
        draw(options.plot, figures)
    except (OSError, ValueError, KeyError, ConfigError) as error:
        raise SystemExit(f"{options.result} cannot be drawn: {type(error).__name__}: {error}") from error


if __name__ == "__main__":
    main()
