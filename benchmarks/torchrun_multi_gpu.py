"""Compare planners on a machine with several GPUs: plan, train, measure.

    neuroshard calibrate --out my_bundle
    torchrun --nproc-per-node 8 -m torchrec_neuroshard collect comms \\
        --backend nccl --out comms.jsonl
    neuroshard train comms.jsonl --out my_bundle
    torchrun --standalone --nproc-per-node 8 benchmarks/torchrun_multi_gpu.py \\
        --cost-model my_bundle --out benchmarks/results/multi_gpu_8xh100

1. Each planner plans MLPerf DLRM-v2, scaled to the ranks' memory, and a model with
   tables of the DLRM dataset. The bundle predicts the times of all plans.
2. Every plan is trained under `DistributedModelParallel`, from the same weights and on
   the same batches, in rounds of changing order. A plan that fails is left out of later
   rounds.
3. `<out>.json` (raw) and `<out>.md` compare predicted with measured times. They are
   written after every training. `<out>_plans/` holds the plans.

On CPUs, use `--backend gloo`.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import statistics
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torchrec.distributed.types import ShardingPlan

from harness.dlrm_tables import generate_dlrm_tables
from harness.models import draw_batches, profile_tables
from harness.options import RunError, option
from harness.pages import table, write_page
from harness.planning import BEST_PRACTICE, PLANNERS, RESERVED, STOCK, PlanningDesk
from harness.provenance import describe_run
from harness.ranks import (
    Ranks,
    SpeedReference,
    machine_speeds,
    run_on_ranks,
    scaled_median,
)
from harness.tasks import TaskConfig, cap_rows, sample_tasks
from harness.training_runs import TrialConfig, TrialError, train_in_turn
from torchrec_neuroshard import TableConfig, load_cost_model
from torchrec_neuroshard.bundles.make import source_bundle
from torchrec_neuroshard.costs.simulator import PHASES
from torchrec_neuroshard.models.base import CommsModel
from torchrec_neuroshard.plans.plan_files import save_plan
from torchrec_neuroshard.tables.mlperf import MLPERF_MAX_ROWS, mlperf_dlrm_v2

FIRST_STEPS = 3
"""Iterations whose losses must be equal in all plans with SGD. With row-wise Adagrad,
which keeps a state per shard, only the first loss must."""
LOSS_TOLERANCE = 1e-4
_GIB = 2**30
Entry = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """Options of the run: each field is an option with the same name."""

    out: str = option("", "path of the results, without suffix")
    backend: str = option("auto", "nccl, gloo, or auto: nccl if there are GPUs")
    cost_model: str = option(
        "", "name or folder of a bundle with collectives of this backend"
    )
    workloads: str = option("mlperf,dlrm", "models to train")
    planners: str = option(",".join(PLANNERS), "planners to run")
    batch_size: int = option(8192, "samples per rank", 64)
    max_rows: int = option(MLPERF_MAX_ROWS, "most rows of a table", 2_000)
    memory_share: float = option(0.5, "share of the ranks' free memory for tables")
    num_tables: int = option(100, "tables of the DLRM-dataset model", 12)
    rounds: int = option(5, "rounds; each trains every plan", 2)
    warm_up: int = option(5, "untimed iterations per round", 1)
    iterations: int = option(30, "timed iterations per round", 4)
    phase_iterations: int = option(10, "iterations with timed phases per round", 2)
    timeout: float = option(
        600.0, "a rank that is silent for so many seconds has failed"
    )
    seed: int = option(0, "seed of tables, batches and weights")

    def __post_init__(self) -> None:
        for name in ("out", "cost_model"):
            if not getattr(self, name):
                raise RunError(f"--{name.replace('_', '-')} is missing")
        if self.backend not in ("auto", "nccl", "gloo"):
            raise RunError(
                f"--backend must be nccl, gloo or auto, got '{self.backend}'"
            )
        known = {"planners": set(PLANNERS), "workloads": {"mlperf", "dlrm"}}
        for name, values in known.items():
            if unknown := set(getattr(self, name).split(",")) - values:
                raise RunError(
                    f"unknown {name} in --{name}: {', '.join(sorted(unknown))}; "
                    f"known: {', '.join(sorted(values))}"
                )
        if not 0 < self.memory_share <= 1 or self.rounds < 1:
            raise RunError(
                "--memory-share must be above 0 and at most 1, --rounds at least 1, "
                f"got {self.memory_share} and {self.rounds}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """A model to train."""

    name: str
    tables: tuple[TableConfig, ...]
    exact_steps: int
    """Iterations whose losses are equal in all plans, up to rounding."""


def table_bytes(tables: Sequence[TableConfig]) -> int:
    """Return the bytes of weights and of row-wise Adagrad's state."""
    return sum(t.weight_bytes + 4 * t.num_embeddings for t in tables)


