"""Whether the tables fit at all, and a placement that does where greedy placing failed.

Shapes: `T` tables, `W` ranks, `M` memories.
"""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import optimize, sparse

from torchrec_neuroshard.cut_off import TimeIsUpError, call_within
from torchrec_neuroshard.errors import InfeasibleError
from torchrec_neuroshard.placement import ShardingTask, format_bytes
from torchrec_neuroshard.search.rules import Rules
from torchrec_neuroshard.search.shards import Floats, Ints, legal_splits, split_widths
from torchrec_neuroshard.tables import COLUMN_MULTIPLE

__all__ = ["check_memory", "pack", "pack_exactly", "spread_columns"]


PACK_SECONDS = 10.0
"""Time limit of the exact packing."""
MOST_MEMORY = 1e6
"""Times the memory with which packing must succeed if it ever does."""
MAX_PACK_VARIABLES = 50_000
"""Tables x ranks up to which exact packing is tried."""


def _describe(task: ShardingTask, table: int) -> str:
    config = task.tables[table]
    return (
        f"table '{config.name}' (num_embeddings={config.num_embeddings}, "
        f"embedding_dim={config.embedding_dim}, {config.data_type})"
    )


def check_memory(task: ShardingTask) -> None:
    """Raise where a table or the total cannot fit, whatever the placement.

    Raises:
        InfeasibleError: Proven; names the table or the total and what would help.
    """
    device, *others = task.memories
    for host in others:
        try:
            check_memory(host)
        except InfeasibleError as error:
            raise InfeasibleError(f"in the host's memory, {error}") from error
    task = device
    if not task.memory_bytes:
        return
    if task.has_choices:
        _check_ways(task)
        return
    caps_W = np.asarray(task.memory_bytes, dtype=np.float64)
    allowed_TW = Rules(task).allowed_TW
    total = 0.0
    for table, config in enumerate(task.tables):
        width = config.embedding_dim
        whole = task.shard_bytes(table, width)
        total += whole
        caps = caps_W if allowed_TW is None else caps_W * allowed_TW[table]
        freest = int(caps.argmax())
        if whole <= caps[freest]:
            continue
        most = legal_splits(task, table)[-1]
        narrowest = task.min_widths[table] if task.uneven else width
        shard = min(
            [task.shard_bytes(table, split_widths(task, table, most)[-1])]
            + ([task.shard_bytes(table, narrowest)] if most > 1 else [])
        )
        if shard > caps[freest]:
            split = (
                "cannot be split"
                if most == 1
                else f"at its narrowest still {format_bytes(shard)}"
            )
            raise InfeasibleError(
                f"{_describe(task, table)} needs {format_bytes(whole)} ({split}); the "
                f"freest rank, {freest}, has {format_bytes(caps[freest])}. Allow "
                f"row-wise sharding for it, lower its min_partition "
                f"({task.min_widths[table]}) or raise world_size ({task.world_size})."
            )
        if task.uneven:
            room = _room_for_columns(task, table, caps[None])
            room[room < task.min_widths[table]] = 0
            best = np.sort(room)[::-1][: max(1, task.max_shards[table])].sum()
            if best < width:
                raise InfeasibleError(
                    f"{_describe(task, table)} needs {format_bytes(whole)}; the ranks "
                    f"can hold {int(best)} of its {width} columns in "
                    f"{max(1, task.max_shards[table])} shards at most. Allow row-wise "
                    "sharding or more shards for it, or raise world_size "
                    f"({task.world_size})."
                )
    if total > caps_W.sum():
        ranks = int(np.ceil(total / caps_W.mean()))
        raise InfeasibleError(
            f"the tables need {format_bytes(total)} in all, the {task.world_size} "
            f"ranks have {format_bytes(caps_W.sum())}. Raise world_size to at least "
            f"{ranks}, use a smaller data_type or optimizer state, or allow offloading."
        )


def _check_ways(task: ShardingTask) -> None:
    """Raise where a table fits no rank in any way, or all of them no ranks."""
    caps_W = np.asarray(task.memory_bytes, dtype=np.float64)
    total, least = 0.0, dict[int, float]()
    freest_of_all = int(caps_W.argmax())
    for ways in task.ways:
        dim = task.tables[ways[0]].embedding_dim
        parts, sums = [], []
        for way in ways:
            narrow = dim
            if task.sharding_type(way).splits_columns and task.max_shards[way] > 1:
                narrow = min(dim, task.min_widths[way])
            parts.append(task.shard_bytes(way, narrow))
            sums.append(task.shard_bytes(way, dim) * task.block_size(way))
        least[ways[0]] = min(sums)
        total += min(sums)
        freest = freest_of_all
        if task.allowed_ranks and all(task.allowed_ranks[way] for way in ways):
            ranks = {r for way in ways for r in task.allowed_ranks[way]}
            freest = max(sorted(ranks), key=lambda r: caps_W[r])
        if min(parts) > caps_W[freest]:
            kinds = ", ".join(dict.fromkeys(task.sharding_types[w] for w in ways))
            raise InfeasibleError(
                f"{_describe(task, ways[0])} needs {format_bytes(min(sums))} and, "
                f"sharded as it may be ({kinds}), at least "
                f"{format_bytes(min(parts))} on a rank; the freest rank, {freest}, has "
                f"{format_bytes(caps_W[freest])}. Allow other sharding types or "
                f"kernels for it, lower its min_partition ({task.min_widths[ways[0]]}) "
                f"or raise world_size ({task.world_size})."
            )
    largest = max((w[0] for w in task.ways), key=lambda t: least[t])
    if least[largest] > caps_W.sum():
        raise InfeasibleError(
            f"{_describe(task, largest)} needs {format_bytes(least[largest])}; all "
            f"{task.world_size} ranks together have {format_bytes(caps_W.sum())}. "
            f"Allow offloading for it or raise world_size ({task.world_size})."
        )
    if total > caps_W.sum():
        ranks_needed = int(np.ceil(total / caps_W.mean()))
        raise InfeasibleError(
            f"the tables need {format_bytes(total)} in all, the {task.world_size} "
            f"ranks have {format_bytes(caps_W.sum())}; the largest is "
            f"{_describe(task, largest)}. Raise world_size to at least {ranks_needed}, "
            "use a smaller data_type or optimizer state, or allow offloading."
        )


