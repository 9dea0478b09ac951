"""`specserve top`: a running server in the terminal, from its GET /stats."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import termios
import tty
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Annotated, Any
from urllib.parse import urlsplit

import aiohttp
from cyclopts import Group, Parameter, validators
from rich.columns import Columns
from rich.console import Console, Group as Stack, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from specserve.cli.json_output import JsonFile, tables, write_json
from specserve.cli.options import OUTPUT
from specserve.errors import ConfigError, EngineError, InputError
from specserve.server.logs import clip
from specserve.terminal import FittedTable, console

SERVER = Group("Server", sort_key=0)
URL = "http://127.0.0.1:8000"
_MOST_ADAPTERS = 6  # lines
_TIMEOUT_S = 5.0
_LATENCIES = {
    "time_to_first_token": "time to first token",
    "per_token": "per token after it",
    "end_to_end": "end to end",
}
Stats = Mapping[str, Any]


def top(
    url: Annotated[str, Parameter(group=SERVER, help="The server's address.")] = URL,
    *,
    api_key: Annotated[
        str | None, Parameter(group=SERVER, help="A key of the server, if it wants one; better in SPECSERVE_API_KEY.")
    ] = None,
    interval: Annotated[
        float, Parameter(group=OUTPUT, validator=validators.Number(gte=0.1), help="Seconds between two looks.")
    ] = 1.0,
    once: Annotated[
        bool, Parameter(group=OUTPUT, negative=(), help="Print the figures once and end; so does --json.")
    ] = False,
    json_file: JsonFile = None,
) -> None:
    """Watch a running server: requests, tokens per second, latencies, acceptance by drafter, memory. The q key ends."""
    address = _address(url)
    if json_file is not None or once:
        stats = asyncio.run(_look(address, api_key))
        drawn = frame(address, stats)
        write_json(json_file, stats)
        tables(json_file).print(drawn)
        return
    with suppress(KeyboardInterrupt):
        asyncio.run(_watch(address, api_key, interval, console()))


def _session(api_key: str | None) -> aiohttp.ClientSession:
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    return aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S))


async def _look(address: str, api_key: str | None) -> Stats:
    async with _session(api_key) as session:
        return await fetch(session, address)


async def _watch(address: str, api_key: str | None, interval: float, console: Console) -> None:
    """Draw frames until q is pressed. A server that does not answer at first is an error, one that goes away later may
    come back."""
    async with _session(api_key) as session:
        drawn = frame(address, await fetch(session, address))
        with Live(drawn, console=console, auto_refresh=False) as live, _left_by_q() as left:
            while True:
                with suppress(TimeoutError):
                    await asyncio.wait_for(left.wait(), interval)
                    return
                try:
                    drawn = frame(address, await fetch(session, address))
                    live.update(drawn, refresh=True)
                except EngineError as error:
                    live.update(Stack(drawn, Text(f"{error} Still trying.", "bold red")), refresh=True)


@contextmanager
def _left_by_q() -> Iterator[asyncio.Event]:
    """What happens once q is pressed. On a terminal keys are read without Enter, and not shown."""
    left, loop = asyncio.Event(), asyncio.get_running_loop()
    if not sys.stdin.isatty():
        yield left
        return
    file = sys.stdin.fileno()

    def pressed() -> None:
        keys = os.read(file, 1024)
        if b"q" in keys.lower():
            left.set()
        elif not keys:
            loop.remove_reader(file)

    before = termios.tcgetattr(file)
    tty.setcbreak(file)
    loop.add_reader(file, pressed)
    try:
        yield left
    finally:
        loop.remove_reader(file)
        termios.tcsetattr(file, termios.TCSADRAIN, before)


async def fetch(session: aiohttp.ClientSession, address: str) -> Stats:
    """What GET /stats says. Raises EngineError when no server answers, InputError when it wants another key,
    ConfigError when it is none of ours."""
    try:
        async with session.get(f"{address}/stats") as response:
            status, body = response.status, await response.read()
    except (aiohttp.ClientError, TimeoutError) as error:
        reason = str(error) or "it does not answer in time"
        raise EngineError(f"No server at {address}: {clip(reason)}. Start one with `specserve serve`.") from error
    if status in (401, 403):
        raise InputError(f"{address} wants an API key: give it with --api-key or in SPECSERVE_API_KEY.", "api_key")
    if status >= 500:
        raise EngineError(f"{address} answers with status {status}.")
    return _parsed(address, body if status == 200 else b"")


def frame(address: str, stats: Stats) -> RenderableType:
    """The figures of one look. Raises ConfigError when they are not those of this version's GET /stats."""
    try:
        return Panel(
            Stack(
                *(_requests(stats), _memory(stats), "", *_replicas(stats), _latencies(stats), ""),
                *(*_drafts(stats), *_adapters(stats), _steps(stats), *_processes(stats)),
            ),
            title=Text(f"{clip(stats['model'])} at {address}", "bold"),
            subtitle=_state(stats),
            width=100,
        )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise _foreign(address) from error


