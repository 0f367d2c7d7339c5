"""The search space: TorchRec's sharding options, sorted and without useless ones."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner.types import (
    ParameterConstraints,
    ShardEstimator,
    ShardingOption,
    Topology,
)
from torchrec.distributed.types import CacheParams, ModuleSharder
from torchrec.modules.embedding_configs import BaseEmbeddingConfig, EmbeddingBagConfig

from torchrec_neuroshard.costs.placement_constraints import PlacementConstraints
from torchrec_neuroshard.costs.schedules import PREFETCHING
from torchrec_neuroshard.errors import ConfigError
from torchrec_neuroshard.hardware.device_types import is_accelerator
from torchrec_neuroshard.models.base import CommsModel, CostModel
from torchrec_neuroshard.planner.checks import (
    check_batch_size,
    check_constraints,
    table_paths,
)
from torchrec_neuroshard.planner.classes import TableClasses
from torchrec_neuroshard.planner.compat import (
    HookedEnumerator,
    enumerator_constraints,
    may_have_buckets,
    pipeline_name,
    sharders_by_type,
)
from torchrec_neuroshard.planner.estimators import NeuroShardEstimator, StorageEstimator
from torchrec_neuroshard.planner.memory import MemoryModel
from torchrec_neuroshard.planner.option_facts import (
    OFFLOADED_KERNELS,
    device_tier,
    has_cache,
    is_modelled_config,
    note_sharders,
    table_name,
)
from torchrec_neuroshard.planner.plan_costs import PlanCosts
from torchrec_neuroshard.planner.reader import TableReader
from torchrec_neuroshard.planner.spread_options import SpreadOption, without_estimates
from torchrec_neuroshard.planner.stored_options import unplaced, with_chosen
from torchrec_neuroshard.planner.table_keys import ModuleConstraints, constraint_on
from torchrec_neuroshard.planner.ways import Ways, useful_options
from torchrec_neuroshard.tables.profile import FeatureProfile
from torchrec_neuroshard.tables.sharding_types import SHARDING_TYPES, SPLITTING_TYPES
from torchrec_neuroshard.tables.table_keys import table_keys

_FUSED = EmbeddingComputeKernel.FUSED.value

_NEARLY_ALL = 0.9
"""If tables with optimizer state fill less than this share of all device memory, small
tables stay on devices."""
_SMALL_SHARE = 1 / 16
"""A small table, with optimizer state, fills at most this share of one device."""


class NeuroShardEnumerator(HookedEnumerator):
    """TorchRec's enumerator with learned estimates and a fixed order of options.

    For tables that the cost model knows, it leaves out options that cannot win:

    - table-column-wise, if the table may be column-wise and no constraint asks for
      table-column-wise alone. The search splits columns itself, down to the
      constraint's `min_partition` (default 4; 32 on GPUs whose costs are estimates).
    - options that kernels or collectives would refuse at run time.
    - table-row-wise, if all ranks are in one node, where row-wise is the same.
    - kernels that read host memory, if no constraint asks for them and device memory is
      plentiful. It is plentiful if all tables with optimizer state fill less than half
      of the devices and no table fills one device alone. Tables that placement
      constraints pin to some devices, or keep together on one, are checked the same
      way. If tables fill more than half but not nearly all, only small tables go
      without these kernels, since large tables free the memory. `withheld` returns
      these options.

    An option stays if a constraint allows nothing else, and other tables keep all
    options.

    Attributes:
        memory: The memory model of what ranks allocate. None: the caller's `estimator`
            counts memory.
        listed: All options listed last; empty if tables were listed by class.
        first_listed: All options listed last with the memory that ranks allocate, not
            with TorchRec's smaller count.
        chosen: The planner's last plan.

    Args:
        topology: The devices to plan for.
        batch_size: Samples per rank.
        constraints: Table name -> TorchRec's constraints on the table.
        estimator: Replaces the learned estimator and the estimator of memory.
        cost_model: "auto", a bundle's name or folder, or a `CostModel`.
        comms_model: None: measured times, else published ones, else the topology's
            bandwidths.
        profiles: Feature name -> its measured profile.
        costs: One loaded cost model shared between parts; replaces the three arguments
            above.
        placement: Which ranks tables may use. None: any.
        pipeline_type: TorchRec's `PipelineType` of the training loop. Unless there is
            an `estimator`, what the pipeline keeps on the device counts as memory. It
            also turns on prefetching for caches. None: no pipeline.
        for_search: Whether only `NeuroShardPartitioner` places the options. It then
            also leaves out options that others include for the search (`useful_ways`).
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
        placement: PlacementConstraints | None = None,
        pipeline_type: Any = None,
        for_search: bool = False,
        **kwargs: Any,
    ) -> None:
        check_constraints(constraints or {})
        check_batch_size(batch_size)
        constraints = dict(constraints) if constraints else None
        self.memory: MemoryModel | None = None
        if estimator is None:
            costs = costs or PlanCosts(
                topology,
                constraints,
                cost_model=cost_model,
                comms_model=comms_model,
                profiles=profiles,
            )
            storage = StorageEstimator(
                topology, constraints, reader=costs.reader, pipeline_type=pipeline_type
            )
            self.memory = storage.memory
            estimator = [
                NeuroShardEstimator(topology, constraints, costs=costs),
                storage,
            ]
        self._on_gpus = is_accelerator(topology.compute_device)
        self._prefetches = self._on_gpus and pipeline_name(pipeline_type) == PREFETCHING
        check_constraints(constraints or {}, prefetches=self._prefetches)
        super().__init__(
            topology=topology,
            batch_size=batch_size,
            constraints=ModuleConstraints(constraints),
            estimator=estimator,
            **kwargs,
        )
        self._modelled: set[str] = set()
        self._sharders: Mapping[str, ModuleSharder[Any]] = {}
        self._compute_device = str(topology.compute_device)
        self._topology = topology
        self._reader = (
            costs.reader if costs is not None else TableReader(topology, constraints)
        )
        self._wide: set[str] = set()
        asked = [c.sharding_types or () for c in (constraints or {}).values()]
        self._some_by_node = any(
            kind.keeps_to_node and kind.included_in not in types
            for types in asked
            for kind in map(SHARDING_TYPES.get, types)
            if kind is not None
        )
        self._one_node = topology.intra_group_size >= topology.world_size
        self._offloadable: set[str] = set()
        self._withheld: dict[tuple[str, str], frozenset[str]] = {}
        self._placement = PlacementConstraints.of(placement)
        self._for_search = for_search
        self._by_class = False
        self._classes: TableClasses | None = None
        self._ways: Ways | None = None
        self._stand_ins: list[ShardingOption] = []
        self.listed: Sequence[ShardingOption] = ()
        self.first_listed: Sequence[ShardingOption] = ()
        self.chosen: Sequence[ShardingOption] = ()

    @property
    def last_stored_search_space(self) -> list[ShardingOption] | None:
        """The options listed last, and those of the plan chosen from them."""
        if self._ways is not None:
            return [unplaced(option) for option in self.chosen] or None
        return with_chosen(self.listed, self.chosen) if self.listed else None

    def enumerate(
        self, module: nn.Module, sharders: list[ModuleSharder[Any]]
    ) -> list[ShardingOption]:
        """Return the options of every table, with estimates.

        Args:
            module: The model, or the part of it to shard.
            sharders: TorchRec's sharders for its embedding modules.

        Raises:
            ConfigError: A table has no option that could run, or an item of `sharders`
                is not a sharder.
        """
        self._sharders = sharders_by_type(sharders)
        known: dict[str, bool] = {}
        self._wide = set()
        sizes: dict[tuple[str, str], int] = {}
        configs: dict[tuple[str, str], BaseEmbeddingConfig] = {}
        for path, config in table_paths(module, sharders):
            constraint = constraint_on(self._constraints.given, path, config.name)
            group = constraint.device_group if constraint else None
            if group and group != self._compute_device:
                continue  # the constraint keeps the table on other devices
            configs[path, config.name] = config
            modelled = is_modelled_config(config)
            known[config.name] = known.get(config.name, True) and modelled
            sizes[path, config.name] = 4 * config.num_embeddings * config.embedding_dim
            pools = isinstance(config, EmbeddingBagConfig)
            most = self._reader.most_columns(in_fused_bags=pools)
            if modelled and config.embedding_dim > most:
                self._wide.add(config.name)
        self._modelled = {name for name, modelled in known.items() if modelled}
        self._offloadable = self._short_of_memory(sizes) if self._on_gpus else set()
        has = sum(d.storage.hbm + d.storage.ddr for d in self._topology.devices)
        may_fit = sum(sizes.values()) <= 4 * has
        is_first = self.memory is None or not self.memory.is_lenient
        self.listed, self._ways = (), None
        if is_first:
            self.first_listed = ()
        if self._by_class and may_fit and all(known.values()):
            self._ways = self._list_ways(module, sharders, configs)
            if self._ways is not None:
                self._stand_ins = _first_of_tables(self._ways)
                return list(self._stand_ins)
        options: list[ShardingOption] = super().enumerate(module, sharders)
        if may_fit:
            options = self._that_run(options, known)
        self.listed = options
        if is_first:
            self.first_listed = options
        return list(options)

    def _short_of_memory(self, sizes: Mapping[tuple[str, str], int]) -> set[str]:
        """Return the names of tables for which device memory is scarce.

        Args:
            sizes: Module path and name of every table -> its weight bytes.
        """
        placement = self._placement
        meant: dict[str, list[int]] = {}
        for (path, name), size in sizes.items():
            for key in table_keys(path, name):
                meant.setdefault(key, []).append(size)
        caps = {
            d.rank: d.storage.hbm
            for d in self._topology.devices
            if d.rank not in placement.forbid_ranks
        }
        pinned: dict[tuple[int, ...], list[int]] = {}
        for name, ranks in placement.pin.items():
            pinned.setdefault(tuple(ranks), []).extend(meant.get(name, ()))
        needs = [([*sizes.values()], list(caps.values()))]
        needs += [
            (own, [caps[r] for r in ranks if r in caps])
            for ranks, own in pinned.items()
        ]
        needs += [
            ([sum(sum(meant.get(n, ())) for n in names)], list(caps.values()))
            for names in placement.together
        ]
        # Count weights and as many bytes of optimizer state.
        scarce = [
            4 * sum(own) > sum(room) or 2 * max(own, default=0) > max(room, default=0)
            for own, room in needs
        ]
        if not any(scarce):
            return set()
        total, room = (sum(part) for part in needs[0])
        small = max(caps.values(), default=0) * _SMALL_SHARE / 2
        if any(scarce[1:]) or 2 * total > _NEARLY_ALL * room:
            small = 0.0
        return {name for (_, name), size in sizes.items() if size > small}

    def populate_estimates(self, sharding_options: list[ShardingOption]) -> None:
        """Set storage and perf of all shards.

        Args:
            sharding_options: Changed in place.
        """
        # TorchRec tells estimators less about sharders.
        note_sharders(sharding_options, self._sharders)
        if self._for_search and self._listed is not None and self._classes is None:
            self._reader.share_facts(sharding_options)
            sharding_options[:] = useful_options(sharding_options, self._reader)
        for option in filter(has_cache, sharding_options if self._prefetches else ()):
            # TorchRec leaves this flag to the caller; without it rows are wrong.
            option.cache_params = dataclasses.replace(
                option.cache_params or CacheParams(), prefetch_pipeline=True
            )
        super().populate_estimates(sharding_options)

    @contextlib.contextmanager
    def by_class(self) -> Iterator[None]:
        """List only the first table of each class in full, where the search allows it.

        Within the context, `enumerate` returns one option for each table, without
        estimates; `ways_in` returns the ways that they stand for. It lists everything
        as usual if a search cannot place all tables, or if the memory of shards has to
        be estimated by TorchRec.
        """
        memory = self.memory
        self._by_class = (
            self._for_search
            and memory is not None
            and not memory.is_lenient
            and self._on_gpus
            and self._device_memory_sizes is None
        )
        try:
            yield
        finally:
            self._by_class = False

    def all_options(
        self, module: nn.Module, sharders: list[ModuleSharder[Any]]
    ) -> list[ShardingOption]:
        """Return all options listed last; list them if the search needed fewer."""
        return list(self.listed) or self.enumerate(module, sharders)

    def ways_in(self, options: Sequence[ShardingOption]) -> Ways | None:
        """Return the ways listed last, if these options stand for them."""
        if self._ways is None or len(options) != len(self._stand_ins):
            return None
        same = zip(options, self._stand_ins, strict=True)
        return self._ways if all(a is b for a, b in same) else None

    def _list_ways(
        self,
        module: nn.Module,
        sharders: list[ModuleSharder[Any]],
        configs: Mapping[tuple[str, str], BaseEmbeddingConfig],
    ) -> Ways | None:
        """List the ways of all tables by class; None if that is not possible."""
        if any(map(may_have_buckets, module.modules())):
            return None
        classes = TableClasses(configs, self._constraints.given)
        self._classes, estimators, self._estimators = classes, self._estimators, []
        try:
            options = super().enumerate(module, sharders)
        finally:
            self._classes, self._estimators = None, estimators
        for table, key in classes.class_of.items():
            if (kernels := self._withheld.get(classes.first[key])) is not None:
                self._withheld[table] = kernels
        assert self.memory is not None, "ways are listed with our count of memory"
        return classes.ways(options, self._reader, self.memory, self._room)

    def listed_like(self, table: str) -> tuple[str, str] | None:
        """Return the one sharding type and kernel to list; None: list all of them."""
        if self._classes is None:
            return None
        treatment = (
            table in self._modelled,
            table in self._wide,
            table in self._offloadable,
        )
        parameter = self._parameters[table]
        return self._classes.one_of((self._path, table), parameter, treatment)

    def note_listed(self, table: str, sharding_type: str, kernels: list[str]) -> None:
        """Note which kernels TorchRec lists for a sharding type of a table."""
        if self._classes is not None:
            self._classes.note((self._path, table), sharding_type, kernels)

    def withheld(self, options: Sequence[ShardingOption]) -> list[ShardingOption]:
        """Return the options with kernels that `enumerate` left out.

        The search may need them if device memory is scarcer than the tables show: a
        reservation or the outputs of a large batch also fill it.

        Args:
            options: As `enumerate` listed them.
        """
        found = []
        for option in options:
            fused = option.compute_kernel == _FUSED
            held_back = self._withheld.get((option.path, option.name), ())
            for kernel in sorted(held_back if fused else ()):
                found.append(without_estimates(option))
                found[-1].compute_kernel = kernel
        self.populate_estimates(found)
        return found

    def spread(self, option: ShardingOption, world_size: int) -> ShardingOption:
        """Return a row-wise or data-parallel option that lists its shards lazily."""
        return SpreadOption.spread(option, world_size)

    def narrowed_types(self, table: str, types: list[str]) -> list[str]:
        """Return the sharding types to list, in a fixed order; see the class."""
        types = sorted(types)
        if table not in self._modelled:
            return types
        if table in self._wide:
            types = [t for t in types if t in SPLITTING_TYPES] or types
        return [t for t in types if not self._is_listed_as_another(t, types)]

    def _is_listed_as_another(self, name: str, types: Collection[str]) -> bool:
        """Whether a table's other types to list include this one."""
        kind = SHARDING_TYPES.get(name)
        if kind is None:
            return False
        if self._one_node and kind.same_in_one_node in types:
            return True
        is_free = kind.keeps_to_node and not self._some_by_node
        return is_free and kind.included_in in types

    def _that_run(
        self, options: Sequence[ShardingOption], tables: Collection[str]
    ) -> list[ShardingOption]:
        """Leave out options of `tables` that could not run.

        Raises:
            ConfigError: A table has no option left.
        """
        own = [o for o in options if o.name in tables]
        faults = self._reader.run_faults(own, self._room)
        kept = [option for option in options if id(option) not in faults]
        running = {table_name(option) for option in kept}
        for option in options:
            if (name := table_name(option)) not in running:
                raise ConfigError(
                    f"table '{name}' (embedding_dim={option.tensor.shape[-1]}): "
                    f"{faults[id(option)]}"
                )
        return kept

    @property
    def _room(self) -> float:
        """Bytes of the largest device."""
        tier = device_tier(self._topology)
        return float(max(getattr(d.storage, tier) for d in self._topology.devices))

    def narrowed_kernels(self, table: str, kernels: list[str]) -> list[str]:
        """Return the kernels to list, in a fixed order; see the class."""
        kernels = sorted(kernels)
        if table not in self._modelled or _FUSED not in kernels:
            return kernels
        constraint = constraint_on(enumerator_constraints(self), self._path, table)
        asked = constraint.compute_kernels if constraint else None
        spared = not (asked or table in self._offloadable)
        withheld = kernels if spared and self._on_gpus else ()
        self._withheld[self._path, table] = OFFLOADED_KERNELS.intersection(withheld)
        if spared:
            return [_FUSED]
        kept = set(kernels) if asked else OFFLOADED_KERNELS | {_FUSED}
        return [k for k in kernels if k in kept]


def _first_of_tables(ways: Ways) -> list[ShardingOption]:
    """Return one option of each table."""
    tables = {(o.path, o.name): o for o in reversed(ways.tables)}
    return [*reversed(tables.values())]