def pack(task: ShardingTask, seconds: float = PACK_SECONDS) -> Ints:
    """Find a placement within memory and the rules on ranks, costs aside.

    Args:
        task: The task, of column shards; of tables that lie together only leaders count
            (see `rules`).
        seconds: Time limit of the exact packing.

    Returns:
        `T x W` widths.

    Raises:
        InfeasibleError: None exists (the message says proven), or none was found.
    """
    found, proven = _fill(task), False
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
            spread = spread_columns(task, table, free_MW)
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


def spread_columns(
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
        try:
            outcome = program.solve(max(left, 0.1))
        except TimeIsUpError:
            break
        if outcome is None:
            break
        if isinstance(outcome, str):
            return None, outcome == "infeasible" and shrink == 0.0
        if _within_memory(task, outcome):
            return outcome, False
    return None, False


def _no_packing(task: ShardingTask, proven: bool) -> str:
    """Say that tables fit no ranks, and what would make them."""
    num_tables, num_ranks = len(task.tables), task.world_size
    total = sum(task.shard_bytes(t, c.embedding_dim) for t, c in enumerate(task.tables))
    status = (
        "proven by exact packing" if proven else "no packing was found, none disproven"
    )
    largest = max(
        range(num_tables),
        key=lambda t: task.shard_bytes(t, task.tables[t].embedding_dim),
    )
    factor = _sufficient_factor(task)
    remedy = (
        f"It fits with {factor:.2f} times the memory; or lower min_partition, or raise "
        f"world_size ({num_ranks})"
        if factor
        else f"Raise world_size ({num_ranks})"
    )
    rules = Rules(task)
    if rules:
        remedy += ", or allow tables more ranks (allowed_ranks, apart)"
    limits = [format_bytes(sum(_limits(m))) for m in task.memories]
    return (
        f"the tables need {format_bytes(total)} in all and the {num_ranks} ranks have "
        f"{' and, in their hosts, '.join(limits)}, but no split allowed puts every "
        f"shard on a rank {'that may take it ' if rules else ''}({status}); the "
        f"largest is {_describe(task, largest)}. {remedy}."
    )


def _within_memory(task: ShardingTask, width_TW: Ints) -> bool:
    caps_MW = np.array([_limits(memory) for memory in task.memories], dtype=float)
    used_MW = np.zeros_like(caps_MW)
    for table, rank in zip(*np.nonzero(width_TW), strict=True):
        used_MW[:, rank] += _sizes(task, int(table), int(width_TW[table, rank]))
    return bool((used_MW <= caps_MW).all())


def _sufficient_factor(task: ShardingTask) -> float:
    """Return by how much more memory on every rank best-fit packing succeeds.

    0 where it does not succeed whatever the memory.
    """
    low, high = 1.0, 2.0

    def packs(factor: float) -> bool:
        more: dict[str, Any] = {
            name: tuple(int(factor * m) for m in getattr(task, name))
            for name in ("memory_bytes", "host_memory_bytes")
        }
        return _fill(dataclasses.replace(task, **more)) is not None

    if not packs(MOST_MEMORY):
        return 0.0
    while not packs(high):
        low, high = high, 2 * high
    while high - low > 0.005:
        middle = (low + high) / 2
        low, high = (low, middle) if packs(middle) else (middle, high)
    return high


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
        """Return widths, "infeasible", or None when time ran out.

        Raises:
            TimeIsUpError: It did, and the solver did not say so.
        """
        # HiGHS looks at its clock now and then only.
        found = call_within(
            seconds + 1.0,
            optimize.milp,
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


def _membership(task: ShardingTask) -> npt.NDArray[np.bool_]:
    """Which tables each set of `apart` has, one row a set."""
    member = np.zeros((len(task.apart), len(task.tables)), dtype=bool)
    for row, tables in zip(member, task.apart, strict=True):
        row[list(tables)] = True
    return member


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
        number, cell = np.nonzero(_membership(task)[:, table_K[kind]])
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