def make_workloads(config: RunConfig, memory_bytes: int) -> Iterator[Workload]:
    """Yield the models, scaled to the memory of all ranks together."""

    def fitting(make: Callable[[int], tuple[TableConfig, ...]]) -> Any:
        """Return the tables with the most rows that fit."""
        low, high = 1, config.max_rows
        while low < high:
            middle = (low + high + 1) // 2
            if table_bytes(make(middle)) <= memory_bytes:
                low = middle
            else:
                high = middle - 1
        return make(low)

    if "mlperf" in config.workloads.split(","):
        tables = fitting(lambda rows: mlperf_dlrm_v2(max_rows=rows))
        adagrad = [dataclasses.replace(t, optimizer="rowwise_adagrad") for t in tables]
        yield Workload(name="mlperf", tables=tuple(adagrad), exact_steps=1)
    if "dlrm" in config.workloads.split(","):
        pool = [
            t
            for t in generate_dlrm_tables(config.seed)
            if 0.5 <= t.pooling_factor <= 60
        ]
        drawing = TaskConfig(
            world_size=1,
            batch_size=config.batch_size,
            num_tables=config.num_tables,
            seed=config.seed,
        )
        [drawn] = sample_tasks(pool, drawing, 1)

        def capped(rows: int) -> tuple[TableConfig, ...]:
            return tuple(cap_rows(t, rows) for t in drawn.tables)

        sgd = [dataclasses.replace(t, optimizer="sgd") for t in fitting(capped)]
        yield Workload(name="dlrm", tables=tuple(sgd), exact_steps=FIRST_STEPS)


def make_desk(
    workload: Workload, memory_bytes: int, config: RunConfig, ranks: Ranks
) -> tuple[PlanningDesk, CommsModel]:
    """Return the planners of a workload, and their model of collectives.

    Raises:
        RunError: The bundle has no collectives for these ranks.
    """
    comms_model = ranks.comms_model(config.cost_model)
    profiles = ranks.on_first(
        lambda: profile_tables(
            workload.tables, config.batch_size, config.seed, ranks.world_size
        )
    )
    # TorchRec's estimate gets measured bandwidths, in bytes per millisecond.
    links = source_bundle(config.cost_model).comms
    assert links is not None
    inter_gb_per_s = links.inter_gb_per_s or links.intra_gb_per_s
    topology = {
        **ranks.topology,
        "hbm_cap" if ranks.on_gpu else "ddr_cap": memory_bytes,
        "intra_host_bw": links.intra_gb_per_s * 1e6,
        "inter_host_bw": inter_gb_per_s * 1e6,
    }
    desk = PlanningDesk(
        workload.tables,
        profiles,
        topology=topology,
        batch_size=config.batch_size,
        cost_model=load_cost_model(config.cost_model, device_type=ranks.device.type),
        comms_model=comms_model,
    )
    return desk, comms_model


