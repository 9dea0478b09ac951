"""The command line's options, made from the dataclasses they fill, whose fields carry the help texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, make_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin, get_type_hints

from cyclopts import Group, Parameter, Token

from specserve.adapters import AdapterSource
from specserve.checkpoint.generation_config import AUTO, MAX_TOKENS, STATED, check_named
from specserve.config import ATTENTIONS, DTYPES, ISAS, QUANTIZATIONS, VERIFICATIONS, EngineConfig
from specserve.errors import ConfigError, InputError, unknown
from specserve.files import read_text
from specserve.help import Help
from specserve.server.options import ServeOptions
from specserve.structured.spec import Structured
from specserve.types import SamplingParams

if TYPE_CHECKING:
    from specserve.llm import LLM

# The sections of a command's help, in their order.
SECTIONS = (
    *("Measurement", "Model", "Text", "Head", "Training", "Generation", "Structured output"),
    *("Speculation", "Engine", "Listening", "Access", "Engines elsewhere", "Limits", "Operation", "Output"),
)
GROUPS = {name: Group(name, sort_key=number) for number, name in enumerate(SECTIONS)}
MEASUREMENT, MODEL, OUTPUT = GROUPS["Measurement"], GROUPS["Model"], GROUPS["Output"]
GENERATION, STRUCTURED, SPECULATION = GROUPS["Generation"], GROUPS["Structured output"], GROUPS["Speculation"]


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
MODEL_NAMES = ("--model", "-m")
_NAMES = {"model": MODEL_NAMES, "temperatures": "--temperature"}  # of fields whose options are not called as they are
_MOST_SCHEMA_BYTES = 2**24


def load_schema(file: Path) -> Structured:
    """The JSON Schema that --schema names. Raises ConfigError for one that cannot be read, InputError for what is no
    JSON."""
    try:
        return Structured.json(read_text(file, _MOST_SCHEMA_BYTES, pipes=True))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--schema: {file} cannot be read: {error}.") from error


# Types that are narrower on the command line than in the dataclass.
_TYPES: dict[str, Any] = {
    "dtype": Literal[DTYPES],
    "quantization": Literal[QUANTIZATIONS],
    "isa": Literal[ISAS],
    "attention": Literal[ATTENTIONS],
    "verification": Literal[VERIFICATIONS],
    "drafter_options": dict[str, str],
    "stop": tuple[str, ...],
}


def help_of(base: type[Any], section: str | None = None) -> dict[str, Help]:
    """The help of each field of a dataclass that has one, in `section` where it names no other."""
    hints = get_type_hints(base, include_extras=True)
    found = {name: part for name, hint in hints.items() for part in get_args(hint) if isinstance(part, Help)}
    return {name: replace(part, section=part.section or section) for name, part in found.items()}


ENGINE_HELP = help_of(EngineConfig, "Engine")
SAMPLING_HELP = help_of(SamplingParams, "Generation")


def model_parameter(text: str = ENGINE_HELP["model"].text) -> Parameter:
    """For a command's first parameter: the model as --model, -m, or the first argument without a name."""
    return Parameter(name=MODEL_NAMES, group=MODEL, help=text)


Model = Annotated[str, model_parameter()]


def options_type(
    base: type[Any], name: str, texts: Mapping[str, Help], hidden: Sequence[str] = (), **defaults: Any
) -> type[Any]:
    """A subclass of the dataclass `base` whose fields are options of a command, for `Parameter(name="*")`.

    Fields in `hidden` or without a text are no options; `defaults` replace the dataclass's own.
    """
    hints = get_type_hints(base)
    specs: list[tuple[str, Any, Any]] = []
    for entry in fields(base):
        hint = _TYPES.get(entry.name, hints[entry.name])
        shown = entry.name in texts and entry.name not in hidden
        parameter = _parameter(entry, hint, texts[entry.name]) if shown else Parameter(parse=False)
        specs.append((entry.name, Annotated[hint, parameter], _default(entry, defaults)))
    module = {"__module__": __name__}
    return make_dataclass(name, specs, bases=(base,), frozen=True, kw_only=True, namespace=module)


def _parameter(entry: Field[Any], hint: Any, help_: Help) -> Parameter:
    """Flags that are off have no --no-NAME; of what is repeated or in parts the help tells the default, if any."""
    is_many = get_origin(hint) in (tuple, dict)
    made = Parameter(group=GROUPS[help_.section or ""], help=help_.text, show_default=False if is_many else None)
    if entry.name in _NAMES:
        made = Parameter.combine(made, Parameter(name=_NAMES[entry.name]))
    if get_origin(hint) is tuple or entry.default is False:
        made = Parameter.combine(made, Parameter(negative=()))
    if int in (hint, *get_args(hint)):
        made = Parameter.combine(made, Parameter(converter=wholes if get_origin(hint) is tuple else whole))
    return made


