"""`NeuroShardPlanner`: TorchRec's planner with learned costs and a search on them."""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import numbers
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch.distributed as dist
from torch import nn
from torchrec.distributed.planner.constants import BATCH_SIZE
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.planners import EmbeddingShardingPlanner
from torchrec.distributed.planner.types import (
    Enumerator,
    ParameterConstraints,
    Partitioner,
    PerfModel,
    PlannerError,
    PlannerErrorType,
    Proposer,
    ShardingOption,
    Stats,
    StorageReservation,
    Topology,
)
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.types import ModuleSharder, ShardingPlan

from torchrec_neuroshard.costs.placement_constraints import PlacementConstraints
from torchrec_neuroshard.costs.schedules import DenseMs
from torchrec_neuroshard.errors import ConfigError, check_kind, check_number, suggestion
from torchrec_neuroshard.exchange import first_decides, from_all
from torchrec_neuroshard.models.base import CommsModel, CostModel
from torchrec_neuroshard.notes import Note
from torchrec_neuroshard.planner.checks import check_batch_size
from torchrec_neuroshard.planner.compat import (
    QuietReservation,
    arguments_of,
    enumerator_constraints,
    nothing_collected,
    planner_part,
    replaced_parts,
    report_full,
)
from torchrec_neuroshard.planner.constraints import ranks_by_table
from torchrec_neuroshard.planner.describes_plans import DescribesPlans, LastPlan
from torchrec_neuroshard.planner.enumerator import NeuroShardEnumerator
from torchrec_neuroshard.planner.first_launch import FirstLaunch, Offer, help_measure
from torchrec_neuroshard.planner.given_plans import copied
from torchrec_neuroshard.planner.greedy import check_memory, without
from torchrec_neuroshard.planner.groups import check_pods, enough_ranks
from torchrec_neuroshard.planner.memory import MemoryModel
from torchrec_neuroshard.planner.option_facts import table_name
from torchrec_neuroshard.planner.partitioner import (
    QUICK_SECONDS,
    NeuroShardPartitioner,
    SearchLog,
    SearchRecord,
)
from torchrec_neuroshard.planner.perf_model import NeuroShardPerfModel
from torchrec_neuroshard.planner.plan_costs import PlanCosts
from torchrec_neuroshard.planner.proposer import NeuroShardProposer
from torchrec_neuroshard.planner.stashing import (
    RoomOfDenseLayers,
    check_stash_bytes,
    exposed_ms,
    stash_enough,
)
from torchrec_neuroshard.planner.table_keys import with_bare_names
from torchrec_neuroshard.planner.topology import default_topology
from torchrec_neuroshard.planner.torchrec_plan import last_resort
from torchrec_neuroshard.search.base import SearchConfig, Searcher
from torchrec_neuroshard.tables.profile import FeatureProfile

logger = logging.getLogger(__name__)

_PLANNED = "planned"
_LENIENT = (
    "No plan fits by what ranks allocate, so this plan fits only by TorchRec's count; "
    "strict_memory=True raises an error instead"
)
_RESERVED = 0.15
"""Share of the memory that TorchRec's default reservation takes."""
_SILENCED = (
    "silenced: TorchRec's table of statistics, and warnings of its default storage "
    "reservation about itself. Pass stats=EmbeddingStats() or a storage_reservation to "
    "see them"
)
_NO_PLAN = (PlannerErrorType.INSUFFICIENT_STORAGE, PlannerErrorType.STRICT_CONSTRAINTS)


@dataclass(kw_only=True, slots=True)
class _FoundPlan:
    """A plan before it is described."""

    plan: ShardingPlan
    options: list[ShardingOption] | None
    """The plan's options after all callbacks. None: the model has no tables."""
    records: Sequence[SearchRecord]
    """The searches that led to the plan."""
    fallback: str | None = None
    """Why TorchRec's own planner ran; None if it did not."""
    notes: tuple[Note, ...] = ()
    more_bytes: float = 0.0
    """Bytes that the plan uses on each rank beyond what the reservation leaves."""


