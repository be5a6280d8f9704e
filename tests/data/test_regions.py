"""What a template wrote at each message is found by its loops, or not at all."""

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from hf_megapack.data.chat import ChatTransform
from hf_megapack.data.regions import EndlessTemplateError, MarkedTemplate
from hf_megapack.errors import DataError
from tests.helpers.assets import load_tokenizer

MESSAGES = [{"role": role, "content": f"text {role}"} for role in ("system", "user", "assistant", "user")]
LINE = "{{ m.role }}={{ m.content }};"


def regions(template, messages=MESSAGES):
    """Return each message's text as the marks find it."""
    [text], _ = render_jinja_template([messages], chat_template=template)
    found = MarkedTemplate(template).regions(messages, text, {"tools": None, "add_generation_prompt": False})
    return {turn: text[start:end] for turn, (start, end) in found.items()}


@pytest.mark.parametrize(
    "template",
    [
        "head {% for m in messages %}" + LINE + "{% endfor %} tail",
        "{% for m in messages %}{% set x = m.content | trim %}{% endfor %}{% for m in messages %}"
        + LINE
        + "{% endfor %}!",
        "{% macro say(m) %}{% for c in m.content %}{{ c }}{% endfor %};{% endmacro %}"
        "{% for m in messages %}{{ m.role }}={{ say(m) }}{% endfor %}",
        "{% for m in messages %}{% for o in messages %}{% if o == m %}{% break %}{% endif %}{% endfor %}"
        + LINE
        + "{% endfor %}",
        "{% for m in messages %}" + LINE + "{% if m.role == 'user' %}{% continue %}{% endif %}{% endfor %}",
        "{{ messages[0].role }}={{ messages[0].content }};{% for m in messages[1:] %}" + LINE + "{% endfor %}",
        "{%- for m in messages -%}\n  {{- m.role }}={{ m.content -}} ;\n{%- endfor -%}\n tail\n",
    ],
)
def test_each_message_gets_what_was_written_at_its_step(template):
    found = regions(template)
    assert {1, 2, 3} <= set(found)
    assert all(text == f"{MESSAGES[turn]['role']}={MESSAGES[turn]['content']};" for turn, text in found.items())


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m.role }}{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}",
        "{% for m in messages %}[{% for o in messages %}{{ o.content }}{% endfor %}]{% endfor %}",
        "{% set all %}{% for m in messages %}" + LINE + "{% endfor %}{% endset %}{{ all }} {{ all | length }}",
        "{{ messages | map(attribute='content') | join(' ') }}",
        "{% for m in messages | map('upper') %}{{ m }}{% endfor %}",
    ],
    ids=["two places", "nested", "counted", "no loop", "copies"],
)
def test_where_the_marks_prove_nothing_there_is_no_region(template):
    assert regions(template) == {}


def test_signs_in_the_data_are_told_from_marks():
    messages = [{"role": "user", "content": "\ue0001:0\ue000 \ue001"}, {"role": "assistant", "content": "b"}]
    found = regions("{% for m in messages %}" + LINE + "{% endfor %}", messages)
    assert found == {0: "user=\ue0001:0\ue000 \ue001;", 1: "assistant=b;"}


def test_loops_that_run_on_are_stopped():
    template = MarkedTemplate("{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}")
    with pytest.raises(EndlessTemplateError):
        template.regions(MESSAGES, "", {})


def test_a_turn_that_repeats_other_messages_is_not_put_behind_the_prompt():
    """The step of the answer writes the question too; learning it would be learning the user's text."""
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}{% if loop.last %}<|im_start|>user\n{{ m.content }}<|im_end|>"
        "\n{% endif %}{% else %}<|im_start|>assistant\n(re: {{ messages[loop.index0 - 1].content }}) {{ m.content }}"
        "<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    row = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]}
    transform = ChatTransform(load_tokenizer(), chat_template=template, assistant_mask="each")
    with pytest.raises(DataError, match=r"row 0, turn 1: .* changes earlier text once the answer is there"):
        list(transform.tokenize([row], [0], format_name="messages"))
