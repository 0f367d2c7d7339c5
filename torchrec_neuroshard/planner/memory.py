"""The memory that a rank of a plan allocates: tables at rest and the peak of a step.

Memory may peak at six instants of a step's embedding part:

- FORWARD: a kernel's output and its copy for the all-to-all, or the result of the
  reduce-scatter, both exist;
- ARRIVAL: outputs received from the ranks are concatenated;
- OUTPUTS: gradients of the outputs are sorted by rank;
- EXCHANGE: these gradients and the buffer for received gradients both exist;
- KERNEL: a kernel sorts its lookups to update rows;
- REPLICAS: a kernel of replicated tables does the same; its gradient is as large as the
  tables.

Memory that shards *hold* at an instant adds up over all shards of a rank. Memory that
*passes*, for example to sort lookups, is used by one kernel at a time. *Common* memory
exists on every rank, whatever its shards: the outputs for its own samples. A rank's
peak is the largest sum of the six instants. `benchmarks/results/memory_202611.md`
compares it with what torch's allocator counted. Where profiles have lengths of samples,
batches are as long as the longest of 100.

Symbols: n lookups of a kernel, f its bags.
"""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torchrec.distributed.planner.types import ShardingOption, Storage, Topology

from torchrec_neuroshard.costs.schedules import PREFETCHING
from torchrec_neuroshard.costs.task import format_bytes
from torchrec_neuroshard.models.row_cache import ASSOCIATIVITY
from torchrec_neuroshard.planner.compat import torchrec_pipeline
from torchrec_neuroshard.planner.kernels import load_factor
from torchrec_neuroshard.planner.option_facts import (
    MANAGED_OPTIMIZERS,
    OFFLOADED_KERNELS,
    STATE_BYTES,
    device_tier,
    enforces_hbm,
    has_cache,
    is_dense,
    is_fused,
    is_lfu,
    is_pooled,
    output_bytes,
    reads_host,
)
from torchrec_neuroshard.planner.placed import fusion_key
from torchrec_neuroshard.planner.reader import TableReader
from torchrec_neuroshard.planner.spread_options import sample_shards
from torchrec_neuroshard.planner.ways import Ways, ways_of
from torchrec_neuroshard.report.parts import MEMORY_PARTS
from torchrec_neuroshard.tables.sharding_types import (
    COLUMN_SHARDED_TYPES,
    SHARDING_TYPES,
)
from torchrec_neuroshard.tables.table import is_skewed

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

INSTANTS = ("forward", "arrival", "outputs", "exchange", "kernel", "replicas")
"""Instants of a step at which memory may peak, in order."""

_INDEX, _LENGTH, _OFFSET, _WEIGHT, _LOCATION = 8, 4, 8, 4, 4
"""Bytes of an index, a bag's length and offset, a lookup's weight and its location in
the cache."""

_SORTING, _SORTING_SEQUENCE = 40, 48
"""Bytes per lookup while a kernel prepares its update: linear indices, sorted indices,
their payload, and the runs of equal indices."""
_SORT_TEMPORARY = 12.2
"""Bytes per lookup of the radix sort itself (measured: 12.18)."""
_ALLOCATOR = 2 << 20
"""Bytes that torch's allocator adds by rounding, in total."""
_ALWAYS = (1,) * len(INSTANTS)
_NUM_CAME = 3.0
"""Input batches that a TorchRec pipeline keeps on the device."""
_NUM_SENT: Mapping[str, tuple[int, ...]] = {
    "train_sparse_dist": (2, 2, 1, 1, 1, 1),
    "train_prefetch_sparse_dist": (1, 1, 0, 0, 0, 0),
}
"""Batches that a pipeline keeps in the form sent to shards, at each instant."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StaticMemory:
    """Device memory of tables at rest [bytes]."""

    weights: float = 0.0
    optimizer: float = 0.0
    cache: float = 0.0
    """Cached rows of tables in host memory."""
    index_tables: float = 0.0
    """Bookkeeping of the cache's slots and of every row that may be cached."""
    id_maps: float = 0.0
    """Maps from ids to rows, of modules that choose the rows."""

    @property
    def total(self) -> float:
        """Sum of all fields."""
        cached = self.cache + self.index_tables
        return self.weights + self.optimizer + cached + self.id_maps


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMemory:
    """Memory that one rank allocates on its device [bytes]."""

    static: StaticMemory
    activations: float
    """Memory beyond `static` at the peak of a step."""
    instant: str
    """When the peak is: one of `INSTANTS`; "" without activations."""
    num_kernels: int

    @property
    def peak(self) -> float:
        """Tables at rest plus activations."""
        return self.static.total + self.activations

    @property
    def parts(self) -> dict[str, float]:
        """What the peak consists of, by the names in `MEMORY_PARTS`."""
        static = self.static
        return {
            "weights": static.weights,
            "optimizer": static.optimizer,
            "caches": static.cache + static.index_tables,
            "id_maps": static.id_maps,
            "step": self.activations,
        }

    def overflow(self, rank: int, room: float, whole: float) -> str:
        """Return a text that says by how much a rank is too full, and why.

        Args:
            rank: The rank's number.
            room: Memory for tables and activations [bytes].
            whole: Memory of the device [bytes].
        """
        taken = ", ".join(
            f"{format_bytes(n)} {MEMORY_PARTS[part]}"
            for part, n in self.parts.items()
            if n
        )
        of = f" ({format_bytes(whole)} less what is reserved)" if room < whole else ""
        return (
            f"rank {rank} needs {format_bytes(self.peak)} at the peak of a step "
            f"({taken}) and has {format_bytes(max(0, room))}{of}: "
            f"{format_bytes(self.peak - max(0, room))} too little"
        )


