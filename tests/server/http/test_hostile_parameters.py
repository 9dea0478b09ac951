"""Rows B11 to B23 of hostile input, parameters, and E42, E45 and E47: drafts change nothing, whatever they meet."""

from __future__ import annotations

import itertools
import math
import threading
from typing import Any

import pytest

from specserve.testing import tiny_tokenizer

TEXT = {"max_tokens": 24, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
DEEP = 2**63


def refused(case: Any, fields: dict[str, Any], param: str | None) -> None:
    """Both endpoints refuse it, and say which field it was."""
    for reply in (case.complete(**fields), case.chat(**fields)):
        assert (reply.status, reply.error["type"]) == (400, "invalid_request_error"), (fields, reply.body)
        assert reply.error["param"] == param, (fields, reply.error)
        assert reply.headers["x-should-retry"] == "false"


# --- B11 to B15: numbers ----------------------------------------------------------------------------------------------

FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


def test_numbers_out_of_range(case: Any) -> None:
    """B11"""
    for field in FLOATS:
        for value in (-3, 1e308, -1e308, "0.7", "", True, False, [0.7], {"value": 0.7}, 10**19):
            refused(case, {field: value}, field)


def test_numbers_that_are_not_whole(case: Any) -> None:
    """B11-whole-numbers"""
    for field in ("top_k", "seed", "n", "max_tokens", "min_tokens", "priority"):
        for value in (0.5, "1", True, [1], -DEEP - 1, 2**64):
            refused(case, {field: value}, field)


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"temperature": 1e-30}, id="B12-nearly-greedy"),
        pytest.param({"temperature": 5e-324}, id="B12-denormal"),
        pytest.param({"temperature": 2.0, "top_k": 1}, id="B12-hot-and-one-token"),
        pytest.param({"temperature": 100, "top_p": 1e-9}, id="B12-hottest-and-smallest-nucleus"),
        pytest.param({"temperature": 1, "min_p": 1}, id="B12-best-alone"),
    ],
)
def test_extremes_are_greedy_and_finite(case: Any, fields: dict[str, Any]) -> None:
    asked = {**TEXT, "prompt": "the cat", "logprobs": 3}
    plain = case.complete(**asked).json["choices"][0]
    got = case.complete(**{**asked, **fields, "seed": 3}).json["choices"][0]
    assert got["token_ids"] == plain["token_ids"]
    assert got["logprobs"] == plain["logprobs"]
    assert all(math.isfinite(value) for value in got["logprobs"]["token_logprobs"])


def test_more_completions_than_there_may_be(case: Any) -> None:
    """B13: alone, and 3 prompts times 50, which is above the limit of a call, as is best_of."""
    for value in (2**31, 0, -1, 129, 2**64):
        refused(case, {"n": value}, "n")
    reply = case.complete(prompt=["a", "b", "c"], n=50)
    assert (reply.status, reply.error["param"]) == (400, "n")
    refused(case, {"best_of": 2**40}, "best_of")


@pytest.mark.parametrize("prompts", [["x"] * 100_000, [[5]] * 100_000], ids=["B14-texts", "B14-lists"])
def test_100000_prompts(case: Any, prompts: Any) -> None:
    reply = case.complete(prompt=prompts)
    assert (reply.status, reply.error["param"]) == (400, "prompt")


def test_prompts_that_are_none(case: Any) -> None:
    """B14"""
    mixed: list[Any] = [["a", [5]], [[5], "a"], [5, "a"]]
    for prompt in (*mixed, [], "", [[]], ["a", ""], None, {"text": "a"}, 7, [[[5]]], [True]):
        reply = case.complete(prompt=prompt)
        assert (reply.status, reply.error["param"]) == (400, "prompt"), prompt


def test_numbers_of_tokens(case: Any) -> None:
    """B15-max_tokens"""
    for value in (0, -1, DEEP, 2**31):
        refused(case, {"max_tokens": value}, "max_tokens")


def test_more_tokens_than_the_context(case: Any) -> None:
    """B15-min_tokens: as many as there never can be, and more than max_tokens; max_tokens alone is what fits."""
    refused(case, {"max_tokens": None, "min_tokens": 10**9}, "min_tokens")
    refused(case, {"min_tokens": 5, "max_tokens": 4}, "min_tokens")
    got = case.complete(prompt=[5] * 500, max_tokens=2**31 - 1, ignore_eos=True)
    assert got.json["usage"]["completion_tokens"] == 12


# --- B16 to B20: log-probabilities, ids, stops ------------------------------------------------------------------------


