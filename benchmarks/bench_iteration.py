"""Train good and bad plans and compare measured with predicted embedding times.

    torchrun --standalone --nproc-per-node 2 benchmarks/bench_iteration.py \\
        --out benchmarks/results/iteration_gloo2_202611

Each plan is trained under `DistributedModelParallel`, and `PhaseTimer` measures the
phases on every rank. The machine's speed drifts, so all plans of a model are trained in
several rounds, in changing order, and a reference set is timed beside each plan. Every
rank runs one thread.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import math
import statistics
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from scipy import stats
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import ParameterConstraints, Topology
from torchrec.distributed.types import ShardingPlan

from harness.dlrm_tables import generate_dlrm_tables
from harness.models import ConcatDLRM, draw_batches, profile_tables
from harness.pages import table
from harness.planning import predicted_phases
from harness.provenance import describe_run
from harness.ranks import Ranks, SpeedReference, machine_speeds, scaled_median
from harness.tasks import TaskConfig, cap_rows, sample_tasks
from harness.training_runs import TrialConfig, run_trial, take_turns
from torchrec_neuroshard import NeuroShardPlanner, TableConfig, load_cost_model
from torchrec_neuroshard.bundles.find import load_comms_model
from torchrec_neuroshard.costs.simulator import PHASES, PredictedCosts, Simulator
from torchrec_neuroshard.costs.task import Placement, ShardingTask
from torchrec_neuroshard.models.base import CommsModel, CostModel
from torchrec_neuroshard.papers.heuristics import GREEDY_KEYS, GreedySearcher
from torchrec_neuroshard.search import make_searcher
from torchrec_neuroshard.search.base import Searcher, SearchResult
from torchrec_neuroshard.tables.mlperf import mlperf_dlrm_v2

MAX_TABLE_ROWS = 200_000


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Tables to train, and the batch size."""

    name: str
    tables: tuple[TableConfig, ...]
    batch_size: int
    """Samples per rank."""


def make_workloads(batch_size: int, seed: int) -> list[Workload]:
    """Return three models: MLPerf, the DLRM dataset, and production widths."""
    mlperf = mlperf_dlrm_v2(max_rows=MAX_TABLE_ROWS, embedding_dim=64)
    pool = [
        cap_rows(t, MAX_TABLE_ROWS)
        for t in generate_dlrm_tables(seed)
        if 0.5 <= t.pooling_factor <= 60
    ]
    drawn = []
    for number, (count, widths, optimizer) in enumerate(
        ((40, (8, 16, 32, 64, 128), "sgd"), (60, None, "rowwise_adagrad"))
    ):
        config = TaskConfig(
            world_size=2,
            batch_size=2 * batch_size,
            num_tables=count,
            seed=seed + number,
            **({"widths": widths} if widths else {}),
        )
        tables = sample_tasks(pool, config, 1)[0].tables
        drawn.append(tuple(dataclasses.replace(t, optimizer=optimizer) for t in tables))
    return [
        Workload(name="mlperf-26", tables=tuple(mlperf), batch_size=batch_size),
        Workload(name="dlrm-40", tables=drawn[0], batch_size=batch_size),
        Workload(name="production-60", tables=drawn[1], batch_size=batch_size),
    ]


class RandomSplits(Searcher):
    """Splits some tables at random, on random ranks."""

    def __init__(self, seed: int, split_share: float, skew: float) -> None:
        """Take the seed, the share of tables split, and the first rank's weight."""
        self.name = f"random seed {seed}, {split_share:.0%} split, skew {skew:g}"
        self._seed, self._split_share, self._skew = seed, split_share, skew

    def search(
        self, task: ShardingTask, cost_model: CostModel, comms_model: CommsModel
    ) -> SearchResult:
        """Return a random placement."""
        rng = np.random.default_rng(self._seed)
        weights = np.array([self._skew, *np.ones(task.world_size - 1)])
        triples = []
        for number, config in enumerate(task.tables):
            units = config.embedding_dim // 4
            parts = 1
            if rng.random() < self._split_share:
                parts = min(units, task.world_size)
            cuts = np.sort(rng.choice(np.arange(1, units), parts - 1, replace=False))
            sizes = np.diff([0, *cuts, units])
            ranks = rng.choice(
                task.world_size, parts, replace=False, p=weights / weights.sum()
            )
            triples += [
                (number, int(4 * size), int(rank))
                for size, rank in zip(sizes, ranks, strict=True)
            ]
        placement = Placement.from_widths(task.world_size, triples)
        return SearchResult(
            placement=placement,
            predicted=Simulator(task, cost_model, comms_model).evaluate(placement),
            lower_bound_ms=0.0,
            gap=math.inf,
            search_seconds=0.0,
            num_evaluated=1,
        )


