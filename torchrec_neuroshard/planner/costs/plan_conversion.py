"""TorchRec's placed options as placements of column shards.

Which options these are, and what tables they have, is for `table_reader`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner.types import (
    Shard,
    ShardingOption,
)

from torchrec_neuroshard.placement import (
    ColumnShard,
    KernelFactors,
    Placement,
    ShardingTask,
)
from torchrec_neuroshard.planner.compat import kernel_settings
from torchrec_neuroshard.planner.costs.kernels import priced_codecs
from torchrec_neuroshard.planner.options.table_reader import (
    TableReader,
    has_cache,
    is_fused,
    is_pooled,
    loads_ahead,
    table_name,
)
from torchrec_neuroshard.planner.topology import whole_nodes

__all__ = [
    "FusionGroups",
    "LoweredPlan",
    "OptionShards",
    "fusion_key",
    "lower_plan",
    "task_of",
]

Ints = npt.NDArray[np.int64]

_FUSED = EmbeddingComputeKernel.FUSED.value


def fusion_key(
    option: ShardingOption, reader: TableReader, sharding_type: str
) -> tuple[Any, ...]:
    """Key of the fused kernel that TorchRec puts the option's shards into.

    Tables of one module and sharding type fuse when weight type, pooling, optimizer,
    kernel and its parameters agree; where a fused kernel's rows are does not matter.
    """
    return (
        option.path,
        sharding_type,
        reader.kernel_key(option),
        kernel_settings(option),
        _cache_key(option),
        _FUSED if is_fused(option) else option.compute_kernel,
    )


def _cache_key(option: ShardingOption) -> tuple[Any, ...]:
    """How the cache of an offloaded table keeps it out of others' kernels.

    Neither where a table lives nor how much of it is cached does; prefetching does, and
    then every width has a kernel of its own.
    """
    params = option.cache_params
    if params is None:
        return ()
    names = ("algorithm", "reserved_memory", "precision", "prefetch_pipeline")
    values = ((name, getattr(params, name)) for name in names)
    key = tuple((name, repr(value)) for name, value in values if value is not None)
    if not (has_cache(option) and loads_ahead(option)):
        return key
    return (*key, *sorted({int(s.size[1]) for s in option.shards}))


@dataclass(frozen=True, slots=True)
class FusionGroups:
    """How TorchRec groups tables into kernels, and kernels into collectives."""

    groups: tuple[int, ...]
    """Per table: its fusion group."""
    stages: tuple[int, ...]
    """Per group: its stage; a module's tables of one sharding type share one."""
    stage_names: tuple[str, ...]

    @classmethod
    def from_keys(cls, keys: Sequence[tuple[Any, ...]]) -> FusionGroups:
        """Number the groups and stages in order of appearance.

        Args:
            keys: `fusion_key` of each table.
        """
        groups: dict[tuple[Any, ...], int] = {}
        for key in keys:
            groups.setdefault(key, len(groups))
        stages: dict[tuple[Any, ...], int] = {}
        for path, sharding_type, *_ in groups:
            stages.setdefault((path, sharding_type), len(stages))
        return cls(
            tuple(groups[key] for key in keys),
            tuple(stages[key[:2]] for key in groups),
            tuple(f"{path or 'model'} ({kind})" for path, kind in stages),
        )


