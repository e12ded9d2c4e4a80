"""Speculative decoding: slow-memory bytes per accepted token, when one read of the weights checks several tokens.

A draft proposes g tokens, the target checks them and adds one of its own. If each is accepted with probability a,
independently, a round yields on average (Leviathan, Kalman, Matias 2023, equation 1)

    E = (1 - a^(g + 1)) / (1 - a)

and moves g draft steps and one target step. A target step reads its weights and the KV cache once, whatever g is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Model:
    """What a decoding step reads: all weights once per batch, and per sequence the cache of its context."""

    weight_bytes: float
    cache_bytes_per_token: float

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} is {value:g}; it must be finite and not negative")

    def step_bytes(self, batch: int, context: int) -> float:
        """Bytes of one step for `batch` sequences of `context` tokens."""
        return self.weight_bytes + batch * context * self.cache_bytes_per_token


@dataclass(frozen=True)
class Round:
    """A round of g drafted tokens: what it moves and yields, for one sequence of the batch."""

    drafted: int
    acceptance: float
    tokens: float
    bytes: float
    plain_bytes: float

    @property
    def bytes_per_token(self) -> float:
        """Bytes per accepted token."""
        return self.bytes / self.tokens

    @property
    def gain(self) -> float:
        """How many times fewer bytes per token than plain decoding."""
        return self.plain_bytes / self.bytes_per_token


def speculate(
    target: Model, draft: Model, drafted: int, acceptance: float, batch: int = 1, context: int = 4096
) -> Round:
    """Bytes of a round, per sequence of the batch.

    Raises:
        ValueError: if acceptance is no probability, or a count is below its least value.
    """
    if not 0 <= acceptance <= 1:
        raise ValueError(f"acceptance is {acceptance}; it must be from 0 to 1")
    for name, value, least in (("drafted", drafted, 0), ("batch", batch, 1), ("context", context, 0)):
        if value < least:
            raise ValueError(f"{name} is {value}; it must be at least {least}")
    if not target.step_bytes(batch, context) > 0:
        raise ValueError("the target's step reads nothing; it must have weights, or a cache and a context")
    tokens = drafted + 1.0 if acceptance == 1 else (1 - acceptance ** (drafted + 1)) / (1 - acceptance)
    plain = target.step_bytes(batch, context) / batch
    moved = plain + drafted * draft.step_bytes(batch, context) / batch
    return Round(drafted, acceptance, tokens, moved, plain)


def best_draft(target: Model, draft: Model, acceptance: float, batch: int = 1, context: int = 4096) -> Round:
    """The round with the fewest bytes per token, of 0 to 32 drafted tokens."""
    rounds = (speculate(target, draft, g, acceptance, batch, context) for g in range(33))
    return min(rounds, key=lambda r: r.bytes_per_token)
