"""--rampup-batch-size: packs of each step, a function of the packs before it."""

import pytest

from megatron_glm.config import ParallelConfig, TrainConfig
from megatron_glm.training.batch_size import batch_size, iterations_for, samples_after


def ramp(*given: int, full: int = 8) -> TrainConfig:
    return TrainConfig(global_batch_size=full, rampup_batch_size=given, train_iters=10)


def walk(train: TrainConfig, steps: int) -> list[int]:
    sizes, consumed = [], 0
    for _ in range(steps):
        sizes.append(batch_size(train, consumed))
        consumed += sizes[-1]
    return sizes


def test_increments_are_spread_over_the_samples():
    """2, 4, 6 for 12 packs each of 36, then 8: as Megatron, a step that begins inside a part has that part's size."""
    assert walk(ramp(2, 2, 36), 14) == [2] * 6 + [4] * 3 + [6] * 2 + [8] * 3
    train = ramp(2, 3, 7)  # parts of 3.5 packs
    assert [batch_size(train, consumed) for consumed in range(9)] == [2, 2, 2, 2, 5, 5, 5, 8, 8]
    assert walk(ramp(8, 1, 100), 3) == walk(ramp(), 3) == [8, 8, 8]


def test_samples_and_iterations_invert_each_other():
    for train in (ramp(), ramp(2, 2, 36), ramp(1, 7, 3)):
        sizes = walk(train, 20)
        for iterations in range(20):
            samples = samples_after(train, iterations)
            assert samples == sum(sizes[:iterations])
            assert samples_after(train, 20 - iterations, samples) == sum(sizes)
            assert iterations_for(train, samples) == iterations
            assert iterations_for(train, samples + 1) == iterations + 1


@pytest.mark.parametrize(
    "given, words",
    [
        ((2, 2), "is 2 2; it takes START INCREMENT SAMPLES"),
        ((0, 2, 5), "all above 0"),
        ((16, 2, 5), "starts at 16, above --global-batch-size (8)"),
        ((2, 4, 5), "less --rampup-batch-size's START (6) must be a multiple of its INCREMENT (4)"),
        ((3, 5, 5), "START (3) must be a multiple of --micro-batch-size x data-parallel ranks (2)"),
        ((4, 1, 5), "INCREMENT (1) must be a multiple of --micro-batch-size x data-parallel ranks (2)"),
    ],
)
def test_sizes_that_cannot_be_are_refused(given, words):
    with pytest.raises(ValueError) as error:
        ramp(*given).check(64, ParallelConfig(), 2)
    assert words in str(error.value)
