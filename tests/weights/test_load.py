"""Which of a folder's files are the model."""

import json
from contextlib import nullcontext

import pytest
import torch
from safetensors.torch import save_file

from hf_megapack.errors import ConfigError
from hf_megapack.weights.load import INDEX_FILE, SINGLE_FILE, load_parameters, open_checkpoint
from hf_megapack.weights.names import HeadLayout, WeightRule

NAME = "model.norm.weight"


@pytest.mark.parametrize("has_shard", [True, False])
def test_a_single_file_comes_before_an_index_that_was_left_over_as_in_transformers(tmp_path, has_shard):
    """`save_pretrained` leaves the index of an earlier, sharded save behind."""
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": {NAME: "model-00001-of-00001.safetensors"}}))
    save_file({NAME: torch.ones(2)}, tmp_path / SINGLE_FILE)
    if has_shard:
        save_file({NAME: torch.zeros(2)}, tmp_path / "model-00001-of-00001.safetensors")
    with open_checkpoint(tmp_path) as reader:
        assert reader.read(NAME).tolist() == [1.0, 1.0]


def test_tensors_without_an_element_need_no_rule(tmp_path):
    """Glm4Moe with n_shared_experts=0 saves some."""
    save_file(
        {NAME: torch.ones(2), "model.layers.0.mlp.shared_experts.up_proj.weight": torch.ones(0, 4)},
        tmp_path / SINGLE_FILE,
    )
    with open_checkpoint(tmp_path) as reader:
        assert reader.unread([]) == [NAME]


@pytest.mark.parametrize("prefix", ["model.", ""])
@pytest.mark.parametrize("row", [None, 0, 4500, 4999])
def test_a_head_of_its_own_is_refused_where_the_config_ties_it(tmp_path, prefix, row):
    """Here transformers warns that it will not tie the two, and computes with both."""
    embedding = torch.randn(5000, 2)
    head = embedding.clone()
    if row is not None:
        head[row, 1] += 1e-3
    save_file({f"{prefix}embed_tokens.weight": embedding, "lm_head.weight": head}, tmp_path / SINGLE_FILE)
    rule = WeightRule(parameter="embedding", sources=("model.embed_tokens.weight",), shard_dim=0, role="embedding")
    parameters = {"embedding": torch.zeros(5000, 2)}
    arguments = (tmp_path, [rule], parameters, HeadLayout(num_heads=1, num_groups=1, head_dim=2))
    if row is None:
        load_parameters(*arguments, ignored=lambda name: name == "lm_head.weight")
        assert torch.equal(parameters["embedding"], embedding)
        return
    with pytest.raises(ConfigError, match="tie_word_embeddings"):
        load_parameters(*arguments, ignored=lambda name: name == "lm_head.weight")


@pytest.mark.parametrize("size", [0, 5, -1])
def test_a_file_that_a_download_left_incomplete_is_named(tmp_path, size):
    save_file({NAME: torch.ones(2)}, tmp_path / SINGLE_FILE)
    (tmp_path / SINGLE_FILE).write_bytes((tmp_path / SINGLE_FILE).read_bytes()[:size])
    with pytest.raises(ConfigError, match=f"{SINGLE_FILE} cannot be read as safetensors"), open_checkpoint(tmp_path):
        pass


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"weight_map": 3}'])
def test_an_index_that_is_none_is_named(tmp_path, text):
    (tmp_path / INDEX_FILE).write_text(text)
    with pytest.raises(ConfigError, match=f"{INDEX_FILE} is no index"), open_checkpoint(tmp_path):
        pass


@pytest.mark.parametrize(("dtype", "kind"), [(torch.int8, "I8"), (torch.float8_e4m3fn, "F8_E4M3"), (torch.float16, "")])
def test_quantised_weights_are_refused_whatever_their_config_says(tmp_path, dtype, kind):
    save_file({NAME: torch.ones(2).to(dtype)}, tmp_path / SINGLE_FILE)
    rule = WeightRule(parameter="norm", sources=(NAME,), role="norm")
    arguments = (tmp_path, [rule], {"norm": torch.zeros(2)}, HeadLayout(num_heads=1, num_groups=1, head_dim=2))
    with pytest.raises(ConfigError, match=f"the first {NAME} as {kind};") if kind else nullcontext():
        load_parameters(*arguments)
