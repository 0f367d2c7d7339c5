"""Train our plans and TorchRec's side by side, and compare what jobs take.

    make race                                    # two CPU ranks, gloo
    torchrun --nproc-per-node 8 benchmarks/race_plans.py --cost-model my_bundle \\
        --max-gib 40 --out race_8xh100           # eight GPUs, NCCL

Each task is a DLRM with published tables. Four planners plan it, and the first of
TorchRec's plans is trained twice: the difference of the two is noise. The models of all
plans are in memory at once, and a round trains a few iterations of each, in changing
order. `<out>.json` holds every round, `<out>.md` the comparison.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed.types import ShardingPlan

from harness.models import draw_batches, profile_tables
from harness.options import RunError, option
from harness.pages import write_page
from harness.planning import BEST_PRACTICE, PLANNERS, PlanningDesk
from harness.provenance import describe_run
from harness.race_page import AGAIN, DENSE, page
from harness.race_summary import summary
from harness.race_tasks import Task, make_tasks
from harness.ranks import Ranks, SpeedReference, run_on_ranks
from harness.training_runs import TrialConfig, TrialError, TrialResult, train_in_turn
from torchrec_neuroshard import load_cost_model
from torchrec_neuroshard.costs.simulator import PHASES
from torchrec_neuroshard.models.base import CommsModel
from torchrec_neuroshard.models.collectives import BandwidthCommsModel

MOST_DRIFT = 1.3
"""Fastest over slowest quarter of a task's rounds. Above it, the task is repeated."""
_GIB = 2**30


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RaceConfig:
    """Options of the race: each field is an option with the same name."""

    out: str = option("race", "path of the results, without suffix")
    backend: str = option("auto", "nccl, gloo, or auto: nccl if there are GPUs")
    cost_model: str = option("auto", "bundle measured on this machine; auto: nearest")
    tables: str = option("", "JSON file of published table sets; empty: generated ones")
    tasks: str = option("", "names of tasks, with commas; empty: all")
    planners: str = option(",".join(PLANNERS), "planners to race")
    num_tasks: int = option(20, "tasks, the first of the list")
    rounds: int = option(40, "rounds; each trains every plan")
    iterations: int = option(2, "timed iterations of a plan in a round")
    phase_iterations: int = option(1, "further iterations with timed phases")
    max_gib: float = option(1.5, "most GiB of a model; all plans' models are held")
    seed: int = option(0, "seed of tables, batches and weights")

    def __post_init__(self) -> None:
        if self.backend not in ("auto", "nccl", "gloo"):
            raise RunError(
                f"--backend must be nccl, gloo or auto, got '{self.backend}'"
            )
        if unknown := set(self.planners.split(",")) - set(PLANNERS):
            raise RunError(
                f"unknown planners in --planners: {', '.join(sorted(unknown))}; known: "
                f"{', '.join(PLANNERS)}"
            )
        if BEST_PRACTICE not in self.planners.split(","):
            raise RunError(f"--planners must have {BEST_PRACTICE}, which is run twice")
        for name in ("num_tasks", "iterations", "phase_iterations"):
            if getattr(self, name) < 1:
                raise RunError(
                    f"--{name.replace('_', '-')} must be at least 1, got "
                    f"{getattr(self, name)}"
                )
        if self.rounds < 2:
            raise RunError("--rounds must be at least 2: their difference is the noise")
        if not self.max_gib > 0:
            raise RunError(f"--max-gib must be above 0, got {self.max_gib}")


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


def measure_bandwidths(ranks: Ranks) -> dict[str, float]:
    """Return the bandwidths of an all-to-all and of a large copy [GB/s].

    Bytes that stay on a rank do not count, unless there is only one rank.
    """
    part = 2**22
    sent = torch.zeros(part * ranks.world_size, device=ranks.device)
    received = torch.empty_like(sent)
    once_ms = median_step_ms(lambda: dist.all_to_all_single(received, sent), ranks)
    link = 4 * part * max(1, ranks.world_size - 1) / once_ms / 1e6
    source = torch.zeros(2**26, device=ranks.device)
    target = torch.empty_like(source)
    once_ms = median_step_ms(lambda: target.copy_(source), ranks)
    return {"all_to_all": link, "memory": 2 * 4 * source.numel() / once_ms / 1e6}


