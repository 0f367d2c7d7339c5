"""Take the documentation's screenshots of the report page, light and dark.

    python benchmarks/screenshots.py docs/images

The page is that of the README's first command. Chromium must be installed.
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

from PIL import Image

from harness.browser import open_page
from torchrec_neuroshard.cli import main as neuroshard

_SIZES = {"plan": (1100, 1480), "comparison": (1100, 765)}
"""Page -> width and height of its screenshot."""


def main(out: Path) -> None:
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    found = re.search(r"^neuroshard (plan .*?)( --compare.*)?$", readme, re.M)
    assert found is not None, "the README begins with a plan"
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for name, size in _SIZES.items():
            page = Path(folder, f"{name}.html")
            compare = ["--compare"] if name == "comparison" else []
            neuroshard([*found[1].split(), *compare, "--html", str(page)])
            for dark in (False, True):
                path = out / f"{name}_{'dark' if dark else 'light'}.png"
                open_page(page, path, size, dark)
                with Image.open(path) as picture:
                    picture.convert("RGB").quantize(128).save(path, optimize=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
