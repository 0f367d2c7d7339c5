"""Models of a table set that can be sharded and trained by any plan.

Shapes: `B` samples, `D` columns.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.modules.embedding_configs import (
    DataType,
    EmbeddingBagConfig,
    EmbeddingConfig,
)
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollection,
    EmbeddingCollection,
)
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from torchrec_neuroshard.tables.inputs import draw_batch, feature_names
from torchrec_neuroshard.tables.profile import FeatureProfile, profile_inputs
from torchrec_neuroshard.tables.table import TableConfig

NUM_BATCHES = 4
"""Distinct batches of a rank. Training cycles through them."""
NUM_DENSE_FEATURES = 13
"""Dense features, as in the Criteo data."""

OPTIMIZER_CLASSES: dict[str, type[torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "rowwise_adagrad": RowWiseAdagrad,
    "adagrad": torch.optim.Adagrad,
    "adam": torch.optim.Adam,
}
"""`TableConfig.optimizer` -> the class that TorchRec fuses into its kernels."""

BAGS, SEQUENCES = "embeddings", "sequences"
"""Paths of `ConcatDLRM`'s modules with tables of bags and of sequences."""

_DENSE_WIDTH = 16
_CHUNK_ROWS = 65_536
_WEIGHT = re.compile(r"(?:embedding_bags|sequences\.embeddings)\.([^.]+)\.weight$")
"""End of a table's path in a sharded model."""


def sharders() -> list[Any]:
    """Return TorchRec's sharders of bags and of sequences."""
    return [EmbeddingBagCollectionSharder(), EmbeddingCollectionSharder()]


def table_of(path: str) -> str | None:
    """Return the table whose weights have this path; None: a dense parameter."""
    found = _WEIGHT.search(path)
    return found[1] if found else None


def build_collection(
    tables: Sequence[TableConfig], learning_rate: float | None = 0.01
) -> EmbeddingBagCollection | EmbeddingCollection:
    """Return the tables as a module on the meta device, with their optimizers.

    Args:
        tables: Shapes, features and optimizers; all of bags, or all of sequences.
        learning_rate: Learning rate of all tables. None: no optimizers.
    """
    meta = torch.device("meta")
    named: list[dict[str, Any]] = [
        {
            "name": t.name,
            "num_embeddings": t.num_embeddings,
            "embedding_dim": t.embedding_dim,
            "feature_names": list(feature_names(t)),
            "data_type": DataType[t.data_type.upper()],
        }
        for t in tables
    ]
    if tables[0].pooled:
        collection = EmbeddingBagCollection(
            tables=[EmbeddingBagConfig(**fields) for fields in named],
            is_weighted=any(t.weighted for t in tables),
            device=meta,
        )
    else:
        collection = EmbeddingCollection(
            tables=[EmbeddingConfig(**fields) for fields in named], device=meta
        )
    if learning_rate is None:
        return collection
    for table, parameter in zip(tables, collection.parameters(), strict=True):
        apply_optimizer_in_backward(
            OPTIMIZER_CLASSES[table.optimizer], [parameter], {"lr": learning_rate}
        )
    return collection


class DenseLayers(nn.Module):
    """The dense layers of `ConcatDLRM`, equal on all ranks."""

    def __init__(self, tables: Sequence[TableConfig], device: torch.device) -> None:
        """Build the layers.

        Args:
            tables: Tables of the model.
            device: Device of the layers.
        """
        super().__init__()
        width = sum(t.embedding_dim * t.num_features for t in tables)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            bottom = nn.Linear(NUM_DENSE_FEATURES, _DENSE_WIDTH)
            top = nn.Sequential(
                nn.Linear(width + _DENSE_WIDTH, _DENSE_WIDTH),
                nn.ReLU(),
                nn.Linear(_DENSE_WIDTH, 1),
            )
        self.bottom, self.top = bottom.to(device), top.to(device)
        self._bags = [name for t in tables if t.pooled for name in feature_names(t)]

    def forward(
        self,
        dense_BD: torch.Tensor,
        bags: KeyedTensor | None,
        sequences: Sequence[tuple[torch.Tensor, torch.Tensor]],
    ) -> torch.Tensor:
        """Return the logits, `B`.

        Args:
            dense_BD: Dense features.
            bags: Pooled rows of the tables of bags, if there are any.
            sequences: Rows and lengths of each sequence. A sample's sequence counts as
                the sum of its rows.
        """
        below = torch.relu(self.bottom(dense_BD))
        # In the tables' order: that of the outputs differs from plan to plan.
        pooled = [] if bags is None else KeyedTensor.regroup([bags], [self._bags])
        summed = [
            torch.segment_reduce(rows, "sum", lengths=lengths, unsafe=True)
            for rows, lengths in sequences
        ]
        logits: torch.Tensor = self.top(torch.cat([*pooled, *summed, below], dim=1))
        return logits.squeeze(-1)


class ConcatDLRM(nn.Module):
    """A DLRM that concatenates its features, so tables can have different widths."""

    def __init__(
        self,
        tables: Sequence[TableConfig],
        device: torch.device,
        learning_rate: float = 0.01,
    ) -> None:
        """Build the dense layers and tables without memory.

        Args:
            tables: As for `build_collection`, of bags and of sequences.
            device: Device of the dense layers.
            learning_rate: Learning rate of the tables.
        """
        super().__init__()
        kinds = {BAGS: True, SEQUENCES: False}
        self._features = {}
        for path, pooled in kinds.items():
            held = [t for t in tables if t.pooled is pooled]
            self._features[path] = [name for t in held for name in feature_names(t)]
            if held:
                self.add_module(path, build_collection(held, learning_rate))
        self.dense = DenseLayers(tables, device)

    def forward(self, dense_BD: torch.Tensor, ids: KeyedJaggedTensor) -> torch.Tensor:
        """Return the logits, `B`."""
        bags, sequences = self._features[BAGS], self._features[SEQUENCES]
        # Both modules are called before an output is used, so exchanges overlap.
        outputs = getattr(self, BAGS)(ids) if bags else None
        rows = getattr(self, SEQUENCES)(ids) if sequences else {}
        histories = [(rows[n].values(), rows[n].lengths()) for n in sequences]
        logits: torch.Tensor = self.dense(dense_BD, outputs, histories)
        return logits


