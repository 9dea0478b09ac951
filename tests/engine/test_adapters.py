"""Adapters in the whole engine: each answer is that of its adapter alone, whatever runs beside it, whatever drafts, and
whatever happens to the adapter's name meanwhile."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from specserve import LLM, SamplingParams, Structured
from specserve.adapters import AdapterSource
from specserve.checkpoint.weights import Weights
from specserve.config import EngineConfig
from specserve.engine.adapters import UnknownAdapterError
from specserve.engine.build import Built, build
from specserve.engine.compiling import Compiling
from specserve.engine.port import LocalPort
from specserve.engine.request import Request
from specserve.errors import ConfigError, InputError, ModelError
from specserve.runtime.executor import local
from specserve.testing import check_integrity, write_adapter, write_tiny_model
from specserve.types import Event

TARGETS = (
    ("q_proj", "v_proj"),
    ("q_proj", "k_proj", "v_proj", "o_proj"),
    ("gate_proj", "up_proj", "down_proj"),
    ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    ("up_proj",),
    ("embed_tokens", "q_proj"),
    ("lm_head", "down_proj"),
    ("embed_tokens", "lm_head", "o_proj"),
)
RANKS = (1, 2, 3, 8, 16, 7, 4, 40)
NAMES = [f"adapter-{i}" for i in range(len(RANKS))]
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
SAMPLED = dataclasses.replace(GREEDY, temperature=0.8, seed=11)
_TEXT = (5, 9, 31, 9, 31, 7, 9, 31, 7, 9)
PROMPTS = [[*_TEXT[: 4 + i % 6], 40 + i % 3] for i in range(12)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), "llama", seed=3)


@pytest.fixture(scope="module")
def adapters(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    shapes = {name: info.shape for name, info in Weights(tiny).infos.items()}
    folder = tmp_path_factory.mktemp("adapters")
    return {
        name: write_adapter(folder / name, shapes, rank, targets, seed=i)
        for i, (name, rank, targets) in enumerate(zip(NAMES, RANKS, TARGETS, strict=True))
    }


def make(tiny: Path, adapters: dict[str, Path], **options: Any) -> Built:
    lora = [f"{name}={path}" for name, path in adapters.items()]
    defaults: dict[str, Any] = {"max_model_len": 160, "max_step_ms": 1e9, "adaptive": False, "threads": 2}
    if "dtype" not in options and "quantization" not in options:
        defaults["dtype"] = "float32"
    return build(EngineConfig(model=str(tiny), lora=tuple(lora), **{**defaults, **options}))


def requests(names: Iterable[str | None], **fields: Any) -> list[Request]:
    return [
        Request(
            id=f"{name} {i}",
            prompt_ids=PROMPTS[i % len(PROMPTS)],
            params=SAMPLED if i % 3 == 2 else GREEDY,
            adapter=name,
            **fields,
        )
        for i, name in enumerate(names)
    ]


def drive(built: Built, asked: list[Request], together: int | None = None) -> dict[str, list[int]]:
    """Run them to their end, `together` at a time; the cache's invariants hold after every step."""
    engine, found = built.engine, dict[str, list[int]]()
    for start in range(0, len(asked), together or len(asked)):
        for request in asked[start : start + (together or len(asked))]:
            engine.add(request)
        while engine.has_work:
            record(found, engine.step())
            check_integrity(engine.cache, [*engine.scheduler.running, *engine.scheduler.waiting])
    assert all(each.num_running == each.num_open == 0 for each in engine.adapters._placed)
    return found


def record(found: dict[str, list[int]], events: Iterable[Event]) -> None:
    for event in events:
        assert event.error is None
        found.setdefault(event.request_id, []).extend(event.tokens)


MIXED = [name for pair in zip(NAMES, [None] * len(NAMES), strict=True) for name in pair]


@pytest.fixture(scope="module", params=["float32", "bfloat16", "int8", "int4"])
def alone(request: pytest.FixtureRequest, tiny: Path, adapters: dict[str, Path]) -> tuple[dict[str, Any], Any]:
    """How the engine computes, and the answers to MIXED one by one, without drafts or prefix cache."""
    how = {"quantization": request.param} if request.param.startswith("int") else {"dtype": request.param}
    return how, drive(make(tiny, adapters, drafter="none", prefix_caching=False, **how), requests(MIXED), together=1)


