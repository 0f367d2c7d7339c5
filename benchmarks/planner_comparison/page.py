"""The results for people to read: a short Markdown page and a long HTML page.

The Markdown page holds the tables that sum up; the HTML page has each task and figures,
too. `notes` in the data, a list of sentences, stand above the tables of both.
"""

from __future__ import annotations

import base64
import html
import io
import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner_comparison import paired
from planner_comparison.paired import (
    BEST_PRACTICE,
    COLUMNS,
    KERNELS,
    OURS,
    PAPER,
    PATH,
    WORST_RANK,
)
from planner_comparison.results import at

Task = dict[str, Any]
Data = dict[str, Any]

HEADLINE = "8 x H100"
_ALL = "all, each on its first cluster"
HOW = (
    "Kernels of every rank run on the device named above, one rank after another in "
    "one process: each rank has the device to itself. All plans' kernels are timed in "
    "turn: all in two rounds, those of at least 0.8 of a plan's slowest rank in all "
    "five (fewer, if the settings say so). A pass is timed beside a fixed reference "
    "set and given in the milliseconds of the cost model's bundle, by the median "
    "reference of nine passes around it: such milliseconds are of a machine at its "
    "nominal speed with warm caches, and do not compare between machines. In a round "
    "each table reads the same ids whoever put it where. Kernels are not scaled to "
    "any GPU, unless the first lines say so.",
    "Collectives are those of named clusters, from tables that others published of 8 "
    "and 2 x 8 B200, scaled to the named card's bandwidth (see "
    "`planner_comparison/clusters.py`), and of no planner's model. Every planner "
    "plans for the cluster that it is judged on, with its published bandwidths "
    "(gloo's, whose collectives are measured here, is a guess).",
    "`kernels` adds up, for each sharding type that a plan uses, the slowest rank's "
    "forward and backward, the reordering of split tables' columns included; "
    "`collectives` the all-to-alls of ids, outputs and gradients, or what the type "
    "has in their place. This planner minimises the sum of both, and so do searches "
    "on its costs; kernels of types that TorchRec lets overlap are longer so than the "
    "busiest rank's, which has a column of its own.",
    "Tables of the DLRM dataset and of EMBark are those that the cost model was not "
    "trained on. MLPerf's 26 tables mostly were, and are the same with every seed.",
    "`default` and TorchRec's planner may choose among the sharding types that "
    "TorchRec offers on GPUs (on CPUs it keeps back those that split rows); most "
    "others place whole tables or columns, as they were published: see the table of "
    "planners. A table by rows is judged as if its ids were spread evenly over the "
    "rows.",
    "Data-parallel tables run in a fused kernel on a rank's samples; the optimizer's "
    "pass over all their rows is not timed, in favour of plans that have them. "
    "Between nodes no tables by rows of a node and no grids are offered.",
    "Planning seconds are of `plan()` with everything loaded, one thread a planner, "
    "as many planners at a time as the settings name planning processes. They tell "
    "nothing about training: that is a column of its own.",
    "NeuroShard's nets of collectives are trained once for each cluster and number of "
    "ranks, to imitate the published ones. Who takes as long as many others together "
    "plans a part of the tasks, drawn by their names: see the table of planners. "
    "Every sixth task of 4 or 8 ranks is planned for and judged on A100s, too.",
    "Ratios are paired: same task, both plans. Tasks that one of the two has no plan "
    "for are left out, in favour of who has none, and counted in the columns of "
    "outcomes. Won and lost leave out ratios within "
    f"{paired.SAME:.0%} of 1. Intervals: {paired.CONFIDENCE:.0%}, bootstrap over "
    f"tasks, {paired.RESAMPLES:,} draws, as if tasks were independent; some share "
    "tables, which makes intervals too narrow. What is detectable is said of "
    "measuring alone: a smaller difference of means on these tasks is chance; other "
    "tasks differ by the intervals. Single tasks differ by several times their "
    "deviation now and then.",
)

