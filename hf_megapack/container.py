"""What the HF Trainer holds for its model."""

from collections.abc import Mapping
from typing import Any, NoReturn

import torch

from hf_megapack.errors import ConfigError

_INSTEAD = (
    "it holds Megatron's modules and is no transformers model. To generate or merge, call trainer.save_model(folder) "
    "and load that folder with peft's AutoPeftModelForCausalLM"
)


class ModelContainer(torch.nn.ModuleList):
    """A plain container: the HF Trainer would take Megatron's own `config` for one of transformers.

    Args:
        model: The backend's model.
        factors: The parameters that are trained, by key.
    """

    def __init__(self, model: torch.nn.Module, factors: Mapping[str, torch.nn.Parameter]):
        super().__init__([model])
        self._factors = list(factors.values())

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            raise AttributeError(f"trainer.model has no {name!r}: {_INSTEAD}") from error

    # Not forward, whose signature the HF Trainer reads.
    def __call__(self, *_args: Any, **_inputs: Any) -> NoReturn:
        """Refuse: the backend runs rows.

        Args:
            *_args: Ignored.
            **_inputs: Ignored.

        Raises:
            ConfigError: Always, saying what to do instead.
        """
        raise ConfigError(f"trainer.model cannot be called: {_INSTEAD}.")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the factors' gradients; frozen weights, which have none, are not looked through after every update.

        Args:
            set_to_none: As torch's; False fills gradients with zeros.
        """
        for factor in self._factors:
            if set_to_none or factor.grad is None:
                factor.grad = None
            else:
                factor.grad.zero_()
