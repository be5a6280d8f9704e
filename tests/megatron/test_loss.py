"""The loss of a frozen head against torch's cross-entropy on whole logits."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from hf_megapack.kernels import cross_entropy as plain_module
from hf_megapack.megatron.loss import frozen_head_loss
from tests.helpers.thread_ranks import run_on_threads


def plain_loss(hidden, head, labels, counts, scale):
    logits = hidden @ head.T
    probability = logits.softmax(dim=-1)
    entropy = -(probability * logits.log_softmax(dim=-1)).sum(dim=-1)
    loss = (cross_entropy(logits, labels, reduction="none") * counts).sum() * scale
    return loss, ((logits.argmax(-1) == labels) * counts).sum(), (entropy * counts).sum() * scale


@pytest.mark.parametrize("budget", [1, 50 * 7, 2**24])
@pytest.mark.parametrize("shift", [0.0, -500.0])
def test_loss_metrics_and_hidden_gradient_equal_plain_cross_entropy(monkeypatch, budget, shift):
    """However few rows of logits are held at once, and for logits far below zero."""
    monkeypatch.setattr(plain_module, "PLAIN_LOGITS", budget)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(23, 11, generator=generator, dtype=torch.float64)
    head = torch.randn(50, 11, generator=generator, dtype=torch.float64)
    head[:, 0] += shift
    hidden[:, 0] = 1.0
    labels = torch.randint(0, 50, (23,), generator=generator)
    labels[:5] = (hidden @ head.T).argmax(-1)[:5]
    counts = torch.randint(1, 4, (23,), generator=generator)
    results = []
    for function in (frozen_head_loss, plain_loss):
        leaf = hidden.clone().requires_grad_()
        terms = function(leaf, head, labels, counts, 1 / 40)
        terms[0].mul(3.0).backward()
        results.append([*(term.detach().double() for term in terms), leaf.grad])
    for ours, twin in zip(*results, strict=True):
        torch.testing.assert_close(ours, twin, rtol=1e-10, atol=1e-10)
    assert results[0][1] >= 5


def test_a_row_without_targets_has_zero_loss_and_zero_gradient():
    hidden = torch.randn(4, 3, requires_grad=True)
    nothing = torch.zeros(0, dtype=torch.int64)
    terms = frozen_head_loss(hidden.index_select(0, nothing), torch.randn(7, 3), nothing, nothing, 1.0)
    terms.loss.backward()
    assert terms.loss.item() == 0.0
    assert hidden.grad.abs().sum() == 0.0


def test_a_head_that_wants_a_gradient_is_refused():
    with pytest.raises(ValueError, match="requires_grad"):
        frozen_head_loss(torch.zeros(1, 2), torch.zeros(3, 2, requires_grad=True), *[torch.zeros(1).long()] * 2, 1.0)


def test_a_vocabulary_split_over_ranks_gives_the_loss_and_the_gradient_of_the_whole(monkeypatch):
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(13, 7, generator=generator, dtype=torch.float64)
    head = torch.randn(24, 7, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 24, (13,), generator=generator)
    labels[:4] = (hidden @ head.T).argmax(-1)[:4]
    counts = torch.randint(1, 4, (13,), generator=generator)
    monkeypatch.setattr(plain_module, "PLAIN_LOGITS", 8 * 5)

    def run(group):
        leaf = hidden.clone().requires_grad_()
        part = head[8 * group.rank() : 8 * group.rank() + 8]
        terms = frozen_head_loss(leaf, part, labels, counts, 1 / 30, group=group)
        terms.loss.backward()
        return [term.detach() for term in terms], leaf.grad

    results = run_on_threads(3, run, monkeypatch)
    leaf = hidden.clone().requires_grad_()
    expected = plain_loss(leaf, head, labels, counts, 1 / 30)
    expected[0].backward()
    for terms, gradient in results:
        torch.testing.assert_close(
            torch.stack(terms), torch.stack([e.detach().double() for e in expected]), rtol=1e-10, atol=0
        )
        torch.testing.assert_close(gradient, leaf.grad, rtol=1e-10, atol=1e-12)
    assert expected[1] >= 4
