"""Time the searches and compare their plans, all rated by one cost model.

For each case (tables x ranks; rows and accesses from the DLRM-dataset generator, widths
met in production) every method plans the same task in a process of its own: ours, stock
TorchRec with its default and with its dynamic-programming proposer, and the NeuroShard
paper's loops on the same costs (`baselines/neuroshard.py`). Plans are rated by the same
simulator; a method that runs past the limit, fails or finds no plan stays in the table.

    python benchmarks/bench_search.py --cases 50x4,100x8 --time-limit 600 \
        --cost-model cpu --out benchmarks/results/search_cpu_202611

writes `<out>.json` (raw), `<out>.md` and `<out>.svg`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import multiprocessing
import platform
import resource
import shlex
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from torchrec_neuroshard.baselines.neuroshard import NeuroShardConfig, PaperSearcher
from torchrec_neuroshard.cost_models import BandwidthCommsModel, load_cost_model
from torchrec_neuroshard.cost_models.base import CommsModel, CostModel
from torchrec_neuroshard.placement import Placement, ShardingTask
from torchrec_neuroshard.search import NeuroShardSearcher, SearchConfig
from torchrec_neuroshard.simulator import Simulator
from torchrec_neuroshard.tables import TableConfig
from torchrec_neuroshard.testing import AnalyticCostModel
from torchrec_neuroshard.workloads import PRODUCTION_WIDTHS, generate_dlrm_tables

CASES = "50x4,100x8,200x8,1000x64,2000x128,10000x512"
OURS, STOCK, STOCK_DP, PAPER = "ours", "stock", "stock-dp", "neuroshard-paper"
MEMORY_SHARE = 1.5
"""Memory of all ranks over the bytes of all weights."""
BATCH_PER_RANK = 512
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


# Methods: task, models, seed -> placement and what else is known.

Method = Callable[
    [ShardingTask, CostModel, CommsModel, int], tuple[Placement, dict[str, Any]]
]


def plan_ours(
    task: ShardingTask, compute: CostModel, comms: CommsModel, seed: int
) -> tuple[Placement, dict[str, Any]]:
    config = SearchConfig(seed=seed, time_budget_seconds=120.0)
    result = NeuroShardSearcher(config).search(task, compute, comms)
    return result.placement, {
        "lower_bound_ms": result.lower_bound_ms,
        "gap": result.gap,
        "num_evaluated": result.num_evaluated,
    }


def plan_stock(task: ShardingTask, dynamic: bool) -> tuple[Placement, dict[str, Any]]:
    """Plan with TorchRec's best practice: pooling factors, splits down to 32."""
    import torch
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
    from torchrec.distributed.planner.proposers import DynamicProgrammingProposer
    from torchrec.distributed.planner.storage_reservations import (
        FixedPercentageStorageReservation,
    )
    from torchrec.distributed.planner.types import ParameterConstraints

    from torchrec_neuroshard.planner import placement_from_plan

    module = EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=t.name,
                num_embeddings=t.num_embeddings,
                embedding_dim=t.embedding_dim,
                feature_names=[t.name],
            )
            for t in task.tables
        ],
        device=torch.device("meta"),
    )
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
    plan = planner.plan(module, [EmbeddingBagCollectionSharder()])  # type: ignore[list-item]
    read = placement_from_plan(
        plan, task.world_size, table_names=[t.name for t in task.tables]
    )
    return read.placement, {"not_described": len(read.not_described)}


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


