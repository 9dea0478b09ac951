"""Train a draft head for the default model on fifty prompts, and draft with it. It takes half a minute on one
core; a head that pays takes hours of text, or minutes on a GPU (docs/training.md)."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory

from specserve import LLM, SamplingParams
from specserve.train.config import TrainingOptions
from specserve.train.run import train

KIND = "medusa"  # or "eagle", "block"
QUESTIONS = ("What is a {}?", "Where does one find a {}?", "Tell me two facts about a {}.", "What is a {} made of?")
THINGS = "bridge river mountain lamp violin candle ship train garden castle clock mirror"

with TemporaryDirectory() as folder:
    prompts = Path(folder) / "prompts.jsonl"
    asked = [question.format(thing) for thing in THINGS.split() for question in QUESTIONS]
    prompts.write_text("".join(json.dumps({"prompt": each}) + "\n" for each in asked), "utf-8")
    options = TrainingOptions(
        prompts=prompts, out=Path(folder) / "head", temperatures=(0.0,), max_tokens=16, max_length=64, depth=1,
        draft_vocab_size=1024, batch_tokens=256, epochs=1.2, learning_rate=3e-3, evaluate_every=99,
    )  # fmt: skip
    train(KIND, "smollm2-135m", {}, options, print)
    greedy = SamplingParams(max_tokens=48, temperature=0)
    with LLM("smollm2-135m", drafter=KIND, drafter_options={"head": str(options.out)}, adaptive=False) as llm:
        talk = [{"role": "user", "content": "What is a waterfall?"}]
        drafted = llm.chat(talk, greedy)[0].outputs[0]
        assert drafted.token_ids == llm.chat(talk, greedy, drafter="none")[0].outputs[0].token_ids
        print(drafted.text)
        stats = drafted.stats
        print(f"{stats.num_accepted_tokens} of {stats.num_draft_tokens} draft tokens accepted")
        assert stats.num_accepted_tokens > 0
