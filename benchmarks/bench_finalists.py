"""Whether measuring finalists makes plans quicker, and their prediction true.

    python benchmarks/bench_finalists.py --tables real_tables.json \\
        --out benchmarks/results/finalists

plans every task twice, by the default search and with `measure_finalists`, which
measures on this machine. Then, in fresh rounds over all tasks, the fused kernels of all
ranks of both plans are timed, rank after rank, on other inputs. `<out>.json` is written
after every task of every round, `<out>.md` with it; the same command goes on where an
earlier one stopped.

Tables are sharded table- and column-wise. Collectives are predicted, over links so fast
that kernels decide; a plan's path is its slowest forward and backward, and these.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import random
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torchrec.distributed.planner import Topology

from harness.options import option, read_options
from harness.provenance import describe_run, kept_rows, now
from planner_comparison.paired import bootstrap, geometric_mean
from planner_comparison.tasks import Task, TaskSettings, make_tasks
from torchrec_neuroshard.collect.timing import SetTimer
from torchrec_neuroshard.cost_models import BandwidthCommsModel
from torchrec_neuroshard.placement import Placement, ShardingTask
from torchrec_neuroshard.planner.costs.plan_costs import PlanCosts
from torchrec_neuroshard.planner.launch.finalists import Finalists
from torchrec_neuroshard.records import CostRecord
from torchrec_neuroshard.search import (
    NeuroShardSearcher,
    SearchConfig,
    SearchResult,
)
from torchrec_neuroshard.tables import TableConfig
from torchrec_neuroshard.training.first_launch import LaunchRequest

FAMILIES = ("dlrm", "production")
MOST_RANKS = 8
LINK_GB_PER_S = 50.0
ARENA_BYTES = 2**30
PASSES = 5
"""Of a set, each time that it is measured."""
VISITS = 3
"""Most times that a set of a finalist is measured in a round."""
FRESH = 10**6
"""Seed of the inputs that judge."""
WITHOUT, WITH = "without", "with"
FEW_ROUNDS = 4
"""Figures of these alone are told, too."""
EXPECTED_BIAS, EXPECTED_RATIO = 0.01, 0.98

Tables = tuple[TableConfig, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How much is measured."""

    out: str = option("", "path of the result without suffix")
    tables: str = option("", "JSON of published table sets")
    num_tasks: int = option(40, "tasks")
    finalists: int = option(4, "plans of a round")
    seconds: float = option(24.0, "budget of the finalists of a task")
    rounds: int = option(5, "fresh rounds over all tasks")
    max_rows: int = option(400_000, "longer tables are cut to so many rows")
    cost_model: str = option("cpu_epyc_zen5", "bundle")
    seed: int = option(0, "of the first tasks")


def draw_tasks(settings: Settings) -> list[Task]:
    """Draw tasks of both families on 4 and 8 ranks, seed after seed."""
    path = Path(settings.tables) if settings.tables else None
    found: list[Task] = []
    seed = settings.seed
    while len(found) < settings.num_tasks:
        drawn = make_tasks(path, TaskSettings(max_rows=settings.max_rows, seed=seed))
        found += [
            dataclasses.replace(t, name=f"{t.name}/{seed}")
            for t in drawn
            if t.family in FAMILIES and t.world_size <= MOST_RANKS
        ]
        seed += 1
    return found[: settings.num_tasks]


class Remembering(NeuroShardSearcher):
    """Keeps the first plan: the one that is returned without measurements."""

    def finalists(self, *arguments: Any, **given: Any) -> list[SearchResult]:
        """See `Searcher.finalists`."""
        found = super().finalists(*arguments, **given)
        self.first = found[0]
        return found


