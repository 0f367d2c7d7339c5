"""From a placement to milliseconds: each rank's phases and the iteration they make.

A stage is what one TorchRec module does for the tables of one sharding type: ids go to
the ranks that hold their tables (index all-to-all), fused kernels look them up (forward
compute), pooled rows come back (forward all-to-all); later their gradients go out again
(backward all-to-all) and kernels update the tables (backward compute). Every collective
waits for its slowest rank, so a stage's phases are as long as on the slowest rank, and
an iteration is as long as all of them together.

Shapes: `N` shards, `E` encoding values, `W` ranks, `G` fusion groups, `S` stages, `C`
candidates, `5` phases in the order of `PHASES`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from torchrec_neuroshard.cost_models.base import CommsModel, CostModel
from torchrec_neuroshard.features import ShardFeaturizer
from torchrec_neuroshard.placement import ColumnShard, Placement, ShardingTask

__all__ = [
    "PHASES",
    "PredictedCosts",
    "RankCosts",
    "RankLoads",
    "Simulator",
    "StageCosts",
    "critical_path",
    "in_phases",
    "order_costs",
    "stage_costs",
]

PHASES: tuple[str, ...] = (
    "index_comms",
    "fwd_compute",
    "fwd_comms",
    "bwd_comms",
    "bwd_compute",
)
"""What a rank does in a stage, in order; the dense part lies between the third and the
fourth."""

_ID_BYTES, _LENGTH_BYTES, _LOOKUP_WEIGHT_BYTES = 8, 8, 4
"""Ids and lengths of a KeyedJaggedTensor are int64, its weights fp32."""


@dataclass(frozen=True, slots=True)
class RankCosts:
    """Predicted phases of one rank [ms]."""

    index_comms: float
    fwd_compute: float
    fwd_comms: float
    bwd_comms: float
    bwd_compute: float

    def to_json(self) -> dict[str, float]:
        """Return a JSON-ready dictionary."""
        return {name: getattr(self, name) for name in PHASES}


@dataclass(frozen=True, slots=True)
class StageCosts:
    """Predicted phases of all ranks in one stage."""

    name: str
    ranks: tuple[RankCosts, ...]

    @property
    def critical_path_ms(self) -> float:
        """Each phase as long as on its slowest rank."""
        phases = np.array([[getattr(r, name) for name in PHASES] for r in self.ranks])
        return float(phases.max(axis=0).sum())


@dataclass(frozen=True, slots=True)
class PredictedCosts:
    """Predicted phases of all ranks and the iteration."""

    stages: tuple[StageCosts, ...]
    """In the order of the task's tables."""
    uncertainty: float = 0.0
    """Largest relative standard deviation of a rank's compute, by the ensemble."""
    compute_source: str = "measured"
    comms_source: str = "datasheet, not measured"

    @property
    def ranks(self) -> tuple[RankCosts, ...]:
        """Phases of each rank, over all stages."""
        return tuple(
            RankCosts(*(sum(getattr(r, name) for r in of_rank) for name in PHASES))
            for of_rank in zip(*(s.ranks for s in self.stages), strict=True)
        )

    @property
    def critical_path_ms(self) -> float:
        """All phases of all stages, each as long as on its slowest rank."""
        return sum(s.critical_path_ms for s in self.stages)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary."""
        return {
            "critical_path_ms": self.critical_path_ms,
            "uncertainty": self.uncertainty,
            "compute_source": self.compute_source,
            "comms_source": self.comms_source,
            "ranks": [r.to_json() for r in self.ranks],
            "stages": [
                {"name": s.name, "ranks": [r.to_json() for r in s.ranks]}
                for s in self.stages
            ],
        }


@dataclass(frozen=True, slots=True)
class RankLoads:
    """What the ranks hold: all that their costs depend on."""

    sums_CWGE: npt.NDArray[np.float64]
    """Sums of encodings."""
    columns_CWS: npt.NDArray[np.float64]
    """Output columns: width times features, over the shards."""
    index_bytes_CWS: npt.NDArray[np.float64]
    """Bytes of ids and lengths that a rank is sent, of all samples."""


class Simulator:
    """Costs of shards, rank sets and placements of one task.

    Encodings per (table, width) are computed once and kept.
    """

    def __init__(
        self, task: ShardingTask, cost_model: CostModel, comms_model: CommsModel
    ) -> None:
        """Prepare the tables' features."""
        self.task = task
        self.cost_model = cost_model
        self.comms_model = comms_model
        self._featurizer = ShardFeaturizer(task.tables, task.batch_size)
        self._encodings: dict[tuple[int, int], npt.NDArray[np.float64]] = {}
        self._member_SG = _members(task)
        self.features_per_table = np.array([t.num_features for t in task.tables])
        """Output columns of a shard are its width times this."""
        lookups = self._featurizer.num_lookups
        id_bytes = np.array(
            [_ID_BYTES + _LOOKUP_WEIGHT_BYTES * t.weighted for t in task.tables]
        )
        self.index_bytes_per_table: npt.NDArray[np.float64] = (
            lookups * id_bytes
            + self.features_per_table * (_LENGTH_BYTES * task.batch_size)
        )
        """Bytes of ids and lengths that every shard of a table is sent."""

    def for_task(self, task: ShardingTask) -> Simulator:
        """Return a simulator of the same tables and samples that shares encodings.

        Args:
            task: Its groups, stages, ranks and limits may differ.
        """
        other = copy.copy(self)
        other.task = task
        other._member_SG = _members(task)
        return other

    def features(self, pairs: Sequence[tuple[int, int]]) -> npt.NDArray[np.float32]:
        """Return the features of (table, width) shards, `N x F`."""
        if not pairs:
            return self._featurizer.features([], [])
        table, width = zip(*pairs, strict=True)
        return self._featurizer.features(table, width)

    def shard_features(
        self, table_N: npt.NDArray[np.int64], width_N: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.float32]:
        """Return the features of shards, `N x F`."""
        return self._featurizer.features(table_N, width_N)

    def encodings(self, pairs: Sequence[tuple[int, int]]) -> npt.NDArray[np.float64]:
        """Return the encodings of (table, width) shards, `N x E`."""
        new = sorted({p for p in pairs if p not in self._encodings})
        if new:
            rows = self.cost_model.encode(self.features(new))
            self._encodings.update(zip(new, rows, strict=True))
        if not pairs:
            return np.zeros((0, self.cost_model.encoding_dim))
        return np.stack([self._encodings[p] for p in pairs])

    def single_costs(self, pairs: Sequence[tuple[int, int]]) -> npt.NDArray[np.float64]:
        """Forward and backward of each shard alone, `N x 2` [ms]."""
        return self.cost_model.predict_sums(self.encodings(pairs))

    def rank_loads(self, placement: Placement) -> RankLoads:
        """Return what each rank holds under one placement (no axis `C`)."""
        task = self.task
        sums = np.zeros(
            (task.world_size, task.num_groups, self.cost_model.encoding_dim)
        )
        columns = np.zeros((task.world_size, task.num_stages))
        index_bytes = np.zeros_like(columns)
        shards: Sequence[ColumnShard] = placement.shards
        rank = np.array([s.rank for s in shards], dtype=np.int64)
        table = np.array([s.table for s in shards], dtype=np.int64)
        width = np.array([s.width for s in shards], dtype=np.float64)
        group = np.asarray(task.groups)[table]
        stage = np.asarray(task.stages)[group]
        encodings = self.encodings([(s.table, s.width) for s in shards])
        np.add.at(sums, (rank, group), encodings)
        np.add.at(columns, (rank, stage), width * self.features_per_table[table])
        np.add.at(index_bytes, (rank, stage), self.index_bytes_per_table[table])
        return RankLoads(sums, columns, index_bytes)

    def compute_costs(
        self, sums_CWGE: npt.NDArray[np.float64]
    ) -> npt.NDArray[np.float64]:
        """Forward and backward of rank sets: `... x E` -> `... x 2` [ms]."""
        flat = sums_CWGE.reshape(-1, sums_CWGE.shape[-1])
        return self.cost_model.predict_sums(flat).reshape(*sums_CWGE.shape[:-1], 2)

    def stage_compute(
        self, compute_CWG2: npt.NDArray[np.float64]
    ) -> npt.NDArray[np.float64]:
        """Add up the kernels of each stage: `... x G x 2` -> `... x S x 2`."""
        total: npt.NDArray[np.float64] = np.matmul(self._member_SG, compute_CWG2)
        return total

    def comms_costs(
        self,
        columns_CWS: npt.NDArray[np.float64],
        index_bytes_CWS: npt.NDArray[np.float64],
    ) -> npt.NDArray[np.float64]:
        """Index, forward and backward all-to-all of each rank: `C x W x S x 3` [ms]."""
        count, world_size, num_stages = columns_CWS.shape
        columns = columns_CWS.swapaxes(1, 2).reshape(-1, world_size)
        index_bytes = index_bytes_CWS.swapaxes(1, 2).reshape(-1, world_size)
        pooled = self.comms_model.all_to_all(columns, self.task.batch_size)
        index = self.comms_model.index_all_to_all(index_bytes)
        both = np.concatenate([index[..., None], pooled], axis=2)
        return both.reshape(count, num_stages, world_size, 3).swapaxes(1, 2)

    def phases(
        self,
        compute_CWS2: npt.NDArray[np.float64],
        columns_CWS: npt.NDArray[np.float64],
        index_bytes_CWS: npt.NDArray[np.float64],
    ) -> npt.NDArray[np.float64]:
        """Return `C x W x S x 5`: phases of each rank in each stage [ms].

        Args:
            compute_CWS2: Forward and backward compute [ms].
            columns_CWS: See `RankLoads`.
            index_bytes_CWS: See `RankLoads`.
        """
        return in_phases(compute_CWS2, self.comms_costs(columns_CWS, index_bytes_CWS))

    def column_order_costs(self, placement: Placement) -> npt.NDArray[np.float64]:
        """Reordering of the outputs of stages with split tables, `S x 2` [ms].

        The same on all ranks: each does it for its own samples.
        """
        task = self.task
        shards_T = np.bincount([s.table for s in placement.shards])
        stage_T = np.asarray(task.stages)[np.asarray(task.groups)]
        widths_T = [t.embedding_dim for t in task.tables]
        columns_T = np.array(widths_T) * self.features_per_table
        columns_S = np.bincount(
            stage_T, weights=columns_T, minlength=task.num_stages
        ).astype(np.float64)
        split_S = np.bincount(stage_T, weights=shards_T > 1, minlength=task.num_stages)
        return order_costs(self.comms_model, columns_S, split_S > 0, task.batch_size)

    def evaluate(self, placement: Placement) -> PredictedCosts:
        """Predict one iteration under a placement."""
        loads = self.rank_loads(placement)
        compute = self.stage_compute(self.compute_costs(loads.sums_CWGE))
        phases_WS5 = self.phases(
            compute[None], loads.columns_CWS[None], loads.index_bytes_CWS[None]
        )[0]
        order_S2 = self.column_order_costs(placement)
        phases_WS5[:, :, [2, 3]] += order_S2  # beside the pooled all-to-alls
        flat = loads.sums_CWGE.reshape(-1, loads.sums_CWGE.shape[-1])
        uncertainty = self.cost_model.relative_uncertainty(flat)
        return PredictedCosts(
            stages=stage_costs(self.task.stage_names, phases_WS5),
            uncertainty=float(uncertainty.max(initial=0.0)),
            compute_source=self.cost_model.source,
            comms_source=self.comms_model.source,
        )


