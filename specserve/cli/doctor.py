"""`specserve doctor`: prints what specserve.doctor finds."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from specserve.cli.options import ENGINE_HELP, MODEL, OUTPUT
from specserve.config import DEFAULT_MODEL


def doctor(
    model: Annotated[str, Parameter(group=MODEL, help="The model whose folder is looked up.")] = DEFAULT_MODEL,
    *,
    isa: Annotated[str, Parameter(group=MODEL, help=ENGINE_HELP["isa"].text)] = "auto",
    json: Annotated[bool, Parameter(negative=(), group=OUTPUT, help="One JSON object instead of a table.")] = False,
) -> None:
    """Show the device, memory, kernels, model folder and versions, and which models of the catalog fit. Loads no
    weights."""
    from specserve.doctor import as_json, examine, show

    sections = examine(model, isa)
    if json:
        print(as_json(sections))
    else:
        show(sections)
    for section in sections:
        if section.fault is not None:
            raise section.fault
