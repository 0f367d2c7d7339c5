from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest

from tests.builders import make_tables, make_task
from tests.fuzz.against_truth import build, table
from torchrec_neuroshard.costs.task import ShardingTask
from torchrec_neuroshard.errors import InfeasibleError
from torchrec_neuroshard.search.feasibility import check_memory, pack, way_out
from torchrec_neuroshard.search.shards import (
    placement_from_widths,
    split_widths,
)


def sized_task(
    sizes: list[int], memory: tuple[int, ...], width: int = 4, **fields: Any
) -> ShardingTask:
    """Return int8 tables of these bytes per column, `width` columns each."""
    tables = make_tables([width] * len(sizes), sizes, data_type="int8")
    return make_task(tables, len(memory), 8, memory_bytes=memory, **fields)


@pytest.mark.parametrize("uneven", [True, False])
def test_a_packing_is_found_if_one_exists(uneven: bool) -> None:
    rng = np.random.default_rng(3)
    outcomes = []
    for _ in range(25):
        sizes = rng.integers(20, 100, size=7).tolist()
        share = rng.dirichlet(np.full(3, 20.0))
        memory = tuple(int(4 * sum(sizes) * 1.04 * s) for s in share)
        task = sized_task(sizes, memory, uneven=uneven)
        # Try every assignment of whole tables; a width of 4 cannot be split.
        size_T = 4 * np.array(sizes)
        placed = itertools.product(np.eye(3), repeat=7)
        exists = any((size_T @ np.array(p) <= memory).all() for p in placed)
        outcomes.append(exists)
        if exists:
            placement_from_widths(pack(task)).check(task)
        else:
            with pytest.raises(InfeasibleError, match=r"proven|needs"):
                check_memory(task)
                pack(task)
    assert 3 < sum(outcomes) < 22  # both outcomes occur


def test_uneven_splits_fill_the_last_byte() -> None:
    # 3 tables x 16 columns x 10 bytes = 480 bytes = 4 x 120: 12 columns per rank.
    task = sized_task([10, 10, 10], (120,) * 4, width=16)
    placement = placement_from_widths(pack(task))
    placement.check(task)
    assert placement.rank_bytes(task).tolist() == [[120.0] * 4]
    even = sized_task([10, 10, 10], (120,) * 4, width=16, uneven=False)
    # Shards may have 16, 8 or 4 columns; shards of 4 fill the ranks, too.
    placement_from_widths(pack(even)).check(even)


def test_a_split_is_as_even_as_possible() -> None:
    for width, uneven, parts, expected in [
        (36, True, 1, (36,)),
        (36, True, 2, (20, 16)),
        (36, True, 4, (12, 8, 8, 8)),
        (36, True, 5, ()),
        (128, True, 2, (64, 64)),
        (128, True, 3, (44, 44, 40)),
        (36, False, 2, ()),
        (36, False, 3, (12, 12, 12)),
        (128, False, 3, ()),
    ]:
        task = sized_task([10], (10**6,) * 4, width=width, uneven=uneven)
        assert split_widths(task, 0, parts) == expected


def one_table(*ways: str, memory: int, **fields: Any) -> ShardingTask:
    """Return a table of 64 columns and 6400 bytes with some ways, on 4 GPUs.

    Ways that begin with "uvm " have their rows in host memory.
    """
    kinds = [
        (way.removeprefix("uvm "), "uvm" if way.startswith("uvm ") else None)
        for way in ways
    ]
    caps = {name: (memory,) * 4 for name in ("memory", "host")}
    task = build(
        {"ranks": 4, "node": 4, "tables": [table(25, 64, *kinds, pooling=1.0)], **caps}
    )
    return dataclasses.replace(task, uneven=False, **fields)


@pytest.mark.parametrize(
    ("task", "text"),
    [
        (
            one_table("table_wise", memory=2000),
            r"table 't0' .*6\.25 KiB \(table_wise\)",
        ),
        (one_table("column_wise", "row_wise", memory=1000), r"'t0' .*1\.56 KiB of it"),
        (
            one_table("column_wise", memory=3000, min_widths=(32,)),
            r"table 't0' .*3\.12 KiB of it",
        ),
        (
            one_table("column_wise", memory=3000, max_shards=(2,)),
            r"table 't0' .*3\.12 KiB of it",
        ),
        (
            one_table("column_wise", memory=2000, allowed_ranks=((0, 1),)),
            r"table 't0' .*3\.12 KiB of it",
        ),
        (
            one_table("uvm table_wise", memory=1000),
            r"^in the host's memory, table 't0' .* needs 6\.25 KiB \(table_wise\); the "
            "freest rank, 0, has 1000 bytes",
        ),
        # The second way fits the devices and the first way fits the hosts, but no way
        # fits both.
        (
            one_table(
                "table_wise", "uvm column_wise", memory=2048, min_widths=(64, 32)
            ),
            r"^in the host's memory, table 't0' ",
        ),
        (
            make_task(make_tables([64] * 3, 10), 4, memory=1200),
            r"need 7\.50 KiB in all",
        ),
    ],
)
def test_errors_name_the_table_and_its_bytes(task: ShardingTask, text: str) -> None:
    with pytest.raises(InfeasibleError, match=text) as caught:
        check_memory(task)
    assert str(caught.value).endswith(way_out(task))


def test_an_error_says_that_no_packing_exists() -> None:
    """Five tables that each need 0.6 of a rank do not fit four ranks."""
    task = make_task(make_tables([64] * 5, 10), 4, memory=4000, max_shards=(1,) * 5)
    check_memory(task)
    with pytest.raises(InfeasibleError, match=r"proven by exact packing") as caught:
        pack(task)
    assert str(caught.value).endswith(way_out(task))
    pack(make_task(make_tables([64] * 5, 10), 5, memory=4000, max_shards=(1,) * 5))


def test_an_error_says_that_other_tables_take_memory() -> None:
    part = one_table("column_wise", memory=300)
    with pytest.raises(InfeasibleError, match=r"300 bytes left beside other"):
        check_memory(part, is_part=True)
