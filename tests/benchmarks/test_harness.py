"""What the benchmarks share: options, models, and training runs on one rank."""

from __future__ import annotations

import dataclasses
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.types import ShardingPlan
from torchrec.sparse.jagged_tensor import KeyedTensor

from harness.models import (
    OPTIMIZER_CLASSES,
    ConcatDLRM,
    build_collection,
    draw_clicks,
    fill_tables,
    local_tables,
)
from harness.options import option, read_options
from harness.provenance import commit
from harness.ranks import machine_speeds, scaled_median
from harness.training_runs import TrialConfig, TrialError, run_trial, take_turns
from tests.builders import ATTACHES_OPTIMIZERS, CPU
from torchrec_neuroshard.planner.options.table_reader import TableReader
from torchrec_neuroshard.simulator import PHASES
from torchrec_neuroshard.tables import OPTIMIZERS, TableConfig

pytestmark = [
    *ATTACHES_OPTIMIZERS,
    *(
        pytest.mark.filterwarnings(f"ignore:{text}")
        for text in (
            r"`torch\.jit\.\w+` is deprecated",
            "This API is deprecated",
            "`broadcast_buffers` is deprecated",
            # TorchRec 1.6 asks for the group's one device.
            "`_get_pg_default_device` will be deprecated",
            "Multiple backends are registered with this ProcessGroup",
        )
    ),
]


@dataclass(frozen=True, kw_only=True)
class Config:
    size: int = option(8192, "samples, 10 % of them new", 64)
    name: str = option("all", "which")


def test_options_are_the_fields() -> None:
    def read(*arguments: str) -> Config:
        return read_options(Config, arguments, "Tell.")

    assert read("--name", "one") == Config(size=8192, name="one")
    assert read("--quick") == Config(size=64, name="all")
    assert read("--quick", "--size", "3") == Config(size=3, name="all")


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


def test_every_second_round_is_the_one_before_backwards() -> None:
    names = ["a", "b", "c", "d"]
    orders = [take_turns(names, number) for number in range(8)]
    for one, other in zip(orders[::2], orders[1::2], strict=True):
        assert other == one[::-1]
    assert all(sorted(order) == names for order in orders)
    assert len({tuple(order) for order in orders}) > 2


def test_speeds_bring_a_round_to_the_models_milliseconds() -> None:
    speeds = machine_speeds([[4.0, 4.0, 9.0], [8.0]], nominal_ms=2.0)
    assert speeds == [0.5, 0.25]
    rounds: list[dict[str, Any]] = [{"ms": [6.0, 8.0]}, {"ms": [12.0]}]
    assert scaled_median(rounds, speeds, lambda r: r["ms"]) == 3.0
    assert machine_speeds([[4.0], [8.0]], nominal_ms=0.0) == [1.0, 1.0]
    assert machine_speeds([[0.0]], nominal_ms=2.0) == [1.0]  # GPUs have no reference


TABLES = (
    TableConfig(name="a", num_embeddings=70_000, embedding_dim=8, pooling_factor=2.0),
    TableConfig(
        name="b",
        num_embeddings=50,
        embedding_dim=12,
        pooling_factor=3.0,
        num_features=2,
        optimizer="sgd",
    ),
)


Cut = tuple[int, int, int, int]
"""First row and column, rows and columns of a shard."""


class Sharded(nn.Module):
    """What a sharded model says that a rank holds."""

    def __init__(self, cuts: dict[str, list[Cut]]) -> None:
        super().__init__()
        self.shards = {name: list(map(shard, parts)) for name, parts in cuts.items()}

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        tables = {
            f"embeddings.embedding_bags.{name}.weight": SimpleNamespace(
                local_shards=partial(list, shards)
            )
            for name, shards in self.shards.items()
        }
        return {**tables, "bottom.weight": torch.ones(3)}


def shard(cut: Cut) -> SimpleNamespace:
    top, left, height, width = cut
    return SimpleNamespace(
        tensor=torch.zeros(height, width),
        metadata=SimpleNamespace(shard_offsets=[top, left]),
    )


