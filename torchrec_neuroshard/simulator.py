"""From a placement to milliseconds: each rank's phases and the iteration they make.

Shapes: `N` shards, `E` encoding values, `W` ranks, `G` fusion groups, `C` candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from torchrec_neuroshard.cost_models.base import CommsModel, CostModel
from torchrec_neuroshard.features import ShardFeaturizer
from torchrec_neuroshard.placement import ColumnShard, Placement, ShardingTask

__all__ = ["PredictedCosts", "RankCosts", "Simulator", "critical_path"]


@dataclass(frozen=True, slots=True)
class RankCosts:
    """Predicted phases of one rank [ms]."""

    fwd_compute: float
    fwd_comms: float
    bwd_comms: float
    bwd_compute: float


@dataclass(frozen=True, slots=True)
class PredictedCosts:
    """Predicted phases of all ranks and the iteration."""

    ranks: tuple[RankCosts, ...]
    critical_path_ms: float
    """Slowest forward, collectives, slowest backward: collectives are barriers."""
    uncertainty: float = 0.0
    """Largest relative standard deviation of a rank's compute, by the ensemble."""
    compute_source: str = "measured"
    comms_source: str = "datasheet, not measured"

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary."""
        return {
            "critical_path_ms": self.critical_path_ms,
            "uncertainty": self.uncertainty,
            "compute_source": self.compute_source,
            "comms_source": self.comms_source,
            "ranks": [
                {name: getattr(r, name) for name in RankCosts.__slots__}
                for r in self.ranks
            ],
        }


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
        self.features_per_table = np.array([t.num_features for t in task.tables])
        """Output columns of a shard are its width times this."""

    def features(self, pairs: Sequence[tuple[int, int]]) -> npt.NDArray[np.float32]:
        """Return the features of (table, width) shards, `N x F`."""
        if not pairs:
            return self._featurizer.features([], [])
        table, width = zip(*pairs, strict=True)
        return self._featurizer.features(table, width)

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

    def rank_sums(
        self, placement: Placement
    ) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Sums of encodings per rank and group, and output columns per rank.

        Returns:
            `W x G x E` and `W x G`.
        """
        task = self.task
        sums = np.zeros(
            (task.world_size, task.num_groups, self.cost_model.encoding_dim)
        )
        columns = np.zeros((task.world_size, task.num_groups))
        shards: Sequence[ColumnShard] = placement.shards
        rank = np.array([s.rank for s in shards], dtype=np.int64)
        table = np.array([s.table for s in shards], dtype=np.int64)
        width = np.array([s.width for s in shards], dtype=np.float64)
        group = np.asarray(task.groups)[table]
        encodings = self.encodings([(s.table, s.width) for s in shards])
        np.add.at(sums, (rank, group), encodings)
        np.add.at(columns, (rank, group), width * self.features_per_table[table])
        return sums, columns

    def compute_costs(
        self, sums_CWGE: npt.NDArray[np.float64]
    ) -> npt.NDArray[np.float64]:
        """Forward and backward of rank sets: `... x E` -> `... x 2` [ms]."""
        flat = sums_CWGE.reshape(-1, sums_CWGE.shape[-1])
        return self.cost_model.predict_sums(flat).reshape(*sums_CWGE.shape[:-1], 2)

    def evaluate(self, placement: Placement) -> PredictedCosts:
        """Predict one iteration under a placement."""
        sums, columns = self.rank_sums(placement)
        compute_WG2 = self.compute_costs(sums)
        compute_W2 = compute_WG2.sum(axis=1)
        comms_W2 = self.comms_model.all_to_all(
            columns.sum(axis=1)[None], self.task.batch_size
        )[0]
        flat = sums.reshape(-1, sums.shape[-1])
        uncertainty = self.cost_model.relative_uncertainty(flat)
        return PredictedCosts(
            ranks=tuple(
                RankCosts(
                    fwd_compute=float(compute_W2[w, 0]),
                    fwd_comms=float(comms_W2[w, 0]),
                    bwd_comms=float(comms_W2[w, 1]),
                    bwd_compute=float(compute_W2[w, 1]),
                )
                for w in range(self.task.world_size)
            ),
            critical_path_ms=float(critical_path(compute_W2[None], comms_W2[None])[0]),
            uncertainty=float(uncertainty.max(initial=0.0)),
            compute_source=self.cost_model.source,
            comms_source=self.comms_model.source,
        )


def critical_path(
    compute_CW2: npt.NDArray[np.float64], comms_CW2: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Iteration time when every collective waits for its slowest rank.

    Args:
        compute_CW2: Forward and backward compute of each rank [ms].
        comms_CW2: Forward and backward collectives of each rank [ms].

    Returns:
        `C` milliseconds: slowest forward + collectives + slowest backward.
    """
    worst: npt.NDArray[np.float64] = compute_CW2.max(axis=1) + comms_CW2.max(axis=1)
    path: npt.NDArray[np.float64] = worst.sum(axis=1)
    return path
