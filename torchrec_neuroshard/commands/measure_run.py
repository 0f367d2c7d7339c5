"""The work of `neuroshard collect`, once torch is loaded."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from torchrec_neuroshard.bundles.find import physical_estimate
from torchrec_neuroshard.files import from_options
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


def measure_collectives(args: argparse.Namespace) -> None:
    """Measure collectives into a file, by the options of `neuroshard collect comms`."""
    config = from_options(
        CommsConfig,
        args,
        backend=args.backend or default_backend(),
        bytes_per_rank=(1024, args.max_bytes),
    )
    with phase("measuring"):
        collect_comms(config)


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
