"""What the HF Trainer holds for the model."""

import torch

from hf_megapack.container import ModelContainer


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
