"""The optimizer and what must hold before it steps, agreed over all ranks: adapters learn, and results are finite."""

import inspect
import logging
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from accelerate.optimizer import AcceleratedOptimizer

from hf_megapack.errors import BackendError, ConfigError, NonFiniteResultError
from hf_megapack.ranks import all_agree

logger = logging.getLogger(__name__)

# Each reads and writes one element at a time, so a local shard is updated exactly as the whole matrix would be.
_ELEMENTWISE = tuple(
    getattr(torch.optim, name)
    for name in ["Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adagrad", "Adadelta", "RMSprop", "Rprop", "SGD", "ASGD"]
)
_DIMS_OF_A_MATRIX = 2


class SkippableOptimizer(AcceleratedOptimizer):
    """An optimizer whose next step can be left out; the HF Trainer then leaves the learning rate where it is.

    Args:
        optimizer: The torch optimizer to step.

    Attributes:
        skip_next: Whether the next `step` does nothing. It resets itself.
    """

    # accelerate registers an object with this mark as it is; its `optimizer_step_was_skipped` then asks us.
    _is_accelerate_prepared = True

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer, device_placement=False)
        self.skip_next = False
        # As most schedules note it; ReduceLROnPlateau does not, and a resumed run compares it.
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])

    def step(self, closure=None) -> None:
        """Step, unless this step is to be left out."""
        self._is_overflow, self.skip_next = self.skip_next, False
        if not self._is_overflow:
            self.optimizer.step(closure)


class Recipe(NamedTuple):
    """What the trainer builds an optimizer from.

    Attributes:
        optimizer_class: Its class.
        options: Keyword arguments of that class, the learning rate among them.
        weight_decay: Of all factors, which are matrices: the HF Trainer's rule spares biases and norms only.
    """

    optimizer_class: type
    options: dict[str, Any]
    weight_decay: float


def keep_or_build_optimizer(
    optimizer: torch.optim.Optimizer | None, recipe: Recipe, parameters: Mapping[str, torch.nn.Parameter]
) -> torch.optim.Optimizer:
    """Return the optimizer that there is, or a new one where there is none or its arguments have changed.

    Args:
        optimizer: The trainer's, wrapped or not; one that the user built is always kept.
        recipe: What it would be built from now.
        parameters: PEFT key to factor.
    """
    if optimizer is not None:
        # The mark is on the torch optimizer, which a wrapper holds under this name.
        built_from = getattr(getattr(optimizer, "optimizer", optimizer), "hf_megapack_recipe", recipe)
        if built_from == recipe:
            return optimizer
        logger.warning("The optimizer's arguments have changed: it begins anew, with no moments but a checkpoint's.")
    group = {"params": list(parameters.values()), "weight_decay": recipe.weight_decay}
    built = recipe.optimizer_class([group], **recipe.options)
    built.hf_megapack_recipe = recipe
    return built


def check_optimizer_class(optimizer_class: type) -> None:
    """Refuse optimizers that do not treat every element alike, and those that step in another way.

    Args:
        optimizer_class: The class to look at.

    Raises:
        ConfigError: Naming the class and those allowed; or if its step needs arguments, of which it gets none.
    """
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, _ELEMENTWISE)):
        allowed = ", ".join(cls.__name__ for cls in _ELEMENTWISE)
        raise ConfigError(
            f"The optimizer {optimizer_class!r} is not supported: only optimizers that treat every element alike "
            f"update shards of a matrix correctly. Allowed: torch's {allowed}, and classes derived from them."
        )
    try:
        inspect.signature(optimizer_class.step).bind(None)
    except TypeError as error:
        raise ConfigError(
            f"{optimizer_class.__name__}.step() cannot be called without arguments ({error}), as it is once for each "
            "update: the loss is computed before, once. Give what it takes, a closure for example, a default."
        ) from error


