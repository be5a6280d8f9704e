"""The tables that say what becomes of every argument that users of transformers and TRL know.

Each argument is honoured, refused (setting it raises, with the reason) or irrelevant (accepted, and nothing depends on
it, with the reason). A test fails when the installed transformers has an argument that is in none of the tables. The
fields that MegaPackConfig adds are described in config.py alone.
"""

from typing import Literal, NamedTuple

Mark = Literal["honoured", "refused", "irrelevant"]


class Verdict(NamedTuple):
    """What becomes of one argument.

    Attributes:
        mark: Honoured, refused or irrelevant.
        reason: Why, and what to use instead; empty for honoured arguments.
    """

    mark: Mark
    reason: str = ""


def _honoured(names: str) -> dict[str, Verdict]:
    return {name: Verdict("honoured") for name in names.split()}


def _each(mark: Mark, reasons: dict[str, str]) -> dict[str, Verdict]:
    return {name: Verdict(mark, reason) for names, reason in reasons.items() for name in names.split()}


TRAINING_ARGUMENTS: dict[str, Verdict] = {
    **_honoured(
        """
        output_dir per_device_train_batch_size num_train_epochs max_steps learning_rate lr_scheduler_type
        lr_scheduler_kwargs warmup_steps warmup_ratio optim optim_args weight_decay adam_beta1 adam_beta2 adam_epsilon
        gradient_accumulation_steps max_grad_norm bf16 tf32 activation_checkpointing gradient_checkpointing
        logging_strategy logging_steps logging_first_step logging_dir log_on_each_node include_num_input_tokens_seen
        log_level log_level_replica disable_tqdm report_to run_name project trackio_space_id trackio_bucket_id
        trackio_static_space_id eval_strategy eval_steps eval_delay eval_on_start per_device_eval_batch_size
        save_strategy save_steps save_total_limit save_only_model load_best_model_at_end metric_for_best_model
        greater_is_better ignore_data_skip restore_callback_states_from_checkpoint full_determinism seed data_seed
        use_cpu dataloader_drop_last dataloader_num_workers dataloader_persistent_workers dataloader_prefetch_factor
        dataloader_multiprocessing_context train_sampling_strategy ddp_backend ddp_timeout skip_memory_metrics
        torch_compile
        """
    ),
    **_each(
        "refused",
        {
            "optim_target_modules": "it selects modules for optimizers that look at whole matrices",
            "average_tokens_across_devices": "the loss is always that of the whole update",
            "label_smoothing_factor": "the loss is plain cross-entropy",
            "fp16": "use bf16",
            "fp16_full_eval bf16_full_eval": "evaluation runs in the precision of training",
            "activation_checkpointing_kwargs gradient_checkpointing_kwargs": "choose with recompute instead",
            "torch_compile_backend torch_compile_mode": "torch_compile=True compiles layers with the default backend",
            "use_liger_kernel liger_kernel_config": "Liger patches transformers models only",
            "neftune_noise_alpha": "noise on embeddings differs between examples, so prefixes could not be shared",
            "torch_empty_cache_steps": "the backend manages its own memory",
            "auto_find_batch_size": "a row never exceeds packed_sequence_length: lower that when memory runs out",
            "logging_nan_inf_filter": "a non-finite loss stops training; see on_nonfinite",
            "include_for_metrics batch_eval_metrics": "compute_metrics is not supported",
            "save_on_each_node": "the first process alone writes, to a folder that all nodes see",
            "enable_jit_checkpoint": "set save_steps to the loss of work that you can afford",
            "push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision": (
                "upload the adapter folder after training, for example with `hf upload`"
            ),
            "accelerator_config": "batches and gradients do not pass through accelerate",
            "parallelism_config": "use tensor_parallel_size and the fields beside it",
            "dataloader_in_order": "updates come in the order that the seed gives",
            "fsdp fsdp_config": "use tensor_parallel_size and the fields beside it",
            "deepspeed": "use tensor_parallel_size and the fields beside it",
            "debug": "the finite guard names the update and the quantity; there are no further probes",
        },
    ),
    **_each(
        "irrelevant",
        {
            "use_cache": "training keeps no key-value cache",
            "prediction_loss_only": "evaluation returns the loss and token metrics, never predictions",
            "eval_do_concat_batches eval_use_gather_object eval_accumulation_steps": "predictions are never gathered",
            "do_train do_eval do_predict": "a flag for scripts, which the Trainer does not read",
            "resume_from_checkpoint": "examples/sft.py hands it to train(); the Trainer does not read it",
            "dataloader_pin_memory": "batches travel as one small buffer of integers",
            "remove_unused_columns label_names": "datasets are rendered to the columns that packing reads",
            "length_column_name": "lengths are read from the tokens",
            "ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph": "DDP is not used",
            "local_rank": "the launcher's environment is read instead",
        },
    ),
}

