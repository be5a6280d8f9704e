"""Which of a folder's files are the model."""

import json

import pytest
import torch
from safetensors.torch import save_file

from hf_megapack.weights.load import INDEX_FILE, SINGLE_FILE, open_checkpoint

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
