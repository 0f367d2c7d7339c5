"""TorchRec's private attributes and the differences between releases 1.6 to 1.9.

Only this module checks TorchRec's release or names. `sharded_model` reads private
attributes of models that train, and `plans.one_rank` replaces some. A function that
mentions no release is needed with all of them.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import inspect
import logging
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
import torchrec
from torch import nn
from torchrec.distributed import comm as torchrec_comm
from torchrec.distributed.embedding import (
    EmbeddingCollectionSharder,
    get_ec_index_dedup,
)
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.planners import EmbeddingPlannerBase
from torchrec.distributed.planner.storage_reservations import (
    HeuristicalStorageReservation,
)
from torchrec.distributed.planner.types import (
    BasicCommsBandwidths,
    CustomTopologyData,
    DeviceHardware,
    Perf,
    PlannerError,
    PlannerErrorType,
    Shard,
    ShardEstimator,
    ShardingOption,
    Storage,
    StorageReservation,
    Topology,
)
from torchrec.distributed.planner.utils import sharder_name
from torchrec.distributed.types import ModuleSharder, PipelineType
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollection,
    EmbeddingCollection,
)
from torchrec.modules.mc_embedding_modules import (
    BaseManagedCollisionEmbeddingCollection,
)

from torchrec_neuroshard.costs.schedules import DenseMs, find_schedule
from torchrec_neuroshard.costs.task import WireCodec
from torchrec_neuroshard.errors import ConfigError
from torchrec_neuroshard.planner.table_keys import ModuleConstraints, paths_of
from torchrec_neuroshard.tables.sharding_types import WORLD_TYPES

try:
    from torchrec.distributed.planner.provider import DefaultPlannerProvider
except ImportError:  # before 1.9
    DefaultPlannerProvider = object

_KERNEL_SETTINGS = (
    "enforce_hbm",
    "stochastic_rounding",
    "bounds_check_mode",
    "output_dtype",
    "stash_weights",  # since 1.9
)

PlannerProviderBase: type[Any] = DefaultPlannerProvider
"""TorchRec's planner provider; `object` before 1.9."""


def torchrec_version() -> str:
    """Return the installed release of TorchRec."""
    return str(torchrec.__version__)


def torchrec_release() -> tuple[int, ...]:
    """Return the first two numbers of TorchRec's release."""
    return tuple(int(part) for part in torchrec_version().split(".")[:2])


def pipeline_name(pipeline_type: Any) -> str:
    """Return the name of a pipeline or `PipelineType`; "none" for None."""
    return str(getattr(pipeline_type, "value", pipeline_type) or "none")


def torchrec_pipeline(pipeline_type: Any) -> PipelineType:
    """Return the member of `PipelineType` that holds as many batches as a pipeline.

    Pipelines without their own member count like `TRAIN_SPARSE_DIST`.

    Raises:
        ConfigError: The pipeline is unknown.
    """
    name = pipeline_name(pipeline_type)
    find_schedule(name, DenseMs())
    own = {member.value: member for member in PipelineType}
    return own.get(name, PipelineType.TRAIN_SPARSE_DIST)


def planner_part(planner: EmbeddingPlannerBase, name: str) -> Any:
    """Return a part of a TorchRec planner, which has no property for it.

    Args:
        planner: The planner.
        name: An argument of its constructor, "proposers" or "perf_model".
    """
    return getattr(planner, f"_{name}")


def set_planner_part(planner: EmbeddingPlannerBase, name: str, part: Any) -> None:
    """Replace a part of a TorchRec planner, which has no setter for it."""
    setattr(planner, f"_{name}", part)


@contextlib.contextmanager
def replaced_parts(planner: EmbeddingPlannerBase, **parts: Any) -> Iterator[None]:
    """Replace parts of a TorchRec planner within the context."""
    before = {name: planner_part(planner, name) for name in parts}
    try:
        for name, part in parts.items():
            set_planner_part(planner, name, part)
        yield
    finally:
        for name, part in before.items():
            set_planner_part(planner, name, part)


