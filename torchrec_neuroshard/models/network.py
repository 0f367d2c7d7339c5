"""The learned model of sets: shard encoder, sum and head, as an ensemble.

Shapes: `N` shards, `S` sets, `M` ensemble members, `F` features, `X` inputs of the
encoder, `Y` inputs of the head on a set's work, `V` set values, `E` encoding values,
`L` latent values, `K` and `G` kinds of work.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from torchrec_neuroshard.hardware.devices import plain_torch
from torchrec_neuroshard.models.physical import (
    SET_VALUES,
    SET_WORKS,
    WORKS,
    Physics,
    set_values,
    set_works,
)
from torchrec_neuroshard.tables.features import FEATURE_NAMES, NUM_TOTALS

_NUM_VALUES = len(SET_VALUES)
NUM_SET_INPUTS = _NUM_VALUES + len(SET_WORKS) - 1  # every set has one launch
NUM_INPUTS = len(FEATURE_NAMES) - 1 + 4  # num_tables is 1 for every shard
_MAX_CORRECTION = 3.0
"""Bound on the log correction of a shard or set: the network corrects the physics, it
does not replace it."""
_MAX_STANDARDISED = 5.0
"""Inputs are clipped at this many standard deviations."""
_ONE_THREAD_PRODUCTS = 2**18
"""Multiplications of a matrix product up to which OpenBLAS uses one thread."""

Array = npt.NDArray[np.float32]


class ShardInputs(NamedTuple):
    """The encoder's inputs for shards."""

    x_NX: Array
    """Network inputs, not standardised."""
    physical_N2: Array
    """The physics' time of each shard [ms]."""
    values_NV: Array
    """See `physical.SET_VALUES`."""


def shard_inputs(features_NF: Array, physics: Physics) -> ShardInputs:
    """Return the encoder's inputs for shards on a device."""
    physical = np.maximum(physics.shards_ms(features_NF), 1e-6).astype(np.float32)
    per_lookup = physical / np.maximum(features_NF[:, 1:2], 1.0)
    logs = (np.log1p(features_NF[:, 1:NUM_TOTALS]), features_NF[:, NUM_TOTALS:])
    x = np.concatenate([*logs, np.log(physical), np.log(per_lookup)], axis=1)
    values = set_values(features_NF, physics.least_threads).astype(np.float32)
    return ShardInputs(x, physical, values)


def set_inputs(
    works_SG: npt.NDArray[np.floating], values_SV: npt.NDArray[np.floating]
) -> Array:
    """Return what the head knows of sets' work, `S x Y`, not standardised.

    Args:
        works_SG: `physical.set_works`.
        values_SV: Sums of the shards' `physical.set_values`.
    """
    values = np.concatenate([values_SV, works_SG[:, 1:]], axis=1, dtype=np.float32)
    logs: Array = np.log1p(np.maximum(values, 0.0))
    return logs


