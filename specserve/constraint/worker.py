"""A process that compiles what nobody may wait for, and says what it would accept: it may hang, or die, and is then
killed and started anew by a Trial. Knows the tokenizer and the backends; imports neither torch nor transformers.

    python -m specserve.constraint.worker FOLDER SIZE BACKEND BYTES PARENT

On stdin a job a line, {"kind", "text", "outputs"}; on stdout an answer each: {"refused": why} or {"accepted": [...]},
whether each output may be said from its beginning to its end.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from pathlib import Path
from typing import Any

from specserve.constraint.base import Grammar, RefusedError, Vocabulary
from specserve.constraint.compiler import Compiler
from specserve.constraint.vocabulary import vocabulary
from specserve.lifeline import end_with
from specserve.models.tokenizer import Tokenizer
from specserve.structured import Structured

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
    resource.setrlimit(resource.RLIMIT_AS, (int(max_bytes), int(max_bytes)))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer
    words = vocabulary(Tokenizer(Path(folder)), int(size))
    compiler = Compiler(lambda: words, backend)
    compiler.prepare()
    print(READY, file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(compiler, words, json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