def _work(
    pipe: Connection, method: str, case: tuple[int, int], seed: int, model: str
) -> None:
    try:
        task = make_task(*case, seed)
        compute, comms = make_models(model, task)
        # One small prediction and one plan outside the clock: imports and caches.
        plan_ours(make_task(8, 2, seed), *make_models(model, make_task(8, 2, 0)), 0)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        start = time.perf_counter()
        cpu = time.process_time()
        placement, known = METHODS[method](task, compute, comms, seed)
        seconds = time.perf_counter() - start
        cpu = time.process_time() - cpu
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        predicted = Simulator(task, compute, comms).evaluate(placement)
        columns = sum(t.embedding_dim for t in task.tables)
        assert sum(s.width for s in placement.shards) == columns
        used = placement.rank_bytes(task)
        pipe.send(
            {
                "seconds": seconds,
                "cpu_seconds": cpu,
                "peak_mib": peak / 1024,
                "base_mib": before / 1024,
                "critical_path_ms": predicted.critical_path_ms,
                "num_shards": len(placement.shards),
                "largest_rank_share_of_memory": max(used) / task.memory_bytes[0],
                **known,
            }
        )
    except Exception as error:  # a method's failure is a result
        last = traceback.format_exc().strip().splitlines()[-1]
        pipe.send({"failed": f"{type(error).__name__}: {last}"[:300]})


def run_case(
    method: str, case: tuple[int, int], seed: int, model: str, limit: float
) -> dict[str, Any]:
    """Run one method on one task; a run past the limit is ended."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(theirs, method, case, seed, model))
    process.start()
    theirs.close()
    row: dict[str, Any] = {
        "method": method,
        "tables": case[0],
        "ranks": case[1],
        "seed": seed,
    }
    try:
        # Making the task and loading the model is not planning: some slack for it.
        if ours.poll(limit + 60):
            row |= ours.recv()
        else:
            row["failed"] = f"not done after {limit:g} s"
    except EOFError:
        row["failed"] = "the process died"
    finally:
        process.kill()
        process.join()
    if row.get("seconds", 0.0) > limit:
        row["failed"] = f"took {row['seconds']:.0f} s, limit {limit:g} s"
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cases", default=CASES, help="tables x ranks, by commas")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--seeds", type=int, default=3, help="tasks per case")
    parser.add_argument("--cost-model", default="analytic", help="or as in the planner")
    parser.add_argument("--time-limit", type=float, default=600.0, help="seconds a run")
    parser.add_argument("--note", default="", help="said in the report")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    cases = [(int(a), int(b)) for a, b in (c.split("x") for c in args.cases.split(","))]
    methods = args.methods.split(",")
    unknown = sorted(set(methods) - set(METHODS))
    if unknown:
        parser.error(f"unknown methods {unknown}; choose from {', '.join(METHODS)}")
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True
    ).stdout.strip()
    config = {
        "command": shlex.join(["python", *sys.argv]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit,
        "machine": f"{platform.processor() or platform.machine()}, "
        f"{multiprocessing.cpu_count()} cores",
        "python": platform.python_version(),
        "versions": _versions(),
        "memory_share": MEMORY_SHARE,
        "batch_per_rank": BATCH_PER_RANK,
        "note": args.note,
    }
    print(json.dumps(config, indent=1), flush=True)
    rows = []
    for case in cases:
        given_up: set[str] = set()
        for seed in range(args.seeds):
            for method in methods:
                if method in given_up:
                    continue
                row = run_case(method, case, seed, args.cost_model, args.time_limit)
                rows.append(row)
                print(json.dumps(row), flush=True)
                # What did not end for one task of a size is not tried on the others.
                if "not done after" in row.get("failed", ""):
                    given_up.add(method)
    text = table(rows)
    print(text)
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        raw = {"config": config, "rows": rows}
        args.out.with_suffix(".json").write_text(json.dumps(raw, indent=1) + "\n")
        plot(rows, args.out.with_suffix(".svg"))
        args.out.with_suffix(".md").write_text(
            "# Planning time and predicted cost of the searches\n\n"
            f"{args.note}\n\n"
            f"Plans rated by the cost model `{args.cost_model}`; median (range) over "
            f"{args.seeds} tasks a size; each run in a process of its own.\n\n"
            f"{text}\n\n"
            f"![planning time]({args.out.with_suffix('.svg').name})\n\n"
            f"```json\n{json.dumps(config, indent=1)}\n```\n"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
