"""`neuroshard train`, `calibrate` and `cache`: make and keep cost models."""

from __future__ import annotations

import argparse
from pathlib import Path

from torchrec_neuroshard.bundles import cache
from torchrec_neuroshard.bundles.folders import source_folder
from torchrec_neuroshard.bundles.set_data import MIN_SETS
from torchrec_neuroshard.bundles.settings import TrainConfig
from torchrec_neuroshard.commands.options import (
    add_bundle,
    add_measuring,
    examples,
    loading,
    one_of,
    option,
    whole,
)
from torchrec_neuroshard.errors import ConfigError
from torchrec_neuroshard.files import check_folder
from torchrec_neuroshard.measure.store import record_kind

_NUM_SETS, _FEWEST_SETS = 300, 5 * MIN_SETS


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
    examples(parser, "train comms.jsonl --out my_node")


def run_train(args: argparse.Namespace) -> int:
    """Train on records of kernels or of collectives, and write a bundle.

    Raises:
        NeuroShardError: A file of records, or the folder, cannot be used.
    """
    check_folder(args.out)
    kind, *_ = [record_kind(file) for file in args.records]
    for file in (file for files in args.others for file in files):
        record_kind(file)
    with loading():
        from torchrec_neuroshard.commands import bundles_run
    if kind == "comms":
        return bundles_run.train_collectives(args)
    return bundles_run.train_kernels(args)


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
    examples(parser, "calibrate --out my_node --num-sets 100 --seconds 240")


def run_calibrate(args: argparse.Namespace) -> int:
    """Fit a bundle to this machine's kernels.

    Raises:
        NeuroShardError: An option, or a file that it names, cannot be used.
    """
    if args.num_sets < _FEWEST_SETS:
        raise ConfigError(
            f"--num-sets {args.num_sets} is too few: a fifth of the sets test the "
            f"model, and the test needs {MIN_SETS}; give {_FEWEST_SETS} or more"
        )
    check_folder(args.out)
    start = None if args.source is None else source_folder(args.source)
    for file in args.records or ():
        record_kind(file)
    with loading():
        from torchrec_neuroshard.commands.bundles_run import calibrate
    return calibrate(args, start)


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
