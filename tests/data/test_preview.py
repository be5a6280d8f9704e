"""The preview shows what the tokens say, all of it, and marks exactly what is learned."""

import html
import re

import pytest

from hf_megapack import preview
from hf_megapack.errors import DataError
from tests.helpers.assets import load_conversations, load_tokenizer

GREEN = re.compile(r"\x1b\[30;42m(.*?)\x1b\[0m", re.DOTALL)
CHAT = [
    {"role": "user", "content": "Say <b>hi</b> & bye"},
    {"role": "assistant", "content": "<b>hi</b> & bye\nbye"},
    {"role": "user", "content": "And?"},
    {"role": "assistant", "content": "No."},
]


@pytest.fixture
def tokenizer():
    return load_tokenizer("llama3_training")


def test_terminal_and_notebook_mark_the_same_text_and_lose_none(tokenizer, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    shown = preview({"messages": CHAT}, tokenizer)
    rendered = tokenizer.apply_chat_template(CHAT, tokenize=False)
    learned = ["<b>hi</b> & bye\nbye<|eot_id|>", "No.<|eot_id|>"]
    coloured = "".join(GREEN.findall(str(shown)))
    assert coloured.replace("\u21b5", "\n") == "".join(learned)
    assert GREEN.sub(r"\1", str(shown)).split("---\n", 1)[1].replace("\u21b5", "") == rendered + "\n"
    page = shown._repr_html_()
    marked = [html.unescape(text).replace("\u21b5", "") for text in re.findall(r"<mark[^>]*>(.*?)</mark>", page, re.S)]
    assert marked == learned
    body = re.search(r"<pre[^>]*>(.*)</pre>", page, re.DOTALL)[1]
    assert html.unescape(re.sub(r"</?mark[^>]*>", "", body)).replace("\u21b5", "") == rendered
    assert "<b>hi" not in body
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in str(shown)
    assert "[[No.<|eot_id|>]]" in str(shown)


def test_headline_counts_tokens_and_names_the_turn(tokenizer):
    shown = preview({"messages": CHAT}, tokenizer, assistant_mask="each", row_index=7)
    assert [example.title for example in shown.examples] == ["row 7, turn 1", "row 7, turn 3"]
    ids = tokenizer.apply_chat_template(CHAT)["input_ids"]
    assert shown.examples[1].headline.startswith(f"row 7, turn 3: {len(ids)} tokens, 3 learned")


def test_what_looks_wrong_is_said(tokenizer):
    row = {"messages": [{"role": "user", "content": "long " * 3000}, {"role": "assistant", "content": "Yes."}]}
    [long] = preview(row, tokenizer).examples
    assert ["only" in warning for warning in long.warnings] == [True]
    assert sum(len(run.text) for run in long.runs) < 2000
    assert "[... 13," in long.runs[0].text
    assert "[..." not in str(preview(row, tokenizer, max_characters=None))
    [cut] = preview(row, tokenizer, max_length=50, overlong="truncate_left").examples
    assert cut.warnings[0] == "too long: this example was cut"
    [gone] = preview(row, tokenizer, max_length=50, overlong="drop").examples
    assert (gone.warnings, gone.num_tokens) == (("too long: this example is left out",), 0)
    bare = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    bare += "{% if add_generation_prompt %}assistant: {% endif %}"
    [unending] = preview({"messages": CHAT}, tokenizer, chat_template=bare).examples
    assert "2 of 2 learned passages hold no control token" in unending.warnings[0]
    assert preview({"messages": CHAT}, tokenizer).examples[0].warnings == ()


def test_ready_tokens_and_hostile_text_can_be_shown(tokenizer):
    text = "red \x1b[31m\u202eback"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    shown = str(preview({"input_ids": ids, "labels": [-100] * (len(ids) - 1) + ids[-1:]}, tokenizer))
    assert "\\x1b[31m\\x202eback" in re.sub(r"\x1b\[(30;42|0)m", "", shown)
    assert "\u202e" not in shown


def test_rows_that_cannot_be_learned_raise_as_in_training():
    rows = load_conversations("mtbench")
    with pytest.raises(DataError, match=r'row 0, turn 1: .*use assistant_mask="each"'):
        preview(rows[0], load_tokenizer("qwen3"))


@pytest.mark.parametrize("rows", [[{"messages": CHAT}], "text"])
def test_what_is_no_row_is_refused(tokenizer, rows):
    with pytest.raises(
        DataError, match=rf"one row, a dict; got {type(rows).__name__}\. Pass one, such as dataset\[0\]"
    ):
        preview(rows, tokenizer)
