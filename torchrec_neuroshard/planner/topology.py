"""The devices to plan for: TorchRec's topology, completed by published figures.

TorchRec counts memory in bytes and bandwidth in bytes per millisecond, data sheets in
GB and GB/s: `GB_PER_S` and `GB` are the only conversions. A figure that the caller
leaves out has TorchRec's default, which is of no card in particular. The figure of the
card that is planned for replaces it, where the card is known.

With 2D parallelism (`DMPCollection`) a *sharding group* shares the tables out among its
ranks; every other group holds a replica of them. The ranks of one number in their
groups average their weights every so many iterations. A plan is made for the topology
of one group: TorchRec moves it to the ranks of each.
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
from torchrec_neuroshard.errors import ConfigError
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

__all__ = [
    "GB_PER_S",
    "CardTopology",
    "PlannedDevices",
    "ShardingGroup",
    "default_topology",
    "enough_ranks",
    "group_topology",
    "node_counts",
    "node_size",
    "sharding_group",
    "topology_for",
    "whole_nodes",
    "with_sharding_group",
]

GB = 1e9
"""Bytes."""
GB_PER_S = 1e-6
"""Of TorchRec's bytes per millisecond."""


class _Setting(NamedTuple):
    """A figure that TorchRec's topology takes."""

    title: str
    default: float
    """TorchRec's, in bytes or bytes per millisecond."""
    card_field: str | None = None
    """Of `GpuCard`; None: no card has it."""


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
"""By the name of `Topology`'s argument."""
_TIERS = {"hbm_cap": "hbm", "ddr_cap": "ddr"}
"""Capacity -> the field of TorchRec's `Storage`. All other settings are bandwidths."""
_LINKS = ("intra_host_bw", "inter_host_bw")

_PLAUSIBLE = (1e-4, 300.0)
"""Least and most that a bandwidth can be, in TorchRec's defaults. The published cards
have 0.07 to 8.3 of them; the least leaves room for ranks on one machine over gloo."""

_GROUP = "sharding_group"
"""Attribute of a topology: see `group_topology`."""

_MOST_TIMES, _SECONDS = 64, 2.0
"""Ranks that `enough_ranks` tries, relative to those there are, and for how long."""

Ranks = npt.NDArray[np.int64]


class CardTopology(Topology):
    """TorchRec's topology that knows its card, and which figures are the caller's.

    Attributes:
        card: Of every rank.
        given: Arguments of `Topology` whose values the caller gave.
    """

    def __init__(self, card: GpuCard, given: Set[str], **arguments: Any) -> None:
        """Take the card and what `Topology` takes."""
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
    # Its figures were looked up.
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
        device.storage.ddr = 0  # for which torchrec 1.6 takes its default
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
    counts = {
        "world_size": world_size,
        "num_nodes": num_nodes,
        "ranks_per_node": ranks_per_node,
    }
    _check_positive(counts)
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


def _check_positive(values: Mapping[str, float | None]) -> None:
    for name, value in values.items():
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"{name} must be above 0 and finite, got {value}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardingGroup:
    """What a sharding group's topology does not say: the job around it."""

    num_ranks: int
    """Of all groups."""
    ranks_per_node: int
    """Of all groups."""
    num_replicas: int
    """Sharding groups: ranks of a replica group."""
    replicas_per_node: int
    """Ranks of a replica group that lie in one node."""
    sync_interval: int
    """Iterations from one average of the weights to the next."""

    def __str__(self) -> str:
        """Return it as part of a sentence."""
        return (
            f"one of {self.num_replicas} sharding groups of {self.num_ranks} ranks, "
            f"{self.ranks_per_node} per node, whose weights are averaged every "
            f"{self.sync_interval} iterations, {self.replicas_per_node} in a node"
        )


