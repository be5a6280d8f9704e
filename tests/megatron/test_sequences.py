"""Attention sequence by sequence: what it is called with, the layout of ranks that share a row, and when it is chosen.

Transformer Engine needs a GPU; here a stand-in attends in plain torch from the arguments that its module gets, and
refuses what the real one refuses. test_sequences_gpu.py has the real one.
"""

import sys
import types
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from peft import LoraConfig

from hf_megapack import MegaPackConfig, MegaPackTrainer
from hf_megapack.batch import IGNORE_LABEL
from hf_megapack.data.collator import PrefixTreeCollator
from hf_megapack.errors import BackendError, ConfigError, DataError
from hf_megapack.loading import layout_alignment
from hf_megapack.megatron import choice, sequences
from hf_megapack.megatron.attention import TreeParams, dense_tree_attention, host_tree_attention
from hf_megapack.megatron.backend import MegatronBackend
from hf_megapack.megatron.sequences import Sequences, fused_sequence_attention
from hf_megapack.megatron.step import microbatch
from hf_megapack.packing import Alignment, sequence_boundaries, split_sequences
from tests.helpers.backend_args import backend_args
from tests.helpers.reference_model import CONFIGS
from tests.megatron.test_attention import random_qkv, shared_with
from tests.megatron.test_layouts import WHOLE, examples

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="test_sequences_gpu.py has the real kernels")


def flat_row(sizes: list[int]) -> TreeParams:
    """Return a row of sequences side by side."""
    ends = np.repeat(np.cumsum(sizes), sizes)
    positions = np.concatenate([np.arange(size) for size in sizes])
    return TreeParams(position_ids=torch.from_numpy(positions), subtree_end=torch.from_numpy(ends))


