from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tests.builders import make_tables
from torchrec_neuroshard.bundles.find import physical_estimate
from torchrec_neuroshard.measure.placing import split_columns
from torchrec_neuroshard.measure.sets import (
    SampledSet,
    SamplingConfig,
    SetSampler,
    is_held_out_table,
)
from torchrec_neuroshard.tables.features import table_features
from torchrec_neuroshard.tables.table import OPTIMIZERS, TableConfig

CONFIG = SamplingConfig(
    max_shards=12,
    widths=(8, 96),
    batch_sizes=(600, 3_000),
    rows=(20, 50_000),
    max_lookups=300_000,
    max_weight_bytes=20_000_000,
    repeat_every=5,
    repeat_lag=10,
)
ROWS, POOLING = range(1_000, 41_000, 1_000), [1.0 + i % 7 for i in range(40)]
BASE = tuple(
    dataclasses.replace(table, name=f"real/{i}", profile=table.profile_at(65_536))
    for i, table in enumerate(make_tables([64] * 40, ROWS, POOLING))
)
NUM_SETS = 200
ROUNDING = 5e-4
"""Figures of tables have four digits."""
ESTIMATE = physical_estimate("cpu")


def test_a_share_of_sets_is_of_sequences_and_leaves_the_others_as_they_are() -> None:
    some = SetSampler(CONFIG, 9, BASE, ESTIMATE)
    none = dataclasses.replace(CONFIG, sequence_share=0.0)
    without = SetSampler(none, 9, BASE, ESTIMATE)
    sets = [(some.sample(i), without.sample(i)) for i in range(NUM_SETS)]
    assert all(t.pooled for _, plain in sets for t in plain.tables)
    sequences = [found for found, _ in sets if not found.tables[0].pooled]
    assert len(sequences) == pytest.approx(NUM_SETS / 10, abs=12)
    assert all(a == b for a, b in sets if a.tables[0].pooled)
    lengths = [t.pooling_factor / t.num_features for s in sequences for t in s.tables]
    assert min(lengths) < 10 and max(lengths) > 100


def test_sets_follow_the_config() -> None:
    sets = [SetSampler(CONFIG, 9, BASE, ESTIMATE).sample(i) for i in range(NUM_SETS)]
    repeats = {s.index: sets[s.repeat_of] for s in sets if s.repeat_of is not None}
    assert len(repeats) == pytest.approx(NUM_SETS / CONFIG.repeat_every, abs=4)
    # Every position of the cycle is repeated at some time.
    assert {first.index % 5 for first in repeats.values()} == {0, 1, 2, 3}
    for sampled in sets:
        first = repeats.get(sampled.index, sampled)
        assert sampled.index - first.index >= CONFIG.repeat_lag or first is sampled
        assert (first.tables, first.access) == (sampled.tables, sampled.access)
        tables = sampled.tables
        assert 1 <= len(tables) <= CONFIG.max_shards
        assert len({t.name for t in tables}) == len(tables)
        pooled = tables[0].pooled
        low, high = (600, 3_000) if pooled else (37, 750)
        assert low <= sampled.batch_size <= high
        assert all(t.pooled == pooled for t in tables)
        if not pooled:
            assert len({t.embedding_dim for t in tables}) == 1
            assert not any(t.weighted for t in tables)
            values = sum(t.num_outputs * t.embedding_dim for t in tables)
            most = 16 * CONFIG.max_lookups * (1 + ROUNDING)
            assert values * sampled.batch_size <= most
        assert len({(t.optimizer, t.data_type, t.weighted) for t in tables}) == 1
        lookups = sum(t.profile.num_lookups for t in tables if t.profile)
        assert 0 < lookups <= CONFIG.max_lookups * (1 + ROUNDING)
        assert sum(t.weight_bytes for t in tables) <= CONFIG.max_weight_bytes
        for table in tables:
            assert 8 <= table.embedding_dim <= (96 if pooled else 512)
            assert 20 <= table.num_embeddings <= 50_000
            assert table.profile is not None
            assert table.profile.batch_size == sampled.batch_size
            assert table.pooling_factor == pytest.approx(table.profile.pooling_factor)
        for table, access in zip(tables, sampled.access or (), strict=False):
            assert table.profile is not None
            assert sum(access.share) == pytest.approx(1)
            assert sum(access.num_ids) <= table.num_embeddings * (1 + 1e-9)
            drawn = access.histogram(table.profile.num_lookups)
            assert table.profile.access_histogram == pytest.approx(
                drawn, rel=0.02, abs=0.03
            )

    plans = [s for s in sets if s.access is None]
    assert len(plans) / NUM_SETS == pytest.approx(CONFIG.plan_share, abs=0.1)
    # All kinds occur.
    every = [t for s in sets for t in s.tables]
    assert {t.optimizer for t in every} == {"rowwise_adagrad", "sgd"}
    assert {t.data_type for t in every} == {"fp32", "fp16"}
    assert {t.weighted for t in every} == {True, False}
    assert {t.embedding_dim % 16 for t in every} == {0, 4, 8, 12}
    assert {t.num_features > 1 for t in every} == {True, False}
    assert {t.name.split("/")[0] for t in every} == {"real", "generated"}
    assert {len(s.tables) for s in sets} >= {1, 5, 9}
    # Powers of two and other batch sizes.
    assert {s.batch_size for s in sets} >= {1_024, 2_048}
    assert len({s.batch_size for s in sets}) > 50

    # Each set has tables of one part only: test, validation or training.
    real: dict[tuple[bool, bool], set[str]] = {
        (True, False): set(),
        (False, True): set(),
        (False, False): set(),
    }
    for sampled in sets:
        names = [t.name.rsplit("#", 1)[0] for t in sampled.tables]
        real[sampled.held_out, sampled.validation] |= {
            n for n in names if n.startswith("real")
        }
    assert all(real.values())
    assert sum(map(len, real.values())) == len(set().union(*real.values()))
    share = sum(s.held_out for s in sets) / len(sets)
    assert share == pytest.approx(CONFIG.held_out_sets, abs=0.1)