_TICKS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.2, 1.5, 2, 3, 4, 6)
_DPI = 100
_PREDICTED = "predicted"
_FASTER = (1, 10, 30, 100)
_FIRST = 3
"""Tables that stand before the figures."""
_STATUSES = ("plan", "no plan", "timed out", "failed", "not run")


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Rows of text under a title; the first column is left-aligned."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    long: bool = False
    """Shown on the HTML page alone."""

    def markdown(self) -> str:
        """As a Markdown table."""
        lines = [self.head, ["---", *["---:"] * (len(self.head) - 1)], *self.rows]
        table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        return f"## {self.title}\n\n{table}\n"

    def html(self) -> str:
        """As an HTML table."""

        def row(cells: Sequence[str], tag: str) -> str:
            marked = "".join(f"<{tag}>{_inline(c)}</{tag}>" for c in cells)
            return f"<tr>{marked}</tr>"

        body = "\n".join(row(r, "td") for r in self.rows)
        return (
            f"<h2>{_inline(self.title)}</h2>\n<div class='scroll'><table>"
            f"<thead>{row(self.head, 'th')}</thead>\n"
            f"<tbody>{body}</tbody></table></div>"
        )


def write_pages(data: Data, out: Path) -> None:
    """Write `<out>.md` and `<out>.html`.

    Args:
        data: Everything that is known of the run.
        out: Path without a suffix.
    """
    figures = {family: figure(data, family) for family in _families(data)}
    figures[_PREDICTED] = prediction_figure(data)
    at(out, ".md").write_text(markdown(data, out.name), encoding="utf-8")
    at(out, ".html").write_text(page(data, figures), encoding="utf-8")


def _families(data: Data) -> list[str]:
    return list(dict.fromkeys(t["family"] for t in data["tasks"]))


def _planners(data: Data) -> list[str]:
    return [r["name"] for r in data["rivals"]]


def _on(data: Data, cluster: str) -> list[Task]:
    return [t for t in data["tasks"] if t["cluster"] == cluster]


def _clusters(data: Data) -> dict[str, list[Task]]:
    """Return the tasks of each cluster that has some."""
    return {c: _on(data, c) for c in data["clusters"] if _on(data, c)}


def _groups(data: Data) -> dict[str, list[Task]]:
    """Return the tasks of each cluster, and all tasks, each on its first cluster."""
    groups = _clusters(data)
    if len(groups) > 1:
        first = {t["task"]: t for tasks in reversed(groups.values()) for t in tasks}
        groups[_ALL] = list(first.values())
    return groups


def _headline(data: Data) -> str:
    """The cluster of the first tables."""
    known = _clusters(data)
    return HEADLINE if HEADLINE in known else next(iter(known), HEADLINE)


def tables(data: Data) -> list[Table]:
    """Return the tables of the HTML page that have rows, the summary first."""
    known = [
        _expectation_table(data),
        _summary(data),
        _against(data, OURS),
        _against(data, COLUMNS),
        _by_cluster(data),
        _carries(data),
        _faster(data),
        _accuracy(data),
        _more(data),
        _by_family(data),
        _by_task(data, PATH, "Kernels and collectives of each task [ms]"),
        _by_task(data, KERNELS, "Kernels of each task [ms]"),
        _nets(data),
        _troubles(data),
        _rival_table(data),
    ]
    return [table for table in known if table.rows]


