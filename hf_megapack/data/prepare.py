"""Run the transform over a dataset and account for every example: what was cut or left out, how long the rest is.

Every example of the result has something to learn; zero usable examples is an error.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow.compute as pc
from datasets import Dataset, Features, IterableDataset, Value
from transformers import PreTrainedTokenizerBase

from hf_megapack.data.chat import COLUMNS, ChatTransform
from hf_megapack.data.formats import FORMATS, recognise_format
from hf_megapack.data.lengths import LengthTally, Outcome, describe_lengths, log_outcomes
from hf_megapack.errors import ConfigError, DataError

logger = logging.getLogger(__name__)

_ROWS_PER_MAP_CALL = 200


def prepare_dataset(  # noqa: PLR0913 - what `ChatTransform` takes, and how to run it
    dataset: Dataset | Sequence[Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    *,
    assistant_mask: str = "all",
    max_length: int | None = None,
    overlong: str = "error",
    num_proc: int | None = None,
    limit_name: str = "max_length",
    vocab_size: int | None = None,
    tally: LengthTally | None = None,
) -> Dataset:
    """Tokenize a dataset of any known format, with a log of what the length policy did.

    Args:
        dataset: A `datasets.Dataset`, or rows as a list of dicts (kept in memory, one process).
        tokenizer: See `ChatTransform`.
        assistant_mask: See `ChatTransform`.
        max_length: See `ChatTransform`.
        overlong: See `ChatTransform`.
        num_proc: Processes that map a `Dataset`.
        limit_name: See `ChatTransform`.
        vocab_size: See `ChatTransform`.
        tally: Gets what the length policy did to each example.

    Returns:
        Columns `input_ids`, `loss_mask`, `conversation_id` and `turn`, as numpy int32.

    Raises:
        ConfigError: If the dataset is of a kind that cannot be used here.
        DataError: If a row cannot be learned, or no row is left.
    """
    transform = ChatTransform(
        tokenizer,
        assistant_mask=assistant_mask,
        max_length=max_length,
        overlong=overlong,
        limit_name=limit_name,
        vocab_size=vocab_size,
    )
    if isinstance(dataset, IterableDataset):
        raise ConfigError(
            "an IterableDataset has no length, so it cannot be prepared as a whole; MegaPackTrainer takes it as it is"
        )
    features = Features({**COLUMNS, "outcome": Value("int8")})
    if isinstance(dataset, Dataset):
        if len(dataset) == 0:
            raise DataError("the dataset has no rows")
        # Formats such as "torch" would hand over tensors; a lazy transform (type "custom") makes the rows: keep it.
        plain = dataset if dataset.format["type"] == "custom" else dataset.with_format(None)
        mapped = plain.map(
            transform,
            batched=True,
            batch_size=_ROWS_PER_MAP_CALL,
            with_indices=True,
            fn_kwargs={"report_outcomes": True},
            remove_columns=dataset.column_names,
            features=features,
            num_proc=num_proc,
            desc="Tokenizing",
        )
    else:
        mapped = Dataset.from_dict(_transform_rows(transform, dataset), features=features)
    outcomes = mapped.with_format("numpy")["outcome"][:]
    log_outcomes(outcomes, limit_name)
    if tally is not None:
        tally.add(outcomes)
    kept = np.flatnonzero(outcomes < Outcome.DROPPED)
    if not len(kept):
        raise DataError(
            f"no usable example is left of {len(outcomes)}: all were longer than {limit_name}={max_length}, or lost "
            f"every token to learn when cut; raise it"
        )
    if len(kept) < len(outcomes):
        mapped = mapped.select(kept)
    prepared = mapped.remove_columns("outcome").with_format("numpy", dtype=np.int32)
    logger.info("Lengths: %s", describe_lengths(example_lengths(prepared)))
    return prepared


def example_lengths(prepared: Dataset) -> np.ndarray:
    """Return the number of tokens of each example, without reading the tokens.

    Args:
        prepared: What `prepare_dataset` returns.

    Returns:
        int64, shape (num_examples,).
    """
    table = prepared.with_format("arrow")
    parts = [pc.list_value_length(part["input_ids"]).to_numpy() for part in table.iter(batch_size=10_000)]
    return np.concatenate(parts).astype(np.int64)


def _transform_rows(transform: ChatTransform, rows: Any) -> dict[str, list[Any]]:
    """Transform a list of dicts without the columnar store, which cannot hold arguments of mixed types."""
    if (
        not isinstance(rows, Sequence)
        or isinstance(rows, (str, bytes))
        or not all(isinstance(r, Mapping) for r in rows)
    ):
        is_list = isinstance(rows, Sequence) and not isinstance(rows, (str, bytes))
        kind = f"{type(rows).__name__}" + (" that holds something else" if is_list else "")
        raise ConfigError(
            f"a dataset must be a datasets.Dataset, a datasets.IterableDataset or a list of dicts, got {kind}. Of a "
            'DatasetDict pass one split, such as dataset["train"]; read files with datasets.load_dataset'
        )
    if not rows:
        raise DataError("the dataset has no rows")
    columns = set().union(*rows)
    format_name = recognise_format(columns)
    for index, row in enumerate(rows):
        if missing := [name for name in FORMATS[format_name][0] if name not in row]:
            raise DataError(f"row {index} has no {' and no '.join(missing)}, which the other rows have")
    examples = list(transform.tokenize(rows, range(len(rows)), format_name=format_name))
    result: dict[str, list[Any]] = {name: [getattr(example, name) for example in examples] for name in COLUMNS}
    return {**result, "outcome": [int(example.outcome) for example in examples]}
