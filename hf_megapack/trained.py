"""What MegaPackTrainer trains: the base model, the adapter on it, the tokenizer, and what they let an example be."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig

from hf_megapack.config import MegaPackConfig
from hf_megapack.data.lengths import ExampleLimit, longest_example
from hf_megapack.errors import ConfigError
from hf_megapack.weights.adapter import check_lora_config, lora_spec
from hf_megapack.weights.export import read_peft_adapter


def resolve_adapter(
    model: str | os.PathLike | PretrainedConfig, peft_config: LoraConfig | None
) -> tuple[str | PretrainedConfig, LoraConfig, dict[str, torch.Tensor] | None]:
    """Find out what to train.

    Args:
        model: As for MegaPackTrainer.
        peft_config: As for MegaPackTrainer.

    Returns:
        The base model, the adapter's configuration, and the adapter to continue from when `model` is its folder.

    Raises:
        ConfigError: If either is missing, of the wrong kind, not supported, or given twice.
    """
    if isinstance(model, PretrainedConfig):
        folder = None
    elif isinstance(model, str | os.PathLike):
        model = os.fspath(model)
        folder = Path(model) if (Path(model) / "adapter_config.json").exists() else None
    else:
        raise ConfigError(
            f"model is a {type(model).__name__}; give a hub id, a local folder or a PretrainedConfig. Megatron-Core "
            "loads the weights itself, so the transformers model need not be built."
        )
    if isinstance(model, str) and (fault := _path_fault(model)):
        raise ConfigError(f"model={model!r} {fault}. Give a local folder, or a hub id such as Qwen/Qwen3-0.6B.")
    adapter = None
    if folder is not None:
        if peft_config is not None:
            raise ConfigError(f"{folder} is an adapter with a configuration of its own: leave peft_config out.")
        peft_config, adapter = read_peft_adapter(folder)
        model = peft_config.base_model_name_or_path
        if not model:
            raise ConfigError(f"{folder} does not name its base model: set base_model_name_or_path in its config.")
        _check_continued(folder, peft_config)
    if not isinstance(peft_config, LoraConfig):
        raise ConfigError(
            f"peft_config is a {type(peft_config).__name__}; it must be a peft.LoraConfig, for example "
            'LoraConfig(r=16, lora_alpha=32, target_modules="all-linear").'
        )
    check_lora_config(peft_config)
    return model, peft_config, adapter


def _path_fault(model: str) -> str:
    """Return what is wrong with a path that is no folder; an empty string for folders and what may be a hub id."""
    if os.path.isfile(model):
        return "is a file"
    is_path = model.count("/") > 1 or model.startswith(("/", ".", "~"))
    if not is_path or os.path.isdir(model):
        return ""
    return "is no folder" + ("; ~ is not expanded here" if model.startswith("~") else "")


def _check_continued(folder: Path, peft_config: LoraConfig) -> None:
    """Check the configuration of an adapter to continue from, where a user can change it only in its file."""
    file, base_model = folder / "adapter_config.json", peft_config.base_model_name_or_path
    try:
        check_lora_config(peft_config)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error} To train on from this adapter, change that file.") from error
    try:
        AutoConfig.from_pretrained(base_model)
    except OSError as error:
        raise ConfigError(
            f"{file} names the base model {base_model!r}, which cannot be loaded: {error} If it has moved, write its "
            "present place as base_model_name_or_path into that file."
        ) from error


def resolve_tokenizer(
    model: str | os.PathLike | PretrainedConfig, base_model: str | PretrainedConfig, processing_class: Any
) -> Any:
    """Return the tokenizer: the given one, else the one beside the adapter, else the base model's.

    Args:
        model: As for MegaPackTrainer.
        base_model: What `resolve_adapter` found to be the base model.
        processing_class: As for MegaPackTrainer.

    Raises:
        ConfigError: If there is none.
    """
    if processing_class is not None:
        return processing_class
    if isinstance(model, PretrainedConfig):
        raise ConfigError("A model built from a configuration has no tokenizer: give one as processing_class.")
    has_own = (Path(model) / "tokenizer_config.json").exists()
    return AutoTokenizer.from_pretrained(model if has_own else base_model)


def find_example_limit(model: str | PretrainedConfig, args: MegaPackConfig) -> ExampleLimit:
    """Return what an example may be, by the arguments and by the base model.

    Args:
        model: Hub id, local folder or configuration.
        args: The data options.
    """
    config = model if isinstance(model, PretrainedConfig) else AutoConfig.from_pretrained(model)
    config = config.get_text_config()
    limit = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if limit is not None and rope.get("rope_type") in ("yarn", "linear"):
        # Configurations give the positions before or after they are stretched.
        limit = max(limit, int(rope["factor"] * rope.get("original_max_position_embeddings", limit)))
    longest = longest_example(args.max_length, args.packed_sequence_length, limit)
    return longest._replace(vocab_size=config.vocab_size)


def check_same_adapter(
    peft_config: LoraConfig, base_model: str | None, saved: LoraConfig, keys: Iterable[str], folder: str
) -> None:
    """Check that a saved adapter means the same under the current configuration.

    Args:
        peft_config: The current configuration.
        base_model: Name of the current base model, None for one without a checkpoint.
        saved: The adapter's own configuration.
        keys: PEFT keys of its tensors.
        folder: Where it was read.

    Raises:
        ConfigError: If it was trained on another base model, or rank or scaling of any module differ.
    """
    saved_base = saved.base_model_name_or_path
    if not _is_same_model(saved_base, base_model):
        here, there = base_model or "a configuration", saved_base or "a configuration"
        raise ConfigError(
            f"model is {here!r}, but {folder} was trained on {there!r}. Resume with that model; or, if both are the "
            f"same under two names, write the new one as base_model_name_or_path into {folder}/adapter_config.json; or "
            "pass the checkpoint's folder as model, without peft_config, to begin a new run from its adapter."
        )
    for module in sorted({key.removeprefix("base_model.model.").partition(".lora_")[0] for key in keys}):
        here, there = lora_spec(peft_config, module), lora_spec(saved, module)
        if here != there:
            raise ConfigError(
                f"peft_config gives {module} {here}, but {folder} was trained with {there}. Resume with the LoraConfig "
                "that training began with."
            )


def _is_same_model(one: str | None, other: str | None) -> bool:
    """Whether two names mean one model: a folder has many names."""
    if not one or not other:
        return not one and not other
    return one == other or (os.path.isdir(one) and os.path.isdir(other) and os.path.samefile(one, other))
