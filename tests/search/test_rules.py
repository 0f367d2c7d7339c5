"""Rules on ranks: kept wherever they can be, named where they cannot."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest

from tests.builders import draw_memory, draw_tables, make_tables, make_task, search
from torchrec_neuroshard.errors import ConfigError, InfeasibleError
from torchrec_neuroshard.placement import HostRows, KernelFactors, ShardingTask
from torchrec_neuroshard.search import NeuroShardSearcher, SearchConfig, SearchResult
from torchrec_neuroshard.search.exhaustive import ExhaustiveSearcher
from torchrec_neuroshard.search.feasibility import pack
from torchrec_neuroshard.search.refine import Plan
from torchrec_neuroshard.search.rules import (
    check_constraints,
    follow,
)
from torchrec_neuroshard.search.shards import (
    Ints,
    ShardBank,
    placement_from_widths,
)
from torchrec_neuroshard.simulator import Simulator
from torchrec_neuroshard.tables import TableConfig
from torchrec_neuroshard.testing import AnalyticCommsModel, AnalyticCostModel

COMMS = AnalyticCommsModel(gb_per_s=10.0)
COMPUTE = AnalyticCostModel(launch_ms=0.05)


def some_tables(count: int, seed: int = 0, most: int = 12) -> tuple[TableConfig, ...]:
    rng = np.random.default_rng([11, seed, count])
    return draw_tables(rng, count, [4, 8, 12, 64][: 3 + (most > 12)])


def draw_rules(
    rng: np.random.Generator, count: int, world_size: int, share: float
) -> dict[str, Any]:
    """Some tables with few ranks, some sets of either kind."""
    allowed = tuple(
        tuple(np.flatnonzero(rng.random(world_size) < 0.6).tolist())
        if rng.random() < share
        else ()
        for _ in range(count)
    )

    def sets(chance: float) -> tuple[tuple[int, ...], ...]:
        if rng.random() > chance:
            return ()
        size = int(rng.integers(2, min(count, 4)))
        return (tuple(rng.choice(count, size, replace=False).tolist()),)

    return {
        "allowed_ranks": allowed,
        "together": sets(0.5),
        "apart": sets(0.6) + sets(0.3),
    }


def tiny_task(seed: int) -> ShardingTask:
    """Few tables on three ranks, with rules of all kinds."""
    rng = np.random.default_rng([13, seed])
    count = int(rng.integers(3, 5))
    found = some_tables(count, seed)
    memory: tuple[int, ...] = ()
    if seed % 2:
        memory = draw_memory(rng, found, 3, total=1.6, evenness=20.0)
    groups = tuple(int(g) for g in rng.integers(0, 2, count)) if seed % 3 else ()
    groups = groups if max(groups, default=0) else ()
    return make_task(
        found,
        3,
        4096,
        memory_bytes=memory,
        groups=groups,
        stages=(0, 1) if groups and seed % 2 == 0 else (),
        uneven=seed % 4 != 1,
        **draw_rules(rng, count, 3, 0.4),
    )


def refined(task: ShardingTask, **options: Any) -> SearchResult:
    return search(task, SearchConfig(exhaustive_limit=0, **options), COMPUTE, COMMS)


def test_a_plan_is_found_exactly_where_there_is_one() -> None:
    """By looking at every placement, and the plan is as good as any of them."""
    ratios, outcomes = [], []
    for seed in range(60):
        task = tiny_task(seed)
        try:
            best = ExhaustiveSearcher().search(task, COMPUTE, COMMS)
        except (InfeasibleError, ConfigError):
            with pytest.raises((InfeasibleError, ConfigError)):
                refined(task)
            outcomes.append(False)
            continue
        best.placement.check(task)
        result = refined(task, restarts=3)
        result.placement.check(task)
        optimum = best.predicted.critical_path_ms
        ratios.append(result.predicted.critical_path_ms / optimum)
        assert result.lower_bound_ms <= optimum * (1 + 1e-9), f"task {seed}"
        outcomes.append(True)
    assert outcomes.count(True) >= 30 and outcomes.count(False) >= 8
    assert np.mean(np.array(ratios) <= 1 + 1e-9) >= 0.95
    assert max(ratios) <= 1.01


def test_exhaustive_search_drops_what_rules_forbid_and_nothing_else() -> None:
    """Against the placement's own check of every placement of whole tables."""
    for seed in range(12):
        task = dataclasses.replace(tiny_task(seed), max_shards=())
        task = dataclasses.replace(task, max_shards=(1,) * len(task.tables))
        simulator = Simulator(task, COMPUTE, COMMS)
        costs = []
        for ranks in itertools.product(range(3), repeat=len(task.tables)):
            width_TW = np.zeros((len(task.tables), 3), dtype=np.int64)
            for table, rank in enumerate(ranks):
                width_TW[table, rank] = task.tables[table].embedding_dim
            placement = placement_from_widths(width_TW)
            try:
                placement.check(task)
            except ValueError:
                continue
            costs.append(simulator.evaluate(placement).critical_path_ms)
        if not costs:
            with pytest.raises((InfeasibleError, ConfigError)):
                ExhaustiveSearcher().search(task, COMPUTE, COMMS)
            continue
        best = ExhaustiveSearcher().search(task, COMPUTE, COMMS)
        assert best.predicted.critical_path_ms == pytest.approx(min(costs))


