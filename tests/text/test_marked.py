"""What is told of a template that looks into a conversation, and how often that is rendered for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specserve.errors import InputError
from specserve.text.chat import ChatTemplate
from specserve.text.conversation import whole
from specserve.text.marked import Message, Render
from specserve.text.tool_tags import HERMES
from tests.text.templates import TEMPLATES

PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


class Counting:
    """Renders with a template, and counts."""

    def __init__(self, source: str) -> None:
        self._template = ChatTemplate(Path("none"), {"chat_template": source}, {})
        self.times = 0

    def __call__(self, messages: Any) -> str:
        self.times += 1
        return self._template.render(messages, add_generation_prompt=True, continue_final_message=False, tools=None)


def unread(source: str, messages: list[Message]) -> tuple[str, ...]:
    render: Render = Counting(source)
    return whole(render, messages, HERMES).unread


def talk(count: int, **fields: Any) -> list[Message]:
    return [{"role": ("user", "assistant")[i % 2], "content": f"what {i}", **fields} for i in range(count)]


@pytest.mark.parametrize("name", ["no tools", "hermes", "qwen3", "json", "names and ids", "null"])
@pytest.mark.parametrize("count", [1, 10, 100])
def test_a_conversation_of_texts_is_rendered_twice(name: str, count: int) -> None:
    render = Counting(TEMPLATES[name])
    assert whole(render, talk(count), HERMES).unread == ()
    assert render.times == 2


def test_fields_that_the_template_ignores_take_one_rendering_more_however_many() -> None:
    render = Counting(TEMPLATES["no tools"])
    names = [f"field_{i}" for i in range(100)]
    found = whole(render, talk(10, **dict.fromkeys(names, True), number=7, text="a"), HERMES)
    assert sorted(found.unread) == sorted([*names, "number", "text"])
    assert render.times == 3


def test_numbers_that_are_written_take_no_rendering_of_their_own() -> None:
    render = Counting(TEMPLATES["json"])
    assert whole(render, talk(100, number=7, cost=2.5), HERMES).unread == ()
    assert render.times == 2


def test_a_field_that_was_not_looked_at_is_not_named() -> None:
    """However many there are before it."""
    names = [f"field_{i}" for i in range(100)]
    said: list[Message] = [{"role": "user", "content": "a", **dict.fromkeys(names, True)}]
    found = unread(PLAIN + "{% if messages[0].field_71 %}yes{% endif %}", said)
    assert sorted(found) == sorted({*names} - {"field_71"})


def test_a_boolean_that_is_read_of_one_message_is_named_for_the_others() -> None:
    source = PLAIN + "{% if messages[-1].is_error %}failed{% endif %}"
    failed = {"role": "tool", "content": "a", "is_error": True}
    assert unread(source, [{"role": "user", "content": "a"}, failed]) == ()
    assert unread(source, [{"role": "user", "content": "a"}, failed, failed]) == ("is_error",)


def test_a_text_that_is_found_elsewhere_in_the_prompt_is_missing_all_the_same() -> None:
    """Marks make it longer, and longer texts are written."""
    source = (
        "{% for m in messages %}{{ m.role }}: {% if m.content | length > 5 %}{{ m.content }}{% endif %}{% endfor %}"
    )
    assert unread(source, [{"role": "user", "content": "a long text"}]) == ()
    with pytest.raises(InputError, match="would be missing"):
        whole(Counting(source), [{"role": "user", "content": "user"}], HERMES)


def test_one_text_that_no_marks_can_tell_leaves_the_others_to_marks() -> None:
    """The template is not shown all the other texts alone, nor is any of them looked for by what it says."""
    source = (
        "{% for m in messages %}{% if m.content[:2] == '# ' %}{{ m.content[2:] }}{% else %}{{ m.content }}{% endif %}\n"
        "{% endfor %}"
    )
    said: list[Message] = [*talk(60), {"role": "user", "content": "# a title"}, *talk(60)]
    render = Counting(source)
    with pytest.raises(InputError, match="would be missing"):
        whole(render, said, HERMES)
    assert render.times < 30


def test_results_that_a_client_wrote_as_texts_of_a_user() -> None:
    """Qwen 3 looks at where they begin and end to find the last question, before which it takes reasoning out."""
    said: list[Message] = [{"role": "user", "content": "How warm?"}]
    for i in range(50):
        said.append({"role": "assistant", "content": f"look {i}", "reasoning_content": f"thought {i}"})
        said.append({"role": "user", "content": f"<tool_response>\n{i} degrees\n</tool_response>"})
    assert unread(TEMPLATES["qwen3"], said) == ()


def test_what_cannot_be_told_is_refused() -> None:
    said: list[Message] = [{"role": "user", "content": "a", **{f"field_{i}": True for i in range(2000)}}]
    with pytest.raises(InputError, match="cannot be told"):
        whole(Counting(TEMPLATES["json"]), said, HERMES)


def test_whether_roles_are_told_apart_is_known_with_tools_and_without() -> None:
    source = "{% for m in messages %}{% if tools %}{{ m.role }}: {% endif %}{{ m.content }}\n{% endfor %}"
    template = ChatTemplate(Path("none"), {"chat_template": source}, {})
    options = {"add_generation_prompt": True, "continue_final_message": False}
    for tools, names in (([{"type": "function"}], ()), (None, ("messages.role",)), ([{"type": "function"}], ())):
        found = template.render_whole([{"role": "user", "content": "a"}], None, tools=tools, **options)
        assert found.unread == names
