"""The plan of TorchRec's own planner: to compare with, and as the last resort."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn
from torchrec.distributed.planner.constants import BATCH_SIZE
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.planners import EmbeddingShardingPlanner
from torchrec.distributed.planner.shard_estimators import EmbeddingPerfEstimator
from torchrec.distributed.planner.types import (
    ParameterConstraints,
    PlannerError,
    PlannerErrorType,
    ShardingOption,
    Topology,
)
from torchrec.distributed.types import ModuleSharder, ShardingPlan

from torchrec_neuroshard.planner.compat import (
    planner_part,
    report_full,
    sharders_by_type,
)
from torchrec_neuroshard.planner.estimators import (
    OutOfTimeError,
    StorageEstimator,
)
from torchrec_neuroshard.planner.reader import (
    SPLITTING_TYPES,
    TableReader,
    is_pooled,
    note_sharders,
    table_configs,
    table_name,
)
from torchrec_neuroshard.sharding_types import COLUMN_WISE

__all__ = ["is_even", "last_resort", "stock_plan"]

STOCK_TIMEOUT_SECONDS = 60
"""How long TorchRec's own planner may look for a plan where the search has none."""

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

    Args:
        module: The model.
        sharders: Of its embedding modules.
        topology: The devices.
        batch_size: Samples per rank.
        constraints: Table name -> TorchRec's constraints on it.
        seconds: For estimating the options, and again for all proposals.

    Raises:
        OutOfTimeError: It has not estimated its options by then.
        PlannerError: It has no plan.
    """
    given = dict(constraints)
    enumerator = _TimedEnumerator(topology, batch_size, given)
    enumerator.deadline = time.monotonic() + seconds
    planner = EmbeddingShardingPlanner(
        topology=topology,
        batch_size=batch_size,
        constraints=given,
        enumerator=enumerator,
        timeout_seconds=seconds,
        debug=False,
        stats=[],
    )
    with report_full(planner_part(planner, "storage_reservation")):
        return planner.plan(module, sharders)


class _TimedEnumerator(EmbeddingEnumerator):
    """TorchRec's enumerator; it estimates one table after another until a deadline."""

    deadline = 0.0
    """When to give up (`time.monotonic()`)."""

    def populate_estimates(self, sharding_options: list[ShardingOption]) -> None:
        by_table = itertools.groupby(sharding_options, lambda option: option.fqn)
        tables = [list(options) for _, options in by_table]
        for done, options in enumerate(tables):
            if time.monotonic() > self.deadline:
                raise OutOfTimeError(f"it had estimated {done} of {len(tables)} tables")
            super().populate_estimates(options)


def last_resort(
    arguments: Mapping[str, Any],
    *,
    module: nn.Module,
    sharders: list[ModuleSharder[Any]],
    enumerator: Any,
    reader: TableReader,
    violation: Callable[[Sequence[ShardingOption]], str | None],
    pipeline_type: Any,
    is_lenient: bool,
) -> tuple[ShardingPlan, list[ShardingOption]]:
    """Plan by TorchRec's own planner where the search has no plan.

    Args:
        arguments: Of TorchRec's planner, as the caller gave them.
        module: The model.
        sharders: Of its embedding modules.
        enumerator: Of the search: this package's, unless the caller passed one.
        reader: Knows the tables' optimizers.
        violation: Says how a plan breaks the caller's constraints on placement.
        pipeline_type: TorchRec's, of the training loop; None: no pipeline.
        is_lenient: Whether memory is what TorchRec counts, not what ranks allocate.

    Returns:
        The plan, and its options as the caller's callbacks left them.

    Raises:
        PlannerError: TorchRec has none either, none that may be used, or too many
            shards to list.
    """
    chosen: list[ShardingOption] = []

    def take(options: list[ShardingOption]) -> list[ShardingOption]:
        chosen[:] = options
        return options

    timeout = arguments["timeout_seconds"] or STOCK_TIMEOUT_SECONDS
    given = {
        **arguments,
        "timeout_seconds": timeout,
        "callbacks": [*(arguments["callbacks"] or []), take],
        "proposer": copy.deepcopy(arguments["proposer"]),
    }
    if arguments["enumerator"] is None:
        listed = enumerator.last_stored_search_space or ()
        if LEAST_SHARD_SECONDS * sum(o.num_shards for o in listed) > timeout:
            raise OutOfTimeError("TorchRec's estimates would take too long")
        given["enumerator"] = _every_option(
            arguments, module, reader, pipeline_type, is_lenient
        )
    planner = EmbeddingShardingPlanner(**given)
    with report_full(planner_part(planner, "storage_reservation")):
        plan = planner.plan(module, sharders)
    note_sharders(chosen, sharders_by_type(sharders))
    if obstacle := _obstacle(chosen, reader, arguments["topology"], violation):
        raise PlannerError(
            error_type=PlannerErrorType.STRICT_CONSTRAINTS, message=obstacle
        )
    return plan, chosen


def _every_option(
    arguments: Mapping[str, Any],
    module: nn.Module,
    reader: TableReader,
    pipeline_type: Any,
    is_lenient: bool,
) -> EmbeddingEnumerator:
    """TorchRec's enumerator; unless lenient, it counts what ranks allocate.

    Then what is too wide for a GPU's kernels must be split, too.
    """
    topology, constraints = arguments["topology"], dict(arguments["constraints"] or {})
    estimators = None
    if not is_lenient:
        for config in table_configs(module):
            if config.embedding_dim > reader.max_columns:
                own = constraints.get(config.name) or ParameterConstraints()
                kinds = own.sharding_types or SPLITTING_TYPES
                constraints[config.name] = dataclasses.replace(
                    own, sharding_types=[k for k in kinds if k in SPLITTING_TYPES]
                )
        storage = StorageEstimator(
            topology, constraints, reader=reader, pipeline_type=pipeline_type
        )
        estimators = [EmbeddingPerfEstimator(topology, constraints), storage]
    batch_size = arguments["batch_size"] or BATCH_SIZE
    return EmbeddingEnumerator(topology, batch_size, constraints, estimators)


def _obstacle(
    options: Sequence[ShardingOption],
    reader: TableReader,
    topology: Topology,
    violation: Callable[[Sequence[ShardingOption]], str | None],
) -> str | None:
    """Why a plan of TorchRec's cannot be used, if so."""
    if not is_even(options):
        return (
            "TorchRec's own plan splits sequences of one module to unlike widths, "
            "which its all-to-all cannot run"
        )
    for option in options:
        if fault := reader.run_fault(option):
            return (
                f"TorchRec's own plan cannot run table '{table_name(option)}': {fault}"
            )
    broken = violation(options)
    return broken and f"TorchRec's own plan breaks placement constraints: {broken}"


def is_even(options: Sequence[ShardingOption]) -> bool:
    """Whether column shards of sequences are of one width in each module."""
    widths: dict[str, set[int]] = {}
    for option in options:
        if not is_pooled(option) and option.sharding_type == COLUMN_WISE:
            found = {int(s.size[1]) for s in option.shards}
            widths.setdefault(option.path, set()).update(found)
    return all(len(found) == 1 for found in widths.values())
