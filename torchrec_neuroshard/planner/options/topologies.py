"""The devices to plan for: TorchRec's topology, completed by published figures.

TorchRec counts memory in bytes and bandwidth in bytes per millisecond, data sheets in
GB and GB/s: `GB_PER_S` and `GB` are the only conversions. A topology whose figures the
caller leaves out has TorchRec's defaults, those of no card in particular. They are
never taken for the caller's: the figures of the card that is planned for stand in their
place, where it is known.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torchrec.distributed.planner.constants import (
    CROSS_NODE_BANDWIDTH,
    DDR_CAP,
    DDR_MEM_BW,
    HBM_CAP,
    HBM_MEM_BW,
    HBM_TO_DDR_MEM_BW,
    INTRA_NODE_BANDWIDTH,
)
from torchrec.distributed.planner.planners import EmbeddingShardingPlanner
from torchrec.distributed.planner.types import BasicCommsBandwidths, Topology

from torchrec_neuroshard.cost_models import CostModel
from torchrec_neuroshard.cost_models.loading import find_named_card
from torchrec_neuroshard.devices import GPU, accelerator, is_accelerator
from torchrec_neuroshard.errors import ConfigError
from torchrec_neuroshard.gpu_cards import (
    GPU_CARDS,
    Figure,
    GpuCard,
    card_named,
    find_card,
)
from torchrec_neuroshard.planner.compat import (
    accepted_arguments,
    planner_part,
    with_bandwidths,
)
from torchrec_neuroshard.planner.options.groups import sharding_group
from torchrec_neuroshard.report import DeviceFigure

__all__ = [
    "GB",
    "GB_PER_S",
    "CardTopology",
    "PlannedDevices",
    "default_topology",
    "node_size",
    "topology_for",
    "whole_nodes",
]

GB = 1e9
"""Bytes."""
GB_PER_S = 1e-6
"""Of TorchRec's bytes per millisecond."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Setting:
    """A figure that TorchRec's topology takes."""

    title: str
    default: float
    """TorchRec's, in its own unit."""
    card_field: str | None = None
    """Of `GpuCard`; None: no card has it."""
    unit: str = "GB/s"
    plausible: tuple[float, float] = (0.0, float("inf"))
    """Least and most that it can be, in `unit`."""

    @property
    def scale(self) -> float:
        """TorchRec's unit in `unit`."""
        return GB_PER_S if self.unit == "GB/s" else 1 / GB


_SETTINGS: Mapping[str, _Setting] = {
    "hbm_cap": _Setting(
        title="memory of a rank", default=HBM_CAP, unit="GB", card_field="memory_gb"
    ),
    "ddr_cap": _Setting(title="host memory of a rank", default=DDR_CAP, unit="GB"),
    "hbm_mem_bw": _Setting(
        title="memory bandwidth",
        default=HBM_MEM_BW,
        card_field="hbm_gb_per_s",
        plausible=(0.5, 50_000.0),
    ),
    "ddr_mem_bw": _Setting(
        title="host memory bandwidth",
        default=DDR_MEM_BW,
        plausible=(1.0, 5_000.0),
    ),
    "hbm_to_ddr_mem_bw": _Setting(
        title="link to the host",
        default=HBM_TO_DDR_MEM_BW,
        card_field="host_gb_per_s",
        plausible=(0.5, 5_000.0),
    ),
    "intra_host_bw": _Setting(
        title="links inside a node",
        default=INTRA_NODE_BANDWIDTH,
        card_field="intra_gb_per_s",
        plausible=(0.05, 10_000.0),
    ),
    "inter_host_bw": _Setting(
        title="links between nodes",
        default=CROSS_NODE_BANDWIDTH,
        card_field="inter_gb_per_s",
        plausible=(0.01, 5_000.0),
    ),
}
"""By the name of `Topology`'s argument."""

_MEMORY = ("hbm_cap", "hbm_mem_bw", "hbm_to_ddr_mem_bw")
_LINKS = ("intra_host_bw", "inter_host_bw")

_MISREAD: tuple[tuple[str, float], ...] = (
    ("GB/s", 1e6),
    ("TB/s", 1e9),
    ("bytes per second", 1e-3),
    ("MB/s", 1e3),
)
"""Unit that a value may have been in -> factor to TorchRec's."""


class CardTopology(Topology):
    """TorchRec's topology that knows its card, and which figures are the caller's.

    Attributes:
        card: Of every rank.
        given: Arguments of `Topology` whose values the caller gave.
    """

    def __init__(self, card: GpuCard, given: frozenset[str], **arguments: Any) -> None:
        """Take the card and what `Topology` takes."""
        super().__init__(**arguments)
        self.card, self.given = card, given


