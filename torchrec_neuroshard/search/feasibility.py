"""Check whether the tables fit at all, and pack them exactly if greedy placement fails.

`check_memory` proves quickly that a table, or all tables together, cannot fit, and says
why. `pack` finds a placement within memory and placement rules by an integer program,
without regard to costs.

Shapes: `T` entries of the task, one for each way; `N` tables; `W` ranks; `M` memories
(the device's and, if it is limited, the host's); `X` the memories and their sum; `B`
blocks of ranks; `K` kinds of shards (see `_solve`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy import optimize, sparse

from torchrec_neuroshard.costs.placement_rules import listed, quoted
from torchrec_neuroshard.costs.task import HOST, ShardingTask, format_bytes
from torchrec_neuroshard.errors import InfeasibleError
from torchrec_neuroshard.search.rules import follow, merged
from torchrec_neuroshard.search.shards import Bools, Floats, Ints
from torchrec_neuroshard.search.shards import legal_splits as splits
from torchrec_neuroshard.tables.table import COLUMN_MULTIPLE

PACK_SECONDS = 10.0
"""Time limit of exact packing."""
MAX_PACK_VARIABLES = 50_000
"""Exact packing is tried up to this many ways times ranks."""


def describe(task: ShardingTask, table: int) -> str:
    """Return a table's name, shape and data type, for messages."""
    config = task.tables[table]
    return (
        f"table '{config.name}' (num_embeddings={config.num_embeddings}, "
        f"embedding_dim={config.embedding_dim}, {config.data_type})"
    )


def way_out(task: ShardingTask) -> str:
    """Return advice for tables that need too much memory."""
    kinds = map(task.sharding_type, range(len(task.tables)))
    example = "" if any(k.splits_rows for k in kinds) else " (such as row_wise)"
    return (
        f"Use more than {task.world_size} ranks or ranks with more memory, use a "
        f"smaller data_type, or allow the table other sharding types{example}, "
        "kernels, narrower shards or other ranks."
    )


