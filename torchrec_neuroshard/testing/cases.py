"""Helpers of the contracts: sample tasks, sample shards and assertions.

Nothing here needs pytest. A failed case raises an `AssertionError` with a message.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from torchrec_neuroshard.costs.task import ShardingTask
from torchrec_neuroshard.tables.features import ShardFeaturizer
from torchrec_neuroshard.tables.table import TableConfig

_WIDTHS = (4, 8, 12, 16)
_OPTIMIZERS = ("rowwise_adagrad", "sgd", "adam", "adagrad")


def expect_close(
    found: npt.ArrayLike, wanted: npt.ArrayLike, tolerance: float, what: str
) -> None:
    """Fail the case unless two arrays agree.

    Args:
        found: Array of any shape.
        wanted: Array of the same shape.
        tolerance: Maximum difference, relative to the largest value of `wanted`.
        what: Start of the message if the arrays differ.

    Raises:
        AssertionError: Values or shapes differ, or a value is not finite.
    """
    found, wanted = np.asarray(found), np.asarray(wanted)
    assert found.shape == wanted.shape, (
        f"{what}: shape {found.shape}, not {wanted.shape}"
    )
    scale = float(np.abs(wanted).max(initial=0.0))
    gap = float(np.abs(found - wanted).max(initial=0.0))
    assert gap <= tolerance * scale, (
        f"{what}: values up to {scale:.3g} differ by {gap:.3g}"
    )


def expect_error(kind: type[Exception], call: Callable[[], object], what: str) -> str:
    """Fail the case unless `call` raises `kind`.

    Returns:
        The error's message.

    Raises:
        AssertionError: Nothing was raised. Errors of other types pass through.
    """
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError(f"{what}: no {kind.__name__} was raised")


def sample_task(
    num_tables: int, world_size: int, *, seed: int = 0, **arguments: Any
) -> ShardingTask:
    """Return a task with random small tables, 4 to 16 columns wide.

    Args:
        num_tables: Number of tables.
        world_size: Number of ranks.
        seed: Seed of the tables.
        arguments: Further arguments of `ShardingTask`.
    """
    rng = np.random.default_rng(seed)
    tables = tuple(
        TableConfig(
            name=f"table_{i}",
            num_embeddings=int(10 ** rng.uniform(2, 5)),
            embedding_dim=int(rng.choice(_WIDTHS)),
            pooling_factor=float(rng.lognormal(1.0, 1.0)),
        )
        for i in range(num_tables)
    )
    return ShardingTask(
        **{
            "tables": tables,
            "world_size": world_size,
            "batch_size": 4096,
            **arguments,
        }
    )


def random_task(seed: int) -> ShardingTask:
    """Return a task of 1 to 3 tables with random limits on shards, widths and ranks.

    The first table is the largest one. Each table has a rank that it may be on whole
    beside all others of that rank, so the rules do not contradict each other.
    """
    rng = np.random.default_rng(seed)
    count, ranks = int(rng.integers(1, 4)), int(rng.integers(2, 5))
    home_T = rng.integers(0, ranks, count)
    sets = [np.flatnonzero(home_T == rank).tolist() for rank in range(ranks)]
    one, other = rng.integers(0, count, 2).tolist()
    allowed = [
        tuple({int(home), *rng.integers(0, ranks, 2).tolist()}) for home in home_T
    ]
    first, *rest = sample_task(count, ranks, seed=seed).tables
    first = dataclasses.replace(first, embedding_dim=64, pooling_factor=40.0)
    rest = [
        dataclasses.replace(t, embedding_dim=4 + 4 * (i % 2))
        for i, t in enumerate(rest)
    ]
    has_rules = count > 1 and rng.random() < 0.5
    return ShardingTask(
        tables=(first, *rest),
        world_size=ranks,
        batch_size=4096,
        max_shards=tuple(rng.integers(1, ranks + 1, count).tolist()),
        min_widths=(int(rng.choice((4, 8, 16))), *(4,) * (count - 1)),
        uneven=bool(rng.random() < 0.7),
        groups=tuple(t % 2 for t in range(count)),
        together=tuple(tuple(s) for s in sets if len(s) > 1) if has_rules else (),
        apart=((one, other),) if has_rules and home_T[one] != home_T[other] else (),
        allowed_ranks=tuple(allowed) if has_rules else (),
    )


def sample_features(
    num_shards: int = 24, *, seed: int = 0, far_out: bool = False
) -> npt.NDArray[np.float32]:
    """Return features of random shards, as the planner passes them to a cost model.

    Args:
        num_shards: Number of shards.
        seed: Seed of the shards.
        far_out: Whether the shards are larger than any that were measured.

    Returns:
        `N x F` float32, columns in FEATURE_NAMES order.
    """
    rng = np.random.default_rng(seed)
    low, high = (9.0, 11.0) if far_out else (2.0, 6.5)
    tables = [
        TableConfig(
            name=f"table_{i}",
            num_embeddings=int(10 ** rng.uniform(low, high)),
            embedding_dim=int(2 ** rng.integers(2, 8)),
            pooling_factor=float(rng.lognormal(1.5, 1.0)),
            num_features=1 + i % 2,
            weighted=i % 3 == 2,
            data_type=("fp32", "fp16")[i % 5 == 4],
            optimizer=_OPTIMIZERS[i % len(_OPTIMIZERS)],
        )
        for i in range(num_shards)
    ]
    featurizer = ShardFeaturizer(tables, 2**24 if far_out else 4096)
    return featurizer.features(np.arange(num_shards), [t.embedding_dim for t in tables])
