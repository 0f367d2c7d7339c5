"""Checkpoints: weights saved under one plan serve under another."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torchrec.distributed import DistributedModelParallel

from tests.builders import CPU, FixedSearcher, Triples, bag_config, bags, make_planner
from tests.builders import bag_sharders as sharders
from tests.distributed.ranks import ONE_NODE, Jobs, OfJob
from tests.distributed.unsharded import gap, whole_weights

pytestmark = pytest.mark.distributed


def sharded(triples: Triples) -> Any:
    model = bags(bag_config(0, 9, 32), bag_config(1, 9, 16), device=CPU)
    planner = make_planner(search=FixedSearcher(triples))
    plan = planner.collective_plan(model, sharders(), dist.group.WORLD)
    return DistributedModelParallel(model, device=CPU, plan=plan, sharders=sharders())


def run_checkpoint(folder: Path) -> dict[str, float]:
    first = sharded([(0, 16, 0), (0, 16, 1), (1, 16, 0)])
    second = sharded([(0, 32, 1), (1, 16, 1)])
    saved, unlike = whole_weights(first), whole_weights(second)
    state_dict_saver.save({"model": first.state_dict()}, checkpoint_id=folder)
    state = {"model": second.state_dict()}
    state_dict_loader.load(state, checkpoint_id=folder)
    second.load_state_dict(state["model"])
    loaded = whole_weights(second)
    return {
        "unlike": min(gap(saved[k], unlike[k]) for k in saved),
        "gap": max(gap(saved[k], loaded[k]) for k in saved),
    }


def rank_jobs(num_nodes: int, _: int, folder: Path) -> Jobs:
    job = functools.partial(run_checkpoint, folder / "checkpoint")
    return {"checkpoint": job} if num_nodes == ONE_NODE else {}


def test_checkpoint_moves_from_one_plan_to_another(results: OfJob) -> None:
    for found in results("checkpoint"):
        assert found["unlike"] > 1e-3 and found["gap"] == 0.0