@contextlib.contextmanager
def report_full(reservation: StorageReservation) -> Iterator[None]:
    """Let TorchRec report that no plan fits, for any class of storage reservation.

    Before 1.9, TorchRec's report reads `_percentage`, which only its own reservations
    have.

    Raises:
        PlannerError: Replaces the resulting AttributeError.
    """
    try:
        yield
    except AttributeError as error:
        if error.obj is not reservation or error.name != "_percentage":
            raise
        raise PlannerError(
            error_type=PlannerErrorType.INSUFFICIENT_STORAGE,
            message="no plan fits into the memory that "
            f"{type(reservation).__name__} leaves",
        ) from error


class QuietReservation(HeuristicalStorageReservation):
    """TorchRec's default reservation, without its warnings about itself."""

    def __init__(self, percentage: float) -> None:
        with _without_warnings():
            super().__init__(percentage)

    def reserve(self, *given: Any, **named: Any) -> Topology:
        """See `HeuristicalStorageReservation`."""
        with _without_warnings():
            return super().reserve(*given, **named)


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """Silence what TorchRec's default reservation warns and logs of itself."""

    def is_other(record: logging.LogRecord) -> bool:
        return "known issue" not in record.getMessage()

    speaker = logging.getLogger(HeuristicalStorageReservation.__module__)
    speaker.addFilter(is_other)
    try:
        with warnings.catch_warnings():
            name = HeuristicalStorageReservation.__name__
            warnings.filterwarnings("ignore", name, FutureWarning)
            yield
    finally:
        speaker.removeFilter(is_other)


class EnumeratorByModule(EmbeddingEnumerator):
    """TorchRec's enumerator with constraints by module path as well as by name.

    TorchRec looks up constraints without the module.
    """

    _constraints: ModuleConstraints
    _path = ""
    """Path of the module whose tables are being listed."""
    _parameters: Mapping[str, nn.Parameter] = MappingProxyType({})
    """Table of that module -> its weights."""
    _paths: Mapping[nn.Module, Sequence[str]] = MappingProxyType({})
    """The paths of each module with a sharder, the first of them first."""

    def enumerate(
        self, module: nn.Module, sharders: list[ModuleSharder[Any]]
    ) -> list[ShardingOption]:
        """Return the options of every table, with estimates, like TorchRec's."""
        taken = sharders_by_type(sharders)
        self._paths = paths_of(module, lambda m: sharder_name(type(m)) in taken)

        def announcing(sharder: ModuleSharder[Any]) -> ModuleSharder[Any]:
            """Return a copy that notes which module TorchRec starts to list."""

            def shardable_parameters(listed: nn.Module) -> dict[str, nn.Parameter]:
                found: dict[str, nn.Parameter] = sharder.shardable_parameters(listed)
                self._path, self._parameters = self._paths[listed][0], found
                self._constraints.enter(self._path, found)
                return found

            copied = copy.copy(sharder)
            vars(copied)["shardable_parameters"] = shardable_parameters
            return copied

        try:
            options = super().enumerate(module, [*map(announcing, sharders)])
        finally:
            self._sharder_map = sharders_by_type(sharders)
        # For a known module, TorchRec would return copies of these options, even if
        # costs or optimizers have changed since.
        self._last_stored_module, self._last_stored_search_space = None, options
        return list(options)

    def _get_num_buckets(self, parameter: str, module: nn.Module) -> int | None:
        try:
            found: int | None = super()._get_num_buckets(parameter, module)
        except ValueError as error:
            # TorchRec names a switch that does not exist outside Meta.
            table, ranks = f"{self._path}.{parameter}".lstrip("."), self._world_size
            raise ConfigError(
                f"table '{table}': the {ranks} ranks cannot share the buckets of its "
                f"managed collision module evenly. Give that module a multiple of "
                f"{ranks} buckets (buckets=, or total_num_buckets=)"
            ) from error
        return found

    def under_other_paths(
        self, options: Sequence[ShardingOption]
    ) -> list[ShardingOption]:
        """Return copies of placed options for the other paths of their modules.

        The copies cost nothing.
        """
        found = []
        for option in options:
            module = option.module[1]
            for path in self._paths.get(module, ()):
                if path != option.path:
                    other = copy.copy(option)
                    other._module = path, module
                    other.shards = [
                        Shard(s.size, s.offset, Storage(0, 0), Perf(0, 0, 0, 0), s.rank)
                        for s in option.shards
                    ]
                    found.append(other)
        return found

    def populate_estimates(self, sharding_options: list[ShardingOption]) -> None:
        """Set storage and perf of all shards, in place."""
        for part in self._constraints.parts(sharding_options):
            super().populate_estimates(part)


