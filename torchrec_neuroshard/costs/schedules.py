"""The phases that each of TorchRec's train pipelines runs at the same time.

An iteration is a small graph of phases. Each stream runs its phases in a fixed order,
batch after batch. The collectives of a process group share one stream. A phase waits
for its inputs. In the steady state, an iteration takes the longest *way* through the
graph from a phase to the same phase of a later batch, divided by the number of batches
between them. A collective waits for all ranks. Between two collectives a rank's own
phases add up before ranks are compared.

Source: the rows are what TorchRec 1.8's pipelines queue.
`tests/paper_gpu/test_two_ranks.py` records that order on two simulated GPUs and replays
it with times for the phases. See `docs/pipelines.md`.

Shapes: `C` candidates, `W` ranks, `S` stages, `6` phases in the order of `TIMED`.
"""

from __future__ import annotations

import functools
import itertools
import math
import numbers
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from torchrec_neuroshard.errors import ConfigError, check_number

Floats = npt.NDArray[np.float64]

COLLECTIVES = ("index_comms", "fwd_comms", "bwd_comms")
"""Phases that wait for the slowest rank."""
TIMED = ("index_comms", "fwd_compute", "fwd_comms", "bwd_comms", "bwd_compute", "cache")
"""Phases of the tables; the last one loads rows from host memory into caches."""
DENSE = (
    "lower_forward",
    "forward",
    "backward",
    "lower_backward",
    "all_reduce",
    "optimizer",
)
"""Phases of the dense layers, equal on all ranks."""
PREFETCHING = "train_prefetch_sparse_dist"
"""The pipeline that loads caches ahead of lookups."""
_BARRIERS = {*COLLECTIVES, "all_reduce"}

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
class Way:
    """A cycle through the graph: from a phase to the same phase of a later batch."""

    runs: tuple[tuple[str, ...], ...]
    """Timed phases; a run's phases follow each other on one rank."""
    dense: tuple[str, ...]
    """Dense phases on the way."""
    num_batches: int
    """Batches between its start and its end."""


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

    def adds_up(self, dense: DenseMs) -> bool:
        """Whether an iteration is the sum of all phases."""
        lower_ms = dense.lower_forward + dense.lower_backward
        is_plain = self.name in ("none", "train_base")
        return is_plain and not (dense.lookups_first and lower_ms)

    def ways(self) -> tuple[Way, ...]:
        """Return all ways that can be the longest."""
        return _ways(self)

    def path_ms(self, phases_CWS6: Floats, dense: DenseMs) -> Floats:
        """Return the time of an iteration, `C` [ms].

        Args:
            phases_CWS6: Phases of each rank in each stage [ms].
            dense: Times of the dense layers.
        """
        paths: Floats = self.way_ms(phases_CWS6, dense).max(axis=1)
        return paths

    def way_ms(self, phases_CWS6: Floats, dense: DenseMs) -> Floats:
        """Return the time of each way per batch: `C x ways` [ms]."""
        ways = self.ways()
        runs = sorted({run for way in ways for run in way.runs})
        ms = {
            run: phases_CWS6[..., [TIMED.index(p) for p in run]]
            .sum(axis=-1)
            .max(axis=1)
            .sum(axis=-1)
            for run in runs
        }
        columns = [
            (
                sum((ms[run] for run in way.runs), np.zeros(len(phases_CWS6)))
                + sum(getattr(dense, name) for name in way.dense)
            )
            / way.num_batches
            for way in ways
        ]
        return np.stack(columns, axis=1)

    def parts_ms(self, phases_WS6: Floats, dense: DenseMs) -> dict[str, float]:
        """Return what an iteration consists of: the phases of the longest way [ms].

        They add up to `path_ms`. Phases that follow each other on one rank count on the
        rank that takes longest for all of them.

        Args:
            phases_WS6: Phases of each rank in each stage [ms].
            dense: Times of the dense layers.
        """
        way = self.ways()[int(self.way_ms(phases_WS6[None], dense)[0].argmax())]
        stages_S = np.arange(phases_WS6.shape[1])
        found = dict.fromkeys((*TIMED, *DENSE), 0.0)
        for run in way.runs:
            run_WSP = phases_WS6[..., [TIMED.index(name) for name in run]]
            slowest_S = run_WSP.sum(axis=-1).argmax(axis=0)
            run_P = run_WSP[slowest_S, stages_S].sum(axis=0).tolist()
            for name, ms in zip(run, run_P, strict=True):
                found[name] += ms
        for name in way.dense:
            found[name] += getattr(dense, name)
        return {name: ms / way.num_batches for name, ms in found.items()}

    def hidden_ms(self, phases_CWS6: Floats, dense: DenseMs) -> Floats:
        """Return how much of each phase is hidden: `C x 6` [ms].

        That is the phase's time on its slowest rank, minus what an iteration would
        save without the phase.
        """
        now_C = self.path_ms(phases_CWS6, dense)
        found = np.zeros((len(phases_CWS6), len(TIMED)))
        for phase in range(len(TIMED)):
            without = phases_CWS6.copy()
            without[..., phase] = 0.0
            whole_C = phases_CWS6[..., phase].max(axis=1).sum(axis=-1)
            gain_C = now_C - self.path_ms(without, dense)
            found[:, phase] = np.maximum(whole_C - gain_C, 0.0)
        return found

    def reliefs_ms(self, phases_WS6: Floats, dense: DenseMs) -> dict[str, float]:
        """Return how long each collective may take without lengthening an iteration.

        Args:
            phases_WS6: Times of the other phases [ms].
            dense: Times of the dense layers.
        """
        found = {}
        for name in COLLECTIVES:
            without = phases_WS6[None].copy()
            without[..., TIMED.index(name)] = 0.0
            ways_ms = self.way_ms(without, dense)[0].tolist()
            path_ms = max(ways_ms)
            found[name] = min(
                (path_ms - ms) * way.num_batches
                for way, ms in zip(self.ways(), ways_ms, strict=True)
                if (name,) in way.runs
            )
        return found

    def joins_kernels(self, phases_WS6: Floats, dense: DenseMs) -> bool:
        """Whether the longest way has no collective between updates and next lookups.

        Args:
            phases_WS6: Times of a similar plan [ms], which decide the longest way.
            dense: Times of the dense layers.
        """
        ways_ms = self.way_ms(phases_WS6[None], dense)[0]
        runs = self.ways()[int(ways_ms.argmax())].runs
        return any({"fwd_compute", "bwd_compute"} <= {*run} for run in runs)


