"""Folders of `torch.distributed.checkpoint`, read and written a few rows at a time.

A folder has the file `.metadata` and files `__<rank>_<number>.distcp`. The metadata
lists every tensor with its chunks, and where each chunk is. A chunk is an archive of
`torch.save`: a zip file whose entries are not compressed, so its rows can be read one
after another, without the rest in memory.
"""

from __future__ import annotations

import dataclasses
import io
import itertools
import os
import pickle
import re
import shutil
import struct
import threading
import uuid
import zipfile
import zlib
from collections import defaultdict
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from torchrec_neuroshard.costs.task import format_bytes
from torchrec_neuroshard.errors import CheckpointError
from torchrec_neuroshard.progress import Phase

COPY_BYTES = 2**16
"""Bytes that are read or written at once. Linux can be far slower with megabytes, for
which it needs new memory."""


class Checkpoint:
    """A checkpoint on disk. Its tensors stay there."""

    def __init__(self, folder: Path) -> None:
        """Read the metadata, and check that every chunk is there.

        Raises:
            CheckpointError: The folder holds no checkpoint, or a file is missing or
                ends early. The message names tensor, rank and file.
        """
        self.folder = folder
        try:
            self.metadata: Metadata = FileSystemReader(folder).read_metadata()
            self.entries: Mapping[str, Any] = self.metadata.state_dict_metadata
            self.places: Mapping[MetadataIndex, Any] = self.metadata.storage_data or {}
            paths = self.metadata.planner_data or {}
            self.paths = {
                name: tuple(paths.get(name, (name,))) for name in self.entries
            }
        except Exception as error:  # unpickling raises anything
            kind = "" if isinstance(error, OSError) else f"{type(error).__name__}: "
            raise CheckpointError(
                f"'{folder}' holds no checkpoint that can be read: {kind}{error}. Name "
                "a folder that torch.distributed.checkpoint.save has finished"
            ) from error
        self.tensors = {
            name: entry
            for name, entry in self.entries.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        on_disk = {file.name: file.stat().st_size for file in folder.iterdir()}
        chunks = [index for name in self.tensors for index, _ in self.chunks(name)]
        for index in dict.fromkeys([*chunks, *self.places]):
            place = self.places.get(index)
            if place is None:
                fault = f"the checkpoint '{folder}' lacks its chunk at {index.offset}"
            elif on_disk.get(place.relative_path, -1) < place.offset + place.length:
                ends = "ends early" if place.relative_path in on_disk else "is missing"
                fault = f"{self._file(index)} {ends}"
            else:
                continue
            raise CheckpointError(
                f"'{index.fqn}' cannot be read: {fault}. Restore the file, or use "
                "another checkpoint"
            )

    def chunks(self, name: str) -> Iterator[tuple[MetadataIndex, ChunkStorageMetadata]]:
        """Yield the chunks of a tensor that are not empty."""
        for chunk in self.tensors[name].chunks:
            if chunk.sizes.numel():
                yield MetadataIndex(name, chunk.offsets), chunk

    def rank(self, index: MetadataIndex) -> int:
        """Return the rank that wrote a chunk."""
        found = re.match(r"__(\d+)_", self.places[index].relative_path)
        return int(found[1]) if found else 0

    def _file(self, index: MetadataIndex) -> str:
        file = self.folder / self.places[index].relative_path
        return f"the file '{file}' of rank {self.rank(index)}"

    @contextmanager
    def open(self, index: MetadataIndex) -> Iterator[_Slice]:
        """Open a chunk or another object for reading."""
        place = self.places[index]
        with (self.folder / place.relative_path).open("rb") as file:
            yield _Slice(file, place.offset, place.length)

    @contextmanager
    def _naming(self, index: MetadataIndex) -> Iterator[None]:
        """Name tensor, rank and file in what goes wrong."""
        try:
            yield
        except Exception as error:  # unpickling raises anything
            raise CheckpointError(
                f"'{index.fqn}' cannot be read: {self._file(index)} is damaged "
                f"({type(error).__name__}: {error}). Restore it, or use another "
                "checkpoint"
            ) from error

    def check(self, index: MetadataIndex) -> None:
        """Compare the checksums of a chunk or another object.

        Raises:
            CheckpointError: It is damaged. The message names it, rank and file.
        """
        if _is_transformed(self.places[index]):
            return
        part = memoryview(bytearray(COPY_BYTES))
        with self._naming(index), self.open(index) as stream:
            for record in _records(stream):
                while record.left:
                    record.read(part[: record.left])

    def rows(self, index: MetadataIndex) -> Generator[torch.Tensor, int, None]:
        """Return a generator: send it a number of rows, and it yields the next ones.

        It first yields a tensor without values of the chunk's size. Rows are valid
        until the next ones are read. With the last rows it compares the checksum.

        Raises:
            CheckpointError: It is damaged. The message names tensor, rank and file.
        """
        with self._naming(index), self.open(index) as stream:
            if _is_transformed(self.places[index]):
                raise ValueError("an extension wrote it, such as compression")
            like = torch.load(cast(Any, stream), map_location="meta", weights_only=True)
            like = like.reshape(1) if like.dim() == 0 else like
            [record] = (r for r in _records(stream) if "/data/" in r.name)
            if not like.is_contiguous() or record.left != like.nbytes:
                raise ValueError("its rows are not one after another")
            row_bytes = like.nbytes // like.shape[0]
            memory = bytearray()
            num_rows = yield like
            while num_rows:
                if len(memory) < num_rows * row_bytes:  # new memory is slow
                    memory = bytearray(num_rows * row_bytes)
                found = memoryview(memory)[: num_rows * row_bytes]
                record.read(found)
                rows = torch.frombuffer(found, dtype=like.dtype)
                num_rows = yield rows.reshape(num_rows, -1)

    def load(self, index: MetadataIndex) -> torch.Tensor:
        """Return the values of a small chunk, in one dimension.

        Raises:
            CheckpointError: See `rows`.
        """
        rows = self.rows(index)
        return rows.send(max(1, next(rows).numel())).flatten()


def _is_transformed(place: Any) -> bool:
    """Whether an extension of `torch.distributed.checkpoint` wrote a chunk."""
    return bool(getattr(place, "transform_descriptors", None))


def _records(stream: _Slice) -> Iterator[_Record]:
    """Yield the records of an archive of `torch.save`, which are not compressed."""
    for entry in zipfile.ZipFile(stream).infolist():
        stream.seek(entry.header_offset + 26)
        name, extra = struct.unpack("<HH", stream.read(4))
        stream.seek(entry.header_offset + 30 + name + extra)
        yield _Record(stream, entry)


class _Record:
    """A record of an archive, read in parts."""

    def __init__(self, stream: _Slice, entry: zipfile.ZipInfo) -> None:
        self.name, self.left = entry.filename, entry.file_size
        self._stream, self._start = stream, stream.tell()
        self._wanted, self._checksum = entry.CRC, 0

    def read(self, part: memoryview) -> None:
        """Fill memory with the next bytes.

        Raises:
            ValueError: The archive ends early, or the checksum is another.
        """
        self._stream.seek(self._start)
        if self._stream.readinto(part) != len(part):
            raise ValueError("it ends early")
        self._checksum = zlib.crc32(part, self._checksum)
        self._start, self.left = self._start + len(part), self.left - len(part)
        # Without checksums (torch.serialization.set_crc32_options), they are 0.
        if not self.left and self._wanted not in (0, self._checksum):
            raise ValueError("its checksum is another")


class _Slice(io.RawIOBase):
    """A part of a file."""

    def __init__(self, file: io.BufferedReader, offset: int, length: int) -> None:
        self._file, self._offset, self._length, self._at = file, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._length)[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._offset + self._at)
        left = max(0, self._length - self._at)
        found = self._file.readinto(memoryview(buffer)[:left])
        self._at += found
        return found


