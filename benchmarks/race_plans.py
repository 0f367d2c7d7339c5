"""Train TorchRec's plan and ours in turn, and compare predicted with measured times.

    torchrun --standalone --nproc-per-node 2 benchmarks/race_plans.py
    torchrun --nproc-per-node 8 benchmarks/race_plans.py --max-rows 40000000 \\
        --batch-size 8192                                    # eight GPUs, NCCL

The tables are those of MLPerf DLRM-v2, with at most --max-rows rows each and all ids
per sample. Both planners get the same topology, memory, batch size, pooling factors,
sharding types and narrowest shard. Both plans are trained from the same weights on the
same batches. The order changes from round to round (A B, B A, ...), so a machine whose
speed drifts is fair to both. README.md explains the measurements.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torchrec.distributed.types import ShardingPlan

from harness.models import NUM_BATCHES, draw_batches, profile_tables
from harness.options import RunError, option
from harness.planning import BEST_PRACTICE, OURS, PlanningDesk
from harness.provenance import describe_run
from harness.ranks import (
    Ranks,
    SpeedReference,
    machine_speeds,
    run_on_ranks,
    scaled_median,
)
from harness.training_runs import TrialConfig, train_in_turn
from torchrec_neuroshard import TableConfig, load_cost_model
from torchrec_neuroshard.costs.simulator import PHASES
from torchrec_neuroshard.models.base import CommsModel
from torchrec_neuroshard.models.collectives import BandwidthCommsModel
from torchrec_neuroshard.tables.mlperf import mlperf_dlrm_v2

SCHEMA_VERSION = 2
RACERS = (BEST_PRACTICE, OURS)
WARM_UP = 2
MAX_WARNINGS = 3
"""Number of warnings to print. The results hold all."""
BACKENDS = {"auto": "auto", "cpu": "gloo", "cuda": "nccl"}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RaceConfig:
    """Options of the race: each field is an option with the same name."""

    device: str = option("auto", "cpu, cuda, or auto: cuda if every rank has a GPU")
    cost_model: str = option("auto", "auto, a bundle's name, or its folder")
    max_rows: int = option(100_000, "most rows of a table; published: 40 M")
    embedding_dim: int = option(128, "columns of every table; published: 128")
    batch_size: int = option(1_024, "samples per rank")
    min_partition: int = option(32, "narrowest column shard, for both planners")
    pairs: int = option(8, "rounds; each trains both plans")
    block_iterations: int = option(8, "timed iterations per plan and round")
    learning_rate: float = option(0.05, "learning rate of tables and dense layers")
    all_to_all_gb_per_s: float = option(
        0.0, "bandwidth to plan with; 0: use measured collectives, or measure it"
    )
    seed: int = option(0, "seed of weights, ids and clicks")
    output: str = option("demo.json", "file for the results")

    def __post_init__(self) -> None:
        if self.device not in BACKENDS:
            raise RunError(f"--device must be auto, cpu or cuda, got '{self.device}'")
        for name in ("max_rows", "batch_size", "pairs", "block_iterations"):
            if getattr(self, name) < 1:
                raise RunError(
                    f"--{name.replace('_', '-')} must be at least 1, got "
                    f"{getattr(self, name)}"
                )


def median_step_ms(step: Callable[[], object], ranks: Ranks) -> float:
    """Return the median time of a step of all ranks, on the slowest rank [ms]."""
    times = []
    for _ in range(9):
        dist.barrier(group=ranks.control)
        ranks.synchronize()
        start = time.perf_counter()
        step()
        ranks.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    return float(max(ranks.gather(statistics.median(times[2:]))))


def measure_all_to_all(
    tables: Sequence[TableConfig], batch_size: int, ranks: Ranks
) -> float:
    """Return the slowest rank's bandwidth in the pooled outputs' all-to-all [GB/s].

    Bytes that stay on a rank do not count, unless there is only one rank.
    """
    part = batch_size * sum(t.embedding_dim for t in tables) // ranks.world_size
    sent = torch.zeros(part * ranks.world_size, device=ranks.device)
    received = torch.empty_like(sent)
    once_ms = median_step_ms(lambda: dist.all_to_all_single(received, sent), ranks)
    return 4 * part * max(1, ranks.world_size - 1) / once_ms / 1e6


def measure_memory(ranks: Ranks) -> float:
    """Return the slowest rank's memory bandwidth in a large copy [GB/s]."""
    source = torch.zeros(2**28, device=ranks.device)
    target = torch.empty_like(source)
    once_ms = median_step_ms(lambda: target.copy_(source), ranks)
    return 2 * 4 * source.numel() / once_ms / 1e6


