"""The cost of a whole plan: one place for all parts of the planner.

Shapes: `N` shards, `W` ranks, `G` fusion groups.
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
from torchrec_neuroshard.simulator import PredictedCosts, RankCosts, Simulator
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
            comms_model: None: bytes over the topology's bandwidths.
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
        for warning in caught:
            warnings.warn(warning.message, warning.category, stacklevel=3)
        self.warnings: tuple[str, ...] = tuple(str(w.message) for w in caught)
        self.comms_model = comms_model or _comms_model(topology)
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
        comms_N2 = self.comms_model.all_to_all(columns_NW, task.batch_size)[:, 0]
        rows = iter(np.concatenate([compute_N2, comms_N2], axis=1).tolist())
        return [
            [
                Perf(
                    fwd_compute=forward,
                    fwd_comms=fwd_comms,
                    bwd_compute=backward,
                    bwd_comms=bwd_comms,
                )
                for _, (forward, backward, fwd_comms, bwd_comms) in zip(
                    option.shards, rows, strict=False
                )
            ]
            for option in options
        ]

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
        world_size = self.topology.world_size
        phases = np.zeros((world_size, 4))
        uncertainty = 0.0
        if lowered.task is not None:
            predicted = self.simulator(lowered.task).evaluate(lowered.placement)
            uncertainty = predicted.uncertainty
            phases += [
                (r.fwd_compute, r.fwd_comms, r.bwd_comms, r.bwd_compute)
                for r in predicted.ranks
            ]
            self._check_finite(phases, [f"rank {r}" for r in range(world_size)])
        for option in lowered.others:
            for shard in option.shards:
                perf = shard.perf
                phases[shard.rank] += (
                    # TorchRec counts prefetching as blocking.
                    perf.fwd_compute + getattr(perf, "prefetch_compute", 0.0),
                    perf.fwd_comms,
                    perf.bwd_comms,
                    perf.bwd_compute,
                )
        return PredictedCosts(
            ranks=tuple(RankCosts(*map(float, row)) for row in phases),
            critical_path_ms=float(phases.max(axis=0).sum()),
            uncertainty=uncertainty,
            compute_source=self.cost_model.source,
            comms_source=self.comms_model.source,
        )

    def attribute(self, plan: Sequence[ShardingOption]) -> None:
        """Share each rank's cost out to its shards, in place.

        Afterwards the shards' `Perf` of a rank add up to the cost of the set, so that
        TorchRec's own sums over shards (its stats, its default performance model)
        agree with it. A shard's part is in proportion to its cost alone.
        """
        lowered = self.lower(plan)
        if lowered.task is None:
            return
        simulator = self.simulator(lowered.task)
        sums, columns_WG = simulator.rank_sums(lowered.placement)
        compute_WG2 = simulator.compute_costs(sums)
        columns_W = columns_WG.sum(axis=1)
        comms_W2 = self.comms_model.all_to_all(
            columns_W[None], lowered.task.batch_size
        )[0]
        flat = [
            (index, option, shard)
            for index, option in enumerate(lowered.described)
            for shard in option.shards
        ]
        pairs = [(index, int(s.size[1])) for index, _, s in flat]
        singles_N2 = simulator.single_costs(pairs)
        rank_N = np.array([s.rank for _, _, s in flat])
        group_N = np.asarray(lowered.task.groups)[[index for index, _, _ in flat]]
        columns_N = np.array(
            [w * simulator.features_per_table[index] for index, w in pairs]
        )
        set_N = rank_N * lowered.task.num_groups + group_N
        compute_N2 = _share(singles_N2, set_N, compute_WG2.reshape(-1, 2))
        comms_N2 = _share(np.stack([columns_N, columns_N], 1), rank_N, comms_W2)
        for (_, _, shard), compute, comms in zip(
            flat, compute_N2.tolist(), comms_N2.tolist(), strict=True
        ):
            shard.perf = Perf(
                fwd_compute=compute[0],
                fwd_comms=comms[0],
                bwd_compute=compute[1],
                bwd_comms=comms[1],
            )

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
        comms_model: None: bytes over the topology's bandwidths.
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


def _share(
    weights_N2: npt.NDArray[np.float64],
    set_N: npt.NDArray[np.int64],
    totals_S2: npt.NDArray[np.float64],
) -> npt.NDArray[np.float64]:
    """Split each set's total over its members in proportion to their weights."""
    sums = np.zeros_like(totals_S2)
    counts = np.zeros(len(totals_S2))
    np.add.at(sums, set_N, weights_N2)
    np.add.at(counts, set_N, 1.0)
    equal = 1 / counts[set_N]
    known = sums[set_N]
    share = np.where(
        known > 0, weights_N2 / np.where(known > 0, known, 1), equal[:, None]
    )
    out: npt.NDArray[np.float64] = share * totals_S2[set_N]
    return out


def _comms_model(topology: Topology) -> CommsModel:
    intra, inter = topology.intra_host_bw, topology.inter_host_bw
    default = (intra, inter) == (INTRA_NODE_BANDWIDTH, CROSS_NODE_BANDWIDTH)
    return BandwidthCommsModel(
        world_size=topology.world_size,
        local_world_size=topology.local_world_size,
        intra_gb_per_s=intra * _GB_PER_S,
        inter_gb_per_s=inter * _GB_PER_S,
        source=f"{'TorchRec default' if default else 'topology'} bandwidths, "
        "not measured",
    )
