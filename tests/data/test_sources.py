"""Wherever rows come from and however they are handed over, the examples are the same."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from datasets import Dataset, IterableDataset, load_dataset, load_from_disk
from peft import LoraConfig

from hf_megapack.config import MegaPackConfig
from hf_megapack.data.chat import ChatTransform
from hf_megapack.data.prepare import prepare_dataset
from hf_megapack.data.sources import read_dataset
from hf_megapack.data.stream import ExampleStream
from hf_megapack.errors import DataError
from tests.helpers.assets import MODEL, load_conversations, load_template, load_tokenizer
from tests.helpers.fake_trainer import LORA, FakeTrainer

CARD = """---
configs:
- config_name: default
  data_files:
  - split: train
    path: "data/*.{suffix}"
---
"""


def with_json_text(row: dict) -> dict:
    """Return a row whose tools and arguments are JSON text, which no columnar store changes."""
    messages = []
    for message in row["messages"]:
        calls = [
            {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
            for call in message.get("tool_calls") or []
        ]
        messages.append({**message, **({"tool_calls": calls} if calls else {})})
    return {"id": row["id"], "messages": messages, "tools": json.dumps(row["tools"]), "score": 0.5}


ROWS = [with_json_text(row) for row in load_conversations("bfcl")]


def write_lines(path: Path) -> Path:
    """Write the rows as JSON lines."""
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(f"{json.dumps(row)}\n" for row in ROWS), encoding="utf-8")
    return path


def from_lines(folder, **options):
    return load_dataset("json", data_files=str(write_lines(folder / "rows.jsonl")), split="train", **options)


def from_parquet(folder, **options):
    Dataset.from_list(ROWS).to_parquet(str(folder / "rows.parquet"))
    return load_dataset("parquet", data_files=str(folder / "rows.parquet"), split="train", **options)


def from_two_parquets(folder, **options):
    for part, rows in enumerate((ROWS[:4], ROWS[4:])):
        Dataset.from_list(rows).to_parquet(str(folder / f"{part}.parquet"))
    return load_dataset("parquet", data_files=str(folder / "*.parquet"), split="train", **options)


def from_repository(folder, **options):
    """What the hub holds, as a folder: a card that names the files."""
    write_lines(folder / "data" / "train.jsonl")
    (folder / "README.md").write_text(CARD.format(suffix="jsonl"))
    return load_dataset(str(folder), split="train", **options)


def from_disk(folder, **options):
    Dataset.from_list(ROWS).save_to_disk(str(folder / "saved"))
    return load_from_disk(str(folder / "saved"))


def from_generator(folder, **options):
    return Dataset.from_generator(lambda: iter(ROWS), cache_dir=str(folder))


LOADED = [from_lines, from_parquet, from_two_parquets, from_repository]


@pytest.fixture
def quiet(monkeypatch, tmp_path):
    """No hub, and a cache of this test's own."""
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_DATASETS_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def contents(examples) -> list[tuple]:
    """Return each example's tokens, mask, row and turn."""
    return [
        (list(map(int, e["input_ids"])), list(map(int, e["loss_mask"])), int(e["conversation_id"]), int(e["turn"]))
        for e in examples
    ]


@pytest.fixture(scope="module")
def expected() -> list[tuple]:
    """The examples of the rows as a list of dicts, from one process."""
    examples = contents(prepare_dataset(ROWS, load_tokenizer(), assistant_mask="each"))
    assert len(examples) > 2 * len(ROWS)
    return examples


@pytest.mark.parametrize("num_proc", [None, 1, 2])
@pytest.mark.parametrize("source", [*LOADED, from_disk, from_generator])
def test_every_source_gives_the_same_examples(source, num_proc, expected, tmp_path, quiet):
    rows = source(tmp_path)
    assert isinstance(rows, Dataset)
    assert contents(prepare_dataset(rows, load_tokenizer(), assistant_mask="each", num_proc=num_proc)) == expected


@pytest.mark.parametrize("source", LOADED)
def test_every_source_gives_the_same_examples_as_a_stream(source, expected, tmp_path, quiet):
    rows = source(tmp_path, streaming=True)
    assert isinstance(rows, IterableDataset)
    stream = ExampleStream(rows, ChatTransform(load_tokenizer(), assistant_mask="each"))
    found = [
        {name: getattr(e, name) for name in ("input_ids", "loss_mask", "conversation_id", "turn")}
        for e in stream.examples(0, 3)
    ]
    assert contents(found) == expected


@pytest.mark.parametrize(
    "name", ["rows.jsonl", "rows.parquet", "saved", "repository"], ids=["lines", "parquet", "disk", "repository"]
)
def test_the_command_lines_reader_gives_the_same_examples(name, expected, tmp_path, quiet):
    (tmp_path / "repository").mkdir()
    for write in (from_lines, from_parquet, from_disk):
        write(tmp_path)
    from_repository(tmp_path / "repository")
    rows = read_dataset(str(tmp_path / name))
    assert contents(prepare_dataset(rows, load_tokenizer(), assistant_mask="each")) == expected


