"""Every chat template x every shape of conversation: what is learned is known beforehand, or an error explains.

The oracle is written by hand, one line per family of templates: the text that an assistant turn contributes. To run it
with real tokenizers, name their folders in HF_MEGAPACK_TOKENIZERS, separated by colons.
"""

import json
import os
import re
import unicodedata
from pathlib import Path

import numpy as np
import pytest

from hf_megapack.data.chat import ChatTransform
from hf_megapack.errors import DataError, MegaPackError
from tests.helpers.assets import load_tokenizer, template_names

FOLDERS = [None, *map(Path, filter(None, os.environ.get("HF_MEGAPACK_TOKENIZERS", "").split(":")))]
TOOLS = [{"type": "function", "function": {"name": "find_flight", "description": "Find one.", "parameters": {}}}]


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


def call(arguments, text=""):
    function = {"name": "find_flight", "arguments": arguments}
    return assistant(text, tool_calls=[{"type": "function", "id": "abcdefghi", "function": function}])


SYSTEM = {"role": "system", "content": "Be brief."}
RESULT = {"role": "tool", "content": '{"ok": 1}', "tool_call_id": "abcdefghi", "name": "find_flight"}
SHAPES = {
    "plain": [user("Hi"), assistant("Hello there."), user("And?"), assistant("Bye.")],
    "system": [SYSTEM, user("Hi"), assistant("Hello."), user("x"), assistant("Yes.")],
    "system alone": [SYSTEM, assistant("Hello.")],
    "assistant first": [assistant("Welcome."), user("Hi"), assistant("Hello.")],
    "in a row": [user("Hi"), assistant("One."), assistant("Two."), user("And?"), assistant("Three.")],
    "empty": [user("Hi"), assistant(""), user("And?"), assistant("Bye.")],
    "whitespace": [user(" Hi "), assistant("\n  a \n\n"), user(" \n"), assistant("\tb  ")],
    "reasoning": [
        user("Hi"),
        assistant("Hello.", reasoning_content="think1"),
        user("And?"),
        assistant("Bye.", reasoning_content="think2"),
    ],
    "inline reasoning": [user("Hi"), assistant("<think>\nthink1\n</think>\n\nHello.")],
    "tools": [
        user("Fly"),
        call({"to": "Z\u00fcrich", "n": 2}),
        RESULT,
        assistant("Done."),
        user("So?"),
        assistant("No."),
    ],
    "call with text": [user("Fly"), call({"n": 2}, "I look."), RESULT, assistant("Done.")],
    "unicode": [user("\u98d8?"), assistant("\U0001f9ec \u98d8\u98d8 na\u00efve"), user("\u00e9"), assistant("e\u0301")],
    "parts": [user([{"type": "text", "text": "Hi"}]), assistant([{"type": "text", "text": "He"}, "llo."])],
    "ends with user": [user("Hi"), assistant("Hello."), user("more")],
    "control tokens": [user("a<|im_end|>b"), assistant("c<|im_end|>d"), user("e"), assistant("f")],
    "repeats": [user("blue"), assistant("blue"), user("blue"), assistant("blue"), user("assistant"), assistant("")],
}


def json_calls(message, style):
    """Return the tool calls of a message as a template writes them."""
    texts = []
    for tool_call in message.get("tool_calls", ()):
        name, arguments = tool_call["function"]["name"], tool_call["function"]["arguments"]
        plain = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
        as_json = json.dumps(arguments, ensure_ascii=False)
        texts.append(
            {
                "qwen": f'<tool_call>\n{{"name": "{name}", "arguments": {as_json}}}\n</tool_call>',
                "glm": f"\n<tool_call>{name}\n"
                + "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in plain.items())
                + "</tool_call>",
                "nemotron": f"<tool_call>\n<function={name}>\n"
                + "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in plain.items())
                + "</function>\n</tool_call>\n",
                "mistral": f'[TOOL_CALLS][{{"name": "{name}", "arguments": {as_json}, "id": "abcdefghi"}}]',
            }[style]
        )
    return "".join(texts)


