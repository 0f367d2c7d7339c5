"""A planner for NVIDIA dynamicemb that plans the static tables with this package.

dynamicemb's planner wraps TorchRec's and does not count the memory of dynamic tables.
The planner of this module takes the same arguments, so only the import changes:

    from torchrec_neuroshard.contrib.dynamicemb import DynamicEmbeddingShardingPlanner

It was written from commit 43465aea of NVIDIA/recsys-examples and never run with the
real package.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch.distributed as dist
from torch import nn
from torchrec.distributed.planner.types import ParameterConstraints, Topology
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    ModuleSharder,
    ParameterSharding,
    ShardingPlan,
)
from torchrec.modules.embedding_configs import BaseEmbeddingConfig

from torchrec_neuroshard.errors import ConfigError, EnvironmentMismatchError
from torchrec_neuroshard.planner import NeuroShardPlanner
from torchrec_neuroshard.planner.checks import ELSEWHERE, table_paths, unsharded_tables
from torchrec_neuroshard.planner.greedy import without
from torchrec_neuroshard.planner.topology import default_topology

_KEY, _DIGEST, _SCORE, _REFERENCES, _BUCKET_SIZE = 8, 1, 8, 4, 4
"""Bytes of a slot's parts, and of a bucket, in dynamicemb's `ScoredHashTable`."""
_SLOTS_WITHOUT_EVICTION = 2
"""Slots per row without eviction: dynamicemb keeps these tables half full."""


class DynamicEmbeddingShardingPlanner:
    """Replaces dynamicemb's planner; `NeuroShardPlanner` plans the static tables.

    Dynamic tables are row-wise on all ranks, as in dynamicemb. Their memory is
    subtracted from each device before the static tables are planned.

    Attributes:
        static: Planner of the static tables. `static.report()` describes their plan.
        reserved_bytes: Memory of the dynamic tables on each device [bytes].

    Args:
        eb_configs: Configurations of all tables, as for dynamicemb.
        topology: The devices. None: TorchRec's default for the process group.
        batch_size: Samples per rank.
        enumerator: Ignored. dynamicemb's `DynamicEmbeddingEnumerator` lists options
            for TorchRec's search, which is not used here.
        constraints: Table name -> `DynamicEmbParameterConstraints`, one per table. As
            in dynamicemb, options of dynamic tables are completed in place.
        kwargs: Passed to `NeuroShardPlanner`: its own keywords (`profiles`,
            `cost_model`, `search`, ...) and the other ones of dynamicemb's planner.

    Raises:
        EnvironmentMismatchError: dynamicemb is not installed.
        ConfigError: The dynamic tables alone exceed a device's memory.
        ValueError: From dynamicemb: constraints and configurations do not match.
    """

    def __init__(
        self,
        eb_configs: list[BaseEmbeddingConfig],
        topology: Topology | None = None,
        batch_size: int | None = None,
        enumerator: Any = None,
        *,
        constraints: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        theirs = _their_planner()
        topology = default_topology() if topology is None else topology
        given = dict(constraints or {})
        # dynamicemb completes the options of dynamic tables and shards them.
        planner = theirs(
            eb_configs=eb_configs,
            topology=topology,
            batch_size=batch_size,
            constraints=given,
            debug=False,
        )
        self._dynamic: Mapping[str, ParameterSharding] = planner._dyn_emb_plan
        self.reserved_bytes = sum(
            dynamic_bytes(given[name].dynamicemb_options) for name in self._dynamic
        )
        self.static = NeuroShardPlanner(
            _room(topology, self.reserved_bytes, self._dynamic),
            batch_size,
            constraints={
                name: _plain(constraint, is_dynamic=name in self._dynamic)
                for name, constraint in given.items()
            },
            **kwargs,
        )

    def plan(
        self, module: nn.Module, sharders: list[ModuleSharder[Any]]
    ) -> ShardingPlan:
        """Return a plan of all tables, made on this rank alone.

        Raises the errors of `NeuroShardPlanner.plan`.
        """
        return self._merged(self.static.plan(module, sharders), module, sharders)

    def collective_plan(
        self,
        module: nn.Module,
        sharders: list[ModuleSharder[Any]],
        pg: dist.ProcessGroup | None = None,
    ) -> ShardingPlan:
        """Return a plan of all tables; the group's first rank plans the static ones.

        Args:
            module: The model, or the part of it to shard.
            sharders: dynamicemb's sharders for modules with dynamic tables, TorchRec's
                for other modules.
            pg: The process group. None: all ranks.

        Returns:
            The plan, for `DistributedModelParallel(plan=...)`.

        Raises:
            PlannerError: The static tables do not fit beside the dynamic ones.
            ConfigError: As in `NeuroShardPlanner`.
        """
        found = self.static.collective_plan(module, sharders, pg)
        return self._merged(found, module, sharders)

    def _merged(
        self,
        plan: ShardingPlan,
        module: nn.Module,
        sharders: Iterable[ModuleSharder[Any]],
    ) -> ShardingPlan:
        """Return the plan of the static tables with the dynamic ones added."""
        sharders = list(sharders)
        unsharded = unsharded_tables(module, sharders)
        for path, config in table_paths(module, sharders):
            if config.name in self._dynamic and path not in unsharded:
                tables = plan.plan.setdefault(path, EmbeddingModuleShardingPlan())
                tables[config.name] = self._dynamic[config.name]
        return plan


def dynamic_bytes(options: Any) -> int:
    """Return the memory of a dynamic table on each device [bytes].

    It counts the values on the device and the hash table of all rows: keys, digests,
    scores and reference counters. The hash table is on the device even if the values
    are not. The table is counted full, without the copy that exists while it grows.

    Args:
        options: dynamicemb's `DynamicEmbTableOptions`, completed by its planner.
    """
    strategy = options.score_strategy
    scores = len(strategy) if isinstance(strategy, tuple) else 1
    slot = _KEY + _DIGEST + scores * _SCORE + _REFERENCES
    bucket_slot = slot + _BUCKET_SIZE / options.bucket_capacity
    slots = options.max_capacity
    if getattr(strategy, "name", "") == "NO_EVICTION":
        slots *= _SLOTS_WITHOUT_EVICTION
    if options.caching:  # the cache has its own hash table, at most as long
        row = options.dim * options.embedding_dtype.itemsize
        slots += min(options.max_capacity, options.local_hbm_for_values // row)
    counter = getattr(options.admission_counter, "capacity", 0)
    found = options.local_hbm_for_values + (slots + counter) * bucket_slot
    return int(found) + 1


def _their_planner() -> Any:
    try:
        planner = importlib.import_module("dynamicemb.planner")
    except ImportError as error:
        raise EnvironmentMismatchError(
            "dynamicemb is not installed, but it shards the dynamic tables. Install it "
            "from corelib/dynamicemb of github.com/NVIDIA/recsys-examples, or use "
            "NeuroShardPlanner if no table is dynamic"
        ) from error
    return planner.DynamicEmbeddingShardingPlanner


def _plain(constraint: Any, *, is_dynamic: bool) -> ParameterConstraints:
    """Return TorchRec's fields of a constraint; dynamic tables get no device."""
    names = [field.name for field in dataclasses.fields(ParameterConstraints)]
    values = {name: getattr(constraint, name) for name in names}
    if is_dynamic:
        values["device_group"] = ELSEWHERE
    return ParameterConstraints(**values)


def _room(topology: Topology, taken: int, tables: Iterable[str]) -> Topology:
    """Return the topology without the memory of the dynamic tables."""
    for device in topology.devices:
        if device.storage.hbm < taken:
            raise ConfigError(
                f"the dynamic tables {', '.join(sorted(tables))} need "
                f"{taken / 2**30:.2f} GiB on each device; rank {device.rank} has "
                f"{device.storage.hbm / 2**30:.2f} GiB. Lower global_hbm_for_values or "
                "num_embeddings, or use more ranks"
            )
    return without(topology, taken)
