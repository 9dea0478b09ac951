"""Incremental text equals one-shot text, however the tokens arrive, and ends where a plain search says."""

from __future__ import annotations

import itertools
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from tokenizers import AddedToken, Tokenizer as Backend, decoders, models, pre_tokenizers

from specserve.server.wire.fields import MAX_STOP_CHARACTERS, MAX_STOPS
from specserve.text.detokenizer import Detokenizer, Step
from specserve.text.stops import ForkedText, StopString
from specserve.text.tokenizer import Tokenizer
from specserve.types import SamplingParams

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGED = ["ab", "abc", "aba", "b c", "ca", "ba"]  # tokens of several characters: stop strings end inside them
END = 256 + len(MERGED)


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("byte-level")
    vocab = {token: i for i, token in enumerate([*ALPHABET, *(token.replace(" ", "\u0120") for token in MERGED)])}
    backend = Backend(models.BPE(vocab, []))
    backend.decoder = decoders.ByteLevel()
    return saved(backend, folder)


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    tokens = [*(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "\u2581a", "b", "\u2581ab", "\u65e5", "ca"]
    backend = Backend(models.BPE({token: i for i, token in enumerate(tokens)}, [], byte_fallback=True))
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(parts)
    return saved(backend, tmp_path_factory.mktemp("sentencepiece"))


def saved(backend: Backend, folder: Path) -> Tokenizer:
    backend.add_special_tokens([AddedToken("<end>", normalized=False)])
    backend.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


def ids_of(text: str) -> list[int]:
    """One id per byte."""
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return [ALPHABET.index(letter) for spelled, _ in split.pre_tokenize_str(text) for letter in spelled]


def run(detokenizer: Detokenizer, bursts: list[list[int]]) -> tuple[str, int, str | None]:
    """All visible text, how many tokens were kept, and the stop string."""
    text, kept = "", 0
    for burst in bursts:
        step = detokenizer.push(burst)
        text, kept = text + step.text, kept + step.num_kept
        assert (step.text, step.num_kept) == ("".join(step.pieces), len(step.pieces))
        if step.stop is not None:
            assert detokenizer.finish() == ""
            return text, kept, step.stop
        assert step.num_kept == len(burst) == len(step.pieces)
    return text + detokenizer.finish(), kept, None


def partitions(data: st.DataObject, ids: list[int]) -> list[list[int]]:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(ids)), max_size=6)))
    return [ids[a:b] for a, b in itertools.pairwise([0, *cuts, len(ids)])]


def expected_end(tokenizer: Tokenizer, params: SamplingParams, ids: list[int]) -> tuple[str, int, str | None]:
    """By definition, from one-shot decodes: the first token after which the text has a stop string."""
    for count in range(max(1, params.min_tokens), len(ids) + 1):
        text = tokenizer.decode(ids[:count], params.skip_special_tokens).rstrip("\ufffd")
        ends = [(text.index(stop) + len(stop), text.index(stop), stop) for stop in params.stop if stop in text]
        if ends:
            end, start, stop = min(ends)
            return text[: end if params.include_stop_str_in_output else start], count, stop
    return tokenizer.decode(ids, params.skip_special_tokens), len(ids), None


BYTE_LEVEL_IDS = st.lists(st.integers(0, END + 3), max_size=24)  # three ids beyond the vocabulary among them


@settings(max_examples=300)
@given(data=st.data(), ids=BYTE_LEVEL_IDS, skip=st.booleans())
def test_any_ids_in_any_bursts_give_the_one_shot_text(
    byte_level: Tokenizer, data: Any, ids: list[int], skip: bool
) -> None:
    params = SamplingParams(skip_special_tokens=skip)
    text, kept, stop = run(Detokenizer(byte_level, params, []), partitions(data, ids))
    assert (text, kept, stop) == (byte_level.decode(ids, skip), len(ids), None)