def _edges(schedule: Schedule) -> set[tuple[str, str, int]]:
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
    following: dict[str, list[tuple[str, int]]] = {}
    for before, after, lag in sorted(_edges(schedule)):
        following.setdefault(before, []).append((after, lag))
    order = (*TIMED, *DENSE)

    def walk(path: tuple[str, ...], lag: int) -> Iterator[tuple[tuple[str, ...], int]]:
        for after, more in following.get(path[-1], ()):
            if after == path[0]:
                yield path, lag + more
            elif after not in path and order.index(after) > order.index(path[0]):
                yield from walk((*path, after), lag + more)

    found: dict[tuple[frozenset[str], int], Way] = {}
    for start in order:
        for path, lag in walk((start,), 0):
            assert lag >= 1, f"{schedule.name}: {path} waits for itself"
            found.setdefault((frozenset(path), lag), _way(path, lag))
    keys = list(found)
    return tuple(
        found[key]
        for key in keys
        if not any(
            (key[0] < other[0] and key[1] >= other[1])
            or (key[0] == other[0] and key[1] > other[1])
            for other in keys
        )
    )


def _way(path: tuple[str, ...], num_batches: int) -> Way:
    """Split a cycle of phases into runs, from one collective to the next."""
    first = next((k for k, name in enumerate(path) if name in _BARRIERS), 0)
    runs: list[tuple[str, ...]] = []
    run: list[str] = []
    for name in (*path[first:], *path[:first]):
        if name in _BARRIERS:
            runs += [tuple(run), (name,) * (name in TIMED)]
            run = []
        elif name in TIMED:
            run.append(name)
    runs.append(tuple(run))
    return Way(
        runs=tuple(r for r in runs if r),
        dense=tuple(name for name in path if name in DENSE),
        num_batches=num_batches,
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
