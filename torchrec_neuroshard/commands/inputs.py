"""Make TorchRec's objects of what `files` read: the model, constraints, devices."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import logging
import warnings
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torchrec.distributed.planner.types import (
    ParameterConstraints,
    PlannerError,
    StorageReservation,
    Topology,
)
from torchrec.distributed.planner.utils import sharder_name
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.types import CacheParams, ModuleSharder
from torchrec.modules.embedding_configs import (
    DataType,
    EmbeddingBagConfig,
    EmbeddingConfig,
)
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollection,
    EmbeddingCollection,
)
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from torchrec_neuroshard.commands.files import (
    ConstraintsFile,
    ModelFunction,
    NamedDevices,
    PlannerFiles,
    TableConstraints,
    TableFile,
    by_module,
)
from torchrec_neuroshard.errors import (
    ConfigError,
    InfeasibleError,
    TableError,
    suggestion,
)
from torchrec_neuroshard.planner.checks import check_constraints, table_paths
from torchrec_neuroshard.planner.compat import (
    QuietReservation,
    accepted_arguments,
    no_options_reason,
    sharders_by_type,
)
from torchrec_neuroshard.planner.table_keys import constraint_on
from torchrec_neuroshard.planner.topology import GB, GB_PER_S, topology_for
from torchrec_neuroshard.plans.one_rank import quietly
from torchrec_neuroshard.tables.inputs import feature_names
from torchrec_neuroshard.tables.profile import FeatureProfile
from torchrec_neuroshard.tables.table import TableConfig
from torchrec_neuroshard.tables.table_keys import table_keys

_OPTIMIZERS: Mapping[str, type[torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "rowwise_adagrad": RowWiseAdagrad,
    "adagrad": torch.optim.Adagrad,
    "adam": torch.optim.Adam,
}
"""Optimizer's name in `TableConfig` -> the class that TorchRec gets."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GivenModel:
    """A model to plan, with its sharders, constraints and profiles."""

    module: nn.Module
    sharders: list[ModuleSharder[Any]]
    constraints: Mapping[str, ParameterConstraints]
    profiles: Mapping[str, FeatureProfile]


def made_model(found: TableFile | ModelFunction) -> GivenModel:
    """Build a model that `find_model` found.

    Raises:
        ConfigError: The function does not exist, raises or returns no model.
        TableError: The file's tables cannot be used.
    """
    if isinstance(found, TableFile):
        try:
            return build_model(*found.read)
        except TableError as error:
            raise TableError(f"'{found.path}': {error}") from error
    name, made = found.name, _call(found)
    parts = [p for p in (made if isinstance(made, tuple) else [made]) if p is not None]
    by_kind: dict[type, Any] = {
        kind: part
        for part in parts
        for kind in (nn.Module, list, Mapping)
        if isinstance(part, kind)
    }
    if len(by_kind) < len(parts) or nn.Module not in by_kind:
        raise ConfigError(
            f"'{name}' must return a torch.nn.Module, alone or in a tuple with a list "
            "of sharders and a dictionary of constraints, got "
            + (", ".join(type(p).__name__ for p in parts) or "None")
        )
    module = by_kind[nn.Module]
    sharders = by_kind.get(list) or get_default_sharders()
    taken = sharders_by_type(sharders)
    if not any(sharder_name(type(m)) in taken for m in module.modules()):
        raise ConfigError(
            f"'{name}': no sharder takes a module of the {type(module).__name__}. "
            "Return (model, sharders) with sharders for its classes; TorchRec's "
            "defaults take neither classes derived from EmbeddingBagCollection nor "
            "torch's own EmbeddingBag"
        )
    return GivenModel(
        module=module,
        sharders=sharders,
        constraints=by_kind.get(Mapping, {}),
        profiles={},
    )


