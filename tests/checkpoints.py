"""Checkpoints of sharded tables, written without ranks and read by PyTorch itself."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    EnumerableShardingSpec,
    ParameterSharding,
    ShardingPlan,
    ShardMetadata,
)

Box = tuple[int, int, int, int]
"""First row, first column, number of rows, number of columns."""
Cut = Sequence[tuple[int, Box]]
"""Rank and box of each shard."""
Chunks = Sequence[tuple[int, Sequence[int], torch.Tensor]]
"""Rank, offsets and values of each chunk of a tensor."""

MODULE = "sparse.ebc"


def grid(rows: Sequence[int], columns: Sequence[int], ranks: Sequence[int]) -> Cut:
    """Cut a table into parts of these heights and widths, column by column."""
    boxes = []
    for i, width in enumerate(columns):
        for j, height in enumerate(rows):
            boxes.append((sum(rows[:j]), sum(columns[:i]), height, width))
    return [(ranks[i % len(ranks)], box) for i, box in enumerate(boxes)]


def plan_of(cuts: Mapping[str, Cut | None], kernel: str = "fused") -> ShardingPlan:
    """Return a plan of one module; None replicates a table on two ranks."""
    found = {}
    for name, cut in cuts.items():
        shards = [
            ShardMetadata([top, left], [height, width], f"rank:{rank}/cpu")
            for rank, (top, left, height, width) in cut or ()
        ]
        found[name] = ParameterSharding(
            sharding_type="data_parallel" if cut is None else "grid_shard",
            compute_kernel="dense" if cut is None else kernel,
            ranks=[0, 1] if cut is None else [rank for rank, _ in cut],
            sharding_spec=None if cut is None else EnumerableShardingSpec(shards),
        )
    return ShardingPlan({MODULE: EmbeddingModuleShardingPlan(found)})


def cut_weights(cut: Cut, values: torch.Tensor) -> Chunks:
    """Return the chunks of a tensor with a value per weight."""
    return [
        (rank, (top, left), values[top : top + height, left : left + width])
        for rank, (top, left, height, width) in cut
    ]


def cut_rows(cut: Cut, values: torch.Tensor) -> Chunks:
    """Return the chunks of a tensor with a value per row of each column shard.

    TorchRec has the shards of one column range behind those of the last.

    Args:
        cut: The table's.
        values: `rows x columns`; equal for all columns of a shard.
    """
    groups = sorted({left for _, (_, left, _, _) in cut})
    return [
        (
            rank,
            (groups.index(left) * len(values) + top,),
            values[top : top + height, left],
        )
        for rank, (top, left, height, _) in cut
    ]


def weight_key(table: str) -> str:
    return f"{MODULE}.embedding_bags.{table}.weight"


def state_path(table: str, name: str) -> tuple[str, ...]:
    return ("optimizer", "state", weight_key(table), name)


def write_checkpoint(
    folder: Path, entries: Mapping[tuple[str, ...], Chunks | dict[str, Any]]
) -> None:
    """Write a checkpoint as `torch.distributed.checkpoint` does.

    Args:
        folder: Where to.
        entries: Path in the saved dictionary -> chunks, or an object.
    """
    folder.mkdir()
    metadata = Metadata({}, {}, {}, StorageMeta(), "1.0.0")
    for path, entry in entries.items():
        name = ".".join(path)
        metadata.planner_data[name] = path
        chunks: Any = entry
        if isinstance(entry, dict):
            chunks = [(0, None, entry)]
        for rank, offsets, content in chunks:
            file = f"__{rank}_0.distcp"
            with (folder / file).open("ab") as stream:
                start = stream.tell()
                whole = content.clone() if torch.is_tensor(content) else content
                torch.save(whole, stream)
                place = _StorageInfo(file, start, stream.tell() - start)
            metadata.storage_data[MetadataIndex(name, offsets)] = place
        if isinstance(entry, dict):
            metadata.state_dict_metadata[name] = BytesStorageMetadata()
            continue
        ends = [[*map(sum, zip(at, t.shape, strict=True))] for _, at, t in entry]
        metadata.state_dict_metadata[name] = TensorStorageMetadata(
            TensorProperties.create_from_tensor(entry[0][2]),
            torch.Size(map(max, zip(*ends, strict=True))),
            [ChunkStorageMetadata(torch.Size(at), t.shape) for _, at, t in entry],
        )
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def read_checkpoint(folder: Path) -> dict[str, Any]:
    """Return the saved dictionary with whole tensors."""
    file = folder.with_suffix(".pt")
    dcp_to_torch_save(folder, file)
    found: dict[str, Any] = torch.load(file, weights_only=False)
    file.unlink()
    return found
