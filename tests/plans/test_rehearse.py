"""Rehearsals: every rank of a plan is built without its devices."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec import EmbeddingBagCollection
from torchrec.distributed import collective_utils
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embedding_tower_sharding import (
    EmbeddingTowerCollectionSharder,
)
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.itep_embeddingbag import ITEPEmbeddingBagCollectionSharder
from torchrec.distributed.mc_embedding import (
    ManagedCollisionEmbeddingCollectionSharder,
)
from torchrec.distributed.mc_embeddingbag import (
    ManagedCollisionEmbeddingBagCollectionSharder,
)
from torchrec.distributed.planner import ParameterConstraints, Topology
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import PoolingType
from torchrec.modules.embedding_tower import EmbeddingTower, EmbeddingTowerCollection
from torchrec.modules.itep_embedding_modules import ITEPEmbeddingBagCollection
from torchrec.modules.itep_modules import GenericITEPModule
from torchrec.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)

from tests.builders import (
    GIB,
    META,
    bag_config,
    bag_sharders,
    bags,
    by_table,
    each,
    gpus,
    make_ebc,
    make_planner,
    only,
    sequences,
    stock_planner,
    types_of,
)
from torchrec_neuroshard import group_topology, rehearse
from torchrec_neuroshard.cli import main
from torchrec_neuroshard.errors import PlanFileError
from torchrec_neuroshard.plans.plan_files import save_plan
from torchrec_neuroshard.tables.profile import zipf_profile


def plan_for(model: nn.Module, sharders: list[Any], world: int, **only: Any) -> Any:
    """TorchRec's own plan for GPUs of 8 GiB."""
    topology = gpus(world, local_world_size=min(2, world), hbm_cap=8 * GIB)
    names = [f"t{i}" for i in range(8)] + [f"s{i}" for i in range(8)]
    constraints = {name: ParameterConstraints(**only) for name in names}
    planner = stock_planner(topology, constraints=constraints)
    return topology, planner.plan(model, sharders)


@pytest.mark.parametrize(
    ("kind", "kernel"),
    [
        ("column_wise", "fused_uvm"),
        ("row_wise", "fused_uvm_caching"),
        ("table_row_wise", "fused"),
        ("data_parallel", "dense"),
    ],
)
def test_torchrec_plans_of_all_types_run(kind: str, kernel: str) -> None:
    model = nn.ModuleDict({"b": make_ebc([(1000, 64)] * 3)})
    if kind != "table_row_wise":  # TorchRec has no such sequences
        model["s"] = sequences(64, 64)
    sharders = [*bag_sharders(), EmbeddingCollectionSharder()]
    topology, plan = plan_for(
        model,
        sharders,
        4,
        sharding_types=[kind],
        compute_kernels=[kernel],
        min_partition=32,
    )
    report = rehearse(model, plan, topology, sharders, batch_size=64)
    assert report.runs and report.num_built == 4, str(report)
    assert [r.num_kernels for r in report.ranks] == [len(model)] * 4
    # Of replicas on four ranks, their gradients as well.
    num_tables = {"fused": 3, "dense": 5 * 4 * 2}.get(kernel, 0)
    assert sum(r.weights_bytes for r in report.ranks) == num_tables * 4 * 64 * 1000
    assert "every rank can run the plan" in str(report)
    assert json.loads(json.dumps(report.to_json()))["world_size"] == 4


def test_towers_run() -> None:
    """TorchRec changes a tower's sharding types in each rank's plan."""
    towers = [EmbeddingTower(bags(bag_config(i)), nn.Linear(2, 2)) for i in range(2)]
    model = nn.ModuleList([EmbeddingTowerCollection(towers)])
    sharders = [EmbeddingTowerCollectionSharder()]
    topology, plan = plan_for(model, sharders, 4, sharding_types=["table_row_wise"])
    report = rehearse(model, plan, topology, sharders, batch_size=8)
    assert report.runs and report.num_built == 4, str(report)
    assert sum(r.num_kernels for r in report.ranks) == 4
    assert set(types_of(plan).values()) == {"table_row_wise"}


def test_the_process_and_the_model_stay_unchanged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # As of a process that has sharded nothing: on a cluster it still has to ask.
    monkeypatch.setattr(collective_utils, "_INITIALIZED", False, raising=False)
    model = make_ebc([(2**26, 1024)])  # 256 GiB, none of which is allocated
    before = dict(os.environ), sys.excepthook, [id(p) for p in model.parameters()]
    topology, plan = plan_for(model, bag_sharders(), 64, sharding_types=["row_wise"])
    report = rehearse(model, plan, topology, bag_sharders(), batch_size=8)
    assert report.num_built == 64
    assert not dist.is_initialized()
    after = dict(os.environ), sys.excepthook, [id(p) for p in model.parameters()]
    assert after == before
    assert isinstance(next(model.children()), nn.ModuleDict)
    assert not vars(collective_utils)["_INITIALIZED"]


