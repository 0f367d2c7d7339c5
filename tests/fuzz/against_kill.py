"""Writers that are killed, or whose disk is full, at any moment.

A process of its own changes what an earlier one has written. Then what lies there must
be whole: the old or the new; of records, all but the one in flight. And the same
change, made again, must succeed. A writer ends before a certain touch of the disk, or
in the midst of a write.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch

from tests import checkpoints
from tests.builders import make_header, write_records
from tests.fuzz import against_files
from tests.fuzz.campaign import Case, Outcome
from torchrec_neuroshard.bundles import cache
from torchrec_neuroshard.bundles.descriptions import COMPUTE_DESCRIPTION
from torchrec_neuroshard.bundles.find import load_cost_model
from torchrec_neuroshard.bundles.folders import PRETRAINED
from torchrec_neuroshard.bundles.format import COMPUTE_BUNDLE
from torchrec_neuroshard.errors import CheckpointError
from torchrec_neuroshard.measure.store import RecordStore, read_records
from torchrec_neuroshard.plans.reshard import reshard
from torchrec_neuroshard.plans.stored_plan import read_plan

PROGRESS = "told"
"""File beside the folder: a byte for each thing that the writer called safe."""
WRITTEN = "written"
TOUCHES, BYTES = 30, 10**5
"""Upper limits: few writers touch the disk more often, and no file is longer."""


class Writer:
    """Changes files of one kind, and checks them."""

    def prepare(self, folder: Path) -> None:
        """Write the old state."""

    def write(self, folder: Path, tell: Callable[[], object]) -> None:
        """Write the new state; call `tell` when one more thing is safe."""

    def check(self, folder: Path, told: int) -> None:
        """Raise if something is lost or half-written."""


class Records(Writer):
    """A file with two records; three more are measured."""

    def prepare(self, folder: Path) -> None:
        known = against_files.some_records()[:2]
        write_records(folder / "r.jsonl", make_header(), known)

    def write(self, folder: Path, tell: Callable[[], object]) -> None:
        with RecordStore(folder / "r.jsonl", make_header()) as store:
            for record in against_files.some_records():
                if record.index not in store.done:
                    store.append(record)
                    tell()

    def check(self, folder: Path, told: int) -> None:
        found = read_records([folder / "r.jsonl"])[1]
        assert len(found) >= 2 + told, f"{len(found)} records, {told} are safe"
        known = against_files.some_records()[: len(found)]
        assert [(r.index, r.fwd_ms) for r in found] == [
            (r.index, r.fwd_ms) for r in known
        ]


class Bundle(Writer):
    """A model is replaced by another one."""

    names = "cpu", "cpu_epyc_zen5"

    def _save(self, folder: Path, name: str) -> None:
        network, info = COMPUTE_BUNDLE.load(PRETRAINED / name)
        COMPUTE_BUNDLE.save(folder, network, info, name)

    def prepare(self, folder: Path) -> None:
        self._save(folder, self.names[0])

    def write(self, folder: Path, tell: Callable[[], object]) -> None:
        self._save(folder, self.names[1])
        tell()

    def check(self, folder: Path, told: int) -> None:
        name = COMPUTE_DESCRIPTION.read_info(folder).name
        assert name in self.names[told > 0 :], f"{name}, {told} are safe"
        found, wanted = (
            COMPUTE_BUNDLE.load(path)[0].state_dict()
            for path in (folder, PRETRAINED / name)
        )
        assert all(torch.equal(found[key], wanted[key]) for key in wanted)


class Plan(Writer):
    """A plan file is replaced by another one."""

    def prepare(self, folder: Path) -> None:
        shutil.copy(against_files.sound_files() / "plan" / "plan.json", folder)

    def write(self, folder: Path, tell: Callable[[], object]) -> None:
        against_files.make_plan(folder)
        tell()

    def check(self, folder: Path, told: int) -> None:
        read_plan(folder / "plan.json").report()


KEY = cache.CacheKey(
    device="d",
    device_type="cpu",
    world_size=2,
    local_world_size=2,
    optimizers=("sgd",),
    data_types=("fp32",),
)


class Cache(Writer):
    """A damaged bundle in the cache is replaced."""

    def _store(self, folder: Path, files: Sequence[str]) -> None:
        os.environ["NEUROSHARD_CACHE"] = str(folder / "cache")
        with tempfile.TemporaryDirectory() as measured:
            for file in files:
                shutil.copy(PRETRAINED / "cpu_epyc_zen5" / file, measured)
            cache.store(Path(measured), KEY, created="2", seconds=1.0)

    def prepare(self, folder: Path) -> None:
        self._store(folder, ["CARD.md"])

    def write(self, folder: Path, tell: Callable[[], object]) -> None:
        self._store(folder, ["bundle.json", "weights.safetensors", "CARD.md"])
        tell()

    def check(self, folder: Path, told: int) -> None:
        os.environ["NEUROSHARD_CACHE"] = str(folder / "cache")
        assert not told or cache.find(KEY) is not None
        for found in cache.entries():
            load_cost_model(found.folder)


class Resharded(Writer):
    """A checkpoint is converted for another plan; the old one stays as it was."""

    cut = checkpoints.grid([300, 212], [32, 32], [0, 1])
    new = checkpoints.grid([512], [64], [2])

    def prepare(self, folder: Path) -> None:
        rng = torch.Generator().manual_seed(1)
        weights = torch.rand(512, 64, generator=rng)
        state = torch.rand(512, 1, generator=rng).expand(512, 64)
        entries: dict[tuple[str, ...], Any] = {
            ("model", checkpoints.weight_key("t")): checkpoints.cut_weights(
                self.cut, weights
            ),
            checkpoints.state_path("t", "t.momentum1"): checkpoints.cut_rows(
                self.cut, state
            ),
        }
        checkpoints.write_checkpoint(folder / "old", entries)

    def write(self, folder: Path, tell: Callable[[], object]) -> None:
        if not (folder / "new").exists():
            plan = checkpoints.plan_of({"t": self.new})
            reshard(folder / "old", plan, folder / "new")
        tell()

    def check(self, folder: Path, told: int) -> None:
        new = folder / "new"
        assert new.exists() or not told
        whole = [checkpoints.read_checkpoint(folder / "old")]
        if new.exists():
            whole.append(checkpoints.read_checkpoint(new))
        key = checkpoints.weight_key("t")
        values = [found["model"][key] for found in whole]
        assert all(torch.equal(value, values[0]) for value in values)
        states = [found["optimizer"]["state"][key]["t.momentum1"] for found in whole]
        assert all(torch.equal(state, states[0][:512]) for state in states[1:])


WRITERS: dict[str, Writer] = {
    "records": Records(),
    "bundle": Bundle(),
    "plan": Plan(),
    "cache": Cache(),
    "resharded": Resharded(),
}
WAYS = ("kill", "kill in a write", "full", "full in a write")
"""The limit is a number of touches, or, in a write, the longest that a file may be in
bytes. Beyond it the process is killed, or the disk reports no space left."""


def draw(rng: Random) -> Case:
    """Choose a writer and the moment when it ends."""
    way = rng.choice(WAYS)
    limit = int(BYTES ** rng.random()) if "write" in way else rng.randrange(TOUCHES)
    return {"writer": rng.choice(list(WRITERS)), "way": way, "limit": limit}


def judge(case: Case) -> Outcome:
    """End a writer, check what it left, and run it again."""
    name, way = case["writer"], case["way"]
    writer = WRITERS[name]
    with tempfile.TemporaryDirectory(prefix="killed-") as held:
        folder = Path(held, "files")
        folder.mkdir()
        writer.prepare(folder)
        status = against_files.in_child(
            lambda: _write(writer, folder, way, case["limit"])
        )
        for attempt in ("left", "again"):
            try:
                writer.check(folder, len(Path(held, PROGRESS).read_bytes()))
            except Exception as error:
                return f"failure, {name} {attempt}: {way}, {error!r}"
            if attempt == "left":
                ended = against_files.in_child(lambda: _write(writer, folder))
                if ended != WRITTEN:
                    return f"failure, {name} does not go on: {way}, {ended}"
    return f"{name}, {way}: {status}"


def _write(writer: Writer, folder: Path, way: str = "", limit: int = 0) -> str:
    """Run a writer in this process, which a parent forked; return how it ended."""
    flags = os.O_CREAT | os.O_WRONLY | os.O_APPEND
    progress = os.open(folder.with_name(PROGRESS), flags)
    torch.set_num_threads(1)  # of more, a child of fork has none
    count = 0

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

    if "write" in way:
        if "kill" in way:
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    else:
        sys.addaudithook(touch)
    try:
        writer.write(folder, lambda: os.write(progress, b"."))
    except (OSError, CheckpointError):
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
