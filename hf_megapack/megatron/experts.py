"""Frozen experts with an adapter for each, in the place of Megatron-Core's own expert modules.

The weights of a rank's experts are stacked, and so are the factors of their adapters: one independent pair A, B per
expert and projection. Expert parallelism splits the first dimension of both and nothing else does. The dispatcher
brings every token to its experts, sorted by expert.

Shapes: N tokens of this rank's experts, E experts of this rank, D hidden size, F inner size of one expert.
"""

import zlib
from collections.abc import Iterator, Mapping

import torch

from hf_megapack.errors import ConfigError
from hf_megapack.kernels.grouped import ALIGNMENT, TokenGroups
from hf_megapack.megatron.chunks import ModelChunks
from hf_megapack.megatron.expert_products import ExpertFactors, ExpertProducts, FrozenExperts
from hf_megapack.megatron.host import compute_device
from hf_megapack.megatron.lora import PEFT_PREFIX, FactorHolder, set_grad
from hf_megapack.megatron.lora_products import origin_of
from hf_megapack.megatron.parallel import ParallelLayout
from hf_megapack.weights.adapter import LoraSpec, initial_lora_weights
from hf_megapack.weights.names import WeightRule, module_of

FUSED = "gate_up_proj"
# The projections of each of an expert's two matrices.
_FIRST, _SECOND = ("gate_proj", "up_proj", FUSED), ("down_proj",)


