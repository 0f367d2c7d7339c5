"""The search space: TorchRec's options as a task, and placements as options."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torchrec.distributed.planner.types import (
    Enumerator,
    ParameterConstraints,
    PlannerError,
    PlannerErrorType,
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
from torchrec_neuroshard.planner.kernels import (
    is_estimated,
    miss_curve,
)
from torchrec_neuroshard.planner.option_facts import (
    OFFLOADED_KERNELS,
    device_tier,
    has_open_cache,
    has_own_optimizer,
    is_fused,
    table_name,
)
from torchrec_neuroshard.planner.placed import task_of
from torchrec_neuroshard.planner.reader import (
    TableReader,
)
from torchrec_neuroshard.planner.spread_options import (
    SharedShard,
    sample_shards,
    unpriced_shards,
    without_estimates,
)
from torchrec_neuroshard.planner.ways import (
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

    def largest(self, tier: str, widths: Sequence[int]) -> Floats:
        """Return the bytes of shards of these widths in one kind of memory, `T`."""
        place, width_T = _TIERS.index(tier), np.array(widths)
        found: Floats = self.fixed_T3[:, place] + self.column_T3[:, place] * width_T
        return found


@dataclass(frozen=True, slots=True)
class SearchSpace:
    """A task for a search, and the option of each of its indices."""

    options: tuple[ShardingOption, ...]
    """The option of each index in the task."""
    task: ShardingTask
    _bytes: _ShardBytes
    _may_be_table_wise: tuple[bool, ...]

    @classmethod
    def of(
        cls,
        tables: Sequence[Sequence[ShardingOption]],
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
            tables: The ways of each table, all placeable.
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
        tables = [_permitted(ways, rules, reader) for ways in useful_ways(tables)]
        listed = [option for ways in tables for option in ways]
        tier = device_tier(reader.topology)
        known = _shard_bytes(listed, reader, enumerator, tier)
        if rules.together:
            width = [int(o.tensor.shape[1]) for o in listed]
            size = np.ceil(known.largest(tier, width)).tolist()
            sizes = {id(o): size for o, size in zip(listed, size, strict=True)}
            tables = _joint_ways(
                tables, sizes, rules, [getattr(m, tier) for m in memory]
            )
        number = {id(option): n for n, option in enumerate(listed)}
        options = [option for ways in tables for option in ways]
        shard_bytes = known.of([number[id(option)] for option in options])
        places = places or range(len(tables))
        counts = [len(ways) for ways in tables]
        task = task_of(options, reader, np.repeat(places, counts).tolist())
        most = [1 if o.sharding_type == TABLE_WISE else len(memory) for o in options]
        return cls(
            options=tuple(options),
            task=dataclasses.replace(
                task,
                **_memory_fields(tier, shard_bytes, memory),
                **_host_fields(tier, tables, shard_bytes, memory),
                min_widths=tuple(
                    narrowest_shard(o, reader, least_columns) for o in options
                ),
                max_shards=tuple(most),
                sharding_types=tuple(map(searched_type, options)),
                uneven=not reader.on_gpu,
                **_placement_fields(options, rules, reader),
            ),
            _bytes=shard_bytes,
            _may_be_table_wise=tuple(
                _may_be_table_wise(reader.constraint(o)) for o in options
            ),
        )

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

    def placed(self, placement: Placement) -> list[ShardingOption]:
        """Return the chosen options, with shards and ranks, in the order of tables.

        If a module has a split table, all its column-wise options stay column-wise, so
        that a rank runs one kernel for them. Otherwise they become table-wise, if the
        constraints allow it.
        """
        held: dict[int, list[ColumnShard]] = {}
        for shard in placement.shards:
            held.setdefault(shard.table, []).append(shard)
        column_wise = {
            self.options[way].path
            for way, shards in held.items()
            if self.options[way].sharding_type == COLUMN_WISE
            and (len(shards) > 1 or not self._may_be_table_wise[way])
        }
        chosen = []
        for ways in self.task.ways:
            way = next(w for w in ways if w in held)
            option = copy.copy(self.options[way])
            if searched_type(option) not in COLUMN_SHARDED_TYPES:
                storage = self._bytes.at(way, 0)
                option.shards = _with_ranks(option, held[way], storage)
            else:
                if (
                    option.sharding_type == COLUMN_WISE
                    and option.path not in column_wise
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
            chosen.append(option)
        return chosen


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
    ways: Sequence[ShardingOption], rules: PlacementRules, reader: TableReader
) -> list[ShardingOption]:
    """Return the ways for which the rules leave enough ranks."""
    kept = [o for o in ways if permits(rules, o, reader)] if rules else list(ways)
    if not kept:
        raise PlannerError(
            error_type=PlannerErrorType.PARTITION,
            message=too_few_ranks(ways, "is proposed"),
        )
    if rules and len(rules.colocated_with(rules.index[table_name(ways[0])])) > 1:
        # Tables that go together move as one, so they need column shards.
        alone = [o for o in kept if searched_type(o) in COLUMN_SHARDED_TYPES]
        kept = alone or kept[:1]
    return kept


def _joint_ways(
    tables: Sequence[Sequence[ShardingOption]],
    size: Mapping[int, float],
    rules: PlacementRules,
    memory: Sequence[int],
) -> list[list[ShardingOption]]:
    """Return the ways of each table; tables that go together get joint ways.

    The n-th ways of tables that go together belong to each other. The first joint way
    has the fastest way of each table. Then one table at a time takes a way with less
    memory, cheapest in time per byte first. The search gets the first of these steps,
    the last, and the first that fits each of `_JOINT_SHARES`.

    Args:
        tables: The ways of each table.
        size: `id` of a way -> bytes of its largest shard.
        rules: Which tables go together.
        memory: Bytes left on each rank.
    """
    found = [list(ways) for ways in tables]
    place = {rules.index[table_name(ways[0])]: n for n, ways in enumerate(tables)}
    for members in rules.together:
        own = [place[table] for table in members if table in place]
        now = [
            min(found[n], key=lambda o: (is_estimated(o), o.total_perf)) for n in own
        ]
        steps = [
            (loss, n, option)
            for n, first in enumerate(now)
            for loss, option in _smaller_ways(first, found[own[n]], size)
        ]
        left = sum(size[id(option)] for option in now)
        room = max(memory[r] for r in rules.ranks(members[0]))
        fitting = [room * share for share in _JOINT_SHARES if room * share < left]
        joint = [list(now)]
        for count, (_, n, option) in enumerate(sorted(steps, key=lambda s: s[:2]), 1):
            left += size[id(option)] - size[id(now[n])]
            now[n] = option
            if count == len(steps) or (fitting and left <= fitting[0]):
                joint.append(list(now))
            fitting = [part for part in fitting if part < left]
        for n, ways in zip(own, zip(*joint, strict=True), strict=True):
            found[n] = list(ways)
    return found


def _smaller_ways(
    option: ShardingOption, ways: Sequence[ShardingOption], size: Mapping[int, float]
) -> Iterator[tuple[float, ShardingOption]]:
    """Yield ways of decreasing memory, each with the time lost per byte."""
    cost = {id(way): way.total_perf for way in ways}

    def loss(way: ShardingOption) -> float:
        freed = size[id(option)] - size[id(way)]
        return float((cost[id(way)] - cost[id(option)]) / freed)

    while smaller := [way for way in ways if size[id(way)] < size[id(option)]]:
        way = min(smaller, key=loss)
        yield loss(way), way
        option = way


def _shard_bytes(
    options: Sequence[ShardingOption],
    reader: TableReader,
    enumerator: Enumerator | None,
    tier: str,
) -> _ShardBytes:
    """Return the memory of each option's shards as a function of their width."""
    fixed_T3 = np.zeros((len(options), len(_TIERS)))
    column_T3 = np.zeros_like(fixed_T3)
    counts_all = isinstance(enumerator, NeuroShardEnumerator)
    memory = enumerator.memory if isinstance(enumerator, NeuroShardEnumerator) else None
    known, probed, fixed = [], [], []
    for index, option in enumerate(options):
        if searched_type(option) not in COLUMN_SHARDED_TYPES:
            fixed_T3[index] = _largest_bytes(sample_shards(option))
            if memory is not None and memory.knows(option):
                fixed.append(index)
        elif memory is not None and memory.knows(option):
            known.append(index)
        elif enumerator is not None:
            probed.append(index)
        else:
            fixed_T3[index], column_T3[index] = _bounded_bytes(option)
    if fixed:
        assert memory is not None, "it knows them"
        sizes = [max(s.size for s in sample_shards(options[n])) for n in fixed]
        found = memory.shard_bytes(
            [options[n] for n in fixed], range(len(fixed)), *np.array(sizes).T
        )
        fixed_T3[fixed, :2] = np.ceil(found)
    some = np.array([*known, *probed], dtype=np.int64)
    rows_N, whole_N = np.array([options[n].tensor.shape for n in some]).reshape(-1, 2).T
    # A table of four columns cannot be split.
    widths_N2 = np.stack(
        [
            np.full_like(whole_N, COLUMN_MULTIPLE),
            np.maximum(whole_N, 2 * COLUMN_MULTIPLE),
        ],
        axis=1,
    )
    bytes_N23 = np.zeros((len(some), 2, len(_TIERS)))
    if known:
        assert memory is not None, "it knows them"
        first, count = [options[n] for n in known], len(known)
        found = memory.shard_bytes(
            first,
            np.repeat(np.arange(count), 2),
            np.repeat(rows_N[:count], 2),
            widths_N2[:count].ravel(),
        )
        bytes_N23[:count, :, :2] = np.ceil(found).reshape(count, 2, 2)
    if probed:
        assert enumerator is not None, "it is asked"
        probes = [copy.copy(options[n]) for n in probed]
        for probe, rows, widths in zip(
            probes,
            rows_N[len(known) :].tolist(),
            widths_N2[len(known) :].tolist(),
            strict=True,
        ):
            probe.sharding_type = COLUMN_WISE
            probe.shards = [Shard(size=[rows, w], offset=[0, 0]) for w in widths]
        enumerator.populate_estimates(probes)
        bytes_N23[len(known) :] = [
            [_bytes_3(s) for s in probe.shards] for probe in probes
        ]
    slope_N3 = (bytes_N23[:, 1] - bytes_N23[:, 0]) / np.diff(widths_N2)
    column_T3[some] = slope_N3
    fixed_T3[some] = np.maximum(0.0, bytes_N23[:, 0] - slope_N3 * widths_N2[:, :1])
    for index in probed:
        option = options[index]
        counted = has_own_optimizer(option) or counts_all
        if not is_fused(option) or (memory is not None and memory.is_lenient):
            counted = False  # already counted per shard, or the rows are on disk
        if counted and reader.optimizer(option) == "rowwise_adagrad":
            # TorchRec divides one value per row among column shards, but each shard
            # keeps its own.
            where = "ddr" if option.compute_kernel in OFFLOADED_KERNELS else tier
            rows, width = (int(n) for n in option.tensor.shape)
            fixed_T3[index, _TIERS.index(where)] += 4.0 * rows
            column_T3[index, _TIERS.index(where)] -= 4.0 * rows / width
    return _ShardBytes(fixed_T3, column_T3)


