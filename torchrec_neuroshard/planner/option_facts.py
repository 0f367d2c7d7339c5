"""Facts about an option's table, from the option itself and from its sharder.

`note_sharders` records on options what only sharders know. `reader` adds what profiles
and constraints say about a table.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import Any

from torch import nn
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner.types import ShardingOption, Topology
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollectionInterface,
    EmbeddingCollectionInterface,
)

from torchrec_neuroshard.costs.task import WireCodec
from torchrec_neuroshard.hardware.device_types import is_accelerator
from torchrec_neuroshard.planner.compat import (
    is_sharder,
    optimizer_classes,
    removes_repeats,
    sharder_params,
    wire_codecs,
)
from torchrec_neuroshard.planner.spread_options import sample_shards
from torchrec_neuroshard.tables.sharding_types import (
    COLUMN_WISE,
    REDUCE_SCATTER,
    SHARDING_TYPES,
)
from torchrec_neuroshard.tables.table import COLUMN_MULTIPLE, DATA_TYPE_BYTES

_SUMMABLE = ("", "fp32", "fp16", "bf16")
"""Codecs whose values can be summed; "" is an unknown codec."""
_FUSED = EmbeddingComputeKernel.FUSED.value
_CACHING = EmbeddingComputeKernel.FUSED_UVM_CACHING.value
_DENSE = EmbeddingComputeKernel.DENSE.value

OFFLOADED_KERNELS: frozenset[str] = frozenset(
    {EmbeddingComputeKernel.FUSED_UVM.value, _CACHING}
)
"""Fused kernels with tables in host memory."""

_SEQUENCE_TABLES: weakref.WeakKeyDictionary[nn.Module, set[str]] = (
    weakref.WeakKeyDictionary()
)
"""Sharded module -> its tables that are not pooled."""

TABLE_MODULES = (EmbeddingBagCollectionInterface, EmbeddingCollectionInterface)
"""TorchRec's modules with tables."""

WORST_OPTIMIZER = ("adam", 2, 0)
OPTIMIZERS: Mapping[str, tuple[str, int, int]] = {
    name: kept
    for names, kept in (
        ("SGD EXACT_SGD NONE", ("sgd", 0, 0)),
        (
            "RowWiseAdagrad EXACT_ROWWISE_ADAGRAD EMAINPLACE_ROWWISE_ADAGRAD",
            ("rowwise_adagrad", 0, 1),
        ),
        ("ROWWISE_RMSPROP_AR", ("rowwise_adagrad", 0, 2)),  # since FBGEMM 1.9
        ("Adagrad EXACT_ADAGRAD LarsSGD LARS_SGD", ("adagrad", 1, 0)),
        (
            "PartialRowWiseAdam PARTIAL_ROWWISE_ADAM PartialRowWiseLAMB "
            "PARTIAL_ROWWISE_LAMB ENSEMBLE_ROWWISE_ADAGRAD",
            ("adagrad", 1, 1),
        ),
        ("Adam ADAM LAMB", WORST_OPTIMIZER),
    )
    for name in names.split()
}
"""Class of torch.optim or torchrec.optim, or member of FBGEMM's EmbOptimType -> the
optimizer whose cost it has, and FBGEMM's fp32 state values per weight and per row of a
shard. Other optimizers count as WORST_OPTIMIZER."""
_COUNTERS: Mapping[str, int] = {"COUNTER": 2, "COWCLIP": 2, "DECOUPLE_GLOBAL": 1}
"""Weight decay mode of row-wise Adagrad -> additional values per row."""
STATE_BYTES = 4
MANAGED_OPTIMIZERS = frozenset(("Adam", "ADAM", "LAMB", "ENSEMBLE_ROWWISE_ADAGRAD"))
"""Optimizers with one value per weight that ignores `enforce_hbm`."""

SHARDERS_OPTIMIZER, SHARDERS_COUNTERS, _CODECS, DISTINCT = (
    "sharders_optimizer",
    "sharders_counters",
    "wire_codecs",
    "looks_up_distinct",
)
_SHARDERS_CACHE_LOAD, _OUTPUT_BYTES = "sharders_cache_load", "output_bytes"
_SHARDERS_ENFORCE = "sharders_enforce_hbm"
"""Attributes of an option, set by `note_sharders`."""
_IS_POOLED, FACTS, VERDICT = "sums_rows", "table_facts", "verdict"
"""Attributes of an option with cached facts about it and its table."""


def device_tier(topology: Topology) -> str:
    """Return the memory of fused tables: "ddr" on CPUs, else "hbm"."""
    return "hbm" if is_accelerator(topology.compute_device) else "ddr"


def table_name(option: ShardingOption) -> str:
    """Return the path of the option's module and the table's name, "module.table"."""
    return f"{option.path}.{option.name}" if option.path else str(option.name)


def is_dense(option: ShardingOption) -> bool:
    """Whether the option runs PyTorch's own kernels instead of a fused one."""
    return bool(option.compute_kernel == _DENSE)


