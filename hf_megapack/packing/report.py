"""Token accounting of packed updates: what the data holds, what was computed, what was learned from.

Counts come from the batch alone, never from what was planned. Drawing them is picture.py's job.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from hf_megapack.batch import PackedBatch
from hf_megapack.errors import ConfigError
from hf_megapack.packing.alignment import NO_ALIGNMENT, Alignment
from hf_megapack.packing.examples import gather_examples
from hf_megapack.packing.plan import plan_update
from hf_megapack.packing.rows import num_visible_pairs
from hf_megapack.packing.schedule import heaviest_load, slots_cost
from hf_megapack.packing.tree import sort_examples

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, kw_only=True, slots=True)
class PackingReport:
    """Counts over one or more updates; reports add up with `+` and `sum(reports, PackingReport())`.

    Attributes:
        num_updates: Updates counted.
        num_examples: Examples in them.
        num_rows: Rows, dummies not counted.
        num_dummies: Rows run again only to keep ranks in step.
        num_logical_tokens: Tokens of all examples before anything was shared.
        num_executed_tokens: Slots run, padding and dummies included.
        num_padding_slots: Slots of the rows that belong to no example, dummies not counted.
        num_dummy_slots: Slots of the dummies.
        num_loss_tokens: Loss-bearing tokens.
        packing_seconds: Time that planning and layout took.
        heaviest_load: Cost of the most loaded rank, by `slots_cost`, dummies included, summed over updates.
        mean_load: Cost of the average rank, summed over updates.
        batches: The updates themselves, where `from_batch` was asked to keep them for `plot`.
    """

    num_updates: int = 0
    num_examples: int = 0
    num_rows: int = 0
    num_dummies: int = 0
    num_logical_tokens: int = 0
    num_executed_tokens: int = 0
    num_padding_slots: int = 0
    num_dummy_slots: int = 0
    num_loss_tokens: int = 0
    packing_seconds: float = 0.0
    heaviest_load: float = 0.0
    mean_load: float = 0.0
    batches: tuple[PackedBatch, ...] = field(default=(), repr=False)

    @classmethod
    def from_batch(cls, batch: PackedBatch, *, keep_rows: bool = False) -> Self:
        """Count one update.

        Args:
            batch: The update.
            keep_rows: Whether the report holds on to the update, so that `plot` can draw it.

        Returns:
            The counts.
        """
        row_slots = [row.input_ids.size for row in batch.rows]
        owned = sum(int((row.segments.end - row.segments.start).sum()) for row in batch.rows)
        dummies = batch.schedule.row_index[batch.schedule.is_dummy].tolist()
        dummy_slots = sum(row_slots[row] for row in dummies)
        costs = [slots_cost(row.input_ids.size, num_visible_pairs(row.subtree_end)) for row in batch.rows]
        return cls(
            num_updates=1,
            num_examples=batch.num_examples,
            num_rows=len(batch.rows),
            num_dummies=len(dummies),
            num_logical_tokens=batch.num_logical_tokens,
            num_executed_tokens=sum(row_slots) + dummy_slots,
            num_padding_slots=sum(row_slots) - owned,
            num_dummy_slots=dummy_slots,
            num_loss_tokens=batch.num_loss_tokens,
            packing_seconds=batch.packing_seconds,
            heaviest_load=heaviest_load(costs, batch.schedule),
            mean_load=float(np.asarray(costs)[batch.schedule.row_index].sum(axis=1).mean()),
            batches=(batch,) if keep_rows else (),
        )

    def __add__(self, other: "PackingReport") -> "PackingReport":
        """Return the counts of both."""
        return PackingReport(
            **{field.name: getattr(self, field.name) + getattr(other, field.name) for field in fields(self)}
        )

    @property
    def sharing(self) -> float:
        """Logical tokens per executed token; 1 means that packing saved nothing."""
        return self.num_logical_tokens / self.num_executed_tokens if self.num_executed_tokens else 0.0

    @property
    def shared_share(self) -> float:
        """Share of the logical tokens that needed no slot of their own, 0 to 1."""
        own = self.num_executed_tokens - self.num_padding_slots - self.num_dummy_slots
        return 1.0 - own / self.num_logical_tokens if self.num_logical_tokens else 0.0

    @property
    def imbalance(self) -> float:
        """How much more the most loaded rank has to do than the average one; 0 on one rank."""
        return self.heaviest_load / self.mean_load - 1.0 if self.mean_load else 0.0

    def fill(self, packed_sequence_length: int) -> float:
        """Return the share of the rows' capacity that examples take, 0 to 1; dummies are not counted.

        Args:
            packed_sequence_length: Row capacity.
        """
        own = self.num_executed_tokens - self.num_padding_slots - self.num_dummy_slots
        return own / (self.num_rows * packed_sequence_length) if self.num_rows else 0.0

    def plot(self, *, packed_sequence_length: int | None = None, max_rows: int = 12) -> "Figure":
        """Draw the rows to scale: each prefix above what continues it, learned slots and padding marked.

        Args:
            packed_sequence_length: Row capacity, to be marked; None leaves it out.
            max_rows: Most rows to draw, from the first on.

        Returns:
            The picture; a notebook shows it, `savefig` writes it.

        Raises:
            ConfigError: If the report holds no rows, or matplotlib is not installed.
        """
        from hf_megapack.picture import plot_rows  # most users of reports never draw

        if not self.batches or len(self.batches) < self.num_updates:
            raise ConfigError(
                f"this report of {self.num_updates} updates holds the rows of {len(self.batches)}; build it with "
                "PackingReport.from_batch(batch, keep_rows=True)"
            )
        fill = "" if packed_sequence_length is None else f"fill {self.fill(packed_sequence_length):.1%}, "
        title = (
            f"{self.num_logical_tokens:,} tokens of {self.num_examples:,} examples in {self.num_executed_tokens:,} "
            f"slots: {self.sharing:.2f} tokens per slot"
        )
        details = (
            f"updates {self.num_updates}, rows {self.num_rows}, dummies {self.num_dummies}, {fill}"
            f"padding {self.num_padding_slots:,}, imbalance of ranks {self.imbalance:.1%}, "
            f"loss-bearing tokens {self.num_loss_tokens:,}"
        )
        return plot_rows(self.batches, title=title, details=details, capacity=packed_sequence_length, max_rows=max_rows)


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class ExampleCosts:
    """What each example of an update adds to it: what leaving it out would save if the others stayed where they are.

    Attributes:
        num_tokens: Tokens of each example. int64, shape (num_examples,).
        num_own_slots: Slots that no other example shares. int64, shape (num_examples,).
        num_own_pairs: Pairs that attention computes for those slots. int64, shape (num_examples,).
    """

    num_tokens: np.ndarray
    num_own_slots: np.ndarray
    num_own_pairs: np.ndarray

    @classmethod
    def from_batch(cls, batch: PackedBatch) -> Self:
        """Count for each example of one update, in the update's order."""
        tokens, slots, pairs = np.zeros((3, batch.num_examples), dtype=np.int64)
        for row in batch.rows:
            table = row.segments
            sizes = (table.end - table.start).astype(np.int64)
            num_owners = np.diff(table.example_offsets)
            # A slot sees its whole prefix and itself.
            depth = row.position_ids[table.start]
            seen = sizes * depth + sizes * (sizes + 1) // 2
            np.add.at(tokens, table.examples, np.repeat(sizes, num_owners))
            alone = num_owners == 1
            owner = table.examples[table.example_offsets[:-1][alone]]
            np.add.at(slots, owner, sizes[alone])
            np.add.at(pairs, owner, seen[alone])
        return cls(num_tokens=tokens, num_own_slots=slots, num_own_pairs=pairs)


