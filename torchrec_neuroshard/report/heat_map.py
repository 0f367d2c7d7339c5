"""A heat map for the page: what the most expensive tables cost each rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from torchrec_neuroshard.report.parts import TableReport

MAX_ROWS = 40
"""Tables that are drawn in each unit."""
MAX_CELLS = 10_000
"""Cells that are drawn in each unit; of many ranks, fewer tables are drawn."""

_GIB = 2.0**30


def heat_map(
    tables: Sequence[TableReport], num_ranks: int, ranks_per_node: int
) -> dict[str, Any]:
    """Return a chart of tables and ranks, in milliseconds and in GiB.

    A table's row has a cell for each rank with a part of it. In each unit the tables
    with the largest cells come first, then those with the largest sum. A unit without
    values is left out.

    Args:
        tables: All tables.
        num_ranks: The number of ranks.
        ranks_per_node: Ranks in a node.
    """
    cells = [_cells(table) for table in tables]
    views, drawn = [], dict[int, int]()
    for unit, values in (("ms", slice(1, 3)), ("GiB", slice(3, 4))):
        sums = [[sum(cell[values]) for cell in row] or [0.0] for row in cells]
        most = np.array([[max(row), sum(row)] for row in sums]).reshape(-1, 2)
        order = np.lexsort(-most.T[::-1]).tolist()
        if not order or not most[order[0], 0] > 0:
            continue
        num_cells = np.cumsum([len(cells[t]) for t in order[:MAX_ROWS]])
        num_rows = max(1, int((num_cells <= MAX_CELLS).sum()))
        rows = [drawn.setdefault(t, len(drawn)) for t in order[:num_rows]]
        left = order[num_rows:]
        rest = {"left": len(left), "most_left": most[left[0], 0].item() if left else 0}
        views.append({"unit": unit, "rows": rows, **rest})
    return {
        "kind": "heat map",
        "num_ranks": num_ranks,
        "ranks_per_node": ranks_per_node,
        "views": views,
        "tables": [[tables[t].table, cells[t]] for t in drawn],
    }


def _cells(table: TableReport) -> list[list[float]]:
    """Return rank, kernels [ms], collectives [ms] and GiB of a table's ranks."""
    found: dict[int, list[float]] = defaultdict(lambda: [0.0] * 3)
    for shard in table.shards:
        own = found[shard.rank]
        own[0] += shard.compute_ms
        own[1] += shard.comms_ms
        own[2] += shard.used_bytes / _GIB
    return [[rank, *values] for rank, values in sorted(found.items())]
