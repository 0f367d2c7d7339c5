from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.builders import printed_elsewhere
from torchrec_neuroshard.collect.sampling import (
    AccessDistribution,
    SampledSet,
    SamplingConfig,
    SetSampler,
    sample_set,
    short_numbers,
)
from torchrec_neuroshard.errors import ConfigError
from torchrec_neuroshard.profiles import zipf_profile
from torchrec_neuroshard.records import CostRecord
from torchrec_neuroshard.tables import DATA_TYPE_BYTES, OPTIMIZERS, TableConfig

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
BASE = tuple(
    TableConfig(
        name=f"real/{i}",
        num_embeddings=1_000 * (i + 1),
        embedding_dim=64,
        pooling_factor=1.0 + i % 7,
        profile=zipf_profile(
            batch_size=65_536,
            pooling_factor=1.0 + i % 7,
            num_embeddings=1_000 * (i + 1),
        ),
    )
    for i in range(40)
)
NUM_SETS = 200

_IN_ANOTHER_PROCESS = """
import json
from tests.collect.test_sampling import BASE, CONFIG, sample_set
sets = [sample_set(i, 9, CONFIG, BASE) for i in range(5)]
print(json.dumps([[t.to_json() for t in s.tables] for s in sets]))
"""


@pytest.fixture(scope="module")
def sets() -> list[SampledSet]:
    return [sample_set(i, 9, CONFIG, BASE) for i in range(NUM_SETS)]


def base_name(table: TableConfig) -> str:
    return table.name.rsplit("#", 1)[0]


def test_ranges_are_respected(sets: list[SampledSet]) -> None:
    for sampled in sets:
        tables = sampled.tables
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


def test_all_kinds_occur(sets: list[SampledSet]) -> None:
    tables = [t for s in sets for t in s.tables]
    assert {t.optimizer for t in tables} == {"rowwise_adagrad", "sgd"}
    assert {t.data_type for t in tables} == {"fp32", "fp16"} <= set(DATA_TYPE_BYTES)
    assert {t.weighted for t in tables} == {True, False}
    assert {t.embedding_dim % 16 for t in tables} == {0, 4, 8, 12}
    assert {t.num_features > 1 for t in tables} == {True, False}
    assert {t.name.split("/")[0] for t in tables} == {"real", "generated"}
    assert {len(s.tables) for s in sets} >= {1, 5, 10}
    # Usual batch sizes and unusual ones.
    assert {s.batch_size for s in sets} >= {1_024, 2_048}
    assert len({s.batch_size for s in sets}) > 50


def test_held_out_tables_are_never_trained_on(sets: list[SampledSet]) -> None:
    def real(held_out: bool) -> set[str]:
        return {
            base_name(t)
            for s in sets
            if s.held_out == held_out
            for t in s.tables
            if t.name.startswith("real")
        }

    assert real(True) and real(False)
    assert not real(True) & real(False)
    share = sum(s.held_out for s in sets) / len(sets)
    assert share == pytest.approx(CONFIG.held_out_sets, abs=0.1)


def test_repeats_point_to_the_same_set(sets: list[SampledSet]) -> None:
    repeats = [s for s in sets if s.repeat_of is not None]
    assert len(repeats) == pytest.approx(NUM_SETS / CONFIG.repeat_every, abs=4)
    for repeat in repeats:
        assert repeat.index % 5 == 4
        assert repeat.repeat_of is not None
        first = sets[repeat.repeat_of]
        assert first.repeat_of is None
        assert repeat.index - first.index >= CONFIG.repeat_lag
        assert repeat.tables == first.tables
        assert repeat.access == first.access
        assert (repeat.batch_size, repeat.held_out) == (
            first.batch_size,
            first.held_out,
        )
    # Every position of the cycle is measured again at some time.
    assert {s.repeat_of % 5 for s in repeats if s.repeat_of is not None} == {0, 1, 2, 3}


