"""Work that one request may ask of the engine, at default time-outs: no step of anybody else waits for it, it holds no
memory out of proportion, and a draft or a prompt that cannot be computed is nobody else's. The oracle is conftest's;
what is asked of the API process is in test_bounded_loop.py."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from specserve.testing import tiny_tokenizer

pytestmark = pytest.mark.alone

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"  # no two of them are merged into one token


def ids(number: int, seed: int) -> list[int]:
    """A prompt of so many tokens that has nothing in common with those of other seeds."""
    numbers = random.Random(seed)
    return [numbers.randrange(200) for _ in range(number)]


def letters(number: int, seed: int) -> str:
    """Text of so many tokens."""
    return "".join(random.Random(seed).choices(LETTERS, k=number))


# --- prompts and drafters ---------------------------------------------------------------------------------------------


def test_a_long_prompt_in_large_chunks(servers: Any, bounded: Any) -> None:
    """A step with prefill aims at a time: 8,192 tokens at once of a long context hold no stream up for seconds."""
    served = servers.get(**{"max-num-batched-tokens": 8192})
    with bounded(served, gap_s=0.3) as case:
        reply = case.complete(prompt=ids(30_000, seed=4))
    assert reply.status == 200, reply.body[:300]


def test_echo_with_logprobs(large: Any, bounded: Any) -> None:
    """What lm-eval sends: a log-probability of every token of the prompt, of a vocabulary of 150,000."""
    with bounded(large, gap_s=1, engine_mib=512) as case:
        reply = case.complete(prompt=ids(2048, seed=5), echo=True, logprobs=5, max_tokens=1, timeout=60)
    told = reply.json["choices"][0]["logprobs"]
    assert len(told["tokens"]) == len(told["token_logprobs"]) == 2049
    assert told["token_logprobs"][0] is None
    assert all(value <= 0 for value in told["token_logprobs"][1:])


def test_many_completions_of_a_long_prompt_that_are_drafted(large: Any, bounded: Any) -> None:
    """Nobody makes 128 indexes of one prompt, nor one in a single step."""
    asked = {"prompt": ids(16_000, seed=6), "n": 128, "max_tokens": 2, "speculative": {"drafter": "ngram"}}
    with bounded(large) as case:
        reply = case.complete(**asked, timeout=60)
    assert (reply.status, len(reply.json["choices"])) == (200, 128), reply.body[:300]


def test_long_predictions(large: Any, bounded: Any) -> None:
    """An index of 30,000 tokens is not made in one step, and six of them are not either."""
    guesses = [{"type": "content", "content": letters(30_000, seed)} for seed in range(6)]
    content = [{"role": "user", "content": "x"}]
    bodies = [{"messages": content, "max_tokens": 4, "temperature": 0, "prediction": guess} for guess in guesses]
    with bounded(large, gap_s=0.15, engine_mib=320) as case:
        replies = case.at_once([case.written(body) for body in bodies], "/v1/chat/completions")
    assert [reply.status for reply in replies] == [200] * len(bodies), replies[0].body[:300]


# --- parameters that are looked at in every step ----------------------------------------------------------------------


# A parameter with little in it, and with as much as a request may hold or near it.
COSTLY: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "bad-words": ({"bad_words": ["cat"]}, {"bad_words": [letters(4000, seed) for seed in range(256)]}),
    "allowed-ids": ({"allowed_token_ids": [300]}, {"allowed_token_ids": list(range(300, 49_300))}),
}
STEP_FACTOR = 2.5  # of what a step takes with little


@pytest.mark.parametrize("name", COSTLY)
def test_parameters_of_every_step(large: Any, bounded: Any, name: str) -> None:
    """A step takes the engine about as long whether a parameter holds little or much. Both are measured, so that it
    does not matter how fast the machine is."""
    asked, (little, much) = {"prompt": "the cat sat", "n": 14, "max_tokens": 50}, COSTLY[name]
    with bounded(large) as case:
        little_s = case.step_s(**asked, **little)
        much_s = case.step_s(**asked, **much)
    assert much_s <= STEP_FACTOR * little_s, (
        f"A step with much of {name} took {1e3 * much_s:.1f} ms of processor time and one with little "
        f"{1e3 * little_s:.1f}; allowed are {STEP_FACTOR} times as much."
    )


def test_bad_words_that_are_no_tokens(large: Any, bounded: Any) -> None:
    """A space before nothing is a word without tokens, which forbids nothing."""
    with bounded(large) as case:
        plain = case.complete().json["choices"]
        assert case.complete(bad_words=[" ", "\n", "  "]).json["choices"][0]["finish_reason"] == "length"
        assert case.complete(bad_words=["never written"]).json["choices"] == plain


# --- who waits --------------------------------------------------------------------------------------------------------


def test_priority_lets_nobody_pass_for_ever(large: Any, bounded: Any) -> None:
    """48 requests that say they are more urgent come after one that says nothing. A server whose operator has not
    opened priorities refuses them, or serves them in their turn."""
    long = {"prompt": "x", "n": 14, "max_tokens": 400, "temperature": 0, "ignore_eos": True}
    urgent = {"prompt": "x", "max_tokens": 40, "temperature": 0, "ignore_eos": True, "priority": -5}
    with bounded(large) as case, ThreadPoolExecutor(50) as threads:
        first = threads.submit(case.complete, **long)
        case.served.until(lambda: case.stats()["num_running"] >= 14)
        innocent = threads.submit(case.complete, max_tokens=2)
        case.served.until(lambda: case.stats()["num_waiting"] >= 1 or innocent.done())
        passing = [threads.submit(case.complete, **urgent) for _ in range(48)]
        assert innocent.result(60).status == 200
        num_passed = sum(each.done() and each.result().status == 200 for each in passing)
        statuses = {each.result(60).status for each in passing}
        assert first.result(60).status == 200
    assert statuses <= {200, 400}
    assert num_passed <= 20, f"{num_passed} of 48 later requests were answered before it; about 16 run at once."


def test_a_prompt_that_waits_is_not_looked_up_again_and_again(servers: Any) -> None:
    """Three requests hold the cache but for seven blocks, and prompts of 8,000 tokens that begin as one of them wait.
    The prefix cache is asked for what was sent, a few times over at most: not for all of it in every step."""
    served = servers.get(**{"max-model-len": 10_240, "kv-cache-gib": 0.0025})
    served.post("/v1/completions", {"prompt": "x", "max_tokens": 1})
    before = served.get("/stats").json
    length = 16 * (before["kv_cache"]["num_blocks"] // 3) - 16 * 7
    holders = [{"prompt": ids(length, seed), "max_tokens": 7 * 16, "ignore_eos": True} for seed in (1, 2, 3)]
    start = holders[0]["prompt"][:3000]
    waiting = [{"prompt": start + ids(5000, seed), "max_tokens": 1} for seed in (4, 5, 6)]
    with ThreadPoolExecutor(6) as threads:
        first = [threads.submit(served.post, "/v1/completions", body) for body in holders]
        served.until(lambda: served.get("/stats").json["num_running"] == 3)
        last = [threads.submit(served.post, "/v1/completions", body) for body in waiting]
        assert [each.result().status for each in (*first, *last)] == [200] * 6
    after = served.get("/stats").json
    asked, hit = (
        after["prefix_cache"][name] - before["prefix_cache"][name] for name in ("num_query_tokens", "num_hit_tokens")
    )
    most = 3 * sum(len(body["prompt"]) for body in (*holders, *waiting))
    assert asked <= most, f"{asked} tokens were looked up and {hit} found; {most} are three times what was sent."


# --- what cannot be computed ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def breakable(servers: Any, padded: Path) -> Any:
    """A server of the model with a token that breaks whatever reads it, at default time-outs. Its steps are short, so
    that a prompt takes many of them."""
    return servers.get(model=padded, **{"max-model-len": 2048, "max-num-batched-tokens": 64})


@pytest.mark.parametrize("place", [1, 5, 31])
def test_a_draft_that_cannot_be_computed_changes_nothing(breakable: Any, broken_token: int, place: int) -> None:
    """The guess overflows in the very step that verifies it, and the answer is the one without a guess."""
    known = [tiny_tokenizer().token_to_id(letter) for letter in LETTERS]
    asked = {"messages": [{"role": "user", "content": "Hello there"}], "max_tokens": 60, "temperature": 0}
    asked |= {"ignore_eos": True, "allowed_token_ids": known}
    plain = breakable.post("/v1/chat/completions", asked).json["choices"]
    text = plain[0]["message"]["content"]
    guess = text[:place] + tiny_tokenizer().decode([broken_token]) + text[place:]
    got = breakable.post("/v1/chat/completions", {**asked, "prediction": {"type": "content", "content": guess}})
    assert got.status == 200, got.body
    assert got.json["choices"] == plain
    details = got.json["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] + details["rejected_prediction_tokens"] > 0, "the guess was tried"


@pytest.mark.parametrize("attempt", range(3))
def test_nobody_finds_the_kv_of_a_prompt_that_fails(breakable: Any, broken_token: int, attempt: int) -> None:
    """Not even of its beginning, and not while it is still being computed. A stream beside it takes one row of each
    step, so that chunks of the prompt and blocks of the cache begin at different tokens: kernels compute row 79, which
    ends a block, together with the broken row, which is one of the next fifteen."""
    numbers = random.Random(attempt)
    tokens = [numbers.randrange(60, 190) for _ in range(1918)]
    asked = {"max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}

    def fails(place: int) -> bool:  # whether what it reads overflows depends on what it stands behind
        prompt = [*tokens[:place], broken_token, 5]
        return breakable.post("/v1/completions", {**asked, "prompt": prompt, "cache_salt": "tried"}).status == 500

    place = next(place for place in range(82, 94) if fails(place))
    prefix = tokens[:place]
    bad, innocent = {**asked, "prompt": [*prefix, broken_token, *tokens[place:]]}, {**asked, "prompt": prefix}
    alone = breakable.post("/v1/completions", {**innocent, "cache_salt": "alone"}).json["choices"][0]["token_ids"]
    with ThreadPoolExecutor(2) as threads:
        beside = threads.submit(breakable.post, "/v1/completions", {**asked, "prompt": "x", "max_tokens": 2000})
        breakable.until(lambda: breakable.get("/stats").json["num_running"] > 0)
        failing = threads.submit(breakable.post, "/v1/completions", bad)
        breakable.until(lambda: breakable.get("/stats").json["num_running"] > 1 or failing.done())
        reply = breakable.post("/v1/completions", innocent)
        failed = failing.result()
        assert beside.result().status == 200
    assert (failed.status, failed.error["code"]) == (500, "completion_failed"), failed.body[:300]
    assert reply.status == 200, reply.body
    assert reply.json["choices"][0]["token_ids"] == alone
