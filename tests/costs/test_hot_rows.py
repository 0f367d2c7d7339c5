"""Row shards of a table whose ids are not spread evenly, priced by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from tests.builders import make_task, search
from torchrec_neuroshard.costs.simulator import ANY_ROW, Simulator
from torchrec_neuroshard.costs.task import Placement, ShardingTask
from torchrec_neuroshard.search.choices import Choices
from torchrec_neuroshard.search.shards import ShardBank
from torchrec_neuroshard.tables.profile import FeatureProfile, profile_ids
from torchrec_neuroshard.tables.table import TableConfig
from torchrec_neuroshard.testing.analytic import AnalyticCommsModel, AnalyticCostModel

RANKS, ROWS, BATCH, LENGTH = 4, 4_000, 400, 20
LOOKUPS = BATCH * LENGTH
LAUNCH, LOOKUP = 0.5, 1_000.0


def profile_of(share: float, hot: int = 0) -> FeatureProfile:
    """A batch in which one id has a share of the lookups, and all others the rest."""
    rng = np.random.default_rng(5)
    ids = rng.integers(0, ROWS, LOOKUPS)
    ids[: round(share * LOOKUPS)] = hot
    return profile_ids(rng.permutation(ids), np.full(BATCH, LENGTH))


def table_of(profile: FeatureProfile, name: str = "t0", **fields: Any) -> TableConfig:
    return TableConfig(
        name=name,
        num_embeddings=ROWS,
        embedding_dim=16,
        pooling_factor=LENGTH,
        profile=profile,
        **fields,
    )


def row_wise(*tables: TableConfig, **fields: Any) -> ShardingTask:
    kinds: dict[str, Any] = {
        "sharding_types": ("row_wise",) * len(tables),
        "min_widths": tuple(t.embedding_dim for t in tables),
    }
    return make_task(tables, RANKS, BATCH, **(kinds | fields))


def simulator(task: ShardingTask) -> Simulator:
    model = AnalyticCostModel(launch_ms=LAUNCH, lookup_ns=LOOKUP, byte_ns=0.0)
    return Simulator(task, model, AnalyticCommsModel(gb_per_s=0.001))


def on_every_rank(task: ShardingTask, table: int = 0) -> Placement:
    width = task.tables[table].embedding_dim
    triples = [(table, width, rank) for rank in range(task.world_size)]
    return Placement.from_widths(task.world_size, triples, task)


def shares_of(profile: FeatureProfile) -> list[float]:
    assert profile.hot_rows is not None
    part = ROWS // RANKS
    starts = range(0, ROWS, part)
    return list(profile.hot_rows.shares(starts, [part] * RANKS, ROWS))


@pytest.mark.parametrize("hot", [0, ROWS - 1])
def test_kernels_and_ids_follow_the_lookups_of_each_rank(hot: int) -> None:
    profile = profile_of(0.62, hot)
    task = row_wise(table_of(profile))
    found = simulator(task)
    shares = shares_of(profile)
    busiest = hot // (ROWS // RANKS)
    assert shares[busiest] == pytest.approx(0.62 + 0.38 / RANKS, abs=0.02)
    placement = on_every_rank(task)
    expected = [LAUNCH + s * LOOKUPS * LOOKUP * 1e-6 for s in shares]
    ranks = found.evaluate(placement).ranks
    assert [r.fwd_compute for r in ranks] == pytest.approx(expected, rel=1e-6)
    loads = found.rank_loads(placement).loads_CWS3[:, 0]
    lengths = 8 * BATCH
    assert loads[:, 0] == pytest.approx([8 * LOOKUPS * s + lengths for s in shares])
    # Every rank returns a partial sum of each bag.
    assert loads[:, 1] == pytest.approx([16.0] * RANKS)


def test_outputs_of_sequences_follow_the_lookups_of_each_rank() -> None:
    profile = profile_of(0.62)
    task = row_wise(table_of(profile, pooled=False))
    loads = simulator(task).rank_loads(on_every_rank(task)).loads_CWS3[:, 0]
    assert loads[:, 1] == pytest.approx([16 * LENGTH * s for s in shares_of(profile)])


def test_tables_that_are_read_evenly_cost_and_encode_as_without_ranges() -> None:
    known = profile_of(0.0)
    unknown = dataclasses.replace(known, hot_rows=None)
    found = []
    for profile in (known, unknown):
        task = row_wise(table_of(profile))
        made = simulator(task)
        predicted = made.evaluate(on_every_rank(task))
        bank = ShardBank(made)
        bank.rows(np.zeros(RANKS), np.full(RANKS, 16), np.arange(RANKS))
        found.append((predicted, made.encoder.num_parts, made.skewed_T.tolist()))
    assert found[0] == found[1]
    assert found[0][1:] == (2, [False]), "the whole table and one part"


def test_the_bank_of_a_search_prices_each_rank_like_the_evaluator() -> None:
    profiles = [profile_of(0.62), profile_of(0.0), profile_of(0.3, hot=2_500)]
    tables = [table_of(p, f"t{i}") for i, p in enumerate(profiles)]
    kinds = ("row_wise", "row_wise", "table_row_wise")
    task = row_wise(*tables, sharding_types=kinds, node_size=2)
    made = simulator(task)
    assert made.skewed_T.tolist() == [True, False, True]
    bank = ShardBank(made)
    for table, first in [(0, 0), (1, 0), (2, 2)]:
        size = task.block_size(table)
        ranks = np.arange(first, first + size)
        part = ROWS // size
        row = bank.rows(np.full(size, table), np.full(size, 16), ranks)
        priced = made.price(
            np.full(size, table),
            np.full(size, 16),
            np.full(size, part),
            np.arange(size) * part,
        )
        assert bank.encoding(row) == pytest.approx(priced.encoding_NE)
        assert bank.loads_of(row) == pytest.approx(priced.loads_N3)
    place, rank, count = bank.parts(np.arange(3))
    assert place.tolist() == [0] * RANKS + [1] + [2] * 2
    assert rank.tolist() == [0, 1, 2, 3, 0, 0, 1]
    assert count.tolist() == [1] * RANKS + [RANKS] + [1] * 2
    # The part of no rank in particular stands for the mean of the block.
    mean = bank.loads_of(bank.rows([0], [16]))[0]
    each = bank.loads_of(bank.rows(np.zeros(RANKS), np.full(RANKS, 16), np.arange(4)))
    assert mean == pytest.approx(each.mean(axis=0))


@pytest.mark.parametrize("pooled", [True, False])
def test_choices_see_the_busiest_rank_of_a_row_wise_table(pooled: bool) -> None:
    task = row_wise(table_of(profile_of(0.62), pooled=pooled))
    made = simulator(task)
    [cost] = Choices(ShardBank(made)).costs(np.array([[0]]))
    expected = made.evaluate(on_every_rank(task)).critical_path_ms
    assert cost == pytest.approx(expected)
    even = simulator(row_wise(table_of(profile_of(0.0), pooled=pooled)))
    assert expected > 1.1 * even.evaluate(on_every_rank(task)).critical_path_ms


def test_choices_spread_hot_places_over_the_nodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    task = row_wise(
        table_of(profile_of(0.62)), sharding_types=("table_row_wise",), node_size=2
    )
    made = simulator(task)
    choices = Choices(ShardBank(made))
    seen: list[Any] = []

    def comms_costs(loads_CWS3: Any) -> Any:
        seen.append(loads_CWS3)
        return np.zeros(loads_CWS3.shape)

    monkeypatch.setattr(made, "comms_costs", comms_costs)
    choices.costs(np.array([[0]]))
    profile = task.tables[0].profile
    assert profile is not None and profile.hot_rows is not None
    half = ROWS // 2
    first, second = profile.hot_rows.shares([0, half], [half, half], ROWS)
    ids = 8 * LOOKUPS * np.array([first, second, first, second]) / 2
    # The table is on one of two nodes.
    assert seen[0][0, :, 0, 0] == pytest.approx(ids + 8 * BATCH / 2)


def test_shards_of_no_place_are_priced_evenly() -> None:
    made = simulator(row_wise(table_of(profile_of(0.62))))
    part = np.array([ROWS // RANKS])
    one = np.array([0]), np.array([16]), part
    even = made.price(*one)
    assert made.price(*one, np.array([ANY_ROW])).loads_N3.tolist() == (
        even.loads_N3.tolist()
    )
    assert even.loads_N3[0, 0] == pytest.approx(8 * LOOKUPS / RANKS + 8 * BATCH)
    assert made.price(*one, np.array([0])).loads_N3[0, 0] > 2 * even.loads_N3[0, 0]


@pytest.mark.parametrize(
    ("share", "expected"), [(0.0, "row_wise"), (0.7, "column_wise")]
)
def test_a_search_avoids_row_wise_for_padded_tables(
    share: float, expected: str
) -> None:
    """Whole rows are cheaper than columns, since every column shard gets all ids."""
    tables = [table_of(profile_of(share), f"t{i}") for i in range(2)]
    kinds = ("column_wise", "row_wise")
    task = make_task(
        [t for t in tables for _ in kinds],
        RANKS,
        BATCH,
        sharding_types=kinds * 2,
        min_widths=(4, 16) * 2,
        groups=(0, 1, 0, 1),
        stages=(0, 1),
        alternatives=((0, 1), (2, 3)),
        stage_names=("column_wise", "row_wise"),
        modules=(0, 0),
    )
    model = AnalyticCostModel(launch_ms=0.01, lookup_ns=LOOKUP)
    result = search(task, None, model, AnalyticCommsModel())
    held = {task.sharding_types[s.table] for s in result.placement.shards}
    assert held == {expected}
    again = Simulator(task, model, AnalyticCommsModel()).evaluate(result.placement)
    assert again.critical_path_ms == pytest.approx(result.predicted.critical_path_ms)
