"""Arguments, data and subclasses that MegaPackTrainer takes, and those that it refuses by name."""

import json
from contextlib import nullcontext

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from transformers import EarlyStoppingCallback, LlamaConfig, TrainingArguments

from hf_megapack.arguments import UNCALLED_METHODS
from hf_megapack.config import MegaPackConfig
from hf_megapack.data.collator import PrefixTreeCollator
from hf_megapack.errors import ConfigError, DataError, ExportError
from hf_megapack.loading import build_collator
from hf_megapack.trained import find_example_limit, resolve_adapter
from tests.helpers.assets import MODEL
from tests.helpers.fake_backend import FakeBackend
from tests.helpers.fake_trainer import (
    LORA,
    FakeTrainer,
    Recorder,
    token_rows,
)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"compute_metrics": len}, ConfigError, "compute_metrics is not supported"),
        ({"compute_loss_func": len}, ConfigError, "compute_loss_func is not supported"),
        ({"preprocess_logits_for_metrics": len}, ConfigError, "preprocess_logits_for_metrics is not"),
        ({"quantization_config": {}}, ConfigError, "quantization_config is not supported"),
        ({"formatting_func": len}, ConfigError, "formatting_func is not supported"),
        ({"model_init": len}, ConfigError, "model_init is not supported"),
        ({"packing": True}, ConfigError, "packing is a TRL argument"),
        ({"max_seq_length": 10}, ConfigError, "max_seq_length is a TRL argument .*packed_sequence_length"),
        ({"tokenizer": None}, ConfigError, "tokenizer is a TRL argument .*processing_class"),
        ({"nonsense": 1}, TypeError, "unexpected argument 'nonsense'"),
        ({"data_collator": list}, ConfigError, "must be a PrefixTreeCollator"),
        ({"peft_config": None}, ConfigError, "must be a peft.LoraConfig"),
        ({"peft_config": LoraConfig(r=4, use_dora=True)}, ConfigError, "use_dora"),
        ({"optimizer_cls_and_kwargs": (torch.optim.Adafactor, {})}, ConfigError, "Adafactor.*not supported"),
        ({"model": torch.nn.Linear(1, 1)}, ConfigError, "model is a Linear"),
        ({"train_dataset": 3}, ConfigError, "int"),
        ({"processing_class": None, "model": LlamaConfig()}, ConfigError, "has no tokenizer"),
        ({"optimizers": None}, ConfigError, "optimizers=None is no pair"),
        ({"callbacks": Recorder()}, ConfigError, "callbacks is a Recorder. Give a list"),
        ({"callbacks": [Recorder, print]}, ConfigError, "callbacks holds a builtin_function_or_method"),
        ({"callbacks": [EarlyStoppingCallback(2)]}, ConfigError, "stops by evaluations, but eval_strategy='no' and"),
    ],
)
def test_arguments_that_cannot_be_honoured_are_refused_by_name(tmp_path, tiny_tokenizer, options, error, message):
    arguments = {
        "model": MODEL,
        "args": MegaPackConfig(output_dir=str(tmp_path), use_cpu=True),
        "processing_class": tiny_tokenizer,
        "peft_config": LoraConfig(**LORA),
    }
    with pytest.raises(error, match=message):
        FakeTrainer(**(arguments | options))


def test_callbacks_may_be_classes_and_in_a_tuple(make):
    callbacks, data = (Recorder, EarlyStoppingCallback(2)), Dataset.from_list(token_rows(2))
    trainer = make(callbacks=callbacks, eval_dataset=data, eval_strategy="steps", metric_for_best_model="loss")
    kinds = [type(callback) for callback in trainer.callback_handler.callbacks]
    assert kinds.count(Recorder) == kinds.count(EarlyStoppingCallback) == 1