def headline(data: Data) -> str:
    """Return four rows for the README, kernels alone, under what they were measured on.

    Our planner, TorchRec's by default and as it is best used, and the nearest of all
    other methods.
    """
    cluster = _headline(data)
    tasks = _on(data, cluster)
    others = [n for n in _planners(data) if not n.startswith((OURS, "torchrec"))]
    rows = {
        OURS: "**this planner**",
        "torchrec": "TorchRec, default",
        BEST_PRACTICE: "TorchRec, best practice",
    }
    if nearest := paired.nearest(tasks, others, KERNELS):
        rows[nearest[0]] = f"best of {len(others)} other methods (`{nearest[0]}`)"
    lines = [
        f"| planner, {len(tasks)} tasks | kernel time (95 % interval) | "
        "worst task | faster / slower |",
        "| --- | ---: | ---: | ---: |",
    ]
    for name, title in rows.items():
        over = paired.compare(tasks, name, BEST_PRACTICE, KERNELS)
        cells = ["no plan", "-", "-"]
        if over is not None:
            cells = [over.text(), f"{over.worst:.2f}", f"{over.wins} / {over.losses}"]
        lines.append(f"| {' | '.join([title, *cells])} |")
    hardware, created = data["hardware"], str(data["created"])
    on_cpu = hardware["device_type"] == "cpu"
    device = f"{'one core of ' * on_cpu}an {hardware['device']}"
    least = paired.detectable(tasks, KERNELS)
    caption = (
        f"*Fused kernels of every rank, measured one rank after another on {device}, "
        f"{created[:10]}; 1 is TorchRec's best practice (table- and column-wise, "
        "pooling factors, `min_partition=32`). Geometric means; differences below "
        f"{least:.0%} are noise.{' No GPU was measured.' * on_cpu}*"
    )
    return "\n".join([*lines, "", caption])


def _in_company(tasks: Sequence[Task], name: str, over: paired.Paired) -> str:
    """Return a mean; of who plans a part of the tasks, with our own on these beside it.

    Args:
        tasks: Of one cluster.
        name: Of the planner.
        over: The planner over TorchRec's best practice.
    """
    own = paired.asked(tasks, name)
    ours = paired.compare(own, OURS, BEST_PRACTICE)
    if len(own) == len(tasks) or ours is None:
        return over.text()
    return f"{over.text()}; `{OURS}` there {ours.mean:.3f}"


def _expectation_table(data: Data) -> Table:
    words = {True: "met", False: "**not met**", None: "open"}
    cluster, groups = _headline(data), _groups(data)
    every = groups.pop(_ALL, [])
    found = [(cluster, e) for e in paired.expectations(_on(data, cluster))]
    found += [(_ALL, e) for e in paired.expectations(every) if e.of_ours]
    others = {group: tasks for group, tasks in groups.items() if group != cluster}
    found += [(group, paired.is_never_slower(t)) for group, t in others.items()]
    return Table(
        title=f"What was expected of {cluster}, and what of it holds on all tasks",
        head=("tasks", "expected", "found", ""),
        rows=[(group, e.expected, e.found, words[e.met]) for group, e in found],
    )


def _summary(data: Data) -> Table:
    cluster = _headline(data)
    tasks = _on(data, cluster)
    rows = []
    for name in _planners(data):
        ended = paired.outcomes(tasks, name)
        stock = paired.compare(tasks, name, BEST_PRACTICE)
        kernels = paired.compare(tasks, name, BEST_PRACTICE, KERNELS)
        rank = paired.compare(tasks, name, BEST_PRACTICE, WORST_RANK)
        rows.append(
            (
                _marked(name),
                f"{ended['plan']}/{sum(ended.values())}",
                str(paired.violations(tasks, name)),
                _in_company(tasks, name, stock) if stock else "-",
                f"{stock.worst:.2f}" if stock else "-",
                f"{stock.wins}/{stock.losses}" if stock else "-",
                kernels.text() if kernels else "-",
                rank.text() if rank else "-",
            )
        )
    return Table(
        title=f"Kernels and collectives, {cluster}, {len(tasks)} tasks",
        head=(
            "planner",
            "plans",
            "over memory",
            "over TorchRec's best practice",
            "worst task",
            "won/lost",
            "kernels alone",
            "kernels of the busiest rank alone",
        ),
        rows=rows,
    )


