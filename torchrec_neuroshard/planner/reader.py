"""TorchRec's sharding options as tables of the cost model.

An option is *column-sharded* where each shard is whole columns of a fused table on one
rank: table-wise, column-wise or table-column-wise. It *has a cost* where the cost model
prices it: column-sharded ones, row shards, replicas and tables in other memory than the
device's. All others (quantised tables, odd widths, modules of other kinds) keep
TorchRec's own costs. Which of those with a cost a search may place, `ways` says.
"""

from __future__ import annotations

import dataclasses
import sys
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner.constants import POOLING_FACTOR
from torchrec.distributed.planner.types import (
    ParameterConstraints,
    Shard,
    ShardingOption,
    Topology,
)
from torchrec.distributed.types import ShardingType
from torchrec.modules.embedding_configs import (
    BaseEmbeddingConfig,
    EmbeddingBagConfig,
)
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollectionInterface,
)
from torchrec.modules.fused_embedding_modules import (
    FusedEmbeddingBagCollection,
    FusedEmbeddingCollection,
)

from torchrec_neuroshard.hardware.devices import is_accelerator
from torchrec_neuroshard.planner.compat import (
    grids_vary_batches,
    optimizer_arguments,
    optimizer_classes,
)
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
from torchrec_neuroshard.planner.topology import node_size, pod_fault
from torchrec_neuroshard.tables.profile import (
    FeatureProfile,
    merge_profiles,
)
from torchrec_neuroshard.tables.sharding_types import (
    COLUMN_SHARDED_TYPES,
    NODE_TYPES,
    SHARDING_TYPES,
)
from torchrec_neuroshard.tables.table import (
    COLUMN_MULTIPLE,
    MAX_CUDA_COLUMNS,
    MAX_FEATURES,
    TableConfig,
)

__all__ = ["DEFAULT_INPUTS", "TableReader"]

_FUSED = EmbeddingComputeKernel.FUSED.value
_GRID = ShardingType.GRID_SHARD.value

DEFAULT_INPUTS = "TorchRec's default of 1 id"
"""Said of features that nobody described."""


@dataclass(frozen=True, slots=True)
class _Module:
    """What a reader knows of one of TorchRec's modules."""

    configs: Mapping[str, BaseEmbeddingConfig]
    is_weighted: bool
    optimizer: str | None
    """That all tables of a fused collection share."""
    batch_sizes: frozenset[float]
    """Samples of features, by the constraints: their number varies."""


@dataclass(slots=True, eq=False)
class _Facts:
    """What a reader knows of an option's table, however it is sharded."""

    reader: TableReader
    is_dense: bool
    """Whether the option was; dense kernels read no fused_params."""
    module: _Module
    config: BaseEmbeddingConfig | None
    is_modelled: bool
    """Whether the cost model knows tables of its configuration."""
    optimizer: str
    """What TorchRec or FBGEMM calls it."""
    state_bytes: tuple[int, int]
    """Of the optimizer, for each weight and each row."""
    bags: float
    """Per sample, over its features."""
    kernel: tuple[Any, ...]
    """What sets the table apart from those of other kernels."""
    table: TableConfig | None = None
    """Described when asked for; None until then."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _Facts:
        return self  # copies of options are of the same table

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # found out again


@dataclass(slots=True, eq=False)
class _Verdict:
    """What an option's type, kernel and shards allow."""

    reader: TableReader
    shards: Sequence[Shard]
    sharding_type: str
    compute_kernel: str
    has_cost: bool
    fault: str | None

    def __deepcopy__(self, memo: dict[int, Any]) -> _Verdict:
        return self  # which does not hold of the copied shards: it is found out again

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # found out again


