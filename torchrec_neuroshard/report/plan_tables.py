"""The tables of a plan: their shards, their moves, and what is missing.

A plan is TorchRec's, or a plan file's. Here both are `Shardings`, without torch.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from torchrec_neuroshard.errors import PlanFileError
from torchrec_neuroshard.report.comparison import TableMove
from torchrec_neuroshard.report.parts import ShardReport, TableReport
from torchrec_neuroshard.tables.table import DATA_TYPE_BYTES

if TYPE_CHECKING:
    from torchrec.distributed.types import ParameterSharding, ShardingPlan

T = TypeVar("T")


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
        return full_name(self.path, self.name)

    @property
    def value_bytes(self) -> int:
        """Bytes of one weight."""
        return DATA_TYPE_BYTES.get(self.data_type, 4)


def full_name(path: str, name: str) -> str:
    """Return a module's path and a table's name, which are unique in a model."""
    return f"{path}.{name}" if path else name


class Box(NamedTuple):
    """Rows and columns of a shard."""

    top: int
    left: int
    bottom: int
    right: int

    @staticmethod
    def at(offset: Sequence[int], size: Sequence[int]) -> Box:
        """Return a box from its first row and column, and its rows and columns."""
        (top, left), (rows, columns) = map(int, offset), map(int, size)
        return Box(top, left, top + rows, left + columns)

    @property
    def size(self) -> int:
        """Number of values in the box."""
        return max(self.bottom - self.top, 0) * max(self.right - self.left, 0)

    @property
    def corners(self) -> set[tuple[int, int]]:
        """The four corners: row, column."""
        rows, columns = (self.top, self.bottom), (self.left, self.right)
        return {(row, column) for row in rows for column in columns}

    @property
    def columns(self) -> tuple[int, int]:
        """First and last column (exclusive)."""
        return self.left, self.right

    @property
    def width(self) -> int:
        """Number of columns."""
        return self.right - self.left

    def within(self, other: Box) -> tuple[slice, slice]:
        """Return where this box is in another one that holds it."""
        return (
            slice(self.top - other.top, self.bottom - other.top),
            slice(self.left - other.left, self.right - other.left),
        )

    def common(self, other: Box) -> Box:
        """Return the box of what is in both boxes; its size is 0 if nothing is."""
        return Box(
            max(self.top, other.top),
            max(self.left, other.left),
            min(self.bottom, other.bottom),
            min(self.right, other.right),
        )


_RANK = re.compile(r"rank:(\d+)(/.*)?")
"""Where TorchRec puts a shard, such as "rank:0/cuda:0"."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TableSharding:
    """How a plan shards a table."""

    sharding_type: str
    compute_kernel: str
    ranks: tuple[int, ...] | None
    """Rank of each shard or replica. None: every rank has a replica."""
    boxes: tuple[Box, ...] | None
    """Rows and columns of each shard. None: every rank has a replica."""
    placements: tuple[str | None, ...] = ()
    """TorchRec's names of the shards' devices, such as "rank:0/cuda:0"."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Further settings, as a plan file stores them."""

    @staticmethod
    def of(sharding: ParameterSharding) -> TableSharding:
        """Return TorchRec's sharding of a table, without further settings."""
        spec, ranks = sharding.sharding_spec, sharding.ranks
        shards = None if spec is None else spec.shards
        return TableSharding(
            sharding_type=sharding.sharding_type,
            compute_kernel=sharding.compute_kernel,
            ranks=None if ranks is None else tuple(map(int, ranks)),
            boxes=None
            if shards is None
            else tuple(Box.at(m.shard_offsets, m.shard_sizes) for m in shards),
            placements=tuple(m.placement and str(m.placement) for m in shards or ()),
        )

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> TableSharding:
        """Return the sharding that `to_json` wrote.

        Raises:
            AttributeError, KeyError, TypeError, ValueError: The data is damaged.
        """
        settings = dict(data)
        shards, ranks = settings.pop("shards"), settings.pop("ranks", None)
        names = [settings.pop(name) for name in ("sharding_type", "compute_kernel")]
        for name in names:
            if not isinstance(name, str):
                raise ValueError(f"{name!r:.60} is no sharding type and no kernel")
        return TableSharding(
            sharding_type=names[0],
            compute_kernel=names[1],
            ranks=None if ranks is None else tuple(map(int, ranks)),
            boxes=None
            if shards is None
            else tuple(Box.at(s["offset"], s["size"]) for s in shards),
            placements=tuple(s["placement"] for s in shards or ()),
            settings=settings,
        )

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary."""
        shards = [
            {
                "offset": [box.top, box.left],
                "size": [box.bottom - box.top, box.width],
                "placement": placement,
            }
            for box, placement in zip(self.boxes or (), self.placements, strict=True)
        ]
        return {
            "sharding_type": self.sharding_type,
            "compute_kernel": self.compute_kernel,
            "ranks": self.ranks,
            **self.settings,
            "shards": None if self.boxes is None else shards,
        }


Shardings = Mapping[str, Mapping[str, TableSharding]]
"""A plan: module path -> table -> its sharding."""


def plan_shardings(plan: ShardingPlan) -> Shardings:
    """Return TorchRec's plan as shardings of tables, without further settings."""
    return {
        path: {name: TableSharding.of(sharding) for name, sharding in tables.items()}
        for path, tables in plan.plan.items()
    }


