"""What watching a job costs, and whether moves save what the monitor says.

    torchrun --standalone --nproc-per-node 2 benchmarks/bench_monitor.py overhead \\
        --out benchmarks/results/monitor_overhead
    PYTHONHASHSEED=0 torchrun --standalone --nproc-per-node 2 \\
        benchmarks/bench_monitor.py drift \\
        --out benchmarks/results/monitor_drift

Two copies of one model are trained on the same batches, one iteration each in turn; the
second is watched by a `PlanMonitor`. What other work on the machine takes then falls on
both alike, and the difference of each pair is what is told.

`overhead`: differences of time and of CPU time, the monitor's own work and its hooks
included. `drift`: from one iteration on, the tables of rank 0 are read more often, the
others less. The monitor says so and re-plans; the pairs' differences before and after
tell what the moves saved.
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
from torchrec_neuroshard.profiles import profile_inputs, zipf_profile

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


class Job:
    """One copy of the model in training."""

    def __init__(self, tables: Sequence[TableConfig], plan: Any) -> None:
        self.model = DistributedModelParallel(
            ConcatDLRM(tables, torch.device("cpu")),
            device=torch.device("cpu"),
            plan=plan,
            sharders=[EmbeddingBagCollectionSharder()],
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
        self.pooling = [args.pooling] * args.num_tables
        tables = make_tables(args, self.pooling)
        self.batches = draw(args, tables, seed, ranks.rank)
        first = [draw(args, tables, seed, r)[0].ids for r in range(ranks.world_size)]
        planner = NeuroShardPlanner(
            topology=Topology(world_size=ranks.world_size, compute_device="cpu"),
            batch_size=args.batch_size,
            constraints={
                t.name: ParameterConstraints(sharding_types=["table_wise"])
                for t in tables
            },
            cost_model=args.cost_model,
            profiles=profile_inputs(first),
        )
        plan = planner.collective_plan(
            ConcatDLRM(tables, torch.device("cpu")),
            [EmbeddingBagCollectionSharder()],
            dist.group.WORLD,
        )
        self.still, self.watched = Job(tables, plan), Job(tables, plan)
        self.monitor = PlanMonitor(
            self.watched.model,
            planner,
            every=args.every,
            max_overhead=args.max_overhead,
        )

    def step(self, kind: str) -> None:
        """Train one iteration of each, in changing order."""
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


def overhead(args: argparse.Namespace, ranks: Ranks) -> dict[str, Any]:
    """Train the pair without drift."""
    pair = Pair(args, ranks, args.seed)
    for _ in range(20):
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


def drift(args: argparse.Namespace, ranks: Ranks) -> dict[str, Any]:
    """Train pairs whose inputs drift, one for each seed."""
    runs = []
    for seed in range(args.seed, args.seed + args.runs):
        pair = Pair(args, ranks, seed)
        for _ in range(args.every + 5):
            pair.step("even")
        entries = pair.watched.model.plan.plan["embeddings"]
        popular = [s.ranks[0] == 0 for s in entries.values()]
        names = list(entries)
        lift = dict(zip(names, popular, strict=True))
        pooling = [
            ids * (args.lift if lift[f"t{i}"] else 1 / args.lift)
            for i, ids in enumerate(pair.pooling)
        ]
        pair.batches = draw(args, make_tables(args, pooling), seed + 1000, ranks.rank)
        for _ in range(3 * args.every + 5):
            pair.step("drifted")
        report = pair.monitor.last_report
        said, pays = ranks.gather(
            (str(report), report is not None and report.offer is not None)
        )[0]
        done = pair.monitor.replan()
        assert done is not None
        for _ in range(10):
            pair.step("settling")
        for _ in range(3 * args.every):
            pair.step("moved")
        rows = pair.gathered()
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
        saved = None
        if done.applied and "moved" in compared:
            saved = (
                compared["drifted"]["difference_ms"]
                - compared["moved"]["difference_ms"]
            )
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
            "ratio": saved / offer.saved_ms if saved and offer else None,
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
            shown = {k: v for k, v in run.items() if k not in ("rows", "pooling")}
            print(json.dumps(shown, indent=1), flush=True)
        pair.monitor.close()
    return {"runs": runs}


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
    lines += [
        "| seed | said so | predicted to save | measured | measured / predicted | "
        "moved | moving, predicted | moving | largest gap of losses |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
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
            f"{size:.1f} MiB | {run['predicted_move_ms']:.0f} ms | "
            f"{run['move_ms']:.0f} ms | {run['largest_loss_gap']:.1e} |"
        )
    ratios = [r["ratio"] for r in data["runs"] if r["ratio"]]
    if ratios:
        within = sum(2 / 3 <= r <= 4 / 3 for r in ratios)
        lines += [
            "",
            f"Median of measured / predicted: {statistics.median(ratios):.2f}; "
            f"within a third: {within} of {len(ratios)}.",
        ]
    return "\n".join([*lines, ""])


def main() -> None:
    """Run one of the two and write what was found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("mode", choices=("overhead", "drift"))
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
    found = {"overhead": overhead, "drift": drift}[args.mode](args, ranks)
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
