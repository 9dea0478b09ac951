"""Following a prediction: exact drafts around every kind of edit, a rescan as the oracle, and its cost by counting."""

from __future__ import annotations

import gc
import itertools
import random
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from specserve.bench.drive import Driver, NoTarget, fault
from specserve.bench.replay import accepted_path
from specserve.drafters.prediction import PredictionDrafter
from specserve.errors import ConfigError
from specserve.speculation.retrieval import NGRAMS_PER_STEP
from specserve.types import SamplingParams, Sequence, Verdict

NO_TARGET: Any = NoTarget()
PROMPT = [90, 91, 10, 11, 12]  # ends with tokens of the prediction, which must not matter
TEXT = list(range(10, 30))


def make_seq(prediction: list[int], prompt: list[int] = PROMPT, salt: bytes = b"") -> Sequence:
    return Sequence(
        request_id="r", index=0, tokens=list(prompt), num_prompt=len(prompt), salt=salt,
        params=SamplingParams(), seed=0, max_tokens=999, prediction=tuple(prediction),
    )  # fmt: skip


def say(drafter: Driver, seq: Sequence, tokens: list[int]) -> None:
    """The target emits `tokens` in one step."""
    seq.tokens += tokens
    drafter.observe([seq], [Verdict(tokens, list(range(len(tokens) - 1)))])


def drafts_along(prediction: list[int], output: list[int], limit: int = 3, **options: int) -> list[list[int]]:
    """The draft before the first token of the output and after each of them."""
    drafter, seq = Driver(PredictionDrafter(NO_TARGET, **options)), make_seq(prediction)
    drafter.begin(seq)
    drafts = [drafter.propose([seq], [limit])[0].tokens.tolist()]
    for token in output:
        say(drafter, seq, [token])
        drafts.append(drafter.propose([seq], [limit])[0].tokens.tolist())
    return drafts


def test_equal_text_is_drafted_from_its_first_token_to_its_last() -> None:
    drafts = drafts_along(TEXT, TEXT, limit=3)
    assert drafts == [TEXT[i : i + 3] for i in range(len(TEXT) + 1)]
    assert drafts[0] == [10, 11, 12]
    assert drafts[-2:] == [[29], []]


@pytest.mark.parametrize("length", [1, 2, 5])
def test_after_an_insertion_it_goes_on_where_it_was(length: int) -> None:
    new = list(range(50, 50 + length))
    drafts = drafts_along(TEXT, [*TEXT[:6], *new, *TEXT[6:]])
    assert drafts[:7] == [TEXT[i : i + 3] for i in range(7)]
    assert drafts[7 : 8 + length] == [[]] * (length + 1), "lost in the new text and for one token after it"
    assert drafts[8 + length :] == [TEXT[i : i + 3] for i in range(8, 21)]


@pytest.mark.parametrize("length", [1, 2, 9])
def test_after_a_deletion_it_skips_what_is_gone(length: int) -> None:
    rest = TEXT[6 + length :]
    drafts = drafts_along(TEXT, TEXT[:6] + rest)
    assert drafts[:7] == [TEXT[i : i + 3] for i in range(7)]
    assert drafts[7] == [], "one token says too little"
    assert drafts[8:] == [rest[i : i + 3] for i in range(2, len(rest) + 1)]


@pytest.mark.parametrize(("removed", "inserted"), [(1, 1), (3, 1), (1, 4), (7, 7)])
def test_after_a_replacement_it_goes_on_behind_it(removed: int, inserted: int) -> None:
    rest = TEXT[5 + removed :]
    drafts = drafts_along(TEXT, [*TEXT[:5], *range(60, 60 + inserted), *rest])
    assert drafts[6 : 7 + inserted] == [[]] * (inserted + 1)
    assert drafts[7 + inserted :] == [rest[i : i + 3] for i in range(2, len(rest) + 1)]


def test_an_edit_of_the_first_and_of_the_last_tokens() -> None:
    assert drafts_along([1, 2, 3, 4], [9, 2, 3, 4]) == [[1, 2, 3], [], [], [4], []]
    assert drafts_along([1, 2, 3, 4], [1, 2, 3, 9, 9]) == [[1, 2, 3], [2, 3, 4], [3, 4], [4], [], []]