def topology_for(
    card: str,
    *,
    num_nodes: int = 1,
    ranks_per_node: int | None = None,
    memory_gb: float | None = None,
    hbm_gb_per_s: float | None = None,
    host_gb_per_s: float | None = None,
    intra_gb_per_s: float | None = None,
    inter_gb_per_s: float | None = None,
    host_memory_gb: float | None = None,
) -> Topology:
    """Return TorchRec's topology of nodes of one card, by its published figures.

    Args:
        card: A name of `torchrec_neuroshard.gpu_cards.GPU_CARDS`, such as "h100".
        num_nodes: Nodes.
        ranks_per_node: GPUs of a node; None: as the card's nodes are sold.
        memory_gb: Memory of a GPU [GB].
        hbm_gb_per_s: Its bandwidth [GB/s].
        host_gb_per_s: Bandwidth of a GPU to the host's memory, one way [GB/s].
        intra_gb_per_s: Same to the other GPUs of its node, all together.
        inter_gb_per_s: Same to other nodes.
        host_memory_gb: Memory of a node's host, which its ranks share equally [GB];
            0: no table may be there. None: what TorchRec takes a rank to have, 128 GiB.

    Raises:
        ConfigError: There is no such card, or a value is not above 0.

    Example:
        `topology_for("h100", num_nodes=2)` has 16 ranks.
    """
    found = card_named(card)
    options: dict[str, float | None] = {
        "hbm_cap": memory_gb,
        "hbm_mem_bw": hbm_gb_per_s,
        "hbm_to_ddr_mem_bw": host_gb_per_s,
        "intra_host_bw": intra_gb_per_s,
        "inter_host_bw": inter_gb_per_s,
    }
    per_node = found.gpus_per_node if ranks_per_node is None else ranks_per_node
    _check_positive("num_nodes", num_nodes)
    _check_positive("ranks_per_node", per_node)
    arguments: dict[str, Any] = {}
    for name, value in options.items():
        setting = _SETTINGS[name]
        figure: Figure = getattr(found, str(setting.card_field))
        _check_positive(str(setting.card_field), value)
        arguments[name] = (figure.value if value is None else value) / setting.scale
    if host_memory_gb is not None:
        _check_positive("host_memory_gb", host_memory_gb or None)
        options["ddr_cap"] = host_memory_gb
        arguments["ddr_cap"] = round(host_memory_gb * GB / per_node)
    arguments["hbm_cap"] = round(arguments["hbm_cap"])
    # Its figures were looked up.
    arguments |= accepted_arguments(Topology, created_by_factory=True)
    topology = CardTopology(
        found,
        frozenset(name for name, value in options.items() if value is not None),
        world_size=num_nodes * per_node,
        local_world_size=per_node,
        compute_device=GPU,
        **arguments,
    )
    for device in topology.devices if host_memory_gb == 0 else ():
        device.storage.ddr = 0  # for which torchrec 1.6 takes its default
    return topology


def _check_positive(name: str, value: float | None) -> None:
    if value is not None and not 0 < value < math.inf:
        raise ConfigError(f"{name} must be above 0 and finite, got {value}")


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedDevices:
    """A topology with every figure that is planned with, and where each is from."""

    topology: Topology
    """The caller's; a copy of it, where its card's figures replace defaults."""
    card: GpuCard | None
    """None where no card of the table is planned for."""
    given: frozenset[str]
    """Arguments of `Topology` whose values are the caller's."""
    figures: Mapping[str, DeviceFigure]
    """By the name of `Topology`'s argument."""
    impossible: tuple[str, ...]
    """What to know of values that no device has."""
    left_out: tuple[str, ...]
    """What to know of figures that the caller left out."""

    @classmethod
    def of(
        cls,
        topology: Topology,
        cost_model: str | Path | CostModel = "auto",
        *,
        comms_are_given: bool = False,
    ) -> PlannedDevices:
        """Complete a topology.

        The card is that of `topology_for`, else the one whose costs are asked for, else
        the one of this machine, with the memory that it really has.

        Args:
            topology: The caller's, or `default_topology`; stays as it is.
            cost_model: As for `load_cost_model`.
            comms_are_given: Whether the caller's own model prices collectives: links
                are then not worth a warning, nor is a memory's bandwidth where one
                prices kernels.

        Raises:
            ConfigError: A card is named for devices that are no GPUs.
        """
        device_type = str(topology.compute_device)
        visible = _visible_card(device_type)
        seen = find_card(visible[0]) if visible else None
        card = find_named_card(cost_model, device_type)
        if isinstance(topology, CardTopology):
            card = topology.card
        card = card or seen
        names = [n for n in _SETTINGS if _is_used(n, topology)]
        given = frozenset(n for n in names if _is_given(n, topology))
        figures: dict[str, DeviceFigure] = {}
        values: dict[str, float] = {}
        for name in names:
            figure = _figure(name, _SETTINGS[name].default, "TorchRec's default")
            if name in given:
                figure = _figure(name, _value(name, topology), "given")
            elif name == "hbm_cap" and visible is not None and card is seen:
                figure = _figure(name, visible[1], "this machine", visible[0])
            elif card is not None and _SETTINGS[name].card_field is not None:
                of = getattr(card, str(_SETTINGS[name].card_field))
                value = of.value / _SETTINGS[name].scale
                figure = _figure(name, value, of.basis, of.source)
            figures[name] = figure
            values[name] = figure.value / _SETTINGS[name].scale
        changed = {n: v for n, v in values.items() if not _same(v, _value(n, topology))}
        asked = set() if isinstance(cost_model, CostModel) else {*_MEMORY}
        asked |= set() if comms_are_given else {*_LINKS}
        told = _defaults_in_use(topology, card, figures, asked)
        return cls(
            topology=_with_values(topology, changed) if changed else topology,
            card=card,
            given=given,
            figures=figures,
            impossible=_impossible(topology, given),
            left_out=told,
        )


