"""Iterations of batches whose lengths differ, against exact expectations."""

from __future__ import annotations

import dataclasses
import math
from random import Random
from typing import Any

import numpy as np
import pytest
from scipy import integrate, stats

from tests.builders import make_tables, make_task, search
from tests.fuzz import against_truth
from torchrec_neuroshard.costs.passes import TIMED
from torchrec_neuroshard.costs.schedules import DenseMs
from torchrec_neuroshard.costs.simulator import PredictedCosts, Simulator
from torchrec_neuroshard.costs.task import Placement, ShardingTask
from torchrec_neuroshard.report.parts import LengthReport
from torchrec_neuroshard.tables.profile import FeatureProfile
from torchrec_neuroshard.testing import AnalyticCommsModel, AnalyticCostModel

SAMPLES = 32
"""Samples of a rank."""
MEAN = 50.0
KERNELS = AnalyticCostModel(launch_ms=0.0, lookup_ns=1000.0, byte_ns=0.0)
FAST, SLOW = AnalyticCommsModel(gb_per_s=1e9), AnalyticCommsModel(gb_per_s=0.01)


def lengths(cv: float, common: float = 0.0, batch: float = 0.0) -> FeatureProfile:
    return FeatureProfile(
        batch_size=1,
        num_lookups=MEAN,
        pooling_std=cv * MEAN,
        common_std=common * cv * MEAN,
        batch_std=batch * MEAN,
    )


def task_of(profiles: list[FeatureProfile], ranks: int, **fields: Any) -> ShardingTask:
    pooled = fields.pop("pooled", False)
    tables = [
        dataclasses.replace(table, profile=profile, pooled=pooled)
        for table, profile in zip(
            make_tables([8] * len(profiles), 10**6, MEAN), profiles, strict=True
        )
    ]
    return make_task(tables, ranks, ranks * SAMPLES, **fields)


def one_each(task: ShardingTask, comms: AnalyticCommsModel = FAST) -> PredictedCosts:
    """Table t on rank t."""
    triples = [(t, 8, t % task.world_size) for t in range(len(task.tables))]
    placed = Placement.from_widths(task.world_size, triples, task)
    return Simulator(task, KERNELS, comms).evaluate(placed)


def largest(count: int, spread: float) -> float:
    """Expected maximum of gamma values of mean 1."""
    law = stats.gamma(spread**-2, scale=spread**2)

    def above(x: float) -> float:
        return float(1.0 - law.cdf(x) ** count)

    return float(integrate.quad(above, 0.0, 1.0 + 12 * spread)[0])


