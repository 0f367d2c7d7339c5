"""The planners of the comparison."""

from __future__ import annotations

import copy
import dataclasses
import functools
import statistics
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import (
    EmbeddingShardingPlanner,
    ParameterConstraints,
    Topology,
)
from torchrec.distributed.planner.constants import DDR_MEM_BW, HBM_MEM_BW
from torchrec.distributed.planner.proposers import DynamicProgrammingProposer
from torchrec.distributed.planner.storage_reservations import (
    FixedPercentageStorageReservation,
)

from harness.tasks import (
    PRODUCTION_WIDTHS,
    power_of_two_widths,
)
from papers.annealing import AnnealingConfig, AnnealingSearcher
from papers.data import LabelConfig, label_placements
from papers.nets import PaperTrainConfig, fit_comms
from planner_comparison.clusters import CLUSTERS, Cluster
from planner_comparison.embark import HottestSplitSearcher
from planner_comparison.paired import (
    ALL_TYPES,
    BEST_PRACTICE,
    COLUMNS,
    DEFAULT_BANDWIDTH,
    FEW_SETS,
    OURS,
    PAPER,
    PAPER_NETS,
    SPLIT_TYPES,
    UNMEASURED,
)
from planner_comparison.tasks import BATCH_SIZES, OPTIMIZERS, SEED_TABLES, Task
from torchrec_neuroshard.bundles.find import (
    load_cost_model,
    physical_estimate,
)
from torchrec_neuroshard.hardware.cards import GPU_CARDS, find_card
from torchrec_neuroshard.models.adjusted import AdjustedCostModel
from torchrec_neuroshard.models.base import CommsModel, CostModel
from torchrec_neuroshard.models.published_links import (
    PublishedCommsModel,
    card_collectives,
)
from torchrec_neuroshard.papers.autoshard import AutoShardSearcher
from torchrec_neuroshard.papers.dreamshard import DreamShardSearcher
from torchrec_neuroshard.papers.neuroshard import NeuroShardConfig, PaperSearcher
from torchrec_neuroshard.papers.neuroshard_models import (
    CommsNets,
    ComputeNet,
    NeuroShardModels,
    load_models,
)
from torchrec_neuroshard.papers.policies import PolicySearcher
from torchrec_neuroshard.planner import NeuroShardPlanner
from torchrec_neuroshard.search import Searcher
from torchrec_neuroshard.tables.features import table_features

MIN_PARTITION = 32
LABELLED = "labelled_"
"""Prefix of the folders with NeuroShard's nets."""
_COMMS_SAMPLES, _COMMS_EPOCHS, _COMMS_BATCH = 4_000, 100, 64
_WIDTHS = sorted({*power_of_two_widths(128), *PRODUCTION_WIDTHS})
"""Widths of the tables on which nets of collectives are trained."""
_BYTES_PER_MS = 1e6
"""Bytes per millisecond, TorchRec's unit, in a GB/s."""
_CPU_FUSED_SHARE = 0.5
"""Share of the memory bandwidth that TorchRec expects of fused kernels on a CPU."""
_COLUMN_AND_TABLE = ["table_wise", "column_wise"]
_ALL_TYPES = ["data_parallel", *_COLUMN_AND_TABLE, "table_column_wise", "row_wise"]
_IN_NODE = "table_row_wise"
"""Offered only if all ranks are in one node, where it runs as `row_wise` does. Grid
sharding is never offered."""


class Sharder(EmbeddingBagCollectionSharder):  # type: ignore[misc]
    """Sharder that offers the sharding types of GPUs on CPUs, too.

    The plans are for a GPU cluster, with CPU kernels in place of GPU kernels. On CPUs
    TorchRec does not offer to split rows.
    """

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Return the sharding types of GPUs; see `ModuleSharder`."""
        del compute_device_type
        types: list[str] = super().sharding_types("cuda")
        return types


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """Costs for planners that take a cost model."""

    compute: CostModel
    comms: CommsModel
    """Collectives of the task's ranks and cluster."""


@dataclass(frozen=True, slots=True)
class Rival:
    """A planner of the comparison. Each task gets a new instance."""

    name: str
    about: str
    make: Callable[[Task, Costs, str], EmbeddingShardingPlanner]
    """Function of the task, the costs and the device type."""
    training: Callable[[], str] = str
    """Returns a description of the training; empty without training."""


