"""`neuroshard collect`: kernels and collectives of this machine, measured."""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from torchrec_neuroshard.bundles.find import physical_estimate
from torchrec_neuroshard.commands.options import add_measuring, add_time_limit, option
from torchrec_neuroshard.errors import NeuroShardError, RankFailureError
from torchrec_neuroshard.files import from_options
from torchrec_neuroshard.hardware.devices import (
    BACKENDS,
    as_device,
    default_device_type,
)
from torchrec_neuroshard.measure.run import CollectConfig, collect_compute
from torchrec_neuroshard.measure.run_collectives import (
    CommsConfig,
    collect_comms,
    default_backend,
)
from torchrec_neuroshard.measure.sets import SampledSet, SamplingConfig
from torchrec_neuroshard.progress import phase
from torchrec_neuroshard.tables.features import ShardFeaturizer


def add_collect(parser: argparse.ArgumentParser) -> None:
    """Declare the kinds of measurement, and the options of each."""
    kinds = parser.add_subparsers(dest="kind", required=True)
    text = "forward and backward of fused embedding kernels"
    _add_compute(kinds.add_parser("compute", help=text))
    text = "collectives between ranks; start it with torchrun"
    _add_comms(kinds.add_parser("comms", help=text))


def _add_compute(parser: argparse.ArgumentParser) -> None:
    option(parser, "--out", Path, "Parquet file", required=True)
    option(parser, "--seed", int, "of what is drawn", 0)
    add_measuring(parser, CollectConfig(out=Path()).num_sets)
    text = "JSON file of real tables to draw from (repeatable)"
    option(parser, "--tables", Path, text, [], action="append")
    option(parser, "--set-seconds", float, "seconds to repeat a set (0.6 on a CPU)")
    text = "Defaults are the device's: a GPU gets larger sets."
    ranges = parser.add_argument_group("what is drawn", text)
    option(ranges, "--max-shards", int, "shards of a set, at most")
    option(ranges, "--max-lookups", int, "ids of a set, at most")
    names = ("LOW", "HIGH")
    text = "samples, at least and at most"
    option(ranges, "--batch-sizes", int, text, nargs=2, metavar=names)


def _add_comms(parser: argparse.ArgumentParser) -> None:
    known = CommsConfig(out=Path())
    option(parser, "--out", Path, "Parquet file", required=True)
    option(parser, "--seed", int, "of what is drawn", 0)
    text, backends = "nccl where every rank has a GPU", list(BACKENDS.values())
    option(parser, "--backend", str, text, choices=backends)
    option(parser, "--num-samples", int, "collectives to measure", known.num_samples)
    most = known.bytes_per_rank[1]
    option(parser, "--max-bytes", int, "bytes of a rank, at most", most)
    add_time_limit(parser, known.time_limit_seconds)
    text = "seconds to repeat a collective"
    option(parser, "--sample-seconds", float, text, known.sample_seconds)
    text = "measure groups of the first so many ranks as well"
    option(parser, "--group-sizes", int, text, (), nargs="*")


def run_collect(args: argparse.Namespace) -> int:
    """Measure; of an error that all ranks have, rank 0 alone tells."""
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


def measure_kernels(args: argparse.Namespace, out: Path) -> None:
    """Measure sets of tables, as the options of `add_measuring` say, into a file."""
    device = args.device or default_device_type()
    changes: dict[str, Any] = {
        name: value
        for name in ("max_shards", "max_lookups", "batch_sizes")
        if (value := getattr(args, name, None)) is not None
    }
    if args.max_gib is not None:
        changes["max_weight_bytes"] = int(args.max_gib * 2**30)
    if "batch_sizes" in changes:
        changes["batch_sizes"] = tuple(changes["batch_sizes"])
    with phase("measuring"):
        collect_compute(
            from_options(
                CollectConfig,
                args,
                out=out,
                device=device,
                sampling=dataclasses.replace(
                    SamplingConfig.for_device(as_device(device)), **changes
                ),
            ),
            predict_ms=predicted_ms(as_device(device).type),
        )


def predicted_ms(device_type: str) -> Callable[[SampledSet], float]:
    """Return the physical estimate of what a set takes on this machine."""
    estimate = physical_estimate(device_type)

    def predict(sampled: SampledSet) -> float:
        count = len(sampled.tables)
        features = ShardFeaturizer(sampled.tables, sampled.batch_size).features(
            np.arange(count), np.array([t.embedding_dim for t in sampled.tables])
        )
        ids = np.zeros(count, dtype=np.int64)
        return float(estimate.predict_sets(features, ids, 1).sum())

    return predict
