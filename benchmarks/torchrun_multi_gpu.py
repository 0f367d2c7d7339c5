"""On one machine with several GPUs: measure, plan with each planner, train, compare.

    torchrun --standalone --nproc-per-node 8 --max-restarts 3 \\
        benchmarks/torchrun_multi_gpu.py --out benchmarks/results/multi_gpu_8xh100

1. This machine's collectives are measured, and a few kernels, to which a shipped cost
   model is fitted: the code of `neuroshard collect comms` and `neuroshard calibrate`.
   `--cost-model FOLDER` takes a bundle that is there instead.
2. Each planner plans MLPerf DLRM-v2, scaled to the ranks' memory, and a model of tables
   of the DLRM dataset. One set of predictions judges all plans.
3. Every plan is trained under `DistributedModelParallel`, from the same weights and on
   the same batches, in rounds of changing order.
4. `<out>.json` (raw), `<out>.md` and `<out>.svg` compare what was predicted with what
   was measured.

Everything is kept as it comes. The same command goes on where the last one ended; a
plan whose training ended it twice is left out then, and told. For CPUs:
`--backend gloo`.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import platform
import shlex
import statistics
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torchrec
from torchrec.distributed.types import ShardingPlan

from harness.models import draw_batches, profile_tables
from harness.options import RunError, option, read_options
from harness.planning import BEST_PRACTICE, PLANNERS, RESERVED, STOCK, PlanningDesk
from harness.provenance import commit, now
from harness.ranks import Ranks, SpeedReference, machine_speeds, scaled_median
from harness.training_runs import TrialConfig, TrialError, run_trial, take_turns
from torchrec_neuroshard import TableConfig, load_cost_model
from torchrec_neuroshard.collect.comms import CommsConfig, collect_comms
from torchrec_neuroshard.collect.comms_sampling import CommsSamplingConfig
from torchrec_neuroshard.collect.compute import (
    CollectConfig,
    collect_compute,
    default_sampling,
)
from torchrec_neuroshard.collect.fingerprint import device_fingerprint
from torchrec_neuroshard.cost_models import CommsModel, load_comms_model
from torchrec_neuroshard.cost_models.bundle import COMMS_BUNDLE, COMPUTE_BUNDLE
from torchrec_neuroshard.errors import NeuroShardError
from torchrec_neuroshard.planner import read_plan, save_plan
from torchrec_neuroshard.profiles import FeatureProfile
from torchrec_neuroshard.simulator import PHASES
from torchrec_neuroshard.training.calibrate_cli import calibrate_bundle, source_folder
from torchrec_neuroshard.training.calibration import CalibrationConfig
from torchrec_neuroshard.training.comms import CommsTrainConfig
from torchrec_neuroshard.training.train_cli import train_comms_bundle
from torchrec_neuroshard.workloads.dlrm_dataset import generate_dlrm_tables
from torchrec_neuroshard.workloads.mlperf import MLPERF_MAX_ROWS, mlperf_dlrm_v2
from torchrec_neuroshard.workloads.tasks import TaskConfig, sample_tasks

FIRST_STEPS = 3
"""Losses of so many iterations must agree over plans, with SGD; with row-wise Adagrad,
which keeps a state per shard, that of the first."""
LOSS_TOLERANCE = 1e-4
MAX_UNFINISHED = 2
"""Runs that may end while a plan is trained: once may be by chance."""
HELD_OUT_SETS = 0.3
"""Of the kernels' sets, those that judge: with few sets a fifth is too few."""
_GIB = 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """What to run; each field is an option of the same name."""

    out: str = option("", "path of the results, without suffix")
    backend: str = option("auto", "nccl, gloo, or auto: nccl where there are GPUs")
    cost_model: str = option(
        "measure", "measure, or the name or folder of a bundle with collectives"
    )
    source: str = option("auto", "bundle to calibrate; auto: one of the same device")
    kernel_sets: int = option(400, "sets of kernels to measure", 80)
    kernel_seconds: float = option(240.0, "stop measuring kernels after this", 90.0)
    kernel_gib: float = option(16.0, "most weights of a set", 0.002)
    calibration_steps: int = option(500, "training steps of the kernels' model", 20)
    collectives: int = option(600, "collectives to measure", 60)
    collective_seconds: float = option(240.0, "stop measuring those after this", 15.0)
    collective_bytes: int = option(2**28, "most bytes per rank of a collective", 2**20)
    collective_steps: int = option(1500, "training steps of their model", 100)
    workloads: str = option("mlperf,dlrm", "which models")
    planners: str = option(",".join(PLANNERS), "which planners")
    batch_size: int = option(8192, "samples per rank", 64)
    max_rows: int = option(MLPERF_MAX_ROWS, "most rows of a table", 2_000)
    memory_share: float = option(0.5, "of the ranks' free memory, for the tables")
    num_tables: int = option(100, "tables of the DLRM-dataset model", 12)
    rounds: int = option(5, "times that every plan is trained", 2)
    warm_up: int = option(5, "iterations before those timed, per round", 1)
    iterations: int = option(30, "iterations timed, per round", 4)
    phase_iterations: int = option(10, "iterations whose phases are timed", 2)
    timeout: float = option(600.0, "a rank that is silent for so long has failed [s]")
    seed: int = option(0, "makes tables, batches and weights")

    def __post_init__(self) -> None:
        if not self.out:
            raise RunError("--out names the results, such as results/multi_gpu_8xh100")
        if self.backend not in ("auto", "nccl", "gloo"):
            raise RunError(f"--backend is nccl, gloo or auto, not '{self.backend}'")
        unknown = set(self.planners.split(",")) - set(PLANNERS)
        if unknown:
            raise RunError(
                f"no planner {', '.join(sorted(unknown))}; known: {', '.join(PLANNERS)}"
            )
        unknown = set(self.workloads.split(",")) - {"mlperf", "dlrm"}
        if unknown:
            raise RunError(
                f"no workload {', '.join(sorted(unknown))}; known: mlperf, dlrm"
            )
        if not 0 < self.memory_share <= 1 or self.rounds < 1:
            raise RunError(
                "--memory-share must be above 0 and at most 1, --rounds at least 1, "
                f"got {self.memory_share} and {self.rounds}"
            )

    @property
    def path(self) -> Path:
        """The results' path without a suffix."""
        return Path(self.out)

    def beside(self, name: str) -> Path:
        """A file or folder beside the results."""
        return self.path.with_name(f"{self.path.name}{name}")


