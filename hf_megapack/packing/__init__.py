"""Examples to rows: prefix forest, bins, layout and schedule, in numpy alone.

Every token of every example has its slot in one row, shared or not; every loss-bearing token is learned exactly as
often as it occurs; nothing is truncated, dropped or moved to another update. This room knows no model and no trainer.
"""

from hf_megapack.packing.alignment import NO_ALIGNMENT, Alignment
from hf_megapack.packing.bins import PACKING_STRATEGIES, adjust_bin_count, pack_sequences
from hf_megapack.packing.context import RowSplit, moves_to_even, sequence_boundaries, split_row, split_sequences
from hf_megapack.packing.examples import ExampleSet, gather_examples
from hf_megapack.packing.grouping import PrefixOrder, order_by_prefix, prefix_families, shuffle_by_prefix
from hf_megapack.packing.plan import UpdatePlan, plan_update
from hf_megapack.packing.report import ExampleCosts, PackingReport, estimate_sharing
from hf_megapack.packing.rows import lay_out_row, num_visible_pairs
from hf_megapack.packing.schedule import RankLayout, schedule_rows, slots_cost
from hf_megapack.packing.tree import Forest, build_forest

__all__ = [
    "NO_ALIGNMENT",
    "PACKING_STRATEGIES",
    "Alignment",
    "ExampleCosts",
    "ExampleSet",
    "Forest",
    "PackingReport",
    "PrefixOrder",
    "RankLayout",
    "RowSplit",
    "UpdatePlan",
    "adjust_bin_count",
    "build_forest",
    "estimate_sharing",
    "gather_examples",
    "lay_out_row",
    "moves_to_even",
    "num_visible_pairs",
    "order_by_prefix",
    "pack_sequences",
    "plan_update",
    "prefix_families",
    "schedule_rows",
    "sequence_boundaries",
    "shuffle_by_prefix",
    "slots_cost",
    "split_row",
    "split_sequences",
]
