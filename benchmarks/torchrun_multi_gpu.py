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

import argparse
import dataclasses
import datetime
import json
import logging
import os
import platform
import random
import shlex
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torchrec
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import (
    EmbeddingShardingPlanner,
    ParameterConstraints,
    Topology,
)
from torchrec.distributed.planner.storage_reservations import (
    FixedPercentageStorageReservation,
)
from torchrec.distributed.types import ShardingPlan

from torchrec_neuroshard import NeuroShardPlanner, TableConfig, load_cost_model
from torchrec_neuroshard.collect.comms import CommsConfig, collect_comms
from torchrec_neuroshard.collect.comms_sampling import CommsSamplingConfig
from torchrec_neuroshard.collect.compute import CollectConfig, collect_compute
from torchrec_neuroshard.collect.fingerprint import device_fingerprint
from torchrec_neuroshard.collect.sampling import SamplingConfig
from torchrec_neuroshard.collect.timing import Reference, keep_freed_memory
from torchrec_neuroshard.cost_models import load_comms_model
from torchrec_neuroshard.cost_models.bundle import COMMS_BUNDLE, COMPUTE_BUNDLE
from torchrec_neuroshard.errors import NeuroShardError
from torchrec_neuroshard.planner import read_plan, replan, save_plan
from torchrec_neuroshard.planner.models import (
    ClickBatch,
    ConcatDLRM,
    draw_clicks,
)
from torchrec_neuroshard.planner.trials import TrialConfig, TrialError, run_trial
from torchrec_neuroshard.profiles import FeatureProfile, profile_inputs
from torchrec_neuroshard.simulator import PHASES, PredictedCosts
from torchrec_neuroshard.training.calibrate_cli import calibrate_bundle, source_folder
from torchrec_neuroshard.training.calibration import (
    CalibrationConfig,
)
from torchrec_neuroshard.training.comms import CommsTrainConfig
from torchrec_neuroshard.training.train_cli import train_comms_bundle
from torchrec_neuroshard.workloads.dlrm_dataset import generate_dlrm_tables
from torchrec_neuroshard.workloads.mlperf import MLPERF_MAX_ROWS, mlperf_dlrm_v2
from torchrec_neuroshard.workloads.tasks import TaskConfig, sample_tasks

OURS, FAITHFUL = "ours", "neuroshard"
BEST_PRACTICE, STOCK = "torchrec-best", "torchrec"
PLANNERS = {
    OURS: "NeuroShardPlanner, default search",
    FAITHFUL: "NeuroShardPlanner with NeuroShard's own search, on the same cost model",
    BEST_PRACTICE: "TorchRec's planner: pooling factors, min_partition=32, table-wise "
    "and column-wise",
    STOCK: "TorchRec's planner, no constraints",
}
NUM_BATCHES = 4
"""Distinct batches that training goes round; the profile is taken from the first."""
FIRST_STEPS = 3
"""Losses of so many iterations must agree over plans, with SGD; with row-wise Adagrad,
which keeps a state per shard, that of the first."""
LOSS_TOLERANCE = 1e-4
MAX_UNFINISHED = 2
"""Runs that may end while a plan is trained: once may be by chance."""
RESERVED = 0.15
HELD_OUT_SETS = 0.3
"""Of the kernels' sets, those that judge: with few sets a fifth is too few."""
_GIB = 2**30


class RunError(Exception):
    """The run cannot go as asked; the message says what to change."""


def option(default: Any, text: str, quick: Any = None) -> Any:
    """Return a field that is also an option; `quick` is its value under --quick."""
    quick = default if quick is None else quick
    return field(default=default, metadata={"help": text, "quick": quick})


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

    @classmethod
    def from_arguments(cls, arguments: Sequence[str] | None) -> RunConfig:
        """Read the command line."""
        parser = argparse.ArgumentParser(
            description=(__doc__ or "").splitlines()[0],
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        )
        parser.add_argument(
            "--quick", action="store_true", help="tiny defaults, for a dry run"
        )
        for f in dataclasses.fields(cls):
            parser.add_argument(
                "--" + f.name.replace("_", "-"),
                type=type(f.default),
                help=f"{f.metadata['help']} (default: {f.default}; with --quick: "
                f"{f.metadata['quick']})".replace("%", "%%"),
                default=argparse.SUPPRESS,
            )
        given = vars(parser.parse_args(arguments))
        if given.pop("quick"):
            quick = {f.name: f.metadata["quick"] for f in dataclasses.fields(cls)}
            given = {**quick, **given}
        return cls(**given)

    @property
    def path(self) -> Path:
        """The results' path without a suffix."""
        return Path(self.out)

    def beside(self, name: str) -> Path:
        """A file or folder beside the results."""
        return self.path.with_name(f"{self.path.name}{name}")