class Comparison:
    """Makes all plans of one workload and trains them in turn."""

    def __init__(
        self,
        workload: Workload,
        memory_bytes: int,
        config: RunConfig,
        ranks: Ranks,
        data: dict[str, Any],
    ) -> None:
        """Take the model and prepare the planners.

        Args:
            workload: The model.
            memory_bytes: Memory of each rank.
            config: The options.
            ranks: This process's view of all ranks.
            data: The results. Those of this workload are added.
        """
        self._workload, self._config, self._ranks = workload, config, ranks
        self._data = data
        self._reference = SpeedReference(ranks)
        self._batches = draw_batches(
            workload.tables, config.batch_size, config.seed, ranks.rank, ranks.device
        )
        self._desk, comms_model = make_desk(workload, memory_bytes, config, ranks)
        self._plans: dict[str, ShardingPlan] = {}
        self._entries: dict[str, Entry] = {}
        data["workloads"][workload.name] = {
            "planners": self._entries,
            "num_tables": len(workload.tables),
            "largest_rows": max(t.num_embeddings for t in workload.tables),
            "table_gib": table_bytes(workload.tables) / _GIB,
            "optimizer": workload.tables[0].optimizer,
            "batch_size": config.batch_size,
            "exact_steps": workload.exact_steps,
            "nominal_reference_ms": self._desk.nominal_reference_ms,
            "reference_slowdown": self._reference.slowdown(
                comms_model.compute_slowdown
            ),
        }

    def make_plans(self) -> None:
        """Make a plan with every planner."""
        for name in self._config.planners.split(","):
            try:
                self._plans[name], entry = self._ranks.on_first(
                    functools.partial(self._plan, name)
                )
                self._tell(f"{name} planned in {entry['planning_seconds']:.1f} s")
            except RunError as error:
                entry = {"failed": f"planning: {error}", "rounds": []}
                self._tell(f"{name} failed in planning: {error}")
            self._entries[name] = entry

    def _plan(self, name: str) -> tuple[ShardingPlan, Entry]:
        """Return a plan and its entry in the results, after saving the plan."""
        plan, planner, entry = self._desk.plan(name)
        path = Path(f"{self._config.out}_plans", f"{self._workload.name}_{name}.json")
        path.parent.mkdir(parents=True, exist_ok=True)
        save_plan(plan, path, model=self._desk.model(), planner=planner)
        return plan, {**entry, "plan": path.name, "rounds": []}

    def train(self) -> None:
        """Train the plans round by round; leave out a plan after it fails."""
        config = self._config
        trial = TrialConfig(
            warm_up=config.warm_up,
            iterations=config.iterations,
            phase_iterations=config.phase_iterations,
            seed=config.seed,
        )
        for name, found in train_in_turn(
            self._plans,
            config.rounds,
            self._workload.tables,
            self._batches,
            trial,
            self._ranks,
            self._reference,
            self._fail,
        ):
            entry = self._entries[name]
            entry["rounds"].append(found.to_json())
            self._tell(
                f"{name}: embedding predicted {entry['predicted']['embedding_ms']:.2f} "
                f"ms, measured {statistics.median(found.embedding_ms):.2f} ms; "
                f"iteration {statistics.median(found.iteration_ms):.2f} ms wall-clock "
                "time"
            )
            self._write()

    def _fail(self, name: str, error: TrialError) -> None:
        self._entries[name]["failed"] = f"training: {error}"
        self._tell(f"{name} failed in training: {error}")
        self._write()

    def _write(self) -> None:
        if self._ranks.rank == 0:
            write_page(Path(self._config.out), self._data, report(self._data))

    def _tell(self, text: str) -> None:
        if self._ranks.rank == 0:
            print(f"{self._workload.name}: {text}", flush=True)