def smallest_widths(task: ShardingTask) -> Ints:
    """Return the columns of each way's widest shard in its finest split, `T`.

    For ways that do not split columns, these are the columns of a block.
    """
    return np.array(
        [
            -(-table.embedding_dim // (COLUMN_MULTIPLE * splits(task, way)[-1]))
            * COLUMN_MULTIPLE
            if task.sharding_type(way).in_columns
            else task.block_width(way)
            for way, table in enumerate(task.tables)
        ]
    )


def fitting(task: ShardingTask) -> Bools:
    """Return which ways have enough ranks with room for their smallest shards, `T`.

    Each way is checked alone, on empty ranks.
    """
    caps_MW, fixed_MT, column_MT = task.memory
    size_MT = fixed_MT + column_MT * smallest_widths(task)
    room_TW: Bools = np.all(size_MT[:, :, None] <= caps_MW[:, None], axis=0)
    if task.rules.allowed_TW is not None:
        room_TW &= task.rules.allowed_TW
    fits_T = np.zeros(len(room_TW), dtype=bool)
    block_T = np.array([task.block_size(t) for t in range(len(room_TW))])
    blocks_T = np.array([task.num_blocks(t) for t in range(len(room_TW))])
    for size in np.unique(block_T).tolist():
        own = np.flatnonzero(block_T == size)
        room_TB = room_TW[own].reshape(len(own), -1, size).all(axis=2)
        fits_T[own] = room_TB.sum(axis=1) >= blocks_T[own]
    return fits_T


def _least_bytes(task: ShardingTask) -> Floats:
    """Return the fewest bytes that each table needs on all ranks together.

    Returns:
        `N x X`: each memory's minimum over the table's ways, then the minimum of the
        sum over memories.
    """
    _, fixed_MT, column_MT = task.memory
    every = range(len(task.tables))
    width_T = [task.block_width(way) for way in every]
    count_T = [task.block_size(t) * task.num_blocks(t) for t in every]
    total_MT = (fixed_MT + column_MT * width_T) * count_T
    total_TX = np.vstack([total_MT, total_MT.sum(axis=0)]).T
    ways = task.ways
    starts = np.cumsum([0, *map(len, ways[:-1])])
    least: Floats = np.minimum.reduceat(total_TX[np.concatenate(ways)], starts)
    return least


def check_memory(task: ShardingTask, *, is_part: bool = False) -> None:
    """Raise if a table or all tables together cannot fit in any placement.

    Args:
        task: The task.
        is_part: Whether the other tables of a larger task are placed already.

    Raises:
        InfeasibleError: No placement fits; names the table or the total, and the way
            out.
    """
    if not (task.memory_bytes or task.host_memory_bytes):
        return
    sets = {tables[0]: tables for tables in task.together}
    task = merged(task)
    left = " left beside other tables" if is_part else ""
    fits_T, caps_MW, least_NX = fitting(task), task.memory[0], _least_bytes(task)
    for ways, least_X in zip(task.ways, least_NX, strict=True):
        if fits_T[list(ways)].any():
            continue
        if ways[0] in sets:
            names = quoted([task.tables[t].name for t in sets[ways[0]]])
            raise InfeasibleError(
                f"tables {names} must be together and need "
                f"{format_bytes(least_X[-1])}; no rank that may hold them has room. "
                "Take a table out of the set or allow more ranks"
            )
        raise InfeasibleError(f"{_too_large(task, ways)}{left}. {way_out(task)}")
    # Compare needs and room: of all tables on all ranks, and of the tables that are
    # limited to some ranks on those ranks.
    every = tuple(range(task.world_size))
    allowed = task.allowed_ranks or ((),) * len(task.tables)
    limits = {*allowed}
    for ranks in (every, *sorted(limits - {()})):
        within = {r for r in limits if {*(r or every)} <= {*ranks}}
        held = [
            n
            for n, ways in enumerate(task.ways)
            if within.issuperset(allowed[w] for w in ways)
        ]
        has_X = np.append(
            caps_MW[:, list(ranks)].sum(axis=1), caps_MW[:, list(ranks)].sum()
        )
        needs_X = least_NX[held].sum(axis=0)
        if not (needs_X > has_X).any():
            continue
        place = int((needs_X > has_X).argmax())
        needs, has = format_bytes(needs_X[place]), format_bytes(has_X[place])
        where = HOST * (place == 1)
        if len(ranks) < len(every):
            names = quoted([task.tables[task.ways[n][0]].name for n in held])
            raise InfeasibleError(
                f"{where}tables {names} may only be on {listed(ranks)} and need "
                f"{needs}; there is room for {has}. Allow some of them more ranks"
            )
        both = ", their hosts' memory included" if place == 2 else ""
        raise InfeasibleError(
            f"{where}the tables need {needs} in all, but the {len(ranks)} ranks have "
            f"{has}{both}{left}; the largest is {_largest(task, least_NX)}. "
            f"{way_out(task)}"
        )


def _largest(task: ShardingTask, least_NX: Floats) -> str:
    return describe(task, task.ways[int(least_NX[:, -1].argmax())][0])


def _too_large(task: ShardingTask, ways: Sequence[int]) -> str:
    """Return what a table needs, in its way that comes nearest to fitting.

    Also says how much memory the ranks have.
    """
    caps_MW, fixed_MT, column_MT = task.memory
    size_MT = fixed_MT + column_MT * smallest_widths(task)
    found = []
    for way in ways:
        most_M = caps_MW[:, task.rules.ranks(way)].max(axis=1, initial=0.0)
        share_M = size_MT[:, way] / np.maximum(most_M, 1.0)
        found.append((share_M.max(), int(share_M.argmax()), way))
    _, place, way = min(found)
    kind, part = task.sharding_types[way], format_bytes(size_MT[place, way])
    count = task.block_size(way) * task.num_blocks(way)
    name = f"{HOST * place}{describe(task, way)}"
    if count > 1:
        room = int((caps_MW[place] >= size_MT[place, way]).sum())
        return (
            f"{name} needs {part} on each of {count} ranks ({kind}); of "
            f"{task.world_size} ranks, {room} have that much"
        )
    whole = column_MT[place, way] * task.tables[way].embedding_dim
    total = format_bytes(fixed_MT[place, way] + whole)
    split = f", at least {part} of it on one rank" * (part != total)
    freest = max(task.rules.ranks(way), key=lambda rank: caps_MW[place, rank])
    return (
        f"{name} needs {total}{split} ({kind}); the freest rank, {freest}, has "
        f"{format_bytes(caps_MW[place, freest])}"
    )


def pack(task: ShardingTask, seconds: float = PACK_SECONDS) -> Ints:
    """Find a placement within memory and placement rules, without regard to costs.

    Args:
        task: The task.
        seconds: Time limit.

    Returns:
        `T x W` widths.

    Raises:
        InfeasibleError: No placement exists or none was found; the message says which.
    """
    end, proven = time.monotonic() + seconds, False
    whole, task = task, merged(task)
    caps_MW, fixed_MT, column_MT = task.memory
    # The solver may exceed limits by its tolerance. Then slightly smaller limits are
    # tried.
    for shrink in (0.0, 1e-6):
        if len(task.tables) * task.world_size > MAX_PACK_VARIABLES:
            break
        found = _solve(task, shrink, max(end - time.monotonic(), 0.1))
        if found.status == 2:
            proven = shrink == 0.0
        if found.x is None:
            break
        width_TW: Ints = found.x
        held_TW = width_TW > 0
        used_MW = fixed_MT @ held_TW + column_MT @ width_TW
        if (used_MW <= caps_MW).all():
            return follow(whole, width_TW)
    least_NX = _least_bytes(task)
    needs = map(format_bytes, least_NX[:, :-1].sum(axis=0))
    limits = map(format_bytes, caps_MW.sum(axis=1))
    raise InfeasibleError(
        f"the tables need {'at least ' if task.has_choices else ''}"
        f"{f' and, {HOST}'.join(needs)} in all and the {task.world_size} ranks have "
        f"{' and, in their hosts, '.join(limits)}, but no allowed split fits every "
        f"shard on a rank{' that may hold it' if task.rules else ''} "
        f"({'proven by exact packing' if proven else 'none was found'}); the largest "
        f"is {_largest(task, least_NX)}. {way_out(task)}"
    )


def _solve(task: ShardingTask, shrink: float, seconds: float) -> Any:
    """Solve packing as an integer program.

    A *kind* is one way to cut a table. If shards may be uneven, a way in columns is one
    kind, and its unit is 4 columns. Otherwise each number of equal shards is a kind,
    and its unit is a shard. A way in blocks of ranks is one kind, and its unit is the
    width of a block.

    The variables of each kind and rank are the number of units there and whether there
    is a shard. One more variable per kind says whether its table is cut this way.

    Args:
        task: The task.
        shrink: Relative reduction of all memory limits.
        seconds: Time limit.

    Returns:
        SciPy's result. Its `x` is replaced by `T x W` widths, or None.
    """
    num_ranks = task.world_size
    kinds: list[tuple[int, int, int, int, int]] = []
    for way, config in enumerate(task.tables):
        width = config.embedding_dim
        if not task.sharding_type(way).in_columns:
            blocks = task.num_blocks(way)
            kinds.append((way, width // blocks, 1, 1, blocks * task.block_size(way)))
        elif task.uneven:
            units = width // COLUMN_MULTIPLE
            fewest = min(units, max(1, -(-task.min_widths[way] // COLUMN_MULTIPLE)))
            most = max(1, min(task.max_shards[way], num_ranks))
            kinds.append((way, COLUMN_MULTIPLE, units, fewest, most))
        else:
            kinds += [(way, width // k, 1, 1, k) for k in splits(task, way)]
    way_K = np.array([way for way, *_ in kinds])
    unit_K, most_K, fewest_K, shards_K = np.array(kinds, dtype=np.float64)[:, 1:].T
    dims_K = np.array([task.tables[t].embedding_dim for t in way_K])
    block_K = np.array([task.block_size(t) for t in way_K])
    size = len(kinds) * num_ranks
    one = sparse.eye_array(2 * size + len(kinds), format="csr")
    units, shards, chosen = one[:size], one[size : 2 * size], one[2 * size :]

    def each(values_K: Floats) -> Any:
        return sparse.diags_array(np.repeat(values_K, num_ranks))

    def over_ranks(values_K: Floats) -> Any:
        return sparse.kron(sparse.diags_array(values_K), np.ones((1, num_ranks)))

    def on_ranks(values_K: Floats) -> Any:
        return sparse.kron(values_K[None], sparse.eye_array(num_ranks))

    of_tables = np.array([np.isin(way_K, ways) for ways in task.ways], dtype=float)
    held = over_ranks(unit_K) @ units, over_ranks(np.ones(len(kinds))) @ shards
    # Constraints: sums of variables, their lower and their upper limits.
    lines: list[tuple[Any, Floats | float, Floats | float]] = [
        # Units need a shard, and a shard needs its fewest units.
        (units - each(most_K) @ shards, -np.inf, 0.0),
        (units - each(fewest_K) @ shards, 0.0, np.inf),
        # Each table has one kind, all columns, and no more shards than allowed.
        (sparse.csr_array(of_tables) @ chosen, 1.0, 1.0),
        (held[0] - sparse.diags_array(block_K * dims_K * 1.0) @ chosen, 0.0, 0.0),
        (held[1] - sparse.diags_array(shards_K) @ chosen, -np.inf, 0.0),
    ]
    # All ranks of a block hold a shard, or none does.
    place = np.arange(size) % num_ranks % np.repeat(block_K, num_ranks)
    later = np.flatnonzero(place)
    if len(later):
        lines.append((shards[later] - shards[later - place[later]], 0.0, 0.0))
    for caps_W, fixed_T, column_T in zip(*task.memory, strict=True):
        if np.isfinite(caps_W).all():  # no rank exceeds its memory
            scale = 1.0 / max(1.0, caps_W.max())
            used = on_ranks(column_T[way_K] * unit_K * scale) @ units
            used += on_ranks(fixed_T[way_K] * scale) @ shards
            lines.append((used, -np.inf, caps_W * scale * (1 - shrink)))
    for tables in task.apart:  # each rank holds at most one of them
        crowd = on_ranks(np.isin(way_K, tables).astype(np.float64)) @ shards
        lines.append((crowd, 0.0, 1.0))
    upper_KW = np.ones((2, len(kinds), num_ranks))
    upper_KW[0] = most_K[:, None]
    if task.rules.allowed_TW is not None:
        upper_KW *= task.rules.allowed_TW[way_K]
    upper = np.append(upper_KW, np.ones(len(kinds)))
    found = optimize.milp(
        c=np.zeros(len(upper)),
        constraints=[optimize.LinearConstraint(*line) for line in lines],
        bounds=optimize.Bounds(0, upper),
        integrality=np.ones(len(upper)),
        options={"time_limit": seconds},
    )
    if found.x is not None:
        width_KW = np.rint(found.x[:size]).reshape(-1, num_ranks) * unit_K[:, None]
        found.x = np.zeros((len(task.tables), num_ranks), dtype=np.int64)
        np.add.at(found.x, way_K, width_KW.astype(np.int64))
    return found
