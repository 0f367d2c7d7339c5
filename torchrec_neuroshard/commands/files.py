"""Read and check what a command line names, as far as that needs no torch.

`inputs` makes TorchRec's objects of it, once torch is loaded.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import os
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

from torchrec_neuroshard.bundles.folders import check_cost_model
from torchrec_neuroshard.costs.placement_constraints import PlacementConstraints
from torchrec_neuroshard.errors import CheckpointError, ConfigError, suggestion
from torchrec_neuroshard.files import read_fields
from torchrec_neuroshard.hardware.cards import card_named, node_counts
from torchrec_neuroshard.progress import phase
from torchrec_neuroshard.report.plan_tables import full_name
from torchrec_neuroshard.tables.loaders import (
    ReadTables,
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


@dataclass(frozen=True, kw_only=True, slots=True)
class TableFile:
    """A file of tables, and what it holds."""

    path: str
    read: ReadTables


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFunction:
    """A function that makes a model. Its module was found, and is not imported yet."""

    name: str
    """As on the command line."""
    module: str
    function: str
    """Empty if the command line names none."""

    def error(self, error: BaseException) -> ConfigError:
        """Return the error for a module or a function that cannot be used."""
        module, name = self.module, self.name
        top = module.partition(".")[0]
        if not self.function and getattr(error, "name", None) == top:
            return _no_model_file(name, Path(name))
        said = " ".join(str(error).split())
        meant = ""
        if not self.function and Path(top + ".py").exists():
            meant = f" Did you mean '{':'.join(name.rsplit('.', 1))}'?"
        return ConfigError(
            f"cannot load '{name}': {type(error).__name__}: {said:.300}. A model is a "
            ".json, .yaml or .csv file, or package.module:function, whose function "
            f"takes no arguments.{meant} Run the command where `import {module}` "
            "works. NEUROSHARD_DEBUG=1 shows the traceback"
        )


def find_model(name: str, sequences: Sequence[str] = ()) -> TableFile | ModelFunction:
    """Return the model that a command line names, without building it.

    Args:
        name: A file of tables, where a workload's name may follow after a colon; "-",
            which reads such a file from standard input; or "package.module:function",
            importable from the working directory, which this puts on Python's path.
        sequences: Tables of the file whose rows are not pooled.

    Raises:
        ConfigError: The file or the module does not exist, or the model is a function
            and sequences are named.
        TableError: The file's tables cannot be used.
    """
    if found := _TABLE_FILE.fullmatch(name):
        read = read_tables(found["path"], found["workload"] or None)
        return TableFile(path=found["path"], read=_with_sequences(read, sequences))
    if sequences:
        raise ConfigError(
            "--sequences is for files of tables; in a model, those of an "
            "EmbeddingCollection are sequences. Leave it out"
        )
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
    made = ModelFunction(name=name, module=module, function=function)
    if (missing := _missing_module(module)) is not None:
        error = ModuleNotFoundError(f"No module named '{missing}'", name=missing)
        raise made.error(error)
    return made


def _with_sequences(read: ReadTables, names: Sequence[str]) -> ReadTables:
    """Return tables of which these are sequences.

    Raises:
        ConfigError: There is no such table.
    """
    known = [table.name for table in read.tables]
    for name in names:
        if name not in known:
            near = suggestion(name, known, "tables")
            raise ConfigError(f"--sequences names no table: '{name:.60}'; {near}")
    tables = (
        dataclasses.replace(table, pooled=False) if table.name in names else table
        for table in read.tables
    )
    return read._replace(tables=tuple(tables))


def _missing_module(module: str) -> str | None:
    """Return the first part of a module's name without a file; None: all have one.

    Nothing is imported: importing a package may take seconds.
    """
    parts = module.split(".")
    path: Sequence[str] | None = None
    for count in range(1, len(parts) + 1 if all(parts) else 0):
        name = ".".join(parts[:count])
        if (loaded := sys.modules.get(name)) is not None:
            path = getattr(loaded, "__path__", [])
            continue
        if count == 1:
            spec = importlib.util.find_spec(name)
        else:
            spec = PathFinder.find_spec(name, path)
        if spec is None:
            return name
        path = spec.submodule_search_locations or []
    return None


def _no_model_file(name: str, file: Path) -> ConfigError:
    """Return the error for a model's file that is missing or of another kind."""
    reason = f"files that end in '{file.suffix}' hold no model"
    if file.is_dir() or not file.exists():
        reason = "it is a folder" if file.is_dir() else "there is no such file"
    return ConfigError(
        f"cannot load '{name}': {reason}. A model is a .json, .yaml or .csv file of "
        "tables, or package.module:function or file.py:function, whose function takes "
        "no arguments"
    )


def by_module(tables: Sequence[TableConfig]) -> dict[str, list[TableConfig]]:
    """Return the path of each collection that a file's tables are built as -> tables.

    Tables with weighted lookups get a collection of their own. Those whose rows are not
    pooled get an `EmbeddingCollection` for each width. A single collection is the whole
    model, with the path "".
    """
    held: dict[str, list[TableConfig]] = {"plain": [], "weighted": []}
    for table in tables:
        kind = "weighted" if table.weighted else "plain"
        if not table.pooled:
            kind = f"sequences_{table.embedding_dim}"
        held.setdefault(kind, []).append(table)
    found = {kind: own for kind, own in held.items() if own}
    return found if len(found) > 1 else {"": [*tables]}


@dataclass(frozen=True, kw_only=True, slots=True)
class TableConstraints:
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


