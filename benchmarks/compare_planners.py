"""Run every planner's plan for real, rank after rank, on fused kernels.

For each task (tables, ranks, batch) every planner makes a plan; each rank's shards are
then built as the fused kernels that TorchRec would run there and timed, forward and
backward apart, planners interleaved within a rank and over rounds. Collectives are not
run: one process has nobody to talk to.

    python benchmarks/compare_planners.py --device cpu --tables real_tables.json \
        --out benchmarks/results/planners_cpu_202611

writes `<out>.json` (raw) and `<out>.md`. Without --tables the DLRM-dataset tasks come
from the package's generator.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import gc
import json
import platform
import shlex
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints, PlannerError

from torchrec_neuroshard.access import AccessDistribution
from torchrec_neuroshard.baselines.heuristics import GREEDY_KEYS, GreedySearcher
from torchrec_neuroshard.collect.compute import device_fingerprint
from torchrec_neuroshard.collect.timing import SetTimer
from torchrec_neuroshard.cost_models import BandwidthCommsModel, load_cost_model
from torchrec_neuroshard.errors import NeuroShardError
from torchrec_neuroshard.placement import ShardingTask
from torchrec_neuroshard.planner import NeuroShardPlanner, placement_from_plan
from torchrec_neuroshard.simulator import Simulator
from torchrec_neuroshard.tables import TableConfig
from torchrec_neuroshard.workloads import (
    PRODUCTION_WIDTHS,
    generate_dlrm_tables,
    load_json,
    mlperf_dlrm_v2,
    power_of_two_widths,
)

OURS, STOCK_BEST, STOCK_ALL = "neuroshard", "stock, pooling + min_partition=32", "stock"
GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Task:
    """One comparison."""

    name: str
    tables: tuple[TableConfig, ...]
    world_size: int
    batch_size: int
    memory_gib: float

    def sharding_task(self) -> ShardingTask:
        memory = (int(self.memory_gib * GIB),) * self.world_size
        return ShardingTask(
            tables=self.tables,
            world_size=self.world_size,
            batch_size=self.batch_size,
            memory_bytes=memory,
        )


@dataclass(frozen=True)
class KernelSet:
    """Shards of one fused kernel on one rank."""

    shards: tuple[TableConfig, ...]
    batch_size: int


@dataclass
class Plan:
    """What a planner gave: its kernels on each rank, or why there is none."""

    seconds: float
    ranks: list[list[KernelSet]] = dataclasses.field(default_factory=list)
    infeasible: str = ""
    predicted: dict[str, Any] | None = None
    notes: dict[str, Any] = dataclasses.field(default_factory=dict)


def make_tasks(path: Path | None, batch_size: int, seed: int) -> list[Task]:
    """The DLRM dataset at 4 and 8 ranks, MLPerf at 8, production widths."""
    if path is None:
        base = generate_dlrm_tables(seed=seed)
    else:
        base = load_json(path)["dlrm_datasets_2021_t856_bs65536"]
    base = tuple(t for t in base if t.pooling_factor > 0)
    rng = np.random.default_rng(seed)
    plan: list[tuple[str, int, int, Sequence[int], str]] = []
    seed_widths = power_of_two_widths(128)  # as in the seed papers' tasks
    for world_size, count in ((4, 32), (8, 64)):
        for number in range(4):
            optimizer = ("rowwise_adagrad", "sgd")[number % 2]
            plan.append(("dlrm", world_size, count, seed_widths, optimizer))
    for number in range(4):
        optimizer = ("rowwise_adagrad", "sgd")[number % 2]
        world_size = (4, 8)[number // 2]
        count = 10 * world_size
        plan.append(("production", world_size, count, PRODUCTION_WIDTHS, optimizer))
    tasks = []
    for number, (family, world_size, count, widths, optimizer) in enumerate(plan):
        chosen = [base[i] for i in rng.choice(len(base), count, replace=False)]
        tables = tuple(
            dataclasses.replace(
                t,
                name=f"t{i}_{t.name.rsplit('/', 1)[-1]}",
                num_embeddings=min(t.num_embeddings, 3_000_000),
                embedding_dim=int(rng.choice(widths)),
                optimizer=optimizer,
            )
            for i, t in enumerate(chosen)
        )
        tasks.append(
            _task(
                f"{family}-{count}x{world_size}-{number}",
                tables,
                world_size,
                batch_size,
            )
        )
    for optimizer in ("rowwise_adagrad", "sgd"):
        tables = tuple(
            dataclasses.replace(t, optimizer=optimizer)
            for t in mlperf_dlrm_v2(max_rows=1_000_000)
        )
        tasks.append(_task(f"mlperf-26x8-{optimizer}", tables, 8, batch_size))
    return tasks


def _task(
    name: str, tables: tuple[TableConfig, ...], world_size: int, batch_size: int
) -> Task:
    total = sum(t.weight_bytes for t in tables) / GIB
    largest = max(t.weight_bytes for t in tables) / GIB
    memory = max(1.6 * total / world_size, 1.1 * largest) + 1.0
    return Task(
        name=name,
        tables=tables,
        world_size=world_size,
        batch_size=batch_size,
        memory_gib=memory,
    )


def _sharder(task: Task) -> EmbeddingBagCollectionSharder:
    from fbgemm_gpu.split_embedding_configs import EmbOptimType

    optimizer = {
        "sgd": EmbOptimType.EXACT_SGD,
        "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    }[task.tables[0].optimizer]
    return EmbeddingBagCollectionSharder(fused_params={"optimizer": optimizer})


def _module(task: Task) -> EmbeddingBagCollection:
    return EmbeddingBagCollection(
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


def _topology(task: Task) -> Topology:
    return Topology(
        world_size=task.world_size,
        compute_device="cpu",
        ddr_cap=int(task.memory_gib * GIB),
    )


def _constraints(task: Task, best_practice: bool) -> dict[str, ParameterConstraints]:
    return {
        t.name: ParameterConstraints(
            pooling_factors=[t.pooling_factor],
            **(
                {"min_partition": 32, "sharding_types": ["table_wise", "column_wise"]}
                if best_practice
                else {}
            ),
        )
        for t in task.tables
    }


def plan_with_torchrec(task: Task, make: Callable[[], Any]) -> Plan:
    """Plan through TorchRec's own interface and read the plan back."""
    planner = make()
    start = time.perf_counter()
    try:
        sharding_plan = planner.plan(_module(task), [_sharder(task)])
    except PlannerError as error:
        return Plan(time.perf_counter() - start, infeasible=str(error)[:300])
    plan = Plan(time.perf_counter() - start)
    names = [t.name for t in task.tables]
    read = placement_from_plan(sharding_plan, task.world_size)
    by_name = {t.name: t for t in task.tables}
    kinds = {
        name: sharding.sharding_type
        for tables in sharding_plan.plan.values()
        for name, sharding in tables.items()
    }
    groups: list[dict[str, list[TableConfig]]] = [{} for _ in range(task.world_size)]
    for shard in read.placement.shards:
        name = read.table_names[shard.table].rsplit(".", 1)[-1]
        table = by_name[name].with_width(shard.width)
        groups[shard.rank].setdefault(kinds[name], []).append(table)
    replicas = []
    for name, kind in read.not_described.items():
        if kind != "data_parallel":
            return Plan(plan.seconds, infeasible=f"cannot run {kind} rank after rank")
        replicas.append(by_name[name.rsplit(".", 1)[-1]])
    plan.ranks = [
        [KernelSet(tuple(tables), task.batch_size) for tables in by_kind.values()]
        for by_kind in groups
    ]
    if replicas:
        local = task.batch_size // task.world_size
        for rank in plan.ranks:
            rank.append(KernelSet(tuple(replicas), local))
    plan.notes["num_shards"] = len(read.placement.shards)
    plan.notes["data_parallel_tables"] = len(replicas)
    assert len(read.table_names) + len(replicas) == len(names)
    result = getattr(planner, "last_result", None)
    if result is not None:
        plan.predicted = result.predicted.to_json()
        plan.notes["lower_bound_ms"] = result.lower_bound_ms
        plan.notes["search_seconds"] = result.search_seconds
        plan.notes["fallback"] = result.fallback
    return plan


