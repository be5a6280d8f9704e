"""What a script is told: words of its command line, and a YAML file below them."""

import json
from dataclasses import dataclass, field

import pytest
from transformers import TrainingArguments

from hf_megapack import values
from hf_megapack.arguments import DROPPED_ARGUMENTS
from hf_megapack.command_line import parse_options
from hf_megapack.config import MegaPackConfig


@dataclass
class Script:
    """Options of a script, in front of MegaPackConfig's."""

    model: str
    label: str | None = "plain"
    options: str = "{}"
    modules: list[str] = field(default_factory=lambda: ["all-linear"])


@pytest.fixture
def parse(tmp_path):
    """Parse words, and a YAML file if its text is given, with what every run needs."""

    def parse(*words: str, yaml: str | None = None):
        file = tmp_path / "run.yaml"
        if yaml is not None:
            file.write_text(yaml)
            words = ("--config", str(file), *words)
        return parse_options((Script, MegaPackConfig), [*words, "--output_dir", str(tmp_path), "--use_cpu", "true"])

    return parse


YAML = """
model: folder
modules: [q_proj, v_proj]
max_length: null
bf16:
share-supervised: true
lr_scheduler_type: cosine_with_min_lr
lr_scheduler_kwargs: {min_lr: 0.0}
learning_rate: 1e-3
seed: 7
eval_delay: -1
"""


def test_values_of_the_file_mean_what_they_mean_in_python(parse):
    script, args = parse(yaml=YAML)
    assert (script.model, script.modules) == ("folder", ["q_proj", "v_proj"])
    assert args.lr_scheduler_kwargs == {"min_lr": 0.0}
    # None of bf16 is False on a CPU.
    assert (args.max_length, args.bf16, args.share_supervised) == (None, False, True)
    assert (args.learning_rate, args.seed, args.eval_delay) == (1e-3, 7, -1)


def test_numbers_and_words_of_the_file_are_those_of_yaml_1_2(parse):
    """The yaml package alone reads 1.1: there 1e-5 is text, which fails late, inside the schedule, and no is False."""
    text = "save_strategy: no\noptions: {a: 1e-5, b: -2.5E+3, c: .5, d: 1., e: 7, f: true, g: 1.0.0, h: e5}\n"
    script, args = parse("--model", "folder", yaml=text)
    assert args.save_strategy == "no"
    options = json.loads(script.options)
    expected = {"a": 1e-5, "b": -2500.0, "c": 0.5, "d": 1.0, "e": 7, "f": True, "g": "1.0.0", "h": "e5"}
    assert options == expected
    assert [type(value) for value in options.values()] == [type(value) for value in expected.values()]


@pytest.mark.parametrize(("word", "value"), [("yes", True), ("no", False), ("False", False), ("true", True)])
def test_flags_of_the_file_may_be_words(parse, word, value):
    assert parse("--model", "folder", yaml=f"share_supervised: {word}\n")[1].share_supervised is value


def test_words_win_over_the_file_also_over_its_nulls_and_lists(parse):
    words = ("--max_length", "99", "--seed=8", "--modules", "o_proj", "--lr_scheduler_kwargs", '{"min_lr": 0.5}')
    script, args = parse(*words, yaml=YAML)
    assert (args.max_length, args.seed, script.modules, script.model) == (99, 8, ["o_proj"], "folder")
    assert args.lr_scheduler_kwargs == {"min_lr": 0.5}


@pytest.mark.parametrize("text", ["[]", "[none]", "none"])
def test_a_list_of_the_file_may_be_empty_where_a_word_does_too(parse, text):
    assert parse("--model", "folder", yaml=f"report_to: {text}\n")[1].report_to == []


def test_a_list_of_the_file_may_have_several_where_the_command_line_takes_one_word(parse, monkeypatch):
    monkeypatch.setattr(values, "get_available_reporting_integrations", lambda: ["trackio", "wandb"])
    text = "report_to: [trackio, wandb]\n"
    assert parse("--model", "folder", yaml=text)[1].report_to == ["trackio", "wandb"]
    assert parse("--model", "folder", "--report_to", "wandb", yaml=text)[1].report_to == ["wandb"]


@pytest.mark.parametrize("name", DROPPED_ARGUMENTS)
def test_a_name_that_transformers_has_dropped_ends_with_what_to_use(parse, name):
    if name in TrainingArguments.__dataclass_fields__:
        # Honoured as long as transformers has it.
        assert MegaPackConfig(output_dir="x", use_cpu=True, **{name: None}).use_cpu
        return
    with pytest.raises(
        SystemExit,
        match=f"^error: {name} is not in this release of transformers: (use [a-z]+_|set [A-Z]+_|leave it out)",
    ):
        parse("--model", "folder", yaml=f"{name}: 0.1\n")
    with pytest.raises(SystemExit, match=f"^error: {name} is not in this release"):
        parse("--model", "folder", f"--{name}", "0.1")


def test_null_of_the_file_is_none_where_the_default_is_another(parse):
    assert parse("--model", "folder", yaml="label:\n")[0].label is None
    assert parse("--model", "folder", yaml="seed: 1\n")[0].label == "plain"


def test_the_file_is_found_in_both_spellings_and_may_say_nothing(parse, tmp_path):
    (tmp_path / "one.yaml").write_text("# nothing\n")
    (tmp_path / "two.yaml").write_text("model: folder\n")
    assert parse("--model", "other", "--config", str(tmp_path / "one.yaml"))[0].model == "other"
    assert parse(f"--config={tmp_path / 'two.yaml'}")[0].model == "folder"


def test_config_without_a_file_is_an_error(tmp_path, capsys):
    for words in (["--model", "m", "--config"], ["--config", "--model", "m"]):
        with pytest.raises(SystemExit):
            parse_options((Script, MegaPackConfig), words)
        assert "argument --config: expected one argument" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("learning_rate: null", r"learning_rate is null in .*run.yaml, but may not be None; give it a value"),
        ("learning_rat:", r"unknown option learning_rat in .*run.yaml"),
        ("learning_rat: 1.0", r"unknown options or values --learning_rat=1.0; --help lists"),
        ("modules: [q_proj, null]", "modules holds null in a list"),
        ("report_to: [null]", "report_to holds null in a list"),
        ("seed: [1, 2]", "unknown options or values 2"),
        ("packing: true", "packing is a TRL argument .*choose with packing_strategy"),
        ("packing:", "packing is a TRL argument"),
        ("- a\n- b", "run.yaml holds a list; write one `option: value` a line"),
        ("a: [", "run.yaml cannot be read as YAML"),
        ("max_length: 1", "max_length=1 is not allowed; it must be a whole number of at least 2"),
    ],
)
def test_a_wrong_file_ends_with_the_reason(parse, text, message):
    with pytest.raises(SystemExit, match=f"^error: .*{message}"):
        parse("--model", "folder", yaml=text)


def test_a_missing_file_ends_with_its_name(parse):
    with pytest.raises(SystemExit, match=r"--config /nowhere/run.yaml cannot be read .*No such file"):
        parse("--config", "/nowhere/run.yaml")


@pytest.mark.parametrize("words", [("--packing", "true"), ("--packing=true",), ("--assistant-only-loss",)])
def test_a_name_that_only_trl_has_ends_with_ours(parse, words):
    with pytest.raises(SystemExit, match=r"is a TRL argument .*use assistant_mask='all'|choose with packing_strategy"):
        parse("--model", "folder", *words)


def test_help_names_the_file_too(parse, capsys):
    with pytest.raises(SystemExit):
        parse("--help")
    assert "--config FILE" in capsys.readouterr().out
