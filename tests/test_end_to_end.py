"""The trainer on Megatron-Core from raw conversations to a PEFT folder, against a training loop in plain torch."""

import json
from pathlib import Path

import pytest
import torch
from peft import AutoPeftModelForCausalLM, LoraConfig
from transformers import TrainerCallback, get_linear_schedule_with_warmup

from hf_megapack import MegaPackConfig, MegaPackTrainer
from hf_megapack.errors import BackendError, ConfigError
from tests.helpers.assets import load_conversations, load_tokenizer
from tests.helpers.reference_model import load_reference, peft_factors, reference_step, save_random_model
from tests.helpers.spawn import run_ranks


def conversations() -> list[dict]:
    """Short chats, and one conversation with tools."""
    rows = [*load_conversations("mtbench"), load_conversations("bfcl")[0]]
    return [{key: row[key] for key in ("messages", "tools") if row.get(key)} for row in rows]


def build(folder: Path, base: Path | str, **options) -> MegaPackTrainer:
    """Return a trainer as a script or notebook cell would."""
    defaults = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 6,
        "learning_rate": 3e-3,
        "logging_steps": 1,
        "assistant_mask": "each",
        "save_strategy": "no",
        "disable_tqdm": True,
        "report_to": "none",
        "dataloader_num_workers": 0,
        "use_cpu": True,
    }
    return MegaPackTrainer(
        model=str(base),
        args=MegaPackConfig(output_dir=str(folder), **(defaults | options)),
        train_dataset=conversations(),
        processing_class=load_tokenizer(),
        peft_config=LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM"),
    )


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A tiny random Qwen3."""
    folder = tmp_path_factory.mktemp("base")
    save_random_model("qwen3", folder)
    load_tokenizer().save_pretrained(folder)
    return folder


def logged(trainer: MegaPackTrainer, name: str) -> list[float]:
    """Return a quantity's values from the log history."""
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def adapter_of(trainer: MegaPackTrainer) -> dict[str, torch.Tensor]:
    """Return the adapter's full tensors."""
    return trainer.backend.adapter_state()


def test_training_is_the_plain_loop_over_the_same_examples(base, tmp_path):
    """Losses, clipped gradient norms, learning rates and the adapter of a loop in transformers, peft and torch."""
    trainer = build(tmp_path / "out", base, max_grad_norm=0.5)
    reference = load_reference(base, trainer.peft_config, adapter_of(trainer))
    factors = list(peft_factors(reference).values())
    optimizer = torch.optim.AdamW(factors, lr=3e-3, weight_decay=0.0)
    schedule = get_linear_schedule_with_warmup(optimizer, 0, 6)
    trainer.train()

    sampler = trainer.get_train_dataloader().batch_sampler
    losses, norms, rates = [], [], []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for indices in sampler:
            if len(losses) == 6:
                break
            loss, _ = reference_step(reference, [trainer.train_dataset[index] for index in indices])
            losses.append(loss)
            norms.append(float(torch.nn.utils.clip_grad_norm_(factors, 0.5)))
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            schedule.step()
    assert len(sampler) < 6, "the run must reach a second epoch"
    assert logged(trainer, "loss") == pytest.approx(losses, rel=1e-5)
    assert logged(trainer, "grad_norm") == pytest.approx(norms, rel=1e-4)
    assert max(norms) > 0.5, "clipping must have been at work"
    assert logged(trainer, "learning_rate") == pytest.approx(rates, rel=1e-9)
    for key, value in peft_factors(reference).items():
        torch.testing.assert_close(adapter_of(trainer)[key], value.detach(), rtol=0, atol=1e-4)


def test_the_saved_folder_is_what_plain_peft_loads(base, tmp_path):
    trainer = build(tmp_path, base)
    trainer.train()
    trainer.save_model()
    reloaded = AutoPeftModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert set(peft_factors(reloaded)) == set(trainer.backend.parameters)
    row = trainer.data_collator([trainer.train_dataset[0]]).rows[0]
    with torch.no_grad():
        expected = reloaded(input_ids=torch.from_numpy(row.input_ids).long()[None]).logits[0]
    logits = trainer.backend.logits(row)
    assert (logits - expected).abs().max() < 1e-5 * expected.abs().max()
    assert load_tokenizer().get_vocab() == type(load_tokenizer()).from_pretrained(tmp_path).get_vocab()

    continued = MegaPackTrainer(
        model=str(tmp_path),
        args=MegaPackConfig(output_dir=str(tmp_path / "more"), use_cpu=True, report_to="none"),
        train_dataset=conversations(),
        processing_class=load_tokenizer(),
    )
    assert all(torch.equal(value, adapter_of(trainer)[key]) for key, value in adapter_of(continued).items())


