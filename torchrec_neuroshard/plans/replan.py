"""A better plan for a running job, within a budget of bytes to move.

The distribution of ids drifts, and so does the cost of tables. `replan` starts from the
current plan and searches for moves of shards between ranks that shorten the iteration.
Of the best plans within the budget, which are about equally good, it returns one that
moves few bytes. `apply_moves` carries out the moves with TorchRec's dynamic resharding,
without a restart:

    result = replan(plan, planner=planner, model=model, budget_bytes=2 * 2**30)
    apply_moves(sharded_model, result)

Tables that TorchRec cannot move stay where they are; `ReplanResult.obstacles` says why.
"""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner.planners import to_sharding_plan
from torchrec.distributed.planner.types import Shard, ShardingOption, Storage
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    ModuleSharder,
    ParameterSharding,
    ShardingPlan,
)

from torchrec_neuroshard.costs.simulator import PredictedCosts
from torchrec_neuroshard.costs.task import (
    ColumnShard,
    Placement,
    ShardingTask,
    format_bytes,
)
from torchrec_neuroshard.errors import ConfigError, check_kind, check_number
from torchrec_neuroshard.exchange import from_all, from_first, is_over_gloo
from torchrec_neuroshard.hardware.device_types import backend_of, is_accelerator
from torchrec_neuroshard.planner.checks import check_profiles
from torchrec_neuroshard.planner.compat import sharders_by_type
from torchrec_neuroshard.planner.constraints import ranks_by_table
from torchrec_neuroshard.planner.given_plans import copied, planned_paths
from torchrec_neuroshard.planner.option_facts import table_name
from torchrec_neuroshard.planner.plan_costs import PlanCosts
from torchrec_neuroshard.planner.planner import NeuroShardPlanner
from torchrec_neuroshard.planner.search_space import SearchSpace
from torchrec_neuroshard.planner.ways import is_placeable, ways_of
from torchrec_neuroshard.report.plan_tables import full_name
from torchrec_neuroshard.search.base import SearchConfig
from torchrec_neuroshard.search.budget import MoveBudget, Shards
from torchrec_neuroshard.search.shards import ShardBank
from torchrec_neuroshard.search.within import improve_within
from torchrec_neuroshard.sharded_model import (
    can_reshard,
    is_wrapped_by_ddp,
    permute_features_again,
)
from torchrec_neuroshard.tables.sharding_types import SHARDING_TYPES
from torchrec_neuroshard.tables.table import COLUMN_MULTIPLE

_FUSED = EmbeddingComputeKernel.FUSED.value