def has_cache(option: ShardingOption) -> bool:
    """Whether a table in the host's memory has a cache of rows on the device."""
    return bool(option.compute_kernel == _CACHING)


def has_open_cache(option: ShardingOption) -> bool:
    """Whether a table's cache size is left open."""
    is_open = has_cache(option) and cache_load(option) is None
    return is_open and not enforces_hbm(option)


def enforces_hbm(option: ShardingOption) -> bool:
    """Whether weights are on the device though the kernel is for host memory."""
    own = option.enforce_hbm
    asked = vars(option).get(_SHARDERS_ENFORCE) if own is None else own
    return option.compute_kernel in OFFLOADED_KERNELS and bool(asked)


def reads_host(option: ShardingOption) -> bool:
    """Whether a fused kernel's weights are in host memory."""
    return option.compute_kernel in OFFLOADED_KERNELS and not enforces_hbm(option)


def is_lfu(option: ShardingOption) -> bool:
    """Whether a table's cache evicts the least frequently used rows."""
    params = option.cache_params
    algorithm = params.algorithm if params is not None else None
    return algorithm is not None and algorithm.name == "LFU"


def loads_ahead(option: ShardingOption) -> bool:
    """Whether a table's cache supports prefetching."""
    params = option.cache_params
    return params is not None and bool(params.prefetch_pipeline)


def cache_load(option: ShardingOption) -> float | None:
    """Return the requested share of a table's rows in its cache.

    None: neither the constraint nor the sharder sets it, and TorchRec uses
    `UVM_CACHING_RATIO`.
    """
    params = option.cache_params
    load = params.load_factor if params is not None else None
    return vars(option).get(_SHARDERS_CACHE_LOAD) if load is None else float(load)


def is_fused(option: ShardingOption) -> bool:
    """Whether the option runs FBGEMM's fused kernel, with rows in any memory."""
    return option.compute_kernel == _FUSED or option.compute_kernel in OFFLOADED_KERNELS


def is_pooled(option: ShardingOption) -> bool:
    """Whether a table's rows are pooled per sample, not sent as sequences.

    TorchRec mistakes sequences for pooled tables if another module, for example a
    tower, contains their collection.
    """
    known: bool | None = vars(option).get(_IS_POOLED)
    if known is None:
        module = option.module[1]
        if module not in _SEQUENCE_TABLES:
            _SEQUENCE_TABLES[module] = {
                config.name
                for child in module.modules()
                if isinstance(child, EmbeddingCollectionInterface)
                for config in child.embedding_configs()
            }
        known = bool(option.is_pooled) and option.name not in _SEQUENCE_TABLES[module]
        vars(option)[_IS_POOLED] = known
    return known


def is_quantised(option: ShardingOption) -> bool:
    """Whether the option runs a kernel for quantised tables, which do not train."""
    return str(option.compute_kernel).startswith("quant")


def codec_fault(option: ShardingOption) -> str | None:
    """Return why the codecs of an option's collectives cannot encode its outputs."""
    for collective, codecs in _used_codecs(option).items():
        for codec in codecs:
            told = f"codec '{codec.name}' of {collective}"
            if collective == REDUCE_SCATTER and codec.name not in _SUMMABLE:
                return (
                    f"{told}: its values cannot be summed, as "
                    f"{option.sharding_type} sharding needs. Quantise this collective "
                    "to fp16 or bf16, or leave it out (comm_ops of "
                    "get_qcomm_codecs_registry)"
                )
            # For sequences, any number of ids may be sent to a rank.
            times = int(option.batch_size) if is_pooled(option) else 1
            for width in sorted({int(s.size[1]) for s in sample_shards(option)}):
                if width * times % codec.row_values:
                    return (
                        f"{told} needs rows of {codec.row_values} values, which "
                        f"{times} x {width} columns do not fill. Choose fp16, or an "
                        f"embedding_dim that is a multiple of {codec.row_values}"
                    )
    return None


def _used_codecs(option: ShardingOption) -> dict[str, tuple[WireCodec, WireCodec]]:
    """Return quantised collective of an option's outputs -> its codecs."""
    kind = SHARDING_TYPES.get(option.sharding_type)
    known = vars(option).get(_CODECS, {})
    if kind is None or not known:
        return {}
    ops = kind.comm_ops(pooled=is_pooled(option))
    return {op: known.get(op, _uncoded(output_bytes(option))) for op in ops}


@functools.cache
def _uncoded(value_bytes: float) -> tuple[WireCodec, WireCodec]:
    return (WireCodec(wire_bytes=value_bytes),) * 2


def output_bytes(option: ShardingOption) -> float:
    """Return the bytes per value of a table's outputs, and of their gradients.

    `output_dtype` in a constraint or in a sharder's fused_params sets the type. If
    tables of a module differ, TorchRec joins their outputs in the widest type.
    """
    return float(vars(option).get(_OUTPUT_BYTES, 4.0))


