"""Trained models on disk: weights, schema, statistics, hardware and card.

A bundle is a folder. Its compute model consists of `weights.safetensors`, `bundle.json`
(everything else, with the weights' checksum) and `CARD.md` for people. Its model of
collectives consists of `comms.json` and `COMMS_CARD.md`. A folder may hold one or both.
Each is for one kind of hardware, collectives also for one backend.
"""

from __future__ import annotations

import functools
import hashlib
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import nn

from torchrec_neuroshard.bundles.choice import stated_error
from torchrec_neuroshard.bundles.descriptions import (
    COMMS_BUNDLE,
    COMPUTE_DESCRIPTION,
    BundleInfo,
    CommsBundleInfo,
    Description,
)
from torchrec_neuroshard.errors import BundleCorruptError
from torchrec_neuroshard.files import write_whole
from torchrec_neuroshard.hardware.devices import plain_torch
from torchrec_neuroshard.models.collectives import MeasuredCommsModel
from torchrec_neuroshard.models.compute import NeuralCostModel
from torchrec_neuroshard.models.network import SetCostNetwork
from torchrec_neuroshard.tables.features import FEATURE_NAMES

_WEIGHTS_NAME = "weights.safetensors"

_Info = TypeVar("_Info")
_Network = TypeVar("_Network", bound=nn.Module)


@dataclass(frozen=True, kw_only=True)
class BundleFormat(Generic[_Info, _Network]):
    """A trained network on disk: description, weights and card."""

    description: Description[_Info]
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
        self.description.write_info(path, info, card, weights_sha256=digest)
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
        info, sha256 = self.description.read(Path(folder))
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


COMPUTE_BUNDLE = BundleFormat(
    description=COMPUTE_DESCRIPTION,
    make_network=lambda info: SetCostNetwork(**info.network),
)


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
        files = (
            folder / kind.info_name for kind in (COMPUTE_DESCRIPTION, COMMS_BUNDLE)
        )
        changed = (f.stat().st_mtime_ns if f.is_file() else 0 for f in files)
        return _bundle_at(folder, *changed)

    @functools.cached_property
    def compute(self) -> BundleInfo | None:
        """Description of the compute model; None if there is none."""
        return COMPUTE_DESCRIPTION.find_info(self.folder)

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
