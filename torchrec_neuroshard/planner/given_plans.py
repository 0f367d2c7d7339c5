"""Plans from any source: their tables, their validity, their options and moves."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

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

from torchrec_neuroshard.errors import PlanFileError, check_kind
from torchrec_neuroshard.planner.checks import KNOWN_VALUES
from torchrec_neuroshard.planner.compat import sharders_by_type
from torchrec_neuroshard.planner.option_facts import (
    TABLE_MODULES,
    note_sharders,
    table_configs,
)
from torchrec_neuroshard.planner.table_keys import paths_of
from torchrec_neuroshard.report import TableMove
from torchrec_neuroshard.report.parts import ShardReport, TableReport
from torchrec_neuroshard.tables.table import DATA_TYPE_BYTES

_QUANTISED = (QuantEmbeddingBagCollection, QuantEmbeddingCollection)


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class PlanTable:
    """The properties of a table that a plan depends on."""

    path: str
    """The module's path in the plan; "" is the model itself."""
    name: str
    num_embeddings: int
    embedding_dim: int
    data_type: str
    pooling: str
    """"sum", "mean", or "none" for sequences."""
    feature_names: tuple[str, ...]

    @property
    def full_name(self) -> str:
        """Path and name, which are unique in a model."""
        return f"{self.path}.{self.name}" if self.path else self.name

    @property
    def value_bytes(self) -> int:
        """Bytes of one weight."""
        return DATA_TYPE_BYTES.get(self.data_type, 4)


def placed_options(
    plan: ShardingPlan,
    module: nn.Module,
    sharders: Sequence[ModuleSharder[Any]],
    enumerator: Enumerator,
    world_size: int,
) -> list[ShardingOption]:
    """Return a plan as TorchRec's options, one per table, in the plan's order.

    They have the plan's shards and ranks, and the enumerator's estimates.

    Args:
        plan: The plan.
        module: The model before `DistributedModelParallel`.
        sharders: The sharders of its embedding modules.
        enumerator: Lists and estimates its options.
        world_size: Number of ranks.

    Raises:
        PlanFileError: The plan is incomplete or does not fit this model.
    """
    plan = planned_once(plan, module)
    tables, _ = model_tables(plan.plan, module)
    check_plan(plan, tables, world_size)
    listed: dict[tuple[str, str], list[ShardingOption]] = {}
    every = enumerator.enumerate(module, list(sharders))
    note_sharders(every, sharders_by_type(sharders))
    for option in every:
        listed.setdefault((option.path, option.name), []).append(option)
    options = []
    for path, name, sharding in plan_entries(plan):
        if (path, name) not in listed:
            found = " or ".join(sorted(f"'{p}'" for p, n in listed if n == name))
            raise PlanFileError(
                f"the plan has table '{name}' in module '{path}', but the model has "
                f"it in {found or 'no module with a sharder'}: use a plan of this "
                "model"
            )
        options.append(_placed(listed[path, name], sharding))
    enumerator.populate_estimates(options)
    return options


def _placed(
    listed: Sequence[ShardingOption], sharding: ParameterSharding
) -> ShardingOption:
    """Return a copy of one of a table's options with the plan's sharding."""
    kind, kernel = sharding.sharding_type, sharding.compute_kernel
    same = [o for o in listed if (o.sharding_type, o.compute_kernel) == (kind, kernel)]
    option = copy.copy((same or listed)[0])
    # A running plan may use what the constraints forbid.
    option.sharding_type, option.compute_kernel = kind, kernel
    option.cache_params = sharding.cache_params
    if sharding.sharding_spec is None:  # replicas
        boxes = [(list(option.tensor.shape), [0, 0])] * len(sharding.ranks)
    else:
        shards = sharding.sharding_spec.shards
        boxes = [(list(m.shard_sizes), list(m.shard_offsets)) for m in shards]
    option.shards = [
        Shard(size=size, offset=offset, rank=rank)
        for (size, offset), rank in zip(boxes, sharding.ranks, strict=True)
    ]
    return option


