"""Places options that the search does not place, with TorchRec's greedy routine."""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Sequence
from typing import Any

from torchrec.distributed.planner.partitioners import GreedyPerfPartitioner
from torchrec.distributed.planner.types import (
    DeviceHardware,
    PlannerError,
    PlannerErrorType,
    ShardingOption,
    Storage,
    Topology,
)

from torchrec_neuroshard.costs.placement_rules import PlacementRules, quoted
from torchrec_neuroshard.costs.task import format_bytes
from torchrec_neuroshard.planner.compat import with_devices
from torchrec_neuroshard.planner.constraints import ranks_by_table
from torchrec_neuroshard.planner.option_facts import table_name

_TIERS = {"hbm": "a device's memory", "ddr": "the host's memory", "ssd": "the disk"}
"""Field of TorchRec's `Storage` -> its name in messages."""


def place_greedily(
    options: Sequence[ShardingOption], topology: Topology, rules: PlacementRules
) -> list[ShardingOption]:
    """Return placed copies of the options.

    Tables that the rules restrict to some ranks are placed first, together with the
    tables that share their rank: fewest ranks first, then largest first.

    Args:
        options: Options with estimates.
        topology: The devices, with the memory for shards.
        rules: Which ranks tables may use.

    Raises:
        PlannerError: The options do not fit (type PARTITION).
    """
    placed = option_copies(options)
    free: list[ShardingOption] = []
    units: dict[tuple[int, ...], list[ShardingOption]] = {}
    for option in placed:
        table = rules.index[table_name(option)]
        if rules.is_free(table):
            free.append(option)
        else:
            units.setdefault(rules.colocated_with(table), []).append(option)
    done: list[ShardingOption] = []
    while units:
        now = rules.restricted(ranks_by_table(done, rules))
        tables = min(
            units, key=lambda t: (len(now.ranks(t[0])), *_negative_size(units[t]))
        )
        unit = units.pop(tables)
        place_unit(unit, less_room(topology, done), now)
        done += unit
    if free:
        less = less_room(topology, done)
        try:
            GreedyPerfPartitioner().partition(free, less)
        except PlannerError as error:
            raise no_fit(_what_lacks(free, less)) from error
    return placed


def _what_lacks(options: Sequence[ShardingOption], topology: Topology) -> str:
    """Return an error text: a table of which a shard fits no rank, or all tables."""
    rooms = [d.storage for d in topology.devices]
    left = {tier: [max(0, getattr(r, tier)) for r in rooms] for tier in _TIERS}
    for option in options:
        need = max((s.storage for s in option.shards), key=lambda s: (s.hbm, s.ddr))
        if not any(need.fits_in(room) for room in rooms):
            kind = f"{option.sharding_type}, kernel {option.compute_kernel}"
            who = f"a shard of table '{table_name(option)}' ({kind}) needs"
            whose, has = "the freest rank has", {t: max(n) for t, n in left.items()}
            break
    else:
        need = sum((s.storage for o in options for s in o.shards), Storage(0, 0))
        names = quoted(list(map(table_name, options)))
        who = f"tables {names}, which the search does not place, together need"
        whose, has = "all ranks have", {t: sum(n) for t, n in left.items()}
    lack = [
        f"{format_bytes(getattr(need, tier))} of {where} ({whose} "
        f"{format_bytes(has[tier])})"
        for tier, where in _TIERS.items()
        if getattr(need, tier)
    ]
    return (
        f"{who} {' and '.join(lack)}. Allow other sharding types or kernels, give the "
        f"topology more memory, or use more ranks than {topology.world_size}."
    )


def no_fit(message: str) -> PlannerError:
    """Return TorchRec's error for a proposal without a plan that fits."""
    return PlannerError(error_type=PlannerErrorType.PARTITION, message=message)