def test_more_log_probabilities_than_there_may_be(case: Any) -> None:
    """B16"""
    for value in (10**6, -1, 21, "5", 1.5):
        for echo in (False, True):
            reply = case.complete(prompt="the cat sat", logprobs=value, echo=echo)
            assert (reply.status, reply.error["param"]) == (400, "logprobs"), value
        reply = case.chat(logprobs=True, top_logprobs=value)
        assert (reply.status, reply.error["param"]) == (400, "top_logprobs"), value


def test_echoed_log_probabilities_of_a_cached_prompt(case: Any) -> None:
    """B16-cached: what the prefix cache holds has no logits, and is computed again."""
    asked = {**TEXT, "prompt": list(range(100, 180)), "logprobs": 20, "echo": True}
    first, second = (case.complete(**asked).json["choices"][0] for _ in range(2))
    assert first == second
    assert len(first["logprobs"]["tokens"]) == 80 + 24


def test_biases_that_are_none(case: Any) -> None:
    """B17"""
    for token in ("-1", "abc", "2147483648", "1e2", "05", " 5", "", "5.0", "٥"):
        refused(case, {"logit_bias": {token: 1}}, "logit_bias")
    for bias in ("1", 101, None, True):
        refused(case, {"logit_bias": {"5": bias}}, "logit_bias")
    for biases in ([], "5", {str(i): 0 for i in range(1025)}):
        refused(case, {"logit_bias": biases}, "logit_bias")


def test_ids_between_the_tokenizer_and_the_head(case: Any, vocabulary: int) -> None:
    """B17-padded-head: the model's head has rows for them and no text does."""
    for token in (vocabulary, vocabulary + 15, vocabulary + 16, 2**31 - 1):
        refused(case, {"logit_bias": {str(token): 100}}, "logit_bias")
        refused(case, {"allowed_token_ids": [token]}, "allowed_token_ids")
        refused(case, {"stop_token_ids": [token]}, "stop_token_ids")
        reply = case.complete(prompt=[5, token])
        assert (reply.status, reply.error["param"]) == (400, "prompt")
    got = case.complete(**TEXT, logit_bias={str(vocabulary - 1): 100})
    assert got.json["choices"][0]["token_ids"] == [vocabulary - 1] * 24


@pytest.mark.parametrize(
    "stop",
    [
        pytest.param(["x" * 10] * 100_000, id="B18-100000-stops"),
        pytest.param(["x"] * 17, id="B18-17-stops"),
        pytest.param("x" * 2**20, id="B18-1-MB"),
    ],
)
def test_stops_that_are_too_large(case: Any, stop: Any) -> None:
    refused(case, {"stop": stop}, "stop")


def test_stops_that_are_none(case: Any) -> None:
    """B18"""
    for stop in ("", ["a", ""], "\ud800", ["a", 5], {"a": 1}):
        refused(case, {"stop": stop}, "stop")


def test_sets_of_tokens_that_are_none(case: Any) -> None:
    """B19"""
    wrong: dict[str, tuple[Any, ...]] = {
        "stop_token_ids": ([-1], ["5"], [5] * 1025, 5),
        "allowed_token_ids": ([], [2**40], [5.0], [5] * 10_000),
        "bad_words": ([""], ["x"] * 1025, ["x" * 5000], "x", ["\udfff"]),
    }
    for field, values in wrong.items():
        for value in values:
            refused(case, {field: value}, field)


def test_words_that_take_long_to_tokenize(case: Any) -> None:
    """B19-bad-words-of-1-MB are lawful, and are made ids beside the other streams."""
    words = ["the cat sat on " * 250 + str(i) for i in range(300)]
    plain = case.complete(**TEXT).json["choices"][0]["token_ids"]
    assert case.complete(**TEXT, bad_words=words).json["choices"][0]["token_ids"] == plain


