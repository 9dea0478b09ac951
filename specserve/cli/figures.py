"""How fast an answer was and how its drafts fared: the line for people, and the fields for programs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specserve.types import SequenceStats


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one answer that has ended. Times are seconds; None is what nobody has said."""

    num_tokens: int | None
    first_token_s: float  # from its arrival to its first token
    decode_s: float  # from its first token to its last
    num_prompt_tokens: int | None = None
    prefill_s: float | None = None  # from its first step to its first token
    num_cached_tokens: int = 0  # of the prompt, whose KV was there
    tokens_per_step: float | None = None
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    @classmethod
    def of_stats(cls, stats: SequenceStats, num_tokens: int, num_prompt_tokens: int | None = None) -> Figures:
        """Of a completion of an engine here."""
        assert stats.first_token is not None and stats.finished is not None, "a finished completion has both times"
        scheduled = stats.arrived if stats.first_scheduled is None else stats.first_scheduled
        return cls(
            num_tokens,
            stats.first_token - stats.arrived,
            stats.finished - stats.first_token,
            num_prompt_tokens,
            stats.first_token - scheduled,
            min(stats.num_prefix_cached_tokens, num_prompt_tokens or 0),
            stats.mean_acceptance_length,
            stats.num_draft_tokens,
            stats.num_accepted_tokens,
        )

    @classmethod
    def of_server(cls, usage: Mapping[str, Any], metrics: Mapping[str, Any], first_s: float, rest_s: float) -> Figures:
        """Of what a stream ended with: OpenAI's `usage`, and where the server is ours, `metrics`. Without these the
        times are those that the client has seen: until the first text, and from there to the end."""
        drafts = metrics.get("speculative_decoding") or {}
        return cls(
            usage.get("completion_tokens"),
            metrics.get("time_to_first_token_ms", 1e3 * first_s) / 1e3,
            metrics.get("generation_time_ms", 1e3 * rest_s) / 1e3,
            usage.get("prompt_tokens"),
            tokens_per_step=drafts.get("mean_acceptance_length"),
            num_draft_tokens=drafts.get("num_draft_tokens", 0),
            num_accepted_tokens=drafts.get("num_accepted_draft_tokens", 0),
        )

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Over the tokens after the first."""
        later = (self.num_tokens or 0) - 1
        return later / self.decode_s if later > 0 and self.decode_s > 0 else None

    @property
    def prompt_tokens_per_s(self) -> float | None:
        """Over the tokens that were computed: those whose KV was cached took no time."""
        if self.num_prompt_tokens is None or not self.prefill_s:
            return None
        return (self.num_prompt_tokens - self.num_cached_tokens) / self.prefill_s

    def line(self) -> str:
        """Tokens per second after the first token, time to the first, tokens a step, drafts accepted."""
        parts = [] if self.num_tokens is None else [f"{self.num_tokens} tokens"]
        if (rate := self.decode_tokens_per_s) is not None:
            parts.append(f"{rate:.1f} tokens/s")
        parts.append(f"first after {self.first_token_s * 1e3:.0f} ms")
        if self.tokens_per_step is not None:
            parts.append(f"{self.tokens_per_step:.2f} tokens a step")
        if self.num_draft_tokens:
            parts.append(f"{self.num_accepted_tokens} of {self.num_draft_tokens} draft tokens accepted")
        return ", ".join(parts)

    def record(self) -> dict[str, Any]:
        """For JSON."""
        drafted = self.num_draft_tokens
        return {
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_cached_tokens": self.num_cached_tokens,
            "num_output_tokens": self.num_tokens,
            "time_to_first_token_s": self.first_token_s,
            "prompt_tokens_per_s": self.prompt_tokens_per_s,
            "decode_tokens_per_s": self.decode_tokens_per_s,
            "tokens_per_step": self.tokens_per_step,
            "draft_acceptance_rate": self.num_accepted_tokens / drafted if drafted else None,
        }