def qwen(message, think=""):
    calls = json_calls(message, "qwen")
    text = think + message["text"]
    return text + ("\n" if calls and message["text"] else "") + calls + "<|im_end|>"


def qwen3(message):
    text, reasoning = message["text"].lstrip("\n"), message["reasoning"]
    return qwen({**message, "text": text}, f"<think>\n{reasoning}\n</think>\n\n" if message["thinks"] else "")


def glm(message):
    text = message["text"].strip()
    return f"\n<think>{message['reasoning']}</think>" + ("\n" + text if text else "") + json_calls(message, "glm")


def glm_training(message):
    return glm(message) + ("<|observation|>" if "tool_calls" in message else "<|user|>")


def nemotron(message):
    text, calls = message["text"], json_calls(message, "nemotron")
    head = f"{message['reasoning']}\n</think>{message['gap']}" if message["reasoning"] else ""
    return (head + text.rstrip() + "\n" + calls if calls else head + text.rstrip()) + "<|im_end|>"


def nemotron_training(message):
    return ("" if message["reasoning"] else "<think></think>") + nemotron(message) + "\n"


END = "<\uff5cend\u2581of\u2581sentence\uff5c>"
LEARNED = {
    "deepseek_v3_1": lambda m: m["text"] + END,
    "deepseek_v3_training": lambda m: m["text"] + END,
    "gemma3": lambda m: m["inline"].strip() + "<end_of_turn>",
    "gemma3_training": lambda m: m["inline"].strip() + "<end_of_turn>\n",
    "glm4_moe": glm,
    "glm4_moe_training": glm_training,
    "llama3": lambda m: m["inline"].strip() + "<|eot_id|>",
    "llama3_training": lambda m: m["inline"].strip() + "<|eot_id|>",
    "mistral_nemo": lambda m: (json_calls(m, "mistral") or m["inline"]) + "</s>",
    "nemotron_3_nano": nemotron,
    "nemotron_3_nano_training": nemotron_training,
    "nemotron_nano_v2": lambda m: m["inline"].strip() + "\n<SPECIAL_12>",
    "phi3": lambda m: m["inline"] + "<|end|>",
    "qwen2_5": lambda m: qwen({**m, "text": m["inline"]}),
    "qwen2_5_training": lambda m: qwen({**m, "text": m["inline"]}) + "\n",
    "qwen3": qwen3,
    "qwen3_hub": qwen3,
    "qwen3_training": lambda m: qwen3({**m, "thinks": True}) + "\n",
    "smollm2": lambda m: m["inline"] + "<|im_end|>",
    "smollm3": lambda m: m["inline"].lstrip("\n") + "<|im_end|>",
}

