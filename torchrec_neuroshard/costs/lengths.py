"""Batches whose samples are longer or shorter than the mean, as factors on phases.

Ranks train on different samples. A rank's own ids decide its part of the exchanges of
sequences, its replicas' kernels and its dense layers. The ids of all ranks together
decide the kernels of sharded tables. So long samples on one rank make all ranks wait,
however tables are placed.

Lengths of a batch follow a gamma distribution with the mean and the deviation of the
profile; see `tables.lengths`. Tables without a profile of lengths have none.

Shapes: `D` draws, `W` ranks, `T` tables, `N` shards, `S` stages, `6` phases in the
order of `TIMED`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from torchrec_neuroshard.costs.expected import NUM_DRAWS, draws
from torchrec_neuroshard.costs.passes import TIMED
from torchrec_neuroshard.tables.lengths import gamma_at

if TYPE_CHECKING:
    from torchrec_neuroshard.costs.simulator import PricedShards, Simulator
    from torchrec_neuroshard.costs.task import ShardingTask

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_LEAST = 0.01
"""Batches of a table that differ by a smaller share are equal."""
_TABLES = 32
"""Tables that are drawn at a time, which limits the memory."""
_SEED = 69


@dataclass(frozen=True, slots=True, eq=False)
class LengthFactors:
    """Factors on phases and dense layers, 1 on average."""

    phases_DWS6: Floats
    """Stages in TorchRec's order."""
    dense_D: Floats
    """Dense layers of the rank with most ids of sequences; 1 without sequences."""
    even_DWS6: Floats
    """The factors if all ranks had equally long samples, as with a shuffler that
    balances them."""

    def with_another_stage(self) -> LengthFactors:
        """Return the factors with a last stage that lengths do not change."""
        both = (self.phases_DWS6, self.even_DWS6)
        pad = ((0, 0), (0, 0), (0, 1), (0, 0))
        phases, even = (np.pad(f, pad, constant_values=1.0) for f in both)
        return LengthFactors(phases, self.dense_D, even)


