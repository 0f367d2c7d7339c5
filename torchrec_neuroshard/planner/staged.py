"""What shards of every sharding type cost, in the stages in which TorchRec runs them.

A stage is a module's tables of one sharding type; its tables of one fusion group are
one kernel per rank, whose cost is that of the set. What happens around the kernels
depends on the type:

- table-wise, column-wise, table-column-wise: all-to-alls of ids, outputs and gradients;
- row-wise: ids are bucketised on their way; the partial sums of a bag are added up in a
  reduce-scatter, its gradients gathered (tables of sequences: all-to-alls);
- table-row-wise and grid: the same inside a node, then an all-to-all between nodes;
- data-parallel: no ids or outputs move, the gradients of whole tables are all-reduced.

A row shard is a table of its share of the rows and of the lookups; a replica is a whole
table that reads the samples of its own rank. Two things no bundle holds, and they are
estimates: the kernel of replicas, with the optimizer's pass over all of their rows, and
kernels that read the host's memory. Both cost what the fused kernel costs above its
launch, times a factor: measured for replicas on CPUs, else what TorchRec's estimate
takes them to be slower.

Shapes: `N` shards, `W` ranks, `G` fusion groups, `S` stages, `E` encoding values, `C`
candidates.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torchrec.distributed.planner.constants import (
    DP_ELEMENTWISE_KERNELS_PERF_FACTOR,
    kernel_bw_lookup,
)
from torchrec.distributed.planner.types import (
    PlannerError,
    Shard,
    ShardingOption,
    Topology,
)
from torchrec.distributed.types import ShardingType

from torchrec_neuroshard.cost_models import CommsModel, CostModel
from torchrec_neuroshard.features import ShardFeaturizer, table_features
from torchrec_neuroshard.planner.lowering import FusionGroups, fusion_key
from torchrec_neuroshard.planner.table_reader import (
    OFFLOADED_KERNELS,
    TableReader,
    is_dense,
    table_name,
)
from torchrec_neuroshard.profiles import FeatureProfile, uniform_profile
from torchrec_neuroshard.simulator import order_costs
from torchrec_neuroshard.tables import DATA_TYPE_BYTES, TableConfig

__all__ = [
    "RankGroups",
    "ShardPricer",
    "StagedShards",
    "is_estimated",
    "row_shard",
]

_Key = tuple[int, int, int, int, bool]
"""Identity of a whole table, rows, columns, samples, and whether bags are pooled."""

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_DATA_PARALLEL = ShardingType.DATA_PARALLEL.value
_ROW_WISE = ShardingType.ROW_WISE.value
_GRID = ShardingType.GRID_SHARD.value
_SPLIT_TYPES = (
    ShardingType.COLUMN_WISE.value,
    ShardingType.TABLE_COLUMN_WISE.value,
    _GRID,
)
_NODE_TYPES = (ShardingType.TABLE_ROW_WISE.value, ShardingType.GRID_SHARD.value)

_PROBE_ROWS, _PROBE_WIDTH, _PROBE_LOOKUPS, _PROBE_BATCH = 10**6, 128, 65536, 8192
"""A kernel bound by the memory's bandwidth: what a byte takes is read off it."""

_ID_BYTES, _LENGTH_BYTES, _LOOKUP_WEIGHT_BYTES = 8, 8, 4
"""Ids and lengths of a KeyedJaggedTensor are int64, its weights fp32."""


@dataclass(frozen=True, slots=True)
class _DenseKernel:
    """What replicas take above a launch, in the fused kernel's terms."""

    forward: float
    """Times what the fused kernel takes above its launch."""
    backward: float
    passes: float
    """Over all rows, at the bandwidth at which the fused kernel reads rows: to clear
    and copy the gradient, and for the optimizer."""


_MEASURED_DENSE: Mapping[str, _DenseKernel] = {
    "cpu": _DenseKernel(forward=0.78, backward=1.17, passes=2.96)
}
"""By device type. Fitted to 32 tables under SGD on one AMD EPYC (Zen 5) core, and held
to others in `benchmarks/results/dense_epyc_zen5_202611.md`."""


def is_estimated(option: ShardingOption) -> bool:
    """Whether a costed option's kernel is of a kind that was not measured."""
    return is_dense(option) or option.compute_kernel in OFFLOADED_KERNELS


