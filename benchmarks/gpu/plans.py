"""Compare planners with only minutes on a GPU: plan and evaluate on a CPU.

    python benchmarks/gpu/plans.py make --bundle B --tables T --out plans.pkl
    python benchmarks/gpu/plans.py expect plans.pkl --bundle B --out expected
    python benchmarks/gpu/plans.py time plans.pkl --out passes.pkl --seconds 100
    python benchmarks/gpu/plans.py judge plans.pkl passes.pkl --bundle B --out race

`make` plans tasks with every planner. `expect` writes the page of `judge` with the
bundle's predictions in the place of measured kernels: what one expects before looking.
`time` times the kernels of all plans; it needs no planner and no cost model. `judge`
writes the files of `compare_planners.py`, and `<out>_kernels.jsonl`: the measured
sets, which `neuroshard train` reads. A plan's stage names the record of each rank.

TorchRec's plans depend on Python's hash seed, so set `PYTHONHASHSEED=0` for `make`.
Files are written after each task, so `make` can be stopped once there are enough tasks.
`time` ends after its seconds, and a second call continues with the remaining tasks. The
`.pkl` files are compressed pickles, which can run code when they are read. Read only
your own.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gzip
import logging
import os
import pickle
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from planner_comparison.planning import Outcome
    from planner_comparison.plans import Kernel, RunPlan, Times
    from planner_comparison.tasks import Task

# Each command imports what it needs, so that `time` loads no planner.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness.options import add_option
from torchrec_neuroshard.files import write_whole

PLANNERS = (
    "default",
    "default, columns only",
    "default, nothing measured",
    "embark",
    "torchrec, best practice",
    "torchrec, all types",
    "torchrec, all types, min_partition=32",
    "torchrec, best practice, default bandwidth",
    "torchrec, all types, default bandwidth",
    "torchrec, all types, min_partition=32, default bandwidth",
)
PLAN_SECONDS = 120.0
ROUNDS, PASSES = 2, 2
"""Timing rounds, and passes of a kernel in each round."""
_LEVEL = 6
"""Of compression: plans of 30 tasks take 0.3 MB instead of 3."""


def make(args: argparse.Namespace) -> None:
    """Plan the tasks with every planner."""
    from planner_comparison.planning import Planners, PlanningSettings
    from planner_comparison.run import describe_rivals, with_again

    others = (f"default, bundle {args.other}",) if args.other else ()
    planning = PlanningSettings(
        names=(*args.planners, *others),
        cost_model=args.bundle,
        device=args.device,
        plan_seconds=PLAN_SECONDS,
        other=args.other,
    )
    planners = Planners(planning, args.processes)
    options = {k: v for k, v in vars(args).items() if k != "run"}
    rivals = describe_rivals(planning)
    made: dict[str, Any] = {"rivals": rivals, "options": options, "tasks": []}
    tasks = choose_tasks(args)
    try:
        for task in tasks:
            found = with_again(planners.plan(task))
            # Outcomes are not pickled, since `time` cannot load their class.
            entries = {
                name: {f.name: getattr(o, f.name) for f in dataclasses.fields(o)}
                for name, o in found.items()
            }
            made["tasks"].append((task, entries))
            write(args.out, made)
            ended = {n: f"{o.status}, {o.seconds:.1f} s" for n, o in found.items()}
            print(f"{len(made['tasks'])}/{len(tasks)} {task.name}: {ended}", flush=True)
    finally:
        planners.close()


def choose_tasks(args: argparse.Namespace) -> list[Task]:
    """Return the tasks, each on the first cluster with its number of ranks."""
    from planner_comparison.clusters import cluster_of
    from planner_comparison.tasks import TaskSettings, make_tasks

    settings = TaskSettings(
        batch_size=args.batch_size,
        max_rows=args.max_rows,
        seed=args.seed,
        quick=args.quick,
        device_type=args.device,
    )
    tasks = make_tasks(args.tables, settings)
    wanted = [t for t in tasks if t.world_size in args.worlds]
    return [
        dataclasses.replace(t, cluster=cluster_of(t.world_size).name)
        for t in wanted[: args.num_tasks]
    ]


def plans_of(entries: Mapping[str, Mapping[str, Any]]) -> list[RunPlan]:
    """Return all plans of a task."""
    return [e["plan"] for e in entries.values() if e["plan"] is not None]


def time_plans(args: argparse.Namespace) -> None:
    """Time the kernels of all plans, task after task, until the time is up."""
    end = time.monotonic() + args.seconds
    import torch

    from planner_comparison.kernels import KernelSettings, KernelTimer
    from torchrec_neuroshard.hardware.devices import free_cached_memory
    from torchrec_neuroshard.measure.kernels import device_fingerprint

    torch.set_num_threads(1)
    tasks = read(args.plans)["tasks"]
    timed = read(args.out) if args.out.exists() else {"passes": {}}
    device = torch.device(args.device)
    timer = KernelTimer(
        device,
        max(max(p.rank_bytes) for _, entries in tasks for p in plans_of(entries)),
        timed.get("reference_ms", 0.0),
        KernelSettings(rounds=ROUNDS, passes=PASSES),
    )
    timed["reference_ms"] = timer.reference_ms
    timed["hardware"] = dataclasses.asdict(device_fingerprint(device, 1))
    taken: list[float] = []
    for task, entries in tasks:
        start = time.monotonic()
        if task.name in timed["passes"]:
            continue
        # The first task also loads kernels.
        if start + max(taken[1:] or taken, default=0.0) > end:
            print("the time is up", flush=True)
            break
        try:
            raw = timer.measure(plans_of(entries))
        except torch.OutOfMemoryError as error:
            print(f"{task.name} does not fit: {str(error).splitlines()[0]}", flush=True)
            raw = {}
        if not raw:  # outside of the handler, which holds what was allocated
            free_cached_memory(device)
            continue
        timed["passes"][task.name] = list(raw.values())
        write(args.out, timed)
        taken.append(time.monotonic() - start)
        print(f"{task.name}: {len(raw)} kernels in {taken[-1]:.1f} s", flush=True)


def expect(args: argparse.Namespace) -> None:
    """Write the page of `judge` with predicted kernels."""
    import torch

    from torchrec_neuroshard.bundles.find import load_cost_model
    from torchrec_neuroshard.measure.kernels import device_fingerprint

    hardware = dataclasses.asdict(device_fingerprint(torch.device("cpu"), 1))
    model = load_cost_model(args.bundle, device_type=args.device)
    hardware |= {"device": model.hardware, "device_type": args.device}
    compare(args, read(args.plans), hardware)


def judge(args: argparse.Namespace) -> None:
    """Write measured times with published collectives, and predicted times."""
    timed = read(args.timed)
    compare(args, read(args.plans), timed["hardware"], timed)


def compare(
    args: argparse.Namespace,
    made: Mapping[str, Any],
    hardware: Mapping[str, Any],
    timed: Mapping[str, Any] | None = None,
) -> None:
    """Write the results and their page.

    Args:
        args: Options of the command.
        made: File of `make`.
        hardware: Device that the kernels ran on, or are predicted for.
        timed: File of `time`. None: kernels take their predicted times.
    """
    from planner_comparison import run
    from planner_comparison.page import write_page
    from planner_comparison.planning import Outcome, PlanningSettings
    from planner_comparison.results import read_results, write_results

    planning = PlanningSettings(cost_model=args.bundle, device=hardware["device_type"])
    data = run.describe(
        planning,
        rivals=made["rivals"],
        hardware=hardware,
        options=made["options"],
        num_tasks=len(made["tasks"]),
    )
    data |= {"is_predicted": timed is None}
    kept = None if timed is None else Kernels(args.out, timed, made["options"])
    for task, entries in made["tasks"]:
        if kept is not None and not kept.has(task):
            continue
        outcomes = {name: Outcome(**entry) for name, entry in entries.items()}
        times = None if kept is None else kept.add(task, plans_of(entries))
        judged = run.judge(task, outcomes, times, planning)
        if kept is not None:
            kept.name_in(judged, outcomes)
        # The usual speed of a GPU is not known.
        speed = {"machine_speed": 1.0}
        data["tasks"].append({**task.to_json(), **speed, "planners": judged})
    if kept is not None:
        kept.close()
    write_results(data, args.out)
    write_page(read_results(args.out), args.out)


class Kernels:
    """The measured kernels of all plans, as a file of records."""

    def __init__(
        self, out: Path, timed: Mapping[str, Any], options: Mapping[str, Any]
    ) -> None:
        """Begin `<out>_kernels.jsonl`; it replaces a file of that name.

        Args:
            out: Path of the results, without suffix.
            timed: File of `time`.
            options: Options of `make`.
        """
        from planner_comparison.results import at
        from torchrec_neuroshard.measure.kernels import BOUNDS_CHECK
        from torchrec_neuroshard.measure.records import Fingerprint, RunHeader
        from torchrec_neuroshard.measure.store import RecordStore

        header = RunHeader(
            fingerprint=Fingerprint(**timed["hardware"]),
            reference_ms=timed["reference_ms"],
            seed=options["seed"],
            sampling={"plans": {k: str(v) for k, v in options.items()}},
            command=" ".join(sys.argv),
            bounds_check=BOUNDS_CHECK,
        )
        path = at(out, "_kernels.jsonl")
        path.unlink(missing_ok=True)
        self._store, self._timed = RecordStore(path, header), timed
        self._numbers: dict[Kernel, int] = {}

    def has(self, task: Task) -> bool:
        """Return whether the task's kernels were timed."""
        return task.name in self._timed["passes"]

    def add(self, task: Task, plans: Sequence[RunPlan]) -> Times:
        """Append the sets of a task. Replicas and copies of outputs are no sets.

        Args:
            task: The task.
            plans: Its plans, as they were when they were timed.

        Returns:
            Median forward and backward of each kernel [ms].
        """
        from planner_comparison.kernels import kernels_of, median_times
        from planner_comparison.plans import KernelSet, with_profiles
        from torchrec_neuroshard.measure.records import CostRecord, relative_spread

        kernels, timed = kernels_of(plans), self._timed["passes"][task.name]
        passes = dict(zip(kernels, timed, strict=True))
        times = median_times(passes, self._timed["reference_ms"])
        self._numbers.clear()
        for kernel, found in passes.items():
            if not isinstance(kernel, KernelSet) or kernel.replicated:
                continue
            first = dataclasses.replace(kernel, copy=0)
            index = len(self._store.records)
            self._store.append(
                CostRecord(
                    index=index,
                    repeat_of=self._numbers.get(first) if kernel.copy else None,
                    batch_size=kernel.batch_size,
                    tables=tuple(with_profiles(kernel)),
                    fwd_ms=times[kernel][0],
                    bwd_ms=times[kernel][1],
                    num_passes=len(found),
                    spread=relative_spread(
                        [(p.fwd_ms + p.bwd_ms) / (p.reference_ms or 1.0) for p in found]
                    ),
                )
            )
            self._numbers[kernel] = index
        return times

    def name_in(
        self, judged: Mapping[str, Any], outcomes: Mapping[str, Outcome]
    ) -> None:
        """Add the record's index of each rank to the measured stages of a task."""
        for name, entry in judged.items():
            plan = outcomes[name].plan
            for stage, ran in zip(
                entry.get("measured", {}).get("stages", ()),
                plan.stages if plan else (),
                strict=True,
            ):
                stage["kernels"] = [k and self._numbers.get(k) for k in ran.kernels]

    def close(self) -> None:
        """Write the file."""
        self._store.close()


