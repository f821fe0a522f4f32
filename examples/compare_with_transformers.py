"""Checks an exported Hugging Face folder: transformers' loss, document by document, against the one given.

Usage: python examples/compare_with_transformers.py --hf DIR --data-path FILE.jsonl --loss 4.567890
"""

from __future__ import annotations

import signal

from megatron_glm import signals

if __name__ == "__main__":
    signals.install(signal.SIGINT)  # Ctrl-C: one line and exit code 130

import argparse
import json
import sys

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

TOLERANCE = 1e-4


@torch.no_grad()
def mean_loss(folder: str, file: str) -> tuple[float, int]:
    """Mean cross entropy of the last reply of each conversation, its closing role token included; and its tokens."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    turn_end = tokenizer.convert_tokens_to_ids("<|user|>")
    total, tokens = 0.0, 0
    with open(file, encoding="utf-8") as lines:
        for line in lines:
            messages = json.loads(line)["messages"]
            prompt = tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True)["input_ids"]
            ids = tokenizer.apply_chat_template(messages)["input_ids"] + [turn_end]
            logits = model(input_ids=torch.tensor([ids])).logits[0, len(prompt) - 1 : -1]
            total += torch.nn.functional.cross_entropy(logits, torch.tensor(ids[len(prompt) :]), reduction="sum").item()
            tokens += len(ids) - len(prompt)
    return total / tokens, tokens


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--hf", required=True, metavar="DIR", help="Hugging Face folder")
    parser.add_argument("--data-path", required=True, metavar="FILE", help="JSONL of conversations")
    parser.add_argument("--loss", type=float, required=True, help="what --eval-only printed for the same file")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()  # it has no MTP layer and lists those weights at length
    transformers.logging.disable_progress_bar()
    loss, tokens = mean_loss(arguments.hf, arguments.data_path)
    agree = abs(loss - arguments.loss) <= TOLERANCE
    verdict = "agree" if agree else f"differ by more than {TOLERANCE}"
    print(f"{verdict}: lm loss {arguments.loss:.6f} here, {loss:.6f} in transformers ({tokens} tokens)")
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
