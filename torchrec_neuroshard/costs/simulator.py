"""Predict milliseconds from a placement: each rank's phases, and the iteration.

A stage is the tables of one TorchRec module and one sharding type. It has five phases:

1. `index_comms`: ids go to the ranks that hold their tables.
2. `fwd_compute`: fused kernels look the ids up.
3. `fwd_comms`: outputs return to the samples' ranks.
4. `bwd_comms`: gradients of the outputs go back to the tables' ranks.
5. `bwd_compute`: kernels update the tables.

A collective waits for its slowest rank. Ranks do not wait between stages: kernels of
one stage run beside exchanges of others (see `timeline`). Under a train pipeline,
phases of several batches run side by side, too (see `schedules`).

Shards of every sharding type are priced the same way: an encoding for the fused
kernel's time, extra milliseconds where the kernel is another one, and the amounts that
collectives move (see `sharding_types`). Stages with split tables also reorder their
output columns. Ids are prepared before a lookup, at a cost that is part of
`fwd_compute`: split rows are bucketised by rank, received ids moved to their tables.

Shapes: `T` tables, `N` shards, `E` encoding values, `W` ranks, `G` fusion groups, `S`
stages, `C` candidates, `3` amounts (see `PricedShards.loads_N3`), `5` phases in the
order of `PHASES`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from torchrec_neuroshard.costs.encoder import ShardEncoder
from torchrec_neuroshard.costs.expected import OWN_SHARE, alike_rows, drawn_phases
from torchrec_neuroshard.costs.lengths import LengthFactors, length_factors
from torchrec_neuroshard.costs.passes import TIMED, Part, StagePhases
from torchrec_neuroshard.costs.schedules import DENSE, SEQUENTIAL, DenseMs, Schedule
from torchrec_neuroshard.costs.task import (
    KernelFactors,
    Placement,
    ShardingTask,
    WireCodec,
)
from torchrec_neuroshard.models.base import CommsModel, CostModel
from torchrec_neuroshard.tables.features import OUTPUT_BYTES_PER_VALUE
from torchrec_neuroshard.tables.sharding_types import ShardingType
from torchrec_neuroshard.tables.table import DATA_TYPE_BYTES, is_skewed

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

PHASES: tuple[str, ...] = (
    "index_comms",
    "fwd_compute",
    "fwd_comms",
    "bwd_comms",
    "bwd_compute",
)
"""Phases of a stage, in order. The dense layers run between the third and the
fourth."""

MOST_LOADS = 2**18
"""Limit of blocks times ranks in one prediction of collectives."""

ANY_ROW = -1
"""First row of a shard that stands for all shards of so many rows."""
_NO_DENSE = DenseMs()
_NEVER = 2**30
"""More column parts than any table has."""
_SCATTER = 1.6
"""Rows of sequences that were sorted by rank return to their order: a gather, and
backward a scatter into zeros. On one core of an EPYC (25/1), 4 to 256 MiB take 0.6 to
1.0 and 1.1 to 2.2 times as long as the reordering of columns; narrow rows take longest.
Source: `benchmarks/data/row_order_epyc_zen3.parquet`."""
_ID_BYTES, _LENGTH_BYTES, _LOOKUP_WEIGHT_BYTES = 8, 8, 4
"""Ids and lengths of a KeyedJaggedTensor are int64, its weights fp32."""
_SORTED_ID_BYTES = 8 * 32 + 48
"""Bytes that finding distinct ids reads and writes per id: eight passes of a radix sort
over ids and positions, then marking and numbering the runs. Not measured."""


@dataclass(frozen=True, slots=True)
class RankCosts:
    """Predicted phases of one rank [ms]."""

    index_comms: float
    fwd_compute: float
    fwd_comms: float
    bwd_comms: float
    bwd_compute: float
    cache: float = 0.0
    """Part of `fwd_compute`: loading rows from host memory into caches."""

    def to_json(self) -> dict[str, float]:
        """Return a JSON-ready dictionary."""
        return {name: getattr(self, name) for name in PHASES}


@dataclass(frozen=True, slots=True)
class StageCosts:
    """Predicted phases of all ranks in one stage."""

    name: str
    ranks: tuple[RankCosts, ...]
    module: int = 0
    """Number of its module."""
    reorder_ms: tuple[float, float] = (0.0, 0.0)
    """The part of `fwd_comms` and of `bwd_comms`, equal on all ranks, in which columns
    of split tables are reordered and outputs of several stages joined."""
    inside_ms: tuple[float, float] = (0.0, 0.0)
    """The part of `fwd_comms` and of `bwd_comms` inside nodes, which ranks wait for
    between kernels."""
    is_replicated: bool = False
    """Whether its tables are replicated. Then `bwd_comms` is an all-reduce, which
    follows `bwd_compute`."""
    spread_W: tuple[float, ...] = ()
    """Relative standard deviation of each rank's kernels, beside what is common to all
    ranks; empty: unknown."""
    alike_W: tuple[int, ...] = ()
    """Numbers from 0; ranks with the same number run the same kernels."""


@dataclass(frozen=True, slots=True)
class PredictedCosts:
    """Predicted phases of all ranks and the iteration."""

    stages: tuple[StageCosts, ...]
    """In TorchRec's order."""
    uncertainty: float = 0.0
    """Relative spread of a rank's kernels, the largest of all ranks: over the nets of
    the ensemble, or the standard deviation of an estimate."""
    compute_source: str = "measured"
    comms_source: str = "datasheet, not measured"
    compute_errors: tuple[float, float] | None = None
    """See `CostModel.errors`."""
    comms_error: float | None = None
    """See `CommsModel.error`."""
    schedule: Schedule = SEQUENTIAL
    """Schedule of the training loop."""
    dense: DenseMs = field(default_factory=DenseMs)
    """Times of the dense layers."""
    overlaps: bool = True
    """See `CommsModel.overlaps`."""
    node_size: int = 0
    """Ranks that meet in collectives inside nodes; 0 means all."""
    lengths: LengthFactors | None = field(default=None, compare=False, repr=False)
    """What batches of other lengths change; None: all batches are equal."""

    @property
    def ranks(self) -> tuple[RankCosts, ...]:
        """Phases of each rank, summed over stages."""
        names = (*PHASES, "cache")
        return tuple(
            RankCosts(*(sum(getattr(r, name) for r in of_rank) for name in names))
            for of_rank in zip(*(s.ranks for s in self.stages), strict=True)
        )

    @property
    def critical_path_ms(self) -> float:
        """The iteration under its schedule [ms]."""
        return self.path_ms(self.schedule)

    @property
    def expected_ms(self) -> float:
        """The iteration that is expected, not below the critical path [ms].

        The slowest of nearly equal ranks takes longer than its mean, see `expected`;
        and so do ranks whose samples are longer, see `lengths`.
        """
        return max(float(self.drawn_ms().mean()), self.critical_path_ms)

    def drawn_ms(self, *, even: bool = False, equal: bool = False) -> Floats:
        """Return the times of drawn iterations, `D` [ms]; one if all are equal.

        Args:
            even: Whether all ranks get equally long samples.
            equal: Whether all batches have the mean length.
        """
        lengths = None if equal else self.lengths
        if lengths is None and not any(any(s.spread_W) for s in self.stages):
            return np.array([self.critical_path_ms])
        found = self.phases(self.schedule)
        [phases_WS6] = found.phases_CWS6
        unknown = (0,) * len(phases_WS6)
        spread_WS = np.array([s.spread_W or unknown for s in self.stages]).T
        alike_WS = np.array([s.alike_W or unknown for s in self.stages]).T
        phases_DWS6 = drawn_phases(phases_WS6, spread_WS, alike_WS)
        dense_D = np.ones(len(phases_DWS6))
        if lengths is not None:
            phases_DWS6 *= lengths.even_DWS6 if even else lengths.phases_DWS6
            dense_D = dense_D if even else lengths.dense_D
        same_D = np.zeros(len(phases_DWS6), dtype=np.int64)
        drawn = dataclasses.replace(
            found,
            phases_CWS6=phases_DWS6,
            reorder_CS2=found.reorder_CS2[same_D],
            replicated_CS=found.replicated_CS[same_D],
            inside_CS2=found.inside_CS2[same_D],
        )
        return self.schedule.path_ms(drawn, self.dense, dense_D)

    def path_ms(self, schedule: Schedule) -> float:
        """Return the iteration under a given schedule [ms]."""
        if not self.stages:
            return self.dense.total_ms
        return float(schedule.path_ms(self.phases(schedule), self.dense)[0])

    @property
    def parts(self) -> list[Part]:
        """The phases on the critical path, each on the rank that counts.

        They add up to the critical path. Other phases overlap with these.
        """
        if not self.stages:
            return [Part(name, -1, -1, getattr(self.dense, name)) for name in DENSE]
        return self.schedule.parts(self.phases(self.schedule), self.dense)

    @property
    def parts_ms(self) -> dict[str, float]:
        """Phases on the critical path, which add up to it; dense layers as one [ms]."""
        found = dict.fromkeys((*TIMED, "dense"), 0.0)
        for part in self.parts:
            found[part.phase if part.phase in TIMED else "dense"] += part.ms
        return found

    def hidden_ms(self, schedule: Schedule) -> dict[str, float]:
        """Return how much of each phase a schedule hides beside others [ms]."""
        if not self.stages:
            return {}
        hidden = schedule.hidden_ms(self.phases(schedule), self.dense)[0]
        return dict(zip(TIMED, hidden.tolist(), strict=True))

    def phases(self, schedule: Schedule) -> StagePhases:
        """Return the phases that a schedule orders."""
        timed = self.phases_WS6[None].copy()
        if schedule.prefetches:
            timed[..., 1] -= timed[..., 5]
        else:
            timed[..., 5] = 0.0
        reorder_CS2 = np.array([[s.reorder_ms for s in self.stages]])
        inside_CS2 = np.array([[s.inside_ms for s in self.stages]])
        timed[..., 2:4] -= (reorder_CS2 + inside_CS2)[:, None]
        return StagePhases(
            np.maximum(timed, 0.0),
            reorder_CS2,
            np.array([[s.is_replicated for s in self.stages]]),
            tuple(s.module for s in self.stages),
            inside_CS2,
            self.overlaps,
            self.node_size,
        )

    @property
    def phases_WS6(self) -> Floats:
        """Phases of all ranks: `PHASES`, then the loading of caches [ms]."""
        names = (*PHASES, "cache")
        found = [[[getattr(r, n) for n in names] for r in s.ranks] for s in self.stages]
        return np.array(found).swapaxes(0, 1)


