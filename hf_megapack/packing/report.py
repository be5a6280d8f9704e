"""Token accounting of packed updates: what the data holds, what was computed, what was learned from."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

from hf_megapack.batch import PackedBatch
from hf_megapack.packing.alignment import NO_ALIGNMENT, Alignment
from hf_megapack.packing.examples import gather_examples
from hf_megapack.packing.plan import plan_update
from hf_megapack.packing.tree import sort_examples


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

    @classmethod
    def from_batch(cls, batch: PackedBatch) -> Self:
        """Count one update."""
        row_slots = [row.input_ids.size for row in batch.rows]
        owned = sum(int((row.segments.end - row.segments.start).sum()) for row in batch.rows)
        dummies = batch.schedule.row_index[batch.schedule.is_dummy].tolist()
        dummy_slots = sum(row_slots[row] for row in dummies)
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
