"""Lets an engine begin with what earlier runs found of its drafters."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from datetime import date
from functools import partial
from pathlib import Path

from specserve.checkpoint.trials import Trial, TrialFile
from specserve.config import EngineConfig
from specserve.ops import Ops
from specserve.speculation.controller import DraftController
from specserve.speculation.upkeep import Upkeep
from specserve.version import __version__

_log = logging.getLogger(__name__)
_LEAST_STEPS = 64  # of a run that tells something of a drafter


def recall_trials(drafting: DraftController, config: EngineConfig, folder: Path, ops: Ops) -> None:
    """Let drafters rest at first that lost their last trial on that model, run in that way, and keep what is found of
    them from now on when the engine closes; nothing without `adaptive_cache`."""
    if not (config.adaptive and config.adaptive_cache):
        return
    options = "".join(f" --drafter-options.{name} {value}" for name, value in config.drafter_options.items())
    threads = "" if config.threads is None else f", {config.threads} threads"
    file = TrialFile(
        {
            "folder": str(folder),
            "kernels": f"{ops.quantization} {str(ops.dtype).removeprefix('torch.')}, {ops.instruction_set}{threads}",
            "drafts": f"{config.drafter}{options}, {config.num_speculative_tokens} tokens, {config.verification}",
            "version": __version__,
        }
    )
    known = file.read()
    drafting.recall({name: trial.num_failed for name, trial in known.items()})
    for part in drafting.policy.own.parts:
        if part.is_resting:
            said = "Drafter %s rests at first: it saved less than it took on %s. --no-adaptive-cache tries it at once."
            _log.info(said, part.name, known[part.name].day)
    drafting.keep_for_next_start = partial(_keep, file, known)


def _keep(file: TrialFile, known: Mapping[str, Trial], found: Mapping[str, Upkeep]) -> None:
    """Write what a run has found, over what was known."""
    trials = dict(known)
    for name, each in found.items():
        if each.num_steps >= _LEAST_STEPS:
            day = date.today().isoformat()
            trials[name] = Trial(each.num_failed, each.num_steps, each.saved / each.seconds, day)
    if trials != known:
        file.write(trials)