class TableReader:
    """Reads TorchRec's sharding options as tables of the cost model.

    An option's optimizer is the one of its parameter or module, else what
    `note_sharders` left on it, else TorchRec's default.

    Attributes:
        topology: The devices to plan for.
        constraints: Table name -> TorchRec's constraints on it.
        world_size: Ranks.
        node_size: Ranks that TorchRec spreads a table-row-wise table over.
        on_gpu: Whether the devices are GPUs.
        max_columns: The most columns of a shard that the devices' kernels take. On GPUs
            those of replicated tables and of tables in the host's memory do not take
            more, either.
    """

    def __init__(
        self,
        topology: Topology,
        constraints: Mapping[str, ParameterConstraints] | None = None,
        profiles: Mapping[str, FeatureProfile] | None = None,
    ) -> None:
        """Take what the tables' inputs are described by."""
        self.topology = topology
        self.constraints = constraints or {}
        self.world_size = int(topology.world_size)
        self.node_size = node_size(topology)
        self._pod_fault = pod_fault(topology)
        self.on_gpu = is_accelerator(topology.compute_device)
        self.max_columns = MAX_CUDA_COLUMNS if self.on_gpu else sys.maxsize
        self._profiles = profiles or {}
        self._modules: weakref.WeakKeyDictionary[nn.Module, _Module] = (
            weakref.WeakKeyDictionary()
        )
        self._tables: dict[tuple[Any, ...], TableConfig] = {}

    def constraint(self, option: ShardingOption) -> ParameterConstraints | None:
        """Return TorchRec's constraints on the option's table."""
        return constraint_on(self.constraints, option.path, option.name)

    def _module(self, option: ShardingOption) -> _Module:
        """Read the option's module, once."""
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
                size for name in configs for size in self.batch_sizes(option.path, name)
            )
            known = _Module(configs, weighted, shared, sizes)
            self._modules[module] = known
        return known

    def share_facts(self, options: Iterable[ShardingOption]) -> None:
        """Find out once what options of one table have in common."""
        found: dict[tuple[Any, ...], _Facts] = {}
        for option in options:
            key = option.path, option.name, is_dense(option)
            if key not in found:
                found[key] = self.facts(option)
            vars(option)[FACTS] = found[key]

    def facts(self, option: ShardingOption) -> _Facts:
        """Return what is known of the option's table; equal for its copies alone."""
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
            # Dense kernels read no fused_params; FBGEMM's own default is SGD.
            asked = None if dense else noted.get(SHARDERS_OPTIMIZER)
            optimizer = asked or "SGD"
        _, per_value, per_row = OPTIMIZERS.get(optimizer, WORST_OPTIMIZER)
        if arguments:
            per_row += num_counters(optimizer, arguments[0])
        elif optimizer == noted.get(SHARDERS_OPTIMIZER):
            per_row += noted[SHARDERS_COUNTERS]
        features = max(1, len(config.feature_names if config is not None else ()))
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

    def run_fault(self, option: ShardingOption) -> str | None:
        """Say what cannot run of an option, whatever its ranks; None: nothing known.

        On GPUs FBGEMM's kernels of replicas want the same widths as fused ones.
        """
        return self._verdict(option).fault

    def _find_fault(self, option: ShardingOption) -> str | None:
        any_width = is_quantised(option) or (not self.on_gpu and is_dense(option))
        widths = {0} if any_width else {int(s.size[1]) for s in sample_shards(option)}
        if odd := [w for w in widths if w % COLUMN_MULTIPLE]:
            return (
                "FBGEMM's kernels take widths that are multiples of "
                f"{COLUMN_MULTIPLE}, got {min(odd)}. Pad embedding_dim "
                f"({option.tensor.shape[-1]}), or cut its columns at such multiples"
            )
        if (widest := max(widths)) > (most := self.max_columns):
            return (
                f"a GPU's kernels take at most {most:,} columns, got {widest:,}. Allow "
                f"column_wise sharding for it, with a min_partition of at most {most}"
            )
        samples = self.facts(option).module.batch_sizes - {option.batch_size}
        if samples and option.sharding_type == _GRID and not grids_vary_batches():
            return (
                "before torchrec 1.9 grid_shard takes one batch size for all features "
                f"of a module; batch_sizes has {min(samples):g} beside "
                f"{option.batch_size}. Allow other sharding types"
            )
        if option.sharding_type in NODE_TYPES and self._pod_fault:
            return self._pod_fault
        return codec_fault(option)

    def _is_weighted(self, option: ShardingOption) -> bool:
        """Whether lookups carry weights, given or made by a feature processor.

        TorchRec's estimator notes in options of sequences, which have none, what a
        constraint says.
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
        """Whether the cost model has a price for the option; see the module."""
        return self._verdict(option).has_cost

    def _verdict(self, option: ShardingOption) -> _Verdict:
        """Say once what an option's type, kernel and shards allow."""
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
        """Return the table's optimizer, by a name that the cost models know."""
        return OPTIMIZERS.get(self.optimizer_name(option), WORST_OPTIMIZER)[0]

    def optimizer_name(self, option: ShardingOption) -> str:
        """Return what TorchRec or FBGEMM calls the table's optimizer."""
        return self.facts(option).optimizer

    def knows_optimizer(self, option: ShardingOption) -> bool:
        """Whether it is known what the table's optimizer keeps."""
        return self.optimizer_name(option) in OPTIMIZERS

    def state_bytes(self, option: ShardingOption) -> tuple[int, int]:
        """Return the optimizer's state for each weight, and each row of a shard."""
        return self.facts(option).state_bytes

    def table(self, option: ShardingOption) -> TableConfig:
        """Describe the option's table, whatever its shards.

        Features that `profiles` holds are described by their profile, the others by
        the constraints' pooling factors. A sequence table that looks up L ids per
        sample reads like L features of one id each.

        Args:
            option: One that has a cost.
        """
        facts = self.facts(option)
        if facts.table is None:
            facts.table = self._described(option)
        return facts.table

    def kernel_key(self, option: ShardingOption) -> tuple[Any, ...]:
        """Return what sets the option's table apart from those of other kernels."""
        return self.facts(option).kernel

    def looks_up_distinct(self, option: ShardingOption) -> bool:
        """Whether repeated ids of a local batch are sent and looked up once."""
        return not is_pooled(option) and bool(vars(option).get(DISTINCT))

    def repeats(self, option: ShardingOption) -> float:
        """Return how many times as many ids a table's samples have as are looked up.

        Args:
            option: One that has a cost.
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
        """The table as one object, whichever of its options asks."""
        config, optimizer = self.config(option), self.optimizer(option)
        assert config is not None, "of an option that has a cost"
        features = list(config.feature_names or []) or [option.name]
        pooling, shares = self._inputs(option, len(features))
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
            self._tables[key] = self._describe(option, config, optimizer)
        return self._tables[key]

    def _inputs(
        self, option: ShardingOption, num_features: int
    ) -> tuple[Sequence[float], Sequence[float]]:
        """Return each feature's ids per sample, and its samples over the batch's."""
        pooling = self._pooling_factors(
            self.constraint(option),
            option.input_lengths,
            num_features,
            option.num_poolings,
        )
        return pooling, self._batch_shares(
            option.path, option.name, num_features, option.batch_size
        )

    def _describe(
        self, option: ShardingOption, config: BaseEmbeddingConfig, optimizer: str
    ) -> TableConfig:
        rows, width = (int(n) for n in option.tensor.shape)
        features = list(config.feature_names or []) or [option.name]
        pooling, shares = self._inputs(option, len(features))
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
            total = profile.pooling_factor
        num_features, outputs = len(features), None
        if not is_pooled(option):
            num_features = min(max(1, round(total)), MAX_FEATURES)
            is_other = distinct or total > MAX_FEATURES
            outputs = total if is_other and total > 0 else None
        elif sum(shares) > 0 and sum(shares) != num_features:
            outputs = sum(shares)
        return TableConfig(
            name=table_name(option),
            num_embeddings=rows,
            embedding_dim=width,
            pooling_factor=total,
            num_features=num_features,
            outputs_per_sample=outputs,
            profile=profile,
            weighted=weighted,
            data_type=config.data_type.value.lower(),
            optimizer=optimizer,
        )

    def inputs_from(self, option: ShardingOption) -> dict[str, str]:
        """Return feature -> where its ids per sample and their repeats are from.

        Args:
            option: One that has a cost.
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
                found[feature] = "profiles without repeats, which are taken as Zipf's"
            elif constraint is None:
                found[feature] = DEFAULT_INPUTS
            elif constraint.pooling_factors == [POOLING_FACTOR]:
                found[feature] = "1 id, from the constraints or TorchRec's default"
            else:
                found[feature] = "the constraints, repeats taken as Zipf's"
        return found

    def pooling_factor(
        self, path: str, name: str, features: Sequence[str], batch_size: int | None
    ) -> float:
        """Return the ids that a sample looks up in a table, over its features.

        Args:
            path: Of the table's module.
            name: Of the table, without its module.
            features: That read it.
            batch_size: Samples per rank; None: not known.
        """
        features = features or [name]
        constraint = constraint_on(self.constraints, path, name)
        lengths = constraint.pooling_factors if constraint else [POOLING_FACTOR]
        pooling = self._pooling_factors(constraint, lengths, len(features))
        shares = self._batch_shares(path, name, len(features), batch_size)
        return sum(
            s * (self._profiles[f].pooling_factor if f in self._profiles else p)
            for f, p, s in zip(features, pooling, shares, strict=True)
        )

    def bags_per_sample(self, option: ShardingOption) -> float:
        """Return the bags of an option's table per sample, over its features."""
        return self.facts(option).bags

    def batch_sizes(self, path: str, name: str) -> tuple[float, ...]:
        """Return the samples of each feature of a table; empty where those of all."""
        constraint = constraint_on(self.constraints, path, name)
        return tuple(map(float, constraint.batch_sizes or ())) if constraint else ()

    def _batch_shares(
        self, path: str, name: str, count: int, batch_size: int | None
    ) -> list[float]:
        """Samples of each feature over those of the batch: less where it varies."""
        sizes = self.batch_sizes(path, name)
        if not (batch_size and sizes):
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
        """Ids in each feature's samples, by the constraints."""
        lengths = [float(v) for v in input_lengths]
        repeats = num_poolings or (constraint.num_poolings if constraint else None)
        if repeats and len(repeats) == len(lengths):
            lengths = [a * b for a, b in zip(lengths, repeats, strict=True)]
        if len(lengths) == count:
            return lengths
        # To TorchRec, no pooling factors are no lookups.
        return [sum(lengths) / max(1, len(lengths))] * count

    def _profile(
        self, feature: str, pooling: float, batch_size: int, share: float, rows: int
    ) -> FeatureProfile:
        """A feature over the batch, of which it may have only a share of samples."""
        known = self._profiles.get(feature)
        known = known or FeatureProfile(batch_size=1, num_lookups=pooling)
        found = known.with_repeats(max(1, round(batch_size * share)), rows)
        return dataclasses.replace(found, batch_size=batch_size)
