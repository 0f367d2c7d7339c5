from __future__ import annotations

import numpy as np
import pytest

from torchrec_neuroshard.errors import ConfigError
from torchrec_neuroshard.tables import TableConfig
from torchrec_neuroshard.workloads.dlrm_dataset import (
    DLRM_LOOKUP_SHARES,
    DLRM_NUM_DISTINCT,
    DLRM_NUM_LOOKUPS,
    generate_dlrm_tables,
)

DISTINCT_SHARES = [0.473, 0.152, 0.139, 0.112, 0.072, 0.032, 0.011, 0.005, 0.002, 0.001]
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95, 1.0)


@pytest.fixture(scope="module")
def generated() -> tuple[TableConfig, ...]:
    return generate_dlrm_tables(seed=5)


def column(tables: tuple[TableConfig, ...], name: str) -> np.ndarray:
    return np.array([getattr(t.profile, name) for t in tables], dtype=np.float64)


def test_totals_are_the_published_ones(generated: tuple[TableConfig, ...]) -> None:
    assert len(generated) == 856
    assert sum(t.profile.num_lookups for t in generated if t.profile) == (
        DLRM_NUM_LOOKUPS
    )
    distinct = column(generated, "num_distinct")
    assert distinct.sum() == pytest.approx(DLRM_NUM_DISTINCT, rel=1e-6)
    rows = np.array([t.num_embeddings for t in generated])
    assert (distinct <= rows * (1 + 1e-9)).all()
    assert rows.mean() == pytest.approx(4_107_472, rel=0.01)


def test_shares_per_count_bin_are_the_published_ones(
    generated: tuple[TableConfig, ...],
) -> None:
    histogram_TC = column(generated, "access_histogram")
    count_TC = np.array([t.profile.bin_mean_counts() for t in generated if t.profile])
    lookups_C = (histogram_TC * count_TC).sum(axis=0)
    assert lookups_C.sum() == pytest.approx(DLRM_NUM_LOOKUPS, rel=1e-6)
    np.testing.assert_allclose(
        lookups_C / lookups_C.sum(), DLRM_LOOKUP_SHARES, atol=0.01
    )
    distinct_C = histogram_TC.sum(axis=0) / histogram_TC.sum()
    np.testing.assert_allclose(distinct_C, DISTINCT_SHARES + [0] * 7, atol=0.01)


def test_quantiles_are_near_the_published_ones(
    generated: tuple[TableConfig, ...],
) -> None:
    rows = np.array([t.num_embeddings for t in generated])
    np.testing.assert_allclose(
        np.quantile(rows, QUANTILES),
        [100, 29_648, 5_865_012, 5_999_903, 6_618_930, 12_543_670],
        rtol=0.06,
    )
    pooling = column(generated, "pooling_factor")
    np.testing.assert_allclose(
        np.quantile(pooling, QUANTILES), [0.03, 1.0, 4.57, 17.9, 77.3, 193.1], rtol=0.06
    )
    assert (pooling == 0).sum() == 36
    assert (pooling == 1).sum() == 107
    top = np.sort(pooling)[::-1].cumsum() / pooling.sum()
    np.testing.assert_allclose(top[[9, 49, 99]], [0.10, 0.37, 0.55], atol=0.02)


def test_seed_decides_the_tables(generated: tuple[TableConfig, ...]) -> None:
    assert generated == generate_dlrm_tables(seed=5)
    other = generate_dlrm_tables(seed=4)
    assert [t.num_embeddings for t in generated] != [t.num_embeddings for t in other]
    with pytest.raises(ConfigError, match="seed must be at least 0"):
        generate_dlrm_tables(seed=-1)
