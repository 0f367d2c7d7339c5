"""A plan's report on a terminal: its text, with a bar for each rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.text import Text

from torchrec_neuroshard.report.plan_parts import RankReport
from torchrec_neuroshard.report.plan_report import (
    MAX_RANKS,
    PlanReport,
    head_lines,
    shown_ranks,
    tail_lines,
)
from torchrec_neuroshard.simulator import PHASES

__all__ = ["print_report"]

_BAR = 40
"""Cells of the longest bar."""
_LETTERS = dict(zip(PHASES, "iFfbB", strict=True))
"""What a phase's cells are without colours."""
_COLORS = dict(zip(PHASES, ("blue", "cyan", "green", "yellow", "red"), strict=True))
_GIB = 2**30


def print_report(report: PlanReport, console: Console) -> None:
    """Print a report; where the console has colours, bars are of them.

    Args:
        report: Any.
        console: Where.
    """
    lines: list[Text | str] = [*head_lines(report), ""]
    lines += _bars(report.ranks, console.color_system is not None)
    lines += ["", *tail_lines(report)]
    for line in lines:
        console.print(line, soft_wrap=True, highlight=False, markup=False)


def _bars(ranks: Sequence[RankReport], colored: bool) -> Iterator[Text]:
    """A line for each rank: its phases as parts of a bar, and its memory."""
    totals = {r.rank: sum(r.costs.to_json().values()) for r in ranks}
    scale = _BAR / max(*totals.values(), 1e-12)
    for rank in shown_ranks(ranks):
        line = Text(f"rank {rank.rank:>4}  ")
        end, filled = 0.0, 0
        for phase in PHASES:
            end += getattr(rank.costs, phase) * scale
            cells, filled = round(end) - filled, round(end)
            letter = "█" if colored else _LETTERS[phase]
            line.append(letter * cells, style=_COLORS[phase] if colored else "")
        line.append(" " * (_BAR - filled) + f" {totals[rank.rank]:>9.3f} ms")
        line.append(f"{rank.used_bytes / _GIB:>9.2f}")
        if rank.memory_bytes:
            share = rank.used_bytes / rank.memory_bytes
            line.append(f" of {rank.memory_bytes / _GIB:.2f} GiB, {share:.0%}")
        else:
            line.append(" GiB")
        yield line
    if len(ranks) > MAX_RANKS:
        yield Text(
            f"... of {len(ranks)} ranks, those that are slowest and least loaded"
        )
    legend = Text("          ")
    for phase in PHASES:
        mark = "█" if colored else _LETTERS[phase]
        legend.append(mark, style=_COLORS[phase] if colored else "")
        legend.append(f" {phase}  ")
    legend.rstrip()
    yield legend
