"""A job that is watched: inputs drift, the plan follows, training goes on unchanged."""

from __future__ import annotations

import contextlib
import itertools
import logging
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.planner import ParameterConstraints

from tests.builders import bag_config, bags, make_planner
from tests.distributed.ranks import ONE_NODE, Jobs, OfJob, message_of
from torchrec_neuroshard.testing import AnalyticCostModel

pytestmark = pytest.mark.distributed

WORLD_SIZE, LOCAL_BATCH, NUM_ROWS, DIM = 2, 64, 500, 16
FEATURES = [f"f{i}" for i in range(4)]
EVERY, TIMED = 8, 2
DRIFT_AT, MOVE_AT, NUM_STEPS = 20, 48, 60
EAGER: dict[str, Any] = {
    "every": EVERY,
    "timed": TIMED,
    "max_overhead": 1.0,
    "min_gain": 0.0,
}
"""Looks whenever there is something to look at."""


class Model(nn.Module):
    """A loss, as TorchRec's pipelines want it, of tables with a fused optimizer."""

    def __init__(self) -> None:
        from torchrec.optim import RowWiseAdagrad
        from torchrec.optim.apply_optimizer_in_backward import (
            apply_optimizer_in_backward,
        )

        super().__init__()
        torch.manual_seed(1)
        self.sparse = nn.ModuleDict(
            {
                "ebc": bags(
                    *(bag_config(i, NUM_ROWS, DIM) for i in range(len(FEATURES))),
                    device=torch.device("cpu"),
                )
            }
        )
        apply_optimizer_in_backward(
            RowWiseAdagrad, self.sparse.parameters(), {"lr": 0.1}
        )
        self.dense = nn.Linear(DIM * len(FEATURES), 1)

    def forward(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        # By name: the order of the outputs differs from plan to plan.
        outputs = self.sparse["ebc"](batch).to_dict()
        pooled = torch.cat([outputs[f] for f in FEATURES], dim=1).sin()
        scale = torch.linspace(0.5, 1.5, pooled.shape[1])
        loss = (pooled * scale).sum(1).mean() + self.dense(pooled).square().mean()
        return loss, loss.detach()


def batch_of(step: int, rank: int, popular: frozenset[str]) -> Any:
    """Bags of one id; of popular features, of sixteen."""
    from torchrec import KeyedJaggedTensor

    generator = torch.Generator().manual_seed(10 * step + rank)
    lengths = torch.cat(
        [torch.full((LOCAL_BATCH,), 16 if f in popular else 1) for f in FEATURES]
    )
    return KeyedJaggedTensor(
        keys=FEATURES,
        values=torch.randint(0, NUM_ROWS, (int(lengths.sum()),), generator=generator),
        lengths=lengths.to(torch.int32),
    )


def shard() -> tuple[Any, Any]:
    """A sharded model, the same weights each time, and its planner."""
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed.sharding_plan import get_default_sharders

    model = Model()
    start = {k: v.detach().clone() for k, v in model.sparse.state_dict().items()}
    planner = make_planner(
        dist.get_world_size(),
        search_only=False,
        batch_size=LOCAL_BATCH,
        constraints={
            f"t{i}": ParameterConstraints(sharding_types=["table_wise"])
            for i in range(len(FEATURES))
        },
        cost_model=AnalyticCostModel(launch_ms=0.0, byte_ns=10.0),
        search="default",
    )
    sharders = get_default_sharders()
    plan = planner.collective_plan(model, sharders, dist.group.WORLD)
    sharded = DistributedModelParallel(
        model, device=torch.device("cpu"), plan=plan, sharders=sharders
    )
    with torch.no_grad():
        for key, value in sharded.state_dict().items():
            for part in value.local_shards() if hasattr(value, "local_shards") else ():
                part.tensor.copy_(start[key.removeprefix("sparse.")])
    return sharded, planner


def ranks_of(plan: Any) -> dict[str, int]:
    """Feature -> rank of its table."""
    tables = plan.plan["sparse.ebc"]
    return {f"f{n.removeprefix('t')}": s.ranks[0] for n, s in tables.items()}


def drifting(sharded: Any, rank: int) -> Callable[[int], Any]:
    """Step -> batch; from a step on, the features of rank 0 are popular."""
    on_first = frozenset(f for f, r in ranks_of(sharded.plan).items() if r == 0)
    return lambda step: batch_of(
        step, rank, on_first if step >= DRIFT_AT else frozenset()
    )


class PlainLoop:
    """Forward, backward, step."""

    def __init__(self, sharded: Any, batches: Iterator[Any]) -> None:
        self._sharded, self._batches = sharded, batches
        self._dense = torch.optim.SGD(sharded.module.dense.parameters(), lr=0.01)

    def progress(self) -> torch.Tensor:
        batch = next(self._batches)
        self._dense.zero_grad()
        loss, shown = self._sharded(batch)
        loss.backward()
        self._dense.step()
        found: torch.Tensor = shown
        return found


class Pipelined:
    """TorchRec's train pipeline; batches end where it has to run dry."""

    def __init__(self, sharded: Any, batches: Iterator[Any], kind: str) -> None:
        from torchrec.distributed import train_pipeline

        dense = torch.optim.SGD(sharded.module.dense.parameters(), lr=0.01)
        self._pipeline = getattr(train_pipeline, kind)(
            sharded, dense, torch.device("cpu")
        )
        self._batches = batches

    def progress(self) -> torch.Tensor:
        found: torch.Tensor = self._pipeline.progress(self._batches)
        return found


class Log(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.entries: list[tuple[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.entries.append((record.levelname, record.getMessage()))


def listen() -> tuple[Log, logging.Logger]:
    log, logger = Log(), logging.getLogger("torchrec_neuroshard.monitor")
    logger.setLevel(logging.INFO)
    logger.addHandler(log)
    return log, logger


def run_drift(rank: int, kind: str | None, folder: Path) -> dict[str, Any]:
    """Train with and without a monitor that may move tables."""
    from torchrec_neuroshard import PlanMonitor

    losses: dict[str, list[float]] = {"still": [], "moved": []}
    found: dict[str, Any] = {}
    logging.disable(logging.NOTSET)  # for this job alone
    log, logger = listen()
    for name, held in losses.items():
        sharded, planner = shard()
        batch = drifting(sharded, rank)
        # The pipeline's first iterator ends before the move, and so it runs dry.
        parts = [range(MOVE_AT), range(MOVE_AT, NUM_STEPS)]
        monitor = None
        if name == "moved":
            records = folder / f"records_{kind}.parquet"
            plan_file = folder / f"plan_{kind}.json"
            monitor = PlanMonitor(
                sharded, planner, records=records, plan_file=plan_file, **EAGER
            )
        loop: Any = None
        for part in parts:
            batches = map(batch, part)
            if loop is None:
                make: Any = PlainLoop if kind is None else Pipelined
                loop = make(sharded, batches, *([] if kind is None else [kind]))
            else:
                loop._batches = batches
            for step in part:
                held.append(float(loop.progress()))
                if monitor is None:
                    continue
                monitor.step()
                if step == MOVE_AT - 4:  # a pipeline is full, a plain loop is not
                    budget = 0 if kind is None else 2**40
                    found["early"] = describe(monitor.replan(budget_bytes=budget))
            if monitor is not None and step < NUM_STEPS - 1:
                found["before"] = ranks_of(sharded.plan)
                found["done"] = describe(monitor.replan())
                found["after"] = ranks_of(sharded.plan)
        if monitor is not None:
            found["is_on"] = monitor.is_on
            report = monitor.last_report
            found["last"] = report and {
                "iteration": report.last_iteration,
                "phases": sorted(report.measured.critical_ms),
                "ranks": [sorted(r) for r in report.measured.by_rank_ms],
                "predicted": [
                    [r.fwd_compute, r.bwd_compute] for r in report.predicted.ranks
                ],
            }
            monitor.close()
            dist.barrier()
            found["records"] = records.exists() and count_records(records)
            found["stored"] = plan_file.exists()
            module = sharded.module.sparse["ebc"]
            found["hooks left"] = sorted(
                n
                for n in ("input_dist", "compute_and_output_dist")
                if n in vars(module)
            )
    logger.removeHandler(log)
    logging.disable(logging.WARNING)
    found["log"] = log.entries
    found["gap"] = max(
        abs(a - b) for a, b in zip(losses["still"], losses["moved"], strict=True)
    )
    found["learned"] = abs(losses["still"][0] - losses["still"][-1])
    return found


def describe(done: Any) -> Any:
    if done is None:
        return None
    return {
        "applied": done.applied,
        "reason": done.reason,
        "saved_ms": done.offer and done.offer.saved_ms,
        "bytes": done.offer and done.offer.result.moved_bytes,
        "break_even": done.offer and done.offer.break_even,
        "plan_file": done.plan_file and done.plan_file.name,
    }


def count_records(path: Path) -> dict[str, Any]:
    from torchrec_neuroshard.record_store import read_records
    from torchrec_neuroshard.training.compute import build_sets

    headers, records = read_records([path])
    held_out = {t.name for r in records if r.held_out for t in r.tables}
    others = {t.name for r in records if not r.held_out for t in r.tables}
    return {
        "num": len(records),
        "held_out": sum(r.held_out for r in records),
        "shared": sorted(held_out & others),
        "batch": sorted({r.batch_size for r in records}),
        "passes": sorted({r.num_passes for r in records}),
        "sets": int(build_sets(records).num_sets),
        "positive": min(min(r.fwd_ms, r.bwd_ms) for r in records) > 0,
        "pooling": sorted(
            {
                t.profile_at(r.batch_size).pooling_factor
                for r in records
                for t in r.tables
            }
        ),
        "device": headers[0].fingerprint.device_type,
    }


def run_failures(rank: int) -> dict[str, Any]:
    """Something of the monitor breaks on one rank; both train on."""
    from torchrec_neuroshard import PlanMonitor

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("injected")

    def late(*_: Any) -> None: ...

    breaks = {
        "hook": (1, "phase_timer.synchronize"),
        "inputs": (0, "monitor.inputs.InputSampler.count_one"),
        "report": (0, "monitor.assessment.Assessor.assess"),
        "exchange": (1, "monitor.exchange.Exchange.start"),
        "late": (1, "monitor.plan_monitor.PlanMonitor.step"),
    }
    found: dict[str, Any] = {}
    for name, (where, what) in breaks.items():
        sharded, planner = shard()
        batch = drifting(sharded, rank)
        loop = PlainLoop(sharded, map(batch, itertools.count()))
        monitor = PlanMonitor(sharded, planner, **EAGER)
        fault = late if name == "late" else broken
        with contextlib.ExitStack() as broken_parts:
            caught = broken_parts.enter_context(warnings.catch_warnings(record=True))
            warnings.simplefilter("always")
            if rank == where:
                part = f"torchrec_neuroshard.{what}"
                broken_parts.enter_context(mock.patch(part, fault))
            losses = []
            for _ in range(4 * EVERY):
                losses.append(float(loop.progress()))
                monitor.step()
            replanned = monitor.replan()
        found[name] = {
            "warnings": [
                str(w.message) for w in caught if "PlanMonitor" in str(w.message)
            ],
            "is_on": monitor.is_on,
            "steps": len(losses),
            "replanned": replanned is not None,
        }
        monitor.close()
    return found


def run_refusals(rank: int) -> dict[str, str]:
    """Settings that cannot be, as each rank sees them."""
    from torchrec_neuroshard import PlanMonitor

    sharded, planner = shard()
    unused = make_planner(WORLD_SIZE)
    others = make_planner(4)

    def make(*parts: Any, **settings: Any) -> Callable[[], Any]:
        return lambda: PlanMonitor(*(parts or (sharded, planner)), **settings)

    cases = {
        "every": make(every=5),
        "timed": make(timed=0),
        "max_overhead": make(max_overhead=0.0),
        "min_gain": make(min_gain=1.0),
        "horizon": make(horizon=0),
        "budget": make(budget_bytes=-1),
        "ranks differ": make(every=100 + rank),
        "model": make(nn.Linear(1, 1), planner),
        "planner": make(sharded, object()),
        "no plan": make(sharded, unused),
        "other ranks": make(sharded, others),
    }
    found = {name: message_of(case) for name, case in cases.items()}
    unused.remember(Model())
    found["remembered"] = message_of(make(sharded, unused))
    return found


def rank_jobs(num_nodes: int, rank: int, folder: Path) -> Jobs:
    if num_nodes != ONE_NODE:
        return {}
    return {
        "plain": lambda: run_drift(rank, None, folder),
        "pipeline": lambda: run_drift(rank, "TrainPipelineSparseDist", folder),
        "failures": lambda: run_failures(rank),
        "refusals": lambda: run_refusals(rank),
    }


@pytest.mark.parametrize("job", ["plain", "pipeline"])
def test_drift_is_told_with_what_a_new_plan_brings(results: OfJob, job: str) -> None:
    first, second = results(job)
    warned = [text for level, text in first["log"] if level == "WARNING"]
    # Once before the move: the plan for even inputs pays no more.
    assert len(warned) == 1 and "a new plan saves" in warned[0]
    step = int(warned[0].partition(":")[0].removeprefix("iteration "))
    assert DRIFT_AT < step <= DRIFT_AT + 3 * EVERY
    differs = r"largest difference: \w+ of (rank \d|all ranks): "
    for text in (r"ms \(", "KiB", "pays after", differs):
        assert any(re.search(text, entry) for _, entry in first["log"])
    assert not second["log"]


@pytest.mark.parametrize("job", ["plain", "pipeline"])
def test_moves_spread_what_has_become_popular(results: OfJob, job: str) -> None:
    found = results(job)
    assert found[0]["done"] == found[1]["done"]
    for rank in found:
        assert rank["done"]["applied"] and rank["done"]["saved_ms"] > 0
        assert rank["done"]["bytes"] > 0 and rank["done"]["break_even"] > 0
        popular = [f for f, r in rank["before"].items() if r == 0]
        assert sorted(rank["after"][f] for f in popular) == [0, 1]
        assert rank["is_on"] and not rank["hooks left"]


@pytest.mark.parametrize("job", ["plain", "pipeline"])
def test_losses_are_those_of_a_job_that_nobody_watched(
    results: OfJob, job: str
) -> None:
    for rank in results(job):
        assert rank["gap"] < 1e-5
        assert rank["learned"] > 1e-2


def test_nothing_moves_beyond_the_budget(results: OfJob) -> None:
    for rank in results("plain"):
        assert not rank["early"]["applied"] and rank["early"]["bytes"] is None
        assert rank["early"]["reason"] == "no plan was found that saves enough"
        assert not rank["stored"]


def test_full_pipeline_is_not_moved_under(results: OfJob) -> None:
    for rank in results("pipeline"):
        assert not rank["early"]["applied"] and rank["early"]["bytes"] > 0
        assert rank["early"]["reason"].startswith("a train pipeline has batches under")
        assert rank["early"]["plan_file"].endswith(".json") and rank["stored"]


def test_reports_see_the_new_plan_with_fresh_inputs(results: OfJob) -> None:
    for job, phases in (("plain", 5), ("pipeline", 4)):
        last = results(job)[0]["last"]
        assert last["iteration"] > MOVE_AT
        assert len(last["phases"]) == phases
        assert last["predicted"][0] == pytest.approx(last["predicted"][1])
        assert results(job)[1]["last"] is None


@pytest.mark.parametrize("job", ["plain", "pipeline"])
def test_kernels_are_kept_as_records(results: OfJob, job: str) -> None:
    kept = results(job)[0]["records"]
    assert kept["num"] == kept["sets"] >= 2 * 4
    assert 0 < kept["held_out"] < kept["num"] and not kept["shared"]
    assert kept["batch"] == [WORLD_SIZE * LOCAL_BATCH] and kept["passes"] == [TIMED]
    assert kept["positive"] and kept["device"] == "cpu"
    assert kept["pooling"] == [1.0, 16.0]  # before and after the drift


@pytest.mark.parametrize(
    ("case", "told"),
    [
        ("hook", ["rank 1: RuntimeError: injected", "RuntimeError: injected"]),
        ("inputs", ["RuntimeError: injected", None]),
        ("report", ["RuntimeError: injected", None]),
        ("exchange", ["call monitor.step() after each", "RuntimeError: injected"]),
        ("late", ["call monitor.step() after each", None]),
    ],
)
def test_failure_ends_the_monitor_and_not_the_job(
    results: OfJob, case: str, told: list[str | None]
) -> None:
    for rank, text in zip(results("failures"), told, strict=True):
        found = rank[case]
        assert found["steps"] == 4 * EVERY and not found["replanned"]
        assert len(found["warnings"]) == (text is not None)
        assert found["is_on"] == (text is None)
        if text is not None:
            assert "PlanMonitor is off, training goes on" in found["warnings"][0]
            assert text in found["warnings"][0]


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("every", "ConfigError: timed must be at least 1 and every at least timed + 2"),
        ("timed", "ConfigError: timed must be at least 1"),
        ("max_overhead", "ConfigError: max_overhead is a part of the time"),
        ("min_gain", "ConfigError: min_gain must be in"),
        ("horizon", "ConfigError: horizon must be above 0, got 0"),
        ("budget", "ConfigError: budget_bytes must be at least 0, got -1"),
        ("ranks differ", "ConfigError: rank 1 has other settings than rank 0"),
        ("model", "ConfigError: PlanMonitor watches what DistributedModelParallel"),
        ("planner", "ConfigError: PlanMonitor prices plans by a NeuroShardPlanner"),
        ("no plan", "ConfigError: the planner has planned no model"),
        ("other ranks", "ConfigError: the planner is for 4 ranks, training runs on 2"),
        ("remembered", "no error"),
    ],
)
def test_bad_settings_are_errors_on_all_ranks(
    results: OfJob, case: str, message: str
) -> None:
    for found in results("refusals"):
        assert found[case].startswith(message)
