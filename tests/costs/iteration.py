"""An iteration step by step, in the order in which TorchRec queues its work.

`steps` lists one rank's steps. `iteration_ms` runs them on all ranks with given times:
the reference for formulas. `tests/paper_gpu/test_two_ranks.py` compares it with what
TorchRec launches.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from torchrec_neuroshard.costs.schedules import DENSE

Label = tuple[str, int]
"""A phase and its stage; dense phases are of stage 0."""
Modules = Sequence[Sequence[str]]
"""Sharding types of each module, in TorchRec's order."""
Step = tuple[Literal["run", "send", "send early", "await", "meet"], Label]
"""What happens with a phase. "run": the rank's stream of kernels runs it. "send": a
collective waits for this stream, "send early": it does not. "await": this stream waits
for the collective. "meet": the ranks of a node do all of this at once."""

_PERIOD = 6
"""Iterations after which every stream is where it was."""
_NO_EXCHANGE, _IN_NODE = "data_parallel", "table_row_wise"


def steps(modules: Modules, *, pipelined: bool, lookups_first: bool) -> Iterator[Step]:
    """Yield the steps of a rank.

    Args:
        modules: Modules whose outputs are used after all of them were called. Tables
            that are sharded `table_row_wise` are on one node.
        pipelined: Whether ids of the next batch are sent ahead, by
            TrainPipelineSparseDist.
        lookups_first: Whether the model calls its modules before its lower layers.
    """
    stages = list(enumerate(itertools.chain.from_iterable(modules)))
    with_ids = [s for s, kind in stages if kind != _NO_EXCHANGE]
    sent = [s for s, kind in stages if kind not in (_NO_EXCHANGE, _IN_NODE)]
    if not lookups_first:
        yield "run", ("lower_forward", 0)
    numbers = itertools.count()
    for types in modules:
        own = [next(numbers) for _ in types]
        ids = [("index_comms", s) for s in own if s in with_ids]
        yield from [("send", label) for label in ids if not pipelined]
        yield from [("await", label) for label in ids]
        for s in own:
            yield "run", ("fwd_compute", s)
            if s in with_ids:
                yield "send" if s in sent else "meet", ("fwd_comms", s)
    if lookups_first:
        yield "run", ("lower_forward", 0)
    for s in sent:
        yield "await", ("fwd_comms", s)
        yield "run", ("fwd_order", s)
    yield "run", ("forward", 0)
    yield from [("send early", ("index_comms", s)) for s in with_ids if pipelined]
    yield "run", ("backward", 0)
    for s in reversed(sent):
        yield "run", ("bwd_order", s)
        yield "send", ("bwd_comms", s)
    lower: list[Step] = [("run", ("lower_backward", 0)), ("send", ("all_reduce", 0))]
    yield from lower if lookups_first else ()
    for s, kind in reversed(stages):
        if kind != _NO_EXCHANGE:
            yield "await" if s in sent else "meet", ("bwd_comms", s)
        yield "run", ("bwd_compute", s)
        if kind == _NO_EXCHANGE:
            yield "send", ("bwd_comms", s)
    yield from () if lookups_first else lower
    yield from [("await", ("bwd_comms", s)) for s, k in stages if k == _NO_EXCHANGE]
    yield "await", ("all_reduce", 0)
    yield "run", ("optimizer", 0)


def iteration_ms(queued: Sequence[Step], ms: Sequence[Mapping[Label, float]]) -> float:
    """Return how long an iteration takes in the steady state.

    Args:
        queued: Steps of a rank.
        ms: Each rank's times [ms]; collectives take equally long on all.
    """
    now, queue_ms = [0.0 for _ in ms], 0.0
    ended: dict[Label, float] = {}
    ends: list[float] = []
    for _ in range(3 * _PERIOD):
        for what, label in queued:
            if what == "run":
                now = [t + own[label] for t, own in zip(now, ms, strict=True)]
            elif what == "await":
                now = [max(t, ended.get(label, 0.0)) for t in now]
            elif what == "meet":
                now = [max(now) + ms[0][label] for _ in now]
            else:
                queue_ms = max(queue_ms, max(now) if what == "send" else 0.0)
                ended[label] = queue_ms = queue_ms + ms[0][label]
        ends.append(max(now))
    return (ends[-1] - ends[-1 - _PERIOD]) / _PERIOD


def some_ms(
    rng: random.Random, modules: Modules, num_ranks: int = 2
) -> list[dict[Label, float]]:
    """Return random times of each rank's phases; half of them are 0."""

    def draw(*labels: Label) -> dict[Label, float]:
        return {label: rng.choice([0.0, rng.expovariate(0.3)]) for label in labels}

    stages = list(enumerate(itertools.chain.from_iterable(modules)))
    common = draw(*((phase, 0) for phase in DENSE))
    for s, kind in stages:
        common |= draw(("bwd_comms", s))
        if kind != _NO_EXCHANGE:
            common |= draw(("index_comms", s), ("fwd_comms", s))
        orders = draw(("fwd_order", s), ("bwd_order", s))
        common |= orders if kind == "column_wise" else dict.fromkeys(orders, 0.0)
    own = [(p, s) for p in ("fwd_compute", "bwd_compute", "cache") for s, _ in stages]
    return [common | draw(*own) for _ in range(num_ranks)]