def test_arguments_as_dicts_are_the_same_from_files_as_from_memory(tmp_path, quiet):
    """One tool, whose arguments are a column of their own in every store."""
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"Book {n}"},
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [{"type": "function", "function": {"name": "book", "arguments": {"seat": n}}}],
                },
                {"role": "tool", "name": "book", "content": "done"},
                {"role": "assistant", "content": "Booked."},
            ]
        }
        for n in range(5)
    ]
    expected = contents(prepare_dataset(rows, load_tokenizer()))
    lines, parquet = tmp_path / "rows.jsonl", tmp_path / "rows.parquet"
    lines.write_text("\n".join(map(json.dumps, rows)))
    Dataset.from_list(rows).to_parquet(str(parquet))
    for stored in (
        Dataset.from_list(rows),
        load_dataset("json", data_files=str(lines), split="train"),
        load_dataset("parquet", data_files=str(parquet), split="train"),
    ):
        assert contents(prepare_dataset(stored, load_tokenizer())) == expected


@pytest.mark.parametrize("num_proc", [None, 2])
@pytest.mark.parametrize("kind", ["torch", "numpy", "arrow", "pandas", "columns", "transform", "copy"])
def test_formats_and_lazy_transforms_change_nothing(kind, num_proc, expected, tmp_path):
    rows = Dataset.from_list(ROWS)
    if kind == "columns":
        rows.set_format("torch", columns=["score"])
    elif kind == "copy":
        rows = rows.with_format("numpy", columns=["messages"], output_all_columns=True)
    elif kind == "transform":
        rows = Dataset.from_list([{"line": json.dumps(row)} for row in ROWS]).with_transform(
            lambda batch: {key: [json.loads(line)[key] for line in batch["line"]] for key in ("messages", "tools")}
        )
    else:
        rows = rows.with_format(kind)
    before = rows.format
    assert contents(prepare_dataset(rows, load_tokenizer(), assistant_mask="each", num_proc=num_proc)) == expected
    assert rows.format == before, "the user's dataset stays as it is"


def test_a_lazy_transform_that_gives_no_known_columns_is_refused_in_words():
    rows = Dataset.from_list([{"line": "a"}]).with_transform(lambda batch: {"words": batch["line"]})
    with pytest.raises(DataError, match=r"columns \['words'\] fit no known format"):
        prepare_dataset(rows, load_tokenizer())


def test_rows_that_were_selected_or_shuffled_come_as_they_are(expected):
    rows = Dataset.from_list(ROWS).shuffle(seed=1)
    order = [row["id"] for row in rows]
    assert order != [row["id"] for row in ROWS]
    found = contents(prepare_dataset(rows, load_tokenizer(), assistant_mask="each", num_proc=2))
    position = {row["id"]: index for index, row in enumerate(ROWS)}
    by_row = [[example for example in expected if example[2] == index] for index in range(len(ROWS))]
    assert [example[:2] for example in found] == [e[:2] for name in order for e in by_row[position[name]]]
    assert [example[2] for example in found] == sorted(example[2] for example in found)


@pytest.mark.parametrize("removes", [True, False])
@pytest.mark.parametrize("is_stream", [True, False])
def test_columns_that_nothing_reads_may_be_removed_or_not(removes, is_stream, tmp_path):
    """`remove_unused_columns` of either value trains on the same batches."""
    rows = [
        {"input_ids": [1, 2, n], "labels": [-100, -100, n], "score": n / 2, "note": {"by": "x"}} for n in range(3, 9)
    ]
    stored = Dataset.from_list(rows)
    trainer = FakeTrainer(
        MODEL,
        MegaPackConfig(
            str(tmp_path),
            use_cpu=True,
            remove_unused_columns=removes,
            max_steps=2,
            per_device_train_batch_size=3,
            train_sampling_strategy="sequential",
            dataloader_num_workers=0,
            disable_tqdm=True,
        ),
        train_dataset=stored.to_iterable_dataset() if is_stream else stored,
        processing_class=load_tokenizer(),
        peft_config=LoraConfig(**LORA),
    )
    trainer.train()
    learned = [batch.rows[0].labels[batch.rows[0].loss_weights > 0].tolist() for batch in trainer.backend.calls]
    assert learned == [[3, 4, 5], [6, 7, 8]]


PREPARE = """
import sys
from datasets import load_dataset
from hf_megapack.data.prepare import prepare_dataset
from tests.helpers.assets import load_tokenizer
rows = load_dataset("json", data_files=sys.argv[1], split="train")
tokenizer = load_tokenizer()
tokenizer.chat_template += sys.argv[2]
prepare_dataset(rows, tokenizer, num_proc=int(sys.argv[3]) or None)
"""


@pytest.mark.parametrize("num_proc", [0, 2])
def test_a_new_process_finds_the_cache_and_another_template_does_not(num_proc, tmp_path):
    """Counted in files: the same call in a second process writes none, one with an edited template does."""
    lines = write_lines(tmp_path / "rows.jsonl")

    def prepare(template_end: str, hash_seed: str) -> set[Path]:
        environment = {
            **os.environ,
            "HF_DATASETS_CACHE": str(tmp_path / "cache"),
            "HF_HUB_OFFLINE": "1",
            "PYTHONHASHSEED": hash_seed,
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        arguments = [sys.executable, "-c", PREPARE, str(lines), template_end, str(num_proc)]
        subprocess.run(arguments, check=True, env=environment, capture_output=True)
        return set((tmp_path / "cache").rglob("cache-*.arrow"))

    first = prepare("", "1")
    assert len(first) == max(num_proc, 1)
    assert prepare("", "2") == first
    assert len(prepare("{# edited #}", "2") - first) == len(first)
    assert load_template("qwen2_5_training") in load_tokenizer().chat_template
