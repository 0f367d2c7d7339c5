"""`neuroshard calibrate`: a shipped bundle and a few measurements in, a bundle out.

Kernels are always calibrated; collectives are measured where `--ranks` says among how
many processes of this machine.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rich.console import Console

from torchrec_neuroshard.collect.console import RateProgress
from torchrec_neuroshard.cost_models.bundle import (
    COMMS_BUNDLE,
    COMPUTE_BUNDLE,
    BundleInfo,
    CommsBundleInfo,
    load_bundle,
    save_comms_bundle,
)
from torchrec_neuroshard.cost_models.loading import bundle_folder, pretrained_names
from torchrec_neuroshard.devices import (
    accelerator,
    as_device,
    backend_of,
    default_device_type,
    is_accelerator,
)
from torchrec_neuroshard.errors import ConfigError, RankFailureError, RecordError
from torchrec_neuroshard.files import check_folder, from_options
from torchrec_neuroshard.progress import phase
from torchrec_neuroshard.record_store import read_records
from torchrec_neuroshard.records import (
    CostRecord,
    command_line,
    steady_records,
)
from torchrec_neuroshard.training.calibration import (
    MIN_SETS,
    Calibration,
    CalibrationConfig,
    TrainingReport,
    calibrate,
    split_records,
)
from torchrec_neuroshard.training.cards import (
    calibration_section,
    carried_over_card,
    compute_card,
    compute_noise,
)
from torchrec_neuroshard.training.comms import CommsTrainConfig
from torchrec_neuroshard.training.compute import (
    EpochReport,
    Evaluation,
    as_cost_model,
    build_sets,
    evaluate,
    fit_stock,
    score,
)
from torchrec_neuroshard.training.train_cli import train_comms_bundle

__all__ = [
    "COMMS_NAME",
    "RECORDS_NAME",
    "add_arguments",
    "calibrate_bundle",
    "carry_over",
    "pinned_to",
    "run",
    "source_folder",
]

RECORDS_NAME = "calibration.parquet"
"""What is measured is kept under this name in the bundle's folder, and gone on with
when the command is given again."""
COMMS_NAME = "collectives.parquet"
"""The same for collectives."""
_NUM_SAMPLES = 300


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
    report: TrainingReport | None = None,
    select: Callable[[Sequence[CostRecord]], list[CostRecord]] | None = None,
) -> tuple[Calibration, list[Evaluation]]:
    """Fine-tune a bundle on another device's records and write a new bundle.

    A model of collectives beside `source` is not taken over: it was measured there
    (`carry_over` does it).

    Args:
        source: Folder of the bundle to start from.
        records: Files of compute records of one device.
        out: Folder of the new bundle.
        name: What it is called.
        config: Steps and rates.
        report: Makes the report of each training.
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
    headers, found_records = read_records(records)
    steady = (select or steady_records)(found_records)
    num_disturbed = len(found_records) - len(steady)
    try:
        training, test = map(build_sets, split_records(steady))
    except RecordError as error:
        raise RecordError(
            f"{error} ({num_disturbed} of {len(found_records)} records were left out: "
            "other work disturbed them)"
        ) from error
    found = calibrate(model, old.network, training, test, config, report)
    kept = found.candidates[found.kept]
    evaluations = [
        evaluate("learned", as_cost_model(kept.network, test, name), test),
        *(c.evaluation for c in found.candidates.values()),
        evaluate("stock", fit_stock(training), test),
    ]
    info = BundleInfo(
        name=name,
        fingerprint=headers[0].fingerprint,
        reference_ms=headers[0].reference_ms,
        network=kept.network.config,
        ranges=kept.ranges,
        trained_on={
            "num_training_sets": training.num_sets,
            "num_test_sets": test.num_sets,
            "num_disturbed": num_disturbed,
            "created": sorted({h.created[:10] for h in headers}),
            "seed": config.seed,
            "steps": config.steps,
            "commands": [*(h.command for h in headers), command_line()],
            "calibrated_from": {
                "name": old.name,
                "device": old.fingerprint.device,
                "num_training_sets": old.trained_on.get("num_training_sets"),
            },
            "kept": found.kept,
            "factors": list(found.factors_2),
            "errors": {n: score(c.evaluation) for n, c in found.candidates.items()},
        },
    )
    noise = compute_noise(steady)
    card = compute_card(info, noise, evaluations)
    card += calibration_section(old, info, found)
    COMPUTE_BUNDLE.save(out, kept.network, info, card)
    return found, evaluations


def carry_over(source: str | Path, folder: str | Path) -> CommsBundleInfo:
    """Copy the collectives of one machine's bundle to another machine's.

    They are marked: predictions say where they were measured, and so does the card.

    Returns:
        The description of what was copied.

    Raises:
        BundleCorruptError: `source` has no sound model of collectives.
    """
    network, info = COMMS_BUNDLE.load(source)
    there, here = map(COMPUTE_BUNDLE.find_info, (source, folder))
    # Milliseconds stay what they are beside the compute model at the source.
    new_ms = 0.0 if here is None else here.reference_ms / info.time_scale(there)
    info = dataclasses.replace(info, carried_over=True, compute_reference_ms=new_ms)
    save_comms_bundle(folder, network, info, carried_over_card(info))
    return info


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
        help=f"sets to measure (default: {_NUM_SAMPLES}); more where too few of them "
        "are of held-out tables to judge by",
    )
    measuring.add_argument(
        "--device", help="cpu or cuda[:N] (default: the GPU where there is one)"
    )
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
    collectives = parser.add_argument_group(
        "collectives", "Without any of these the new bundle holds none."
    )
    collectives.add_argument(
        "--ranks",
        type=int,
        help="measure them among so many processes of this machine: over gloo on "
        "CPUs, over NCCL on as many GPUs",
    )
    collectives.add_argument(
        "--comms-samples", type=int, default=300, help="with --ranks: how many"
    )
    collectives.add_argument(
        "--comms-time-limit",
        type=float,
        default=180.0,
        help="with --ranks: stop after so many seconds",
    )
    collectives.add_argument(
        "--keep-collectives",
        action="store_true",
        help="take over those of the bundle started from, although they were measured "
        "on another machine",
    )


