"""Progress lines of commands on stderr."""

from __future__ import annotations

import io
import re
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from torchrec_neuroshard import progress
from torchrec_neuroshard.progress import clear, phase, shown


class Stream(io.StringIO):
    """A stderr that may be a terminal."""

    is_terminal = False

    def isatty(self) -> bool:
        return self.is_terminal

    def until(self, is_there: Callable[[str], bool]) -> str:
        """Wait until a text is written."""
        end = time.monotonic() + 30
        while not is_there(self.getvalue()):
            assert time.monotonic() < end, self.getvalue()
            time.sleep(0.001)
        return self.getvalue()


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Stream:
    """Return stderr, with short waiting times."""
    found = Stream()
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=found))
    monkeypatch.setattr(progress, "TICK_S", 0.001)
    monkeypatch.setattr(progress, "QUIET_S", 0.0)
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.01)
    return found


def test_files_get_a_line_every_ten_seconds(stream: Stream) -> None:
    with shown(), phase("reading"):
        written = stream.until(lambda text: text.count("\n") > 2)
    assert {re.sub(r"\d+ s$", "s", line) for line in written.splitlines()} == {
        "neuroshard: reading, s"
    }


def test_a_terminal_gets_one_line_that_disappears(
    stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream.is_terminal = True
    monkeypatch.setenv("COLUMNS", "30")
    with shown():
        with phase("planning") as current:
            stream.until(lambda text: "\r\x1b[Kneuroshard: planning, " in text)
            current.text = "planning for a very long time"
            stream.until(lambda text: text.endswith("neuroshard: planning for a ve"))
            clear()
            stream.until(lambda text: "a ve\r\x1b[K" in text)
        assert stream.getvalue().endswith("\r\x1b[K")
    assert "\n" not in stream.getvalue()


def test_the_innermost_phase_is_shown(stream: Stream) -> None:
    with shown(), phase("planning"):
        with phase("comparing"):
            stream.until(lambda text: "comparing" in text)
        assert "planning" not in stream.getvalue().partition("comparing")[2]
        stream.until(lambda text: "planning" in text.rpartition("comparing")[2])
        with phase(""):  # a progress bar takes over
            before = stream.getvalue()
            time.sleep(0.05)
            assert stream.getvalue() == before


def test_nothing_is_shown_outside_a_command(stream: Stream) -> None:
    with phase("reading"):
        time.sleep(0.05)
        clear()
    assert not stream.getvalue()