def find_comms_model(
    config: RaceConfig, ranks: Ranks, link_gb_per_s: float
) -> CommsModel:
    """Return the bundle's measured collectives, or a model of one bandwidth."""
    if not config.all_to_all_gb_per_s:
        with contextlib.suppress(RunError):
            return ranks.comms_model(config.cost_model)
    return BandwidthCommsModel(
        world_size=ranks.world_size,
        local_world_size=ranks.local_world_size,
        intra_gb_per_s=link_gb_per_s,
        inter_gb_per_s=link_gb_per_s,
        source="given" if config.all_to_all_gb_per_s else "measured at the start",
    )


def shards_of(plan: ShardingPlan) -> dict[str, dict[str, Any]]:
    """Return table name -> sharding type and shards of a plan."""
    return {
        name: {
            "sharding_type": sharding.sharding_type,
            "shards": [
                {"rank": rank, "offset": s.shard_offsets[1], "width": s.shard_sizes[1]}
                for rank, s in zip(
                    sharding.ranks, sharding.sharding_spec.shards, strict=True
                )
            ],
        }
        for module_plan in plan.plan.values()
        for name, sharding in module_plan.items()
    }


def judge(entry: dict[str, Any], speeds: Sequence[float]) -> dict[str, Any]:
    """Return medians over all rounds: wall clock, and corrected for the speed."""
    rounds = entry["rounds"]
    clock = [1.0] * len(rounds)
    judged = {}
    for what in (*PHASES, "embedding", "iteration"):

        def take(r: dict[str, Any], what: str = what) -> Sequence[float]:
            times = r["phases_ms"][what] if what in PHASES else r[f"{what}_ms"]
            return list(times)

        judged[what] = {
            "measured_ms": scaled_median(rounds, speeds, take),
            "clock_ms": scaled_median(rounds, clock, take),
        }
    return judged


def speedup(stock: dict[str, Any], ours: dict[str, Any], what: str) -> dict[str, float]:
    """Return our speed-up: median over the rounds, and its quartiles."""
    ratios = [
        statistics.median(theirs[what]) / statistics.median(mine[what])
        for theirs, mine in zip(stock["rounds"], ours["rounds"], strict=True)
    ]
    low, middle, high = np.percentile(ratios, [25, 50, 75])
    return {
        "median": float(middle),
        "low_quartile": float(low),
        "high_quartile": float(high),
        "num_pairs": len(ratios),
    }


def table_lines(results: dict[str, Any]) -> list[str]:
    """Return a table of both plans, with one line per table."""
    lines = [
        f"{'table':<10}{'rows':>11}{'ids/sample':>11}{'distinct':>10}  "
        f"{BEST_PRACTICE + ' (rank:width)':<28}{OURS} (rank:width)"
    ]
    short = {"table_wise": "TW", "column_wise": "CW"}
    for table in results["tables"]:
        cells = []
        for name in RACERS:
            placed = results["planners"][name]["shards"][table["name"]]
            shards = " ".join(f"{s['rank']}:{s['width']}" for s in placed["shards"])
            cells.append(f"{short[placed['sharding_type']]} {shards}")
        lines.append(
            f"{table['name']:<10}{table['num_embeddings']:>11,}"
            f"{table['pooling_factor']:>11.1f}{table['num_distinct']:>10,.0f}  "
            f"{cells[0]:<28}{cells[1]}"
        )
    return lines


