from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.builders import GIB, make_tables, make_task
from torchrec_neuroshard.costs.task import (
    ColumnShard,
    Placement,
    ShardingTask,
    format_bytes,
)
from torchrec_neuroshard.errors import (
    ConfigError,
    InfeasibleError,
    PlacementError,
)


def small_task(*widths: int, world_size: int = 4, **options: Any) -> ShardingTask:
    return make_task(make_tables(widths), world_size, 8, **options)


@st.composite
def triples(draw: st.DrawFn) -> tuple[ShardingTask, list[tuple[int, int, int]]]:
    """A task and pieces of 4 columns, or multiples, on any ranks."""
    widths = draw(st.lists(st.integers(1, 16).map(lambda n: 4 * n), min_size=1))
    world_size = draw(st.integers(1, 6))
    pieces = []
    for i, width in enumerate(widths):
        while width:
            piece = 4 * draw(st.integers(1, width // 4))
            pieces.append((i, piece, draw(st.integers(0, world_size - 1))))
            width -= piece
    return small_task(*widths, world_size=world_size), draw(st.permutations(pieces))


@settings(deadline=None, max_examples=60)
@given(triples())
def test_every_column_is_placed_once(
    example: tuple[ShardingTask, list[tuple[int, int, int]]],
) -> None:
    task, pieces = example
    placement = Placement.from_widths(task.world_size, pieces)
    placement.check(task)
    for i, table in enumerate(task.tables):
        columns = [
            range(s.offset, s.offset + s.width) for s in placement.table_shards(i)
        ]
        assert [*chain(*columns)] == [*range(table.embedding_dim)]
    for i, _, rank in pieces:
        held = sum(w for j, w, r in pieces if (j, r) == (i, rank))
        (shard,) = (s for s in placement.table_shards(i) if s.rank == rank)
        assert shard.width == held
    assert placement.rank_bytes(task).sum() == sum(t.weight_bytes for t in task.tables)


def test_fixed_bytes_are_paid_per_shard() -> None:
    task = small_task(8, 8, fixed_bytes=(1_000, 0), column_bytes=(10.0, 1.0))
    placement = Placement.from_widths(4, [(0, 4, 0), (0, 4, 2), (1, 8, 2)])
    assert placement.rank_bytes(task).tolist() == [[1_040, 0, 1_048, 0]]
    assert task.shard_bytes(0, 8) == 1_080


def test_memory_is_shown_in_units_that_fit() -> None:
    sizes = (10 * 2**20, 5 * 2**20, 2**20 - 2**10, 1023)
    shown = ["0.01 GiB", "5.00 MiB", "1023.00 KiB", "1023 bytes"]
    assert [format_bytes(size) for size in sizes] == shown


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"world_size": 0}, "must be at least 1, got 0 and 8"),
        ({"local_world_size": 3}, r"world_size \(4\) must be a multiple .* \(3\)"),
        ({"fixed_bytes": (1,)}, r"fixed_bytes needs one value per table \(2\), got 1"),
        ({"memory_bytes": (5, 5)}, r"one value per rank \(4\), got 2"),
        ({"allowed_ranks": ((),)}, r"allowed_ranks needs .* per table .2., got 1"),
        ({"allowed_ranks": ((0,), (4,))}, "'t1': allowed_ranks has rank 4, .* 0 to 3"),
        ({"together": ((0, 2),)}, "together has table 2, which is not in 0 to 1"),
    ],
)
def test_bad_tasks_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        small_task(8, 16, **options)


@pytest.mark.parametrize(
    ("shards", "message"),
    [
        ([(0, 0, 4, 0)], "'t0': 4 of 8 columns placed"),
        ([(0, 0, 4, 0), (0, 8, 4, 1)], "columns 4 to 8 are missing or placed twice"),
        ([(0, 0, 8, 0), (0, 4, 4, 1)], "columns 4 to 8 are missing or placed twice"),
        ([(0, 0, 6, 0), (0, 6, 2, 1)], "a shard is 6 wide; widths are multiples of 4"),
        ([(0, 0, 8, 4)], "rank 4 is not in 0 to 3"),
        ([(0, 0, 4, 0), (0, 4, 4, 0)], "a rank holds two shards of it"),
        ([(0, 0, 8, 0), (2, 0, 8, 0)], "table 2, which the task does not have"),
        ([(0, 0, 8, 0), (1, 0, 12, 0), (1, 12, 4, 1)], "'t1': a shard is 4 wide; .* 8"),
        ([(0, 0, 4, 0), (0, 4, 4, 1), (1, 0, 16, 0)], "'t0': 2 shards, at most 1 all"),
    ],
)
def test_broken_placements_are_refused(
    shards: list[tuple[int, int, int, int]], message: str
) -> None:
    task = small_task(8, 16, min_widths=(4, 8), max_shards=(1, 4))
    placement = Placement(4, tuple(ColumnShard(*s) for s in shards))
    with pytest.raises(PlacementError, match=message):
        placement.check(task)


def test_full_rank_is_named() -> None:
    task = small_task(8, 8, column_bytes=(GIB, GIB), memory_bytes=(9 * GIB,) * 4)
    Placement.from_widths(4, [(0, 8, 1), (1, 8, 2)]).check(task)
    with pytest.raises(InfeasibleError, match=r"rank 1 holds 16\.00 GiB, but has"):
        Placement.from_widths(4, [(0, 8, 1), (1, 8, 1)]).check(task)


def test_rules_on_colocation_are_put_in_order() -> None:
    task = small_task(
        *[8] * 5,
        max_shards=(4, 3, 2, 2, 2),
        allowed_ranks=((3, 1, 1), (), (0, 1, 2, 3), (), ()),
        together=((2, 1, 2), (), (1, 0), (4,)),
        apart=((3, 1), (1, 3), (2,), (4, 3)),
    )
    assert task.allowed_ranks == ((1, 3), (), (), (), ())
    assert task.together == ((0, 1, 2),)
    assert task.max_shards == (1, 1, 1, 2, 1)
    assert small_task(8, 8, allowed_ranks=((), (1, 3))).max_shards == (4, 2)
    assert task.apart == ((1, 3), (3, 4))
    assert task.rules
    free = small_task(8, 8, allowed_ranks=((), range(4)), together=((1,),))
    assert free.max_shards == (4, 1) and not free.rules


def test_rules_on_colocation_are_kept() -> None:
    """What breaks which rule is tested beside the rules."""
    task = small_task(8, 8, together=((0, 1),))
    Placement.from_widths(4, [(0, 8, 2), (1, 8, 2)]).check(task)
    with pytest.raises(PlacementError, match="are on ranks 0-1, not together"):
        Placement.from_widths(4, [(0, 8, 0), (1, 8, 1)]).check(task)
