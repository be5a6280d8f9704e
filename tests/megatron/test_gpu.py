"""What differs on a GPU: attention's kernels and the device of everything else."""

import dataclasses
import functools
from types import SimpleNamespace

import pytest
import torch
from transformers import Qwen3Config

from hf_megapack.data.collator import PrefixTreeCollator
from hf_megapack.kernels.pointwise import HeadNorm
from hf_megapack.megatron import attention
from hf_megapack.megatron.backend import MegatronBackend
from hf_megapack.megatron.context import part_of_row
from hf_megapack.megatron.recompute import Choice, LayerMemory, RecomputePolicy
from hf_megapack.megatron.shared_heads import split_and_fetch_heads
from hf_megapack.megatron.step import forward_row, microbatch
from hf_megapack.packing import Alignment
from tests.helpers.backend_args import backend_args
from tests.helpers.reference_model import (
    load_reference,
    mape,
    random_adapter,
    reference_step,
    save_random_model,
)
from tests.helpers.thread_ranks import run_on_threads
from tests.helpers.trees import two_branches
from tests.megatron.test_attention import random_row, shared_with
from tests.megatron.test_parity import PEFT_CONFIG, conversation_examples

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize(("kernels", "head_dim"), [("triton", 64), ("flash", 64), ("flash", 128), ("flash", 256)])
@pytest.mark.parametrize("num_slots", [60, 128, 1000, 3333])
def test_attention_equals_its_twin_in_values_and_gradients(num_slots, kernels, head_dim, window, monkeypatch):
    if kernels == "flash" and not attention.has_flash_attention():
        pytest.skip("flash-attn-4 is not installed")
    monkeypatch.setattr(attention, "gpu_kernels", lambda query: kernels)
    row = random_row(num_slots, seed=num_slots, longest=600)
    row.position_ids, row.subtree_end = row.position_ids.cuda(), row.subtree_end.cuda()
    for dtype, bound in ((torch.bfloat16, 2e-2), *([(torch.float32, 1e-4)] if kernels == "triton" else [])):
        assert_like_its_twin(row, head_dim, dtype, bound, window)


@pytest.mark.parametrize("kernels", ["triton", "flash"])
@pytest.mark.parametrize("window", [None, 300])
def test_attention_of_a_shared_row_equals_its_twin(kernels, window, monkeypatch):
    if kernels == "flash" and not attention.has_flash_attention():
        pytest.skip("flash-attn-4 is not installed")
    monkeypatch.setattr(attention, "gpu_kernels", lambda query: kernels)
    for rank in range(2):
        row = shared_with(random_row(1536, seed=1, longest=600), 2, rank).params
        row.position_ids, row.subtree_end = row.position_ids.cuda(), row.subtree_end.cuda()
        row.share = dataclasses.replace(row.share, slots=row.share.slots.cuda())
        assert_like_its_twin(row, 64, torch.bfloat16, 2e-2, window)


def split_both_ways(group):
    """Return heads and gradients of one rank that shares a row, with the kernel and in plain PyTorch."""
    row = [x.numpy() for x in two_branches(fork=1000, branch=1400, num_slots=2048)]
    layout = SimpleNamespace(context_size=group.size(), context_rank=group.rank(), context_group=group)
    share = part_of_row(*row, layout).share
    generator = torch.Generator("cuda").manual_seed(group.rank())
    random = functools.partial(torch.randn, generator=generator, device="cuda")
    mixed, angles = random(share.slots.numel(), 4 * 6 * 128), random(share.slots.numel(), 1, 64)
    rotation = torch.stack((angles.cos(), angles.sin()))
    norm = HeadNorm(random(128), random(128), 1e-5)
    weights = [random(n, heads, 128) for n, heads in ((len(mixed), 16), (share.num_seen, 4), (share.num_seen, 4))]
    results = []
    for dtypes in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        own = mixed.bfloat16().to(dtypes[0]).requires_grad_()
        weights_of_norm = (x.bfloat16().to(dtypes[0]) for x in norm[:2])
        heads = split_and_fetch_heads(
            own, rotation.to(dtypes[1]), HeadNorm(*weights_of_norm, norm.eps), share, num_groups=4, head_dim=128
        )
        # The engine's one thread for the device would wait in the first rank for the second.
        with torch.autograd.set_multithreading_enabled(False):
            grads = torch.autograd.grad(heads, own, [w.bfloat16().to(dtypes[0]) for w in weights])
        results.append([x.detach() for x in (*heads, *grads)])
    return results


def test_ranks_that_share_a_row_split_heads_as_plain_pytorch_does(monkeypatch):
    for ours, plain in run_on_threads(2, split_both_ways, monkeypatch):
        for mine, twin in zip(ours, plain, strict=True):
            assert (mine.double() - twin).norm() < 5e-3 * twin.norm()


@pytest.mark.parametrize("num_heads", [10, 24])
def test_attention_of_more_heads_than_take_turns_equals_its_twin(num_heads):
    if not attention.has_flash_attention():
        pytest.skip("flash-attn-4 is not installed")
    row = random_row(1500, seed=4, longest=600)
    row.position_ids, row.subtree_end = row.position_ids.cuda(), row.subtree_end.cuda()
    assert_like_its_twin(row, 128, torch.bfloat16, 2e-2, None, num_heads=num_heads)