def _default(entry: Field[Any], defaults: Mapping[str, Any]) -> Any:
    if entry.name in defaults:
        return field(default=defaults[entry.name])
    if entry.default_factory is not MISSING:
        return field(default_factory=entry.default_factory)
    return field(default=entry.default)


def find_adapter(name: str, engine: EngineConfig) -> AdapterSource:
    """The adapter of that name that the engine's options name. Raises InputError."""
    known = {source.name: source for source in map(AdapterSource.parse, engine.lora)}
    if name not in known:
        raise InputError(f"{unknown('adapter', name, known)} Name its folder with --lora {name}=PATH.", "adapter")
    return known[name]


@dataclass(frozen=True, kw_only=True)
class SamplingFields:
    """The options of sampling. What is None was not given, and has the defaults that it has in all APIs."""

    generation_config: Annotated[
        str,
        Parameter(
            group=GENERATION,
            help=help_of(ServeOptions)["generation_config"].text,
        ),
    ] = AUTO
    adapter: Annotated[
        str | None, Parameter(group=GENERATION, help="Answer from this LoRA adapter, one that --lora names.")
    ] = None

    def __post_init__(self) -> None:
        """What is wrong must not cost a model load."""
        SamplingParams(**{"max_tokens": None, **self.given()})
        check_named(self.generation_config)

    def given(self) -> dict[str, Any]:
        named = {name: getattr(self, name, None) for name in SAMPLING_HELP}
        return {name: value for name, value in named.items() if value not in (None, ())}

    def check_adapter(self, engine: EngineConfig) -> None:
        """Raises InputError for an adapter that the engine's options do not name, before a model is loaded."""
        if self.adapter is not None:
            find_adapter(self.adapter, engine)

    def params(self, llm: LLM, *, chat: bool = True, **more: Any) -> SamplingParams:
        """For a conversation, or a text. Raises InputError."""
        return llm.sampling_params(chat=chat, **self.given(), **more)


def _sampling_type() -> type[Any]:
    """SamplingFields with those of SamplingParams that have a help, which says their defaults."""
    kinds, entries = get_type_hints(SamplingParams), {entry.name: entry for entry in fields(SamplingParams)}
    told = {name: f"the model's, else {entries[name].default:g}" for name in STATED}
    told["max_tokens"] = f"what the context leaves; {MAX_TOKENS[False]} without chat template"
    specs: list[tuple[str, Any, Any]] = []
    for name, help_ in SAMPLING_HELP.items():
        entry, kind = entries[name], _TYPES.get(name, kinds[name])
        text = f"{help_.text.removesuffix('.')} [default: {told[name]}]." if name in told else help_.text
        parameter = _parameter(entry, kind, replace(help_, text=text))
        specs.append((name, Annotated[kind | None, parameter], field(default=None if name in told else _plain(entry))))
    module = {"__module__": __name__}
    return make_dataclass(
        "SamplingOptions", specs, bases=(SamplingFields,), frozen=True, kw_only=True, namespace=module
    )


def _plain(entry: Field[Any]) -> Any:
    return () if entry.name in _TYPES else entry.default


if TYPE_CHECKING:  # the same fields and checks; at run time with help texts and sections
    EngineOptions = EngineConfig
    BenchEngineOptions = EngineConfig
    NamedEngineOptions = EngineConfig
    SamplingOptions = SamplingFields
else:
    EngineOptions = options_type(EngineConfig, "EngineOptions", ENGINE_HELP)
    # of commands whose first argument is the model, and of those that measure several drafters
    NamedEngineOptions = options_type(EngineConfig, "NamedEngineOptions", ENGINE_HELP, hidden=("model",))
    BenchEngineOptions = options_type(EngineConfig, "BenchEngineOptions", ENGINE_HELP, hidden=("model", "drafter"))
    SamplingOptions = _sampling_type()


def engine_options(options: EngineConfig, **named: Any) -> dict[str, Any]:
    """The options as keyword arguments of LLM, `named` in place of the same ones; drafter options get their Python
    names."""
    values = {entry.name: getattr(options, entry.name) for entry in fields(EngineConfig)} | named
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
