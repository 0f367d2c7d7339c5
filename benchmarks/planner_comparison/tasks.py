"""Tasks of the comparison: four families of table sets.

Tables of the DLRM dataset and of EMBark were held out of training of the cost models.
Most of MLPerf's 26 tables were in the training data.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from harness.dlrm_tables import generate_dlrm_tables
from harness.tasks import (
    PRODUCTION_WIDTHS,
    cap_rows,
    power_of_two_widths,
)
from torchrec_neuroshard.measure.sets import SamplingConfig, is_held_out_table
from torchrec_neuroshard.tables.features import OUTPUT_BYTES_PER_VALUE
from torchrec_neuroshard.tables.loaders import load_json
from torchrec_neuroshard.tables.mlperf import mlperf_dlrm_v2
from torchrec_neuroshard.tables.table import TableConfig

FAMILIES: dict[str, str] = {
    "dlrm": "DLRM dataset, widths from 4 up to 4, 8, ... or 128 (the seed papers')",
    "mlperf": "MLPerf DLRM-v2, 26 tables of one width",
    "embark": "EMBark T180 and T200, 30 tables of either",
    "production": "DLRM dataset, widths of published production configurations",
}

OPTIMIZERS = ("rowwise_adagrad", "sgd")
BATCH_SIZES = (2_048, 4_096, 2_048, 8_192, 2_048, 4_096, 2_048, 16_384)
"""Samples over all ranks. Tasks use them in turn."""
MOST_LOOKUPS, MOST_GPU_LOOKUPS = 12_500_000, 200_000_000
"""Maximum lookups of a batch on a CPU and on a GPU. Larger batches are halved, since
all kernels are timed on one core or one GPU."""
WORLDS = (8, 4, 16)
TIGHT, ROOMY = 1.08, 1.6
"""Memory of a rank relative to an even share of all tables. A third of tasks are
tight."""
ROOM_BYTES, ROOM_SHARES, GPU_ROOM_SHARES = 2**23, 2, 6
"""Memory of a rank for buffers: bytes, and even shares of inputs and outputs on a CPU
and on a GPU. Planners count buffers, and ours counts more of them on a GPU."""
STATE_BYTES_PER_ROW = {"rowwise_adagrad": 4, "sgd": 0}

_DLRM, _EMBARK = "dlrm_datasets_2021_t856_bs65536", "nvidia_embark_"
SEED_TABLES = (10, 60)
"""Fewest and most tables of the papers' tasks."""
_EMBARK_TABLES = 30
_QUICK_TABLES = 10
_ID_BYTES = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """Tables, ranks, batch size and memory, the same for every planner."""

    name: str
    family: str
    tables: tuple[TableConfig, ...]
    world_size: int
    batch_size: int
    """Samples over all ranks."""
    memory_bytes: int
    """Memory of each rank for tables, optimizer state and TorchRec's buffers."""
    num_cut: int = 0
    """Tables that lost rows to `TaskSettings.max_rows`."""
    uncut_bytes: int = 0
    """Weights of all tables before they lost rows."""
    cluster: str = ""
    """Name of the cluster for which the task is planned and timed."""
    kernels_faster: float = 1.0
    """How many times faster than on this device kernels count, for planners and in
    the results."""
    memory_gb_per_s: float | None = None
    """Bandwidth of a rank's memory that TorchRec's planner is told. None: the card's,
    or TorchRec's default for a CPU."""

    @property
    def optimizer(self) -> str:
        """Optimizer of all tables."""
        return self.tables[0].optimizer

    def to_json(self) -> dict[str, Any]:
        """Return a description of the task, with a hash of its tables."""
        tables = json.dumps(
            [
                (t.num_embeddings, t.embedding_dim, round(t.pooling_factor, 3))
                for t in self.tables
            ]
        )
        return {
            "name": f"{self.name}{'' if self.kernels_faster == 1 else ', scaled'}",
            "task": self.name,
            "cluster": self.cluster,
            "kernels_faster": self.kernels_faster,
            "memory_gb_per_s": self.memory_gb_per_s,
            "family": self.family,
            "num_tables": len(self.tables),
            "world_size": self.world_size,
            "batch_size": self.batch_size,
            "optimizer": self.optimizer,
            "memory_bytes": self.memory_bytes,
            "table_bytes": sum(map(held_bytes, self.tables)),
            "weight_bytes": sum(t.weight_bytes for t in self.tables),
            "uncut_bytes": self.uncut_bytes,
            "num_cut": self.num_cut,
            "tables_sha256": hashlib.sha256(tables.encode()).hexdigest()[:16],
        }