def _call(found: ModelFunction) -> Any:
    """Import the module and call its function."""
    name, module, function = found.name, found.module, found.function
    try:  # the user's code may raise any error
        known = vars(importlib.import_module(module))
        if function in known:
            made = known[function]
            return made if isinstance(made, nn.Module) else made()
    except (Exception, SystemExit) as error:
        raise found.error(error) from error
    functions = [n for n, value in known.items() if callable(value)]
    raise ConfigError(
        f"cannot load '{name}': '{module}' has no function '{function}'; "
        + suggestion(function, functions, "functions")
    )


def build_model(
    tables: Sequence[TableConfig], not_described: Container[str] = ()
) -> GivenModel:
    """Build tables on the "meta" device, with their optimizers.

    Args:
        tables: The model's tables; `by_module` says in which collections they are.
        not_described: Names of tables without a given pooling factor.

    Raises:
        TableError: TorchRec cannot hold a table of such a name or size.
    """
    readers: dict[str, str] = {}
    profiles, constraints = {}, {}
    for table in tables:
        features = feature_names(table)
        for feature in features:
            if other := readers.get(feature):
                raise TableError(
                    f"tables '{other:.100}' and '{table.name:.100}' would both read "
                    f"feature '{feature:.100}'; rename one"
                )
            readers[feature] = table.name
        share = table.num_features
        if table.name not in not_described:
            factors = [table.pooling_factor / share] * share
            constraints[table.name] = ParameterConstraints(pooling_factors=factors)
        if (whole := table.profile) is not None:
            profile = dataclasses.replace(
                whole,
                num_lookups=whole.num_lookups / share,
                common_std=whole.common_std / share,
                batch_std=whole.batch_std / share,
                access_histogram=tuple(n / share for n in whole.access_histogram),
            )
            profiles.update(dict.fromkeys(features, profile))
    found = {path: _collection(own) for path, own in by_module(tables).items()}
    return GivenModel(
        module=found[""] if "" in found else nn.ModuleDict(found),
        sharders=get_default_sharders(),
        constraints=constraints,
        profiles=profiles,
    )


def _collection(
    tables: Sequence[TableConfig],
) -> EmbeddingBagCollection | EmbeddingCollection:
    fields = [
        {
            "name": table.name,
            "num_embeddings": table.num_embeddings,
            "embedding_dim": table.embedding_dim,
            "feature_names": list(feature_names(table)),
            "data_type": DataType(table.data_type.upper()),
        }
        for table in tables
    ]
    collection: EmbeddingBagCollection | EmbeddingCollection
    device = torch.device("meta")
    try:
        if tables[0].pooled:
            collection = EmbeddingBagCollection(
                tables=[EmbeddingBagConfig(**f) for f in fields],
                is_weighted=tables[0].weighted,
                device=device,
            )
            modules = collection.embedding_bags
        else:
            collection = EmbeddingCollection(
                tables=[EmbeddingConfig(**f) for f in fields], device=device
            )
            modules = collection.embeddings
    except (KeyError, RuntimeError, TypeError) as error:  # a name or a size
        said = str(error).strip("\"'").partition("\n")[0]
        raise TableError(f"torch cannot hold a table: {said:.300}") from error
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of its own modules
        for table in tables:
            weights = modules[table.name].parameters()
            apply_optimizer_in_backward(
                _OPTIMIZERS[table.optimizer], weights, {"lr": 0.01}
            )
    return collection


