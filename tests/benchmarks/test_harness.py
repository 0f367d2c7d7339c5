"""Helpers of the benchmarks: options, models, and training runs on one rank."""

from __future__ import annotations

import dataclasses
import subprocess
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology

from harness.models import ConcatDLRM, draw_clicks
from harness.provenance import commit
from harness.training_runs import TrialConfig, TrialError, run_trial
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


def test_trial_tells_times_losses_and_memory(tmp_path: Path) -> None:
    tables = make_tables([8, 12], 100, 2.0, optimizer="sgd")
    quick = TrialConfig(warm_up=1, iterations=3, phase_iterations=2, learning_rate=0.5)
    plan = EmbeddingShardingPlanner(
        topology=Topology(world_size=1, compute_device="cpu"), batch_size=16
    ).plan(ConcatDLRM(tables, CPU), [EmbeddingBagCollectionSharder()])
    batches = [draw_clicks(tables, 16, seed, CPU) for seed in range(2)]
    readings = iter([4.0, 6.0])
    store = f"file://{tmp_path / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        assert dist.group.WORLD is not None
        trial = partial(run_trial, plan, control=dist.group.WORLD)
        found = trial(tables, batches, quick, reference=lambda: next(readings))
        again, other = (
            trial(tables, batches, config).losses
            for config in (quick, dataclasses.replace(quick, seed=1))
        )
        renamed = [dataclasses.replace(t, name=f"x{t.name}") for t in tables]
        with pytest.raises(TrialError, match="rank 0: KeyError: 'xt0'"):
            trial(renamed, batches, quick)
    finally:
        dist.destroy_process_group()
    assert len(found.iteration_ms) == 3 and min(found.iteration_ms) > 0
    assert len(found.embedding_ms) == 2
    assert set(found.phases_ms) == set(found.rank_phases_ms) == set(PHASES)
    (forward,) = found.rank_phases_ms["fwd_compute"]
    assert forward == pytest.approx(found.phases_ms["fwd_compute"])  # of the only rank
    assert len(found.losses) == 1 + 3 + 1 + 2  # hooks need one to settle
    assert found.losses[2] < found.losses[0]  # the same batch again
    assert found.weight_bytes == (4 * 100 * (8 + 12),)
    assert found.reference_ms == (5.0,)
    assert again == found.losses
    assert other[0] != again[0]  # other first weights
