"""Says where a draft head's acceptance is lost: records the target, replays the head with its inputs as they are, moved
and mended, and times it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence as Many
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specserve.bench.heads import faults
from specserve.bench.heads.faults import Coverage, Finding
from specserve.bench.heads.recording import HeadBench, Recording, kind_of
from specserve.bench.heads.replay import Replay, drafting_seconds, replay
from specserve.bench.heads.variants import Variant, layers_of, moved, other_taps
from specserve.bench.prompts import load_prompts
from specserve.bench.report import described
from specserve.bench.text import load_text, windows
from specserve.checkpoint import catalog
from specserve.errors import CapacityError, ConfigError, InputError
from specserve.llm import LLM
from specserve.models.heads.formats import fits, read_head, read_next_token_layers
from specserve.models.heads.loading import MTP
from specserve.models.heads.origin import TargetOrigin
from specserve.models.heads.spec import TargetShape
from specserve.models.loader import check_tensors
from specserve.runtime.executor import local
from specserve.runtime.timing import step_seconds
from specserve.text.tokenizer import Tokenizer

TOP_K = 4  # candidates behind each node of trees
_PIECE = 64  # tokens of a text that an answer goes on from
_MOST_PIECES = 12
_TIMING_S = 1.0  # for measuring steps

OnPart = Callable[[str], object]


@dataclass(frozen=True, slots=True)
class Subject:
    """A head and its target, looked at without their weights."""

    model: str
    folder: Path  # the target's
    head: str
    kind: str
    format: str
    stated: tuple[str | None, str | None]  # the name and the fingerprint of the target that the head says it is for
    num_layers: int


@dataclass(frozen=True, slots=True)
class Texts:
    """What the target answers: token ids, in its chat template unless they are of a text; then `raw` has the same
    without it, or None, and `why_not` the reason."""

    prompts: list[list[int]]
    raw: list[list[int]] | None = None
    why_not: str = ""


@dataclass(slots=True)
class Found:
    """What was replayed, by name, and what follows from it."""

    base: Replay
    rows: list[dict[str, Any]] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)  # what could not be compared, and why


def subject(model: str, head: str) -> Subject:
    """Raises ModelError for a model or a head that is not there or cannot be read, and a head that does not fit."""
    folder = catalog.resolve(model, progress=False)
    spec = check_tensors(folder).spec
    where = catalog.resolve_head(head)
    kind = kind_of(where, spec.num_layers)
    found = read_next_token_layers(where) if kind == MTP else read_head(where, spec.num_layers)
    shape = TargetShape(hidden_size=spec.hidden_size, num_layers=spec.num_layers, vocab_size=spec.vocab_size)
    fits(found.spec, shape)
    stated = None if kind == MTP else _fingerprint(where)
    return Subject(model, folder, str(where), kind, found.format, (found.verifier, stated), spec.num_layers)


def _fingerprint(head: Path) -> str | None:
    """Of the target, where the head's config.json says it as specserve writes it."""
    path = head / "config.json"
    config = json.loads(path.read_text("utf-8")) if path.exists() else {}
    verifier = (config.get("speculators_config") or {}).get("verifier") or {}
    stated = verifier.get("fingerprint")
    return stated if isinstance(stated, str) else None


def texts_of(tokenizer: Tokenizer, text: str | None) -> Texts:
    """The bundled prompts, or pieces of a text file, which are gone on with. Raises ConfigError and InputError."""
    if text is not None:
        pieces = windows(tokenizer, load_text(text), _PIECE, _PIECE * _MOST_PIECES)
        return Texts(pieces, None, "--text is continued as it is, without a chat template")
    prompts = [prompt.text for prompt in load_prompts()]
    raw = [tokenizer.encode(each) for each in prompts]
    try:
        return Texts([tokenizer.encode_chat([{"role": "user", "content": each}]) for each in prompts], raw)
    except InputError as error:
        return Texts(raw, None, f"the model has no chat template that takes them ({error})")


@contextmanager
def _bench(of: Subject, options: Mapping[str, Any], num_seqs: int, longest: int) -> Iterator[HeadBench]:
    own = {
        **options,
        "drafter": of.kind,
        "drafter_options": {"head": of.head},
        "adaptive": False,
        "prefix_caching": False,
        "max_num_seqs": max(num_seqs, options.get("max_num_seqs", 1)),
        "max_model_len": longest,
    }
    with LLM(of.model, **own) as llm:
        yield HeadBench(llm, of.head, of.kind)


