"""The cost of a whole plan: one place for all parts of the planner.

Shapes: `N` shards, `W` ranks, `G` fusion groups, `S` stages, `P` phases.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torchrec.distributed.planner.constants import (
    HBM_MEM_BW,
)
from torchrec.distributed.planner.types import (
    ParameterConstraints,
    Perf,
    ShardingOption,
    Topology,
)
from torchrec.distributed.types import ShardingType

from torchrec_neuroshard.cost_models import (
    CommsModel,
    ConcurrentCostModel,
    CostModel,
    load_cost_model,
)
from torchrec_neuroshard.errors import ConfigError
from torchrec_neuroshard.placement import ShardingTask
from torchrec_neuroshard.planner.links import (
    GB_PER_S,
    find_comms_model,
    find_rank_groups,
)
from torchrec_neuroshard.planner.lowering import LoweredPlan, fusion_key, lower_plan
from torchrec_neuroshard.planner.staged import (
    ShardPricer,
    StagedShards,
    is_estimated,
)
from torchrec_neuroshard.planner.table_reader import TableReader, is_dense, table_name
from torchrec_neuroshard.profiles import FeatureProfile
from torchrec_neuroshard.search.default import MAX_WARNINGS, range_messages
from torchrec_neuroshard.simulator import (
    PHASES,
    PredictedCosts,
    RankCosts,
    Simulator,
    StageCosts,
    in_phases,
    stage_costs,
)
from torchrec_neuroshard.tables import TableConfig

__all__ = ["CostedPart", "PlanCosts"]

_ONE_PLACEMENT = (ShardingType.ROW_WISE.value, ShardingType.DATA_PARALLEL.value)


class PlanCosts:
    """Costs of sharding options and plans, by one cost model and one topology.

    Attributes:
        reader: Describes sharding options as tables.
        pricer: Prices their shards.
        cost_model: Fused kernels.
        comms_model: Collectives.
        warnings: What to know of the cost model; part of every result.
    """

    def __init__(
        self,
        topology: Topology,
        constraints: Mapping[str, ParameterConstraints] | None = None,
        *,
        cost_model: str | Path | CostModel = "auto",
        comms_model: CommsModel | None = None,
        profiles: Mapping[str, FeatureProfile] | None = None,
    ) -> None:
        """Load the cost model.

        Args:
            topology: The devices to plan for.
            constraints: Table name -> TorchRec's constraints on it.
            cost_model: "auto", a bundle's name or folder, or a model.
            comms_model: None: what the cost model's bundle measured, else published
                links of this GPU, else bytes over the topology's bandwidths. It is for
                all ranks; nodes of several and what is between them (table-row-wise and
                grid) are looked for as if None were given.
            profiles: Feature name -> its measured profile.

        Raises:
            ConfigError: There is no such cost model.
            BundleError: The bundle cannot be used.
        """
        self.topology = topology
        self.reader = TableReader(
            world_size=topology.world_size, constraints=constraints, profiles=profiles
        )
        given = topology.hbm_mem_bw
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            self.cost_model = load_cost_model(
                cost_model,
                device_type=topology.compute_device,
                hbm_gb_per_s=None if given == HBM_MEM_BW else given * GB_PER_S,
            )
            self.comms_model = comms_model or find_comms_model(
                topology, cost_model, topology.world_size, topology.local_world_size
            )
            groups = find_rank_groups(topology, self.comms_model, cost_model)
        self.cost_model = ConcurrentCostModel.of(self.cost_model, self.comms_model)
        for warning in caught:
            warnings.warn(warning.message, warning.category, stacklevel=3)
        texts = dict.fromkeys(str(w.message) for w in caught)
        self.warnings: tuple[str, ...] = tuple(texts)
        self.pricer = ShardPricer(
            topology, self.reader, self.cost_model, groups, self.launch_ms
        )
        self._simulator: Simulator | None = None
        self._launch: tuple[float, float] | None = None
        self._launches_added = False

    def simulator(self, task: ShardingTask) -> Simulator:
        """Return a simulator; one for the same tables keeps its encodings."""
        known = self._simulator
        if (
            known is None
            or known.task.tables != task.tables
            or known.task.batch_size != task.batch_size
        ):
            self._simulator = Simulator(task, self.cost_model, self.comms_model)
            return self._simulator
        return known.for_task(task)

    def single_perfs(self, options: Sequence[ShardingOption]) -> list[list[Perf]]:
        """Cost of each shard alone on a rank, in one batch.

        Args:
            options: Costed options.

        Returns:
            One `Perf` per shard of each option.

        Raises:
            ConfigError: The cost model predicts something that is not a time.
        """
        if not options:
            return []
        staged = self.pricer.stage(options)
        compute_N2 = self.pricer.single_compute(staged)
        self._check_finite(
            compute_N2, lambda n: table_name(options[staged.option_N[n]])
        )
        comms_N3 = self.pricer.single_comms(staged)
        perfs = iter(_perfs(staged, compute_N2, comms_N3))
        return [[next(perfs) for _ in option.shards] for option in options]

    def launch_ms(self) -> tuple[float, float]:
        """Forward and backward of the smallest kernel: what any kernel costs."""
        if self._launch is None:
            tiny = TableConfig(
                name="launch", num_embeddings=1, embedding_dim=4, pooling_factor=1.0
            )
            task = ShardingTask(tables=(tiny,), world_size=1, batch_size=1)
            simulator = Simulator(task, self.cost_model, self.comms_model)
            forward, backward = simulator.single_costs([(0, 4)])[0]
            self._launch = float(forward), float(backward)
        return self._launch

    def add_launches(self, options: Sequence[ShardingOption]) -> None:
        """Add the launch of a kernel to each shard of options of stock cost, in place.

        Args:
            options: Options with TorchRec's own estimates.
        """
        self._launches_added = True
        forward, backward = self.launch_ms()
        for option in options:
            if is_dense(option):
                continue
            for shard in option.shards:
                shard.perf.fwd_compute += forward
                shard.perf.bwd_compute += backward

    def share_launches(self, options: Sequence[ShardingOption]) -> None:
        """Count each rank's launch of a kernel once for all shards in it, in place.

        Args:
            options: Placed options; changed are those of stock cost, after
                `add_launches`.
        """
        if not self._launches_added:
            return
        kernels: dict[tuple[Any, ...], list[Any]] = {}
        for option in options:
            if not is_dense(option) and not self.reader.is_costed(option):
                key = fusion_key(option, self.reader, option.sharding_type)
                for shard in option.shards:
                    kernels.setdefault((shard.rank, key), []).append(shard)
        forward, backward = self.launch_ms()
        for shards in kernels.values():
            excess = 1 - 1 / len(shards)
            for shard in shards:
                shard.perf.fwd_compute -= forward * excess
                shard.perf.bwd_compute -= backward * excess

    def lower(self, plan: Sequence[ShardingOption]) -> LoweredPlan:
        """Describe a plan whose shards have ranks."""
        return lower_plan(plan, self.reader, self.topology)

    def evaluate(self, lowered: LoweredPlan) -> PredictedCosts:
        """Predict one iteration.

        Tables that the cost model has no price for count with the costs that their
        shards carry.

        Raises:
            ConfigError: The cost model predicts something that is not a time.
        """
        costed, stock = self._split(lowered)
        stages: list[StageCosts] = []
        uncertainty = 0.0
        if costed:
            staged = self.pricer.stage(costed)
            stages += self._stages(staged)
            uncertainty = self.pricer.uncertainty(staged)
        if stock:
            stages.append(self._stock_stage(stock))
        return PredictedCosts(
            stages=tuple(stages),
            uncertainty=uncertainty,
            compute_source=self._compute_source(costed, stock),
            comms_source=self.comms_model.source,
        )

    def fixed_ms(self, lowered: LoweredPlan) -> float:
        """Critical path of the tables whose sharding type leaves one placement."""
        fixed = [
            o
            for o in lowered.others
            if o.sharding_type in _ONE_PLACEMENT and self.reader.is_costed(o)
        ]
        if not fixed:
            return 0.0
        return sum(s.critical_path_ms for s in self._stages(self.pricer.stage(fixed)))

    def _split(
        self, lowered: LoweredPlan
    ) -> tuple[list[ShardingOption], list[ShardingOption]]:
        """Options that have a price, and those of stock cost."""
        others = {True: list(lowered.described), False: []}
        for option in lowered.others:
            others[self.reader.is_costed(option)].append(option)
        return others[True], others[False]

    def _stages(self, staged: StagedShards) -> tuple[StageCosts, ...]:
        names = staged.fused.stage_names
        compute_WG2 = self.pricer.fused_compute(staged)
        cell = (staged.rank_N, staged.group_N)
        np.add.at(compute_WG2, cell, staged.extra_N2 + _prefetches(staged))
        member_SG = np.eye(len(names))[:, list(staged.fused.stages)]
        compute_WS2 = np.matmul(member_SG, compute_WG2)
        phases_WS5 = in_phases(compute_WS2, self.pricer.comms(staged))
        for number, name in enumerate(names):
            self._check_finite(phases_WS5[:, number], partial(_rank_name, name))
        return stage_costs(names, phases_WS5)

    def _compute_source(
        self, costed: Sequence[ShardingOption], stock: Sequence[ShardingOption]
    ) -> str:
        estimated = sum(map(is_estimated, costed)) + len(stock)
        if not estimated:
            return self.cost_model.source
        total = len(costed) + len(stock)
        return f"{self.cost_model.source}; estimated for {estimated} of {total} tables"

    def estimate_warnings(self, lowered: LoweredPlan) -> tuple[str, ...]:
        """Say which tables of a plan run kernels whose cost is an estimate."""
        costed, stock = self._split(lowered)
        replicas = [o for o in costed if is_dense(o)]
        offloaded = [o for o in costed if is_estimated(o) and not is_dense(o)]
        texts = (
            (
                replicas,
                "data-parallel: TorchRec's dense kernel and the optimizer's pass over "
                "all rows are derived from the fused kernel",
            ),
            (offloaded, "in the host's memory: kernels that read it were not measured"),
            (stock, "outside the cost model: their cost is TorchRec's estimate"),
        )
        return tuple(f"{_some(options)}: {text}" for options, text in texts if options)

    def _stock_stage(self, options: Sequence[ShardingOption]) -> StageCosts:
        """Costs that the options' shards carry."""
        phases = np.zeros((self.topology.world_size, len(PHASES)))
        for option in options:
            for shard in option.shards:
                perf = shard.perf
                phases[shard.rank] += (
                    0.0,
                    # TorchRec counts prefetching as blocking.
                    perf.fwd_compute + getattr(perf, "prefetch_compute", 0.0),
                    perf.fwd_comms,
                    perf.bwd_comms,
                    perf.bwd_compute,
                )
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
        costed = [o for o in plan if self.reader.is_costed(o)]
        if not costed:
            return
        staged = self.pricer.stage(costed)
        num_groups, num_stages = len(staged.fused.stages), len(staged.fused.stage_names)
        compute_N2 = staged.extra_N2 + _share(
            self.pricer.single_compute(staged) - staged.extra_N2,
            staged.rank_N * num_groups + staged.group_N,
            self.pricer.fused_compute(staged).reshape(-1, 2),
        )
        index_N, columns_N, gradients_N = staged.loads_N3.T
        comms_N3 = _share(
            np.stack([index_N, columns_N, columns_N + gradients_N], axis=1),
            staged.rank_N * num_stages + staged.stage_N,
            self.pricer.comms(staged).reshape(-1, 3),
        )
        perfs = _perfs(staged, compute_N2, comms_N3)
        for shard, perf in zip(staged.shards, perfs, strict=True):
            shard.perf = perf

    def range_warnings(self, lowered: LoweredPlan) -> tuple[str, ...]:
        """Name tables whose shards lie outside what the cost model was trained on."""
        texts: tuple[str, ...] = ()
        if lowered.task is not None:
            texts = range_messages(self.simulator(lowered.task), lowered.placement)
        others = [o for o in lowered.others if self.reader.is_costed(o)]
        if not others:
            return texts
        names = [table_name(o) for o in others for _ in o.shards]
        found = self.cost_model.range_warnings(self.pricer.features(others))
        more = {
            (names[w.shard], w.feature): f"table '{names[w.shard]}': {w.feature} "
            f"{w.value:.4g} is outside the cost model's range {w.low:.4g} to "
            f"{w.high:.4g}"
            for w in found
        }
        return texts + tuple(list(more.values())[:MAX_WARNINGS])

    def _check_finite(
        self, values: npt.NDArray[Any], name: Callable[[int], str]
    ) -> None:
        wrong = np.flatnonzero(~np.isfinite(values).all(axis=1) | (values < 0).any(1))
        if len(wrong):
            raise ConfigError(
                f"cost model '{self.cost_model.name}' predicts {values[wrong[0]]} ms "
                f"for {name(int(wrong[0]))}; a time must be finite and at least 0. "
                "Train the model again or pass another cost_model"
            )


