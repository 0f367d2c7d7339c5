"""Profile a model's input, print the profile and save it for the planner.

    python examples/profile_my_data.py --save profiles.json
    python examples/profile_my_data.py --load profiles.json --at-batch-size 65536

Replace `my_batches` by your own data. It can be anything that yields
KeyedJaggedTensors.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_neuroshard import FeatureProfile, NeuroShardError, profile_inputs
from torchrec_neuroshard.tables.inputs import draw_batch
from torchrec_neuroshard.tables.loaders import load_profiles, save_profiles
from torchrec_neuroshard.tables.mlperf import mlperf_dlrm_v2


def my_batches(
    num_batches: int, batch_size: int, max_rows: int
) -> Iterator[KeyedJaggedTensor]:
    """Yield the sparse input of some batches, here like that of MLPerf DLRM-v2."""
    tables = mlperf_dlrm_v2(max_rows=max_rows)
    for number in range(num_batches):
        drawn = draw_batch(tables, batch_size, number)
        yield KeyedJaggedTensor(
            keys=[t.name for t in tables],
            values=torch.cat([torch.as_tensor(drawn[t.name][0]) for t in tables]),
            lengths=torch.cat([torch.as_tensor(drawn[t.name][1]) for t in tables]),
        )


def profile_lines(profiles: Mapping[str, FeatureProfile]) -> list[str]:
    """Return the lines of a table, one per feature.

    Columns: `pooling` is ids per sample, `reuse` lookups per distinct id, `hot` the
    share of lookups of ids that occur more than 128 times.
    """
    lines = [
        f"{'feature':<12}{'samples':>9}{'pooling':>9}{'spread':>8}{'lookups':>12}"
        f"{'distinct':>11}{'reuse':>8}{'hot':>6}"
    ]
    for name, profile in profiles.items():
        distinct = profile.num_distinct
        mass = [
            ids * mean
            for ids, mean in zip(
                profile.access_histogram, profile.bin_mean_counts(), strict=True
            )
        ]
        hot = sum(mass[8:]) / max(sum(mass), 1.0)
        lines.append(
            f"{name:<12}{profile.batch_size:>9,}{profile.pooling_factor:>9.2f}"
            f"{profile.pooling_std:>8.2f}{profile.num_lookups:>12,.0f}{distinct:>11,.0f}"
            f"{profile.num_lookups / max(distinct, 1.0):>8.1f}{hot:>6.0%}"
        )
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Profile or load, save, print and return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--num-batches", type=int, default=8, help="batches to profile")
    parser.add_argument(
        "--batch-size", type=int, default=1024, help="samples per batch"
    )
    parser.add_argument(
        "--max-rows", type=int, default=1_000_000, help="most rows of a table"
    )
    parser.add_argument("--save", help="write the profiles to this JSON file")
    parser.add_argument("--load", help="read profiles from this file, do not profile")
    parser.add_argument(
        "--at-batch-size", type=int, help="show the profile for this many samples"
    )
    options = parser.parse_args(arguments)
    logging.getLogger("torch.fx").setLevel(logging.ERROR)
    try:
        if options.load:
            profiles = load_profiles(options.load)
        else:
            profiles = profile_inputs(
                my_batches(options.num_batches, options.batch_size, options.max_rows)
            )
        if options.save:
            save_profiles(profiles, options.save)
        if options.at_batch_size:
            profiles = {
                name: profile.at_batch_size(options.at_batch_size)
                for name, profile in profiles.items()
            }
    except (NeuroShardError, OSError) as error:
        print(f"profile_my_data: {error}", file=sys.stderr)
        return 2
    print("\n".join(profile_lines(profiles)))
    print("\nTo plan with your own input:\n")
    print(
        "    profiles = profile_inputs(batch.sparse_features for batch in my_batches)"
    )
    print("    planner = NeuroShardPlanner(..., profiles=profiles)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
