"""The length policy: what happens to an example that is longer than allowed, with an account of it.

The invariant: an example with tokens always has a target. Index 0 never counts, because nothing predicts it.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from hf_megapack.errors import ConfigError, DataError

logger = logging.getLogger(__name__)

OVERLONG_POLICIES = ("error", "drop", "truncate_left", "truncate_right")


class Outcome(IntEnum):
    """What the length policy did to an example."""

    WHOLE = 0
    TRUNCATED = 1
    DROPPED = 2
    DROPPED_WITHOUT_TARGET = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthPolicy:
    """How long an example may be and what happens to longer ones.

    Attributes:
        max_length: Most tokens of an example, or None.
        overlong: One of `OVERLONG_POLICIES`.
        limit_name: What sets `max_length`, for messages.
    """

    max_length: int | None
    overlong: str
    limit_name: str = "max_length"

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ConfigError: If a value is not allowed.
        """
        if self.overlong not in OVERLONG_POLICIES:
            raise ConfigError(f"overlong must be one of {OVERLONG_POLICIES}, got {self.overlong!r}")
        if self.max_length is not None and self.max_length < 2:
            raise ConfigError(
                f"max_length must be at least 2 (the first token is never learned), got {self.max_length}"
            )

    def apply(self, ids: np.ndarray, mask: np.ndarray, where: str) -> tuple[np.ndarray, np.ndarray, Outcome]:
        """Return an example's tokens and loss mask within the allowed length; none of them if it is dropped.

        Args:
            ids: Tokens, shape (num_tokens,).
            mask: Loss mask, shape (num_tokens,).
            where: Row and turn for error messages.

        Returns:
            Tokens, loss mask with 0 at index 0, and what was done.

        Raises:
            DataError: If nothing is to be learned, or the example is too long and the policy is "error".
        """
        mask = mask.copy()
        mask[:1] = 0
        if not mask.any():
            raise DataError(f"{where}: no token is left to learn; the loss mask is all zero after index 0")
        if self.max_length is None or len(ids) <= self.max_length:
            return ids, mask, Outcome.WHOLE
        if self.overlong == "error":
            raise DataError(
                f"{where}: {len(ids)} tokens are more than {self.limit_name}={self.max_length}; shorten the example, "
                f"raise the limit if it is yours, or set overlong to one of {OVERLONG_POLICIES[1:]}"
            )
        if self.overlong == "drop":
            return ids[:0], mask[:0], Outcome.DROPPED
        kept = slice(-self.max_length, None) if self.overlong == "truncate_left" else slice(self.max_length)
        ids, mask = ids[kept], mask[kept]
        mask[0] = 0
        if not mask.any():
            return ids[:0], mask[:0], Outcome.DROPPED_WITHOUT_TARGET
        return ids, mask, Outcome.TRUNCATED


class ExampleLimit(NamedTuple):
    """What an example may be.

    Attributes:
        max_length: Tokens that it may have.
        name: What says so.
        vocab_size: Tokens that the model knows, with ids below this; None to leave the model out of account.
    """

    max_length: int
    name: str
    vocab_size: int | None = None


def longest_example(
    max_length: int | None, packed_sequence_length: int, model_limit: int | None = None
) -> ExampleLimit:
    """Return how many tokens an example may have, and what says so.

    Args:
        max_length: The user's limit, or None.
        packed_sequence_length: Row capacity, which holds where there is no `max_length`.
        model_limit: Positions that the base model knows, or None.

    Example:
        >>> longest_example(None, 16384, 4096)
        ExampleLimit(max_length=4096, name="the model's max_position_embeddings", vocab_size=None)
    """
    if max_length is None:
        own = ExampleLimit(packed_sequence_length, "packed_sequence_length")
    else:
        own = ExampleLimit(max_length, "max_length")
    if model_limit is not None and model_limit < own.max_length:
        return ExampleLimit(model_limit, "the model's max_position_embeddings")
    return own


@dataclass(kw_only=True, slots=True)
class LengthTally:
    """What became of the examples of one or more datasets.

    Attributes:
        counts: Examples of each `Outcome`, in its order.
    """

    counts: list[int] = field(default_factory=lambda: [0] * len(Outcome))

    def add(self, outcomes: Sequence[int] | np.ndarray) -> None:
        """Count examples.

        Args:
            outcomes: Values of `Outcome`, one per example.
        """
        found = np.bincount(np.asarray(outcomes, dtype=np.int64), minlength=len(Outcome))
        self.merge(LengthTally(counts=found.tolist()))

    def merge(self, other: "LengthTally") -> None:
        """Add the counts of another tally."""
        self.counts = [sum(pair) for pair in zip(self.counts, other.counts, strict=True)]

    def metrics(self) -> dict[str, int]:
        """Return the counts under the names that are logged; empty if every example was kept whole."""
        num_truncated, num_dropped = self.counts[Outcome.TRUNCATED], sum(self.counts[Outcome.DROPPED :])
        if not num_truncated and not num_dropped:
            return {}
        return {"truncated_examples": num_truncated, "dropped_examples": num_dropped}

    def log(self, limit: str = "max_length") -> None:
        """Log how many examples were cut or dropped, if any.

        Args:
            limit: What they were longer than.
        """
        num_overlong = sum(self.counts) - self.counts[Outcome.WHOLE]
        if num_overlong:
            logger.warning(
                "%d of %d examples were longer than %s: %d truncated, %d dropped, %d dropped because truncation "
                "left nothing to learn",
                num_overlong,
                sum(self.counts),
                limit,
                *self.counts[Outcome.TRUNCATED :],
            )


def log_outcomes(outcomes: Sequence[int] | np.ndarray, limit: str = "max_length") -> None:
    """Log how many examples were cut or dropped, if any.

    Args:
        outcomes: Values of `Outcome`, one per example.
        limit: What they were longer than.
    """
    tally = LengthTally()
    tally.add(outcomes)
    tally.log(limit)


def describe_lengths(num_tokens: np.ndarray) -> str:
    """Return quantiles and a histogram of example lengths in two lines.

    Args:
        num_tokens: Tokens of each example, int, shape (num_examples,), num_examples >= 1.

    Example:
        >>> print(describe_lengths(np.array([3, 4, 5, 6, 60])))
        5 examples of 78 tokens in all; shortest 3, quarter 4, median 5, three quarters 6, 99% 60, longest 60
        up to 4: 2 (40%), 8: 2 (40%), 16: 0, 32: 0, 64: 1 (20%)
    """
    quantiles = np.quantile(num_tokens, [0, 0.25, 0.5, 0.75, 0.99, 1], method="inverted_cdf")
    names = ("shortest", "quarter", "median", "three quarters", "99%", "longest")
    listed = ", ".join(f"{name} {value:,}" for name, value in zip(names, quantiles, strict=True))
    exponents = np.ceil(np.log2(np.maximum(num_tokens, 2))).astype(int)
    counts = np.bincount(exponents)[exponents.min() :]
    shares = [
        f"{2 ** (exponents.min() + at):,}: {count:,}" + (f" ({count / len(num_tokens):.0%})" if count else "")
        for at, count in enumerate(counts)
    ]
    return f"{len(num_tokens):,} examples of {num_tokens.sum():,} tokens in all; {listed}\nup to {', '.join(shares)}"
