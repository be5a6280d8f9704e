"""Every Megatron-Core symbol that the package touches, checked against the installed version."""

import inspect
import re
import sys

import pytest
import torch

import hf_megapack.megatron  # noqa: F401 (the quiet import comes first)

# isort: split
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func, p2p_communication, schedules
from megatron.core.tensor_parallel import mappings
from megatron.core.tensor_parallel import random as mcore_random
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import Attention, SelfAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe import moe_utils, token_dispatcher
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher, MoETokenDispatcher
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer

from hf_megapack.megatron.experts import Experts
from hf_megapack.megatron.handoff import STEPS, handoff_methods
from hf_megapack.megatron.layers import FrozenRMSNorm, ResidualRMSNorm
from hf_megapack.megatron.moe import put_in_experts

SIGNATURES = [
    (GPTModel.__init__, "config transformer_layer_spec vocab_size max_sequence_length position_embedding_type"),
    (GPTModel.__init__, "share_embeddings_and_output_weights"),
    (GPTModel.__init__, "pre_process post_process vp_stage"),
    (GPTModel.forward, "input_ids position_ids attention_mask packed_seq_params"),
    (GPTModel._preprocess, "input_ids position_ids decoder_input inference_context packed_seq_params padding_mask"),
    (GPTModel._postprocess, "hidden_states packed_seq_params"),
    (GPTModel.shared_embedding_or_output_weight, ""),
    (get_forward_backward_func, ""),
    (schedules.forward_backward_no_pipelining, "forward_step_func data_iterator model num_microbatches seq_length"),
    (schedules.forward_backward_no_pipelining, "micro_batch_size forward_only"),
    (schedules.forward_backward_pipelining_without_interleaving, "forward_step_func data_iterator model"),
    (schedules.forward_backward_pipelining_without_interleaving, "num_microbatches seq_length micro_batch_size"),
    (schedules.forward_backward_pipelining_without_interleaving, "forward_only"),
    (schedules.forward_backward_pipelining_with_interleaving, "forward_step_func data_iterator model"),
    (schedules.forward_backward_pipelining_with_interleaving, "num_microbatches seq_length micro_batch_size"),
    (schedules.forward_backward_pipelining_with_interleaving, "forward_only"),
    (mappings.copy_to_tensor_model_parallel_region, "input_"),
    (mappings.gather_from_sequence_parallel_region, "input_ tensor_parallel_output_grad"),
    (mappings.reduce_from_tensor_model_parallel_region, "input_"),
    (mappings.reduce_scatter_to_sequence_parallel_region, "input_"),
    (TransformerBlockSubmodules, "layer_specs layer_norm"),
    (DotProductAttention.__init__, "config layer_number attn_mask_type attention_type softmax_scale"),
    (DotProductAttention.forward, "query key value attention_mask attn_mask_type packed_seq_params"),
    (PackedSeqParams.__init__, "qkv_format max_seqlen_q max_seqlen_kv"),
    (parallel_state.initialize_model_parallel, "tensor_model_parallel_size pipeline_model_parallel_size"),
    (parallel_state.initialize_model_parallel, "virtual_pipeline_model_parallel_size context_parallel_size"),
    (parallel_state.initialize_model_parallel, "create_gloo_process_groups"),
    (parallel_state.destroy_model_parallel, ""),
    (parallel_state.get_tensor_model_parallel_group, ""),
    (parallel_state.get_pipeline_model_parallel_rank, ""),
    (parallel_state.get_pipeline_model_parallel_world_size, ""),
    (parallel_state.get_pipeline_model_parallel_group, ""),
    (parallel_state.get_virtual_pipeline_model_parallel_world_size, ""),
    (parallel_state.get_context_parallel_rank, ""),
    (parallel_state.get_context_parallel_world_size, ""),
    (parallel_state.get_context_parallel_group, ""),
    (parallel_state.get_model_parallel_group, ""),
    (parallel_state.model_parallel_is_initialized, ""),
    (parallel_state.get_tensor_model_parallel_rank, ""),
    (parallel_state.get_tensor_model_parallel_world_size, ""),
    (parallel_state.get_data_parallel_rank, ""),
    (parallel_state.get_data_parallel_world_size, ""),
    (parallel_state.get_data_parallel_group, "with_context_parallel"),
    (parallel_state.initialize_model_parallel, "expert_model_parallel_size expert_tensor_parallel_size"),
    (parallel_state.get_expert_model_parallel_rank, ""),
    (parallel_state.get_expert_model_parallel_world_size, ""),
    (parallel_state.get_expert_data_parallel_rank, ""),
    (parallel_state.get_expert_data_parallel_group, ""),
    (parallel_state.get_expert_tensor_model_pipeline_parallel_group, ""),
    (MoESubmodules, "experts router shared_experts"),
    (TopKRouter.__init__, "config pg_collection"),
    (TopKRouter.gating, "input"),
    (TopKRouter._apply_expert_bias, "routing_map padding_mask"),
    (TopKRouter.routing, "logits padding_mask"),
    (MoETokenDispatcher.__init__, "config pg_collection"),
    (TransformerLayer._forward_attention, "hidden_states packed_seq_params"),
    (parallel_state.get_expert_model_parallel_group, ""),
    (MoETokenDispatcher.dispatch_preprocess, "tokens routing_map probs"),
    (MoETokenDispatcher.token_dispatch, "hidden_states probs"),
    (MoETokenDispatcher.dispatch_postprocess, "hidden_states probs"),
    (MoETokenDispatcher.combine_preprocess, "hidden_states"),
    (MoETokenDispatcher.token_combine, "hidden_states"),
    (MoETokenDispatcher.combine_postprocess, "hidden_states"),
    (moe_utils.get_default_pg_collection, ""),
    (mappings.all_to_all, "group input_ output_split_sizes_ input_split_sizes"),
    (mcore_random._get_cuda_rng_state, ""),
    (mcore_random._set_cuda_rng_state, "new_state"),
    (mcore_random.model_parallel_cuda_manual_seed, "seed"),
    (mcore_random.get_cuda_rng_tracker, ""),
    (mcore_random.CudaRNGStatesTracker.set_states, "states"),
    (MLPSubmodules, "linear_fc1 linear_fc2"),
    (SharedExpertMLP.__init__, "config submodules gate pg_collection"),
    (SharedExpertMLP.pre_forward_comm, "input"),
    (SharedExpertMLP.linear_fc1_forward_and_act, "overlapped_comm_output"),
    (SharedExpertMLP.linear_fc2_forward, "overlapped_comm_output"),
    (SharedExpertMLP.post_forward_comm, ""),
    (SharedExpertMLP.get_output, ""),
    (MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize, "point tokens_per_expert"),
]
CONFIG_FIELDS = (
    "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels normalization "
    "layernorm_epsilon qk_layernorm gated_linear_unit activation_func add_bias_linear attention_dropout hidden_dropout "
    "softmax_scale params_dtype pipeline_dtype bf16 use_cpu_initialization perform_initialization "
    "calculate_per_token_loss gradient_accumulation_fusion bias_activation_fusion "
    "bias_dropout_fusion masked_softmax_fusion recompute_granularity recompute_method recompute_num_layers "
    "fp8 fp8_recipe "
    "tensor_model_parallel_size sequence_parallel pipeline_model_parallel_size virtual_pipeline_model_parallel_size "
    "variable_seq_lengths moe_token_dispatcher_type overlap_p2p_comm batch_p2p_comm num_moe_experts moe_layer_freq "
    "moe_ffn_hidden_size moe_shared_expert_intermediate_size moe_shared_expert_gate moe_shared_expert_overlap "
    "moe_router_topk moe_router_score_function moe_router_pre_softmax moe_router_topk_scaling_factor "
    "moe_router_num_groups moe_router_group_topk moe_router_dtype moe_router_enable_expert_bias "
    "moe_router_bias_update_rate moe_router_load_balancing_type moe_aux_loss_coeff expert_model_parallel_size "
    "expert_tensor_parallel_size"
)


