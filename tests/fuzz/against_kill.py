"""Writers that are killed, or whose disk is full, at any moment.

    python -m tests.fuzz.against_kill 2000 1

A process of its own changes what an earlier one has written. Then what lies there must
be whole: the old or the new; of records, all but the one in flight. And the same
change, made again, must succeed. A writer ends before a certain touch of the disk, or
in the midst of a write.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import resource
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.builders import (
    draw_set,
    make_header,
    make_record,
    write_records,
)
from tests.fuzz import against_files
from tests.fuzz.campaign import Case, Outcome, run
from torchrec_neuroshard.cost_models import cache, load_bundle
from torchrec_neuroshard.cost_models.bundle import COMPUTE_BUNDLE
from torchrec_neuroshard.cost_models.loading import bundle_folder
from torchrec_neuroshard.planner import read_plan
from torchrec_neuroshard.record_store import (
    RecordStore,
    read_records,
)
from torchrec_neuroshard.records import CostRecord

NUM_RECORDS = 5
PROGRESS, TOUCHES = "told", "touches"
"""Beside the folder: what a writer said was safely written, and how often it touched
the disk."""
WRITTEN = "written"


class Writer:
    """What changes files of one kind, and what must hold of them."""

    def prepare(self, folder: Path) -> None:
        """Write what is there before."""

    def write(self, folder: Path, tell: Callable[[int], None]) -> None:
        """Change it; `tell` says how much is safe by now."""

    def check(self, folder: Path, told: int) -> None:
        """Raise where something is lost or half-written."""


@functools.cache
def _records() -> tuple[CostRecord, ...]:
    rng = np.random.default_rng(0)
    return tuple(
        make_record(tables, index=index, batch_size=batch_size)
        for index in range(NUM_RECORDS)
        for batch_size, tables in [draw_set(rng, f"s{index}", 3, 8)]
    )


class Records(Writer):
    """Two records in a file, and three that are measured."""

    def prepare(self, folder: Path) -> None:
        write_records(folder / "r.parquet", make_header(), _records()[:2])

    def write(self, folder: Path, tell: Callable[[int], None]) -> None:
        with RecordStore(folder / "r.parquet", make_header()) as store:
            for record in _records():
                if record.index not in store.done:
                    store.append(record)
                    tell(record.index + 1)

    def check(self, folder: Path, told: int) -> None:
        found = read_records([folder / "r.parquet"])[1]
        assert len(found) >= max(2, told), f"{len(found)} of {told} records"
        assert [r.index for r in found] == list(range(len(found)))
        assert [r.fwd_ms for r in found] == [r.fwd_ms for r in _records()[: len(found)]]


class Bundle(Writer):
    """A model that another one replaces."""

    names = "cpu", "cpu_epyc_zen5"

    def _save(self, folder: Path, name: str) -> None:
        source = bundle_folder(name)
        assert source is not None
        network, info = COMPUTE_BUNDLE.load(source)
        COMPUTE_BUNDLE.save(folder, network, info, name)

    def prepare(self, folder: Path) -> None:
        self._save(folder, self.names[0])

    def write(self, folder: Path, tell: Callable[[int], None]) -> None:
        self._save(folder, self.names[1])
        tell(1)

    def check(self, folder: Path, told: int) -> None:
        name = COMPUTE_BUNDLE.read_info(folder).name
        assert name in self.names[told:], f"{name} after {told}"
        shipped = bundle_folder(name)
        assert shipped is not None
        names = COMPUTE_BUNDLE.read_info(folder).feature_names
        probe = np.ones((1, len(names)), np.float32)
        found, wanted = (
            load_bundle(path).predict_sets(probe, np.array([0]), 1)
            for path in (folder, shipped)
        )
        assert (found == wanted).all(), "other weights"


def _source() -> Path:
    source = bundle_folder("cpu_epyc_zen5")
    assert source is not None
    return source


class Plan(Writer):
    """A plan file that another one replaces."""

    def prepare(self, folder: Path) -> None:
        shutil.copy(against_files.sound_files() / "plan" / "plan.json", folder)

    def write(self, folder: Path, tell: Callable[[int], None]) -> None:
        against_files.make_plan(folder)
        tell(1)

    def check(self, folder: Path, told: int) -> None:
        read_plan(folder / "plan.json").report()


KEY = cache.CacheKey(
    device="d",
    device_type="cpu",
    world_size=2,
    local_world_size=2,
    optimizers=("sgd",),
    data_types=("fp32",),
    torch="2",
    fbgemm="1",
    torchrec="1",
    feature_gates=(),
    feature_version=2,
)


class Cache(Writer):
    """A bundle that takes the place of a damaged one."""

    def prepare(self, folder: Path) -> None:
        self._store(folder, ("CARD.md",))

    def _store(self, folder: Path, files: tuple[str, ...]) -> None:
        os.environ["NEUROSHARD_CACHE"] = str(folder / "cache")
        with tempfile.TemporaryDirectory() as measured:
            for file in files:
                shutil.copy(_source() / file, measured)
            cache.store(Path(measured), KEY, created="2", seconds=1.0)

    def write(self, folder: Path, tell: Callable[[int], None]) -> None:
        self._store(folder, ("bundle.json", "weights.safetensors", "CARD.md"))
        tell(1)

    def check(self, folder: Path, told: int) -> None:
        os.environ["NEUROSHARD_CACHE"] = str(folder / "cache")
        assert not told or cache.find(KEY) is not None
        for found in cache.entries():
            load_bundle(found.folder)


WRITERS: dict[str, Writer] = {
    "records": Records(),
    "bundle": Bundle(),
    "plan": Plan(),
    "cache": Cache(),
}
WAYS = ("kill", "kill in a write", "full", "full in a write")
"""From a touch of the disk on none succeeds, or no file may be longer than that: the
process is killed there, or there is no room."""


def draw(rng: np.random.Generator) -> Case:
    """Choose a writer and the moment when it ends."""
    return {
        "writer": str(rng.choice(list(WRITERS))),
        "way": str(rng.choice(WAYS)),
        "moment": float(rng.random()),
    }


def judge(case: Case) -> Outcome:
    """End a writer, look at what it has left, and let it run again."""
    name, way, moment = case["writer"], case["way"], case["moment"]
    writer, (touches, longest) = WRITERS[name], extent(name)
    with tempfile.TemporaryDirectory(prefix="killed-") as held:
        folder = Path(held, "files")
        folder.mkdir()
        writer.prepare(folder)
        limit = int(moment * (longest if "write" in way else touches))
        status = _in_process(writer, folder, way, limit)
        told = _told(folder)
        for attempt in ("left", "again"):
            try:
                writer.check(folder, told)
            except Exception as error:
                return f"failure, {name} {attempt}: {way}, {error!r}"
            if attempt == "left":
                ended = _in_process(writer, folder)
                if ended != WRITTEN:
                    return f"failure, {name} does not go on: {way}, {ended}"
                told = max(told, _told(folder))
    return f"{name}, {way}: {status}"


@functools.cache
def extent(name: str) -> tuple[int, int]:
    """How often a writer touches the disk, and how long its longest file is."""
    writer = WRITERS[name]
    with tempfile.TemporaryDirectory(prefix="whole-") as held:
        folder = Path(held, "files")
        folder.mkdir()
        writer.prepare(folder)
        assert _in_process(writer, folder) == WRITTEN, f"{name} fails by itself"
        count = len(Path(held, TOUCHES).read_bytes())
        sizes = [p.stat().st_size for p in folder.rglob("*") if p.is_file()]
    return count, max(sizes)


def _told(folder: Path) -> int:
    path = folder.with_name(PROGRESS)
    return len(path.read_bytes()) if path.exists() else 0


def _in_process(writer: Writer, folder: Path, way: str = "", limit: int = 0) -> str:
    """Run a writer in a process of its own; return how it ended."""
    return against_files.in_child(lambda: _write(writer, folder, way, limit))


def _write(writer: Writer, folder: Path, way: str, limit: int) -> str:
    flags = os.O_CREAT | os.O_WRONLY | os.O_TRUNC
    progress, touches = (
        os.open(folder.with_name(n), flags) for n in (PROGRESS, TOUCHES)
    )
    torch.set_num_threads(1)  # of more, a child of fork has none
    count = said = 0

    def tell(safe: int) -> None:
        nonlocal said
        os.write(progress, b"." * (safe - said))
        said = safe

    def touch(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        if not _touches(event, arguments, str(folder)):
            return
        count += 1
        if way == "kill" and count > limit:
            if event == "open" and arguments[2] & os.O_TRUNC:
                # As if it ended right after that; by C, which is no touch.
                ctypes.CDLL(None).truncate(os.fsencode(arguments[0]), 0)
            os.kill(os.getpid(), signal.SIGKILL)
        if way == "full" and count > limit:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.write(touches, b".")

    if "write" in way:
        if "kill" in way:
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    else:
        sys.addaudithook(touch)
    try:
        writer.write(folder, tell)
    except OSError:
        return "OSError"
    return WRITTEN


def _touches(event: str, arguments: tuple[Any, ...], folder: str) -> bool:
    if event == "open":
        path, _, flags = arguments
        writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        return bool(writes) and str(path).startswith(folder)
    if event in ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate"):
        return folder in str(arguments[0]) or folder in str(arguments[1])
    return False


if __name__ == "__main__":
    sys.exit(run(draw, judge))
