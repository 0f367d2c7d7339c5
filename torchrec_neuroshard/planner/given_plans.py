"""Plans that somebody made: what they hold, whether they are whole, what they cost."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from torch import nn
from torchrec.distributed.planner.types import Enumerator, Shard, ShardingOption
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    ModuleSharder,
    ParameterSharding,
    ShardingPlan,
)
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.quant.embedding_modules import (
    EmbeddingBagCollection as QuantEmbeddingBagCollection,
)
from torchrec.quant.embedding_modules import (
    EmbeddingCollection as QuantEmbeddingCollection,
)

from torchrec_neuroshard.errors import NeuroShardError
from torchrec_neuroshard.planner.checks import KNOWN_VALUES
from torchrec_neuroshard.planner.compat import sharders_by_type
from torchrec_neuroshard.planner.plan_costs import PlanCosts
from torchrec_neuroshard.planner.reader import (
    TABLE_MODULES,
    note_sharders,
    table_configs,
)
from torchrec_neuroshard.report import TableMove
from torchrec_neuroshard.report.parts import ShardReport, TableReport
from torchrec_neuroshard.tables import DATA_TYPE_BYTES

__all__ = [
    "PlanFileError",
    "PlanOptions",
    "PlanTable",
    "check_plan",
    "copied",
    "model_tables",
    "offered_options",
    "plan_entries",
    "plan_options",
    "plan_tables",
    "table_moves",
]

_QUANTISED = (QuantEmbeddingBagCollection, QuantEmbeddingCollection)


class PlanFileError(NeuroShardError, ValueError):
    """A plan cannot be written, or a plan file cannot be used."""


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class PlanTable:
    """What a plan takes for granted of one table."""

    path: str
    """Module that the plan names; "" is the model itself."""
    name: str
    num_embeddings: int
    embedding_dim: int
    data_type: str
    pooling: str
    """"sum", "mean", or "none" for sequences."""
    feature_names: tuple[str, ...]

    @property
    def full_name(self) -> str:
        """Path and name, unique in a model."""
        return f"{self.path}.{self.name}" if self.path else self.name

    @property
    def value_bytes(self) -> int:
        """Bytes of one weight."""
        return DATA_TYPE_BYTES.get(self.data_type, 4)


class PlanOptions:
    """Plans of one model as TorchRec's options, with shards, ranks and costs.

    Args:
        module: The model, before `DistributedModelParallel` took it.
        sharders: Of its embedding modules.
        enumerator: Lists its options.
        costs: What plans cost.
    """

    def __init__(
        self,
        module: nn.Module,
        sharders: Sequence[ModuleSharder[Any]],
        enumerator: Enumerator,
        costs: PlanCosts,
    ) -> None:
        self._module, self._costs, self._enumerator = module, costs, enumerator
        self._offered = offered_options(module, sharders, enumerator)

    def of(self, plan: ShardingPlan) -> list[ShardingOption]:
        """Return a plan's options, one for each of its tables, in its order.

        Raises:
            PlanFileError: The plan is not one of this model, or not whole.
        """
        world_size = int(self._costs.topology.world_size)
        options = plan_options(plan, self._module, self._offered, world_size)
        self._enumerator.populate_estimates(options)
        self._costs.share_launches(
            [o for o in options if not self._costs.reader.is_column_sharded(o)]
        )
        return options


def offered_options(
    module: nn.Module, sharders: Sequence[ModuleSharder[Any]], enumerator: Enumerator
) -> dict[tuple[str, str], list[ShardingOption]]:
    """Return module and table -> what an enumerator lists for it."""
    found: dict[tuple[str, str], list[ShardingOption]] = {}
    listed = enumerator.enumerate(module, list(sharders))
    note_sharders(listed, sharders_by_type(sharders))
    for option in listed:
        found.setdefault((option.path, option.name), []).append(option)
    return found


def plan_options(
    plan: ShardingPlan,
    module: nn.Module,
    offered: Mapping[tuple[str, str], Sequence[ShardingOption]],
    world_size: int,
) -> list[ShardingOption]:
    """Return a plan's options, one for each of its tables, in its order.

    Args:
        plan: The plan.
        module: The model, before `DistributedModelParallel` took it.
        offered: What `offered_options` returned.
        world_size: Ranks that there are.

    Raises:
        PlanFileError: The plan is not one of this model, or not whole.
    """
    tables, _ = model_tables(plan.plan, module)
    check_plan(plan, tables, world_size)
    options = []
    for path, name, sharding in plan_entries(plan):
        wanted = sharding.sharding_type, sharding.compute_kernel
        listed = offered.get((path, name))
        if listed is None:
            found = " or ".join(sorted(f"'{p}'" for p, n in offered if n == name))
            raise PlanFileError(
                f"the plan has table '{name}' in module '{path}', the model in "
                f"{found or 'none that a sharder takes'}: plan that model itself"
            )
        same = [o for o in listed if (o.sharding_type, o.compute_kernel) == wanted]
        option = _with_shards((same or listed)[0], sharding)
        # What the constraints do not allow may still be at work.
        option.sharding_type, option.compute_kernel = wanted
        option.cache_params = sharding.cache_params
        options.append(option)
    return options


def _with_shards(option: ShardingOption, sharding: ParameterSharding) -> ShardingOption:
    """Return a copy of the option with the shards and ranks of a plan."""
    new = copy.copy(option)
    if sharding.sharding_spec is None:  # replicas
        boxes = [(list(option.tensor.shape), [0, 0])] * len(sharding.ranks)
    else:
        boxes = [
            (m.shard_sizes, m.shard_offsets) for m in sharding.sharding_spec.shards
        ]
    new.shards = [
        Shard(size=list(size), offset=list(offset), rank=rank)
        for (size, offset), rank in zip(boxes, sharding.ranks, strict=True)
    ]
    return new


def plan_entries(plan: ShardingPlan) -> Iterator[tuple[str, str, ParameterSharding]]:
    """Return path, table and sharding of everything in a plan."""
    for path, module_plan in plan.plan.items():
        for name, sharding in module_plan.items():
            yield path, name, sharding


def copied(plan: ShardingPlan) -> ShardingPlan:
    """Return a copy in which tables can be replaced, which resharding does in place."""
    return ShardingPlan(
        {
            path: EmbeddingModuleShardingPlan(module_plan)
            for path, module_plan in plan.plan.items()
        }
    )


def plan_tables(
    plan: ShardingPlan, tables: Iterable[PlanTable], world_size: int
) -> tuple[TableReport, ...]:
    """Describe every table of a plan: where it lies; of its memory, the weights."""
    known = {(t.path, t.name): t for t in tables}
    reports = []
    for path, name, sharding in plan_entries(plan):
        table = known[path, name]
        held = _boxes(table, sharding, world_size)
        reports.append(_table_report(table, sharding, held))
    return tuple(reports)


def _table_report(
    table: PlanTable, sharding: ParameterSharding, held: Sequence[tuple[int, _Box]]
) -> TableReport:
    return TableReport(
        table=table.full_name,
        sharding_type=sharding.sharding_type,
        compute_kernel=sharding.compute_kernel,
        num_embeddings=table.num_embeddings,
        embedding_dim=table.embedding_dim,
        shards=tuple(
            ShardReport(
                rank=rank,
                num_embeddings=box.bottom - box.top,
                embedding_dim=box.right - box.left,
                used_bytes=float(box.size * table.value_bytes),
            )
            for rank, box in held
        ),
    )


def table_moves(
    first: ShardingPlan,
    second: ShardingPlan,
    tables: Iterable[PlanTable],
    world_sizes: tuple[int, int],
) -> tuple[TableMove, ...]:
    """Say which tables lie otherwise in a second plan, those of most bytes first.

    Args:
        first: A plan.
        second: Another one of the same model.
        tables: Of both.
        world_sizes: Ranks of each.
    """
    known = {(t.path, t.name): t for t in tables}
    lain = [{(p, n): s for p, n, s in plan_entries(plan)} for plan in (first, second)]
    moves = []
    for key, table in sorted(known.items()):
        entries = [found.get(key) for found in lain]
        boxes = [
            [] if entry is None else _boxes(table, entry, size)
            for entry, size in zip(entries, world_sizes, strict=True)
        ]
        texts = [
            "" if entry is None else _table_report(table, entry, held).place
            for entry, held in zip(entries, boxes, strict=True)
        ]
        if texts[0] == texts[1] and set(boxes[0]) == set(boxes[1]):
            continue
        before: dict[int, list[_Box]] = {}
        for rank, box in boxes[0]:
            before.setdefault(rank, []).append(box)
        fetched = sum(
            box.size - sum(map(box.common, before.get(rank, ())))
            for rank, box in boxes[1]
        )
        moves.append(
            TableMove(
                table=table.full_name,
                before=texts[0],
                after=texts[1],
                moved_bytes=float(fetched * table.value_bytes),
            )
        )
    return tuple(sorted(moves, key=lambda move: -move.moved_bytes))


class _Box(NamedTuple):
    """Rows and columns of a shard."""

    top: int
    left: int
    bottom: int
    right: int

    @property
    def size(self) -> int:
        """Values in it."""
        return (self.bottom - self.top) * (self.right - self.left)

    def common(self, other: _Box) -> int:
        """Values in both."""
        rows = min(self.bottom, other.bottom) - max(self.top, other.top)
        columns = min(self.right, other.right) - max(self.left, other.left)
        return max(rows, 0) * max(columns, 0)


def _boxes(
    table: PlanTable, sharding: ParameterSharding, world_size: int
) -> list[tuple[int, _Box]]:
    """Shards of a table that hold something, with their ranks."""
    if sharding.sharding_spec is None:  # replicas
        whole = _Box(0, 0, table.num_embeddings, table.embedding_dim)
        return [(rank, whole) for rank in sharding.ranks or range(world_size)]
    found = []
    for meta, rank in zip(sharding.sharding_spec.shards, sharding.ranks, strict=True):
        (top, left), (rows, columns) = meta.shard_offsets, meta.shard_sizes
        box = _Box(int(top), int(left), int(top + rows), int(left + columns))
        if box.size:
            found.append((int(rank), box))
    return found


def _stored_columns(module: nn.Module, config: Any) -> int:
    """Columns of a table as it is sharded: quantised rows carry their scale."""
    if isinstance(module, _QUANTISED):
        weights = {name.split(".")[-2]: w for name, w in module.state_dict().items()}
        if config.name in weights:
            return int(weights[config.name].shape[1])
    return int(config.embedding_dim)


def model_tables(
    paths: Iterable[str], model: nn.Module
) -> tuple[tuple[PlanTable, ...], tuple[str, ...]]:
    """Find the tables in the modules that a plan names, and those outside.

    Args:
        paths: Modules of the plan.
        model: The model, not yet in `DistributedModelParallel`.

    Returns:
        The tables inside, sorted, and the full names of those outside.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    inside = {path: modules[path] for path in paths if path in modules}
    outside = {
        f"{path}.{config.name}" if path else config.name
        for path, module in modules.items()
        if isinstance(module, TABLE_MODULES)
        and not any(not p or path == p or path.startswith(f"{p}.") for p in inside)
        for config in table_configs(module)
    }
    tables = {
        PlanTable(
            path=path,
            name=config.name,
            num_embeddings=int(config.num_embeddings),
            embedding_dim=_stored_columns(module, config),
            data_type=str(config.data_type.value).lower(),
            pooling=str(
                config.pooling.value.lower()
                if isinstance(config, EmbeddingBagConfig)
                else "none"
            ),
            feature_names=tuple(config.feature_names or ()),
        )
        for path, module in inside.items()
        for config in table_configs(module)
    }
    return tuple(sorted(tables)), tuple(sorted(outside))