@pytest.mark.parametrize(("function", "names"), SIGNATURES, ids=lambda x: getattr(x, "__qualname__", None))
def test_function_takes_the_arguments_that_we_pass(function, names):
    assert set(names.split()) <= set(inspect.signature(function).parameters)


def test_config_has_the_fields_that_we_set():
    assert set(CONFIG_FIELDS.split()) <= set(inspect.signature(TransformerConfig).parameters)


def test_preprocess_returns_hidden_states_then_rotary_angles():
    """`TreeGPTModel._preprocess` replaces the second of what this method returns."""
    source = inspect.getsource(GPTModel._preprocess)
    names = source[source.index("preproc_output = (") :].split(")")[0]
    assert [name.strip() for name in names.split("(")[1].split(",")[:2]] == ["decoder_input", "rotary_pos_emb"]


def test_forward_hands_the_row_to_preprocess_decoder_and_postprocess():
    source = inspect.getsource(GPTModel.forward)
    assert source.count("packed_seq_params=packed_seq_params") == 3


def test_local_spec_builds_from_the_modules_that_we_adapt():
    spec = get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
    attention = spec.submodules.self_attention
    assert attention.module is SelfAttention
    assert attention.submodules.linear_qkv is ColumnParallelLinear
    assert attention.submodules.linear_proj is RowParallelLinear
    assert hasattr(attention.submodules, "core_attention")


def test_our_norm_takes_the_place_of_every_norm_in_the_spec():
    """Megatron-Core's own refuses sequence parallelism; each place calls it with these arguments alone."""
    spec = get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
    attention = spec.submodules.self_attention.submodules
    for owner, name in [
        (spec.submodules, "input_layernorm"),
        (spec.submodules, "pre_mlp_layernorm"),
        (attention, "q_layernorm"),
        (attention, "k_layernorm"),
    ]:
        assert hasattr(owner, name)
    assert FrozenRMSNorm(config=None, hidden_size=3, eps=1e-3).eps == 1e-3
    assert "final_layernorm" in inspect.getsource(TransformerBlock)


