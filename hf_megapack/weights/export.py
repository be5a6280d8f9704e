"""Write and read PEFT adapter directories: `adapter_model.safetensors` and `adapter_config.json`.

A reader finds the old adapter or the new one, complete; never one's weights under the other's config. The config that
is written selects in peft exactly the modules in the file, with their ranks and scales. This module neither gathers
shards nor knows a model: it gets full tensors under PEFT key names.
"""

import copy
import dataclasses
import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import peft
import torch
from peft import LoraConfig, PeftModel
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.constants import INCLUDE_LINEAR_LAYERS_SHORTHAND
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from hf_megapack.errors import ConfigError, ExportError, NonFiniteResultError
from hf_megapack.weights.adapter import LoraSpec, check_lora_config, lora_spec, resolve_lora
from hf_megapack.weights.checkpoint import make_staging, sweep_staging, sync_file, sync_tree
from hf_megapack.weights.targets import pattern_matches

WEIGHTS_NAME = "adapter_model.safetensors"
CONFIG_NAME = "adapter_config.json"

# Holds a complete synced adapter while its two files move into place; a reader may find either file still in here.
_PUBLISHING_NAME = ".adapter.publishing"
_READABLE = (torch.float32, torch.float16, torch.bfloat16)
_KEY = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<factor>[AB])(?:\.default)?\.weight")


