"""Inspection shows what the trainer would pack: tables against reports made by hand, the picture by its artists."""

import dataclasses
import json
import re
import struct
import subprocess
import sys

import datasets
import matplotlib
import numpy as np
import pytest

from hf_megapack.data.collator import PrefixTreeCollator
from hf_megapack.data.prepare import prepare_dataset
from hf_megapack.data.sampler import UpdateSampler
from hf_megapack.data.sources import read_dataset
from hf_megapack.errors import ConfigError, DataError
from hf_megapack.inspect import CostlyExample, example_table, main
from hf_megapack.packing import Alignment, PackingReport, RankLayout, schedule_rows, slots_cost
from tests.helpers.assets import ASSETS, load_conversations
from tests.helpers.brute_force_tree import as_examples, fixture_examples

matplotlib.use("Agg")
BFCL = str(ASSETS / "conversations" / "bfcl.jsonl")
TOKENIZER = str(ASSETS / "tokenizer")
TEMPLATE = ("--chat_template", str(ASSETS / "templates" / "qwen2_5_training.jinja"))
CAPACITY = 32_768


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    """Converted files go where the test's other files are."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")


@pytest.fixture
def inspected(capsys):
    """Run the command line and return what it prints."""

    def run(*words: str, data: str = BFCL) -> str:
        main([data, "--tokenizer", TOKENIZER, *TEMPLATE, "--packed_sequence_length", str(CAPACITY), *words])
        return capsys.readouterr().out

    return run


def table_lines(text: str, first_word: str) -> list[list[str]]:
    """Return the words of the lines that follow a heading, up to the next line that does not begin with a number."""
    lines = text.splitlines()
    at = next(index for index, line in enumerate(lines) if line.split()[:1] == [first_word])
    found = []
    for line in lines[at + 1 :]:
        if not re.match(r"\s*(\d+|all) ", line):
            break
        found.append(line.split())
    return found


def words_of(name: str, report: PackingReport, capacity: int = CAPACITY) -> list[str]:
    """Return a report as a line of the table, except the time, which is never the same."""
    return [
        name,
        str(report.num_examples),
        str(report.num_rows),
        f"{100 * report.fill(capacity):.1f}%",
        f"{report.num_logical_tokens:,}",
        f"{report.num_executed_tokens:,}",
        f"{report.num_logical_tokens / report.num_executed_tokens:.2f}",
        f"{report.num_padding_slots:,}",
        str(report.num_dummies),
        f"{100 * report.imbalance:.1f}%",
        f"{report.num_loss_tokens:,}",
    ]


def expected_table(dataset, updates, **packing) -> list[list[str]]:
    collator = PrefixTreeCollator(packed_sequence_length=CAPACITY, **packing)
    reports = [PackingReport.from_batch(collator([dataset[index] for index in indices])) for indices in updates]
    named = [(str(index), report) for index, report in enumerate(reports)]
    return [words_of(name, report) for name, report in [*named, ("all", sum(reports, PackingReport()))]]


def test_the_table_is_that_of_the_reports_in_file_order(inspected, tiny_tokenizer):
    """Only the first rows are rendered then; the numbers are those of the whole set's first updates."""
    dataset = prepare_dataset(load_conversations("bfcl"), tiny_tokenizer, assistant_mask="each")
    updates = list(UpdateSampler(num_examples=len(dataset), examples_per_update=4, seed=0, shuffle=False))
    assert len(updates) > 2
    shown = table_lines(inspected("--assistant_mask", "each", "--examples_per_update", "4", "--updates", "2"), "update")
    assert [line[:-1] for line in shown] == expected_table(dataset, updates[:2])
    assert all(float(line[-1]) > 0 for line in shown)


def test_the_shuffled_order_is_the_trainers(inspected, tiny_tokenizer):
    dataset = prepare_dataset(load_conversations("bfcl"), tiny_tokenizer, assistant_mask="each")
    sampler = UpdateSampler(
        num_examples=len(dataset), examples_per_update=7, seed=3, conversation_ids=dataset["conversation_id"][:]
    )
    updates = list(sampler)
    assert updates[0] != list(range(7))
    text = inspected(
        *("--assistant_mask", "each", "--examples_per_update", "7", "--updates", "99", "--shuffle", "--seed", "3"),
        *("--data_parallel_size", "2", "--share_supervised", "--packed_length_multiple", "256"),
    )
    options = {"data_parallel_size": 2, "share_supervised": True, "alignment": Alignment(packed_multiple=256)}
    shown = [line[:-1] for line in table_lines(text, "update")]
    assert shown == expected_table(dataset, updates, **options)
    assert len(shown) == len(updates) + 1
    assert "with seed 3" in text


