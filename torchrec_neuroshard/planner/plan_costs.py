"""The cost of a whole plan, shared by all parts of the planner.

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
from torchrec_neuroshard.costs.passes import StagePhases
from torchrec_neuroshard.costs.schedules import DenseMs, find_schedule
from torchrec_neuroshard.costs.simulator import Simulator
from torchrec_neuroshard.costs.task import ShardingTask
from torchrec_neuroshard.errors import ConfigError, check_kind
from torchrec_neuroshard.models.adjusted import (
    ConcurrentCostModel,
    RelievedCommsModel,
    as_one_phase,
)
from torchrec_neuroshard.models.base import CommsModel, CostModel
from torchrec_neuroshard.notes import Note
from torchrec_neuroshard.planner.checks import check_constraints
from torchrec_neuroshard.planner.compat import kernel_settings, pipeline_name
from torchrec_neuroshard.planner.find_comms import find_comms_model, find_rank_groups
from torchrec_neuroshard.planner.groups import sharding_group
from torchrec_neuroshard.planner.option_facts import is_quantised, table_name
from torchrec_neuroshard.planner.placed import PlacedPlan, PricedOptions, fusion_key
from torchrec_neuroshard.planner.reader import TableReader
from torchrec_neuroshard.planner.topology import GB_PER_S, PlannedDevices
from torchrec_neuroshard.search.base import SearchResult
from torchrec_neuroshard.tables.profile import FeatureProfile
from torchrec_neuroshard.tables.table import COLUMN_MULTIPLE

Floats = npt.NDArray[np.float64]

ESTIMATED_COLUMNS = 32
"""Default columns of the narrowest shard on a GPU whose kernels are estimated.
Published timings of NVIDIA's cards since the V100 start at 64 columns."""


_NUM_REMEMBERED = 2
"""Number of priced plans to keep: a plan and its variant with other cache sizes."""


class LaunchedPerf(Perf):
    """TorchRec's estimate of a shard plus the launch of its own kernel."""

    def __deepcopy__(self, memo: dict[int, Any]) -> LaunchedPerf:
        """Return a copy of the same class; since 1.9, TorchRec's copy is a `Perf`."""
        return LaunchedPerf(**vars(self))


