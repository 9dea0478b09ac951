"""Bugs that other engines had with structured output, each as a test that fails here if we have it too. That the law
under a mask is the masked model's own is in test_structured.py; the end of reasoning in a draft has its own tests."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specserve.config import EngineConfig
from specserve.engine.build import Built, build
from specserve.engine.request import Request
from specserve.speculation.base import DraftRequest, Needs, SequenceView, StepReport
from specserve.speculation.host import DraftHost
from specserve.structured.base import Grammar
from specserve.structured.spec import Structured
from specserve.testing import LanguageGrammar, LanguageState, ScriptedDrafter, write_tiny_model
from specserve.types import Draft, Ids, SamplingParams

Asked = tuple[Request, Grammar | None]  # with its grammar, compiled
VOCAB = 293
A, B, BAD = 40, 41, 77
ASKED = Structured.choice(["x"])  # stands for a grammar by hand
Continues = Callable[[list[int]], list[int]]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), "llama", seed=3)


def make(tiny: Path, **options: Any) -> Built:
    options = {"dtype": "float32", "max_model_len": 160, "max_step_ms": 1e9, **options}  # no chunk ends by the clock
    return build(EngineConfig(model=str(tiny), **options))


def eos_of(built: Built) -> int:
    assert built.tokenizer.eos_id is not None
    return built.tokenizer.eos_id


class StrictGrammar(LanguageGrammar):
    """Its states raise when they are moved although they have ended, and so end the request with an error."""

    def start(self) -> LanguageState:
        return _StrictState(self, [])


class _StrictState(LanguageState):
    def advance(self, token: int) -> bool:
        assert tuple(self.said) not in self.grammar.sentences, "advanced after it had ended"
        return super().advance(token)


class SaysDrafter:
    """Drafts what a function makes of the output so far."""

    needs = Needs()

    def __init__(self, says: Continues) -> None:
        self._says = says

    def begin(self, seq: SequenceView) -> None: ...

    def propose(self, requests: list[DraftRequest]) -> list[Draft]:
        return [Draft.chain(self._says(seq.tokens[seq.num_prompt :])[:most]) for seq, most in requests]

    def observe(self, step: StepReport) -> None: ...
    def end(self, seq: SequenceView) -> None: ...


def use(built: Built, drafter: Any, count: int = 6) -> None:
    built.engine.use(DraftHost(drafter, VOCAB, 10.0, "scripted"), count)


def request(name: str, grammar: Grammar | None, temperature: float = 0.0, prompt: int = 5, **more: Any) -> Asked:
    structured = None if grammar is None else ASKED
    params = SamplingParams(temperature=temperature, seed=prompt, max_tokens=24, structured=structured, **more)
    ids = [(7 * prompt + 3 * j * j + j) % 280 for j in range(prompt)]
    return Request(id=name, prompt_ids=ids, params=params), grammar


def drive(built: Built, *asked: Asked, after_step: Callable[[], None] = lambda: None) -> dict[str, list[int]]:
    """Run all to the end; nobody may fail."""
    outputs: dict[str, list[int]] = {each.id: [] for each, _ in asked}
    for each in asked:
        built.engine.add(*each)
    while built.engine.has_work:
        for event in built.engine.step():
            assert event.error is None
            outputs[event.request_id] += event.tokens
        after_step()
    return outputs


def pairs(built: Built, length: int = 5) -> StrictGrammar:
    """All texts of so many tokens A and B: nothing must come but the end."""
    return StrictGrammar([(*text, eos_of(built)) for text in itertools.product((A, B), repeat=length)])


@pytest.mark.parametrize("position", range(5))
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_violates_the_grammar_at_position_j(tiny: Path, position: int, temperature: float) -> None:
    """vllm #27969, #15554. What is right before it is verified and stands; the token itself never is."""
    built = make(tiny)
    (alone,) = drive(built, request("a", pairs(built), temperature)).values()
    use(built, SaysDrafter(lambda said: [*alone[len(said) :][:position], BAD, A, B]))
    built.engine.add(*request("a", pairs(built), temperature))
    (seq,) = built.engine.requests["a"]
    tokens: list[int] = []
    while built.engine.has_work:
        for event in built.engine.step():
            assert event.error is None
            tokens += event.tokens
    assert tokens == alone
    assert seq.stats.num_draft_tokens == seq.stats.num_accepted_tokens, "only what the grammar lets stand was verified"
    assert (seq.stats.num_steps < 6) == (position > 0)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_goes_past_the_grammars_end(tiny: Path, temperature: float) -> None:
    """vllm #44006: nothing is verified behind the end, and nothing comes after it."""
    built = make(tiny)
    (alone,) = drive(built, request("a", pairs(built), temperature)).values()
    use(built, SaysDrafter(lambda said: [*alone[len(said) :], A, B, A]), 12)
    assert drive(built, request("a", pairs(built), temperature)) == {"a": alone}
    assert alone[-1] == eos_of(built)
    assert len(alone) == 6