def _against(data: Data, ours: str) -> Table:
    """Plans of ours over each rival's, wherever they lose, too."""
    clusters = _clusters(data)
    others = [n for n in _planners(data) if n not in (ours, paired.AGAIN)]
    rivals = [n for n in others if not n.startswith(OURS)]
    shortest = {
        "the shortest of TorchRec's": paired.stock(data["tasks"]),
        "the shortest of all rivals'": rivals,
    }
    rows = []
    for name in (*shortest, *others):
        cells = [name]
        for tasks in clusters.values():
            over = paired.compare(tasks, ours, shortest.get(name, name))
            cells += (
                [over.text(), f"{over.worst:.2f}", f"{over.wins}/{over.losses}"]
                if over
                else ["-"] * 3
            )
        rows.append(cells)
    head = [f"`{ours}` over the plans of"]
    for cluster, tasks in clusters.items():
        head += [f"{cluster}, {len(tasks)} tasks", "worst task", "won/lost"]
    return Table(
        title=f"`{ours}` over each rival; the shortest of many is so by chance, too",
        head=head,
        rows=rows,
    )


def _faster(data: Data) -> Table:
    """What becomes of the ratios where kernels weigh less against collectives."""
    tasks = _on(data, _headline(data))
    rivals = (BEST_PRACTICE, "torchrec", PAPER, "embark")
    rows = []
    for times in _FASTER:
        cells = [f"{times}"]
        shares = []
        for rival in rivals:
            found = paired.pair(paired.scaled(tasks, OURS, rival, times))
            cells.append(found.text() if found else "-")
        for task in tasks:
            if (kernels := paired.measured(task, OURS, KERNELS)) is not None:
                rest = paired.measured(task, OURS, paired.COLLECTIVES) or 0.0
                shares.append(rest / (kernels / times + rest))
        rows.append((*cells, f"{statistics.median(shares):.1%}" if shares else "-"))
    return Table(
        title=f"`{OURS}` over others on {_headline(data)}, were kernels so many times "
        "faster than they were planned for; plans as they are",
        head=(
            "times",
            *(f"over `{r}`" for r in rivals),
            f"collectives' share of `{OURS}`, median",
        ),
        rows=rows,
    )


def _by_cluster(data: Data) -> Table:
    """How far the order of the planners hangs on the cluster."""
    columns = _groups(data)
    headline = columns.get(_headline(data), [])
    for cluster, tasks in list(columns.items()):
        names = {t["task"] for t in tasks}
        same = [t for t in headline if t["task"] in names]
        if 0 < len(same) < len(headline):
            columns[f"{_headline(data)}, tasks of {cluster}"] = same
    shown: list[dict[str, str]] = []
    for tasks in columns.values():
        found = {n: paired.compare(tasks, n, BEST_PRACTICE) for n in _planners(data)}
        means = {n: p.mean for n, p in found.items() if p is not None}
        # Who plans a part of the tasks has no place among the others.
        whole = [n for n in means if len(paired.asked(tasks, n)) == len(tasks)]
        ranked = sorted(means[n] for n in whole)
        places = {n: f", {ranked.index(means[n]) + 1}." for n in whole}
        shown.append({n: f"{m:.3f}{places.get(n, '')}" for n, m in means.items()})
    rows = [
        [_marked(name), *(cells.get(name, "-") for cells in shown)]
        for name in _planners(data)
    ]
    return Table(
        title="Over TorchRec's best practice, and the place, by cluster",
        head=("planner", *(f"{c}, {len(t)} tasks" for c, t in columns.items())),
        rows=rows,
    )


