"""How long ways through an iteration take, with stages that overlap (see `timeline`).

A way is a row of *segments*, which follow each other: exchanges, kernels, or kernels
together with the exchanges of their pass. A segment takes as long as its longest chain.

Shapes: `C` candidates, `W` ranks, `S` stages in TorchRec's order, `J` chains, `6`
phases in the order of `TIMED`, `2` forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from torchrec_neuroshard.costs.timeline import (
    Chains,
    Inside,
    chains,
    steps_before,
    work_before,
)

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

COLLECTIVES = ("index_comms", "fwd_comms", "bwd_comms")
"""Phases that wait for the slowest rank."""
TIMED = ("index_comms", "fwd_compute", "fwd_comms", "bwd_comms", "bwd_compute", "cache")
"""Phases of the tables; the last one loads rows from host memory into caches."""
PASSES = {"fwd_compute": "fwd_comms", "bwd_compute": "bwd_comms"}
"""Kernels of a pass -> its exchange."""


@dataclass(frozen=True, slots=True)
class StagePhases:
    """Phases of all ranks in each stage of some candidates."""

    phases_CWS6: Floats
    """Without reordering and collectives inside nodes; an all-reduce of replicas is a
    `bwd_comms` [ms]."""
    reorder_CS2: Floats
    """Reordering of each stage's columns, equal on all ranks [ms]."""
    replicated_CS: Bools
    """Whether a stage's tables are replicated."""
    modules_S: tuple[int, ...]
    """Module of each stage, ascending."""
    overlaps: bool = True
    """See `CommsModel.overlaps`."""
    inside_CS2: Floats | None = None
    """Collectives inside nodes, which ranks wait for between kernels [ms]. None: there
    are none."""
    node_size: int = 0
    """Ranks of a node; 0 means all."""

    @staticmethod
    def plain(phases_CWS6: Floats) -> StagePhases:
        """Return phases of one module's stages without reordering and replicas."""
        count, _, num_stages, _ = phases_CWS6.shape
        none = np.zeros((count, num_stages, 2))
        return StagePhases(phases_CWS6, none, none[..., 0] > 0, (0,) * num_stages)

    def pick(self, candidate: int) -> StagePhases:
        """Return the phases of one candidate."""
        one = slice(candidate, candidate + 1)
        return replace(
            self,
            phases_CWS6=self.phases_CWS6[one],
            reorder_CS2=self.reorder_CS2[one],
            replicated_CS=self.replicated_CS[one],
            inside_CS2=None if self.inside_CS2 is None else self.inside_CS2[one],
        )

    @property
    def totals_C6(self) -> Floats:
        """Each phase on its slowest rank, summed over stages.

        Exchanges include reordering and collectives inside nodes.
        """
        totals: Floats = self.phases_CWS6.max(axis=1).sum(axis=1)
        sent = [TIMED.index(name) for name in PASSES.values()]
        totals[:, sent] += self.reorder_CS2.sum(axis=1)
        if self.inside_CS2 is not None:
            totals[:, sent] += self.inside_CS2.sum(axis=1)
        return totals

    def without(self, phase: str) -> StagePhases:
        """Return the phases with one of them taking no time."""
        phases_CWS6, reorder_CS2 = self.phases_CWS6.copy(), self.reorder_CS2.copy()
        phases_CWS6[..., TIMED.index(phase)] = 0.0
        inside_CS2 = None if self.inside_CS2 is None else self.inside_CS2.copy()
        if phase in PASSES.values():
            at = [*PASSES.values()].index(phase)
            reorder_CS2[..., at] = 0.0
            if inside_CS2 is not None:
                inside_CS2[..., at] = 0.0
        return replace(
            self,
            phases_CWS6=phases_CWS6,
            reorder_CS2=reorder_CS2,
            inside_CS2=inside_CS2,
        )


@dataclass(frozen=True, slots=True)
class Way:
    """A cycle through the graph: from a phase to the same phase of a later batch."""

    runs: tuple[tuple[str, ...], ...]
    """Timed phases; a run's phases follow each other on one rank."""
    dense: tuple[str, ...]
    """Dense phases on the way."""
    num_batches: int
    """Batches between its start and its end."""
    chained: frozenset[str] = frozenset()
    """Exchanges next to the kernels of their pass, whose stages overlap."""
    ordered: frozenset[str] = frozenset()
    """Exchanges next to dense phases. Columns are reordered in between."""
    reorders: frozenset[str] = frozenset()
    """Exchanges that are not on the way, but whose columns are reordered on it."""