class SetCostNetwork(nn.Module):
    """Encoder and head of every ensemble member.

    A shard's encoding holds an additive cost (the physics' time, corrected by the
    encoder) and latent values weighted by this cost. The head corrects a set's sum; it
    also sees the set's work: totals, longest bag, widest table, passes of the sort.
    """

    constants_K2: torch.Tensor
    set_constants_G2: torch.Tensor
    cache_bytes: torch.Tensor
    least_threads: torch.Tensor
    input_mean_X: torch.Tensor
    input_std_X: torch.Tensor
    set_mean_Y: torch.Tensor
    set_std_Y: torch.Tensor
    spread_2: torch.Tensor

    def __init__(
        self,
        num_members: int,
        hidden: int,
        latent: int,
        head_hidden: int,
        num_devices: int = 0,
    ) -> None:
        """Create the layers; weights are random until trained or loaded.

        With `num_devices`, the device is an input of encoder and head. Such a network
        is trained on several devices at once; `of_device` returns one device's network.
        """
        super().__init__()
        self.num_members, self.latent = num_members, latent
        self.num_inputs = NUM_INPUTS
        for name, start in (
            ("constants_K2", torch.zeros(len(WORKS), 2, dtype=torch.float64)),
            (
                "set_constants_G2",
                torch.zeros(len(SET_WORKS), 2, dtype=torch.float64),
            ),
            ("cache_bytes", torch.ones((), dtype=torch.float64)),
            ("least_threads", torch.ones((), dtype=torch.float64)),
            ("input_mean_X", torch.zeros(NUM_INPUTS)),
            ("input_std_X", torch.ones(NUM_INPUTS)),
            ("set_mean_Y", torch.zeros(NUM_SET_INPUTS)),
            ("set_std_Y", torch.ones(NUM_SET_INPUTS)),
            # Factor on the members' spread, and smallest relative uncertainty.
            ("spread_2", torch.tensor([1.0, 0.0])),
        ):
            self.register_buffer(name, start)
        head_inputs = 2 + NUM_SET_INPUTS + latent + num_devices
        self.encoder = nn.ParameterList(
            _layers(num_members, [NUM_INPUTS + num_devices, hidden, hidden, 2 + latent])
        )
        self.head = nn.ParameterList(
            _layers(num_members, [head_inputs, head_hidden, head_hidden, 2])
        )
        self.launch_scale_M2 = nn.Parameter(torch.zeros(num_members, 2))

    @property
    def config(self) -> dict[str, int]:
        """Arguments that create a network of the same sizes."""
        return {
            "num_members": self.num_members,
            "hidden": self.encoder[0].shape[2],
            "latent": self.latent,
            "head_hidden": self.head[0].shape[2],
        }

    @property
    def encoding_dim(self) -> int:
        """Values per encoding, over all members."""
        return _NUM_VALUES + self.num_members * (2 + self.latent)

    @property
    def physics(self) -> Physics:
        """The device's physics."""
        return Physics(
            float(self.cache_bytes),
            self.constants_K2.numpy(),
            self.set_constants_G2.numpy(),
            float(self.least_threads),
        )

    @physics.setter
    def physics(self, physics: Physics) -> None:
        self.cache_bytes.fill_(physics.cache_bytes)
        self.constants_K2.copy_(torch.from_numpy(physics.constants_K2))
        self.set_constants_G2.copy_(torch.from_numpy(physics.set_constants_G2))
        self.least_threads.fill_(physics.least_threads)

    def encode(
        self, x_NX: torch.Tensor, physical_N2: torch.Tensor, values_NV: torch.Tensor
    ) -> torch.Tensor:
        """Encode shards from their `ShardInputs`, `N x E`."""
        encoded: torch.Tensor = _encode(torch, self, x_NX, physical_N2, values_NV)
        return encoded

    def predict(
        self, sums_SE: torch.Tensor, sets_S2: torch.Tensor, y_SY: torch.Tensor
    ) -> torch.Tensor:
        """Predict every member's milliseconds, `S x M x 2`.

        Args:
            sums_SE: Sums of encodings.
            sets_S2: `Physics.sets_ms`.
            y_SY: `set_inputs`. With several devices, one more column per device: 1 for
                the set's device, else 0.
        """
        sets_MS2 = sets_S2 * torch.exp(self.launch_scale_M2)[:, None]
        milliseconds: torch.Tensor = _predict(torch, self, sums_SE, sets_MS2, y_SY)
        return milliseconds

    @torch.no_grad()
    def of_device(self, number: int) -> SetCostNetwork:
        """Return the network for one of its devices."""
        network = SetCostNetwork(**self.config)
        network.load_state_dict(
            {n: v for n, v in self.state_dict().items() if v.dim() < 3}, strict=False
        )
        for mine, theirs in (
            (network.encoder, self.encoder),
            (network.head, self.head),
        ):
            for to, of in zip(mine, theirs, strict=True):
                to.copy_(of[:, : to.shape[1]])
            known = mine[0].shape[1]
            mine[1].add_(theirs[0][:, known + number, None])
        return network


class NetworkArrays:
    """A trained network in NumPy; equal results, except for rounding.

    A search predicts a few dozen sets at a time, thousands of times. For so few sets,
    calls into PyTorch take longer than the arithmetic. Threads gain nothing, and lose a
    lot if other processes keep the cores busy.
    """

    @plain_torch()
    def __init__(self, network: SetCostNetwork) -> None:
        """Copy the network's weights."""
        self._physics = copy.deepcopy(network.physics)
        tensors = {**dict(network.named_buffers()), **dict(network.named_parameters())}
        arrays = {n: t.detach().numpy().copy() for n, t in tensors.items()}
        self._net = SimpleNamespace(
            **{n: array for n, array in arrays.items() if "." not in n},
            encoder=[arrays[f"encoder.{i}"] for i in range(len(network.encoder))],
            head=[arrays[f"head.{i}"] for i in range(len(network.head))],
            num_members=network.num_members,
        )
        set_factor_M2 = torch.exp(network.launch_scale_M2)
        self._set_factor_M12 = set_factor_M2.detach().numpy()[:, None]

    def encode(self, features_NF: npt.ArrayLike) -> Array:
        """Encode shards from their features, `N x E`."""
        return _by_chunks(self._encode, self._net.encoder, features_NF)

    def predict(self, sums_SE: npt.ArrayLike) -> Array:
        """Predict every member's milliseconds from sums of encodings, `S x M x 2`."""
        return _by_chunks(self._predict, self._net.head, sums_SE)

    def _encode(self, features_NF: Array) -> Array:
        encoded: Array = _encode(
            np, self._net, *shard_inputs(features_NF, self._physics)
        )
        return encoded

    def _predict(self, sums_SE: Array) -> Array:
        values_SV = sums_SE[:, :_NUM_VALUES]
        works_SG = set_works(values_SV, self._physics.least_threads)
        sets_S2 = self._physics.sets_ms(works_SG).astype(np.float32)
        y_SY = set_inputs(works_SG, values_SV)
        sets_MS2 = sets_S2 * self._set_factor_M12
        predicted: Array = _predict(np, self._net, sums_SE, sets_MS2, y_SY)
        return predicted


