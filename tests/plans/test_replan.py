from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.planner import Topology
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import DataType
from torchrec.optim import RowWiseAdagrad

from tests.builders import (
    FixedSearcher,
    Triples,
    bag_sharders,
    each,
    last_result,
    make_ebc,
    make_planner,
    only,
    sequences,
    shards_of,
)
from torchrec_neuroshard import topology_for
from torchrec_neuroshard.errors import ConfigError, PlanFileError, ProfileError
from torchrec_neuroshard.planner import NeuroShardPlanner
from torchrec_neuroshard.plans.replan import ReplanResult, replan
from torchrec_neuroshard.search import SearchConfig
from torchrec_neuroshard.tables.profile import zipf_profile

HUGE = 2**60
SIZES = [(4000, 64), (3000, 32), (2000, 32), (1000, 16), (500, 16)]
ALL_ON_0: Triples = [(i, dim, 0) for i, (_, dim) in enumerate(SIZES)]


@dataclasses.dataclass
class Job:
    """A running job with a plan that the planner did not choose."""

    planner: NeuroShardPlanner
    model: nn.Module
    plan: ShardingPlan

    def replan(self, budget_bytes: int = HUGE, **kwargs: Any) -> ReplanResult:
        plan = kwargs.pop("plan", self.plan)
        known: dict[str, Any] = {"model": self.model, "sharders": bag_sharders()}
        known |= {"planner": self.planner, "budget_bytes": budget_bytes} | kwargs
        return replan(plan, **known)


def make_job(
    triples: Triples,
    world_size: int = 2,
    *,
    sizes: Sequence[tuple[int, int]] = SIZES,
    kind: str = "table_wise",
    last: str = "",
    optimizer: Any = None,
    compute_device: str = "cpu",
    **kwargs: Any,
) -> Job:
    own = only(f"t{len(sizes) - 1}", sharding_types=[last or kind])
    model = make_ebc(sizes, data_types=kwargs.pop("data_types", {}))
    for parameter in model.parameters() if optimizer else ():
        # As apply_optimizer_in_backward leaves it.
        parameter._optimizer_classes = [optimizer]
        parameter._optimizer_kwargs = [{"lr": 0.1}]
    kwargs |= {"constraints": each(len(sizes), kind) | own}
    planner = make_planner(world_size, compute_device, **kwargs)
    kwargs |= {"search": FixedSearcher(triples)}
    at_work = make_planner(world_size, compute_device, **kwargs)
    return Job(planner, model, at_work.plan(model, bag_sharders()))


def test_the_slowest_rank_gets_less_work() -> None:
    job = make_job(ALL_ON_0)
    old = shards_of(job.plan)
    result = job.replan()
    assert shards_of(job.plan) == old  # the plan at work is left alone
    assert not result.obstacles
    assert result.after.critical_path_ms < 0.8 * result.before.critical_path_ms
    new = shards_of(result.plan)
    moved = {n: (old[n][0][2], new[n][0][2]) for n in old if old[n] != new[n]}
    assert {m.table: (m.from_rank, m.to_rank) for m in result.moves} == moved
    assert result.changed == {"": {n: result.plan.plan[""][n] for n in moved}}
    assert result.replaced == {"": {n: job.plan.plan[""][n] for n in moved}}
    first, move, *_ = str(result).splitlines()
    assert f"{result.before.critical_path_ms:.3f} -> " in first
    assert f"; {len(result.moves)} moves of" in first and "from rank 0 to 1" in move
    # Predictions are the planner's.
    assert result.after == job.replan(0, plan=result.plan).before
    own = job.planner.plan(job.model, bag_sharders())
    assert job.replan(0, plan=own).before == last_result(job.planner).predicted


@pytest.mark.parametrize("optimizer", [None, RowWiseAdagrad, torch.optim.Adagrad])
def test_moves_weigh_what_they_send(optimizer: Any) -> None:
    result = make_job(
        ALL_ON_0,
        4,
        optimizer=optimizer,
        data_types={1: DataType.FP16},
        compute_device="cuda",
        topology_arguments={"local_world_size": 2},
    ).replan()
    assert len(result.moves) >= 2
    for sharding in result.plan.plan[""].values():
        found = [str(meta.placement) for meta in sharding.sharding_spec.shards]
        assert found == [f"rank:{r}/cuda:{r % 2}" for r in sharding.ranks]
    for move in result.moves:
        rows, dim = SIZES[int(move.table[1:])]
        weights = rows * dim * (2 if move.table == "t1" else 4)
        state = {None: 0, RowWiseAdagrad: 4 * rows}.get(optimizer, 4 * rows * dim)
        assert (move.offset, move.width) == (0, dim)
        assert move.num_bytes == weights + state
    assert result.moved_bytes == sum(m.num_bytes for m in result.moves)


def test_budget_is_kept() -> None:
    job = make_job(ALL_ON_0)
    for budget in (0, 64_000, 200_000):
        result = job.replan(budget)
        assert result.moved_bytes <= budget == result.budget_bytes
        assert result.after.critical_path_ms <= result.before.critical_path_ms
        if budget == 0:
            assert result.moves == () and result.plan == job.plan
            assert result.changed == {}
        if budget == 64_000:
            assert {m.table for m in result.moves} <= {"t3", "t4"} and result.moves


