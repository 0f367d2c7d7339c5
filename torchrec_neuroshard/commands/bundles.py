"""`neuroshard train`, `calibrate` and `cache`: make and keep cost models."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from torchrec_neuroshard.bundles import cache
from torchrec_neuroshard.bundles.choice import Choice, poor_fit
from torchrec_neuroshard.bundles.fit import Candidate
from torchrec_neuroshard.bundles.folders import source_folder
from torchrec_neuroshard.bundles.format import Bundle
from torchrec_neuroshard.bundles.make import (
    make_bundle,
    make_comms_bundle,
)
from torchrec_neuroshard.bundles.set_data import MIN_SETS
from torchrec_neuroshard.bundles.settings import TrainConfig
from torchrec_neuroshard.commands.options import (
    add_bundle,
    add_measuring,
    one_of,
    option,
    whole,
)
from torchrec_neuroshard.errors import ConfigError
from torchrec_neuroshard.files import check_folder, from_options
from torchrec_neuroshard.measure.store import record_kind

RECORDS_NAME = "calibration.jsonl"
"""File of measured sets in the bundle's folder. The same command continues it."""
_NUM_SETS, _FEWEST_SETS = 300, 5 * MIN_SETS
_NUM_PLANS = 3
"""Plans of 4 to 8 ranks that check a calibration."""


def add_train(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `neuroshard train`."""
    known = TrainConfig()
    text = "files from 'neuroshard collect'"
    parser.add_argument("records", type=Path, nargs="+", help=text)
    add_bundle(parser)
    text = "passes over the records of kernels"
    option(parser, "--epochs", whole(), text, known.epochs, metavar="N")
    text, members = "nets in the ensemble", known.num_members
    option(parser, "--members", whole(), text, members, dest="num_members", metavar="N")
    text = "files of another device of this kind to learn from too; repeat per device"
    parser.add_argument(
        "--others", type=Path, nargs="+", action="append", default=[], help=text
    )
    text = "world sizes of 'collect comms' to hold out as the test set"
    option(parser, "--test-world-sizes", whole(), text, nargs="+", metavar="N")


def run_train(args: argparse.Namespace) -> int:
    """Train on records of kernels or of collectives, and write a bundle."""
    check_folder(args.out)
    files, out = args.records, args.out
    if record_kind(files[0]) == "comms":
        sizes = args.test_world_sizes or ()
        comms = make_comms_bundle(files, out, out.name, test_world_sizes=sizes)
        evaluations = comms.best.evaluations
        lines = [e.line() for e in evaluations if e.collective == "all"]
        _tell(comms, lines, "collectives", out)
    else:
        config = from_options(TrainConfig, args)
        fitted = make_bundle(files, out, out.name, config, others=args.others)
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


def add_calibrate(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `neuroshard calibrate`."""
    text = (
        "bundle to start from: a shipped one's name, or a folder (default: the shipped "
        "one of this device type that is nearest to the measured times)"
    )
    option(parser, "--from", str, text, dest="source", metavar="BUNDLE")
    add_bundle(parser)
    known = TrainConfig().tuning_steps
    text = "training steps"
    option(parser, "--steps", whole(), text, known, dest="tuning_steps", metavar="N")
    text = "use these files from 'neuroshard collect compute'; measure nothing"
    option(parser, "--records", Path, text, nargs="+", metavar="FILE")
    add_measuring(parser.add_argument_group("without --records"), _NUM_SETS)


def run_calibrate(args: argparse.Namespace) -> int:
    """Fit a bundle to this machine's kernels."""
    if args.num_sets < _FEWEST_SETS:
        raise ConfigError(
            f"--num-sets {args.num_sets} is too few: a fifth of the sets test the "
            f"model, and the test needs {MIN_SETS}; give {_FEWEST_SETS} or more"
        )
    check_folder(args.out)
    start: Bundle | Literal["nearest"] = "nearest"
    if args.source is not None:
        start = Bundle.at(source_folder(args.source))
    config = from_options(TrainConfig, args)
    records = args.records
    if not records:
        # Imported here: with --records, no fbgemm is needed.
        from torchrec_neuroshard.commands.measure import measure_kernels
        from torchrec_neuroshard.measure.clock import MOST_SET_SECONDS

        records = [args.out / RECORDS_NAME]
        measure_kernels(
            args, records[0], num_plans=_NUM_PLANS, set_seconds=MOST_SET_SECONDS
        )
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


def add_cache(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `neuroshard cache`."""
    text = "list (the default), or clear to delete all"
    action = one_of(("list", "clear"), "actions")
    parser.add_argument("action", nargs="?", default="list", type=action, help=text)


def run_cache(args: argparse.Namespace) -> int:
    """List or delete what first launches measured."""
    folder = cache.cache_folder()
    if args.action == "clear":
        print(f"deleted {cache.clear()} measurements from {folder}")
        return 0
    for entry in (entries := [*cache.entries(), *cache.rejections()]):
        key = entry.key
        result = f"cost_model='{entry.folder}'"
        if entry.reason:
            result = f"no bundle: {entry.reason}"
        print(
            f"{entry.folder.name}: {key.world_size} x {key.device} "
            f"({key.local_world_size} a node), {', '.join(key.optimizers)}, "
            f"{', '.join(key.data_types)}; torch {key.torch}, fbgemm {key.fbgemm}, "
            f"torchrec {key.torchrec}; {entry.created}, {entry.seconds:.0f} s; {result}"
        )
    if not entries:
        print(f"{folder} holds no measurements")
    return 0
