"""Whatever one rank does otherwise, all ranks get the same plan or the same error.

Each case plans once in a group of its own; where ranks part, the group's time-out ends
it.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.types import CacheParams

from tests.builders import bag_sharders, bags, each, make_planner
from tests.distributed.ranks import ONE_NODE, TWO_NODES, Jobs, OfJob
from tests.distributed.test_first_launch import COPIES, MEASURES
from torchrec_neuroshard import FeatureProfile
from torchrec_neuroshard.testing import AnalyticCostModel

pytestmark = pytest.mark.distributed

PATIENT_SECONDS, SHORT_SECONDS = 200.0, 20.0
"""Time-outs of groups; the short one ends the wait for a rank that has left."""
PACKAGE = "torchrec_neuroshard"
RANK_1_BREAKS = f"""
import os, runpy
from {PACKAGE}.measure.clock import SetTimer
def broken(*_):
    raise OSError("injected")
if os.environ["RANK"] == "1":
    SetTimer.measure = broken
runpy.run_module("{PACKAGE}.bundles.measure_job", run_name="__main__")
"""
"""What measures, and breaks on a rank when all others have begun."""


class Broken(EmbeddingEnumerator):
    """Must not be called."""

    def enumerate(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("listing")


class Interrupts(BaseException):
    """Ends a rank's job but not its process."""


@dataclass(frozen=True)
class Rank:
    """A rank of a case's group."""

    pg: dist.ProcessGroup
    number: int
    folder: Path
    """The case's folder, shared by all ranks."""
    patch: pytest.MonkeyPatch

    def plan(self, planned_before: bool = False, **arguments: Any) -> Any:
        planner = make_planner(self.pg.size(), **arguments)
        if planned_before:
            planner.plan(bags(), bag_sharders())
        found = planner.collective_plan(bags(), bag_sharders(), self.pg)
        assert found == planner.last_plan
        return found, planner.last_result

    def run(self, program: str) -> None:
        """Run a program in place of the measurement."""
        self.patch.setattr(f"{PACKAGE}.bundles.measure_job.PROGRAM", ("-c", program))


def other_arguments(at: Rank) -> Any:
    others = {
        "batch_size": 7,
        "cost_model": AnalyticCostModel(launch_ms=9.0),
        "constraints": each(1, "column_wise"),
        "profiles": {"nobody's": FeatureProfile(batch_size=1, num_lookups=1.0)},
        "enumerator": Broken(Topology(8, "cpu"), 5),
        "topology": Topology(8, "cpu"),
    }
    if at.number:  # what it would be warned of must not keep it from the others
        warnings.filterwarnings("error", message="the topology has 8 ranks")
    return at.plan(**(others if at.number else {}))


def first_planned_alone(at: Rank) -> Any:
    at.run(COPIES)
    return at.plan(planned_before=at.number == 0, **MEASURES)


def others_remember(at: Rank) -> Any:
    """Nodes have caches of their own, and the first one's is empty."""
    at.run(COPIES)
    at.plan(**MEASURES)
    if at.number == 0:
        at.patch.setenv("NEUROSHARD_CACHE", str(at.folder / "empty"))
    return at.plan(**MEASURES)


def one_breaks_midway(at: Rank) -> Any:
    at.run(RANK_1_BREAKS)
    return at.plan(**MEASURES)


def leaves_a_first_launch(at: Rank) -> Any:
    """A rank is interrupted while it measures, and lives on."""

    def leave(*_: Any, **__: Any) -> Any:
        raise Interrupts

    at.run("pass")
    if at.number == 1:
        at.patch.setattr(f"{PACKAGE}.bundles.measure_job.take_part", leave)
    return at.plan(**MEASURES)


class LocalError(Exception):
    """Cannot be sent to other ranks."""

    def __reduce__(self) -> Any:
        raise TypeError("cannot pickle")


def refuse_elsewhere() -> None:
    if dist.get_rank():
        raise ImportError("no such part here")


class OfFirst:
    """Can be read on rank 0 alone."""

    def __reduce__(self) -> Any:
        return refuse_elsewhere, ()


def odd_offer(at: Rank) -> Any:
    """The first rank sends a request to measure that the others cannot read."""
    at.patch.setattr(
        f"{PACKAGE}.planner.first_launch.meeting_place",
        lambda _: contextlib.nullcontext(OfFirst()),
    )
    return at.plan(**MEASURES)


def odd_plan(at: Rank, odd: Any) -> Any:
    """Plan with a callback that raises an error or puts an odd value into the plan."""

    def callback(options: Any) -> Any:
        if isinstance(odd, BaseException):
            raise odd
        options[0].cache_params = CacheParams(stats=odd)
        return options

    return at.plan(callbacks=[callback])


