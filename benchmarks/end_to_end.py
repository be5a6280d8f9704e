"""Tokens per second of MegaPackTrainer and of TRL's SFTTrainer on one GPU, one after the other in the same run.

Once, where the conversations and a tokenizer are (benchmarks/packing.py says what FOLDER holds), then on the GPU:

    python benchmarks/end_to_end.py --prepare examples.npz --folder FOLDER
    python benchmarks/end_to_end.py --examples_file examples.npz --data tau
    python benchmarks/end_to_end.py --examples_file examples.npz --data mtbench --ours --ours torch_compile=True \
        --trl max_length=16384 --trl max_length=32768 gradient_checkpointing=True

Both sides train rank-16 adapters on all linear layers of one model shape, its weights random, with one example per
assistant turn. Ours takes so many examples per update, in file order. TRL packs the same examples into rows in its own
way (bfd) and accumulates the rows that hold about as many tokens; its rows are timed one by one, the optimizer's steps
among them. A rate is the median over updates, or over TRL's rows, after a warm-up. Each --ours and each --trl is one
run in a process of its own, with settings for MegaPackConfig or SFTConfig.
"""

import argparse
import contextlib
import dataclasses
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import stored_examples
import torch
import workload
from transformers import AutoModelForCausalLM, TrainerCallback, set_seed
from transformers.modeling_flash_attention_utils import FLASH_ATTENTION_COMPATIBILITY_MATRIX

from hf_megapack import MegaPackConfig, MegaPackTrainer

# The trainer tells what sharing saves in its third update, which takes the host a moment.
WARM_UP_UPDATES = 3
WARM_UP_ROWS = 3
FEWEST_ROWS = 8
TRL_DEFAULTS = {"max_length": 16384, "gradient_checkpointing": False}


@dataclasses.dataclass
class Result:
    """What one run gave; `fill` adds a lap, and the last printed line counts.

    Attributes:
        side: "ours" or "trl".
        settings: What the run was given.
        note: What the run chose by itself.
        laps: Seconds, logical tokens and executed tokens of each timed update or row.
        total_seconds: Of all laps, from one synchronisation with the GPU to another; 0 until the last lap.
        examples: Examples of one update.
        logical_per_update: Tokens of them, on average.
        loss: Of the first update, in nats per learned token.
        peak_gib: GPU memory of tensors at most while training, the model included.
        started: Seconds from the beginning to the first update or row.
    """

    side: str
    settings: dict
    note: str
    examples: int
    logical_per_update: float
    laps: list[tuple[float, float, float]] = dataclasses.field(default_factory=list)
    total_seconds: float = 0.0
    loss: float | None = None
    peak_gib: float = 0.0
    started: float = 0.0

    def report(self) -> None:
        """Print the result so far, for the parent process."""
        self.peak_gib = workload.peak_gib()
        workload.emit(dataclasses.asdict(self))

    def rate(self, column: int) -> float:
        """Return the median tokens per second of the laps; column 1 is logical tokens, 2 executed ones."""
        return statistics.median(lap[column] / lap[0] for lap in self.laps) if self.laps else float("nan")

    @property
    def mean_rate(self) -> float:
        """Logical tokens of all laps over their time between synchronisations."""
        return sum(lap[1] for lap in self.laps) / self.total_seconds if self.total_seconds else float("nan")


class Laps(TrainerCallback):
    """Times our updates from end to end, without waiting for the GPU in between."""

    def __init__(self, result: Result, began: float):
        self._result, self._began = result, began
        self._seconds = 0.0

    def on_step_begin(self, _args, state, *_rest, **_kwargs) -> None:
        """Note when training really begins."""
        if state.global_step == 0:
            self._result.started = time.perf_counter() - self._began

    def on_step_end(self, _args, state, *_rest, **_kwargs) -> None:
        """Take a lap, or start the clock after the warm-up."""
        if state.global_step in (WARM_UP_UPDATES, state.max_steps):
            workload.synchronize()
        now = time.perf_counter()
        if state.global_step == WARM_UP_UPDATES:
            self._first = now
        elif state.global_step > WARM_UP_UPDATES:
            self._seconds = now - self._last
        if state.global_step == state.max_steps:
            self._result.total_seconds = now - self._first
        self._last = now

    def on_log(self, _args, state, _control, logs: dict[str, float], **_kwargs) -> None:
        """Take the update's counts, which come after its end."""
        if "loss" not in logs:
            return
        line = {k: logs[k] for k in ("loss", "executed_tokens", "packing_seconds", "waiting_seconds")}
        print(f"ours, update {state.global_step}: {self._seconds:.3f} s, {line}", flush=True)
        if self._result.loss is None:
            self._result.loss = logs["loss"]
        if state.global_step > WARM_UP_UPDATES:
            self._result.laps.append((self._seconds, logs["logical_tokens"], logs["executed_tokens"]))
            self._result.report()


