"""Frozen experts with an adapter for each, in the place of Megatron-Core's own expert modules.

The weights of a rank's experts are stacked, and so are the factors of their adapters: one independent pair A, B per
expert and projection. Expert parallelism splits the first dimension of both and nothing else does. Megatron-Core's
router and dispatcher bring every token to its experts, sorted by expert.

Shapes: N tokens of this rank's experts, E experts of this rank, D hidden size, F inner size of one expert, R LoRA
ranks of the projections of one input together, I and O the input and output of any projection.
"""

import zlib
from collections.abc import Iterator, Mapping

import torch
from torch.nn.functional import grouped_mm, linear, pad, silu

from hf_megapack.errors import ConfigError
from hf_megapack.megatron.chunks import ModelChunks
from hf_megapack.megatron.host import compute_device
from hf_megapack.megatron.lora import PEFT_PREFIX
from hf_megapack.megatron.parallel import ParallelLayout
from hf_megapack.weights.adapter import LoraSpec, initial_lora_weights
from hf_megapack.weights.names import WeightRule, module_of

FUSED = "gate_up_proj"
# The grouped kernel wants rows of 16 bytes, and every dimension but the number of tokens ends up as a row somewhere.
_KERNEL_MULTIPLE = 8


def looped_linear(input_NI: torch.Tensor, weight_EOI: torch.Tensor, counts_E: torch.Tensor) -> torch.Tensor:
    """Apply each expert's matrix to its tokens, one expert after the other: the plain twin of `grouped_linear`.

    Args:
        input_NI: Tokens sorted by expert. Floating, shape (N, I).
        weight_EOI: Same dtype, shape (E, O, I).
        counts_E: Tokens of each expert, N in sum; some may be 0. Integer, shape (E,).

    Returns:
        Shape (N, O).
    """
    parts = input_NI.split(counts_E.tolist())
    return torch.cat([linear(part, weight) for part, weight in zip(parts, weight_EOI.unbind(), strict=True)])


def grouped_linear(input_NI: torch.Tensor, weight_EOI: torch.Tensor, counts_E: torch.Tensor) -> torch.Tensor:
    """Apply each expert's matrix to its tokens in one kernel. Arguments and result as `looped_linear`."""
    ends_E = counts_E.to(input_NI.device, non_blocking=True).cumsum(0, dtype=torch.int32)
    return grouped_mm(input_NI, weight_EOI.transpose(1, 2), offs=ends_E)


def _has_kernel(input_NI: torch.Tensor, *sizes: int) -> bool:
    """Whether the grouped kernel computes this: bfloat16 on a GPU, at least one token, aligned rows."""
    is_fast = input_NI.is_cuda and input_NI.dtype == torch.bfloat16 and len(input_NI) > 0
    return is_fast and not any(size % _KERNEL_MULTIPLE for size in sizes)


class Experts(torch.nn.Module):
    """The experts of one layer that this rank holds: down(silu(gate(x)) * up(x) * weight of the token).

    Source:
        Constructor and call as `megatron.core.transformer.moe.experts.SequentialMLP`, 0.16.1 and 0.19.2.
    """

    def __init__(self, num_local_experts: int, config, **_unused):
        super().__init__()
        hidden_size, inner_size = config.hidden_size, config.moe_ffn_hidden_size
        self.inner_size = inner_size
        factory = {"device": compute_device(), "dtype": config.params_dtype}
        self.fc1 = torch.nn.Parameter(torch.empty(num_local_experts, 2 * inner_size, hidden_size, **factory))
        self.fc2 = torch.nn.Parameter(torch.empty(num_local_experts, hidden_size, inner_size, **factory))
        self.lora_a = torch.nn.ParameterDict()
        self.lora_b = torch.nn.ParameterDict()
        self.specs: dict[str, LoraSpec] = {}

    def rows(self, leaf: str) -> slice:
        """Return which outputs of its matrix a projection makes."""
        return {
            "gate_proj": slice(0, self.inner_size),
            "up_proj": slice(self.inner_size, 2 * self.inner_size),
            FUSED: slice(0, 2 * self.inner_size),
            "down_proj": slice(0, self.fc2.shape[1]),
        }[leaf]

    def adapt(self, leaf: str, spec: LoraSpec) -> None:
        """Give every expert an adapter.

        Args:
            leaf: "gate_proj", "up_proj", "down_proj", or "gate_up_proj" for one A that serves gate and up.
            spec: Its rank and scale.
        """
        weight, rows = self.fc2 if leaf == "down_proj" else self.fc1, self.rows(leaf)
        num_experts, _, in_features = weight.shape
        factory = {"device": weight.device, "dtype": torch.float32}
        self.lora_a[leaf] = torch.nn.Parameter(torch.empty(num_experts, spec.rank, in_features, **factory))
        self.lora_b[leaf] = torch.nn.Parameter(torch.empty(num_experts, rows.stop - rows.start, spec.rank, **factory))
        self.specs[leaf] = spec

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
        gate_up_NF = self._project(hidden_ND, self.fc1, counts_E, ("gate_proj", "up_proj", FUSED))
        gate_NF, up_NF = gate_up_NF.chunk(2, dim=-1)
        inner_NF = (silu(gate_NF) * up_NF * weights_N[:, None]).to(hidden_ND.dtype)
        return self._project(inner_NF, self.fc2, counts_E, ("down_proj",)), None

    def _project(
        self, input_NI: torch.Tensor, weight_EOI: torch.Tensor, counts_E: torch.Tensor, leaves: tuple[str, ...]
    ) -> torch.Tensor:
        apply = grouped_linear if _has_kernel(input_NI, *weight_EOI.shape[1:]) else looped_linear
        output_NO = apply(input_NI, weight_EOI, counts_E)
        adapted = [leaf for leaf in leaves if leaf in self.specs]
        if not adapted:
            return output_NO
        factor_ERI, factor_EOR = self._stacked_factors(adapted, weight_EOI.shape[1], input_NI.dtype)
        return output_NO + apply(apply(input_NI, factor_ERI, counts_E), factor_EOR, counts_E)

    def _stacked_factors(
        self, leaves: list[str], out_features: int, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the adapters of one input as one: A's one below the other, B's in the rows of their projections."""
        factors_a, factors_b = [], []
        for leaf in leaves:
            rows = self.rows(leaf)
            factors_a.append(self.lora_a[leaf])
            scaled = self.lora_b[leaf] * self.specs[leaf].scaling
            factors_b.append(pad(scaled, (0, 0, rows.start, out_features - rows.stop)))
        factor_ERI, factor_EOR = torch.cat(factors_a, dim=1).to(dtype), torch.cat(factors_b, dim=2).to(dtype)
        missing = -factor_ERI.shape[1] % _KERNEL_MULTIPLE
        if missing and factor_ERI.is_cuda:
            factor_ERI, factor_EOR = pad(factor_ERI, (0, 0, 0, missing)), pad(factor_EOR, (0, missing))
        return factor_ERI, factor_EOR


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
