"""Which activations of a row are kept for its backward pass, and which are computed again.

Three degrees for each layer: keep everything; keep everything but the norms' and the activation's results, which cost
no matrix product to compute again ("selective"); keep only the layer's input ("full"). "auto" takes for every row the
cheapest mixture that fits into the memory that is free.
"""

import logging
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

from hf_megapack.megatron.host import compute_device, has_gpu
from hf_megapack.megatron.parallel import ParallelLayout

logger = logging.getLogger(__name__)

# Of the free memory, what activations may take: the rest is for what a layer needs while it runs, for the loss and for
# gaps between blocks.
USABLE_SHARE = 0.85


class Choice(NamedTuple):
    """What the layers of one chunk recompute.

    Attributes:
        num_full: Layers, counted from the first, that keep only their input.
        is_selective: Whether the others drop norms and activations.
    """

    num_full: int
    is_selective: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerMemory:
    """Bytes per slot that one layer keeps for its backward pass.

    Attributes:
        kept: When nothing is recomputed.
        selective: Without norms and activations.
        full: Its input alone.
        transient: What a layer needs besides while its backward pass runs.
    """

    kept: int
    selective: int
    full: int
    transient: int

    @classmethod
    def of(cls, config: TransformerConfig) -> "LayerMemory":
        """Count the tensors of one layer on one rank; of a model with layers of two kinds, their mean.

        Args:
            config: The model's configuration.
        """
        size, split = torch.finfo(config.params_dtype).bits // 8, config.tensor_model_parallel_size
        # With sequence parallelism each rank keeps its own slots of what is not split by features.
        hidden = config.hidden_size / (split if config.sequence_parallel else 1)
        heads = config.num_attention_heads * config.kv_channels / split
        groups = config.num_query_groups * config.kv_channels / split
        mlp = _mlp_memory(config)
        # What the ranks sum is in float32, before and after.
        summed = 4 * config.hidden_size if split > 1 else 0
        # Two residuals, fused projection, rotated heads, attention's output; norms.
        base = 2 * hidden + 2 * (heads + 2 * groups) + heads + mlp.selective
        kept = base + 2 * hidden + mlp.kept - mlp.selective
        return cls(
            kept=int(size * kept),
            selective=int(size * base),
            full=int(size * hidden),
            transient=int(size * (kept + mlp.transient + summed)),
        )


class _MlpMemory(NamedTuple):
    """Elements per slot, as in `LayerMemory`."""

    kept: float
    selective: float
    transient: float


def _mlp_memory(config: TransformerConfig) -> _MlpMemory:
    ffn = config.ffn_hidden_size / config.tensor_model_parallel_size
    # Gate and up, activation.
    dense = _MlpMemory(kept=3 * ffn, selective=2 * ffn, transient=4 * ffn)
    if config.num_moe_experts is None:
        return dense
    # Each slot is so many rows; where the ranks of a tensor group hold parts of a row, these send their own.
    split, ranks = config.tensor_model_parallel_size, config.expert_model_parallel_size
    copies, inner = config.moe_router_topk / split, config.moe_ffn_hidden_size
    hidden, shared = config.hidden_size, (config.moe_shared_expert_intermediate_size or 0) / split
    # What came from other ranks is kept, rows or the slots that they are made from: else it would be sent again.
    came = (min(ranks / split, copies) if config.gathers_slots else copies) if ranks > 1 else 0
    # Gathered slots, and the sums for them in float32: those that leave and those that come.
    gathered = 5 * ranks / split if config.gathers_slots else 0
    sparse = _MlpMemory(
        kept=copies * (hidden + 3 * inner) + 3 * shared,
        selective=came * hidden + copies * 2 * inner + 3 * shared,
        transient=copies * (3 * hidden + 4 * inner) + gathered * hidden + 4 * shared,
    )
    share = sum(config.moe_layer_freq) / len(config.moe_layer_freq)
    mixed = [share * a + (1 - share) * b for a, b in zip(sparse, dense, strict=True)]
    return _MlpMemory(*mixed[:2], transient=max(sparse.transient, dense.transient))


