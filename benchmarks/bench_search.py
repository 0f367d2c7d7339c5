"""Planning time, peak memory, predicted cost and gap of searches, by size of the task.

    python benchmarks/bench_search.py --out benchmarks/results/search_cpu_202611

writes `<out>.json` (raw), `<out>.md` and `<out>.svg` after every run; `--resume` goes
on where an earlier call stopped. Every run is a process of its own. Where others use
the machine, too, `--cpu-clock` counts CPU seconds, in time budgets as well. In all:

- ours, TorchRec's planner with its default and its dynamic-programming proposer, and
  the loops of NeuroShard's paper on the same costs, on tables of production widths;
- how long ours takes to hold a plan as good as the paper's final one;
- the gap to the lower bound on tasks as the papers draw them, on 8 ranks;
- `NeuroShardPlanner.plan()` on a TorchRec model: part by part, when it had its plan,
  and, with `--before`, beside what an earlier call wrote.

A rival that did not end in time at one size is not tried at larger ones.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import json
import math
import multiprocessing
import os
import platform
import resource
import shlex
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from torchrec_neuroshard.baselines.neuroshard import NeuroShardConfig, PaperSearcher
from torchrec_neuroshard.cost_models import BandwidthCommsModel, load_cost_model
from torchrec_neuroshard.cost_models.base import CommsModel, CostModel
from torchrec_neuroshard.placement import Placement, ShardingTask
from torchrec_neuroshard.search import NeuroShardSearcher, SearchConfig
from torchrec_neuroshard.search import progress as progress_module
from torchrec_neuroshard.search.progress import SearchProgress
from torchrec_neuroshard.simulator import Simulator
from torchrec_neuroshard.tables import TableConfig
from torchrec_neuroshard.testing import AnalyticCostModel
from torchrec_neuroshard.workloads import (
    PRODUCTION_WIDTHS,
    TaskConfig,
    generate_dlrm_tables,
    power_of_two_widths,
    sample_tasks,
)

CASES = "50x4,100x8,200x8,1000x64,2000x128,10000x512"
PLAN_CASES = "100x8,1000x64,2000x128,10000x512"
OURS, STOCK, STOCK_DP, PAPER = "ours", "stock", "stock-dp", "neuroshard-paper"
PLAN = "planner.plan"
DLRM_RANKS = 8
DLRM_NUM_TABLES = (20, 119)
"""Twice NeuroShard's range for 4 ranks."""
MEMORY_SHARE = 1.5
"""Memory of all ranks over the bytes of all weights."""
BATCH_PER_RANK = 512
START_SECONDS = 30.0
"""That a process may take to start, load the model and make its task."""
OUR_SECONDS = 120.0
"""Time budget of our search."""
GIB = 2**30


def make_task(num_tables: int, world_size: int, seed: int) -> ShardingTask:
    """Draw tables of the DLRM generator with production widths."""
    rng = np.random.default_rng([seed, num_tables, world_size])
    pool = generate_dlrm_tables(seed)
    picks = rng.choice(len(pool), num_tables, replace=num_tables > len(pool))
    widths = rng.choice(PRODUCTION_WIDTHS, num_tables)
    tables = tuple(
        TableConfig(
            name=f"t{i}",
            num_embeddings=pool[p].num_embeddings,
            embedding_dim=int(w),
            pooling_factor=pool[p].pooling_factor,
            profile=pool[p].profile,
        )
        for i, (p, w) in enumerate(zip(picks, widths, strict=True))
    )
    total = sum(t.weight_bytes for t in tables)
    largest = max(t.weight_bytes for t in tables)
    memory = int(max(MEMORY_SHARE * total / world_size, 0.6 * largest))
    return ShardingTask(
        tables=tables,
        world_size=world_size,
        batch_size=BATCH_PER_RANK * world_size,
        local_world_size=min(8, world_size),
        memory_bytes=(memory,) * world_size,
    )


