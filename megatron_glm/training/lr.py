"""Learning-rate schedule: linear warm-up, then a decay in Megatron's shapes; a pure function of the iteration."""

from __future__ import annotations

import math

from megatron_glm.config import OptimizerConfig

# What is left of the decay when the share x of it has passed: 1 at x = 0, 0 at x = 1.
SHAPES = {
    "constant": lambda x: 1.0,
    "linear": lambda x: 1.0 - x,
    "cosine": lambda x: 0.5 * (1.0 + math.cos(math.pi * x)),
    "exponential": lambda x: 2.0 * 0.5**x - 1.0,
    "minus_sqrt": lambda x: 1.0 - math.sqrt(x),
}


def learning_rate(config: OptimizerConfig, iteration: int, train_iters: int) -> float:
    """Rate of the optimizer step `iteration` (the first is 1) of `train_iters`.

    Warm-up rises linearly and reaches the peak in its last iteration; the iteration after it starts the decay at the
    peak, which arrives at `min_lr` after `lr_decay_iters` iterations and stays there. WSD (warm-up, stable, decay)
    decays in the last `lr_wsd_decay_iters` of them only.
    """
    end, style = config.lr_decay_iters or train_iters, config.lr_decay_style
    warmup = start = config.warmup(end)
    if iteration <= warmup:
        return config.lr * iteration / warmup
    if style == "WSD":
        assert config.lr_wsd_decay_iters is not None, "checked with the configuration"
        style, start = config.lr_wsd_decay_style, max(warmup, end - config.lr_wsd_decay_iters)
    passed = min(1.0, max(0.0, (iteration - 1 - start) / max(1, end - start)))
    return config.min_lr + (config.lr - config.min_lr) * SHAPES[style](passed)
