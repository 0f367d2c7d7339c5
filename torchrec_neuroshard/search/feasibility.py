"""Whether the tables fit at all, and a placement that does where greedy placing failed.

Shapes: `T` tables, `W` ranks, `M` memories.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import optimize, sparse

from torchrec_neuroshard.errors import InfeasibleError
from torchrec_neuroshard.placement import HOST, ShardingTask, format_bytes
from torchrec_neuroshard.search.rules import Rules
from torchrec_neuroshard.search.shards import Floats, Ints, legal_splits, split_widths
from torchrec_neuroshard.tables import COLUMN_MULTIPLE

__all__ = [
    "check_memory",
    "describe",
    "pack",
    "pack_exactly",
    "way_out",
]


PACK_SECONDS = 10.0
"""Time limit of the exact packing."""
MAX_PACK_VARIABLES = 50_000
"""Tables x ranks up to which exact packing is tried."""


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


def check_memory(task: ShardingTask, *, is_part: bool = False) -> None:
    """Raise where a table or the total cannot fit, whatever the placement.

    Args:
        task: The task.
        is_part: Whether the rest of a larger task is placed already.

    Raises:
        InfeasibleError: Proven; names the table or the total and what would help.
    """
    memories, num_ranks = task.memories, task.world_size
    if not any(memory.memory_bytes for memory in memories):
        return
    left = " left beside other tables" if is_part else ""
    freest_M = _freest(memories, range(num_ranks))
    # Of tables that are spread over ranks, and of those that each rank has a copy of:
    # what they need of each memory, and of both.
    needs = np.zeros((2, len(memories) + 1))
    for ways in task.ways:
        ranks = _ranks(task, ways)
        caps_M = freest_M if len(ranks) == num_ranks else _freest(memories, ranks)
        if not any(_fits(memories, way, caps_M) for way in ways):
            fact = _too_large(task, ways, ranks)
            raise InfeasibleError(f"{fact}{left}. {way_out(task)}")
        sizes = [_table_bytes(memories, way) for way in ways]
        least = [*map(min, zip(*sizes, strict=True)), min(map(sum, sizes))]
        alike = all(task.sharding_type(way).is_replicated for way in ways)
        needs[int(alike)] += least
    has = [float(sum(m.memory_bytes)) or math.inf for m in memories]
    has.append(sum(has))
    full = np.flatnonzero(needs.sum(axis=0) > has).tolist()
    if full:
        place = full[0]
        both = ", their hosts' memory included" if place == 2 else ""
        largest = max(
            (ways[0] for ways in task.ways),
            key=lambda t: sum(_table_bytes(memories, t)),
        )
        raise InfeasibleError(
            f"{HOST * (place == 1)}the tables need "
            f"{format_bytes(needs[:, place].sum())} in all, the {num_ranks} ranks have "
            f"{format_bytes(has[place])}{both}{left}; the largest is "
            f"{describe(task, largest)}. {way_out(task)}"
        )


def _ranks(task: ShardingTask, ways: Sequence[int]) -> Sequence[int]:
    """Ranks that a table may be on, in some way."""
    if task.allowed_ranks and all(task.allowed_ranks[way] for way in ways):
        return sorted({r for way in ways for r in task.allowed_ranks[way]})
    return range(task.world_size)


def _freest(memories: Sequence[ShardingTask], ranks: Sequence[int]) -> list[float]:
    """Return the most memory that one of some ranks has, `M`."""
    return [
        max(m.memory_bytes[r] for r in ranks) if m.memory_bytes else math.inf
        for m in memories
    ]


def _table_bytes(memories: Sequence[ShardingTask], way: int) -> list[float]:
    """Memory that a table takes of all ranks in one way, `M`; uncut where it may be."""
    task = memories[0]
    width, count = task.tables[way].embedding_dim, 1
    if not task.sharding_type(way).in_columns:
        count = task.block_size(way) * task.num_blocks(way)
        width = min(width, task.min_widths[way])
    return [m.shard_bytes(way, width) * count for m in memories]


def _narrowest(task: ShardingTask, way: int) -> int:
    """Return the least columns that the widest shard of a table has in one way."""
    if task.sharding_type(way).in_columns:
        return split_widths(task, way, legal_splits(task, way)[-1])[0]
    return min(task.tables[way].embedding_dim, task.min_widths[way])


def _fits(memories: Sequence[ShardingTask], way: int, caps_M: Sequence[float]) -> bool:
    """Whether ranks with so much memory have room for the shards of a table."""
    task = memories[0]

    def has_room(width: int) -> bool:
        return all(
            m.shard_bytes(way, width) <= cap
            for m, cap in zip(memories, caps_M, strict=True)
        )

    if not task.sharding_type(way).in_columns:
        if task.block_size(way) * task.num_blocks(way) > task.world_size:
            return False
    return has_room(task.tables[way].embedding_dim) or has_room(_narrowest(task, way))


def _too_large(task: ShardingTask, ways: Sequence[int], ranks: Sequence[int]) -> str:
    """Say what a table needs in the way that is nearest to fit, and what there is."""
    caps_M = _freest(task.memories, ranks)
    _, place, way = min(
        max(
            (memory.shard_bytes(way, _narrowest(task, way)) / max(cap, 1.0), place, way)
            for place, (memory, cap) in enumerate(
                zip(task.memories, caps_M, strict=True)
            )
        )
        for way in ways
    )
    memory = task.memories[place]
    [total] = _table_bytes([memory], way)
    part = memory.shard_bytes(way, _narrowest(task, way))
    if part <= caps_M[place]:
        return (
            f"{describe(task, way)} needs more nodes than there are "
            f"({task.num_blocks(way)}), one for each of its blocks of columns"
        )
    split = f", at least {format_bytes(part)} of it on one rank" * (part < total)
    freest = max(ranks, key=lambda rank: memory.memory_bytes[rank])
    return (
        f"{HOST * place}{describe(task, way)} needs {format_bytes(total)}{split} "
        f"({task.sharding_types[way]}); the freest rank, {freest}, has "
        f"{format_bytes(caps_M[place])}"
    )


def pack(task: ShardingTask, seconds: float = PACK_SECONDS) -> Ints:
    """Find a placement within memory and the rules on ranks, costs aside.

    Args:
        task: The task; of tables that lie together only leaders count (see `rules`).
        seconds: Time limit of the exact packing.

    Returns:
        `T x W` widths.

    Raises:
        InfeasibleError: None exists (the message says proven), or none was found.
    """
    found, proven = (None if task.has_choices else _fill(task)), False
    if found is None:
        found, proven = pack_exactly(task, seconds)
    if found is None:
        raise InfeasibleError(_no_packing(task, proven))
    return found


def _fill(task: ShardingTask) -> Ints | None:
    """Best fit, largest first; a table that fits no rank is spread over the freest.

    Tables with few ranks to be on come before all others.
    """
    num_tables, num_ranks = len(task.tables), task.world_size
    rules = Rules(task)
    freedom = rules.freedom(np.arange(num_tables)).tolist()
    left_MW = np.array([_limits(memory) for memory in task.memories], dtype=float)
    total_M = np.maximum(left_MW.sum(axis=1), 1.0)
    width_TW = np.zeros((num_tables, num_ranks), dtype=np.int64)
    sizes = [
        _sizes(task, t, task.tables[t].embedding_dim) * (total_M[0] / total_M)
        for t in range(num_tables)
    ]
    largest = [float(s.max()) for s in sizes]
    for table in sorted(range(num_tables), key=lambda t: (freedom[t], -largest[t], t)):
        free_MW = left_MW
        if rules:
            free_MW = np.where(rules.open_ranks(width_TW, table), left_MW, -np.inf)
        dim = task.tables[table].embedding_dim
        fits = np.flatnonzero((free_MW.T >= _sizes(task, table, dim)).all(axis=1))
        if len(fits):
            widths = {int(fits[free_MW[sizes[table].argmax(), fits].argmin()]): dim}
        else:
            spread = _spread_columns(task, table, free_MW)
            if spread is None:
                return None
            widths = spread
        for rank, width in widths.items():
            width_TW[table, rank] = width
            left_MW[:, rank] -= _sizes(task, table, width)
    return width_TW


def _sizes(task: ShardingTask, table: int, width: int) -> Floats:
    """Memory of a shard, `M` bytes."""
    return np.array([m.shard_bytes(table, width) for m in task.memories])


def _limits(task: ShardingTask) -> tuple[float, ...]:
    """Memory of each rank [bytes]; enough for everything where it is unlimited."""
    if task.memory_bytes:
        return task.memory_bytes
    total = sum(
        task.fixed_bytes[t] * task.max_shards[t]
        + task.column_bytes[t] * c.embedding_dim
        for t, c in enumerate(task.tables)
    )
    return (max(1.0, total),) * task.world_size


def _spread_columns(
    task: ShardingTask, table: int, free_MW: Floats
) -> dict[int, int] | None:
    """Split one table over the freest ranks, in as few shards as fit.

    Returns:
        Widths by rank; None where there is no room.
    """
    room_W = _room_for_columns(task, table, free_MW)
    free = free_MW[0]
    if len(free_MW) > 1:  # by the memory that runs out first
        free = np.where(free_MW.min(axis=0) < 0, -np.inf, room_W)
    ranks = np.argsort(-free, kind="stable")
    for k in legal_splits(task, table)[1:]:
        widths = split_widths(task, table, k)
        sizes_MK = [[m.shard_bytes(table, w) for w in widths] for m in task.memories]
        if (free_MW[:, ranks[:k]] >= sizes_MK).all():
            return {int(r): w for r, w in zip(ranks[:k], widths, strict=True)}
    if not task.uneven or task.max_shards[table] <= 1:
        return None
    left, spread = task.tables[table].embedding_dim, dict[int, int]()
    narrowest = max(COLUMN_MULTIPLE, task.min_widths[table])
    for rank in ranks[: max(1, task.max_shards[table])].tolist():
        width = min(left, int(room_W[rank]))
        if 0 < left - width < narrowest:
            width = left - narrowest
        if width >= narrowest:
            spread[rank] = width
            left -= width
        if left == 0:
            return spread
    return None


def _room_for_columns(task: ShardingTask, table: int, free_MN: Floats) -> Floats:
    """Return how many columns of a table fit, `N`; all that there are, or a part.

    Of the task's memories the first ones may be given alone.
    """
    width = task.tables[table].embedding_dim
    room_N: Floats = np.full(free_MN.shape[1], float(width))
    for memory, free_N in zip(task.memories, free_MN, strict=False):
        left, column = free_N - memory.fixed_bytes[table], memory.column_bytes[table]
        if column:
            part = np.clip(left / column, 0, width) // COLUMN_MULTIPLE
            room_N = np.minimum(room_N, part * COLUMN_MULTIPLE)
        else:  # their rows are elsewhere
            room_N[left < 0] = 0
    return room_N


def pack_exactly(task: ShardingTask, seconds: float) -> tuple[Ints | None, bool]:
    """Pack by mixed-integer programming.

    Args:
        task: The task, with all ways to shard its tables; otherwise as for `pack`.
        seconds: Time limit.

    Returns:
        `T x W` widths, None where none were found; whether that there are none is
        proven.
    """
    end = time.monotonic() + seconds
    if len(task.tables) * task.world_size > MAX_PACK_VARIABLES:
        return None, False
    # Solvers keep constraints to a tolerance: where a packing breaks a limit by that
    # much, a slightly smaller limit is tried.
    for shrink in (0.0, 1e-6):
        program, left = _mixed_integer_program(task, shrink), end - time.monotonic()
        outcome = program.solve(max(left, 0.1))
        if outcome is None:
            break
        if isinstance(outcome, str):
            return None, outcome == "infeasible" and shrink == 0.0
        if _within_memory(task, outcome):
            return outcome, False
    return None, False


def _no_packing(task: ShardingTask, proven: bool) -> str:
    """Say that tables fit no ranks, and what would make them."""

    def least(memory: ShardingTask, ways: Sequence[int]) -> float:
        """Bytes of a table over all ranks, in the way that takes least."""
        return min(
            memory.shard_bytes(t, min(memory.min_widths[t], c.embedding_dim))
            * task.num_blocks(t)
            * task.block_size(t)
            if not task.sharding_type(t).in_columns
            else memory.shard_bytes(t, c.embedding_dim)
            for t, c in ((way, task.tables[way]) for way in ways)
        )

    size_MN = np.array([[least(m, ways) for ways in task.ways] for m in task.memories])
    largest = task.ways[int(size_MN.sum(axis=0).argmax())][0]
    needs = f" and, {HOST}".join(format_bytes(sum(sizes)) for sizes in size_MN)
    limits = [format_bytes(sum(_limits(m))) for m in task.memories]
    kind = "at least " if task.has_choices else ""
    return (
        f"the tables need {kind}{needs} in all and the {task.world_size} ranks have "
        f"{' and, in their hosts, '.join(limits)} for them, but no split allowed puts "
        f"every shard on a rank{' that may take it' if Rules(task) else ''} "
        f"({'proven by exact packing' if proven else 'none was found'}); the largest "
        f"is {describe(task, largest)}. {way_out(task)}"
    )


def _within_memory(task: ShardingTask, width_TW: Ints) -> bool:
    caps_MW = np.array([_limits(memory) for memory in task.memories], dtype=float)
    used_MW = np.zeros_like(caps_MW)
    for table, rank in zip(*np.nonzero(width_TW), strict=True):
        used_MW[:, rank] += _sizes(task, int(table), int(width_TW[table, rank]))
    return bool((used_MW <= caps_MW).all())


@dataclass(frozen=True, slots=True)
class _Program:
    """Constraints of a packing, and how to read the widths off a solution."""

    matrix: sparse.csr_array
    low: Floats
    high: Floats
    upper: Floats
    width_matrix: sparse.csr_array
    """Maps the variables to the `T x W` widths, flattened."""
    shape: tuple[int, int]

    def solve(self, seconds: float) -> Ints | str | None:
        """Return widths, "infeasible", or None when time ran out."""
        found = optimize.milp(
            c=np.zeros(self.matrix.shape[1]),
            constraints=optimize.LinearConstraint(self.matrix, self.low, self.high),
            bounds=optimize.Bounds(0, self.upper),
            integrality=np.ones(self.matrix.shape[1]),
            options={"time_limit": seconds},
        )
        if found.status == 2:
            return "infeasible"
        if found.x is None:
            return None
        widths: Ints = np.rint(self.width_matrix @ np.rint(found.x)).astype(np.int64)
        return widths.reshape(self.shape)


def _mixed_integer_program(task: ShardingTask, shrink: float) -> _Program:
    """Variables per rank and kind of shard: how many units of columns, and whether any.

    One more per kind says whether its table is laid out so. With `uneven` each way to
    shard a table is a kind; else each number of equal shards of it, whose units all
    have the shard's width. The same holds for blocks of ranks (see `sharding_types`).
    """
    num_ranks = task.world_size
    kinds: list[tuple[int, int, int, int]] = []  # way, unit, most units, fewest units
    counts: list[int] = []
    for way, config in enumerate(task.tables):
        width = config.embedding_dim
        if not task.sharding_type(way).in_columns:
            blocks_of_columns = task.num_blocks(way)
            kinds.append((way, width // blocks_of_columns, 1, 1))
            counts.append(blocks_of_columns * task.block_size(way))
        elif task.uneven:
            units = width // COLUMN_MULTIPLE
            fewest = min(units, max(1, -(-task.min_widths[way] // COLUMN_MULTIPLE)))
            kinds.append((way, COLUMN_MULTIPLE, units, fewest))
            counts.append(max(1, min(task.max_shards[way], num_ranks)))
        else:
            for k in legal_splits(task, way):
                kinds.append((way, width // k, 1, 1))
                counts.append(k)
    num_kinds = len(kinds)
    table_K, unit_K, most_K, fewest_K = (np.array(c) for c in zip(*kinds, strict=True))
    size = num_kinds * num_ranks
    ranks = np.arange(size) % num_ranks
    kind = np.arange(size) // num_ranks
    cells = np.arange(size)

    def block(values: npt.ArrayLike, row: Ints, num_rows: int) -> sparse.csr_array:
        values = np.broadcast_to(np.asarray(values, dtype=np.float64), size)
        return sparse.csr_array((values, (row, cells)), shape=(num_rows, size))

    one = block(1.0, cells, size)
    num_tables = len(task.tables)
    limits = np.asarray(counts, dtype=np.float64)
    sizes_K = np.array([task.block_size(t) for t in table_K.tolist()])
    # Over all ranks: each rank of a block has the columns of its rows.
    dims_K = np.array([task.tables[t].embedding_dim for t in table_K], dtype=np.float64)
    columns, shards = block(unit_K[kind], kind, num_kinds), block(1.0, kind, num_kinds)
    most, fewest = block(most_K[kind], cells, size), block(fewest_K[kind], cells, size)
    number_T = np.empty(num_tables, dtype=np.int64)
    for table, ways in enumerate(task.ways):
        number_T[list(ways)] = table
    of_table = sparse.csr_array(
        (np.ones(num_kinds), (number_T[table_K], np.arange(num_kinds))),
        shape=(len(task.ways), num_kinds),
    )
    # Each shard of a block, less that on the block's first rank.
    later = np.flatnonzero(ranks % sizes_K[kind])
    like_first = one[later] - one[later - ranks[later] % sizes_K[kind[later]]]

    def line(
        units: Any, shards: Any, chosen: Any, low: Floats | float, high: Floats | float
    ) -> tuple[sparse.csr_array, Floats | float, Floats | float]:
        height = next(b for b in (units, shards, chosen) if b is not None).shape[0]
        widths = size, size, num_kinds
        parts = [
            sparse.csr_array((height, width)) if b is None else b
            for b, width in zip((units, shards, chosen), widths, strict=True)
        ]
        return sparse.hstack(parts), low, high

    blocks = [
        # Units only where there is a shard, and then at least the fewest.
        line(one, -most, None, -np.inf, 0.0),
        line(one, -fewest, None, 0.0, np.inf),
        # One kind of each table, all its columns, no more shards than allowed.
        line(None, None, of_table, 1.0, 1.0),
        line(columns, None, sparse.diags_array(-sizes_K * dims_K), 0.0, 0.0),
        line(None, shards, sparse.diags_array(-limits), -np.inf, 0.0),
        line(None, like_first, None, 0.0, 0.0),
    ]
    for memory in task.memories:  # no rank over it
        caps = np.asarray(_limits(memory))
        scale = 1.0 / max(1.0, caps.max())
        fixed = np.asarray(memory.fixed_bytes)[table_K][kind] * scale
        column = np.asarray(memory.column_bytes)[table_K][kind] * unit_K[kind] * scale
        parts = block(column, ranks, num_ranks), block(fixed, ranks, num_ranks)
        blocks.append(line(*parts, None, -np.inf, caps * scale * (1 - shrink)))
    if task.apart:
        # Of the tables of a set at most one on each rank.
        member = np.stack([np.isin(table_K, tables) for tables in task.apart])
        number, cell = np.nonzero(member[:, kind])
        row = number * num_ranks + ranks[cell]
        shape = len(task.apart) * num_ranks, size
        crowd = sparse.csr_array((np.ones(len(row)), (row, cell)), shape=shape)
        blocks.append(line(None, crowd, None, 0.0, 1.0))
    upper = np.concatenate([most_K[kind], np.ones(size)])
    allowed_TW = Rules(task).allowed_TW
    if allowed_TW is not None:
        upper *= np.tile(allowed_TW[table_K[kind], ranks], 2)
    width_matrix = sparse.csr_array(
        (unit_K[kind].astype(np.float64), (table_K[kind] * num_ranks + ranks, cells)),
        shape=(num_tables * num_ranks, 2 * size + num_kinds),
    )
    return _Program(
        matrix=sparse.vstack([b[0] for b in blocks], format="csr"),
        low=np.concatenate([np.broadcast_to(b[1], b[0].shape[0]) for b in blocks]),
        high=np.concatenate([np.broadcast_to(b[2], b[0].shape[0]) for b in blocks]),
        upper=np.concatenate([upper, np.ones(num_kinds)]),
        width_matrix=width_matrix,
        shape=(num_tables, num_ranks),
    )