def make_dlrm_task(number: int) -> ShardingTask:
    """Draw a task as NeuroShard's benchmark does: widths of 4 to 128, powers of two."""
    config = TaskConfig(
        world_size=DLRM_RANKS,
        batch_size=BATCH_PER_RANK * DLRM_RANKS,
        num_tables=DLRM_NUM_TABLES,
        widths=power_of_two_widths(128),
        memory_bytes_per_rank=4 * GIB,
        max_total_bytes=int(0.8 * 4 * GIB * DLRM_RANKS),
    )
    return sample_tasks(generate_dlrm_tables(0), config, number + 1)[number]


def make_models(name: str, task: ShardingTask) -> tuple[CostModel, CommsModel]:
    """Return the cost model and collectives over TorchRec's default bandwidths."""
    compute = AnalyticCostModel() if name == "analytic" else load_cost_model(name)
    comms = BandwidthCommsModel(
        world_size=task.world_size,
        local_world_size=task.local_world_size,
        intra_gb_per_s=600.0,
        inter_gb_per_s=12.5,
    )
    return compute, comms


Curve = list[tuple[float, float]]
"""Seconds of the search, and the best critical path by then [ms]."""

# Methods: task, models, seed -> placement and what else is known.

Method = Callable[
    [ShardingTask, CostModel, CommsModel, int], tuple[Placement, dict[str, Any]]
]


def plan_ours(
    task: ShardingTask, compute: CostModel, comms: CommsModel, seed: int
) -> tuple[Placement, dict[str, Any]]:
    config = SearchConfig(seed=seed, time_budget_seconds=OUR_SECONDS)
    result = NeuroShardSearcher(config).search(task, compute, comms)
    return result.placement, {
        "lower_bound_ms": result.lower_bound_ms,
        "gap": result.gap,
        "num_evaluated": result.num_evaluated,
    }


@contextlib.contextmanager
def watched(config: SearchConfig) -> Iterator[tuple[SearchConfig, Curve]]:
    """Settings of a search that notes seconds and critical path of each better plan."""
    seen: Curve = []

    def note(progress: SearchProgress) -> None:
        if progress.best_ms < (seen[-1][1] if seen else math.inf):
            seen.append((progress.seconds, progress.best_ms))

    with mock.patch.object(progress_module, "REPORT_SECONDS", 0.0):
        yield dataclasses.replace(config, progress=note), seen


def make_job(
    tables: Sequence[TableConfig], learning_rate: float | None = 0.1
) -> tuple[Any, Any]:
    """Make what planners plan: the tables as a module, and the sharders."""
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder

    from harness.models import build_collection

    return build_collection(tables, learning_rate), [EmbeddingBagCollectionSharder()]


def plan_stock(task: ShardingTask, dynamic: bool) -> tuple[Placement, dict[str, Any]]:
    """Plan with TorchRec's best practice: pooling factors, splits down to 32."""
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
    from torchrec.distributed.planner.proposers import DynamicProgrammingProposer
    from torchrec.distributed.planner.storage_reservations import (
        FixedPercentageStorageReservation,
    )
    from torchrec.distributed.planner.types import ParameterConstraints

    from torchrec_neuroshard.planner import placement_from_plan

    planner = EmbeddingShardingPlanner(
        topology=Topology(
            world_size=task.world_size,
            compute_device="cuda",
            local_world_size=task.local_world_size,
            # Room for what stock counts besides the weights: optimizer, buffers.
            hbm_cap=2 * task.memory_bytes[0] + 4 * GIB,
        ),
        batch_size=task.batch_size // task.world_size,
        storage_reservation=FixedPercentageStorageReservation(0.0),
        proposer=DynamicProgrammingProposer() if dynamic else None,
        constraints={
            t.name: ParameterConstraints(
                sharding_types=["table_wise", "column_wise"],
                compute_kernels=["fused"],
                min_partition=32,
                pooling_factors=[t.pooling_factor],
            )
            for t in task.tables
        },
        debug=False,
        stats=[],
    )
    plan = planner.plan(*make_job(task.tables, None))
    read = placement_from_plan(
        plan, task.world_size, table_names=[t.name for t in task.tables]
    )
    return read.placement, {"not_described": len(read.not_column_sharded)}