def judge(workload: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the figures of each trained planner for the report.

    Times are medians over all rounds. The speed of CPUs drifts, so a round's times are
    scaled to the cost model's unit by the reference set, which is timed with every plan
    of the round. Ratios compare plans in the same round, at the same speed.
    """
    trained = {n: e for n, e in workload["planners"].items() if e["rounds"]}
    if not trained:
        return {}
    base = next((n for n in (BEST_PRACTICE, STOCK) if n in trained), None)
    nominal_ms = workload["nominal_reference_ms"] * workload["reference_slowdown"]
    speeds = machine_speeds([e["rounds"] for e in trained.values()], nominal_ms)
    first = next(iter(trained.values()))["rounds"]
    return {
        name: _judge_one(
            entry["rounds"],
            trained[base]["rounds"] if base else [],
            first,
            speeds,
            workload["exact_steps"],
        )
        for name, entry in trained.items()
    }


def _judge_one(
    rounds: Sequence[Entry],
    base: Sequence[Entry],
    first: Sequence[Entry],
    speeds: Sequence[float],
    exact_steps: int,
) -> dict[str, Any]:
    """Return a plan's figures, compared with stock's rounds and the first plan's."""

    def scaled(*keys: str) -> float:
        take = functools.partial(functools.reduce, operator.getitem, keys)
        return scaled_median(rounds, speeds, take)

    def ratios(what: str) -> list[float]:
        return [
            statistics.median(mine[what]) / statistics.median(theirs[what])
            for mine, theirs in zip(rounds, base, strict=False)
        ]

    held = rounds[0]["weight_bytes"]
    return {
        "iteration_ms": scaled("iteration_ms"),
        "embedding_ms": scaled("embedding_ms"),
        "phases_ms": {name: scaled("phases_ms", name) for name in PHASES},
        "held_gib": max(held) / _GIB,
        "peak_gib": max(max(r["peak_bytes"]) for r in rounds) / _GIB,
        "iteration_ratios": ratios("iteration_ms"),
        "embedding_ratios": ratios("embedding_ms"),
        "loss_difference": max(
            abs(a / b - 1)
            for mine, other in zip(rounds, first, strict=False)
            for a, b in zip(
                mine["losses"][:exact_steps],
                other["losses"][:exact_steps],
                strict=True,
            )
        ),
    }


def report(data: dict[str, Any]) -> str:
    """Return the comparison in Markdown."""
    where, costs, run = data["hardware"], data["cost_model"], data["config"]
    parts = [
        f"# Plans trained on real ranks: {data['world_size']} x {where['device']} over "
        f"{data['backend']}"
    ]
    if data["dry_run"]:
        parts.append(
            "**A dry run on CPUs with tiny models. It shows that every step works, but "
            "not which planner is better, and nothing about GPUs.**"
        )
    parts += [
        f"`{data['command']}`, {data['date']}, commit {data['commit']}; torch "
        f"{where['torch']}, fbgemm {where['fbgemm']}, torchrec "
        f"{data['versions']['torchrec']}. Costs: `{costs['name']}`, measured on "
        f"{costs['device']}; collectives over {costs['backend']}.",
        "\n".join(f"- `{name}`: {text}" for name, text in PLANNERS.items()),
    ]
    for name, workload in data["workloads"].items():
        judged = judge(workload)
        parts += [
            f"## {name}: {workload['num_tables']} tables, "
            f"{workload['table_gib']:.2f} GiB, {workload['optimizer']}",
            f"{workload['batch_size']:,} samples per rank, at most "
            f"{workload['largest_rows']:,} rows; {run['iterations']} timed iterations "
            f"in each of {run['rounds']} rounds.",
            _times_table(workload["planners"], judged),
            _phases_table(workload["planners"], judged),
        ]
    parts.append(
        "Predicted: the critical path of the embedding part by one cost model for all "
        "planners. Measured: medians over all rounds. `embedding` lasts from the last "
        "rank's start to the last rank's end, with a device synchronisation at each "
        "phase. `iteration` has no such synchronisation and includes the dense part. "
        "Ratios are medians over rounds (minimum to maximum); below 1 is faster. Raw "
        "figures are in the JSON file of the same name."
    )
    return "\n\n".join(parts) + "\n"


def _times_table(entries: dict[str, Entry], judged: dict[str, dict[str, Any]]) -> str:
    rows: list[tuple[str, ...]] = []
    for planner, entry in entries.items():
        if found := judged.get(planner):
            difference = found["loss_difference"]
            agree = "equal" if difference <= LOSS_TOLERANCE else "differ"
            peak = f" (peak {found['peak_gib']:.2f})" if found["peak_gib"] else ""
            rows.append(
                (
                    f"`{planner}`",
                    f"{entry['planning_seconds']:.1f} s",
                    f"{entry['predicted']['embedding_ms']:.3f}",
                    f"{found['embedding_ms']:.3f}",
                    f"{found['iteration_ms']:.3f}",
                    _spread(found["embedding_ratios"]),
                    _spread(found["iteration_ratios"]),
                    f"{found['held_gib']:.3f}{peak}",
                    f"{agree} ({difference:.1e})",
                )
            )
        if "failed" in entry:
            text = f"after {len(entry['rounds'])} rounds: {entry['failed']}"
            rows.append((f"`{planner}`", text, *[""] * 7))
    head = ["planner", "planned in", "predicted [ms]", "embedding [ms]"]
    head += ["iteration [ms]", "embedding / stock", "iteration / stock"]
    return table([*head, "fullest rank [GiB]", "losses"], rows)


def _phases_table(entries: dict[str, Entry], judged: dict[str, dict[str, Any]]) -> str:
    rows = []
    for planner, found in judged.items():
        entry = entries[planner]
        predicted = entry["predicted"]["phases_ms"]
        kinds = ", ".join(f"{n} {k}" for k, n in entry["sharding_types"].items())
        cells = (f"{predicted[n]:.3f}, {found['phases_ms'][n]:.3f}" for n in PHASES)
        rows.append((f"`{planner}`", kinds, *cells))
    return table(("planner", "tables; predicted, measured [ms]:", *PHASES), rows)


def _spread(ratios: Sequence[float]) -> str:
    if not ratios:
        return "-"
    return f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"


def run(config: RunConfig, ranks: Ranks) -> None:
    """Plan, train and compare all workloads."""
    bundle = source_bundle(config.cost_model)
    assert bundle.compute and bundle.comms
    data: dict[str, Any] = {
        **describe_run(ranks.device, "torchrun"),
        "world_size": ranks.world_size,
        "local_world_size": ranks.local_world_size,
        "backend": ranks.backend,
        "dry_run": not ranks.on_gpu,
        "config": dataclasses.asdict(config),
        "cost_model": {
            "name": bundle.folder.name,
            "device": bundle.compute.fingerprint.device,
            "backend": bundle.comms.backend,
        },
        "workloads": {},
    }
    free = ranks.free_bytes()
    # The fullest rank holds more than the mean, and TorchRec counts inputs and outputs.
    total = int(free * (1 - RESERVED) * config.memory_share) * ranks.world_size
    for workload in make_workloads(config, total):
        comparison = Comparison(workload, free, config, ranks, data)
        comparison.make_plans()
        comparison.train()
    if ranks.rank == 0:
        print(f"wrote {config.out}.md", flush=True)


def start(config: RunConfig) -> Ranks:
    """Start the ranks, at least two."""
    backend = config.backend
    if backend == "auto" and torch.cuda.is_available():
        backend = "nccl"  # use the CPU only if it is asked for
    ranks = Ranks(backend, config.timeout)
    if ranks.world_size < 2:
        raise RunError("one rank leaves nothing to place; start at least two ranks")
    return ranks


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the comparison and return the exit code."""
    warnings.simplefilter("ignore")
    return run_on_ranks(RunConfig, arguments, __doc__ or "", start, run)


if __name__ == "__main__":
    sys.exit(main())