def test_means_that_torchrec_returns_wrong_are_a_fault() -> None:
    """It divides the outputs of t1, too; its own planner does not look at this."""
    mean = bag_config(0, 1000, 64, pooling=PoolingType.MEAN)
    model = nn.ModuleDict({"b": bags(mean, bag_config(1, 1000, 64))})
    constraints = only("t0", sharding_types=["row_wise"]) | only(
        "t1", sharding_types=["table_wise"]
    )
    topology = gpus(2)
    plan = stock_planner(topology, constraints=constraints).plan(model, bag_sharders())
    report = rehearse(model, plan, topology, bag_sharders(), batch_size=64)
    assert not report.runs
    assert "table 'b.t1': TorchRec divides its outputs by" in str(report)


def test_missing_memory_and_torchrecs_errors_are_reported() -> None:
    model = make_ebc([(100_000, 128), (100_000, 128)])
    topology, plan = plan_for(model, bag_sharders(), 2, sharding_types=["table_wise"])
    room = 52_000_000  # the weights have it, but not what a step takes beside them
    topology.devices[1].storage.hbm = room
    report = rehearse(model, plan, topology, bag_sharders(), batch_size=8)
    assert [len(r.faults) for r in report.ranks] == [0, 1]
    (fault,) = report.ranks[1].faults
    assert 100_000 * 128 * 4 < room < report.ranks[1].peak_bytes
    assert fault.startswith("rank 1 needs 0.05 GiB at the peak of a step (0.05 GiB we")
    assert "too little. Plan with" in fault and "use more ranks" in fault
    assert f"- rank 1: {fault}" in str(report)

    # Offsets of columns in a table that has rows cut: TorchRec cannot tell its ranks.
    plan.plan[""]["t1"].sharding_spec = None
    report = rehearse(model, plan, topology, bag_sharders(), batch_size=8)
    assert not report.runs and report.num_built == 0
    assert "DistributedModelParallel raises" in report.ranks[0].faults[0]


def make_model() -> EmbeddingBagCollection:
    return make_ebc([(1000, 64), (1000, 32)])


def test_the_command_uses_the_plan_files_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    size, path, out = 1000 * 64 * 4, tmp_path / "plan.json", tmp_path / "report.json"

    def constraints(*samples: int) -> dict[str, ParameterConstraints]:
        return by_table(
            sharding_types=[["table_wise"]] * 2,
            compute_kernels=[["fused_uvm"]] * 2,
            pooling_factors=[[3.0]] * 2,
            batch_sizes=[[n] for n in samples],
        )

    model, sharders = make_model(), bag_sharders()
    planner = make_planner(
        topology=group_topology(
            gpus(4, hbm_cap=GIB, ddr_cap=2 * size), 2, sync_interval=5
        ),
        pipeline_type="train_sparse_dist",
        constraints=constraints(8, 40),
    )
    plan = planner.plan(model, sharders)
    save_plan(plan, path, model=model, planner=planner)
    monkeypatch.setattr(sys, "path", list(sys.path))
    command = ["rehearse", str(path), f"{__name__}:make_model", "--json", str(out)]
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert "2 tables on 2 ranks, 64 samples each" in shown
    assert "pipeline train_sparse_dist" in shown
    assert "one of 2 sharding groups of 4 ranks" in shown and "every 5 iter" in shown
    # A feature has as many of a larger batch's samples as of the plan's.
    assert main([*command, "--pipeline", "none", "--batch-size", "128"]) == 0
    assert "pipeline none" in capsys.readouterr().out
    told = rehearse(
        model,
        plan,
        planner.topology,
        sharders,
        batch_size=128,
        constraints=constraints(16, 80),
    )
    read = json.loads(out.read_text())["ranks"]
    assert [r["activation_bytes"] for r in read] == [
        r.activation_bytes for r in told.ranks
    ]
    data = json.loads(path.read_text())
    data["fingerprint"]["host_memory_bytes"] = [size - 1] * 2
    path.write_text(json.dumps(data))
    assert main(command) == 1
    fault = capsys.readouterr().out
    assert " of host memory and has " in fault
    assert main(["rehearse", str(path), "nothing"]) == 2
    assert "package.module:function" in capsys.readouterr().err


def make_namesakes() -> nn.ModuleDict:
    """Two modules have a table t0, read by other features."""
    return nn.ModuleDict(
        {path: bags(bag_config(0, feature_names=[path])) for path in ("busy", "idle")}
    )


