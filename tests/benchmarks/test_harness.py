"""Helpers of the benchmarks: options, models, and training runs on one rank."""

from __future__ import annotations

import dataclasses
import subprocess
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.types import ShardingPlan

from harness.models import ConcatDLRM, draw_clicks, sharders
from harness.provenance import commit
from harness.training_runs import TrialConfig, TrialError, train_in_turn
from tests.builders import ATTACHES_OPTIMIZERS, CPU, make_tables
from torchrec_neuroshard.costs.simulator import PHASES

pytestmark = [
    *ATTACHES_OPTIMIZERS,
    *(
        pytest.mark.filterwarnings(f"ignore:{text}")
        for text in (
            "`broadcast_buffers` is deprecated",
            # TorchRec 1.6 asks for the group's one device.
            "`_get_pg_default_device` will be deprecated",
            "Multiple backends are registered with this ProcessGroup",
            # Replicas train nevertheless; see tests/distributed/test_support.py.
            "fbgemm..dense_embedding_codegen_lookup_function",
        )
    ),
]


def test_changed_sources_mark_the_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*arguments: str) -> None:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", *identity, *arguments], check=True, capture_output=True)

    monkeypatch.chdir(tmp_path)
    assert commit() == "unknown"
    source, result = Path("a.py"), Path("benchmarks/results/a.json")
    result.parent.mkdir(parents=True)
    for path in (source, result):
        path.write_text("1")
    git("init")
    git("add", ".")
    git("commit", "-m", "first")
    clean = commit()
    result.write_text("2")
    assert commit() == clean and "-" not in clean
    source.write_text("2")
    assert commit() == f"{clean}-dirty"


def test_plans_train_in_turn(tmp_path: Path) -> None:
    tables = make_tables([8, 12, 8], 100, 2.0, optimizer="sgd")
    tables = (*tables[:2], dataclasses.replace(tables[2], pooled=False))
    quick = TrialConfig(warm_up=1, iterations=3, phase_iterations=2, learning_rate=0.5)
    plan = EmbeddingShardingPlanner(
        topology=Topology(world_size=1, compute_device="cpu"), batch_size=16
    ).plan(ConcatDLRM(tables, CPU), sharders())
    batches = [draw_clicks(tables, 16, seed, CPU) for seed in range(2)]
    readings = iter([4.0, 5.0, 6.0, 7.0])
    store = f"file://{tmp_path / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    failures: dict[str, str] = {}
    try:
        assert dist.group.WORLD is not None
        train = partial(train_in_turn, control=dist.group.WORLD)
        plans = {"one": plan, "other": plan, "dense": None}
        found = list(
            train(plans, 2, tables, batches, quick, reference=lambda: next(readings))
        )
        changed = dataclasses.replace(quick, seed=1)
        [(_, reseeded)] = train({"one": plan}, 1, tables, batches, changed)
        renamed = [dataclasses.replace(t, name=f"x{t.name}") for t in tables]
        with pytest.raises(TrialError, match="rank 0: KeyError: 'x"):
            list(train({"one": plan}, 1, renamed, batches, quick))
        left = train(
            {"bad": ShardingPlan({}), "good": plan},
            1,
            tables,
            batches,
            quick,
            on_failure=lambda name, error: failures.update({name: str(error)}),
        )
        assert [name for name, _ in left] == ["good"]
    finally:
        dist.destroy_process_group()
    assert list(failures) == ["bad"]
    names = [name for name, _ in found]
    assert names[3:] == names[2::-1] and set(names) == set(plans)  # A B, B A
    by_name = {n: [r for name, r in found if name == n] for n in plans}
    first, second = by_name["one"]
    assert len(first.iteration_ms) == 3 and min(first.iteration_ms) > 0
    assert len(first.embedding_ms) == 2
    assert set(first.phases_ms) == set(first.rank_phases_ms) == set(PHASES)
    (forward,) = first.rank_phases_ms["fwd_compute"]
    assert forward == pytest.approx(first.phases_ms["fwd_compute"])  # of the only rank
    assert len(first.losses) == 1 + 3 + 2 and len(second.losses) == 3 + 2
    assert second.losses[-1] < first.losses[0]  # it goes on learning
    assert first.weight_bytes == (4 * 100 * (8 + 12 + 8),)
    assert (first.reference_ms, second.reference_ms) == ((4.0,), (5.0,))
    assert by_name["other"][1].losses == second.losses
    assert reseeded.losses[0] != first.losses[0]  # other first weights
    dense, _ = by_name["dense"]
    assert dense.weight_bytes == (0,) and not dense.embedding_ms
    assert max(dense.iteration_ms) < max(first.iteration_ms)
