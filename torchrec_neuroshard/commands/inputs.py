"""Read what a command line names: a model, its constraints, the devices."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import logging
import os
import re
import sys
import warnings
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchrec.distributed.planner.types import (
    ParameterConstraints,
    PlannerError,
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

from torchrec_neuroshard.costs.placement_constraints import PlacementConstraints
from torchrec_neuroshard.errors import (
    ConfigError,
    InfeasibleError,
    TableError,
    suggestion,
)
from torchrec_neuroshard.files import read_fields
from torchrec_neuroshard.hardware.cards import node_counts
from torchrec_neuroshard.planner.checks import check_constraints, table_paths
from torchrec_neuroshard.planner.compat import (
    accepted_arguments,
    no_options_reason,
    sharders_by_type,
)
from torchrec_neuroshard.planner.table_keys import constraint_on
from torchrec_neuroshard.planner.topology import topology_for
from torchrec_neuroshard.plans.one_rank import quietly
from torchrec_neuroshard.tables.inputs import feature_names
from torchrec_neuroshard.tables.loaders import (
    load_profiles,
    read_document,
    read_tables,
)
from torchrec_neuroshard.tables.profile import FeatureProfile
from torchrec_neuroshard.tables.table import TableConfig
from torchrec_neuroshard.tables.table_keys import table_keys, unknown_table

_TABLE_FILE = re.compile(
    r"(?P<path>-|.+?\.(json|yaml|yml|csv))(:(?P<workload>.*))?", re.IGNORECASE
)
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


def read_model(name: str) -> GivenModel:
    """Return the model that a command line names.

    Args:
        name: A file of tables, where a workload's name may follow after a colon; "-",
            which reads such a file from standard input; or "package.module:function",
            importable from the working directory.

    Raises:
        ConfigError: The function or file does not exist, or the function raises or
            returns no model.
        TableError: The file's tables cannot be used.
    """
    if found := _TABLE_FILE.fullmatch(name):
        tables, not_described = read_tables(found["path"], found["workload"] or None)
        try:
            return build_model(tables, not_described)
        except TableError as error:
            raise TableError(f"'{found['path']}': {error}") from error
    made = _call(name)
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


def _call(name: str) -> Any:
    """Call the named function, in a module or a .py file."""
    module, _, function = name.partition(":")
    folder, file = Path.cwd(), Path(module)
    is_path = file.suffix == ".py" or len(file.parts) > 1
    if is_path or (not function and os.path.exists(module)):
        if file.suffix != ".py" or not file.is_file():
            raise _no_model_file(name, file)
        if file.is_absolute() or ".." in file.parts:
            folder, file = file.resolve().parent, Path(file.name)
        module = ".".join(file.with_suffix("").parts)
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    try:  # the user's code may raise any error
        known = vars(importlib.import_module(module))
        if function in known:
            made = known[function]
            return made if isinstance(made, nn.Module) else made()
    except (Exception, SystemExit) as error:
        if not function and getattr(error, "name", None) == module.partition(".")[0]:
            raise _no_model_file(name, Path(name)) from error
        said = " ".join(str(error).split())
        meant = ""
        if not function and Path(module.partition(".")[0] + ".py").exists():
            meant = f" Did you mean '{':'.join(name.rsplit('.', 1))}'?"
        raise ConfigError(
            f"cannot load '{name}': {type(error).__name__}: {said:.300}. A model is a "
            ".json, .yaml or .csv file, or package.module:function, whose function "
            f"takes no arguments.{meant} Run the command where `import {module}` "
            "works. NEUROSHARD_DEBUG=1 shows the traceback"
        ) from error
    functions = [n for n, value in known.items() if callable(value)]
    raise ConfigError(
        f"cannot load '{name}': '{module}' has no function '{function}'; "
        + suggestion(function, functions, "functions")
    )


def _no_model_file(name: str, file: Path) -> ConfigError:
    """Return the error for a model's file that is missing or of another kind."""
    reason = "there is no such file" if not file.exists() else "it is a folder"
    if file.is_file():
        reason = f"files that end in '{file.suffix}' hold no model"
    return ConfigError(
        f"cannot load '{name}': {reason}. A model is a .json, .yaml or .csv file of "
        "tables, or package.module:function or file.py:function, whose function takes "
        "no arguments"
    )


