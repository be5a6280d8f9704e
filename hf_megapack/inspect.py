"""`python -m hf_megapack.inspect DATA --tokenizer T`: look at how the trainer would pack a data set.

Rows are rendered, ordered and packed by the trainer's own functions, so what is shown is what would be trained. No
model is needed and nothing is trained.
"""

import dataclasses
import heapq
import itertools
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader
from transformers import AutoTokenizer, HfArgumentParser, PreTrainedTokenizerBase

from hf_megapack.config import MegaPackConfig
from hf_megapack.data.lengths import describe_lengths
from hf_megapack.data.prepare import example_lengths
from hf_megapack.data.preview import Preview, show_example
from hf_megapack.data.sources import read_dataset
from hf_megapack.errors import ConfigError, MegaPackError
from hf_megapack.loading import build_collator, build_loader, prepare_on_rank_zero
from hf_megapack.packing import ExampleCosts, PackingReport, slots_cost
from hf_megapack.picture import check_picture_name

# Fields of MegaPackConfig that decide what is packed and how.
_TRAINER_OPTIONS = (
    "assistant_mask",
    "max_length",
    "overlong",
    "dataset_num_proc",
    "packed_sequence_length",
    "packing_strategy",
    "min_shared_tokens",
    "share_supervised",
    "shuffle_unit",
    "group_by_prefix",
    "sequence_length_multiple",
    "packed_length_multiple",
    "seed",
)
_NUM_COSTLY_EXAMPLES = 10


def _option(help_text: str, default: Any = None) -> Any:
    return dataclasses.field(default=default, metadata={"help": help_text})


@dataclass(kw_only=True)
class InspectOptions:
    """What to look at; how to pack it is MegaPackConfig's."""

    tokenizer: str = dataclasses.field(metadata={"help": "Hub id or folder of the tokenizer, or of its model."})
    chat_template: str | None = _option("Jinja file instead of the tokenizer's template.")
    split: str = _option("Split of a data set that has several.", "train")
    examples_per_update: int = _option(
        "Examples of one update: per_device_train_batch_size x gradient_accumulation_steps x data-parallel size.", 16
    )
    updates: int = _option("Updates to pack, from the first one of training on.", 3)
    shuffle: bool = _option("Take the order that training has with this seed, not the order of the data.", False)
    data_parallel_size: int = _option("Ranks that rows are dealt to.", 1)
    show: int = _option("Examples to print before the tables, with what is learned in colour.", 0)
    picture: str | None = _option("Image to write, such as rows.png or rows.pdf, with the packed rows to scale.")
    picture_rows: int = _option("Most rows to draw.", 12)


@dataclass(frozen=True, kw_only=True, slots=True)
class CostlyExample:
    """One line of the list of the most expensive examples.

    Attributes:
        update: Its update, from 0.
        data_row: Its row in the data set, from 0.
        turn: The only learned message, -1 when not one turn of several.
        num_tokens: Its tokens.
        num_own_slots: Slots that no other example of the update shares.
        num_own_pairs: Pairs that attention computes for those slots.
    """

    update: int
    data_row: int
    turn: int
    num_tokens: int
    num_own_slots: int
    num_own_pairs: int

    @property
    def cost(self) -> float:
        """Cost of the example's own slots, by `slots_cost`."""
        return slots_cost(self.num_own_slots, self.num_own_pairs)


def show_examples(loader: DataLoader, tokenizer: PreTrainedTokenizerBase, num_examples: int) -> Preview:
    """Return the first examples of a loader as text.

    Args:
        loader: As `build_loader` makes it.
        tokenizer: What decodes them.
        num_examples: Most examples to show.
    """
    shown = []
    for index in itertools.islice(itertools.chain.from_iterable(loader.batch_sampler), num_examples):
        row = loader.dataset[index]
        turn = f", turn {row['turn']}" if row["turn"] >= 0 else ""
        shown.append(show_example(row, tokenizer, title=f"row {row['conversation_id']}{turn}"))
    return Preview(tuple(shown))


