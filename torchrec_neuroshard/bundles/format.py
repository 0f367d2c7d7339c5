"""Trained models on disk: weights, schema, statistics, hardware and card.

A bundle is a folder. Its compute model consists of `weights.safetensors`, `bundle.json`
(everything else, with the weights' checksum) and `CARD.md` for people. Its model of
collectives consists of `comms.json` and `COMMS_CARD.md`. A folder may hold one or both.
Each is for one kind of hardware, collectives also for one backend.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import nn

from torchrec_neuroshard.bundles.choice import stated_error
from torchrec_neuroshard.errors import (
    BundleCorruptError,
    BundleMismatchError,
    NeuroShardError,
)
from torchrec_neuroshard.files import from_fields, json_text, read_json, write_whole
from torchrec_neuroshard.hardware.devices import plain_torch
from torchrec_neuroshard.measure.records import Fingerprint
from torchrec_neuroshard.models.base import COLLECTIVES
from torchrec_neuroshard.models.collective_terms import TERM_NAMES
from torchrec_neuroshard.models.collectives import MeasuredCommsModel
from torchrec_neuroshard.models.compute import NeuralCostModel
from torchrec_neuroshard.models.network import SetCostNetwork
from torchrec_neuroshard.models.sequences import SequenceKernels
from torchrec_neuroshard.tables.features import (
    FEATURE_NAMES,
    FEATURE_VERSION,
    check_schema,
)

BUNDLE_VERSION, COMMS_VERSION = 4, 2
"""Versions of the file layouts; other versions are refused."""
_WEIGHTS_NAME = "weights.safetensors"

_Info = TypeVar("_Info")
_Network = TypeVar("_Network", bound=nn.Module)


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
        return self._read(Path(folder))[0]

    def write_info(
        self, folder: str | Path, info: _Info, card: str, **more: str
    ) -> None:
        """Write the card, then the description with further fields."""
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        write_whole(path / self.card_name, f"{card.strip()}\n".encode())
        data = dataclasses.asdict(cast(Any, info)) | more
        write_whole(path / self.info_name, json_text(data))

    def _read(self, folder: Path) -> tuple[_Info, str]:
        """Return the description and the checksum of the weights."""
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


@dataclass(frozen=True, kw_only=True)
class BundleFormat(Description[_Info], Generic[_Info, _Network]):
    """A trained network on disk: description, weights and card."""

    make_network: Callable[[_Info], _Network]
    """Makes the network that the weights are loaded into."""

    def save(
        self, folder: str | Path, network: _Network, info: _Info, card: str
    ) -> None:
        """Write the three files; a crash leaves the old or the new model."""
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        state = {k: v.detach().contiguous() for k, v in network.state_dict().items()}
        # Half the size; the rounding is far smaller than the nets' errors.
        for name, _ in network.named_parameters():
            half = state[name].half()
            state[name] = half if bool(half.isfinite().all()) else state[name]
        weights = save_tensors(state)
        digest = hashlib.sha256(weights).hexdigest()
        for left in path.glob(f".{_WEIGHTS_NAME}.*"):
            left.unlink()
        # The old weights stay until the new description is written. If this process
        # ends before the last line, `load` finds the new weights under this name.
        beside = path / self._name_beside(digest)
        write_whole(beside, weights)
        self.write_info(path, info, card, weights_sha256=digest)
        os.replace(beside, path / _WEIGHTS_NAME)

    def _name_beside(self, digest: str) -> str:
        return f".{_WEIGHTS_NAME}.{digest[:16]}"

    @plain_torch()
    def load(self, folder: str | Path) -> tuple[_Network, _Info]:
        """Return network and description, after checking both.

        Raises:
            BundleCorruptError: A file is missing, truncated or damaged.
            BundleMismatchError: The bundle is of another version of this package.
        """
        info, sha256 = self._read(Path(folder))
        path = Path(folder) / _WEIGHTS_NAME
        if sha256.isalnum() and (path.parent / self._name_beside(sha256)).is_file():
            path = path.parent / self._name_beside(sha256)
        try:
            weights = path.read_bytes()
            digest = hashlib.sha256(weights).hexdigest()
            if digest != sha256:
                raise ValueError(
                    f"damaged or from another bundle: checksum {digest[:12]}, expected "
                    f"{sha256[:12]}"
                )
            tensors = load_tensors(weights)
            with torch.device("meta"):  # no memory until the sizes are compared
                network = self.make_network(info)
            for name, wanted in network.named_parameters():
                if name in tensors and tensors[name].dtype == torch.float16:
                    tensors[name] = tensors[name].to(wanted.dtype)
            for name, wanted in network.state_dict().items():
                if name in tensors and tensors[name].dtype != wanted.dtype:
                    raise TypeError(f"'{name}' is {tensors[name].dtype}")
                if name in tensors and not bool(tensors[name].isfinite().all()):
                    raise ValueError(f"weight '{name}' is not finite")
            network.load_state_dict(tensors, assign=True)
        except (OSError, SafetensorError, RuntimeError, TypeError, ValueError) as error:
            raise BundleCorruptError(
                f"{path} does not hold this bundle's network ({error}); restore it or "
                "train again"
            ) from error
        return network.eval(), info


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


COMPUTE_BUNDLE = BundleFormat(
    info_type=BundleInfo,
    make_network=lambda info: SetCostNetwork(**info.network),
    check=_check_compute,
    info_name="bundle.json",
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
    compute, mine = COMPUTE_BUNDLE.find_info(folder), info.fingerprint
    if compute is not None:
        theirs = compute.fingerprint
        if (theirs.device_type, theirs.device) != (mine.device_type, mine.device):
            raise BundleMismatchError(
                f"{folder} holds a compute model of {theirs.device}, but the "
                f"collectives were measured on {mine.device}; name another folder"
            )
    COMMS_BUNDLE.write_info(folder, info, card)


# Both.


class Bundle:
    """A bundle's folder. Descriptions are read and checked once, when needed.

    All members raise:
        BundleCorruptError: A file is missing, truncated or damaged.
        BundleMismatchError: The bundle is of another version of this package.
    """

    def __init__(self, folder: str | Path) -> None:
        """Take the folder; nothing is read yet."""
        self.folder = Path(folder)

    @classmethod
    def at(cls, folder: Path) -> Bundle:
        """Return the same object as before, unless a description has changed."""
        files = (folder / kind.info_name for kind in (COMPUTE_BUNDLE, COMMS_BUNDLE))
        changed = (f.stat().st_mtime_ns if f.is_file() else 0 for f in files)
        return _bundle_at(folder, *changed)

    @functools.cached_property
    def compute(self) -> BundleInfo | None:
        """Description of the compute model; None if there is none."""
        return COMPUTE_BUNDLE.find_info(self.folder)

    @functools.cached_property
    def comms(self) -> CommsBundleInfo | None:
        """Description of the model of collectives; None if there is none."""
        return COMMS_BUNDLE.find_info(self.folder)

    def cost_model(self) -> NeuralCostModel:
        """Return the compute model."""
        network, info = COMPUTE_BUNDLE.load(self.folder)
        model = NeuralCostModel(
            network,
            name=info.name,
            hardware=info.fingerprint.device,
            ranges=info.ranges,
            reference_ms=info.reference_ms,
            column_order_ms=info.column_order_ms,
            sequences=info.sequences,
        )
        model.measures_sequences = info.num_sequence_sets > 0
        model.measured_error = stated_error(info.trained_on)
        probe_NF = np.ones((1, len(FEATURE_NAMES)), dtype=np.float32)
        self._check_times(model.predict_sets(probe_NF, np.array([0]), 1))
        return model

    def comms_model(
        self,
        *,
        compute: BundleInfo | None,
        world_size: int,
        local_world_size: int,
        intra_gb_per_s: float | None = None,
        inter_gb_per_s: float | None = None,
    ) -> MeasuredCommsModel:
        """Return the model of collectives for one group of ranks.

        Warns if the world size is more than twice the largest measured one.

        Args:
            compute: Compute model whose time unit the predictions get; None keeps the
                unit of the run that measured the collectives.
            world_size: Ranks to predict for.
            local_world_size: Ranks per node.
            intra_gb_per_s: Bandwidth inside a node; None keeps the measured bandwidth.
            inter_gb_per_s: The same between nodes.

        Raises:
            ConfigError: The ranks do not fill whole nodes, or a bandwidth is unknown.
        """
        info = self.comms or COMMS_BUNDLE.read_info(self.folder)
        if world_size > 2 * max(info.world_sizes):
            warnings.warn(
                f"collectives of {world_size} ranks are extrapolated: {self.folder} "
                f"was measured at {', '.join(map(str, info.world_sizes))}",
                stacklevel=2,
            )
        # Kernels and collectives were measured at different times, when the machine was
        # faster or slower. Both runs timed the same reference set, which gives the
        # ratio.
        time_scale = 1.0
        if compute is not None and compute.reference_ms and info.compute_reference_ms:
            time_scale = compute.reference_ms / info.compute_reference_ms
        model = MeasuredCommsModel(
            info.table(),
            time_scale=time_scale,
            world_size=world_size,
            local_world_size=local_world_size,
            measured_gb_per_s=(info.intra_gb_per_s, info.inter_gb_per_s),
            intra_gb_per_s=intra_gb_per_s,
            inter_gb_per_s=inter_gb_per_s,
            slowdowns={int(n): times for n, times in info.compute_slowdown.items()},
        )
        model.overlaps = info.backend != "gloo"
        model.error = stated_error(info.trained_on)
        self._check_times(model.all_to_all(np.full((1, world_size), 64.0), 4096))
        return model

    def _check_times(self, times: npt.NDArray[np.float64]) -> None:
        if not (np.isfinite(times).all() and (times >= 0).all()):
            raise BundleCorruptError(
                f"{self.folder} predicts {times.ravel().tolist()!s:.60} ms: its "
                "weights or units are wrong; restore it or train again"
            )


@functools.lru_cache(maxsize=32)
def _bundle_at(folder: Path, *changed_ns: int) -> Bundle:
    del changed_ns
    return Bundle(folder)
