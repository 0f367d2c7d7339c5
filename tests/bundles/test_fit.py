"""Training on exactly known costs, evaluation, and `neuroshard train`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from tests.builders import costed, draw_records, make_header, write_records
from torchrec_neuroshard.bundles.descriptions import COMPUTE_DESCRIPTION
from torchrec_neuroshard.bundles.fit import (
    Evaluation,
    as_cost_model,
    evaluate,
    fit_model,
    physics_network,
    plan_errors,
    train,
)
from torchrec_neuroshard.bundles.fit_physics import fit_physics, fitted_kinds
from torchrec_neuroshard.bundles.format import Bundle
from torchrec_neuroshard.bundles.set_data import MIN_SETS, SetData, build_sets
from torchrec_neuroshard.bundles.settings import TrainConfig
from torchrec_neuroshard.bundles.training_loop import fit, seeded
from torchrec_neuroshard.cli import main
from torchrec_neuroshard.errors import ConfigError, RecordError
from torchrec_neuroshard.measure.records import CostRecord
from torchrec_neuroshard.models.physical import (
    WORKS,
    Physics,
    set_values,
    set_works,
    shard_works,
)


def run(
    errors: Sequence[torch.Tensor | float],
) -> tuple[torch.Tensor, nn.ParameterDict]:
    """Train two members with a weight and a bias each; every step adds 1 to all."""
    network = nn.ParameterDict({"weight": torch.zeros(2, 3), "bias": torch.zeros(2)})
    best = fit(
        network,
        torch.optim.SGD(network.parameters(), lr=1.0),
        [[epoch] for epoch, _ in enumerate(errors)],
        lambda _: -network["weight"].sum() - network["bias"].sum(),
        iter(errors).__next__,
    )
    return best, network


def test_each_member_keeps_its_own_best_epoch() -> None:
    errors = [torch.tensor(e) for e in ([3.0, 3.0], [1.0, 4.0], [2.0, 2.0])]
    best, network = run(errors)
    assert best.tolist() == [2, 3]
    assert network["weight"].tolist() == [[2.0] * 3, [3.0] * 3]
    assert network["bias"].tolist() == [2.0, 3.0]


@pytest.mark.parametrize(
    ("errors", "best"),
    [
        ([1.0, 1.0, 1.0], 1),  # ties go to the first
        ([1.0, 1.0 - 1e-15, 1.0], 2),  # too small for float32
        ([math.nan, math.nan], 0),  # no epoch: the initial weights
    ],
)
def test_one_error_is_of_the_whole_network(errors: list[float], best: int) -> None:
    found, network = run(errors)
    assert int(found) == best
    assert network["weight"].tolist() == [[float(best)] * 3] * 2
    assert network["bias"].tolist() == [float(best)] * 2


def test_seed_decides_and_leaves_the_callers_state() -> None:
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    drawn = []
    for seed in (1, 1, 2):
        with seeded(seed):
            assert torch.get_num_threads() == 1
            drawn.append(float(torch.rand(())))
    assert drawn[0] == drawn[1] != drawn[2]
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads


QUICK = TrainConfig(epochs=40, num_members=2, hidden=32, latent=4, head_hidden=16)


def test_learned_model_beats_physics_on_new_sets() -> None:
    training = build_sets(draw_records(300, 0))
    test = build_sets(draw_records(60, 1))
    network = train(training, QUICK)
    learned = evaluate("learned", as_cost_model(network, training, "x"), test)
    alone = as_cost_model(physics_network(fit_physics(training)), test, "x")
    physics = evaluate("physics", alone, test)
    assert learned.total.mean < 0.05
    assert learned.total.mean < physics.total.mean
    assert learned.total.tau > 0.95


def test_training_is_the_same_for_the_same_seed() -> None:
    data = build_sets(draw_records(60, 0))

    def weights(seed: int) -> torch.Tensor:
        network = train(data, dataclasses.replace(QUICK, epochs=3, seed=seed))
        return torch.cat([p.flatten() for p in network.parameters()])

    assert torch.equal(weights(0), weights(0))
    assert not torch.equal(weights(0), weights(1))


@pytest.mark.parametrize("epochs", [1, 9, 10, 11])
def test_any_number_of_steps_trains(epochs: int) -> None:
    data = build_sets(draw_records(20, 0))  # one batch
    network = train(data, dataclasses.replace(QUICK, epochs=epochs))
    assert all(p.isfinite().all() for p in network.parameters())


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_known_physics_is_recovered(device_type: str) -> None:
    """Times follow known constants and another cache size."""
    rng = np.random.default_rng(0)
    shards = build_sets(draw_records(80, 0)).features_NF
    works = shard_works(shards, 2.0**21), set_works(set_values(shards))
    mean = np.concatenate([w.mean(axis=0) for w in works])
    constants = rng.uniform(0.05, 0.2, (len(mean), 2)) / np.maximum(mean, 1e-9)[:, None]
    constants[~fitted_kinds(device_type)] = 0.0
    of_shards, of_sets = np.split(constants, [len(WORKS)])
    known = Physics(2.0**21, of_shards, of_sets)
    model = as_cost_model(physics_network(known), build_sets(draw_records(9, 0)), "x")
    training, data = (
        build_sets(costed(draw_records(200, seed), model), device_type)
        for seed in (0, 1)
    )
    found = as_cost_model(physics_network(fit_physics(training)), data, "physics")
    judged = evaluate("physics", found, data)
    assert judged.total.mean < 0.01
    assert judged.total.tau > 0.99


def test_a_start_decides_where_there_are_no_sets() -> None:
    """Three sets of narrow tables contain no information on wide ones."""
    few, many = build_sets(draw_records(3, 2)), build_sets(draw_records(200, 3))
    there = fit_physics(many)
    doubled = dataclasses.replace(few, costs_S2=2.0 * few.costs_S2)

    def error(physics: Physics) -> float:
        model = as_cost_model(physics_network(physics), many, "x")
        same = dataclasses.replace(many, costs_S2=2.0 * many.costs_S2)
        return evaluate("x", model, same).total.mean

    assert error(fit_physics(doubled, there)) < 0.5 * error(fit_physics(doubled))


def noisy(records: Sequence[CostRecord], seed: int) -> SetData:
    """Return the sets of records, with 10 % of noise on their times."""
    data = build_sets(records)
    noise = np.random.default_rng(seed).lognormal(0.0, 0.1, (data.num_sets, 1))
    return dataclasses.replace(data, costs_S2=data.costs_S2 * noise)


@pytest.mark.parametrize("num_sets", [300, 60])
def test_every_candidate_knows_its_uncertainty(num_sets: int) -> None:
    training, test = noisy(draw_records(num_sets, 0), 0), noisy(draw_records(200, 1), 1)
    config = dataclasses.replace(QUICK, tuning_steps=20)
    other = noisy(draw_records(300, 5), 5)
    start = as_cost_model(train(other, QUICK), other, "start")
    before = start.network.spread_2.clone()
    for started in (None, start):
        found = fit_model(training, test, config, start=started)
        for name, candidate in found.candidates.items():
            assert 0.75 < candidate.evaluation.inside < 1.0, name
    assert torch.equal(start.network.spread_2, before)


def test_devices_are_learned_together() -> None:
    """Few sets of one device, many of another that takes three times as long."""
    few, test = build_sets(draw_records(60, 0)), build_sets(draw_records(100, 2))
    many = build_sets(draw_records(300, 1, factor=3.0))
    alone, together = (
        evaluate("x", as_cost_model(train(few, QUICK, others=others), few, "x"), test)
        for others in ((), (many,))
    )
    assert together.total.mean < alone.total.mean


@pytest.mark.parametrize(
    ("num_sets", "drawn", "left_out"),
    [
        (300, 0, [60]),
        (300, 9, [60]),
        (300, 30, [30]),
        (50, 9, [10] * 5),
        (3, 0, [1] * 3),
    ],
)
def test_left_out_sets_judge(num_sets: int, drawn: int, left_out: list[int]) -> None:
    records = draw_records(num_sets, 0)
    data = build_sets(
        [dataclasses.replace(r, validation=r.index < drawn) for r in records]
    )
    splits = data.splits(np.random.default_rng(0), 0.2)
    assert [judged.num_sets for _, judged in splits] == left_out
    for training, judged in splits:
        times = [*training.costs_S2[:, 0], *judged.costs_S2[:, 0]]
        assert sorted(times) == sorted(data.costs_S2[:, 0])
    if len(splits) > 1:
        every = np.concatenate([judged.costs_S2 for _, judged in splits])
        assert sorted(every[:, 0]) == sorted(data.costs_S2[:, 0])
    elif drawn >= MIN_SETS:
        assert splits[0][1].for_validation_S.all()


def test_choice_does_not_favour_low_predictions() -> None:
    """Half and twice the time are equally wrong, though 50 % is less than 100 %."""
    data = build_sets(draw_records(40, 0))
    physics = fit_physics(data)

    def error(factor: float) -> Evaluation:
        scaled = dataclasses.replace(
            physics,
            constants_K2=factor * physics.constants_K2,
            set_constants_G2=factor * physics.set_constants_G2,
        )
        return evaluate("x", as_cost_model(physics_network(scaled), data, "x"), data)

    low, high = error(1e-3), error(1e3)
    assert low.log_error == pytest.approx(high.log_error, rel=0.05)
    assert low.total.mean < 1 < high.total.mean


def test_errors_are_told_by_workload() -> None:
    records = draw_records(40, 0)
    named = [
        dataclasses.replace(
            r,
            tables=tuple(
                dataclasses.replace(t, name=f"{'ab'[r.index < 10]}/{i}#{i}")
                for i, t in enumerate(r.tables)
            ),
        )
        for r in records
    ]
    data = build_sets(named)
    wrong = np.where(data.workload_S == "b", 2.0, 1.0)[:, None]
    model = as_cost_model(physics_network(fit_physics(data)), data, "x")
    judged = dataclasses.replace(data, costs_S2=data.costs_S2 * wrong)
    found = evaluate("x", model, judged).workloads
    assert {name: errors.number for name, errors in found.items()} == {"a": 30, "b": 10}
    assert found["b"].mean > found["a"].mean + 0.2


def test_plans_show_what_the_search_cannot_balance() -> None:
    """Plan 0 has errors of +-10 %, plan 1 a common factor; other sets do not count."""
    records = draw_records(9, 0)
    plans = [0] * 4 + [1] * 3 + [None] * 2
    data = build_sets(
        [dataclasses.replace(r, plan=p) for r, p in zip(records, plans, strict=True)]
    )
    model = as_cost_model(physics_network(fit_physics(data)), data, "x")
    predicted = model.predict_sets(data.features_NF, data.set_ids_N, data.num_sets)
    factors = np.array([1.1, 1 / 1.1, 1.1, 1 / 1.1, 2, 2, 2, 9, 9])[:, None]
    measured = dataclasses.replace(data, costs_S2=predicted * factors)
    found = plan_errors(model, measured)
    assert found is not None and (found.num_plans, found.num_sets) == (2, 7)
    assert found.spread == pytest.approx(math.log(1.1) * math.sqrt(4 / 5))
    busiest = [
        predicted[rows].sum(axis=1).max() / measured.costs_S2[rows].sum(axis=1).max()
        for rows in (slice(4), slice(4, 7))
    ]
    assert found.busiest == pytest.approx(math.sqrt(math.prod(busiest)))
    assert plan_errors(model, data.select(np.array([7, 8]))) is None


def test_bad_input_is_named() -> None:
    record = draw_records(1, 0)[0]
    for records, message in (
        ([], "no records to train on"),
        ([dataclasses.replace(record, fwd_ms=0.0)], r"record 0 has times 0\.0"),
        ([record], "1 sets are too few"),
    ):
        with pytest.raises(RecordError, match=message):
            data = build_sets(records)
            fit_model(data, data, QUICK)
    with pytest.raises(ConfigError, match="at least 1, got 0, 8 and 500"):
        TrainConfig(epochs=0)


def test_command_trains_on_steady_records_and_keeps_the_better_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = draw_records(160, 0, lambda t: t.embedding_dim**0.5)
    fwd_ms, bwd_ms = 1.1 * records[4].fwd_ms, 1.1 * records[4].bwd_ms
    again = dataclasses.replace(
        records[4], index=160, repeat_of=4, fwd_ms=fwd_ms, bwd_ms=bwd_ms
    )
    disturbed = dataclasses.replace(records[5], index=161, spread=0.8)
    few = [r for r in records[:80] if not r.held_out or r.index < 16]
    path, less, out = (tmp_path / n for n in ("r.jsonl", "few.jsonl", "mine"))
    write_records(path, make_header(), [*records, again, disturbed])
    write_records(less, make_header(), few)
    options = ["--out", str(out), "--epochs", "1", "--members", "1"]
    assert main(["train", str(less), *options]) == 2
    assert "got 60 and 4" in capsys.readouterr().err
    assert main(["train", str(path), *options]) == 0
    assert "learned: forward " in capsys.readouterr().out
    model, trained_on = (
        Bundle(out).cost_model(),
        COMPUTE_DESCRIPTION.read_info(out).trained_on,
    )
    kept = trained_on["kept"]
    assert model.name == "mine"
    assert trained_on["errors"][kept] == min(trained_on["errors"].values())
    assert trained_on["num_training_sets"] == 120 and trained_on["num_disturbed"] == 1
    card = (out / "CARD.md").read_text()
    judged = evaluate(kept, model, build_sets(records[::4]))
    errors = f"{judged.forward.mean:.1%} | {judged.backward.mean:.1%} |"
    assert f"| **{kept}** | {trained_on['errors'][kept]:.1%} | {errors}" in card
    assert "differs by 10.0% (median)" in card and f"Kept `{kept}`" in card
    assert "| disturbed records, left out | 1 |" in card
