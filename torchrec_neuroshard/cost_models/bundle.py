"""A trained cost model on disk: weights, schema, statistics, hardware, card.

A bundle is a folder: `weights.safetensors`, `bundle.json` (everything else, and the
weights' checksum) and `CARD.md` for people. A model of collectives may stand beside it
(`comms_bundle`), as files of its own and the end of the card.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import nn

from torchrec_neuroshard.cost_models.compute import NeuralCostModel
from torchrec_neuroshard.cost_models.network import SetCostNetwork
from torchrec_neuroshard.errors import (
    BundleCorruptError,
    BundleMismatchError,
    NeuroShardError,
)
from torchrec_neuroshard.features import FEATURE_NAMES, FEATURE_VERSION, check_schema
from torchrec_neuroshard.records import Fingerprint

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

__all__ = [
    "BUNDLE_VERSION",
    "COMMS_HEADING",
    "BundleInfo",
    "check_finite",
    "load_bundle",
    "load_weights",
    "read_checked",
    "read_description",
    "read_fields",
    "read_info",
    "save_bundle",
    "save_weights",
    "write_card",
    "write_whole",
]

BUNDLE_VERSION = 1

COMMS_HEADING = "# Communication cost model"
"""Begins the part of a card that is about collectives."""

_WEIGHTS, _INFO, _CARD = "weights.safetensors", "bundle.json", "CARD.md"


@dataclass(frozen=True, kw_only=True, slots=True)
class BundleInfo:
    """What a bundle says of itself."""

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
    feature_names: tuple[str, ...] = FEATURE_NAMES
    feature_version: int = FEATURE_VERSION
    bundle_version: int = BUNDLE_VERSION


_Info = TypeVar("_Info", bound="DataclassInstance")
_Network = TypeVar("_Network", bound=nn.Module)


def save_bundle(
    folder: str | Path, network: SetCostNetwork, info: BundleInfo, card: str
) -> None:
    """Write a bundle; each file appears whole or not at all."""
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    data = dataclasses.asdict(info)
    data["weights_sha256"] = save_weights(path / _WEIGHTS, network)
    write_card(path, compute=card)
    write_whole(path / _INFO, (json.dumps(data, indent=1) + "\n").encode())


def save_weights(path: Path, network: nn.Module) -> str:
    """Write a network's weights; their checksum."""
    state = {k: v.detach().contiguous() for k, v in network.state_dict().items()}
    weights = save_tensors(state)
    write_whole(path, weights)
    return hashlib.sha256(weights).hexdigest()


def write_card(
    folder: Path, *, compute: str | None = None, comms: str | None = None
) -> None:
    """Replace one part of a bundle's card; None keeps the part that is there."""
    path = folder / _CARD
    old = path.read_text(encoding="utf-8") if path.is_file() else ""
    start = old.find(COMMS_HEADING)
    old_compute, old_comms = (old, "") if start < 0 else (old[:start], old[start:])
    parts = [
        old_compute if compute is None else compute,
        old_comms if comms is None else comms,
    ]
    text = "\n\n".join(part.strip() for part in parts if part.strip())
    write_whole(path, f"{text}\n".encode())


