"""Why each column split pays: the plan's costs with that one table unsplit.

Shapes: `C` candidates, `W` ranks, `G` fusion groups, `S` stages, `N` shards.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import numpy.typing as npt

from torchrec_neuroshard.costs.passes import COLLECTIVES, PASSES, StagePhases
from torchrec_neuroshard.costs.simulator import PredictedCosts, Simulator, placed_arrays
from torchrec_neuroshard.costs.task import Placement
from torchrec_neuroshard.report.parts import SplitReport

Floats = npt.NDArray[np.float64]

MAX_SPLITS = 50
"""Split tables that are explained: those that cost most unsplit."""
_KIND = dict.fromkeys(COLLECTIVES, "collectives") | dict.fromkeys(PASSES, "kernels")
"""Phase -> what a reader is told of."""


def explain(
    simulator: Simulator, placement: Placement, predicted: PredictedCosts
) -> tuple[SplitReport, ...]:
    """Return the effect of each column split, the most useful split first.

    The effect is the change of the critical path if that one table is unsplit, on its
    best rank, and all other tables stay as planned.

    Args:
        simulator: Simulator of the placement's task.
        placement: The plan's column shards.
        predicted: Costs of the whole plan, including tables outside the placement.

    Returns:
        At most `MAX_SPLITS` tables.
    """
    task, (schedule, dense) = simulator.task, (predicted.schedule, predicted.dense)
    table_N, width_N, rank_N, rows_N, first_N = placed_arrays(placement)
    group_N, num_shards_T = simulator.groups_T[table_N], simulator.num_shards(placement)
    priced = simulator.price(table_N, width_N, rows_N, first_N)
    loads = simulator.add_up(priced, rank_N)
    compute_WG2 = simulator.compute_costs(loads.sums_CWGE)
    memory_W = np.array(task.memory_bytes or (np.inf,) * task.world_size)
    memory_W = memory_W - placement.rank_bytes(task)[0]

    def phases(
        compute_CWG2: Floats, loads_CWS3: Floats, num_shards_T: npt.NDArray[np.int64]
    ) -> StagePhases:
        """Return the phases of each candidate."""
        found = simulator.phases(simulator.stage_compute(compute_CWG2), loads_CWS3)
        columns_S = simulator.ordered_columns(num_shards_T, simulator.columns_per_table)
        return simulator.in_order(
            found,
            simulator.order_costs(columns_S[None]),
            simulator.stage_order(num_shards_T[None] > 0),
            loads_CWS3,
        )

    def phases_with(table: int, ranks_C: npt.NDArray[np.int64]) -> StagePhases:
        """Return the phases with the unsplit table on each of these ranks."""
        group, stage = simulator.groups_T[table], simulator.stages_T[table]
        dim, line_C = task.tables[table].embedding_dim, np.arange(len(ranks_C))
        whole = simulator.price(np.array([table]), np.array([dim]))
        own_N = table_N == table
        left = np.unique(rank_N[own_N])
        rest_N = (group_N == group) & ~own_N & np.isin(rank_N, left)
        sums_WE = loads.sums_CWGE[:, group].copy()
        sums_WE[left] = 0.0  # an empty kernel costs exactly nothing
        np.add.at(sums_WE, rank_N[rest_N], priced.encoding_NE[rest_N])
        compute = np.repeat(compute_WG2[None], len(ranks_C), axis=0)
        compute[:, left, group] = simulator.compute_costs(sums_WE[left])
        sums_WE += whole.encoding_NE
        compute[line_C, ranks_C, group] = simulator.compute_costs(sums_WE[ranks_C])
        loads_WS3 = loads.loads_CWS3.copy()
        np.subtract.at(loads_WS3[:, stage], rank_N[own_N], priced.loads_N3[own_N])
        loads_CWS3 = np.repeat(loads_WS3[None], len(ranks_C), axis=0)
        loads_CWS3[line_C, ranks_C, stage] += whole.loads_N3[0]
        now_T = np.where(np.arange(len(num_shards_T)) == table, 1, num_shards_T)
        return phases(compute, loads_CWS3, now_T)

    def report(table: int) -> SplitReport:
        shards = [(s.width, s.rank) for s in placement.shards if s.table == table]
        needed = task.shard_bytes(table, task.tables[table].embedding_dim)
        free_W = memory_W.copy()
        for width, rank in shards:
            free_W[rank] += task.shard_bytes(table, width)
        ranks_C = np.flatnonzero(free_W >= needed)
        whole_rank, whole_ms = None, None
        changes: dict[str, float] = defaultdict(float)
        if len(ranks_C):
            candidates = phases_with(table, ranks_C)
            path_C = schedule.path_ms(candidates, dense)
            best = int(path_C.argmin())
            whole_rank = int(ranks_C[best])
            whole_ms = predicted.critical_path_ms + float(path_C[best] - planned_ms)
            for found, sign in ((candidates.pick(best), 1), (planned, -1)):
                for part in schedule.parts(found, dense):
                    changes[_KIND.get(part.phase, "other")] += sign * part.ms
        return SplitReport(
            table=task.tables[table].name,
            shards=tuple(shards),
            whole_bytes=needed,
            whole_rank=whole_rank,
            whole_ms=whole_ms,
            compute_change_ms=changes["kernels"],
            comms_change_ms=changes["collectives"],
        )

    planned = phases(compute_WG2[None], loads.loads_CWS3[None], num_shards_T)
    planned_ms = schedule.path_ms(planned, dense)[0]
    split = np.flatnonzero(np.bincount(table_N) > 1).tolist()
    found = sorted(map(report, split), key=lambda r: -(r.whole_ms or np.inf))
    return tuple(found[:MAX_SPLITS])
