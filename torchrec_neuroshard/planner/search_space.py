"""The search space: TorchRec's options as a task, and placements as options."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from torchrec.distributed.planner.types import (
    Enumerator,
    ParameterConstraints,
    Shard,
    ShardingOption,
    Storage,
)

from torchrec_neuroshard.costs.placement_rules import PlacementRules
from torchrec_neuroshard.costs.task import ColumnShard, Placement, ShardingTask
from torchrec_neuroshard.models.row_cache import ASSOCIATIVITY
from torchrec_neuroshard.planner.caches import with_load
from torchrec_neuroshard.planner.constraints import permits, too_few_ranks
from torchrec_neuroshard.planner.enumerator import NeuroShardEnumerator
from torchrec_neuroshard.planner.greedy import no_fit
from torchrec_neuroshard.planner.kernels import is_estimated, miss_curve
from torchrec_neuroshard.planner.option_facts import (
    OFFLOADED_KERNELS,
    device_tier,
    has_open_cache,
    has_own_optimizer,
    is_fused,
    table_name,
)
from torchrec_neuroshard.planner.placed import task_of
from torchrec_neuroshard.planner.reader import TableReader
from torchrec_neuroshard.planner.spread_options import (
    SharedShard,
    sample_shards,
    unpriced_shards,
    without_estimates,
)
from torchrec_neuroshard.planner.ways import (
    Ints,
    Ways,
    narrowest_shard,
    node_ranks,
    searched_type,
    useful_ways,
)
from torchrec_neuroshard.tables.sharding_types import (
    COLUMN_SHARDED_TYPES,
    COLUMN_WISE,
    TABLE_WISE,
)
from torchrec_neuroshard.tables.table import COLUMN_MULTIPLE

Floats = npt.NDArray[np.float64]

_TIERS = ("hbm", "ddr", "ssd")
_JOINT_SHARES = (1.0, 0.75, 0.5, 0.25)
"""Shares of the freest rank's memory for which tables that go together get a way."""
CACHED_BATCHES = (1.0, 16.0, 256.0)
"""The search may choose caches that hold the rows of this many batches. Their sizes are
adjusted afterwards."""
MAX_CACHE_LOAD, MIN_CACHE_GROWTH = 0.8, 1.2
"""Largest cache as a share of a table's rows, and the least ratio of two cache sizes.
Above this share, a cache is no better than the whole table."""


def other_caches(option: ShardingOption, reader: TableReader) -> list[ShardingOption]:
    """Return copies of an option with other cache sizes.

    TorchRec offers one size, `UVM_CACHING_RATIO` of the rows. Tables of one kernel
    share its cache, and a row stays for the same number of batches whatever its table.
    So each copy's cache holds the rows of one of `CACHED_BATCHES`.

    Args:
        option: Any option. There are no copies without a cache, or if its size is set.
        reader: Knows the devices, and how tables are accessed.

    Returns:
        Options without estimates.
    """
    if not has_open_cache(option) or not reader.has_cost(option):
        return []
    curve = miss_curve(option, reader)
    loads = curve.load_factors(CACHED_BATCHES)
    loads = np.maximum(loads, ASSOCIATIVITY / int(option.tensor.shape[0]))
    kept: list[float] = []
    for load in loads[loads <= MAX_CACHE_LOAD].tolist():
        if not kept or load > MIN_CACHE_GROWTH * kept[-1]:
            kept.append(load)
    return [without_estimates(with_load(option, load)) for load in kept]


