"""What a group's first rank tells all others."""

from __future__ import annotations

import pickle
from typing import Any, TypeVar

import torch.distributed as dist

from torchrec_neuroshard.errors import NeuroShardError, RankFailureError

__all__ = ["ExchangeError", "from_first", "portable"]

T = TypeVar("T")
E = TypeVar("E", bound=BaseException)


class ExchangeError(RankFailureError):
    """A rank is not there, or cannot read what the first one says.

    Every rank that is there raises it, so that none waits for another.
    """


def from_first(value: T, pg: dist.ProcessGroup, doing: str) -> T:
    """Return the first rank's value on every rank of a group; all ranks call it.

    Args:
        value: What the first rank says; of the others, anything.
        pg: The group.
        doing: What the first rank did before, for the error.

    Raises:
        ExchangeError: A rank died, or was silent for as long as the group waits. Or the
            value cannot be sent, or not be read by a rank. All ranks raise it.
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
        dist.broadcast_object_list(sent, root, group=pg)
        if pg.rank() and sent[0] is not None:
            value, failure = _attempt(pickle.loads, sent[0])
        text = failure and f"{type(failure).__name__}: {failure}"
        dist.all_gather_object(told, text, group=pg)
    except RuntimeError as error:
        raise ExchangeError(
            f"a rank died or fell silent, rank {root}, which {doing}, or another; "
            f"restart the job: {' '.join(str(error).split()):.300}"
        ) from error
    for rank, said in enumerate(told):
        if said is not None:
            verb, where = "read" if rank else "send", dist.get_global_rank(pg, rank)
            raise ExchangeError(
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
