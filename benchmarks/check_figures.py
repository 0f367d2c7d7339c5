"""Recompute the figures of README and of the documentation from committed data.

    python benchmarks/check_figures.py            # says what differs, if anything does
    python benchmarks/check_figures.py --write    # renews the parts, page and charts

Documents have `<!-- computed: NAME -->` before a computed part and `<!-- end -->` after
it. `PARTS` has the function of each part. `PAGES` are computed as a whole. Of the data,
`results/race_*.json.xz` holds all rounds of jobs that were trained,
`results/planners_*.json.xz` the measured times of each plan, and
`data/compute_*.jsonl.xz` the measured sets of each bundle. Two tables are those of
pages whose raw data was not kept.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import lzma
import re
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from harness import race_page
from harness.pages import table
from harness.race_chart import draw_chart
from planner_comparison import page, paired
from planner_comparison.charts import chart_paths, draw_charts
from planner_comparison.results import at, read_results
from torchrec_neuroshard.bundles.find import load_cost_model, physical_estimate
from torchrec_neuroshard.bundles.fit import evaluate
from torchrec_neuroshard.bundles.set_data import build_sets, split_records
from torchrec_neuroshard.costs.expected import drawn_phases
from torchrec_neuroshard.costs.passes import TIMED
from torchrec_neuroshard.hardware.cards import GPU_CARDS
from torchrec_neuroshard.measure.records import steady_records
from torchrec_neuroshard.measure.store import read_records

Floats = npt.NDArray[np.float64]

ROOT = Path(__file__).parents[1]
RESULTS, DATA = ROOT / "benchmarks" / "results", ROOT / "benchmarks" / "data"
COMPARISON = RESULTS / "planners_202611"
RACE = RESULTS / "race_gloo2_202611"
EXPECTED = RESULTS / "planners_h200_expected_202611"
PICTURES = ROOT / "docs" / "images"
PAGES = {COMPARISON: PICTURES, EXPECTED: None}
"""Results whose page is checked -> folder of its charts."""
DOCUMENTS = (
    "README.md",
    "docs/comparison.md",
    "docs/how_it_works.md",
    "benchmarks/gpu/STATUS.md",
)

_PART = re.compile(r"(<!-- computed: ([\w-]+) -->\n)(.*?)(<!-- end -->)", re.S)
_RIVALS: Mapping[str, str | None] = {
    "TorchRec, best practice": paired.BEST_PRACTICE,
    "TorchRec, all sharding types": paired.SPLIT_TYPES,
    "the shortest of TorchRec's plans": None,
    "NeuroShard's loops on our costs": paired.PAPER,
    "EMBark's loop on our costs": "embark",
    "this planner, columns only": paired.COLUMNS,
    "this planner, nothing measured": paired.UNMEASURED,
    "this planner, 100 measured sets": paired.FEW_SETS,
}
"""Rows of the documentation's table -> planner; None: all of TorchRec's."""
_SPREAD = 0.032
"""Deviation between ranks' kernels: half of the 6.5 % that CPU bundles state."""
_EQUAL, _UNEQUAL = 1.02, 1.15
"""Slowest over mean rank: at most that of nearly equal, and at least of unequal ranks.
"""
_ROWS = {"row_wise", "table_row_wise", "data_parallel"}
"""Types whose ranks run the same kernels."""


@functools.cache
def race_data() -> dict[str, Any]:
    """Return the rounds of all jobs that were trained."""
    with lzma.open(at(RACE, ".json.xz")) as file:
        found: dict[str, Any] = json.load(file)
    return found


def race() -> str:
    """Return the table of jobs that were trained."""
    return race_page.summary_table(race_page.kept_tasks(race_data()), brief=True)


def over_rivals() -> str:
    """Return the table of our plans over each rival's, in both views."""
    data = read_results(COMPARISON)
    views = page.views(data)
    rows = []
    for title, name in _RIVALS.items():
        both = [
            paired.compare(v.tasks, paired.OURS, name or page.stock(data), v.metric)
            for v in views
        ]
        rows.append([title, *(over.text() if over else "-" for over in both)])
    heads = [f"{v.title}, {len(v.tasks)} tasks" for v in views]
    return table(["rival", *heads], rows)