def task_of(
    options: Sequence[ShardingOption],
    reader: TableReader,
    kernels: Sequence[KernelFactors | None],
) -> ShardingTask:
    """Describe options, with or without ranks, as ways to shard their tables.

    Args:
        options: Costed ones; several may be of one table.
        reader: Describes their tables and the devices.
        kernels: Of each option; see `ShardingTask`.
    """
    fused = FusionGroups.from_keys(
        [fusion_key(o, reader, o.sharding_type) for o in options]
    )
    ways: dict[str, list[int]] = {}
    for index, option in enumerate(options):
        ways.setdefault(table_name(option), []).append(index)
    world_size = reader.world_size
    return ShardingTask(
        tables=tuple(reader.table(o) for o in options),
        world_size=world_size,
        batch_size=int(options[0].batch_size) * world_size,
        local_world_size=whole_nodes(world_size, reader.topology.local_world_size),
        node_size=reader.node_size,
        groups=fused.groups,
        stages=fused.stages,
        stage_names=fused.stage_names,
        alternatives=tuple(tuple(w) for w in ways.values()),
        sharding_types=tuple(o.sharding_type for o in options),
        pooled=tuple(is_pooled(o) for o in options),
        codecs=tuple(priced_codecs(o, reader) for o in options),
        repeats=tuple(reader.repeats(o) for o in options),
        kernels=tuple(kernels),
    )


@dataclass(frozen=True, slots=True)
class OptionShards:
    """Shards of options that the cost model has a price for, as arrays."""

    options: tuple[ShardingOption, ...]
    task: ShardingTask
    """Its tables are the options, in their order."""
    table_N: Ints
    """Option of each shard."""
    place_N: Ints
    """Which of its option's shards it is."""
    width_N: Ints
    """Columns."""
    rows_N: Ints
    """Rows."""
    is_first_N: npt.NDArray[np.bool_]
    """Whether a shard begins at the first row."""

    @classmethod
    def of(
        cls,
        options: Sequence[ShardingOption],
        reader: TableReader,
        kernels: Sequence[KernelFactors | None],
    ) -> OptionShards:
        """Describe options and their shards; see `task_of`."""
        counts = [len(o.shards) for o in options]
        size_N2 = np.array([s.size for o in options for s in o.shards], dtype=np.int64)
        first_row = [s.offset[0] for o in options for s in o.shards]
        return cls(
            options=tuple(options),
            task=task_of(options, reader, kernels),
            table_N=np.repeat(np.arange(len(options)), counts),
            place_N=np.concatenate([np.arange(n) for n in counts]),
            width_N=size_N2[:, 1],
            rows_N=size_N2[:, 0],
            is_first_N=np.array(first_row) == 0,
        )

    @property
    def shards(self) -> list[Shard]:
        """TorchRec's records of the shards."""
        return [shard for option in self.options for shard in option.shards]

    @property
    def rank_N(self) -> Ints:
        """Rank of each shard; only of placed options."""
        return np.array([shard.rank for shard in self.shards], dtype=np.int64)


@dataclass(frozen=True, slots=True)
class LoweredPlan:
    """A plan of sharding options, as far as a placement can express it."""

    task: ShardingTask | None
    """None when no option is column-sharded."""
    placement: Placement
    column_sharded: tuple[ShardingOption, ...]
    """The option behind each of the task's tables."""
    others: tuple[ShardingOption, ...]
    """Options outside the placement."""


def lower_plan(plan: Sequence[ShardingOption], reader: TableReader) -> LoweredPlan:
    """Describe a plan whose shards have ranks.

    Shards of one table on one rank stay apart, as TorchRec runs them. Memory limits
    and widths are left open: the task says what is there, not what is allowed.
    """
    column_sharded: list[ShardingOption] = []
    others: list[ShardingOption] = []
    for option in plan:
        (column_sharded if reader.is_column_sharded(option) else others).append(option)
    if not column_sharded:
        return LoweredPlan(None, Placement(reader.world_size, ()), (), tuple(others))
    shards = []
    for index, option in enumerate(column_sharded):
        for shard in option.shards:
            assert shard.rank is not None, "only plans with ranks can be lowered"
            shards.append(
                ColumnShard(
                    index, int(shard.offset[1]), int(shard.size[1]), int(shard.rank)
                )
            )
    task = task_of(column_sharded, reader, [None] * len(column_sharded))
    placement = Placement(reader.world_size, tuple(sorted(shards)))
    return LoweredPlan(task, placement, tuple(column_sharded), tuple(others))