def diagnose(
    of: Subject,
    texts: Texts,
    options: Mapping[str, Any],
    *,
    depth: int = 5,
    max_tokens: int = 64,
    on_part: OnPart = lambda name: None,
) -> dict[str, Any]:
    """Replay the head of `of` on greedy answers of at most `max_tokens` tokens, drafts of `depth`; `options` are fields
    of EngineConfig. `on_part` is called with the name of each part before it.

    Gives, as JSON has it: `served` (acceptance as it is served, by depth, and of trees), `variants` (each with what it
    gains in accepted tokens of a draft, and the standard error of that), `vocabulary`, `cost`, `findings` and what was
    `left_out`. Raises ConfigError, ModelError and CapacityError as an engine does, EngineError for a failed step.
    """
    if depth < 1:
        raise ConfigError(f"num_speculative_tokens is {depth}; a replay needs at least 1.")
    longest = max(map(len, [*texts.prompts, *(texts.raw or [])])) + max_tokens + TOP_K * depth + 2
    with _bench(of, options, len(texts.prompts), longest) as bench:
        on_part("answers of the target")
        variants = _variants(bench, of.num_layers)
        recordings = bench.with_states(bench.answers(texts.prompts, max_tokens), layers_of(variants, bench.layers))
        on_part("as served")
        found = Found(_chain(bench, recordings, depth))
        _replay_variants(bench, recordings, variants, found, on_part)
        covers = _look_at_ids(bench, found)
        tree = _tree(bench, recordings, depth, on_part)
        _compare_template(bench, texts, max_tokens, found, on_part)
        on_part("time of each phase")
        cost = _cost(bench, recordings, found.base)
        _compare_float32(of, bench, recordings, options, longest, found, on_part)
        own = TargetOrigin(of.folder).fingerprint() if of.stated[1] else ""
        found.findings += faults.other_target(of.stated[1], of.stated[0], own)
        found.findings += faults.learned(found.base, found.findings)
        return {
            **described(bench.llm),
            "head": of.head,
            "kind": of.kind,
            "format": of.format,
            "hidden_layers": list(bench.layers),
            "prompts": len(recordings),
            "places": len(found.base.accepted),
            "num_speculative_tokens": depth,
            "served": {**_figures(found.base), "tree": tree},
            "variants": found.rows,
            "vocabulary": _vocabulary(covers, found.base, bench.llm.tokenizer),
            "cost": cost,
            "left_out": found.left_out,
            "findings": [each.as_dict() for each in found.findings],
            "healthy": not found.findings,
        }


def _variants(bench: HeadBench, num_layers: int) -> list[Variant]:
    return [*moved(bench.kind != "medusa"), *other_taps(bench.layers, num_layers)]


def _chain(bench: HeadBench, recordings: Many[Recording], depth: int, **more: Any) -> Replay:
    return replay(bench, recordings, depth, **_as_chain(bench), **more)


def _as_chain(bench: HeadBench) -> dict[str, Any]:
    """The options of its drafter with which drafts are chains, whose tokens can be compared place by place."""
    return {"top_k": 1} if bench.kind == "medusa" else {"second_best": False}


def _figures(found: Replay) -> dict[str, Any]:
    by_depth = found.by_depth()
    accepted = sum(by_depth)
    return {"accepted": accepted, "tokens_per_step": 1 + accepted, "by_depth": by_depth, "error": found.error}


def _row(name: str, found: Replay, base: Replay | None) -> dict[str, Any]:
    """With `base` None the texts are others, so places cannot be compared one by one."""
    gain, error = (None, None) if base is None else found.gain_over(base)
    return {"name": name, **_figures(found), "gain": gain, "gain_error": error}


def _replay_variants(
    bench: HeadBench, recordings: Many[Recording], variants: Many[Variant], found: Found, on_part: OnPart
) -> None:
    replays = []
    for variant in variants:
        on_part(variant.name)
        replays.append((variant, _chain(bench, recordings, found.base.depth, shown=variant.shown)))
        found.rows.append(_row(variant.name, replays[-1][1], found.base))
    found.findings += faults.misplaced(found.base, replays)


def _look_at_ids(bench: HeadBench, found: Found) -> Coverage | None:
    """What follows from the drafts themselves."""
    found.findings += faults.shifted_places(found.base)
    found.findings += faults.shifted_map(found.base, bench.ids)
    covers = faults.coverage(found.base, bench.ids)
    names = {} if covers is None else {token: _spelt(bench.llm.tokenizer, token) for token, _ in covers.commonest}
    found.findings += faults.cut_vocabulary(found.base, covers, names)
    return covers