def wide_task(seed: int = 0, **options: Any) -> ShardingTask:
    """Thirty tables on eight ranks."""
    return ShardingTask(
        tables=some_tables(30, seed, most=64), world_size=8, batch_size=4096, **options
    )


RULES: dict[str, dict[str, Any]] = {
    "allowed": {
        "allowed_ranks": tuple((i % 3, 4) if i < 20 else () for i in range(30))
    },
    "pinned": {"allowed_ranks": tuple((i % 5,) if i % 2 else () for i in range(30))},
    "together": {"together": ((0, 7, 9), (2, 3), (11, 12, 13, 14))},
    "apart": {"apart": (tuple(range(8)), (8, 9, 10))},
    "all": {
        "allowed_ranks": tuple((0, 1, 2) if 4 <= i < 9 else () for i in range(30)),
        "together": ((4, 20), (21, 22)),
        "apart": ((4, 5), (20, 21, 23), (5, 6, 7)),
    },
}


@pytest.mark.parametrize("kind", sorted(RULES))
def test_rules_are_kept_and_not_more_than_they_cost(kind: str) -> None:
    free = refined(wide_task(), effort=0.5)
    task = wide_task(**RULES[kind])
    result = refined(task, effort=0.5)
    result.placement.check(task)
    assert 0 < result.lower_bound_ms <= result.predicted.critical_path_ms
    # Without rules nothing is lost: the free plan is at least nearly as good.
    bound = free.lower_bound_ms
    assert result.predicted.critical_path_ms >= bound


def test_rules_that_ask_for_nothing_change_nothing() -> None:
    task = wide_task()
    every = tuple(range(8))
    same = wide_task(allowed_ranks=(every,) * 30, together=((3,),), apart=((4,), ()))
    same = dataclasses.replace(same, max_shards=task.max_shards)
    assert refined(same, effort=0.2).placement == refined(task, effort=0.2).placement


@pytest.mark.parametrize(("memory", "in_host"), [(9600, 0), (9000, 1), (6000, 2)])
def test_tables_that_lie_together_choose_their_ways_as_one(
    memory: int, in_host: int
) -> None:
    """Three of 3200 bytes, of which none, the first or the first two are in the host.

    Another one lies where it likes.
    """
    tables = make_tables([32] * 4, 100, (9.0, 5.0, 5.0, 1.0), data_type="int8")
    ways = [*itertools.product(range(3), repeat=2), (3, 0)]
    is_out = [table < number for table, number in ways]
    slow = KernelFactors(forward=5.0, host=HostRows(gb_per_s=10.0))
    task = make_task(
        [tables[table] for table, _ in ways],
        2,
        memory_bytes=(memory, 3200),
        column_bytes=tuple(0.0 if out else 100.0 for out in is_out),
        kernels=tuple(slow if out else None for out in is_out),
        alternatives=((0, 1, 2), (3, 4, 5), (6, 7, 8)),
        together=((0, 3, 6), (1, 4, 7), (2, 5, 8)),
        uneven=False,
    )
    for limit in (0, 10**6):
        result = search(task, SearchConfig(exhaustive_limit=limit), COMPUTE, COMMS)
        result.placement.check(task)
        held = {s.table: s.rank for s in result.placement.shards}
        assert {table % 3 for table in held if table < 9} == {in_host}
        assert result.lower_bound_ms <= result.predicted.critical_path_ms