def test_attention_compiles_nothing_for_another_length(monkeypatch):
    if not attention.has_flash_attention():
        pytest.skip("flash-attn-4 is not installed")
    from flash_attn.cute import interface

    caches = [interface._flash_attn_fwd.compile_cache.cache, interface._flash_attn_bwd.compile_cache.cache]
    compiled = []
    for num_slots in (700, 1000, 1100, 3333):
        row = random_row(num_slots, seed=num_slots, longest=600)
        row.position_ids, row.subtree_end = row.position_ids.cuda(), row.subtree_end.cuda()
        assert_like_its_twin(row, 64, torch.bfloat16, 2e-2, None)
        compiled.append([len(cache) for cache in caches])
    assert compiled[0][0] > 0
    assert compiled[1:] == compiled[:-1]


def assert_like_its_twin(row, head_dim, dtype, bound, window, num_heads=8):
    generator, num_queries = torch.Generator("cuda").manual_seed(0), row.local_positions.numel()
    num_slots = row.subtree_end.numel()
    shapes = ((num_queries, num_heads, head_dim), (num_slots, 2, head_dim), (num_slots, 2, head_dim))
    qkv = [torch.randn(s, generator=generator, device="cuda", dtype=dtype, requires_grad=True) for s in shapes]
    weights = torch.randn(shapes[0], generator=generator, device="cuda", dtype=dtype)
    results = []
    for attend, inputs in (
        (attention.gpu_tree_attention, qkv),
        (attention.dense_tree_attention, [x.double() for x in qkv]),
    ):
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


def small_model(num_layers: int = 2) -> Qwen3Config:
    sizes = {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 8, "num_key_value_heads": 4}
    return Qwen3Config(**sizes, num_hidden_layers=num_layers, vocab_size=4096, head_dim=128)


def requested_bytes() -> int:
    """Return what tensors take, without what the allocator rounds up."""
    return torch.cuda.memory_stats()["requested_bytes.all.current"]


@pytest.mark.parametrize("choice", [Choice(0, False), Choice(0, True), Choice(2, False)], ids=["off", "some", "full"])
def test_the_memory_of_a_layer_is_what_the_gpu_holds(choice, monkeypatch):
    """Between models of 2 and 6 layers; LoRA's narrow tensors and row statistics are the rest."""
    monkeypatch.setattr(
        RecomputePolicy,
        "_choose",
        lambda _, num_slots, num_layers: choice._replace(num_full=num_layers if choice.num_full else 0),
    )
    held = []
    for num_layers in (2, 6):
        backend = MegatronBackend(small_model(num_layers), backend_args(recompute="auto", bf16=True), PEFT_CONFIG)
        (row,) = PrefixTreeCollator(packed_sequence_length=100_000)(conversation_examples("last")).rows
        backend._fill_stacks(wants_grad=True)
        backend.model.train()
        inputs = microbatch(row, backend.layout, num_loss_tokens=1, is_dummy=False)
        backend._recompute.apply(backend.model[0], inputs[0].numel())
        forward_row(backend.model[0], *inputs).loss.backward()
        before = requested_bytes()
        terms = forward_row(backend.model[0], *inputs)
        held.append(requested_bytes() - before)
        terms.loss.backward()
        # A graph that is left over holds its row until the next one replaces it, which would count as less held.
        del terms, inputs
    memory = LayerMemory.of(backend.model[0].config)
    expected = memory.full if choice.num_full else memory.selective if choice.is_selective else memory.kept
    assert (held[1] - held[0]) / 4 / len(row.input_ids) == pytest.approx(expected, rel=0.1)


def loss_and_gradients(**options) -> tuple[float, dict[str, torch.Tensor]]:
    """Return those of one update of a small model in bfloat16 whose adapter is not zero."""
    backend = MegatronBackend(small_model(), backend_args(bf16=True, **options), PEFT_CONFIG)
    backend.load_adapter(random_adapter(backend.adapter_state()))
    alignment = Alignment.for_layout(fp8=options.get("fp8"))
    collator = PrefixTreeCollator(packed_sequence_length=4_096, alignment=alignment)
    result = backend.run_step(collator(conversation_examples("each")))
    return result.loss, {key: parameter.grad.clone() for key, parameter in backend.parameters.items()}


@pytest.mark.parametrize("fp8", ["tensorwise", "delayed", "blockwise"])
def test_fp8_follows_bfloat16(fp8):
    pytest.importorskip("transformer_engine")
    (loss, gradients), (loss_fp8, gradients_fp8) = loss_and_gradients(), loss_and_gradients(fp8=fp8)
    assert loss_fp8 == pytest.approx(loss, rel=0.01)
    assert loss_fp8 != loss
    assert gradients.keys() == gradients_fp8.keys()
    assert all(gradient.isfinite().all() and gradient.any() for gradient in gradients_fp8.values())


def test_compiled_layers_follow_eager_ones():
    (loss, gradients), (loss_compiled, compiled) = loss_and_gradients(), loss_and_gradients(torch_compile=True)
    assert loss_compiled == pytest.approx(loss, rel=1e-3)
    assert gradients.keys() == compiled.keys()
    assert all(gradient.isfinite().all() and gradient.any() for gradient in compiled.values())
