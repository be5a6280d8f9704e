"""The training script as a user runs it, and its adapter in plain transformers and peft."""

import functools
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from datasets import DatasetDict, load_dataset
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file

from tests.helpers.assets import ASSETS, load_tokenizer
from tests.helpers.reference_model import save_random_model

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
CONVERSATIONS = ASSETS / "conversations"


def run(*command: str | Path) -> str:
    """Run a command with the repository importable; return what it printed, or fail with it."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, *map(str, command)], env=environment, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


@pytest.fixture
def run_here(monkeypatch):
    """Run the script with these options in this process: ten seconds of imports less than in its own."""
    spec = importlib.util.spec_from_file_location("sft", EXAMPLES / "sft.py")
    script = importlib.util.module_from_spec(spec)
    # dataclasses look up the module that they are defined in.
    monkeypatch.setitem(sys.modules, "sft", script)
    spec.loader.exec_module(script)

    def run_here(*options: str | Path | int) -> None:
        monkeypatch.setattr(sys, "argv", ["sft.py", *map(str, options)])
        script.main()

    return run_here


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny model with its tokenizer."""
    model = tmp_path_factory.mktemp("model")
    save_random_model("llama", model)
    load_tokenizer().save_pretrained(model)
    return model


@pytest.fixture(scope="module")
def trained(model, tmp_path_factory):
    """The folder that two updates of a tiny model left, and what was printed on the way."""
    output = tmp_path_factory.mktemp("output")
    printed = run(
        "-m",
        "accelerate.commands.launch",
        "--config_file",
        EXAMPLES / "accelerate_cpu.yaml",
        EXAMPLES / "sft.py",
        "--config",
        EXAMPLES / "sft.yaml",
        # "each" leaves out the line break that opens a turn, which is part of the prompt there: other tokens than plain
        # transformers counts.
        *("--assistant_mask", "all"),
        *(
            "--model",
            model,
            "--output_dir",
            output,
            "--max_steps",
            2,
            "--per_device_train_batch_size",
            4,
            "--learning_rate",
            0.01,
        ),
        *("--dataset", CONVERSATIONS / "bfcl.jsonl", "--eval_dataset", CONVERSATIONS / "mtbench.jsonl"),
    )
    return output, printed


def test_sft_reports_tokens_and_saves_an_adapter_that_peft_loads(trained):
    output, printed = trained
    metrics = json.loads((output / "train_results.json").read_text())
    assert 0 < metrics["loss_tokens"] < metrics["executed_tokens"] < metrics["logical_tokens"]
    shared = 1 - metrics["executed_tokens"] / metrics["logical_tokens"]
    assert metrics["shared_fraction"] == pytest.approx(shared)
    assert re.search(r"100%.*2/2", printed), "no progress bar"
    model = AutoPeftModelForCausalLM.from_pretrained(output)
    factors = [p for name, p in model.named_parameters() if "lora_B" in name]
    assert factors
    assert all(factor.abs().max() > 0 for factor in factors)


def test_plain_peft_measures_the_held_out_loss_that_the_trainer_measured(trained):
    """Packed rows on Megatron-Core on one side, conversations one by one on the other."""
    output, _ = trained
    measured = json.loads((output / "eval_results.json").read_text())["eval_loss"]
    printed = run(EXAMPLES / "check_adapter.py", output, "--dataset", CONVERSATIONS / "mtbench.jsonl")
    before, after = map(float, re.search(r"peft: ([\d.]+) before, ([\d.]+) after", printed).groups())
    assert after < before
    # Four decimals are printed.
    assert after == pytest.approx(measured, abs=1e-4)


RUN = """\
use_cpu: true
max_length: null
assistant_mask: all
per_device_train_batch_size: 2
lr_scheduler_type: cosine_with_min_lr
lr_scheduler_kwargs: {min_lr: 0.0}
logging_steps: 1
save_steps: 1
report_to: none
eval_split: held_out
"""


