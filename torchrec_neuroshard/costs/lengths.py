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
    spread_T3, uneven_T = _spreads(simulator.task)
    used_T = np.unique(shards.table_N)
    uneven = [t for t in used_T.tolist() if uneven_T[t]]
    if not uneven:
        return None
    tables, num_ranks = simulator.task.tables, simulator.task.world_size
    is_used_T = np.isin(np.arange(len(tables)), used_T)
    unpooled_T = ~simulator.pooled_T * is_used_T
    unpooled_N = unpooled_T[shards.table_N]
    lengths_N = simulator.length_bytes_T[shards.table_N]
    rows = _Exchange(
        simulator,
        shards.loads_N3[:, 1] * unpooled_N,
        simulator.columns_per_table * unpooled_T,
        (shards.table_N, rank_N),
    )
    ids = _Exchange(
        simulator,
        shards.loads_N3[:, 0] - lengths_N,
        simulator.id_bytes_T * is_used_T,
        (shards.table_N, rank_N),
    )
    share_TW = _kernel_shares(simulator, shards, rank_N)
    tokens_T = np.array([t.pooling_factor for t in tables]) * unpooled_T
    num_stages = simulator.task.num_stages
    kernels_2DWS = np.zeros((2, NUM_DRAWS, num_ranks, num_stages))
    tokens_DW = np.zeros((NUM_DRAWS, num_ranks))
    for table, own_DW in _drawn(spread_T3, uneven, num_ranks):
        stage, every_DW = simulator.stages_T[table], own_DW.mean(axis=1)[:, None]
        seen_DW = own_DW if simulator.replicated_S[stage] else every_DW
        for part_DWS, more_DW in zip(kernels_2DWS, (seen_DW, every_DW), strict=True):
            part_DWS[:, :, stage] += share_TW[table] * more_DW
        rows.add(table, own_DW)
        ids.add(table, own_DW)
        tokens_DW += tokens_T[table] * own_DW
    found = np.ones((2, NUM_DRAWS, num_ranks, num_stages, len(TIMED)))
    for phase in ("fwd_compute", "bwd_compute"):
        found[..., TIMED.index(phase)] += kernels_2DWS
    for sent, phases in ((rows, ("fwd_comms", "bwd_comms")), (ids, ("index_comms",))):
        for phase in phases:
            found[..., TIMED.index(phase)] *= sent.factors()[:, :, None]
    dense_D = np.ones(NUM_DRAWS)
    if total := float(tokens_T.sum()):
        dense_D += tokens_DW.max(axis=1) / total
    unequal, even = np.maximum(found[:, :, :, order_S], 0.0)
    return LengthFactors(unequal, dense_D, even)


class _Exchange:
    """What ranks send of their shards, and what they send or get for their samples.

    Args:
        simulator: The simulator of the task.
        held_N: Amount of each shard, for all ranks' samples.
        of_T: Amount of each table, for all ranks' samples.
        placed: Table and rank of each shard.
    """

    def __init__(
        self,
        simulator: Simulator,
        held_N: Floats,
        of_T: Floats,
        placed: tuple[Ints, Ints],
    ) -> None:
        self._stages_T, (table_N, rank_N) = simulator.stages_T, placed
        num_ranks, num_stages = simulator.task.world_size, simulator.task.num_stages
        self._held_TW = np.zeros((len(of_T), num_ranks))
        np.add.at(self._held_TW, (table_N, rank_N), held_N)
        self._own_T = of_T / num_ranks
        self._mean_S = np.bincount(self._stages_T, self._own_T, num_stages)
        usual_WS = np.zeros((num_ranks, num_stages))
        np.add.at(usual_WS.T, self._stages_T, self._held_TW)
        self._most_S = np.maximum(usual_WS.max(axis=0), self._mean_S)
        self._held_DWS = np.tile(usual_WS, (NUM_DRAWS, 1, 1))
        self._own_DWS = np.zeros_like(self._held_DWS)

    def add(self, table: int, own_DW: Floats) -> None:
        """Add the excess of a table's ids."""
        stage, every_D1 = self._stages_T[table], own_DW.mean(axis=1)[:, None]
        self._held_DWS[:, :, stage] += self._held_TW[table] * every_D1
        self._own_DWS[:, :, stage] += self._own_T[table] * own_DW

    def factors(self) -> Floats:
        """Return factors on the exchange, `2 x D x S`: unequal and even samples."""
        own_2DS = np.stack([self._own_DWS.max(axis=1), self._own_DWS.mean(axis=1)])
        sent_2DS = np.maximum(self._held_DWS.max(axis=1), self._mean_S + own_2DS)
        ratio: Floats = np.ones_like(sent_2DS)
        np.divide(sent_2DS, self._most_S, out=ratio, where=self._most_S > 0)
        return ratio


def _kernel_shares(simulator: Simulator, shards: PricedShards, rank_N: Ints) -> Floats:
    """Return each table's share of the kernels of a rank and stage, `T x W`."""
    launch_ms = float(simulator.encoder.launch_ms.sum())
    alone_N = simulator.single_compute(shards).sum(axis=1) - launch_ms
    shape = len(simulator.dims_T), simulator.task.world_size
    ms_TW = np.zeros(shape)
    np.add.at(ms_TW, (shards.table_N, rank_N), np.maximum(alone_N, 0.0))
    total_SW = np.full((simulator.task.num_stages, shape[1]), launch_ms)
    np.add.at(total_SW, simulator.stages_T, ms_TW)
    shares: Floats = ms_TW / np.maximum(total_SW[simulator.stages_T], 1e-9)
    return shares


def lengths_differ(simulator: Simulator) -> bool:
    """Whether batches of some table are longer or shorter than others."""
    return bool(_spreads(simulator.task)[1].any())


def _spreads(task: ShardingTask) -> tuple[Floats, npt.NDArray[np.bool_]]:
    """Return `batch_spreads` of a rank's batches, `T x 3`, and which tables differ."""
    samples = task.batch_size / task.world_size
    spread_T3 = np.array([table.batch_spreads(samples) for table in task.tables])
    return spread_T3, np.hypot.reduce(spread_T3, axis=1) >= _LEAST


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
