"""LoRA on Megatron-Core's linears, one independent pair of factors for each Hugging Face projection.

Megatron-Core fuses q, k, v and gate, up into one linear each; their adapters stay apart, so that any per-module PEFT
adapter loads and exports without loss. Factors are float32 parameters; the base is frozen.

Shapes: T slots, B rows, N = T * B, D and I inputs, O outputs, G query groups, R the ranks of all projections together.
"""

import abc
import functools
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

from hf_megapack.errors import BackendError, ConfigError
from hf_megapack.megatron.chunks import ModelChunks
from hf_megapack.megatron.lora_products import FrozenLinearWithUpdate, LowRankProduct, StackedFactors, origin_of
from hf_megapack.megatron.parallel import ParallelLayout
from hf_megapack.megatron.regions import enter_tensor_parallel, leave_tensor_parallel
from hf_megapack.megatron.split_products import Crossing, SplitInputsWithUpdate, SplitOutputsWithUpdate
from hf_megapack.weights.adapter import LoraSpec, initial_lora_weights
from hf_megapack.weights.names import HeadLayout, WeightRule, module_of

PEFT_PREFIX = "base_model.model."


@dataclass(frozen=True, kw_only=True, slots=True)
class Projection:
    """One Hugging Face projection inside a Megatron-Core linear.

    Attributes:
        name: Hugging Face module path.
        out_features: Rows of this projection that the local linear holds.
        spec: Its adapter, None when it is not adapted.
    """

    name: str
    out_features: int
    spec: LoraSpec | None


class FactorHolder(torch.nn.Module, abc.ABC):
    """A module with adapters of another shape than a linear's, which keeps copies of its factors by itself."""

    @abc.abstractmethod
    def stack_factors(self, wants_grad: bool) -> None:
        """Make the copies before an update's first row.

        Args:
            wants_grad: Whether gradients will be collected.
        """

    @abc.abstractmethod
    def collect_gradients(self) -> None:
        """Take the factors' gradients from the copies after an update's last row."""


