"""Search that tries every placement of a tiny task, to test other searches against.

Shapes: `C` placements in a chunk, `T` tables, `W` ranks, `O` options of a table, `S`
sets that a rank can hold (a second `S`: stages).
"""

from __future__ import annotations

import itertools
import math
import time

import numpy as np
import numpy.typing as npt

from torchrec_neuroshard.costs.simulator import Simulator
from torchrec_neuroshard.costs.task import ShardingTask, format_bytes
from torchrec_neuroshard.errors import ConfigError, InfeasibleError
from torchrec_neuroshard.search.base import Searcher, SearchResult
from torchrec_neuroshard.search.feasibility import describe, way_out
from torchrec_neuroshard.search.lanes import Lanes
from torchrec_neuroshard.search.rules import check_constraints
from torchrec_neuroshard.search.shards import (
    Floats,
    Ints,
    ShardBank,
    placement_from_widths,
)
from torchrec_neuroshard.tables.table import COLUMN_MULTIPLE

CHUNK = 100_000


class ExhaustiveSearcher(Searcher):
    """Tries all ways to shard each table, all column splits and all ranks."""

    name = "exhaustive"
    takes_choices = True

    def __init__(self, max_placements: int = 20_000_000) -> None:
        """Take the maximum number of placements of a task."""
        self.max_placements = max_placements

    def search(self, task: ShardingTask, simulator: Simulator) -> SearchResult:
        """Return the best of all placements.

        Raises:
            ConfigError: The task has too many placements, or contradictory rules.
            InfeasibleError: No placement fits the memory and keeps to the rules.
        """
        start = time.monotonic()
        if count_placements(task) > self.max_placements * (1 + 1e-9):
            raise ConfigError(
                f"the task has {count_placements(task):.3g} placements, but exhaustive "
                f"search tries at most {self.max_placements}; use fewer or narrower "
                "tables"
            )
        check_constraints(task)
        if task.has_choices:
            return _try_choices(simulator, start)
        options = [_options(task, t) for t in range(len(task.tables))]
        count = math.prod(len(o) for o in options)
        radix = np.cumprod([1, *(t.embedding_dim // 4 + 1 for t in task.tables)])
        sets = _RankSets(simulator, radix)
        best, best_ms = -1, np.inf
        for first in range(0, count, CHUNK):
            index = np.arange(first, min(count, first + CHUNK))
            cost = self._costs(simulator, options, index, radix, sets)
            if cost.min() < best_ms:
                best, best_ms = first + int(cost.argmin()), float(cost.min())
        if not np.isfinite(best_ms):
            raise InfeasibleError(_nothing_fits(task))
        widths = np.zeros((len(task.tables), task.world_size), dtype=np.int64)
        for table, option in enumerate(options):
            best, place = divmod(best, len(option))
            widths[table] = option[place] * COLUMN_MULTIPLE
        return _result(simulator, widths, best_ms, start, len(sets.cost_SS2))

    @staticmethod
    def _costs(
        simulator: Simulator,
        options: list[Ints],
        index_C: Ints,
        radix: Ints,
        sets: _RankSets,
    ) -> Floats:
        """Return the critical path of each placement; infinite if not allowed."""
        task = simulator.task
        code = np.zeros((len(index_C), task.world_size), dtype=np.int64)
        shards_CT = np.zeros((len(index_C), len(options)), dtype=np.int64)
        held: dict[int, Ints] = {}
        bound = {t for tables in (*task.together, *task.apart) for t in tables}
        rest = index_C
        for table, option in enumerate(options):
            rest, place = np.divmod(rest, len(option))
            code += option[place] * radix[table]
            shards_CT[:, table] = (option > 0).sum(axis=1)[place]
            if table in bound:
                held[table] = (option[place] > 0).astype(np.int64)
        patterns, pattern = np.unique(shards_CT > 1, axis=0, return_inverse=True)
        columns = [
            simulator.ordered_columns(1 + is_split, simulator.columns_per_table)
            for is_split in patterns
        ]
        cost = simulator.path_ms(
            simulator.phases(sets.cost_SS2[code], sets.loads_SS3[code]),
            simulator.order_costs(np.stack(columns))[pattern.reshape(-1)],
            simulator.stage_order(shards_CT > 0),
            sets.loads_SS3[code],
        )
        for caps_W, bytes_S in zip(task.memory[0], sets.bytes_MS, strict=True):
            cost[(bytes_S[code] > caps_W).any(axis=1)] = np.inf
        for tables in task.together:
            for table in tables[1:]:
                cost[(held[table] != held[tables[0]]).any(axis=1)] = np.inf
        for tables in task.apart:
            crowd = np.sum([held[t] for t in tables], axis=0)
            cost[(crowd > 1).any(axis=1)] = np.inf
        return cost


def count_placements(task: ShardingTask) -> float:
    """Return the number of placements, without limits on widths and memory."""
    ranks = task.world_size

    def layouts(table: int) -> float:
        units = task.tables[table].embedding_dim // COLUMN_MULTIPLE
        if not task.sharding_type(table).in_columns:
            blocks = ranks // task.block_size(table)
            return math.comb(blocks, min(blocks, task.num_blocks(table)))
        whole = task.has_choices and task.max_shards[table] <= 1
        cuts = math.lgamma(units + ranks) - math.lgamma(units + 1)
        return ranks if whole else math.exp(min(cuts - math.lgamma(ranks), 700.0))

    logs = [math.log(sum(map(layouts, ways))) for ways in task.ways]
    return math.exp(min(sum(logs), 700.0))


def _options(task: ShardingTask, table: int) -> Ints:
    """Return every split of a table's columns, `O x W` in units of four columns."""
    units = task.tables[table].embedding_dim // COLUMN_MULTIPLE
    narrowest = max(1, -(-task.min_widths[table] // COLUMN_MULTIPLE))
    allowed_TW = task.rules.allowed_TW
    closed: Ints = np.array([], dtype=np.int64)
    if allowed_TW is not None:
        closed = np.flatnonzero(~allowed_TW[table])
    if task.max_shards[table] <= 1:
        whole: Ints = units * np.eye(task.world_size, dtype=np.int64)[::-1]
        return whole[~whole[:, closed].any(axis=1)]
    found = []
    for cuts in itertools.combinations(
        range(units + task.world_size - 1), task.world_size - 1
    ):
        bounds = [-1, *cuts, units + task.world_size - 1]
        parts = [b - a - 1 for a, b in itertools.pairwise(bounds)]
        held = [p for p in parts if p]
        legal = len(held) == 1 or (
            min(held) >= narrowest
            and len(held) <= task.max_shards[table]
            and (task.uneven or len(set(held)) == 1)
        )
        if legal and not any(parts[rank] for rank in closed):
            found.append(parts)
    return np.array(found, dtype=np.int64)


def _block_options(task: ShardingTask, table: int) -> Ints:
    """Return every way to put a table on whole blocks, `O x W` in four columns."""
    size, count = task.block_size(table), task.num_blocks(table)
    units = task.tables[table].embedding_dim // count // COLUMN_MULTIPLE
    closed = np.zeros(task.world_size, dtype=bool)
    allowed_TW = task.rules.allowed_TW
    if allowed_TW is not None:
        closed = ~allowed_TW[table]
    found = []
    for blocks in itertools.combinations(range(task.world_size // size), count):
        held = np.isin(np.arange(task.world_size) // size, blocks)
        if not (held & closed).any():
            found.append(held * units)
    return np.array(found, dtype=np.int64).reshape(-1, task.world_size)


def _try_choices(simulator: Simulator, start: float) -> SearchResult:
    """Return the best placement of tables that have several ways of sharding."""
    task, bank = simulator.task, ShardBank(simulator)
    num_ranks = task.world_size
    ways_N, widths_N = [], []
    for ways in task.ways:
        parts = [
            (_options if task.sharding_type(w).in_columns else _block_options)(task, w)
            for w in ways
        ]
        ways_N.append(np.repeat(ways, [len(p) for p in parts]))
        flat = [p.reshape(-1, num_ranks) for p in parts]
        widths_N.append(np.concatenate(flat) * COLUMN_MULTIPLE)
    count = math.prod(map(len, ways_N))
    best, best_ms = -1, np.inf
    chunk = max(1, CHUNK // (20 * num_ranks * len(ways_N)))
    for first in range(0, count, chunk):
        index = np.arange(first, min(count, first + chunk))
        way_CN, width_CNW = _decode(index, ways_N, widths_N)
        table = np.broadcast_to(way_CN[:, :, None], width_CNW.shape)
        rank = np.broadcast_to(np.arange(num_ranks), width_CNW.shape)
        held = (width_CNW > 0) & (rank % bank.block_T[table] == 0)
        pieces = held.nonzero()[0], table[held], rank[held], width_CNW[held]
        cost = Lanes.placed(bank, len(index), *pieces).critical_L
        over_CW = bank.sizes(table, width_CNW).sum(axis=2) > bank.caps_MW[:, None]
        cost[over_CW.any(axis=(0, 2))] = np.inf
        cost[_breaks_rules(task, way_CN, width_CNW)] = np.inf
        if cost.min(initial=np.inf) < best_ms:
            best, best_ms = first + int(cost.argmin()), float(cost.min())
    if not np.isfinite(best_ms):
        raise InfeasibleError(_nothing_fits(task))
    width_TW = np.zeros((len(task.tables), num_ranks), dtype=np.int64)
    way_CN, width_CNW = _decode(np.array([best]), ways_N, widths_N)
    width_TW[way_CN[0]] = width_CNW[0]
    return _result(simulator, width_TW, best_ms, start, bank.num_evaluated)


def _result(
    simulator: Simulator,
    width_TW: Ints,
    best_ms: float,
    start: float,
    num_evaluated: int,
) -> SearchResult:
    placement = placement_from_widths(width_TW, simulator.task)
    return SearchResult(
        placement=placement,
        predicted=simulator.evaluate(placement),
        lower_bound_ms=best_ms,
        gap=0.0,
        bound_is_proven=True,
        search_seconds=time.monotonic() - start,
        num_evaluated=num_evaluated,
    )


def _decode(
    index_C: Ints, ways_N: list[Ints], widths_N: list[Ints]
) -> tuple[Ints, Ints]:
    """Return the ways, `C x N`, and widths, `C x N x W`, of numbered placements."""
    ways, widths = [], []
    for way, width in zip(ways_N, widths_N, strict=True):
        index_C, place = np.divmod(index_C, len(way))
        ways.append(way[place])
        widths.append(width[place])
    return np.stack(ways, axis=1), np.stack(widths, axis=1)


def _breaks_rules(
    task: ShardingTask, way_CN: Ints, width_CNW: Ints
) -> npt.NDArray[np.bool_]:
    """Return whether placements break the rules together and apart, `C`."""
    broken = np.zeros(len(way_CN), dtype=bool)
    held_CNW = width_CNW > 0
    for tables in task.apart:
        crowd = (held_CNW & np.isin(way_CN, tables)[:, :, None]).sum(axis=1)
        broken |= (crowd > 1).any(axis=1)
    for tables in task.together:
        own_CN = np.isin(way_CN, tables)
        broken |= own_CN.any(axis=1) & (own_CN.sum(axis=1) < len(tables))
        first_CW = held_CNW[np.arange(len(own_CN)), own_CN.argmax(axis=1)]
        alike_CN = (held_CNW == first_CW[:, None]).all(axis=2)
        broken |= (own_CN & ~alike_CN).any(axis=1)
    return broken


def _nothing_fits(task: ShardingTask) -> str:
    """Return the message that no placement fits."""
    caps_MW, fixed_MT, column_MT = task.memory
    dims_T = np.array([table.embedding_dim for table in task.tables])
    size_T = (fixed_MT + column_MT * dims_T).sum(axis=0)
    sizes = [size_T[list(ways)].min() for ways in task.ways]
    largest = task.ways[int(np.argmax(sizes))][0]
    has = [format_bytes(most) for most in caps_MW.max(axis=1) if np.isfinite(most)]
    rules = " and keeps to the rules on ranks" if task.rules else ""
    return (
        f"no placement of the task fits the ranks' memory{rules}: the largest table is "
        f"{describe(task, largest)}, the freest rank has "
        f"{' and, in its host, '.join(has) or 'no limit'}. "
        f"{way_out(task)}"
    )


class _RankSets:
    """Cost, loads and bytes of every set that a rank can hold."""

    def __init__(self, simulator: Simulator, radix: Ints) -> None:
        task = simulator.task
        shape = (int(radix[-1]), task.num_stages)
        self.loads_SS3: Floats = np.zeros((*shape, 3))
        self.bytes_MS: Floats = np.zeros((len(task.memory[0]), shape[0]))
        self.cost_SS2: Floats = np.zeros((*shape, 2))
        for first in range(0, int(radix[-1]), CHUNK):
            code = np.arange(first, min(int(radix[-1]), first + CHUNK))
            self._fill(simulator, radix, code, task)

    def _fill(
        self, simulator: Simulator, radix: Ints, code: Ints, task: ShardingTask
    ) -> None:
        sums = np.zeros((len(code), task.num_groups, simulator.cost_model.encoding_dim))
        for table, config in enumerate(task.tables):
            units = code // radix[table] % (radix[table + 1] // radix[table])
            widths = np.arange(config.embedding_dim // 4 + 1) * COLUMN_MULTIPLE
            known = simulator.price(np.full(len(widths) - 1, table), widths[1:])
            encodings = np.pad(known.encoding_NE, ((1, 0), (0, 0)))
            sums[:, task.groups[table]] += encodings[units]
            _, fixed_MT, column_MT = task.memory
            size_MU = (
                fixed_MT[:, [table]] * (widths > 0) + column_MT[:, [table]] * widths
            )
            self.bytes_MS[:, code] += size_MU[:, units]
            stage = task.stages[task.groups[table]]
            loads = np.pad(known.loads_N3, ((1, 0), (0, 0)))
            self.loads_SS3[code, stage] += loads[units]
        compute = simulator.compute_costs(sums)
        self.cost_SS2[code] = simulator.stage_compute(compute)
