"""The plan of TorchRec's own planner: to compare with, a candidate, a last resort."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn
from torchrec.distributed.planner.constants import BATCH_SIZE
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.planners import EmbeddingShardingPlanner
from torchrec.distributed.planner.shard_estimators import EmbeddingStorageEstimator
from torchrec.distributed.planner.types import (
    Enumerator,
    ParameterConstraints,
    PlannerError,
    PlannerErrorType,
    Proposer,
    ShardingOption,
    StorageReservation,
    Topology,
)
from torchrec.distributed.types import ModuleSharder, ShardingPlan

from torchrec_neuroshard.planner.compat import (
    planner_part,
    replaced_parts,
    report_full,
    sharders_by_type,
)
from torchrec_neuroshard.planner.options.table_reader import (
    SPLITTING_TYPES,
    TableReader,
    is_pooled,
    max_columns,
    note_sharders,
    table_configs,
    table_name,
)
from torchrec_neuroshard.planner.parts.shard_estimators import (
    OutOfTimeError,
    SizesEstimator,
    StorageEstimator,
)
from torchrec_neuroshard.sharding_types import COLUMN_WISE

__all__ = [
    "PlacedPlanProposer",
    "TorchRecOption",
    "TorchRecPlan",
    "is_even",
    "stock_plan",
]

logger = logging.getLogger(__name__)

STOCK_TIMEOUT_SECONDS = 60
"""How long TorchRec's own planner may look for a plan where the search has none."""

LEAST_STOCK_SECONDS = 2.0
"""How long TorchRec's own planner may always look for a plan to compare with."""
ESTIMATING_SHARE = 0.75
"""Part of that in which it must have estimated its options."""

MANY_OPTIONS, PATIENCE = 500, 300
"""Of more options than that, TorchRec's proposers take turns, and so many proposals
without a better plan end it: most of them change one table of a hundred."""

LEAST_SHARD_SECONDS = 5e-6
"""Less than TorchRec takes to estimate a shard on any machine."""


def stock_plan(
    module: nn.Module,
    sharders: list[ModuleSharder[Any]],
    *,
    topology: Topology,
    batch_size: int,
    constraints: Mapping[str, ParameterConstraints],
    seconds: float,
) -> ShardingPlan:
    """Plan as TorchRec's own planner does by default, within some seconds.

    Of few options, the plan is that of `EmbeddingShardingPlanner`; shards of one size
    are estimated once. Of many options its proposers take turns.

    Args:
        module: The model.
        sharders: Of its embedding modules.
        topology: The devices.
        batch_size: Samples per rank.
        constraints: Table name -> TorchRec's constraints on it.
        seconds: For listing and estimating the options and for all proposals.

    Raises:
        OutOfTimeError: It has not estimated its options by then.
        PlannerError: It has no plan.
    """
    arguments = {
        "topology": topology,
        "batch_size": batch_size,
        "constraints": dict(constraints),
        "enumerator": _TimedEnumerator(
            topology, batch_size, constraints, deadline=time.monotonic() + seconds
        ),
        "timeout_seconds": seconds,
        "debug": False,
        "stats": [],
    }
    return _planned(arguments, module, sharders)[0]


def _planned(
    arguments: Mapping[str, Any], module: nn.Module, sharders: list[ModuleSharder[Any]]
) -> tuple[ShardingPlan, list[ShardingOption]]:
    """Run TorchRec's planner; its own proposers take turns."""
    options: list[ShardingOption] = []

    def take(chosen: list[ShardingOption]) -> list[ShardingOption]:
        options[:] = chosen
        return chosen

    proposer = copy.deepcopy(arguments.get("proposer"))
    callbacks = [*(arguments.get("callbacks") or []), take]
    planner = EmbeddingShardingPlanner(
        **{**arguments, "callbacks": callbacks, "proposer": proposer}
    )
    proposers = planner_part(planner, "proposers")
    if proposer is None:
        proposers = [_InTurn(proposers)]
    reservation = planner_part(planner, "storage_reservation")
    with replaced_parts(planner, proposers=proposers), report_full(reservation):
        return planner.plan(module, sharders), options


class TorchRecOption(ShardingOption):
    """A placed option of a plan that TorchRec's own planner made."""

    def __init__(self, option: ShardingOption) -> None:
        self.__dict__.update(vars(option))


