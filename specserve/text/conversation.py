"""Renders a conversation so that nothing of it is missing in silence. Messages, calls and results that a chat template
leaves out are written as text, or the conversation is refused; of other fields it is told which are not read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from specserve.errors import InputError
from specserve.text.marked import ARGUMENTS, Field, Message, Render, left_out
from specserve.text.tool_tags import HERMES, CallStyle

_NAME = "tool_calls.function.name"
_CALL = (_NAME, ARGUMENTS)
_RESULT = ("<tool_response>\n", "\n</tool_response>")  # as Hermes and Qwen write them
_JOINED = "\n\n"  # between system messages that become one


class Rendered(NamedTuple):
    """`messages` as the template was given them, the `text` it made, and the names of fields that it did not read, such
    as "tool_calls.id"."""

    messages: Sequence[Message]
    text: str
    unread: tuple[str, ...]


def whole(render: Render, messages: Sequence[Message], style: CallStyle | None) -> Rendered:
    """The conversation with all of its texts, calls and results. `style` is how the model writes calls, None where that
    is not known. A name with a dot is none that a template knows: it is told of, and kept from it.

    Raises InputError for what cannot be put into the prompt, and what the template refuses.
    """
    named = [name for message in messages for name in message if "." in name]
    plain = [{name: v for name, v in message.items() if "." not in name} for message in messages] if named else messages
    found = _first_whole(render, plain, style or HERMES)
    if "tool_call_id" in found.unread and (ordered := in_order_of_calls(plain)) != list(plain):
        found = _first_whole(render, ordered, style or HERMES)  # their places alone tell whose results they are
    return found._replace(unread=tuple(dict.fromkeys([*found.unread, *named])))


def _first_whole(render: Render, messages: Sequence[Message], style: CallStyle) -> Rendered:
    refusal: InputError | None = None
    lost: list[Field] = []
    for written in _ways(messages, style, lost):
        try:
            text = render(written.messages)
        except InputError as error:
            refusal = refusal or error
            continue
        fields = left_out(render, written.messages, text, written.answers)
        missing = [field for field in fields if _must_be_in(field)]
        if not missing:
            names = [*(field.name for field in fields), *written.unread]
            return Rendered(written.messages, text, tuple(dict.fromkeys(names)))
        lost += [] if lost else missing
    raise refusal or _refused(messages, lost[0])


def _must_be_in(field: Field) -> bool:
    return field.name == "content" or field.name in _CALL


def _refused(messages: Sequence[Message], field: Field) -> InputError:
    role = messages[field.message]["role"] if field.message < len(messages) else "assistant"
    return InputError(
        f"messages: the {field.name} of a message of the role {role!r} would be missing in the prompt: this model's "
        "chat template leaves it out. Put it into another message, such as the first system message or a user's.",
        "messages",
    )


# --- ways to write a conversation -------------------------------------------------------------------------------------


class _Written(NamedTuple):
    """A way to write a conversation. It has not the fields `unread`; messages at the places `calls` have calls in their
    text."""

    messages: Sequence[Message]
    unread: Sequence[str] = ()
    calls: Collection[int] = ()

    @property
    def answers(self) -> Collection[int]:
        """Places of messages that may begin with reasoning."""
        answers = {i for i, message in enumerate(self.messages) if message["role"] == "assistant"}
        return answers.difference(self.calls)


def _ways(messages: Sequence[Message], style: CallStyle, lost: Sequence[Field]) -> Iterator[_Written]:
    """Ways to write a conversation, the plainest first. `lost` is what one before has lost."""
    yield _Written(messages)
    joined = _with_one_system_message(messages)
    if joined is not messages:
        yield _Written(messages := joined)
    calls = any(message.get("tool_calls") for message in messages)
    results = any(message["role"] == "tool" for message in messages)
    if calls:
        yield _Written([_without_empty_content(message) for message in messages])
        if not any(field.name in _CALL for field in lost):
            yield _as_text(messages, style, results=False)
    if calls or results:
        yield _as_text(messages, style, results=True)


def _with_one_system_message(messages: Sequence[Message]) -> Sequence[Message]:
    """Of several system messages before the others a template may read the first."""
    count = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))
    texts = [text for message in messages[:count] if isinstance(text := message.get("content"), str)]
    if len(texts) < max(2, count):
        return messages
    fields = {name: v for message in messages[:count] for name, v in message.items()}
    return [{**fields, "content": _JOINED.join(texts)}, *messages[count:]]


def _without_empty_content(message: Message) -> Message:
    """Some templates write calls where the content is null, as OpenAI sends it."""
    return {**message, "content": None} if message.get("tool_calls") and not message.get("content") else message


def _as_text(messages: Sequence[Message], style: CallStyle, results: bool) -> _Written:
    """Calls as the model writes them, and with `results` what they gave as messages of a user."""
    said: list[Message] = []
    unread: list[str] = []
    calls: set[int] = set()
    for message in messages:
        is_result = results and message["role"] == "tool"
        if message.get("tool_calls"):
            unread += _names_beside(message["tool_calls"])
            calls.add(len(said))
            message = _calls_as_text(message, style)
        elif is_result:
            message = {**message, "role": "user", "content": _content_text(message).join(_RESULT)}
        if results and said and said[-1]["role"] == message["role"] == "user" and (is_result or _is_result(said[-1])):
            both = f"{_content_text(said[-1])}\n{_content_text(message)}"
            message = {**said.pop(), **message, "content": both}
        said.append(message)
    return _Written(said, unread, calls)


def _names_beside(calls: Sequence[Mapping[str, Any]]) -> list[str]:
    """Of fields of calls that their texts do not have."""
    names = [
        f"tool_calls.{name}" for call in calls for name, v in call.items() if v and name not in ("function", "type")
    ]
    names += [f"tool_calls.function.{name}" for call in calls for name, v in call["function"].items() if v]
    return [name for name in names if name not in _CALL]


def _is_result(message: Message) -> bool:
    return _content_text(message).startswith(_RESULT[0])


def _calls_as_text(message: Message, style: CallStyle) -> Message:
    calls = [style.written(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]]
    text = (style.separator or "\n").join(calls).join(style.around)
    content = _content_text(message)
    others = {name: v for name, v in message.items() if name != "tool_calls"}
    return {**others, "content": f"{content}\n{text}" if content else text}


def _content_text(message: Message) -> str:
    """Parts are joined by line ends, as those of requests are."""
    content = message.get("content")
    if isinstance(content, str) or not content:
        return content or ""
    return "\n".join(part["text"] if isinstance(part, Mapping) and "text" in part else str(part) for part in content)


def in_order_of_calls(messages: Sequence[Message]) -> list[Message]:
    """Results that follow each other in the order of the calls before them."""
    ordered: list[Message] = []
    places: dict[Any, int] = {}
    for are_results, group in groupby(messages, lambda message: message["role"] == "tool"):
        said = list(group)
        if are_results:
            said.sort(key=lambda message: places.get(message.get("tool_call_id"), len(places)))
        else:
            places = {call.get("id"): i for i, call in enumerate(said[-1].get("tool_calls") or ())}
        ordered += said
    return ordered
