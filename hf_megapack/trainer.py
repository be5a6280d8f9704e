"""MegaPackTrainer: the HF Trainer's loop around one packed update at a time.

The only file that knows the HF Trainer's hooks; tests/test_hf_hooks.py lists those it relies on. Rank 0 reads and
packs, every rank gets the same `PackedBatch`, the backend turns it into a loss and gradients, and the HF Trainer does
the rest: schedulers, callbacks, logging, when to evaluate and to save. Nothing here knows Megatron.
"""

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, IterableDataset
from peft import LoraConfig
from torch.utils.data import DataLoader
from transformers import PretrainedConfig, Trainer, TrainerCallback, set_seed
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, EvalLoopOutput, TrainOutput, rotate_checkpoints
from transformers.utils import logging

from hf_megapack import agreement, checks, guard, resuming, saving, trained
from hf_megapack.batch import PackedBatch
from hf_megapack.config import MegaPackConfig
from hf_megapack.container import ModelContainer
from hf_megapack.data.collator import PrefixTreeCollator
from hf_megapack.data.lengths import LengthTally
from hf_megapack.errors import ConfigError, NonFiniteResultError
from hf_megapack.loading import build_collator, build_loader, describe_sharing, next_batch, prepare_on_rank_zero
from hf_megapack.meter import TokenTally, UpdateMeter, count_slots, token_counts
from hf_megapack.ranks import on_rank_zero, share_flags
from hf_megapack.settled import check_settled, settled_values
from hf_megapack.weights.export import check_holds_targets, read_peft_adapter

logger = logging.get_logger(__name__)

_UPDATES_BEFORE_SHARING_IS_TOLD = 3


