"""What a rank of a plan allocates: its tables at rest, and the peak of a step.

A step of the embedding part has six instants at which memory may be at its peak:

- FORWARD: a kernel's output has been copied for the all-to-all, or lies beside what the
  reduce-scatter returns;
- ARRIVAL: outputs that came from the ranks are put side by side;
- OUTPUTS: gradients of the outputs are put in the order of the ranks;
- EXCHANGE: they have been reordered for the way back, and what arrives has its room;
- KERNEL: a kernel sorts its lookups to update the rows;
- REPLICAS: so does one of replicated tables, whose gradient is as large as they are.

What shards *hold* at an instant adds up over all of a rank's shards; what *passes*,
such as the room for sorting, is one kernel's at a time; what is *common* every rank
has, whatever its shards: the outputs of its own samples. A rank's peak is the largest
of the instants' sums. What torch's allocator counted stands beside it in
`benchmarks/results/memory_202611.md`.

Units: n lookups that a kernel gets, f its bags, o elements of its output, s elements of
the outputs of a rank's own samples.
"""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt
from torchrec.distributed.planner.types import (
    ParameterConstraints,
    Shard,
    ShardingOption,
    Storage,
    Topology,
)
from torchrec.distributed.types import ShardingType

from torchrec_neuroshard.cost_models.row_cache import ASSOCIATIVITY
from torchrec_neuroshard.placement import format_bytes
from torchrec_neuroshard.planner.compat import torchrec_pipeline
from torchrec_neuroshard.planner.costs.kernels import load_factor
from torchrec_neuroshard.planner.costs.plan_conversion import fusion_key
from torchrec_neuroshard.planner.options.spread_options import sample_shards
from torchrec_neuroshard.planner.options.table_reader import (
    OFFLOADED_KERNELS,
    TableReader,
    device_tier,
    has_cache,
    is_dense,
    is_fused,
    is_lfu,
    is_pooled,
    output_bytes,
)
from torchrec_neuroshard.planner.options.topologies import node_size
from torchrec_neuroshard.schedules import PREFETCHING

__all__ = ["INSTANTS", "MemoryModel", "RankMemory", "StaticMemory"]

Floats = npt.NDArray[np.float64]

INSTANTS = ("forward", "arrival", "outputs", "exchange", "kernel", "replicas")
"""When memory may be at its peak, in the order of a step."""

_BY_NODE = (ShardingType.TABLE_ROW_WISE.value, ShardingType.GRID_SHARD.value)
_BY_ROWS = (*_BY_NODE, ShardingType.ROW_WISE.value)
_BY_COLUMNS = (
    ShardingType.TABLE_WISE.value,
    ShardingType.COLUMN_WISE.value,
    ShardingType.TABLE_COLUMN_WISE.value,
)

_INDEX, _LENGTH, _OFFSET, _WEIGHT, _LOCATION = 8, 4, 8, 4, 4
"""Bytes of an index, a bag's length, its offset; of a lookup's weight and of its place
in the cache."""