def planner_lines(name: str, entry: dict[str, Any]) -> list[str]:
    """Return the predicted and measured times of one planner."""
    predicted, warned = entry["predicted"], entry.get("warnings", ())
    said = {**predicted["phases_ms"], "embedding": predicted["embedding_ms"]}
    lines = [
        f"{name}: planned in {entry['planning_seconds']:.1f} s",
        *(f"  warning: {text}" for text in warned[:MAX_WARNINGS]),
    ]
    if len(warned) > MAX_WARNINGS:
        lines.append(f"  ... and {len(warned) - MAX_WARNINGS} more warnings")
    if entry.get("fallback"):
        lines.append(f"  fallback: {entry['fallback']}")
    lines.append(f"  {'[ms]':<14}{'predicted':>10}{'measured':>10}{'wall clock':>14}")
    for what, times in entry["judged"].items():
        shown = f"{said[what]:>10.2f}" if what in said else f"{'':>10}"
        lines.append(
            f"  {what:<14}{shown}{times['measured_ms']:>10.2f}"
            f"{times['clock_ms']:>14.2f}"
        )
    losses = entry["rounds"][0]["losses"]
    begin, end = losses[:NUM_BATCHES], losses[-NUM_BATCHES:]
    lines.append(f"  loss {statistics.mean(begin):.4f} -> {statistics.mean(end):.4f}")
    return lines


def report(results: dict[str, Any]) -> str:
    """Return the main results as text."""
    where, config = results["hardware"], results["config"]
    model = results["cost_model"]
    lines = [
        f"MLPerf DLRM-v2, {len(results['tables'])} tables of at most "
        f"{config['max_rows']:,} rows x {config['embedding_dim']}, "
        f"{config['batch_size']:,} samples on each of {results['world_size']} ranks",
        f"{where['device']}, {results['backend']}; torch {where['torch']}, fbgemm "
        f"{where['fbgemm']}, torchrec {results['versions']['torchrec']}",
        f"cost model '{model['name']}' ({model['source']}, {model['hardware']})",
        f"all-to-all {results['all_to_all_gb_per_s']:.2f} GB/s; collectives: "
        f"{model['comms_source']}",
        "",
        *table_lines(results),
    ]
    for name in RACERS:
        lines += ["", *planner_lines(name, results["planners"][name])]
    lines.append("")
    for what, ratio in results["speedup"].items():
        lines.append(
            f"{what}: {OURS} is {ratio['median']:.3f} times as fast as {BEST_PRACTICE} "
            f"(quartiles of {ratio['num_pairs']} rounds: "
            f"{ratio['low_quartile']:.3f} to {ratio['high_quartile']:.3f})"
        )
    return "\n".join(lines)


def make_desk(
    config: RaceConfig, ranks: Ranks, tables: Sequence[TableConfig]
) -> tuple[PlanningDesk, dict[str, Any]]:
    """Return both planners, and their inputs for the results."""
    link_gb_per_s = config.all_to_all_gb_per_s or measure_all_to_all(
        tables, config.batch_size, ranks
    )
    memory_gb_per_s = measure_memory(ranks) if ranks.on_gpu else None
    topology: dict[str, Any] = {
        **ranks.topology,
        "hbm_cap" if ranks.on_gpu else "ddr_cap": ranks.free_bytes(),
        # TorchRec counts bandwidth in bytes per millisecond.
        "intra_host_bw": link_gb_per_s * 1e6,
        "inter_host_bw": link_gb_per_s * 1e6,
    }
    if memory_gb_per_s is not None:
        topology["hbm_mem_bw"] = memory_gb_per_s * 1e6
    with warnings.catch_warnings():
        if ranks.rank:  # rank 0 warns for all
            warnings.simplefilter("ignore")
        cost_model = load_cost_model(
            config.cost_model,
            device_type=ranks.device.type,
            hbm_gb_per_s=memory_gb_per_s,
        )
    comms_model = find_comms_model(config, ranks, link_gb_per_s)
    profiles = profile_tables(tables, config.batch_size, config.seed, ranks.world_size)
    desk = PlanningDesk(
        tables,
        profiles,
        topology=topology,
        batch_size=config.batch_size,
        cost_model=cost_model,
        comms_model=comms_model,
        min_partition=config.min_partition,
        same_limits=True,
    )
    return desk, {
        "cost_model": {
            "name": cost_model.name,
            "hardware": cost_model.hardware,
            "source": cost_model.source,
            "comms_source": comms_model.source,
            "compute_slowdown": list(map(float, comms_model.compute_slowdown)),
        },
        "all_to_all_gb_per_s": link_gb_per_s,
        "tables": [
            {
                "name": t.name,
                "num_embeddings": t.num_embeddings,
                "embedding_dim": t.embedding_dim,
                "pooling_factor": profiles[t.name].pooling_factor,
                "num_distinct": profiles[t.name].num_distinct,
                "profile": dataclasses.asdict(profiles[t.name]),
            }
            for t in tables
        ],
    }