class LoraLinear(torch.nn.Module):
    """A frozen Megatron-Core linear plus the low-rank updates of the projections fused in it.

    The products read copies of the factors, stacked and in the activations' type: `FactorStacks` fills them before an
    update's first row and takes the factors' gradients from them after its last.

    Args:
        base: `ColumnParallelLinear` or `RowParallelLinear` of Megatron-Core or its Transformer Engine twin, frozen.
        projections: What the linear fuses, in order.
        in_features: Local input size.
        num_groups: Local query groups between which q, k and v are interleaved; 1 when they follow one another.
        is_row_parallel: Whether tensor parallelism splits the input rather than the output.
        layout: Where this rank stands.
    """

    def __init__(
        self,
        base: torch.nn.Module,
        projections: list[Projection],
        *,
        in_features: int,
        num_groups: int,
        is_row_parallel: bool,
        layout: ParallelLayout,
    ):
        super().__init__()
        self.base = base
        self.projections = projections
        self.num_groups = num_groups
        self._cross_ranks = self._crossing = None
        if layout.tensor_size > 1:
            # What crosses ranks for the update alone is only as wide as the adapter's rank.
            cross = leave_tensor_parallel if is_row_parallel else enter_tensor_parallel
            self._cross_ranks = functools.partial(cross, sequence_parallel=layout.sequence_parallel)
            self._crossing = Crossing(layout.tensor_group, layout.sequence_parallel)
        self._split_product = SplitInputsWithUpdate if is_row_parallel else SplitOutputsWithUpdate
        # Transformer Engine's own product may be in FP8; the update is added to its result.
        self._is_joined = isinstance(base, ColumnParallelLinear | RowParallelLinear)
        self.lora_a = torch.nn.ParameterDict()
        self.lora_b = torch.nn.ParameterDict()
        for projection in self.adapted:
            leaf, rank = _leaf(projection.name), projection.spec.rank
            factory = {"device": base.weight.device, "dtype": torch.float32}
            self.lora_a[leaf] = torch.nn.Parameter(torch.empty(rank, in_features, **factory))
            self.lora_b[leaf] = torch.nn.Parameter(torch.empty(projection.out_features, rank, **factory))
        self.masters: tuple[torch.Tensor, torch.Tensor] | None = None
        self.stacked: StackedFactors | None = None

    @property
    def adapted(self) -> list[Projection]:
        """The projections that have an adapter."""
        return [projection for projection in self.projections if projection.spec is not None]

    @property
    def weight(self) -> torch.Tensor:
        """The frozen weight, which some Megatron-Core code reads from its linears."""
        return self.base.weight

    def make_copies(self) -> None:
        """Make the tensors that hold the stacked factors, in the types that factors and weight have now."""
        a, b = next(iter(self.lora_a.values())), next(iter(self.lora_b.values()))
        ranks = sum(projection.spec.rank for projection in self.adapted)
        # No parameters: their gradients go to the factors.
        self.masters = (
            a.new_zeros(ranks, a.shape[1], requires_grad=True),
            b.new_zeros(self.base.weight.shape[0], ranks, requires_grad=True),
        )
        self.stacked = StackedFactors(*(master.detach().to(self.base.weight.dtype) for master in self.masters))

    def places(self) -> Iterator[tuple[Projection, slice, slice]]:
        """Yield each adapted projection with its ranks among those of all, and its rows among those of a group."""
        row = column = 0
        for projection in self.projections:
            num_rows = projection.out_features // self.num_groups
            if projection.spec is not None:
                yield projection, slice(column, column + projection.spec.rank), slice(row, row + num_rows)
                column += projection.spec.rank
            row += num_rows

    def by_group(self, b_OR: torch.Tensor) -> torch.Tensor:
        """Return a view of stacked B, or of its gradient, of shape (G, rows of a group, R)."""
        return b_OR.view(self.num_groups, -1, b_OR.shape[1])

    def forward(self, input_TBD: torch.Tensor, *args, **kwargs) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the base output plus every update, and the bias that the base leaves to its caller."""
        if self._is_joined:
            output, bias = self._joined_forward(input_TBD)
        else:
            output, bias = self.base(input_TBD, *args, **kwargs)
            output = output + self._update(input_TBD)
        return output, bias

    def _joined_forward(self, input_TBD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        base = self.base
        operands = (input_TBD.flatten(0, -2), base.weight, *self.masters, self.stacked, origin_of(input_TBD))
        output_NO = FrozenLinearWithUpdate.apply(*operands) if self._crossing is None else self._split_forward(operands)
        # With sequence parallelism the output has more or fewer slots than the input.
        output = output_NO.unflatten(0, (-1, *input_TBD.shape[1:-1]))
        if base.bias is None or base.skip_bias_add:
            return output, base.bias
        return output + base.bias, None

    @torch.compiler.disable
    def _split_forward(self, operands: tuple) -> torch.Tensor:
        return self._split_product.apply(*operands, self._crossing)

    def _update(self, input_TBD: torch.Tensor) -> torch.Tensor:
        a, b = self.masters
        inner = LowRankProduct.apply(input_TBD.flatten(0, -2), a, self.stacked.a_RI, origin_of(input_TBD))
        inner_TBR = inner.unflatten(0, input_TBD.shape[:-1])
        if self._cross_ranks is not None:
            inner_TBR = self._cross_ranks(inner_TBR)
        update = LowRankProduct.apply(inner_TBR.flatten(0, -2), b, self.stacked.b_OR, None)
        return update.unflatten(0, inner_TBR.shape[:-1])


class _Place(NamedTuple):
    """Where the factors of one projection lie in the stacked tensors of its linear.

    Attributes:
        a: The factor A.
        b: The factor B.
        scaling: What B is multiplied by.
        ranks: Rows of A, columns of B.
        rows: Rows of B within each group.
    """

    a: torch.nn.Parameter
    b: torch.nn.Parameter
    scaling: float
    ranks: slice
    rows: slice


class FactorStacks:
    """The stacked copies of all factors of a model, written and read with few launches.

    Args:
        model: A model that `attach_lora` has been through.
    """

    def __init__(self, model: torch.nn.Module):
        self._holders = [module for module in model.modules() if isinstance(module, FactorHolder)]
        self._linears: list[tuple[LoraLinear, list[_Place]]] = []
        for linear in (module for module in model.modules() if isinstance(module, LoraLinear)):
            linear.make_copies()
            places = []
            for projection, ranks, rows in linear.places():
                leaf = _leaf(projection.name)
                factors = linear.lora_a[leaf], linear.lora_b[leaf]
                places.append(_Place(*factors, projection.spec.scaling, ranks, rows))
            self._linears.append((linear, places))
        self._places = [place for _, places in self._linears for place in places]
        self._scalings = [place.scaling for place in self._places]
        self._masters = [master for linear, _ in self._linears for master in linear.masters]
        self._copies = [copy for linear, _ in self._linears for copy in linear.stacked]
        self._a_views, self._b_views = _views(self._linears, lambda master: master.detach())

    def fill(self, *, wants_grad: bool) -> None:
        """Copy the factors into what the next rows read. To be called again whenever factors have changed.

        Args:
            wants_grad: Whether `collect` follows.
        """
        for holder in self._holders:
            holder.stack_factors(wants_grad)
        if not self._linears:
            return
        with torch.no_grad():
            scaled = torch._foreach_mul([place.b for place in self._places], self._scalings)
            torch._foreach_copy_(self._a_views, [place.a for place in self._places])
            torch._foreach_copy_(self._b_views, [b.view_as(v) for b, v in zip(scaled, self._b_views, strict=True)])
            torch._foreach_copy_(self._copies, self._masters)
            for master in self._masters:
                master.grad = None

    def collect(self) -> None:
        """Set every factor's `.grad` to the gradient that the rows since `fill` have left."""
        for holder in self._holders:
            holder.collect_gradients()
        # One that no row has reached has no gradient.
        linears = [(linear, places) for linear, places in self._linears if linear.masters[0].grad is not None]
        a_grads, b_grads = _views(linears, lambda master: master.grad)
        for master in self._masters:
            master.grad = None
        places = [place for _, places in linears for place in places]
        scaled = torch._foreach_mul(b_grads, [place.scaling for place in places]) if places else []
        for place, grad_a, grad_b in zip(places, a_grads, scaled, strict=True):
            set_grad(place.a, grad_a)
            set_grad(place.b, grad_b.reshape_as(place.b))