@pytest.mark.parametrize("cv", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_whole_tables_take_the_expected_maximum(ranks: int, cv: float) -> None:
    """Each rank has one table, whose ids are those of all ranks' samples."""
    costs = one_each(task_of([lengths(cv)] * ranks, ranks))
    spread = cv / math.sqrt(SAMPLES * ranks)
    expected = costs.critical_path_ms * largest(ranks, spread)
    # Forward and backward meet in an exchange, with the same batch.
    assert costs.expected_ms == pytest.approx(expected, rel=0.2 * spread)
    assert costs.expected_ms > costs.critical_path_ms


def test_the_expectation_is_that_of_enumerated_batches() -> None:
    """Samples have 0 or 100 ids. All numbers of long samples are enumerated."""
    costs = one_each(task_of([lengths(1.0)] * 2, 2))
    count = 2 * SAMPLES
    chance = stats.binom(count, 0.5).pmf(np.arange(count + 1))
    ids = 100.0 * np.arange(count + 1)
    slowest = np.maximum(ids[:, None], ids[None]) * chance[:, None] * chance[None]
    ms = float(slowest.sum()) * 1e-3 * 3  # 1 us an id; the backward takes twice as long
    assert costs.expected_ms == pytest.approx(ms, rel=0.01)


@pytest.mark.parametrize("common", [0.0, 0.6, 1.0])
def test_tables_of_one_rank_vary_together_as_far_as_they_share(common: float) -> None:
    """Two tables on each of two ranks, drawn sample by sample."""
    profiles = [lengths(1.0, common)] * 4
    costs = one_each(task_of(profiles, 2))
    rng = np.random.default_rng(0)
    shared = rng.normal(size=(2_000, 2 * SAMPLES, 1))
    own = rng.normal(size=(2_000, 2 * SAMPLES, 4))
    sums = (1 + common * shared + (1 - common**2) ** 0.5 * own).sum(axis=1)
    by_rank = np.maximum(sums[:, 0] + sums[:, 2], sums[:, 1] + sums[:, 3])
    expected = by_rank.mean() / (4 * SAMPLES)
    found = costs.expected_ms / costs.critical_path_ms
    assert found - 1 == pytest.approx(expected - 1, abs=0.004)


def test_rows_over_all_ranks_vary_together() -> None:
    kind = {"sharding_types": ("row_wise",) * 2, "min_widths": (8, 8)}
    task = task_of([lengths(1.0)] * 2, 2, **kind)
    triples = [(t, 8, rank) for t in range(2) for rank in range(2)]
    placed = Placement.from_widths(2, triples, task)
    costs = Simulator(task, KERNELS, FAST).evaluate(placed)
    assert costs.expected_ms == pytest.approx(costs.critical_path_ms, rel=2e-3)
    # Batches of all ranks are longer or shorter, so some iterations are.
    assert np.quantile(costs.drawn_ms(), 0.95) > 1.05 * costs.critical_path_ms


def test_replicas_look_up_their_own_samples() -> None:
    kind = {"sharding_types": ("data_parallel",), "min_widths": (8,)}
    for ranks in (2, 8):
        task = task_of([lengths(1.0)], ranks, **kind)
        triples = [(0, 8, rank) for rank in range(ranks)]
        placed = Placement.from_widths(ranks, triples, task)
        costs = Simulator(task, KERNELS, FAST).evaluate(placed)
        kernels = costs.critical_path_ms * largest(ranks, SAMPLES**-0.5)
        assert costs.expected_ms == pytest.approx(kernels, rel=0.03)


@pytest.mark.parametrize("pooled", [True, False])
def test_only_sequences_exchange_more_for_longer_samples(pooled: bool) -> None:
    costs = one_each(task_of([lengths(1.0)] * 4, 4, pooled=pooled), SLOW)
    assert costs.lengths is not None
    phases = costs.lengths.phases_DWS6[:, 0, 0]
    for name in ("fwd_comms", "bwd_comms"):
        factors = phases[:, TIMED.index(name)]
        if pooled:
            assert (factors == 1).all()
        else:  # the rank with most ids of four tables
            expected = largest(4, 1 / math.sqrt(4 * SAMPLES))
            assert factors.mean() == pytest.approx(expected, rel=0.02)
    assert phases[:, TIMED.index("index_comms")].std() > 0


def test_dense_layers_wait_for_the_rank_with_most_tokens() -> None:
    costs = one_each(task_of([lengths(1.5, common=1.0)], 8))
    task = dataclasses.replace(
        costs, dense=DenseMs(forward=1e6, backward=2e6, optimizer=5e5)
    )
    spread = 1.5 / math.sqrt(SAMPLES)
    expected = 5e5 + 3e6 * largest(8, spread)
    assert task.expected_ms == pytest.approx(expected, rel=0.01)
    # A shuffler balances the layers.
    assert task.drawn_ms(even=True).mean() == pytest.approx(3.5e6, rel=1e-3)
    report = LengthReport.of(task)
    assert report is not None
    assert report.share == pytest.approx(1 - 3.5e6 / expected, abs=0.005)
    assert report.added_ms == pytest.approx(expected - 3.5e6, rel=0.03)
    assert report.p95_ms > task.expected_ms


def test_whole_batches_differ_however_many_samples_they_have() -> None:
    costs = one_each(task_of([lengths(0.0, batch=0.2)] * 4, 4))
    assert costs.lengths is not None
    dense = costs.lengths.dense_D.mean()
    assert dense == pytest.approx(largest(4, 0.2), rel=0.03)
    # All tables are read by the same long batches.
    assert costs.expected_ms == pytest.approx(costs.critical_path_ms, rel=2e-3)


def test_equal_lengths_change_nothing() -> None:
    for profile in (lengths(0.0), lengths(0.05)):  # too little to matter
        costs = one_each(task_of([profile] * 2, 2))
        assert costs.lengths is None
        assert costs.expected_ms == costs.critical_path_ms
        assert LengthReport.of(costs) is None


def with_lengths(task: ShardingTask, rng: np.random.Generator) -> ShardingTask:
    """The same task with tables of sequences, whose lengths differ."""
    made = {}
    for table in task.tables:
        mean, cv = float(rng.choice([5, 50, 500])), float(rng.choice([0.5, 1, 1.5]))
        std, common = cv * mean, float(rng.choice([0, 0.5, 1]))
        read = FeatureProfile(
            batch_size=1, num_lookups=mean, pooling_std=std, common_std=common * std
        )
        if table.name not in made:
            made[table.name] = dataclasses.replace(
                table,
                pooled=False,
                weighted=False,
                num_features=1,
                outputs_per_sample=None,
                pooling_factor=mean,
                profile=read,
            )
    tables = tuple(made[table.name] for table in task.tables)
    return dataclasses.replace(task, tables=tables, batch_size=16 * task.world_size)


def test_the_search_finds_the_least_expected_iteration() -> None:
    """Against every placement of small tasks of all sharding types."""
    losses = []
    for seed in range(40):
        case = against_truth.draw(Random(seed))
        models = against_truth.models(case["models"])
        try:
            task = with_lengths(against_truth.build(case), np.random.default_rng(seed))
        except ValueError:
            continue
        if not 4 < math.prod(map(len, against_truth.choices(task))) <= 200:
            continue
        simulator = Simulator(task, *models)
        every = against_truth.placements(task)
        costs = [simulator.evaluate(p).expected_ms for p in every]
        if costs:
            found = search(task, None, *models).placement
            losses.append(simulator.evaluate(found).expected_ms / min(costs) - 1)
    assert len(losses) > 5
    assert min(losses) > -1e-9 and max(losses) < 0.02
    assert (np.array(losses) < 1e-6).mean() > 0.85
