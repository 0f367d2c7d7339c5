"""One iteration as a timeline: what a page draws, and what the text says of it."""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np

from torchrec_neuroshard.costs.passes import COLLECTIVES, PASSES, TIMED, Part
from torchrec_neuroshard.costs.placement_rules import listed
from torchrec_neuroshard.costs.schedules import DENSE
from torchrec_neuroshard.costs.simulator import PredictedCosts
from torchrec_neuroshard.costs.spans import Iteration, Span

MAX_RANKS = 8
"""Ranks that are drawn."""
_LEAST = 0.01
"""Overlaps below this share of an iteration are not worth a word."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """When ranks run which phase of an iteration, as predicted."""

    period_ms: float
    """Time of an iteration."""
    stages: tuple[str, ...]
    """Names of the stages."""
    num_ranks: int
    ranks: tuple[int, ...]
    """The ranks with spans, ascending."""
    spans: tuple[Span, ...]
    steps: tuple[Part, ...]
    """What binds: the chain of work that makes an iteration this long."""

    @staticmethod
    def of(predicted: PredictedCosts) -> Timeline | None:
        """Simulate an iteration; None without tables or times."""
        if not predicted.stages:
            return None
        schedule, stages = predicted.schedule, predicted.stages
        found = predicted.phases(schedule)
        iteration = Iteration(schedule, predicted.dense, found)
        if not iteration.steps:
            return None
        kernels = [TIMED.index(phase) for phase in PASSES]
        kernels_W = found.phases_CWS6[0][..., kernels].sum(axis=(1, 2))
        ranks = _drawn(kernels_W.tolist(), iteration.steps)
        return Timeline(
            period_ms=iteration.period_ms,
            stages=tuple(stage.name for stage in stages),
            num_ranks=len(kernels_W),
            ranks=ranks,
            spans=tuple(iteration.spans(ranks)),
            steps=iteration.steps,
        )

    def __str__(self) -> str:
        """Return what binds and what overlaps, without a full stop."""
        found = [
            f"{exchange} {beside:.3f} of {whole:.3f}"
            for exchange, beside, whole in self._overlaps()
        ]
        overlap = f"beside kernels of rank {self._busiest} [ms]: {', '.join(found)}"
        return (
            f"binding: {', '.join(self._chain())}; "
            f"{overlap if found else 'nothing overlaps'}"
        )

    @property
    def overlaps(self) -> bool:
        """Whether the text has anything to say of overlaps."""
        return bool(self._overlaps())

    @property
    def drawn(self) -> str:
        """Which ranks are drawn, without a full stop; empty: all."""
        if len(self.ranks) == self.num_ranks:
            return ""
        return (
            f"drawn: {listed(self.ranks)} of {self.num_ranks:,}, among them those that "
            "bind, the slowest and the fastest"
        )

    def chart(self, bound_ms: float) -> dict[str, Any]:
        """Return what the page draws, with a line at a bound."""
        fields = attrgetter(*(f.name for f in dataclasses.fields(Span)))
        return {
            "kind": "timeline",
            "period_ms": self.period_ms,
            "bound_ms": bound_ms,
            "stages": self.stages,
            "ranks": self.ranks,
            "spans": [fields(span) for span in self.spans],
        }

    @property
    def _busiest(self) -> int:
        """The drawn rank of the longest kernel that binds, or else the first."""
        drawn = [s for s in self.steps if _place(s)[1] in self.ranks]
        return max(drawn, key=lambda s: s.ms).rank if drawn else self.ranks[0]

    def _chain(self) -> Iterator[str]:
        """Yield the phases of the binding chain, with ranks and stages in words."""
        phases = {(_label(span.phase), span.stage) for span in self.spans}
        long = [s for s in self.steps if s.ms > _LEAST * self.period_ms]
        for (label, rank), steps in itertools.groupby(long, key=_place):
            stages = {step.stage for step in steps}
            every = {stage for name, stage in phases if name == label}
            where = f" on rank {rank}" if rank is not None else ""
            if len(stages) < len(every):
                several = f"{len(stages)} of {len(every)} stages"
                where += f" ({several if len(stages) > 1 else self._short(*stages)})"
            yield f"{label}{where}"

    def _short(self, stage: int) -> str:
        """Return a stage's name, without the module's if there is only one."""
        modules = {name.rpartition(" (")[0] for name in self.stages}
        name = self.stages[stage]
        return name if len(modules) > 1 else name.rpartition(" (")[2].rstrip(")")

    def _overlaps(self) -> list[tuple[str, float, float]]:
        """Return collective, time beside kernels of the busiest rank, and all time."""
        own = [span for span in self.spans if span.rank == self._busiest]
        beside: dict[str, float] = defaultdict(float)
        whole: dict[str, float] = defaultdict(float)
        for span in (s for s in own if s.stream == "collectives"):
            whole[span.phase] += span.end_ms - span.start_ms
            for other in (s for s in own if s.stream == "compute"):
                since = max(span.start_ms, other.start_ms)
                until = min(span.end_ms, other.end_ms)
                beside[span.phase] += max(0.0, until - since)
        least = _LEAST * self.period_ms
        return [(name, ms, whole[name]) for name, ms in beside.items() if ms > least]


def _label(phase: str) -> str:
    return "dense layers" if phase in DENSE else phase


def _place(step: Part) -> tuple[str, int | None]:
    """Return what steps have in common that the text names once."""
    is_alone = step.phase not in COLLECTIVES and step.phase not in DENSE
    return _label(step.phase), step.rank if is_alone else None


def _drawn(kernels_W: Sequence[float], steps: Sequence[Part]) -> tuple[int, ...]:
    """Return the ranks to draw, ascending.

    Args:
        kernels_W: Time of each rank's kernels [ms].
        steps: What binds.
    """
    slowest_first = sorted(range(len(kernels_W)), key=lambda rank: -kernels_W[rank])
    binding = [rank for _, rank in map(_place, steps) if rank is not None]
    places = np.linspace(0, len(kernels_W) - 1, MAX_RANKS).round().astype(int)
    between = [slowest_first[place] for place in places.tolist()]
    wanted = [*slowest_first[:1], *slowest_first[-1:], *binding, *between]
    return tuple(sorted([*dict.fromkeys(wanted)][:MAX_RANKS]))