def group_topology(
    topology: Topology,
    sharding_group_size: int,
    *,
    sync_interval: int = 1,
    use_inter_host_allreduce: bool = False,
) -> Topology:
    """Return the topology of one sharding group, to plan in and to rehearse.

    A plan for it is what `DMPCollection(plan=...)` takes, with the same
    `sharding_group_size` and `use_inter_host_allreduce`, and the topology's
    `intra_group_size` as `node_group_size`. A device has what the least of its
    replicas has.

    Args:
        topology: All ranks.
        sharding_group_size: Ranks that the tables are shared out among; divides all.
        sync_interval: Iterations between two calls of `DMPCollection.sync`.
        use_inter_host_allreduce: As in TorchRec: whether a group's ranks follow one
            another; else those of a replica group do.

    Raises:
        ConfigError: The size does not divide the ranks, the interval is below 1, or
            the topology is a group's already.
    """
    num_ranks, size = int(topology.world_size), sharding_group_size
    if sharding_group(topology) is not None:
        raise ConfigError(
            "the topology is one of a sharding group already; pass that of all ranks"
        )
    if size < 1 or num_ranks % size:
        raise ConfigError(
            f"sharding_group_size={size} does not divide the {num_ranks} ranks of the "
            f"topology; take one of {', '.join(map(str, _divisors(num_ranks)))}, or "
            "other ranks"
        )
    if sync_interval < 1:
        raise ConfigError(f"sync_interval must be at least 1, got {sync_interval}")
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
    """Note on the topology of a sharding group, in place, what is around it."""
    setattr(topology, _GROUP, group)
    return topology


