"""The SDK on a tiny model and, where it is present, on the real one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specserve import LLM, AsyncLLM, SamplingParams
from specserve.errors import ConfigError, EngineError, InputError, NoTokenLeftError
from specserve.structured.spec import Structured
from specserve.testing import write_tiny_model

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), "llama", seed=3)


@pytest.fixture(scope="module")
def llm(tiny: Path) -> Iterator[LLM]:
    with LLM(str(tiny), dtype="float32", max_model_len=256, adaptive=False) as llm:
        yield llm


def test_one_prompt_many_prompts_ids_and_mappings_agree(llm: LLM) -> None:
    text = "The cat sat on the"
    ids = llm.tokenizer.encode(text)
    (one,) = llm.generate(text, GREEDY)
    many = llm.generate([text, ids, {"prompt": text}, {"prompt_token_ids": ids}, "Other"], GREEDY)
    assert one.prompt == text
    assert one.prompt_token_ids == ids
    assert one.finished
    assert [r.outputs[0].token_ids for r in many[:4]] == [one.outputs[0].token_ids] * 4
    assert llm.generate(ids, GREEDY)[0].outputs[0].text == one.outputs[0].text
    assert one.outputs[0].finish_reason == "length"
    assert len(one.outputs[0].token_ids) == 20
    assert llm.tokenizer.decode(one.outputs[0].token_ids) == one.outputs[0].text


def test_a_tiny_model_answers_through_its_chat_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    (answer,) = llm.chat(messages, GREEDY)
    assert answer.prompt == "<|start|>user\nHello<|end|>\n<|start|>assistant\n"
    two = llm.chat([messages, messages], [GREEDY, GREEDY])
    assert [r.outputs[0].text for r in two] == [answer.outputs[0].text] * 2
    streamed = list(llm.stream_chat(messages, GREEDY))
    assert "".join(chunk.text for chunk in streamed) == answer.outputs[0].text
    assert [chunk.finish_reason for chunk in streamed][-1] == "length"


def test_streams_can_be_interleaved_and_left(llm: LLM) -> None:
    (whole,) = llm.generate("abc", GREEDY)
    (other,) = llm.generate("xyz", GREEDY)
    left, right = llm.stream("abc", GREEDY), llm.stream("xyz", GREEDY)
    texts = ["", ""]
    for _ in range(5):
        texts[0] += next(left).text
        texts[1] += next(right).text
    right.close()
    texts[0] += "".join(chunk.text for chunk in left)
    assert texts[0] == whole.outputs[0].text
    assert other.outputs[0].text.startswith(texts[1])
    assert not llm.engine.has_work
    assert llm.engine.cache.num_free == llm.engine.cache.num_blocks


def test_stop_strings_trim_text_ids_and_logprobs(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=0)
    (whole,) = llm.generate("abc", params)
    text = whole.outputs[0].text
    stop = text[len(text) // 3 : len(text) // 3 + 3]
    num_aborted = llm.counters().num_aborted
    cut = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=0, stop=[stop, "never there"])
    for _ in range(2):  # plain, then with drafts of several tokens a step
        (output,) = llm.generate("abc", cut)[0].outputs
        assert output.text == text[: text.index(stop)]
        assert (output.finish_reason, output.stop_reason) == ("stop", stop)
        assert len(output.logprobs or ()) == len(output.token_ids) < 40
        assert output.token_ids == whole.outputs[0].token_ids[: len(output.token_ids)]
        assert stop in llm.tokenizer.decode(output.token_ids)
        llm.use_drafter("ngram", 5)
    llm.use_drafter("none")
    assert llm.counters().num_aborted == num_aborted, "they came to their ends"
    assert llm.engine.cache.num_free == llm.engine.cache.num_blocks


@pytest.mark.parametrize("shown", [False, True])
def test_a_stop_token_is_an_id_and_no_text(llm: LLM, shown: bool) -> None:
    whole = llm.generate("abc", GREEDY)[0].outputs[0].token_ids
    end = next(i for i, token in enumerate(whole) if i > 2 and token not in whole[:i])
    params = SamplingParams(
        temperature=0, max_tokens=20, ignore_eos=True, stop_token_ids=[whole[end]], include_stop_str_in_output=shown
    )
    (output,) = llm.generate("abc", params)[0].outputs
    assert (output.finish_reason, output.stop_reason) == ("stop", whole[end])
    assert output.token_ids == whole[: end + 1]
    assert output.text == llm.tokenizer.decode(whole[: end + shown])


def test_acceptance_is_reported_per_request(llm: LLM) -> None:
    llm.use_drafter("ngram", 4)
    prompt = "one two three four five. " * 6
    (output,) = llm.generate(prompt, GREEDY)[0].outputs
    llm.use_drafter("none")
    (plain,) = llm.generate(prompt, GREEDY)[0].outputs
    assert output.token_ids == plain.token_ids
    stats = output.stats
    assert stats.num_draft_tokens > 0
    assert output.mean_acceptance_length == 1 + stats.num_accepted_tokens / stats.num_steps
    assert sum(stats.accepted_by_position) == stats.num_accepted_tokens
    assert plain.mean_acceptance_length == 1.0
    assert stats.first_token is not None
    assert stats.finished is not None
    assert stats.arrived < stats.first_token <= stats.finished


def test_every_verb_takes_a_prediction(llm: LLM) -> None:
    """The step that ends the prompt has no draft, then 19 tokens by sixes: five steps; the text stays the same."""
    (plain,) = llm.generate("The cat sat on the", GREEDY)[0].outputs
    ids = plain.token_ids
    assert (plain.stats.num_steps, plain.stats.accepted_prediction_tokens) == (20, 0)
    messages = [{"role": "user", "content": "Hello"}]
    answer = llm.chat(messages, GREEDY)[0].outputs[0].token_ids
    found = [
        (ids, *(r.outputs[0] for r in llm.generate(["The cat sat on the"] * 2, GREEDY, prediction=ids))),
        (answer, llm.chat(messages, GREEDY, prediction=answer)[0].outputs[0]),
    ]
    for tokens, *outputs in found:
        for output in outputs:
            assert output.token_ids == tokens
            assert output.stats.num_steps == 1 + 4
            assert output.stats.accepted_prediction_tokens == 20 - 5
    last = [*llm.stream("The cat sat on the", GREEDY, prediction=ids)][-1]
    assert last.stats is not None
    assert last.stats.num_steps == 5
    last = [*llm.stream_chat(messages, GREEDY, prediction=answer)][-1]
    assert last.stats is not None
    assert last.stats.num_steps == 5


def test_a_predicted_text_is_encoded_without_special_tokens(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ids that reach the engine, once for all prompts of a call."""
    text, seen = "The cat sat", []
    add, encode = llm.engine.add, llm.tokenizer.encode

    def marked(text: str, add_special_tokens: bool = True) -> list[int]:
        return [0] * add_special_tokens + encode(text, False)

    monkeypatch.setattr(llm.tokenizer, "encode", marked)
    monkeypatch.setattr(llm.engine, "add", lambda request, grammar: (seen.append(request), add(request, grammar)))
    llm.generate(["a", [5, 6]], GREEDY, prediction=text)
    assert [request.prediction for request in seen] == [tuple(encode(text, False))] * 2
    assert seen[0].prompt_ids[0] == 0
    assert [request.drafter for request in seen] == [None, None]


