"""The length policy: what happens to an example that is longer than allowed, with an account of it.

The invariant: an example with tokens always has a target. Index 0 never counts, because nothing predicts it.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

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
    """

    max_length: int | None
    overlong: str

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
                f"{where}: {len(ids)} tokens are more than max_length={self.max_length}; raise it, or set overlong to "
                f"one of {OVERLONG_POLICIES[1:]}"
            )
        if self.overlong == "drop":
            return ids[:0], mask[:0], Outcome.DROPPED
        kept = slice(-self.max_length, None) if self.overlong == "truncate_left" else slice(self.max_length)
        ids, mask = ids[kept], mask[kept]
        mask[0] = 0
        if not mask.any():
            return ids[:0], mask[:0], Outcome.DROPPED_WITHOUT_TARGET
        return ids, mask, Outcome.TRUNCATED


def log_outcomes(outcomes: Sequence[int] | np.ndarray) -> None:
    """Log how many examples were cut or dropped, if any.

    Args:
        outcomes: Values of `Outcome`, one per example.
    """
    counts = np.bincount(np.asarray(outcomes, dtype=np.int64), minlength=len(Outcome))
    num_overlong = counts.sum() - counts[Outcome.WHOLE]
    if num_overlong:
        logger.warning(
            "%d of %d examples were longer than max_length: %d truncated, %d dropped, %d dropped because truncation "
            "left nothing to learn",
            num_overlong,
            counts.sum(),
            counts[Outcome.TRUNCATED],
            counts[Outcome.DROPPED],
            counts[Outcome.DROPPED_WITHOUT_TARGET],
        )