@settings(max_examples=300)
@given(data=st.data(), text=st.text(max_size=12), skip=st.booleans())
def test_sentencepiece_gives_the_one_shot_text_but_for_its_first_space(
    sentencepiece: Tokenizer, data: Any, text: str, skip: bool
) -> None:
    ids = [i for character in text.encode(errors="ignore").decode() for i in character.encode()]
    for _ in range(data.draw(st.integers(0, 6))):
        # Whole pieces between characters: a run of byte tokens that is valid UTF-8 stays so.
        starts = [i for i in range(len(ids) + 1) if i == len(ids) or ids[i] > 255 or ids[i] & 0xC0 != 0x80]
        ids.insert(data.draw(st.sampled_from(starts)), data.draw(st.integers(256, sentencepiece.vocab_size - 1)))
    found, _, _ = run(Detokenizer(sentencepiece, SamplingParams(skip_special_tokens=skip), []), partitions(data, ids))
    one_shot = sentencepiece.decode(ids, skip)
    assert found in (one_shot, " " + one_shot)


LETTERS = st.sampled_from([*(ALPHABET.index(letter) for letter in "abc"), *range(256, END + 1)])
STOPS = st.lists(st.text("abc ", min_size=1, max_size=4), min_size=1, max_size=3)


@settings(max_examples=600)
@given(data=st.data(), ids=st.lists(LETTERS, max_size=16), stops=STOPS, include=st.booleans())
def test_text_is_cut_at_the_first_stop_string_to_be_complete(
    byte_level: Tokenizer, data: Any, ids: list[int], stops: list[str], include: bool
) -> None:
    params = SamplingParams(stop=stops, include_stop_str_in_output=include)
    assert run(Detokenizer(byte_level, params, []), partitions(data, ids)) == expected_end(byte_level, params, ids)


@settings(max_examples=300)
@given(data=st.data(), ids=st.lists(LETTERS, max_size=16), stops=STOPS, least=st.integers(0, 16))
def test_bursts_never_change_anything(
    byte_level: Tokenizer, data: Any, ids: list[int], stops: list[str], least: int
) -> None:
    params = SamplingParams(stop=stops, min_tokens=least)
    singly = run(Detokenizer(byte_level, params, []), [[token] for token in ids])
    assert run(Detokenizer(byte_level, params, []), partitions(data, ids)) == singly
    assert singly[2] is None or singly[1] >= least


@settings(max_examples=200)
@given(ids=st.lists(LETTERS, max_size=16), stops=STOPS)
def test_only_what_may_begin_a_stop_string_is_held_back(
    byte_level: Tokenizer, ids: list[int], stops: list[str]
) -> None:
    detokenizer, shown = Detokenizer(byte_level, SamplingParams(stop=stops), []), ""
    for count, token in enumerate(ids, 1):
        step = detokenizer.push([token])
        if step.stop is not None:
            return
        shown += step.text
        text = byte_level.decode(ids[:count])
        held = text[len(shown) :]
        assert text.startswith(shown)
        assert not held or any(stop.startswith(held) for stop in stops)


@settings(max_examples=400)
@given(
    data=st.data(),
    ids=st.lists(st.sampled_from([*ids_of("ab"), 256, 258]), max_size=40),
    stops=st.lists(st.text("ab", min_size=1, max_size=12), min_size=1, max_size=4),
    least=st.integers(0, 16),
)
def test_stops_that_begin_inside_themselves_are_found_where_a_plain_search_finds_them(
    byte_level: Tokenizer, data: Any, ids: list[int], stops: list[str], least: int
) -> None:
    """Text of two letters, whose ends begin stop strings all the time. One that does not count yet is passed over."""
    ended: tuple[str, int, str | None] = (byte_level.decode(ids), len(ids), None)
    after = 0  # where the text begins that is searched
    for count in range(1, len(ids) + 1):
        text = byte_level.decode(ids[:count])
        while found := [(text.index(s, after) + len(s), text.index(s, after), s) for s in stops if s in text[after:]]:
            end, start, stop = min(found)
            if count >= least:
                ended = (text[:start], count, stop)
                break
            after = end
        if found:
            break
    params = SamplingParams(stop=stops, min_tokens=least)
    assert run(Detokenizer(byte_level, params, []), partitions(data, ids)) == ended


