"""Build this rank's part of a Hugging Face model on Megatron-Core, with tree attention, our rotary angles and our loss.

Megatron-Core's GPTModel is used as it is, through its layer spec and two overridden methods: what goes into the first
layer (`_preprocess`) and what is made of the last hidden state (`_postprocess`). Both exist under the same names in
0.16.1 and 0.19.2.
"""

import contextlib
import dataclasses
import functools
import logging
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch.nn.functional import silu
from transformers import PretrainedConfig

from hf_megapack.errors import ConfigError
from hf_megapack.megatron.attention import TreeParams
from hf_megapack.megatron.chunks import ModelChunks
from hf_megapack.megatron.context import even_out
from hf_megapack.megatron.dispatch import put_in_dispatchers
from hf_megapack.megatron.families import DenseFamily
from hf_megapack.megatron.flex_attention import allow_compilations
from hf_megapack.megatron.host import compute_device, has_gpu, host_device
from hf_megapack.megatron.layers import FrozenRMSNorm, layer_spec
from hf_megapack.megatron.loss import LossTerms, frozen_head_loss
from hf_megapack.megatron.moe import expert_options, keep_routers_wide
from hf_megapack.megatron.parallel import ParallelLayout
from hf_megapack.megatron.regions import gather_slots
from hf_megapack.megatron.rotary import rotary_frequencies, rotation
from hf_megapack.weights.load import draw_parameters, load_parameters
from hf_megapack.weights.names import Part, WeightRule, module_of

if TYPE_CHECKING:
    from pathlib import Path

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ModelOptions:
    """How a model computes, whatever it is.

    Attributes:
        recompute: MegaPackConfig's field of this name.
        fp8: FP8 recipe of the linears, None for none.
        overlap_shared_expert: MegaPackConfig's `moe_shared_expert_overlap`.
        dispatcher: MegaPackConfig's `moe_token_dispatcher_type`.
    """

    recompute: str = "off"
    fp8: str | None = None
    overlap_shared_expert: bool = False
    dispatcher: str = "alltoall"


class TreeGPTModel(GPTModel):
    """A GPTModel that rotates by position and returns `LossTerms` of one row."""

    def __init__(self, *, rotary_frequencies: torch.Tensor, rotary_factor: float, **kwargs):
        super().__init__(position_embedding_type="none", **kwargs)
        self.register_buffer("rotary_frequencies", rotary_frequencies, persistent=False)
        self.rotary_factor = rotary_factor

    def _preprocess(self, *args, packed_seq_params: TreeParams, **kwargs):
        hidden_states, _, *rest = super()._preprocess(*args, packed_seq_params=packed_seq_params, **kwargs)
        if self.config.recompute_num_layers and hidden_states is not None and torch.is_grad_enabled():
            # A recomputed layer passes gradients only if its input asks for one; the frozen embedding does not.
            hidden_states = hidden_states.detach().requires_grad_()
        turn = rotation(packed_seq_params.local_positions, self.rotary_frequencies, self.rotary_factor)
        return hidden_states, turn, *rest

    def _postprocess(self, hidden_states, *, packed_seq_params: TreeParams, **_unused) -> torch.Tensor | LossTerms:
        if not self.post_process:
            return hidden_states
        params, config = packed_seq_params, self.config
        head = (
            self.shared_embedding_or_output_weight()
            if self.share_embeddings_and_output_weights
            else self.output_layer.weight
        )
        if config.sequence_parallel:
            hidden_states = gather_slots(hidden_states)
        hidden_TD = hidden_states.squeeze(1)
        if params.wants_logits:
            return hidden_TD @ head.T
        hidden_ND = hidden_TD.index_select(0, params.loss_slots)
        if params.loss_share is not None:
            hidden_ND = even_out(hidden_ND, params.loss_share)
        return frozen_head_loss(
            hidden_ND,
            head,
            params.loss_labels,
            params.loss_counts,
            params.loss_scale,
            group=self.tp_group if config.tensor_model_parallel_size > 1 else None,
        )


