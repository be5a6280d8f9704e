"""The model that the demo trains, as it comes out of the registry package."""

import importlib.util
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "smollm2.py"


@pytest.mark.network
def test_converted_model_speaks_english_and_splits_digits(tmp_path):
    pytest.importorskip("gguf", reason="needs the demo extra")
    spec = importlib.util.spec_from_file_location("smollm2", SCRIPT)
    smollm2 = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(smollm2)
    model_folder = tmp_path / "model"
    model_folder.mkdir()
    smollm2.convert(smollm2.fetch_gguf(tmp_path), model_folder)

    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    assert tokenizer.tokenize("in 2024") == ["in", "Ġ", "2", "0", "2", "4"]
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