def in_phases(
    compute_X2: npt.NDArray[np.float64], comms_X3: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Put compute and collectives in the order of `PHASES`.

    Args:
        compute_X2: Forward and backward, `... x 2`.
        comms_X3: Index, forward and backward, `... x 3`.

    Returns:
        `... x 5`.
    """
    index, comms = comms_X3[..., :1], comms_X3[..., 1:]
    forward, backward = compute_X2[..., :1], compute_X2[..., 1:]
    return np.concatenate([index, forward, comms, backward], axis=-1)


def order_costs(
    comms_model: CommsModel,
    columns_S: npt.NDArray[np.float64],
    is_split_S: npt.NDArray[np.bool_],
    batch_size: int,
) -> npt.NDArray[np.float64]:
    """Reordering of each stage's outputs, `S x 2` [ms].

    Args:
        comms_model: See `CommsModel.column_order`.
        columns_S: Output columns that are put in order.
        is_split_S: Whether any table's columns lie in several shards.
        batch_size: Samples over all ranks.
    """
    order_S2 = comms_model.column_order(columns_S, batch_size)
    return np.where(is_split_S[:, None], order_S2, 0.0)


def stage_costs(
    names: Sequence[str], phases_WS5: npt.NDArray[np.float64]
) -> tuple[StageCosts, ...]:
    """Name the phases of each stage."""
    return tuple(
        StageCosts(name, tuple(RankCosts(*row) for row in phases_WS5[:, s].tolist()))
        for s, name in enumerate(names)
    )


def critical_path(phases_CWSP: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Iteration time when every phase waits for its slowest rank.

    Args:
        phases_CWSP: Phases of each rank in each stage [ms], as many as there are.

    Returns:
        `C` milliseconds.
    """
    path: npt.NDArray[np.float64] = phases_CWSP.max(axis=1).sum(axis=(1, 2))
    return path


def _members(task: ShardingTask) -> npt.NDArray[np.float64]:
    """Say which groups are of which stage, `S x G`, 0 or 1."""
    return np.eye(task.num_stages)[:, list(task.stages)]