class Race:
    """Plans and trains tasks on these ranks."""

    def __init__(self, config: RaceConfig, ranks: Ranks) -> None:
        """Measure bandwidths and load the cost model."""
        self._config, self._ranks = config, ranks
        self.bandwidths = measure_bandwidths(ranks)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.cost_model = load_cost_model(
                config.cost_model,
                device_type=ranks.device.type,
                hbm_gb_per_s=self.bandwidths["memory"] if ranks.on_gpu else None,
            )
        self.comms_model = self._find_comms_model()
        memory = "hbm" if ranks.on_gpu else "ddr"
        # TorchRec counts bandwidths in bytes per millisecond.
        link = self.bandwidths["all_to_all"] * 1e6
        self._topology: dict[str, Any] = {
            **ranks.topology,
            f"{memory}_cap": ranks.free_bytes(),
            f"{memory}_mem_bw": self.bandwidths["memory"] * 1e6,
            "intra_host_bw": link,
            "inter_host_bw": link,
        }
        self._reference = SpeedReference(ranks)

    def _find_comms_model(self) -> CommsModel:
        """Return the bundle's measured collectives, or a model of one bandwidth."""
        with contextlib.suppress(RunError):
            return self._ranks.comms_model(self._config.cost_model)
        link = self.bandwidths["all_to_all"]
        return BandwidthCommsModel(
            world_size=self._ranks.world_size,
            local_world_size=self._ranks.local_world_size,
            intra_gb_per_s=link,
            inter_gb_per_s=link,
            source="measured at the start",
        )

    def run(self, task: Task) -> dict[str, Any]:
        """Return the plans of a task, their predictions and all rounds."""
        config, ranks = self._config, self._ranks
        batches = draw_batches(
            task.tables, task.batch_size, config.seed, ranks.rank, ranks.device
        )
        plans, entries = ranks.on_first(functools.partial(self._plan, task))
        entries[DENSE] = {"rounds": no_rounds()}
        trial = TrialConfig(
            iterations=config.iterations,
            phase_iterations=config.phase_iterations,
            seed=config.seed,
        )

        def fail(name: str, error: TrialError) -> None:
            entries[name]["failed"] = str(error)

        for name, found in train_in_turn(
            {**plans, DENSE: None},
            config.rounds,
            task.tables,
            batches,
            trial,
            control=ranks.control,
            reference=self._reference.read,
            on_failure=fail,
        ):
            keep(entries[name]["rounds"], found)
        return {
            "name": task.name,
            "num_tables": len(task.tables),
            "num_cut": task.num_cut,
            "gib": task.held_bytes / _GIB,
            "batch_size": task.batch_size,
            "optimizer": task.tables[0].optimizer,
            "drift": drift_of(entries),
            "plans": entries,
        }

    def _plan(self, task: Task) -> tuple[dict[str, ShardingPlan], dict[str, Any]]:
        """Return the plans and their entries in the results; run it on one rank."""
        profiles = profile_tables(
            task.tables, task.batch_size, self._config.seed, self._ranks.world_size
        )
        desk = PlanningDesk(
            task.tables,
            profiles,
            topology=self._topology,
            batch_size=task.batch_size,
            cost_model=self.cost_model,
            comms_model=self.comms_model,
        )
        plans, entries = {}, {}
        for name in self._config.planners.split(","):
            plans[name], _, entry = desk.plan(name)
            entries[name] = {
                **entry,
                "shards": shards_of(plans[name]),
                "rounds": no_rounds(),
            }
        plans[AGAIN] = plans[BEST_PRACTICE]
        entries[AGAIN] = {**entries[BEST_PRACTICE], "rounds": no_rounds()}
        return plans, entries


def shards_of(plan: ShardingPlan) -> dict[str, str]:
    """Return table -> sharding type, then rank and width of each shard."""
    found = {}
    for module_plan in plan.plan.values():
        for name, sharding in module_plan.items():
            spec = sharding.sharding_spec
            parts = (
                ""
                if spec is None
                else " ".join(
                    f"{rank}:{shard.shard_sizes[1]}"
                    for rank, shard in zip(sharding.ranks, spec.shards, strict=True)
                )
            )
            found[name] = f"{sharding.sharding_type} {parts}".strip()
    return dict(sorted(found.items()))


