"""Build the Megatron-Core model of a Hugging Face configuration, with tree attention, our rotary angles and our loss.

Megatron-Core's GPTModel is used as it is, through its layer spec and two overridden methods: what goes into the first
layer (`_preprocess`) and what is made of the last hidden state (`_postprocess`). Both exist under the same names in
0.16.1 and 0.19.2.
"""

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn.functional import silu
from transformers import PretrainedConfig

from hf_megapack.errors import ConfigError
from hf_megapack.megatron.attention import TreeAttention, TreeParams
from hf_megapack.megatron.families import DenseFamily
from hf_megapack.megatron.host import compute_device, has_gpu, host_device
from hf_megapack.megatron.loss import LossTerms, frozen_head_loss
from hf_megapack.megatron.rotary import rotary_angles, rotary_frequencies
from hf_megapack.weights.load import load_parameters
from hf_megapack.weights.names import module_of

if TYPE_CHECKING:
    from pathlib import Path

    from hf_megapack.megatron.parallel import ParallelLayout


class TreeGPTModel(GPTModel):
    """A GPTModel that rotates by position and returns `LossTerms` of one row."""

    def __init__(self, *, rotary_frequencies: torch.Tensor, **kwargs):
        super().__init__(position_embedding_type="none", **kwargs)
        self.register_buffer("rotary_frequencies", rotary_frequencies, persistent=False)

    def _preprocess(self, *args, packed_seq_params: TreeParams, **kwargs):
        hidden_states, _, *rest = super()._preprocess(*args, packed_seq_params=packed_seq_params, **kwargs)
        if self.config.recompute_granularity is not None and hidden_states is not None and torch.is_grad_enabled():
            # A recomputed layer passes gradients only if its input asks for one; the frozen embedding does not.
            hidden_states = hidden_states.detach().requires_grad_()
        return hidden_states, rotary_angles(packed_seq_params.position_ids, self.rotary_frequencies), *rest

    def _postprocess(self, hidden_states, *, packed_seq_params: TreeParams, **_unused) -> torch.Tensor | LossTerms:
        if not self.post_process:
            return hidden_states
        head = (
            self.shared_embedding_or_output_weight()
            if self.share_embeddings_and_output_weights
            else self.output_layer.weight
        )
        hidden_TD = hidden_states.squeeze(1)
        if packed_seq_params.wants_logits:
            return hidden_TD @ head.T
        return frozen_head_loss(
            hidden_TD.index_select(0, packed_seq_params.loss_slots),
            head,
            packed_seq_params.loss_labels,
            packed_seq_params.loss_counts,
            packed_seq_params.loss_scale,
        )


def transformer_config(
    config: PretrainedConfig, family: DenseFamily, *, dtype: torch.dtype, recompute: bool, initialize: bool
) -> TransformerConfig:
    """Map a Hugging Face configuration to Megatron-Core's.

    Args:
        config: transformers configuration.
        family: Its family.
        dtype: Of the frozen weights and the activations.
        recompute: Whether every layer's activations are computed again in the backward pass.
        initialize: Whether weights are drawn at random rather than loaded.

    Returns:
        The configuration, with each layer's sliding window in `tree_windows`.
    """
    heads = family.heads(config)
    _, rotary_factor = rotary_frequencies(config, heads.head_dim)
    init_method = _normal(config.initializer_range)
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
        # transformers scales cosine and sine alike, so scores grow by the square.
        softmax_scale=heads.head_dim**-0.5 * rotary_factor**2,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=not has_gpu(),
        perform_initialization=initialize,
        init_method=init_method,
        output_layer_init_method=init_method,
        calculate_per_token_loss=True,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        recompute_granularity="full" if recompute else None,
        recompute_method="uniform" if recompute else None,
        recompute_num_layers=1 if recompute else None,
    )
    result.tree_windows = family.windows(config)
    return result


def _normal(std: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def initialize(tensor: torch.Tensor) -> torch.Tensor:
        return torch.nn.init.normal_(tensor, mean=0.0, std=std)

    return initialize


def build_model(
    config: PretrainedConfig,
    family: DenseFamily,
    *,
    folder: "Path | None",
    layout: "ParallelLayout",
    dtype: torch.dtype,
    recompute: bool,
) -> TreeGPTModel:
    """Build this rank's model, frozen, with its weights loaded.

    Args:
        config: transformers configuration that `family.check` has passed.
        family: Its family.
        folder: Folder with safetensors, None for random weights.
        layout: Where this rank stands.
        dtype: Of the frozen weights and the activations.
        recompute: Whether activations are computed again in the backward pass.

    Returns:
        The model on this rank's device, every parameter frozen.

    Raises:
        ConfigError: If the vocabulary does not divide, or the checkpoint holds other weights than the model.
        BackendError: If the checkpoint does not fit the configuration.
    """
    if config.vocab_size % layout.tensor_size:
        raise ConfigError(f"vocab_size {config.vocab_size} is not a multiple of {layout.tensor_size} tensor ranks.")
    spec = get_gpt_layer_local_spec(qk_layernorm=family.has_qk_norm, normalization="RMSNorm")
    spec.submodules.self_attention.submodules.core_attention = TreeAttention
    frequencies, _ = rotary_frequencies(config, family.heads(config).head_dim)
    with host_device(), _without_notices():
        model = TreeGPTModel(
            config=transformer_config(config, family, dtype=dtype, recompute=recompute, initialize=folder is None),
            transformer_layer_spec=spec,
            vocab_size=config.vocab_size,
            max_sequence_length=config.max_position_embeddings,
            share_embeddings_and_output_weights=bool(config.tie_word_embeddings),
            rotary_frequencies=frequencies,
        )
    rules = family.rules(config)
    _add_biases(model, {rule.parameter for rule in rules}, dtype)
    model.to(device=compute_device(), dtype=dtype)
    model.rotary_frequencies = frequencies.to(compute_device())
    model.requires_grad_(False)
    if folder is not None:
        load_parameters(
            folder,
            rules,
            dict(model.named_parameters()),
            family.heads(config),
            ignored=("lm_head.weight",) if config.tie_word_embeddings else (),
            part=layout.tensor_rank,
            num_parts=layout.tensor_size,
        )
    return model


@contextlib.contextmanager
def _without_notices() -> Iterator[None]:
    """Drop what Megatron-Core says about its own choices, which a user can do nothing about."""
    # megatron-core 0.19 logs that HybridModel replaces GPTModel; attention models need GPTModel until 0.16 is dropped.
    logger = logging.getLogger(GPTModel.__module__)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            # megatron-core 0.16.1 deprecates its own defaults (cuda_graph_scope, an MLP without ffn_hidden_size).
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _add_biases(model: torch.nn.Module, names: set[str], dtype: torch.dtype) -> None:
    """Give a linear the bias that its family has.

    Megatron-Core has one switch for the biases of o_proj and the MLP together; Hugging Face models set them apart.
    """
    for name in names:
        if not name.endswith(".bias"):
            continue
        linear = model.get_submodule(module_of(name))
        linear.bias = torch.nn.Parameter(torch.zeros(linear.weight.shape[0], dtype=dtype, device=linear.weight.device))