def _carries(data: Data) -> Table:
    """What the sums are made of, and what chance makes of them."""
    rows = []
    for cluster, tasks in _groups(data).items():
        both = [
            (e["predicted"][paired.COLLECTIVES], e["measured"])
            for t in tasks
            for e in t["planners"].values()
            if "measured" in e
        ]
        if not both:
            continue
        share = [m[paired.COLLECTIVES] / m[PATH] for _, m in both]
        foretold = [p / m[paired.COLLECTIVES] for p, m in both if m[paired.COLLECTIVES]]
        deviation, count = paired.noise(tasks)
        speeds = [t["machine_speed"] for t in tasks]
        rows.append(
            (
                cluster,
                f"{statistics.median(share):.1%}",
                f"{min(share):.1%} to {max(share):.1%}",
                _median(foretold, ".2f"),
                _median(paired.prediction_ratios(tasks, OURS, PATH), ".3f"),
                f"{deviation:.1%}",
                f"{paired.detectable(tasks):.1%} of {count} tasks",
                f"{min(speeds):.2f} to {max(speeds):.2f}",
            )
        )
    return Table(
        title="What carries the sums, and how finely they were measured",
        head=(
            "cluster",
            "collectives' share, median plan",
            "least and most",
            "collectives predicted over judged, median",
            f"`{OURS}`'s sum predicted over measured, median",
            "a plan over itself, timed twice: deviation",
            "smallest detectable mean",
            "machine's speed",
        ),
        rows=rows,
    )


def _accuracy(data: Data) -> Table:
    """Predicted over measured kernels of plans' ranks, by decile of what they take."""
    both = sorted(
        (m[0] + m[1], p[0] + p[1])
        for t in data["tasks"]
        for name, e in t["planners"].items()
        if "measured" in e and name != paired.AGAIN
        for m, p in zip(
            e["measured"]["ranks_ms"], e["predicted"]["ranks_ms"], strict=True
        )
        if m[0] + m[1] > 0
    )
    twice = [
        (sum(first), sum(second))
        for t in data["tasks"]
        if "measured" in t["planners"].get(paired.AGAIN, ())
        for first, second in zip(
            *(
                t["planners"][name]["measured"]["ranks_ms"]
                for name in (paired.OURS, paired.AGAIN)
            ),
            strict=True,
        )
        if sum(first) > 0
    ]
    count = min(10, len(both))
    rows = []
    for number in range(count):
        part = both[number * len(both) // count : (number + 1) * len(both) // count]
        off = [p / m for m, p in part]
        noise = [
            2 * abs(b - a) / (a + b)
            for a, b in twice
            if part[0][0] <= (a + b) / 2 <= part[-1][0]
        ]
        rows.append(
            (
                f"{part[0][0]:.2f} to {part[-1][0]:.2f}",
                str(len(part)),
                f"{statistics.fmean(abs(o - 1) for o in off):.1%}",
                f"{statistics.median(off):.3f}",
                str(len(noise)),
                f"{statistics.fmean(noise):.1%}" if noise else "-",
            )
        )
    return Table(
        title="Ranks of all plans: predicted kernels beside measured ones, by decile",
        head=(
            "measured [ms]",
            "ranks",
            "mean error",
            "predicted over measured, median",
            "timed twice",
            "they differ by, mean",
        ),
        rows=rows,
    )


def _more(data: Data) -> Table:
    tasks = data["tasks"]
    rows = []
    for rival in data["rivals"]:
        name = rival["name"]
        ended = paired.outcomes(tasks, name)
        entries = [t["planners"][name] for t in paired.asked(tasks, name)]
        seconds = [e["seconds"] for e in entries if e["status"] == "plan"]
        gaps = [e["gap"] for e in entries if e.get("gap") is not None]
        rank = paired.prediction_ratios(tasks, name, WORST_RANK)
        rows.append(
            (
                _marked(name),
                *(str(ended[status]) for status in _STATUSES[1:]),
                _median(seconds, ".2f"),
                f"{max(seconds):.2f}" if seconds else "-",
                _training(rival["training"]),
                _median(rank, ".3f"),
                _median(gaps, ".1%"),
            )
        )
    return Table(
        title="Outcomes, planning and training times, predictions",
        head=(
            "planner",
            *_STATUSES[1:],
            "planning s, median",
            "most",
            "training s",
            "worst rank's kernels predicted over measured, median",
            "gap to own bound, median",
        ),
        rows=rows,
    )


def _by_family(data: Data) -> Table:
    """Where the gain is: who plans over best practice, and ours over others."""
    families = {
        f: [t for t in _on(data, _headline(data)) if t["family"] == f]
        for f in _families(data)
    }

    def cells(name: str, over: str | Sequence[str]) -> list[str]:
        found = [paired.compare(tasks, name, over) for tasks in families.values()]
        return [f"{p.text()}, {p.num_tasks}" if p else "-" for p in found]

    rows = [
        [f"`{OURS}` over `{rival}`", *cells(OURS, rival)]
        for rival in ("torchrec", PAPER, "embark")
        if rival in _planners(data)
    ]
    shortest = cells(OURS, paired.stock(data["tasks"]))
    rows.append([f"`{OURS}` over the shortest of TorchRec's", *shortest])
    rows += [[_marked(n), *cells(n, BEST_PRACTICE)] for n in _planners(data)]
    return Table(
        title="By family, and tasks: over best practice, but for the first rows; "
        f"{_headline(data)}",
        head=("planner", *families),
        rows=rows,
    )


def _by_task(data: Data, metric: str, title: str) -> Table:
    rows = []
    for task in data["tasks"]:
        cells = [task["name"]]
        for name in _planners(data):
            value = paired.measured(task, name, metric)
            status = task["planners"].get(name, {}).get("status", "-")
            cells.append(
                status if value is None else f"{value:.{2 if value >= 1 else 3}f}"
            )
        rows.append(cells)
    return Table(title=title, head=("task", *_planners(data)), rows=rows, long=True)


def _nets(data: Data) -> Table:
    """How the paper's nets were trained, and what they are off."""
    return Table(
        title="NeuroShard's own nets: off their labels (root mean square), and off "
        "measured sets of unseen tables with the tasks' rows and batches",
        head=(
            "planner",
            "optimizer",
            "seed",
            "sets",
            "epochs",
            "off labels, ms",
            "measured sets",
            "median error",
        ),
        rows=[
            (
                rival["name"],
                net["optimizer"],
                str(net["seed"]),
                f"{net['sets']:,}",
                f"{net['epochs']:,}",
                f"{net['test_rms_ms']:.2f}",
                str(net["judged_sets"]),
                _median(net["judged_error"], ".1%"),
            )
            for rival in data["rivals"]
            for net in rival["training"].get("nets", ())
        ],
    )


def _troubles(data: Data) -> Table:
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
        for (name, what), tasks in found.items()
    ]
    return Table(
        title="No plan, too much memory, or another's plan",
        head=("planner", "what", "tasks", "why, on the first of them"),
        rows=sorted(rows),
    )


