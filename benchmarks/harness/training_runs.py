"""Train several plans side by side and time them."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from operator import methodcaller
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.optimizers import in_backward_optimizer_filter

from harness.models import (
    OPTIMIZER_CLASSES,
    ClickBatch,
    ConcatDLRM,
    DenseLayers,
    fill_tables,
    local_tables,
    sharders,
    stand_ins,
    table_of,
)
from torchrec_neuroshard.costs.simulator import PHASES
from torchrec_neuroshard.errors import ConfigError, NeuroShardError
from torchrec_neuroshard.phase_timer import (
    PhaseTimer,
    PhaseTimes,
    critical_times,
    embedding_ms,
)
from torchrec_neuroshard.tables.table import TableConfig


class TrialError(NeuroShardError):
    """A plan could not be trained. The ranks are still in step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialConfig:
    """Number of iterations of a round, and other settings."""

    warm_up: int = 2
    """Untimed iterations before the first round."""
    iterations: int = 2
    """Iterations of a round that are timed as a whole, without waits for the device in
    between."""
    phase_iterations: int = 1
    """Further iterations with timed phases, which often wait for a GPU."""
    learning_rate: float = 0.01
    seed: int | None = 0
    """Seed of the first weights, the same for all plans. None: TorchRec draws them."""

    def __post_init__(self) -> None:
        for name in ("iterations", "phase_iterations"):
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"{name} must be at least 1, got {getattr(self, name)}"
                )
        if self.warm_up < 0:
            raise ConfigError(f"warm_up must be at least 0, got {self.warm_up}")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialResult:
    """Wall-clock times of one plan in one round, equal on all ranks."""

    iteration_ms: tuple[float, ...]
    """Time of each timed iteration, on its slowest rank."""
    embedding_ms: tuple[float, ...]
    """Embedding time of each iteration with timed phases: from the last rank's start to
    the last rank's end, in both directions. With replicated tables, it ends with the
    iteration, after the all-reduces and optimizers. Without a common clock, it is the
    sum of the phases."""
    phases_ms: dict[str, tuple[float, ...]]
    """Times of the same iterations by phase; see `critical_times`."""
    rank_phases_ms: dict[str, tuple[tuple[float, ...], ...]]
    """Times that each rank spends in a phase in the same iterations, waiting included;
    without the kernels of replicated tables."""
    losses: tuple[float, ...]
    """Loss of every iteration since the last round, averaged over the ranks."""
    weight_bytes: tuple[int, ...]
    """Bytes of the tables on each rank."""
    reference_ms: tuple[float, ...]
    """Time of the reference set on each rank in this round; 0 without one."""

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary."""
        return asdict(self)


def take_turns(names: Sequence[str], number: int) -> list[str]:
    """Return the order in which plans are trained in a round.

    Every second round has the reverse order of the round before (A B, B A), so a
    machine whose speed drifts is fair to all plans.
    """
    order = list(names)
    random.Random(number // 2).shuffle(order)
    return order[::-1] if number % 2 else order


def train_in_turn(
    plans: Mapping[str, ShardingPlan | None],
    num_rounds: int,
    tables: Sequence[TableConfig],
    batches: Sequence[ClickBatch],
    config: TrialConfig,
    *,
    control: dist.ProcessGroup,
    reference: Callable[[], float] | None = None,
    on_failure: Callable[[str, TrialError], None] | None = None,
) -> Iterator[tuple[str, TrialResult]]:
    """Train a `ConcatDLRM` with every plan, some iterations of each in every round.

    The models of all plans are in memory at once, so a round is short, and a machine
    whose speed drifts is fair to all plans. All start from the same weights. Call it on
    every rank.

    Args:
        plans: Name -> plan. None: the dense layers train alone, and no phase is timed.
        num_rounds: Number of rounds.
        tables: Tables of the model.
        batches: This rank's input, used in turn. The models are put on its device.
        config: Settings of a round.
        control: A gloo group of all ranks, for communication outside training.
        reference: Measures the speed of a CPU at the start of each round.
        on_failure: Called with a plan's name if it cannot be trained. The plan is left
            out afterwards. None: the error is raised.

    Yields:
        The name of a plan and its result in a round.

    Raises:
        TrialError: A rank failed; the message says which and why. If it failed before
            its first collective, for example for lack of memory, the ranks are in step.
            Otherwise the other ranks fail by the process group's timeout.
    """
    trials: dict[str, _Trial] = {}

    def attempt(name: str, work: Callable[[_Trial], Any]) -> list[Any] | None:
        """Return what a plan's trial did on each rank; None: it failed."""
        failure, done = "", None
        try:
            done = work(trials[name])
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
        try:
            return _agreed(done, failure, control)
        except TrialError as error:
            trials.pop(name).close()  # its memory must not fail the next plan, too
            if on_failure is None:
                raise
            on_failure(name, error)
            return None

    try:
        for name, plan in plans.items():
            trials[name] = _Trial(tables, batches, config, control)
            if attempt(name, methodcaller("build", plan)) is not None:
                attempt(name, methodcaller("connect", plan))
        for number in range(num_rounds):
            read = _gather(0.0 if reference is None else reference(), control)
            for name in take_turns(list(plans), number):
                if name not in trials:
                    continue
                every = attempt(name, _Trial.train)
                if every is not None:
                    yield name, _summarise(every, read)
    finally:
        for trial in trials.values():
            trial.close()