def write_whole(path: Path, data: bytes) -> None:
    """Write a file that appears whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_bytes(data)
    os.replace(temporary, path)


def read_description(path: Path) -> dict[str, Any]:
    """Read one of a bundle's JSON files.

    Raises:
        BundleCorruptError: It is missing or damaged.
    """
    if not path.is_file():
        raise BundleCorruptError(
            f"{path.parent} is not a cost-model bundle: it has no {path.name}; make "
            "one with 'neuroshard train'"
        )
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise BundleCorruptError(
            f"{path} is damaged ({error}); restore it or train again"
        ) from error
    if not isinstance(data, dict):
        raise BundleCorruptError(f"{path} is not a bundle description")
    return data


def read_fields(
    kind: type[_Info], path: Path, data: Mapping[str, Any], **read: Callable[[Any], Any]
) -> _Info:
    """Make a bundle's description of what its JSON file holds.

    Args:
        kind: The description's dataclass.
        path: The file, for messages.
        data: Its contents; what the dataclass does not know is left out.
        read: Field -> what turns its JSON into its value, where they differ.

    Raises:
        BundleCorruptError: A field is missing or of another form.
    """
    known = {f.name for f in dataclasses.fields(kind)}
    try:
        values = {k: v for k, v in data.items() if k in known}
        if "fingerprint" in known:
            values["fingerprint"] = Fingerprint(**data["fingerprint"])
        values.update({name: convert(data[name]) for name, convert in read.items()})
        return kind(**values)
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise BundleCorruptError(
            f"{path} lacks or garbles a field ({error!r}); restore it or train again"
        ) from error


def read_info(folder: str | Path) -> BundleInfo:
    """Read and check a bundle's description without its weights.

    Raises:
        BundleCorruptError: A file is missing or damaged.
        BundleMismatchError: The bundle is of another version of this package.
    """
    return _info(Path(folder), read_description(Path(folder) / _INFO))


def _info(path: Path, data: dict[str, Any]) -> BundleInfo:
    version = data.get("bundle_version")
    if version != BUNDLE_VERSION:
        raise BundleMismatchError(
            f"{path} has bundle version {version}, this package reads "
            f"{BUNDLE_VERSION}; train again or install the matching version"
        )
    info = read_fields(
        BundleInfo,
        path / _INFO,
        data,
        feature_names=tuple,
        ranges=lambda ranges: {k: (v[0], v[1]) for k, v in ranges.items()},
    )
    try:
        check_schema(info.feature_names, info.feature_version)
    except NeuroShardError as error:
        raise BundleMismatchError(f"{path}: {error}") from error
    return info


def read_checked(path: Path, sha256: str | None) -> bytes:
    """Read a weights file.

    Raises:
        BundleCorruptError: It is missing, or its checksum is not the one given.
    """
    try:
        weights = path.read_bytes()
    except OSError as error:
        raise BundleCorruptError(
            f"{path.parent} has no readable {path.name} ({error}); restore it or train "
            "again"
        ) from error
    digest = hashlib.sha256(weights).hexdigest()
    if digest != sha256:
        raise BundleCorruptError(
            f"{path} is damaged or not of this bundle (checksum {digest[:12]}, "
            f"expected {str(sha256)[:12]}); restore it or train again"
        )
    return weights


def check_finite(path: Path, network: nn.Module) -> None:
    """Raise `BundleCorruptError` if a weight is not a finite number."""
    for name, tensor in network.state_dict().items():
        if not bool(tensor.isfinite().all()):
            raise BundleCorruptError(f"{path}: weight '{name}' is not finite")


def load_weights(
    path: Path, sha256: str | None, make: Callable[[], _Network]
) -> _Network:
    """Read a network's weights.

    Args:
        path: What `save_weights` wrote.
        sha256: Its checksum.
        make: Makes the network.

    Raises:
        BundleCorruptError: The file is missing, damaged or of another network.
    """
    weights = read_checked(path, sha256)
    try:
        network = make()
        network.load_state_dict(load_tensors(weights))
    except (SafetensorError, RuntimeError, TypeError, KeyError) as error:
        raise BundleCorruptError(
            f"{path} does not hold this bundle's network ({error}); restore it or "
            "train again"
        ) from error
    check_finite(path.parent, network)
    return network


def load_bundle(folder: str | Path) -> NeuralCostModel:
    """Load a bundle and check all of it.

    Raises:
        BundleCorruptError: A file is missing, truncated or damaged.
        BundleMismatchError: The bundle is of another version of this package.
    """
    path = Path(folder)
    data = read_description(path / _INFO)
    info = _info(path, data)
    network = load_weights(
        path / _WEIGHTS,
        data.get("weights_sha256"),
        lambda: SetCostNetwork(**info.network),
    )
    return NeuralCostModel(
        network,
        name=info.name,
        hardware=info.fingerprint.device,
        ranges=info.ranges,
        reference_ms=info.reference_ms,
    )
