"""The phases that each of TorchRec's train pipelines runs at the same time.

An iteration is a small graph of phases. Each stream runs its phases in a fixed order,
batch after batch. The collectives of a process group share one stream. A phase waits
for its inputs. In the steady state, an iteration takes the longest *way* through the
graph from a phase to the same phase of a later batch, divided by the number of batches
between them. A collective waits for all ranks. Between two collectives a rank's own
phases add up before ranks are compared. Where kernels are next to the exchanges of
their pass, stages overlap (see `passes`).

Source: the rows are what TorchRec 1.8's pipelines queue.
`tests/paper_gpu/test_two_ranks.py` records that order on two simulated GPUs and replays
it with times for the phases. See `docs/pipelines.md`.

Shapes: `C` candidates.
"""

from __future__ import annotations

import functools
import itertools
import math
import numbers
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from torchrec_neuroshard.costs.passes import (
    COLLECTIVES,
    PASSES,
    TIMED,
    Part,
    Passes,
    StagePhases,
    Way,
)
from torchrec_neuroshard.errors import ConfigError, check_number

Floats = npt.NDArray[np.float64]

DENSE = (
    "lower_forward",
    "forward",
    "backward",
    "lower_backward",
    "all_reduce",
    "optimizer",
)
"""Phases of the dense layers, equal on all ranks."""
_LAYERS = {n for n in DENSE if n.endswith(("forward", "backward"))}
PREFETCHING = "train_prefetch_sparse_dist"
"""The pipeline that loads caches ahead of lookups."""
BARRIERS = {*COLLECTIVES, "all_reduce"}
"""Phases in which all ranks meet."""
_USES = {"fwd_comms": "forward", "bwd_comms": "backward"}
"""Exchange -> the dense phase beside which its columns are reordered."""

_READS = (
    "index_comms fwd_compute fwd_comms forward backward bwd_comms bwd_compute",
    "index_comms cache fwd_compute",
    "lower_forward forward",
    "backward lower_backward all_reduce optimizer",
)
"""Dependencies within a batch: each phase of a line reads the output of the one before.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseMs:
    """Milliseconds of a model's dense layers in an iteration.

    *Lower* layers need no embeddings. Leave them at 0 to count all layers with those
    that do.
    """

    forward: float = 0.0
    backward: float = 0.0
    optimizer: float = 0.0
    lower_forward: float = 0.0
    lower_backward: float = 0.0
    all_reduce: float = 0.0
    """The part of the gradients' all-reduce that remains after the backward pass."""
    lookups_first: bool = False
    """Whether the model calls its embedding module before its lower layers. TorchRec's
    DLRM calls it after them."""

    def __post_init__(self) -> None:
        for name in DENSE:
            check_number(f"dense_ms: {name}", getattr(self, name))

    @staticmethod
    def of(given: DenseMs | float | None) -> DenseMs:
        """Return times from a `DenseMs` or a total; a third of a total is forward.

        A layer's backward pass has two matrix products, its forward pass one.

        Raises:
            ConfigError: The total is negative or not finite.
        """
        if isinstance(given, DenseMs):
            return given
        total = given or 0.0
        is_number = isinstance(total, numbers.Real)
        if not (is_number and 0 <= total < math.inf):
            raise ConfigError(
                f"dense_ms must be finite and at least 0 [ms], got {given!r}"
            )
        return DenseMs(forward=total / 3, backward=total - total / 3)

    @property
    def total_ms(self) -> float:
        """The sum of all dense phases."""
        return float(sum(getattr(self, name) for name in DENSE))