_STATIC = ("weights", "optimizer", "cache", "index_tables", "id_maps")
"""Columns of arrays of memory at rest: fields of `StaticMemory`."""


@dataclass(frozen=True, slots=True)
class _Ways:
    """The figures that determine memory, one per option; `T` options."""

    lookups: Floats
    """Lookups of the table in one rank's kernel."""
    bags: Floats
    weight_bytes: Floats
    """Bytes of a lookup's weight."""
    output_bytes: Floats
    """Bytes of an output value."""
    element_size: Floats
    """Bytes of a table's weight."""
    state_bytes: Floats
    """Bytes of optimizer state per weight."""
    row_state_bytes: Floats
    host_state_bytes: Floats
    """Bytes of optimizer state per weight in host memory."""
    row_map_bytes: Floats
    """Bytes per row of the map from ids to rows."""
    id_map_bytes: Floats
    """Bytes of this map that do not depend on the rows."""
    row_parts: Floats
    """Ranks that share the table's rows."""
    load_factor: Floats
    """Share of the rows in the cache; 0 without a cache."""
    is_pooled: Bools
    is_dense: Bools
    is_offloaded: Bools
    """Whether the weights are in host memory."""
    is_lfu: Bools
    by_rows: Bools
    by_columns: Bools
    in_two_steps: Bools
    """Whether ranks of a node sum their outputs before sending them to other nodes."""

    @classmethod
    def of(cls, ways: Ways, model: MemoryModel) -> _Ways:
        """Return the figures of ways that the model `knows`."""
        used, kind_R = np.unique(ways.kind_R, return_inverse=True)
        rows = [model.way(ways.kinds[k]) for k in used.tolist()]
        columns = np.array(rows, dtype=np.float64).reshape(-1, 19)[kind_R].T
        found = cls(*columns[:12].copy(), *(columns[12:] > 0))
        inputs_R6 = model.inputs(ways, found.is_dense)
        lookups = inputs_R6[:, 0] * inputs_R6[:, 1] * inputs_R6[:, 2]
        lookups /= found.row_parts
        found.lookups[:] = lookups
        found.bags[:] = inputs_R6[:, 3] * inputs_R6[:, 1] * inputs_R6[:, 2]
        found.row_map_bytes[:] = inputs_R6[:, 4]
        found.id_map_bytes[:] = inputs_R6[:, 5] * lookups
        return found


@dataclass(frozen=True, slots=True)
class _Shards:
    """The `N` shards of options, as arrays."""

    ways: _Ways
    option: Ints
    rows: Ints
    width: Ints
    skew: Floats
    """Lookups of each shard as a multiple of the mean of its block."""

    @property
    def slots(self) -> Floats:
        """Number of rows that each shard's cache holds."""
        cached = self.rows * self.ways.load_factor[self.option]
        return np.ceil(cached / ASSOCIATIVITY) * ASSOCIATIVITY

    def host_bytes(self) -> Floats:
        """Return the host memory of each shard [bytes], `N`."""
        w, t = self.ways, self.option
        value = w.element_size[t] * w.is_offloaded[t] + w.host_state_bytes[t]
        return value * self.rows * self.width

    def static(self, cache_width_N: Ints) -> Floats:
        """Return each shard's device memory at rest [bytes], `N x 5`; see `_STATIC`.

        Args:
            cache_width_N: Columns of the cache in each shard's kernel.
        """
        w, t, rows = self.ways, self.option, self.rows
        values, state = rows * self.width, w.state_bytes[t] - w.host_state_bytes[t]
        weights = values * w.element_size[t]
        dense, on_device = w.is_dense[t], ~w.is_offloaded[t]
        row_state = rows * w.row_state_bytes[t]
        has_cache = w.load_factor[t] > 0
        ages = np.where(w.is_lfu[t], rows, self.slots)
        return np.stack(
            [
                # Replicated tables also need a gradient bucket of the same size.
                np.where(on_device, weights * np.where(dense, 2, 1), 0),
                # Tables in host memory also keep their row state on the device.
                values * state + row_state,
                has_cache * self.slots * cache_width_N * w.element_size[t],
                has_cache * (4 * rows + 8 * self.slots + 8 * ages),
                rows * w.row_map_bytes[t] + w.id_map_bytes[t],
            ],
            axis=1,
        )