def run_ours(examples: Sequence[stored_examples.Example], options: argparse.Namespace, settings: dict) -> None:
    """Train with MegaPackTrainer and print the result after each update.

    Args:
        examples: Of all updates, the warm-up's first.
        options: The command line.
        settings: For MegaPackConfig.
    """
    began, per_update = time.perf_counter(), options.examples
    timed = examples[WARM_UP_UPDATES * per_update :]
    mean = stored_examples.num_tokens(timed) * per_update / len(timed)
    result = Result("ours", settings, "", per_update, mean)
    with tempfile.TemporaryDirectory() as folder:
        arguments = {
            **workload.common_arguments(folder),
            "per_device_train_batch_size": per_update,
            "train_sampling_strategy": "sequential",
            "num_train_epochs": 1,
            "logging_steps": 1,
            "packed_sequence_length": 32768,
            **settings,
        }
        trainer = MegaPackTrainer(
            model=workload.model_config(options.shape, options.layers),
            args=MegaPackConfig(**arguments),
            train_dataset=stored_examples.as_dataset(examples),
            processing_class=workload.no_tokenizer(),
            peft_config=workload.lora_config(),
            callbacks=[Laps(result, began)],
        )
        print(f"ours: built after {time.perf_counter() - began:.1f} s, {workload.peak_gib():.1f} GiB", flush=True)
        workload.reset_peak()
        trainer.train()
    result.report()


class _EnoughRowsError(Exception):
    """Ends TRL's training when the rows that were asked for are timed."""


def choose_attention(asked: str) -> str:
    """Return the attention that TRL's model uses.

    Args:
        asked: A name that transformers knows, or "auto": the newest FlashAttention there is, and "sdpa" without a GPU.

    Raises:
        SystemExit: If there is a GPU but no FlashAttention, which packing needs to be fast.
    """
    if asked != "auto":
        return asked
    if not torch.cuda.is_available():
        return "sdpa"
    for number in sorted(FLASH_ATTENTION_COMPATIBILITY_MATRIX, reverse=True):
        if FLASH_ATTENTION_COMPATIBILITY_MATRIX[number]["general_availability_check"]():
            return f"flash_attention_{number}"
    raise SystemExit(
        "No FlashAttention 2, 3 or 4 that transformers recognises: install flash-attn-4, or name another attention, "
        "for example --trl attn_implementation=flex_attention."
    )


def timed_trainer(result: Result, num_rows: int, accumulation: int, began: float) -> type:
    """Return an SFTTrainer that times its rows and stops after `num_rows` of them."""
    from trl import SFTTrainer

    class TimedSFTTrainer(SFTTrainer):
        row, losses = 0, ()

        def training_step(self, model, inputs, *args, **kwargs):
            if self.row in (0, WARM_UP_ROWS, WARM_UP_ROWS + num_rows):
                workload.synchronize()
            now, tokens = time.perf_counter(), inputs["input_ids"].numel()
            if self.row == 0:
                result.started = now - began
            elif self.row <= WARM_UP_ROWS:
                print(f"trl, warm-up row: {self.tokens} tokens, {now - self.last:.3f} s", flush=True)
            else:
                result.laps.append((now - self.last, self.tokens, self.tokens))
            if self.row == WARM_UP_ROWS:
                self.first = now
            elif self.row == WARM_UP_ROWS + num_rows:
                result.total_seconds = now - self.first
                raise _EnoughRowsError
            if self.row == accumulation:
                result.loss = float(torch.stack(self.losses).sum())
            if result.laps and len(result.laps) % 4 == 0:
                result.report()
            self.row, self.last, self.tokens = self.row + 1, now, tokens
            loss = super().training_step(model, inputs, *args, **kwargs)
            self.losses = (*self.losses, loss.detach())
            return loss

    return TimedSFTTrainer


