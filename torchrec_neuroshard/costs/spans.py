"""When each rank runs which phase of an iteration, as a profiler shows it.

Kernels and collectives form a graph. Each waits for its inputs and for what its stream
runs before it. A collective also waits for all ranks. The graph repeats with every
batch. In the steady state an iteration takes as long as the *critical cycle*: the chain
of work, from a batch to a later one, that takes longest per batch. All other work
begins as early as it can.

`schedules` has the order of phases, `timeline` the order of stages within a pass.

The period is found by Newton's method: starting at 0, the time per batch of any cycle
that takes longer becomes the new period, until there is none.

Shapes: `W` ranks, `N` pieces of work in a batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from torchrec_neuroshard.costs.passes import TIMED, Part, StagePhases
from torchrec_neuroshard.costs.schedules import (
    BARRIERS,
    DENSE,
    DenseMs,
    Schedule,
    edges,
    used_apart,
)

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

STREAMS = ("compute", "collectives", "cache")
"""Streams of a rank. The last one is used if a pipeline loads caches ahead."""
REORDERS = {"fwd_comms": "fwd_reorder", "bwd_comms": "bwd_reorder"}
"""Exchange -> the kernel that reorders the columns of split tables for it."""

_REDUCE = "reduce"
"""The all-reduce of replicas, a `bwd_comms` after its kernels."""
_INSIDE = {"fwd_compute": "fwd_inside", "bwd_compute": "bwd_inside"}
"""Kernels -> the collective inside nodes after them, or before them."""
_SHOWN = {_REDUCE: "bwd_comms", "fwd_inside": "fwd_comms", "bwd_inside": "bwd_comms"}
"""Kind of work -> its phase, where they differ."""
_ROUNDING = 1e-12
"""Times below this share of a batch's work are rounding errors."""
_Name = tuple[str, int]
"""A piece of work: its kind, and its stage or -1."""
_MEET: _Name = ("meet", -1)
"""All ranks begin the updates of a pass together, as in `timeline`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """A piece of work on one rank."""

    rank: int
    stream: str
    """A name in `STREAMS`."""
    phase: str
    """A name in `TIMED`, in `DENSE`, or a value of `REORDERS`."""
    stage: int
    """Index of the stage; -1 for dense layers."""
    batch: int
    """0: this iteration's batch; 1: the next one."""
    start_ms: float
    end_ms: float
    binds: bool
    """Whether it is on the critical cycle."""