def plan_with_greedy(task: Task, key: str, cost_model: Any) -> Plan:
    """Plan with one of the seed papers' greedies, tables whole."""
    sharding_task = task.sharding_task()
    comms = _comms(task)
    start = time.perf_counter()
    try:
        result = GreedySearcher(key).search(sharding_task, cost_model, comms)
    except NeuroShardError as error:
        return Plan(time.perf_counter() - start, infeasible=str(error)[:300])
    plan = Plan(time.perf_counter() - start)
    shards: list[list[TableConfig]] = [[] for _ in range(task.world_size)]
    for shard in result.placement.shards:
        table = task.tables[shard.table]
        shards[shard.rank].append(table.with_width(shard.width))
    plan.ranks = [
        [KernelSet(tuple(tables), task.batch_size)] if tables else []
        for tables in shards
    ]
    plan.predicted = (
        Simulator(sharding_task, cost_model, comms).evaluate(result.placement).to_json()
    )
    return plan


def _comms(task: Task) -> BandwidthCommsModel:
    return BandwidthCommsModel(
        world_size=task.world_size,
        local_world_size=task.world_size,
        intra_gb_per_s=600.0,
        inter_gb_per_s=12.5,
    )


def make_plans(task: Task, cost_model_name: str) -> dict[str, Plan]:
    """Every planner's plan for a task."""
    profiles = {t.name: t.profile for t in task.tables if t.profile is not None}
    cost_model = load_cost_model(cost_model_name)
    local = task.batch_size // task.world_size

    def stock(best_practice: bool) -> Callable[[], Any]:
        return lambda: EmbeddingShardingPlanner(
            topology=_topology(task),
            batch_size=local,
            constraints=_constraints(task, best_practice),
        )

    def ours() -> Any:
        return NeuroShardPlanner(
            topology=_topology(task),
            batch_size=local,
            constraints=_constraints(task, False),
            cost_model=cost_model,
            profiles=profiles,
        )

    plans = {
        OURS: plan_with_torchrec(task, ours),
        STOCK_BEST: plan_with_torchrec(task, stock(True)),
        STOCK_ALL: plan_with_torchrec(task, stock(False)),
    }
    for key in GREEDY_KEYS:
        plans[f"greedy {key}"] = plan_with_greedy(task, key, cost_model)
    return plans