_MEASURING = ("num_samples", "device", "time_limit", "cpu", "max_gib", "tables")


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
                min_split=MIN_SETS,
            ),
            console,
        )
    return path


def _check_collectives(args: argparse.Namespace, source: Path) -> None:
    """Refuse, before anything is measured, what would fail after it."""
    if args.ranks is not None and args.keep_collectives:
        raise ConfigError(
            "--ranks measures collectives, --keep-collectives takes those of "
            f"{source}; leave one out"
        )
    if args.keep_collectives and not COMMS_BUNDLE.is_in(source):
        raise ConfigError(
            f"--keep-collectives: {source} holds no collectives; measure them with "
            "--ranks"
        )
    if args.ranks is None:
        return
    if args.ranks < 2:
        raise ConfigError(f"--ranks must be at least 2, got {args.ranks}")
    kind = _device_type(args)
    num_gpus = accelerator(kind).device_count() if is_accelerator(kind) else args.ranks
    if num_gpus < args.ranks:
        raise ConfigError(
            f"--ranks {args.ranks} on GPUs needs as many, this machine has {num_gpus}; "
            "lower it, leave it out, or calibrate for CPUs with --device cpu"
        )


def _device_type(args: argparse.Namespace) -> str:
    return as_device(args.device or default_device_type()).type


def _measure_collectives(args: argparse.Namespace) -> Path:
    """Run `neuroshard collect comms` in processes of its own."""
    path: Path = args.out / COMMS_NAME
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(args.ranks), "-m", "torchrec_neuroshard"]
    command += ["collect", "comms", "--out", str(path), "--seed", str(args.seed)]
    command += ["--backend", backend_of(_device_type(args))]
    command += ["--num-samples", str(args.comms_samples)]
    command += ["--time-limit", str(args.comms_time_limit)]
    if args.ranks > 3:
        command += ["--group-sizes", str(args.ranks // 2)]
    # One core per rank, as in training.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    code = subprocess.run(command, env=environment, check=False).returncode
    if code:
        raise RankFailureError(
            f"measuring collectives among {args.ranks} ranks ended with code {code}, "
            "see above; kernels are calibrated, and the same command goes on"
        )
    return path


def _add_collectives(args: argparse.Namespace, source: Path, console: Console) -> None:
    """Complete the new bundle by what was asked for, or say that it has none."""
    if args.ranks is not None:
        records = _measure_collectives(args)
        name = args.name or args.out.name
        train_comms_bundle(
            [records],
            args.out,
            name,
            CommsTrainConfig(seed=args.seed),
            before=source,
            console=console,
        )
    elif args.keep_collectives:
        info = carry_over(source, args.out)
        console.print(
            f"collectives are those of `{info.name}`, measured on "
            f"{info.fingerprint.device} over {info.backend}: not on this machine",
            soft_wrap=True,
        )
    elif COMMS_BUNDLE.is_in(args.out):
        console.print(f"{args.out} keeps the collectives that it held")
    else:
        console.print(
            "no collectives: they will be predicted from the topology's bandwidths. "
            "--ranks measures them",
            soft_wrap=True,
        )


def run(args: argparse.Namespace) -> int:
    """Run `neuroshard calibrate`."""
    given = [n for n in _MEASURING if getattr(args, n) is not None]
    if args.records and given:
        options = ", ".join("--" + n.replace("_", "-") for n in given)
        raise ConfigError(
            f"--records takes measurements that exist, {options} say how to make new "
            "ones; leave one or the other out"
        )
    if args.num_samples is not None and args.num_samples < 2 * MIN_SETS:
        raise ConfigError(
            f"--num-samples {args.num_samples} is too few: calibrating needs "
            f"{MIN_SETS} sets to fine-tune on and {MIN_SETS} of held-out tables to "
            f"judge by; give {2 * MIN_SETS} or more"
        )
    check_folder(args.out)
    console = Console()
    source = source_folder(args.source)
    _check_collectives(args, source)
    config = from_options(CalibrationConfig, args)
    with phase("measuring"):
        records = args.records or [_measure(args, console)]
    with phase("calibrating"), RateProgress(console, "epochs") as progress:

        def report(name: str, epochs: int) -> EpochReport:
            advance = progress.add_bar(name, epochs)
            return lambda epoch, loss, mape, tau: advance()

        found, evaluations = calibrate_bundle(
            source, records, args.out, args.name or args.out.name, config, report
        )
    for line in (*(e.line() for e in evaluations), found.verdict()):
        console.print(line, soft_wrap=True)
    console.print(f"wrote {args.out}")
    _add_collectives(args, source, console)
    return 0
