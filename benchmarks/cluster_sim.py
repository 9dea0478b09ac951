"""Simulates replicas under a virtual clock: the engine's own scheduler and prefix cache, with steps that take what was
measured, behind specserve's router, behind simpler rules, and behind an oracle that knows how long answers will be.

    python benchmarks/cluster_sim.py --replicas 1 8 64 --traffic conversations --rates 2 2.4

Rates are requests a second and replica. A request is good whose first token comes within --first-ms and whose others
take --token-ms each at most, on average; goodput is good requests a second and replica.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence as Many
from pathlib import Path
from typing import Any

import numpy as np
from simulation.costs import StepCosts
from simulation.forecast import Limits
from simulation.policies import POLICIES, make_policy
from simulation.replica import Shape
from simulation.run import Cluster, Death, Ended
from simulation.traffic import SHAPES, Call, Traffic

COSTS = Path(__file__).parent / "simulation" / "costs-smollm2-135m.json"
COLUMNS = ("goodput", "good", "of_oracle", "ttft_ms_p50", "ttft_ms_p99", "token_ms_p50", "cached", "busy", "failed")


def main() -> None:
    options = _parser().parse_args()
    costs = StepCosts.read(options.costs)
    shape = Shape(
        costs=costs,
        max_num_seqs=options.max_num_seqs,
        num_blocks=options.num_blocks,
        num_drafted=options.num_drafted,
        acceptance=options.acceptance,
    )
    limits = Limits(options.first_ms / 1e3, options.token_ms / 1e3)
    rows: list[dict[str, Any]] = []
    for num_replicas in options.replicas:
        for rate in options.rates:
            calls = _traffic(options, num_replicas, rate).calls(options.seed)
            found = [
                {
                    "replicas": num_replicas,
                    "rate": rate,
                    "policy": name,
                    **simulate(calls, name, shape, num_replicas, limits, options),
                }
                for name in options.policies
            ]
            _compare(found)
            rows += found
            print("\n".join(lines(found, first=len(rows) == len(found))), flush=True)
    if options.json is not None:
        told = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
        options.json.write_text(json.dumps({"options": told, "runs": rows}, indent=1) + "\n", "utf-8")


def simulate(
    calls: Many[Call], name: str, shape: Shape, num_replicas: int, limits: Limits, options: argparse.Namespace
) -> dict[str, Any]:
    """One policy's figures."""
    policy = make_policy(name, num_replicas, shape.block_size, limits)
    cluster = Cluster(shape, num_replicas, policy, options.seed)
    deaths = [] if options.dead_at is None else [Death(0, options.dead_at, options.dead_s)]
    begun = time.perf_counter()
    ended = cluster.run(calls, deaths)
    return {**figures(ended, cluster, limits), "wall_s": time.perf_counter() - begun}


def figures(ended: Many[Ended], cluster: Cluster, limits: Limits) -> dict[str, Any]:
    """Of all calls. Goodput counts by the time in which they came, which is the same for all policies."""
    came_s = max(each.call.arrives for each in ended)
    num_replicas = len(cluster.replicas)
    num_good = sum(each.is_good(limits) for each in ended)
    done = [each for each in ended if each.first_s is not None and each.last_s is not None]
    first_ms = [1e3 * (each.first_s - each.call.arrives) for each in done if each.first_s is not None]
    token_ms = [
        1e3 * (each.last_s - each.first_s) / (each.call.num_output - 1)
        for each in done
        if each.first_s is not None and each.last_s is not None and each.call.num_output > 1
    ]
    prompt = sum(each.num_prompt_tokens for each in cluster.replicas)
    return {
        "goodput": num_good / came_s / num_replicas,
        "good": num_good / len(ended),
        "ttft_ms_p50": _percentile(first_ms, 50),
        "ttft_ms_p99": _percentile(first_ms, 99),
        "token_ms_p50": _percentile(token_ms, 50),
        "token_ms_p99": _percentile(token_ms, 99),
        "cached": sum(each.num_cached_tokens for each in cluster.replicas) / max(1, prompt),
        "busy": sum(each.busy_s for each in cluster.replicas)
        / num_replicas
        / max(came_s, *(e.last_s or 0.0 for e in ended)),
        "failed": len(ended) - len(done),
        "requests": len(ended),
    }


def lines(found: Many[dict[str, Any]], first: bool) -> list[str]:
    """A table of Markdown; with a heading where it is the first."""
    heading = ["replicas", "rate", "policy", *COLUMNS]
    rows = [f"| {' | '.join(heading)} |", "|" + "---|" * len(heading)] if first else []
    return rows + ["| " + " | ".join(_shown(each.get(name)) for name in heading) + " |" for each in found]


def _shown(value: object) -> str:
    return "" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)


def _compare(found: Many[dict[str, Any]]) -> None:
    oracle = next((each["goodput"] for each in found if each["policy"] == "oracle"), None)
    for each in found:
        each["of_oracle"] = each["goodput"] / oracle if oracle else None


def _percentile(values: Many[float], percent: int) -> float:
    return float(np.percentile(values, percent)) if values else 0.0


def _traffic(options: argparse.Namespace, num_replicas: int, rate: float) -> Traffic:
    return Traffic(
        shape=options.traffic,
        num_calls=options.calls * num_replicas,
        rate=rate * num_replicas,
        num_prompt=options.num_prompt,
        num_output=options.num_output,
        num_tenants=options.tenants,
        num_system=options.num_system,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--replicas", type=int, nargs="+", default=[1, 8, 64])
    add("--policies", nargs="+", choices=(*POLICIES, "all-to-one"), default=list(POLICIES))
    add("--traffic", choices=SHAPES, default="conversations")
    add("--rates", type=float, nargs="+", default=[2.0], help="requests a second and replica")
    add("--calls", type=int, default=100, help="requests for each replica")
    add("--num-prompt", type=int, default=48, help="median tokens of a prompt, of a conversation's turn")
    add("--num-output", type=int, default=64, help="median tokens of an answer")
    add("--tenants", type=int, default=32, help="of conversations; each begins them with a system prompt")
    add("--num-system", type=int, default=256, help="tokens of a system prompt")
    add("--first-ms", type=float, default=2000.0, help="most until the first token")
    add("--token-ms", type=float, default=100.0, help="most for each further token, on average")
    add("--dead-at", type=float, help="second at which the first replica dies")
    add("--dead-s", type=float, default=10.0, help="seconds until it is back")
    add("--max-num-seqs", type=int, default=16)
    add("--num-blocks", type=int, default=4096, help="of 16 tokens, of each replica's KV cache")
    add("--num-drafted", type=int, default=0, help="tokens of each draft")
    add("--acceptance", type=float, default=0.6, help="of a drafted token, if the one before it was accepted")
    add("--costs", type=Path, default=COSTS, help="a table that simulation/measure.py has written")
    add("--seed", type=int, default=0)
    add("--json", type=Path)
    return parser


if __name__ == "__main__":
    main()