def make_rivals(
    names: Sequence[str] | None,
    trained: Path,
    solver_seconds: float,
    hardware: str,
    few_sets: str | None = None,
    other: str | None = None,
) -> list[Rival]:
    """Return the planners that can run here.

    Args:
        names: Names of planners. None: all.
        trained: Folder whose folders have NeuroShard's nets or a policy. Those of other
            hardware are left out. The folder need not exist.
        solver_seconds: Time budget of searches that use all their time.
        hardware: Device of the cost model.
        few_sets: Bundle of the device that was calibrated on few sets. None: the
            planner with it is left out.
        other: Bundle of another device. None: the planner with it is left out.

    Raises:
        ValueError: A name is unknown.
    """
    rivals = [
        *_ours(few_sets, other),
        *_learned(trained, hardware),
        *_solvers(solver_seconds),
        *_stock(hardware),
    ]
    if names is None:
        return rivals
    known = {r.name: r for r in rivals}
    unknown = sorted(set(names) - set(known))
    if unknown:
        raise ValueError(f"unknown planner {unknown[0]!r}; known: {', '.join(known)}")
    return [known[name] for name in names]


def _ours(few_sets: str | None, other: str | None) -> Iterator[Rival]:
    yield Rival(OURS, "this planner with its defaults, all sharding types", _neuroshard)
    yield Rival(
        COLUMNS,
        "the same, table- and column-wise",
        functools.partial(_neuroshard, types=_COLUMN_AND_TABLE),
    )
    yield Rival(
        UNMEASURED,
        "this planner with the physical estimate of kernels, all sharding types",
        functools.partial(_on_kernels, _estimate),
    )
    if few_sets is not None:
        yield Rival(
            FEW_SETS,
            "this planner with another CPU's bundle, calibrated here on 100 sets, all "
            "sharding types",
            functools.partial(
                _on_kernels, lambda _, device: _kernels(few_sets, device)
            ),
        )
    if other is not None:
        yield Rival(
            f"{OURS}, bundle {other}",
            f"this planner with the bundle `{other}`, all sharding types",
            functools.partial(_on_kernels, lambda _, device: _kernels(other, device)),
        )


def _estimate(costs: Costs, device: str) -> CostModel:
    """Return the physical estimate of the costs' device."""
    return physical_estimate(device, card=find_card(costs.compute.hardware))


def _on_kernels(
    kernels: Callable[[Costs, str], CostModel], task: Task, costs: Costs, device: str
) -> NeuroShardPlanner:
    """Return our planner with other costs of kernels."""
    faster = FasterKernels.of(kernels(costs, device), task.kernels_faster)
    return _neuroshard(task, dataclasses.replace(costs, compute=faster), device)


def _learned(trained: Path, hardware: str) -> Iterator[Rival]:
    yield search_rival(
        PAPER,
        "NeuroShard's loops as published, table- and column-wise, with this planner's "
        "cost model",
        lambda: PaperSearcher(NeuroShardConfig(costs="shared")),
    )
    if nets := _nets(trained, hardware):
        yield Rival(
            PAPER_NETS,
            "the same loops and types with NeuroShard's nets for the task's "
            "optimizer, trained on our model's predictions for the tasks' batches, "
            "rows and widths (100,000 sets, 1,000 epochs), with alternating seeds",
            functools.partial(_on_own_nets, nets),
            functools.partial(_cards, nets),
        )
    for kind in (AutoShardSearcher, DreamShardSearcher):
        own = _policies(trained, kind, hardware)
        yield Rival(
            kind.method,
            "trained policy, whole tables",
            functools.partial(_on_policy, own),
            functools.partial(_training, own),
        )


def _nets(trained: Path, hardware: str) -> list[NeuroShardModels]:
    """Return NeuroShard's nets for the hardware, one for each optimizer and seed."""
    found = [load_models(folder) for folder in sorted(trained.glob(f"{LABELLED}*"))]
    return [nets for nets in found if nets.info.fingerprint.device == hardware]


def _recipe(nets: NeuroShardModels) -> dict[str, Any]:
    return dict(nets.info.trained_on["settings"]["recipe"])


def nets_for(nets: Sequence[NeuroShardModels], task: Task) -> NeuroShardModels:
    """Return nets for a task's optimizer, with a seed chosen by the task's name."""
    own = [n for n in nets if _recipe(n)["optimizer"] == task.optimizer]
    return own[zlib.crc32(task.name.encode()) % len(own)]


