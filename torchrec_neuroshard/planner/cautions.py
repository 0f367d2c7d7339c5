"""Notes on unusual GPU plans that only an estimate recommends."""

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

FULLEST = 3.0
"""Without a note, the fullest rank holds at most this multiple of the mean memory."""
LEAST_FILLED = 0.05
"""No note if the fullest rank uses less than this share of its memory."""


def cautions(
    costs: PlanCosts, plan: Sequence[ShardingOption], topology: Topology
) -> tuple[Note, ...]:
    """Return notes on an unusual GPU plan that only an estimate recommends.

    Args:
        costs: The costs that priced the plan.
        plan: Placed options, with estimates of memory.
        topology: The devices, with the memory left for shards.
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
            f"{quoted(list(narrow))}: shards of {min(narrow.values())} columns, but "
            f"the estimate was not checked below {ESTIMATED_COLUMNS}. Set "
            f"min_partition={ESTIMATED_COLUMNS} in the constraints to avoid them"
        )
    used_W = np.zeros(int(topology.world_size))
    for shard in (s for o in plan for s in o.shards):
        used_W[int(shard.rank)] += shard.storage.hbm if shard.storage else 0
    fullest, mean = int(used_W.argmax()), float(used_W.mean())
    room = topology.devices[fullest].storage.hbm
    if used_W[fullest] > max(FULLEST * mean, LEAST_FILLED * room):
        texts.append(
            f"rank {fullest} holds {format_bytes(used_W[fullest])}, "
            f"{used_W[fullest] / mean:.1f} times the mean of all ranks: this plan has "
            "the lowest estimated time, and the search does not balance memory"
        )
    return tuple(Note("unusual", text) for text in texts)


def optimizer_notes(
    options: Iterable[ShardingOption], reader: TableReader
) -> tuple[Note, ...]:
    """Return notes on tables whose optimizer has a state of unknown size."""
    odd: dict[str, dict[str, None]] = {}
    for option in options:
        if not reader.knows_optimizer(option):
            name = reader.optimizer_name(option)
            odd.setdefault(name, {})[table_name(option)] = None
    texts = (
        f"tables {quoted([*tables])}: the state size of optimizer {name} is unknown; "
        "memory and time count as for Adam, with two values per weight"
        for name, tables in sorted(odd.items())
    )
    return tuple(Note("optimizer", text) for text in texts)
