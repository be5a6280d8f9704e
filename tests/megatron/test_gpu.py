"""What differs on a GPU: FlexAttention's kernels and the device of everything else."""

import pytest
import torch

from hf_megapack.data.collator import PrefixTreeCollator
from hf_megapack.megatron.attention import dense_tree_attention, flex_tree_attention
from hf_megapack.megatron.backend import MegatronBackend
from tests.helpers.backend_args import backend_args
from tests.helpers.reference_model import (
    load_reference,
    mape,
    random_adapter,
    reference_step,
    save_random_model,
)
from tests.megatron.test_attention import random_row
from tests.megatron.test_parity import PEFT_CONFIG, conversation_examples

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-4), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("num_slots", [128, 1000, 3333])
def test_flex_attention_equals_its_twin_in_values_and_gradients(num_slots, dtype, bound, window):
    row = random_row(num_slots, seed=num_slots, longest=600)
    row.position_ids, row.subtree_end = row.position_ids.cuda(), row.subtree_end.cuda()
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = ((num_slots, 8, 64), (num_slots, 2, 64), (num_slots, 2, 64))
    qkv = [torch.randn(s, generator=generator, device="cuda", dtype=dtype, requires_grad=True) for s in shapes]
    weights = torch.randn(shapes[0], generator=generator, device="cuda", dtype=dtype)
    results = []
    for attend, inputs in ((flex_tree_attention, qkv), (dense_tree_attention, [x.double() for x in qkv])):
        output = attend(*inputs, row, scale=0.125, window=window)
        results.append((output, *torch.autograd.grad((output * weights).sum(), qkv)))
    for ours, twin in zip(*results, strict=True):
        assert (ours.double() - twin.double()).norm() < bound * twin.double().norm()


@pytest.mark.parametrize("recompute", ["off", "full"])
@pytest.mark.parametrize("name", ["llama", "qwen2_window", "qwen3"])
def test_packed_training_follows_transformers(name, recompute, tmp_path, monkeypatch):
    """IEEE float32 on both sides; wider bounds than on the CPU because the kernels sum in another order."""
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    save_random_model(name, tmp_path)
    backend = MegatronBackend(str(tmp_path), backend_args(recompute=recompute), PEFT_CONFIG)
    assert all(parameter.is_cuda for parameter in backend.model.parameters())
    state = random_adapter(backend.adapter_state())
    backend.load_adapter(state)
    examples = conversation_examples("each")
    loss, gradients = reference_step(load_reference(tmp_path, PEFT_CONFIG, state), examples)
    for capacity in (100_000, 2_500):
        result = backend.run_step(PrefixTreeCollator(packed_sequence_length=capacity)(examples))
        assert result.loss == pytest.approx(loss, rel=1e-4)
        assert max(mape(backend.parameters[k].grad.cpu(), g) for k, g in gradients.items()) < 0.05
