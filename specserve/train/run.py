"""The whole way from prompts to a head: text, training, what is left behind."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import json
import shlex
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch

from specserve.adapters import AdapterSource
from specserve.async_llm import AsyncLLM
from specserve.cache.sizing import GIB
from specserve.checkpoint import catalog
from specserve.errors import ConfigError, InputError, unknown
from specserve.machine.cores import default_threads
from specserve.models.heads.formats import write_head
from specserve.models.heads.spec import TargetShape
from specserve.models.heads.speculators import Verifier
from specserve.models.loader import native_spec
from specserve.models.lora import Adapter, read_adapter
from specserve.models.spec import DecoderSpec
from specserve.text.tokenizer import Tokenizer
from specserve.train.adjacency import begin_bigram
from specserve.train.batches import Answer
from specserve.train.block import BlockHead
from specserve.train.cache import BLOCK_SIZE, HiddenCache
from specserve.train.config import KINDS, TrainingOptions, check_same, read_identity
from specserve.train.initial import InitialHead
from specserve.train.kinds import head_spec, hidden_layers, in_words, make_head
from specserve.train.loop import Training
from specserve.train.output import machine, write_recipe
from specserve.train.prompts import Jobs, Prompts, read_prompts
from specserve.train.target import Target
from specserve.train.text import WrittenText, write_whole
from specserve.train.vocabulary import choose_ids, count_outputs, offsets
from specserve.train.writing import Say, has_all, write_text


def train(
    kind: str,
    model: str,
    engine: Mapping[str, Any],
    options: TrainingOptions,
    say: Say,
    source: AdapterSource | None = None,
) -> dict[str, Any]:
    """Train a head of `kind` for `model`, or for that with an adapter, and write it to options.out; gives what was
    made, and its acceptance. `engine` says how the target runs: EngineConfig's dtype, quantization, device, isa and
    threads. Whatever an earlier call with the same options left is gone on with.

    Raises ConfigError, InputError, ModelError and CapacityError as what each is wrong with.
    """
    if kind not in KINDS:
        raise ConfigError(unknown("kind of head", kind, KINDS))
    prompts = read_prompts(options.prompts)
    folder = catalog.resolve(model)
    spec = native_spec(folder)
    if options.max_length > spec.max_len:
        raise ConfigError(f"--max-length is {options.max_length}; the target was made for {spec.max_len} tokens.")
    adapter = None if source is None else read_adapter(Path(source.path).expanduser(), folder)
    origin = _origin(folder, engine, prompts) | ({} if adapter is None else {"adapter": adapter.digest})
    initial = _initial(kind, spec, options)
    begun = {} if initial is None else {"init_from": initial.digest()}
    _check_run(options.out, {"kind": kind, **origin, **options.identity(), **begun})
    jobs = Jobs(prompts, options.temperatures, options.seed)
    layers = *hidden_layers(kind, spec.num_layers, options), spec.num_layers - 1
    with (
        WrittenText(options.text_folder, {**origin, **options.text_identity()}, spec.vocab_size) as text,
        HiddenCache(text.folder, layers, spec.hidden_size) if options.cache_hidden else nullcontext() as cache,
    ):
        if not has_all(text, jobs, options.tokens):
            with_adapter = {**engine, **_lora(source, adapter)}
            name = None if source is None else source.name
            _write(text, prompts, jobs, model, with_adapter, options, say, name, cache)
        shown = model if source is None else f"{model} with adapter {source.name}"
        return _Run(kind, folder, text, prompts, engine, options, adapter, cache, initial).run(model, shown, say)


def _initial(kind: str, target: DecoderSpec, options: TrainingOptions) -> InitialHead | None:
    """The head to begin with, which is the one that the options ask for."""
    if options.init_from is None:
        return None
    shape = TargetShape(hidden_size=target.hidden_size, num_layers=target.num_layers, vocab_size=target.vocab_size)
    initial = InitialHead(catalog.resolve_head(options.init_from), kind, shape)
    num_ids = min(options.draft_vocab_size, target.vocab_size)
    initial.check(head_spec(kind, target, num_ids, initial.mask_token_id, options))
    return initial


def _lora(source: AdapterSource | None, adapter: Adapter | None) -> dict[str, Any]:
    """EngineConfig's fields for an engine that takes this adapter alone."""
    if source is None or adapter is None:
        return {}
    return {"lora": f"{source.name}={source.path}", "max_loras": 1, "max_lora_rank": adapter.rank}