def _first_sentence(text: str) -> str:
    return text.split(". ")[0].replace("|", "/")


def _rival_table(data: Data) -> Table:
    return Table(
        title="The planners",
        head=("planner", "what it is"),
        rows=[(_marked(r["name"]), r["about"]) for r in data["rivals"]],
    )


def _marked(name: str) -> str:
    return f"**{name}**" if name == OURS else name


def _median(values: Sequence[float], form: str) -> str:
    return format(statistics.median(values), form) if values else "-"


def _training(training: dict[str, Any]) -> str:
    if not training:
        return "-"
    seconds = training["training_seconds"]
    return "not recorded" if seconds is None else f"{seconds:.0f}"


def _not_kept(data: Data) -> str:
    """Say how many tries were measured in vain: on a slow or a disturbed machine."""
    tries = data.get("not_kept")
    if tries is None:
        return ""
    slow = sum(t["machine_speed"] < t["least_speed"] for t in tries)
    return (
        f"; beside these, {slow} tries on a machine below the least speed and "
        f"{len(tries) - slow} whose passes differed too much were not kept"
    )


def _introduction(data: Data) -> list[str]:
    hardware = data["hardware"]
    return [
        f"{hardware['device']}; torch {hardware['torch']}, "
        f"fbgemm {hardware['fbgemm']}, torchrec {data['torchrec']}; "
        f"commit {data['commit']}; {data['created']} to {data['updated']}. "
        f"{len({t['task'] for t in data['tasks']})} of {data['num_tasks']} tasks"
        f"{_not_kept(data)}.",
        f"Cost model: {data['cost_model']['name']} ({data['cost_model']['source']}, "
        f"{data['cost_model']['hardware']}).",
        "Clusters: "
        + "; ".join(f"**{name}**, {about}" for name, about in data["clusters"].items())
        + ".",
        *_scaled(data),
    ]