@pytest.mark.parametrize("kind", ["none", "chain", "tree"])
def test_a_matcher_is_not_advanced_after_it_ended(tiny: Path, kind: str) -> None:
    """vllm #52767, openvino.genai #4081: not by drafts, not by what is emitted, and not by an end token of the
    request's own that the grammar knows nothing of. A state that is would end its request with an error."""
    built = make(tiny)
    outputs = drive(built, *(request(f"r{i}", pairs(built), i % 2, prompt=4 + i) for i in range(6)))
    if kind != "none":
        scripts = {tuple(request("", None, prompt=4 + i)[0].prompt_ids): [*outputs[f"r{i}"], A, B, A] for i in range(6)}
        use(built, ScriptedDrafter(scripts, VOCAB, accuracy=0.9, decoys=2 if kind == "tree" else 0))
    again = drive(built, *(request(f"r{i}", pairs(built), i % 2, prompt=4 + i) for i in range(6)))
    assert again == outputs
    stopped = drive(built, request("s", pairs(built), 0.0, prompt=4, stop_token_ids=[outputs["r0"][2]]))
    assert stopped["s"] == outputs["r0"][: outputs["r0"].index(outputs["r0"][2]) + 1]


def test_masks_of_constrained_rows_stay_in_step_with_free_ones(tiny: Path) -> None:
    """vllm #51660. Every other request is free, drafts have all lengths, and prompts come in pieces, so that rows of
    logits, sequences and masks are numbered differently in every step."""
    roomy = make(tiny)
    asked = [request(f"r{i}", pairs(roomy) if i % 2 else None, (i // 2) % 2, prompt=3 + 7 * i) for i in range(10)]
    alone: dict[str, list[int]] = {}
    for each in asked:
        alone |= drive(roomy, each)
    built = make(tiny, max_num_batched_tokens=20, max_num_seqs=6)
    scripts = {tuple(each.prompt_ids): alone[each.id] for each, _ in asked}
    use(built, ScriptedDrafter(scripts, VOCAB, accuracy=0.7))
    assert drive(built, *asked) == alone
    assert built.engine.counters.num_prefill_chunks > 3, "prompts were to come in pieces"
    assert any(not set(alone[f"r{i}"]) <= {A, B, eos_of(built)} for i in range(0, 10, 2)), "free rows are free"


def test_no_mask_is_left_where_a_sequence_was(tiny: Path) -> None:
    """CVE-2026-114049: a free request, and one with another grammar, after a constrained one in its only place."""
    built = make(tiny, max_num_seqs=1)
    fresh = {name: drive(make(tiny), each)[name] for name, each in _successors(built)}
    drive(built, request("first", pairs(built)))
    for name, each in _successors(built):
        assert drive(built, each) == {name: fresh[name]}
        drive(built, request("between", pairs(built), 1.0))
    assert not set(fresh["free"]) & {A, B}
    assert not set(fresh["other"]) & {A, B}


def _successors(built: Built) -> list[tuple[str, Request]]:
    end = eos_of(built)
    other = LanguageGrammar([(50, 51, end), (52, 51, end), (52, 53, end)])
    return [("free", request("free", None)), ("other", request("other", other)), ("warm", request("warm", None, 1.0))]


def test_white_space_is_bounded(tiny: Path) -> None:
    """vllm #38696: a model that wants nothing but white space gets to the end of its JSON all the same."""
    built = make(tiny)
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}, "b": {"type": "array", "items": {"const": 1}}}}
    asked = Structured.json({**schema, "required": ["a", "b"], "additionalProperties": False})
    blank = [i for i in range(VOCAB) if (text := built.tokenizer.token_bytes(i)) and not text.strip()]
    assert len(blank) > 2
    bias = dict.fromkeys(blank, 100.0)
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=90, structured=asked, logit_bias=bias)
    spaced = Request(id="w", prompt_ids=[5, 6, 7], params=params), built.compiler.compile(asked)
    (tokens,) = drive(built, spaced).values()
    text = built.tokenizer.decode(tokens, skip_special_tokens=True)
    assert "  " not in text
    assert not set("\n\t\r") & set(text)
    assert text.startswith('{"a": ')
    assert text.removeprefix('{"a": ').startswith(("true, ", "false, "))


class BrokenGrammar(LanguageGrammar):
    """States whose method `broken` raises a TypeError when it is called for the third time."""

    def __init__(self, sentences: list[tuple[int, ...]], broken: str) -> None:
        super().__init__(sentences)
        self.broken = broken

    def start(self) -> LanguageState:
        state, calls = LanguageState(self, []), itertools.count(1)
        working = getattr(state, self.broken)

        def method(*arguments: Any) -> Any:
            if next(calls) >= 3:
                raise TypeError("'NoneType' object is not iterable")
            return working(*arguments)

        setattr(state, self.broken, method)
        return state


