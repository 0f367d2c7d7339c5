"""The cost of a whole plan: one place for all parts of the planner.

Shapes: `N` shards, `W` ranks, `G` fusion groups, `S` stages, `P` phases,
`T` options or tables.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
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

from torchrec_neuroshard.cost_models import (
    CommsModel,
    ConcurrentCostModel,
    CostModel,
    load_cost_model,
)
from torchrec_neuroshard.cost_models.scaled import JoinedCostModel, RelievedCommsModel
from torchrec_neuroshard.errors import ConfigError
from torchrec_neuroshard.notes import Note
from torchrec_neuroshard.placement import ShardingTask
from torchrec_neuroshard.placement_rules import quoted
from torchrec_neuroshard.planner.checks import check_constraints
from torchrec_neuroshard.planner.compat import pipeline_name
from torchrec_neuroshard.planner.costs.find_comms import (
    find_comms_model,
    find_rank_groups,
)
from torchrec_neuroshard.planner.costs.kernels import (
    is_estimated,
    kernel_factors,
    load_factor,
)
from torchrec_neuroshard.planner.costs.plan_conversion import (
    LoweredPlan,
    OptionShards,
    fusion_key,
    lower_plan,
)
from torchrec_neuroshard.planner.options.table_reader import (
    DEFAULT_INPUTS,
    OFFLOADED_KERNELS,
    TableReader,
    is_fused,
    is_quantised,
    table_name,
)
from torchrec_neuroshard.planner.topology import (
    GB_PER_S,
    PlannedDevices,
    sharding_group,
)
from torchrec_neuroshard.profiles import FeatureProfile
from torchrec_neuroshard.report.parts import (
    Bottleneck,
    HostTable,
    PlanBasis,
    WeightSync,
)
from torchrec_neuroshard.schedules import DenseMs, find_schedule
from torchrec_neuroshard.search.base import SearchResult
from torchrec_neuroshard.search.default import MAX_WARNINGS, range_note, range_notes
from torchrec_neuroshard.shard_encoder import ShardEncoder
from torchrec_neuroshard.simulator import (
    PHASES,
    PredictedCosts,
    PricedShards,
    RankCosts,
    Simulator,
    StageCosts,
)
from torchrec_neuroshard.tables import COLUMN_MULTIPLE

__all__ = [
    "ESTIMATED_COLUMNS",
    "CostedPart",
    "LaunchedPerf",
    "PlanCosts",
    "PricedOptions",
]

Floats = npt.NDArray[np.float64]

ESTIMATED_COLUMNS = 32
"""Columns of the narrowest shard on a GPU whose kernels are estimated, unless given:
published timings of NVIDIA's cards since the V100 are of 64 columns and more."""


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
                self._replicas = find_comms_model(
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
            kernels = JoinedCostModel(kernels)
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
        kernels = [kernel_factors(o, self.reader) for o in options]
        found = OptionShards.of(options, self.reader, kernels)
        simulator = self.simulator(found.task)
        priced = simulator.price(found.table_N, found.width_N, found.rows_N)
        return PricedOptions(found, simulator, priced)

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
        found, simulator = priced.found, priced.simulator
        compute_N2 = simulator.single_compute(priced.shards)
        names = [table_name(option) for option in options]
        self._check_times(compute_N2, [names[t] for t in found.table_N.tolist()])
        comms_N3 = priced.single_comms()
        perfs = iter(priced.perfs(compute_N2, comms_N3))
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
            options: Placed options; changed are shards with a `LaunchedPerf`.
        """
        kernels: dict[tuple[Any, ...], list[Any]] = {}
        for option in options:
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

    def lower(self, plan: Sequence[ShardingOption]) -> LoweredPlan:
        """Describe a plan whose shards have ranks."""
        return lower_plan(plan, self.reader)

    def evaluate(self, lowered: LoweredPlan) -> PredictedCosts:
        """Predict one iteration.

        Tables that the cost model has no price for count with the costs that their
        shards carry.
        """
        costed, stock = self._split(lowered)
        stages: list[StageCosts] = []
        uncertainty = 0.0
        if costed:
            predicted = self.price(costed).predicted()
            stages += predicted.stages
            uncertainty = predicted.uncertainty
        if stock:
            stages.append(self._stock_stage(stock))
        return PredictedCosts(
            stages=tuple(stages),
            uncertainty=uncertainty,
            compute_source=self._compute_source(costed, stock),
            comms_source=self.comms_model.source,
            schedule=self.schedule,
            dense=self.dense,
        )

    def _split(
        self, lowered: LoweredPlan
    ) -> tuple[list[ShardingOption], list[ShardingOption]]:
        """Options that have a price, and those of stock cost."""
        others = {True: list(lowered.column_sharded), False: []}
        for option in lowered.others:
            others[self.reader.has_cost(option)].append(option)
        return others[True], others[False]

    def _compute_source(
        self, costed: Sequence[ShardingOption], stock: Sequence[ShardingOption]
    ) -> str:
        estimated = sum(map(is_estimated, costed)) + len(stock)
        if not estimated:
            return self.cost_model.source
        total = len(costed) + len(stock)
        return f"{self.cost_model.source}; estimated for {estimated} of {total} tables"

    def basis(
        self, plan: Sequence[ShardingOption], batch_size_is_default: bool
    ) -> PlanBasis:
        """Say what a plan's costs rest on.

        Args:
            plan: Its options.
            batch_size_is_default: Whether the caller gave no batch size.
        """
        inputs: dict[str, str] = {}
        for option in plan:
            inputs.update(self.reader.inputs_from(option))
        counts = Counter(inputs.values())
        error = self.cost_model.error
        devices = self.devices
        return PlanBasis(
            card=devices.card.title if devices.card else None,
            figures=tuple(devices.figures.values()),
            batch_size=int(plan[0].batch_size) if plan else 0,
            batch_size_is_default=batch_size_is_default,
            ids_per_sample=tuple(counts.most_common()),
            assumed_features=tuple(
                f for f, source in inputs.items() if source == DEFAULT_INPUTS
            ),
            estimate_error=None if error is None else str(error),
        )

    def weight_sync(self, plan: Sequence[ShardingOption]) -> WeightSync | None:
        """Predict how replicas of a sharding group's plan are kept alike.

        Args:
            plan: Placed options, one of each table.

        Returns:
            None where there is one replica: of all ranks; see `group_topology`.
        """
        group = sharding_group(self.topology)
        if group is None or group.num_replicas == 1:
            return None
        bytes_WK = _synced_bytes(plan, self.reader)
        sent = np.repeat(bytes_WK.reshape(-1, 1), group.num_replicas, axis=1)
        ms_WK = self._replicas.all_reduce(sent).max(axis=1).reshape(bytes_WK.shape)
        slowest = int(ms_WK.sum(axis=1).argmax())
        return WeightSync(
            num_replicas=group.num_replicas,
            interval=group.sync_interval,
            rank_bytes=float(bytes_WK[slowest].sum()),
            sync_ms=float(ms_WK[slowest].sum()),
            source=self._replicas.source,
        )

    def optimizer_notes(self, options: Iterable[ShardingOption]) -> tuple[Note, ...]:
        """Say which tables have an optimizer of which nobody knows what it keeps."""
        odd: dict[str, dict[str, None]] = {}
        for option in options:
            if not self.reader.knows_optimizer(option):
                name = self.reader.optimizer_name(option)
                odd.setdefault(name, {})[table_name(option)] = None
        texts = (
            f"tables {quoted([*tables])}: what optimizer {name} keeps is not known; "
            "memory and time are counted as Adam's, with two values for each weight"
            for name, tables in sorted(odd.items())
        )
        return tuple(Note("optimizer", text) for text in texts)

    def host_tables(self, plan: Sequence[ShardingOption]) -> dict[str, HostTable]:
        """Say what tables in the host's memory take, by name.

        Args:
            plan: Placed options, with estimates of memory.
        """
        options = [
            o
            for o in plan
            if o.compute_kernel in OFFLOADED_KERNELS and self.reader.has_cost(o)
        ]
        if not options:
            return {}
        priced = self.price(options)
        ms_TW = np.zeros((len(options), self.topology.world_size))
        where = priced.found.table_N, priced.found.rank_N
        np.add.at(ms_TW, where, priced.shards.host_N2.sum(axis=1))
        found = {}
        for option, kernel, ms in zip(
            options, priced.found.task.kernels, ms_TW.max(axis=1).tolist(), strict=True
        ):
            assert kernel is not None and kernel.host is not None
            held: Counter[int] = Counter()
            for shard in option.shards:
                held[int(shard.rank)] += shard.storage.ddr if shard.storage else 0
            missed = kernel.host.missed
            found[table_name(option)] = HostTable(
                ms_per_iteration=ms,
                rank_bytes=tuple(sorted(held.items())),
                load_factor=None if missed is None else load_factor(option),
                missed=missed,
            )
        return found

    def _stock_stage(self, options: Sequence[ShardingOption]) -> StageCosts:
        """Costs that the options' shards carry."""
        phases = np.zeros((self.topology.world_size, len(PHASES) + 1))
        for option in options:
            for shard in option.shards:
                phases[shard.rank] += _stock_phases(shard.perf)
        return StageCosts(
            "others (TorchRec's estimate)",
            tuple(RankCosts(*row) for row in phases.tolist()),
        )

    def attribute(self, plan: Sequence[ShardingOption]) -> None:
        """Share each rank's cost out to its shards, in place.

        Afterwards the shards' `Perf` of a rank add up to the cost of the set, so that
        TorchRec's own sums over shards (its stats, its default performance model)
        agree with it. A shard's part is in proportion to its cost alone. `Perf` knows
        no index all-to-all: it is part of `fwd_comms`.
        """
        costed = [o for o in plan if self.reader.has_cost(o)]
        if not costed:
            return
        priced = self.price(costed)
        compute_N2, comms_N3 = priced.attributed()
        perfs = priced.perfs(compute_N2, comms_N3)
        for shard, perf in zip(priced.found.shards, perfs, strict=True):
            shard.perf = perf

    def on_path(
        self, lowered: LoweredPlan, predicted: PredictedCosts
    ) -> tuple[dict[int, float], Bottleneck | None]:
        """Say how much of the critical path is due to each shard of a plan.

        A shard counts in the phases in which its rank is the slowest of a stage, less
        what of them runs beside something longer.

        Args:
            lowered: The plan.
            predicted: What `evaluate` says of it.

        Returns:
            `id` of a shard -> its part [ms]; and the shard's table, rank and phase
            that matter most, None where nothing takes time.
        """
        costed, stock = self._split(lowered)
        shards = [s for option in stock for s in option.shards]
        names = [table_name(option) for option in stock for _ in option.shards]
        phases_N5 = np.array([_stock_phases(s.perf)[:5] for s in shards]).reshape(-1, 5)
        rank_N = np.array([int(s.rank) for s in shards], dtype=np.int64)
        stage_N = np.full(len(shards), len(predicted.stages) - 1, dtype=np.int64)
        if costed:
            priced = self.price(costed)
            found, simulator = priced.found, priced.simulator
            compute_N2, comms_N3 = priced.attributed()
            own_N5 = np.column_stack(
                [comms_N3[:, 0], compute_N2[:, 0], comms_N3[:, 1:], compute_N2[:, 1]]
            )
            phases_N5 = np.concatenate([own_N5, phases_N5])
            rank_N = np.concatenate([found.rank_N, rank_N])
            stage_N = np.concatenate([simulator.stages_T[found.table_N], stage_N])
            shards = [*found.shards, *shards]
            names = [table_name(costed[t]) for t in found.table_N.tolist()] + names
        if not shards:
            return {}, None
        phases_WS5 = predicted.phases_WS6[..., : len(PHASES)]
        worst_S5, slowest_S5 = phases_WS5.max(axis=0), phases_WS5.argmax(axis=0)
        visible_5 = np.ones(len(PHASES))
        if not self.schedule.adds_up(self.dense):
            hidden = [*predicted.hidden_ms(self.schedule).values()]
            hidden[1] += hidden.pop()  # loading caches is a part of fwd_compute
            total_5 = worst_S5.sum(axis=0)
            visible_5 -= np.divide(hidden, total_5, where=total_5 > 0, out=0 * total_5)
        part_N5 = phases_N5 * visible_5
        part_N5[rank_N[:, None] != slowest_S5[stage_N]] = 0.0
        path_ms_of = dict(
            zip(map(id, shards), part_N5.sum(axis=1).tolist(), strict=True)
        )
        longest = np.unravel_index((worst_S5 * visible_5).argmax(), worst_S5.shape)
        stage, phase = map(int, longest)
        table_ms: dict[str, float] = {}
        for n in np.flatnonzero(stage_N == stage).tolist():
            table_ms[names[n]] = table_ms.get(names[n], 0.0) + float(part_N5[n, phase])
        table, ms = max(table_ms.items(), key=lambda t: t[1], default=("", 0.0))
        if not ms > 0:
            return path_ms_of, None
        return path_ms_of, Bottleneck(
            table=table,
            rank=int(slowest_S5[stage, phase]),
            phase=PHASES[phase],
            phase_ms=float(worst_S5[stage, phase] * visible_5[phase]),
            table_ms=ms,
        )

    def range_notes(self, lowered: LoweredPlan) -> tuple[Note, ...]:
        """Name tables whose shards lie outside what the cost model was trained on."""
        notes: tuple[Note, ...] = ()
        if lowered.task is not None:
            notes = range_notes(self.simulator(lowered.task), lowered.placement)
        others = [o for o in lowered.others if self.reader.has_cost(o)]
        if not others:
            return notes
        names = [table_name(o) for o in others for _ in o.shards]
        found = self.cost_model.range_warnings(self.price(others).features())
        more = {
            (names[w.shard], w.feature): range_note(names[w.shard], w) for w in found
        }
        return notes + tuple(list(more.values())[:MAX_WARNINGS])


@dataclass(frozen=True, slots=True)
class PricedOptions:
    """Costed options with what their shards cost."""

    found: OptionShards
    simulator: Simulator
    shards: PricedShards

    def features(self) -> npt.NDArray[np.float32]:
        """Features of all shards, `N x F`."""
        found = self.found
        return self.simulator.shard_features(found.table_N, found.width_N, found.rows_N)

    def predicted(self) -> PredictedCosts:
        """Predict one iteration of placed options."""
        loads = self.simulator.add_up(self.shards, self.found.rank_N)
        return self.simulator.predict(loads, self._num_shards())

    def ordered_columns(self) -> Floats:
        """Count the output columns that TorchRec puts in order in each stage: `S`."""
        columns_T = self.simulator.columns_per_table
        return self.simulator.ordered_columns(self._num_shards(), columns_T)

    def _num_shards(self) -> npt.NDArray[np.int64]:
        """Parts that the columns of each option's table lie in."""
        found = self.found
        return np.bincount(
            found.table_N[found.is_first_N], minlength=len(found.options)
        )

    def single_comms(self) -> Floats:
        """Predict the collectives of each shard as if its table were alone.

        Shards that TorchRec places one by one are alone, those of a node or of all
        ranks are together.

        Returns:
            `N x 3` [ms]: index exchange, forward and backward.
        """
        found = self.found
        size_T = np.array([found.task.block_size(t) for t in range(len(found.options))])
        rank_N = found.place_N % size_T[found.table_N]
        block_N = np.cumsum(rank_N == 0) - 1
        return self.simulator.single_comms(
            found.table_N, self.shards.loads_N3, rank_N, block_N
        )

    def attributed(self) -> tuple[Floats, Floats]:
        """Share the ranks' costs out to placed shards: `N x 2` and `N x 3` [ms].

        A shard's part of a set is in proportion to its cost alone.
        """
        found, simulator, shards = self.found, self.simulator, self.shards
        task, rank_N = found.task, found.rank_N
        loads = simulator.add_up(shards, rank_N)
        alone = simulator.single_compute(shards) - shards.extra_N2
        fused_WG2 = simulator.compute_costs(loads.sums_CWGE)
        group_N = rank_N * task.num_groups + simulator.groups_T[found.table_N]
        compute_N2 = shards.extra_N2 + _share(alone, group_N, fused_WG2.reshape(-1, 2))
        comms_WS3 = simulator.collectives(loads, self._num_shards())
        index_N, columns_N, gradients_N = shards.loads_N3.T
        weights = np.stack([index_N, columns_N, columns_N + gradients_N], axis=1)
        stage_N = rank_N * task.num_stages + simulator.stages_T[found.table_N]
        return compute_N2, _share(weights, stage_N, comms_WS3.reshape(-1, 3))

    def perfs(self, compute_N2: Floats, comms_N3: Floats) -> list[Perf]:
        """Return TorchRec's record of each shard's costs.

        Args:
            compute_N2: Forward, loading of caches included, and backward [ms].
            comms_N3: Index exchange, forward and backward [ms].
        """
        return [
            Perf(
                fwd_compute=forward,
                fwd_comms=index + fwd_comms,
                bwd_compute=backward,
                bwd_comms=bwd_comms,
            )
            for (forward, backward), (index, fwd_comms, bwd_comms) in zip(
                compute_N2.tolist(), comms_N3.tolist(), strict=True
            )
        ]


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


def _synced_bytes(
    options: Sequence[ShardingOption], reader: TableReader
) -> npt.NDArray[np.float64]:
    """Return what each rank of a group averages with its replicas.

    TorchRec averages the weights of each type, then the optimizers' state, of fused
    kernels alone: data-parallel tables never drift apart.

    Args:
        options: Placed, one of each table.
        reader: Knows the tables' optimizers and the ranks.

    Returns:
        `W x K` bytes, for each of `K` collectives.
    """
    sent: dict[str, npt.NDArray[np.float64]] = {}
    for option in filter(is_fused, options):
        per_value, per_row = reader.state_bytes(option)
        for shard in option.shards:
            rows, width = (int(n) for n in shard.size)
            for kind, num_bytes in (
                (str(option.tensor.dtype), rows * width * option.tensor.element_size()),
                ("state", rows * (width * per_value + per_row)),
            ):
                bytes_W = sent.setdefault(kind, np.zeros(reader.world_size))
                bytes_W[shard.rank] += num_bytes
    return np.stack([*sent.values()] or [np.zeros(reader.world_size)], axis=1)


def _stock_phases(perf: Perf) -> tuple[float, ...]:
    """TorchRec's estimate as phases, and what loading caches takes of the second."""
    return (
        0.0,
        perf.fwd_compute + perf.prefetch_compute,
        perf.fwd_comms,
        perf.bwd_comms,
        perf.bwd_compute,
        perf.prefetch_compute,
    )


def _share(
    weights_NP: npt.NDArray[np.float64],
    set_N: npt.NDArray[np.int64],
    totals_SP: npt.NDArray[np.float64],
) -> npt.NDArray[np.float64]:
    """Split each set's totals over its members in proportion to their weights."""
    sums = np.zeros_like(totals_SP)
    counts = np.zeros(len(totals_SP))
    np.add.at(sums, set_N, weights_NP)
    np.add.at(counts, set_N, 1.0)
    equal = 1 / counts[set_N]
    known = sums[set_N]
    share = np.where(
        known > 0, weights_NP / np.where(known > 0, known, 1), equal[:, None]
    )
    out: npt.NDArray[np.float64] = share * totals_SP[set_N]
    return out