class Part(NamedTuple):
    """A part of an iteration: a stage's phase on the rank that counts."""

    phase: str
    stage: int
    rank: int
    ms: float


class _Segment(NamedTuple):
    """A part of a way between two points where all ranks meet."""

    kernels_CWJ: Floats
    rest_CJ: Floats
    parts: Callable[[int, int], Iterator[Part]]
    """Yields the parts of a chain, given by index, on a rank, for one candidate."""

    @property
    def ms(self) -> Floats:
        longest: Floats = (self.kernels_CWJ.max(axis=1) + self.rest_CJ).max(axis=1)
        return longest

    def longest(self) -> Iterator[Part]:
        """Yield the parts of the first candidate's longest chain."""
        ms_WJ = self.kernels_CWJ[0] + self.rest_CJ[0]
        rank, chain = np.unravel_index(ms_WJ.argmax(), ms_WJ.shape)
        return self.parts(int(chain), int(rank))

    def then(self, other: _Segment) -> _Segment:
        """Return both segments as one, between which ranks do not meet."""
        kernels = self.kernels_CWJ[..., None] + other.kernels_CWJ[:, :, None]
        rest = self.rest_CJ[..., None] + other.rest_CJ[:, None]
        count = other.rest_CJ.shape[1]

        def parts(chain: int, rank: int) -> Iterator[Part]:
            first, second = divmod(chain, count)
            yield from self.parts(first, rank)
            yield from other.parts(second, rank)

        (lines, ranks), chains = kernels.shape[:2], count * self.rest_CJ.shape[1]
        return _Segment(
            kernels.reshape(lines, ranks, chains), rest.reshape(lines, chains), parts
        )


def sequential_ms(found: StagePhases) -> Floats:
    """Return iterations without a pipeline and dense layers, `C` [ms].

    The same as `Schedule.path_ms`, in fewer steps.
    """
    index_C, sent_CS, returned_CS = (
        found.phases_CWS6[..., TIMED.index(name)].max(axis=1) for name in COLLECTIVES
    )
    reduced_CS = np.where(found.replicated_CS, returned_CS, 0.0)
    returned_CS = returned_CS - reduced_CS
    total: Floats = index_C.sum(axis=1)
    num_ranks, modules_S = found.phases_CWS6.shape[1], np.array(found.modules_S)
    node_size = min(found.node_size or num_ranks, num_ranks)
    last = int(modules_S.max())
    each: list[tuple[int, Bools | None, bool]] = [
        (0, modules_S == module, module == last) for module in np.unique(modules_S)
    ]
    if len(each) == 1:
        each = [(0, None, True)]
    for n, held_S, ordered in (*each, (1, None, True)):
        kernels_CWS = found.phases_CWS6[..., TIMED.index([*PASSES][n])]
        exchanges_CS = (sent_CS, returned_CS)[n]
        inside_CS = None if found.inside_CS2 is None else found.inside_CS2[..., n]
        orders_CS = found.reorder_CS2[..., n] if ordered else None
        reductions_CS = (None, reduced_CS)[n]
        if held_S is not None:
            kernels_CWS, exchanges_CS = kernels_CWS * held_S, exchanges_CS * held_S
            inside_CS = None if inside_CS is None else inside_CS * held_S
        if found.overlaps:
            waits = None if inside_CS is None else Inside(inside_CS, node_size)
            total += chains(
                kernels_CWS, exchanges_CS, orders_CS, reductions_CS, waits
            ).ms
            continue
        total += kernels_CWS.sum(axis=2).max(axis=1) + exchanges_CS.sum(axis=1)
        for more_CS in (orders_CS, inside_CS, reductions_CS):
            total += 0.0 if more_CS is None else more_CS.sum(axis=1)
    return total


