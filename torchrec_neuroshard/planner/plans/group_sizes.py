"""How many ranks should share the tables out: every group size of a job, planned."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torchrec.distributed.planner.types import PlannerError, Topology
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.types import ModuleSharder, ShardingPlan

from torchrec_neuroshard.errors import ConfigError
from torchrec_neuroshard.placement import format_bytes
from torchrec_neuroshard.planner.options.groups import divisors, group_topology
from torchrec_neuroshard.planner.planners import NeuroShardPlanner
from torchrec_neuroshard.report import WeightSync

__all__ = ["GroupSize", "GroupSizes", "recommend_group_size"]


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupSize:
    """A sharding group of so many ranks, and what is predicted for it."""

    size: int
    num_replicas: int
    plan: ShardingPlan | None = None
    """None where nothing fits; NaN stands for what is then not known."""
    critical_path_ms: float = math.nan
    """Of an iteration without the replicas' average."""
    weight_sync: WeightSync | None = None
    """None where there is one replica, or nothing fits."""
    memory_bytes: float = math.nan
    """Of the fullest rank: its tables and what a step takes beside them."""
    obstacle: str = ""
    """Why nothing fits."""

    @property
    def iteration_ms(self) -> float:
        """An iteration with its part of the replicas' average."""
        sync = self.weight_sync
        return self.critical_path_ms + (sync.ms_per_iteration if sync else 0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupSizes:
    """Every sharding group size of a job; `print` shows a table."""

    rows: tuple[GroupSize, ...]
    """By size."""
    sync_interval: int

    @property
    def best(self) -> GroupSize:
        """The one with the shortest iteration of those that fit.

        Raises:
            ConfigError: None fits.
        """
        fitting = [row for row in self.rows if row.plan is not None]
        if not fitting:
            raise ConfigError(
                f"no sharding group size fits; of all {self.rows[-1].size} ranks: "
                f"{self.rows[-1].obstacle}"
            )
        return min(fitting, key=lambda row: row.iteration_ms)

    def __str__(self) -> str:
        """Return a table, and the recommendation below it."""
        lines = [
            f"{'ranks':>6}{'replicas':>10}{'path ms':>10}{'sync ms':>10}"
            f"{'iteration ms':>14}{'memory':>13}"
        ]
        for row in self.rows:
            start = f"{row.size:>6}{row.num_replicas:>10}"
            if row.plan is None:
                lines.append(f"{start}  does not fit: {row.obstacle}")
                continue
            sync = row.weight_sync.ms_per_iteration if row.weight_sync else 0.0
            lines.append(
                f"{start}{row.critical_path_ms:>10.3f}{sync:>10.3f}"
                f"{row.iteration_ms:>14.3f}{format_bytes(row.memory_bytes):>13}"
            )
        if any(row.plan for row in self.rows):
            best = self.best
            lines.append(
                f"sharding_group_size={best.size}: {best.num_replicas} replicas, "
                f"averaged every {self.sync_interval} iterations"
                if best.num_replicas > 1
                else f"all {best.size} ranks as one group: no replicas"
            )
        return "\n".join(lines)


def recommend_group_size(
    model: nn.Module,
    topology: Topology,
    sharders: Sequence[ModuleSharder[Any]] | None = None,
    *,
    batch_size: int,
    sync_interval: int = 1,
    use_inter_host_allreduce: bool = False,
    **arguments: Any,
) -> GroupSizes:
    """Plan a job in sharding groups of every size that divides its ranks.

    Whether a model may be trained with weights that are averaged, and how seldom, is
    the caller's to know: only times are compared.

    Args:
        model: Not sharded yet, best on "meta".
        topology: All ranks.
        sharders: Of the embedding modules. None: TorchRec's defaults.
        batch_size: Samples per rank.
        sync_interval: Iterations between two calls of `DMPCollection.sync`.
        use_inter_host_allreduce: As in TorchRec; see `group_topology`.
        arguments: Others of `NeuroShardPlanner`, but parts that are made for one
            topology.

    Raises:
        ConfigError: An argument cannot be.
    """
    given = list(sharders or get_default_sharders())
    rows = []
    for size in divisors(int(topology.world_size)):
        group = group_topology(
            topology,
            size,
            sync_interval=sync_interval,
            use_inter_host_allreduce=use_inter_host_allreduce,
        )
        planner = NeuroShardPlanner(
            topology=group,
            batch_size=batch_size,
            **{"stats": [], "strict_memory": True, **arguments},
        )
        row = GroupSize(size=size, num_replicas=int(topology.world_size) // size)
        try:
            plan = planner.plan(model, given)
        except (PlannerError, ConfigError) as error:  # pins may be to ranks it lacks
            obstacle = str(error).strip().splitlines()[0]
            rows.append(replace(row, obstacle=obstacle))
            continue
        report = planner.report()
        rows.append(
            replace(
                row,
                plan=plan,
                critical_path_ms=report.critical_path_ms,
                weight_sync=report.weight_sync,
                memory_bytes=max(rank.used_bytes for rank in report.ranks),
            )
        )
    return GroupSizes(rows=tuple(rows), sync_interval=sync_interval)
