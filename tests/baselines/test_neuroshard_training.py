"""Training NeuroShard's nets, on what was measured and on what a model says."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from torchrec_neuroshard.baselines.neuroshard_models import (
    PAPER_FEATURES,
    PAPER_WIDTHS,
    CommsNets,
    ComputeNet,
    shard_features,
)
from torchrec_neuroshard.baselines.neuroshard_training import (
    FitReport,
    PaperTrainConfig,
    comparable_records,
    draw_columns,
    draw_set,
    fit_comms,
    fit_comms_to_model,
    fit_compute,
    fit_compute_to_model,
    measured_samples,
    place_at_random_level,
    predict_records,
)
from torchrec_neuroshard.errors import ConfigError, RecordError
from torchrec_neuroshard.features import ShardFeaturizer
from torchrec_neuroshard.record_store import read_comms_records, read_records
from torchrec_neuroshard.records import CommsRecord, CostRecord
from torchrec_neuroshard.tables import TableConfig
from torchrec_neuroshard.testing import AnalyticCommsModel, AnalyticCostModel

DATA = Path(__file__).parents[2] / "benchmarks" / "data"
COLLECTIVES = DATA / "comms_gloo_epyc.parquet"
QUICK = PaperTrainConfig(epochs=2, batch_samples=64)


class Level(np.random.Generator):
    """Draws one number for everything from 0 to 1."""

    level = 0.0

    def random(self, *args: object, **kwargs: object) -> float:  # type: ignore[override]
        return self.level


def test_placement_by_level() -> None:
    # Level 0: never random. 8 | 4, 4 joins 4, 2 goes to the first of two equals.
    held = place_at_random_level(Level(np.random.PCG64(0)), [2, 4, 8, 4], 2)
    assert held.tolist() == [10, 8]
    rng = np.random.default_rng(0)
    drawn = np.array([place_at_random_level(rng, [4] * 8, 4) for _ in range(200)])
    assert (drawn.sum(axis=1) == 32).all()
    assert drawn.max() > 16 and (drawn == 8).all(axis=1).any()


@pytest.fixture(scope="module")
def measured() -> list[CostRecord]:
    return read_records([DATA / "compute_epyc_zen4.parquet"])[1]


def test_trained_on_measured_sets_it_beats_their_mean(
    measured: list[CostRecord],
) -> None:
    held_out = comparable_records((r for r in measured if r.held_out), "sgd")
    training = [r for r in measured if not r.held_out]
    config = PaperTrainConfig(epochs=30, batch_samples=128)
    net, report = fit_compute(training, config)
    sets = comparable_records(training, "sgd")
    parts = (report.num_training, report.num_validation, report.num_test)
    assert sum(parts) == len(sets)
    assert parts[1:] == (len(sets) // 10, len(sets) // 10)
    assert report.test_mse < 0.3 * report.mean_test_mse
    cost = np.array([r.total_ms for r in held_out])
    error = np.square(predict_records(net, held_out) - cost).mean()
    of_mean = np.square(np.mean([r.total_ms for r in sets]) - cost).mean()
    assert error < 0.3 * of_mean


def augmented(tables: Sequence[TableConfig]) -> list[TableConfig]:
    return [t.with_width(width) for t in tables for width in PAPER_WIDTHS]


def test_statistics_are_those_of_the_augmented_tables(
    measured: list[CostRecord],
) -> None:
    records = comparable_records(measured, "sgd")[:40]
    net, _ = fit_compute(records, QUICK)
    every = np.concatenate(
        [shard_features(augmented(r.tables), r.batch_size) for r in records]
    ).astype(np.float64)
    np.testing.assert_allclose(net.mean_F, every.mean(axis=0), rtol=1e-5)
    np.testing.assert_allclose(net.std_F, every.std(axis=0) + 1e-6, rtol=1e-5)


def test_same_seed_same_weights(measured: list[CostRecord]) -> None:
    records = comparable_records(measured, "rowwise_adagrad")[:40]
    config = dataclasses.replace(QUICK, optimizer="rowwise_adagrad")
    nets = [fit_compute(records, config)[0] for _ in range(2)]
    other = fit_compute(records, dataclasses.replace(config, seed=1))[0]
    first, second, third = (predict_records(n, records) for n in (*nets, other))
    np.testing.assert_array_equal(first, second)
    assert (first != third).all()


def test_only_sets_of_the_kind_asked_for_are_trained_on(
    measured: list[CostRecord],
) -> None:
    chosen = comparable_records(measured, "sgd")
    assert {t.optimizer for r in chosen for t in r.tables} == {"sgd"}
    assert {t.data_type for r in chosen for t in r.tables} == {"fp32"}
    assert not any(t.weighted or r.repeat_of for r in chosen for t in r.tables)
    assert 1_000 < len(chosen) < len(measured) / 2


def test_too_few_records_are_named(measured: list[CostRecord]) -> None:
    few = comparable_records(measured, "sgd")[:2]
    with pytest.raises(RecordError, match="2 sets with sgd, fp32 are too few"):
        fit_compute(few, QUICK)
    with pytest.raises(RecordError, match="0 samples of the forward all-to-all of 5"):
        fit_comms([], 5, QUICK)


def collective(
    index: int,
    columns: Sequence[float],
    transfer: Sequence[float],
    name: str = "pooled_forward",
    repeat_of: int | None = None,
) -> CommsRecord:
    """All ranks send to each other what `columns` of 65,536 samples are."""
    world_size = len(columns)
    return CommsRecord(
        index=index,
        repeat_of=repeat_of,
        collective=name,
        world_size=world_size,
        local_world_size=world_size,
        bytes_per_peer=tuple(int(c * 4 * 65_536 / world_size) for c in columns),
        num_passes=2,
        spread=0.25,
        reference_ms=1.0,
        transfer_ms=tuple(transfer),
    )


def test_measured_samples_are_of_one_world_size_and_collective() -> None:
    records = [
        collective(0, [16, 48], [5.0, 6.0]),
        collective(1, [16, 48], [5.0, 6.0], repeat_of=0),
        collective(2, [16, 48, 8], [1.0] * 3),
        collective(3, [32, 8], [7.0, 8.0], "pooled_backward"),
    ]
    forward = measured_samples(records, 2, "pooled_forward")
    # Columns, then when each rank starts after the first.
    np.testing.assert_allclose(forward.inputs_SI, [[16, 48, 0, 0]])
    np.testing.assert_allclose(forward.target_SW, [[5, 6]])
    backward = measured_samples(records, 2, "pooled_backward")
    np.testing.assert_allclose(backward.inputs_SI, [[32, 8]])
    np.testing.assert_allclose(backward.target_SW, [[7, 8]])


def comms_records(world_size: int, count: int, seed: int = 0) -> list[CommsRecord]:
    """Times that grow with a rank's columns."""
    rng = np.random.default_rng(seed)
    records = []
    for index in range(count):
        columns = rng.integers(1, 200, world_size)
        transfer = (1 + 0.1 * columns).tolist()
        name = ("pooled_backward", "pooled_forward")[index % 2]
        records.append(collective(index, columns.tolist(), transfer, name))
    return records


