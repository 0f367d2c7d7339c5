"""Parts of others that never return, or fail: there is a plan, or a reason."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.partitioners import GreedyPerfPartitioner
from torchrec.distributed.planner.perf_models import NoopPerfModel
from torchrec.distributed.planner.proposers import (
    DynamicProgrammingProposer,
    GreedyProposer,
)
from torchrec.distributed.planner.storage_reservations import (
    FixedPercentageStorageReservation,
)
from torchrec.distributed.planner.types import PlannerError, Stats

from tests.builders import QUICK, analytic, bag_sharders, gpus, make_ebc, make_planner
from torchrec_neuroshard import cut_off
from torchrec_neuroshard.cut_off import TimeIsUpError, call_within
from torchrec_neuroshard.planner import (
    NeuroShardPlanLoader,
    NeuroShardPlanner,
    NeuroShardProposer,
)
from torchrec_neuroshard.planner.parts import guards, partitioners, torchrec_plan
from torchrec_neuroshard.search import Searcher

SECONDS = 0.4


@pytest.fixture(autouse=True)
def little_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards, "LEAST_CALL_SECONDS", 0.2)
    for module in (partitioners, torchrec_plan):
        monkeypatch.setattr(module, "GRACE_SECONDS", 0.2)
    monkeypatch.setattr(torchrec_plan, "LEAST_STOCK_SECONDS", 0.2)
    monkeypatch.setattr(cut_off, "STOP_SECONDS", 0.2)


def loop_for_ever(*_: Any, **__: Any) -> Any:
    """In Python: it can be stopped."""
    while True:
        sum(range(100))


def sleep_for_ever(*_: Any, **__: Any) -> Any:
    """In C: it can only be left behind."""
    threading.Event().wait()


NEVER = pytest.mark.parametrize(
    "never",
    [loop_for_ever, pytest.param(sleep_for_ever, marks=pytest.mark.one_release)],
)


def plan(**arguments: Any) -> NeuroShardPlanner:
    planner = make_planner(2, "cuda", timeout_seconds=SECONDS, **arguments)
    planner.plan(make_ebc([(1000, 16)] * 3), bag_sharders())
    return planner


def notes_of(planner: NeuroShardPlanner) -> str:
    assert planner.last_result is not None
    return "\n".join(planner.last_result.warnings)


def with_method(base: type, name: str, method: Callable[..., Any]) -> Any:
    """A subclass of which one method is another."""
    return type("Stuck", (base,), {name: lambda self, *a, **k: method(*a, **k)})


@NEVER
@pytest.mark.parametrize("method", ["load", "propose", "feedback"])
def test_proposer_that_never_returns(method: str, never: Any) -> None:
    """Others propose all the same; alone, it is the reason why there is no plan."""
    stuck = with_method(GreedyProposer, method, never)()
    topology = gpus(2)
    ours = NeuroShardProposer(topology, **analytic())
    planner = plan(topology=topology, proposer=[ours, stuck])
    assert "proposer Stuck did not return" in notes_of(planner)
    if method != "feedback":
        with pytest.raises(PlannerError, match="proposer Stuck did not return within"):
            plan(proposer=stuck)


@NEVER
def test_partitioner_that_never_returns(never: Any) -> None:
    stuck = with_method(GreedyPerfPartitioner, "partition", never)()
    with pytest.raises(PlannerError, match="partitioner Stuck did not return within"):
        plan(partitioner=stuck)


@NEVER
def test_performance_model_that_never_returns(never: Any) -> None:
    stuck = with_method(NoopPerfModel, "rate", never)(gpus(2))
    with pytest.raises(PlannerError, match="performance model Stuck did not return"):
        plan(performance_model=stuck)


@NEVER
@pytest.mark.parametrize(
    ("argument", "base", "method"),
    [
        ("storage_reservation", FixedPercentageStorageReservation, "reserve"),
        ("enumerator", EmbeddingEnumerator, "enumerate"),
        ("plan_loader", NeuroShardPlanLoader, "load"),
        ("plan_loader", NeuroShardPlanLoader, "plan_context_hash"),
    ],
)
def test_parts_that_no_plan_is_without(
    argument: str, base: type, method: str, never: Any
) -> None:
    made = {
        "storage_reservation": (0.1,),
        "enumerator": (gpus(2), 64),
        "plan_loader": ("plan.json", make_planner(2, "cuda")),
    }
    stuck = with_method(base, method, never)(*made[argument])
    name = argument.replace("_", " ")
    with pytest.raises(PlannerError, match=f"{name} Stuck did not return within 0"):
        plan(**{argument: stuck})
    assert method not in vars(stuck), "it is as it was"


@NEVER
def test_callback_that_never_returns(never: Any) -> None:
    """What it would have made of the plan is not known: there is none."""
    with pytest.raises(PlannerError, match=r"callback \w+_for_ever did not return"):
        plan(callbacks=[never])


@NEVER
def test_stats_that_never_return(never: Any) -> None:
    planner = plan(stats=with_method(Stats, "log", never)())
    assert "statistics Stuck did not return" in notes_of(planner)


@NEVER
def test_search_that_never_returns(never: Any) -> None:
    class Stuck(Searcher):
        time_budget_seconds = float(SECONDS)

        def search(self, *arguments: Any) -> Any:
            return never()

        def with_budget(self, seconds: float, effort: float = 1.0) -> Searcher:
            return self

    planner = plan(search=Stuck())
    assert planner.last_result is not None
    assert "search 'unnamed' did not return" in str(planner.last_result.fallback)


def test_torchrecs_planner_that_never_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a candidate it is left out."""
    monkeypatch.setattr(GreedyPerfPartitioner, "partition", loop_for_ever)
    planner = plan(consider_stock=True)
    assert "TorchRec's own plan was no candidate" in notes_of(planner)


def test_proposer_of_torchrecs_that_fails() -> None:
    """Of CPUs it divides by their device memory, which is 0."""
    arguments: dict[str, Any] = {
        "proposer": DynamicProgrammingProposer(),
        "topology_arguments": {"ddr_cap": 1000},
    }
    planner = make_planner(2, "cpu", **arguments)
    with pytest.raises(PlannerError, match=r"'t0'.*KiB"):
        planner.plan(make_ebc([(1000, 16)] * 3), bag_sharders())


def test_a_part_of_the_callers_that_fails_is_heard() -> None:
    def fail(*_: Any) -> Any:
        raise KeyError("mine")

    stuck = with_method(GreedyProposer, "propose", fail)()
    with pytest.raises(KeyError, match="mine"):
        plan(proposer=stuck)


def test_calls_see_what_the_caller_works_with() -> None:
    with torch.no_grad():
        assert not call_within(60.0, torch.is_grad_enabled)
    assert call_within(60.0, torch.is_grad_enabled)
    assert call_within(60.0, lambda a, b: (a, b), 1, b=2) == (1, 2)


def test_a_call_is_stopped_in_time() -> None:
    seen: list[int] = []

    def count() -> None:
        while True:
            seen.append(0)
            time.sleep(0.001)

    before = threading.active_count()
    with pytest.raises(TimeIsUpError):
        call_within(0.1, count)
    assert threading.active_count() == before
    number = len(seen)
    time.sleep(0.05)
    assert len(seen) == number > 0
    assert QUICK.time_budget_seconds > SECONDS  # the timeout is what ended all these