class TorchRecPlan:
    """The plan of TorchRec's own planner, with what the caller passed.

    Attributes:
        proposer: Proposes it in TorchRec's loop, after all others.
        skipped: Why there is none, where time was short or it failed.

    Args:
        arguments: Of TorchRec's planner; proposers are copied before use.
        module: The model.
        sharders: Of its embedding modules.
        storage_reservation: The planner's.
        enumerator: The planner's: this package's, unless the caller passed one.
        reader: Knows the tables' optimizers.
        violation: Says how a plan breaks the caller's constraints on placement.
        pipeline_type: TorchRec's, of the training loop; None: no pipeline.
        time_budget_seconds: Of planning as a whole, which starts now.
        is_lenient: Whether memory is what TorchRec counts, not what ranks allocate.
    """

    def __init__(
        self,
        arguments: Mapping[str, Any],
        *,
        module: nn.Module,
        sharders: list[ModuleSharder[Any]],
        storage_reservation: StorageReservation,
        enumerator: Any,
        reader: TableReader,
        violation: Callable[[Sequence[ShardingOption]], str | None],
        pipeline_type: Any,
        time_budget_seconds: float,
        is_lenient: bool = False,
    ) -> None:
        self.proposer = PlacedPlanProposer(self._candidates)
        self.skipped: str | None = None
        self._arguments = arguments
        self._job = module, sharders
        self._storage_reservation = storage_reservation
        self._enumerator = enumerator
        self._reader = reader
        self._is_lenient = is_lenient
        self._violation = violation
        self._pipeline_type = pipeline_type
        self._time_budget_seconds = time_budget_seconds
        self._timeout_seconds = arguments["timeout_seconds"] or math.inf
        self._started = time.monotonic()

    def last_resort(self) -> tuple[ShardingPlan, list[ShardingOption]]:
        """Plan where the search has no plan.

        Returns:
            The plan, and its options as the caller's callbacks left them.

        Raises:
            PlannerError: TorchRec has none either, none that may be used, or too many
                shards to list.
        """
        arguments = dict(self._arguments)
        timeout = arguments["timeout_seconds"] or STOCK_TIMEOUT_SECONDS
        if arguments["enumerator"] is None:
            self._check_time(time.monotonic() + timeout)
            arguments["enumerator"] = self._every_option(
                as_allocated=not self._is_lenient
            )
        arguments["timeout_seconds"] = timeout
        plan, options = _planned(arguments, *self._job)
        if obstacle := self._obstacle(options):
            raise PlannerError(
                error_type=PlannerErrorType.STRICT_CONSTRAINTS, message=obstacle
            )
        return plan, options

    def _candidates(self) -> Iterator[list[ShardingOption]]:
        """Plans to compare with the search's, within the time there is.

        The one that TorchRec makes by itself: its proposers go by the memory that it
        counts. Where that cannot be used, one by the memory that ranks allocate.
        """
        start = time.monotonic()
        allowed = self._allowed(start)
        is_given = self._arguments["enumerator"] is not None
        once = is_given or self._is_lenient
        for as_allocated in (False,) if once else (False, True):
            plan = self._timed_candidate(start, allowed, as_allocated)
            if plan is not None:
                yield plan
            if self.skipped is not None:
                return

    def _allowed(self, now: float) -> float:
        """Seconds that TorchRec's planner may take."""
        passed, searched = now - self._started, now - self.proposer.loaded
        allowed = max(
            LEAST_STOCK_SECONDS, min(searched, self._time_budget_seconds - passed)
        )
        return min(allowed, self._timeout_seconds - passed)

    def _timed_candidate(
        self, start: float, allowed: float, as_allocated: bool
    ) -> list[ShardingOption] | None:
        arguments = {
            **self._arguments,
            "storage_reservation": self._storage_reservation,
            "callbacks": [],
            "stats": [],
            "plan_loader": None,
        }
        deadline = start + ESTIMATING_SHARE * allowed
        try:
            if arguments["enumerator"] is None:
                self._check_time(deadline)
                arguments["enumerator"] = self._every_option(deadline, as_allocated)
            # TorchRec's clock starts when the options are listed.
            left = max(start + allowed - time.monotonic(), 0.1)
            arguments["timeout_seconds"] = left
            _, options = _planned(arguments, *self._job)
        except PlannerError as error:
            logger.info("TorchRec's own planner has no plan: %s", error)
            if isinstance(error, OutOfTimeError) or time.monotonic() > deadline:
                self.skipped = (
                    "TorchRec's own plan was no candidate: its planner had none after "
                    f"{max(allowed, 0.0):.1f} s, all that it may take beside the search"
                )
            return None
        except Exception as error:  # it is only a candidate
            self.skipped = (
                "TorchRec's own plan was no candidate: its planner failed: "
                f"{type(error).__name__}: {error}"
            )
            return None
        if obstacle := self._obstacle(options):
            logger.info("%s", obstacle)
            return None
        # Its costs are comparable once they come from where all others do.
        self._enumerator.populate_estimates(options)
        return [TorchRecOption(option) for option in options]

    def _obstacle(self, options: Sequence[ShardingOption]) -> str | None:
        """Why a plan of TorchRec's cannot be used, if so."""
        if not is_even(options):
            return (
                "TorchRec's own plan splits sequences of one module to unlike widths, "
                "which its all-to-all cannot run"
            )
        topology = self._arguments["topology"]
        note_sharders(options, sharders_by_type(self._job[1]))
        for option in options:
            if fault := self._reader.run_fault(option, topology):
                return (
                    f"TorchRec's own plan cannot run table '{table_name(option)}': "
                    f"{fault}"
                )
        violation = self._violation(options)
        if violation is None:
            return None
        return f"TorchRec's own plan breaks placement constraints: {violation}"

    def _check_time(self, deadline: float) -> None:
        """Give up at once where TorchRec's estimates take too long on any machine."""
        listed = self._enumerator.last_stored_search_space or ()
        needed = LEAST_SHARD_SECONDS * sum(o.num_shards for o in listed)
        if time.monotonic() + needed > deadline:
            raise OutOfTimeError("TorchRec's estimates would take too long")

    def _every_option(
        self, deadline: float = math.inf, as_allocated: bool = True
    ) -> EmbeddingEnumerator:
        """TorchRec's enumerator.

        Args:
            deadline: See `_TimedEnumerator`.
            as_allocated: Whether memory is what ranks allocate, and what is too wide
                for a GPU's kernels must be split. Else all is as TorchRec has it, and
                its plan the one that it makes by itself.
        """
        topology = self._arguments["topology"]
        constraints = dict(self._arguments["constraints"] or {})
        for config in table_configs(self._job[0]):
            if as_allocated and config.embedding_dim > max_columns(topology):
                given = constraints.get(config.name) or ParameterConstraints()
                kinds = given.sharding_types or SPLITTING_TYPES
                constraints[config.name] = dataclasses.replace(
                    given, sharding_types=[k for k in kinds if k in SPLITTING_TYPES]
                )
        storage = None
        if as_allocated:
            storage = StorageEstimator(
                topology,
                constraints,
                reader=self._reader,
                pipeline_type=self._pipeline_type,
            )
        batch_size = self._arguments["batch_size"] or BATCH_SIZE
        return _TimedEnumerator(
            topology, batch_size, constraints, storage, deadline=deadline
        )