def test_comms_nets_learn_what_every_rank_takes() -> None:
    config = PaperTrainConfig(epochs=100, batch_samples=64)
    _, forward, backward = fit_comms(comms_records(3, 800), 3, config)
    assert forward.test_mse < 0.1 * forward.mean_test_mse
    assert backward.test_mse < 0.1 * backward.mean_test_mse


@pytest.mark.skipif(not COLLECTIVES.exists(), reason="no measured collectives")
def test_measured_collectives_are_told_better_than_by_their_mean() -> None:
    records = read_comms_records([COLLECTIVES])[0][1]
    ratios = []
    for seed in range(3):  # few samples to judge by: other splits, too
        config = PaperTrainConfig(epochs=60, batch_samples=32, seed=seed)
        _, forward, backward = fit_comms(records, 4, config)
        ratios.append([r.test_mse / r.mean_test_mse for r in (forward, backward)])
    assert (np.median(ratios, axis=0) < 0.9).all()


def imitate(config: PaperTrainConfig) -> tuple[CommsNets, FitReport, FitReport]:
    return fit_comms_to_model(
        AnalyticCommsModel(gb_per_s=0.1),
        draw_columns,
        world_size=4,
        batch_sizes=[4_096, 8_192],
        num_samples=600,
        config=config,
    )


def test_imitated_model_is_told_better_than_by_its_mean() -> None:
    _, forward, backward = imitate(PaperTrainConfig(epochs=60, batch_samples=32))
    assert forward.test_mse < 0.4 * forward.mean_test_mse
    assert backward.test_mse < 0.1 * backward.mean_test_mse


