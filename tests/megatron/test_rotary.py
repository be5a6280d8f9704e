"""Rotary frequencies against transformers' own modules."""

import pytest
import torch
from transformers import LlamaConfig, MixtralConfig, Qwen3Config
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeRotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.mixtral.modeling_mixtral import MixtralRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from hf_megapack.errors import ConfigError
from hf_megapack.megatron.rotary import rotary_frequencies, rotation
from tests.helpers.moe_reference import MOE_CONFIGS
from tests.helpers.reference_model import CONFIGS


@pytest.mark.parametrize("name", ["llama", "llama_tied_bias_yarn", "llama_mlp_bias_linear", "qwen3"])
def test_cosine_and_sine_equal_those_of_transformers(name):
    config = CONFIGS[name]()
    frequencies, factor = rotary_frequencies(config, config.head_dim)
    positions = torch.tensor([0, 1, 2, 700, 3, 4095])
    ours = rotation(positions, frequencies, factor)
    cosine, sine = LlamaRotaryEmbedding(config)(torch.zeros(1), positions[None])
    assert ours.shape == (2, 6, 1, config.head_dim // 2)
    # transformers repeats each half.
    assert torch.equal(torch.cat([ours[0, :, 0]] * 2, dim=-1), cosine[0])
    assert torch.equal(torch.cat([ours[1, :, 0]] * 2, dim=-1), sine[0])


def test_a_model_that_rotates_half_of_each_head_gets_half_the_angles():
    config = MOE_CONFIGS["glm4_moe"]()
    frequencies, factor = rotary_frequencies(config, config.head_dim)
    positions = torch.tensor([0, 5, 1023])
    ours = rotation(positions, frequencies)
    cosine, sine = Glm4MoeRotaryEmbedding(config)(torch.zeros(1), positions[None])
    assert ours.shape == (2, 3, 1, config.head_dim // 4)
    assert factor == 1.0
    assert torch.equal(torch.cat([ours[0, :, 0]] * 2, dim=-1), cosine[0])
    assert torch.equal(torch.cat([ours[1, :, 0]] * 2, dim=-1), sine[0])


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"rope_type": "linear"}, "no rotary frequencies, in transformers neither: KeyError"),
        ({"rope_type": "dynamic", "factor": 2.0}, "length of each sequence"),
        ({"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0] * 8}, "length of each sequence"),
        ({"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}, "rotates 8 of 16"),
    ],
)
def test_what_cannot_be_exact_is_refused(parameters, message):
    config = LlamaConfig(hidden_size=64, num_attention_heads=4)
    config.rope_parameters = {"rope_theta": 10000.0, **parameters}
    with pytest.raises(ConfigError, match=message):
        rotary_frequencies(config, 16)


def test_parameters_for_each_type_of_layer_are_refused_as_no_class_here_knows_them():
    same = {"rope_theta": 10000.0, "rope_type": "default"}
    config = Qwen3Config(rope_parameters={"full_attention": same})
    with pytest.raises(KeyError):
        Qwen3RotaryEmbedding(config)
    with pytest.raises(ConfigError, match="no rope_type, only full_attention"):
        rotary_frequencies(config, config.head_dim)


def test_yarn_without_a_head_dim_is_refused_with_the_reason():
    parameters = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
    config = MixtralConfig(rope_parameters=parameters)
    with pytest.raises(TypeError):
        MixtralRotaryEmbedding(config)
    with pytest.raises(ConfigError, match="head_dim=None"):
        rotary_frequencies(config, 128)


@pytest.mark.parametrize("rope_type", ["default", "proportional"])
@pytest.mark.parametrize("part", [0.35, 0.25, 1.0])
def test_a_part_of_a_head_may_be_odd_or_come_with_all_frequencies(rope_type, part):
    config = MOE_CONFIGS["glm4_moe"]()
    config.rope_parameters = {"rope_type": rope_type, "rope_theta": 10000.0, "partial_rotary_factor": part}
    frequencies, _ = rotary_frequencies(config, config.head_dim)
    positions = torch.tensor([0, 5, 1023])
    cosine, _ = Glm4MoeRotaryEmbedding(config)(torch.zeros(1), positions[None])
    assert torch.equal(torch.cat([rotation(positions, frequencies)[0, :, 0]] * 2, dim=-1), cosine[0])
