"""The pieces of the model that one pipeline rank holds, under names that count layers over the whole model.

Weight rules name parameters as if one GPTModel held every layer; Megatron-Core counts each piece's layers from zero.
Here the one becomes the other, so loading, LoRA and export never see where the pipeline was cut.
"""

import re

import torch
from megatron.core.models.gpt.gpt_model import GPTModel

from hf_megapack.weights.names import module_of

# What a router adds to its scores: a buffer in Megatron-Core, a stored tensor of the model.
STORED_BUFFERS = (".expert_bias",)
_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")


class ModelChunks(torch.nn.ModuleList):
    """The chunks of one pipeline rank, the earliest layers first.

    Args:
        chunks: GPTModels, each holding a run of layers.
    """

    def __init__(self, chunks: list[GPTModel]):
        super().__init__(chunks)
        self._first_layers = [chunk.decoder.layers[0].layer_number - 1 for chunk in chunks]

    def find(self, name: str) -> tuple[GPTModel, str] | None:
        """Return the chunk that holds a module or parameter, and its name there; None if another rank holds it.

        Args:
            name: Dotted name in a model of all layers, "decoder.layers.7.mlp.linear_fc1" for one.
        """
        layer = _LAYER.match(name)
        for chunk, first in zip(self, self._first_layers, strict=True):
            if layer is None:
                owner = getattr(chunk, name.split(".")[0], None)
                if owner is not None and (not name.startswith("decoder.") or chunk.decoder.final_layernorm is not None):
                    return chunk, name
            elif 0 <= int(layer[1]) - first < len(chunk.decoder.layers):
                return chunk, f"decoder.layers.{int(layer[1]) - first}.{name[layer.end() :]}"
        return None

    def module(self, path: str) -> torch.nn.Module | None:
        """Return a module by its path in a model of all layers, None if another rank holds it."""
        found = self.find(path)
        return None if found is None else found[0].get_submodule(found[1])

    def replace(self, path: str, module: torch.nn.Module) -> None:
        """Put a module in the place of another one, which this rank holds.

        Args:
            path: Path in a model of all layers.
            module: The new module.
        """
        chunk, local = self.find(path)
        setattr(chunk.get_submodule(module_of(local)), local.rpartition(".")[2], module)

    def whole_model_parameters(self) -> dict[str, torch.Tensor]:
        """Return this rank's parameters and stored buffers under their names in a model of all layers."""
        named = {}
        for chunk, first in zip(self, self._first_layers, strict=True):
            buffers = [(name, buffer) for name, buffer in chunk.named_buffers() if name.endswith(STORED_BUFFERS)]
            for name, tensor in [*chunk.named_parameters(), *buffers]:
                named[_LAYER.sub(lambda layer, first=first: f"decoder.layers.{int(layer[1]) + first}.", name)] = tensor
        return named
