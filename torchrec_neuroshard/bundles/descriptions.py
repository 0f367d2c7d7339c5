"""Descriptions of trained models: schema, statistics, hardware and card, as JSON.

They are read and checked without torch; `format` adds the weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import numpy as np
import numpy.typing as npt

from torchrec_neuroshard.errors import (
    BundleCorruptError,
    BundleMismatchError,
    NeuroShardError,
)
from torchrec_neuroshard.files import from_fields, json_text, read_json, write_whole
from torchrec_neuroshard.measure.records import Fingerprint
from torchrec_neuroshard.models.base import COLLECTIVES
from torchrec_neuroshard.models.collective_terms import TERM_NAMES
from torchrec_neuroshard.models.sequences import SequenceKernels
from torchrec_neuroshard.tables.features import (
    FEATURE_NAMES,
    FEATURE_VERSION,
    check_schema,
)

BUNDLE_VERSION, COMMS_VERSION = 4, 2
"""Versions of the file layouts; other versions are refused."""

_Info = TypeVar("_Info")


@dataclass(frozen=True, kw_only=True)
class Description(Generic[_Info]):
    """How a model's JSON description and card are stored."""

    info_type: type[_Info]
    """A dataclass; a field `fingerprint` is a `Fingerprint`."""
    check: Callable[[Path, Mapping[str, Any]], None]
    """Called with the description's path and content; raises `BundleMismatchError` if
    version or schema differ from this package's."""
    info_name: str
    card_name: str = "CARD.md"
    missing: str = (
        "{folder} is not a cost-model bundle: it has no {file}; make one with "
        "'neuroshard train'"
    )
    """Error message if there is no description."""

    def is_in(self, folder: str | Path) -> bool:
        """Whether a folder holds a model of this kind."""
        return (Path(folder) / self.info_name).is_file()

    def find_info(self, folder: str | Path) -> _Info | None:
        """Same as `read_info`; None if there is no model of this kind."""
        return self.read_info(folder) if self.is_in(folder) else None

    def read_info(self, folder: str | Path) -> _Info:
        """Return the checked description, without reading the weights.

        Raises:
            BundleCorruptError: The description is missing or damaged.
            BundleMismatchError: It is of another version of this package.
        """
        return self.read(Path(folder))[0]

    def write_info(
        self, folder: str | Path, info: _Info, card: str, **more: str
    ) -> None:
        """Write the card, then the description with further fields."""
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        write_whole(path / self.card_name, f"{card.strip()}\n".encode())
        data = dataclasses.asdict(cast(Any, info)) | more
        write_whole(path / self.info_name, json_text(data))

    def read(self, folder: Path) -> tuple[_Info, str]:
        """Return the description and the checksum of the weights.

        Raises:
            BundleCorruptError: The description is missing or damaged.
            BundleMismatchError: It is of another version of this package.
        """
        path = folder / self.info_name
        if not path.is_file():
            raise BundleCorruptError(
                self.missing.format(folder=folder, file=self.info_name)
            )
        known = {f.name for f in dataclasses.fields(cast(Any, self.info_type))}
        try:
            data = read_json(path)
            if not isinstance(data, dict):
                raise TypeError("not a JSON object")
            self.check(path, data)
            values = {k: v for k, v in data.items() if k in known}
            info = from_fields(self.info_type, values)
        except BundleMismatchError:
            raise
        except (OSError, TypeError, ValueError) as error:
            raise BundleCorruptError(
                f"{path} is damaged, or a field is missing or malformed ({error}); "
                "restore it or train again"
            ) from error
        return info, str(data.get("weights_sha256"))


# The compute model.


@dataclass(frozen=True, kw_only=True, slots=True)
class BundleInfo:
    """Description of a compute model."""

    name: str
    fingerprint: Fingerprint
    reference_ms: float
    """Nominal time of the reference set in the bundle's units; 0 on a GPU."""
    network: Mapping[str, int]
    """Arguments of `SetCostNetwork`."""
    ranges: Mapping[str, tuple[float, float]]
    """Feature name -> smallest and largest value in training."""
    trained_on: Mapping[str, Any]
    """Records, seeds and commands behind the weights."""
    column_order_ms: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """See `RunHeader`."""
    sequences: SequenceKernels | None = None
    """Unpooled kernels of a CPU, perhaps of another one."""
    num_sequence_sets: int = 0
    """Sets of unpooled rows that were measured on this device."""
    feature_names: tuple[str, ...] = FEATURE_NAMES
    feature_version: int = FEATURE_VERSION
    bundle_version: int = BUNDLE_VERSION

    def __post_init__(self) -> None:
        for size, times in self.column_order_ms.items():
            if not (size.isdecimal() and int(size) > 0 and min(times) > 0):
                raise ValueError(
                    f"column_order_ms of {size!r:.60} bytes is {times}; both must be "
                    "above 0"
                )