def test_a_blank_bad_word(case: Any) -> None:
    """B19-bad-blank: without its space it comes to no tokens at all."""
    case.complete(**TEXT, bad_words=[" ", "the"]).json["choices"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        pytest.param({"allowed_token_ids": [5], "bad_words": ["&"]}, "allowed_token_ids", id="B20-allowed-and-bad"),
        pytest.param(
            {"allowed_token_ids": [289], "min_tokens": 3, "ignore_eos": False},
            "allowed_token_ids",
            id="B20-end-alone-too-early",
        ),
        pytest.param(
            {"allowed_token_ids": [5], "guided_regex": "[a-z]+", "ignore_eos": False},
            "allowed_token_ids",
            id="B20-allowed-and-grammar",
        ),
        pytest.param({"bad_words": ["a"], "guided_regex": "a+", "ignore_eos": False}, "bad_words", id="B20-bad"),
    ],
)
def test_nothing_may_come_first(case: Any, fields: dict[str, Any], param: str) -> None:
    """That is known before anything runs, so a stream does not begin either."""
    for ask, stream in itertools.product((case.complete, case.chat), (False, True)):
        reply = ask(**{**TEXT, **fields, "stream": stream})
        assert (reply.status, reply.error["type"]) == (400, "invalid_request_error")
        assert (reply.error["code"], reply.error["param"]) == ("no_token_left", param)
        assert reply.headers["x-should-retry"] == "false", "it would be refused again"
        assert "No token may come" in reply.error["message"]


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"allowed_token_ids": [5], "bad_words": ["&&"]}, id="B20-bad-pair"),
        pytest.param({"guided_regex": "a", "min_tokens": 5, "ignore_eos": False}, id="B20-text-ends-too-early"),
        pytest.param({"allowed_token_ids": [5], "bad_words": ["&&"], "n": 3}, id="B20-several"),
        pytest.param({"allowed_token_ids": [5], "bad_words": ["&&"], "logprobs": 1}, id="B20-scored"),
    ],
)
def test_nothing_may_come_after_a_while(case: Any, fields: dict[str, Any]) -> None:
    """The request is at fault, whole or in mid-stream, where what was right has been said; the streams beside it see
    nothing."""
    asked = {**TEXT, **fields}
    for ask in (case.complete, case.chat):
        own = {**asked, **({"logprobs": True} if ask == case.chat and "logprobs" in asked else {})}
        reply = ask(**own)
        assert (reply.status, reply.error["type"]) == (400, "invalid_request_error")
        assert (reply.error["code"], reply.error["param"]) == ("no_token_left", None)
        assert reply.headers["x-should-retry"] == "false"
        *events, last = ask(**own, stream=True).events
        said = [token for event in events for choice in event["choices"] for token in choice.get("token_ids", [])]
        assert set(said) <= {5, 64}
        assert last == reply.json


def test_everything_is_unlikely(case: Any, vocabulary: int, broken_token: int) -> None:
    """B20-all-biased: -100 on all that may come leaves their order as it was."""
    asked = {**TEXT, "prompt": "the cat", "logprobs": 2, "allowed_token_ids": list(range(broken_token))}
    plain = case.complete(**asked).json["choices"]
    assert case.complete(**asked, logit_bias={str(i): -100 for i in range(vocabulary)}).json["choices"] == plain


# --- B21 to B23: fields ---------------------------------------------------------------------------------------------


def test_models_and_fields_that_are_not_there(case: Any) -> None:
    """B21"""
    for name in ("gpt-5", "", "x" * 256, "../tiny", "tiny\x00", "TINY"):
        reply = case.complete(model=name)
        assert (reply.status, reply.error["code"]) == (404, "model_not_found"), name
    refused(case, {"model": "x" * 257}, "model")
    refused(case, {"model": 5}, "model")
    refused(case, {"response_format": {"type": "json_object"}, "regex": "a*"}, "regex")
    refused(case, {"guided_json": {}, "regex": "a*"}, "regex")
    assert case.complete(messages=[{"role": "user", "content": "x"}]).error["param"] == "messages"
    assert case.chat(prompt="x").error["param"] == "prompt"
    refused(case, {"speculative": {"drafter": "nothing"}}, "speculative.drafter")
    refused(case, {"speculative": {"drafter": "../ngram"}}, "speculative.drafter")
    refused(case, {"speculative": {"num_tokens": 10**6}}, "speculative.num_tokens")
    refused(case, {"speculative": {"speed": 3}}, "speculative.speed")


def test_unknown_fields_are_named_and_nothing_else(case: Any) -> None:
    """B21-unknown-fields: also names that would break a header."""
    names = ["a\r\nSet-Cookie: b=c", "x" * 5000, "ünï", "", " ", "__proto__", *(f"field{i}" for i in range(3000))]
    reply = case.complete(**dict.fromkeys(names, 1))
    assert reply.status == 200
    assert len(reply.headers["x-specserve-ignored"]) < 1100
    assert "set-cookie" not in reply.headers


def test_seeds_that_are_none(case: Any) -> None:
    """B22-seed"""
    for seed in (-DEEP - 1, 2**64, 0.5, "7", True):
        refused(case, {"seed": seed}, "seed")


def test_seeds_at_the_limits(case: Any) -> None:
    """B22-seed"""
    for seed in (-1, -DEEP, 0, 2**64 - 1):
        asked = {**TEXT, "temperature": 1, "seed": seed}
        texts = [case.complete(**asked).json["choices"][0]["token_ids"] for _ in range(2)]
        assert texts[0] == texts[1], seed