def choose(
    memory: LayerMemory, *, num_slots: int, num_layers: int, budget: float, may_be_selective: bool = True
) -> Choice:
    """Return the cheapest choice whose activations fit.

    Args:
        memory: Of one layer.
        num_slots: Slots of the row on this rank.
        num_layers: Layers of one chunk.
        budget: Bytes for the activations of one chunk.
        may_be_selective: Whether layers can drop norms and activations alone.

    Returns:
        The choice; "full" in every layer if nothing fits, which then may run out of memory.

    Example:
        >>> layer = LayerMemory(kept=100, selective=60, full=10, transient=150)
        >>> [tuple(choose(layer, num_slots=1, num_layers=4, budget=b)) for b in (600, 400, 300, 150)]
        [(0, False), (0, True), (2, True), (4, True)]
    """
    left = budget - num_slots * memory.transient
    if num_layers * num_slots * memory.kept <= left:
        return Choice(0, False)
    others = memory.selective if may_be_selective else memory.kept
    for num_full in range(num_layers + 1):
        if num_slots * (num_full * memory.full + (num_layers - num_full) * others) <= left:
            return Choice(num_full, may_be_selective)
    return Choice(num_layers, may_be_selective)


class RecomputePolicy:
    """Sets before each row what its layers recompute.

    Args:
        mode: MegaPackConfig's `recompute`.
        config: The model's configuration.
        layout: Where this rank stands.
        is_compiled: Whether torch.compile has the layers, which then keep all or only their input.
    """

    def __init__(self, mode: str, config: TransformerConfig, layout: ParallelLayout, *, is_compiled: bool = False):
        self._mode = mode
        self._may_be_selective = not is_compiled
        self._memory = LayerMemory.of(config)
        self._layout = layout
        self._budget = float("inf")
        self._longest = 0
        self._told: set[Choice] = set()

    def begin_update(self, longest: int) -> None:
        """Measure the memory that is free before an update's first row. A collective where there are several ranks.

        Args:
            longest: Slots of the update's longest row.
        """
        self._longest = longest // self._layout.context_size
        if self._mode != "auto" or not has_gpu():
            return
        device = compute_device()
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        free = torch.tensor(torch.cuda.mem_get_info(device)[0] + cached, dtype=torch.float64, device=device)
        if self._layout.world_size > 1:
            # Ranks that share a layer must recompute it together.
            dist.all_reduce(free, dist.ReduceOp.MIN)
        # A pipeline holds several rows between their forward and backward passes, interleaved ones some more.
        rows = self._layout.pipeline_size
        in_flight = rows if self._layout.num_chunks == 1 else rows * (self._layout.num_chunks + 1)
        self._budget = float(free) * USABLE_SHARE / in_flight

    def apply(self, chunk: GPTModel, num_slots: int) -> Choice:
        """Set what a chunk's layers recompute for the next row.

        Args:
            chunk: The chunk.
            num_slots: Slots of the row on this rank.

        Returns:
            What was set.
        """
        layers = chunk.decoder.layers
        if self._layout.expert_size > 1:
            # Ranks that run different rows share their experts, and send to each other again what they recompute.
            num_slots = self._longest
        choice = self._choose(num_slots, len(layers))
        if chunk.config.recompute_granularity == "full":
            chunk.config.recompute_num_layers = choice.num_full
        for index, layer in enumerate(layers):
            for part in (layer.input_layernorm, layer.pre_mlp_layernorm, getattr(layer.mlp, "experts", layer.mlp)):
                part.is_recomputed = choice.is_selective and index >= choice.num_full
        if self._mode == "auto" and choice not in self._told and self._layout.rank == 0:
            self._told.add(choice)
            if choice != Choice(0, False):
                others = "their norms and activation functions" if choice.is_selective else "nothing"
                logger.warning(
                    f"recompute='auto': for a row of {num_slots} slots {choice.num_full} of {len(layers)} layers "
                    f"compute all their activations again, the others {others}; the activations may take "
                    f"{self._budget / 2**30:.1f} GiB."
                )
        return choice

    def _choose(self, num_slots: int, num_layers: int) -> Choice:
        if self._mode == "full":
            return Choice(num_layers, False)
        if self._mode == "selective":
            return Choice(0, True)
        if self._mode == "off" or self._budget == float("inf"):
            return Choice(0, False)
        return choose(
            self._memory,
            num_slots=num_slots,
            num_layers=num_layers,
            budget=self._budget,
            may_be_selective=self._may_be_selective,
        )
