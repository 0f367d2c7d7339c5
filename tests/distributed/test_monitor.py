"""A job that is watched: inputs drift, tables move, training goes on unchanged."""

from __future__ import annotations

import contextlib
import json
import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec import KeyedJaggedTensor
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from tests.builders import (
    CPU,
    FixedSearcher,
    bag_config,
    bags,
    by_table,
    make_planner,
)
from tests.distributed.ranks import ONE_NODE, Jobs, OfJob, message_of
from tests.distributed.unsharded import shard_model
from torchrec_neuroshard import JsonLinesReporter, PlanMonitor, apply_moves, replan
from torchrec_neuroshard.costs.simulator import PHASES
from torchrec_neuroshard.testing import AnalyticCostModel

pytestmark = pytest.mark.distributed

LOCAL_BATCH, NUM_ROWS, DIM = 64, 500, 16
FEATURES = [f"f{i}" for i in range(5)]
"""The last one reads a table that every rank has a copy of."""
EVERY = 8
DRIFT_AT, MOVE_AT, NUM_STEPS = 20, 48, 60
EAGER: dict[str, Any] = {"every": EVERY, "timed": 2, "max_overhead": 1.0}
"""Reports whatever the machine is busy with."""


class Model(nn.Module):
    """A loss, as TorchRec's pipelines want it, of tables with a fused optimizer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        *moved, copied = (bag_config(i, NUM_ROWS, DIM) for i in range(len(FEATURES)))
        self.sparse = nn.ModuleDict(
            {"ebc": bags(*moved, device=CPU), "copied": bags(copied, device=CPU)}
        )
        apply_optimizer_in_backward(
            RowWiseAdagrad, self.sparse["ebc"].parameters(), {"lr": 0.1}
        )
        self.dense = nn.Linear(DIM * len(FEATURES), 1)

    def forward(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        # By name: the order of the outputs differs from plan to plan.
        moved = self.sparse["ebc"](batch).to_dict()
        copied = self.sparse["copied"](batch).to_dict()
        outputs = [moved[f] for f in FEATURES[:-1]] + [copied[FEATURES[-1]]]
        pooled = torch.cat(outputs, dim=1).sin()
        scale = torch.linspace(0.5, 1.5, pooled.shape[1])
        loss = (pooled * scale).sum(1).mean() + self.dense(pooled).square().mean()
        return loss, loss.detach()


def planner_by(search: Any) -> Any:
    """A planner that moves all tables but the last."""
    kinds = [*["table_wise"] * (len(FEATURES) - 1), "data_parallel"]
    return make_planner(
        batch_size=LOCAL_BATCH,
        constraints=by_table(sharding_types=[[kind] for kind in kinds]),
        cost_model=AnalyticCostModel(launch_ms=0.0, byte_ns=10.0),
        search=search,
    )


def shard(search: Any = "default") -> tuple[Any, Any]:
    """A sharded model, the same weights each time, and its planner."""
    model, planner = Model(), planner_by(search)
    sharders = get_default_sharders()
    plan = planner.collective_plan(model, sharders, dist.group.WORLD)
    return shard_model(model, plan, sharders), planner


def ranks_of(plan: Any) -> dict[str, int]:
    """Feature -> rank of its table."""
    tables = plan.plan["sparse.ebc"]
    return {f"f{n.removeprefix('t')}": s.ranks[0] for n, s in tables.items()}


def drifting(sharded: Any, rank: int) -> Callable[[int], Any]:
    """Step -> batch: bags of one id; from a step on, of sixteen on rank 0."""
    popular = [f for f, r in ranks_of(sharded.plan).items() if r == 0]

    def batch(step: int) -> Any:
        generator = torch.Generator().manual_seed(10 * step + rank)
        sizes = [16 if step >= DRIFT_AT and f in popular else 1 for f in FEATURES]
        return KeyedJaggedTensor(
            keys=FEATURES,
            values=torch.randint(
                0, NUM_ROWS, (LOCAL_BATCH * sum(sizes),), generator=generator
            ),
            lengths=torch.tensor(sizes, dtype=torch.int32).repeat_interleave(
                LOCAL_BATCH
            ),
        )

    return batch


def pipeline_of(sharded: Any) -> Any:
    dense = torch.optim.SGD(sharded.module.dense.parameters(), lr=0.01)
    return TrainPipelineSparseDist(sharded, dense, CPU)


def run_drift(rank: int) -> dict[str, Any]:
    """Train with and without a monitor that moves tables.

    The pipeline's first iterator ends before the move, and so it runs dry.
    """
    losses: dict[str, list[float]] = {"still": [], "moved": []}
    found: dict[str, Any] = {"log": []}
    monitor_log = logging.getLogger("torchrec_neuroshard.monitor")
    for name, held in losses.items():
        sharded, planner = shard()
        batch = drifting(sharded, rank)
        monitor = PlanMonitor(sharded, planner, **EAGER) if name == "moved" else None
        pipeline = pipeline_of(sharded)
        for part in (range(MOVE_AT), range(MOVE_AT, NUM_STEPS)):
            batches = map(batch, part)
            for step in part:
                held.append(float(pipeline.progress(batches)))
                if monitor is None:
                    continue
                with mock.patch.object(monitor_log, "info") as info:
                    monitor.step()
                found["log"] += [str(call.args[1]) for call in info.call_args_list]
                if step == MOVE_AT - 4:
                    found["early"] = described(monitor.replan())
                if step == MOVE_AT - 1:
                    report = monitor.last_report
                    drifts = report.drifts if report else ()
                    found["drifts"] = [(d.table, d.factor) for d in drifts]
                    found["before"] = ranks_of(sharded.plan)
                    found["done"] = described(monitor.replan())
                    found["after"] = ranks_of(sharded.plan)
        if monitor is not None:
            report = monitor.last_report
            found["is_on"] = monitor.is_on
            found["last"] = report and {
                "iteration": report.last_iteration,
                "phases": sorted(p for p, r in report.measured if r is None),
                "predicted": [
                    [report.predicted[p, r] for p in ("fwd_compute", "bwd_compute")]
                    for r in (0, 1)
                ],
            }
            monitor.close()
            found["hooks left"] = sorted(
                n
                for n in ("input_dist", "compute_and_output_dist")
                if n in vars(sharded.module.sparse["ebc"])
            )
    found["gap"] = max(
        abs(a - b) for a, b in zip(losses["still"], losses["moved"], strict=True)
    )
    found["learned"] = abs(losses["still"][0] - losses["still"][-1])
    return found


def described(done: Any) -> Any:
    return done and {
        "applied": done.applied,
        "reason": done.reason,
        "bytes": done.result.moved_bytes,
    }


def run_moved_by_others(rank: int, folder: Path) -> dict[str, Any]:
    """All tables are on rank 0 at first, and then moved without the monitor."""
    sharded, planner = shard(FixedSearcher([(i, DIM, 0) for i in range(4)]))
    path = folder / f"phases{rank}.jsonl"
    reporters = [JsonLinesReporter(path)]
    monitor = PlanMonitor(sharded, planner, **EAGER, reporters=reporters)
    batch = drifting(sharded, rank)(0)
    found: dict[str, Any] = {}
    for when in ("before", "between", "after"):
        for step in range(EVERY):
            sharded(batch)[0].backward()
            monitor.step()
            if when == "between" and step == EVERY - 2:  # iterations have been timed
                result = replan(
                    sharded.plan,
                    planner=planner_by("default"),
                    model=Model(),
                    budget_bytes=2**40,
                )
                apply_moves(sharded, result)
                found["moved"] = len(result.moves)
                found["priced"] = [r.fwd_compute for r in result.after.ranks]
        report = monitor.last_report
        found[when] = report and [
            report.last_iteration,
            *(
                [phases["fwd_compute", r] for r in (0, 1)]
                for phases in (report.planned, report.measured)
            ),
        ]
    monitor.close()
    found["written"] = path.exists() and path.read_text().splitlines()
    return found


BREAKS = {
    "hook": (1, "phase_timer.synchronize"),
    "report": (0, "monitor.predicted_phases"),
    "closed": (0, ""),
}
"""Case -> the rank where the monitor ends, and the function that fails there."""


def run_endings(rank: int) -> dict[str, Any]:
    """The monitor breaks or is closed on one rank; says what each rank hears, and when.

    Its warnings are errors, as in a job that is run with `python -W error`.
    """
    found: dict[str, Any] = {}
    for name, (where, what) in BREAKS.items():
        sharded, planner = shard()
        monitor = PlanMonitor(sharded, planner, **EAGER)
        batch = drifting(sharded, rank)(0)
        heard = []
        with contextlib.ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("error", "PlanMonitor")
            if what and rank == where:
                broken = mock.Mock(side_effect=RuntimeError("injected"))
                stack.enter_context(mock.patch(f"torchrec_neuroshard.{what}", broken))
            for step in range(3 * EVERY):
                sharded(batch)[0].backward()
                if not what and (step, rank) == (EVERY // 2, where):
                    monitor.close()
                try:
                    monitor.step()
                except UserWarning as warning:
                    heard.append([step, str(warning)])
        ended = monitor.replan() is None and not monitor.is_on
        found[name] = {"heard": heard, "ended": ended}
        monitor.close()
    return found


def run_without_time(rank: int) -> dict[str, Any]:
    """Inputs differ from the planned ones, but the overhead may be next to nothing."""
    sharded, planner = shard()
    monitor = PlanMonitor(sharded, planner, **{**EAGER, "max_overhead": 1e-9})
    batch = drifting(sharded, rank)(DRIFT_AT)
    for _ in range(2 * EVERY):
        sharded(batch)[0].backward()
        monitor.step()
    report = monitor.last_report
    monitor.close()
    return {
        "ignores inputs": report
        and report.predicted == report.planned
        and not report.drifts
    }


def run_refusals(rank: int) -> dict[str, str]:
    """Settings that cannot be, as each rank sees them."""
    sharded, planner = shard()

    def made(planner: Any = planner, **settings: Any) -> str:
        return message_of(lambda: PlanMonitor(sharded, planner, **settings))

    return {
        "every=10": made(every=100 + rank),
        "max_overhead=0.0": made(max_overhead=float(rank)),
        "planned no model": made(make_planner()),
        "for 4 ranks": made(make_planner(4)),
        "reporters[0] is 'phases.jsonl', not a": made(reporters=["phases.jsonl"]),
    }


def rank_jobs(num_nodes: int, rank: int, folder: Path) -> Jobs:
    if num_nodes != ONE_NODE:
        return {}
    return {
        "drift": lambda: run_drift(rank),
        "moved by others": lambda: run_moved_by_others(rank, folder),
        "endings": lambda: run_endings(rank),
        "without time": lambda: run_without_time(rank),
        "refusals": lambda: run_refusals(rank),
    }


def test_drift_is_named_on_the_first_rank(results: OfJob) -> None:
    first, second = results("drift")
    popular = {f for f, r in first["before"].items() if r == 0}
    tables = {f"sparse.ebc.t{f.removeprefix('f')}" for f in popular}
    assert {table for table, _ in first["drifts"][:2]} == tables
    assert all(factor > 15 for _, factor in first["drifts"][:2])
    assert any("largest drift: table 'sparse.ebc.t" in text for text in first["log"])
    assert any("largest difference: " in text for text in first["log"])
    assert not second["log"] and not second["drifts"]


def test_tables_that_have_become_popular_are_spread(results: OfJob) -> None:
    found = results("drift")
    assert found[0]["done"] == found[1]["done"]
    for rank in found:
        assert not rank["early"]["applied"] and rank["early"]["bytes"] > 0
        assert rank["early"]["reason"].startswith("a train pipeline has batches in")
        assert rank["done"]["applied"] and rank["done"]["bytes"] > 0
        popular = [f for f, r in rank["before"].items() if r == 0]
        assert sorted(rank["after"][f] for f in popular) == [0, 1]
        assert rank["is_on"] and not rank["hooks left"]
        # The losses are those of a job that nobody watched.
        assert rank["gap"] < 1e-5 and rank["learned"] > 1e-2
    last = found[0]["last"]
    assert last["iteration"] > MOVE_AT
    # The pipeline hides the index exchange, and nothing else.
    assert {*last["phases"]} == {*PHASES} - {"index_comms"}
    assert last["predicted"][0] == pytest.approx(last["predicted"][1])


def test_moves_that_others_made_are_seen(results: OfJob) -> None:
    found = results("moved by others")[0]
    assert found["moved"]
    _, before, measured = found["before"]
    assert measured[0] > measured[1] == 0.0  # nothing but replicas, which have no times
    assert found["between"] == found["before"]  # of neither plan
    last, planned, measured = found["after"]
    assert last == 3 * EVERY
    assert planned == pytest.approx(found["priced"]) and planned != before
    assert min(measured) > 0.0


def test_the_first_rank_writes_plans_and_times(results: OfJob) -> None:
    first, second = results("moved by others")
    assert not second["written"]
    lines = [json.loads(line) for line in first["written"]]
    plans = [line for line in lines if line["record"] == "plan"]
    assert [plan["iteration"] for plan in plans] == [0, 3 * EVERY]
    for plan, when in zip(plans, ("before", "after"), strict=True):
        last, planned, measured = first[when]
        assert plan["phases_ms"]["fwd_compute"] == pytest.approx(planned)
        assert min(plan["used_bytes"]) > 0
        written = [
            line
            for line in lines
            if (line["iteration"], line.get("phase")) == (last, "fwd_compute")
            and line["rank"] is not None
        ]
        assert [line["rank"] for line in written] == [0, 1]
        assert [line["planned_ms"] for line in written] == pytest.approx(planned)
        assert [line["measured_ms"] for line in written] == pytest.approx(measured)
    assert {line["iteration"] for line in lines} == {0, EVERY, 3 * EVERY}


def test_a_failure_ends_the_monitor_on_all_ranks_in_one_step(results: OfJob) -> None:
    """And not the job."""
    for case, at in (("hook", EVERY - 1), ("report", 2 * EVERY - 1)):
        for found in (rank[case] for rank in results("endings")):
            assert found["ended"]
            ((step, text),) = found["heard"]
            assert step == at
            assert text.startswith("PlanMonitor is off, training goes on: ")
            assert text.endswith("RuntimeError: injected")


def test_a_rank_that_closes_its_monitor_ends_it_everywhere(results: OfJob) -> None:
    first, second = (rank["closed"] for rank in results("endings"))
    assert first == {"heard": [], "ended": True} and second["ended"]
    ((step, text),) = second["heard"]
    assert step == EVERY - 1
    assert text.endswith("training goes on: NeuroShardError: rank 0: closed")


def test_without_time_current_inputs_are_ignored(results: OfJob) -> None:
    assert results("without time")[0]["ignores inputs"]


def test_bad_settings_are_errors_on_all_ranks(results: OfJob) -> None:
    for found in results("refusals"):
        for named, message in found.items():
            assert message.startswith("ConfigError: ") and named in message
