"""Placement policies with untrained nets: plans are valid with any weights."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from papers.policies import arrange, roll_out, save_policy, set_statistics
from tests.builders import make_tables, make_task, run_search
from torchrec_neuroshard.costs.task import Placement, ShardingTask
from torchrec_neuroshard.errors import (
    BundleCorruptError,
    BundleMismatchError,
    ConfigError,
    InfeasibleError,
)
from torchrec_neuroshard.papers.autoshard import AutoShardNet, AutoShardSearcher
from torchrec_neuroshard.papers.dreamshard import DreamShardNet, DreamShardSearcher
from torchrec_neuroshard.papers.policies import (
    POLICY_FEATURES,
    Policy,
    PolicyInfo,
    PolicySearcher,
    load_policy,
    place,
    policy_features,
    view_task,
)
from torchrec_neuroshard.tables.profile import FeatureProfile
from torchrec_neuroshard.testing import AnalyticCommsModel, AnalyticCostModel

Tasks = tuple[ShardingTask, ...]
MODELS = AnalyticCostModel(), AnalyticCommsModel()


def untrained(
    kind: type[PolicySearcher], tasks: Sequence[ShardingTask]
) -> PolicySearcher:
    torch.manual_seed(0)
    net = kind.net_type()
    set_statistics(net, np.concatenate([view_task(t).features for t in tasks]))
    info = PolicyInfo(
        method=kind.method,
        name="untrained",
        hardware="none",
        ranges={"num_tables": (2, 20), "world_size": (2, 6), "batch_size": (512, 512)},
        trained_on={},
    )
    return kind(Policy(net, info))


def placed(searcher: PolicySearcher, task: ShardingTask) -> Placement:
    placement = run_search(searcher, task, *MODELS).placement
    placement.check(task)
    return placement


@pytest.fixture(params=[AutoShardSearcher, DreamShardSearcher])
def searcher(request: pytest.FixtureRequest, training_tasks: Tasks) -> PolicySearcher:
    return untrained(request.param, training_tasks)


def test_nets_have_the_papers_sizes() -> None:
    for net, expected in ((AutoShardNet(), 129_603), (DreamShardNet(), 24_997)):
        assert sum(p.numel() for p in net.parameters()) == expected


def test_features_by_hand() -> None:
    histogram = (30.0, 0.0, 10.0, *(0.0,) * 14)
    profile = FeatureProfile(
        batch_size=64, num_lookups=65.0, access_histogram=histogram
    )
    (table,) = make_tables([8], 5_000, profile=profile)
    row = dict(zip(POLICY_FEATURES, policy_features([table], 64)[0], strict=True))
    expected = {"dim": 8, "row": 5_000, "pooling_factor": 65 / 65_536}
    expected |= {"size": 5_000 * 8 * 4 / 1e9, "bin_0": 0.75, "bin_2": 0.25}
    for name, value in row.items():
        assert value == pytest.approx(expected.get(name, 0.0)), name


def test_padding_changes_nothing(
    searcher: PolicySearcher, training_tasks: Tasks, other_tasks: Tasks
) -> None:
    net = searcher.policy.net
    tasks = training_tasks[:3] + other_tasks[:3]
    views = [view_task(t) for t in tasks]
    together = arrange(net, views)
    assert not together.is_table_ET.all() and not together.is_rank_EW.all()
    joint = roll_out(net, together)
    for e, task in enumerate(tasks):
        expected = place(net, task, by="cost")  # alone, as in the search
        assert together.ranks(joint.actions_ET, e).tolist() == expected.tolist()


def paper_task(rows: Sequence[int], cap: int) -> ShardingTask:
    """Return a task whose ranks have memory for `cap` rows of four columns."""
    return make_task(make_tables([4] * len(rows), rows), 2, 512, memory=cap * 16)


def test_largest_tables_first_if_costliest_first_leaves_no_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The patched net gives small tables the highest cost and prefers rank 0."""
    size = POLICY_FEATURES.index("size")
    patches: dict[str, Any] = {
        "single_costs": lambda net, features_NF: -features_NF[:, size],
        "logits": lambda net, sums_WK, context_C: (
            -torch.arange(float(sums_WK.shape[-2])).expand(sums_WK.shape[:-1])
        ),
    }
    for name, patch in patches.items():
        monkeypatch.setattr(DreamShardNet, name, patch)
    # Costliest first: 400 + 400 | 600, and the second 600 has no room. Largest first:
    # 600 + 400 | 600 + 400.
    task = paper_task([400, 600, 400, 600], 1000)
    searcher = untrained(DreamShardSearcher, [task])
    result = run_search(searcher, task, *MODELS)
    assert [s.rank for s in result.placement.shards] == [0, 0, 1, 1]
    assert any("placed the largest tables first" in w for w in result.warnings)
    roomy = run_search(searcher, paper_task([400, 600, 400, 600], 2000), *MODELS)
    assert not any("placed the largest tables first" in w for w in roomy.warnings)
    with pytest.raises(InfeasibleError, match="'t2'"):
        run_search(searcher, paper_task([600, 600, 500, 300], 1000), *MODELS)


def test_warnings_outside_the_training_range(
    training_tasks: Tasks, other_tasks: Tasks
) -> None:
    searcher, task = untrained(DreamShardSearcher, training_tasks), other_tasks[0]
    assert run_search(searcher, task, *MODELS).warnings == ()
    another = AnalyticCostModel()
    another.hardware = "another"
    wider = dataclasses.replace(task, batch_size=1024)
    found = run_search(searcher, wider, another, MODELS[1]).warnings
    assert len(found) == 2
    assert any("batch_size 512 to 512, but the task has 1024" in w for w in found)
    assert any("costs of none, but the task is for another" in w for w in found)


def test_policies_of_other_methods_and_versions_are_refused(
    training_tasks: Tasks, tmp_path: Path
) -> None:
    policy = untrained(DreamShardSearcher, training_tasks).policy
    with pytest.raises(BundleCorruptError, match=r"policy\.json"):
        DreamShardSearcher(tmp_path)
    save_policy(tmp_path, policy, "")
    with pytest.raises(BundleMismatchError, match="'autoshard', 2"):
        AutoShardSearcher(tmp_path)
    with pytest.raises(ConfigError, match="'autoshard'"):
        AutoShardSearcher(policy)
    with pytest.raises(BundleCorruptError, match="does not hold this bundle's network"):
        load_policy(tmp_path, "dreamshard", AutoShardNet)
    description = tmp_path / "policy.json"
    data = json.loads(description.read_text())
    description.write_text(json.dumps(data | {"feature_names": ["dim"]}))
    with pytest.raises(
        BundleMismatchError, match="features that this package does not"
    ):
        DreamShardSearcher(tmp_path)
    unknown = type("Unknown", (DreamShardSearcher,), {"method": "unknown"})
    with pytest.raises(ConfigError, match="this package has no unknown policy"):
        unknown()