def no_rounds() -> dict[str, list[Any]]:
    """Return the columns of a plan's rounds, still empty."""
    columns = ("iteration_ms", "phases_ms", "rank_compute_ms", "losses")
    return {name: [] for name in (*columns, "reference_ms")}


def keep(rounds: dict[str, list[Any]], found: TrialResult) -> None:
    """Add a round to the columns, in tenths and hundredths of a millisecond.

    Args:
        rounds: Columns, each with a value for each round.
        found: The plan's result. Phases are medians over its iterations, those of
            kernels on each rank.
    """

    def of_rank(phase: str, rank: int) -> float:
        return round(statistics.median(found.rank_phases_ms[phase][rank]), 1)

    timed = len(found.embedding_ms) > 0
    rounds["iteration_ms"].append([round(ms, 2) for ms in found.iteration_ms])
    if timed:
        phases = (statistics.median(found.phases_ms[name]) for name in PHASES)
        rounds["phases_ms"].append([round(ms, 1) for ms in phases])
        rounds["rank_compute_ms"].append(
            [
                [of_rank(phase, rank) for phase in ("fwd_compute", "bwd_compute")]
                for rank in range(len(found.weight_bytes))
            ]
        )
    rounds["losses"].append([round(x, 6) for x in (found.losses[0], found.losses[-1])])
    rounds["reference_ms"].append(round(statistics.median(found.reference_ms), 2))


def drift_of(entries: dict[str, Any]) -> float:
    """Return how much the machine's speed varied during a task.

    A round's speed is the mean time of all plans; the result is the third quartile of
    the rounds over the first.
    """
    times = [e["rounds"]["iteration_ms"] for e in entries.values()]
    means = [
        statistics.mean(map(statistics.mean, each))
        for each in zip(*times, strict=False)
    ]
    low, _, high = statistics.quantiles(means, n=4) if len(means) > 1 else (1, 1, 1)
    return high / low


def run(config: RaceConfig, ranks: Ranks) -> None:
    """Race all tasks, and write the results after each."""
    start = time.monotonic()
    path = Path(config.tables) if config.tables else None
    tasks = make_tasks(path, config.seed, int(config.max_gib * _GIB))
    if config.tasks:
        wanted = config.tasks.split(",")
        if unknown := set(wanted) - {t.name for t in tasks}:
            raise RunError(
                f"unknown tasks in --tasks: {', '.join(sorted(unknown))}; known: "
                f"{', '.join(t.name for t in tasks)}"
            )
        tasks = [t for t in tasks if t.name in wanted]
    race = Race(config, ranks)
    data: dict[str, Any] = {
        **describe_run(ranks.device, "torchrun"),
        "config": dataclasses.asdict(config),
        "backend": ranks.backend,
        "world_size": ranks.world_size,
        "cost_model": {
            "name": race.cost_model.name,
            "hardware": race.cost_model.hardware,
            "source": race.cost_model.source,
            "comms_source": race.comms_model.source,
            "reference_ms": float(getattr(race.cost_model, "reference_ms", 0.0)),
        },
        "bandwidths_gb_per_s": race.bandwidths,
        "most_drift": MOST_DRIFT,
        "tasks": [],
    }
    for task in tasks[: config.num_tasks]:
        found = race.run(task)
        if found["drift"] > MOST_DRIFT:
            found = {**race.run(task), "repeated": True}
        data["tasks"].append(found)
        data["minutes"] = (time.monotonic() - start) / 60
        if ranks.rank == 0:
            write_page(Path(config.out), data, page(data))
            print(f"wrote {config.out}.md after {data['minutes']:.0f} minutes")
            print(summary(found, data), flush=True)


def start(config: RaceConfig) -> Ranks:
    """Start the ranks, at least two."""
    ranks = Ranks(config.backend)
    if ranks.world_size < 2:
        raise RunError("one rank leaves nothing to place; start at least two ranks")
    return ranks


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the race and return the exit code."""
    # Hide notices of torch and TorchRec about their internals.
    for name in ("torch.fx", "root"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    return run_on_ranks(RaceConfig, arguments, __doc__ or "", start, run)


if __name__ == "__main__":
    sys.exit(main())
