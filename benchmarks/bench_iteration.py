"""Train many plans and compare measured times with two predictions.

    torchrun --standalone --nproc-per-node 2 benchmarks/bench_iteration.py \\
        --out benchmarks/results/iteration_gloo2_202611

"Before" adds up the slowest rank of each phase and sharding type. "After" is the
planner's prediction: the iteration as TorchRec runs it, in which ranks do not wait
between sharding types. A third prediction lets exchanges run beside kernels as on GPUs;
over gloo, both need the same cores.

Plans are those of planners and of `harness.layouts`. Each is trained under
`DistributedModelParallel`, and `PhaseTimer` measures the phases on every rank. The
machine's speed drifts, so all plans of a model are trained in several rounds, in
changing order, and a reference set is timed beside each plan. Every rank runs one
thread.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import stats
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.types import ShardingPlan

from harness.dlrm_tables import generate_dlrm_tables
from harness.layouts import LAYOUTS
from harness.models import draw_batches, profile_tables, table_paths
from harness.options import RunError, option
from harness.pages import table, write_page
from harness.planning import (
    BEST_PRACTICE,
    OURS,
    STOCK,
    PlanningDesk,
    count_types,
    predicted_phases,
)
from harness.provenance import describe_run
from harness.ranks import Ranks, SpeedReference, machine_speeds, run_on_ranks
from harness.tasks import PRODUCTION_WIDTHS, TaskConfig, cap_rows, sample_tasks
from harness.training_runs import TrialConfig, TrialResult, train_in_turn
from torchrec_neuroshard import TableConfig, load_cost_model
from torchrec_neuroshard.costs.simulator import PHASES, PredictedCosts
from torchrec_neuroshard.models.base import CommsModel, CostModel
from torchrec_neuroshard.tables.mlperf import mlperf_dlrm_v2

Floats = npt.NDArray[np.float64]

MAX_TABLE_ROWS = 50_000
PLANNERS = (OURS, BEST_PRACTICE, STOCK)


def stage_sums_ms(predicted: PredictedCosts) -> float:
    """Return the sum of the slowest rank of each phase and stage [ms]."""
    return sum(predicted_phases(predicted).values())


PREDICTIONS: Mapping[str, Callable[[PredictedCosts], float]] = {
    "before": stage_sums_ms,
    "after": lambda predicted: predicted.critical_path_ms,
    "if exchanges overlapped": lambda predicted: (
        dataclasses.replace(predicted, overlaps=True).critical_path_ms
    ),
}


class AllTypesSharder(EmbeddingBagCollectionSharder):  # type: ignore[misc]
    """Offers row-wise sharding on CPUs, too."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Return TorchRec's types for the device, and row-wise."""
        types: list[str] = super().sharding_types(compute_device_type)
        return [*dict.fromkeys([*types, "row_wise"])]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """Options of the run: each field is an option with the same name."""

    out: str = option("", "path of the results, without suffix")
    cost_model: str = option("auto", "auto, a bundle's name or its folder")
    batch_size: int = option(1_024, "samples per rank")
    max_rows: int = option(MAX_TABLE_ROWS, "most rows of a table")
    rounds: int = option(3, "rounds, at least 2")
    warm_up: int = option(2, "untimed iterations per round")
    iterations: int = option(
        5, "iterations per round; as many are timed whole and by phase"
    )
    seed: int = option(0, "seed of tables and batches")
    models: str = option("", "models to train, with commas; empty: all")

    def __post_init__(self) -> None:
        if not self.out:
            raise RunError("--out is missing")
        if self.rounds < 2:
            raise RunError("--rounds must be at least 2: their difference is the noise")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """A model: its tables, and the number of its embedding modules."""

    name: str
    tables: tuple[TableConfig, ...]
    num_modules: int = 1


