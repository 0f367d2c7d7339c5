"""How placement policies are trained, resumed and judged, whatever their method."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from torchrec_neuroshard.baselines.common import whole_placement
from torchrec_neuroshard.baselines.heuristics import (
    CostGreedySearcher,
    GreedySearcher,
    RandomSearcher,
)
from torchrec_neuroshard.baselines.policies import (
    Episodes,
    PolicyNet,
    Rollout,
    view_task,
)
from torchrec_neuroshard.cost_models.base import CommsModel, CostModel
from torchrec_neuroshard.errors import ConfigError, InfeasibleError
from torchrec_neuroshard.files import write_whole
from torchrec_neuroshard.placement import Placement, ShardingTask
from torchrec_neuroshard.search.base import Searcher
from torchrec_neuroshard.simulator import PredictedCosts, Simulator
from torchrec_neuroshard.tables import TableConfig
from torchrec_neuroshard.training.fit import seeded
from torchrec_neuroshard.workloads.tasks import (
    TaskConfig,
    cap_rows,
    power_of_two_widths,
    sample_tasks,
)

__all__ = [
    "Comparison",
    "PlanCosts",
    "PolicyConfig",
    "PolicyTaskConfig",
    "PolicyTrainer",
    "SimulatedPlans",
    "balance",
    "compare",
    "episode_placement",
    "finish_training",
    "run_training",
    "sample_policy_tasks",
    "split_tables",
    "yardsticks",
]

PlanCosts = Callable[[ShardingTask, Placement], PredictedCosts]
"""What a plan costs: predicted (`SimulatedPlans`) or measured on hardware."""

_CHECKPOINT = "checkpoint.pt"
_RESAMPLES = 10_000


class SimulatedPlans:
    """Costs of plans by a cost model and a model of the collectives."""

    def __init__(
        self, cost_model: CostModel, comms_for: Callable[[int], CommsModel]
    ) -> None:
        """Take the models.

        Args:
            cost_model: Of the kernels.
            comms_for: Number of ranks -> model of their collectives.
        """
        self.cost_model = cost_model
        self.comms_for = comms_for
        self._simulators: dict[int, tuple[ShardingTask, Simulator]] = {}

    def __call__(self, task: ShardingTask, placement: Placement) -> PredictedCosts:
        """Predict one plan; what is known of a task is kept."""
        # The task is kept beside its simulator, so that no other gets its id.
        if id(task) not in self._simulators:
            comms_model = self.comms_for(task.world_size)
            simulator = Simulator(task, self.cost_model, comms_model)
            self._simulators[id(task)] = task, simulator
        return self._simulators[id(task)][1].evaluate(placement)


# Tasks.


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyTaskConfig:
    """Tasks to train on and to judge by."""

    num_tables: tuple[int, int] = (10, 60)
    """Fewest and most tables of a task."""
    world_sizes: tuple[int, ...] = (2, 4, 6, 8)
    widths: tuple[int, ...] = power_of_two_widths(128)
    """Drawn evenly for each table."""
    batch_sizes: tuple[int, ...] = (2_048,)
    """Samples over all ranks; one is drawn for each task."""
    optimizers: tuple[str, ...] = ("rowwise_adagrad",)
    """Of all tables of a task; one is drawn for each."""
    max_rows: tuple[int, ...] = ()
    """Longer tables of a task are cut to one of these; none are where it is empty."""
    memory_slack: float = 1.5
    """Memory of a rank over its even share, or over the largest table if that is
    more."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.world_sizes or min(self.world_sizes) < 1:
            raise ConfigError(
                f"world_sizes must be at least 1 each, got {self.world_sizes}"
            )
        for name in ("batch_sizes", "optimizers"):
            if not getattr(self, name):
                raise ConfigError(f"{name} is empty; give at least one")
        if not self.memory_slack >= 1:
            raise ConfigError(
                f"memory_slack must be at least 1, got {self.memory_slack}: below, the "
                "tables cannot fit"
            )


def split_tables(
    tables: Sequence[TableConfig], seed: int
) -> tuple[tuple[TableConfig, ...], tuple[TableConfig, ...]]:
    """Split tables into two halves, to train on and to judge by: DreamShard's rule.

    Raises:
        ConfigError: There are fewer than two.
    """
    if len(tables) < 2:
        raise ConfigError(f"{len(tables)} tables cannot be split; give at least two")
    order = np.random.default_rng(seed).permutation(len(tables))
    half = len(tables) // 2
    training, test = (
        tuple(tables[i] for i in sorted(part)) for part in (order[:half], order[half:])
    )
    return training, test


