"""Measure what an adapter learned, with plain transformers and peft: loss on held-out conversations before and after.

    python examples/check_adapter.py outputs/demo --dataset examples/data/held_out.jsonl

The loss is the mean over all tokens that the assistant wrote. hf_megapack is not imported: the adapter is an ordinary
PEFT folder, and its tokenizer carries the chat template of training.
"""

import argparse

import torch
from datasets import load_dataset
from peft import AutoPeftModelForCausalLM
from transformers import AutoTokenizer, PreTrainedTokenizerBase


def encode(rows: list[dict], tokenizer: PreTrainedTokenizerBase) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return token ids and the assistant's tokens (as booleans) of each conversation, both of shape (1, num_tokens).

    Args:
        rows: Rows with `messages` and maybe `tools`.
        tokenizer: Its template must mark generation.

    Raises:
        SystemExit: If the template marks no assistant token.
    """
    encoded = []
    for row in rows:
        out = tokenizer.apply_chat_template(
            row["messages"],
            tools=row.get("tools"),
            return_dict=True,
            return_assistant_tokens_mask=True,
            return_tensors="pt",
        )
        encoded.append((out["input_ids"], torch.as_tensor(out["assistant_masks"]).reshape(1, -1).bool()))
    if not any(mask.any() for _, mask in encoded):
        raise SystemExit("The chat template has no generation tags, so the assistant's tokens are not known.")
    return encoded


@torch.inference_mode()
def mean_loss(model: torch.nn.Module, conversations: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """Return the mean negative log-likelihood of the assistant's tokens, in nats.

    Args:
        model: A causal language model.
        conversations: What `encode` returned.
    """
    total, num_tokens = 0.0, 0
    for input_ids, mask in conversations:
        learned = mask[0, 1:]
        # Logits only where an assistant's token is predicted: the vocabulary is the largest matrix.
        positions = torch.nonzero(learned)[:, 0]
        logits = model(input_ids=input_ids, logits_to_keep=positions, use_cache=False).logits[0]
        targets = input_ids[0, 1:][learned]
        total += torch.nn.functional.cross_entropy(logits.float(), targets, reduction="sum").item()
        num_tokens += len(targets)
    return total / num_tokens


def main() -> None:
    """Print the loss without and with the adapter.

    Raises:
        SystemExit: If the adapter made it no better.
    """
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("adapter", help="PEFT folder that training wrote")
    parser.add_argument("--dataset", required=True, help=".jsonl file of held-out conversations")
    parser.add_argument("--dtype", default="float32", help="dtype of the base model")
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(options.adapter)
    conversations = encode(list(load_dataset("json", data_files=options.dataset, split="train")), tokenizer)
    model = AutoPeftModelForCausalLM.from_pretrained(options.adapter, dtype=getattr(torch, options.dtype)).eval()
    with model.disable_adapter():
        before = mean_loss(model, conversations)
    after = mean_loss(model, conversations)
    num_tokens = sum(int(mask[0, 1:].sum()) for _, mask in conversations)
    print(
        f"Held-out loss over {num_tokens} assistant tokens of {len(conversations)} conversations, "
        f"transformers + peft: {before:.4f} before, {after:.4f} after."
    )
    if not after < before:
        raise SystemExit("The adapter did not lower the held-out loss.")


if __name__ == "__main__":
    main()
