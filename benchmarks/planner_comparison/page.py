"""The page of results, in Markdown.

`notes` in the data, a list of sentences, are printed below the charts.
"""

from __future__ import annotations

import os
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.pages import table
from planner_comparison import paired
from planner_comparison.paired import (
    BEST_PRACTICE,
    KERNELS,
    OURS,
    PATH,
    SPLIT_TYPES,
)
from planner_comparison.results import at
from planner_comparison.tasks import BATCH_SIZES

Task = dict[str, Any]
Data = dict[str, Any]

LARGEST_SPREAD = 0.25
"""Tasks are left out if the machine's speed varies more than this meanwhile."""
_STATUSES = ("no plan", "timed out", "failed", "not run")
_NAMED = (
    '"Best practice" is our name for TorchRec\'s planner with table- and column-wise '
    "sharding, pooling factors and `min_partition=32`."
)


@dataclass(frozen=True, slots=True)
class View:
    """Tasks, and the figure by which their plans are compared."""

    title: str
    tasks: list[Task]
    metric: str


def write_page(data: Data, out: Path, pictures: Sequence[Path] = ()) -> None:
    """Write `<out>.md`.

    Args:
        data: All results of the run.
        out: Path without suffix.
        pictures: Charts, on a light and on a dark page.
    """
    at(out, ".md").write_text(page_text(data, out, pictures), encoding="utf-8")


def page_text(data: Data, out: Path, pictures: Sequence[Path] = ()) -> str:
    """Return the page's text; see `write_page`."""
    parts = [_title(data)]
    if pictures:
        light, dark = (os.path.relpath(p, out.parent) for p in pictures)
        parts.append(_picture(light, dark))
    return "\n\n".join([*parts, *_tables(data)]) + "\n"


def views(data: Data) -> list[View]:
    """Return the views of a run, the measured kernels first.

    On a CPU, these are its kernels alone, and kernels scaled to a GPU's with published
    collectives. On a GPU each cluster has both views.
    """
    tasks = [t for t in data["tasks"] if not _disturbed(t)]
    if data["hardware"]["device_type"] != "cpu":
        what = "Predicted kernels" if data.get("is_predicted") else "Kernels"
        both = ((f"{what} alone", KERNELS), (f"{what} and published collectives", PATH))
        return [
            View(f"{title}, {name}", [t for t in tasks if t["cluster"] == name], metric)
            for name in dict.fromkeys(t["cluster"] for t in tasks)
            for title, metric in both
        ]
    own = [t for t in tasks if t["kernels_faster"] == 1]
    scaled = [t for t in tasks if t["kernels_faster"] != 1]
    found = [
        View("Kernels alone, measured on this processor", own, KERNELS),
        View("Kernels scaled to an H100's, with published collectives", scaled, PATH),
    ]
    return [view for view in found if view.tasks]


def planners(data: Data) -> list[str]:
    """Return the names of all planners, in order."""
    return [r["name"] for r in data["rivals"]]


def stock(data: Data) -> list[str]:
    """Return the names of TorchRec's planners."""
    return [n for n in planners(data) if n.startswith("torchrec")]


def families(view: View) -> dict[str, list[Task]]:
    """Return family -> tasks."""
    return _grouped(view.tasks, "family")


def _grouped(tasks: Iterable[Task], key: str) -> dict[Any, list[Task]]:
    found: dict[Any, list[Task]] = {}
    for task in tasks:
        found.setdefault(task[key], []).append(task)
    return found


def planning_seconds(tasks: Iterable[Task], name: str) -> list[float]:
    """Return the seconds of each plan of a planner."""
    entries = [t["planners"].get(name, {}) for t in tasks]
    return [e["seconds"] for e in entries if e.get("status") == "plan"]


def _disturbed(task: Task) -> bool:
    return float(task.get("speed_spread", 0.0)) > LARGEST_SPREAD


