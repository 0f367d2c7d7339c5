"""A sample of the campaign, and all that it found, shrunk to the least that failed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tests.fuzz import against_truth

SEED = 5


def table(
    rows: int,
    dim: int,
    *ways: Sequence[str | None],
    module: int = 0,
    pooling: float = 4.0,
) -> Any:
    return {
        "rows": rows,
        "dim": dim,
        "pooling": pooling,
        "module": module,
        "ways": list(ways),
    }


COLUMN, HOST = ["column_wise", None], ["column_wise", "uvm"]
NODE_COLUMN = ["table_column_wise", None]
ROW, NODE_ROW, GRID, REPLICA = (
    ["row_wise", None],
    ["table_row_wise", None],
    ["grid_shard", None],
    ["data_parallel", "dense"],
)

FOUND: dict[str, tuple[dict[str, Any], str]] = {
    "apart from a table on all ranks no rank is left, which meant any": (
        {"ranks": 2, "tables": [table(24, 8, COLUMN), table(1800, 12, ROW, HOST)]}
        | {"apart": [0, 1]},
        "best",
    ),
    "the same where there is no other way": (
        {"ranks": 2, "tables": [table(24, 8, COLUMN), table(18, 12, ROW, GRID)]}
        | {"apart": [0, 1]},
        "infeasible",
    ),
    "a table that just fits the only rank went to the host": (
        {"ranks": 1, "tables": [table(2, 8, COLUMN, HOST)], "memory": [64]},
        "best",
    ),
    "a grid of more blocks than nodes kept replicas from being tried": (
        {"ranks": 2, "node": 1}
        | {"tables": [table(1447, 4, ROW), table(441, 12, REPLICA, GRID)]},
        "best",
    ),
    "columns that take no memory were counted on a full rank": (
        {"ranks": 2, "memory": [180672, 336], "apart": [1, 2]}
        | {
            "tables": [
                table(42, 4, GRID, module=1),
                table(542, 8, HOST),
                table(3757, 12, NODE_COLUMN, module=1),
            ]
        },
        "best",
    ),
    "a grid took the only ranks with room for columns that lie apart from it": (
        {"ranks": 4, "node": 2, "memory": [5759, 5760, 2704, 2704], "apart": [0, 1]}
        | {"tables": [table(191, 8, NODE_COLUMN), table(169, 4, GRID)]},
        "best",
    ),
    "one of two tables on a node took the only node with room for the other": (
        {"ranks": 4, "node": 2, "memory": [47152, 47152, 12480, 12480]}
        | {
            "tables": [
                table(1535, 4, NODE_ROW, pooling=32.0),
                table(2935, 8, NODE_ROW, pooling=0.5),
            ]
        },
        "best",
    ),
    "columns that fit as long as another table is on the only node with room": (
        {"ranks": 4, "node": 2, "memory": [18448, 240, 0, 0]}
        | {"tables": [table(9, 12, COLUMN, NODE_ROW), table(569, 8, COLUMN, module=1)]},
        "best",
    ),
    "on one rank ways to shard were chosen greedily, and never changed": (
        {"ranks": 1, "memory": [280719], "models": 134303}
        | {
            "tables": [
                table(3813, 8, NODE_ROW),
                table(2908, 12, REPLICA, module=1),
                table(536, 8, COLUMN, HOST),
                table(123, 4, NODE_ROW, HOST),
            ]
        },
        "best",
    ),
    "ways that fill the ranks to more than 95 % were never tried": (
        {"ranks": 3, "memory": [26560, 23920, 26560], "models": 137535, "even": True}
        | {
            "tables": [
                table(2, 8, NODE_ROW, NODE_COLUMN, HOST, module=1, pooling=8.529),
                table(1489, 12, GRID, ROW, REPLICA, HOST, pooling=4.639),
                table(169, 8, COLUMN, GRID, HOST, pooling=2.338),
            ]
        },
        "best",
    ),
    "what the devices' memory alone would send to the host broke the host's limit": (
        {"ranks": 1, "memory": [5440], "host": [4800]}
        | {
            "tables": [
                table(160, 4, COLUMN, HOST, pooling=1.0),
                table(160, 4, COLUMN, HOST, pooling=1.0),
                table(290, 4, COLUMN, HOST, pooling=20.0),
            ]
        },
        "best",
    ),
}
"""What was wrong -> the case, and what it comes to."""


@pytest.mark.parametrize("wrong", FOUND)
def test_what_was_found_is_mended(wrong: str) -> None:
    case, expected = FOUND[wrong]
    known = {"node": case["ranks"], "models": 1} | case
    outcome = against_truth.judge(known)
    assert outcome.partition(":")[0] == expected, outcome


def test_ranks_without_memory_are_bound() -> None:
    known = {"ranks": 1, "node": 1, "models": 1, "memory": [0]}
    case = known | {"tables": [table(2, 8, COLUMN, HOST)]}
    outcome, _ = against_truth.examine(case, all_bounds=True)
    assert outcome == "best"


@pytest.mark.parametrize(
    "numbers", [range(10), pytest.param(range(10, 60), marks=pytest.mark.nightly)]
)
def test_a_sample(numbers: range) -> None:
    drawn = [against_truth.draw(np.random.default_rng([SEED, n])) for n in numbers]
    solved = [against_truth.examine(case, all_bounds=True) for case in drawn]
    outcomes, figures = zip(*solved, strict=True)
    assert [o for o in outcomes if o.startswith("failure")] == []
    assert sum(o == "best" for o in outcomes) > len(numbers) / 3
    # Sums know of even ranks alone, which so few tables do not make.
    for name, most in (("every set", 0.01), ("some sets", 0.01), ("sums", 0.08)):
        assert np.median([found[name] for found in figures if found]) < most
