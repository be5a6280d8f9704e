"""The folder of a run: tried before anything long, and whole whatever happens; and the tokenizer beside the adapter."""

from pathlib import Path

import pytest
from transformers import TrainerCallback

from hf_megapack.errors import ExportError


@pytest.mark.parametrize("save_strategy", ["no", "steps"])
def test_an_output_dir_that_cannot_be_written_stops_before_the_first_update(make, tmp_path, save_strategy):
    trainer = make(save_strategy=save_strategy, save_steps=4)
    (tmp_path / "run").rmdir()
    (tmp_path / "run").write_text("a file")
    with pytest.raises(ExportError, match=rf"output_dir='{tmp_path / 'run'}' cannot be"):
        trainer.train()
    assert trainer.backend.calls == []


def test_a_full_output_dir_stops_before_the_first_update_and_nothing_is_left_behind(make, tmp_path, monkeypatch):
    trainer, write_bytes = make(), Path.write_bytes

    def full(path: Path, data: bytes) -> int:
        write_bytes(path, data[:1])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(ExportError, match=r"run' cannot be written: .*No space left"):
        trainer.train()
    assert trainer.backend.calls == []
    assert list((tmp_path / "run").iterdir()) == []


def test_an_output_dir_that_cannot_be_created_stops_before_data_is_read(make, tmp_path):
    (tmp_path / "file").write_text("")

    with pytest.raises(ExportError, match=r"output_dir='.*/file/run' cannot be created"):
        make(output_dir=str(tmp_path / "file" / "run"), rows=[{"not": "read"}])


class Listing(TrainerCallback):
    """Keeps what is in the folder when training begins."""

    def on_train_begin(self, args, state, control, **kwargs):
        """List it."""
        self.names = [path.name for path in Path(args.output_dir).iterdir()]


def test_trying_the_output_dir_leaves_nothing_and_sweeps_what_others_left(make, tmp_path):
    listing = Listing()
    trainer = make(callbacks=[listing], max_steps=1)
    (tmp_path / "run" / ".checkpoint-1.staging-0123456789abcdef").mkdir()
    trainer.train()
    assert listing.names == []


def test_a_full_disk_leaves_the_tokenizer_that_was_there(make, tmp_path, monkeypatch):
    trainer = make()
    folder = tmp_path / "adapter"
    trainer.save_model(str(folder))
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert "tokenizer.json" in before

    def fail(target, **kwargs):
        (Path(target) / "tokenizer.json").write_text("{")
        raise Exception("No space left on device (os error 28)")  # what tokenizers raises

    monkeypatch.setattr(trainer.processing_class, "save_pretrained", fail)
    with pytest.raises(ExportError, match=rf"Cannot write the tokenizer to {folder}: No space left"):
        trainer.save_model(str(folder))
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_tokenizer_is_written_with_all_its_files(make, tmp_path, tiny_tokenizer):
    """Further templates lie in a folder of their own."""
    trainer = make()
    tiny_tokenizer.chat_template = {"default": "a", "tool_use": "b"}
    trainer.save_model(str(tmp_path / "adapter"))
    tiny_tokenizer.save_pretrained(tmp_path / "plain")
    names = {path.relative_to(tmp_path / "plain").as_posix() for path in (tmp_path / "plain").rglob("*")}
    assert "additional_chat_templates/tool_use.jinja" in names
    written = {path.relative_to(tmp_path / "adapter").as_posix() for path in (tmp_path / "adapter").rglob("*")}
    assert written == names | {"adapter_config.json", "adapter_model.safetensors"}


def test_a_folder_that_holds_a_model_is_no_place_for_an_adapter(make, tmp_path):
    """Loaders take a folder with adapter_config.json for an adapter, so that its model would be lost to them."""
    base = tmp_path / "base"
    base.mkdir()
    for name in ("config.json", "model.safetensors"):
        (base / name).write_text("{}")
    with pytest.raises(ExportError, match=r"base holds a model \(config.json, model.safetensors\)"):
        make(output_dir=str(base), rows=[{"not": "read"}])
    trainer = make()
    with pytest.raises(ExportError, match="base holds a model"):
        trainer.save_model(str(base))
    assert sorted(path.name for path in base.iterdir()) == ["config.json", "model.safetensors"]