PLAN = "plan"
LEFT = "RankFailureError|a rank died or timed out"


@dataclass(frozen=True)
class Case:
    """What ranks do, and what must come of it."""

    act: Callable[[Rank], Any]
    expected: str = PLAN
    """Kind of the error on all ranks, and what it says."""
    warned: tuple[str, str] = ("", "")
    """Text of the warning on the first rank, and on the others."""
    seconds: float = PATIENT_SECONDS
    """Time-out of the group."""
    num_nodes: int = ONE_NODE


UNMEASURED = "measuring at the first launch failed (", "measuring failed on rank"
CASES = {
    "other arguments": Case(other_arguments),
    "first planned alone": Case(first_planned_alone),
    "others remember": Case(others_remember),
    "outlasts the group": Case(
        lambda at: at.plan(**MEASURES),
        warned=("the process group's timeout of 60 s must also cover planning", ""),
        seconds=60.0,
    ),
    "interrupt": Case(
        lambda at: odd_plan(at, KeyboardInterrupt()), "KeyboardInterrupt|"
    ),
    "unknown error": Case(
        lambda at: odd_plan(at, LocalError("local trouble")), "|local trouble"
    ),
    "cannot be sent": Case(
        lambda at: odd_plan(at, lambda: None), "NeuroShardError|rank 0 cannot send"
    ),
    "cannot be read": Case(
        lambda at: odd_plan(at, OfFirst()), "NeuroShardError|rank 1 cannot read"
    ),
    "cannot read what to measure": Case(
        odd_offer, "NeuroShardError|rank 1 cannot read", seconds=SHORT_SECONDS
    ),
    "breaks midway": Case(one_breaks_midway, warned=UNMEASURED),
    "nothing fits": Case(
        lambda at: at.plan(topology_arguments={"ddr_cap": 1000, "hbm_cap": 1000}),
        "PlannerError|",
    ),
    "leaves a first launch": Case(
        leaves_a_first_launch,
        LEFT,
        warned=(UNMEASURED[0], ""),
        seconds=SHORT_SECONDS,
        num_nodes=TWO_NODES,
    ),
}
DAILY = (
    "other arguments",
    "first planned alone",
    "cannot be read",
    "cannot read what to measure",
    "nothing fits",
    "unknown error",
)
"""The jobs that are not nightly."""


def in_group(case: Case, folder: Path) -> dict[str, Any]:
    pg: Any = dist.new_group(timeout=timedelta(seconds=case.seconds), backend="gloo")
    folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {"error": None, "plan": None}
    with (
        pytest.MonkeyPatch.context() as patch,
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        patch.setenv("NEUROSHARD_CACHE", str(folder / "cache"))
        grace = 0.0 if case.seconds == SHORT_SECONDS else 30.0
        patch.setattr(f"{PACKAGE}.planner.first_launch.GRACE_S", grace)
        try:
            plan, result = case.act(Rank(pg, pg.rank(), folder, patch))
            found["plan"] = repr((plan.plan, result))
        except BaseException as error:
            kinds = " ".join(kind.__name__ for kind in type(error).mro())
            found["error"] = f"{kinds}|{error}"
    texts = [str(w.message) for w in caught]
    found["warned"] = "\n".join(t for t in texts if "measuring" in t)
    dist.barrier()
    return found


def rank_jobs(num_nodes: int, rank: int, folder: Path) -> Jobs:
    return {
        name: functools.partial(in_group, case, folder / f"agree{number}")
        for number, (name, case) in enumerate(CASES.items())
        if case.num_nodes == num_nodes
    }


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.nightly] * (n not in DAILY)) for n in CASES],
)
def test_all_ranks_get_one_plan_or_one_error(results: OfJob, name: str) -> None:
    case, found = CASES[name], results(name)
    kind, _, text = case.expected.partition("|")
    staying = found
    if case.expected == LEFT:
        assert found[1]["error"].startswith("Interrupts ")
        staying = [r for n, r in enumerate(found) if n != 1]
    if case.expected == PLAN:
        assert [r["error"] for r in found] == [None] * len(found)
        assert len({r["plan"] for r in found}) == 1
    else:
        for rank in staying:
            assert rank["plan"] is None
            assert kind in rank["error"] and text in rank["error"]
    for n, rank in enumerate(found):
        word = case.warned[min(n, 1)]
        assert bool(word) == bool(rank["warned"]) and word in rank["warned"], rank
