"""The model of collectives in a bundle: `comms.json`, `comms.safetensors`, the card.

It stands beside a compute model or alone, and is for one kind of hardware and backend.
"""

from __future__ import annotations

import dataclasses
import json
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchrec_neuroshard.cost_models.bundle import (
    COMMS_HEADING,
    load_weights,
    read_description,
    read_fields,
    read_info,
    save_weights,
    write_card,
    write_whole,
)
from torchrec_neuroshard.cost_models.comms import LearnedCommsModel
from torchrec_neuroshard.cost_models.comms_network import TERM_NAMES, CommsNetwork
from torchrec_neuroshard.cost_models.comms_training import CommsEvaluation
from torchrec_neuroshard.errors import BundleMismatchError
from torchrec_neuroshard.records import COLLECTIVES, Fingerprint

__all__ = [
    "COMMS_VERSION",
    "CommsBundleInfo",
    "carry_over",
    "comms_card",
    "has_comms",
    "load_comms_bundle",
    "load_comms_network",
    "read_comms_info",
    "save_comms_bundle",
]

COMMS_VERSION = 1
"""Version of the files' layout; another version is refused."""

_WEIGHTS, _INFO, _COMPUTE_INFO = "comms.safetensors", "comms.json", "bundle.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class CommsBundleInfo:
    """What the model of collectives says of itself."""

    name: str
    fingerprint: Fingerprint
    backend: str
    """`gloo` or `nccl`."""
    hidden: int
    """Argument of `CommsNetwork`."""
    intra_gb_per_s: float
    """Nominal bandwidth inside a node, as measured."""
    inter_gb_per_s: float
    """Same between nodes; 0 where one node was measured."""
    world_sizes: tuple[int, ...]
    """Ranks of the groups in training."""
    bytes_per_rank: tuple[float, float]
    """Least and most in training."""
    trained_on: Mapping[str, Any]
    """Records, seeds and commands behind the weights."""
    compute_slowdown: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """See `CommsHeader`."""
    column_order_ms_per_mb: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """See `CommsHeader`."""
    compute_reference_ms: float = 0.0
    """See `CommsHeader`."""
    carried_over: bool = False
    """Whether it stands beside a compute model of another machine than its own."""
    term_names: tuple[str, ...] = TERM_NAMES
    collectives: tuple[str, ...] = COLLECTIVES
    comms_version: int = COMMS_VERSION


def has_comms(folder: str | Path) -> bool:
    """Whether a bundle holds a model of collectives."""
    return (Path(folder) / _INFO).is_file()


def save_comms_bundle(
    folder: str | Path, network: CommsNetwork, info: CommsBundleInfo, card: str
) -> None:
    """Write the model of collectives into a bundle, new or not.

    Raises:
        BundleMismatchError: The bundle's compute model is of other hardware, and the
            model is not said to be carried over.
    """
    path = Path(folder)
    if (path / _COMPUTE_INFO).is_file() and not info.carried_over:
        compute = read_info(path).fingerprint
        mine = info.fingerprint
        if (compute.device_type, compute.device) != (mine.device_type, mine.device):
            raise BundleMismatchError(
                f"{path} holds a compute model of {compute.device}, the collectives "
                f"were measured on {mine.device}; name another folder"
            )
    path.mkdir(parents=True, exist_ok=True)
    data = dataclasses.asdict(info)
    data["weights_sha256"] = save_weights(path / _WEIGHTS, network)
    write_card(path, comms=card)
    write_whole(path / _INFO, (json.dumps(data, indent=1) + "\n").encode())


def load_comms_network(folder: str | Path) -> tuple[CommsNetwork, CommsBundleInfo]:
    """Load the network as it was trained, for any group of ranks.

    Raises:
        BundleCorruptError: A file is missing, truncated or damaged.
        BundleMismatchError: It is of another version of this package.
    """
    path = Path(folder)
    data = read_description(path / _INFO)
    info = _info(path / _INFO, data)
    network = load_weights(
        path / _WEIGHTS, data.get("weights_sha256"), lambda: CommsNetwork(info.hidden)
    )
    return network, info


def carry_over(source: str | Path, folder: str | Path) -> CommsBundleInfo:
    """Copy the collectives of one machine's bundle to another machine's.

    They are marked: predictions say where they were measured, and so does the card.

    Returns:
        The description of what was copied.

    Raises:
        BundleCorruptError: `source` has no sound model of collectives.
    """
    network, info = load_comms_network(source)
    # Milliseconds stay what they are beside the compute model at the source.
    new_ms = 0.0
    if (Path(folder) / _COMPUTE_INFO).is_file():
        new_ms = read_info(folder).reference_ms / _time_scale(Path(source), info)
    info = dataclasses.replace(info, carried_over=True, compute_reference_ms=new_ms)
    card = "\n".join(
        [
            f"{COMMS_HEADING} `{info.name}`, carried over",
            "",
            f"**Measured on {info.fingerprint.device} over {info.backend}, not on this "
            "machine**, whose collectives may take several times as long or as short. "
            "Measure them with `neuroshard collect comms`, or with `--ranks` of "
            "`neuroshard calibrate`.",
            "",
        ]
    )
    save_comms_bundle(folder, network, info, card)
    return info


def read_comms_info(folder: str | Path) -> CommsBundleInfo:
    """Read and check the description without the weights.

    Raises:
        BundleCorruptError: It is missing or damaged.
        BundleMismatchError: It is of another version of this package.
    """
    path = Path(folder) / _INFO
    return _info(path, read_description(path))


