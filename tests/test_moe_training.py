"""The trainer with a mixture of experts, from raw conversations to a folder and back."""

import math
from pathlib import Path

import pytest
import torch
from peft import AutoPeftModelForCausalLM

from hf_megapack import MegaPackConfig, MegaPackTrainer
from hf_megapack.errors import BackendError
from tests.helpers.assets import load_tokenizer
from tests.helpers.moe_reference import MOE_CONFIGS, save_moe_model
from tests.helpers.spawn import run_ranks
from tests.test_end_to_end import adapter_of, build, conversations, logged

RUN = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "packed_sequence_length": 2500}


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A tiny random Qwen3-MoE with a dense layer, for the small tokenizer."""
    folder = tmp_path_factory.mktemp("base")
    config = MOE_CONFIGS["qwen3_moe"]()
    config.vocab_size = config.max_position_embeddings = 4096
    save_moe_model(config, folder)
    load_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def trained(base, tmp_path_factory) -> tuple[MegaPackTrainer, Path]:
    """A trainer after four updates, and its folder."""
    folder = tmp_path_factory.mktemp("run")
    trainer = build(folder, base, **RUN)
    before = adapter_of(trainer)
    trainer.train()
    trainer.save_model()
    after = adapter_of(trainer)
    assert any(value.dim() == 3 for value in after.values())
    assert all(not torch.equal(value, before[key]) for key, value in after.items() if ".lora_B." in key)
    return trainer, folder


def test_training_lowers_the_loss_and_counts_active_weights_alone(trained):
    trainer, _ = trained
    losses = logged(trainer, "loss")
    assert losses[-1] < losses[0]
    model, config = trainer.backend.model, trainer.backend.hf_config
    sizes = {name: p.numel() for name, p in model.named_parameters() if "embed" not in name}
    experts = sum(size for name, size in sizes.items() if ".mlp.experts." in name)
    others = sum(sizes.values()) - experts
    expected = others + experts * config.num_experts_per_tok // config.num_experts
    assert trainer.backend.num_active_weights == expected


def test_a_resumed_run_ends_with_the_same_bits(trained, base, tmp_path):
    trainer, folder = trained
    resumed = build(tmp_path, base, **RUN)
    resumed.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    expected = adapter_of(trainer)
    assert all(torch.equal(value, expected[key]) for key, value in adapter_of(resumed).items())


# peft looks for its patterns among modules only; the parameters of experts that they match are none.
@pytest.mark.filterwarnings("ignore:The following .*_pattern keys did not match:RuntimeWarning")
def test_the_saved_folder_is_what_plain_peft_loads_and_what_training_continues_from(trained, tmp_path):
    trainer, folder = trained
    reloaded = AutoPeftModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    row = trainer.data_collator([trainer.train_dataset[0]]).rows[0]
    with torch.no_grad():
        expected = reloaded(input_ids=torch.from_numpy(row.input_ids).long()[None]).logits[0]
    logits = trainer.backend.logits(row)
    assert (logits - expected).abs().max() < 1e-5 * expected.abs().max()
    continued = MegaPackTrainer(
        model=str(folder),
        args=MegaPackConfig(output_dir=str(tmp_path), use_cpu=True, report_to="none"),
        train_dataset=conversations(),
        processing_class=load_tokenizer(),
    )
    assert all(torch.equal(value, adapter_of(trainer)[key]) for key, value in adapter_of(continued).items())


@pytest.mark.parametrize("factor", ["A", "B"])
def test_frozen_experts_stop_the_first_update_with_their_name(base, tmp_path, factor):
    trainer = build(tmp_path, base)
    key = f"base_model.model.model.layers.2.mlp.experts.up_proj.lora_{factor}.weight"
    trainer.backend.parameters[key].requires_grad_(False)
    with pytest.raises(BackendError, match=rf"layers\.2\.mlp\.experts\.up_proj\.lora_{factor}"):
        trainer.train()


def train_with_split_experts(rank: int, base: Path, folder: Path, started: Path) -> None:
    """Resume on two ranks what one rank has saved."""
    options = {**RUN, "expert_parallel_size": 2, "gradient_accumulation_steps": 1}
    trainer = build(folder, base, **options)
    trainer.train(resume_from_checkpoint=str(started))
    losses, adapter = logged(trainer, "loss"), adapter_of(trainer)
    if rank == 0:
        torch.save((losses, adapter), folder / "seen.pt")


def test_two_ranks_with_half_the_experts_each_continue_the_run_of_one(trained, base, tmp_path):
    trainer, folder = trained
    run_ranks(train_with_split_experts, 2, base, tmp_path, folder / "checkpoint-2")
    losses, adapter = torch.load(tmp_path / "seen.pt")
    assert len(losses) >= 2
    assert losses[-2:] == pytest.approx(logged(trainer, "loss")[-2:], rel=1e-5)
    assert all(map(math.isfinite, losses))
    for key, value in adapter_of(trainer).items():
        torch.testing.assert_close(adapter[key], value, rtol=0, atol=1e-4)
