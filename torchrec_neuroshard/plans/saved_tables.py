"""The tables of a plan in a checkpoint, and what becomes of their optimizer's state.

TorchRec's fused kernels name the state of a table `<table>.momentum1` and
`<table>.exp_avg_sq`. A dense optimizer, which trains data-parallel tables, names it as
PyTorch does, and counts its steps for each table.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torchrec.distributed.types import ParameterSharding, ShardingPlan

from torchrec_neuroshard.errors import CheckpointError, ConfigError, PlanFileError
from torchrec_neuroshard.plans.checkpoint import Checkpoint
from torchrec_neuroshard.plans.recut import Counter, Layout, Recut
from torchrec_neuroshard.report.plan_tables import (
    Box,
    PlanTable,
    TableSharding,
    check_shards,
    full_name,
    plan_entries,
    plan_shardings,
    shard_boxes,
)

Shards = Sequence[tuple[int, Box]]
"""Ranks, and the rows and columns that they hold."""

_ENTRY = re.compile(
    r"(?:(?P<module>.+)\.)?(?:embedding_bags|embeddings)\.(?P<table>[^.]+)\.weight"
    r"(?:\.(?P<state>.+))?"
)
"""A table's weights in the state of a model, or its state in that of an optimizer."""
_NO_TENSOR = re.compile("key_value|virtual_table")
"""Kernels whose tables a checkpoint does not hold as tensors."""
_UNKNOWN: Mapping[str, Any] = {"data_type": "", "pooling": "", "feature_names": ()}
_IDS = re.compile(r"\._managed_collision_modules\.([^.]+)\.")
"""Entries that map ids to the rows of a table's shards."""
_ITER, _STEP = "iter", "step"
"""How fused kernels and dense optimizers call the number of iterations trained."""
_DENSE_NAMES: Sequence[Mapping[str, str]] = (
    {"momentum1": "sum"},
    {"momentum1": "exp_avg", "exp_avg_sq": "exp_avg_sq"},
)
"""Names of a table's states in fused kernels -> in dense optimizers: Adagrad and
row-wise Adagrad, then Adam."""


@dataclass(slots=True)
class SavedTable:
    """A table of the plan, and what the checkpoint has of it."""

    path: str
    name: str
    sharding: ParameterSharding
    weights: list[str] = field(default_factory=list)
    """Entries with its weights: usually one."""
    states: dict[str, str] = field(default_factory=dict)
    """Entry of the optimizer's state -> its name, without the table's."""
    was_dense: bool = False
    """Whether a dense optimizer has trained it."""
    whole: Layout = field(default_factory=lambda: Layout(0, 0))
    """Its size."""
    held: Shards = ()
    """Parts of shards in the checkpoint."""
    planned: Shards = ()
    """Shards in the plan, with every replica of a data-parallel table."""

    @property
    def full_name(self) -> str:
        """Path and name, which are unique in a model."""
        return full_name(self.path, self.name)

    @property
    def is_dense(self) -> bool:
        """Whether the plan replicates it, so that a dense optimizer trains it."""
        return self.sharding.sharding_spec is None

    @property
    def written(self) -> Shards:
        """The shards to write: one of all replicas."""
        return self.planned[:1] if self.is_dense else self.planned

    @property
    def changes_optimizer(self) -> bool:
        """Whether a dense optimizer takes over from a fused kernel, or the reverse."""
        return bool(self.states) and self.is_dense != self.was_dense


