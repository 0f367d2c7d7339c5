"""Train one model with and without padding: the busiest rank, predicted and measured.

    torchrun --standalone --nproc-per-node 4 benchmarks/bench_hot_rows.py \\
        --out benchmarks/results/hot_rows_gloo4_202611

Both inputs have as many ids in every bag. In "padded", most ids are 0, whose row is on
rank 0 of a row-wise table. Both inputs are trained under the row-wise plan and under
the planner's own. "Blind" plans and predictions know no ranges of ids, as before.

All pairs of an input and a plan are trained in several rounds, in changing order.
`PhaseTimer` measures the kernels on every rank. Every rank runs one thread; a machine
with fewer cores than ranks slows all of them.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torchrec.distributed.types import ShardingPlan
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from bench_iteration import AllTypesSharder, scaled
from harness.layouts import LAYOUTS
from harness.models import ClickBatch, draw_batches, table_paths
from harness.pages import table
from harness.planning import OURS, PlanningDesk, count_types
from harness.provenance import describe_run
from harness.ranks import Ranks, SpeedReference, machine_speeds
from harness.training_runs import TrialConfig, TrialResult, run_trial, take_turns
from torchrec_neuroshard import FeatureProfile, TableConfig, load_cost_model
from torchrec_neuroshard.bundles.find import load_comms_model
from torchrec_neuroshard.costs.simulator import PredictedCosts
from torchrec_neuroshard.tables.profile import profile_inputs

SPREAD, PADDED = "spread", "padded"
ROW_WISE, BLIND = "row-wise", "planner, blind"
KERNELS = "fwd_compute", "bwd_compute"


@dataclasses.dataclass(kw_only=True, slots=True)
class Trial:
    """A plan for one input, its predictions and its measurements."""

    input: str
    name: str
    plan: ShardingPlan
    predicted: PredictedCosts
    blind: PredictedCosts
    """Predicted without ranges of ids."""
    rounds: list[TrialResult] = dataclasses.field(default_factory=list)

    @property
    def key(self) -> str:
        """The input and the plan."""
        return f"{self.input}, {self.name}"


def make_tables(args: argparse.Namespace) -> list[TableConfig]:
    """Return equal tables with bags of one length and no skew but the padding."""
    length = args.pooling
    profile = FeatureProfile(
        batch_size=1,
        num_lookups=float(length),
        access_histogram=(float(length), *[0.0] * 16),
    )
    return [
        TableConfig(
            name=f"t{i}",
            num_embeddings=args.rows,
            embedding_dim=args.dim,
            pooling_factor=float(length),
            profile=profile,
        )
        for i in range(args.tables)
    ]


def padded(batch: ClickBatch, share: float, seed: int) -> ClickBatch:
    """Return the batch with a share of its ids replaced by 0."""
    ids = batch.ids
    drawn = torch.rand(
        ids.values().shape, generator=torch.Generator().manual_seed(seed)
    )
    values = torch.where(drawn < share, 0, ids.values())
    jagged = KeyedJaggedTensor(ids.keys(), values, lengths=ids.lengths())
    return batch._replace(ids=jagged)


def make_inputs(
    tables: Sequence[TableConfig], args: argparse.Namespace, rank: int
) -> dict[str, list[ClickBatch]]:
    """Return a rank's batches of each input."""
    device = torch.device("cpu")
    spread = draw_batches(tables, args.batch_size, args.seed, rank, device)
    return {
        SPREAD: spread,
        PADDED: [padded(b, args.share, rank * 100 + n) for n, b in enumerate(spread)],
    }


def without_ranges(profiles: Mapping[str, FeatureProfile]) -> dict[str, FeatureProfile]:
    """Return profiles that do not know which ids are looked up."""
    return {n: dataclasses.replace(p, hot_rows=None) for n, p in profiles.items()}


