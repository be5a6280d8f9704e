"""From a dataset to a DataLoader that yields one packed update at a time, on rank 0 alone.

Rank 0 reads, renders and packs. Every other rank holds placeholders of the same lengths, or without one for a stream,
so that loops, totals and progress agree, and gets its batches from rank 0.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from datasets import Dataset
from torch.utils.data import DataLoader

from hf_megapack.batch import PackedBatch, from_buffer, to_buffer
from hf_megapack.config import MegaPackConfig
from hf_megapack.data.chat import ChatTransform
from hf_megapack.data.collator import PrefixTreeCollator
from hf_megapack.data.lengths import ExampleLimit, LengthTally, Outcome, longest_example
from hf_megapack.data.prepare import prepare_dataset
from hf_megapack.data.sampler import UpdateSampler
from hf_megapack.data.stream import ExampleStream, is_stream
from hf_megapack.errors import ConfigError
from hf_megapack.packing import Alignment, ExampleSet, PrefixOrder, estimate_sharing, gather_examples, order_by_prefix
from hf_megapack.ranks import from_rank_zero
from hf_megapack.streaming import build_stream_loader, check_stream_options

_ESTIMATED_EXAMPLES = 512
# What grouping would give is news from this factor on.
_WORTH_TELLING = 1.05
_EXAMPLES_PER_READ = 64


def prepare_on_rank_zero(
    dataset: Any,
    processing_class: Any,
    args: MegaPackConfig,
    *,
    is_training: bool = False,
    limit: ExampleLimit | None = None,
    tally: LengthTally | None = None,
) -> Any:
    """Render and tokenize a dataset on rank 0.

    Args:
        dataset: Rows with messages, with prompt and completion, or with input_ids and labels; or ready examples; or a
            stream of rows; or a dict of such datasets, to evaluate on; or None. Rank 0's alone is looked at.
        processing_class: The tokenizer.
        args: The data options.
        is_training: Whether it is for training.
        limit: What the model allows; None leaves the model out of account.
        tally: Gets what the length policy did to the examples, on every rank; of a stream nothing yet.

    Returns:
        The tokenized dataset on rank 0, a range of equal length elsewhere; of a stream an `ExampleStream`, without rows
        elsewhere; for a dict a dict, for None None.

    Raises:
        ConfigError: If the dataset is of a kind that cannot be used, needs a tokenizer and there is none, or does not
            go with an option.
        DataError: If a row cannot be learned.
    """
    # What the other ranks were given does not matter, nor whether they were given anything.
    names = from_rank_zero(
        lambda: None if dataset is None else list(dataset) if isinstance(dataset, dict) and not is_training else False,
        encode=lambda value: json.dumps(value).encode(),
        decode=json.loads,
        device=args.device,
    )
    if names is None:
        return None
    if names is not False:
        parts = dataset if args.process_index == 0 else dict.fromkeys(names)
        return {
            name: prepare_on_rank_zero(parts[name], processing_class, args, limit=limit, tally=tally) for name in names
        }
    limit = limit or longest_example(args.max_length, args.packed_sequence_length)
    options = {"assistant_mask": args.assistant_mask, "max_length": limit.max_length, "overlong": args.overlong}
    options |= {"limit_name": limit.name, "vocab_size": limit.vocab_size}
    counted = LengthTally() if tally is None else tally

    def prepare() -> Any:
        if is_stream(dataset):
            if is_training:
                check_stream_options(args)
            return ExampleStream(dataset, ChatTransform(processing_class, **options))
        return prepare_dataset(dataset, processing_class, **options, num_proc=args.dataset_num_proc, tally=counted)

    def encode(prepared: Any) -> bytes:
        return json.dumps([None if isinstance(prepared, ExampleStream) else len(prepared), counted.counts]).encode()

    def decode(data: bytes) -> Any:
        length, counted.counts = json.loads(data)
        return ExampleStream(None, None) if length is None else range(length)

    return from_rank_zero(prepare, encode=encode, decode=decode, device=args.device, is_slow=True)


def build_collator(
    processing_class: Any,
    args: MegaPackConfig,
    data_parallel_size: int,
    attention: Literal["tree", "thd"],
    *,
    vocab_size: int | None = None,
) -> PrefixTreeCollator:
    """Return the collator that the arguments describe.

    Args:
        processing_class: The tokenizer.
        args: The packing options and the parallel sizes.
        data_parallel_size: Ranks that run different rows.
        attention: Over the rows, which decides how ranks can share one.
        vocab_size: Tokens that the model knows, None if that is not known. Nothing sees padding, so where the
            tokenizer's own padding token is none of them it is token 0.

    Raises:
        ConfigError: If an option does not fit another, or a multiple the layout.
    """
    padding = getattr(processing_class, "pad_token_id", None) or 0
    return PrefixTreeCollator(
        packed_sequence_length=args.packed_sequence_length,
        packing_strategy=args.packing_strategy,
        min_shared_tokens=args.min_shared_tokens,
        share_supervised=args.share_supervised,
        alignment=layout_alignment(args, attention),
        data_parallel_size=data_parallel_size,
        pipeline_parallel_size=args.pipeline_parallel_size,
        virtual_pipeline_parallel_size=args.virtual_pipeline_parallel_size,
        pad_token_id=padding if vocab_size is None or padding < vocab_size else 0,
    )


def layout_alignment(args: MegaPackConfig, attention: Literal["tree", "thd"] = "tree") -> Alignment:
    """Return the two multiples of a row: those given, which must suit the layout, else those that the layout needs.

    Args:
        args: The parallel sizes and the two multiples.
        attention: Over the rows.

    Raises:
        ConfigError: If a given multiple does not suit the layout.
    """
    needed = Alignment.for_layout(
        tensor_parallel_size=args.tensor_parallel_size if args.sequence_parallel else 1,
        context_parallel_size=args.context_parallel_size,
        fp8=args.fp8,
        attention=attention,
    )
    multiples = {
        "sequence_length_multiple": (args.sequence_length_multiple, needed.sequence_multiple),
        "packed_length_multiple": (args.packed_length_multiple, needed.packed_multiple),
    }
    for name, (given, least) in multiples.items():
        if given is not None and given % least:
            raise ConfigError(
                f"{name}={given} does not suit the layout, which needs a multiple of {least}. Leave it out to take "
                "that."
            )
    sequence_multiple, packed_multiple = (given or least for given, least in multiples.values())
    return Alignment(sequence_multiple=sequence_multiple, packed_multiple=packed_multiple)


def build_loader(
    dataset: Sequence | ExampleStream,
    collator: PrefixTreeCollator,
    args: MegaPackConfig,
    *,
    update_size: int,
    is_training: bool,
) -> DataLoader:
    """Return a plain DataLoader of updates, which `skip_first_batches` can rebuild when training resumes.

    What it yields is for `next_batch` to read. What takes `set_epoch` is its batch sampler, or its dataset if that is
    an `UpdateStream`.

    Grouping by prefix reads the dataset once, on rank 0; the other ranks only count updates.

    Args:
        dataset: What `prepare_on_rank_zero` returned.
        collator: Examples to one packed update.
        args: The loader options; `group_by_prefix` concerns training alone.
        update_size: Examples of one update.
        is_training: Whether to shuffle, and to leave out a smaller last update if the arguments say so.
    """
    if isinstance(dataset, ExampleStream):
        return build_stream_loader(dataset, collator, args, update_size=update_size, is_training=is_training)
    reads = args.process_index == 0
    workers = args.dataloader_num_workers if reads else 0
    return DataLoader(
        dataset,
        batch_sampler=UpdateSampler(
            num_examples=len(dataset),
            examples_per_update=update_size,
            seed=args.seed if args.data_seed is None else args.data_seed,
            shuffle=is_training and args.train_sampling_strategy != "sequential",
            conversation_ids=_conversation_ids(dataset),
            shuffle_unit=args.shuffle_unit,
            drop_last=is_training and args.dataloader_drop_last,
            prefix_order=_prefix_order(dataset, collator, args) if is_training and args.group_by_prefix else None,
        ),
        collate_fn=PackIntoBuffer(collator) if reads else _nothing,
        num_workers=workers,
        persistent_workers=args.dataloader_persistent_workers and workers > 0,
        prefetch_factor=args.dataloader_prefetch_factor if workers else None,
        multiprocessing_context=getattr(args, "dataloader_multiprocessing_context", None) if workers else None,
        # A loader without its own generator draws from torch's, on rank 0 alone, and the ranks' random states part.
        generator=torch.Generator(),
    )


def next_batch(iterator: Iterator, device: torch.device, tally: LengthTally | None = None) -> PackedBatch | None:
    """Return rank 0's next update on every rank, None when there is no more.

    Args:
        iterator: Of a loader from `build_loader`.
        device: Device that the process group communicates on.
        tally: Gets what the length policy did to the examples of a stream since the last call, on every rank.

    Raises:
        DataError: On every rank, if rank 0 could not pack the update.
    """
    counts, buffer = from_rank_zero(lambda: _take(iterator), encode=_encode_taken, decode=_decode_taken, device=device)
    if tally is not None:
        tally.merge(LengthTally(counts=counts.tolist()))
    return from_buffer(buffer) if buffer.size else None


def _take(iterator: Iterator) -> tuple[np.ndarray, np.ndarray]:
    """Return the outcomes of a stream's examples, int64, zero without a stream, and the next update's buffer."""
    taken = next(iterator, None)
    buffer, lengths = taken if isinstance(taken, tuple) else (taken, LengthTally())
    return np.array(lengths.counts), np.empty(0, np.uint8) if buffer is None else buffer.numpy()


def _encode_taken(taken: tuple[np.ndarray, np.ndarray]) -> bytes:
    counts, buffer = taken
    return counts.astype("<i8").tobytes() + buffer.tobytes()


def _decode_taken(data: bytes) -> tuple[np.ndarray, np.ndarray]:
    num_counts = len(Outcome)
    return np.frombuffer(data, "<i8", count=num_counts), np.frombuffer(data, np.uint8, offset=8 * num_counts)


def describe_sharing(
    measured: float,
    dataset: Sequence | ExampleStream,
    collator: PrefixTreeCollator,
    args: MegaPackConfig,
    *,
    update_size: int,
) -> str:
    """Return one sentence on what sharing prefixes saves, and what grouping examples by prefix does or would.

    Args:
        measured: Logical tokens per executed token so far.
        dataset: The tokenized training set; of a stream nothing can be told beforehand.
        collator: Its packing options.
        args: Says whether examples are grouped already.
        update_size: Examples of one update.
    """
    text = f"Each executed token stands for {measured:.2f} tokens of the data"
    if args.group_by_prefix:
        return f"{text}, with examples grouped by prefix (group_by_prefix)."
    if isinstance(dataset, ExampleStream):
        return f"{text}."
    num_examples = min(len(dataset), max(_ESTIMATED_EXAMPLES, 4 * update_size))
    if num_examples <= update_size or collator.packing_strategy != "prefix_tree":
        return f"{text}."
    _, grouped = estimate_sharing(
        [dataset[index] for index in range(num_examples)],
        update_size,
        packed_sequence_length=collator.packed_sequence_length,
        min_shared_tokens=collator.min_shared_tokens,
        share_supervised=collator.share_supervised,
        alignment=collator.alignment,
    )
    judged = f"judging by the first {num_examples} examples"
    if grouped < _WORTH_TELLING * measured:
        return f"{text}; group_by_prefix=True would hardly raise that, {judged}."
    return f"{text}; group_by_prefix=True would make it about {grouped:.2f}, {judged}."


def _prefix_order(dataset: Sequence, collator: PrefixTreeCollator, args: MegaPackConfig) -> PrefixOrder | None:
    """Sort the dataset on rank 0 by what its examples may share; the other ranks get None, or rank 0's error."""
    return from_rank_zero(
        lambda: order_by_prefix(_read_parts(dataset, collator.share_supervised)),
        encode=lambda _order: b"",
        decode=lambda _nothing: None,
        device=args.device,
        is_slow=True,
    )


def _read_parts(dataset: Dataset, share_supervised: bool) -> Iterable[ExampleSet]:
    """Yield the whole dataset, a few examples at a time."""
    columns = dataset.select_columns(["input_ids", "loss_mask"])
    for part in columns.iter(batch_size=_EXAMPLES_PER_READ):
        pairs = zip(part["input_ids"], part["loss_mask"], strict=True)
        examples = [{"input_ids": ids, "loss_mask": mask} for ids, mask in pairs]
        yield gather_examples(examples, share_supervised=share_supervised)


def _conversation_ids(dataset: Sequence) -> Any:
    if isinstance(dataset, Dataset) and "conversation_id" in dataset.column_names:
        return dataset.with_format("numpy")["conversation_id"][:]
    return None


@dataclass(frozen=True)
class PackIntoBuffer:
    """Packs examples into one flat uint8 tensor, which a loader's worker hands over in shared memory.

    Attributes:
        collator: Packs them into a PackedBatch.
    """

    collator: Callable[[list], PackedBatch]

    def __call__(self, examples: list) -> torch.Tensor:
        """Return the update's buffer, uint8, one-dimensional."""
        return torch.from_numpy(to_buffer(self.collator(examples)))


def _nothing(_examples: list) -> None:
    return None
