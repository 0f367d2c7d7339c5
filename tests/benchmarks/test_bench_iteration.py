"""Plans made by hand, and how predictions of iterations are judged."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import bench_iteration as bench
from harness.layouts import LAYOUTS, MAX_REPLICA_BYTES, Layout
from harness.models import table_paths
from tests.builders import make_tables, torchrun

TABLES = make_tables(
    [64, 32, 16, 8, 4, 128, 64, 32], [10, 4001, 4000, 3999, 5000, 4000, 4000, 4000], 2.0
)
NUM_RANKS = 2


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_layouts_place_every_cell_once(layout: Layout) -> None:
    paths = table_paths(TABLES, num_modules=2)
    plan = layout.plan(TABLES, paths, NUM_RANKS)
    assert list(plan.plan) == ["embeddings", "embeddings_1"]
    types: Counter[str] = Counter()
    for table, path in zip(TABLES, paths, strict=True):
        sharding = plan.plan[path][table.name]
        types[sharding.sharding_type] += 1
        if sharding.sharding_type == "data_parallel":
            assert table.weight_bytes <= MAX_REPLICA_BYTES
            continue
        held = np.zeros((table.num_embeddings, table.embedding_dim), dtype=int)
        shards = sharding.sharding_spec.shards
        for shard, rank in zip(shards, sharding.ranks, strict=True):
            (top, left), (rows, width) = shard.shard_offsets, shard.shard_sizes
            held[top : top + rows, left : left + width] += 1
            assert width % 4 == 0 and shard.placement.rank() == rank
        assert (held == 1).all()
    assert set(types) == {*layout.shares, *["data_parallel"] * layout.replicates}


def test_pairs_beyond_the_noise_count() -> None:
    measured = [10.0, 10.4, 20.0, 40.0]
    said = [11.0, 9.0, 10.0, 60.0]
    found = bench.judge(said, measured, noise=0.05)
    assert found["num_pairs"] == 5  # all but the first two plans
    assert found["pairs_in_order"] == 4  # the first and the third are not
    assert found["best_predicted_over_best"] == pytest.approx(1.04)
    assert found["largest_error"] == pytest.approx(0.5)
    assert found["mean_error"] == pytest.approx(np.mean([0.1, 1.4 / 10.4, 0.5, 0.5]))
    assert bench.judge(measured, measured, 0.0)["spearman"] == pytest.approx(1.0)


def test_noise_is_what_plans_and_rounds_do_not_explain() -> None:
    plans, rounds = np.array([[10.0], [20.0], [35.0]]), np.array([[1.0, 1.3]])
    assert bench.noise_of(plans * rounds) == pytest.approx(0.0, abs=1e-9)
    rng = np.random.default_rng(0)
    drawn = rng.normal(0.0, 0.03, (2_000, 3))
    many = np.exp(drawn) * rng.uniform(5.0, 50.0, (2_000, 1))
    # Two standard errors of the difference of two means of three.
    assert bench.noise_of(many) == pytest.approx(
        np.expm1(2 * 0.03 * np.sqrt(2 / 3)), rel=0.05
    )


@pytest.mark.distributed
@pytest.mark.nightly
def test_every_plan_is_predicted_trained_and_judged(tmp_path: Path) -> None:
    out = tmp_path / "run"
    options = ["--cost-model", "cpu_epyc", "--models", "two-modules-40"]
    options += ["--rounds", "2", "--iterations", "1", "--warm-up", "1"]
    options += ["--max-rows", "1000", "--batch-size", "32", "--out", str(out)]
    torchrun(NUM_RANKS, bench.__file__, *options)
    data = json.loads(out.with_suffix(".json").read_text())
    (model,) = data["models"]
    names = [plan["name"] for plan in model["plans"]]
    assert names == [*bench.PLANNERS, *(layout.name for layout in LAYOUTS)]
    for plan in model["plans"]:
        assert plan["embedding_ms"]["n"] == plan["iteration_ms"]["n"] == 2
        assert plan["embedding_ms"]["median"] > 0 < plan["iteration_ms"]["median"]
        before, after = (plan["predicted"][name] for name in ("before", "after"))
        assert 0.0 < after <= before + 0.001
    assert set(model["judged"]) == set(bench.PREDICTIONS)
    page = out.with_suffix(".md").read_text()
    assert all(f"{model['name']}: {name} |" in page for name in names)
