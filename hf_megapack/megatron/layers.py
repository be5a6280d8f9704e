"""What stands in Megatron-Core's layer spec: our norms, attention and MLP around its linears.

Megatron-Core's own attention and MLP serve inference, other activations and other position embeddings as well; these
hold only what training a frozen decoder on packed rows needs, so every tensor that the backward pass keeps is in view.
"""

import functools

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

from hf_megapack.kernels.pointwise import HeadNorm, norm_and_residual, split_heads, swiglu
from hf_megapack.megatron.attention import TreeAttention, TreeParams
from hf_megapack.megatron.families import DenseFamily, ExpertSettings
from hf_megapack.megatron.gather import GatheringLayer
from hf_megapack.megatron.lora_products import Origin, keep_origin
from hf_megapack.megatron.moe import put_in_experts
from hf_megapack.megatron.shared_heads import split_and_fetch_heads

# From 0.17 on Megatron-Core's layers read the residual stream on where their norms hand it to them.
_NORMS_RETURN_RESIDUAL = "fused_residual_rmsnorm" in TransformerConfig.__dataclass_fields__


class FrozenRMSNorm(torch.nn.RMSNorm):
    """An RMS norm with Megatron-Core's constructor.

    With sequence parallelism each rank normalises its own slots, which is exact; only a trainable weight would need its
    gradient summed, so Megatron-Core's own wrapper refuses.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_unused):
        super().__init__(hidden_size, eps=eps)


class ResidualRMSNorm(FrozenRMSNorm):
    """The norm of a layer's residual stream, before its attention or its MLP.

    Attributes:
        is_recomputed: Whether the backward pass of what reads the result makes it again instead of keeping it.
    """

    is_recomputed = False

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | torch.Tensor:
        """Normalise over the last dimension.

        Args:
            hidden: The residual stream, shape (T, 1, D).

        Returns:
            The result and the stream, or the result alone where Megatron-Core's layer takes no more.
        """
        output, residual = self._outputs(hidden)
        if self.is_recomputed:
            output = keep_origin(output, Origin(lambda kept: self._outputs(kept)[0], hidden))
        return output if residual is None else (output, residual)

    def _outputs(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        if _NORMS_RETURN_RESIDUAL:
            return norm_and_residual(hidden, self.weight, self.eps)
        return super().forward(hidden), None


class TreeSelfAttention(SelfAttention):
    """Megatron-Core's self-attention with heads split, normalised and rotated in one pass."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        rotary_pos_emb: torch.Tensor,
        packed_seq_params: TreeParams,
        **_unused: object,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend within one row.

        Args:
            hidden_states: Normalised, shape (T, 1, D); this rank's slots where sequences are split.
            attention_mask: Unused; the row's tree is in `packed_seq_params`.
            rotary_pos_emb: From `rotary.rotation`.
            packed_seq_params: The row.
            **_unused: What Megatron-Core passes besides, for inference.

        Returns:
            Output of shape (T, 1, D), and the bias that the output projection leaves to the caller.
        """
        mixed, _ = self.linear_qkv(hidden_states)
        norm = None
        if self.config.qk_layernorm:
            norm = HeadNorm(self.q_layernorm.weight, self.k_layernorm.weight, self.config.layernorm_epsilon)
        heads = (mixed.squeeze(1), rotary_pos_emb, norm)
        sizes = {
            "num_groups": self.num_query_groups_per_partition,
            "head_dim": self.hidden_size_per_attention_head,
        }
        if packed_seq_params.is_fetched(mixed.device):
            query_THD, key_TGD, value_TGD = split_and_fetch_heads(*heads, packed_seq_params.share, **sizes)
        else:
            query_THD, key_TGD, value_TGD = split_heads(*heads, **sizes)
        output = self.core_attention(query_THD, key_TGD, value_TGD, packed_seq_params)
        return self.linear_proj(output.unsqueeze(1))


class TreeMLP(MLP):
    """Megatron-Core's MLP with SwiGLU in one pass.

    Attributes:
        is_recomputed: Whether the backward pass makes the activation again instead of keeping it.
    """

    is_recomputed = False

    def forward(self, hidden_states: torch.Tensor, **_unused: object) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the MLP's output and the bias that its last linear leaves to the caller.

        Args:
            hidden_states: Normalised, shape (T, 1, D).
            **_unused: What Megatron-Core passes besides, for inference.
        """
        gate_up, bias = self.linear_fc1(hidden_states)
        if bias is not None:
            gate_up = gate_up + bias
        activation = swiglu(gate_up)
        return self.linear_fc2(keep_origin(activation, Origin(swiglu, gate_up)) if self.is_recomputed else activation)


def layer_spec(
    family: DenseFamily, *, fp8: bool, experts: ExpertSettings | None = None, gathers_slots: bool = False
) -> ModuleSpec:
    """Return the spec of one layer.

    Args:
        family: The model's family.
        fp8: Whether linears are Transformer Engine's, which have FP8 products. Otherwise they are Megatron-Core's own:
            with frozen weights both compute the same two products, and `LoraLinear` joins its own to the latter.
        experts: The experts of the layer, None for a dense one.
        gathers_slots: Whether ranks that share experts gather each other's slots.
    """
    num_experts = None if experts is None else experts.num_experts
    spec = get_gpt_layer_local_spec(num_experts, qk_layernorm=family.has_qk_norm, normalization="RMSNorm")
    layer, column, row = spec.submodules, ColumnParallelLinear, RowParallelLinear
    if fp8:
        from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TERowParallelLinear

        column, row = TEColumnParallelLinear, TERowParallelLinear
    layer.input_layernorm = layer.pre_mlp_layernorm = ResidualRMSNorm
    layer.self_attention.module = TreeSelfAttention
    attention = layer.self_attention.submodules
    attention.linear_qkv, attention.core_attention, attention.linear_proj = column, TreeAttention, row
    if family.has_qk_norm:
        attention.q_layernorm = attention.k_layernorm = FrozenRMSNorm
    if experts is None:
        layer.mlp = _mlp_spec(MLPSubmodules(linear_fc1=column, linear_fc2=row))
    else:
        put_in_experts(layer.mlp)
        if gathers_slots:
            spec.module = GatheringLayer
    return spec


def _mlp_spec(submodules: MLPSubmodules) -> ModuleSpec | functools.partial:
    # megatron-core 0.19 builds an MLP by a class method, 0.16 by the spec alone; one is left when 0.16 is dropped.
    build = getattr(TreeMLP, "as_mlp_submodule", None)
    return functools.partial(build, submodules=submodules) if build else ModuleSpec(TreeMLP, submodules=submodules)