def transformer_config(
    config: PretrainedConfig, family: DenseFamily, layout: ParallelLayout, *, dtype: torch.dtype, options: ModelOptions
) -> TransformerConfig:
    """Map a Hugging Face configuration to Megatron-Core's.

    Args:
        config: transformers configuration.
        family: Its family.
        layout: Where this rank stands.
        dtype: Of the frozen weights and the activations.
        options: How it computes.

    Returns:
        The configuration, with each layer's sliding window in `tree_windows`, and in `gathers_slots` whether ranks that
        share experts gather each other's slots.
    """
    heads = family.heads(config)
    is_interleaved = layout.num_chunks > 1
    result = TransformerConfig(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.intermediate_size,
        num_attention_heads=heads.num_heads,
        num_query_groups=heads.num_groups,
        kv_channels=heads.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=config.rms_norm_eps,
        qk_layernorm=family.has_qk_norm,
        gated_linear_unit=True,
        activation_func=silu,
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        softmax_scale=heads.head_dim**-0.5,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=not has_gpu(),
        perform_initialization=False,
        calculate_per_token_loss=True,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        # "block" recomputes the first so many layers, which RecomputePolicy sets before every row.
        recompute_granularity="full" if options.recompute in ("full", "auto") else None,
        recompute_method="block" if options.recompute in ("full", "auto") else None,
        recompute_num_layers=0 if options.recompute in ("full", "auto") else None,
        fp8="hybrid" if options.fp8 else None,
        fp8_recipe=options.fp8 or "delayed",
        # Context parallelism stays out of Megatron-Core: TreeAttention fetches keys and values itself.
        tensor_model_parallel_size=layout.tensor_size,
        sequence_parallel=layout.sequence_parallel,
        pipeline_model_parallel_size=layout.pipeline_size,
        virtual_pipeline_model_parallel_size=layout.num_chunks if is_interleaved else None,
        variable_seq_lengths=layout.pipeline_size > 1,
        # The only one that it takes together with variable lengths, experts or not; ours takes its place.
        moe_token_dispatcher_type="alltoall",
        # Batched, an interleaved pipeline would pair the shape of one microbatch with the tensor of another.
        overlap_p2p_comm=is_interleaved,
        batch_p2p_comm=not is_interleaved,
        **expert_options(
            family.experts(config),
            layout,
            overlap_shared_expert=options.overlap_shared_expert,
            dispatcher=options.dispatcher,
        ),
    )
    result.tree_windows = family.windows(config)
    result.gathers_slots = options.dispatcher == "allgather" and layout.expert_size > 1
    return result


def check_sizes(config: PretrainedConfig, family: DenseFamily, layout: ParallelLayout) -> None:
    """Refuse a model that does not divide over the ranks.

    Args:
        config: transformers configuration.
        family: Its family.
        layout: Where this rank stands.

    Raises:
        ConfigError: Naming the number.
    """
    split = layout.tensor_size
    for name, size in family.split_sizes(config).items():
        if size % split:
            raise ConfigError(f"The model's {name} {size} is not a multiple of tensor_parallel_size={split}.")
    stages = layout.pipeline_size * layout.num_chunks
    if config.num_hidden_layers % stages:
        raise ConfigError(
            f"The model's num_hidden_layers {config.num_hidden_layers} is not a multiple of {stages}, the product of "
            f"pipeline_parallel_size={layout.pipeline_size} and virtual_pipeline_parallel_size={layout.num_chunks}."
        )


def whole_model_rules(config: PretrainedConfig, family: DenseFamily, layout: ParallelLayout) -> list[WeightRule]:
    """Return the family's rules; in a pipeline the last stage has a copy of its own of a tied head."""
    rules = family.rules(config)
    if config.tie_word_embeddings and layout.pipeline_size > 1:
        embedding = next(rule for rule in rules if rule.role == "embedding")
        rules.append(dataclasses.replace(embedding, parameter="output_layer.weight", role="head"))
    return rules


