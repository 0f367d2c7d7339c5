"""Reports from measured times, and planners that learn a job's inputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.planner import Topology
from torchrec.distributed.sharding_plan import get_default_sharders

from tests.builders import (
    CPU,
    FixedSearcher,
    Nested,
    bag_config,
    bag_sharders,
    bags,
    each,
    fused_bags,
    gpus,
    make_planner,
    sequences,
    shards_of,
)
from torchrec_neuroshard import group_topology, replan
from torchrec_neuroshard.costs.simulator import PHASES
from torchrec_neuroshard.monitor import (
    MonitorReport,
    changed_inputs,
    measured_phases,
    predicted_phases,
    stages_of,
)
from torchrec_neuroshard.phase_timer import PhaseTimes
from torchrec_neuroshard.planner.outline import outline_of
from torchrec_neuroshard.tables.profile import zipf_profile
from torchrec_neuroshard.testing import AnalyticCommsModel, AnalyticCostModel

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

COMPUTE = ("fwd_compute", "bwd_compute")
MODULE = "sparse.ebc"


def test_drift_is_priced_and_named() -> None:
    """Six tables, five of them on rank 0."""
    model = Nested(bags(*map(bag_config, range(6))))
    planner = make_planner(
        constraints=each(6, "table_wise"),
        cost_model=AnalyticCostModel(launch_ms=0.0, byte_ns=10.0),
        search=FixedSearcher([(i, 32, int(i == 5)) for i in range(6)]),
    )
    plan = planner.plan(model, bag_sharders())
    options = planner.placed_options(plan, model, bag_sharders())
    stages = stages_of(options, {MODULE})

    def predicted(planner: Any) -> Any:
        return predicted_phases(planner.costs.placed(options).predicted, stages)

    profiles = {
        f"f{i}": zipf_profile(batch_size=64, pooling_factor=p, num_embeddings=1000)
        for i, p in enumerate((1.0, 50.0, 1.0, 8.0))
    }
    relearned = planner.relearned(profiles)
    planned, now = predicted(planner), predicted(relearned)
    slowest = ("fwd_compute", None)
    assert now[slowest] > 2 * planned[slowest]
    drifts = changed_inputs(options, planner, relearned)
    assert [d.table for d in drifts[:2]] == [f"{MODULE}.t1", f"{MODULE}.t3"]
    assert drifts[0].now.pooling_factor == pytest.approx(50.0)
    report = MonitorReport(
        last_iteration=1,
        iteration_ms=20.0,
        planned=planned,
        predicted=planned,
        measured={p: (2.0 if p[0] in COMPUTE else 1.0) * planned[p] for p in planned},
        drifts=drifts,
    )
    assert report.differences[0] == ("bwd_compute", 0)
    assert "largest difference: bwd_compute of rank 0" in str(report)
    assert "largest drift: table 'sparse.ebc.t1'" in str(report)
    # Moves are searched for current inputs.
    result = replan(
        plan,
        planner=relearned,
        model=model,
        sharders=bag_sharders(),
        budget_bytes=2**62,
    )
    assert predicted_phases(result.before, stages) == now
    assert result.moves
    assert result.after.critical_path_ms < result.before.critical_path_ms


def test_predictions_are_of_the_timed_modules_alone() -> None:
    """Modules may have any name; stages call the model itself "model"."""
    sharders = [*bag_sharders(), EmbeddingCollectionSharder()]

    def predicted(**modules: nn.Module) -> Any:
        model = nn.ModuleDict(modules)
        planner = make_planner(
            search=FixedSearcher(
                lambda task: [(i, 32, i % 2) for i in range(len(task.tables))]
            )
        )
        plan = planner.plan(model, sharders)
        options = planner.placed_options(plan, model, sharders)
        costs = planner.costs.placed(options).predicted
        return predicted_phases(costs, stages_of(options, {"ebc"}))

    tables = [bag_config(i) for i in range(2)]
    alone = predicted(ebc=bags(*tables))
    assert alone["fwd_comms", None] > 0
    assert predicted(ebc=bags(*tables), model=sequences(32, 32)) == alone


def test_times_of_ranks_are_combined() -> None:
    def step(forward_ms: float) -> list[PhaseTimes]:
        spans = {p: [(0.0, forward_ms / 1e3)] for p in PHASES}
        return [PhaseTimes("ebc", {**spans, "index_comms": []})]

    ranks = [[step(1.0), step(3.0), step(2.0)], [step(4.0), step(4.0), step(4.0)]]
    found = measured_phases(ranks)
    assert found["fwd_compute", 0] == pytest.approx(2.0)
    assert found["fwd_compute", None] == pytest.approx(4.0)
    assert ("index_comms", None) not in found  # hidden by a pipeline
    report = MonitorReport(
        last_iteration=3,
        iteration_ms=20.0,
        planned=found,
        predicted=found,
        measured=found,
        drifts=(),
    )
    assert report.rest_ms == pytest.approx(20.0 - 4 * 4.0)


# --- a planner with a job's inputs: other profiles, the same model ---


def test_without_new_profiles_nothing_changes() -> None:
    """The slowdown of concurrent kernels must count only once."""
    comms = AnalyticCommsModel()
    comms.compute_slowdown = (1.5, 2.0)
    planner = make_planner(topology=gpus(4, local_world_size=2), comms_model=comms)
    plan = planner.plan(bags(), bag_sharders())
    learned = planner.relearned({}).relearned({})
    before, same = (
        p.evaluate(plan, bags(), bag_sharders()) for p in (planner, learned)
    )
    assert same.ranks == before.ranks and same.compute_source == before.compute_source


@pytest.mark.filterwarnings("ignore:the collectives of:UserWarning")
def test_measured_collectives_of_nodes_and_replicas_stay_measured() -> None:
    topology = group_topology(Topology(8, "cpu", local_world_size=4), 4)
    planner = make_planner(topology=topology, cost_model="auto", comms_model=None)
    before, same = planner.costs, planner.relearned({}).relearned({}).costs
    assert before.notes == same.notes and before.devices == same.devices
    assert before.replicas.source == same.replicas.source
    bytes_14 = np.full((1, 4), 1e6)
    for bytes_CW, models in (
        (bytes_14, (before.comms_model, same.comms_model)),
        (bytes_14[:, :2], (before.replicas, same.replicas)),
    ):
        ours, theirs = (m.all_reduce(bytes_CW).tolist() for m in models)
        assert ours == theirs
    ours, theirs = (
        m.node_row_wise(np.full((1, 4), 64.0), 128).tolist()
        for m in (before.comms_model, same.comms_model)
    )
    assert ours == theirs


def test_new_profiles_stand_in_for_old_ones_feature_by_feature() -> None:
    def profile(ids: float) -> Any:
        return zipf_profile(
            batch_size=64, pooling_factor=ids, num_embeddings=1000, exponent=0.0
        )

    planner = make_planner(profiles={"f0": profile(1.0), "f1": profile(1.0)})
    learned = planner.relearned({"f1": profile(20.0)})
    found = {f: p.pooling_factor for f, p in learned.profiles.items()}
    assert found == {"f0": 1.0, "f1": 20.0}
    assert planner.profiles["f1"].pooling_factor == 1.0


def trained_bags() -> Nested:
    # Some releases of torch warn when it is imported.
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

    model = Nested(bags(bag_config(0), bag_config(1), device=CPU))
    apply_optimizer_in_backward(
        torch.optim.Adagrad, model.sparse.parameters(), {"lr": 0.1}
    )
    return model


@pytest.mark.parametrize("make", [trained_bags, lambda: Nested(fused_bags(device=CPU))])
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