def test_index_and_seed_decide_the_set() -> None:
    first = sample_set(3, 9, CONFIG, BASE)
    assert first == sample_set(3, 9, CONFIG, BASE)
    assert first.tables != sample_set(3, 10, CONFIG, BASE).tables
    assert first.tables != sample_set(2, 9, CONFIG, BASE).tables


def test_another_process_samples_the_same(sets: list[SampledSet]) -> None:
    found = printed_elsewhere(_IN_ANOTHER_PROCESS, hash_seed=77)
    here = [[t.to_json() for t in s.tables] for s in sets[:5]]
    assert found == json.loads(json.dumps(here))


def test_generated_tables_alone() -> None:
    sampled = [sample_set(i, 1, CONFIG, []) for i in range(20)]
    assert all(t.name.startswith("generated") for s in sampled for t in s.tables)


def test_tables_that_are_never_read_are_left_out() -> None:
    idle = TableConfig(
        name="idle",
        num_embeddings=100,
        embedding_dim=8,
        profile=zipf_profile(batch_size=8, pooling_factor=0, num_embeddings=100),
    )
    for i in range(20):
        assert all(
            "idle" not in t.name for t in sample_set(i, 1, CONFIG, [idle]).tables
        )


def test_tight_limits_still_give_a_set() -> None:
    config = SamplingConfig(
        max_shards=3,
        batch_sizes=(512, 512),
        max_lookups=600,
        max_weight_bytes=2_000_000,
    )
    for i in range(30):
        sampled = sample_set(i, 0, config, BASE)
        assert len(sampled.tables) >= 1
        assert sum(t.weight_bytes for t in sampled.tables) <= 2_000_000
        lookups = sum(t.profile.num_lookups for t in sampled.tables if t.profile)
        assert lookups <= 600 * (1 + 1e-9)


def test_access_distribution_is_importable_from_here() -> None:
    assert np.sum(AccessDistribution.power_law(10, 1.0).num_ids) == 10


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"widths": (0, 8)}, r"widths needs 0 < low <= high, got \(0, 8\)"),
        ({"widths": (6, 16)}, r"widths must be multiples of 4, got \(6, 16\)"),
        ({"batch_sizes": (9, 8)}, "batch_sizes needs 0 < low <= high"),
        ({"rows": (-1, 8)}, "rows needs 0 < low <= high"),
        ({"max_shards": 0}, "max_shards and max_lookups must be at least 1"),
        ({"max_lookups": 0}, "max_shards and max_lookups must be at least 1"),
        ({"repeat_every": 1}, "repeat_every at least 2"),
    ],
)
def test_bad_configs_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SamplingConfig(**options)  # type: ignore[arg-type]


# The shipped measurements, and a GPU's sets

SHIPPED = Path(__file__).parents[2] / "benchmarks" / "data" / "compute_xeon.parquet"


def test_shipped_measurements_are_of_these_very_sets() -> None:
    """Sets of generated tables, which need no file of real ones to draw again."""
    table = pq.read_table(SHIPPED).slice(0, 60)
    header = json.loads(table.schema.metadata[b"neuroshard_header"])
    names = {f.name for f in dataclasses.fields(SamplingConfig)}
    options: dict[str, Any] = {
        k: tuple(v) if isinstance(v, list) else v
        for k, v in header["sampling"].items()
        if k in names
    }
    config = SamplingConfig(**options)
    records = [CostRecord.from_json(row) for row in table.to_pylist()]
    generated = [r for r in records if r.tables[0].name.startswith("generated")]
    assert len(generated) >= 15
    for record in generated:
        again = sample_set(record.index, header["seed"], config, BASE)
        assert again.batch_size == record.batch_size
        assert (again.repeat_of, again.held_out) == (record.repeat_of, record.held_out)
        for new, old in zip(again.tables, record.tables, strict=True):
            assert old.profile is not None and new.profile is not None
            assert dataclasses.replace(new, profile=None) == dataclasses.replace(
                old, profile=None
            )
            assert new.profile.num_lookups == old.profile.num_lookups
            assert new.profile.access_histogram == pytest.approx(
                old.profile.access_histogram, rel=1e-3, abs=1e-30
            )


