from __future__ import annotations

import itertools

import numpy as np
import pytest

from tests.builders import make_tables, make_task
from torchrec_neuroshard.errors import InfeasibleError
from torchrec_neuroshard.placement import ShardingTask
from torchrec_neuroshard.search.feasibility import check_memory, pack
from torchrec_neuroshard.search.shards import (
    aligned_widths,
    placement_from_widths,
    split_widths,
)


def sized_task(
    sizes: list[int],
    memory: tuple[int, ...],
    *,
    width: int = 4,
    uneven: bool = True,
    fixed: int = 0,
) -> ShardingTask:
    """Tables of `size` bytes per column (int8 rows), `width` wide."""
    return make_task(
        make_tables([width] * len(sizes), sizes, data_type="int8"),
        len(memory),
        8,
        memory_bytes=memory,
        fixed_bytes=(fixed,) * len(sizes),
        uneven=uneven,
    )


def fits_somehow(task: ShardingTask) -> bool:
    """Try every assignment of whole tables (width 4 cannot be split)."""
    sizes = [task.shard_bytes(t, 4) for t in range(len(task.tables))]
    for ranks in itertools.product(range(task.world_size), repeat=len(sizes)):
        used = [0.0] * task.world_size
        for size, rank in zip(sizes, ranks, strict=True):
            used[rank] += size
        if all(u <= m for u, m in zip(used, task.memory_bytes, strict=True)):
            return True
    return False


@pytest.mark.parametrize("uneven", [True, False])
def test_packs_exactly_where_a_packing_exists(uneven: bool) -> None:
    rng = np.random.default_rng(3)
    outcomes = []
    for _ in range(25):
        sizes = rng.integers(20, 100, size=7).tolist()
        share = rng.dirichlet(np.full(3, 20.0))
        memory = tuple(int(4 * sum(sizes) * 1.04 * s) for s in share)
        task = sized_task(sizes, memory, uneven=uneven)
        exists = fits_somehow(task)
        outcomes.append(exists)
        if exists:
            placement_from_widths(pack(task)).check(task)
        else:
            with pytest.raises(InfeasibleError, match=r"proven|needs"):
                check_memory(task)
                pack(task)
    assert 3 < sum(outcomes) < 22  # both outcomes were met


def test_uneven_splits_fill_the_last_byte() -> None:
    # 3 tables x 16 columns x 10 bytes = 480 bytes = 4 x 120: only 12 columns a rank.
    task = sized_task([10, 10, 10], (120,) * 4, width=16)
    placement = placement_from_widths(pack(task))
    placement.check(task)
    assert placement.rank_bytes(task) == [120.0] * 4
    even = sized_task([10, 10, 10], (120,) * 4, width=16, uneven=False)
    # Shards of 16, 8 or 4 columns: 4-wide ones everywhere fill it too.
    placement_from_widths(pack(even)).check(even)


def test_fixed_bytes_count_for_every_shard() -> None:
    task = sized_task([10, 10], (100, 100), width=8, fixed=20)
    placement_from_widths(pack(task)).check(task)
    too_much = sized_task([10, 10], (99, 101), width=8, fixed=20)
    with pytest.raises(InfeasibleError, match=r"proven.*times the memory"):
        pack(too_much)


def test_a_table_wider_than_its_shards_may_hold() -> None:
    tables = make_tables([64], 10, data_type="int8")
    task = make_task(tables, 4, 8, memory=200, max_shards=(2,))
    with pytest.raises(InfeasibleError, match=r"40 of its 64 columns in 2 shards"):
        check_memory(task)


def test_unlimited_memory_always_fits() -> None:
    tables = make_tables([256], 10**9)
    with pytest.raises(InfeasibleError, match="table 't0'"):
        check_memory(make_task(tables, 1, 8, memory=2**30))
    unlimited = make_task(tables, 1, 8)
    check_memory(unlimited)
    assert pack(unlimited).tolist() == [[256]]


def test_split_widths() -> None:
    task = sized_task([10], (10**6,) * 4, width=36)
    assert split_widths(task, 0, 1) == (36,)
    assert split_widths(task, 0, 2) == (20, 16)
    assert split_widths(task, 0, 4) == (12, 8, 8, 8)
    assert split_widths(task, 0, 5) == ()
    even = sized_task([10], (10**6,) * 4, width=36, uneven=False)
    assert split_widths(even, 0, 2) == ()
    assert split_widths(even, 0, 3) == (12, 12, 12)


def test_aligned_widths() -> None:
    task = sized_task([10], (10**6,) * 4, width=128)
    assert split_widths(task, 0, 3) == (44, 44, 40)
    assert aligned_widths(task, 0, 3) == (48, 48, 32)
    assert aligned_widths(task, 0, 2) == ()  # as even splits are
    assert aligned_widths(sized_task([10], (10**6,) * 4, width=36), 0, 2) == ()
    even = sized_task([10], (10**6,) * 4, width=128, uneven=False)
    assert aligned_widths(even, 0, 3) == ()
