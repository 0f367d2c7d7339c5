"""MLPerf's published tables."""

from __future__ import annotations

import pytest

from torchrec_neuroshard.errors import ConfigError
from torchrec_neuroshard.tables.mlperf import mlperf_dlrm_v2


def test_dlrm_v2_has_the_published_sizes() -> None:
    full, small = mlperf_dlrm_v2(), mlperf_dlrm_v2(max_rows=10_000, embedding_dim=16)
    assert [t.name for t in full] == [f"cat_{i}" for i in range(26)]
    assert sum(t.pooling_factor for t in full) == 214
    # 204 million rows of 128 fp32 columns.
    assert sum(t.weight_bytes for t in full) / 2**30 == pytest.approx(97.36, abs=0.01)
    for whole, table in zip(full, small, strict=True):
        assert table.num_embeddings == min(whole.num_embeddings, 10_000)
        assert table.embedding_dim == 16 and table.profile is not None
        assert table.profile.num_lookups == 65_536 * whole.pooling_factor
    with pytest.raises(ConfigError, match="got 0"):
        mlperf_dlrm_v2(max_rows=0)
