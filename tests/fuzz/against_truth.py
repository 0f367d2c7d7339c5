"""Tiny tasks for the default search, against every placement there is.

    python -m tests.fuzz.against_truth 2000 1

All sharding types, kernels in the host's memory, memory of devices and of hosts that a
placement fills to the byte or misses by one, and rules on ranks. What must hold: a
placement is found exactly where there is one, it is at most 1 % worse than the best,
and the bound is not above the best. The search is kept from trying all placements
itself.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from tests.fuzz.campaign import Case, HangError, Outcome, limited, run
from torchrec_neuroshard.errors import ConfigError, InfeasibleError
from torchrec_neuroshard.placement import KernelFactors, Placement, ShardingTask
from torchrec_neuroshard.search import NeuroShardSearcher, SearchConfig
from torchrec_neuroshard.search.exhaustive import ExhaustiveSearcher
from torchrec_neuroshard.search.shards import placement_from_widths
from torchrec_neuroshard.sharding_types import SHARDING_TYPES
from torchrec_neuroshard.tables import TableConfig
from torchrec_neuroshard.testing import AnalyticCommsModel, AnalyticCostModel

SEARCH = SearchConfig(exhaustive_limit=0, time_budget_seconds=20.0)
MOST_PLACEMENTS = 60_000
HANG_SECONDS = 120.0
MOST_LOSS, EPSILON = 0.01, 1e-9
KERNELS = {
    "uvm": KernelFactors(forward=5.0, backward=7.0),
    "dense": KernelFactors(forward=1.5, backward=2.0, passes=3.0),
}


HOSTED = 0.5
"""Share of the tasks in which the host's memory is limited, too, where it is used."""


def draw(rng: np.random.Generator) -> Case:
    """Return a task as plain data, with few enough placements to try them all."""
    num_ranks, node = [(1, 1), (2, 2), (2, 1), (3, 3), (4, 2)][int(rng.integers(5))]
    tables = []
    is_hosted = bool(rng.random() < HOSTED)
    for _ in range(int(rng.integers(1, 5 if num_ranks < 4 else 4))):
        kinds = [k for k in SHARDING_TYPES if k != "table_wise"]
        ways = [
            [str(kind), "dense" if kind == "data_parallel" else None]
            for kind in rng.choice(kinds, int(rng.integers(1, 4)), replace=False)
        ]
        if rng.random() < 0.3:
            ways.append(["column_wise", "uvm"])
            if is_hosted and rng.random() < 0.5:
                ways.append(["row_wise", "uvm"])
        tables.append(
            {
                "rows": int(10 ** rng.uniform(0, 4)),
                "dim": int(rng.choice([4, 8, 12])),
                "pooling": float(round(rng.lognormal(1.0, 1.5), 3)),
                "module": int(rng.integers(2)),
                "ways": ways,
            }
        )
    case: Case = {
        "ranks": num_ranks,
        "node": node,
        "tables": tables,
        "models": int(rng.integers(10**6)),
    }
    if rng.random() < 0.3:
        case["even"] = True
    everyone = np.arange(len(tables))
    if rng.random() < 0.3:
        for table in tables:
            if rng.random() < 0.5:
                count = int(rng.integers(1, num_ranks + 1))
                ranks = rng.choice(num_ranks, count, replace=False)
                table["allowed"] = sorted(int(r) for r in ranks)
    if len(tables) > 1 and rng.random() < 0.25:
        case["apart"] = [int(t) for t in rng.choice(everyone, 2, replace=False)]
    if len(tables) > 1 and rng.random() < 0.2:
        case["together"] = [int(t) for t in rng.choice(everyone, 2, replace=False)]
        for index in case["together"]:
            tables[index]["ways"] = [["column_wise", None]]
    if rng.random() < 0.7:
        task = build(case | {"host": [0] * num_ranks})
        placement = _some_placement(rng, task)
        for name, memory in zip(("memory", "host"), task.memories, strict=True):
            used = placement.rank_bytes(memory)
            edge = rng.random()
            caps = [int(np.ceil(u)) for u in used]
            if edge < 0.3:
                rank = int(rng.integers(num_ranks))
                caps[rank] = max(0, caps[rank] - 1)
            elif edge < 0.6:
                mean = sum(used) / num_ranks * rng.uniform(0.3, 1.5)
                caps = [int(mean)] * num_ranks
            if name == "memory" or (is_hosted and any(memory.column_bytes)):
                case[name] = caps
    return case


