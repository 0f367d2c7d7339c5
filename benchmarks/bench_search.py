"""Compare planners by planning time, peak memory, predicted cost and gap.

    python benchmarks/bench_search.py --tables real_tables.json --out results/search

plans each task with our planner, with TorchRec's and with the loops of NeuroShard's
paper. Each run has its own process. `<out>.json` and `<out>.md` are written after every
run. `--only 'mlperf-*/h100'` selects tasks by name. `--before earlier.json` adds the
results of an earlier call to the table.

- Our planner plans with every sharding type ("free"), with the types that TorchRec
  offers by default, and with columns or rows alone. More choices must not make a plan
  worse.
- TorchRec's planner plans by default and with splits down to 32 columns, each with its
  default proposers and with dynamic programming.
- NeuroShard's loops use the same costs, table- and column-wise. So do an integer
  program and simulated annealing, if `--methods` names them.
- `--ablate` plans with every sharding type, and then without one stage of the search
  at a time, to show the gain of each stage.

Nothing is trained. Milliseconds are predictions, and one cost model prices all plans of
a task: a model of CPU kernels (`cpu`) or the estimate for an H100 (`h100`). Both plan
for GPUs, since TorchRec offers row-wise sharding on GPUs only. Seconds and time limits
are CPU time of the process, so other work on the machine ends no search. Only the
estimate has a bound, so the model of CPU kernels has no gaps. Stored records may have
gaps to an estimated bound; these are not called proven. If a rival misses the time
limit, it is not tried on larger tasks of the same family.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import functools
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
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from harness.options import add_option
from harness.pages import table, write_page
from harness.planning import count_types
from harness.provenance import describe_run
from harness.tasks import (
    PRODUCTION_WIDTHS,
    TaskConfig,
    power_of_two_widths,
    sample_tasks,
)
from papers.annealing import AnnealingSearcher
from papers.milp import MilpSearcher
from torchrec_neuroshard import (
    NeuroShardPlanner,
    PaperSearcher,
    SearchConfig,
    TableConfig,
    load_cost_model,
    topology_for,
)
from torchrec_neuroshard.search import Searcher
from torchrec_neuroshard.tables.loaders import load_json
from torchrec_neuroshard.tables.mlperf import mlperf_dlrm_v2

GIB = 2**30
NODE = 8
RESERVED = 0.1
"""Share of the memory that planners must leave free."""
MEMORY_SHARE = 1.5
"""Memory of all ranks relative to all weights, in production tasks. Room for optimizers
and buffers is added."""
START_SECONDS = 30.0
"""Time that a process may take to start, load the model and make its task."""
TOLERANCE = 1e-3
"""Plans within this share of each other count as equal."""
NEAR = 0.01
"""A plan within this share of the last plan counts as found."""
CARD = "h100"
MODELS: dict[str, tuple[str, str]] = {"cpu": ("cpu", "cpu"), "h100": (CARD, "cuda")}
"""Costs -> cost model and its device type. Both have the nodes and links of the card.
A model that is passed as an object may be of another device."""
COLUMNS = ["table_wise", "column_wise"]
OURS: dict[str, dict[str, list[str]]] = {
    # TorchRec offers grid sharding only if it is named.
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
"""Method -> methods with fewer choices, whose plans must not be better."""
TORCHREC = {
    "torchrec": (None, False),
    "torchrec, dp": (None, True),
    "torchrec, min 32": (32, False),
    "torchrec, min 32, dp": (32, True),
}
"""Method -> narrowest column shard, and whether it plans by dynamic programming."""
PAPER = "neuroshard"
SEARCHERS: dict[str, Callable[[], Searcher]] = {
    PAPER: PaperSearcher,
    "milp": MilpSearcher,
    "annealing": AnnealingSearcher,
}
"""Other searches, table- and column-wise."""
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
    "without layouts": {"descent._lay_out": lambda lanes, active, deadline: active[:0]},
    "without swaps": {"moves.SWAP_SHIFTS": ()},
    "without many pairs at once": {"moves.LEAST_HOT": 1, "moves.MOST_HOT": 1},
    "without sharper norms": {"descent.FINAL_POWER": 32, "descent.LAST_POWER": 32},
    "with a quick bound": {"bound": "quick"},
}
"""Method -> changed settings of the search, or values patched into its modules."""
PRODUCTION = ((50, 4), (100, 8), (200, 8), (1_000, 64), (2_000, 128), (10_000, 512))
"""Numbers of tables and ranks."""
NUM_RANDOM = 40
"""Random models of 1 to 60 tables on 2 to 16 ranks."""
QUICK_SECONDS = 0.1
"""Models that take TorchRec's planner less are summarised separately."""
EXACT = ((1e8, 256, 20), (3e8, 128, 5), (1e9, 128, 1), (2e9, 64, 50), (5e9, 64, 1))
"""Rows, width and ids per sample of the huge tables."""
QUICK = "mlperf-4/*,dlrm-0/*,dlrm-1/*,production-100x8/cpu,huge-exact/h100"


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """Tables with one optimizer, ranks, batch size and memory."""

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
        """Unique name of the task."""
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
    """Yield all tasks; the small ones of a family come first.

    Args:
        path: JSON of published table sets. None: there are no EMBark tasks.
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
        # Every second task is tight: it has little more memory than its tables need.
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
    for number in range(NUM_RANDOM):
        rng = np.random.default_rng([1, number])
        # A quarter of the models has 1 to 4 tables.
        count = int(rng.integers(1, 5 if number % 4 == 0 else 61))
        own = _with_optimizer(tables_of(_small(rng, count)), "rowwise_adagrad")
        ranks = int(rng.choice((2, 4, 8, 16)))
        yield Task(family="random", label=f"{number}", tables=own, ranks=ranks)
    yield Task(family="huge", label="exact", tables=tables_of(EXACT), ranks=64)
    for ranks in (16, 64):
        for seed in range(5):
            drawn = tables_of(_huge(np.random.default_rng([seed, ranks])))
            own = _with_optimizer(drawn, ("sgd", "rowwise_adagrad")[seed % 2])
            yield Task(family="huge", label=f"{ranks}-{seed}", tables=own, ranks=ranks)


def production_tables(count: int) -> list[TableConfig]:
    """Return random tables of the DLRM generator with production widths."""
    rng = np.random.default_rng([0, count])
    pool = generate_dlrm_tables(0)
    picks = rng.choice(len(pool), count, replace=count > len(pool))
    widths = rng.choice(PRODUCTION_WIDTHS, count)
    return [
        dataclasses.replace(pool[p], name=f"t{i}", embedding_dim=int(w))
        for i, (p, w) in enumerate(zip(picks, widths, strict=True))
    ]


def _papers_tables(count: int) -> Iterator[tuple[TableConfig, ...]]:
    """Yield tables of random tasks like NeuroShard's: widths 4, 8, ... 128."""
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
    """Return tables with these rows, widths and ids per sample."""
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
    """Return the sizes of 5 to 10 random tables with 10 million to 5 billion rows."""
    return [
        (
            10 ** rng.uniform(7, np.log10(5e9)),
            int(rng.choice((32, 64, 128, 256))),
            float(rng.choice((1, 5, 20, 80))),
        )
        for _ in range(rng.integers(5, 11))
    ]