def find_tables(source: Checkpoint, plan: ShardingPlan) -> list[SavedTable]:
    """Return the plan's tables with what the checkpoint has of them.

    Raises:
        CheckpointError: The checkpoint is incomplete or of another model.
        ConfigError: A table cannot be converted.
    """
    found = {
        (path, name): SavedTable(path, name, sharding)
        for path, name, sharding in plan_entries(plan.plan)
    }
    deepest_first = sorted(plan.plan, key=len, reverse=True)
    for entry in source.tensors:
        if not (match := _ENTRY.fullmatch(entry)):
            continue
        inside, name = f".{match['module'] or ''}.", match["table"]
        paths = [p for p in deepest_first if not p or f".{p}." in inside]
        table = next((found[p, name] for p in paths if (p, name) in found), None)
        if table is None and paths:
            raise CheckpointError(
                f"table '{full_name(paths[0], name)}' is in the checkpoint "
                f"'{source.folder}', but not in the plan. Name the plan of this model"
            )
        if table is not None and match["state"]:
            kind = match["state"].removeprefix(f"{name}.")
            table.states[entry] = kind
            table.was_dense = kind == match["state"]
        elif table is not None:
            table.weights.append(entry)
    tables = [*found.values()]
    sizes = [_size(source, table) for table in tables]
    try:
        ranks = [rank for table in tables for rank in table.sharding.ranks or ()]
        check_shards(plan_shardings(plan), sizes, 1 + max(ranks, default=0))
    except PlanFileError as error:
        raise CheckpointError(
            f"this plan is not of the model in '{source.folder}': {error}"
        ) from error
    ids = {match[1] for entry in source.entries if (match := _IDS.search(entry))}
    for table, size in zip(tables, sizes, strict=True):
        table.planned = shard_boxes(size, TableSharding.of(table.sharding), 1)
        old, new = (
            {(rank, b.top) for rank, b in s} for s in (table.held, table.planned)
        )
        if table.name in ids and old != new:
            raise ConfigError(
                f"table '{table.full_name}': its managed collision module maps ids to "
                "the rows of each rank, so no other rank can have them. Leave the "
                "table where it is"
            )
    return tables


def _size(source: Checkpoint, table: SavedTable) -> PlanTable:
    """Return a table's size, after looking for its weights."""
    where, kernel = f"table '{table.full_name}'", table.sharding.compute_kernel
    if _NO_TENSOR.search(str(kernel)):
        raise ConfigError(
            f"{where}: its kernel is {kernel}, whose tables are not in checkpoints. "
            "Plan it for another kernel"
        )
    if not table.weights:
        raise CheckpointError(
            f"{where} is in the plan, but its weights are not in the checkpoint "
            f"'{source.folder}'. Name a checkpoint of this model that has the state of "
            "the model and of its optimizers"
        )
    table.whole = Layout(*source.tensors[table.weights[0]].size)
    chunks = source.chunks(table.weights[0])
    table.held = [(source.rank(i), table.whole.box(chunk)) for i, chunk in chunks]
    if sum(box.size for _, box in table.held) != table.whole.size.numel():
        raise CheckpointError(
            f"{where}: the checkpoint '{source.folder}' lacks shards of it. Save it "
            "again, on all ranks"
        )
    rows, columns = table.whole.size
    sizes: Any = {"num_embeddings": rows, "embedding_dim": columns}
    return PlanTable(path=table.path, name=table.name, **sizes, **_UNKNOWN)