# Template -> "mask/shape" (either may be *) -> what the error says. Everything else is learned exactly.
NO_TOOLS = {"*/tools": "leaves out every one of the given tools", "*/call with text": "leaves out every one"}
NO_REASONING = {"*/reasoning": "turn 1 .assistant.: .* leaves out the reasoning"}
NO_INLINE = {"*/inline reasoning": "turn 1 .assistant.: .* leaves out the reasoning"}
ALTERNATES = {
    "*/system alone": "turn 1 .assistant.: .* cannot render .* roles must alternate",
    "*/assistant first": "turn 0 .assistant.: .* cannot render .* roles must alternate",
    "*/in a row": "turn 2 .assistant.: .* cannot render .* roles must alternate",
}
CHANGES = r'turn \d: .* changes earlier text when messages are added .*use assistant_mask="each"'
ONE_ANSWER = ("system alone", "inline reasoning", "parts")
REWRITES = {f"all/{shape}": CHANGES for shape in SHAPES if shape not in (*ONE_ANSWER, "assistant first")}
PROMPT = r"turn \d: the generation prompt of .* ends with '<think>.n', but this turn goes on with"
REFUSED = {
    "deepseek_v3": {
        **{f"*/{shape}": PROMPT for shape in SHAPES},
        "*/tools": "turn 1 .assistant.: .* cannot render",
        "*/call with text": "turn 1 .assistant.: .* cannot render",
        "*/assistant first": "turn 0: nothing comes before this assistant turn",
    },
    "deepseek_v3_1": {**NO_TOOLS, **NO_REASONING, **NO_INLINE, "*/assistant first": "turn 0: nothing comes before"},
    "deepseek_v3_training": {**NO_TOOLS, **NO_REASONING, **NO_INLINE},
    "gemma3": {
        **ALTERNATES,
        **NO_REASONING,
        "all/tools": "turn 2 .tool.: .* cannot render",
        "all/call with text": "turn 2 .tool.: .* cannot render",
        "each/tools": "leaves out every one of the given tools",
        "each/call with text": "leaves out every one of the given tools",
    },
    "glm4_moe": {"all/reasoning": CHANGES},
    "glm4_moe_training": {"all/reasoning": NO_REASONING["*/reasoning"]},
    "llama3": {**NO_TOOLS, **NO_REASONING},
    "mistral_nemo": {
        **ALTERNATES,
        **NO_REASONING,
        "all/system": CHANGES,
        "all/tools": CHANGES,
        "*/call with text": "turn 1 .assistant.: .* leaves out the text of this turn",
    },
    "nemotron_3_nano": {"all/reasoning": r"turn 1: the generation prompt .* use assistant_mask=.each."},
    "nemotron_3_nano_training": {"all/reasoning": NO_REASONING["*/reasoning"]},
    "nemotron_nano_v2": {
        **{f"all/{shape}": PROMPT for shape in SHAPES if shape not in (*ONE_ANSWER, "assistant first")},
        "each/reasoning": NO_REASONING["*/reasoning"],
        "*/system alone": "turn 0 .system.: .* cannot render",
        "*/assistant first": "turn 0: nothing comes before this assistant turn",
        "each/in a row": "turn 2: .* changes earlier text once the answer is there",
        "each/empty": "turn 1: the generation prompt",
        "each/repeats": "turn 5: the generation prompt",
        "each/tools": PROMPT,
        "each/call with text": "turn 1: .* ends this turn with <SPECIAL_12> more than once",
    },
    "phi3": {**NO_TOOLS, **NO_REASONING},
    "qwen2_5": NO_REASONING,
    "qwen3": REWRITES,
    # Its default system text belongs to the first turn's step of the loop.
    "smollm2": {**NO_TOOLS, **NO_REASONING, "*/assistant first": "turn 0: nothing comes before this assistant turn"},
    "smollm3": {**NO_TOOLS, **NO_REASONING},
}
REFUSED["gemma3_training"] = REFUSED["gemma3"]
REFUSED["llama3_training"] = REFUSED["llama3"]
REFUSED["qwen2_5_training"] = REFUSED["qwen2_5"]
REFUSED["qwen3_hub"] = REFUSED["qwen3"]
REFUSED["qwen3_training"] = {}


def seen_by_oracle(messages, turn):
    """Return an assistant message with its text and reasoning told apart."""
    message = messages[turn]
    content = message["content"]
    if not isinstance(content, str):
        content = "".join(part if isinstance(part, str) else part["text"] for part in content)
    inline = re.fullmatch(r"<think>\n(.*)\n</think>(\s*)(.*)", content, re.DOTALL)
    reasoning = inline[1] if inline else message.get("reasoning_content", "")
    return {
        **message,
        "inline": content,
        "text": inline[3] if inline else content,
        "reasoning": reasoning,
        "gap": inline[2] if inline else "\n",
        "thinks": any(earlier["role"] == "user" for earlier in messages[:turn]),
    }


def learned_texts(example, tokenizer):
    """Return the decoded text of each run of learned tokens."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], example.loss_mask, [0]))))
    return [tokenizer.decode(example.input_ids[start:end]) for start, end in edges.reshape(-1, 2)]


def outcome(shape, transform, tokenizer):
    """Return what was learned, one text per example, or the error's text."""
    row = {"messages": SHAPES[shape]}
    if any("tool_calls" in message for message in row["messages"]):
        row["tools"] = TOOLS
    try:
        examples = list(transform.tokenize([row], [0], format_name="messages"))
    except DataError as error:
        return str(error)
    return ["".join(learned_texts(example, tokenizer)) for example in examples]