def _on_own_nets(
    nets: Sequence[NeuroShardModels], task: Task, costs: Costs, device: str
) -> NeuroShardPlanner:
    comms = {task.world_size: _imitated(task.cluster, task.world_size)}
    own = nets_for(nets, task)
    kernels = _faster_net(own.compute, task.kernels_faster)
    own = dataclasses.replace(own, compute=kernels, comms=comms)
    config = NeuroShardConfig(costs="own")
    searcher = PaperSearcher(config, models=own)
    return _neuroshard(task, costs, device, searcher, _COLUMN_AND_TABLE)


def _faster_net(net: ComputeNet, faster: float) -> ComputeNet:
    """Return a net whose kernels take `faster` times less."""
    net = copy.deepcopy(net)
    last = net.head[-1]
    assert isinstance(last, torch.nn.Linear)
    with torch.no_grad():
        last.weight.div_(faster)
        last.bias.div_(faster)
    return net


@functools.cache
def _imitated(cluster: str, world_size: int) -> CommsNets:
    """Return nets of a cluster's collectives, the same for all tasks as in the paper.

    They are trained on tables like those of the tasks, placed by the paper's rule.
    """
    low, high = SEED_TABLES

    def columns(rng: np.random.Generator) -> list[int]:
        count = rng.integers(max(low, 2 * world_size), high + 1)
        return [int(w) for w in rng.choice(_WIDTHS, count)]

    batch_sizes = tuple(sorted(set(BATCH_SIZES)))
    drawn = LabelConfig(batch_sizes=batch_sizes, num_samples=_COMMS_SAMPLES)
    comms = _ClusterComms(CLUSTERS[cluster], world_size)
    samples = label_placements(comms, world_size, drawn, columns)
    config = PaperTrainConfig(epochs=_COMMS_EPOCHS, batch_samples=_COMMS_BATCH)
    nets, _, _ = fit_comms(*samples, config)
    return nets


def _cards(nets: Sequence[NeuroShardModels]) -> str:
    """Say how nets were trained, and how far they are off their labels."""
    cards = []
    for own in nets:
        recipe = _recipe(own)
        report = own.info.trained_on["judgements"][0]["report"]
        error = report["test_mse"] ** 0.5
        cards.append(
            f"{recipe['optimizer']}, seed {recipe['seed']}: {recipe['epochs']:,} epochs"
            f" on {report['num_training']:,} sets, off by {error:.2f} ms (rms)"
        )
    return "; ".join(cards)


def _policies(
    trained: Path, kind: type[PolicySearcher], hardware: str
) -> dict[str, PolicySearcher]:
    """Return optimizer -> a method's policy, the shipped one if none was trained."""
    found = dict.fromkeys(OPTIMIZERS, kind())
    for folder in sorted(trained.glob(f"{kind.method}_*")):
        searcher = kind(folder)
        info = searcher.policy.info
        if info.hardware == hardware:
            for optimizer in info.trained_on["settings"]["tasks"]["optimizers"]:
                found[optimizer] = searcher
    return found


def _on_policy(
    policies: Mapping[str, PolicySearcher], task: Task, costs: Costs, device: str
) -> NeuroShardPlanner:
    return _neuroshard(task, costs, device, policies[task.optimizer], _COLUMN_AND_TABLE)


def _training(policies: Mapping[str, PolicySearcher]) -> str:
    """Return how long policies were trained, and on which device's costs."""
    infos = {p.policy.info.name: p.policy.info for p in policies.values()}
    return "; ".join(
        f"{name}: {info.trained_on['training_seconds']:.0f} s on {info.hardware}"
        for name, info in infos.items()
    )


def _solvers(seconds: float) -> Iterator[Rival]:
    yield search_rival(
        "embark",
        "EMBark's published loop (split the costliest shard, place, repeat) with our "
        "cost model, table- and column-wise",
        HottestSplitSearcher,
    )
    yield search_rival(
        "annealing",
        "simulated annealing with our cost model, table- and column-wise, at most "
        f"{seconds:g} s",
        lambda: AnnealingSearcher(AnnealingConfig(time_budget_seconds=seconds)),
    )


