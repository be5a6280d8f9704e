"""Transformer Engine's attention within sequences: against the plain twin, in a model, and over two GPUs."""

from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from transformers import Qwen3Config

from hf_megapack import MegaPackConfig, MegaPackTrainer
from hf_megapack.data.collator import PrefixTreeCollator
from hf_megapack.errors import BackendError
from hf_megapack.loading import layout_alignment
from hf_megapack.megatron.attention import dense_tree_attention
from hf_megapack.megatron.backend import MegatronBackend
from hf_megapack.megatron.sequences import Sequences, fused_sequence_attention
from hf_megapack.packing import sequence_boundaries
from tests.helpers.assets import load_conversations, load_tokenizer
from tests.helpers.backend_args import backend_args
from tests.helpers.reference_model import random_adapter, save_model, save_random_model
from tests.helpers.spawn import run_ranks
from tests.megatron.test_gpu import small_model
from tests.megatron.test_layouts import WHOLE, examples, full_gradients
from tests.megatron.test_parity import PEFT_CONFIG, conversation_examples
from tests.megatron.test_sequences import flat_row

# The last of them is the row's padding.
SIZES = [700, 1, 129, 64, 333, 2, 1000, 77]
BFLOAT16_BOUND = 2e-2
# Of a whole gradient in bfloat16, whose attention two kernels sum in different orders.
GRADIENT_BOUND = 5e-2
# With 0.2 a model's own gradients in bfloat16 are 117 % off those in float32, with this 2 %.
ADAPTER_STD = 0.05


@pytest.fixture(autouse=True)
def _has_transformer_engine():
    pytest.importorskip("transformer_engine", reason="Transformer Engine is not installed")


def queries_keys_values(num_slots: int, heads: tuple[int, int, int]) -> list[torch.Tensor]:
    """Return leaves in bfloat16 that lie in memory as a layer's do: keys and values in one block."""
    generator = torch.Generator("cuda").manual_seed(num_slots)
    num_queries, num_groups, size = heads
    query = torch.randn(num_slots, num_queries, size, generator=generator, device="cuda", dtype=torch.bfloat16)
    both = torch.randn(2, num_slots, num_groups, size, generator=generator, device="cuda", dtype=torch.bfloat16)
    return [tensor.detach().requires_grad_() for tensor in (query, *both.unbind())]


def on_gpu(sizes: list[int]) -> tuple:
    """Return a row of sequences on the GPU, and its sequences."""
    row = flat_row(sizes)
    given = Sequences.of(sequence_boundaries(row.subtree_end.numpy()), None)
    row.position_ids, row.subtree_end = row.position_ids.cuda(), row.subtree_end.cuda()
    return row, given


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 1, 100])
@pytest.mark.parametrize("heads", [(8, 2, 64), (4, 4, 64), (8, 2, 128), (4, 2, 16)])
def test_values_and_gradients_equal_those_of_the_plain_twin(heads, window):
    row, given = on_gpu(SIZES)
    qkv = queries_keys_values(sum(SIZES), heads)
    weights = torch.randn_like(qkv[0])
    results = []
    for attend, inputs, about in (
        (fused_sequence_attention, qkv, given),
        (dense_tree_attention, [x.double() for x in qkv], row),
    ):
        output = attend(*inputs, about, scale=heads[2] ** -0.5, window=window)
        results.append((output, *torch.autograd.grad((output * weights).sum(), qkv)))
    for ours, twin in zip(*results, strict=True):
        assert ours.shape == twin.shape
        # Who sees one key alone learns nothing about queries and keys: their gradients are rounding of zeros.
        size = twin.double().norm() if twin.any() else 1e-3 * weights.double().norm()
        assert (ours.double() - twin.double()).norm() < BFLOAT16_BOUND * size


@pytest.mark.gpu
def test_one_sequence_alone_and_a_forward_pass_without_gradients():
    for sizes in ([1], [513]):
        row, given = on_gpu(sizes)
        qkv = queries_keys_values(sum(sizes), (8, 2, 128))
        with torch.no_grad():
            ours = fused_sequence_attention(*qkv, given, scale=0.1)
            twin = dense_tree_attention(*(x.double() for x in qkv), row, scale=0.1)
        assert (ours.double() - twin).norm() < BFLOAT16_BOUND * twin.norm()


@pytest.mark.gpu
def test_gradients_repeat_to_the_bit_where_torch_asks_for_it():
    _, given = on_gpu(SIZES)
    qkv = queries_keys_values(sum(SIZES), (8, 2, 128))
    weights = torch.randn_like(qkv[0])
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        runs = []
        for _ in range(5):
            output = fused_sequence_attention(*qkv, given, scale=0.1)
            runs.append((output, *torch.autograd.grad((output * weights).sum(), qkv)))
    finally:
        torch.use_deterministic_algorithms(False)
    for run in runs[1:]:
        assert all(torch.equal(ours, first) for ours, first in zip(run, runs[0], strict=True))


@pytest.mark.gpu
def test_large_heads_are_refused_by_their_size():
    _, given = on_gpu([100])
    with pytest.raises(
        BackendError, match=r"no right gradients for heads of size 256; .*at most 128.*attention='tree'"
    ):
        fused_sequence_attention(*queries_keys_values(100, (2, 1, 256)), given, scale=0.1)