def time_planner(task: ShardingTask, model: str) -> dict[str, Any]:
    """Plan a TorchRec model; seconds in all and of each part, as the planner says."""
    from torchrec.distributed.planner import Topology
    from torchrec.distributed.planner.types import ParameterConstraints

    from torchrec_neuroshard import NeuroShardPlanner

    module, sharders = make_job(task.tables, None)
    with watched(SearchConfig()) as (search, seen):
        planner = NeuroShardPlanner(
            topology=Topology(
                world_size=task.world_size,
                compute_device="cuda",
                local_world_size=task.local_world_size,
                hbm_cap=2 * task.memory_bytes[0] + 4 * GIB,
            ),
            batch_size=task.batch_size // task.world_size,
            cost_model=model,
            constraints={
                t.name: ParameterConstraints(pooling_factors=[t.pooling_factor])
                for t in task.tables
            },
            search=search,
        )
        start = time.perf_counter()
        planner.plan(module, sharders)
        seconds = time.perf_counter() - start
    result = planner.last_result
    assert result is not None
    return {
        "seconds": seconds,
        "parts": dict(planner.last_seconds),
        "critical_path_ms": result.predicted.critical_path_ms,
        "gap": result.gap,
        "num_shards": len(result.placement.shards),
        "num_tables": len(task.tables),
        "fallback": result.fallback,
        "progress": seen,
    }


def plan_paper(
    task: ShardingTask, compute: CostModel, comms: CommsModel, seed: int
) -> tuple[Placement, dict[str, Any]]:
    config = NeuroShardConfig(costs="shared", seed=seed)
    result = PaperSearcher(config).search(task, compute, comms)
    return result.placement, {"num_evaluated": result.num_evaluated}


METHODS: dict[str, Method] = {
    OURS: plan_ours,
    STOCK: lambda task, compute, comms, seed: plan_stock(task, False),
    STOCK_DP: lambda task, compute, comms, seed: plan_stock(task, True),
    PAPER: plan_paper,
}


# Runs, each in its own process.


@dataclass(frozen=True, slots=True)
class Run:
    """One method on one task."""

    kind: str
    """`production` widths, or `dlrm`: as the papers draw tasks."""
    method: str
    tables: int
    ranks: int
    seed: int

    def task(self) -> ShardingTask:
        """Make the task."""
        if self.kind == "dlrm":
            return make_dlrm_task(self.seed)
        return make_task(self.tables, self.ranks, self.seed)


def _measured(run: Run, model: str) -> dict[str, Any]:
    task = run.task()
    # One small plan outside the clock: imports and caches.
    small = make_task(8, 2, run.seed)
    plan_ours(small, *make_models(model, small), 0)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    cpu = time.process_time()
    if run.method == PLAN:
        found = time_planner(task, model)
    else:
        compute, comms = make_models(model, task)
        start = time.perf_counter()
        placement, known = METHODS[run.method](task, compute, comms, run.seed)
        found = {"seconds": time.perf_counter() - start}
    found["cpu_seconds"] = time.process_time() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found |= {"peak_mib": peak / 1024, "base_mib": before / 1024}
    if run.method == PLAN:
        return found
    predicted = Simulator(task, compute, comms).evaluate(placement)
    columns = sum(t.embedding_dim for t in task.tables)
    assert sum(s.width for s in placement.shards) == columns
    found |= {
        "critical_path_ms": predicted.critical_path_ms,
        "num_shards": len(placement.shards),
        "largest_rank_share_of_memory": max(placement.rank_bytes(task))
        / task.memory_bytes[0],
        "num_tables": len(task.tables),
        **known,
    }
    if run.method == OURS and run.kind == "production":
        limits = SearchConfig(seed=run.seed, time_budget_seconds=OUR_SECONDS)
        with watched(limits) as (config, found["progress"]):
            NeuroShardSearcher(config).search(task, compute, comms)
    return found


