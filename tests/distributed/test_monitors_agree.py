"""Monitors, replanning and moves: what one rank does otherwise, all ranks hear of.

These talk over all ranks, so that a rank that waits in vain ends the whole run.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from tests.distributed.ranks import ONE_NODE, TWO_NODES, Jobs, Results
from tests.distributed.test_monitor import EAGER, shard
from torchrec_neuroshard.monitor.assessment import Offer
from torchrec_neuroshard.planner.plans.replan import ReplanResult, apply_moves

pytestmark = pytest.mark.distributed

PACKAGE = "torchrec_neuroshard"


def watched(rank: int, folder: Path) -> dict[str, str]:
    """What one rank does otherwise, as each rank sees it."""
    from torchrec_neuroshard import PlanMonitor

    sharded, planner = shard()
    monitor_module = f"{PACKAGE}.monitor.plan_monitor"
    found: dict[str, str] = {}

    def broken(*_: Any, **__: Any) -> Any:
        raise OSError("injected")

    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    def told(name: str, act: Callable[[], Any]) -> None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                found[name] = str(act())
            except BaseException as error:
                found[name] = f"{type(error).__name__}: {error}"
        found[name] += "".join(str(w.message) for w in caught)
        dist.barrier()

    settings = {**EAGER, **({"every": 1} if rank == 1 else {})}
    told("settings", lambda: PlanMonitor(sharded, planner, **settings))
    for name in ("fill_ms_per_byte", "PhaseTimer"):
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                patch.setattr(f"{monitor_module}.{name}", broken)
            told(name, lambda: PlanMonitor(sharded, planner, **EAGER).is_on)
    monitor = PlanMonitor(sharded, planner, **EAGER)
    told("budget", lambda: monitor.replan(budget_bytes=-rank))
    look = f"{PACKAGE}.monitor.assessment.Assessor.look"
    with mock.patch(look, interrupted):
        told("interrupt", monitor.replan)
    monitor.close()
    file = folder / "a-file"
    file.touch()
    monitor = PlanMonitor(sharded, planner, plan_file=file / "plan.json", **EAGER)
    late: Any = SimpleNamespace(executable=False, plan=sharded.plan)
    offer = Offer(result=late, saved_ms=1.0, iteration_ms=2.0, move_ms=0, search_ms=0)
    with mock.patch(look, lambda *_, **__: offer):
        told("plan file", lambda: getattr(monitor.replan(), "plan_file", "nothing"))
    monitor.close()
    tables = {"sparse.ebc": sharded.plan.plan["sparse.ebc"]}
    result = mock.Mock(
        spec=ReplanResult, changed=tables, replaced=tables, executable=True
    )
    if rank == 1:
        sharded.plan.plan.clear()
    told("plan", lambda: apply_moves(sharded, result))
    return found


WATCHED = {
    "settings": "ConfigError: timed must be at least 1 and every at least",
    "fill_ms_per_byte": "FalsePlanMonitor is off, training goes on: "
    "NeuroShardError: rank 1: OSError: injected",
    "PhaseTimer": "ConfigError: OSError: injected",
    "budget": "ConfigError: budget_bytes must be at least 0, got -1",
    "interrupt": "KeyboardInterrupt: ",
    "plan file": "None",
    "plan": "ConfigError: table 'sparse.ebc.t0' is no longer where replan saw it",
}


def rank_jobs(num_nodes: int, rank: int, folder: Path) -> Jobs:
    return {"watched": functools.partial(watched, rank, folder)}


@pytest.mark.parametrize("num_nodes", [ONE_NODE, TWO_NODES])
@pytest.mark.parametrize("name", WATCHED)
def test_monitors_and_moves_agree(ranks: Results, name: str, num_nodes: int) -> None:
    for found in ranks(__name__, num_nodes, "watched"):
        assert found[name].startswith(WATCHED[name])