def planned(desk: PlanningDesk, name: str) -> tuple[ShardingPlan, dict[str, Any]]:
    """Return a plan, and its entry in the results."""
    plan, _, entry = desk.plan(name)
    return plan, entry


def run(config: RaceConfig, ranks: Ranks) -> None:
    """Make both plans, train them in turn, write and print the results."""
    start = time.perf_counter()
    tables = mlperf_dlrm_v2(config.max_rows, config.embedding_dim)
    batches = draw_batches(
        tables, config.batch_size, config.seed, ranks.rank, ranks.device
    )
    desk, facts = make_desk(config, ranks, tables)
    plans, entries = {}, {}
    for name in RACERS:
        plans[name], entry = ranks.on_first(functools.partial(planned, desk, name))
        entries[name] = {**entry, "shards": shards_of(plans[name]), "rounds": []}

    reference = SpeedReference(ranks)
    trial = TrialConfig(
        warm_up=WARM_UP,
        iterations=config.block_iterations,
        phase_iterations=(config.block_iterations + 1) // 2,
        learning_rate=config.learning_rate,
        seed=config.seed,
    )
    taken = train_in_turn(plans, config.pairs, tables, batches, trial, ranks, reference)
    for name, found in taken:
        entries[name]["rounds"].append(found.to_json())
    slowdown = reference.slowdown(facts["cost_model"]["compute_slowdown"])
    if ranks.rank:
        return

    stock, ours = (entries[name] for name in RACERS)
    rounds = [entry["rounds"] for entry in entries.values()]
    speeds = machine_speeds(rounds, desk.nominal_reference_ms * slowdown)
    for entry in entries.values():
        entry["judged"] = judge(entry, speeds)
    results = {
        "schema_version": SCHEMA_VERSION,
        **describe_run(ranks.device, "torchrun"),
        "config": dataclasses.asdict(config),
        "backend": ranks.backend,
        "world_size": ranks.world_size,
        **facts,
        "nominal_reference_ms": desk.nominal_reference_ms,
        "reference_slowdown": slowdown,
        "machine_speeds": speeds,
        "planners": entries,
        "speedup": {
            "iteration": speedup(stock, ours, "iteration_ms"),
            "embedding": speedup(stock, ours, "embedding_ms"),
        },
        "seconds": time.perf_counter() - start,
    }
    Path(config.output).write_text(json.dumps(results, indent=1) + "\n", "utf-8")
    print(report(results))
    print(f"\nwrote {config.output} after {results['seconds']:.0f} s")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the race and return the exit code."""
    # Hide notices of torch about its internals.
    logging.getLogger("torch.fx").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch")

    def start(config: RaceConfig) -> Ranks:
        return Ranks(BACKENDS[config.device])

    return run_on_ranks(RaceConfig, arguments, __doc__ or "", start, run)


if __name__ == "__main__":
    sys.exit(main())
