"""The learning rate of every iteration."""

import pytest

from megatron_glm.config import OptimizerConfig
from megatron_glm.training.lr import learning_rate


def rates(iterations: int = 12, **fields) -> list[float]:
    config = OptimizerConfig(lr=1.0, min_lr=0.1, **fields)
    return [learning_rate(config, iteration, iterations) for iteration in range(1, iterations + 1)]


def test_warmup_is_linear_and_ends_at_the_peak():
    assert rates(lr_warmup_iters=4)[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])


def test_a_fraction_of_warmup_counts_from_the_end_of_the_decay():
    assert rates(lr_warmup_fraction=0.25) == rates(lr_warmup_iters=3)
    assert rates(lr_warmup_fraction=0.25, lr_decay_iters=8) == rates(lr_warmup_iters=2, lr_decay_iters=8)
    assert rates(lr_warmup_fraction=0.0) == rates()


def test_constant_stays():
    assert rates(lr_decay_style="constant", lr_warmup_iters=2)[1:] == [1.0] * 11


def test_linear_reaches_the_minimum_and_stays():
    values = rates(lr_decay_style="linear", lr_warmup_iters=2, lr_decay_iters=8)
    assert values[2:8] == pytest.approx([1.0 - 0.9 * i / 6 for i in range(6)])
    assert values[8:] == pytest.approx([0.1] * 4)


def test_cosine_is_half_way_in_the_middle_and_ends_at_the_minimum():
    values = rates(lr_decay_style="cosine", lr_decay_iters=10)
    assert values[0] == 1.0 and values[5] == pytest.approx(0.55) and values[10:] == pytest.approx([0.1, 0.1])
    assert values == sorted(values, reverse=True)


def test_decay_lasts_as_long_as_the_run_unless_told():
    assert rates(8) == rates(12, lr_decay_iters=8)[:8]
    assert rates(4, lr_warmup_iters=4) == pytest.approx([0.25, 0.5, 0.75, 1.0])


def test_wsd_stays_at_the_peak_and_decays_at_the_end_in_megatrons_shapes():
    wsd = {"lr_decay_style": "WSD", "lr_warmup_iters": 2, "lr_decay_iters": 10, "lr_wsd_decay_iters": 4}
    for style, half in (
        ("linear", 0.5),
        ("cosine", 0.5),
        ("exponential", 2 * 0.5**0.5 - 1),
        ("minus_sqrt", 1 - 0.5**0.5),
    ):
        values = rates(lr_wsd_decay_style=style, **wsd)
        assert values[:7] == pytest.approx([0.5] + [1.0] * 6)
        assert values[8] == pytest.approx(0.1 + 0.9 * half)
        assert values[6:] == sorted(values[6:], reverse=True) and values[10:] == pytest.approx([0.1, 0.1])


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"lr_decay_style": "WSD"}, "--lr-decay-style WSD with --lr-wsd-decay-iters None"),
        ({"lr_wsd_decay_iters": 3}, "--lr-decay-style cosine with --lr-wsd-decay-iters 3"),
        (
            {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 8, "lr_warmup_iters": 3},
            "--lr-warmup-iters (3) + --lr-wsd-decay-iters (8) are above --train-iters (10)",
        ),
        ({"lr_warmup_fraction": 1.5}, "--lr-warmup-fraction is 1.5"),
        ({"lr_warmup_fraction": 0.1, "lr_warmup_iters": 2}, "--lr-warmup-fraction 0.1 and --lr-warmup-iters 2"),
        (
            {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 8, "lr_warmup_fraction": 0.3},
            "the iterations of --lr-warmup-fraction 0.3 (3) + --lr-wsd-decay-iters (8) are above --train-iters (10)",
        ),
    ],
)
def test_flags_that_contradict_are_refused(fields, words):
    with pytest.raises(ValueError) as error:
        OptimizerConfig(**fields).check(10)
    assert words in str(error.value)
