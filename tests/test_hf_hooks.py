"""What is used of transformers and datasets that they may rename: a renamed hook would be overridden in vain.

The hooks of the HF Trainer exist in transformers 5.8, 5.17 and 5.24.
"""

import ast
import inspect
import re

import pytest
from accelerate import skip_first_batches
from datasets import Dataset, IterableDataset
from transformers import Trainer, TrainingArguments
from transformers.trainer_callback import TrainerControl
from transformers.utils import chat_template_utils

from hf_megapack.arguments import UNCALLED_METHODS
from hf_megapack.trainer import MegaPackTrainer
from tests.test_architecture import FILES, PACKAGE

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
    "_maybe_log_save_evaluate": ["tr_loss", "model"],
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
    "create_model_card": [],
}
CALLED = {
    "create_scheduler": ["num_training_steps"],
    "get_optimizer_cls_and_kwargs": ["args"],
    "_save_rng_state": ["output_dir"],
    "store_flos": [],
    "is_world_process_zero": [],
}
# Private names of other libraries, and where each is used.
PRIVATE = {
    ("data/regions.py", "_compile_jinja_template"),
    ("data/rendering.py", "_compile_jinja_template"),
    ("data/tags.py", "_compile_jinja_template"),
    ("data/stream.py", "_distributed"),
    ("data/stream.py", "_formatting"),
    ("data/stream.py", "_starting_state_dict"),
    ("checks.py", "_n_gpu"),
}


@pytest.mark.parametrize("name", [*OVERRIDDEN, *CALLED])
def test_a_hook_exists_with_the_parameters_we_use(name):
    parameters = list(inspect.signature(getattr(Trainer, name)).parameters)
    expected = (OVERRIDDEN | CALLED)[name]
    assert [p for p in parameters if p in expected] == expected


def test_the_list_is_what_the_trainer_overrides():
    overridden = {n for n in vars(MegaPackTrainer) if n in vars(Trainer) and not n.startswith("__")}
    assert overridden == set(OVERRIDDEN)


def test_what_a_subclass_would_override_in_vain_exists_and_is_not_ours():
    assert all(getattr(MegaPackTrainer, name) is getattr(Trainer, name) for name in UNCALLED_METHODS)
    text = inspect.getsource(MegaPackTrainer)
    assert not [name for name in UNCALLED_METHODS if f"self.{name}(" in text]


def test_the_loop_reads_what_we_set():
    """Attributes and calls of the loop that no signature shows."""
    epoch = inspect.getsource(Trainer._run_epoch)
    for text in (
        "self.get_batch_samples(",
        "self.accelerator.optimizer_step_was_skipped",
        "self._maybe_log_save_evaluate(",
        "self._clip_grad_norm(model)",
        "self._get_grad_norm(model",
        "self.optimizer.step()",
        "self.args.gradient_accumulation_steps",
    ):
        assert text in epoch, text
    prepare = inspect.getsource(Trainer._prepare_for_training)
    assert "self._created_lr_scheduler" in prepare
    assert "self._prepare_for_training(" in inspect.getsource(Trainer._inner_training_loop)
    # The only line of training's last log that no evaluation has, whatever its prefix.
    assert 'metrics["total_flos"] = ' in inspect.getsource(Trainer._finalize_training)
    # What callbacks ask for is acted on there, and only there.
    assert epoch.count("self._maybe_log_save_evaluate(") == 2
    flags = {name for name in vars(TrainerControl()) if name.startswith("should_")}
    assert {f"self.control.{flag}" for flag in ("should_log", "should_evaluate", "should_save")} <= set(
        re.findall(r"self\.control\.should_\w+", inspect.getsource(Trainer._maybe_log_save_evaluate))
    )
    assert flags == {f"should_{what}" for what in ("training_stop", "epoch_stop", "save", "evaluate", "log")}
    # Our override finds the number of epochs and the checkpoint by their places.
    call = "max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial\n"
    assert call in inspect.getsource(Trainer._inner_training_loop)


def test_the_loop_takes_passes_over_a_stream_for_epochs():
    """What `streaming.place_in_stream` reads back, and what ends a pass before all of its steps."""
    values = inspect.getsource(Trainer.set_initial_training_values)
    assert "num_train_epochs = sys.maxsize" in values
    assert "num_update_steps_per_epoch = max_steps" in values
    epoch = inspect.getsource(Trainer._run_epoch)
    assert "self.state.epoch = epoch + (step + 1) / steps_in_epoch" in epoch
    assert "if self.control.should_epoch_stop or self.control.should_training_stop:" in epoch
    assert "skip_first_batches(train_dataloader, steps_trained_in_current_epoch)" in epoch
    control = TrainerControl(should_epoch_stop=True)
    control._new_epoch()
    assert not control.should_epoch_stop
    assert "num_batches" in inspect.signature(skip_first_batches).parameters


def private_names() -> set[tuple[str, str]]:
    """Return (file, name) of each name with a leading underscore that is imported from, or read off, something else."""
    found = set()
    for path in FILES:
        file = path.relative_to(PACKAGE).as_posix()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) not in ("self", "cls", "super()"):
                names = [node.attr]
            elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("hf_megapack"):
                names = [alias.name for alias in node.names]
            found |= {(file, name) for name in names if name.startswith("_") and not name.startswith("__")}
    # A method of named tuples, public despite its name.
    return {(file, name) for file, name in found if not file.startswith("megatron/") and name != "_replace"}


def test_the_private_names_of_other_libraries_are_these():
    assert private_names() == PRIVATE


def test_templates_are_compiled_and_rendered_as_transformers_does():
    """`data.regions` needs the environment with the generation tag, `data.rendering` the call with its spans."""
    text = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    template = chat_template_utils._compile_jinja_template(text)
    assert template is chat_template_utils._compile_jinja_template(text)
    assert {"generation"} <= {tag for extension in template.environment.extensions.values() for tag in extension.tags}
    assert template.environment.sandboxed
    rendered = chat_template_utils.render_jinja_template(
        conversations=[[{"role": "user", "content": "ab"}]], chat_template=text, return_assistant_tokens_mask=True
    )
    assert rendered == (["ab"], [[(0, 2)]])


def test_a_stream_has_what_is_read_off_it():
    stream = Dataset.from_list([{"a": 1}]).to_iterable_dataset()
    assert (stream._distributed, stream._formatting, stream._starting_state_dict) == (None, None, None)
    assert stream.with_format("torch")._formatting.format_type == "torch"
    stream.load_state_dict(stream.state_dict())
    assert stream._starting_state_dict is not None
    assert "drop_last_batch" in inspect.signature(IterableDataset.iter).parameters
    assert hasattr(TrainingArguments, "n_gpu")
