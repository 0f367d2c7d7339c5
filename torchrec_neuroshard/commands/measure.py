"""`neuroshard collect`: measure this machine's kernels and collectives."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from torchrec_neuroshard.commands.options import (
    add_measuring,
    add_time_budget,
    examples,
    loading,
    number,
    one_of,
    option,
    whole,
)
from torchrec_neuroshard.errors import NeuroShardError, RankFailureError
from torchrec_neuroshard.files import check_folder
from torchrec_neuroshard.hardware.device_types import BACKENDS
from torchrec_neuroshard.measure.settings import CollectConfig, CommsConfig
from torchrec_neuroshard.tables.loaders import load_json


def add_collect(parser: argparse.ArgumentParser) -> None:
    """Declare both kinds of measurement, and their options."""
    kinds = parser.add_subparsers(dest="kind", required=True)
    text = "measure forward and backward of fused embedding kernels"
    _add_compute(kinds.add_parser("compute", help=text))
    text = "measure collectives between ranks; start it with torchrun"
    _add_comms(kinds.add_parser("comms", help=text))


def _add_compute(parser: argparse.ArgumentParser) -> None:
    text = "file of records to write"
    option(parser, "--out", Path, text, required=True, metavar="FILE")
    option(parser, "--seed", whole(0), "random seed", 0)
    add_measuring(parser, CollectConfig(out=Path()).num_sets)
    text = "JSON file of real tables to draw from; may be repeated"
    option(parser, "--tables", Path, text, [], action="append", metavar="FILE")
    text = "seconds to repeat a set (default: 0.6 on a CPU)"
    option(parser, "--set-seconds", number(zero=True), text, metavar="SECONDS")
    text = "share of sets that are one rank's tables of a plan (default: a third)"
    option(parser, "--plan-share", number(zero=True), text, metavar="SHARE")
    text = "share of sets of sequences, whose rows are not pooled (default: a tenth)"
    option(parser, "--sequence-share", number(zero=True), text, metavar="SHARE")
    text = "Defaults depend on the device: GPUs get larger sets."
    ranges = parser.add_argument_group("sizes of the sets", text)
    option(ranges, "--max-shards", whole(), "most shards in a set", metavar="N")
    option(ranges, "--max-lookups", whole(), "most ids in a set", metavar="N")
    names = ("LOW", "HIGH")
    text = "fewest and most samples"
    option(ranges, "--batch-sizes", whole(), text, nargs=2, metavar=names)
    examples(parser, "collect compute --out kernels.jsonl --num-sets 300")


def _add_comms(parser: argparse.ArgumentParser) -> None:
    known = CommsConfig(out=Path())
    text = "file of records to write"
    option(parser, "--out", Path, text, required=True, metavar="FILE")
    option(parser, "--seed", whole(0), "random seed", 0)
    backends = list(BACKENDS.values())
    text = f"{' or '.join(backends)} (default: nccl where every rank has a GPU)"
    option(parser, "--backend", one_of(backends, "backends"), text, metavar="NAME")
    text, samples = "collectives to measure", known.num_samples
    option(parser, "--num-samples", whole(), text, samples, metavar="N")
    text, most = "most bytes that a rank sends", known.bytes_per_rank[1]
    option(parser, "--max-bytes", whole(), text, most, metavar="N")
    add_time_budget(parser, known.time_budget_seconds)
    text, seconds = "seconds to repeat a collective", known.sample_seconds
    option(
        parser, "--sample-seconds", number(zero=True), text, seconds, metavar="SECONDS"
    )
    text = "also measure groups of the first N ranks"
    option(parser, "--group-sizes", whole(), text, (), nargs="*", metavar="N")
    parser.epilog = (
        "examples:\n  torchrun --nproc-per-node 8 -m torchrec_neuroshard collect comms "
        "--out comms.jsonl"
    )


def run_collect(args: argparse.Namespace) -> int:
    """Measure; only rank 0 prints an error that all ranks have."""
    try:
        check_folder(args.out.parent)
        for file in getattr(args, "tables", ()):
            load_json(file)
        with loading():
            from torchrec_neuroshard.commands import measure_run
        if args.kind == "compute":
            measure_run.measure_kernels(args, args.out)
        else:
            measure_run.measure_collectives(args)
    except NeuroShardError as error:
        if isinstance(error, RankFailureError) or os.environ.get("RANK", "0") == "0":
            raise
        return 2
    return 0
