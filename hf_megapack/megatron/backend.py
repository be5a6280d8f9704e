"""The one door to Megatron-Core: build a model with LoRA, run updates, and exchange its adapter by PEFT key names.

What goes in are plain `PackedBatch`es, what comes out are plain `StepResult`s and CPU tensors. The base model stays
frozen for the backend's whole life.
"""

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist
from peft import LoraConfig
from transformers import AutoConfig, PretrainedConfig

from hf_megapack.batch import PackedBatch, PackedRow, StepResult
from hf_megapack.errors import BackendError, ExportError
from hf_megapack.megatron.experts import (
    adaptable_names,
    attach_expert_lora,
    expert_factor_keys,
    expert_lora_parameters,
    expert_names,
    initialize_expert_lora,
)
from hf_megapack.megatron.families import family_of
from hf_megapack.megatron.host import compute_device, host_device
from hf_megapack.megatron.lora import (
    FactorStacks,
    attach_lora,
    factor_keys,
    initialize_lora,
    linear_rules,
    lora_parameters,
)
from hf_megapack.megatron.model import ModelOptions, build_model, compile_layers, whole_model_rules
from hf_megapack.megatron.moe import check_experts
from hf_megapack.megatron.parallel import initialize_parallel
from hf_megapack.megatron.recompute import RecomputePolicy
from hf_megapack.megatron.shards import Split, gather_full, take_shard
from hf_megapack.megatron.split_products import Crossing, round_sums_once
from hf_megapack.megatron.step import forward_row, microbatch, reduce_gradients, run_rows, step_result
from hf_megapack.weights.adapter import resolve_lora
from hf_megapack.weights.load import checkpoint_folder
from hf_megapack.weights.names import module_of

if TYPE_CHECKING:
    from hf_megapack.config import MegaPackConfig