def build_model(  # noqa: PLR0913 (which model, which part of it, and how)
    config: PretrainedConfig,
    family: DenseFamily,
    rules: list[WeightRule],
    *,
    folder: "Path | None",
    layout: ParallelLayout,
    dtype: torch.dtype,
    options: ModelOptions,
    seed: int,
) -> ModelChunks:
    """Build this rank's part of the model, frozen, with its weights loaded.

    Args:
        config: transformers configuration that `family.check` has passed.
        family: Its family.
        rules: What `whole_model_rules` returned.
        folder: Folder with safetensors, None for random weights.
        layout: Where this rank stands.
        dtype: Of the frozen weights and the activations.
        options: How it computes.
        seed: Of random weights.

    Returns:
        The chunks on this rank's device, every parameter frozen.

    Raises:
        ConfigError: If the sizes do not divide, FP8 is asked for a model with biases, or the checkpoint holds other
            weights than the model.
    """
    check_sizes(config, family, layout)
    biases = [rule.parameter for rule in rules if rule.parameter.endswith(".bias")]
    if options.fp8 is not None and biases:
        raise ConfigError(
            f"fp8={options.fp8!r} is supported for models without biases; this one has {len(biases)}, the first "
            f"{biases[0]}. Leave fp8 out."
        )
    with host_device(), _without_notices():
        mcore_config = transformer_config(config, family, layout, dtype=dtype, options=options)
        model = ModelChunks([_build_chunk(config, family, mcore_config, layout, k) for k in range(layout.num_chunks)])
        put_in_dispatchers(model)
    _add_biases(model, {rule.parameter for rule in rules}, dtype)
    model.to(device=compute_device(), dtype=dtype)
    keep_routers_wide(model)
    frequencies, _ = rotary_frequencies(config, family.heads(config).head_dim)
    for chunk in model:
        chunk.rotary_frequencies = frequencies.to(compute_device())
    model.requires_grad_(False)
    parameters, heads = model.whole_model_parameters(), family.heads(config)
    part = Part(
        tensor_rank=layout.tensor_rank,
        tensor_size=layout.tensor_size,
        expert_rank=layout.expert_rank,
        expert_size=layout.expert_size,
    )
    if folder is None:
        draw_parameters(rules, parameters, heads, std=config.initializer_range, seed=seed, part=part)
    else:
        ignored = functools.partial(family.is_unread, config)
        load_parameters(folder, rules, parameters, heads, ignored=ignored, part=part)
    return model


def compile_layers(model: ModelChunks) -> None:
    """Compile every layer's forward pass with torch.compile, when it first runs.

    Args:
        model: A model whose modules are final: adapters are attached.
    """
    allow_compilations()
    layers = [layer for chunk in model for layer in chunk.decoder.layers]
    for layer in layers:
        # Rows differ in length.
        layer.compile(dynamic=True)
    logger.warning(
        f"torch_compile=True: the first updates compile {len(layers)} layers, a second or more for each; those that "
        "follow are faster."
    )


def _build_chunk(
    config: PretrainedConfig,
    family: DenseFamily,
    mcore_config: TransformerConfig,
    layout: ParallelLayout,
    chunk: int,
) -> TreeGPTModel:
    num_layers = config.num_hidden_layers // (layout.pipeline_size * layout.num_chunks)
    frequencies, factor = rotary_frequencies(config, family.heads(config).head_dim)
    is_tied_here = bool(config.tie_word_embeddings) and layout.pipeline_size == 1
    first = (chunk * layout.pipeline_size + layout.pipeline_rank) * num_layers
    experts, is_fp8 = family.experts(config), mcore_config.fp8 is not None
    specs = [
        layer_spec(
            family,
            fp8=is_fp8,
            experts=experts if experts and experts.has_experts[layer] else None,
            gathers_slots=mcore_config.gathers_slots,
        )
        for layer in range(first, first + num_layers)
    ]
    return TreeGPTModel(
        config=mcore_config,
        transformer_layer_spec=TransformerBlockSubmodules(layer_specs=specs, layer_norm=FrozenRMSNorm),
        vocab_size=config.vocab_size,
        max_sequence_length=config.max_position_embeddings,
        pre_process=layout.pipeline_rank == 0 and chunk == 0,
        post_process=layout.pipeline_rank == layout.pipeline_size - 1 and chunk == layout.num_chunks - 1,
        share_embeddings_and_output_weights=is_tied_here,
        rotary_frequencies=frequencies,
        rotary_factor=factor,
        vp_stage=chunk if layout.num_chunks > 1 else None,
    )


@contextlib.contextmanager
def _without_notices() -> Iterator[None]:
    """Drop what Megatron-Core says about its own choices, which a user can do nothing about."""
    # megatron-core 0.19 logs that HybridModel replaces GPTModel; attention models need GPTModel until 0.16 is dropped.
    # 0.16 logs for every layer that it does not know our specification of an MLP, whose arguments are the usual ones.
    loggers = [logging.getLogger(module.__module__) for module in (GPTModel, TransformerLayer)]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            # megatron-core 0.16.1 deprecates its own defaults (cuda_graph_scope, an MLP without ffn_hidden_size).
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _add_biases(model: ModelChunks, names: set[str], dtype: torch.dtype) -> None:
    """Give each linear of this rank the bias that its family has.

    Megatron-Core has one switch for the biases of o_proj and the MLP together; Hugging Face models set them apart.
    """
    for name in names:
        linear = model.module(module_of(name)) if name.endswith(".bias") else None
        if linear is not None:
            zeros = torch.zeros(linear.weight.shape[0], dtype=dtype, device=linear.weight.device)
            linear.bias = torch.nn.Parameter(zeros)
