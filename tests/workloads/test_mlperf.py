from __future__ import annotations

import pytest

from torchrec_neuroshard.errors import ConfigError
from torchrec_neuroshard.workloads.mlperf import mlperf_dlrm_v2


def test_dlrm_v2_has_the_published_sizes() -> None:
    tables = mlperf_dlrm_v2()
    assert [t.name for t in tables] == [f"cat_{i}" for i in range(26)]
    assert sum(t.pooling_factor for t in tables) == 214
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
    with pytest.raises(ConfigError, match="got 0"):
        mlperf_dlrm_v2(max_rows=0)
