"""Phases of a real sharded model, beside the stages that the simulator assumes."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec import KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.modules.embedding_configs import PoolingType

from tests.builders import (
    CPU,
    bag_config,
    bag_sharders,
    bags,
    make_planner,
    only,
    sequences,
)
from tests.distributed.ranks import ONE_NODE, Jobs, OfJob
from tests.distributed.unsharded import draw_batch, shard_model
from torchrec_neuroshard import PhaseTimer
from torchrec_neuroshard.costs.simulator import PHASES

pytestmark = pytest.mark.distributed

BATCH, NUM_STEPS = 64, 3


class Model(nn.Module):
    """Two collections; a table with mean pooling has a kernel of its own."""

    def __init__(self) -> None:
        super().__init__()
        mean = PoolingType.MEAN
        first, second = bag_config(0, 200, 32), bag_config(1, 300, 16, pooling=mean)
        self.user = bags(first, second, device=CPU)
        first, second = bag_config(2, 400, 64), bag_config(3, 50, 8, pooling=mean)
        self.item = bags(first, second, device=CPU)

    def forward(self, ids: KeyedJaggedTensor) -> torch.Tensor:
        pooled = [self.user(ids).values(), self.item(ids).values()]
        return torch.cat(pooled, dim=1).square().mean()


def shard() -> tuple[Any, Any]:
    """A sharded model and its planner."""
    torch.manual_seed(0)
    model, sharders = Model(), bag_sharders()
    planner = make_planner(batch_size=BATCH)
    plan = planner.collective_plan(model, sharders, dist.group.WORLD)
    return shard_model(model, plan, sharders), planner


class Event:
    """Stands in for a mark in a GPU's stream."""

    at = 0.0
    later_by = 0.0
    """Seconds by which all marks are later than they would be."""

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: Any) -> None:
        self.at = time.perf_counter() + Event.later_by

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, later: Event) -> float:
        return float(np.float32((later.at - self.at) * 1e3))  # as CUDA returns it


def time_by_events() -> dict[str, Any]:
    """The clocks of a timer that waits, and of one whose marks are events."""
    sharded, _ = shard()
    device = mock.Mock(Event=Event)
    with (
        mock.patch("torchrec_neuroshard.phase_timer.is_accelerator", lambda _: True),
        mock.patch("torchrec_neuroshard.phase_timer.accelerator", lambda _: device),
    ):
        by_events = PhaseTimer(sharded, CPU, wait=False)
    waiting = PhaseTimer(sharded, CPU)
    ids = draw_batch(["f0", "f1", "f2", "f3"], BATCH, 50, 0)
    found: dict[str, Any] = {}
    with mock.patch("torchrec_neuroshard.phase_timer.accelerator", lambda _: device):
        sharded(ids).backward()
        by_events.end_iteration()
        with mock.patch.object(Event, "later_by", 1e6):
            sharded(ids).backward()
    found["days later"] = [
        [t.duration_ms("fwd_compute") for t in iteration]
        for iteration in (by_events.take_all()[0], by_events.take())
    ]
    for name, timer in (("waiting", waiting), ("by events", by_events)):
        times = timer.take()
        found[name] = {t.clock for t in times}.pop()
    return found


def train(sharded: Any, features: Sequence[str]) -> dict[str, Any]:
    """The timed phases of some steps, and when each began and ended."""
    timer = PhaseTimer(sharded, CPU)
    steps = []
    for step in range(NUM_STEPS):
        ids = draw_batch(features, BATCH, 50, step)
        dist.barrier()
        start = time.perf_counter()
        sharded(ids).backward()
        end = time.perf_counter()
        modules = [dataclasses.asdict(t) for t in timer.take()]
        steps.append({"start": start, "end": end, "modules": modules})
    return {"steps": steps, "num_kernels": timer.num_kernels}


def train_two_collections() -> dict[str, Any]:
    sharded, planner = shard()
    found = train(sharded, ["f0", "f1", "f2", "f3"])
    task, result = planner.last_task, planner.last_result
    if task is not None and result is not None:
        found |= {
            "stage_names": task.stage_names,
            "placed": [[s.rank, task.groups[s.table]] for s in result.placement.shards],
        }
    return found


class Histories(nn.Module):
    """Sequences of two sharding types."""

    def __init__(self) -> None:
        super().__init__()
        self.items = sequences(16, 16, rows=200)

    def forward(self, ids: KeyedJaggedTensor) -> torch.Tensor:
        rows = [feature.values() for feature in self.items(ids).values()]
        return torch.cat(rows).square().mean()


def train_sequences() -> dict[str, Any]:
    torch.manual_seed(0)
    model, sharders = Histories(), [EmbeddingCollectionSharder()]
    kinds = {**only("s0", sharding_types=["table_wise"])}
    kinds |= only("s1", sharding_types=["row_wise"])
    planner = make_planner(batch_size=BATCH, constraints=kinds)
    plan = planner.collective_plan(model, sharders, dist.group.WORLD)
    sharded = DistributedModelParallel(model, device=CPU, plan=plan, sharders=sharders)
    holder = plan.plan["items"]["s0"].ranks
    return {**train(sharded, ["sf0", "sf1"]), "holder": holder}


def rank_jobs(num_nodes: int, _: int, __: Path) -> Jobs:
    if num_nodes != ONE_NODE:
        return {}
    return {
        "train": train_two_collections,
        "events": time_by_events,
        "sequences": train_sequences,
    }


def test_ranks_of_a_machine_share_a_clock_unless_devices_mark_the_times(
    results: OfJob,
) -> None:
    first, second = results("events")
    assert first["waiting"] == second["waiting"]
    clocks = {first["by events"], second["by events"], first["waiting"]}
    assert len(clocks) == 3


def test_events_are_precise_however_long_a_job_runs(results: OfJob) -> None:
    """CUDA tells the time between events in 24 bits."""
    for found in results("events"):
        for sooner, later in zip(*found["days later"], strict=True):
            assert 0.0 < sooner < 50.0 and 0.0 < later < 50.0


def test_phases_of_the_plans_stages_follow_each_other(results: OfJob) -> None:
    trained = results("train")
    stages = trained[0]["stage_names"]
    assert sorted(name.split()[0] for name in stages) == ["item", "user"]
    for number, rank in enumerate(trained):
        groups = {group for holder, group in trained[0]["placed"] if holder == number}
        assert rank["num_kernels"] == len(groups) > 0
        for step in rank["steps"]:
            paths = [m["module"].rpartition(".")[2] for m in step["modules"]]
            assert paths == ["user", "item"]
            for module in step["modules"]:
                assert all(module["spans"][phase] for phase in PHASES)
                spans = [s for phase in PHASES for s in module["spans"][phase]]
                times = [step["start"], *(t for s in spans for t in s), step["end"]]
                assert times == sorted(times)


def test_phases_of_sequences_are_timed(results: OfJob) -> None:
    for number, rank in enumerate(results("sequences")):
        # Every rank has rows of the second table, one of them the first table.
        assert rank["num_kernels"] == 1 + (number in rank["holder"])
        for step in rank["steps"]:
            [module] = step["modules"]
            spans = module["spans"]
            for phase in ("fwd_compute", "bwd_compute"):
                assert len(spans[phase]) == rank["num_kernels"]
            times = [t for phase in PHASES[:3] for s in spans[phase] for t in s]
            # Gradients of one type arrive while those of the other are exchanged.
            (began, ended), *_ = spans["bwd_comms"]
            last = max(end for _, end in spans["bwd_compute"])
            assert began <= ended <= last
            ordered = [step["start"], *times, began, last, step["end"]]
            assert ordered == sorted(ordered)