def _gather(value: Any, group: dist.ProcessGroup) -> list[Any]:
    values: list[Any] = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


def _agreed(done: Any, failure: str, group: dist.ProcessGroup) -> list[Any]:
    """Return what every rank did; raise on all ranks if one failed."""
    every = _gather((done, failure), group)
    for rank, (_, reason) in enumerate(every):
        if reason:
            raise TrialError(f"rank {rank}: {reason.strip().splitlines()[0]}")
    return [found for found, _ in every]


class _Trial:
    """One rank's part of a plan's training."""

    def __init__(
        self,
        tables: Sequence[TableConfig],
        batches: Sequence[ClickBatch],
        config: TrialConfig,
        control: dist.ProcessGroup,
    ) -> None:
        self._tables, self._batches, self._config = tables, batches, config
        self._control = control
        self._device = batches[0].dense_BD.device
        self._on_gpu = self._device.type == "cuda"
        self._model: nn.Module = nn.Module()
        self._timer: PhaseTimer | None = None
        self._stand_ins: list[Any] = []
        self._optimizers: list[torch.optim.Optimizer] = []
        self._has_replicas = False
        self._step_number = 0
        self._step_end = 0.0
        self._losses: list[torch.Tensor] = []

    def build(self, plan: ShardingPlan | None) -> None:
        """Shard the model and write its first weights."""
        if plan is None:
            self._model = DenseLayers(self._tables, self._device)
            return
        self._model = DistributedModelParallel(
            ConcatDLRM(self._tables, self._device, self._config.learning_rate),
            device=self._device,
            plan=plan,
            sharders=sharders(),
            init_data_parallel=False,  # it waits for all ranks; see `connect`
        )
        if self._config.seed is not None:
            fill_tables(self._model, self._tables, self._config.seed)

    def connect(self, plan: ShardingPlan | None) -> None:
        """Connect the dense layers of all ranks, after all have built their part."""
        rate = self._config.learning_rate
        if plan is None:
            # As TorchRec wraps the dense part.
            self._model = DistributedDataParallel(
                self._model, gradient_as_bucket_view=True, static_graph=True
            )
            self._optimizers = [torch.optim.SGD(self._model.parameters(), lr=rate)]
            self._stand_ins = [stand_ins(self._tables, b) for b in self._batches]
            return
        assert isinstance(self._model, DistributedModelParallel)
        self._model.init_data_parallel()
        self._optimizers = self._make_optimizers(plan, rate)
        self._timer = PhaseTimer(self._model, self._device)

    def _make_optimizers(
        self, plan: ShardingPlan, rate: float
    ) -> list[torch.optim.Optimizer]:
        """Return optimizers of parameters that no fused kernel updates."""
        replicas = {
            name
            for module_plan in plan.plan.values()
            for name, sharding in module_plan.items()
            if sharding.sharding_type == "data_parallel"
        }
        self._has_replicas = bool(replicas)
        by_table = {t.name: t for t in self._tables}
        named = dict(self._model.named_parameters())
        dense = dict(in_backward_optimizer_filter(iter(named.items())))
        kept: dict[type[torch.optim.Optimizer], list[nn.Parameter]] = {}
        for path, parameter in named.items():
            table = table_of(path)
            if table is not None and table in replicas:
                kind = OPTIMIZER_CLASSES[by_table[table].optimizer]
            elif table is None and path in dense:
                kind = torch.optim.SGD
            else:
                continue
            kept.setdefault(kind, []).append(parameter)
        return [
            kind(parameters, lr=rate)  # type: ignore[call-arg]
            for kind, parameters in kept.items()
        ]

    def train(self) -> dict[str, Any]:
        """Run the iterations of a round and return this rank's measurements."""
        config, timer = self._config, self._timer
        self._enable(False)
        for _ in range(0 if self._step_number else config.warm_up):
            self._step()
        iteration_ms = [self._step() for _ in range(config.iterations)]
        self._enable(True)
        steps = []
        if timer is not None:
            for _ in range(config.phase_iterations):
                self._step()
                steps.append(self._take(timer))
        losses, self._losses = self._losses, []
        held = [values for _, values, _ in local_tables(self._model)]
        return {
            "iteration_ms": iteration_ms,
            "steps": steps,
            "losses": [float(loss) for loss in losses],
            "weight_bytes": sum(v.numel() * v.element_size() for v in held),
        }

    def _enable(self, enabled: bool) -> None:
        if self._timer is not None:
            self._timer.enabled = enabled

    def _take(self, timer: PhaseTimer) -> list[PhaseTimes]:
        """Return the phases of a step, whose end is the end of replicas' backward."""
        *others, last = timer.take()
        spans = dict(last.spans)
        if self._has_replicas and spans["bwd_compute"]:
            end = (self._step_end, self._step_end)
            spans["bwd_compute"] = [*spans["bwd_compute"], end]
        return [*others, replace(last, spans=spans)]

    def _step(self) -> float:
        """Run one iteration and return its time [ms]."""
        number = self._step_number % len(self._batches)
        batch, self._step_number = self._batches[number], self._step_number + 1
        self._synchronize()
        dist.barrier(group=self._control)
        start = time.perf_counter()
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        if self._stand_ins:
            logits = self._model(batch.dense_BD, *self._stand_ins[number])
        else:
            logits = self._model(batch.dense_BD, batch.ids)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.clicks_B)
        torch.autograd.backward(loss)
        for optimizer in self._optimizers:
            optimizer.step()
        self._synchronize()
        self._step_end = time.perf_counter()
        self._losses.append(loss.detach())
        return (self._step_end - start) * 1e3

    def _synchronize(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize(self._device)

    def close(self) -> None:
        """Free the memory."""
        self._model, self._timer, self._stand_ins = nn.Module(), None, []
        self._optimizers.clear()
        self._losses.clear()
        gc.collect()
        if self._on_gpu:
            torch.cuda.empty_cache()


def _summarise(
    everyone: Sequence[dict[str, Any]], reference_ms: Sequence[float]
) -> TrialResult:
    """Return the result of a round from all ranks' measurements."""
    phases: dict[str, list[float]] = {name: [] for name in PHASES}
    by_phase: dict[str, list[tuple[float, ...]]] = {name: [] for name in PHASES}
    embedding = []
    for by_rank in zip(*(m["steps"] for m in everyone), strict=True):
        critical = critical_times(by_rank)
        for name in PHASES:
            phases[name].append(sum(c[name] for c in critical))
            by_phase[name].append(
                tuple(sum(t.duration_ms(name) for t in times) for times in by_rank)
            )
        embedding.append(embedding_ms(by_rank))
    losses = zip(*(m["losses"] for m in everyone), strict=True)

    def each(name: str) -> tuple[Any, ...]:
        return tuple(m[name] for m in everyone)

    return TrialResult(
        iteration_ms=tuple(map(max, zip(*each("iteration_ms"), strict=True))),
        embedding_ms=tuple(embedding),
        phases_ms={name: tuple(values) for name, values in phases.items()},
        rank_phases_ms={
            name: tuple(zip(*times, strict=True)) for name, times in by_phase.items()
        },
        losses=tuple(sum(row) / len(row) for row in losses),
        weight_bytes=each("weight_bytes"),
        reference_ms=tuple(reference_ms),
    )
