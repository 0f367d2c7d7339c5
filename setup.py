"""Makes the page that a package index shows from README.md.

An index has no files beside this page. Once `Repository` in pyproject.toml's
`[project.urls]` names an address, README's links and pictures lead there. Until then
links become paths in the source distribution, and pictures are left out.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
_PICTURE = re.compile(
    r'<picture>.*?<img alt="(.*?)" src="(.*?)">.*?</picture>\n(\n\*[^\n]+\*\n\n)',
    re.DOTALL,
)
"""Its text, its path and the caption below it."""
_LINK = re.compile(r"\[([^\]]+)\]\((?!https?:|#)([^)#]+)(#[^)]*)?\)")
"""The text, path and anchor of a relative link."""
_HINT = "\n\n*Paths in brackets are files of the source distribution.*\n\n"


def index_page(readme: str, address: str | None) -> str:
    """Return README without relative links.

    Args:
        readme: The text of README.md.
        address: The repository's; None if it has none.
    """
    if address is None:
        hinted = _PICTURE.sub("", readme).replace("\n\n", _HINT, 1)
        return _LINK.sub(r"\1 (`\2`)", hinted)
    shown = _PICTURE.sub(rf"![\1]({address}/raw/HEAD/\2)\n\3", readme)
    return _LINK.sub(rf"[\1]({address}/blob/HEAD/\2\3)", shown)


if __name__ == "__main__":
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    setup(
        long_description=index_page(
            (ROOT / "README.md").read_text("utf-8"), project["urls"].get("Repository")
        ),
        long_description_content_type="text/markdown",
    )
