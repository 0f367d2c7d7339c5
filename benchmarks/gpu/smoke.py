"""Check in a minute whether a device can be measured, and how fast.

    python benchmarks/gpu/smoke.py --out smoke.json

It times a copy in the device's memory, and some sets of every optimizer and weight
type. The file is written after each measurement.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from torchrec_neuroshard.measure.clock import DeviceClock, SetTimer
from torchrec_neuroshard.measure.kernels import device_fingerprint
from torchrec_neuroshard.measure.sets import SamplingConfig, SetSampler

COPY_BYTES = {"cuda": 2**32, "cpu": 2**26}


def copy_gb_per_s(device: torch.device) -> float:
    """Return the memory bandwidth of a large copy, reads and writes [GB/s]."""
    count = COPY_BYTES[device.type] // 4
    source = torch.zeros(count, device=device)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(12):
        start = time.perf_counter()
        target.copy_(source)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return 2 * 4 * count / statistics.median(seconds[2:]) / 1e9


def properties(device: torch.device) -> dict[str, Any]:
    """Return the driver's data of a GPU; empty for a CPU."""
    if device.type != "cuda":
        return {}
    found = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    return {
        "l2_bytes": found.L2_cache_size,
        "multiprocessors": found.multi_processor_count,
        "free_gib": free / 2**30,
        "total_gib": total / 2**30,
    }


def kinds_of(sampling: SamplingConfig) -> Iterator[tuple[str, SamplingConfig]]:
    """Yield each combination of optimizer and weight type of measured sets."""
    for optimizer in sampling.optimizers:
        for data_type, share in (("fp32", 0.0), ("fp16", 1.0)):
            if (optimizer, data_type) != ("adam", "fp16"):
                yield (
                    f"{optimizer} {data_type}",
                    dataclasses.replace(
                        sampling, optimizers=(optimizer,), fp16_share=share
                    ),
                )


def time_sets(
    timer: SetTimer, sampling: SamplingConfig, num_sets: int
) -> dict[str, Any]:
    """Return a set's times, passes and their spread, or the error."""
    draw, whole, passes, spread = [], [], [], []
    try:
        for index in range(num_sets):
            start = time.perf_counter()
            drawn = SetSampler(sampling, 0, []).sample(index)
            draw.append(time.perf_counter() - start)
            found = timer.measure(drawn)
            whole.append(time.perf_counter() - start)
            passes.append((sum(found.fwd_raw_ms) + sum(found.bwd_raw_ms)) / 1e3)
            spread.append(found.spread)
    except Exception as error:  # one kind's fault must not hide the others
        return {"error": f"{type(error).__name__}: {error}"[:500]}
    return {
        "set_seconds": statistics.mean(whole),
        "of_which_draw": statistics.mean(draw),
        "of_which_passes": statistics.mean(passes),
        "spread": statistics.median(spread),
    }


def main() -> int:
    """Measure and write; return 1 if a kind of sets failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--max-gib", type=float, help="size of a set (default: the card's)"
    )
    parser.add_argument("--num-sets", type=int, default=6, help="sets of each kind")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    device = torch.device(args.device)
    if device.type == "cpu":
        torch.set_num_threads(1)
    data: dict[str, Any] = {}

    def tell(found: dict[str, Any], of: dict[str, Any] = data) -> None:
        of.update(found)
        print(json.dumps(found), flush=True)
        args.out.write_text(json.dumps(data, indent=1) + "\n")

    tell({"hardware": dataclasses.asdict(device_fingerprint(device, 1))})
    tell({"properties": properties(device), "copy_gb_per_s": copy_gb_per_s(device)})
    sampling = SamplingConfig.for_device(device)
    if args.max_gib is not None:
        limit = min(int(args.max_gib * 2**30), sampling.max_weight_bytes)
        sampling = dataclasses.replace(sampling, max_weight_bytes=limit)
    timer = SetTimer(device, sampling.max_weight_bytes)
    kinds: dict[str, dict[str, Any]] = data.setdefault("kinds", {})
    for kind, config in kinds_of(sampling):
        tell({kind: time_sets(timer, config, args.num_sets)}, kinds)
    worked = [k["set_seconds"] for k in kinds.values() if "error" not in k]
    if worked:
        tell({"sets_in_20_minutes": round(1200 / statistics.mean(worked))})
    clock = timer.clock
    tell({"flushes": clock.repeats if isinstance(clock, DeviceClock) else None})
    return int(len(worked) < len(kinds))


if __name__ == "__main__":
    sys.exit(main())
