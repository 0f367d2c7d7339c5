"""Moves at work: two gloo ranks go on training as if no shard had changed ranks."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from tests.builders import (
    CPU,
    META,
    FixedSearcher,
    bag_config,
    bags,
    each,
    make_planner,
)
from tests.distributed.ranks import ONE_NODE, Jobs, OfJob, message_of
from tests.distributed.unsharded import (
    draw_batch,
    gap,
    loss_of,
    shard_model,
    weights_of,
    whole_weights,
)
from torchrec_neuroshard.planner.given_plans import copied
from torchrec_neuroshard.plans.replan import apply_moves, replan
from torchrec_neuroshard.testing import AnalyticCostModel

pytestmark = pytest.mark.distributed

LOCAL_BATCH = 6
NUM_ROWS = 40
NUM_STEPS = 6
MOVE_BEFORE_STEP = 3

TABLE, COLUMN = "table_wise", "column_wise"


@dataclass(frozen=True)
class Case:
    """A plan to start with; what replan makes of it is carried out."""

    dims: Sequence[int]
    triples: Sequence[tuple[int, int, int]]
    """(table, width, rank) of the first plan."""
    kind: str = TABLE
    optimizer: Any = RowWiseAdagrad
    features: Sequence[Sequence[str]] = ()
    by_hand: Sequence[Sequence[int]] = ()
    """Widths of each table on each rank, in place of the search's."""

    def names(self, table: int) -> list[str]:
        """Features that read a table."""
        return list(self.features[table]) if self.features else [f"f{table}"]


CASES = {
    # Ids need no reordering under the first plan, but do under the second.
    "sgd": Case(
        optimizer=torch.optim.SGD,
        dims=(32, 16, 8),
        triples=[(0, 32, 1), (1, 16, 1), (2, 8, 1)],
    ),
    "tables change places": Case(
        dims=(32, 24, 8, 16),
        triples=[(0, 16, 0), (0, 16, 1), (1, 24, 0), (2, 8, 1), (3, 16, 0)],
        kind=COLUMN,
        features=[["f0", "f1"], ["f1"], ["f0"], ["f2"]],
        by_hand=[(16, 16), (0, 24), (8, 0), (16, 0)],
    ),
}


class Model(nn.Module):
    def __init__(self, case: Case, device: torch.device = META) -> None:
        super().__init__()
        torch.manual_seed(1)
        tables = [
            bag_config(i, NUM_ROWS, dim, feature_names=case.names(i))
            for i, dim in enumerate(case.dims)
        ]
        self.sparse = nn.ModuleDict(
            {"ebc": bags(*tables, weighted=True, device=device)}
        )
        apply_optimizer_in_backward(
            case.optimizer, self.sparse.parameters(), {"lr": 0.3}
        )
        columns = sum(dim * len(case.names(i)) for i, dim in enumerate(case.dims))
        torch.manual_seed(2)
        self.dense = nn.Linear(columns, 1)

    def forward(self, batch: Any) -> torch.Tensor:
        out = self.sparse["ebc"](batch).to_dict()
        joined = torch.cat([out[key] for key in sorted(out)], dim=1)
        value: torch.Tensor = loss_of(out, LOCAL_BATCH) + self.dense(joined).mean()
        return value


def planner_of(case: Case, search: Any = "default") -> Any:
    return make_planner(
        batch_size=LOCAL_BATCH,
        constraints=each(len(case.dims), case.kind),
        cost_model=AnalyticCostModel(launch_ms=0.0),
        search=search,
    )


def shard(case: Case) -> tuple[Any, Any]:
    """Return the model sharded by the case's triples, and a planner for later plans."""
    sharders = get_default_sharders()
    first = planner_of(case, FixedSearcher(case.triples)).plan(Model(case), sharders)
    return shard_model(Model(case, CPU), first, sharders), planner_of(case)


def widths_here(sharded: Any) -> list[list[int]]:
    """Local widths in each fused kernel of this rank, sorted."""
    return [
        sorted(t.local_cols for t in kernel.config.embedding_tables)
        for lookup in sharded.module.sparse["ebc"]._lookups
        for kernel in lookup._emb_modules
    ]


def new_plan(case: Case, planner: Any, plan: Any) -> Any:
    """What rank 0 finds; None on the other one."""
    if dist.get_rank() != 0:
        return None
    arguments = {"planner": planner, "model": Model(case), "budget_bytes": 2**40}
    if not case.by_hand:
        return replan(plan, **arguments)
    width_TW = np.array(case.by_hand)
    search = "torchrec_neuroshard.plans.replan.improve_within"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, lambda *_: width_TW)
        return replan(plan, **arguments)


