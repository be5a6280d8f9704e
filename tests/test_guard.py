"""What must hold of the gradients of a first update."""

import pytest
import torch

from hf_megapack.errors import BackendError
from hf_megapack.guard import check_adapters_learn

CPU = torch.device("cpu")
Q, EXPERTS = "base_model.model.model.layers.0.self_attn.q_proj", "base_model.model.model.layers.0.mlp.experts.up_proj"


def factors(**gradients: torch.Tensor | None) -> dict[str, torch.nn.Parameter]:
    """Return factors with these gradients; those of experts have three dimensions."""
    shapes = {f"{Q}.lora_A.weight": (2, 4), f"{Q}.lora_B.weight": (4, 2)}
    shapes |= {f"{EXPERTS}.lora_A.weight": (3, 2, 4), f"{EXPERTS}.lora_B.weight": (3, 4, 2)}
    made = {key: torch.nn.Parameter(torch.zeros(shape)) for key, shape in shapes.items()}
    for key, parameter in made.items():
        name = f"{'experts' if EXPERTS in key else 'q'}_{key[-8]}"
        parameter.grad = gradients.get(name, torch.ones_like(parameter))
    return made


def test_a_fresh_adapter_with_gradients_passes():
    check_adapters_learn(factors(q_A=torch.zeros(2, 4), experts_A=torch.zeros(3, 2, 4)), CPU)


@pytest.mark.parametrize("gradient", [None, torch.zeros(4, 2)])
def test_a_factor_b_without_a_gradient_is_an_error(gradient):
    with pytest.raises(BackendError, match=r"1 of 4 adapter factors[\s\S]*q_proj\.lora_B"):
        check_adapters_learn(factors(q_B=gradient), CPU)


def test_an_expert_may_be_idle_in_the_first_update():
    gradient = torch.ones(3, 4, 2)
    gradient[1] = 0
    check_adapters_learn(factors(experts_B=gradient), CPU)


def test_all_experts_of_a_layer_may_be_idle_if_those_of_another_learn():
    idle = factors(experts_B=torch.zeros(3, 4, 2))
    other = torch.nn.Parameter(torch.zeros(3, 4, 2))
    other.grad = torch.ones_like(other)
    check_adapters_learn({**idle, EXPERTS.replace("layers.0", "layers.1") + ".lora_B.weight": other}, CPU)


def test_not_all_experts_of_the_model_may_be_idle():
    with pytest.raises(BackendError, match=r"experts\.up_proj\.lora_B"):
        check_adapters_learn(factors(experts_B=torch.zeros(3, 4, 2)), CPU)


@pytest.mark.parametrize("factor", ["A", "B"])
def test_an_expert_whose_gradient_was_never_made_is_an_error(factor):
    with pytest.raises(BackendError, match=rf"experts\.up_proj\.lora_{factor}"):
        check_adapters_learn(factors(**{f"experts_{factor}": None}), CPU)
