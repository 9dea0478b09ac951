"""Write a drafter in one class and benchmark it. To keep one, put the class into a file of its own in drafters/."""

from pathlib import Path

import specserve.drafters
from specserve.cli.main import run
from specserve.speculation.base import Needs
from specserve.types import Draft


class WordDrafter:
    """Guesses that what followed the last token's previous occurrence follows again: an n-gram drafter with n = 1."""

    needs = Needs()

    def __init__(self, context): ...
    def begin(self, seq): ...
    def observe(self, step): ...
    def end(self, seq): ...

    def propose(self, requests):
        return [self._draft(seq.tokens, num_tokens) for seq, num_tokens in requests]

    def _draft(self, tokens, limit):
        for place in range(len(tokens) - 2, -1, -1):
            if tokens[place] == tokens[-1]:
                return Draft.chain(tokens[place + 1 : place + 1 + limit])
        return Draft.empty()


if __name__ == "__main__":
    specserve.drafters.__path__.append(str(Path(__file__).parent))  # found by file name, as in drafters/
    drafters = ["--drafter", Path(__file__).stem, "--drafter", "ngram"]
    raise SystemExit(run(["bench", *drafters, "--limit", "2", "--max-tokens", "24"]))
