"""Weights: what a LoRA adapter is made of, how it reaches the disk and how it comes back.

Functions take plain tensors under PEFT key names, peft's LoraConfig and local paths, so each works without a trainer
and without Megatron. A finished adapter read, checked and written again:

    config, state = read_peft_adapter("adapter")
    export_peft_adapter(state, config, "copy", base_model_name=config.base_model_name_or_path)
    verify_with_peft("copy", AutoModelForCausalLM.from_pretrained(config.base_model_name_or_path))

Which modules of a model a LoraConfig adapts, and how:

    specs = resolve_lora(LoraConfig(r=16, target_modules="all-linear"), linear_names)
    factor_a, factor_b = initial_lora_weights(specs[name], in_features, out_features, True, generator)

The experts of a layer are one module for each projection here, with stacked factors; files hold them as peft or as
inference engines want them.

Adapters and optimizer moments have the same names whatever the parallel layout, so a checkpoint resumes in any other.
"""

from hf_megapack.weights.adapter import (
    LORA_FIELDS,
    LoraSpec,
    check_lora_config,
    initial_lora_weights,
    resolve_lora,
)
from hf_megapack.weights.checkpoint import (
    publish_directory,
    read_optimizer_state,
    save_optimizer_state,
    sweep_staging,
)
from hf_megapack.weights.export import export_peft_adapter, read_peft_adapter
from hf_megapack.weights.verify import verify_with_peft

__all__ = [
    "LORA_FIELDS",
    "LoraSpec",
    "check_lora_config",
    "resolve_lora",
    "initial_lora_weights",
    "export_peft_adapter",
    "read_peft_adapter",
    "verify_with_peft",
    "publish_directory",
    "sweep_staging",
    "save_optimizer_state",
    "read_optimizer_state",
]