def _small(rng: np.random.Generator, count: int) -> list[tuple[float, int, float]]:
    """Return the sizes of random tables with 100 to 3 million rows."""
    return [
        (
            10 ** rng.uniform(2, 6.5),
            int(rng.choice((8, 16, 32, 64, 128))),
            float(10 ** rng.uniform(0, 1.7)),
        )
        for _ in range(count)
    ]


def measure(task: Task, method: str, limit: float) -> dict[str, Any]:
    """Plan a task once and return the results.

    Args:
        task: The task.
        method: One of `METHODS`, `SEARCHERS` or `ABLATIONS`.
        limit: CPU seconds after which TorchRec's planner returns its best plan so far.
    """
    module = build_collection(task.tables, 0.1)
    sharders: Any = [EmbeddingBagCollectionSharder()]
    curve: list[tuple[float, float]] = []

    def note(best_ms: float) -> None:
        curve.append((time.process_time() - start, best_ms))

    def ours(search: Any, **chosen: Any) -> NeuroShardPlanner:
        return NeuroShardPlanner(
            **task.shared(**chosen),
            cost_model=cost_model,
            profiles={t.name: t.profile for t in task.tables if t.profile is not None},
            search=search,
        )

    name, device_type = MODELS[task.costs]
    cost_model = load_cost_model(name, device_type=device_type)
    judge = ours("default")
    planner: EmbeddingShardingPlanner
    if method in TORCHREC:
        narrowest, dynamic = TORCHREC[method]
        planner = EmbeddingShardingPlanner(
            **task.shared(min_partition=narrowest),
            proposer=DynamicProgrammingProposer() if dynamic else None,
            timeout_seconds=max(1, round(limit)),
        )
    elif method in SEARCHERS:
        planner = ours(SEARCHERS[method](), sharding_types=COLUMNS)
    else:
        config = SearchConfig(progress=note)
        for name, value in ABLATIONS.get(method, {}).items():
            module_name, _, constant = name.rpartition(".")
            if module_name:  # patch this process, which runs this method only
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
        # Make one small plan first, so that imports and caches are not timed.
        small = Task(family="x", label="", tables=tables_of([(99, 8, 2)]), ranks=2)
        measure(small, method, limit)
        pipe.send(measure(task, method, limit))
    except Exception as error:  # a method's failure is a result
        last = traceback.format_exc().strip().splitlines()[-1]
        pipe.send({"failed": f"{type(error).__name__}: {last}"[:300]})