def searchers(num_plans: int) -> Iterator[tuple[str, Searcher]]:
    """Yield `num_plans` searches: the default, greedy ones and random ones."""
    yield "default search", make_searcher("default")
    for key in GREEDY_KEYS:
        yield f"greedy {key}", GreedySearcher(key)
    for number in range(num_plans - 1 - len(GREEDY_KEYS)):
        share = (0.0, 0.3, 1.0)[number % 3]
        skew = (1.0, 1.0, 1.5, 2.5, 4.0)[number % 5]
        searcher = RandomSplits(number, share, skew)
        yield searcher.name, searcher


@dataclasses.dataclass(kw_only=True, slots=True)
class Trial:
    """A plan of one model, and its measurements."""

    name: str
    plan: ShardingPlan
    predicted: PredictedCosts
    num_shards: int
    rounds: list[dict[str, Any]] = dataclasses.field(default_factory=list)


class Trainer:
    """Plans and trains the plans of one workload."""

    def __init__(self, workload: Workload, ranks: Ranks, args: Any) -> None:
        self._workload, self._ranks, self._args = workload, ranks, args
        self._batches = draw_batches(
            workload.tables, workload.batch_size, args.seed, ranks.rank, ranks.device
        )
        self._reference = SpeedReference(ranks)
        self.cost_model = load_cost_model(args.cost_model)
        self._comms_model = load_comms_model(
            args.cost_model,
            device_type="cpu",
            world_size=ranks.world_size,
            local_world_size=ranks.world_size,
        )
        if self._comms_model is None:
            raise SystemExit(
                f"'{args.cost_model}' has no measurements of gloo collectives; run "
                "'neuroshard collect comms' and 'neuroshard train'"
            )
        self._profiles = ranks.on_first(
            lambda: profile_tables(
                workload.tables, workload.batch_size, args.seed, ranks.world_size
            )
        )

    def plan(self, name: str, searcher: Searcher) -> Trial:
        """Return a plan by one search, made on rank 0 for all ranks."""
        model = ConcatDLRM(self._workload.tables, torch.device("cpu"))
        sharders = [EmbeddingBagCollectionSharder()]
        planner = NeuroShardPlanner(
            topology=Topology(
                world_size=self._ranks.world_size,
                local_world_size=self._ranks.world_size,
                compute_device="cpu",
            ),
            batch_size=self._workload.batch_size,
            cost_model=self.cost_model,
            comms_model=self._comms_model,
            profiles=self._profiles,
            search=searcher,
            # These searches place table- and column-wise shards only.
            constraints={
                t.name: ParameterConstraints(
                    sharding_types=["table_wise", "column_wise"]
                )
                for t in self._workload.tables
            },
        )
        plan = planner.collective_plan(model, sharders, dist.group.WORLD)
        result = planner.last_result
        found = result and (result.predicted, len(result.placement.shards))
        predicted, num_shards = self._ranks.gather(found)[0]
        return Trial(name=name, plan=plan, predicted=predicted, num_shards=num_shards)

    def train(self, trial: Trial) -> None:
        """Train one plan for a round and add the measurements to its trial."""
        found = run_trial(
            trial.plan,
            self._workload.tables,
            self._batches,
            TrialConfig(
                warm_up=self._args.warm_up,
                iterations=1,
                phase_iterations=self._args.iterations,
            ),
            control=self._ranks.control,
            reference=self._reference.read,
        )
        trial.rounds.append(found.to_json())

    def nominal_reference_ms(self) -> float:
        """Return the reference's time on all ranks at once, as predicted."""
        slowdown = self._reference.slowdown(self._comms_model.compute_slowdown)
        return slowdown * float(getattr(self.cost_model, "reference_ms", 0.0))


def measured(trial: Trial, speeds: Sequence[float]) -> dict[str, Any]:
    """Return medians over all rounds, in the cost model's milliseconds."""

    takes = {n: lambda r, name=n: r["phases_ms"][name] for n in PHASES}
    takes["embedding_ms"] = lambda r: r["embedding_ms"]
    return {n: scaled_median(trial.rounds, speeds, take) for n, take in takes.items()}


