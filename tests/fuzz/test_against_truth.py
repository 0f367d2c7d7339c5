"""A sample of the campaign, and all that it found, shrunk to the least that failed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tests.fuzz import against_truth

SEED, NUM_CASES = 5, 8


def table(rows: int, dim: int, *ways: Sequence[str | None], module: int = 0) -> Any:
    return {
        "rows": rows,
        "dim": dim,
        "pooling": 4.0,
        "module": module,
        "ways": list(ways),
    }


COLUMN, HOST = ["column_wise", None], ["column_wise", "uvm"]
ROW, GRID, REPLICA = (
    ["row_wise", None],
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
                table(3757, 12, ["table_column_wise", None], module=1),
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


def test_a_sample() -> None:
    outcomes = [
        against_truth.judge(against_truth.draw(np.random.default_rng([SEED, number])))
        for number in range(NUM_CASES)
    ]
    assert [o for o in outcomes if o.startswith("failure")] == []
    assert sum(o == "best" for o in outcomes) > NUM_CASES / 3