def build_trl_model(options: argparse.Namespace, attention: str) -> torch.nn.Module:
    """Return transformers' model with random weights, made where it is trained."""
    set_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        return AutoModelForCausalLM.from_config(
            workload.model_config(options.shape, options.layers),
            dtype=torch.bfloat16 if torch.cuda.is_available() else torch.float32,
            attn_implementation=attention,
        )


def run_trl(examples: Sequence[stored_examples.Example], options: argparse.Namespace, settings: dict) -> None:
    """Train with SFTTrainer and print the result now and then.

    Args:
        examples: As `run_ours` gets; the warm-up's are left out.
        options: The command line.
        settings: For SFTConfig, and attn_implementation.

    Raises:
        SystemExit: If an example is longer than a row, which TRL would cut.
    """
    from trl import SFTConfig

    began, settings = time.perf_counter(), {**TRL_DEFAULTS, **settings}
    examples = examples[WARM_UP_UPDATES * options.examples :]
    max_length, longest = settings["max_length"], max(example.input_ids.size for example in examples)
    if longest > max_length:
        raise SystemExit(f"The longest example has {longest} tokens; --trl max_length={max_length} would cut it.")
    attention = choose_attention(settings.pop("attn_implementation", "auto"))
    settings.setdefault("use_liger_kernel", torch.cuda.is_available())
    mean = stored_examples.num_tokens(examples) * options.examples / len(examples)
    accumulation = max(1, round(mean / max_length))
    num_rows = max(options.trl_updates * accumulation, FEWEST_ROWS) if options.trl_rows is None else options.trl_rows
    note = f"{attention}, liger {settings['use_liger_kernel']}, {accumulation} rows per update"
    result = Result("trl", settings, note, options.examples, mean)
    print(f"trl: {note}, {num_rows} rows timed", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        trainer = timed_trainer(result, num_rows, accumulation, began)(
            model=build_trl_model(options, attention),
            args=SFTConfig(
                **workload.common_arguments(folder),
                packing=True,
                packing_strategy="bfd",
                per_device_train_batch_size=1,
                gradient_accumulation_steps=accumulation,
                num_train_epochs=1000,
                logging_steps=1,
                **settings,
            ),
            train_dataset=stored_examples.as_dataset(examples),
            processing_class=workload.no_tokenizer(),
            peft_config=workload.lora_config(),
        )
        rows = trainer.train_dataset
        filled = sum(map(len, rows["input_ids"])) / len(rows)
        print(
            f"trl: built after {time.perf_counter() - began:.1f} s; {len(rows)} rows of {filled:.0f} tokens", flush=True
        )
        if sum(map(len, rows["input_ids"])) != stored_examples.num_tokens(examples):
            raise SystemExit("TRL's packing lost tokens.")
        workload.reset_peak()
        with contextlib.suppress(_EnoughRowsError):
            trainer.train()
    result.report()


def run_side(side: str, pairs: Sequence[str], options: argparse.Namespace) -> Result | None:
    """Run one side in a process of its own; return its last result, None if it gave none.

    Args:
        side: "ours" or "trl".
        pairs: Its settings, key=value.
        options: The command line.
    """
    command = [__file__, "--side", side, "--settings", *pairs, "--data", options.data]
    for name in ("examples_file", "examples", "updates", "trl_updates", "trl_rows", "shape", "layers"):
        if getattr(options, name) is not None:
            command += [f"--{name}", getattr(options, name)]
    print(f"\n== {side} {' '.join(pairs)}", flush=True)
    found = workload.run_process(command, options.limit_s)
    return Result(**found[-1]) if found else None


def print_table(results: Sequence[Result], options: argparse.Namespace) -> None:
    """Print the results, with each of ours over the fastest of TRL's."""
    theirs = max((r.rate(1) for r in results if r.side == "trl" and r.laps), default=float("nan"))
    print(
        f"\n{options.data}, {options.examples} examples per update, {options.shape}, {options.layers or 'all'} layers"
    )
    print(
        "| side | settings | logical tok/s (mean) | slowest to fastest lap | executed tok/s | s/update | laps "
        "| peak GiB | first loss | start s | over TRL |\n|" + "---|" * 11
    )
    for result in results:
        if not result.laps:
            print(f"| {result.side} | {result.settings} | no lap was finished |" + " |" * 8)
            continue
        rates = [lap[1] / lap[0] for lap in result.laps]
        settings = " ".join(f"{key}={value}" for key, value in result.settings.items()) or "defaults"
        cells = (
            result.side,
            f"{settings} ({result.note})" if result.note else settings,
            f"{result.rate(1):,.0f} ({result.mean_rate:,.0f})",
            f"{min(rates):,.0f} to {max(rates):,.0f}",
            f"{result.rate(2):,.0f}",
            f"{result.logical_per_update / result.rate(1):.3f}",
            len(result.laps),
            f"{result.peak_gib:.1f}",
            "" if result.loss is None else f"{result.loss:.4f}",
            f"{result.started:.0f}",
            f"{result.rate(1) / theirs:.2f}",
        )
        print("| " + " | ".join(map(str, cells)) + " |")


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--prepare", type=Path, help="write the examples into this file and end")
    parser.add_argument("--folder", type=Path, default=Path("~/.cache/hf_megapack-data").expanduser())
    parser.add_argument("--examples_file", type=Path, help="what --prepare wrote")
    parser.add_argument("--data", choices=list(stored_examples.FILES), default="tau")
    parser.add_argument("--examples", type=int, default=64, help="examples per update")
    parser.add_argument("--updates", type=int, default=7, help=f"timed updates of ours, after {WARM_UP_UPDATES}")
    parser.add_argument("--trl_updates", type=int, default=1, help="updates' worth of rows that are timed of TRL")
    parser.add_argument("--trl_rows", type=int, help="so many rows instead")
    parser.add_argument("--ours", nargs="*", action="append", metavar="KEY=VALUE", help="one run of ours")
    parser.add_argument("--trl", nargs="*", action="append", metavar="KEY=VALUE", help="one run of TRL")
    parser.add_argument("--sides", nargs="+", choices=["ours", "trl"], default=["ours", "trl"])
    parser.add_argument("--limit_s", type=int, default=240, help="seconds for each run")
    parser.add_argument("--json", type=Path, help="write the results into this file too")
    parser.add_argument("--side", choices=["ours", "trl"], help=argparse.SUPPRESS)
    parser.add_argument("--settings", nargs="*", default=[], help=argparse.SUPPRESS)
    workload.add_shape_arguments(parser)
    options = parser.parse_args()
    if options.prepare is None and options.examples_file is None:
        parser.error("give --prepare or --examples_file")
    return options


def main() -> None:
    """Prepare, or run one side, or run all of them and print the table.

    Raises:
        SystemExit: If there are too few examples, or a run gave no result.
    """
    options = parse_arguments()
    if options.prepare is not None:
        return stored_examples.prepare(options.prepare, options.folder)
    examples = stored_examples.load_examples(options.examples_file, options.data)
    needed = (WARM_UP_UPDATES + options.updates) * options.examples
    if len(examples) < needed:
        raise SystemExit(f"{needed} examples are needed, {options.data} has {len(examples)}: lower --updates.")
    if options.side is not None:
        run = {"ours": run_ours, "trl": run_trl}[options.side]
        return run(examples[:needed], options, workload.parse_settings(options.settings))
    print(workload.describe_machine(), flush=True)
    runs = [(side, pairs) for side in options.sides for pairs in getattr(options, side) or [[]]]
    results = [run_side(side, pairs, options) for side, pairs in runs]
    found = [result for result in results if result is not None]
    if options.json is not None:
        options.json.write_text(json.dumps([dataclasses.asdict(result) for result in found]))
    print_table(found, options)
    if len(found) < len(runs):
        raise SystemExit(f"{len(runs) - len(found)} of {len(runs)} runs gave no result.")
    return None


if __name__ == "__main__":
    main()