class Ranks:
    """This process among the others."""

    def __init__(self, config: RunConfig) -> None:
        missing = [n for n in ("RANK", "WORLD_SIZE") if n not in os.environ]
        if missing:
            raise RunError(
                f"{', '.join(missing)} not set; start the ranks with 'torchrun "
                f"--standalone --nproc-per-node N {sys.argv[0]}'"
            )
        self.rank, self.world_size = (
            int(os.environ["RANK"]),
            int(os.environ["WORLD_SIZE"]),
        )
        self.local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", self.world_size))
        local_rank = int(os.environ.get("LOCAL_RANK", self.rank))
        if self.world_size < 2:
            raise RunError("one rank has nothing to place; start at least two")
        num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        self.backend = config.backend
        if self.backend == "auto":
            self.backend = "nccl" if num_gpus else "gloo"
        if self.backend == "nccl" and num_gpus < self.local_world_size:
            raise RunError(
                f"{self.local_world_size} ranks on this machine need as many GPUs, it "
                f"has {num_gpus}; lower --nproc-per-node or use --backend gloo"
            )
        self.on_gpu = self.backend == "nccl"
        self.device = torch.device("cpu")
        if self.on_gpu:
            self.device = torch.device("cuda", local_rank)
            torch.cuda.set_device(self.device)
        else:
            torch.set_num_threads(1)
            keep_freed_memory()
        timeout = datetime.timedelta(seconds=config.timeout)
        dist.init_process_group(self.backend, timeout=timeout)
        # What is not training: measuring and planning take rank 0 minutes.
        self.control: dist.ProcessGroup = dist.new_group(
            backend="gloo", timeout=datetime.timedelta(hours=2)
        )

    @property
    def one_machine(self) -> bool:
        """Whether all ranks share a clock."""
        return self.local_world_size == self.world_size

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value."""
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.control)
        return values

    def on_first(self, work: Callable[[], Any]) -> Any:
        """Return what rank 0 gets from `work`, on every rank.

        Raises:
            RunError: What `work` raised, in words.
        """
        box: list[Any] = [None, ""]
        if self.rank == 0:
            try:
                box[0] = work()
            except Exception as error:
                logging.getLogger(__name__).debug("on rank 0", exc_info=True)
                box[1] = f"{type(error).__name__}: {error}"
        dist.broadcast_object_list(box, 0, group=self.control)
        if box[1]:
            raise RunError(str(box[1]))
        return box[0]

    def free_bytes(self) -> int:
        """Memory that every rank has for itself."""
        if self.on_gpu:
            free = int(torch.cuda.mem_get_info(self.device)[0])
        else:
            text = Path("/proc/meminfo").read_text(encoding="ascii")
            fields = dict(line.split(":", 1) for line in text.splitlines())
            free = int(fields["MemAvailable"].split()[0]) * 1024
            free //= self.local_world_size
        return int(min(self.gather(free)))


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
    sampling = SamplingConfig.for_device(ranks.device.type)
    sampling = dataclasses.replace(
        sampling,
        max_weight_bytes=min(
            int(config.kernel_gib * _GIB),
            sampling.max_weight_bytes,
            _free_here(ranks) // 2,
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


def _free_here(ranks: Ranks) -> int:
    if ranks.on_gpu:
        return int(torch.cuda.mem_get_info(ranks.device)[0])
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


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


class PlanningDesk:
    """All planners of one workload, given the same facts; only rank 0 plans."""

    def __init__(
        self,
        workload: Workload,
        profiles: dict[str, FeatureProfile],
        cost_model: str,
        memory_bytes: int,
        config: RunConfig,
        ranks: Ranks,
    ) -> None:
        self._workload, self._profiles = workload, profiles
        self._config, self._ranks = config, ranks
        self._cost_model = load_cost_model(cost_model, device_type=ranks.device.type)
        self._comms_model = load_comms_model(
            cost_model,
            device_type=ranks.device.type,
            world_size=ranks.world_size,
            local_world_size=ranks.local_world_size,
        )
        if self._comms_model is None:
            raise RunError(
                f"'{cost_model}' holds no collectives over {ranks.backend}; take "
                "--cost-model measure"
            )
        self._memory_bytes = memory_bytes
        self._links = self._measured_links(cost_model)

    def _measured_links(self, cost_model: str) -> dict[str, float]:
        """Bandwidths for TorchRec's estimate, in its bytes per millisecond."""
        info = COMMS_BUNDLE.read_info(source_folder(cost_model))
        intra = info.intra_gb_per_s
        inter = info.inter_gb_per_s or intra
        return {"intra_host_bw": intra * 1e6, "inter_host_bw": inter * 1e6}

    def _topology(self) -> Topology:
        memory = {"hbm_cap" if self._ranks.on_gpu else "ddr_cap": self._memory_bytes}
        return Topology(
            world_size=self._ranks.world_size,
            local_world_size=self._ranks.local_world_size,
            compute_device=self._ranks.device.type,
            **memory,
            **self._links,
        )

    def planner(self, name: str) -> EmbeddingShardingPlanner:
        """Return a planner by its name."""
        shared: dict[str, Any] = {
            "topology": self._topology(),
            "batch_size": self._config.batch_size,
            "storage_reservation": FixedPercentageStorageReservation(RESERVED),
        }
        if name == STOCK:
            return EmbeddingShardingPlanner(**shared)
        limits: dict[str, Any] = {}
        if name == BEST_PRACTICE:
            limits = {
                "sharding_types": ["table_wise", "column_wise"],
                "min_partition": 32,
            }
        shared["constraints"] = {
            t.name: ParameterConstraints(
                pooling_factors=[self._profiles[t.name].pooling_factor], **limits
            )
            for t in self._workload.tables
        }
        if name == BEST_PRACTICE:
            return EmbeddingShardingPlanner(**shared)
        faithful: dict[str, Any] = {}
        if name == FAITHFUL:
            # The plan is to be that search's, good or bad.
            faithful = {
                "search": "neuroshard",
                "consider_stock": False,
                "max_switches": 0,
            }
        return NeuroShardPlanner(
            **shared,
            cost_model=self._cost_model,
            comms_model=self._comms_model,
            profiles=self._profiles,
            **faithful,
        )

    def model(self) -> ConcatDLRM:
        """The model that is planned."""
        return ConcatDLRM(self._workload.tables, torch.device("cpu"))

    def plan(self, name: str, path: Path) -> dict[str, Any]:
        """Plan, store the plan, and tell of it."""
        planner, model = self.planner(name), self.model()
        start = time.perf_counter()
        plan = planner.plan(model, [EmbeddingBagCollectionSharder()])
        seconds = time.perf_counter() - start
        path.parent.mkdir(parents=True, exist_ok=True)
        save_plan(plan, path, model=model, planner=planner)
        entry: dict[str, Any] = {
            "planning_seconds": seconds,
            "plan": path.name,
            "sharding_types": _count_types(plan),
            "rounds": [],
        }
        result = getattr(planner, "last_result", None)
        if result is not None:
            entry["gap"] = result.gap
            entry["fallback"] = result.fallback
            entry["warnings"] = list(result.warnings)
        entry["predicted"] = self._predict(plan)
        return entry

    def _predict(self, plan: ShardingPlan) -> dict[str, Any]:
        """Judge any plan by the one cost model."""
        ours = self.planner(OURS)
        assert isinstance(ours, NeuroShardPlanner)
        judged = replan(plan, planner=ours, model=self.model(), budget_bytes=0).before
        return {
            "embedding_ms": judged.critical_path_ms,
            "phases_ms": predicted_phases(judged),
            **{k: v for k, v in judged.to_json().items() if k != "stages"},
        }

    def nominal_reference_ms(self) -> float:
        """What the reference set takes where the cost model's times hold; 0 on GPUs."""
        return float(getattr(self._cost_model, "reference_ms", 0.0))

    def slowdown(self) -> tuple[float, float]:
        """Kernels of all ranks at once against one alone, forward and backward."""
        forward, backward = self._comms_model.compute_slowdown
        return float(forward), float(backward)


