from __future__ import annotations

import numpy as np
import pytest

from torchrec_neuroshard.baselines import HEURISTICS, make_heuristic
from torchrec_neuroshard.errors import ConfigError, InfeasibleError
from torchrec_neuroshard.placement import ShardingTask
from torchrec_neuroshard.search import make_searcher
from torchrec_neuroshard.tables import TableConfig
from torchrec_neuroshard.testing import AnalyticCommsModel, AnalyticCostModel


def task_of(
    rows: list[int], dims: list[int], pooling: list[float], memory: tuple[int, ...] = ()
) -> ShardingTask:
    tables = tuple(
        TableConfig(name=f"t{i}", num_embeddings=r, embedding_dim=d, pooling_factor=p)
        for i, (r, d, p) in enumerate(zip(rows, dims, pooling, strict=True))
    )
    return ShardingTask(
        tables=tables, world_size=2, batch_size=256, memory_bytes=memory
    )


def ranks(name: str, task: ShardingTask) -> list[int]:
    return [s.rank for s in make_heuristic(name).place(task).shards]


# Sizes 40, 32, 24, 16 (x 100 bytes): 40 | 32, then 24 joins 32 (less), 16 joins 40.
# Widths 4, 8, 12, 16: 16 | 12, 8 joins 12, 4 joins 16.
# Lookups 4, 24, 12, 32: 32 | 24, 12 joins 24, 4 joins 32.
TASK = task_of([250, 100, 50, 25], [4, 8, 12, 16], [1.0, 3.0, 1.0, 2.0])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("size", [0, 1, 1, 0]),
        ("dim", [0, 1, 1, 0]),
        ("lookup", [0, 1, 1, 0]),
        # x log10 rows: 9.6, 48, 20.4, 44.7: 48 | 44.7, 20.4 joins 44.7, 9.6 joins 48.
        ("size_lookup", [0, 0, 1, 1]),
    ],
)
def test_greedies_balance_their_quantity(name: str, expected: list[int]) -> None:
    assert ranks(name, TASK) == expected


def test_every_heuristic_gives_a_valid_rated_plan() -> None:
    rng = np.random.default_rng(0)
    task = task_of(
        rng.integers(100, 10_000, 20).tolist(), [8] * 20, rng.uniform(1, 9, 20).tolist()
    )
    best = make_searcher("default").search(
        task, AnalyticCostModel(), AnalyticCommsModel()
    )
    for name in HEURISTICS:
        result = make_heuristic(name).search(
            task, AnalyticCostModel(), AnalyticCommsModel()
        )
        result.placement.check(task)
        # Whole tables only, and never better than what the search finds.
        assert len(result.placement.shards) == 20
        assert result.predicted.critical_path_ms >= best.predicted.critical_path_ms * (
            1 - 1e-9
        )


def test_random_depends_on_the_seed_alone() -> None:
    task = task_of([100] * 20, [8] * 20, [1.0] * 20)
    same = [make_heuristic("random", 3).place(task) for _ in range(2)]
    assert same[0] == same[1]
    assert make_heuristic("random", 4).place(task) != same[0]


def test_memory_sends_a_table_to_the_other_rank() -> None:
    # By width alone table 2 (800 bytes) would join table 1; only rank 0 has room.
    task = task_of([50, 50, 50], [8, 8, 4], [1.0] * 3, memory=(2400, 1700))
    assert ranks("dim", task)[2] == 0


@pytest.mark.parametrize("name", sorted(HEURISTICS))
def test_a_table_that_fits_nowhere_is_an_error(name: str) -> None:
    task = task_of([50, 60, 50], [8, 64, 4], [1.0] * 3, memory=(10_000, 12_000))
    with pytest.raises(
        InfeasibleError, match=rf"heuristic '{name}': table 't1' .* GiB left.*splits"
    ):
        make_heuristic(name).place(task)


def test_unknown_name() -> None:
    with pytest.raises(ConfigError, match=r"unknown heuristic 'best'; one of dim, "):
        make_heuristic("best")
