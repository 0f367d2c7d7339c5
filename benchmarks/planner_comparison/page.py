"""The page of results, in Markdown.

`notes` in the data, a list of sentences, are printed above the tables.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.pages import table
from planner_comparison import paired
from planner_comparison.paired import BEST_PRACTICE, COLUMNS, KERNELS, OURS, WORST_RANK
from planner_comparison.results import at

Task = dict[str, Any]
Data = dict[str, Any]

HEADLINE = "8 x H100"
"""Cluster of the first tables, if it has tasks."""
_STATUSES = ("no plan", "timed out", "failed", "not run")


def write_page(data: Data, out: Path) -> None:
    """Write `<out>.md`.

    Args:
        data: All results of the run.
        out: Path without suffix.
    """
    at(out, ".md").write_text(markdown(data), encoding="utf-8")


def _planners(data: Data) -> list[str]:
    return [r["name"] for r in data["rivals"]]


def _clusters(data: Data) -> dict[str, list[Task]]:
    """Return cluster -> tasks, with the headline's cluster first."""
    found: dict[str, list[Task]] = {}
    for task in data["tasks"]:
        found.setdefault(task["cluster"], []).append(task)
    return dict(sorted(found.items(), key=lambda item: item[0] != HEADLINE))


def _headline(data: Data) -> tuple[str, list[Task]]:
    return next(iter(_clusters(data).items()))


def headline(data: Data) -> str:
    """Return the README's table, for kernels alone, with a caption.

    Its rows are our planner, TorchRec's by default and by best practice, and the
    nearest of all other methods.
    """
    _, tasks = _headline(data)
    others = [n for n in _planners(data) if not n.startswith((OURS, "torchrec"))]
    rows = {
        OURS: "**this planner**",
        "torchrec": "TorchRec, default",
        BEST_PRACTICE: "TorchRec, best practice",
    }
    if nearest := paired.nearest(tasks, others, KERNELS):
        rows[nearest[0]] = f"best of {len(others)} other methods (`{nearest[0]}`)"
    head = (
        f"planner, {len(tasks)} tasks",
        "kernel time (95 % interval)",
        "worst task",
        "faster / slower",
    )
    cells = []
    for name, title in rows.items():
        over = paired.compare(tasks, name, BEST_PRACTICE, KERNELS)
        cells.append([title, "no plan", "-", "-"])
        if over is not None:
            cells[-1][1:] = [
                over.text(),
                f"{over.worst:.2f}",
                f"{over.wins} / {over.losses}",
            ]
    hardware, created = data["hardware"], str(data["created"])
    on_cpu = hardware["device_type"] == "cpu"
    device = f"{'one core of ' * on_cpu}an {hardware['device']}"
    least = paired.detectable(tasks, KERNELS)
    caption = (
        f"*Fused kernels of every rank, measured one rank after another on {device}, "
        f"{created[:10]}; 1 is TorchRec's best practice (table- and column-wise, "
        "pooling factors, `min_partition=32`). Geometric means; differences below "
        f"{least:.0%} are noise.*"
    )
    return f"{table(head, cells)}\n\n{caption}"


def _summary(data: Data, cluster: str, tasks: Sequence[Task]) -> str:
    rows = []
    for name in _planners(data):
        ended = paired.outcomes(tasks, name)
        stock, kernels, rank = (
            paired.compare(tasks, name, BEST_PRACTICE, metric)
            for metric in (paired.PATH, KERNELS, WORST_RANK)
        )
        rows.append(
            (
                _marked(name),
                f"{ended['plan']}/{sum(ended.values())}",
                str(paired.violations(tasks, name)),
                stock.text() if stock else "-",
                f"{stock.worst:.2f}" if stock else "-",
                f"{stock.wins}/{stock.losses}" if stock else "-",
                kernels.text() if kernels else "-",
                rank.text() if rank else "-",
            )
        )
    head = (
        "planner",
        "plans",
        "over memory",
        "relative to TorchRec's best practice",
        "worst task",
        "won/lost",
        "kernels only",
        "kernels of the busiest rank only",
    )
    title = f"## Kernels and collectives, {cluster}, {len(tasks)} tasks"
    return f"{title}\n\n{table(head, rows)}"


def _against(data: Data, ours: str) -> str:
    """Return the table of our plans relative to each rival's."""
    clusters = _clusters(data)
    others = [n for n in _planners(data) if n not in (ours, paired.AGAIN)]
    rivals = [n for n in others if not n.startswith(OURS)]
    yardsticks: dict[str, str | list[str]] = {
        "the best of TorchRec's": [n for n in others if n.startswith("torchrec")],
        "the best of all rivals'": rivals,
        **{name: name for name in others},
    }
    head = [f"`{ours}` relative to"]
    for cluster, tasks in clusters.items():
        head += [f"{cluster}, {len(tasks)} tasks", "worst task", "won/lost"]
    rows = []
    for name, yardstick in yardsticks.items():
        cells = [name]
        for tasks in clusters.values():
            over = paired.compare(tasks, ours, yardstick)
            cells += ["-"] * 3
            if over:
                cells[-3:] = [
                    over.text(),
                    f"{over.worst:.2f}",
                    f"{over.wins}/{over.losses}",
                ]
        rows.append(cells)
    title = f"## `{ours}` relative to each rival (the best of many is partly chance)"
    return f"{title}\n\n{table(head, rows)}"


