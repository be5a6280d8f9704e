"""What the families with a mixture of experts have in common: which layers have experts, and who chooses them.

Experts have one linear name per layer and projection, transformers' module path without the number of an expert:
"model.layers.0.mlp.experts.gate_proj" stands for that projection of every expert of the layer.
"""

import dataclasses
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from transformers import PretrainedConfig

from hf_megapack.errors import ConfigError
from hf_megapack.megatron.families.dense import DenseFamily, gated_mlp_rules
from hf_megapack.weights.names import ExpertTensors, WeightRule

# transformers scores a group of experts by its best two; Megatron-Core by its best (top_k // num_chosen_groups).
_SCORES_PER_GROUP = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertSettings:
    """How many experts a model has, and how tokens choose among them.

    Attributes:
        num_experts: Experts of a layer.
        top_k: Experts that one token passes through.
        intermediate_size: Inner size of one expert.
        has_experts: For each layer, whether it has experts rather than one dense MLP.
        score: What makes scores of the router's logits.
        is_normalised: Whether the chosen scores are divided by their sum.
        scaling: Factor on the scores.
        num_groups: Groups of experts of which only some are looked at; 1 for all.
        num_chosen_groups: How many of them.
        has_bias: Whether a bias is added to the scores for choosing, and for nothing else.
        shared_size: Inner size of the expert that every token passes through, None where there is none.
        has_shared_gate: Whether its output is weighted by a sigmoid of its own.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    has_experts: tuple[bool, ...]
    score: Literal["softmax", "sigmoid"] = "softmax"
    is_normalised: bool = True
    scaling: float | None = None
    num_groups: int = 1
    num_chosen_groups: int = 1
    has_bias: bool = False
    shared_size: int | None = None
    has_shared_gate: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class MoeFamily(DenseFamily):
    """What differs between the families with experts.

    Attributes:
        settings: The experts of a configuration.
        wants_qk_norm: Whether a configuration normalises queries and keys, None where the family decides.
        shared_name: The shared expert's module in transformers.
        old_block: Name that older checkpoints give to a layer's `mlp`, None for the same.
        old_projections: Their names of gate_proj, up_proj and down_proj of one expert.
        num_extra_layers: Layers for multi-token prediction that a checkpoint may hold after the model's own.
    """

    settings: Callable[[PretrainedConfig], ExpertSettings]
    wants_qk_norm: Callable[[PretrainedConfig], bool] | None = None
    shared_name: str = "shared_expert"
    old_block: str | None = None
    old_projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    num_extra_layers: Callable[[PretrainedConfig], int] = lambda config: 0

    def resolved(self, config: PretrainedConfig) -> "MoeFamily":
        """Return the family with whatever a configuration decides about it."""
        if self.wants_qk_norm is None:
            return self
        return dataclasses.replace(self, has_qk_norm=self.wants_qk_norm(config))

    def experts(self, config: PretrainedConfig) -> ExpertSettings | None:
        """Return how the model's experts are chosen, None if every layer is dense."""
        settings = self.settings(config)
        return settings if any(settings.has_experts) else None

    def split_sizes(self, config: PretrainedConfig) -> dict[str, int]:
        """Return the sizes that tensor parallelism splits; experts are never split."""
        sizes, settings = DenseFamily.split_sizes(self, config), self.settings(config)
        if all(settings.has_experts):
            del sizes["intermediate_size"]
        if settings.shared_size is not None:
            sizes["intermediate size of the shared expert"] = settings.shared_size
        return sizes

    def is_unread(self, config: PretrainedConfig, name: str) -> bool:
        """Return whether a checkpoint may hold a weight that no rule reads, multi-token prediction for one."""
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        first, extra = config.num_hidden_layers, self.num_extra_layers(config)
        is_extra = layer is not None and first <= int(layer[1]) < first + extra
        return is_extra or DenseFamily.is_unread(self, config, name)

    def check(self, config: PretrainedConfig) -> None:
        """Refuse what would not compute the same model.

        Args:
            config: transformers configuration.

        Raises:
            ConfigError: As for a dense family, and for a router whose choice or weights Megatron-Core would not
                reproduce, that is noisy, or that comes with a loss of its own.
        """
        DenseFamily.check(self, config)
        settings = self.settings(config)
        if getattr(config, "router_jitter_noise", 0.0):
            raise ConfigError(
                f"router_jitter_noise={config.router_jitter_noise} in the model's config. A shared prefix is computed "
                "once, so its noise could not differ between examples. Set router_jitter_noise to 0."
            )
        if getattr(config, "output_router_logits", False):
            raise ConfigError(
                "output_router_logits=True in the model's config asks for an auxiliary loss of the router, which is "
                "not computed: the router is frozen. Set output_router_logits to False."
            )
        if not 1 <= settings.top_k <= settings.num_experts:
            raise ConfigError(
                f"num_experts_per_tok={settings.top_k} of {settings.num_experts} experts in the model's config."
            )
        if settings.top_k == 1 and settings.is_normalised:
            raise ConfigError(
                "num_experts_per_tok=1 with normalised scores (norm_topk_prob=True) gives every expert the weight 1, "
                "which Megatron-Core does not reproduce."
            )
        if settings.shared_size == 0:
            raise ConfigError(
                "shared_expert_intermediate_size=0 in the model's config gives its shared expert no weights, which "
                "Megatron-Core does not build."
            )
        if settings.scaling == 0:
            raise ConfigError(
                "routed_scaling_factor=0 in the model's config silences its experts, which Megatron-Core does not "
                "reproduce."
            )
        if settings.score == "sigmoid" and not settings.is_normalised:
            raise ConfigError(
                "norm_topk_prob=False with sigmoid scores is not supported: Megatron-Core always normalises them."
            )
        _check_groups(settings)

    def mlp_rules(self, config: PretrainedConfig, layer: int) -> Iterator[WeightRule]:
        """Return the rules of a layer's MLP, or of its router and experts.

        Args:
            config: transformers configuration.
            layer: Counted from the first layer of the model.
        """
        settings = self.settings(config)
        if not settings.has_experts[layer]:
            yield from DenseFamily.mlp_rules(self, config, layer)
            return
        ours, theirs = f"decoder.layers.{layer}.mlp", f"model.layers.{layer}.mlp"
        old = f"model.layers.{layer}.{self.old_block}" if self.old_block else theirs
        yield WeightRule(
            parameter=f"{ours}.router.weight",
            sources=(f"{theirs}.gate.weight",),
            alternatives=(f"{old}.gate.weight",) if self.old_block else (),
            role="router",
        )
        if settings.has_bias:
            source = f"{theirs}.gate.e_score_correction_bias"
            yield WeightRule(parameter=f"{ours}.router.expert_bias", sources=(source,), role="router_bias")
        gate, up, down = (f"{old}.experts.{{}}.{name}.weight" for name in self.old_projections)
        for name, sources, each, fused in (
            ("fc1", ("gate_proj", "up_proj"), (gate, up), "gate_up_proj"),
            ("fc2", ("down_proj",), (down,), "down_proj"),
        ):
            yield WeightRule(
                parameter=f"{ours}.experts.{name}",
                sources=tuple(f"{theirs}.experts.{source}.weight" for source in sources),
                fusion="stacked",
                role="experts",
                experts=ExpertTensors(num_experts=settings.num_experts, each=each, fused=f"{theirs}.experts.{fused}"),
            )
        if settings.shared_size is not None:
            yield from gated_mlp_rules(f"{ours}.shared_experts", f"{theirs}.{self.shared_name}")
        if settings.has_shared_gate:
            source = f"{theirs}.{self.shared_name}_gate.weight"
            yield WeightRule(parameter=f"{ours}.shared_experts.gate_weight", sources=(source,), role="router")