def test_of_repeated_passages_the_next_one_is_meant() -> None:
    """(1, 2) stands three times; each time what follows tells which."""
    text = [1, 2, 30, 31, 1, 2, 40, 41, 1, 2, 50, 51]
    skipped = drafts_along(text, [1, 2, 30, 77, 1, 2], limit=2)
    assert skipped[-1] == [40, 41], "the nearest after the last place"
    assert drafts_along(text, [1, 2, 30, 31, 1, 2, 40, 77, 1, 2], limit=2)[-1] == [50, 51]
    back = drafts_along(text, [1, 2, 30, 31, 1, 2, 40, 41, 1, 2, 50, 77, 1, 2], limit=2)
    assert back[-1] == [50, 51], "none comes after, so the nearest before"
    assert drafts_along(text, [1, 2, 77, 1, 2], limit=2)[-1] == [40, 41], "what was just refused is not the first guess"


def test_a_longer_match_goes_before_a_nearer_one() -> None:
    text = [7, 1, 9, 1, 2, 30, 7, 1, 2, 50]
    assert drafts_along(text, [88, 7, 1, 2], limit=1)[-1] == [50]
    assert drafts_along(text, [88, 7, 1, 2], limit=1, match_max=2)[-1] == [30]


def test_a_place_found_by_chance_does_not_move_the_search() -> None:
    """(1, 2) is found far behind, where the next token disagrees: the search goes on from where the output left."""
    text = [10, 11, 3, 4, 20, 12, 1, 2, 13, 3, 4, 21]
    drafts = drafts_along(text, [10, 11, 1, 2, 3, 4], limit=1)
    assert drafts[-3:] == [[13], [], [20]]


def test_the_prompt_says_nothing_about_the_place() -> None:
    """It ends with 10, 11, 12, as a prompt may that holds the text to be edited."""
    assert drafts_along(TEXT, [13, 14]) == [[10, 11, 12], [], [15, 16, 17]]


def test_shortest_match_is_an_option() -> None:
    assert drafts_along([1, 2, 3, 4], [1, 9, 3], match_min=1)[-1] == [4]
    assert drafts_along([1, 2, 3, 4], [1, 9, 3], match_min=2)[-1] == []
    assert drafts_along([1, 2, 3, 4, 5], [9, 2, 3, 4], match_min=4)[-1] == []


@pytest.mark.parametrize("prediction", [[], [7]])
def test_empty_and_tiny_predictions(prediction: list[int]) -> None:
    assert drafts_along(prediction, [7, 7, 7]) == [prediction, [], [], []]
    assert drafts_along(prediction, [8, 7, 7]) == [prediction, [], [], []]


def confidence_after(output: list[int], *pieces: int, text: list[int] = TEXT) -> list[float]:
    """Of a draft of 3 behind an output that came in pieces of these lengths, the last one over and over."""
    drafter, seq = Driver(PredictionDrafter(NO_TARGET)), make_seq(text)
    drafter.begin(seq)
    for piece in itertools.chain(pieces, itertools.repeat(pieces[-1])):
        if len(seq.tokens) - len(PROMPT) >= len(output):
            break
        drafter.propose([seq], [3])
        done = len(seq.tokens) - len(PROMPT)
        say(drafter, seq, output[done : done + piece])
    (draft,) = drafter.propose([seq], [3])
    assert draft.confidence is not None
    assert fault(draft, 3, 100) is None
    return draft.confidence.tolist()


def test_confidence_is_how_much_came_so_far_and_less_where_the_place_is_new() -> None:
    """Followed at first 9 of 10; a place that was found by n tokens is the wrong one in 1 / (2 n^1.5) of cases."""
    found = [1 - 0.5 / n**1.5 for n in range(2, 5)]
    assert confidence_after([], 1) == pytest.approx([0.9] * 3, abs=0.005)
    assert confidence_after(TEXT[:10], 1) == pytest.approx([19 / 20] * 3, abs=0.005)
    lost = [*TEXT[:5], 99, TEXT[5], TEXT[6]]
    assert confidence_after(lost, 1) == pytest.approx([14 / 16 * each for each in found])
    again = [*lost, *TEXT[7:9]]
    assert confidence_after(again, 1)[0] == pytest.approx(16 / 18 * (1 - 0.5 / 4**1.5))
    for pieces in ((1,), (2,), (3, 1), (99,)):
        assert confidence_after(again, *pieces) == confidence_after(again, 1), "however many tokens a step brought"


# --- any prediction, any edits ---------------------------------------------------------------------------------------