@pytest.mark.parametrize(("groups", "staged"), [((0,), False), ((0, 1, 2), True)])
def test_leaders_stand_for_their_sets(groups: tuple[int, ...], staged: bool) -> None:
    """A merged plan costs what its placement costs, whatever is done to it."""
    many = len(groups)
    task = wide_task(
        groups=tuple(i % many for i in range(30)),
        stages=tuple(range(many)) if staged else (),
        together=((0, 1, 2, 3), (6, 8), (10, 11)),
        fixed_bytes=tuple(1000 + i for i in range(30)),
    )
    simulator = Simulator(task, COMPUTE, COMMS)
    bank = ShardBank(simulator, merge=True)
    rng = np.random.default_rng(0)
    width_TW = np.zeros((30, 8), dtype=np.int64)
    for table in np.flatnonzero(bank.leads_T):
        width_TW[table, rng.integers(8)] = bank.dims_T[table]
    plan = Plan(bank, width_TW)

    def true_cost(width_TW: Ints) -> float:
        placement = placement_from_widths(follow(task, width_TW.copy()))
        placement.check(task)
        used = placement.rank_bytes(task)
        assert np.abs(np.array(used) - Plan(bank, width_TW).bytes_MW[0]).max() < 2
        return simulator.evaluate(placement).critical_path_ms

    for _ in range(8):
        assert plan.critical_ms == pytest.approx(true_cost(plan.width_TW), rel=1e-9)
        ranks = np.array(plan.critical_ranks())
        tried = []
        for found in (plan.transfers(ranks), plan.swaps(ranks)):
            moves = np.flatnonzero(np.isin(found.table_K, (0, 6, 10)))[:6]
            drawn = rng.choice(len(found), min(len(found), 6), replace=False)
            some = found.pick(np.unique(np.concatenate([moves, drawn])))
            if not len(some):
                continue
            outcomes = plan.evaluate(some)
            for k in range(len(some)):
                trial = Plan(bank, plan.width_TW)
                trial.apply(some, k, outcomes)
                fresh = Plan(bank, trial.width_TW)
                assert fresh.score == pytest.approx(outcomes.score_K[k], rel=1e-6)
                np.testing.assert_allclose(trial.sums_WGE, fresh.sums_WGE, atol=1e-9)
            tried.append((float(outcomes.score_K.min()), some, outcomes))
        _, some, outcomes = min(tried, key=lambda t: t[0])
        plan.apply(some, int(outcomes.score_K.argmin()), outcomes)


def test_packing_finds_what_greed_does_not() -> None:
    """Two of the tables fill their only common rank unless one of them leaves it."""
    task = make_task(
        make_tables([4] * 4, [1000, 1000, 600, 400]),
        3,
        64,
        memory=16_000,
        allowed_ranks=((0, 1), (0, 1), (1, 2), ()),
        apart=((0, 3), (1, 3)),
    )
    placement = placement_from_widths(pack(task))
    placement.check(task)
    # The first two fill a rank each; the third goes where the last one may not be.
    ranks = [s.rank for s in sorted(placement.shards, key=lambda s: s.table)]
    assert sorted(ranks[:2]) == [0, 1] and ranks[2:] == [2, 2]


CONTRADICTIONS: list[tuple[dict[str, Any], type[Exception], str]] = [
    (
        {"together": ((0, 1),), "allowed_ranks": ((0,), (1, 2), (), ())},
        ConfigError,
        r"'t0' and 't1' belong together, but no rank",
    ),
    (
        {"together": ((0, 1), (1, 2)), "apart": ((0, 2),)},
        ConfigError,
        r"'t0' and 't2' are asked to lie both",
    ),
    (
        {"apart": ((0, 1, 2),), "allowed_ranks": ((0, 1),) * 3 + ((),)},
        ConfigError,
        r"'t0', 't1', 't2' belong apart, but there is not a rank for each",
    ),
    (
        {"allowed_ranks": ((2,), (2,), (), ()), "memory_bytes": (10**6, 10**6, 60_000)},
        InfeasibleError,
        r"'t0', 't1' may only be on rank 2 and need",
    ),
    (
        {"together": ((0, 1),), "allowed_ranks": ((0, 1), (), (), ())}
        | {"host_column_bytes": (100.0,) * 4, "host_memory_bytes": (900, 10, 9000)},
        InfeasibleError,
        r"^tables 't0', 't1' are to lie together",
    ),
]


@pytest.mark.parametrize(("rules", "kind", "message"), CONTRADICTIONS)
def test_contradictions_are_named_before_the_search(
    rules: dict[str, Any], kind: type[Exception], message: str
) -> None:
    task = make_task(make_tables([8] * 4), 3, 64, **rules)
    with pytest.raises(kind, match=message):
        check_constraints(task)
    with pytest.raises(kind, match=message):
        NeuroShardSearcher().search(task, COMPUTE, COMMS)


def test_infeasible_rules_are_proven_by_packing() -> None:
    """Nothing contradicts anything until all rules are taken at once."""
    task = ShardingTask(
        tables=some_tables(4),
        world_size=3,
        batch_size=64,
        apart=((0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)),
    )
    check_constraints(task)
    with pytest.raises(InfeasibleError, match=r"proven by exact packing"):
        refined(task)
