"""Planning time, peak memory, predicted cost and gap of planners, task by task.

    python benchmarks/bench_search.py --tables real_tables.json --out results/search

plans each task with our planner, with TorchRec's and with the loops of NeuroShard's
paper, each run in a process of its own, and writes `<out>.json` and `<out>.md` after
every run. `--only 'mlperf-*/h100'` takes the tasks of these names, `--before
earlier.json` sets plans and seconds beside those of an earlier call.

- Ours plans with every sharding type ("free"), with those that TorchRec offers, and
  with columns or rows alone: more choices must not make a plan worse.
- TorchRec's planner plans by default and with splits down to 32 columns, each with its
  default proposers and with dynamic programming.
- NeuroShard's loops run on the same costs, table- and column-wise.
- `--ablate` plans with every sharding type, and again without one stage of the search
  each: what does it buy?

Nothing is trained: milliseconds are predictions of one cost model, which prices all
plans: a model of CPU kernels (`cpu`), or the estimate for an H100 (`h100`). Both plan
for GPUs, since TorchRec offers row-wise sharding on GPUs only. Seconds are the
process's CPU time, and time limits count CPU time, too: other work on the machine ends
no search. Where a gap is not called proven, the bound is an estimate. A rival that did
not end in time is not tried on larger tasks of the family.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import importlib
import json
import logging
import math
import multiprocessing
import resource
import statistics
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import (
    EmbeddingShardingPlanner,
    ParameterConstraints,
    planners,
)
from torchrec.distributed.planner.proposers import DynamicProgrammingProposer
from torchrec.distributed.planner.storage_reservations import (
    FixedPercentageStorageReservation,
)
from torchrec.distributed.types import ShardingType

from harness.dlrm_tables import generate_dlrm_tables
from harness.models import build_collection
from harness.pages import table
from harness.planning import count_types
from harness.provenance import describe_run
from harness.tasks import (
    PRODUCTION_WIDTHS,
    TaskConfig,
    power_of_two_widths,
    sample_tasks,
)
from torchrec_neuroshard import (
    NeuroShardPlanner,
    SearchConfig,
    TableConfig,
    topology_for,
)
from torchrec_neuroshard.tables.loaders import load_json
from torchrec_neuroshard.tables.mlperf import mlperf_dlrm_v2

GIB = 2**30
NODE = 8
RESERVED = 0.1
"""Share of the memory that no planner may fill."""
MEMORY_SHARE = 1.5
"""Of production tasks: memory of all ranks over the bytes of all weights, beside room
for optimizers and buffers."""
START_SECONDS = 30.0
"""That a process may take to start, load the model and make its task."""
TOLERANCE = 1e-3
"""A plan that is worse by no more than this share counts as equal."""
NEAR = 0.01
"""How much longer than the last plan a plan is that the search is said to hold."""
CARD = "h100"
MODELS = {"cpu": "cpu", "h100": CARD}
"""Costs -> cost model; nodes and links are the card's in both."""
COLUMNS = ["table_wise", "column_wise"]
OURS: dict[str, dict[str, list[str]]] = {
    # By name: TorchRec offers grid shards to those who ask for them only.
    "ours, free": {"sharding_types": [t.value for t in ShardingType]},
    "ours": {},
    "ours, columns": {"sharding_types": COLUMNS},
    "ours, rows": {"sharding_types": ["row_wise", "table_row_wise", "grid_shard"]},
}
"""Method -> constraints on every table."""
FEWER = {
    "ours, free": ("ours", "ours, columns", "ours, rows"),
    "ours": ("ours, columns",),
}
"""Method -> those that allow nothing else; no plan of theirs may be better."""
TORCHREC = {
    "torchrec": (None, False),
    "torchrec, dp": (None, True),
    "torchrec, min 32": (32, False),
    "torchrec, min 32, dp": (32, True),
}
"""Method -> narrowest column shard, and whether it plans by dynamic programming."""
PAPER = "neuroshard"
METHODS = (*OURS, *TORCHREC, PAPER)
WHOLE = "ours, free"
ABLATIONS: dict[str, dict[str, Any]] = {
    "without restarts": {"restarts": 0},
    "without lanes": {"descent.MOST_LANES": 1, "descent.NUM_STARTS": 1},
    "without other starts": {"construct.START_SHARES": (math.inf,)},
    "without uniform choices": {"choices.NUM_UNIFORM": 0},
    "without switched ways": {
        "descent._switched": lambda lanes, most: lanes.take(np.zeros(0, dtype=np.int64))
    },
    "without layouts": {"descent._lay_out": lambda lanes, active: active[:0]},
    "without swaps": {"moves.SWAP_SHIFTS": ()},
    "without many pairs at once": {"moves.LEAST_HOT": 1, "moves.MOST_HOT": 1},
    "without a sharper last norm": {"descent.FINAL_POWER": 32},
    "with a quick bound": {"bound": "quick"},
}
"""Method -> settings of the search, and what stands in its modules instead."""
PRODUCTION = ((50, 4), (100, 8), (200, 8), (1_000, 64), (2_000, 128), (10_000, 512))
"""Tables and ranks."""
EXACT = ((1e8, 256, 20), (3e8, 128, 5), (1e9, 128, 1), (2e9, 64, 50), (5e9, 64, 1))
"""Rows, width and ids per sample of huge tables."""
QUICK = "mlperf-4/*,dlrm-0/*,dlrm-1/*,production-100x8/cpu,huge-exact/h100"


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """Tables of one optimizer, ranks and memory."""

    family: str
    label: str
    tables: tuple[TableConfig, ...]
    ranks: int
    batch_size: int = 2_048
    """Samples per rank."""
    memory_bytes: int = 80 * GIB
    costs: str = "cpu"

    @property
    def name(self) -> str:
        """Names the task among all."""
        return f"{self.family}-{self.label}/{self.costs}"

    def shared(self, **chosen: Any) -> dict[str, Any]:
        """Return the arguments that all planners get.

        Args:
            chosen: Constraints on every table.
        """
        return {
            "topology": topology_for(
                CARD,
                num_nodes=-(-self.ranks // NODE),
                ranks_per_node=min(NODE, self.ranks),
                memory_gb=self.memory_bytes / 1e9,
                host_memory_gb=256 * GIB * min(NODE, self.ranks) / 1e9,
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


def make_tasks(path: Path | None) -> Iterator[Task]:
    """Yield all tasks, small ones of a family first.

    Args:
        path: JSON of published table sets; EMBark's are left out without it.
    """
    for task in _tasks({} if path is None else load_json(path)):
        for costs in MODELS:
            yield dataclasses.replace(task, costs=costs)


def _tasks(sets: Mapping[str, Sequence[TableConfig]]) -> Iterator[Task]:
    mlperf = _with_optimizer(mlperf_dlrm_v2(), "rowwise_adagrad")
    for ranks in (4, 8, 16):
        yield Task(family="mlperf", label=f"{ranks}", tables=mlperf, ranks=ranks)
    for label in ("T180", "T200") if sets else ():
        own = _with_optimizer(sets[f"nvidia_embark_{label}"], "rowwise_adagrad")
        yield Task(family="embark", label=label, tables=own, ranks=16)
    plain: dict[str, Any] = {"batch_size": 512}
    for number, tables in enumerate(_papers_tables(20)):
        # Every other task is tight: little more than the tables fits.
        tight = 1.3 * sum(t.weight_bytes for t in tables) / 8 + GIB / 4
        room = int(tight / (1 - RESERVED)) if number % 2 else 80 * GIB
        yield Task(
            family="dlrm",
            label=f"{number}",
            tables=_with_optimizer(tables, "sgd"),
            ranks=8,
            memory_bytes=room,
            **plain,
        )
    for count, ranks in PRODUCTION:
        own = _with_optimizer(production_tables(count), "sgd")
        total = sum(t.weight_bytes for t in own)
        yield Task(
            family="production",
            label=f"{count}x{ranks}",
            tables=own,
            ranks=ranks,
            memory_bytes=int(MEMORY_SHARE * total / ranks) + 4 * GIB,
            **plain,
        )
    yield Task(family="huge", label="exact", tables=tables_of(EXACT), ranks=64)
    for ranks in (16, 64):
        for seed in range(5):
            drawn = tables_of(_huge(np.random.default_rng([seed, ranks])))
            own = _with_optimizer(drawn, ("sgd", "rowwise_adagrad")[seed % 2])
            yield Task(family="huge", label=f"{ranks}-{seed}", tables=own, ranks=ranks)


def production_tables(count: int) -> list[TableConfig]:
    """Draw tables of the DLRM generator with production widths."""
    rng = np.random.default_rng([0, count])
    pool = generate_dlrm_tables(0)
    picks = rng.choice(len(pool), count, replace=count > len(pool))
    widths = rng.choice(PRODUCTION_WIDTHS, count)
    return [
        dataclasses.replace(pool[p], name=f"t{i}", embedding_dim=int(w))
        for i, (p, w) in enumerate(zip(picks, widths, strict=True))
    ]


def _papers_tables(count: int) -> Iterator[tuple[TableConfig, ...]]:
    """Draw tasks as NeuroShard's benchmark does: widths of 4 to 128, powers of two."""
    config = TaskConfig(
        world_size=8,
        batch_size=512 * 8,
        num_tables=(20, 119),
        widths=power_of_two_widths(128),
        memory_bytes_per_rank=4 * GIB,
        max_total_bytes=int(0.8 * 4 * GIB * 8),
    )
    for task in sample_tasks(generate_dlrm_tables(0), config, count):
        yield task.tables


def _with_optimizer(
    tables: Sequence[TableConfig], name: str
) -> tuple[TableConfig, ...]:
    return tuple(dataclasses.replace(t, optimizer=name) for t in tables)


def tables_of(sizes: Sequence[tuple[float, int, float]]) -> tuple[TableConfig, ...]:
    """Return tables of rows, width and ids per sample."""
    return tuple(
        TableConfig(
            name=f"t{i}",
            num_embeddings=int(rows),
            embedding_dim=width,
            pooling_factor=float(pooling),
        )
        for i, (rows, width, pooling) in enumerate(sizes)
    )


def _huge(rng: np.random.Generator) -> list[tuple[float, int, float]]:
    """Draw 5 to 10 tables of 10 million to 5 billion rows."""
    return [
        (
            10 ** rng.uniform(7, np.log10(5e9)),
            int(rng.choice((32, 64, 128, 256))),
            float(rng.choice((1, 5, 20, 80))),
        )
        for _ in range(rng.integers(5, 11))
    ]


def measure(task: Task, method: str, limit: float) -> dict[str, Any]:
    """Plan a task once; what is told of the plan.

    Args:
        task: To be planned.
        method: One of `METHODS`.
        limit: CPU seconds after which TorchRec's planner takes its best plan so far.
    """
    module = build_collection(task.tables, 0.1)
    sharders: Any = [EmbeddingBagCollectionSharder()]
    curve: list[tuple[float, float]] = []

    def note(best_ms: float) -> None:
        curve.append((time.process_time() - start, best_ms))

    def ours(search: Any, **chosen: Any) -> NeuroShardPlanner:
        return NeuroShardPlanner(
            **task.shared(**chosen),
            cost_model=MODELS[task.costs],
            profiles={t.name: t.profile for t in task.tables if t.profile is not None},
            search=search,
        )

    judge = ours("default")
    planner: EmbeddingShardingPlanner
    if method in TORCHREC:
        narrowest, dynamic = TORCHREC[method]
        planner = EmbeddingShardingPlanner(
            **task.shared(min_partition=narrowest),
            proposer=DynamicProgrammingProposer() if dynamic else None,
            timeout_seconds=max(1, round(limit)),
        )
    elif method == PAPER:
        planner = ours("neuroshard", sharding_types=COLUMNS)
    else:
        config = SearchConfig(progress=note)
        for name, value in ABLATIONS.get(method, {}).items():
            module_name, _, constant = name.rpartition(".")
            if module_name:  # of this process, which plans no other way
                own = importlib.import_module(
                    f"torchrec_neuroshard.search.{module_name}"
                )
                setattr(own, constant, value)
            else:
                config = dataclasses.replace(config, **{name: value})
        planner = ours(config, **OURS.get(method, OURS[WHOLE]))
    base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with (
        mock.patch.object(time, "monotonic", time.process_time),
        mock.patch.object(planners, "perf_counter", time.process_time),
    ):
        start = time.process_time()
        plan = planner.plan(module, sharders)
        seconds = time.process_time() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    report = judge.evaluate(plan, module, sharders)
    found: dict[str, Any] = {
        "seconds": seconds,
        "base_mib": base / 1024,
        "peak_mib": peak / 1024,
        "ms": report.critical_path_ms,
        "types": count_types(plan),
    }
    if isinstance(planner, NeuroShardPlanner):
        result = planner.last_result
        assert result is not None
        found |= {
            "bound_ms": result.lower_bound_ms,
            "bound_is_proven": result.bound_is_proven,
            "fallback": result.fallback,
            "search_seconds": result.search_seconds,
            "progress": curve,
        }
    return found


def _work(pipe: Connection, task: Task, method: str, limit: float) -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    try:
        # One small plan outside of the clock: imports and caches.
        small = Task(family="x", label="", tables=tables_of([(99, 8, 2)]), ranks=2)
        measure(small, method, limit)
        pipe.send(measure(task, method, limit))
    except Exception as error:  # a method's failure is a result
        last = traceback.format_exc().strip().splitlines()[-1]
        pipe.send({"failed": f"{type(error).__name__}: {last}"[:300]})


def execute(task: Task, method: str, limit: float) -> dict[str, Any]:
    """Plan in a process of its own, which is ended some time after the limit."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(theirs, task, method, limit))
    process.start()
    theirs.close()
    row: dict[str, Any] = {
        "task": task.name,
        "method": method,
        "family": task.family,
        "size": len(task.tables) * task.ranks,
    }
    late = {"failed": f"not done in {limit:g} s", "is_late": True}
    try:
        # Other work on the machine may take half of the processor.
        row |= ours.recv() if ours.poll(2 * limit + START_SECONDS) else late
    except EOFError:
        row["failed"] = "the process died"
    finally:
        process.kill()
        process.join()
    return row | late if row.get("seconds", 0.0) > 1.1 * limit else row


def too_slow(task: Task, method: str, rows: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a rival did not end on a smaller task of the family."""
    return method not in {*OURS, *ABLATIONS} and any(
        row["method"] == method
        and row["family"] == task.family
        and row["size"] <= len(task.tables) * task.ranks
        and row.get("is_late", False)
        for row in rows
    )


def gap_of(row: Mapping[str, Any]) -> str:
    """Say how far a plan is above its bound."""
    if not row.get("bound_ms"):
        return "-"
    proven = " proven" * row["bound_is_proven"]
    return f"{100 * (row['ms'] / row['bound_ms'] - 1):.1f} %{proven}"


def outside_search(row: Mapping[str, Any]) -> str:
    """Return the CPU seconds of `plan()` that no search took; "-" of rivals."""
    if "search_seconds" not in row:
        return "-"
    return f"{row['seconds'] - row['search_seconds']:.2f}"


def seconds_to_hold(row: Mapping[str, Any]) -> str:
    """Say when the search held a plan nearly as good as its last."""
    curve = row.get("progress")
    if not curve:
        return "-"
    last = min(ms for _, ms in curve)
    return f"{min(s for s, ms in curve if ms <= last * (1 + NEAR)):.2f}"


def losses(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Say where ours is worse than TorchRec's, or than with fewer choices."""
    found = []
    for task in dict.fromkeys(r["task"] for r in rows):
        ms = {r["method"]: r.get("ms", math.inf) for r in rows if r["task"] == task}
        for method in [m for m in OURS if m in ms]:
            others = FEWER.get(method, ())
            others += tuple(TORCHREC) if method in ("ours", "ours, free") else ()
            found += [
                f"- `{task}` {method}: {ms[method]:.5g} ms, {other}: {ms[other]:.5g} ms"
                for other in others
                if ms[method] > ms.get(other, math.inf) * (1 + TOLERANCE)
            ]
    return found


def ablation(known: Mapping[tuple[str, str], Mapping[str, Any]]) -> str:
    """Return what stages of the search buy, as a table; empty where none was left out.

    Args:
        known: Runs that ended, by method and task.
    """
    cells = []
    for method in ABLATIONS:
        pairs = [
            (row, known[WHOLE, task])
            for (name, task), row in known.items()
            if name == method and (WHOLE, task) in known
        ]
        if pairs:
            ms = [row["ms"] / whole["ms"] for row, whole in pairs]
            took = [r["search_seconds"] / w["search_seconds"] for r, w in pairs]
            mean = statistics.geometric_mean
            cells.append(
                [
                    method,
                    str(len(ms)),
                    f"{mean(ms):.4f}",
                    f"{max(ms):.4f}",
                    f"{mean(took):.2f}",
                ]
            )
    head = (f"over `{WHOLE}`", "tasks", "ms, mean", "worst", "search's seconds, mean")
    return table(head, cells) if cells else ""


def page(
    settings: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    before: Sequence[Mapping[str, Any]] = (),
) -> str:
    """Return the results as a page.

    Args:
        settings: What the run says of itself.
        rows: Of all runs.
        before: Of an earlier call.
    """
    known = {(r["method"], r["task"]): r for r in rows if "failed" not in r}
    base = "ours" if any(method == "ours" for method, _ in known) else WHOLE
    best = {task: r["ms"] for (method, task), r in known.items() if method == base}
    earlier = {(r["task"], r["method"]): r for r in before if "failed" not in r}
    cells, ratios = [], []
    for row in rows:
        if "failed" in row:
            cells.append([row["task"], row["method"], row["failed"], *[""] * 8])
            continue
        over = row["ms"] / best[row["task"]] if row["task"] in best else math.nan
        old = earlier.get((row["task"], row["method"]))
        if old:
            ratios.append(row["ms"] / old["ms"])
        fallback = " (the search found none)" * bool(row.get("fallback"))
        cells.append(
            [
                row["task"],
                row["method"],
                f"{row['ms']:.4g}{fallback}",
                f"{over:.4f}",
                gap_of(row),
                f"{row['seconds']:.2f}",
                outside_search(row),
                seconds_to_hold(row),
                f"{row['peak_mib'] - row['base_mib']:.0f}",
                ", ".join(f"{n} {k}" for k, n in row["types"].items()),
                f"{ratios[-1]:.4f}" if old else "",
                f"{old['seconds']:.2f}" if old else "",
            ]
        )
    head = (
        "task",
        "method",
        "ms",
        "over ours",
        "gap",
        "`plan()` CPU s",
        "of it outside the search",
        f"within {NEAR:.0%} after s",
        "MiB more",
        "tables by type and kernel",
        "over before",
        "s before",
    )
    mean = f"{statistics.geometric_mean(ratios):.4f}" if ratios else "-"
    return "\n\n".join(
        (
            "# Planning time and predicted cost of planners",
            str(__doc__),
            table(head, cells),
            ablation(known),
            f"Plans over those before, geometric mean of {len(ratios)}: {mean}.",
            f"## Worse by more than {TOLERANCE:.1%}, or no plan",
            "\n".join(losses(rows)) or "None.",
            f"```json\n{json.dumps(settings, indent=1)}\n```\n",
        )
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Plan the tasks that are asked for."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("--tables", type=Path, help="JSON of published table sets")
    parser.add_argument("--only", default="*", help="names of tasks, by commas")
    parser.add_argument("--quick", action="store_true", help="some tasks")
    parser.add_argument(
        "--methods", nargs="+", default=METHODS, choices=[*METHODS, *ABLATIONS]
    )
    parser.add_argument(
        "--ablate", action="store_true", help="leave stages out in turn"
    )
    parser.add_argument("--limit", type=float, default=120.0, help="CPU s, of a run")
    parser.add_argument("--before", type=Path, help="JSON of a call to compare with")
    parser.add_argument("--out", type=Path, required=True, help="path without suffix")
    options = parser.parse_args(arguments)
    before = json.loads(options.before.read_text())["rows"] if options.before else []
    settings = {**describe_run(), "limit": options.limit}
    methods = [WHOLE, *ABLATIONS] if options.ablate else options.methods
    patterns = (QUICK if options.quick else options.only).split(",")
    rows: list[dict[str, Any]] = []
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for task in make_tasks(options.tables):
        if not any(fnmatch.fnmatchcase(task.name, p) for p in patterns):
            continue
        for method in methods:
            if too_slow(task, method, rows):
                continue
            rows.append(execute(task, method, options.limit))
            shown = {k: v for k, v in rows[-1].items() if k != "progress"}
            print(json.dumps(shown), flush=True)
            data = json.dumps({"settings": settings, "rows": rows}, indent=1)
            options.out.with_suffix(".json").write_text(f"{data}\n")
            options.out.with_suffix(".md").write_text(page(settings, rows, before))


if __name__ == "__main__":
    main()