def _spelt(tokenizer: Tokenizer, token: int) -> str:
    return tokenizer.decode([token], skip_special_tokens=False)


def _vocabulary(covers: Coverage | None, base: Replay, tokenizer: Tokenizer) -> dict[str, Any] | None:
    if covers is None:
        return None
    lacking = [{"id": token, "text": _spelt(tokenizer, token), "count": count} for token, count in covers.commonest]
    within = sum(base.by_depth(covers.allowed))
    return {"size": covers.size, "missing": covers.missing, "accepted_within": within, "commonest_missing": lacking}


def _tree(bench: HeadBench, recordings: Many[Recording], depth: int, on_part: OnPart) -> dict[str, Any] | None:
    """Acceptance of trees; None for heads that draft none."""
    if bench.kind == "block":
        return None
    on_part("trees")
    top_k = min(TOP_K, len(bench.ids or [])) or TOP_K
    nodes = top_k * depth
    return {"top_k": top_k, "nodes": nodes, **_figures(replay(bench, recordings, depth, budget=nodes, top_k=top_k))}


def _compare_template(bench: HeadBench, texts: Texts, max_tokens: int, found: Found, on_part: OnPart) -> None:
    if texts.raw is None:
        found.left_out.append(f"texts without the chat template: {texts.why_not}")
        return
    on_part("without chat template")
    recordings = bench.with_states(bench.answers(texts.raw, max_tokens), bench.layers)
    other = _chain(bench, recordings, found.base.depth)
    found.rows.append(_row("prompts without the chat template", other, None))
    found.findings += faults.template(found.base, other)


def _compare_float32(
    of: Subject,
    bench: HeadBench,
    recordings: Many[Recording],
    options: Mapping[str, Any],
    longest: int,
    found: Found,
    on_part: OnPart,
) -> None:
    """The head, the target's states, and all, in float32."""
    if bench.llm.quantization == "none" and bench.llm.dtype == "float32":
        found.left_out.append("rounding: all is float32 already")
        return
    depth, base = found.base.depth, found.base
    on_part("target in float32")
    try:
        exact = _bench(of, {**options, "dtype": "float32", "quantization": "none"}, len(recordings), longest)
        with exact as other:
            states = other.with_states(recordings, bench.layers)
            on_part("head in float32")
            head = _chain(other, recordings, depth)
            on_part("all in float32")
            all_exact = _chain(other, states, depth)
    except CapacityError as error:
        found.left_out.append(f"rounding: the target in float32 does not fit beside it ({error})")
        return
    on_part("states in float32")
    target = _chain(bench, states, depth)
    found.rows.append(_row("head in float32", head, base))
    found.rows.append(_row("hidden states of the target in float32", target, base))
    found.rows.append(_row("both in float32", all_exact, base))
    found.findings += faults.rounding(base, head, "head") + faults.rounding(base, target, "target")


def _cost(bench: HeadBench, recordings: Many[Recording], base: Replay) -> dict[str, Any]:
    """Milliseconds of each phase for one stream, and what drafts of each length then give: `speedup[k - 1]` is plain
    decoding's time for a token over that of a step with drafts of k."""
    depth = len(base.by_depth()) or 1
    longest = max(recordings, key=lambda each: len(each.outputs))
    drafting = drafting_seconds(bench, longest, depth, **_as_chain(bench))
    executor = local(bench.llm.engine.executor)
    rows = range(1, depth + 2)
    with bench.llm.exclusive():
        executor.set_outputs((), 0)
        plain = float(step_seconds(executor, rows, _TIMING_S)[0])
        executor.set_outputs(bench.layers, 0)
        verify = step_seconds(executor, rows, _TIMING_S).tolist()
    by_depth = base.by_depth() or [0.0]
    speedup = [
        (1 + sum(by_depth[:k])) * plain / (verify[k] + drafting.propose[k - 1] + drafting.observe)
        for k in range(1, depth + 1)
    ]
    best = max(range(1, depth + 1), key=lambda k: speedup[k - 1])
    return {
        "plain_ms": plain * 1e3,
        "verify_ms": [seconds * 1e3 for seconds in verify],
        "propose_ms": [seconds * 1e3 for seconds in drafting.propose],
        "observe_ms": drafting.observe * 1e3,
        "speedup": speedup,
        "best": best,
        "drafting_share": (drafting.propose[best - 1] + drafting.observe) / plain,
    }