def _title(data: Data) -> str:
    hardware, model = data["hardware"], data["cost_model"]
    variables = [f"{n}={v}" for n, v in data["environment"].items()]
    ran = {t["task"] for t in data["tasks"]}
    sizes = Counter(t["batch_size"] for t in data["tasks"] if t["kernels_faster"] == 1)
    batches = ", ".join(f"{b:,} samples ({n} tasks)" for b, n in sorted(sizes.items()))
    disturbed = sorted({t["task"] for t in data["tasks"] if _disturbed(t)})
    rows = [
        f"- {len(ran)} of {data['num_tasks']} tasks ran, in {data['minutes']} "
        "minutes, planning included. When the time was up, the rest was left out, from "
        "the end of the order in which tasks are drawn."
        if "minutes" in data
        else f"- {len(ran)} of {data['num_tasks']} tasks.",
        f"- Batches: {batches}. They are halved, down to {min(BATCH_SIZES):,}, while "
        f"they have more than {limit:,} lookups."
        if (limit := data["options"].get("max_lookups"))
        else f"- Batches: {batches}.",
        f"- Cost model: {model['name']} ({model['source']}, {model['hardware']}).",
        "- Ranks do not wait for each other between sharding types, as in TorchRec "
        "(`costs/timeline.py`). Kernels alone: the split of ids, the slowest rank's "
        "forward and the slowest rank's backward.",
        f"- {_NAMED}",
    ]
    if "quiet" in data:
        rows += [
            "- Left out because the machine's speed changed by more than "
            f"{LARGEST_SPREAD:.0%} meanwhile: {', '.join(disturbed) or 'none'}.",
            f"- Quiet machine: {data['quiet']}.",
        ]
    if faster := data.get("kernels_faster"):
        rows.append(
            f"- Scaled kernels: measured times are divided by {faster:g}, for "
            "planners and in the results. The factor is the median, over tasks, of "
            "this processor's busiest rank over an H100's by our estimate. No real "
            "card is a uniform factor."
        )
    rows += [f"- {name}: {text}." for name, text in data["clusters"].items()]
    rows += [f"- {note}" for note in data.get("notes", ())]
    about = "\n".join(rows)
    predicted = data.get("is_predicted")
    kernels = (
        "predicted kernels: nothing was measured" if predicted else "timed kernels"
    )
    return (
        f"# Planners compared on {kernels}\n\n"
        f"{hardware['device']}; torch {hardware['torch']}, fbgemm "
        f"{hardware['fbgemm']}, torchrec {data['torchrec']}; commit {data['commit']}; "
        f"{data['created']} to {data['updated']}.\n\n"
        f"    {' '.join([*variables, data['command']])}\n\n{about}"
    )


def _picture(light: str, dark: str) -> str:
    return (
        "<picture>\n"
        f'  <source media="(prefers-color-scheme: dark)" srcset="{dark}">\n'
        '  <img alt="Quality and planning time of each planner; quality by family" '
        f'src="{light}">\n'
        "</picture>"
    )


def _tables(data: Data) -> list[str]:
    measured = [] if data.get("is_predicted") else [_noise(data), _choices(data)]
    # What was expected was expected of processors.
    on_cpu = data["hardware"]["device_type"] == "cpu"
    return [
        *(_summary(data, view) for view in views(data)),
        *([_expected(data)] if on_cpu else []),
        _against(data),
        *(_by_family(data, view) for view in views(data)),
        _planning(data),
        *measured,
        _described(data),
        _troubles(data),
        "`docs/comparison.md` explains the method. Intervals are "
        f"{paired.CONFIDENCE:.0%} bootstrap intervals over tasks. Ratios within "
        f"{paired.SAME:.0%} of 1 count as neither won nor lost. A ratio of two "
        "planners leaves out tasks for which one of them has no plan.",
        "## Settings",
        "\n".join(f"    {key}: {value}" for key, value in data["options"].items()),
    ]


def _summary(data: Data, view: View) -> str:
    rows = []
    for name in planners(data):
        ended = paired.outcomes(view.tasks, name)
        over = paired.compare(view.tasks, name, BEST_PRACTICE, view.metric)
        predicted = paired.prediction_ratios(view.tasks, name, view.metric)
        seconds = planning_seconds(view.tasks, name)
        rows.append(
            (
                _marked(name),
                f"{ended['plan']}/{sum(ended.values())}",
                _text(over),
                f"{over.worst:.2f}" if over else "-",
                f"{over.wins}/{over.losses}" if over else "-",
                "-" if data.get("is_predicted") else _median(predicted, ".3f"),
                _median(seconds, ".2f"),
            )
        )
    head = (
        "planner | plans | relative to TorchRec's best practice | worst task | won/lost"
        " | predicted / measured, median | planning s, median"
    )
    return f"## {view.title}, {len(view.tasks)} tasks\n\n{table(head, rows)}"