def held_bytes(shard: TableConfig) -> int:
    """Return the bytes of a shard's weights and optimizer state."""
    state = STATE_BYTES_PER_ROW[shard.optimizer] * shard.num_embeddings
    return shard.weight_bytes + state


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskSettings:
    """Settings of the tasks."""

    batch_size: int | None = None
    """Samples over all ranks. None: as in BATCH_SIZES."""
    max_rows: int = 1_000_000
    """Maximum rows of a table. Larger tables are cut."""
    seed: int = 0
    quick: bool = False
    """One small task of each family."""
    device_type: str = "cpu"
    """Device type that times the kernels."""
    max_lookups: int | None = None
    """Maximum lookups of a batch. Larger batches are halved. None: by the device."""

    def fitting_batch(self, batch_size: int, pooling_factor: float) -> int:
        """Return the batch size, halved while its lookups exceed the maximum.

        It is not halved below the smallest of BATCH_SIZES.

        Args:
            batch_size: Samples over all ranks.
            pooling_factor: Lookups of one sample in all tables.
        """
        most = MOST_LOOKUPS if self.device_type == "cpu" else MOST_GPU_LOOKUPS
        limit = self.max_lookups or most
        while pooling_factor * batch_size > limit and batch_size > min(BATCH_SIZES):
            batch_size //= 2
        return batch_size


def make_tasks(path: Path | None, settings: TaskSettings) -> list[Task]:
    """Return the tasks, with all families spread evenly over the list.

    Args:
        path: JSON of published table sets. None: the DLRM dataset is generated, and
            there are no EMBark tasks.
        settings: Settings of the tasks.
    """
    sets = {} if path is None else load_json(path)
    dlrm = _unseen(sets.get(_DLRM) or generate_dlrm_tables(seed=settings.seed))
    families = {
        "dlrm": list(_dlrm_tasks(dlrm, settings)),
        "mlperf": list(_mlperf_tasks(settings)),
        "embark": list(_embark_tasks(sets, settings)),
        "production": list(_production_tasks(dlrm, settings)),
    }
    if settings.quick:
        return [tasks[0] for tasks in families.values() if tasks]
    placed = [
        ((number + 0.5) / len(tasks), task)
        for tasks in families.values()
        for number, task in enumerate(tasks)
    ]
    return [task for _, task in sorted(placed, key=lambda pair: pair[0])]


def _unseen(tables: Sequence[TableConfig]) -> list[TableConfig]:
    share = SamplingConfig().held_out_share
    return [
        t for t in tables if t.pooling_factor > 0 and is_held_out_table(t.name, share)
    ]