def filled(cuts: dict[str, list[Cut]]) -> dict[str, torch.Tensor]:
    """Tables put together again from the parts."""
    model = Sharded(cuts)
    fill_tables(model, TABLES, seed=5)
    whole = {
        t.name: torch.full((t.num_embeddings, t.embedding_dim), torch.nan)
        for t in TABLES
    }
    for name, values, (top, left) in local_tables(model):
        height, width = values.shape
        whole[name][top : top + height, left : left + width] = values
    return whole


def test_first_weights_do_not_depend_on_the_cuts() -> None:
    one = filled({"a": [(0, 0, 70_000, 8)], "b": [(0, 0, 50, 12)]})
    cut = filled(
        {
            "a": [(0, 0, 66_000, 8), (66_000, 0, 4_000, 8)],  # across a chunk's end
            "b": [(0, 0, 50, 4), (0, 4, 50, 8)],
        }
    )
    for name, values in one.items():
        assert not values.isnan().any()
        assert torch.equal(values, cut[name])
    assert one["a"].abs().max() <= 70_000**-0.5
    assert not torch.equal(one["a"][:50], one["a"][65_536 : 65_536 + 50])


def test_every_optimizer_reaches_the_planner() -> None:
    assert set(OPTIMIZER_CLASSES) == set(OPTIMIZERS)
    tables = [
        dataclasses.replace(TABLES[0], name=name, optimizer=name) for name in OPTIMIZERS
    ]
    collection = build_collection(tables)
    reader = TableReader(world_size=2, constraints=None, profiles=None)
    for name, parameter in zip(OPTIMIZERS, collection.parameters(), strict=True):
        option: Any = SimpleNamespace(
            tensor=parameter, module=("embeddings", collection), compute_kernel="fused"
        )
        assert reader.optimizer(option) == name


def test_output_is_in_the_tables_order_whatever_the_plan() -> None:
    model: Any = ConcatDLRM(TABLES, CPU)
    batch = draw_clicks(TABLES, 6, seed=3, device=CPU)
    parts = {
        "a": torch.randn(6, 8),
        "b:0": torch.randn(6, 12),
        "b:1": torch.ones(6, 12),
    }
    outputs = []
    del model.embeddings
    for keys in (["a", "b:0", "b:1"], ["b:1", "a", "b:0"]):
        found = KeyedTensor.from_tensor_list(keys, [parts[k] for k in keys])
        model.embeddings = lambda ids, found=found: found
        outputs.append(model(batch.dense_BD, batch.ids))
    assert torch.equal(outputs[0], outputs[1])


SMALL = tuple(
    dataclasses.replace(t, num_embeddings=100, num_features=1, optimizer="sgd")
    for t in TABLES
)
QUICK = TrialConfig(warm_up=1, iterations=3, phase_iterations=2, learning_rate=0.5)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dist.ProcessGroup]:
    store = tmp_path_factory.mktemp("alone") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def plan() -> ShardingPlan:
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=1, compute_device="cpu"), batch_size=16
    )
    found: ShardingPlan = planner.plan(
        ConcatDLRM(SMALL, CPU), [EmbeddingBagCollectionSharder()]
    )
    return found


def test_trial_tells_times_losses_and_memory(
    alone: dist.ProcessGroup, plan: ShardingPlan
) -> None:
    batches = [draw_clicks(SMALL, 16, seed, CPU) for seed in range(2)]
    readings = iter([4.0, 6.0])
    found = run_trial(
        plan, SMALL, batches, QUICK, control=alone, reference=lambda: next(readings)
    )
    assert len(found.iteration_ms) == 3 and min(found.iteration_ms) > 0
    assert len(found.embedding_ms) == 2
    assert set(found.phases_ms) == set(PHASES)
    assert len(found.losses) == 1 + 3 + 1 + 2  # hooks need one to settle
    assert found.losses[2] < found.losses[0]  # the same batch again
    assert found.weight_bytes == (4 * 100 * (8 + 12),)
    assert found.reference_ms == (5.0,)
    again, other = (
        run_trial(plan, SMALL, batches, config, control=alone).losses
        for config in (QUICK, dataclasses.replace(QUICK, seed=1))
    )
    assert again == found.losses
    assert other[0] != again[0]  # other first weights
    renamed = [dataclasses.replace(t, name=f"x{t.name}") for t in SMALL]
    with pytest.raises(TrialError, match="rank 0: KeyError: 'xa'"):
        run_trial(plan, renamed, batches, QUICK, control=alone)
