"""A report as one HTML file that loads nothing else.

The page holds its figures as JSON; `page*.js` draw charts and tables from them.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import string
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from datetime import date
from html import escape
from pathlib import Path
from typing import Any

from torchrec_neuroshard import __version__
from torchrec_neuroshard.costs.task import capitalised
from torchrec_neuroshard.errors import check_kind
from torchrec_neuroshard.files import check_outputs, to_fields, write_whole
from torchrec_neuroshard.notes import Note
from torchrec_neuroshard.report.sections import Section, as_text

MORE = "For details, print report.text(verbose=True)."
"""Last line of a brief text."""
MAX_HEADINGS = 6
"""A page with more headings has a list of contents."""

_SCRIPTS = ("_base", "_points", "_grids", "_charts", "_timeline", "")
"""Files of the page's script, in order: `page_base.js` to `page.js`."""


class Report(ABC):
    """A report: `print` shows it as text, `write_html` and notebooks as a page."""

    __slots__ = ()

    @abstractmethod
    def sections(self) -> Sequence[Section]:
        """Return the sections of the text and of the page."""

    def heading(self) -> list[tuple[str, str]]:
        """Return names and values for the page's header."""
        return []

    def text(self, verbose: bool = False, more: str = MORE) -> str:
        """Return the report as text.

        Args:
            verbose: Print every detail; False: the answer, warnings and main reasons.
            more: Last line of a text that leaves something out.
        """
        sections = self.sections()
        found, whole = (as_text(sections, verbose=v) for v in (verbose, True))
        return found if found == whole or not more else f"{found}\n\n{more}"

    def __str__(self) -> str:
        """Return the brief text."""
        return self.text()

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary."""
        return to_fields(self)

    def _repr_html_(self) -> str:
        """Return the page in a frame whose script cannot reach the notebook."""
        return (
            "<iframe sandbox='allow-scripts allow-downloads' style='width: 100%; "
            "height: 640px; border: 1px solid #8884; border-radius: 8px; "
            "resize: vertical' "
            f'srcdoc="{escape(html_report(self))}"></iframe>'
        )


def html_report(
    report: Report, title: str = "Sharding plan", command: str | None = None
) -> str:
    """Return a report as an HTML page.

    Args:
        report: A result of `NeuroShardPlanner.report`, `evaluate` or `compare`.
        title: The page's title.
        command: The command that made the report, for the page's header.
    """
    names = ("page.html", "page.css", *(f"page{part}.js" for part in _SCRIPTS))
    frame, style, *scripts = (
        Path(__file__).with_name(name).read_text(encoding="utf-8") for name in names
    )
    script = "\n".join(scripts)
    facts = [
        *report.heading(),
        ("Written", f"{date.today()} by torchrec_neuroshard {__version__}"),
        *([("Command", command)] if command else []),
    ]
    drawn: dict[str, list[Any]] = {"charts": [], "grids": []}
    headings: list[tuple[bool, str]] = []
    body = [part for s in report.sections() for part in _elements(s, drawn, headings)]
    data = json.dumps(_brief(drawn), separators=(",", ":"))
    # The policy allows this script and no other, and loads nothing.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return string.Template(frame).substitute(
        title=escape(title),
        style=style,
        facts="".join(
            f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>"
            for name, value in facts
        ),
        contents=_contents(headings),
        body="\n".join(body),
        data=data.replace("<", "\\u003c"),  # a name cannot end the element
        script=script,
        digest=digest,
    )


def write_html(
    report: Report,
    path: str | Path,
    title: str = "Sharding plan",
    command: str | None = None,
) -> None:
    """Write `html_report` to a file; a failure leaves no part of it.

    Raises:
        ConfigError: This is no report, or the file cannot be written.
    """
    check_kind("report", report, Report)
    check_kind("path", path, str, os.PathLike)
    check_kind("title", title, str)
    check_outputs(Path(path))
    write_whole(path, html_report(report, title, command))


def _contents(headings: list[tuple[bool, str]]) -> str:
    """Return links to headings; nothing for a short page.

    Args:
        headings: For each heading, whether a part begins there, and its title.
    """
    if len(headings) <= MAX_HEADINGS:
        return ""
    items = (
        f"<li{' class=part' * is_part}><a href='#section-{number}'>{title}</a></li>"
        for number, (is_part, title) in enumerate(headings)
    )
    return f"<nav aria-label='Contents'><ul>{''.join(items)}</ul></nav>"


def _elements(
    section: Section, drawn: dict[str, list[Any]], headings: list[tuple[bool, str]]
) -> Iterator[str]:
    """Return a section's elements.

    Args:
        section: The section.
        drawn: The page's data; the section's charts and grids are added.
        headings: The headings so far; the section's is added.
    """
    title = escape(capitalised(section.title))
    lines = [*section.lines, *section.details]

    def heading(tag: str) -> str:
        headings.append((section.is_part, title))
        return f"<{tag} id='section-{len(headings) - 1}'>{title}</{tag}>"

    if section.is_part:
        yield f"</section><section>{heading('h1')}"
        return
    items = [
        f"<li class='{b.severity if isinstance(b, Note) else ''}'>{escape(str(b))}</li>"
        for b in section.bullets
    ]
    grid = section.grid if section.grid and section.grid.items else None
    if title and (items or grid or section.charts or lines):
        yield heading("h2")
    yield from (f"<p>{escape(capitalised(line))}.</p>" for line in lines)
    if items:
        yield f"<ul>{''.join(items)}</ul>"
    if section.charts:
        first = len(drawn["charts"])
        drawn["charts"] += section.charts
        numbers = range(first, len(drawn["charts"]))
        boxes = "".join(f"<div data-charts='{number}'></div>" for number in numbers)
        yield f"<div class='charts'>{boxes}</div>"
    if grid:
        yield f"<div data-grids='{len(drawn['grids'])}'></div>"
        drawn["grids"].append([grid.label, *grid.shown()])


def _brief(value: Any) -> Any:
    """Round numbers to six digits; NaN and infinity become null."""
    if isinstance(value, dict):
        return {key: _brief(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [_brief(v) for v in value]
    if not isinstance(value, float):
        return value
    return float(f"{value:.6g}") if math.isfinite(value) else None
