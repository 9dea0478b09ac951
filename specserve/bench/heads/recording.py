"""Records what a target says to some prompts and the hidden states behind it: what a draft head is replayed against."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence as Many
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from specserve.bench.recorder import DirectHost, Recorder
from specserve.errors import EngineError, InputError
from specserve.llm import LLM
from specserve.models.heads.formats import is_head, read_head
from specserve.models.heads.loading import MTP
from specserve.prompts import Prompt
from specserve.registry import NONE
from specserve.speculation.base import Drafter
from specserve.speculation.lookup import makers
from specserve.types import SamplingParams


@dataclass(frozen=True, slots=True)
class Recording:
    """A prompt and what the target wrote behind it. `hidden[l]` float32 [tokens, hidden] is the residual stream behind
    layer l, for the layers that were asked for."""

    tokens: list[int]
    num_prompt: int
    hidden: Mapping[int, Tensor]

    @property
    def outputs(self) -> list[int]:
        return self.tokens[self.num_prompt :]


class HeadBench:
    """A target with a head beside it, whose engine's drafter that head is, and which has nothing else to do: records
    the target, and makes the head's drafter again and again, over the same KV."""

    def __init__(self, llm: LLM, head: str, kind: str) -> None:
        self.llm, self._path, self.kind = llm, head, kind
        with llm.exclusive() as engine:
            self.context = engine.policy.context
            self.head = self.context.reopened().load_head(head, kind)
            named: tuple[int, ...] = getattr(self.head.head, "hidden_layers", ())
            self.layers = named or engine.policy.own.needs.hidden_layers  # that the head reads, in its order

    @property
    def ids(self) -> list[int] | None:
        """The target's ids that the head proposes from, ascending; None: all."""
        found: list[int] | None = None if self.head.ids is None else self.head.ids.tolist()
        return found

    def drafter(self, **options: Any) -> Drafter:
        """One more drafter with the head; those that were made before draft no more."""
        make = makers(self.kind, {"head": self._path, **options})[self.kind]
        made = make(self.context.reopened(self.head))
        assert made is not None, "a drafter that is named is made"
        return made

    def answers(self, prompts: Many[Prompt], max_tokens: int) -> list[Recording]:
        """Greedy answers, without hidden states. Raises EngineError, and InputError where all are too short to draft
        in."""
        params = SamplingParams(temperature=0, max_tokens=max_tokens)
        made = []
        for output in self.llm.generate(prompts, params, drafter=NONE):
            said = output.outputs[0]
            if said.finish_reason == "error":
                raise EngineError(f"Plain decoding failed: {said.error}")
            made.append(Recording([*output.prompt_token_ids, *said.token_ids], len(output.prompt_token_ids), {}))
        long_enough = [each for each in made if len(each.outputs) > 1]
        if not long_enough:
            raise InputError("The target ends every answer at once, so there is nothing to draft. Give another --text.")
        return long_enough

    def with_states(self, recordings: Many[Recording], layers: Iterable[int]) -> list[Recording]:
        """The same texts with this target's hidden states behind `layers`, all rows computed as for a prompt: by row
        invariance the numbers are those of decoding."""
        recorder = Recorder(tuple(sorted(set(layers))))
        engine, config = self.llm.engine, self.llm.config
        host = DirectHost(recorder, engine.limits.vocab_size, config.drafter_timeout_s)
        with self.llm.exclusive():
            engine.use(host, 0)
        params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
        found = []
        outputs = self.llm.generate([each.tokens for each in recordings], params)
        for each, output in zip(recordings, outputs, strict=True):
            said = output.outputs[0]
            if said.finish_reason == "error":
                raise EngineError(f"The hidden states cannot be computed: {said.error}")
            first, states = recorder.take([*each.tokens, *said.token_ids])
            assert first == 0, "the engine has no prefix cache"
            found.append(replace(each, hidden=dict(zip(recorder.needs.hidden_layers, states.unbind(1), strict=True))))
        return found


def kind_of(folder: Path, num_target_layers: int) -> str:
    """What drafts with what lies in `folder`: a draft head's kind, or MTP for a model with next-token layers. Raises
    ModelError for what is neither, and a head that cannot be read."""
    from specserve.models.heads.formats import has_next_token_layers

    if not is_head(folder) and has_next_token_layers(folder):
        return MTP
    return read_head(folder, num_target_layers).spec.kind