# The forward pass, in either library: `xp` is torch or NumPy, and `net` has the tensors
# of `SetCostNetwork` as arrays of that library.


def _encode(xp: Any, net: Any, x_NX: Any, physical_N2: Any, values_NV: Any) -> Any:
    x = _standardised(xp, x_NX, net.input_mean_X, net.input_std_X)
    out = _run(xp, net.encoder, x)
    cost = physical_N2 * xp.exp(_bend(xp, out[..., :2]))
    latent = xp.tanh(out[..., 2:]) * cost.sum(2, keepdims=True)
    per_member = xp.concatenate([cost, latent], 2)  # M x N x (2 + L)
    size = per_member.shape[0] * per_member.shape[2]
    flat = per_member.swapaxes(0, 1).reshape(len(x_NX), size)
    return xp.concatenate([values_NV, flat], 1)


def _predict(xp: Any, net: Any, sums_SE: Any, sets_MS2: Any, y_SY: Any) -> Any:
    size = (sums_SE.shape[1] - _NUM_VALUES) // net.num_members
    rest = sums_SE[:, _NUM_VALUES:].reshape(len(sums_SE), net.num_members, size)
    rest = rest.swapaxes(0, 1)  # M x S x (2 + L)
    cost = rest[..., :2]
    if xp is np:  # faster: all that follows has this order in memory
        cost = np.ascontiguousarray(cost)
    total = (cost[..., :1] + cost[..., 1:]).clip(1e-6, None)
    y = _standardised(xp, y_SY, net.set_mean_Y, net.set_std_Y)
    y = xp.broadcast_to(y, (net.num_members, *y.shape))
    logs = xp.log(cost.clip(1e-6, None)) / 3.0
    x = xp.concatenate([logs, rest[..., 2:] / total, y], 2)
    milliseconds = (cost + sets_MS2) * xp.exp(_bend(xp, _run(xp, net.head, x)))
    return milliseconds.swapaxes(0, 1)


def _standardised(xp: Any, values: Any, mean: Any, std: Any) -> Any:
    """Standardise the inputs and clip them; columns of devices stay."""
    known = len(mean)
    standard = (values[:, :known] - mean) / std
    standard = standard.clip(-_MAX_STANDARDISED, _MAX_STANDARDISED)
    devices = values[:, known:]
    return xp.concatenate([standard, devices], 1) if devices.shape[1] else standard


def _bend(xp: Any, correction: Any) -> Any:
    return _MAX_CORRECTION * xp.tanh(correction / _MAX_CORRECTION)


def _run(xp: Any, layers: Sequence[Any], x: Any) -> Any:
    for i in range(0, len(layers), 2):
        x = xp.matmul(x, layers[i])
        x += layers[i + 1]
        if i + 2 < len(layers):
            x = torch.nn.functional.silu(x) if xp is torch else _silu(x)
    return x


def _silu(x: Array) -> Array:
    with np.errstate(over="ignore"):  # SiLU of a large negative is 0
        x /= 1.0 + np.exp(-x)
    return x


def _by_chunks(
    function: Callable[[Array], Array], layers: list[Array], rows: npt.ArrayLike
) -> Array:
    """Call a function on chunks of rows, small enough for BLAS to use one thread."""
    values = np.asarray(rows, dtype=np.float32)
    chunk = max(1, _ONE_THREAD_PRODUCTS // max(w.shape[1] * w.shape[2] for w in layers))
    if len(values) <= chunk:
        return function(values)
    starts = range(0, len(values), chunk)
    return np.concatenate([function(values[i : i + chunk]) for i in starts])


def _layers(num_members: int, sizes: list[int]) -> list[nn.Parameter]:
    parameters = []
    for i, (fan_in, fan_out) in enumerate(itertools.pairwise(sizes)):
        last = i == len(sizes) - 2
        scale = (0.1 if last else math.sqrt(2.0)) / math.sqrt(fan_in)
        parameters.append(
            nn.Parameter(torch.randn(num_members, fan_in, fan_out) * scale)
        )
        parameters.append(nn.Parameter(torch.zeros(num_members, 1, fan_out)))
    return parameters
