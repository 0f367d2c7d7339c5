"""What a group's first rank tells all others, and who was not there to hear it."""

from __future__ import annotations

import contextlib
import pickle
import queue
import threading
import time
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from torchrec_neuroshard.errors import NeuroShardError, RankFailureError
from torchrec_neuroshard.planner.compat import group_timeout_seconds, is_over_gloo

__all__ = ["LostRankError", "from_first", "portable"]

T = TypeVar("T")
E = TypeVar("E", bound=BaseException)

_SHARE = 0.8
"""Of a group's time-out, what the first rank waits for others: the rest is for telling
those that are there."""


class LostRankError(RankFailureError):
    """A rank is not there, which all others have heard: nobody waits for more."""


def from_first(value: T, pg: dist.ProcessGroup, doing: str) -> T:
    """Return the first rank's value on every rank of a group; all ranks call it.

    Args:
        value: What the first rank says; of the others, anything.
        pg: The group. Over gloo, ranks that are not there are named.
        doing: What the first rank did before, for the error.

    Raises:
        LostRankError: A rank died, or was silent for as long as the group waits.
        NeuroShardError: The value cannot be sent, or not be read by a rank; on all.
    """
    if pg.size() == 1:
        return value
    root = dist.get_global_rank(pg, 0)
    sent: list[Any] = [None]
    failure: Exception | None = None
    if pg.rank() == 0:
        sent[0], failure = _attempt(pickle.dumps, value)
    told: list[str | None] = [None] * pg.size()
    try:
        missing = _missing(pg, root) if is_over_gloo(pg) else []
        if not missing:
            dist.broadcast_object_list(sent, root, group=pg)
            if pg.rank() and sent[0] is not None:
                value, failure = _attempt(pickle.loads, sent[0])
            text = failure and f"{type(failure).__name__}: {failure}"
            dist.all_gather_object(told, text, group=pg)
    except RuntimeError as error:
        raise LostRankError(
            f"rank {root}, which {doing}, or what leads to it died or fell silent: "
            f"{' '.join(str(error).split()):.300}"
        ) from error
    if missing:
        raise LostRankError(
            f"rank {missing[0]} died or fell silent while rank {root} {doing}; restart "
            "the job"
        )
    for rank, said in enumerate(told):
        if said is not None:
            verb, where = "read" if rank else "send", dist.get_global_rank(pg, rank)
            raise NeuroShardError(
                f"rank {root} {doing}, but rank {where} cannot {verb} what came of it: "
                f"{said}"
            )
    return value


def _attempt(function: Any, argument: Any) -> tuple[Any, Exception | None]:
    try:
        return function(argument), None
    except Exception as error:
        return None, error


def portable(error: E | None) -> E | NeuroShardError | RuntimeError | None:
    """Return the first rank's error in a form that survives being sent."""
    if error is None:
        return None
    try:
        copied = pickle.loads(pickle.dumps(error))
    except Exception:
        copied = None
    if type(copied) is type(error) and str(copied) == str(error):
        return error
    kind = NeuroShardError if isinstance(error, NeuroShardError) else RuntimeError
    return kind(f"planning failed on rank 0: {type(error).__name__}: {error}")


def _missing(pg: dist.ProcessGroup, root: int) -> list[int]:
    """Return a rank that is not there, on all that are."""
    verdict = torch.full((1,), -1)
    if pg.rank():
        dist.send(verdict, root, group=pg)
        dist.recv(verdict, root, group=pg)
        return [] if verdict < 0 else [int(verdict)]
    found: queue.SimpleQueue[tuple[int, bool]] = queue.SimpleQueue()

    def hear(rank: int) -> None:
        try:
            dist.recv(torch.empty_like(verdict), rank, group=pg)
            found.put((rank, True))
        except RuntimeError:
            found.put((rank, False))

    # A wait of gloo's that is not answered in time ends the whole group: these go on
    # waiting while the others are told.
    others = [dist.get_global_rank(pg, r) for r in range(1, pg.size())]
    for rank in others:
        threading.Thread(target=hear, args=(rank,), daemon=True).start()
    end = time.monotonic() + _SHARE * group_timeout_seconds(pg)
    known: dict[int, bool] = {}
    with contextlib.suppress(queue.Empty):
        while len(known) < len(others):
            rank, is_there = found.get(timeout=max(0.0, end - time.monotonic()))
            known[rank] = is_there
    missing = [r for r in others if not known.get(r)]
    if missing:
        verdict[0] = missing[0]
    for rank in others:
        if known.get(rank):
            dist.send(verdict, rank, group=pg)
    return missing