class Passes:
    """The phases of some candidates, as segments of ways."""

    def __init__(self, found: StagePhases, *, joined: bool) -> None:
        """Separate exchanges from all-reduces, and earlier modules from the last.

        Args:
            found: Phases of all stages.
            joined: Whether stages of different modules overlap in the forward pass, as
                they do in the backward pass. Otherwise modules add up.
        """
        self._ms = dict(zip(TIMED, np.moveaxis(found.phases_CWS6, -1, 0), strict=True))
        slowest = {name: self._ms[name].max(axis=1) for name in COLLECTIVES}
        self._reduced_CS = np.where(found.replicated_CS, slowest["bwd_comms"], 0.0)
        self._sent = slowest | {"bwd_comms": slowest["bwd_comms"] - self._reduced_CS}
        forward, backward = np.moveaxis(found.reorder_CS2, -1, 0)
        self._orders = {"fwd_comms": forward, "bwd_comms": backward}
        inside_CS2 = found.inside_CS2
        if inside_CS2 is None or not inside_CS2.any():
            inside_CS2 = np.zeros_like(found.reorder_CS2)
        forward, backward = np.moveaxis(inside_CS2, -1, 0)
        self._inside = {"fwd_comms": forward, "bwd_comms": backward}
        num_ranks = found.phases_CWS6.shape[1]
        self._node_size = min(found.node_size or num_ranks, num_ranks)
        self._every: Ints = np.arange(len(found.modules_S))
        modules_S = np.array(found.modules_S, dtype=np.int64)
        own = [np.flatnonzero(modules_S == module) for module in np.unique(modules_S)]
        *self._earlier, self._last_S = [self._every] if joined or not own else own
        self._overlaps = found.overlaps

    def way_ms(self, way: Way) -> Floats:
        """Return the time of a way without dense phases, `C` [ms]."""
        total = np.zeros(len(self._reduced_CS))
        for name in way.reorders:
            total = total + self._orders[name].sum(axis=1)
        for run in way.runs:
            ms = [sum((s.ms for s in row), 0 * total) for row in self._run(run, way)]
            total = total + np.max(ms, axis=0)
        return total

    def parts(self, way: Way) -> Iterator[Part]:
        """Yield the parts of the first candidate's longest chains on a way."""
        for name in way.reorders:
            for s, ms in enumerate(self._orders[name][0].tolist()):
                yield self._slowest(name, s, ms)
        for run in way.runs:
            options = list(self._run(run, way))
            ms = [sum(float(s.ms[0]) for s in segments) for segments in options]
            for segment in options[int(np.argmax(ms))]:
                yield from segment.longest()

    def _run(self, run: Sequence[str], way: Way) -> Iterator[list[_Segment]]:
        """Yield what may take longest in a run: segments that follow each other."""
        if run[0] in COLLECTIVES:
            hidden = run[0] in way.chained
            yield [] if hidden else [self._exchange(run[0], run[0] in way.ordered)]
            return
        earlier: list[_Segment] = []
        if "fwd_compute" in run:
            earlier = [
                self._pass("fwd_compute", own_S, ordered=False)
                for own_S in self._earlier
            ]
        own = [self._kernels(p, way) for p in run]
        joined = own[0]
        for segment in own[1:]:
            joined = joined.then(segment)
        yield [*earlier, joined]
        if "bwd_compute" in run and "bwd_comms" in way.chained:
            if self._overlaps and self._reduced_CS.any():
                # All ranks meet in the all-reduce, the last part of the pass.
                place = list(run).index("bwd_compute")
                ordered = "bwd_comms" in way.ordered
                reduced = self._pass(
                    "bwd_compute", self._every, ordered=ordered, reduces=True
                )
                others = [s for n, s in enumerate(own) if n != place]
                for segment in others[1:]:
                    others[0] = others[0].then(segment)
                yield [reduced, *earlier, *others[:1]]

    def _kernels(self, phase: str, way: Way) -> _Segment:
        """Return a phase of a run, with its exchanges if they are next to it."""
        own_S = self._last_S if phase == "fwd_compute" else self._every
        exchange = PASSES.get(phase, "")
        if exchange in way.chained:
            return self._pass(phase, own_S, ordered=exchange in way.ordered)
        ms_CWS = self._ms[phase] * np.isin(self._every, own_S)
        kernels_CW1 = ms_CWS.sum(axis=2, keepdims=True)
        inside: Inside | None = None
        if exchange and self._inside[exchange].any():
            inside_CS = self._inside[exchange] * np.isin(self._every, own_S)
            inside = Inside(inside_CS, self._node_size)
            kernels_CW1 = inside.after(ms_CWS)[1][..., -1:]

        def parts(_: int, rank: int) -> Iterator[Part]:
            yield from self._kernel_parts(phase, ms_CWS, inside, self._every, rank)

        return _Segment(kernels_CW1, np.zeros((len(ms_CWS), 1)), parts)

    def _kernel_parts(
        self,
        phase: str,
        ms_CWS: Floats,
        inside: Inside | None,
        some_S: Ints,
        rank: int,
    ) -> Iterator[Part]:
        """Yield kernels of some stages up to a rank's last, with what it waits for."""
        ends_WS = None if inside is None else inside.after(ms_CWS)[0][0]
        for s in some_S[::-1].tolist():
            if inside is not None and ends_WS is not None and inside.ms_S[0, s] > 0:
                yield self._slowest(PASSES[phase], s, float(inside.ms_S[0, s]))
                node = rank - rank % self._node_size
                held = slice(node, node + self._node_size)
                rank = node + int(ends_WS[held, s].argmax())
            yield Part(phase, s, rank, float(ms_CWS[0, rank, s]))

    def _pass(
        self, compute: str, own_S: Ints, *, ordered: bool, reduces: bool = False
    ) -> _Segment:
        """Return the chains of a pass over some stages.

        Args:
            compute: "fwd_compute" or "bwd_compute".
            own_S: Stages whose kernels and exchanges are in the pass.
            ordered: Whether columns are reordered, those of all stages.
            reduces: Whether chains end with an all-reduce of replicas.
        """
        exchange, held_S = PASSES[compute], np.isin(self._every, own_S)
        orders_CS = self._orders[exchange] * ordered
        sent_CS = self._sent[exchange] * held_S
        inside_CS = self._inside[exchange] * held_S
        ms_CWS = self._ms[compute] * held_S
        if not self._overlaps:
            row = (sent_CS, orders_CS, inside_CS, self._reduced_CS)
            return self._in_a_row(
                compute, ms_CWS, row[: 3 + (compute != "fwd_compute")]
            )
        reduced_CS = self._reduced_CS if reduces else None
        inside = Inside(inside_CS, self._node_size)
        waits = inside if inside_CS.any() and not reduces else None
        found: Chains = chains(ms_CWS, sent_CS, orders_CS, reduced_CS, waits)
        count = len(self._every) + 1
        found = found.pick(slice(count, None) if reduces else slice(None))

        def parts(chain: int, rank: int) -> Iterator[Part]:
            start, first = int(found.start_J[chain]), int(found.first_J[chain])
            some_S = self._every[first : start + 1]
            yield from self._kernel_parts(compute, ms_CWS, waits, some_S, rank)
            for s, ms in steps_before(start, sent_CS[0], orders_CS[0]):
                yield self._slowest(exchange, s, ms)
            for s in range(int(found.reduced_J[chain])):
                yield self._slowest(exchange, s, float(self._reduced_CS[0, s]))

        return _Segment(found.kernels_WJ, found.rest_J, parts)

    def _in_a_row(
        self, compute: str, ms_CWS: Floats, row: Sequence[Floats]
    ) -> _Segment:
        """Return a pass whose kernels do not run beside its collectives.

        Args:
            compute: "fwd_compute" or "bwd_compute".
            ms_CWS: Its kernels.
            row: Its collectives and reordering, `C x S` each.
        """
        others_CS = np.sum(row, axis=0)

        def parts(_: int, rank: int) -> Iterator[Part]:
            for s in self._every.tolist():
                yield Part(compute, s, rank, float(ms_CWS[0, rank, s]))
                yield self._slowest(PASSES[compute], s, float(others_CS[0, s]))

        return _Segment(
            ms_CWS.sum(axis=2, keepdims=True), others_CS.sum(axis=1)[:, None], parts
        )

    def _exchange(self, name: str, ordered: bool) -> _Segment:
        """Return the exchanges of all stages in a row, without kernels between them."""
        sent_CS, reduced_CS = self._sent[name], np.zeros_like(self._reduced_CS)
        orders_CS = np.zeros_like(sent_CS)
        if name in PASSES.values() and ordered:
            orders_CS = self._orders[name]
        if name == "bwd_comms":
            reduced_CS = self._reduced_CS
        total_C = work_before(sent_CS, orders_CS)[:, 0] + reduced_CS.sum(axis=1)

        def parts(_: int, __: int) -> Iterator[Part]:
            for s, ms in steps_before(0, sent_CS[0], orders_CS[0]):
                yield self._slowest(name, s, ms)
            for s, ms in enumerate(reduced_CS[0].tolist()):
                yield self._slowest(name, s, ms)

        none_CW1 = np.zeros((*self._ms[name].shape[:2], 1))
        return _Segment(none_CW1, total_C[:, None], parts)

    def _slowest(self, name: str, stage: int, ms: float) -> Part:
        return Part(name, stage, int(self._ms[name][0, :, stage].argmax()), ms)
