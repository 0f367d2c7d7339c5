"""Whether the tables fit at all, and a placement that does where greedy placing failed.

Shapes: `T` tables, `W` ranks, `M` memories.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import optimize, sparse

from torchrec_neuroshard.errors import InfeasibleError
from torchrec_neuroshard.placement import (
    HOST,
    ShardingTask,
    capitalised,
    format_bytes,
)
from torchrec_neuroshard.search.rules import Rules
from torchrec_neuroshard.search.shards import Floats, Ints, legal_splits, split_widths
from torchrec_neuroshard.sharding_types import COLUMN_WISE, SHARDING_TYPES
from torchrec_neuroshard.tables import COLUMN_MULTIPLE

__all__ = [
    "check_memory",
    "describe",
    "enough_ranks",
    "lacking_memories",
    "pack",
    "pack_exactly",
    "spread_columns",
    "ways_out",
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


def check_memory(task: ShardingTask, whole: ShardingTask | None = None) -> None:
    """Raise where a table or the total cannot fit, whatever the placement.

    Args:
        task: The task.
        whole: The task that it is a part of, the rest of which is placed. None: itself.

    Raises:
        InfeasibleError: Proven; names the table or the total and what would help.
    """
    memories, num_ranks = task.memories, task.world_size
    if not any(memory.memory_bytes for memory in memories):
        return
    left = " left beside other tables" if whole else ""
    freest_M = _freest(memories, range(num_ranks))
    # Of tables that are spread over ranks, and of those that each rank has a copy of:
    # what they need of each memory, and of both.
    needs = np.zeros((2, len(memories) + 1))
    for ways in task.ways:
        ranks = _ranks(task, ways)
        caps_M = freest_M if len(ranks) == num_ranks else _freest(memories, ranks)
        if all(_fewest_ranks(memories, w, caps_M) > num_ranks for w in ways):
            fact = _too_large(task, ways) + left
            raise InfeasibleError(f"{fact}. {ways_out(task, ways, whole)}")
        sizes = [_table_bytes(memories, way) for way in ways]
        least = [*map(min, zip(*sizes, strict=True)), min(map(sum, sizes))]
        alike = all(task.sharding_type(way).is_replicated for way in ways)
        needs[int(alike)] += least
    has = [float(sum(m.memory_bytes)) or math.inf for m in memories]
    has.append(sum(has))
    full = np.flatnonzero(needs.sum(axis=0) > has).tolist()
    if full:
        place, free = full[0], (np.array(has) - needs[1]) / num_ranks
        count = np.where(free > 0, needs[0] / np.maximum(free, 1.0), math.inf).max()
        fewest = num_ranks + 1 if whole else float(count)
        both = ", their hosts' memory included" if place == 2 else ""
        largest = max(
            (ways[0] for ways in task.ways),
            key=lambda t: sum(_table_bytes(memories, t)),
        )
        raise InfeasibleError(
            f"{_PLACES[place]}the tables need {format_bytes(needs[:, place].sum())} in "
            f"all, the {num_ranks} ranks have {format_bytes(has[place])}{both}{left}; "
            f"the largest is {describe(task, largest)}. "
            + _ways_out_of_all(task, place, fewest, whole)
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


def _fewest_ranks(
    memories: Sequence[ShardingTask],
    way: int,
    caps_M: Sequence[float],
    other: str = "",
    narrowest: int = 0,
) -> float:
    """Return how many ranks a table needs at least; inf: no number of them would do.

    Args:
        memories: The task's.
        way: A way of the table.
        caps_M: Memory of a rank.
        other: A sharding type in place of the way's own.
        narrowest: Columns of a shard in place of `min_widths`; in as many shards as
            there are.
    """
    task = memories[0]
    own, num_ranks = task.sharding_type(way), task.world_size
    kind = SHARDING_TYPES[other] if other else own
    dim, most = task.tables[way].embedding_dim, task.max_shards[way]
    total_M = _table_bytes(memories, way)
    if other and own.is_replicated:
        total_M = [total / num_ranks for total in total_M]

    def fits(size_M: Iterable[float]) -> bool:
        return all(size <= cap for size, cap in zip(size_M, caps_M, strict=True))

    if not kind.in_columns:
        count = num_ranks if other else task.block_size(way) * task.num_blocks(way)
        if fits(total / count for total in total_M):
            return count
        if kind.is_replicated or (kind.block == "node" and not kind.splits_columns):
            return math.inf
        pairs = [(t, c) for t, c in zip(total_M, caps_M, strict=True) if t > 0]
        return max(math.ceil(t / c) if c > 0 else math.inf for t, c in pairs)
    if narrowest or most >= num_ranks:
        most = dim
    narrowest = narrowest or max(COLUMN_MULTIPLE, task.min_widths[way])
    for count in range(1, max(1, min(most, dim // narrowest)) + 1):
        units, extra = divmod(dim // COLUMN_MULTIPLE, count)
        width = (units + (extra > 0)) * COLUMN_MULTIPLE
        if count > 1 and units * COLUMN_MULTIPLE < narrowest:
            break
        if extra and not task.uneven:
            continue
        if own.in_columns:
            size_M = [m.shard_bytes(way, width) for m in memories]
        else:
            size_M = [total * width / dim for total in total_M]
        if fits(size_M):
            return count
    return math.inf


def _lacking(task: ShardingTask, ways: Sequence[int]) -> list[tuple[int, float, Any]]:
    """Return the memories of which no rank has what a table needs.

    Returns:
        The number of each, the least that some rank must have, and in which ways.
    """
    part: list[dict[int, float]] = []
    for memory in task.memories:
        part.append({})
        for way in ways:
            width = min(task.tables[way].embedding_dim, task.min_widths[way])
            if task.sharding_type(way).in_columns:
                width = split_widths(task, way, legal_splits(task, way)[-1])[0]
            part[-1][way] = memory.shard_bytes(way, width)
    caps = _freest(task.memories, _ranks(task, ways))
    lacking = [
        {w for w in ways if own[w] > cap} for own, cap in zip(part, caps, strict=True)
    ]
    found = []
    for place, own in enumerate(lacking):
        # What other memories have room for tells more.
        alone = sorted(own.difference(*lacking[:place], *lacking[place + 1 :]) or own)
        if alone:
            found.append((place, min(part[place][way] for way in alone), alone))
    return found


_PLACES = "", HOST, ""


def _too_large(task: ShardingTask, ways: Sequence[int]) -> str:
    """Say what a table needs and what the freest rank has."""
    texts = list[str]()
    for place, part, lacking in _lacking(task, ways):
        memory = task.memories[place]
        total = min(_table_bytes([memory], way)[0] for way in lacking)
        kinds = ", ".join(dict.fromkeys(task.sharding_types[w] for w in lacking))
        freest = max(_ranks(task, ways), key=lambda r: memory.memory_bytes[r])
        split = f", at least {format_bytes(part)} of it on one rank" * (part < total)
        texts.append(
            f"{_PLACES[place]}{'it' if texts else describe(task, ways[0])} needs "
            f"{format_bytes(total)}{split} ({kinds}); the freest rank, {freest}, has "
            f"{format_bytes(memory.memory_bytes[freest])}"
        )
    return "; ".join(texts) or (
        f"{describe(task, ways[0])} needs more nodes than there are "
        f"({task.num_blocks(ways[0])}), one for each of its blocks of columns"
    )


def ways_out(
    task: ShardingTask, ways: Sequence[int], whole: ShardingTask | None = None
) -> str:
    """Say what would make a table fit, of what it does not have yet.

    Args:
        task: The task.
        ways: Of the table; none fits.
        whole: The task that it is a part of, the rest of which is placed. None: itself.
    """
    memories, num_ranks, known = task.memories, task.world_size, whole or task
    ranks, everywhere = _ranks(task, ways), _freest(memories, range(num_ranks))
    caps_M, confined = _freest(memories, ranks), len(ranks) < num_ranks
    config, pooled = task.tables[ways[0]], task.pooled[ways[0]]
    own = [w for w, t in enumerate(known.tables) if t.name == config.name]
    in_host = {_is_in_host(known, way) for way in own}
    least = min(ways, key=lambda way: sum(_table_bytes(memories, way)))
    parts = [
        format_bytes(part) + " of the host's memory" * place
        for place, part, _ in _lacking(task, ways)
    ]
    found: list[tuple[float, str]] = []
    # TorchRec splits rows of pooled tables on GPUs alone, where shards are even.
    for kind, able in (
        ("row_wise", not (task.uneven and pooled)),
        (COLUMN_WISE, pooled),
    ):
        if able and not confined and all(known.sharding_types[w] != kind for w in own):
            needs = _fewest_ranks(memories, least, caps_M, kind, COLUMN_MULTIPLE)
            found.append((needs, f"allow {kind.replace('_', '-')} sharding for it"))
    for way in (w for w in ways if task.sharding_type(w).in_columns):
        narrowest, most = task.min_widths[way], task.max_shards[way]
        if _may_be_narrower(task, way):
            needs = _fewest_ranks(memories, way, caps_M, narrowest=COLUMN_MULTIPLE)
            width = math.floor(config.embedding_dim / COLUMN_MULTIPLE / needs)
            text = f"lower its min_partition ({narrowest}) to at most "
            if needs <= most or most >= num_ranks:
                found.append((needs, f"{text}{width * COLUMN_MULTIPLE}"))
        if most < num_ranks:
            needs = _fewest_ranks(memories, way, everywhere, narrowest=narrowest)
            text = "ranks" if confined else f"shards (max_shards={most})"
            found.append((needs, f"allow it more {text}"))
    if in_host == {True}:
        needs = min(_fewest_ranks(memories[-1:], w, everywhere[:1]) for w in ways)
        found.append((needs, "allow the kernel fused for it"))
    elif in_host == {False} and not (
        task.uneven or all(task.sharding_type(way).is_replicated for way in ways)
    ):
        limits = everywhere[1:] or [math.inf]
        needs = min(_fewest_ranks(memories[:1], way, limits) for way in ways)
        text = "keep it in the host's memory (fused_uvm)"
        if parts and len(memories) == 1:  # how much there is was not told
            text += f" if a rank has {parts[0]} of it"
        found.append((needs, text))
    if config.data_type == "fp32":
        twice = [2 * cap for cap in caps_M]
        needs = min(_fewest_ranks(memories, way, twice) for way in ways)
        found.append((needs, "use fp16 for it"))
    options = [text for needs, text in dict.fromkeys(found) if needs <= num_ranks]
    now = min(_fewest_ranks(memories, way, caps_M) for way in ways)
    if not confined and (whole or now < math.inf):
        return _any_of([*options, _more_ranks(task, num_ranks + 1 if whole else now)])
    if not options and found and min(found)[0] < math.inf:
        needs, text = min(found)
        options.append(f"{text} and {_more_ranks(task, needs)}")
    if parts:
        options.append(f"take ranks that have {' or '.join(parts)} for it")
    return "More ranks of this kind do not help. " * (not confined) + _any_of(options)


def _ways_out_of_all(
    task: ShardingTask, place: int, num_ranks: float, whole: ShardingTask | None
) -> str:
    """Say what would make tables fit that together need too much of some memory."""
    options = [_more_ranks(task, num_ranks)] if num_ranks < math.inf else []
    if any(t.data_type == "fp32" for t in task.tables):
        options.append("use a smaller data_type")
    if any(t.optimizer in ("adam", "adagrad") for t in task.tables):
        options.append("use an optimizer with less state")
    known = whole or task
    in_host = [{_is_in_host(known, way) for way in ways} for ways in known.ways]
    if place == 0 and {False} in in_host and not task.uneven:
        options.append("allow more tables the kernel fused_uvm")
    if place == 1 and {True} in in_host:
        options.append("allow more tables the kernel fused")
    return _any_of(options or ["take ranks with more memory"])


def _is_in_host(task: ShardingTask, way: int) -> bool:
    factors = task.kernels[way]
    return factors is not None and factors.host is not None


def _may_be_narrower(task: ShardingTask, way: int) -> bool:
    """Whether a lower min_partition would make a table's shards narrower."""
    return (
        task.sharding_types[way] == COLUMN_WISE
        and task.min_widths[way] > COLUMN_MULTIPLE
        and task.pooled[way]
        and all(codec.row_values == 1 for codec in task.codecs[way])
    )


