"""MegaPackConfig: transformers' TrainingArguments with the fields that packing and Megatron-Core need.

Every check that needs neither model nor data is made here, when the config is built. A field whose help names the only
values supported so far refuses the others by name. Model and data are checked where they are read.
"""

import dataclasses
import difflib
import inspect
import typing
from dataclasses import dataclass, field
from typing import Any, Literal

from transformers import TrainingArguments
from transformers.trainer_pt_utils import AcceleratorConfig

from hf_megapack.arguments import DROPPED_ARGUMENTS, TRAINING_ARGUMENTS, TRL_NAMES
from hf_megapack.errors import ConfigError
from hf_megapack.launcher import check_launcher, resolve_bf16
from hf_megapack.learning_rate import check_schedule
from hf_megapack.optimizer import check_optimizer, check_optimizer_name
from hf_megapack.values import check_duration, check_intervals, check_reports, check_values


def _option(default: Any, help_text: str) -> Any:
    """Declare one field of MegaPackConfig; the help is the only place that says what the field does."""
    return field(default=default, metadata={"help": help_text})


@dataclass
class MegaPackConfig(TrainingArguments):
    """Everything that MegaPackTrainer can be told, besides model, data and adapter.

    All of TrainingArguments is here too; arguments.py says which of its fields are refused. Examples per update =
    per_device_train_batch_size x gradient_accumulation_steps x data-parallel size: all of them are packed together.

    Raises:
        ConfigError: If a value is not allowed, not supported, or known to TRL under another name than here.
    """

    # data
    assistant_mask: Literal["all", "last", "each"] = _option(
        "all",
        "Assistant turns to learn: 'all' of a conversation, the 'last' one, or 'each': one example per assistant turn, "
        "in which only that turn is learned.",
    )
    max_length: int | None = _option(
        None,
        "Longest example, in tokens. None allows what a row holds (packed_sequence_length). The base model's "
        "max_position_embeddings is a limit too.",
    )
    overlong: Literal["error", "drop", "truncate_left", "truncate_right"] = _option(
        "error", "What to do with an example that is longer."
    )
    dataset_num_proc: int | None = _option(
        None, "Processes that render and tokenize datasets. None renders in this process."
    )

    # packing
    packed_sequence_length: int = _option(
        8192, "Most slots that one packed row may hold. Rows keep their natural length below that."
    )
    packing_strategy: Literal["prefix_tree", "ffd", "mffd", "balanced"] = _option(
        "prefix_tree",
        "How examples fill rows: 'prefix_tree' computes every shared prefix once; 'ffd', 'mffd' and 'balanced' put "
        "whole examples side by side.",
    )
    min_shared_tokens: int = _option(64, "Shortest run of tokens worth sharing between examples.")
    share_supervised: bool = _option(
        False,
        "Share learned tokens too, where prefix and target agree; the loss then counts them as often as they occur. "
        "Only with packing_strategy='prefix_tree'.",
    )
    shuffle_unit: Literal["conversation", "example"] = _option(
        "conversation",
        "What is shuffled: whole conversations, so that the examples which assistant_mask='each' makes of one stay "
        "together, or single examples.",
    )
    group_by_prefix: bool = _option(
        False,
        "Bring examples with common prefixes into the same update, within windows of 4,096 examples or 16 updates of "
        "the shuffled order. It changes which examples an update learns from, not how many.",
    )
    sequence_length_multiple: int | None = _option(
        None, "Pad every root sequence of a row to this multiple. None takes what the layout needs."
    )
    packed_length_multiple: int | None = _option(
        None, "Pad every row to this multiple. None takes what the layout needs."
    )

    # parallel
    tensor_parallel_size: int = _option(
        1, "Ranks that split each matrix between them. Whatever ranks are left over run different rows (data parallel)."
    )
    pipeline_parallel_size: int = _option(1, "Ranks that split the layers between them.")
    virtual_pipeline_parallel_size: int = _option(
        1, "Runs of layers on each pipeline rank; more than 1 interleaves them and needs pipeline_parallel_size > 1."
    )
    context_parallel_size: int = _option(1, "Ranks that split each row's slots between them.")
    expert_parallel_size: int = _option(
        1,
        "Ranks that split each layer's experts between them, out of the tensor-, context- and data-parallel ranks.",
    )
    moe_token_dispatcher_type: Literal["alltoall", "allgather"] = _option(
        "alltoall",
        "How slots reach experts on other ranks: 'alltoall' sends a slot once for each expert that it goes to; "
        "'allgather' sends every slot once to every rank that shares the experts, which is less when these ranks are "
        "few and a slot has many experts, and needs expert_parallel_size > 1.",
    )
    moe_shared_expert_overlap: bool = _option(
        False,
        "Compute the shared expert, of models that have one, on a stream of its own while slots travel to their routed "
        "experts. Needs a GPU, tensor_parallel_size=1 and moe_token_dispatcher_type='alltoall'.",
    )
    sequence_parallel: bool = _option(
        False,
        "Split activations between matrices over the tensor-parallel ranks too, which saves memory; needs "
        "tensor_parallel_size > 1.",
    )

    # precision and speed
    bf16: bool | None = _option(
        None,
        "Compute in bfloat16 with frozen weights kept in it. None means True on a GPU, or where accelerate's "
        "configuration says mixed_precision: bf16, and False otherwise.",
    )
    fp8: Literal["tensorwise", "delayed", "blockwise", "mxfp8"] | None = _option(
        None,
        "FP8 recipe of the frozen matrix products, with Transformer Engine's kernels; needs a GPU, bf16 and a model "
        "without biases; 'mxfp8' needs Blackwell. None computes them in bf16.",
    )
    attention: Literal["auto", "tree", "thd"] = _option(
        "auto",
        "Attention over packed rows: 'tree' serves all of them; 'thd', Transformer Engine's kernels for sequences of "
        "different lengths, those of packing strategies that share nothing, and needs a GPU and bf16. 'auto' takes "
        "'thd' only where it can and was measured to be faster.",
    )
    recompute: Literal["auto", "full", "selective", "off"] = _option(
        "auto",
        "Activations to compute again in the backward pass: 'off' none; 'selective' those that cost no matrix "
        "product; 'full' all of each layer's, as gradient_checkpointing and activation_checkpointing mean. 'auto' "
        "takes for each row the least that fits into the GPU's free memory, and none on a CPU.",
    )

    # safety
    on_nonfinite: Literal["raise", "skip"] = _option(
        "raise",
        "On a NaN or infinite loss or gradient norm: 'raise', or 'skip' the update, count it and log a warning; the "
        "logged loss is then the mean of those that are finite, and NaN where none is.",
    )

    # saving
    export_format: Literal["peft", "per_expert"] = _option(
        "peft",
        "How adapters of experts are saved: 'peft' as peft loads them, 'per_expert' one by one for inference engines, "
        "which need one rank and alpha for the whole adapter. Training resumes from both.",
    )

    # defaults that differ from TrainingArguments
    dataloader_num_workers: int = _option(
        1, "Processes that pack the next updates while this one runs. 0 packs between updates."
    )
    logging_nan_inf_filter: bool = _option(False, "Only False is supported: see on_nonfinite.")
    remove_unused_columns: bool = _option(False, "Nothing depends on it: packing reads its own columns.")

    def __new__(cls, *args: Any, **kwargs: Any) -> "MegaPackConfig":
        """Refuse names that only others have before dataclasses calls them unexpected."""
        refuse_trl_names(kwargs)
        _refuse_unknown(cls, kwargs)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        self._check_alone()
        check_launcher()
        self.bf16 = resolve_bf16(self.bf16, fp8=self.fp8, use_cpu=self.use_cpu)
        # transformers would ask accelerate, through the environment, to compile its own model.
        torch_compile, self.torch_compile = self.torch_compile, False
        try:
            super().__post_init__()
        except ValueError as error:
            raise ConfigError(f"transformers refuses these arguments: {error}") from error
        self.torch_compile = torch_compile
        if getattr(self, "warmup_ratio", None) is not None:
            # Releases that have it have made it warmup_steps, and would do so again over one that is set later.
            self.warmup_ratio = None
        self._check_together()

    def check(self) -> None:
        """Check every field once more: fields, and `set_optimizer` and its like, may be set after the config is built.

        What follows from other fields, such as eval_steps from logging_steps, follows from what they are now.

        Raises:
            ConfigError: As when the config is built, and if an attribute was set that only TRL has.
        """
        refuse_trl_names(vars(self))
        if self.eval_delay is None:
            self.eval_delay = 0  # set_evaluate leaves None where it is given no delay
        # Not a subclass's own, which need not expect to run again.
        MegaPackConfig.__post_init__(self)

    def _check_alone(self) -> None:
        self._refuse_arguments()
        self._check_values()
        self._resolve_recompute()

    def _check_together(self) -> None:
        self._check_packing()
        self._check_combinations()
        check_optimizer(self)
        check_duration(self)
        check_reports(self)
        check_schedule(self)

    def _refuse_arguments(self) -> None:
        """Raise ConfigError on a field of TrainingArguments that is refused, or unknown to our table, and set."""
        for inherited in dataclasses.fields(TrainingArguments):
            verdict = TRAINING_ARGUMENTS.get(inherited.name)
            if verdict is not None and verdict.mark != "refused":
                continue
            value = getattr(self, inherited.name)
            if _is_default(value, MegaPackConfig.__dataclass_fields__[inherited.name]):
                continue
            reason = verdict.reason if verdict else "this version of hf_megapack does not know it"
            raise ConfigError(f"{inherited.name}={value!r} is not supported: {reason}. Leave {inherited.name} out.")

    def _check_values(self) -> None:
        """Check the fields that this class declares, and those of TrainingArguments that are honoured."""
        honoured = {name for name, verdict in TRAINING_ARGUMENTS.items() if verdict.mark == "honoured"}
        check_optimizer_name(self)
        read = honoured | MegaPackConfig.__annotations__.keys()
        names = [known.name for known in dataclasses.fields(MegaPackConfig) if known.name in read]
        check_values(self, MegaPackConfig, names)
        check_intervals(self)

    def _resolve_recompute(self) -> None:
        """Turn transformers' two names for full recomputation into recompute='full'.

        Both are then reset, because the Trainer would otherwise call a method that only transformers models have.
        """
        for name in ("gradient_checkpointing", "activation_checkpointing"):
            inherited = TrainingArguments.__dataclass_fields__.get(name)
            if inherited is None or not getattr(self, name):
                continue
            if self.recompute not in ("auto", "full"):
                raise ConfigError(
                    f"{name}=True means recompute='full', but recompute={self.recompute!r} was given. Set only one."
                )
            self.recompute = "full"
            setattr(self, name, inherited.default)

    def _check_combinations(self) -> None:
        """Raise ConfigError where the layout or the precision does not go with another field."""
        if self.sequence_parallel and self.tensor_parallel_size == 1:
            raise ConfigError(
                "sequence_parallel=True splits activations over the tensor-parallel ranks, but tensor_parallel_size=1. "
                "Raise tensor_parallel_size, or leave sequence_parallel out."
            )
        if self.virtual_pipeline_parallel_size > 1 and self.pipeline_parallel_size == 1:
            raise ConfigError(
                f"virtual_pipeline_parallel_size={self.virtual_pipeline_parallel_size} cuts each pipeline stage into "
                "chunks, but pipeline_parallel_size=1. Raise pipeline_parallel_size, or leave it out."
            )
        if self.moe_token_dispatcher_type == "allgather" and self.expert_parallel_size == 1:
            raise ConfigError(
                "moe_token_dispatcher_type='allgather' gathers slots over the ranks that share experts, but "
                "expert_parallel_size=1. Raise expert_parallel_size, or leave moe_token_dispatcher_type out."
            )
        if self.moe_token_dispatcher_type == "allgather" and self.moe_shared_expert_overlap:
            raise ConfigError(
                "moe_shared_expert_overlap=True with moe_token_dispatcher_type='allgather': only 'alltoall' computes "
                "the shared expert while slots travel. Use 'alltoall', or leave moe_shared_expert_overlap out."
            )
        if self.torch_compile and self.recompute == "selective":
            raise ConfigError(
                "torch_compile=True lets the compiler choose what a layer keeps; recompute='selective' chooses by "
                "hand. Use recompute='auto', 'full' or 'off' with it, or leave torch_compile out."
            )
        if self.fp8 is not None and not self.bf16:
            raise ConfigError(
                f"fp8={self.fp8!r} replaces matrix products in bf16, but bf16={self.bf16}. Set bf16=True on a GPU, or "
                "leave fp8 out."
            )

    def _check_packing(self) -> None:
        """Raise ConfigError where what fills a row, in which order, does not go with another field."""
        if self.max_length is not None and self.max_length > self.packed_sequence_length:
            raise ConfigError(
                f"max_length={self.max_length} exceeds packed_sequence_length={self.packed_sequence_length}: an "
                "example must fit into one row. Lower max_length or raise packed_sequence_length."
            )
        if self.attention == "thd" and self.packing_strategy == "prefix_tree":
            raise ConfigError(
                "attention='thd' attends within each example by itself, but packing_strategy='prefix_tree' lets "
                "examples share prefixes. Use packing_strategy='ffd', 'mffd' or 'balanced', or attention='tree'."
            )
        if self.group_by_prefix and self.packing_strategy != "prefix_tree":
            raise ConfigError(
                f"group_by_prefix=True helps to share prefixes; packing_strategy={self.packing_strategy!r} does not "
                "share. Use 'prefix_tree', or leave group_by_prefix out."
            )
        if self.group_by_prefix and self.train_sampling_strategy == "sequential":
            raise ConfigError(
                "group_by_prefix=True rearranges the shuffled order, train_sampling_strategy='sequential' keeps the "
                "dataset's. Leave one of them out."
            )
        if self.train_sampling_strategy == "group_by_length":
            raise ConfigError(
                "train_sampling_strategy='group_by_length' is not supported: packing wastes nothing on unequal "
                "lengths. Use 'random' or 'sequential'."
            )
        if self.train_sampling_strategy not in ("random", "sequential"):
            raise ConfigError(
                f"train_sampling_strategy={self.train_sampling_strategy!r} is not supported. Use 'random' or "
                "'sequential'."
            )