_MIN_GAIN = 1e-3
"""Moves must save at least this share of the predicted iteration."""
_SEARCH = SearchConfig(restarts=8)
_TO_APPLY = "came to apply moves"
_MAX_SHOWN = 20
"""Most moves to list in the text of a result."""


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Move:
    """Columns of a table that move to another rank."""

    path: str
    """The table's module."""
    table: str
    offset: int
    """First column."""
    width: int
    """Number of columns."""
    from_rank: int
    to_rank: int
    num_bytes: int
    """Bytes of weights and optimizer state."""

    def __str__(self) -> str:
        """Return the move as a line of text."""
        return (
            f"{full_name(self.path, self.table)}: columns {self.offset} to "
            f"{self.offset + self.width - 1} from rank {self.from_rank} to "
            f"{self.to_rank}, {format_bytes(self.num_bytes)}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplanResult:
    """A plan that is better than the current one, and the moves to it."""

    plan: ShardingPlan
    moves: tuple[Move, ...]
    budget_bytes: int
    before: PredictedCosts
    """Costs of the current plan, with the planner's current inputs."""
    after: PredictedCosts
    """Costs of `plan`, with the same inputs."""
    obstacles: Mapping[str, str]
    """Table -> why TorchRec cannot move it."""
    changed: Mapping[str, EmbeddingModuleShardingPlan]
    """Module -> its changed tables in the new plan."""
    replaced: Mapping[str, EmbeddingModuleShardingPlan]
    """Module -> the same tables in the current plan."""

    @property
    def moved_bytes(self) -> int:
        """Bytes that the moves send between ranks."""
        return sum(move.num_bytes for move in self.moves)

    def __str__(self) -> str:
        """Return the moves and the saved time as text."""
        before, after = self.before.critical_path_ms, self.after.critical_path_ms
        change = f" ({after / before - 1:+.1%})" if before > 0 else ""
        more = len(self.moves) - _MAX_SHOWN
        lines = [
            f"critical path {before:.3f} -> {after:.3f} ms{change}; "
            f"{len(self.moves)} moves of {format_bytes(self.moved_bytes)} in total, "
            f"{format_bytes(self.budget_bytes)} allowed",
            *map(str, self.moves[:_MAX_SHOWN]),
            *([f"... and {more} more"] if more > 0 else []),
            *(f"{t} stays: {why}" for t, why in sorted(self.obstacles.items())),
            "to take any other plan: save a checkpoint, convert it by 'neuroshard "
            "reshard', resume",
        ]
        return "\n".join(lines)


def replan(
    current_plan: ShardingPlan,
    *,
    planner: NeuroShardPlanner,
    model: nn.Module,
    budget_bytes: int,
    sharders: Sequence[ModuleSharder[Any]] | None = None,
    config: SearchConfig | None = None,
) -> ReplanResult:
    """Return a better plan that moves few bytes; call it on one rank.

    Whole shards move or swap ranks. Column-wise tables may also be split differently,
    and their shards may exchange columns. Sharding types and kernels stay the same.
    Only fused table-wise and column-wise tables move.

    Args:
        current_plan: The plan that the job runs.
        planner: Provides costs and limits: cost model, profiles (pass fresh ones),
            constraints and storage reservation.
        model: The model before `DistributedModelParallel`, with its optimizers applied.
            It may be on the "meta" device.
        budget_bytes: Most bytes of weights and optimizer state to send in total.
        sharders: None: TorchRec's defaults.
        config: Effort of the search; it computes no bound. None: the defaults, with 8
            restarts.

    Returns:
        The new plan, or the current one if no moves within the budget help.

    Raises:
        ConfigError: The budget is negative.
        PlanFileError: The plan does not fit this model on these ranks.
        ProfileError: No table reads a profile's feature.
    """
    check_kind("current_plan", current_plan, ShardingPlan)
    check_kind("planner", planner, NeuroShardPlanner)
    check_kind("model", model, nn.Module)
    check_kind("config", config or _SEARCH, SearchConfig)
    check_number("budget_bytes", budget_bytes, finite=False)
    sharders = sharders or get_default_sharders()
    sharders_by_type(sharders)  # checks that all are sharders
    job = _Job(current_plan, planner, model, list(sharders))
    changed = _improve(job, budget_bytes, config or _SEARCH) if job.options else {}
    plan, after = job.plan_with(changed), job.before
    if changed:
        after = job.predict(plan)
    if after.critical_path_ms >= job.before.critical_path_ms:
        changed, plan, after = {}, job.plan_with({}), job.before
    return ReplanResult(
        plan=plan,
        moves=tuple(sorted(m for t in changed for m in job.moves(t, changed[t]))),
        budget_bytes=budget_bytes,
        before=job.before,
        after=after,
        obstacles={table_name(job.options[t]): why for t, why in job.obstacles.items()},
        changed=job.subset(plan, changed),
        replaced=job.subset(current_plan, changed),
    )


class _Job:
    """The running job: its plan, costs, memory limits, and movable tables."""

    def __init__(
        self,
        plan: ShardingPlan,
        planner: NeuroShardPlanner,
        model: nn.Module,
        sharders: list[ModuleSharder[Any]],
    ) -> None:
        self.costs: PlanCosts = planner.costs
        self.topology = planner.topology
        self._plan = plan
        self._paths = planned_paths(plan, model)
        check_profiles(model, planner.profiles)
        memory = [d.storage for d in planner.reserve(model, sharders).devices]
        self._options_of = partial(
            planner.placed_options, module=model, sharders=sharders
        )
        options = self._options_of(plan)
        self.before = self.costs.placed(options).predicted
        self.options = [o for o in options if self._may_move(o)]
        self.state = [_shards_of(plan.plan[o.path][o.name]) for o in self.options]
        fixed = [o for o in options if not self._may_move(o)]
        self._rules = planner.placement_constraints.rules(
            map(table_name, options), int(self.topology.world_size)
        )
        if self._rules:
            self._rules = self._rules.restricted(ranks_by_table(fixed, self._rules))
        for shard in (s for option in fixed for s in option.shards):
            memory[shard.rank] = memory[shard.rank] - shard.storage
        if self.options:
            self.task = self._task(planner, memory)
        resharded = {s.module_type for s in sharders if can_reshard(s)}
        whys = {p: self._obstacle(p, resharded) for p in {o.path for o in self.options}}
        self.obstacles = {
            t: why for t, o in enumerate(self.options) if (why := whys[o.path])
        }

    def _may_move(self, option: ShardingOption) -> bool:
        """Whether the search may move an option's columns to other ranks."""
        reader = self.costs.reader
        return reader.is_column_sharded(option) and is_placeable(option, reader)

    def _task(
        self, planner: NeuroShardPlanner, memory: Sequence[Storage]
    ) -> ShardingTask:
        """Return the movable tables as a task, with memory limits and rules."""
        # The current plan may break the rules. Tables without an allowed rank stay, and
        # tables that go together move as one (see `budget`).
        rules = dataclasses.replace(
            self._rules,
            allowed={t: ranks for t, ranks in self._rules.allowed.items() if ranks},
            together=(),
        )
        return SearchSpace.of(
            ways_of(self.options),
            [[row] for row in range(len(self.options))],
            reader=self.costs.reader,
            enumerator=planner.enumerator,
            memory=memory,
            rules=rules,
            least_columns=self.costs.least_columns,
        ).task

    def budget(self, limit_bytes: int) -> MoveBudget:
        """Return the budget: what TorchRec can move, up to `limit_bytes`."""
        rules = self._rules
        index = {rules.index[table_name(o)]: t for t, o in enumerate(self.options)}
        stuck = {t for table, t in index.items() if not rules.ranks(table)}
        odd = {
            t
            for t, shards in enumerate(self.state)
            if any(width % COLUMN_MULTIPLE for _, width, _ in shards)
        }
        sets = [[index[t] for t in tables if t in index] for tables in rules.together]
        column_bytes, shard_bytes = zip(*map(self._bytes, self.options), strict=True)
        return MoveBudget(
            self.task,
            self.state,
            limit_bytes=limit_bytes,
            column_bytes=column_bytes,
            shard_bytes=shard_bytes,
            stay=stuck | odd | self.obstacles.keys(),
            together=[tables for tables in sets if len(tables) > 1],
            # TorchRec cannot move the optimizer state of a part of a shard.
            keep_cuts=[
                t
                for t, option in enumerate(self.options)
                if any(self.costs.reader.state_bytes(option))
            ],
            # Over gloo a rank cannot send to itself.
            all_leave=backend_of(self.topology.compute_device) == "gloo",
            min_gain=_MIN_GAIN,
        )

    def placement(self) -> Placement:
        """Return the current shards as a placement."""
        shards = [ColumnShard(t, *s) for t, held in enumerate(self.state) for s in held]
        return Placement(int(self.topology.world_size), tuple(shards))

    def predict(self, plan: ShardingPlan) -> PredictedCosts:
        """Return the cost of one iteration with a plan."""
        return self.costs.placed(self._options_of(plan)).predicted

    def _obstacle(self, path: str, resharded: set[Any]) -> str | None:
        """Return why TorchRec cannot move a module's tables; None if it can."""
        options = [o for o in self.options if o.path == path]
        reader, module = self.costs.reader, options[0].module[1]
        if len({any(reader.state_bytes(o)) for o in options}) > 1:
            # TorchRec moves the state of all tables of a module, or of none.
            return (
                "TorchRec does not move modules in which only some tables have "
                "optimizer state"
            )
        for option in options:
            # TorchRec moves one tensor of state per table.
            if sum(reader.state_bytes(option)) > 4:
                name = reader.optimizer_name(option)
                return f"TorchRec moves only a part of the state of {name}"
        if type(module) not in resharded:
            return f"TorchRec does not reshard {type(module).__name__}"
        for name, sharding in self._plan.plan[path].items():
            table = f"table '{name}' of the same module"
            if not SHARDING_TYPES[sharding.sharding_type].can_be_moved:
                # After a move, replicas would diverge, and row-wise tables would
                # average over the wrong features.
                return (
                    f"{table} is {sharding.sharding_type}, which TorchRec does not set "
                    "up again after a move"
                )
            if sharding.compute_kernel != _FUSED:
                return f"{table} uses kernel {sharding.compute_kernel}"
            if len({w for _, w, _ in _shards_of(sharding)}) > 1:
                return (
                    f"{table} is split unevenly, but after a move TorchRec reads the "
                    "state as if all shards were as wide as the first"
                )
        return None

    def _bytes(self, option: ShardingOption) -> tuple[int, int]:
        """Return the bytes per moved column, and per moved shard or part of one."""
        rows = int(option.tensor.shape[0])
        per_value, per_row = self.costs.reader.state_bytes(option)
        return rows * (option.tensor.element_size() + per_value), rows * per_row

    def moves(self, table: int, shards: Shards) -> list[Move]:
        """Return the moves that lead from a table's current shards to `shards`."""
        option = self.options[table]
        column_bytes, shard_bytes = self._bytes(option)
        return [
            Move(
                path=option.path,
                table=option.name,
                offset=offset,
                width=width,
                from_rank=old,
                to_rank=new,
                num_bytes=width * column_bytes + shard_bytes,
            )
            for offset, width, old, new in _overlaps(self.state[table], shards)
            if old != new
        ]

    def plan_with(self, changed: Mapping[int, Shards]) -> ShardingPlan:
        """Return the current plan with other shards for some tables."""
        plan = copied(self._plan)
        for table, shards in changed.items():
            option = copy.copy(self.options[table])
            rows = int(option.tensor.shape[0])
            option.shards = [
                Shard(size=[rows, width], offset=[0, offset], rank=rank)
                for offset, width, rank in shards
            ]
            made = to_sharding_plan([option], self.topology).plan[option.path]
            for path in self._paths[option.path]:
                plan.plan[path][option.name] = dataclasses.replace(
                    plan.plan[path][option.name],
                    ranks=made[option.name].ranks,
                    sharding_spec=made[option.name].sharding_spec,
                )
        return plan

    def subset(
        self, plan: ShardingPlan, tables: Iterable[int]
    ) -> dict[str, EmbeddingModuleShardingPlan]:
        """Return the entries of some tables in a plan."""
        found: dict[str, EmbeddingModuleShardingPlan] = {}
        for option in (self.options[t] for t in tables):
            entries = found.setdefault(option.path, EmbeddingModuleShardingPlan())
            entries[option.name] = plan.plan[option.path][option.name]
        return found


def _improve(job: _Job, budget_bytes: int, config: SearchConfig) -> dict[int, Shards]:
    """Return changed table -> its new shards."""
    budget = job.budget(budget_bytes)
    simulator, _ = job.costs.searched_simulator(job.task)
    bank = ShardBank(simulator)
    for shared in budget.doubled():
        bank.price_as(*shared)
    # A rank that is already over its limit may stay as full as it is.
    placement = job.placement()
    used_MW = placement.rank_bytes(job.task)
    table, rank = np.nonzero(budget.width_TW)
    counted_MW = bank.sizes_of_ranks(table, budget.width_TW[table, rank], rank)
    bank.caps_MW = np.maximum(bank.caps_MW, used_MW) + counted_MW - used_MW
    deadline = time.monotonic() + config.time_budget_seconds
    width_TW = improve_within(bank, budget, config, deadline)
    state = {t: budget.shards(t, width_W) for t, width_W in enumerate(width_TW)}
    return {t: shards for t, shards in state.items() if shards != job.state[t]}


def _shards_of(sharding: ParameterSharding) -> Shards:
    """Return the column shards of a table; replicated tables have none."""
    if sharding.sharding_spec is None:
        return ()
    return tuple(
        sorted(
            (int(m.shard_offsets[1]), int(m.shard_sizes[1]), int(rank))
            for m, rank in zip(
                sharding.sharding_spec.shards, sharding.ranks, strict=True
            )
        )
    )


def _overlaps(old: Shards, new: Shards) -> Iterator[tuple[int, int, int, int]]:
    """Yield offset, width, old and new rank of each range of columns."""
    for old_offset, old_width, old_rank in old:
        for new_offset, new_width, new_rank in new:
            start = max(old_offset, new_offset)
            end = min(old_offset + old_width, new_offset + new_width)
            if start < end:
                yield start, end - start, old_rank, new_rank


def apply_moves(
    model: DistributedModelParallel, result: ReplanResult | None = None
) -> None:
    """Carry out the moves of a new plan with TorchRec's dynamic resharding.

    Every rank calls it between two iterations, when no pipeline holds a batch. Weights,
    optimizer state and learning rates move with the columns, and the random state is
    kept, so training goes on as if nothing had moved. Afterwards `model.plan` is the
    new plan. `model.fused_optimizer` is a new object: pass it to the wrappers and
    schedulers that have the old one.

    Tested over gloo on 2 and 3 ranks; not yet over NCCL.

    Args:
        model: The sharded model.
        result: The result on rank 0; ignored on other ranks.

    Raises:
        ConfigError: The moves are impossible or start from another plan. All ranks
            raise it, and nothing has moved.
        RankFailureError: A rank is gone; nothing has moved.
    """
    group = dist.group.WORLD
    if group is None:
        raise ConfigError(
            "apply_moves needs the process group of a sharded model: call it on every "
            "rank of the job"
        )
    given = None
    if isinstance(result, ReplanResult):
        given = result.changed, result.replaced
    sent = from_first(given, group, _TO_APPLY)
    if sent is None:
        raise ConfigError("apply_moves needs the result of replan on rank 0: pass it")
    changed, replaced = sent
    if not changed:
        return
    try:
        obstacle = _move_obstacle(model, replaced)
    except Exception as error:  # tell the other ranks, which wait
        kind = type(error).__name__
        obstacle = f"rank {dist.get_rank()} cannot move tables: {kind}: {error}"
    # Over gloo TorchRec numbers its messages by a hash of the table's name.
    mine = obstacle, is_over_gloo(group) and hash("torchrec")
    told = from_all(mine, group, _TO_APPLY)
    for text in (text for text, _ in told if text is not None):
        raise ConfigError(text)
    if len({number for _, number in told}) > 1:
        raise ConfigError(
            "over gloo TorchRec moves tables only if all ranks hash strings equally: "
            "start them with the environment variable PYTHONHASHSEED=0"
        )
    devices = [model.device] if is_accelerator(model.device.type) else []
    with torch.random.fork_rng(devices):
        for path, tables in changed.items():
            _move_module(model, path, tables, group)


def _move_obstacle(
    model: DistributedModelParallel,
    replaced: Mapping[str, EmbeddingModuleShardingPlan],
) -> str | None:
    """Return why this rank cannot carry out the moves; None if it can."""
    for path, tables in replaced.items():
        for name, sharding in tables.items():
            at_work = model.plan.plan.get(path, {}).get(name)
            if at_work is None or _shards_of(at_work) != _shards_of(sharding):
                return (
                    f"table '{full_name(path, name)}' has moved since replan: call "
                    "replan again with model.plan"
                )
    if not is_wrapped_by_ddp(model):
        return (
            "TorchRec moves tables only if DistributedDataParallel wraps the model's "
            "dense part: the model needs a dense parameter, and init_data_parallel() "
            "must have run"
        )
    return None


def _move_module(
    model: DistributedModelParallel,
    path: str,
    tables: EmbeddingModuleShardingPlan,
    group: dist.ProcessGroup,
) -> None:
    """Move tables of one module, and fix what TorchRec does not restore."""
    sharded = model.module.get_submodule(path)
    rates = _learning_rates(sharded, group)
    model.reshard({path: (0.0, tables)}, path or None)
    permute_features_again(sharded)
    for _, optimizer in sharded.fused_optimizer.optimizers:
        for key in optimizer.params:
            # New kernels start with the learning rate of the model's construction.
            optimizer.param_groups[0]["lr"] = rates[key]
        optimizer.step()  # sets the kernel's rate; weights change in backward


def _learning_rates(sharded: Any, group: dist.ProcessGroup) -> dict[str, float]:
    """Return each table's learning rate, gathered from all ranks."""
    own = {
        key: optimizer.param_groups[0]["lr"]
        for _, optimizer in sharded.fused_optimizer.optimizers
        for key in optimizer.params
    }
    found = from_all(own, group, "moved tables")
    return {key: rate for rates in found for key, rate in rates.items()}