class MegaPackTrainer(Trainer):
    """Fine-tunes a LoRA adapter on Megatron-Core behind the HF Trainer's interface.

    Args:
        model: Hub id or local folder of a base model, a folder with a PEFT adapter to continue from, or a
            `PretrainedConfig` for random weights.
        args: A MegaPackConfig; None takes its defaults.
        data_collator: A PrefixTreeCollator; None builds one from `args`.
        train_dataset: Rows with messages (and tools), with prompt and completion, or ready tokens; maybe as a stream.
        eval_dataset: The same, or a dict of several.
        processing_class: The tokenizer, with its chat template; None takes the one beside the model.
        compute_loss_func: Refused by name; in TRL's place.
        compute_metrics: Refused likewise.
        callbacks: As for the HF Trainer.
        optimizers: As for the HF Trainer; of what learns, the optimizer must hold exactly the adapter's factors.
        optimizer_cls_and_kwargs: As for the HF Trainer, elementwise optimizers only.
        preprocess_logits_for_metrics: Refused likewise.
        quantization_config: Refused likewise.
        peft_config: peft's LoraConfig with transformers' module names; not given when `model` is an adapter folder.
        formatting_func: Refused likewise.
        **other: Refused by name: arguments of other trainers, and fields of TRL's configuration.

    Attributes:
        backend: The door to the model: `backend.parameters` are the adapter's factors.
        example_limit: What an example may be, by the arguments and by the model.

    Raises:
        ConfigError: If an argument is refused, missing or does not fit the others.
        DataError: If a row of a dataset cannot be learned.
    """

    def __init__(  # noqa: PLR0913 - TRL's order and names
        self,
        model: str | os.PathLike | PretrainedConfig,
        args: MegaPackConfig | None = None,
        data_collator: PrefixTreeCollator | None = None,
        train_dataset: Dataset | IterableDataset | None = None,
        eval_dataset: Dataset | IterableDataset | dict[str, Dataset | IterableDataset] | None = None,
        processing_class: Any = None,
        compute_loss_func: None = None,
        compute_metrics: None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple = (None, None),
        optimizer_cls_and_kwargs: tuple[type, dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: None = None,
        quantization_config: None = None,
        peft_config: LoraConfig | None = None,
        formatting_func: None = None,
        **other: Any,
    ):
        from hf_megapack.megatron.choice import resolve_attention

        checks.refuse_arguments(
            compute_loss_func=compute_loss_func,
            compute_metrics=compute_metrics,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
            quantization_config=quantization_config,
            formatting_func=formatting_func,
            **other,
        )
        args = checks.check_args(MegaPackConfig() if args is None else args)
        checks.check_overrides(type(self))
        checks.check_evaluation(type(self), args, eval_dataset)
        checks.check_collator_and_optimizer(data_collator, optimizers, optimizer_cls_and_kwargs, args.weight_decay)
        callbacks = checks.build_callbacks(callbacks, args)
        self._settled = settled_values(args)
        base_model, self.peft_config, adapter = trained.resolve_adapter(model, peft_config)
        agreement.check_arguments(args, self.peft_config)
        processing_class = trained.resolve_tokenizer(model, base_model, processing_class)
        self._attention = resolve_attention(base_model, args, (data_collator or args).packing_strategy)
        self.example_limit, self._lengths = trained.find_example_limit(base_model, args), LengthTally()
        known = {"attention": self._attention, "vocab_size": self.example_limit.vocab_size}
        collator = partial(build_collator, processing_class, args, **known)
        collator(data_parallel_size=1)  # options that do not fit raise before any work
        args.output_dir = saving.share_output_folder(args)
        read = partial(prepare_on_rank_zero, processing_class=processing_class, args=args, limit=self.example_limit)
        train_dataset, eval_dataset = read(train_dataset, is_training=True, tally=self._lengths), read(eval_dataset)
        set_seed(args.seed)
        self.backend = self._build_backend(base_model, args)
        saving.check_export(args, self.peft_config, self.backend)
        if adapter is not None:
            self.backend.load_adapter(check_holds_targets(model, adapter, self.backend.linear_names))
        guard.check_optimizer_parameters(optimizers[0], self.backend.parameters)
        self._accumulation, self._meter, self._sharing_told, self._adapters_checked = None, UpdateMeter(), False, False
        container = ModelContainer(self.backend.model, self.backend.parameters)
        data_collator = data_collator or collator(self.backend.data_parallel_size)
        given = {"callbacks": callbacks, "optimizers": optimizers, "optimizer_cls_and_kwargs": optimizer_cls_and_kwargs}
        super().__init__(container, args, data_collator, train_dataset, eval_dataset, processing_class, **given)

    def _build_backend(self, model: str | PretrainedConfig, args: MegaPackConfig) -> Any:
        from hf_megapack.megatron.backend import MegatronBackend

        return MegatronBackend(model, args, self.peft_config, self._attention)

    def _move_model_to_device(self, model: torch.nn.Module, device: torch.device) -> None:
        """Leave the model where the backend put it."""

    # Training: one update is one batch.

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: None = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Train, from the start or from a checkpoint; after an error it can be called again."""
        if trial is not None:
            raise ConfigError("Hyperparameter search is not supported; build one trainer per trial.")
        check_settled(checks.check_args(self.args), self._settled)
        agreement.check_checkpoint(resume_from_checkpoint, self.args)
        saving.prepare_output_folder(self.args)
        self._meter, self._sharing_told, self._adapters_checked = UpdateMeter(), False, False
        try:
            output = super().train(resume_from_checkpoint, ignore_keys_for_eval=ignore_keys_for_eval)
        finally:
            self.is_in_train = False
        return output._replace(training_loss=output.metrics["train_loss"])

    @contextmanager
    def _one_batch_per_update(self) -> Iterator[None]:
        """Let the HF Trainer see one batch per update: the examples that it would accumulate are packed together."""
        self._accumulation, self.args.gradient_accumulation_steps = self.args.gradient_accumulation_steps, 1
        try:
            yield
        finally:
            self.args.gradient_accumulation_steps, self._accumulation = self._accumulation, None

    def get_total_train_batch_size(self, args: MegaPackConfig) -> int:
        """Return the examples per update."""
        accumulation = self._accumulation or args.gradient_accumulation_steps
        return args.per_device_train_batch_size * accumulation * self.backend.data_parallel_size

    def set_initial_training_values(self, args: MegaPackConfig, dataloader: DataLoader) -> tuple:
        """Count updates as batches; everything else as the HF Trainer does."""
        checks.check_loader(dataloader, "get_train_dataloader")
        with self._one_batch_per_update():
            return super().set_initial_training_values(args, dataloader)

    def _init_training_state(self, *args: Any) -> tuple[int, int]:
        with self._one_batch_per_update():
            place, (_, _, num_epochs, checkpoint, _) = super()._init_training_state(*args), args
        return place if checkpoint is None else resuming.find_place(self, Path(checkpoint), place, num_epochs)

    def _run_epoch(self, model: torch.nn.Module, epoch: int, train_dataloader: DataLoader, *args, **kwargs) -> None:
        # The HF Trainer does not reach the sampler of a plain DataLoader: every epoch would repeat the first.
        (train_dataloader.batch_sampler or train_dataloader.dataset).set_epoch(epoch)
        with self._one_batch_per_update():
            super()._run_epoch(model, epoch, train_dataloader, *args, **kwargs)

    def get_train_dataloader(self) -> DataLoader:
        """Return a loader of updates, each in one buffer: `batch.from_buffer(item.numpy())` gives its PackedBatch."""
        checks.check_is_given(self.train_dataset, "train_dataset", "train()")
        size = self.get_total_train_batch_size(self.args)
        return build_loader(self.train_dataset, self.data_collator, self.args, update_size=size, is_training=True)

    def get_eval_dataloader(self, eval_dataset: str | Dataset | None = None) -> DataLoader:
        """Return a loader as for training; a batch has per_device_eval_batch_size examples per data-parallel rank."""
        check_settled(self.args, self._settled)
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(dataset, str):
            dataset = checks.find_eval_dataset(self.eval_dataset, dataset)
        elif dataset is not self.eval_dataset:
            dataset = prepare_on_rank_zero(dataset, self.processing_class, self.args, limit=self.example_limit)
        checks.check_is_given(dataset, "eval_dataset", "evaluate()")
        size = self.args.per_device_eval_batch_size * self.backend.data_parallel_size
        return build_loader(dataset, self.data_collator, self.args, update_size=size, is_training=False)

    def get_batch_samples(self, epoch_iterator: Iterator, num_batches: int, device: torch.device) -> tuple:
        """Return rank 0's next update on every rank, and its loss-bearing tokens."""
        with self._meter.waiting():
            batch = next_batch(epoch_iterator, self.args.device, self._meter.lengths)
        # A stream's epoch may end before the HF Trainer expects it.
        self.control.should_epoch_stop |= batch is None
        return ([], None) if batch is None else ([batch], self._get_num_items_in_batch([batch], device))

    def _get_num_items_in_batch(self, batch_samples: list[PackedBatch], device: torch.device) -> int:
        return sum(batch.num_loss_tokens for batch in batch_samples)

    def _track_num_input_tokens(self, inputs: PackedBatch) -> None:
        self.state.num_input_tokens_seen += inputs.num_logical_tokens

    def floating_point_ops(self, inputs: PackedBatch) -> int:
        """Return this rank's share of the operations: frozen weights take part in two products, forward and back."""
        slots = count_slots(inputs, self.backend.data_parallel_rank)
        return 4 * slots * self.backend.num_active_weights // self.backend.context_parallel_size

    def training_step(
        self, model: torch.nn.Module, inputs: PackedBatch, num_items_in_batch: int | None = None
    ) -> torch.Tensor:
        """Compute the gradients of one update and return its loss, the same on every rank; 0 if it will be skipped."""
        result = self.backend.run_step(inputs)
        if not self._adapters_checked:
            guard.check_adapters_learn(self.backend.parameters, self.args.device)
            self._adapters_checked = True
        self._loss = result.loss
        self._meter.add(inputs, result)
        if not self._sharing_told and self._meter.total.num_updates >= _UPDATES_BEFORE_SHARING_IS_TOLD:
            self._tell_sharing()
        # The HF Trainer's sum would stay NaN; `log` makes the mean good again.
        is_left_out = self.args.on_nonfinite == "skip" and not math.isfinite(result.loss)
        return torch.tensor(0.0 if is_left_out else result.loss, device=self.args.device)

    def _tell_sharing(self) -> None:
        self._sharing_told = True
        if self.is_world_process_zero():
            size, sharing = self.get_total_train_batch_size(self.args), self._meter.total.sharing
            text = describe_sharing(sharing, self.train_dataset, self.data_collator, self.args, update_size=size)
            # A warning, because transformers hides anything less by default and this is advice on a setting.
            logger.warning(text)

    # The optimizer: over local shards, and never stepped on a result that is not finite.

    def create_optimizer(self, model: torch.nn.Module | None = None) -> torch.optim.Optimizer:
        """Build the optimizer over this rank's factors, and anew if its arguments have changed since."""
        cls, options = self.optimizer_cls_and_kwargs or self.get_optimizer_cls_and_kwargs(self.args)
        recipe = guard.Recipe(cls, dict(options), self.args.weight_decay)
        self.optimizer = guard.keep_or_build_optimizer(self.optimizer, recipe, self.backend.parameters)
        return self.optimizer

    def _prepare_for_training(self, max_steps: int, train_dataloader: DataLoader, resume_from_checkpoint) -> tuple:
        """Build optimizer and scheduler; accelerate never sees the model, which it would wrap and overwrite."""
        if self._created_lr_scheduler:
            self.lr_scheduler, self._created_lr_scheduler = None, False
        if not isinstance(optimizer := self.create_optimizer(), guard.SkippableOptimizer):
            guard.check_optimizer_parameters(optimizer, self.backend.parameters)
            self.optimizer = guard.SkippableOptimizer(optimizer)
        self.optimizer = self.accelerator.prepare_optimizer(self.optimizer)
        self.create_scheduler(num_training_steps=max_steps)
        guard.check_scheduler(self.lr_scheduler, self.optimizer)
        self.model_wrapped = self.model
        self._load_optimizer_and_scheduler(resume_from_checkpoint)
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, getattr(self, name))
        self.callback_handler.train_dataloader = train_dataloader
        return self.model, train_dataloader

    def _clip_grad_norm(self, model: torch.nn.Module) -> float:
        norm = self._guarded_grad_norm()
        if norm > self.args.max_grad_norm:
            self.backend.scale_grads(self.args.max_grad_norm / (norm + 1e-6))
        return norm

    def _get_grad_norm(self, model: torch.nn.Module, grad_norm: float | None = None) -> float:
        return self._guarded_grad_norm() if grad_norm is None else grad_norm

    def _guarded_grad_norm(self) -> float:
        """Return the gradient norm over all shards; raise, or mark the step as skipped, if a result is not finite."""
        norm = self.backend.grad_norm()
        try:
            guard.check_finite(self._loss, norm, step=self.state.global_step + 1, device=self.args.device)
        except NonFiniteResultError as error:
            if self.args.on_nonfinite == "raise":
                raise
            logger.warning("%s. The update is left out.", str(error).partition(". ")[0])
            self.optimizer.skip_next = True
            self._meter.num_skipped += 1
        return norm

    # Logging and evaluation.

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Do on every rank what a callback asks for on any: all take part in it, and one alone would wait forever."""
        if share_flags(self.control, "should_", self.args.device):
            super()._maybe_log_save_evaluate(*args, **kwargs)
            share_flags(self.control, "should_", self.args.device)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the token counts to the log lines of training."""
        if "loss" in logs:
            logs.update(self._meter.take(self.state.num_input_tokens_seen))
        elif "total_flos" in logs:
            lengths = self._lengths.metrics() or self._meter.lengths.metrics()
            logs.update(token_counts(self._meter.total) | lengths | self._meter.losses.mean_in_place_of("train_loss"))
            if not self._sharing_told and self._meter.total.num_updates:
                self._tell_sharing()
        super().log(logs, start_time)

    def evaluation_loop(
        self,
        dataloader: DataLoader,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Return the mean loss per loss-bearing token of the whole set, whatever its packing or layout."""
        checks.check_loader(dataloader, "get_eval_dataloader")
        self.model.eval()
        self.callback_handler.eval_dataloader = dataloader
        tally, num_examples, iterator = TokenTally(), 0, iter(dataloader)
        while (batch := next_batch(iterator, self.args.device)) is not None:
            tally.add(self.backend.eval_step(batch))
            num_examples += batch.num_examples
            self.control = self.callback_handler.on_prediction_step(self.args, self.state, self.control)
        metrics = {f"{metric_key_prefix}_{k}": v for k, v in {"loss": tally.loss, **tally.metrics()}.items()}
        return EvalLoopOutput(predictions=None, label_ids=None, metrics=metrics, num_samples=num_examples)

    # Saving and resuming: full tensors under PEFT names, written by rank 0, published whole.

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the adapter as a PEFT folder, and the tokenizer beside it. Every rank calls it."""
        state = self.backend.adapter_state()
        on_rank_zero(lambda: self._write_adapter(Path(output_dir or self.args.output_dir), state), self.args.device)

    def _write_adapter(self, folder: Path, state: dict[str, torch.Tensor]) -> None:
        saving.write_adapter(folder, state, self.args, self.peft_config, self.backend)
        saving.write_tokenizer(folder, self.processing_class)

    def _save_checkpoint(self, model: torch.nn.Module, trial: None) -> None:
        """Stage a whole checkpoint, publish it with one rename, then drop the oldest."""
        self.store_flos()
        run = Path(self.args.output_dir)
        best = run / f"{PREFIX_CHECKPOINT_DIR}-{self.state.best_global_step}"
        folder = run / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        if self.state.best_global_step and (best == folder or best.exists()):
            self.state.best_model_checkpoint = str(best)
        adapter = self.backend.adapter_state()
        moments = None if self.args.save_only_model else self.backend.optimizer_state(self.optimizer.optimizer)
        on_rank_zero(lambda: self._write_checkpoint(folder, adapter, moments), self.args.device)

    def _write_checkpoint(self, folder: Path, adapter: dict[str, torch.Tensor], moments: dict | None) -> None:
        with saving.replace_directory(folder) as staging:
            self._write_adapter(staging, adapter)
            if moments is not None:
                saving.write_training_state(staging, moments, self.lr_scheduler, self.args)
                resuming.write_run(staging, resuming.describe_run(self))
                self._save_rng_state(str(staging))
            saving.write_trainer_state(staging, self.state, [*self.callback_handler.callbacks, self.control])
        best = self.state.best_model_checkpoint
        rotate_checkpoints(str(folder.parent), self.args.save_total_limit, best, use_mtime=True)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: torch.nn.Module | None = None) -> None:
        checks.check_is_given(self.train_dataset, "train_dataset", "train()")
        state = self._read_adapter(resume_from_checkpoint)
        self.create_optimizer()
        run, skips = resuming.describe_run(self), not self.args.ignore_data_skip
        on_rank_zero(lambda: resuming.check_run(Path(resume_from_checkpoint), run, skips=skips), self.args.device)
        self.backend.load_adapter(state)

    def _read_adapter(self, folder: str) -> dict[str, torch.Tensor]:
        saved, state = read_peft_adapter(Path(folder))
        trained.check_same_adapter(self.peft_config, self.backend.base_model_name, saved, list(state), folder)
        return state

    def _load_best_model(self) -> None:
        logger.info(f"Loading the best adapter, {self.state.best_model_checkpoint} ({self.state.best_metric}).")
        self.backend.load_adapter(self._read_adapter(self.state.best_model_checkpoint))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Restore moments, schedule and learning rate."""
        if checkpoint is None:
            return
        moments = saving.read_training_state(Path(checkpoint), self.lr_scheduler, self.args)
        self.backend.load_optimizer_state(self.optimizer.optimizer, moments)

    predict = checks.refused_method("predict", "save the adapter and load it with peft to generate or score")
    hyperparameter_search = checks.refused_method("hyperparameter_search", "build one trainer per trial")
    push_to_hub = checks.refused_method("push_to_hub", "call save_model(folder), then `hf upload`")
    create_model_card = checks.refused_method("create_model_card", "write a README.md into the adapter's folder")
