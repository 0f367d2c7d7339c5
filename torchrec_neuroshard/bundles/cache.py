"""Cache of the bundles that first launches measure.

The cache is a folder: `$NEUROSHARD_CACHE`, or `torchrec-neuroshard` in the user's cache
folder. It holds a bundle's folder per key; the key lists everything that the times
depend on. A new bundle appears with a single rename, so jobs on several machines can
share the cache.
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

_KEY_NAME = "key.json"
_HIDDEN_AGE_S = 86_400.0
"""Unfinished bundles older than this were left behind by jobs that ended early."""


def cache_folder() -> Path:
    """Return the cache's folder; it need not exist."""
    if given := os.environ.get("NEUROSHARD_CACHE"):
        return Path(given)
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "torchrec-neuroshard"


def _release(package: str) -> str:
    """Return the installed version of a package or of one of its builds."""
    for build in ("-cpu", "", "-nightly", "-nightly-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(package + build)
    return "unknown"


def _gates() -> tuple[str, ...]:
    gates = (f"{k}={v}" for k, v in os.environ.items() if k.startswith("FBGEMM_"))
    return tuple(sorted(gates))


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheKey:
    """What measured times depend on; the defaults describe this process."""

    device: str
    """Name of the CPU or GPU."""
    device_type: str
    world_size: int
    """Ranks."""
    local_world_size: int
    """Ranks per node."""
    optimizers: tuple[str, ...]
    """Optimizers of the measured tables, sorted and without repeats."""
    data_types: tuple[str, ...]
    """Weight types of the measured tables, sorted and without repeats."""
    torch: str = field(default_factory=functools.partial(_release, "torch"))
    fbgemm: str = field(default_factory=functools.partial(_release, "fbgemm-gpu"))
    torchrec: str = field(default_factory=functools.partial(_release, "torchrec"))
    feature_gates: tuple[str, ...] = field(default_factory=_gates)
    """FBGEMM's feature gates in the environment: NAME=value, sorted."""
    feature_version: int = FEATURE_VERSION
    """Version of the features that the bundle's network takes."""

    def name(self) -> str:
        """Return the folder's name: the device, and a digest of the whole key."""
        text = json.dumps(dataclasses.asdict(self), sort_keys=True)
        slug = re.sub(r"[^a-z0-9]+", "-", self.device.lower()).strip("-")[:40]
        digest = hashlib.sha256(text.encode()).hexdigest()[:12]
        return f"{slug}-{self.world_size}x-{digest}"

    def covers(self, wanted: CacheKey) -> bool:
        """Whether a bundle measured under this key can be used for another key."""
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
    """Time that measuring and fitting took."""


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
        return None  # of another version, or being deleted


def entries() -> list[CacheEntry]:
    """Return all bundles in the cache, newest first; none if it cannot be read."""
    try:
        folders = [p for p in cache_folder().iterdir() if not p.name.startswith(".")]
    except OSError:
        return []
    found = [e for e in map(_read, folders) if e is not None]
    return sorted(found, key=lambda e: (e.created, e.folder.name), reverse=True)


def find(wanted: CacheKey) -> CacheEntry | None:
    """Return the newest bundle that can be used for a key, or None."""
    return next((e for e in entries() if e.key.covers(wanted)), None)


def store(bundle: Path, key: CacheKey, *, created: str, seconds: float) -> Path:
    """Copy a bundle into the cache atomically.

    If another job was first, its bundle stays.

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
    """Delete a bundle atomically, so that no job finds half of it."""
    hidden = folder.rename(folder.with_name(f".old-{uuid.uuid4().hex}"))
    shutil.rmtree(hidden, ignore_errors=True)


def _sweep(root: Path) -> None:
    """Delete unfinished bundles of jobs that ended early."""
    for path in root.glob(".*-*"):
        with contextlib.suppress(OSError):
            if path.is_dir() and time.time() - path.stat().st_mtime > _HIDDEN_AGE_S:
                shutil.rmtree(path, ignore_errors=True)


def clear() -> int:
    """Delete all bundles and return their number."""
    found = entries()
    for entry in found:
        _remove(entry.folder)
    return len(found)


@contextlib.contextmanager
def lock(key: CacheKey, seconds: float) -> Iterator[None]:
    """Make other jobs wait while this one measures.

    The lock is released when the job ends, even if it crashes. Without write access to
    the cache, nothing is locked.

    Args:
        key: Key of the measurement.
        seconds: Longest time to wait for another job.

    Raises:
        TimeoutError: Another job still holds the lock after `seconds`.
    """
    path = cache_folder() / f".lock-{key.name()}"
    with contextlib.ExitStack() as held:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            held.enter_context(FileLock(path, timeout=seconds, poll_interval=0.2))
        except Timeout:
            raise
        except OSError:
            pass  # no other job can write to the cache, either
        yield