def judge(entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return rank correlation, errors, and the loss of choosing by prediction."""
    predicted = np.array([e["predicted"]["embedding_ms"] for e in entries])
    real = np.array([e["measured"]["embedding_ms"] for e in entries])
    error = np.abs(predicted / real - 1)
    return {
        "spearman": float(stats.spearmanr(predicted, real).statistic),
        "median_error": float(np.median(error)),
        "max_error": float(error.max()),
        "best_predicted_over_best": float(real[predicted.argmin()] / real.min()),
        "phase_median_ratio": {
            name: statistics.median(
                e["predicted"][name] / e["measured"][name] for e in entries
            )
            for name in PHASES
        },
        "phase_share": {
            name: statistics.median(
                e["measured"][name] / e["measured"]["embedding_ms"] for e in entries
            )
            for name in PHASES
        },
    }


def report(data: dict[str, Any]) -> str:
    """Return the results in Markdown."""
    where = data["hardware"]
    lines = [
        "# Predicted and measured embedding time per iteration",
        "",
        f"`{data['command']}`, {data['date']}, commit {data['commit']}.",
        f"{data['world_size']} ranks over gloo, one thread each, on {where['device']}; "
        f"torch {where['torch']}, fbgemm {where['fbgemm']}. Every plan has "
        f"{data['options']['rounds']} rounds of {data['options']['iterations']} timed "
        "iterations, scaled by the reference set's median in each round.",
    ]
    rows, phases = [], []
    for model in data["models"]:
        judged = model["judged"]
        times = [p["measured"]["embedding_ms"] for p in model["plans"]]
        rows.append(
            (
                model["name"],
                str(len(times)),
                f"{min(times):.1f} to {max(times):.1f}",
                f"{judged['spearman']:.3f}",
                f"{judged['median_error']:.1%}",
                f"{judged['max_error']:.1%}",
                f"{judged['best_predicted_over_best']:.3f}",
            )
        )
        ratios, shares = judged["phase_median_ratio"], judged["phase_share"]
        cells = (f"{ratios[n]:.2f} ({shares[n]:.0%})" for n in PHASES)
        phases.append((model["name"], *cells))
    head = ("model", "plans", "measured ms", "rank correlation", "median error")
    lines += [
        "",
        table((*head, "largest error", "plan predicted best / best plan"), rows),
        "",
        "Predicted / measured by phase, median over plans (share of the time):",
        "",
        table(("model", *PHASES), phases),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Train the plans of all models and write the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--cost-model", default="auto", help="auto, a bundle's name or its folder"
    )
    parser.add_argument(
        "--batch-size", type=int, default=1_024, help="samples per rank"
    )
    parser.add_argument("--num-plans", type=int, default=20, help="plans per model")
    parser.add_argument("--rounds", type=int, default=2, help="rounds per plan")
    parser.add_argument(
        "--warm-up", type=int, default=3, help="untimed iterations per round"
    )
    parser.add_argument(
        "--iterations", type=int, default=12, help="timed iterations per round"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of tables and batches"
    )
    parser.add_argument("--models", nargs="*", help="models to train (default: all)")
    parser.add_argument(
        "--out", type=Path, required=True, help="path of the results, without suffix"
    )
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("torchrec").setLevel(logging.ERROR)
    ranks = Ranks("gloo")
    data: dict[str, Any] = {
        **describe_run(launcher="torchrun"),
        "world_size": ranks.world_size,
        "options": {k: str(v) for k, v in vars(args).items()},
        "models": [],
    }
    for workload in make_workloads(args.batch_size, args.seed):
        if args.models and workload.name not in args.models:
            continue
        trainer = Trainer(workload, ranks, args)
        trials = {n: trainer.plan(n, s) for n, s in searchers(args.num_plans)}
        for number in range(args.rounds):
            for name in take_turns(list(trials), number):
                trial = trials[name]
                trainer.train(trial)
                if ranks.rank == 0:
                    shown = statistics.median(trial.rounds[-1]["embedding_ms"])
                    print(
                        f"{workload.name} round {number} {trial.name}: predicted "
                        f"{trial.predicted.critical_path_ms:.1f} ms, measured "
                        f"{shown:.1f} ms wall-clock time",
                        flush=True,
                    )
        nominal_ms = trainer.nominal_reference_ms()
        readings = [
            [ms for t in trials.values() for ms in t.rounds[number]["reference_ms"]]
            for number in range(args.rounds)
        ]
        speeds = machine_speeds(readings, nominal_ms)
        plans = [
            {
                "name": t.name,
                "num_shards": t.num_shards,
                "predicted": {
                    "embedding_ms": t.predicted.critical_path_ms,
                    **predicted_phases(t.predicted),
                    "by_rank": t.predicted.to_json()["ranks"],
                },
                "measured": measured(t, speeds),
                "rounds": t.rounds,
            }
            for t in trials.values()
        ]
        data["models"].append(
            {
                "name": workload.name,
                "num_tables": len(workload.tables),
                "nominal_reference_ms": nominal_ms,
                "machine_speeds": speeds,
                "plans": plans,
                "judged": judge(plans),
            }
        )
        if ranks.rank == 0:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.with_suffix(".json").write_text(json.dumps(data, indent=1) + "\n")
            args.out.with_suffix(".md").write_text(report(data))
            print(json.dumps(data["models"][-1]["judged"], indent=1), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
