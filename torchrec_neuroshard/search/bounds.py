"""How short a critical path can be at best, under the same cost model.

The cost of a fused set is whatever the model says it is, so a bound needs assumptions
about the model. They are checked on the task itself, on sets looked for because they
break them, and the bound is loosened to what was found; it is a proof only where the
model keeps to them on the sets not looked at too.

1. *Average load.* Let `v(i)` be what shard i adds to the average rank. Every column is
   somewhere, so some rank holds a sum of `v` of at least the mean, `V / W`. Assumed: a
   rank that holds so much costs no less than the average rank does. True of any model
   that is convex in the summed encodings (Jensen's inequality), and of one that is a
   sum over shards plus a launch. For others, the cheapest such set that a descent over
   sets of tables finds, or that the search placed, takes the average rank's place.
2. *Largest shard.* Assumed: a rank costs no less than any one shard it holds, alone.
   Loosened by the smallest ratio of the two among the same sets.
3. *Collectives.* Splitting conserves the columns of the outputs and can only add to the
   ids sent. Assumed: collectives are shortest where all ranks hold equally many.

The critical path is at least the heaviest rank's forward plus its backward, plus the
collectives. A split that makes a table cheaper in all is allowed for at the widths 4,
half and whole.

Shapes: `P` sets, `T` tables, `G` fusion groups, `E` encoding values, `W` ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from torchrec_neuroshard.search.shards import Floats, Ints, ShardBank, split_widths
from torchrec_neuroshard.simulator import critical_path
from torchrec_neuroshard.tables import COLUMN_MULTIPLE

__all__ = ["lower_bound"]

NUM_SETS = 48
"""Sets of tables that a descent makes as cheap as it can."""
NUM_ROUNDS = 24


def lower_bound(bank: ShardBank, placed: Sequence[Ints], seed: int = 0) -> float:
    """Bound the critical path of every placement from below.

    Args:
        bank: The task's shards.
        placed: Placements found by the search, `T x W` widths each.
        seed: Of the sets sampled.

    Returns:
        Milliseconds; the assumptions are in the module's docstring.
    """
    task = bank.task
    shape = (1, task.world_size, 1)
    comms = bank.simulator.comms_costs(
        np.tile(bank.mean_columns_S, shape), np.tile(bank.mean_index_bytes_S, shape)
    )
    share = _total_weight(bank) / task.world_size
    cost, weight, largest = _cheap_sets(bank, share, seed)
    ranks = [_placed_sets(bank, width_TW) for width_TW in placed]
    cost = np.concatenate([cost, *(r[0] for r in ranks)])
    weight = np.concatenate([weight, *(r[1] for r in ranks)])
    largest = np.concatenate([largest, *(r[2] for r in ranks)])
    heavy = weight >= share * (1 - 1e-9)
    average = min(_average_rank(bank, share), float(cost[heavy].min(initial=np.inf)))
    held = largest > 0
    kept = float((cost[held] / largest[held]).min(initial=1.0))
    return max(average, kept * _largest_shard(bank)) + float(critical_path(comms)[0])


def _total_weight(bank: ShardBank) -> float:
    """Marginal costs of all columns, each in the cheapest of some widths [ms]."""
    tables = np.arange(len(bank.dims_T))
    cheapest = bank.marginal(bank.whole_T).sum(axis=1)
    if max(bank.task.max_shards) > 1 and bank.task.world_size > 1:
        narrow = np.maximum(COLUMN_MULTIPLE, np.asarray(bank.task.min_widths))
        half = bank.dims_T // 2
        for width_T in (narrow, half):
            width_T = np.minimum(
                -(-width_T // COLUMN_MULTIPLE) * COLUMN_MULTIPLE, bank.dims_T
            )
            cost = bank.marginal(bank.rows(tables, width_T)).sum(axis=1)
            cheapest = np.minimum(cheapest, cost * bank.dims_T / width_T)
    return float(cheapest.sum())


def _average_rank(bank: ShardBank, share: float) -> float:
    """Cost of a rank of average weight, on the tangent at the context [ms]."""
    task = bank.task
    weight_G = np.bincount(
        bank.groups_T,
        weights=bank.marginal(bank.whole_T).sum(axis=1),
        minlength=task.num_groups,
    )
    offset_G = bank.context_G2.sum(axis=1) - bank.context_share_G * weight_G
    offset_G = offset_G[np.bincount(bank.groups_T, minlength=task.num_groups) > 0]
    # A rank may hold nothing of a group and save its launch, but not of all groups;
    # and each group has a launch somewhere.
    launch = np.maximum(offset_G, 0.0)
    saved = max(float(launch.min()), float(launch.sum()) / task.world_size)
    return share + saved + float(np.minimum(offset_G, 0.0).sum())


def _costs(bank: ShardBank, sums_PGE: Floats, held_PG: Ints) -> Floats:
    """Total of each set over its groups [ms]."""
    cost = np.zeros(held_PG.shape)
    held = held_PG > 0
    cost[held] = bank.predict(sums_PGE[held]).sum(axis=1)
    total: Floats = cost.sum(axis=1)
    return total


def _cheap_sets(
    bank: ShardBank, share: float, seed: int
) -> tuple[Floats, Floats, Floats]:
    """Look for sets of whole tables that weigh at least `share` and cost little.

    Returns:
        Cost, weight and costliest single shard of each set [ms].
    """
    task = bank.task
    num_tables, num_groups = len(task.tables), task.num_groups
    rng = np.random.default_rng(seed)
    weight_T = bank.marginal(bank.whole_T).sum(axis=1)
    encoding_TE = bank.encoding(bank.whole_T)
    alone_T = bank.predict(encoding_TE).sum(axis=1)
    order_PT = rng.permuted(np.tile(np.arange(num_tables), (NUM_SETS, 1)), axis=1)
    before = np.cumsum(weight_T[order_PT], axis=1) - weight_T[order_PT]
    member_PT = np.zeros((NUM_SETS, num_tables), dtype=bool)
    np.put_along_axis(member_PT, order_PT, before < share, axis=1)
    group_TG = np.eye(num_groups)[bank.groups_T]
    sums_PGE = np.einsum("pt,tg,te->pge", member_PT * 1.0, group_TG, encoding_TE)
    held_PG = (member_PT @ group_TG).astype(np.int64)
    cost_P = _costs(bank, sums_PGE, held_PG)
    line = np.arange(NUM_SETS)
    for _ in range(NUM_ROUNDS):
        # Exchange one member for one that is not, or only take one out.
        noise = rng.random((NUM_SETS, num_tables))
        out = np.where(member_PT, noise, -1.0).argmax(axis=1)
        new = np.where(member_PT, -1.0, noise).argmax(axis=1)
        new = np.where(rng.random(NUM_SETS) < 0.2, -1, new)
        added = (new >= 0) & ~member_PT[line, new]
        sums, held = sums_PGE.copy(), held_PG.copy()
        sums[line, bank.groups_T[out]] -= encoding_TE[out]
        held[line, bank.groups_T[out]] -= 1
        at = line[added], bank.groups_T[new[added]]
        sums[at] += encoding_TE[new[added]]
        held[at] += 1
        weight = (
            member_PT @ weight_T - weight_T[out] + np.where(added, weight_T[new], 0.0)
        )
        cost = _costs(bank, sums, held)
        better = (weight >= share) & (cost < cost_P)
        member_PT[line[better], out[better]] = False
        grown = better & added
        member_PT[line[grown], new[grown]] = True
        sums_PGE[better], held_PG[better] = sums[better], held[better]
        cost_P[better] = cost[better]
    weight_P: Floats = member_PT @ weight_T
    return cost_P, weight_P, (member_PT * alone_T).max(axis=1)


def _placed_sets(bank: ShardBank, width_TW: Ints) -> tuple[Floats, Floats, Floats]:
    """Cost, weight and costliest single shard of each rank's set [ms]."""
    task = bank.task
    table, rank = np.nonzero(width_TW)
    rows = bank.rows(table, width_TW[table, rank])
    shape = (task.world_size, task.num_groups)
    sums = np.zeros((*shape, bank.encoding_dim))
    held = np.zeros(shape, dtype=np.int64)
    np.add.at(sums, (rank, bank.groups_T[table]), bank.encoding(rows))
    np.add.at(held, (rank, bank.groups_T[table]), 1)
    weight: Floats = np.bincount(
        rank, weights=bank.marginal(rows).sum(axis=1), minlength=task.world_size
    ).astype(np.float64)
    largest = np.zeros(task.world_size)
    np.maximum.at(largest, rank, bank.predict(bank.encoding(rows)).sum(axis=1))
    return _costs(bank, sums, held), weight, largest


def _largest_shard(bank: ShardBank) -> float:
    """Cost alone of the shard that no split makes cheaper [ms]."""
    task = bank.task
    widest = [
        split_widths(task, table, bank.splits(table)[-1])[0]
        for table in range(len(task.tables))
    ]
    rows = bank.rows(np.arange(len(widest)), widest)
    return float(bank.predict(bank.encoding(rows)).sum(axis=1).max())