class Iteration:
    """The steady state of a plan's iterations.

    Attributes:
        period_ms: Time of an iteration.
        steps: The critical cycle, from the first step that an iteration begins.
    """

    def __init__(self, schedule: Schedule, dense: DenseMs, found: StagePhases) -> None:
        """Find the period, and the earliest start of all work.

        Args:
            schedule: The order of phases.
            dense: Times of the dense layers.
            found: Phases of one candidate, with at least one stage.
        """
        self._graph = _Graph(schedule, dense, found)
        self.period_ms, cycle = self._graph.longest_cycle()
        self.steps: tuple[Part, ...] = ()
        if not cycle:
            return
        graph, period = self._graph, self.period_ms
        self._start_NW = graph.starts(period, cycle[0])
        self._begin_ms = graph.begin_ms(self._start_NW)
        self._binds_NW = np.zeros(self._start_NW.shape, dtype=bool)
        for work, rank in cycle:
            self._binds_NW[work, slice(None) if graph.meets_N[work] else rank] = True
        after = [
            (self._start_NW[state] - self._begin_ms + graph.rounding_ms) % period
            for state in cycle
        ]
        first = int(np.argmin(after))
        self.steps = tuple(
            step
            for step in map(graph.step, (*cycle[first:], *cycle[:first]))
            if step.ms > graph.rounding_ms
        )

    def spans(self, ranks: Sequence[int]) -> list[Span]:
        """Return what these ranks do, from one batch's begin to the next one's.

        Work of batches before and after is cut where the iteration begins and ends.
        """
        return list(itertools.chain.from_iterable(map(self._spans, ranks)))

    def _spans(self, rank: int) -> Iterator[Span]:
        if not self.steps:
            return
        graph, period = self._graph, self.period_ms
        for work, (kind, stage) in enumerate(graph.names):
            phase = _SHOWN.get(kind, kind)
            stream = "cache" if phase == "cache" else "compute"
            start = float(self._start_NW[work, rank]) - self._begin_ms
            end = start + float(graph.taken_NW[work, rank])
            for batch in range(-int(end // period), int(-start // period) + 2):
                since = max(0.0, start + batch * period)
                until = min(period, end + batch * period)
                if until - since > graph.rounding_ms:
                    yield Span(
                        rank=rank,
                        stream="collectives" if phase in BARRIERS else stream,
                        phase=phase,
                        stage=stage,
                        batch=batch,
                        start_ms=since,
                        end_ms=until,
                        binds=bool(self._binds_NW[work, rank]),
                    )


class _Graph:
    """All work of a batch, and what it waits for."""

    def __init__(self, schedule: Schedule, dense: DenseMs, found: StagePhases) -> None:
        chains = list(_stage_chains(schedule, found))
        names = dict.fromkeys(itertools.chain.from_iterable(chains))
        self.names: list[_Name] = [*names, *((phase, -1) for phase in DENSE)]
        self._after: list[set[tuple[int, int]]] = [set() for _ in self.names]
        number = {name: work for work, name in enumerate(self.names)}
        for chain in chains:
            for before, after in itertools.pairwise(chain):
                self._after[number[after]].add((number[before], 0))
        for before, after, lag in _phase_edges(schedule, found):
            self._after[number[after]].add((number[before], lag))
        own_NW = np.stack([_work_ms(name, dense, found) for name in self.names])
        meeting = {_MEET} | {n for n in self.names if n[0] in (*BARRIERS, _REDUCE)}
        self.meets_N = np.array([name in meeting for name in self.names])
        num_ranks = own_NW.shape[1]
        # Ranks of a node meet in the collectives inside it.
        inside = [kind in _INSIDE.values() for kind, _ in self.names]
        node_size = found.node_size or num_ranks
        self._met_N = np.where(self.meets_N, num_ranks, np.where(inside, node_size, 1))
        if node_size == num_ranks:
            self.meets_N = self.meets_N | np.array(inside)
        self._slowest_N = own_NW.argmax(axis=1)
        self.taken_NW: Floats = np.where(
            self.meets_N[:, None], own_NW.max(axis=1, keepdims=True), own_NW
        )
        self.rounding_ms = _ROUNDING * float(own_NW.max(axis=1).sum())
        phases = [token.partition("+")[0] for token in schedule.streams[0].split()]
        place = {phase: place for place, phase in enumerate(phases)}
        self._first = min(
            (work for work in range(len(self.names)) if own_NW[work].any()),
            key=lambda work: place.get(self.names[work][0], len(place)),
            default=0,
        )

    def begin_ms(self, start_NW: Floats) -> float:
        """Return when an iteration begins: when the last rank begins its first work."""
        return float(start_NW[self._first].max())

    def step(self, state: tuple[int, int]) -> Part:
        """Return a part of the critical cycle, given as work and rank."""
        work, rank = state
        kind, stage = self.names[work]
        rank = int(self._slowest_N[work]) if self.meets_N[work] else rank
        phase = _SHOWN.get(kind, kind)
        return Part(phase, stage, rank, float(self.taken_NW[state]))

    def longest_cycle(self) -> tuple[float, list[tuple[int, int]]]:
        """Return the period and the critical cycle as (work, rank)."""
        period, cycle = 0.0, list[tuple[int, int]]()
        while True:
            reached = _Reached(np.zeros_like(self.taken_NW))
            while not (found := reached.cycle()) and self._relax(reached, period):
                pass
            if not found:
                return period, cycle
            cycle = [state for state, _ in found]
            num_batches = sum(lag for _, lag in found)
            assert num_batches > 0, f"{[self.names[n] for n, _ in cycle]} is a deadlock"
            period = sum(float(self.taken_NW[state]) for state in cycle) / num_batches

    def starts(self, period: float, source: tuple[int, int]) -> Floats:
        """Return the earliest starts in the steady state, `N x W` [ms].

        Args:
            period: See `longest_cycle`.
            source: Work and rank on the critical cycle; it starts at 0.
        """
        reached = _Reached(np.full_like(self.taken_NW, -np.inf))
        work, rank = source
        reached.start_NW[work, slice(None) if self.meets_N[work] else rank] = 0.0
        while self._relax(reached, period):
            pass
        return reached.start_NW

    def _relax(self, reached: _Reached, period: float) -> bool:
        """Delay what cannot start yet, and return whether there was any."""
        changed = False
        num_ranks = self.taken_NW.shape[1]
        for work, after in enumerate(self._after):
            for before, lag in after:
                end_W = reached.start_NW[before] + self.taken_NW[before] - lag * period
                from_W = np.arange(num_ranks)
                if (size := int(self._met_N[work])) > 1:
                    end_GW = end_W.reshape(-1, size)
                    first_G = from_W[::size]
                    from_W = np.repeat(first_G + end_GW.argmax(axis=1), size)
                    end_W = np.repeat(end_GW.max(axis=1), size)
                later_W = end_W > reached.start_NW[work] + self.rounding_ms
                if later_W.any():
                    changed = True
                    reached.start_NW[work, later_W] = end_W[later_W]
                    from_W += before * num_ranks
                    reached.from_NW[work, later_W] = from_W[later_W]
                    reached.lag_NW[work, later_W] = lag
        return changed


class _Reached:
    """Starts of all work so far, and what each start waited for."""

    def __init__(self, start_NW: Floats) -> None:
        self.start_NW = start_NW
        self.from_NW: Ints = np.full(start_NW.shape, -1)
        """Index into the flat array; -1: nothing."""
        self.lag_NW: Ints = np.zeros(start_NW.shape, dtype=np.int64)

    def cycle(self) -> list[tuple[tuple[int, int], int]]:
        """Return work that waits for itself, as ((work, rank), lag); [] if none."""
        from_X, lag_X = self.from_NW.ravel(), self.lag_NW.ravel()
        far_X = from_X
        for _ in range(len(from_X).bit_length()):
            far_X = np.where(far_X >= 0, far_X[far_X], -1)
        if not (far_X >= 0).any():
            return []
        states = [int(far_X.max())]
        while (at := int(from_X[states[-1]])) != states[0]:
            states.append(at)
        num_ranks = self.from_NW.shape[1]
        return [(divmod(at, num_ranks), int(lag_X[at])) for at in states[::-1]]


def _work_ms(name: _Name, dense: DenseMs, found: StagePhases) -> Floats:
    """Return the time of a piece of work on each rank, `W` [ms]."""
    (kind, stage), reorders = name, [*REORDERS.values()]
    phases_WS6, reorder_S2 = found.phases_CWS6[0], found.reorder_CS2[0]
    if kind in DENSE:
        return np.full(len(phases_WS6), getattr(dense, kind))
    if name == _MEET:
        return np.zeros(len(phases_WS6))
    if kind in reorders:
        return np.full(len(phases_WS6), reorder_S2[stage, reorders.index(kind)])
    if kind == "bwd_comms" and found.replicated_CS[0, stage]:
        return np.zeros(len(phases_WS6))
    if kind in _INSIDE.values():
        at = [*_INSIDE.values()].index(kind)
        return np.full(len(phases_WS6), found.inside_CS2[0, stage, at])
    phase = _SHOWN.get(kind, kind)
    ms_W: Floats = phases_WS6[:, stage, TIMED.index(phase)]
    return ms_W


def _stage_chains(schedule: Schedule, found: StagePhases) -> Iterator[list[_Name]]:
    """Yield chains of work within the passes of a batch; each waits for the one before.

    All work of the stages is in some chain.
    """

    def each(before: list[_Name], after: list[_Name]) -> Iterator[list[_Name]]:
        """Yield chains from each stage's work to its next, or from last to first."""
        if found.overlaps:
            yield from ([x, y] for x in before for y in after if x[1] == y[1])
        elif after:
            yield [before[-1], after[0]]

    for own in _groups(schedule, found):
        ids, lookups, sent, ordered = (
            [(kind, stage) for stage in own]
            for kind in ("index_comms", "fwd_compute", "fwd_comms", "fwd_reorder")
        )
        looked_up = [_inside(name, found) or name for name in lookups]
        kernels = [n for pair in zip(lookups, looked_up, strict=True) for n in pair]
        yield from (ids, [*dict.fromkeys(kernels)], sent)
        yield [ids[-1], lookups[0]]
        yield from each(looked_up, sent)
        yield from each(sent, ordered)
        if own[0]:  # a host waits for the module before
            yield [("fwd_comms", own[0] - 1), ids[0]]
    every = range(len(found.modules_S))
    # Columns are reordered when outputs are used, after all lookups.
    yield [looked_up[-1], *(("fwd_reorder", stage) for stage in every)]
    if schedule.prefetches:
        yield [("cache", stage) for stage in every]
    ordered, sent, updates, reduced = (
        [(kind, stage) for stage in every[::-1]]
        for kind in ("bwd_reorder", "bwd_comms", "bwd_compute", _REDUCE)
    )
    reduced = [name for name in reduced if found.replicated_CS[0, name[1]]]
    begun = [_inside(name, found) or name for name in updates]
    kernels = [n for pair in zip(begun, updates, strict=True) for n in pair]
    yield [*ordered, _MEET, *dict.fromkeys(kernels)]
    yield [*sent, *reduced]
    yield from each(ordered, sent)
    yield from each(sent, begun)
    yield from each(updates, reduced)


def _inside(name: _Name, found: StagePhases) -> _Name | None:
    """Return the collective inside nodes next to kernels, if they have one."""
    kind, stage = name
    if kind not in _INSIDE:
        return None
    ms = found.inside_CS2[0, stage, [*_INSIDE].index(kind)]
    return (_INSIDE[kind], stage) if ms > 0 else None


def _groups(schedule: Schedule, found: StagePhases) -> list[list[int]]:
    """Return stages whose forward passes overlap: all, or those of each module."""
    every = range(len(found.modules_S))
    if not schedule.adds_up:
        return [[*every]]
    grouped = itertools.groupby(every, key=lambda s: found.modules_S[s])
    return [[*own] for _, own in grouped]


_WITHIN = {
    ("index_comms", "fwd_compute", 0),
    ("index_comms", "fwd_comms", 0),
    ("fwd_compute", "fwd_comms", 0),
    ("bwd_comms", "bwd_compute", 0),
}
"""Dependencies of phases that hold stage by stage (see `_stage_chains`)."""


def _phase_edges(
    schedule: Schedule, found: StagePhases
) -> Iterator[tuple[_Name, _Name, int]]:
    """Yield dependencies between phases: work before, work after, batches between."""
    last, apart = len(found.modules_S) - 1, used_apart(schedule)
    reduced = [(_REDUCE, s) for s in range(last + 1) if found.replicated_CS[0, s]]

    def begin(phase: str, before: str) -> _Name:
        if phase == "forward" and before != "fwd_comms" and "fwd_comms" in apart:
            return "fwd_reorder", 0
        if phase in DENSE:
            return phase, -1
        if phase == "bwd_comms" and before not in BARRIERS:
            phase = REORDERS[phase]
        name = phase, last if phase.startswith("bwd") else 0
        return _inside(name, found) or name if phase == "bwd_compute" else name

    def ends(phase: str, after: str) -> list[_Name]:
        if phase == "backward" and after != "bwd_comms" and "bwd_comms" in apart:
            return [("bwd_reorder", 0)]
        if phase in DENSE:
            return [(phase, -1)]
        if phase == "fwd_comms" and after not in BARRIERS:
            phase = REORDERS[phase]
        if phase.startswith("bwd"):
            return [(phase, 0), *reduced]
        name = phase, last
        return [(phase == "fwd_compute" and _inside(name, found)) or name]

    for before, after, lag in sorted(edges(schedule) - _WITHIN):
        if schedule.prefetches or "cache" not in (before, after):
            for end in ends(before, after):
                yield end, begin(after, before), lag
