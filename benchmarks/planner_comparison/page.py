"""The results for people to read: one page of Markdown.

`notes` in the data, a list of sentences, stand above its tables.
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
"""The cluster of the first tables, where it has tasks."""
_STATUSES = ("no plan", "timed out", "failed", "not run")


def write_page(data: Data, out: Path) -> None:
    """Write `<out>.md`.

    Args:
        data: Everything that is known of the run.
        out: Path without a suffix.
    """
    at(out, ".md").write_text(markdown(data), encoding="utf-8")


def _planners(data: Data) -> list[str]:
    return [r["name"] for r in data["rivals"]]


def _clusters(data: Data) -> dict[str, list[Task]]:
    """Return the tasks of each cluster that has some, the headline's first."""
    found: dict[str, list[Task]] = {}
    for task in data["tasks"]:
        found.setdefault(task["cluster"], []).append(task)
    return dict(sorted(found.items(), key=lambda item: item[0] != HEADLINE))


def _headline(data: Data) -> tuple[str, list[Task]]:
    return next(iter(_clusters(data).items()))


def headline(data: Data) -> str:
    """Return four rows for the README, kernels alone, under what they were measured on.

    Our planner, TorchRec's by default and as it is best used, and the nearest of all
    other methods.
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
        "over TorchRec's best practice",
        "worst task",
        "won/lost",
        "kernels alone",
        "kernels of the busiest rank alone",
    )
    title = f"## Kernels and collectives, {cluster}, {len(tasks)} tasks"
    return f"{title}\n\n{table(head, rows)}"


def _against(data: Data, ours: str) -> str:
    """Plans of ours over each rival's, wherever they lose, too."""
    clusters = _clusters(data)
    others = [n for n in _planners(data) if n not in (ours, paired.AGAIN)]
    rivals = [n for n in others if not n.startswith(OURS)]
    yardsticks: dict[str, str | list[str]] = {
        "the shortest of TorchRec's": [n for n in others if n.startswith("torchrec")],
        "the shortest of all rivals'": rivals,
        **{name: name for name in others},
    }
    head = [f"`{ours}` over the plans of"]
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
    title = f"## `{ours}` over each rival; the shortest of many is so by chance, too"
    return f"{title}\n\n{table(head, rows)}"


def _by_family(data: Data) -> str:
    """Who plans over best practice, in each family of tasks."""
    cluster, tasks = _headline(data)
    families: dict[str, list[Task]] = {}
    for task in tasks:
        families.setdefault(task["family"], []).append(task)
    head = ["planner", *(f"{name}, {len(t)} tasks" for name, t in families.items())]
    rows = []
    for name in _planners(data):
        over = [paired.compare(t, name, BEST_PRACTICE) for t in families.values()]
        rows.append([_marked(name), *(p.text() if p else "-" for p in over)])
    title = f"## Over TorchRec's best practice by family, {cluster}"
    return f"{title}\n\n{table(head, rows)}"


def _carries(data: Data) -> str:
    """What the sums are made of, and what chance makes of them."""
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
                f"{paired.detectable(tasks):.1%} of {count} tasks",
                f"{min(speeds):.2f} to {max(speeds):.2f}",
            )
        )
    head = (
        "cluster",
        "collectives' share, median plan",
        "collectives predicted over judged, median",
        f"`{OURS}`'s sum predicted over measured, median",
        "a plan over itself, timed twice: deviation",
        "smallest detectable mean",
        "machine's speed",
    )
    title = "## What carries the sums, and how finely they were measured"
    return f"{title}\n\n{table(head, rows)}"


def _choices(data: Data) -> str:
    """How often the plan that the costs call shortest is so, and what is lost."""
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
        f"top-1, or within {paired.SAME:.0%}",
        "regret, mean",
        "regret where it is another plan, mean",
        "regret, worst task",
    )
    title = "## Is the plan that the costs choose the shortest on measured kernels"
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
        "most",
        "worst rank's kernels predicted over measured, median",
        "gap to own bound, median",
        "what it is",
        "training",
    )
    return f"## The planners\n\n{table(head, rows)}"


def _troubles(data: Data) -> str:
    """Every task without a plan; memory exceeded; plans that were replaced."""
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
    title = "## No plan, too much memory, or another's plan"
    head = ("planner", "what", "tasks", "why, on the first of them")
    return f"{title}\n\n{table(head, rows) if rows else 'None.'}"


def _first_sentence(text: str) -> str:
    return text.split(". ")[0].replace("|", "/")


def _marked(name: str) -> str:
    return f"**{name}**" if name == OURS else name


def _median(values: Sequence[float], form: str) -> str:
    return format(statistics.median(values), form) if values else "-"


def markdown(data: Data) -> str:
    """Return the page of a run that has tasks."""
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
        *(["## To be read with care", "\n".join(notes)] if notes else []),
        *(_summary(data, *group) for group in _clusters(data).items()),
        _against(data, OURS),
        *([_against(data, COLUMNS)] if COLUMNS in _planners(data) else []),
        _by_family(data),
        _carries(data),
        _choices(data),
        _more(data),
        _troubles(data),
        "How it was measured: `docs/comparison.md`. Intervals: "
        f"{paired.CONFIDENCE:.0%}, bootstrap over tasks. Won and lost leave out ratios "
        f"within {paired.SAME:.0%} of 1. Tasks that one of two planners has no plan "
        "for are left out of their ratio.",
        "## Settings",
        "\n".join(f"    {key}: {value}" for key, value in data["options"].items()),
    ]
    return "\n\n".join(parts) + "\n"