def test_the_longest_stop_strings_cost_no_more_than_a_look_at_each_character(byte_level: Tokenizer) -> None:
    """Fifteen that never begin and one that is held back all the time; and sixteen that fail together at their ends."""
    never = ["b" * (MAX_STOP_CHARACTERS - 1) + chr(ord("c") + i) for i in range(MAX_STOPS - 1)]
    late = ["a" * (MAX_STOP_CHARACTERS - 1) + chr(ord("c") + i) for i in range(MAX_STOPS)]
    for stops in ([*never, "a" * MAX_STOP_CHARACTERS], late):
        begun = time.thread_time()
        detokenizer = Detokenizer(byte_level, SamplingParams(stop=stops), [])
        built = time.thread_time() - begun
        shown = [detokenizer.push(ids_of("a")).text for _ in range(2000)]
        assert (set(shown), detokenizer.push(ids_of("b")).text) == ({""}, "a" * 2000 + "b"[: stops is late])
        assert built < 0.01
        assert time.thread_time() - begun < 0.5, "the time that quadratic work takes ten times"


@settings(max_examples=400)
@given(
    prompt=st.lists(st.integers(0, END), max_size=6),
    ids=st.lists(st.one_of(LETTERS, st.sampled_from([*ids_of("é日"), END + 1])), max_size=20),
    stops=st.lists(st.text("abcé日\ufffd", min_size=1, max_size=4), min_size=1, max_size=3),
    least=st.integers(0, 8),
    skip=st.booleans(),
)
def test_texts_that_part_end_where_each_alone_does(
    byte_level: Tokenizer, prompt: list[int], ids: list[int], stops: list[str], least: int, skip: bool
) -> None:
    """Beside each token another goes on from the same place."""
    params = SamplingParams(stop=stops, min_tokens=least, skip_special_tokens=skip)
    alone, text = Detokenizer(byte_level, params, prompt), ForkedText.begin(byte_level, params, prompt)
    for i, token in enumerate(ids):
        beside = Detokenizer(byte_level, params, prompt)
        other = ids[-1 - i]
        assert text.after(other).stop == beside.push([*ids[:i], other]).stop
        text = text.after(token)
        assert text.stop == alone.push([token]).stop
        if text.stop is not None:
            break


def test_texts_that_part_cost_no_more_than_a_look_at_each_character(byte_level: Tokenizer) -> None:
    """All of them meet the mismatches of a text that has come far in all stop strings."""
    stops = ["a" * (MAX_STOP_CHARACTERS - 1) + chr(ord("c") + i) for i in range(MAX_STOPS)]
    text = ForkedText.begin(byte_level, SamplingParams(stop=stops), [])
    a, b = ids_of("ab")
    for _ in range(2000):
        text = text.after(a)
    begun = time.thread_time()
    assert {text.after(b).matched for _ in range(1000)} == {(0,) * MAX_STOPS}
    assert time.thread_time() - begun < 0.5, "the time that 2000 mismatches each take ten times"


def test_completions_of_a_request_share_what_is_known_of_its_stop_strings(byte_level: Tokenizer) -> None:
    """128 of them with tables of their own would hold 64 MB."""
    params = SamplingParams(stop=["a" * MAX_STOP_CHARACTERS] * MAX_STOPS)
    stops = [StopString(stop) for stop in params.stop]
    ids = ids_of("a" * (MAX_STOP_CHARACTERS - 1))
    Detokenizer(byte_level, params, [], stops).push(ids)
    tracemalloc.start()
    try:
        for _ in range(4):
            Detokenizer(byte_level, params, [], stops).push(ids)
        assert tracemalloc.get_traced_memory()[1] < 300_000
    finally:
        tracemalloc.stop()


def test_a_character_appears_with_its_last_byte(byte_level: Tokenizer) -> None:
    detokenizer = Detokenizer(byte_level, SamplingParams(), [])
    texts = [detokenizer.push([token]).text for token in ids_of("é👩")]
    assert texts == ["", "é", "", "", "", "👩"]


