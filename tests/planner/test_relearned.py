"""A planner that has learned of a job: other inputs, the same model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torchrec.distributed.sharding_plan import get_default_sharders

from tests.builders import (
    CPU,
    Nested,
    bag_config,
    bag_sharders,
    bags,
    fused_bags,
    gpus,
    make_planner,
    shards_of,
)
from torchrec_neuroshard.planner import NeuroShardPlanner
from torchrec_neuroshard.planner.costs.given_plans import PlanOptions
from torchrec_neuroshard.planner.outline import outline_of
from torchrec_neuroshard.profiles import uniform_profile
from torchrec_neuroshard.simulator import PredictedCosts
from torchrec_neuroshard.testing import AnalyticCommsModel

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def price(planner: NeuroShardPlanner, plan: Any, model: nn.Module) -> PredictedCosts:
    options = PlanOptions(model, bag_sharders(), planner.enumerator, planner.costs)
    return planner.costs.evaluate(planner.costs.lower(options.of(plan)))


def test_without_news_nothing_changes() -> None:
    """A slowdown of kernels that run at once counts once."""
    comms = AnalyticCommsModel()
    comms.compute_slowdown = (1.5, 2.0)
    planner = make_planner(
        topology=gpus(4, local_world_size=2), comms_model=comms, search_only=False
    )
    plan = planner.plan(bags(), bag_sharders())
    learned = planner.relearned({}).relearned({})
    before, same = (price(p, plan, bags()) for p in (planner, learned))
    assert same.ranks == before.ranks and same.compute_source == before.compute_source


def test_new_profiles_stand_in_for_old_ones_feature_by_feature() -> None:
    def profile(ids: float) -> Any:
        return uniform_profile(batch_size=64, pooling_factor=ids, num_embeddings=1000)

    planner = make_planner(profiles={"f0": profile(1.0), "f1": profile(1.0)})
    learned = planner.relearned({"f1": profile(20.0)})
    found = {f: p.pooling_factor for f, p in learned.profiles.items()}
    assert found == {"f0": 1.0, "f1": 20.0}
    assert planner.profiles["f1"].pooling_factor == 1.0


def trained_bags() -> Nested:
    # Some releases of torch warn where it is imported.
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

    model = Nested(bags(bag_config(0), bag_config(1), device=CPU))
    apply_optimizer_in_backward(
        torch.optim.Adagrad, model.sparse.parameters(), {"lr": 0.1}
    )
    return model


@pytest.mark.parametrize(
    "make",
    [trained_bags, lambda: Nested(fused_bags(device=CPU))],
    ids=["bags", "fused"],
)
def test_outline_is_planned_like_its_model_and_holds_no_weights(make: Any) -> None:
    model = make()
    outline = outline_of(model)
    held = [*outline.parameters(), *outline.buffers()]
    assert held and all(t.device.type == "meta" for t in held)
    assert [n for n, _ in outline.named_parameters()] == [
        n for n, _ in model.named_parameters()
    ]
    planner, sharders = make_planner(), get_default_sharders()
    plan = planner.plan(model, sharders)
    assert shards_of(make_planner().plan(outline, sharders)) == shards_of(plan)
    assert planner.last_model is not None
    model.sparse["ebc"] = nn.Linear(1, 1)  # as DistributedModelParallel would
    assert shards_of(planner.plan(*planner.last_model)) == shards_of(plan)