@dataclass(frozen=True, slots=True)
class _ShardBytes:
    """Memory of shards as a linear function of their width, for `T` options.

    The columns of the arrays are `_TIERS`.
    """

    fixed_T3: Floats
    """Bytes per shard."""
    column_T3: Floats
    """Bytes per column of a shard."""

    def at(self, option: int, width: int) -> Storage:
        """Return the memory of an option's shard of `width` columns."""
        bytes_3 = self.fixed_T3[option] + self.column_T3[option] * width
        return Storage(*map(math.ceil, bytes_3.tolist()))

    def of(self, options: Sequence[int]) -> _ShardBytes:
        """Return the memory of some of the options."""
        return _ShardBytes(self.fixed_T3[options], self.column_T3[options])

    def largest(self, tier: str, width_T: Ints) -> Floats:
        """Return the bytes of shards of these widths in one kind of memory, `T`."""
        place = _TIERS.index(tier)
        found: Floats = self.fixed_T3[:, place] + self.column_T3[:, place] * width_T
        return found


@dataclass(frozen=True, slots=True)
class SearchSpace:
    """A task for a search, and the way of each of its indices."""

    ways: Ways
    """The way of each index in the task, as a row."""
    task: ShardingTask
    _tier: str
    """Memory of fused tables on devices."""
    _bytes: _ShardBytes
    _may_be_table_wise: tuple[bool, ...]

    @classmethod
    def of(
        cls,
        ways: Ways,
        tables: Sequence[Sequence[int]],
        *,
        reader: TableReader,
        enumerator: Enumerator | None,
        memory: Sequence[Storage],
        rules: PlacementRules,
        least_columns: int = COLUMN_MULTIPLE,
        places: Sequence[int] | None = None,
    ) -> SearchSpace:
        """Return the search space of tables and their ways to be sharded.

        Args:
            ways: Ways to shard tables.
            tables: The rows of each table, all placeable.
            reader: Describes tables, devices and constraints.
            enumerator: Knows the memory of a split. None: every shard counts all memory
                that its table needs beside its weights.
            memory: Memory left on each rank.
            rules: Which ranks tables may use.
            least_columns: Default of `min_partition`.
            places: Place of each table in the model. None: their order.

        Raises:
            PlannerError: A table has no rank, or too few ranks for any of its ways.
        """
        tables = [
            _permitted(ways, rows, rules, reader) for rows in useful_ways(ways, tables)
        ]
        ways = ways.take([row for rows in tables for row in rows])
        ends = np.cumsum([len(rows) for rows in tables]).tolist()
        tables = [
            range(end - len(rows), end) for rows, end in zip(tables, ends, strict=True)
        ]
        tier = device_tier(reader.topology)
        shard_bytes = _shard_bytes(ways, reader, enumerator, tier)
        if rules.together:
            width_R = ways.embedding_R()[:, 1]
            size_R = np.ceil(shard_bytes.largest(tier, width_R))
            left = [getattr(m, tier) for m in memory]
            tables = _joint_ways(ways, tables, size_R, rules, left, enumerator)
            kept = [row for rows in tables for row in rows]
            ways, shard_bytes = ways.take(kept), shard_bytes.of(kept)
        places = places or range(len(tables))
        counts = [len(rows) for rows in tables]
        facts_K = {
            k: (
                narrowest_shard(kind, reader, least_columns),
                1 if kind.sharding_type == TABLE_WISE else len(memory),
                searched_type(kind),
                _may_be_table_wise(reader.constraint(kind)),
            )
            for k, kind in enumerate(ways.kinds)
        }
        min_widths, most, types, may_be_table_wise = zip(
            *(facts_K[k] for k in ways.kind_R.tolist()), strict=True
        )
        return cls(
            ways=ways,
            task=task_of(
                ways,
                reader,
                np.repeat(places, counts).tolist(),
                **_memory_fields(tier, shard_bytes, memory),
                **_host_fields(tier, ways, shard_bytes, memory),
                min_widths=min_widths,
                max_shards=most,
                sharding_types=types,
                uneven=not reader.on_gpu,
                **_placement_fields(ways, rules, reader),
            ),
            _tier=tier,
            _bytes=shard_bytes,
            _may_be_table_wise=may_be_table_wise,
        )

    def with_memory(self, memory: Sequence[Storage]) -> SearchSpace:
        """Return the space for other memory; the ways of tables stay.

        Args:
            memory: Memory left on each rank. No tables go together.
        """
        fields = _memory_fields(self._tier, self._bytes, memory)
        fields |= _host_fields(self._tier, self.ways, self._bytes, memory)
        return replace(self, task=replace(self.task, **fields))

    def over_hosts(self, placement: Placement) -> Placement:
        """Return the placement with ranks renamed to spread host reads over hosts.

        Column shards of the rank that reads most from host memory move to the first
        rank of the first host, those of the next rank to the first rank of the second
        host, and so on. Memory and rules are not checked.
        """
        task, size = self.task, self.task.local_world_size
        reads_W = np.zeros(task.world_size)
        in_columns = [
            task.sharding_type(table).in_columns for table in range(len(task.tables))
        ]
        for shard in placement.shards:
            factors = task.kernels[shard.table]
            in_host = factors is not None and factors.host is not None
            if in_host and in_columns[shard.table]:
                pooling = task.tables[shard.table].pooling_factor
                reads_W[shard.rank] += pooling * shard.width
        if size == task.world_size or not reads_W.any():
            return placement
        by_host = sorted(range(task.world_size), key=lambda r: (r % size, r))
        fullest = np.argsort(-reads_W, kind="stable").tolist()
        renamed = dict(zip(fullest, by_host, strict=True))
        triples = [
            (s.table, s.width, renamed[s.rank] if in_columns[s.table] else s.rank)
            for s in placement.shards
        ]
        return Placement.from_widths(task.world_size, triples, task)

    def placed(
        self, placement: Placement, *, apart: bool = False
    ) -> list[ShardingOption]:
        """Return the chosen options, with shards and ranks, in the order of tables.

        If a module has a split table, all its column-wise options stay column-wise, so
        that a rank runs one kernel for them. Otherwise they become table-wise, if the
        constraints allow it.

        Args:
            placement: Shards and ranks.
            apart: Tables that are not split become table-wise in any case. Their
                columns are not reordered then, but have an exchange of their own.
        """
        held: dict[int, list[ColumnShard]] = {}
        for shard in placement.shards:
            held.setdefault(shard.table, []).append(shard)
        chosen = dict(zip(held, self.ways.options(held), strict=True))
        stays = {
            way
            for way, shards in held.items()
            if chosen[way].sharding_type == COLUMN_WISE
            and (len(shards) > 1 or not self._may_be_table_wise[way])
        }
        column_wise = {chosen[way].path for way in stays}
        plan = []
        for ways in self.task.ways:
            way = next(w for w in ways if w in held)
            option = copy.copy(chosen[way])
            if searched_type(option) not in COLUMN_SHARDED_TYPES:
                storage = self._bytes.at(way, 0)
                option.shards = _with_ranks(option, held[way], storage)
            else:
                if option.sharding_type == COLUMN_WISE and (
                    way not in stays if apart else option.path not in column_wise
                ):
                    option.sharding_type = TABLE_WISE
                rows = int(option.tensor.shape[0])
                option.shards = [
                    Shard(
                        size=[rows, s.width],
                        offset=[0, s.offset],
                        storage=self._bytes.at(way, s.width),
                        rank=s.rank,
                    )
                    for s in held[way]
                ]
            plan.append(option)
        return plan