def _work(pipe: Connection, run: Run, model: str, cpu_clock: bool) -> None:
    if cpu_clock:
        for name in ("monotonic", "perf_counter"):
            setattr(time, name, time.process_time)
    try:
        pipe.send(_measured(run, model))
    except Exception as error:  # a method's failure is a result
        last = traceback.format_exc().strip().splitlines()[-1]
        pipe.send({"failed": f"{type(error).__name__}: {last}"[:300]})


def execute(
    run: Run, model: str, limit: float, cpu_clock: bool = False
) -> dict[str, Any]:
    """Run in a process of its own, which is ended when the limit is over."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(theirs, run, model, cpu_clock))
    process.start()
    theirs.close()
    row: dict[str, Any] = dataclasses.asdict(run)
    try:
        # Making the task and loading the model is not planning: some slack for it.
        if ours.poll(limit + START_SECONDS):
            row |= ours.recv()
        else:
            row["failed"] = f"not done in {limit:g} s"
    except EOFError:
        row["failed"] = "the process died"
    finally:
        process.kill()
        process.join()
    if row.get("seconds", 0.0) > limit:
        row["failed"] = f"not done in {limit:g} s"
    return row


# Report.


def _cell(values: list[float], form: str) -> str:
    if not values:
        return "-"
    middle = f"{statistics.median(values):{form}}"
    if len(values) == 1:
        return middle
    return f"{middle} ({min(values):{form}} to {max(values):{form}})"


def table(rows: list[dict[str, Any]]) -> str:
    """One line per case and method: medians and ranges over the seeds."""
    lines = [
        "| tables x ranks | method | done | seconds | peak MiB | critical path ms "
        "| over ours | gap | shards |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for case in dict.fromkeys((r["tables"], r["ranks"]) for r in rows):
        here = [r for r in rows if (r["tables"], r["ranks"]) == case]
        best = {
            r["seed"]: r["critical_path_ms"]
            for r in here
            if r["method"] == OURS and "failed" not in r
        }
        for method in dict.fromkeys(r["method"] for r in here):
            mine = [r for r in here if r["method"] == method]
            done = [r for r in mine if "failed" not in r]
            ratio = [
                r["critical_path_ms"] / best[r["seed"]]
                for r in done
                if r["seed"] in best
            ]
            cells = [
                f"{case[0]} x {case[1]}",
                method,
                f"{len(done)}/{len(mine)}",
                _cell([r["seconds"] for r in done], ".2f"),
                _cell([r["peak_mib"] for r in done], ".0f"),
                _cell([r["critical_path_ms"] for r in done], ".3f"),
                _cell(ratio, ".4f"),
                _cell([100 * r["gap"] for r in done if "gap" in r], ".1f")
                + (" %" if any("gap" in r for r in done) else ""),
                _cell([float(r["num_shards"]) for r in done], ".0f"),
            ]
            lines.append("| " + " | ".join(cells) + " |")
            failures = sorted({r["failed"] for r in mine if "failed" in r})
            lines += [f"| | {method} | | {f} | | | | | |" for f in failures]
    return "\n".join(lines)


def seconds_to_match(ours: dict[str, Any], other_ms: float) -> float | None:
    """Seconds until our search held a plan at least as good; None: it never did."""
    for seconds, best_ms in ours.get("progress", ()):
        if best_ms <= other_ms * (1 + 1e-9):
            return float(seconds)
    return None


def speed_table(rows: list[dict[str, Any]]) -> str:
    """Beside the paper's loops: seconds of the whole search and to an equal plan."""
    lines = [
        "| tables x ranks | seed | paper's loops s | ours s | ratio "
        "| ours to an equal plan s | ratio | paper's cost over ours |",
        "|---|---|---|---|---|---|---|---|",
    ]
    ours = {_key(r): r for r in rows if r["method"] == OURS and "failed" not in r}
    for row in rows:
        mine = ours.get(_key(row))
        if row["method"] != PAPER or "failed" in row or mine is None:
            continue
        theirs, whole = row["seconds"], mine["seconds"]
        equal = seconds_to_match(mine, row["critical_path_ms"])
        cost = row["critical_path_ms"] / mine["critical_path_ms"]
        cells = [f"{row['tables']} x {row['ranks']}", str(row["seed"])]
        cells += [f"{theirs:.2f}", f"{whole:.2f}", f"{theirs / whole:.1f}"]
        cells += (
            ["never", "-"]
            if equal is None
            else [f"{equal:.3f}", f"{theirs / max(equal, 1e-3):.0f}"]
        )
        lines.append("| " + " | ".join([*cells, f"{cost:.4f}"]) + " |")
    return "\n".join(lines)


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["kind"], row["tables"], row["ranks"], row["seed"]