def test_adapters_differ_and_the_plain_model_is_untouched(tiny: Path, adapters: dict[str, Path], alone: Any) -> None:
    how, wanted = alone
    plain = drive(make(tiny, {}, drafter="none", **how), requests([None] * len(MIXED)))
    same = [i for i, name in enumerate(MIXED) if wanted[f"{name} {i}"] == plain[f"None {i}"]]
    assert [i for i in same if MIXED[i] is not None] == []
    assert [i for i in range(len(MIXED)) if MIXED[i] is None and i not in same] == []


@pytest.mark.each_choice(rounds=2)
@pytest.mark.parametrize(
    "options",
    [
        {"drafter": "none"},
        {"drafter": "ngram"},
        {"drafter": "suffix"},
        {"drafter": "recycle"},
        {"drafter": "auto", "adaptive": True},
        {"drafter": "ngram", "max_num_batched_tokens": 7, "max_num_seqs": 5},
        {"drafter": "ngram", "max_loras": 2},
        {"drafter": "auto", "max_loras": 1},
        {"drafter": "ngram", "max_num_seqs": 16, "kv_cache_gib": 22 * 16 * 3 * 2 * 2 * 16 * 4 / 2**30},  # preempts
    ],
    ids=lambda options: "-".join(str(each) for each in options.values()),
)
def test_answers_are_those_of_each_adapter_alone(
    tiny: Path, adapters: dict[str, Path], alone: Any, options: dict[str, Any]
) -> None:
    how, wanted = alone
    built = make(tiny, adapters, **options, **how)
    assert drive(built, requests(MIXED)) == wanted
    assert drive(built, requests(MIXED)) == wanted  # with prefixes cached, and texts learned
    if "max_loras" in options:
        assert built.engine.adapters.num_evictions > 0
    if "kv_cache_gib" in options and how == {"dtype": "float32"}:
        assert built.engine.scheduler.num_preemptions > 0


def test_a_tree_of_drafts_is_verified_through_the_adapter(tiny: Path, adapters: dict[str, Path], alone: Any) -> None:
    how, wanted = alone
    built = make(tiny, adapters, drafter="recycle", drafter_options={"top_k": 3}, num_speculative_tokens=12, **how)
    assert drive(built, requests(MIXED)) == wanted


def test_structured_answers_are_those_alone(tiny: Path, adapters: dict[str, Path]) -> None:
    with LLM(str(tiny), dtype="float32", lora=[f"{n}={p}" for n, p in adapters.items()], max_model_len=160) as llm:
        params = SamplingParams(temperature=0, max_tokens=24, structured=Structured.regex("[a-z]{3,9}( [a-z]{2,5}){2}"))
        together = [
            llm.generate([PROMPTS[0]], params, adapter=name, drafter=drafter)[0].outputs[0].text
            for name in (*NAMES, None)
            for drafter in ("none", "ngram")
        ]
    assert together[::2] == together[1::2]
    assert len(set(together)) > 4


def test_each_prompt_of_a_call_may_have_its_adapter(tiny: Path, adapters: dict[str, Path]) -> None:
    names = [*list(adapters)[:2], None]
    messages = [[{"role": "user", "content": "Hello"}]] * 3
    with LLM(str(tiny), dtype="float32", lora=[f"{n}={p}" for n, p in adapters.items()], max_model_len=160) as llm:
        for run, asked in ((llm.generate, PROMPTS[:3]), (llm.chat, messages)):
            together = [each.outputs[0].token_ids for each in run(asked, GREEDY, adapter=names)]  # type: ignore[operator]
            each = zip(asked, names, strict=True)
            assert together == [run([one], GREEDY, adapter=name)[0].outputs[0].token_ids for one, name in each]  # type: ignore[operator]
            with pytest.raises(InputError, match="2 adapters for 3 prompts; give one for all or one for each"):
                run(asked, GREEDY, adapter=names[:2])  # type: ignore[operator]
        assert len({tuple(tokens) for tokens in together}) == 3


def test_beams_are_searched_through_the_adapter(tiny: Path, adapters: dict[str, Path]) -> None:
    def found(llm: LLM, name: str | None) -> list[tuple[list[int], float]]:
        outputs = llm.beam_search([PROMPTS[0]], SamplingParams(max_tokens=8), beam_width=4, adapter=name)[0].outputs
        return [(each.token_ids, each.cumulative_logprob) for each in outputs]

    options: dict[str, Any] = {"dtype": "float32", "max_model_len": 160, "drafter": "ngram", "max_loras": 2}
    with LLM(str(tiny), lora=[f"{name}={adapters[name]}" for name in NAMES[:4]], **options) as llm:
        first = [found(llm, name) for name in (None, *NAMES[:4])]
        assert [found(llm, name) for name in (None, *NAMES[:4])] == first
        assert len({str(each) for each in first}) == 5
        with llm.exclusive() as engine:
            assert all(each.num_running == each.num_open == 0 for each in engine.adapters._placed)
            check_integrity(engine.cache, [])