def execute(task: Task, method: str, limit: float) -> dict[str, Any]:
    """Return the results of a new process, which is killed well after the limit."""
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
    late = {"failed": f"not finished in {limit:g} s", "is_late": True}
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
    """Return whether a rival missed the limit on a smaller task of the family."""
    return method not in {*OURS, *ABLATIONS} and any(
        row["method"] == method
        and row["family"] == task.family
        and row["size"] <= len(task.tables) * task.ranks
        and row.get("is_late", False)
        for row in rows
    )


def gap_of(row: Mapping[str, Any]) -> str:
    """Return how far a plan is above its bound, as text."""
    if not row.get("bound_ms"):
        return "-"
    proven = " proven" * row["bound_is_proven"]
    return f"{100 * (row['ms'] / row['bound_ms'] - 1):.1f} %{proven}"


def outside_search(row: Mapping[str, Any]) -> str:
    """Return the CPU seconds of `plan()` outside the search; "-" for rivals."""
    if "search_seconds" not in row:
        return "-"
    return f"{row['seconds'] - row['search_seconds']:.2f}"


def seconds_to_hold(row: Mapping[str, Any]) -> str:
    """Return the time at which the search had a plan nearly as good as its last."""
    curve = row.get("progress")
    if not curve:
        return "-"
    last = min(ms for _, ms in curve)
    return f"{min(s for s, ms in curve if ms <= last * (1 + NEAR)):.2f}"


