"""How short a critical path can be at best, under the same cost model.

The cost of a fused set is whatever the model says it is, so a bound needs assumptions
about the model. Two are made, both measured on the task itself and loosened to what was
measured:

1. *Average load.* Let `m` be the average rank: all tables' encodings over the number of
   ranks, and `v(i)` what shard i adds to it. Some rank holds at least the mean of the
   summed `v`, because every column must be somewhere. Assumed: a rank that holds at
   least that much is not cheaper than `m`, but for a slack. The slack is the largest
   shortfall found among sampled and placed sets. For a model that is convex in the
   summed encodings, and for one that is affine plus a launch cost, the slack is 0 and
   the bound is exact (Jensen's inequality, which needs only the heaviest rank).
2. *Largest shard.* A rank that holds a shard is not cheaper than the shard alone, but
   for a slack measured in the same way.

Collectives: the outputs' columns are conserved by splitting; assumed is that the
collectives are shortest when all ranks hold equally many.
"""

from __future__ import annotations

import numpy as np

from torchrec_neuroshard.search.shards import (
    Floats,
    Ints,
    ShardBank,
    legal_splits,
    split_widths,
    sum_by,
)

__all__ = ["lower_bound"]

NUM_SAMPLES = 64
"""Random placements whose ranks are compared with the average one."""


def lower_bound(bank: ShardBank, placed: list[Ints], seed: int = 0) -> float:
    """Bound the critical path of every placement from below.

    Args:
        bank: The task's shards.
        placed: Placements found by the search, `T x W` widths each: their ranks are
            among the sets that the assumptions are checked on.
        seed: Of the sampled sets.

    Returns:
        Milliseconds.
    """
    columns = np.full((1, bank.task.world_size), bank.mean_columns)
    comms = bank.simulator.comms_model.all_to_all(columns, bank.task.batch_size)
    comms_ms = float(comms.max(axis=1).sum())
    return max(_average_load(bank, placed, seed), _largest_shard(bank)) + comms_ms


def _average_load(bank: ShardBank, placed: list[Ints], seed: int) -> float:
    """Cost of the average rank less the measured slack [ms]."""
    task = bank.task
    present = np.flatnonzero(np.bincount(bank.groups_T, minlength=task.num_groups))
    mean_ms = float(bank.predict(bank.mean_GE[present]).sum())
    rng = np.random.default_rng(seed)
    num_tables, num_ranks = len(task.tables), task.world_size
    count = max(1, min(NUM_SAMPLES, 20_000 // (num_tables * 1 + num_ranks)))
    rows = [np.tile(bank.whole_T, count)]
    set_ids = [
        (
            np.arange(count)[:, None] * num_ranks
            + rng.integers(num_ranks, size=(count, num_tables))
        ).reshape(-1)
    ]
    for number, width_TW in enumerate(placed):
        table, rank = np.nonzero(width_TW)
        rows.append(bank.rows(table, width_TW[table, rank]))
        set_ids.append((count + number) * num_ranks + rank)
    cost, weight = _costs(
        bank,
        np.concatenate(rows),
        np.concatenate(set_ids),
        (count + len(placed)) * num_ranks,
    )
    share = float(bank.marginal(bank.whole_T).sum()) / num_ranks
    heavy = weight >= share * (1 - 1e-9)
    return min(mean_ms, float(cost[heavy].min(initial=np.inf)))


def _costs(
    bank: ShardBank, rows_N: Ints, set_ids_N: Ints, num_sets: int
) -> tuple[Floats, Floats]:
    """Cost and summed marginal costs of sets [ms]."""
    num_groups = bank.task.num_groups
    ids = set_ids_N * num_groups + bank.groups_T[bank.table(rows_N)]
    sums = sum_by(ids, bank.encoding(rows_N), num_sets * num_groups)
    held = np.unique(ids)
    cost = np.zeros(len(sums))
    cost[held] = bank.predict(sums[held]).sum(axis=1)
    weight = np.bincount(
        set_ids_N, weights=bank.marginal(rows_N).sum(axis=1), minlength=num_sets
    )
    return cost.reshape(num_sets, num_groups).sum(axis=1), weight


def _largest_shard(bank: ShardBank) -> float:
    """Cost alone of the shard that no split makes cheaper [ms]."""
    task = bank.task
    pairs = []
    for table in range(len(task.tables)):
        most = legal_splits(task, table)[-1]
        pairs.append((table, split_widths(task, table, most)[0]))
    table, width = np.array(pairs).T
    alone = bank.predict(bank.encoding(bank.rows(table, width))).sum(axis=1)
    return float(alone.max())
