"""The devices to plan for: TorchRec's topology, completed with published figures.

TorchRec counts memory in bytes and bandwidth in bytes per millisecond. Data sheets use
GB and GB/s. `GB_PER_S` and `GB` are the only conversions.

TorchRec has a default for every figure that the caller leaves out, and the default
matches no real card. If the card is known, its published figure replaces the default.

With 2D parallelism (`DMPCollection`), each *sharding group* holds all tables, sharded
among its ranks, so every other group is a replica. Ranks at the same position of their
groups average their weights every few iterations. A plan is made for the topology of
one group, and TorchRec applies it to every group.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch.distributed as dist
from torchrec.distributed.planner import constants
from torchrec.distributed.planner.planners import EmbeddingShardingPlanner
from torchrec.distributed.planner.types import BasicCommsBandwidths, Storage, Topology
from torchrec.distributed.types import ShardingPlan

from torchrec_neuroshard.bundles.find import find_named_card
from torchrec_neuroshard.errors import (
    ConfigError,
    check_kind,
    check_number,
    is_number,
)
from torchrec_neuroshard.files import TOO_LARGE
from torchrec_neuroshard.hardware.cards import (
    GPU_CARDS,
    Figure,
    GpuCard,
    card_named,
    find_card,
)
from torchrec_neuroshard.hardware.devices import GPU, accelerator, is_accelerator
from torchrec_neuroshard.models.base import CostModel
from torchrec_neuroshard.planner.compat import (
    POD_VARIABLES,
    accepted_arguments,
    custom_data,
    group_size_of_job,
    planner_part,
    with_bandwidths,
    with_devices,
    with_ranks,
)
from torchrec_neuroshard.report.parts import DeviceFigure
from torchrec_neuroshard.tables.sharding_types import NODE_TYPES

GB = 1e9
"""Bytes per GB."""
GB_PER_S = 1e-6
"""GB/s per byte per millisecond, TorchRec's unit."""


class _Setting(NamedTuple):
    """A figure in TorchRec's topology."""

    title: str
    default: float
    """TorchRec's default, in bytes or bytes per millisecond."""
    card_field: str | None = None
    """The field of `GpuCard` with this figure; None: cards do not have it."""


_SETTINGS = {
    "hbm_cap": _Setting("memory of a rank", constants.HBM_CAP, "memory_gb"),
    "ddr_cap": _Setting("host memory of a rank", constants.DDR_CAP),
    "hbm_mem_bw": _Setting("memory bandwidth", constants.HBM_MEM_BW, "hbm_gb_per_s"),
    "ddr_mem_bw": _Setting("host memory bandwidth", constants.DDR_MEM_BW),
    "hbm_to_ddr_mem_bw": _Setting(
        "link to the host", constants.HBM_TO_DDR_MEM_BW, "host_gb_per_s"
    ),
    "intra_host_bw": _Setting(
        "links inside a node", constants.INTRA_NODE_BANDWIDTH, "intra_gb_per_s"
    ),
    "inter_host_bw": _Setting(
        "links between nodes", constants.CROSS_NODE_BANDWIDTH, "inter_gb_per_s"
    ),
}
"""Argument of `Topology` -> the figure."""
_TIERS = {"hbm_cap": "hbm", "ddr_cap": "ddr"}
"""Memory setting -> field of TorchRec's `Storage`. Other settings are bandwidths."""
_LINKS = ("intra_host_bw", "inter_host_bw")

_PLAUSIBLE = (1e-4, 300.0)
"""Plausible range of a bandwidth, in multiples of TorchRec's default. Published cards
have 0.07 to 8.3 times the default. The lower end allows gloo ranks on one machine."""

_GROUP = "sharding_group"
"""Attribute that `group_topology` sets on a topology."""

_MOST_TIMES, _SECONDS = 64, 2.0
"""`enough_ranks` tries up to this multiple of the ranks, for this many seconds."""

Ranks = npt.NDArray[np.int64]


class CardTopology(Topology):
    """TorchRec's topology with its card and the list of figures that the caller set.

    Attributes:
        card: The card of every rank.
        given: Arguments of `Topology` whose values the caller set.
    """

    def __init__(self, card: GpuCard, given: Set[str], **arguments: Any) -> None:
        """Take the card, the figures set, and the arguments of `Topology`."""
        super().__init__(**arguments)
        self.card, self.given = card, frozenset(given)