def check_optimizer_parameters(
    optimizer: torch.optim.Optimizer | None, parameters: Mapping[str, torch.nn.Parameter]
) -> None:
    """Check that a user's optimizer updates exactly the adapter.

    Args:
        optimizer: The user's, None if there is none. Frozen weights may be among what it holds.
        parameters: PEFT key to factor.

    Raises:
        ConfigError: If it is not elementwise, holds other tensors that learn, or not all factors.
    """
    if optimizer is None:
        return
    check_optimizer_class(type(optimizer))
    factors = {id(parameter) for parameter in parameters.values()}
    given = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    held = {id(parameter) for parameter in given if parameter.requires_grad or id(parameter) in factors}
    if held != factors:
        raise ConfigError(
            f"The optimizer holds {len(held)} tensors, of which {len(held & factors)} are among the adapter's "
            f"{len(factors)} factors. Build it from trainer.backend.parameters and assign trainer.optimizer before "
            "train(), or pass optimizer_cls_and_kwargs."
        )


def check_scheduler(scheduler: Any, optimizer: torch.optim.Optimizer | None) -> None:
    """Check that a user's schedule sets the learning rate of the optimizer that trains.

    Args:
        scheduler: The user's, None if there is none.
        optimizer: The optimizer, wrapped or not; None if the trainer is to build it.

    Raises:
        ConfigError: If it was built for another optimizer, whose learning rate it would set in vain.
    """
    if scheduler is None:
        return
    its = getattr(scheduler, "optimizer", optimizer)
    if optimizer is None or getattr(its, "optimizer", its) is not getattr(optimizer, "optimizer", optimizer):
        raise ConfigError(
            f"The schedule, a {type(scheduler).__name__}, was built for another optimizer than the one that trains, "
            "whose learning rate it would not change. Use lr_scheduler_type and lr_scheduler_kwargs; or build the "
            "optimizer from trainer.backend.parameters, the schedule from the optimizer, and assign both, "
            "trainer.optimizer and trainer.lr_scheduler, before train()."
        )


def check_adapters_learn(parameters: Mapping[str, torch.nn.Parameter], device: torch.device) -> None:
    """Check after a backward pass that every adapter takes part in the loss.

    A factor B starts at zero, so the gradient of its A is zero at first; B's own must not be. Experts are an exception:
    the router may send them no token of an update. Some expert, somewhere, must learn.

    Args:
        parameters: PEFT key to factor, with gradients; factors of experts are stacked, in three dimensions.
        device: Device that the process group communicates on.

    Raises:
        BackendError: On every rank, listing this rank's factors without a gradient.
    """
    idle = [
        key
        for key, parameter in parameters.items()
        if parameter.grad is None or (".lora_B." in key and not parameter.grad.any())
    ]
    experts = {
        key
        for key, parameter in parameters.items()
        if parameter.dim() > _DIMS_OF_A_MATRIX and ".lora_B." in key and parameter.grad is not None
    }
    # Both questions are put to every rank: a stage of a pipeline may hold no expert.
    has_no_experts, no_expert_learns = all_agree(not experts, device), all_agree(experts <= set(idle), device)
    if has_no_experts or not no_expert_learns:
        idle = [key for key in idle if key not in experts]
    if not all_agree(not idle, device):
        listed = "\n  ".join(idle) or "none on this rank; see the other ranks"
        raise BackendError(
            f"{len(idle)} of {len(parameters)} adapter factors got no gradient in the first update, so they would "
            f"never be trained. Take them out of target_modules, or report this if they should learn:\n  {listed}"
        )


def check_finite(loss: float, grad_norm: float, *, step: int, device: torch.device) -> None:
    """Check the two numbers that show whether an update may be applied.

    Args:
        loss: The update's loss.
        grad_norm: 2-norm of its gradient over all shards.
        step: Number of the update, from 1.
        device: Device that the process group communicates on.

    Raises:
        NonFiniteResultError: On every rank when either is not finite on any rank.
    """
    quantities = {"loss": loss, "gradient norm": grad_norm}
    wrong = [f"{name} is {value}" for name, value in quantities.items() if not math.isfinite(value)]
    if not all_agree(not wrong, device):
        raise NonFiniteResultError(
            f"Update {step}: {' and '.join(wrong) or 'another rank found a result that is not finite'}. Nothing was "
            "updated; the last checkpoint is unharmed. Lower learning_rate, look at the examples of this update, or "
            'set on_nonfinite="skip".'
        )