def sample_policy_tasks(
    tables: Sequence[TableConfig], config: PolicyTaskConfig, num_tasks: int
) -> tuple[ShardingTask, ...]:
    """Draw tasks of distinct tables, numbers of ranks in turn, all else at random.

    Raises:
        ConfigError: A task needs more tables than there are.
    """
    sizes = config.world_sizes
    per_size = [
        sample_tasks(
            tables,
            TaskConfig(
                world_size=size,
                batch_size=config.batch_sizes[0],
                num_tables=config.num_tables,
                widths=config.widths,
                seed=config.seed * len(sizes) + number,
            ),
            -(-num_tasks // len(sizes)),
        )
        for number, size in enumerate(sizes)
    ]
    mixed = [task for round_ in zip(*per_size, strict=True) for task in round_]
    rng = np.random.default_rng(config.seed)
    return tuple(
        _with_memory(_varied(t, config, rng), config.memory_slack)
        for t in mixed[:num_tasks]
    )


def _varied(
    task: ShardingTask, config: PolicyTaskConfig, rng: np.random.Generator
) -> ShardingTask:
    """Draw a task's batch, optimizer and longest tables."""
    batch_size = int(rng.choice(config.batch_sizes))
    optimizer = str(rng.choice(config.optimizers))
    tables = task.tables
    if config.max_rows:
        rows = int(rng.choice(config.max_rows))
        tables = tuple(cap_rows(t, rows) for t in tables)
    return dataclasses.replace(
        task,
        batch_size=batch_size,
        tables=tuple(dataclasses.replace(t, optimizer=optimizer) for t in tables),
        column_bytes=(),
    )


def _with_memory(task: ShardingTask, slack: float) -> ShardingTask:
    held = [task.shard_bytes(i, t.embedding_dim) for i, t in enumerate(task.tables)]
    cap = int(slack * max(sum(held) / task.world_size, *held))
    return dataclasses.replace(task, memory_bytes=(cap,) * task.world_size)


# Training.


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyConfig:
    """Settings that every method has; a method's own class adds to them.

    Whole numbers other than the seed are counts of at least 1.
    """

    iterations: int
    learning_rate: float
    """Falls linearly to 0 over the iterations."""
    entropy_weight: float = 1e-3
    seed: int = 0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name != "seed" and isinstance(value, int) and value < 1:
                raise ConfigError(f"{field.name} must be at least 1, got {value}")
        if not self.learning_rate > 0:
            raise ConfigError(
                f"learning_rate must be above 0, got {self.learning_rate}"
            )


class PolicyTrainer(ABC):
    """Trains one policy, iteration by iteration.

    An iteration depends on the state before it, the settings and its number only, so
    that training can stop after any and go on elsewhere.

    Attributes:
        net: What is trained; one Adam serves all losses, as in both papers' code.
        views: The training tasks as the net sees them.
    """

    method: ClassVar[str]

    def __init__(
        self,
        net: PolicyNet,
        tasks: Sequence[ShardingTask],
        costs: PlanCosts,
        config: PolicyConfig,
    ) -> None:
        """Take an untrained net and what it learns from.

        Args:
            net: Drawn from the config's seed.
            tasks: To train on.
            costs: Costs of a plan, predicted or measured.
            config: Counts and rates.

        Raises:
            ConfigError: There is no task.
        """
        if not tasks:
            raise ConfigError("no tasks to train on; give at least one")
        self.tasks, self.costs = tuple(tasks), costs
        self.views = [view_task(t) for t in tasks]
        self._config = config
        net.set_statistics(np.concatenate([v.features for v in self.views]))
        self._optimizer = torch.optim.Adam(net.parameters())

    @property
    @abstractmethod
    def net(self) -> PolicyNet:
        """What is trained."""

    @property
    def num_iterations(self) -> int:
        """Iterations of a whole run."""
        return self._config.iterations

    def settings(self) -> dict[str, Any]:
        """Return the method's settings, for the description."""
        return dataclasses.asdict(self._config)

    def _begin(self, iteration: int) -> tuple[np.random.Generator, torch.Generator]:
        """Set the rate of an iteration; return its sources of draws."""
        left = 1 - iteration / self._config.iterations
        self._optimizer.param_groups[0]["lr"] = self._config.learning_rate * left
        rng = np.random.default_rng([self._config.seed, iteration])
        return rng, torch.Generator().manual_seed(int(rng.integers(2**62)))

    @abstractmethod
    def step(self, iteration: int) -> Mapping[str, float]:
        """Run one iteration; return what to show of it."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Return all that later iterations depend on."""

    @abstractmethod
    def restore(self, state: Mapping[str, Any]) -> None:
        """Take back what `state` returned."""


def episode_placement(
    task: ShardingTask, episodes: Episodes, rollout: Rollout, episode: int
) -> Placement:
    """Return the plan that one episode made."""
    return whole_placement(task, episodes.ranks(rollout.actions_ET, episode))


def run_training(
    trainer: PolicyTrainer,
    folder: Path,
    identity: Mapping[str, Any],
    report: Callable[[int, Mapping[str, float]], None],
) -> int:
    """Run all iterations, or those that an interrupted run left.

    After each iteration the state is written to `folder`, where `finish_training`
    removes it. The result does not depend on where a run was interrupted.

    Args:
        trainer: Fresh, with the settings of the interrupted run if there is one.
        folder: Of the policy to be.
        identity: JSON-ready; runs may go on only where it is the same.
        report: Called with each iteration and what it returned.

    Returns:
        The iteration it went on from, 0 for a fresh start.

    Raises:
        ConfigError: The folder holds another run's state, or none that can be read.
    """
    path = folder / _CHECKPOINT
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    folder.mkdir(parents=True, exist_ok=True)
    first = _resume(trainer, path, digest) if path.is_file() else 0
    with seeded(0):
        for iteration in range(first, trainer.num_iterations):
            metrics = trainer.step(iteration)
            state = {"digest": digest, "next": iteration + 1, "state": trainer.state()}
            buffer = io.BytesIO()
            torch.save(state, buffer)
            write_whole(path, buffer.getvalue())
            report(iteration, metrics)
    return first


def finish_training(folder: Path) -> None:
    """Remove what only an interrupted run needs."""
    (folder / _CHECKPOINT).unlink()


def _resume(trainer: PolicyTrainer, path: Path, digest: str) -> int:
    try:
        saved = torch.load(path, weights_only=True)
        same = saved["digest"] == digest
        first = int(saved["next"])
        if same:
            trainer.restore(saved["state"])
    except Exception as error:  # bytes that are no such file can raise anything
        raise ConfigError(
            f"{path} cannot be read ({type(error).__name__}); delete it to start anew"
        ) from error
    if not same:
        raise ConfigError(
            f"{path} is of a run with other settings, tables or cost model; repeat "
            "that run's options, take another --out or delete the file"
        )
    return first


# Judging.


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """A policy against one yardstick, on the tasks that both can place."""

    name: str
    num_pairs: int
    num_infeasible: int
    """Tasks that the yardstick cannot place and the policy can."""
    num_lost: int
    """Tasks that the policy cannot place and the yardstick can."""
    change: float
    """Mean of the policy's iteration time over the yardstick's, minus 1."""
    low: float
    """Lower end of the mean's 95 % bootstrap interval."""
    high: float
    yardstick_ms: float
    """Mean iteration time of the yardstick's plans."""
    policy_ms: float
    yardstick_balance: float
    """Mean of the least busy rank's compute over the busiest's."""
    policy_balance: float


def yardsticks() -> tuple[Searcher, ...]:
    """Random placement, the papers' four greedies, and a greedy on predicted costs."""
    keys = ("size", "dim", "lookup", "size-lookup")
    greedies = (GreedySearcher(key) for key in keys)
    return RandomSearcher(), *greedies, CostGreedySearcher()


def compare(
    searcher: Searcher,
    others: Sequence[Searcher],
    tasks: Sequence[ShardingTask],
    costs: SimulatedPlans,
) -> list[Comparison]:
    """Place tasks by a policy and by yardsticks, and compare predicted costs in pairs.

    Raises:
        ConfigError: A yardstick and the policy share no task that both can place.
    """
    ours = [_judge(searcher, t, costs) for t in tasks]
    return [
        _comparison(other.name, ours, [_judge(other, t, costs) for t in tasks])
        for other in others
    ]


def _judge(
    searcher: Searcher, task: ShardingTask, costs: SimulatedPlans
) -> tuple[float, float] | None:
    """Iteration time and balance; None where there is no plan."""
    comms_model = costs.comms_for(task.world_size)
    try:
        predicted = searcher.search(task, costs.cost_model, comms_model).predicted
    except InfeasibleError:
        return None
    return predicted.critical_path_ms, balance(predicted)


def balance(costs: PredictedCosts) -> float:
    """Compute of the least busy rank over that of the busiest."""
    busy = [r.fwd_compute + r.bwd_compute for r in costs.ranks]
    return min(busy) / max(busy)


def _comparison(
    name: str,
    ours: Sequence[tuple[float, float] | None],
    theirs: Sequence[tuple[float, float] | None],
) -> Comparison:
    both = list(zip(ours, theirs, strict=True))
    pairs = np.array([(a, b) for a, b in both if a is not None and b is not None])
    if not len(pairs):
        raise ConfigError(
            f"no task can be placed by both the policy and '{name}'; raise the tasks' "
            "memory_slack"
        )
    ratio: npt.NDArray[np.float64] = pairs[:, 0, 0] / pairs[:, 1, 0] - 1
    rng = np.random.default_rng(0)
    means = rng.choice(ratio, size=(_RESAMPLES, len(ratio))).mean(axis=1)
    (policy_ms, policy_balance), (other_ms, other_balance) = pairs.mean(axis=0)
    return Comparison(
        name=name,
        num_pairs=len(pairs),
        num_infeasible=sum(a is not None and b is None for a, b in both),
        num_lost=sum(a is None and b is not None for a, b in both),
        change=float(ratio.mean()),
        low=float(np.quantile(means, 0.025)),
        high=float(np.quantile(means, 0.975)),
        yardstick_ms=float(other_ms),
        policy_ms=float(policy_ms),
        yardstick_balance=float(other_balance),
        policy_balance=float(policy_balance),
    )
