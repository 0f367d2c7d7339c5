"""How long ways through an iteration take, with stages that overlap (see `timeline`).

A way is a row of *segments*, which follow each other: exchanges, kernels, or kernels
together with the exchanges of their pass. A segment takes as long as its longest chain.

Shapes: `C` candidates, `W` ranks, `S` stages in TorchRec's order, `J` chains, `6`
phases in the order of `TIMED`, `2` forward and backward.
"""

from __future__ import annotations

import functools
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
    inside_CS2: Floats
    """Collectives inside nodes, which ranks wait for between kernels; 0: none [ms]."""
    overlaps: bool = True
    """See `CommsModel.overlaps`."""
    node_size: int = 0
    """Ranks of a node; 0 means all."""

    @staticmethod
    def plain(phases_CWS6: Floats) -> StagePhases:
        """Return phases of one module's stages without reordering and replicas."""
        count, _, num_stages, _ = phases_CWS6.shape
        none = np.zeros((count, num_stages, 2))
        return StagePhases(phases_CWS6, none, none[..., 0] > 0, (0,) * num_stages, none)

    def pick(self, candidate: int) -> StagePhases:
        """Return the phases of one candidate."""
        one = slice(candidate, candidate + 1)
        return replace(
            self,
            phases_CWS6=self.phases_CWS6[one],
            reorder_CS2=self.reorder_CS2[one],
            replicated_CS=self.replicated_CS[one],
            inside_CS2=self.inside_CS2[one],
        )

    @property
    def totals_C6(self) -> Floats:
        """Each phase on its slowest rank, summed over stages.

        Exchanges include reordering and collectives inside nodes.
        """
        totals: Floats = self.phases_CWS6.max(axis=1).sum(axis=1)
        sent = [TIMED.index(name) for name in PASSES.values()]
        totals[:, sent] += (self.reorder_CS2 + self.inside_CS2).sum(axis=1)
        return totals

    def without(self, phase: str) -> StagePhases:
        """Return the phases with one of them taking no time."""
        others_6, others_2 = (
            np.array([name != phase for name in names])
            for names in (TIMED, PASSES.values())
        )
        return replace(
            self,
            phases_CWS6=self.phases_CWS6 * others_6,
            reorder_CS2=self.reorder_CS2 * others_2,
            inside_CS2=self.inside_CS2 * others_2,
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


@dataclass(frozen=True, slots=True)
class Part:
    """A part of an iteration: a stage's phase on the rank that counts."""

    phase: str
    stage: int
    """Index of the stage; -1 for dense layers."""
    rank: int
    """Of a collective, the slowest rank."""
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
        forward, backward = np.moveaxis(found.inside_CS2, -1, 0)
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
            for own_S in self._earlier:
                earlier += self._pass("fwd_compute", own_S, ordered=False)
        own = [self._kernels(p, way) for p in run if p != "cache" or self._ms[p].any()]
        joined = [functools.reduce(_Segment.then, [first for first, *_ in own])]
        yield [*earlier, *joined]
        for place, (_, *ends) in enumerate(own):
            for reduced in ends:
                # All ranks meet in the all-reduce, the last part of the pass.
                others = [first for n, (first, *_) in enumerate(own) if n != place]
                joined = [functools.reduce(_Segment.then, others)] if others else []
                yield [reduced, *earlier, *joined]

    def _kernels(self, phase: str, way: Way) -> list[_Segment]:
        """Return a phase of a run, with its exchanges if they are next to it.

        Returns:
            See `_pass`; one segment without exchanges.
        """
        own_S = self._last_S if phase == "fwd_compute" else self._every
        exchange = PASSES.get(phase, "")
        if exchange in way.chained:
            return self._pass(phase, own_S, ordered=exchange in way.ordered)
        ms_CWS = self._held(self._ms[phase], own_S)
        kernels_CW1 = ms_CWS.sum(axis=2, keepdims=True)
        inside: Inside | None = None
        if exchange and self._inside[exchange].any():
            inside_CS = self._held(self._inside[exchange], own_S)
            inside = Inside(inside_CS, self._node_size)
            kernels_CW1 = inside.after(ms_CWS)[1][..., -1:]

        def parts(_: int, rank: int) -> Iterator[Part]:
            yield from self._kernel_parts(phase, ms_CWS, inside, self._every, rank)

        return [_Segment(kernels_CW1, np.zeros((len(ms_CWS), 1)), parts)]

    def _held(self, ms_XS: Floats, own_S: Ints) -> Floats:
        """Return times of some stages; those of others are 0."""
        if len(own_S) == len(self._every):
            return ms_XS
        return ms_XS * np.isin(self._every, own_S)

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

    def _pass(self, compute: str, own_S: Ints, *, ordered: bool) -> list[_Segment]:
        """Return the chains of a pass over some stages.

        Args:
            compute: "fwd_compute" or "bwd_compute".
            own_S: Stages whose kernels and exchanges are in the pass.
            ordered: Whether columns are reordered, those of all stages.

        Returns:
            The chains that end with kernels; and, if replicas are reduced beside
            kernels, those that end with an all-reduce.
        """
        exchange = PASSES[compute]
        orders_CS = self._orders[exchange] * ordered
        sent_CS = self._held(self._sent[exchange], own_S)
        inside_CS = self._held(self._inside[exchange], own_S)
        ms_CWS = self._held(self._ms[compute], own_S)
        reduced_CS = self._reduced_CS * (compute == "bwd_compute")
        if not self._overlaps:
            row = sent_CS + orders_CS + inside_CS + reduced_CS
            return [self._in_a_row(compute, ms_CWS, row)]
        inside = Inside(inside_CS, self._node_size) if inside_CS.any() else None
        found: Chains = chains(ms_CWS, sent_CS, orders_CS, reduced_CS, inside)
        count = len(self._every) + 1

        def parts(chain: int, rank: int) -> Iterator[Part]:
            start, first = int(found.start_J[chain]), int(found.first_J[chain])
            some_S, waits = self._every[first : start + 1], inside
            if chain >= count:  # chains with all-reduces leave them out
                waits = None
            yield from self._kernel_parts(compute, ms_CWS, waits, some_S, rank)
            for s, ms in steps_before(start, sent_CS[0], orders_CS[0]):
                yield self._slowest(exchange, s, ms)
            for s in range(int(found.reduced_J[chain])):
                yield self._slowest(exchange, s, float(self._reduced_CS[0, s]))

        kernels, rest = found.kernels_WJ, found.rest_J
        ends = [_Segment(kernels[..., :count], rest[..., :count], parts)]
        if rest.shape[-1] > count:
            ends.append(
                _Segment(
                    kernels[..., count:],
                    rest[..., count:],
                    lambda chain, rank: parts(chain + count, rank),
                )
            )
        return ends

    def _in_a_row(self, compute: str, ms_CWS: Floats, others_CS: Floats) -> _Segment:
        """Return a pass whose kernels do not run beside its collectives.

        Args:
            compute: "fwd_compute" or "bwd_compute".
            ms_CWS: Its kernels.
            others_CS: Its collectives and reordering.
        """

        def parts(_: int, rank: int) -> Iterator[Part]:
            for s in self._every.tolist():
                yield Part(compute, s, rank, float(ms_CWS[0, rank, s]))
                yield self._slowest(PASSES[compute], s, float(others_CS[0, s]))

        return _Segment(
            ms_CWS.sum(axis=2, keepdims=True), others_CS.sum(axis=1)[:, None], parts
        )

    def _exchange(self, name: str, ordered: bool) -> _Segment:
        """Return the exchanges of all stages in a row, without kernels between them."""
        sent_CS, reduced_CS = self._sent[name], self._reduced_CS * (name == "bwd_comms")
        orders_CS = self._orders[name] if ordered else np.zeros_like(sent_CS)
        total_C = work_before(sent_CS, orders_CS)[:, 0] + reduced_CS.sum(axis=1)

        def parts(_: int, __: int) -> Iterator[Part]:
            for s, ms in steps_before(0, sent_CS[0], orders_CS[0]):
                yield self._slowest(name, s, ms)
            for s, ms in enumerate(reduced_CS[0].tolist()):
                yield self._slowest(name, s, ms)

        return _Segment(np.zeros((len(total_C), 1, 1)), total_C[:, None], parts)

    def _slowest(self, name: str, stage: int, ms: float) -> Part:
        return Part(name, stage, int(self._ms[name][0, :, stage].argmax()), ms)