def continued(folder, tokenizer):
    """Return a trainer that continues from the adapter in a folder."""
    args = MegaPackConfig(output_dir=str(folder / "run"), use_cpu=True)
    return FakeTrainer(folder / "adapter", args, train_dataset=token_rows(8), processing_class=tokenizer)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"lora_dropout": 0.05}, ConfigError, r"adapter_config\.json: .*set lora_dropout=0\).*change that file"),
        ({"base_model_name_or_path": "/gone"}, ConfigError, r"names the base model '/gone', .*has moved"),
        ({"target_modules": ["q_proj", "v_proj", "z_proj"]}, None, ""),
        ({}, None, ""),
    ],
)
def test_what_keeps_an_adapter_from_being_continued_is_named_with_its_file(
    make, tmp_path, tiny_tokenizer, changes, error, message
):
    make(max_steps=1).save_model(tmp_path / "adapter")
    file = tmp_path / "adapter/adapter_config.json"
    fields = json.loads(file.read_text())
    file.write_text(json.dumps(fields | changes))
    with pytest.raises(error, match=message) if error else nullcontext():
        continued(tmp_path, tiny_tokenizer)


def test_an_adapter_that_lacks_what_its_config_selects_is_not_continued(make, tmp_path, tiny_tokenizer):
    make(max_steps=1).save_model(tmp_path / "adapter")
    file = tmp_path / "adapter/adapter_model.safetensors"
    save_file({key: tensor for key, tensor in load_file(file).items() if "v_proj" not in key}, file)
    with pytest.raises(ExportError, match=r"selects 1 modules that .* lacks, as model.layers.0.self_attn.v_proj"):
        continued(tmp_path, tiny_tokenizer)


def test_plain_training_arguments_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="build a MegaPackConfig"):
        FakeTrainer(MODEL, TrainingArguments(output_dir=str(tmp_path), use_cpu=True), peft_config=LoraConfig(**LORA))


def test_examples_longer_than_the_model_knows_positions_follow_overlong(make, tmp_path, tiny_tokenizer):
    """MODEL knows 512 positions, fewer than a row holds: the smaller of both is the limit, and is named."""
    long = {"input_ids": list(range(1, 521)), "labels": [-100] * 510 + list(range(511, 521))}
    rows = [*token_rows(5), long]
    with pytest.raises(DataError, match=r"row 5: 520 tokens are more than the model's max_position_embeddings=512"):
        make(rows=rows)
    with pytest.raises(DataError, match="row 5: 520 tokens are more than max_length=100"):
        make(rows=rows, max_length=100)
    dropping = make(rows=rows, overlong="drop", max_steps=2)
    assert len(dropping.train_dataset) == 5
    dropping.train()
    assert {key: dropping.state.log_history[-1][key] for key in ("truncated_examples", "dropped_examples")} == {
        "truncated_examples": 0,
        "dropped_examples": 1,
    }
    cutting = make(rows=rows, overlong="truncate_left")
    assert [len(example["input_ids"]) for example in cutting.train_dataset][-1] == 512
    with pytest.raises(DataError, match="max_position_embeddings=512"):
        make().evaluate(Dataset.from_list([long]))
    whole = make(rows=token_rows(4), max_steps=1)
    whole.train()
    assert not any("dropped_examples" in line for line in whole.state.log_history)


@pytest.mark.parametrize(
    ("rope", "limit"),
    [
        (None, 2048),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}, 8192),
        ({"rope_type": "linear", "factor": 2.0}, 4096),
    ],
)
def test_stretched_positions_count(rope, limit):
    more = {} if rope is None else {"rope_parameters": {"rope_theta": 1e4, **rope}}
    config = LlamaConfig(max_position_embeddings=2048, **more)
    args = MegaPackConfig(use_cpu=True, packed_sequence_length=100_000)
    assert find_example_limit(config, args) == (limit, "the model's max_position_embeddings", 32000)
    assert find_example_limit(config, MegaPackConfig(use_cpu=True, max_length=99)) == (99, "max_length", 32000)


def test_tokens_that_the_model_does_not_know_are_refused_with_their_row(make, tiny_tokenizer):
    largest = 4607
    rows = token_rows(3)
    make(rows=[*rows, {"input_ids": [5, largest], "labels": [-100, largest]}])
    unknown = [*rows, {"input_ids": [5, largest + 1], "labels": [-100, largest + 1]}]
    with pytest.raises(DataError, match=r"row 3: token id 4608 .*is none of the model's, which knows 4608 tokens"):
        make(rows=unknown)
    with pytest.raises(DataError, match="row 3: token id 4608"):
        make(eval_dataset=Dataset.from_list(unknown))
    stream = make(rows=unknown, is_stream=True, max_steps=2)
    with pytest.raises(DataError, match="row 3: token id 4608"):
        stream.train()


