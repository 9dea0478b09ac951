"""specserve against other engines, on the same prompts as token ids, greedy, with the same number of threads: each
plain and with its own speculation, in turns. Prints a table a number of streams and writes JSON; progress is on stderr.

    benchmarks/peers/setup.sh                          # once: the engines, into $SPECSERVE_PEERS (default: .peers)
    python benchmarks/peers/compare.py --peers transformers,llamacpp,llamacpp:q4_0,vllm,openvino \\
        --prompts specbench-dev.jsonl --limit 9 --max-tokens 128 --repeats 5 --streams 1,16 --json result.json

An engine is PEER or PEER:WEIGHTS, specserve among them (--peers specserve:f32). All weights hold the same numbers:
those of the model's GGUF file, rounded again to each format. `--set specserve.http` runs `specserve serve` and asks it
over HTTP, as llama.cpp is asked, with `--set specserve.replicas=2` of two engines that share the threads; without
specserve.http it runs in its runner's process, as the others do. Prefix caches are off; before every repeat each engine
forgets what earlier requests taught its drafter. Engines that wait are stopped, so that none takes another's cores.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from measure import Contender, Figures, Work, measure
from rich.console import Console
from runners import Runner, RunnerError
from tables import scenario, table
from weights import gguf
from wire import Options, Setup

from specserve.bench.prompts import load_prompts, spread
from specserve.checkpoint import catalog
from specserve.config import DEFAULT_MODEL
from specserve.errors import SpecserveError
from specserve.text.tokenizer import Tokenizer
from specserve.train.writing import prompt_ids

WEIGHTS = {"specserve": "bf16", "transformers": "bf16", "llamacpp": "q8_0", "vllm": "bf16", "openvino": "q8_0"}
READS_GGUF = ("llamacpp", "openvino")
WARM_UP = "Tell me about the sea."
NUM_PREFILLS = 3
ROOT = Path(__file__).resolve().parents[2]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="catalog name, Hugging Face folder or .gguf file")
    parser.add_argument("--gguf", type=Path, help="GGUF file of the model [default: the catalog's]")
    parser.add_argument(
        "--peers", type=_names, default="transformers,llamacpp,vllm,openvino", help="PEER[:WEIGHTS],..."
    )
    parser.add_argument(
        "--specserve", default=WEIGHTS["specserve"], help="specserve's weights: a dtype or quantization"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="PEER.OPTION=VALUE",
        help="an engine's own option; may be repeated",
    )
    parser.add_argument("--prompts", default="demo", help="JSON lines, or demo")
    parser.add_argument("--limit", type=_count, default=9, help="prompts, rounded up to whole groups of streams")
    parser.add_argument("--max-tokens", type=_count, default=128, help="new tokens of each prompt")
    parser.add_argument(
        "--stop-at-end", action="store_true", help="stop at the model's end token, not only at the most"
    )
    parser.add_argument("--repeats", type=_count, default=5)
    parser.add_argument("--streams", type=_counts, default="1,16", help="prompts at once, each in turn")
    parser.add_argument("--threads", type=_count, default=2, help="of every engine")
    parser.add_argument("--context", type=_count, default=2048, help="tokens; longer prompts are left out")
    parser.add_argument("--prefill", type=int, default=512, help="prompt tokens of the prefill measurement, 0 for none")
    parser.add_argument("--timeout", type=float, default=900, help="seconds an engine may take to start or to answer")
    parser.add_argument("--json", type=Path, help="write the figures here")
    return parser.parse_args()


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _counts(text: str) -> list[int]:
    return [_count(part) for part in text.split(",")]


def contenders(options: argparse.Namespace) -> list[Contender]:
    """specserve first, then the peers as they were named, each plain and with speculation."""
    found: list[Contender] = []
    for name in dict.fromkeys([f"specserve:{options.specserve}", *options.peers]):
        peer, _, weights = name.partition(":")
        if peer not in WEIGHTS:
            raise SystemExit(f"Unknown peer {peer!r}. Known: {', '.join(WEIGHTS)}.")
        found += [Contender(peer, weights or WEIGHTS[peer], speculation) for speculation in (False, True)]
    return list(dict.fromkeys(found))


def peer_options(settings: list[str]) -> dict[str, Options]:
    """--set PEER.OPTION=VALUE as {peer: {option: value}}; a flag without a value has the empty one."""
    found: dict[str, Options] = {peer: {} for peer in WEIGHTS}
    for setting in settings:
        key, _, value = setting.partition("=")
        peer, _, option = key.partition(".")
        if peer not in found or not option:
            raise SystemExit(f"--set {setting}: give PEER.OPTION=VALUE with one of {', '.join(WEIGHTS)}.")
        found[peer][option] = value
    return found


class Comparison:
    """The engines of one command line, and the prompts as token ids."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.home = Path(os.environ.get("SPECSERVE_PEERS") or ROOT / ".peers").resolve()
        self.folder = catalog.resolve(options.model)
        self.contenders = contenders(options)
        self.peer_options = peer_options(options.set)
        self.tokenizer = Tokenizer(self.folder)
        self.prompts = load_prompts(options.prompts)
        self.logs = self.home / "logs"
        self.logs.mkdir(parents=True, exist_ok=True)

    def run(self, streams: int) -> dict[str, Any]:
        """Start all engines for this many streams, measure them, end them. Raises RunnerError."""
        work = self.work(streams)
        with ExitStack() as stack:
            figures: list[Figures] = []
            unsupported: dict[Contender, str] = {}
            for contender in self.contenders:
                runner = stack.enter_context(self.start(contender, streams))
                if runner.unsupported is None:
                    figures.append(Figures(contender, runner))
                else:
                    unsupported[contender] = runner.unsupported
                    say(f"{contender} is left out: {runner.unsupported}")
            measure(figures, work, lambda turn: say(f"{streams} at once, {turn}"))
            result: dict[str, Any] = scenario(streams, figures, unsupported, self.contenders[0].engine)
        return result

    def start(self, contender: Contender, streams: int) -> Runner:
        options = self.options
        reads_gguf = contender.peer in READS_GGUF
        source = options.gguf or (Path(options.model) if options.model.endswith(".gguf") else None)
        file = gguf(options.model, contender.weights, self.home, source) if reads_gguf else None
        setup = Setup(
            model=str(catalog.as_safetensors(self.folder, self.home / "safetensors" / self.folder.name)),
            weights=contender.weights,
            gguf=str(file) if file else None,
            home=str(self.home),
            threads=options.threads,
            streams=streams,
            context=options.context,
            speculation=contender.speculation,
            options=self.peer_options[contender.peer],
        )
        log = self.logs / f"{contender}, {streams}.log".replace(" ", "-").replace(",", "")
        say(f"starting {contender}")
        runner = Runner(contender.peer, setup, log, options.timeout)
        say(f"{contender} was there after {runner.ready_s:.1f} s")
        return runner

    def work(self, streams: int) -> Work:
        """The prompts in groups of `streams`, as many as the limit asks for and the file has."""
        options = self.options
        encoded = {prompt: self.encode(prompt.text) for prompt in self.prompts}
        fitting = [p for p in self.prompts if len(encoded[p]) + options.max_tokens <= options.context]
        groups = min(-(-options.limit // streams), len(fitting) // streams)
        if not groups:
            raise SystemExit(f"{streams} streams need that many prompts; {len(fitting)} of {options.prompts} fit.")
        chosen = [encoded[prompt] for prompt in spread(fitting, groups * streams)]
        text = [token for ids in encoded.values() for token in ids]
        return Work(
            groups=[chosen[start : start + streams] for start in range(0, len(chosen), streams)],
            prefill=pieces(text, options.prefill, NUM_PREFILLS) if streams == 1 and options.prefill > 0 else [],
            warm_up=[self.encode(WARM_UP)] * streams,
            max_tokens=options.max_tokens,
            ignore_eos=not options.stop_at_end,
            repeats=options.repeats,
        )

    def encode(self, text: str) -> list[int]:
        """A user's message; of a model without a chat template the text itself."""
        return prompt_ids(self.tokenizer, text)


def pieces(text: list[int], size: int, count: int) -> list[list[int]]:
    """`count` pieces of `size` tokens, one after the other; a text that is too short begins again."""
    return [[text[(start + offset) % len(text)] for offset in range(size)] for start in range(0, size * count, size)]


def say(message: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {message}", file=sys.stderr, flush=True)


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """What was asked for, and of which machine."""
    names = ("peers", "set", "limit", "max_tokens", "stop_at_end", "repeats", "threads", "context", "prefill")
    asked = {name: getattr(options, name) for name in names}
    files = {name: Path(getattr(options, name)).name for name in ("model", "prompts")}
    machine = {"system": platform.platform(), "cores": os.cpu_count(), "load_before": os.getloadavg()[0]}
    return {**files, **asked, "machine": machine}


def main() -> None:
    options = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the engines are ended on the way out
    figures = settings(options) | {"scenarios": []}
    try:
        comparison = Comparison(options)
        for streams in options.streams:
            figures["scenarios"].append(comparison.run(streams))
            Console(width=110).print(table(figures["scenarios"][-1]))
            if options.json is not None:
                options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    except (RunnerError, SpecserveError) as error:
        raise SystemExit(str(error)) from error


if __name__ == "__main__":
    main()
