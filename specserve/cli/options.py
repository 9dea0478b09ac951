"""The command line's options, made from the dataclasses they fill: help texts and sections. Knows no command
and no engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, field, fields, make_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_type_hints

from cyclopts import Group, Parameter, Token

from specserve.config import DTYPES, ISAS, QUANTIZATIONS, VERIFICATIONS, EngineConfig
from specserve.errors import ConfigError
from specserve.files import read_text
from specserve.structured.spec import Structured
from specserve.types import SamplingParams

MODEL = Group("Model", sort_key=1)
GENERATION = Group("Generation", sort_key=2)
STRUCTURED = Group("Structured output", sort_key=3)
SPECULATION = Group("Speculation", sort_key=4)
ENGINE = Group("Engine", sort_key=5)
OUTPUT = Group("Output", sort_key=6)


def whole(kind: Any, tokens: Sequence[Token]) -> int:
    """A cyclopts converter for whole numbers: its own would make 2 of "2.7" without a word."""
    try:
        return int(tokens[0].value)
    except ValueError:
        raise ValueError(f'"{tokens[0].value}" is not a whole number.') from None


def wholes(kind: Any, tokens: Sequence[Token]) -> tuple[int, ...]:
    """As `whole`, for an option that may be repeated."""
    return tuple(whole(int, [token]) for token in tokens)


Whole = Annotated[int, Parameter(converter=whole)]
_MOST_SCHEMA_BYTES = 2**24


def load_schema(file: Path) -> Structured:
    """The JSON Schema that --schema names. Raises ConfigError for one that cannot be read, InputError for what is no
    JSON."""
    try:
        return Structured.json(read_text(file, _MOST_SCHEMA_BYTES, pipes=True))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--schema: {file} cannot be read: {error}.") from error


ENGINE_HELP: dict[str, tuple[Group, str]] = {
    "model": (MODEL, "Catalog name, Hugging Face folder, .gguf file or hub id (org/name)."),
    "dtype": (MODEL, "Compute type; auto takes what the device is fastest at."),
    "quantization": (MODEL, "How weights are stored in memory."),
    "device": (MODEL, "cpu, cuda or cuda:N; auto takes a GPU if there is one."),
    "isa": (MODEL, "Instruction set of the CPU kernels; auto takes the fastest that there is."),
    "threads": (MODEL, "CPU threads of the kernels [default: the cores this process may use]."),
    "drafter": (
        SPECULATION,
        'File name in drafters/ or entry point; "auto" takes several that need no model, "none" drafts only what a '
        "grammar forces.",
    ),
    "num_speculative_tokens": (SPECULATION, "Most draft tokens a sequence gets in one step."),
    "drafter_options": (SPECULATION, "The drafter's own options, as --drafter-options.NAME VALUE."),
    "draft_model": (SPECULATION, "A smaller model that drafts, named as --model is."),
    "drafter_timeout_s": (SPECULATION, "Seconds a drafter of another package may take before it is switched off."),
    "adaptive": (SPECULATION, "Draft only as much as pays, by measured cost and acceptance; else as much as may be."),
    "verification": (SPECULATION, "How drafts are judged; coupled gives the same text as plain decoding."),
    "grammar_backend": (ENGINE, "Who enforces structured output: auto, or a file name in grammars/."),
    "max_number_digits": (ENGINE, "Most digits of a number in JSON whose schema asks for no more."),
    "max_model_len": (ENGINE, "Longest prompt + output in tokens [default: the model's]."),
    "max_num_seqs": (ENGINE, "Most sequences that run at once."),
    "max_num_batched_tokens": (ENGINE, "Most tokens of one step; longer prompts run in chunks."),
    "max_step_ms": (
        ENGINE,
        "Milliseconds a step aims at that computes a chunk of a prompt while others get tokens "
        "[default: 2.5 times a step without it, at most 6 ms more for each sequence].",
    ),
    "block_size": (ENGINE, "Tokens in one block of the KV cache."),
    "kv_cache_gib": (ENGINE, "Size of the KV cache in GiB [default: from free memory]."),
    "prefix_caching": (ENGINE, "Share the KV of prompts that begin alike."),
}

SAMPLING_HELP: dict[str, tuple[Group, str]] = {
    "max_tokens": (GENERATION, "Most output tokens."),
    "temperature": (GENERATION, "0 is greedy: the most likely token, the same text every time."),
    "top_k": (GENERATION, "Only the k most likely tokens; 0 is off."),
    "top_p": (GENERATION, "Only the most likely tokens that together reach this probability."),
    "min_p": (GENERATION, "Only tokens at least this likely, relative to the most likely one."),
    "repetition_penalty": (GENERATION, "Above 1 makes any token seen before less likely."),
    "presence_penalty": (GENERATION, "Lowers tokens that are already in the output."),
    "frequency_penalty": (GENERATION, "Lowers tokens by how often they are in the output."),
    "min_tokens": (GENERATION, "No end before this many tokens."),
    "ignore_eos": (GENERATION, "Go on after the model's end token."),
    "stop": (GENERATION, "End at this text; may be repeated."),
    "seed": (GENERATION, "With a temperature: the same seed gives the same text [default: drawn]."),
}

# Types that are narrower on the command line than in the dataclass.
_TYPES: dict[str, Any] = {
    "dtype": Literal[DTYPES],
    "quantization": Literal[QUANTIZATIONS],
    "isa": Literal[ISAS],
    "verification": Literal[VERIFICATIONS],
    "drafter_options": dict[str, str],
    "stop": tuple[str, ...],
}

_EXTRA: dict[str, Any] = {
    "drafter_options": {"show_default": False},
    "stop": {"show_default": False, "negative": ()},
    "ignore_eos": {"negative": ()},
    "served_model_name": {"show_default": False, "negative": ()},
    "api_key": {"show_default": False, "negative": ()},
    "cors_origin": {"show_default": False, "negative": ()},
    "allowed_host": {"show_default": False, "negative": ()},
    "admin": {"negative": ()},
    "share_drafts": {"negative": ()},
    "causal": {"negative": ()},
    "cache_hidden": {"negative": ()},
    "temperatures": {"show_default": False, "negative": ()},
    "hidden_layers": {"show_default": False, "negative": (), "converter": wholes},
}


def options_type(
    base: type[Any],
    name: str,
    texts: Mapping[str, tuple[Group, str]],
    hidden: Sequence[str] = (),
    **defaults: Any,
) -> type[Any]:
    """A subclass of the dataclass `base` whose fields carry help texts, for `Parameter(name="*")`.

    Fields in `hidden` or without a text are no options; `defaults` replace the dataclass's own.
    """
    hints = get_type_hints(base)
    specs: list[tuple[str, Any, Any]] = []
    for entry in fields(base):
        shown = entry.name in texts and entry.name not in hidden
        group, text = texts[entry.name] if shown else (None, None)
        parameter = Parameter(group=group, help=text, **_EXTRA.get(entry.name, {})) if shown else Parameter(parse=False)
        hint = _TYPES.get(entry.name, hints[entry.name])
        if int in (hint, *get_args(hint)):
            parameter = Parameter.combine(Parameter(converter=whole), parameter)
        specs.append((entry.name, Annotated[hint, parameter], _default(entry, defaults)))
    module = {"__module__": __name__}
    return make_dataclass(name, specs, bases=(base,), frozen=True, kw_only=True, namespace=module)


def _default(entry: Field[Any], defaults: Mapping[str, Any]) -> Any:
    if entry.name in defaults:
        return field(default=defaults[entry.name])
    if entry.default_factory is not MISSING:
        return field(default_factory=entry.default_factory)
    return field(default=entry.default)


if TYPE_CHECKING:  # the same fields and checks; at run time with help texts and sections
    EngineOptions = EngineConfig
    BenchEngineOptions = EngineConfig
    SamplingOptions = SamplingParams
else:
    EngineOptions = options_type(EngineConfig, "EngineOptions", ENGINE_HELP)
    BenchEngineOptions = options_type(EngineConfig, "BenchEngineOptions", ENGINE_HELP, hidden=("drafter",))
    SamplingOptions = options_type(
        SamplingParams, "SamplingOptions", SAMPLING_HELP, temperature=0.0, max_tokens=256, stop=()
    )


def engine_options(options: EngineConfig) -> dict[str, Any]:
    """The options as keyword arguments of LLM; drafter options get their Python names."""
    values = {entry.name: getattr(options, entry.name) for entry in fields(EngineConfig)}
    values["drafter_options"] = drafter_arguments(options.drafter_options)
    return values


def drafter_arguments(options: Mapping[str, str]) -> dict[str, Any]:
    """Drafter options as Python arguments: a-b becomes a_b, and a value that reads as a number or as true or false
    becomes one."""
    return {key.replace("-", "_"): _scalar(value) for key, value in options.items()}


def _scalar(text: str) -> int | float | bool | str:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def sampling_params(options: SamplingParams) -> SamplingParams:
    """The options as plain SamplingParams."""
    return SamplingParams(**{entry.name: getattr(options, entry.name) for entry in fields(SamplingParams)})