def test_flat_strategies_and_last_turns_reach_the_packing(inspected, tiny_tokenizer):
    dataset = prepare_dataset(load_conversations("bfcl"), tiny_tokenizer, assistant_mask="last")
    words = ("--assistant_mask", "last", "--packing_strategy", "ffd", "--examples_per_update", "10", "--updates", "1")
    shown = [line[:-1] for line in table_lines(inspected(*words), "update")]
    assert shown == expected_table(dataset, [range(10)], packing_strategy="ffd")


def test_the_most_expensive_examples_are_found_with_their_row_and_turn(inspected, tiny_tokenizer):
    """Flat, each example shares nothing: the longest cost most, and all of their tokens are their own."""
    dataset = prepare_dataset(load_conversations("bfcl"), tiny_tokenizer, assistant_mask="each")
    size = len(dataset)
    text = inspected(
        *("--assistant_mask", "each", "--packing_strategy", "ffd", "--updates", "1", "--examples_per_update", str(size))
    )
    lengths = [len(dataset[index]["input_ids"]) for index in range(size)]
    costs = [slots_cost(length, length * (length + 1) // 2) for length in lengths]
    longest = sorted(range(size), key=lambda index: -costs[index])[:10]
    shown = table_lines(text, "data")
    assert len(shown) == 10
    for line, index in zip(shown, longest, strict=True):
        length = lengths[index]
        # Equal lengths may be listed in either order, so the row is looked up by what it says.
        assert line[3:] == [
            f"{length:,}",
            f"{length:,}",
            f"{length * (length + 1) // 2:,}",
            f"{100 * costs[index] / sum(costs):.1f}%",
        ]
        named = [
            i
            for i in range(size)
            if (dataset[i]["conversation_id"], dataset[i]["turn"]) == (int(line[0]), int(line[1]))
        ]
        assert [lengths[i] for i in named] == [length]


def test_show_prints_the_first_examples_with_what_is_learned(inspected, tiny_tokenizer):
    dataset = prepare_dataset(load_conversations("bfcl"), tiny_tokenizer, assistant_mask="each")
    text = inspected("--assistant_mask", "each", "--show", "2").split("assistant_mask each")[0]
    assert text.count("learned (") == 2
    for example in (dataset[0], dataset[1]):
        learned = tiny_tokenizer.decode(example["input_ids"][example["loss_mask"] == 1])
        assert f"[[{learned}]]" in text.replace("\u21b5", "")
    assert "learned (" not in inspected("--assistant_mask", "each")


def test_the_list_is_ordered_by_cost_and_says_when_there_is_no_turn():
    cheap = CostlyExample(update=0, data_row=5, turn=-1, num_tokens=900, num_own_slots=0, num_own_pairs=0)
    costly = CostlyExample(update=1, data_row=7, turn=3, num_tokens=100, num_own_slots=100, num_own_pairs=5050)
    lines = table_lines(example_table([cheap, costly]), "data")
    assert lines == [["7", "3", "1", "100", "100", "5,050", "100.0%"], ["5", "-", "0", "900", "0", "0", "0.0%"]]
    assert len(table_lines(example_table([cheap, costly], 1), "data")) == 1
    assert table_lines(example_table([cheap]), "data")[0][-1] == "-"


def test_the_picture_is_written_1600_dots_wide(inspected, tmp_path):
    path = tmp_path / "rows.png"
    text = inspected("--assistant_mask", "each", "--updates", "1", "--picture", str(path))
    header = path.read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">I", header[16:20]) == (1600,)
    assert text.endswith(f"Picture: {path}\n")


def boxes(figure, gid: str) -> np.ndarray:
    """Return left, right, top and bottom of all boxes of a kind. Shape (num_boxes, 4)."""
    paths = [path for part in figure.axes[0].collections if part.get_gid() == gid for path in part.get_paths()]
    return np.asarray([[*path.vertices[:2, 0], *path.vertices[1:3, 1]] for path in paths]).reshape(-1, 4)


def widths(figure, gid: str) -> int:
    return int(sum(right - left for left, right, _, _ in boxes(figure, gid)))


@pytest.mark.parametrize(
    ("strategy", "alignment"),
    [("prefix_tree", Alignment(packed_multiple=64)), ("ffd", Alignment(sequence_multiple=32))],
)
def test_the_picture_shows_every_segment_padding_and_learned_slot(strategy, alignment):
    collator = PrefixTreeCollator(packed_sequence_length=384, packing_strategy=strategy, alignment=alignment)
    batches = [collator(as_examples(fixture_examples(mask))) for mask in ("all", "last")]
    report = sum((PackingReport.from_batch(batch, keep_rows=True) for batch in batches), PackingReport())
    figure = report.plot(packed_sequence_length=384)
    rows = [row for batch in batches for row in batch.rows]
    starts = [start for row in rows for start in row.segments.start.tolist()]
    assert len(boxes(figure, "segments")) == len(starts)
    assert sorted(boxes(figure, "segments")[:, 0]) == sorted(starts)
    assert widths(figure, "segments") + widths(figure, "padding") == report.num_executed_tokens
    assert widths(figure, "padding") == report.num_padding_slots > 0
    assert widths(figure, "learned") == sum(int((row.labels >= 0).sum()) for row in rows) > 0
    parents = sum(np.unique(row.segments.parent[row.segments.parent >= 0]).size for row in rows)
    assert len(boxes(figure, "reach")) == parents
    assert (parents > 0) == (strategy == "prefix_tree")
    assert len(boxes(figure, "dummies")) == 0
    texts = " ".join(text.get_text() for text in figure.texts)
    assert f"{report.sharing:.2f} tokens per slot" in texts
    assert f"fill {report.fill(384):.1%}" in texts


def test_a_child_hangs_below_its_parent_within_the_parents_reach():
    """217 and 241 tokens share 127: the root reaches over the 204 slots of both branches, one level down."""
    examples = as_examples(fixture_examples("all")[1:3])
    batch = PrefixTreeCollator(packed_sequence_length=384)(examples)
    figure = PackingReport.from_batch(batch, keep_rows=True).plot()
    root, *branches = boxes(figure, "segments").tolist()
    (reach,) = boxes(figure, "reach").tolist()
    assert root[:2] == [0, 127]
    assert reach == [127, 331, *root[2:]]
    assert sorted(right - left for left, right, _, _ in branches) == [90, 114]
    assert all(top == pytest.approx(root[3]) and bottom > top for _, _, top, bottom in branches)
    labels = [text.get_text() for text in figure.axes[0].texts]
    assert "127 x 2" in labels
    assert any(label.startswith("331 slots, 2 examples\n458 tokens") for label in labels)


def test_dummies_are_hatched_and_rows_beyond_the_limit_left_out():
    """Four rows on three ranks: two microbatches each, so two dummies."""
    collator = PrefixTreeCollator(packed_sequence_length=256, packing_strategy="ffd", data_parallel_size=3)
    report = PackingReport.from_batch(collator(as_examples(fixture_examples("all"))), keep_rows=True)
    assert (report.num_rows, report.num_dummies) == (4, 2)
    figure = report.plot(packed_sequence_length=256)
    assert len(boxes(figure, "dummies")) == report.num_dummies
    assert widths(figure, "dummies") == report.num_dummy_slots
    assert len(boxes(figure, "segments")) == 6
    assert [line.get_gid() for line in figure.axes[0].lines] == ["capacity"]
    short = report.plot(max_rows=2)
    assert len(boxes(short, "segments")) == 2
    assert "the first 2 of 6 rows" in short.axes[0].get_xlabel()


def test_labels_of_twelve_rows_neither_overlap_nor_leave_the_picture():
    collator = PrefixTreeCollator(packed_sequence_length=256, packing_strategy="ffd", data_parallel_size=2)
    batch = collator(as_examples(fixture_examples("all")))
    report = sum([PackingReport.from_batch(batch, keep_rows=True)] * 4, PackingReport())
    figure = report.plot(packed_sequence_length=256)
    figure.draw_without_rendering()
    axes = figure.axes[0]
    header = [*figure.texts, figure.legends[0]]
    artists = [*axes.texts, *axes.get_yticklabels(), *axes.get_xticklabels(), axes.xaxis.label, *header]
    extents = [artist.get_window_extent() for artist in artists]
    assert len(extents) > 12 * 3
    for index, one in enumerate(extents):
        assert one.x0 >= 0
        assert one.x1 <= figure.bbox.x1
        assert one.y0 >= 0
        assert one.y1 <= figure.bbox.y1
        assert not any(one.overlaps(other) for other in extents[:index])


def test_a_full_legend_stays_in_one_line_above_the_rows():
    """Nine nested prefixes on two ranks: five of the depths 0 to 8, reuse, learned slots, padding and a dummy."""
    examples = [([*range(100 * level), 5000 + level, 6000], [0] * (100 * level + 1) + [1]) for level in range(1, 10)]
    batch = PrefixTreeCollator(packed_sequence_length=2048, alignment=Alignment(packed_multiple=512))(
        as_examples(examples)
    )
    batch = dataclasses.replace(batch, schedule=schedule_rows([1.0], RankLayout(data_parallel_size=2)))
    figure = PackingReport.from_batch(batch, keep_rows=True).plot()
    (legend,) = figure.legends
    names = [text.get_text() for text in legend.get_texts()]
    assert names[:5] == [f"depth {depth}" for depth in (0, 2, 4, 6, 8)]
    assert names[5:] == ["prefix reused here", "loss-bearing", "padding", "dummy"]
    figure.draw_without_rendering()
    extent = legend.get_window_extent()
    assert extent.y0 >= figure.axes[0].get_window_extent().y1
    assert extent.x1 <= figure.bbox.x1


def test_a_report_without_rows_says_how_to_keep_them():
    batch = PrefixTreeCollator(packed_sequence_length=384)(as_examples(fixture_examples("all")))
    kept, bare = PackingReport.from_batch(batch, keep_rows=True), PackingReport.from_batch(batch)
    for report in (PackingReport(), bare, kept + bare):
        with pytest.raises(ConfigError, match="keep_rows=True"):
            report.plot()
    with pytest.raises(ConfigError, match="max_rows is 0"):
        kept.plot(max_rows=0)


def test_without_matplotlib_the_error_names_it_before_any_work(inspected, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit, match=r"pip install matplotlib.*hf_megapack\[inspect\]"):
        inspected("--picture", str(tmp_path / "rows.png"), data="missing.jsonl")
    batch = PrefixTreeCollator(packed_sequence_length=384)(as_examples(fixture_examples("all")))
    with pytest.raises(ConfigError, match="pip install matplotlib"):
        PackingReport.from_batch(batch, keep_rows=True).plot()
    assert "all" in inspected("--updates", "1")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--updates", "0"], "updates is 0"),
        (["--examples_per_update", "0"], "examples_per_update is 0"),
        (["--picture", "/nowhere/rows.png"], "no folder /nowhere"),
        (["--chat_template", "/nowhere/t.jinja"], "chat_template '/nowhere/t.jinja' cannot be read"),
        (["--packed_sequence_length", "100"], "row 0.*tokens are more than packed_sequence_length=100"),
        (["--packing_strategy", "ffd", "--share_supervised"], "share_supervised"),
    ],
)
def test_wrong_arguments_end_with_the_reason(inspected, words, message):
    with pytest.raises(SystemExit, match=message):
        inspected(*words)