def topology_for(
    card: str,
    *,
    world_size: int | None = None,
    num_nodes: int | None = None,
    ranks_per_node: int | None = None,
    memory_gb: float | None = None,
    hbm_gb_per_s: float | None = None,
    host_gb_per_s: float | None = None,
    intra_gb_per_s: float | None = None,
    inter_gb_per_s: float | None = None,
    host_memory_gb: float | None = None,
) -> Topology:
    """Return a TorchRec topology with a card's published figures.

    A figure that you pass counts as given, even if it equals TorchRec's default.

    Args:
        card: A key of `torchrec_neuroshard.hardware.cards.GPU_CARDS`, for example
            "h100".
        world_size: Ranks in all nodes. None: `num_nodes` times `ranks_per_node`.
        num_nodes: Nodes. None: as many as `world_size` fills, else one.
        ranks_per_node: GPUs per node. None: as nodes with this card are sold; fewer
            ranks than that are one smaller node.
        memory_gb: Memory per GPU [GB].
        hbm_gb_per_s: Memory bandwidth per GPU [GB/s].
        host_gb_per_s: Bandwidth per GPU to host memory, one way [GB/s].
        intra_gb_per_s: Bandwidth per GPU to all other GPUs of its node, one way [GB/s].
        inter_gb_per_s: Bandwidth per GPU to other nodes, one way [GB/s].
        host_memory_gb: Host memory per node [GB], shared equally by its ranks. 0: no
            table may be in host memory. None: TorchRec's default of 128 GiB per rank.

    Raises:
        ConfigError: The card is unknown, a value is not above 0, or the ranks do not
            fill whole nodes.

    Example:
        `topology_for("h100", world_size=16)` has two nodes of eight ranks.
    """
    found = card_named(card)
    nodes, per_node = node_counts(
        found.gpus_per_node,
        world_size=world_size,
        num_nodes=num_nodes,
        ranks_per_node=ranks_per_node,
    )
    of_card = {
        "memory_gb": memory_gb,
        "hbm_gb_per_s": hbm_gb_per_s,
        "host_gb_per_s": host_gb_per_s,
        "intra_gb_per_s": intra_gb_per_s,
        "inter_gb_per_s": inter_gb_per_s,
    }
    _check_positive({**of_card, "host_memory_gb": host_memory_gb or None})
    for name, value in (("memory_gb", memory_gb), ("host_memory_gb", host_memory_gb)):
        if (value or 0) * GB >= TOO_LARGE:
            raise ConfigError(f"{name} is {value}: give it in GB, not in bytes")
    # Tell TorchRec that these are a real card's figures.
    arguments = accepted_arguments(Topology, created_by_factory=True)
    given = set()
    for name, setting in _SETTINGS.items():
        if (field := setting.card_field) is None:
            continue
        value = of_card[field]
        if value is not None:
            given.add(name)
        figure: Figure = getattr(found, field)
        arguments[name] = (figure.value if value is None else value) / _scale(name)
    arguments["hbm_cap"] = round(arguments["hbm_cap"])
    if host_memory_gb is not None:
        given.add("ddr_cap")
        arguments["ddr_cap"] = round(host_memory_gb * GB / per_node)
    topology = CardTopology(
        found,
        given,
        world_size=nodes * per_node,
        local_world_size=per_node,
        compute_device=GPU,
        **arguments,
    )
    for device in topology.devices if host_memory_gb == 0 else ():
        device.storage.ddr = 0  # torchrec 1.6 turns ddr_cap=0 into its default
    return topology


