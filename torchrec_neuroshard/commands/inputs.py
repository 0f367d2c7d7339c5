"""What command lines name: a model, constraints on its tables, the devices."""

from __future__ import annotations

import dataclasses
import importlib
import os
import re
import sys
import warnings
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchrec.distributed.planner.types import ParameterConstraints, Topology
from torchrec.distributed.planner.utils import sharder_name
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.types import CacheParams, ModuleSharder
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from torchrec_neuroshard.errors import ConfigError, TableError, suggestion
from torchrec_neuroshard.files import read_fields, to_fields
from torchrec_neuroshard.gpu_cards import GPU_CARDS, card_named
from torchrec_neuroshard.planner.compat import accepted_arguments, sharders_by_type
from torchrec_neuroshard.planner.options.checks import KNOWN_VALUES
from torchrec_neuroshard.planner.options.constraints import PlacementConstraints
from torchrec_neuroshard.planner.options.table_reader import table_configs
from torchrec_neuroshard.planner.options.topologies import topology_for
from torchrec_neuroshard.profiles import FeatureProfile
from torchrec_neuroshard.tables import TableConfig
from torchrec_neuroshard.workloads import feature_names
from torchrec_neuroshard.workloads.loaders import read_document, read_tables

__all__ = [
    "MODEL_HELP",
    "GivenModel",
    "build_model",
    "devices_named",
    "read_constraints",
    "read_model",
    "read_placement",
]

MODEL_HELP = (
    "package.module:function that returns the model, best on the meta device, or "
    "(model, sharders, constraints); or a file of tables: .json, .yaml or .csv"
)

_TABLE_FILE = re.compile(
    r"(?P<path>.+?\.(json|yaml|yml|csv))(:(?P<workload>.*))?", re.IGNORECASE
)
_MOST_RANKS = 65_536
"""More than any job has: a slip of the finger asks for no more memory than there is."""