class _Listed(Exception):
    """All options of a model, without estimates."""

    def __init__(self, options: list[ShardingOption]) -> None:
        self.options = options


class _TimedEnumerator(EmbeddingEnumerator):
    """TorchRec's enumerator, but it gives up at a deadline, and copies no options.

    Args:
        topology: The devices.
        batch_size: Samples per rank.
        constraints: Table name -> TorchRec's constraints on it.
        storage: Estimates memory; None: as TorchRec does.
        deadline: When to give up (`time.monotonic()`).
    """

    def __init__(
        self,
        topology: Topology,
        batch_size: int,
        constraints: Mapping[str, ParameterConstraints],
        storage: EmbeddingStorageEstimator | None = None,
        *,
        deadline: float,
    ) -> None:
        given = dict(constraints)
        perf = SizesEstimator(topology, given)
        storage = storage or EmbeddingStorageEstimator(topology, given)
        super().__init__(topology, batch_size, given, [perf, storage])
        self._deadline = deadline
        self._is_listing = False
        self._options: list[ShardingOption] | None = None

    @property
    def last_stored_search_space(self) -> list[ShardingOption] | None:
        """What was listed last."""
        return self._options

    def enumerate(
        self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]
    ) -> list[ShardingOption]:
        """List and estimate all options.

        TorchRec's enumerator copies them for a later call, which takes as long as to
        estimate them; there is none.

        Args:
            module: The model.
            sharders: Of its embedding modules.

        Raises:
            OutOfTimeError: The deadline has passed.
        """
        options: list[ShardingOption] = []
        self._is_listing = True
        try:
            super().enumerate(module, sharders)
        except _Listed as listed:
            options = listed.options
        finally:
            self._is_listing = False
        self.populate_estimates(options)
        self._options = options
        return options

    def populate_estimates(self, sharding_options: list[ShardingOption]) -> None:
        """Set the estimates of every shard, one table after another.

        Args:
            sharding_options: Changed in place.

        Raises:
            OutOfTimeError: The deadline has passed.
        """
        if self._is_listing:
            raise _Listed(sharding_options)
        by_table = itertools.groupby(sharding_options, lambda option: option.fqn)
        tables = [list(options) for _, options in by_table]
        for done, options in enumerate(tables):
            if time.monotonic() > self._deadline:
                raise OutOfTimeError(f"it had estimated {done} of {len(tables)} tables")
            super().populate_estimates(options)