def test_the_command_counts_the_busiest_table_of_a_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    profiles = {
        path: zipf_profile(
            batch_size=64, pooling_factor=n, num_embeddings=1000, exponent=0.0
        )
        for path, n in (("busy", 50.0), ("idle", 1.0))
    }
    model, sharders = make_namesakes(), bag_sharders()
    planner = make_planner(1, "cuda", profiles=profiles)
    plan, path = planner.plan(model, sharders), tmp_path / "plan.json"
    save_plan(plan, path, model=model, planner=planner)
    told = rehearse(
        model, plan, planner.topology, sharders, batch_size=64, profiles=profiles
    )
    monkeypatch.setattr(sys, "path", list(sys.path))
    out = tmp_path / "report.json"
    names = str(path), f"{__name__}:make_namesakes"
    assert main(["rehearse", *names, "--json", str(out)]) == 0
    [rank] = json.loads(out.read_text())["ranks"]
    assert rank["activation_bytes"] >= told.ranks[0].activation_bytes


def test_every_optimizer_of_gpus_is_built() -> None:
    """What FBGEMM refuses on every device stays a fault."""
    refused = {
        **dict.fromkeys(("sgd", "row_wise_adagrad"), "deprecated"),
        **dict.fromkeys(("shampoo", "shampoo_v2", "madgrad"), "not supported"),
        "exact_row_wise_weighted_adagrad": "not supported",
        **dict.fromkeys(("lars_sgd", "none"), "Getting optimizer state"),
    }
    model = make_ebc([(1000, 64), (1000, 64)])
    constraints = each(2, "column_wise", min_partition=32)
    for optimizer in EmbOptimType:
        sharders = [EmbeddingBagCollectionSharder({"optimizer": optimizer})]
        plan = stock_planner(gpus(2), constraints=constraints).plan(model, sharders)
        report = rehearse(model, plan, gpus(2), sharders, batch_size=8)
        faults = " ".join(report.ranks[0].faults)
        assert refused.get(optimizer.value, "") in faults
        assert report.runs == (optimizer.value not in refused), f"{optimizer} {report}"
        assert report.num_built == 2 * report.runs
    # FBGEMM has no such CPU kernel, so a job on CPUs cannot run it.
    cpus = Topology(2, "cpu")
    sharders = [EmbeddingBagCollectionSharder({"optimizer": EmbOptimType.ADAM})]
    plan = stock_planner(cpus, constraints=constraints).plan(model, sharders)
    report = rehearse(model, plan, cpus, sharders, batch_size=8)
    assert "adam is not supported in CPU mode" in report.ranks[0].faults[0]


def test_tables_under_adam_are_rehearsed_on_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "t.csv"
    path.write_text("name,num_embeddings,embedding_dim,optimizer\nt,1000000,64,adam\n")
    command = ["plan", str(path), "--card", "h100", "--ranks", "2", "--rehearse"]
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert "every rank can run the plan: 1 tables on 2 ranks" in shown
    assert "2 ranks built" in shown


def managed(kind: str, inner: Any) -> nn.Module:
    """Let a module's tables take any id, mapped by sorting or by hashing."""
    from torchrec.modules.hash_mc_modules import HashZchManagedCollisionModule

    is_bag = isinstance(inner, EmbeddingBagCollection)
    configs = inner.embedding_bag_configs() if is_bag else inner.embedding_configs()
    maps: dict[str, Any] = {}
    for config in configs:
        rows, ids = config.num_embeddings, 2**40
        maps[config.name] = (
            HashZchManagedCollisionModule(
                zch_size=rows, device=META, total_num_buckets=4, input_hash_size=ids
            )
            if kind == "hashed"
            else MCHManagedCollisionModule(
                zch_size=rows,
                device=META,
                eviction_policy=DistanceLFU_EvictionPolicy(),
                eviction_interval=1,
                input_hash_size=ids,
                buckets=4,
            )
        )
    outer: Any = ManagedCollisionEmbeddingCollection
    if is_bag:
        outer = ManagedCollisionEmbeddingBagCollection
    module: nn.Module = outer(inner, ManagedCollisionCollection(maps, configs))
    return module


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
@pytest.mark.parametrize("kind", ["sorted", "hashed"])
def test_managed_collision_is_built(kind: str) -> None:
    rows = 400_000_000  # 25 GB of weights and up to 13 GB of maps, none allocated
    bags_, plain = make_ebc([(rows, 8)]), sequences(8, rows=rows)
    model = nn.ModuleList([managed(kind, bags_), managed(kind, plain)])
    sharders: list[Any] = [
        ManagedCollisionEmbeddingBagCollectionSharder(),
        ManagedCollisionEmbeddingCollectionSharder(),
    ]
    for world in (1, 2, 4):
        topology = gpus(world, hbm_cap=64 * GIB)
        plan = stock_planner(topology).plan(model, sharders)
        report = rehearse(model, plan, topology, sharders, batch_size=8)
        assert report.runs and report.num_built == world, str(report)
    # Shards that end between two buckets.
    first, second, *_ = plan.plan["0"]["t0"].sharding_spec.shards
    first.shard_sizes[0] -= 4
    second.shard_sizes[0], second.shard_offsets[0] = rows // 4 + 4, rows // 4 - 4
    report = rehearse(model, plan, topology, sharders, batch_size=8)
    if kind == "hashed":
        assert "does not align with bucket" in report.ranks[0].faults[0]


