"""The synthetic data set: its law, from the samples alone."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.trials.engine.data_files import sizes, spec
from trials.engine import Dataset
from trials.engine.data import load
from trials.engine.synthetic import read
from trials.spec import SpecError, facts_for


def synthetic(split_seed: int = 0, **drawn: Any) -> Dataset:
    return load(spec("synthetic", synthetic=drawn, split_seed=split_seed), [], Path("unused"))


def raw(**drawn: Any) -> tuple[np.ndarray, np.ndarray]:
    """All samples as drawn, float64 [n, features], and their labels."""
    splits = read(spec("synthetic", synthetic=drawn))
    parts = splits[:3]
    values = np.concatenate([part.values for part in parts])[:, 0].astype(np.float64)
    return values, np.concatenate([part.labels for part in parts])


def test_sizes_are_the_catalogues():
    for wanted in (spec("synthetic"), spec("synthetic", synthetic={"samples": 101, "features": 7, "classes": 3},
                                           train_samples=50, test_fraction=0.3)):  # fmt: skip
        facts, got = facts_for(wanted, []), load(wanted, [], Path("unused"))
        assert sizes(got) == (facts.train, facts.validation, facts.test)
        assert (got.shape, got.classes) == (facts.shape, facts.classes)
        assert got.train.inputs.shape[1] == facts.features == facts.shape[2]


def test_the_split_seed_alone_decides_the_samples():
    first, again, other = synthetic(samples=50), synthetic(samples=50), synthetic(samples=50, split_seed=1)
    assert first.checksum == again.checksum != other.checksum


def test_classes_are_equally_likely_with_means_at_the_separation_and_unit_noise():
    values, labels = raw(samples=20_000, features=12, classes=4, separation=5.0)
    counts = np.bincount(labels)
    assert (abs(counts - 5000) < 5 * np.sqrt(20_000 * 0.25 * 0.75)).all()
    means = np.stack([values[labels == label].mean(0) for label in range(4)])
    np.testing.assert_allclose(np.linalg.norm(means, axis=1), 5.0, atol=0.1)
    np.testing.assert_allclose((values - means[labels]).std(0), 1.0, atol=0.04)


def test_spread_is_the_deviation_of_the_log_length_and_changes_nothing_else():
    narrow, labels = raw(samples=20_000, features=40, separation=2.0)
    wide, wide_labels = raw(samples=20_000, features=40, separation=2.0, spread=0.8)
    np.testing.assert_array_equal(labels, wide_labels)
    log_ratio = np.log(np.linalg.norm(wide, axis=1) / np.linalg.norm(narrow, axis=1))
    assert abs(log_ratio.mean()) < 0.03
    assert abs(log_ratio.std() - 0.8) < 0.02
    directions = [x / np.linalg.norm(x, axis=1, keepdims=True) for x in (narrow, wide)]
    np.testing.assert_allclose(*directions, atol=1e-5)


def test_more_than_can_be_held_is_refused_before_it_is_drawn():
    wanted = spec("synthetic", synthetic={"samples": 10_000_000, "features": 100_000})
    for ask in (lambda: facts_for(wanted, []), lambda: load(wanted, [], Path("unused"))):
        with pytest.raises(SpecError, match=r"3,725\.3 GiB.*ask for fewer") as caught:
            ask()
        assert caught.value.issues[0].pointer == "/data/synthetic"