# Step 1: what things cost here.


def find_costs(config: RunConfig, ranks: Ranks) -> str:
    """Return a bundle of this machine, measured if need be."""
    if config.cost_model != "measure":
        return config.cost_model
    folder = config.beside("_bundle")

    def kernels() -> None:
        if not (folder / "bundle.json").is_file():
            calibrate_kernels(config, ranks, folder)

    ranks.on_first(kernels)
    if not ranks.on_first(lambda: COMMS_BUNDLE.is_in(folder)):
        records = folder / "comms.parquet"
        collect_comms(
            CommsConfig(
                out=records,
                backend=ranks.backend,
                num_samples=config.collectives,
                time_limit_seconds=config.collective_seconds,
                group_sizes=_smaller_groups(ranks),
                seed=config.seed,
                sampling=CommsSamplingConfig(
                    bytes_per_rank=(1024, config.collective_bytes)
                ),
            )
        )
        ranks.on_first(
            lambda: train_comms_bundle(
                [records],
                folder,
                folder.name,
                CommsTrainConfig(steps=config.collective_steps),
            )
        )
    return str(folder)


def _smaller_groups(ranks: Ranks) -> tuple[int, ...]:
    """Half of the ranks, so that a latency per rank can be told from one per call."""
    half = ranks.world_size // 2
    local = ranks.local_world_size
    return (half,) if half > 1 and (half <= local or half % local == 0) else ()


def calibrate_kernels(config: RunConfig, ranks: Ranks, folder: Path) -> None:
    """Measure sets of kernels on rank 0's device and fit a bundle to them."""
    sampling = default_sampling(ranks.device)
    sampling = dataclasses.replace(
        sampling,
        max_weight_bytes=min(
            int(config.kernel_gib * _GIB),
            sampling.max_weight_bytes,
            _memory_here(ranks) // 2,
        ),
        held_out_sets=HELD_OUT_SETS,
    )
    records = folder / "calibration.parquet"
    collect_compute(
        CollectConfig(
            out=records,
            num_sets=config.kernel_sets,
            seed=config.seed,
            device=str(ranks.device),
            sampling=sampling,
            time_limit_seconds=config.kernel_seconds,
        )
    )
    source = config.source
    if source == "auto":
        source = "h200" if ranks.on_gpu and _is_shipped("h200") else "cpu"
    found, _ = calibrate_bundle(
        source_folder(source),
        [records],
        folder,
        folder.name,
        CalibrationConfig(steps=config.calibration_steps, seed=config.seed),
    )
    print(found.verdict(), flush=True)