@pytest.mark.parametrize("sharding_type", ["table_wise", "row_wise"])
def test_pruned_tables_are_built_without_their_pruning(sharding_type: str) -> None:
    itep = GenericITEPModule(table_name_to_unpruned_hash_sizes={"t0": 4000}, lookups=[])
    model = ITEPEmbeddingBagCollection(make_ebc([(1000, 64), (1000, 64)]), itep)
    sharders = [ITEPEmbeddingBagCollectionSharder()]
    topology, plan = plan_for(model, sharders, 2, sharding_types=[sharding_type])
    report = rehearse(model, plan, topology, sharders, batch_size=8)
    assert report.runs and report.num_built == 2
    assert "not built: the pruning state of ITEP modules" in str(report)


@pytest.mark.parametrize(
    ("error", "is_of_the_plan"),
    [
        ("Torch not compiled with CUDA enabled", False),
        ("Found no NVIDIA driver on your system", False),
        ("Cannot copy out of meta tensor; no data!", False),
        ("Could not run 'x' with arguments from the 'Meta' backend", False),
        ("'_OpNamespace' 'fbgemm' object has no attribute 'x'", False),
        ("table t0 is too wide", True),
    ],
)
def test_what_needs_the_device_is_a_note(
    monkeypatch: pytest.MonkeyPatch, error: str, is_of_the_plan: bool
) -> None:
    def shard(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(error)

    model = make_model()
    topology, plan = plan_for(model, bag_sharders(), 2, sharding_types=["row_wise"])
    monkeypatch.setattr(EmbeddingBagCollectionSharder, "shard", shard)
    report = rehearse(model, plan, topology, bag_sharders(), batch_size=8)
    assert report.runs != is_of_the_plan and report.num_built == 0
    first = "no fault found, but not every rank could be built here"
    if is_of_the_plan:
        first = "2 ranks cannot run the plan"
    assert str(report).startswith(first)
    note = f"not built: ranks 0-1 need devices (RuntimeError: {error})"
    assert (note in str(report)) != is_of_the_plan
    # Memory is checked all the same.
    topology.devices[1].storage.hbm = 1000
    report = rehearse(model, plan, topology, bag_sharders(), batch_size=8)
    assert "too little" in report.ranks[1].faults[-1]


@pytest.mark.parametrize(
    ("kind", "other", "message"),
    [
        ("row_wise", gpus(16, 4), "'t0' is row_wise on 8 ranks, .* topology has 16"),
        ("data_parallel", gpus(16, 4), "data_parallel on 8 ranks, .* topology has 16"),
        (
            "table_row_wise",
            gpus(8, 8),
            r"cuda:0' of rank 4, .* \(8 ranks, 8 per node\)",
        ),
        ("column_wise", Topology(8, "cpu"), "'cuda:0' of rank 0, .* has 'cpu' there"),
    ],
)
def test_plans_for_other_ranks_or_devices_are_refused(
    kind: str, other: Topology, message: str
) -> None:
    model, constraints = make_model(), each(2, kind, min_partition=32)
    plan = stock_planner(gpus(8, 4), constraints=constraints).plan(
        model, bag_sharders()
    )
    with pytest.raises(PlanFileError, match=message):
        rehearse(model, plan, other, bag_sharders(), batch_size=8)
    # No shard is on the last ranks, which the report says.
    constraints = each(2, "table_wise")
    plan = stock_planner(gpus(2), constraints=constraints).plan(model, bag_sharders())
    report = rehearse(model, plan, gpus(4), bag_sharders(), batch_size=8)
    assert str(report).startswith(
        "every rank can run the plan: 2 tables on 2 of 4 rank"
    )


def test_plans_without_tables_run_nowhere() -> None:
    with pytest.raises(PlanFileError, match=r"no tables.* 'ebc\.t0', 'ebc\.t1'\. Pass"):
        rehearse(
            nn.ModuleDict({"ebc": make_model()}),
            ShardingPlan({}),
            gpus(2),
            bag_sharders(),
            batch_size=8,
        )
    model = nn.ModuleDict({"ebc": make_model(), "s": sequences(64)})
    topology, plan = plan_for(model, bag_sharders(), 2, sharding_types=["row_wise"])
    report = rehearse(model, plan, topology, bag_sharders(), batch_size=8)
    assert "not in the plan, so not sharded: tables 's.s0'" in str(report)
