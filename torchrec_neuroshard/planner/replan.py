"""A better plan for a job that is running, within a budget of bytes to move.

Ids drift, and with them what tables cost. `replan` starts from the plan at work and
looks for moves of shards between ranks that pay: it takes the one that saves the most
per byte moved, again and again, until the budget is used up or nothing helps.
`apply_moves` carries them out by TorchRec's dynamic resharding, without a restart:

    result = replan(plan, planner=planner, model=model, budget_bytes=2 * 2**30)
    apply_moves(sharded_model, result)

TorchRec can move less than a plan can say; what it cannot move is not proposed unless
`executable_only=False`, and `ReplanResult.obstacles` says why.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner.types import ShardingOption, Topology
from torchrec.distributed.sharding_plan import get_default_sharders, placement
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    EnumerableShardingSpec,
    ModuleSharder,
    ParameterSharding,
    ShardingPlan,
    ShardingType,
    ShardMetadata,
)

from torchrec_neuroshard.errors import ConfigError
from torchrec_neuroshard.placement import ColumnShard, Placement, ShardingTask
from torchrec_neuroshard.planner.constraints import PlacementRules, ranks_by_table
from torchrec_neuroshard.planner.costs import PlanCosts
from torchrec_neuroshard.planner.plan_files import (
    check_plan,
    model_tables,
    plan_entries,
    with_shards,
)
from torchrec_neuroshard.planner.planners import NeuroShardPlanner
from torchrec_neuroshard.planner.table_reader import check_profiles, table_name
from torchrec_neuroshard.planner.ways import SearchSpace
from torchrec_neuroshard.simulator import PredictedCosts, critical_path
from torchrec_neuroshard.tables import COLUMN_MULTIPLE

__all__ = ["Move", "ReplanConfig", "ReplanResult", "apply_moves", "replan"]

_TABLE_WISE = ShardingType.TABLE_WISE.value
_COLUMN_WISE = ShardingType.COLUMN_WISE.value
_FUSED = EmbeddingComputeKernel.FUSED.value

_STATE_BYTES_PER_VALUE: Mapping[str, int] = {"adagrad": 4, "adam": 8}
"""Optimizer -> bytes of fp32 state for each weight."""
_STATE_BYTES_PER_ROW: Mapping[str, int] = {"rowwise_adagrad": 4}
"""Optimizer -> bytes of fp32 state for each row of a shard."""
_MOVED_OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad")
"""Optimizers whose whole state TorchRec moves: at most one tensor per table."""

_ROUNDING = 1e-9
"""Relative difference of two predicted iterations that are equally long."""

_BATCH = 128
"""Placements costed at once; time is looked at in between."""

_POWER = 8
"""Of the mean that says how loaded ranks are: high, since a launch on a rank that was
idle adds little to the iteration."""

Shards = tuple[tuple[int, int, int], ...]
"""(offset, width, rank) of the shards of one table, by offset."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplanConfig:
    """How hard to look for moves."""

    max_candidates: int = 500
    """Moves compared per step; of more, light and heavy ones alike are left out."""
    time_budget_seconds: float = 20.0
    """The best plan so far is returned after this."""
    min_gain: float = 1e-3
    """A step must save this part of the predicted iteration."""

    def __post_init__(self) -> None:
        if self.max_candidates < 1 or not self.time_budget_seconds > 0:
            raise ConfigError(
                "max_candidates must be at least 1 and time_budget_seconds above 0, "
                f"got {self.max_candidates} and {self.time_budget_seconds}"
            )
        if not 0 <= self.min_gain < 1:
            raise ConfigError(f"min_gain must be in [0, 1), got {self.min_gain}")


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Move:
    """Columns of a table that change ranks."""

    path: str
    """Module that holds the table."""
    table: str
    offset: int
    """First column."""
    width: int
    """Columns."""
    from_rank: int
    to_rank: int
    num_bytes: int
    """Weights and the optimizer's state."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplanResult:
    """A plan that is better than the one at work, and the way to it."""

    plan: ShardingPlan
    moves: tuple[Move, ...]
    budget_bytes: int
    before: PredictedCosts
    """Of the plan at work, under the inputs as the planner knows them now."""
    after: PredictedCosts
    obstacles: Mapping[str, str]
    """Table -> why TorchRec cannot move any of it."""
    executable: bool
    """Whether `apply_moves` can carry out these moves."""
    changed: Mapping[str, EmbeddingModuleShardingPlan]
    """Module -> its tables that change, as the new plan has them."""
    replaced: Mapping[str, EmbeddingModuleShardingPlan]
    """Module -> the same tables as they are now."""
    num_evaluated: int
    """Plans that were costed."""
    search_seconds: float

    @property
    def moved_bytes(self) -> int:
        """Bytes that the moves send from rank to rank."""
        return sum(move.num_bytes for move in self.moves)


def replan(
    current_plan: ShardingPlan,
    *,
    planner: NeuroShardPlanner,
    model: nn.Module,
    budget_bytes: int,
    sharders: Sequence[ModuleSharder[Any]] | None = None,
    executable_only: bool = True,
    config: ReplanConfig | None = None,
) -> ReplanResult:
    """Improve a plan by moving few bytes; call it on one rank.

    Whole shards move or change places; column-wise tables are also split further, and
    neighbouring shards of one exchange columns. Sharding types and kernels stay, and so
    do all tables but fused table-wise and column-wise ones.

    Args:
        current_plan: The plan at work.
        planner: Says what plans cost and what fits: its cost model, its profiles (take
            fresh ones), constraints, storage reservation.
        model: The model before `DistributedModelParallel` took it, with its optimizers
            applied; one on the "meta" device will do.
        budget_bytes: Weights and optimizer state that may be sent in all.
        sharders: None: TorchRec's defaults.
        executable_only: Propose only what `apply_moves` can carry out with training
            unchanged. The other moves need a restart from a checkpoint.
        config: How hard to look. None: the defaults.

    Returns:
        The new plan; it is the old one where nothing within the budget helps.

    Raises:
        ConfigError: The budget is negative.
        PlanFileError: The plan is not one of this model on these ranks.
        ProfileError: A profile is of a feature that no table reads.
    """
    if budget_bytes < 0:
        raise ConfigError(f"budget_bytes must be at least 0, got {budget_bytes}")
    started = time.perf_counter()
    job = _Job(current_plan, planner, model, list(sharders or get_default_sharders()))
    state, num_evaluated = job.state, 0
    if job.task is not None:
        search = _Search(
            job,
            job.task,
            budget_bytes=budget_bytes,
            executable_only=executable_only,
            config=config or ReplanConfig(),
        )
        state = search.run()
        num_evaluated = search.num_evaluated
    changed = {t: s for t, s in state.items() if s != job.state[t]}
    plan = job.plan_with(changed)
    return ReplanResult(
        plan=plan,
        moves=tuple(sorted(m for t in changed for m in job.moves(t, changed[t]))),
        budget_bytes=budget_bytes,
        before=job.predict(current_plan),
        after=job.predict(plan),
        obstacles={table_name(job.options[t]): why for t, why in job.obstacles.items()},
        executable=all(job.is_executable(t, s) for t, s in changed.items()),
        changed=job.subset(plan, changed),
        replaced=job.subset(current_plan, changed),
        num_evaluated=num_evaluated,
        search_seconds=time.perf_counter() - started,
    )


class _Job:
    """The plan at work: what it costs, what fits, what TorchRec can move."""

    def __init__(
        self,
        plan: ShardingPlan,
        planner: NeuroShardPlanner,
        model: nn.Module,
        sharders: list[ModuleSharder[Any]],
    ) -> None:
        self.costs: PlanCosts = planner.costs
        self.topology: Topology = planner._topology
        self._plan = plan
        self._enumerator = planner._enumerator
        tables, _ = model_tables(plan.plan, model)
        check_plan(plan, tables, self.topology.world_size)
        check_profiles(model, planner._profiles)
        self.costs.reader.note_sharders(sharders)
        reserved = planner._storage_reservation.reserve(
            topology=self.topology,
            batch_size=planner._batch_size,
            module=model,
            sharders=sharders,
            constraints=planner._constraints,
        )
        self._space: dict[tuple[str, str], list[ShardingOption]] = {}
        for option in self._enumerator.enumerate(model, sharders):
            self._space.setdefault((option.path, option.name), []).append(option)
        is_searched = self.costs.reader.is_searched
        options = self._options(plan)
        self.options = [o for o in options if is_searched(o)]
        self._fixed = [o for o in options if not is_searched(o)]
        self.state: dict[int, Shards] = {
            i: _shards_of(plan.plan[o.path][o.name]) for i, o in enumerate(self.options)
        }
        self.rules = planner.placement_constraints.rules(
            map(table_name, options), int(self.topology.world_size)
        )
        self._fixed_ranks = ranks_by_table(self._fixed)
        self._index = {table_name(o): i for i, o in enumerate(self.options)}
        self._ruled = self.rules.concerned()
        self.task = self._task(planner, reserved) if self.options else None
        resharded = {s.module_type for s in sharders if hasattr(s, "reshard")}
        self.obstacles = dict(self._find_obstacles(resharded))

    def _task(self, planner: NeuroShardPlanner, reserved: Topology) -> ShardingTask:
        """What the search would be asked to place, with its limits."""
        memory = [device.storage for device in reserved.devices]
        for option in self._fixed:
            for shard in option.shards:
                memory[shard.rank] = memory[shard.rank] - shard.storage
        # Steps are held to the placement rules one by one: a plan at work may break
        # them, as it may be too full.
        return SearchSpace.of(
            [[option] for option in self.options],
            reader=self.costs.reader,
            topology=self.topology,
            constraints=planner._constraints or {},
            enumerator=self._enumerator,
            memory=memory,
            rules=PlacementRules(int(self.topology.world_size)),
        ).task

    def _options(self, plan: ShardingPlan) -> list[ShardingOption]:
        """Return TorchRec's options with the plan's shards, costed."""
        options = []
        for path, name, sharding in plan_entries(plan):
            wanted = sharding.sharding_type, sharding.compute_kernel
            offered = self._space[path, name]
            same = [o for o in offered if (o.sharding_type, o.compute_kernel) == wanted]
            option = with_shards((same or offered)[0], sharding)
            # What the constraints no longer allow may still be at work.
            option.sharding_type, option.compute_kernel = wanted
            options.append(option)
        self._enumerator.populate_estimates(options)
        self.costs.share_launches(
            [o for o in options if not self.costs.reader.is_described(o)]
        )
        return options

    def company(self, table: int) -> list[int]:
        """The tables that must lie where this one lies, itself among them."""
        names = self.rules.company(table_name(self.options[table]))
        return [self._index[n] for n in names if n in self._index]

    def keeps_rules(
        self, state: Mapping[int, Shards], step: Mapping[int, Shards]
    ) -> bool:
        """Whether the tables of a step are where placement constraints allow them."""
        changed = {
            n for n in (table_name(self.options[t]) for t in step) if n in self._ruled
        }
        if not changed:
            return True
        held: dict[str, set[int]] = {}
        for name in set().union(*(self._ruled[n] for n in changed)):
            if name in self._fixed_ranks:
                held[name] = self._fixed_ranks[name]
            else:
                table = self._index[name]
                held[name] = {rank for *_, rank in step.get(table, state[table])}
        return self.rules.breach(held, changed) is None

    def predict(self, plan: ShardingPlan) -> PredictedCosts:
        """Cost of one iteration under a plan."""
        return self.costs.evaluate(self.costs.lower(self._options(plan)))

    def _find_obstacles(self, resharded: set[Any]) -> Iterator[tuple[int, str]]:
        """Find the tables that TorchRec cannot move at all, and why."""
        for index, option in enumerate(self.options):
            entries = self._plan.plan[option.path]
            reason = _module_obstacle(entries)
            if type(option.module[1]) not in resharded:
                kind = type(option.module[1]).__name__
                reason = f"TorchRec does not reshard an {kind}"
            neighbours = [o for o in self.options if o.path == option.path]
            for optimizer in map(self.costs.reader.optimizer, neighbours):
                if optimizer not in _MOVED_OPTIMIZERS:
                    reason = f"TorchRec does not move all of the state of {optimizer}"
            if reason is not None:
                yield index, reason

    def is_executable(self, table: int, shards: Shards) -> bool:
        """Whether TorchRec can take a table to these shards, training unchanged."""
        old = self.state[table]
        if table in self.obstacles or len({w for _, w, _ in shards}) > 1:
            return False
        if len({rank for *_, rank in shards}) < len(shards):
            return False
        optimizer = self.costs.reader.optimizer(self.options[table])
        if optimizer != "sgd" and _cuts(old) != _cuts(shards):
            return False  # TorchRec moves the state of whole shards only
        # Over gloo a rank cannot send to itself.
        stays = any(a == b for *_, a, b in _overlaps(old, shards))
        return not (stays and self.topology.compute_device == "cpu")

    def num_bytes(self, table: int, shards: Shards) -> int:
        """Bytes to send for a table to get to these shards."""
        return sum(move.num_bytes for move in self.moves(table, shards))

    def moves(self, table: int, shards: Shards) -> list[Move]:
        """Moves that take a table to these shards."""
        if shards == self.state[table]:
            return []
        option = self.options[table]
        rows = int(option.tensor.shape[0])
        optimizer = self.costs.reader.optimizer(option)
        per_value = option.tensor.element_size() + _STATE_BYTES_PER_VALUE.get(
            optimizer, 0
        )
        per_row = _STATE_BYTES_PER_ROW.get(optimizer, 0)
        return [
            Move(
                path=option.path,
                table=option.name,
                offset=offset,
                width=width,
                from_rank=old,
                to_rank=new,
                num_bytes=rows * (width * per_value + per_row),
            )
            for offset, width, old, new in _overlaps(self.state[table], shards)
            if old != new
        ]

    def plan_with(self, changed: Mapping[int, Shards]) -> ShardingPlan:
        """Return the plan with other shards of some tables."""
        plan = {
            path: EmbeddingModuleShardingPlan(module_plan)
            for path, module_plan in self._plan.plan.items()
        }
        for table, shards in changed.items():
            option = self.options[table]
            rows = int(option.tensor.shape[0])
            spec = EnumerableShardingSpec(
                [
                    ShardMetadata(
                        shard_offsets=[0, offset],
                        shard_sizes=[rows, width],
                        placement=placement(
                            self.topology.compute_device,
                            rank,
                            self.topology.local_world_size,
                        ),
                    )
                    for offset, width, rank in shards
                ]
            )
            plan[option.path][option.name] = dataclasses.replace(
                plan[option.path][option.name],
                ranks=[rank for *_, rank in shards],
                sharding_spec=spec,
            )
        return ShardingPlan(plan)

    def subset(
        self, plan: ShardingPlan, tables: Iterable[int]
    ) -> dict[str, EmbeddingModuleShardingPlan]:
        """Return some tables of a plan."""
        found: dict[str, EmbeddingModuleShardingPlan] = {}
        for option in (self.options[t] for t in tables):
            entries = found.setdefault(option.path, EmbeddingModuleShardingPlan())
            entries[option.name] = plan.plan[option.path][option.name]
        return found


@dataclass(frozen=True, slots=True)
class _Rating:
    """What placements are compared by."""

    path_ms: float
    """The iteration."""
    load_ms: float
    """Power mean over the ranks, of all phases."""
    slowest: frozenset[int]
    """Ranks that one of the phases waits for."""


class _Search:
    """Steepest descent per byte moved."""

    def __init__(
        self,
        job: _Job,
        task: ShardingTask,
        *,
        budget_bytes: int,
        executable_only: bool,
        config: ReplanConfig,
    ) -> None:
        self._job = job
        self._task = task
        self._budget = budget_bytes
        self._executable_only = executable_only
        self._config = config
        self._simulator = job.costs.simulator(task)
        self._splittable = {
            i for i, o in enumerate(job.options) if o.sharding_type == _COLUMN_WISE
        }
        used = self._placement(job.state).rank_bytes(task)
        # A rank that holds too much already may stay as full as it is.
        caps = task.memory_bytes or (math.inf,) * task.world_size
        self._caps = [max(u, c) for u, c in zip(used, caps, strict=True)]
        self.num_evaluated = 0

    def run(self) -> dict[int, Shards]:
        """Return the best shards of each table that were found."""
        deadline = time.perf_counter() + self._config.time_budget_seconds
        state = best = dict(self._job.state)
        [rating] = self._rate([state])
        best_rating = rating
        while time.perf_counter() < deadline:
            step = self._best_step(state, rating, deadline)
            if step is None:
                break
            state = {**state, **step}
            [rating] = self._rate([state])
            if rating.path_ms < best_rating.path_ms * (1 - self._config.min_gain):
                best, best_rating = state, rating
        return self._pruned(best, best_rating)

    def _best_step(
        self, state: Mapping[int, Shards], rating: _Rating, deadline: float
    ) -> dict[int, Shards] | None:
        """Return the change that saves the most per byte.

        Where none makes the iteration shorter, as when two ranks are equally slow: the
        one that relieves the ranks the most.
        """
        faster: list[tuple[float, dict[int, Shards]]] = []
        relieving: list[tuple[float, dict[int, Shards]]] = []
        affordable = self._affordable(state, rating.slowest)
        for start in range(0, len(affordable), _BATCH):
            if time.perf_counter() > deadline:
                break
            batch = affordable[start : start + _BATCH]
            ratings = self._rate([{**state, **step} for _, step in batch])
            for (added, step), new in zip(batch, ratings, strict=True):
                gain = rating.path_ms - new.path_ms
                relief = rating.load_ms - new.load_ms
                if gain > self._config.min_gain * rating.path_ms:
                    faster.append((gain / max(added, 1), step))
                elif gain > -_ROUNDING * rating.path_ms:
                    if relief > self._config.min_gain * rating.load_ms:
                        relieving.append((relief, step))
        candidates = faster or relieving
        if not candidates:
            return None
        return max(candidates, key=lambda entry: entry[0])[1]

    def _affordable(
        self, state: Mapping[int, Shards], sources: frozenset[int]
    ) -> list[tuple[int, dict[int, Shards]]]:
        """Return steps within budget and memory, with their bytes, by bytes."""
        spent = sum(self._job.num_bytes(t, s) for t, s in state.items())
        used = self._placement(state).rank_bytes(self._task)
        found = []
        for step in self._steps(state, sources):
            added = sum(
                self._job.num_bytes(t, s) - self._job.num_bytes(t, state[t])
                for t, s in step.items()
            )
            if (
                spent + added <= self._budget
                and self._fits(used, state, step)
                and self._job.keeps_rules(state, step)
            ):
                found.append((added, step))
        found.sort(key=lambda entry: entry[0])
        return found[:: math.ceil(len(found) / self._config.max_candidates) or 1]

    def _pruned(self, state: dict[int, Shards], rating: _Rating) -> dict[int, Shards]:
        """Take back what turned out not to help."""
        for table in [t for t, s in state.items() if s != self._job.state[t]]:
            step = {table: self._job.state[table]}
            used = self._placement(state).rank_bytes(self._task)
            if self._fits(used, state, step) and self._job.keeps_rules(state, step):
                back = {**state, **step}
                [shorter] = self._rate([back])
                if shorter.path_ms <= rating.path_ms:
                    state = back
        return state

    def _rate(self, states: Sequence[Mapping[int, Shards]]) -> list[_Rating]:
        """Rate placements in one batch, as `Simulator.evaluate` costs them."""
        self.num_evaluated += len(states)
        loads = [self._simulator.rank_loads(self._placement(s)) for s in states]
        compute = self._simulator.compute_costs(np.stack([x.sums_CWGE for x in loads]))
        phases_CWSP = self._simulator.phases(
            self._simulator.stage_compute(compute),
            np.stack([x.loads_CWS3 for x in loads]),
        )
        powers = (phases_CWSP**_POWER).mean(axis=1) ** (1 / _POWER)
        slowest_CSP = phases_CWSP.argmax(axis=1)
        return [
            _Rating(
                float(path_ms), float(power.sum()), frozenset(ranks.ravel().tolist())
            )
            for path_ms, power, ranks in zip(
                critical_path(phases_CWSP), powers, slowest_CSP, strict=True
            )
        ]

    def _placement(self, state: Mapping[int, Shards]) -> Placement:
        return Placement(
            self._task.world_size,
            tuple(
                ColumnShard(table, *shard)
                for table, shards in sorted(state.items())
                for shard in shards
            ),
        )

    def _fits(
        self,
        used: Sequence[float],
        state: Mapping[int, Shards],
        step: Mapping[int, Shards],
    ) -> bool:
        """Whether all ranks, holding `used` bytes now, can take the step."""
        left = [cap - u for cap, u in zip(self._caps, used, strict=True)]
        for table, shards in step.items():
            for _, width, rank in state[table]:
                left[rank] += self._task.shard_bytes(table, width)
            for _, width, rank in shards:
                left[rank] -= self._task.shard_bytes(table, width)
        return min(left) >= 0

    def _is_allowed(self, table: int, shards: Shards) -> bool:
        if shards == self._job.state[table]:
            return True
        if len({rank for *_, rank in shards}) < len(shards):
            return False
        widths = {w for _, w, _ in shards}
        if len(shards) > 1 and _cuts(shards) != _cuts(self._job.state[table]):
            if min(widths) < self._task.min_widths[table]:
                return False
            if len(widths) > 1 and not self._task.uneven:
                return False
            if len(shards) > self._task.max_shards[table]:
                return False
        return not self._executable_only or self._job.is_executable(table, shards)

    def _steps(
        self, state: Mapping[int, Shards], sources: frozenset[int]
    ) -> Iterator[dict[int, Shards]]:
        """Changes that take something off the slowest ranks."""
        on_sources = [
            (table, index)
            for table, shards in sorted(state.items())
            for index, (*_, rank) in enumerate(shards)
            if rank in sources
        ]
        everywhere = [(t, i) for t, s in sorted(state.items()) for i in range(len(s))]
        for table, index in on_sources:
            for shards in self._changes(table, state[table], index):
                if self._is_allowed(table, shards):
                    yield {table: shards}
        yield from self._joint_steps(state, {table for table, _ in on_sources})
        for first in on_sources:
            for second in everywhere:
                swapped = _swap(state, first, second)
                if swapped and all(self._is_allowed(t, s) for t, s in swapped.items()):
                    yield swapped

    def _joint_steps(
        self, state: Mapping[int, Shards], tables: Iterable[int]
    ) -> Iterator[dict[int, Shards]]:
        """Tables that belong together, moved to another rank as one."""
        for company in sorted({tuple(self._job.company(t)) for t in tables}):
            if len(company) < 2 or any(len(state[t]) > 1 for t in company):
                continue
            for rank in range(self._task.world_size):
                step = {t: ((*state[t][0][:2], rank),) for t in company}
                if all(self._is_allowed(t, s) for t, s in step.items()):
                    yield {t: s for t, s in step.items() if s != state[t]}

    def _changes(self, table: int, shards: Shards, index: int) -> Iterator[Shards]:
        """One shard moved, split, or shared with its neighbour."""
        offset, width, rank = shards[index]
        before, after = shards[:index], shards[index + 1 :]
        elsewhere = [r for r in range(self._task.world_size) if r != rank]
        for other in elsewhere:
            yield (*before, (offset, width, other), *after)
        if table not in self._splittable:
            return
        half = width // 2 // COLUMN_MULTIPLE * COLUMN_MULTIPLE
        for other in elsewhere if half else ():
            left, right = (offset, width - half), (offset + width - half, half)
            yield (*before, (*left, rank), (*right, other), *after)
            yield (*before, (*left, other), (*right, rank), *after)
        for taken in sorted({half, width} - {0}):
            if after:
                start, their_width, other = after[0]
                wider = (start - taken, their_width + taken, other)
                kept = ((offset, width - taken, rank),) if taken < width else ()
                yield (*before, *kept, wider, *after[1:])
            if before:
                start, their_width, other = before[-1]
                wider = (start, their_width + taken, other)
                kept = ((offset + taken, width - taken, rank),) if taken < width else ()
                yield (*before[:-1], wider, *kept, *after)


def _swap(
    state: Mapping[int, Shards], first: tuple[int, int], second: tuple[int, int]
) -> dict[int, Shards] | None:
    """Exchange the ranks of two shards; None where they are on the same."""
    (table_a, a), (table_b, b) = first, second
    rank_a, rank_b = state[table_a][a][2], state[table_b][b][2]
    if rank_a == rank_b:
        return None
    changed = dict(state)
    for table, index, rank in ((table_a, a, rank_b), (table_b, b, rank_a)):
        shards = list(changed[table])
        shards[index] = (*shards[index][:2], rank)
        changed[table] = tuple(shards)
    return {t: changed[t] for t in (table_a, table_b)}


def _shards_of(sharding: ParameterSharding) -> Shards:
    return tuple(
        sorted(
            (int(m.shard_offsets[1]), int(m.shard_sizes[1]), int(rank))
            for m, rank in zip(
                sharding.sharding_spec.shards, sharding.ranks, strict=True
            )
        )
    )


def _cuts(shards: Shards) -> list[tuple[int, int]]:
    """Where the columns are split."""
    return [(offset, width) for offset, width, _ in shards]


def _overlaps(old: Shards, new: Shards) -> Iterator[tuple[int, int, int, int]]:
    """Offset, width, old and new rank of columns that travel together."""
    for old_offset, old_width, old_rank in old:
        for new_offset, new_width, new_rank in new:
            start = max(old_offset, new_offset)
            end = min(old_offset + old_width, new_offset + new_width)
            if start < end:
                yield start, end - start, old_rank, new_rank


def _module_obstacle(entries: Mapping[str, ParameterSharding]) -> str | None:
    """Why no table of a module can be moved, by its plan."""
    for name, sharding in entries.items():
        if sharding.sharding_type not in (_TABLE_WISE, _COLUMN_WISE):
            # Replicas would no longer be kept equal, and means of row-wise tables are
            # taken over the wrong features.
            return (
                f"table '{name}' of the same module is {sharding.sharding_type}, which "
                "TorchRec does not set up again after a move"
            )
        if sharding.compute_kernel != _FUSED:
            return (
                f"table '{name}' of the same module runs as {sharding.compute_kernel}"
            )
        if len({w for _, w, _ in _shards_of(sharding)}) > 1:
            return (
                f"table '{name}' of the same module is split unevenly, and TorchRec "
                "reads the state after a move as if all shards were as wide as the "
                "first"
            )
    return None


def apply_moves(
    model: DistributedModelParallel, result: ReplanResult | None = None
) -> None:
    """Carry out the moves of a new plan by TorchRec's dynamic resharding.

    Every rank calls it, between two iterations, with no batch under way in a pipeline.
    Weights, optimizer state and learning rates go with the columns, and the random
    state stays, so that training goes on as if nothing had moved. `model.plan` is the
    new plan afterwards, and `model.fused_optimizer` is a new object: give it to the
    wrappers and schedulers that hold the old one.

    Run over gloo on 2 and 3 ranks; over NCCL not yet.

    Args:
        model: The sharded model.
        result: Rank 0's is carried out; the other ranks need none.

    Raises:
        ConfigError: The moves cannot be carried out, or start from another plan; on
            all ranks alike, with nothing moved.
    """
    sent = [None if result is None else (result.changed, result.replaced)]
    executable = [result is not None and result.executable]
    dist.broadcast_object_list(sent, src=0)
    dist.broadcast_object_list(executable, src=0)
    if sent[0] is None:
        raise ConfigError("rank 0 carries out its result: pass it there")
    changed, replaced = sent[0]
    if not changed:
        return
    _check_moves(model, replaced, executable[0])
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        for path, tables in changed.items():
            _move_module(model, path, tables)


def _check_moves(
    model: DistributedModelParallel,
    replaced: Mapping[str, EmbeddingModuleShardingPlan],
    executable: bool,
) -> None:
    if not executable:
        raise ConfigError(
            "the new plan needs moves that TorchRec cannot make: call replan with "
            "executable_only=True, or start again from a checkpoint with the new plan"
        )
    for path, tables in replaced.items():
        for name, sharding in tables.items():
            at_work = model.plan.plan.get(path, {}).get(name)
            if at_work is None or _shards_of(at_work) != _shards_of(sharding):
                raise ConfigError(
                    f"table '{f'{path}.{name}' if path else name}' is no longer where "
                    "replan saw it: call replan with model.plan"
                )
    if not hasattr(model._dmp_wrapped_module, "module"):
        raise ConfigError(
            "TorchRec moves tables only of a model whose dense part is wrapped in "
            "DistributedDataParallel: the model needs a dense parameter, and "
            "init_data_parallel() must have run"
        )
    if dist.get_backend() == "gloo":
        # TorchRec numbers its messages by a hash of the table's name.
        hashes: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(hashes, hash("torchrec"))
        if len(set(hashes)) > 1:
            raise ConfigError(
                "over gloo TorchRec moves tables only where all ranks hash strings "
                "alike: start them with the environment variable PYTHONHASHSEED=0"
            )


def _move_module(
    model: DistributedModelParallel, path: str, tables: EmbeddingModuleShardingPlan
) -> None:
    """Move tables of one module, and mend what TorchRec leaves behind."""
    sharded = model.module.get_submodule(path)
    rates = _learning_rates(sharded)
    model.reshard({path: (0.0, tables)}, path or None)
    # Left at False by a first plan that needed no permutation of the features, it would
    # feed the wrong features to the tables.
    sharded._has_features_permute = True
    for _, optimizer in sharded.fused_optimizer.optimizers:
        for key in optimizer.params:
            # New kernels start at the rate that the model was built with.
            optimizer.param_groups[0]["lr"] = rates[key]
        optimizer.step()  # hands the rate to the kernel; weights change in backward


def _learning_rates(sharded: Any) -> dict[str, float]:
    """Learning rate of each table's weights, on whatever rank they are."""
    own = {
        key: optimizer.param_groups[0]["lr"]
        for _, optimizer in sharded.fused_optimizer.optimizers
        for key in optimizer.params
    }
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, own)
    return {key: rate for rates in gathered for key, rate in rates.items()}
