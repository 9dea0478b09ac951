"""Stop strings and stop tokens end beams during the search, as in transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from specserve.config import EngineConfig
from specserve.engine.build import Built, build
from specserve.engine.engine import Engine
from specserve.engine.request import Request
from specserve.outputs import Collector, CompletionOutput, RequestOutput
from specserve.sampling.bad_words import of_ids
from specserve.structured.spec import Structured
from specserve.testing import write_tiny_model
from specserve.types import Event, SamplingParams
from tests.engine.beams import answers, beams, expected, finish, make, prompt, same, search

# Each ends some beam of the prompts below: as one token, over two or three, inside one.
STOPS = ["w2", '4"', "Ii", "1q", "}*", "{", "er"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), "llama", seed=3)


@pytest.fixture(scope="module")
def reference(tiny: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def stopping(tiny: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(tiny)


@pytest.fixture(scope="module")
def built(tiny: Path) -> Built:
    options: dict[str, Any] = {"dtype": "float32", "max_model_len": 160, "max_step_ms": 1e9, "adaptive": False}
    return build(EngineConfig(model=str(tiny), **options))


@pytest.fixture(scope="module")
def engine(built: Built) -> Engine:
    return built.engine


def read(built: Built, ids: list[int], params: SamplingParams, events: list[Event]) -> list[CompletionOutput]:
    """The answers as a caller sees them."""
    output = RequestOutput.of(Request(id="b", prompt_ids=ids, params=params), None)
    collector = Collector(output, params, built.tokenizer, lambda *_: pytest.fail("the engine has ended them all"))
    for event in events:
        collector.push(event)
    return output.outputs


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("early", [False, True, "never"])
@pytest.mark.parametrize("penalty", [1.0, 0.0])
def test_stop_strings_end_beams_as_in_transformers(
    built: Built, reference: Any, stopping: Any, width: int, early: Any, penalty: float
) -> None:
    """There the spelling of special tokens is text."""
    reasons = set()
    for i in range(4):
        params = beams(width, length_penalty=penalty, early_stopping=early, stop=STOPS, skip_special_tokens=False)
        built.engine.add(Request(id="b", prompt_ids=prompt(i), params=params))
        events = finish(built.engine)
        ours = answers(events, "b")
        same(ours, expected(reference, prompt(i), params, stop_strings=STOPS, tokenizer=stopping))
        assert ours != search(built.engine, prompt(i), beams(width, length_penalty=penalty, early_stopping=early))
        for output in read(built, prompt(i), params, events):
            text = built.tokenizer.decode(output.token_ids, False)
            reasons.add(output.stop_reason)
            assert len(output.token_ids) == len(ours[output.index][0]), "all are kept"
            if output.stop_reason is not None:
                assert output.finish_reason == "stop"
                assert text.startswith(f"{output.text}{output.stop_reason}")
                assert not any(stop in output.text for stop in STOPS)
    assert len(reasons) > 3


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("early", [False, True])
def test_stop_tokens_end_beams_as_ends_do(
    engine: Engine, reference: Any, stopping: Any, width: int, early: bool
) -> None:
    """Beside the model's own and stop strings."""
    stops = [*range(3, 280, 20)]
    ends = sorted({*stops, *engine.limits.eos_ids})
    found = set()
    for i in range(4):
        params = beams(width, early_stopping=early, stop_token_ids=stops, stop=STOPS, skip_special_tokens=False)
        engine.add(Request(id="b", prompt_ids=prompt(i), params=params))
        events = finish(engine)
        tokenizer = transformers.AutoTokenizer.from_pretrained(reference.name_or_path)
        same(
            answers(events, "b"), expected(reference, prompt(i), params, ends, stop_strings=STOPS, tokenizer=tokenizer)
        )
        found |= {type(event.stop_reason) for event in events}
        assert all(event.stop_reason in (*STOPS, event.tokens[-1], None) for event in events)
    assert found >= {int, str}