class Measurer:
    """Times kernel sets; the same set is timed once per round and planner."""

    def __init__(self, device: torch.device, arena_bytes: int, reference_ms: float):
        self.timer = SetTimer(
            device,
            arena_bytes,
            reference_ms=reference_ms or None,
            budget_seconds=0.3,
            min_passes=3,
            max_passes=9,
        )

    def measure(
        self, kernel_set: KernelSet, seed: int
    ) -> tuple[list[float], list[float]]:
        """Forward and backward of each pass, relative to the reference [ms]."""
        batch_size = kernel_set.batch_size
        tables, access = [], []
        for i, table in enumerate(kernel_set.shards):
            profile = table.profile_at(batch_size)
            assert table.profile is not None
            tables.append(dataclasses.replace(table, name=str(i), profile=profile))
            access.append(
                AccessDistribution.from_profile(table.profile, table.num_embeddings)
            )
        result = self.timer.measure(tables, access, batch_size, (seed,))
        references = result.ref_raw_ms or (1.0,) * len(result.fwd_raw_ms)
        unit = self.timer.reference_ms or 1.0
        return (
            [f / r * unit for f, r in zip(result.fwd_raw_ms, references, strict=True)],
            [b / r * unit for b, r in zip(result.bwd_raw_ms, references, strict=True)],
        )


def measure_task(
    plans: dict[str, Plan], measurer: Measurer, rounds: int, world_size: int
) -> dict[str, list[dict[str, float]]]:
    """Measured forward and backward of every rank of every feasible plan."""
    passes: dict[tuple[str, int, int], tuple[list[float], list[float]]] = {}
    for number in range(rounds):
        for rank in range(world_size):
            for name, plan in plans.items():
                if plan.infeasible:
                    continue
                for k, kernel_set in enumerate(plan.ranks[rank]):
                    seed = 1_000 * number + rank
                    fwd, bwd = measurer.measure(kernel_set, seed)
                    kept = passes.setdefault((name, rank, k), ([], []))
                    kept[0].extend(fwd)
                    kept[1].extend(bwd)
        gc.collect()
    measured = {}
    for name, plan in plans.items():
        if plan.infeasible:
            continue
        ranks = []
        for rank in range(world_size):
            sets = [passes[(name, rank, k)] for k in range(len(plan.ranks[rank]))]
            ranks.append(
                {
                    "fwd_ms": sum(statistics.median(f) for f, _ in sets),
                    "bwd_ms": sum(statistics.median(b) for _, b in sets),
                    "num_passes": sum(len(f) for f, _ in sets),
                }
            )
        measured[name] = ranks
    return measured


