"""What an operator says of the chat template, checked before anything listens."""

from __future__ import annotations

import json
from pathlib import Path

from specserve.errors import ConfigError
from specserve.files import read_text
from specserve.server.options import ServeOptions
from specserve.server.wire.openai.requests import template_values
from specserve.text.chat import MOST_TEMPLATE_BYTES, ChatTemplate, TemplateOptions


def template_options(options: ServeOptions) -> TemplateOptions:
    """Raises ConfigError for a file that cannot be read, and for values that a template may not be given, ModelError
    for a template that is broken."""
    stated, file = options.default_chat_template_kwargs, options.chat_template
    try:
        values = template_values(json.loads(stated))
    except (ValueError, RecursionError) as error:
        why = f"is {stated!r}, which is no JSON: {error}." if isinstance(error, json.JSONDecodeError) else str(error)
        raise ConfigError(
            f'--default-chat-template-kwargs {why} Give an object such as {{"enable_thinking": false}}.'
        ) from error
    try:
        text = None if file is None else read_text(file, MOST_TEMPLATE_BYTES, pipes=True)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--chat-template {file} cannot be read: {error}.") from error
    found = TemplateOptions(text, values)
    if text is not None:
        _ = ChatTemplate(Path(), {}, {}, found).takes_tools
    return found