def make_trials(
    tables: Sequence[TableConfig], args: argparse.Namespace, world_size: int
) -> list[Trial]:
    """Return both plans of both inputs, and the blind planner's; run it on one rank."""
    comms_model = load_comms_model(
        args.cost_model,
        device_type="cpu",
        world_size=world_size,
        local_world_size=world_size,
    )
    if comms_model is None:
        raise SystemExit(
            f"'{args.cost_model}' has no measurements of gloo collectives of "
            f"{world_size} ranks"
        )
    (layout,) = (x for x in LAYOUTS if x.name == ROW_WISE)
    found = []
    inputs = [make_inputs(tables, args, rank) for rank in range(world_size)]
    for name in (SPREAD, PADDED):
        profiles = profile_inputs(own[name][0].ids for own in inputs)
        desk, blind = (
            PlanningDesk(
                tables,
                known,
                topology={
                    "world_size": world_size,
                    "local_world_size": world_size,
                    "compute_device": "cpu",
                },
                batch_size=args.batch_size,
                cost_model=load_cost_model(args.cost_model),
                comms_model=comms_model,
                sharder=AllTypesSharder(),
            )
            for known in (profiles, without_ranges(profiles))
        )
        plans = {
            ROW_WISE: layout.plan(tables, table_paths(tables), world_size),
            BLIND: blind.plan(OURS)[0],
            "planner": desk.plan(OURS)[0],
        }
        found += [
            Trial(
                input=name,
                name=planned,
                plan=plan,
                predicted=desk.predict(plan),
                blind=blind.predict(plan),
            )
            for planned, plan in plans.items()
        ]
    return found


def kernels_of(predicted: PredictedCosts) -> list[float]:
    """Return the kernels of each rank, forward and backward [ms]."""
    return [sum(getattr(rank, k) for k in KERNELS) for rank in predicted.ranks]


def entry_of(trial: Trial, speeds: Sequence[float]) -> dict[str, Any]:
    """Return the predictions and measurements of a trial."""
    measured = [
        scaled(
            [_kernels(found, rank) for found in trial.rounds],
            speeds,
        )
        for rank in range(len(trial.predicted.ranks))
    ]
    return {
        "input": trial.input,
        "plan": trial.name,
        "sharding_types": count_types(trial.plan),
        "predicted_kernels_ms": [round(ms, 3) for ms in kernels_of(trial.predicted)],
        "blind_kernels_ms": [round(ms, 3) for ms in kernels_of(trial.blind)],
        "predicted_ms": round(trial.predicted.critical_path_ms, 3),
        "blind_ms": round(trial.blind.critical_path_ms, 3),
        "kernels_ms": measured,
        "embedding_ms": scaled([r.embedding_ms for r in trial.rounds], speeds),
        "iteration_ms": scaled([r.iteration_ms for r in trial.rounds], speeds),
    }


def _kernels(found: TrialResult, rank: int) -> list[float]:
    """Return a rank's kernels in each iteration of a round [ms]."""
    times = (found.rank_phases_ms[k][rank] for k in KERNELS)
    return [forward + backward for forward, backward in zip(*times, strict=True)]


