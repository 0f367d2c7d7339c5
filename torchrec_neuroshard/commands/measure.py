"""`neuroshard collect`: measure this machine's kernels and collectives."""

from __future__ import annotations

import argparse
import dataclasses
import os
from pathlib import Path
from typing import Any

from torchrec_neuroshard.bundles.find import physical_estimate
from torchrec_neuroshard.commands.options import (
    add_measuring,
    add_time_budget,
    number,
    one_of,
    option,
    whole,
)
from torchrec_neuroshard.errors import NeuroShardError, RankFailureError
from torchrec_neuroshard.files import from_options
from torchrec_neuroshard.hardware.device_types import BACKENDS
from torchrec_neuroshard.hardware.devices import (
    as_device,
    default_device_type,
    device_bytes,
)
from torchrec_neuroshard.measure.run import collect_compute
from torchrec_neuroshard.measure.run_collectives import collect_comms, default_backend
from torchrec_neuroshard.measure.sets import SamplingConfig
from torchrec_neuroshard.measure.settings import CollectConfig, CommsConfig
from torchrec_neuroshard.progress import phase


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


def run_collect(args: argparse.Namespace) -> int:
    """Measure; only rank 0 prints an error that all ranks have."""
    if args.kind == "compute":
        measure_kernels(args, args.out)
        return 0
    config = from_options(
        CommsConfig,
        args,
        backend=args.backend or default_backend(),
        bytes_per_rank=(1024, args.max_bytes),
    )
    try:
        with phase("measuring"):
            collect_comms(config)
    except NeuroShardError as error:
        if isinstance(error, RankFailureError) or os.environ.get("RANK", "0") == "0":
            raise
        return 2
    return 0


def measure_kernels(args: argparse.Namespace, out: Path, **settings: Any) -> None:
    """Measure sets of tables into a file, by the options of `add_measuring`.

    Args:
        args: Parsed options.
        out: The file.
        settings: Further settings of `CollectConfig`.
    """
    device = args.device or default_device_type()
    names = ("max_shards", "max_lookups", "batch_sizes", "plan_share", "sequence_share")
    changes: dict[str, Any] = {
        name: value
        for name in names
        if (value := getattr(args, name, None)) is not None
    }
    if args.max_gib is not None:
        changes["max_weight_bytes"] = int(args.max_gib * 2**30)
    if "batch_sizes" in changes:
        # The option holds for plans, too.
        changes["batch_sizes"] = tuple(changes["batch_sizes"])
        changes["max_plan_batch"] = None
    with phase("measuring"):
        collect_compute(
            from_options(
                CollectConfig,
                args,
                out=out,
                device=device,
                **settings,
                sampling=dataclasses.replace(
                    SamplingConfig.for_memory(device_bytes(as_device(device))),
                    **changes,
                ),
            ),
            physical_estimate(as_device(device).type),
        )