def _memory_here(ranks: Ranks) -> int:
    """All memory: the same when the command is given again, unlike what is free."""
    if ranks.on_gpu:
        return int(torch.cuda.mem_get_info(ranks.device)[1])
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _is_shipped(name: str) -> bool:
    try:
        source_folder(name)
    except NeuroShardError:
        return False
    return True


# Step 2: tables and plans.


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Tables to train."""

    name: str
    tables: tuple[TableConfig, ...]
    exact_steps: int
    """Iterations whose losses no plan changes, but for the order of additions."""


def table_bytes(tables: Sequence[TableConfig]) -> int:
    """Weights and the state of row-wise Adagrad."""
    return sum(t.weight_bytes + 4 * t.num_embeddings for t in tables)


def make_workloads(config: RunConfig, memory_bytes: int) -> Iterator[Workload]:
    """Yield the models, scaled to what all ranks have together."""

    def fitting(make: Callable[[int], tuple[TableConfig, ...]]) -> Any:
        """The tables with the most rows that fit."""
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
        drawn = sample_tasks(
            pool,
            TaskConfig(
                world_size=1,
                batch_size=config.batch_size,
                num_tables=config.num_tables,
                seed=config.seed,
            ),
            1,
        )[0].tables

        def capped(rows: int) -> tuple[TableConfig, ...]:
            return tuple(
                t
                if t.num_embeddings <= rows
                else dataclasses.replace(t, num_embeddings=rows, profile=None)
                for t in drawn
            )

        sgd = [dataclasses.replace(t, optimizer="sgd") for t in fitting(capped)]
        yield Workload(name="dlrm", tables=tuple(sgd), exact_steps=FIRST_STEPS)


def make_desk(
    workload: Workload,
    profiles: dict[str, FeatureProfile],
    cost_model: str,
    memory_bytes: int,
    config: RunConfig,
    ranks: Ranks,
) -> tuple[PlanningDesk, CommsModel]:
    """Return the planners of a workload, and the collectives that they go by.

    Raises:
        RunError: The bundle holds no collectives of these ranks.
    """
    comms_model = load_comms_model(
        cost_model,
        device_type=ranks.device.type,
        world_size=ranks.world_size,
        local_world_size=ranks.local_world_size,
    )
    if comms_model is None:
        raise RunError(
            f"'{cost_model}' holds no collectives over {ranks.backend}; take "
            "--cost-model measure"
        )
    # Measured bandwidths for TorchRec's estimate, in its bytes per millisecond.
    links = COMMS_BUNDLE.read_info(source_folder(cost_model))
    inter_gb_per_s = links.inter_gb_per_s or links.intra_gb_per_s
    topology = {
        "world_size": ranks.world_size,
        "local_world_size": ranks.local_world_size,
        "compute_device": ranks.device.type,
        "hbm_cap" if ranks.on_gpu else "ddr_cap": memory_bytes,
        "intra_host_bw": links.intra_gb_per_s * 1e6,
        "inter_host_bw": inter_gb_per_s * 1e6,
    }
    desk = PlanningDesk(
        workload.tables,
        profiles,
        topology=topology,
        batch_size=config.batch_size,
        cost_model=load_cost_model(cost_model, device_type=ranks.device.type),
        comms_model=comms_model,
    )
    return desk, comms_model


# Step 3: training.


class Results:
    """The raw results; on rank 0 also in a file, written after every change."""

    def __init__(self, config: RunConfig, ranks: Ranks, data: dict[str, Any]) -> None:
        self._path = config.path.with_suffix(".json")
        self._writes = ranks.rank == 0
        self.data = ranks.on_first(lambda: self._open(data))

    def _open(self, data: dict[str, Any]) -> dict[str, Any]:
        if not self._path.is_file():
            return data
        known = json.loads(self._path.read_text(encoding="utf-8"))
        same = ("config", "hardware", "world_size", "backend")
        differs = [n for n in same if known.get(n) != data[n]]
        if differs:
            raise RunError(
                f"{self._path} is of a run with another {', '.join(differs)}; give "
                "its options again, or another --out"
            )
        known["num_starts"] += 1
        return dict(known)

    def workload(self, name: str) -> dict[str, Any]:
        """The part of one workload."""
        found = self.data["workloads"].setdefault(name, {"planners": {}})
        assert isinstance(found, dict)
        return found

    def save(self) -> None:
        """Write the file whole."""
        if self._writes:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            temporary = self._path.with_name(f".{self._path.name}")
            temporary.write_text(json.dumps(self.data, indent=1) + "\n")
            os.replace(temporary, self._path)


class Comparison:
    """Plans of one workload: made, trained in turn, and kept."""

    def __init__(
        self,
        workload: Workload,
        costs: str,
        memory_bytes: int,
        results: Results,
        config: RunConfig,
        ranks: Ranks,
    ) -> None:
        self._workload, self._config, self._ranks = workload, config, ranks
        self._results = results
        self._entry = results.workload(workload.name)
        self._reference = SpeedReference(ranks)
        self._batches = draw_batches(
            workload.tables, config.batch_size, config.seed, ranks.rank, ranks.device
        )
        profiles = ranks.on_first(
            lambda: profile_tables(
                workload.tables, config.batch_size, config.seed, ranks.world_size
            )
        )
        self._desk, comms_model = make_desk(
            workload, profiles, costs, memory_bytes, config, ranks
        )
        self._entry.update(
            num_tables=len(workload.tables),
            largest_rows=max(t.num_embeddings for t in workload.tables),
            table_gib=table_bytes(workload.tables) / _GIB,
            optimizer=workload.tables[0].optimizer,
            batch_size=config.batch_size,
            exact_steps=workload.exact_steps,
            nominal_reference_ms=self._desk.nominal_reference_ms,
            reference_slowdown=self._reference.slowdown(comms_model.compute_slowdown),
        )

    def make_plans(self) -> None:
        """Plan with every planner whose plan is not known yet."""
        folder = self._config.beside("_plans")
        for name in self._config.planners.split(","):
            if name in self._entry["planners"]:
                continue
            path = folder / f"{self._workload.name}_{name}.json"
            try:
                entry = self._ranks.on_first(
                    lambda name=name, path=path: self._plan(name, path)
                )
                self._tell(f"{name} planned in {entry['planning_seconds']:.1f} s")
            except RunError as error:
                entry = {"failed": f"planning: {error}", "rounds": []}
                self._tell(f"{name} failed in planning: {error}")
            self._entry["planners"][name] = entry
            self._results.save()

    def _plan(self, name: str, path: Path) -> dict[str, Any]:
        """Plan, store the plan, and tell of it."""
        plan, planner, entry = self._desk.plan(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        save_plan(plan, path, model=self._desk.model(), planner=planner)
        return {**entry, "plan": path.name, "rounds": []}

    def _plan_of(self, name: str) -> ShardingPlan:
        path = self._config.beside("_plans") / self._entry["planners"][name]["plan"]
        plan: ShardingPlan = self._ranks.on_first(lambda: read_plan(path).plan)
        return plan

    def train(self) -> None:
        """Train the plans round by round; a plan that fails drops out."""
        for number in range(self._config.rounds):
            for name in take_turns(list(self._entry["planners"]), number):
                entry = self._entry["planners"][name]
                if "failed" in entry or len(entry["rounds"]) > number:
                    continue
                if entry.get("unfinished", 0) >= MAX_UNFINISHED:
                    entry["failed"] = (
                        f"training: it ended the run {MAX_UNFINISHED} times"
                    )
                else:
                    self._train_one(name, entry)
                self._results.save()

    def _train_one(self, name: str, entry: dict[str, Any]) -> None:
        entry["unfinished"] = entry.get("unfinished", 0) + 1
        self._results.save()
        config = self._config
        try:
            result = run_trial(
                self._plan_of(name),
                self._workload.tables,
                self._batches,
                TrialConfig(
                    warm_up=config.warm_up,
                    iterations=config.iterations,
                    phase_iterations=config.phase_iterations,
                    seed=config.seed,
                ),
                control=self._ranks.control,
                one_clock=self._ranks.one_machine,
                reference=self._reference.read,
            )
        except (TrialError, RunError) as error:
            entry["failed"] = f"training: {error}"
            self._tell(f"{name} failed in training: {error}")
            return
        entry["rounds"].append(result.to_json())
        entry["unfinished"] = 0
        self._tell(
            f"{name}: predicted {entry['predicted']['embedding_ms']:.2f} ms, embedding "
            f"{statistics.median(result.embedding_ms):.2f}, iteration "
            f"{statistics.median(result.iteration_ms):.2f} ms by the clock"
        )

    def _tell(self, text: str) -> None:
        if self._ranks.rank == 0:
            print(f"{self._workload.name}: {text}", flush=True)


# Step 4: the comparison.


def judge(workload: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What the report shows of each planner that was trained.

    Times are medians over all rounds. On CPUs, whose speed drifts, a round's times are
    brought to the cost model's unit by the reference set beside all plans of the round.
    Ratios are of the same round, hence of the same speed.
    """
    trained = {n: e for n, e in workload["planners"].items() if e["rounds"]}
    base = next((n for n in (BEST_PRACTICE, STOCK) if n in trained), None)
    num_rounds = max((len(e["rounds"]) for e in trained.values()), default=0)
    readings = [
        [
            ms
            for e in trained.values()
            for r in e["rounds"][number : number + 1]
            for ms in r["reference_ms"]
        ]
        for number in range(num_rounds)
    ]
    nominal_ms = workload["nominal_reference_ms"] * workload["reference_slowdown"]
    speeds = machine_speeds(readings, nominal_ms)
    first = next(iter(trained.values()), None)
    return {
        name: _judge_one(entry, trained.get(base or ""), first, speeds, workload)
        for name, entry in trained.items()
    }