class HookedEnumerator(EnumeratorByModule):
    """TorchRec's enumerator with hooks that choose which options to list.

    TorchRec has no public way to skip estimates, or to list a row-wise or data-parallel
    option without one shard per rank, which can be millions of shards.
    """

    _world_size: int
    _estimators: list[ShardEstimator]
    _listed: list[ShardingOption] | None = None
    """Options listed so far. None: `enumerate` is not running."""
    _has_buckets = False
    """Whether a table may have rows in buckets, which ranks cannot split."""

    def enumerate(
        self, module: nn.Module, sharders: list[ModuleSharder[Any]]
    ) -> list[ShardingOption]:
        """Return the options of every table, with estimates, like TorchRec's."""
        self._has_buckets = any(map(may_have_buckets, module.modules()))
        self._true_world_size = self._world_size
        options: list[ShardingOption] = []
        self._listed = options
        try:
            if self._lists_one_rank:
                self._world_size = 1
            super().enumerate(module, sharders)
        finally:
            self._world_size, self._listed = self._true_world_size, None
        self._last_stored_search_space = options
        return options

    @property
    def _lists_one_rank(self) -> bool:
        """Whether options are listed for one rank and spread over ranks later."""
        return self._device_memory_sizes is None and not self._has_buckets

    def populate_estimates(self, sharding_options: list[ShardingOption]) -> None:
        """Set storage and perf of all shards, in place."""
        listed = self._listed
        if listed is not None:  # a module with several paths is sharded once
            sharding_options[:] = [
                o for o in sharding_options if o.path == self._paths[o.module[1]][0]
            ]
        if listed is not None and self._lists_one_rank:
            self._world_size = self._true_world_size
            sharding_options[:] = [
                self.spread(o, self._world_size)
                if o.sharding_type in WORLD_TYPES
                else o
                for o in sharding_options
            ]
        super().populate_estimates(sharding_options)
        if listed is not None:  # empty the list, so that TorchRec copies nothing
            listed += sharding_options
            sharding_options.clear()

    def spread(self, option: ShardingOption, world_size: int) -> ShardingOption:
        """Return an option listed for one rank, spread over all ranks."""
        raise NotImplementedError

    def narrowed_types(self, table: str, types: list[str]) -> list[str]:
        """Return those of TorchRec's sharding types to list."""
        raise NotImplementedError

    def narrowed_kernels(self, table: str, kernels: list[str]) -> list[str]:
        """Return those of TorchRec's kernels to list."""
        raise NotImplementedError

    def _get_num_buckets(self, parameter: str, module: nn.Module) -> int | None:
        # TorchRec loops over all tables of a module for each table.
        if not self._has_buckets:
            return None
        found: int | None = super()._get_num_buckets(parameter, module)
        return found

    def listed_like(self, table: str) -> tuple[str, str] | None:
        """Return the one sharding type and kernel to list; None: list all of them."""
        raise NotImplementedError

    def note_listed(self, table: str, sharding_type: str, kernels: list[str]) -> None:
        """Note which kernels TorchRec lists for a sharding type of a table."""
        raise NotImplementedError

    def _filter_sharding_types(self, name: str, *given: Any) -> list[str]:
        if (one := self.listed_like(name)) is not None:
            return [one[0]]
        return self.narrowed_types(name, super()._filter_sharding_types(name, *given))

    def _filter_compute_kernels(self, name: str, *given: Any) -> list[str]:
        if (one := self.listed_like(name)) is not None:
            return [one[1]]
        kernels = self.narrowed_kernels(
            name, super()._filter_compute_kernels(name, *given)
        )
        self.note_listed(name, str(given[-1]), kernels)
        return kernels


