"""The learned model of sets: shard encoder, sum and head, as an ensemble.

Shapes: `N` shards, `S` sets, `M` ensemble members, `F` features, `X` inputs of the
encoder, `Y` inputs of the head on a set's work, `V` set values, `E` encoding values,
`L` latent values, `K` and `G` kinds of work.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

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
        x = _standardise(x_NX, self.input_mean_X, self.input_std_X)
        out = _run(self.encoder, x.expand(self.num_members, -1, -1))
        bend = _MAX_CORRECTION * torch.tanh(out[..., :2] / _MAX_CORRECTION)
        cost = physical_N2 * torch.exp(bend)
        latent = torch.tanh(out[..., 2:]) * cost.sum(dim=2, keepdim=True)
        per_member = torch.cat([cost, latent], dim=2)  # M x N x (2 + L)
        flat = per_member.permute(1, 0, 2).reshape(len(x_NX), -1)
        return torch.cat([values_NV, flat], dim=1)

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
        y_SY = _standardise(y_SY, self.set_mean_Y, self.set_std_Y)
        rest = sums_SE[:, _NUM_VALUES:].reshape(len(sums_SE), self.num_members, -1)
        rest = rest.permute(1, 0, 2)  # M x S x (2 + L)
        cost = rest[..., :2]
        mean_latent = rest[..., 2:] / cost.sum(dim=2, keepdim=True).clamp_min(1e-6)
        x = torch.cat(
            [
                torch.log(cost.clamp_min(1e-6)) / 3.0,
                mean_latent,
                y_SY.expand(self.num_members, -1, -1),
            ],
            dim=2,
        )
        bend = _run(self.head, x)
        bend = _MAX_CORRECTION * torch.tanh(bend / _MAX_CORRECTION)
        sets = sets_S2 * torch.exp(self.launch_scale_M2)[:, None]
        milliseconds = (cost + sets) * torch.exp(bend)
        return milliseconds.permute(1, 0, 2)

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
        self._num_members = network.num_members
        self._physics = copy.deepcopy(network.physics)
        self._input_mean_X = network.input_mean_X.numpy().copy()
        self._input_std_X = network.input_std_X.numpy().copy()
        self._set_mean_Y = network.set_mean_Y.numpy().copy()
        self._set_std_Y = network.set_std_Y.numpy().copy()
        self._encoder = [p.detach().numpy().copy() for p in network.encoder]
        self._head = [p.detach().numpy().copy() for p in network.head]
        set_factor_M2 = torch.exp(network.launch_scale_M2)
        self._set_factor_M12 = set_factor_M2.detach().numpy()[:, None]

    def encode(self, features_NF: npt.ArrayLike) -> Array:
        """Encode shards from their features, `N x E`."""
        return _by_chunks(self._encode, self._encoder, features_NF)

    def predict(self, sums_SE: npt.ArrayLike) -> Array:
        """Predict every member's milliseconds from sums of encodings, `S x M x 2`."""
        return _by_chunks(self._predict, self._head, sums_SE)

    def _encode(self, features_NF: Array) -> Array:
        x, physical, values = shard_inputs(features_NF, self._physics)
        x = (x - self._input_mean_X) / self._input_std_X
        out = _run_arrays(self._encoder, x.clip(-_MAX_STANDARDISED, _MAX_STANDARDISED))
        cost = physical * np.exp(_bend(out[..., :2]))
        latent = np.tanh(out[..., 2:]) * cost.sum(axis=2, keepdims=True)
        per_member = np.concatenate([cost, latent], axis=2)  # M x N x (2 + L)
        flat = per_member.transpose(1, 0, 2).reshape(
            len(features_NF), self._num_members * per_member.shape[2]
        )
        return np.concatenate([values, flat], axis=1)

    def _predict(self, sums_SE: Array) -> Array:
        size = (sums_SE.shape[1] - _NUM_VALUES) // self._num_members
        rest = sums_SE[:, _NUM_VALUES:].reshape(-1, self._num_members, size)
        rest = rest.transpose(1, 0, 2)  # M x S x (2 + L)
        cost = np.ascontiguousarray(rest[..., :2])
        total = np.maximum(cost[..., :1] + cost[..., 1:], 1e-6)
        values_SV = sums_SE[:, :_NUM_VALUES]
        works_SG = set_works(values_SV, self._physics.least_threads)
        y = (set_inputs(works_SG, values_SV) - self._set_mean_Y) / self._set_std_Y
        x = np.empty((*rest.shape[:2], size + NUM_SET_INPUTS), dtype=np.float32)
        x[..., :2] = np.log(np.maximum(cost, 1e-6)) / 3.0
        np.divide(rest[..., 2:], total, out=x[..., 2:size])
        np.clip(y, -_MAX_STANDARDISED, _MAX_STANDARDISED, out=x[0, :, size:])
        x[1:, :, size:] = x[0, :, size:]
        sets_S2 = self._physics.sets_ms(works_SG).astype(np.float32)
        milliseconds: Array = cost + sets_S2 * self._set_factor_M12
        milliseconds *= np.exp(_bend(_run_arrays(self._head, x)))
        return milliseconds.transpose(1, 0, 2)


def _standardise(
    x_NX: torch.Tensor, mean_X: torch.Tensor, std_X: torch.Tensor
) -> torch.Tensor:
    """Standardise the inputs and clip them; columns of devices stay."""
    known = len(mean_X)
    x = (x_NX[:, :known] - mean_X) / std_X
    x = x.clamp(-_MAX_STANDARDISED, _MAX_STANDARDISED)
    return torch.cat([x, x_NX[:, known:]], dim=1)


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


def _bend(correction: Array) -> Array:
    bend: Array = _MAX_CORRECTION * np.tanh(correction / _MAX_CORRECTION)
    return bend


def _run_arrays(layers: list[Array], x: Array) -> Array:
    for i in range(0, len(layers), 2):
        x = np.matmul(x, layers[i])
        x += layers[i + 1]
        if i + 2 < len(layers):
            with np.errstate(over="ignore"):  # SiLU of a large negative is 0
                x /= 1.0 + np.exp(-x)
    return x


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


def _run(layers: nn.ParameterList, x: torch.Tensor) -> torch.Tensor:
    parameters = list(layers)
    for i in range(0, len(parameters), 2):
        x = torch.baddbmm(parameters[i + 1], x, parameters[i])
        if i + 2 < len(parameters):
            x = torch.nn.functional.silu(x)
    return x
