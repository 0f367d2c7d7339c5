"""Cache of the bundles that first launches measure.

The cache is a folder: `$NEUROSHARD_CACHE`, or `torchrec-neuroshard` in the user's cache
folder. It holds a bundle's folder per key; the key lists everything that the times
depend on. A measurement that gave no bundle to keep leaves a file with the reason
instead. A new bundle appears with a single rename, so jobs on several machines can
share the cache.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from filelock import FileLock, Timeout

from torchrec_neuroshard.bundles.descriptions import COMMS_BUNDLE, COMPUTE_DESCRIPTION
from torchrec_neuroshard.files import from_fields, json_text, read_json, write_whole
from torchrec_neuroshard.tables.features import (
    FEATURE_NAMES,
    FEATURE_VERSION,
    feature_ranges,
)

_KEY_NAME, _REJECTED = "key.json", ".rejected.json"
_OUR_NAME = re.compile(rf"[a-z0-9-]*-\d+x-[0-9a-f]{{12}}({re.escape(_REJECTED)})?")
"""Names in the cache, of any version of this package."""
REJECTED_DAYS = 7
"""A rejection counts for so long: machines get quiet, and faults are mended."""
COMPARED = (
    *("log2_rows", "log2_width", "log2_pooling", "log2_batch"),
    *(name for name in FEATURE_NAMES if name.startswith("is_")),
)
"""Features that tell models apart: sizes and kinds of shards."""
_SLACK = 1.0
"""Powers of 2 by which a shard's sizes may be outside those of measured shards."""
_LEAST_SHARE = 0.5
"""Share of a model's shards that a bundle must cover."""
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
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Feature of `COMPARED` -> smallest and largest value of the shards to measure."""

    def name(self) -> str:
        """Return the folder's name: the device, and a digest of the whole key."""
        text = json.dumps(dataclasses.asdict(self), sort_keys=True)
        slug = re.sub(r"[^a-z0-9]+", "-", self.device.lower()).strip("-")[:40]
        digest = hashlib.sha256(text.encode()).hexdigest()[:12]
        return f"{slug}-{self.world_size}x-{digest}"

    def covers(self, wanted: CacheKey) -> bool:
        """Whether a bundle measured under this key can be used for another key."""
        same = dataclasses.replace(
            wanted,
            optimizers=self.optimizers,
            data_types=self.data_types,
            ranges=self.ranges,
        )
        return (
            same == self
            and set(wanted.optimizers) <= set(self.optimizers)
            and set(wanted.data_types) <= set(self.data_types)
        )

    def share_of(self, features_NF: npt.NDArray[np.float32]) -> float:
        """Return the share of shards that are like the measured ones, or almost.

        Sizes may be half the smallest, or twice the largest, that was measured.
        """
        if not len(features_NF):
            return 1.0
        is_near_N = np.ones(len(features_NF), dtype=bool)
        for name, (low, high) in self.ranges.items():
            slack = _SLACK if name.startswith("log2_") else 0.0
            values_N = features_NF[:, FEATURE_NAMES.index(name)]
            is_near_N &= (values_N >= low - slack) & (values_N <= high + slack)
        return float(is_near_N.mean())


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheEntry:
    """One measurement in the cache."""

    folder: Path
    """The bundle; the file with the reason if there is none."""
    key: CacheKey
    created: str
    """UTC, ISO 8601."""
    seconds: float
    """Time that measuring and fitting took."""
    reason: str = ""
    """Why there is no bundle; empty if there is one."""


def compared_ranges(
    features_NF: npt.NDArray[np.float32],
) -> dict[str, tuple[float, float]]:
    """Return `CacheKey.ranges` of shards."""
    ranges = feature_ranges(features_NF)
    return {name: ranges[name] for name in COMPARED}


def _read(path: Path) -> CacheEntry | None:
    try:
        if path.name.endswith(_REJECTED):
            data = read_json(path)
        else:
            COMMS_BUNDLE.find_info(path)  # raises if it is damaged
            if COMPUTE_DESCRIPTION.find_info(path) is None:
                return None
            data = read_json(path / _KEY_NAME)
        key = from_fields(CacheKey, data["key"])
        if key.name() != path.name.removesuffix(_REJECTED):
            return None  # an older key, without some of the fields
        return CacheEntry(
            folder=path,
            key=key,
            created=str(data["created"]),
            seconds=float(data["seconds"]),
            reason=str(data.get("reason", "")),
        )
    except (OSError, ValueError, LookupError, TypeError, OverflowError):
        return None  # of another version, or being deleted


def _all_entries() -> list[CacheEntry]:
    """Return all measurements, newest first; none if the cache cannot be read."""
    try:
        paths = [p for p in cache_folder().iterdir() if not p.name.startswith(".")]
    except OSError:
        return []
    found = [e for e in map(_read, paths) if e is not None]
    return sorted(found, key=lambda e: (e.created, e.folder.name), reverse=True)


def entries() -> list[CacheEntry]:
    """Return all bundles in the cache, newest first; none if it cannot be read."""
    return [e for e in _all_entries() if not e.reason]


def rejections() -> list[CacheEntry]:
    """Return all measurements that gave no bundle to keep, newest first."""
    return [e for e in _all_entries() if e.reason]


def find(
    wanted: CacheKey, features_NF: npt.NDArray[np.float32] | None = None
) -> CacheEntry | None:
    """Return the bundle to use for a key: of those that cover most shards, the newest.

    Args:
        wanted: The key.
        features_NF: Features of the model's shards; None: any model's.

    Returns:
        The bundle; None if there is none that covers at least half of the shards.
    """
    return _best(entries(), wanted, features_NF)


def find_rejection(
    wanted: CacheKey, features_NF: npt.NDArray[np.float32]
) -> CacheEntry | None:
    """Return a recent measurement that gave no bundle to keep; see `find`."""
    oldest = datetime.datetime.now(datetime.UTC) - datetime.timedelta(REJECTED_DAYS)
    recent = [e for e in rejections() if e.created >= oldest.isoformat()]
    return _best(recent, wanted, features_NF)


def _best(
    found: Sequence[CacheEntry],
    wanted: CacheKey,
    features_NF: npt.NDArray[np.float32] | None,
) -> CacheEntry | None:
    usable = [e for e in found if e.key.covers(wanted)]
    if features_NF is None:
        return next(iter(usable), None)
    shares = [e.key.share_of(features_NF) for e in usable]
    if max(shares, default=0.0) < _LEAST_SHARE:
        return None
    return usable[shares.index(max(shares))]


def reject(key: CacheKey, *, created: str, seconds: float, reason: str) -> None:
    """Note that a measurement gave no bundle to keep, and why.

    Raises:
        OSError: The cache cannot be written.
    """
    path = cache_folder() / f"{key.name()}{_REJECTED}"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json_text(_facts(key, created, seconds) | {"reason": reason}))


def _facts(key: CacheKey, created: str, seconds: float) -> dict[str, Any]:
    return {"key": dataclasses.asdict(key), "created": created, "seconds": seconds}


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
        write_whole(beside / _KEY_NAME, json_text(_facts(key, created, seconds)))
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
    """Delete all measurements, also of other versions, and return their number."""
    try:
        found = [p for p in cache_folder().iterdir() if _OUR_NAME.fullmatch(p.name)]
    except OSError:
        return 0
    for path in found:
        if path.is_dir():
            _remove(path)
        else:
            path.unlink(missing_ok=True)
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
