"""A plan's report as one HTML page that needs nothing else, not even a network."""

from __future__ import annotations

import dataclasses
import html
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from torchrec_neuroshard.files import write_whole
from torchrec_neuroshard.placement import format_bytes
from torchrec_neuroshard.report.comparison import PlanComparison
from torchrec_neuroshard.report.plan_report import (
    PlanBasis,
    PlanReport,
    RankReport,
    TableReport,
)
from torchrec_neuroshard.simulator import PHASES

__all__ = ["html_report", "write_html"]

_COLORS = ("#8da0cb", "#1b6ca8", "#66c2a5", "#a6d854", "#e07b39")
"""Of `PHASES`; told apart also without red and green by their lightness."""
_WIDTH, _LABEL, _VALUE = 860, 70, 90
_BAR, _THIN_BAR, _MANY = 18, 4, 64
"""Height of a rank's bar; with more than so many ranks it is thin and has no label."""
_GIB = 2**30

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 960px;
       margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.5em; } h2 { font-size: 1.15em; margin-top: 2em; }
table { border-collapse: collapse; width: 100%; font-size: 0.92em; }
th, td { text-align: left; padding: 0.3em 0.8em 0.3em 0; vertical-align: top;
         border-bottom: 1px solid #ddd; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; }
.worst { font-weight: 600; }
.note { color: #666; font-size: 0.92em; }
.legend span { margin-right: 1.2em; white-space: nowrap; }
.swatch { display: inline-block; width: 0.9em; height: 0.9em; margin-right: 0.4em;
          vertical-align: -0.1em; }
.warning { border-left: 4px solid #e07b39; padding-left: 0.8em; }
svg text { font: 12px system-ui, sans-serif; fill: #222; }
"""


def html_report(
    report: PlanReport | PlanComparison, title: str = "Sharding plan"
) -> str:
    """Lay a report out as a page.

    Args:
        report: What `NeuroShardPlanner.report`, `evaluate` or `compare` returned.
        title: Of the page.
    """
    body = [
        f"<h1>{html.escape(title)}</h1>",
        *(_comparison(report) if isinstance(report, PlanComparison) else _plan(report)),
    ]
    return "\n".join(
        [
            "<!DOCTYPE html>",
            "<html lang='en'><head><meta charset='utf-8'>",
            f"<title>{html.escape(title)}</title>",
            f"<style>{_STYLE}</style></head>",
            "<body>",
            *body,
            "</body></html>",
            "",
        ]
    )


def _plan(report: PlanReport) -> list[str]:
    return [
        *_summary(report),
        "<h2>What each rank does in an iteration</h2>",
        _legend(),
        _phase_bars(report.ranks),
        "<p class='note'>Every collective waits for its slowest rank, so the critical "
        "path is the sum over the phases of their longest bars, stage by stage.</p>",
        *_rank_table(report.ranks),
        "<h2>Memory of each rank</h2>",
        _memory_bars(report.ranks),
        *_tables(report.tables),
        *_splits(report),
        *_basis(report.basis),
        *_warnings(report),
    ]


def _comparison(found: PlanComparison) -> Iterator[str]:
    """Both plans side by side, then each by itself."""
    yield f"<p>{html.escape(_sentence(found.verdict))}</p>"
    names = [html.escape(name) for name in (found.first_name, found.second_name)]
    titles = "".join(f"<th class='number'>{name}</th>" for name in names)
    yield f"<table><tr><th></th>{titles}</tr>"
    for name, *values in found.rows:
        cells = "".join(
            f"<td class='number'>{v:,}</td>"
            if isinstance(v, int)
            else f"<td class='number'>{v:.3f}</td>"
            for v in values
        )
        yield f"<tr><td>{name}</td>{cells}</tr>"
    yield "</table>"
    yield "<h2>Tables that lie otherwise</h2>"
    if not found.moves:
        yield "<p>None.</p>"
    else:
        yield (
            f"<p>{len(found.moves)} of {found.second.num_tables}; ranks would fetch "
            f"{format_bytes(found.moved_bytes)} of weights.</p>"
        )
        yield f"<table><tr><th>table</th><th>{names[0]}</th><th>{names[1]}</th>"
        yield "<th class='number'>to fetch</th></tr>"
        for move in found.moves:
            cells = "".join(
                f"<td>{html.escape(text)}</td>"
                for text in (move.table, move.before, move.after)
            )
            size = format_bytes(move.moved_bytes)
            yield f"<tr>{cells}<td class='number'>{size}</td></tr>"
        yield "</table>"
    yield from (f"<p class='note'>{html.escape(note)}</p>" for note in found.notes)
    # What both have in common is said of the second alone.
    first = dataclasses.replace(
        found.first,
        basis=None if found.first.basis == found.second.basis else found.first.basis,
        warnings=tuple(
            w for w in found.first.warnings if w not in found.second.warnings
        ),
    )
    for name, report in zip(names, (first, found.second), strict=True):
        yield f"<h1>{name[0].upper()}{name[1:]}</h1>"
        yield from _plan(report)


def write_html(
    report: PlanReport | PlanComparison,
    path: str | Path,
    title: str = "Sharding plan",
) -> None:
    """Write `html_report` to a file, which appears whole or not at all."""
    write_whole(path, html_report(report, title))


def _summary(report: PlanReport) -> Iterator[str]:
    known = "how far above the best possible is unknown"
    if report.lower_bound_ms > 0:
        known = (
            f"no plan can be below {report.lower_bound_ms:.3f} ms by the same costs: "
            f"a gap of at most <b>{report.gap:.1%}</b>"
        )
    yield (
        f"<p>{report.num_tables} tables on {len(report.ranks)} ranks, "
        f"{report.num_split} split. "
        + (
            "What the plan costs is not known.</p>"
            if math.isnan(report.critical_path_ms)
            else "Predicted critical path "
            f"<b>{report.critical_path_ms:.3f} ms</b>; {known}.</p>"
        )
    )
    if report.lower_bound_ms > 0:
        yield _bound_bar(report.lower_bound_ms, report.critical_path_ms)
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


def _bound_bar(bound_ms: float, path_ms: float) -> str:
    """The critical path, and how much of it no plan can do without."""
    room = _WIDTH - _LABEL - _VALUE
    share = min(1.0, bound_ms / path_ms) if path_ms > 0 else 0.0
    return _svg(
        _BAR + 4,
        [
            f"<text x='0' y='{_BAR - 4}'>bound</text>",
            _rect(_LABEL, 2, room, _BAR, "#f2c9ac", f"critical path {path_ms:.3f} ms"),
            _rect(_LABEL, 2, room * share, _BAR, "#1b6ca8", f"bound {bound_ms:.3f} ms"),
            f"<text x='{_LABEL + room + 8}' y='{_BAR - 2}'>{path_ms:.3f} ms</text>",
        ],
    )


def _legend() -> str:
    entries = (
        f"<span><i class='swatch' style='background:{color}'></i>{name}</span>"
        for name, color in zip(PHASES, _COLORS, strict=True)
    )
    return f"<p class='legend'>{''.join(entries)}</p>"


def _phase_bars(ranks: Sequence[RankReport]) -> str:
    """A stacked bar per rank."""
    totals = [sum(r.costs.to_json().values()) for r in ranks]
    scale = (_WIDTH - _LABEL - _VALUE) / max(*totals, 1e-12)
    step, shapes = _rows(ranks)
    for row, (rank, total) in enumerate(zip(ranks, totals, strict=True)):
        left = float(_LABEL)
        for name, color in zip(PHASES, _COLORS, strict=True):
            ms = float(getattr(rank.costs, name))
            text = f"rank {rank.rank}, {name}: {ms:.3f} ms"
            shapes.append(_rect(left, row * step, ms * scale, step - 1, color, text))
            left += ms * scale
        if len(ranks) <= _MANY:
            y = row * step + _BAR - 5
            shapes.append(f"<text x='{left + 8:.1f}' y='{y}'>{total:.3f} ms</text>")
    return _svg(step * len(ranks), shapes)


def _memory_bars(ranks: Sequence[RankReport]) -> str:
    """What each rank holds, before what it has."""
    most = max(max(r.used_bytes, r.memory_bytes or 0) for r in ranks)
    scale = (_WIDTH - _LABEL - 2 * _VALUE) / max(most, 1.0)
    step, shapes = _rows(ranks)
    for row, rank in enumerate(ranks):
        used = rank.used_bytes / _GIB
        text = f"{used:.2f} GiB"
        right = rank.used_bytes
        if rank.memory_bytes is not None:
            text += f" of {rank.memory_bytes / _GIB:.2f}"
            right = max(right, rank.memory_bytes)
            shapes.append(
                _rect(_LABEL, row * step, rank.memory_bytes * scale, step - 1, "#ddd")
            )
        title = f"rank {rank.rank}: {text}, {rank.num_shards} shards"
        shapes.append(
            _rect(
                _LABEL, row * step, rank.used_bytes * scale, step - 1, "#66c2a5", title
            )
        )
        if len(ranks) <= _MANY:
            x, y = _LABEL + right * scale + 8, row * step + _BAR - 5
            shapes.append(f"<text x='{x:.1f}' y='{y}'>{text}</text>")
    return _svg(step * len(ranks), shapes)


def _rows(ranks: Sequence[RankReport]) -> tuple[int, list[str]]:
    """Height of a rank's row, and the labels in front of the rows."""
    if len(ranks) > _MANY:
        return _THIN_BAR, []
    return _BAR, [
        f"<text x='0' y='{row * _BAR + _BAR - 5}'>rank {rank.rank}</text>"
        for row, rank in enumerate(ranks)
    ]


def _rect(
    x: float, y: float, width: float, height: float, color: str, title: str = ""
) -> str:
    return (
        f"<rect x='{x:.1f}' y='{y:.1f}' width='{max(width, 0.0):.2f}' "
        f"height='{height:.1f}' fill='{color}'>"
        f"<title>{html.escape(title)}</title></rect>"
    )


def _svg(height: float, shapes: Sequence[str]) -> str:
    return (
        f"<svg viewBox='0 0 {_WIDTH} {height:.0f}' width='100%' role='img'>"
        + "".join(shapes)
        + "</svg>"
    )


def _rank_table(ranks: Sequence[RankReport]) -> Iterator[str]:
    worst = {p: max(getattr(r.costs, p) for r in ranks) for p in PHASES}
    titles = ("rank", "shards", "columns", *PHASES)
    yield "<table><tr>" + "".join(f"<th class='number'>{t}</th>" for t in titles)
    yield "</tr>"
    for rank in ranks:
        cells = [
            f"<td class='number'>{value:,}</td>"
            for value in (rank.rank, rank.num_shards, rank.columns)
        ]
        for phase in PHASES:
            ms = getattr(rank.costs, phase)
            kind = "number worst" if 0 < ms == worst[phase] else "number"
            cells.append(f"<td class='{kind}'>{ms:.3f}</td>")
        yield f"<tr>{''.join(cells)}</tr>"
    yield "</table>"
    yield "<p class='note'>Milliseconds; the slowest rank of a phase stands out.</p>"


def _splits(report: PlanReport) -> Iterator[str]:
    yield "<h2>Split tables, and why</h2>"
    if not report.splits:
        yield "<p>No table is split.</p>"
        return
    yield "<table><tr><th>table</th><th>columns (rank)</th><th>why</th></tr>"
    for split in report.splits:
        shards = ", ".join(f"{width} ({rank})" for width, rank in split.shards)
        yield (
            f"<tr><td>{html.escape(split.table)}</td><td>{shards}</td>"
            f"<td>{html.escape(split.reason(report.critical_path_ms))}</td></tr>"
        )
    yield "</table>"
    if report.num_split > len(report.splits):
        yield (
            f"<p class='note'>... and {report.num_split - len(report.splits)} more, "
            "which cost less in one piece.</p>"
        )


def _tables(tables: Sequence[TableReport]) -> Iterator[str]:
    if not tables:
        return
    yield "<h2>Tables</h2>"
    titles = ("rows", "columns", "GiB", "ms")
    yield "<table><tr><th>table</th><th>where</th>" + "".join(
        f"<th class='number'>{title}</th>" for title in titles
    )
    yield "</tr>"
    for table in tables:
        host = f"; {html.escape(str(table.host))}" if table.host is not None else ""
        cells = (
            f"{table.num_embeddings:,}",
            str(table.embedding_dim),
            f"{table.used_bytes / _GIB:.2f}",
            f"{table.cost_ms:.3f}",
        )
        yield (
            f"<tr><td>{html.escape(table.table)}</td>"
            f"<td>{html.escape(table.place)}{host}</td>"
            + "".join(f"<td class='number'>{cell}</td>" for cell in cells)
            + "</tr>"
        )
    yield "</table>"
    yield "<p class='note'>Milliseconds of all of a table's ranks together.</p>"


def _basis(basis: PlanBasis | None) -> Iterator[str]:
    if basis is None:
        return
    yield "<h2>What the costs rest on</h2>"
    card = html.escape(basis.card or "not named")
    yield f"<p>Card: {card}. {basis.batch_size:,} samples per rank.</p>"
    if basis.estimate_error is not None:
        error = html.escape(basis.estimate_error)
        yield f"<p class='warning'>The estimate of kernels may be off: {error}.</p>"
    yield "<table><tr><th>figure</th><th class='number'>value</th><th>from</th></tr>"
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
    yield "</table>"
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
