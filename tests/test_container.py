"""What the HF Trainer holds for the model."""

import pytest
import torch

from hf_megapack.container import ModelContainer
from hf_megapack.errors import ConfigError


def test_only_the_factors_gradients_are_dropped():
    model = torch.nn.Linear(2, 2)
    model.weight.requires_grad_(False)
    container = ModelContainer(model, {"bias": model.bias})
    container.zero_grad()
    assert model.bias.grad is None
    model(torch.ones(1, 2)).sum().backward()
    container.zero_grad(set_to_none=False)
    assert model.bias.grad.tolist() == [0, 0]
    container.zero_grad()
    assert model.bias.grad is None
    assert list(container.parameters()) == list(model.parameters())


def test_what_only_transformers_models_have_is_answered_with_what_to_do():
    model = torch.nn.Linear(2, 2)
    container = ModelContainer(model, {"bias": model.bias})
    assert not hasattr(container, "config")
    with pytest.raises(AttributeError, match=r"trainer\.model has no 'generate'.*save_model\(folder\)"):
        container.generate()
    with pytest.raises(ConfigError, match=r"trainer\.model cannot be called.*save_model\(folder\)"):
        container(input_ids=torch.ones(1, 2))
