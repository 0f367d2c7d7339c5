"""Options as TorchRec stores them: what a plan chose, beside what was listed.

A stored plan is a dictionary: `storage_hash` of an option -> the option. TorchRec's
`extract_plan` takes only shards from it. All else comes from the listed option with the
same `storage_hash`: the same table, sharding type, kernel, cache size and number of
shards. The search chooses splits and cache sizes that are not listed.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence

from torchrec.distributed.planner.types import Shard, ShardingOption

from torchrec_neuroshard.planner.compat import is_stashed, stash
from torchrec_neuroshard.planner.spread_options import unpriced_shards


def with_chosen(
    listed: Sequence[ShardingOption], chosen: Iterable[ShardingOption]
) -> list[ShardingOption]:
    """Return listed options and, after their table's options, those of a plan.

    Chosen options that are listed are not added.
    """
    plan = {option.fqn: option for option in chosen}
    found: list[ShardingOption] = []
    for fqn, own in by_table(listed).items():
        found += own
        option = plan.get(fqn)
        if option and option.storage_hash() not in {o.storage_hash() for o in own}:
            found.append(like(own, option))
            for shard in found[-1].shards:
                shard.rank = None
    return found


def by_table(options: Iterable[ShardingOption]) -> dict[str, list[ShardingOption]]:
    """Return full table name -> its options."""
    tables: dict[str, list[ShardingOption]] = {}
    for option in options:
        tables.setdefault(option.fqn, []).append(option)
    return tables


def kind_of(option: ShardingOption) -> tuple[str, str]:
    """Return an option's sharding type and kernel."""
    return option.sharding_type, option.compute_kernel


def like(listed: Sequence[ShardingOption], option: ShardingOption) -> ShardingOption:
    """Return a copy of one of a table's options, sharded like `option`."""
    same = [o for o in listed if kind_of(o) == kind_of(option)]
    new = with_shards((same or listed)[0], option)
    new.sharding_type, new.compute_kernel = kind_of(option)
    new.partition_by, new.cache_params = option.partition_by, option.cache_params
    return new


def with_shards(listed: ShardingOption, option: ShardingOption) -> ShardingOption:
    """Return a copy of a listed option with the shards of another."""
    new = copy.copy(listed)
    new.shards = copy.deepcopy(option.shards)
    if is_stashed(option):
        stash(new)
    return new


def unplaced(option: ShardingOption) -> ShardingOption:
    """Return a copy of an option without ranks and times."""
    new = copy.copy(option)
    new.shards = [
        Shard(size=s.size, offset=s.offset, storage=s.storage)
        for s in unpriced_shards(option)
    ]
    return new
