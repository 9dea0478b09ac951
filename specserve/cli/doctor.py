"""`specserve doctor`: prints what specserve.doctor finds."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from specserve.cli.options import ENGINE_HELP, MODEL
from specserve.config import DEFAULT_MODEL


def doctor(
    model: Annotated[str, Parameter(group=MODEL, help="The model whose folder is looked up.")] = DEFAULT_MODEL,
    *,
    isa: Annotated[str, Parameter(group=MODEL, help=ENGINE_HELP["isa"].text)] = "auto",
) -> None:
    """Show the device, memory, kernels, model folder and versions, without loading any weights."""
    from specserve.doctor import examine, show

    sections = examine(model, isa)
    show(sections)
    for section in sections:
        if section.fault is not None:
            raise section.fault
