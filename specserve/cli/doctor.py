"""`specserve doctor`: prints what specserve.doctor finds."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from specserve.cli.json_output import JsonFile, is_json_alone, write_json
from specserve.cli.options import ENGINE_HELP, MODEL, model_parameter
from specserve.config import DEFAULT_MODEL


def doctor(
    model: Annotated[str, model_parameter("The model, or LoRA adapter, whose folder is looked up.")] = DEFAULT_MODEL,
    *,
    isa: Annotated[str, Parameter(group=MODEL, help=ENGINE_HELP["isa"].text)] = "auto",
    json_file: JsonFile = None,
) -> None:
    """Show the device, memory, kernels, model folder and versions, and which models of the catalog fit. Loads no
    weights."""
    from specserve.doctor import as_dict, examine, show

    sections = examine(model, isa)
    write_json(json_file, as_dict(sections))
    if not is_json_alone(json_file):
        show(sections)
    for section in sections:
        if section.fault is not None:
            raise section.fault
