"""Quantised collectives under our plans and TorchRec's: the same losses."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fbgemm_qcomm_codec import (
    CommType,
    QCommsConfig,
    get_qcomm_codecs_registry,
)
from torchrec.distributed.planner import ParameterConstraints, Topology

from tests.builders import FixedSearcher, bag_config, bags, make_planner, stock_planner
from tests.distributed.ranks import NODE_SIZE, ONE_NODE, Jobs, OfJob
from tests.distributed.unsharded import draw_batch, local_parts, loss_of

pytestmark = [pytest.mark.distributed, pytest.mark.nightly]

CODECS = {"fp16": 1e-3, "bf16": 1e-2, "int8": 1e-2}
"""Codec -> how far it may move the loss of a step, of about 1."""
WIDTHS, NUM_ROWS, LOCAL_BATCH, NUM_STEPS = (64, 32), 12, 8, 3


def train(whole: Any, plan: Any, sharder: Any, rank: int) -> list[float]:
    """Losses of a model's steps, from its own weights."""
    from torchrec.distributed import DistributedModelParallel

    sharded = DistributedModelParallel(
        copy.deepcopy(whole), device=torch.device("cpu"), plan=plan, sharders=[sharder]
    )
    with torch.no_grad():
        for _, shard, part in local_parts(sharded.state_dict(), whole.state_dict()):
            shard.copy_(part)
    losses, keys = [], [f"f{i}" for i in range(len(WIDTHS))]
    generator = torch.Generator().manual_seed(rank)
    batch = draw_batch(keys, LOCAL_BATCH, NUM_ROWS, generator)
    for _ in range(NUM_STEPS):
        loss = loss_of(sharded(batch).to_dict(), LOCAL_BATCH)
        torch.autograd.backward(loss)
        losses.append(float(loss))
    return losses


def run_codecs(rank: int) -> dict[str, Any]:
    from torchrec.optim.apply_optimizer_in_backward import (
        apply_optimizer_in_backward,
    )

    torch.manual_seed(1)
    whole = bags(
        *(bag_config(i, NUM_ROWS, width) for i, width in enumerate(WIDTHS)),
        device=torch.device("cpu"),
    )
    apply_optimizer_in_backward(torch.optim.SGD, whole.parameters(), {"lr": 0.3})
    constraints = {
        f"t{i}": ParameterConstraints(sharding_types=["table_wise"]) for i in range(2)
    }
    ours = make_planner(
        NODE_SIZE,
        batch_size=LOCAL_BATCH,
        constraints=constraints,
        search=FixedSearcher([(0, WIDTHS[0], 1), (1, WIDTHS[1], 0)]),
    )
    theirs = stock_planner(
        Topology(world_size=NODE_SIZE, compute_device="cpu"),
        batch_size=LOCAL_BATCH,
        constraints=constraints,
    )
    found: dict[str, Any] = {}
    for codec in ("fp32", *CODECS):
        kind = CommType(codec)
        config = QCommsConfig(forward_precision=kind, backward_precision=kind)
        # Said to be for CPUs, it would quantise to FP16 in place of BF16.
        registry = get_qcomm_codecs_registry(config, device=torch.device("cuda"))
        sharder = EmbeddingBagCollectionSharder(qcomm_codecs_registry=registry)
        for name, planner in (("ours", ours), ("torchrec's", theirs)):
            if codec == "fp32" and planner is theirs:
                continue
            plan = planner.collective_plan(whole, [sharder])
            found[f"{codec}, {name}"] = train(whole, plan, sharder, rank)
    return found


DAILY = ()


def rank_jobs(num_nodes: int, rank: int, _: Path) -> Jobs:
    if num_nodes != ONE_NODE:
        return {}
    return {"codecs": functools.partial(run_codecs, rank)}


@pytest.mark.parametrize("codec", CODECS)
def test_codecs_train_alike_under_any_plan(results: OfJob, codec: str) -> None:
    for found in results("codecs"):
        losses, plain = found[f"{codec}, ours"], found["fp32, ours"]
        assert losses == pytest.approx(found[f"{codec}, torchrec's"], abs=1e-6)
        assert losses == pytest.approx(plain, abs=CODECS[codec])
        assert losses != pytest.approx(plain, abs=1e-7)  # the codec was at work
        assert plain[-1] < plain[0] - 0.05  # and the steps did something