def estimate_sharing(
    examples: Sequence[Mapping[str, Any]],
    examples_per_update: int,
    *,
    packed_sequence_length: int,
    min_shared_tokens: int = 64,
    share_supervised: bool = False,
    alignment: Alignment = NO_ALIGNMENT,
) -> tuple[float, float]:
    """Return how many logical tokens an executed token would stand for, in two orders of the same examples.

    Args:
        examples: Tokenized examples, as for `gather_examples`.
        examples_per_update: Examples packed together.
        packed_sequence_length: Row capacity.
        min_shared_tokens: Tokens below which a shared run is repeated instead.
        share_supervised: Also share slots that are learned.
        alignment: The two multiples of a row.

    Returns:
        The ratio in the given order, and in the order that puts equal prefixes next to each other.
    """
    by_prefix, _ = sort_examples(gather_examples(examples, share_supervised=share_supervised))

    def ratio(order: Sequence[int]) -> float:
        logical = executed = 0
        for first in range(0, len(order), examples_per_update):
            update = gather_examples(
                [examples[index] for index in order[first : first + examples_per_update]],
                share_supervised=share_supervised,
            )
            plan = plan_update(
                update,
                strategy="prefix_tree",
                packed_sequence_length=packed_sequence_length,
                min_shared_tokens=min_shared_tokens,
                alignment=alignment,
            )
            logical += int(update.lengths.sum())
            executed += sum(alignment.footprint(row.num_tokens) for row in plan.rows)
        return logical / executed

    return ratio(range(len(examples))), ratio(by_prefix.tolist())
