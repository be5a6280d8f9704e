"""Directories are published whole or not at all; optimizer tensors come back as they were written."""

import json
import os

import pytest
import torch

from hf_megapack.errors import ExportError
from hf_megapack.weights import publish_directory, read_optimizer_state, save_optimizer_state, sweep_staging
from tests.helpers.interruption import interrupted

KEY = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


def test_directory_appears_only_when_the_block_ends(tmp_path):
    final = tmp_path / "runs" / "checkpoint-5"
    with publish_directory(final) as staging:
        (staging / "nested").mkdir()
        (staging / "nested" / "file").write_text("content")
        assert not final.exists()
        assert staging.parent == final.parent
    assert (final / "nested" / "file").read_text() == "content"
    assert [entry.name for entry in final.parent.iterdir()] == ["checkpoint-5"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, OSError])
def test_error_in_the_block_leaves_nothing(tmp_path, error):
    def write_and_fail():
        with publish_directory(tmp_path / "checkpoint-5") as staging:
            (staging / "file").write_text("half")
            raise error

    with pytest.raises(ExportError if error is OSError else error):
        write_and_fail()
    assert list(tmp_path.iterdir()) == []


def test_existing_directory_is_never_changed(tmp_path):
    final = tmp_path / "checkpoint-5"
    final.mkdir()
    with pytest.raises(ExportError, match="exists already"):
        write_two_files(final)
    assert list(final.iterdir()) == []
    assert list(tmp_path.iterdir()) == [final]


def test_directory_that_appears_meanwhile_is_not_replaced(tmp_path):
    """os.rename alone would replace an empty directory without a word."""
    final = tmp_path / "checkpoint-5"

    def write_beside_another_writer():
        with publish_directory(final) as staging:
            (staging / "file").write_text("second")
            final.mkdir()

    with pytest.raises(ExportError, match="exists already"):
        write_beside_another_writer()
    assert list(final.iterdir()) == []
    assert list(tmp_path.iterdir()) == [final]


def test_file_and_folder_contents_are_synced_before_the_name_appears(tmp_path, monkeypatch):
    """Order on disk: every file, the folders, then the rename, then the parent that holds the name."""
    events = []
    real_fsync, real_rename = os.fsync, os.rename

    def fsync(handle):
        events.append(os.path.basename(os.readlink(f"/proc/self/fd/{handle}")))
        real_fsync(handle)

    def rename(source, target):
        events.append("renamed")
        real_rename(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    with publish_directory(tmp_path / "final") as staging:
        (staging / "sub").mkdir()
        (staging / "sub" / "b").write_text("b")
        (staging / "a").write_text("a")
        name = staging.name
    assert sorted(events[:3]) == ["a", "b", "sub"]
    assert events.index("b") < events.index("sub")
    assert events[3:] == [name, "renamed", tmp_path.name]


def write_two_files(final):
    with publish_directory(final) as staging:
        for name in ("a", "b"):
            (staging / name).write_text(name)


def test_power_cut_at_any_operation_leaves_a_whole_directory_or_none(tmp_path):
    outcomes = set()
    for step in range(12):
        parent = tmp_path / str(step)
        parent.mkdir()
        with interrupted(step, is_final=True) as interruption:
            write_two_files(parent / "final")
        published = (parent / "final").exists()
        if published:
            assert sorted(entry.name for entry in (parent / "final").iterdir()) == ["a", "b"]
        sweep_staging(parent)
        assert [entry.name for entry in parent.iterdir()] == (["final"] if published else [])
        outcomes.add((published, interruption.happened))
    # Cut before the name appeared, cut after it, and not cut at all.
    assert outcomes == {(False, True), (True, True), (True, False)}


def test_sweep_removes_staging_only(tmp_path):
    keep = [".git", "checkpoint-5", ".cache.staging-notes", "plain.staging-0123456789abcdef"]
    for name in [*keep, ".checkpoint-6.staging-0123456789abcdef"]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")
    assert [path.name for path in sweep_staging(tmp_path)] == [".checkpoint-6.staging-0123456789abcdef"]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == sorted(keep)
    assert sweep_staging(tmp_path) == []
    assert sweep_staging(tmp_path / "missing") == []


def test_optimizer_tensors_come_back_bit_equal(tmp_path):
    flat = torch.randn(24, generator=torch.Generator().manual_seed(0))
    state = {
        f"exp_avg/{KEY}": flat[:12].view(3, 4),
        f"exp_avg_sq/{KEY}": flat[12:].view(4, 3).t(),
        f"step/{KEY}": torch.tensor(7.0),
        f"moment_bf16/{KEY}": flat.to(torch.bfloat16),
    }
    save_optimizer_state(state, tmp_path / "optimizer.safetensors", optimizer_name="AdamW")
    back = read_optimizer_state(tmp_path / "optimizer.safetensors", optimizer_name="AdamW")
    assert back.keys() == state.keys()
    for name, tensor in state.items():
        assert back[name].dtype == tensor.dtype
        assert torch.equal(back[name], tensor), name
    save_optimizer_state(dict(reversed(state.items())), tmp_path / "again.safetensors", optimizer_name="AdamW")
    # safetensors writes the metadata in the header in any order.
    (header, tensors), (expected_header, expected_tensors) = (
        (json.loads(data[8:end]), data[end:])
        for name in ("again", "optimizer")
        for data in [(tmp_path / f"{name}.safetensors").read_bytes()]
        for end in [8 + int.from_bytes(data[:8], "little")]
    )
    assert header == expected_header
    assert tensors == expected_tensors


@pytest.mark.parametrize("name", [KEY, "exp_avg/q_proj", f"a/b/{KEY}", f"/{KEY}"])
def test_optimizer_name_of_another_form_is_refused(tmp_path, name):
    with pytest.raises(ExportError, match="PEFT key"):
        save_optimizer_state({name: torch.zeros(1)}, tmp_path / "optimizer.safetensors", optimizer_name="AdamW")
    assert list(tmp_path.iterdir()) == []


def test_missing_or_damaged_optimizer_state_is_an_export_error(tmp_path):
    path = tmp_path / "optimizer.safetensors"
    with pytest.raises(ExportError, match="no optimizer state"):
        read_optimizer_state(path, optimizer_name="AdamW")
    save_optimizer_state({f"exp_avg/{KEY}": torch.zeros(100)}, path, optimizer_name="AdamW")
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(ExportError, match="Cannot read"):
        read_optimizer_state(path, optimizer_name="AdamW")
    missing = tmp_path / "missing" / "optimizer.safetensors"
    with pytest.raises(ExportError, match="Cannot write"):
        save_optimizer_state({f"exp_avg/{KEY}": torch.zeros(1)}, missing, optimizer_name="AdamW")


def test_the_state_of_another_optimizer_is_refused(tmp_path):
    path = tmp_path / "optimizer.safetensors"
    save_optimizer_state({f"momentum_buffer/{KEY}": torch.zeros(1)}, path, optimizer_name="SGD")
    with pytest.raises(ExportError, match=r"is that of SGD, and this run's optimizer is AdamW\. Resume with the same"):
        read_optimizer_state(path, optimizer_name="AdamW")
