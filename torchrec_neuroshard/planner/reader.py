"""TorchRec's sharding options as tables of the cost model.

An option is *column-sharded* if each shard is whole columns of a fused table on one
rank: table-wise, column-wise or table-column-wise. An option *has a cost* if the cost
model covers it: column shards, row shards, replicas, and tables in other memory than
the device's. All other options (quantised tables, odd widths, other modules) keep
TorchRec's costs. `ways` decides which options with a cost a search may place.
"""

from __future__ import annotations

import dataclasses
import math
import sys
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from torch import nn
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner.constants import POOLING_FACTOR
from torchrec.distributed.planner.types import (
    ParameterConstraints,
    Shard,
    ShardingOption,
    Topology,
)
from torchrec.modules.embedding_configs import BaseEmbeddingConfig, EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollectionInterface
from torchrec.modules.fused_embedding_modules import (
    FusedEmbeddingBagCollection,
    FusedEmbeddingCollection,
)

from torchrec_neuroshard.errors import check_kind
from torchrec_neuroshard.hardware.device_types import is_accelerator
from torchrec_neuroshard.planner.compat import (
    cuts_wide_bags,
    id_map_bytes,
    optimizer_arguments,
    optimizer_classes,
)
from torchrec_neuroshard.planner.groups import node_size, pod_fault, sharding_group
from torchrec_neuroshard.planner.option_facts import (
    DISTINCT,
    FACTS,
    OPTIMIZERS,
    SHARDERS_COUNTERS,
    SHARDERS_OPTIMIZER,
    STATE_BYTES,
    VERDICT,
    WORST_OPTIMIZER,
    codec_fault,
    has_cache,
    is_dense,
    is_modelled_config,
    is_pooled,
    is_quantised,
    num_counters,
    table_configs,
    table_name,
)
from torchrec_neuroshard.planner.spread_options import sample_shards
from torchrec_neuroshard.planner.table_keys import constraint_on
from torchrec_neuroshard.planner.untrained import mixed_means, untrained_fault
from torchrec_neuroshard.tables.profile import FeatureProfile, merge_profiles
from torchrec_neuroshard.tables.sharding_types import (
    COLUMN_SHARDED_TYPES,
    MISCOUNTED_TYPES,
    NODE_TYPES,
    SHARDING_TYPES,
)
from torchrec_neuroshard.tables.table import (
    COLUMN_MULTIPLE,
    MAX_CUDA_COLUMNS,
    TableConfig,
)

_FUSED = EmbeddingComputeKernel.FUSED.value

DEFAULT_INPUTS = "TorchRec's default of 1 id"
"""Source of the inputs of features without profile and constraints."""
GIVEN_ONE = "1 id, from the constraints or TorchRec's default"
"""The same if there are constraints."""


@dataclass(frozen=True, slots=True)
class _Module:
    """Facts about a module."""

    configs: Mapping[str, BaseEmbeddingConfig]
    is_weighted: bool
    optimizer: str | None
    """The common optimizer of a fused collection's tables."""
    batch_sizes: frozenset[float]
    """Batch sizes of single features, by the constraints and profiles."""


class _Cached:
    """Base class of what is known of an option, and computed again where it is lost."""

    __slots__ = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


@dataclass(slots=True, eq=False)
class _Facts(_Cached):
    """Facts about an option's table that do not depend on its sharding."""

    reader: TableReader
    is_dense: bool
    """Whether the option is dense; dense kernels ignore fused_params."""
    module: _Module
    config: BaseEmbeddingConfig | None
    is_modelled: bool
    """Whether the cost model covers the table's configuration."""
    optimizer: str
    """TorchRec's or FBGEMM's name of the optimizer."""
    state_bytes: tuple[int, int]
    """Bytes of optimizer state per weight and per row."""
    id_map_bytes: tuple[float, float]
    """Bytes of the map from ids to rows, per row and per id of a rank's batch."""
    bags: float
    """Bags per sample, over all features."""
    kernel: tuple[Any, ...]
    """Properties by which TorchRec separates kernels."""
    table: TableConfig | None = None
    """The table; None until it is first needed. Copies of options share it."""


@dataclass(slots=True, eq=False)
class _Verdict(_Cached):
    """Whether an option with its type, kernel and shards has a cost and can run.

    It is invalid for the shards of a copy.
    """

    reader: TableReader
    shards: Sequence[Shard]
    sharding_type: str
    compute_kernel: str
    has_cost: bool
    fault: str | None