class StandIn(torch.nn.Module):
    """`transformer_engine.pytorch.DotProductAttention` for one rank, without kernels."""

    made: list["StandIn"]

    def __init__(self, num_attention_heads, kv_channels, *, num_gqa_groups, window_size, softmax_scale, **options):
        super().__init__()
        assert options == {"attention_dropout": 0.0, "qkv_format": "thd", "attn_mask_type": "padding_causal"}
        self.sizes = (num_attention_heads, num_gqa_groups, kv_channels)
        self.window, self.scale = window_size, softmax_scale
        self.deterministic = torch.are_deterministic_algorithms_enabled()
        self.made.append(self)

    def forward(self, query, key, value, *, cu_seqlens_q, max_seqlen_q, pad_between_seqs, **others):
        """Attend causally within every sequence."""
        assert not pad_between_seqs
        assert cu_seqlens_q.dtype == torch.int32
        assert others.pop("max_seqlen_kv") == max_seqlen_q == int(cu_seqlens_q.diff().max())
        assert {name for name, tensor in others.items() if tensor is cu_seqlens_q} == set(others)
        assert set(others) == {"cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded"}
        assert (query.shape[1], key.shape[1], query.shape[2]) == self.sizes
        if max_seqlen_q > 500:
            raise ValueError("No dot product attention backend is available for the provided inputs.")
        left, right = self.window
        outputs = []
        for start, stop in zip(cu_seqlens_q[:-1].tolist(), cu_seqlens_q[1:].tolist(), strict=True):
            q, k, v = (x[start:stop].transpose(0, 1) for x in (query, key, value))
            k, v = (x.repeat_interleave(self.sizes[0] // self.sizes[1], dim=0) for x in (k, v))
            before = torch.arange(stop - start)[:, None] - torch.arange(stop - start)
            seen = (-before <= right) & ((before <= left) if left >= 0 else True)
            scores = (q @ k.transpose(1, 2) * self.scale).masked_fill(~seen, float("-inf"))
            outputs.append((scores.softmax(-1) @ v).transpose(0, 1))
        return torch.cat(outputs).flatten(1)


@pytest.fixture
def stand_in(monkeypatch):
    """Put the stand-in where Transformer Engine would be imported from; return the modules that are made of it."""
    StandIn.made = []
    module = types.ModuleType("transformer_engine.pytorch")
    module.DotProductAttention, module.autocast = StandIn, lambda *, enabled: nullcontext()
    monkeypatch.setitem(sys.modules, "transformer_engine", types.ModuleType("transformer_engine"))
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", module)
    monkeypatch.setenv("NVTE_UNFUSED_ATTN", "0")
    sequences._transformer_engine_attention.cache_clear()
    yield StandIn.made
    sequences._transformer_engine_attention.cache_clear()


@pytest.mark.parametrize("window", [None, 1, 17])
def test_the_call_means_what_the_plain_twin_computes(stand_in, window):
    row = flat_row([50, 1, 33, 16])
    qkv = random_qkv(100)
    given = Sequences.of(sequence_boundaries(row.subtree_end.numpy()), None)
    expected = dense_tree_attention(*qkv, row, scale=0.3, window=window)
    for _ in range(3):
        output = fused_sequence_attention(*qkv, given, scale=0.3, window=window)
        torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
    assert len(stand_in) == 1, "layers share one module"


def test_a_module_is_made_anew_where_results_must_repeat(stand_in):
    row, qkv = flat_row([8, 8]), random_qkv(16)
    given = Sequences.of(sequence_boundaries(row.subtree_end.numpy()), None)
    try:
        for wanted in (False, True):
            torch.use_deterministic_algorithms(wanted)
            fused_sequence_attention(*qkv, given, scale=0.3)
    finally:
        torch.use_deterministic_algorithms(False)
    assert [made.deterministic for made in stand_in] == [False, True]


def test_no_kernel_is_an_error_that_says_for_what(stand_in):
    row = flat_row([501])
    given = Sequences.of(sequence_boundaries(row.subtree_end.numpy()), None)
    with pytest.raises(
        BackendError, match=r"no fused attention for 4 query heads.*at most 501 slots.*attention='tree'"
    ):
        fused_sequence_attention(*random_qkv(501), given, scale=0.3)


@pytest.mark.parametrize("attend", [dense_tree_attention, host_tree_attention])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_that_cut_sequences_attend_as_one_does(num_ranks, attend):
    sizes = [24 * n for n in (1, 5, 2, 30, 3)]
    row, boundaries = flat_row(sizes), np.cumsum([0, *sizes])
    query, key, value = (x.detach() for x in random_qkv(sum(sizes)))
    whole = dense_tree_attention(query, key, value, row, scale=0.3, window=20)
    for rank in range(num_ranks):
        shared = shared_with(row, num_ranks, rank, boundaries)
        slots, seen = shared.slots, shared.seen
        assert torch.equal(shared.params.local_positions, row.position_ids[slots])
        ours = attend(query[slots], key[seen], value[seen], shared.params, scale=0.3, window=20)
        torch.testing.assert_close(ours, whole[slots], rtol=1e-12, atol=1e-12)


def test_a_microbatch_has_its_sequences_and_every_label_once():
    alignment = Alignment(sequence_multiple=4, packed_multiple=64)
    collator = PrefixTreeCollator(packed_sequence_length=10**4, packing_strategy="mffd", alignment=alignment)
    (row,) = collator(examples()[:5]).rows
    seen, labels = [], []
    for rank in range(2):
        layout = SimpleNamespace(
            context_size=2, context_rank=rank, context_group="ranks", sequence_parallel=False, tensor_size=1
        )
        ids, params = microbatch(row, layout, num_loss_tokens=1, is_dummy=False, attention="thd")
        slots = split_sequences(sequence_boundaries(row.subtree_end), 2).slots[rank]
        assert params.sequences.group == "ranks"
        assert params.sequences.cu_seqlens.tolist() == sequence_boundaries(row.subtree_end).tolist()
        assert params.sequences.longest == max(-(-e["input_ids"].size // 4) * 4 for e in examples()[:5])
        assert np.array_equal(ids.numpy(), row.input_ids[slots])
        seen += slots[params.loss_slots].tolist()
        labels += params.loss_labels.tolist()
    learned = np.flatnonzero((row.labels != IGNORE_LABEL) & (row.loss_weights > 0))
    assert sorted(seen) == learned.tolist()
    assert sorted(labels) == sorted(row.labels[learned].tolist())
    assert seen


def test_a_row_of_trees_is_refused_by_a_backend_for_sequences():
    backend = MegatronBackend(CONFIGS["qwen3"](), backend_args(), WHOLE, attention="thd")
    with pytest.raises(DataError, match="share prefixes"):
        backend.run_step(PrefixTreeCollator(packed_sequence_length=2000)(examples()[::3]))


# Which attention is used.


def arguments(tmp_path, **options) -> MegaPackConfig:
    """Return a configuration of rows that share nothing."""
    defaults = {"packing_strategy": "ffd", "use_cpu": True, "report_to": "none"}
    return MegaPackConfig(output_dir=str(tmp_path), **(defaults | options))


@pytest.fixture
def on_gpu(monkeypatch):
    """Pretend to be on an H100 with Transformer Engine."""
    monkeypatch.setattr(choice, "has_gpu", lambda: True)
    monkeypatch.setattr(choice.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(choice, "gpu_kernels", lambda queries: "flash")
    return monkeypatch


def resolve(args, model="qwen3", strategy="ffd") -> str:
    """Return what is used for a tiny model."""
    return choice.resolve_attention(CONFIGS[model](), args, strategy)


def test_thd_without_a_gpu_is_refused_before_any_data_is_read(tmp_path, tiny_tokenizer):
    class Unreadable:
        def __getattr__(self, name):
            raise AssertionError(f"{name} was read")

    with pytest.raises(ConfigError, match=r"attention='thd' needs a GPU, and none is visible\. Use attention='tree'"):
        MegaPackTrainer(
            CONFIGS["qwen3"](),
            arguments(tmp_path, attention="thd"),
            train_dataset=Unreadable(),
            processing_class=tiny_tokenizer,
            peft_config=LoraConfig(target_modules="all-linear"),
        )


def test_thd_is_used_where_asked_for(on_gpu, tmp_path):
    assert resolve(arguments(tmp_path, attention="thd", bf16=True)) == "thd"
    assert resolve(arguments(tmp_path, attention="thd", bf16=True), "mistral_window") == "thd"
    assert resolve(arguments(tmp_path, attention="tree", bf16=True)) == "tree"


@pytest.mark.parametrize(
    ("options", "model", "capability", "message"),
    [
        ({"bf16": False}, "qwen3", (9, 0), "needs bf16=True, and bf16=False was given"),
        ({}, "qwen3", (7, 5), "compute capability 8.0 or later, and this one has 7.5"),
        ({"full_determinism": True}, "qwen3", (9, 0), "full_determinism=True needs .* 10.0 or later"),
        ({"context_parallel_size": 2}, "mistral_window", (9, 0), "context_parallel_size=2 has no sliding windows"),
        ({"context_parallel_size": 2}, "qwen2_window", (9, 0), "context_parallel_size=2 has no sliding windows"),
    ],
)
def test_thd_is_refused_by_name_where_it_cannot_run(on_gpu, tmp_path, options, model, capability, message):
    on_gpu.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    args = arguments(tmp_path, **({"attention": "thd", "bf16": True} | options))
    with pytest.raises(ConfigError, match=f"^attention='thd' .*{message}.* Use attention='tree'"):
        resolve(args, model)
    args.attention = "auto"
    on_gpu.setattr(choice, "FASTER_HEAD_SIZES", {"flash": (12, 16), "triton": (12, 16)})
    assert resolve(args, model) == "tree"


def test_thd_is_refused_where_torch_itself_asks_for_repeatable_results(on_gpu, tmp_path):
    args = arguments(tmp_path, attention="thd", bf16=True)
    on_gpu.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    with pytest.raises(ConfigError, match=r"with torch.use_deterministic_algorithms\(True\) needs .* 10.0 or later"):
        resolve(args)
    args.attention = "auto"
    on_gpu.setattr(choice, "FASTER_HEAD_SIZES", {"flash": (12, 16), "triton": (12, 16)})
    assert resolve(args) == "tree"


def test_thd_is_refused_for_heads_that_it_computes_wrongly(on_gpu, tmp_path):
    config = CONFIGS["qwen3"]()
    config.head_dim = 256
    args = arguments(tmp_path, attention="thd", bf16=True)
    with pytest.raises(ConfigError, match="serves heads of at most 128, and the model's have 256"):
        choice.resolve_attention(config, args, "ffd")
    args.attention = "auto"
    assert choice.resolve_attention(config, args, "ffd") == "tree"


def test_thd_without_transformer_engine_is_refused(on_gpu, tmp_path):
    on_gpu.setattr(choice.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install transformer-engine"):
        resolve(arguments(tmp_path, attention="thd", bf16=True))


def test_thd_with_a_collator_that_shares_is_refused(on_gpu, tmp_path):
    args = arguments(tmp_path, attention="thd", bf16=True)
    with pytest.raises(ConfigError, match="has no shared prefixes, and packing_strategy='prefix_tree'"):
        resolve(args, strategy="prefix_tree")
    args.attention = "auto"
    assert resolve(args, strategy="prefix_tree") == "tree"


def test_auto_takes_thd_only_where_it_was_measured_to_be_faster(on_gpu, tmp_path):
    args = arguments(tmp_path, bf16=True)
    on_gpu.setattr(choice, "FASTER_HEAD_SIZES", {"flash": (), "triton": (16,)})
    assert resolve(args) == "tree"
    on_gpu.setattr(choice, "gpu_kernels", lambda queries: "triton")
    assert resolve(args) == "thd"
    assert resolve(args, "llama") == "tree", "another size of heads"
    on_gpu.setattr(torch.cuda, "get_device_capability", lambda *_: (10, 0))
    on_gpu.setattr(choice, "gpu_kernels", lambda queries: "flash")
    args.full_determinism = True
    assert resolve(args) == "thd", "repeatable tree attention takes Triton's kernels"
    on_gpu.setattr(choice, "_on_all_ranks", lambda claim: False)
    assert resolve(args) == "tree"


def test_what_was_not_measured_stays_with_the_tree(monkeypatch):
    monkeypatch.setattr(choice, "FASTER_HEAD_SIZES", {"flash": (128,), "triton": ()})
    known = {"head_dim": 128, "tree_kernels": "flash", "context_parallel_size": 1}
    assert choice.choose_attention(**known) == "thd"
    for unknown in ({"context_parallel_size": 2}, {"head_dim": 64}, {"tree_kernels": "triton"}):
        assert choice.choose_attention(**(known | unknown)) == "tree"


def test_multiples_of_rows_follow_the_attention():
    sizes = {"context_parallel_size": 2, "tensor_parallel_size": 2, "sequence_parallel": True}
    assert layout_alignment(backend_args(**sizes), "tree") == Alignment(packed_multiple=256)
    assert layout_alignment(backend_args(**sizes), "thd") == Alignment(sequence_multiple=8, packed_multiple=8)
    given = backend_args(**sizes, sequence_length_multiple=24)
    assert layout_alignment(given, "thd").sequence_multiple == 24
    for name in ("sequence_length_multiple", "packed_length_multiple"):
        with pytest.raises(ConfigError, match=f"{name}=12 does not suit the layout, which needs a multiple of 8"):
            layout_alignment(backend_args(**sizes, **{name: 12}), "thd")
