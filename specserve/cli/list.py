"""`specserve list`: the models on this machine, or all of the catalog."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

from cyclopts import Parameter

from specserve.cli.json_output import JsonFile, is_json_alone, write_json
from specserve.cli.options import OUTPUT
from specserve.terminal import FittedTable, console

GB = 10**9
Columns = dict[str, str]  # what they show, and how it is aligned


def list_models(
    *,
    every: Annotated[
        bool, Parameter(name="--all", negative=(), group=OUTPUT, help="All of the catalog, fetched or not.")
    ] = False,
    json_file: JsonFile = None,
) -> None:
    """Show the models on this machine: names, sizes on the disk, since when. With --all those that can be fetched."""
    rows = _catalog() if every else _installed()
    write_json(json_file, rows)
    if is_json_alone(json_file):
        return
    if every:
        print_table(
            {"name": "left", "parameters": "right", "fetch": "right", "int8": "right", "int4": "right"}
            | {"context": "right", "does": "left", "drafts": "left", "licence": "left"},
            [
                {
                    "name": row["name"] + (" *" if row["installed"] else ""),
                    "parameters": f"{row['parameters'] / 1e9:.2f} B",
                    "fetch": f"{row['download_bytes'] / GB:.1f} GB",
                    "int8": f"{row['memory_bytes']['int8'] / GB:.1f} GB",
                    "int4": f"{row['memory_bytes']['int4'] / GB:.1f} GB",
                    "context": f"{row['context']:,}",
                    "does": ", ".join(row["abilities"]),
                    "drafts": row["draft_model"] or "",
                    "licence": row["licence"] + (" (gated)" if row["gated"] else ""),
                }
                for row in rows
            ],
        )
    else:
        print_table(
            {"name": "left", "size": "right", "since": "left", "folder": "left"},
            [
                {
                    "name": row["name"],
                    "size": f"{row['num_bytes'] / 1e6:,.0f} MB",
                    "since": date(row["when"]),
                    "folder": row["folder"],
                }
                for row in rows
            ],
        )


def print_table(columns: Columns, rows: list[dict[str, str]]) -> None:
    """Nothing for no rows. A pipe gets lines as long as they are."""
    if not rows:
        return
    table = FittedTable(box=None, pad_edge=False, header_style="bold")
    for name, justify in columns.items():
        table.add_column(name, justify="right" if justify == "right" else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(row[name] for name in columns))
    screen = console(highlight=False, markup=False)
    if not screen.is_terminal:
        screen.width = 10_000
    screen.print(table)


def _installed() -> list[dict[str, Any]]:
    from specserve.checkpoint.installed import installed

    return [
        {
            "name": model.name,
            "hub_id": model.hub_id,
            "num_bytes": model.num_bytes,
            "when": model.when,
            "folder": str(model.folder),
        }
        for model in installed()
    ]


def _catalog() -> list[dict[str, Any]]:
    from specserve.checkpoint.entries import MODELS
    from specserve.checkpoint.installed import installed
    from specserve.checkpoint.wheel import CATALOG

    here = {model.name for model in installed()}
    return [
        {
            "name": name,
            "hub_id": model.hub_id,
            "installed": name in here,
            "parameters": model.parameters,
            "download_bytes": CATALOG[name].wheel_bytes if name in CATALOG else model.download_bytes,
            "memory_bytes": {kind: round(model.weight_bytes(kind)) for kind in ("bfloat16", "int8", "int4")},
            "kv_bytes_per_token": round(model.kv_bytes(1)),
            "context": model.context,
            "licence": model.licence,
            "gated": model.gated,
            "abilities": ["chat", *(["tools"] if model.tools else []), *(["reasoning"] if model.reasons else [])],
            "draft_model": model.draft,
            "draft_head": None if model.head is None else {"drafter": model.head[0], "hub_id": model.head[1]},
        }
        for name, model in MODELS.items()
    ]


def date(when: float) -> str:
    return datetime.fromtimestamp(when).strftime("%Y-%m-%d %H:%M") if when else ""