def _expected(data: Data) -> str:
    """Return the table of what was expected before the run, and what was found."""
    rows: list[tuple[str, ...]] = []

    def add(expected: str, found: str, holds: bool) -> None:
        rows.append((expected, found, "yes" if holds else "**no**"))

    for view, short in zip(views(data), ("measured", "scaled"), strict=False):
        tasks, metric = view.tasks, view.metric
        for name, others, *most in (
            (f"`{BEST_PRACTICE}`", [BEST_PRACTICE], 0.74, 0.74),
            (f"`{SPLIT_TYPES}`", [SPLIT_TYPES], 0.90, 0.84),
            ("TorchRec's shortest plan", stock(data), 0.92, 0.90),
        ):
            limit = most[short == "scaled"]
            if over := paired.compare(tasks, OURS, others, metric):
                expected = f"`{OURS}` takes at most {limit:.2f} of {name}, {short}"
                add(expected, over.text(), over.mean <= limit)
        by_family = {
            f: paired.compare(t, OURS, stock(data), metric)
            for f, t in families(view).items()
        }
        slowest = {f: p.mean for f, p in by_family.items() if p}
        if slowest:
            family = max(slowest, key=lambda f: slowest[f])
            add(
                f"no family is above 1.00 of TorchRec's shortest plan, {short}",
                f"{slowest[family]:.3f} on {family}",
                slowest[family] <= 1,
            )
        if over := paired.compare(tasks, OURS, stock(data), metric):
            ratios = paired.ratios(tasks, OURS, stock(data), metric)
            above = sum(r > 1.05 for r in ratios.values())
            add(
                "at most a tenth of the tasks is above 1.05 of TorchRec's shortest "
                f"plan, {short}",
                f"{above} of {len(ratios)}; {over.worst:.3f} on {over.worst_task}",
                above <= len(ratios) / 10,
            )
        if predicted := paired.prediction_ratios(tasks, OURS, metric):
            middle = statistics.median(predicted)
            add(
                f"predictions are within 5 % of what was found, in the median, {short}",
                f"{middle:.3f}",
                abs(middle - 1) <= 0.05,
            )
    for ranks, tasks in _by_ranks(data).items():
        both = [planning_seconds(tasks, n) for n in (OURS, SPLIT_TYPES)]
        if all(both):
            ours, theirs = map(statistics.median, both)
            add(
                f"planning is quicker than that of `{SPLIT_TYPES}`, {ranks} ranks",
                f"{ours:.2f} s; {theirs:.2f} s",
                ours <= theirs,
            )
    rows_text = table("expected | found | holds", rows)
    return f"## Expected before the run, and found\n\n{rows_text}"


def _against(data: Data) -> str:
    """Return the table of our plans relative to each rival's."""
    shown = views(data)
    others = [n for n in planners(data) if n not in (OURS, paired.AGAIN)]
    yardsticks: dict[str, str | list[str]] = {
        "the shortest of TorchRec's": stock(data),
        "the shortest of all rivals'": [n for n in others if not n.startswith(OURS)],
        **{name: name for name in others},
    }
    head = [f"`{OURS}` relative to"]
    for view in shown:
        head += [view.title, "worst task", "won/lost"]
    rows = []
    for name, yardstick in yardsticks.items():
        cells = [name]
        for view in shown:
            over = paired.compare(view.tasks, OURS, yardstick, view.metric)
            cells += ["-"] * 3
            if over:
                worst = f"{over.worst:.2f}, {over.worst_task.removesuffix(', scaled')}"
                cells[-3:] = [over.text(), worst, f"{over.wins}/{over.losses}"]
        rows.append(cells)
    title = f"## `{OURS}` relative to each rival (the best of many is partly chance)"
    return f"{title}\n\n{table(head, rows)}"


def _by_family(data: Data, view: View) -> str:
    """Return the table of planners relative to best practice, by family of tasks."""
    groups = families(view)
    head = ["planner", *(f"{name}, {len(t)} tasks" for name, t in groups.items())]
    rows = []
    for name in planners(data):
        over = [
            paired.compare(t, name, BEST_PRACTICE, view.metric) for t in groups.values()
        ]
        rows.append([_marked(name), *map(_text, over)])
    over = [paired.compare(t, OURS, stock(data), view.metric) for t in groups.values()]
    rows.append([f"`{OURS}` over TorchRec's shortest", *map(_text, over)])
    title = f"## Relative to TorchRec's best practice by family. {view.title}"
    return f"{title}\n\n{table(head, rows)}"


def _by_ranks(data: Data) -> dict[int, list[Task]]:
    return dict(sorted(_grouped(data["tasks"], "world_size").items()))