@dataclass(frozen=True, slots=True)
class Schedule:
    """The order in which a pipeline runs the phases of an iteration."""

    name: str
    """TorchRec's `PipelineType`, or a similar name if it has no member."""
    streams: tuple[str, ...]
    """Phases of each stream in order. "index_comms+1" is the phase of the next
    batch."""
    waits: tuple[str, ...] = ()
    """Further dependencies, in the same notation."""

    @property
    def prefetches(self) -> bool:
        """Whether caches are loaded in a separate phase, before the lookups."""
        return self.name == PREFETCHING

    @property
    def adds_up(self) -> bool:
        """Whether no phase of a batch runs beside another batch."""
        return self.name in ("none", "train_base")

    def hides(self, dense: DenseMs) -> bool:
        """Whether exchanges or updates may run beside dense layers."""
        lower_ms = dense.lower_forward + dense.lower_backward
        return not self.adds_up or (dense.lookups_first and lower_ms > 0)

    def path_ms(
        self, found: StagePhases, dense: DenseMs, dense_C: Floats | float = 1.0
    ) -> Floats:
        """Return the time of an iteration, `C` [ms].

        Args:
            found: Phases of each rank in each stage.
            dense: Times of the dense layers.
            dense_C: Factors on the layers, without the optimizer and the all-reduce.
        """
        paths: Floats = self.way_ms(found, dense, dense_C).max(axis=1)
        return paths

    def way_ms(
        self, found: StagePhases, dense: DenseMs, dense_C: Floats | float = 1.0
    ) -> Floats:
        """Return the time of each way per batch, `C x ways` [ms]; see `path_ms`."""
        passes = self._passes(found)
        columns = [
            (
                passes.way_ms(way)
                + sum(
                    getattr(dense, name) * (dense_C if name in _LAYERS else 1.0)
                    for name in way.dense
                )
            )
            / way.num_batches
            for way in _ways(self)
        ]
        return np.stack(columns, axis=1)

    def _passes(self, found: StagePhases) -> Passes:
        # Without a pipeline, a module's ids wait for the exchange before them.
        return Passes(found, joined=not self.adds_up)

    def parts(self, found: StagePhases, dense: DenseMs) -> list[Part]:
        """Return what an iteration consists of: the parts of the longest way.

        They add up to `path_ms`, together with the dense phases that are on it.

        Args:
            found: Phases of one candidate.
            dense: Times of the dense layers.
        """
        way = _ways(self)[int(self.way_ms(found, dense)[0].argmax())]
        parts = [*self._passes(found).parts(way)]
        parts += [Part(name, -1, -1, getattr(dense, name)) for name in way.dense]
        return [replace(part, ms=part.ms / way.num_batches) for part in parts]

    def hidden_ms(self, found: StagePhases, dense: DenseMs) -> Floats:
        """Return how much of each phase is hidden: `C x 6` [ms].

        That is the sum over stages of the phase's time on its slowest rank, minus what
        an iteration would save without the phase.
        """
        now_C = self.path_ms(found, dense)
        saved = [now_C - self.path_ms(found.without(name), dense) for name in TIMED]
        hidden: Floats = np.maximum(found.totals_C6 - np.stack(saved, axis=1), 0.0)
        return hidden

    def reliefs_ms(self, found: StagePhases, dense: DenseMs) -> dict[str, float]:
        """Return how long each collective may take without lengthening an iteration.

        Args:
            found: Times of the other phases, of one candidate.
            dense: Times of the dense layers.
        """
        reliefs = {}
        for name in COLLECTIVES:
            ways_ms = self.way_ms(found.without(name), dense)[0].tolist()
            path_ms = max(ways_ms)
            reliefs[name] = min(
                (path_ms - ms) * way.num_batches
                for way, ms in zip(_ways(self), ways_ms, strict=True)
                if (name,) in way.runs
            )
        return reliefs

    def joins_kernels(self, found: StagePhases, dense: DenseMs) -> bool:
        """Whether the longest way has no collective between updates and next lookups.

        Args:
            found: Phases of a similar plan, which decide the longest way.
            dense: Times of the dense layers.
        """
        ways_ms = self.way_ms(found, dense)[0]
        runs = _ways(self)[int(ways_ms.argmax())].runs
        return any({"fwd_compute", "bwd_compute"} <= {*run} for run in runs)


def edges(schedule: Schedule) -> set[tuple[str, str, int]]:
    """Return edges: phase before, phase after, and the batches between them."""
    edges = set()
    for line, is_cycle in (
        *((s, True) for s in schedule.streams),
        *((w, False) for w in (*schedule.waits, *_READS)),
    ):
        steps = [_step(token) for token in line.split()]
        if is_cycle:
            steps.append((steps[0][0], steps[0][1] + 1))
        for (before, early), (after, late) in itertools.pairwise(steps):
            edges.add((before, after, late - early))
    return edges


def _step(token: str) -> tuple[str, int]:
    """Return the phase and the batch that a token means."""
    name, _, later = token.partition("+")
    assert name in TIMED or name in DENSE, name
    return name, int(later or 0)


@functools.cache
def _ways(schedule: Schedule) -> tuple[Way, ...]:
    """Return all ways that can be the longest."""
    following: dict[str, list[tuple[str, int]]] = {}
    for before, after, lag in sorted(edges(schedule)):
        following.setdefault(before, []).append((after, lag))
    order = (*TIMED, *DENSE)

    def walk(path: tuple[str, ...], lag: int) -> Iterator[tuple[tuple[str, ...], int]]:
        for after, more in following.get(path[-1], ()):
            if after == path[0]:
                yield path, lag + more
            elif after not in path and order.index(after) > order.index(path[0]):
                yield from walk((*path, after), lag + more)

    found: dict[tuple[object, ...], Way] = {}
    for start in order:
        for path, lag in walk((start,), 0):
            assert lag >= 1, f"{schedule.name}: {path} waits for itself"
            way = _way(path, lag, used_apart(schedule))
            key = frozenset(path), lag, way.chained, way.ordered, way.reorders
            found.setdefault(key, way)
    ways = list(found.values())
    return tuple(way for way in ways if not any(_covers(other, way) for other in ways))


def _covers(other: Way, way: Way) -> bool:
    """Whether another way is never shorter."""
    if other is way:
        return False
    phases, of_other = (
        {*w.dense, *itertools.chain.from_iterable(w.runs)} for w in (way, other)
    )
    # Where a way has kernels and exchanges apart, nothing of them overlaps.
    apart = {x for k, x in PASSES.items() if {k, x} <= phases} - way.chained
    return (
        phases <= of_other
        and way.num_batches >= other.num_batches
        and way.ordered | way.reorders <= other.ordered | other.reorders
        and way.ordered <= other.ordered
        and not apart & other.chained
    )


