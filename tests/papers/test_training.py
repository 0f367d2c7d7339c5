"""`benchmarks/papers`: training of the papers' nets and policies."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from harness.dlrm_tables import generate_dlrm_tables
from papers import data, policies, train
from papers.heuristics import GreedySearcher, RandomSearcher
from papers.nets import PaperTrainConfig, fit_comms
from papers.policies import (
    SimulatedPlans,
    arrange,
    compare,
    policy_log_probs,
    roll_out,
    set_statistics,
    vtrace,
)
from tests.builders import make_tables, make_task
from torchrec_neuroshard.bundles.find import load_comms_model, load_cost_model
from torchrec_neuroshard.costs.task import ShardingTask
from torchrec_neuroshard.errors import ConfigError
from torchrec_neuroshard.models.base import CommsModel
from torchrec_neuroshard.papers.autoshard import AutoShardSearcher
from torchrec_neuroshard.papers.dreamshard import DreamShardNet, DreamShardSearcher
from torchrec_neuroshard.papers.neuroshard_models import (
    PAPER_FEATURES,
    load_models,
)
from torchrec_neuroshard.papers.policies import view_task
from torchrec_neuroshard.tables.table import TableConfig
from torchrec_neuroshard.testing import AnalyticCommsModel, AnalyticCostModel

Tasks = tuple[ShardingTask, ...]
RECORDS = Path(__file__).parents[2] / "benchmarks" / "data"
# Lookups dominate, so that costs differ as pooling factors do.
COSTS = SimulatedPlans(
    AnalyticCostModel(lookup_ns=20.0), lambda world_size: AnalyticCommsModel()
)


# Policies.


@pytest.mark.nightly
@pytest.mark.parametrize("kind", policies.METHODS)
def test_losses_fall_and_the_same_seed_gives_the_same_weights(
    kind: str, training_tasks: Tasks
) -> None:
    losses, weights = [], []
    method = policies.METHODS[kind]
    own = {"steps": 160} if kind == "autoshard" else {"learning_rate": 2e-3}
    for seed in (0, 0, 1):
        config = method.config_type(iterations=3, cost_updates=10, seed=seed, **own)
        trainer = method(training_tasks[:4], COSTS, config)
        trainer.train(lambda iteration, figures: losses.append(figures["cost_loss"]))
        weights.append(trainer.net.state_dict())
    first, second, other = weights
    assert losses[2] < 0.7 * losses[0]
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


def test_vtrace_by_hand() -> None:
    log_ratios = torch.log(torch.tensor([[0.5, 2.0, 1.0]]))
    rewards = torch.tensor([[0.0, 1.0, 7.0]])
    values = torch.tensor([[0.2, 0.4, 9.0]])
    is_step = torch.tensor([[True, True, False]])
    targets, advantages = vtrace(log_ratios, rewards, values, is_step)
    # Step 1: the ratio is clipped to 1, and the value after it is 0.
    second = 0.4 + 1.0 * (1.0 + 0.0 - 0.4)
    first = 0.2 + 0.5 * (0.4 - 0.2) + 0.5 * 1.0 * (1.0 - 0.4)
    torch.testing.assert_close(targets, torch.tensor([[first, second, 0.0]]))
    expected = torch.tensor([[0.5 * (second - 0.2), 1.0 - 0.4, 0.0]])
    torch.testing.assert_close(advantages, expected)


def test_log_probs_repeat_the_rollout(training_tasks: Tasks) -> None:
    net, views = DreamShardNet(), [view_task(t) for t in training_tasks[:5]]
    set_statistics(net, views[0].features)
    episodes = arrange(net, views)
    rollout = roll_out(net, episodes, torch.Generator().manual_seed(3))
    log_probs = policy_log_probs(net, episodes, rollout)
    taken = log_probs.gather(-1, rollout.actions_ET[..., None])[..., 0]
    real = episodes.is_table_ET
    torch.testing.assert_close(
        taken[real], rollout.log_probs_ET[real], rtol=1e-4, atol=1e-5
    )
    assert log_probs[~rollout.legal_ETW].max() < -1e8


def test_tasks_without_a_plan_are_counted_and_not_compared() -> None:
    def task(rows: tuple[int, ...]) -> ShardingTask:
        return make_task(make_tables([4] * len(rows), rows), 2, 64, memory=16_000)

    # All tables have the same width, so they go to the two ranks in turn.
    both_fit = [(400, 400, 600, 600), (400, 500, 600, 500)]
    only_by_size, only_by_width = (300, 400, 500, 700), (400, 500, 300, 500, 300)
    neither = (900, 900, 900)
    tasks = [task(r) for r in (*both_fit, only_by_size, only_by_width, neither)]
    by_size, by_width = GreedySearcher("size"), GreedySearcher("dim")
    (found,) = compare(by_size, [by_width], tasks, COSTS)
    assert (found.num_pairs, found.num_infeasible, found.num_lost) == (2, 1, 1)
    (same,) = compare(by_size, [by_size], tasks, COSTS)
    assert (same.change, same.low, same.high) == (0.0, 0.0, 0.0)
    with pytest.raises(ConfigError, match="no task can be placed by both"):
        compare(by_size, [by_width], tasks[-1:], COSTS)


def test_the_command_writes_a_policy_that_loads(
    policy_tables: tuple[TableConfig, ...], tmp_path: Path
) -> None:
    file, out = tmp_path / "tables.json", tmp_path / "policy"
    workloads = [{"name": "w", "tables": [t.to_json() for t in policy_tables]}]
    file.write_text(json.dumps({"workloads": workloads}))
    command = (
        f"policy --method dreamshard --cost-model cpu --gb-per-s 50 --tables {file} "
        f"--out {out} --set iterations=1 cost_updates=4 --num-tasks 4 "
        "--num-tables 20 30 --world-sizes 2 3 --batch-sizes 512"
    )
    train.main(command.split())
    info = DreamShardSearcher(out).policy.info
    assert [*info.ranges["world_size"], *info.ranges["batch_size"]] == [2, 3, 512, 512]
    assert info.trained_on["method"]["iterations"] == 1
    card = (out / "CARD.md").read_text()
    assert "| cost_updates | 4 | 300 |" in card and "| greedy-cost | " in card
    assert "| collectives | 50 GB/s assumed, not measured |" in card
    for wrong in ("--set momentum=1", "--set iterations=0", "--workload x"):
        with pytest.raises(SystemExit, match=wrong.split()[1].split("=")[0]):
            train.main([*command.split(), *wrong.split()])


@pytest.mark.nightly
def test_shipped_policies_beat_the_papers_on_other_tables() -> None:
    name = "cpu_epyc_zen5"
    cost_model = load_cost_model(name)

    def collectives(world_size: int) -> CommsModel:
        found = load_comms_model(
            name, device_type="cpu", world_size=world_size, local_world_size=world_size
        )
        assert found is not None
        return found

    config = data.PolicyTaskConfig(num_tables=(20, 40), world_sizes=(3, 5))
    tasks = data.sample_policy_tasks(generate_dlrm_tables(seed=99), config, 12)
    others = [RandomSearcher(), GreedySearcher("size-lookup")]
    costs = SimulatedPlans(cost_model, collectives)
    for searcher in (AutoShardSearcher(), DreamShardSearcher()):
        assert searcher.policy.info.hardware == cost_model.hardware
        random, greedy = compare(searcher, others, tasks, costs)
        assert random.num_pairs == greedy.num_pairs == 12
        assert random.high < -0.05
        assert greedy.change < -0.03


# NeuroShard's nets.


@pytest.mark.nightly
def test_collective_nets_learn_a_known_model() -> None:
    drawn = data.LabelConfig(batch_sizes=(4_096, 8_192), num_samples=400)
    samples = data.label_placements(AnalyticCommsModel(gb_per_s=0.1), 4, drawn)
    config = PaperTrainConfig(epochs=40, batch_samples=32)
    _, forward, backward = fit_comms(*samples, config)
    assert forward.test_mse < 0.4 * forward.mean_test_mse
    assert backward.test_mse < 0.1 * backward.mean_test_mse


def test_the_command_writes_nets_that_load(tmp_path: Path) -> None:
    kernels, collectives = "compute_epyc_zen5.jsonl.xz", "comms_gloo_epyc_zen5.jsonl.xz"
    command = (
        f"nets --compute {RECORDS / kernels} --comms {RECORDS / collectives} "
        f"--epochs 2 --world-sizes 2 --widths 16 48 --out {tmp_path}"
    )
    train.main(command.split())
    models = load_models(tmp_path)
    assert list(models.comms) == [2]
    # Inputs are standardised over the given widths.
    dim = PAPER_FEATURES.index("dim")
    assert float(models.compute.mean_F[dim]) == 32
    assert float(models.compute.std_F[dim]) == pytest.approx(16)
    card = (tmp_path / "CARD.md").read_text()
    judgements = models.info.trained_on["judgements"]
    whats = [judgement["what"].split()[0] for judgement in judgements]
    assert whats == ["kernels", "forward", "backward"]
    for judgement in judgements:
        assert judgement["errors"]["mean"] > 0
        assert f"| {judgement['what']} | {judgement['num_samples']} |" in card
    other = command.replace(collectives, "comms_gloo_epyc.jsonl.xz")
    with pytest.raises(SystemExit, match=r"collectives on AMD EPYC \(25/17\)"):
        train.main(other.split())