class Bench:
    """Plans tasks and times their kernels.

    Args:
        settings: How much.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            costs = self._costs(4)
        self._timer = SetTimer(
            torch.device("cpu"),
            ARENA_BYTES,
            reference_ms=costs.cost_model.reference_ms,
            budget_seconds=0.0,
            min_passes=PASSES,
            max_passes=PASSES,
            # Other work shares the machine.
            now=time.thread_time,
        )

    def _costs(self, ranks: int) -> PlanCosts:
        return PlanCosts(
            Topology(world_size=ranks, compute_device="cpu"),
            cost_model=self._settings.cost_model,
            comms_model=BandwidthCommsModel(
                world_size=ranks,
                local_world_size=ranks,
                intra_gb_per_s=LINK_GB_PER_S,
                inter_gb_per_s=LINK_GB_PER_S,
            ),
        )

    def plan(self, task: Task) -> dict[str, Any]:
        """Plan a task both ways."""
        costs, problem = self._costs(task.world_size), _problem(task)
        searcher = Remembering(SearchConfig())
        finalists = Finalists(
            self._settings.finalists,
            self._settings.seconds,
            costs.topology,
            measure=self.measure,
        )
        start = time.monotonic()
        chosen = finalists.choose(searcher, problem, costs)
        first = searcher.first
        return {
            "name": task.name,
            "family": task.family,
            "ranks": task.world_size,
            "tables": len(task.tables),
            "search_seconds": first.search_seconds,
            "finalists_seconds": time.monotonic() - start,
            "finalists": [dataclasses.asdict(f) for f in chosen.finalists],
            "failed": [w for w in costs.warnings if "finalists failed" in w],
            "plans": {
                name: {
                    "placement": result.placement.to_json(),
                    "path_ms": result.predicted.critical_path_ms,
                    # Finalists' paths are expected ones, over what is left open.
                    "predicted_ms": next(
                        (f.corrected_ms for f in result.finalists if f.chosen),
                        result.predicted.critical_path_ms,
                    ),
                    "lower_bound_ms": result.lower_bound_ms,
                    "kernels_ms": [
                        [r.fwd_compute, r.bwd_compute] for r in result.predicted.ranks
                    ],
                }
                for name, result in ((WITHOUT, first), (WITH, chosen))
            },
            "rounds": [],
        }

    def measure(self, request: LaunchRequest) -> list[CostRecord]:
        """Measure as the ranks' processes do, in this one."""
        end = time.monotonic() + request.seconds
        records: list[CostRecord] = []
        for visit in range(VISITS):
            for number, tables in enumerate(request.sets):
                if records and time.monotonic() > end:
                    return records
                index = number + visit * len(request.sets)
                seed = (request.seed, index)
                records.append(self._time(tables, request.batch_size, index, seed))
        return records

    def judge(self, task: Task, row: dict[str, Any], number: int) -> dict[str, Any]:
        """Time all ranks of both plans once, a set that both hold once."""
        problem, sets = _problem(task), dict[Tables, list[float]]()
        ranks: dict[str, list[Tables]] = {}
        for name, plan in row["plans"].items():
            ranks[name] = _rank_sets(problem, Placement.from_json(plan["placement"]))
            sets |= {held: [] for held in ranks[name] if held}
        order = list(sets)
        random.Random(number).shuffle(order)
        for tables in order:
            record = self._time(tables, task.batch_size, 0, (FRESH, number))
            sets[tables] = [record.fwd_ms, record.bwd_ms]
        return {
            "kernels_ms": {
                name: [sets[h] if h else [0.0, 0.0] for h in held]
                for name, held in ranks.items()
            },
            "reference_ms": record.reference_ms,
            "at": now(),
        }

    def _time(
        self, tables: Tables, batch_size: int, index: int, seed: Sequence[int]
    ) -> CostRecord:
        own = tuple(
            dataclasses.replace(t, name=str(i), profile=t.profile_at(batch_size))
            for i, t in enumerate(tables)
        )
        found = self._timer.measure(own, None, batch_size, seed)
        return CostRecord(
            index=index,
            held_out=False,
            batch_size=batch_size,
            tables=own,
            **found.for_record(),
        )


def _problem(task: Task) -> ShardingTask:
    return ShardingTask(
        tables=task.tables,
        world_size=task.world_size,
        batch_size=task.batch_size,
        memory_bytes=(task.memory_bytes,) * task.world_size,
    )