def test_names_that_are_none(case: Any) -> None:
    """B22-names: those of the protocol's own; a user may be called anything, for nobody reads it."""
    for value in ("x" * 2**20, "", "a\nb", "\x1b[31m", 5, "\ud800"):
        refused(case, {"request_id": value}, "request_id")
        refused(case, {"cache_salt": value}, "cache_salt")
    assert case.complete(user="x" * 2**20, metadata={"a": ["b"] * 1000}).status == 200
    for sent in ("x" * 5000, "a b", 'a"b', "ä"):
        reply = case.ask("GET", "/version", headers={"X-Request-Id": sent.encode("latin-1")})
        assert sent not in reply.headers["x-request-id"]


def test_two_requests_of_one_name(case: Any, memory: Any) -> None:
    """B22-same-id-twice: what one client calls its request says nothing to another's. One is left in the middle, and
    one whose name begins like it; the third is what it is alone."""
    asked = {**TEXT, "max_tokens": 300, "prompt": "the cat sat", "request_id": "same"}
    alone = case.complete(**asked).json["choices"]
    left = [case.stream(**{**asked, "request_id": name}) for name in ("same", "sam", "same-")]
    got: list[Any] = []
    third = threading.Thread(target=lambda: got.append(case.complete(**asked).json["choices"]))
    for talk in left:
        talk.until(b"data: ")
    third.start()
    for talk in left:
        talk.reset()
    third.join(200)
    assert got == [alone]


def test_options_that_are_none(case: Any) -> None:
    """B23"""
    for stream in ("yes", 1):
        refused(case, {"stream": stream}, "stream")
    for options in (5, []):
        refused(case, {"stream": True, "stream_options": options}, "stream_options")
    asked = {"stream": True, "stream_options": {"include_usage": "yes"}}
    refused(case, asked, "stream_options.include_usage")
    refused(case, {"stream_options": {"include_usage": True}}, "stream_options")
    for ignore in ("no", 0):
        refused(case, {"ignore_eos": ignore}, "ignore_eos")
    assert case.complete(echo="yes", logprobs=True).status == 400


# --- E42, E45, E47: drafts --------------------------------------------------------------------------------------------

