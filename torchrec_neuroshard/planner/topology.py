"""The devices to plan for: TorchRec's topology, completed with published figures.

TorchRec counts memory in bytes and bandwidth in bytes per millisecond. Data sheets use
GB and GB/s. `GB_PER_S` and `GB` are the only conversions.

TorchRec has a default for every figure that the caller leaves out, and the default
matches no real card. If the card is known, its published figure replaces the default.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from torchrec.distributed.planner import constants
from torchrec.distributed.planner.planners import EmbeddingShardingPlanner
from torchrec.distributed.planner.types import BasicCommsBandwidths, Topology

from torchrec_neuroshard.bundles.find import find_named_card
from torchrec_neuroshard.errors import ConfigError
from torchrec_neuroshard.files import TOO_LARGE
from torchrec_neuroshard.hardware.cards import (
    GPU_CARDS,
    Figure,
    GpuCard,
    card_named,
    check_positive,
    find_card,
    node_counts,
)
from torchrec_neuroshard.hardware.device_types import GPU, is_accelerator
from torchrec_neuroshard.hardware.devices import accelerator
from torchrec_neuroshard.models.base import CostModel
from torchrec_neuroshard.planner.compat import (
    accepted_arguments,
    custom_data,
    planner_part,
    with_bandwidths,
    with_devices,
)
from torchrec_neuroshard.planner.groups import sharding_group
from torchrec_neuroshard.report.parts import DeviceFigure

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
    check_positive({**of_card, "host_memory_gb": host_memory_gb or None})
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


def _visible_card(device_type: str) -> tuple[str, int] | None:
    """Return the name and memory [bytes] of this process's card, if it has one."""
    if not is_accelerator(device_type):
        return None
    module = accelerator(device_type)
    if not module.is_available():
        return None
    found = module.get_device_properties(module.current_device())
    return str(found.name), int(found.total_memory)