def gap_table(rows: list[dict[str, Any]]) -> str:
    """Gaps on the tasks drawn as the papers draw them."""
    done = [r for r in rows if "failed" not in r]
    lines = [
        "| task | tables | seconds | critical path ms | gap |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {r['seed']} | {r['num_tables']} | {r['seconds']:.2f} "
        f"| {r['critical_path_ms']:.3f} | {100 * r['gap']:.2f} % |"
        for r in done
    ]
    if done:
        gaps = [100 * r["gap"] for r in done]
        lines.append(
            f"| median of {len(gaps)} | | | | {statistics.median(gaps):.2f} % "
            f"({min(gaps):.2f} to {max(gaps):.2f}) |"
        )
    lines += [f"| {r['seed']} | | {r['failed']} | | |" for r in rows if "failed" in r]
    return "\n".join(lines)


def parts_table(rows: list[dict[str, Any]]) -> str:
    """Parts of `planner.plan()`, and the gap of its plan: medians and ranges."""
    lines = [
        "| tables x ranks | part | done | seconds | share | gap |",
        "|---|---|---|---|---|---|",
    ]
    for size in dict.fromkeys(map(_size, rows)):
        here = [r for r in rows if _size(r) == size]
        done = [r for r in here if "failed" not in r]
        lines += [f"| {size} | {r['failed']} | | | | |" for r in here if "failed" in r]
        for name in ("all", *dict.fromkeys(part for r in done for part in r["parts"])):
            parts = [{"all": r["seconds"], **r["parts"]}.get(name, 0.0) for r in done]
            share = 100 * sum(parts) / sum(r["seconds"] for r in done)
            cells = [size, name, f"{len(done)}/{len(here)}", _cell(parts, ".2f")]
            gaps = [100 * r["gap"] for r in done] if name == "all" else []
            gap = f"{_cell(gaps, '.2f')} %" if gaps else ""
            cells += [f"{share:.0f} %", gap if np.all(np.isfinite(gaps)) else "unknown"]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _size(row: dict[str, Any]) -> str:
    if row["kind"] == "dlrm":
        return f"{row['kind']} x {row['ranks']}"
    return f"{row['tables']} x {row['ranks']}"


NEAR = (0.05, 0.02, 0.01, 0.002, 0.0)
"""How much longer than the last plan a plan is that the curves look for."""