def _with_ranks(
    option: ShardingOption, held: Sequence[ColumnShard], storage: Storage
) -> list[Shard]:
    """Return copies of an option's shards with the ranks of a placement's shards."""
    ranks = {(s.offset, s.row_offset, i): s.rank for i, s in _numbered(held)}
    placed = []
    for number, shard in _numbered(unpriced_shards(option)):
        row, column = (int(n) for n in shard.offset)
        placed.append(
            SharedShard(
                size=shard.size,
                offset=shard.offset,
                storage=copy.copy(storage),
                perf=copy.copy(shard.perf),
                rank=ranks[column, row, number],
            )
        )
    return placed


def _numbered(shards: Sequence[Any]) -> list[tuple[int, Any]]:
    """Return shards with a number among shards of equal offset, such as replicas."""
    seen: dict[tuple[int, int], int] = {}
    found = []
    for shard in shards:
        if isinstance(shard, ColumnShard):
            key = shard.row_offset, shard.offset
        else:
            key = int(shard.offset[0]), int(shard.offset[1])
        found.append((seen.get(key, 0), shard))
        seen[key] = seen.get(key, 0) + 1
    return found


def _may_be_table_wise(constraint: ParameterConstraints | None) -> bool:
    allowed = constraint.sharding_types if constraint else None
    return not allowed or TABLE_WISE in allowed