class Experts(FactorHolder):
    """The experts of one layer that this rank holds: down(silu(gate(x)) * up(x) * weight of the token).

    Source:
        Constructor and call as `megatron.core.transformer.moe.experts.SequentialMLP`, 0.16.1 and 0.19.2.
    """

    # Whether the backward pass makes inputs and activations again instead of keeping them.
    is_recomputed = False

    def __init__(self, num_local_experts: int, config, **_unused):
        super().__init__()
        hidden_size, inner_size = config.hidden_size, config.moe_ffn_hidden_size
        factory = {"device": compute_device(), "dtype": config.params_dtype}
        self.fc1 = torch.nn.Parameter(torch.empty(num_local_experts, 2 * inner_size, hidden_size, **factory))
        self.fc2 = torch.nn.Parameter(torch.empty(num_local_experts, hidden_size, inner_size, **factory))
        self.lora_a = torch.nn.ParameterDict()
        self.lora_b = torch.nn.ParameterDict()
        self.specs: dict[str, LoraSpec] = {}
        self._rows = {
            "gate_proj": slice(0, inner_size),
            "up_proj": slice(inner_size, 2 * inner_size),
            FUSED: slice(0, 2 * inner_size),
            "down_proj": slice(0, hidden_size),
        }
        self._masters: list[torch.Tensor | None] = [None] * 4
        self._stacked: list[ExpertFactors | None] = [None] * 2

    def adapt(self, leaf: str, spec: LoraSpec) -> None:
        """Give every expert an adapter.

        Args:
            leaf: "gate_proj", "up_proj", "down_proj", or "gate_up_proj" for one A that serves gate and up.
            spec: Its rank and scale.
        """
        weight, rows = self.fc2 if leaf in _SECOND else self.fc1, self._rows[leaf]
        num_experts, _, in_features = weight.shape
        factory = {"device": weight.device, "dtype": torch.float32}
        self.lora_a[leaf] = torch.nn.Parameter(torch.empty(num_experts, spec.rank, in_features, **factory))
        self.lora_b[leaf] = torch.nn.Parameter(torch.empty(num_experts, rows.stop - rows.start, spec.rank, **factory))
        self.specs[leaf] = spec

    def _places(self, leaves: tuple[str, ...]) -> Iterator[tuple[str, slice]]:
        """Yield each adapted projection of a matrix with its columns among the stacked ranks."""
        column = 0
        for leaf in leaves:
            if leaf in self.specs:
                yield leaf, slice(column, column + self.specs[leaf].rank)
                column += self.specs[leaf].rank

    def stack_factors(self, wants_grad: bool) -> None:
        """Copy the factors into the stacked tensors that the products read.

        Args:
            wants_grad: Whether gradients will be collected.
        """
        for index, (leaves, weight) in enumerate(((_FIRST, self.fc1), (_SECOND, self.fc2))):
            places = list(self._places(leaves))
            if not places:
                continue
            num_experts, out_features, in_features = weight.shape
            # The kernels want whole multiples; what is left over stays zero.
            rank = -(-places[-1][1].stop // ALIGNMENT) * ALIGNMENT
            with torch.no_grad():
                a_ERI = self.lora_a[places[0][0]].new_zeros(num_experts, rank, in_features)
                b_EOR = a_ERI.new_zeros(num_experts, out_features, rank)
                for leaf, columns in places:
                    a_ERI[:, columns] = self.lora_a[leaf]
                    b_EOR[:, self._rows[leaf], columns] = self.lora_b[leaf] * self.specs[leaf].scaling
                self._stacked[index] = ExpertFactors(a_ERI.to(weight.dtype), b_EOR.to(weight.dtype))
            self._masters[2 * index : 2 * index + 2] = (
                a_ERI.requires_grad_(wants_grad),
                b_EOR.requires_grad_(wants_grad),
            )

    def collect_gradients(self) -> None:
        """Give each factor its part of the gradient that the update's rows have left in the stacked tensors."""
        for index, leaves in enumerate((_FIRST, _SECOND)):
            masters = self._masters[2 * index : 2 * index + 2]
            if masters[0] is None or masters[0].grad is None:
                continue
            grad_a, grad_b = (master.grad for master in masters)
            for leaf, columns in self._places(leaves):
                set_grad(self.lora_a[leaf], grad_a[:, columns].clone())
                set_grad(self.lora_b[leaf], grad_b[:, self._rows[leaf], columns] * self.specs[leaf].scaling)
        self._masters, self._stacked = [None] * 4, [None] * 2

    @torch.compiler.disable
    def forward(
        self, hidden_ND: torch.Tensor, counts_E: torch.Tensor, weights_N: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """Run every token through its expert.

        Args:
            hidden_ND: Tokens sorted by expert. The model's dtype, shape (N, D).
            counts_E: Tokens of each expert. Integer, on the host or the device, shape (E,).
            weights_N: The router's weight of each token's expert. Floating, shape (N,).

        Returns:
            The weighted outputs, shape (N, D), and no bias.
        """
        experts = FrozenExperts(
            fc1=self.fc1,
            fc2=self.fc2,
            factors1=self._stacked[0],
            factors2=self._stacked[1],
            groups=TokenGroups.of(counts_E, hidden_ND.device),
            origin=origin_of(hidden_ND) if self.is_recomputed else None,
            is_recomputed=self.is_recomputed,
        )
        return ExpertProducts.apply(hidden_ND.contiguous(), weights_N, *self._masters, experts), None


def adaptable_names(rules: list[WeightRule]) -> list[str]:
    """Return the Hugging Face modules that LoRA can adapt, in the model's order; all experts of a layer are one."""
    return [
        module_of(source)
        for rule in rules
        for source in rule.sources
        if rule.role in ("linear", "experts") and source.endswith(".weight")
    ]


def expert_names(rules: list[WeightRule]) -> set[str]:
    """Return the modules that stand for all experts of a layer, among them the one that fuses gate and up."""
    return {name for rule in rules if rule.role == "experts" for name in _names(rule)}


def _names(rule: WeightRule) -> list[str]:
    names = [module_of(source) for source in rule.sources]
    return [*names, f"{module_of(names[0])}.{FUSED}"] if len(names) > 1 else names


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def attach_expert_lora(model: ModelChunks, rules: list[WeightRule], specs: Mapping[str, LoraSpec]) -> None:
    """Give the experts of this rank their adapters.

    Args:
        model: This rank's part of the model.
        rules: Every rule of the whole model.
        specs: Adapter of each adapted Hugging Face module; those that are no experts are left alone.

    Raises:
        ConfigError: If gate and up of a layer have an adapter both apart and together.
    """
    for rule in rules:
        adapted = [name for name in _names(rule) if name in specs] if rule.role == "experts" else []
        if len(adapted) > 1 and _leaf(adapted[-1]) == FUSED:
            raise ConfigError(f"{adapted[-1]} and {adapted[0]} both adapt the same weights. Take one of them out.")
        module = model.module(module_of(rule.parameter)) if adapted else None
        if module is not None:
            for name in adapted:
                module.adapt(_leaf(name), specs[name])


def expert_factor_keys(rules: list[WeightRule], specs: Mapping[str, LoraSpec]) -> list[str]:
    """Return the keys of the experts' factors in the whole adapter, whichever rank holds them."""
    names = [name for rule in rules if rule.role == "experts" for name in _names(rule) if name in specs]
    return [f"{PEFT_PREFIX}{name}.lora_{factor}.weight" for name in names for factor in "AB"]


def _adapted_experts(model: ModelChunks, rules: list[WeightRule]) -> Iterator[tuple[str, WeightRule, Experts]]:
    for rule in rules:
        module = model.module(module_of(rule.parameter)) if rule.role == "experts" else None
        if module is not None:
            yield from ((name, rule, module) for name in _names(rule) if _leaf(name) in module.specs)


def expert_lora_parameters(model: ModelChunks, rules: list[WeightRule]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield the factors of this rank's experts under their keys.

    Args:
        model: A model that `attach_expert_lora` has been through.
        rules: Every rule of the whole model.

    Yields:
        Key and parameter: A of shape (E, rank, in), B of shape (E, out, rank), of which expert parallelism splits the
        first dimension.
    """
    for name, _, module in _adapted_experts(model, rules):
        yield f"{PEFT_PREFIX}{name}.lora_A.weight", module.lora_a[_leaf(name)]
        yield f"{PEFT_PREFIX}{name}.lora_B.weight", module.lora_b[_leaf(name)]


def initialize_expert_lora(
    model: ModelChunks, rules: list[WeightRule], init: bool | str, seed: int, layout: ParallelLayout
) -> None:
    """Draw the initial factors from peft's distributions; each expert has a stream of its own, the same in any layout.

    Args:
        model: A model that `attach_expert_lora` has been through.
        rules: Every rule of the whole model.
        init: `LoraConfig.init_lora_weights`.
        seed: Seed of the draws.
        layout: Where this rank stands.
    """
    for name, _, module in _adapted_experts(model, rules):
        leaf = _leaf(name)
        lora_a, lora_b = module.lora_a[leaf], module.lora_b[leaf]
        first = layout.expert_rank * len(lora_a)
        for local in range(len(lora_a)):
            stream = zlib.crc32(f"{seed}/{name}/{first + local}".encode())
            generator = torch.Generator().manual_seed(stream)
            sizes = lora_a.shape[2], lora_b.shape[1]
            full_a, full_b = initial_lora_weights(module.specs[leaf], *sizes, init, generator)
            with torch.no_grad():
                lora_a[local].copy_(full_a)
                lora_b[local].copy_(full_b)
