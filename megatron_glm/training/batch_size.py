"""Packs of a step under --rampup-batch-size: a pure function of the packs consumed before it."""

from __future__ import annotations

from megatron_glm.config import TrainConfig


def batch_size(train: TrainConfig, consumed_samples: int) -> int:
    """Packs of the step that begins after `consumed_samples`.

    As Megatron's: the increments are spread evenly over the ramp's samples, and the full size holds from its end on.
    """
    if not train.rampup_batch_size:
        return train.global_batch_size
    start, increment, samples = train.rampup_batch_size
    increments = (train.global_batch_size - start) // increment
    return start + min(increments, consumed_samples * increments // samples) * increment


def samples_after(train: TrainConfig, iterations: int, consumed: int = 0) -> int:
    """Packs that are consumed when `iterations` more steps are done after `consumed` packs."""
    done, consumed = _ramp(train, iterations=iterations, consumed=consumed)
    return consumed + (iterations - done) * train.global_batch_size


def iterations_for(train: TrainConfig, samples: int, consumed: int = 0) -> int:
    """Steps after `consumed` packs that bring them to `samples` or more; the last one may reach beyond."""
    done, consumed = _ramp(train, samples=samples, consumed=consumed)
    return done + max(0, -(-(samples - consumed) // train.global_batch_size))


def iterations_within(train: TrainConfig, samples: int, consumed: int = 0) -> int:
    """Steps after `consumed` packs that stay within `samples`: --train-samples 10 are 2 steps of 4."""
    steps = iterations_for(train, samples, consumed)
    return steps - (samples_after(train, steps, consumed) > max(samples, consumed))


def _ramp(
    train: TrainConfig, iterations: int | None = None, samples: int | None = None, consumed: int = 0
) -> tuple[int, int]:
    """(steps, packs consumed) at the end of those below full size, stopping early at so many steps or packs."""
    done = 0
    while (size := batch_size(train, consumed)) < train.global_batch_size:
        if done == iterations or (samples is not None and consumed >= samples):
            break
        done, consumed = done + 1, consumed + size
    return done, consumed
