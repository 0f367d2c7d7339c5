"""Planners with the same inputs, and one cost model that predicts all plans."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import (
    EmbeddingShardingPlanner,
    ParameterConstraints,
    Topology,
)
from torchrec.distributed.planner.storage_reservations import (
    FixedPercentageStorageReservation,
)
from torchrec.distributed.types import ShardingPlan

from harness.models import ConcatDLRM
from torchrec_neuroshard import FeatureProfile, NeuroShardPlanner, TableConfig
from torchrec_neuroshard.costs.simulator import PHASES, PredictedCosts
from torchrec_neuroshard.models.base import CommsModel, CostModel

OURS, FAITHFUL = "ours", "neuroshard"
BEST_PRACTICE, STOCK = "torchrec-best", "torchrec"
PLANNERS = {
    OURS: "NeuroShardPlanner, default search",
    FAITHFUL: "NeuroShardPlanner with NeuroShard's own search, on the same cost model",
    BEST_PRACTICE: "TorchRec's planner: pooling factors, min_partition=32, table-wise "
    "and column-wise",
    STOCK: "TorchRec's planner, no constraints",
}
RESERVED = 0.15
"""Share of the memory that planners must leave free."""


class PlanningDesk:
    """Makes the planners of a model, with the same inputs. One rank plans."""

    def __init__(
        self,
        tables: Sequence[TableConfig],
        profiles: Mapping[str, FeatureProfile],
        *,
        topology: Mapping[str, Any],
        batch_size: int,
        cost_model: CostModel,
        comms_model: CommsModel,
        min_partition: int = 32,
        same_limits: bool = False,
        num_modules: int = 1,
        sharder: EmbeddingBagCollectionSharder | None = None,
    ) -> None:
        """Take the inputs of the planners.

        Args:
            tables: Tables of `ConcatDLRM`.
            profiles: Profiles of the features. TorchRec's planner gets their pooling
                factors.
            topology: Arguments of `Topology`.
            batch_size: Samples per rank.
            cost_model: Predicts the kernels of all plans.
            comms_model: Predicts the collectives of all plans.
            min_partition: Narrowest column shard for TorchRec's best practice.
            same_limits: Whether our planners, too, are limited to best practice's
                sharding types and `min_partition`.
            num_modules: As for `ConcatDLRM`.
            sharder: Offers the sharding types. None: TorchRec's, which offers no
                row-wise sharding on CPUs.
        """
        self._num_modules = num_modules
        self._sharders = [sharder or EmbeddingBagCollectionSharder()]
        self._tables, self._profiles = tuple(tables), dict(profiles)
        self._topology, self._batch_size = dict(topology), batch_size
        self._cost_model, self._comms_model = cost_model, comms_model
        self._best_practice = {
            "sharding_types": ["table_wise", "column_wise"],
            "min_partition": min_partition,
        }
        self._our_limits = self._best_practice if same_limits else {}

    def planner(self, name: str) -> EmbeddingShardingPlanner:
        """Return a planner by its name in `PLANNERS`."""
        shared: dict[str, Any] = {
            "topology": Topology(**self._topology),
            "batch_size": self._batch_size,
            "storage_reservation": FixedPercentageStorageReservation(RESERVED),
        }
        if name == STOCK:
            return EmbeddingShardingPlanner(**shared)
        limits = self._best_practice if name == BEST_PRACTICE else self._our_limits
        if name == FAITHFUL:  # which has no other types
            limits = {"sharding_types": self._best_practice["sharding_types"], **limits}
        shared["constraints"] = {
            t.name: ParameterConstraints(
                pooling_factors=[self._profiles[t.name].pooling_factor], **limits
            )
            for t in self._tables
        }
        if name == BEST_PRACTICE:
            return EmbeddingShardingPlanner(**shared)
        return NeuroShardPlanner(
            **shared,
            cost_model=self._cost_model,
            comms_model=self._comms_model,
            profiles=self._profiles,
            search="neuroshard" if name == FAITHFUL else "default",
        )

    def model(self) -> ConcatDLRM:
        """Return the model to plan."""
        cpu = torch.device("cpu")
        return ConcatDLRM(self._tables, cpu, num_modules=self._num_modules)

    def plan(
        self, name: str
    ) -> tuple[ShardingPlan, EmbeddingShardingPlanner, dict[str, Any]]:
        """Return the plan of a planner, the planner, and its entry in the results."""
        planner = self.planner(name)
        start = time.perf_counter()
        plan = planner.plan(self.model(), self._sharders)
        entry: dict[str, Any] = {
            "planning_seconds": time.perf_counter() - start,
            "sharding_types": count_types(plan),
        }
        result = getattr(planner, "last_result", None)
        if result is not None:
            entry["gap"] = result.gap
            entry["fallback"] = result.fallback
            entry["warnings"] = list(result.warnings)
        judged = self.predict(plan)
        entry["predicted"] = {
            "embedding_ms": judged.critical_path_ms,
            "phases_ms": predicted_phases(judged),
            "critical_path_ms": judged.critical_path_ms,
            "uncertainty": judged.uncertainty,
            "compute_source": judged.compute_source,
            "comms_source": judged.comms_source,
            "ranks": [rank.to_json() for rank in judged.ranks],
        }
        return plan, planner, entry

    def predict(self, plan: ShardingPlan) -> PredictedCosts:
        """Return the predicted costs of any plan of the model."""
        ours = self.planner(OURS)
        assert isinstance(ours, NeuroShardPlanner)
        options = ours.placed_options(plan, self.model(), self._sharders)
        return ours.costs.placed(options).predicted

    @property
    def nominal_reference_ms(self) -> float:
        """Time of the reference set on the cost model's machine [ms]; 0: unknown."""
        return float(getattr(self._cost_model, "reference_ms", 0.0))


def predicted_phases(predicted: PredictedCosts) -> dict[str, float]:
    """Return the time of each phase over all ranks and stages [ms]."""
    return {
        name: sum(
            max(getattr(r, name) for r in stage.ranks) for stage in predicted.stages
        )
        for name in PHASES
    }


def count_types(plan: ShardingPlan) -> dict[str, int]:
    """Return the number of tables of each sharding type and kernel."""
    counts: dict[str, int] = {}
    for module_plan in plan.plan.values():
        for sharding in module_plan.values():
            kind = f"{sharding.sharding_type}/{sharding.compute_kernel}"
            counts[kind] = counts.get(kind, 0) + 1
    return dict(sorted(counts.items()))
