"""What command lines name: a model, constraints on its tables, the devices."""

from __future__ import annotations

import dataclasses
import importlib
import os
import re
import sys
import warnings
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
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
from torchrec_neuroshard.gpu_cards import GPU_CARDS, card_named
from torchrec_neuroshard.planner.compat import accepted_arguments, sharders_by_type
from torchrec_neuroshard.planner.options.checks import KNOWN_VALUES
from torchrec_neuroshard.planner.options.constraints import PlacementConstraints
from torchrec_neuroshard.planner.options.table_reader import (
    GivenPoolingFactors,
    table_configs,
)
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
            f"'{name}': no sharder is for a module of the {type(module).__name__}. "
            "TorchRec asks for the very class, an EmbeddingBagCollection for one: a "
            "class derived from it is another, and torch's own EmbeddingBag and "
            "Embedding need sharders of their own. The sharders: "
            + ", ".join(sorted({type(s).__name__ for s in sharders}))
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
            factors = GivenPoolingFactors([table.pooling_factor / share] * share)
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


def _names(value: Any) -> list[str] | None:
    is_list = isinstance(value, list) and all(isinstance(v, str) for v in value)
    return value if is_list else None


def _numbers(value: Any) -> list[float] | None:
    if not isinstance(value, list) or not all(map(_is_number, value)):
        return None
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


_CONSTRAINTS: Mapping[str, tuple[str, Callable[[Any], Any]]] = {
    "sharding_types": ('a list such as ["row_wise"]', _names),
    "compute_kernels": ('a list such as ["fused"]', _names),
    "min_partition": (
        "a whole number of columns",
        lambda value: value if type(value) is int else None,
    ),
    "pooling_factors": (
        "a list of numbers, one per feature",
        lambda value: (found := _numbers(value)) and GivenPoolingFactors(found),
    ),
    "num_poolings": ("a list of numbers, one per feature", _numbers),
    "batch_sizes": ("a list of numbers, one per feature", _numbers),
    "enforce_hbm": (
        "true or false",
        lambda value: value if isinstance(value, bool) else None,
    ),
    "cache_load_factor": (
        "a number above 0 and at most 1",
        lambda value: value if _is_number(value) and 0 < value <= 1 else None,
    ),
}
"""Field of a table's constraints in a file -> what it holds, and how that is read."""


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
            fields |= _constraint_fields(str(path), entry, data.get(entry, {}))
        if "cache_load_factor" in fields:
            load = fields.pop("cache_load_factor")
            fields["cache_params"] = CacheParams(load_factor=load)
        if fields:
            known = found.get(name) or ParameterConstraints()
            found[name] = dataclasses.replace(known, **fields)
    return found


def _constraint_fields(path: str, table: str, entry: Any) -> dict[str, Any]:
    where = f"'{path}', table '{table}'"
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{where}: expected an object of fields, got {entry!r:.40}")
    fields = {}
    for field, value in entry.items():
        if field not in _CONSTRAINTS:
            raise ConfigError(
                f"{where}: unknown field '{field!s:.60}'; "
                + suggestion(str(field), _CONSTRAINTS, "fields")
            )
        kind, read = _CONSTRAINTS[field]
        fields[field] = read(value)
        if fields[field] is None:
            raise ConfigError(f"{where}: {field} must be {kind}, got {value!r:.60}")
        known = KNOWN_VALUES.get(field, ())
        for odd in [v for v in fields[field] if v not in known] if known else ():
            raise ConfigError(
                f"{where}: {field} has '{odd:.60}', which TorchRec does not have; "
                + suggestion(odd, known, field.replace("_", " "))
            )
    return fields


def read_placement(path: str | Path) -> PlacementConstraints:
    """Read `PlacementConstraints` from a JSON or YAML file: its fields.

    Raises:
        ConfigError: The file cannot be read, or a field is unknown or of another kind.
    """
    data = read_document(path)
    fields = [f.name for f in dataclasses.fields(PlacementConstraints)]
    if not isinstance(data, Mapping):
        raise ConfigError(
            f"'{path}' holds no placement constraints: expected an object with "
            f"{', '.join(fields)}"
        )
    for field in data:
        if field not in fields:
            raise ConfigError(
                f"'{path}': unknown field '{field!s:.60}'; "
                + suggestion(str(field), fields, "fields")
            )
    if not isinstance(data.get("pin", {}), Mapping):
        raise ConfigError(
            f"'{path}': pin takes an object, table -> ranks, got {data['pin']!r:.60}"
        )
    try:
        return PlacementConstraints(**data)
    except ConfigError as error:
        raise ConfigError(f"'{path}': {error}") from error
    except TypeError as error:  # a number where a list is due
        raise ConfigError(
            f"'{path}': together, apart and forbid_ranks take lists ({error})"
        ) from error


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
    return Topology(
        world_size=ranks,
        local_world_size=per_node,
        compute_device="cpu",
        **looked_up,
    )