def test_a_padding_token_that_the_model_does_not_know_is_not_used(make, tiny_tokenizer):
    trainer = make()
    known = tiny_tokenizer.pad_token_id
    assert trainer.data_collator.pad_token_id == known
    assert build_collator(tiny_tokenizer, trainer.args, 1, "tree", vocab_size=known + 1).pad_token_id == known
    assert build_collator(tiny_tokenizer, trainer.args, 1, "tree", vocab_size=known).pad_token_id == 0


@pytest.mark.parametrize("name", ["predict", "hyperparameter_search", "push_to_hub", "create_model_card"])
def test_methods_that_cannot_be_honoured_are_refused(make, name):
    with pytest.raises(ConfigError, match=rf"{name}\(\) is not supported"):
        getattr(make(), name)()


@pytest.mark.parametrize("name", UNCALLED_METHODS)
def test_a_subclass_that_overrides_what_is_never_called_is_refused(make, name):
    class Mine(FakeTrainer):
        pass

    setattr(Mine, name, lambda self, *args, **kwargs: None)
    with pytest.raises(ConfigError, match=rf"Mine overrides {name}\(\), which is never called: .*Take {name} out"):
        make(trainer=Mine)


def test_a_subclass_may_build_its_own_optimizer_and_schedule(make):
    class Mine(FakeTrainer):
        def create_optimizer(self, model=None):
            self.optimizer = self.optimizer or torch.optim.SGD(self.backend.parameters.values(), lr=0.5)
            return self.optimizer

        def create_scheduler(self, num_training_steps, optimizer=None):
            self.lr_scheduler = torch.optim.lr_scheduler.ConstantLR(self.optimizer.optimizer, factor=0.5)
            return self.lr_scheduler

    trainer, recorder = make(trainer=Mine, max_steps=1), Recorder()
    trainer.add_callback(recorder)
    trainer.train()
    assert isinstance(trainer.optimizer.optimizer, torch.optim.SGD)
    assert recorder.rates == [0.25]


def test_a_world_that_differs_from_the_environment_is_refused(make, monkeypatch):
    trainer = make()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"WORLD_SIZE=2 .*1 processes"):
        FakeTrainer(MODEL, trainer.args, peft_config=LoraConfig(**LORA))


def test_a_given_optimizer_must_hold_the_adapter(make, tmp_path, tiny_tokenizer):
    backend = FakeBackend()
    mine = torch.optim.SGD(backend.parameters.values(), lr=0.5)
    arguments = {
        "args": MegaPackConfig(output_dir=str(tmp_path), use_cpu=True, max_steps=1, dataloader_num_workers=0),
        "train_dataset": token_rows(8),
        "processing_class": tiny_tokenizer,
        "peft_config": LoraConfig(**LORA),
    }
    trainer_class = type("WithBackend", (FakeTrainer,), {"given_backend": backend})
    trainer = trainer_class(MODEL, optimizers=(mine, None), **arguments)
    trainer.train()
    assert trainer.optimizer.optimizer is mine
    stranger = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    with pytest.raises(ConfigError, match="holds 1 tensors, of which 0"):
        trainer_class(MODEL, optimizers=(stranger, None), **arguments)
    scheduled = trainer_class(MODEL, optimizer_cls_and_kwargs=(torch.optim.NAdam, {"lr": 0.1}), **arguments)
    scheduled.train()
    assert isinstance(scheduled.optimizer.optimizer, torch.optim.NAdam)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda factors: torch.optim.AdamW(factors[:1]),
            "holds 1 tensors, of which 1 are among the adapter's 4 factors",
        ),
        (torch.optim.Adafactor, "Adafactor.*not supported"),
        (lambda factors: torch.optim.SGD([*factors, torch.nn.Parameter(torch.ones(1))]), "holds 5 tensors, of which 4"),
    ],
)
def test_an_assigned_optimizer_is_checked_before_the_first_update(make, build, message):
    trainer = make()
    trainer.optimizer = build(list(trainer.backend.parameters.values()))
    with pytest.raises(ConfigError, match=message):
        trainer.train()
    assert trainer.backend.calls == []


