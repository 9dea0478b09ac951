"""A process that compiles what nobody may wait for, and says what it would accept: it may hang, or die, and is then
killed and started anew by a Trial. Imports neither torch nor transformers.

    python -m specserve.structured.worker FOLDER SIZE BACKEND BYTES PARENT

On stdin a job a line, {"kind", "text", "outputs", "seconds"}; on stdout an answer each: {"refused": why}, {"accepted":
[...]}, whether each output may be said from its beginning to its end, or {"timed_out": true}, {"cancelled": true} or
{"crashed": how} of a job whose process was killed.

To start takes a second, which is too long for each constraint that has to be killed. So a copy of this process (fork)
compiles, one job after the other, and where a job takes more than its seconds of CPU time, or SIGTERM ends it, the
copy is replaced within milliseconds. A copy has no threads but its own: backends keep none that compiling needs.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from specserve.machine.lifeline import Copy, end_with
from specserve.machine.memory import limit_memory
from specserve.machine.pausing import pausing
from specserve.structured.base import Grammar, RefusedError, Vocabulary
from specserve.structured.compiler import Compiler
from specserve.structured.spec import Structured
from specserve.structured.vocabulary import vocabulary
from specserve.text.encoding import use_own_threads_only
from specserve.text.tokenizer import Tokenizer

READY = "ready"
_NICE = 5  # behind the engine, whose streams go on while a grammar is tried


def accepts(grammar: Grammar, output: str, words: Vocabulary) -> bool:
    """Whether a text, split as the tokenizer does, may be said and may end where it does."""
    state = grammar.start()
    return all(state.advance(token) for token in (*words.encode(output), words.eos_ids[0]))


def answer(compiler: Compiler, words: Vocabulary, job: dict[str, Any]) -> dict[str, Any]:
    try:
        grammar = compiler.compile(Structured(job["kind"], job["text"]))
        return {"accepted": [accepts(grammar, output, words) for output in job["outputs"]]}
    except RefusedError as error:
        return {"refused": str(error).removeprefix("structured: ")}
    except MemoryError:
        return {"refused": "compiling it takes too much memory."}


def main(folder: str, size: str, backend: str, max_bytes: str, parent: str) -> None:
    end_with(int(parent))
    os.nice(_NICE)
    limit_memory(int(max_bytes))
    use_own_threads_only()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer
    words = vocabulary(Tokenizer(Path(folder)), int(size))
    compiler = Compiler(lambda: words, backend)
    compiler.prepare()

    def answered(job: dict[str, Any]) -> dict[str, Any]:
        with pausing():
            return answer(compiler, words, job)

    copy = Copy(answered)
    print(READY, file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(copy.ask(line)), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
