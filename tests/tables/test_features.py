from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from tests.builders import make_tables
from torchrec_neuroshard.errors import FeatureSchemaError
from torchrec_neuroshard.tables.features import (
    FEATURE_NAMES,
    FEATURE_VERSION,
    NUM_TOTALS,
    ShardFeaturizer,
    check_schema,
    table_features,
)
from torchrec_neuroshard.tables.profile import FeatureProfile

PROFILE = FeatureProfile(
    batch_size=8,
    num_lookups=16,
    pooling_std=1.0,
    access_histogram=(4, 2, 2, *[0] * 14),
)
HALF: Any = {"weighted": True, "data_type": "fp16", "optimizer": "sgd"}
TABLES = (
    *make_tables([32], 1_024, profile=PROFILE),
    *make_tables([20], 512, 6.0, num_features=3, **HALF),
    *make_tables([4], 7, optimizer="adam"),
)


def named(row: np.ndarray) -> dict[str, float]:
    return dict(zip(FEATURE_NAMES, map(float, row), strict=True))


def test_one_table_by_hand() -> None:
    found = named(table_features(TABLES, 8)[0])
    expected = {
        **dict.fromkeys(FEATURE_NAMES, 0.0),
        "num_tables": 1,
        "num_lookups": 16,
        "num_distinct": 8,
        "lookup_bytes": 16 * 32 * 4,
        "distinct_bytes": 8 * 32 * 4,
        "output_bytes": 8 * 32 * 4,
        "num_bags": 8,
        "lookup_lines": 16 * 2,
        "distinct_lines": 8 * 2,
        "sorted_digits": 16 * 2,  # 1,024 rows: 11 bits
        "weight_bytes": 1_024 * 32 * 4,
        "log2_rows": 10,
        "log2_width": 5,
        "log2_pooling": 1,
        "pooling_cv": 0.5,
        "log2_batch": 3,
        "log2_reuse": 1,
        "is_rowwise_adagrad": 1,
        "distinct_share_0": 0.5,
        "distinct_share_1": 0.25,
        "distinct_share_2": 0.25,
    }
    assert found == pytest.approx(expected)


def test_flags_and_several_features() -> None:
    _, b, c = (named(row) for row in table_features(TABLES, 16))
    assert b["num_lookups"] == b["weighted_lookups"] == 96
    assert b["num_bags"] == 48
    assert b["log2_pooling"] == 1
    assert b["lookup_bytes"] == 96 * 20 * 2
    assert b["output_bytes"] == 48 * 20 * 4
    assert b["width_mod_16"] == 0.25
    assert (b["is_weighted"], b["is_half"], b["is_rowwise_adagrad"]) == (1, 1, 0)
    assert (b["is_shared"], c["is_shared"]) == (1, 0)
    assert b["weighted_bytes"] == b["lookup_bytes"]
    assert b["lookup_lines"] == 96  # 40 bytes a row
    assert (b["sorted_digits"], c["sorted_digits"]) == (2 * 96, c["num_lookups"])
    assert b["half_distinct_values"] == pytest.approx(20 * b["num_distinct"])
    assert b["half_weighted_values"] == 20 * 96
    assert (c["is_adam"], c["is_adagrad"]) == (1, 0)


@pytest.mark.parametrize(
    ("change", "feature", "value"),
    [
        # The CPU adds these gradients one by one.
        ({}, "unfused_values", 0),
        ({"optimizer": "sgd"}, "unfused_values", 16 * 32),
        ({"data_type": "fp16"}, "unfused_values", 16 * 32),
        ({"num_features": 2}, "unfused_values", 16 * 32),
        ({"weighted": True}, "unfused_values", 0),
        # Ids are sorted by eight bits at a time.
        ({"num_embeddings": 255}, "sorted_digits", 16 * 1),
        ({"num_embeddings": 256}, "sorted_digits", 16 * 2),
        ({"num_embeddings": 65_536}, "sorted_digits", 16 * 3),
    ],
)
def test_what_one_field_changes(
    change: dict[str, Any], feature: str, value: float
) -> None:
    (row,) = table_features([dataclasses.replace(TABLES[0], **change)], 8)
    assert named(row)[feature] == value


def test_shard_is_the_narrower_table_and_bytes_are_conserved() -> None:
    featurizer = ShardFeaturizer(TABLES, 64)
    narrow = dataclasses.replace(TABLES[1], embedding_dim=8)
    np.testing.assert_array_equal(
        featurizer.features([1], [8]), table_features([narrow], 64)
    )
    whole = featurizer.features([0], [32])[0]
    split = featurizer.features([0, 0, 0], [4, 12, 16])
    for name in ("lookup_bytes", "distinct_bytes", "output_bytes", "weight_bytes"):
        column = FEATURE_NAMES.index(name)
        assert split[:, column].sum() == pytest.approx(whole[column])


def test_schema() -> None:
    check_schema(FEATURE_NAMES, FEATURE_VERSION)
    assert FEATURE_NAMES[NUM_TOTALS - 1] == "weight_bytes"
    with pytest.raises(FeatureSchemaError, match=r"differing: \['hue'\]"):
        check_schema((*FEATURE_NAMES, "hue"), FEATURE_VERSION)
    with pytest.raises(FeatureSchemaError, match="differing: order"):
        check_schema(FEATURE_NAMES[::-1], FEATURE_VERSION)
    with pytest.raises(FeatureSchemaError, match="of version 999, but"):
        check_schema(FEATURE_NAMES, 999)