def no_options_reason(error: RuntimeError) -> str | None:
    """Return which table has no sharding option; None for any other error.

    TorchRec's enumerator raises a plain RuntimeError, recognised by its text.
    """
    text = str(error)
    if not text.startswith("No available sharding type"):
        return None
    return text.partition(". Module:")[0]


def may_have_buckets(module: nn.Module) -> bool:
    """Whether TorchRec may split rows of a module's tables by buckets."""
    configs: Sequence[Any] = ()
    if isinstance(module, EmbeddingBagCollection):
        configs = module.embedding_bag_configs()
    elif isinstance(module, EmbeddingCollection):
        configs = module.embedding_configs()
    return isinstance(module, BaseManagedCollisionEmbeddingCollection) or any(
        c.use_virtual_table for c in configs
    )


def id_map_bytes(module: nn.Module, table: str, num_rows: int) -> tuple[float, float]:
    """Return the bytes of the maps by which a module turns a table's ids into rows.

    Modules for managed collisions keep some values per row. Those that sort ids also
    keep the ids of all batches between two evictions. Modules that prune tables while
    they train (ITEP) keep the place and the use of each row of the unpruned table.

    Returns:
        Bytes per row of a shard, and per id in a rank's batch.
    """
    if not isinstance(module, BaseManagedCollisionEmbeddingCollection):
        pruning = getattr(module, "_itep_module", None)
        unpruned = getattr(pruning, "table_name_to_unpruned_hash_sizes", {})
        whole = unpruned.get(table, num_rows)
        return (12.0 * whole / num_rows if whole != num_rows else 0.0), 0.0
    managed = module._managed_collision_collection._managed_collision_modules
    if table not in managed:
        return 0.0, 0.0
    ids = managed[table]
    # Some parameters are listed among the buffers as well.
    kept = dict([*ids.named_buffers(), *ids.named_parameters()]).values()
    per_row = sum(t.nbytes for t in kept if t.dim() and len(t) == ids.output_size())
    policy, per_id = getattr(ids, "_eviction_policy", None), 0.0
    if policy is not None:
        histories = sum(info.is_history_metadata for info in policy.metadata_info)
        per_id = 8.0 * (1 + histories) * 1.25 * ids._eviction_interval
    return per_row / int(ids.output_size()), per_id


def enumerator_constraints(enumerator: EmbeddingEnumerator) -> Mapping[str, Any]:
    """Return the constraints of TorchRec's enumerator, a private attribute."""
    constraints = enumerator._constraints or {}
    if isinstance(constraints, ModuleConstraints):
        return constraints.given
    return constraints


def with_devices(topology: Topology, devices: Sequence[DeviceHardware]) -> Topology:
    """Return a copy with other devices; `Topology()` takes only numbers."""
    other = copy.copy(topology)
    other._devices = list(devices)
    return other


def with_ranks(
    topology: Topology,
    devices: Sequence[DeviceHardware],
    *,
    ranks_per_node: int,
    nodes_per_pod: int | None,
) -> Topology:
    """Return a copy with other ranks; other attributes of its class stay."""
    other = with_devices(topology, devices)
    other._world_size = len(devices)
    other._local_world_size, other._pod_size = ranks_per_node, nodes_per_pod
    other._intra_group_size = ranks_per_node * (nodes_per_pod or 1)
    other._custom_topology_data = None  # it lists the former ranks
    return other


