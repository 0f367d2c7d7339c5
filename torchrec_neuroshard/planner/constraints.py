"""Placement rules and TorchRec's options: which options the rules permit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torchrec.distributed.planner.types import ShardingOption

from torchrec_neuroshard.costs.placement_rules import PlacementRules
from torchrec_neuroshard.planner.option_facts import table_name
from torchrec_neuroshard.planner.reader import TableReader
from torchrec_neuroshard.planner.spread_options import sample_shards
from torchrec_neuroshard.planner.ways import node_ranks, searched_type
from torchrec_neuroshard.tables.sharding_types import EQUAL_COLUMNS, SHARDING_TYPES


def ranks_by_table(
    plan: Iterable[ShardingOption], rules: PlacementRules
) -> dict[int, set[int]]:
    """Return table -> the ranks that hold its shards in a placed plan."""
    return {rules.index[table_name(o)]: {int(s.rank) for s in o.shards} for o in plan}


def permits(rules: PlacementRules, option: ShardingOption, reader: TableReader) -> bool:
    """Whether a table may use the ranks that an option needs.

    Args:
        rules: The model's rules.
        option: One of a table's options, with or without ranks.
        reader: Knows the devices.
    """
    table, node_size = rules.index[table_name(option)], reader.node_size
    block = SHARDING_TYPES[option.sharding_type].block
    is_joined = any(table in tables for tables in rules.together)
    is_whole = option.tensor.shape[0] == sample_shards(option)[0].size[0]
    if is_joined and (block == "world" or not is_whole):
        return False
    node = node_ranks(option, reader)
    if node is not None and len(node) < rules.world_size:
        # Tables that go together would all need options for the same node.
        return not is_joined and not set(node).isdisjoint(rules.ranks(table))
    if searched_type(option) == EQUAL_COLUMNS:
        return not is_joined and len(rules.ranks(table)) >= option.num_shards
    if block == "world":
        return rules.is_free(table)
    if block == "node":
        ranks = set(rules.ranks(table))
        starts = range(0, rules.world_size, node_size)
        free = sum(ranks.issuperset(range(s, s + node_size)) for s in starts)
        return bool(free * node_size >= option.num_shards)
    return True


def too_few_ranks(
    options: Sequence[ShardingOption], how: str = "may only be sharded"
) -> str:
    """Return the error text for a table without a permitted option."""
    kinds = ", ".join(sorted({o.sharding_type for o in options}))
    return (
        f"table '{table_name(options[0])}' {how} {kinds}, which needs "
        "more ranks than placement_constraints allow. Allow more ranks or table-wise "
        "sharding for it"
    )
