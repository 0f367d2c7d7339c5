from __future__ import annotations

import pytest

from torchrec_neuroshard.errors import ConfigError
from torchrec_neuroshard.workloads.mlperf import (
    CRITEO_1TB_ROWS,
    CRITEO_KAGGLE_ROWS,
    criteo_1tb,
    criteo_kaggle,
    mlperf_dlrm_v2,
)


def test_dlrm_v2_has_the_published_sizes() -> None:
    tables = mlperf_dlrm_v2()
    assert [t.name for t in tables] == [f"cat_{i}" for i in range(26)]
    assert sum(t.pooling_factor for t in tables) == 214
    rows = [t.num_embeddings for t in tables]
    assert sum(r == 40_000_000 for r in rows) == 5
    assert max(rows) == 40_000_000
    # 204 million rows of 128 fp32 columns.
    assert sum(t.weight_bytes for t in tables) / 2**30 == pytest.approx(97.36, abs=0.01)


def test_scaling_caps_rows_and_keeps_the_rest() -> None:
    full, small = mlperf_dlrm_v2(), mlperf_dlrm_v2(max_rows=10_000, embedding_dim=16)
    assert [t.num_embeddings for t in small] == [
        min(t.num_embeddings, 10_000) for t in full
    ]
    assert [t.pooling_factor for t in small] == [t.pooling_factor for t in full]
    assert {t.embedding_dim for t in small} == {16}
    for table in small:
        assert table.profile is not None
        assert table.profile.num_lookups == 65_536 * table.pooling_factor
        assert table.profile.num_distinct <= table.num_embeddings * (1 + 1e-9)


def test_higher_exponent_reads_fewer_rows() -> None:
    distinct = [
        sum(t.profile.num_distinct for t in mlperf_dlrm_v2(exponent=e) if t.profile)
        for e in (0.0, 0.8, 1.2)
    ]
    assert distinct == sorted(distinct, reverse=True)
    assert distinct[0] > 2 * distinct[2]


def test_criteo_sets_are_one_hot() -> None:
    assert [t.num_embeddings for t in criteo_kaggle()] == list(CRITEO_KAGGLE_ROWS)
    assert sum(CRITEO_KAGGLE_ROWS) == 33_762_577
    assert sum(CRITEO_1TB_ROWS) == 882_774_559
    capped = criteo_1tb(max_rows=1_000_000)
    assert max(t.num_embeddings for t in capped) == 1_000_000
    assert {t.pooling_factor for t in (*criteo_kaggle(), *capped)} == {1.0}


def test_cap_below_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_rows must be at least 1, got 0"):
        mlperf_dlrm_v2(max_rows=0)