# What transformers has dropped but scripts still give, so that docs/config.md leaves it out, and what to use instead.
# The oldest releases of our range have the first two.
DROPPED_ARGUMENTS = {
    "warmup_ratio": "use warmup_steps, which below 1 is a fraction of all updates",
    "logging_dir": "set TENSORBOARD_LOGGING_DIR in the environment",
    "evaluation_strategy": "use eval_strategy",
    "group_by_length": "leave it out, since packing wastes nothing on unequal lengths",
    "no_cuda": "use use_cpu",
    "overwrite_output_dir": "leave it out; train() begins anew unless it is given resume_from_checkpoint",
    "save_safetensors": "leave it out, since nothing else is written",
}

# What may differ between the processes of one run: rank 0 alone acts on it, or each for itself.
PER_PROCESS = frozenset(
    _honoured(
        """
        output_dir logging_dir run_name project report_to trackio_space_id trackio_bucket_id trackio_static_space_id
        log_level log_level_replica log_on_each_node disable_tqdm local_rank resume_from_checkpoint do_train do_eval
        do_predict skip_memory_metrics dataset_num_proc dataloader_num_workers dataloader_persistent_workers
        dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_pin_memory ddp_timeout
        """
    )
)

TRAINER_ARGUMENTS: dict[str, Verdict] = {
    **_honoured(
        """
        model args data_collator train_dataset eval_dataset processing_class callbacks optimizers
        optimizer_cls_and_kwargs peft_config
        """
    ),
    **_each(
        "refused",
        {
            "model_init": "pass the model's name, folder or config as model",
            "compute_loss_func": "the loss is cross-entropy over the loss-bearing tokens of the whole update",
            "compute_metrics preprocess_logits_for_metrics": (
                "logits of packed rows are not returned; evaluation reports loss, mean_token_accuracy and entropy"
            ),
            "quantization_config": "base weights are kept in bf16 or fp32",
            "formatting_func": "map the dataset to one of the formats in docs/data.md before training, such as text",
        },
    ),
}

# Methods of the HF Trainer that packed training never calls, so that a subclass would override them in vain.
UNCALLED_METHODS: dict[str, str] = {
    "compute_loss": (
        "the loss is cross-entropy over the loss-bearing tokens of the whole update, computed by the backend; choose "
        "tokens with assistant_mask or with labels"
    ),
    "prediction_step": "evaluation packs its rows; override evaluation_loop to evaluate in another way",
    "create_optimizer_and_scheduler": "override create_optimizer or create_scheduler",
    "get_decay_parameter_names": "all factors are matrices, which decay; override create_optimizer to group them",
    "_prepare_inputs": "an update reaches the backend as it was packed; override training_step to look at it",
    "_save": "override save_model, which is given the folder",
    "_save_optimizer_and_scheduler": "optimizer state is saved as full tensors; a callback's on_save may add files",
    "_get_train_sampler": "updates are drawn whole; use train_sampling_strategy, shuffle_unit and group_by_prefix",
    "_get_eval_sampler": "evaluation reads its dataset in order; sort the dataset",
}

TRL_NAMES: dict[str, str] = {
    "packing": "packing is always on; choose with packing_strategy",
    "eval_packing": "evaluation is packed as training is; its loss does not depend on packing",
    "padding_free": "rows are never padded to a common length; set packed_sequence_length",
    "pad_to_multiple_of": "use packed_length_multiple",
    "max_seq_length": "use max_length for one example and packed_sequence_length for one packed row",
    "truncation_mode": "use overlong='truncate_left' or overlong='truncate_right'",
    "assistant_only_loss": "use assistant_mask='all'",
    "completion_only_loss": (
        "prompt/completion rows learn the completion only; for messages use assistant_mask, and to learn prompts too "
        "give rows with text, or with input_ids and labels"
    ),
    "dataset_text_field": "text is read from the column text; rename yours with dataset.rename_column",
    "dataset_kwargs": "give rows that are ready, or render them with ChatTransform before training",
    "dataset_batch_size": "datasets are rendered in batches of the datasets library's own size",
    "shuffle_dataset": "use train_sampling_strategy='random' or 'sequential'",
    "chat_template_path": "set processing_class.chat_template",
    "eos_token": "set it on processing_class",
    "pad_token": "set it on processing_class",
    "model_init_kwargs": (
        "bf16 sets the precision and attention the kernels, the rest stands in the model's config.json; with a "
        "PretrainedConfig as model training begins from random weights"
    ),
    "trust_remote_code": "models run on Megatron-Core, never on code from the hub",
    "router_aux_loss_coef": "auxiliary losses are off while the base model is frozen",
    "loss_type": "the loss is cross-entropy over the loss-bearing tokens of the whole update",
    "activation_offloading": "use recompute='full'",
    "tokenizer": "use processing_class",
}

# Values of optim that treat every element alike; guard.py has the classes.
ELEMENTWISE_OPTIMIZERS = {
    "adamw_torch": (),
    "adamw_torch_fused": (),
    "sgd": ("momentum", "dampening", "nesterov"),
    "adagrad": ("lr_decay", "eps"),
    "rmsprop": ("momentum", "alpha", "eps", "centered"),
}