def _scaled(data: Data) -> Iterable[str]:
    """Say what kernels' times are divided by, if by anything."""
    faster = data["options"].get("kernels_faster", 1.0)
    if faster != 1:
        yield (
            f"**Kernels count as {faster:g} times faster than they were timed**, for "
            "every planner's costs and for what its plans are judged by. Who cannot "
            "plan for that is left out: nets and policies trained on kernels as they "
            "are."
        )


def _command(data: Data) -> str:
    """The command that wrote the data, at its commit."""
    variables = data.get("environment", {})
    return " ".join([*(f"{n}={v}" for n, v in variables.items()), data["command"]])


def markdown(data: Data, name: str) -> str:
    """Return the Markdown page.

    Args:
        data: Everything that is known of the run.
        name: Of the run's files, without a suffix.
    """
    parts = ["# Planners compared on timed kernels\n"]
    parts += [f"{line}\n" for line in _introduction(data)]
    parts.append(f"    {_command(data)}\n")
    if data.get("notes"):
        parts.append("## To be read with care\n")
        parts.append("\n".join(f"- {note}" for note in data["notes"]) + "\n")
    shown = [t for t in tables(data) if not t.long] if data["tasks"] else []
    parts += [table.markdown() for table in shown[:_FIRST]]
    parts.append(f"Each task, and figures: `{name}.html`, written by the same run.\n")
    parts.append("## How it was measured\n")
    parts.append("\n".join(f"- {line}" for line in HOW) + "\n")
    parts += [table.markdown() for table in shown[_FIRST:]]
    parts.append("## Settings\n")
    parts += [f"    {key}: {value}" for key, value in data["options"].items()]
    return "\n".join(parts) + "\n"


_STYLE = """
body { font: 14px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 76rem;
  padding: 0 1rem; color: #1c2024; background: #fff; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .6rem; border-bottom: 1px solid #dde1e6; text-align: right; }
th:first-child, td:first-child { text-align: left; }
th { vertical-align: bottom; }
.scroll { overflow-x: auto; }
pre, code { background: #f2f4f6; padding: .1rem .3rem; }
pre { padding: .6rem; overflow-x: auto; }
img { max-width: 100%; height: auto; }
"""


def page(data: Data, figures: dict[str, bytes]) -> str:
    """Return one HTML page that needs no other file."""
    shown = [t.html() for t in tables(data)] if data["tasks"] else []
    captions = {
        **data["families"],
        _PREDICTED: "Predicted and measured kernels, every plan",
    }
    drawn = [
        f"<figure><img alt='{name}' "
        f"src='data:image/png;base64,{base64.b64encode(png).decode()}'>"
        f"<figcaption>{_inline(captions[name])}</figcaption></figure>"
        for name, png in figures.items()
    ]
    how = "".join(f"<li>{_inline(line)}</li>" for line in HOW)
    notes = "".join(f"<li>{_inline(note)}</li>" for note in data.get("notes", ()))
    options = html.escape(json.dumps(data["options"], indent=1))
    return "\n".join(
        [
            "<!doctype html><html lang='en'><meta charset='utf-8'>",
            "<title>Planners compared</title>",
            f"<style>{_STYLE}</style>",
            "<h1>Planners compared on timed kernels</h1>",
            *(f"<p>{_inline(line)}</p>" for line in _introduction(data)),
            f"<pre>{html.escape(_command(data))}</pre>",
            f"<h2>To be read with care</h2><ul>{notes}</ul>" if notes else "",
            *shown[:_FIRST],
            "<h2>Figures</h2>",
            *drawn,
            "<h2>How it was measured</h2>",
            f"<ul>{how}</ul>",
            *shown[_FIRST:],
            f"<h2>Settings</h2><pre>{options}</pre></html>",
            "",
        ]
    )