def _address(url: str) -> str:
    """The address with its scheme and without a trailing slash."""
    address = (url if "://" in url else f"http://{url}").rstrip("/")
    try:
        parts = urlsplit(address)
    except ValueError:
        parts = urlsplit("")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{url!r} is no address of a server. Write it as {URL}.")
    return address


def _parsed(address: str, body: bytes) -> Stats:
    try:
        stats = json.loads(body)
    except ValueError as error:
        raise _foreign(address) from error
    if not isinstance(stats, dict):
        raise _foreign(address)
    return stats


def _foreign(address: str) -> ConfigError:
    return ConfigError(
        f"{address}/stats is not what a specserve server of this version says there. Is the address right, without a "
        "path after it, and are server and command of one version?"
    )


def _state(stats: Stats) -> Text:
    state = clip(stats["state"])
    restarts = f", {stats['num_restarts']} restarts" if stats["num_restarts"] else ""
    return Text(f"{state}, up {_duration(stats['uptime_s'])}{restarts}", "green" if state == "ready" else "yellow")


def _requests(stats: Stats) -> RenderableType:
    tokens = stats["tokens"]
    shown = _flowing(
        f"running {stats['num_running']}",
        f"waiting {stats['num_waiting']}",
        Text(f"{tokens['generated_per_s']:.1f} tokens/s out", "bold cyan"),
        f"{tokens['prompt_per_s']:.1f} in",
        f"{tokens['num_generated']:,} out and {tokens['num_prompt']:,} in so far",
    )
    ended = _counts(stats["requests"].items()) or "none"
    refused = _counts(stats["refused"].items())
    return Stack(shown, Text(f"ended: {ended}" + (f"   refused: {refused}" if refused else "")))


def _memory(stats: Stats) -> RenderableType:
    cache = stats["kv_cache"]
    used = cache["num_blocks"] - cache["num_free_blocks"]
    hits = _share(stats["prefix_cache"]["hit_rate"])
    return _flowing(
        f"KV {cache['usage']:.0%}",
        ProgressBar(total=1.0, completed=cache["usage"], width=24),
        f"{used} of {cache['num_blocks']} blocks",
        f"{cache['num_preemptions']} preemptions",
        f"prefix cache hits {hits}",
    )


def _processes(stats: Stats) -> list[RenderableType]:
    """Those that answer HTTP; nothing where the one does that has the engines."""
    listed = stats.get("api_processes", ())
    if not listed:
        return []
    restarts = sum(each["num_restarts"] for each in listed)
    answering = ", ".join(f"{each['num_requests']} ({clip(each['state'])})" for each in listed)
    return [Text(f"API processes: answering {answering}" + (f"   {restarts} restarts" if restarts else ""))]


_ROLES = {"both": "", "prefill": " (prefill)", "decode": " (decode)"}  # of a replica


def _replicas(stats: Stats) -> list[RenderableType]:
    """Each of several engines, and what they compute for each other; nothing where one serves alone."""
    prompts, failures = stats["prefill"]["num_prompts"], stats["prefill"]["num_transfer_failures"]
    table = _table("replica", "running", "waiting", "KV", "prefix hits", "requests", "restarts")
    for number, each in enumerate(stats.get("replicas", ())):
        table.add_row(
            Text(f"{number} {clip(each['state'])}{_ROLES[each['role']]} {clip(each.get('address', ''))}".rstrip()),
            f"{each['num_running']}",
            f"{each['num_waiting']}",
            f"{each['kv_cache_usage']:.0%}",
            _share(each["prefix_hit_rate"]),
            f"{each['num_requests']:,}",
            f"{each['num_restarts']}",
        )
    if not table.row_count:
        return []
    total = prompts["here"] + prompts["elsewhere"]
    told = f"Computed elsewhere: {prompts['elsewhere']:,} of {total:,} prompts, {failures:,} failures."
    return [table, *([told] if prompts["elsewhere"] or failures else []), ""]