def option_codecs(option: ShardingOption) -> tuple[WireCodec, WireCodec]:
    """Return the codecs of an option's outputs and of their gradients."""
    used = _used_codecs(option).values()
    if not used:
        return _uncoded(output_bytes(option))
    # With two collectives in a row, the larger codec counts.
    forward, backward = (
        max((codecs[i] for codecs in used), key=lambda c: c.wire_bytes) for i in (0, 1)
    )
    return forward, backward


def is_even(options: Sequence[ShardingOption]) -> bool:
    """Whether all column shards of sequence tables in a module have the same width."""
    widths: dict[str, set[int]] = {}
    for option in options:
        if not is_pooled(option) and option.sharding_type == COLUMN_WISE:
            found = {int(s.size[1]) for s in option.shards}
            widths.setdefault(option.path, set()).update(found)
    return all(len(found) == 1 for found in widths.values())


def has_own_optimizer(option: ShardingOption) -> bool:
    """Whether `apply_optimizer_in_backward` gave the table an optimizer."""
    return bool(optimizer_classes(option.tensor))


def note_sharders(
    options: Sequence[ShardingOption], sharders: Mapping[str, Any]
) -> None:
    """Record on options what only their sharders know.

    That is: optimizer, cache size and `enforce_hbm` in the fused parameters, codecs of
    quantised collectives, whether repeated ids are looked up once, and the type of a
    module's outputs. TorchRec passes sharders only to enumerators and estimators. Other
    parts of a planner read the option's attributes, which copies keep.

    Args:
        options: Changed in place.
        sharders: Module type -> sharder, or the sharder's data in TorchRec's
            estimators, which does not overwrite what the sharder itself has set.
    """
    params_of = sharder_params(sharders)
    asked = {
        kind: (
            optimizer.name if isinstance(optimizer, Enum) else str(optimizer),
            params,
        )
        for kind, params in params_of.items()
        if (optimizer := params.get("optimizer")) is not None
    }
    loads = {
        kind: float(load)
        for kind, params in params_of.items()
        if (load := params.get("cache_load_factor"))
    }
    enforcing = {
        kind for kind, params in params_of.items() if params.get("enforce_hbm")
    }
    codecs = {kind: found for kind, s in sharders.items() if (found := wire_codecs(s))}
    known = {kind for kind, s in sharders.items() if is_sharder(s)}
    distinct = {kind for kind in known if removes_repeats(sharders[kind])}
    types = {kind: params.get("output_dtype") for kind, params in params_of.items()}
    sizes: dict[str, set[int]] = {}
    for option in options:
        own = option.output_dtype or types.get(option.module_type_key)
        size = 2 if own is not None and own.name in ("FP16", "BF16") else 4
        sizes.setdefault(option.path, set()).add(size)
    half = any(2 in found for found in sizes.values())
    is_told = asked or loads or enforcing or codecs or distinct or half
    for option in options if is_told else ():
        kind, attributes = option.module_type_key, vars(option)
        attributes.pop(FACTS, None)
        attributes.pop(VERDICT, None)
        if kind in asked:
            attributes[SHARDERS_OPTIMIZER] = asked[kind][0]
            attributes[SHARDERS_COUNTERS] = num_counters(*asked[kind])
        if kind in loads:
            attributes[_SHARDERS_CACHE_LOAD] = loads[kind]
        if kind in enforcing:
            attributes[_SHARDERS_ENFORCE] = True
        if kind in codecs and (kind in known or _CODECS not in attributes):
            attributes[_CODECS] = codecs[kind]
        if kind in distinct:
            attributes[DISTINCT] = True
        if half:  # a call with one table must not change what a module's call set
            attributes.setdefault(_OUTPUT_BYTES, max(sizes[option.path]))


def num_counters(optimizer: str, settings: Mapping[str, Any]) -> int:
    """Return the counters per row of a shard for an optimizer with these settings."""
    if OPTIMIZERS.get(optimizer, WORST_OPTIMIZER)[0] == "adam":
        extra = settings.get("extra_optimizer_config")
        return int(extra is not None and extra.use_rowwise_bias_correction)
    mode = settings.get("weight_decay_mode")
    is_counted = optimizer in ("RowWiseAdagrad", "EXACT_ROWWISE_ADAGRAD")
    return _COUNTERS.get(mode.name, 0) if is_counted and mode is not None else 0


def table_configs(module: nn.Module) -> Iterator[BaseEmbeddingConfig]:
    """Yield TorchRec's configurations of the tables in `module`."""
    for child in module.modules():
        if isinstance(child, EmbeddingBagCollectionInterface):
            yield from child.embedding_bag_configs()
        elif isinstance(child, EmbeddingCollectionInterface):
            yield from child.embedding_configs()


def is_modelled_config(config: BaseEmbeddingConfig) -> bool:
    """Whether the cost model covers tables of this configuration."""
    return bool(
        config.data_type.value.lower() in DATA_TYPE_BYTES
        and config.num_embeddings > 0
        and config.embedding_dim > 0
        and config.embedding_dim % COLUMN_MULTIPLE == 0
    )
