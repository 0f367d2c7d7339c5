"""`neuroshard sweep`: what a model would take, on many devices."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

from torchrec.distributed.planner.types import PlannerError, Topology

from torchrec_neuroshard.commands.inputs import (
    GivenModel,
    devices_named,
    read_model,
)
from torchrec_neuroshard.commands.plan import (
    add_planner_arguments,
    files_read,
    planner_arguments,
    planning,
)
from torchrec_neuroshard.errors import ConfigError
from torchrec_neuroshard.files import check_outputs, write_whole
from torchrec_neuroshard.planner.options.groups import group_topology
from torchrec_neuroshard.planner.planners import NeuroShardPlanner
from torchrec_neuroshard.progress import phase
from torchrec_neuroshard.report import Sweep, SweepCell
from torchrec_neuroshard.search import SearchConfig

__all__ = ["add_arguments", "run"]

_SECONDS = 3.0
"""That the search of a cell may take: less than a plan's that is to run."""

T = TypeVar("T")


class _Where(NamedTuple):
    """What a cell is for."""

    card: str
    num_ranks: int
    batch_size: int
    group_size: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_planner_arguments(parser)
    parser.add_argument(
        "--cards", type=_list_of(str), default=["h100"], help="such as a100,h100"
    )
    parser.add_argument(
        "--ranks", type=_list_of(int), default=[8, 16, 32], help="such as 8,16,32"
    )
    parser.add_argument("--ranks-per-node", type=int, help="as the nodes are sold")
    parser.add_argument(
        "--batch-sizes",
        type=_list_of(int),
        default=[4096],
        help="samples per rank, such as 2048,4096",
    )
    parser.add_argument(
        "--group-sizes",
        type=_list_of(int),
        default=[],
        help="ranks of a sharding group, too; those that divide the ranks",
    )
    parser.add_argument(
        "--sync-interval", type=int, default=1, help="of the groups' averages"
    )
    parser.add_argument(
        "--seconds", type=float, default=_SECONDS, help=f"of a search ({_SECONDS:g})"
    )
    parser.add_argument("--csv", type=Path, help="write all cells there")


def run(args: argparse.Namespace) -> int:
    """Plan every cell; 1 where none fits.

    Raises:
        NeuroShardError: Something that is given cannot be used.
    """
    check_outputs(args.csv, read=files_read(args))
    with phase("reading the model"):
        given = read_model(args.model)
    cells = list(_cells(args))
    _check(args, cells)
    found: list[SweepCell] = []
    with phase("planning") as shown:
        for cell in cells:
            shown.text = f"planning: {len(found)} of {len(cells)} done"
            found.append(_plan(cell, args, given))
    swept = Sweep(cells=tuple(found))
    print(swept)
    if args.csv:
        write_whole(args.csv, swept.to_csv())
        print(f"wrote {args.csv}")
    return 0 if any(cell.fits for cell in swept.cells) else 1


def _cells(args: argparse.Namespace) -> Iterator[_Where]:
    for card, ranks, batch_size in itertools.product(
        args.cards, args.ranks, args.batch_sizes
    ):
        yield _Where(card, ranks, batch_size, ranks)
        for size in args.group_sizes:
            if size < ranks and size > 0 and ranks % size == 0:
                yield _Where(card, ranks, batch_size, size)


def _check(args: argparse.Namespace, cells: list[_Where]) -> None:
    """Check what the cells are for before any is planned.

    Raises:
        ConfigError: It cannot be.
    """
    for cell in cells:
        _devices(cell, args)
        if cell.batch_size < 1:
            raise ConfigError(f"--batch-sizes must be above 0, got {cell.batch_size}")
    for size in args.group_sizes:
        if size not in {cell.group_size for cell in cells}:
            raise ConfigError(
                f"--group-sizes has {size}, which is no part of any of the --ranks "
                f"{', '.join(map(str, args.ranks))}: take a divisor of one"
            )


def _devices(cell: _Where, args: argparse.Namespace) -> Topology:
    topology = devices_named(cell.card, cell.num_ranks, args.ranks_per_node)
    if cell.group_size == cell.num_ranks:
        return topology
    return group_topology(topology, cell.group_size, sync_interval=args.sync_interval)


def _plan(cell: _Where, args: argparse.Namespace, given: GivenModel) -> SweepCell:
    where = cell._asdict()
    with planning(args.model):
        planner = NeuroShardPlanner(
            topology=_devices(cell, args),
            batch_size=cell.batch_size,
            search=SearchConfig(
                time_budget_seconds=args.seconds,
                bound="thorough",
                progress=lambda best_ms: None,
            ),
            strict_memory=True,
            **planner_arguments(args, given),
        )
        try:
            planner.plan(given.module, given.sharders)
        except PlannerError as error:
            return SweepCell(obstacle=str(error).strip().splitlines()[0], **where)
        return SweepCell.of(planner.report(), **where)


def _list_of(kind: Callable[[str], T]) -> Callable[[str], list[T]]:
    def parse(text: str) -> list[T]:
        parts = [part.strip().lower() for part in text.split(",")]
        if found := list(dict.fromkeys(kind(part) for part in parts if part)):
            return found
        raise ValueError("it is empty")

    parse.__name__ = f"list of {kind.__name__}s, with commas between"
    return parse
