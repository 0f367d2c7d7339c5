"""Copy files outside `docs/` that pages link to into the site."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).parent.parent
OUTSIDE = "outside"
_KINDS = {".py": "python", ".sh": "bash"}
_HIDDEN = InclusionLevel.NOT_IN_NAV
_LINK = re.compile(r"\]\(\.\./([^)#\s]+)(#[^)\s]*)?\)")
"""A Markdown link to a file outside `docs/`."""


def on_files(files: Files, config: Any) -> Files:
    """Add a copy of every file that a page links to.

    Raises:
        FileNotFoundError: A page links to a file that does not exist.
    """
    wanted: set[str] = set()
    for file in list(files.documentation_pages()):
        wanted.update(path for path, _ in _LINK.findall(file.content_string))
    for path in sorted(wanted):
        source = ROOT / path
        if source.is_dir():
            listed = sorted(p.name for p in source.iterdir() if p.is_file())
            text = f"# {path}\n\n" + "".join(f"- `{name}`\n" for name in listed)
        elif source.suffix in _KINDS:
            text = (
                f"# {path}\n\n```{_KINDS[source.suffix]}\n{source.read_text()}\n```\n"
            )
        else:
            # Links and images of a copied page would be broken here.
            linked = r"!?\[([^\]]*)\]\((?!https?:)[^)]*\)"
            text = re.sub(linked, r"\1", source.read_text())
        copy = File.generated(config, _place(path), content=text, inclusion=_HIDDEN)
        files.append(copy)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links that leave `docs/` to the copies."""
    if page.file.src_uri.startswith(OUTSIDE):
        return markdown
    return _LINK.sub(lambda m: f"]({_place(m[1])}{m[2] or ''})", markdown)


def _place(path: str) -> str:
    """Return the path of a file's copy in the site."""
    path = path.rstrip("/")
    return f"{OUTSIDE}/{path}" if path.endswith(".md") else f"{OUTSIDE}/{path}.md"