def _planning(data: Data) -> str:
    """Return the table of planning seconds by number of ranks."""
    groups = _by_ranks(data)
    head = ["planning s, median"]
    head += [f"{ranks} ranks, {len(t)} plans" for ranks, t in groups.items()]
    rows = []
    for name in planners(data):
        if name != paired.AGAIN:
            by_ranks = [planning_seconds(t, name) for t in groups.values()]
            most = max((s for own in by_ranks for s in own), default=0.0)
            cells = [_median(own, ".2f") for own in by_ranks]
            rows.append([_marked(name), *cells, f"{most:.2f}"])
    title = "## Planning time"
    return f"{title}\n\n{table([*head, 'longest'], rows)}"


def _noise(data: Data) -> str:
    """Return the table of the measurements' noise, and of the collectives' share."""
    rows = []
    for view in views(data):
        both = [
            (e["predicted"][paired.COLLECTIVES], e["measured"])
            for t in view.tasks
            for e in t["planners"].values()
            if "measured" in e
        ]
        share = [m[paired.COLLECTIVES] / m[PATH] for _, m in both]
        judged = [p / m[paired.COLLECTIVES] for p, m in both if m[paired.COLLECTIVES]]
        deviation, count = paired.noise(view.tasks, view.metric)
        speeds = [t["machine_speed"] for t in view.tasks]
        least = paired.detectable(view.tasks, view.metric)
        rows.append(
            (
                view.title,
                f"{deviation:.1%}",
                f"{least:.1%} with {count} tasks",
                f"{min(speeds):.2f} to {max(speeds):.2f}",
                _median(share, ".1%"),
                _median(judged, ".2f"),
            )
        )
    head = (
        " | standard deviation of a plan timed twice | smallest detectable difference |"
        " speed of the machine | share of collectives, median | collectives: predicted "
        "/ published, median"
    )
    return f"## Noise, and share of collectives\n\n{table(head, rows)}"


def _choices(data: Data) -> str:
    """Return the table of how often the cost model picks the fastest plan."""
    rows = []
    for view in views(data):
        found = paired.choices(view.tasks, view.metric)
        regrets = sorted(c.regret for c in found)
        if not found:
            continue
        wrong = [r for r in regrets if r > 0]
        rows.append(
            (
                view.title,
                f"{len(found)}",
                _median([c.num_plans for c in found], ".0f"),
                f"{1 - len(wrong) / len(found):.0%}",
                f"{sum(r <= paired.SAME for r in regrets) / len(found):.0%}",
                f"{statistics.fmean(regrets):.2%}",
                f"{statistics.fmean(wrong or [0.0]):.2%}",
                f"{regrets[-1]:.1%}",
            )
        )
    head = (
        " | tasks | different plans, median | top-1 | within "
        f"{paired.SAME:.0%} of the fastest | mean regret | mean regret of wrong picks |"
        " regret, worst task"
    )
    title = "## How often the plan predicted fastest is the fastest measured"
    return f"{title}\n\n{table(head, rows)}"


def _described(data: Data) -> str:
    rows = []
    for rival in data["rivals"]:
        name = rival["name"]
        ended = paired.outcomes(data["tasks"], name)
        rows.append(
            (
                _marked(name),
                *(str(ended[status]) for status in _STATUSES),
                str(paired.violations(data["tasks"], name)),
                rival["about"],
                rival["training"] or "-",
            )
        )
    head = ("planner", *_STATUSES, "over memory", "description", "training")
    return f"## The planners\n\n{table(head, rows)}"


def _troubles(data: Data) -> str:
    """Return the table of missing plans, exceeded memory and fallbacks."""
    found: dict[tuple[str, str], dict[str, str]] = {}
    for task in data["tasks"]:
        for name, entry in task["planners"].items():
            over = entry.get("ranks_over_memory")
            if entry["status"] != "plan":
                what, why = entry["status"], entry["reason"]
            elif over:
                what, why = "over memory", f"ranks {over}"
            elif entry.get("fallback"):
                what, why = "TorchRec's plan", entry["fallback"]
            else:
                continue
            found.setdefault((name, what), {})[task["name"]] = why
    rows = [
        (name, what, ", ".join(tasks), _first_sentence(next(iter(tasks.values()))))
        for (name, what), tasks in sorted(found.items())
    ]
    title = "## Missing plans, exceeded memory and fallbacks"
    head = "planner | outcome | tasks | reason, on the first task"
    return f"{title}\n\n{table(head, rows) if rows else 'None.'}"


def _first_sentence(text: str) -> str:
    return text.split(". ")[0].replace("|", "/")


def _marked(name: str) -> str:
    return f"**{name}**" if name == OURS else name


def _text(found: paired.Paired | None) -> str:
    return found.text() if found else "-"


def _median(values: Sequence[float], form: str) -> str:
    return format(statistics.median(values), form) if values else "-"