def _judge_one(
    entry: dict[str, Any],
    base: dict[str, Any] | None,
    first: dict[str, Any] | None,
    speeds: Sequence[float],
    workload: dict[str, Any],
) -> dict[str, Any]:
    rounds = entry["rounds"]

    def scaled(take: Callable[[dict[str, Any]], Sequence[float]]) -> float:
        return scaled_median(rounds, speeds, take)

    judged = {
        "iteration_ms": scaled(lambda r: r["iteration_ms"]),
        "embedding_ms": scaled(lambda r: r["embedding_ms"]),
        "phases_ms": {
            name: scaled(lambda r, name=name: r["phases_ms"][name]) for name in PHASES
        },
        "held_gib": max(rounds[0]["weight_bytes"]) / _GIB,
        "held_over_mean": max(rounds[0]["weight_bytes"])
        / max(1.0, statistics.mean(rounds[0]["weight_bytes"])),
        "peak_gib": max(max(r["peak_bytes"]) for r in rounds) / _GIB,
    }
    if base is not None:
        for what in ("iteration_ms", "embedding_ms"):
            ratios = [
                statistics.median(mine[what]) / statistics.median(theirs[what])
                for mine, theirs in zip(rounds, base["rounds"], strict=False)
            ]
            judged[f"{what}_ratios"] = ratios
    if first is not None:
        judged["loss_difference"] = max(
            abs(a / b - 1)
            for mine, other in zip(rounds, first["rounds"], strict=False)
            for a, b in zip(
                mine["losses"][: workload["exact_steps"]],
                other["losses"][: workload["exact_steps"]],
                strict=True,
            )
        )
        judged["losses_agree"] = judged["loss_difference"] <= LOSS_TOLERANCE
    return judged