def test_a_character_cut_short_is_replaced_at_the_end(byte_level: Tokenizer) -> None:
    detokenizer = Detokenizer(byte_level, SamplingParams(), [])
    assert detokenizer.push(ids_of("a👩")[:-1]) == Step("a", 4)
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.finish() == ""


def test_text_goes_on_inside_a_character_the_prompt_began(byte_level: Tokenizer) -> None:
    ids = ids_of("xyz👩!")
    assert Detokenizer(byte_level, SamplingParams(), ids[:5]).push(ids[5:]).text == "👩!"
    assert Detokenizer(byte_level, SamplingParams(), ids[:3]).push(ids[3:]).text == "👩!"


def test_a_long_run_of_invalid_bytes_appears_as_it_comes(byte_level: Tokenizer) -> None:
    invalid = ALPHABET.index("\u0122")  # byte 0x80
    detokenizer = Detokenizer(byte_level, SamplingParams(), [])
    assert detokenizer.push([invalid] * 500).text == "\ufffd" * 500


def test_a_stop_inside_a_burst_says_how_many_tokens_it_took(byte_level: Tokenizer) -> None:
    detokenizer = Detokenizer(byte_level, SamplingParams(stop="\n\n"), [])
    assert detokenizer.push(ids_of("one\n")) == Step("one", 4)
    assert detokenizer.push(ids_of("\ntwo")) == Step("", 1, "\n\n")


def test_of_two_stops_that_end_together_the_longer_counts(byte_level: Tokenizer) -> None:
    step = Detokenizer(byte_level, SamplingParams(stop=["b", "ab"]), []).push(ids_of("xab"))
    assert step == Step("x", 3, "ab")


def test_a_stop_that_completes_first_wins_over_one_that_began_first(byte_level: Tokenizer) -> None:
    step = Detokenizer(byte_level, SamplingParams(stop=["abcd", "b"]), []).push(ids_of("xabcd"))
    assert step == Step("xa", 3, "b")


def test_inside_one_token_too_the_stop_that_completes_first_wins(byte_level: Tokenizer) -> None:
    token = 256 + MERGED.index("abc")
    assert Detokenizer(byte_level, SamplingParams(stop=["abc", "b"]), []).push([token]) == Step("a", 1, "b")


@pytest.mark.parametrize(("least", "expected"), [(1, ("a", 2)), (2, ("a", 2)), (3, ("aba", 4)), (5, ("ababa", 6))])
def test_stops_before_the_least_number_of_tokens_do_not_count(
    byte_level: Tokenizer, least: int, expected: tuple[str, int]
) -> None:
    params = SamplingParams(stop="b", min_tokens=least)
    assert run(Detokenizer(byte_level, params, []), [ids_of("ababab")]) == (*expected, "b")


def test_a_skipped_special_token_neither_shows_nor_breaks_a_stop_string(byte_level: Tokenizer) -> None:
    a, b = ids_of("ab")
    assert Detokenizer(byte_level, SamplingParams(stop="ab"), []).push([a, END, b]).stop == "ab"
    shown = SamplingParams(stop="ab", skip_special_tokens=False)
    assert Detokenizer(byte_level, shown, []).push([a, END, b]) == Step("a<end>b", 3)


def test_pushing_after_the_end_is_our_bug(byte_level: Tokenizer) -> None:
    detokenizer = Detokenizer(byte_level, SamplingParams(stop="a"), [])
    detokenizer.push(ids_of("a"))
    with pytest.raises(AssertionError):
        detokenizer.push(ids_of("b"))


@pytest.fixture(scope="module")
def real(smollm2: Path) -> Tokenizer:
    return Tokenizer(smollm2)


@settings(max_examples=60)
@given(data=st.data(), text=st.text(max_size=40))
def test_the_real_tokenizer_streams_any_text(real: Tokenizer, data: Any, text: str) -> None:
    ids = real.encode(text.encode(errors="ignore").decode())
    ids += data.draw(st.lists(st.integers(0, real.vocab_size - 1), max_size=8))
    found, _, _ = run(Detokenizer(real, SamplingParams(), [1, 2, 3]), partitions(data, ids))
    assert found == real.decode(ids)
