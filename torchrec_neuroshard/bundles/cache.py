"""Bundles that first launches have measured, kept for the launches after them.

The cache is a folder, `$NEUROSHARD_CACHE` or `torchrec-neuroshard` in the user's cache
folder, with a bundle's folder for each key: what the times depend on. A bundle is
written beside and appears whole by one rename, so that jobs may share the folder, on
several machines, too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from filelock import FileLock, Timeout

from torchrec_neuroshard.bundles.format import COMMS_BUNDLE, COMPUTE_BUNDLE
from torchrec_neuroshard.files import from_fields, json_text, read_json, write_whole
from torchrec_neuroshard.tables.features import FEATURE_VERSION

__all__ = [
    "CacheEntry",
    "CacheKey",
    "cache_folder",
    "clear",
    "entries",
    "find",
    "lock",
    "store",
]

_KEY_NAME = "key.json"
_HIDDEN_AGE_S = 86_400.0
"""What lies in the cache unfinished for so long was left by a job that ended early."""


def cache_folder() -> Path:
    """Where bundles are kept; need not exist."""
    if given := os.environ.get("NEUROSHARD_CACHE"):
        return Path(given)
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "torchrec-neuroshard"


def _release(package: str) -> str:
    """Return which release of a package is installed, or of one of its builds."""
    for build in ("-cpu", "", "-nightly", "-nightly-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(package + build)
    return "unknown"


def _gates() -> tuple[str, ...]:
    gates = (f"{k}={v}" for k, v in os.environ.items() if k.startswith("FBGEMM_"))
    return tuple(sorted(gates))


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheKey:
    """What measured times depend on: by default, on what this process runs."""

    device: str
    """Name of the CPU or GPU."""
    device_type: str
    world_size: int
    """Ranks."""
    local_world_size: int
    """Ranks per node."""
    optimizers: tuple[str, ...]
    """Of the tables measured, each once and sorted."""
    data_types: tuple[str, ...]
    """Of their weights; likewise."""
    torch: str = field(default_factory=functools.partial(_release, "torch"))
    fbgemm: str = field(default_factory=functools.partial(_release, "fbgemm-gpu"))
    torchrec: str = field(default_factory=functools.partial(_release, "torchrec"))
    feature_gates: tuple[str, ...] = field(default_factory=_gates)
    """FBGEMM's, as set in the environment: NAME=value, sorted."""
    feature_version: int = FEATURE_VERSION
    """Of the columns that the bundle's network takes."""

    def name(self) -> str:
        """Name of the folder: the device, and a digest of all."""
        text = json.dumps(dataclasses.asdict(self), sort_keys=True)
        slug = re.sub(r"[^a-z0-9]+", "-", self.device.lower()).strip("-")[:40]
        digest = hashlib.sha256(text.encode()).hexdigest()[:12]
        return f"{slug}-{self.world_size}x-{digest}"

    def covers(self, wanted: CacheKey) -> bool:
        """Whether what was measured under this key serves another one."""
        same = dataclasses.replace(
            wanted, optimizers=self.optimizers, data_types=self.data_types
        )
        return (
            same == self
            and set(wanted.optimizers) <= set(self.optimizers)
            and set(wanted.data_types) <= set(self.data_types)
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheEntry:
    """One bundle in the cache."""

    folder: Path
    key: CacheKey
    created: str
    """UTC, ISO 8601."""
    seconds: float
    """What measuring and fitting took."""


def _read(folder: Path) -> CacheEntry | None:
    try:
        COMPUTE_BUNDLE.read_info(folder)
        COMMS_BUNDLE.find_info(folder)
        data = read_json(folder / _KEY_NAME)
        key = from_fields(CacheKey, data["key"])
        if key.name() != folder.name:
            return None  # an older key, without some of the fields
        return CacheEntry(
            folder=folder,
            key=key,
            created=str(data["created"]),
            seconds=float(data["seconds"]),
        )
    except (OSError, ValueError, LookupError, TypeError, OverflowError):
        return None  # of another version, or being deleted: not one to use


def entries() -> list[CacheEntry]:
    """All bundles in the cache, newest first; none where it cannot be read."""
    try:
        folders = [p for p in cache_folder().iterdir() if not p.name.startswith(".")]
    except OSError:
        return []
    found = [e for e in map(_read, folders) if e is not None]
    return sorted(found, key=lambda e: (e.created, e.folder.name), reverse=True)


def find(wanted: CacheKey) -> CacheEntry | None:
    """The newest bundle that serves a key."""
    return next((e for e in entries() if e.key.covers(wanted)), None)


def store(bundle: Path, key: CacheKey, *, created: str, seconds: float) -> Path:
    """Copy a bundle into the cache, whole or not at all.

    Where another job was first, its bundle stays.

    Returns:
        The bundle's folder in the cache.

    Raises:
        OSError: The cache cannot be written.
    """
    root = cache_folder()
    root.mkdir(parents=True, exist_ok=True)
    _sweep(root)
    final = root / key.name()
    with tempfile.TemporaryDirectory(prefix=".new-", dir=root) as scratch:
        beside = shutil.copytree(bundle, Path(scratch) / "bundle")
        data = {"key": dataclasses.asdict(key), "created": created, "seconds": seconds}
        write_whole(beside / _KEY_NAME, json_text(data))
        try:
            beside.rename(final)
        except OSError:
            if _read(final) is None:  # damaged, or of another version
                _remove(final)
                beside.rename(final)
    return final


def _remove(folder: Path) -> None:
    """Delete a bundle at once: nothing ever finds half of it."""
    hidden = folder.rename(folder.with_name(f".old-{uuid.uuid4().hex}"))
    shutil.rmtree(hidden, ignore_errors=True)


def _sweep(root: Path) -> None:
    """Delete what jobs that ended early have left unfinished."""
    for path in root.glob(".*-*"):
        with contextlib.suppress(OSError):
            if path.is_dir() and time.time() - path.stat().st_mtime > _HIDDEN_AGE_S:
                shutil.rmtree(path, ignore_errors=True)


def clear() -> int:
    """Delete all bundles, and return how many there were."""
    found = entries()
    for entry in found:
        _remove(entry.folder)
    return len(found)


@contextlib.contextmanager
def lock(key: CacheKey, seconds: float) -> Iterator[None]:
    """Have other jobs wait while this one measures.

    A job that ends, however it does, gives the lock back. Where the cache cannot be
    written, nothing is locked.

    Args:
        key: What is measured.
        seconds: How long to wait for another job.

    Raises:
        TimeoutError: Another job has had the lock for so long.
    """
    path = cache_folder() / f".lock-{key.name()}"
    with contextlib.ExitStack() as held:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            held.enter_context(FileLock(path, timeout=seconds, poll_interval=0.2))
        except Timeout:
            raise
        except OSError:
            pass  # no other job can keep anything here, either
        yield
