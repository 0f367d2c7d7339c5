"""Chooses options for the tables that the search does not place, all together."""

from __future__ import annotations

from collections.abc import Sequence

from torchrec.distributed.planner.proposers import GreedyProposer, UniformProposer
from torchrec.distributed.planner.types import PlannerError, ShardingOption, Topology

from torchrec_neuroshard.costs.placement_rules import PlacementRules
from torchrec_neuroshard.planner.greedy import place_greedily
from torchrec_neuroshard.planner.option_facts import is_even
from torchrec_neuroshard.planner.plan_costs import PlanCosts

MOST_SHARDS = 50_000
"""Most shards in the proposals of one proposer. This is not a time limit, since a plan
must not depend on the machine's load."""
_MOST_WORSE = 10
"""Proposals in a row that TorchRec's proposers make without a shorter plan."""


def place_unsearched(
    tables: Sequence[Sequence[ShardingOption]],
    topology: Topology,
    rules: PlacementRules,
    costs: PlanCosts,
) -> list[ShardingOption]:
    """Return one placed option per table: the shortest of several greedy plans.

    The plans are of each table's first option, of those of least memory, and of
    TorchRec's proposals: the fastest options, then less memory for one table after
    another; and the same sharding type for all tables.

    Args:
        tables: The options of each table, with estimates, the preferred one first.
        topology: The devices, with the memory for shards.
        rules: Which ranks tables may use.
        costs: Prices plans.

    Raises:
        PlannerError: No proposal fits (type PARTITION).
    """
    plans: list[tuple[tuple[bool, float], list[ShardingOption]]] = []

    def path_ms(proposal: list[ShardingOption]) -> float | None:
        """Return the time of the proposal's plan, which is kept; None: it has none."""
        try:
            plan = place_greedily(proposal, topology, rules)
        except PlannerError:
            return None
        costs.share_launches(plan)
        path_ms = costs.placed(plan).predicted.critical_path_ms
        plans.append(((not is_even(plan), path_ms), plan))
        return path_ms

    first = [options[0] for options in tables]
    if all(len(options) == 1 for options in tables):
        return place_greedily(first, topology, rules)
    for proposal in (first, [min(options, key=_bytes) for options in tables]):
        path_ms(proposal)
    for proposer in (
        GreedyProposer(threshold=_MOST_WORSE),
        GreedyProposer(use_depth=False, threshold=_MOST_WORSE),
        UniformProposer(),
    ):
        proposer.load([option for options in tables for option in options])
        num_left = MOST_SHARDS
        while num_left > 0 and (proposal := proposer.propose()):
            proposer.feedback(True, None, path_ms(proposal))
            num_left -= sum(option.num_shards for option in proposal)
    if not plans:
        return place_greedily(first, topology, rules)  # raises
    return min(plans, key=lambda plan: plan[0])[1]


def _bytes(option: ShardingOption) -> tuple[int, int]:
    return max((shard.storage.hbm, shard.storage.ddr) for shard in option.shards)