_SORTING, _SORTING_SEQUENCE = 40, 48
"""Bytes for each lookup while a kernel prepares its update: linear indices, sorted
ones, what goes with them, and the runs of equal ones."""
_SORT_TEMPORARY = 12.2
"""Bytes for each lookup that the radix sort itself takes (measured: 12.18)."""
_ALLOCATOR = 2 << 20
"""What torch's allocator adds by rounding, in all."""
_NUM_CAME = 3.0
"""Batches that a TorchRec pipeline holds on the device as they came."""
_NUM_SENT: Mapping[str, tuple[int, ...]] = {
    "train_sparse_dist": (2, 2, 1, 1, 1, 1),
    "train_prefetch_sparse_dist": (1, 1, 0, 0, 0, 0),
}
"""Those, at each instant, that it holds with features as they are sent to shards."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StaticMemory:
    """What tables take of a device at rest [bytes]."""

    weights: float = 0.0
    optimizer: float = 0.0
    cache: float = 0.0
    """Cached rows of tables that live in the host's memory."""
    index_tables: float = 0.0
    """What is known of the cache's slots and of every row that may be cached."""

    @property
    def total(self) -> float:
        """All of it."""
        return self.weights + self.optimizer + self.cache + self.index_tables

    def __add__(self, other: StaticMemory) -> StaticMemory:
        """Return both together."""
        return StaticMemory(
            weights=self.weights + other.weights,
            optimizer=self.optimizer + other.optimizer,
            cache=self.cache + other.cache,
            index_tables=self.index_tables + other.index_tables,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMemory:
    """What one rank allocates on its device [bytes]."""

    static: StaticMemory
    activations: float
    """At the peak of a step, beside what is there at rest."""
    instant: str
    """When that is; one of `INSTANTS`, "" where there are none."""
    num_kernels: int

    @property
    def peak(self) -> float:
        """Tables and activations."""
        return self.static.total + self.activations

    def overflow(self, rank: int, room: float, whole: float) -> str:
        """Say by how much a rank is too full, and what takes its memory.

        Args:
            rank: Its number.
            room: What it has for tables and activations [bytes].
            whole: What its device has.
        """
        parts = {
            "weights": self.static.weights,
            "the optimizer's state": self.static.optimizer,
            "cached rows": self.static.cache + self.static.index_tables,
            "inputs, outputs and gradients of a step": self.activations,
        }
        taken = ", ".join(f"{format_bytes(n)} {what}" for what, n in parts.items() if n)
        of = f", what is not reserved of {format_bytes(whole)}" if room < whole else ""
        return (
            f"rank {rank} needs {format_bytes(self.peak)} at the peak of a step "
            f"({taken}) and has {format_bytes(max(0, room))}{of}: "
            f"{format_bytes(self.peak - max(0, room))} too little"
        )


class MemoryModel:
    """Foretells what shards and ranks allocate on CUDA devices.

    Attributes:
        is_lenient: Whether TorchRec's estimator counts all memory, for now.

    Args:
        topology: The devices to plan for.
        reader: Describes the tables.
        constraints: Table name -> TorchRec's constraints on it.
        pipeline_type: A member of TorchRec's `PipelineType`, or None: of a plain loop.
            Pipelines hold the batches that they prepare.
    """

    def __init__(
        self,
        topology: Topology,
        reader: TableReader,
        constraints: Mapping[str, ParameterConstraints] | None = None,
        *,
        pipeline_type: Any = None,
    ) -> None:
        self._world_size = int(topology.world_size)
        self._node = node_size(topology)
        self._devices, self._tier = topology.devices, device_tier(topology)
        self._reader = reader
        self._constraints = constraints or {}
        name = torchrec_pipeline(pipeline_type).value
        self._is_pipelined = name in _NUM_SENT
        self._num_sent = np.array(_NUM_SENT.get(name, (0,) * len(INSTANTS)))
        self._prefetches = name == PREFETCHING
        self.is_lenient = False

    @contextlib.contextmanager
    def lenient(self) -> Iterator[None]:
        """Leave the count to TorchRec's estimator for a while."""
        self.is_lenient = True
        try:
            yield
        finally:
            self.is_lenient = False

    def knows(self, option: ShardingOption) -> bool:
        """Whether it can foretell the memory of an option's shards."""
        counted = self._tier == "hbm" and not self.is_lenient
        known = is_fused(option) or is_dense(option)
        return counted and known and self._reader.has_cost(option)

    def shard_bytes(
        self, options: Sequence[ShardingOption]
    ) -> list[dict[tuple[int, ...], tuple[float, float]]]:
        """Bound the memory of shards, one by one, so that sums bound that of ranks.

        Args:
            options: That it `knows`; kernels are taken to be as wide as the widest
                table that may share their cache.

        Returns:
            Of each option, size of a shard -> bytes of the device and of the host.
        """
        widest: dict[tuple[Any, ...], int] = defaultdict(int)
        for option in options:
            if has_cache(option):
                key = option.path, self._element_size(option)
                width = max(int(s.size[1]) for s in sample_shards(option))
                widest[key] = max(widest[key], width)
        found = []
        for option in options:
            width = widest.get((option.path, self._element_size(option)), 0)
            # Shards of one size are many, and take the same.
            by_size = {tuple(s.size): s for s in sample_shards(option)}
            found.append(
                {
                    size: (self._bound(option, s, width), self._host_bytes(option, s))
                    for size, s in by_size.items()
                }
            )
        return found

    def estimate(self, options: Sequence[ShardingOption]) -> None:
        """Set the storage of shards by `shard_bytes`, in place."""
        for option, sizes in zip(options, self.shard_bytes(options), strict=True):
            for shard in sample_shards(option):
                device, host = sizes[tuple(shard.size)]
                shard.storage = Storage(hbm=math.ceil(device), ddr=math.ceil(host))

    def common_bytes(
        self, options: Sequence[ShardingOption], *, placed: bool = False
    ) -> float:
        """Return what every rank takes, whatever its shards.

        Args:
            options: One of each table; those that it does not know count nothing.
            placed: Whether they are a plan: what the sharding types of its modules take
                beside each other counts, too.
        """
        known = [o for o in options if self.knows(o)]
        if not known:
            return 0.0
        total = sum((self._common(o) for o in known), np.zeros(len(INSTANTS)))
        if placed:
            total += self._of_modules(known)
        return float(total.max()) + _ALLOCATOR

    def ranks(self, options: Sequence[ShardingOption]) -> tuple[RankMemory, ...]:
        """Foretell what each rank of a plan allocates.

        Args:
            options: Placed, one of each table; those that it does not know count with
                the memory that their shards carry.
        """
        known = [o for o in options if self.knows(o)]
        common = sum((self._common(o) for o in known), np.zeros(len(INSTANTS)))
        common += self._of_modules(known)
        first = {o.path: is_dense(o) for o in reversed(known)}
        kernels: list[dict[tuple[Any, ...], list[tuple[ShardingOption, Shard]]]] = [
            defaultdict(list) for _ in range(self._world_size)
        ]
        others = [0.0] * self._world_size
        for option in options:
            if not self.knows(option):
                for shard in filter(attrgetter("storage"), option.shards):
                    others[shard.rank] += getattr(shard.storage, self._tier)
                continue
            key = fusion_key(option, self._reader, option.sharding_type)
            for shard in option.shards:
                if shard.size[0] or option.sharding_type in _BY_ROWS:
                    kernels[shard.rank][key].append((option, shard))
        seen: dict[tuple[Any, ...], tuple[StaticMemory, Floats, Floats]] = {}
        return tuple(
            self._rank(
                kernels[r], common if known else common * 0, others[r], first, seen
            )
            for r in range(self._world_size)
        )

    def overflow(self, options: Sequence[ShardingOption], room: Topology) -> str | None:
        """Warn of the rank that a plan overfills most; None where all have room.

        Args:
            options: Placed and estimated, one of each table.
            room: The devices, with the memory that is left for shards.
        """
        over = []
        for found, left, whole in zip(
            self.ranks(options), room.devices, self._devices, strict=True
        ):
            has, of = (getattr(d.storage, self._tier) for d in (left, whole))
            if found.peak > has:
                over.append((found.peak - has, found, left.rank, has, of))
        if not over:
            return None
        _, found, rank, has, of = max(over, key=lambda entry: entry[0])
        more = f"; {len(over)} ranks lack memory in all" * (len(over) > 1)
        return f"out of memory ahead: {found.overflow(rank, has, of)}{more}"

    def cache_slots(
        self, cached: Sequence[ShardingOption], plan: Sequence[ShardingOption]
    ) -> tuple[Floats, Floats]:
        """Return the slots of each shard's cache, and what one more slot takes [bytes].

        Args:
            cached: Tables with caches.
            plan: All placed options: kernels' slots are as wide as their widest table.

        Returns:
            Both of all shards of `cached`, one table after the other.
        """
        widest: dict[tuple[Any, ...], int] = defaultdict(int)
        shards: list[tuple[tuple[Any, ...], ShardingOption, Shard]] = []
        for option in plan:
            if has_cache(option) and self.knows(option):
                key = fusion_key(option, self._reader, option.sharding_type)
                for shard in option.shards:
                    place = (shard.rank, key)
                    widest[place] = max(widest[place], int(shard.size[1]))
        for option in cached:
            key = fusion_key(option, self._reader, option.sharding_type)
            shards += [((s.rank, key), option, s) for s in option.shards]
        slots = [_slots(int(s.size[0]), o) for _, o, s in shards]
        slot_bytes = [
            widest[place] * self._element_size(o) + (8.0 if is_lfu(o) else 16.0)
            for place, o, _ in shards
        ]
        return np.array(slots, dtype=np.float64), np.array(slot_bytes)

    def attribute(self, options: Sequence[ShardingOption]) -> None:
        """Make the storage of each rank's shards add up to what it allocates, in place.

        Args:
            options: Placed and estimated, one of each table.
        """
        known = [o for o in options if self.knows(o)]
        shards: dict[int, list[Shard]] = defaultdict(list)
        for option in known:
            for shard in option.shards:
                shards[shard.rank].append(shard)
        if not known:
            return
        for rank, memory in enumerate(self.ranks(known)):
            bounds = [s.storage.hbm for s in shards[rank]]
            scale = memory.peak / sum(bounds) if sum(bounds) else 0.0
            for shard, bound in zip(shards[rank], bounds, strict=True):
                shard.storage = Storage(
                    hbm=math.ceil(bound * scale), ddr=shard.storage.ddr
                )

    def _rank(
        self,
        kernels: Mapping[Any, Sequence[tuple[ShardingOption, Shard]]],
        common: Floats,
        other: float,
        replicated_first: Mapping[str, bool],
        seen: dict[tuple[Any, ...], tuple[StaticMemory, Floats, Floats]],
    ) -> RankMemory:
        static = StaticMemory(weights=other)
        held = common + (_ALLOCATOR if common.any() else 0)
        passing = np.zeros(len(INSTANTS))
        for shards in kernels.values():
            cached = [(o, s) for o, s in shards if has_cache(o)]
            width = max((int(s.size[1]) for _, s in cached), default=0)
            kernel_passing = np.zeros(len(INSTANTS))
            for option, shard in shards:
                # Shards of one size are many, and take the same.
                key = id(option), tuple(shard.size), width
                if key not in seen:
                    holds, passes = self._activations(option, shard, bool(cached))
                    if replicated_first[option.path] and not is_dense(option):
                        holds[-1] = holds[0]  # autograd begins with the last
                    both = np.array([holds, passes])
                    seen[key] = self._static(option, shard, width), *both
                at_rest, holding, pass_by = seen[key]
                static += at_rest
                held = held + holding
                kernel_passing = kernel_passing + pass_by
            passing = np.maximum(passing, kernel_passing)
        total = held + passing
        instant = int(total.argmax())
        return RankMemory(
            static=static,
            activations=float(total[instant]),
            instant=INSTANTS[instant] if total[instant] else "",
            num_kernels=len(kernels),
        )

    def _bound(self, option: ShardingOption, shard: Shard, cache_width: int) -> float:
        cached = has_cache(option)
        static = self._static(option, shard, max(cache_width, int(shard.size[1])))
        held, passing = self._activations(option, shard, cached)
        return static.total + max(h + p for h, p in zip(held, passing, strict=True))

    def _element_size(self, option: ShardingOption) -> int:
        return int(option.tensor.element_size())

    def _host_bytes(self, option: ShardingOption, shard: Shard) -> float:
        if option.compute_kernel not in OFFLOADED_KERNELS:
            return 0.0
        values = float(shard.size[0]) * int(shard.size[1])
        per_value, _ = self._reader.state_bytes(option)
        return values * (self._element_size(option) + per_value)

    def _static(
        self, option: ShardingOption, shard: Shard, cache_width: int
    ) -> StaticMemory:
        rows, width = int(shard.size[0]), int(shard.size[1])
        per_value, per_row = self._reader.state_bytes(option)
        state, row_state = float(per_value * rows * width), float(per_row * rows)
        weights = float(rows * width * self._element_size(option))
        if is_dense(option):
            # The gradients of all rows, in DistributedDataParallel's buckets.
            return StaticMemory(weights=2 * weights, optimizer=state + row_state)
        if option.compute_kernel not in OFFLOADED_KERNELS:
            return StaticMemory(weights=weights, optimizer=state + row_state)
        if not has_cache(option):
            return StaticMemory(optimizer=row_state)  # even of tables in the host
        slots = _slots(rows, option)
        ages = rows if is_lfu(option) else slots
        return StaticMemory(
            optimizer=row_state,
            cache=float(slots * cache_width * self._element_size(option)),
            index_tables=float(4 * rows + 8 * slots + 8 * ages),
        )

    def _activations(
        self, option: ShardingOption, shard: Shard, is_cached: bool
    ) -> tuple[list[float], list[float]]:
        """What a shard adds to each instant: held by all kernels, passing in one."""
        table, local = self._reader.table(option), float(option.batch_size)
        world = 1 if is_dense(option) else self._world_size
        parts = 1  # ranks that share the table's rows
        if option.sharding_type in _BY_ROWS:
            parts = self._node if option.sharding_type in _BY_NODE else world
        n = table.pooling_factor * local * world / parts
        f = self._reader.bags_per_sample(option) * local * world
        num_rows, width = int(shard.size[0]), int(shard.size[1])
        weight = _WEIGHT if table.weighted else 0
        location = _LOCATION if is_cached else 0
        saved = (_INDEX + weight + location) * n + _OFFSET * f
        if self._is_pipelined and not is_dense(option):
            ahead = location if self._prefetches else 0
            saved += (_INDEX + weight + ahead) * n + _LENGTH * f
        output = f * width if is_pooled(option) else n * width
        gradient = output_bytes(option) * output
        sorting = (_SORTING if is_pooled(option) else _SORTING_SEQUENCE) * n
        if weight or location:
            sorting = (_SORTING + weight + location + _SORT_TEMPORARY) * n
        if is_dense(option):
            rows = num_rows * width * self._element_size(option)
            passing = [_OFFSET * f, 0, 0, 0, 0, sorting - 8 * n + rows]
            return [saved] * len(INSTANTS), passing
        if not is_pooled(option):
            # Lengths as they arrived and as they are sent back, until the step ends.
            before = saved + 2 * _LENGTH * f
            after = saved + (2 * _LENGTH * f + gradient)
            permuted = gradient + 12 * f
            if option.sharding_type in _BY_ROWS:  # where each id came from
                before += _INDEX * n * parts / self._world_size
                after += _INDEX * n * parts / self._world_size
            passing = [gradient + permuted, 0, 0, 0, max(sorting, permuted), 0]
            return [before] * 3 + [after] * 3, passing
        after = saved + gradient
        if option.sharding_type in _BY_NODE and not self._is_reduced_at_once(option):
            reduced = gradient / parts
            forward = gradient + 2 * reduced + _OFFSET * f
            passing = [forward, 0, 0, reduced, max(sorting, reduced), 0]
            return [saved] * 4 + [after] * 2, passing
        copied = gradient if option.sharding_type in _BY_COLUMNS else 0.0
        passing = [gradient + copied + _OFFSET * f, 0, 0, 0, sorting, 0]
        return [saved] * 3 + [after] * 3, passing

    def _common(self, option: ShardingOption) -> Floats:
        """What every rank holds at each instant of the outputs of its own samples."""
        table, local = self._reader.table(option), float(option.batch_size)
        repeats = self._reader.repeats(option)
        lookups = table.pooling_factor * repeats * local
        bags = self._reader.bags_per_sample(option) * local
        outputs = bags if is_pooled(option) else lookups
        size = output_bytes(option) * outputs * int(option.tensor.shape[1])
        batches = np.zeros(len(INSTANTS))
        if self._is_pipelined:
            ids = (_INDEX + (_WEIGHT if table.weighted else 0)) * lookups
            copies, pieces = self._num_pieces(option)
            sent = copies * ids + pieces * _LENGTH * bags
            num_sent = np.ones(1) if is_dense(option) else self._num_sent
            batches = _NUM_CAME * (ids + _LENGTH * bags) + num_sent * sent
        if is_dense(option):
            parts = [1, 1, 1, 1, 1, 1]
        elif not is_pooled(option) or self._is_reduced_at_once(option):
            parts = [1, 1, 2, 1, 0, 0]
        else:  # gradients, cut by rank, lie beside what they are put together from
            parts = [1, 2, 3, 2, 0, 0]
        if repeats > 1:  # where each id is among the distinct ones, and their rows
            batches += 2 * _INDEX * lookups
            batches += size / repeats * np.array([0, 1, 1, 1, 0, 0])
        return size * np.array(parts) + batches

    def _is_reduced_at_once(self, option: ShardingOption) -> bool:
        """Whether a reduce-scatter alone brings the outputs to their samples."""
        kind = option.sharding_type
        within = kind in _BY_NODE and self._world_size <= self._node
        return within or kind == ShardingType.ROW_WISE.value

    def _num_pieces(self, option: ShardingOption) -> tuple[int, int]:
        """Of a table's features on their way to its shards: copies, and pieces.

        Column shards get copies of them; of rows, the ids are parted.
        """
        columns = len({int(s.offset[1]) for s in option.shards})
        if option.sharding_type == ShardingType.ROW_WISE.value:
            return 1, self._world_size
        if option.sharding_type in _BY_NODE:
            return columns, columns * self._node
        return columns, columns

    def _of_modules(self, options: Sequence[ShardingOption]) -> Floats:
        """What putting outputs of a module together takes, whatever the shards."""
        extra = np.zeros(len(INSTANTS))
        modules: dict[str, dict[str, list[ShardingOption]]] = {}
        for option in options:
            kinds = modules.setdefault(option.path, {})
            kinds.setdefault(option.sharding_type, []).append(option)
        for kinds in modules.values():
            if len(kinds) > 1:
                members = [o for several in kinds.values() for o in several]
                replicas = any(map(is_dense, members))
                extra += sum(self._beside_others(o, replicas) for o in members)
        return extra

    def _beside_others(self, option: ShardingOption, beside_replicas: bool) -> Floats:
        """What a table takes more in a module with several sharding types.

        Its gradient is a part of that of all outputs, of which a copy is made. All
        features are put in order together: while replicated tables look theirs up,
        those of the others are there, too.
        """
        size = self._output_bytes(option) if is_pooled(option) else 0.0
        if is_dense(option):
            return size * np.array([0, 0, 0, 0, 0, 1])
        cut = self._is_reduced_at_once(option)
        found = size * np.array([0, 0, 1, cut, 0, 0])
        if beside_replicas:
            found += size * np.array([0, 0, 0, 0, 1, 1])
            table, local = self._reader.table(option), float(option.batch_size)
            ids = (_INDEX + (_WEIGHT if table.weighted else 0)) * table.pooling_factor
            copies, _ = self._num_pieces(option)
            one = (
                copies * local * (ids + _LENGTH * self._reader.bags_per_sample(option))
            )
            there = 2 if self._is_pipelined else 1
            is_sent = option.sharding_type in _BY_COLUMNS
            found += one * (there - self._num_sent * is_sent)
        return found

    def _output_bytes(self, option: ShardingOption) -> float:
        bags = self._reader.bags_per_sample(option) * float(option.batch_size)
        return output_bytes(option) * bags * int(option.tensor.shape[1])


def _slots(rows: int, option: ShardingOption) -> int:
    """Rows of a shard that its cache has room for."""
    return math.ceil(rows * load_factor(option) / ASSOCIATIVITY) * ASSOCIATIVITY