def test_a_call_may_name_its_drafter(llm: LLM) -> None:
    """Two streams with different drafters and a plain one share their steps, and say what they say alone."""
    prompt = "one two three four five. " * 6
    (plain,) = llm.generate(prompt, GREEDY)[0].outputs
    streams = {name: llm.stream(prompt, GREEDY, drafter=name) for name in ("ngram", "none", "prediction")}
    texts = dict.fromkeys(streams, "")
    drafts = {}
    while streams:
        for name, stream in list(streams.items()):
            chunk = next(stream, None)
            if chunk is None:
                del streams[name]
                continue
            texts[name] += chunk.text
            drafts[name] = chunk.stats.num_draft_tokens if chunk.stats else 0
    assert texts == dict.fromkeys(texts, plain.text)
    assert drafts["ngram"] > 0
    assert (drafts["none"], drafts["prediction"]) == (0, 0), "a prediction was not given"


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"drafter": "ngrma"}, "drafter", "Did you mean 'ngram'"),
        ({"prediction": 5}, "prediction", "prediction is 5; it must be text or a list of token ids"),
        ({"prediction": {"content": "x"}}, "prediction", "must be text or a list of token ids"),
        ({"prediction": [-1]}, "prediction", "prediction holds token id -1"),
        ({"prediction": "x" * 3000}, "prediction", "the context is 256"),
    ],
)
def test_wrong_fields_are_input_errors(llm: LLM, tiny: Path, fields: dict[str, Any], param: str, message: str) -> None:
    for call in (llm.generate, llm.stream):
        with pytest.raises(InputError, match=message) as caught:
            list(call("fine", GREEDY, **fields))
        assert caught.value.param == param
    assert not llm.engine.has_work


