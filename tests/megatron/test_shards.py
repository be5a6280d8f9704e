"""Shards of several ranks put together and cut apart again, without processes."""

from types import SimpleNamespace

import pytest
import torch

from hf_megapack.errors import ExportError
from hf_megapack.megatron import shards
from hf_megapack.megatron.shards import Shard, Split, gather_full, merge_shards, take_shard


def shard_of(full, dim, rank, size, axis="tensor"):
    layout = SimpleNamespace(**{f"{axis}_rank": rank, f"{axis}_size": size})
    split = Split(axis=axis, dim=dim)
    return Shard(tensor=take_shard(full, split, layout), split=split, rank=rank, size=size)


@pytest.mark.parametrize("axis", ["tensor", "expert"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_merging_the_shards_of_all_ranks_gives_the_full_tensors(size, axis):
    full = {"a": torch.arange(24.0).view(4, 6), "b": torch.arange(32.0).view(4, 8), "c": torch.ones(3)}
    dims = {"a": 0, "b": 1, "c": None}
    ranks = [{k: shard_of(v, dims[k], rank, size, axis) for k, v in full.items()} for rank in reversed(range(size))]
    # A second pipeline stage holds other keys.
    ranks += [{"d": shard_of(torch.ones(4), 0, rank, size)} for rank in range(size)]
    merged = merge_shards(ranks)
    assert list(merged) == ["a", "b", "c", "d"]
    assert all(torch.equal(merged[key], value) for key, value in full.items())


@pytest.mark.parametrize(
    "ranks",
    [
        [{"a": shard_of(torch.ones(4), 0, 0, 2)}],
        [{"a": shard_of(torch.ones(4), 0, 0, 2)}] * 2,
        [{"a": shard_of(torch.ones(4), 0, 0, 2)}, {"a": shard_of(torch.ones(8), 0, 1, 2)}],
        [{"a": shard_of(torch.ones(4), 0, 0, 2)}, {"a": shard_of(torch.ones(4), 0, 1, 2, "expert")}],
    ],
    ids=["missing", "twice", "other shape", "other ranks"],
)
def test_shards_that_do_not_fit_together_are_refused(ranks):
    with pytest.raises(ExportError, match="a"):
        merge_shards(ranks)


def test_what_a_rank_sends_is_cut_into_messages_of_one_dtype(monkeypatch):
    monkeypatch.setattr(shards, "MESSAGE_ELEMENTS", 10)
    sizes = {"a": 4, "b": 6, "c": 1, "d": 25, "e": 3}
    sent = {key: shard_of(torch.ones(size), None, 0, 1) for key, size in sizes.items()}
    sent["step"] = shard_of(torch.ones((), dtype=torch.float64), None, 0, 1)
    assert list(shards._messages(sent)) == [["a", "b"], ["c"], ["d"], ["e"], ["step"]]
    assert list(shards._messages({})) == []


def whole_model_on(data_rank: int, world_size: int) -> SimpleNamespace:
    """Return the layout of one of several ranks that hold a whole model each."""
    alone = SimpleNamespace(size=lambda: 1)
    sizes = {"tensor_rank": 0, "tensor_size": 1, "context_rank": 0, "expert_replica_rank": data_rank}
    sizes |= {"world_size": world_size, "data_rank": data_rank, "model_group": alone, "expert_model_group": alone}
    return SimpleNamespace(**sizes)


@pytest.mark.parametrize("data_rank", [0, 1])
def test_where_every_rank_holds_a_whole_model_none_waits_for_another(data_rank):
    """There is no process group here that it could wait in."""
    tensor = torch.arange(3.0)
    gathered = gather_full({"a": (tensor, Split(axis="tensor", dim=0))}, whole_model_on(data_rank, 2))
    assert torch.equal(gathered["a"], tensor)


def test_gathered_tensors_are_copies():
    tensor = torch.ones(2)
    gathered = gather_full({"a": (tensor, Split(axis="tensor", dim=None))}, whole_model_on(0, 1))
    tensor.zero_()
    assert gathered["a"].tolist() == [1.0, 1.0]