@dataclass(frozen=True, slots=True)
class _Peak:
    """When plans are expected to need most memory."""

    instant: int
    path: str
    """The module whose kernels then need most memory in passing."""


class MemoryModel:
    """Predicts the memory that shards and ranks allocate on CUDA devices.

    Attributes:
        is_lenient: Whether TorchRec's estimator counts all memory at the moment.
        peak: When plans are expected to need most memory. None: shards count bounds.

    Args:
        reader: Describes the tables and the devices.
        pipeline_type: TorchRec's `PipelineType`. Pipelines keep the batches that they
            prepare. None: no pipeline.
    """

    def __init__(self, reader: TableReader, *, pipeline_type: Any = None) -> None:
        self._reader = reader
        self._tier = device_tier(reader.topology)
        name = torchrec_pipeline(pipeline_type).value
        self._is_pipelined = name in _NUM_SENT
        self._num_sent = _NUM_SENT.get(name, (0,) * len(INSTANTS))
        self._prefetches = name == PREFETCHING
        self.is_lenient = False
        self.peak: _Peak | None = None

    @contextlib.contextmanager
    def at_peak(self, options: Sequence[ShardingOption]) -> Iterator[None]:
        """Count what shards need at the expected peak of plans of these tables.

        Bounds add up to more than any rank allocates: they count each shard when it
        needs most, and as if the kernels of all modules ran at once. The sums of this
        context are estimates, which a plan may exceed.

        Args:
            options: One for each table, which stands for all its ways.
        """
        self.peak = self._expected_peak(options)
        try:
            yield
        finally:
            self.peak = None

    def _expected_peak(self, options: Sequence[ShardingOption]) -> _Peak | None:
        """Return when a rank with an average part of all tables needs most memory."""
        known = [o for o in options if self.knows(o)]
        if not known:
            return None
        world_size = self._reader.world_size
        sizes, share_T = [], np.full(len(known), 1 / world_size)
        for number, option in enumerate(known):
            if option.sharding_type in COLUMN_SHARDED_TYPES:
                sizes.append(tuple(option.tensor.shape))
            else:
                sizes.append(tuple(sample_shards(option)[0].size))
                share_T[number] *= option.num_shards
        shards = _Shards(
            _Ways.of(ways_of(known), self),
            np.arange(len(known)),
            rows=np.array(sizes)[:, 0],
            width=np.array(sizes)[:, 1],
            skew=np.ones(len(known)),
        )
        held_T6, passing_T6 = self._activations(shards, shards.ways.load_factor > 0)
        paths = sorted({o.path for o in known})
        passing_P6 = np.zeros((len(paths), len(INSTANTS)))
        numbers = [paths.index(o.path) for o in known]
        np.add.at(passing_P6, numbers, share_T[:, None] * passing_T6)
        total_6 = self._common(known, as_listed=False) + share_T @ held_T6
        instant = int(np.argmax(total_6 + passing_P6.max(axis=0)))
        return _Peak(instant, paths[int(np.argmax(passing_P6[:, instant]))])

    @contextlib.contextmanager
    def lenient(self) -> Iterator[None]:
        """Let TorchRec's estimator count memory within the context."""
        self.is_lenient = True
        try:
            yield
        finally:
            self.is_lenient = False

    def knows(self, option: ShardingOption) -> bool:
        """Whether the model can predict the memory of an option's shards."""
        counted = self._tier == "hbm" and not self.is_lenient
        known = is_fused(option) or is_dense(option)
        return counted and known and self._reader.has_cost(option)

    def inputs(self, ways: Ways, is_dense_R: Bools) -> Floats:
        """Return what a way's memory needs to know of its table's inputs.

        Returns:
            `R x 6`: ids per sample of the longest of 100 batches, samples per rank,
            ranks whose samples a kernel sees, bags per sample, and bytes of the map
            from ids to rows, per row and per id.
        """
        reader = self._reader
        used, table_R = np.unique(ways.table_R, return_inverse=True)
        rows = []
        for option in (ways.tables[t] for t in used.tolist()):
            table, facts = reader.table(option), reader.facts(option)
            local, size = float(option.batch_size), reader.world_size
            own, every = (
                table.pooling_factor * table.longest_batch(samples)
                for samples in (local, local * size)
            )
            rows.append((every, local, size, facts.bags, *facts.id_map_bytes, own))
        values_R7 = np.array(rows, dtype=np.float64).reshape(-1, 7)[table_R]
        inputs_R6: Floats = values_R7[:, :6]
        inputs_R6[is_dense_R, 2] = 1
        inputs_R6[is_dense_R, 0] = values_R7[is_dense_R, 6]
        return inputs_R6

    def way(self, option: ShardingOption) -> tuple[float, ...]:
        """Return the fields of `_Ways` for an option that the model `knows`.

        Those on inputs are 0; see `inputs`.
        """
        kind, dense = SHARDING_TYPES[option.sharding_type], is_dense(option)
        facts, table = self._reader.facts(option), self._reader.table(option)
        parts = self._row_parts(option)
        offloaded = option.compute_kernel in OFFLOADED_KERNELS
        host_state = facts.state_bytes[0] if offloaded else 0
        if enforces_hbm(option):
            host_state = STATE_BYTES * (facts.optimizer in MANAGED_OPTIMIZERS)
        return (
            0.0,
            0.0,
            _WEIGHT if table.weighted else 0,
            output_bytes(option),
            option.tensor.element_size(),
            *facts.state_bytes,
            host_state,
            0.0,
            0.0,
            parts,
            load_factor(option) if has_cache(option) else 0.0,
            is_pooled(option),
            dense,
            reads_host(option),
            offloaded and is_lfu(option),
            kind.splits_rows,
            kind.in_columns,
            kind.splits_rows and not self._is_reduced_at_once(option),
        )

    def _row_parts(self, option: ShardingOption) -> int:
        """Return the ranks that share the rows of an option's table."""
        kind = SHARDING_TYPES[option.sharding_type]
        if not kind.splits_rows or is_dense(option):
            return 1
        return kind.block_size(self._reader.world_size, self._reader.node_size)

    def _skews(self, option: ShardingOption, first_N: Ints, rows_N: Ints) -> Floats:
        """Return the lookups of row shards as a multiple of the mean of their block.

        1 for all shards if the profile of the option's table knows no hot rows.
        """
        parts = self._row_parts(option)
        table, batch = self._reader.table(option), int(option.batch_size)
        part_rows = -(-table.num_embeddings // parts)
        hot = table.profile and table.profile.hot_rows
        if not hot or not is_skewed(table, part_rows, batch * self._reader.world_size):
            return np.ones(len(rows_N))
        return hot.shares(first_N, rows_N, table.num_embeddings) * parts

    def _most_skews(self, ways: Ways) -> Floats:
        """Return the largest of `_skews` in a block of even rows, `R`."""
        skew_R = np.ones(ways.num_rows)
        known: dict[tuple[int, int], float] = {}
        used, kind_R = np.unique(ways.kind_R, return_inverse=True)
        parts_K = np.array([self._row_parts(ways.kinds[k]) for k in used.tolist()])
        parts_R = parts_K[kind_R]
        for row in np.flatnonzero(parts_R > 1).tolist():
            parts = int(parts_R[row])
            table = self._reader.table(ways.tables[ways.table_R[row]])
            if table.profile is None or table.profile.hot_rows is None:
                continue
            key = id(table), parts
            if key not in known:
                rows = table.num_embeddings
                part_rows = -(-rows // parts)
                first_N = np.minimum(np.arange(parts) * part_rows, rows)
                rows_N = np.minimum(part_rows, rows - first_N)
                skews = self._skews(ways.option(row), first_N, rows_N)
                known[key] = float(skews.max())
            skew_R[row] = known[key]
        return skew_R

    def shard_bytes(
        self,
        ways: Ways,
        row_N: npt.ArrayLike,
        rows_N: npt.ArrayLike,
        width_N: npt.ArrayLike,
    ) -> Floats:
        """Return an upper bound of each shard's memory; the bounds add up for a rank.

        Within `at_peak`, return an estimate instead.

        Args:
            ways: Ways that the model `knows`.
            row_N: The way of each shard. A cache counts with the widest of these shards
                that may share it. A row shard counts the lookups of the one in its
                block that has most.
            rows_N: Rows of each shard.
            width_N: Columns of each shard.

        Returns:
            `N x 2`: bytes on the device and on the host.
        """
        skew_N = self._most_skews(ways)[np.asarray(row_N, dtype=np.int64)]
        return self._shard_bytes(ways, row_N, rows_N, width_N, skew_N, self.peak)

    def _shard_bytes(
        self,
        ways: Ways,
        row_N: npt.ArrayLike,
        rows_N: npt.ArrayLike,
        width_N: npt.ArrayLike,
        skew_N: Floats,
        peak: _Peak | None,
    ) -> Floats:
        option, rows, width = map(np.asarray, (row_N, rows_N, width_N))
        shards = _Shards(_Ways.of(ways, self), option, rows, width, skew_N)
        cached_N = shards.ways.load_factor[shards.option] > 0
        numbers: dict[tuple[str, int], int] = {}
        sharing_K = np.array(
            [
                numbers.setdefault((o.path, o.tensor.element_size()), len(numbers))
                for o in ways.kinds
            ]
        )
        kind_N = ways.kind_R[shards.option]
        width_N = _widest(sharing_K[kind_N], shards.width, cached_N)
        held_N6, passing_N6 = self._activations(shards, cached_N)
        at_rest_N = shards.static(width_N).sum(axis=1)
        if peak is None:
            most_N = (held_N6 + passing_N6).max(axis=1)
        else:
            runs_K = np.array([o.path == peak.path for o in ways.kinds])
            passing_N = passing_N6[:, peak.instant] * runs_K[kind_N]
            most_N = held_N6[:, peak.instant] + passing_N
        device_N = at_rest_N + most_N
        return np.stack([device_N, shards.host_bytes()], axis=1)

    def estimate(self, options: Sequence[ShardingOption]) -> None:
        """Set the storage of shards to their `shard_bytes`, in place."""
        shards = [(n, s) for n, o in enumerate(options) for s in sample_shards(o)]
        if not shards:
            return
        index_N = [n for n, _ in shards]
        size_N2 = np.array([s.size for _, s in shards])
        bytes_N2 = np.ceil(self.shard_bytes(ways_of(options), index_N, *size_N2.T))
        for (_, shard), (device, host) in zip(
            shards, bytes_N2.astype(np.int64).tolist(), strict=True
        ):
            shard.storage = Storage(hbm=device, ddr=host)

    def add_id_maps(self, option: ShardingOption) -> None:
        """Add the maps from ids to rows to the storage of an option's shards."""
        per_row, per_id = self._reader.facts(option).id_map_bytes
        if not per_row + per_id:
            return
        fixed = per_id * option.batch_size * self._reader.table(option).pooling_factor
        for shard in sample_shards(option):
            size = math.ceil(per_row * shard.size[0] + fixed)
            shard.storage += Storage(**{"hbm": 0, "ddr": 0, self._tier: size})

    def common_bytes(
        self,
        options: Sequence[ShardingOption],
        *,
        placed: bool = False,
        mixed: Collection[str] = (),
    ) -> float:
        """Return the memory that every rank needs, whatever its shards [bytes].

        Within `at_peak`, tables of a proposal count as not split.

        Args:
            options: One per table. Options that the model does not know count 0.
            placed: Whether the options are a plan. Then the extra memory of modules
                with several sharding types also counts.
            mixed: Paths of modules that plans of a proposal will probably mix of
                replicated and other tables.
        """
        known, peak = [o for o in options if self.knows(o)], self.peak
        if not known:
            return 0.0
        as_listed = placed or peak is None
        total_6 = self._common(known, as_listed=as_listed)
        if placed:
            total_6 += self._of_modules(known)
        for option in known:
            if option.path in mixed and not is_dense(option):
                total_6 += self._beside_others(option, True, as_listed=as_listed)
        most = total_6.max() if peak is None else total_6[peak.instant]
        return float(most) + _ALLOCATOR

    def ranks(self, options: Sequence[ShardingOption]) -> tuple[RankMemory, ...]:
        """Return the memory that each rank of a plan allocates.

        Args:
            options: Placed options, one per table. Options that the model does not know
                count the storage of their shards.
        """
        known = [o for o in options if self.knows(o)]
        others = [o for o in options if not self.knows(o)]
        static_W5 = np.zeros((self._reader.world_size, len(_STATIC)))
        for shard in (s for o in others for s in o.shards if s.storage):
            static_W5[shard.rank, 0] += getattr(shard.storage, self._tier)
        shards, rank_N, kernel_N = self._placed(known)
        cached_N = shards.ways.load_factor[shards.option] > 0
        width_N = _widest(kernel_N, shards.width, cached_N)
        np.add.at(static_W5, rank_N, shards.static(width_N))
        # In a kernel with a cache, every lookup has a location in the cache.
        held_N6, passing_N6 = self._activations(shards, width_N > 0)
        first = {o.path: is_dense(o) for o in reversed(known)}
        waits_T = np.array([first[o.path] > is_dense(o) for o in known])
        # Autograd runs backwards, so it begins with the replicated tables.
        waits_N = waits_T.astype(np.bool_)[shards.option]
        held_N6[waits_N, -1] = held_N6[waits_N, 0]
        held_W6 = np.zeros((self._reader.world_size, len(INSTANTS)))
        if known:
            held_W6 += self._common(known, as_listed=True) + self._of_modules(known)
            held_W6 += _ALLOCATOR
        np.add.at(held_W6, rank_N, held_N6)
        passing_K6 = np.zeros((int(kernel_N.max(initial=-1)) + 1, len(INSTANTS)))
        np.add.at(passing_K6, kernel_N, passing_N6)
        rank_K = np.zeros(len(passing_K6), dtype=np.int64)
        rank_K[kernel_N] = rank_N
        passing_W6 = np.zeros_like(held_W6)
        np.maximum.at(passing_W6, rank_K, passing_K6)
        total_W6 = held_W6 + passing_W6
        num_kernels_W = np.bincount(rank_K, minlength=self._reader.world_size)
        return tuple(
            RankMemory(
                static=StaticMemory(**dict(zip(_STATIC, static, strict=True))),
                activations=max(total),
                instant=INSTANTS[total.index(max(total))] if any(total) else "",
                num_kernels=num_kernels,
            )
            for static, total, num_kernels in zip(
                static_W5.tolist(),
                total_W6.tolist(),
                num_kernels_W.tolist(),
                strict=True,
            )
        )

    def _placed(self, plan: Sequence[ShardingOption]) -> tuple[_Shards, Ints, Ints]:
        """Return the shards that run, their ranks and their kernel numbers."""
        keys = [fusion_key(o, self._reader, o.sharding_type) for o in plan]
        numbers: dict[tuple[Any, ...], int] = {}
        placed = [
            (
                number,
                *shard.size,
                shard.rank,
                numbers.setdefault((shard.rank, keys[number]), len(numbers)),
                int(shard.offset[0]),
            )
            for number, option in enumerate(plan)
            for shard in option.shards
            if shard.size[0] or SHARDING_TYPES[option.sharding_type].splits_rows
        ]
        arrays = np.array(placed, dtype=np.int64).reshape(-1, 6).T
        option_N, rows_N, width_N, rank_N, kernel_N, first_N = arrays
        skew_N = self._placed_skews(plan, option_N, first_N, rows_N)
        ways = _Ways.of(ways_of(plan), self)
        return _Shards(ways, option_N, rows_N, width_N, skew_N), rank_N, kernel_N

    def _placed_skews(
        self,
        options: Sequence[ShardingOption],
        option_N: Ints,
        first_N: Ints,
        rows_N: Ints,
    ) -> Floats:
        """Return `_skews` of placed shards, by their first rows."""
        skew_N = np.ones(len(option_N))
        for number, option in enumerate(options):
            if SHARDING_TYPES[option.sharding_type].splits_rows:
                own = np.flatnonzero(option_N == number)
                skew_N[own] = self._skews(option, first_N[own], rows_N[own])
        return skew_N

    def overflow(
        self,
        options: Sequence[ShardingOption],
        room: Topology,
        ranks: Sequence[RankMemory] | None = None,
    ) -> str | None:
        """Return a text on the rank that a plan overfills most; None if all ranks fit.

        Args:
            options: Placed and estimated options, one per table.
            room: The devices, with the memory left for shards.
            ranks: What `ranks` returns for the options, if that is known.
        """
        over = []
        for found, left, whole in zip(
            ranks or self.ranks(options),
            room.devices,
            self._reader.topology.devices,
            strict=True,
        ):
            has, of = (getattr(d.storage, self._tier) for d in (left, whole))
            if found.peak > has:
                over.append((found.peak - has, found, left.rank, has, of))
        if not over:
            return None
        _, found, rank, has, of = max(over, key=lambda entry: entry[0])
        more = f"; {len(over)} ranks lack memory" * (len(over) > 1)
        said = found.overflow(rank, has, of)
        return f"the plan will run out of memory: {said}{more}"

    def cache_slots(
        self, cached: Sequence[ShardingOption], plan: Sequence[ShardingOption]
    ) -> tuple[Floats, Floats]:
        """Return the slots of each shard's cache and the bytes of one more slot.

        Args:
            cached: All tables of the plan with caches.
            plan: All placed options. A slot is as wide as its kernel's widest table.

        Returns:
            Two arrays, with one value per shard of `cached`, table by table.
        """
        every = [o for o in plan if has_cache(o) and self.knows(o)]
        shards, _, kernel_N = self._placed(every)
        width_N = _widest(kernel_N, shards.width, kernel_N >= 0)
        ways, option_N = shards.ways, shards.option
        age_N = np.where(ways.is_lfu[option_N], 8.0, 16.0)
        bytes_N = width_N * ways.element_size[option_N] + age_N
        asked = set(map(id, cached))
        asked_N = np.array([id(every[n]) in asked for n in option_N.tolist()])
        return shards.slots[asked_N], bytes_N[asked_N]

    def attribute(self, options: Sequence[ShardingOption]) -> None:
        """Scale the storage of each rank's shards to what it allocates, in place.

        Args:
            options: Placed and estimated options, one per table.
        """
        known = [o for o in options if self.knows(o)]
        shards = [(n, s) for n, o in enumerate(known) for s in o.shards]
        if not shards:
            return
        index_N, rank_N = np.array([(n, s.rank) for n, s in shards]).T
        size_N2 = np.array([s.size for _, s in shards])
        rows_N, width_N = size_N2.T
        first_N = np.array([s.offset[0] for _, s in shards])
        skew_N = self._placed_skews(known, index_N, first_N, rows_N)
        bounds_N = self._shard_bytes(
            ways_of(known), index_N, rows_N, width_N, skew_N, None
        )[:, 0]
        peak_W = np.array([memory.peak for memory in self.ranks(known)])
        sum_W = np.bincount(rank_N, weights=bounds_N, minlength=len(peak_W))
        scale_N = (peak_W / np.where(sum_W > 0, sum_W, np.inf))[rank_N]
        used_N = np.ceil(bounds_N * scale_N).astype(np.int64).tolist()
        for (_, shard), used in zip(shards, used_N, strict=True):
            shard.storage = Storage(hbm=used, ddr=shard.storage.ddr)

    def parts(
        self,
        options: Sequence[ShardingOption],
        ranks: Sequence[RankMemory] | None = None,
    ) -> list[dict[str, float]]:
        """Return what the storage of each rank's shards consists of.

        Args:
            options: Placed options, one per table, after `attribute`.
            ranks: What `ranks` returns for the options, if that is known.

        Returns:
            For each rank the names in `MEMORY_PARTS`, which add up to the storage of
            its shards that have rows. "unsplit" is what TorchRec estimates, and shards
            that are not scaled to what their rank allocates.
        """
        known = {id(o) for o in options if self.knows(o)}
        used_W2 = np.zeros((self._reader.world_size, 2))
        num_shards_W = np.zeros(self._reader.world_size)
        for option, shard in ((o, s) for o in options for s in o.shards):
            if shard.size[0] and shard.storage:
                used = getattr(shard.storage, self._tier)
                used_W2[shard.rank, int(id(option) in known)] += used
                num_shards_W[shard.rank] += 1
        found = []
        if ranks is None or len(known) < len(options):
            ranks = self.ranks([o for o in options if id(o) in known])
        for memory, used_2, num_shards in zip(
            ranks, used_W2.tolist(), num_shards_W.tolist(), strict=True
        ):
            other, own = used_2
            step = own - memory.static.total
            if 0 <= step <= memory.activations + num_shards:  # shards are rounded up
                found.append(memory.parts | {"step": step, "unsplit": other})
            else:
                found.append({"unsplit": other + own})
        return found

    def _activations(
        self, shards: _Shards, is_cached_N: Bools
    ) -> tuple[Floats, Floats]:
        """Return each shard's memory at each instant: held, and passing.

        Returns:
            Two arrays `N x 6` [bytes]; see the module for held and passing.
        """
        w, t = shards.ways, shards.option
        n, f, pooled, dense = w.lookups[t], w.bags[t], w.is_pooled[t], w.is_dense[t]
        own = n * w.row_parts[t] / self._reader.world_size
        n = n * shards.skew
        weight, parts = w.weight_bytes[t], w.row_parts[t]
        location = np.where(is_cached_N, _LOCATION, 0)
        saved = (_INDEX + weight + location) * n + _OFFSET * f
        if self._is_pipelined:
            ahead = location if self._prefetches else 0
            saved += np.where(dense, 0, (_INDEX + weight + ahead) * n + _LENGTH * f)
        gradient = w.output_bytes[t] * np.where(pooled, f, n) * shards.width
        sorting = np.where(pooled, _SORTING, _SORTING_SEQUENCE) * n
        sorting = np.where(
            weight + location > 0,
            (_SORTING + weight + location + _SORT_TEMPORARY) * n,
            sorting,
        )
        sequence, two_steps = ~pooled & ~dense, w.in_two_steps[t] & pooled & ~dense
        # Sequences keep received and returned lengths until the step ends. Row-sharded
        # ones also keep the origin of each id.
        extra = 2 * _LENGTH * f
        extra += np.where(w.by_rows[t], _INDEX * own, 0)
        before = saved + np.where(sequence, extra, 0)
        after = before + np.where(dense, 0, gradient)
        held = np.repeat(after[:, None], len(INSTANTS), axis=1)
        held[:, :3] = before[:, None]
        held[two_steps, 3] = before[two_steps]
        passing, offsets = np.zeros_like(held), _OFFSET * f
        copied = np.where(w.by_columns[t], gradient, 0)
        reduced, permuted = gradient / parts, gradient + 12 * f
        passing[:, 0] = np.select(
            [dense, sequence, two_steps],
            [offsets, gradient + permuted, gradient + 2 * reduced + offsets],
            gradient + copied + offsets,
        )
        passing[:, 3] = np.where(two_steps, reduced, 0)
        beside = np.select([sequence, two_steps], [permuted, reduced], 0)
        passing[:, 4] = np.where(dense, 0, np.maximum(sorting, beside))
        rows = shards.rows * shards.width * w.element_size[t]
        passing[:, 5] = np.where(dense, sorting - 8 * n + rows, 0)
        return held, passing

    def _common(self, options: Sequence[ShardingOption], *, as_listed: bool) -> Floats:
        """Return each instant's memory for outputs of a rank's own samples [bytes].

        Args:
            options: One per table.
            as_listed: Whether tables are split as the options list; else not at all.
        """
        held: dict[tuple[float, ...], float] = defaultdict(float)
        """Number of copies at each instant -> bytes of one copy."""
        for option in options:
            table, local = self._reader.table(option), float(option.batch_size)
            repeats = self._reader.repeats(option)
            most = table.longest_batch(local)
            lookups = table.pooling_factor * repeats * local * most
            bags = self._reader.facts(option).bags * local
            outputs = bags if is_pooled(option) else lookups
            size = output_bytes(option) * outputs * int(option.tensor.shape[1])
            if is_dense(option):
                held[_ALWAYS] += size
            elif not is_pooled(option) or self._is_reduced_at_once(option):
                held[1, 1, 2, 1, 0, 0] += size
            else:  # gradients by rank exist together with those they are made from
                held[1, 2, 3, 2, 0, 0] += size
            if repeats > 1:  # inverse indices of distinct ids, and their rows
                held[_ALWAYS] += 2 * _INDEX * lookups
                held[0, 1, 1, 1, 0, 0] += size / repeats
            if self._is_pipelined:
                ids = (_INDEX + (_WEIGHT if table.weighted else 0)) * lookups
                copies, pieces = self._num_pieces(option, as_listed)
                held[_ALWAYS] += _NUM_CAME * (ids + _LENGTH * bags)
                num_sent = _ALWAYS if is_dense(option) else self._num_sent
                held[num_sent] += copies * ids + pieces * _LENGTH * bags
        total = np.zeros(len(INSTANTS))
        for copies_6, size in held.items():
            total += np.array(copies_6) * size
        return total

    def _is_reduced_at_once(self, option: ShardingOption) -> bool:
        """Whether a single reduce-scatter returns the outputs."""
        kind = SHARDING_TYPES[option.sharding_type]
        world_size = self._reader.world_size
        block = kind.block_size(world_size, self._reader.node_size)
        return kind.splits_rows and block >= world_size

    def _num_pieces(self, option: ShardingOption, as_listed: bool) -> tuple[int, int]:
        """Return how often a table's features are copied and into how many pieces.

        Column shards get copies of all ids; row shards get a part each.

        Args:
            option: Any option.
            as_listed: Whether column shards are as the option lists them; else the
                table is whole.
        """
        if not as_listed and option.sharding_type in COLUMN_SHARDED_TYPES:
            return 1, 1
        columns = len({int(s.offset[1]) for s in option.shards})
        kind = SHARDING_TYPES[option.sharding_type]
        block = kind.block_size(self._reader.world_size, self._reader.node_size)
        return columns, columns * (block if kind.splits_rows else 1)

    def _of_modules(self, options: Sequence[ShardingOption]) -> Floats:
        """Return the extra memory of modules with several sharding types [bytes]."""
        extra = np.zeros(len(INSTANTS))
        modules: dict[str, dict[str, list[ShardingOption]]] = {}
        for option in options:
            kinds = modules.setdefault(option.path, {})
            kinds.setdefault(option.sharding_type, []).append(option)
        for kinds in modules.values():
            if len(kinds) > 1:
                members = [o for several in kinds.values() for o in several]
                replicas = any(map(is_dense, members))
                for option in members:
                    extra += self._beside_others(option, replicas, as_listed=True)
        return extra

    def _beside_others(
        self, option: ShardingOption, beside_replicas: bool, *, as_listed: bool
    ) -> Floats:
        """Return a table's extra memory in a module with several sharding types.

        Its gradient is a part of the gradient of all outputs, which is copied. Features
        are sorted together, so those of other tables still exist while replicated
        tables look up theirs.
        """
        local = float(option.batch_size)
        bags = self._reader.facts(option).bags * local
        size = output_bytes(option) * bags * int(option.tensor.shape[1])
        size *= is_pooled(option)
        if is_dense(option):
            return size * np.array([0, 0, 0, 0, 0, 1])
        cut = self._is_reduced_at_once(option)
        found = size * np.array([0, 0, 1, cut, 0, 0])
        if beside_replicas:
            found += size * np.array([0, 0, 0, 0, 1, 1])
            table = self._reader.table(option)
            most = table.pooling_factor * table.longest_batch(local)
            ids = (_INDEX + (_WEIGHT if table.weighted else 0)) * most
            copies, _ = self._num_pieces(option, as_listed)
            one = copies * local * (ids + _LENGTH * self._reader.facts(option).bags)
            there = 2 if self._is_pipelined else 1
            is_sent = option.sharding_type in COLUMN_SHARDED_TYPES
            found += one * (there - np.array(self._num_sent) * is_sent)
        return found


def _widest(kernel_N: Ints, width_N: Ints, cached_N: Bools) -> Ints:
    """Return the width of the widest cached shard in each shard's kernel, `N`."""
    widest = np.zeros(int(kernel_N.max(initial=-1)) + 1, dtype=np.int64)
    np.maximum.at(widest, kernel_N[cached_N], width_N[cached_N])
    return widest[kernel_N]
