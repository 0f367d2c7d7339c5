"""Options that TorchRec offers, but that a device does not train as it should.

Some stop with an error, others return wrong values. Each was seen on ranks that train
tables beside unsharded ones (tests/distributed/test_support.py).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torchrec.distributed.planner.types import ShardingOption
from torchrec.modules.embedding_configs import (
    BaseEmbeddingConfig,
    EmbeddingBagConfig,
    PoolingType,
)
from torchrec.modules.embedding_tower import EmbeddingTower, EmbeddingTowerCollection
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
from torchrec.modules.itep_embedding_modules import (
    ITEPEmbeddingBagCollection,
    ITEPEmbeddingCollection,
)

from torchrec_neuroshard.planner.compat import torchrec_release
from torchrec_neuroshard.planner.option_facts import (
    OFFLOADED_KERNELS,
    is_dense,
    is_pooled,
    is_quantised,
    table_configs,
)
from torchrec_neuroshard.planner.spread_options import sample_shards
from torchrec_neuroshard.tables.sharding_types import SHARDING_TYPES, ShardingType

_CPU_TYPES = ("FP32", "FP16")
_GPU_TYPES = (*_CPU_TYPES, "NFP8")
"""Data types that FBGEMM's lookups train."""
_CUSTOM = "customized_kernel"


def untrained_fault(
    option: ShardingOption,
    config: BaseEmbeddingConfig | None,
    batch_sizes: Collection[float],
    on_gpu: bool,
) -> str | None:
    """Return why a device does not train an option; None if it does.

    Args:
        option: Any option.
        config: TorchRec's configuration of its table.
        batch_sizes: Of those features of its module whose batch size is another than
            the option's.
        on_gpu: Whether the devices are GPUs.
    """
    name = str(option.sharding_type)
    kind = SHARDING_TYPES.get(name, ShardingType(name=name))
    if kind.divides_means == "nobody" and is_mean(config):
        return f"{name} returns sums where pooling is MEAN. Allow other sharding types"
    if is_dense(option) and isinstance(option.module[1], FusedEmbeddingBagCollection):
        return (
            "TorchRec reduces gradients of data_parallel tables of a "
            "FusedEmbeddingBagCollection twice, so the second step fails. Allow "
            "sharding types other than data_parallel"
        )
    varied = f"{min(batch_sizes, default=0):g} beside {option.batch_size}"
    if batch_sizes and torchrec_release() < kind.varies_batches_since:
        release = ".".join(map(str, kind.varies_batches_since))
        return (
            f"before torchrec {release} {name} takes one batch size for all features "
            f"of a module; it has {varied}. Allow other sharding types"
        )
    if is_quantised(option) or option.compute_kernel == _CUSTOM:
        return None
    types = _GPU_TYPES if on_gpu else _CPU_TYPES
    if config is not None and config.data_type.value not in types:
        return (
            f"on {'GPUs' if on_gpu else 'CPUs'} FBGEMM trains tables of "
            f"{', '.join(types)} alone, and data_type is {config.data_type.value}. "
            "Change it"
        )
    if on_gpu:
        return None
    return _module_fault(option) or (
        _varied_batch_fault(option, varied) if batch_sizes else None
    )


def _module_fault(option: ShardingOption) -> str | None:
    """Return why CPUs do not train an option with any batch."""
    module = option.module[1]
    if isinstance(module, EmbeddingTower | EmbeddingTowerCollection):
        return (
            "TorchRec builds towers on GPUs only. Plan for GPUs, or take the tables "
            "out of their tower"
        )
    if isinstance(module, ITEPEmbeddingBagCollection | ITEPEmbeddingCollection):
        return (
            "FBGEMM prunes embeddings during training (ITEP) on GPUs only. Plan for "
            "GPUs, or take the tables out of their ITEP module"
        )
    if not is_dense(option):
        return None
    if not is_pooled(option):
        return (
            f"on CPUs FBGEMM's {option.compute_kernel} kernel pools the ids of a "
            "sample, but this table's module returns every row. Allow sharding "
            "types other than data_parallel"
        )
    return None