def custom_data(topology: Topology) -> CustomTopologyData | None:
    """Return the caller's data on each rank's memory, a private attribute."""
    return topology._custom_topology_data


def with_bandwidths(topology: Topology, values: Mapping[str, float]) -> Topology:
    """Return a copy with other bandwidths, which are read-only in `Topology`.

    Args:
        topology: The topology. If links change, the copy has `BasicCommsBandwidths`.
        values: Property of `Topology` -> bytes per millisecond.
    """
    other, links = copy.copy(topology), ("intra_host_bw", "inter_host_bw")
    if values.keys() & {*links}:
        other._comms_bandwidths = BasicCommsBandwidths(
            **{name: values.get(name, getattr(topology, name)) for name in links}
        )
    for name in values.keys() - {*links}:
        setattr(other, f"_{name}", values[name])
    return other


def accepted_arguments(kind: type, **arguments: Any) -> dict[str, Any]:
    """Return the arguments that a TorchRec class accepts.

    Not all releases have `Topology(created_by_factory=...)`.
    """
    known = arguments_of(kind)
    return {name: value for name, value in arguments.items() if name in known}


def arguments_of(kind: type) -> frozenset[str]:
    """Return the names of the arguments that a class takes."""
    parameters = inspect.signature(kind).parameters.values()
    return frozenset(p.name for p in parameters if p.kind is not p.VAR_KEYWORD)


def optimizer_classes(tensor: torch.Tensor) -> tuple[type, ...]:
    """Return the classes that `apply_optimizer_in_backward` set on a parameter.

    They are private attributes of the tensor, which TorchRec reads.
    """
    return tuple(c for c in getattr(tensor, "_optimizer_classes", ()) or () if c)


def optimizer_arguments(tensor: torch.Tensor) -> Any:
    """Return the arguments of `optimizer_classes`; None if there are none."""
    return getattr(tensor, "_optimizer_kwargs", None)


def optimizer_attributes(tensor: torch.Tensor) -> dict[str, Any]:
    """Return the attributes that `apply_optimizer_in_backward` set on a parameter.

    Other attributes may contain the weights themselves.
    """
    return {n: v for n, v in vars(tensor).items() if n.startswith("_optimizer")}


def with_optimizer(
    option: ShardingOption, kind: type[torch.optim.Optimizer]
) -> ShardingOption:
    """Return a copy of an option whose parameter names an optimizer.

    TorchRec's memory estimate reads `_optimizer_classes`, and `tensor` is read-only.
    The shards are shared.
    """
    named = copy.copy(option)
    tensor: Any = torch.empty_like(option.tensor, device="meta")
    tensor._optimizer_classes = [kind]
    named._tensor = tensor
    return named


def kernel_settings(option: ShardingOption) -> tuple[str | None, ...]:
    """Return the settings by which TorchRec groups tables into kernels."""
    values = (getattr(option, name, None) for name in _KERNEL_SETTINGS)
    return tuple(value if value is None else repr(value) for value in values)


def is_stashed(option: ShardingOption) -> bool:
    """Whether weights are on the host between lookups and updates: since 1.9."""
    return bool(getattr(option, "stash_weights", False))


def stash(option: ShardingOption) -> None:
    """Mark an option as stashed."""
    option.stash_weights = True


def torchrec_stashes() -> bool:
    """Whether this release can stash tables that a planner chose: since 1.9."""
    return "stash_weights" in inspect.signature(ShardingOption).parameters