def test_predicted_costs_make_cheap_sets_as_frequent() -> None:
    config = SamplingConfig(plan_share=0.0)
    sampler = SetSampler(config, 3, [], ESTIMATE)
    sets = [sampler.sample(i) for i in range(80)]
    assert sets[:5] == [sampler.sample(i) for i in range(5)]
    ms = np.array([predict_ms(s) for s in sets])
    assert 0.3 < (ms < 2.0).sum() / (ms > 15.0).sum() < 3.0


def predict_ms(drawn: SampledSet) -> float:
    features = table_features(drawn.tables, drawn.batch_size)
    one_set = np.zeros(len(features), dtype=np.int64)
    return float(ESTIMATE.predict_sets(features, one_set, 1).sum())


REAL = dataclasses.replace(
    CONFIG,
    plan_share=0.0,
    num_candidates=1,
    real_share=1.0,
    held_out_share=0.0,
    validation_share=0.0,
    held_out_sets=0.0,
    validation_sets=0.0,
)


def workload(name: str, num_kinds: int, copies: int = 0) -> list[TableConfig]:
    """Return tables of about one size, the first one with copies."""
    rows = [*range(1_000, 1_000 + num_kinds), *[1_000] * copies]
    tables = make_tables([64] * len(rows), rows, [2.0] * len(rows))
    return [
        dataclasses.replace(t, name=f"{name}/{i}", profile=t.profile_at(65_536))
        for i, t in enumerate(tables)
    ]


def test_workloads_and_kinds_are_drawn_before_tables() -> None:
    """A workload counts by the root of its kinds, however often it repeats a table."""
    tables = [*workload("a", 100), *workload("b", 25), *workload("c", 4, copies=300)]
    sampler = SetSampler(REAL, 0, tables, ESTIMATE)
    sets = map(sampler.sample, range(300))
    names = [t.name.partition("#")[0] for s in sets for t in s.tables]
    assert len(names) > 800
    for one, share in (("a", 10 / 17), ("b", 5 / 17), ("c", 2 / 17)):
        own = [n for n in names if n.startswith(one)]
        assert len(own) / len(names) == pytest.approx(share, abs=0.06)
    assert {n for n in names if n[0] == "c"} == {f"c/{i}" for i in range(4)}
    assert own.count("c/0") / len(own) == pytest.approx(1 / 4, abs=0.12)
    # A set mixes workloads.
    assert len({n[0] for n in names[:50]}) == 3


def test_twins_are_on_the_side_of_the_first_one() -> None:
    """So do tables with the same numbers in other workloads."""
    config = dataclasses.replace(REAL, held_out_share=0.2, held_out_sets=0.5)
    sampler = SetSampler(config, 0, [*workload("a", 40), *workload("b", 40)], ESTIMATE)
    sides: dict[str, set[bool]] = {}
    for sampled in map(sampler.sample, range(300)):
        for table in sampled.tables:
            name = table.name.partition("#")[0]
            sides.setdefault(name, set()).add(sampled.held_out)
    assert len(sides) > 70
    share = config.held_out_share
    for name, found in sides.items():
        assert found == {is_held_out_table(name.replace("b/", "a/"), share)}
    # Their own names would separate some of them.
    assert any({is_held_out_table(n, share)} != found for n, found in sides.items())


UNEQUAL = [
    dataclasses.replace(table, pooling_factor=1.0 + i % 50)
    for i, table in enumerate(workload("a", 100))
]