_OPTIMIZERS: Mapping[str, type[torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "rowwise_adagrad": RowWiseAdagrad,
    "adagrad": torch.optim.Adagrad,
    "adam": torch.optim.Adam,
}
"""Name of `TableConfig` -> what TorchRec is told."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GivenModel:
    """A model to plan, with what came along with it."""

    module: nn.Module
    sharders: list[ModuleSharder[Any]]
    constraints: Mapping[str, ParameterConstraints]
    profiles: Mapping[str, FeatureProfile]

    @property
    def num_tables(self) -> int:
        """Tables of the model."""
        return sum(1 for _ in table_configs(self.module))


def read_model(name: str) -> GivenModel:
    """Return the model that a command line names.

    Args:
        name: See `MODEL_HELP`; modules of the working directory count. One of several
            workloads of a file is named after a colon.

    Raises:
        ConfigError: There is no such function or file, it raises, or what it returns or
            holds is no model.
    """
    found = _TABLE_FILE.fullmatch(name)
    if found is not None:
        tables, not_described = read_tables(found["path"], found["workload"] or None)
        try:
            return build_model(tables, not_described)
        except TableError as error:
            raise TableError(f"'{found['path']}': {error}") from error
    made = _call(name)
    parts = list(made) if isinstance(made, tuple) else [made]
    module = next((p for p in parts if isinstance(p, nn.Module)), None)
    sharders = next((p for p in parts if isinstance(p, list)), None)
    constraints = next((p for p in parts if isinstance(p, Mapping)), None)
    known = [p for p in (module, sharders, constraints) if p is not None]
    if module is None or len(known) < len([p for p in parts if p is not None]):
        kinds = ", ".join(type(p).__name__ for p in parts)
        raise ConfigError(
            f"'{name}' must return a torch.nn.Module, alone or in a tuple with a list "
            f"of sharders and a dictionary of constraints, got {kinds}"
        )
    sharders = sharders or get_default_sharders()
    taken = sharders_by_type(sharders)
    if not any(sharder_name(type(m)) in taken for m in module.modules()):
        raise ConfigError(
            f"'{name}': no sharder is for a module of the {type(module).__name__}; a "
            "class derived from EmbeddingBagCollection, and torch's own EmbeddingBag, "
            "need sharders of their own"
        )
    return GivenModel(
        module=module,
        sharders=sharders,
        constraints=constraints or {},
        profiles={},
    )


def _call(name: str) -> Any:
    """Call the function of a name."""
    module_name, _, function = name.partition(":")
    if not (module_name and function):
        raise ConfigError(
            f"a model is named by package.module:function, got '{name}': name a "
            "function without arguments that returns it, or a file of tables that ends "
            "in .json, .yaml or .csv"
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    if module_name.endswith(".py"):
        dotted = ".".join(Path(module_name[:-3]).parts)
        raise ConfigError(
            f"a model is named by package.module:function, got the file '{name}': did "
            f"you mean '{dotted}:{function}'?"
        )
    try:
        known = vars(importlib.import_module(module_name))
    except (Exception, SystemExit) as error:  # whatever the module does
        raise ConfigError(
            f"cannot load '{name}': {_said(error)}. Run the command where `import "
            f"{module_name}` works; {_WHERE}"
        ) from error
    make = known.get(function)
    if isinstance(make, nn.Module):
        return make
    if not callable(make):
        functions = [n for n, value in known.items() if callable(value)]
        raise ConfigError(
            f"cannot load '{name}': '{module_name}' has no function '{function}'; "
            + suggestion(function, functions, "functions")
        )
    try:
        return make()
    except (Exception, SystemExit) as error:  # whatever the function does
        raise ConfigError(
            f"'{name}', which is called without arguments, raises {_said(error)}; "
            f"{_WHERE}"
        ) from error


_WHERE = "NEUROSHARD_DEBUG=1 shows where"


def _said(error: BaseException) -> str:
    """Return an error of the user's code as a line of text."""
    said = " ".join(str(error).split())
    return f"{type(error).__name__}: {said:.300}" if said else type(error).__name__


def build_model(
    tables: Sequence[TableConfig], not_described: Container[str] = ()
) -> GivenModel:
    """Build tables on the "meta" device, with their optimizers.

    Tables whose lookups carry weights are in a collection of their own.

    Args:
        tables: The model's.
        not_described: Names of those whose pooling factor nobody gave.

    Raises:
        TableError: TorchRec cannot hold a table of such a name or size.
    """
    readers: dict[str, str] = {}
    for table in tables:
        if "." in table.name or not table.name:
            raise TableError(
                f"table '{table.name:.100}': a model's table has a name without a dot; "
                "rename it"
            )
        for feature in feature_names(table):
            if other := readers.get(feature):
                raise TableError(
                    f"tables '{other:.100}' and '{table.name:.100}' would both read "
                    f"feature '{feature:.100}'; rename one"
                )
            readers[feature] = table.name
    kinds = {
        name: [t for t in tables if t.weighted == (name == "weighted")]
        for name in ("plain", "weighted")
    }
    found = {name: _checked(held) for name, held in kinds.items() if held}
    module = nn.ModuleDict(found) if len(found) > 1 else next(iter(found.values()))
    profiles, constraints = {}, {}
    for table in tables:
        share = table.num_features
        if table.name not in not_described:
            factors = [table.pooling_factor / share] * share
            constraints[table.name] = ParameterConstraints(pooling_factors=factors)
        if table.profile is not None:
            profile = dataclasses.replace(
                table.profile,
                num_lookups=table.profile.num_lookups / share,
                access_histogram=tuple(
                    count / share for count in table.profile.access_histogram
                ),
            )
            profiles.update(dict.fromkeys(feature_names(table), profile))
    return GivenModel(
        module=module,
        sharders=get_default_sharders(),
        constraints=constraints,
        profiles=profiles,
    )


def _checked(tables: Sequence[TableConfig]) -> EmbeddingBagCollection:
    """Build tables; name the one that cannot be."""
    try:
        return _collection(tables)
    except Exception:  # names that modules have themselves, rows beyond 64 bits, ...
        for table in tables:
            try:
                _collection([table])
            except Exception as error:
                reason = str(error).splitlines()[0]
                raise TableError(
                    f"table '{table.name:.100}' ({table.num_embeddings} x "
                    f"{table.embedding_dim}) cannot be built: {reason:.300}. Give it "
                    "another name or size"
                ) from error
        raise


def _collection(tables: Sequence[TableConfig]) -> EmbeddingBagCollection:
    collection = EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=table.name,
                num_embeddings=table.num_embeddings,
                embedding_dim=table.embedding_dim,
                feature_names=list(feature_names(table)),
                data_type=DataType(table.data_type.upper()),
            )
            for table in tables
        ],
        is_weighted=tables[0].weighted,
        device=torch.device("meta"),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of modules of its own
        for table in tables:
            weights = collection.embedding_bags[table.name].parameters()
            apply_optimizer_in_backward(
                _OPTIMIZERS[table.optimizer], weights, {"lr": 0.01}
            )
    return collection