def row_shard(
    table: TableConfig, rows: int, batch_size: int, *, pooled: bool = True
) -> TableConfig:
    """Describe some rows of a table as a table.

    Assumed is that ids are spread evenly over the rows: a shard is looked up, and has
    distinct ids of each count, in proportion to its rows.

    Args:
        table: The whole table.
        rows: Rows of the shard; 0 where there are more ranks than rows.
        batch_size: Samples that the kernel sees.
        pooled: Every shard has a partial sum for each bag; tables of sequences return
            only the rows that they hold.
    """
    if rows >= table.num_embeddings:
        return table
    share = rows / table.num_embeddings
    whole = table.profile_at(batch_size)
    per_bag = whole.num_lookups / (batch_size * table.num_features)
    # Each id of a bag falls into the shard with probability `share`.
    variance = (share * whole.pooling_std) ** 2 + share * (1 - share) * per_bag
    features = table.num_features
    return dataclasses.replace(
        table,
        num_embeddings=max(1, rows),
        pooling_factor=table.pooling_factor * share,
        num_features=features if pooled else max(1, round(features * share)),
        profile=FeatureProfile(
            batch_size=batch_size,
            num_lookups=whole.num_lookups * share,
            pooling_std=math.sqrt(variance),
            access_histogram=tuple(n * share for n in whole.access_histogram),
            weighted=whole.weighted,
        ),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class RankGroups:
    """Collectives among all ranks, inside a node, and between nodes.

    Those between nodes are among the ranks of one number in their nodes.
    """

    world: CommsModel
    node: CommsModel
    cross: CommsModel
    node_size: int
    """Ranks that a table-row-wise table is spread over."""

    def comms(
        self,
        sharding_type: str,
        pooled: bool,
        loads_CW3: Floats,
        batch_size: int,
    ) -> Floats:
        """Predict the collectives of a stage.

        Args:
            sharding_type: The stage's.
            pooled: Whether its outputs are pooled.
            loads_CW3: Bytes of ids and lengths that a rank is sent; output columns that
                it holds; bytes of gradients of its replicas.
            batch_size: Samples over all ranks.

        Returns:
            `C x W x 3` milliseconds: index, forward, backward.
        """
        index_CW, columns_CW, gradients_CW = np.moveaxis(loads_CW3, 2, 0)
        out = np.zeros(loads_CW3.shape)
        if sharding_type == _DATA_PARALLEL:
            out[..., 2] = self.world.all_reduce(gradients_CW)
            return out
        out[..., 0] = self.world.index_all_to_all(index_CW)
        if sharding_type in _NODE_TYPES:
            out[..., 1:] = self._by_node(columns_CW, batch_size)
        elif sharding_type == _ROW_WISE and pooled:
            out[..., 1:] = self.world.row_wise(columns_CW, batch_size)
        else:
            out[..., 1:] = self.world.all_to_all(columns_CW, batch_size)
        return out

    def _by_node(self, columns_CW: Floats, batch_size: int) -> Floats:
        """Reduce-scatter in each node, all-to-all between them; and their reverse."""
        count, world_size = columns_CW.shape
        size = self.node_size
        num_nodes = world_size // size
        columns = columns_CW.reshape(count, num_nodes, size)
        out = np.zeros((count, num_nodes, size, 2))
        if size > 1:
            flat = columns.reshape(-1, size)
            out += self.node.row_wise(flat, batch_size).reshape(out.shape)
        if num_nodes > 1:
            flat = columns.swapaxes(1, 2).reshape(-1, num_nodes)
            between = self.cross.all_to_all(flat, batch_size // size)
            out += between.reshape(count, size, num_nodes, 2).swapaxes(1, 2)
        return out.reshape(count, world_size, 2)


@dataclass(frozen=True, slots=True)
class StagedShards:
    """Shards of costed options, in kernels and stages."""

    options: tuple[ShardingOption, ...]
    option_N: Ints
    group_N: Ints
    encoding_UE: Floats
    """Of shards that differ: those of a row-wise table are mostly alike."""
    alike_N: Ints
    """Which of them each shard is like."""
    extra_N2: Floats
    """Forward and backward beside what the fused kernel takes [ms]."""
    loads_N3: Floats
    """What a shard adds to `RankGroups.comms`."""
    fused: FusionGroups
    batch_size: int
    """Samples over all ranks."""

    @property
    def shards(self) -> list[Shard]:
        """TorchRec's records of the shards."""
        return [shard for option in self.options for shard in option.shards]

    @property
    def encoding_NE(self) -> Floats:
        """Encoding of each shard."""
        return self.encoding_UE[self.alike_N]

    @property
    def rank_N(self) -> Ints:
        """Rank of each shard; only of placed options."""
        return np.array([shard.rank for shard in self.shards], dtype=np.int64)

    @property
    def stage_N(self) -> Ints:
        """Stage of each shard."""
        stages: Ints = np.asarray(self.fused.stages, dtype=np.int64)[self.group_N]
        return stages

    def reordered(self) -> tuple[Floats, npt.NDArray[np.bool_]]:
        """Which outputs TorchRec puts in order, and whether it does.

        In a pooled stage all of them, once the columns of one table lie in several
        shards; of sequences, those of split tables.

        Returns:
            Columns of each stage, and whether any of its tables is split.
        """
        counted_N = np.ones(len(self.option_N))
        split_N = np.zeros(len(self.option_N), dtype=bool)
        start = 0
        for option in self.options:
            own = slice(start, start + len(option.shards))
            start = own.stop
            if option.sharding_type == _GRID:
                # The rows of a column shard have its columns, too.
                counted_N[own] = [shard.offset[0] == 0 for shard in option.shards]
            if option.sharding_type in _SPLIT_TYPES:
                split_N[own] = counted_N[own].sum() > 1
            if not option.is_pooled:
                counted_N[own] *= split_N[own]
        num_stages = len(self.fused.stage_names)
        columns_S = np.zeros(num_stages)
        np.add.at(columns_S, self.stage_N, self.loads_N3[:, 1] * counted_N)
        has_S = np.zeros(num_stages, dtype=bool)
        has_S[self.stage_N[split_N]] = True
        return columns_S, has_S

    @property
    def stage_types(self) -> list[tuple[str, bool]]:
        """Sharding type of each stage, and whether its outputs are pooled."""
        found: dict[int, tuple[str, bool]] = {}
        for index, stage in zip(self.option_N, self.stage_N, strict=True):
            option = self.options[index]
            found[int(stage)] = (option.sharding_type, bool(option.is_pooled))
        return [found[stage] for stage in range(len(found))]


class ShardPricer:
    """Prices shards of every costed option; keeps the encodings that it computed."""

    def __init__(
        self,
        topology: Topology,
        reader: TableReader,
        cost_model: CostModel,
        groups: RankGroups,
        launch_ms: Callable[[], tuple[float, float]],
    ) -> None:
        """Take the models.

        Args:
            topology: The devices to plan for.
            reader: Describes options as tables.
            cost_model: Fused kernels.
            groups: Collectives.
            launch_ms: Forward and backward that any kernel costs.
        """
        self._topology = topology
        self._reader = reader
        self._cost_model = cost_model
        self.groups = groups
        self._launch_ms = launch_ms
        self._tables: dict[int, TableConfig] = {}
        self._known: dict[_Key, Floats] = {}
        self._ms_per_byte: float | None = None

    def stage(self, options: Sequence[ShardingOption]) -> StagedShards:
        """Describe the shards of costed options, with or without ranks."""
        fused = FusionGroups.from_keys(
            [fusion_key(o, self._reader, o.sharding_type) for o in options]
        )
        option_N = np.repeat(np.arange(len(options)), [len(o.shards) for o in options])
        encoding_UE, alike_N = self._encodings(options)
        return StagedShards(
            options=tuple(options),
            option_N=option_N,
            group_N=np.asarray(fused.groups, dtype=np.int64)[option_N],
            encoding_UE=encoding_UE,
            alike_N=alike_N,
            extra_N2=self._extras(options, encoding_UE, alike_N),
            loads_N3=np.concatenate([self._loads(option) for option in options]),
            fused=fused,
            batch_size=int(options[0].batch_size) * int(self._topology.world_size),
        )

    def single_compute(self, staged: StagedShards) -> Floats:
        """Forward and backward of each shard as if it were alone, `N x 2` [ms]."""
        alone = self._cost_model.predict_sums(staged.encoding_UE)
        return alone[staged.alike_N] + staged.extra_N2

    def fused_compute(self, staged: StagedShards) -> Floats:
        """Forward and backward of the fused kernels, `W x G x 2` [ms]."""
        shape = (self._topology.world_size, len(staged.fused.stages))
        sums = np.zeros((*shape, self._cost_model.encoding_dim))
        np.add.at(sums, (staged.rank_N, staged.group_N), staged.encoding_NE)
        return self._predict(sums)

    def uncertainty(self, staged: StagedShards) -> float:
        """Largest relative standard deviation of a rank's fused kernel."""
        shape = (self._topology.world_size * len(staged.fused.stages), -1)
        sums = np.zeros((shape[0], self._cost_model.encoding_dim))
        cell = staged.rank_N * len(staged.fused.stages) + staged.group_N
        np.add.at(sums, cell, staged.encoding_NE)
        return float(self._cost_model.relative_uncertainty(sums).max(initial=0.0))

    def comms(self, staged: StagedShards) -> Floats:
        """Index, forward and backward collectives, `W x S x 3` [ms]."""
        num_stages = len(staged.fused.stage_names)
        loads = np.zeros((self._topology.world_size, num_stages, 3))
        np.add.at(loads, (staged.rank_N, staged.stage_N), staged.loads_N3)
        comms: Floats = self.stage_comms(staged, loads[None])[0]
        comms[..., 1:] += order_costs(
            self.groups.world, *staged.reordered(), staged.batch_size
        )
        return comms

    def stage_comms(self, staged: StagedShards, loads_CWS3: Floats) -> Floats:
        """Collectives of the stages under other loads, `C x W x S x 3` [ms]."""
        costs = [
            self.groups.comms(kind, pooled, loads_CWS3[:, :, s], staged.batch_size)
            for s, (kind, pooled) in enumerate(staged.stage_types)
        ]
        return np.stack(costs, axis=2)

    def single_comms(self, staged: StagedShards) -> Floats:
        """Collectives of each shard as if its table were alone, `N x 3` [ms].

        Shards that TorchRec places one by one are alone, those of a node or of all
        ranks are together.
        """
        out = np.zeros((len(staged.option_N), 3))
        kinds = [(o.sharding_type, bool(o.is_pooled)) for o in staged.options]
        for kind in dict.fromkeys(kinds):
            size = self._block_size(kind[0])
            own = [n for n, found in enumerate(kinds) if found == kind]
            lines = np.flatnonzero(np.isin(staged.option_N, own))
            place = np.concatenate(
                [np.arange(len(staged.options[n].shards)) for n in own]
            )
            rank = place % size
            block = np.cumsum(rank == 0) - 1
            loads = np.zeros((int(block[-1]) + 1, self._topology.world_size, 3))
            loads[block, rank] = staged.loads_N3[lines]
            comms = self.groups.comms(*kind, loads, staged.batch_size)
            out[lines] = comms[block, rank]
        return out

    def _block_size(self, sharding_type: str) -> int:
        """How many shards of a table TorchRec places together, rank by rank."""
        if sharding_type in (_ROW_WISE, _DATA_PARALLEL):
            return int(self._topology.world_size)
        return self.groups.node_size if sharding_type in _NODE_TYPES else 1

    def features(self, options: Sequence[ShardingOption]) -> npt.NDArray[np.float32]:
        """Features of all shards of costed options, `N x F`."""
        return self._key_features(self._keys(options))

    def _predict(self, sums: Floats) -> Floats:
        flat = sums.reshape(-1, sums.shape[-1])
        return self._cost_model.predict_sums(flat).reshape(*sums.shape[:-1], 2)

    def _keys(self, options: Sequence[ShardingOption]) -> list[_Key]:
        keys = []
        for option in options:
            table = self._reader.table(option)
            self._tables[id(table)] = table
            samples = int(option.batch_size)
            if option.sharding_type != _DATA_PARALLEL:
                samples *= int(self._topology.world_size)
            pooled = bool(option.is_pooled)
            keys += [
                (id(table), int(s.size[0]), int(s.size[1]), samples, pooled)
                for s in option.shards
            ]
        return keys

    def _key_features(self, keys: Sequence[_Key]) -> npt.NDArray[np.float32]:
        parts: dict[_Key, npt.NDArray[np.float32]] = {}
        for batch_size in dict.fromkeys(key[3] for key in keys):
            own = list(dict.fromkeys(key for key in keys if key[3] == batch_size))
            tables = [
                row_shard(self._tables[table], rows, batch_size, pooled=pooled)
                for table, rows, _, _, pooled in own
            ]
            featurizer = ShardFeaturizer(tables, batch_size)
            rows_NF = featurizer.features(np.arange(len(own)), [k[2] for k in own])
            parts.update(zip(own, rows_NF, strict=True))
        return np.stack([parts[key] for key in keys])

    def _encodings(self, options: Sequence[ShardingOption]) -> tuple[Floats, Ints]:
        """Encodings of shards that differ, and which of them each shard is like."""
        number: dict[_Key, int] = {}
        alike = [number.setdefault(k, len(number)) for k in self._keys(options)]
        new = [key for key in number if key not in self._known]
        if new:
            found = self._cost_model.encode(self._key_features(new))
            self._known.update(zip(new, found, strict=True))
        return np.stack([self._known[key] for key in number]), np.array(alike)

    def _loads(self, option: ShardingOption) -> Floats:
        """Index bytes, output columns and gradient bytes of each shard, `N x 3`."""
        table = self._reader.table(option)
        known = table.profile
        pooling = table.pooling_factor if known is None else known.pooling_factor
        size_N2 = np.array([shard.size for shard in option.shards], dtype=np.float64)
        loads = np.zeros((len(size_N2), 3))
        if option.sharding_type == _DATA_PARALLEL:
            value_bytes = DATA_TYPE_BYTES[table.data_type]
            loads[:, 2] = size_N2.prod(axis=1) * value_bytes
            return loads
        batch_size = int(option.batch_size) * int(self._topology.world_size)
        id_bytes = _ID_BYTES + _LOOKUP_WEIGHT_BYTES * table.weighted
        share = np.minimum(1.0, size_N2[:, 0] / table.num_embeddings)
        features = table.num_features * (1.0 if option.is_pooled else share)
        # Every rank is told all lengths, be they 0.
        lengths = batch_size * table.num_features * _LENGTH_BYTES
        loads[:, 0] = batch_size * pooling * share * id_bytes + lengths
        loads[:, 1] = size_N2[:, 1] * features
        return loads

    def _extras(
        self, options: Sequence[ShardingOption], encoding_UE: Floats, alike_N: Ints
    ) -> Floats:
        extra = np.zeros((len(alike_N), 2))
        if not any(map(is_estimated, options)):
            return extra
        alone = self._cost_model.predict_sums(encoding_UE)
        # What is not a time shows in the kernel's own cost.
        alone = np.where(np.isfinite(alone), alone, 0.0)
        above_launch = np.maximum(alone - np.array(self._launch_ms()), 0.0)[alike_N]
        start = 0
        for option in options:
            own = slice(start, start + len(option.shards))
            start = own.stop
            if not is_estimated(option):
                continue
            if is_dense(option):
                kernel = self._dense_kernel(option)
                factors = np.array([kernel.forward, kernel.backward])
                extra[own] = above_launch[own] * (factors - 1)
                bytes_N = self._loads(option)[:, 2]
                extra[own, 1] += bytes_N * kernel.passes * self._byte_ms()
            else:
                extra[own] = above_launch[own] * (self._slowness(option) - 1)
        return extra

    def _dense_kernel(self, option: ShardingOption) -> _DenseKernel:
        known = _MEASURED_DENSE.get(self._topology.compute_device)
        if known is not None:
            return known
        slowness = self._slowness(option)
        passes = DP_ELEMENTWISE_KERNELS_PERF_FACTOR * slowness
        return _DenseKernel(slowness, slowness, passes)

    def _slowness(self, option: ShardingOption) -> float:
        """How much slower than a fused kernel TorchRec's estimate takes this one.

        Raises:
            PlannerError: TorchRec has no such kernel for the device.
        """
        topology, params = self._topology, option.cache_params

        def bandwidth(kernel: str) -> float:
            found = kernel_bw_lookup(
                compute_device=topology.compute_device,
                compute_kernel=kernel,
                hbm_mem_bw=topology.hbm_mem_bw,
                ddr_mem_bw=topology.ddr_mem_bw,
                hbm_to_ddr_mem_bw=topology.hbm_to_ddr_mem_bw,
                caching_ratio=params.load_factor if params else None,
                prefetch_pipeline=bool(params and params.prefetch_pipeline),
            )
            if found is None:
                raise PlannerError(
                    f"table '{table_name(option)}': TorchRec has no kernel '{kernel}' "
                    f"for '{topology.compute_device}'; leave it out of the "
                    "constraint's compute_kernels or of what the sharder offers"
                )
            return float(found)

        return bandwidth("fused") / bandwidth(option.compute_kernel)

    def _byte_ms(self) -> float:
        """What the fused kernel takes for a byte, without its launch [ms].

        TorchRec counts its bytes: ids, rows read, outputs.
        """
        if self._ms_per_byte is None:
            table = TableConfig(
                name="probe",
                num_embeddings=_PROBE_ROWS,
                embedding_dim=_PROBE_WIDTH,
                profile=uniform_profile(
                    batch_size=_PROBE_BATCH,
                    pooling_factor=_PROBE_LOOKUPS / _PROBE_BATCH,
                    num_embeddings=_PROBE_ROWS,
                ),
            )
            encoding = self._cost_model.encode(table_features([table], _PROBE_BATCH))
            forward = float(self._cost_model.predict_sums(encoding)[0, 0])
            row_bytes = _PROBE_WIDTH * 4
            num_bytes = _PROBE_LOOKUPS * (_ID_BYTES + row_bytes)
            num_bytes += _PROBE_BATCH * row_bytes
            above_launch = forward - self._launch_ms()[0]
            self._ms_per_byte = above_launch / num_bytes if above_launch > 0 else 0.0
        return self._ms_per_byte