def _more_ranks(task: ShardingTask, num_ranks: float) -> str:
    """Say how many ranks it takes at least, in whole nodes where there are several."""
    size = task.local_world_size if task.local_world_size < task.world_size else 1
    least = math.ceil(num_ranks / size) * size
    return f"raise world_size ({task.world_size}) to at least {least}"


def _listed(things: Sequence[str]) -> str:
    return " or ".join(filter(None, (", ".join(things[:-1]), *things[-1:])))


def _any_of(options: Sequence[str]) -> str:
    """Join what would help; what to allow, in one."""
    start, end = "allow ", " for it"
    allow = [o for o in options if o.startswith(start) and o.endswith(end)]
    things = _listed([o.removeprefix(start).removesuffix(end) for o in allow])
    joined = [f"{start}{things}{end}"] if allow else []
    text = _listed([*joined, *(o for o in options if o not in allow)])
    return f"{capitalised(text)}."


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
        outcome = program.solve(max(left, 0.1))
        if outcome is None:
            break
        if isinstance(outcome, str):
            return None, outcome == "infeasible" and shrink == 0.0
        if _within_memory(task, outcome):
            return outcome, False
    return None, False


def lacking_memories(task: ShardingTask) -> list[int]:
    """Return the memories of which more would do; all where that is not known."""
    if len(task.memories) == 1:
        return [0]
    others = (
        dataclasses.replace(task, memory_bytes=()),
        dataclasses.replace(task, host_memory_bytes=()),
    )
    found = [p for p, o in enumerate(others) if pack_exactly(o, 1.0)[0] is not None]
    return found or [0, 1]