def build(case: Case) -> ShardingTask:
    """Return the task of a case."""
    num_ranks, node = case["ranks"], case["node"]
    tables: list[TableConfig] = []
    fields: list[tuple[Any, ...]] = []
    ways_of: list[tuple[int, ...]] = []
    groups: dict[tuple[int, str, str | None], int] = {}
    for number, spec in enumerate(case["tables"]):
        first = len(tables)
        for kind, kernel in spec["ways"]:
            row = SHARDING_TYPES[kind]
            part = row.part_rows(spec["rows"], row.block_size(num_ranks, node))
            tables.append(
                TableConfig(
                    name=f"t{number}",
                    num_embeddings=spec["rows"],
                    embedding_dim=spec["dim"],
                    pooling_factor=spec["pooling"],
                )
            )
            group = groups.setdefault((spec["module"], kind, kernel), len(groups))
            fields.append(
                (
                    kind,
                    KERNELS.get(kernel),
                    group,
                    part * 4.0 * (kernel != "uvm"),
                    part * 4.0 * (kernel == "uvm"),
                    4 if row.splits_columns else spec["dim"],
                    tuple(spec.get("allowed", ())) if row.in_columns else (),
                )
            )
        ways_of.append(tuple(range(first, len(tables))))
    kinds, kernels, group_T, bytes_T, host_T, widths_T, allowed_T = zip(
        *fields, strict=True
    )
    stages: dict[tuple[int, str], int] = {}
    stage_G = [stages.setdefault(key[:2], len(stages)) for key in groups]

    def all_ways(indices: list[int]) -> tuple[int, ...]:
        return tuple(way for index in indices for way in ways_of[index])

    rules: dict[str, Any] = {}
    if any(allowed_T):
        rules["allowed_ranks"] = allowed_T
    if "together" in case:
        rules["together"] = (all_ways(case["together"]),)
    if "apart" in case:
        # One set for each pair of ways of unlike tables.
        one, other = (ways_of[index] for index in case["apart"])
        rules["apart"] = tuple((a, b) for a in one for b in other)
    return ShardingTask(
        tables=tuple(tables),
        world_size=num_ranks,
        batch_size=120,
        local_world_size=node,
        groups=group_T,
        stages=tuple(stage_G),
        alternatives=tuple(ways for ways in ways_of if len(ways) > 1),
        sharding_types=kinds,
        kernels=kernels,
        column_bytes=bytes_T,
        host_column_bytes=host_T,
        min_widths=widths_T,
        memory_bytes=tuple(case.get("memory", ())),
        host_memory_bytes=tuple(case.get("host", ())),
        uneven="even" not in case,
        **rules,
    )


def _some_placement(rng: np.random.Generator, task: ShardingTask) -> Placement:
    """Return a placement that need not keep to the rules."""
    width_TW = np.zeros((len(task.tables), task.world_size), dtype=np.int64)
    for ways in task.ways:
        way = int(rng.choice(ways))
        dim, size = task.tables[way].embedding_dim, task.block_size(way)
        blocks = rng.permutation(task.world_size // size)
        count = 1
        if task.sharding_type(way).splits_columns:
            possible = [k for k in (1, 2, 3) if k <= len(blocks) and dim % (4 * k) == 0]
            count = int(rng.choice(possible))
            if not task.sharding_type(way).in_columns:  # in even blocks of a width
                count = min(len(blocks), dim // 4)
        for block in blocks[:count]:
            width_TW[way, block * size : (block + 1) * size] = dim // count
    return placement_from_widths(width_TW, task)


def models(seed: int) -> tuple[AnalyticCostModel, AnalyticCommsModel]:
    """Return costs that weigh launches, lookups, bytes and links as it comes."""
    rng = np.random.default_rng(seed)
    launch, lookup, byte = 10 ** rng.uniform([-2.5, 0, -1], [-0.5, 2.5, 1])
    compute = AnalyticCostModel(launch_ms=launch, lookup_ns=lookup, byte_ns=byte)
    return compute, AnalyticCommsModel(gb_per_s=10 ** rng.uniform(-2, 0))


def judge(case: Case) -> Outcome:
    """Solve a task exactly and by the search."""
    try:
        task = build(case)
    except ConfigError as error:
        return f"not built: {error}"
    best_ms: float | None = None
    try:
        best = ExhaustiveSearcher(MOST_PLACEMENTS).search(task, *models(case["models"]))
        best_ms = best.predicted.critical_path_ms
    except InfeasibleError:
        pass
    except ConfigError as error:
        return f"not solved: {error}"
    try:
        with limited(HANG_SECONDS):
            found = NeuroShardSearcher(SEARCH).search(task, *models(case["models"]))
        found.placement.check(task)
    except HangError:
        return "failure, hangs"
    except (InfeasibleError, ConfigError) as error:
        if best_ms is None:
            return f"infeasible: {error}"
        return f"failure, not found: {best_ms:.6g} ms is possible; {error}"
    cost = found.predicted.critical_path_ms
    if best_ms is None:
        return f"failure, not tried: brute force finds nothing, the search {cost} ms"
    if cost < best_ms * (1 - EPSILON):
        return f"failure, better: {cost} ms, by brute force {best_ms}"
    if found.lower_bound_ms > best_ms * (1 + EPSILON):
        return f"failure, bound: {found.lower_bound_ms} ms, the best is {best_ms}"
    if cost > best_ms * (1 + MOST_LOSS):
        return f"failure, worse: {cost / best_ms - 1:.2%}"
    return "best" if cost <= best_ms * (1 + 1e-6) else "within 1 %"


if __name__ == "__main__":
    sys.exit(run(draw, judge))