def _views(
    linears: Sequence[tuple[LoraLinear, list[_Place]]], of: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return each place's part of what `of` makes of stacked A, shape (rank, I), and of B, shape (G, rows, rank)."""
    a_views, b_views = [], []
    for linear, places in linears:
        a_RI, b_GOR = of(linear.masters[0]), linear.by_group(of(linear.masters[1]))
        a_views += [a_RI[place.ranks] for place in places]
        b_views += [b_GOR[:, place.rows, place.ranks] for place in places]
    return a_views, b_views


def set_grad(factor: torch.nn.Parameter, grad: torch.Tensor) -> None:
    """Set a factor's gradient, unless the factor was frozen: an optimizer would step it."""
    if factor.requires_grad:
        factor.grad = grad


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def linear_rules(rules: list[WeightRule]) -> list[WeightRule]:
    """Return the rules of the weights that LoRA can adapt."""
    return [rule for rule in rules if rule.role == "linear" and rule.parameter.endswith(".weight")]


def factor_keys(rules: list[WeightRule], specs: Mapping[str, LoraSpec]) -> list[str]:
    """Return the PEFT keys of the whole adapter, in the order of the model, whichever rank holds them."""
    names = [module_of(source) for rule in linear_rules(rules) for source in rule.sources]
    return [f"{PEFT_PREFIX}{name}.lora_{factor}.weight" for name in names if name in specs for factor in "AB"]


def attach_lora(
    model: ModelChunks,
    rules: list[WeightRule],
    specs: Mapping[str, LoraSpec],
    heads: HeadLayout,
    layout: ParallelLayout,
) -> None:
    """Wrap every linear of this rank that has an adapter.

    Args:
        model: This rank's part of the model.
        rules: Every rule of the whole model.
        specs: Adapter of each adapted Hugging Face module.
        heads: Attention sizes of the whole model.
        layout: Where this rank stands.

    Raises:
        ConfigError: If an adapted module has no linear in the model.
        BackendError: If a linear's shape is not what its projections add up to.
    """
    left = set(specs)
    for rule in linear_rules(rules):
        names = [module_of(source) for source in rule.sources]
        if not left.intersection(names):
            continue
        left.difference_update(names)
        path = module_of(rule.parameter)
        base = model.module(path)
        if base is None:
            continue
        out_features, in_features = base.weight.shape
        sizes = _projection_sizes(rule, heads, out_features, layout.tensor_size)
        if sum(sizes) != out_features:
            raise BackendError(f"{path} has {out_features} rows; its projections {names} have {sizes}.")
        projections = [
            Projection(name=name, out_features=size, spec=specs.get(name))
            for name, size in zip(names, sizes, strict=True)
        ]
        wrapped = LoraLinear(
            base,
            projections,
            in_features=in_features,
            num_groups=heads.num_groups // layout.tensor_size if rule.fusion == "grouped_qkv" else 1,
            is_row_parallel=rule.shard_dim == 1,
            layout=layout,
        )
        model.replace(path, wrapped)
    if left:
        raise ConfigError(f"LoRA targets {sorted(left)} are not linear layers that can be adapted.")


def _projection_sizes(rule: WeightRule, heads: HeadLayout, out_features: int, tensor_size: int) -> list[int]:
    if rule.fusion == "grouped_qkv":
        query, key = (count * heads.head_dim // tensor_size for count in (heads.num_heads, heads.num_groups))
        return [query, key, key]
    return [out_features // len(rule.sources)] * len(rule.sources)


def _adapted_projections(
    model: ModelChunks, rules: list[WeightRule]
) -> Iterator[tuple[WeightRule, LoraLinear, Projection]]:
    for rule in linear_rules(rules):
        module = model.module(module_of(rule.parameter))
        if isinstance(module, LoraLinear):
            for projection in module.adapted:
                yield rule, module, projection


def lora_parameters(
    model: ModelChunks, rules: list[WeightRule]
) -> Iterator[tuple[str, torch.nn.Parameter, int | None]]:
    """Yield every factor that this rank holds under its PEFT key, with the dimension that tensor parallelism splits.

    A column-parallel linear splits B along its output; a row-parallel one splits A along its input.

    Args:
        model: A model that `attach_lora` has been through.
        rules: Every rule of the whole model.

    Yields:
        PEFT key, local parameter, and the split dimension or None for a replicated factor.
    """
    for rule, module, projection in _adapted_projections(model, rules):
        is_row_parallel = rule.shard_dim == 1
        leaf, key = _leaf(projection.name), PEFT_PREFIX + projection.name
        yield f"{key}.lora_A.weight", module.lora_a[leaf], 1 if is_row_parallel else None
        yield f"{key}.lora_B.weight", module.lora_b[leaf], None if is_row_parallel else 0


def initialize_lora(
    model: ModelChunks, rules: list[WeightRule], init: bool | str, seed: int, layout: ParallelLayout
) -> None:
    """Draw the initial factors from peft's distributions, the same full tensors in every layout.

    Args:
        model: A model that `attach_lora` has been through.
        rules: Every rule of the whole model.
        init: `LoraConfig.init_lora_weights`.
        seed: Seed of the draws; each module has a stream of its own.
        layout: Where this rank stands.
    """
    size, rank = layout.tensor_size, layout.tensor_rank
    for rule, module, projection in _adapted_projections(model, rules):
        is_row_parallel = rule.shard_dim == 1
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{projection.name}".encode()))
        lora_a, lora_b = module.lora_a[_leaf(projection.name)], module.lora_b[_leaf(projection.name)]
        in_features = lora_a.shape[1] * (size if is_row_parallel else 1)
        out_features = lora_b.shape[0] * (1 if is_row_parallel else size)
        full_a, full_b = initial_lora_weights(projection.spec, in_features, out_features, init, generator)
        with torch.no_grad():
            lora_a.copy_(full_a.chunk(size, dim=1)[rank] if is_row_parallel else full_a)
            lora_b.copy_(full_b if is_row_parallel else full_b.chunk(size, dim=0)[rank])