def test_resuming_equals_never_stopping_bit_for_bit_with_recompute_and_a_packing_worker(base, tmp_path):
    options = {"save_strategy": "steps", "save_steps": 2, "gradient_checkpointing": True, "dataloader_num_workers": 1}
    whole = build(tmp_path / "whole", base, **options)
    whole.train()
    resumed = build(tmp_path / "whole", base, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert logged(resumed, "loss") == logged(whole, "loss")
    assert all(torch.equal(value, adapter_of(whole)[key]) for key, value in adapter_of(resumed).items())


def test_a_configuration_trains_from_random_weights(base, tmp_path):
    """The loss of a random model is about ln(vocabulary)."""
    config = load_reference(base, LoraConfig(target_modules=["q_proj"]), None).config
    config.initializer_range = 0.02
    trainer = MegaPackTrainer(
        model=config,
        args=MegaPackConfig(
            output_dir=str(tmp_path), max_steps=1, logging_steps=1, report_to="none", use_cpu=True, disable_tqdm=True
        ),
        train_dataset=conversations(),
        processing_class=load_tokenizer(),
        peft_config=LoraConfig(target_modules="all-linear"),
    )
    trainer.train()
    (loss,) = logged(trainer, "loss")
    assert abs(loss - torch.log(torch.tensor(float(config.vocab_size)))) < 0.1


class _Interrupt(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 2:
            raise KeyboardInterrupt


def test_after_an_interruption_training_starts_anew_in_the_same_process(base, tmp_path):
    trainer = build(tmp_path, base)
    interrupt = _Interrupt()
    trainer.add_callback(interrupt)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.remove_callback(interrupt)
    trainer.train()
    assert trainer.state.global_step == 6


def test_a_frozen_adapter_stops_the_first_update_with_its_name(base, tmp_path):
    trainer = build(tmp_path, base)
    key = "base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"
    trainer.backend.parameters[key].requires_grad_(False)
    with pytest.raises(BackendError, match=r"layers\.1\.mlp\.up_proj\.lora_B"):
        trainer.train()


def test_wrong_models_are_refused_before_weights_are_read(base, tmp_path):
    for change, message in (
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"attention_dropout": 0.1}, "attention_dropout=0.1"),
        ({"is_causal": False}, "is_causal=False"),
        ({"transformers_weights": "other.safetensors"}, "transformers_weights='other.safetensors'"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "length of each sequence"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": "1e4", "factor": 2.0}}, "no rotary frequencies"),
        ({"num_key_value_heads": 3}, "not a multiple of num_key_value_heads=3"),
        ({"per_layer_config": {"0": {"rms_norm_eps": 0.1}}}, "per_layer_config"),
        ({"per_layer_config": {"1": {"skip": ["mlp"]}}}, "per_layer_config"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    ):
        folder = tmp_path / next(iter(change))
        folder.mkdir(exist_ok=True)
        config = json.loads((base / "config.json").read_text()) | change
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(ConfigError, match=message):
            build(tmp_path / "out", folder)


def _run_rank(rank: int, folder: Path, base: Path) -> None:
    trainer = build(folder, base, gradient_accumulation_steps=1, packed_sequence_length=2500)
    trainer.train()
    trainer.save_model()
    state = adapter_of(trainer)
    if rank == 1:
        torch.save((logged(trainer, "loss"), logged(trainer, "grad_norm"), state), folder / "rank1.pt")


def test_two_data_parallel_ranks_train_as_one(base, tmp_path):
    single = build(tmp_path / "single", base, packed_sequence_length=2500)
    single.train()
    single.save_model()
    run_ranks(_run_rank, 2, tmp_path / "double", base, starts_group=False)
    losses, norms, state = torch.load(tmp_path / "double" / "rank1.pt")
    assert losses == pytest.approx(logged(single, "loss"), rel=1e-6)
    assert norms == pytest.approx(logged(single, "grad_norm"), rel=1e-5)
    for key, value in adapter_of(single).items():
        torch.testing.assert_close(state[key], value, rtol=0, atol=1e-5)
