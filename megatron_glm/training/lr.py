"""Learning-rate schedule: linear warm-up, then constant, linear or cosine decay; a pure function of the iteration."""

from __future__ import annotations

import math

from megatron_glm.config import OptimizerConfig


def learning_rate(config: OptimizerConfig, iteration: int, train_iters: int) -> float:
    """Rate of the optimizer step `iteration` (the first is 1) of `train_iters`.

    Warm-up rises linearly and reaches the peak in its last iteration; the iteration after it starts the decay at the
    peak, which arrives at `min_lr` after `lr_decay_iters` iterations and stays there.
    """
    warmup = config.lr_warmup_iters
    if iteration <= warmup:
        return config.lr * iteration / warmup
    if config.lr_decay_style == "constant":
        return config.lr
    decay = max(1, (config.lr_decay_iters or train_iters) - warmup)
    progress = min(1.0, (iteration - 1 - warmup) / decay)
    remaining = 1.0 - progress if config.lr_decay_style == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.min_lr + (config.lr - config.min_lr) * remaining
