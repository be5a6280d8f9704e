"""Counts what updates learned from, and turns it into the numbers that are logged.

Names that TRL also logs mean what they mean there: num_tokens is the sum since training began; all others are of the
updates since the last log.
"""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

from hf_megapack.batch import PackedBatch, StepResult
from hf_megapack.data.lengths import LengthTally
from hf_megapack.packing import PackingReport

# What evaluation reports of each dataset: `TokenTally.loss` and `TokenTally.metrics`.
EVALUATED = ("loss", "mean_token_accuracy", "entropy")


class TokenTally:
    """Sums over loss-bearing tokens, of which the means are reported."""

    def __init__(self) -> None:
        self.num_loss_tokens = 0
        self._loss = 0.0
        self._correct = 0
        self._entropy = 0.0

    def add(self, result: StepResult) -> None:
        """Count one forward pass."""
        self.num_loss_tokens += result.num_loss_tokens
        self._loss += result.loss * result.num_loss_tokens
        self._correct += result.num_correct
        self._entropy += result.entropy * result.num_loss_tokens

    @property
    def loss(self) -> float:
        """Mean loss per loss-bearing token, in nats; NaN when there is none."""
        return self._loss / self.num_loss_tokens if self.num_loss_tokens else math.nan

    def metrics(self) -> dict[str, float]:
        """Return accuracy and entropy under TRL's names; empty when nothing was counted."""
        if not self.num_loss_tokens:
            return {}
        return {
            "mean_token_accuracy": self._correct / self.num_loss_tokens,
            "entropy": self._entropy / self.num_loss_tokens,
        }


class FiniteLosses:
    """Sums over the losses of updates that are finite."""

    def __init__(self) -> None:
        self._num_losses = self._num_finite = 0
        self._sum = 0.0

    def add(self, loss: float) -> None:
        """Count one update."""
        self._num_losses += 1
        if math.isfinite(loss):
            self._num_finite += 1
            self._sum += loss

    def mean_in_place_of(self, name: str) -> dict[str, float]:
        """Return the mean of the finite ones, NaN without any, under a name; empty when all updates are finite."""
        if self._num_finite == self._num_losses:
            return {}
        return {name: self._sum / self._num_finite if self._num_finite else math.nan}


class UpdateMeter:
    """Counts updates, for the log line at hand and for all of training.

    Attributes:
        total: All updates so far.
        lengths: What the length policy did to the examples of a stream so far.
        losses: Of all updates so far.
        num_skipped: Updates that were not applied because something was not finite.
    """

    def __init__(self) -> None:
        self.total = PackingReport()
        self.lengths = LengthTally()
        self.losses = FiniteLosses()
        self.num_skipped = 0
        self._start_window()

    def _start_window(self) -> None:
        self._window = PackingReport()
        self._tally = TokenTally()
        self._losses = FiniteLosses()
        self._waited = 0.0
        self._started = time.perf_counter()

    def add(self, batch: PackedBatch, result: StepResult) -> None:
        """Count one update; a loss that is not finite enters no mean."""
        report = PackingReport.from_batch(batch)
        self.total += report
        self._window += report
        self.losses.add(result.loss)
        self._losses.add(result.loss)
        if math.isfinite(result.loss):
            self._tally.add(result)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time of a block as waiting for the next update."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._waited += time.perf_counter() - started

    def take(self, num_tokens: int) -> dict[str, float]:
        """Return the numbers of the updates since the last call, and begin anew.

        Where a loss was not finite the mean of the others is among them, as "loss".

        Args:
            num_tokens: Tokens of all examples since training began, over interruptions too.
        """
        seconds = time.perf_counter() - self._started
        metrics = {
            **self._losses.mean_in_place_of("loss"),
            **self._tally.metrics(),
            "num_tokens": num_tokens,
            **token_counts(self._window),
            "tokens_per_second": self._window.num_logical_tokens / seconds,
            "packing_seconds": self._window.packing_seconds,
            "waiting_seconds": self._waited,
        }
        if self.num_skipped:
            metrics["skipped_updates"] = self.num_skipped
        self._start_window()
        return metrics


def token_counts(report: PackingReport) -> dict[str, float]:
    """Return the three token counts and the shared share under the names that are logged."""
    return {
        "logical_tokens": report.num_logical_tokens,
        "executed_tokens": report.num_executed_tokens,
        "loss_tokens": report.num_loss_tokens,
        "shared_fraction": report.shared_share,
    }


def count_slots(batch: PackedBatch, data_parallel_rank: int) -> int:
    """Return the slots of the rows that one data-parallel rank runs, padding included."""
    return sum(batch.rows[row].input_ids.size for row in batch.schedule.row_index[data_parallel_rank])