class StateConverter:
    """Finds what becomes of each table's weights and state."""

    def __init__(
        self, source: Checkpoint, tables: Sequence[SavedTable], step: int | None
    ) -> None:
        """Look for the optimizers.

        Args:
            source: The checkpoint.
            tables: Its tables.
            step: Iterations trained; None: as dense parameters say.

        Raises:
            ConfigError: Optimizers are saved apart, and a table changes its optimizer.
        """
        self._source, self._tables, self._step = source, tables, step
        self._steps = [e for e in source.tensors if e.endswith(f".{_STEP}")]
        states = [*self._steps, *(entry for t in tables for entry in t.states)]
        self._parents = {source.paths[entry][:-2] for entry in states}
        odd = [table.full_name for table in tables if table.changes_optimizer]
        if odd and len(self._parents) > 1:
            known = ", ".join(sorted(".".join(map(str, p)) for p in self._parents))
            raise ConfigError(
                f"table '{odd[0]}' changes its optimizer, and the checkpoint has "
                f"several: {known}. Save the state of a CombinedOptimizer"
            )

    def recuts(self, table: SavedTable) -> Iterator[Recut]:
        """Yield the tensors of a table: weights, and state per row or weight.

        Raises:
            CheckpointError: The state does not fit the table.
            ConfigError: The state cannot be converted.
        """
        for entry in table.weights:
            yield self._recut(table, entry, entry, self._source.paths[entry])
        if not (table.is_dense and table.was_dense):
            names = self._new_names(table)
            for entry in (e for e, kind in table.states.items() if kind in names):
                place = self._place(table, entry, names[table.states[entry]])
                yield self._recut(table, entry, *place)

    def _recut(self, table: SavedTable, entry: str, name: str, path: Any) -> Recut:
        tensor, old, new = self._source.tensors[entry], table.whole, table.whole
        if tensor.size != table.whole.size:
            held, written = (
                tuple(sorted({box.columns for _, box in shards}))
                for shards in (table.held, table.written)
            )
            old = replace(old, groups=held, is_flat=len(tensor.size) == 1)
            new = replace(new, groups=written, is_flat=not table.is_dense)
        if tensor.size != old.size:
            raise CheckpointError(
                f"'{entry}' has size {[*tensor.size]}, but the optimizer of table "
                f"'{table.full_name}' needs {[*table.whole.size]} or {[*old.size]}. "
                "Name a checkpoint of this model"
            )
        return Recut(
            old_name=entry,
            name=name,
            path=path,
            properties=tensor.properties,
            old_layout=old,
            layout=new,
            held=[(index, old.box(c)) for index, c in self._source.chunks(entry)],
            shards=table.written,
        )

    def _place(self, table: SavedTable, entry: str, new: str) -> tuple[str, Any]:
        """Return entry and path of a state under its new name."""
        old, path = table.states[entry], self._source.paths[entry]
        name = entry.removesuffix(old).removesuffix(f"{table.name}.") + new
        return name, (*path[:-1], new) if len(path) > 1 else (name,)

    def _new_names(self, table: SavedTable) -> Mapping[str, str]:
        """Return a table's states -> their names in its new optimizer."""
        kinds = {k: e for e, k in table.states.items() if k not in (_ITER, _STEP)}
        if not table.changes_optimizer:
            return {kind: f"{table.name}.{kind}" for kind in kinds}
        sizes = {k: self._source.tensors[e].size for k, e in kinds.items()}
        row_wise = {kind for kind, size in sizes.items() if size != table.whole.size}
        for names in _DENSE_NAMES:
            if table.was_dense:
                names = {new: f"{table.name}.{old}" for old, new in names.items()}
            if names.keys() == kinds.keys() and (len(names) == 1 or not row_wise):
                return names
        change = ["sharded", "data-parallel"][:: -1 if table.was_dense else 1]
        raise ConfigError(
            f"table '{table.full_name}' becomes {change[1]}, but the state of its "
            f"optimizer, {', '.join(sorted(kinds))}, is not Adagrad's, row-wise "
            f"Adagrad's or Adam's. Plan it {change[0]}"
        )

    def counters(self, table: SavedTable) -> Iterator[Counter]:
        """Yield the counters of a table.

        Raises:
            ConfigError: The steps of a dense optimizer are unknown.
        """
        ranks = table.sharding.ranks or []
        for entry in (e for e, kind in table.states.items() if kind == _ITER):
            value = torch.tensor([max(self._values([entry]))])
            yield Counter(entry, self._source.paths[entry], value, ranks)
        if not (table.is_dense and table.changes_optimizer):
            return
        steps = self._values(self._steps) if self._step is None else [self._step]
        if not steps:
            raise ConfigError(
                f"table '{table.full_name}' becomes data-parallel, and no parameter of "
                "its dense optimizer tells the iterations trained. Pass them as step"
            )
        place = self._place(table, next(iter(table.states)), _STEP)
        yield Counter(*place, torch.tensor(float(max(steps))), ranks[:1])

    def _values(self, entries: Sequence[str]) -> list[Any]:
        chunks = [index for entry in entries for index, _ in self._source.chunks(entry)]
        return [self._source.load(index).item() for index in chunks]

    def empty(self) -> dict[str, Any]:
        """Return entry -> path of tables whose optimizer has no state, such as SGD.

        PyTorch saves none for them, but asks for one where a rank has no shard of
        some table.
        """
        keys = [
            self._source.paths[table.weights[0]][-1]
            for table in self._tables
            if not table.states and not table.is_dense
        ]
        paths = [(*parent, key) for parent in self._parents for key in keys]
        return {".".join(map(str, path)): path for path in paths}