def train(case: Case, rank: int, moves: bool) -> dict[str, Any]:
    sharded, planner = shard(case)
    losses: list[float] = []
    found: dict[str, Any] = {}
    keys = sorted({f for i in range(len(case.dims)) for f in case.names(i)})
    for step in range(NUM_STEPS):
        if step == 1:
            for group in sharded.fused_optimizer.param_groups:
                group["lr"] = 0.05
        if moves and step == MOVE_BEFORE_STEP:
            before = widths_here(sharded)
            result = new_plan(case, planner, sharded.plan)
            dice = torch.random.get_rng_state()
            apply_moves(sharded, result)
            found["same_dice"] = bool(torch.equal(dice, torch.random.get_rng_state()))
            found["widths"] = [before, widths_here(sharded)]
            sent = [result and (result.plan, len(result.moves))]
            dist.broadcast_object_list(sent, src=0)
            plan, found["num_moves"] = sent[0]
            found["plan_is_at_work"] = sharded.plan == plan
        sharded.fused_optimizer.zero_grad()
        seed = 10 * step + rank
        loss = sharded(draw_batch(keys, LOCAL_BATCH, NUM_ROWS, seed, weighted=True))
        torch.autograd.backward(loss)
        sharded.fused_optimizer.step()
        losses.append(float(loss))
    return {**found, "losses": losses, "weights": whole_weights(sharded)}


def run_case(case: Case, rank: int) -> dict[str, Any]:
    """Train twice, with and without the moves; runs on every rank."""
    still = train(case, rank, moves=False)
    moved = train(case, rank, moves=True)
    start, want = weights_of(Model(case, CPU)), still.pop("weights")
    weights, losses = moved.pop("weights"), moved.pop("losses")
    pairs = zip(still["losses"], losses, strict=True)
    return {
        **moved,
        "loss_gap": max(abs(a - b) for a, b in pairs),
        "loss_change": abs(losses[0] - losses[-1]),
        "weight_gap": max(gap(want[k], weights[k]) for k in start),
        "trained": min(gap(weights[k], start[k]) for k in start),
    }


def run_refusals(rank: int) -> dict[str, Any]:
    """What cannot be carried out, as each rank sees it; nothing moves."""
    case = CASES["sgd"]
    sharded, planner = shard(case)
    before = widths_here(sharded)
    result = new_plan(case, planner, sharded.plan)
    seen = {"none": message_of(lambda: apply_moves(sharded))}
    module: Any = sys.modules["torchrec_neuroshard.plans.replan"]
    module.hash = lambda text: rank
    seen["hashes"] = message_of(lambda: apply_moves(sharded, result))
    del module.hash
    late = DistributedModelParallel(
        Model(case, CPU),
        device=CPU,
        plan=sharded.plan,
        sharders=get_default_sharders(),
        init_data_parallel=False,
    )
    seen["no dense part"] = message_of(lambda: apply_moves(late, result))
    # The second rank alone has another model, and the first one must not wait for it.
    others: dict[str, Any] = {"no model": nn.Linear(1, 1), "replicas": mock.Mock()}
    others["replicas"].plan = copied(sharded.plan)
    tables = others["replicas"].plan.plan["sparse.ebc"]
    for name, sharding in tables.items():
        tables[name] = dataclasses.replace(sharding, sharding_spec=None)
    for name, other in others.items():
        model = other if rank else sharded
        seen[name] = message_of(functools.partial(apply_moves, model, result))
    seen["still"] = str(before == widths_here(sharded))
    apply_moves(sharded, result)
    seen["again"] = message_of(lambda: apply_moves(sharded, result))
    nothing = rank == 0 and replan(
        sharded.plan, planner=planner, model=Model(case), budget_bytes=0
    )
    seen["nothing"] = message_of(lambda: apply_moves(sharded, nothing or None))
    return seen


def rank_jobs(num_nodes: int, rank: int, _: Path) -> Jobs:
    if num_nodes != ONE_NODE:
        return {}
    jobs: Jobs = {
        name: functools.partial(run_case, case, rank) for name, case in CASES.items()
    }
    jobs["refusals"] = lambda: run_refusals(rank)
    return jobs


@pytest.mark.parametrize("name", CASES)
def test_training_goes_on_as_without_the_move(results: OfJob, name: str) -> None:
    for result in results(name):
        assert result["num_moves"] > 0
        assert result["loss_gap"] < 1e-5
        assert result["weight_gap"] < 1e-5
        assert result["loss_change"] > 1e-2 and result["trained"] > 1e-3
        assert result["same_dice"]  # the random state is left alone
    first, second = results(name)
    assert first["plan_is_at_work"] and second["plan_is_at_work"]
    assert first["widths"][0] != first["widths"][1]
    for moment in (0, 1):
        held = [w for r in (first, second) for k in r["widths"][moment] for w in k]
        assert sum(held) == sum(CASES[name].dims)


def test_refusals_reach_all_ranks(results: OfJob) -> None:
    messages = {
        "none": "ConfigError: apply_moves needs the result of replan",
        "hashes": "ConfigError: over gloo TorchRec moves tables only if all",
        "no dense part": "ConfigError: TorchRec moves tables only if Distributed",
        "no model": "ConfigError: rank 1 cannot move tables: AttributeError: 'Linear'",
        "replicas": "ConfigError: table 'sparse.ebc.t",
        "again": "ConfigError: table 'sparse.ebc.t",
        "nothing": "no error",
        "still": "True",
    }
    for seen in results("refusals"):
        assert {k: v for k, v in seen.items() if not v.startswith(messages[k])} == {}
        assert seen.keys() == messages.keys()
