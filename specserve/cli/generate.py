"""`specserve generate`: prompts in, text out."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from specserve.cli.answer import Answer, check, write
from specserve.cli.explained import Explanation
from specserve.cli.figures import Figures
from specserve.cli.json_output import JsonFile, is_json_alone, write_json_lines
from specserve.cli.options import (
    GENERATION,
    OUTPUT,
    STRUCTURED,
    EngineOptions,
    SamplingOptions,
    engine_options,
    load_schema,
)
from specserve.errors import InputError, Interrupted
from specserve.structured.spec import Structured
from specserve.terminal import console
from specserve.types import SamplingParams

if TYPE_CHECKING:
    from specserve.llm import LLM, Chunk, RequestOutput

_ENGINE = EngineOptions()
_SAMPLING = SamplingOptions()


def generate(
    *prompts: Annotated[str, Parameter(help="One or more prompts; without any, standard input is the prompt.")],
    raw: Annotated[
        bool, Parameter(group=GENERATION, negative=(), help="Continue the text itself: no chat template.")
    ] = False,
    system: Annotated[str | None, Parameter(group=GENERATION, help="System message before each prompt.")] = None,
    schema: Annotated[
        Path | None, Parameter(group=STRUCTURED, help="JSON Schema in a file; the answer is JSON that fits it.")
    ] = None,
    regex: Annotated[str | None, Parameter(group=STRUCTURED, help="The answer as a whole matches this.")] = None,
    choice: Annotated[
        tuple[str, ...],
        Parameter(group=STRUCTURED, negative=(), show_default=False, help="The answer is this; may be repeated."),
    ] = (),
    grammar: Annotated[
        str | None,
        Parameter(
            group=STRUCTURED, help="A name of `specserve grammar list`, or a file: .regex, .ebnf, .gbnf or .lark."
        ),
    ] = None,
    json_file: JsonFile = None,
    stats: Annotated[
        bool, Parameter(group=OUTPUT, negative=(), help="Speed and acceptance of each answer, on standard error.")
    ] = False,
    explain: Annotated[
        bool,
        Parameter(group=OUTPUT, negative=(), help="What each step did with drafts, as a table on standard error."),
    ] = False,
    engine: Annotated[EngineOptions, Parameter(name="*")] = _ENGINE,
    sampling: Annotated[SamplingOptions, Parameter(name="*")] = _SAMPLING,
) -> None:
    """Answer prompts. One prompt is streamed as it is generated; several run together and are printed in order."""
    if raw and system is not None:
        raise InputError("--raw sends no messages, so --system has no place in it. Leave one of them out.", "system")
    sampling.check_adapter(engine)
    structured = _structured(schema, regex, choice, grammar)
    asked = [text if raw else _messages(text, system) for text in prompts or (_standard_input(),)]
    if explain and (len(asked) > 1 or json_file):
        raise InputError("--explain tells of one prompt, whose text is streamed. Give one, and no --json.", "explain")
    from specserve.llm import LLM

    options = engine_options(engine, generation_config=sampling.generation_config)
    with LLM(**options, progress=sys.stderr.isatty()) as llm:
        params = sampling.params(llm, chat=not raw, structured=structured)
        if len(asked) == 1 and json_file is None:
            answers = [_stream(llm, asked[0], params, sampling.adapter, explain)]
        else:
            answers = batch(llm, asked, params, sampling.adapter, json_file)
    if stats:
        print(*(answer.speed() for answer in answers), sep="\n", file=sys.stderr)


def _structured(
    schema: Path | None, regex: str | None, choice: tuple[str, ...], grammar: str | None
) -> Structured | None:
    """What the answer must be, said in at most one way."""
    if sum((schema is not None, regex is not None, bool(choice), grammar is not None)) > 1:
        raise InputError("--schema, --regex, --choice and --grammar each say all of what the answer must be. Give one.")
    if schema is not None:
        return load_schema(schema)
    if grammar is not None:
        is_file = Path(grammar).suffix or len(Path(grammar).parts) > 1
        return Structured.file(grammar) if is_file else Structured.named(grammar)
    if regex is not None:
        return Structured.regex(regex)
    return Structured.choice(choice) if choice else None


def _standard_input() -> str:
    if sys.stdin.isatty():
        raise InputError(
            'No prompt was given. Use specserve generate "PROMPT", or send it to standard input.', "prompt"
        )
    text = sys.stdin.read().rstrip("\n")
    if not text.strip():
        raise InputError("Standard input is empty. Send a prompt to it, or give one as an argument.", "prompt")
    return text


def _messages(text: str, system: str | None) -> list[dict[str, str]]:
    before = [] if system is None else [{"role": "system", "content": system}]
    return [*before, {"role": "user", "content": text}]


def _stream(
    llm: LLM, asked: str | list[dict[str, str]], params: SamplingParams, adapter: str | None, explain: bool
) -> Answer:
    chunks: Iterator[Chunk]
    if isinstance(asked, str):
        chunks = llm.stream(asked, params, adapter=adapter, explain=explain)
    else:
        chunks = llm.stream_chat(asked, params, adapter=adapter, explain=explain)
    if not explain:
        return write(chunks)
    steps = Explanation(llm.tokenizer.token_bytes)
    answer = write(steps.of(chunks))
    console(stderr=True, highlight=False).print("", steps.show(answer), sep="\n")
    return answer


def batch(
    llm: LLM, asked: list[Any], params: SamplingParams, adapter: str | None, json_file: Path | None
) -> list[Answer]:
    """All prompts together, as text or a line of JSON each; `asked` holds texts or conversations."""
    run = llm.generate if isinstance(asked[0], str) else llm.chat
    try:
        outputs = run(asked, params, adapter=adapter, progress=sys.stderr.isatty())
    except Interrupted as interrupted:
        ended = [output for output in interrupted.outputs if output is not None]
        _tell(ended, json_file)
        print(f"Interrupted: {len(ended)} of {len(asked)} prompts were answered to the end.", file=sys.stderr)
        raise
    return _tell(outputs, json_file)


def _tell(outputs: list[RequestOutput], json_file: Path | None) -> list[Answer]:
    if json_file is not None and outputs:
        write_json_lines(json_file, [_record(output) for output in outputs])
    if not is_json_alone(json_file):
        for output in outputs:
            check(output.outputs[0])
            print(output.outputs[0].text)
    return [Answer(o.outputs[0].text, len(o.outputs[0].token_ids), o.outputs[0].stats) for o in outputs]


def _record(output: RequestOutput) -> dict[str, Any]:
    completion, stats = output.outputs[0], output.outputs[0].stats
    return {
        "prompt": output.prompt,
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "error": completion.error,
        "error_code": completion.error_code,
        "figures": None if stats.first_token is None or stats.finished is None else figures(output).record(),
        "stats": asdict(stats),
    }


def figures(output: RequestOutput) -> Figures:
    """Of an answer that has ended."""
    completion = output.outputs[0]
    return Figures.of_stats(completion.stats, len(completion.token_ids), len(output.prompt_token_ids))
