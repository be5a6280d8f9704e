"""The rows that benchmarks/attention.py attends over."""

import argparse
from dataclasses import dataclass

import numpy as np
import stored_examples

from hf_megapack.batch import PackedRow
from hf_megapack.data.collator import PrefixTreeCollator

TURNS, CONVERSATIONS = 16, 4


@dataclass(frozen=True)
class Case:
    """One measurement.

    Attributes:
        row: "agent" for made-up conversations, "causal" for one sequence, "tau" for real conversations.
        num_slots: Slots at most.
        heads: Query heads, key and value heads, elements of each.
        window: Sliding window in positions, None for all.
    """

    row: str
    num_slots: int
    heads: tuple[int, int, int]
    window: int | None = None

    @property
    def name(self) -> str:
        """What the tables call it."""
        queries, keys, size = self.heads
        window = f", window {self.window}" if self.window else ""
        return f"{self.row} {self.num_slots // 1024}K, {queries}/{keys} x {size}{window}"


def cases(options: argparse.Namespace) -> list[Case]:
    """Return what is measured, what matters most first."""
    if options.shape == "tiny":
        return [Case("agent", 2048, (4, 2, 16)), Case("causal", 1024, (4, 2, 16), 100), Case("tau", 4096, (4, 2, 16))]
    usual = (32, 8, 128)
    chosen = [Case("agent", length, usual) for length in (32768, 16384, 65536)]
    chosen += [Case("tau", 32768, usual), Case("causal", 32768, usual), Case("agent", 32768, usual, 4096)]
    chosen += [Case("agent", 32768, (32, 8, 64)), Case("agent", 32768, (16, 4, 256))]
    if options.quick:
        chosen = chosen[:1]
    return [case for case in chosen if case.row != "tau" or options.examples_file is not None]


def made_up_examples(num_slots: int, generator: np.random.Generator) -> list[dict[str, np.ndarray]]:
    """Return the examples, one per turn, of conversations that fill a row when prefixes are shared."""
    system = num_slots // 16
    # A turn's answer stands in the row twice, as a leaf that is learned and before the next turn.
    answer = (num_slots - system) // (TURNS * CONVERSATIONS * 5)
    start, examples = generator.integers(2, 30000, system, dtype=np.int32), []
    for _ in range(CONVERSATIONS):
        turns = generator.integers(2, 30000, (TURNS, 4 * answer), dtype=np.int32)
        for turn in range(1, TURNS + 1):
            ids = np.concatenate([start, turns[:turn].ravel()])
            examples.append({"input_ids": ids, "loss_mask": np.arange(ids.size) >= ids.size - answer})
    return examples


def make_row(case: Case, options: argparse.Namespace) -> PackedRow:
    """Pack the row of a case."""
    generator = np.random.default_rng(0)
    if case.row == "causal":
        ids = generator.integers(2, 30000, case.num_slots, dtype=np.int32)
        examples = [{"input_ids": ids, "loss_mask": np.arange(ids.size) > ids.size // 2}]
    elif case.row == "agent":
        examples = made_up_examples(case.num_slots, generator)
    else:
        stored = stored_examples.load_examples(options.examples_file, case.row)[:128]
        kept = [e for e in stored if e.input_ids.size <= case.num_slots]
        examples = [{"input_ids": e.input_ids, "loss_mask": e.loss_mask} for e in kept]
    batch = PrefixTreeCollator(packed_sequence_length=case.num_slots)(examples)
    return max(batch.rows, key=lambda row: row.input_ids.size)


def count_pairs(row: PackedRow, window: int | None) -> int:
    """Return the pairs of slots that see each other: a slot sees its own path, itself included."""
    seen = row.position_ids.astype(np.int64) + 1
    return int((seen if window is None else np.minimum(seen, window)).sum())