def make_workloads(batch_size: int, seed: int, max_rows: int) -> list[Workload]:
    """Return six models.

    Args:
        batch_size: Samples per rank.
        seed: Seed of the drawn tables.
        max_rows: Most rows of a table.
    """
    mlperf = mlperf_dlrm_v2(max_rows=max_rows, embedding_dim=64)
    pool = [
        cap_rows(t, max_rows)
        for t in generate_dlrm_tables(seed)
        if 0.5 <= t.pooling_factor <= 60
    ]
    seldom = [t for t in pool if t.pooling_factor <= 5]

    def drawn(
        number: int,
        count: int,
        widths: Sequence[int] = PRODUCTION_WIDTHS,
        optimizer: str = "rowwise_adagrad",
        tables: Sequence[TableConfig] = pool,
    ) -> tuple[TableConfig, ...]:
        config = TaskConfig(
            world_size=2,
            batch_size=2 * batch_size,
            num_tables=count,
            seed=seed + number,
            widths=tuple(widths),
        )
        found = sample_tasks(tables, config, 1)[0].tables
        return tuple(dataclasses.replace(t, optimizer=optimizer) for t in found)

    return [
        Workload(name="mlperf-26", tables=tuple(mlperf)),
        Workload(name="dlrm-40", tables=drawn(0, 40, (8, 16, 32, 64, 128), "sgd")),
        Workload(name="production-60", tables=drawn(1, 60)),
        Workload(name="narrow-80", tables=drawn(2, 80, (4, 8, 16), "sgd")),
        Workload(name="wide-16", tables=drawn(3, 16, (128, 256), tables=seldom)),
        Workload(
            name="two-modules-40", tables=drawn(4, 40, (16, 32, 64)), num_modules=2
        ),
    ]


@dataclasses.dataclass(kw_only=True, slots=True)
class Trial:
    """A plan of one model, and its measurements."""

    name: str
    plan: ShardingPlan
    predicted: PredictedCosts
    rounds: list[TrialResult] = dataclasses.field(default_factory=list)


def make_plans(
    workload: Workload,
    ranks: Ranks,
    args: RunConfig,
    cost_model: CostModel,
    comms_model: CommsModel,
) -> list[dict[str, Any]]:
    """Return the fields of all trials; run it on one rank."""
    tables, size = workload.tables, ranks.world_size
    desk = PlanningDesk(
        tables,
        profile_tables(tables, args.batch_size, args.seed, size),
        topology=ranks.topology,
        batch_size=args.batch_size,
        cost_model=cost_model,
        comms_model=comms_model,
        num_modules=workload.num_modules,
        sharder=AllTypesSharder(),
    )
    plans = {name: desk.plan(name)[0] for name in PLANNERS}
    paths = table_paths(tables, workload.num_modules)
    plans |= {made.name: made.plan(tables, paths, size) for made in LAYOUTS}
    return [
        {"name": name, "plan": plan, "predicted": desk.predict(plan)}
        for name, plan in plans.items()
    ]


def scaled(
    rounds: Sequence[Sequence[float]], speeds: Sequence[float]
) -> dict[str, float]:
    """Return median, quartiles and number of times [ms], scaled by rounds' speeds."""
    pairs = zip(rounds, speeds, strict=True)
    times = [ms * speed for taken, speed in pairs for ms in taken]
    low, middle, high = np.percentile(times, [25, 50, 75])
    found = {"median": middle, "low_quartile": low, "high_quartile": high}
    return {**{k: round(float(v), 3) for k, v in found.items()}, "n": len(times)}


def entry_of(trial: Trial, speeds: Sequence[float]) -> dict[str, Any]:
    """Return the predictions and measurements of a plan, in the cost model's time."""
    embedding = [r.embedding_ms for r in trial.rounds]
    return {
        "name": trial.name,
        "sharding_types": count_types(trial.plan),
        "predicted": {n: round(p(trial.predicted), 3) for n, p in PREDICTIONS.items()},
        "predicted_stages": {
            stage.name: [[round(ms, 3) for ms in r.to_json().values()] for r in ranks]
            for stage in trial.predicted.stages
            for ranks in [stage.ranks]
        },
        "embedding_ms": scaled(embedding, speeds),
        "iteration_ms": scaled([r.iteration_ms for r in trial.rounds], speeds),
        "rank_phases_ms": {
            name: [
                scaled([r.rank_phases_ms[name][rank] for r in trial.rounds], speeds)
                for rank in range(len(trial.predicted.ranks))
            ]
            for name in PHASES
        },
        "round_medians_ms": [
            round(float(np.median(ms)) * speed, 3)
            for ms, speed in zip(embedding, speeds, strict=True)
        ],
    }


def noise_of(medians_PR: Floats) -> float:
    """Return the relative difference of two plans that is twice its standard error.

    Args:
        medians_PR: Median time of each plan in each round; at least two rounds.
    """
    logs = np.log(medians_PR)
    rest = logs - logs.mean(axis=0) - logs.mean(axis=1, keepdims=True) + logs.mean()
    plans, rounds = medians_PR.shape
    variance = (rest**2).sum() / ((plans - 1) * (rounds - 1))
    return float(np.expm1(2 * np.sqrt(2 * variance / rounds)))


