"""The plan of TorchRec's own planner, for comparisons and as the last resort."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import nn
from torchrec.distributed.planner.constants import BATCH_SIZE
from torchrec.distributed.planner.planners import EmbeddingShardingPlanner
from torchrec.distributed.planner.proposers import (
    GreedyProposer,
    GridSearchProposer,
    UniformProposer,
)
from torchrec.distributed.planner.types import (
    Enumerator,
    PlannerError,
    PlannerErrorType,
    Proposer,
    ShardingOption,
)
from torchrec.distributed.types import ModuleSharder, ShardingPlan

from torchrec_neuroshard.planner.compat import (
    EnumeratorByModule,
    planner_part,
    report_full,
    sharders_by_type,
)
from torchrec_neuroshard.planner.option_facts import is_even, note_sharders, table_name
from torchrec_neuroshard.planner.reader import TableReader
from torchrec_neuroshard.planner.table_keys import ModuleConstraints, with_bare_names

MOST_SHARDS = 200_000
"""Most shards for TorchRec to estimate, at 0.27 ms each."""

MOST_PLACED = 5_000_000
"""Most shards in all proposals of each greedy proposer, at 4 to 12 us each. This is not
a time limit, since a plan must not depend on the machine's load."""


def stock_plan(
    module: nn.Module,
    sharders: list[ModuleSharder[Any]],
    listed: Iterable[ShardingOption],
    **arguments: Any,
) -> ShardingPlan:
    """Return the plan of TorchRec's own planner.

    Args:
        module: The model.
        sharders: The sharders of its embedding modules.
        listed: The model's options from this package's enumerator.
        arguments: Arguments of `EmbeddingShardingPlanner`.

    Raises:
        PlannerError: TorchRec finds no plan, or has too many shards to estimate.
    """
    num_shards = sum(option.num_shards for option in listed)
    if num_shards > MOST_SHARDS:
        raise PlannerError(
            f"TorchRec's planner would estimate {num_shards:,} shards one by one, but "
            f"the limit is {MOST_SHARDS:,}"
        )
    constraints = arguments.get("constraints")
    arguments["constraints"] = with_bare_names(constraints)
    arguments["enumerator"] = arguments.get("enumerator") or EnumeratorByModule(
        arguments["topology"],
        arguments["batch_size"] or BATCH_SIZE,
        ModuleConstraints(constraints),
    )
    planner = EmbeddingShardingPlanner(**arguments)
    with report_full(planner_part(planner, "storage_reservation")):
        return planner.plan(module, sharders)


class _FirstProposals(Proposer):
    """The first proposals of another proposer, up to `MOST_PLACED` shards in total."""

    def __init__(self, proposer: Proposer) -> None:
        self._proposer, self._num_left = proposer, MOST_PLACED

    def load(
        self, search_space: list[ShardingOption], enumerator: Enumerator | None = None
    ) -> None:
        self._proposer.load(search_space, enumerator)

    def propose(self) -> list[ShardingOption] | None:
        proposal: list[ShardingOption] | None = self._proposer.propose()
        self._num_left -= sum(option.num_shards for option in proposal or ())
        return proposal if self._num_left >= 0 else None

    def feedback(self, *given: Any, **named: Any) -> None:
        self._proposer.feedback(*given, **named)


def last_resort(
    arguments: Mapping[str, Any],
    *,
    module: nn.Module,
    sharders: list[ModuleSharder[Any]],
    enumerator: Any,
    reader: TableReader,
    violation: Callable[[Sequence[ShardingOption]], str | None],
) -> tuple[ShardingPlan, list[ShardingOption]]:
    """Return the plan of TorchRec's own planner after the search found none.

    Args:
        arguments: The caller's arguments of TorchRec's planner.
        module: The model.
        sharders: The sharders of its embedding modules.
        enumerator: The search's enumerator: the caller's or this package's.
        reader: Knows which options could not run.
        violation: Returns how a plan breaks the caller's placement constraints.

    Returns:
        The plan, and its options after the caller's callbacks.

    Raises:
        PlannerError: TorchRec finds no plan either, finds one that cannot be used, or
            has too many shards to estimate. Or it fails before it has a plan.
        Exception: What the caller's callbacks and stats raise.
    """
    chosen: list[ShardingOption] = []
    is_found = False

    def note_found(options: list[ShardingOption]) -> list[ShardingOption]:
        nonlocal is_found
        is_found = True
        return options

    def take(options: list[ShardingOption]) -> list[ShardingOption]:
        chosen[:] = options
        return options

    given = {
        **arguments,
        "callbacks": [note_found, *(arguments["callbacks"] or []), take],
        "proposer": copy.deepcopy(arguments["proposer"])
        or [
            GridSearchProposer(),
            _FirstProposals(GreedyProposer()),
            _FirstProposals(GreedyProposer(use_depth=False)),
            UniformProposer(),
        ],
    }
    is_own = arguments["enumerator"] is None
    listed = enumerator.all_options(module, sharders) if is_own else ()
    try:
        plan = stock_plan(module, sharders, listed, **given)
    except Exception as error:
        if is_found or isinstance(error, PlannerError):
            raise
        raise PlannerError(f"TorchRec's own planner failed: {error!r}") from error
    note_sharders(chosen, sharders_by_type(sharders))
    if obstacle := _obstacle(chosen, reader, violation):
        raise PlannerError(
            error_type=PlannerErrorType.STRICT_CONSTRAINTS, message=obstacle
        )
    return plan, chosen


def _obstacle(
    options: Sequence[ShardingOption],
    reader: TableReader,
    violation: Callable[[Sequence[ShardingOption]], str | None],
) -> str | None:
    """Return why TorchRec's plan cannot be used; None if it can."""
    if not is_even(options):
        return (
            "TorchRec's own plan splits sequence tables of one module into different "
            "widths, which its all-to-all does not support"
        )
    faults = reader.run_faults(options)
    for option in options:
        if fault := faults.get(id(option)):
            name = table_name(option)
            return f"TorchRec's own plan cannot run table '{name}': {fault}"
    broken = violation(options)
    return broken and f"TorchRec's own plan breaks placement constraints: {broken}"
