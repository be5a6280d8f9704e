"""Write and read PEFT adapter directories: `adapter_model.safetensors` and `adapter_config.json`.

The config that is written selects in peft exactly the modules in the file, with their ranks and scales. What is read is
what was written, experts in the layout that training has included. This module neither gathers shards nor knows a
model: it gets full tensors under PEFT key names.
"""

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from peft import LoraConfig
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from hf_megapack.errors import ExportError, NonFiniteResultError
from hf_megapack.weights.adapter import lora_spec, resolve_lora
from hf_megapack.weights.experts import Adapters, Pair
from hf_megapack.weights.layouts import (
    Marks,
    Stored,
    from_stored,
    is_one_expert,
    is_stacked,
    to_peft_layout,
    to_per_expert_layout,
)
from hf_megapack.weights.portable import (
    check_is_complete,
    check_is_plain_lora,
    check_selects,
    config_in_memory,
    lacking_targets,
    parsed_config,
    per_expert_config,
    portable_config,
)
from hf_megapack.weights.publish import adapter_files, publish_adapter
from hf_megapack.weights.targets import DOWN, GATE_UP, expert_parts, is_of_experts, names_parameter

ExportFormat = Literal["peft", "per_expert"]

_READABLE = (torch.float32, torch.float16, torch.bfloat16)
_KEY = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<factor>[AB])(?:\.default)?\.weight")
_MARKS_NAME = "hf_megapack_experts"


def export_peft_adapter(  # noqa: PLR0913 (what it is, where it goes, and what is known of its model)
    state: Mapping[str, torch.Tensor],
    peft_config: LoraConfig,
    directory: str | os.PathLike[str],
    *,
    base_model_name: str | None,
    linear_names: Sequence[str] | None = None,
    export_format: ExportFormat = "peft",
    model_type: str | None = None,
) -> None:
    """Write an adapter that peft loads, or leave what was there.

    Equal input gives equal bytes. Other files in the directory are left alone; an adapter in it is replaced.

    Args:
        state: PEFT key ("base_model.model.<module path>.lora_A.weight") to full tensor: A of shape (r, in), B of
            shape (out, r). Written as float32. Experts have no index in their path, A of shape (E, r, in) and B of
            shape (E, out, r).
        peft_config: The config that the adapter was trained with.
        directory: Where to write; created when missing.
        base_model_name: Hub id or folder of the base model, for AutoPeftModelForCausalLM; None if it has none.
        linear_names: Hugging Face paths of all linear modules of the model. With them the state is checked for
            completeness and targets are written as short names ("q_proj") where those select exactly the modules in
            the file. Without them targets are written as full paths, and an adapter of a model with experts that
            touches dense layers alone cannot be told from one of a dense model, which peft would not load.
        export_format: "peft" for what peft loads, "per_expert" for inference engines that read every expert by itself.
        model_type: `config.model_type` of the model; needed for "per_expert" where experts are adapted.

    Raises:
        NonFiniteResultError: If a tensor holds NaN or infinity.
        ExportError: If keys or shapes do not make an adapter of this config or format, or the files cannot be written.
            Nothing is written when a check fails.
    """
    check_is_plain_lora(peft_config)
    adapters = _adapters_of(state, peft_config)
    if linear_names is not None:
        check_is_complete(peft_config, adapters, linear_names)
    if export_format == "per_expert":
        stored, marks = to_per_expert_layout(adapters, model_type)
        config = per_expert_config(peft_config, stored)
    elif export_format == "peft":
        has_experts = any(is_of_experts(name) for name in (*adapters, *(linear_names or ())))
        use_rslora = bool(peft_config.use_rslora)
        stored, marks = to_peft_layout(adapters, use_rslora=use_rslora, has_experts=has_experts)
        config = portable_config(peft_config, stored, linear_names)
    else:
        raise ExportError(f"export_format={export_format!r} is not allowed; it must be 'peft' or 'per_expert'.")
    config.base_model_name_or_path, config.revision = base_model_name, peft_config.revision
    # safetensors refuses tensors that share storage, which views of one flat buffer do.
    tensors = {
        _key(item.key, factor): tensor.clone(memory_format=torch.contiguous_format)
        for item in sorted(stored, key=lambda item: item.key)
        for factor, tensor in zip("AB", item.pair, strict=True)
    }
    metadata = {_MARKS_NAME: json.dumps(marks, sort_keys=True)} if marks else {}
    publish_adapter(Path(directory), tensors, config, metadata)