def report(data: dict[str, Any]) -> str:
    """The comparison in Markdown."""
    where = data["hardware"]
    lines = [
        "# Plans trained on real ranks: "
        f"{data['world_size']} x {where['device']} over {data['backend']}",
        "",
    ]
    if data["dry_run"]:
        lines += [
            "**A dry run on CPUs with tiny models: it shows that every step works and "
            "says nothing of GPUs or of which planner is better.**",
            "",
        ]
    lines += [
        f"`{data['command']}`, {data['created']}, commit {data['commit']}; torch "
        f"{where['torch']}, fbgemm {where['fbgemm']}, torchrec {data['torchrec']}. "
        f"Costs: `{data['cost_model']['name']}`, measured on "
        f"{data['cost_model']['device']}; collectives over "
        f"{data['cost_model']['backend']}.",
        "",
        *(f"- `{name}`: {text}" for name, text in PLANNERS.items()),
    ]
    for name, workload in data["workloads"].items():
        lines += ["", *_workload_lines(name, workload, data)]
    lines += [
        "",
        "Predicted: the critical path of the embedding part by the cost model, the "
        "same for all planners. Measured: medians over all rounds; `embedding` from "
        "the last rank's start to the last rank's end, the device waited for at each "
        "phase; `iteration` without such waits, dense part included. Ratios are "
        "medians over rounds (least to most); below 1 is faster. Raw figures: the "
        "JSON file of the same name.",
    ]
    return "\n".join(lines) + "\n"


