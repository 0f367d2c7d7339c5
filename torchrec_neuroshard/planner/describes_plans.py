"""What a planner says of plans: of the one last returned, and of any other."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torchrec.distributed.planner.planners import EmbeddingShardingPlanner
from torchrec.distributed.planner.types import (
    Enumerator,
    ParameterConstraints,
    PlannerError,
    ShardingOption,
    StorageReservation,
    Topology,
)
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.types import ModuleSharder, ShardingPlan

from torchrec_neuroshard.costs.task import ShardingTask
from torchrec_neuroshard.errors import ConfigError
from torchrec_neuroshard.notes import Note
from torchrec_neuroshard.planner.checks import (
    check_kind,
    check_profiles,
    unmatched_constraints,
    unsharded_notes,
)
from torchrec_neuroshard.planner.compat import planner_part
from torchrec_neuroshard.planner.enumerator import NeuroShardEnumerator
from torchrec_neuroshard.planner.given_plans import (
    copied,
    model_tables,
    placed_options,
    table_moves,
)
from torchrec_neuroshard.planner.memory import MemoryModel
from torchrec_neuroshard.planner.outline import outline_of
from torchrec_neuroshard.planner.plan_costs import PlanCosts
from torchrec_neuroshard.planner.results import KnownPlan, describe_plan
from torchrec_neuroshard.report import PlanComparison, PlanReport
from torchrec_neuroshard.search.base import SearchResult
from torchrec_neuroshard.tables.profile import FeatureProfile

__all__ = ["DescribesPlans", "LastPlan"]

logger = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True)
class LastPlan:
    """The plan last returned or adopted, and what is known of it."""

    plan: ShardingPlan | None = None
    options: list[ShardingOption] = field(default_factory=list)
    known: KnownPlan | None = None
    model: tuple[nn.Module, list[ModuleSharder[Any]]] | None = None
    """Without its weights, and its sharders."""


class DescribesPlans(EmbeddingShardingPlanner):
    """What `NeuroShardPlanner` says of plans; it sets the attributes.

    Attributes:
        costs: What plans cost.
    """

    costs: PlanCosts
    _last: LastPlan
    _profiles: Mapping[str, FeatureProfile]
    _arguments: Mapping[str, Any]

    @property
    def topology(self) -> Topology:
        """The devices to plan for."""
        topology: Topology = planner_part(self, "topology")
        return topology

    @property
    def batch_size(self) -> int:
        """Samples per rank."""
        return int(planner_part(self, "batch_size"))

    @property
    def enumerator(self) -> Enumerator:
        """The part that lists and estimates sharding options."""
        enumerator: Enumerator = planner_part(self, "enumerator")
        return enumerator

    @property
    def constraints(self) -> Mapping[str, ParameterConstraints]:
        """Table, by name or by module path and name -> TorchRec's constraints on it."""
        return self.costs.reader.constraints

    @property
    def profiles(self) -> Mapping[str, FeatureProfile]:
        """Feature name -> its profile."""
        return self._profiles

    @property
    def memory(self) -> MemoryModel | None:
        """What ranks allocate; None where a part that was given counts memory."""
        own = self.enumerator
        return own.memory if isinstance(own, NeuroShardEnumerator) else None

    def reserve(
        self, module: nn.Module, sharders: list[ModuleSharder[Any]]
    ) -> Topology:
        """Return the devices with the memory that is left for shards."""
        reservation: StorageReservation = planner_part(self, "storage_reservation")
        return reservation.reserve(
            topology=self.topology,
            batch_size=planner_part(self, "batch_size"),
            module=module,
            sharders=sharders,
            constraints=planner_part(self, "constraints"),
        )

    @property
    def last_result(self) -> SearchResult | None:
        """What is known of the plan last returned; its placement is of columns."""
        known = self.last_known
        return known.result if known else None

    @property
    def last_task(self) -> ShardingTask | None:
        """The tables that `last_result.placement` counts: the column-sharded ones."""
        known = self.last_known
        return known.task if known else None

    @property
    def stashed_tables(self) -> set[str]:
        """Tables of the last plan to stash.

        For `MemoryStashingManager.set_stashed_tables`, before
        `DistributedModelParallel` takes the plan.
        """
        known = self.last_known
        return set(known.stashed) if known else set()

    def get_selected_options(self) -> list[ShardingOption]:
        """Return the last plan's options, with the costs and memory of its shards.

        Empty before the first plan, and on ranks that another rank planned for.
        """
        return self._last.options if self.last_known else []

    def report(self) -> PlanReport:
        """Say what the last plan costs on each rank, and why tables were split.

        Returns:
            What `print` shows as text and `to_json` makes a dictionary of.

        Raises:
            ConfigError: Nothing has been planned yet.
        """
        known = self.last_known
        if known is None:
            raise ConfigError(
                "there is no plan to report on; call plan() or collective_plan() "
                "first, or pass the planner to load_plan"
            )
        return self._explain(known)

    def adopt(
        self,
        plan: ShardingPlan,
        module: nn.Module,
        sharders: Sequence[ModuleSharder[Any]] | None = None,
    ) -> None:
        """Take a plan that somebody else made, such as a stored one, for the last.

        What is known of it, `report` and `last_result`, is worked out when asked for:
        the costs of `evaluate`.

        Args:
            plan: The plan.
            module: The model, before `DistributedModelParallel` took it.
            sharders: None: TorchRec's defaults.
        """
        self._last = LastPlan(plan=copied(plan))
        self._try_remember(module, sharders)

    @property
    def last_plan(self) -> ShardingPlan | None:
        """The plan last returned or adopted; None before the first one."""
        return self._last.plan

    @property
    def last_known(self) -> KnownPlan | None:
        """What is known of the last plan; None where there is none, or it is empty."""
        last = self._last
        if last.known is None and last.plan is not None and last.model is not None:
            if any(last.plan.plan.values()):
                last.options, last.known = self._describe(last.plan, *last.model)
        return last.known

    @property
    def last_model(self) -> tuple[nn.Module, list[ModuleSharder[Any]]] | None:
        """The model last planned, as it was then but without weights; its sharders.

        None before the first plan, and on ranks that another rank planned for.
        """
        return self._last.model

    def remember(
        self,
        module: nn.Module,
        sharders: Sequence[ModuleSharder[Any]] | None = None,
    ) -> None:
        """Take a model for `last_model` whose plan somebody else made.

        Args:
            module: The model, before `DistributedModelParallel` took it.
            sharders: None: TorchRec's defaults.
        """
        sharders = list(sharders or get_default_sharders())
        self._last.model = outline_of(module), sharders

    def _try_remember(
        self, module: nn.Module, sharders: Sequence[ModuleSharder[Any]] | None
    ) -> None:
        try:
            self.remember(module, sharders)
        except Exception as error:  # an odd module; the plan is good all the same
            logger.debug("the model's outline could not be kept: %r", error)

    def evaluate(
        self,
        plan: ShardingPlan,
        module: nn.Module,
        sharders: list[ModuleSharder[Any]] | None = None,
    ) -> PlanReport:
        """Say what any plan of a model costs, whoever made it.

        Nothing is searched: how short a path could be is not known.

        Args:
            plan: The plan.
            module: The model, before `DistributedModelParallel` took it.
            sharders: None: TorchRec's defaults.

        Returns:
            What `report` returns of the planner's own plans.

        Raises:
            PlanFileError: The plan is not one of this model on these ranks.
            ProfileError: A profile is of a feature that no table reads.
            ConfigError: The cost model predicts something that is not a time.
        """
        given = sharders or get_default_sharders()
        return self._explain(self._describe(plan, module, given)[1])

    def compare(
        self,
        plan: ShardingPlan,
        module: nn.Module,
        sharders: list[ModuleSharder[Any]] | None = None,
        name: str = "the other plan",
    ) -> PlanComparison:
        """Set another plan of the model beside the last one, by the same costs.

        Args:
            plan: The other plan, whoever made it.
            module: The model, before `DistributedModelParallel` took it.
            sharders: None: TorchRec's defaults.
            name: What the comparison calls the other plan.

        Returns:
            What `print` shows as text and `write_html` as a page: what the last plan
            saves against the other one, and which tables are placed differently.

        Raises:
            ConfigError: Nothing has been planned yet.
            PlanFileError: A plan is not one of this model on these ranks.
        """
        ours = self.report()
        own = self._last.plan
        assert own is not None, "there is one that is reported on"
        theirs = self.evaluate(plan, module, sharders)
        tables, _ = model_tables(plan.plan, module)
        world_size = int(self.topology.world_size)
        return PlanComparison(
            first_name=name,
            first=theirs,
            second_name="this plan",
            second=ours,
            moves=table_moves(plan, own, tables, (world_size, world_size)),
        )

    def placed_options(
        self,
        plan: ShardingPlan,
        module: nn.Module,
        sharders: Sequence[ModuleSharder[Any]],
    ) -> list[ShardingOption]:
        """Return any plan of a model as TorchRec's options, with estimates.

        Raises:
            PlanFileError: The plan is not one of this model on these ranks.
        """
        world_size = int(self.topology.world_size)
        options = placed_options(plan, module, sharders, self.enumerator, world_size)
        self.costs.share_launches(options)
        return options

    def _describe(
        self, plan: ShardingPlan, module: nn.Module, sharders: list[ModuleSharder[Any]]
    ) -> tuple[list[ShardingOption], KnownPlan]:
        """Say what a plan that is given costs; returns its options as well."""
        notes = self._check_inputs(module, sharders)
        options = self.placed_options(plan, module, sharders)
        self.costs.attribute(options)
        if self.memory is not None:
            self.memory.attribute(options)
        room = self._reserved(module, sharders)
        return options, self._known(options, room, notes=notes)

    def _known(
        self, options: Sequence[ShardingOption], room: Topology, **said: Any
    ) -> KnownPlan:
        """Describe a plan; see `describe_plan`."""
        return describe_plan(
            options,
            self.costs,
            room,
            memory=self.memory,
            batch_size_is_default=not self._arguments["batch_size"],
            **said,
        )

    def _check_inputs(
        self, module: nn.Module, sharders: Sequence[ModuleSharder[Any]]
    ) -> tuple[Note, ...]:
        """Hold profiles, constraints and sharders against the model; returns notes."""
        check_kind("model", module, nn.Module)
        check_profiles(module, self._profiles)
        notes = (
            *unsharded_notes(module, sharders),
            *unmatched_constraints(module, sharders, self.constraints),
        )
        for note in notes:
            warnings.warn(note.text, stacklevel=3)
        return notes

    def _explain(self, known: KnownPlan) -> PlanReport:
        simulator = None if known.task is None else self.costs.simulator(known.task)
        return known.report(simulator)

    def _reserved(
        self, module: nn.Module, sharders: list[ModuleSharder[Any]]
    ) -> Topology:
        """Devices with what is left for shards; as they are, where nothing is."""
        try:
            return self.reserve(module, sharders)
        except PlannerError:  # of a plan that somebody else made
            return self.topology