def _inline(text: str) -> str:
    """Escape text; its `code` and **bold** become HTML."""
    escaped = html.escape(text, quote=False)
    for mark, tag in (("**", "b"), ("`", "code")):
        parts = escaped.split(mark)
        if len(parts) % 2:
            escaped = parts[0] + "".join(
                f"<{tag}>{inside}</{tag}>{after}"
                for inside, after in zip(parts[1::2], parts[2::2], strict=True)
            )
    return escaped


def figure(data: Data, family: str) -> bytes:
    """Draw each planner's ratios to TorchRec's best practice in a family, as PNG."""
    tasks = [t for t in _on(data, _headline(data)) if t["family"] == family]
    planners = _planners(data)
    drawing, panel = _panel((9, 0.34 * len(planners) + 1.6))
    for row, name in enumerate(planners):
        found = list(paired.ratios(tasks, name, BEST_PRACTICE).values())
        color = "#c2410c" if name == OURS else "#33608f"
        panel.scatter(found, _spread(row, found), s=12, color=color, alpha=0.45)
        mean = paired.compare(tasks, name, BEST_PRACTICE)
        if mean is not None:
            panel.plot([mean.low, mean.high], [row, row], color=color, linewidth=2)
            panel.plot(mean.mean, row, "D", color=color, markersize=6)
        ended = paired.outcomes(tasks, name)
        missing = sum(ended.values()) - ended["plan"]
        if missing:
            panel.annotate(
                f"no plan: {missing}",
                (1.01, row),
                xycoords=("axes fraction", "data"),
                verticalalignment="center",
                fontsize=8,
            )
    panel.axvline(1.0, color="#888888", linewidth=0.8)
    panel.set_xscale("log")
    low, high = panel.get_xlim()
    panel.set_xticks(_TICKS, [f"{t:g}" for t in _TICKS])
    panel.minorticks_off()
    panel.set_xlim(low, high)
    panel.set_yticks(range(len(planners)), planners)
    panel.set_ylim(len(planners) - 0.5, -0.5)
    panel.set_xlabel(
        f"kernels and collectives ({_headline(data)}) over TorchRec's best practice"
    )
    panel.set_title(f"{data['families'][family]}: {len(tasks)} tasks", fontsize=10)
    return _png(drawing)


def prediction_figure(data: Data) -> bytes:
    """Draw the predicted kernels of every plan beside the measured ones, as PNG."""
    drawing, panel = _panel((5.5, 5.5))
    both: list[float] = []
    for family in _families(data):
        tasks = [t for t in data["tasks"] if t["family"] == family]
        entries = [e for t in tasks for e in t["planners"].values() if "measured" in e]
        predicted = [e["predicted"][KERNELS] for e in entries]
        real = [e["measured"][KERNELS] for e in entries]
        panel.scatter(predicted, real, s=9, alpha=0.5, label=family)
        both += predicted + real
    if both:
        ends = [0.9 * min(both), 1.1 * max(both)]
        panel.plot(ends, ends, color="#888888", linewidth=0.8)
        panel.loglog()
    panel.set_xlabel("predicted kernels [ms]")
    panel.set_ylabel("measured kernels [ms]")
    panel.legend(frameon=False)
    return _png(drawing)


def _panel(size: tuple[float, float]) -> tuple[Any, Any]:
    """Return an empty figure and its axes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(figsize=size)


def _png(drawing: Any) -> bytes:
    from matplotlib import pyplot

    drawing.tight_layout()
    image = io.BytesIO()
    drawing.savefig(image, format="png", dpi=_DPI, metadata={"Software": None})
    pyplot.close(drawing)
    return image.getvalue()


def _spread(row: int, values: Iterable[float]) -> list[float]:
    """Places around a row, so that dots do not hide each other."""
    return [row + 0.11 * (i % 5 - 2) for i, _ in enumerate(values)]
