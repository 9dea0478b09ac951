"""Which tokens open and close a model's reasoning, by its own files, and where the answer to a prompt begins."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer as Backend

from specserve.testing import write_tiny_model
from specserve.text.reasoning import Reasoning
from specserve.text.tokenizer import Tokenizer

TURNS = "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
QWEN = TURNS + (  # Qwen 3's way: the model opens its reasoning itself, or the prompt has closed it
    "{% if add_generation_prompt %}<|start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
QWQ = TURNS + "{% if add_generation_prompt %}<|start|>assistant\n<think>\n{% endif %}"
MISTRAL = (
    "{% for m in messages %}{% if m.role == 'user' %}<|start|>{{ m.content }}<|pad|>"
    "{% else %}{{ m.content }}<|end|>{% endif %}{% endfor %}"
)
ASK = [{"role": "user", "content": "Is <think> a word?"}]
TALK = [*ASK, {"role": "assistant", "content": "<think>hm</think>Yes."}, {"role": "user", "content": "Why?"}]


def tokenizer(
    folder: Path, template: str | None, added: tuple[str, ...] = (), special: bool = False, **stated: Any
) -> Tokenizer:
    write_tiny_model(folder, "llama")
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    tokens = [AddedToken(token, normalized=False, special=special) for token in added]
    (backend.add_special_tokens if special else backend.add_tokens)(tokens)
    backend.save(str(folder / "tokenizer.json"))
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": template, **stated}))
    return Tokenizer(folder)


def found(made: Tokenizer) -> Reasoning:
    assert made.reasoning is not None
    return made.reasoning


def test_a_model_that_opens_its_reasoning_itself(tmp_path: Path) -> None:
    made = tokenizer(tmp_path, QWEN, ("<think>", "</think>"))
    reasoning = found(made)
    assert (reasoning.open, reasoning.close) == ((293,), (294,))
    assert reasoning.header == tuple(made.encode("assistant\n"))
    assert reasoning.controls == made.special_ids
    assert reasoning.eos_ids == made.eos_ids
    assert reasoning.beginning(made.encode_chat(ASK)) == "before"
    assert reasoning.beginning(made.encode_chat(TALK)) == "before", "what was reasoned before is over"
    assert reasoning.beginning(made.encode_chat(ASK, enable_thinking=False)) == "after"


def test_a_prompt_that_has_opened_the_reasoning(tmp_path: Path) -> None:
    made = tokenizer(tmp_path, QWQ, ("<think>", "</think>"))
    reasoning = found(made)
    assert reasoning.beginning(made.encode_chat(ASK)) == "inside"
    begun = [*ASK, {"role": "assistant", "content": "<think>hm"}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    assert reasoning.beginning(made.encode("<|start|>assistant\n<think>hm, <")) == "inside"
    assert reasoning.beginning(made.encode("<|start|>assistant\n<think>hm</think>Yes")) == "after"
    assert reasoning.beginning(made.encode_chat(begun, **options)) == "after", "written by a caller it is text"


def test_prompts_that_are_plain_text(tmp_path: Path) -> None:
    reasoning, made = found(made := tokenizer(tmp_path, QWEN, ("<think>", "</think>"))), made
    for text, where in [
        ("Once upon a time", "after"),
        ("<think>Once", "inside"),
        ("<think>Once</think>", "after"),
        ("<think>Once<|end|>\n", "after"),
        ("a</think>b<think>c", "inside"),
        ("", "after"),
    ]:
        assert reasoning.beginning(made.encode(text)) == where, text


def test_special_tokens_of_mistral(tmp_path: Path) -> None:
    """Nothing is written where the model's turn begins; the marks are control tokens, and examples of them stand in the
    prompt."""
    made = tokenizer(tmp_path, MISTRAL, ("[THINK]", "[/THINK]"), special=True)
    reasoning = found(made)
    assert reasoning.header == ()
    assert reasoning.controls == made.special_ids - {293, 294}
    assert reasoning.beginning(made.encode_chat(ASK)) == "before"
    assert reasoning.beginning(made.encode("[THINK]so[/THINK]<|start|>Hi<|pad|>")) == "before"
    assert reasoning.beginning(made.encode("[THINK]so<|start|>Hi<|pad|>")) == "before"
    assert reasoning.beginning(made.encode("<|pad|>[THINK]so")) == "inside"
    assert reasoning.beginning(made.encode("<|pad|>Yes")) == "after"


def test_marks_of_several_tokens(tmp_path: Path) -> None:
    made = tokenizer(tmp_path, QWQ)
    reasoning = found(made)
    assert reasoning.open == tuple(made.encode("<think>"))
    assert len(reasoning.close) > 1
    assert reasoning.beginning(made.encode_chat([{"role": "user", "content": "Hi"}])) == "inside"
    assert reasoning.beginning(made.encode_chat(ASK, add_generation_prompt=False)) == "after"


def test_what_the_files_state_goes_first(tmp_path: Path) -> None:
    fields = {"reasoning_content": {"open": "<a>", "close": "</a>", "content": "text"}}
    made = tokenizer(tmp_path, QWEN, ("<think>", "</think>"), response_template={"fields": fields})
    assert found(made).open == tuple(made.encode("<a>"))
    assert found(made).close == tuple(made.encode("</a>"))


def test_a_family_is_known_by_its_calls(tmp_path: Path) -> None:
    calls = "[TOOL_CALLS][ARGS]"
    made = tokenizer(tmp_path, QWEN + "{# " + calls + " #}", ("[THINK]", "[/THINK]", "<think>", "</think>"))
    assert found(made).open == (293,)


@pytest.mark.parametrize("template", [None, TURNS + "{# <tool_call> #}"])
def test_models_that_do_not_reason(tmp_path: Path, template: str | None) -> None:
    assert tokenizer(tmp_path, template).reasoning is None
    assert tokenizer(tmp_path / "one", template, ("<think>",)).reasoning is None, "nothing closes it"


@pytest.mark.parametrize("template", [None, "{{ raise_exception('no') }}", "{% broken"])
def test_without_a_template_nothing_says_where_the_turn_begins(tmp_path: Path, template: str | None) -> None:
    made = tokenizer(tmp_path, template, ("<think>", "</think>"))
    reasoning = found(made)
    assert reasoning.header is None
    assert reasoning.beginning(made.encode("<|start|>assistant\n")) == "after"
    assert reasoning.beginning(made.encode("<|start|>assistant\n<think>")) == "inside"