def check_plan(
    plan: ShardingPlan, tables: Iterable[PlanTable], world_size: int
) -> None:
    """Check that a plan holds these tables, each row and column of them once.

    Raises:
        PlanFileError: It does not, or a rank is not there.
    """
    by_name = {(t.path, t.name): t for t in tables}
    planned = {(path, name) for path, name, _ in plan_entries(plan)}
    for path, name in sorted(planned ^ by_name.keys()):
        where = "plan" if (path, name) in planned else "model"
        raise PlanFileError(
            f"table '{name}' of module '{path}' is in the {where} alone; a plan goes "
            "with the model that it was made for, as it was before "
            "DistributedModelParallel took it"
        )
    for path, name, sharding in plan_entries(plan):
        _check_sharding(by_name[path, name], sharding, world_size)


def _check_sharding(
    table: PlanTable, sharding: ParameterSharding, world_size: int
) -> None:
    where = f"table '{table.full_name}'"
    if sharding.compute_kernel not in KNOWN_VALUES["compute_kernels"]:
        raise PlanFileError(
            f"{where}: this TorchRec has no kernel '{sharding.compute_kernel}'; use "
            "the release that the plan was made by"
        )
    wrong = [r for r in sharding.ranks or () if not 0 <= r < world_size]
    if wrong:
        raise PlanFileError(f"{where}: rank {wrong[0]} is not in 0 to {world_size - 1}")
    if sharding.sharding_spec is None:
        return
    places = [m.placement.rank() for m in sharding.sharding_spec.shards if m.placement]
    if len(places) == len(sharding.ranks) and places != sharding.ranks:
        raise PlanFileError(
            f"{where}: its shards are placed on ranks {places}, but belong to "
            f"{sharding.ranks}"
        )
    boxes = [
        (
            *m.shard_offsets,
            *(o + s for o, s in zip(m.shard_offsets, m.shard_sizes, strict=True)),
        )
        for m in sharding.sharding_spec.shards
    ]
    rows = sorted({0, table.num_embeddings, *(b[i] for b in boxes for i in (0, 2))})
    columns = sorted({0, table.embedding_dim, *(b[i] for b in boxes for i in (1, 3))})
    held = np.zeros((len(rows) - 1, len(columns) - 1), dtype=np.int64)
    for top, left, bottom, right in boxes:
        held[
            rows.index(top) : rows.index(bottom),
            columns.index(left) : columns.index(right),
        ] += 1
    inside = (0, 0, table.num_embeddings, table.embedding_dim)
    outside = (rows[0], columns[0], rows[-1], columns[-1]) != inside
    if outside or (held != 1).any():
        raise PlanFileError(
            f"{where}: its shards do not hold each of {table.num_embeddings} rows and "
            f"{table.embedding_dim} columns exactly once"
        )