class _InParts(io.RawIOBase):
    """Writes few bytes at once."""

    def __init__(self, stream: io.BufferedWriter) -> None:
        self._stream = stream
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        view = memoryview(data)
        try:
            for i in range(0, len(view), COPY_BYTES):
                self._stream.write(view[i : i + COPY_BYTES])
        except OSError as error:
            self.error = error
            raise
        return len(view)


class CheckpointWriter:
    """A new checkpoint from an old one. Its folder appears when all is written.

    Each thread writes files of its own.
    """

    def __init__(self, source: Checkpoint, folder: Path, shown: Phase) -> None:
        """Begin; use it as a context manager.

        Args:
            source: The old checkpoint.
            folder: The new one's.
            shown: Shows how much is written.

        Raises:
            CheckpointError: The folder exists, or cannot be made.
        """
        self._source, self._folder, self._shown = source, folder, shown
        self._places: dict[MetadataIndex, Any] = {}
        self._numbers = defaultdict[int, int](itertools.count().__next__)
        """Thread -> number of its files."""
        self._num_bytes, self._is_stopped = 0, False
        if folder.exists():
            raise CheckpointError(f"'{folder}' exists. Name a new folder")
        self._draft = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}.part")
        try:
            self._draft.mkdir(parents=True)
        except OSError as error:
            self.__exit__(None, error, None)

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        shutil.rmtree(self._draft, ignore_errors=True)
        if isinstance(error, OSError):
            raise CheckpointError(
                f"cannot write the checkpoint '{self._folder}': {error}. The old one "
                "is unchanged"
            ) from error

    def copy(self, index: MetadataIndex, name: str, rank: int) -> None:
        """Copy a chunk or another object into a rank's file, bit for bit."""
        self._source.check(index)
        place = self._source.places[index]
        with self._writing(MetadataIndex(name, index.offset), rank, place) as stream:
            with self._source.open(index) as held:
                shutil.copyfileobj(held, stream, COPY_BYTES)

    def save(
        self, name: str, offsets: Sequence[int] | None, content: object, rank: int
    ) -> None:
        """Write a chunk, or an object that has no offsets, into a rank's file."""
        like = next(iter(self._source.places.values()))
        like = dataclasses.replace(like, transform_descriptors=None)
        with self._writing(MetadataIndex(name, offsets), rank, like) as stream:
            parts = _InParts(stream)
            try:
                torch.save(content, cast(Any, parts))
            except RuntimeError as error:  # it hides why it could not write
                raise parts.error or error from error

    @contextmanager
    def _writing(
        self, index: MetadataIndex, rank: int, like: Any
    ) -> Iterator[io.BufferedWriter]:
        if self._is_stopped:
            raise CheckpointError(f"the checkpoint '{self._folder}' was given up")
        file = f"__{rank}_{self._numbers[threading.get_ident()]}.distcp"
        with (self._draft / file).open("ab") as stream:
            start = stream.tell()
            yield stream
            length = stream.tell() - start
        self._num_bytes += length
        self._shown.text = f"resharding, {format_bytes(self._num_bytes)} written"
        self._places[index] = dataclasses.replace(
            like, relative_path=file, offset=start, length=length
        )

    def stop(self) -> None:
        """End what other threads write, at their next chunk."""
        self._is_stopped = True

    def finish(self, entries: Mapping[str, Any], paths: Mapping[str, Any]) -> None:
        """Write the metadata, and give the folder its name.

        Args:
            entries: Metadata of every tensor and object.
            paths: Their paths in the saved dictionary.
        """
        metadata = dataclasses.replace(
            self._source.metadata,
            state_dict_metadata=dict(entries),
            storage_data=self._places,
            planner_data=self._source.metadata.planner_data and dict(paths),
        )
        (self._draft / ".metadata").write_bytes(pickle.dumps(metadata))
        for file in self._draft.iterdir():
            with file.open("rb") as stream:
                os.fsync(stream.fileno())
        self._draft.rename(self._folder)