@dataclass(frozen=True, kw_only=True, slots=True)
class _TableConstraints:
    """A table's constraints in a file: fields of TorchRec's, and of `cache_params`."""

    sharding_types: Sequence[str] | None = None
    compute_kernels: Sequence[str] | None = None
    min_partition: int | None = None
    pooling_factors: Sequence[float] | None = None
    num_poolings: Sequence[float] | None = None
    batch_sizes: Sequence[int] | None = None
    enforce_hbm: bool | None = None
    cache_load_factor: float | None = None

    def __post_init__(self) -> None:
        for name, known in KNOWN_VALUES.items():
            for odd in [v for v in getattr(self, name) or () if v not in known]:
                raise ValueError(
                    f"{name} has '{odd:.60}', which TorchRec does not have; "
                    + suggestion(odd, known, name.replace("_", " "))
                )
        if self.cache_load_factor is not None and not 0 < self.cache_load_factor <= 1:
            raise ValueError(
                "cache_load_factor must be above 0 and at most 1, got "
                f"{self.cache_load_factor}"
            )

    def fields(self) -> dict[str, Any]:
        """Return what is given, as TorchRec names and holds it."""
        found = {
            name: list(value) if isinstance(value, tuple) else value
            for name in self.__slots__
            if (value := getattr(self, name)) is not None
        }
        if load := found.pop("cache_load_factor", None):
            found["cache_params"] = CacheParams(load_factor=load)
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class _Placement:
    """`PlacementConstraints` in a file."""

    pin: Mapping[str, Sequence[int]] = field(default_factory=dict)
    together: Sequence[Sequence[str]] = ()
    apart: Sequence[Sequence[str]] = ()
    forbid_ranks: Sequence[int] = ()


def read_constraints(
    path: str | Path, model: GivenModel
) -> dict[str, ParameterConstraints]:
    """Read TorchRec's constraints on tables from a JSON or YAML file.

    The file holds an object: table -> an object with fields of `ParameterConstraints`
    (and `cache_load_factor`, of its `cache_params`). The table "*" is every table; what
    a table's own entry says goes before it, and that before the model's own.

    Raises:
        ConfigError: The file cannot be read, names what is not there, or a value is of
            another kind.
    """
    data = read_document(path)
    if not isinstance(data, Mapping):
        raise ConfigError(
            f"'{path}' holds no constraints: expected an object, table -> fields"
        )
    tables = {config.name for config in table_configs(model.module)}
    for name in data:
        if name not in tables | {"*"}:
            raise ConfigError(
                f"'{path}' names table '{name!s:.60}', which the model does not have; "
                + suggestion(str(name), tables, "tables")
            )
    found = dict(model.constraints)
    for name in sorted(tables):
        fields: dict[str, Any] = {}
        for entry in ("*", name):
            what = f"constraints of table '{entry}' in '{path}'"
            given = data.get(entry, {})
            fields |= read_fields(_TableConstraints, given, ConfigError, what).fields()
        if fields:
            known = found.get(name) or ParameterConstraints()
            found[name] = dataclasses.replace(known, **fields)
    return found


def read_placement(path: str | Path) -> PlacementConstraints:
    """Read `PlacementConstraints` from a JSON or YAML file: its fields.

    Raises:
        ConfigError: The file cannot be read, or a field is unknown or of another kind.
    """
    data, what = read_document(path), f"placement constraints in '{path}'"
    found = read_fields(_Placement, data, ConfigError, what)
    try:
        return PlacementConstraints(**to_fields(found))
    except ConfigError as error:
        raise ConfigError(f"'{path}': {error}") from error


def devices_named(
    card: str,
    ranks: int,
    ranks_per_node: int | None = None,
    memory_gb: float | None = None,
) -> Topology:
    """Return the devices that a command line asks for.

    Args:
        card: A name of `GPU_CARDS`, or "cpu".
        ranks: All of them.
        ranks_per_node: None: as the card's nodes are sold, of CPUs all.
        memory_gb: Of a GPU. None: as sold.

    Raises:
        ConfigError: There is no such card, or the ranks do not fill whole nodes.
    """
    card = card.strip().lower()
    if card not in (*GPU_CARDS, "cpu"):
        raise ConfigError(
            f"unknown card '{card:.60}'; {suggestion(card, GPU_CARDS, 'cards')} "
            f"Known are {', '.join(GPU_CARDS)}, and cpu"
        )
    if not 1 <= ranks <= _MOST_RANKS:
        raise ConfigError(f"there must be 1 to {_MOST_RANKS:,} ranks, got {ranks}")
    usual = ranks if card == "cpu" else card_named(card).gpus_per_node
    per_node = min(ranks, usual) if ranks_per_node is None else ranks_per_node
    if per_node < 1 or ranks % per_node:
        raise ConfigError(
            f"{ranks} ranks do not fill whole nodes of {per_node}: take another "
            "number of ranks, or other ranks per node"
        )
    if card != "cpu":
        return topology_for(
            card,
            num_nodes=ranks // per_node,
            ranks_per_node=per_node,
            memory_gb=memory_gb,
        )
    if memory_gb is not None:
        raise ConfigError("the memory of a CPU's rank is the host's: leave it out")
    looked_up = accepted_arguments(Topology, created_by_factory=True)
    return Topology(ranks, "cpu", local_world_size=per_node, **looked_up)
