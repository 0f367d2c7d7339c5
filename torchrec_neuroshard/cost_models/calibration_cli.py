"""`neuroshard calibrate`: a shipped bundle and a few measurements in, a bundle out."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from rich.console import Console

from torchrec_neuroshard.collect.progress import measuring_progress
from torchrec_neuroshard.cost_models.calibration import (
    Calibration,
    CalibrationConfig,
    calibrate_bundle,
    source_folder,
)
from torchrec_neuroshard.cost_models.training import EpochReport, Evaluation
from torchrec_neuroshard.errors import ConfigError

__all__ = ["RECORDS_NAME", "add_arguments", "pinned_to", "run"]

RECORDS_NAME = "calibration.parquet"
"""What is measured is kept under this name in the bundle's folder, and gone on with
when the command is given again."""
_NUM_SAMPLES = 300


@contextlib.contextmanager
def pinned_to(cpu: int | None) -> Iterator[None]:
    """Run on one core; None changes nothing.

    Raises:
        ConfigError: The system cannot pin, or this process may not use that core.
    """
    if cpu is None:
        yield
        return
    if not hasattr(os, "sched_setaffinity"):
        raise ConfigError("--cpu needs Linux; leave it out")
    allowed = os.sched_getaffinity(0)
    if cpu not in allowed:
        raise ConfigError(
            f"--cpu {cpu}: this process may run on cores {sorted(allowed)} only"
        )
    os.sched_setaffinity(0, {cpu})
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


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
    parser.add_argument("--learning-rate", type=float, default=defaults.learning_rate)
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
        help=f"sets to measure (default: {_NUM_SAMPLES})",
    )
    measuring.add_argument("--device", help="cpu or cuda[:N] (default: cpu)")
    measuring.add_argument(
        "--time-limit",
        type=float,
        help="stop measuring after so many seconds and go on with what there is",
    )
    measuring.add_argument("--cpu", type=int, help="core to measure on")
    measuring.add_argument("--max-gib", type=float, help="most weights of a set")
    measuring.add_argument(
        "--tables",
        type=Path,
        action="append",
        help="JSON file of real tables to draw from (repeatable)",
    )


_MEASURING = ("num_samples", "device", "time_limit", "cpu", "max_gib", "tables")


def _measure(args: argparse.Namespace, console: Console) -> Path:
    # Only here: with --records, calibrating does without fbgemm.
    from torchrec_neuroshard.collect.compute import CollectConfig, collect_compute
    from torchrec_neuroshard.collect.sampling import SamplingConfig

    device = args.device or "cpu"
    sampling = SamplingConfig.for_device(torch.device(device).type)
    if args.max_gib is not None:
        sampling = dataclasses.replace(
            sampling, max_weight_bytes=int(args.max_gib * 2**30)
        )
    path: Path = args.out / RECORDS_NAME
    with pinned_to(args.cpu):
        collect_compute(
            CollectConfig(
                out=path,
                num_sets=_NUM_SAMPLES if args.num_samples is None else args.num_samples,
                seed=args.seed,
                device=device,
                tables=tuple(args.tables or ()),
                sampling=sampling,
                time_limit_seconds=args.time_limit,
            ),
            console,
        )
    return path


def _print_errors(
    console: Console, found: Calibration, evaluations: Sequence[Evaluation]
) -> None:
    for evaluation in evaluations:
        console.print(
            f"{evaluation.name}: forward {evaluation.fwd_mape:.2%}, backward "
            f"{evaluation.bwd_mape:.2%}, total {evaluation.total_mape:.2%} (median "
            f"{evaluation.total_median:.2%}), tau {evaluation.kendall_tau:.4f}",
            soft_wrap=True,
        )
    console.print(found.verdict(), soft_wrap=True)


def run(args: argparse.Namespace) -> int:
    """Run `neuroshard calibrate`."""
    given = [n for n in _MEASURING if getattr(args, n) is not None]
    if args.records and given:
        options = ", ".join("--" + n.replace("_", "-") for n in given)
        raise ConfigError(
            f"--records takes measurements that exist, {options} say how to make new "
            "ones; leave one or the other out"
        )
    console = Console()
    source = source_folder(args.source)
    config = CalibrationConfig(
        steps=args.steps, learning_rate=args.learning_rate, seed=args.seed
    )
    records = args.records or [_measure(args, console)]
    with measuring_progress(console, "epochs") as progress:

        def report(name: str, epochs: int) -> EpochReport:
            bar = progress.add_task(name, total=epochs, rate=0.0)

            def advance(epoch: int, loss: float, mape: float, tau: float) -> None:
                task = next(t for t in progress.tasks if t.id == bar)
                progress.update(bar, advance=1, rate=task.speed or 0.0)

            return advance

        found, evaluations = calibrate_bundle(
            source, records, args.out, args.name or args.out.name, config, report
        )
    _print_errors(console, found, evaluations)
    console.print(f"wrote {args.out}")
    return 0