def _rank_sets(problem: ShardingTask, placement: Placement) -> list[Tables]:
    """Return what each rank holds, in one order."""
    held: list[list[TableConfig]] = [[] for _ in range(problem.world_size)]
    for shard in placement.shards:
        held[shard.rank].append(problem.tables[shard.table].with_width(shard.width))
    return [tuple(tables) for tables in held]


# Figures.


def judged(row: dict[str, Any], name: str, most: int | None = None) -> dict[str, float]:
    """Put a plan's rounds together: medians of each kernel, then the slowest.

    Args:
        row: Of a task.
        name: Of the plan.
        most: Only so many rounds.
    """
    plan = row["plans"][name]
    rounds = np.array([r["kernels_ms"][name] for r in row["rounds"][:most]])
    kernels_W2 = np.median(rounds, axis=0)
    predicted_W2 = np.array(plan["kernels_ms"])
    comms_ms = plan["path_ms"] - predicted_W2.max(axis=0).sum()
    path_ms = float(kernels_W2.max(axis=0).sum() + comms_ms)
    all_off = float(kernels_W2.sum() / predicted_W2.sum())
    return {
        "path_ms": path_ms,
        "off": path_ms / plan["predicted_ms"],
        "plain_off": path_ms / plan["path_ms"],
        "all_off": all_off,
        "curse": path_ms / plan["predicted_ms"] / all_off,
    }


