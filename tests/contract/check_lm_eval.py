"""lm-eval's local-completions with the server's own tokenizer: two small tasks, with speculation and without."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import lm_eval
import pytest
from lm_eval.tasks import TaskManager

TASKS = ("contract_choice", "contract_copy")
NUM_ITEMS = {"contract_choice": 24, "contract_copy": 8}


@pytest.fixture(scope="module")
def evaluate(key: str, model: str) -> Callable[[str], Any]:
    os.environ["OPENAI_API_KEY"] = key
    tasks = TaskManager(include_path=str(Path(__file__).with_name("lm_eval")), include_defaults=False)

    def run(url: str) -> Any:
        return lm_eval.simple_evaluate(
            model="local-completions",
            model_args={
                "model": model,
                "base_url": f"{url}/v1/completions",
                "tokenizer_backend": "remote",
                "auth_token": key,
                "max_length": 2048,
                "num_concurrent": 2,
                "max_retries": 1,
            },
            tasks=list(TASKS),
            task_manager=tasks,
            batch_size=4,
            log_samples=True,
            bootstrap_iters=0,
        )

    return run


def num_accepted(url: str, key: str) -> int:
    with urlopen(Request(f"{url}/stats", headers={"Authorization": f"Bearer {key}"}), timeout=60) as reply:
        return int(json.load(reply)["speculation"]["num_accepted_tokens"])


def scores(result: Any) -> dict[str, float]:
    wanted = ("acc,none", "acc_norm,none", "exact_match,stripped")
    return {
        f"{task} {name.split(',')[0]}": value
        for task in TASKS
        for name, value in result["results"][task].items()
        if name in wanted
    }


def answers(result: Any, task: str) -> list[Any]:
    return [(sample["doc_id"], sample["resps"], sample["filtered_resps"]) for sample in result["samples"][task]]


def test_the_score_is_the_same_with_speculation(
    evaluate: Callable[[str], Any], url: str, plain_url: str, key: str, record_property: Callable[[str, object], None]
) -> None:
    before = num_accepted(url, key)
    drafted, plain = evaluate(url), evaluate(plain_url)
    assert num_accepted(url, key) > before
    assert num_accepted(plain_url, key) == 0
    for task in TASKS:
        assert len(drafted["samples"][task]) == NUM_ITEMS[task]
        assert answers(drafted, task) == answers(plain, task)
    for name, result in (("ngram", drafted), ("none", plain)):
        told = ", ".join(f"{key} {value:.4f}" for key, value in scores(result).items())
        record_property("told", f"--drafter {name:<5}  {told}")
    assert scores(drafted) == scores(plain)
    assert len(scores(plain)) == 3
    assert scores(plain)["contract_choice acc"] > 0.5, "worse than a model that has learned anything"
    assert scores(plain)["contract_copy exact_match"] > 0