COMBINATIONS: dict[str, dict[str, Any]] = {
    "penalties": {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    "logit_bias": {"logit_bias": {"10": 3, "11": -100, "12": 2.5}},
    "min_p": {"temperature": 0.8, "seed": 5, "min_p": 0.2},
    "sampled": {"temperature": 1.3, "seed": 6, "top_k": 20, "top_p": 0.9},
    "logprobs": {"logprobs": 5},
    "prompt-logprobs": {"logprobs": 3, "echo": True},
    "stop": {"stop": ["\n", "th", "e "]},
    "stop-ids": {"stop_token_ids": list(range(60, 100)), "min_tokens": 3},
    "bad-words": {"bad_words": ["the", "e", "a"]},
    "allowed": {"allowed_token_ids": list(range(20, 60))},
    "n": {"temperature": 1, "seed": 7, "n": 3},
    "one-token": {"max_tokens": 1},
    "two-tokens": {"max_tokens": 2},
    "three-tokens": {"max_tokens": 3},
    "ends": {"ignore_eos": False, "logit_bias": {"289": 6, "291": 6}},
    "context": {"prompt": [7, 8, 9] * 160, "max_tokens": 400},
}


def drafters(case: Any) -> list[str]:
    found = case.served.get("/server_info").json["engine"]["drafters"]
    assert {"none", "ngram", "prediction"} <= set(found)
    assert "recycle" not in found, "it reads best tokens that this server's steps do not show"
    return list(found)


@pytest.mark.parametrize("name", COMBINATIONS, ids=lambda name: f"E42-{name}")
def test_drafters_change_nothing(case: Any, name: str) -> None:
    """Every drafter that is there. The lengths of drafts, from one to more than there is room for, take turns, so that
    each parameter meets all of them and each drafter does: the engine verifies what is drafted, by whomever."""
    asked = {**TEXT, "prompt": [7, 8, 9, 10] * 12, "max_tokens": 40, **COMBINATIONS[name]}
    plain = case.complete(**asked, speculative={"enabled": False}).json
    lengths = itertools.islice(itertools.cycle((1, 3, 64)), [*COMBINATIONS].index(name), None)
    for drafter, length in zip(drafters(case), lengths, strict=False):
        got = case.complete(**asked, speculative={"drafter": drafter, "num_tokens": length}).json
        assert got["choices"] == plain["choices"], (drafter, length)
        assert got["usage"]["completion_tokens"] == plain["usage"]["completion_tokens"]


CHATS: dict[str, dict[str, Any]] = {
    "plain": {},
    "logprobs": {"logprobs": True, "top_logprobs": 4},
    "penalties": {"repetition_penalty": 1.2, "frequency_penalty": 0.3},
    "sampled": {"temperature": 1, "seed": 11, "n": 2},
    "max-tokens": {"max_tokens": 7},
    "end": {"ignore_eos": False, "logit_bias": {"289": 4, "291": 4}},
    "context": {"max_tokens": None},
    "stop": {},
}


@pytest.fixture(scope="module")
def letters() -> dict[str, Any]:
    """Tokens that no text merges, so that an answer of them is those tokens again when it is a prediction; the ends."""
    ids = [tiny_tokenizer().token_to_id(letter) for letter in "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"]
    return {"allowed_token_ids": [*ids, 289, 291]}


@pytest.mark.parametrize("name", CHATS, ids=lambda name: f"E45-{name}")
def test_predictions_that_go_on_past_the_end(case: Any, letters: dict[str, Any], name: str) -> None:
    """What the answer will be and more: nothing is said past the boundary that it crosses, and every token counts."""
    asked = {"max_tokens": 60, "ignore_eos": True, **letters, **CHATS[name]}
    long = {**asked, "max_tokens": 300, "ignore_eos": True}
    text = case.chat("Hello there", **long).json["choices"][0]["message"]["content"]
    if name == "stop":
        asked["stop"] = text[20:24]
    plain = case.chat("Hello there", **asked).json
    for guess in (text, text + text[:150], text[5:150] * 2, text[:30] + "!" + text[30:]):
        got = case.chat("Hello there", **asked, prediction={"type": "content", "content": guess}).json
        assert got["choices"] == plain["choices"]
        for field in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert got["usage"][field] == plain["usage"][field]
        details = got["usage"]["completion_tokens_details"]
        assert details["accepted_prediction_tokens"] < got["usage"]["completion_tokens"]
        if guess == text and name in ("plain", "logprobs", "penalties", "max-tokens"):
            assert details["accepted_prediction_tokens"] > got["usage"]["completion_tokens"] // 2, "the window was open"


def test_a_prompt_that_cannot_be_computed(case: Any, broken_token: int) -> None:
    """E47-leading: its logits are NaN. It fails alone, as often as it is sent; the prompts before it in the cache are
    whole, and nobody finds what it has computed."""
    prefix = list(range(210, 250))
    fine = case.complete(**TEXT, prompt=prefix).json["choices"]
    for drafter in drafters(case):
        reply = case.complete(**TEXT, prompt=[*prefix, broken_token, 5], speculative={"drafter": drafter})
        assert reply.status == 500
        assert "NaN" in reply.error["message"]
        again = case.complete(**TEXT, prompt=prefix)
        assert again.json["choices"] == fine
    assert case.stats()["requests"]["error"] > 0


def test_an_answer_that_cannot_be_computed_on(case: Any, broken_token: int) -> None:
    """E47-in-the-middle: the token is forced, and what follows it is NaN. A stream has said what was right, then tells
    of the error, and does not pretend to have ended well."""
    asked = {**TEXT, "prompt": "the cat", "logit_bias": {str(broken_token): 100}}
    reply = case.complete(**asked)
    assert (reply.status, reply.headers["x-should-retry"]) == (500, "false")
    events = case.complete(**asked, stream=True).events
    tokens = [token for event in events[:-1] for choice in event["choices"] for token in choice.get("token_ids", [])]
    assert tokens == [broken_token]
    assert events[-1] == reply.json


def test_a_draft_that_cannot_be_computed(case: Any, letters: dict[str, Any], broken_token: int) -> None:
    """E47-not-leading: the row of a guess is NaN, which the rows beside it do not notice: what is said is what is said
    without the guess."""
    asked = {"max_tokens": 60, "ignore_eos": True, **letters}
    plain = case.chat("Hello there", **asked).json
    text = plain["choices"][0]["message"]["content"]
    broken = tiny_tokenizer().decode([broken_token])
    refused = 0  # in all: which guess is cut where depends on how the text falls into tokens
    for at in (0, 1, 5, 12):
        guess = text[:at] + broken + text[at:]
        got = case.chat("Hello there", **asked, prediction={"type": "content", "content": guess})
        assert got.status == 200, got.body
        assert got.json["choices"] == plain["choices"]
        refused += got.json["usage"]["completion_tokens_details"]["rejected_prediction_tokens"]
        assert case.chat("Hello there", **asked).json["choices"] == plain["choices"]
    assert refused > 0
