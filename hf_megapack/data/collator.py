"""Tokenized examples of one update to one `PackedBatch`: the DataLoader's `collate_fn`.

Whatever the number of rows, what goes in is one optimizer update and so is what comes out.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hf_megapack.batch import PackedBatch
from hf_megapack.errors import ConfigError, DataError
from hf_megapack.packing import (
    NO_ALIGNMENT,
    PACKING_STRATEGIES,
    Alignment,
    RankLayout,
    gather_examples,
    lay_out_row,
    plan_update,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefixTreeCollator:
    """Packs the examples of one update into rows and deals the rows to data-parallel ranks.

    Attributes:
        packed_sequence_length: Slots that one row may hold; rows keep their natural length.
        packing_strategy: "prefix_tree" shares common prefixes; "ffd", "mffd" and "balanced" pack whole examples.
        min_shared_tokens: Tokens below which a common run is repeated instead of shared.
        share_supervised: Also share slots that are learned, where prefix and label agree; `loss_weights` counts the
            examples.
        alignment: The two multiples of a row.
        data_parallel_size: Ranks that the rows are dealt to.
        pipeline_parallel_size: Pipeline stages.
        virtual_pipeline_parallel_size: Model chunks per stage.
        pad_token_id: Token of the slots that belong to no example.

    Raises:
        ConfigError: If a size is below 1, the strategy is unknown, or prefixes would be shared between sequences that
            must each be aligned.
    """

    packed_sequence_length: int
    packing_strategy: str = "prefix_tree"
    min_shared_tokens: int = 64
    share_supervised: bool = False
    alignment: Alignment = NO_ALIGNMENT
    data_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    virtual_pipeline_parallel_size: int = 1
    pad_token_id: int = 0

    def __post_init__(self) -> None:
        for name in ("packed_sequence_length", "min_shared_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.packing_strategy not in PACKING_STRATEGIES:
            raise ConfigError(f"packing_strategy is {self.packing_strategy!r}; it must be one of {PACKING_STRATEGIES}")
        if self.share_supervised and self.packing_strategy != "prefix_tree":
            raise ConfigError(
                f'share_supervised=True shares prefixes, packing_strategy "{self.packing_strategy}" does not; '
                'use "prefix_tree"'
            )
        if self.packing_strategy == "prefix_tree" and self.alignment.sequence_multiple > 1:
            raise ConfigError(
                f"sequence_multiple is {self.alignment.sequence_multiple}, but a shared prefix cannot be padded for "
                'each example; use 1 (attention="tree") or packing_strategy "ffd", "mffd" or "balanced"'
            )

        self._ranks()

    def _ranks(self) -> RankLayout:
        return RankLayout(
            data_parallel_size=self.data_parallel_size,
            pipeline_parallel_size=self.pipeline_parallel_size,
            virtual_pipeline_parallel_size=self.virtual_pipeline_parallel_size,
        )

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> PackedBatch:
        """Pack one update.

        Args:
            examples: Tokenized examples, each with `input_ids` and `loss_mask` (unshifted).

        Returns:
            The update, complete: each example in exactly one row.

        Raises:
            DataError: If an example is malformed or longer than a row, or no token of the update is loss-bearing.
        """
        started = time.perf_counter()
        gathered = gather_examples(examples, share_supervised=self.share_supervised)
        num_loss_tokens = int(gathered.is_learned.sum())
        if num_loss_tokens == 0:
            raise DataError(
                f"no token of this update's {len(examples)} examples is loss-bearing, so it would learn nothing; "
                "check assistant_mask and overlong, which decide what the loss mask keeps"
            )
        plan = plan_update(
            gathered,
            strategy=self.packing_strategy,
            packed_sequence_length=self.packed_sequence_length,
            min_shared_tokens=self.min_shared_tokens,
            alignment=self.alignment,
            ranks=self._ranks(),
        )
        rows = tuple(lay_out_row(gathered, forest, self.alignment, self.pad_token_id) for forest in plan.rows)
        return PackedBatch(
            rows=rows,
            schedule=plan.schedule,
            num_examples=len(examples),
            num_logical_tokens=int(gathered.lengths.sum()),
            num_loss_tokens=sum(int(row.loss_weights.sum()) for row in rows),
            packing_seconds=time.perf_counter() - started,
        )
