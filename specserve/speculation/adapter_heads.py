"""Draft heads that LoRA adapters bring: each drafts for its adapter's sequences, the engine's own for all others."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import threading
from pathlib import Path
from typing import Any, NamedTuple

from specserve.adapters import AdapterSource
from specserve.checkpoint import catalog
from specserve.errors import ConfigError
from specserve.registry import NONE
from specserve.speculation.base import Drafter, DraftRequest, SequenceView, StepReport
from specserve.speculation.host import DraftHost
from specserve.speculation.policy import Policy
from specserve.types import Draft

_log = logging.getLogger(__name__)
_FILES = ("config.json", "*.safetensors", "*.bin", "*_head.pt")  # what makes a head, of all that its folder may hold


class AdapterHead(NamedTuple):
    """A head that was read."""

    folder: Path
    kind: str
    head: Any  # as models.heads runs it

    def combined(self, adapter: str) -> str:
        """The digest of an adapter, hex, that drafts with this head: KV of one head is nothing to another."""
        digest = hashlib.sha256(bytes.fromhex(adapter))
        for path in _files(self.folder):
            with path.open("rb") as file:
                digest.update(f"{path.name} ".encode() + hashlib.file_digest(file, "sha256").digest())
        return digest.hexdigest()


def _files(folder: Path) -> list[Path]:
    return sorted(path for pattern in _FILES for path in folder.glob(pattern))


class AdapterHeads:
    """The heads of the adapters that are loaded, by their digests. A head drafts where the engine drafts with one of
    its kind: with the same options, in the same layers of KV, as no sequence has two of them."""

    def __init__(self, policy: Policy) -> None:
        self._policy, self._context = policy, policy.context
        self._held: dict[str, tuple[AdapterHead, int]] = {}  # with how many loads there are of it
        self._loading = threading.Lock()
        self._split: dict[DraftHost, HeadsByAdapter] = {}

    def read(self, source: AdapterSource) -> AdapterHead | None:
        """The head that an adapter brings; None: none, or one that lies beside it and is not of the kind that the
        engine drafts with, which is logged. On any thread. Raises ModelError for one that cannot be run, and
        ConfigError for one that is named and could not draft."""
        folder = catalog.resolve_head(source.head) if source.head else Path(source.path).expanduser() / "head"
        own = self._policy.own.name
        if not source.head and (own == NONE or not _files(folder)):  # perhaps one that is being trained
            return None
        kind = self._context.head_kind(str(folder))
        if self._host(kind) is None:
            if source.head:
                raise ConfigError(
                    f"Adapter {source.name!r} names the head {folder}, which drafts under --drafter {kind}; this "
                    f"engine drafts with {own!r}. Start it with --drafter {kind}, or with auto and the head of all "
                    "others as --drafter-options.head, or leave head= out."
                )
            _log.warning("Adapter %s: its head, of kind %s, drafts nothing under --drafter %s.", source.name, kind, own)
            return None
        return AdapterHead(folder, kind, self._context.load_head(str(folder), kind))

    def hold(self, digest: str, head: AdapterHead) -> None:
        """Keep it, until it is dropped as often. On any thread."""
        with self._loading:
            known, count = self._held.get(digest, (head, 0))
            self._held[digest] = known, count + 1

    def open(self, digest: str) -> None:
        """Let the head of this adapter draft for it, if it has one. Between steps. Raises ConfigError for one that
        reads, or keeps, what the engine's own does not."""
        if digest not in self._held:
            return
        head = self._held[digest][0]
        host = self._host(head.kind)
        if host is None:
            return
        if host not in self._split:
            self._split[host] = host.split(HeadsByAdapter)
        drafters = self._split[host].by_adapter
        if digest not in drafters:
            drafters[digest] = self._drafter(host, head)

    def drop(self, digest: str) -> None:
        """Take one `hold` back, if there is any."""
        with self._loading:
            head, count = self._held.pop(digest, (None, 0))
            if head is not None and count > 1:
                self._held[digest] = head, count - 1
                return
        for each in self._split.values():
            each.by_adapter.pop(digest, None)

    def reopen(self) -> None:
        """The engine drafts with another drafter now."""
        self._split.clear()
        for digest in self._held:
            self.open(digest)

    def _host(self, kind: str) -> DraftHost | None:
        """What drafts with heads of that kind."""
        return next((part for part in self._policy.own.parts if part.name == kind and part.make is not None), None)

    def _drafter(self, host: DraftHost, head: AdapterHead) -> Drafter:
        assert host.make is not None, "`_host` looked"
        own, wanted = self._context.kv_shapes, getattr(head.head, "spec", None)
        if wanted is not None and wanted.kv_shapes != own:
            raise ConfigError(
                f"The head {head.folder} keeps KV of sizes {wanted.kv_shapes}, and the engine's own head {own}, whose "
                "place it would take. Train it with the same --layers, or without a head for this adapter."
            )
        made = host.make(self._context.reopened(head.head))
        assert made is not None, "there is a head of that kind"
        needed, shown = made.needs.hidden_layers, host.needs.hidden_layers
        if not set(needed) <= set(shown):
            raise ConfigError(
                f"The head {head.folder} reads layers {list(needed)} of the target, and the engine's own head "
                f"{list(shown)}, which are all that a step shows. Train it with the same --hidden-layers."
            )
        return made


class HeadsByAdapter:
    """A drafter that hands each sequence to the drafter of its adapter, or to `own`, which stays with it."""

    def __init__(self, own: Drafter) -> None:
        self._own, self.needs = own, own.needs
        self.by_adapter: dict[str, Drafter] = {}
        self._chosen: dict[SequenceView, Drafter] = {}

    def begin(self, seq: SequenceView) -> None:
        chosen = self._own if seq.adapter is None else self.by_adapter.get(seq.adapter, self._own)
        self._chosen[seq] = chosen
        chosen.begin(seq)

    def end(self, seq: SequenceView) -> None:
        self._chosen.pop(seq, self._own).end(seq)

    def observe(self, step: StepReport) -> None:
        for drafter in self._drafters([*(report.seq for report in step.seqs), *step.preempted]):
            seqs = [report for report in step.seqs if self._of(report.seq) is drafter]
            preempted = [seq for seq in step.preempted if self._of(seq) is drafter]
            drafter.observe(dataclasses.replace(step, seqs=seqs, preempted=preempted))

    def propose(self, requests: list[DraftRequest]) -> list[Draft]:
        drafts = [Draft.empty()] * len(requests)
        for drafter in self._drafters([request.seq for request in requests]):
            share = [i for i, request in enumerate(requests) if self._of(request.seq) is drafter]
            for i, draft in zip(share, drafter.propose([requests[i] for i in share]), strict=True):
                drafts[i] = draft
        return drafts

    def _of(self, seq: SequenceView) -> Drafter:
        return self._chosen.get(seq, self._own)  # what began before there was another is its own

    def _drafters(self, seqs: list[SequenceView]) -> list[Drafter]:
        """Of these sequences, each once."""
        return list({id(drafter): drafter for drafter in map(self._of, seqs)}.values())