def _stock(hardware: str) -> Iterator[Rival]:
    """Yield TorchRec's planner in several settings.

    On a card, each setting comes a second time with the bandwidth of memory that
    TorchRec assumes without being told.
    """
    yield _torchrec(
        "torchrec, default",
        "TorchRec's planner, which assumes one lookup per sample; all types",
        pooling_factors=False,
    )
    split = {"min_partition": MIN_PARTITION}
    settings: dict[str, tuple[str, dict[str, Any]]] = {
        BEST_PRACTICE: (
            "TorchRec's planner, pooling factors, table- and column-wise, "
            f"min_partition={MIN_PARTITION}",
            {"types": _COLUMN_AND_TABLE, **split},
        ),
        ALL_TYPES: ("TorchRec's planner, pooling factors, all types", {}),
        SPLIT_TYPES: (f"the same, min_partition={MIN_PARTITION}", split),
    }
    for name, (about, given) in settings.items():
        yield _torchrec(name, about, **given)
    for name, (_, given) in settings.items() if find_card(hardware) else ():
        yield _torchrec(
            name + DEFAULT_BANDWIDTH,
            f"`{name}` with TorchRec's default bandwidth of memory instead of the "
            "card's",
            knows_bandwidth=False,
            **given,
        )
    yield _torchrec(
        "torchrec, dynamic programming",
        f"`{ALL_TYPES}` with DynamicProgrammingProposer; memory is given as HBM, the "
        "only one it counts",
        in_hbm=True,
        proposer=DynamicProgrammingProposer,
    )


def _torchrec(
    name: str,
    about: str,
    *,
    types: Sequence[str] = (),
    min_partition: int | None = None,
    pooling_factors: bool = True,
    in_hbm: bool = False,
    knows_bandwidth: bool = True,
    **parts: Callable[[], Any],
) -> Rival:
    """Return TorchRec's planner with the given parts."""

    def make(task: Task, costs: Costs, device: str) -> EmbeddingShardingPlanner:
        # Scaled kernels are a GPU's.
        planned_for = "cuda" if in_hbm or task.kernels_faster != 1 else device
        return EmbeddingShardingPlanner(
            topology=_topology(task, costs, planned_for, device, knows_bandwidth),
            batch_size=task.batch_size // task.world_size,
            storage_reservation=FixedPercentageStorageReservation(0.0),
            constraints=_constraints(task, types, min_partition, pooling_factors),
            debug=False,
            **{part: made() for part, made in parts.items()},
        )

    return Rival(name, about, make)


def search_rival(name: str, about: str, make: Callable[[], Searcher]) -> Rival:
    """Return a rival that runs a search in our planner, with our costs."""

    def planner(task: Task, costs: Costs, device: str) -> NeuroShardPlanner:
        return _neuroshard(task, costs, device, make(), _COLUMN_AND_TABLE)

    return Rival(name, about, planner)


def _neuroshard(
    task: Task,
    costs: Costs,
    device: str,
    searcher: Searcher | None = None,
    types: Sequence[str] = (),
    **given: Any,
) -> NeuroShardPlanner:
    """Return our planner, with a searcher and sharding types if given.

    Without types, it uses all types that the cluster offers.
    """
    if searcher is not None:
        given |= {"search": searcher}
    return NeuroShardPlanner(
        topology=_topology(task, costs, device, device),
        batch_size=task.batch_size // task.world_size,
        storage_reservation=FixedPercentageStorageReservation(0.0),
        constraints=_constraints(task, types),
        cost_model=costs.compute,
        comms_model=costs.comms,
        profiles={t.name: t.profile for t in task.tables if t.profile is not None},
        debug=False,
        **given,
    )


def _topology(
    task: Task,
    costs: Costs,
    planned_for: str,
    device: str,
    knows_bandwidth: bool = True,
) -> Topology:
    """Return TorchRec's topology of the cluster, with memory and published links.

    Args:
        task: The task, which names the cluster.
        costs: Costs, which name the device.
        planned_for: Device type in the topology.
        device: Device type of the kernels.
        knows_bandwidth: Whether the bandwidth of memory is the task's or the card's.
            False: TorchRec's default.
    """
    bandwidth = HBM_MEM_BW if device == "cuda" else DDR_MEM_BW  # TorchRec's
    if knows_bandwidth:
        card = find_card(costs.compute.hardware)
        known = task.memory_gb_per_s or (card and card.hbm_gb_per_s.value)
        bandwidth = known * _BYTES_PER_MS if known else bandwidth
    if planned_for != device and task.kernels_faster == 1:
        # The kernels and the speed of the memory are the same; only the name differs.
        bandwidth *= _CPU_FUSED_SHARE
    memory = "hbm" if planned_for == "cuda" else "ddr"
    cluster = CLUSTERS[task.cluster]
    given: dict[str, Any] = {
        f"{memory}_cap": task.memory_bytes,
        f"{memory}_mem_bw": bandwidth,
        "intra_host_bw": cluster.intra_gb_per_s * _BYTES_PER_MS,
        "inter_host_bw": cluster.inter_gb_per_s * _BYTES_PER_MS,
    }
    return Topology(
        world_size=task.world_size,
        local_world_size=cluster.local_world_size(task.world_size),
        compute_device=planned_for,
        **given,
    )


