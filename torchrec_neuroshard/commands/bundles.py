"""`neuroshard train`, `calibrate` and `cache`: cost models made, and kept."""

from __future__ import annotations

import argparse
from pathlib import Path

from torchrec_neuroshard.bundles import cache
from torchrec_neuroshard.bundles.choice import Choice
from torchrec_neuroshard.bundles.fit import Candidate, TrainConfig
from torchrec_neuroshard.bundles.format import COMMS_BUNDLE
from torchrec_neuroshard.bundles.make import (
    make_bundle,
    source_folder,
    train_comms_bundle,
)
from torchrec_neuroshard.bundles.set_data import MIN_SETS
from torchrec_neuroshard.commands.options import add_bundle, add_measuring, option
from torchrec_neuroshard.errors import ConfigError
from torchrec_neuroshard.files import check_folder, from_options
from torchrec_neuroshard.measure.store import record_kind

RECORDS_NAME = "calibration.parquet"
"""Measured sets are kept under this name in the bundle's folder. The same command,
given again, goes on from them."""
_NUM_SETS, _FEWEST_SETS = 300, 5 * MIN_SETS


def add_train(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `neuroshard train`."""
    known = TrainConfig()
    text = "Parquet files of 'neuroshard collect'"
    parser.add_argument("records", type=Path, nargs="+", help=text)
    add_bundle(parser)
    option(parser, "--epochs", int, "passes over records of kernels", known.epochs)
    text, members = "nets whose mean predicts kernels", known.num_members
    option(parser, "--members", int, text, members, dest="num_members")
    text = "files of other devices of the kind, to learn from as well; once per device"
    parser.add_argument(
        "--others", type=Path, nargs="+", action="append", default=[], help=text
    )
    text = "numbers of ranks of 'collect comms' to test on and not to train on"
    option(parser, "--test-world-sizes", int, text, nargs="+")


def run_train(args: argparse.Namespace) -> int:
    """Train on records of kernels, or of collectives, and write a bundle."""
    check_folder(args.out)
    files, out = args.records, args.out
    if record_kind(files[0]) == "comms":
        sizes = args.test_world_sizes or ()
        train_comms_bundle(files, out, out.name, test_world_sizes=sizes)
    else:
        config = from_options(TrainConfig, args)
        _tell(make_bundle(files, out, out.name, config, others=args.others), out)
    return 0


def _tell(fitted: Choice[Candidate], out: Path) -> None:
    """Print the errors on held-out tables, and what was kept."""
    for candidate in fitted.candidates.values():
        print(candidate.evaluation.line())
    print(f"{fitted.verdict()}\nwrote {out}")


def add_calibrate(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `neuroshard calibrate`."""
    text = "bundle to start from: a shipped one's name or a folder"
    option(parser, "--from", str, text, "cpu", dest="source")
    add_bundle(parser)
    known = TrainConfig().tuning_steps
    option(parser, "--steps", int, "training steps", known, dest="tuning_steps")
    text = "files of 'neuroshard collect compute' to use instead of measuring"
    option(parser, "--records", Path, text, nargs="+")
    add_measuring(parser.add_argument_group("without --records"), _NUM_SETS)


def run_calibrate(args: argparse.Namespace) -> int:
    """Fit a bundle to this machine's kernels."""
    if args.num_sets < _FEWEST_SETS:
        raise ConfigError(
            f"--num-sets {args.num_sets} is too few: a fifth of the sets are of "
            f"held-out tables, and {MIN_SETS} of those have to judge; give "
            f"{_FEWEST_SETS} or more"
        )
    check_folder(args.out)
    source = source_folder(args.source)
    config = from_options(TrainConfig, args)
    records = args.records
    if not records:
        # Only here: with --records, calibrating does without fbgemm.
        from torchrec_neuroshard.commands.measure import measure_kernels

        records = [args.out / RECORDS_NAME]
        measure_kernels(args, records[0])
    _tell(make_bundle(records, args.out, args.out.name, config, start=source), args.out)
    if not COMMS_BUNDLE.is_in(args.out):
        print(
            "no collectives: they will be predicted from the topology's bandwidths. "
            "'neuroshard collect comms' and 'train' add them to the bundle"
        )
    return 0


def add_cache(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `neuroshard cache`."""
    text = "list all bundles, or delete them (list)"
    known = ("list", "clear")
    parser.add_argument("action", nargs="?", default="list", choices=known, help=text)


def run_cache(args: argparse.Namespace) -> int:
    """List or delete what first launches have measured."""
    folder = cache.cache_folder()
    if args.action == "clear":
        print(f"{cache.clear()} bundles deleted from {folder}")
        return 0
    for entry in (entries := cache.entries()):
        key = entry.key
        print(
            f"{entry.folder.name}: {key.world_size} x {key.device} "
            f"({key.local_world_size} a node), {', '.join(key.optimizers)}, "
            f"{', '.join(key.data_types)}; torch {key.torch}, fbgemm {key.fbgemm}, "
            f"torchrec {key.torchrec}; {entry.created}, {entry.seconds:.0f} s; "
            f"cost_model='{entry.folder}'"
        )
    if not entries:
        print(f"{folder} holds no bundles")
    return 0