def relative_error(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """Return the norm of the difference of two gradients over that of the second."""
    assert ours.keys() == theirs.keys()
    square = sum((ours[key].double() - theirs[key].double()).square().sum() for key in theirs)
    return float((square / sum(gradient.double().square().sum() for gradient in theirs.values())).sqrt())


def updates(attention: str, **options) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train a small model in bfloat16 for two updates; return the losses and the first gradient."""
    args = backend_args(bf16=True, **options)
    backend = MegatronBackend(small_model(), args, PEFT_CONFIG, attention)
    backend.load_adapter(random_adapter(backend.adapter_state(), std=ADAPTER_STD))
    optimizer = torch.optim.AdamW(backend.parameters.values(), lr=1e-3)
    collator = PrefixTreeCollator(
        packed_sequence_length=4_096, packing_strategy="ffd", alignment=layout_alignment(args, attention)
    )
    batch, losses, gradients = collator(conversation_examples("each")), [], {}
    assert max(len(set(row.subtree_end.tolist())) for row in batch.rows) > 2
    for _ in range(2):
        losses.append(backend.run_step(batch).loss)
        gradients = gradients or {key: parameter.grad.clone() for key, parameter in backend.parameters.items()}
        optimizer.step()
    return losses, gradients


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options",
    [{}, {"recompute": "full"}, {"recompute": "auto"}, {"torch_compile": True}],
    ids=["plain", "full", "auto", "compiled"],
)
def test_training_within_sequences_follows_training_along_the_tree(options):
    (expected, theirs), (losses, ours) = updates("tree", **options), updates("thd", **options)
    assert expected[0] != expected[1]
    assert losses == pytest.approx(expected, rel=2e-3)
    assert relative_error(ours, theirs) < GRADIENT_BOUND


@pytest.mark.gpu
@pytest.mark.parametrize(("fp8", "recompute"), [("tensorwise", "off"), ("delayed", "full"), ("blockwise", "selective")])
def test_fp8_leaves_attention_in_bfloat16(fp8, recompute):
    options = {"fp8": fp8, "recompute": recompute}
    (expected, _), (losses, gradients) = updates("tree", **options), updates("thd", **options)
    assert losses == pytest.approx(expected, rel=1e-2)
    assert all(gradient.isfinite().all() and gradient.any() for gradient in gradients.values())


@pytest.mark.gpu
def test_the_trainer_takes_thd_by_name(tmp_path):
    save_random_model("qwen3", tmp_path / "base")
    histories = {}
    for attention in ("tree", "thd"):
        args = MegaPackConfig(
            output_dir=str(tmp_path / attention),
            attention=attention,
            packing_strategy="ffd",
            max_steps=2,
            logging_steps=1,
            per_device_train_batch_size=4,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = MegaPackTrainer(
            str(tmp_path / "base"),
            args,
            train_dataset=[{"messages": row["messages"]} for row in load_conversations("mtbench")],
            processing_class=load_tokenizer(),
            peft_config=LoraConfig(r=4, target_modules="all-linear"),
        )
        trainer.train()
        histories[attention] = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(histories["thd"]) == 2
    assert histories["thd"] == pytest.approx(histories["tree"], rel=1e-2)


def one_update(sizes: dict, attention: str, folder: Path) -> dict:
    """Return loss, norm and whole gradients of one update of a saved model in bfloat16."""
    args = backend_args(bf16=True, **sizes)
    backend = MegatronBackend(str(folder), args, WHOLE, attention)
    backend.load_adapter(random_adapter(backend.adapter_state(), std=ADAPTER_STD))
    collator = PrefixTreeCollator(
        packed_sequence_length=1000, packing_strategy="ffd", alignment=layout_alignment(args, attention)
    )
    batch = collator(examples())
    result = {"loss": backend.run_step(batch).loss, "norm": backend.grad_norm(), "rows": len(batch.rows)}
    result["evaluated"] = backend.eval_step(batch).loss
    gradients = {key: gradient.cpu() for key, gradient in full_gradients(backend).items()}
    backend.close()
    return result | {"gradients": gradients}


def run_two(rank: int, folder: Path) -> None:
    """Cut sequences over two GPUs, with and without recomputation."""
    for recompute in ("off", "full"):
        sizes = {"context_parallel_size": 2, "recompute": recompute}
        torch.save(one_update(sizes, "thd", folder), folder / f"{recompute}-{rank}.pt")


@pytest.mark.multi_gpu(2)
def test_two_gpus_that_cut_sequences_compute_what_one_computes(tmp_path):
    config = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    save_model(
        Qwen3Config(**config, vocab_size=320, intermediate_size=512, num_hidden_layers=2, initializer_range=0.05),
        tmp_path,
    )
    run_ranks(run_two, 2, tmp_path, timeout_seconds=400)
    expected = {attention: one_update({}, attention, tmp_path) for attention in ("tree", "thd")}
    assert expected["tree"]["rows"] > 2
    for recompute in ("off", "full"):
        for rank in range(2):
            ours = torch.load(tmp_path / f"{recompute}-{rank}.pt", weights_only=False)
            for theirs in expected.values():
                assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-3)
                assert ours["evaluated"] == pytest.approx(theirs["loss"], rel=1e-3)
                assert ours["norm"] == pytest.approx(theirs["norm"], rel=GRADIENT_BOUND)
                assert relative_error(ours["gradients"], theirs["gradients"]) < GRADIENT_BOUND