def test_what_is_shown_of_a_stop_string(built: Built) -> None:
    """All of its last token is an id; of the text what is before the end of the stop string, or before that."""
    ids = prompt(2)  # a beam of it goes on with 4 and ",
    for shows in (False, True):
        params = beams(4, stop='4"', include_stop_str_in_output=shows, logprobs=0)
        built.engine.add(Request(id="b", prompt_ids=ids, params=params))
        outputs = read(built, ids, params, finish(built.engine))
        ended = [output for output in outputs if output.stop_reason == '4"']
        assert ended and len(ended) < len(outputs)
        for output in ended:
            text = built.tokenizer.decode(output.token_ids)
            assert text.endswith('4",') and output.text == text[: -1 if shows else -3]
            assert output.finish_reason == "stop" and output.logprobs is not None and output.score is not None
            assert len(output.logprobs) == len(output.token_ids) < params.max_tokens
            assert output.cumulative_logprob == sum(entry.logprob for entry in output.logprobs)


def test_stop_strings_count_from_min_tokens_on(engine: Engine) -> None:
    for least in (0, 4, 8):
        params = beams(4, stop=STOPS, min_tokens=least)
        found = [ids for i in range(4) for ids, _ in search(engine, prompt(i), params)]
        assert all(len(ids) >= least for ids in found)
        assert any(len(ids) < params.max_tokens for ids in found)


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("source", ["ngram", "prediction"])
def test_drafts_change_nothing(engine: Engine, source: str, early: bool) -> None:
    """One token again and again, or another: a stop string ends the better text, which is inside of drafts."""
    words = of_ids([(40, 41), (41, 40)])  # I and J
    params = beams(
        2, allowed_token_ids=[40, 41], max_tokens=30, ignore_eos=True, early_stopping=early, stop=["I" * 14, "J" * 25]
    )
    asked: dict[str, Any] = {"prediction": (40,) * 30 + (41,) * 30} if source == "prediction" else {"drafter": source}
    found, steps = [], []
    for more in ({"drafter": "none"}, asked):
        before = engine.counters.num_steps
        engine.add(Request(id="b", prompt_ids=prompt(1), params=params, bad_words=words, **more))
        found.append(answers(finish(engine), "b"))
        steps.append(engine.counters.num_steps - before)
    assert found[0] == found[1]
    assert {tuple(ids) for ids, _ in found[0]} == {(40,) * 14, (41,) * 25}
    assert steps[1] < steps[0]


def test_a_stop_string_ends_what_a_grammar_would_go_on_with(built: Built) -> None:
    """Tokens that the grammar leaves no choice of are drafted, beyond the stop string, too."""
    asked = Structured.regex(r"(the|and) end of (all|one), and more")
    grammar = built.compiler.compile(asked)
    found = []
    for most in (None, 0):
        params = beams(4, 2, structured=asked, max_tokens=60, stop="of", num_speculative_tokens=most)
        built.engine.add(Request(id="b", prompt_ids=prompt(1), params=params), grammar)
        events = finish(built.engine)
        found.append(answers(events, "b"))
        assert {output.text for output in read(built, prompt(1), params, events)} <= {"the end ", "and end "}
    assert found[0] == found[1] and len(found[0]) == 2


def test_the_real_model(smollm2_safetensors: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2_safetensors)
    reference = transformers.AutoModelForCausalLM.from_pretrained(smollm2_safetensors, dtype=torch.float32).eval()
    engine, stops = make(smollm2_safetensors), [". The", "\n\n", "s of"]
    found = set()
    for text in ("The capital of France is", "Water boils at"):
        ids, params = tokenizer(text)["input_ids"], beams(4, stop=stops, max_tokens=16)
        more = {"stop_strings": stops, "tokenizer": tokenizer}
        engine.add(Request(id="b", prompt_ids=ids, params=params))
        events = finish(engine)
        same(answers(events, "b"), expected(reference, ids, params, sorted(engine.limits.eos_ids), **more))
        found |= {event.stop_reason for event in events}
    assert found.intersection(stops)