def _no_packing(task: ShardingTask, proven: bool) -> str:
    """Say that tables in column shards fit no ranks, and what would make them."""
    num_ranks, rules = task.world_size, Rules(task)
    lacking = lacking_memories(task)
    memories = [task.memories[place] for place in lacking]
    size_MT = [
        [m.shard_bytes(t, c.embedding_dim) for t, c in enumerate(task.tables)]
        for m in memories
    ]
    largest = int(np.sum(size_MT, axis=0).argmax())
    options = []
    if count := enough_ranks(task):
        options.append(f"raise world_size ({num_ranks}) to {count}")
    narrow = [_may_be_narrower(task, t) for t in range(len(task.tables))]
    widths = zip(task.min_widths, narrow, strict=True)
    lower = tuple(COLUMN_MULTIPLE if able else width for width, able in widths)
    if any(narrow) and _fill(dataclasses.replace(task, min_widths=lower)) is not None:
        options.append(f"lower min_partition to {COLUMN_MULTIPLE}")
    names = [name for name in ("allowed_ranks", "apart") if getattr(task, name)]
    if names:
        options.append(f"allow tables more ranks ({', '.join(names)})")
    needs = f" and, {HOST}".join(format_bytes(sum(sizes)) for sizes in size_MT)
    limits = [format_bytes(sum(_limits(m))) for m in memories]
    return (
        f"{HOST * (lacking == [1])}the tables in column shards need {needs} in all and "
        f"the {num_ranks} ranks "
        f"have {' and, in their hosts, '.join(limits)} for them, but no split allowed "
        f"puts every shard on a rank {'that may take it ' if rules else ''}"
        f"({'proven by exact packing' if proven else 'none was found'}); the largest "
        f"is {describe(task, largest)}. "
        + _any_of(options or ["take ranks with more memory"])
    )


