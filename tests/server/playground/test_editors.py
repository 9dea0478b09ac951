"""The editors of output formats and tools, and conversations with calls of tools."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest

from specserve.server.wire.fields import Limits
from specserve.server.wire.openai.requests import ChatCompletionRequest, read
from tests.server.playground.replies import WHOLE, Scripted, answered, calling_bytes, script

ROOT = Path(__file__).parents[3]
LIMITS = Limits(vocab_size=1000, max_model_len=256)
LABELS = {
    "A recipe (JSON Schema)": "Give me a recipe for pancakes as JSON.",
    "A city (JSON Schema)": "Describe Paris as JSON.",
    "Yes or no (choice)": "Is the sky blue?",
    "A date (regular expression)": "When did the first person walk on the moon?",
    "Arithmetic (grammar)": "Write a sum of three numbers.",
}


def opened(open_page: Any, *replies: Scripted) -> Any:
    playground = open_page(script(*(replies or [Scripted([WHOLE])])))
    playground.open_settings()
    return playground


def sent(playground: Any) -> Any:
    """The last request, which the server's own types take whole."""
    body = playground.script.chats[-1]
    assert read(ChatCompletionRequest, json.dumps(body).encode(), LIMITS).ignored(LIMITS) == []
    return body


def example(open_page: Any, label: str) -> Any:
    playground = opened(open_page)
    playground.page.select_option("#format-example", label=label)
    assert playground.page.input_value("#entry") == LABELS[label]
    playground.page.press("#entry", "Enter")
    playground.answer.wait_for()
    playground.until_idle()
    return sent(playground)


def test_every_example_is_offered(open_page: Any) -> None:
    options = opened(open_page).page.locator("#format-example option").all_text_contents()
    assert options[1:] == list(LABELS)


def test_the_recipe_is_that_of_the_example_program(open_page: Any) -> None:
    """Of examples/structured_output.py, without loading a model."""
    from pydantic import BaseModel, Field

    tree = ast.parse((ROOT / "examples/structured_output.py").read_text("utf-8"))
    (recipe,) = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    names: dict[str, Any] = {"BaseModel": BaseModel, "Field": Field}
    exec(compile("from typing import Literal\n" + ast.unparse(recipe), "recipe", "exec", dont_inherit=True), names)
    schema = names["Recipe"].model_json_schema()
    told = example(open_page, "A recipe (JSON Schema)")["response_format"]
    assert told["type"] == "json_schema"
    assert _bare(told["json_schema"]["schema"]) == _bare(schema)


