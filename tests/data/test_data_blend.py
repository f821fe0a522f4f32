"""Blends: the order of the parts keeps every prefix exact, and weights that cannot be meant are refused."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from megatron_glm.data.blend import deal, parse_blend, whole_weights
from tests.data.test_data_pretraining import inputs, train, write

RANDOM = np.random.default_rng(0)
WEIGHTS = [
    [7, 3],
    [1] * 7,
    [1, 1, 2, 3, 5, 8, 13, 21],
    [2000, 50, 20, 10],
    *(RANDOM.integers(1, 1000, parts).tolist() for parts in (2, 3, 5, 8, 12, 50)),
    *(np.exp(RANDOM.normal(5, 2, parts)).astype(int).tolist() for parts in (4, 8, 30)),
]


@pytest.mark.parametrize("weights", WEIGHTS, ids=lambda weights: f"{len(weights)} of {sum(weights)}")
def test_every_prefix_is_within_one_sample(weights: list[int]):
    slots = min(sum(weights), 3000)
    table = deal(weights, slots)
    taken = np.cumsum(table["part"][:, None] == np.arange(len(weights)), axis=0)
    due = np.arange(1, slots + 1)[:, None] * np.array(weights) / sum(weights)
    assert np.abs(taken - due).max() < 1
    assert (taken[np.arange(slots), table["part"]] - 1 == table["number"]).all()
    if slots == sum(weights):
        assert taken[-1].tolist() == weights


def prefixes(tmp_path: Path) -> list[str]:
    """Two whose tokens are above and below 1000."""
    return [write(tmp_path / "a", [25] * 12), write(tmp_path / "b", [50] * 2, first=1000)]


def test_a_blend_takes_the_samples_of_its_parts_in_their_order_over_many_periods(tmp_path: Path):
    a, b = prefixes(tmp_path)
    blend = train("0.7", a, "0.3", b, samples=200)
    alone = {False: train(a, samples=200), True: train(b, samples=200)}
    next_number = {False: 0, True: 0}
    for i in range(200):
        sample = inputs(blend, i)
        part = min(sample) >= 1000
        assert sample == inputs(alone[part], next_number[part])
        next_number[part] += 1
        assert abs(next_number[True] - 0.3 * (i + 1)) < 1
    assert next_number == {False: 140, True: 60}
    assert [inputs(train("70", a, "30", b, samples=20), i) for i in range(20)] == [inputs(blend, i) for i in range(20)]


def test_without_weights_an_epoch_is_one_pass_over_every_part(tmp_path: Path):
    a, b = prefixes(tmp_path)
    blend = train(a, b)
    assert blend.packs_per_epoch == 18 + 6
    seen = [token for i in range(24) for token in inputs(blend, i)]
    assert len(set(seen)) == len(seen) == 24 * 16
    with pytest.raises(ValueError, match="sample 24 of the blend is none of the 24 asked for"):
        blend.pack(24)


def test_a_weight_of_zero_leaves_a_prefix_out(tmp_path: Path):
    a, b = prefixes(tmp_path)
    only = train("0", a, "2", b, samples=30)
    assert all(min(inputs(only, i)) >= 1000 for i in range(30))


def test_weights_are_exact():
    assert parse_blend(["0.7", "a", "3e-1", "b"], "--data-path") == (["a", "b"], [Fraction(7, 10), Fraction(3, 10)])
    assert parse_blend(["a", "b", "./0.3"], "--data-path") == (["a", "b", "./0.3"], None)
    assert whole_weights([Fraction(7, 10), Fraction(3, 10)]) == [7, 3]
    assert whole_weights([100, 50]) == [2, 1]


@pytest.mark.parametrize(
    "entries, message",
    [
        ("0.7 a b", "give every prefix a weight before it, or none"),
        ("0.7 a x b", "give every prefix a weight"),
        ("a 0.7 b 0.3", "give every prefix a weight"),
        ("0.7 0.3 a b", "give every prefix a weight"),
        ("-1 a 2 b", "the weight -1 is below 0"),
        ("nan a 1 b", "the weight nan is not a finite number"),
        ("inf a 1 b", "the weight inf is not"),
        ("1e9999999 a 1 b", "the weight 1e9999999 is not"),
        ("0 a 0.0 b", "the weights sum to 0"),
    ],
)
def test_weights_that_cannot_be_meant(entries: str, message: str):
    with pytest.raises(ValueError, match=f"--train-data-path.*{message}"):
        parse_blend(entries.split(), "--train-data-path")