def test_an_empty_prediction_is_none(llm: LLM) -> None:
    for prediction in ("", [], None):
        (output,) = llm.generate("abc", GREEDY, prediction=prediction)[0].outputs
        assert "prediction" not in output.stats.by_source


def test_async_calls_take_them_too(tiny: Path, llm: LLM) -> None:
    (plain,) = llm.generate("abc", GREEDY)[0].outputs
    messages = [{"role": "user", "content": "Hello"}]
    (answer,) = llm.chat(messages, GREEDY)[0].outputs

    async def main() -> None:
        async with AsyncLLM(str(tiny), dtype="float32", max_model_len=256, adaptive=False) as served:
            outputs = await asyncio.gather(
                served.generate("abc", GREEDY, prediction=plain.token_ids),
                served.generate("abc", GREEDY, drafter="ngram", priority=1),
                served.chat(messages, GREEDY, prediction=answer.token_ids),
                served.generate("abc", GREEDY),
            )
            found = [output.outputs[0] for output in outputs]
            assert [each.token_ids for each in found] == [each.token_ids for each in (plain, plain, answer, plain)], (
                "whoever drafted"
            )
            assert ["prediction" in each.stats.by_source for each in found] == [True, False, True, False]
            assert [each.stats.num_steps for each in found][::2] == [5, 5]
            for stream in (
                served.stream("abc", GREEDY, prediction=plain.token_ids),
                served.stream_chat(messages, GREEDY, prediction=answer.token_ids),
            ):
                chunks = [chunk async for chunk in stream]
                assert chunks[-1].stats is not None
                assert chunks[-1].stats.num_steps == 5
            with pytest.raises(InputError, match="Did you mean 'ngram'"):
                await served.generate("abc", GREEDY, drafter="ngrm")
            again = await served.generate("abc", GREEDY)
            assert again.outputs[0].text == plain.text, "nobody else notices"

    asyncio.run(asyncio.wait_for(main(), 60))


