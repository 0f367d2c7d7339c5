"""The cost of a whole plan: one place for all parts of the planner.

Shapes: `N` shards, `W` ranks, `G` fusion groups, `S` stages, `P` phases,
`T` options or tables.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torchrec.distributed.planner.types import (
    ParameterConstraints,
    Perf,
    ShardingOption,
    Topology,
)

from torchrec_neuroshard.bundles.find import load_cost_model
from torchrec_neuroshard.costs.encoder import ShardEncoder
from torchrec_neuroshard.costs.schedules import DenseMs, find_schedule
from torchrec_neuroshard.costs.simulator import (
    PredictedCosts,
    Simulator,
)
from torchrec_neuroshard.costs.task import ShardingTask
from torchrec_neuroshard.errors import ConfigError
from torchrec_neuroshard.models.adjusted import (
    ConcurrentCostModel,
    RelievedCommsModel,
    as_one_phase,
)
from torchrec_neuroshard.models.base import CommsModel, CostModel
from torchrec_neuroshard.notes import Note
from torchrec_neuroshard.planner.checks import check_constraints
from torchrec_neuroshard.planner.compat import kernel_settings, pipeline_name
from torchrec_neuroshard.planner.find_comms import (
    find_comms_model,
    find_rank_groups,
)
from torchrec_neuroshard.planner.option_facts import (
    is_quantised,
    table_name,
)
from torchrec_neuroshard.planner.placed import (
    PlacedPlan,
    PricedOptions,
    fusion_key,
)
from torchrec_neuroshard.planner.reader import (
    TableReader,
)
from torchrec_neuroshard.planner.topology import (
    GB_PER_S,
    PlannedDevices,
    sharding_group,
)
from torchrec_neuroshard.search.base import SearchResult
from torchrec_neuroshard.tables.profile import FeatureProfile
from torchrec_neuroshard.tables.table import COLUMN_MULTIPLE

__all__ = [
    "ESTIMATED_COLUMNS",
    "CostedPart",
    "LaunchedPerf",
    "PlanCosts",
]

Floats = npt.NDArray[np.float64]

ESTIMATED_COLUMNS = 32
"""Columns of the narrowest shard on a GPU whose kernels are estimated, unless given:
published timings of NVIDIA's cards since the V100 are of 64 columns and more."""


_NUM_REMEMBERED = 2
"""Placed plans whose prices are kept: a plan, and it with caches of other sizes."""


class LaunchedPerf(Perf):
    """TorchRec's estimate of a shard, with the launch of a kernel of its own."""

    def __deepcopy__(self, memo: dict[int, Any]) -> LaunchedPerf:
        """Copy the type as well, which TorchRec's copy does not from 1.9 on."""
        return LaunchedPerf(**vars(self))


