"""The plain frozen types that cross rooms: one `PackedBatch` is one optimizer update.

Arrays are numpy, read-only by convention, without behaviour. `labels` here are already shifted: the label of a slot is
the token that its hidden state predicts.
"""

from dataclasses import dataclass

import numpy as np

IGNORE_LABEL = -100


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class SegmentTable:
    """Which examples own which run of slots of one row, in depth-first preorder.

    Attributes:
        start: First slot of each segment. int32, shape (num_segments,), increasing.
        end: First slot after each segment. int32, shape (num_segments,).
        parent: Segment that each segment continues, -1 for a root. int32, shape (num_segments,).
        example_offsets: Segment `s` is part of `examples[example_offsets[s]:example_offsets[s + 1]]`. int32,
            shape (num_segments + 1,).
        examples: Positions of examples in the update, concatenated by segment. int32.
    """

    start: np.ndarray
    end: np.ndarray
    parent: np.ndarray
    example_offsets: np.ndarray
    examples: np.ndarray


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class PackedRow:
    """One row of slots: what one microbatch of the model computes.

    Attributes:
        input_ids: Token of each slot. int32, shape (num_slots,).
        position_ids: Depth of each slot in its example, 0 at a root; restarts at a branch. int32, shape (num_slots,).
        labels: Token that each slot predicts, -100 where nothing is learned. int32, shape (num_slots,).
        loss_weights: Number of examples that learn each slot's label, 0 where nothing is learned. int32,
            shape (num_slots,).
        subtree_end: First slot after the subtree that begins at the slot's own segment, counted from that slot on:
            slot `i` sees slot `j` exactly when `j <= i < subtree_end[j]`. int32, shape (num_slots,).
        segments: The tree that the row was laid out from.
        num_padding_slots: Slots at the tail that belong to no example.
    """

    input_ids: np.ndarray
    position_ids: np.ndarray
    labels: np.ndarray
    loss_weights: np.ndarray
    subtree_end: np.ndarray
    segments: SegmentTable
    num_padding_slots: int


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class RowSchedule:
    """Which data-parallel rank runs which row in which microbatch.

    Attributes:
        row_index: Row that rank `d` runs in microbatch `k`. int32, shape (data_parallel_size, num_microbatches).
        is_dummy: True where the row is run only to keep ranks in step and counts for nothing. bool, same shape.
    """

    row_index: np.ndarray
    is_dummy: np.ndarray


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class PackedBatch:
    """One optimizer update, packed.

    Attributes:
        rows: The rows, each run once by some rank.
        schedule: Rows to data-parallel ranks and microbatches.
        num_examples: Examples in the update.
        num_logical_tokens: Tokens of all examples before anything was shared.
        num_loss_tokens: Loss-bearing tokens: the sum of `loss_weights` over `rows`; the loss's denominator.
        packing_seconds: Time that planning and layout took.
    """

    rows: tuple[PackedRow, ...]
    schedule: RowSchedule
    num_examples: int
    num_logical_tokens: int
    num_loss_tokens: int
    packing_seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What one forward (and backward) pass over a `PackedBatch` gave, equal on every rank.

    Attributes:
        loss: Weighted sum of the token losses divided by `num_loss_tokens`, in nats: the loss that was
            back-propagated.
        num_loss_tokens: Loss-bearing tokens of the update.
        num_correct: Loss-bearing tokens whose label had the highest logit.
        entropy: Mean entropy of the predicted distribution over loss-bearing tokens, in nats.
    """

    loss: float
    num_loss_tokens: int
    num_correct: int
    entropy: float
