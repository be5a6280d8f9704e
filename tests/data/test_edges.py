"""Where a prompt ends inside a token, the answer is tokenized as the model writes it behind that prompt."""

import pytest
from tokenizers import pre_tokenizers, processors

from hf_megapack.data.chat import ChatTransform
from hf_megapack.errors import DataError
from tests.helpers.assets import load_tokenizer
from tests.helpers.chats import assistant, learned_texts, user


def learned(example, tokenizer):
    """Return the decoded text of each run of learned tokens."""
    return learned_texts({"input_ids": example.input_ids, "loss_mask": example.loss_mask}, tokenizer)


@pytest.mark.parametrize("trims_offsets", [False, True])
def test_a_space_at_the_end_of_the_prompt_stays_there(trims_offsets):
    """The model meets the prompt's last token, a lone space, and has to go on behind it."""
    tokenizer = load_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=trims_offsets)
    text = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
    text += "{% if add_generation_prompt %}assistant: {% endif %}"
    row = {"messages": [user("Hi"), assistant("true")]}
    pair = {"prompt": "user: Hi<|im_end|>assistant: ", "completion": "true"}
    prompt = tokenizer(pair["prompt"], add_special_tokens=False)["input_ids"]
    assert tokenizer(pair["prompt"] + "true", add_special_tokens=False)["input_ids"][: len(prompt)] != prompt
    for mask in ("all", "each"):
        transform = ChatTransform(tokenizer, assistant_mask=mask, chat_template=text)
        for given, name in ((row, "messages"), (pair, "prompt/completion")):
            [example] = transform.tokenize([given], [0], format_name=name)
            assert example.input_ids[: len(prompt)].tolist() == prompt
            assert example.loss_mask.tolist() == [0] * len(prompt) + [1] * (len(example.input_ids) - len(prompt))
            assert learned(example, tokenizer) == ["true<|im_end|>"]


@pytest.mark.parametrize("template", ["<|im_start|> $A", "$A <|im_end|>", "<|im_start|> $A <|im_end|>"])
@pytest.mark.parametrize(("prompt", "completion"), [("x=", "true"), ("x: ", "true"), ("hel", "lo")])
def test_what_a_tokenizer_puts_around_a_text_stays_around_its_pieces(template, prompt, completion):
    tokenizer = load_tokenizer()
    ends = [(token, tokenizer.convert_tokens_to_ids(token)) for token in ("<|im_start|>", "<|im_end|>")]
    row = {"prompt": prompt, "completion": completion}
    [plain] = ChatTransform(tokenizer).tokenize([row], [0], format_name="prompt/completion")
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=ends)
    [example] = ChatTransform(tokenizer).tokenize([row], [0], format_name="prompt/completion")
    begins = [ends[0][1]] if template.startswith("<") else []
    assert example.input_ids.tolist() == [*begins, *plain.input_ids.tolist()]
    assert learned(example, tokenizer) == learned(plain, tokenizer) == [f"{completion}<|im_end|>"]


def test_a_tokenizer_that_writes_no_answer_without_a_space_keeps_the_token_of_both():
    """Its pieces are not the whole: what it writes behind a lone space is learned with the space."""
    tokenizer = load_tokenizer()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    [example] = ChatTransform(tokenizer).tokenize(
        [{"prompt": "x: ", "completion": "true"}], [0], format_name="prompt/completion"
    )
    assert learned(example, tokenizer) == [" true<|im_end|>"]


@pytest.mark.parametrize("trims_offsets", [False, True])
@pytest.mark.parametrize("prompt", ["Cafe\u0301", "a\u0300\u0323", "x e\u0301 "])
def test_an_accent_that_the_tokenizer_puts_into_the_prompts_last_token_stays_there(prompt, trims_offsets):
    """The offsets of a composed character leave out the accent; it must not count as text of the answer's first."""
    tokenizer = load_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=trims_offsets)
    [example] = ChatTransform(tokenizer).tokenize(
        [{"prompt": prompt, "completion": "true"}], [0], format_name="prompt/completion"
    )
    before = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    assert example.input_ids[: len(before)].tolist() == before
    assert learned(example, tokenizer) == ["true<|im_end|>"]


def test_an_answer_that_begins_with_an_accent_of_the_prompts_last_letter_is_refused():
    with pytest.raises(DataError, match=r"row 0: a token of .* holds both text to learn and other text"):
        list(
            ChatTransform(load_tokenizer()).tokenize(
                [{"prompt": "Cafe", "completion": "\u0301 true"}], [0], format_name="prompt/completion"
            )
        )


@pytest.mark.parametrize("mask", ["all", "last", "each"])
@pytest.mark.parametrize("content", ["<|im_start|>user\nHi", "<|im_start|>assistant\nHi", "<|im_start|>", "Hi"])
def test_an_opening_turn_that_begins_with_text_of_its_header_is_learned_whole(content, mask):
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer = load_tokenizer()
    transform = ChatTransform(tokenizer, chat_template=template, assistant_mask=mask)
    row = {"messages": [assistant(content), user("And?")]}
    [example] = transform.tokenize([row], [0], format_name="messages")
    assert learned(example, tokenizer) == [f"{content}<|im_end|>"]