def summarise(ranks: Sequence[dict[str, float]]) -> dict[str, float]:
    """Worst rank, imbalance and critical path of measured ranks."""
    totals = [r["fwd_ms"] + r["bwd_ms"] for r in ranks]
    return {
        "worst_rank_ms": max(totals),
        "worst_over_mean": max(totals) / statistics.mean(totals),
        "critical_path_ms": max(r["fwd_ms"] for r in ranks)
        + max(r["bwd_ms"] for r in ranks),
        "mean_rank_ms": statistics.mean(totals),
    }


def geometric_mean(values: Sequence[float]) -> float:
    return float(np.exp(np.mean(np.log(values)))) if values else float("nan")


def bootstrap(values: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """95 % interval of the geometric mean over tasks."""
    rng = np.random.default_rng(seed)
    logs = np.log(values)
    means = [rng.choice(logs, len(logs)).mean() for _ in range(2_000)]
    low, high = np.exp(np.quantile(means, [0.025, 0.975]))
    return float(low), float(high)


def report(data: dict[str, Any]) -> str:
    """The Markdown table of a run."""
    tasks = data["tasks"]
    planners = list(tasks[0]["planners"])
    lines = [
        f"# Planners compared on real kernels: {data['hardware']['device']}",
        "",
        f"{data['hardware']}; commit {data['commit']}; {data['created']}",
        "",
        f"    {data['command']}",
        "",
        "Milliseconds of the worst rank (forward + backward of its fused kernels, "
        "medians, relative to a reference set timed beside each pass). `bound` is the "
        "mean over ranks of the tables left whole. Collectives are not run.",
        "",
        "| task | " + " | ".join(planners) + " | bound |",
        "| --- |" + " ---: |" * (len(planners) + 1),
    ]
    for task in tasks:
        cells = [
            f"{entry['summary']['worst_rank_ms']:.2f}"
            if "summary" in entry
            else "infeasible"
            for entry in task["planners"].values()
        ]
        lines.append(
            f"| {task['name']} | " + " | ".join(cells) + f" | {task['bound_ms']:.2f} |"
        )
    lines += ["", *_ratio_lines(tasks, planners), ""]
    for key, title in (
        ("worst_over_mean", "Worst rank over mean"),
        ("critical_path_ms", "Critical path: slowest forward + slowest backward [ms]"),
    ):
        lines += [
            f"## {title}",
            "",
            "| task | " + " | ".join(planners) + " |",
            "| --- |" + " ---: |" * len(planners),
        ]
        for task in tasks:
            cells = [
                f"{entry['summary'][key]:.3g}" if "summary" in entry else "infeasible"
                for entry in task["planners"].values()
            ]
            lines.append(f"| {task['name']} | " + " | ".join(cells) + " |")
        lines.append("")
    lines += [
        "## Planning seconds, and what ours predicted",
        "",
        "| task | " + " | ".join(planners) + " | ours predicted worst / measured |",
        "| --- |" + " ---: |" * (len(planners) + 1),
    ]
    for task in tasks:
        cells = [f"{e['plan_seconds']:.2f}" for e in task["planners"].values()]
        ours = task["planners"][OURS]
        ratio = "-"
        if ours.get("predicted") and "summary" in ours:
            predicted = max(
                r["fwd_compute"] + r["bwd_compute"] for r in ours["predicted"]["ranks"]
            )
            ratio = f"{predicted / ours['summary']['worst_rank_ms']:.3f}"
        lines.append(f"| {task['name']} | " + " | ".join(cells) + f" | {ratio} |")
    return "\n".join(lines) + "\n"


def _ratio_lines(tasks: Sequence[dict[str, Any]], planners: Sequence[str]) -> list[str]:
    def worst(task: dict[str, Any], name: str) -> float | None:
        entry = task["planners"][name]
        return entry["summary"]["worst_rank_ms"] if "summary" in entry else None

    lines = [
        "| ours against | tasks | geometric mean ratio | 95 % interval | worst task |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]

    def row(title: str, ratios: Sequence[float]) -> None:
        if ratios:
            low, high = bootstrap(ratios)
            lines.append(
                f"| {title} | {len(ratios)} | {geometric_mean(ratios):.3f} | "
                f"{low:.3f} to {high:.3f} | {max(ratios):.3f} |"
            )

    def against(others: Sequence[str]) -> list[float]:
        ratios = []
        for task in tasks:
            ours = worst(task, OURS)
            known = [w for n in others if (w := worst(task, n)) is not None]
            if ours is not None and known:
                ratios.append(ours / min(known))
        return ratios

    for name in planners:
        if name != OURS:
            row(name, against([name]))
    row("better stock variant of each task", against([STOCK_BEST, STOCK_ALL]))
    row(
        "bound",
        [w / t["bound_ms"] for t in tasks if (w := worst(t, OURS)) is not None],
    )
    return lines


def _commit() -> str:
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    )
    return found.stdout.strip() or "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--cost-model", default="cpu")
    parser.add_argument("--tables", type=Path, help="JSON with the DLRM dataset")
    parser.add_argument("--batch-size", type=int, default=2_048, help="over all ranks")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num-tasks", type=int, help="only the first tasks")
    parser.add_argument("--out", type=Path, required=True, help="path without suffix")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    device = torch.device(args.device)
    tasks = make_tasks(args.tables, args.batch_size, args.seed)[: args.num_tasks]
    all_plans = []
    for task in tasks:
        plans = make_plans(task, args.cost_model)
        all_plans.append(plans)
        seconds = ", ".join(f"{n} {p.seconds:.1f}" for n, p in plans.items())
        print(f"planned {task.name}: {seconds} s", flush=True)
    largest = max(
        sum(s.weight_bytes for s in kernel_set.shards)
        for plans in all_plans
        for plan in plans.values()
        for rank in plan.ranks
        for kernel_set in rank
    )
    model = load_cost_model(args.cost_model)
    measurer = Measurer(device, largest, getattr(model, "reference_ms", 0.0))
    data: dict[str, Any] = {
        "command": " ".join(map(shlex.quote, ["python", *sys.argv])),
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "hardware": dataclasses.asdict(device_fingerprint(device, 1)),
        "python": platform.python_version(),
        "options": {k: str(v) for k, v in vars(args).items()},
        "tasks": [],
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    for task, plans in zip(tasks, all_plans, strict=True):
        measured = measure_task(plans, measurer, args.rounds, task.world_size)
        entry: dict[str, Any] = {
            "name": task.name,
            "num_tables": len(task.tables),
            "world_size": task.world_size,
            "batch_size": task.batch_size,
            "optimizer": task.tables[0].optimizer,
            "planners": {},
        }
        for name, plan in plans.items():
            entry["planners"][name] = {
                "plan_seconds": plan.seconds,
                "infeasible": plan.infeasible,
                "predicted": plan.predicted,
                **plan.notes,
            }
            if name in measured:
                entry["planners"][name]["ranks"] = measured[name]
                entry["planners"][name]["summary"] = summarise(measured[name])
        whole = [
            entry["planners"][f"greedy {key}"]["summary"]["mean_rank_ms"]
            for key in GREEDY_KEYS
            if f"greedy {key}" in measured
        ]
        entry["bound_ms"] = min(whole) if whole else float("nan")
        data["tasks"].append(entry)
        args.out.with_suffix(".json").write_text(json.dumps(data, indent=1) + "\n")
        args.out.with_suffix(".md").write_text(report(data))
        shown = {
            n: round(summarise(r)["worst_rank_ms"], 2) for n, r in measured.items()
        }
        print(f"{task.name}: bound {entry['bound_ms']:.2f}, {shown}", flush=True)
    print(report(data))


if __name__ == "__main__":
    main()