@dataclass(frozen=True, slots=True)
class PricedShards:
    """Shards as additive quantities: those of a rank sum up to its costs."""

    table_N: Ints
    encoding_RE: Floats
    """Encodings for the fused kernel; equal shards share one."""
    row_N: Ints
    """Index of each shard's encoding."""
    extra_N2: Floats
    """Forward and backward besides the fused kernel's time [ms]."""
    host_N2: Floats
    """The part of `extra_N2` that is due to rows in host memory [ms]."""
    loads_N3: Floats
    """Three amounts: bytes of ids and lengths sent to the shard, for all samples;
    output columns (width times features); bytes of all-reduced gradients."""

    @property
    def encoding_NE(self) -> Floats:
        """The encoding of each shard."""
        return self.encoding_RE[self.row_N]


@dataclass(frozen=True, slots=True)
class RankLoads:
    """Sums over the shards of each rank. Its costs depend on nothing else."""

    sums_CWGE: Floats
    """Sums of encodings."""
    extra_CWS2: Floats
    """Sums of `PricedShards.extra_N2` [ms]."""
    loads_CWS3: Floats
    """Sums of the shards' `loads_N3`."""
    cache_CWS: Floats
    """Time to load caches, a part of the forward kernels [ms]."""


@dataclass(frozen=True, slots=True)
class _Collective:
    """How outputs travel: a method of `CommsModel`, and codecs of both directions."""

    name: str
    forward: WireCodec
    backward: WireCodec
    num_summed: int
    """Ranks whose outputs arrive as one sum."""
    repeats: float
    """See `ShardingTask.repeats`."""


