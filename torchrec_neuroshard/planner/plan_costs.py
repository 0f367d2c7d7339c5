"""The cost of a whole plan: one place for all parts of the planner.

Shapes: `N` shards, `W` ranks, `G` fusion groups, `S` stages, `P` phases.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torchrec.distributed.planner.constants import (
    CROSS_NODE_BANDWIDTH,
    HBM_MEM_BW,
    INTRA_NODE_BANDWIDTH,
)
from torchrec.distributed.planner.types import (
    ParameterConstraints,
    Perf,
    ShardingOption,
    Topology,
)

from torchrec_neuroshard.cost_models import (
    BandwidthCommsModel,
    CommsModel,
    CostModel,
    load_comms_model,
    load_cost_model,
)
from torchrec_neuroshard.errors import ConfigError
from torchrec_neuroshard.placement import ShardingTask
from torchrec_neuroshard.planner.lowering import (
    LoweredPlan,
    TableReader,
    fusion_key,
    is_dense,
    lower_plan,
)
from torchrec_neuroshard.profiles import FeatureProfile
from torchrec_neuroshard.search.default import range_messages
from torchrec_neuroshard.simulator import (
    PHASES,
    PredictedCosts,
    RankCosts,
    Simulator,
    StageCosts,
)
from torchrec_neuroshard.tables import TableConfig

__all__ = ["CostedPart", "PlanCosts"]

_GB_PER_S = 1e-6
"""TorchRec counts bandwidth in bytes per millisecond."""


class PlanCosts:
    """Costs of sharding options and plans, by one cost model and one topology.

    Attributes:
        reader: Describes sharding options as tables.
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
                links of this GPU, else bytes over the topology's bandwidths.
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
                hbm_gb_per_s=None if given == HBM_MEM_BW else given * _GB_PER_S,
            )
            self.comms_model = comms_model or _comms_model(topology, cost_model)
        for warning in caught:
            warnings.warn(warning.message, warning.category, stacklevel=3)
        self.warnings: tuple[str, ...] = tuple(str(w.message) for w in caught)
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
        shared = copy.copy(known)
        shared.task = task
        return shared

    def single_perfs(self, options: Sequence[ShardingOption]) -> list[list[Perf]]:
        """Cost of each shard alone on a rank, in one batch.

        Args:
            options: Described options.

        Returns:
            One `Perf` per shard of each option.

        Raises:
            ConfigError: The cost model predicts something that is not a time.
        """
        if not options:
            return []
        tables: dict[int, int] = {}
        distinct: list[TableConfig] = []
        pairs: list[tuple[int, int]] = []
        for option in options:
            table = self.reader.table(option)
            if id(table) not in tables:
                tables[id(table)] = len(distinct)
                distinct.append(table)
            index = tables[id(table)]
            pairs += [(index, int(s.size[1])) for s in option.shards]
        task = ShardingTask(
            tables=tuple(distinct),
            world_size=self.topology.world_size,
            batch_size=options[0].batch_size * self.topology.world_size,
            local_world_size=self.topology.local_world_size,
        )
        simulator = self.simulator(task)
        compute_N2 = simulator.single_costs(pairs)
        self._check_finite(compute_N2, [task.tables[i].name for i, _ in pairs])
        columns_NW = np.zeros((len(pairs), task.world_size))
        columns_NW[:, 0] = [
            width * simulator.features_per_table[index] for index, width in pairs
        ]
        bytes_NW = np.zeros_like(columns_NW)
        bytes_NW[:, 0] = simulator.index_bytes_per_table[[i for i, _ in pairs]]
        comms_N3 = simulator.comms_costs(columns_NW[..., None], bytes_NW[..., None])[
            :, 0, 0
        ]
        perfs = iter(_perfs(compute_N2, comms_N3))
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
            options: Placed options of stock cost, after `add_launches`.
        """
        if not self._launches_added:
            return
        kernels: dict[tuple[Any, ...], list[Any]] = {}
        for option in options:
            if not is_dense(option):
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

        Tables outside the placement count with the costs that their shards carry.

        Raises:
            ConfigError: The cost model predicts something that is not a time.
        """
        stages: list[StageCosts] = []
        uncertainty = 0.0
        if lowered.task is not None:
            predicted = self.simulator(lowered.task).evaluate(lowered.placement)
            uncertainty = predicted.uncertainty
            for stage in predicted.stages:
                values = [[getattr(r, p) for p in PHASES] for r in stage.ranks]
                names = [f"rank {r} of {stage.name}" for r in range(len(values))]
                self._check_finite(np.array(values), names)
            stages += predicted.stages
        if lowered.others:
            stages.append(self._stock_stage(lowered.others))
        return PredictedCosts(
            stages=tuple(stages),
            uncertainty=uncertainty,
            compute_source=self.cost_model.source,
            comms_source=self.comms_model.source,
        )

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
        lowered = self.lower(plan)
        if lowered.task is None:
            return
        task = lowered.task
        simulator = self.simulator(task)
        loads = simulator.rank_loads(lowered.placement)
        compute_WG2 = simulator.compute_costs(loads.sums_CWGE)
        comms_WS3 = simulator.comms_costs(
            loads.columns_CWS[None], loads.index_bytes_CWS[None]
        )[0]
        flat = [
            (index, option, shard)
            for index, option in enumerate(lowered.described)
            for shard in option.shards
        ]
        pairs = [(index, int(s.size[1])) for index, _, s in flat]
        index_N = np.array([index for index, _ in pairs])
        rank_N = np.array([s.rank for _, _, s in flat])
        group_N = np.asarray(task.groups)[index_N]
        columns_N = simulator.features_per_table[index_N] * [w for _, w in pairs]
        bytes_N = simulator.index_bytes_per_table[index_N]
        compute_N2 = _share(
            simulator.single_costs(pairs),
            rank_N * task.num_groups + group_N,
            compute_WG2.reshape(-1, 2),
        )
        comms_N3 = _share(
            np.stack([bytes_N, columns_N, columns_N], axis=1),
            rank_N * task.num_stages + np.asarray(task.stages)[group_N],
            comms_WS3.reshape(-1, 3),
        )
        for (_, _, shard), perf in zip(flat, _perfs(compute_N2, comms_N3), strict=True):
            shard.perf = perf

    def range_warnings(self, lowered: LoweredPlan) -> tuple[str, ...]:
        """Name tables whose shards lie outside what the cost model was trained on."""
        if lowered.task is None:
            return ()
        return range_messages(self.simulator(lowered.task), lowered.placement)

    def _check_finite(self, values: npt.NDArray[Any], names: Sequence[str]) -> None:
        wrong = np.flatnonzero(~np.isfinite(values).all(axis=1) | (values < 0).any(1))
        if len(wrong):
            raise ConfigError(
                f"cost model '{self.cost_model.name}' predicts {values[wrong[0]]} ms "
                f"for {names[wrong[0]]}; a time must be finite and at least 0. Train "
                "the model again or pass another cost_model"
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


def _perfs(
    compute_N2: npt.NDArray[np.float64], comms_N3: npt.NDArray[np.float64]
) -> list[Perf]:
    """TorchRec's record of each shard's costs."""
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


def _comms_model(topology: Topology, cost_model: str | Path | CostModel) -> CommsModel:
    """Find the collectives' model: measured, published, or the topology's bandwidths.

    Bandwidths that the caller gave the topology replace the measured ones; TorchRec's
    own defaults replace nothing, but stand in for links that were not measured.
    """
    intra, inter = topology.intra_host_bw, topology.inter_host_bw
    given_intra, given_inter = (
        intra != INTRA_NODE_BANDWIDTH,
        inter != CROSS_NODE_BANDWIDTH,
    )
    if not isinstance(cost_model, CostModel):
        known = load_comms_model(
            cost_model,
            device_type=topology.compute_device,
            world_size=topology.world_size,
            local_world_size=topology.local_world_size,
            intra_gb_per_s=intra * _GB_PER_S if given_intra else None,
            inter_gb_per_s=inter * _GB_PER_S if given_inter else None,
            unmeasured_inter_gb_per_s=inter * _GB_PER_S,
        )
        if known is not None:
            return known
    given = given_intra or given_inter
    return BandwidthCommsModel(
        world_size=topology.world_size,
        local_world_size=topology.local_world_size,
        intra_gb_per_s=intra * _GB_PER_S,
        inter_gb_per_s=inter * _GB_PER_S,
        source=f"{'topology' if given else 'TorchRec default'} bandwidths, "
        "not measured",
    )
