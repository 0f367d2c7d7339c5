"""Show on stderr what a command is doing.

On a terminal the phase is one line, which disappears when the phase ends. Elsewhere a
line is printed every ten seconds. Outside a command, phases show nothing.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

LINE_EVERY_S = 10.0
"""Without a terminal: seconds between two lines."""
QUIET_S = 1.0
"""On a terminal: phases shorter than this show no line."""
TICK_S = 0.25
"""Seconds between two updates of the line."""

_ERASE = "\r\x1b[K"


@dataclass(kw_only=True, slots=True, eq=False)
class Phase:
    """A phase of a running command."""

    text: str
    """Shown from the next tick on; an empty text shows nothing."""
    started: float = field(default_factory=time.monotonic)


class _Ticker:
    """Shows the innermost phase from its own thread."""

    def __init__(self) -> None:
        self._phases: list[Phase] = []
        self._due, self._is_shown = time.monotonic() + LINE_EVERY_S, False
        self._lock, self._over = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join()

    def enter(self, entered: Phase) -> None:
        with self._lock:
            self._phases.append(entered)

    def leave(self, left: Phase) -> None:
        """Leave a phase and any inner phases that a thread never left."""
        with self._lock:
            if left in self._phases:
                del self._phases[self._phases.index(left) :]
            self._erase()

    def clear(self) -> None:
        with self._lock:
            self._erase()

    def _run(self) -> None:
        while not self._over.wait(TICK_S):
            with self._lock, contextlib.suppress(OSError, ValueError):
                if self._phases:
                    self._show(self._phases[-1], time.monotonic())

    def _show(self, current: Phase, now: float) -> None:
        if not current.text:
            self._erase()
            return
        seconds = now - current.started
        line = f"neuroshard: {current.text}, {seconds:.0f} s"
        if sys.stderr.isatty():
            if seconds >= QUIET_S:
                self._is_shown = True
                _write(_ERASE + line[: shutil.get_terminal_size().columns - 1])
        elif now >= self._due:
            self._due = now + LINE_EVERY_S
            _write(line + "\n")

    def _erase(self) -> None:
        if self._is_shown:
            self._is_shown = False
            _write(_ERASE)


_ticker: _Ticker | None = None


@contextlib.contextmanager
def shown() -> Iterator[None]:
    """Show phases inside this context; nested contexts change nothing."""
    global _ticker
    if _ticker is not None:
        yield
        return
    _ticker = ticker = _Ticker()
    try:
        yield
    finally:
        _ticker = None
        ticker.stop()


@contextlib.contextmanager
def phase(text: str) -> Iterator[Phase]:
    """Show what the command does inside this context.

    Args:
        text: Phrase without a full stop, e.g. "reading the model". Set the yielded
            phase's `text` to change it. Inner phases are shown instead of this one; an
            empty text leaves the line to a progress bar.
    """
    entered, ticker = Phase(text=text), _ticker
    if ticker is not None:
        ticker.enter(entered)
    try:
        yield entered
    finally:
        if ticker is not None:
            ticker.leave(entered)


def clear() -> None:
    """Remove the line until the next tick, so that other output can be printed."""
    if _ticker is not None:
        _ticker.clear()


def _write(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()