def check_per_expert(peft_config: LoraConfig, linear_names: Sequence[str], model_type: str | None) -> None:
    """Check, before anything is trained, that an adapter can be written in the format "per_expert".

    Args:
        peft_config: The config to train with.
        linear_names: Hugging Face paths of all linear modules of the model.
        model_type: `config.model_type` of the model.

    Raises:
        ConfigError: If the config does not fit the model.
        ExportError: If modules differ in rank or alpha, experts have adapters for some projections only, or the names
            of single experts are not known.
    """
    adapters: Adapters = {}
    for name, spec in resolve_lora(peft_config, linear_names, model_type=model_type).items():
        stack = (1,) if expert_parts(name) else ()
        adapters[name] = (spec, (torch.zeros(*stack, spec.rank, 1), torch.zeros(*stack, 2, spec.rank)))
    stored, _ = to_per_expert_layout(adapters, model_type)
    per_expert_config(peft_config, stored)


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterFile:
    """An adapter as its files hold it.

    Attributes:
        config: The config file.
        stored: What the weights file holds, float32 on the CPU.
        marks: What it says of experts beside its tensors.
    """

    config: LoraConfig
    stored: list[Stored]
    marks: Marks

    @property
    def is_per_expert(self) -> bool:
        """Whether experts are stored one by one."""
        return any(is_one_expert(item.key) for item in self.stored)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors by key, as in the file but without adapter names."""
        return {
            _key(item.key, factor): tensor
            for item in self.stored
            for factor, tensor in zip("AB", item.pair, strict=True)
        }

    def adapters(self) -> Adapters:
        """Return the adapters in the layout that training has.

        Raises:
            ExportError: If experts do not belong together.
        """
        return from_stored(self.stored, self.marks, use_rslora=bool(self.config.use_rslora))


def read_peft_adapter(directory: str | os.PathLike[str]) -> tuple[LoraConfig, dict[str, torch.Tensor]]:
    """Read an adapter that this package, peft or another tool wrote in PEFT's format.

    Args:
        directory: A local folder with `adapter_config.json` and `adapter_model.safetensors`.

    Returns:
        The config, without target names and pattern keys that match no module of the file, and PEFT key without
        adapter name to float32 CPU tensor, sorted by key. Experts come in the shapes that `export_peft_adapter` takes,
        whatever the file's layout, and the config then names every module by its path.

    Raises:
        ExportError: If a file is missing or damaged, it is not a plain LoRA adapter, or keys, shapes and config do not
            belong together.
        NonFiniteResultError: If a tensor holds NaN or infinity.
    """
    file = read_adapter_file(directory)
    adapters = file.adapters()
    state = {
        _key(module, factor): tensor.contiguous()
        for module, (_, pair) in sorted(adapters.items())
        for factor, tensor in zip("AB", pair, strict=True)
    }
    return config_in_memory(file.config, {module: spec for module, (spec, _) in adapters.items()}), state


def read_adapter_file(directory: str | os.PathLike[str]) -> AdapterFile:
    """Read and check an adapter in the layout that its file has.

    Args:
        directory: As for `read_peft_adapter`, which has the errors too.

    Raises:
        ExportError: If it cannot be read.
    """
    directory = Path(directory)
    config_path, weights_path = adapter_files(directory)
    try:
        config_bytes, marks = config_path.read_bytes(), _read_marks(weights_path)
        loaded = load_file(weights_path)
        is_unchanged = adapter_files(directory)[0].read_bytes() == config_bytes and _read_marks(weights_path) == marks
    except (OSError, SafetensorError) as error:
        raise ExportError(f"Cannot read the adapter in {directory}: {error}.") from error
    if not is_unchanged:
        raise ExportError(f"The adapter in {directory} was replaced while it was read; read it again.")
    config = parsed_config(config_bytes, config_path)
    unusual = sorted(name for name, tensor in loaded.items() if tensor.dtype not in _READABLE)
    if unusual:
        raise ExportError(f"{weights_path}: {unusual[0]} is {loaded[unusual[0]].dtype}; allowed are {_READABLE}.")
    try:
        factors = {key: (pair[0].float(), pair[1].float()) for key, pair in _factors(loaded).items()}
        stored = [_identified(key, pair, factors.keys(), config) for key, pair in factors.items()]
        check_selects(config, [item.target for item in stored if not item.is_parameter])
    except ExportError as error:
        raise ExportError(f"{weights_path}: {error}") from error
    _check_finite(loaded, f"read from {weights_path}")
    return AdapterFile(config=config, stored=stored, marks=marks)


def check_holds_targets(
    directory: str | os.PathLike[str], state: Mapping[str, torch.Tensor], linear_names: Sequence[str]
) -> Mapping[str, torch.Tensor]:
    """Check that an adapter has every module that its config selects in a model: peft would begin the others anew.

    Args:
        directory: The adapter.
        state: Its tensors, as `read_peft_adapter` returns them.
        linear_names: Hugging Face paths of all linear modules of the model.

    Returns:
        `state`.

    Raises:
        ExportError: If some are lacking.
    """
    config_path, weights_path = adapter_files(Path(directory))
    config = parsed_config(config_path.read_bytes(), config_path)
    modules = [match["module"] for key in state if (match := _KEY.fullmatch(key))]
    lacking = lacking_targets(config, modules, linear_names)
    if lacking:
        raise ExportError(
            f"{config_path} selects {len(lacking)} modules that {weights_path.name} lacks, as {lacking[0]}. Save the "
            "adapter again; or name in the config only what is there, to go on without the rest."
        )
    return state


def _adapters_of(state: Mapping[str, torch.Tensor], peft_config: LoraConfig) -> Adapters:
    """Return checked float32 copies on the CPU of the adapters that a state holds."""
    copied = {key: tensor.detach().to("cpu", torch.float32) for key, tensor in state.items()}
    adapters: Adapters = {}
    for module, pair in _factors(copied).items():
        if is_one_expert(module) or is_stacked(module):
            raise ExportError(
                f"{module} is a name of experts in files; here they are stacked, as ...experts.up_proj with lora_A of "
                "shape (experts, r, in). read_peft_adapter returns them so."
            )
        spec = lora_spec(peft_config, module)
        _check_shapes(module, pair, spec.rank, is_stack=expert_parts(module) is not None)
        adapters[module] = (spec, pair)
    _check_finite(copied, "nothing was written")
    return adapters


def _identified(key: str, pair: Pair, keys: Iterable[str], config: LoraConfig) -> Stored:
    """Return what an adapter of a file is, by its key and the file's config."""
    weight = f"{key}.weight"
    if is_stacked(key):
        target, is_parameter = _stacked_target(key, keys, config), True
    elif names_parameter(config.target_parameters, weight):
        target, is_parameter = weight, True
    else:
        target, is_parameter = key, False
    spec = lora_spec(config, target)
    _check_shapes(key, pair, spec.rank, is_flat_stack=is_stacked(key))
    return Stored(key=key, target=target, is_parameter=is_parameter, spec=spec, pair=pair)


