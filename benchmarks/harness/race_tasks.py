"""Models of the race: published table sets, several optimizers and batch sizes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from harness.dlrm_tables import generate_dlrm_tables
from harness.tasks import PRODUCTION_WIDTHS, cap_rows, power_of_two_widths
from torchrec_neuroshard import FeatureProfile, TableConfig
from torchrec_neuroshard.tables.loaders import load_json
from torchrec_neuroshard.tables.mlperf import mlperf_dlrm_v2

MAX_ROWS = 2_000_000
MOST_LOOKUPS = 1_000_000
"""Most lookups of a rank's batch on a CPU. Larger batches are halved."""
_DLRM, _EMBARK = "dlrm_datasets_2021_t856_bs65536", "nvidia_embark_"
_STATE_BYTES: dict[str, Callable[[TableConfig], int]] = {
    "sgd": lambda table: 0,
    "rowwise_adagrad": lambda table: 4 * table.num_embeddings,
    "adagrad": lambda table: table.weight_bytes,
}
"""Optimizer -> bytes of its state. FBGEMM's CPU kernels have no other."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A model to train."""

    name: str
    tables: tuple[TableConfig, ...]
    batch_size: int
    """Samples of each rank."""
    num_cut: int = 0
    """Tables that lost rows."""

    @property
    def held_bytes(self) -> int:
        """Bytes of weights and optimizer state."""
        return sum(t.weight_bytes + _STATE_BYTES[t.optimizer](t) for t in self.tables)


def family_of(name: str) -> str:
    """Return a task's name without its number."""
    return name.partition("-")[0]


def make_tasks(path: Path | None, seed: int, most_bytes: int) -> list[Task]:
    """Return twenty tasks with all families spread over the list.

    Args:
        path: JSON of published table sets. None: the DLRM dataset is generated, and
            there are no EMBark tasks.
        seed: Seed of the draws.
        most_bytes: Most bytes of a model's weights and optimizer state. Tables lose
            rows until the model fits.
    """
    sets = {} if path is None else load_json(path)
    known = sets.get(_DLRM) or generate_dlrm_tables(seed=seed)
    dlrm = [t for t in known if t.pooling_factor >= 0.1]
    embark = [t for name, t in sets.items() if name.startswith(_EMBARK)]
    families = [
        list(_mlperf()),
        list(_drawn("dlrm", dlrm, np.random.default_rng([seed, 1]))),
        list(_drawn("production", dlrm, np.random.default_rng([seed, 2]))),
        list(_embark(embark, np.random.default_rng([seed, 3]))),
        list(_sequences(np.random.default_rng([seed, 4]))),
    ]
    placed = [
        ((number + 0.5) / len(tasks), task)
        for tasks in families
        for number, task in enumerate(tasks)
    ]
    ordered = [task for _, task in sorted(placed, key=lambda pair: pair[0])]
    return [_fitting(task, most_bytes) for task in ordered]


def _mlperf() -> Iterator[Task]:
    settings = [
        (128, 2_048, "rowwise_adagrad"),
        (64, 8_192, "sgd"),
        (128, 512, "sgd"),
        (32, 4_096, "adagrad"),
    ]
    for number, (width, batch_size, optimizer) in enumerate(settings):
        tables = mlperf_dlrm_v2(embedding_dim=width)
        yield _task("mlperf", number, tables, batch_size, optimizer)


def _drawn(
    family: str, tables: Sequence[TableConfig], rng: np.random.Generator
) -> Iterator[Task]:
    """Yield five tasks of 15 to 60 tables."""
    settings = [
        (2_048, "sgd"),
        (512, "rowwise_adagrad"),
        (4_096, "rowwise_adagrad"),
        (1_024, "adagrad"),
        (8_192, "sgd"),
    ]
    for number, (batch_size, optimizer) in enumerate(settings):
        count = int(rng.integers(15, 61))
        if batch_size == max(settings)[0]:  # few ids, so that the batch stays large
            tables = [t for t in tables if t.pooling_factor <= 5]
        chosen = rng.choice(len(tables), size=count, replace=False)
        widths = PRODUCTION_WIDTHS
        if family == "dlrm":
            widths = power_of_two_widths((128, 64, 128, 32, 64)[number])
        wide = [tables[i].with_width(int(rng.choice(widths))) for i in chosen]
        yield _task(family, number, wide, batch_size, optimizer)


def _embark(
    known: Sequence[Sequence[TableConfig]], rng: np.random.Generator
) -> Iterator[Task]:
    settings = [(2_048, "rowwise_adagrad"), (512, "sgd"), (4_096, "adagrad")]
    for number, (batch_size, optimizer) in enumerate(settings if known else ()):
        tables = known[number % len(known)]
        chosen = rng.choice(len(tables), size=min(30, len(tables)), replace=False)
        yield _task(
            "embark", number, [tables[i] for i in chosen], batch_size, optimizer
        )


def _sequences(rng: np.random.Generator) -> Iterator[Task]:
    """Yield three models of histories; the last has pooled tables, too."""
    settings = [
        (1_024, "rowwise_adagrad", 64, 4, 0),
        (512, "sgd", 32, 8, 0),
        (512, "rowwise_adagrad", 64, 4, 12),
    ]
    for number, (batch_size, optimizer, width, histories, bags) in enumerate(settings):
        tables = []
        for i in range(histories + bags):
            mean = float(rng.choice([10, 20, 50, 100])) if i < histories else 0.0
            mean = mean or float(rng.choice([1, 1, 2, 5, 10]))
            tables.append(
                TableConfig(
                    name=f"t{i}",
                    num_embeddings=int(10 ** rng.uniform(3.0, 6.3)),
                    embedding_dim=width if i < histories else 64,
                    pooled=i >= histories,
                    pooling_factor=mean,
                )
            )
        task = _task("sequences", number, tables, batch_size, optimizer)
        # Histories differ in length; the power law of their ids is assumed.
        own = tuple(
            t
            if t.pooled
            else dataclasses.replace(
                t, profile=_uneven(t.profile_at(16 * batch_size), 1.2)
            )
            for t in task.tables
        )
        yield dataclasses.replace(task, tables=own)


def _uneven(profile: FeatureProfile, share: float) -> FeatureProfile:
    """Return a profile whose lengths deviate by a share of their mean."""
    return dataclasses.replace(profile, pooling_std=share * profile.pooling_factor)


def _task(
    family: str,
    number: int,
    tables: Sequence[TableConfig],
    batch_size: int,
    optimizer: str,
) -> Task:
    lookups = sum(t.pooling_factor for t in tables)
    while lookups * batch_size > MOST_LOOKUPS and batch_size > 512:
        batch_size //= 2
    named = tuple(
        dataclasses.replace(t, name=f"t{i}", optimizer=optimizer)
        for i, t in enumerate(tables)
    )
    return Task(name=f"{family}-{number}", tables=named, batch_size=batch_size)


def _fitting(task: Task, most_bytes: int) -> Task:
    """Return the task with fewer rows, if it has too many."""
    rows, whole = MAX_ROWS, task.tables
    while True:
        tables = tuple(cap_rows(t, rows) for t in whole)
        cut = sum(
            t.num_embeddings < w.num_embeddings
            for t, w in zip(tables, whole, strict=True)
        )
        task = dataclasses.replace(task, tables=tables, num_cut=cut)
        if task.held_bytes <= most_bytes or rows == 1:
            return task
        rows //= 2