def given_constraints(
    file: ConstraintsFile, model: GivenModel
) -> dict[str, ParameterConstraints]:
    """Return a model's constraints with those of a file.

    The table "*" is every table. A table's own entry overrides "*", an entry with its
    module's path overrides both, and all override the model's constraints.

    Raises:
        ConfigError: The file names an unknown table, or has a value that TorchRec does
            not know.
    """
    paths = table_paths(model.module, model.sharders)
    tables = {(module_path, config.name) for module_path, config in paths}
    keys = {key for table in tables for key in table_keys(*table)}
    file.check_names(keys)
    fields: dict[str, dict[str, Any]] = {}
    for entry, read in file.tables.items():
        fields[entry] = _arguments(read)
        try:
            check_constraints({entry: ParameterConstraints(**fields[entry])})
        except ConfigError as error:
            raise ConfigError(f"'{file.path}': {error}") from error
    found = dict(model.constraints)
    for module_path, name in sorted(tables):
        own = table_keys(module_path, name)
        changes: dict[str, Any] = {}
        for entry in ("*", *reversed(own)):
            changes |= fields.get(entry, {})
        if changes:
            known = constraint_on(model.constraints, module_path, name)
            found[own[0]] = dataclasses.replace(
                known or ParameterConstraints(), **changes
            )
    return found


def _arguments(read: TableConstraints) -> dict[str, Any]:
    """Return the given fields, as arguments of `ParameterConstraints`."""
    found = {
        name: list(value) if isinstance(value, tuple) else value
        for name in read.__slots__
        if (value := getattr(read, name)) is not None
    }
    if load := found.pop("cache_load_factor", None):
        found["cache_params"] = CacheParams(load_factor=load)
    return found


def topology_of(devices: NamedDevices) -> Topology:
    """Return TorchRec's topology of the devices that a command line asks for.

    Raises:
        ConfigError: The memory is more than a GPU can have.
    """
    num_ranks, per_node = devices.num_ranks, devices.ranks_per_node
    figures: Mapping[str, Any] = devices.figures
    if devices.card != "cpu":
        return topology_for(
            devices.card, world_size=num_ranks, ranks_per_node=per_node, **figures
        )
    given = accepted_arguments(Topology, created_by_factory=True)
    for name, setting in (("intra", "intra_host_bw"), ("inter", "inter_host_bw")):
        if rate := figures.get(f"{name}_gb_per_s"):
            given[setting] = rate / GB_PER_S
    if memory_gb := figures.get("host_memory_gb"):
        given["ddr_cap"] = round(memory_gb * GB / per_node)
    return Topology(num_ranks, "cpu", local_world_size=per_node, **given)


def reservation(args: argparse.Namespace) -> StorageReservation | None:
    """Return TorchRec's reservation with the share of --reserve; None: its default."""
    return None if args.reserve is None else QuietReservation(args.reserve)


def planner_arguments(
    args: argparse.Namespace, files: PlannerFiles, given: GivenModel
) -> dict[str, Any]:
    """Return the options of `add_planner` as arguments of `NeuroShardPlanner`.

    Raises:
        ConfigError: The file of constraints does not fit the model.
    """
    constraints = given.constraints
    if files.constraints is not None:
        constraints = given_constraints(files.constraints, given)
    return {
        "constraints": dict(constraints) or None,
        "profiles": {**given.profiles, **files.profiles},
        "placement_constraints": files.placement,
        "storage_reservation": reservation(args),
        "cost_model": args.cost_model,
        "pipeline_type": args.pipeline,
        "dense_ms": args.dense_ms,
        "debug": False,
        "stats": [],
        "calibrate": "auto" if args.cost_model == "measure" else "never",
    }


@contextlib.contextmanager
def planning(name: str) -> Iterator[None]:
    """Silence warnings and logs, which the report repeats; name the model in errors.

    Raises:
        InfeasibleError: No plan fits.
        ConfigError: The constraints leave a table without a sharding type.
    """
    try:
        with quietly(logging.ERROR):
            yield
    except PlannerError as error:
        raise InfeasibleError(f"no plan for '{name}': {first_line(error)}") from error
    except RuntimeError as error:
        reason = no_options_reason(error)
        if reason is None:
            raise
        raise ConfigError(
            f"no plan for '{name}': {reason}. None of the kernels that the constraints "
            "allow runs a sharding type that they allow; drop one of the two"
        ) from error


def first_line(error: PlannerError) -> str:
    """Return the reason alone; TorchRec appends pages of storage figures to it."""
    return str(error).strip().partition("\n")[0]