def _permitted(
    ways: Ways, rows: Sequence[int], rules: PlacementRules, reader: TableReader
) -> list[int]:
    """Return the rows of a table for which the rules leave enough ranks."""
    if not rules:
        return list(rows)
    options = dict(zip(rows, ways.options(rows), strict=True))
    kept = [row for row, option in options.items() if permits(rules, option, reader)]
    if not kept:
        raise no_fit(too_few_ranks([*options.values()], "is proposed"))
    if len(rules.colocated_with(rules.index[table_name(options[kept[0]])])) > 1:
        # Tables that go together move as one, so they need column shards.
        alone = [r for r in kept if searched_type(options[r]) in COLUMN_SHARDED_TYPES]
        kept = alone or kept[:1]
    return kept


def _joint_ways(
    ways: Ways,
    tables: Sequence[Sequence[int]],
    size_R: Floats,
    rules: PlacementRules,
    memory: Sequence[int],
    enumerator: Enumerator | None,
) -> list[list[int]]:
    """Return the rows of each table; tables that go together get joint ways.

    The n-th ways of tables that go together belong to each other. The first joint way
    has the fastest way of each table. Then one table at a time takes a way with less
    memory, cheapest in time per byte first. The search gets the first of these steps,
    the last, and the first that fits each of `_JOINT_SHARES`.

    Args:
        ways: Ways to shard tables.
        tables: The rows of each table.
        size_R: Bytes of the largest shard of each way.
        rules: Which tables go together.
        memory: Bytes left on each rank.
        enumerator: Estimates the time of ways without an estimate.
    """
    found = [list(rows) for rows in tables]
    name = [table_name(ways.option(rows[0])) for rows in tables]
    place = {rules.index[table]: n for n, table in enumerate(name)}
    size = size_R.tolist()
    for members in rules.together:
        own = [place[table] for table in members if table in place]
        options = {r: ways.option(r) for n in own for r in found[n]}
        unpriced = [o for o in options.values() if sample_shards(o)[0].perf is None]
        if unpriced and enumerator is not None:
            enumerator.populate_estimates(unpriced)
        cost = {row: option.total_perf for row, option in options.items()}
        now = [
            min(found[n], key=lambda r: (is_estimated(options[r]), cost[r]))
            for n in own
        ]
        steps = [
            (loss, n, row)
            for n, first in enumerate(now)
            for loss, row in _smaller_ways(first, found[own[n]], size, cost)
        ]
        left = sum(size[row] for row in now)
        room = max(memory[r] for r in rules.ranks(members[0]))
        fitting = [room * share for share in _JOINT_SHARES if room * share < left]
        joint = [list(now)]
        for count, (_, n, row) in enumerate(sorted(steps, key=lambda s: s[:2]), 1):
            left += size[row] - size[now[n]]
            now[n] = row
            if count == len(steps) or (fitting and left <= fitting[0]):
                joint.append(list(now))
            fitting = [part for part in fitting if part < left]
        for n, rows in zip(own, zip(*joint, strict=True), strict=True):
            found[n] = list(rows)
    return found


def _smaller_ways(
    row: int, rows: Sequence[int], size: Sequence[float], cost: Mapping[int, float]
) -> Iterator[tuple[float, int]]:
    """Yield ways of decreasing memory, each with the time lost per byte."""

    def loss(way: int) -> float:
        return (cost[way] - cost[row]) / (size[row] - size[way])

    while smaller := [way for way in rows if size[way] < size[row]]:
        way = min(smaller, key=loss)
        yield loss(way), way
        row = way


