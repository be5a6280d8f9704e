"""torch_compile=True: compiled layers compute what eager ones do, gradients included."""

import pytest
import torch

from hf_megapack.data.collator import PrefixTreeCollator
from hf_megapack.kernels.pointwise import HeadNorm
from hf_megapack.megatron.backend import MegatronBackend
from hf_megapack.megatron.lora_products import FrozenLinearWithUpdate, LowRankProduct, StackedFactors
from tests.helpers.backend_args import backend_args
from tests.helpers.reference_model import random_adapter, save_random_model
from tests.megatron.test_parity import PEFT_CONFIG, conversation_examples

# While it traces, torch makes instances of functions and looks at gradients of results, and warns of both itself.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("is_joined", [True, False])
def test_compiled_products_keep_their_gradients(is_joined):
    """Torch 2.11 lost those of a function that changes its own result in place."""
    generator = torch.Generator().manual_seed(0)
    x, a, b = (torch.randn(shape, generator=generator, requires_grad=True) for shape in ((7, 6), (3, 6), (5, 3)))
    weight = torch.randn(5, 6, generator=generator)
    stacked = StackedFactors(a.detach().clone(), b.detach().clone())

    def products(x):
        if is_joined:
            return FrozenLinearWithUpdate.apply(x, weight, a, b, stacked, None)
        return LowRankProduct.apply(LowRankProduct.apply(x, a, stacked.a_RI, None), b, stacked.b_OR, None)

    results = []
    for function in (products, torch.compile(products, backend="aot_eager", dynamic=True)):
        output = function(x)
        results.append((output, *torch.autograd.grad(output.square().sum(), (x, a, b))))
    for ours, eager in zip(*reversed(results), strict=True):
        assert eager.any()
        torch.testing.assert_close(ours, eager)


class PointwiseParts(torch.nn.Module):
    """What a layer does between its products on a GPU."""

    def __init__(self):
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.ones(size) for size in (64, 16, 16)).requires_grad_(False)

    def forward(self, hidden, gate_up, mixed, rotation):  # noqa: D102
        from hf_megapack.kernels import fused_pointwise as fused

        weight, *norms = self.weights
        return (
            *fused.FusedNormAndResidual.apply(hidden, weight, 1e-5),
            fused.FusedSwiglu.apply(gate_up),
            *fused.FusedSplitHeads.apply(mixed, rotation, HeadNorm(*norms, 1e-5), 1, 16),
        )


def test_triton_kernels_can_be_traced_for_rows_of_any_length(monkeypatch):
    """With sizes of blocks and warps that do not depend on a row's: these are no numbers while layers are traced."""
    pytest.importorskip("triton")
    monkeypatch.setattr("torch.utils._triton.has_triton", lambda *_: True)
    inputs = [torch.randn(5, 1, 64), torch.randn(5, 1, 8), torch.randn(5, 64)]
    graphs = []

    def keep(graph, _inputs):
        graphs.append(graph)
        raise RuntimeError("no GPU to run it")

    compiled = torch.compile(PointwiseParts(), backend=keep, dynamic=True, fullgraph=True)
    with pytest.raises(Exception, match="no GPU to run it"):
        compiled(*(tensor.requires_grad_() for tensor in inputs), torch.randn(2, 5, 1, 8))
    nodes = [node for part in graphs[0].modules() for node in part.graph.nodes]
    assert sum("triton_kernel_wrapper" in str(node.target) for node in nodes) == 6


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_a_compiled_model_follows_the_eager_one(name, tmp_path):
    save_random_model(name, tmp_path)
    results = []
    for torch_compile in (False, True):
        backend = MegatronBackend(str(tmp_path), backend_args(torch_compile=torch_compile), PEFT_CONFIG)
        backend.load_adapter(random_adapter(backend.adapter_state()))
        loss = 0.0
        for capacity in (100_000, 2_500):
            loss = backend.run_step(
                PrefixTreeCollator(packed_sequence_length=capacity)(conversation_examples("each"))
            ).loss
        results.append((loss, {key: parameter.grad.clone() for key, parameter in backend.parameters.items()}))
    (loss, gradients), (loss_compiled, compiled) = results
    assert loss_compiled == pytest.approx(loss, rel=1e-6)
    for key, gradient in gradients.items():
        assert gradient.any(), key
        torch.testing.assert_close(compiled[key], gradient, rtol=1e-3, atol=1e-5 * float(gradient.abs().max()))
