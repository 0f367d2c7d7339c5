"""The tables of MLPerf DLRM-v2, from the Criteo 1 TB data set.

Sources of the figures:

- MLPerf DLRM-v2 (DLRM-DCNv2): facebookresearch/dlrm, `torchrec_dlrm/README.MD`: rows
  with the cap of 40 million, ids per sample ("multi-hot sizes", 214 together), width
  128, batch 65,536.
- Criteo 1 TB: the same rows before the cap, as HugeCTR's and OneFlow's DLRM give them.
"""

from __future__ import annotations

from dataclasses import replace

from torchrec_neuroshard.errors import ConfigError
from torchrec_neuroshard.tables.loaders import workload_tables
from torchrec_neuroshard.tables.table import TableConfig

# fmt: off
CRITEO_1TB_ROWS: tuple[int, ...] = (
    227_605_432, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 130_229_467,
    3_067_956, 405_282, 10, 2_209, 11_938, 155, 4, 976, 14, 292_775_614, 40_790_948,
    187_188_510, 590_152, 12_973, 108, 36,
)
"""Distinct values of the 26 categorical columns of Criteo 1 TB."""

MLPERF_MULTI_HOT: tuple[int, ...] = (
    3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1,
)
"""Ids per sample of the 26 tables of MLPerf DLRM-v2; 214 in total."""
# fmt: on

MLPERF_MAX_ROWS = 40_000_000
"""MLPerf's cap: columns with more distinct values are hashed into this many rows."""


def mlperf_dlrm_v2(
    max_rows: int = MLPERF_MAX_ROWS, embedding_dim: int = 128
) -> tuple[TableConfig, ...]:
    """Return the 26 tables of MLPerf DLRM-v2, scaled down with `max_rows`.

    The benchmark's own rule scales the tables: tables above the cap are hashed into
    `max_rows` rows, smaller tables stay. Ids per sample and skew are kept.

    Args:
        max_rows: The cap.
        embedding_dim: Columns of every table.

    Returns:
        Tables `cat_0` to `cat_25`, each with a profile at the benchmark's batch size.

    Raises:
        ConfigError: `max_rows` is below 1.
    """
    if max_rows < 1:
        raise ConfigError(f"max_rows must be at least 1, got {max_rows}")
    workload = {
        "rows": [min(rows, max_rows) for rows in CRITEO_1TB_ROWS],
        "pooling": MLPERF_MULTI_HOT,
        "dim": embedding_dim,
    }
    tables = workload_tables("mlperf_dlrm_v2", workload)
    return tuple(replace(t, name=f"cat_{i}") for i, t in enumerate(tables))
