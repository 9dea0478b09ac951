"""`specserve doctor --head`: prints what specserve.bench.heads finds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specserve.cli.json_output import tables, write_json
from specserve.errors import ConfigError


def diagnose_head(
    head: str | None, engine: Mapping[str, Any], text: str | None, depth: int, json_file: Path | None
) -> None:
    """Replay the head beside the model that the engine's options name, and say where acceptance is lost. Raises as
    bench.heads.diagnose does."""
    from specserve.bench.heads.diagnose import diagnose, subject, texts_of
    from specserve.bench.heads.report import acceptance_table, cost_table, headline, verdict
    from specserve.cli.bench import progress_bar
    from specserve.text.tokenizer import Tokenizer

    if head is None:
        raise ConfigError("--text is what --head is replayed on. Give both.")
    options = {name: value for name, value in engine.items() if name != "model"}
    of = subject(engine["model"], head)
    texts = texts_of(Tokenizer(of.folder), text)
    with progress_bar() as bar:
        task = bar.add_task("loading", total=None)
        figures = diagnose(
            of, texts, options, depth=depth, on_part=lambda name: bar.update(task, advance=1, description=name)
        )
    write_json(json_file, figures)
    console = tables(json_file)
    for part in (headline(figures), "", acceptance_table(figures), "", cost_table(figures), "", *verdict(figures)):
        console.print(part, highlight=False, soft_wrap=True, markup=False)