def losses(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return tasks on which our plan is worse than TorchRec's or with fewer choices."""
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
    """Return the gain of each stage of the search as a table; empty without ablations.

    Args:
        known: Method and task -> finished run.
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
    head = f"relative to `{WHOLE}` | tasks | ms | worst ms | search seconds"
    return table(head, cells) if cells else ""


def seconds_over_torchrec(
    known: Mapping[tuple[str, str], Mapping[str, Any]],
) -> str:
    """Return our CPU seconds over TorchRec's as a table; empty without both."""
    cells = []
    pairs = [
        (row["family"], known["torchrec", task]["seconds"], row["seconds"])
        for (method, task), row in known.items()
        if method == "ours" and ("torchrec", task) in known
    ]
    for family in dict.fromkeys(family for family, *_ in pairs):
        for is_quick in (True, False):
            both = [
                (theirs, ours)
                for name, theirs, ours in pairs
                if name == family and (theirs < QUICK_SECONDS) == is_quick
            ]
            if not both:
                continue
            ratios = [ours / theirs for theirs, ours in both]
            cells.append(
                [
                    family,
                    f"{'below' if is_quick else 'at least'} {QUICK_SECONDS} s",
                    str(len(both)),
                    *(f"{statistics.median(s):.3f}" for s in zip(*both, strict=True)),
                    f"{statistics.median(ratios):.2f}",
                    f"{min(ratios):.2f} to {max(ratios):.2f}",
                ]
            )
    head = (
        "family | TorchRec takes | tasks | TorchRec, median s | ours, median s | "
        "ours / TorchRec, median | range"
    )
    return table(head, cells) if cells else ""


def page(
    settings: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    before: Sequence[Mapping[str, Any]] = (),
) -> str:
    """Return the results as a page of Markdown.

    Args:
        settings: Description of the call.
        rows: Results of all runs.
        before: Results of an earlier call.
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
        fallback = " (the search found no plan)" * bool(row.get("fallback"))
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
        "task | method | ms | relative to ours | gap | `plan()` CPU s | of that "
        f"outside the search | s to {NEAR:.0%} of the last plan | added MiB | tables "
        "by type and kernel | relative to before | s before"
    )
    mean = f"{statistics.geometric_mean(ratios):.4f}" if ratios else "-"
    return "\n\n".join(
        (
            "# Planning time and predicted cost of planners",
            str(__doc__),
            table(head, cells),
            seconds_over_torchrec(known),
            ablation(known),
            f"Relative to before, geometric mean of {len(ratios)}: {mean}.",
            f"## Ours worse by more than {TOLERANCE:.1%}, or without a plan",
            "\n".join(losses(rows)) or "None.",
            f"```json\n{json.dumps(settings, indent=1)}\n```\n",
        )
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Plan the selected tasks."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    add = functools.partial(add_option, parser)
    add("tables", None, "JSON of published table sets", Path)
    add("only", "*", "patterns of task names, with commas")
    add("quick", False, "run a few tasks")
    known = [*OURS, *TORCHREC, *SEARCHERS, *ABLATIONS]
    add("methods", METHODS, "planners to run", str, nargs="+", choices=known)
    add("ablate", False, "leave out one stage at a time")
    add("limit", 120.0, "CPU seconds of a run")
    add("before", None, "JSON of an earlier call", Path)
    add("out", ..., "path of the results, without suffix", Path)
    options = parser.parse_args(arguments)
    before = json.loads(options.before.read_text())["rows"] if options.before else []
    settings = {**describe_run(), "limit": options.limit}
    methods = [WHOLE, *ABLATIONS] if options.ablate else options.methods
    patterns = (QUICK if options.quick else options.only).split(",")
    rows: list[dict[str, Any]] = []
    for task in make_tasks(options.tables):
        if not any(fnmatch.fnmatchcase(task.name, p) for p in patterns):
            continue
        for method in methods:
            if too_slow(task, method, rows):
                continue
            rows.append(execute(task, method, options.limit))
            shown = {k: v for k, v in rows[-1].items() if k != "progress"}
            print(json.dumps(shown), flush=True)
            data = {"settings": settings, "rows": rows}
            write_page(options.out, data, page(settings, rows, before))


if __name__ == "__main__":
    main()