@pytest.mark.parametrize("broken", ["fill", "advance", "rollback", "jump_forward"])
def test_one_requests_type_error_ends_that_request_alone(tiny: Path, broken: str) -> None:
    """sglang #24283: whichever method of a grammar's state raises whatever."""
    built = make(tiny)
    use(built, SaysDrafter(lambda said: [A, B, A]))
    good = [request("good", pairs(built)), request("free", None)]
    alone = {name: tokens for each in good for name, tokens in drive(built, each).items()}
    sentences = [tuple(sentence) for sentence in pairs(built).sentences]
    errors, outputs = {}, dict[str, list[int]]()
    for each in (good[0], request("bad", BrokenGrammar(sentences, broken)), good[1]):
        built.engine.add(*each)
    while built.engine.has_work:
        for event in built.engine.step():
            outputs.setdefault(event.request_id, []).extend(event.tokens)
            if event.error is not None:
                errors[event.request_id] = event.error
    assert list(errors) == ["bad"]
    assert "TypeError" in errors["bad"]
    assert {name: outputs[name] for name in alone} == alone
    assert built.engine.cache.num_free == built.engine.cache.num_blocks


SCHEMA = Structured.json(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 6},
            "tags": {"type": "array", "items": {"enum": ["the", "and", "other"]}, "maxItems": 3},
        },
        "required": ["name", "tags"],
        "additionalProperties": False,
    }
)


def schema_requests(built: Built, count: int = 6) -> list[Asked]:
    grammar = built.compiler.compile(SCHEMA)
    return [
        (
            Request(
                id=f"r{i}",
                prompt_ids=request("", None, prompt=4 + i)[0].prompt_ids,
                params=SamplingParams(temperature=i % 2, seed=i, max_tokens=60, structured=SCHEMA),
            ),
            grammar,
        )
        for i in range(count)
    ]


def check_states(built: Built) -> int:
    """Every live state against one from the beginning that has only heard what was emitted; returns how many."""
    grammar, checked = built.compiler.compile(SCHEMA), 0
    for seq in itertools.chain(*built.engine.requests.values()):
        fresh = grammar.start()
        for token in seq.tokens[seq.num_prompt :]:
            assert fresh.advance(token)
        rows = np.zeros((2, -(-VOCAB // 32)), np.int32)
        assert seq.grammar is not None
        fresh.fill(rows[0])
        seq.grammar.fill(rows[1])
        assert rows[0].any()
        assert np.array_equal(rows[0], rows[1])
        checked += seq.num_output > 0
    return checked


@pytest.mark.parametrize("kind", ["chain", "tree"])
def test_a_state_after_a_partly_accepted_draft_is_one_from_the_beginning(tiny: Path, kind: str) -> None:
    """A matcher that is rolled back too little, too much, or not at all masks the rest of the text wrongly."""
    built, checked = make(tiny), [0]
    alone = drive(built, *schema_requests(built))
    scripts = {tuple(each.prompt_ids): alone[each.id] for each, _ in schema_requests(built)}
    use(built, ScriptedDrafter(scripts, VOCAB, accuracy=0.6, decoys=2 if kind == "tree" else 0))

    def check() -> None:
        checked[0] += check_states(built)

    assert drive(built, *schema_requests(built), after_step=check) == alone
    assert checked[0] >= 40


def test_a_preempted_sequence_resumes_where_its_grammar_was(tiny: Path) -> None:
    """Its KV is gone and computed anew from its tokens; its state must neither begin again nor hear them twice."""
    alone = drive(roomy := make(tiny), *schema_requests(roomy, 12))
    built, checked = make(tiny, kv_cache_gib=0.0002, max_num_batched_tokens=24), [0]

    def check() -> None:
        checked[0] += check_states(built)

    assert drive(built, *schema_requests(built, 12), after_step=check) == alone
    assert built.engine.counters.num_preemptions > 0, "the cache was to be too small"
    assert checked[0] > 50


class AnyText:
    """A grammar that lets everything come and says so in the whole row, ids beyond the vocabulary too."""

    num_bytes = 1

    def start(self) -> AnyTextState:
        return AnyTextState()


class AnyTextState:
    def fill(self, row: Ids) -> None:
        row[:] = -1

    def fill_draft(self, tokens: Ids, parents: Ids, ends: frozenset[int], rows: Ids) -> None:
        rows[:] = -1

    def allows(self, token: int) -> bool:
        return True

    def advance(self, token: int) -> bool:
        return True

    def rollback(self, n: int) -> None:
        pass

    def jump_forward(self) -> list[int]:
        return []


@pytest.mark.parametrize("temperature", [0.0, 1.0, 2.0])
def test_a_fill_that_says_nothing_is_to_be_masked_masks_nothing(tiny: Path, temperature: float) -> None:
    """Some backends then leave the row as it was, and the next step reads what an earlier one left there. Here such
    rows are whole, and the text is the one without a grammar, beside rows that are masked."""
    built = make(tiny)
    free = drive(built, *(request(f"r{i}", None, temperature, prompt=4 + i) for i in range(4)))
    asked = [request(f"r{i}", AnyText(), temperature, prompt=4 + i) for i in range(4)]
    together = drive(built, *asked, request("bound", pairs(built), temperature))
    assert {name: together[name] for name in free} == free
    assert set(together["bound"]) <= {A, B, eos_of(built)}
    assert max(map(max, free.values())) < VOCAB < 32 * -(-VOCAB // 32), "there are bits beyond the vocabulary"
