"""Column splits of sequence tables, which need one width of shards per module.

TorchRec's `ShardedEmbeddingCollection` takes the width of all column shards of a module
from the first one. The search moves the columns of each table alone, so the width is
chosen here, before the search.
"""

from __future__ import annotations

import copy
import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torchrec.distributed.planner.types import Enumerator, Shard, ShardingOption

from torchrec_neuroshard.planner.option_facts import is_pooled
from torchrec_neuroshard.planner.plan_costs import PlanCosts
from torchrec_neuroshard.planner.ways import min_partition
from torchrec_neuroshard.tables.sharding_types import COLUMN_WISE, TABLE_WISE
from torchrec_neuroshard.tables.table import COLUMN_MULTIPLE

SPLIT_SHARE = 0.25
"""A table that takes less than this share of an average rank's time is not split for
balance."""

Options = Mapping[str, Sequence[ShardingOption]]
"""Table -> its options."""


@dataclass(frozen=True, slots=True)
class _Table:
    """What the choice of a width needs to know of a sequence table."""

    name: str
    whole: ShardingOption | None
    """None: the table may not be table-wise, or does not fit a rank."""
    splits: Mapping[int, ShardingOption]
    """Width of the shards -> column-wise option."""


@dataclass(slots=True)
class SequenceSplits:
    """Chooses the width of each module's column shards, and which tables are split."""

    costs: PlanCosts
    room: Sequence[float]
    """Memory of each rank [bytes]."""
    tier: str
    """The field of TorchRec's `Storage` that `room` is about."""
    _chosen: dict[str, tuple[int, frozenset[str]]] = field(default_factory=dict)
    """Module -> width of its column shards, and the tables that are split."""

    def apply(
        self,
        by_table: dict[str, list[ShardingOption]],
        enumerator: Enumerator,
        is_free: Callable[[ShardingOption], bool],
        *,
        narrow: bool = False,
    ) -> None:
        """Give sequence tables column-wise options of their module's width, in place.

        A table that is split loses its table-wise options. Later calls, for options
        with other kernels, keep the choice of the first call.

        Args:
            by_table: Table -> its options, with estimates.
            enumerator: Estimates the new options.
            is_free: Whether an option's table may use any rank; if not, it stays whole.
            narrow: Replace the choice: all tables get the narrowest common width, which
                takes the least memory.
        """
        modules: dict[str, dict[str, list[ShardingOption]]] = {}
        for table, own in by_table.items():
            if given := [o for o in own if self.is_splittable(o)]:
                splits = [s for o in given for s in self._splits(o, is_free(o))]
                modules.setdefault(own[0].path, {})[table] = splits
        enumerator.populate_estimates(
            [s for own in modules.values() for splits in own.values() for s in splits]
        )
        for path, splits_of in modules.items():
            if narrow:
                common = set.intersection(
                    *(set(map(_width, splits)) for splits in splits_of.values())
                )
                self._chosen[path] = min(common, default=0), frozenset(splits_of)
            elif path not in self._chosen:
                self._chosen[path] = self._choice(path, by_table, splits_of)
            width, split = self._chosen[path]
            for table, splits in splits_of.items():
                kept = [
                    option
                    for option in by_table[table]
                    if not self.is_splittable(option)
                    and not (option.sharding_type == TABLE_WISE and table in split)
                ]
                kept += [s for s in splits if _width(s) == width]
                by_table[table] = kept or by_table[table]

    def is_splittable(self, option: ShardingOption) -> bool:
        """Whether an option is of a column-wise sequence table with a cost."""
        return (
            option.sharding_type == COLUMN_WISE
            and not is_pooled(option)
            and option.dependency is None
            and self.costs.reader.has_cost(option)
        )

    def _splits(self, option: ShardingOption, is_free: bool) -> list[ShardingOption]:
        """Return copies of an option that run: one whole, the others in equal shards.

        Tables whose repeated ids are removed stay whole: TorchRec does that on GPUs
        only, where their splits have not been tried.
        """
        reader = self.costs.reader
        rows, width = (int(n) for n in option.tensor.shape)
        least = min_partition(option, reader, self.costs.least_columns)
        is_free = is_free and not reader.looks_up_distinct(option)
        found = []
        for count in range(1, reader.world_size + 1 if is_free else 2):
            part, rest = divmod(width, count)
            if rest or part % COLUMN_MULTIPLE or part < min(least, width):
                continue
            split = copy.copy(option)
            split.shards = [
                Shard(size=[rows, part], offset=[0, n * part]) for n in range(count)
            ]
            if not reader.run_fault(split):
                found.append(split)
        return found

    def _choice(
        self, path: str, by_table: Options, splits_of: Options
    ) -> tuple[int, frozenset[str]]:
        """Return the width of a module's column shards, and the tables to split."""
        found = [
            self._table(name, own, splits_of.get(name, ()))
            for name, own in by_table.items()
            if own[0].path == path
        ]
        # Others are split by rows, or are replicas.
        tables = [t for t in found if t.whole is not None or t.splits]
        must = {t.name for t in tables if t.whole is None}
        whole_ms = {t.name: _total_ms(t.whole) for t in tables if t.whole is not None}
        least_ms = SPLIT_SHARE * sum(whole_ms.values()) / self.costs.reader.world_size
        slow = [name for name, ms in whole_ms.items() if ms > least_ms]
        slow.sort(key=lambda name: -whole_ms[name])
        best_ms, best = float("inf"), (0, frozenset[str]())
        widths = sorted({w for t in tables for w in t.splits}, reverse=True)
        for number, width in enumerate(widths):
            able = {t.name for t in tables if width in t.splits}
            # The first width is that of whole tables.
            more = [name for name in slow if name in able] if number else []
            counts = [0, *(2**n for n in range(len(more).bit_length() + 1))]
            for count in counts if must <= able else ():
                split = must.union(more[:count])
                plan = [t.splits[width] if t.name in split else t.whole for t in tables]
                ms = self._balanced_ms([o for o in plan if o is not None])
                if ms < best_ms * (1 - 1e-6):
                    best_ms, best = ms, (width, frozenset(split))
        return best

    def _table(
        self, name: str, own: Sequence[ShardingOption], splits: Sequence[ShardingOption]
    ) -> _Table:
        """Return what fits a rank of a table, with the quickest of its kernels."""
        reader = self.costs.reader
        whole = [
            o
            for o in own
            if o.sharding_type == TABLE_WISE
            and not is_pooled(o)
            and reader.has_cost(o)
            and not reader.run_fault(o)
        ]
        fitting = [o for o in (*splits, *whole) if self._fits(o)]
        if not fitting:
            return _Table(name, None, {})
        kernel = min(fitting, key=_slowest_ms).compute_kernel
        chosen = [o for o in fitting if o.compute_kernel == kernel]
        return _Table(
            name,
            next((o for o in chosen if o.sharding_type == TABLE_WISE), None),
            {_width(o): o for o in chosen if o.sharding_type == COLUMN_WISE},
        )

    def _fits(self, option: ShardingOption) -> bool:
        """Whether each shard fits a rank of its own."""
        most = max(getattr(s.storage, self.tier) for s in option.shards)
        return sum(bool(room >= most) for room in self.room) >= len(option.shards)

    def _balanced_ms(self, options: Sequence[ShardingOption]) -> float:
        """Return the time of the options if the slowest shards are placed first.

        Other modules do not matter: they run in stages of their own.
        """
        placed = []
        loads_ms = [(0.0, rank) for rank in range(self.costs.reader.world_size)]
        for option in sorted(options, key=_slowest_ms, reverse=True):
            freest = [heapq.heappop(loads_ms) for _ in option.shards]
            placed.append(copy.copy(option))
            placed[-1].shards = [
                Shard(size=shard.size, offset=shard.offset, rank=rank)
                for shard, (_, rank) in zip(option.shards, freest, strict=True)
            ]
            for shard, (load_ms, rank) in zip(option.shards, freest, strict=True):
                heapq.heappush(loads_ms, (load_ms + shard.perf.total, rank))
        return self.costs.price(placed).predicted().critical_path_ms


def _width(option: ShardingOption) -> int:
    return int(option.shards[0].size[1])


def _total_ms(option: ShardingOption) -> float:
    return float(sum(s.perf.total for s in option.shards))


def _slowest_ms(option: ShardingOption) -> float:
    return float(max(s.perf.total for s in option.shards))