def test_an_assigned_optimizer_may_hold_frozen_weights_and_have_a_schedule(make):
    trainer, recorder = make(max_steps=3), Recorder()
    trainer.add_callback(recorder)
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.5)
    assert sum(not p.requires_grad for p in trainer.model.parameters()) == 1
    trainer.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(trainer.optimizer, lambda step: 1 / (1 + step))
    trainer.train()
    assert recorder.rates == pytest.approx([0.5, 0.25, 0.5 / 3])
    assert trainer.optimizer.param_groups[0]["lr"] == 0.125
    trainer.train()  # the schedule knows the optimizer that is wrapped by now


def test_a_schedule_of_another_optimizer_is_refused(make, tmp_path, tiny_tokenizer):
    stranger = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    schedule = torch.optim.lr_scheduler.LambdaLR(stranger, lambda step: 1 / (1 + step))
    message = "The schedule, a LambdaLR, was built for another optimizer"
    trainer = make()
    for optimizer in (None, torch.optim.SGD(trainer.backend.parameters.values(), lr=0.1)):
        with pytest.raises(ConfigError, match=message):
            FakeTrainer(MODEL, trainer.args, peft_config=LoraConfig(**LORA), optimizers=(optimizer, schedule))
    trainer.lr_scheduler = schedule
    with pytest.raises(ConfigError, match=message):
        trainer.train()
    assert trainer.backend.calls == []


def test_two_optimizers_are_refused(make):
    mine = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    with pytest.raises(ConfigError, match="Give only one"):
        FakeTrainer(
            MODEL, make().args, peft_config=LoraConfig(**LORA), optimizers=(mine, None),
            optimizer_cls_and_kwargs=(torch.optim.SGD, {"lr": 0.1}),
        )  # fmt: skip


@pytest.mark.parametrize("method", ["get_train_dataloader", "get_eval_dataloader"])
@pytest.mark.parametrize("collate", [None, list])
def test_a_loader_that_packs_no_updates_is_refused_by_name(make, method, collate):
    def own(self, eval_dataset=None):
        return torch.utils.data.DataLoader(self.eval_dataset, batch_size=2, collate_fn=collate or self.data_collator)

    trainer = make(trainer=type("Mine", (FakeTrainer,), {method: own}), eval_dataset=token_rows(4))
    with pytest.raises(ConfigError, match=rf"^{method}\(\) returned a DataLoader of its own"):
        trainer.train() if "train" in method else trainer.evaluate()


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_subclass_may_look_at_the_loaders(make, is_stream):
    seen = []

    class Mine(FakeTrainer):
        def get_train_dataloader(self):
            seen.append(loader := super().get_train_dataloader())
            return loader

        def get_eval_dataloader(self, eval_dataset=None):
            seen.append(loader := super().get_eval_dataloader(eval_dataset))
            return loader

    trainer = make(trainer=Mine, eval_dataset=token_rows(2), is_stream=is_stream, max_steps=6)
    trainer.train()
    trainer.evaluate()
    assert len(seen) == 2


def test_a_given_collator_is_used(make, tmp_path, tiny_tokenizer):
    trainer = FakeTrainer(
        LlamaConfig(),
        MegaPackConfig(output_dir=str(tmp_path), use_cpu=True, max_steps=1, dataloader_num_workers=0),
        PrefixTreeCollator(packed_sequence_length=90, packing_strategy="ffd"),
        token_rows(8),
        processing_class=tiny_tokenizer,
        peft_config=LoraConfig(**LORA),
    )
    trainer.train()
    assert len(trainer.backend.calls[0].rows) == 8


@pytest.mark.parametrize(("name", "fault"), [("folder", "is no folder"), ("file", "is a file")])
def test_a_model_path_that_is_no_folder_is_no_hub_id_either(tmp_path, name, fault):
    (tmp_path / "file").write_text("")
    path = str(tmp_path / name)
    with pytest.raises(ConfigError, match=rf"model='{path}' {fault}.*Give a local folder, or a hub id"):
        resolve_adapter(path, LoraConfig())
