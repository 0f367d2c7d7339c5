"""A planner's reports on plans: on its last one and on any other plan."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
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

from torchrec_neuroshard.costs.placement_rules import quoted
from torchrec_neuroshard.costs.task import ShardingTask
from torchrec_neuroshard.errors import ConfigError, check_kind
from torchrec_neuroshard.notes import Note
from torchrec_neuroshard.planner.checks import (
    check_profiles,
    left_out_notes,
    unmatched_constraints,
    unsharded_notes,
)
from torchrec_neuroshard.planner.compat import (
    planner_part,
    set_planner_part,
    sharders_by_type,
)
from torchrec_neuroshard.planner.enumerator import NeuroShardEnumerator
from torchrec_neuroshard.planner.given_plans import (
    copied,
    model_tables,
    placed_options,
    planned_once,
)
from torchrec_neuroshard.planner.loaded_plans import LoadsPlans
from torchrec_neuroshard.planner.memory import MemoryModel
from torchrec_neuroshard.planner.option_facts import table_name
from torchrec_neuroshard.planner.outline import outline_of
from torchrec_neuroshard.planner.plan_costs import PlanCosts
from torchrec_neuroshard.planner.results import KnownPlan, describe_plan
from torchrec_neuroshard.report import PlanComparison, PlanReport
from torchrec_neuroshard.report.plan_tables import plan_shardings, table_moves
from torchrec_neuroshard.search.base import SearchResult
from torchrec_neuroshard.tables.profile import FeatureProfile

logger = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True)
class LastPlan:
    """The plan last returned or adopted, with its options, costs and model."""

    plan: ShardingPlan | None = None
    options: list[ShardingOption] = field(default_factory=list)
    known: KnownPlan | None = None
    model: tuple[nn.Module, list[ModuleSharder[Any]]] | None = None
    """The model without its weights, and its sharders."""


class DescribesPlans(LoadsPlans):
    """The reporting part of `NeuroShardPlanner`, which sets the attributes.

    Attributes:
        costs: Prices plans.
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
        """Table, by name or module path and name -> TorchRec's constraints."""
        return self.costs.reader.constraints

    @property
    def profiles(self) -> Mapping[str, FeatureProfile]:
        """Feature name -> its profile."""
        return self._profiles

    @property
    def memory(self) -> MemoryModel | None:
        """The memory model of what ranks allocate; None with a caller's enumerator."""
        own = self.enumerator
        return own.memory if isinstance(own, NeuroShardEnumerator) else None

    def reserve(
        self, module: nn.Module, sharders: list[ModuleSharder[Any]]
    ) -> Topology:
        """Return the devices, with the memory left for shards."""
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
        """Costs and placement of the plan returned last; see `NeuroShardPlanner`."""
        known = self.last_known
        return known.result if known else None

    @property
    def last_task(self) -> ShardingTask | None:
        """The tables of `last_result.placement`: the column-sharded ones."""
        known = self.last_known
        return known.task if known else None

    @property
    def stashed_tables(self) -> set[str]:
        """Tables to stash with the last plan.

        Pass them to `MemoryStashingManager.set_stashed_tables` before
        `DistributedModelParallel` gets the plan.
        """
        known = self.last_known
        return set(known.stashed) if known else set()

    def get_selected_options(self) -> list[ShardingOption]:
        """Return the last plan's options, with the costs and memory of their shards.

        The list is empty before the first plan, and on ranks other than the planning
        one.
        """
        return self._last.options if self.last_known else []

    def report(self) -> PlanReport:
        """Return a report on the last plan: costs of each rank, and gains of splits.

        Returns:
            A report: `print` shows it as text, and `to_json` returns a dictionary.

        Raises:
            ConfigError: There is no plan yet.
        """
        known = self.last_known
        if known is None:
            raise ConfigError(
                "there is no plan to report on yet; call plan() or collective_plan() "
                "first, or pass the planner to load_plan"
            )
        return self._explain(known)

    def adopt(
        self,
        plan: ShardingPlan,
        module: nn.Module,
        sharders: Sequence[ModuleSharder[Any]] | None = None,
    ) -> None:
        """Make any plan, for example a loaded one, the planner's last plan.

        `report` and `last_result` are computed when they are first read, like
        `evaluate`.

        Args:
            plan: The plan.
            module: The model before `DistributedModelParallel`.
            sharders: None: TorchRec's defaults.
        """
        check_kind("plan", plan, ShardingPlan)
        check_kind("model", module, nn.Module)
        sharders_by_type(sharders or ())  # checks that all are sharders
        self._last = LastPlan(plan=copied(plan))
        self._try_remember(module, sharders)

    @property
    def last_plan(self) -> ShardingPlan | None:
        """The plan last returned or adopted; None before the first plan."""
        return self._last.plan

    @property
    def last_known(self) -> KnownPlan | None:
        """Result and report of the last plan; None if it is missing or empty."""
        last = self._last
        if last.known is None and last.plan is not None and last.model is not None:
            if any(last.plan.plan.values()):
                options, last.known = self._describe(last.plan, *last.model)
                self._keep(options)
        return last.known

    def _keep(self, options: list[ShardingOption]) -> None:
        """Make options those of the last plan, also for TorchRec."""
        self._last.options = options
        set_planner_part(self, "best_plan", options)
        if isinstance(self.enumerator, NeuroShardEnumerator):
            self.enumerator.chosen = options

    @property
    def last_model(self) -> tuple[nn.Module, list[ModuleSharder[Any]]] | None:
        """The model planned last, without weights, and its sharders.

        None before the first plan, and on ranks other than the planning one.
        """
        return self._last.model

    def remember(
        self, module: nn.Module, sharders: Sequence[ModuleSharder[Any]] | None = None
    ) -> None:
        """Make a model the `last_model` without planning it.

        Args:
            module: The model before `DistributedModelParallel`.
            sharders: None: TorchRec's defaults.
        """
        check_kind("model", module, nn.Module)
        sharders = list(sharders or get_default_sharders())
        self._last.model = outline_of(module), sharders

    def _try_remember(
        self, module: nn.Module, sharders: Sequence[ModuleSharder[Any]] | None
    ) -> None:
        try:
            self.remember(module, sharders)
        except Exception as error:  # an unusual module; the plan is still valid
            logger.debug("the model's outline could not be kept: %r", error)

    def evaluate(
        self,
        plan: ShardingPlan,
        module: nn.Module,
        sharders: list[ModuleSharder[Any]] | None = None,
    ) -> PlanReport:
        """Return a report on any plan of a model.

        Nothing is searched, so the report has no lower bound.

        Args:
            plan: The plan.
            module: The model before `DistributedModelParallel`.
            sharders: None: TorchRec's defaults.

        Returns:
            A report like that of `report`.

        Raises:
            PlanFileError: The plan does not fit this model on these ranks.
            ProfileError: No table reads a profile's feature.
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
        """Return a comparison of the last plan with another plan of the model.

        Both plans are priced with the same costs.

        Args:
            plan: Any other plan.
            module: The model before `DistributedModelParallel`.
            sharders: None: TorchRec's defaults.
            name: Name of the other plan in the comparison.

        Returns:
            The time that the last plan saves, and the tables placed differently.
            `print` shows it as text, and `write_html` as a page.

        Raises:
            ConfigError: There is no plan yet.
            PlanFileError: A plan does not fit this model on these ranks.
        """
        ours = self.report()
        own = self._last.plan
        assert own is not None, "report() has raised otherwise"
        theirs = self.evaluate(plan, module, sharders)
        plan, own = planned_once(plan, module), planned_once(own, module)
        tables, _ = model_tables(plan.plan, module)
        world_size = int(self.topology.world_size)
        return PlanComparison(
            first_name=name,
            first=theirs,
            second_name="this plan",
            second=ours,
            moves=table_moves(
                plan_shardings(plan),
                plan_shardings(own),
                tables,
                (world_size, world_size),
            ),
        )

    def placed_options(
        self,
        plan: ShardingPlan,
        module: nn.Module,
        sharders: Sequence[ModuleSharder[Any]],
    ) -> list[ShardingOption]:
        """Return any plan of a model as TorchRec's options, with estimates.

        Raises:
            PlanFileError: The plan does not fit this model on these ranks.
        """
        world_size = int(self.topology.world_size)
        options = placed_options(plan, module, sharders, self.enumerator, world_size)
        self.costs.share_launches(options)
        return options

    def _describe(
        self, plan: ShardingPlan, module: nn.Module, sharders: list[ModuleSharder[Any]]
    ) -> tuple[list[ShardingOption], KnownPlan]:
        """Return the options, result and report of any plan."""
        notes = self._check_inputs(module, sharders)
        options = self.placed_options(plan, module, sharders)
        self.costs.attribute(options)
        if self.memory is not None:
            self.memory.attribute(options)
        room = self._reserved(module, sharders)
        return options, self._known(options, room, notes=notes)

    def _known(
        self,
        options: Sequence[ShardingOption],
        room: Topology,
        notes: Sequence[Note] = (),
        **said: Any,
    ) -> KnownPlan:
        """Return the result and report of options; see `describe_plan`."""
        return describe_plan(
            options,
            self.costs,
            room,
            memory=self.memory,
            batch_size_is_default=not self._arguments["batch_size"],
            notes=[*notes, *self._run_faults(options)],
            **said,
        )

    def _run_faults(self, options: Sequence[ShardingOption]) -> list[Note]:
        """Return a note for each way in which tables fail or train wrongly here.

        The planner's own enumerator lists no such options; a caller's may.
        """
        tables: dict[str, list[str]] = {}
        faults = self.costs.reader.run_faults(options)
        for option in (o for o in options if id(o) in faults):
            tables.setdefault(faults[id(option)], []).append(table_name(option))
        return [
            Note.on(
                "cannot-run",
                names,
                f"table{'s' * (len(names) > 1)} {quoted(names)}: {fault}",
                severity="error",
            )
            for fault, names in tables.items()
        ]

    def _check_inputs(
        self, module: nn.Module, sharders: Sequence[ModuleSharder[Any]]
    ) -> tuple[Note, ...]:
        """Check profiles, constraints and sharders against the model; return notes."""
        check_kind("model", module, nn.Module)
        check_profiles(module, self._profiles)
        notes = (
            *unsharded_notes(module, sharders),
            *left_out_notes(
                module, sharders, self.constraints, self.topology.compute_device
            ),
            *unmatched_constraints(module, sharders, self.constraints),
        )
        for note in notes:
            warnings.warn(note.text, stacklevel=4)
        return notes

    def _explain(self, known: KnownPlan) -> PlanReport:
        simulator = None if known.task is None else self.costs.simulator(known.task)
        return known.report(simulator)

    def _reserved(
        self, module: nn.Module, sharders: list[ModuleSharder[Any]]
    ) -> Topology:
        """Return the devices with the memory for shards, or all if none is left."""
        try:
            return self.reserve(module, sharders)
        except PlannerError:  # possible for plans from elsewhere
            return self.topology