def test_imitation_is_the_same_for_the_same_seed() -> None:
    assert imitate(QUICK)[1:] == imitate(QUICK)[1:]
    assert imitate(QUICK)[1:] != imitate(dataclasses.replace(QUICK, seed=1))[1:]


def some_tables() -> list[TableConfig]:
    rng = np.random.default_rng(0)
    return [
        TableConfig(
            name=f"t{i}",
            num_embeddings=int(10 ** rng.uniform(2, 6)),
            embedding_dim=64,
            pooling_factor=float(2 ** rng.uniform(-1, 6)),
        )
        for i in range(30)
    ]


def imitate_kernels(config: PaperTrainConfig) -> tuple[ComputeNet, FitReport]:
    return fit_compute_to_model(
        AnalyticCostModel(),
        some_tables(),
        batch_sizes=[1_024, 4_096],
        num_samples=1_000,
        config=config,
    )


def test_imitated_kernels_are_told_better_than_by_their_mean() -> None:
    config = PaperTrainConfig(epochs=40, batch_samples=64, learning_rate=3e-3)
    net, report = imitate_kernels(config)
    assert (report.num_training, report.num_test) == (800, 100)
    assert report.test_mse < 0.1 * report.mean_test_mse
    tables = augmented(some_tables())
    every = np.concatenate([shard_features(tables, b) for b in (1_024, 4_096)])
    np.testing.assert_allclose(net.mean_F, every.mean(axis=0, dtype=float), rtol=1e-4)
    # Labels are the model's: a table of 20 lookups a sample costs what it says.
    table = dataclasses.replace(some_tables()[0], pooling_factor=20.0)
    wanted = AnalyticCostModel().predict_sets(
        ShardFeaturizer([table], 4_096).features([0], [64]), np.zeros(1, np.int64), 1
    )
    with torch.no_grad():
        features = torch.from_numpy(shard_features([table], 4_096))
        told = float(net(features, torch.zeros(1, dtype=torch.int64), 1)[0])
    assert told == pytest.approx(float(wanted.sum()), rel=0.3)


def test_imitated_kernels_are_the_same_for_the_same_seed() -> None:
    assert imitate_kernels(QUICK)[1] == imitate_kernels(QUICK)[1]
    other = dataclasses.replace(QUICK, seed=1)
    assert imitate_kernels(QUICK)[1] != imitate_kernels(other)[1]


def test_sets_have_any_number_of_tables_as_often() -> None:
    """Whatever fits: drawing the number again as well would leave large sets out."""
    rng = np.random.default_rng(0)
    size_L = np.array([1e6] * 9 + [3.9e9])
    drawn = [draw_set(rng, size_L) for _ in range(2_000)]
    assert max(float(size_L[d].sum()) for d in drawn) <= 4e9
    assert np.mean([len(d) for d in drawn]) == pytest.approx(8.0, abs=0.3)
    with pytest.raises(ConfigError, match=r"100,000 draws of .*lower --max-rows"):
        draw_set(rng, np.array([5e9]))


def test_kernels_are_imitated_at_the_widths_given() -> None:
    net, _ = fit_compute_to_model(
        AnalyticCostModel(),
        some_tables(),
        batch_sizes=[1_024],
        num_samples=300,
        config=QUICK,
        widths=[12, 256],
    )
    assert float(net.mean_F[PAPER_FEATURES.index("dim")]) == 134


def test_longer_offsets_make_longer_waits() -> None:
    means = []
    for longest in (19.0, 190.0):
        nets, *_ = fit_comms_to_model(
            AnalyticCommsModel(),
            draw_columns,
            world_size=2,
            batch_sizes=[4_096],
            num_samples=400,
            config=QUICK,
            longest_offset_ms=longest,
        )
        means.append(float(nets.forward.mean_I[2:].mean()))
    assert means[1] == pytest.approx(10 * means[0])
    assert 1.0 < means[0] < 5.0  # a rank's mean offset, of 10 ms at most on average


def test_bad_settings_are_named() -> None:
    with pytest.raises(ConfigError, match="epochs"):
        PaperTrainConfig(epochs=0)
    with pytest.raises(ConfigError, match="validation_share"):
        PaperTrainConfig(validation_share=0.6, test_share=0.4)
    with pytest.raises(ConfigError, match="unknown optimizer 'lion'; one of"):
        PaperTrainConfig(optimizer="lion")