def build_model(
    tables: Sequence[TableConfig], not_described: Container[str] = ()
) -> GivenModel:
    """Build tables on the "meta" device, with their optimizers.

    Tables with weighted lookups get a collection of their own. Those whose rows are not
    pooled get an `EmbeddingCollection` for each width.

    Args:
        tables: The model's tables.
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
    held: dict[str, list[TableConfig]] = {"plain": [], "weighted": []}
    for table in tables:
        kind = "weighted" if table.weighted else "plain"
        if not table.pooled:
            kind = f"sequences_{table.embedding_dim}"
        held.setdefault(kind, []).append(table)
    found = {kind: _collection(those) for kind, those in held.items() if those}
    return GivenModel(
        module=nn.ModuleDict(found) if len(found) > 1 else next(iter(found.values())),
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


@dataclass(frozen=True, kw_only=True, slots=True)
class _TableConstraints:
    """A table's constraints in a file: fields of TorchRec's `ParameterConstraints`."""

    sharding_types: Sequence[str] | None = None
    compute_kernels: Sequence[str] | None = None
    min_partition: int | None = None
    pooling_factors: Sequence[float] | None = None
    num_poolings: Sequence[float] | None = None
    batch_sizes: Sequence[int] | None = None
    enforce_hbm: bool | None = None
    cache_load_factor: float | None = None

    def __post_init__(self) -> None:
        if self.cache_load_factor is not None and not 0 < self.cache_load_factor <= 1:
            raise ValueError(
                "cache_load_factor must be above 0 and at most 1, got "
                f"{self.cache_load_factor}"
            )

    def fields(self) -> dict[str, Any]:
        """Return the given fields, as arguments of `ParameterConstraints`."""
        found = {
            name: list(value) if isinstance(value, tuple) else value
            for name in self.__slots__
            if (value := getattr(self, name)) is not None
        }
        if load := found.pop("cache_load_factor", None):
            found["cache_params"] = CacheParams(load_factor=load)
        return found


def read_constraints(
    path: str | Path, model: GivenModel
) -> dict[str, ParameterConstraints]:
    """Read TorchRec's constraints on tables from a JSON or YAML file.

    The file holds an object: table -> an object with fields of `ParameterConstraints`
    (`cache_load_factor` sets `cache_params`). The table "*" is every table. A table's
    own entry overrides "*", an entry with its module's path overrides both, and all
    override the model's constraints.

    Raises:
        ConfigError: The file cannot be read, names an unknown table or field, or a
            value is of the wrong type.
    """
    data = read_document(path)
    if not isinstance(data, Mapping):
        raise ConfigError(
            f"'{path}' holds no constraints; it must be an object, table -> fields"
        )
    paths = table_paths(model.module, model.sharders)
    tables = {(module_path, config.name) for module_path, config in paths}
    keys = {key for table in tables for key in table_keys(*table)}
    fields: dict[str, dict[str, Any]] = {}
    for entry, given in data.items():
        if entry not in keys | {"*"}:
            raise ConfigError(f"'{path}' {unknown_table('names', str(entry), keys)}")
        what = f"constraints of table '{entry}' in '{path}'"
        made = read_fields(_TableConstraints, given, ConfigError, what)
        fields[entry] = made.fields()
        try:
            check_constraints({entry: ParameterConstraints(**fields[entry])})
        except ConfigError as error:
            raise ConfigError(f"'{path}': {error}") from error
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


def read_placement(path: str | Path) -> PlacementConstraints:
    """Read the fields of `PlacementConstraints` from a JSON or YAML file.

    Raises:
        ConfigError: The file cannot be read, or a field is unknown or has the wrong
            type.
    """
    what = f"placement constraints in '{path}'"
    return read_fields(PlacementConstraints, read_document(path), ConfigError, what)


def devices_named(
    card: str,
    ranks: int,
    ranks_per_node: int | None = None,
    memory_gb: float | None = None,
) -> Topology:
    """Return the devices that a command line asks for.

    Args:
        card: A key of `GPU_CARDS`, or "cpu".
        ranks: Number of ranks.
        ranks_per_node: None: a node of this card as sold; all ranks on CPUs.
        memory_gb: Memory of a GPU [GB]. None: as sold.

    Raises:
        ConfigError: The card is unknown, or the ranks do not fill whole nodes.
    """
    if card != "cpu":
        return topology_for(
            card,
            world_size=ranks,
            ranks_per_node=ranks_per_node,
            memory_gb=memory_gb,
        )
    if memory_gb is not None:
        raise ConfigError(
            "the memory of a CPU's rank is the host's; leave out --memory-gb"
        )
    _, per_node = node_counts(ranks, world_size=ranks, ranks_per_node=ranks_per_node)
    looked_up = accepted_arguments(Topology, created_by_factory=True)
    return Topology(ranks, "cpu", local_world_size=per_node, **looked_up)


def planner_arguments(args: argparse.Namespace, given: GivenModel) -> dict[str, Any]:
    """Return the options of `add_planner` as arguments of `NeuroShardPlanner`.

    Raises:
        NeuroShardError: A file cannot be used.
    """
    constraints, profiles = given.constraints, dict(given.profiles)
    if args.constraints is not None:
        constraints = read_constraints(args.constraints, given)
    if args.profiles is not None:
        profiles |= load_profiles(args.profiles)
    return {
        "constraints": dict(constraints) or None,
        "profiles": profiles,
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