class PlanCosts:
    """Costs of sharding options and plans, by one cost model and one topology.

    Attributes:
        devices: What is planned for, and where each of its figures is from.
        topology: Its topology: the caller's, completed.
        reader: Describes sharding options as tables.
        cost_model: Fused kernels.
        comms_model: Collectives.
        encoder: Keeps the encodings of all shards.
        schedule: Of the training loop.
        dense: What the rest of the model takes in it.
        notes: What to know of all this; part of every result.
    """

    def __init__(
        self,
        topology: Topology,
        constraints: Mapping[str, ParameterConstraints] | None = None,
        *,
        cost_model: str | Path | CostModel = "auto",
        comms_model: CommsModel | None = None,
        profiles: Mapping[str, FeatureProfile] | None = None,
        pipeline_type: Any = None,
        dense_ms: DenseMs | float | None = None,
    ) -> None:
        """Load the cost model.

        Args:
            topology: The devices to plan for.
            constraints: Table name -> TorchRec's constraints on it.
            cost_model: "auto", "measure", a bundle's name or folder, or a model.
            comms_model: None: what the cost model's bundle measured, else published
                links of this GPU, else bytes over the topology's bandwidths. It is for
                all ranks; nodes of several and what is between them (table-row-wise and
                grid) are looked for as if None were given.
            profiles: Feature name -> its measured profile.
            pipeline_type: Of the training loop: a member of TorchRec's `PipelineType`,
                or a name among `schedules.SCHEDULES`. None: one phase after another.
            dense_ms: What the rest of the model takes. None: nothing.

        Raises:
            ConfigError: There is no such cost model or pipeline, or constraints or
                `dense_ms` hold a number that cannot be.
            BundleError: The bundle cannot be used.
        """
        check_constraints(constraints or {})
        self.devices = PlannedDevices.of(topology, cost_model)
        self.topology = topology = self.devices.topology
        self.reader = TableReader(topology, constraints, profiles)
        self._given_comms = comms_model
        self.cost_model: CostModel
        self.dense = DenseMs.of(dense_ms)
        self._pipeline = pipeline_name(pipeline_type)
        self.schedule = find_schedule(self._pipeline, self.dense)
        if topology.compute_device == "cpu" and self._pipeline != "train_base":
            self.schedule = find_schedule("none", self.dense)
        self.use(cost_model)

    @property
    def least_columns(self) -> int:
        """Columns of the narrowest shard where no constraint gives `min_partition`."""
        on_gpu = self.topology.compute_device != "cpu"
        estimated = on_gpu and self.cost_model.error is not None
        return ESTIMATED_COLUMNS if estimated else COLUMN_MULTIPLE

    def use(self, cost_model: str | Path | CostModel) -> None:
        """Go on with another model, such as a bundle that was measured since.

        Raises:
            BundleError: The bundle cannot be used; costs stay as they were.
        """
        topology = self.topology
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            compute = load_cost_model(
                cost_model,
                device_type=topology.compute_device,
                hbm_gb_per_s=topology.hbm_mem_bw * GB_PER_S,
                host_gb_per_s=topology.hbm_to_ddr_mem_bw * GB_PER_S,
                card=self.devices.card,
            )
            ranks = topology.world_size, topology.local_world_size
            comms = self._given_comms or find_comms_model(
                self.devices, cost_model, *ranks
            )
            comms = find_rank_groups(self.devices, comms, cost_model)
            if (group := sharding_group(topology)) is not None:
                self.replicas = find_comms_model(
                    self.devices,
                    cost_model,
                    group.num_replicas,
                    group.replicas_per_node,
                )
        self.comms_model: CommsModel = comms
        self.cost_model = ConcurrentCostModel.of(compute, comms)
        texts = list(dict.fromkeys([str(w.message) for w in caught]))
        texts += self.devices.notes
        if texts:
            warnings.warn("\n".join(texts), stacklevel=4)
        notes = [Note("devices", text) for text in texts]
        overlaps = not self.schedule.adds_up(self.dense)
        if overlaps and not self.dense.total_ms:
            text = (
                f"pipeline_type '{self._pipeline}' without dense_ms: the rest of the "
                "model counts 0 ms, and what would run beside it counts in full"
            )
            notes.append(Note("dense-time", text))
        self.notes: tuple[Note, ...] = tuple(notes)
        self.encoder = ShardEncoder(self.cost_model)
        self._last_placed: list[tuple[list[Any], PlacedPlan]] = []

    def simulator(self, task: ShardingTask) -> Simulator:
        """Return a simulator; all keep their encodings in one place."""
        return Simulator(task, self.cost_model, self.comms_model, self.encoder)

    def predict(
        self, task: ShardingTask, result: SearchResult, const_ms: float | None
    ) -> SearchResult:
        """Return the result of a search that was given `searched_models`.

        Args:
            task: What was placed.
            result: In the terms of these models.
            const_ms: See there.
        """
        if self.schedule.adds_up(self.dense) and not self.dense.total_ms:
            return result
        simulator = self.simulator(task)
        predicted = self._scheduled(simulator.evaluate(result.placement))
        path_ms = predicted.critical_path_ms
        bound_ms = 0.0
        if const_ms is not None and result.lower_bound_ms > 0:
            bound_ms = min(result.lower_bound_ms + const_ms, path_ms)
        return replace(
            result,
            predicted=predicted,
            lower_bound_ms=bound_ms,
            gap=path_ms / bound_ms - 1 if bound_ms > 0 else math.inf,
            bound_is_proven=result.bound_is_proven and bound_ms > 0,
        )

    def searched_models(
        self, task: ShardingTask
    ) -> tuple[CostModel, CommsModel, float | None]:
        """Return models whose phases add up to the path under the loop's schedule.

        Of one stage under `train_sparse_dist` they do so exactly; else as long as
        phases are about what they are on balanced ranks.

        Args:
            task: What is to be placed.

        Returns:
            Kernels; collectives; and what to add to a lower bound of such a sum for
            one of the path [ms], None where that would be none.
        """
        schedule, dense = self.schedule, self.dense
        if schedule.adds_up(dense):
            return self.cost_model, self.comms_model, dense.total_ms
        later = {way for ways in task.alternatives for way in ways[1:]}
        tables = [t for t in range(len(task.tables)) if t not in later]
        blocks = np.array([task.block_size(t) for t in tables])
        phases_S5 = self.simulator(task).balanced_phases(np.array(tables), blocks)
        phases_WS6 = np.pad(phases_S5, ((0, 0), (0, 1)))[None]
        kernels = self.cost_model
        joined = schedule.joins_kernels(phases_WS6, dense)
        if joined:
            kernels = as_one_phase(kernels)
        reliefs_ms = schedule.reliefs_ms(phases_WS6, dense)
        is_bound = schedule.name == "train_sparse_dist" and not dense.lookups_first
        return (
            kernels,
            RelievedCommsModel(self.comms_model, reliefs_ms),
            dense.total_ms if is_bound else None,
        )

    def searched_simulator(self, task: ShardingTask) -> Simulator:
        """Return a simulator by the `searched_models`."""
        cost_model, comms_model, _ = self.searched_models(task)
        own = cost_model is self.cost_model
        return Simulator(task, cost_model, comms_model, self.encoder if own else None)

    def _scheduled(self, predicted: PredictedCosts) -> PredictedCosts:
        return replace(predicted, schedule=self.schedule, dense=self.dense)

    def price(self, options: Sequence[ShardingOption]) -> PricedOptions:
        """Price the shards of options.

        Args:
            options: Options that have a cost (`TableReader.has_cost`), with or without
                ranks.
        """
        return PricedOptions.of(options, self)

    def placed(self, plan: Sequence[ShardingOption]) -> PlacedPlan:
        """Price a plan whose shards have ranks; the last ones are remembered.

        Args:
            plan: Options, one of each table.
        """
        key = [self._placed_key(option) for option in plan]
        for known, placed in self._last_placed:
            if known == key:
                return placed
        placed = PlacedPlan(plan, self)
        self._last_placed = [*self._last_placed, (key, placed)][-_NUM_REMEMBERED:]
        return placed

    def _placed_key(self, option: ShardingOption) -> tuple[Any, ...]:
        """What the costs of a placed option depend on."""
        perfs = None
        if not self.reader.has_cost(option):
            perfs = [s.perf and tuple(vars(s.perf).values()) for s in option.shards]
        return (
            self.reader.facts(option),
            option.sharding_type,
            option.compute_kernel,
            option.cache_params,
            kernel_settings(option),
            [(*s.offset, *s.size, s.rank) for s in option.shards],
            perfs,
        )

    def single_perfs(self, options: Sequence[ShardingOption]) -> list[list[Perf]]:
        """Predict each shard as if it were alone on its rank, in one batch.

        Args:
            options: Options that have a cost.

        Returns:
            One `Perf` per shard of each option.

        Raises:
            ConfigError: The cost model predicts something that is not a time.
        """
        if not options:
            return []
        priced = self.price(options)
        compute_N2 = priced.simulator.single_compute(priced.prices)
        names = [table_name(options[t]) for t in priced.table_N.tolist()]
        self._check_times(compute_N2, names)
        perfs = iter(priced.single_perfs())
        return [[next(perfs) for _ in option.shards] for option in options]

    def check_model(self, task: ShardingTask) -> None:
        """Predict the kernel of each table alone.

        Raises:
            ConfigError: The cost model predicts something that is not a time.
        """
        firsts = [ways[0] for ways in task.ways]
        tables = [task.tables[t] for t in firsts]
        part_T = self.encoder.parts(
            tables,
            [table.num_embeddings for table in tables],
            [task.batch_size] * len(tables),
            [task.pooled[t] for t in firsts],
        )
        width_T = np.array([table.embedding_dim for table in tables])
        encodings = self.encoder.encoding(self.encoder.rows(part_T, width_T))
        alone = self.cost_model.predict_sums(encodings)
        self._check_times(alone, [table.name for table in tables])

    def _check_times(self, ms_N2: Floats, names: Sequence[str]) -> None:
        wrong = ~np.isfinite(ms_N2).all(axis=1) | (ms_N2 < 0).any(axis=1)
        if wrong.any():
            first = int(wrong.argmax())
            raise ConfigError(
                f"cost model '{self.cost_model.name}' predicts {ms_N2[first]} ms "
                f"for {names[first]}; a time must be finite and at least 0. Train the "
                "model again or pass another one"
            )

    def launch_ms(self, option: ShardingOption | None = None) -> tuple[float, float]:
        """Return forward and backward of the smallest kernel [ms], or an option's."""
        forward, backward = self.encoder.launch_ms.tolist()
        trained = option is None or not is_quantised(option)
        return forward, backward if trained else 0.0

    def share_launches(self, options: Sequence[ShardingOption]) -> None:
        """Count each rank's launch of a kernel once for all shards in it, in place.

        Args:
            options: Placed options; changed are shards with a `LaunchedPerf`, which
                only options without a cost have.
        """
        kernels: dict[tuple[Any, ...], list[Any]] = {}
        for option in options:
            if self.reader.has_cost(option):
                continue
            launched = [s for s in option.shards if isinstance(s.perf, LaunchedPerf)]
            if launched:
                key = fusion_key(option, self.reader, option.sharding_type)
                launch_ms = self.launch_ms(option)
            for shard in launched:
                kernels.setdefault((shard.rank, key, launch_ms), []).append(shard)
        for (*_, (forward, backward)), shards in kernels.items():
            excess = 1 - 1 / len(shards)
            for shard in shards:
                shard.perf = Perf(**vars(shard.perf))
                shard.perf.fwd_compute -= forward * excess
                shard.perf.bwd_compute -= backward * excess

    def attribute(self, plan: Sequence[ShardingOption]) -> None:
        """Share each rank's cost out to its shards, in place; see `PlacedPlan`."""
        self.placed(plan).attribute(plan)


class CostedPart:
    """Base of the planner's parts, which price plans by one `PlanCosts`.

    Args:
        topology: The devices to plan for.
        constraints: Table name -> TorchRec's constraints on it.
        costs: Shares one loaded cost model between parts, in place of what is left.
            None: one of the part's own.
        model: What `PlanCosts` takes: cost_model, comms_model, profiles.
    """

    def __init__(
        self,
        topology: Topology,
        constraints: Mapping[str, ParameterConstraints] | None = None,
        *,
        costs: PlanCosts | None = None,
        **model: Any,
    ) -> None:
        self.costs = costs or PlanCosts(topology, constraints, **model)
