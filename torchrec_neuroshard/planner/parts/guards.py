"""Parts of TorchRec's loop that others wrote, called so that planning goes on.

A part of this package keeps to its budget by itself and is called as it is.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import FunctionType, MethodType
from typing import Any, TypeVar

from torchrec.distributed.planner.types import (
    Enumerator,
    Partitioner,
    PerfModel,
    PlannerError,
    PlannerErrorType,
    Proposer,
    ShardingOption,
    Stats,
    Topology,
)

from torchrec_neuroshard.cut_off import TimeIsUpError, call_within
from torchrec_neuroshard.planner.parts.shard_estimators import OutOfTimeError

__all__ = ["GRACE_SECONDS", "Guard", "is_own"]

GRACE_SECONDS = 2.0
"""What foreign parts may take beyond the budget of the search."""
LEAST_CALL_SECONDS = 1.0
"""What any call may take, however little time is left."""

Result = TypeVar("Result")
Callback = Callable[[list[ShardingOption]], list[ShardingOption]]


class Guard:
    """Calls the foreign parts of one planning run.

    Attributes:
        cut: What did not return in time, the first of it; None: everything did.
        notes: What was left out of the run, and why.

    Args:
        seconds: What they may take together, from the first call.
    """

    def __init__(self, seconds: float) -> None:
        self.cut: str | None = None
        self.notes: list[str] = []
        self._seconds = seconds
        self._end: float | None = None

    @property
    def is_over(self) -> bool:
        """Whether there is no time left to propose more."""
        return self._end is not None and time.monotonic() > self._end

    def call(self, what: str, function: Callable[..., Result], **kwargs: Any) -> Result:
        """Call a part.

        Args:
            what: It does: "partitioner Mine".
            function: Of the part.
            kwargs: For it.

        Raises:
            OutOfTimeError: It does not return.
        """
        now = time.monotonic()
        if self._end is None:
            self._end = now + self._seconds
        return self._call_within(self._end - now, what, function, **kwargs)

    @contextlib.contextmanager
    def methods(self, what: str, part: Any, *names: str) -> Iterator[None]:
        """Limit methods of a part whose attributes TorchRec reads, for a while.

        Without it there is no plan: each call gets all the time.

        Args:
            what: The part is: "enumerator". One of this package, or None, is left be.
            part: Whose methods.
            names: Of the methods.
        """
        own = () if part is None or is_own(part) else names
        before = {name: vars(part)[name] for name in own if name in vars(part)}
        what = f"{what} {type(part).__name__}"
        for name in own:
            method = getattr(part, name)
            setattr(part, name, partial(self._call_within, self._seconds, what, method))
        try:
            yield
        finally:
            for name in own:
                delattr(part, name)
            for name, method in before.items():
                setattr(part, name, method)

    def _call_within(
        self,
        seconds: float,
        what: str,
        function: Callable[..., Result],
        *args: Any,
        **kwargs: Any,
    ) -> Result:
        seconds = max(seconds, LEAST_CALL_SECONDS)
        try:
            return call_within(seconds, function, *args, **kwargs)
        except TimeIsUpError:
            reason = f"the {what} did not return within {seconds:.1f} s"
            self.cut = self.cut or reason
            raise OutOfTimeError(reason) from None

    def proposers(self, given: Sequence[Proposer]) -> list[Proposer]:
        """Return proposers of which those of others are limited."""
        return [p if is_own(p) else _LimitedProposer(p, self) for p in given]

    def partitioner(self, given: Partitioner) -> Partitioner:
        """Return the partitioner, limited unless it is this package's."""
        return given if is_own(given) else _LimitedPartitioner(given, self)

    def perf_model(self, given: PerfModel) -> PerfModel:
        """Return the performance model, limited unless it is this package's."""
        return given if is_own(given) else _LimitedPerfModel(given, self)

    def callbacks(self, given: Sequence[Callback]) -> list[Callback]:
        """Return callbacks that end; a plan is not returned without their say."""
        return [partial(self._call_back, callback) for callback in given]

    def stats(self, given: Sequence[Stats], *, of_failures: bool = True) -> list[Stats]:
        """Return statistics that end; a plan is returned without them.

        Args:
            given: The statistics.
            of_failures: Whether they tell of a run without a plan, too.
        """
        return [_LimitedStats(s, self, of_failures) for s in given]

    def _call_back(
        self, callback: Callback, options: list[ShardingOption]
    ) -> list[ShardingOption]:
        named = isinstance(callback, FunctionType | MethodType)
        name = (callback if named else type(callback)).__qualname__
        return self.call(f"callback {name}", partial(callback, options))