def plan_entries(plan: ShardingPlan) -> Iterator[tuple[str, str, ParameterSharding]]:
    """Yield path, table and sharding of every entry in a plan."""
    for path, module_plan in plan.plan.items():
        for name, sharding in module_plan.items():
            yield path, name, sharding


def copied(plan: ShardingPlan) -> ShardingPlan:
    """Return a copy whose entries can be replaced, as resharding does in place."""
    return ShardingPlan(
        {
            path: EmbeddingModuleShardingPlan(module_plan)
            for path, module_plan in plan.plan.items()
        }
    )


def planned_paths(plan: ShardingPlan, model: nn.Module) -> dict[str, list[str]]:
    """Return the path under which each module is sharded -> all its paths in a plan.

    `DistributedModelParallel` shards a module once, though a model may have it under
    several paths.

    Args:
        plan: A plan.
        model: The model before `DistributedModelParallel`.
    """
    found: dict[nn.Module, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if path in plan.plan:
            found.setdefault(module, []).append(path)
    return {paths[0]: paths for paths in found.values()}


def planned_once(plan: ShardingPlan, model: nn.Module) -> ShardingPlan:
    """Return a plan without the other paths of modules; see `planned_paths`."""
    check_kind("plan", plan, ShardingPlan)
    check_kind("model", model, nn.Module)
    others = {p for _, *rest in planned_paths(plan, model).values() for p in rest}
    return ShardingPlan({p: own for p, own in plan.plan.items() if p not in others})


def with_other_paths(plan: ShardingPlan, model: nn.Module) -> ShardingPlan:
    """Return a plan of `planned_once` with all paths under which a model has modules.

    Entries that the plan has stay as they are.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    planned = {modules[path]: own for path, own in plan.plan.items()}
    others = {
        path: EmbeddingModuleShardingPlan(planned[module])
        for module, paths in paths_of(model, planned.__contains__).items()
        for path in paths
        if path not in plan.plan
    }
    return ShardingPlan({**plan.plan, **others})


def plan_tables(
    plan: ShardingPlan, tables: Iterable[PlanTable], world_size: int
) -> tuple[TableReport, ...]:
    """Return a report of each table in a plan: its shards and weight bytes."""
    by_key = {(t.path, t.name): t for t in tables}
    return tuple(
        _table_report(by_key[path, name], sharding, world_size)
        for path, name, sharding in plan_entries(plan)
    )


def _table_report(
    table: PlanTable, sharding: ParameterSharding, world_size: int
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
            for rank, box in _boxes(table, sharding, world_size)
        ),
    )


def table_moves(
    first: ShardingPlan,
    second: ShardingPlan,
    tables: Collection[PlanTable],
    world_sizes: tuple[int, int],
) -> tuple[TableMove, ...]:
    """Return the tables that a second plan places differently, most bytes first.

    Args:
        first: A plan.
        second: Another plan of the same model.
        tables: The tables of both plans.
        world_sizes: Number of ranks of each plan.

    Raises:
        PlanFileError: A plan has other tables.
    """
    moves = []
    plans = [*zip((first, second), world_sizes, strict=True)]
    for plan, world_size in plans:
        check_plan(plan, tables, world_size)
    for table in sorted(tables):
        entries = [(plan.plan[table.path][table.name], size) for plan, size in plans]
        before, after = (_table_report(table, *entry).place for entry in entries)
        held, wanted = (_boxes(table, *entry) for entry in entries)
        if before == after and set(held) == set(wanted):
            continue
        at_rank: dict[int, list[_Box]] = defaultdict(list)
        for rank, box in held:
            at_rank[rank].append(box)
        fetched = sum(
            box.size - sum(map(box.common, at_rank[rank])) for rank, box in wanted
        )
        moved_bytes = float(fetched * table.value_bytes)
        moves.append(
            TableMove(
                table=table.full_name,
                before=before,
                after=after,
                moved_bytes=moved_bytes,
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
        """Number of values in the box."""
        return max(self.bottom - self.top, 0) * max(self.right - self.left, 0)

    @property
    def corners(self) -> set[tuple[int, int]]:
        """The four corners: row, column."""
        rows, columns = (self.top, self.bottom), (self.left, self.right)
        return {(row, column) for row in rows for column in columns}

    def common(self, other: _Box) -> int:
        """Return the number of values in both boxes."""
        return _Box(
            max(self.top, other.top),
            max(self.left, other.left),
            min(self.bottom, other.bottom),
            min(self.right, other.right),
        ).size


def _boxes(
    table: PlanTable, sharding: ParameterSharding, world_size: int
) -> list[tuple[int, _Box]]:
    """Return the non-empty shards of a table, with their ranks."""
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
    """Return the columns of a sharded table; quantised rows include their scale."""
    if isinstance(module, _QUANTISED):
        weights = {name.split(".")[-2]: w for name, w in module.state_dict().items()}
        if config.name in weights:
            return int(weights[config.name].shape[1])
    return int(config.embedding_dim)


def model_tables(
    paths: Iterable[str], model: nn.Module
) -> tuple[tuple[PlanTable, ...], tuple[str, ...]]:
    """Return the tables inside and outside the modules of a plan.

    Args:
        paths: The plan's modules.
        model: The model before `DistributedModelParallel`.

    Returns:
        The tables inside, sorted, and the full names of the tables outside.
    """
    check_kind("model", model, nn.Module)
    modules = dict(model.named_modules(remove_duplicate=False))
    inside = {path: modules[path] for path in paths if path in modules}
    outside = {
        f"{path}.{config.name}" if path else config.name
        for path, module in modules.items()
        if isinstance(module, TABLE_MODULES)
        and module not in inside.values()
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
    """Check that a plan has exactly these tables, with every row and column once.

    Raises:
        PlanFileError: It has not, or a rank does not exist.
    """
    by_name = {(t.path, t.name): t for t in tables}
    planned = {(path, name) for path, name, _ in plan_entries(plan)}
    for path, name in sorted(planned ^ by_name.keys()):
        where = "plan" if (path, name) in planned else "model"
        raise PlanFileError(
            f"table '{name}' of module '{path}' is only in the {where}; pass the model "
            "that the plan was made for, before DistributedModelParallel wraps it"
        )
    for path, name, sharding in plan_entries(plan):
        _check_sharding(by_name[path, name], sharding, world_size)


def _check_sharding(
    table: PlanTable, sharding: ParameterSharding, world_size: int
) -> None:
    where = f"table '{table.full_name}'"
    if sharding.compute_kernel not in KNOWN_VALUES["compute_kernels"]:
        raise PlanFileError(
            f"{where}: this TorchRec release has no kernel "
            f"'{sharding.compute_kernel}'; use the release that made the plan"
        )
    wrong = [r for r in sharding.ranks or () if not 0 <= r < world_size]
    if wrong:
        raise PlanFileError(f"{where}: rank {wrong[0]} is not in 0 to {world_size - 1}")
    if sharding.sharding_spec is None:
        return
    places = [m.placement.rank() for m in sharding.sharding_spec.shards if m.placement]
    if len(places) == len(sharding.ranks) and places != sharding.ranks:
        raise PlanFileError(
            f"{where}: sharding_spec places its shards on ranks {places}, but ranks is "
            f"{sharding.ranks}"
        )
    whole = _Box(0, 0, table.num_embeddings, table.embedding_dim)
    boxes = [box for _, box in _boxes(table, sharding, world_size)]
    corners: set[tuple[int, int]] = set()
    for box in boxes:
        corners ^= box.corners
    # The remaining corners are those of the whole table only if an odd number of shards
    # covers each value inside, and an even number each value outside. If the shards
    # also have as many values as the table, that odd number is one.
    if corners != whole.corners or sum(box.size for box in boxes) != whole.size:
        raise PlanFileError(
            f"{where}: its shards do not cover each of {table.num_embeddings} rows and "
            f"{table.embedding_dim} columns exactly once"
        )