def sharders_by_type(
    sharders: Iterable[ModuleSharder[Any]],
) -> dict[str, ModuleSharder[Any]]:
    """Return module type, as in TorchRec's options -> its sharder.

    Raises:
        ConfigError: An item is not a sharder, or there is no list of them.
    """
    found = {}
    if not isinstance(sharders, Iterable):
        raise ConfigError(
            f"sharders is {sharders!r:.80}: pass a list of sharders, for example "
            "get_default_sharders()"
        )
    for number, sharder in enumerate(sharders):
        if isinstance(sharder, type) or not is_sharder(sharder):
            raise ConfigError(
                f"sharders[{number}] is {sharder!r:.80}, not a sharder: pass objects, "
                "for example EmbeddingBagCollectionSharder()"
            )
        found[sharder_name(sharder.module_type)] = sharder
    return found


def sharder_params(sharders: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return module type -> the sharder's fused parameters.

    Args:
        sharders: What TorchRec passes to estimators: module type -> sharder (1.6) or
            its data (since 1.7). Sharders without fused parameters lack the attribute.
    """
    return {
        name: getattr(data, "fused_params", None) or {}
        for name, data in sharders.items()
    }


def _wire_codec(codec: Any) -> WireCodec:
    """Return a description of a codec; its precision is a private attribute."""
    context = codec.create_context()
    try:
        codec.calc_quantized_size(1, context)
        row_values = 1
    except (AssertionError, RuntimeError):  # not a whole row
        row_values = int(context.row_dim)
    dtype = codec.quantized_dtype
    size = torch.empty(0, dtype=dtype() if callable(dtype) else dtype).element_size()
    values = 2**10 * row_values
    precision = getattr(codec, "_comm_precision", None)
    return WireCodec(
        name=str(getattr(precision, "value", type(codec).__name__)).lower(),
        wire_bytes=float(codec.calc_quantized_size(values, context) * size) / values,
        row_values=row_values,
    )


def wire_codecs(sharder: Any) -> Mapping[str, tuple[WireCodec, WireCodec]]:
    """Return quantised collective -> its forward and backward codecs.

    Args:
        sharder: A sharder, or its data in TorchRec's estimators, which lacks names and
            row scales.
    """
    if registry := getattr(sharder, "qcomm_codecs_registry", None):
        return {
            name: (_wire_codec(codecs.forward), _wire_codec(codecs.backward))
            for name, codecs in registry.items()
        }
    sizes = getattr(sharder, "qcomm_dtype_sizes", None) or {}
    return {
        name: (WireCodec(name="", wire_bytes=f), WireCodec(name="", wire_bytes=b))
        for name, (f, b) in sizes.items()
    }


def is_sharder(given: Any) -> bool:
    """Whether an object is a sharder, not its data in TorchRec's estimators."""
    return hasattr(given, "module_type")


def cuts_wide_bags() -> bool:
    """Whether bags of more than 1,024 columns come back with zeros: before 1.7.

    FBGEMM 1.6 on GPUs leaves out work for the last samples of a batch, where a table
    has at most 8 ids per sample. Sequences and the dense kernel are right.
    """
    return torchrec_release() < (1, 7)


POD_VARIABLES = ("TOPOLOGY_DOMAIN_MULTIPLE", "TORCHREC_RESOLVED_POD_SIZE")
"""Environment variables with the nodes per pod. TorchRec's runtime reads the first
before 1.8 and the second since 1.8. TorchRec itself does not set the second."""


def group_size_of_job(world_size: int) -> int:
    """Return the number of ranks over which this job spreads table-row-wise shards."""
    return int(torchrec_comm.get_topology_group_world_size(world_size))


def removes_repeats(sharder: Any) -> bool:
    """Whether a sharder looks up repeated ids of a local batch only once.

    Sharders for managed collisions ask their inner sharder. All of this is private.
    """
    inner = getattr(sharder, "_e_sharder", sharder)
    everywhere = isinstance(inner, EmbeddingCollectionSharder) and get_ec_index_dedup()
    return bool(getattr(inner, "_use_index_dedup", False) or everywhere)


@contextlib.contextmanager
def nothing_collected() -> Iterator[None]:
    """Turn off the garbage collector, which would scan a million live shards."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
