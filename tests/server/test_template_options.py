"""What an operator says of the chat template, and what is wrong with it, told at start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specserve.errors import ConfigError, ModelError
from specserve.server.options import ServeOptions
from specserve.server.template_options import template_options
from specserve.testing import write_tiny_model
from specserve.text.chat import TemplateOptions
from specserve.text.tokenizer import Tokenizer

CHAT = [{"role": "user", "content": "hi"}]


def test_a_text_and_values(tmp_path: Path) -> None:
    (tmp_path / "a.jinja").write_text("{{ messages[0].content }} {{ é }}", "utf-8")
    options = ServeOptions(chat_template=tmp_path / "a.jinja", default_chat_template_kwargs='{"é": [1, null]}')
    assert template_options(options) == TemplateOptions("{{ messages[0].content }} {{ é }}", {"é": [1, None]})
    assert template_options(ServeOptions()) == TemplateOptions()


@pytest.mark.parametrize(
    ("stated", "words"),
    [("{", "no JSON"), ("[1]", "must be an object"), ('"a"', "must be an object"), ("", "no JSON"),
     ('{"messages": []}', "may not set"), ('{"bos_token": "a"}', "may not set"), ('{"a b": 1}', "may not set"),
     ("[" * 10**5, "Give an object")],
)  # fmt: skip
def test_values_are_an_object_that_a_request_could_send(stated: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        template_options(ServeOptions(default_chat_template_kwargs=stated))
    assert "--default-chat-template-kwargs" in str(caught.value)


def test_a_file_must_be_a_template(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--chat-template .* cannot be read"):
        template_options(ServeOptions(chat_template=tmp_path / "nowhere"))
    (tmp_path / "latin").write_bytes(b"\xe9\xff")
    with pytest.raises(ConfigError, match=r"--chat-template .* cannot be read"):
        template_options(ServeOptions(chat_template=tmp_path / "latin"))
    (tmp_path / "broken").write_text("{% if %}")
    with pytest.raises(ModelError, match="--chat-template is broken"):
        template_options(ServeOptions(chat_template=tmp_path / "broken"))


@pytest.mark.parametrize(
    ("sent", "expected"), [({}, "hi low True"), ({"effort": "high"}, "hi high True"), ({"tools": [{}]}, "hi low True")]
)
def test_values_are_those_of_requests_that_say_no_others(tmp_path: Path, sent: dict[str, Any], expected: str) -> None:
    text = "{{ messages[0].content }} {{ effort }} {{ eos_token is defined }}{% set _ = tools %}"
    tokenizer = Tokenizer(write_tiny_model(tmp_path, "llama"), TemplateOptions(text, {"effort": "low"}))
    assert tokenizer.render_chat(CHAT, **sent) == expected
    assert tokenizer.takes_tools
    assert tokenizer.info()["chat_template"] == text
