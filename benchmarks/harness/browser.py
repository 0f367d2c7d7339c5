"""Pages in a headless Chromium that reaches no network."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

__all__ = ["find_browser", "open_page"]

_FLAGS = (
    "--headless",
    "--no-sandbox",  # containers have none to offer
    "--disable-gpu",
    "--disable-quic",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--hide-scrollbars",
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--enable-logging=stderr",
)


def find_browser() -> str | None:
    """Return the path of Chromium, Debian's package of that name; None: not there."""
    return shutil.which("chromium")


def open_page(
    page: Path,
    screenshot: Path | None = None,
    size: tuple[int, int] = (1200, 800),
    dark: bool = False,
    timeout_seconds: float = 60,
) -> tuple[str, list[str]]:
    """Open a file in a browser of its own.

    Args:
        page: The file.
        screenshot: Where to write what is seen of it, as PNG.
        size: Of the window, in pixels.
        dark: Whether the user prefers dark pages.
        timeout_seconds: After which the browser is ended.

    Returns:
        The page as it is when its load handlers are through, and what its console
        says. With a screenshot the first is empty.

    Raises:
        FileNotFoundError: There is no browser.
        subprocess.SubprocessError: It failed, or took too long.
    """
    browser = find_browser()
    if browser is None:
        raise FileNotFoundError("no browser: apt-get install chromium")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        ended = subprocess.run(
            [
                browser,
                *_FLAGS,
                f"--user-data-dir={profile}",
                f"--window-size={size[0]},{size[1]}",
                f"--blink-settings=preferredColorScheme={0 if dark else 1}",
                f"--screenshot={screenshot}" if screenshot else "--dump-dom",
                page.resolve().as_uri(),
            ],
            capture_output=True,
            text=True,
            timeout=timeout_seconds,
            check=True,
        )
    said = [line for line in ended.stderr.splitlines() if ":CONSOLE" in line]
    return ended.stdout, said