def pack_updates(loader: DataLoader, num_updates: int) -> tuple[list[PackingReport], list[CostlyExample]]:
    """Pack the first updates of a loader.

    Args:
        loader: As `build_loader` makes it.
        num_updates: Most updates to pack.

    Returns:
        A report per update, which holds its rows, and every example with what it costs.
    """
    reports, examples = [], []
    for update, indices in enumerate(itertools.islice(loader.batch_sampler, num_updates)):
        rows = [loader.dataset[index] for index in indices]
        batch = loader.collate_fn.collator(rows)
        reports.append(PackingReport.from_batch(batch, keep_rows=True))
        costs = ExampleCosts.from_batch(batch)
        examples += [
            CostlyExample(
                update=update,
                data_row=int(row["conversation_id"]),
                turn=int(row["turn"]),
                num_tokens=int(costs.num_tokens[at]),
                num_own_slots=int(costs.num_own_slots[at]),
                num_own_pairs=int(costs.num_own_pairs[at]),
            )
            for at, row in enumerate(rows)
        ]
    return reports, examples


# Heading and text of each column; each update has a line, and all of them together.
_COLUMNS: dict[str, Callable[[PackingReport, int], str]] = {
    "examples": lambda report, _: f"{report.num_examples:,}",
    "rows": lambda report, _: f"{report.num_rows:,}",
    "fill": lambda report, capacity: f"{report.fill(capacity):.1%}",
    "logical": lambda report, _: f"{report.num_logical_tokens:,}",
    "executed": lambda report, _: f"{report.num_executed_tokens:,}",
    "sharing": lambda report, _: f"{report.sharing:.2f}",
    "padding": lambda report, _: f"{report.num_padding_slots:,}",
    "dummies": lambda report, _: f"{report.num_dummies:,}",
    "imbalance": lambda report, _: f"{report.imbalance:.1%}",
    "loss-bearing": lambda report, _: f"{report.num_loss_tokens:,}",
    "packing ms": lambda report, _: f"{1000 * report.packing_seconds:.1f}",
}
_EXPLANATION = """\
fill: slots of examples / capacity of the rows; logical: tokens of all examples; executed: slots computed, padding and
dummies included; sharing: logical / executed; imbalance: cost of the most loaded rank over the average rank's."""


def update_table(reports: Sequence[PackingReport], packed_sequence_length: int) -> str:
    """Return a table with a line for each update and one for all.

    Args:
        reports: A report per update.
        packed_sequence_length: Row capacity.
    """
    total = sum(reports, PackingReport())
    named = [*((str(update), report) for update, report in enumerate(reports)), ("all", total)]
    lines = [[name, *(show(report, packed_sequence_length) for show in _COLUMNS.values())] for name, report in named]
    return f"{_align(['update', *_COLUMNS], lines)}\n{_EXPLANATION}\n"


def example_table(examples: Sequence[CostlyExample], num_lines: int = _NUM_COSTLY_EXAMPLES) -> str:
    """Return a table of the most expensive examples, the costliest first.

    Args:
        examples: Every example of the updates.
        num_lines: Most examples to list.
    """
    total = sum(example.cost for example in examples)
    costliest = heapq.nlargest(num_lines, examples, key=lambda example: example.cost)
    lines = [
        [
            str(example.data_row),
            "-" if example.turn < 0 else str(example.turn),
            str(example.update),
            f"{example.num_tokens:,}",
            f"{example.num_own_slots:,}",
            f"{example.num_own_pairs:,}",
            f"{example.cost / total:.1%}" if total else "-",
        ]
        for example in costliest
    ]
    names = ["data row", "turn", "update", "tokens", "own slots", "own pairs", "cost"]
    return (
        f"The {len(lines)} most expensive of {len(examples):,} examples, by the slots that they share with no other\n"
        f"(pairs: what attention computes for those slots; cost: of the own slots of all examples)\n"
        f"{_align(names, lines)}\n"
    )