def curve_table(rows: list[dict[str, Any]]) -> str:
    """When searches held plans so near their last one: medians and ranges [s]."""
    heads = [f"within {100 * share:g} %" for share in NEAR[:-1]] + ["last better plan"]
    lines = [
        f"| tables x ranks | {' | '.join(heads)} | search ends |",
        "|---|" + "---|" * (len(heads) + 1),
    ]
    done = [r for r in rows if "failed" not in r and r["progress"]]
    for size in dict.fromkeys(map(_size, done)):
        here = [r for r in done if _size(r) == size]
        cells = [size]
        for share in NEAR:
            when = []
            for row in here:
                last = min(ms for _, ms in row["progress"])
                near = last * (1 + share) * (1 + 1e-9)
                when.append(min(s for s, ms in row["progress"] if ms <= near))
            cells.append(_cell(when, ".2f"))
        cells.append(_cell([r["parts"]["search"] for r in here], ".2f"))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def before_table(rows: list[dict[str, Any]], before: list[dict[str, Any]]) -> str:
    """Plans and seconds beside those of an earlier call."""
    lines = [
        "| tables x ranks | seed | tables | before ms | now ms | now over before "
        "| before s | now s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    earlier = {_key(r): r for r in before if r["method"] == PLAN}
    ratios = []
    for row in rows:
        old = earlier.get(_key(row))
        if old is None or "failed" in row or "failed" in old:
            continue
        now_ms, old_ms = row["critical_path_ms"], old["critical_path_ms"]
        ratios.append(now_ms / old_ms)
        lines.append(
            f"| {_size(row)} | {row['seed']} | {row['num_tables']} | {old_ms:.3f} "
            f"| {now_ms:.3f} | {now_ms / old_ms:.4f} | {old['seconds']:.2f} "
            f"| {row['seconds']:.2f} |"
        )
    if ratios:
        mean = statistics.geometric_mean(ratios)
        lines.append(f"| mean of {len(ratios)} | | | | | {mean:.4f} | | |")
    return "\n".join(lines)


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Planning seconds over tables x log2(ranks), both on log scales."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for method in dict.fromkeys(r["method"] for r in rows):
        done = [r for r in rows if r["method"] == method and "failed" not in r]
        if done:
            x = [r["tables"] * math.log2(r["ranks"]) for r in done]
            axes.loglog(x, [r["seconds"] for r in done], "o", label=method)
    axes.set_xlabel("tables x log2(ranks)")
    axes.set_ylabel("planning time [s]")
    axes.grid(True, which="both", alpha=0.3)
    axes.legend()
    figure.savefig(path)


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    return {n: version(n) for n in ("numpy", "scipy", "torch", "torchrec")}


def _beside(plans: list[dict[str, Any]], before: dict[str, Any]) -> str:
    if not before:
        return ""
    table = before_table(plans, before["rows"])
    return f"### Beside those of {before['config']['commit']}\n\n{table}\n\n"


def write(
    out: Path,
    config: dict[str, Any],
    rows: list[dict[str, Any]],
    before: dict[str, Any],
) -> None:
    """Write all there is so far."""
    out.parent.mkdir(parents=True, exist_ok=True)
    raw = {"config": config, "rows": rows}
    out.with_suffix(".json").write_text(json.dumps(raw, indent=1) + "\n")
    plain = [r for r in rows if r["kind"] == "production" and r["method"] != PLAN]
    plot(plain, out.with_suffix(".svg"))
    dlrm = [r for r in rows if r["kind"] == "dlrm" and r["method"] == OURS]
    plans = [r for r in rows if r["method"] == PLAN]
    out.with_suffix(".md").write_text(
        "# Planning time and predicted cost of the searches\n\n"
        f"{config['note']}\n\n"
        f"Plans rated by the cost model `{config['cost_model']}`; median (range) over "
        "the tasks of a size; each run in a process of its own.\n\n"
        f"{table(plain)}\n\n"
        f"![planning time]({out.with_suffix('.svg').name})\n\n"
        f"## Beside the paper's loops\n\n{speed_table(plain)}\n\n"
        f"## Gap on tasks drawn as the papers draw them, {DLRM_RANKS} ranks\n\n"
        f"{gap_table(dlrm)}\n\n"
        f"## `NeuroShardPlanner.plan()`, part by part\n\n{parts_table(plans)}\n\n"
        f"### Seconds of its search until it held a plan\n\n{curve_table(plans)}\n\n"
        f"{_beside(plans, before)}"
        f"```json\n{json.dumps(config, indent=1)}\n```\n"
    )


def _sizes(text: str) -> list[tuple[int, int]]:
    return [(int(a), int(b)) for a, b in (c.split("x") for c in text.split(",") if c)]


def _planned(args: argparse.Namespace) -> list[Run]:
    """All runs, ours before the rivals, small sizes first."""
    methods = args.methods.split(",")
    runs = [
        Run("production", method, *case, seed)
        for case in _sizes(args.cases)
        for seed in range(args.seeds)
        for method in methods
    ]
    runs += [Run("dlrm", OURS, 0, DLRM_RANKS, k) for k in range(args.dlrm_tasks)]
    runs += [
        Run("production", PLAN, *case, seed)
        for case in _sizes(args.plan_cases)
        for seed in range(args.plan_seeds)
    ]
    runs += [Run("dlrm", PLAN, 0, DLRM_RANKS, k) for k in range(args.plan_dlrm_tasks)]
    # The rivals may take long: what is ours comes first.
    return sorted(runs, key=lambda run: run.method not in (OURS, PLAN))


def _too_slow(run: Run, rows: list[dict[str, Any]]) -> str | None:
    """Why a rival is not tried: it did not end at this or at a smaller size."""
    for row in rows:
        if (
            row["method"] == run.method != OURS
            and row["tables"] * row["ranks"] <= run.tables * run.ranks
            and "not done in" in row.get("failed", "")
            and "not tried" not in row["failed"]
        ):
            size = f"{row['tables']}x{row['ranks']}"
            return f"not tried: {row['failed']} at {size}"
    return None


def _config(args: argparse.Namespace) -> dict[str, Any]:
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True
    ).stdout.strip()
    return {
        "command": shlex.join(["python", *sys.argv]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit,
        "machine": f"{platform.processor() or platform.machine()}, "
        f"{multiprocessing.cpu_count()} cores",
        "load_average": os.getloadavg(),
        "python": platform.python_version(),
        "versions": _versions(),
        "cost_model": args.cost_model,
        "memory_share": MEMORY_SHARE,
        "batch_per_rank": BATCH_PER_RANK,
        "clock": "CPU seconds" if args.cpu_clock else "wall clock",
        "time_limit": args.time_limit,
        "rival_limit": args.rival_limit,
        "note": args.note,
    }


def main() -> int:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cases", default=CASES, help="tables x ranks, by commas")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--seeds", type=int, default=3, help="tasks per case")
    parser.add_argument("--dlrm-tasks", type=int, default=12, help="tasks for the gap")
    parser.add_argument("--plan-cases", default=PLAN_CASES, help="of planner.plan()")
    parser.add_argument("--plan-seeds", type=int, default=1, help="tasks per case")
    parser.add_argument("--plan-dlrm-tasks", type=int, default=0, help="of plan(), too")
    parser.add_argument("--before", type=Path, help="JSON of a call to compare with")
    parser.add_argument("--cost-model", default="cpu_epyc", help="or analytic")
    parser.add_argument("--time-limit", type=float, default=600.0, help="s, of ours")
    parser.add_argument("--rival-limit", type=float, default=600.0, help="s, a run")
    parser.add_argument("--cpu-clock", action="store_true", help="of all seconds")
    parser.add_argument("--resume", action="store_true", help="keep what <out> has")
    parser.add_argument("--note", default="", help="said in the report")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    unknown = sorted(set(args.methods.split(",")) - set(METHODS))
    if unknown:
        parser.error(f"unknown methods {unknown}; choose from {', '.join(METHODS)}")
    config, rows = _config(args), list[dict[str, Any]]()
    if args.resume and args.out and args.out.with_suffix(".json").exists():
        rows = json.loads(args.out.with_suffix(".json").read_text())["rows"]
    before = json.loads(args.before.read_text()) if args.before else {}
    print(json.dumps(config, indent=1), flush=True)
    names = [field.name for field in dataclasses.fields(Run)]
    known = {tuple(row[name] for name in names) for row in rows}
    for run in _planned(args):
        if dataclasses.astuple(run) in known:
            continue
        slow = _too_slow(run, rows)
        mine = run.method in (OURS, PLAN)
        limit = args.time_limit if mine else args.rival_limit
        row = (
            {**dataclasses.asdict(run), "failed": slow}
            if slow
            else execute(run, args.cost_model, limit, args.cpu_clock)
        )
        rows.append(row)
        shown = {k: v for k, v in row.items() if k != "progress"}
        print(json.dumps(shown), flush=True)
        if args.out is not None:
            write(args.out, config, rows, before)
    plain = [r for r in rows if r["kind"] == "production" and r["method"] != PLAN]
    print(table(plain), speed_table(plain), sep="\n\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
