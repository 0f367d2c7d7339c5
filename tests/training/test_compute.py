"""Training on costs that are known exactly, and judging."""

import dataclasses

import pytest
import torch

from tests.builders import costed, draw_records
from torchrec_neuroshard.errors import ConfigError, RecordError
from torchrec_neuroshard.testing import AnalyticCostModel
from torchrec_neuroshard.training.compute import (
    TrainConfig,
    as_cost_model,
    build_sets,
    evaluate,
    fit_linear,
    train,
)

QUICK = TrainConfig(epochs=40, num_members=2, hidden=32, latent=4, head_hidden=16)


def test_learned_model_beats_linear_on_new_sets() -> None:
    training = build_sets(draw_records(300, 0))
    test = build_sets(draw_records(60, 1))
    network = train(training, QUICK)
    learned = evaluate("learned", as_cost_model(network, training, "x"), test)
    linear = evaluate("linear", as_cost_model(fit_linear(training), test, "x"), test)
    assert learned.total_mape < 0.05
    assert learned.total_mape < linear.total_mape
    assert learned.kendall_tau > 0.95


def test_training_is_the_same_for_the_same_seed() -> None:
    data = build_sets(draw_records(60, 0))
    config = dataclasses.replace(QUICK, epochs=3)
    one, two = train(data, config), train(data, config)
    other = train(data, dataclasses.replace(config, seed=1))
    weights = [
        torch.cat([p.flatten() for p in network.parameters()])
        for network in (one, two, other)
    ]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_linear_fit_recovers_a_linear_cost() -> None:
    training, data = (
        build_sets(costed(draw_records(80, seed), AnalyticCostModel()))
        for seed in (0, 1)
    )
    model = as_cost_model(fit_linear(training), data, "linear")
    judged = evaluate("linear", model, data)
    assert judged.total_mape < 1e-3
    assert judged.kendall_tau > 0.999


def test_bad_input_is_named() -> None:
    with pytest.raises(RecordError, match="no records to train on"):
        build_sets([])
    bad = dataclasses.replace(draw_records(1, 0)[0], fwd_ms=0.0)
    with pytest.raises(RecordError, match=r"record 0 has times 0\.0"):
        build_sets([bad])
    with pytest.raises(RecordError, match="1 sets are too few"):
        train(build_sets(draw_records(1, 0)), QUICK)
    with pytest.raises(ConfigError, match="at least 1, got 0 and 5"):
        TrainConfig(epochs=0)