def _align(names: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return columns as wide as they need, to the right."""
    widths = [max(len(line[column]) for line in [names, *lines]) for column in range(len(names))]
    return "\n".join(
        "  ".join(word.rjust(width) for word, width in zip(line, widths, strict=True)) for line in [names, *lines]
    )


def _parse(argv: Sequence[str] | None) -> tuple[str, InspectOptions, dict[str, Any]]:
    """Return the data set's name, what to look at, and the options of MegaPackConfig."""
    packing_options = dataclasses.make_dataclass(
        "PackingOptions",
        [
            (field.name, field.type, dataclasses.field(default=field.default, metadata=field.metadata))
            for field in dataclasses.fields(MegaPackConfig)
            if field.name in _TRAINER_OPTIONS
        ],
        kw_only=True,
    )
    parser = HfArgumentParser(
        (InspectOptions, packing_options),
        prog="python -m hf_megapack.inspect",
        description="Pack a few updates exactly as the trainer would, and show what came of it.",
    )
    parser.add_argument("data", help="A .json, .jsonl or .parquet file, a folder of a saved data set, or a hub id.")
    options, packing, rest, unknown = parser.parse_args_into_dataclasses(argv, return_remaining_strings=True)
    if unknown:
        raise ConfigError(f"unknown options or values {' '.join(unknown)}; --help lists the options that there are")
    return rest.data, options, dataclasses.asdict(packing)


def _check(options: InspectOptions) -> None:
    if options.show < 0:
        raise ConfigError(f"show is {options.show}; it must be at least 0")
    for name in ("examples_per_update", "updates", "data_parallel_size", "picture_rows"):
        if getattr(options, name) < 1:
            raise ConfigError(f"{name} is {getattr(options, name)}; it must be at least 1")
    if options.picture is not None:
        check_picture_name(options.picture)


def _load_tokenizer(options: InspectOptions) -> PreTrainedTokenizerBase:
    try:
        tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
    except (OSError, ValueError) as error:
        raise ConfigError(f"tokenizer {options.tokenizer!r} cannot be loaded: {error}") from error
    if options.chat_template is not None:
        try:
            tokenizer.chat_template = Path(options.chat_template).read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"chat_template {options.chat_template!r} cannot be read: {error}") from error
    return tokenizer


def _build_loader(data: str, options: InspectOptions, packing: dict[str, Any]) -> DataLoader:
    """Return the trainer's loader for the data."""
    args = MegaPackConfig(
        **packing,
        use_cpu=True,
        dataloader_num_workers=0,
        train_sampling_strategy="random" if options.shuffle else "sequential",
        report_to="none",
    )
    tokenizer = _load_tokenizer(options)
    dataset = read_dataset(data, options.split)
    num_examples = options.examples_per_update * options.updates
    if not options.shuffle and not args.group_by_prefix and args.overlong == "error":
        # A row gives at least one example, so rows beyond these would be tokenized for nothing.
        dataset = dataset.select(range(min(num_examples, len(dataset))))
    prepared = prepare_on_rank_zero(dataset, tokenizer, args)
    return build_loader(
        prepared,
        build_collator(tokenizer, args, options.data_parallel_size, "tree"),
        args,
        update_size=options.examples_per_update,
        is_training=True,
    )


def inspect(argv: Sequence[str] | None) -> str:
    """Do what the command line says.

    Args:
        argv: Its words; None takes the process's own.

    Returns:
        The tables; the picture is written.

    Raises:
        ConfigError: If an argument is wrong.
        DataError: If the data cannot be read, rendered or packed.
    """
    data, options, packing = _parse(argv)
    _check(options)
    loader = _build_loader(data, options, packing)
    shown = show_examples(loader, _load_tokenizer(options), options.show) if options.show else None
    reports, examples = pack_updates(loader, options.updates)
    capacity = packing["packed_sequence_length"]
    order = f"the order of training with seed {packing['seed']}" if options.shuffle else "the order of the data"
    parts = [
        f"{data} in {order}, {options.examples_per_update} examples per update,\n"
        f"assistant_mask {packing['assistant_mask']}, {packing['packing_strategy']}, rows of up to {capacity:,} slots, "
        f"data-parallel size {options.data_parallel_size}\n",
        f"{describe_lengths(example_lengths(loader.dataset))}\n",
        update_table(reports, capacity),
        example_table(examples),
    ]
    if shown is not None:
        parts.insert(0, shown.text(colour=sys.stdout.isatty() and "NO_COLOR" not in os.environ))
    if options.picture is not None:
        figure = sum(reports, PackingReport()).plot(packed_sequence_length=capacity, max_rows=options.picture_rows)
        try:
            figure.savefig(options.picture)
        except (OSError, ValueError) as error:
            raise ConfigError(f"the picture {options.picture!r} cannot be written: {error}") from error
        parts.append(f"Picture: {options.picture}\n")
    return "\n".join(parts)


def main(argv: Sequence[str] | None = None) -> None:
    """Print the tables and write the picture.

    Args:
        argv: Words of the command line; None takes the process's own.

    Raises:
        SystemExit: If an argument or the data is wrong, with the reason.
    """
    try:
        sys.stdout.write(inspect(argv))
    except MegaPackError as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    main()