def _check_groups(settings: ExpertSettings) -> None:
    groups, chosen = settings.num_groups, settings.num_chosen_groups
    if groups == chosen == 1:
        return
    size = settings.num_experts // max(groups, 1)
    if size * groups != settings.num_experts or size < _SCORES_PER_GROUP:
        raise ConfigError(f"{settings.num_experts} experts do not form n_group={groups} groups.")
    if not 1 <= chosen <= groups or settings.top_k > chosen * size:
        raise ConfigError(
            f"topk_group={chosen} of n_group={groups} groups with {size} experts each has no "
            f"num_experts_per_tok={settings.top_k} experts to choose from."
        )
    if chosen < groups and settings.top_k // chosen != _SCORES_PER_GROUP:
        raise ConfigError(
            f"topk_group={chosen} with num_experts_per_tok={settings.top_k} is not supported: Megatron-Core scores a "
            f"group by its best {settings.top_k // chosen} experts, transformers by its best {_SCORES_PER_GROUP}."
        )


def sparse_steps(config: PretrainedConfig) -> tuple[bool, ...]:
    """Return which layers have experts, from `decoder_sparse_step` and `mlp_only_layers`.

    Args:
        config: transformers configuration.

    Raises:
        ConfigError: If the step is 0.
    """
    if config.decoder_sparse_step == 0:
        raise ConfigError(
            "decoder_sparse_step=0 in the model's config leaves open which layers have experts. Give 1 for every layer."
        )
    return tuple(
        layer not in config.mlp_only_layers and config.num_experts > 0 and (layer + 1) % config.decoder_sparse_step == 0
        for layer in range(config.num_hidden_layers)
    )
