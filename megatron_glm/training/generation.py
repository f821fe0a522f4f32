"""Greedy generation by full forwards: it runs the very code that is trained, in any layout, without a cache of keys."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from megatron_glm.config import RunConfig
from megatron_glm.data.packing import PackedBatch, best_fit, build_batch
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
    completions = [Completion(prompt) for prompt in prompts]
    packs = deal([len(prompt) + max_new_tokens for prompt in prompts], engine.config.data.seq_length, engine)
    while not all(completion.ended for completion in completions):
        running = [[i for i in pack if not completions[i].ended] for pack in packs]
        found = ask_next(engine, [[completions[i] for i in pack] for pack in running])
        for pack, answers in zip(running, found, strict=True):
            for i, (token, log_prob) in zip(pack, answers, strict=True):
                if not math.isfinite(log_prob):
                    raise FloatingPointError(
                        f"prompt {i}: the log-probability of new token {len(completions[i].tokens)} is {log_prob}"
                    )
                completions[i].add(token, log_prob, ends, max_new_tokens)
    return completions


def deal(lengths: Sequence[int], pack_length: int, engine: Engine) -> list[list[int]]:
    """Packs of documents, by their numbers; empty ones fill up what the data ranks run together."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    pack_of = best_fit([lengths[i] for i in order], pack_length)
    count, dp = int(pack_of.max()) + 1, engine.groups.dp.size()
    packs: list[list[int]] = [[] for _ in range(-(-count // dp) * dp)]
    for i, pack in zip(order, pack_of.tolist(), strict=True):
        packs[pack].append(i)
    return packs


def ask_next(engine: Engine, packs: Sequence[Sequence[Completion]]) -> list[list[tuple[int, float]]]:
    """(next token, its log-probability) of each completion of each pack, on all ranks."""
    groups = engine.groups
    mine = range(groups.dp.rank(), len(packs), groups.dp.size())
    found = engine.ask([_batch(packs[p], engine.config.data.seq_length) for p in mine], "next tokens")
    # The last stage knows them. Each fills its places of what is otherwise zero, and the sum is known to all.
    places = [(p, k) for p, pack in enumerate(packs) for k in range(len(pack))]
    tokens = torch.zeros(len(places), dtype=torch.int64)
    log_probs = torch.zeros(len(places), dtype=torch.float64)
    if groups.tp_cp.rank() == 0:
        for p, answers in zip(mine, found, strict=True):
            if answers:
                last = np.cumsum([len(each.prompt) + len(each.tokens) for each in packs[p]], dtype=np.int64) - 1
                at = [i for i, place in enumerate(places) if place[0] == p]
                tokens[at] = answers["tokens"].cpu()[last]
                log_probs[at] = answers["log_probs"].cpu()[last].double()
    dist.all_reduce(tokens, group=groups.gloo_world)
    dist.all_reduce(log_probs, group=groups.gloo_world)
    known = dict(zip(places, zip(tokens.tolist(), log_probs.tolist(), strict=True), strict=True))
    return [[known[p, k] for k in range(len(pack))] for p, pack in enumerate(packs)]


def _batch(pack: Sequence[Completion], pack_length: int) -> PackedBatch:
    documents = [np.concatenate([each.prompt, np.array(each.tokens, np.int64)]) for each in pack]
    return build_batch([(ids, np.zeros(len(ids), bool)) for ids in documents], pack_length)