def _dlrm_tasks(
    tables: Sequence[TableConfig], settings: TaskSettings
) -> Iterator[Task]:
    """Yield twelve tasks each with 4, 8 and 16 ranks, over all widths of the papers."""
    rng = np.random.default_rng([settings.seed, 1])
    widest = (128, 32, 64, 16, 8, 4)
    for number in range(36):
        world_size = WORLDS[number % 3]
        low, high = SEED_TABLES
        # Tasks with fewer than two tables per rank make no sense.
        count = int(rng.integers(max(low, 2 * world_size), high + 1))
        widths = power_of_two_widths(widest[number // 3 % len(widest)])
        if settings.quick:
            count, widths = _QUICK_TABLES, power_of_two_widths(64)
        chosen = _draw(rng, tables, count, widths)
        yield _task("dlrm", number, chosen, world_size, settings)


def _production_tasks(
    tables: Sequence[TableConfig], settings: TaskSettings
) -> Iterator[Task]:
    rng = np.random.default_rng([settings.seed, 2])
    for number in range(27):
        world_size = WORLDS[number % 3]
        low = max(20, 2 * world_size)
        count = _QUICK_TABLES if settings.quick else int(rng.integers(low, 61))
        chosen = _draw(rng, tables, count, PRODUCTION_WIDTHS)
        yield _task("production", number, chosen, world_size, settings)


def _mlperf_tasks(settings: TaskSettings) -> Iterator[Task]:
    for number in range(12):
        # Every second task has fewer rows, and so other hit rates.
        rows = settings.max_rows // (1, 10)[number % 2]
        width = (128, 64)[number // 6]
        most = _QUICK_TABLES if settings.quick else None
        whole = mlperf_dlrm_v2(embedding_dim=width)[:most]
        chosen = mlperf_dlrm_v2(max_rows=rows, embedding_dim=width)[:most]
        yield _task("mlperf", number, chosen, WORLDS[number % 3], settings, whole)


def _embark_tasks(
    sets: dict[str, tuple[TableConfig, ...]], settings: TaskSettings
) -> Iterator[Task]:
    rng = np.random.default_rng([settings.seed, 3])
    known = [_unseen(t) for name, t in sets.items() if name.startswith(_EMBARK)]
    for number in range(12 if known else 0):
        tables = known[number // 3 % len(known)]
        count = _QUICK_TABLES if settings.quick else _EMBARK_TABLES
        chosen = _draw(rng, tables, min(count, len(tables)), None)
        yield _task("embark", number, chosen, WORLDS[number % 3], settings)


def _draw(
    rng: np.random.Generator,
    tables: Sequence[TableConfig],
    count: int,
    widths: Sequence[int] | None,
) -> list[TableConfig]:
    """Return random distinct tables, with random widths if `widths` is given."""
    chosen = [tables[i] for i in rng.choice(len(tables), count, replace=False)]
    if widths is None:
        return chosen
    return [t.with_width(int(rng.choice(widths))) for t in chosen]


def _task(
    family: str,
    number: int,
    tables: Sequence[TableConfig],
    world_size: int,
    settings: TaskSettings,
    uncut: Sequence[TableConfig] = (),
) -> Task:
    uncut = uncut or tables
    optimizer = OPTIMIZERS[number // 3 % 2]
    batch_size = settings.fitting_batch(
        settings.batch_size or BATCH_SIZES[number % len(BATCH_SIZES)],
        sum(t.pooling_factor for t in tables),
    )
    own = tuple(
        dataclasses.replace(
            cap_rows(table, settings.max_rows), name=f"t{i}", optimizer=optimizer
        )
        for i, table in enumerate(tables)
    )
    world_size = 4 if settings.quick else world_size
    tight = number // 3 % 3 == 2
    held = [held_bytes(t) for t in own]
    per_sample = sum(
        t.embedding_dim * t.num_features * OUTPUT_BYTES_PER_VALUE
        + t.pooling_factor * _ID_BYTES
        for t in own
    )
    shares = ROOM_SHARES if settings.device_type == "cpu" else GPU_ROOM_SHARES
    buffers = shares * per_sample * batch_size / world_size
    share = (TIGHT if tight else ROOMY) * sum(held) / world_size
    return Task(
        name=f"{family}-{number}-{len(own)}x{world_size}{'-tight' if tight else ''}",
        family=family,
        tables=own,
        world_size=world_size,
        batch_size=batch_size,
        memory_bytes=int(max(share, 1.02 * max(held)) + ROOM_BYTES + buffers),
        num_cut=sum(
            t.num_embeddings < w.num_embeddings for t, w in zip(own, uncut, strict=True)
        ),
        uncut_bytes=sum(t.weight_bytes for t in uncut),
    )