def plan_entries(plan: Mapping[str, Mapping[str, T]]) -> Iterator[tuple[str, str, T]]:
    """Yield path, table and sharding of every entry in a plan.

    Args:
        plan: `Shardings`, or the attribute `plan` of TorchRec's plan.
    """
    for path, tables in plan.items():
        for name, sharding in tables.items():
            yield path, name, sharding


def check_shards(plan: Shardings, tables: Iterable[PlanTable], world_size: int) -> None:
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


def _check_sharding(table: PlanTable, sharding: TableSharding, world_size: int) -> None:
    where = f"table '{table.full_name}'"
    wrong = [r for r in sharding.ranks or () if not 0 <= r < world_size]
    if wrong:
        raise PlanFileError(f"{where}: rank {wrong[0]} is not in 0 to {world_size - 1}")
    if sharding.boxes is None:
        return
    ranks = [*(sharding.ranks or ())]
    places = [_rank_of(name) for name in sharding.placements if name]
    if len(places) == len(ranks) and places != ranks:
        raise PlanFileError(
            f"{where}: sharding_spec places its shards on ranks {places}, but ranks is "
            f"{ranks}"
        )
    whole = Box(0, 0, table.num_embeddings, table.embedding_dim)
    boxes = [box for _, box in shard_boxes(table, sharding, world_size)]
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


def _rank_of(placement: str) -> int | None:
    """Return the rank in the name of a shard's device; None: it names none."""
    found = _RANK.fullmatch(placement)
    return found and int(found[1])


def plan_tables(
    plan: Shardings, tables: Iterable[PlanTable], world_size: int
) -> tuple[TableReport, ...]:
    """Return a report of each table in a plan: its shards and weight bytes."""
    by_key = {(t.path, t.name): t for t in tables}
    return tuple(
        _table_report(by_key[path, name], sharding, world_size)
        for path, name, sharding in plan_entries(plan)
    )


def _table_report(
    table: PlanTable, sharding: TableSharding, world_size: int
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
                embedding_dim=box.width,
                used_bytes=float(box.size * table.value_bytes),
            )
            for rank, box in shard_boxes(table, sharding, world_size)
        ),
    )


def table_moves(
    first: Shardings,
    second: Shardings,
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
        check_shards(plan, tables, world_size)
    for table in sorted(tables):
        entries = [(plan[table.path][table.name], size) for plan, size in plans]
        before, after = (_table_report(table, *entry).place for entry in entries)
        held, wanted = (shard_boxes(table, *entry) for entry in entries)
        if before == after and set(held) == set(wanted):
            continue
        moved_bytes = float(num_moved(held, wanted) * table.value_bytes)
        moves.append(
            TableMove(
                table=table.full_name,
                before=before,
                after=after,
                moved_bytes=moved_bytes,
            )
        )
    return tuple(sorted(moves, key=lambda move: -move.moved_bytes))


def num_moved(
    held: Iterable[tuple[int, Box]], wanted: Iterable[tuple[int, Box]]
) -> int:
    """Return the number of values that ranks want and do not hold."""
    at_rank: dict[int, list[Box]] = defaultdict(list)
    for rank, box in held:
        at_rank[rank].append(box)
    return sum(
        box.size - sum(box.common(other).size for other in at_rank[rank])
        for rank, box in wanted
    )


def shard_boxes(
    table: PlanTable, sharding: TableSharding, world_size: int
) -> list[tuple[int, Box]]:
    """Return the non-empty shards of a table, with their ranks."""
    if sharding.boxes is None:  # replicas
        whole = Box(0, 0, table.num_embeddings, table.embedding_dim)
        return [(rank, whole) for rank in sharding.ranks or range(world_size)]
    placed = zip(sharding.ranks or (), sharding.boxes, strict=True)
    return [(rank, box) for rank, box in placed if box.size]