def test_prefixes_are_found_by_what_an_adapter_is(tiny: Path, adapters: dict[str, Path]) -> None:
    """Adapters of the same numbers share, under whatever names; others never do."""
    built = make(tiny, {"a": adapters[NAMES[1]], "b": adapters[NAMES[2]], "again": adapters[NAMES[1]]}, drafter="none")
    prompt = [3 + i % 50 for i in range(100)]

    def hits(name: str | None, salt: bytes = b"") -> int:
        before = built.engine.cache.stats.num_prefix_hit_tokens
        asked = Request(id="r", prompt_ids=prompt, params=GREEDY, adapter=name, salt=salt)
        drive(built, [asked])
        return built.engine.cache.stats.num_prefix_hit_tokens - before

    assert [hits(None), hits("a"), hits("b")] == [0, 0, 0]
    assert [hits(None), hits("a"), hits("b"), hits("again")] == [96] * 4
    assert [hits("a", b"tenant"), hits(None, b"tenant"), hits("a", b"tenant")] == [0, 0, 96]


def test_what_runs_ends_with_the_weights_it_began_with(tiny: Path, adapters: dict[str, Path]) -> None:
    first, second = adapters[NAMES[3]], adapters[NAMES[7]]
    built = make(tiny, {"own": first}, drafter="ngram", max_loras=2)
    engine, loader = built.engine, built.loader
    wanted = drive(built, [Request(id="old", prompt_ids=PROMPTS[1], params=GREEDY, adapter="own")])
    new = make(tiny, {"own": second}, drafter="ngram")
    wanted |= drive(new, [Request(id="new", prompt_ids=PROMPTS[1], params=GREEDY, adapter="own")])
    for _ in range(3):
        found: dict[str, list[int]] = {}
        engine.add(Request(id="old", prompt_ids=PROMPTS[1], params=GREEDY, adapter="own"))
        record(found, engine.step())
        engine.adapters.add(loader.load(AdapterSource("own", str(second))))
        engine.add(Request(id="new", prompt_ids=PROMPTS[1], params=GREEDY, adapter="own"))
        record(found, engine.step())
        engine.adapters.remove("own")
        with pytest.raises(UnknownAdapterError, match="There is no adapter 'own'"):
            engine.add(Request(id="late", prompt_ids=PROMPTS[1], params=GREEDY, adapter="own"))
        while engine.has_work:
            record(found, engine.step())
        assert found == wanted
        assert local(engine.executor)._adapters == {} and not engine.adapters._placed
        engine.adapters.add(loader.load(AdapterSource("own", str(first))))
    assert len(local(engine.executor)._adapters) == 1


def test_aborted_requests_give_their_slots_back(tiny: Path, adapters: dict[str, Path]) -> None:
    built = make(tiny, adapters, drafter="ngram", max_loras=2)
    engine = built.engine
    for asked in requests(NAMES):
        engine.add(asked)
    engine.step()
    assert len({seq.adapter for seq in engine.scheduler.running}) == 2
    for asked in requests(NAMES):
        engine.abort(asked.id)
    assert not engine.has_work
    assert all(each.num_running == each.num_open == 0 for each in engine.adapters._placed)


def test_a_pinned_adapter_keeps_its_slot(tiny: Path, adapters: dict[str, Path]) -> None:
    built = make(tiny, {NAMES[0]: adapters[NAMES[0]]}, drafter="none", max_loras=2)
    engine, loader = built.engine, built.loader
    engine.adapters.add(loader.load(AdapterSource(NAMES[0], str(adapters[NAMES[0]]), is_pinned=True)))
    for name in NAMES[1:4]:
        engine.adapters.add(loader.load(AdapterSource(name, str(adapters[name]))))
    drive(built, requests(NAMES[:4]), together=1)
    (pinned,) = [each for each in engine.adapters._placed if each.info.is_pinned]
    assert pinned.slot >= 0 and engine.adapters.num_evictions == 2
    info = loader.load(AdapterSource(NAMES[1], str(adapters[NAMES[1]]), is_pinned=True))
    with pytest.raises(InputError, match="one must be left for others"):
        engine.adapters.add(info)
    loader.drop(info)