def report(data: dict[str, Any]) -> str:
    """Return the results in Markdown."""
    options, where = data["options"], data["hardware"]
    rows = []
    for entry in data["trials"]:
        real = [found["median"] for found in entry["kernels_ms"]]
        said, blind = entry["predicted_kernels_ms"], entry["blind_kernels_ms"]
        busiest = entry["kernels_ms"][int(np.argmax(real))]
        rows.append(
            (
                f"{entry['input']}: {entry['plan']}",
                ", ".join(f"{n} {kind}" for kind, n in entry["sharding_types"].items()),
                f"{max(blind):.1f}",
                f"{max(said):.1f} (rank {int(np.argmax(said))})",
                f"{busiest['median']:.1f} ({busiest['low_quartile']:.1f} to "
                f"{busiest['high_quartile']:.1f}; rank {int(np.argmax(real))})",
                f"{max(said) / np.mean(said):.2f}",
                f"{max(real) / np.mean(real):.2f}",
                f"{entry['blind_ms']:.1f}",
                f"{entry['predicted_ms']:.1f}",
                f"{entry['embedding_ms']['median']:.1f}",
                f"{entry['iteration_ms']['median']:.1f}",
            )
        )
    head = (
        "input: plan",
        "tables",
        "busiest rank's kernels, blind ms",
        "predicted ms",
        "measured ms (quartiles)",
        "busiest / mean, predicted",
        "measured",
        "embedding, blind ms",
        "predicted ms",
        "measured ms",
        "iteration, measured ms",
    )
    return "\n".join(
        [
            "# A padding id: the busiest rank, predicted and measured",
            "",
            f"`{data['command']}`, {data['date']}, commit {data['commit']}.",
            f"{data['world_size']} ranks over gloo, one thread each, on "
            f"{where['device']}; torch {where['torch']}, fbgemm {where['fbgemm']}. "
            f"{options['tables']} tables of {options['rows']} rows x {options['dim']} "
            f"columns, {options['pooling']} ids per sample, {options['batch_size']} "
            f"samples per rank. Padded: {options['share']} of the ids are 0. Each plan "
            f"has {options['rounds']} rounds of {options['iterations']} iterations, "
            "scaled by the reference set's median in each round. Speeds of the rounds: "
            f"{', '.join(f'{s:.2f}' for s in data['machine_speeds'])}. Blind: without "
            "ranges of ids.",
            "",
            table(head, rows),
            "",
        ]
    )


def run(ranks: Ranks, args: argparse.Namespace) -> dict[str, Any]:
    """Train all plans and return the results."""
    tables = make_tables(args)
    inputs = make_inputs(tables, args, ranks.rank)
    made = ranks.on_first(lambda: make_trials(tables, args, ranks.world_size))
    trials = {trial.key: trial for trial in made}
    reference = SpeedReference(ranks)
    config = TrialConfig(
        warm_up=args.warm_up,
        iterations=args.iterations,
        phase_iterations=args.iterations,
        seed=None,
    )
    for number in range(args.rounds):
        for key in take_turns(list(trials), number):
            trial = trials[key]
            found = run_trial(
                trial.plan,
                tables,
                inputs[trial.input],
                config,
                control=ranks.control,
                reference=reference.read,
            )
            trial.rounds.append(found)
            if ranks.rank == 0:
                shown = np.median(found.embedding_ms)
                print(f"round {number}, {key}: {shown:.1f} ms", flush=True)
    model = load_cost_model(args.cost_model)
    readings = [
        [ms for t in trials.values() for ms in t.rounds[number].reference_ms]
        for number in range(args.rounds)
    ]
    speeds = machine_speeds(readings, float(getattr(model, "reference_ms", 0.0)))
    return {
        "machine_speeds": speeds,
        "trials": [entry_of(trial, speeds) for trial in trials.values()],
    }


def main() -> None:
    """Train both inputs under each plan and write the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--cost-model", default="cpu_epyc", help="auto, a bundle's name or its folder"
    )
    for name, default, text in (
        ("--tables", 2, "number of tables"),
        ("--rows", 100_000, "rows of a table"),
        ("--dim", 64, "columns of a table"),
        ("--pooling", 200, "ids per sample of each table"),
        ("--batch-size", 512, "samples per rank"),
        ("--rounds", 4, "rounds"),
        ("--warm-up", 2, "untimed iterations per round"),
        ("--iterations", 5, "iterations per round, timed whole and by phase"),
        ("--seed", 0, "seed of the batches"),
    ):
        parser.add_argument(name, type=int, default=default, help=text)
    parser.add_argument(
        "--share", type=float, default=0.62, help="share of padding among the ids"
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="path of the results, without suffix"
    )
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("torchrec").setLevel(logging.ERROR)
    ranks = Ranks("gloo")
    data = {
        **describe_run(launcher="torchrun"),
        "world_size": ranks.world_size,
        "options": {k: str(v) for k, v in vars(args).items()},
        **run(ranks, args),
    }
    if ranks.rank == 0:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.with_suffix(".json").write_text(json.dumps(data) + "\n")
        args.out.with_suffix(".md").write_text(report(data))
        print(report(data), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