def _origin(folder: Path, engine: Mapping[str, Any], prompts: Prompts) -> dict[str, Any]:
    """What the text follows from beside the options: the same wherever the model's folder lies."""
    whole = hashlib.blake2b((folder / "config.json").read_bytes(), digest_size=16)
    for path in sorted([*folder.glob("*.safetensors"), *folder.glob("*.gguf")]):
        whole.update(f"{path.name} {path.stat().st_size}".encode())
    return {
        "target": whole.hexdigest(),
        "prompts": prompts.digest,
        "group": Jobs.GROUP,
        "dtype": engine.get("dtype", "auto"),
        "quantization": engine.get("quantization", "auto"),
    }


def _check_run(folder: Path, identity: dict[str, Any]) -> None:
    path = folder / "run.json"
    if path.exists():
        check_same(folder, read_identity(path), identity)
        return
    if any((folder / name).exists() for name in ("config.json", "model.safetensors", "checkpoint.pt")):
        raise ConfigError(f"--out: {folder} holds something else, and no run.json. Name another folder.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out: {folder} cannot be made: {error}.") from error
    write_whole(path, json.dumps(identity, indent=2).encode())


def _write(
    text: WrittenText,
    prompts: Prompts,
    jobs: Jobs,
    model: str,
    engine: Mapping[str, Any],
    options: TrainingOptions,
    say: Say,
    adapter: str | None,
    cache: HiddenCache | None,
) -> None:
    """Let the target answer until there is enough."""

    async def write() -> None:
        sizes: dict[str, Any] = {"max_model_len": options.max_length, "max_num_seqs": options.streams}
        sizes |= {"max_num_batched_tokens": max(512, options.streams), "block_size": BLOCK_SIZE}
        async with AsyncLLM(model, drafter="none", adaptive=False, **sizes, **engine) as llm:
            say(f"text: {llm.summary}")
            limits = options.max_tokens, options.max_length
            await write_text(llm, text, prompts, jobs, limits, options.streams, options.tokens, say, adapter, cache)

    try:
        asyncio.run(write())
    except KeyboardInterrupt:
        say(f"Interrupted: {len(text):,} answers in {text.folder} are kept. The same command goes on from there.")
        raise
    gc.collect()  # the engine's memory is for the training


def split(text: WrittenText, prompts: Prompts, tokens: int | None) -> tuple[list[Answer], list[Answer]]:
    """What is trained on and what is held out, of the first answers that have `tokens` tokens of output together, None:
    of all. Of those held out the greedy ones alone, if there are any: acceptance on them is verification's."""
    stored, records = text.tokens().view(np.ndarray), text.records  # views of a mapping are light
    if tokens is not None:
        enough = np.searchsorted(np.cumsum(records["num_output"], dtype=np.int64), tokens) + 1
        records = records[:enough]
    groups: tuple[list[Answer], list[Answer], list[Answer]] = [], [], []  # to learn; held out, greedy; and sampled
    for place in np.flatnonzero(records["num_output"] > 0):
        record = records[place]
        first, number = int(record["start"]), int(record["prompt"])
        stop = first + int(record["num_prompt"]) + int(record["num_output"])
        held_out = 0 if number not in prompts.held_out else 1 if record["temperature"] == 0 else 2
        category = prompts.prompts[number].category
        groups[held_out].append(Answer(stored[first:stop], int(record["num_prompt"]), category, int(place)))
    learned, greedy, sampled = groups
    if not learned or not (greedy or sampled):
        raise InputError(
            f"The text has {len(learned)} answers to learn from and {len(greedy) + len(sampled)} that are held out; it "
            "takes one of each. Give more --prompts or --tokens, or a larger --max-length.",
            "prompts",
        )
    return learned, greedy or sampled


