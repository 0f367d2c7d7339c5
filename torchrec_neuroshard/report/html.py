"""A plan's report as one HTML page that needs nothing else, not even a network.

What is prose is written here; charts and tables are drawn by `page.js` from the
report's figures, which the page holds once, as JSON.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import hashlib
import html
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torchrec_neuroshard.files import write_whole
from torchrec_neuroshard.placement import format_bytes
from torchrec_neuroshard.report.comparison import PlanComparison
from torchrec_neuroshard.report.plan_report import PlanBasis, PlanReport, TableReport
from torchrec_neuroshard.simulator import PHASES

__all__ = ["html_report", "notebook_html", "write_html"]

_GIB = 2**30
_NO_SCRIPTS = "Charts and tables need JavaScript, which is off here."


@functools.cache
def _part(name: str) -> str:
    """Return a file that lies beside this module."""
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def html_report(
    report: PlanReport | PlanComparison, title: str = "Sharding plan"
) -> str:
    """Lay a report out as a page.

    Args:
        report: What `NeuroShardPlanner.report`, `evaluate` or `compare` returned.
        title: Of the page.
    """
    script = _part("page.js")
    # The page's own script runs, no other; and nothing is fetched, whatever it says.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        "default-src 'none'; base-uri 'none'; form-action 'none'; "
        f"style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    )
    body = (
        _comparison(report) if isinstance(report, PlanComparison) else _plan(report, 0)
    )
    return "\n".join(
        [
            "<!DOCTYPE html>",
            "<html lang='en'><head><meta charset='utf-8'>",
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            "<meta name='viewport' content='width=device-width'>",
            f"<title>{html.escape(title)}</title>",
            f"<style>{_part('page.css')}</style></head>",
            "<body>",
            f"<header><h1>{html.escape(title)}</h1>",
            "<button id='theme' type='button'>Dark</button></header>",
            f"<noscript><p class='warning'>{_NO_SCRIPTS}</p></noscript>",
            *body,
            f"<script type='application/json' id='data'>{_data(report)}</script>",
            f"<script>{script}</script>",
            "</body></html>",
            "",
        ]
    )


def notebook_html(report: PlanReport | PlanComparison) -> str:
    """Lay a report out as a frame of a notebook, out of reach of what is around it."""
    return (
        "<iframe sandbox='allow-scripts' style='width: 100%; height: 640px; "
        "border: 1px solid #8884; border-radius: 8px; resize: vertical' "
        f'srcdoc="{html.escape(html_report(report))}"></iframe>'
    )


def write_html(
    report: PlanReport | PlanComparison,
    path: str | Path,
    title: str = "Sharding plan",
) -> None:
    """Write `html_report` to a file, which appears whole or not at all."""
    write_whole(path, html_report(report, title))


def _data(report: PlanReport | PlanComparison) -> str:
    """Return what `page.js` draws, as JSON that ends no element of the page."""
    if isinstance(report, PlanComparison):
        plans = [
            _plan_data(report.first, report.first_name),
            _plan_data(report.second, report.second_name),
        ]
        moves = [[m.table, m.before, m.after, m.moved_bytes] for m in report.moves]
    else:
        plans, moves = [_plan_data(report, "")], []
    data = {"phases": PHASES, "plans": plans, "moves": moves}
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c")


def _plan_data(report: PlanReport, name: str) -> dict[str, Any]:
    path_ms = report.critical_path_ms
    return {
        "name": name,
        "path_ms": 0.0 if math.isnan(path_ms) else path_ms,
        "bound_ms": report.lower_bound_ms,
        "bound_is_proven": report.bound_is_proven,
        "ranks": [
            [
                rank.num_shards,
                rank.columns,
                rank.used_bytes,
                rank.memory_bytes,
                [getattr(rank.costs, phase) for phase in PHASES],
            ]
            for rank in report.ranks
        ],
        "tables": [_table_data(table) for table in report.tables],
        "splits": [
            [
                split.table,
                ", ".join(f"{width} ({rank})" for width, rank in split.shards),
                split.reason(path_ms),
            ]
            for split in report.splits
        ],
    }


def _table_data(table: TableReport) -> list[Any]:
    return [
        table.table,
        table.sharding_type,
        table.compute_kernel,
        table.num_embeddings,
        table.embedding_dim,
        "" if table.host is None else _sentence(str(table.host)),
        [
            [
                shard.rank,
                shard.num_embeddings,
                shard.embedding_dim,
                round(shard.used_bytes),
                float(f"{shard.compute_ms:.6g}"),
                float(f"{shard.comms_ms:.6g}"),
            ]
            for shard in table.shards
        ],
    ]


def _view(name: str, plan: int = 0) -> str:
    """Return the place of what `page.js` draws."""
    return f"<div data-view='{name}' data-plan='{plan}'></div>"


def _plan(report: PlanReport, number: int) -> Iterator[str]:
    """Lay out one of the page's plans."""
    yield from _summary(report)
    yield f"<div class='box'><h2>Critical path</h2>{_view('path', number)}"
    yield "<h2>What each rank does in an iteration</h2>"
    yield _view("legend") + _view("phases", number)
    yield "<h2>Memory of each rank</h2>"
    yield f"{_view('memory', number)}</div>"
    yield "<h2>Tables</h2>"
    yield _view("tables", number)
    yield "<h2>Ranks</h2>"
    yield "<p class='note'>Milliseconds; the slowest rank of a phase stands out.</p>"
    yield _view("ranks", number)
    yield "<h2>Split tables, and why</h2>"
    if report.splits:
        yield _view("splits", number)
        if more := report.num_split - len(report.splits):
            yield f"<p class='note'>... and {more:,} more, which matter less.</p>"
    elif report.num_split:
        yield f"<p>{report.num_split:,} tables are; what for is not known.</p>"
    else:
        yield "<p>No table is split.</p>"
    yield from _basis(report.basis)
    yield from _warnings(report)