def _within_memory(task: ShardingTask, width_TW: Ints) -> bool:
    caps_MW = np.array([_limits(memory) for memory in task.memories], dtype=float)
    used_MW = np.zeros_like(caps_MW)
    for table, rank in zip(*np.nonzero(width_TW), strict=True):
        used_MW[:, rank] += _sizes(task, int(table), int(width_TW[table, rank]))
    return bool((used_MW <= caps_MW).all())


def enough_ranks(task: ShardingTask) -> int:
    """Return about the fewest ranks on which best-fit packing succeeds.

    In whole nodes where there are several; 0 where none are found.
    """
    num_ranks, node = task.world_size, task.local_world_size
    step = node if node < num_ranks else 1

    def packs(added: int) -> bool:
        count = num_ranks + step * added
        more: dict[str, Any] = {
            name: limits + (int(np.mean(limits)),) * (count - num_ranks)
            for name in ("memory_bytes", "host_memory_bytes")
            if (limits := getattr(task, name))
        }
        most = [count if m == num_ranks else m for m in task.max_shards]
        more |= {"max_shards": tuple(most), "node_size": 0}
        more["local_world_size"] = node if node < num_ranks else count
        wider = dataclasses.replace(task, world_size=count, **more)
        return _fill(wider) is not None

    low, high = 0, len(task.tables)
    if not packs(high):
        return 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if packs(middle) else (middle, high)
    return num_ranks + step * high


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
