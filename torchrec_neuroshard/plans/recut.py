"""Cut a stored tensor of a table into the shards of another plan.

The tensor has one value per weight, or one per row of each column shard. It is read and
written in blocks of rows, so that no shard has to be in memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from torchrec_neuroshard.plans.checkpoint import Checkpoint, CheckpointWriter
from torchrec_neuroshard.report.plan_tables import Box

BLOCK_BYTES = 2**26
"""Bytes of a tensor that are read at once."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Where a tensor stores what belongs to the rows and columns of a table."""

    num_rows: int
    num_columns: int
    groups: tuple[tuple[int, int], ...] = ()
    """First and last column (exclusive) of each column shard, if the tensor has one
    value per row of each shard. Empty: it has one value per weight."""
    is_flat: bool = True
    """Whether a tensor with groups has one dimension. That of TorchRec's dense
    RowWiseAdagrad has two."""

    @property
    def size(self) -> torch.Size:
        """Size of the tensor."""
        if not self.groups:
            return torch.Size([self.num_rows, self.num_columns])
        size = [self.num_rows * len(self.groups), 1]
        return torch.Size(size[:1] if self.is_flat else size)

    def box(self, chunk: ChunkStorageMetadata) -> Box:
        """Return the rows and columns of a chunk."""
        group, top = divmod(chunk.offsets[0], self.num_rows)
        if self.groups:
            left, right = self.groups[group]
        else:
            left, right = chunk.offsets[1], chunk.offsets[1] + chunk.sizes[1]
        return Box(top, left, top + chunk.sizes[0], right)

    def chunk(self, box: Box) -> ChunkStorageMetadata:
        """Return the chunk of rows and columns."""
        offsets, sizes = [box.top, box.left], [box.bottom - box.top, box.width]
        if self.groups:
            above = self.groups.index(box.columns) * self.num_rows
            offsets, sizes = [above + box.top, 0], [sizes[0], 1]
        dims = len(self.size)
        return ChunkStorageMetadata(
            torch.Size(offsets[:dims]), torch.Size(sizes[:dims])
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Recut:
    """A tensor of the new checkpoint, made from one of the old checkpoint."""

    old_name: str
    name: str
    path: tuple[Any, ...]
    """Path in the saved dictionary."""
    properties: TensorProperties
    old_layout: Layout
    layout: Layout
    held: Sequence[tuple[MetadataIndex, Box]]
    """The old chunks."""
    shards: Sequence[tuple[int, Box]]
    """The new shards and their ranks."""

    def write(
        self, source: Checkpoint, writer: CheckpointWriter
    ) -> TensorStorageMetadata:
        """Write the tensor; return its metadata.

        Raises:
            CheckpointError: A chunk cannot be read.
        """
        chunks = []
        indices = {box: index for index, box in self.held}
        is_kept = indices.keys() == {box for _, box in self.shards}
        if is_kept and self.layout == self.old_layout:
            for rank, box in self.shards:
                chunks.append(self.layout.chunk(box))
                writer.copy(indices[box], self.name, rank)
        else:
            for rank, box, values in self._parts(source):
                chunks.append(chunk := self.layout.chunk(box))
                writer.save(self.name, chunk.offsets, values.reshape(chunk.sizes), rank)
        return TensorStorageMetadata(self.properties, self.layout.size, chunks)

    def _parts(self, source: Checkpoint) -> Iterator[tuple[int, Box, torch.Tensor]]:
        """Yield rank, rows and columns, and values of each new chunk.

        Values are valid until the next ones are made.
        """
        num_rows, itemsize = self.layout.num_rows, self.properties.dtype.itemsize
        row_bytes = self.old_layout.size.numel() // num_rows * itemsize
        rows = {row for _, box in self.shards for row in (box.top, box.bottom)}
        rows |= {*range(0, num_rows, max(1, BLOCK_BYTES // row_bytes))}
        readers: dict[MetadataIndex, Generator[torch.Tensor, int, None]] = {}
        memory: dict[int, torch.Tensor] = {}
        for top, bottom in itertools.pairwise(sorted(rows)):
            block = []
            for index, box in self.held:
                common = box.common(Box(top, 0, bottom, self.layout.num_columns))
                if not common.size:
                    continue
                if index not in readers:
                    readers[index] = source.rows(index)
                    next(readers[index])
                block.append((common, readers[index].send(common.bottom - common.top)))
            for rank, shard in self.shards:
                if shard.top <= top < shard.bottom:
                    box = Box(top, shard.left, bottom, shard.right)
                    yield rank, box, self._values(box, block, memory)
            for index in [i for i, box in self.held if box.bottom == bottom]:
                readers.pop(index).close()

    def _values(
        self,
        box: Box,
        block: Sequence[tuple[Box, torch.Tensor]],
        memory: dict[int, torch.Tensor],
    ) -> torch.Tensor:
        """Return the values of rows and columns from those that overlap them."""
        dtype, groups = self.properties.dtype, self.layout.groups
        height, width = box.bottom - box.top, 1 if groups else box.width
        values = memory.get(width)
        if values is None or len(values) != height:  # new memory is slow
            kind = torch.float64 if groups else dtype
            memory[width] = values = torch.empty(height, width, dtype=kind)
        if groups:
            values.zero_()
        for held, rows in block:
            common = box.common(held)
            to, of = common.within(box), common.within(held)
            if groups and common.size:
                values[to[0]] += rows[of[0]].double() * common.width
            elif common.size:
                values[to] = rows[of]
        if groups:
            values /= box.width
            values = values if dtype.is_floating_point else values.round()
        return values.to(dtype)


@dataclass(frozen=True, slots=True)
class Counter:
    """A tensor with one value for all shards of a table, or one for each."""

    name: str
    path: tuple[Any, ...]
    """Path in the saved dictionary."""
    value: torch.Tensor
    """Without dimension: one for all shards. One dimension: each shard's."""
    ranks: Sequence[int]
    """Ranks of the shards."""

    def write(self, _: Checkpoint, writer: CheckpointWriter) -> TensorStorageMetadata:
        """Write the counter; return its metadata."""
        sizes, chunks = self.value.shape, []
        for i, rank in enumerate(self.ranks):
            offsets = torch.Size([i] * len(sizes))
            chunks.append(ChunkStorageMetadata(offsets, sizes))
            writer.save(self.name, offsets, self.value, rank)
        properties = TensorProperties.create_from_tensor(self.value)
        size = torch.Size([len(self.ranks)] * len(sizes))
        return TensorStorageMetadata(properties, size, chunks)
