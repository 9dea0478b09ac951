"""The one configuration object of an engine: flat, frozen, checked once. Nobody below the engine receives it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from specserve.adapters import AdapterSource
from specserve.errors import ConfigError, strict_fields, unknown
from specserve.help import Help

DTYPES = ("auto", "float32", "bfloat16")
QUANTIZATIONS = ("auto", "none", "int8", "int4")
ISAS = ("auto", "avx512", "avx_vnni", "avx2", "portable")
ATTENTIONS = ("exact", "flash", "auto")
VERIFICATIONS = ("coupled", "rejection", "block")
DEFAULT_MODEL = "smollm2-135m"
DEFAULT_NUM_SPECULATIVE_TOKENS = 5
DEFAULT_MAX_NUMBER_DIGITS = 15  # any float has the value that so many say
MOST_RANKS = 64  # processes of a model
DEFAULT_MAX_LORAS = 8
DRAFT_MODEL = "draft_model"


@strict_fields("option", ConfigError)
@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything an engine is told at start. Sizes are tokens, sequences or GiB as their names say.

    - `drafter`: a file name in drafters/ or an entry point of the group `specserve.drafters`. "auto" merges the drafts
      of all files that state a PRIORITY. "none" is plain decoding; only tokens that a grammar determines are drafted,
      unless a request itself names "none". A request may name another drafter, whose drafts have up to
      `num_speculative_tokens` tokens as well, or 5 where that is 0.
    - `drafter_options`: passed to that drafter unread. `draft_model` sets `drafter` to "draft_model" and its option
      "model", with the same names as the field `model`.
    - `adaptive`: drafts are as long as pays by measured cost and acceptance, and none are made where none pay. Without
      it they are as long as `num_speculative_tokens` allows.
    - `adaptive_cache`: with `adaptive`, what is found of drafters that are told of every step (heads, token recycling)
      is read from a small file in specserve's cache folder, and written there when the engine closes.
    - `quantization`: "auto" is int8 where native kernels serve the CPU and no dtype is asked for, int4 there for a
      checkpoint whose own integers int4 keeps (GPTQ and AWQ of 4 bits), else none.
    - `isa`: instruction set of the CPU kernels; "auto" is the environment variable SPECSERVE_ISA, else the fastest.
    - `attention`: on a GPU. "exact" gives a row the same bits in any step. "flash" is the flash attention of flash-attn
      or of torch, whichever is there and passes a self-test, for prompts and chains: with it bits are the same within
      equal tiles alone. "auto" is that where it can be, and needs `bit_identity` to be off.
    - `bit_identity`: kernels that give a row other bits in other company are refused, but for those of
      `attention` "flash".
    - `threads`: None is SPECSERVE_THREADS, else the number of cores that this process may use, divided among those that
      share a step: `tensor_parallel_size`. Stages, `pipeline_parallel_size` of them, have as many each.
    - `kv_cache_gib`: None sizes the cache from free memory.
    - `max_number_digits`: most digits of a number in JSON, where its schema asks for no more.
    - `lora`: LoRA adapters that requests may name, each "name=path" of a PEFT folder, behind which may stand ",pinned"
      for one that always has a slot, and ",head=path" of its draft head, else "head" in its folder. Where there are
      slots adapters may be loaded later, too: `max_loras` of them at most share a step; None is 8 where `lora` names
      some, else none. No adapter has a rank above `max_lora_rank`.
    - `max_step_ms`: target time of a step that computes chunks of prompts while other sequences decode. None is 2.5
      times a step without the chunks for each token that a sequence gets, and at most 6 ms more for each sequence.

    Raises ConfigError naming the field, what it was and what is allowed.
    """

    model: Annotated[str, Help("Catalog name, Hugging Face folder, .gguf file or hub id (org/name).", "Model")] = (
        DEFAULT_MODEL
    )
    dtype: Annotated[str, Help("Compute type; auto takes what the device is fastest at.", "Model")] = "auto"
    quantization: Annotated[str, Help("How weights are stored in memory.", "Model")] = "auto"
    device: Annotated[str, Help("cpu, cuda or cuda:N; auto takes a GPU if there is one.", "Model")] = "auto"
    isa: Annotated[str, Help("Instruction set of the CPU kernels; auto takes the fastest.", "Model")] = "auto"
    attention: Annotated[
        str,
        Help(
            "On a GPU, whose attention: exact is our own; flash that of another package, for prompts and chains; auto "
            "takes flash where it can.",
            "Model",
        ),
    ] = "exact"
    bit_identity: Annotated[
        bool, Help("Refuse kernels with which a text may depend on drafts and on what else is in a batch.", "Model")
    ] = True
    threads: Annotated[
        int | None, Help("CPU threads of the kernels in each process [default: the cores it may use].", "Model")
    ] = None
    drafter: Annotated[
        str,
        Help(
            'File name in drafters/ or entry point; "auto" takes several that need no model, "none" drafts only what a '
            "grammar forces.",
            "Speculation",
        ),
    ] = "auto"
    num_speculative_tokens: Annotated[int, Help("Most draft tokens a sequence gets in one step.", "Speculation")] = (
        DEFAULT_NUM_SPECULATIVE_TOKENS
    )
    drafter_options: Annotated[
        Mapping[str, Any], Help("The drafter's own options, as --drafter-options.NAME VALUE.", "Speculation")
    ] = field(default_factory=dict)
    draft_model: Annotated[str | None, Help("A smaller model that drafts, named as --model is.", "Speculation")] = None
    drafter_timeout_s: Annotated[
        float, Help("Seconds a drafter of another package may take before it is switched off.", "Speculation")
    ] = 2.0
    adaptive: Annotated[
        bool,
        Help("Draft only as much as pays, by measured cost and acceptance; else as much as may be.", "Speculation"),
    ] = True
    adaptive_cache: Annotated[
        bool, Help("Keep on disk which drafters did not pay: they are tried later at the next start.", "Speculation")
    ] = True
    verification: Annotated[
        str, Help("How drafts are judged; coupled gives the same text as plain decoding.", "Speculation")
    ] = "coupled"
    lora: Annotated[
        tuple[str, ...],
        Help("A LoRA adapter, name=path of a PEFT folder, perhaps with ,pinned or ,head=path; may be repeated."),
    ] = ()
    max_loras: Annotated[int | None, Help("Most adapters in one step [default: 8 with --lora, else 0: none].")] = None
    max_lora_rank: Annotated[int, Help("Highest rank of an adapter.")] = 64
    grammar_backend: Annotated[str, Help("Who enforces structured output: auto, or a file name in grammars/.")] = "auto"
    max_number_digits: Annotated[int, Help("Most digits of a number in JSON whose schema asks for no more.")] = (
        DEFAULT_MAX_NUMBER_DIGITS
    )
    tensor_parallel_size: Annotated[
        int, Help("Processes that compute the model together, each its part of every layer.")
    ] = 1
    pipeline_parallel_size: Annotated[
        int, Help("Stages that the model's layers are divided into, each in processes of its own.")
    ] = 1
    ranks_listen: Annotated[
        str | None,
        Help("HOST:PORT where the other processes of --tensor-parallel-size join, by `specserve rank` on other hosts."),
    ] = None
    ranks_secret_file: Annotated[
        str | None, Help("File with the secret that both sides of --ranks-listen prove to know.")
    ] = None
    max_model_len: Annotated[int | None, Help("Longest prompt + output in tokens [default: the model's].")] = None
    max_num_seqs: Annotated[int, Help("Most sequences that run at once.")] = 16
    max_num_batched_tokens: Annotated[int, Help("Most tokens of one step; longer prompts run in chunks.")] = 512
    max_step_ms: Annotated[
        float | None,
        Help(
            "Milliseconds a step aims at that computes a chunk of a prompt while others get tokens "
            "[default: 2.5 times a step without it, at most 6 ms more for each sequence]."
        ),
    ] = None
    block_size: Annotated[int, Help("Tokens in one block of the KV cache.")] = 16
    kv_cache_gib: Annotated[float | None, Help("Size of the KV cache in GiB [default: from free memory].")] = None
    prefix_caching: Annotated[bool, Help("Share the KV of prompts that begin alike.")] = True

    def __post_init__(self) -> None:
        if self.draft_model is not None:
            if self.drafter not in ("auto", DRAFT_MODEL):
                raise ConfigError(f"--draft-model is for --drafter {DRAFT_MODEL}, not for {self.drafter!r}.")
            object.__setattr__(self, "drafter", DRAFT_MODEL)
            object.__setattr__(self, "drafter_options", {**self.drafter_options, "model": self.draft_model})
        object.__setattr__(self, "lora", (self.lora,) if isinstance(self.lora, str) else tuple(self.lora))
        names = [AdapterSource.parse(each).name for each in self.lora]
        if len(set(names)) < len(names):
            raise ConfigError(f"--lora: the names of adapters must differ; they are {', '.join(names)}.")
        if self.max_loras is None:
            object.__setattr__(self, "max_loras", DEFAULT_MAX_LORAS if self.lora else 0)
        _at_least("max_loras", self.max_loras, int(bool(self.lora)))
        _at_least("max_lora_rank", self.max_lora_rank, 1)
        num_pinned = sum(AdapterSource.parse(each).is_pinned for each in self.lora)
        if num_pinned and num_pinned >= (self.max_loras or 0):
            raise ConfigError(
                f"--lora pins {num_pinned} adapters, and max_loras is {self.max_loras}: one slot must be left for "
                "others. Pin fewer, or raise --max-loras."
            )
        named = {"dtype": DTYPES, "quantization": QUANTIZATIONS, "isa": ISAS, "attention": ATTENTIONS}
        named["verification"] = VERIFICATIONS
        for name, allowed in named.items():
            if getattr(self, name) not in allowed:
                raise ConfigError(f"--{name}: " + unknown("value", str(getattr(self, name)), allowed))
        if self.attention == "auto" and self.bit_identity:
            raise ConfigError(
                "--attention auto may take flash attention, with which a row's bits depend on the batch. Give "
                "--no-bit-identity with it, or leave it out."
            )
        self._check_processes()
        _at_least("num_speculative_tokens", self.num_speculative_tokens, 0)
        _at_least("max_number_digits", self.max_number_digits, DEFAULT_MAX_NUMBER_DIGITS)
        for name in ("max_num_seqs", "max_num_batched_tokens", "block_size"):
            _at_least(name, getattr(self, name), 1)
        for name in ("threads", "max_model_len"):
            if getattr(self, name) is not None:
                _at_least(name, getattr(self, name), 1)
        if self.kv_cache_gib is not None and not 0 < self.kv_cache_gib < float("inf"):
            raise ConfigError(f"kv_cache_gib is {self.kv_cache_gib}; it must be a positive number of GiB.")
        if self.max_step_ms is not None and not 0 < self.max_step_ms < float("inf"):
            raise ConfigError(f"max_step_ms is {self.max_step_ms}; it must be a positive number of milliseconds.")
        if not 0 < self.drafter_timeout_s < float("inf"):
            raise ConfigError(
                f"drafter_timeout_s is {self.drafter_timeout_s}; it must be a positive number of seconds."
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens} and max_num_seqs is {self.max_num_seqs}: "
                "every running sequence needs at least one token a step. Raise the first or lower the second."
            )

    def _check_processes(self) -> None:
        sizes = ("tensor_parallel_size", "pipeline_parallel_size")
        for name in sizes:
            _at_least(name, getattr(self, name), 1)
            if getattr(self, name) > MOST_RANKS:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at most {MOST_RANKS}.")
        if (product := self.tensor_parallel_size * self.pipeline_parallel_size) > MOST_RANKS:
            raise ConfigError(f"{' times '.join(sizes)} is {product}; it must be at most {MOST_RANKS}.")
        if self.ranks_listen is not None and (self.tensor_parallel_size == 1 or self.pipeline_parallel_size > 1):
            raise ConfigError(
                "ranks_listen is for processes of one model that add up what they compute: it needs "
                "tensor_parallel_size of at least 2, and pipeline_parallel_size 1."
            )
        if (self.ranks_listen is None) != (self.ranks_secret_file is None):
            raise ConfigError("ranks_listen and ranks_secret_file belong together. Give both or none of them.")


def _at_least(name: str, value: Any, low: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise ConfigError(f"{name} is {value!r}; it must be a whole number of at least {low}.")
