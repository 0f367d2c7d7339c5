"""What placement policies share, on untrained nets: no weights may break it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.baselines.common import Tasks
from tests.builders import make_tables, make_task
from torchrec_neuroshard.baselines.autoshard import AutoShardNet, AutoShardSearcher
from torchrec_neuroshard.baselines.dreamshard import DreamShardNet, DreamShardSearcher
from torchrec_neuroshard.baselines.policies import (
    POLICY_FEATURES,
    Episodes,
    Policy,
    PolicyInfo,
    PolicyNet,
    PolicySearcher,
    arrange,
    load_policy,
    policy_features,
    policy_log_probs,
    roll_out,
    save_policy,
    view_task,
)
from torchrec_neuroshard.errors import (
    BundleCorruptError,
    BundleMismatchError,
    ConfigError,
    FeatureSchemaError,
    InfeasibleError,
)
from torchrec_neuroshard.placement import ShardingTask
from torchrec_neuroshard.profiles import FeatureProfile
from torchrec_neuroshard.search import make_searcher
from torchrec_neuroshard.tables import TableConfig
from torchrec_neuroshard.testing import AnalyticCommsModel, AnalyticCostModel

SEARCHERS: dict[str, type[PolicySearcher]] = {
    "dreamshard": DreamShardSearcher,
    "autoshard": AutoShardSearcher,
}
MODELS = AnalyticCostModel(), AnalyticCommsModel()


def info(method: str) -> PolicyInfo:
    return PolicyInfo(
        method=method,
        name="untrained",
        hardware="none",
        ranges={"num_tables": (2, 20), "world_size": (2, 6), "batch_size": (512, 512)},
        trained_on={},
    )


def untrained(method: str, tasks: Sequence[ShardingTask]) -> PolicySearcher:
    torch.manual_seed(0)
    net = SEARCHERS[method].make_net()
    net.set_statistics(np.concatenate([view_task(t).features for t in tasks]))
    return SEARCHERS[method](Policy(net, info(method)))


@pytest.fixture(params=sorted(SEARCHERS))
def searcher(request: pytest.FixtureRequest, policy_tasks: Tasks) -> PolicySearcher:
    return untrained(request.param, policy_tasks[0])


def test_features_by_hand() -> None:
    histogram = [0.0] * 17
    histogram[0], histogram[2] = 30.0, 10.0
    table = TableConfig(
        name="t",
        num_embeddings=5_000,
        embedding_dim=8,
        profile=FeatureProfile(
            batch_size=64, num_lookups=65.0, access_histogram=tuple(histogram)
        ),
    )
    row = dict(zip(POLICY_FEATURES, policy_features([table], 64)[0], strict=True))
    assert row["dim"] == 8 and row["row"] == 5_000
    assert row["pooling_factor"] == pytest.approx(65 / 65_536)
    assert row["size"] == pytest.approx(5_000 * 8 * 4 / 1e9)
    assert row["bin_0"] == pytest.approx(0.75) and row["bin_2"] == pytest.approx(0.25)
    assert sum(row[f"bin_{j}"] for j in range(17)) == pytest.approx(1.0)


def test_statistics_leave_shares_alone(policy_tasks: Tasks) -> None:
    features = view_task(policy_tasks[0][0]).features
    net = DreamShardNet()
    net.set_statistics(features)
    standard = net.standardise(torch.from_numpy(features)).numpy()
    np.testing.assert_allclose(standard[:, :4].mean(axis=0), 0, atol=1e-4)
    np.testing.assert_allclose(standard[:, :3].std(axis=0), 1, rtol=1e-3)
    np.testing.assert_array_equal(standard[:, 4:], features[:, 4:])
    with pytest.raises(FeatureSchemaError, match="take 21 features, got 20"):
        net.standardise(torch.zeros(3, 20))


def test_order_of_tables_does_not_matter(
    searcher: PolicySearcher, policy_tasks: Tasks
) -> None:
    rng = np.random.default_rng(1)
    for task in policy_tasks[1][:6]:
        order = rng.permutation(len(task.tables))
        shuffled = dataclasses.replace(
            task,
            tables=tuple(task.tables[i] for i in order),
            fixed_bytes=(),
            column_bytes=(),
            min_widths=(),
            max_shards=(),
            groups=(),
        )
        plans = [searcher.search(t, *MODELS).placement for t in (task, shuffled)]
        rank_of = [
            {t.tables[s.table].name: s.rank for s in plan.shards}
            for t, plan in zip((task, shuffled), plans, strict=True)
        ]
        assert rank_of[0] == rank_of[1]


def test_padding_changes_nothing(searcher: PolicySearcher, policy_tasks: Tasks) -> None:
    net = searcher.policy.net
    views = [view_task(t) for t in policy_tasks[0][:3] + policy_tasks[1][:3]]
    together = arrange(net, views)
    assert not together.is_table_ET.all() and not together.is_rank_EW.all()
    joint = roll_out(net, together)
    for e, view in enumerate(views):
        alone = arrange(net, [view])
        expected = alone.ranks(roll_out(net, alone).actions_ET, 0)
        assert together.ranks(joint.actions_ET, e).tolist() == expected.tolist()


def test_log_probs_repeat_the_rollout(
    searcher: PolicySearcher, policy_tasks: Tasks
) -> None:
    net = searcher.policy.net
    episodes = arrange(net, [view_task(t) for t in policy_tasks[0][:5]])
    rollout = roll_out(net, episodes, torch.Generator().manual_seed(3))
    log_probs = policy_log_probs(net, episodes, rollout)
    taken = log_probs.gather(-1, rollout.actions_ET[..., None])[..., 0]
    real = episodes.is_table_ET
    torch.testing.assert_close(
        taken[real], rollout.log_probs_ET[real], rtol=1e-4, atol=1e-5
    )
    total = log_probs.exp().sum(dim=-1)
    torch.testing.assert_close(total, torch.ones_like(total))
    assert log_probs[~rollout.legal_ETW].max() < -1e8
    assert len(set(rollout.actions_ET[real].tolist())) > 1


def test_same_seed_same_draws(searcher: PolicySearcher, policy_tasks: Tasks) -> None:
    net = searcher.policy.net
    episodes = arrange(net, [view_task(t) for t in policy_tasks[0][:4]])
    draws = [
        roll_out(net, episodes, torch.Generator().manual_seed(s)).actions_ET
        for s in (1, 1, 2)
    ]
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])


def test_no_rank_is_filled_beyond_its_memory(
    searcher: PolicySearcher, policy_tasks: Tasks
) -> None:
    net = searcher.policy.net
    for task in policy_tasks[1][:6]:
        searcher.search(task, *MODELS).placement.check(task)
        episodes = arrange(net, [view_task(task)] * 5)
        rollout = roll_out(net, episodes, torch.Generator().manual_seed(1))
        free = ~rollout.stuck_ET.any(dim=1)
        assert free.any()
        for e in torch.nonzero(free)[:, 0].tolist():
            used = np.zeros(task.world_size)
            for table, rank in enumerate(episodes.ranks(rollout.actions_ET, e)):
                width = task.tables[table].embedding_dim
                used[rank] += task.shard_bytes(table, width)
            assert (used <= np.array(task.memory_bytes)).all()


class FirstRankNet(PolicyNet):
    """Smallest table first, each on the first rank that has room."""

    def single_costs(self, features_NF: torch.Tensor) -> torch.Tensor:
        return -features_NF[:, POLICY_FEATURES.index("size")]

    def items(self, features_ETF: torch.Tensor) -> torch.Tensor:
        return features_ETF[..., :1]

    def context(self, episodes: Episodes) -> torch.Tensor:
        return episodes.features_ETF[..., :0]

    def logits(self, sums_WK: torch.Tensor, context_C: torch.Tensor) -> torch.Tensor:
        return -torch.arange(sums_WK.shape[-2]).float().expand(sums_WK.shape[:-1])


class FirstRankSearcher(PolicySearcher):
    method = "first-rank"

    @staticmethod
    def make_net() -> PolicyNet:
        return FirstRankNet()

    @staticmethod
    def paper_memory(task: ShardingTask) -> tuple[list[float], list[float]]:
        return [0.0] * len(task.tables), [0.0] * task.world_size


def paper_task(rows: Sequence[int], cap: int) -> ShardingTask:
    """Ranks with memory for `cap` rows of the tables' four columns."""
    return make_task(make_tables([4] * len(rows), rows), 2, 512, memory=cap * 16)


