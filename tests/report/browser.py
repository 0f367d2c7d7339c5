"""Open pages in a headless Chromium without network."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

_FLAGS = (
    "--headless",
    "--no-sandbox",  # containers offer none
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
    """Return the path of Debian's Chromium; None if it is not installed."""
    return shutil.which("chromium")


def open_page(
    page: Path,
    screenshot: Path | None = None,
    size: tuple[int, int] = (1200, 800),
    dark: bool = False,
    timeout_seconds: float = 60,
) -> tuple[str, list[str]]:
    """Open a file in a new browser and return its content and console messages.

    Args:
        page: The file.
        screenshot: Where to write a PNG of the page. None: no screenshot.
        size: Width and height of the window, in pixels.
        dark: Whether the user prefers dark pages.
        timeout_seconds: Time after which the browser is ended.

    Returns:
        The page after its load handlers, and the messages of its console. With a
        screenshot, the page is empty.

    Raises:
        FileNotFoundError: Chromium is not installed.
        subprocess.SubprocessError: The browser failed or took too long.
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