def _shard_bytes(
    ways: Ways, reader: TableReader, enumerator: Enumerator | None, tier: str
) -> _ShardBytes:
    """Return the memory of each way's shards as a function of their width."""
    fixed_R3 = np.zeros((ways.num_rows, len(_TIERS)))
    column_R3 = np.zeros_like(fixed_R3)
    counts_all = isinstance(enumerator, NeuroShardEnumerator)
    memory = enumerator.memory if isinstance(enumerator, NeuroShardEnumerator) else None
    knows_K = np.array([memory is not None and memory.knows(o) for o in ways.kinds])
    moves_K = np.array([searched_type(o) in COLUMN_SHARDED_TYPES for o in ways.kinds])
    knows_R, moves_R = knows_K[ways.kind_R], moves_K[ways.kind_R]
    for row in np.flatnonzero(~moves_R & ~knows_R).tolist():
        kind = ways.kinds[ways.kind_R[row]]
        fixed_R3[row] = np.max([_bytes_3(s) for s in sample_shards(kind)], axis=0)
    size_R2 = ways.embedding_R()
    # A table of four columns cannot be split.
    widths_R2 = np.stack(
        [
            np.full(ways.num_rows, COLUMN_MULTIPLE),
            np.maximum(size_R2[:, 1], 2 * COLUMN_MULTIPLE),
        ],
        axis=1,
    )
    bytes_R23 = np.zeros((ways.num_rows, 2, len(_TIERS)))
    if memory is not None:
        fixed = np.flatnonzero(~moves_R & knows_R)
        if len(fixed):
            some = ways.take(fixed)
            largest_N2 = some.largest_R2(reader.world_size, reader.node_size)
            found = memory.shard_bytes(some, np.arange(len(fixed)), *largest_N2.T)
            fixed_R3[fixed, :2] = np.ceil(found)
        known = np.flatnonzero(moves_R & knows_R)
        if len(known):
            found = memory.shard_bytes(
                ways.take(known),
                np.repeat(np.arange(len(known)), 2),
                np.repeat(size_R2[known, 0], 2),
                widths_R2[known].ravel(),
            )
            bytes_R23[known, :, :2] = np.ceil(found).reshape(len(known), 2, 2)
    probed = np.flatnonzero(moves_R & ~knows_R).tolist()
    if probed and enumerator is not None:
        probes = list(map(copy.copy, ways.options(probed)))
        for probe, widths in zip(probes, widths_R2[probed].tolist(), strict=True):
            rows = int(probe.tensor.shape[0])
            probe.sharding_type = COLUMN_WISE
            probe.shards = [Shard(size=[rows, w], offset=[0, 0]) for w in widths]
        enumerator.populate_estimates(probes)
        bytes_R23[probed] = [[_bytes_3(s) for s in probe.shards] for probe in probes]
    split = np.flatnonzero(moves_R)
    slope_N3 = (bytes_R23[split, 1] - bytes_R23[split, 0]) / np.diff(widths_R2[split])
    column_R3[split] = slope_N3
    fixed_R3[split] = np.maximum(
        0.0, bytes_R23[split, 0] - slope_N3 * widths_R2[split, :1]
    )
    for row in probed:
        option = ways.option(row)
        if enumerator is None:
            fixed_R3[row], column_R3[row] = _bounded_bytes(option)
            continue
        counted = has_own_optimizer(option) or counts_all
        if not is_fused(option) or (memory is not None and memory.is_lenient):
            counted = False  # already counted per shard, or the rows are on disk
        if counted and reader.optimizer(option) == "rowwise_adagrad":
            # TorchRec divides one value per row among column shards, but each shard
            # keeps its own.
            where = "ddr" if option.compute_kernel in OFFLOADED_KERNELS else tier
            rows, width = (int(n) for n in option.tensor.shape)
            fixed_R3[row, _TIERS.index(where)] += 4.0 * rows
            column_R3[row, _TIERS.index(where)] -= 4.0 * rows / width
    return _ShardBytes(fixed_R3, column_R3)


