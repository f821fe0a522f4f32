"""Greedy generation by full forwards: it runs the very code that is trained, in any layout, without a cache of keys."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from megatron_glm.config import RunConfig
from megatron_glm.data.packing import PackedBatch, build_batch
from megatron_glm.training.answers import answers_of, deal
from megatron_glm.training.engine import Engine


@dataclass
class Completion:
    """A prompt and what the model adds to it.

    prompt: [n] int64; tokens: the new ones, with the end token where one came; log_probs: of each of them.
    """

    prompt: np.ndarray
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    ended: bool = False

    def add(self, token: int, log_prob: float, ends: frozenset[int], max_new_tokens: int) -> None:
        self.tokens.append(token)
        self.log_probs.append(log_prob)
        self.ended = token in ends or len(self.tokens) == max_new_tokens


def end_tokens(config: RunConfig) -> frozenset[int]:
    """The ids that end a completion: of generation_config.json, as transformers reads it, else of config.json.

    Raises: ValueError if the file is no JSON object.
    """
    path = Path(config.hf_folder or "") / "generation_config.json"
    found = None
    if config.hf_folder is not None and path.is_file():
        try:
            found = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
        except (ValueError, AttributeError) as error:
            raise ValueError(f"cannot read {path}: {error}") from error
    found = config.model.eos_token_id if found is None else found
    return frozenset([found] if isinstance(found, int) else found)


def generate(
    engine: Engine, prompts: Sequence[np.ndarray], max_new_tokens: int, ends: frozenset[int]
) -> list[Completion]:
    """The most probable continuation of each prompt [n] int64, token by token; the same on all ranks.

    A step is one forward of all prompts with what they have so far, packed so that each has room for all its tokens.
    Those that have ended are left out.

    Raises: FloatingPointError if a log-probability is not finite.
    """
    length, dp = engine.config.data.seq_length, engine.groups.dp.size()
    completions = [Completion(prompt) for prompt in prompts]
    packs = deal([len(prompt) + max_new_tokens for prompt in prompts], length, dp)

    def build(pack: int) -> PackedBatch:
        documents = [np.concatenate([each.prompt, np.array(each.tokens, np.int64)]) for each in running[pack]]
        return build_batch([(ids, np.zeros(len(ids), bool)) for ids in documents], length)

    while not all(completion.ended for completion in completions):
        running = [[completions[i] for i in pack if not completions[i].ended] for pack in packs]
        tokens, log_probs = answers_of(engine, build, len(packs), "next tokens")
        for pack, documents in enumerate(running):
            last = -1
            for each in documents:
                last += len(each.prompt) + len(each.tokens)
                log_prob = log_probs[pack, last].item()
                if not math.isfinite(log_prob):
                    number = next(i for i, other in enumerate(completions) if other is each)
                    raise FloatingPointError(
                        f"prompt {number}: the log-probability of new token {len(each.tokens)} is {log_prob}"
                    )
                each.add(int(tokens[pack, last]), log_prob, ends, max_new_tokens)
    return completions