class PlanOptions(list[ShardingOption]):
    """A plan's options; TorchRec copies them deeply, with all that they have in common.

    These copies share whatever a plan does not change.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> PlanOptions:
        """Return the plan with copies of its options and of their shards."""
        return PlanOptions(option_copies(self))


def option_copies(options: Sequence[ShardingOption]) -> list[ShardingOption]:
    """Return copies of options that do not share shards."""
    copies = []
    for option in options:
        new = copy.copy(option)
        new.shards = list(map(copy.copy, option.shards))
        copies.append(new)
    return copies


def memory_left(topology: Topology, placed: Sequence[ShardingOption]) -> list[Storage]:
    """Return the memory left on each rank by placed options."""
    used_W3 = [[0, 0, 0] for _ in topology.devices]
    for option in placed:
        for shard in option.shards:
            used, storage = used_W3[shard.rank], shard.storage
            used[0] += storage.hbm
            used[1] += storage.ddr
            used[2] += storage.ssd
    return [
        device.storage - Storage(*used)
        for device, used in zip(topology.devices, used_W3, strict=True)
    ]


def full_rank(topology: Topology, plan: Sequence[ShardingOption]) -> int | None:
    """Return a rank that lacks device or host memory for a plan; None if all fit."""
    nothing = Storage(hbm=0, ddr=0)
    left = memory_left(topology, plan)
    return next((r for r, m in enumerate(left) if not nothing.fits_in(m)), None)


def check_memory(
    topology: Topology, plan: Sequence[ShardingOption], whose: str
) -> None:
    """Check that a plan fits into memory.

    Args:
        topology: The devices, with the memory for shards.
        plan: Placed options.
        whose: Name of the plan in the error.

    Raises:
        PlannerError: It does not fit (type PARTITION).
    """
    full = full_rank(topology, plan)
    if full is not None:
        left = memory_left(topology, plan)[full]
        over = [
            f"{format_bytes(-getattr(left, tier))} of {where}"
            for tier, where in _TIERS.items()
            if getattr(left, tier) < 0
        ]
        raise no_fit(f"{whose} does not fit: rank {full} lacks {' and '.join(over)}")


def without(topology: Topology, num_bytes: float, host_bytes: float = 0) -> Topology:
    """Return the topology with less memory on every device and in its host's share.

    Args:
        topology: The devices.
        num_bytes: Device memory to take; below 0, to add.
        host_bytes: Host memory to take.
    """
    taken = Storage(hbm=math.ceil(num_bytes), ddr=math.ceil(host_bytes))
    return with_devices(
        topology,
        [DeviceHardware(d.rank, d.storage - taken, d.perf) for d in topology.devices],
    )


def _negative_size(unit: Sequence[ShardingOption]) -> tuple[int, int]:
    """Return the negative memory of tables placed as one, to sort largest first."""
    storages = [s.storage for o in unit for s in o.shards]
    return -sum(s.hbm for s in storages), -sum(s.ddr for s in storages)


def place_unit(
    unit: list[ShardingOption], topology: Topology, rules: PlacementRules
) -> None:
    """Place one table, or tables that go together, in place.

    Raises:
        PlannerError: They do not fit (type PARTITION).
    """
    table = rules.index[table_name(unit[0])]
    ranks = rules.ranks(table)
    choices: list[Collection[int]] = [ranks]
    if len(rules.colocated_with(table)) > 1:
        load = [d.perf.total for d in topology.devices]
        # Break ties like TorchRec: one rank of each host first.
        size = int(topology.local_world_size)
        choices = [(r,) for r in sorted(ranks, key=lambda r: (load[r], r % size, r))]
    for allowed in choices:
        try:
            GreedyPerfPartitioner().partition(unit, _only(topology, allowed))
            return
        except PlannerError:
            for option in unit:
                for shard in option.shards:
                    shard.rank = None
    raise no_fit(
        f"tables {', '.join(map(table_name, unit))} do not fit on ranks "
        f"{', '.join(map(str, ranks)) or 'none'}, which placement_constraints and the "
        "tables placed so far leave; " + _what_lacks(unit, _only(topology, ranks))
    )


def less_room(topology: Topology, placed: Sequence[ShardingOption]) -> Topology:
    """Return the topology with the memory and load after placing options."""
    if not placed:
        return topology
    devices = [
        DeviceHardware(d.rank, storage, copy.copy(d.perf))
        for d, storage in zip(
            topology.devices, memory_left(topology, placed), strict=True
        )
    ]
    for option in placed:
        for shard in option.shards:
            devices[shard.rank].perf += shard.perf
    return with_devices(topology, devices)


def _only(topology: Topology, ranks: Collection[int]) -> Topology:
    """Return the topology with memory on some ranks only."""
    nothing = Storage(hbm=-1, ddr=-1)
    devices = [
        d if d.rank in ranks else DeviceHardware(d.rank, nothing, d.perf)
        for d in topology.devices
    ]
    return with_devices(topology, devices)
