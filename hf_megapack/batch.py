"""The plain frozen types that cross rooms: one `PackedBatch` is one optimizer update.

Arrays are numpy, read-only by convention, without behaviour. `labels` here are already shifted: the label of a slot is
the token that its hidden state predicts. `to_buffer` and `from_buffer` carry a batch between processes without pickle.
"""

import struct
import zlib
from dataclasses import dataclass

import numpy as np

from hf_megapack.errors import BackendError

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


_MAGIC = b"megapack"
_VERSION = 1
# Magic, version, checksum of what follows, bytes of what follows.
_HEADER = struct.Struct("<8sIIQ")
_ROW_ARRAYS = ("input_ids", "position_ids", "labels", "loss_weights", "subtree_end")
_NUM_BATCH_COUNTS = 7
_NUM_ROW_COUNTS = 4


def to_buffer(batch: PackedBatch) -> np.ndarray:
    """Write a batch into one flat buffer: header, counts (int64), then every array (int32).

    Args:
        batch: The batch.

    Returns:
        uint8, one-dimensional, contiguous and writable; a process of the same machine type reads it with `from_buffer`.
    """
    counts = [
        batch.num_examples,
        batch.num_logical_tokens,
        batch.num_loss_tokens,
        int(np.float64(batch.packing_seconds).view(np.int64)),
        *batch.schedule.row_index.shape,
        len(batch.rows),
    ]
    arrays = [batch.schedule.row_index, batch.schedule.is_dummy.astype(np.int32)]
    for row in batch.rows:
        table = row.segments
        counts += [row.input_ids.size, table.start.size, table.examples.size, row.num_padding_slots]
        arrays += [getattr(row, name) for name in _ROW_ARRAYS]
        arrays += [table.start, table.end, table.parent, table.example_offsets, table.examples]
    counts_end = _HEADER.size + 8 * len(counts)
    buffer = np.empty(counts_end + 4 * sum(array.size for array in arrays), dtype=np.uint8)
    buffer[_HEADER.size : counts_end].view(np.int64)[:] = counts
    np.concatenate([array.ravel() for array in arrays], out=buffer[counts_end:].view(np.int32))
    payload = buffer[_HEADER.size :]
    header = _HEADER.pack(_MAGIC, _VERSION, zlib.crc32(payload.data), payload.size)
    buffer[: _HEADER.size] = np.frombuffer(header, dtype=np.uint8)
    return buffer


def from_buffer(buffer: np.ndarray) -> PackedBatch:
    """Read a batch back; its arrays are views of the buffer.

    Args:
        buffer: uint8, one-dimensional and contiguous, as `to_buffer` wrote it.

    Returns:
        The batch.

    Raises:
        BackendError: If the buffer is not a batch, of another version, cut short, or changed on the way.
    """
    if buffer.size < _HEADER.size:
        raise BackendError(f"a packed batch has at least {_HEADER.size} bytes, this buffer {buffer.size}")
    magic, version, checksum, size = _HEADER.unpack(buffer[: _HEADER.size].tobytes())
    if magic != _MAGIC:
        raise BackendError(f"this buffer is no packed batch: it begins with {magic!r}, not {_MAGIC!r}")
    if version != _VERSION:
        raise BackendError(
            f"this packed batch has format version {version}, this process reads {_VERSION}; "
            "run the same hf_megapack on every rank"
        )
    payload = buffer[_HEADER.size :]
    if payload.size != size or zlib.crc32(payload.data) != checksum:
        raise BackendError(f"a packed batch of {size} bytes arrived damaged ({payload.size} bytes)")
    counts = payload[: 8 * _NUM_BATCH_COUNTS].view(np.int64).tolist()
    *totals, data_parallel_size, num_microbatches, num_rows = counts
    counts_end = 8 * (_NUM_BATCH_COUNTS + _NUM_ROW_COUNTS * num_rows)
    row_counts = payload[8 * _NUM_BATCH_COUNTS : counts_end].view(np.int64).reshape(num_rows, _NUM_ROW_COUNTS)
    reader = _Reader(payload[counts_end:].view(np.int32))
    schedule_shape = (data_parallel_size, num_microbatches)
    schedule = RowSchedule(
        row_index=reader.take(data_parallel_size * num_microbatches).reshape(schedule_shape),
        is_dummy=reader.take(data_parallel_size * num_microbatches).reshape(schedule_shape).astype(bool),
    )
    rows = tuple(_read_row(reader, *sizes) for sizes in row_counts.tolist())
    return PackedBatch(
        rows=rows,
        schedule=schedule,
        num_examples=totals[0],
        num_logical_tokens=totals[1],
        num_loss_tokens=totals[2],
        packing_seconds=float(np.int64(totals[3]).view(np.float64)),
    )


class _Reader:
    """Hands out consecutive pieces of one array."""

    def __init__(self, values: np.ndarray) -> None:
        self._values = values
        self._at = 0

    def take(self, size: int) -> np.ndarray:
        """Return the next `size` values."""
        self._at += size
        return self._values[self._at - size : self._at]


def _read_row(reader: _Reader, num_slots: int, num_segments: int, num_owners: int, num_padding_slots: int) -> PackedRow:
    """Read one row in the order in which `to_buffer` writes it."""
    arrays = {name: reader.take(num_slots) for name in _ROW_ARRAYS}
    segments = SegmentTable(
        start=reader.take(num_segments),
        end=reader.take(num_segments),
        parent=reader.take(num_segments),
        example_offsets=reader.take(num_segments + 1),
        examples=reader.take(num_owners),
    )
    return PackedRow(**arrays, segments=segments, num_padding_slots=num_padding_slots)
