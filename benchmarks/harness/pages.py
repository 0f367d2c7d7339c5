"""Results on disk: tables in Markdown, a page beside its data."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchrec_neuroshard.files import write_whole


def table(head: str | Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table with its first column to the left and all others to the right.

    Args:
        head: Titles of the columns, also as one text with " | " between them.
        rows: Cells of each row.
    """
    titles = head.split(" | ") if isinstance(head, str) else head
    lines = [titles, ["---", *["---:"] * (len(titles) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def one_line(data: Any) -> str:
    """Return compact JSON, a line."""
    return json.dumps(data, separators=(",", ":")) + "\n"


def write_page(out: Path, data: Any, page: str) -> None:
    """Write `<out>.json` and `<out>.md`; a file is never half written."""
    out.parent.mkdir(parents=True, exist_ok=True)
    texts = {".json": one_line(data), ".md": page}
    for suffix, text in texts.items():
        write_whole(out.with_name(out.name + suffix), text)
