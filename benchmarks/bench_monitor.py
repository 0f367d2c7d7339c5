"""What watching a job costs, and whether moves save what the monitor says.

    torchrun --standalone --nproc-per-node 2 benchmarks/bench_monitor.py overhead \\
        --out benchmarks/results/monitor_overhead
    PYTHONHASHSEED=0 torchrun --standalone --nproc-per-node 2 \\
        benchmarks/bench_monitor.py drift \\
        --out benchmarks/results/monitor_drift
    PYTHONHASHSEED=0 torchrun --standalone --nproc-per-node 2 \\
        benchmarks/bench_monitor.py moves \\
        --out benchmarks/results/monitor_moves
    PYTHONHASHSEED=0 torchrun --standalone --nproc-per-node 2 \\
        benchmarks/bench_monitor.py phases \\
        --out benchmarks/results/monitor_phases

Two copies of one model are trained on the same batches, one iteration each in turn; the
second is watched by a `PlanMonitor`. What other work on the machine takes then falls on
both alike, and the difference of each pair is what is told.

`overhead`: differences of time and of CPU time, the monitor's own work and its hooks
included. `drift`: from one iteration on, the tables of rank 0 are read more often, the
others less. The monitor says so and re-plans; the pairs' differences before and after
tell what the moves saved: of all pairs, and of the third in which the machine was
quietest by what both copies took together. `moves`: what moving takes beside what is
predicted, for tables of many sizes, the first time and the second. `phases`: one copy
has the plan that `drift` begins with, the other what it moves to, and every phase of
both is timed: where savings of kernels are lost again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import shlex
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
from torch import nn
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import ParameterConstraints, Topology

from harness.models import ClickBatch, ConcatDLRM, draw_clicks, fill_tables
from harness.provenance import commit, now
from harness.ranks import Ranks
from torchrec_neuroshard import NeuroShardPlanner, PlanMonitor, TableConfig
from torchrec_neuroshard.collect.fingerprint import device_fingerprint
from torchrec_neuroshard.monitor import MonitorReport
from torchrec_neuroshard.monitor.exchange import Exchange
from torchrec_neuroshard.monitor.move_times import MoveRates, fill_ms_per_byte
from torchrec_neuroshard.phase_timer import PhaseTimer, critical_times
from torchrec_neuroshard.planner import apply_moves, replan
from torchrec_neuroshard.profiles import profile_inputs, zipf_profile
from torchrec_neuroshard.simulator import PHASES

SHARDERS: list[Any] = [EmbeddingBagCollectionSharder()]
WARM_UP = 20
"""Iterations that do not count."""
NUM_BATCHES = 4
"""Distinct batches of a rank, gone round."""


def make_tables(args: argparse.Namespace, pooling: Sequence[float]) -> list[Any]:
    """Tables of one size, read as often as told."""
    return [
        TableConfig(
            name=f"t{i}",
            num_embeddings=args.rows,
            embedding_dim=args.width,
            pooling_factor=ids,
            profile=zipf_profile(
                batch_size=args.batch_size,
                pooling_factor=ids,
                num_embeddings=args.rows,
            ),
        )
        for i, ids in enumerate(pooling)
    ]


def draw(
    args: argparse.Namespace, tables: Sequence[TableConfig], seed: int, rank: int
) -> list[ClickBatch]:
    """Draw a rank's batches."""
    device = torch.device("cpu")
    return [
        draw_clicks(tables, args.batch_size, (seed * 100 + rank) * 100 + n, device)
        for n in range(NUM_BATCHES)
    ]


def make_planner(
    args: argparse.Namespace,
    ranks: Ranks,
    tables: Sequence[TableConfig],
    seed: int = 0,
) -> NeuroShardPlanner:
    """Return a planner of whole tables that knows a batch of each rank."""
    first = [draw(args, tables, seed, r)[0].ids for r in range(ranks.world_size)]
    return NeuroShardPlanner(
        topology=Topology(world_size=ranks.world_size, compute_device="cpu"),
        batch_size=args.batch_size,
        constraints={
            t.name: ParameterConstraints(sharding_types=["table_wise"]) for t in tables
        },
        cost_model=args.cost_model,
        profiles=profile_inputs(first),
    )


