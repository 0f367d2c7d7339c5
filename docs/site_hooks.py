"""Take what pages link to outside of `docs/` into the site."""

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
"""A link of Markdown to a file beside `docs/`."""


def on_files(files: Files, config: Any) -> Files:
    """Add every file that some page links to; pages of results are shown as they are.

    Raises:
        FileNotFoundError: A page links to a file that there is not.
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
            # What a copied page links to and shows stays where the sources are.
            linked = r"!?\[([^\]]*)\]\((?!https?:)[^)]*\)"
            text = re.sub(linked, r"\1", source.read_text())
        copy = File.generated(config, _place(path), content=text, inclusion=_HIDDEN)
        files.append(copy)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Send links that leave `docs/` to the copies."""
    if page.file.src_uri.startswith(OUTSIDE):
        return markdown
    return _LINK.sub(lambda m: f"]({_place(m[1])}{m[2] or ''})", markdown)


def _place(path: str) -> str:
    """Return where the copy of a file lies in the site."""
    path = path.rstrip("/")
    return f"{OUTSIDE}/{path}" if path.endswith(".md") else f"{OUTSIDE}/{path}.md"