def _stacked_target(key: str, keys: Iterable[str], config: LoraConfig) -> str:
    """Return which parameter of stacked experts an adapter belongs to: peft's keys alone do not say."""
    experts = key.removesuffix(".base_layer")
    selected = [
        parameter
        for parameter in (f"{experts}.{GATE_UP}", f"{experts}.{DOWN}")
        if names_parameter(config.target_parameters, parameter)
    ]
    present = [name for name in (f"{experts}.base_layer", experts) if name in keys]
    if len(selected) != len(present):
        raise ExportError(
            f"The file holds {len(present)} adapters of {experts}; target_parameters select {selected or 'none'} there."
        )
    return selected[present.index(key)]


def _key(module: str, factor: str) -> str:
    return f"base_model.model.{module}.lora_{factor}.weight"


def _factors(state: Mapping[str, torch.Tensor]) -> dict[str, Pair]:
    """Pair A and B by module, sorted; refuse every key that is neither, doubled or alone."""
    matches = {key: _KEY.fullmatch(key) for key in state}
    foreign = sorted(key for key, match in matches.items() if match is None)
    if foreign:
        raise ExportError(
            f"{len(foreign)} tensors are no LoRA factors: {', '.join(foreign[:5])}. Their names begin with "
            "base_model.model and end in lora_A.weight or lora_B.weight. Where peft has copied embeddings, save the "
            "adapter with save_embedding_layers=False."
        )
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


def _check_shapes(name: str, pair: Pair, rank: int, *, is_stack: bool = False, is_flat_stack: bool = False) -> None:
    shapes = tuple(pair[0].shape), tuple(pair[1].shape)
    dims = 3 if is_stack else 2
    fits = [len(shape) for shape in shapes] == [dims, dims]
    if fits and is_stack:
        fits = shapes[0][:2] == (shapes[1][0], rank) and shapes[1][2] == rank
    elif fits:
        rows, columns = shapes[0][0], shapes[1][1]
        fits = rows == columns and (rows > 0 and rows % rank == 0 if is_flat_stack else rows == rank)
    if not fits:
        expected = f"({rank}, in) and (out, {rank})"
        if is_stack:
            expected = f"(experts, {rank}, in) and (experts, out, {rank})"
        elif is_flat_stack:
            expected = f"(experts * {rank}, in) and (out, experts * {rank})"
        raise ExportError(
            f"{name} has lora_A {shapes[0]} and lora_B {shapes[1]}; its rank is {rank}, so {expected} are expected."
        )


def _check_finite(tensors: Mapping[str, torch.Tensor], consequence: str) -> None:
    bad = [name for name, tensor in tensors.items() if not torch.isfinite(tensor).all()]
    if bad:
        values = tensors[bad[0]]
        raise NonFiniteResultError(
            f"{len(bad)} of {len(tensors)} adapter tensors hold NaN or infinity, the first is {bad[0]} with "
            f"{int((~torch.isfinite(values)).sum())} of {values.numel()} values; {consequence}."
        )


def _read_marks(weights_path: Path) -> Marks:
    with safe_open(weights_path, framework="pt") as file:
        text = (file.metadata() or {}).get(_MARKS_NAME, "{}")
    try:
        return {
            experts: {projection: (int(rank), alpha) for projection, (rank, alpha) in marked.items()}
            for experts, marked in json.loads(text).items()
        }
    except (ValueError, TypeError, AttributeError) as error:
        raise ExportError(f"{weights_path}: the header's {_MARKS_NAME} cannot be read: {error}.") from error