def write(path: Path, data: Any) -> None:
    """Write a compressed pickle; the file is never half written."""
    write_whole(path, gzip.compress(pickle.dumps(data), _LEVEL))


def read(path: Path) -> Any:
    """Return the data that `write` wrote."""
    return pickle.loads(gzip.decompress(path.read_bytes()))


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options, with the command's function as `run`."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(required=True, metavar="make|expect|time|judge")
    add: Callable[..., None]
    own = commands.add_parser("make", help="plan tasks with every planner, on a CPU")
    own.set_defaults(run=make)
    add = functools.partial(add_option, own)
    add("bundle", ..., "name or folder of the cost model", str)
    add("tables", None, "JSON of published table sets", Path)
    add("device", "cuda", "device type to plan for")
    add("planners", PLANNERS, "planners to run", str, nargs="+")
    add("other", None, "bundle of another device, for one more planner", str)
    add("batch_size", 65_536, "samples over all ranks")
    add("max_rows", 10_000_000, "most rows of a table")
    add("worlds", [8, 16], "numbers of ranks", int, nargs="+")
    add("num_tasks", None, "run only the first tasks", int)
    add("seed", 0, "seed of the tasks")
    add("processes", 2, "planners at the same time; 0: in this process")
    add("quick", False, "dry run with small tasks")
    own = commands.add_parser("time", help="time kernels of all plans, on a GPU")
    own.set_defaults(run=time_plans)
    add = functools.partial(add_option, own)
    add("device", "cuda", "device to time on")
    add("seconds", 100.0, "time limit")
    own = commands.add_parser("expect", help="predict what `judge` will write")
    own.set_defaults(run=expect)
    add_option(own, "device", "cuda", "device type of `make`")
    own = commands.add_parser("judge", help="compare the plans, on a CPU")
    own.set_defaults(run=judge)
    for name in ("time", "expect", "judge"):
        commands.choices[name].add_argument("plans", type=Path)
    own.add_argument("timed", type=Path, help="file of `time`")
    for name in ("expect", "judge"):
        add_option(commands.choices[name], "bundle", ..., "cost model of `make`", str)
    for own in commands.choices.values():
        add_option(own, "out", ..., "file, or path of the results without suffix", Path)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    # One thread for all libraries, here and in processes started from here.
    os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    options = parse_arguments()
    options.run(options)