class TableReader:
    """Reads TorchRec's sharding options as tables of the cost model.

    An option's optimizer is that of its parameter or module, else the one recorded by
    `note_sharders`, else TorchRec's default.

    Attributes:
        topology: The devices to plan for.
        constraints: Table name -> TorchRec's constraints on the table.
        world_size: Number of ranks.
        node_size: Ranks over which TorchRec spreads a table-row-wise table.
        on_gpu: Whether the devices are GPUs.
    """

    def __init__(
        self,
        topology: Topology,
        constraints: Mapping[str, ParameterConstraints] | None = None,
        profiles: Mapping[str, FeatureProfile] | None = None,
    ) -> None:
        """Take the devices, and the constraints and profiles that describe inputs."""
        self.topology = topology
        self.constraints = constraints or {}
        self.world_size = int(topology.world_size)
        self.node_size = node_size(topology)
        self._pod_fault = pod_fault(topology)
        # `DMPCollection` is told the size of its pods.
        self._spans_nodes = sharding_group(topology) is None and self.node_size > int(
            topology.local_world_size
        )
        self.on_gpu = is_accelerator(topology.compute_device)
        self._profiles = profiles or {}
        for name, profile in self._profiles.items():
            check_kind(f"the profile of feature '{name}'", profile, FeatureProfile)
        self._modules: weakref.WeakKeyDictionary[nn.Module, _Module] = (
            weakref.WeakKeyDictionary()
        )
        self._tables: dict[tuple[Any, ...], TableConfig] = {}

    def constraint(self, option: ShardingOption) -> ParameterConstraints | None:
        """Return TorchRec's constraints on the option's table."""
        return constraint_on(self.constraints, option.path, option.name)

    def _module(self, option: ShardingOption) -> _Module:
        """Return facts about the option's module, read once."""
        module = option.module[1]
        known = self._modules.get(module)
        if known is None:
            configs = {c.name: c for c in table_configs(module)}
            weighted = any(
                isinstance(child, EmbeddingBagCollectionInterface)
                and bool(child.is_weighted())
                for child in module.modules()
            )
            shared: str | None = None
            if isinstance(
                module, FusedEmbeddingBagCollection | FusedEmbeddingCollection
            ):
                shared = module.optimizer_type().__name__
            sizes = frozenset(
                share * option.batch_size
                for name, config in configs.items()
                for share in self._batch_shares(
                    option.path, name, config.feature_names or [name], option.batch_size
                )
            )
            known = _Module(configs, weighted, shared, sizes)
            self._modules[module] = known
        return known

    def share_facts(self, options: Iterable[ShardingOption]) -> None:
        """Compute the common facts of one table's options only once."""
        found: dict[tuple[Any, ...], _Facts] = {}
        for option in options:
            key = option.path, option.name, is_dense(option)
            if key not in found:
                found[key] = self.facts(option)
            vars(option)[FACTS] = found[key]

    def facts(self, option: ShardingOption) -> _Facts:
        """Return the facts about the option's table; copies share the object."""
        known: _Facts | None = vars(option).get(FACTS)
        if (
            known is None
            or known.reader is not self
            or known.is_dense != is_dense(option)
        ):
            known = vars(option)[FACTS] = self._find_facts(option)
        return known

    def _find_facts(self, option: ShardingOption) -> _Facts:
        module, tensor, noted = self._module(option), option.tensor, vars(option)
        config, dense = module.configs.get(option.name), is_dense(option)
        own, arguments = optimizer_classes(tensor), optimizer_arguments(tensor)
        if own or module.optimizer is not None:
            optimizer = own[0].__name__ if own else str(module.optimizer)
        else:
            # Dense kernels ignore fused_params; FBGEMM's default is SGD.
            asked = None if dense else noted.get(SHARDERS_OPTIMIZER)
            optimizer = asked or "SGD"
        _, per_value, per_row = OPTIMIZERS.get(optimizer, WORST_OPTIMIZER)
        if arguments:
            per_row += num_counters(optimizer, arguments[0])
        elif optimizer == noted.get(SHARDERS_OPTIMIZER):
            per_row += noted[SHARDERS_COUNTERS]
        features = list(config.feature_names if config else ()) or [option.name]
        pooling = config.pooling if isinstance(config, EmbeddingBagConfig) else None
        return _Facts(
            reader=self,
            is_dense=dense,
            module=module,
            config=config,
            is_modelled=config is not None
            and is_modelled_config(config)
            and tensor.dim() == 2,
            optimizer=optimizer,
            state_bytes=(STATE_BYTES * per_value, STATE_BYTES * per_row),
            id_map_bytes=id_map_bytes(
                option.module[1], option.name, max(1, int(tensor.shape[0]))
            ),
            bags=sum(
                self._batch_shares(
                    option.path, option.name, features, option.batch_size
                )
            ),
            kernel=(
                str(config and config.data_type),
                str(pooling),
                bool(option.has_feature_processor),
                tuple(c.__name__ for c in own),
                repr(arguments),
            ),
        )

    def config(self, option: ShardingOption) -> BaseEmbeddingConfig | None:
        """Return TorchRec's configuration of the option's table, if it has one."""
        return self.facts(option).config

    def most_columns(self, *, in_fused_bags: bool) -> int:
        """Return the most columns of a shard that the devices' kernels support.

        On GPUs the limit also holds for replicated tables and tables in host memory.

        Args:
            in_fused_bags: Whether fused kernels pool the table's rows.
        """
        if not self.on_gpu:
            return sys.maxsize
        return MAX_CUDA_COLUMNS // (2 if in_fused_bags and cuts_wide_bags() else 1)

    def run_faults(
        self, options: Sequence[ShardingOption], room: float = math.inf
    ) -> dict[int, str]:
        """Return the `id` of options that cannot run, or not together -> why.

        Args:
            options: The options of a plan, or all that are left for the tables.
            room: Bytes of the largest device.
        """
        faults = {id(o): fault for o in options if (fault := self.run_fault(o))}
        return faults | mixed_means([o for o in options if id(o) not in faults], room)

    def run_fault(self, option: ShardingOption) -> str | None:
        """Return why an option cannot run on any ranks; None if it can.

        On GPUs, FBGEMM's kernels for replicas need the same widths as fused kernels.
        """
        return self._verdict(option).fault

    def _find_fault(self, option: ShardingOption) -> str | None:
        any_width = is_quantised(option) or (not self.on_gpu and is_dense(option))
        widths = {0} if any_width else {int(s.size[1]) for s in sample_shards(option)}
        if odd := [w for w in widths if w % COLUMN_MULTIPLE]:
            whole = int(option.tensor.shape[-1])
            way_out = f"Pad embedding_dim ({whole})"
            if not whole % COLUMN_MULTIPLE:
                way_out = "Split its columns at such multiples"
            elif not self.on_gpu and is_pooled(option):
                way_out += ", or allow data_parallel"
            return (
                "FBGEMM's kernels need widths that are multiples of "
                f"{COLUMN_MULTIPLE}, got {min(odd)}. {way_out}"
            )
        in_fused_bags = is_pooled(option) and not is_dense(option)
        most = self.most_columns(in_fused_bags=in_fused_bags)
        if (widest := max(widths)) > most:
            return (
                f"kernels on GPUs support at most {most:,} columns, got {widest:,}. "
                f"Allow column_wise sharding with min_partition of at most {most}"
            )
        params = option.cache_params
        load = params.load_factor if has_cache(option) and params else None
        if load is not None and not 0 < load < 1:
            return (
                f"a cache needs a load_factor above 0 and below 1, got {load:g}. "
                "Change it in cache_params, or allow kernels without a cache"
            )
        others = self.facts(option).module.batch_sizes - {option.batch_size}
        if fault := untrained_fault(option, self.config(option), others, self.on_gpu):
            return fault
        if option.sharding_type in NODE_TYPES and self._pod_fault:
            return self._pod_fault
        if option.sharding_type in MISCOUNTED_TYPES and (
            fault := self._row_state_fault(option)
        ):
            return fault
        return codec_fault(option)

    def _row_state_fault(self, option: ShardingOption) -> str | None:
        """Return why TorchRec cannot build the optimizer state of a grid.

        TorchRec counts the blocks of a grid by the ranks of a node, and takes a shard
        with all rows of its table for a column-wise one.
        """
        facts, (rows, width) = self.facts(option), option.tensor.shape
        first = option.shards[0].size
        if not facts.state_bytes[1] or int(first[1]) == int(width):
            return None
        if self._spans_nodes:
            where = f"in pods of {self.node_size} ranks on several nodes"
        elif int(first[0]) == int(rows) and self.node_size > 1:
            where = "if one rank of a node holds all rows"
        else:
            return None
        return (
            f"TorchRec cannot build the state per row of {facts.optimizer} for grid "
            f"shards of {int(first[1])} of {int(width)} columns {where}. Allow other "
            f"sharding types, or set min_partition to {int(width)}"
        )

    def _is_weighted(self, option: ShardingOption) -> bool:
        """Whether lookups have weights, from the input or a feature processor.

        The option's own flag is wrong for sequences: TorchRec's estimator copies it
        from the constraint, but sequences have no weights.
        """
        return bool(option.has_feature_processor) or self._module(option).is_weighted

    def is_column_sharded(self, option: ShardingOption) -> bool:
        """Whether each shard is whole columns of a fused table on one rank."""
        return (
            option.sharding_type in COLUMN_SHARDED_TYPES
            and option.compute_kernel == _FUSED
            and self.has_cost(option)
        )

    def has_cost(self, option: ShardingOption) -> bool:
        """Whether the cost model covers the option; see the module docstring."""
        return self._verdict(option).has_cost

    def _verdict(self, option: ShardingOption) -> _Verdict:
        """Return whether an option has a cost and can run, computed once."""
        known: _Verdict | None = vars(option).get(VERDICT)
        shards = sample_shards(option)
        if (
            known is None
            or known.shards is not shards
            or known.reader is not self
            or known.sharding_type != option.sharding_type
            or known.compute_kernel != option.compute_kernel
        ):
            kind = SHARDING_TYPES.get(option.sharding_type)
            known = vars(option)[VERDICT] = _Verdict(
                reader=self,
                shards=shards,
                sharding_type=option.sharding_type,
                compute_kernel=option.compute_kernel,
                has_cost=kind is not None
                and self._is_modelled(option)
                and kind.is_replicated == is_dense(option)
                and not is_quantised(option),
                fault=self._find_fault(option),
            )
        return known

    def _is_modelled(self, option: ShardingOption) -> bool:
        if not self.facts(option).is_modelled:
            return False
        widths = {s.size[1] for s in sample_shards(option)}
        return all(width > 0 and width % COLUMN_MULTIPLE == 0 for width in widths)

    def optimizer(self, option: ShardingOption) -> str:
        """Return the cost models' name of the table's optimizer."""
        return OPTIMIZERS.get(self.optimizer_name(option), WORST_OPTIMIZER)[0]

    def optimizer_name(self, option: ShardingOption) -> str:
        """Return TorchRec's or FBGEMM's name of the table's optimizer."""
        return self.facts(option).optimizer

    def state_bytes(self, option: ShardingOption) -> tuple[int, int]:
        """Return the bytes of optimizer state per weight, and per row of a shard."""
        return self.facts(option).state_bytes

    def table(self, option: ShardingOption) -> TableConfig:
        """Return the option's table for the cost model, whatever its shards.

        Features with a profile are described by it, other features by the constraints'
        pooling factors.

        Args:
            option: An option with a cost.
        """
        facts = self.facts(option)
        if facts.table is None:
            facts.table = self._described(option)
        return facts.table

    def looks_up_distinct(self, option: ShardingOption) -> bool:
        """Whether repeated ids of a local batch are sent and looked up only once."""
        return not is_pooled(option) and bool(vars(option).get(DISTINCT))

    def repeats(self, option: ShardingOption) -> float:
        """Return the ids in a table's samples divided by the ids looked up.

        Args:
            option: An option with a cost.
        """
        if not self.looks_up_distinct(option):
            return 1.0
        looked_up = self.table(option).pooling_factor
        if not looked_up > 0:
            return 1.0
        config = self.config(option)
        features = config.feature_names if config is not None else []
        given = self.pooling_factor(
            option.path, option.name, features, option.batch_size
        )
        return max(1.0, given / looked_up)

    def _described(self, option: ShardingOption) -> TableConfig:
        """Return the table as one object that all its options share."""
        config, optimizer = self.config(option), self.optimizer(option)
        assert config is not None, "the option has a cost"
        features = list(config.feature_names or []) or [option.name]
        pooling = self._pooling_factors(
            self.constraint(option),
            option.input_lengths,
            len(features),
            option.num_poolings,
        )
        shares = self._batch_shares(
            option.path, option.name, features, option.batch_size
        )
        key = (
            option.path,
            option.name,
            option.tensor.shape,
            tuple(features),
            config.data_type.value,
            tuple(pooling),
            tuple(shares),
            option.batch_size,
            self._is_weighted(option),
            is_pooled(option),
            self.looks_up_distinct(option),
            optimizer,
        )
        if key not in self._tables:
            self._tables[key] = self._describe(
                option, config, optimizer, features, pooling, shares
            )
        return self._tables[key]

    def _describe(
        self,
        option: ShardingOption,
        config: BaseEmbeddingConfig,
        optimizer: str,
        features: Sequence[str],
        pooling: Sequence[float],
        shares: Sequence[float],
    ) -> TableConfig:
        """Return a table; each feature has ids per sample and a share of the batch."""
        rows, width = (int(n) for n in option.tensor.shape)
        batch_size = option.batch_size * self.world_size
        weighted = self._is_weighted(option)
        distinct = self.looks_up_distinct(option)
        total = sum(p * s for p, s in zip(pooling, shares, strict=True))
        profile: FeatureProfile | None = None
        if distinct or any(f in self._profiles for f in features):
            profile = merge_profiles(
                [
                    self._profile(f, p, batch_size, s, rows)
                    for f, p, s in zip(features, pooling, shares, strict=True)
                ]
            )
            if distinct:
                profile = profile.distinct_in_parts(self.world_size, rows)
            if any(self.facts(option).id_map_bytes):
                profile = dataclasses.replace(profile, hot_rows=None)
            total = profile.pooling_factor
        num_features, outputs = len(features), None
        if sum(shares) > 0 and sum(shares) != num_features:
            outputs = sum(shares)
        return TableConfig(
            name=table_name(option),
            num_embeddings=rows,
            embedding_dim=width,
            pooling_factor=total,
            num_features=num_features,
            outputs_per_sample=outputs,
            pooled=is_pooled(option),
            profile=profile,
            weighted=weighted,
            data_type=config.data_type.value.lower(),
            optimizer=optimizer,
        )

    def inputs_from(self, option: ShardingOption) -> dict[str, str]:
        """Return feature -> the source of its ids per sample and their repeats.

        Args:
            option: An option with a cost.
        """
        config = self.config(option)
        features = list(config.feature_names or []) if config else []
        constraint = self.constraint(option)
        found = {}
        for feature in features or [option.name]:
            known = self._profiles.get(feature)
            if known is not None and known.access_histogram:
                found[feature] = "profiles of batches"
            elif known is not None:
                found[feature] = "profiles without repeats, which are assumed Zipfian"
            elif constraint is None:
                found[feature] = DEFAULT_INPUTS
            elif constraint.pooling_factors == [POOLING_FACTOR]:
                found[feature] = GIVEN_ONE
            else:
                found[feature] = "the constraints, with repeats assumed Zipfian"
        return found

    def pooling_factor(
        self, path: str, name: str, features: Sequence[str], batch_size: int | None
    ) -> float:
        """Return a table's ids per sample, over all its features.

        Args:
            path: Path of the table's module.
            name: The table's name, without its module.
            features: Features that read the table.
            batch_size: Samples per rank. None: unknown.
        """
        features = features or [name]
        constraint = constraint_on(self.constraints, path, name)
        lengths = constraint.pooling_factors if constraint else [POOLING_FACTOR]
        pooling = self._pooling_factors(constraint, lengths, len(features))
        shares = self._batch_shares(path, name, features, batch_size)
        return sum(
            s * (self._profiles[f].pooling_factor if f in self._profiles else p)
            for f, p, s in zip(features, pooling, shares, strict=True)
        )

    def batch_sizes(self, path: str, name: str) -> tuple[float, ...]:
        """Return each feature's batch size in the constraints; () if they have none."""
        constraint = constraint_on(self.constraints, path, name)
        return tuple(map(float, constraint.batch_sizes or ())) if constraint else ()

    def _batch_shares(
        self, path: str, name: str, features: Sequence[str], batch_size: int | None
    ) -> list[float]:
        """Return the batch size of each feature divided by that of the model."""
        known, count = self._profiles, len(features)
        sizes = self.batch_sizes(path, name)
        if not sizes:
            return [known[f].batch_share if f in known else 1.0 for f in features]
        if not batch_size:
            return [1.0] * count
        shares = [size / batch_size for size in sizes]
        return shares if len(shares) == count else [sum(shares) / len(shares)] * count

    def _pooling_factors(
        self,
        constraint: ParameterConstraints | None,
        input_lengths: Sequence[float],
        count: int,
        num_poolings: Sequence[float] | None = None,
    ) -> list[float]:
        """Return the ids per sample of each feature, from the constraints."""
        lengths = [float(v) for v in input_lengths]
        repeats = num_poolings or (constraint.num_poolings if constraint else None)
        if repeats and len(repeats) == len(lengths):
            lengths = [a * b for a, b in zip(lengths, repeats, strict=True)]
        if len(lengths) == count:
            return lengths
        # For TorchRec, an empty list means no lookups.
        return [sum(lengths) / max(1, len(lengths))] * count

    def _profile(
        self, feature: str, pooling: float, batch_size: int, share: float, rows: int
    ) -> FeatureProfile:
        """Return a feature's profile for the batch, if it has a share of samples."""
        known = self._profiles.get(feature)
        known = known or FeatureProfile(batch_size=1, num_lookups=pooling)
        found = known.with_repeats(max(1, round(batch_size * share)), rows)
        hot = found.hot_rows and found.hot_rows.within(rows)
        return dataclasses.replace(found, batch_size=batch_size, hot_rows=hot)