def _figure(name: str, value: float, basis: str, source: str = "") -> DeviceFigure:
    setting = _SETTINGS[name]
    return DeviceFigure(
        name=setting.title,
        value=value * setting.scale,
        unit=setting.unit,
        basis=basis,
        source=source,
    )


def _is_used(name: str, topology: Topology) -> bool:
    """Whether a figure says anything of such devices."""
    world_size, per_node = _job(topology)
    if name == "intra_host_bw" and min(per_node, world_size) < 2:
        return False
    if name == "inter_host_bw" and world_size <= per_node:
        return False
    if not is_accelerator(topology.compute_device):
        return not name.startswith("hbm")
    return name != "ddr_mem_bw"


def _job(topology: Topology) -> tuple[int, int]:
    """Ranks, and ranks per node, of the job that a topology belongs to."""
    if (group := sharding_group(topology)) is not None:
        return group.num_ranks, group.ranks_per_node
    return int(topology.world_size), int(topology.local_world_size)


def _value(name: str, topology: Topology) -> float:
    """What the topology has, in TorchRec's unit; of unlike ranks the least."""
    tier = {"hbm_cap": "hbm", "ddr_cap": "ddr"}.get(name)
    if tier is None:
        return float(getattr(topology, name))
    return float(min(getattr(d.storage, tier) for d in topology.devices))


def _is_given(name: str, topology: Topology) -> bool:
    """Whether a figure is the caller's: it is not TorchRec's default."""
    if isinstance(topology, CardTopology):
        return name in topology.given
    tier = {"hbm_cap": "hbm", "ddr_cap": "ddr"}.get(name)
    if tier is not None:
        caps = {getattr(d.storage, tier) for d in topology.devices}
        return caps != {_SETTINGS[name].default}
    basic = isinstance(topology.comms_bandwidths, BasicCommsBandwidths)
    if name in _LINKS and not basic:
        return True
    return _value(name, topology) != _SETTINGS[name].default


def _same(one: float, other: float) -> bool:
    return abs(one - other) <= 1e-9 * max(abs(one), abs(other))


def _with_values(topology: Topology, values: Mapping[str, float]) -> Topology:
    """Copy a topology and change figures of the copy; see `_SETTINGS`."""
    new = copy.deepcopy(topology)
    if "hbm_cap" in values:
        for device in new.devices:
            device.storage = dataclasses.replace(
                device.storage, hbm=round(values["hbm_cap"])
            )
    return with_bandwidths(
        new, {n: v for n, v in values.items() if n not in ("hbm_cap", "ddr_cap")}
    )


def _impossible(topology: Topology, given: frozenset[str]) -> tuple[str, ...]:
    """Say which bandwidths no device has, and what was probably meant."""
    texts = []
    for name in sorted(given):
        setting, value = _SETTINGS[name], _value(name, topology)
        low, high = setting.plausible
        if low <= value * setting.scale <= high:
            continue
        text = (
            f"{name}={value:g} cannot be: TorchRec counts bandwidths in bytes per "
            f"millisecond, so that is {value * GB_PER_S:g} GB/s"
        )
        if value > 0:
            unit, factor = min(
                _MISREAD, key=lambda u: abs(math.log(value * u[1] / setting.default))
            )
            text += (
                f". If {value:,g} {unit} was meant, pass {name}={value * factor:g} "
                f"({value * factor * GB_PER_S:,g} GB/s)"
            )
        texts.append(f"{text}; topology_for takes GB/s")
    return tuple(texts)


def _defaults_in_use(
    topology: Topology,
    card: GpuCard | None,
    figures: Mapping[str, DeviceFigure],
    asked: Collection[str],
) -> tuple[str, ...]:
    """Say which figures the caller left out, what is taken for them, the way out."""
    if not is_accelerator(topology.compute_device) or isinstance(
        topology, CardTopology
    ):
        return ()
    left_out = [n for n in figures if n in asked and figures[n].basis != "given"]
    if not left_out:
        return ()
    taken = ", ".join(f"{n} {figures[n]}" for n in left_out)
    name = card.name if card else "h100"
    whose = (
        f"the {card.title}'s" if card else "TorchRec's defaults, which are no card's"
    )
    return (
        f"the topology does not give {', '.join(left_out)}; planned with {whose}: "
        f"{taken}. Name the card and give what differs: topology_for('{name}', ...), "
        f"with one of {', '.join(GPU_CARDS)}",
    )


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


def _visible_card(device_type: str) -> tuple[str, int] | None:
    """Name and memory [bytes] of the card that this process uses, if it has one."""
    if not is_accelerator(device_type):
        return None
    module = accelerator(device_type)
    if not module.is_available():
        return None
    found = module.get_device_properties(module.current_device())
    return str(found.name), int(found.total_memory)