def page(settings: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    """Return the result as Markdown."""
    ok = [r for r in rows if r["rounds"]]
    both = [{name: judged(r, name) for name in (WITHOUT, WITH)} for r in ok]
    ratios = [b[WITH]["path_ms"] / b[WITHOUT]["path_ms"] for b in both]
    spread = float(np.std(np.log(ratios), ddof=1)) if len(ratios) > 1 else 0.0
    least = float(np.expm1(2.8 * spread / np.sqrt(len(ratios))))
    quicker, bias = _cell(ratios), _cell([b[WITH]["off"] for b in both])
    mean, offs = geometric_mean(ratios), geometric_mean([b[WITH]["off"] for b in both])
    is_quicker = "met" if mean <= EXPECTED_RATIO else "**not met**"
    is_true = "met" if abs(offs - 1) <= EXPECTED_BIAS else "**not met**"
    lines = [
        "# Measured finalists",
        "",
        f"{settings['hardware']['device']}; commit {settings['commit']}; "
        f"{settings['date']} to {ok[-1]['rounds'][-1]['at']}. {len(ok)} tasks, "
        f"{min(len(r['rounds']) for r in ok)} fresh rounds.",
        "",
        f"    {settings['command']}",
        *(
            f"    {again['command']}  # went on at {again['date']}, {again['commit']}"
            for again in settings.get("continued", [])
        ),
        "",
        "| expected | found | |",
        "| --- | ---: | --- |",
        "| with measured finalists, paths are 2 % or more shorter (geometric mean, "
        f"measured) | {quicker} | {is_quicker} |",
        f"| the chosen plan measures within 1 % of its prediction | {bias} | "
        f"{is_true} |",
        "",
        "Geometric means over tasks and their 95 % intervals, bootstrap over tasks. "
        f"The ratios of a task spread by {spread:.1%}: a difference of {least:.1%} "
        "would have been found in 80 of 100 such runs.",
        "",
        "| measured over predicted | without | with |",
        "| --- | ---: | ---: |",
    ]
    for key, text in (
        ("off", "the plan's path"),
        ("plain_off", "the same, of kernels that each take what they are expected to"),
        ("all_off", "all of its kernels"),
        ("curse", "the path's over that of all kernels: what a choice flatters"),
    ):
        cells = [_cell([b[name][key] for b in both]) for name in (WITHOUT, WITH)]
        lines.append(f"| {text} | {cells[0]} | {cells[1]} |")
    lines += ["", "| tasks | n | with over without |", "| --- | ---: | ---: |"]
    for key in ("family", "ranks"):
        for value in sorted({r[key] for r in ok}, key=str):
            own = [x for x, r in zip(ratios, ok, strict=True) if r[key] == value]
            lines.append(f"| {key} {value} | {len(own)} | {_cell(own)} |")
    few = [{n: judged(r, n, FEW_ROUNDS) for n in (WITHOUT, WITH)} for r in ok]
    same = sum(
        r["plans"][WITH]["placement"] == r["plans"][WITHOUT]["placement"] for r in ok
    )
    failed = [f"{r['name']}: {'; '.join(r['failed'])}" for r in rows if r["failed"]]
    lines += [
        "",
        f"By the first {FEW_ROUNDS} rounds alone, with over without is "
        f"{_cell([f[WITH]['path_ms'] / f[WITHOUT]['path_ms'] for f in few])} and the "
        f"chosen plan over its prediction {_cell([f[WITH]['off'] for f in few])}.",
        "",
        f"The search's first plan was chosen in {same} tasks. Choosing took "
        f"{np.median([r['finalists_seconds'] for r in ok]):.0f} s a task (median), "
        f"{np.median([len(r['finalists']) for r in ok]):.0f} plans.",
        *(f"Failed: {text}" for text in failed),
        "",
        "| task | tables | predicted | measured | with: predicted | measured | ratio |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row, pair, ratio in zip(ok, both, ratios, strict=True):
        cells = [
            f"{ms:.3f}"
            for name in (WITHOUT, WITH)
            for ms in (row["plans"][name]["predicted_ms"], pair[name]["path_ms"])
        ]
        lines.append(
            f"| {row['name']} | {row['tables']} | {' | '.join(cells)} | {ratio:.3f} |"
        )
    lines += [
        "",
        "Milliseconds are the bundle's: each pass is timed beside a reference set, "
        "by the thread's own time, since other work shares the machine: load averages "
        f"{settings['load_average'][0]:.0f} at first; a kernel's rounds differ by "
        f"{_noise(ok):.0%} (standard deviation). "
        "Raw figures: the JSON file of the same name.",
    ]
    return "\n".join(lines) + "\n"


def _noise(rows: Sequence[dict[str, Any]]) -> float:
    """How far rounds of one kernel differ, relative."""
    spreads = [
        np.log(np.array([r["kernels_ms"][name] for r in row["rounds"]])).std(0, ddof=1)
        for row in rows
        for name in (WITHOUT, WITH)
    ]
    return float(np.mean([s.mean() for s in spreads]))


def _cell(values: Sequence[float]) -> str:
    if not values:
        return "-"
    low, high = bootstrap(values)
    return f"{geometric_mean(values):.3f} ({low:.3f} to {high:.3f})"


def main(arguments: Sequence[str] | None = None) -> int:
    """Plan, then judge."""
    settings = read_options(Settings, arguments, str(__doc__))
    logging.disable(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    out = Path(settings.out) if settings.out else None
    rows = kept_rows(out, resume=True)
    about = {**describe_run(), **dataclasses.asdict(settings)}
    if rows and out is not None:
        known = json.loads(out.with_suffix(".json").read_text())["settings"]
        again = {k: about[k] for k in ("command", "commit", "date", "load_average")}
        about, begun = known, known.get("continued", [])
        judged_rounds = min(len(row["rounds"]) for row in rows)
        if len(rows) < settings.num_tasks or judged_rounds < settings.rounds:
            about = {**known, "continued": [*begun, again]}
    tasks = {t.name: t for t in draw_tasks(settings)}
    bench = Bench(settings)

    def keep() -> None:
        if out is None:
            return
        data = json.dumps({"settings": about, "rows": rows})
        out.parent.mkdir(parents=True, exist_ok=True)
        out.with_suffix(".json").write_text(data + "\n")
        if rows and all(r["rounds"] for r in rows):
            out.with_suffix(".md").write_text(page(about, rows))

    done = {row["name"] for row in rows}
    for name, task in tasks.items():
        if name not in done:
            rows.append(bench.plan(task))
            print(name, *rows[-1]["failed"], flush=True)
            keep()
    for number in range(settings.rounds):
        for row in rows:
            if len(row["rounds"]) <= number:
                row["rounds"].append(bench.judge(tasks[row["name"]], row, number))
                keep()
        print(f"round {number + 1}", flush=True)
    keep()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