def _info(path: Path, data: dict[str, Any]) -> CommsBundleInfo:
    expected = (COMMS_VERSION, list(TERM_NAMES), list(COLLECTIVES))
    found = tuple(data.get(n) for n in ("comms_version", "term_names", "collectives"))
    if found != expected:
        raise BundleMismatchError(
            f"{path} has version {found[0]} or other terms than this package, which "
            f"reads version {COMMS_VERSION}; train again or install the matching one"
        )
    names = ("world_sizes", "bytes_per_rank", "term_names", "collectives")
    as_tuples = dict.fromkeys(names, tuple)
    return read_fields(CommsBundleInfo, path, data, **as_tuples)


def load_comms_bundle(
    folder: str | Path,
    *,
    backend: str,
    world_size: int,
    local_world_size: int,
    intra_gb_per_s: float | None = None,
    inter_gb_per_s: float | None = None,
) -> LearnedCommsModel:
    """Load the model of collectives for one group of ranks.

    Warns where the world size is beyond those measured.

    Args:
        folder: The bundle.
        backend: What the ranks will talk over: `gloo` or `nccl`.
        world_size: Ranks to predict for.
        local_world_size: Ranks per node.
        intra_gb_per_s: Bandwidth inside a node; None is as measured.
        inter_gb_per_s: Same between nodes.

    Raises:
        BundleCorruptError: A file is missing, truncated or damaged.
        BundleMismatchError: It is of another backend or version of this package.
        ConfigError: The ranks do not fill whole nodes, or a bandwidth is not known.
    """
    path = Path(folder)
    network, info = load_comms_network(path)
    if info.backend != backend:
        raise BundleMismatchError(
            f"{path} was measured over {info.backend}, {backend} was asked for; "
            f"measure with 'neuroshard collect comms --backend {backend}' and train"
        )
    if world_size > 2 * max(info.world_sizes):
        warnings.warn(
            f"collectives of {world_size} ranks are extrapolated: {path} was measured "
            f"at {', '.join(map(str, info.world_sizes))}",
            stacklevel=2,
        )
    device = info.fingerprint.device
    return LearnedCommsModel(
        network,
        source=f"measured on {device}" if info.carried_over else "measured",
        time_scale=_time_scale(path, info),
        backend=backend,
        world_size=world_size,
        local_world_size=local_world_size,
        measured_gb_per_s=(info.intra_gb_per_s, info.inter_gb_per_s),
        intra_gb_per_s=intra_gb_per_s,
        inter_gb_per_s=inter_gb_per_s,
        slowdowns=_by_ranks(info.compute_slowdown),
        column_order_ms_per_mb=_by_ranks(info.column_order_ms_per_mb),
    )


def _by_ranks(values: Mapping[str, Sequence[float]]) -> dict[int, tuple[float, ...]]:
    return {int(n): tuple(v) for n, v in values.items()}


def _time_scale(folder: Path, info: CommsBundleInfo) -> float:
    """Milliseconds of the compute model beside it, per one of the collectives.

    Both were timed beside the same reference set, when the machine was as fast as it
    happened to be.
    """
    if not (info.compute_reference_ms and (folder / _COMPUTE_INFO).is_file()):
        return 1.0
    nominal_ms = read_info(folder).reference_ms
    return nominal_ms / info.compute_reference_ms if nominal_ms else 1.0


def comms_card(
    info: CommsBundleInfo,
    repeatability_line: str,
    evaluations: Sequence[CommsEvaluation],
) -> str:
    """Write the card's part on collectives in Markdown."""
    fingerprint, trained_on = info.fingerprint, info.trained_on
    low, high = info.bytes_per_rank
    lines = [
        f"{COMMS_HEADING} `{info.name}`",
        "",
        "Milliseconds from the last rank's arrival until the slowest rank is through, "
        "TorchRec's copies around the collective included.",
        "",
        "| | |",
        "| --- | --- |",
        f"| device, backend | {fingerprint.device}, {info.backend} |",
        f"| torch | {fingerprint.torch} |",
        f"| cores for the ranks of a node | {trained_on['cores']} |",
        f"| world sizes trained on | {', '.join(map(str, info.world_sizes))} |",
        f"| records trained on | {trained_on['num_training']} |",
        f"| bytes per rank | {low:.0f} to {high:.0f} |",
        f"| one message inside a node | {info.intra_gb_per_s:.2f} GB/s |",
        "| one message between nodes | "
        + (
            f"{info.inter_gb_per_s:.2f} GB/s |"
            if info.inter_gb_per_s
            else "not measured |"
        ),
        *(
            f"| kernels of {n} ranks at once | forward {v[0]:.2f}, backward "
            f"{v[1]:.2f} times as long |"
            for n, v in info.compute_slowdown.items()
        ),
        f"| measured | {', '.join(trained_on['created'])} |",
        "",
        "## Noise of the collectives",
        "",
        repeatability_line,
        "",
        "## Error on collectives never seen in training",
        "",
        "Absolute error relative to the measured time; tau is Kendall's. `bandwidth` "
        "is one latency and one bandwidth per collective, fitted to the same records.",
        "",
        "| ranks | collective | in training | records | median | mean | 90th "
        "percentile | tau | bandwidth, median |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {e.world_size} | {e.collective} | {'yes' if e.trained else 'no'} | "
        f"{e.num_records} | {e.median:.1%} | {e.mean:.1%} | {e.percentile_90:.1%} | "
        f"{'-' if math.isnan(e.kendall_tau) else f'{e.kendall_tau:.3f}'} | "
        f"{e.bandwidth_median:.1%} |"
        for e in evaluations
    ]
    lines += [
        "",
        "## Collectives measured by",
        "",
        *(f"- `{command}`" for command in trained_on["commands"]),
        "",
    ]
    return "\n".join(lines)
