"""Options that several measurements have."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter, Token, validators

from specserve.cli.json_output import writable
from specserve.cli.options import MEASUREMENT, OUTPUT, SPECULATION, Whole

AT_LEAST_1, _UP_TO_64 = validators.Number(gte=1), validators.Number(gte=0, lte=64)


def names(kind: Any, tokens: Sequence[Token]) -> tuple[str, ...]:
    """A cyclopts converter for lists: with commas, spaces or both."""
    return tuple(part for token in tokens for part in token.value.replace(",", " ").split())


def numbers(kind: Any, tokens: Sequence[Token]) -> tuple[int, ...]:
    found = names(kind, tokens)
    if wrong := [number for number in found if not number.isdecimal()]:
        raise ValueError(f'"{wrong[0]}" is not a whole number; write them as 1,2,4.')
    return tuple(map(int, found))


Context = Annotated[
    Whole, Parameter(group=MEASUREMENT, validator=AT_LEAST_1, help="Tokens in the KV cache before the step.")
]
Repeats = Annotated[
    Whole, Parameter(group=MEASUREMENT, validator=AT_LEAST_1, help="Steps of each kind; times are medians over them.")
]
Text = Annotated[
    str, Parameter(group=MEASUREMENT, help='Text file to read; "python" is the language reference inside Python.')
]
Raw = Annotated[bool, Parameter(group=MEASUREMENT, negative=(), help="No chat template: continue the text.")]
Record = Annotated[
    Path | None,
    Parameter(group=OUTPUT, converter=writable, help="Write plain decoding's answers to this file, for bench replay."),
]
RecordTop = Annotated[
    Whole,
    Parameter(group=OUTPUT, validator=_UP_TO_64, help="With --record: so many best tokens of every position, too."),
]
Drafters = Annotated[
    tuple[str, ...],
    Parameter(
        group=SPECULATION,
        negative=(),
        consume_multiple=True,
        converter=names,
        show_default=",".join,
        help="Drafters to measure: one, or several as a,b,c.",
    ),
]
Adapters = Annotated[
    tuple[str, ...],
    Parameter(
        group=MEASUREMENT,
        negative=(),
        show_default=False,
        help="A LoRA adapter that answers prompts in turn with others: NAME=PATH, or a name of --lora; none is the "
        "model. May be repeated.",
    ),
]
Prompts = Annotated[
    str,
    Parameter(
        group=MEASUREMENT,
        help='JSON lines with prompt or turns (the first is asked), perhaps category; "demo" is a bundled set.',
    ),
]
Limit = Annotated[
    Whole | None,
    Parameter(group=MEASUREMENT, validator=AT_LEAST_1, help="That many prompts, from all categories alike."),
]
Schema = Annotated[
    Path | None,
    Parameter(group=MEASUREMENT, help="JSON Schema that all answers must fit: measures masks, counts misfits."),
]