def _constraints(
    task: Task,
    types: Sequence[str],
    min_partition: int | None = None,
    pooling_factors: bool = True,
) -> dict[str, ParameterConstraints]:
    one_node = task.world_size <= CLUSTERS[task.cluster].ranks_per_node
    types = types or [*_ALL_TYPES, *([_IN_NODE] if one_node else [])]
    return {
        t.name: ParameterConstraints(
            pooling_factors=[t.pooling_factor] if pooling_factors else [1.0],
            sharding_types=list(types),
            compute_kernels=["fused", "dense"],
            min_partition=min_partition,
        )
        for t in task.tables
    }


class FasterKernels(AdjustedCostModel):
    """Another model's kernels, a number of times faster."""

    def __init__(self, alone: CostModel, faster: float) -> None:
        """Wrap a model."""
        super().__init__(alone, np.eye(2) / faster, np.eye(2) / faster)
        self.reference_ms /= faster
        self.ids = alone.ids.times(1 / faster)
        self._faster = faster

    @classmethod
    def of(cls, alone: CostModel, faster: float) -> CostModel:
        """Return the faster model; the model itself if nothing changes."""
        return alone if faster == 1 else cls(alone, faster)

    @property
    def stream_byte_ms(self) -> float | None:
        """See `CostModel.stream_byte_ms`."""
        alone = self.alone.stream_byte_ms
        return None if alone is None else alone / self._faster

    def column_order(
        self, bytes_N: npt.NDArray[np.float64]
    ) -> npt.NDArray[np.float64] | None:
        """See `CostModel.column_order`."""
        alone = self.alone.column_order(bytes_N)
        return None if alone is None else alone / self._faster


def faster_on(card: str, cost_model: CostModel, tasks: Sequence[Task]) -> float:
    """Return how many times faster than the model's device a card runs the kernels.

    Each task's tables are dealt to its ranks. A task's ratio is that of the busiest
    ranks, by the model and by the estimate of the card. The result is the median.

    Args:
        card: Name of a GPU card.
        cost_model: Model of the device.
        tasks: The tasks.
    """
    estimate = load_cost_model(card, device_type="cuda")

    def busiest_ms(model: CostModel, task: Task) -> float:
        features_NF = table_features(task.tables, task.batch_size)
        rank_N = np.arange(len(task.tables)) % task.world_size
        ms_W2 = model.predict_sets(features_NF, rank_N, task.world_size)
        return float(ms_W2.sum(axis=1).max())

    return statistics.median(
        busiest_ms(cost_model, t) / busiest_ms(estimate, t) for t in tasks
    )


class _ClusterComms(PublishedCommsModel):
    """Our estimate of a cluster's collectives.

    It says that copies are included, since the comparison times no copies.
    """

    has_copies = True

    def __init__(self, cluster: Cluster, world_size: int) -> None:
        super().__init__(
            # The clusters' collectives are those of B200, with other bandwidths.
            dataclasses.replace(
                card_collectives(GPU_CARDS["b200"]),
                intra_gb_per_s=cluster.intra_gb_per_s,
                inter_gb_per_s=cluster.inter_gb_per_s,
            ),
            world_size=world_size,
            local_world_size=cluster.local_world_size(world_size),
        )


@functools.cache
def load_costs(
    cost_model: str, device: str, cluster: Cluster, world_size: int, faster: float
) -> Costs:
    """Return the costs for planners and for predictions of plans.

    Kernels of different ranks do not slow each other down, since they are timed one
    rank after another, as on separate devices.

    Args:
        cost_model: A bundle's name or folder, or "auto".
        device: `cpu` or `cuda`.
        cluster: Cluster with the links.
        world_size: Number of ranks.
        faster: How many times faster kernels count.
    """
    comms = _ClusterComms(cluster, world_size)
    kernels = FasterKernels.of(_kernels(cost_model, device), faster)
    return Costs(compute=kernels, comms=comms)


@functools.cache
def _kernels(cost_model: str, device: str) -> CostModel:
    """Return a bundle's cost model, loaded once, since the object keeps later fits."""
    return load_cost_model(cost_model, device_type=device)
