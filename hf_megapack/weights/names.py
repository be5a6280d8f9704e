"""One table type that says where each Hugging Face weight lives in a Megatron-Core model.

A `WeightRule` names one Megatron-Core parameter, the Hugging Face tensors that make it up, and how: loading, LoRA and
export all read the same rules. The tables themselves are built per family in `hf_megapack.megatron.families`.
"""

from dataclasses import dataclass
from typing import Literal

Fusion = Literal["one", "stacked", "grouped_qkv"]
Role = Literal["linear", "norm", "embedding", "head"]


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightRule:
    """How one Megatron-Core parameter is made of Hugging Face tensors.

    Attributes:
        parameter: Name in a Megatron-Core GPTModel that holds all layers, counted from the first layer of the model.
        sources: Hugging Face tensor names, in the order in which they are fused.
        fusion: "one" copies a single source; "stacked" concatenates the sources' own shards along dimension 0 (gate and
            up); "grouped_qkv" interleaves query heads, key and value of each query group along dimension 0.
        shard_dim: Dimension that tensor parallelism splits, None for a replicated parameter.
        role: What the parameter does; LoRA adapts only "linear".
    """

    parameter: str
    sources: tuple[str, ...]
    fusion: Fusion = "one"
    shard_dim: int | None = None
    role: Role


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