def test_largest_first_where_the_costliest_first_leave_no_room() -> None:
    searcher = FirstRankSearcher(Policy(FirstRankNet(), info("first-rank")))
    # 400 + 400 | 600, and 600 has room nowhere; but 600 + 400 | 600 + 400.
    result = searcher.search(paper_task([400, 600, 400, 600], 1000), *MODELS)
    assert [s.rank for s in result.placement.shards] == [0, 0, 1, 1]
    assert any("the largest were placed first" in w for w in result.warnings)
    roomy = searcher.search(paper_task([400, 600, 400, 600], 2000), *MODELS)
    assert not any("the largest were placed first" in w for w in roomy.warnings)


def test_infeasible_names_the_table() -> None:
    searcher = FirstRankSearcher(Policy(FirstRankNet(), info("first-rank")))
    with pytest.raises(InfeasibleError, match=r"table 't2' needs .* fits on no rank"):
        searcher.search(paper_task([600, 600, 500, 300], 1000), *MODELS)


def test_stuck_episodes_end_on_the_freest_rank() -> None:
    net = FirstRankNet()
    episodes = arrange(net, [view_task(paper_task([400, 600, 400, 601], 1000))])
    rollout = roll_out(net, episodes)
    assert rollout.stuck_ET.tolist() == [[False, False, False, True]]
    assert episodes.ranks(rollout.actions_ET, 0).tolist() == [0, 1, 0, 1]


