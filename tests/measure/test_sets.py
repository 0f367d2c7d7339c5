from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from tests.builders import make_tables
from torchrec_neuroshard.measure import sets as sets_module
from torchrec_neuroshard.measure.sets import (
    SampledSet,
    SamplingConfig,
    SetSampler,
)
from torchrec_neuroshard.tables.table import OPTIMIZERS

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


def test_sets_follow_the_config() -> None:
    sets = [SetSampler(CONFIG, 9, BASE).sample(i) for i in range(NUM_SETS)]
    repeats = {s.index: sets[s.repeat_of] for s in sets if s.repeat_of is not None}
    assert len(repeats) == pytest.approx(NUM_SETS / CONFIG.repeat_every, abs=4)
    # Every position of the cycle is repeated at some time.
    assert {first.index % 5 for first in repeats.values()} == {0, 1, 2, 3}
    for sampled in sets:
        first = repeats.get(sampled.index, sampled)
        assert sampled.index - first.index >= CONFIG.repeat_lag or first is sampled
        assert (first.tables, first.access) == (sampled.tables, sampled.access)
        tables = sampled.tables
        assert sampled.access is not None
        assert 1 <= len(tables) <= CONFIG.max_shards
        assert len(tables) == len(sampled.access)
        assert len({t.name for t in tables}) == len(tables)
        assert 600 <= sampled.batch_size <= 3_000
        assert len({(t.optimizer, t.data_type, t.weighted) for t in tables}) == 1
        lookups = sum(t.profile.num_lookups for t in tables if t.profile)
        assert 0 < lookups <= CONFIG.max_lookups * (1 + 1e-9)
        assert sum(t.weight_bytes for t in tables) <= CONFIG.max_weight_bytes
        for table, access in zip(tables, sampled.access, strict=True):
            assert 8 <= table.embedding_dim <= 96
            assert 20 <= table.num_embeddings <= 50_000
            assert table.profile is not None
            assert table.profile.batch_size == sampled.batch_size
            assert table.pooling_factor == pytest.approx(table.profile.pooling_factor)
            assert sum(access.share) == pytest.approx(1)
            assert sum(access.num_ids) <= table.num_embeddings * (1 + 1e-9)
            drawn = access.histogram(table.profile.num_lookups)
            assert table.profile.access_histogram == pytest.approx(
                drawn, rel=0.02, abs=0.01
            )

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
    config = SamplingConfig()

    def predict_ms(drawn: SampledSet) -> float:
        lookups = sum(t.profile.num_lookups for t in drawn.tables if t.profile)
        return 0.2 + 1e-4 * lookups

    sampler = SetSampler(config, 3, [], predict_ms)
    sets = [sampler.sample(i) for i in range(80)]
    assert sets[:5] == [sampler.sample(i) for i in range(5)]
    ms = np.array([predict_ms(s) for s in sets])
    assert 0.3 < (ms < 1.0).sum() / (ms > 20.0).sum() < 3.0


def test_a_gpu_gets_all_kinds_and_large_sets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def config_of(memory: int) -> SamplingConfig:
        monkeypatch.setattr(sets_module, "device_bytes", lambda device: memory)
        return SamplingConfig.for_device(torch.device("cuda"))

    memory = 24 * 2**30
    small, config = config_of(memory), config_of(10 * memory)
    assert 0.6 < small.max_weight_bytes / memory < 0.8
    assert small.max_lookups == memory // 1_400 < config.max_lookups
    assert config_of(12 * memory) == config
    sets = [SetSampler(config, 4, []).sample(i) for i in range(150)]
    tables = [t for s in sets for t in s.tables]
    # FBGEMM's Adam kernel takes no fp16 weights.
    kinds = {(o, d) for o in OPTIMIZERS for d in ("fp32", "fp16")} - {("adam", "fp16")}
    assert {(t.optimizer, t.data_type) for t in tables} == kinds
    assert max(s.batch_size for s in sets) > 40_000
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
        tables = SetSampler(config, 2, []).sample(i).tables
        values = sum(t.num_embeddings * t.embedding_dim for t in tables)
        held.append(values * (4 + 8))
        lookups = sum(t.profile.num_lookups for t in tables if t.profile)
        assert 0 < lookups <= max_lookups * (1 + 1e-9)
    most = config.max_weight_bytes
    assert (max_lookups == 600 or 0.8 * most < max(held)) and max(held) <= most