def _workload_lines(
    name: str, workload: dict[str, Any], data: dict[str, Any]
) -> list[str]:
    judged = judge(workload)
    lines = [
        f"## {name}: {workload['num_tables']} tables, {workload['table_gib']:.2f} GiB, "
        f"{workload['optimizer']}",
        "",
        f"{workload['batch_size']:,} samples per rank, at most "
        f"{workload['largest_rows']:,} rows; {data['config']['iterations']} timed "
        f"iterations in each of {data['config']['rounds']} rounds.",
        "",
        "| planner | planned in | predicted [ms] | embedding [ms] | iteration [ms] | "
        "embedding / stock | iteration / stock | fullest rank [GiB] | losses |",
        "| --- |" + " ---: |" * 7 + " --- |",
    ]
    for planner, entry in workload["planners"].items():
        if planner not in judged:
            lines.append(f"| `{planner}` | {entry.get('failed', 'not trained yet')} |")
            continue
        found = judged[planner]
        memory = f"{found['held_gib']:.3f}"
        if found["peak_gib"]:
            memory += f" (peak {found['peak_gib']:.2f})"
        agree = "equal" if found["losses_agree"] else "differ"
        lines.append(
            f"| `{planner}` | {entry['planning_seconds']:.1f} s | "
            f"{entry['predicted']['embedding_ms']:.3f} | {found['embedding_ms']:.3f} | "
            f"{found['iteration_ms']:.3f} | {_ratio(found, 'embedding_ms')} | "
            f"{_ratio(found, 'iteration_ms')} | {memory} | "
            f"{agree} ({found['loss_difference']:.1e}) |"
        )
        if "failed" in entry:
            lines.append(
                f"| `{planner}` | after {len(entry['rounds'])} rounds: "
                f"{entry['failed']} |"
            )
    lines += ["", "| planner | tables by kind | predicted, measured [ms]: "]
    lines[-1] += " | ".join(PHASES) + " |"
    lines.append("| --- | --- |" + " ---: |" * len(PHASES))
    for planner, found in judged.items():
        entry = workload["planners"][planner]
        kinds = ", ".join(f"{n} {k}" for k, n in entry["sharding_types"].items())
        cells = [
            f"{entry['predicted']['phases_ms'][n]:.3f}, {found['phases_ms'][n]:.3f}"
            for n in PHASES
        ]
        lines.append(f"| `{planner}` | {kinds} | " + " | ".join(cells) + " |")
    return lines


def _ratio(found: dict[str, Any], what: str) -> str:
    ratios = found.get(f"{what}_ratios")
    if not ratios:
        return "-"
    return f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"