def _by_family(data: Data) -> str:
    """Return the table of planners relative to best practice, by family of tasks."""
    cluster, tasks = _headline(data)
    families: dict[str, list[Task]] = {}
    for task in tasks:
        families.setdefault(task["family"], []).append(task)
    head = ["planner", *(f"{name}, {len(t)} tasks" for name, t in families.items())]
    rows = []
    for name in _planners(data):
        over = [paired.compare(t, name, BEST_PRACTICE) for t in families.values()]
        rows.append([_marked(name), *(p.text() if p else "-" for p in over)])
    title = f"## Relative to TorchRec's best practice by family, {cluster}"
    return f"{title}\n\n{table(head, rows)}"


def _carries(data: Data) -> str:
    """Return the table of collectives' shares, prediction errors and noise."""
    rows = []
    for cluster, tasks in _clusters(data).items():
        both = [
            (e["predicted"][paired.COLLECTIVES], e["measured"])
            for t in tasks
            for e in t["planners"].values()
            if "measured" in e
        ]
        share = [m[paired.COLLECTIVES] / m[paired.PATH] for _, m in both]
        judged = [p / m[paired.COLLECTIVES] for p, m in both if m[paired.COLLECTIVES]]
        deviation, count = paired.noise(tasks)
        speeds = [t["machine_speed"] for t in tasks]
        rows.append(
            (
                cluster,
                _median(share, ".1%"),
                _median(judged, ".2f"),
                _median(paired.prediction_ratios(tasks, OURS, paired.PATH), ".3f"),
                f"{deviation:.1%}",
                f"{paired.detectable(tasks):.1%} with {count} tasks",
                f"{min(speeds):.2f} to {max(speeds):.2f}",
            )
        )
    head = (
        "cluster",
        "share of collectives, median",
        "collectives: predicted / published, median",
        f"`{OURS}`: predicted / measured path, median",
        "standard deviation of a plan timed twice",
        "smallest detectable difference",
        "speed of the machine",
    )
    title = "## Share of collectives, and noise of the measurements"
    return f"{title}\n\n{table(head, rows)}"


def _choices(data: Data) -> str:
    """Return the table of how often the cost model picks the fastest plan."""
    rows = []
    for cluster, tasks in _clusters(data).items():
        found = paired.choices(tasks)
        regrets = sorted(c.regret for c in found)
        if not found:
            continue
        wrong = [r for r in regrets if r > 0]
        rows.append(
            (
                cluster,
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
        "cluster",
        "tasks",
        "different plans, median",
        "top-1",
        f"within {paired.SAME:.0%} of the fastest",
        "mean regret",
        "mean regret of wrong picks",
        "regret, worst task",
    )
    title = "## How often the plan predicted fastest has the fastest measured kernels"
    return f"{title}\n\n{table(head, rows)}"


def _more(data: Data) -> str:
    rows = []
    for rival in data["rivals"]:
        name = rival["name"]
        ended = paired.outcomes(data["tasks"], name)
        entries = [t["planners"].get(name, {}) for t in data["tasks"]]
        seconds = [e["seconds"] for e in entries if e.get("status") == "plan"]
        gaps = [e["gap"] for e in entries if e.get("gap") is not None]
        rank = paired.prediction_ratios(data["tasks"], name, WORST_RANK)
        rows.append(
            (
                _marked(name),
                *(str(ended[status]) for status in _STATUSES),
                _median(seconds, ".2f"),
                f"{max(seconds):.2f}" if seconds else "-",
                _median(rank, ".3f"),
                _median(gaps, ".1%"),
                rival["about"],
                rival["training"] or "-",
            )
        )
    head = (
        "planner",
        *_STATUSES,
        "planning s, median",
        "planning s, longest",
        "kernels of the busiest rank: predicted / measured, median",
        "gap to its bound, median",
        "description",
        "training",
    )
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
    head = ("planner", "outcome", "tasks", "reason, on the first task")
    return f"{title}\n\n{table(head, rows) if rows else 'None.'}"


def _first_sentence(text: str) -> str:
    return text.split(". ")[0].replace("|", "/")


def _marked(name: str) -> str:
    return f"**{name}**" if name == OURS else name


def _median(values: Sequence[float], form: str) -> str:
    return format(statistics.median(values), form) if values else "-"


def markdown(data: Data) -> str:
    """Return the page of a run with at least one task."""
    hardware, model = data["hardware"], data["cost_model"]
    variables = (f"{n}={v}" for n, v in data["environment"].items())
    about = "; ".join(f"**{name}**, {text}" for name, text in data["clusters"].items())
    notes = [f"- {note}" for note in data.get("notes", ())]
    count = len({t["task"] for t in data["tasks"]})
    parts = [
        "# Planners compared on timed kernels",
        f"{hardware['device']}; torch {hardware['torch']}, fbgemm "
        f"{hardware['fbgemm']}, torchrec {data['torchrec']}; commit {data['commit']}; "
        f"{data['created']} to {data['updated']}. {count} of {data['num_tasks']} "
        "tasks.",
        f"Cost model: {model['name']} ({model['source']}, {model['hardware']}).",
        f"Clusters: {about}.",
        f"    {' '.join([*variables, data['command']])}",
        *(["## Caveats", "\n".join(notes)] if notes else []),
        *(_summary(data, *group) for group in _clusters(data).items()),
        _against(data, OURS),
        *([_against(data, COLUMNS)] if COLUMNS in _planners(data) else []),
        _by_family(data),
        _carries(data),
        _choices(data),
        _more(data),
        _troubles(data),
        "`docs/comparison.md` explains the measurements. Intervals are "
        f"{paired.CONFIDENCE:.0%} bootstrap intervals over tasks. Ratios within "
        f"{paired.SAME:.0%} of 1 count as neither won nor lost. A ratio of two "
        "planners leaves out tasks for which one of them has no plan.",
        "## Settings",
        "\n".join(f"    {key}: {value}" for key, value in data["options"].items()),
    ]
    return "\n\n".join(parts) + "\n"