class CostedPart:
    """What the parts of the planner have in common: the cost of plans.

    Args:
        topology: The devices to plan for.
        constraints: Table name -> TorchRec's constraints on it.
        cost_model: "auto", a bundle's name or folder, or a model.
        comms_model: None: as measured, else as published, else by the topology.
        profiles: Feature name -> its measured profile.
        costs: Shares one loaded cost model between parts; replaces the three above.
    """

    def __init__(
        self,
        topology: Topology,
        constraints: Mapping[str, ParameterConstraints] | None = None,
        *,
        cost_model: str | Path | CostModel = "auto",
        comms_model: CommsModel | None = None,
        profiles: Mapping[str, FeatureProfile] | None = None,
        costs: PlanCosts | None = None,
    ) -> None:
        self.costs = costs or PlanCosts(
            topology,
            constraints,
            cost_model=cost_model,
            comms_model=comms_model,
            profiles=profiles,
        )


def _rank_name(stage: str, rank: int) -> str:
    return f"rank {rank} of {stage}"


def _prefetches(staged: StagedShards) -> npt.NDArray[np.float64]:
    """Prefetching of caches, `N x 2` [ms]: TorchRec's estimate, which blocks."""
    prefetches = np.zeros((len(staged.option_N), 2))
    start = 0
    for option in staged.options:
        own = slice(start, start + len(option.shards))
        start = own.stop
        if option.cache_params is not None:
            prefetches[own, 0] = [
                getattr(shard.perf, "prefetch_compute", 0.0) for shard in option.shards
            ]
    return prefetches


def _perfs(
    staged: StagedShards,
    compute_N2: npt.NDArray[np.float64],
    comms_N3: npt.NDArray[np.float64],
) -> list[Perf]:
    """TorchRec's record of each shard's costs."""
    return [
        Perf(
            fwd_compute=forward,
            fwd_comms=index + fwd_comms,
            bwd_compute=backward,
            bwd_comms=bwd_comms,
            prefetch_compute=prefetch,
        )
        for prefetch, (forward, backward), (index, fwd_comms, bwd_comms) in zip(
            _prefetches(staged)[:, 0].tolist(),
            compute_N2.tolist(),
            comms_N3.tolist(),
            strict=True,
        )
    ]


def _some(options: Sequence[ShardingOption], most: int = 3) -> str:
    """Name the first tables and count the rest."""
    names = [f"'{table_name(o)}'" for o in options]
    more = f" and {len(names) - most} more" if len(names) > most else ""
    tables = "table" if len(names) == 1 else "tables"
    return f"{tables} {', '.join(names[:most])}{more}"


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