def _flowing(*parts: RenderableType) -> Columns:
    """In one line, or as many as a narrow terminal needs."""
    return Columns(parts, padding=(0, 3))


def _latencies(stats: Stats) -> RenderableType:
    table = _table("latency, ms", "p50", "p90", "p99")
    for name, text in _LATENCIES.items():
        values = stats["latency_ms"][name]
        table.add_row(text, *(_number(values[key], 1) for key in ("p50", "p90", "p99")))
    return table


def _drafts(stats: Stats) -> list[RenderableType]:
    """Acceptance in all and of each drafter, how it is right now in the first row; then who proposed the draft tokens,
    and what asking each drafter takes of a step."""
    speculation = stats["speculation"]
    table = _table("drafter", "tokens a step", "now", "accepted", "drafts", "steps")
    rows = [("all", speculation, speculation["recent_tokens_per_step"])]
    rows += [(clip(name), each, None) for name, each in sorted(speculation["drafters"].items())]
    for name, each, now in rows:
        table.add_row(
            Text(name),
            _number(each["mean_acceptance_length"], 2),
            _number(now, 2) if name == "all" else "",
            _share(each["draft_acceptance_rate"]),
            f"{each['num_drafts']:,}",
            f"{each['num_steps']:,}",
        )
    sources = _table("draft tokens by source", "drafted", "accepted", "share", "ms a step")
    num_steps = stats["steps"]["num_steps"]
    for name, each in sorted(speculation["sources"].items()):
        drafted, accepted, seconds = each["num_draft_tokens"], each["num_accepted_tokens"], each["draft_seconds"]
        share = _share(accepted / drafted if drafted else None)
        spent = _number(1e3 * seconds / num_steps if seconds and num_steps else None, 3)
        sources.add_row(Text(clip(name)), f"{drafted:,}", f"{accepted:,}", share, spent)
    return [table, "", sources, ""] if sources.row_count else [table]


def _adapters(stats: Stats) -> list[RenderableType]:
    """What the adapters had that answered most; nothing where no request has named one."""
    table = _table("adapter", "ended", "tokens out", "tokens a step", "accepted")
    by_tokens = sorted(stats["adapters"].items(), key=lambda item: (-item[1]["num_generated_tokens"], item[0]))
    for name, each in by_tokens[:_MOST_ADAPTERS]:
        steps, drafted, accepted = each["num_steps"], each["num_draft_tokens"], each["num_accepted_tokens"]
        table.add_row(
            Text(clip(name)),
            f"{each['num_completions']:,}",
            f"{each['num_generated_tokens']:,}",
            _number(1 + accepted / steps if steps else None, 2),
            _share(accepted / drafted if drafted else None),
        )
    return [table, ""] if table.row_count else []


def _steps(stats: Stats) -> RenderableType:
    steps = stats["steps"]
    total = sum(steps["seconds"].values())
    shares = [(clip(phase), f"{seconds / total:.0%}") for phase, seconds in steps["seconds"].items() if seconds]
    each = f"{1e3 * total / steps['num_steps']:.2f} ms each: {_counts(shares)}" if steps["num_steps"] else ""
    dropped = f"   {steps['num_drafts_dropped']} drafts dropped" if steps["num_drafts_dropped"] else ""
    return Text(f"{steps['num_steps']:,} steps   {each}{dropped}")


def _table(first: str, *others: str) -> Table:
    table = FittedTable(box=None, padding=(0, 3, 0, 0), header_style="dim")
    table.add_column(first, min_width=20)
    for name in others:
        table.add_column(name, justify="right")
    return table


def _counts(items: Iterable[tuple[str, Any]]) -> str:
    return ", ".join(f"{clip(name)} {count}" for name, count in items if count)


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _duration(seconds: float) -> str:
    """The two largest units: 3 d 4 h, 5 min 6 s."""
    whole = int(seconds)
    parts = [(whole // 86_400, "d"), (whole // 3600 % 24, "h"), (whole // 60 % 60, "min"), (whole % 60, "s")]
    first = next((i for i, (count, _) in enumerate(parts) if count), len(parts) - 1)
    return " ".join(f"{count} {unit}" for count, unit in parts[first : first + 2])
