"""`neuroshard profile`: profile the features in files of ids."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from torchrec_neuroshard.commands.options import examples, option, tell_written, whole
from torchrec_neuroshard.errors import ProfileError
from torchrec_neuroshard.files import check_outputs
from torchrec_neuroshard.progress import phase
from torchrec_neuroshard.tables.hot_rows import hot_id_text
from torchrec_neuroshard.tables.loaders import save_profiles
from torchrec_neuroshard.tables.profile import FeatureProfile

_MOST_SAMPLES = 10**9
_RANKS = 8
"""Ranks of the example that tells what a frequent id costs."""


def add_profile(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `neuroshard profile`."""
    parser.add_argument(
        "data",
        type=Path,
        help="file or folder of Parquet, Feather or CSV; a column of integers is a "
        "feature with one id per sample, a column of lists of integers has a bag per "
        "sample",
    )
    text = "JSON file to write"
    option(parser, "--out", Path, text, required=True, metavar="FILE")
    text = "columns (default: all with ids)"
    option(parser, "--features", str, text, nargs="+", metavar="NAME")
    text = "rows to read; best are the samples of one iteration over all ranks"
    option(parser, "--samples", whole(1, _MOST_SAMPLES), text, 65_536, metavar="N")
    examples(parser, "profile day_0.parquet --out profiles.json --samples 65536")


def _hot_ids(profiles: Mapping[str, FeatureProfile]) -> str:
    """Return which ids have a large share of the lookups, and what the first costs."""
    found = {
        name: top
        for name, profile in profiles.items()
        if profile.hot_rows and (top := profile.hot_rows.hot_id())
    }
    if not found:
        return ""
    first = max(found, key=lambda name: found[name][1] * profiles[name].pooling_factor)
    share, profile = found[first][1], profiles[first]
    told = [hot_id_text(name, top) for name, top in found.items() if name != first]
    also = f"Also, {', '.join(told)}. " if told else ""
    left = profile.pooling_factor * (1 - share)
    busiest = share * _RANKS + 1 - share
    return (
        f"{hot_id_text(first, found[first])}: padding? Without it, samples have "
        f"{left:,.2f} ids instead of {profile.pooling_factor:,.2f}; sequences look up "
        "and exchange as many rows. "
        f"If its table is sharded row-wise over {_RANKS} ranks, one rank serves "
        f"{busiest:.1f} times its share. {also}Drop padding from the inputs, or shard "
        "such tables column- or table-wise"
    )


def run_profile(args: argparse.Namespace) -> int:
    """Profile the data, and print a line for each feature.

    Raises:
        ProfileError: The data cannot be profiled.
    """
    check_outputs(args.out, read=(args.data,))
    if not args.data.exists():
        raise ProfileError(f"there is no data at {args.data}")
    from torchrec_neuroshard.tables.id_files import profile_data

    profiles, skipped = profile_data(args.data, args.samples, args.features)
    with phase("writing"):
        save_profiles(profiles, args.out)
    width = max(len(name) for name in profiles)
    print(
        f"{'feature':<{width}} {'samples':>9} {'pooling':>9} {'95 %':>7} "
        f"{'longest':>7} {'distinct':>11} reuse"
    )
    for name, profile in profiles.items():
        distinct = profile.num_distinct
        _, p95, _, longest = profile.length_quantiles
        print(
            f"{name:<{width}} {profile.batch_size:>9,} {profile.pooling_factor:>9.2f} "
            f"{p95:>7,.0f} {longest:>7,.0f} "
            f"{distinct:>11,.0f} {profile.num_lookups / max(distinct, 1.0):>5.1f}"
        )
    if told := _hot_ids(profiles):
        print(told)
    if skipped and not args.features:
        print(f"not profiled: {', '.join(skipped)}")
    tell_written(args.out)
    return 0