def rescan(prediction: list[int], output: list[int], longest: int, shortest: int) -> int | None:
    """Where the next token is expected, by scanning everything for every token."""
    place: int | None = 0
    reached = 0
    for length in range(1, len(output) + 1):
        if place is not None and prediction[place : place + 1] == [output[length - 1]]:
            place = reached = place + 1
            continue
        place = None
        for size in range(shortest, longest + 1):  # a longer one overwrites
            newest = output[length - size : length] if size <= length else None
            found = [e for e in range(size, len(prediction)) if prediction[e - size : e] == newest]
            if found:
                place = min(found, key=lambda end: (end <= reached, abs(end - reached)))
    return place


@st.composite
def edited(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """A prediction over few or many tokens, and an output that is it with pieces inserted, deleted and replaced."""
    token = st.integers(0, draw(st.sampled_from([1, 3, 50])))
    prediction = draw(st.lists(token, max_size=40))
    output = list(prediction)
    for _ in range(draw(st.integers(0, 4))):
        start = draw(st.integers(0, len(output)))
        output[start : start + draw(st.integers(0, 5))] = draw(st.lists(token, max_size=5))
    return prediction, output


def stands_in(piece: list[int], text: list[int]) -> bool:
    return any(text[i : i + len(piece)] == piece for i in range(len(text) + 1))


SIZES = st.tuples(st.integers(1, 5), st.integers(1, 5))


@settings(max_examples=200)
@given(edited(), SIZES, st.lists(st.integers(1, 4), min_size=1), st.integers(1, 6))
def test_drafts_are_pieces_of_the_prediction_and_equal_a_rescan(
    texts: tuple[list[int], list[int]], sizes: tuple[int, int], counts: list[int], budget: int
) -> None:
    """However many tokens a step brings. The prompt's tokens are such as the prediction has."""
    prediction, output = texts
    drafter, seq = Driver(PredictionDrafter(NO_TARGET, max(sizes), min(sizes))), make_seq(prediction, prompt=[0, 1, 0])
    drafter.begin(seq)
    for count in itertools.cycle(counts):
        (draft,) = drafter.propose([seq], [budget])
        place = rescan(prediction, output[: seq.num_output], max(sizes), min(sizes))
        assert draft.tokens.tolist() == ([] if place is None else prediction[place : place + budget])
        assert fault(draft, budget, 51) is None
        assert draft.is_chain
        assert stands_in(draft.tokens.tolist(), prediction)
        if seq.num_output == len(output):
            break
        say(drafter, seq, output[seq.num_output : seq.num_output + count])
    drafter.end(seq)


def num_steps(prediction: list[int], output: list[int], k: int) -> int:
    """Verify steps of a greedy target that says `output`."""
    drafter, seq = Driver(PredictionDrafter(NO_TARGET)), make_seq(prediction)
    drafter.begin(seq)
    steps = 0
    while rest := output[seq.num_output :]:
        path = accepted_path(drafter.propose([seq], [min(k, len(rest) - 1)])[0], rest) if len(rest) > 1 else []
        say(drafter, seq, rest[: len(path) + 1])
        steps += 1
    return steps


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 8))
def test_a_perfect_prediction_is_said_in_the_fewest_steps(output: list[int], k: int) -> None:
    assert num_steps(output, output, k) == -(-len(output) // (k + 1))


def test_an_edit_costs_the_steps_that_find_the_place() -> None:
    """5 and the new token, which is the target's own; 2 to be recognised; then 13 tokens by fives."""
    text = list(range(20))
    assert num_steps(text, text, 4) == 4
    assert num_steps(text, [*text[:5], 77, *text[5:]], 4) == 1 + 1 + 2 + 3


# --- many sequences, and what is kept of them ------------------------------------------------------------------------


def test_sequences_in_a_batch_have_their_own_places() -> None:
    drafter = Driver(PredictionDrafter(NO_TARGET))
    seqs = [make_seq(TEXT), make_seq([1, 2, 3]), make_seq([]), make_seq(TEXT)]
    for seq in seqs:
        drafter.begin(seq)
    say(drafter, seqs[0], TEXT[:4])
    drafts = drafter.propose(seqs, [2, 9, 3, 4])
    assert [draft.tokens.tolist() for draft in drafts] == [TEXT[4:6], [1, 2, 3], [], TEXT[:4]]
    for seq in seqs:
        drafter.end(seq)
    gc.collect()
    assert drafter.drafter._places == {}
    assert len(drafter.drafter._indexes) == 0


def test_one_text_is_indexed_once_for_each_salt() -> None:
    drafter = Driver(PredictionDrafter(NO_TARGET))
    seqs = [make_seq(TEXT), make_seq(TEXT), make_seq(TEXT, salt=b"tenant")]
    for seq in seqs:
        drafter.begin(seq)
    first, second, other = (drafter.drafter._places[drafter._views[seq]].index for seq in seqs)
    assert first is second
    assert first is not other


def test_a_sequence_may_begin_with_output() -> None:
    drafter, seq = Driver(PredictionDrafter(NO_TARGET)), make_seq(TEXT)
    seq.tokens += TEXT[:5]
    drafter.begin(seq)
    assert drafter.propose([seq], [2])[0].tokens.tolist() == TEXT[5:7]


def take_in(drafter: Driver, seq: Sequence) -> int:
    """The number of steps until all of the prediction is known."""
    steps = 0
    while drafter.drafter._places[drafter._views[seq]].index.last < len(seq.prediction) - 1:
        drafter.propose([seq], [1])
        steps += 1
    return steps


class CountingTokens(list):  # type: ignore[type-arg]
    """A list that counts the tokens read from it."""

    num_read = 0

    def __getitem__(self, key):  # type: ignore[no-untyped-def]
        value = super().__getitem__(key)
        self.num_read += len(value) if isinstance(key, slice) else 1
        return value

    def __iter__(self):  # type: ignore[no-untyped-def]
        self.num_read += len(self)
        return super().__iter__()


def reads(length: int, fresh: list[int]) -> tuple[int, int]:
    """Tokens of the sequence read by a proposal after `fresh`, which followed `length` tokens, and by another one."""
    drafter, seq = Driver(PredictionDrafter(NO_TARGET)), make_seq(list(range(2 * length)))
    drafter.begin(seq)
    tokens = drafter._views[seq].tokens = CountingTokens(seq.tokens)
    take_in(drafter, seq)
    say(drafter, seq, list(range(length)))
    drafter.propose([seq], [5])
    tokens.num_read = 0
    say(drafter, seq, fresh)
    drafter.propose([seq], [5])
    first, tokens.num_read = tokens.num_read, 0
    drafter.propose([seq], [5])
    return first, tokens.num_read


def test_cost_does_not_grow_with_the_texts() -> None:
    lost = [-1, -2, -3]
    assert reads(50, lost) == reads(5000, lost) == (1 + 3 * 8, 0), "one look at what came, three searches"
    assert reads(50, [50, 51]) == reads(5000, [5000, 5001]) == (2, 0)


def test_a_long_prediction_is_taken_in_by_slices_and_ends_in_the_same_place() -> None:
    """Every step takes in so much and no more, whatever the number of sequences. Who departs from it before all is
    known waits, and is then where one is that knew all from the start."""
    noise = random.Random(5)
    prediction = [noise.randrange(300) for _ in range(20_000)]
    output = [*prediction[:40], 301, 302, *prediction[9_000:9_030], *prediction[50:80], *prediction[15_000:15_100]]
    early, late, drafter = make_seq(prediction), make_seq(prediction), Driver(PredictionDrafter(NO_TARGET))
    drafter.begin(early)
    index = drafter.drafter._places[drafter._views[early]].index
    for token in output:
        before = index.last
        drafter.propose([early], [4])
        assert (index.last - before) * len(index.sizes) <= NGRAMS_PER_STEP
        say(drafter, early, [token])
    assert index.last == len(prediction) - 1
    drafter.begin(late)
    take_in(drafter, late)
    say(drafter, late, output)
    drafter.propose([early, late], [4, 4])
    places = [drafter.drafter._places[drafter._views[seq]] for seq in (early, late)]
    assert (places[0].next, places[0]._reached) == (places[1].next, places[1]._reached) == (15_100, 15_100)


@pytest.mark.parametrize(
    "options",
    [{"match_min": 0}, {"match_max": True}, {"match_max": 2.5}, {"match_min": 5, "match_max": 4}, {"match_min": "2"}],
)
def test_wrong_options_are_named(options: dict[str, object]) -> None:
    name, value = next(iter(options.items()))
    with pytest.raises(ConfigError, match=rf"{name} is {value!r}.*1 <= match_min <= match_max"):
        Driver(PredictionDrafter(NO_TARGET, **options))
