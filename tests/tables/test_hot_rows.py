"""Hot rows: exact counts, sums over features, and row shards priced by their ids."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_neuroshard.errors import ProfileError
from torchrec_neuroshard.tables.hot_rows import MAX_RANGES, HotRows
from torchrec_neuroshard.tables.loaders import load_profiles, save_profiles
from torchrec_neuroshard.tables.profile import (
    FeatureProfile,
    merge_profiles,
    profile_ids,
    profile_inputs,
)
from torchrec_neuroshard.tables.table import TableConfig, is_skewed, row_shard

Ints = npt.NDArray[np.int64]
ROWS, BATCH, LENGTH = 10_000, 400, 50
"""Rows are not a multiple of the ranges' size."""


def padded_ids(share: float, rows: int = ROWS, hot: int = 0) -> Ints:
    """Ids of a batch, spread evenly except for one that stands for padding."""
    rng = np.random.default_rng(3)
    ids = rng.integers(0, rows, BATCH * LENGTH)
    ids[: round(share * len(ids))] = hot
    return rng.permutation(ids)


def profiled(ids: Ints) -> FeatureProfile:
    return profile_ids(ids, np.full(BATCH, len(ids) // BATCH))


def hot_rows(profile: FeatureProfile) -> HotRows:
    assert profile.hot_rows is not None
    return profile.hot_rows


def table_of(ids: Ints, rows: int = ROWS, **fields: Any) -> TableConfig:
    profile = profiled(ids)
    return TableConfig(
        name="t",
        num_embeddings=rows,
        embedding_dim=16,
        pooling_factor=profile.pooling_factor,
        profile=profile,
        **fields,
    )


def block(table: TableConfig, num_ranks: int) -> list[TableConfig]:
    """The shards of a block, each with its first row."""
    part = -(-table.num_embeddings // num_ranks)
    return [
        row_shard(
            table,
            min(part, table.num_embeddings - first),
            BATCH,
            first=first,
        )
        for first in range(0, table.num_embeddings, part)
    ]


# --- counting -------------------------------------------------------------------


@pytest.mark.parametrize("largest", [0, 1, 255, 256, 257, 9_999, 2**62])
def test_counts_by_range_and_of_frequent_ids_are_exact(largest: int) -> None:
    rng = np.random.default_rng(3)
    ids = np.append(rng.integers(0, largest, 5_000, endpoint=True), largest)
    ids[:900], ids[900:1500] = largest, largest // 3
    found = hot_rows(profile_ids(ids, np.ones(len(ids), dtype=np.int64)))
    size = found.range_size
    assert size * MAX_RANGES > largest and (size == 1 or largest >= size * 128)
    counted = np.bincount((ids // size).astype(np.int64))
    assert np.array(found.range_shares) * len(ids) == pytest.approx(counted, abs=1e-6)
    distinct, counts = np.unique(ids, return_counts=True)
    most = sorted(zip(distinct, counts, strict=True), key=lambda f: (-f[1], f[0]))
    assert [row for row, _ in found.top_ids] == [row for row, _ in most[:16]]
    assert [share * len(ids) for _, share in found.top_ids] == pytest.approx(
        [count for _, count in most[:16]]
    )


def test_batches_of_model_input_are_counted_together() -> None:
    rng = np.random.default_rng(3)
    every = [rng.integers(0, 3_000, 60) for _ in range(3)]
    every[1][:40] = 0
    batches = [
        KeyedJaggedTensor(
            keys=["item"],
            values=torch.from_numpy(ids),
            lengths=torch.full((6,), 10),
        )
        for ids in every
    ]
    found = profile_inputs(batches)["item"]
    ids = np.concatenate(every)
    assert found == profile_ids(ids, np.full(18, 10))
    zeros = int((ids == 0).sum())
    assert hot_rows(found).top_ids[0] == (0, zeros / len(ids))


def test_ids_that_are_no_rows_have_no_ranges() -> None:
    lengths = np.array([2])
    assert profile_ids(np.array([-1, 5]), lengths).hot_rows is None
    assert profile_ids(np.array([], dtype=np.int64), np.array([0])).hot_rows is None
    found = hot_rows(profile_ids(np.array([3, 999]), lengths))
    assert found.within(1_000) is found
    assert found.within(999) is None, "the model maps ids to rows itself"


def test_features_of_one_table_add_up() -> None:
    first, second = padded_ids(0.6, rows=700), padded_ids(0.1, rows=90_000, hot=500)
    together = merge_profiles([profiled(first), profiled(second)])
    found, expected = hot_rows(together), hot_rows(profiled(np.append(first, second)))
    assert found.range_size == expected.range_size
    assert found.range_shares == pytest.approx(expected.range_shares)
    assert dict(found.top_ids)[0] == pytest.approx(dict(expected.top_ids)[0], rel=0.01)
    unknown = dataclasses.replace(profiled(second), hot_rows=None)
    half = hot_rows(merge_profiles([profiled(first), unknown]))
    assert sum(half.range_shares) == pytest.approx(0.5)
    # Ids of the second feature count as even over the table's rows.
    [last] = half.shares([50_000], [50_000], 100_000)
    assert last == pytest.approx(0.5 / 2)
    assert merge_profiles([unknown, unknown]).hot_rows is None


@pytest.mark.parametrize(
    "fields",
    [
        {"range_size": 3},
        {"range_shares": (0.7, 0.7)},
        {"range_shares": (0.001,) * 257},
        {"top_ids": ((8, 0.1),)},
        {"top_ids": ((1, 0.1), (1, 0.2))},
        {"range_shares": (-0.1,)},
    ],
)
def test_impossible_hot_rows_are_refused(fields: dict[str, Any]) -> None:
    right: dict[str, Any] = {"range_size": 4, "range_shares": (0.5, 0.5)}
    HotRows(**right)
    with pytest.raises(ProfileError, match="profile the batches again"):
        HotRows(**(right | fields))


# --- files ----------------------------------------------------------------------


def test_files_keep_hot_rows_and_older_files_have_none(tmp_path: Path) -> None:
    path = tmp_path / "profiles.json"
    known = profiled(padded_ids(0.5))
    unknown = dataclasses.replace(known, hot_rows=None)
    save_profiles({"known": known, "unknown": unknown}, path)
    assert load_profiles(path) == {"known": known, "unknown": unknown}
    data = json.loads(path.read_text())
    assert "hot_rows" in data["known"]
    assert "hot_rows" not in data["unknown"], "older versions read this profile"
    table = table_of(padded_ids(0.5))
    assert TableConfig.from_json(json.loads(json.dumps(table.to_json()))) == table


# --- other batches --------------------------------------------------------------


def test_other_batch_sizes_keep_hot_rows() -> None:
    known = profiled(padded_ids(0.5))
    for size in (BATCH // 4, BATCH * 4):
        assert known.at_batch_size(size).hot_rows == known.hot_rows
    bare = dataclasses.replace(known, access_histogram=())
    assert bare.with_repeats(BATCH, ROWS).hot_rows == known.hot_rows


def test_deduplicated_parts_look_up_padding_once() -> None:
    ids, parts = padded_ids(0.6), 4
    sent = np.concatenate([np.unique(part) for part in np.split(ids, parts)])
    found = hot_rows(profiled(ids).distinct_in_parts(parts, ROWS))
    assert dict(found.top_ids)[0] == pytest.approx(parts / len(sent), rel=0.05)
    in_first = float((sent < ROWS // 4).mean())
    [first] = found.shares([0], [ROWS // 4], ROWS)
    assert first == pytest.approx(in_first, rel=0.05)
    assert sum(found.range_shares) == pytest.approx(1.0)


# --- row shards -----------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [2, 4, 7, 16])
def test_a_shards_lookups_and_distinct_ids_are_those_of_its_rows(
    num_ranks: int,
) -> None:
    ids = padded_ids(0.62)
    ids[:2_000] = 4_999  # the last row of the first of two shards
    table = table_of(ids)
    shards = block(table, num_ranks)
    part = -(-ROWS // num_ranks)
    for place, shard in enumerate(shards):
        own = ids[ids // part == place]
        assert shard.profile is not None
        assert shard.profile.num_lookups == pytest.approx(len(own), rel=0.08)
        distinct = len(np.unique(own))
        assert shard.profile.num_distinct == pytest.approx(distinct, rel=0.08)
        assert shard.profile.hot_rows is None
    total = [s.profile.num_lookups for s in shards if s.profile]
    assert sum(total) == pytest.approx(len(ids))
    histogram = np.sum([s.profile.access_histogram for s in shards if s.profile], 0)
    assert table.profile is not None
    assert histogram == pytest.approx(np.array(table.profile.access_histogram))


@pytest.mark.parametrize("row", [4_999, 5_000])
def test_the_id_decides_between_shards_not_its_range(row: int) -> None:
    ids = np.full(BATCH * LENGTH, row)
    first, second = block(table_of(ids), 2)
    assert first.profile is not None and second.profile is not None
    held = [first.profile.num_lookups, second.profile.num_lookups]
    assert held == ([len(ids), 0] if row < 5_000 else [0, len(ids)])
    held = [first.profile.num_distinct, second.profile.num_distinct]
    assert held == ([1, 0] if row < 5_000 else [0, 1])


@pytest.mark.parametrize("seed", range(6))
def test_rows_that_no_id_reaches_are_not_looked_up(seed: int) -> None:
    """The share of the first shard is rounded to more than 1 for some of these."""
    rng = np.random.default_rng(seed)
    table = table_of(rng.integers(0, 1_000, BATCH * LENGTH))
    lookups = [s.pooling_factor for s in block(table, 4)]
    assert lookups == pytest.approx([LENGTH, 0, 0, 0], abs=0.05 * LENGTH)


def test_distinct_ids_are_at_most_the_rows() -> None:
    rng = np.random.default_rng(3)
    ids = np.append(rng.integers(0, 100, 15_000), rng.integers(0, ROWS, 5_000))
    for shard in block(table_of(ids), 64):
        assert shard.profile is not None
        assert shard.profile.num_distinct <= shard.num_embeddings * (1 + 1e-9)


def test_outputs_of_sequences_follow_the_lookups() -> None:
    sequences = block(table_of(padded_ids(0.5), pooled=False), 2)
    expected = [0.75 * LENGTH, 0.25 * LENGTH]
    assert [s.num_outputs for s in sequences] == pytest.approx(expected, abs=1)
    pooled = block(table_of(padded_ids(0.5)), 2)
    assert [s.num_outputs for s in pooled] == [1, 1]
    assert [s.num_bags for s in (*pooled, *sequences)] == [1] * 4


def test_shards_without_a_place_are_even_as_before() -> None:
    table = table_of(padded_ids(0.5))
    assert table.profile is not None
    plain = dataclasses.replace(
        table, profile=dataclasses.replace(table.profile, hot_rows=None)
    )
    even = row_shard(plain, 2_500, BATCH)
    assert row_shard(table, 2_500, BATCH) == even
    assert row_shard(plain, 2_500, BATCH, first=0) == even
    assert row_shard(table, 2_500, BATCH, first=0) != even


def test_only_more_than_chance_is_skewed() -> None:
    part = ROWS // 8
    assert is_skewed(table_of(padded_ids(0.62)), part, BATCH)
    assert is_skewed(table_of(padded_ids(0.62, hot=ROWS - 1)), part, BATCH)
    assert not is_skewed(table_of(padded_ids(0.0)), part, BATCH)
    few = np.random.default_rng(3).integers(0, ROWS, 50)  # some shards get 10, some 4
    assert not is_skewed(table_of(np.tile(few, 8)[:BATCH]), part, 50)
    assert not is_skewed(table_of(padded_ids(0.62)), ROWS, BATCH), "one part"
    assert not is_skewed(dataclasses.replace(table_of(few), profile=None), part, 50)