def expected(template, mask, shape):
    """Return what must be learned, one text per example, or a pattern of the error."""
    refused = REFUSED[template]
    if pattern := refused.get(f"{mask}/{shape}") or refused.get(f"*/{shape}"):
        return re.compile(f"^row 0.*{pattern}", re.DOTALL)
    messages = SHAPES[shape]
    turns = [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]
    texts = [LEARNED[template](seen_by_oracle(messages, turn)) for turn in turns]
    for at, turn in enumerate(turns):
        # Tags as trl places them, before what the generation prompt ends with; "each" learns what follows the prompt.
        if template == "qwen2_5_training" and (mask == "all" or turn == 0):
            texts[at] = "\n" + texts[at]
        if template == "nemotron_3_nano_training" and mask == "all" and shape == "inline reasoning":
            texts[at] = "<think>\n" + texts[at]
    return texts if mask == "each" else ["".join(texts)]


def simplified(texts):
    """Return texts in one Unicode form, without the newlines that a token may share with a turn's header."""
    return [unicodedata.normalize("NFC", text).lstrip("\n") for text in texts]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name if folder else "small")
@pytest.mark.parametrize("mask", ["all", "each"])
@pytest.mark.parametrize("template", template_names())
def test_every_shape_is_learned_exactly_or_refused_in_words(template, mask, folder):
    tokenizer = load_tokenizer(template, folder)
    tokenizer.pad_token = tokenizer.eos_token
    transform = ChatTransform(tokenizer, assistant_mask=mask)
    wrong, num_learned = {}, 0
    for shape in SHAPES:
        got, want = outcome(shape, transform, tokenizer), expected(template, mask, shape)
        if isinstance(want, re.Pattern) or isinstance(got, str):
            is_right = isinstance(want, re.Pattern) and isinstance(got, str) and want.search(got)
        else:
            # One token may hold the header's newline and the answer's first one.
            is_right = got == want or (shape == "whitespace" and simplified(got) == simplified(want))
            is_right = is_right or (shape == "unicode" and simplified(got) == simplified(want))
            num_learned += 1
        if not is_right:
            wrong[shape] = (got, want)
    assert wrong == {}
    assert num_learned > 0 or template == "deepseek_v3"


@pytest.mark.parametrize("template", sorted(set(template_names()) - {"deepseek_v3"}))
def test_each_puts_the_answer_behind_the_prompt_of_inference(template):
    """Whatever the template does to earlier text, the context is its generation prompt, thinking or not."""
    tokenizer = load_tokenizer(template)
    transform = ChatTransform(tokenizer, assistant_mask="each")
    num_checked = 0
    for shape, messages in SHAPES.items():
        if shape in ("assistant first", "parts") or isinstance(expected(template, "each", shape), re.Pattern):
            continue
        tools = TOOLS if any("tool_calls" in message for message in messages) else None
        row = {"messages": messages, "tools": tools}
        for example in transform.tokenize([row], [0], format_name="messages"):
            prompts = [
                tokenizer.apply_chat_template(
                    messages[: example.turn], tools=tools, add_generation_prompt=True, tokenize=False, **thinking
                )
                for thinking in ({}, {"enable_thinking": False})
            ]
            context = tokenizer.decode(example.input_ids[: np.argmax(example.loss_mask)])
            # trl's training templates for these two know no thinking in the prompt.
            if template in ("deepseek_v3_training", "nemotron_3_nano_training"):
                prompts.append(prompts[0].removesuffix("<think>\n"))
            if shape == "whitespace":
                context, prompts = context.rstrip(), [prompt.rstrip() for prompt in prompts]
            context = unicodedata.normalize("NFC", context)
            assert context in [unicodedata.normalize("NFC", prompt) for prompt in prompts], shape
            num_checked += 1
    assert num_checked >= 8


