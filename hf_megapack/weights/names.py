"""One table type that says where each Hugging Face weight lives in a Megatron-Core model.

A `WeightRule` names one Megatron-Core parameter, the Hugging Face tensors that make it up, and how: loading, LoRA and
export all read the same rules. The tables themselves are built per family in `hf_megapack.megatron.families`.
"""

from dataclasses import dataclass
from typing import Literal

Fusion = Literal["one", "stacked", "grouped_qkv"]
Role = Literal["linear", "experts", "router", "router_bias", "norm", "embedding", "head"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertTensors:
    """How a checkpoint may hold the weights of all experts of a layer: expert by expert, or fused.

    Attributes:
        num_experts: Experts of the layer, on all ranks.
        each: For each source of the rule the name of one expert's tensor, shape (out, in), with "{}" for its number.
        fused: Name of one tensor for all experts, shape (num_experts, out, in), the sources one after the other in out.
    """

    num_experts: int
    each: tuple[str, ...]
    fused: str

    def names(self) -> list[str]:
        """Return the names of every expert's tensors."""
        return [name.format(expert) for name in self.each for expert in range(self.num_experts)]


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightRule:
    """How one Megatron-Core parameter is made of Hugging Face tensors.

    Attributes:
        parameter: Name in a Megatron-Core GPTModel that holds all layers, counted from the first layer of the model.
        sources: Hugging Face tensor names, in the order in which they are fused. Those of "experts" have no number of
            an expert in them and stand for all; `experts` says what checkpoints call them.
        fusion: "one" copies a single source; "stacked" concatenates the sources' own shards along dimension 0 (gate and
            up); "grouped_qkv" interleaves query heads, key and value of each query group along dimension 0.
        shard_dim: Dimension that tensor parallelism splits, None for a replicated parameter.
        role: What the parameter does; LoRA adapts "linear" and "experts". The latter are stacked along a first
            dimension, which expert parallelism splits.
        alternatives: Other names that the only source has in some checkpoints.
        experts: What checkpoints call the tensors of "experts", None for every other role.
    """

    parameter: str
    sources: tuple[str, ...]
    fusion: Fusion = "one"
    shard_dim: int | None = None
    role: Role
    alternatives: tuple[str, ...] = ()
    experts: ExpertTensors | None = None

    def stored_names(self) -> list[str]:
        """Return every name under which a checkpoint may hold something of this parameter."""
        if self.experts is not None:
            return [self.experts.fused, *self.experts.names()]
        return [*self.sources, *self.alternatives]


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Which of equal parts of the weights a rank holds.

    Attributes:
        tensor_rank: Rank among those that split each matrix.
        tensor_size: Number of these.
        expert_rank: Rank among those that split the experts.
        expert_size: Number of these.
    """

    tensor_rank: int = 0
    tensor_size: int = 1
    expert_rank: int = 0
    expert_size: int = 1

    def of(self, rule: WeightRule) -> tuple[int, int]:
        """Return which part of a parameter this rank holds, and of how many."""
        if rule.role == "experts":
            return self.expert_rank, self.expert_size
        return self.tensor_rank, self.tensor_size


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadLayout:
    """Sizes of grouped-query attention, whole model.

    Attributes:
        num_heads: Query heads.
        num_groups: Key and value heads.
        head_dim: Size of one head.
    """

    num_heads: int
    num_groups: int
    head_dim: int


def module_of(tensor_name: str) -> str:
    """Return the module path of a parameter name.

    Args:
        tensor_name: Dotted name.

    Example:
        >>> module_of("model.layers.0.self_attn.q_proj.weight")
        'model.layers.0.self_attn.q_proj'
    """
    return tensor_name.rpartition(".")[0]