def judge(
    predicted: Sequence[float], measured: Sequence[float], noise: float
) -> dict[str, float]:
    """Return how well a prediction orders and times the plans of a model.

    Args:
        predicted: Predicted time of each plan.
        measured: Measured time of each plan.
        noise: Relative difference up to which two measured times count as equal.
    """
    said, real = np.array(predicted), np.array(measured)
    error = said / real - 1
    differ = [
        (said[i] - said[j]) * (real[i] - real[j]) > 0
        for i, j in itertools.combinations(range(len(real)), 2)
        if abs(np.log(real[i] / real[j])) > np.log1p(noise)
    ]
    return {
        "spearman": float(stats.spearmanr(said, real).statistic),
        "median_error": float(np.median(np.abs(error))),
        "mean_error": float(np.abs(error).mean()),
        "largest_error": float(np.abs(error).max()),
        "median_signed_error": float(np.median(error)),
        "num_pairs": len(differ),
        "pairs_in_order": sum(map(bool, differ)),
        "best_predicted_over_best": float(real[said.argmin()] / real.min()),
    }


def judge_all(models: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return the figures of each prediction over the plans of all models.

    Pairs are of one model. The best predicted plan is the models' mean.
    """
    plans = [plan for model in models for plan in model["plans"]]
    found = {}
    for name in PREDICTIONS:
        own = [model["judged"][name] for model in models]
        said = [plan["predicted"][name] for plan in plans]
        real = [plan["embedding_ms"]["median"] for plan in plans]
        found[name] = judge(said, real, 0.0) | {
            "num_pairs": sum(j["num_pairs"] for j in own),
            "pairs_in_order": sum(j["pairs_in_order"] for j in own),
            "best_predicted_over_best": float(
                np.mean([j["best_predicted_over_best"] for j in own])
            ),
        }
    return found


HEAD = (
    "model | prediction | plans | measured ms | rank correlation | median error | mean "
    "error | largest error | pairs in order | plan predicted best / best plan | rank "
    "correlation, iteration"
)


def rows_of(model: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the lines of a model's predictions, or of those of all models."""
    times = [plan["embedding_ms"]["median"] for plan in model["plans"]]
    iterations = [plan["iteration_ms"]["median"] for plan in model["plans"]]
    rows: list[tuple[str, ...]] = []
    for name, judged in model["judged"].items():
        said = [plan["predicted"][name] for plan in model["plans"]]
        share = judged["pairs_in_order"] / max(1, judged["num_pairs"])
        rows.append(
            (
                model["name"],
                name,
                str(len(times)),
                f"{min(times):.1f} to {max(times):.1f}",
                f"{judged['spearman']:.3f}",
                f"{judged['median_error']:.1%}",
                f"{judged['mean_error']:.1%}",
                f"{judged['largest_error']:.1%}",
                f"{share:.1%} of {judged['num_pairs']}",
                f"{judged['best_predicted_over_best']:.3f}",
                f"{stats.spearmanr(said, iterations).statistic:.3f}",
            )
        )
    return rows


def report(data: dict[str, Any]) -> str:
    """Return the results in Markdown."""
    where, options, models = data["hardware"], data["options"], data["models"]
    everything = {
        "name": "all",
        "plans": [plan for model in models for plan in model["plans"]],
        "judged": judge_all(models),
    }
    noises = ", ".join(f"{m['name']} {m['noise']:.1%}" for m in models)
    spreads = [
        (times["high_quartile"] - times["low_quartile"]) / times["median"]
        for plan in everything["plans"]
        for times in [plan["embedding_ms"]]
    ]
    lines = [
        "# Predicted and measured embedding time per iteration",
        "",
        f"`{data['command']}`, {data['date']}, commit {data['commit']}, "
        f"{data['minutes']:.0f} minutes.",
        f"{data['world_size']} ranks over gloo, one thread each, on {where['device']}; "
        f"torch {where['torch']}, fbgemm {where['fbgemm']}. Every plan has "
        f"{options['rounds']} rounds of {options['iterations']} timed iterations, "
        "scaled by the reference set's median in each round. A plan's middle half of "
        f"times spans {np.median(spreads):.0%} of its median (median over plans).",
        "",
        "Before: sum over sharding types of the slowest rank of each phase. After: "
        "the iteration as TorchRec runs it, without waits between types. If exchanges "
        "overlapped: the same with exchanges beside kernels, as on GPUs. Pairs: two "
        "plans of one model whose measured times differ by more than twice the "
        "standard error of the "
        f"difference ({noises}).",
        "",
        table(HEAD, [row for m in (*models, everything) for row in rows_of(m)]),
        "",
        "Times of all plans [ms]:",
        "",
    ]
    rows = [
        (
            f"{model['name']}: {plan['name']}",
            *(f"{plan['predicted'][name]:.1f}" for name in PREDICTIONS),
            _spread(plan["embedding_ms"]),
            _spread(plan["iteration_ms"]),
        )
        for model in models
        for plan in model["plans"]
    ]
    head = ("plan", *PREDICTIONS, "measured (quartiles)", "iteration (quartiles)")
    return "\n".join([*lines, table(head, rows)]) + "\n"


def _spread(times: dict[str, float]) -> str:
    low, high = times["low_quartile"], times["high_quartile"]
    return f"{times['median']:.1f} ({low:.1f} to {high:.1f})"


def run_model(workload: Workload, ranks: Ranks, args: RunConfig) -> dict[str, Any]:
    """Train all plans of a model and return its entry in the results."""
    cost_model = load_cost_model(args.cost_model)
    comms_model = ranks.comms_model(args.cost_model)
    made = ranks.on_first(
        lambda: make_plans(workload, ranks, args, cost_model, comms_model)
    )
    trials = {fields["name"]: Trial(**fields) for fields in made}
    batches = draw_batches(
        workload.tables, args.batch_size, args.seed, ranks.rank, ranks.device
    )
    reference = SpeedReference(ranks)
    config = TrialConfig(
        warm_up=args.warm_up,
        iterations=args.iterations,
        phase_iterations=args.iterations,
        num_modules=workload.num_modules,
        seed=None,
    )
    plans = {name: trial.plan for name, trial in trials.items()}
    for name, found in train_in_turn(
        plans, args.rounds, workload.tables, batches, config, ranks, reference
    ):
        trial = trials[name]
        trial.rounds.append(found)
        if ranks.rank == 0:
            said = (f"{n} {p(trial.predicted):.1f}" for n, p in PREDICTIONS.items())
            print(
                f"{workload.name} round {len(trial.rounds) - 1} {name}: "
                f"{', '.join(said)} ms, measured {np.median(found.embedding_ms):.1f} "
                "ms wall-clock time",
                flush=True,
            )
    nominal_ms = reference.slowdown(comms_model.compute_slowdown)
    nominal_ms *= float(getattr(cost_model, "reference_ms", 0.0))
    taken = [[r.to_json() for r in t.rounds] for t in trials.values()]
    speeds = machine_speeds(taken, nominal_ms)
    entries = [entry_of(trial, speeds) for trial in trials.values()]
    noise = noise_of(np.array([plan["round_medians_ms"] for plan in entries]))
    real = [plan["embedding_ms"]["median"] for plan in entries]
    return {
        "name": workload.name,
        "num_tables": len(workload.tables),
        "machine_speeds": speeds,
        "noise": noise,
        "plans": entries,
        "judged": {
            name: judge([plan["predicted"][name] for plan in entries], real, noise)
            for name in PREDICTIONS
        },
    }


def run(config: RunConfig, ranks: Ranks) -> None:
    """Train the plans of all models and write the results."""
    start = time.monotonic()
    data: dict[str, Any] = {
        **describe_run(launcher="torchrun"),
        "world_size": ranks.world_size,
        "options": {k: str(v) for k, v in dataclasses.asdict(config).items()},
        "models": [],
    }
    for workload in make_workloads(config.batch_size, config.seed, config.max_rows):
        if config.models and workload.name not in config.models.split(","):
            continue
        data["models"].append(run_model(workload, ranks, config))
        data["minutes"] = (time.monotonic() - start) / 60
        if ranks.rank == 0:
            write_page(Path(config.out), data, report(data))
            print(json.dumps(data["models"][-1]["judged"], indent=1), flush=True)


def main() -> int:
    """Run the benchmark and return the exit code."""
    warnings.simplefilter("ignore")
    doc = __doc__ or ""
    return run_on_ranks(RunConfig, None, doc, lambda _: Ranks("gloo"), run)


if __name__ == "__main__":
    sys.exit(main())
