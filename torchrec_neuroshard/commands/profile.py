"""`neuroshard profile`: files of ids in, profiles of features out."""

from __future__ import annotations

import argparse
from pathlib import Path

from torchrec_neuroshard.commands.options import option
from torchrec_neuroshard.errors import ConfigError
from torchrec_neuroshard.files import check_outputs
from torchrec_neuroshard.progress import phase
from torchrec_neuroshard.tables.id_files import profile_data
from torchrec_neuroshard.tables.loaders import save_profiles

_MOST_SAMPLES = 10**9


def add_profile(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `neuroshard profile`."""
    parser.add_argument(
        "data",
        type=Path,
        help="Parquet, Feather or CSV, a file or a folder; a column of integers is a "
        "feature with an id per sample, one of lists of integers a bag",
    )
    option(parser, "--out", Path, "JSON to write", required=True)
    option(parser, "--features", str, "columns (all that hold ids)", nargs="+")
    text = "rows to read: best, the samples of an iteration of all ranks"
    option(parser, "--samples", int, text, 65_536)


def run_profile(args: argparse.Namespace) -> int:
    """Profile the data, and print a line for each feature.

    Raises:
        ConfigError: An option is outside what it may be.
        ProfileError: The data cannot be profiled.
    """
    if not 1 <= args.samples <= _MOST_SAMPLES:
        raise ConfigError(
            f"--samples must be 1 to {_MOST_SAMPLES:,}, got {args.samples}"
        )
    check_outputs(args.out, read=(args.data,))
    profiles, skipped = profile_data(args.data, args.samples, args.features)
    with phase("writing"):
        save_profiles(profiles, args.out)
    width = max(len(name) for name in profiles)
    print(f"{'feature':<{width}} {'samples':>9} {'pooling':>9} {'distinct':>11} reuse")
    for name, profile in profiles.items():
        distinct = profile.num_distinct
        print(
            f"{name:<{width}} {profile.batch_size:>9,} {profile.pooling_factor:>9.2f} "
            f"{distinct:>11,.0f} {profile.num_lookups / max(distinct, 1.0):>5.1f}"
        )
    if skipped and not args.features:
        print(f"not profiled: {', '.join(skipped)}")
    print(f"wrote {args.out}")
    return 0
