from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_neuroshard.errors import ConfigError, TableError
from torchrec_neuroshard.profiles import profile_inputs
from torchrec_neuroshard.tables import TableConfig
from torchrec_neuroshard.workloads.inputs import draw_batch, feature_names
from torchrec_neuroshard.workloads.mlperf import mlperf_dlrm_v2

TABLES = mlperf_dlrm_v2(max_rows=20_000, embedding_dim=8)


def test_batches_profile_as_expected() -> None:
    drawn = [draw_batch(TABLES, 512, seed) for seed in range(4)]
    batches = []
    for batch in drawn:
        assert list(batch) == [t.name for t in TABLES]
        ids, lengths = map(np.concatenate, zip(*batch.values(), strict=True))
        batches.append(
            KeyedJaggedTensor.from_lengths_sync(
                keys=list(batch),
                values=torch.from_numpy(ids),
                lengths=torch.from_numpy(lengths),
            )
        )
    found = profile_inputs(batches)
    for table in TABLES:
        ids, lengths = drawn[0][table.name]
        assert (lengths == table.pooling_factor).all()
        assert ids.min() >= 0 and ids.max() < table.num_embeddings
        expected = table.profile_at(4 * 512)
        profile = found[table.name]
        assert profile.num_lookups == expected.num_lookups
        assert profile.num_distinct == pytest.approx(
            expected.num_distinct, rel=0.06, abs=6
        )


def test_seed_and_table_decide_the_draw() -> None:
    first, same, other = (draw_batch(TABLES, 32, seed) for seed in (1, 1, 2))
    for name in first:
        np.testing.assert_array_equal(first[name][0], same[name][0])
    assert any((first[n][0] != other[n][0]).any() for n in first)
    alone = draw_batch(TABLES[5:6], 32, 1)
    np.testing.assert_array_equal(alone["cat_5"][0], first["cat_5"][0])


def test_features_of_one_table_share_its_lookups() -> None:
    table = TableConfig(
        name="t", num_embeddings=50, embedding_dim=4, pooling_factor=6.0, num_features=3
    )
    batch = draw_batch([table], 10, seed=0)
    assert tuple(batch) == feature_names(table) == ("t:0", "t:1", "t:2")
    assert [lengths.sum() for _, lengths in batch.values()] == [20, 20, 20]
    assert not np.array_equal(batch["t:0"][0], batch["t:1"][0])


@pytest.mark.parametrize(
    ("tables", "batch_size", "seed", "value"),
    [
        ([], 4, 0, "no tables"),
        ([TABLES[0], TABLES[0]], 4, 0, "cat_0"),
        (TABLES, 0, 0, "batch_size"),
        (TABLES, 1, -1, "seed"),
    ],
)
def test_bad_requests_are_refused(
    tables: Sequence[TableConfig], batch_size: int, seed: int, value: str
) -> None:
    with pytest.raises((ConfigError, TableError), match=value):
        draw_batch(tables, batch_size, seed)