def _comparison(found: PlanComparison) -> Iterator[str]:
    """Lay out both plans side by side, then each by itself."""
    yield f"<p>{html.escape(_sentence(found.verdict))}</p>"
    names = [html.escape(name) for name in (found.first_name, found.second_name)]
    yield "<div class='pair'>"
    for number, name in enumerate(names):
        title = f"<h3>{name[0].upper()}{name[1:]}</h3>"
        yield f"<div class='box'>{title}{_view('phases', number)}</div>"
    yield f"</div>{_view('legend')}"
    titles = "".join(f"<th class='number'>{name}</th>" for name in names)
    yield f"<div class='scroll'><table><tr><th></th>{titles}"
    yield "<th class='number'>change</th></tr>"
    for name, *values in found.rows:
        first, second = values
        shown = [f"{v:,}" if isinstance(v, int) else f"{v:.3f}" for v in values]
        shown.append(f"{second / first - 1:+.1%}" if first > 0 else "")
        cells = "".join(f"<td class='number'>{text}</td>" for text in shown)
        yield f"<tr><td>{name}</td>{cells}</tr>"
    yield "</table></div>"
    yield "<h2>Tables that lie otherwise</h2>"
    if not found.moves:
        yield "<p>None.</p>"
    else:
        yield (
            f"<p>{len(found.moves)} of {found.second.num_tables}; ranks would fetch "
            f"{format_bytes(found.moved_bytes)} of weights.</p>"
        )
        yield _view("moves")
    yield from (f"<p class='note'>{html.escape(note)}</p>" for note in found.notes)
    # What both have in common is said of the second alone.
    first_alone = dataclasses.replace(
        found.first,
        basis=None if found.first.basis == found.second.basis else found.first.basis,
        warnings=tuple(
            w for w in found.first.warnings if w not in found.second.warnings
        ),
    )
    for number, report in enumerate((first_alone, found.second)):
        name = names[number]
        yield f"<h1 class='plan'>{name[0].upper()}{name[1:]}</h1>"
        yield from _plan(report, number)


