"""Adapters of experts from the trainer to peft and back: what is saved is what was trained, in either format."""

from pathlib import Path

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hf_megapack import MegaPackConfig, MegaPackTrainer
from hf_megapack.weights import verify_with_peft
from tests.helpers.assets import load_tokenizer
from tests.helpers.tiny_moe import CONFIGS, FAMILIES

pytestmark = [
    # peft 0.21.2 reads a property that transformers 5.24 renamed; delete once peft reads is_activation_checkpointing.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    # peft looks for pattern keys among modules alone, and warns although parameters match them.
    pytest.mark.filterwarnings("ignore:The following .*_pattern keys did not match:RuntimeWarning"),
]


@pytest.fixture(params=FAMILIES)
def base(request, tmp_path) -> Path:
    """A tiny random model of a family, with the tokenizer of the tests."""
    tokenizer, config = load_tokenizer(), CONFIGS[request.param]()
    config.vocab_size = len(tokenizer)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def build(model: Path, folder: Path, peft_config: LoraConfig | None = None, **options) -> MegaPackTrainer:
    ids = [list(range(5 + row, 25 + row)) for row in range(4)]
    args = MegaPackConfig(
        output_dir=str(folder),
        max_steps=2,
        save_steps=1,
        per_device_train_batch_size=2,
        packed_sequence_length=64,
        learning_rate=1e-2,
        dataloader_num_workers=0,
        disable_tqdm=True,
        report_to="none",
        use_cpu=True,
        **options,
    )
    return MegaPackTrainer(
        model=str(model),
        args=args,
        train_dataset=Dataset.from_list([{"input_ids": row, "labels": [-100] * 3 + row[3:]} for row in ids]),
        peft_config=peft_config,
    )


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


@pytest.mark.parametrize("export_format", ["peft", "per_expert"])
def test_saved_adapter_is_the_trained_one(base, tmp_path, export_format):
    """In peft, when resuming and when continued from: the same tensors, bit for bit."""
    peft_config = LoraConfig(r=2, target_modules="all-linear")
    trainer = build(base, tmp_path / "run", peft_config, export_format=export_format)
    trainer.train()
    trainer.save_model(tmp_path / "adapter")
    trained = trainer.backend.adapter_state()
    assert any(tensor.dim() == 3 and tensor.any() for key, tensor in trained.items() if "lora_B" in key)
    if export_format == "peft":
        verify_with_peft(tmp_path / "adapter", AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32))
    resumed = build(base, tmp_path / "run", peft_config, export_format=export_format)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run/checkpoint-1"))
    assert_same(resumed.backend.adapter_state(), trained)
    assert_same(build(tmp_path / "adapter", tmp_path / "next").backend.adapter_state(), trained)


def test_adapter_of_peft_is_continued_and_keeps_its_layout(base, tmp_path):
    """One A for gate and up: loaded, saved again with the same tensors, and trained as what it is."""
    torch.manual_seed(5)
    config = LoraConfig(
        r=2,
        target_modules=["q_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        init_lora_weights=False,
        base_model_name_or_path=str(base),
    )
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), config)
    model.save_pretrained(tmp_path / "theirs", save_embedding_layers=False)
    theirs = load_file(tmp_path / "theirs/adapter_model.safetensors")
    trainer = build(tmp_path / "theirs", tmp_path / "run")
    trainer.save_model(tmp_path / "ours")
    assert_same(load_file(tmp_path / "ours/adapter_model.safetensors"), theirs)
    trainer.train()
    trainer.save_model(tmp_path / "trained")
    trained = load_file(tmp_path / "trained/adapter_model.safetensors")
    assert {key: tensor.shape for key, tensor in trained.items()} == {k: tensor.shape for k, tensor in theirs.items()}
    assert all(not torch.equal(trained[key], theirs[key]) for key in theirs)
    verify_with_peft(tmp_path / "trained", AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32))
