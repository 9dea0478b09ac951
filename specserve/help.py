"""What the command line says of an option, beside the field that the option sets:
`max_num_seqs: Annotated[int, Help("Most sequences that run at once.", "Engine")] = 16`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Help:
    """An option's help text, and the section of a command's help that lists it; None: the section of its class."""

    text: str
    section: str | None = None
