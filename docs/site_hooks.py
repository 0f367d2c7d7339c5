"""Add the changelog and other files outside `docs/` that pages link to."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Set
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).parent.parent
OUTSIDE = "outside"
CHANGELOG = "CHANGELOG.md"
_HIDDEN = InclusionLevel.NOT_IN_NAV
_KINDS = {".py": "python", ".sh": "bash"}
_BOOSTS = {
    "concepts.md": 1.2,
    "troubleshooting.md": 1.1,
    "faq.md": 0.5,
    "outside/CHANGELOG.md": 0.01,
    "api.md": 0.001,
}
"""Page -> factor on its rank in the search: pages that explain a word come first."""
_LINK = re.compile(r"\]\(\.\./([^)#\s]+)(#[^)\s]*)?\)")
"""A Markdown link to a file outside `docs/`."""
_LOCAL = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:)([^)#\s]*)(#[^)\s]*)?\)")
"""A Markdown link or image of a file in the repository."""
_PICTURE = re.compile(
    r'<picture>\s*<source [^>]*srcset="([^"]+)">\s*'
    r'<img alt="([^"]*)" src="([^"]+)">\s*</picture>'
)
"""An image for dark and light mode, as GitHub shows it."""
_REFERENCE = re.compile(r' (?:href|src|srcset)="([^":#]+)["#]')
"""A file of the site that a page links to or loads."""


def on_files(files: Files, config: Any) -> Files:
    """Add the changelog, and a copy of every file that a page links to.

    Raises:
        FileNotFoundError: A page links to a file that does not exist.
    """
    copied = {CHANGELOG}
    for file in list(files.documentation_pages()):
        copied.update(path for path, _ in _LINK.findall(file.content_string))
    for path in sorted(copied):
        text = _text(path, copied)
        copy = File.generated(config, _place(path), content=text, inclusion=_HIDDEN)
        files.append(copy)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Set the page's rank in the search, and point links to the copies."""
    place = page.file.src_uri
    if place in _BOOSTS:
        page.meta["search"] = {"boost": _BOOSTS[place]}
    elif place.startswith(OUTSIDE):
        page.meta["search"] = {"exclude": True}
    if place.startswith(OUTSIDE):
        return markdown
    return _LINK.sub(lambda m: f"]({_place(m[1])}{m[2] or ''})", markdown)


def on_post_build(config: Any) -> None:
    """Check that every file that a page links to or loads is in the site.

    Raises:
        PluginError: One is not.
    """
    site = Path(config.site_dir)
    missing = {
        f"{page.relative_to(site)}: {path}"
        for page in site.rglob("*.html")
        if page.name != "404.html"
        for path in _REFERENCE.findall(page.read_text(encoding="utf-8"))
        if not (page.parent / path).exists()
    }
    if missing:
        raise PluginError("not in the site:\n" + "\n".join(sorted(missing)))


def _text(path: str, copied: Set[str]) -> str:
    """Return a file as Markdown, for its copy in the site."""
    source = ROOT / path
    if source.is_dir():
        listed = sorted(p.name for p in source.iterdir() if p.is_file())
        return f"# {path}\n\n" + "".join(f"- `{name}`\n" for name in listed)
    text = source.read_text(encoding="utf-8")
    if source.suffix in _KINDS:
        return f"# {path}\n\n```{_KINDS[source.suffix]}\n{text}\n```\n"
    if path == CHANGELOG:  # MkDocs needs four spaces where GitHub takes two
        text = re.sub(r"^ +", lambda m: 2 * m[0], text, flags=re.MULTILINE)
    text = _PICTURE.sub(r"![\2](\3#only-light)\n![\2](\1#only-dark)", text)
    folder = posixpath.dirname(path)

    def linked(match: re.Match[str]) -> str:
        """Link to what the site has; keep the words of other links."""
        image, words, target, anchor = (part or "" for part in match.groups())
        if not target:
            return match[0]
        target = posixpath.normpath(posixpath.join(folder, target))
        if target in copied:
            place = _place(target)
        elif target.startswith("docs/") and (ROOT / target).is_file():
            place = target.removeprefix("docs/")
        else:
            return words
        place = posixpath.relpath(place, posixpath.dirname(_place(path)))
        return f"{image}[{words}]({place}{anchor})"

    return _LOCAL.sub(linked, text)


def _place(path: str) -> str:
    """Return the path of a file's copy in the site."""
    path = path.rstrip("/")
    return f"{OUTSIDE}/{path}" if path.endswith(".md") else f"{OUTSIDE}/{path}.md"