@functools.cache
def h200_errors() -> str:
    """Return the errors of bundle and estimate on the H200's held-out sets."""
    records = steady_records(read_records([DATA / "compute_h200.jsonl.xz"])[1])
    held_out = build_sets(split_records(records)[1])
    models = {
        "bundle `h200`": load_cost_model("h200", device_type="cuda"),
        "estimate for the H200": physical_estimate("cuda", card=GPU_CARDS["h200"]),
    }
    rows = []
    for name, model in models.items():
        found = evaluate(name, model, held_out)
        errors = (
            *(e.mean for e in (found.forward, found.backward, found.total)),
            found.total.median,
        )
        cells = [f"{100 * e:.1f} %" for e in errors]
        rows.append([name, *cells, f"{found.total.tau:.3f}"])
    head = [f"model, {held_out.num_sets:,} sets", "forward", "backward", "total"]
    return table([*head, "total, median", "tau"], rows)


def expected_plans() -> str:
    """Return what TorchRec's planner is predicted to reach with the true bandwidth."""
    data = read_results(EXPECTED)
    settings = paired.ALL_TYPES, paired.SPLIT_TYPES
    found = [
        paired.compare(view.tasks, name, paired.BEST_PRACTICE, view.metric)
        for name in settings
        for view in page.views(data)
        if view.metric == paired.PATH
    ]
    means = [f"{over.mean:.2f}" for over in found if over]
    return (
        "With the card's, its plans with all sharding types are predicted to take "
        f"{means[0]} of best practice on 8\nranks and {means[1]} on 16. With "
        f"`min_partition=32`, too, they take {means[2]} and {means[3]}"
    )


def planning_time() -> str:
    """Return the table of `plan()`'s CPU seconds, from their page."""
    page_rows = rows_of("search_plan_202611", "plan()` CPU s")
    methods = {
        "default types": "ours",
        "columns only": "ours, columns",
        "TorchRec, default types": "torchrec",
    }
    seconds = {(r["task"], r["method"]): r.get("`plan()` CPU s") for r in page_rows}
    sizes = dict.fromkeys(task.split("/")[0] for task, _ in seconds)
    rows = []
    for size in sizes:
        tables, ranks = map(int, size.removeprefix("production-").split("x"))
        cells = [f"{tables:,} x {ranks}"]
        for method in methods.values():
            both = [
                seconds.get((f"{size}/{costs}", method)) for costs in ("cpu", "h100")
            ]
            shown = ", ".join(f"{float(s):.1f}" for s in both if s)
            tried = (f"{size}/cpu", method) in seconds
            cells.append(shown or ("not done in 120 s" if tried else "not tried"))
        rows.append(cells)
    return table(["tables x ranks", *methods], rows)


def equal_ranks() -> str:
    """Return how far the slowest of a plan's ranks is above the mean rank."""
    rows: dict[str, dict[bytes, list[float]]] = {}
    for task in read_results(COMPARISON)["tasks"]:
        for entry in task["planners"].values():
            if task["kernels_faster"] > 1 or entry.get("num_split", 1):
                continue
            predicted, measured = (
                _kernels(entry[n]) for n in ("predicted", "measured")
            )
            kinds = set(entry["sharding_types"])
            rank_W = predicted.sum(axis=(1, 2))
            above = float(rank_W.max() / rank_W.mean())
            if kinds & {"row_wise", "table_row_wise"}:
                if kinds - _ROWS or above > _EQUAL:
                    continue
                kind, spread = "row-wise tables, nearly equal ranks", 0.0
            elif above <= _EQUAL:
                kind, spread = "table-wise tables, nearly equal ranks", _SPREAD
            elif above > _UNEQUAL:
                kind, spread = "table-wise tables, unequal ranks", _SPREAD
            else:
                continue
            mean_ms = [float(p.mean(axis=0).sum()) for p in (predicted, measured)]
            # Equal plans of several planners count once.
            rows.setdefault(kind, {})[measured.tobytes()] = [
                mean_ms[0] / mean_ms[1],
                float(_slowest(measured[None])[0]) / mean_ms[1],
                float(_slowest(predicted[None])[0]) / mean_ms[0],
                _expected(predicted, spread) / mean_ms[0],
            ]
    cells = [
        [kind, str(len(found)), *(f"{m:.3f}" for m in _means(list(found.values())))]
        for kind, found in sorted(rows.items(), reverse=True)
    ]
    head = ["plans", "number", "mean rank, predicted over measured"]
    above_mean = ("measured", "critical path", "iteration")
    return table([*head, *(f"slowest over mean, {a}" for a in above_mean)], cells)