def node_counts(
    usual: int,
    *,
    world_size: int | None = None,
    num_nodes: int | None = None,
    ranks_per_node: int | None = None,
) -> tuple[int, int]:
    """Return the number of nodes and of ranks per node.

    Args:
        usual: Ranks per node by default.
        world_size: As for `topology_for`.
        num_nodes: As for `topology_for`.
        ranks_per_node: As for `topology_for`.

    Raises:
        ConfigError: A number is not above 0, or they contradict each other.
    """
    counts: dict[str, Any] = {
        "world_size": world_size,
        "num_nodes": num_nodes,
        "ranks_per_node": ranks_per_node,
    }
    _check_positive(counts)
    for name, value in counts.items():
        if value is not None and not is_number(value, whole=True):
            raise ConfigError(f"{name} must be a whole number, got {value!r}")
    if world_size is None:
        return num_nodes or 1, ranks_per_node or usual
    if num_nodes is None:
        per_node = ranks_per_node or min(world_size, usual)
        if world_size % per_node:
            below = world_size // per_node * per_node
            fitting = [str(n) for n in (below, below + per_node) if n]
            raise ConfigError(
                f"{world_size} ranks do not fill whole nodes of {per_node}; take "
                f"{' or '.join(fitting)} ranks, or change the ranks per node"
            )
        return world_size // per_node, per_node
    if world_size != num_nodes * (ranks_per_node or world_size // num_nodes):
        given = ", ".join(f"{n}={v}" for n, v in counts.items() if v is not None)
        raise ConfigError(
            f"{given} contradict each other: world_size must be num_nodes times "
            "ranks_per_node; leave one of them out"
        )
    return num_nodes, world_size // num_nodes


def _check_positive(values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if value is not None and not (is_number(value) and 0 < value < math.inf):
            raise ConfigError(f"{name} must be above 0 and finite, got {value!r}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardingGroup:
    """The job around a sharding group, which the group's topology does not show."""

    num_ranks: int
    """Ranks of all groups together."""
    ranks_per_node: int
    """Ranks per node, of all groups together."""
    num_replicas: int
    """Number of sharding groups, which is also the ranks of a replica group."""
    replicas_per_node: int
    """Ranks of one replica group in the same node."""
    sync_interval: int
    """Iterations between two averages of the weights."""

    def __str__(self) -> str:
        """Return the group as part of a sentence."""
        return (
            f"one of {self.num_replicas} sharding groups of {self.num_ranks} ranks, "
            f"{self.ranks_per_node} per node, whose weights are averaged every "
            f"{self.sync_interval} iterations ({self.replicas_per_node} replicas per "
            "node)"
        )


def group_topology(
    topology: Topology,
    sharding_group_size: int,
    *,
    sync_interval: int = 1,
    use_inter_host_allreduce: bool = False,
) -> Topology:
    """Return the topology of one sharding group, to plan for or to rehearse.

    Pass a plan for this topology to `DMPCollection(plan=...)`, with the same
    `sharding_group_size` and `use_inter_host_allreduce`, and with the topology's
    `intra_group_size` as `node_group_size`. If replicas of a rank have different
    memory, the smallest counts.

    Args:
        topology: All ranks.
        sharding_group_size: Ranks that share one copy of the tables. It must divide the
            number of ranks.
        sync_interval: Iterations between two calls of `DMPCollection.sync`.
        use_inter_host_allreduce: As in TorchRec. True: a sharding group has consecutive
            ranks. False: a replica group has.

    Raises:
        ConfigError: The size does not divide the ranks, the interval is below 1, or
            the topology is already that of a group.
    """
    check_kind("topology", topology, Topology)
    check_number("sharding_group_size", sharding_group_size, least=1, whole=True)
    check_number("sync_interval", sync_interval, least=1, whole=True)
    num_ranks, size = int(topology.world_size), sharding_group_size
    if sharding_group(topology) is not None:
        raise ConfigError(
            "the topology is already that of a sharding group; pass the topology of "
            "all ranks"
        )
    if num_ranks % size:
        raise ConfigError(
            f"sharding_group_size={size} does not divide the {num_ranks} ranks of the "
            f"topology; take one of {', '.join(map(str, _divisors(num_ranks)))}, or "
            "change the number of ranks"
        )
    follow, ranks = use_inter_host_allreduce, np.arange(num_ranks)
    groups_GR = ranks.reshape(-1, size) if follow else ranks.reshape(size, -1).T
    replicas_RG, per_node = groups_GR.T, int(topology.local_world_size)
    devices = []
    for rank, replicas in enumerate(replicas_RG):
        held = [dataclasses.astuple(topology.devices[r].storage) for r in replicas]
        least = Storage(*map(min, zip(*held, strict=True)))
        device = topology.devices[replicas[0]]
        devices.append(dataclasses.replace(device, rank=rank, storage=least))
    in_node = _side_by_side(groups_GR, per_node)
    in_pod = _side_by_side(groups_GR, int(topology.intra_group_size))
    found = with_ranks(
        topology,
        devices,
        ranks_per_node=in_node,
        nodes_per_pod=in_pod // in_node if in_pod > in_node else None,
    )
    group = ShardingGroup(
        num_ranks=num_ranks,
        ranks_per_node=per_node,
        num_replicas=num_ranks // size,
        replicas_per_node=_side_by_side(replicas_RG, per_node),
        sync_interval=sync_interval,
    )
    return with_sharding_group(found, group)


def with_sharding_group(topology: Topology, group: ShardingGroup | None) -> Topology:
    """Attach the job around a sharding group to its topology, in place."""
    setattr(topology, _GROUP, group)
    return topology


def sharding_group(topology: Topology) -> ShardingGroup | None:
    """Return the group that a topology is of; None if it is of all ranks."""
    group: ShardingGroup | None = vars(topology).get(_GROUP)
    return group


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _side_by_side(groups_NR: Ranks, node_size: int) -> int:
    """Return the largest part, in ranks, that divides groups within single nodes."""
    nodes_NR = groups_NR // node_size
    return max(
        n
        for n in _divisors(nodes_NR.shape[1])
        if (np.ptp(nodes_NR.reshape(-1, n), axis=1) == 0).all()
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedDevices:
    """A topology with all figures that the planner uses, and the source of each."""

    topology: Topology
    """The caller's topology, or a copy in which the card's figures replace defaults."""
    card: GpuCard | None
    """None: no known card."""
    figures: Mapping[str, DeviceFigure]
    """Argument of `Topology` -> its figure."""
    notes: tuple[str, ...]
    """Warnings about impossible values and about figures left out."""

    @classmethod
    def of(
        cls, topology: Topology, cost_model: str | Path | CostModel = "auto"
    ) -> PlannedDevices:
        """Complete a topology.

        The card comes from `topology_for`; otherwise from `cost_model`; otherwise from
        this machine, with its actual memory.

        A figure counts as left out if it is TorchRec's constant itself, for example
        `HBM_CAP`. An equal number that the caller computed counts as given. To plan for
        a card with TorchRec's constant, pass it to `topology_for`.

        Args:
            topology: The caller's topology, or `default_topology`. It is not changed.
            cost_model: As for `load_cost_model`. With a caller's `CostModel` there is
                no warning about figures left out.

        Raises:
            ConfigError: `cost_model` names a card, but the devices are not GPUs.
        """
        device_type = str(topology.compute_device)
        visible = _visible_card(device_type)
        seen = find_card(visible[0]) if visible else None
        card = find_named_card(cost_model, device_type) or seen
        if isinstance(topology, CardTopology):
            card = topology.card
        figures: dict[str, DeviceFigure] = {}
        changed: dict[str, float] = {}
        for name in (n for n in _SETTINGS if _is_used(n, topology)):
            setting = _SETTINGS[name]
            value, basis, source = setting.default, "TorchRec's default", ""
            if _is_given(name, topology):
                value, basis = _value(name, topology), "given"
            elif name == "hbm_cap" and visible is not None and card is seen:
                value, basis, source = visible[1], "this machine", visible[0]
            elif card is not None and setting.card_field is not None:
                figure = getattr(card, setting.card_field)
                value, basis = figure.value / _scale(name), figure.basis
                source = figure.source
            if not math.isclose(value, _value(name, topology)):
                changed[name] = value
            figures[name] = DeviceFigure(
                name=setting.title,
                value=value * _scale(name),
                unit="GB" if name in _TIERS else "GB/s",
                basis=basis,
                source=source,
            )
        notes = _impossible(topology, figures)
        if (
            is_accelerator(device_type)
            and not isinstance(topology, CardTopology)
            and not isinstance(cost_model, CostModel)
        ):
            notes += _left_out(card, figures)
        return cls(
            topology=_with_values(topology, changed),
            card=card,
            figures=figures,
            notes=tuple(notes),
        )

    @property
    def given(self) -> Set[str]:
        """Arguments of `Topology` that the caller set."""
        return {name for name, f in self.figures.items() if f.basis == "given"}


def _scale(name: str) -> float:
    """Return the factor from TorchRec's unit to GB or GB/s."""
    return 1 / GB if name in _TIERS else GB_PER_S


def _is_used(name: str, topology: Topology) -> bool:
    """Whether a figure matters for these devices."""
    group = sharding_group(topology)
    world_size, per_node = (
        (group.num_ranks, group.ranks_per_node)
        if group is not None
        else (int(topology.world_size), int(topology.local_world_size))
    )
    if name == "intra_host_bw":
        return min(per_node, world_size) > 1
    if name == "inter_host_bw":
        return world_size > per_node
    if is_accelerator(topology.compute_device):
        return name != "ddr_mem_bw"
    return not name.startswith("hbm")


def _value(name: str, topology: Topology) -> float:
    """Return a figure in TorchRec's unit; the least if ranks differ."""
    if name in _TIERS:
        return float(min(getattr(d.storage, _TIERS[name]) for d in topology.devices))
    return float(getattr(topology, name))


def _is_given(name: str, topology: Topology) -> bool:
    """Whether the caller set a figure.

    For `topology_for` this is recorded. A plain `Topology` keeps the object that it was
    given, so a figure was left out if it is the same object as TorchRec's default. In
    `custom_topology_data` it is always set.

    Pickling replaces all objects. Then memory counts as set, since a rank may have no
    more, and a bandwidth as set if it differs from the default.
    """
    if isinstance(topology, CardTopology):
        return name in topology.given
    default = _SETTINGS[name].default
    if name in _TIERS:
        custom = custom_data(topology)
        if custom is not None and custom.has_data(name):
            return True
        caps = [getattr(d.storage, _TIERS[name]) for d in topology.devices]
        return any(cap is not default for cap in caps)
    by_collective = not isinstance(topology.comms_bandwidths, BasicCommsBandwidths)
    if name in _LINKS and by_collective:
        return True
    value = getattr(topology, name)
    was_pickled = topology.ssd_mem_bw is not constants.SSD_MEM_BW  # nobody sets it
    return bool(value != default if was_pickled else value is not default)


def _with_values(topology: Topology, values: Mapping[str, float]) -> Topology:
    """Return a topology with other memory and bandwidths."""
    if "hbm_cap" in values:
        hbm = round(values["hbm_cap"])
        devices = [
            dataclasses.replace(d, storage=dataclasses.replace(d.storage, hbm=hbm))
            for d in topology.devices
        ]
        topology = with_devices(topology, devices)
    bandwidths = {n: v for n, v in values.items() if n not in _TIERS}
    return with_bandwidths(topology, bandwidths) if bandwidths else topology


def _impossible(topology: Topology, figures: Mapping[str, DeviceFigure]) -> list[str]:
    """Return a warning for each bandwidth that no device has, with TorchRec's unit."""
    texts = []
    low, high = _PLAUSIBLE
    for name in sorted(n for n in figures if n not in _TIERS):
        value = _value(name, topology)
        if figures[name].basis != "given" or (
            low <= value / _SETTINGS[name].default <= high
        ):
            continue
        texts.append(
            f"{name}={value:g} is impossible: TorchRec counts bandwidths in bytes per "
            f"millisecond, so that is {value * GB_PER_S:,g} GB/s. Multiply GB/s by "
            f"{1 / GB_PER_S:,.0f}, or call topology_for, which takes GB/s"
        )
    return texts


def _left_out(card: GpuCard | None, figures: Mapping[str, DeviceFigure]) -> list[str]:
    """Return a warning that names the figures left out and their replacements."""
    names = [
        n
        for n, figure in figures.items()
        if figure.basis != "given" and _SETTINGS[n].card_field is not None
    ]
    if not names:
        return []
    taken = ", ".join(f"{n} {figures[n]}" for n in names)
    whose = (
        f"figures of the {card.title}"
        if card
        else "TorchRec's defaults, which match no real card"
    )
    example = card.name if card else "h100"
    return [
        f"the topology does not set {', '.join(names)}. The planner uses {whose}: "
        f"{taken}. Name the card and pass the figures that differ: "
        f"topology_for('{example}', ...), with one of {', '.join(GPU_CARDS)}"
    ]


def default_topology() -> Topology:
    """Return TorchRec's topology of the process group.

    Raises:
        ConfigError: There is no process group.
    """
    if not dist.is_initialized():
        raise ConfigError(
            "without a topology, the planner needs a process group: call "
            "torch.distributed.init_process_group first, or pass topology, for example "
            'topology_for("h100", world_size=16)'
        )
    topology: Topology = planner_part(EmbeddingShardingPlanner(), "topology")
    return topology


def whole_nodes(world_size: int, local_world_size: int) -> int:
    """Return the most ranks per node, up to `local_world_size`, that fill all nodes."""
    most = min(int(world_size), int(local_world_size))
    return max(n for n in range(1, most + 1) if world_size % n == 0)


def node_size(topology: Topology) -> int:
    """Return the number of ranks that TorchRec spreads a table-row-wise table over."""
    return whole_nodes(topology.world_size, topology.intra_group_size)


def pod_fault(topology: Topology) -> str | None:
    """Return why tables cannot be spread over a topology's pods; None if they can.

    TorchRec spreads table-row-wise and grid shards over whole pods of `pod_size` nodes.
    It does not start a job whose ranks do not fill whole pods.
    """
    group, node = int(topology.intra_group_size), int(topology.local_world_size)
    world_size = int(topology.world_size)
    if group <= node or world_size % group == 0:
        return None
    return (
        f"pod_size={group // node} makes pods of {group} ranks, which do not fill the "
        f"{world_size} ranks of the topology. Give Topology a pod_size that divides "
        f"its {world_size // node} nodes, or leave pod_size out"
    )


def check_pods(topology: Topology, plan: ShardingPlan) -> None:
    """Check that TorchRec runs a plan's tables in the pods of its topology.

    Plans of sharding groups are not checked: `DMPCollection` is told the size.

    Raises:
        ConfigError: TorchRec would use groups of another size and leave shards out.
    """
    group, node = int(topology.intra_group_size), int(topology.local_world_size)
    if group <= node or sharding_group(topology) is not None:
        return
    tables = [
        f"{path}.{name}" if path else name
        for path, module in plan.plan.items()
        for name, sharding in module.items()
        if sharding.sharding_type in NODE_TYPES
    ]
    used = group_size_of_job(int(topology.world_size)) if tables else group
    if used != group:
        names = " ".join(f"{name}={group // node}" for name in POD_VARIABLES)
        raise ConfigError(
            f"table '{tables[0]}' is planned in pods of {group} ranks (pod_size="
            f"{group // node}), but this job runs table-row-wise shards in groups of "
            f"{used}, and TorchRec would leave shards out. Start the job with {names}, "
            "or leave pod_size out of the topology"
        )


def _visible_card(device_type: str) -> tuple[str, int] | None:
    """Return the name and memory [bytes] of this process's card, if it has one."""
    if not is_accelerator(device_type):
        return None
    module = accelerator(device_type)
    if not module.is_available():
        return None
    found = module.get_device_properties(module.current_device())
    return str(found.name), int(found.total_memory)


def enough_ranks(fits: Callable[[Topology], bool], topology: Topology) -> int:
    """Return a number of ranks on which a model fits: double, then bisect.

    Args:
        fits: Whether the model has a plan on these devices.
        topology: The devices on which it has none.

    Returns:
        Ranks, in whole nodes if there are several nodes. 0: none found in time.
    """
    num_ranks, node = int(topology.world_size), int(topology.local_world_size)
    step = node if node < num_ranks else 1
    too_few, enough = num_ranks // step, 0
    most, end = _MOST_TIMES * too_few, time.monotonic() + _SECONDS
    while enough != too_few + 1 and time.monotonic() < end:
        count = (too_few + enough) // 2 if enough else 2 * too_few
        if count > most:
            break
        if fits(_more_ranks(topology, count * step)):
            enough = count
        else:
            too_few = count
    return enough * step


def _more_ranks(topology: Topology, count: int) -> Topology:
    """Return a copy with `count` ranks; new ranks are like the last one."""
    given, node = topology.devices, int(topology.local_world_size)
    more = [
        dataclasses.replace(copy.deepcopy(given[-1]), rank=r)
        for r in range(len(given), count)
    ]
    pod = topology.intra_group_size // node
    return with_ranks(
        topology,
        [*given, *more],
        ranks_per_node=node if node < len(given) else count,
        nodes_per_pod=pod if pod > 1 else None,
    )
