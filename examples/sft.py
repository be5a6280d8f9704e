"""Fine-tune a chat or agent model with a LoRA adapter.

    accelerate launch examples/sft.py --model Qwen/Qwen3-0.6B --dataset trl-lib/Capybara --output_dir outputs/capybara

`--config FILE` reads options from a YAML file; those on the command line win. `--help` lists all of them.
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from datasets import Dataset, load_dataset, load_from_disk
from peft import LoraConfig
from transformers import AutoTokenizer, HfArgumentParser

from hf_megapack import MegaPackConfig, MegaPackTrainer


@dataclass
class ScriptArguments:
    """What to train on what; everything about how is MegaPackConfig's."""

    model: str = field(metadata={"help": "Hub id or folder of the base model, or a PEFT adapter to continue from."})
    dataset: str = field(metadata={"help": "Hub id, folder of a saved dataset, or .json, .jsonl or .parquet file."})
    dataset_split: str = field(default="train", metadata={"help": "Split of a dataset from the hub to train on."})
    eval_dataset: str | None = field(default=None, metadata={"help": "As dataset, for the loss on held-out rows."})
    eval_split: str = field(default="test", metadata={"help": "Split of a held-out dataset from the hub."})
    chat_template: str | None = field(default=None, metadata={"help": "Jinja file instead of the model's template."})


@dataclass
class LoraArguments:
    """The adapter; `lora_target_modules` are peft's names."""

    lora_r: int = field(default=16, metadata={"help": "Rank of the adapter."})
    lora_alpha: int = field(default=32, metadata={"help": "The adapter is scaled by alpha / rank."})
    lora_target_modules: list[str] = field(
        default_factory=lambda: ["all-linear"], metadata={"help": "Modules to adapt, or all-linear."}
    )


def read_dataset(name: str, split: str) -> Dataset:
    """Load rows from a file, a folder written by `save_to_disk`, or the hub.

    Args:
        name: Path or hub id.
        split: Which split of a hub dataset.
    """
    path = Path(name)
    if path.suffix in (".json", ".jsonl", ".parquet"):
        return load_dataset("parquet" if path.suffix == ".parquet" else "json", data_files=name, split="train")
    return load_from_disk(name) if path.is_dir() else load_dataset(name, split=split)


def parse_arguments() -> tuple[ScriptArguments, LoraArguments, MegaPackConfig]:
    """Read the command line, and the YAML file that --config names.

    Raises:
        SystemExit: If an option is unknown or a required one is missing.
    """
    parser = HfArgumentParser((ScriptArguments, LoraArguments, MegaPackConfig), allow_abbrev=False)
    arguments = sys.argv[1:]
    if "--config" in arguments:
        at = arguments.index("--config")
        options = yaml.safe_load(Path(arguments[at + 1]).read_text())
        from_file = [word for name, value in options.items() for word in (f"--{name}", *map(str, as_list(value)))]
        arguments = from_file + arguments[:at] + arguments[at + 2 :]
    return parser.parse_args_into_dataclasses(arguments)


def as_list(value: object) -> list:
    """Return a value of the YAML file as the words that would follow its name on a command line."""
    return value if isinstance(value, list) else [value]


def main() -> None:
    """Train, and leave the adapter in output_dir."""
    script, lora, args = parse_arguments()
    tokenizer = AutoTokenizer.from_pretrained(script.model)
    if script.chat_template:
        tokenizer.chat_template = Path(script.chat_template).read_text()
    targets = lora.lora_target_modules
    trainer = MegaPackTrainer(
        model=script.model,
        args=args,
        train_dataset=read_dataset(script.dataset, script.dataset_split),
        eval_dataset=read_dataset(script.eval_dataset, script.eval_split) if script.eval_dataset else None,
        processing_class=tokenizer,
        peft_config=LoraConfig(
            r=lora.lora_r,
            lora_alpha=lora.lora_alpha,
            target_modules=targets[0] if targets == ["all-linear"] else targets,
            task_type="CAUSAL_LM",
        ),
    )
    result = trainer.train()
    trainer.save_model()
    trainer.log_metrics("train", result.metrics)
    trainer.save_metrics("train", result.metrics)
    if script.eval_dataset:
        metrics = trainer.evaluate()
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)


if __name__ == "__main__":
    main()