def _varied_batch_fault(option: ShardingOption, varied: str) -> str | None:
    """Return why CPUs do not train an option with several batch sizes in its module."""
    kind = SHARDING_TYPES.get(option.sharding_type)
    if not is_pooled(option):
        return (
            "on CPUs TorchRec adds gradients of repeated samples to other rows, so "
            f"the features of this module need one batch size; they have {varied}. "
            "Repeat the samples in the input and leave out batch_sizes"
        )
    if is_dense(option):
        reason = f"on CPUs FBGEMM's {option.compute_kernel} kernel takes"
    elif kind is not None and kind.splits_rows:
        reason = f"over gloo {option.sharding_type} sharding takes"
    else:
        return None
    return (
        f"{reason} one batch size for all features of a module; it has {varied}. "
        "Allow other sharding types"
    )


def mixed_means(options: Sequence[ShardingOption], room: float) -> dict[int, str]:
    """Return the `id` of options that would make means wrong -> why.

    For row-wise and table-row-wise tables with pooling MEAN, TorchRec divides the
    outputs of their module by the numbers of ids. It spares only SUM tables that are
    row-wise, too. So such a module needs all its tables row-wise, or none of its MEAN
    tables. The first is chosen only if a MEAN table can be nothing else on a device.

    Args:
        options: All options that are left for the tables.
        room: Bytes of the largest device.
    """
    modules: dict[str, list[ShardingOption]] = {}
    for option in options:
        modules.setdefault(option.path, []).append(option)
    found: dict[int, str] = {}
    for listed in modules.values():
        means = {c.name for c in table_configs(listed[0].module[1]) if is_mean(c)}
        by_rows = {id(option) for option in listed if divides_module(option)}
        others = [option for option in listed if id(option) not in by_rows]
        own_of: dict[str, list[ShardingOption]] = {}
        for option in listed:
            own_of.setdefault(option.name, []).append(option)
        if len(own_of) == 1 or not (means and by_rows and others):
            continue
        fitting = {
            name
            for name, own in own_of.items()
            if fits_without_rows(own, own[0].tensor.shape[0], room)
        }
        need_rows = means - fitting
        if needing := sorted(need_rows & own_of.keys()):
            found |= {
                id(option): f"TorchRec divides its outputs by their number of ids, "
                f"since table '{needing[0]}' of the same module has pooling MEAN and "
                "only fits row-wise. Allow row_wise for this table, too, or move one "
                "of them to another collection"
                for option in others
            }
        else:
            found |= {
                id(option): "a row-wise table with pooling MEAN makes TorchRec divide "
                "the outputs of its module's other tables, too. Allow other sharding "
                "types, or move the table to a collection of its own"
                for option in listed
                if id(option) in by_rows and option.name in means
            }
    return found


def divides_module(option: ShardingOption) -> bool:
    """Whether a MEAN table of this type makes TorchRec divide its module's outputs."""
    kind = SHARDING_TYPES.get(option.sharding_type)
    return kind is not None and kind.divides_means == "module"


def fits_without_rows(
    options: Sequence[ShardingOption], num_rows: int, room: float
) -> bool:
    """Whether a table of so many rows fits on a device, or may be in host memory only.

    Args:
        options: All options of a table that differs only in rows.
        num_rows: The table's rows.
        room: Bytes of the largest device.
    """
    in_host_memory = all(map(_is_offloaded, options))
    return any(
        in_host_memory
        if _is_offloaded(option)
        else _largest_bytes(option) * num_rows <= room * option.tensor.shape[0]
        for option in options
        if not divides_module(option)
    )


def is_mean(config: BaseEmbeddingConfig | None) -> bool:
    """Whether a table pools the mean of its rows."""
    return isinstance(config, EmbeddingBagConfig) and (
        config.pooling == PoolingType.MEAN
    )


def _is_offloaded(option: ShardingOption) -> bool:
    return option.compute_kernel in OFFLOADED_KERNELS


def _largest_bytes(option: ShardingOption) -> int:
    """Return the bytes of the weights of an option's largest shard."""
    size = max(int(s.size[0]) * int(s.size[1]) for s in sample_shards(option))
    return size * int(option.tensor.element_size())