def test_n_completions_and_logprobs(llm: LLM) -> None:
    params = SamplingParams(n=3, temperature=1.0, seed=1, max_tokens=8, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    (result,) = llm.generate("hello there", params)
    assert [output.index for output in result.outputs] == [0, 1, 2]
    assert len({output.text for output in result.outputs}) == 3
    for output in result.outputs:
        assert output.logprobs is not None
        assert [entry.token for entry in output.logprobs] == output.token_ids
        assert output.cumulative_logprob == pytest.approx(sum(entry.logprob for entry in output.logprobs))
        assert all(len(entry.top) == 2 for entry in output.logprobs)
    assert result.prompt_logprobs is not None
    assert len(result.prompt_logprobs) == len(result.prompt_token_ids)


def test_what_leaves_no_token_is_refused_at_once_or_ends_alone(llm: LLM) -> None:
    """[5] is "&". What nothing can begin is refused before anything runs; what comes to a dead end later says so, and
    the prompts beside it are answered."""
    with pytest.raises(NoTokenLeftError, match="No token may come at position") as refused:
        llm.generate("x", SamplingParams(allowed_token_ids=[5, 5], bad_words=["&"]))
    assert (refused.value.param, refused.value.code) == ("allowed_token_ids", "no_token_left")
    with pytest.raises(NoTokenLeftError):
        llm.generate("x", SamplingParams(bad_words=["a"], structured=Structured.regex("a|ab"), n=2))
    late = SamplingParams(allowed_token_ids=[5], bad_words=["&&"], n=2, logprobs=1, max_tokens=4)
    stuck, fine = llm.generate(["x", "x"], [late, replace(late, bad_words=())])
    for completion in stuck.outputs:
        assert (completion.text, completion.finish_reason, completion.error_code) == ("&", "error", "no_token_left")
        assert "bad_words" in str(completion.error)
        assert len(completion.logprobs or ()) == 1
    assert [(each.text, each.error, each.error_code) for each in fine.outputs] == [("&&&&", None, None)] * 2
    *_, last = llm.stream("x", replace(late, n=1))
    assert (last.finish_reason, last.error_code) == ("error", "no_token_left")


def test_bad_words_never_appear(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    words = llm.generate("abc", params)[0].outputs[0].text[:2]
    banned = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, bad_words=[words])
    ids = llm.tokenizer.encode(words)
    output = llm.generate("abc", banned)[0].outputs[0].token_ids
    assert not any(output[i : i + len(ids)] == ids for i in range(len(output)))


def test_one_bad_prompt_refuses_the_call_and_leaves_nothing(llm: LLM) -> None:
    with pytest.raises(InputError, match="empty"):
        llm.generate(["fine", []], GREEDY)
    with pytest.raises(InputError, match="2 sampling parameters for 1 prompts"):
        llm.generate(["fine"], [GREEDY, GREEDY])
    assert not llm.engine.has_work
    llm.generate("still works", GREEDY)


def test_wrong_options_say_what_was_meant(tiny: Path) -> None:
    with pytest.raises(ConfigError, match="Did you mean 'drafter'"):
        LLM(str(tiny), draftr="ngram")
    with pytest.raises(ConfigError, match="Did you mean 'ngram'"):
        LLM(str(tiny), drafter="ngrams")
    with pytest.raises(ConfigError, match="at most 2048"):
        LLM(str(tiny), max_model_len=4096)
    closed = LLM(str(tiny), max_model_len=64)
    closed.close()
    with pytest.raises(EngineError, match="closed"):
        closed.generate("x")


def test_async_calls_are_batched_streamed_and_cancelled(tiny: Path, llm: LLM) -> None:
    prompts = [f"prompt number {i}" for i in range(6)]
    expected = [r.outputs[0].text for r in llm.generate(prompts, GREEDY)]

    async def main() -> None:
        async with AsyncLLM(str(tiny), dtype="float32", max_model_len=256, drafter="ngram") as served:
            results = await asyncio.gather(*(served.generate(p, GREEDY) for p in prompts))
            assert [r.outputs[0].text for r in results] == expected
            assert served.engine.counters.num_steps < 6 * 20, "calls were to share steps"
            text = "".join([chunk.text async for chunk in served.stream(prompts[0], GREEDY)])
            assert text == expected[0]
            with pytest.raises(InputError, match="empty"):
                await served.generate([])
            endless = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
            task = asyncio.create_task(served.generate("cancel me", endless))
            while not served.engine.requests:
                await asyncio.sleep(0.001)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            while served.engine.requests:
                await asyncio.sleep(0.001)
            assert served.engine.counters.num_aborted == 1
            assert served.engine.cache.num_free == served.engine.cache.num_blocks

    asyncio.run(asyncio.wait_for(main(), 60))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_failing_engine_tells_everyone(tiny: Path) -> None:
    async def main() -> None:
        served = AsyncLLM(str(tiny), max_model_len=64)

        def broken() -> None:
            raise RuntimeError("planted")

        served.engine.step = broken  # type: ignore[assignment]
        calls = [served.generate("a", GREEDY), served.generate("b", GREEDY)]
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(result, EngineError) and "planted" in str(result) for result in results)
        with pytest.raises(EngineError, match="planted"):
            await served.generate("c", GREEDY)
        await served.close()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_the_real_model_answers_the_same_with_and_without_drafts(smollm2: Path) -> None:
    """Greedy and seeded, alone and together, float32: the promise on real weights."""
    params = [
        SamplingParams(temperature=0, max_tokens=16),
        SamplingParams(temperature=0.8, top_p=0.95, seed=3, max_tokens=16),
    ]
    passage = "Bees visit flowers for nectar. Nectar is turned into honey. Honey feeds the hive in winter. "
    messages = [
        [{"role": "user", "content": f"Repeat this text: {passage}"}],
        [{"role": "user", "content": "What is the capital of France?"}],
    ]
    options = {"drafter": "none", "adaptive": False}
    with LLM(str(smollm2), dtype="float32", max_model_len=512, **options) as llm:
        plain = [llm.chat(m, p)[0].outputs[0] for m in messages for p in params]
        assert "Paris" in plain[2].text
        for drafter, has_seen in (("ngram", False), ("recycle", False), ("suffix", False), ("suffix", True)):
            if not has_seen:
                llm.use_drafter(drafter, 5)
            batch = llm.chat([m for m in messages for _ in params], params * 2)
            drafted = [result.outputs[0] for result in batch]
            assert [o.token_ids for o in drafted] == [o.token_ids for o in plain]
            assert sum(o.stats.num_accepted_tokens for o in drafted) > 0
    mean = sum(o.stats.num_accepted_tokens for o in drafted) / sum(len(o.token_ids) for o in drafted)
    assert mean > 0.4, "answers that were given before are known"