@pytest.mark.parametrize("name", ["rows.nothing", "rows"])
def test_a_picture_of_no_known_kind_is_an_error_before_any_work(inspected, tmp_path, name):
    """Under a name without an ending matplotlib would write another file than the one that is reported."""
    with pytest.raises(SystemExit, match=r"cannot be written: its name must end in one of .*png"):
        inspected("--picture", str(tmp_path / name), data="missing.jsonl")
    assert not list(tmp_path.iterdir())


def test_a_tokenizer_without_template_or_none_at_all(tmp_path):
    for name, message in [(TOKENIZER, "no chat template"), (str(tmp_path), "tokenizer .* cannot be loaded")]:
        with pytest.raises(SystemExit, match=message):
            main([BFCL, "--tokenizer", name])


def test_the_module_runs_and_names_its_options():
    """Each option of the trainer appears with the help of its field."""
    words = [sys.executable, "-m", "hf_megapack.inspect", "--help"]
    done = subprocess.run(words, capture_output=True, text=True, check=True, cwd=ASSETS.parent.parent)
    assert "Shortest run of tokens worth sharing" in done.stdout
    assert "--picture" in done.stdout


def test_datasets_are_read_from_files_and_folders_alike(tmp_path):
    rows = [{"text": "one"}, {"text": "two"}]
    saved = datasets.Dataset.from_list(rows)
    saved.save_to_disk(tmp_path / "folder")
    datasets.DatasetDict({"train": saved, "test": saved.select([1])}).save_to_disk(tmp_path / "splits")
    saved.to_parquet(tmp_path / "rows.parquet")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name in ("folder", "splits", "rows.parquet", "rows.jsonl"):
        assert read_dataset(str(tmp_path / name)).to_list() == rows
    assert read_dataset(str(tmp_path / "splits"), "test").to_list() == rows[1:]
    with pytest.raises(DataError, match="no split 'dev'; it has train, test"):
        read_dataset(str(tmp_path / "splits"), "dev")


def test_what_cannot_be_read_is_an_error_that_says_why(tmp_path):
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "broken.jsonl").write_text('{"text": "one"}\n{"text": \n')
    (tmp_path / "rows.csv").write_text("text\none\n")
    (tmp_path / "folder").mkdir()
    for name, message in [
        ("missing.jsonl", "no file"),
        ("empty.jsonl", "is empty"),
        ("broken.jsonl", "cannot be read as a file: .*JSON"),
        ("rows.csv", "unknown kind; known are .json, .jsonl, .parquet"),
        ("folder", "cannot be read as a folder of a dataset"),
    ]:
        with pytest.raises(DataError, match=message):
            read_dataset(str(tmp_path / name))


def test_an_unknown_option_ends_with_its_name(inspected):
    with pytest.raises(SystemExit, match=r"^error: unknown options or values --asistant_mask each; --help lists"):
        inspected("--asistant_mask", "each")
