"""Rows that come one after another, without a known number, rendered when they are needed.

The invariant: a pass over a stream gives the examples that a dataset of the same rows in the same order gives, and the
same updates. Order is the stream's own. One process reads; nothing here knows ranks or rows of slots.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import fsspec.asyn
import numpy as np
import torch
from datasets import IterableDataset
from torch.utils.data import get_worker_info

from hf_megapack.data.chat import ChatTransform, TokenizedExample
from hf_megapack.data.formats import FORMATS, recognise_format
from hf_megapack.data.lengths import LengthTally, Outcome
from hf_megapack.errors import BackendError, ConfigError, DataError

_MOST_ROWS_PER_READ = 200


class ExampleStream:
    """A stream of rows and what makes examples of them; has no length.

    Args:
        rows: The stream; None on ranks that do not read.
        transform: Makes the examples; None on ranks that do not read.

    Attributes:
        limit_name: What sets the longest example, for messages.

    Raises:
        ConfigError: If another process would read a part of the stream, or its place would be lost.
        DataError: If its columns are known and fit no format.
    """

    def __init__(self, rows: IterableDataset | None, transform: ChatTransform | None) -> None:
        self._transform = transform
        self._rows = rows
        self._format_name: str | None = None
        self.limit_name = transform.limit_name if transform is not None else ""
        if rows is None:
            return
        split = rows._distributed
        if split is not None and split.world_size > 1:
            raise ConfigError(
                f"the stream was split with split_dataset_by_node over {split.world_size} nodes, but rank 0 reads for "
                "all ranks, so the other parts would never be learned. Give the whole stream."
            )
        if rows._formatting is not None:
            # Formats such as "torch" would hand over tensors.
            if rows._starting_state_dict is not None:
                raise ConfigError(
                    "the stream has a format, and a place that load_state_dict set, which is lost when the format is "
                    "taken off. Leave out with_format."
                )
            self._rows = rows.with_format(None)
        if rows.column_names is not None:
            self._format_name = recognise_format(rows.column_names)

    def examples(self, epoch: int, rows_per_read: int) -> Iterator[TokenizedExample]:
        """Yield the examples of one pass, in the stream's order; dropped ones without tokens.

        Args:
            epoch: Number of the pass, which a shuffled stream adds to its seed.
            rows_per_read: Rows that are rendered and tokenized together.

        Yields:
            One example per row, or per assistant turn.

        Raises:
            BackendError: If it is read in one of several worker processes: each example would come several times.
            DataError: If a row cannot be learned as it stands; names row and turn.
        """
        if self._rows is None:
            return
        if (worker := get_worker_info()) is not None:
            if worker.num_workers > 1:
                raise BackendError(f"{worker.num_workers} workers would each read the stream; give the loader one")
            # What datasets does where it reads in a worker: a lock that was held during the fork stays locked.
            fsspec.asyn.reset_lock()
        self._rows.set_epoch(epoch)
        num_rows = 0
        # Batches, because datasets shuffles single rows in another order in a worker than in the main process.
        for batch in self._rows.iter(batch_size=min(rows_per_read, _MOST_ROWS_PER_READ)):
            self._format_name = self._format_name or recognise_format(batch)
            if missing := [name for name in FORMATS[self._format_name][0] if name not in batch]:
                raise DataError(f"row {num_rows} has no {' and no '.join(missing)}, which rows before it have")
            rows = [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]
            indices = range(num_rows, num_rows + len(rows))
            yield from self._transform.tokenize(rows, indices, format_name=self._format_name)
            num_rows += len(rows)


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class StreamedUpdate:
    """What was read for one optimizer update.

    Attributes:
        examples: Each with `input_ids` (int32) and `loss_mask` (uint8); none when the pass is over.
        lengths: What the length policy did since the update before.
    """

    examples: list[dict[str, np.ndarray]]
    lengths: LengthTally


class UpdateStream(torch.utils.data.IterableDataset):
    """Passes over a stream, cut into updates; every pass ends with one that has no examples.

    Args:
        stream: What to read.
        examples_per_update: Examples that one optimizer update learns from.
        drop_last: Whether to leave out a last update that is smaller.
    """

    def __init__(self, stream: ExampleStream, *, examples_per_update: int, drop_last: bool) -> None:
        self._stream = stream
        self._examples_per_update = examples_per_update
        self._drop_last = drop_last
        # In shared memory, so that a worker that lives on sees a change.
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()

    def set_epoch(self, epoch: int) -> None:
        """Choose the pass that the next iteration reads; a stream without randomness gives the same in each."""
        self._epoch.fill_(epoch)

    def __iter__(self) -> Iterator[StreamedUpdate]:
        """Yield one pass.

        Raises:
            DataError: If it holds no update, so that training would go on for ever on nothing; or a row of it cannot
                be learned.
        """
        lengths, waiting = LengthTally(), []
        total, num_updates = LengthTally(), 0
        for example in self._stream.examples(int(self._epoch), self._examples_per_update):
            lengths.counts[example.outcome] += 1
            if example.outcome >= Outcome.DROPPED:
                continue
            waiting.append({"input_ids": example.input_ids, "loss_mask": example.loss_mask})
            if len(waiting) == self._examples_per_update:
                yield StreamedUpdate(examples=waiting, lengths=lengths)
                num_updates += 1
                total.merge(lengths)
                lengths, waiting = LengthTally(), []
        if waiting and not self._drop_last:
            yield StreamedUpdate(examples=waiting, lengths=lengths)
            num_updates += 1
            total.merge(lengths)
            lengths = LengthTally()
        total.merge(lengths)
        if not num_updates:
            raise DataError(self._describe_nothing(total, len(waiting)))
        total.log(self._stream.limit_name)
        yield StreamedUpdate(examples=[], lengths=lengths)

    def _describe_nothing(self, total: LengthTally, num_left: int) -> str:
        if not sum(total.counts):
            return "the stream has no rows"
        if num_left:
            return (
                f"dataloader_drop_last leaves nothing: the stream's {num_left} examples are fewer than the "
                f"{self._examples_per_update} of an update; lower the batch size or turn it off"
            )
        return (
            f"no usable example is left of the stream's {sum(total.counts)}: all were longer than "
            f"{self._stream.limit_name}, or lost every token to learn when cut; raise it"
        )


def is_stream(dataset: Any) -> bool:
    """Tell whether a dataset, as a user gives it, is a stream.

    Args:
        dataset: Anything.

    Raises:
        ConfigError: If it is a stream of a kind that cannot be read here.
    """
    if isinstance(dataset, IterableDataset):
        return True
    if isinstance(dataset, torch.utils.data.IterableDataset):
        raise ConfigError(
            f"a stream must be a datasets.IterableDataset, got {type(dataset).__name__}; wrap it with "
            "datasets.IterableDataset.from_generator"
        )
    return False
