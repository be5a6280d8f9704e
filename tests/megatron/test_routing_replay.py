"""In bfloat16 packed and unpacked runs differ because a few tokens go to other experts, not because of an error."""

import pytest
import torch

from hf_megapack.data.collator import PrefixTreeCollator
from hf_megapack.megatron.backend import MegatronBackend
from tests.helpers.backend_args import backend_args
from tests.helpers.moe_reference import MOE_CONFIGS, save_moe_model
from tests.helpers.reference_model import mape, random_adapter
from tests.helpers.routing_replay import contexts, listening, num_flips
from tests.megatron.test_layouts import examples
from tests.megatron.test_moe import PEFT_CONFIG, unpacked

TOGETHER = PrefixTreeCollator(packed_sequence_length=100_000)


def run(backend, batch, wanted=None):
    """Return the gradients of an update and what the routers chose."""
    with listening(backend, batch, wanted) as chosen:
        backend.run_step(batch)
    return {key: parameter.grad.clone() for key, parameter in backend.parameters.items()}, chosen


def worst(ours, expected) -> float:
    """Return the largest difference of a factor's gradient, in per cent."""
    return max(mape(ours[key], value) for key, value in expected.items())


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def backend(request, tmp_path):
    """A Qwen3-MoE with an adapter, in a number format."""
    save_moe_model(MOE_CONFIGS["qwen3_moe"](), tmp_path)
    backend = MegatronBackend(str(tmp_path), backend_args(bf16=request.param == torch.bfloat16), PEFT_CONFIG)
    backend.load_adapter(random_adapter(backend.adapter_state(), std=0.1))
    yield backend
    backend.close()


def test_a_context_is_the_same_however_examples_are_packed():
    (row,) = TOGETHER(examples()).rows
    apart = [set(contexts(row).tolist()) for row in unpacked(examples()).rows]
    together = contexts(row).tolist()
    assert len(set(together)) == len(together) - together.count(-1) + (-1 in together)
    assert set.union(*apart) - {-1} == set(together) - {-1}
    assert len(apart[0] & apart[3]) >= 171, "two examples of one family share its prefix"


def test_flips_of_the_choice_explain_what_packing_changes_in_bfloat16(backend):
    is_exact = backend.model[0].config.params_dtype == torch.float32
    alone, chosen = run(backend, unpacked(examples()))
    packed, packed_chosen = run(backend, TOGETHER(examples()))
    replayed, replayed_chosen = run(backend, TOGETHER(examples()), wanted=chosen)
    assert len(chosen) == 3 * sum(map(len, {tuple(contexts(row)) for row in TOGETHER(examples()).rows}))
    assert num_flips(replayed_chosen, chosen) == 0
    if is_exact:
        assert num_flips(packed_chosen, chosen) == 0
        assert worst(packed, alone) < 0.001
        assert worst(replayed, alone) < 0.001
    else:
        assert num_flips(packed_chosen, chosen) > 0
        assert worst(replayed, alone) < worst(packed, alone) / 3


def test_training_replays_nothing(backend):
    routers = [module for module in backend.model.modules() if hasattr(module, "router_replay")]
    assert len(routers) == 3
    assert all(router.router_replay is None for router in routers)
    assert not backend.model[0].config.moe_enable_routing_replay