def export_peft_adapter(
    state: Mapping[str, torch.Tensor],
    peft_config: LoraConfig,
    directory: str | os.PathLike[str],
    *,
    base_model_name: str | None,
    linear_names: Sequence[str] | None = None,
) -> None:
    """Write an adapter that peft loads, or leave what was there.

    Equal input gives equal bytes. Other files in the directory are left alone; an adapter in it is replaced.

    Args:
        state: PEFT key ("base_model.model.<module path>.lora_A.weight") to full tensor: A of shape (r, in), B of
            shape (out, r). Written as float32.
        peft_config: The config that the adapter was trained with.
        directory: Where to write; created when missing.
        base_model_name: Hub id or folder of the base model, for AutoPeftModelForCausalLM; None if it has none.
        linear_names: Hugging Face paths of all linear modules of the model. With them the state is checked for
            completeness and targets are written as short names ("q_proj") where those select exactly the modules in
            the file. Without them targets are written as full paths.

    Raises:
        NonFiniteResultError: If a tensor holds NaN or infinity.
        ExportError: If keys or shapes do not make an adapter of this config, or the files cannot be written. Nothing
            is written when a check fails.
    """
    _check_is_plain_lora(peft_config)
    factors = _factors(state)
    specs = _checked_specs(factors, peft_config)
    tensors = {
        _key(module, factor): tensor.detach().to("cpu", torch.float32, copy=True).contiguous()
        for module, pair in factors.items()
        for factor, tensor in zip("AB", pair, strict=True)
    }
    _check_finite(tensors, "nothing was written")
    config = _portable_config(peft_config, specs, linear_names)
    config.base_model_name_or_path, config.revision = base_model_name, peft_config.revision
    directory = Path(directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _settle_interrupted(directory)
        _stage(directory, tensors, config)
        try:
            _publish(directory)
        except BaseException:
            # The new adapter is complete on disk and the old one may be gone already, so the way out is forward.
            _publish(directory)
            raise
    except (OSError, SafetensorError) as error:
        raise ExportError(f"Cannot write the adapter to {directory}: {error}.") from error


def read_peft_adapter(directory: str | os.PathLike[str]) -> tuple[LoraConfig, dict[str, torch.Tensor]]:
    """Read an adapter that this package, peft or another tool wrote in PEFT's format.

    Args:
        directory: A local folder with `adapter_config.json` and `adapter_model.safetensors`.

    Returns:
        The config, without target names and pattern keys that match no module of the file, and PEFT key without
        adapter name to float32 CPU tensor, sorted by key.

    Raises:
        ExportError: If a file is missing or damaged, it is not a plain LoRA adapter, or keys, shapes and config do not
            belong together.
        NonFiniteResultError: If a tensor holds NaN or infinity.
    """
    directory = Path(directory)
    config_path, weights_path = _adapter_files(directory)
    try:
        config_bytes = config_path.read_bytes()
        loaded = load_file(weights_path)
        is_unchanged = _adapter_files(directory)[0].read_bytes() == config_bytes
    except (OSError, SafetensorError) as error:
        raise ExportError(f"Cannot read the adapter in {directory}: {error}.") from error
    if not is_unchanged:
        raise ExportError(f"The adapter in {directory} was replaced while it was read; read it again.")
    config = _parsed_config(config_bytes, config_path)
    unusual = sorted(name for name, tensor in loaded.items() if tensor.dtype not in _READABLE)
    if unusual:
        raise ExportError(f"{weights_path}: {unusual[0]} is {loaded[unusual[0]].dtype}; allowed are {_READABLE}.")
    factors = _factors(loaded)
    _drop_idle_names(config, _checked_specs(factors, config))
    _check_selects(config, factors)
    state = {
        _key(module, factor): tensor.to(torch.float32)
        for module, pair in sorted(factors.items())
        for factor, tensor in zip("AB", pair, strict=True)
    }
    _check_finite(state, f"read from {weights_path}")
    return config, state


def verify_with_peft(directory: str | os.PathLike[str], base_model: PreTrainedModel) -> None:
    """Prove that peft loads an adapter completely: it has been seen to drop modules without an error.

    Args:
        directory: The adapter.
        base_model: The base model in transformers, without adapter. It is changed and put back; load it anew if peft
            cannot load the adapter at all.

    Raises:
        ExportError: If peft cannot load the adapter, or keys or values in the loaded model differ from the file.
    """
    _, expected = read_peft_adapter(directory)
    device = str(next(base_model.parameters()).device)
    try:
        model = PeftModel.from_pretrained(base_model, os.fspath(directory), torch_device=device)
    except (RuntimeError, ValueError) as error:
        raise ExportError(f"peft {peft.__version__} cannot load {directory} on this base model: {error}") from error
    try:
        found = {
            name.replace(".default.", "."): tensor.detach().to("cpu", torch.float32)
            for name, tensor in model.state_dict().items()
            if ".lora_" in name
        }
    finally:
        model.unload()
        # peft 0.20 leaves this mark, and warns about a second adapter when it meets it; delete with 0.20.
        base_model.__dict__.pop("peft_config", None)
    problems = {
        "in the file only": sorted(expected.keys() - found.keys()),
        "in the loaded model only": sorted(found.keys() - expected.keys()),
        "with other values": sorted(
            key for key in expected.keys() & found.keys() if not torch.equal(expected[key], found[key])
        ),
    }
    if any(problems.values()):
        listed = "; ".join(f"{len(keys)} {where}: {', '.join(keys[:5])}" for where, keys in problems.items() if keys)
        raise ExportError(f"peft {peft.__version__} does not load {directory} as it is. Keys {listed}.")


def _key(module: str, factor: str) -> str:
    return f"base_model.model.{module}.lora_{factor}.weight"


def _factors(state: Mapping[str, torch.Tensor]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Pair A and B by module, sorted; refuse every key that is neither, doubled or alone."""
    matches = {key: _KEY.fullmatch(key) for key in state}
    foreign = sorted(key for key, match in matches.items() if match is None)
    if foreign:
        raise ExportError(f"{len(foreign)} tensors are no LoRA factors: {', '.join(foreign[:5])}.")
    found: dict[str, dict[str, torch.Tensor]] = {}
    for key, match in matches.items():
        assert match is not None
        factors = found.setdefault(match["module"], {})
        if match["factor"] in factors:
            raise ExportError(f"{key} is there twice, with and without the adapter name.")
        factors[match["factor"]] = state[key]
    alone = sorted(module for module, factors in found.items() if len(factors) != 2)
    if alone or not found:
        raise ExportError(
            f"lora_A or lora_B is missing for: {', '.join(alone[:5])}." if alone else "The adapter is empty."
        )
    return {module: (found[module]["A"], found[module]["B"]) for module in sorted(found)}


def _checked_specs(
    factors: Mapping[str, tuple[torch.Tensor, torch.Tensor]], peft_config: LoraConfig
) -> dict[str, LoraSpec]:
    specs = {module: lora_spec(peft_config, module) for module in factors}
    for module, (factor_a, factor_b) in factors.items():
        rank = specs[module].rank
        shapes = tuple(factor_a.shape), tuple(factor_b.shape)
        if list(map(len, shapes)) != [2, 2] or shapes[0][0] != rank or shapes[1][1] != rank:
            raise ExportError(
                f"{module} has lora_A {shapes[0]} and lora_B {shapes[1]}; its rank is {rank}, so ({rank}, in) and "
                f"(out, {rank}) are expected."
            )
    return specs


def _check_finite(tensors: Mapping[str, torch.Tensor], consequence: str) -> None:
    bad = [name for name, tensor in tensors.items() if not torch.isfinite(tensor).all()]
    if bad:
        values = tensors[bad[0]]
        raise NonFiniteResultError(
            f"{len(bad)} of {len(tensors)} adapter tensors hold NaN or infinity, the first is {bad[0]} with "
            f"{int((~torch.isfinite(values)).sum())} of {values.numel()} values; {consequence}."
        )


def _portable_config(
    peft_config: LoraConfig, specs: Mapping[str, LoraSpec], linear_names: Sequence[str] | None
) -> LoraConfig:
    """Return the config to write: equal for equal adapters, exact in peft, independent of the order of JSON keys."""
    # peft's default targets depend on the model type, which nothing here knows.
    if linear_names is not None and peft_config.target_modules is not None:
        wanted = resolve_lora(_for_inference(peft_config), linear_names).keys()
        lacking, surplus = sorted(wanted - specs.keys()), sorted(specs.keys() - wanted)
        if lacking or surplus:
            raise ExportError(
                f"The adapter is not the one its LoraConfig selects: {len(lacking)} modules are lacking {lacking[:3]}, "
                f"{len(surplus)} are too many {surplus[:3]}."
            )
    config = _for_inference(peft_config)
    config.peft_version = peft.__version__
    config.init_lora_weights = True
    config.auto_mapping = config.exclude_modules = config.layers_to_transform = config.layers_pattern = None
    # JSON is written with sorted keys, but in peft the first key that matches wins.
    config.rank_pattern = dict(sorted((config.rank_pattern or {}).items()))
    config.alpha_pattern = dict(sorted((config.alpha_pattern or {}).items()))
    _drop_idle_names(config, specs)
    if specs != {module: lora_spec(config, module) for module in specs}:
        config.rank_pattern = _pattern({module: spec.rank for module, spec in specs.items()}, config.r)
        config.alpha_pattern = _pattern({module: spec.alpha for module, spec in specs.items()}, config.lora_alpha)
    config.target_modules = sorted({module.rpartition(".")[2] for module in specs})
    if linear_names is None or not _reproduces(config, specs, linear_names):
        config.target_modules = sorted(specs)
    if not _reproduces(config, specs, linear_names or list(specs)):
        raise ExportError("The adapter's modules, ranks and scales cannot be expressed in an adapter_config.json.")
    return config


def _pattern(values: Mapping[str, float], default: float) -> dict[str, Any]:
    """Name what differs from the default, by short name where all modules of that name agree, else by path.

    No two keys match one module, so their order means nothing.
    """
    by_ending: dict[str, dict[str, float]] = {}
    for module, value in values.items():
        by_ending.setdefault(module.rpartition(".")[2], {})[module] = value
    pattern: dict[str, Any] = {}
    for ending, group in by_ending.items():
        if len(set(group.values())) == 1:
            group = {ending: next(iter(group.values()))}
        pattern.update({name: value for name, value in group.items() if value != default})
    return pattern


def _reproduces(config: LoraConfig, specs: Mapping[str, LoraSpec], linear_names: Sequence[str]) -> bool:
    try:
        return resolve_lora(config, linear_names) == specs
    except ConfigError:
        return False


def _stage(directory: Path, tensors: dict[str, torch.Tensor], config: LoraConfig) -> None:
    staging = make_staging(directory, "adapter")
    try:
        save_file(tensors, staging / WEIGHTS_NAME, metadata={"format": "pt"})
        config.save_pretrained(os.fspath(staging))
        sync_tree(staging)
        os.rename(staging, directory / _PUBLISHING_NAME)
        sync_file(directory)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def _publish(directory: Path) -> None:
    """Move a staged adapter into place; can be repeated after any interruption.

    Under an equal config, replacing the weights is the one atomic switch. Under another config the old one goes first,
    so that no reader pairs it with the new weights, and the new one comes last.
    """
    staged, config_path = directory / _PUBLISHING_NAME, directory / CONFIG_NAME
    staged_config = staged / CONFIG_NAME
    if staged_config.exists() and config_path.exists() and staged_config.read_bytes() != config_path.read_bytes():
        config_path.unlink()
        sync_file(directory)
    for name in (WEIGHTS_NAME, CONFIG_NAME):
        if (staged / name).exists():
            os.replace(staged / name, directory / name)
            sync_file(directory)
    if staged.exists():
        staged.rmdir()


def _settle_interrupted(directory: Path) -> None:
    """Bring a directory whose last export was interrupted back to one complete adapter."""
    sweep_staging(directory)
    if (directory / _PUBLISHING_NAME).exists():
        if (directory / CONFIG_NAME).exists():
            shutil.rmtree(directory / _PUBLISHING_NAME)
        else:
            _publish(directory)


def _adapter_files(directory: Path) -> tuple[Path, Path]:
    """Return config and weights, one or both still staged if an export is under way or was interrupted."""
    config_path, weights_path = directory / CONFIG_NAME, directory / WEIGHTS_NAME
    staged = directory / _PUBLISHING_NAME
    if not config_path.is_file() and (staged / CONFIG_NAME).is_file():
        config_path = staged / CONFIG_NAME
        if (staged / WEIGHTS_NAME).is_file():
            weights_path = staged / WEIGHTS_NAME
    for path in (config_path, weights_path):
        if not path.is_file():
            raise ExportError(
                f"{directory} holds no adapter that can be read: {path.name} is missing. Pickled adapters "
                f"(adapter_model.bin) are not read; save them again with peft."
            )
    return config_path, weights_path


def _parsed_config(content: bytes, path: Path) -> LoraConfig:
    try:
        fields = json.loads(content)
        if not isinstance(fields, dict) or fields.get("peft_type") != "LORA":
            found = fields.get("peft_type") if isinstance(fields, dict) else type(fields).__name__
            raise ExportError(f"{path}: peft_type is {found!r}; only LORA adapters are read.")
        known = {field.name for field in dataclasses.fields(LoraConfig)}
        newer = sorted(name for name in fields.keys() - known if fields[name])
        if newer:
            raise ExportError(f"{path} sets {', '.join(newer)}, which peft {peft.__version__} does not know.")
        config = LoraConfig(**{name: value for name, value in fields.items() if name in known})
    except (ValueError, TypeError) as error:
        raise ExportError(f"{path} is no valid LoRA config: {error}.") from error
    _check_is_plain_lora(config)
    return config


def _for_inference(peft_config: LoraConfig) -> LoraConfig:
    """Copy a config without what limits training here but says nothing about what a finished adapter computes."""
    config = copy.deepcopy(peft_config)
    config.lora_dropout, config.revision, config.task_type, config.inference_mode = 0.0, None, "CAUSAL_LM", True
    return config


def _check_is_plain_lora(peft_config: LoraConfig) -> None:
    try:
        check_lora_config(_for_inference(peft_config))
    except ConfigError as error:
        raise ExportError(f"This is more than a plain LoRA adapter, or no valid one. {error}") from error


def _check_selects(config: LoraConfig, modules: Iterable[str]) -> None:
    targets = config.target_modules
    if targets is None or (isinstance(targets, str) and targets.lower() == INCLUDE_LINEAR_LAYERS_SHORTHAND):
        return
    ignored = [module for module in modules if not check_target_module_exists(config, module)]
    if ignored:
        raise ExportError(f"The config does not select {len(ignored)} modules of the file, as {ignored[0]}.")


def _drop_idle_names(config: LoraConfig, modules: Iterable[str]) -> None:
    """Drop target names and pattern keys that other model families have: peft ignores them, `resolve_lora` does not."""
    modules = list(modules)
    if config.target_modules is not None and not isinstance(config.target_modules, str):
        config.target_modules = {
            target
            for target in config.target_modules
            if any(module == target or module.endswith(f".{target}") for module in modules)
        }
    for field in ("rank_pattern", "alpha_pattern"):
        pattern = getattr(config, field) or {}
        kept = {key: value for key, value in pattern.items() if any(pattern_matches(key, name) for name in modules)}
        setattr(config, field, kept)
