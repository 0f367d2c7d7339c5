"""Tables of more columns than a GPU's kernels take, or of numbers that none takes."""

from __future__ import annotations

from typing import Any

import pytest
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import Topology

from tests.builders import (
    bag_sharders,
    each,
    entries_of,
    gpus,
    make_ebc,
    make_planner,
    sequences,
    shards_of,
)
from torchrec_neuroshard import rehearse
from torchrec_neuroshard.errors import ConfigError
from torchrec_neuroshard.tables import MAX_CUDA_COLUMNS

COLUMN = "column_wise"


@pytest.mark.parametrize(
    ("topology", "module", "sharder", "kind"),
    [
        (gpus(), make_ebc([(1000, 2052)]), EmbeddingBagCollectionSharder(), COLUMN),
        (gpus(), sequences(4096), EmbeddingCollectionSharder(), COLUMN),
        (
            gpus(8, 2),
            make_ebc([(1000, 8192)]),
            EmbeddingBagCollectionSharder(),
            "grid_shard",
        ),
    ],
    ids=["bags", "sequences", "grid"],
)
def test_they_are_split_by_columns(
    topology: Topology, module: Any, sharder: Any, kind: str
) -> None:
    limits = None if kind == COLUMN else each(1, kind)
    planner = make_planner(topology=topology, constraints=limits, search_only=False)
    plan = planner.plan(module, [sharder])
    report = rehearse(module, plan, topology, [sharder], batch_size=64)
    assert report.runs, str(report)
    [first] = entries_of(plan).values()
    widths = {s.shard_sizes[1] for s in first.sharding_spec.shards}
    assert max(widths) <= MAX_CUDA_COLUMNS
    assert first.sharding_type == kind
    if isinstance(sharder, EmbeddingCollectionSharder):
        assert len(widths) == 1


def test_a_cpu_takes_them_whole() -> None:
    planner = make_planner(constraints=each(1, "table_wise"))
    plan = planner.plan(make_ebc([(1000, 4096)]), bag_sharders())
    assert [w for _, w, _ in shards_of(plan)["t0"]] == [4096]


@pytest.mark.parametrize(
    ("size", "only", "message"),
    [
        (
            (1000, 4096),
            {"sharding_types": ["table_wise", "row_wise", "data_parallel"]},
            r"\(embedding_dim=4096\).*2,048",
        ),
        (
            (1000, 4096),
            {"sharding_types": ["column_wise"], "min_partition": 4096},
            r"\(embedding_dim=4096\).*2,048",
        ),
        # However large the table.
        ((2**31, 6), {}, r"\(embedding_dim=6\).* multiples of 4, got 6\. Pad embedd"),
    ],
)
def test_what_no_kernel_takes_is_refused(
    size: tuple[int, int], only: dict[str, Any], message: str
) -> None:
    planner = make_planner(2, "cuda", constraints=each(1, **only), search_only=False)
    with pytest.raises(ConfigError, match=f"table 't0' {message}"):
        planner.plan(make_ebc([size, (1000, 64)]), bag_sharders())
