"""Prompts of chosen lengths, cut from real texts, and the canary among them."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from client import COMPLETIONS, Client, completion

from specserve.bench.prompts import BUNDLED, load_prompts

CANARY_TOKENS = 24
CANARY_PROMPT = 32  # tokens


class WrongCanary(Exception):
    """A greedy request that always has the same answer had another one, or none."""


@dataclass
class Prompts:
    """`ids` are all texts as one list of tokens, which begins anew at its end. `most` is the longest prompt and output
    together that the server takes."""

    ids: list[int]
    most: int
    numbers: random.Random = field(repr=False)

    @classmethod
    async def of(cls, client: Client, seed: int = 0, source: str = BUNDLED) -> Prompts:
        """Prompts as the server's own tokenizer cuts them."""
        text = "\n\n".join(prompt.text for prompt in load_prompts(source))
        async with client.session.post("/tokenize", json={"prompt": text, "add_special_tokens": False}) as response:
            told = await response.json()
        return cls(told["tokens"], told["max_model_len"] - 1, random.Random(seed))

    def at(self, start: int, length: int) -> list[int]:
        return [self.ids[(start + place) % len(self.ids)] for place in range(length)]

    def some(self, length: int) -> list[int]:
        """So many tokens from anywhere."""
        return self.at(self.numbers.randrange(len(self.ids)), length)

    def within(self, wanted: int, share: float = 0.5) -> int:
        """`wanted` tokens, or this share of the longest request if that is less."""
        return max(1, min(wanted, int(share * self.most)))


class Canary:
    """A short greedy request whose tokens are known from an idle server. Alone or among others, they are the same."""

    def __init__(self, prompts: Prompts) -> None:
        # A priority of its own: it shows whether answers are right, not how long the queue is.
        self._asked = completion(prompts.at(0, CANARY_PROMPT), CANARY_TOKENS, priority=-1000)
        self._known: list[int] | None = None
        self.num_right = 0

    async def check(self, client: Client) -> None:
        """The first one tells the right tokens. Raises WrongCanary."""
        reading = await client.ask(COMPLETIONS, self._asked)
        if reading.trouble:
            raise WrongCanary(f"The canary failed: {reading.trouble}.")
        if self._known is None:
            self._known = reading.tokens
        if reading.tokens != self._known:
            raise WrongCanary(f"The canary said {reading.tokens} instead of {self._known}.")
        self.num_right += 1