def test_a_token_of_header_and_answer_is_taken_apart():
    """The header ends without a space: one token would hold its last character and the first of the answer."""
    text = "{% for m in messages %}<|im_start|>{{ m.role }}={{ m.content }}<|im_end|>{% endfor %}"
    text += "{% if add_generation_prompt %}<|im_start|>assistant={% endif %}"
    tokenizer = load_tokenizer()
    assert tokenizer.tokenize("<|im_start|>assistant=true")[-1] == "=true"
    transform = ChatTransform(tokenizer, chat_template=text)
    row = {"messages": [user("Hi"), assistant("true"), user("true"), assistant("true too")]}
    [example] = transform.tokenize([row], [0], format_name="messages")
    assert learned_texts(example, tokenizer) == ["true<|im_end|>", "true too<|im_end|>"]
    prompt = tokenizer("<|im_start|>user=Hi<|im_end|><|im_start|>assistant=")["input_ids"]
    assert example.input_ids[: len(prompt)].tolist() == prompt
    [pair] = transform.tokenize([{"prompt": "x=", "completion": "true"}], [0], format_name="prompt/completion")
    assert learned_texts(pair, tokenizer) == ["true<|im_end|>"]


def long_conversation(num_messages):
    roles = (user, assistant)
    return {"messages": [roles[turn % 2](f"turn {turn} says this") for turn in range(num_messages)]}


@pytest.mark.parametrize("template", ["qwen2_5", "phi3", "qwen2_5_training"])
def test_conversations_too_long_for_every_prefix_are_located_all_the_same(template):
    """Not every prefix is rendered, yet every turn is learned exactly, as in a short conversation."""
    tokenizer = load_tokenizer(template)
    row = long_conversation(602)
    row["messages"][300]["content"] = row["messages"][301]["content"] = "the same"
    [example] = ChatTransform(tokenizer).tokenize([row], [0], format_name="messages")
    messages = row["messages"]
    want = [LEARNED[template](seen_by_oracle(messages, turn)) for turn in range(1, 602, 2)]
    assert [text.lstrip("\n") for text in learned_texts(example, tokenizer)] == want


def test_long_conversations_that_a_template_rewrites_are_refused():
    with pytest.raises(DataError, match=f"row 0, {CHANGES}"):
        list(ChatTransform(load_tokenizer("qwen3")).tokenize([long_conversation(602)], [0], format_name="messages"))


def test_each_of_an_endless_conversation_is_refused_at_once():
    row = long_conversation(2000)
    row["messages"][0]["content"] = "word " * 200_000
    transform = ChatTransform(load_tokenizer(), assistant_mask="each")
    with pytest.raises(DataError, match=r'row 0: assistant_mask="each" would make 1,000 examples of more than'):
        list(transform.tokenize([row], [0], format_name="messages"))


LOOPS = "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}"
HUGE = "{% for m in messages %}{{ m.content }}{% endfor %}{% for a in range(90000) %}{{ 'too long ' * 18 }}{% endfor %}"
DEEP = "{% macro down() %}{{ down() }}{% endmacro %}{{ down() }}"
ESCAPE = "{{ messages.__class__.__mro__[1].__subclasses__() }}"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (LOOPS, "cannot be used: row 0: .* its loops run on and on"),
        (HUGE, "row 7: the chat template of .* makes 14,580,014 characters of a conversation of"),
        (DEEP, "row 7.* cannot render this conversation: RecursionError"),
        (ESCAPE, "row 7.* cannot render this conversation: SecurityError"),
        ("{{ raise_exception('not today') }}", "row 7, turn 0 .user.: .* cannot render .*: TemplateError: not today"),
        ("{% for m in messages %}", "row 7.* cannot render this conversation: TemplateSyntaxError"),
    ],
)
def test_hostile_templates_are_stopped_and_named(text, problem):
    def learn():
        transform = ChatTransform(load_tokenizer(), chat_template=text)
        return list(transform.tokenize([{"messages": SHAPES["plain"][:2]}], [7], format_name="messages"))

    with pytest.raises(MegaPackError, match=problem):
        learn()
