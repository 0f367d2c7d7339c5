"""The work of `neuroshard train` and `calibrate`, once torch is loaded."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from torchrec_neuroshard.bundles import cache
from torchrec_neuroshard.bundles.choice import Choice, poor_fit
from torchrec_neuroshard.bundles.descriptions import COMPUTE_DESCRIPTION
from torchrec_neuroshard.bundles.find import shipped_for
from torchrec_neuroshard.bundles.fit import Candidate
from torchrec_neuroshard.bundles.format import Bundle
from torchrec_neuroshard.bundles.make import make_bundle, make_comms_bundle
from torchrec_neuroshard.bundles.settings import TrainConfig
from torchrec_neuroshard.errors import ConfigError
from torchrec_neuroshard.files import from_options
from torchrec_neuroshard.hardware.device_types import is_accelerator
from torchrec_neuroshard.hardware.devices import (
    as_device,
    current_device_name,
    default_device_type,
)

RECORDS_NAME = "calibration.jsonl"
"""File of measured sets in the bundle's folder. The same command continues it."""
_CPU_SET_SECONDS = 1.5
"""Of a CPU: 139 sets took 200 s on an AMD EPYC (25/1)."""
_NUM_PLANS = 3
"""Plans of 4 to 8 ranks that check a calibration."""


def train_collectives(args: argparse.Namespace) -> int:
    """Train on records of collectives, and print the errors."""
    out, sizes = args.out, args.test_world_sizes or ()
    comms = make_comms_bundle(args.records, out, out.name, test_world_sizes=sizes)
    evaluations = comms.best.evaluations
    lines = [e.line() for e in evaluations if e.collective == "all"]
    _tell(comms, lines, "collectives", out)
    return 0


def train_kernels(args: argparse.Namespace) -> int:
    """Train on records of kernels, and print the errors."""
    config, out = from_options(TrainConfig, args), args.out
    fitted = make_bundle(args.records, out, out.name, config, others=args.others)
    _tell_kernels(fitted, out)
    return 0


def _tell_kernels(fitted: Choice[Candidate], out: Path) -> None:
    lines = [c.evaluation.line() for c in fitted.candidates.values()]
    _tell(fitted, lines, "kernels", out)


def _tell(fitted: Choice[Any], lines: Iterable[str], what: str, out: Path) -> None:
    """Print errors on the test data, and the choice."""
    print(*lines, fitted.verdict(), f"wrote {out}", sep="\n")
    if poor := poor_fit(fitted.error):
        print(f"warning: these {what} are predicted {poor}")


def calibrate(args: argparse.Namespace, source: Path | None) -> int:
    """Fit a bundle to this machine's kernels, and print what that gained.

    Args:
        args: The options of `neuroshard calibrate`.
        source: Folder of the bundle to start from; None: the nearest shipped one.

    Returns:
        The exit code.
    """
    config = from_options(TrainConfig, args)
    records = args.records
    if not records:
        # Imported here: with --records, no fbgemm is needed.
        from torchrec_neuroshard.commands.measure_run import measure_kernels
        from torchrec_neuroshard.measure.clock import MOST_SET_SECONDS

        records = [args.out / RECORDS_NAME]
        _tell_known(args, records[0])
        measure_kernels(
            args, records[0], num_plans=_NUM_PLANS, set_seconds=MOST_SET_SECONDS
        )
    start: Bundle | Literal["nearest"] = "nearest"
    if source is not None:
        start = Bundle.at(source)
    fitted = make_bundle(records, args.out, args.out.name, config, start=start)
    _tell_kernels(fitted, args.out)
    _tell_gain(fitted, args.out)
    if Bundle(args.out).comms is None:
        print(
            "The bundle has no collectives: plans will use published bandwidths or, on "
            "a CPU, collectives of another CPU. 'neuroshard collect comms' and "
            "'neuroshard train' add them"
        )
    return 0


def _tell_known(args: argparse.Namespace, records: Path) -> None:
    """Print which bundles know this device, and how long measuring takes.

    Raises:
        ConfigError: `--out` holds a bundle of other measurements.
    """
    lines = []
    if records.exists():
        lines.append(f"{records} holds sets of an earlier run; this one continues it")
    elif COMPUTE_DESCRIPTION.is_in(args.out):
        raise ConfigError(
            f"{args.out} holds a bundle of other measurements, which calibrating would "
            "replace; name another folder with --out"
        )
    device_type = as_device(args.device or default_device_type()).type
    device = current_device_name(device_type)
    shipped = shipped_for(device_type, device)
    lines.append(
        f"no shipped bundle was measured on {device}: plans use an estimate so far"
        if shipped is None
        else f"the shipped bundle '{shipped.folder.name}' was measured on this kind of "
        f"device, {device}: plans use it by default, and calibrating refines it"
    )
    if cached := sum(entry.key.device == device for entry in cache.entries()):
        lines.append(
            f"bundles of first launches on {device} in the cache: {cached}. Later "
            "launches use them; 'neuroshard cache' lists them"
        )
    if not is_accelerator(device_type):
        limit_s = args.time_budget_seconds or math.inf
        minutes = math.ceil(min(limit_s, args.num_sets * _CPU_SET_SECONDS) / 60)
        lines.append(f"measuring takes up to about {minutes} minutes")
    print(*lines, sep="\n", flush=True)


def _tell_gain(fitted: Choice[Candidate], out: Path) -> None:
    """Print what calibrating gained over the bundle that it started from."""
    info = Bundle(out).compute
    assert info is not None
    if (before := fitted.candidates.get("before")) is None:
        print(
            f"no shipped bundle is of type {info.fingerprint.device_type} to start from"
        )
        return
    name, best = info.trained_on["started_from"], fitted.best
    if best is before:
        print(f"calibrating gained nothing over '{name}': the bundle holds that model")
    for label, found in {f"'{name}' unchanged": before, "calibrated": best}.items():
        errors = found.evaluation
        on_plans = f"; in plans, {found.plans}" if found.plans else ""
        print(f"{label}: {errors.total.mean:.1%} off on held-out sets{on_plans}")
