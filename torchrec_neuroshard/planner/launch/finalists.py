"""Good plans are measured where they are decided, before one of them is returned.

A search takes the plan that a model likes best, which is the one that it flatters most.
So the search hands over several different plans, the rank sets that decide them are
measured, and the model is corrected by what came of it (`CorrectedCostModel`); the
search goes on from these plans under the corrected model, and so forth. Of all plans
measured, the one with the shortest expected path is returned.

Shapes: `X` any, `K` draws, `W` ranks, `G` fusion groups, `S` stages, `P` phases, `E`
encoding values, `2` forward and backward, `3` index exchange and both collectives.

Measuring is the first launch's (`training.first_launch`), in processes of its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import torch.distributed as dist
from torchrec.distributed.planner.types import Topology

from torchrec_neuroshard.cost_models import (
    CommsModel,
    ConcurrentCostModel,
    CostModel,
)
from torchrec_neuroshard.cost_models.corrected import CorrectedCostModel, MeasuredSet
from torchrec_neuroshard.errors import ConfigError, RecordError
from torchrec_neuroshard.features import table_features
from torchrec_neuroshard.placement import (
    ALL_ROWS,
    ColumnShard,
    Placement,
    ShardingTask,
)
from torchrec_neuroshard.planner.costs.plan_costs import PlanCosts
from torchrec_neuroshard.planner.launch.first_launch import (
    GRACE_S,
    USUAL_SECONDS,
    Offer,
    check_patience,
    error_text,
    find_address,
    free_port,
    has_device,
    is_measurable,
    measured,
)
from torchrec_neuroshard.planner.launch.from_first import LostRankError, from_first
from torchrec_neuroshard.planner.options.topologies import whole_nodes
from torchrec_neuroshard.records import CostRecord, steady_records
from torchrec_neuroshard.search.base import Finalist, Searcher, SearchResult
from torchrec_neuroshard.search.default import range_messages
from torchrec_neuroshard.simulator import (
    PHASES,
    PredictedCosts,
    Simulator,
)
from torchrec_neuroshard.tables import TableConfig, row_shard

if TYPE_CHECKING:
    from torchrec_neuroshard.training.first_launch import LaunchRequest

__all__ = ["Finalists"]

MAX_ROUNDS = 3
CONTENDS = 0.9
"""Share of a stage's slowest forward or backward from which on a rank may decide it:
twice what sets of a calibrated model are off."""
LEAST_SHARE = 0.1
"""Of the budget, below which no other round is begun."""
NUM_DRAWS, SEED = 64, 0
"""Of what measurements leave open."""
BOUND_SECONDS, BOUND_EFFORT = 2.0, 0.1
"""Of the search whose lower bound is that of the last corrected model."""
_COMPUTE = [PHASES.index("fwd_compute"), PHASES.index("bwd_compute")]

Floats = npt.NDArray[np.float64]
Tables = tuple[TableConfig, ...]
Measure = Callable[["LaunchRequest"], list[CostRecord]]


class _Kernel(NamedTuple):
    """A fused kernel of a plan that may decide it."""

    slowness: float
    """Its rank's time over the slowest rank's; the larger of forward and backward."""
    rank: int
    group: int
    tables: Tables
    """Its shards, described as tables."""


class Finalists:
    """Has the finalists of a search measured, and chooses.

    Args:
        count: Most plans of a round; 0 measures nothing.
        calibrate: "auto" (60 s), "never" or seconds that measuring may take in all.
        topology: The devices to plan for.
        measure: Measures the sets of a request; None: processes of the job's ranks.

    Raises:
        ConfigError: The count cannot be, or `calibrate` forbids to measure.
    """

    def __init__(
        self,
        count: int,
        calibrate: str | float,
        topology: Topology,
        measure: Measure | None = None,
    ) -> None:
        if count < 0:
            raise ConfigError(f"measure_finalists must be at least 0, got {count}")
        if count and calibrate == "never":
            raise ConfigError(
                f"measure_finalists={count} measures, which calibrate='never' forbids; "
                "leave one of them out"
            )
        self.count = count
        self._seconds = (
            USUAL_SECONDS if isinstance(calibrate, str) else float(calibrate)
        )
        self._topology = topology
        self._measure = measure or self._measure_here
        self._pg: dist.ProcessGroup | None = None

    @contextlib.contextmanager
    def among(self, pg: dist.ProcessGroup) -> Iterator[None]:
        """Have the ranks of a group measure, too: the others wait to `help_measure`."""
        alone = pg.size() != int(self._topology.world_size) or pg.size() < 2
        self._pg = None if alone else pg
        try:
            yield
        finally:
            self._pg = None

    def choose(
        self, searcher: Searcher, task: ShardingTask, costs: PlanCosts
    ) -> SearchResult:
        """Search, measure, correct the costs and go on; return the best plan measured.

        Where measuring fails for whatever reason, the plan is the search's own and
        costs stay as they are.

        Args:
            searcher: What searches.
            task: What is placed.
            costs: Get the corrected model.

        Raises:
            InfeasibleError: The search found none.
            ConfigError: The search hands over one plan alone.
            LostRankError: A rank is not there.
        """
        costs.correct(
            ConcurrentCostModel.of(_alone(costs.cost_model), costs.comms_model)
        )
        first = searcher.finalists(
            task, costs.cost_model, costs.comms_model, self.count
        )
        try:
            result, corrected = self._decide(_Rounds(task, costs), searcher, first)
        except LostRankError:
            raise
        except Exception as error:
            text = (
                f"measuring finalists failed ({error_text(error)}): the plan is the "
                "search's, by costs that were not corrected"
            )
            warnings.warn(text, stacklevel=2)
            costs.warnings += (text,)
            return first[0]
        costs.correct(corrected)
        return result

    def _decide(
        self, rounds: _Rounds, searcher: Searcher, found: list[SearchResult]
    ) -> tuple[SearchResult, CostModel]:
        """Measure round after round: the best plan and the model corrected last."""
        end = time.monotonic() + self._seconds
        for number in range(MAX_ROUNDS):
            left = end - time.monotonic()
            if number:
                if left < LEAST_SHARE * self._seconds:
                    break
                found = searcher.with_budget(left).finalists(
                    *rounds.problem, self.count, rounds.placements[: self.count]
                )
                left = max(LEAST_SHARE * self._seconds, end - time.monotonic())
            sets = rounds.add(found)
            if not sets:
                raise ConfigError("no deciding rank runs a kernel that can be measured")
            seconds = left / (MAX_ROUNDS - number)
            rounds.learn(sets, self._measure(self._request(rounds, sets, seconds)))
        (last,) = searcher.with_budget(BOUND_SECONDS, BOUND_EFFORT).finalists(
            *rounds.problem, 1, rounds.placements[:1]
        )
        return rounds.result(last), rounds.model

    def _request(
        self, rounds: _Rounds, sets: Sequence[Tables], seconds: float
    ) -> LaunchRequest:
        from torchrec_neuroshard.training.first_launch import LaunchRequest

        ranks = 1 if self._pg is None else self._pg.size()
        return LaunchRequest(
            shards=(),
            kernels=(),
            tables=(),
            sets=tuple(sets),
            batch_size=rounds.task.batch_size,
            device_type=self._topology.compute_device,
            world_size=ranks,
            local_world_size=whole_nodes(ranks, self._topology.local_world_size),
            seconds=seconds,
            grace_seconds=GRACE_S,
            reference_ms=rounds.alone.reference_ms or None,
            seed=rounds.number,
        )

    def _measure_here(self, request: LaunchRequest) -> list[CostRecord]:
        if not has_device(self._topology):
            raise ConfigError(
                f"there is no {self._topology.compute_device} device here"
            )
        address = "127.0.0.1" if self._pg is None else find_address(self._topology)
        offer = Offer(request, address, free_port())
        if self._pg is not None:
            check_patience(request, self._pg)
            from_first(offer, self._pg, "planned")
        return measured(offer, 0)


class _Rounds:
    """What is known of the plans of all rounds.

    Attributes:
        task: What is placed.
        alone: The model that is corrected: of kernels that have the device alone.
        model: Corrected by all that was measured, and of kernels as they run.
        number: Of the round, from 1.
    """

    def __init__(self, task: ShardingTask, costs: PlanCosts) -> None:
        """Start with the model as it is."""
        self.task, self._comms_model = task, costs.comms_model
        self._on_cpu = costs.topology.compute_device == "cpu"
        self.model = costs.cost_model
        self.alone = _alone(self.model)
        self.number = 0
        self._plans: dict[Placement, Finalist] = {}
        self._kernels: dict[Placement, list[_Kernel]] = {}
        self._measured: list[MeasuredSet] = []
        self._ratios: dict[Tables, list[tuple[float, float]]] = {}
        self._seconds, self._evaluated = 0.0, 0

    @property
    def problem(self) -> tuple[ShardingTask, CostModel, CommsModel]:
        """What a search takes."""
        return self.task, self.model, self._comms_model

    @property
    def placements(self) -> list[Placement]:
        """All plans, the one with the shortest corrected path first.

        Those behind, of which less than half of what may decide them was measured.
        """

        def order(placement: Placement) -> tuple[bool, float]:
            plan, kernels = self._plans[placement], self._kernels[placement]
            return 2 * plan.num_measured < len(kernels), plan.corrected_ms

        return sorted(self._plans, key=order)

    def add(self, found: Sequence[SearchResult]) -> list[Tables]:
        """Take the next round's plans; return the sets that decide them.

        Those of the best plan so far come first, then the slowest: what is measured in
        two rounds tells how the machine has changed.
        """
        self._seconds += found[0].search_seconds
        self._evaluated += found[-1].num_evaluated
        self.number += 1
        best = [k for p in self.placements[:1] for k in self._kernels[p]]
        contending: list[_Kernel] = []
        for result in found:
            own = _contending(result, self.task, self._on_cpu)
            contending += own
            path_ms = result.predicted.critical_path_ms
            self._kernels[result.placement] = own
            self._plans.setdefault(
                result.placement,
                Finalist(
                    round=self.number,
                    predicted_ms=path_ms,
                    measured_ms=path_ms,
                    corrected_ms=path_ms,
                    num_measured=0,
                ),
            )
        contending.sort(key=lambda k: -k.slowness)
        return list(dict.fromkeys(k.tables for k in (*best, *contending)))

    def learn(self, sets: Sequence[Tables], records: Sequence[CostRecord]) -> None:
        """Correct the model by a round's records, and price all plans by it.

        Raises:
            RecordError: Nothing was measured.
        """
        for record in steady_records(records):
            tables = sets[record.index % len(sets)]
            forward, backward = _predict(self.alone, record.tables, record.batch_size)
            ratio_2 = (record.fwd_ms / forward, record.bwd_ms / backward)
            features_NF = table_features(tables, record.batch_size)
            self._ratios.setdefault(tables, []).append(ratio_2)
            self._measured.append(
                MeasuredSet(features_NF, ratio_2, record.spread, self.number)
            )
        if not self._measured:
            raise RecordError("no set of the finalists could be measured")
        corrected = CorrectedCostModel(self.alone, self._measured)
        self.model = ConcurrentCostModel.of(corrected, self._comms_model)
        simulator = Simulator(*self.problem)
        for placement, plan in self._plans.items():
            known = [k for k in self._kernels[placement] if k.tables in self._ratios]
            expected_ms, measured_ms = self._paths(
                simulator, placement, known, corrected
            )
            self._plans[placement] = dataclasses.replace(
                plan,
                measured_ms=measured_ms,
                corrected_ms=expected_ms,
                num_measured=len(known),
            )

    def _paths(
        self,
        simulator: Simulator,
        placement: Placement,
        known: Sequence[_Kernel],
        corrected: CorrectedCostModel,
    ) -> tuple[float, float]:
        """Critical paths of a plan [ms]: expected, and with known kernels as measured.

        What measurements leave open of each kernel is drawn for the former: the slowest
        of several ranks is slower than the one of which most is expected.
        """
        loads = simulator.rank_loads(placement)
        sums_WGE, extra_WS2 = loads.sums_CWGE, loads.extra_CWS2
        comms_WS3 = simulator.collectives(loads, simulator.num_shards(placement))

        def path_ms(kernels_XWG2: Floats) -> float:
            compute_XWS2 = simulator.stage_compute(kernels_XWG2) + extra_WS2
            slowest_X = compute_XWS2.max(axis=-3).sum(axis=(-2, -1))
            return float(slowest_X.mean() + comms_WS3.max(axis=0).sum())

        kernels_WG2 = simulator.compute_costs(sums_WGE)
        shape = kernels_WG2.shape
        stds_WG2 = corrected.log_stds(sums_WGE.reshape(-1, sums_WGE.shape[2]))
        draws_KWG2 = np.random.default_rng(SEED).standard_normal((NUM_DRAWS, *shape))
        drawn_KWG2 = kernels_WG2 * np.exp(draws_KWG2 * stds_WG2.reshape(shape))
        measured_WG2 = kernels_WG2.copy()
        for kernel in known:
            tables, batch_size = kernel.tables, self.task.batch_size
            ratio_2 = np.median(self._ratios[tables], axis=0)
            ratio_2 *= _predict(self.alone, tables, batch_size)
            ratio_2 /= _predict(corrected, tables, batch_size)
            measured_WG2[kernel.rank, kernel.group] *= ratio_2
        return path_ms(drawn_KWG2), path_ms(measured_WG2)

    def result(self, bound: SearchResult) -> SearchResult:
        """Describe the plan with the shortest corrected path.

        Args:
            bound: Of a search under the corrected model, whose lower bound holds.
        """
        chosen = self.placements[0]
        simulator = Simulator(*self.problem)
        predicted = simulator.evaluate(chosen)
        path_ms = predicted.critical_path_ms
        bound_ms = min(bound.lower_bound_ms, path_ms)
        plans = {**self._plans}
        plans[chosen] = dataclasses.replace(plans[chosen], chosen=True)
        return SearchResult(
            placement=chosen,
            predicted=predicted,
            lower_bound_ms=bound_ms,
            gap=path_ms / bound_ms - 1 if bound_ms > 0 else math.inf,
            bound_is_proven=bound.bound_is_proven,
            search_seconds=self._seconds + bound.search_seconds,
            num_evaluated=self._evaluated + bound.num_evaluated,
            warnings=range_messages(simulator, chosen),
            finalists=tuple(plans.values()),
        )


def _contending(
    result: SearchResult, task: ShardingTask, on_cpu: bool
) -> list[_Kernel]:
    """Return the fused kernels of the ranks that may decide a plan."""
    phases_SW2 = _phases(result.predicted)[..., _COMPUTE]
    most_S12 = np.maximum(phases_SW2.max(axis=1, keepdims=True), 1e-9)
    slowness_SW = (phases_SW2 / most_S12).max(axis=2)
    held: dict[tuple[int, int], list[ColumnShard]] = {}
    for shard in result.placement.shards:
        held.setdefault((shard.rank, task.groups[shard.table]), []).append(shard)
    found = []
    for (rank, group), shards in held.items():
        slowness = float(slowness_SW[task.stages[group], rank])
        runs = all(
            task.kernels[s.table] is None
            and is_measurable(task.tables[s.table], on_cpu)
            for s in shards
        )
        if slowness >= CONTENDS and runs:
            tables = tuple(_as_table(task, shard) for shard in shards)
            found.append(_Kernel(slowness, rank, group, tables))
    return found


def _as_table(task: ShardingTask, shard: ColumnShard) -> TableConfig:
    table, pooled = task.tables[shard.table], task.pooled[shard.table]
    if shard.rows != ALL_ROWS:
        table = row_shard(table, shard.rows, task.batch_size, pooled=pooled)
    return table.with_width(shard.width)


def _phases(predicted: PredictedCosts) -> Floats:
    """Phases of each stage and rank, `S x W x P` [ms]."""
    return np.array(
        [[[getattr(r, p) for p in PHASES] for r in s.ranks] for s in predicted.stages]
    )


def _predict(
    model: CostModel, tables: Sequence[TableConfig], batch_size: int
) -> Floats:
    """Forward and backward of a set, `2` [ms]."""
    features_NF = table_features(tables, batch_size)
    none = np.zeros(len(tables), dtype=np.int64)
    both_2: Floats = model.predict_sets(features_NF, none, 1)[0]
    return both_2


def _alone(model: CostModel) -> CostModel:
    """Return a model of kernels that have the device alone, not corrected yet."""
    if isinstance(model, ConcurrentCostModel):
        model = model.alone
    return model.alone if isinstance(model, CorrectedCostModel) else model
