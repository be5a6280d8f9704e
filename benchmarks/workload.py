"""What the GPU benchmarks share: model shapes, settings from the command line, runs in processes of their own."""

import argparse
import ast
import json
import os
import platform
import resource
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

import torch
from peft import LoraConfig
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, Qwen3Config

MARK = "RESULT "
NOMINAL_TFLOPS = 989  # dense bfloat16 of an H100 or H200 SXM, by NVIDIA's datasheet
PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "peft",
    "accelerate",
    "megatron-core",
    "transformer-engine",
    "trl",
    "liger-kernel",
    "flash-attn-4",
)
# Qwen3-8B's sizes, and a model that a CPU trains in seconds with the same vocabulary.
SHAPES = {
    "qwen3_8b": {
        "num_hidden_layers": 36,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 12288,
    },
    "tiny": {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 128,
    },
}


def model_config(shape: str, num_layers: int | None = None) -> Qwen3Config:
    """Return the configuration of a shape, with fewer layers if asked for."""
    sizes = dict(SHAPES[shape])
    if num_layers is not None:
        sizes["num_hidden_layers"] = num_layers
    return Qwen3Config(
        vocab_size=151936,
        max_position_embeddings=40960,
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        **sizes,
    )


def lora_config() -> LoraConfig:
    """Return the adapter that every side trains."""
    return LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")


def no_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of two words: trainers ask for one, and the examples are tokens already."""
    words = Tokenizer(WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<eos>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")


def common_arguments(folder: str) -> dict:
    """Return what every trainer is told."""
    return {
        "output_dir": folder,
        "use_cpu": not torch.cuda.is_available(),
        "bf16": torch.cuda.is_available(),
        "learning_rate": 1e-4,
        "lr_scheduler_type": "constant",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def parse_settings(pairs: Sequence[str]) -> dict[str, object]:
    """Turn key=value pairs into keyword arguments.

    Args:
        pairs: Values are Python literals, true, false, none, or else text.

    Raises:
        SystemExit: If a pair has no "=".
    """
    words = {"true": True, "false": False, "none": None}
    settings = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals:
            raise SystemExit(f"{pair!r} is not of the form key=value.")
        try:
            settings[key] = words[text.lower()] if text.lower() in words else ast.literal_eval(text)
        except (ValueError, SyntaxError):
            settings[key] = text
    return settings


def add_shape_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose the model."""
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen3_8b")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")


def describe_machine() -> str:
    """Return device and versions in one line."""
    if torch.cuda.is_available():
        device = f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"
    else:
        device = f"no GPU, {os.cpu_count()} cores of {platform.machine()}"
    found = []
    for name in PACKAGES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            found.append(f"no {name}")
    return f"{device}; Python {platform.python_version()}, {', '.join(found)}"


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def peak_gib() -> float:
    """Return the most memory that tensors took on the GPU since the peak was reset, or that the process took."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def reset_peak() -> None:
    """Forget the GPU memory that building a model took."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def emit(line: dict) -> None:
    """Hand a result to the process that called `run_process`."""
    print(MARK + json.dumps(line), flush=True)


def run_process(arguments: Sequence[str], limit_s: int) -> list[dict]:
    """Run a Python script, print what it prints, and return what it emitted, also if it failed or took too long.

    Args:
        arguments: The script and its arguments.
        limit_s: Seconds after which it and its children are killed.
    """
    found = []
    command = ["timeout", "--signal=KILL", str(limit_s), sys.executable, *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if line.startswith(MARK):
                found.append(json.loads(line.removeprefix(MARK)))
            else:
                print(line, end="", flush=True)
    if process.returncode:
        print(f"The process ended with {process.returncode}; it may take {limit_s} s.", flush=True)
    return found