def _bytes_3(shard: Shard) -> list[float]:
    return [float(getattr(shard.storage, tier)) for tier in _TIERS]


def _bounded_bytes(option: ShardingOption) -> tuple[Floats, Floats]:
    """Return an upper bound of a shard's memory from the whole table's storage."""
    rows, width = (int(n) for n in option.tensor.shape)
    # The option's shards add up to the whole table.
    total_3 = np.sum([_bytes_3(shard) for shard in option.shards], axis=0)
    column_3 = np.minimum(rows * option.tensor.element_size(), total_3 / width)
    return total_3 - column_3 * width, column_3


def _memory_fields(
    tier: str, shards: _ShardBytes, memory: Sequence[Storage]
) -> dict[str, Any]:
    """Return a task's fields on one kind of memory: of ranks and of tables."""
    place = _TIERS.index(tier)
    return {
        "memory_bytes": tuple(max(0, getattr(m, tier)) for m in memory),
        "fixed_bytes": tuple(np.ceil(shards.fixed_T3[:, place]).astype(int).tolist()),
        "column_bytes": tuple(shards.column_T3[:, place].tolist()),
    }


def _host_fields(
    tier: str, ways: Ways, shards: _ShardBytes, memory: Sequence[Storage]
) -> dict[str, Any]:
    """Return a task's fields on host memory; no limits if tables cannot fill it.

    Args:
        tier: Memory of fused tables on devices.
        ways: Ways to shard tables.
        shards: Memory of the ways' shards.
        memory: Memory left on each rank.
    """
    if tier == "ddr":
        return {}
    names = [table_name(option) for option in ways.tables]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    table_R = np.array([numbers[name] for name in names])[ways.table_R]
    most_T = np.zeros(len(numbers))
    np.maximum.at(most_T, table_R, shards.largest("ddr", ways.embedding_R()[:, 1]))
    if most_T.sum() <= min(m.ddr for m in memory):
        return {
            "host_memory_bytes": (),
            "host_fixed_bytes": (),
            "host_column_bytes": (),
        }
    fields = _memory_fields("ddr", shards, memory)
    return {f"host_{name}": value for name, value in fields.items()}


def _placement_fields(
    ways: Ways, rules: PlacementRules, reader: TableReader
) -> dict[str, Any]:
    """Return a task's fields on allowed ranks and on tables together or apart."""
    nodes_K = [node_ranks(o, reader) for o in ways.kinds]
    nodes = [nodes_K[k] for k in ways.kind_R.tolist()]
    if not rules:
        return {"allowed_ranks": tuple(tuple(node or ()) for node in nodes)}
    names_T = [rules.index.get(table_name(o), -1) for o in ways.tables]
    tables = [names_T[t] for t in ways.table_R.tolist()]
    ranks_T = tuple(
        rules.allowed.get(table)
        if node is None
        else tuple(r for r in rules.ranks(table) if r in node)
        for table, node in zip(tables, nodes, strict=True)
    )
    for table, ranks in zip(tables, ranks_T, strict=True):
        if ranks == ():
            raise no_fit(
                f"table '{rules.names[table]}': tables that the search does not place "
                "already use the last rank that placement_constraints allow"
            )
    rows: dict[int, list[int]] = {}
    for index, table in enumerate(tables):
        rows.setdefault(table, []).append(index)
    together = tuple(
        joint
        for members in rules.together
        for joint in zip(*(rows[t] for t in members if t in rows), strict=True)
    )
    apart = tuple(
        tuple(i for t in members if t in rows for i in rows[t])
        for members in rules.apart
    )
    return {
        "allowed_ranks": tuple(ranks or () for ranks in ranks_T),
        "together": together,
        "apart": apart,
    }
