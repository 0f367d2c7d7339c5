"""Misses of row caches: identities, and counts of simulated caches."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from torchrec_neuroshard.models.row_cache import MissCurve
from torchrec_neuroshard.tables.profile import profile_ids, zipf_profile

ROWS, LOOKUPS = 20_000, 4_000
LOADS = np.array([0.02, 0.05, 0.1, 0.2, 0.4])


def counted(share: npt.NDArray[np.float64], slots: int, is_lfu: bool) -> float:
    """Count the misses of a set of slots over the last fifth of 60 batches."""
    rng = np.random.default_rng(0)
    counts, last, held = np.zeros(ROWS), np.zeros(ROWS), np.zeros(ROWS, dtype=bool)
    missed = distinct = 0
    for batch in range(60):
        ids, times = np.unique(rng.choice(ROWS, LOOKUPS, p=share), return_counts=True)
        if batch >= 48:
            missed, distinct = missed + (~held[ids]).sum(), distinct + len(ids)
        counts[ids] += times
        last[ids] = batch + ids / ROWS  # the batch's rows with low numbers go
        held[ids] = True
        there = np.flatnonzero(held)
        order = np.argsort((counts if is_lfu else last)[there])
        held[there[order[:-slots]]] = False
    return float(missed / distinct)


@pytest.mark.parametrize(
    ("exponent", "is_lfu"), [(0.0, False), (1.05, False), (1.05, True)]
)
def test_misses_match_counted_ones(exponent: float, is_lfu: bool) -> None:
    weight = np.arange(1.0, ROWS + 1) ** -exponent
    share = weight / weight.sum()
    ids = np.random.default_rng(1).choice(ROWS, LOOKUPS, p=share)
    profile = profile_ids(ids, np.ones(LOOKUPS, dtype=np.int64))
    predicted = MissCurve(profile, ROWS, is_lfu=is_lfu).misses([0.3])[0]
    found = counted(share, int(0.3 * ROWS), is_lfu)
    assert predicted == pytest.approx(found, rel=0.1)


@pytest.mark.parametrize("is_lfu", [False, True])
def test_larger_caches_miss_less(is_lfu: bool) -> None:
    profile = zipf_profile(batch_size=8, pooling_factor=500.0, num_embeddings=ROWS)
    curve = MissCurve(profile, ROWS, is_lfu=is_lfu)
    misses = curve.misses(np.linspace(0.0, 1.0, 30))
    assert (np.diff(misses) <= 1e-12).all()
    assert misses[0] == pytest.approx(1.0) and misses[-1] == 0.0
    least = MissCurve(profile, ROWS, is_lfu=True).misses(LOADS)
    assert (curve.misses(LOADS) >= least - 1e-6).all()  # no cache can do better
    # Tables share a cache by how long their rows stay.
    loads = curve.load_factors([1.0, 4.0, 16.0])
    assert loads[0] * ROWS == pytest.approx(profile.num_distinct, rel=0.02)
    assert (np.diff(loads) > 0).all() and loads[-1] < 1.0
    # T batches have about the rows of a profile of T batches.
    longer = profile.at_batch_size(32, ROWS)
    assert loads[1] * ROWS == pytest.approx(longer.num_distinct, rel=0.05)