def plot(data: dict[str, Any], path: Path) -> None:
    """Predicted beside measured by phase, and ratios; a row per workload."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    judged = {n: judge(w) for n, w in data["workloads"].items()}
    rows = [n for n, found in judged.items() if found]
    if not rows:
        return
    figure, panels = pyplot.subplots(
        len(rows), 3, figsize=(13, 3.4 * len(rows)), squeeze=False
    )
    colors = pyplot.get_cmap("tab10").colors
    for (left, middle, right), name in zip(panels, rows, strict=True):
        found, workload = judged[name], data["workloads"][name]
        places = range(len(found))
        for shift, kind in ((-0.2, "predicted"), (0.2, "measured")):
            below = [0.0] * len(found)
            for color, phase in zip(colors, PHASES, strict=False):
                values = [
                    (f if kind == "measured" else workload["planners"][p]["predicted"])[
                        "phases_ms"
                    ][phase]
                    for p, f in found.items()
                ]
                left.bar(
                    [i + shift for i in places],
                    values,
                    0.36,
                    bottom=below,
                    color=color,
                    alpha=0.5 if kind == "predicted" else 1.0,
                    label=phase if kind == "measured" else None,
                )
                below = [a + b for a, b in zip(below, values, strict=True)]
        left.set_title(f"{name}: phases [ms], predicted (pale), measured")
        left.legend(fontsize=7, frameon=False)
        for i, f in enumerate(found.values()):
            ratios = f.get("iteration_ms_ratios", [])
            middle.plot([i] * len(ratios), ratios, "o", color="C0", alpha=0.6)
        middle.axhline(1.0, color="grey", linewidth=0.8)
        middle.set_title("iteration / stock, each round")
        for i, p in enumerate(found):
            held = workload["planners"][p]["rounds"][0]["weight_bytes"]
            width = 0.8 / len(held)
            right.bar(
                [i - 0.4 + (j + 0.5) * width for j in range(len(held))],
                [b / _GIB for b in held],
                width * 0.9,
                color="C2",
            )
        right.set_title("tables held by each rank [GiB]")
        for panel in (left, middle, right):
            panel.set_xticks(list(places), list(found), fontsize=8)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def _describe(config: RunConfig, ranks: Ranks, costs: str) -> dict[str, Any]:
    """What the results belong to."""
    folder = source_folder(costs)
    return {
        "command": " ".join(map(shlex.quote, ["torchrun", *sys.argv])),
        "created": now(),
        "commit": commit(),
        "hardware": dataclasses.asdict(device_fingerprint(ranks.device, 1)),
        "torchrec": getattr(torchrec, "__version__", "unknown"),
        "python": platform.python_version(),
        "world_size": ranks.world_size,
        "local_world_size": ranks.local_world_size,
        "backend": ranks.backend,
        "dry_run": not ranks.on_gpu,
        "config": dataclasses.asdict(config),
        "cost_model": {
            "name": folder.name,
            "device": COMPUTE_BUNDLE.read_info(folder).fingerprint.device,
            "backend": COMMS_BUNDLE.read_info(folder).backend,
        },
        "num_starts": 1,
        "workloads": {},
    }


def run(config: RunConfig, ranks: Ranks) -> None:
    """All four steps."""
    costs = find_costs(config, ranks)
    data = ranks.on_first(lambda: _describe(config, ranks, costs))
    results = Results(config, ranks, data)
    # Tables are made to fit what is free, and their plans kept: a run that goes on has
    # the tables that it began with, whatever is free by then.
    free = int(results.data.setdefault("memory_bytes", ranks.free_bytes()))
    # The fullest rank has more than the mean, and TorchRec counts inputs and outputs.
    total = int(free * (1 - RESERVED) * config.memory_share) * ranks.world_size
    for workload in make_workloads(config, total):
        comparison = Comparison(workload, costs, free, results, config, ranks)
        comparison.make_plans()
        comparison.train()
        if ranks.rank == 0:
            config.path.with_suffix(".md").write_text(
                f"{report(results.data)}\n![comparison]({config.path.name}.svg)\n"
            )
            plot(results.data, config.path.with_suffix(".svg"))
    if ranks.rank == 0:
        print(f"wrote {config.path.with_suffix('.md')}", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; the exit code."""
    warnings.simplefilter("ignore")
    logging.getLogger("torchrec").setLevel(logging.ERROR)
    try:
        config = read_options(RunConfig, arguments, __doc__ or "")
        backend = config.backend
        if backend == "auto" and torch.cuda.is_available():
            backend = "nccl"  # a comparison goes to the CPU only when it is told to
        ranks = Ranks(backend, config.timeout)
        if ranks.world_size < 2:
            raise RunError("one rank has nothing to place; start at least two")
        run(config, ranks)
    except (RunError, NeuroShardError) as error:
        print(f"rank {os.environ.get('RANK', '?')}: {error}", file=sys.stderr)
        return 2
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