def _kernels(times: Mapping[str, Any]) -> Floats:
    """Return phases `W x 1 x 6` with the kernels of a plan's ranks, stages added up."""
    found = np.zeros((len(times["stages"][0]["fwd_ms"]), 1, len(TIMED)))
    for name, kernel in (("fwd_ms", "fwd_compute"), ("bwd_ms", "bwd_compute")):
        total_W = sum(np.array(s[name]) for s in times["stages"])
        found[:, 0, TIMED.index(kernel)] = total_W
    return found


def _expected(phases_WS6: Floats, spread: float) -> float:
    """Return the expected time if all ranks' kernels differ [ms]."""
    own_W1 = np.arange(len(phases_WS6))[:, None]
    drawn = drawn_phases(phases_WS6, np.full(own_W1.shape, spread), own_W1)
    return float(_slowest(drawn).mean())


def _slowest(phases_DWS6: Floats) -> Floats:
    """Return the slowest rank's forward plus the slowest rank's backward, `D` [ms]."""
    slowest: Floats = phases_DWS6.max(axis=1).sum(axis=(1, 2))
    return slowest


def _means(rows: Sequence[Sequence[float]]) -> list[float]:
    """Return the geometric mean of each column."""
    return [statistics.geometric_mean(column) for column in zip(*rows, strict=True)]


def rows_of(name: str, column: str) -> list[dict[str, str]]:
    """Return the first table of a results page that has a column."""
    lines = (RESULTS / f"{name}.md").read_text(encoding="utf-8").splitlines()
    start = next(n for n, line in enumerate(lines) if column in line and line[0] == "|")
    head, _, *cells = (
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in itertools.takewhile(lambda line: line, lines[start:])
    )
    # A run without a plan has the reason in the place of its figures.
    return [dict(zip(head, row, strict=False)) for row in cells]


PARTS: Mapping[str, Callable[[], str]] = {
    "race": race,
    "over-rivals": over_rivals,
    "h200-errors": h200_errors,
    "expected-plans": expected_plans,
    "planning-time": planning_time,
    "equal-ranks": equal_ranks,
}


def differences(write: bool = False) -> list[str]:
    """Return the parts whose text is not what the data give.

    Args:
        write: Renew these parts.

    Raises:
        KeyError: A document has a part that `PARTS` does not know.
    """
    found = []
    for name in DOCUMENTS:
        path = ROOT / name
        text = path.read_text(encoding="utf-8")
        computed = _PART.sub(lambda m: f"{m[1]}{PARTS[m[2]]()}\n{m[4]}", text)
        pairs = zip(_PART.findall(text), _PART.findall(computed), strict=True)
        found += [f"{name}: {old[1]}" for old, new in pairs if old != new]
        if write and computed != text:
            path.write_text(computed, encoding="utf-8")
    for results, folder in PAGES.items():
        data = read_results(results)
        pictures = chart_paths(folder / results.name) if folder else []
        path = at(results, ".md")
        computed = page.page_text(data, results, pictures)
        if path.read_text(encoding="utf-8") != computed:
            found.append(str(path.relative_to(ROOT)))
            if write:
                path.write_text(computed, encoding="utf-8")
        if write and folder:
            draw_charts(data, folder / results.name)
    path, computed = at(RACE, ".md"), race_page.page(race_data())
    if path.read_text(encoding="utf-8") != computed:
        found.append(str(path.relative_to(ROOT)))
        if write:
            path.write_text(computed, encoding="utf-8")
    if write:
        draw_chart(race_data(), PICTURES / RACE.name)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Check the figures, or renew them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="renew what differs")
    options = parser.parse_args(arguments)
    found = differences(options.write)
    for name in found:
        print(f"{'renewed' if options.write else 'differs from the data'}: {name}")
    if found and not options.write:
        sys.exit(1)
    print(f"{len(PARTS)} parts and {len(PAGES) + 1} pages are what the data give")


if __name__ == "__main__":
    main()