@dataclass(frozen=True, kw_only=True, slots=True)
class ConstraintsFile:
    """A file of constraints on tables."""

    path: str
    tables: Mapping[str, TableConstraints]
    """Table, "*" for all of them, or module's path and table -> constraints."""

    def check_names(self, keys: Collection[str]) -> None:
        """Check that the model has all tables.

        Args:
            keys: `table_keys` of the model's tables.

        Raises:
            ConfigError: It lacks one.
        """
        for entry in self.tables:
            if entry != "*" and entry not in keys:
                said = unknown_table("names", entry, keys)
                raise ConfigError(f"'{self.path}' {said}")


def read_constraints(path: str | Path) -> ConstraintsFile:
    """Read TorchRec's constraints on tables from a JSON or YAML file.

    The file holds an object: table -> an object with fields of `TableConstraints`.

    Raises:
        ConfigError: The file cannot be read, names an unknown field, or a value is of
            the wrong type.
    """
    data = read_document(path)
    if not isinstance(data, Mapping):
        raise ConfigError(
            f"'{path}' holds no constraints; it must be an object, table -> fields"
        )
    tables = {}
    for entry, given in data.items():
        what = f"constraints of table '{entry}' in '{path}'"
        made = read_fields(TableConstraints, given, ConfigError, what)
        tables[str(entry)] = made
    return ConstraintsFile(path=str(path), tables=tables)


def check_checkpoint(folder: Path) -> None:
    """Check that a folder looks like a checkpoint.

    Raises:
        CheckpointError: Its metadata cannot be read.
    """
    try:
        (folder / ".metadata").open("rb").close()
    except OSError as error:
        raise CheckpointError(
            f"'{folder}' holds no checkpoint that can be read: {error}. Name a folder "
            "that torch.distributed.checkpoint.save has finished"
        ) from error


def read_placement(path: str | Path) -> PlacementConstraints:
    """Read the fields of `PlacementConstraints` from a JSON or YAML file.

    Raises:
        ConfigError: The file cannot be read, or a field is unknown or has the wrong
            type.
    """
    what = f"placement constraints in '{path}'"
    return read_fields(PlacementConstraints, read_document(path), ConfigError, what)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannerFiles:
    """What the files hold that the options of `add_planner` name."""

    model: TableFile | ModelFunction
    constraints: ConstraintsFile | None
    profiles: Mapping[str, FeatureProfile]
    placement: PlacementConstraints | None


def read_files(args: argparse.Namespace, num_ranks: int) -> PlannerFiles:
    """Read the files that the options of `add_planner` name.

    Args:
        args: The options.
        num_ranks: Ranks to plan for.

    Raises:
        NeuroShardError: A file cannot be used.
    """
    check_cost_model(args.cost_model)
    placement, constraints = getattr(args, "placement", None), args.constraints
    with phase("reading the files"):
        found = PlannerFiles(
            model=find_model(args.model, args.sequences),
            constraints=constraints and read_constraints(constraints),
            profiles={} if args.profiles is None else load_profiles(args.profiles),
            placement=placement and read_placement(placement),
        )
    if isinstance(found.model, TableFile):
        modules = by_module(found.model.read.tables)
        names = [(path, t.name) for path, own in modules.items() for t in own]
        if found.constraints is not None:
            found.constraints.check_names({k for n in names for k in table_keys(*n)})
        if found.placement is not None:
            found.placement.rules([full_name(*n) for n in names], num_ranks)
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedDevices:
    """The devices that a command line asks for."""

    card: str
    """A key of `GPU_CARDS`, or "cpu"."""
    num_ranks: int
    ranks_per_node: int
    figures: Mapping[str, float]
    """Name in `FIGURES` -> given value. Others are as sold, or TorchRec's defaults."""


FIGURES = ("memory_gb", "host_memory_gb", "intra_gb_per_s", "inter_gb_per_s")
"""Options of `add_devices` that are arguments of `topology_for`."""


def given_figures(args: argparse.Namespace) -> dict[str, float]:
    """Return the figures of devices that options give.

    Raises:
        ConfigError: A share of a host's memory is to be kept free.
    """
    if args.reserve and "cpu" in args.card:
        raise ConfigError(
            "--reserve is for GPUs: TorchRec's reservation keeps no share of a host's "
            "memory free. Leave it out, and lower --host-memory-gb"
        )
    found = {name: getattr(args, name) for name in FIGURES}
    return {name: value for name, value in found.items() if value is not None}


def devices_named(
    card: str, ranks: int, ranks_per_node: int | None = None, **figures: float
) -> NamedDevices:
    """Return the devices that a command line asks for.

    Args:
        card: A key of `GPU_CARDS`, or "cpu".
        ranks: Number of ranks.
        ranks_per_node: None: a node of this card as sold; all ranks on CPUs.
        figures: See `NamedDevices`.

    Raises:
        ConfigError: The card is unknown, or the ranks do not fill whole nodes.
    """
    if card == "cpu" and "memory_gb" in figures:
        raise ConfigError(
            "the memory of a CPU's rank is the host's; pass it as --host-memory-gb "
            "instead of --memory-gb"
        )
    usual = ranks if card == "cpu" else card_named(card).gpus_per_node
    _, per_node = node_counts(usual, world_size=ranks, ranks_per_node=ranks_per_node)
    return NamedDevices(
        card=card,
        num_ranks=ranks,
        ranks_per_node=per_node,
        figures=figures,
    )
