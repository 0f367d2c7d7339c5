"""A trained cost model on disk: weights, schema, statistics, hardware, card.

A bundle is a folder: `weights.safetensors`, `bundle.json` (everything else, and the
weights' checksum) and `CARD.md` for people.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from torchrec_neuroshard.cost_models.compute import NeuralCostModel
from torchrec_neuroshard.cost_models.network import SetCostNetwork
from torchrec_neuroshard.errors import (
    BundleCorruptError,
    BundleMismatchError,
    NeuroShardError,
)
from torchrec_neuroshard.features import FEATURE_NAMES, FEATURE_VERSION, check_schema
from torchrec_neuroshard.records import Fingerprint

__all__ = ["BUNDLE_VERSION", "BundleInfo", "load_bundle", "read_info", "save_bundle"]

BUNDLE_VERSION = 1

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


def save_bundle(
    folder: str | Path, network: SetCostNetwork, info: BundleInfo, card: str
) -> None:
    """Write a bundle; each file appears whole or not at all."""
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    state = {k: v.detach().contiguous() for k, v in network.state_dict().items()}
    weights = save_tensors(state)
    data = dataclasses.asdict(info)
    data["weights_sha256"] = hashlib.sha256(weights).hexdigest()
    _write(path / _WEIGHTS, weights)
    _write(path / _CARD, card.encode())
    _write(path / _INFO, (json.dumps(data, indent=1) + "\n").encode())


def _write(path: Path, data: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_bytes(data)
    os.replace(temporary, path)


def _read_json(path: Path) -> dict[str, Any]:
    if not (path / _INFO).is_file():
        raise BundleCorruptError(
            f"{path} is not a cost-model bundle: it has no {_INFO}; make one with "
            "'neuroshard train'"
        )
    try:
        data = json.loads((path / _INFO).read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise BundleCorruptError(
            f"{path / _INFO} is damaged ({error}); restore it or train again"
        ) from error
    if not isinstance(data, dict):
        raise BundleCorruptError(f"{path / _INFO} is not a bundle description")
    return data


def read_info(folder: str | Path) -> BundleInfo:
    """Read and check a bundle's description without its weights.

    Raises:
        BundleCorruptError: A file is missing or damaged.
        BundleMismatchError: The bundle is of another version of this package.
    """
    return _info(Path(folder), _read_json(Path(folder)))


def _info(path: Path, data: dict[str, Any]) -> BundleInfo:
    version = data.get("bundle_version")
    if version != BUNDLE_VERSION:
        raise BundleMismatchError(
            f"{path} has bundle version {version}, this package reads "
            f"{BUNDLE_VERSION}; train again or install the matching version"
        )
    fields = {f.name for f in dataclasses.fields(BundleInfo)}
    try:
        values = {k: v for k, v in data.items() if k in fields}
        values["fingerprint"] = Fingerprint(**data["fingerprint"])
        values["feature_names"] = tuple(data["feature_names"])
        values["ranges"] = {k: (v[0], v[1]) for k, v in data["ranges"].items()}
        info = BundleInfo(**values)
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise BundleCorruptError(
            f"{path / _INFO} lacks or garbles a field ({error!r}); restore it or train "
            "again"
        ) from error
    try:
        check_schema(info.feature_names, info.feature_version)
    except NeuroShardError as error:
        raise BundleMismatchError(f"{path}: {error}") from error
    return info


def load_bundle(folder: str | Path) -> NeuralCostModel:
    """Load a bundle and check all of it.

    Raises:
        BundleCorruptError: A file is missing, truncated or damaged.
        BundleMismatchError: The bundle is of another version of this package.
    """
    path = Path(folder)
    data = _read_json(path)
    info = _info(path, data)
    try:
        weights = (path / _WEIGHTS).read_bytes()
    except OSError as error:
        raise BundleCorruptError(
            f"{path} has no readable {_WEIGHTS} ({error}); restore it or train again"
        ) from error
    digest = hashlib.sha256(weights).hexdigest()
    if digest != data.get("weights_sha256"):
        raise BundleCorruptError(
            f"{path / _WEIGHTS} is damaged or not of this bundle (checksum "
            f"{digest[:12]}, expected {str(data.get('weights_sha256'))[:12]}); restore "
            "it or train again"
        )
    try:
        network = SetCostNetwork(**info.network)
        network.load_state_dict(load_tensors(weights))
    except (SafetensorError, RuntimeError, TypeError, KeyError) as error:
        raise BundleCorruptError(
            f"{path / _WEIGHTS} does not hold this bundle's network ({error}); restore "
            "it or train again"
        ) from error
    for name, tensor in network.state_dict().items():
        if not bool(tensor.isfinite().all()):
            raise BundleCorruptError(f"{path}: weight '{name}' is not finite")
    return NeuralCostModel(
        network,
        name=info.name,
        hardware=info.fingerprint.device,
        ranges=info.ranges,
        reference_ms=info.reference_ms,
    )
