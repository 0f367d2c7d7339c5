"""Tables of more columns than a GPU's kernels take, or of numbers that none takes."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.planner import ParameterConstraints, Topology

from tests.builders import (
    bag_sharders,
    gpus,
    keep_nothing_back,
    make_ebc,
    make_planner,
    sequences,
)
from torchrec_neuroshard import rehearse
from torchrec_neuroshard.errors import ConfigError
from torchrec_neuroshard.tables import MAX_CUDA_COLUMNS


def planned(topology: Any, module: nn.Module, sharders: Any, **only: Any) -> Any:
    """A plan's shards of the first table: its sharding, widths."""
    constraints = {"t0": ParameterConstraints(**only)} if only else None
    planner = make_planner(
        topology=topology,
        batch_size=64,
        constraints=constraints,
        search_only=False,
        storage_reservation=keep_nothing_back(),
    )
    plan = planner.plan(module, sharders)
    if topology.compute_device == "cuda":
        report = rehearse(module, plan, topology, sharders, batch_size=64)
        assert report.runs, str(report)
    (tables,) = plan.plan.values()
    first = next(iter(tables.values()))
    return first, [s.shard_sizes[1] for s in first.sharding_spec.shards]


@pytest.mark.parametrize("width", [2052, 4096])
def test_they_are_split_by_columns(width: int) -> None:
    module = make_ebc([(1000, width), (1000, 64)])
    _, widths = planned(gpus(2), module, bag_sharders())
    assert sum(widths) == width and max(widths) <= MAX_CUDA_COLUMNS


def test_sequences_are_split_alike() -> None:
    sharders: list[Any] = [EmbeddingCollectionSharder()]
    _, widths = planned(gpus(2), sequences(4096), sharders)
    assert sum(widths) == 4096 and max(widths) <= MAX_CUDA_COLUMNS
    assert len(set(widths)) == 1


def test_blocks_of_grids_are_split_as_far() -> None:
    module = make_ebc([(1000, 8192), (1000, 64)])
    first, widths = planned(
        gpus(8, 2), module, bag_sharders(), sharding_types=["grid_shard"]
    )
    assert first.sharding_type == "grid_shard" and max(widths) <= MAX_CUDA_COLUMNS


def test_a_cpu_takes_them_whole() -> None:
    module = make_ebc([(1000, 4096), (1000, 64)])
    _, widths = planned(
        Topology(world_size=2, compute_device="cpu"),
        module,
        bag_sharders(),
        sharding_types=["table_wise"],
    )
    assert widths == [4096]


@pytest.mark.parametrize(
    "only",
    [
        {"sharding_types": ["table_wise", "row_wise", "data_parallel"]},
        {"sharding_types": ["column_wise"], "min_partition": 4096},
    ],
)
def test_what_no_kernel_takes_is_refused(only: dict[str, Any]) -> None:
    module = make_ebc([(1000, 4096), (1000, 64)])
    with pytest.raises(ConfigError, match=r"table 't0' \(embedding_dim=4096\).*2,048"):
        planned(gpus(2), module, bag_sharders(), **only)


@pytest.mark.parametrize(
    ("device", "only"), [("cuda", {}), ("cpu", {"sharding_types": ["table_wise"]})]
)
def test_columns_that_are_no_multiple_of_four_are_refused(
    device: str, only: dict[str, Any]
) -> None:
    """However large the table; on CPUs alone the kernel of replicas takes them."""
    module, topology = make_ebc([(2**31, 6), (1000, 64)]), Topology(2, device)
    text = r"table 't0' \(embedding_dim=6\).* multiples of 4, got 6\. Pad .* to 8"
    with pytest.raises(ConfigError, match=text):
        planned(topology, module, bag_sharders(), **only)
