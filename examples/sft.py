"""Fine-tune a chat or agent model with a LoRA adapter.

    accelerate launch examples/sft.py --model Qwen/Qwen3-0.6B --dataset trl-lib/Capybara --output_dir outputs/capybara

`--config FILE` reads options from a YAML file; those on the command line win. `--help` lists all of them.
`--resume_from_checkpoint true` goes on from the newest checkpoint in output_dir, `--resume_from_checkpoint FOLDER` from
that one.
"""

from dataclasses import dataclass, field
from pathlib import Path

from peft import LoraConfig
from transformers import AutoTokenizer

from hf_megapack import MegaPackConfig, MegaPackTrainer
from hf_megapack.command_line import parse_options
from hf_megapack.data.sources import read_dataset


@dataclass
class ScriptArguments:
    """What to train on what; everything about how is MegaPackConfig's."""

    model: str = field(metadata={"help": "Hub id or folder of the base model, or a PEFT adapter to continue from."})
    dataset: str = field(metadata={"help": ".json, .jsonl or .parquet file, folder of a dataset, or hub id."})
    dataset_split: str = field(default="train", metadata={"help": "Split to train on, of a dataset that has several."})
    eval_dataset: str | None = field(default=None, metadata={"help": "As dataset, for the loss on held-out rows."})
    eval_split: str = field(default="test", metadata={"help": "Split of a held-out dataset that has several."})
    chat_template: str | None = field(default=None, metadata={"help": "Jinja file instead of the model's template."})


@dataclass
class LoraArguments:
    """A new adapter; `lora_target_modules` are peft's names. One to continue from has all this in its folder."""

    lora_r: int | None = field(default=None, metadata={"help": "Rank of a new adapter; 16 if left out."})
    lora_alpha: int | None = field(
        default=None, metadata={"help": "A new adapter is scaled by alpha / rank; 32 if left out."}
    )
    lora_target_modules: list[str] | None = field(
        default=None, metadata={"help": "Modules to adapt, or all-linear, which is what is taken if left out."}
    )


def is_adapter(model: str) -> bool:
    """Whether a model is the folder of an adapter to continue from."""
    return (Path(model) / "adapter_config.json").exists()


def tokenizer_folder(model: str) -> str:
    """Return what the tokenizer is loaded from: adapters need not have one beside them."""
    if is_adapter(model) and not (Path(model) / "tokenizer_config.json").exists():
        return LoraConfig.from_pretrained(model).base_model_name_or_path
    return model


def adapter_config(model: str, lora: LoraArguments) -> LoraConfig | None:
    """Return the configuration of a new adapter, None where the model is an adapter to continue from.

    Args:
        model: As given.
        lora: As given; nothing of it is set for an adapter to continue from.

    Raises:
        SystemExit: If options of a new one are given for an adapter to continue from.
    """
    if is_adapter(model):
        given = [f"--{name}" for name, value in vars(lora).items() if value is not None]
        if given:
            raise SystemExit(f"error: {model} is an adapter, whose rank and targets stay: leave out {', '.join(given)}")
        return None
    targets = lora.lora_target_modules or ["all-linear"]
    return LoraConfig(
        r=16 if lora.lora_r is None else lora.lora_r,
        lora_alpha=32 if lora.lora_alpha is None else lora.lora_alpha,
        target_modules=targets[0] if targets == ["all-linear"] else targets,
        task_type="CAUSAL_LM",
    )


def checkpoint_to_resume(given: str | None) -> str | bool | None:
    """Return what `train` takes: True for the newest checkpoint in output_dir, None for none, or a folder."""
    return {"true": True, "false": None}.get((given or "false").lower(), given)


def main() -> None:
    """Train, and leave the adapter in output_dir."""
    script, lora, args = parse_options((ScriptArguments, LoraArguments, MegaPackConfig))
    peft_config = adapter_config(script.model, lora)
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder(script.model))
    if script.chat_template:
        tokenizer.chat_template = Path(script.chat_template).read_text()
    trainer = MegaPackTrainer(
        model=script.model,
        args=args,
        train_dataset=read_dataset(script.dataset, script.dataset_split),
        eval_dataset=read_dataset(script.eval_dataset, script.eval_split) if script.eval_dataset else None,
        processing_class=tokenizer,
        peft_config=peft_config,
    )
    result = trainer.train(resume_from_checkpoint=checkpoint_to_resume(args.resume_from_checkpoint))
    trainer.save_model()
    trainer.log_metrics("train", result.metrics)
    trainer.save_metrics("train", result.metrics)
    if script.eval_dataset:
        metrics = trainer.evaluate()
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)


if __name__ == "__main__":
    main()
