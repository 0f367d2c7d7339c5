"""What a measurement prints where nobody watches."""

from __future__ import annotations

import io

from rich.console import Console

from torchrec_neuroshard.collect.console import RateProgress


class Ticking:
    """A clock that a test moves."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_batch_jobs_get_plain_lines_now_and_then() -> None:
    file, clock = io.StringIO(), Ticking()
    with RateProgress(Console(file=file, width=40), "sets", clock) as progress:
        advance = progress.add_bar("collect", 30, completed=4)
        for _ in range(26):
            clock.now += 1.0
            advance()
    lines = file.getvalue().splitlines()
    assert lines == [
        "collect: 4 of 30 sets",
        "collect: 14 of 30 sets, 1.00 sets/s, 10 s, 16 s left",
        "collect: 24 of 30 sets, 1.00 sets/s, 20 s, 6 s left",
        "collect: 30 of 30 sets, 1.00 sets/s, 26 s, 0 s left",
    ]