def sharding_group(topology: Topology) -> ShardingGroup | None:
    """Return what `group_topology` knew; None where the topology is of all ranks."""
    group: ShardingGroup | None = vars(topology).get(_GROUP)
    return group


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _side_by_side(groups_NR: Ranks, node_size: int) -> int:
    """Most ranks that whole groups can be cut into, each part inside one node."""
    nodes_NR = groups_NR // node_size
    return max(
        n
        for n in _divisors(nodes_NR.shape[1])
        if (np.ptp(nodes_NR.reshape(-1, n), axis=1) == 0).all()
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedDevices:
    """A topology with every figure that is planned with, and where each is from."""

    topology: Topology
    """The caller's; a copy of it, where its card's figures replace defaults."""
    card: GpuCard | None
    """None where no card of the table is planned for."""
    figures: Mapping[str, DeviceFigure]
    """By the name of `Topology`'s argument."""
    notes: tuple[str, ...]
    """Warnings about values that no device has, and about figures left out."""

    @classmethod
    def of(
        cls, topology: Topology, cost_model: str | Path | CostModel = "auto"
    ) -> PlannedDevices:
        """Complete a topology.

        The card is that of `topology_for`, else the one whose costs are asked for, else
        the one of this machine, with the memory that it really has.

        A figure that equals TorchRec's default counts as left out: `Topology` does not
        tell the two apart. To plan with it all the same, give it to `topology_for`,
        which takes every argument as given, or memory to `custom_topology_data`.
        Without a card, change a bandwidth by one byte per millisecond.

        Args:
            topology: The caller's, or `default_topology`; stays as it is.
            cost_model: As for `load_cost_model`. With a model of the caller's own there
                is no warning about figures left out.

        Raises:
            ConfigError: A card is named for devices that are no GPUs.
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
        """Arguments of `Topology` whose values are the caller's."""
        return {name for name, f in self.figures.items() if f.basis == "given"}


def _scale(name: str) -> float:
    """Return GB or GB/s of TorchRec's unit."""
    return 1 / GB if name in _TIERS else GB_PER_S


def _is_used(name: str, topology: Topology) -> bool:
    """Whether a figure says anything of such devices."""
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
    """What the topology has, in TorchRec's unit; of unlike ranks the least."""
    if name in _TIERS:
        return float(min(getattr(d.storage, _TIERS[name]) for d in topology.devices))
    return float(getattr(topology, name))


def _is_given(name: str, topology: Topology) -> bool:
    """Whether a figure is the caller's: `topology_for`'s argument, or no default.

    A `Topology` does not tell an argument that equals TorchRec's default from one left
    out, except in its `custom_topology_data`.
    """
    if isinstance(topology, CardTopology):
        return name in topology.given
    if name in _TIERS:
        custom = custom_data(topology)
        if custom is not None and custom.has_data(name):
            return True
        caps = {getattr(d.storage, _TIERS[name]) for d in topology.devices}
        return caps != {_SETTINGS[name].default}
    by_collective = not isinstance(topology.comms_bandwidths, BasicCommsBandwidths)
    if name in _LINKS and by_collective:
        return True
    return _value(name, topology) != _SETTINGS[name].default


def _with_values(topology: Topology, values: Mapping[str, float]) -> Topology:
    """Return a topology with other memory and bandwidths of its devices."""
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
    """Say which bandwidths no device has, and what TorchRec's unit is."""
    texts = []
    low, high = _PLAUSIBLE
    for name in sorted(n for n in figures if n not in _TIERS):
        value = _value(name, topology)
        if figures[name].basis != "given" or (
            low <= value / _SETTINGS[name].default <= high
        ):
            continue
        texts.append(
            f"{name}={value:g} cannot be: TorchRec counts bandwidths in bytes per "
            f"millisecond, so that is {value * GB_PER_S:,g} GB/s. Multiply GB/s by "
            f"{1 / GB_PER_S:,.0f}, or call topology_for, which takes GB/s"
        )
    return texts


def _left_out(card: GpuCard | None, figures: Mapping[str, DeviceFigure]) -> list[str]:
    """Say which figures the caller left out, what replaces them, the way out."""
    names = [
        n
        for n, figure in figures.items()
        if figure.basis != "given" and _SETTINGS[n].card_field is not None
    ]
    if not names:
        return []
    taken = ", ".join(f"{n} {figures[n]}" for n in names)
    whose = (
        f"the {card.title}'s" if card else "TorchRec's defaults, which are no card's"
    )
    example = card.name if card else "h100"
    return [
        f"the topology does not give {', '.join(names)}, or gives TorchRec's default, "
        f"which counts as left out; planned with {whose}: {taken}. Name the card and "
        f"give what differs: topology_for('{example}', ...), with one of "
        f"{', '.join(GPU_CARDS)}"
    ]


def default_topology() -> Topology:
    """Return TorchRec's topology of the process group.

    Raises:
        ConfigError: There is no process group.
    """
    if not dist.is_initialized():
        raise ConfigError(
            "topology: the process has no process group to take it from. Call "
            "torch.distributed.init_process_group first, or pass one, such as "
            'topology_for("h100", num_nodes=2)'
        )
    topology: Topology = planner_part(EmbeddingShardingPlanner(), "topology")
    return topology


def whole_nodes(world_size: int, local_world_size: int) -> int:
    """Return the ranks per node, at most as many as given, that fill whole nodes."""
    most = min(int(world_size), int(local_world_size))
    return max(n for n in range(1, most + 1) if world_size % n == 0)


def node_size(topology: Topology) -> int:
    """Return the ranks that TorchRec spreads a table-row-wise table over."""
    return whole_nodes(topology.world_size, topology.intra_group_size)


def pod_fault(topology: Topology) -> str | None:
    """Say why no table can be spread over the pods of a topology; None: it can.

    TorchRec's groups for table-row-wise and grid shards are whole pods, of `pod_size`
    nodes each. Where pods do not fill the ranks, it starts no job.
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
    """Check that TorchRec runs the tables of a plan in the pods of its topology.

    A plan of a sharding group is not checked: there `DMPCollection` is told the size.

    Raises:
        ConfigError: It would use groups of another size, and leave shards out.
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
    """Name and memory [bytes] of the card that this process uses, if it has one."""
    if not is_accelerator(device_type):
        return None
    module = accelerator(device_type)
    if not module.is_available():
        return None
    found = module.get_device_properties(module.current_device())
    return str(found.name), int(found.total_memory)


def enough_ranks(fits: Callable[[Topology], bool], topology: Topology) -> int:
    """Double the ranks until a model fits, then look for fewer.

    Args:
        fits: Whether the model has a plan on these devices.
        topology: The devices that it has none on.

    Returns:
        Ranks, in whole nodes where there are several; 0 where none are found in time.
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
    """Return a copy with so many ranks, each new one as the last one is."""
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
