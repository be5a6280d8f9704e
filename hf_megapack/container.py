"""What the HF Trainer holds for its model."""

from collections.abc import Mapping

import torch


class ModelContainer(torch.nn.ModuleList):
    """A plain container: the HF Trainer would take Megatron's own `config` for one of transformers.

    Args:
        model: The backend's model.
        factors: The parameters that are trained, by key.
    """

    def __init__(self, model: torch.nn.Module, factors: Mapping[str, torch.nn.Parameter]):
        super().__init__([model])
        self._factors = list(factors.values())

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
