"""A report as one HTML page that needs nothing else, not even a network.

A report says itself what is prose; charts and tables are drawn by `page.js` from its
figures, which the page holds once, as JSON.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from torchrec_neuroshard.files import write_whole
from torchrec_neuroshard.notes import Note
from torchrec_neuroshard.report.terminal import sentence
from torchrec_neuroshard.simulator import PHASES

__all__ = ["HtmlReport", "html_report", "write_html"]


@functools.cache
def _part(name: str) -> str:
    """Return a file that lies beside this module."""
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


class HtmlReport(ABC):
    """What can be laid out as a page."""

    __slots__ = ()

    @abstractmethod
    def page(self) -> tuple[str, dict[str, Any]]:
        """Return the page's own elements, and the `plans` and `moves` to draw."""

    def _repr_html_(self) -> str:
        """Return the report as notebooks show it: out of reach of what is around it."""
        return (
            "<iframe sandbox='allow-scripts' style='width: 100%; height: 640px; "
            "border: 1px solid #8884; border-radius: 8px; resize: vertical' "
            f'srcdoc="{escape(html_report(self))}"></iframe>'
        )


def html_report(report: HtmlReport, title: str = "Sharding plan") -> str:
    """Lay a report out as a page.

    Args:
        report: What `NeuroShardPlanner.report`, `evaluate` or `compare` returned.
        title: Of the page.
    """
    script, name = _part("page.js"), escape(title)
    # The page's own script runs, no other; and nothing is fetched, whatever it says.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    body, data = report.page()
    text = json.dumps(_brief({"phases": PHASES, **data}), separators=(",", ":"))
    text = text.replace("<", "\\u003c")  # so that it ends no element of the page
    return f"""<!DOCTYPE html>
<html lang='en'><head><meta charset='utf-8'>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; \
base-uri 'none'; form-action 'none'; style-src 'unsafe-inline'; \
script-src 'sha256-{digest}'">
<meta name='viewport' content='width=device-width'>
<title>{name}</title>
<style>{_part("page.css")}</style></head>
<body>
<header><h1>{name}</h1>
<button id='theme' type='button'>Dark</button></header>
<noscript><p class='warning'>Charts and tables need JavaScript, which is off here.</p>
</noscript>
{body}
<script type='application/json' id='data'>{text}</script>
<script>{script}</script>
</body></html>
"""


def write_html(
    report: HtmlReport, path: str | Path, title: str = "Sharding plan"
) -> None:
    """Write `html_report` to a file, which appears whole or not at all."""
    write_whole(path, html_report(report, title))


def _brief(value: Any) -> Any:
    """Round times and bytes to what a page shows; what is not known becomes null."""
    if isinstance(value, dict):
        return {key: _brief(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [_brief(v) for v in value]
    if not isinstance(value, float):
        return value
    return float(f"{value:.6g}") if math.isfinite(value) else None


def view(name: str, plan: int = 0) -> str:
    """Return the place of what `page.js` draws."""
    return f"<div data-view='{name}' data-plan='{plan}'></div>"


def paragraphs(texts: Iterable[str], kind: str = "") -> str:
    """Return sentences without their full stops as paragraphs."""
    return "".join(f"<p class='{kind}'>{escape(sentence(t))}</p>" for t in texts)


def bullets(title: str, texts: Iterable[str]) -> str:
    """Return a list below a heading; nothing where it is empty."""
    items = "".join(f"<li>{escape(text)}</li>" for text in texts)
    return items and f"<h2>{title}</h2><ul>{items}</ul>"


def note_list(notes: Iterable[Note]) -> str:
    """Return a plan's notes below a heading; nothing where there are none."""
    items = "".join(f"<li class='{n.severity}'>{escape(n.text)}</li>" for n in notes)
    return items and f"<h2>Notes</h2><ul class='notes'>{items}</ul>"


def html_table(rows: Sequence[Sequence[str]]) -> str:
    """Return the rows of `terminal.table` with figures in all columns but the first."""
    lines = []
    for tag, (name, *cells) in zip(["th", *["td"] * len(rows)], rows, strict=False):
        others = "".join(f"<{tag} class='number'>{escape(c)}</{tag}>" for c in cells)
        lines.append(f"<tr><{tag}>{escape(name)}</{tag}>{others}</tr>")
    return f"<div class='scroll'><table>{''.join(lines)}</table></div>"