def lift(args: argparse.Namespace, plan: Any, rank: int) -> list[float]:
    """Lookups per sample after the tables of a rank have become popular."""
    entries = plan.plan["embeddings"]
    return [
        args.pooling
        * (args.lift if entries[f"t{i}"].ranks[0] == rank else 1 / args.lift)
        for i in range(len(entries))
    ]


class Job:
    """One copy of the model in training."""

    def __init__(self, tables: Sequence[TableConfig], plan: Any) -> None:
        self.model = DistributedModelParallel(
            ConcatDLRM(tables, torch.device("cpu")),
            device=torch.device("cpu"),
            plan=plan,
            sharders=SHARDERS,
        )
        fill_tables(self.model, tables, 0)
        dense = [*self.model.module.bottom.parameters()]
        dense += self.model.module.top.parameters()
        self._optimizer = torch.optim.SGD(dense, lr=0.01)

    def step(self, batch: ClickBatch, after: Callable[[], None]) -> dict[str, float]:
        """Train one iteration; what it took here [ms], and its loss."""
        dist.barrier()
        start, cpu = time.perf_counter(), time.process_time()
        self._optimizer.zero_grad()
        logits = self.model(batch.dense_BD, batch.ids)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.clicks_B)
        torch.autograd.backward(loss)
        self._optimizer.step()
        after()
        return {
            "ms": (time.perf_counter() - start) * 1e3,
            "cpu_ms": (time.process_time() - cpu) * 1e3,
            "loss": float(loss.detach()),
        }


class Pair:
    """A job, and the same job watched."""

    def __init__(self, args: argparse.Namespace, ranks: Ranks, seed: int) -> None:
        self._ranks, self.rows = ranks, list[dict[str, Any]]()
        self._report: MonitorReport | None = None
        self.reports: list[dict[str, Any]] = []
        self.pooling = [args.pooling] * args.num_tables
        tables = make_tables(args, self.pooling)
        self.batches = draw(args, tables, seed, ranks.rank)
        planner = make_planner(args, ranks, tables, seed)
        plan = planner.collective_plan(
            ConcatDLRM(tables, torch.device("cpu")), SHARDERS, dist.group.WORLD
        )
        self.still, self.watched = Job(tables, plan), Job(tables, plan)
        self.monitor = PlanMonitor(
            self.watched.model,
            planner,
            every=args.every,
            max_overhead=args.max_overhead,
        )

    def step(self, kind: str) -> None:
        """Train one iteration of each, in changing order; keep new reports."""
        number = len(self.rows)
        batch = self.batches[number % len(self.batches)]
        jobs: list[tuple[str, Job, Callable[[], None]]] = [
            ("still", self.still, lambda: None),
            ("watched", self.watched, self.monitor.step),
        ]
        row: dict[str, Any] = {"kind": kind}
        for name, job, after in jobs[:: 1 if number % 2 else -1]:
            row[name] = job.step(batch, after)
        self.rows.append(row)
        report = self.monitor.last_report
        if report is not None and report is not self._report:
            self._report = report
            self.reports.append(phases_of(kind, report))

    def gathered(self) -> list[dict[str, Any]]:
        """Return the rows of all ranks, each as long as on its slowest rank."""
        found = []
        for by_rank in zip(*self._ranks.gather(self.rows), strict=True):
            row: dict[str, Any] = {"kind": by_rank[0]["kind"]}
            for name in ("still", "watched"):
                row[name] = {
                    "ms": max(r[name]["ms"] for r in by_rank),
                    "cpu_ms": sum(r[name]["cpu_ms"] for r in by_rank),
                    "loss": [r[name]["loss"] for r in by_rank],
                }
            found.append(row)
        return found