def test_sft_resumes_from_the_newest_checkpoint_or_a_folder_and_reads_datasets_as_folders(model, tmp_path, run_here):
    """Every start trains what is missing of three updates; the figures of the last line count no others."""
    (tmp_path / "clone").mkdir()
    shutil.copy(CONVERSATIONS / "bfcl.jsonl", tmp_path / "clone" / "train.jsonl")
    held_out = load_dataset("json", data_files=str(CONVERSATIONS / "mtbench.jsonl"), split="train")
    DatasetDict({"train": held_out.select([0]), "held_out": held_out}).save_to_disk(tmp_path / "saved")
    (tmp_path / "run.yaml").write_text(RUN)
    common = (f"--config={tmp_path / 'run.yaml'}", "--model", model)
    common += ("--dataset", tmp_path / "clone", "--eval_dataset", tmp_path / "saved", "--output_dir", tmp_path / "out")
    counted = {}
    run_alone = functools.partial(run, EXAMPLES / "sft.py")
    for first, run_script, options in (
        (1, run_here, ["--max_steps", 2]),
        (3, run_alone, ["--max_steps", 3, "--resume_from_checkpoint", "True"]),
        (2, run_here, ["--max_steps", 3, "--resume_from_checkpoint", tmp_path / "out/checkpoint-1"]),
        (1, run_here, ["--max_steps", 3, "--resume_from_checkpoint", "false"]),
    ):
        run_script(*common, *options)
        metrics = json.loads((tmp_path / "out/train_results.json").read_text())
        state = json.loads((tmp_path / f"out/checkpoint-{options[1]}/trainer_state.json").read_text())
        lines = [line for line in state["log_history"] if "loss" in line]
        counted[first] = sum(line["logical_tokens"] for line in lines[first - 1 :])
        assert [line["step"] for line in lines] == list(range(1, options[1] + 1))
        assert metrics["logical_tokens"] == counted[first] > 0
        assert lines[-1]["num_tokens"] == sum(line["logical_tokens"] for line in lines)
    assert counted[1] > counted[2] > counted[3]
    metrics = json.loads((tmp_path / "out/eval_results.json").read_text())
    assert round(metrics["eval_runtime"] * metrics["eval_samples_per_second"]) == len(held_out) > 1


def test_sft_continues_from_an_adapter_whose_rank_and_targets_stay(trained, tmp_path, run_here):
    output = shutil.copytree(trained[0], tmp_path / "adapter")
    # As peft leaves an adapter: the tokenizer is then the base model's.
    for file in output.glob("*token*"):
        file.unlink()
    words = (
        "--config",
        EXAMPLES / "sft.yaml",
        "--model",
        output,
        "--output_dir",
        tmp_path / "out",
        "--use_cpu",
        "true",
    )
    words += ("--max_steps", 1, "--dataset", CONVERSATIONS / "bfcl.jsonl")
    run_here(*words)
    fields = [json.loads((folder / "adapter_config.json").read_text()) for folder in (output, tmp_path / "out")]
    assert fields[0] == fields[1]
    before, after = (load_file(folder / "adapter_model.safetensors") for folder in (output, tmp_path / "out"))
    assert any(0 < (after[key] - value).abs().max() <= 2e-3 for key, value in before.items())
    with pytest.raises(SystemExit, match="leave out --lora_r, --lora_target_modules"):
        run_here(*words, "--lora_r", 4, "--lora_target_modules", "q_proj")


def test_sft_refuses_an_option_that_it_does_not_know(tmp_path, run_here, capsys):
    config = tmp_path / "typo.yaml"
    config.write_text("dataset: rows.jsonl\nlearning_rat: 1.0\n")
    with pytest.raises(SystemExit) as refused:
        run_here("--config", config, "--model", "none", "--output_dir", tmp_path)
    assert "--learning_rat" in f"{refused.value} {capsys.readouterr().err}"
