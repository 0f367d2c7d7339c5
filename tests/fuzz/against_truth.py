"""Tiny tasks for the default search, against every placement there is.

All sharding types, kernels in the host's memory, memory of devices and of hosts that a
placement fills to the byte or misses by one, and rules on ranks. What must hold: a
placement is found exactly where there is one, it is at most 1 % worse than the best,
and no bound is above the best.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

import numpy as np

from tests.fuzz.campaign import Case, HangError, Outcome, has_luck, limited
from tests.search.exhaustive import ExhaustiveSearcher
from torchrec_neuroshard.costs.simulator import Simulator
from torchrec_neuroshard.costs.task import KernelFactors, Placement, ShardingTask
from torchrec_neuroshard.errors import ConfigError, InfeasibleError
from torchrec_neuroshard.search import (
    NeuroShardSearcher,
    SearchConfig,
    SearchResult,
    bounds,
)
from torchrec_neuroshard.search.shards import ShardBank, placement_from_widths
from torchrec_neuroshard.tables.sharding_types import SHARDING_TYPES
from torchrec_neuroshard.tables.table import TableConfig
from torchrec_neuroshard.testing import AnalyticCommsModel, AnalyticCostModel

SEARCH = SearchConfig(time_budget_seconds=20.0, bound="thorough")
MOST_PLACEMENTS = 60_000
HANG_SECONDS = 120.0
MOST_LOSS, EPSILON = 0.01, 1e-9
KERNELS = {
    "uvm": KernelFactors(forward=5.0, backward=7.0),
    "dense": KernelFactors(forward=1.5, backward=2.0, passes=3.0),
}


Way = str | Sequence[str | None]
"""A sharding type, or one with a kernel of `KERNELS`."""


def table(
    rows: int, dim: int, *ways: Way, module: int = 0, pooling: float = 4.0
) -> Case:
    """Return a table of a case."""
    return {
        "rows": rows,
        "dim": dim,
        "pooling": pooling,
        "module": module,
        "ways": [(way, None) if isinstance(way, str) else way for way in ways],
    }


def draw(rng: Random) -> Case:
    """Return a task as plain data, with few enough placements to try them all."""
    ranks, node = rng.choice([(1, 1), (2, 2), (2, 1), (3, 3), (4, 2)])
    is_plain, is_hosted = has_luck(rng, 0.3), has_luck(rng, 0.5)
    kinds = [k for k in SHARDING_TYPES if k != "table_wise"]

    def ways() -> list[list[str | None]]:
        if is_plain:
            return [["column_wise", None]]
        found: list[list[str | None]] = [
            [kind, "dense" if kind == "data_parallel" else None]
            for kind in rng.sample(kinds, rng.randint(1, 3))
        ]
        for kind in ["column_wise", "row_wise"][: rng.randrange(3) * is_hosted]:
            found.append([kind, "uvm"])
        return found

    count = rng.randrange(1, 5 if ranks < 4 else 4) + is_plain
    tables = [
        table(
            int(10 ** rng.uniform(0, 4)),
            rng.choice([4, 8, 12]),
            *ways(),
            module=rng.randrange(2),
            pooling=round(10 ** rng.uniform(-1, 2), 3),
        )
        for _ in range(count)
    ]
    case: Case = {
        "ranks": ranks,
        "node": node,
        "tables": tables,
        "models": rng.randrange(10**6),
        "even": has_luck(rng, 0.3),
        "narrowest": rng.choice([4, 4, 8]),
    }
    for one in tables:
        if has_luck(rng, 0.15):
            allowed = rng.sample(range(ranks), rng.randint(1, ranks))
            one["allowed"] = sorted(allowed)
    if count > 1 and has_luck(rng, 0.25):
        case["apart"] = rng.sample(range(count), 2)
    if count > 1 and has_luck(rng, 0.2):
        case["together"] = rng.sample(range(count), 2)
        for index in case["together"]:
            tables[index]["ways"] = [["column_wise", None]]
    if has_luck(rng, 0.5):
        # A placement that need not keep to the rules fills the ranks, or nearly.
        task = build(case | {"host": [0] * ranks})
        width_TW = np.zeros((len(task.tables), ranks), dtype=np.int64)
        for possible in choices(task):
            if possible:
                way, row = rng.choice(possible)
                width_TW[way] = row
        placement = placement_from_widths(width_TW, task)
        used_MW, column_MT = placement.rank_bytes(task), task.memory[2]
        for name, used_W, column_T in zip(
            ("memory", "host"), used_MW, column_MT, strict=True
        ):
            caps = [int(np.ceil(used)) for used in used_W]
            edge = rng.random()
            if edge < 0.2:
                rank = rng.randrange(ranks)
                caps[rank] = max(0, caps[rank] - 1)
            elif edge < 0.6:
                caps = [int(sum(caps) / ranks * rng.uniform(0.3, 1.5))] * ranks
            if name == "memory" or (is_hosted and column_T.any()):
                case[name] = caps
    if has_luck(rng, 0.3):
        case["most"] = rng.randint(1, ranks)
    return case


def layouts(task: ShardingTask, way: int) -> list[list[int]]:
    """Return every layout of a table: its columns on each rank."""
    ranks, dim = task.world_size, task.tables[way].embedding_dim
    if task.sharding_type(way).in_columns:
        units = itertools.product(range(dim // 4 + 1), repeat=ranks)
        return [[4 * u for u in row] for row in units if 4 * sum(row) == dim]
    size, count = task.block_size(way), task.num_blocks(way)
    return [
        [dim // count * (rank // size in held) for rank in range(ranks)]
        for held in itertools.combinations(range(ranks // size), count)
    ]


def choices(task: ShardingTask) -> list[list[tuple[int, list[int]]]]:
    """Return the ways and layouts that each table may take, without other limits."""
    return [
        [(way, row) for way in own for row in layouts(task, way)] for own in task.ways
    ]


def placements(task: ShardingTask) -> Iterator[Placement]:
    """Yield every placement that keeps to the limits."""
    for chosen in itertools.product(*choices(task)):
        width_TW = np.zeros((len(task.tables), task.world_size), dtype=np.int64)
        for way, row in chosen:
            width_TW[way] = row
        placement = placement_from_widths(width_TW, task)
        with contextlib.suppress(ValueError):
            placement.check(task)
            yield placement


def build(case: Case) -> ShardingTask:
    """Return the task of a case."""
    num_ranks, node = case["ranks"], case["node"]
    tables: list[TableConfig] = []
    fields: list[dict[str, Any]] = []
    ways_of: list[tuple[int, ...]] = []
    groups: dict[tuple[int, str, str | None], int] = {}
    for number, spec in enumerate(case["tables"]):
        table = TableConfig(
            name=f"t{number}",
            num_embeddings=spec["rows"],
            embedding_dim=spec["dim"],
            pooling_factor=spec["pooling"],
        )
        ways_of.append(tuple(range(len(tables), len(tables) + len(spec["ways"]))))
        for kind, kernel in spec["ways"]:
            row = SHARDING_TYPES[kind]
            narrowest = case.get("narrowest", 4) if row.in_columns else 4
            part = row.part_rows(spec["rows"], row.block_size(num_ranks, node))
            tables.append(table)
            fields.append(
                {
                    "sharding_types": kind,
                    "kernels": KERNELS.get(kernel),
                    "groups": groups.setdefault(
                        (spec["module"], kind, kernel), len(groups)
                    ),
                    "column_bytes": part * 4.0 * (kernel != "uvm"),
                    "host_column_bytes": part * 4.0 * (kernel == "uvm"),
                    "max_shards": case.get("most", num_ranks)
                    if row.in_columns
                    else num_ranks,
                    "min_widths": narrowest if row.splits_columns else spec["dim"],
                    "allowed_ranks": tuple(spec.get("allowed", ()))
                    if row.in_columns
                    else (),
                }
            )
    stages: dict[tuple[int, str], int] = {}
    stage_G = [stages.setdefault(key[:2], len(stages)) for key in groups]

    rules: dict[str, Any] = {
        name: tuple(way[name] for way in fields) for name in fields[0]
    }
    if "together" in case:
        one, other = (ways_of[index] for index in case["together"])
        rules["together"] = (one + other,)
    if "apart" in case:
        # One set for each pair of ways of unlike tables.
        one, other = (ways_of[index] for index in case["apart"])
        rules["apart"] = tuple((a, b) for a in one for b in other)
    return ShardingTask(
        tables=tuple(tables),
        world_size=num_ranks,
        batch_size=120,
        local_world_size=node,
        stages=tuple(stage_G),
        alternatives=tuple(ways for ways in ways_of if len(ways) > 1),
        memory_bytes=tuple(case.get("memory", ())),
        host_memory_bytes=tuple(case.get("host", ())),
        uneven=not case.get("even"),
        **rules,
    )


def models(seed: int) -> tuple[AnalyticCostModel, AnalyticCommsModel]:
    """Return costs that weigh launches, lookups, bytes and links as it comes."""
    rng = np.random.default_rng(seed)
    launch, lookup, byte = 10 ** rng.uniform([-2.5, 0, -1], [-0.5, 2.5, 1])
    compute = AnalyticCostModel(launch_ms=launch, lookup_ns=lookup, byte_ns=byte)
    return compute, AnalyticCommsModel(gb_per_s=10 ** rng.uniform(-2, 0))


def examine(case: Case) -> tuple[Outcome, dict[str, float]]:
    """Solve a task exactly and by the search.

    Returns:
        The outcome; and by how much the best placement is above each bound, and what
        was found above the best placement, relative.
    """
    try:
        task = build(case)
    except ConfigError as error:
        return f"not built: {error}", {}
    costs = models(case["models"])
    best: SearchResult | None = None
    try:
        best = ExhaustiveSearcher(MOST_PLACEMENTS).search(task, Simulator(task, *costs))
    except InfeasibleError:
        pass
    except ConfigError as error:
        return f"not solved: {error}", {}
    try:
        with limited(HANG_SECONDS):
            found = NeuroShardSearcher(SEARCH).search(task, Simulator(task, *costs))
        found.placement.check(task)
    except HangError:
        return "failure, hangs", {}
    except (InfeasibleError, ConfigError) as error:
        if best is None:
            return f"infeasible: {error}", {}
        return f"failure, not found: {best}; {error}", {}
    cost = found.predicted.critical_path_ms
    if best is None:
        return f"failure, not tried: nothing by brute force, {cost} ms found", {}
    best_ms = best.predicted.critical_path_ms
    bounds_ms = {"search": found.lower_bound_ms, **bounds_of(task, costs)}
    figures = {name: best_ms / ms - 1 for name, ms in bounds_ms.items()}
    figures["loss"] = cost / best_ms - 1
    if figures["loss"] < -EPSILON:
        return f"failure, better: {cost} ms, by brute force {best_ms}", figures
    if wrong := [name for name in bounds_ms if figures[name] < -EPSILON]:
        return (
            f"failure, bound: {bounds_ms} ms, {wrong}, the best is {best_ms}",
            figures,
        )
    if figures["loss"] > MOST_LOSS:
        return f"failure, worse: {figures['loss']:.2%}", figures
    return "best" if figures["loss"] <= 1e-6 else "within 1 %", figures


def bounds_of(
    task: ShardingTask, costs: tuple[AnalyticCostModel, AnalyticCommsModel]
) -> dict[str, float]:
    """Return the quick and the thorough bound."""
    bank = ShardBank(Simulator(task, *costs))
    return {
        "quick": bounds.lower_bound(bank, time.monotonic()),
        "thorough": bounds.lower_bound(bank),
    }
