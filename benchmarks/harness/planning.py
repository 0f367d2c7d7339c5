"""Planners with the same inputs, and one cost model that predicts all plans."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torchrec.distributed.planner import (
    EmbeddingShardingPlanner,
    ParameterConstraints,
    Topology,
)
from torchrec.distributed.planner.storage_reservations import (
    FixedPercentageStorageReservation,
)
from torchrec.distributed.types import ShardingPlan

from harness.models import ConcatDLRM, sharders
from torchrec_neuroshard import FeatureProfile, NeuroShardPlanner, TableConfig
from torchrec_neuroshard.costs.simulator import PHASES, PredictedCosts
from torchrec_neuroshard.models.base import CommsModel, CostModel

OURS, CALIBRATED = "ours", "calibrated"
BEST_PRACTICE, ALL_TYPES = "best-practice", "all-types"
TORCHREC = (BEST_PRACTICE, ALL_TYPES)
MIN_PARTITION = 32
PLANNERS = {
    OURS: "this planner in place of TorchRec's: the same pooling factors, the shipped "
    "cost model",
    CALIBRATED: "this planner with kernels and collectives measured on this machine, "
    "and profiles of the features",
    BEST_PRACTICE: "TorchRec's planner with table- and column-wise sharding",
    ALL_TYPES: "TorchRec's planner with all sharding types of its sharders",
}
RESERVED = 0.15
"""Share of the memory that planners must leave free."""


class PlanningDesk:
    """Makes the planners of a model, with the same inputs. One rank plans.

    All get pooling factors, `min_partition=32` and the machine's bandwidths.
    """

    def __init__(
        self,
        tables: Sequence[TableConfig],
        profiles: Mapping[str, FeatureProfile],
        *,
        topology: Mapping[str, Any],
        batch_size: int,
        cost_model: CostModel,
        comms_model: CommsModel,
    ) -> None:
        """Take the inputs of the planners.

        Args:
            tables: Tables of `ConcatDLRM`.
            profiles: Profiles of the features. Planners but `CALIBRATED` get their
                pooling factors only.
            topology: Arguments of `Topology`.
            batch_size: Samples per rank.
            cost_model: Predicts the kernels of all plans; `CALIBRATED` plans with it.
            comms_model: The same for collectives.
        """
        self._tables, self._profiles = tuple(tables), dict(profiles)
        self._topology, self._batch_size = dict(topology), batch_size
        self._cost_model, self._comms_model = cost_model, comms_model

    def planner(self, name: str) -> EmbeddingShardingPlanner:
        """Return a planner by its name in `PLANNERS`."""
        limits: dict[str, Any] = {"min_partition": MIN_PARTITION}
        if name == BEST_PRACTICE:
            limits["sharding_types"] = ["table_wise", "column_wise"]
        shared: dict[str, Any] = {
            "topology": Topology(**self._topology),
            "batch_size": self._batch_size,
            "storage_reservation": FixedPercentageStorageReservation(RESERVED),
            "constraints": {
                t.name: ParameterConstraints(
                    pooling_factors=[self._profiles[t.name].pooling_factor], **limits
                )
                for t in self._tables
            },
        }
        if name in TORCHREC:
            return EmbeddingShardingPlanner(**shared)
        if name == OURS:
            return NeuroShardPlanner(**shared, calibrate="never")
        return NeuroShardPlanner(
            **shared,
            cost_model=self._cost_model,
            comms_model=self._comms_model,
            profiles=self._profiles,
        )

    def model(self) -> ConcatDLRM:
        """Return the model to plan."""
        return ConcatDLRM(self._tables, torch.device("cpu"))

    def plan(
        self, name: str
    ) -> tuple[ShardingPlan, EmbeddingShardingPlanner, dict[str, Any]]:
        """Return the plan of a planner, the planner, and its entry in the results."""
        planner = self.planner(name)
        start = time.perf_counter()
        plan = planner.plan(self.model(), sharders())
        entry: dict[str, Any] = {
            "planning_seconds": time.perf_counter() - start,
            "sharding_types": count_types(plan),
        }
        judged = self.predict(plan)
        entry["predicted"] = {
            "embedding_ms": judged.expected_ms,
            "critical_path_ms": judged.critical_path_ms,
            "phases_ms": predicted_phases(judged),
            "ranks": [rank.to_json() for rank in judged.ranks],
            "compute_source": judged.compute_source,
            "comms_source": judged.comms_source,
        }
        return plan, planner, entry

    def predict(self, plan: ShardingPlan) -> PredictedCosts:
        """Return the predicted costs of any plan of the model."""
        judge = self.planner(CALIBRATED)
        assert isinstance(judge, NeuroShardPlanner)
        options = judge.placed_options(plan, self.model(), sharders())
        return judge.costs.placed(options).predicted


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