def length_factors(
    simulator: Simulator, shards: PricedShards, rank_N: Ints, order_S: Ints
) -> LengthFactors | None:
    """Draw batches and return what they change; None if all batches are equal.

    Args:
        simulator: The simulator of the task.
        shards: Placed shards.
        rank_N: Their ranks.
        order_S: Stages in TorchRec's order.
    """
    task, num_stages = simulator.task, simulator.task.num_stages
    world_size = task.world_size
    used_T = np.unique(shards.table_N)
    spread_T3 = _spreads(simulator.task)
    uneven_T = np.hypot.reduce(spread_T3, axis=1) >= _LEAST
    if not uneven_T[used_T].any():
        return None
    stage_N = simulator.stages_T[shards.table_N]
    launch_ms = simulator.encoder.launch_ms.sum()
    alone_N = simulator.single_compute(shards).sum(axis=1)
    alone_N = np.maximum(alone_N - launch_ms, 0.0)
    kernels_WS = _added(rank_N, stage_N, alone_N, (world_size, num_stages))
    kernels_WS += launch_ms
    ids_T = simulator.id_bytes_T
    rows_T = simulator.columns_per_table * ~simulator.pooled_T
    id_bytes_N = shards.loads_N3[:, 0] - simulator.length_bytes_T[shards.table_N]
    rows_N = shards.loads_N3[:, 1] * ~simulator.pooled_T[shards.table_N]
    tokens_T = np.array([0.0 if t.pooled else t.pooling_factor for t in task.tables])
    shape = (NUM_DRAWS, world_size, num_stages)
    # What ranks hold is scaled by all samples, what they own by theirs.
    more, even, held_rows, held_ids = np.zeros((4, *shape))
    own_rows, own_ids = np.zeros((2, *shape))
    tokens_DW = np.zeros(shape[:2])
    replicated_S = simulator.replicated_S
    ways = [t for t in used_T.tolist() if uneven_T[t]]
    for table, own_DW in _drawn(spread_T3, ways, world_size):
        stage, all_D = simulator.stages_T[table], own_DW.mean(axis=1)
        own = shards.table_N == table
        rank, share_N = rank_N[own], alone_N[own]
        share_W = _added(rank, None, share_N, (world_size,)) / kernels_WS[:, stage]
        by_rank = own_DW if replicated_S[stage] else all_D[:, None]
        more[:, :, stage] += share_W * by_rank
        even[:, :, stage] += share_W * all_D[:, None]
        rows_W = _added(rank, None, rows_N[own], (world_size,))
        ids_W = _added(rank, None, id_bytes_N[own], (world_size,))
        held_rows[:, :, stage] += rows_W * all_D[:, None]
        held_ids[:, :, stage] += ids_W * all_D[:, None]
        own_rows[:, :, stage] += rows_T[table] / world_size * own_DW
        own_ids[:, :, stage] += ids_T[table] / world_size * own_DW
        tokens_DW += tokens_T[table] * own_DW
    found = np.ones((2, NUM_DRAWS, world_size, num_stages, len(TIMED)))
    for kernels, result in ((more, found[0]), (even, found[1])):
        for phase in ("fwd_compute", "bwd_compute"):
            result[..., TIMED.index(phase)] += kernels
    rows_WS = _added(rank_N, stage_N, rows_N, (world_size, num_stages))
    ids_WS = _added(rank_N, stage_N, id_bytes_N, (world_size, num_stages))
    used = [np.isin(np.arange(len(tokens_T)), used_T)]
    for held, own, now_WS, of_T, phases in (
        (held_rows, own_rows, rows_WS, rows_T * used[0], ("fwd_comms", "bwd_comms")),
        (held_ids, own_ids, ids_WS, ids_T * used[0], ("index_comms",)),
    ):
        mean_S = np.bincount(simulator.stages_T, of_T, num_stages) / world_size
        usual_S = np.maximum(now_WS.max(axis=0), mean_S)
        held_DS = (now_WS + held).max(axis=1)
        even_DS = np.maximum(held_DS, mean_S + own.mean(axis=1))
        own_DS = np.maximum(held_DS, mean_S + own.max(axis=1))
        for sent_DS, result in ((own_DS, found[0]), (even_DS, found[1])):
            ratio_DS = np.divide(
                sent_DS, usual_S, out=np.ones_like(sent_DS), where=usual_S > 0
            )
            for phase in phases:
                result[..., TIMED.index(phase)] *= ratio_DS[:, None]
    total = float(tokens_T[used_T].sum())
    dense_D = 1.0 + tokens_DW.max(axis=1) / total if total else np.ones(NUM_DRAWS)
    phases, alike = np.maximum(found[:, :, :, order_S], 0.0)
    return LengthFactors(phases, dense_D, alike)


def _added(
    rank_N: Ints, stage_N: Ints | None, values_N: Floats, shape: tuple[int, ...]
) -> Floats:
    """Return the sums of values by rank, or by rank and stage."""
    sums = np.zeros(shape)
    np.add.at(sums, rank_N if stage_N is None else (rank_N, stage_N), values_N)
    return sums


def lengths_differ(simulator: Simulator) -> bool:
    """Whether batches of some table are longer or shorter than others."""
    spread_T3 = _spreads(simulator.task)
    return bool((np.hypot.reduce(spread_T3, axis=1) >= _LEAST).any())


def _spreads(task: ShardingTask) -> Floats:
    """Return `TableConfig.batch_spreads` of a rank's batches, `T x 3`."""
    samples = task.batch_size / task.world_size
    return np.array([table.batch_spreads(samples) for table in task.tables])


def _drawn(
    spread_T3: Floats, tables: list[int], world_size: int
) -> Iterator[tuple[int, Floats]]:
    """Yield tables with the excess of each rank's ids over the mean, `D x W`."""
    rng = np.random.default_rng(_SEED)
    common_DW2 = draws(world_size, _SEED)
    for start in range(0, len(tables), _TABLES):
        some = tables[start : start + _TABLES]
        own_DWT = rng.standard_normal((NUM_DRAWS, world_size, len(some)))
        own_DWT -= own_DWT.mean(axis=0)
        for place, table in enumerate(some):
            common, own, batch = spread_T3[table]
            spread = float(np.hypot.reduce(spread_T3[table]))
            normal_DW = common * common_DW2[..., 0] + batch * common_DW2[..., 1]
            normal_DW += own * own_DWT[..., place]
            ids_DW = gamma_at(normal_DW / spread, spread)
            yield table, ids_DW / ids_DW.mean(axis=0) - 1.0
