"""What MegaPackTrainer saves, and that training goes on from it as if it had never stopped."""

import math
import shutil

import numpy as np
import pytest
import torch
from peft import LoraConfig

from hf_megapack import saving
from hf_megapack.errors import ConfigError, ExportError, NonFiniteResultError
from tests.helpers.assets import MODEL
from tests.helpers.fake_backend import PREFIX
from tests.helpers.fake_trainer import (
    LORA,
    FakeTrainer,
    Recorder,
    adapter,
    assert_equal_adapters,
    examples_of,
    rows_of_four_prompts,
    token_rows,
)


@pytest.mark.parametrize(
    "options",
    [
        {"rows": 10, "gradient_accumulation_steps": 1},
        {"rows": 4, "gradient_accumulation_steps": 1},
        {"rows": 10, "gradient_accumulation_steps": 2, "optim": "sgd", "optim_args": "momentum=0.9"},
        {"rows": 10, "lr_scheduler_type": "cosine", "warmup_steps": 1, "dataloader_num_workers": 1},
        {"rows": rows_of_four_prompts(6), "group_by_prefix": True},
        {"rows": rows_of_four_prompts(11), "group_by_prefix": True, "shuffle_unit": "example"},
    ],
    ids=["mid-epoch", "epoch boundary", "accumulation and momentum", "cosine, worker", "grouped", "grouped examples"],
)
def test_resuming_is_bit_equal_to_no_interruption(make, tmp_path, options):
    whole = make(max_steps=4, **options)
    whole.train()
    first = make(max_steps=4, save_strategy="steps", save_steps=2, **options)
    first.train()
    shutil.rmtree(tmp_path / "run" / "checkpoint-4")
    resumed = make(max_steps=4, **options)
    resumed.train(resume_from_checkpoint=True)
    assert len(resumed.backend.calls) == 2
    assert_equal_adapters(adapter(whole), adapter(resumed))
    moments = [t.backend.optimizer_state(t.optimizer.optimizer) for t in (whole, resumed)]
    assert moments[0].keys() == moments[1].keys()
    assert moments[0], "an optimizer without state would show nothing"
    assert all(torch.equal(moments[0][key], moments[1][key]) for key in moments[0])
    assert whole.state.num_input_tokens_seen == resumed.state.num_input_tokens_seen
    assert [examples_of(b) for b in whole.backend.calls[2:]] == [examples_of(b) for b in resumed.backend.calls]


def test_another_optimizer_cannot_go_on_with_a_checkpoint(make):
    make(save_strategy="steps", save_steps=2, max_steps=2).train()
    resumed = make(optim="sgd", optim_args="momentum=0.9")
    with pytest.raises(ExportError, match="is that of AdamW, and this run's optimizer is SGD"):
        resumed.train(resume_from_checkpoint=True)


def test_a_checkpoint_holds_everything_under_peft_names(make, tmp_path):
    trainer = make(save_strategy="steps", save_steps=1, save_total_limit=2)
    trainer.train()
    run = tmp_path / "run"
    assert sorted(p.name for p in run.iterdir()) == ["checkpoint-3", "checkpoint-4"]
    files = {p.name for p in (run / "checkpoint-4").iterdir()}
    expected = {
        "adapter_model.safetensors",
        "adapter_config.json",
        "scheduler.pt",
        "rng_state.pth",
        "megapack_run.json",
    }
    assert expected | {"trainer_state.json", "tokenizer.json"} <= files
    assert "model.safetensors" not in files


def test_a_failure_while_saving_leaves_no_half_checkpoint(make, tmp_path, monkeypatch):
    trainer = make(save_strategy="steps", save_steps=2)

    def fail(*args, **kwargs):
        raise OSError("disk full")

    trainer.add_callback(Recorder())
    monkeypatch.setattr(saving.torch, "save", fail)
    with pytest.raises(ExportError, match="disk full"):
        trainer.train()
    assert list((tmp_path / "run").iterdir()) == []


def test_training_again_into_the_same_folder_replaces_its_checkpoints(make, tmp_path):
    make(save_strategy="steps", save_steps=2, max_steps=2).train()
    second = make(save_strategy="steps", save_steps=2, max_steps=2, learning_rate=0.1)
    second.train()
    continued = make(max_steps=3, learning_rate=0.1)
    continued.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    assert continued.state.global_step == 3
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["checkpoint-2"]


def test_the_best_adapter_is_loaded_at_the_end(make, tmp_path):
    rows = token_rows(4)
    trainer = make(
        rows=rows, eval_dataset=rows, eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1,
        load_best_model_at_end=True, max_steps=4, learning_rate=30.0, optim="sgd", max_grad_norm=1.0,
    )  # fmt: skip
    recorder = Recorder()
    trainer.add_callback(recorder)
    trainer.train()
    losses = [line["eval_loss"] for line in trainer.state.log_history if "eval_loss" in line]
    best = int(np.argmin(losses))
    assert best < 3, "the last update must not be the best, or nothing is shown"
    kept = {name: p.detach() for name, p in trainer.backend.model.factors.items()}
    assert_equal_adapters(kept, recorder.adapters[best])
    assert trainer.state.best_model_checkpoint == str(tmp_path / "run" / f"checkpoint-{best + 1}")


def test_a_checkpoint_without_optimizer_cannot_be_resumed_but_begins_a_new_run(make, tmp_path, tiny_tokenizer):
    first = make(save_strategy="steps", save_steps=2, max_steps=2, save_only_model=True)
    first.train()
    folder = tmp_path / "run" / "checkpoint-2"
    with pytest.raises(ExportError, match="save_only_model=True"):
        make(max_steps=3).train(resume_from_checkpoint=str(folder))
    again = FakeTrainer(str(folder), first.args)
    assert again.processing_class.chat_template == tiny_tokenizer.chat_template
    assert_equal_adapters(adapter(again), adapter(first))
    assert again.backend.base_model_name == MODEL
    with pytest.raises(ConfigError, match="leave peft_config out"):
        FakeTrainer(str(folder), first.args, peft_config=LoraConfig(**LORA))


def test_resuming_with_another_scaling_is_refused(make, tmp_path, tiny_tokenizer):
    first = make(save_strategy="steps", save_steps=2, max_steps=2)
    first.train()
    other = FakeTrainer(
        MODEL,
        first.args,
        train_dataset=token_rows(10),
        processing_class=tiny_tokenizer,
        peft_config=LoraConfig(**(LORA | {"lora_alpha": 8})),
    )
    with pytest.raises(ConfigError, match=r"alpha=8.*was trained with .*alpha=4"):
        other.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))


def test_save_model_writes_an_adapter_and_refuses_one_that_is_not_finite(make, tmp_path):
    trainer = make()
    trainer.save_model(str(tmp_path / "adapter"))
    assert {"adapter_model.safetensors", "adapter_config.json"} <= {p.name for p in (tmp_path / "adapter").iterdir()}
    with torch.no_grad():
        trainer.backend.parameters[f"{PREFIX}q_proj.lora_B.weight"][0, 0] = math.nan
    with pytest.raises(NonFiniteResultError, match=r"q_proj\.lora_B"):
        trainer.save_model(str(tmp_path / "poisoned"))
    assert not (tmp_path / "poisoned" / "adapter_model.safetensors").exists()