def interval(values: Sequence[float], take: Callable[[Any], Any]) -> list[float]:
    """95 % of bootstrapped values of a statistic, over stretches of 20 iterations."""
    blocks = [values[i : i + 20] for i in range(0, len(values) - 19, 20)]
    rng = np.random.default_rng(0)
    found = [
        take(
            np.concatenate(
                [blocks[i] for i in rng.integers(len(blocks), size=len(blocks))]
            )
        )
        for _ in range(2000)
    ]
    return [float(v) for v in np.percentile(found, [2.5, 97.5])]


def compare(rows: Sequence[dict[str, Any]], key: str, take: Any) -> dict[str, Any]:
    """Watched less still, over what the still one takes."""
    usual = float(take([r["still"][key] for r in rows]))
    differences = [r["watched"][key] - r["still"][key] for r in rows]
    low, high = interval(differences, take)
    return {
        "num_pairs": len(rows),
        "still_ms": usual,
        "difference_ms": float(take(differences)),
        "interval_ms": [low, high],
        "relative": float(take(differences)) / usual,
        "relative_interval": [low / usual, high / usual],
        # Told from 0 in four of five repetitions, at 5 %.
        "smallest_detectable": 2.8 * (high - low) / (2 * 1.96) / usual,
    }


def quiet_difference(rows: Sequence[dict[str, Any]]) -> float:
    """Watched less still in the third of the pairs that took least together.

    Neither copy is favoured by the choice, unlike by the time of one.
    """
    rows = sorted(rows, key=lambda r: r["still"]["ms"] + r["watched"]["ms"])
    return statistics.median(
        r["watched"]["ms"] - r["still"]["ms"] for r in rows[: len(rows) // 3]
    )


def phases_of(kind: str, report: MonitorReport) -> dict[str, Any]:
    """Predicted beside measured, by rank and of the collectives."""
    return {
        "kind": kind,
        "iteration": report.last_iteration,
        "iteration_ms": report.measured.iteration_ms,
        "measured": [*map(dict, report.measured.by_rank_ms)],
        "critical": dict(report.measured.critical_ms),
        "predicted": [
            {p: getattr(r, p) for p in PHASES} for r in report.predicted.ranks
        ],
        "offered": report.offer is not None,
    }


def overhead(args: argparse.Namespace, ranks: Ranks) -> dict[str, Any]:
    """Train the pair without drift."""
    pair = Pair(args, ranks, args.seed)
    for _ in range(WARM_UP):
        pair.step("warm up")
    for _ in range(args.iterations):
        pair.step("even")
    rows = [r for r in pair.gathered() if r["kind"] == "even"]
    spent = ranks.gather(pair.monitor.seconds_spent)
    assert pair.monitor.is_on
    return {
        "rows": rows,
        "own_seconds": spent,
        "figures": {
            "time, mean": compare(rows, "ms", np.mean),
            "time, median": compare(rows, "ms", np.median),
            "CPU time, mean": compare(rows, "cpu_ms", np.mean),
        },
        "equal_losses": all(r["still"]["loss"] == r["watched"]["loss"] for r in rows),
        "report": str(pair.monitor.last_report),
    }


KEPT = ("rows", "pooling", "phases")
"""Of a run, in the JSON file alone."""


def drift(args: argparse.Namespace, ranks: Ranks) -> dict[str, Any]:
    """Train pairs whose inputs drift, one for each seed."""
    runs = []
    for seed in range(args.seed, args.seed + args.runs):
        pair = Pair(args, ranks, seed)
        for _ in range(args.every + 5):
            pair.step("even")
        pooling = lift(args, pair.watched.model.plan, 0)
        pair.batches = draw(args, make_tables(args, pooling), seed + 1000, ranks.rank)
        for _ in range(3 * args.every + 5):
            pair.step("drifted")
        report = pair.monitor.last_report
        said, pays = ranks.gather(
            (str(report), any(r["offered"] for r in pair.reports))
        )[0]
        done = pair.monitor.replan()
        assert done is not None
        for _ in range(10):
            pair.step("settling")
        for _ in range(3 * args.every):
            pair.step("moved")
        rows, reports = pair.gathered(), ranks.gather(pair.reports)[0]
        by_kind = {
            kind: [r for r in rows if r["kind"] == kind]
            for kind in ("even", "drifted", "moved")
        }
        compared = {
            kind: compare(found[-2 * args.every :], "ms", np.median)
            for kind, found in by_kind.items()
            if len(found) >= 40
        }
        offer = done.offer
        saved, quiet = None, None
        if done.applied and "moved" in compared:
            saved = (
                compared["drifted"]["difference_ms"]
                - compared["moved"]["difference_ms"]
            )
            quiet = quiet_difference(by_kind["drifted"][-2 * args.every :])
            quiet -= quiet_difference(by_kind["moved"][-2 * args.every :])
        run = {
            "seed": seed,
            "pooling": pooling,
            "monitor_said_so": pays,
            "report": said,
            "applied": done.applied,
            "reason": done.reason,
            "predicted_saved_ms": offer and offer.saved_ms,
            "predicted_move_ms": offer and offer.move_ms,
            "break_even": offer and offer.break_even,
            "moved_bytes": offer and offer.result.moved_bytes,
            "num_moves": offer and len(offer.result.moves),
            "move_ms": done.seconds * 1e3,
            "measured_saved_ms": saved,
            "quiet_saved_ms": quiet,
            "ratio": saved / offer.saved_ms if saved and offer else None,
            "quiet_ratio": quiet / offer.saved_ms if quiet and offer else None,
            "phases": reports,
            "compared": compared,
            "largest_loss_gap": max(
                abs(a - b)
                for r in rows
                for a, b in zip(r["still"]["loss"], r["watched"]["loss"], strict=True)
            ),
            "rows": rows,
        }
        runs.append(run)
        if ranks.rank == 0:
            shown = {k: v for k, v in run.items() if k not in KEPT}
            print(json.dumps(shown, indent=1), flush=True)
        pair.monitor.close()
    return {"runs": runs}


MOVES = (
    (4, 400_000, 64, "sgd"),
    (8, 100_000, 64, "sgd"),
    (8, 100_000, 64, "rowwise_adagrad"),
    (8, 100_000, 64, "adagrad"),
    (16, 20_000, 128, "sgd"),
    (24, 5_000, 32, "rowwise_adagrad"),
    (12, 10_000, 48, "sgd"),
    (40, 50_000, 16, "sgd"),
)
"""Tables, rows, columns, optimizer."""


def moves(args: argparse.Namespace, ranks: Ranks) -> dict[str, Any]:
    """Move tables of many sizes there and, as far as it pays, back."""
    exchange = Exchange()
    mine = fill_ms_per_byte(torch.device("cpu")), exchange.send_ms_per_byte()
    fill, send = (max(v) for v in zip(*exchange.all_tell(mine), strict=True))
    rows = []
    for num_tables, num_rows, width, optimizer in MOVES:
        args.rows, args.width = num_rows, width
        even = [
            dataclasses.replace(t, optimizer=optimizer)
            for t in make_tables(args, [args.pooling] * num_tables)
        ]
        planner = make_planner(args, ranks, even)
        plan = planner.collective_plan(
            ConcatDLRM(even, torch.device("cpu")), SHARDERS, dist.group.WORLD
        )
        job = Job(even, plan)
        rates = MoveRates(fill_ms_per_byte=fill, send_ms_per_byte=send)
        for popular in range(2):
            result = None
            if ranks.rank == 0:
                lifted = lift(args, job.model.plan, popular)
                found = profile_inputs(
                    [
                        draw(args, make_tables(args, lifted), popular, r)[0].ids
                        for r in range(ranks.world_size)
                    ]
                )
                assert planner.last_model is not None
                result = replan(
                    job.model.plan,
                    planner=planner.relearned(profiles=found),
                    model=planner.last_model[0],
                    sharders=SHARDERS,
                    budget_bytes=2**40,
                )
            dist.barrier()
            start = time.perf_counter()
            apply_moves(job.model, result)
            took = (time.perf_counter() - start) * 1e3
            if result is not None and result.moves:
                predicted = rates.predict_ms(result)
                rates = rates.corrected(predicted, took)
                row = {
                    "tables": num_tables,
                    "rows": num_rows,
                    "columns": width,
                    "optimizer": optimizer,
                    "is_first": popular == 0,
                    "num_moves": len(result.moves),
                    "moved_bytes": result.moved_bytes,
                    "predicted_ms": predicted,
                    "took_ms": took,
                    "ratio": took / predicted,
                }
                print(json.dumps(row), flush=True)
                rows.append(row)
    return {
        "fill_ms_per_mib": fill * 2**20,
        "send_ms_per_mib": send * 2**20,
        "rows": rows,
    }


def phases(args: argparse.Namespace, ranks: Ranks) -> dict[str, Any]:
    """Train drifted inputs under both plans and time every phase, for each seed."""
    runs = []
    for seed in range(args.seed, args.seed + args.runs):
        load, saved = os.getloadavg()[0], saved_by_phase(args, ranks, seed)
        runs.append({"seed": seed, "load": load, "saved": saved})
        if ranks.rank == 0:
            print(json.dumps(runs[-1], indent=1), flush=True)
    return {"runs": runs}


def saved_by_phase(
    args: argparse.Namespace, ranks: Ranks, seed: int
) -> dict[str, dict[str, Any]]:
    """What each phase takes under the first plan, and less under the second."""
    tables = make_tables(args, [args.pooling] * args.num_tables)
    planner = make_planner(args, ranks, tables, seed)
    plan = planner.collective_plan(
        ConcatDLRM(tables, torch.device("cpu")), SHARDERS, dist.group.WORLD
    )
    drifted = make_tables(args, lift(args, plan, 0))
    batches = [draw(args, drifted, seed + 1000, r) for r in range(ranks.world_size)]

    def moved() -> Any:
        assert planner.last_model is not None
        return replan(
            plan,
            planner=planner.relearned(
                profiles=profile_inputs(b[0].ids for b in batches)
            ),
            model=planner.last_model[0],
            sharders=SHARDERS,
            budget_bytes=2**40,
        )

    result = ranks.on_first(moved)
    jobs = Job(tables, plan), Job(tables, result.plan)
    timers = [PhaseTimer(job.model.module, torch.device("cpu")) for job in jobs]
    rows: list[dict[int, Any]] = []
    for number in range(WARM_UP + args.iterations):
        row = {}
        for i in (0, 1)[:: 1 if number % 2 else -1]:
            took = jobs[i].step(batches[ranks.rank][number % NUM_BATCHES], lambda: None)
            row[i] = took["ms"], timers[i].take()
        rows.append(row)
    pairs: list[list[dict[str, float]]] = []
    for by_rank in list(zip(*ranks.gather(rows), strict=True))[WARM_UP:]:
        pair = []
        for i in (0, 1):
            modules = critical_times([row[i][1] for row in by_rank])
            whole = {"iteration": max(row[i][0] for row in by_rank)}
            pair.append(whole | {p: sum(m[p] for m in modules) for p in PHASES})
        pairs.append(pair)
    predicted = {
        p: float(np.subtract(*(slowest(c, p) for c in (result.before, result.after))))
        for p in PHASES
    }
    saved = {}
    for phase in ("iteration", *PHASES):
        differences = [first[phase] - second[phase] for first, second in pairs]
        saved[phase] = {
            "before_ms": statistics.median(first[phase] for first, _ in pairs),
            "saved_ms": statistics.median(differences),
            "interval_ms": interval(differences, np.median),
            "predicted_ms": predicted.get(phase, sum(predicted.values())),
        }
    return saved


def slowest(costs: Any, phase: str) -> float:
    return sum(max(getattr(r, phase) for r in stage.ranks) for stage in costs.stages)


def _saved_table(data: dict[str, Any]) -> list[str]:
    lines = [
        "Both copies train on drifted inputs, in turn: one with the first plan, the "
        "other with that after the moves. Medians of the pairs' differences; what is "
        "predicted is by the bundle, in its own milliseconds.",
        "",
        "| seed | load | phase | before | saved | 95 % | predicted |",
        "| --- | ---: | --- | ---: | ---: | --- | ---: |",
    ]
    for run in data["runs"]:
        for phase, found in run["saved"].items():
            low, high = found["interval_ms"]
            lines.append(
                f"| {run['seed']} | {run['load']:.1f} | {phase} | "
                f"{found['before_ms']:.2f} ms | {found['saved_ms']:+.2f} | "
                f"{low:+.2f} to {high:+.2f} | {found['predicted_ms']:+.2f} |"
            )
    return lines


def page(data: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    lines = [
        f"# `PlanMonitor`, {data['mode']}",
        "",
        f"{data['hardware']['device']}, {data['cores']} cores, two gloo ranks, load "
        f"{data['load'][0]:.1f} before and {data['load'][1]:.1f} after; torch "
        f"{data['hardware']['torch']}; {data['created']}, commit {data['commit']}:",
        "",
        "```",
        data["command"],
        "```",
        "",
    ]
    if data["mode"] == "overhead":
        lines += [
            "| watched less not watched | pairs | not watched | difference | 95 % | "
            "smallest detectable |",
            "| --- | ---: | ---: | ---: | ---: | ---: |",
        ]
        for name, f in data["figures"].items():
            low, high = f["relative_interval"]
            lines.append(
                f"| {name} | {f['num_pairs']} | {f['still_ms']:.2f} ms | "
                f"{f['relative']:+.2%} | {low:+.2%} to {high:+.2%} | "
                f"{f['smallest_detectable']:.2%} |"
            )
        own = ", ".join(f"{s:.3f}" for s in data["own_seconds"])
        lines += [
            "",
            f"Seconds inside `monitor.step()`, by rank: {own}. Losses equal: "
            f"{data['equal_losses']}.",
        ]
        return "\n".join([*lines, ""])
    if data["mode"] == "phases":
        return "\n".join([*lines, *_saved_table(data), ""])
    if data["mode"] == "moves":
        return "\n".join([*lines, *_moves_table(data), ""])
    lines += [
        "| seed | said so | predicted to save | measured | measured / predicted | "
        "of the quietest third | moved | moving, predicted | moving | "
        "largest gap of losses |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for run in data["runs"]:
        if not run["applied"]:
            lines.append(
                f"| {run['seed']} | {run['monitor_said_so']} | {run['reason']} |"
            )
            continue
        still = run["compared"]["moved"]
        low, high = still["interval_ms"]
        took = still["still_ms"]
        size = run["moved_bytes"] / 2**20
        lines.append(
            f"| {run['seed']} | {'yes' if run['monitor_said_so'] else 'no'} | "
            f"{run['predicted_saved_ms']:.2f} ms | "
            f"{run['measured_saved_ms']:.2f} ms of "
            f"{took:.2f} ({-high:.2f} to {-low:.2f}) | {run['ratio']:.2f} | "
            f"{run['quiet_saved_ms']:.2f} ms, {run['quiet_ratio']:.2f} | "
            f"{size:.1f} MiB | {run['predicted_move_ms']:.0f} ms | "
            f"{run['move_ms']:.0f} ms | {run['largest_loss_gap']:.1e} |"
        )
    for key, name in (("ratio", "all pairs"), ("quiet_ratio", "the quietest third")):
        ratios = [r[key] for r in data["runs"] if r[key]]
        if ratios:
            within = sum(2 / 3 <= r <= 4 / 3 for r in ratios)
            lines += [
                "",
                f"Median of measured / predicted, {name}: "
                f"{statistics.median(ratios):.2f}; within a third: {within} of "
                f"{len(ratios)}.",
            ]
    lines += ["", *_phases_table(data)]
    return "\n".join([*lines, ""])


def _phases_table(data: dict[str, Any]) -> list[str]:
    """Kernels of all ranks before and after the moves, medians over reports."""
    lines = [
        "What kernels took on the slowest rank, predicted and timed in the last two "
        "reports before the moves and in those after them [ms]:",
        "",
        "| seed | | fwd_compute | bwd_compute | collectives, timed |",
        "| --- | --- | ---: | ---: | ---: |",
    ]
    for run in data["runs"]:
        for kind in ("drifted", "moved"):
            found = [r for r in run["phases"] if r["kind"] == kind][-2:]
            if not found:
                continue
            cells = []
            for phase in ("fwd_compute", "bwd_compute"):
                predicted, measured = (
                    statistics.median(max(x[phase] for x in r[side]) for r in found)
                    for side in ("predicted", "measured")
                )
                cells.append(f"{predicted:.2f} / {measured:.2f}")
            others = statistics.median(
                sum(v for p, v in r["critical"].items() if "comms" in p) for r in found
            )
            cells.append(f"{others:.2f}")
            lines.append(f"| {run['seed']} | {kind} | {' | '.join(cells)} |")
    return lines


def _moves_table(data: dict[str, Any]) -> list[str]:
    lines = [
        "| tables | optimizer | moves | MiB | predicted | took | took / predicted | "
        "by |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    for row in data["rows"]:
        by = "rates" if row["is_first"] else "rates and the first moves"
        lines.append(
            f"| {row['tables']} of {row['rows']:,} x {row['columns']} | "
            f"{row['optimizer']} | {row['num_moves']} | "
            f"{row['moved_bytes'] / 2**20:.1f} | {row['predicted_ms']:.0f} ms | "
            f"{row['took_ms']:.0f} ms | {row['ratio']:.2f} | {by} |"
        )
    ratios = [r["ratio"] for r in data["rows"] if r["is_first"]]
    within = sum(1 / 2 <= r <= 2 for r in ratios)
    return [
        *lines,
        "",
        f"Rates, measured once by the slower rank: {data['fill_ms_per_mib']:.2f} ms "
        f"to build a MiB, {data['send_ms_per_mib']:.2f} ms to send one. First moves "
        f"within a factor of 2: {within} of {len(ratios)}. The fixed times of a module "
        "and of a move were set by 24 tables of 5,000 x 32 in an earlier run.",
    ]


MODES = {"overhead": overhead, "drift": drift, "moves": moves, "phases": phases}


def main() -> None:
    """Run one of them and write what was found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("mode", choices=list(MODES))
    parser.add_argument("--out", type=Path, required=True, help="path without suffix")
    parser.add_argument("--cost-model", default="auto")
    parser.add_argument("--num-tables", type=int, default=16)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--pooling", type=float, default=10.0)
    parser.add_argument("--lift", type=float, default=2.0, help="by which inputs drift")
    parser.add_argument("--batch-size", type=int, default=512, help="per rank")
    parser.add_argument("--iterations", type=int, default=1_000)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--every", type=int, default=200)
    parser.add_argument("--max-overhead", type=float, default=0.005)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("torchrec").setLevel(logging.ERROR)
    ranks = Ranks("gloo")
    load = os.getloadavg()[0]
    found = MODES[args.mode](args, ranks)
    if ranks.rank == 0:
        data = {
            "mode": args.mode,
            "command": " ".join(map(shlex.quote, ["torchrun", *sys.argv])),
            "created": now(),
            "commit": commit(),
            "hardware": dataclasses.asdict(device_fingerprint(torch.device("cpu"), 1)),
            "cores": len(os.sched_getaffinity(0)),
            "load": [load, os.getloadavg()[0]],
            "options": {k: str(v) for k, v in vars(args).items()},
            **found,
        }
        args.out.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(_rounded(data), separators=(",", ":"))
        args.out.with_suffix(".json").write_text(text + "\n", encoding="utf-8")
        args.out.with_suffix(".md").write_text(page(data), encoding="utf-8")
        print(page(data))
    dist.destroy_process_group()


def _rounded(value: Any) -> Any:
    """Six digits are more than a clock gives."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {k: _rounded(v) for k, v in value.items()}
    return [_rounded(v) for v in value] if isinstance(value, list | tuple) else value


if __name__ == "__main__":
    main()
