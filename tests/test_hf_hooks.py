"""The HF Trainer's hooks that MegaPackTrainer relies on: a renamed one would be overridden in vain.

They exist in transformers 5.8, 5.17 and 5.24.
"""

import inspect

import pytest
from transformers import Trainer

from hf_megapack.trainer import MegaPackTrainer

# Name to the parameters that our override takes by name or position.
OVERRIDDEN = {
    "train": ["resume_from_checkpoint", "trial", "ignore_keys_for_eval"],
    "get_total_train_batch_size": ["args"],
    "set_initial_training_values": ["args", "dataloader"],
    "_init_training_state": ["max_steps", "num_update_steps_per_epoch", "num_train_epochs", "resume_from_checkpoint"],
    "_run_epoch": ["model", "epoch", "train_dataloader"],
    "_prepare_for_training": ["max_steps", "train_dataloader", "resume_from_checkpoint"],
    "get_train_dataloader": [],
    "get_eval_dataloader": ["eval_dataset"],
    "get_batch_samples": ["epoch_iterator", "num_batches", "device"],
    "_get_num_items_in_batch": ["batch_samples", "device"],
    "_track_num_input_tokens": ["inputs"],
    "floating_point_ops": ["inputs"],
    "training_step": ["model", "inputs", "num_items_in_batch"],
    "create_optimizer": ["model"],
    "_clip_grad_norm": ["model"],
    "_get_grad_norm": ["model", "grad_norm"],
    "_move_model_to_device": ["model", "device"],
    "log": ["logs", "start_time"],
    "evaluation_loop": ["dataloader", "description", "prediction_loss_only", "ignore_keys", "metric_key_prefix"],
    "save_model": ["output_dir", "_internal_call"],
    "_save_checkpoint": ["model", "trial"],
    "_load_from_checkpoint": ["resume_from_checkpoint", "model"],
    "_load_best_model": [],
    "_load_optimizer_and_scheduler": ["checkpoint"],
    "predict": ["test_dataset"],
    "hyperparameter_search": [],
    "push_to_hub": [],
}
CALLED = {
    "create_scheduler": ["num_training_steps"],
    "get_optimizer_cls_and_kwargs": ["args"],
    "_save_rng_state": ["output_dir"],
    "store_flos": [],
    "is_world_process_zero": [],
}


@pytest.mark.parametrize("name", [*OVERRIDDEN, *CALLED])
def test_a_hook_exists_with_the_parameters_we_use(name):
    parameters = list(inspect.signature(getattr(Trainer, name)).parameters)
    expected = (OVERRIDDEN | CALLED)[name]
    assert [p for p in parameters if p in expected] == expected


def test_the_list_is_what_the_trainer_overrides():
    overridden = {n for n in vars(MegaPackTrainer) if n in vars(Trainer) and not n.startswith("__")}
    assert overridden == set(OVERRIDDEN)


def test_the_loop_reads_what_we_set():
    """Attributes and calls of the loop that no signature shows."""
    epoch = inspect.getsource(Trainer._run_epoch)
    for text in (
        "self.get_batch_samples(",
        "self.accelerator.optimizer_step_was_skipped",
        "self._clip_grad_norm(model)",
        "self._get_grad_norm(model",
        "self.optimizer.step()",
        "self.args.gradient_accumulation_steps",
    ):
        assert text in epoch, text
    prepare = inspect.getsource(Trainer._prepare_for_training)
    assert "self._created_lr_scheduler" in prepare
    assert "self._prepare_for_training(" in inspect.getsource(Trainer._inner_training_loop)
