"""The planners that are compared."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchrec.distributed.planner import (
    EmbeddingShardingPlanner,
    ParameterConstraints,
    Topology,
)
from torchrec.distributed.planner.constants import DDR_MEM_BW
from torchrec.distributed.planner.partitioners import MemoryBalancedPartitioner
from torchrec.distributed.planner.proposers import DynamicProgrammingProposer
from torchrec.distributed.planner.storage_reservations import (
    FixedPercentageStorageReservation,
)

from planner_comparison.paired import (
    BEST_PRACTICE,
    OURS,
    PAPER,
    PAPER_NETS,
    POLICIES,
)
from planner_comparison.tasks import Task
from torchrec_neuroshard.baselines.annealing import AnnealingConfig, AnnealingSearcher
from torchrec_neuroshard.baselines.heuristics import GREEDY_KEYS
from torchrec_neuroshard.baselines.milp import MilpConfig, MilpSearcher
from torchrec_neuroshard.baselines.neuroshard import NeuroShardConfig, PaperSearcher
from torchrec_neuroshard.baselines.neuroshard_models import load_models, shipped_models
from torchrec_neuroshard.baselines.policies import PolicySearcher
from torchrec_neuroshard.cost_models import (
    BandwidthCommsModel,
    CommsModel,
    CostModel,
    load_comms_model,
    load_cost_model,
)
from torchrec_neuroshard.planner import NeuroShardPlanner
from torchrec_neuroshard.search import Searcher, make_searcher

MIN_PARTITION = 32
_GB_PER_S = 600.0
"""Where no collectives are known: TorchRec's default, of no particular machine."""
_CPU_FUSED_SHARE = 0.5
"""Of the memory's bandwidth, what TorchRec expects a fused kernel on a CPU to reach."""
_COLUMN_AND_TABLE = ["table_wise", "column_wise"]
_NO_GRID = [
    "data_parallel",
    "table_wise",
    "column_wise",
    "table_column_wise",
    "row_wise",
    "table_row_wise",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """What planners that take a cost model are given."""

    compute: CostModel
    comms: CommsModel
    """Of the task's ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rival:
    """A planner, made anew for each task."""

    name: str
    about: str
    make: Callable[[Task, Costs, str], EmbeddingShardingPlanner]
    """Takes the task, the costs, and the device's type."""
    training: Callable[[], dict[str, Any]] = dict
    """What is known of its training; empty where there was none."""


def make_rivals(
    names: Sequence[str] | None,
    paper_nets: Path | None,
    solver_seconds: float,
    hardware: str,
) -> list[Rival]:
    """Return the planners that can run here.

    Args:
        names: Only these; None is all.
        paper_nets: Folder of NeuroShard's own nets; None is those that come with the
            package for the hardware, if there are any.
        solver_seconds: For those that search for as long as they may.
        hardware: Device that the cost model is of.

    Raises:
        ValueError: A name is unknown.
    """
    rivals = [
        *_ours(),
        *_learned(paper_nets, hardware),
        *_greedies(),
        *_solvers(solver_seconds),
        *_stock(),
    ]
    if names is None:
        return rivals
    known = {r.name: r for r in rivals}
    unknown = sorted(set(names) - set(known))
    if unknown:
        raise ValueError(f"no planner {unknown[0]!r} here; known: {', '.join(known)}")
    return [known[name] for name in names]


def _ours() -> Iterator[Rival]:
    yield Rival(
        name=OURS,
        about="this planner as a user gets it",
        make=lambda task, costs, device: _neuroshard(task, costs, device),
    )
    yield Rival(
        name="default, tables whole",
        about="this planner's search with every table whole",
        make=lambda task, costs, device: _neuroshard(
            task, costs, device, make_searcher("default"), types=["table_wise"]
        ),
    )


def _learned(paper_nets: Path | None, hardware: str) -> Iterator[Rival]:
    yield _search_rival(
        PAPER,
        "NeuroShard's loops as published, on the cost model that this planner has",
        lambda: PaperSearcher(NeuroShardConfig(costs="shared")),
    )
    nets = load_models(paper_nets) if paper_nets else shipped_models(hardware)
    if nets is not None:
        rival = _search_rival(
            PAPER_NETS,
            "NeuroShard's loops as published, on nets of its own as their card says",
            lambda: PaperSearcher(NeuroShardConfig(costs="own"), models=nets),
        )
        yield dataclasses.replace(rival, training=lambda: _seconds(nets.trained_on))
    for name in POLICIES:
        load = functools.cache(functools.partial(_policy, name))
        rival = _search_rival(name, "trained policy, tables whole", load)
        yield dataclasses.replace(rival, training=functools.partial(_training, load))


def _policy(name: str) -> PolicySearcher:
    searcher = make_searcher(name)
    assert isinstance(searcher, PolicySearcher)
    return searcher


def _training(load: Callable[[], PolicySearcher]) -> dict[str, Any]:
    """Return what a policy's description says of its training."""
    info = load().policy.info
    return {"name": info.name, "hardware": info.hardware, **_seconds(info.trained_on)}


def _seconds(trained_on: Mapping[str, Any]) -> dict[str, Any]:
    return {"training_seconds": trained_on.get("training_seconds")}


def _greedies() -> Iterator[Rival]:
    about = {
        "random": "a random rank with room for each table",
        "greedy-cost": "tables whole, by predicted cost alone",
        **{f"greedy-{key}": f"tables whole, by {key}" for key in GREEDY_KEYS},
    }
    for name, text in about.items():
        yield _search_rival(name, text, functools.partial(make_searcher, name))


def _solvers(seconds: float) -> Iterator[Rival]:
    yield _search_rival(
        "milp",
        f"mixed-integer program on costs of single shards, {seconds:g} s",
        lambda: MilpSearcher(MilpConfig(time_budget_seconds=seconds)),
    )
    yield _search_rival(
        "annealing",
        f"simulated annealing on costs of sets, at most {seconds:g} s",
        lambda: AnnealingSearcher(AnnealingConfig(time_budget_seconds=seconds)),
    )


def _stock() -> Iterator[Rival]:
    def make(**arguments: Any) -> Callable[[Task, Costs, str], Any]:
        def planner(task: Task, costs: Costs, device: str) -> EmbeddingShardingPlanner:
            parts = {
                name: part() if callable(part) else part
                for name, part in arguments.items()
            }
            best = parts.pop("best_practice", False)
            in_hbm = parts.pop("in_hbm", False)
            return EmbeddingShardingPlanner(
                topology=_topology(task, "cuda" if in_hbm else device, device),
                batch_size=task.batch_size // task.world_size,
                storage_reservation=FixedPercentageStorageReservation(0.0),
                constraints=_constraints(
                    task,
                    _COLUMN_AND_TABLE if best else _NO_GRID,
                    MIN_PARTITION if best else None,
                ),
                debug=False,
                **parts,
            )

        return planner

    yield Rival(
        name="torchrec", about="TorchRec's planner, pooling factors", make=make()
    )
    yield Rival(
        name=BEST_PRACTICE,
        about=f"the same, table- and column-wise, min_partition={MIN_PARTITION}",
        make=make(best_practice=True),
    )
    counted = "memory counted as HBM, which alone it looks at"
    yield Rival(
        name="torchrec, dynamic programming",
        about=f"TorchRec's DynamicProgrammingProposer; {counted}",
        make=make(proposer=DynamicProgrammingProposer, in_hbm=True),
    )
    yield Rival(
        name="torchrec, memory-balanced",
        about=f"TorchRec's MemoryBalancedPartitioner; {counted}",
        make=make(partitioner=MemoryBalancedPartitioner, in_hbm=True),
    )


def _search_rival(name: str, about: str, make: Callable[[], Searcher]) -> Rival:
    return Rival(
        name=name,
        about=about,
        make=lambda task, costs, device: _neuroshard(task, costs, device, make()),
    )


def _neuroshard(
    task: Task,
    costs: Costs,
    device: str,
    searcher: Searcher | None = None,
    types: Sequence[str] = (),
) -> NeuroShardPlanner:
    """Make our planner; with a searcher, the plan is the searcher's or there is none.

    `default` has what it has by default: TorchRec's plan and other sharding types are
    candidates, too.
    """
    given: dict[str, Any] = {}
    if searcher is not None:
        given = {"search": searcher, "consider_stock": False}
    return NeuroShardPlanner(
        topology=_topology(task, device, device),
        batch_size=task.batch_size // task.world_size,
        storage_reservation=FixedPercentageStorageReservation(0.0),
        constraints=_constraints(
            task, types or (_NO_GRID if searcher is None else _COLUMN_AND_TABLE), None
        ),
        cost_model=costs.compute,
        comms_model=costs.comms,
        profiles={t.name: t.profile for t in task.tables if t.profile is not None},
        debug=False,
        **given,
    )


def _topology(task: Task, planned_for: str, device: str) -> Topology:
    memory = {f"{'hbm' if planned_for == 'cuda' else 'ddr'}_cap": task.memory_bytes}
    if planned_for != device:
        # The same kernels in memory of the same speed, by another name.
        memory["hbm_mem_bw"] = _CPU_FUSED_SHARE * DDR_MEM_BW
    return Topology(
        world_size=task.world_size,
        local_world_size=task.world_size,
        compute_device=planned_for,
        **memory,
    )


def _constraints(
    task: Task, types: Sequence[str], min_partition: int | None
) -> dict[str, ParameterConstraints]:
    return {
        t.name: ParameterConstraints(
            pooling_factors=[t.pooling_factor],
            sharding_types=list(types),
            compute_kernels=["fused", "dense"],
            min_partition=min_partition,
        )
        for t in task.tables
    }


def load_costs(cost_model: str, device: str, world_size: int) -> Costs:
    """Return the costs that planners are given, and that plans are predicted by.

    Ranks' kernels do not slow each other down in them: kernels are timed one rank after
    another, as on devices of their own.

    Args:
        cost_model: A bundle's name or folder, or "auto".
        device: `cpu` or `cuda`.
        world_size: Ranks.
    """
    known = load_comms_model(
        cost_model,
        device_type=device,
        world_size=world_size,
        local_world_size=world_size,
    )
    comms = copy.copy(
        known
        or BandwidthCommsModel(
            world_size=world_size,
            local_world_size=world_size,
            intra_gb_per_s=_GB_PER_S,
            inter_gb_per_s=_GB_PER_S,
        )
    )
    comms.compute_slowdown = (1.0, 1.0)
    return Costs(compute=load_cost_model(cost_model, device_type=device), comms=comms)