def predicted_phases(predicted: PredictedCosts) -> dict[str, float]:
    """Each phase over all ranks and stages [ms]."""
    return {
        name: sum(
            max(getattr(r, name) for r in stage.ranks) for stage in predicted.stages
        )
        for name in PHASES
    }


def _count_types(plan: ShardingPlan) -> dict[str, int]:
    counts: dict[str, int] = {}
    for module_plan in plan.plan.values():
        for sharding in module_plan.values():
            kind = f"{sharding.sharding_type}/{sharding.compute_kernel}"
            counts[kind] = counts.get(kind, 0) + 1
    return dict(sorted(counts.items()))


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
        self._reference = None if ranks.on_gpu else Reference(ranks.device)
        self._batches = self._draw()
        profiles = ranks.on_first(self._profile)
        self._desk = PlanningDesk(
            workload, profiles, costs, memory_bytes, config, ranks
        )
        self._entry.update(
            num_tables=len(workload.tables),
            largest_rows=max(t.num_embeddings for t in workload.tables),
            table_gib=table_bytes(workload.tables) / _GIB,
            optimizer=workload.tables[0].optimizer,
            batch_size=config.batch_size,
            exact_steps=workload.exact_steps,
            nominal_reference_ms=self._desk.nominal_reference_ms(),
            reference_slowdown=self._reference_slowdown(),
        )

    def _seed(self, rank: int, number: int) -> int:
        return (self._config.seed * 10_000 + rank) * 100 + number

    def _draw(self) -> list[ClickBatch]:
        ranks, size = self._ranks, self._config.batch_size
        return [
            draw_clicks(
                self._workload.tables, size, self._seed(ranks.rank, n), ranks.device
            )
            for n in range(NUM_BATCHES)
        ]

    def _profile(self) -> dict[str, FeatureProfile]:
        """Profile one iteration's input of all ranks."""
        cpu = torch.device("cpu")
        tables, size = self._workload.tables, self._config.batch_size
        return profile_inputs(
            draw_clicks(tables, size, self._seed(rank, 0), cpu).ids
            for rank in range(self._ranks.world_size)
        )

    def _reference_slowdown(self) -> float:
        """How much longer the reference should take on all ranks than on one alone."""
        if self._reference is None:
            return 1.0
        passes = [self._reference.run_phases() for _ in range(10)]
        forward, backward = map(statistics.median, zip(*passes, strict=True))
        share = forward / (forward + backward)
        slow_forward, slow_backward = self._desk.slowdown()
        return share * slow_forward + (1 - share) * slow_backward

    def _read_reference(self) -> float:
        if self._reference is None:
            return 0.0
        dist.barrier(group=self._ranks.control)
        self._reference.run()
        return statistics.median(self._reference.run() for _ in range(9))

    def make_plans(self) -> None:
        """Plan with every planner whose plan is not known yet."""
        folder = self._config.beside("_plans")
        for name in self._config.planners.split(","):
            if name in self._entry["planners"]:
                continue
            path = folder / f"{self._workload.name}_{name}.json"
            try:
                entry = self._ranks.on_first(
                    lambda name=name, path=path: self._desk.plan(name, path)
                )
                self._tell(f"{name} planned in {entry['planning_seconds']:.1f} s")
            except RunError as error:
                entry = {"failed": f"planning: {error}", "rounds": []}
                self._tell(f"{name} failed in planning: {error}")
            self._entry["planners"][name] = entry
            self._results.save()

    def _plan_of(self, name: str) -> ShardingPlan:
        path = self._config.beside("_plans") / self._entry["planners"][name]["plan"]
        plan: ShardingPlan = self._ranks.on_first(lambda: read_plan(path).plan)
        return plan

    def train(self) -> None:
        """Train the plans round by round; a plan that fails drops out."""
        for number in range(self._config.rounds):
            order = list(self._entry["planners"])
            random.Random(number).shuffle(order)
            for name in order:
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
                reference=self._read_reference if self._reference else None,
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
    speeds = _speeds(workload, trained)
    first = next(iter(trained.values()), None)
    return {
        name: _judge_one(entry, trained.get(base or ""), first, speeds, workload)
        for name, entry in trained.items()
    }