def test_faithful_memory_is_the_released_codes() -> None:
    tasks = [paper_task([600] * 4, 1000)]  # as fp32, no rank holds two
    for method, searcher_type in SEARCHERS.items():
        searcher = untrained(method, tasks)
        with pytest.raises(InfeasibleError):
            searcher.search(tasks[0], *MODELS)
        faithful = searcher_type(searcher.policy, faithful_memory=True)
        result = faithful.search(tasks[0], *MODELS)
        held = result.placement.rank_bytes(tasks[0])
        assert max(held) > 16_000
        assert sum("faithful_memory lets it" in w for w in result.warnings) == sum(
            h > 16_000 for h in held
        )
        if method == "dreamshard":  # counts fp16: three tables at most
            assert max(held) <= 3 * 600 * 16


def test_warnings_outside_the_training_range(policy_tasks: Tasks) -> None:
    searcher = untrained("dreamshard", policy_tasks[0])
    task = policy_tasks[1][0]
    assert searcher.search(task, *MODELS).warnings == ()
    wider = dataclasses.replace(task, batch_size=1024)
    (warning,) = searcher.search(wider, *MODELS).warnings
    assert "trained with batch_size from 512 to 512, the task has 1024" in warning
    cost_model = AnalyticCostModel()
    cost_model.hardware = "another"
    (warning,) = searcher.search(task, cost_model, MODELS[1]).warnings
    assert "trained on costs of none, the task is for another" in warning


def test_saved_policy_is_the_same(
    searcher: PolicySearcher, policy_tasks: Tasks, tmp_path: Path
) -> None:
    save_policy(tmp_path, searcher.policy, "# Card")
    loaded = type(searcher)(tmp_path)
    assert loaded.policy.info == searcher.policy.info
    state = searcher.policy.net.state_dict()
    for name, tensor in loaded.policy.net.state_dict().items():
        assert torch.equal(tensor, state[name])
    for task in policy_tasks[1][:5]:
        plans = [s.search(task, *MODELS).placement for s in (searcher, loaded)]
        assert plans[0] == plans[1]
    assert (tmp_path / "CARD.md").read_text() == "# Card\n"


def test_damaged_or_foreign_policies_are_refused(
    policy_tasks: Tasks, tmp_path: Path
) -> None:
    policy = untrained("dreamshard", policy_tasks[0]).policy
    with pytest.raises(BundleCorruptError, match=r"not a placement policy.*dreamshard"):
        DreamShardSearcher(tmp_path)
    save_policy(tmp_path, policy, "")
    with pytest.raises(BundleMismatchError, match=r"'dreamshard', 2.*'autoshard', 2"):
        AutoShardSearcher(tmp_path)
    with pytest.raises(ConfigError, match="'dreamshard' was given to 'autoshard'"):
        AutoShardSearcher(policy)
    with pytest.raises(BundleCorruptError, match="does not hold this bundle's network"):
        load_policy(tmp_path, "dreamshard", AutoShardNet)
    description = tmp_path / "policy.json"
    data = json.loads(description.read_text())
    description.write_text(json.dumps(data | {"feature_names": ["dim"]}))
    with pytest.raises(BundleMismatchError, match="takes other features"):
        DreamShardSearcher(tmp_path)
    description.write_text(json.dumps(data | {"ranges": 3}))
    with pytest.raises(BundleCorruptError, match="lacks or garbles a field"):
        DreamShardSearcher(tmp_path)
    description.write_text(json.dumps(data))
    weights = tmp_path / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    with pytest.raises(BundleCorruptError, match="damaged or not of this bundle"):
        DreamShardSearcher(tmp_path)
    with torch.no_grad():
        next(iter(policy.net.parameters())).fill_(float("nan"))
    save_policy(tmp_path, policy, "")
    with pytest.raises(BundleCorruptError, match="not finite"):
        DreamShardSearcher(tmp_path)


def test_nothing_shipped_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no first-rank policy comes with"):
        FirstRankSearcher()


@pytest.mark.parametrize("method", SEARCHERS)
def test_searches_by_name(method: str) -> None:
    searcher = make_searcher(method)
    assert isinstance(searcher, SEARCHERS[method]) and searcher.name == method
