"""Stashed tables: their weights wait on the host while dense layers run.

TorchRec 1.9 copies the weights of such tables to the host after their lookups, and back
before their updates (`MemoryStashingManager`). Dense layers have that memory meanwhile.
So tables may fill more than what dense layers leave, if the copies are worth it.

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
from torchrec_neuroshard.planner.compat import (
    is_stashed,
    stash,
    torchrec_stashes,
)
from torchrec_neuroshard.planner.greedy import without
from torchrec_neuroshard.planner.option_facts import table_name
from torchrec_neuroshard.planner.plan_costs import PlanCosts
from torchrec_neuroshard.planner.topology import GB_PER_S

__all__ = [
    "RoomOfDenseLayers",
    "check_stash_bytes",
    "exposed_ms",
    "stash_enough",
    "stash_notes",
]

Floats = npt.NDArray[np.float64]


def check_stash_bytes(stash_bytes: float, topology: Topology) -> None:
    """Check that tables can be stashed here.

    Raises:
        ConfigError: They cannot, or the number is below 0.
    """
    if not stash_bytes >= 0:
        raise ConfigError(f"stash_bytes is {stash_bytes}, below 0")
    if topology.compute_device == "cpu":
        raise ConfigError("stash_bytes is for GPUs; the topology's device is 'cpu'")
    if not torchrec_stashes():
        raise ConfigError(
            "stash_bytes needs TorchRec 1.9 or later, whose MemoryStashingManager "
            "copies the weights; leave it out or update TorchRec"
        )


class RoomOfDenseLayers(StorageReservation):
    """Leaves more for tables than another reservation does.

    Args:
        inner: The other one.
        more_bytes: Memory of each rank that it keeps back and that tables may take.
    """

    def __init__(self, inner: StorageReservation, more_bytes: float) -> None:
        self._inner, self._more_bytes = inner, more_bytes
        self._left: Topology | None = None

    @property
    def last_reserved_topology(self) -> Topology | None:
        """What `reserve` returned last."""
        return self._left

    def reserve(self, *arguments: Any, **named: Any) -> Topology:
        """Return the devices with what is left; arguments as in TorchRec."""
        left = self._inner.reserve(*arguments, **named)
        self._left = without(left, -self._more_bytes)
        return self._left


def stash_enough(plan: Sequence[ShardingOption], excess_W: Floats) -> bool:
    """Mark tables to stash until every rank has its excess free.

    Tables that the model itself marks are counted first. Then each time the table comes
    whose bytes serve best. Tables that turn out to be needless are taken back.

    Args:
        plan: Placed options; those chosen are marked.
        excess_W: Bytes that dense layers lack on each rank; 0 and below: none.

    Returns:
        Whether that is possible; if not, nothing is marked.
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
        # Of tables that serve all of their bytes, the largest: few copies.
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
    """Return what the copies of stashed tables add to an iteration [ms].

    Args:
        costs: Says how long dense layers run, which hide copies.
        plan: Placed options.
    """
    return max(_copies_ms(costs, plan) - _dense_ms(costs), 0.0)


def stash_notes(costs: PlanCosts, plan: Sequence[ShardingOption]) -> tuple[Note, ...]:
    """Say what stashing tables frees, and what copying them takes in each iteration.

    Args:
        costs: What the plan was priced by.
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
        f"{_copies_ms(costs, plan):.3g} ms at {_gb_per_s(topology):.3g} GB/s. Dense "
        f"layers hide at most {_dense_ms(costs):.3g} ms of it (dense_ms). The other "
        f"{exposed_ms(costs, plan):.3g} ms are in no prediction"
    )
    return (Note("stash", text),)


def _copies_ms(costs: PlanCosts, plan: Sequence[ShardingOption]) -> float:
    """Return what the copies to the host and back take on the busiest rank [ms]."""
    bytes_W = _stashed_bytes(plan, int(costs.topology.world_size))
    return float(2 * bytes_W.max() / (_gb_per_s(costs.topology) * 1e6))


def _dense_ms(costs: PlanCosts) -> float:
    return float(costs.dense.forward + costs.dense.backward)


def _gb_per_s(topology: Topology) -> float:
    """Return the bandwidth between a device and its host [1e9 bytes/s]."""
    return float(topology.hbm_to_ddr_mem_bw) * GB_PER_S


def _stashed_bytes(plan: Sequence[ShardingOption], world_size: int) -> Floats:
    """Return the stashed weights of each rank [bytes]."""
    bytes_W = np.zeros(world_size)
    for option in filter(is_stashed, plan):
        bytes_W += _weight_bytes(option, world_size)
    return bytes_W


def _weight_bytes(option: ShardingOption, world_size: int) -> Floats:
    """Return what stashing a table frees on each rank [bytes]."""
    bytes_W = np.zeros(world_size)
    if not _is_on_devices(option):
        return bytes_W
    for shard in option.shards:
        size = float(np.prod(shard.size)) * option.tensor.element_size()
        bytes_W[int(shard.rank)] += size
    return bytes_W


def _is_on_devices(option: ShardingOption) -> bool:
    """Whether FBGEMM keeps the weights on devices: TorchRec stashes no others."""
    return bool(option.compute_kernel == EmbeddingComputeKernel.FUSED.value)
