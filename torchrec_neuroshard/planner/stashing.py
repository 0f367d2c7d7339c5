"""Stashed tables: their weights are on the host while dense layers run.

TorchRec 1.9 copies the weights of stashed tables to the host after their lookups, and
back before their updates (`MemoryStashingManager`). Meanwhile dense layers use that
memory. So tables may use memory of dense layers, if that saves more time than the
copies take.

Shapes: `W` ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner.types import (
    ShardingOption,
    StorageReservation,
    Topology,
)

from torchrec_neuroshard.costs.placement_rules import quoted
from torchrec_neuroshard.costs.task import format_bytes
from torchrec_neuroshard.errors import ConfigError
from torchrec_neuroshard.notes import Note
from torchrec_neuroshard.planner.compat import is_stashed, stash, torchrec_stashes
from torchrec_neuroshard.planner.greedy import without
from torchrec_neuroshard.planner.option_facts import table_name
from torchrec_neuroshard.planner.plan_costs import PlanCosts
from torchrec_neuroshard.planner.topology import GB_PER_S

Floats = npt.NDArray[np.float64]


def check_stash_bytes(stash_bytes: float, topology: Topology) -> None:
    """Check that tables can be stashed.

    Raises:
        ConfigError: They cannot, or `stash_bytes` is below 0.
    """
    if not stash_bytes >= 0:
        raise ConfigError(f"stash_bytes must be at least 0, got {stash_bytes}")
    if topology.compute_device == "cpu":
        raise ConfigError("stash_bytes is for GPUs; the topology's device is 'cpu'")
    if not torchrec_stashes():
        raise ConfigError(
            "stash_bytes needs TorchRec 1.9 or later (MemoryStashingManager); leave it "
            "out or update TorchRec"
        )


class RoomOfDenseLayers(StorageReservation):
    """A storage reservation that leaves more memory for tables than another.

    Args:
        inner: The other reservation.
        more_bytes: Additional memory for tables on each rank [bytes].
    """

    def __init__(self, inner: StorageReservation, more_bytes: float) -> None:
        self._inner, self._more_bytes = inner, more_bytes
        self._left: Topology | None = None

    @property
    def last_reserved_topology(self) -> Topology | None:
        """The last result of `reserve`."""
        return self._left

    def reserve(self, *arguments: Any, **named: Any) -> Topology:
        """Return the devices with the memory left; arguments as in TorchRec."""
        left = self._inner.reserve(*arguments, **named)
        self._left = without(left, -self._more_bytes)
        return self._left


def stash_enough(plan: Sequence[ShardingOption], excess_W: Floats) -> bool:
    """Mark tables to stash until dense layers have enough memory on every rank.

    Tables that the model itself marks count first. Then tables are added one by one,
    each time the one whose bytes help most. Finally, unneeded tables are removed.

    Args:
        plan: Placed options; the chosen ones are marked.
        excess_W: Bytes that dense layers lack on each rank; 0 or less: none.

    Returns:
        Whether stashing frees enough memory. If not, no table is marked.
    """
    world_size = len(excess_W)
    lacking_W = excess_W - _stashed_bytes(plan, world_size)
    left = [o for o in plan if not is_stashed(o)]
    bytes_TW = np.array([_weight_bytes(o, world_size) for o in left])
    chosen: list[int] = []
    while (lacking_W > 0).any():
        lacks_W = np.maximum(lacking_W, 0)
        served = {
            i: num_bytes
            for i, bytes_W in enumerate(bytes_TW)
            if i not in chosen and (num_bytes := np.minimum(bytes_W, lacks_W).sum()) > 0
        }
        if not served:
            return False
        # Prefer tables that need no useless copies, and large ones among them.
        best = max(served, key=lambda i: (served[i] / bytes_TW[i].sum(), served[i]))
        chosen.append(best)
        lacking_W = lacking_W - bytes_TW[best]
    for i in sorted(chosen, key=lambda i: -float(bytes_TW[i].sum())):
        if (lacking_W + bytes_TW[i] <= 0).all():
            lacking_W = lacking_W + bytes_TW[i]
        else:
            stash(left[i])
    return True


def exposed_ms(costs: PlanCosts, plan: Sequence[ShardingOption]) -> float:
    """Return the time that copies of stashed tables add to an iteration [ms].

    Args:
        costs: Knows the time of dense layers, which overlaps with copies.
        plan: Placed options.
    """
    return max(_copies_ms(costs, plan) - _dense_ms(costs), 0.0)


def stash_notes(costs: PlanCosts, plan: Sequence[ShardingOption]) -> tuple[Note, ...]:
    """Return notes on stashed tables: freed memory and time of copies.

    Args:
        costs: The costs that priced the plan.
        plan: Placed options.
    """
    topology = costs.topology
    stashed = [o for o in plan if is_stashed(o) and _is_on_devices(o)]
    if not stashed or topology.compute_device == "cpu":
        return ()
    bytes_W = _stashed_bytes(plan, int(topology.world_size))
    most = int(bytes_W.argmax())
    text = (
        f"tables {quoted([table_name(o) for o in stashed])} are stashed: rank {most} "
        f"copies {format_bytes(bytes_W[most])} to the host and back in each iteration, "
        f"{_copies_ms(costs, plan):.3g} ms at {_gb_per_s(topology):.3g} GB/s. At most "
        f"{_dense_ms(costs):.3g} ms of it overlap with dense layers (dense_ms). No "
        f"prediction includes the other {exposed_ms(costs, plan):.3g} ms"
    )
    return (Note("stash", text),)


def _copies_ms(costs: PlanCosts, plan: Sequence[ShardingOption]) -> float:
    """Return the time of copies to the host and back on the busiest rank [ms]."""
    bytes_W = _stashed_bytes(plan, int(costs.topology.world_size))
    return float(2 * bytes_W.max() / (_gb_per_s(costs.topology) * 1e6))


def _dense_ms(costs: PlanCosts) -> float:
    return float(costs.dense.forward + costs.dense.backward)


def _gb_per_s(topology: Topology) -> float:
    """Return the bandwidth between a device and its host [1e9 bytes/s]."""
    return float(topology.hbm_to_ddr_mem_bw) * GB_PER_S


def _stashed_bytes(plan: Sequence[ShardingOption], world_size: int) -> Floats:
    """Return the bytes of stashed weights on each rank."""
    bytes_W = np.zeros(world_size)
    for option in filter(is_stashed, plan):
        bytes_W += _weight_bytes(option, world_size)
    return bytes_W


def _weight_bytes(option: ShardingOption, world_size: int) -> Floats:
    """Return the bytes that stashing a table frees on each rank."""
    bytes_W = np.zeros(world_size)
    if not _is_on_devices(option):
        return bytes_W
    for shard in option.shards:
        size = float(np.prod(shard.size)) * option.tensor.element_size()
        bytes_W[int(shard.rank)] += size
    return bytes_W


def _is_on_devices(option: ShardingOption) -> bool:
    """Whether the weights are on devices; TorchRec stashes no other tables."""
    return bool(option.compute_kernel == EmbeddingComputeKernel.FUSED.value)
