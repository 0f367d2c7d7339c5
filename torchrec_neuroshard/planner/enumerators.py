"""The search space: TorchRec's, in a fixed order and without what nothing reads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.shard_estimators import EmbeddingStorageEstimator
from torchrec.distributed.planner.types import (
    ParameterConstraints,
    ShardEstimator,
    ShardingOption,
    Topology,
)
from torchrec.distributed.types import ModuleSharder

from torchrec_neuroshard.cost_models import CommsModel, CostModel
from torchrec_neuroshard.planner.lowering import (
    SEARCHED_TYPES,
    is_modelled_config,
    table_configs,
)
from torchrec_neuroshard.planner.plan_costs import PlanCosts
from torchrec_neuroshard.planner.shard_estimators import NeuroShardEstimator
from torchrec_neuroshard.profiles import FeatureProfile

__all__ = ["NeuroShardEnumerator"]

_FUSED = EmbeddingComputeKernel.FUSED.value


class NeuroShardEnumerator(EmbeddingEnumerator):
    """TorchRec's enumerator with learned estimates and a fixed order of options.

    A table that the cost model knows and that constraints and sharder allow to be fused
    table-wise or column-wise gets these options only: the search splits and places it
    itself. Any other table keeps all options that TorchRec gives it. Column splits are
    not enumerated; the partitioner chooses widths, down to the constraint's
    `min_partition` (default 4).

    Args:
        topology: The devices to plan for.
        batch_size: Samples per rank.
        constraints: Table name -> TorchRec's constraints on it.
        estimator: Replaces the learned estimator and TorchRec's storage estimator.
        cost_model: "auto", a bundle's name or folder, or a model.
        comms_model: None: as measured, else as published, else by the topology.
        profiles: Feature name -> its measured profile.
        costs: Shares one loaded cost model between parts; replaces the three above.
        kwargs: Passed to `EmbeddingEnumerator`.
    """

    def __init__(
        self,
        topology: Topology,
        batch_size: int = 512,
        constraints: Mapping[str, ParameterConstraints] | None = None,
        estimator: ShardEstimator | list[ShardEstimator] | None = None,
        *,
        cost_model: str | Path | CostModel = "auto",
        comms_model: CommsModel | None = None,
        profiles: Mapping[str, FeatureProfile] | None = None,
        costs: PlanCosts | None = None,
        **kwargs: Any,
    ) -> None:
        constraints = dict(constraints) if constraints else None
        if estimator is None:
            estimator = [
                NeuroShardEstimator(
                    topology,
                    constraints,
                    cost_model=cost_model,
                    comms_model=comms_model,
                    profiles=profiles,
                    costs=costs,
                ),
                EmbeddingStorageEstimator(topology=topology, constraints=constraints),
            ]
        super().__init__(
            topology=topology,
            batch_size=batch_size,
            constraints=constraints,
            estimator=estimator,
            **kwargs,
        )
        self._modelled: set[str] = set()

    def enumerate(
        self, module: nn.Module, sharders: list[ModuleSharder[Any]]
    ) -> list[ShardingOption]:
        """Return the options of every table, with estimates.

        Args:
            module: The model, or the part of it to shard.
            sharders: TorchRec's sharders of its embedding modules.
        """
        known: dict[str, bool] = {}
        for config in table_configs(module):
            known[config.name] = known.get(config.name, True) and is_modelled_config(
                config
            )
        self._modelled = {name for name, modelled in known.items() if modelled}
        options: list[ShardingOption] = super().enumerate(module, sharders)
        return options

    def _filter_sharding_types(
        self, name: str, allowed_sharding_types: list[str], sharder_key: str = ""
    ) -> list[str]:
        types = sorted(
            super()._filter_sharding_types(name, allowed_sharding_types, sharder_key)
        )
        searched = [t for t in types if t in SEARCHED_TYPES]
        if name not in self._modelled:
            return types
        sharder = self._sharder_map.get(sharder_key)
        fused = sharder is not None and all(
            _FUSED
            in super(NeuroShardEnumerator, self)._filter_compute_kernels(
                name, sharder.compute_kernels(t, self._compute_device), t
            )
            for t in searched
        )
        return searched if searched and fused else types

    def _filter_compute_kernels(
        self, name: str, allowed_compute_kernels: list[str], sharding_type: str
    ) -> list[str]:
        kernels = sorted(
            super()._filter_compute_kernels(
                name, allowed_compute_kernels, sharding_type
            )
        )
        known = name in self._modelled and sharding_type in SEARCHED_TYPES
        if known and _FUSED in kernels:
            return [_FUSED]
        return kernels
