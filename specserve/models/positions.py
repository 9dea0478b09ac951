"""How tokens know where they stand: rotary embedding with its scalings, ALiBi, and learned vectors."""

from __future__ import annotations

import math
from dataclasses import dataclass

from specserve.errors import ModelError
from specserve.models.checks import check_number, check_size

ROPE_FIELDS: dict[str, tuple[str, ...]] = {  # by scaling, those of Rope that it reads beside theta
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (
        *("factor", "original_max_position_embeddings", "attention_factor"),
        *("beta_fast", "beta_slow", "truncate"),
    ),
    "dynamic": ("factor", "original_max_position_embeddings"),
    "longrope": ("original_max_position_embeddings", "attention_factor", "short_factor", "long_factor"),
}


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding (RoFormer, arXiv 2104.09864). `scaling` is one of ROPE_FIELDS:

    - "linear": positions divided by `factor` (arXiv 2306.15595);
    - "llama3": low frequencies divided by it, the rest blended (Llama 3.1's own);
    - "yarn": the same with bounds in turns, and larger queries and keys (arXiv 2309.00071);
    - "dynamic": a larger theta for longer sequences (dynamic NTK; arXiv 2309.00071, section 3.3);
    - "longrope": each frequency divided by its own factor, which long contexts have others of (arXiv 2402.13753).

    Published code chooses the last two's frequencies by the length that a sequence has at the moment, so keys that are
    cached no longer fit those that follow. Here the model's max_len chooses, once, for all sequences.
    """

    theta: float = 10_000.0
    scaling: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position_embeddings: int = 0  # tokens of the first pre-training; of those with a bound
    interleaved: bool = False  # pairs of features are neighbours (GPT-J), not a half of the head apart (GPT-NeoX)
    fraction: float = 1.0  # of each head, its first features, that rotate
    attention_factor: float = 1.0  # of what rotates, in queries and in keys
    beta_fast: float = 32.0  # turns in the original context; from here on frequencies are kept
    beta_slow: float = 1.0  # and up to here divided
    truncate: bool = True  # YaRN's bounds are whole features
    short_factor: tuple[float, ...] = ()  # of each pair that rotates, up to the original length
    long_factor: tuple[float, ...] = ()  # and beyond

    def __post_init__(self) -> None:
        for name in ("theta", "factor", "attention_factor", "beta_fast", "beta_slow"):
            check_number(f"rotary {name}", getattr(self, name))
        for name in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings"):
            check_number(f"rotary {name}", getattr(self, name), positive=False)
        for name in ("short_factor", "long_factor"):
            for number in getattr(self, name):
                check_number(f"a rotary {name}", number)
        if self.scaling in ("yarn", "dynamic", "longrope"):
            check_size("original_max_position_embeddings", self.original_max_position_embeddings)
        if self.scaling in ("yarn", "dynamic") and self.factor < 1:
            raise ModelError(f"The rotary factor of {self.scaling} is {self.factor}; it must be at least 1.")
        if self.scaling == "yarn" and self.theta <= 1:
            raise ModelError(f"rope_theta is {self.theta}; YaRN needs one above 1.")
        if self.scaling == "llama3" and self.low_freq_factor == self.high_freq_factor:
            raise ModelError(f"low_freq_factor and high_freq_factor are both {self.low_freq_factor}; they must differ.")
        if not isinstance(self.truncate, bool):
            raise ModelError(f"config.json gives rotary truncate as {self.truncate!r}; it must be true or false.")
        check_number("partial_rotary_factor", self.fraction)
        if self.fraction > 1:
            raise ModelError(f"partial_rotary_factor is {self.fraction}; it must be at most 1.")

    @property
    def is_plain(self) -> bool:
        """Whether whole heads rotate by halves, as ops do."""
        return not self.interleaved and self.fraction == 1

    def rotated(self, head_dim: int) -> int:
        """How many features of a head rotate."""
        return int(head_dim * self.fraction)

    def check(self, head_dim: int) -> None:
        """Raise ModelError where heads of this size cannot rotate so."""
        count = self.rotated(head_dim)
        if count % 2 or not count:
            raise ModelError(f"{count} features of each head rotate; they must be pairs.")
        if self.scaling == "dynamic" and count == 2:
            raise ModelError("Dynamic NTK scaling needs heads in which more than one pair of features rotates.")
        for name in ("short_factor", "long_factor"):
            if self.scaling == "longrope" and len(numbers := getattr(self, name)) != count // 2:
                raise ModelError(f"{name} has {len(numbers)} numbers, and {count // 2} pairs of features rotate.")

    @property
    def stretched_len(self) -> int:
        """Tokens that the scaling reaches, whatever max_position_embeddings says; 0 where that says it."""
        reaches = self.scaling in ("yarn", "dynamic")
        return math.floor(self.factor * self.original_max_position_embeddings) if reaches else 0

    def choice(self, max_len: int) -> str | None:
        """What max_len tokens decide of it, in words; None: nothing."""
        original = self.original_max_position_embeddings
        if self.scaling == "dynamic":
            if max_len <= original:
                return f"dynamic NTK, unscaled: max_model_len is at most {original}"
            return f"dynamic NTK, fixed for max_model_len {max_len}"
        if self.scaling == "longrope":
            if max_len <= original:
                return f"longrope, short factors: max_model_len is at most {original}"
            return f"longrope, long factors in all sequences: max_model_len is above {original}"
        return None


@dataclass(frozen=True, slots=True)
class LearnedPositions:
    """A vector of each position, added to the token's (arXiv 1706.03762). Position i has row i + offset of a table of
    `size` + offset rows."""

    size: int
    offset: int = 0

    def __post_init__(self) -> None:
        check_size("max_position_embeddings", self.size)


@dataclass(frozen=True, slots=True)
class Alibi:
    """Attention with linear biases (arXiv 2108.12409): a scaled score of query head h loses slopes[h] for each token
    between the query and the key. Nothing rotates."""

    slopes: tuple[float, ...]  # of each query head

    def __post_init__(self) -> None:
        for slope in self.slopes:
            check_number("an ALiBi slope", slope, positive=False)

    @classmethod
    def of_heads(cls, num_heads: int, max_bias: float = 8.0) -> Alibi:
        """The paper's slopes: for n heads, n a power of two, 2^(-max_bias i / n), i from 1 to n. For other counts the
        closest lower power's, then every second one of its double's, as BLOOM, Baichuan and MPT (alibi_bias_max) have
        them."""
        check_size("num_heads", num_heads)
        check_number("alibi_bias_max", max_bias)
        whole = 2 ** (num_heads.bit_length() - 1)
        exponents = [(i + 1) / whole for i in range(whole)] + [(2 * i + 1) / (2 * whole) for i in range(whole)]
        return cls(tuple(2.0 ** (-max_bias * each) for each in exponents[:num_heads]))

    def check(self, num_heads: int) -> None:
        """Raise ModelError where a layer has not so many query heads."""
        if len(self.slopes) != num_heads:
            raise ModelError(f"ALiBi has {len(self.slopes)} slopes for {num_heads} query heads.")


Position = Rope | Alibi | None  # None: by causality alone (NoPE, arXiv 2305.19466)
