"""Published click-log benchmarks: Criteo's tables and MLPerf's DLRM-v2 on them.

Sources of the figures:

- MLPerf DLRM-v2 (DLRM-DCNv2): facebookresearch/dlrm, `torchrec_dlrm/README.MD`: rows
  with the cap of 40 million, ids per sample ("multi-hot sizes", 214 together), width
  128, batch 65,536.
- Criteo 1 TB: the same rows before the cap, as HugeCTR's and OneFlow's DLRM give them.
- Criteo Kaggle: hpcaitech/CachedEmbedding, `baselines/data/dlrm_dataloader.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from torchrec_neuroshard.errors import ConfigError
from torchrec_neuroshard.profiles import DEFAULT_ZIPF_EXPONENT, zipf_profile
from torchrec_neuroshard.tables import TableConfig

__all__ = [
    "CRITEO_1TB_ROWS",
    "CRITEO_KAGGLE_ROWS",
    "MLPERF_BATCH_SIZE",
    "MLPERF_MAX_ROWS",
    "MLPERF_MULTI_HOT",
    "criteo_1tb",
    "criteo_kaggle",
    "mlperf_dlrm_v2",
]

# fmt: off
CRITEO_1TB_ROWS: tuple[int, ...] = (
    227_605_432, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 130_229_467,
    3_067_956, 405_282, 10, 2_209, 11_938, 155, 4, 976, 14, 292_775_614, 40_790_948,
    187_188_510, 590_152, 12_973, 108, 36,
)
"""Distinct values of the 26 categorical columns of Criteo 1 TB."""

CRITEO_KAGGLE_ROWS: tuple[int, ...] = (
    1_460, 583, 10_131_227, 2_202_608, 305, 24, 12_517, 633, 3, 93_145, 5_683,
    8_351_593, 3_194, 27, 14_992, 5_461_306, 10, 5_652, 2_173, 4, 7_046_547, 18, 15,
    286_181, 105, 142_572,
)
"""Distinct values of the 26 categorical columns of Criteo's Kaggle challenge."""

MLPERF_MULTI_HOT: tuple[int, ...] = (
    3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1,
)
"""Ids per sample of the 26 tables of MLPerf DLRM-v2; 214 together."""
# fmt: on

MLPERF_MAX_ROWS = 40_000_000
"""MLPerf's cap: larger columns are hashed into this many rows."""

MLPERF_BATCH_SIZE = 65_536
"""MLPerf DLRM-v2's global batch."""


def mlperf_dlrm_v2(
    max_rows: int | None = None,
    embedding_dim: int = 128,
    exponent: float = DEFAULT_ZIPF_EXPONENT,
) -> tuple[TableConfig, ...]:
    """Return the 26 tables of MLPerf DLRM-v2, or a version of them that fits.

    The rule that scales them is the benchmark's own: a table above the cap is hashed
    into `max_rows` rows, smaller ones stay. Ids per sample and skew are kept.

    Args:
        max_rows: The cap; None is MLPerf's 40 million.
        embedding_dim: Columns of every table.
        exponent: Assumed skew: the id of rank r is drawn in proportion to r^-exponent.

    Returns:
        Tables `cat_0` to `cat_25`, each with its profile at the benchmark's batch.

    Raises:
        ConfigError: `max_rows` is below 1.
    """
    cap = MLPERF_MAX_ROWS if max_rows is None else max_rows
    return _one_feature_tables(
        CRITEO_1TB_ROWS, MLPERF_MULTI_HOT, cap, embedding_dim, exponent
    )


def criteo_1tb(
    max_rows: int | None = None,
    embedding_dim: int = 128,
    exponent: float = DEFAULT_ZIPF_EXPONENT,
) -> tuple[TableConfig, ...]:
    """Return the 26 one-hot tables of Criteo 1 TB.

    Args:
        max_rows: Hash larger columns into this many rows; None keeps all.
        embedding_dim: Columns of every table.
        exponent: Assumed skew, as in `mlperf_dlrm_v2`.

    Raises:
        ConfigError: `max_rows` is below 1.
    """
    return _one_feature_tables(
        CRITEO_1TB_ROWS, [1] * 26, max_rows, embedding_dim, exponent
    )


def criteo_kaggle(
    max_rows: int | None = None,
    embedding_dim: int = 16,
    exponent: float = DEFAULT_ZIPF_EXPONENT,
) -> tuple[TableConfig, ...]:
    """Return the 26 one-hot tables of Criteo's Kaggle challenge.

    Args:
        max_rows: Hash larger columns into this many rows; None keeps all.
        embedding_dim: Columns of every table.
        exponent: Assumed skew, as in `mlperf_dlrm_v2`.

    Raises:
        ConfigError: `max_rows` is below 1.
    """
    return _one_feature_tables(
        CRITEO_KAGGLE_ROWS, [1] * 26, max_rows, embedding_dim, exponent
    )


def _one_feature_tables(
    rows: Sequence[int],
    multi_hot: Sequence[int],
    max_rows: int | None,
    embedding_dim: int,
    exponent: float,
) -> tuple[TableConfig, ...]:
    if max_rows is not None and max_rows < 1:
        raise ConfigError(f"max_rows must be at least 1, got {max_rows}")
    tables = []
    for i, (known_rows, hot) in enumerate(zip(rows, multi_hot, strict=True)):
        num_embeddings = known_rows if max_rows is None else min(known_rows, max_rows)
        tables.append(
            TableConfig(
                name=f"cat_{i}",
                num_embeddings=num_embeddings,
                embedding_dim=embedding_dim,
                pooling_factor=float(hot),
                profile=zipf_profile(
                    batch_size=MLPERF_BATCH_SIZE,
                    pooling_factor=float(hot),
                    num_embeddings=num_embeddings,
                    exponent=exponent,
                ),
            )
        )
    return tuple(tables)