def refuse_trl_names(names: typing.Iterable[str]) -> None:
    """Raise on names that only TRL has, or only earlier releases of transformers: one error names all of them.

    Args:
        names: Argument names.

    Raises:
        ConfigError: Saying what each argument is called here.
    """
    found = []
    for name in names:
        if name in TRL_NAMES:
            found.append(f"{name} is a TRL argument that hf_megapack does not have: {TRL_NAMES[name]}.")
        elif name in DROPPED_ARGUMENTS and name not in TrainingArguments.__dataclass_fields__:
            found.append(f"{name} is not in this release of transformers: {DROPPED_ARGUMENTS[name]}.")
    if found:
        raise ConfigError("\n".join(found))


def _refuse_unknown(config_class: type, names: typing.Iterable[str]) -> None:
    """Raise TypeError on names that a config does not take, with those that it takes and that look alike."""
    known = inspect.signature(config_class.__init__).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values()):
        return
    for name in names:
        if name not in known:
            alike = difflib.get_close_matches(name, known.keys() - {"self"})
            hint = f"did you mean {' or '.join(alike)}?" if alike else "docs/config.md lists those that there are."
            raise TypeError(f"{config_class.__name__} has no argument {name!r}; {hint}")


def _is_default(value: Any, declared: dataclasses.Field) -> bool:
    """Whether a value asks for nothing.

    transformers rewrites two defaults (None to its config, or to switches off), and to_dict two more (tokens to a word
    in their place, that config to a dict).
    """
    default = declared.default if declared.default_factory is dataclasses.MISSING else declared.default_factory()
    if declared.name == "accelerator_config":
        usual = AcceleratorConfig().to_dict()
        given = value.to_dict() if isinstance(value, AcceleratorConfig) else value
        value = None if isinstance(given, dict) and usual | given == usual else value
    if declared.name == "fsdp_config" and isinstance(value, dict) and not any(value.values()):
        value = None
    if declared.name.endswith("_token") and value == f"<{declared.name.upper()}>":
        value = None
    return value == default or (not value and not default)
