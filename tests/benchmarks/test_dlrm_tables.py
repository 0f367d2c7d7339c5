"""Generated tables have the published aggregates."""

from __future__ import annotations

import numpy as np
import pytest

from harness.dlrm_tables import (
    DLRM_LOOKUP_SHARES,
    DLRM_NUM_DISTINCT,
    DLRM_NUM_LOOKUPS,
    generate_dlrm_tables,
)
from torchrec_neuroshard.errors import ConfigError

DISTINCT_SHARES = [0.473, 0.152, 0.139, 0.112, 0.072, 0.032, 0.011, 0.005, 0.002, 0.001]
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95, 1.0)


def test_tables_are_near_the_published_ones() -> None:
    tables = generate_dlrm_tables(seed=5)
    assert tables == generate_dlrm_tables(seed=5)
    rows = np.array([t.num_embeddings for t in tables])
    others = generate_dlrm_tables(seed=4)
    assert rows.tolist() != [t.num_embeddings for t in others]
    with pytest.raises(ConfigError, match="seed must be at least 0"):
        generate_dlrm_tables(seed=-1)

    profiles = [t.profile for t in tables if t.profile]
    assert len(profiles) == len(tables) == 856
    assert sum(p.num_lookups for p in profiles) == DLRM_NUM_LOOKUPS
    distinct = np.array([p.num_distinct for p in profiles])
    assert distinct.sum() == pytest.approx(DLRM_NUM_DISTINCT, rel=1e-6)
    assert (distinct <= rows * (1 + 1e-9)).all()
    assert rows.mean() == pytest.approx(4_107_472, rel=0.01)

    # Shares per bin of counts.
    histogram_TC = np.array([p.access_histogram for p in profiles])
    count_TC = np.array([p.bin_mean_counts() for p in profiles])
    lookups_C = (histogram_TC * count_TC).sum(axis=0)
    assert lookups_C.sum() == pytest.approx(DLRM_NUM_LOOKUPS, rel=1e-6)
    share_C = lookups_C / lookups_C.sum()
    np.testing.assert_allclose(share_C, DLRM_LOOKUP_SHARES, atol=0.01)
    distinct_C = histogram_TC.sum(axis=0) / histogram_TC.sum()
    np.testing.assert_allclose(distinct_C, DISTINCT_SHARES + [0] * 7, atol=0.01)

    published = [100, 29_648, 5_865_012, 5_999_903, 6_618_930, 12_543_670]
    np.testing.assert_allclose(np.quantile(rows, QUANTILES), published, rtol=0.06)
    pooling = np.array([p.pooling_factor for p in profiles])
    factors = [0.03, 1.0, 4.57, 17.9, 77.3, 193.1]
    np.testing.assert_allclose(np.quantile(pooling, QUANTILES), factors, rtol=0.06)
    assert (pooling == 0).sum() == 36
    assert (pooling == 1).sum() == 107
    top = np.sort(pooling)[::-1].cumsum() / pooling.sum()
    np.testing.assert_allclose(top[[9, 49, 99]], [0.10, 0.37, 0.55], atol=0.02)
