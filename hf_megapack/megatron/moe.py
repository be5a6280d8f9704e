"""Megatron-Core's mixture-of-experts layer with a router that never learns and experts of our own.

The router's weight, and the bias that some models add to its scores, are the base model's: nothing here or in
Megatron-Core changes them, and there is no option to. Router and bias are float32 whatever the model's dtype.
Auxiliary losses, noise and token dropping are off.
"""

import functools
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.transformer.moe.router import TopKRouter
from torch.nn.functional import linear

from hf_megapack.errors import ConfigError
from hf_megapack.megatron.experts import Experts
from hf_megapack.megatron.families import ExpertSettings
from hf_megapack.megatron.handoff import overlap_fields, shared_expert_spec
from hf_megapack.megatron.parallel import ParallelLayout

if TYPE_CHECKING:
    from hf_megapack.config import MegaPackConfig


class FrozenRouter(TopKRouter):
    """Megatron-Core's router without what would update its bias.

    Megatron-Core counts the tokens of each expert in training and moves the bias by these counts when it finalizes
    gradients, for frozen models too. Here nothing is counted: dummy rows, padding and recomputed layers cannot enter a
    count, and an update from no counts leaves the bias as it is even if something should call it.

    Source:
        `megatron.core.transformer.moe.router.TopKRouter`, 0.16.1 and 0.19.2;
        `megatron.core.distributed.finalize_model_grads._update_router_expert_bias`.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        # Every other kind keeps a count or, in 0.19, a bias of its own that training moves ("quantile_balancing").
        assert self.routing_type == "none", self.routing_type
        # Megatron-Core 0.19 leaves such routers out of its update; 0.16 has no such mark.
        self.frozen_expert_bias = True

    def gating(self, input_TBD: torch.Tensor) -> torch.Tensor:
        """Return the logits, float32 or wider, shape (T, B, num_experts)."""
        dtype = torch.promote_types(input_TBD.dtype, torch.float32)
        return linear(input_TBD.to(dtype), self.weight.to(dtype))

    def _apply_expert_bias(self, routing_map: torch.Tensor, padding_mask: torch.Tensor | None = None) -> None:
        """Count nothing."""


def keep_routers_wide(model: torch.nn.Module) -> None:
    """Turn the routers of a model back to float32 after it was cast, before weights are loaded."""
    for module in model.modules():
        if isinstance(module, FrozenRouter):
            module.float()


def put_in_experts(mlp: Any) -> None:
    """Put our router and experts into Megatron-Core's specification of a mixture-of-experts layer.

    Args:
        mlp: The `mlp` of a layer specification made for experts: a ModuleSpec in 0.16, a partial in 0.19.
    """
    submodules = mlp.keywords["submodules"] if isinstance(mlp, functools.partial) else mlp.submodules
    submodules.experts, submodules.router = Experts, FrozenRouter
    shared = submodules.shared_experts
    linears = shared.keywords["submodules"] if isinstance(shared, functools.partial) else shared.submodules
    # Its hand-offs between streams matter where it is overlapped; elsewhere nothing of it differs.
    submodules.shared_experts = shared_expert_spec(linears)


def expert_options(
    settings: ExpertSettings | None, layout: ParallelLayout, *, overlap_shared_expert: bool, dispatcher: str
) -> dict[str, Any]:
    """Return the fields of Megatron-Core's TransformerConfig that concern experts.

    Args:
        settings: The model's experts, None for a dense model.
        layout: Where this rank stands.
        overlap_shared_expert: Whether the shared expert runs on a stream of its own.
        dispatcher: MegaPackConfig's `moe_token_dispatcher_type`.

    Raises:
        ConfigError: If there is no shared expert to overlap, or it cannot be.
    """
    overlap = {}
    if overlap_shared_expert:
        overlap = overlap_fields(
            dispatcher=dispatcher,
            tensor_size=layout.tensor_size,
            has_shared_expert=settings is not None and settings.shared_size is not None,
        )
    if settings is None:
        return {}
    has_groups = settings.num_chosen_groups < settings.num_groups
    return {
        "num_moe_experts": settings.num_experts,
        "moe_layer_freq": [int(has_experts) for has_experts in settings.has_experts],
        "moe_ffn_hidden_size": settings.intermediate_size,
        "moe_shared_expert_intermediate_size": settings.shared_size,
        "moe_shared_expert_gate": settings.has_shared_gate,
        "moe_router_topk": settings.top_k,
        "moe_router_score_function": settings.score,
        # A softmax over the chosen logits is the softmax over all, normalised.
        "moe_router_pre_softmax": settings.score == "softmax" and not settings.is_normalised,
        "moe_router_topk_scaling_factor": settings.scaling,
        "moe_router_num_groups": settings.num_groups if has_groups else None,
        "moe_router_group_topk": settings.num_chosen_groups if has_groups else None,
        "moe_router_dtype": "fp32",
        "moe_router_enable_expert_bias": settings.has_bias,
        "moe_router_bias_update_rate": 0.0,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "expert_model_parallel_size": layout.expert_size,
        "expert_tensor_parallel_size": 1,
        **overlap,
    }


def check_experts(settings: ExpertSettings | None, args: "MegaPackConfig") -> None:
    """Refuse layouts and number formats in which experts could not be trained exactly.

    Args:
        settings: The model's experts, None for a dense model.
        args: The training arguments.

    Raises:
        ConfigError: Naming the argument.
    """
    size = args.expert_parallel_size
    if settings is None:
        if size > 1:
            raise ConfigError(f"expert_parallel_size={size}, but the model has no experts. Leave it out.")
        return
    if settings.num_experts % size:
        raise ConfigError(f"The model's {settings.num_experts} experts do not divide by expert_parallel_size={size}.")
    if args.tensor_parallel_size > 1 and not args.sequence_parallel:
        raise ConfigError(
            f"tensor_parallel_size={args.tensor_parallel_size} without sequence_parallel would send every token to its "
            "experts once from each rank. Set sequence_parallel=True, or tensor_parallel_size=1."
        )
    if args.fp8 is not None:
        raise ConfigError(f"fp8={args.fp8!r} is not supported for models with experts. Leave fp8 out.")