class _InTurn(Proposer):
    """Proposers of one planner, of many options in turn; see `MANY_OPTIONS`.

    Of few options, one after the other, as TorchRec's planner does.

    Args:
        proposers: The planner's.
    """

    def __init__(self, proposers: Sequence[Proposer]) -> None:
        self._left = deque(proposers)

    def load(
        self, search_space: list[ShardingOption], enumerator: Enumerator | None = None
    ) -> None:
        self._are_many = len(search_space) > MANY_OPTIONS
        self._best, self._misses = math.inf, 0
        for proposer in self._left:
            proposer.load(search_space, enumerator)

    def propose(self) -> list[ShardingOption] | None:
        if self._are_many and self._misses >= PATIENCE:
            return None
        while self._left:
            if proposal := self._left[0].propose():
                return list(proposal)
            self._left.popleft()
        return None

    def feedback(
        self,
        partitionable: bool,
        plan: list[ShardingOption] | None = None,
        perf_rating: float | None = None,
        storage_constraint: Topology | None = None,
    ) -> None:
        self._left[0].feedback(partitionable, plan, perf_rating, storage_constraint)
        if partitionable and perf_rating is not None and perf_rating < self._best:
            self._best, self._misses = perf_rating, 0
        elif self._best < math.inf:
            self._misses += 1
        if self._are_many:
            self._left.rotate(-1)


class PlacedPlanProposer(Proposer):
    """Proposes whole plans, ranks and all, that somebody else made, until one fits.

    Attributes:
        rating: How it was rated; None where there was none or it did not fit.
        loaded: When the search space was there (`time.monotonic()`).

    Args:
        plans: Iterated after all other proposals; gives placed options.
    """

    def __init__(self, plans: Callable[[], Iterator[Sequence[ShardingOption]]]) -> None:
        self._plans = plans
        self.rating: float | None = None

    def load(
        self, search_space: list[ShardingOption], enumerator: Enumerator | None = None
    ) -> None:
        """Prepare to ask for plans.

        Args:
            search_space: Not needed.
            enumerator: Not needed.
        """
        del search_space, enumerator
        self._left = self._plans()
        self.rating = None
        self.loaded = time.monotonic()

    def propose(self) -> list[ShardingOption] | None:
        """Return the next plan; None after the last, or after one that fits."""
        plan = next(self._left, None)
        return None if plan is None else [copy.copy(option) for option in plan]

    def feedback(
        self,
        partitionable: bool,
        plan: list[ShardingOption] | None = None,
        perf_rating: float | None = None,
        storage_constraint: Topology | None = None,
    ) -> None:
        """Remember how the plan is rated.

        Args:
            partitionable: Whether it fits.
            plan: Not needed.
            perf_rating: Its critical path [ms].
            storage_constraint: Not needed.
        """
        del plan, storage_constraint
        self.rating = perf_rating
        if partitionable:
            self._left = iter(())


def is_even(options: Sequence[ShardingOption]) -> bool:
    """Whether column shards of sequences are of one width in each module."""
    widths: dict[str, set[int]] = {}
    for option in options:
        if not is_pooled(option) and option.sharding_type == COLUMN_WISE:
            found = {int(s.size[1]) for s in option.shards}
            widths.setdefault(option.path, set()).update(found)
    return all(len(found) == 1 for found in widths.values())
