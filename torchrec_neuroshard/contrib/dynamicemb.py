"""NVIDIA dynamicemb: static tables are planned here, dynamic ones as dynamicemb does.

dynamicemb's planner wraps TorchRec's and counts no memory of dynamic tables. That of
this module takes the same arguments: one import changes.

    from torchrec_neuroshard.contrib.dynamicemb import DynamicEmbeddingShardingPlanner

Read at commit 43465aea of NVIDIA/recsys-examples; not run with the real package.
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
from torchrec_neuroshard.planner.checks import table_paths, unsharded_tables
from torchrec_neuroshard.planner.greedy import without
from torchrec_neuroshard.planner.topology import default_topology

__all__ = ["DynamicEmbeddingShardingPlanner", "dynamic_bytes"]

ELSEWHERE = "dynamicemb"
"""`device_group` of dynamic tables: of no device that TorchRec plans for."""

_KEY, _DIGEST, _SCORE, _REFERENCES, _BUCKET_SIZE = 8, 1, 8, 4, 4
"""Bytes of a slot of dynamicemb's hash tables, and of a bucket (`ScoredHashTable`)."""
_SLOTS_WITHOUT_EVICTION = 2
"""Slots for each row that is never evicted: tables are kept half full."""


class DynamicEmbeddingShardingPlanner:
    """Stands in for dynamicemb's planner; `NeuroShardPlanner` plans static tables.

    Dynamic tables are row-wise on all ranks, as dynamicemb has it. What they take of
    each device is taken off the topology before the static ones are planned.

    Attributes:
        static: Plans the static tables; `static.report()` describes their plan.
        reserved_bytes: What dynamic tables take of each device.

    Args:
        eb_configs: Configurations of all tables, as for dynamicemb.
        topology: The devices. None: TorchRec's default for the process group.
        batch_size: Samples per rank.
        enumerator: Not used: `DynamicEmbeddingEnumerator` lists options for TorchRec's
            search.
        constraints: Table name -> `DynamicEmbParameterConstraints`, one for each table.
            As in dynamicemb, options of dynamic tables are completed in place.
        kwargs: Passed to `NeuroShardPlanner`: what dynamicemb's planner takes besides,
            and the keywords of its own (`profiles`, `cost_model`, `search`, ...).

    Raises:
        EnvironmentMismatchError: dynamicemb is not installed.
        ConfigError: Dynamic tables alone fill a device.
        ValueError: dynamicemb finds that constraints and configurations do not match.
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
        # It completes the options of dynamic tables, and shards them.
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
        """Plan all tables, on this rank alone; raises what `NeuroShardPlanner` does."""
        return self._merged(self.static.plan(module, sharders), module, sharders)

    def collective_plan(
        self,
        module: nn.Module,
        sharders: list[ModuleSharder[Any]],
        pg: dist.ProcessGroup | None = None,
    ) -> ShardingPlan:
        """Plan all tables, the static ones on the group's first rank.

        Args:
            module: The model, or the part of it to shard.
            sharders: dynamicemb's of the modules with dynamic tables, TorchRec's of
                others.
            pg: None: all ranks.

        Returns:
            What `DistributedModelParallel(plan=...)` takes.

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
        """Add the dynamic tables to a plan of the static ones."""
        sharders = list(sharders)
        unsharded = unsharded_tables(module, sharders)
        for path, config in table_paths(module, sharders):
            if config.name in self._dynamic and path not in unsharded:
                tables = plan.plan.setdefault(path, EmbeddingModuleShardingPlan())
                tables[config.name] = self._dynamic[config.name]
        return plan


def dynamic_bytes(options: Any) -> int:
    """Return what a dynamic table takes of each device, in bytes.

    That is the values kept there, and the hash tables of all rows, which are on the
    device wherever the values are: keys, digests, scores, counters of references. The
    table is counted full; the copy while it grows is not.

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
    if options.caching:  # the cache has a table of its own, at most as long
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
            "dynamicemb is not installed, and it shards the dynamic tables. Install it "
            "from corelib/dynamicemb of github.com/NVIDIA/recsys-examples, or use "
            "NeuroShardPlanner for tables of a fixed size"
        ) from error
    return planner.DynamicEmbeddingShardingPlanner


def _plain(constraint: Any, *, is_dynamic: bool) -> ParameterConstraints:
    """TorchRec's part of a constraint; a dynamic table is no device's to plan for."""
    names = [field.name for field in dataclasses.fields(ParameterConstraints)]
    values = {name: getattr(constraint, name) for name in names}
    if is_dynamic:
        values["device_group"] = ELSEWHERE
    return ParameterConstraints(**values)


def _room(topology: Topology, taken: int, tables: Iterable[str]) -> Topology:
    """The devices with what dynamic tables leave of their memory."""
    for device in topology.devices:
        if device.storage.hbm < taken:
            raise ConfigError(
                f"the dynamic tables {', '.join(sorted(tables))} take "
                f"{taken / 2**30:.2f} GiB of each device; rank {device.rank} has "
                f"{device.storage.hbm / 2**30:.2f} GiB. Lower global_hbm_for_values or "
                "num_embeddings, or raise world_size"
            )
    return without(topology, taken)