def is_own(part: Any) -> bool:
    """Whether a class of this package made a part; a subclass of others' is theirs."""
    return type(part).__module__.partition(".")[0] == __name__.partition(".")[0]


def _is_torchrecs(part: Any) -> bool:
    return type(part).__module__.partition(".")[0] == "torchrec"


class _LimitedProposer(Proposer):
    """Proposes what another does, for as long as there is time.

    One of TorchRec's that fails proposes nothing more.
    """

    def __init__(self, inner: Proposer, guard: Guard) -> None:
        self._inner, self._guard, self._is_over = inner, guard, False

    def load(
        self, search_space: list[ShardingOption], enumerator: Enumerator | None = None
    ) -> None:
        self._is_over = False
        self._call("load", search_space=search_space, enumerator=enumerator)

    def propose(self) -> list[ShardingOption] | None:
        if self._is_over or self._guard.is_over:
            return None
        found: list[ShardingOption] | None = self._call("propose")
        return found

    def feedback(
        self,
        partitionable: bool,
        plan: list[ShardingOption] | None = None,
        perf_rating: float | None = None,
        storage_constraint: Topology | None = None,
    ) -> None:
        if not self._is_over:
            self._call(
                "feedback",
                partitionable=partitionable,
                plan=plan,
                perf_rating=perf_rating,
                storage_constraint=storage_constraint,
            )

    def _call(self, method: str, **kwargs: Any) -> Any:
        name = type(self._inner).__name__
        function = getattr(self._inner, method)
        try:
            return self._guard.call(f"proposer {name}", function, **kwargs)
        except OutOfTimeError as error:
            note = str(error)
        except Exception as error:
            if not _is_torchrecs(self._inner):
                raise
            kind = type(error).__name__
            note = f"the proposer {name} failed in {method}: {kind}: {error}"
        self._is_over = True
        self._guard.notes.append(f"{note}. It proposes nothing more")
        return None


class _LimitedPartitioner(Partitioner):
    """Partitions as another does; it is not asked again if it does not return."""

    def __init__(self, inner: Partitioner, guard: Guard) -> None:
        self._inner, self._guard = inner, guard
        self._error: OutOfTimeError | None = None

    def partition(
        self, proposal: list[ShardingOption], storage_constraint: Topology
    ) -> list[ShardingOption]:
        name = type(self._inner).__name__
        if self._error is not None:
            raise OutOfTimeError(str(self._error))
        try:
            return self._guard.call(
                f"partitioner {name}",
                self._inner.partition,
                proposal=proposal,
                storage_constraint=storage_constraint,
            )
        except OutOfTimeError as error:
            self._error = error
            raise
        except PlannerError:
            raise
        except Exception as error:
            if not _is_torchrecs(self._inner):
                raise
            raise PlannerError(
                error_type=PlannerErrorType.PARTITION,
                message=f"the partitioner {name} failed: {type(error).__name__}: "
                f"{error}",
            ) from error


class _LimitedPerfModel(PerfModel):
    """Rates as another does; what it does not rate counts as no plan."""

    def __init__(self, inner: PerfModel, guard: Guard) -> None:
        self._inner, self._guard = inner, guard
        self._error: OutOfTimeError | None = None

    def rate(self, plan: list[ShardingOption]) -> float:
        if self._error is not None:
            raise OutOfTimeError(str(self._error))
        name = type(self._inner).__name__
        try:
            rating: float = self._guard.call(
                f"performance model {name}", self._inner.rate, plan=plan
            )
            return rating
        except OutOfTimeError as error:
            self._error = error
            raise


class _LimitedStats(Stats):
    """Logs as another does, if that ends."""

    def __init__(self, inner: Stats, guard: Guard, of_failures: bool) -> None:
        self._inner, self._guard, self._of_failures = inner, guard, of_failures

    def log(self, **kwargs: Any) -> None:
        if not (self._of_failures or kwargs["sharding_plan"].plan):
            return
        name = type(self._inner).__name__
        try:
            self._guard.call(f"statistics {name}", self._inner.log, **kwargs)
        except OutOfTimeError as error:
            self._guard.notes.append(str(error))