def _check_compute(path: Path, data: Mapping[str, Any]) -> None:
    version = data.get("bundle_version")
    if version != BUNDLE_VERSION:
        raise BundleMismatchError(
            f"{path.parent} has bundle version {version!s:.60}, but this package reads "
            f"{BUNDLE_VERSION}; train again or install the matching version"
        )
    try:
        check_schema(data.get("feature_names", ()), data.get("feature_version", 0))
    except NeuroShardError as error:
        raise BundleMismatchError(f"{path.parent}: {error}") from error


COMPUTE_DESCRIPTION = Description(
    info_type=BundleInfo, check=_check_compute, info_name="bundle.json"
)


# The model of collectives.


@dataclass(frozen=True, kw_only=True, slots=True)
class CommsBundleInfo:
    """Description of a model of collectives."""

    name: str
    fingerprint: Fingerprint
    backend: str
    """`gloo` or `nccl`."""
    coefficients: Mapping[str, Mapping[str, float]]
    """Collective -> term -> coefficient; missing terms cost nothing."""
    intra_gb_per_s: float
    """Nominal bandwidth inside a node, as measured."""
    inter_gb_per_s: float
    """The same between nodes; 0 if only one node was measured."""
    world_sizes: tuple[int, ...]
    """World sizes in training."""
    bytes_per_rank: tuple[float, float]
    """Smallest and largest number of bytes in training."""
    trained_on: Mapping[str, Any]
    """Records, seeds and commands behind the weights."""
    compute_slowdown: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """See `CommsHeader`."""
    compute_reference_ms: float = 0.0
    """See `CommsHeader`."""
    comms_version: int = COMMS_VERSION

    def __post_init__(self) -> None:
        for ranks in self.compute_slowdown:
            if not ranks.isdecimal() or int(ranks) < 1:
                raise ValueError(f"{ranks!r:.60} is not a number of ranks")
        if not (self.world_sizes and self.intra_gb_per_s > 0 <= self.inter_gb_per_s):
            raise ValueError("world_sizes or a bandwidth is missing")
        terms = [t for row in self.coefficients.values() for t in row.items()]
        unsound = any(name not in TERM_NAMES or value < 0 for name, value in terms)
        if unsound or set(self.coefficients) != set(COLLECTIVES):
            raise ValueError("coefficients are negative, or of unknown terms")

    def table(self) -> npt.NDArray[np.float64]:
        """Return the coefficients: a row per collective, a column per term."""
        rows = [self.coefficients[name] for name in COLLECTIVES]
        return np.array([[row.get(term, 0.0) for term in TERM_NAMES] for row in rows])


def _check_comms(path: Path, data: Mapping[str, Any]) -> None:
    if (version := data.get("comms_version")) != COMMS_VERSION:
        raise BundleMismatchError(
            f"{path} has version {version!s:.60}, but this package reads "
            f"{COMMS_VERSION}; train again or install the matching version"
        )


COMMS_BUNDLE = Description(
    info_type=CommsBundleInfo,
    check=_check_comms,
    info_name="comms.json",
    card_name="COMMS_CARD.md",
)


def save_comms_bundle(folder: str | Path, info: CommsBundleInfo, card: str) -> None:
    """Write a model of collectives into a new or existing bundle.

    Raises:
        BundleMismatchError: The bundle's compute model is of other hardware.
    """
    compute, mine = COMPUTE_DESCRIPTION.find_info(folder), info.fingerprint
    if compute is not None:
        theirs = compute.fingerprint
        if (theirs.device_type, theirs.device) != (mine.device_type, mine.device):
            raise BundleMismatchError(
                f"{folder} holds a compute model of {theirs.device}, but the "
                f"collectives were measured on {mine.device}; name another folder"
            )
    COMMS_BUNDLE.write_info(folder, info, card)