def test_those_that_take_no_slot_pass_who_waits_for_one(tiny: Path, adapters: dict[str, Path]) -> None:
    built = make(tiny, adapters, drafter="none", max_loras=1)
    *most, later = requests([NAMES[0], NAMES[1], NAMES[0], None, NAMES[0]])
    for asked in (*most, msgspec.structs.replace(later, priority=1)):
        built.engine.add(asked)
    built.engine.step()
    running = [seq.request_id for seq in built.engine.scheduler.running]
    assert running == [f"{NAMES[0]} 0", f"{NAMES[0]} 2", "None 3"]  # and none of a lower priority


def test_who_waits_for_a_slot_is_not_passed_for_ever(tiny: Path, adapters: dict[str, Path]) -> None:
    """Another adapter's requests keep coming, more than there are seats."""
    built = make(tiny, adapters, drafter="none", max_loras=1, max_num_seqs=3)
    engine, begun = built.engine, list[str]()
    for number in range(200):
        if number == 30:
            engine.add(msgspec.structs.replace(requests([NAMES[1]])[0], id="late"))
        if number % 2 == 0:
            engine.add(msgspec.structs.replace(requests([NAMES[0]])[0], id=f"at {number}"))
        engine.step()
        begun += [seq.request_id for seq in engine.scheduler.running if seq.request_id not in begun]
        if "late" in begun:
            break
    passed = [name for name in begun[: begun.index("late")] if int(name.removeprefix("at ")) >= 30]
    assert 1 <= len(passed) <= 3
    assert engine.scheduler.waiting, "others waited meanwhile"


def test_what_is_wrong_with_a_request_or_an_option_is_said(tiny: Path, adapters: dict[str, Path]) -> None:
    with LLM(str(tiny), dtype="float32") as llm:
        with pytest.raises(ConfigError, match=r"takes no adapters. Start it with --lora"):
            llm.load_adapter("a", adapters[NAMES[0]])
        with pytest.raises(InputError, match="adapter"):
            llm.generate([[5]], GREEDY, adapter="a")
    with LLM(str(tiny), dtype="float32", max_loras=2, max_lora_rank=8) as llm:
        assert llm.load_adapter(NAMES[0], adapters[NAMES[0]]).rank == 1
        assert list(llm.adapters()) == [NAMES[0]]
        with pytest.raises(InputError, match=NAMES[0]):  # a near miss is named
            llm.generate([[5]], GREEDY, adapter="adapter-00")
        with pytest.raises(ModelError, match=r"rank 40, and this engine takes up to 8\. Start"):
            llm.load_adapter("big", adapters[NAMES[7]])
        llm.unload_adapter(NAMES[0])
        with pytest.raises(InputError, match="There is no adapter 'adapter-0': none is loaded"):
            llm.unload_adapter(NAMES[0])
    for wrong in ("name", "=path", "name=", "name=,pinned"):
        with pytest.raises(ConfigError, match="must be name=path"):
            EngineConfig(lora=(wrong,))
    with pytest.raises(ConfigError, match="names of adapters must differ"):
        EngineConfig(lora=("a=x", "a=y"))
    for pinned in (("a=x,pinned",), ("a=x,pinned", "b=y,pinned")):
        with pytest.raises(ConfigError, match="one slot must be left for others"):
            EngineConfig(lora=pinned, max_loras=len(pinned))
    with pytest.raises(ConfigError, match="max_loras is 0"):
        EngineConfig(lora=("a=x",), max_loras=0)


def test_what_nobody_foresaw_ends_a_loading_and_no_engine(
    tiny: Path, adapters: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    built = make(tiny, {}, max_loras=2)
    port, told = LocalPort(built.engine, Compiling(built.compiler, None), built.loader), list[object]()
    with monkeypatch.context() as patched:
        patched.setattr(local(built.engine.executor).runner.model, "pack_adapter", lambda weights: 1 / 0)
        port.load_adapter(AdapterSource("x", str(adapters[NAMES[0]])), False, told.append)
        while not told:
            port.step()
    assert isinstance(told[0], InputError) and "ZeroDivisionError" in str(told[0])
    port.load_adapter(AdapterSource("x", str(adapters[NAMES[0]])), False, told.append)
    while len(told) < 2:
        port.step()
    assert list(built.engine.adapters.listed) == ["x"]
    port.close()


def test_loading_leaves_nothing_behind_on_an_error(tiny: Path, adapters: dict[str, Path]) -> None:
    built = make(tiny, {}, max_loras=2)
    with pytest.raises(ModelError):
        built.loader.load(AdapterSource("x", str(tiny)))
    assert local(built.engine.executor)._adapters == {}