def test_short_numbers_are_off_by_little() -> None:
    values = [*np.random.default_rng(0).lognormal(0, 9, 500), 0.0, 1.0, 2.5]
    short = short_numbers(values)
    assert short == pytest.approx(values, rel=2**-11)
    assert short[-3:] == [0.0, 1.0, 2.5] and short_numbers(short) == short


def test_real_tables_are_sorted_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for every set: there may be thousands of them."""
    asked: list[str] = []

    def is_held_out(name: str, share: float) -> bool:
        asked.append(name)
        return False

    monkeypatch.setattr(
        "torchrec_neuroshard.collect.sampling.is_held_out_table", is_held_out
    )
    sampler = SetSampler(CONFIG, 9, BASE)
    assert asked == [t.name for t in BASE if t.profile]
    for index in range(5):
        sampler.sample(index)
    assert len(asked) == len(BASE)


def test_a_cpu_is_measured_as_before() -> None:
    assert SamplingConfig.for_device("cpu") == SamplingConfig()


def test_a_gpu_gets_all_kinds_and_large_sets() -> None:
    config = SamplingConfig.for_device("cuda")
    sets = [sample_set(i, 4, config, []) for i in range(150)]
    tables = [t for s in sets for t in s.tables]
    assert {t.optimizer for t in tables} == set(OPTIMIZERS)
    assert {t.data_type for t in tables} == {"fp32", "fp16"}
    assert min(s.batch_size for s in sets) < 1_024
    assert max(s.batch_size for s in sets) > 40_000
    assert max(len(s.tables) for s in sets) > 70
    assert max(t.num_embeddings for t in tables) > 30_000_000
    lookups = [sum(t.profile.num_lookups for t in s.tables if t.profile) for s in sets]
    assert 10_000_000 < max(lookups) <= config.max_lookups


@pytest.mark.parametrize("gib", [16, 24, 80, 141, 288])
def test_sets_are_as_large_as_a_card_has_room_for(gib: int) -> None:
    memory = gib * 2**30
    config = SamplingConfig.for_device("cuda", memory)
    most = SamplingConfig.for_device("cuda")
    share = config.max_weight_bytes / memory
    assert 0.6 < share < 0.8 or config.max_weight_bytes == most.max_weight_bytes
    assert config.max_lookups == min(most.max_lookups, memory // 1_400)
    assert (config.max_lookups < most.max_lookups) == (gib < 131)


def test_adam_is_drawn_over_fp32_weights_alone() -> None:
    config = dataclasses.replace(SamplingConfig.for_device("cuda"), fp16_share=1.0)
    sets = [sample_set(i, 4, config, []) for i in range(60)]
    types = {(t.optimizer, t.data_type) for s in sets for t in s.tables}
    assert types == {
        ("adam", "fp32"),
        *((o, "fp16") for o in OPTIMIZERS if o != "adam"),
    }


@pytest.mark.parametrize(
    ("optimizer", "state_bytes"), [("adam", 8), ("adagrad", 4), ("sgd", 0)]
)
def test_state_counts_against_the_memory(optimizer: str, state_bytes: int) -> None:
    config = dataclasses.replace(
        CONFIG, optimizers=(optimizer,), max_shards=40, fp16_share=0.5
    )
    held = []
    for i in range(60):
        tables = sample_set(i, 2, config, []).tables
        values = sum(t.num_embeddings * t.embedding_dim for t in tables)
        held.append(sum(t.weight_bytes for t in tables) + values * state_bytes)
    assert 0.8 * config.max_weight_bytes < max(held) <= config.max_weight_bytes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizers": ("sgd", "lamb")}, "must be some of .*adagrad, got lamb"),
        ({"optimizers": ()}, "must be some of .*, got none"),
        ({"fp16_share": 1.5}, r"fp16_share must lie in 0 to 1, got 1\.5"),
    ],
)
def test_kinds_that_do_not_exist_are_refused(
    options: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        SamplingConfig(**options)  # type: ignore[arg-type]