class PlanCosts:
    """Costs of sharding options and plans for one cost model and one topology.

    Attributes:
        devices: The devices to plan for, with the source of each figure.
        topology: The caller's topology, completed with the card's figures.
        reader: Describes sharding options as tables.
        cost_model: Predicts fused kernels.
        comms_model: Predicts collectives.
        encoder: Caches the encodings of shards.
        schedule: The schedule of the training loop.
        dense: Time of the rest of the model in an iteration.
        notes: Notes on devices and costs, part of every result.
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
            constraints: Table name -> TorchRec's constraints on the table.
            cost_model: "auto", "measure", a bundle's name or folder, or a `CostModel`.
            comms_model: Predicts collectives of all ranks. None: what the cost model's
                bundle measured, else published links of this GPU, else bytes divided by
                the topology's bandwidths. Collectives within and between nodes
                (table-row-wise and grid) are always chosen as with None.
            profiles: Feature name -> its measured profile.
            pipeline_type: TorchRec's `PipelineType` of the training loop, or a key of
                `schedules.SCHEDULES`. None: phases run one after another.
            dense_ms: Time of the rest of the model. None: 0.

        Raises:
            ConfigError: An argument has the wrong type, the cost model or pipeline is
                unknown, or a value in `constraints` or `dense_ms` is impossible.
            BundleError: The bundle cannot be used.
        """
        check_kind("topology", topology, Topology)
        check_constraints(constraints or {})
        for name, value, kind in (
            ("comms_model", comms_model, CommsModel),
            ("profiles", profiles, Mapping),
        ):
            if value is not None:
                check_kind(name, value, kind)
        if not isinstance(cost_model, str | Path | CostModel):
            raise ConfigError(
                f"cost_model is {cost_model!r:.60}: pass 'auto', the name or folder of "
                "a bundle, or a CostModel"
            )
        self._given_topology, self._given_comms = topology, comms_model
        self.devices = PlannedDevices.of(topology, cost_model)
        self.topology = topology = self.devices.topology
        self.reader = TableReader(topology, constraints, profiles)
        self.cost_model: CostModel
        self.dense = DenseMs.of(dense_ms)
        self._pipeline = pipeline_name(pipeline_type)
        self.schedule = find_schedule(self._pipeline, self.dense)
        if topology.compute_device == "cpu" and self._pipeline != "train_base":
            self.schedule = find_schedule("none", self.dense)
        self.use(cost_model)

    @property
    def least_columns(self) -> int:
        """Columns of the narrowest shard without a constraint's `min_partition`."""
        on_gpu = self.topology.compute_device != "cpu"
        estimated = on_gpu and self.cost_model.error is not None
        return ESTIMATED_COLUMNS if estimated else COLUMN_MULTIPLE

    def use(self, cost_model: str | Path | CostModel) -> None:
        """Switch to another cost model, for example a newly measured bundle.

        Raises:
            BundleError: The bundle cannot be used; costs stay as they are.
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
        self._named = cost_model
        self.cost_model = ConcurrentCostModel.of(compute, comms)
        texts = list(dict.fromkeys([str(w.message) for w in caught]))
        texts += self.devices.notes
        if texts:
            warnings.warn("\n".join(texts), stacklevel=4)
        notes = [Note("devices", text) for text in texts]
        overlaps = self.schedule.hides(self.dense)
        if overlaps and not self.dense.total_ms:
            text = (
                f"pipeline_type '{self._pipeline}' without dense_ms: the rest of the "
                "model counts 0 ms, so phases that overlap with it count in full"
            )
            notes.append(Note("dense-time", text))
        self.notes: tuple[Note, ...] = tuple(notes)
        self.encoder = ShardEncoder(self.cost_model)
        self._last_placed: list[tuple[list[Any], PlacedPlan]] = []

    def again(self) -> dict[str, Any]:
        """Return arguments of another `PlanCosts` with the same models.

        By its name, a bundle also predicts collectives of other numbers of ranks.
        """
        named = self._named
        if named == "measure" or (isinstance(named, Path) and not named.is_dir()):
            # Without reliefs, so that the overlap of kernels is not counted twice.
            return {
                "topology": self.topology,
                "cost_model": self.cost_model,
                "comms_model": RelievedCommsModel(self.comms_model, {}),
            }
        return {
            "topology": self._given_topology,
            "cost_model": named,
            "comms_model": self._given_comms,
        }

    def simulator(self, task: ShardingTask) -> Simulator:
        """Return a simulator; all simulators share one cache of encodings."""
        return Simulator(task, self.cost_model, self.comms_model, self.encoder)

    def predict(
        self, task: ShardingTask, result: SearchResult, const_ms: float | None
    ) -> SearchResult:
        """Return a search result in terms of the real models and schedule.

        Args:
            task: The task of the search.
            result: The result in terms of `searched_simulator`.
            const_ms: The second value of `searched_simulator`.
        """
        if not self.schedule.hides(self.dense) and not self.dense.total_ms:
            return result
        simulator = self.simulator(task)
        plain = simulator.evaluate(result.placement)
        predicted = replace(plain, schedule=self.schedule, dense=self.dense)
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

    def searched_simulator(self, task: ShardingTask) -> tuple[Simulator, float | None]:
        """Return a simulator whose path without a pipeline is the one of the schedule.

        It is exact for one stage under `train_sparse_dist`. Otherwise it is close as
        long as phases take about as long as on balanced ranks.

        Args:
            task: The task to search.

        Returns:
            The simulator; its task has the modules that add up under the schedule. And
            the milliseconds that turn a lower bound of the sum into one of the path.
            None: there is no such bound.
        """
        cost_model, comms_model, const_ms = self._searched_models(task)
        if not self.schedule.adds_up:
            task = replace(task, modules=())
        is_own = cost_model is self.cost_model
        encoder = self.encoder if is_own else None
        return Simulator(task, cost_model, comms_model, encoder), const_ms

    def _searched_models(
        self, task: ShardingTask
    ) -> tuple[CostModel, CommsModel, float | None]:
        schedule, dense = self.schedule, self.dense
        if not schedule.hides(dense):
            return self.cost_model, self.comms_model, dense.total_ms
        later = {way for ways in task.alternatives for way in ways[1:]}
        tables = [t for t in range(len(task.tables)) if t not in later]
        blocks = np.array([task.block_size(t) for t in tables])
        phases_S5 = self.simulator(task).balanced_phases(np.array(tables), blocks)
        phases = StagePhases.plain(np.pad(phases_S5, ((0, 0), (0, 1)))[None, None])
        kernels = self.cost_model
        if schedule.joins_kernels(phases, dense):
            kernels = as_one_phase(kernels)
        reliefs_ms = schedule.reliefs_ms(phases, dense)
        is_bound = schedule.name == "train_sparse_dist" and not dense.lookups_first
        return (
            kernels,
            RelievedCommsModel(self.comms_model, reliefs_ms),
            dense.total_ms if is_bound else None,
        )

    def price(self, options: Sequence[ShardingOption]) -> PricedOptions:
        """Price the shards of options.

        Args:
            options: Options with a cost (`TableReader.has_cost`), with or without
                ranks.
        """
        return PricedOptions.of(options, self)

    def placed(self, plan: Sequence[ShardingOption]) -> PlacedPlan:
        """Price a plan whose shards have ranks; the last plans are cached.

        Args:
            plan: One option per table.
        """
        key = [self._placed_key(option) for option in plan]
        for known, placed in self._last_placed:
            if known == key:
                return placed
        placed = PlacedPlan(plan, self)
        self._last_placed = [*self._last_placed, (key, placed)][-_NUM_REMEMBERED:]
        return placed

    def _placed_key(self, option: ShardingOption) -> tuple[Any, ...]:
        """Return everything that the costs of a placed option depend on."""
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
            options: Options with a cost.

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

    def check_model(self, simulator: Simulator) -> None:
        """Check the cost model's prediction for each table alone.

        Raises:
            ConfigError: The cost model predicts something that is not a time.
        """
        tables = simulator.task.tables
        alone = self.cost_model.predict_sums(simulator.widest().encoding_NE)
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
        """Return the launch overhead of a kernel, forward and backward [ms]."""
        forward, backward = self.encoder.launch_ms.tolist()
        trained = option is None or not is_quantised(option)
        return forward, backward if trained else 0.0

    def share_launches(self, options: Sequence[ShardingOption]) -> None:
        """Count a kernel's launch once per rank, not once per shard, in place.

        Args:
            options: Placed options. Only shards with a `LaunchedPerf` change; their
                options have no learned cost.
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
        """Divide each rank's cost among its shards, in place; see `PlacedPlan`."""
        self.placed(plan).attribute(plan)


class CostedPart:
    """Base class of the planner's parts, which price plans with a `PlanCosts`.

    Args:
        topology: The devices to plan for.
        constraints: Table name -> TorchRec's constraints on the table.
        costs: One loaded cost model shared between parts; replaces `model`. None: the
            part loads its own.
        model: Arguments of `PlanCosts`: cost_model, comms_model, profiles.
    """

    def __init__(
        self,
        topology: Topology,
        constraints: Mapping[str, ParameterConstraints] | None = None,
        *,
        costs: PlanCosts | None = None,
        **model: Any,
    ) -> None:
        if costs is not None:
            check_kind("costs", costs, PlanCosts)
        self.costs = costs or PlanCosts(topology, constraints, **model)
