"""Tables of more columns than a GPU's kernels take, or of numbers that none takes."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import Topology

from tests.builders import (
    bag_sharders,
    each,
    gpus,
    make_ebc,
    make_planner,
    sequences,
)
from torchrec_neuroshard import rehearse
from torchrec_neuroshard.errors import ConfigError
from torchrec_neuroshard.tables import MAX_CUDA_COLUMNS


def planned(topology: Any, module: nn.Module, sharders: Any, **only: Any) -> Any:
    """A plan's shards of the first table: its sharding, widths."""
    constraints = each(1, **only) if only else None
    planner = make_planner(
        topology=topology, constraints=constraints, search_only=False
    )
    plan = planner.plan(module, sharders)
    if topology.compute_device == "cuda":
        report = rehearse(module, plan, topology, sharders, batch_size=64)
        assert report.runs, str(report)
    (tables,) = plan.plan.values()
    first = next(iter(tables.values()))
    return first, [s.shard_sizes[1] for s in first.sharding_spec.shards]


@pytest.mark.parametrize(
    ("topology", "module", "sharder", "only"),
    [
        (gpus(2), make_ebc([(1000, 2052)]), EmbeddingBagCollectionSharder(), {}),
        (gpus(2), sequences(4096), EmbeddingCollectionSharder(), {}),
        (
            gpus(8, 2),
            make_ebc([(1000, 8192)]),
            EmbeddingBagCollectionSharder(),
            {"sharding_types": ["grid_shard"]},
        ),
    ],
    ids=["bags", "sequences", "grid"],
)
def test_they_are_split_by_columns(
    topology: Topology, module: Any, sharder: Any, only: dict[str, Any]
) -> None:
    first, widths = planned(topology, module, [sharder], **only)
    assert max(widths) <= MAX_CUDA_COLUMNS
    assert first.sharding_type == only.get("sharding_types", ["column_wise"])[0]
    if isinstance(sharder, EmbeddingCollectionSharder):
        assert len(set(widths)) == 1


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


def test_columns_that_are_no_multiple_of_four_are_refused() -> None:
    """However large the table."""
    module = make_ebc([(2**31, 6), (1000, 64)])
    text = r"table 't0' \(embedding_dim=6\).* multiples of 4, got 6\. Pad embedd"
    with pytest.raises(ConfigError, match=text):
        planned(gpus(2), module, bag_sharders())
