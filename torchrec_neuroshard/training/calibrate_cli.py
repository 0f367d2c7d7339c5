"""`neuroshard calibrate`: fit a shipped bundle to a few measured sets of kernels."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from torchrec_neuroshard.cost_models.bundle import (
    COMMS_BUNDLE,
    COMPUTE_BUNDLE,
    load_bundle,
)
from torchrec_neuroshard.cost_models.loading import bundle_folder, pretrained_names
from torchrec_neuroshard.devices import as_device, default_device_type
from torchrec_neuroshard.errors import ConfigError
from torchrec_neuroshard.files import check_folder, from_options
from torchrec_neuroshard.progress import phase
from torchrec_neuroshard.records import CostRecord, steady_records
from torchrec_neuroshard.training.calibration import (
    MIN_SETS,
    Calibration,
    CalibrationConfig,
    calibrate,
)
from torchrec_neuroshard.training.cards import calibration_note, compute_card
from torchrec_neuroshard.training.compute import (
    Evaluation,
    as_cost_model,
    evaluate,
)
from torchrec_neuroshard.training.train_cli import MeasuredSets

__all__ = ["add_arguments", "calibrate_bundle", "run", "source_folder"]

RECORDS_NAME = "calibration.parquet"
"""Measured sets are kept under this name in the bundle's folder. The same command,
given again, goes on from them."""
_NUM_SAMPLES, _FEWEST_SAMPLES = 300, 5 * MIN_SETS


def source_folder(name: str | Path) -> Path:
    """Find the bundle to start from.

    Args:
        name: Name of a shipped bundle, or a bundle's folder.

    Raises:
        ConfigError: There is neither.
    """
    if (folder := bundle_folder(name)) is None:
        raise ConfigError(
            f"no bundle '{name}' to start from: it is neither a shipped one "
            f"({', '.join(pretrained_names()) or 'none'}) nor a folder made by "
            "'neuroshard train'"
        )
    return folder


def calibrate_bundle(
    source: Path,
    records: Sequence[Path],
    out: Path,
    name: str,
    config: CalibrationConfig,
    select: Callable[[Sequence[CostRecord]], list[CostRecord]] | None = None,
) -> tuple[Calibration, list[Evaluation]]:
    """Fine-tune a bundle on another device's records and write a new bundle.

    A model of collectives beside `source` is not taken over: it was measured there.

    Args:
        source: Folder of the bundle to start from.
        records: Files of compute records of one device.
        out: Folder of the new bundle.
        name: What it is called.
        config: Steps and rates.
        select: Leaves out records that do not count; None: `steady_records`.

    Returns:
        The calibration, and the errors that the card shows: of what was kept, of all
        candidates and of the yardsticks.

    Raises:
        ConfigError: `out` is the bundle to start from.
        RecordError: Too few records.
        RecordMismatchError: The files are of different devices.
        BundleCorruptError: `source` is damaged.
    """
    if out.resolve() == source.resolve():
        raise ConfigError(
            f"{out} is the bundle to start from; name another folder for the new one"
        )
    model, old = load_bundle(source), COMPUTE_BUNDLE.read_info(source)
    sets = MeasuredSets.read(records, select or steady_records)
    training, test = sets.training, sets.test
    found = calibrate(model, old.network, training, test, config)
    kept = found.candidates[found.kept]
    evaluations = [
        evaluate("learned", as_cost_model(kept.network, test, name), test),
        *(c.evaluation for c in found.candidates.values()),
    ]
    info = sets.describe(
        name,
        kept.network,
        kept.ranges,
        {
            "seed": config.seed,
            "steps": config.steps,
            "calibrated_from": {
                "name": old.name,
                "device": old.fingerprint.device,
                "num_training_sets": old.trained_on.get("num_training_sets"),
            },
            "kept": found.kept,
            "factors": list(found.factors_2),
            "errors": found.errors,
        },
    )
    note = calibration_note(old, found)
    card = compute_card(info, sets.noise, evaluations, note)
    COMPUTE_BUNDLE.save(out, kept.network, info, card)
    return found, evaluations


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `neuroshard calibrate`."""
    defaults = CalibrationConfig()
    parser.add_argument(
        "--from",
        dest="source",
        default="cpu",
        help="bundle to start from: a shipped one's name or a folder (default: cpu)",
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the bundle")
    parser.add_argument("--name", help="name of the bundle; default: the folder's")
    parser.add_argument(
        "--steps", type=int, default=defaults.steps, help="training steps"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of what is measured and of the training"
    )
    parser.add_argument(
        "--records",
        type=Path,
        nargs="+",
        help="files of 'collect compute' to use instead of measuring",
    )
    measuring = parser.add_argument_group("measuring (without --records)")
    measuring.add_argument(
        "--num-samples",
        type=int,
        help=f"sets to measure (default: {_NUM_SAMPLES}); about a fifth of them are of "
        "held-out tables to judge by",
    )
    measuring.add_argument(
        "--device", help="cpu or cuda[:N] (default: the GPU where there is one)"
    )
    measuring.add_argument(
        "--time-limit",
        type=float,
        help="stop measuring after so many seconds and go on with what there is",
    )
    measuring.add_argument("--max-gib", type=float, help="most weights of a set")


def _measure(args: argparse.Namespace, console: Console) -> Path:
    # Only here: with --records, calibrating does without fbgemm.
    from torchrec_neuroshard.collect.compute import (
        CollectConfig,
        collect_compute,
        default_sampling,
    )

    device = args.device or default_device_type()
    sampling = default_sampling(as_device(device))
    if args.max_gib is not None:
        sampling = dataclasses.replace(
            sampling, max_weight_bytes=int(args.max_gib * 2**30)
        )
    path: Path = args.out / RECORDS_NAME
    collect_compute(
        CollectConfig(
            out=path,
            num_sets=_NUM_SAMPLES if args.num_samples is None else args.num_samples,
            seed=args.seed,
            device=device,
            sampling=sampling,
            time_limit_seconds=args.time_limit,
        ),
        console,
    )
    return path


def run(args: argparse.Namespace) -> int:
    """Run `neuroshard calibrate`."""
    if args.num_samples is not None and args.num_samples < _FEWEST_SAMPLES:
        raise ConfigError(
            f"--num-samples {args.num_samples} is too few: a fifth of the sets are of "
            f"held-out tables, and {MIN_SETS} of those have to judge; give "
            f"{_FEWEST_SAMPLES} or more"
        )
    check_folder(args.out)
    console = Console()
    source = source_folder(args.source)
    config = from_options(CalibrationConfig, args)
    with phase("measuring"):
        records = args.records or [_measure(args, console)]
    with phase("calibrating"):
        name = args.name or args.out.name
        found, evaluations = calibrate_bundle(source, records, args.out, name, config)
    for line in (*(e.line() for e in evaluations), found.verdict()):
        console.print(line, soft_wrap=True)
    console.print(f"wrote {args.out}")
    if not COMMS_BUNDLE.is_in(args.out):
        console.print(
            "no collectives: they will be predicted from the topology's bandwidths. "
            "'neuroshard collect comms' and 'train' add them to the bundle",
            soft_wrap=True,
        )
    return 0