def used_apart(schedule: Schedule) -> frozenset[str]:
    """Return the exchanges that are waited for beside the upper layers alone.

    Lower layers run between an exchange and its reordered columns, in either pass.
    """
    beside = {("fwd_comms", "lower_forward", 0), ("lower_backward", "bwd_comms", 0)}
    return frozenset(PASSES.values()).difference(*(beside & edges(schedule)))


def _way(path: tuple[str, ...], num_batches: int, apart: frozenset[str]) -> Way:
    """Split a cycle of phases into runs, from one collective to the next."""
    first = next((k for k, name in enumerate(path) if name in BARRIERS), 0)
    runs: list[tuple[str, ...]] = []
    run: list[str] = []
    for name in (*path[first:], *path[:first]):
        if name in BARRIERS:
            runs += [tuple(run), (name,) * (name in TIMED)]
            run = []
        elif name in TIMED:
            run.append(name)
    runs.append(tuple(run))
    beside = {
        path[n]: (path[n - 1], path[(n + 1) % len(path)]) for n in range(len(path))
    }
    # In the backward pass an exchange comes before its kernels.
    sides = (("fwd_compute", "fwd_comms", 0), ("bwd_compute", "bwd_comms", 1))
    on_way = [side for side in sides if side[1] in beside]
    return Way(
        runs=tuple(r for r in runs if r),
        dense=tuple(name for name in path if name in DENSE),
        num_batches=num_batches,
        chained=frozenset(x for k, x, side in on_way if beside[x][side] == k),
        ordered=frozenset(
            x for _, x, side in on_way if beside[x][1 - side] not in BARRIERS
        ),
        reorders=frozenset(
            x
            for _, x, side in sides
            if x in apart and beside.get(_USES[x], (x, x))[side] != x
        ),
    )


_LOOKUPS_LAST = (
    "fwd_compute fwd_comms forward backward bwd_comms bwd_compute lower_backward "
    "optimizer"
)
_LOOKUPS_FIRST = (
    "fwd_compute lower_forward forward backward lower_backward bwd_compute optimizer"
)
_DENSE = "lower_forward forward backward lower_backward optimizer"
_FUSED = "fwd_compute bwd_compute"
_BASE = "index_comms fwd_comms bwd_comms all_reduce"
_NEXT = "fwd_comms index_comms+1 bwd_comms all_reduce"
_PREFETCH = "index_comms+1 fwd_comms bwd_comms all_reduce"
_AT_ONCE = (
    (f"lower_forward index_comms {_LOOKUPS_LAST}", _BASE),
    (f"index_comms {_LOOKUPS_FIRST}", _BASE),
)
_SEMI_SYNC = (
    "lower_forward forward fwd_compute+1 backward lower_backward bwd_comms bwd_compute "
    "optimizer",
    "fwd_comms+1 index_comms+2 all_reduce bwd_comms",
)

_STREAMS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "none": _AT_ONCE,
    "train_base": _AT_ONCE,
    "train_sparse_dist": (
        (f"lower_forward {_LOOKUPS_LAST}", _NEXT),
        (_LOOKUPS_FIRST, _NEXT),
    ),
    PREFETCHING: (
        (f"lower_forward {_LOOKUPS_LAST}", _PREFETCH),
        (_LOOKUPS_FIRST, _PREFETCH),
    ),
    "train_semi_sync": (_SEMI_SYNC, _SEMI_SYNC),
    "train_fused_sparse_dist": (
        (_DENSE, _FUSED, _NEXT),
        (_DENSE, _FUSED, "fwd_comms index_comms+1 all_reduce bwd_comms"),
    ),
}
"""Name -> streams of models that call lower layers first, and that look up first."""

_WAITS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    # Updates of cached rows wait for the loads in progress, and the next loads wait
    # for these updates.
    PREFETCHING: (("cache+1 bwd_compute cache+2",),) * 2,
    "train_fused_sparse_dist": (
        ("fwd_compute lower_forward", "bwd_compute optimizer"),
        (
            "fwd_comms lower_forward",
            "bwd_compute optimizer",
            "lower_backward bwd_comms",
        ),
    ),
}

SCHEDULES: Mapping[str, Sequence[Schedule]] = {
    name: [
        Schedule(name, *row)
        for row in zip(streams, _WAITS.get(name, ((), ())), strict=True)
    ]
    for name, streams in _STREAMS.items()
}
"""Name -> schedules of models that call lower layers first, and that look up first."""
SEQUENTIAL = SCHEDULES["none"][0]
"""All phases one after another."""


def find_schedule(name: str, dense: DenseMs) -> Schedule:
    """Return the schedule of a pipeline for a model.

    Raises:
        ConfigError: The name is unknown.
    """
    if name not in SCHEDULES:
        raise ConfigError(
            f"pipeline_type '{name}' is unknown; known are {', '.join(SCHEDULES)}. "
            "Take the one that is most like your loop, or leave pipeline_type out if "
            "phases run one after another"
        )
    return SCHEDULES[name][dense.lookups_first]