@pytest.mark.parametrize("base", [[], UNEQUAL])
def test_all_ranks_of_a_plan_hold_its_tables(base: list[TableConfig]) -> None:
    config = SamplingConfig()
    sampler = SetSampler(config, 5, base, ESTIMATE)
    parts, seen = set(), set[int]()
    for number in range(12):
        sets = sampler.plan_sets(number)
        assert sets == SetSampler(config, 5, base, ESTIMATE).plan_sets(number)
        assert sets != SetSampler(config, 6, base, ESTIMATE).plan_sets(number)
        assert 4 <= len(sets) <= 8
        indices = {s.index for s in sets}
        assert len(indices) == len(sets) and not indices & seen
        assert min(indices) >= 10**9
        seen |= indices
        assert all(s.held_out and not s.validation for s in sets)
        assert len({s.batch_size for s in sets}) == 1
        shards = [t for s in sets for t in s.tables]
        tables: dict[TableConfig, list[int]] = {}
        for shard in shards:
            whole = dataclasses.replace(
                shard, name=shard.name.partition("#")[0], embedding_dim=4
            )
            tables.setdefault(whole, []).append(shard.embedding_dim)
        assert 10 <= len(tables) <= 60
        (workload_name,) = {t.name.partition("/")[0] for t in tables}
        assert workload_name == ("a" if base else "generated")
        assert len({(t.optimizer, t.data_type, t.weighted) for t in tables}) == 1
        for widths in tables.values():
            assert sorted(widths) == sorted(split_columns(sum(widths), len(widths), 4))
        assert len({sum(widths) for widths in tables.values()}) <= 3
        parts |= {len(widths) for widths in tables.values()}
        # Within the slowest shard of equal costs.
        cost_ms = [predict_ms(s) for s in sets]
        slowest_ms = max(
            predict_ms(dataclasses.replace(sets[0], tables=(t,))) for t in shards
        )
        assert max(cost_ms) < np.mean(cost_ms) + slowest_ms
    assert {1, 2, 3} <= parts <= {1, 2, 3, 4}


def test_some_sets_of_plans_are_of_row_shards() -> None:
    """Row shards run in a kernel of their own, and all over the same ranks.

    A whole table's bags have 0, 1 or 4 times the variance of Poisson's lengths. A row
    shard's have 1, or a value in between.
    """
    config = dataclasses.replace(
        REAL, plan_share=1.0, sequence_share=0.0, max_weight_bytes=2**33
    )
    sampler = SetSampler(config, 0, workload("a", 100), ESTIMATE)
    sets, row_wise = [sampler.sample(i) for i in range(200)], 0
    for sampled in sets:
        profiles = [t.profile for t in sampled.tables if t.profile]
        ratios = [p.pooling_std**2 / p.pooling_factor for p in profiles]
        whole = {round(r) for r in ratios if min(r, abs(r - 4)) < 0.01}
        shares = {1 - r for r in ratios if 0.01 < r < 0.98}
        shares |= {(r - 1) / 3 for r in ratios if 1.02 < r < 3.99}
        if shares:
            row_wise += 1
            assert not whole
            ranks = np.reciprocal(list(shares))
            assert ranks == pytest.approx([round(ranks[0])] * len(ranks), rel=0.05)
            assert 4 <= round(ranks[0]) <= 16
    assert 0.05 < row_wise / len(sets) < 0.35


def test_a_gpu_gets_all_kinds_and_large_sets() -> None:
    memory = 24 * 2**30
    small, config, larger = (SamplingConfig.for_memory(n * memory) for n in (1, 10, 12))
    assert 0.6 < small.max_weight_bytes / memory < 0.8
    assert small.max_lookups == memory // 1_400 < config.max_lookups
    assert larger == config
    sets = [
        SetSampler(config, 4, [], physical_estimate("cuda")).sample(i)
        for i in range(150)
    ]
    tables = [t for s in sets for t in s.tables]
    # FBGEMM's Adam kernel takes no fp16 weights.
    kinds = {(o, d) for o in OPTIMIZERS for d in ("fp32", "fp16")} - {("adam", "fp16")}
    assert {(t.optimizer, t.data_type) for t in tables} == kinds
    assert 40_000 < max(s.batch_size for s in sets if s.access) <= 65_536
    # A plan's batch is that of all ranks.
    of_plans = [s.batch_size for s in sets if not s.access]
    assert 200_000 < max(of_plans) <= 524_288 and min(of_plans) < 50_000
    assert max(len(s.tables) for s in sets) > 70
    assert max(t.num_embeddings for t in tables) > 30_000_000
    lookups = [sum(t.profile.num_lookups for t in s.tables if t.profile) for s in sets]
    assert 10_000_000 < max(lookups) <= config.max_lookups


@pytest.mark.parametrize("max_lookups", [300_000, 600])
def test_sets_fit_into_the_memory_with_their_optimizers_state(max_lookups: int) -> None:
    config = dataclasses.replace(
        CONFIG, optimizers=("adam",), max_shards=40, max_lookups=max_lookups
    )
    held = []
    for i in range(60):
        tables = SetSampler(config, 2, [], ESTIMATE).sample(i).tables
        values = sum(t.num_embeddings * t.embedding_dim for t in tables)
        held.append(values * (4 + 8))
        lookups = sum(t.profile.num_lookups for t in tables if t.profile)
        assert 0 < lookups <= max_lookups * (1 + ROUNDING)
    most = config.max_weight_bytes
    assert (max_lookups == 600 or 0.8 * most < max(held)) and max(held) <= most
