"""What is unusual about a GPU plan that only an estimate recommends."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from torchrec.distributed.planner.types import ShardingOption, Topology

from torchrec_neuroshard.costs.placement_rules import quoted
from torchrec_neuroshard.costs.task import format_bytes
from torchrec_neuroshard.notes import Note
from torchrec_neuroshard.planner.option_facts import table_name
from torchrec_neuroshard.planner.plan_costs import ESTIMATED_COLUMNS, PlanCosts
from torchrec_neuroshard.planner.reader import TableReader

__all__ = ["cautions", "optimizer_notes"]

FULLEST = 3.0
"""Times the mean memory that the fullest rank may hold without a caution."""
LEAST_FILLED = 0.05
"""Share of a rank's memory below which its filling is of no account."""


def cautions(
    costs: PlanCosts, plan: Sequence[ShardingOption], topology: Topology
) -> tuple[Note, ...]:
    """Say what is unusual about a GPU plan that only an estimate recommends.

    Args:
        costs: What the plan was priced by.
        plan: Placed options, with estimates of memory.
        topology: Devices with the memory that is left for shards.
    """
    if costs.cost_model.error is None or topology.compute_device == "cpu":
        return ()
    texts = []
    narrow = {
        table_name(o): min(int(s.size[1]) for s in o.shards)
        for o in plan
        if any(s.size[1] < min(ESTIMATED_COLUMNS, o.tensor.shape[1]) for s in o.shards)
    }
    if narrow:
        texts.append(
            f"{quoted(list(narrow))}: shards of {min(narrow.values())} columns, where "
            f"the estimate is unchecked below {ESTIMATED_COLUMNS}. min_partition="
            f"{ESTIMATED_COLUMNS} in the constraints avoids that"
        )
    used_W = np.zeros(int(topology.world_size))
    for shard in (s for o in plan for s in o.shards):
        used_W[int(shard.rank)] += shard.storage.hbm if shard.storage else 0
    fullest, mean = int(used_W.argmax()), float(used_W.mean())
    room = topology.devices[fullest].storage.hbm
    if used_W[fullest] > max(FULLEST * mean, LEAST_FILLED * room):
        texts.append(
            f"rank {fullest} holds {format_bytes(used_W[fullest])}, "
            f"{used_W[fullest] / mean:.1f} times the mean of all ranks: the estimate "
            "finds that fastest, and memory does not count as long as it suffices"
        )
    return tuple(Note("unusual", text) for text in texts)


def optimizer_notes(
    options: Iterable[ShardingOption], reader: TableReader
) -> tuple[Note, ...]:
    """Say which tables have an optimizer of which nobody knows what it keeps."""
    odd: dict[str, dict[str, None]] = {}
    for option in options:
        if not reader.knows_optimizer(option):
            name = reader.optimizer_name(option)
            odd.setdefault(name, {})[table_name(option)] = None
    texts = (
        f"tables {quoted([*tables])}: what optimizer {name} keeps is not known; "
        "memory and time are counted as Adam's, with two values for each weight"
        for name, tables in sorted(odd.items())
    )
    return tuple(Note("optimizer", text) for text in texts)
