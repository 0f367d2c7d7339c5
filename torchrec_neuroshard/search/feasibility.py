"""Whether the tables fit at all, and a placement that does where greedy placing failed.

Shapes: `T` ways to shard tables, `W` ranks, `M` memories: the device's and, where it is
limited, the host's, `K` kinds of shards.
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
from torchrec_neuroshard.search.rules import merged
from torchrec_neuroshard.search.shards import Bools, Floats, Ints, split_widths
from torchrec_neuroshard.search.shards import legal_splits as splits
from torchrec_neuroshard.tables.table import COLUMN_MULTIPLE

__all__ = [
    "check_memory",
    "describe",
    "fitting",
    "pack",
    "smallest_widths",
    "way_out",
]


PACK_SECONDS = 10.0
"""Time limit of the exact packing."""
MAX_PACK_VARIABLES = 50_000
"""Ways x ranks up to which exact packing is tried."""


def describe(task: ShardingTask, table: int) -> str:
    """Name a table and its shape."""
    config = task.tables[table]
    return (
        f"table '{config.name}' (num_embeddings={config.num_embeddings}, "
        f"embedding_dim={config.embedding_dim}, {config.data_type})"
    )


def way_out(task: ShardingTask) -> str:
    """Say what makes tables fit that need too much memory."""
    return (
        f"Raise world_size ({task.world_size}) or the ranks' memory, use a smaller "
        "data_type, or allow other sharding types (such as row_wise), kernels, shards "
        "or ranks."
    )


def smallest_widths(task: ShardingTask) -> Ints:
    """Return the columns of each way's widest shard in its finest split, `T`."""
    return np.array(
        [
            split_widths(task, way, splits(task, way)[-1])[0]
            if task.sharding_type(way).in_columns
            else task.block_width(way)
            for way in range(len(task.tables))
        ]
    )


def fitting(task: ShardingTask) -> Bools:
    """Return which ways have ranks with room for their smallest shards, `T`."""
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
    """Return the bytes that each table takes of all ranks, `N x M + 1`.

    Of its ways, that of the least of each memory, and of all together.
    """
    _, fixed_MT, column_MT = task.memory
    every = range(len(task.tables))
    width_T = [task.block_width(way) for way in every]
    count_T = [task.block_size(t) * task.num_blocks(t) for t in every]
    total_MT = (fixed_MT + column_MT * width_T) * count_T
    total_TX = np.vstack([total_MT, total_MT.sum(axis=0)]).T
    return np.array([total_TX[list(ways)].min(axis=0) for ways in task.ways])


def check_memory(task: ShardingTask, *, is_part: bool = False) -> None:
    """Raise where a table or the total cannot fit, whatever the placement.

    Args:
        task: The task.
        is_part: Whether the rest of a larger task is placed already.

    Raises:
        InfeasibleError: Proven; names the table or the total and what would help.
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
                f"tables {names} are to lie together and need "
                f"{format_bytes(least_X[-1])}; no rank that may hold them has room. "
                "Take a table out of the set or allow it other ranks"
            )
        raise InfeasibleError(f"{_too_large(task, ways)}{left}. {way_out(task)}")
    # All tables on all ranks, and those that may only be on some ranks on these.
    every = tuple(range(task.world_size))
    allowed = [r or every for r in task.allowed_ranks] or [every] * len(task.tables)
    for ranks in (every, *sorted({*allowed} - {every})):
        within = {r for r in {*allowed} if {*r} <= {*ranks}}
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
                f"{needs}; there is room for {has}. Allow some of them other ranks"
            )
        both = ", their hosts' memory included" if place == 2 else ""
        raise InfeasibleError(
            f"{where}the tables need {needs} in all, the {len(ranks)} ranks have "
            f"{has}{both}{left}; the largest is {_largest(task, least_NX)}. "
            f"{way_out(task)}"
        )


def _largest(task: ShardingTask, least_NX: Floats) -> str:
    return describe(task, task.ways[int(least_NX[:, -1].argmax())][0])


def _too_large(task: ShardingTask, ways: Sequence[int]) -> str:
    """Say what a table needs in the way that is nearest to fit, and what there is."""
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
            f"{task.world_size} ranks, {room} have that"
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
    """Find a placement within memory and the rules on ranks, costs aside.

    Args:
        task: The task; of tables that lie together only leaders count (see `rules`).
        seconds: Time limit.

    Returns:
        `T x W` widths.

    Raises:
        InfeasibleError: None exists (the message says proven), or none was found.
    """
    end, proven = time.monotonic() + seconds, False
    caps_MW, fixed_MT, column_MT = task.memory
    # Solvers keep constraints to a tolerance: where a packing breaks a limit by that
    # much, a slightly smaller limit is tried.
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
            return width_TW
    least_NX = _least_bytes(task)
    needs = map(format_bytes, least_NX[:, :-1].sum(axis=0))
    limits = map(format_bytes, caps_MW.sum(axis=1))
    raise InfeasibleError(
        f"the tables need {'at least ' if task.has_choices else ''}"
        f"{f' and, {HOST}'.join(needs)} in all and the {task.world_size} ranks have "
        f"{' and, in their hosts, '.join(limits)} for them, but no split allowed puts "
        f"every shard on a rank{' that may take it' if task.rules else ''} "
        f"({'proven by exact packing' if proven else 'none was found'}); the largest "
        f"is {_largest(task, least_NX)}. {way_out(task)}"
    )


def _solve(task: ShardingTask, shrink: float, seconds: float) -> Any:
    """Solve the integer program of a packing.

    Variables per kind of shard and rank: how many units of columns, and whether any.
    One more per kind says whether its table is laid out so. With `uneven` each way to
    shard a table is a kind; else each number of equal shards of it, whose units all
    have the shard's width. The same holds for blocks of ranks (see `sharding_types`).

    Returns:
        SciPy's result; its `x` is `T x W` widths, or None.
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
    # Sums of variables, and the least and the most that they may be.
    lines: list[tuple[Any, Floats | float, Floats | float]] = [
        # Units only where there is a shard, and then at least the fewest.
        (units - each(most_K) @ shards, -np.inf, 0.0),
        (units - each(fewest_K) @ shards, 0.0, np.inf),
        # One kind of each table, all its columns, no more shards than allowed.
        (sparse.csr_array(of_tables) @ chosen, 1.0, 1.0),
        (held[0] - sparse.diags_array(block_K * dims_K * 1.0) @ chosen, 0.0, 0.0),
        (held[1] - sparse.diags_array(shards_K) @ chosen, -np.inf, 0.0),
    ]
    # A block's shards are alike on all its ranks.
    place = np.arange(size) % num_ranks % np.repeat(block_K, num_ranks)
    later = np.flatnonzero(place)
    if len(later):
        lines.append((shards[later] - shards[later - place[later]], 0.0, 0.0))
    for caps_W, fixed_T, column_T in zip(*task.memory, strict=True):
        if np.isfinite(caps_W).all():  # no rank over it
            scale = 1.0 / max(1.0, caps_W.max())
            used = on_ranks(column_T[way_K] * unit_K * scale) @ units
            used += on_ranks(fixed_T[way_K] * scale) @ shards
            lines.append((used, -np.inf, caps_W * scale * (1 - shrink)))
    for tables in task.apart:  # at most one of them on each rank
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
