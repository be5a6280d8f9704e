"""The rows that benchmarks/attention.py attends over."""

import argparse
from dataclasses import dataclass

import numpy as np
import stored_examples

from hf_megapack.batch import PackedRow
from hf_megapack.data.collator import PrefixTreeCollator

TURNS, CONVERSATIONS = 16, 4
ROWS = ("agent", "causal", "tau", "flat")
# Rows that share nothing.
FLAT_ROWS = ("causal", "flat")
NUM_FLAT_EXAMPLES = 256


@dataclass(frozen=True)
class Case:
    """One measurement.

    Attributes:
        row: "agent" for made-up conversations, "causal" for one sequence, "tau" for real conversations, "flat" for
            whole examples side by side, real ones of short chats or of 100 to 1,000 random tokens.
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
        heads = (4, 2, 16)
        tiny = [Case("agent", 2048, heads), Case("flat", 2048, heads), Case("causal", 1024, heads, 100)]
        return [case for case in [*tiny, Case("tau", 4096, heads)] if _is_wanted(case, options)]
    usual = (32, 8, 128)
    chosen = [Case("agent", length, usual) for length in (32768, 16384, 65536)]
    chosen += [Case("tau", 32768, usual), Case("causal", 32768, usual), Case("agent", 32768, usual, 4096)]
    chosen += [Case("agent", 32768, (32, 8, 64)), Case("agent", 32768, (16, 4, 256))]
    chosen += [Case("flat", 16384, usual), Case("flat", 32768, usual), Case("flat", 16384, usual, 512)]
    chosen += [Case("flat", 16384, (32, 8, 64)), Case("flat", 16384, (16, 4, 256))]
    wanted = [case for case in chosen if _is_wanted(case, options)]
    return wanted[:1] if options.quick else wanted


def _is_wanted(case: Case, options: argparse.Namespace) -> bool:
    return case.row in options.rows and (case.row != "tau" or options.examples_file is not None)


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


def flat_examples(num_slots: int, generator: np.random.Generator, options: argparse.Namespace) -> list[dict]:
    """Return examples for a row without shared prefixes, more than it holds if they are real."""
    if options.examples_file is not None:
        stored = stored_examples.load_examples(options.examples_file, "mtbench")
        kept = [e for e in stored if e.input_ids.size <= num_slots]
        chosen = (kept[index] for index in generator.permutation(len(kept))[:NUM_FLAT_EXAMPLES])
        return [{"input_ids": e.input_ids, "loss_mask": e.loss_mask} for e in chosen]
    examples, left = [], num_slots
    while left:
        size = min(int(generator.integers(100, 1001)), left)
        # A single token would have nothing to learn.
        size = left if left - size == 1 else size
        ids = generator.integers(2, 30000, size, dtype=np.int32)
        examples.append({"input_ids": ids, "loss_mask": np.arange(size) > size // 2})
        left -= size
    return examples


def make_row(case: Case, options: argparse.Namespace) -> PackedRow:
    """Pack the row of a case."""
    generator, strategy = np.random.default_rng(0), "prefix_tree"
    if case.row == "causal":
        ids = generator.integers(2, 30000, case.num_slots, dtype=np.int32)
        examples = [{"input_ids": ids, "loss_mask": np.arange(ids.size) > ids.size // 2}]
    elif case.row == "agent":
        examples = made_up_examples(case.num_slots, generator)
    elif case.row == "flat":
        examples, strategy = flat_examples(case.num_slots, generator, options), "ffd"
    else:
        stored = stored_examples.load_examples(options.examples_file, case.row)[:128]
        kept = [e for e in stored if e.input_ids.size <= case.num_slots]
        examples = [{"input_ids": e.input_ids, "loss_mask": e.loss_mask} for e in kept]
    batch = PrefixTreeCollator(packed_sequence_length=case.num_slots, packing_strategy=strategy)(examples)
    return max(batch.rows, key=lambda row: row.input_ids.size)


def count_pairs(row: PackedRow, window: int | None) -> int:
    """Return the pairs of slots that see each other: a slot sees its own path, itself included."""
    seen = row.position_ids.astype(np.int64) + 1
    return int((seen if window is None else np.minimum(seen, window)).sum())
