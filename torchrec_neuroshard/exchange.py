"""What the ranks of a process group tell each other."""

from __future__ import annotations

import contextlib
import math
import pickle
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from torchrec_neuroshard.errors import NeuroShardError, RankFailureError

T = TypeVar("T")


class ExchangeError(RankFailureError):
    """A rank is gone or cannot read the first rank's message.

    All remaining ranks raise it, so that no rank waits for another.
    """


def first_decides(work: Callable[[], T], pg: dist.ProcessGroup, doing: str) -> T:
    """Run `work` on a group's first rank and return its result on every rank.

    Args:
        work: What the first rank does; other ranks do not call it.
        pg: The group; all its ranks call this function.
        doing: What the first rank does, in the past tense, for error messages.

    Raises:
        BaseException: The error of `work`, on every rank. If it cannot be sent, other
            ranks raise one of the same kind that quotes it.
        ExchangeError: See `from_first`.
    """
    outcome: tuple[T | None, BaseException | None] = None, None
    own: BaseException | None = None
    if pg.rank() == 0:
        try:
            outcome = work(), None
        except ExchangeError:  # all ranks have raised it
            raise
        except BaseException as error:
            own, outcome = error, (None, _portable(error))
    value, told = from_first(outcome, pg, doing)
    if told is not None:
        raise own or told
    return cast(T, value)


def from_first(value: T, pg: dist.ProcessGroup, doing: str) -> T:
    """Return the first rank's value on every rank of a group; all ranks call it.

    Args:
        value: The first rank's value; ignored on other ranks.
        pg: The group.
        doing: What the first rank did before, for error messages.

    Raises:
        ExchangeError: A rank died or did not answer before the group's timeout. Or the
            value cannot be sent, or a rank cannot read it. All ranks raise it.
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
        text = None if failure is None else f"{type(failure).__name__}: {failure}"
        dist.all_gather_object(told, text, group=pg)
    except RuntimeError as error:
        raise ExchangeError(
            f"a rank died or timed out after rank {root} {doing}, maybe rank {root} "
            f"itself; restart the job: {' '.join(str(error).split()):.300}"
        ) from error
    for rank, said in enumerate(told):
        if said is not None:
            verb, where = "read" if rank else "send", dist.get_global_rank(pg, rank)
            raise ExchangeError(
                f"rank {root} {doing}, but rank {where} cannot {verb} the result: "
                f"{said}"
            )
    return value


def from_all(value: T, pg: dist.ProcessGroup, doing: str) -> list[T]:
    """Return every rank's value on every rank of a group; all ranks call it.

    Args:
        value: This rank's value.
        pg: The group.
        doing: What the ranks do, for the error message.

    Raises:
        ExchangeError: A rank died or did not answer before the group's timeout.
    """
    found: list[Any] = [value] * pg.size()
    try:
        if pg.size() > 1:
            dist.all_gather_object(found, value, group=pg)
    except RuntimeError as error:
        raise ExchangeError(
            f"a rank died or timed out while ranks {doing}; restart the job: "
            f"{' '.join(str(error).split()):.300}"
        ) from error
    return found


def _attempt(function: Any, argument: Any) -> tuple[Any, Exception | None]:
    try:
        return function(argument), None
    except Exception as error:
        return None, error


def _portable(error: BaseException) -> BaseException:
    """Return the first rank's error in a form that can be sent to other ranks."""
    with contextlib.suppress(Exception):
        copied = pickle.loads(pickle.dumps(error))
        if type(copied) is type(error) and str(copied) == str(error):
            return error
    kind = NeuroShardError if isinstance(error, NeuroShardError) else RuntimeError
    return kind(f"planning failed on rank 0: {type(error).__name__}: {error}")


def is_over_gloo(pg: dist.ProcessGroup) -> bool:
    """Whether a group communicates over gloo, whatever its backend's name."""
    cpu = torch.device("cpu")
    return cpu in pg._device_types and pg._get_backend(cpu).name() == "gloo"


def group_timeout_seconds(pg: dist.ProcessGroup) -> float:
    """Return the shortest timeout of a group's backends; infinite if unknown."""
    known = [math.inf]
    for device in pg._device_types:
        with contextlib.suppress(RuntimeError, AttributeError):
            timeout = pg._get_backend(device).options._timeout
            known.append(float(timeout.total_seconds()))
    return min(known)