def test_best_placement_of_few_tables_is_reached() -> None:
    sizes = SIZES[:4]
    jobs = [
        make_job([(t, d, ranks[t]) for t, (_, d) in enumerate(sizes)], sizes=sizes)
        for ranks in itertools.product((0, 1), repeat=len(sizes))
    ]
    least_ms = min(job.replan(0).before.critical_path_ms for job in jobs)
    assert jobs[0].replan().after.critical_path_ms == pytest.approx(least_ms)


def test_over_gloo_a_table_leaves_all_its_ranks_or_none() -> None:
    arguments: dict[str, Any] = {
        "sizes": [(4000, 64), (9000, 64)],
        "kind": "column_wise",
    }
    triples = [(0, 32, 0), (0, 32, 1), (1, 64, 0)]
    one_shard = 4000 * 32 * 4  # the budget is too small for the other table
    assert make_job(triples, 3, **arguments).replan(one_shard).moves == ()
    gpu = make_job(triples, 3, compute_device="cuda", **arguments).replan(one_shard)
    assert [(m.table, m.from_rank, m.to_rank) for m in gpu.moves] == [("t0", 0, 2)]


def test_splits_need_a_rank_of_their_own_over_gloo() -> None:
    arguments: dict[str, Any] = {"sizes": [(4000, 64)], "kind": "column_wise"}
    job = make_job([(0, 64, 0)], **arguments)
    assert job.replan().moves == ()
    # NCCL can send to the same rank.
    arguments["compute_device"] = "cuda"
    gpu = make_job([(0, 64, 0)], **arguments).replan()
    assert shards_of(gpu.plan)["t0"] in (
        [(0, 32, 0), (32, 32, 1)],
        [(0, 32, 1), (32, 32, 0)],
    )
    [move] = gpu.moves
    assert move.width == 32 and move.num_bytes == 4000 * 32 * 4
    # But the state of an optimizer is not split.
    job = make_job([(0, 64, 0)], optimizer=RowWiseAdagrad, **arguments)
    assert job.replan().moves == ()


@pytest.mark.filterwarnings("ignore:no cost model was measured")
@pytest.mark.parametrize(("asked", "least"), [(None, 32), (16, 16)])
def test_splits_are_as_narrow_as_the_planners(asked: int | None, least: int) -> None:
    job = make_job(
        [(0, 128, 0)],
        8,
        sizes=[(400_000, 128)],
        kind="column_wise",
        compute_device="cuda",
    )
    planner = make_planner(
        topology=topology_for("h100", ranks_per_node=8),
        constraints=only(sharding_types=["column_wise"], min_partition=asked),
        cost_model="h100",
        comms_model=None,
        batch_size=65_536,
    )
    job.planner = planner
    found = shards_of(job.replan().plan)["t0"]
    assert {width for _, width, _ in found} == {least}
    planned = shards_of(planner.plan(job.model, bag_sharders()))["t0"]
    assert {width for _, width, _ in planned} == {least}


@pytest.mark.parametrize(
    ("triples", "arguments", "reason"),
    [
        (ALL_ON_0, {"optimizer": torch.optim.Adam}, "a part of the state of Adam"),
        (
            ALL_ON_0[:4],
            {"last": "data_parallel"},
            "'t4' of the same module is data_parallel",
        ),
        (
            [*ALL_ON_0[:4], (4, 12, 0), (4, 4, 1)],
            {"last": "column_wise"},
            "'t4' of the same module is split unevenly",
        ),
    ],
)
def test_tables_that_torchrec_cannot_move_stay(
    triples: Triples, arguments: dict[str, Any], reason: str
) -> None:
    job = make_job(triples, **arguments)
    result = job.replan()
    assert result.moves == () and result.plan == job.plan
    assert set(result.obstacles) == {f"t{t}" for t, *_ in triples}
    assert all(reason in text for text in result.obstacles.values())


def test_sequence_tables_are_not_resharded() -> None:
    model = sequences(16, 16, 16, 16, prefix="t")
    sharders = [EmbeddingCollectionSharder()]
    # All on rank 0.
    plan = make_planner(1, constraints=each(4, "table_wise")).plan(model, sharders)
    job = Job(make_planner(2), model, plan)
    result = job.replan(sharders=sharders)
    assert result.moves == ()
    assert result.obstacles["t0"] == "TorchRec does not reshard EmbeddingCollection"


def test_full_ranks_get_no_tables() -> None:
    job = make_job(ALL_ON_0)
    for ddr_cap, is_moved in ((1000, False), (10**8, True)):
        job.planner._topology = Topology(2, "cpu", ddr_cap=ddr_cap)
        assert bool(job.replan().moves) == is_moved
    none = job.replan(config=SearchConfig(time_budget_seconds=1e-9))
    assert none.moves == ()
    with pytest.raises(ConfigError, match="at least 0, got -1"):
        job.replan(-1)


def test_fresh_profiles_decide() -> None:
    sizes = [(100_000, 32)] * 4
    job = make_job([(t, 32, t % 2) for t in range(4)], sizes=sizes)
    assert job.replan().moves == ()
    hot = zipf_profile(
        batch_size=128, pooling_factor=40.0, num_embeddings=100_000, exponent=0.0
    )
    job.planner = make_planner(2, profiles={"f0": hot})
    result = job.replan()
    # t2 leaves the rank of the busy table.
    assert [(m.table, m.to_rank) for m in result.moves] == [("t2", 1)]
    job.planner = make_planner(2, profiles={"none": hot})
    with pytest.raises(ProfileError, match="'none'"):
        job.replan()
    job.planner = make_planner(1)
    with pytest.raises(PlanFileError, match="'t1': rank 1 is not in 0 to 0"):
        job.replan()