class MegatronBackend:
    """A frozen Megatron-Core model with trainable LoRA factors.

    Args:
        model: Hub id or local folder of a base model, or a transformers configuration for random weights.
        args: The training arguments.
        peft_config: The adapter to train.
        attention: Over rows, from `choice.resolve_attention`. "thd" takes rows that share nothing and, where ranks
            share them, sequences aligned for it; on a CPU tree attention computes the same.

    Attributes:
        model: The module that holds everything, for code that wants a `torch.nn.Module`.
        hf_config: transformers configuration of the base model.
        base_model_name: What `model` named, None for random weights.
        linear_names: Hugging Face paths of the base model's linear modules, the head included.
        parameters: PEFT key to this rank's part of each trainable factor, float32, in a stable order. A pipeline stage
            has the factors of its own layers; there may be none.
        layout: Where this rank stands.

    Raises:
        ConfigError: If the model, the adapter or the layout is not one that trains exactly; before weights are read.
        BackendError: If the checkpoint does not fit its configuration.
    """

    def __init__(
        self,
        model: str | PretrainedConfig,
        args: "MegaPackConfig",
        peft_config: LoraConfig,
        attention: Literal["tree", "thd"] = "tree",
    ):
        self._attention = attention
        self.base_model_name = None if isinstance(model, PretrainedConfig) else str(model)
        self.hf_config = model if self.base_model_name is None else AutoConfig.from_pretrained(self.base_model_name)
        self._family = family = family_of(self.hf_config)
        family.check(self.hf_config)
        heads, rules = family.heads(self.hf_config), family.rules(self.hf_config)
        check_experts(family.experts(self.hf_config), args)
        self.linear_names = [*adaptable_names(rules), "lm_head"]
        specs = resolve_lora(peft_config, self.linear_names, model_type=self.hf_config.model_type)
        self.layout = initialize_parallel(args)
        rules = whole_model_rules(self.hf_config, family, self.layout)
        self.model = build_model(
            self.hf_config,
            family,
            rules,
            folder=checkpoint_folder(self.base_model_name) if self.base_model_name is not None else None,
            layout=self.layout,
            dtype=torch.bfloat16 if args.bf16 else torch.float32,
            options=ModelOptions(
                recompute=args.recompute,
                fp8=args.fp8,
                overlap_shared_expert=args.moe_shared_expert_overlap,
                dispatcher=args.moe_token_dispatcher_type,
            ),
            seed=args.seed,
        )
        self._recompute = RecomputePolicy(
            args.recompute, self.model[0].config, self.layout, is_compiled=args.torch_compile
        )
        of_experts = expert_names(rules)
        dense_specs = {name: spec for name, spec in specs.items() if name not in of_experts}
        attach_lora(self.model, rules, dense_specs, heads, self.layout)
        if self.layout.tensor_size > 1:
            linears = [module_of(rule.parameter) for rule in linear_rules(rules)]
            round_sums_once(self.model, linears, Crossing(self.layout.tensor_group, self.layout.sequence_parallel))
        attach_expert_lora(self.model, rules, specs)
        initialize_lora(self.model, rules, peft_config.init_lora_weights, args.seed, self.layout)
        initialize_expert_lora(self.model, rules, peft_config.init_lora_weights, args.seed, self.layout)
        self._stacks: FactorStacks | None = None
        if args.torch_compile:
            compile_layers(self.model)
        self._all_keys = frozenset([*factor_keys(rules, specs), *expert_factor_keys(rules, specs)])
        self.parameters, self._splits = {}, {}
        for key, parameter, dim in lora_parameters(self.model, rules):
            self.parameters[key], self._splits[key] = parameter, Split(axis="tensor", dim=dim)
        for key, parameter in expert_lora_parameters(self.model, rules):
            self.parameters[key], self._splits[key] = parameter, Split(axis="expert", dim=0)

    @property
    def rank(self) -> int:
        """Global rank of this process."""
        return self.layout.rank

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.layout.world_size

    @property
    def data_parallel_rank(self) -> int:
        """Rank among the processes that hold the same weights and run different rows."""
        return self.layout.data_rank

    @property
    def data_parallel_size(self) -> int:
        """Number of processes that hold the same weights and run different rows."""
        return self.layout.data_size

    @property
    def context_parallel_size(self) -> int:
        """Number of processes that share each row."""
        return self.layout.context_size

    @functools.cached_property
    def num_active_weights(self) -> int:
        """Weights of this rank's layers that one slot passes through: of experts, as many as the router chooses."""
        experts = self._family.experts(self.hf_config)
        active = 0
        for name, parameter in self.model.named_parameters():
            if ".mlp.experts." in name:
                active += parameter[0].numel() * experts.top_k
            elif "embed" not in name:
                active += parameter.numel()
        return active

    def run_step(self, batch: PackedBatch) -> StepResult:
        """Compute the loss of an update and its gradient.

        Args:
            batch: The update, the same on every rank.

        Returns:
            The result; every factor's `.grad` then holds the gradient of `loss`, summed over all ranks.
            Gradients of an earlier step are dropped.

        Raises:
            DataError: If the update is scheduled for another number of ranks, learns nothing, or has rows that the
                attention or the ranks cannot take.
        """
        for parameter in self.parameters.values():
            parameter.grad = None
        totals = self._run_rows(batch, wants_grad=True)
        # Queued before the host waits for the loss.
        self._stacks.collect()
        reduce_gradients(self.parameters, self._splits, self.layout)
        return step_result(totals, batch, self.layout)

    def eval_step(self, batch: PackedBatch) -> StepResult:
        """Compute the loss of an update without gradients; arguments, result and errors as `run_step`."""
        return step_result(self._run_rows(batch, wants_grad=False), batch, self.layout)

    def _run_rows(self, batch: PackedBatch, *, wants_grad: bool) -> torch.Tensor:
        self._fill_stacks(wants_grad=wants_grad)
        recompute = self._recompute if wants_grad else None
        return run_rows(self.model, batch, self.layout, recompute, attention=self._attention)

    def _fill_stacks(self, *, wants_grad: bool) -> None:
        if self._stacks is None:
            # Only now, because the model may have been cast since it was built.
            self._stacks = FactorStacks(self.model)
        self._stacks.fill(wants_grad=wants_grad)

    def logits(self, row: PackedRow) -> torch.Tensor:
        """Return the logits of every slot of a row, to look at or compare.

        A collective of the ranks that share the weights of a layer or its experts.

        Args:
            row: Any row; ranks that share experts alone may have different ones.

        Returns:
            The model's dtype, shape (num_slots, vocab_size).

        Raises:
            BackendError: If this rank does not see every layer of every slot.
        """
        layout = self.layout
        if layout.pipeline_size * layout.context_size > 1:
            raise BackendError("logits needs pipeline_parallel_size=1 and context_parallel_size=1.")
        self.model.eval()
        self._fill_stacks(wants_grad=False)
        with host_device(), torch.no_grad():
            places = torch.tensor(layout.num_local_slots(row.input_ids.size), device=compute_device())
            if layout.expert_size > 1:
                dist.all_reduce(places, dist.ReduceOp.MAX, group=layout.expert_model_group)
            input_ids, params = microbatch(
                row,
                layout,
                num_loss_tokens=1,
                is_dummy=False,
                num_expert_places=int(places),
                attention=self._attention,
            )
            params.wants_logits = True
            local = forward_row(self.model[0], input_ids, params)
            parts = [torch.empty_like(local) for _ in range(layout.tensor_size)]
            dist.all_gather(parts, local.contiguous(), group=layout.tensor_group)
        return torch.cat(parts, dim=1)

    def grad_norm(self) -> float:
        """Return the 2-norm of the gradient over all factors of all ranks, the same number on every rank."""
        layout = self.layout
        total = torch.zeros((), dtype=torch.float64, device=compute_device())
        for axis, group in (("tensor", layout.model_group), ("expert", layout.expert_model_group)):
            counted = [
                parameter.grad
                for key, parameter in self.parameters.items()
                # Every tensor-parallel rank holds the whole of a replicated factor; one of them counts it.
                if self._splits[key].axis == axis
                and parameter.grad is not None
                and (self._splits[key].dim is not None or layout.tensor_rank == 0)
            ]
            norms = torch._foreach_norm(counted, 2, torch.float64) if counted else []
            squares = torch.stack([*norms, torch.zeros_like(total)]).square().sum()
            if group.size() > 1:
                dist.all_reduce(squares, group=group)
            total += squares
        return float(total.sqrt())

    def scale_grads(self, factor: float) -> None:
        """Multiply every gradient by a factor."""
        gradients = [parameter.grad for parameter in self.parameters.values() if parameter.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, factor)

    def adapter_state(self) -> dict[str, torch.Tensor]:
        """Return the full adapter. A collective: every rank calls it.

        Returns:
            PEFT key to float32 CPU tensor, sorted by key, the same on every rank.

        Raises:
            ExportError: If the ranks' shards do not fit together.
        """
        return gather_full({k: (p, self._splits[k]) for k, p in self.parameters.items()}, self.layout)

    def load_adapter(self, state: Mapping[str, torch.Tensor]) -> None:
        """Replace the factors by those of a full adapter.

        Args:
            state: PEFT key to full tensor; exactly the adapter's keys.

        Raises:
            ExportError: If keys or shapes differ from the adapter's; nothing is changed then.
        """
        missing, extra = sorted(set(self._all_keys) - set(state)), sorted(set(state) - set(self._all_keys))
        if missing or extra:
            raise ExportError(
                f"The adapter does not fit the one being trained: {len(missing)} factors are missing "
                f"({', '.join(missing[:3]) or 'none'}), {len(extra)} are unknown ({', '.join(extra[:3]) or 'none'}). "
                "Use the LoraConfig that the adapter was made with."
            )
        shards = {key: take_shard(state[key], self._splits[key], self.layout) for key in self.parameters}
        for key, shard in shards.items():
            if shard.shape != self.parameters[key].shape:
                raise ExportError(
                    f"{key} has shape {tuple(state[key].shape)}; this rank's part must be "
                    f"{tuple(self.parameters[key].shape)}. Its rank or its base model is another."
                )
        with torch.no_grad():
            for key, shard in shards.items():
                self.parameters[key].copy_(shard)

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
        """Return an optimizer's state as full tensors. A collective: every rank calls it.

        Args:
            optimizer: A torch optimizer over `parameters`, elementwise.

        Returns:
            "<state name>/<PEFT key>" to CPU tensor: moments have their factor's full shape, step counts are scalars.
        """
        local = {}
        for key, parameter in self.parameters.items():
            for name, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    split = self._splits[key]
                    local[f"{name}/{key}"] = (value, split if value.dim() else split.without_dim())
        return gather_full(local, self.layout)

    def load_optimizer_state(self, optimizer: torch.optim.Optimizer, state: Mapping[str, torch.Tensor]) -> None:
        """Set an optimizer's state from `optimizer_state`'s full tensors.

        Args:
            optimizer: A torch optimizer over `parameters`.
            state: What `optimizer_state` returned, in any layout.

        Raises:
            ExportError: If a tensor belongs to no factor or has another shape; nothing is changed then.
        """
        per_factor: dict[str, dict[str, torch.Tensor]] = {}
        for full_key, value in state.items():
            name, _, key = full_key.partition("/")
            if key not in self._all_keys:
                raise ExportError(f"The optimizer state {full_key} belongs to no factor of the adapter being trained.")
            if key not in self.parameters:
                continue
            shard = take_shard(value, self._splits[key], self.layout) if value.dim() else value
            parameter = self.parameters[key]
            if value.dim() and shard.shape != parameter.shape:
                raise ExportError(f"The optimizer state {full_key} has shape {tuple(value.shape)}, unlike its factor.")
            device = parameter.device if value.dim() else "cpu"
            per_factor.setdefault(key, {})[name] = shard.to(device, copy=True)
        for key, entries in per_factor.items():
            optimizer.state[self.parameters[key]] = entries

    def close(self) -> None:
        """Drop the model; the process groups stay for the next trainer of this process."""
        self.parameters = {}
        self.model = self._stacks = None