def _summary(report: PlanReport) -> Iterator[str]:
    path_ms, bound_ms = report.critical_path_ms, report.lower_bound_ms
    bound = "how far above the best possible is unknown"
    if bound_ms > 0:
        most = "at most" if report.bound_is_proven else "by an estimate"
        bound = f"{most} {report.gap:.1%} above the best possible"
    path, known = f"{path_ms:.3f} ms", not math.isnan(path_ms)
    fullest = max(report.ranks, key=lambda rank: rank.used_bytes)
    room = ""
    if fullest.memory_bytes:
        room = f"of {fullest.memory_bytes / _GIB:.2f} GiB, "
    cards = (
        ("critical path, predicted", path if known else "not known", bound),
        (
            "tables",
            f"{report.num_tables:,}",
            f"on {len(report.ranks)} ranks, {report.num_split:,} split",
        ),
        (
            "fullest rank",
            f"{fullest.used_bytes / _GIB:.2f} GiB",
            f"{room}rank {fullest.rank}",
        ),
    )
    yield "<div class='cards'>"
    for title, value, more in cards:
        yield f"<div><span>{title}</span><b>{value}</b><span>{more}</span></div>"
    yield "</div>"
    estimated = report.basis is not None and report.basis.estimate_error is not None
    uncertain = (
        f" The ensemble of nets differs by up to {report.uncertainty:.1%} on a rank."
        if report.uncertainty and not estimated
        else ""
    )
    searched = (
        f" {report.num_evaluated:,} rank sets evaluated in "
        f"{report.search_seconds:.1f} s."
        if report.num_evaluated
        else ""
    )
    yield (
        f"<p class='note'>Compute: {html.escape(report.compute_source)}. Collectives: "
        f"{html.escape(report.comms_source)}.{uncertain}{searched}</p>"
    )
    if report.schedule is not None:
        yield f"<p>{html.escape(_sentence(str(report.schedule)))}</p>"
        yield f"<p class='note'>{html.escape(_sentence(report.schedule.alternatives))}"
        yield "</p>"
    for found in filter(None, (report.weight_sync, report.robustness)):
        yield f"<p>{html.escape(_sentence(str(found)))}</p>"
    if report.fallback is not None:
        yield (
            "<p class='warning'>TorchRec's own plan was taken: "
            f"{html.escape(report.fallback)}</p>"
        )


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _basis(basis: PlanBasis | None) -> Iterator[str]:
    if basis is None:
        return
    yield "<h2>What the costs rest on</h2>"
    card = html.escape(basis.card or "not named")
    yield f"<p>Card: {card}. {basis.batch_size:,} samples per rank.</p>"
    if basis.estimate_error is not None:
        error = html.escape(basis.estimate_error)
        yield f"<p class='warning'>The estimate of kernels may be off: {error}.</p>"
    yield "<div class='scroll'><table>"
    yield "<tr><th>figure</th><th class='number'>value</th><th>from</th></tr>"
    for figure in basis.figures:
        source = f"{figure.basis}: {figure.source}" if figure.source else figure.basis
        yield (
            f"<tr><td>{html.escape(figure.name)}</td><td class='number'>{figure}</td>"
            f"<td>{html.escape(source)}</td></tr>"
        )
    for source, count in basis.ids_per_sample:
        yield (
            f"<tr><td>ids per sample</td><td class='number'>{count} features</td>"
            f"<td>{html.escape(source)}</td></tr>"
        )
    yield "</table></div>"
    if basis.assumptions:
        yield "<p>Assumed, that is neither given nor published nor measured:</p>"
        yield "<ul class='warning'>"
        yield from (f"<li>{html.escape(text)}</li>" for text in basis.assumptions)
        yield "</ul>"


def _warnings(report: PlanReport) -> Iterator[str]:
    if not report.warnings:
        return
    yield "<h2>Warnings</h2>"
    yield "<ul class='warning'>"
    yield from (f"<li>{html.escape(text)}</li>" for text in report.warnings)
    yield "</ul>"
