"""The launch configurations: accelerate reads them, bash reads the SLURM script, and several CPU processes train."""

import re
import subprocess

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from safetensors.torch import load_file

from tests.examples.test_sft import CONVERSATIONS, EXAMPLES, run
from tests.helpers.assets import load_tokenizer
from tests.helpers.reference_model import save_random_model
from tests.helpers.spawn import only_ranks


@pytest.mark.parametrize(
    ("name", "machines", "processes"),
    [("accelerate_cpu_ranks", 1, 2), ("accelerate_node", 1, 8), ("accelerate_nodes", 2, 16)],
)
def test_accelerate_reads_a_config_of_several_processes(name, machines, processes):
    config = load_config_from_file(str(EXAMPLES / f"{name}.yaml"))
    assert (config.num_machines, config.num_processes) == (machines, processes)
    assert config.distributed_type == "MULTI_GPU"
    assert config.mixed_precision == "no"


def test_the_slurm_script_is_bash_and_starts_the_script_that_there_is():
    script = EXAMPLES / "slurm" / "sft.sbatch"
    subprocess.run(["bash", "-n", script], check=True)
    (target,) = re.findall(r"examples/\w+\.py", script.read_text().split("srun", 1)[1])
    assert (EXAMPLES.parent / target).exists()


def test_two_cpu_processes_split_a_model_from_the_command_line(tmp_path, free_port):
    save_random_model("llama", tmp_path / "model")
    load_tokenizer().save_pretrained(tmp_path / "model")
    adapters = []
    for output, launch, layout in (
        ("one", ["--config_file", EXAMPLES / "accelerate_cpu.yaml"], []),
        (
            "two",
            ["--config_file", EXAMPLES / "accelerate_cpu_ranks.yaml", "--main_process_port", free_port],
            ["--tensor_parallel_size", 2, "--sequence_parallel", "true"],
        ),
    ):
        with only_ranks():
            run(
                *("-m", "accelerate.commands.launch", *launch, EXAMPLES / "sft.py", "--model", tmp_path / "model"),
                *("--dataset", CONVERSATIONS / "mtbench.jsonl", "--output_dir", tmp_path / output, "--use_cpu", "true"),
                *("--max_steps", 2, "--per_device_train_batch_size", 2, "--save_strategy", "no", "--report_to", "none"),
                *("--learning_rate", 1e-3, *layout),
            )
        adapters.append(load_file(tmp_path / output / "adapter_model.safetensors"))
    one, two = adapters
    assert set(one) == set(two)
    assert all((one[key] - two[key]).abs().max() < 1e-5 for key in one)
    assert any(value.any() for key, value in one.items() if "lora_B" in key)
