"""What a plan costs, rank by rank, and what each split is good for.

Shapes: `C` candidates, `W` ranks, `G` fusion groups, `S` stages, `E` encoding values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from torchrec_neuroshard.placement import ColumnShard, Placement
from torchrec_neuroshard.report.plan_parts import (
    Bottleneck,
    PlanBasis,
    ScheduleReport,
    SplitReport,
    TableReport,
    WeightSync,
    rank_reports,
)
from torchrec_neuroshard.report.plan_report import PlanReport
from torchrec_neuroshard.search import SearchResult
from torchrec_neuroshard.simulator import PredictedCosts, Simulator

__all__ = ["explain"]

MAX_SPLITS = 50
"""Split tables explained one by one: those that would cost most in one piece."""
_COMPUTE, _COMMS = [1, 4], [0, 2, 3]
"""Of `PHASES`."""
_ONE_MORE = ((0, 0), (0, 0), (0, 0), (0, 1))


def explain(
    result: SearchResult,
    simulator: Simulator | None,
    tables: Sequence[TableReport],
    memory_bytes: Sequence[int],
    *,
    basis: PlanBasis | None = None,
    weight_sync: WeightSync | None = None,
    bottleneck: Bottleneck | None = None,
) -> PlanReport:
    """Say what a plan costs and what each of its splits is good for.

    A split's use is told by what the critical path would be with that one table in one
    piece, on the rank where it then costs least, and all other tables as planned.

    Args:
        result: A search's, or `NeuroShardPlanner.last_result`.
        simulator: Of the task that the result is for; None where no table lies in
            column shards.
        tables: All of them.
        memory_bytes: What each rank has for them.
        basis: What the costs rest on.
        weight_sync: How replicas are kept alike.
        bottleneck: What makes the critical path longest.
    """
    placement, predicted = result.placement, result.predicted
    splits: list[SplitReport] = []
    if simulator is not None:
        splits = _explain_splits(simulator, placement, predicted)
    return PlanReport(
        critical_path_ms=predicted.critical_path_ms,
        lower_bound_ms=result.lower_bound_ms,
        bound_is_proven=result.bound_is_proven,
        uncertainty=predicted.uncertainty,
        compute_source=predicted.compute_source,
        comms_source=predicted.comms_source,
        search_seconds=result.search_seconds,
        num_evaluated=result.num_evaluated,
        num_tables=len(tables),
        ranks=rank_reports(tables, predicted.ranks, memory_bytes),
        splits=tuple(splits[:MAX_SPLITS]),
        tables=tuple(sorted(tables, key=lambda t: (-t.path_ms, -t.used_bytes))),
        bottleneck=bottleneck,
        fallback=result.fallback,
        warnings=result.warnings,
        basis=basis,
        weight_sync=weight_sync,
        schedule=ScheduleReport.of(predicted),
    )


def _explain_splits(
    simulator: Simulator, placement: Placement, predicted: PredictedCosts
) -> list[SplitReport]:
    """Explain every split table, the costliest in one piece first.

    Args:
        simulator: Of the placement's task.
        placement: The plan's column shards.
        predicted: Costs of the whole plan, other tables included.
    """
    shards_of: dict[int, list[ColumnShard]] = {}
    for shard in placement.shards:
        shards_of.setdefault(shard.table, []).append(shard)
    split = {t: s for t, s in shards_of.items() if len(s) > 1}
    if not split:
        return []
    rebuild = _Rebuild(simulator, placement, predicted)
    reports = [rebuild.whole(t, shards) for t, shards in split.items()]
    return sorted(
        reports,
        key=lambda r: np.inf if r.whole_ms is None else r.whole_ms,
        reverse=True,
    )


class _Rebuild:
    """Costs of a placement with one of its split tables in one piece."""

    def __init__(
        self, simulator: Simulator, placement: Placement, predicted: PredictedCosts
    ) -> None:
        self.simulator, self.predicted = simulator, predicted
        self.task = task = simulator.task
        self.loads = simulator.rank_loads(placement)
        self.compute_WG2 = simulator.compute_costs(self.loads.sums_CWGE)
        columns_S = simulator.ordered_columns(
            simulator.num_shards(placement), simulator.columns_per_table
        )
        self.order_S2 = simulator.order_costs(columns_S[None])[0]
        memory_W = np.array(task.memory_bytes or (np.inf,) * task.world_size)
        self.free_W = memory_W - placement.rank_bytes(task)[0]
        self.stage_T = np.asarray(task.stages)[np.asarray(task.groups)]
        rank, table = np.array([(s.rank, s.table) for s in placement.shards]).T
        self.count_WG = np.zeros((task.world_size, task.num_groups), dtype=np.int64)
        np.add.at(self.count_WG, (rank, np.asarray(task.groups)[table]), 1)
        shards_T = np.bincount(table, minlength=len(task.tables))
        self.splits_S = np.bincount(
            self.stage_T, weights=shards_T > 1, minlength=task.num_stages
        )
        self.planned = self._phases(
            self.compute_WG2[None], self.loads.loads_CWS3[None], self.order_S2
        )

    def _phases(
        self,
        compute_CWG2: npt.NDArray[np.float64],
        loads_CWS3: npt.NDArray[np.float64],
        order_S2: npt.NDArray[np.float64],
    ) -> npt.NDArray[np.float64]:
        """Phases of each rank in each stage: `C x W x S x 5` [ms]."""
        compute = self.simulator.stage_compute(compute_CWG2)
        phases = self.simulator.phases(compute, loads_CWS3)
        phases[..., [2, 3]] += order_S2
        return phases

    def _path_ms(self, phases_CWS5: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Critical paths under the plan's schedule, `C` [ms]."""
        schedule, dense = self.predicted.schedule, self.predicted.dense
        if schedule.adds_up(dense):
            added: npt.NDArray[np.float64] = _worst(phases_CWS5).sum(axis=1)
            return added
        # Column shards that are explained lie in no cache.
        return schedule.path_ms(np.pad(phases_CWS5, _ONE_MORE), dense)

    def whole(self, table: int, shards: Sequence[ColumnShard]) -> SplitReport:
        """Put one split table on its best rank in one piece."""
        task = self.task
        config = task.tables[table]
        needed = task.shard_bytes(table, config.embedding_dim)
        free_W = self.free_W.copy()
        for shard in shards:
            free_W[shard.rank] += task.shard_bytes(table, shard.width)
        candidates = np.flatnonzero(free_W >= needed)
        report = SplitReport(
            table=config.name,
            shards=tuple((s.width, s.rank) for s in shards),
            whole_bytes=needed,
            whole_rank=None,
            whole_ms=None,
            compute_change_ms=0.0,
            comms_change_ms=0.0,
        )
        if not len(candidates):
            return report
        phases = self._phases_with_whole(table, shards, candidates)
        path_C = self._path_ms(phases)
        best = int(path_C.argmin())
        change = _worst(phases[[best]])[0] - _worst(self.planned)[0]
        path_change = float(path_C[best] - self._path_ms(self.planned)[0])
        return dataclasses.replace(
            report,
            whole_rank=int(candidates[best]),
            whole_ms=self.predicted.critical_path_ms + path_change,
            compute_change_ms=float(change[_COMPUTE].sum()),
            comms_change_ms=float(change[_COMMS].sum()),
        )

    def _phases_with_whole(
        self,
        table: int,
        shards: Sequence[ColumnShard],
        candidates: npt.NDArray[np.int64],
    ) -> npt.NDArray[np.float64]:
        """Phases with the table whole on each candidate, `C x W x S x 5` [ms]."""
        task, simulator = self.task, self.simulator
        group, stage = task.groups[table], int(self.stage_T[table])
        dim, line = task.tables[table].embedding_dim, np.arange(len(candidates))
        ranks = np.array([s.rank for s in shards])

        sums_WE = self.loads.sums_CWGE[:, group].copy()
        widths = np.array([s.width for s in shards])
        encodings = simulator.encodings(np.full(len(shards), table), widths)
        np.subtract.at(sums_WE, ranks, encodings)
        alone = self.count_WG[ranks, group] == 1
        sums_WE[ranks[alone]] = 0.0  # exactly: an empty kernel costs nothing
        whole_E = simulator.encodings(np.array([table]), np.array([dim]))[0]
        compute = np.repeat(self.compute_WG2[None], len(candidates), axis=0)
        compute[:, ranks, group] = simulator.compute_costs(sums_WE[ranks])
        compute[line, candidates, group] = simulator.compute_costs(
            sums_WE[candidates] + whole_E
        )

        tables = np.full(len(shards) + 1, table)
        widths = np.array([*(s.width for s in shards), dim])
        priced = simulator.price(tables, widths)
        loads_WS3 = self.loads.loads_CWS3.copy()
        loads_WS3[ranks, stage] -= priced.loads_N3[:-1]
        loads = np.repeat(loads_WS3[None], len(candidates), axis=0)
        loads[line, candidates, stage] += priced.loads_N3[-1]

        order_S2 = self.order_S2.copy()
        if self.splits_S[stage] == 1:
            order_S2[stage] = 0.0  # nothing is left to put in order
        return self._phases(compute, loads, order_S2)


def _worst(phases_CWS5: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Each phase on its slowest rank, over all stages: `C x 5` [ms]."""
    worst: npt.NDArray[np.float64] = phases_CWS5.max(axis=1).sum(axis=1)
    return worst