class _Run:
    """A head and its training, made of the text."""

    def __init__(
        self,
        kind: str,
        folder: Path,
        text: WrittenText,
        prompts: Prompts,
        engine: Mapping[str, Any],
        options: TrainingOptions,
        adapter: Adapter | None,
        cache: HiddenCache | None,
        initial: InitialHead | None,
    ) -> None:
        torch.set_num_threads(engine.get("threads") or default_threads())
        self._folder, self._prompts, self._options, self._cache = folder, prompts, options, cache
        self._initial = initial
        self._answers, held_out = split(text, prompts, options.tokens)
        self._target = Target(folder, options.max_length, adapter=adapter, **engine)
        tokenizer = Tokenizer(folder)
        always = tokenizer.special_ids | tokenizer.eos_ids_below(self._target.spec.vocab_size)
        self._counts = count_outputs(self._answers, self._target.spec.vocab_size)
        if initial is None:
            self._ids = choose_ids(self._counts, options.draft_vocab_size, always)
            # What ends a text stands before no guess, so it serves as a mask; and its embedding was trained.
            mask = tokenizer.eos_id if tokenizer.eos_id is not None else min(always, default=0)
        else:
            self._ids, mask = initial.ids, initial.mask_token_id
        spec = head_spec(kind, self._target.spec, len(self._ids), mask, options)
        head = make_head(spec, self._target, self._ids, options)
        if initial is not None:
            initial.load(head)
        elif isinstance(head, BlockHead) and options.bigram_rank:
            begin_bigram(head, self._answers, options.seed)
        self.training = Training(options.out, head, self._target, self._ids, self._answers, held_out, options, cache)
        if cache is not None:
            cache.check_room(sum(len(a.tokens) for a in [*self._answers, *held_out] if a.number not in cache))

    def run(self, model: str, shown: str, say: Say) -> dict[str, Any]:
        """`shown` is the target as people know it."""
        training, options = self.training, self._options
        head = training.head
        say(f"draft vocabulary: {self._covered()}")
        say(f"training: {training.num_steps:,} steps on {len(self._answers):,} answers; {in_words(head)}")
        if self._cache is not None:
            say(f"hidden states: {self._cache.num_bytes / GIB:.2f} GiB in {self._cache.folder}")
        try:
            training.run(say)
        except KeyboardInterrupt:
            kept = f"step {training.saved:,} of {training.num_steps:,}" if training.saved else "the text"
            say(f"Interrupted: {kept} is kept in {options.out}. The same command goes on from there.")
            raise
        d2t = torch.from_numpy(offsets(self._ids)) if head.spec.has_draft_vocab else None
        verifier = Verifier(model, self._target.origin.fingerprint())
        spec, weights = head.unshared() if options.int8 else (head.spec, head.state_dict())
        write_head(options.out, spec, weights, d2t, verifier, int8=options.int8)
        acceptance = training.acceptance()
        begun = None if self._initial is None else self._initial.folder
        write_recipe(options.out, self._facts(shown), training.seconds, acceptance, begun)
        say(f"head and RECIPE.md: {options.out}")
        shares = {name: {"accepted": each.accepted, "by_depth": each.by_depth} for name, each in acceptance.items()}
        counts = {"num_steps": training.num_steps, "num_answers": len(self._answers), "seconds": training.seconds}
        return {"out": str(options.out), "head": in_words(head), "model": shown, **counts, "acceptance": shares}

    def _covered(self) -> str:
        share = self._counts[self._ids].sum() / self._counts.sum()
        return f"{len(self._ids):,} ids, {share:.2%} of the tokens that the target wrote"

    def _facts(self, shown: str) -> dict[str, Any]:
        options, prompts, training = self._options, self._prompts, self.training
        held_out = len(prompts.held_out)
        return {
            "head": in_words(training.head),
            "target": f"{shown}, {self._target.form}",
            "prompts": f"{options.prompts.name}: {len(prompts.prompts):,}, of which {held_out:,} are held out",
            "answers": f"{len(self._answers):,} with {self._counts.sum():,} tokens of the target's own",
            "draft vocabulary": self._covered(),
            "steps": f"{training.num_steps:,}, which read {training.num_tokens:,} tokens, prompts too",
            "options": ", ".join(f"{name} {value}" for name, value in options.identity().items()),
            "command": shlex.join(["specserve", *sys.argv[1:]]),
            "machine": machine(self._target.device),
        }