def _bare(schema: Any) -> Any:
    """Without titles, and without the type that an enum implies."""
    if isinstance(schema, list):
        return [_bare(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    dropped = {"title"} | ({"type"} if "enum" in schema else set())
    return {name: _bare(value) for name, value in schema.items() if name not in dropped}


def test_the_grammars_are_those_of_the_library(open_page: Any) -> None:
    library = ROOT / "grammars/library"
    date = example(open_page, "A date (regular expression)")["structured_outputs"]
    assert date == {"regex": (library / "date.regex").read_text("utf-8").strip()}
    arithmetic = example(open_page, "Arithmetic (grammar)")["structured_outputs"]
    assert arithmetic == {"grammar": (library / "arithmetic.ebnf").read_text("utf-8").rstrip("\n")}


def test_the_other_examples_are_those_of_the_documentation(open_page: Any) -> None:
    docs = (ROOT / "docs/structured-output.md").read_text("utf-8")
    city = example(open_page, "A city (JSON Schema)")["response_format"]["json_schema"]["schema"]
    (fields,) = re.findall(r"class City\(BaseModel\):\n((?:    .*\n)+)", docs)
    kinds = {"str": "string", "bool": "boolean"}
    stated = {name: kinds[kind] for name, kind in re.findall(r"(\w+): (\w+)", fields)}
    assert {name: value["type"] for name, value in city["properties"].items()} == stated
    assert city["required"] == list(stated)
    choice = example(open_page, "Yes or no (choice)")
    assert f'"structured_outputs": {json.dumps(choice["structured_outputs"])}' in docs


@pytest.mark.parametrize(
    ("kind", "text", "fields"),
    [
        ("json_object", None, {"response_format": {"type": "json_object"}}),
        ("choice", "a\n\n b \n", {"structured_outputs": {"choice": ["a", " b "]}}),
        ("regex", "[a-z]+\n", {"structured_outputs": {"regex": "[a-z]+"}}),
    ],
)
def test_formats(open_page: Any, kind: str, text: str | None, fields: Any) -> None:
    playground = opened(open_page)
    playground.page.select_option("#format", kind)
    assert playground.page.locator("#format-text").is_visible() == (text is not None)
    if text is not None:
        playground.page.fill("#format-text", text)
    playground.send()
    assert {name: sent(playground)[name] for name in fields} == fields


@pytest.mark.parametrize(
    ("kind", "text", "told"),
    [
        ("json_schema", '{"type": ', "The schema cannot be read as JSON: "),
        ("json_schema", "[]", "The schema must be a JSON object."),
        ("regex", " ", "The format is empty."),
    ],
)
def test_what_cannot_be_sent_is_told_at_once(open_page: Any, kind: str, text: str, told: str) -> None:
    playground = opened(open_page)
    page = playground.page
    page.select_option("#format", kind)
    page.fill("#format-text", text)
    assert page.locator("#format-text-problem").text_content().startswith(told)
    assert page.locator("#format-text").get_attribute("aria-invalid") == "true"
    page.locator("#format-fold").evaluate("fold => { fold.open = false; }")
    playground.begin()
    assert page.locator("#format-fold").get_attribute("open") is not None, "what is wrong is in sight"
    assert playground.script.chats == []
    page.select_option("#format", "")
    playground.send()
    assert "response_format" not in sent(playground)


@pytest.mark.parametrize("text", ["{}", "[]", "["])
def test_tools_must_be_a_list(open_page: Any, text: str) -> None:
    page = opened(open_page).page
    page.fill("#tools", text)
    assert page.locator("#tools-problem").text_content().startswith("The tools ")


# --- calls ------------------------------------------------------------------------------------------------------------


def test_calls_are_shown_answered_and_kept(open_page: Any) -> None:
    """The tool is that of examples/tool_call.py."""
    arguments = '{"city":"Oslo","days":3}'
    called = Scripted([calling_bytes(("get_weather", arguments), ("get_weather", '{"city":'))])
    playground = opened(open_page, called, answered("It stays **dry**."))
    page = playground.page
    page.select_option("#tools-example", label="The weather in a city")
    page.press("#entry", "Enter")
    page.locator("#result-1").wait_for()
    playground.until_idle()
    body = sent(playground)
    tree = ast.parse((ROOT / "examples/tool_call.py").read_text("utf-8"))
    tool = next(ast.literal_eval(n.value) for n in tree.body if isinstance(n, ast.Assign) and n.targets[0].id == "TOOL")
    assert (body["tools"], body["tool_choice"]) == ([{"type": "function", "function": tool}], "required")
    shown = playground.answer.locator(".calls pre").all_text_contents()
    assert shown == [json.dumps(json.loads(arguments), indent=2), '{"city":']
    assert page.locator(".results label").all_text_contents() == ["Result of get_weather"] * 2
    page.fill("#result-0", "dry")
    page.fill("#result-1", "wet")
    page.click("text=Send results")
    page.locator("article.answer .markdown >> text=dry").wait_for()
    playground.until_idle()
    _, call, *results = sent(playground)["messages"]
    assert call["tool_calls"][0] == {
        "id": "call-0",
        "type": "function",
        "function": {"name": "get_weather", "arguments": arguments},
    }
    assert results == [
        {"role": "tool", "tool_call_id": "call-0", "content": "dry"},
        {"role": "tool", "tool_call_id": "call-1", "content": "wet"},
    ]
    assert page.locator(".results").count() == 0
    page.reload()
    page.locator("#send:enabled").wait_for()
    page.locator("#history summary").click()
    page.locator("#kept .title").click()
    assert page.locator("article").count() == 5
    with page.expect_download() as download:
        page.click("#export-markdown")
    text = download.value.path().read_text("utf-8")
    assert f"Calls `get_weather`:\n\n```json\n{arguments}\n```" in text
    assert "## Result of a tool\n\n```\ndry\n```" in text
