"""Plans of all sharding types beside TorchRec's, by the same predicted costs.

    python benchmarks/bench_types.py --tables real_tables.json --out results/types

writes `<out>.json` and `<out>.md` after every task; `--resume` goes on where an earlier
call stopped, `--only 'mlperf-*/h100'` takes the tasks of these names. For each task:

- ours alone: `NeuroShardPlanner(consider_stock=False)` with every sharding type;
- TorchRec's best: its planner by default and with splits down to 32 columns, each with
  its default proposers and with dynamic programming, priced by our costs;
- ours with fewer choices: more choices must not make a plan worse.

Nothing is trained: milliseconds are predictions, by a model of CPU kernels (`cpu`) and
by the estimate for an H100 (`h100`). Both plan for topologies of GPUs, since TorchRec
offers row-wise sharding for these only. Seconds of `plan()` are the process's CPU time,
and all limits of time count them, so that other work on the machine ends no search.
Where a gap is not called proven the bound is an estimate.

`--longer 3` plans with the first choices 3 times more, each with another seed and ten
times the steps, restarts and seconds. The best of these plans splits a gap in two: so
much is the plan's, at least; of the rest nobody knows whether it is the plan's or the
bound's.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import logging
import math
import signal
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from torchrec.distributed.planner import (
    EmbeddingShardingPlanner,
    ParameterConstraints,
    planners,
)
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.proposers import DynamicProgrammingProposer
from torchrec.distributed.planner.shard_estimators import EmbeddingPerfEstimator
from torchrec.distributed.planner.storage_reservations import (
    FixedPercentageStorageReservation,
)
from torchrec.distributed.planner.types import PlannerError
from torchrec.distributed.types import ShardingType

from bench_search import make_dlrm_task, make_job, make_task
from harness.planning import count_types
from harness.provenance import describe_run, keep_rows, kept_rows
from torchrec_neuroshard import (
    NeuroShardPlanner,
    SearchConfig,
    TableConfig,
    topology_for,
)
from torchrec_neuroshard.planner.parts.shard_estimators import StorageEstimator
from torchrec_neuroshard.workloads import load_json, mlperf_dlrm_v2

GIB = 2**30
NODE = 8
RESERVED = 0.1
"""Share of the memory that no planner may fill."""
LONGER = 10
"""Times as many steps, restarts without a gain and CPU seconds as a search has."""
TOLERANCE = 1e-3
"""A plan that is worse by no more than this share counts as equal."""
CARD = "h100"
MODELS = {"cpu": "cpu", "h100": CARD}
"""Costs -> cost model; nodes and links are the card's in both."""
FREE = "free"
LIMITS: dict[str, dict[str, list[str]]] = {
    # By name: TorchRec offers grid shards to those who ask for them only.
    FREE: {"sharding_types": [t.value for t in ShardingType]},
    "as offered": {},
    "columns": {"sharding_types": ["table_wise", "column_wise"]},
    "rows": {"sharding_types": ["row_wise", "table_row_wise", "grid_shard"]},
    "fused": {"compute_kernels": ["fused"]},
    "columns+row-wise": {"sharding_types": ["column_wise", "row_wise"]},
}
"""Name -> constraints on every table."""
SUBSETS = {
    FREE: tuple(n for n in LIMITS if n != FREE),
    "as offered": ("columns", "fused", "columns+row-wise"),
}
"""Name -> those that allow nothing else; no plan of theirs may be better."""
Sizes = Sequence[tuple[float, int, int]]
"""Rows, width and ids per sample of each table."""
EXACT: Sizes = (
    (1e8, 256, 20),
    (3e8, 128, 5),
    (1e9, 128, 1),
    (2e9, 64, 50),
    (5e9, 64, 1),
)
QUICK = "mlperf-4/*,dlrm-0/*,dlrm-1/*,production-100x8/cpu,huge-exact/h100"


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """Tables of one optimizer, ranks, memory, and what planners may choose from."""

    name: str
    tables: tuple[TableConfig, ...]
    ranks: int
    batch_size: int = 2_048
    """Samples per rank."""
    memory_bytes: int = 80 * GIB
    host_bytes: int = 256 * GIB
    """Per rank, as the device's memory."""
    min_partition: int | None = None
    costs: str = "cpu"
    limits: tuple[str, ...] = (FREE, "as offered", "columns", "rows")
    all_rivals: bool = False
    """Whether TorchRec plans with fewer choices, too."""

    def shared(self, limit: str, **more: Any) -> dict[str, Any]:
        """Return the arguments that all planners get."""
        chosen = {"min_partition": self.min_partition, **LIMITS[limit], **more}
        return {
            "topology": topology_for(
                CARD,
                num_nodes=-(-self.ranks // NODE),
                ranks_per_node=min(NODE, self.ranks),
                memory_gb=self.memory_bytes / 1e9,
                host_memory_gb=self.host_bytes * min(NODE, self.ranks) / 1e9,
            ),
            "batch_size": self.batch_size,
            "storage_reservation": FixedPercentageStorageReservation(RESERVED),
            "constraints": {
                t.name: ParameterConstraints(
                    pooling_factors=[t.pooling_factor], **chosen
                )
                for t in self.tables
            },
            "stats": [],
            "debug": False,
        }

    def job(self) -> tuple[Any, Any]:
        """Return the model with its optimizer, and the sharders: what is planned."""
        return make_job(self.tables)


def make_tasks(path: Path | None) -> Iterator[Task]:
    """Return all tasks; EMBark's are read from a file of published tables."""
    mlperf = _with_optimizer(mlperf_dlrm_v2(), "rowwise_adagrad")
    tasks = [Task(name=f"mlperf-{w}", tables=mlperf, ranks=w) for w in (4, 8, 16)]
    sets = {} if path is None else load_json(path)
    for name in ("T180", "T200") if sets else ():
        own = _with_optimizer(sets[f"nvidia_embark_{name}"], "rowwise_adagrad")
        tasks.append(Task(name=f"embark-{name}", tables=own, ranks=16))
    plain: dict[str, Any] = {"batch_size": 512}
    for number in range(20):
        own = _with_optimizer(make_dlrm_task(number).tables, "sgd")
        # Every other task is tight: little more than the tables fits.
        tight = 1.3 * sum(t.weight_bytes for t in own) / 8 + GIB / 4
        room = int(tight / (1 - RESERVED)) if number % 2 else 80 * GIB
        name = f"dlrm-{number}"
        tasks.append(Task(name=name, tables=own, ranks=8, memory_bytes=room, **plain))
    for count, ranks in ((100, 8), (1_000, 64)):
        own = _with_optimizer(make_task(count, ranks, 0).tables, "sgd")
        name = f"production-{count}x{ranks}"
        tasks.append(Task(name=name, tables=own, ranks=ranks, **plain))
    huge: dict[str, Any] = {
        "limits": tuple(LIMITS),
        "all_rivals": True,
        "min_partition": 32,
    }
    tasks.append(Task(name="huge-exact", tables=tables_of(EXACT), ranks=64, **huge))
    for ranks in (16, 64):
        for seed in range(5):
            own = tables_of(_huge(np.random.default_rng([seed, ranks])))
            own = _with_optimizer(own, ("sgd", "rowwise_adagrad")[seed % 2])
            name = f"huge-{ranks}-{seed}"
            tasks.append(Task(name=name, tables=own, ranks=ranks, **huge))
    for task in tasks:
        for costs in MODELS:
            yield replace(task, name=f"{task.name}/{costs}", costs=costs)


def _with_optimizer(
    tables: Sequence[TableConfig], name: str
) -> tuple[TableConfig, ...]:
    return tuple(replace(t, optimizer=name) for t in tables)


def tables_of(sizes: Sizes) -> tuple[TableConfig, ...]:
    return tuple(
        TableConfig(
            name=f"t{i}",
            num_embeddings=int(r),
            embedding_dim=d,
            pooling_factor=float(p),
        )
        for i, (r, d, p) in enumerate(sizes)
    )


def _huge(rng: np.random.Generator) -> Sizes:
    """Draw 5 to 10 tables of 10 million to 5 billion rows."""
    widths, pooling = (32, 64, 128, 256), (1, 5, 20, 80)
    return [
        (
            10 ** rng.uniform(7, np.log10(5e9)),
            int(rng.choice(widths)),
            int(rng.choice(pooling)),
        )
        for _ in range(rng.integers(5, 11))
    ]


def _planner(task: Task, limit: str, **more: Any) -> NeuroShardPlanner:
    return NeuroShardPlanner(
        **task.shared(limit),
        cost_model=MODELS[task.costs],
        profiles={t.name: t.profile for t in task.tables if t.profile is not None},
        consider_stock=False,
        **more,
    )


def judge(task: Task, limit: str, rival_seconds: float) -> dict[str, Any]:
    """Plan with these choices, by us and where asked by TorchRec."""
    planner = _planner(task, limit)
    start = time.process_time()
    try:
        with mock.patch.object(time, "monotonic", time.process_time):
            plan = planner.plan(*task.job())
    except Exception as error:  # a failure is a result; no plan may be one rightly
        kind = "no plan" if isinstance(error, PlannerError) else "crashed"
        text = f"{kind}: {type(error).__name__}: {error}"[:200]
        return {"failed": text, "seconds": time.process_time() - start}
    seconds = time.process_time() - start
    result = planner.last_result
    assert result is not None
    row: dict[str, Any] = {
        "ms": result.predicted.critical_path_ms,
        "seconds": seconds,
        "bound_ms": result.lower_bound_ms,
        "bound_is_proven": result.bound_is_proven,
        "fallback": result.fallback,
        "types": count_types(plan),
    }
    if limit == FREE or task.all_rivals:
        splits = {"default": {}, "min 32": {"min_partition": 32}}
        row["torchrec"] = {
            f"{name}{', dp' * dp}": _rival(
                task, limit, more, planner, dp, rival_seconds
            )
            for name, more in splits.items()
            if not more or more["min_partition"] != task.min_partition
            for dp in (False, True)
        }
    return row


def search_longer(task: Task, limit: str, seed: int) -> dict[str, Any]:
    """Plan with these choices for ten times as long at most."""
    usual = SearchConfig()
    search = SearchConfig(
        effort=LONGER * usual.effort,
        restarts=LONGER * usual.restarts,
        time_budget_seconds=LONGER * usual.time_budget_seconds,
        seed=seed,
    )
    planner = _planner(task, limit, search=search)
    start = time.process_time()
    with mock.patch.object(time, "monotonic", time.process_time):
        planner.plan(*task.job())
    result = planner.last_result
    assert result is not None
    return {
        "seed": seed,
        "seconds": time.process_time() - start,
        "ms": result.predicted.critical_path_ms,
        "bound_ms": result.lower_bound_ms,
        "bound_is_proven": result.bound_is_proven,
    }


def _rival(
    task: Task,
    limit: str,
    more: dict[str, int],
    planner: NeuroShardPlanner,
    dynamic: bool,
    most_seconds: float,
) -> dict[str, Any]:
    """Plan with TorchRec's planner, and price the plan by our planner's costs."""
    shared = task.shared(limit, **more)
    topology, constraints = shared["topology"], shared["constraints"]
    # Its memory is to hold the same as ours, the optimizers' state included.
    storage = StorageEstimator(topology, constraints, reader=planner.costs.reader)
    estimators = [EmbeddingPerfEstimator(topology, constraints), storage]
    options: list[Any] = []

    def take(chosen: list[Any]) -> list[Any]:
        options.extend(chosen)
        return chosen

    start = time.process_time()
    before = signal.signal(signal.SIGPROF, _stop)
    signal.setitimer(signal.ITIMER_PROF, 2 * most_seconds)
    try:
        with mock.patch.object(planners, "perf_counter", time.process_time):
            EmbeddingShardingPlanner(
                **shared,
                enumerator=EmbeddingEnumerator(
                    topology, task.batch_size, constraints, estimators
                ),
                proposer=DynamicProgrammingProposer() if dynamic else None,
                callbacks=[take],
                timeout_seconds=max(1, round(most_seconds)),
            ).plan(*task.job())
    except (PlannerError, TimeoutError) as error:
        seconds = time.process_time() - start
        return {"failed": f"{type(error).__name__}: {error}"[:120], "seconds": seconds}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
    seconds = time.process_time() - start
    reader = planner.costs.reader
    if any(reader.run_fault(o, topology) for o in options):
        return {"failed": "its kernels cannot run such widths", "seconds": seconds}
    planner.enumerator.populate_estimates(options)
    predicted = planner.costs.evaluate(planner.costs.lower(options))
    return {"ms": predicted.critical_path_ms, "seconds": seconds}


def _stop(*_: Any) -> None:
    raise TimeoutError("not done in time")


def best_rival(entry: dict[str, Any]) -> tuple[float, str]:
    """Least milliseconds of TorchRec's plans, and whose they are."""
    plans = [(r["ms"], n) for n, r in entry.get("torchrec", {}).items() if "ms" in r]
    return min(plans, default=(math.inf, "-"))


def gap_of(entry: dict[str, Any]) -> str:
    """Say how far the plan is above its bound."""
    if not entry["bound_ms"]:
        return "-"
    proven = " proven" * entry.get("bound_is_proven", False)
    return f"{entry['ms'] / entry['bound_ms'] - 1:.1%}{proven}".replace("%", " %")


def longer_searches(rows: list[dict[str, Any]]) -> list[str]:
    """What searches of ten times the steps found, a line of a table each."""
    lines = [
        "| task | ours ms | gap | longer searches ms | below ours | gap of that |",
        "|---" * 6 + "|",
    ]
    for row in rows:
        for entry in row["limits"].values():
            if entry.get("longer") and "ms" in entry:
                found = sorted(entry["longer"], key=lambda e: float(e["ms"]))
                cells = [
                    row["name"],
                    f"{entry['ms']:.4g}",
                    gap_of(entry),
                    ", ".join(f"{e['ms']:.4g}" for e in found),
                    f"{1 - found[0]['ms'] / entry['ms']:.1%}".replace("%", " %"),
                    gap_of(found[0]),
                ]
                lines.append("| " + " | ".join(cells) + " |")
    return ["", "## Longer searches", "", *lines] if len(lines) > 2 else []


def losses(row: dict[str, Any]) -> list[str]:
    """Say where ours is worse than TorchRec's, or than with fewer choices."""
    found = []

    def ms_of(limit: str) -> float:
        return float(row["limits"].get(limit, {}).get("ms", math.inf))

    for limit, entry in row["limits"].items():
        if "crashed" in entry.get("failed", ""):
            found.append(f"`{row['name']}` {limit}: {entry['failed']}")
        theirs, name = best_rival(entry)
        pairs = [(limit, theirs, f"TorchRec's ({name})")]
        pairs += [
            (more, ms_of(limit), limit)
            for more, fewer in SUBSETS.items()
            if limit in fewer and more in row["limits"]
        ]
        found += [
            f"`{row['name']}` {ours}: {whose} {other:.5g} ms, ours {ms_of(ours):.5g} ms"
            for ours, other, whose in pairs
            if ms_of(ours) > other * (1 + TOLERANCE)
        ]
    return found


def page(settings: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """The results as a page."""
    lines = [
        "| task | choices | ours ms | TorchRec's best ms | ours / TorchRec's "
        "| bound ms | gap | `plan()` CPU s | tables by type and kernel |",
        "|---" * 9 + "|",
    ]
    for row in rows:
        for limit, e in row["limits"].items():
            cells = [
                e.get("failed", "").split(":")[0],
                *"----",
                f"{e['seconds']:.2f}",
                "",
            ]
            if "ms" in e:
                (theirs, name), bound = best_rival(e), e["bound_ms"]
                known = theirs < math.inf
                cells[0] = (
                    f"{e['ms']:.4g}{' (the search found none)' * bool(e['fallback'])}"
                )
                cells[1] = f"{theirs:.4g} ({name})" if known else "-"
                cells[2] = f"{e['ms'] / theirs:.4f}" if known else "-"
                cells[3] = f"{bound:.4g}" if bound else "unknown"
                cells[4] = gap_of(e)
                cells[6] = ", ".join(f"{n} {k}" for k, n in e["types"].items())
            lines.append("| " + " | ".join([row["name"], limit, *cells]) + " |")
    lost = [f"- {text}" for row in rows for text in losses(row)]
    return "\n".join(
        (
            "# Plans of all sharding types, predicted\n",
            str(__doc__),
            *lines,
            *longer_searches(rows),
            f"\n## Worse by more than {TOLERANCE:.1%}, or no plan\n",
            *(lost or ["None."]),
            f"\n```json\n{json.dumps(settings, indent=1)}\n```\n",
        )
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Plan the tasks that are asked for."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("--tables", type=Path, help="JSON of published table sets")
    parser.add_argument("--only", default="*", help="names of tasks, by commas")
    parser.add_argument("--rival-seconds", type=float, default=60.0, help="of a plan")
    parser.add_argument("--longer", type=int, default=0, help="longer searches a task")
    parser.add_argument("--quick", action="store_true", help="some tasks: two minutes")
    parser.add_argument("--resume", action="store_true", help="keep what <out> has")
    parser.add_argument("--out", type=Path, help="path without suffix")
    options = parser.parse_args(arguments)
    logging.disable(logging.ERROR)
    warnings.simplefilter("ignore")
    settings = {
        **describe_run(),
        "rival_seconds": options.rival_seconds,
        "reserved_share": RESERVED,
        "limits": LIMITS,
        "card": CARD,
        "cost_models": MODELS,
    }
    rows = kept_rows(options.out, resume=options.resume)
    known = {row["name"] for row in rows}
    patterns = (QUICK if options.quick else options.only).split(",")
    for task in make_tasks(options.tables):
        wanted = any(fnmatch.fnmatchcase(task.name, p) for p in patterns)
        if task.name in known or not wanted:
            continue
        facts = ("name", "ranks", "batch_size", "memory_bytes", "min_partition")
        row: dict[str, Any] = {fact: getattr(task, fact) for fact in facts}
        row |= {"tables": len(task.tables), "optimizer": task.tables[0].optimizer}
        row["commit"] = settings["commit"]
        row["limits"] = {n: judge(task, n, options.rival_seconds) for n in task.limits}
        first = row["limits"][task.limits[0]]
        first["longer"] = [
            search_longer(task, task.limits[0], seed + 1)
            for seed in range(options.longer * ("ms" in first))
        ]
        rows.append(row)
        for limit, entry in row["limits"].items():
            print(task.name, limit, json.dumps(entry), flush=True)
        for text in losses(row):
            print("WORSE", text, flush=True)
        keep_rows(options.out, settings, rows, page)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