def _speeds(workload: dict[str, Any], trained: dict[str, Any]) -> list[float]:
    """How fast the machine was in each round, beside when kernels were measured."""
    nominal = workload["nominal_reference_ms"] * workload["reference_slowdown"]
    speeds = []
    for number in range(max((len(e["rounds"]) for e in trained.values()), default=0)):
        references = [
            ms
            for e in trained.values()
            if len(e["rounds"]) > number
            for ms in e["rounds"][number]["reference_ms"]
        ]
        read = statistics.median(references)
        speeds.append(nominal / read if nominal and read else 1.0)
    return speeds


def _judge_one(
    entry: dict[str, Any],
    base: dict[str, Any] | None,
    first: dict[str, Any] | None,
    speeds: Sequence[float],
    workload: dict[str, Any],
) -> dict[str, Any]:
    rounds = entry["rounds"]

    def scaled(take: Callable[[dict[str, Any]], Sequence[float]]) -> float:
        return statistics.median(
            ms * speed
            for r, speed in zip(rounds, speeds, strict=False)
            for ms in take(r)
        )

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


def _commit() -> str:
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        check=False,
    )
    return found.stdout.strip() or "unknown"


def _describe(config: RunConfig, ranks: Ranks, costs: str) -> dict[str, Any]:
    """What the results belong to."""
    folder = source_folder(costs)
    return {
        "command": " ".join(map(shlex.quote, ["torchrun", *sys.argv])),
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
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
    free = ranks.free_bytes()
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
        config = RunConfig.from_arguments(arguments)
        ranks = Ranks(config)
        run(config, ranks)
    except (RunError, NeuroShardError) as error:
        print(f"rank {os.environ.get('RANK', '?')}: {error}", file=sys.stderr)
        return 2
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
