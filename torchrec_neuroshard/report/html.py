"""A report as one HTML page that needs nothing else, not even a network.

A report says itself what is prose; charts and tables are drawn by `page.js` from its
figures, which the page holds once, as JSON.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import html
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torchrec_neuroshard.files import write_whole
from torchrec_neuroshard.placement import capitalised
from torchrec_neuroshard.simulator import PHASES

__all__ = ["HtmlReport", "html_report", "sentence", "view", "write_html"]

_NO_SCRIPTS = "Charts and tables need JavaScript, which is off here."


@functools.cache
def _part(name: str) -> str:
    """Return a file that lies beside this module."""
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


class HtmlReport(ABC):
    """What can be laid out as a page."""

    __slots__ = ()

    @abstractmethod
    def _page_body(self) -> Iterator[str]:
        """Return the page's own elements."""

    @abstractmethod
    def _page_data(self) -> dict[str, Any]:
        """Return what `page.js` draws: `plans` and `moves`."""

    def _repr_html_(self) -> str:
        """Return the report as notebooks show it: out of reach of what is around it."""
        return (
            "<iframe sandbox='allow-scripts' style='width: 100%; height: 640px; "
            "border: 1px solid #8884; border-radius: 8px; resize: vertical' "
            f'srcdoc="{html.escape(html_report(self))}"></iframe>'
        )


def html_report(report: HtmlReport, title: str = "Sharding plan") -> str:
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
    data = {"phases": PHASES, **report._page_data()}
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    text = text.replace("<", "\\u003c")  # so that it ends no element of the page
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
            *report._page_body(),
            f"<script type='application/json' id='data'>{text}</script>",
            f"<script>{script}</script>",
            "</body></html>",
            "",
        ]
    )


def write_html(
    report: HtmlReport, path: str | Path, title: str = "Sharding plan"
) -> None:
    """Write `html_report` to a file, which appears whole or not at all."""
    write_whole(path, html_report(report, title))


def view(name: str, plan: int = 0) -> str:
    """Return the place of what `page.js` draws."""
    return f"<div data-view='{name}' data-plan='{plan}'></div>"


def sentence(text: str) -> str:
    """Begin a text with a capital and end it with a full stop."""
    return f"{capitalised(text)}."