class NeuroShardPlanner(DescribesPlans):
    """Plan how TorchRec shards embedding tables, with learned costs and a search.

    It takes every argument of `EmbeddingShardingPlanner`. Parts that you pass replace
    its own. TorchRec's own planner runs only if the search finds no plan;
    `last_result.fallback` then says why.

    Example:
        ```python
        topology = topology_for("h100", world_size=16)
        planner = NeuroShardPlanner(topology, batch_size=4096)
        plan = planner.collective_plan(model, sharders, dist.group.WORLD)
        print(planner.report())
        model = DistributedModelParallel(model, plan=plan, sharders=sharders)
        ```

    Args:
        topology: The devices to plan for, from `topology_for`, `group_topology` or
            TorchRec's `Topology`. None: TorchRec's default for the process group.
            Figures left at TorchRec's defaults are taken from the card, if it is known.
        batch_size: Samples per rank.
        enumerator: None: `NeuroShardEnumerator`. If `constraints` is left out, the
            enumerator's are used.
        storage_reservation: None: TorchRec's default, without its warnings about
            itself.
        proposer: None: `NeuroShardProposer`.
        partitioner: None: `NeuroShardPartitioner`.
        performance_model: None: `NeuroShardPerfModel`.
        stats: None: none, since `report` explains the plan. `EmbeddingStats()` logs
            TorchRec's table.
        constraints: Table name -> TorchRec's constraints on the table. The key may
            include the module: "path.to.module/table" or "path.to.module.table".
            `min_partition` is the narrowest column shard. It defaults to 4, and to 32
            on a GPU whose costs are estimates.
        debug: As in TorchRec.
        callbacks: As in TorchRec. Callbacks may change the plan.
        timeout_seconds: Time limit of `plan`, with its searches and TorchRec's planner.
            As in TorchRec, what has begun is finished.
        cost_model: "auto", the name of a shipped bundle, a bundle's folder, a
            `CostModel`, or "measure". "measure" uses the bundle that an earlier first
            launch measured on this device, or measures now if there is none.
        profiles: Feature name -> profile, from `profile_inputs`. For features without a
            profile, the constraints' pooling factors are used.
        search: "default", the name of another search, a `SearchConfig` or a `Searcher`.
        comms_model: None: bytes divided by the topology's bandwidths.
        placement_constraints: Which ranks tables may use, and which tables go together.
        calibrate: Whether a first launch measures: "auto", "never" or seconds. A first
            launch has cost_model="auto" and a device that neither the cache nor a
            shipped bundle knows. The ranks of `collective_plan` then measure the
            model's own tables for that time, and later launches reuse the bundle.
            "auto" measures for 60 s on GPUs, and on CPUs only with
            cost_model="measure"; not if a launch in the last week measured in vain.
        pipeline_type: TorchRec's `PipelineType` of the training loop, or
            "train_semi_sync" or "train_fused_sparse_dist". Phases that the pipeline
            overlaps with longer ones cost nothing. What the pipeline keeps on the
            device counts as memory, unless you pass an enumerator, which counts memory
            itself. None: no pipeline, so phases run one after another.
        dense_ms: Time of the rest of the model per iteration [ms]; `DenseMs` splits it
            into parts. None: 0, so collectives have nothing to overlap with.
        strict_memory: Whether a plan must fit by what ranks allocate. False: if no such
            plan exists, one that fits by TorchRec's count is returned, and a warning
            names the rank, the bytes and what needs them.
        stash_bytes: Memory of each rank [bytes] that is reserved for dense layers but
            used only while they run, for example by activations. Tables may use it if
            other tables are stashed meanwhile (TorchRec 1.9). The search plans with and
            without this memory and returns the shorter plan, copies included.
            `stashed_tables` names the tables to stash.
        kwargs: Passed to `EmbeddingShardingPlanner`.

    Attributes:
        costs: The cost model in use.
        last_result: Costs and placement of the plan returned last. None before the
            first plan and for a model without tables. After `collective_plan` it is
            the same on all ranks. Its costs cover all tables. Its `placement` covers
            only tables that are whole columns in fused kernels on devices; the plan
            itself and `report` show the others.
            `lower_bound_ms` holds for every plan of the tables that the search may
            place, over all sharding types, splits, kernels and ranks that the
            constraints allow. It covers grids of even blocks, at most one per node,
            and the cache sizes that the search considered (0, unknown, if the plan's
            are better). Other tables add nothing to it. It is 0 without a bound:
            costs of a measured machine have none. The bound is proven if
            `bound_is_proven` says so, otherwise estimated.
        last_task: The tables of `last_result.placement`, in its order. None if there
            are none.

    Raises:
        ConfigError: `cost_model`, `search`, `pipeline_type` or `calibrate` is unknown,
            or the batch size, `dense_ms`, `stash_bytes` or a number in the constraints
            is impossible. Or `stash_bytes` is used with another enumerator.
        BundleError: The cost model's bundle cannot be used.
    """

    def __init__(
        self,
        topology: Topology | None = None,
        batch_size: int | None = None,
        enumerator: Enumerator | None = None,
        storage_reservation: StorageReservation | None = None,
        proposer: Proposer | list[Proposer] | None = None,
        partitioner: Partitioner | None = None,
        performance_model: PerfModel | None = None,
        stats: Stats | list[Stats] | None = None,
        constraints: Mapping[str, ParameterConstraints] | None = None,
        debug: bool = True,
        callbacks: (
            list[Callable[[list[ShardingOption]], list[ShardingOption]]] | None
        ) = None,
        timeout_seconds: int | None = None,
        *,
        cost_model: str | Path | CostModel = "auto",
        profiles: Mapping[str, FeatureProfile] | None = None,
        search: str | SearchConfig | Searcher = "default",
        comms_model: CommsModel | None = None,
        placement_constraints: PlacementConstraints | None = None,
        calibrate: str | float = "auto",
        pipeline_type: Any = None,
        dense_ms: DenseMs | float | None = None,
        strict_memory: bool = False,
        stash_bytes: float = 0,
        **kwargs: Any,
    ) -> None:
        self._check_names(kwargs)
        topology = default_topology() if topology is None else topology
        for name, value, kind in (
            ("topology", topology, Topology),
            ("constraints", constraints, Mapping),
            ("placement_constraints", placement_constraints, PlacementConstraints),
            ("stash_bytes", stash_bytes, numbers.Real),
        ):
            if value is not None:
                check_kind(name, value, kind)
        if batch_size is not None:
            check_batch_size(batch_size)
        if timeout_seconds is not None:
            check_number("timeout_seconds", timeout_seconds, above=True)
        if not constraints and isinstance(enumerator, EmbeddingEnumerator):
            constraints = enumerator_constraints(enumerator)
        constraints = dict(constraints) if constraints else None
        if stash_bytes:
            check_stash_bytes(stash_bytes, topology)
            if not isinstance(enumerator, NeuroShardEnumerator | None):
                raise ConfigError(
                    "stash_bytes needs a NeuroShardEnumerator, which counts what ranks "
                    f"allocate; got {type(enumerator).__name__}. Leave out enumerator "
                    "or stash_bytes"
                )
        self.costs = PlanCosts(
            topology,
            constraints,
            cost_model=cost_model,
            comms_model=comms_model,
            profiles=profiles,
            pipeline_type=pipeline_type,
            dense_ms=dense_ms,
        )
        self._first_launch = FirstLaunch(self.costs, cost_model, calibrate)
        topology = self.costs.topology
        parts = {
            "enumerator": enumerator,
            "proposer": proposer,
            "partitioner": partitioner,
            "performance_model": performance_model,
        }
        if stats is None or storage_reservation is None:
            logger.info("%s", _SILENCED)
        if storage_reservation is None:
            percentage = "heuristical_storage_reservation_percentage"
            storage_reservation = QuietReservation(kwargs.get(percentage, _RESERVED))
        shared: dict[str, Any] = {
            "topology": topology,
            "batch_size": batch_size,
            "storage_reservation": storage_reservation,
            "stats": [] if stats is None else stats,
            "constraints": constraints,
            "debug": debug,
            "callbacks": callbacks,
            "timeout_seconds": timeout_seconds,
            **kwargs,
        }
        own = {
            "search": search,
            "placement_constraints": placement_constraints,
            "pipeline_type": pipeline_type,
            "dense_ms": dense_ms,
            "strict_memory": strict_memory,
            "stash_bytes": stash_bytes,
        }
        self._arguments = {**shared, **parts, **own}
        self._torchrec_arguments = {
            **shared,
            **parts,
            "proposer": copy.deepcopy(proposer),
            "plan_loader": None,  # this planner has asked it already
        }
        self.placement_constraints = placement_constraints or PlacementConstraints()
        self._profiles = dict(profiles or {})
        self._last, self._log = LastPlan(), SearchLog()
        self._start_clock()
        self._selected: list[ShardingOption] | None = None
        self._stashed: _FoundPlan | None = None
        self._stash_notes: tuple[Note, ...] = ()
        if enumerator is None:
            enumerator = NeuroShardEnumerator(
                topology,
                batch_size or BATCH_SIZE,
                constraints,
                costs=self.costs,
                placement=self.placement_constraints,
                pipeline_type=pipeline_type,
                for_search=proposer is None and partitioner is None,
            )
        if proposer is None:
            proposer = NeuroShardProposer(
                topology,
                constraints,
                placement=self.placement_constraints,
                costs=self.costs,
            )
        if partitioner is None:
            partitioner = NeuroShardPartitioner(
                topology,
                constraints,
                search=search,
                enumerator=enumerator,
                placement=self.placement_constraints,
                costs=self.costs,
            )
        if performance_model is None:
            performance_model = NeuroShardPerfModel(
                topology, constraints, costs=self.costs
            )
        super().__init__(
            **{
                **shared,
                "constraints": with_bare_names(constraints),
                "callbacks": [
                    self._take_loaded,
                    self._choose,
                    *(callbacks or []),
                    self._select,
                ],
            },
            enumerator=enumerator,
            proposer=proposer,
            partitioner=partitioner,
            performance_model=performance_model,
        )
        # TorchRec's proposers keep their state in `load`: reset them for each search.
        self._unused = [
            (part, copy.deepcopy(vars(part)))
            for part in planner_part(self, "proposers")
            if type(part).__module__.startswith("torchrec.")
        ]

    def _select(self, options: list[ShardingOption]) -> list[ShardingOption]:
        """Keep the options of the returned plan. Runs as TorchRec's last callback.

        Returns:
            The options. A module that a model has under several paths is planned once,
            but TorchRec asks for each path: the others get copies that cost nothing.
        """
        self._selected = options
        listed = self.enumerator
        if not isinstance(listed, NeuroShardEnumerator):
            return options
        return [*options, *listed.under_other_paths(options)]

    @nothing_collected()
    def plan(
        self, module: nn.Module, sharders: list[ModuleSharder[Any]]
    ) -> ShardingPlan:
        """Plan the model on this rank alone; `collective_plan` plans for all ranks.

        Args:
            module: The model, or the part of it to shard.
            sharders: TorchRec's sharders for its embedding modules.

        Returns:
            A plan for `DistributedModelParallel(plan=...)`.

        Raises:
            PlannerError: Neither the search nor TorchRec's own planner finds a plan
                that fits.
            ProfileError: A profile is not a `FeatureProfile`, or no table reads its
                feature.
            ConfigError: The cost model predicts something that is not a time. Or
                placement constraints contradict each other or the model, or a callback
                or a loaded plan breaks them.
            RuntimeError: TorchRec has no sharding option for a table, which it names.
            Exception: Whatever a part that you passed raises.
        """
        self._last = LastPlan()
        self._start_clock()
        notes = self._check_inputs(module, sharders)
        self._first_launch.on_one_rank(partial(self._options, module, sharders))
        found = self._find_plan(module, sharders)
        if found.options is not None:
            self._check_rules(found.options)
        self._last.plan = copied(found.plan)
        self._try_remember(module, sharders)
        if found.options is not None:
            self._keep(found.options)
            self._last.known = self._known(
                found.options,
                without(self._reserved(module, sharders), -found.more_bytes),
                records=found.records,
                fallback=found.fallback,
                notes=[*notes, *found.notes, *self._stash_notes],
            )
            for note in self._last.known.result.notes:
                if note.code == "cannot-run":
                    warnings.warn(note.text, stacklevel=3)
        return found.plan

    def _find_plan(
        self, module: nn.Module, sharders: list[ModuleSharder[Any]]
    ) -> _FoundPlan:
        """Return the search's plan, or one that fits only by TorchRec's memory count.

        If the search finds no plan by that count either, return TorchRec's own plan.
        """
        self._stashed = self._find_stashed(module, sharders, callbacks=[], stats=[])
        try:
            found = self._searched(module, sharders)
            if self._stashed is not None:
                found.records = self._stashed.records
                found.more_bytes = self._stashed.more_bytes
            return found
        except PlannerError as error:
            if self._stashed is not None:
                # Once more, now with callbacks and stats.
                self._stashed = None
                if (again := self._find_stashed(module, sharders)) is not None:
                    return again
            memory, is_crowded = self._strict, self._log.is_crowded
            if error.error_type not in _NO_PLAN:
                raise
            if memory is None:
                return self._torchrecs(error, module, sharders, is_crowded)
        with memory.lenient():
            try:
                found = self._searched(module, sharders)
            except PlannerError as error:
                found = self._torchrecs(error, module, sharders, is_crowded)
        if found.options is None:
            return found
        # From here on, estimates count what ranks allocate.
        self.enumerator.populate_estimates(found.options)
        self.costs.share_launches(found.options)
        self.costs.attribute(found.options)
        memory.attribute(found.options)
        if text := memory.overflow(found.options, self._reserved(module, sharders)):
            found.notes += (Note("memory", _LENIENT, severity="warning"),)
            warnings.warn(f"{text}. {_LENIENT}", stacklevel=4)
        return found

    def _find_stashed(
        self, module: nn.Module, sharders: list[ModuleSharder[Any]], **changes: Any
    ) -> _FoundPlan | None:
        """Return the shortest plan that also uses the memory of dense layers.

        Args:
            module: The model.
            sharders: The sharders of its embedding modules.
            changes: Other arguments for the planner that searches.

        Returns:
            None if no plan is found or stashing tables does not free enough memory.
        """
        more_bytes, memory = self._arguments["stash_bytes"], self.memory
        self._stash_notes = ()
        if not more_bytes or memory is None:
            return None
        inner = copy.deepcopy(planner_part(self, "storage_reservation"))
        seconds = self._timeout()
        other = self._again(
            storage_reservation=RoomOfDenseLayers(inner, more_bytes),
            stash_bytes=0,
            plan_loader=None,
            timeout_seconds=seconds and seconds / 2,
            **changes,
        )
        try:
            found = NeuroShardPlanner._searched(other, module, sharders)
            left = self.reserve(module, sharders)
        except PlannerError as error:
            self._stash_notes = (_unstashed(str(error).strip().splitlines()[0]),)
            return None
        if found.options is None:
            return None
        peak_W = np.array([float(r.peak) for r in memory.ranks(found.options)])
        room_W = np.array([float(d.storage.hbm) for d in left.devices])
        if not stash_enough(found.options, peak_W - room_W):
            text = "stashing all tables that TorchRec can stash frees too little memory"
            self._stash_notes = (_unstashed(text),)
            return None
        found.more_bytes = more_bytes
        return found

    def _choose(self, options: list[ShardingOption]) -> list[ShardingOption]:
        """Return the shorter plan, with copies of stashed tables; drop the other.

        Runs as TorchRec's second callback. A loaded plan is kept.
        """

        def taken_ms(plan: list[ShardingOption]) -> float:
            path_ms = self.costs.placed(plan).predicted.critical_path_ms
            return path_ms + exposed_ms(self.costs, plan)

        stashed = self._stashed and self._stashed.options
        if stashed and not self._loaded and taken_ms(options) > taken_ms(stashed):
            return stashed
        self._stashed = None
        return options

    def _searched(
        self, module: nn.Module, sharders: list[ModuleSharder[Any]]
    ) -> _FoundPlan:
        """Run TorchRec's planning loop with the parts of this planner.

        `EmbeddingShardingPlanner.plan` calls, in this order:

        1. the storage reservation, for the memory left for tables;
        2. the enumerator, for the options of every table;
        3. the proposer, for a proposal (every table in all its ways);
        4. the partitioner, for a plan: this is the search;
        5. the performance model, for the plan's milliseconds;
        6. the callbacks and the stats.

        Only the search replaces TorchRec's code, so TorchRec calls a caller's parts as
        always.

        Raises:
            PlannerError: Its type is in `_NO_PLAN` if no plan was found.
        """
        for proposer, state in self._unused:
            proposer.__dict__.update(copy.deepcopy(state))
        partitioner = planner_part(self, "partitioner")
        self._log = SearchLog(deadline=self._deadline)
        if isinstance(partitioner, NeuroShardPartitioner):
            partitioner.start(self._log, sharders)
        self._selected = None
        stats = [
            _StatsOfPlans(part, self._may_search_again)
            for part in planner_part(self, "stats")
        ]
        with (
            report_full(planner_part(self, "storage_reservation")),
            replaced_parts(self, stats=stats, timeout_seconds=self._timeout()),
            self._loading(),
            self._listing_by_class(),
        ):
            plan = super().plan(module, sharders)
        return _FoundPlan(plan=plan, options=self._selected, records=self._log.records)

    def _listing_by_class(self) -> contextlib.AbstractContextManager[None]:
        """Let the enumerator list only what the search needs; a loader needs all."""
        own = self.enumerator
        if self.plan_loader is None and isinstance(own, NeuroShardEnumerator):
            return own.by_class()
        return contextlib.nullcontext()

    def _start_clock(self) -> None:
        seconds = self._arguments["timeout_seconds"]
        self._deadline = time.monotonic() + seconds if seconds else math.inf

    def _timeout(self) -> float | None:
        """Return the seconds left until the deadline; TorchRec reads 0 as no limit."""
        if self._deadline == math.inf:
            return None
        return max(self._deadline - time.monotonic(), QUICK_SECONDS)

    @property
    def _strict(self) -> MemoryModel | None:
        """The memory model that may be relaxed to TorchRec's count; None: none may."""
        memory = self.memory
        if memory is None or memory.is_lenient or self._arguments["strict_memory"]:
            return None
        return memory

    def _may_search_again(self) -> bool:
        """Whether a stashed plan or TorchRec's memory count follows a failed search."""
        return self._stashed is not None or self._strict is not None

    def _options(
        self, module: nn.Module, sharders: list[ModuleSharder[Any]]
    ) -> list[ShardingOption]:
        """List the options of every table."""
        return list(self.enumerator.enumerate(module, sharders))

    def collective_plan(
        self,
        module: nn.Module,
        sharders: list[ModuleSharder[Any]] | None = None,
        pg: dist.ProcessGroup | None = None,
    ) -> ShardingPlan:
        """Plan on the group's first rank and return the same plan on every rank.

        The first rank decides, with its planner's arguments, cache and devices. The
        other ranks only help to measure. An error, interrupt or exit on the first rank
        is raised on every rank at once.

        Args:
            module: The model, or the part of it to shard.
            sharders: None: TorchRec's defaults.
            pg: None: all ranks.

        Returns:
            The same plan on every rank. `last_result` is also the same.

        Raises:
            Exception: The error that `plan` raised on the first rank. If it cannot be
                sent, an error of the same kind that quotes it.
            RankFailureError: A rank died or did not answer before the group's timeout.
                Or the plan cannot be sent, or a rank cannot read it.
            RuntimeError: There is no process group.
        """
        if pg is None:
            if not dist.is_initialized():
                raise RuntimeError(
                    "collective_plan needs a process group: call "
                    "torch.distributed.init_process_group first, or call plan() to "
                    "plan on one rank"
                )
            pg = dist.group.WORLD
            assert pg is not None, "there is one once it is initialised"
        if sharders is None:
            sharders = get_default_sharders()
        own_sharders, group = sharders, pg

        def plan_here() -> Any:
            if group.size() % self.topology.world_size:
                warnings.warn(
                    f"the topology has {self.topology.world_size} ranks, but the "
                    f"process group has {group.size()} and cannot train with this "
                    "plan. Use a topology of the same size, or call plan() to plan "
                    "for another job",
                    stacklevel=4,
                )
            options = partial(self._options, module, own_sharders)
            self._first_launch.on_all_ranks(options, group)
            return self.plan(module, own_sharders), self._last.known

        if pg.rank():
            self._last = LastPlan()
        trouble: str | None = None
        try:
            found = first_decides(plan_here, pg, _PLANNED)
            while isinstance(found, Offer):
                trouble = help_measure(found, pg.rank())
                found = first_decides(plan_here, pg, _PLANNED)
            plan, known = found
            if pg.rank():
                self._last = LastPlan(plan=copied(plan), known=known)
        finally:
            if trouble is not None:
                # Warn last: if warnings are errors, no other rank waits for this one.
                warnings.warn(trouble, stacklevel=2)
        self._check_pods(plan, pg)
        return cast(ShardingPlan, plan)

    def _check_pods(self, plan: ShardingPlan, pg: dist.ProcessGroup) -> None:
        """Check every rank's pods; if one rank's are wrong, all raise its error."""
        fault: str | None = None
        try:
            check_pods(self.topology, plan)
        except ConfigError as error:
            fault = str(error)
        for rank, told in enumerate(from_all(fault, pg, "compared their pods")):
            if told is not None:
                raise ConfigError(f"rank {dist.get_global_rank(pg, rank)}: {told}")

    def relearned(self, profiles: Mapping[str, FeatureProfile]) -> NeuroShardPlanner:
        """Return a planner like this one with fresh profiles from a running job.

        Args:
            profiles: Feature name -> fresh profile. Other features keep theirs.

        Returns:
            The planner. It shares the parts that were passed to this planner; a part
            with its own `costs` keeps them.
        """
        check_kind("profiles", profiles, Mapping)
        return self._again(profiles={**self._profiles, **profiles}, plan_loader=None)

    def _check_names(self, given: Iterable[str]) -> None:
        """Check that TorchRec's planner takes these arguments.

        Raises:
            TypeError: It does not, as Python raises it for an unknown argument.
        """
        theirs = arguments_of(EmbeddingShardingPlanner)
        for name in sorted(set(given) - theirs):
            near = suggestion(
                name, theirs | arguments_of(NeuroShardPlanner), "arguments"
            )
            raise TypeError(f"NeuroShardPlanner takes no argument '{name}'; {near}")

    def _again(self, **changes: Any) -> NeuroShardPlanner:
        """Return a planner with the same arguments except for `changes`."""
        given = {
            **self._arguments,
            **self.costs.again(),
            "profiles": self._profiles,
            "calibrate": "never",
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # this planner already gave them
            return NeuroShardPlanner(**given | changes)

    def _violation(self, options: Sequence[ShardingOption]) -> str | None:
        """Return how a plan breaks the placement constraints; None if it does not."""
        rules = self.placement_constraints.rules(
            map(table_name, options), int(self.topology.world_size)
        )
        return rules.violation(ranks_by_table(options, rules))

    def _check_rules(self, options: Sequence[ShardingOption]) -> None:
        if broken := self._violation(options):
            raise ConfigError(
                f"the plan breaks placement_constraints: {broken}. It comes from the "
                "partitioner, callback or plan loader that you passed"
            )

    def _torchrecs(
        self,
        error: PlannerError,
        module: nn.Module,
        sharders: list[ModuleSharder[Any]],
        is_crowded: bool,
    ) -> _FoundPlan:
        """Return the plan of TorchRec's own planner after the search found none.

        Args:
            error: Why the search found no plan.
            module: The model.
            sharders: The sharders of its embedding modules.
            is_crowded: Whether the outputs for a rank's own samples filled its memory.

        Raises:
            PlannerError: TorchRec finds no plan either, or none that can run; its cause
                says why.
        """
        if error.error_type not in _NO_PLAN:
            raise error
        ours, memory = self._log.infeasible, self.memory
        logger.warning(
            "the search found no plan (%s); asking TorchRec's planner", ours or error
        )
        try:
            plan, options = last_resort(
                {**self._torchrec_arguments, "timeout_seconds": self._timeout()},
                module=module,
                sharders=sharders,
                enumerator=self.enumerator,
                reader=self.costs.reader,
                violation=self._violation,
            )
            if memory is not None:
                memory.attribute(options)
                room = self.reserve(module, sharders)
                check_memory(room, options, "TorchRec's own plan")
        except PlannerError as failure:
            # Whatever failed here, report why the search found no plan.
            if ours is None:
                raise error from failure
            if count := self._enough_ranks(module, sharders, strict=not is_crowded):
                ours = f"{ours} {count} ranks of this kind are enough."
            ours = "\n".join([ours, *(note.text for note in self._stash_notes)])
            # First the reason, then TorchRec's general advice.
            raise PlannerError(
                message=f"{ours}\n{error}", error_type=error.error_type
            ) from failure
        return _FoundPlan(
            plan=plan,
            options=options,
            records=self._log.records,
            fallback=ours or str(error),
        )

    def _enough_ranks(
        self, module: nn.Module, sharders: list[ModuleSharder[Any]], strict: bool
    ) -> int:
        """Return how many ranks of this kind are enough, by planning for more ranks.

        Args:
            module: The model.
            sharders: The sharders of its embedding modules.
            strict: Whether the plan must fit by what ranks allocate.

        Returns:
            0 if no number of ranks is found, or if the caller passed parts, which fit
            only these ranks.
        """
        parts = ("enumerator", "proposer", "partitioner", "performance_model")
        if any(self._arguments[name] is not None for name in parts):
            return 0
        if time.monotonic() > self._deadline:
            return 0
        reservation = planner_part(self, "storage_reservation")

        def fits(topology: Topology) -> bool:
            other = self._again(
                topology=topology,
                storage_reservation=copy.deepcopy(reservation),
                search=SearchConfig(effort=0.0, time_budget_seconds=1.0),
                stats=[],
                callbacks=[],
                debug=False,
                plan_loader=None,
            )
            memory = other.memory
            assert memory is not None, "no enumerator was given"
            try:
                with contextlib.nullcontext() if strict else memory.lenient():
                    super(NeuroShardPlanner, other).plan(module, sharders)
            except PlannerError:
                return False
            return True

        try:
            return enough_ranks(fits, self.costs.again()["topology"])
        except Exception as failure:  # the error to report is that no plan fits
            logger.debug("more ranks could not be tried: %r", failure)
            return 0


def _unstashed(reason: str) -> Note:
    """Return a note that tables are not stashed."""
    text = f"no table is stashed, although stash_bytes is given: {reason}"
    logger.warning("%s", text)
    return Note("stash", text)


class _StatsOfPlans(Stats):
    """Logs a failed search only if no other search follows."""

    def __init__(self, inner: Stats, another_follows: Callable[[], bool]) -> None:
        self._inner, self._another_follows = inner, another_follows

    def log(self, **kwargs: Any) -> None:
        if kwargs["sharding_plan"].plan or not self._another_follows():
            self._inner.log(**kwargs)
