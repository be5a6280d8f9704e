"""Prove that peft computes what an adapter file holds: load it, compare every tensor, and compare logits.

The logits are compared with those of the base model after adding scaling * B A to its weights by hand, which involves
no code of peft. peft has been seen to drop modules without an error.
"""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import peft
import torch
from peft import PeftModel
from transformers import PreTrainedModel

from hf_megapack.errors import ConfigError, ExportError
from hf_megapack.weights.experts import Adapters
from hf_megapack.weights.export import read_adapter_file
from hf_megapack.weights.targets import DOWN, GATE, UP, expert_parts

_NUM_TOKENS = 16


def verify_with_peft(
    directory: str | os.PathLike[str], base_model: PreTrainedModel, *, tolerance: float = 1e-5
) -> None:
    """Prove that peft loads an adapter completely and computes what it holds.

    Everything is computed in float32, for which a base model in lower precision is copied meanwhile.

    Args:
        directory: The adapter.
        base_model: The base model in transformers, without adapter. It is changed and put back; load it anew if peft
            cannot load the adapter at all.
        tolerance: Largest difference between logits, in units of the largest logit or of 1 if that is less.

    Raises:
        ConfigError: If `base_model` is no transformers model, such as a path.
        ExportError: If peft cannot load the adapter, or keys, values or logits are not those of the file. Always for an
            adapter that was exported as "per_expert", which is not for peft.
    """
    if not isinstance(base_model, PreTrainedModel):
        raise ConfigError(
            f"base_model is a {type(base_model).__name__}; give the loaded model, without adapter, such as "
            "AutoModelForCausalLM.from_pretrained(name)."
        )
    file = read_adapter_file(directory)
    if file.is_per_expert:
        raise ExportError(
            f"{directory} holds experts one by one, for inference engines: peft {peft.__version__} cannot be relied on "
            "to load that completely. Export it with export_format='peft' to verify it."
        )
    token_ids = torch.arange(_NUM_TOKENS, device=base_model.device)[None] * 7919
    token_ids %= base_model.get_input_embeddings().num_embeddings
    with _evaluated_in_float32(base_model):
        found, logits = _loaded_by_peft(directory, base_model, token_ids)
        _compare_tensors(file.tensors(), found, directory)
        _merge(base_model, file.adapters())
        expected = base_model(input_ids=token_ids, use_cache=False).logits
    deviation = ((logits - expected).abs().max() / expected.abs().max().clamp(min=1.0)).item()
    # Not the other way round: NaN is no agreement.
    if not deviation <= tolerance:
        raise ExportError(
            f"peft {peft.__version__} loads {directory} but computes something else: logits differ by {deviation:.1e} "
            f"from those of the merged weights, more than {tolerance:.1e}."
        )


def _loaded_by_peft(
    directory: str | os.PathLike[str], base_model: PreTrainedModel, token_ids: torch.Tensor
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return every LoRA tensor of the loaded model, under the keys of files, and the model's logits."""
    try:
        with warnings.catch_warnings():
            # peft looks for the keys among modules alone; those that match parameters it does use.
            warnings.filterwarnings("ignore", "The following (rank|alpha)_pattern keys did not match", RuntimeWarning)
            model = PeftModel.from_pretrained(base_model, os.fspath(directory), torch_device=str(base_model.device))
    except (RuntimeError, ValueError) as error:
        raise ExportError(f"peft {peft.__version__} cannot load {directory} on this base model: {error}") from error
    try:
        found = {
            name.replace(".default.", "."): tensor.detach().to("cpu", torch.float32)
            for name, tensor in model.state_dict().items()
            if ".lora_" in name
        }
        logits = model.eval()(input_ids=token_ids, use_cache=False).logits
    finally:
        model.unload()
        # peft 0.20 leaves this mark, and warns about a second adapter when it meets it; delete with 0.20.
        base_model.__dict__.pop("peft_config", None)
    return found, logits


def _compare_tensors(
    expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor], directory: str | os.PathLike[str]
) -> None:
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


def _merge(model: PreTrainedModel, adapters: Adapters) -> None:
    """Add each adapter to the weight that it belongs to."""
    for name, (spec, (factor_a, factor_b)) in adapters.items():
        parts = expert_parts(name)
        if parts is None:
            weight = model.get_submodule(name).weight
        else:
            experts, projection = model.get_submodule(parts[0]), parts[1]
            weight = experts.down_proj if projection == DOWN else experts.gate_up_proj
            if projection in (GATE, UP):
                weight = weight.chunk(2, dim=1)[projection == UP]
        delta = spec.scaling * (factor_b.double() @ factor_a.double())
        weight += delta.to(weight.device, weight.dtype)


@contextmanager
def _evaluated_in_float32(model: PreTrainedModel) -> Iterator[None]:
    """Let the block change float32 copies of a model's weights, without dropout; afterwards the model is as it was."""
    originals = {
        tensor: tensor.data for tensor in [*model.parameters(), *model.buffers()] if tensor.is_floating_point()
    }
    modes = [(module, module.training) for module in model.modules()]
    try:
        with torch.no_grad():
            for tensor, data in originals.items():
                tensor.data = data.to(torch.float32, copy=True)
            model.eval()
            yield
    finally:
        for tensor, data in originals.items():
            tensor.data = data
        for module, was_training in modes:
            module.training = was_training