class Simulator:
    """Predicts costs of shards, of sets on ranks, and of placements of one task.

    Attributes:
        task: The sharding task.
        cost_model: Predicts fused kernels.
        comms_model: Predicts collectives.
        encoder: Caches encodings of shards; several simulators may share one.
    """

    def __init__(
        self,
        task: ShardingTask,
        cost_model: CostModel,
        comms_model: CommsModel,
        encoder: ShardEncoder | None = None,
    ) -> None:
        """Describe the task's tables.

        Args:
            task: The sharding task.
            cost_model: Predicts fused kernels.
            comms_model: Predicts collectives; must be `RankGroups` if some tables are
                sharded over the ranks of a node.
            encoder: An encoder of this cost model; None makes one.
        """
        self.task = task
        self.cost_model = cost_model
        self.comms_model = comms_model
        self.encoder = encoder or ShardEncoder(cost_model)
        kinds = [task.sharding_type(t) for t in range(len(task.tables))]
        self._member_SG = np.eye(task.num_stages)[:, list(task.stages)]
        self.groups_T: Ints = np.array(task.groups)
        self.stages_T: Ints = np.array(task.stages)[self.groups_T]
        self.dims_T: Ints = np.array([t.embedding_dim for t in task.tables])
        self.pooled_T = np.array([t.pooled for t in task.tables])
        unsorts_T = ~self.pooled_T & np.array([k.splits_rows for k in kinds])
        splits_T = np.array([k.splits_columns for k in kinds])
        self.ordered_from_T: Ints = np.select([unsorts_T, splits_T], [1, 2], _NEVER)
        """Column parts of a table from which its outputs are reordered."""
        self._order_factor_S2 = np.ones((task.num_stages, 2))
        self._order_factor_S2[self.stages_T[unsorts_T], 1] = _SCATTER
        replicated_T = np.array([k.is_replicated for k in kinds])
        self.replicated_S = np.zeros(task.num_stages, dtype=bool)
        self.replicated_S[self.stages_T[replicated_T]] = True
        inside_T = [
            (k.pooled if pools else k.sequences) == "node_row_wise"
            for k, pools in zip(kinds, self.pooled_T.tolist(), strict=True)
        ]
        self._inside_S: Ints = np.unique(self.stages_T[inside_T])
        self._join_M = self._join_costs()
        place_T = np.array(task.places)
        self._by_stage_T: Ints = np.lexsort((place_T, self.stages_T))
        """Tables by stage, then by their place in the model."""
        self._sorted_places_T: Ints = place_T[self._by_stage_T]
        self._samples_T = np.where(
            replicated_T, task.batch_size // task.world_size, task.batch_size
        )
        self._rows_T: Ints = np.array([t.num_embeddings for t in task.tables])
        self._part_rows_T = np.array(
            [
                kind.part_rows(table.num_embeddings, task.block_size(t))
                for t, (kind, table) in enumerate(zip(kinds, task.tables, strict=True))
            ]
        )
        anywhere_T = np.full(len(kinds), ANY_ROW)
        self._whole_T = self._numbered(np.arange(len(kinds)), self._rows_T, anywhere_T)
        self.skewed_T: Bools = np.array(
            [
                kind.splits_rows and is_skewed(table, rows, samples)
                for kind, table, rows, samples in zip(
                    kinds,
                    task.tables,
                    self._part_rows_T.tolist(),
                    self._samples_T.tolist(),
                    strict=True,
                )
            ]
        )
        """Whether some ranks of a table's blocks get more lookups than others."""
        self._value_bytes_T = np.array(
            [float(DATA_TYPE_BYTES[t.data_type]) for t in task.tables]
        )
        self._gradient_bytes_T = self._value_bytes_T * replicated_T
        # Output columns of a whole table's shard are its width times this.
        self._columns_T = np.array([t.num_outputs for t in task.tables]) * ~replicated_T
        self.columns_per_table: Floats = self.dims_T * self._columns_T
        """Output columns of whole tables."""
        weighted_T = np.array([t.weighted for t in task.tables])
        id_bytes_T = (_ID_BYTES + _LOOKUP_WEIGHT_BYTES * weighted_T) * ~replicated_T
        self._num_lookups_T = self.encoder.num_lookups(self._whole_T)
        self.id_bytes_T: Floats = self._num_lookups_T * id_bytes_T
        """Bytes of the ids of all samples."""
        # Every rank gets all lengths, even if they are 0.
        bags_T = np.array([t.num_bags for t in task.tables]) * ~replicated_T
        self.length_bytes_T: Floats = bags_T * (_LENGTH_BYTES * task.batch_size)
        """Bytes of the lengths of all samples."""
        splits_rows_T = np.array([k.splits_rows for k in kinds])
        ids = cost_model.ids
        bucketise_ns_T = np.where(self.pooled_T, ids.pooled_ns, ids.sequence_ns)
        self._bucketise_ms_T = 1e-6 * bucketise_ns_T * splits_rows_T
        self._rank_bags_ms_T = 1e-6 * ids.rank_bag_ns * splits_rows_T
        self._prepares_T = self._bucketise_ms_T > 0
        if not comms_model.has_copies and ids.permute_bag_ns:
            self._prepares_T |= ~replicated_T
        self._prepares_T &= task.world_size > 1
        factors = [k or KernelFactors() for k in task.kernels]
        self._kernel_T3: Floats = np.array(
            [(k.forward - 1, k.backward - 1, k.passes) for k in factors]
        )
        # For rows in host memory: bandwidth, and the share of rows that the cache
        # misses. NaN for other tables, and for the share without a cache.
        hosts = [k.host and (k.host.gb_per_s, k.host.missed) for k in factors]
        self._host_T2: Floats = np.array(
            [h or (None, None) for h in hosts], dtype=np.float64
        )
        self._estimated_T: npt.NDArray[np.bool_] = np.any(self._kernel_T3, axis=1)
        self._estimated_T |= ~np.isnan(self._host_T2[:, 0])
        self._collectives = self._group_stages(kinds)

    def _join_costs(self) -> Floats:
        """Predict the joining of each module's outputs if it has several stages [ms].

        `construct_output_kt` in torchrec/distributed/embeddingbag.py copies the outputs
        of a rank's own samples. Sequences are not joined.
        """
        task = self.task
        columns_M = np.zeros(max(task.modules) + 1)
        for first, *_ in task.ways:
            module = task.modules[self.stages_T[first]]
            outputs = task.tables[first].num_outputs * self.pooled_T[first]
            columns_M[module] += self.dims_T[first] * outputs
        samples = task.batch_size / task.world_size
        passes, launches = self.cost_model.join
        copied_M = passes * OUTPUT_BYTES_PER_VALUE * samples * columns_M
        launch_ms = launches * self.encoder.launch_ms[0]
        ms_M: Floats = copied_M * self.encoder.stream_ms + launch_ms
        return np.where(columns_M > 0, ms_M, 0.0)

    def _group_stages(
        self, kinds: Sequence[ShardingType]
    ) -> list[tuple[_Collective, npt.NDArray[np.int64]]]:
        """Return collectives with the stages that use them; a stage has one kind."""
        stages: dict[_Collective, list[int]] = {}
        for stage in range(self.task.num_stages):
            held = np.flatnonzero(self.stages_T == stage)
            if not len(held):
                continue
            kind = kinds[held[0]]
            pools = bool(self.pooled_T[held[0]])
            repeats = np.array(self.task.repeats)[held]
            weights = self.columns_per_table[held]
            forward, backward = self.task.codecs[held[0]]
            collective = _Collective(
                kind.pooled if pools else kind.sequences,
                forward,
                backward,
                num_summed=self.task.block_size(int(held[0])) if pools else 1,
                repeats=float(np.average(repeats, weights=weights))
                if weights.any()
                else 1.0,
            )
            stages.setdefault(collective, []).append(stage)
        return [(collective, np.array(used)) for collective, used in stages.items()]

    def for_task(self, task: ShardingTask) -> Simulator:
        """Return a simulator of another task, with the same models and encodings."""
        return Simulator(task, self.cost_model, self.comms_model, self.encoder)

    # Shards.

    def price(
        self,
        table_N: Ints,
        width_N: Ints,
        rows_N: Ints | None = None,
        first_N: Ints | None = None,
    ) -> PricedShards:
        """Price shards.

        Args:
            table_N: Tables.
            width_N: Columns.
            rows_N: Rows; ALL_ROWS means all. None means all rows for every shard.
            first_N: First row of each shard; ANY_ROW means the mean of all shards of so
                many rows. None means ANY_ROW for every shard.
        """
        part_N, rows_share_N, share_N = self._parts(table_N, rows_N, first_N)
        rows, row_N = np.unique(self.encoder.rows(part_N, width_N), return_inverse=True)
        encoding_RE = self.encoder.encoding(rows)
        num_rows = self._rows_T[table_N] * rows_share_N
        loads = self._loads(table_N, width_N, share_N, num_rows)
        extra, host = np.zeros((2, len(table_N), 2))
        if self._estimated_T[table_N].any():
            alone = self.cost_model.predict_sums(encoding_RE)
            # A prediction that is no time shows up in the kernel's own cost.
            alone = np.where(np.isfinite(alone), alone, 0.0)
            factors_N3 = self._kernel_T3[table_N]
            extra = np.maximum(alone - self.encoder.launch_ms, 0.0)[row_N]
            extra *= factors_N3[:, :2]
            if factors_N3[:, 2].any():
                weights = num_rows * width_N * self._value_bytes_T[table_N]
                extra[:, 1] += weights * factors_N3[:, 2] * self.encoder.stream_ms
            host = self._host_ms(table_N, width_N, part_N)
            extra += host
        if self._prepares_T[table_N].any():
            extra[:, 0] += self._id_ms(table_N, share_N, rows_share_N)
        return PricedShards(table_N, encoding_RE, row_N, extra, host, loads)

    def widest(self) -> PricedShards:
        """Price the widest shard of each table: whole, or its largest part of rows."""
        return self.price(np.arange(len(self.dims_T)), self.dims_T, self._part_rows_T)

    def _id_ms(self, table_N: Ints, share_N: Floats, rows_share_N: Floats) -> Floats:
        """Predict the preparation of shards' ids, `N` [ms].

        A rank bucketises the ids of its own samples, on average as many as a shard
        gets, and counts them by rank for each of its bags. Received ids are moved from
        the order of the ranks to that of the tables; measured collectives include that.

        Args:
            table_N: Tables.
            share_N: Share of the table's lookups that each shard receives.
            rows_share_N: Share of the table's rows, which a rank's own samples have of
                the lookups.
        """
        lookups_N = self._num_lookups_T[table_N]
        own_N, num_ids_N = lookups_N * rows_share_N, lookups_N * share_N
        num_bags_N = self.length_bytes_T[table_N] / _LENGTH_BYTES
        ms_N = own_N * self._bucketise_ms_T[table_N]
        ms_N += num_bags_N * self._rank_bags_ms_T[table_N]
        if not self.comms_model.has_copies:
            ms_N += np.maximum(
                num_bags_N * self.cost_model.ids.permute_bag_ns * 1e-6,
                num_ids_N * 2 * _ID_BYTES * self.encoder.stream_ms,
            )
        return np.where(self._prepares_T[table_N], ms_N, 0.0)

    def _loads(
        self, table_N: Ints, width_N: Ints, share_N: Floats, num_rows_N: Floats
    ) -> Floats:
        """Return `PricedShards.loads_N3` of shards with a share of the lookups."""
        loads = np.zeros((len(table_N), 3))
        loads[:, 0] = self.id_bytes_T[table_N] * share_N + self.length_bytes_T[table_N]
        share = np.where(self.pooled_T[table_N], 1.0, share_N)
        loads[:, 1] = width_N * (self._columns_T[table_N] * share)
        loads[:, 2] = self._gradient_bytes_T[table_N] * width_N * num_rows_N
        return loads

    def loads_of_places(self, table: int, width: int) -> Floats:
        """Return the loads of each rank of a table's block, `block size x 3`.

        Args:
            table: A table that is split by rows.
            width: Columns of the block.
        """
        kind, size = self.task.sharding_type(table), self.task.block_size(table)
        rows = int(self._rows_T[table])
        parts = [kind.rows_at(place, rows, size) for place in range(size)]
        first_N, rows_N = np.array(parts).T
        table_N = np.full(size, table)
        *_, share_N = self._parts(table_N, rows_N, first_N)
        return self._loads(table_N, np.full(size, width), share_N, rows_N)

    def _numbered(self, table_N: Ints, rows_N: Ints, first_N: Ints) -> Ints:
        """Return the encoder's part number of some rows of each table."""
        tables = table_N.tolist()
        return self.encoder.parts(
            [self.task.tables[t] for t in tables],
            rows_N.tolist(),
            self._samples_T[table_N].tolist(),
            [None if first == ANY_ROW else first for first in first_N.tolist()],
        )

    def _parts(
        self, table_N: Ints, rows_N: Ints | None, first_N: Ints | None
    ) -> tuple[Ints, Floats, Floats]:
        """Return each shard's part of the encoder, and its shares of its table.

        The first share is that of the rows, the second that of the lookups.
        """
        part_N, share_N = self._whole_T[table_N], np.ones(len(table_N))
        if rows_N is None:
            return part_N, share_N, share_N
        cut = np.flatnonzero((rows_N >= 0) & (rows_N < self._rows_T[table_N]))
        table, rows = table_N[cut], rows_N[cut]
        share_N[cut] = rows / self._rows_T[table]
        first = np.full(len(cut), ANY_ROW)
        if first_N is not None:  # the place matters only if lookups are unequal
            first = np.where(self.skewed_T[table], first_N[cut], ANY_ROW)
        part_N[cut] = self._numbered(table, rows, first)
        lookups_N = share_N.copy()
        for t in np.unique(table[first != ANY_ROW]).tolist():
            own = (table == t) & (first != ANY_ROW)
            config = self.task.tables[t]
            # The same profile as in `row_shard`.
            hot = config.profile_at(int(self._samples_T[t])).hot_rows
            if hot is not None:
                shares = hot.shares(first[own], rows[own], config.num_embeddings)
                lookups_N[cut[own]] = shares
        return part_N, share_N, lookups_N

    def _host_ms(self, table_N: Ints, width_N: Ints, part_N: Ints) -> Floats:
        """Return the extra time of rows in host memory, `N x 2` [ms]."""
        out = np.zeros((len(table_N), 2))
        gb_per_s_N, missed_N = self._host_T2[table_N].T
        for cached in (False, True):
            held = np.flatnonzero(
                ~np.isnan(gb_per_s_N) & (np.isnan(missed_N) != cached)
            )
            if len(held):
                out[held] = self.cost_model.host_memory(
                    self.encoder.features(part_N[held], width_N[held]),
                    gb_per_s_N[held],
                    missed_N[held] if cached else None,
                )
        return out

    def balanced_phases(self, table_N: Ints, num_shards_N: Ints) -> Floats:
        """Predict tables that are spread evenly over all ranks.

        Args:
            table_N: Tables.
            num_shards_N: Number of shards of each table.

        Returns:
            `S x 5` [ms].
        """
        world_size = self.task.world_size
        priced = self.price(table_N, self.dims_T[table_N])
        share_N1 = (num_shards_N / world_size)[:, None]
        shares = dataclasses.replace(
            priced,
            encoding_RE=priced.encoding_NE * share_N1,
            row_N=np.arange(len(table_N)),
            extra_N2=priced.extra_N2 * share_N1,
            loads_N3=priced.loads_N3 * share_N1,
        )
        one = self.add_up(shares, np.zeros_like(table_N))
        compute = self.stage_compute(self.compute_costs(one.sums_CWGE[0]))
        comms = self.comms_costs(np.tile(one.loads_CWS3[0], (1, world_size, 1, 1)))
        return in_phases(compute + one.extra_CWS2[0], comms[0].max(axis=0))

    def shard_features(
        self,
        table_N: Ints,
        width_N: Ints,
        rows_N: Ints | None = None,
        first_N: Ints | None = None,
    ) -> npt.NDArray[np.float32]:
        """Return the features of shards, `N x F`; see `price`."""
        return self.encoder.features(self._parts(table_N, rows_N, first_N)[0], width_N)

    def single_compute(self, shards: PricedShards) -> Floats:
        """Predict the kernel of each shard alone on its rank.

        Returns:
            `N x 2` [ms]: forward and backward.
        """
        alone = self.cost_model.predict_sums(shards.encoding_RE)
        return alone[shards.row_N] + shards.extra_N2

    # Ranks.

    def add_up(self, shards: PricedShards, rank_N: Ints) -> RankLoads:
        """Add up the shards of each rank.

        Args:
            shards: `N` shards.
            rank_N: Their ranks.

        Returns:
            Sums per rank, kernel and stage, without the axis `C`.
        """
        num_ranks, num_stages = self.task.world_size, self.task.num_stages
        group_N = self.groups_T[shards.table_N]
        stage_N = self.stages_T[shards.table_N]
        cached_N = ~np.isnan(self._host_T2[shards.table_N, 1])
        sums = np.zeros((num_ranks, self.task.num_groups, self.cost_model.encoding_dim))
        np.add.at(sums, (rank_N, group_N), shards.encoding_NE)
        extra = np.zeros((num_ranks, num_stages, 2))
        np.add.at(extra, (rank_N, stage_N), shards.extra_N2)
        loads = np.zeros((num_ranks, num_stages, 3))
        np.add.at(loads, (rank_N, stage_N), shards.loads_N3)
        cache = np.zeros((num_ranks, num_stages))
        np.add.at(cache, (rank_N, stage_N), shards.host_N2[:, 0] * cached_N)
        return RankLoads(sums, extra, loads, cache)

    def rank_loads(self, placement: Placement) -> RankLoads:
        """Return the loads of each rank under one placement (no axis `C`)."""
        table_N, width_N, rank_N, rows_N, first_N = placed_arrays(placement)
        return self.add_up(self.price(table_N, width_N, rows_N, first_N), rank_N)

    def compute_costs(self, sums_CWGE: Floats) -> Floats:
        """Predict the fused kernels of rank sets.

        Args:
            sums_CWGE: Sums of encodings, with any axes before the last.

        Returns:
            Forward and backward [ms]; the last axis is `2` in place of `E`.
        """
        flat = sums_CWGE.reshape(-1, sums_CWGE.shape[-1])
        return self.cost_model.predict_sums(flat).reshape(*sums_CWGE.shape[:-1], 2)

    def stage_compute(self, compute_CWG2: Floats) -> Floats:
        """Add up the kernels of each stage: `... x G x 2` -> `... x S x 2`."""
        total: Floats = np.matmul(self._member_SG, compute_CWG2)
        return total

    def comms_costs(self, loads_CWS3: Floats) -> Floats:
        """Predict the collectives of every stage.

        Args:
            loads_CWS3: See `RankLoads`.

        Returns:
            `C x W x S x 3` [ms]: index exchange, forward and backward of each rank.
        """
        count, num_ranks = loads_CWS3.shape[:2]
        out = np.zeros(loads_CWS3.shape)
        for collective, used in self._collectives:
            flat = loads_CWS3[:, :, used].swapaxes(1, 2).reshape(-1, num_ranks, 3)
            ms = self._collective(collective, flat)
            out[:, :, used] = ms.reshape(count, len(used), num_ranks, 3).swapaxes(1, 2)
        return out

    def stage_comms(self, stage: int, loads_CW3: Floats) -> Floats:
        """Predict the collectives of one stage.

        Args:
            stage: Index of a stage that has tables.
            loads_CW3: Amounts of that stage.

        Returns:
            `C x W x 3` [ms]: index exchange, forward and backward of each rank.
        """
        for collective, used in self._collectives:
            if stage in used:
                return self._collective(collective, loads_CW3)
        raise AssertionError(f"stage {stage} has no table")

    def _collective(self, collective: _Collective, loads_CW3: Floats) -> Floats:
        """Predict index, forward and backward of one collective, `C x W x 3` [ms].

        A stage in which no rank sends anything takes no time.
        """
        used_C11: npt.NDArray[np.bool_] = np.any(loads_CW3, axis=(1, 2), keepdims=True)
        model, batch_size = self.comms_model, self.task.batch_size
        if collective.name == "all_reduce":
            out = np.zeros(loads_CW3.shape)
            out[..., 2] = model.all_reduce(loads_CW3[..., 2])
            return np.where(used_C11, out, 0.0)
        predict = getattr(model, collective.name)
        columns_CW = loads_CW3[..., 1]
        # Fewer bytes per value count as fewer columns, in each direction separately.
        forward, backward = collective.forward, collective.backward
        fewer = forward.wire_bytes / OUTPUT_BYTES_PER_VALUE
        both = predict(columns_CW * fewer, batch_size)
        if backward.wire_bytes != forward.wire_bytes:
            fewer = backward.wire_bytes / OUTPUT_BYTES_PER_VALUE
            both[..., 1] = predict(columns_CW * fewer, batch_size)[..., 1]
        if forward.encode_bytes or backward.encode_bytes:
            both += self._coding(collective, columns_CW)
        if not model.has_copies:
            both += self._copies(collective, columns_CW)
        index = model.index_all_to_all(loads_CW3[..., 0])
        out = np.concatenate([index[..., None], both], axis=2)
        if collective.repeats > 1:
            out += self._removal(collective.repeats, loads_CW3)
        return np.where(used_C11, out, 0.0)

    def _removal(self, repeats: float, loads_CW3: Floats) -> Floats:
        """Predict the removal of repeated ids, and the repetition of outputs.

        Returns:
            `C x 1 x 3` [ms]; every rank does it for its own samples.
        """
        own_C13 = loads_CW3.mean(axis=1, keepdims=True)
        ids_C1 = own_C13[..., 0] / (_ID_BYTES + _LENGTH_BYTES) * repeats
        sent_C1 = own_C13[..., 1] * self.task.batch_size * OUTPUT_BYTES_PER_VALUE
        # A gather of rows, and the sum of their gradients.
        copied_C1 = sent_C1 * (1 + repeats)
        sorted_C1 = ids_C1 * _SORTED_ID_BYTES * self.encoder.stream_ms
        copied_C1 *= self.encoder.byte_ms
        ms: Floats = np.stack([sorted_C1, copied_C1, copied_C1], axis=2)
        return ms

    def _coding(self, collective: _Collective, columns_CW: Floats) -> Floats:
        """Predict coding and decoding around a collective, `C x W x 2` [ms].

        Forward, a rank codes the outputs of its shards for all samples, and decodes the
        outputs of all shards for its own samples. Backward is the reverse.
        """
        shards_CW = columns_CW * self.task.batch_size
        samples_C1 = shards_CW.mean(axis=1, keepdims=True) / collective.num_summed
        there, back = collective.forward, collective.backward
        forward = there.encode_bytes * shards_CW + there.decode_bytes * samples_C1
        backward = back.encode_bytes * samples_C1 + back.decode_bytes * shards_CW
        coding = np.stack([forward, backward], axis=2) * self.encoder.stream_ms
        if collective.name == "all_to_all" and self.comms_model.has_copies:
            # Measured collectives include copies of uncoded values, about as many as
            # reordering the columns takes. A codec does not shrink them.
            copies_C2 = self._order_ms(columns_CW.sum(axis=1))
            sent = np.array([there.wire_bytes, back.wire_bytes])
            coding += (copies_C2 * (1 - sent / OUTPUT_BYTES_PER_VALUE))[:, None]
        launches = np.array([there.launches, back.launches])
        launches = launches * float(self.encoder.launch_ms[0])
        return np.where(samples_C1[..., None] > 0, coding + launches, 0.0)

    def _copies(self, collective: _Collective, columns_CW: Floats) -> Floats:
        """Predict the copies around an all-to-all of outputs, `C x 1 x 2` [ms].

        Forward, a rank joins the columns of all ranks for its own samples; backward, it
        takes the gradients apart. A reduce-scatter and an all-gather need no copy.
        """
        size, ranks = collective.num_summed, columns_CW.shape[1]
        if ranks == 1 or (collective.name != "all_to_all" and size >= ranks):
            return np.zeros((len(columns_CW), 1, 2))
        return self._order_ms(columns_CW.sum(axis=1) / size)[:, None]

    def single_comms(
        self, table_N: Ints, loads_N3: Floats, rank_N: Ints, block_N: Ints
    ) -> Floats:
        """Predict the collectives of each shard's block alone.

        Args:
            table_N: Tables of the shards.
            loads_N3: See `PricedShards`.
            rank_N: Ranks; shards of one block must be on different ranks.
            block_N: Block numbers, rising from 0.

        Returns:
            `N x 3` [ms]: index exchange, forward and backward.
        """
        out, stage_N = np.zeros(loads_N3.shape), self.stages_T[table_N]
        for collective, used in self._collectives:
            own = np.flatnonzero(np.isin(stage_N, used))
            if not len(own):
                continue
            blocks, line_N = np.unique(block_N[own], return_inverse=True)
            step = max(1, MOST_LOADS // self.task.world_size)
            for start in range(0, len(blocks), step):
                some = own[(line_N >= start) & (line_N < start + step)]
                line = np.searchsorted(blocks, block_N[some]) - start
                rank = rank_N[some]
                count = min(step, len(blocks) - start)
                loads = np.zeros((count, self.task.world_size, 3))
                loads[line, rank] = loads_N3[some]
                out[some] = self._collective(collective, loads)[line, rank]
        return out

    def phases(self, compute_CWS2: Floats, loads_CWS3: Floats) -> Floats:
        """Return `C x W x S x 5`: phases of each rank in each stage [ms].

        Args:
            compute_CWS2: Forward and backward compute [ms].
            loads_CWS3: See `RankLoads`.
        """
        return in_phases(compute_CWS2, self.comms_costs(loads_CWS3))

    # Placements.

    def order_costs(self, columns_CS: Floats) -> Floats:
        """Predict the reordering of output columns.

        It takes the same time on all ranks: each reorders its own samples.

        Args:
            columns_CS: Columns to reorder. A pooled stage reorders all its columns if
                any table is split by columns; sequences reorder those of split tables.
                Sequences of split rows were sorted by rank.

        Returns:
            `C x S x 2` [ms]: forward and backward; 0 without columns.
        """
        ms_CS2 = self._order_ms(columns_CS) * self._order_factor_S2
        return np.where(columns_CS[..., None] > 0, ms_CS2, 0.0)

    def _order_ms(self, columns_X: Floats) -> Floats:
        """Return the time to reorder columns of a rank's own samples, `X x 2`."""
        samples = self.task.batch_size / self.task.world_size
        return self.encoder.column_order(columns_X * (OUTPUT_BYTES_PER_VALUE * samples))

    def ordered_columns(self, num_shards_T: Ints, columns_T: Floats) -> Floats:
        """Count the output columns that TorchRec reorders.

        Args:
            num_shards_T: Column shards of each table; 0 if a table is not placed.
            columns_T: Output columns of each table.

        Returns:
            `S`: columns of each stage; 0 if nothing is reordered.
        """
        split_T = num_shards_T >= self.ordered_from_T
        num_stages = self.task.num_stages
        split_S = np.bincount(self.stages_T, weights=split_T, minlength=num_stages) > 0
        counted_T = (num_shards_T > 0) & np.where(
            self.pooled_T, split_S[self.stages_T], split_T
        )
        columns_S: Floats = np.bincount(
            self.stages_T, weights=columns_T * counted_T, minlength=num_stages
        ).astype(np.float64)
        return columns_S

    def stage_order(self, placed_CT: Bools) -> Ints:
        """Return the stages in TorchRec's order: by module, then by first table.

        Args:
            placed_CT: Whether each table is placed.

        Returns:
            `C x S` stages; those without tables come last in their module.
        """
        task, count = self.task, len(placed_CT)
        if task.num_stages == 1:
            return np.zeros((count, 1), dtype=np.int64)
        last = int(self._sorted_places_T.max()) + 1
        first_CS = np.full((count, task.num_stages), last)
        sorted_CT = placed_CT[:, self._by_stage_T]
        ends = np.cumsum(np.bincount(self.stages_T, minlength=task.num_stages))
        for stage, (start, end) in enumerate(itertools.pairwise([0, *ends.tolist()])):
            if start < end:
                at_C = start + sorted_CT[:, start:end].argmax(axis=1)
                some = sorted_CT[np.arange(count), at_C]
                first_CS[some, stage] = self._sorted_places_T[at_C[some]]
        key_CS = np.array(task.modules) * (last + 1) + first_CS
        order_CS: Ints = np.argsort(key_CS, axis=1, kind="stable")
        return order_CS

    def joined_costs(self, used_CS: Bools) -> Floats:
        """Predict the joining of outputs, `C x S` [ms]; the last stage of each has it.

        Args:
            used_CS: Whether each stage has tables, in TorchRec's order of stages.
        """
        joined = np.zeros(used_CS.shape)
        modules_S = np.sort(self.task.modules)
        for module, ms in enumerate(self._join_M.tolist()):
            own = np.flatnonzero(modules_S == module)
            if not len(own):
                continue
            used = used_CS[:, own]
            # Counted from the end, the last used stage is the first.
            last = len(own) - 1 - used[:, ::-1].argmax(axis=1)
            joined[np.arange(len(used)), own[last]] += ms * (used.sum(axis=1) > 1)
        return joined

    def inside_costs(self, loads_CWS3: Floats) -> Floats:
        """Predict the part of exchanges inside nodes, `C x S x 2` [ms]."""
        count, _, num_stages, _ = loads_CWS3.shape
        inside = np.zeros((count, num_stages, 2))
        for stage in self._inside_S.tolist():
            columns_CW = loads_CWS3[:, :, stage, 1]
            ms = self.comms_model.inside_nodes(columns_CW, self.task.batch_size)
            inside[:, stage] = ms.max(axis=1) * (columns_CW.max(axis=1) > 0)[:, None]
        return inside

    def in_order(
        self,
        phases_CWS5: Floats,
        reorder_CS2: Floats,
        order_CS: Ints,
        loads_CWS3: Floats,
    ) -> StagePhases:
        """Return phases of candidates for a schedule, with nothing loaded ahead.

        Args:
            phases_CWS5: Phases of each rank in each stage, without reordering.
            reorder_CS2: See `order_costs`.
            order_CS: See `stage_order`.
            loads_CWS3: See `RankLoads`; used for collectives inside nodes.
        """
        count, num_ranks, num_stages, _ = phases_CWS5.shape
        order_CS = np.broadcast_to(order_CS, (count, num_stages))
        phases_CWS6 = np.zeros((count, num_ranks, num_stages, len(TIMED)))
        phases_CWS6[..., :-1] = phases_CWS5
        inside_CS2 = self.inside_costs(loads_CWS3)
        if len(self._inside_S):
            inside_CS2 = np.minimum(inside_CS2, phases_CWS6[..., 2:4].max(axis=1))
            phases_CWS6[..., 2:4] -= inside_CS2[:, None]
            np.maximum(phases_CWS6, 0.0, out=phases_CWS6)
        reorder_CS2 = np.broadcast_to(reorder_CS2, (count, num_stages, 2))
        line_C1 = np.arange(count)[:, None]
        if num_stages == 1:
            reorder_CS2 = reorder_CS2.copy()
        else:
            inside_CS2 = inside_CS2[line_C1, order_CS]
            row_CWS = np.arange(count * num_ranks).reshape(count, num_ranks, 1)
            row_CWS = row_CWS * num_stages + order_CS[:, None]
            phases_CWS6 = phases_CWS6.reshape(-1, len(TIMED))[row_CWS]
            reorder_CS2 = reorder_CS2[line_C1, order_CS]
            used_CS = phases_CWS6[..., 1].max(axis=1) > 0
            reorder_CS2[..., 0] += self.joined_costs(used_CS)
        return StagePhases(
            phases_CWS6,
            reorder_CS2,
            self.replicated_S[order_CS],
            tuple(sorted(self.task.modules)),
            inside_CS2,
            self.comms_model.overlaps,
            self.task.node_size,
        )

    def path_ms(
        self,
        phases_CWS5: Floats,
        reorder_CS2: Floats,
        order_CS: Ints,
        loads_CWS3: Floats,
    ) -> Floats:
        """Return iterations without a pipeline and dense layers, `C` [ms].

        Args: see `in_order`.
        """
        found = self.in_order(phases_CWS5, reorder_CS2, order_CS, loads_CWS3)
        return SEQUENTIAL.path_ms(found, _NO_DENSE)

    def evaluate(self, placement: Placement) -> PredictedCosts:
        """Predict one iteration under a placement."""
        table_N, width_N, rank_N, rows_N, first_N = placed_arrays(placement)
        shards = self.price(table_N, width_N, rows_N, first_N)
        return self.predict(shards, rank_N, self.num_shards(placement))

    def predict(
        self, shards: PricedShards, rank_N: Ints, num_shards_T: Ints
    ) -> PredictedCosts:
        """Predict one iteration.

        Args:
            shards: All shards.
            rank_N: Their ranks.
            num_shards_T: See `ordered_columns`.
        """
        loads = self.add_up(shards, rank_N)
        kernels_WG2 = self.compute_costs(loads.sums_CWGE)
        compute = self.stage_compute(kernels_WG2) + loads.extra_CWS2
        comms_WS3, reorder_S2 = self.collectives(loads, num_shards_T)
        [order_S] = self.stage_order(num_shards_T[None] > 0)
        inside_S2 = self.inside_costs(loads.loads_CWS3[None])[0]
        inside_S2 = np.minimum(inside_S2, comms_WS3[..., 1:].max(axis=0) - reorder_S2)
        phases = in_phases(compute, comms_WS3)
        phases_WS6 = np.concatenate([phases, loads.cache_CWS[..., None]], axis=-1)
        flat = loads.sums_CWGE.reshape(-1, loads.sums_CWGE.shape[-1])
        uncertainty = self.cost_model.relative_uncertainty(flat)
        kernels_WG = kernels_WG2.sum(axis=2)
        wrong_WG = OWN_SHARE * uncertainty.reshape(kernels_WG.shape) * kernels_WG
        kernels_WS, wrong_WS = (x @ self._member_SG.T for x in (kernels_WG, wrong_WG))
        spread_WS = wrong_WS / np.maximum(kernels_WS, 1e-9)
        return PredictedCosts(
            stages=tuple(
                StageCosts(
                    self.task.stage_names[s],
                    tuple(RankCosts(*row) for row in phases_WS6[:, s].tolist()),
                    module=self.task.modules[s],
                    reorder_ms=(float(reorder_S2[s, 0]), float(reorder_S2[s, 1])),
                    inside_ms=(float(inside_S2[s, 0]), float(inside_S2[s, 1])),
                    is_replicated=bool(self.replicated_S[s]),
                    spread_W=tuple(spread_WS[:, s].tolist()),
                    alike_W=tuple(alike_rows(self._in_stage(loads, s)).tolist()),
                )
                for s in order_S.tolist()
            ),
            uncertainty=float(uncertainty.max(initial=0.0)),
            compute_source=self.cost_model.source,
            comms_source=self.comms_model.source,
            compute_errors=self.cost_model.errors,
            comms_error=self.comms_model.error,
            overlaps=self.comms_model.overlaps,
            node_size=self.task.node_size,
            lengths=length_factors(self, shards, rank_N, order_S),
        )

    def _in_stage(self, loads: RankLoads, stage: int) -> Floats:
        """Return all that decides the kernels of each rank in a stage, `W x X`."""
        own = self._member_SG[stage] > 0
        sums_WX = loads.sums_CWGE[:, own].reshape(self.task.world_size, -1)
        return np.concatenate([sums_WX, loads.extra_CWS2[:, stage]], axis=1)

    def collectives(
        self, loads: RankLoads, num_shards_T: Ints
    ) -> tuple[Floats, Floats]:
        """Predict the collectives of one placement, including reordered outputs.

        Args:
            loads: Sums of each rank (no axis `C`).
            num_shards_T: See `ordered_columns`.

        Returns:
            `W x S x 3` [ms]: index exchange, forward and backward; and the part of the
            last two that reorders and joins outputs, `S x 2` [ms].
        """
        comms_WS3: Floats = self.comms_costs(loads.loads_CWS3[None])[0]
        columns_S = self.ordered_columns(num_shards_T, self.columns_per_table)
        reorder_S2 = self.order_costs(columns_S[None])[0]
        [order_S] = self.stage_order(num_shards_T[None] > 0)
        used_S = np.bincount(self.stages_T, num_shards_T > 0, len(order_S)) > 0
        reorder_S2[order_S, 0] += self.joined_costs(used_S[None, order_S])[0]
        comms_WS3[..., 1:] += reorder_S2
        return comms_WS3, reorder_S2

    def num_shards(self, placement: Placement) -> Ints:
        """Count each table's column shards: `T`."""
        table = [s.table for s in placement.shards if not s.row_offset]
        count: Ints = np.bincount(
            np.array(table, dtype=np.int64), minlength=len(self.task.tables)
        )
        return count


def in_phases(compute_X2: Floats, comms_X3: Floats) -> Floats:
    """Join compute and collectives in the order of `PHASES`: `... x 5`."""
    index, comms = comms_X3[..., :1], comms_X3[..., 1:]
    forward, backward = compute_X2[..., :1], compute_X2[..., 1:]
    return np.concatenate([index, forward, comms, backward], axis=-1)


def placed_arrays(placement: Placement) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    """Return table, width, rank, rows and first row of each shard, `N` int64 each."""
    table, width, rank, rows, first = (
        np.array(
            [
                (s.table, s.width, s.rank, s.rows, s.row_offset)
                for s in placement.shards
            ],
            dtype=np.int64,
        )
        .reshape(-1, 5)
        .T
    )
    return table, width, rank, rows, first