def test_layers_take_the_residual_stream_from_the_norms_that_return_it():
    hidden = torch.randn(2, 1, 3)
    outputs = ResidualRMSNorm(config=None, hidden_size=3)(hidden)
    source = inspect.getsource(TransformerLayer)
    for name in ("input_layernorm", "pre_mlp_layernorm"):
        assert (f"{name}_output, residual = {name}_output" in source) is isinstance(outputs, tuple)
    normalised, stream = outputs if isinstance(outputs, tuple) else (outputs, hidden)
    assert torch.equal(stream, hidden)
    torch.testing.assert_close(normalised, hidden * (hidden.square().mean(-1, keepdim=True) + 1e-5).rsqrt())


def test_attention_and_mlp_have_the_parts_that_ours_run():
    parts = inspect.getsource(Attention.__init__) + inspect.getsource(SelfAttention.__init__)
    for name in ("linear_qkv", "linear_proj", "core_attention", "q_layernorm", "k_layernorm"):
        assert f"self.{name} = " in parts
    for name in ("num_query_groups_per_partition", "hidden_size_per_attention_head"):
        assert f"self.{name} = " in parts
    assert {"hidden_states", "attention_mask", "rotary_pos_emb", "packed_seq_params"} <= set(
        inspect.signature(SelfAttention.forward).parameters
    )
    for name in ("linear_fc1", "linear_fc2"):
        assert f"self.{name} = " in inspect.getsource(MLP.__init__)


def test_a_layer_hands_its_norms_results_on_as_they_are():
    """What a norm notes on its result must reach the linear that reads it."""
    source = inspect.getsource(TransformerLayer)
    for name in ("input_layernorm", "pre_mlp_layernorm"):
        assert re.search(rf"self\.{name}\(|\(self\.{name}, ", source)


def test_a_block_recomputes_as_many_layers_as_the_config_says_at_the_time():
    block = inspect.getsource(TransformerBlock) + inspect.getsource(sys.modules[TransformerBlock.__module__])
    assert "recompute_granularity == 'full' and self.training" in block


def test_layers_are_given_the_row_by_name():
    """`GatheringLayer` reads it and hands it on; both when a layer runs and when it runs again."""
    assert get_gpt_layer_local_spec(4, normalization="RMSNorm").module is TransformerLayer
    block = inspect.getsource(TransformerBlock) + inspect.getsource(sys.modules[TransformerBlock.__module__])
    assert block.count("packed_seq_params=packed_seq_params") >= 2
    assert "self._forward_attention(*args, **kwargs)" in inspect.getsource(TransformerLayer.forward)


def test_a_pipeline_asks_for_nothing_of_cuda_that_has_no_stand_in():
    source = inspect.getsource(p2p_communication)
    assert set(re.findall(r"torch\.cuda\.(\w+)", source)) == {"current_device", "synchronize"}


def test_random_states_are_forked_under_the_name_that_we_set():
    assert mcore_random._MODEL_PARALLEL_RNG_TRACKER_NAME == "model-parallel-rng"


def test_dispatchers_call_only_the_methods_of_the_shared_expert_that_we_keep_on_its_stream():
    called = set(re.findall(r"self\.shared_experts\.(\w+)\(", inspect.getsource(token_dispatcher)))
    assert called == {*handoff_methods(SharedExpertMLP), *STEPS}


def test_a_layer_with_experts_takes_our_router_experts_and_dispatcher():
    """`put_in_experts` and `put_in_dispatchers` replace what this source builds; it gives the order of steps."""
    spec = get_gpt_layer_local_spec(4, qk_layernorm=True, normalization="RMSNorm")
    put_in_experts(spec.submodules.mlp)
    source = inspect.getsource(MoELayer)
    for name in ("submodules.experts", "submodules.router", "self.token_dispatcher = MoEAlltoAllTokenDispatcher("):
        assert name in source
    steps = [
        "dispatch_preprocess(\n            hidden_states, routing_map, probs",
        "token_dispatch(hidden_states, probs)",
        "dispatch_postprocess(hidden_states, probs)",
        "combine_preprocess(expert_output)",
        "token_combine(output)",
        "combine_postprocess(output)",
    ]
    places = [source.find(step) for step in steps]
    assert all(place > 0 for place in places), places
    assert places == sorted(places)


def test_experts_are_called_with_tokens_counts_and_weights():
    for owner in (SequentialMLP.forward, Experts.forward):
        assert len(inspect.signature(owner).parameters) == 4
    signature = list(inspect.signature(SequentialMLP.__init__).parameters)
    assert signature[1:3] == ["num_local_experts", "config"]
    assert list(inspect.signature(Experts.__init__).parameters)[1:3] == signature[1:3]


def test_a_dispatcher_of_megatron_asks_for_one_cuda_stream_when_it_is_made():
    assert re.findall(r"torch\.cuda\.(\w+)", inspect.getsource(MoEAlltoAllTokenDispatcher.__init__)) == ["Stream"]