def _bytes_3(shard: Shard) -> list[float]:
    return [float(getattr(shard.storage, tier)) for tier in _TIERS]


def _largest_bytes(shards: Sequence[Shard]) -> Floats:
    """Return the memory of the largest shard, for each kind of memory."""
    largest_3: Floats = np.max([_bytes_3(shard) for shard in shards], axis=0)
    return largest_3


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
    tier: str,
    tables: Sequence[Sequence[ShardingOption]],
    shards: _ShardBytes,
    memory: Sequence[Storage],
) -> dict[str, Any]:
    """Return a task's fields on host memory; {} if tables cannot fill it."""
    if tier == "ddr":
        return {}
    width_T = [int(ways[0].tensor.shape[1]) for ways in tables for _ in ways]
    starts = np.cumsum([0, *map(len, tables[:-1])])
    most_T = np.maximum.reduceat(shards.largest("ddr", width_T), starts)
    if most_T.sum() <= min(m.ddr for m in memory):
        return {}
    fields = _memory_fields("ddr", shards, memory)
    return {f"host_{name}": value for name, value in fields.items()}


def _placement_fields(
    options: Sequence[ShardingOption], rules: PlacementRules, reader: TableReader
) -> dict[str, Any]:
    """Return a task's fields on allowed ranks and on tables together or apart."""
    nodes = [node_ranks(o, reader) for o in options]
    if not rules:
        return {"allowed_ranks": tuple(tuple(node or ()) for node in nodes)}
    tables = [rules.index[table_name(o)] for o in options]
    ranks_T = tuple(
        rules.allowed.get(table)
        if node is None
        else tuple(r for r in rules.ranks(table) if r in node)
        for table, node in zip(tables, nodes, strict=True)
    )
    for table, ranks in zip(tables, ranks_T, strict=True):
        if ranks == ():
            raise PlannerError(
                error_type=PlannerErrorType.PARTITION,
                message=f"table '{rules.names[table]}': tables that the search does "
                "not place already use the last rank that placement_constraints allow",
            )
    ways: dict[int, list[int]] = {}
    for index, table in enumerate(tables):
        ways.setdefault(table, []).append(index)
    together = tuple(
        joint
        for members in rules.together
        for joint in zip(*(ways[t] for t in members if t in ways), strict=True)
    )
    apart = tuple(
        tuple(i for t in members if t in ways for i in ways[t])
        for members in rules.apart
    )
    return {
        "allowed_ranks": tuple(ranks or () for ranks in ranks_T),
        "together": together,
        "apart": apart,
    }