class ClickBatch(NamedTuple):
    """One rank's input of an iteration."""

    dense_BD: torch.Tensor
    ids: KeyedJaggedTensor
    clicks_B: torch.Tensor


def draw_clicks(
    tables: Sequence[TableConfig], batch_size: int, seed: int, device: torch.device
) -> ClickBatch:
    """Return a random batch whose ids match the tables' profiles.

    Args:
        tables: As for `draw_batch`.
        batch_size: Samples.
        seed: Equal seeds give equal batches on any device.
        device: Device of the batch.
    """
    drawn = draw_batch(tables, batch_size, seed)
    ids, lengths = zip(*drawn.values(), strict=True)
    generator = torch.Generator().manual_seed(seed)
    dense = torch.randn(batch_size, NUM_DENSE_FEATURES, generator=generator)
    clicks = torch.rand(batch_size, generator=generator).round()
    jagged = KeyedJaggedTensor.from_lengths_sync(
        keys=list(drawn),
        values=torch.cat([torch.from_numpy(i) for i in ids]),
        lengths=torch.cat([torch.from_numpy(n) for n in lengths]),
    )
    return ClickBatch(dense.to(device), jagged.to(device), clicks.to(device))


def stand_ins(
    tables: Sequence[TableConfig], batch: ClickBatch
) -> tuple[KeyedTensor | None, list[tuple[torch.Tensor, torch.Tensor]]]:
    """Return inputs of `DenseLayers` of a batch's shape, which take gradients.

    Args:
        tables: Tables of the model.
        batch: A rank's input.
    """

    def rows(count: int, width: int) -> torch.Tensor:
        zeros = torch.zeros(count, width, device=batch.dense_BD.device)
        return zeros.requires_grad_()

    held = [(n, t) for t in tables for n in feature_names(t)]
    bags = {name: t.embedding_dim for name, t in held if t.pooled}
    count = len(batch.dense_BD)
    pooled = KeyedTensor([*bags], [*bags.values()], rows(count, sum(bags.values())))
    histories = []
    for name, table in held:
        if not table.pooled:
            own = batch.ids[name]
            own_rows = rows(len(own.values()), table.embedding_dim)
            histories.append((own_rows, own.lengths()))
    return pooled if bags else None, histories


def draw_batches(
    tables: Sequence[TableConfig],
    batch_size: int,
    seed: int,
    rank: int,
    device: torch.device,
) -> list[ClickBatch]:
    """Return the `NUM_BATCHES` batches of a rank; see `draw_clicks`."""
    seeds = (_batch_seed(seed, rank, number) for number in range(NUM_BATCHES))
    return [draw_clicks(tables, batch_size, s, device) for s in seeds]


def profile_tables(
    tables: Sequence[TableConfig], batch_size: int, seed: int, world_size: int
) -> dict[str, FeatureProfile]:
    """Return profiles of the first batches of all ranks, one iteration's input."""
    cpu = torch.device("cpu")
    return profile_inputs(
        draw_clicks(tables, batch_size, _batch_seed(seed, rank, 0), cpu).ids
        for rank in range(world_size)
    )


def _batch_seed(seed: int, rank: int, number: int) -> int:
    return (seed * 10_000 + rank) * 100 + number


def local_tables(
    sharded: nn.Module,
) -> Iterator[tuple[str, torch.Tensor, tuple[int, int]]]:
    """Yield the shards of a sharded model on this rank.

    Yields:
        Table, values of a shard or replica, and its first row and column.
    """
    for key, value in sharded.state_dict().items():
        if (name := table_of(key)) is None:
            continue
        shards: Any = getattr(value, "local_shards", None)
        if shards is None:
            yield name, value, (0, 0)
            continue
        for shard in shards():
            row, column = shard.metadata.shard_offsets
            yield name, shard.tensor, (row, column)


def fill_tables(sharded: nn.Module, tables: Sequence[TableConfig], seed: int) -> None:
    """Initialise weights by table, row and column, independent of the plan."""
    numbers = {t.name: i for i, t in enumerate(tables)}
    with torch.no_grad():
        for name, values, (top, left) in local_tables(sharded):
            number = numbers[name]
            table = tables[number]
            bottom, width = top + values.shape[0], values.shape[1]
            for start in range(
                top - top % _CHUNK_ROWS, bottom, _CHUNK_ROWS
            ):  # chunks begin at the same rows whatever the shard
                chunk = _draw_chunk(table, (seed, number, start), values.device)
                low = max(start, top)
                high = min(start + len(chunk), bottom)
                values[low - top : high - top].copy_(
                    chunk[low - start : high - start, left : left + width]
                )


def _draw_chunk(
    table: TableConfig, key: tuple[int, int, int], device: torch.device
) -> torch.Tensor:
    seed, number, start = key
    rows = min(_CHUNK_ROWS, table.num_embeddings - start)
    generator = torch.Generator(device=device).manual_seed(
        (seed * 1_000 + number) * 1_000_000 + start // _CHUNK_ROWS
    )
    bound = table.num_embeddings**-0.5
    values = torch.empty(rows, table.embedding_dim, device=device)
    return values.uniform_(-bound, bound, generator=generator)
