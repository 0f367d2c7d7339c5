"""Find out in a minute whether a device can be measured, and how fast that will go.

    python benchmarks/gpu/smoke.py --out smoke.json

Times a copy in the device's memory and a few sets of every optimizer and weight type,
with the collector's own timer; says what a sample takes apart from its passes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from torchrec_neuroshard.collect.compute import default_sampling
from torchrec_neuroshard.collect.fingerprint import device_fingerprint
from torchrec_neuroshard.collect.sampling import SamplingConfig, sample_set
from torchrec_neuroshard.collect.timing import SetTimer

_COPY_BYTES = {"cuda": 2**32, "cpu": 2**26}


def copy_gb_per_s(device: torch.device) -> float:
    """Bytes read and written by a large copy in the device's memory."""
    count = _COPY_BYTES[device.type] // 4
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
    """What the driver says of a GPU."""
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


def try_sets(
    device: torch.device, max_gib: float | None, num_sets: int
) -> dict[str, Any]:
    """Time sets of each kind; a kind that fails is told and does not end the others."""
    defaults = default_sampling(device)
    limit = defaults.max_weight_bytes
    if max_gib is not None:
        limit = min(int(max_gib * 2**30), limit)
    timer = SetTimer(device, limit)
    results: dict[str, Any] = {}
    for optimizer in defaults.optimizers:
        for data_type, share in (("fp32", 0.0), ("fp16", 1.0)):
            if (optimizer, data_type) == ("adam", "fp16"):
                continue  # of which no sets are drawn
            config = dataclasses.replace(
                defaults,
                optimizers=(optimizer,),
                fp16_share=share,
                max_weight_bytes=limit,
            )
            kind = f"{optimizer} {data_type}"
            try:
                results[kind] = _one_kind(timer, config, num_sets)
            except Exception as error:
                results[kind] = {"error": f"{type(error).__name__}: {error}"[:500]}
            print(kind, results[kind], flush=True)
    results["flushes"] = getattr(timer._clock, "repeats", None)
    return results


def _one_kind(
    timer: SetTimer, config: SamplingConfig, num_sets: int
) -> dict[str, float]:
    draw, whole, passes, spread = [], [], [], []
    for index in range(num_sets):
        start = time.perf_counter()
        sampled = sample_set(index, 0, config, [])
        drawn = time.perf_counter()
        found = timer.measure(
            sampled.tables, sampled.access, sampled.batch_size, (0, index)
        )
        end = time.perf_counter()
        total = [f + b for f, b in zip(found.fwd_raw_ms, found.bwd_raw_ms, strict=True)]
        middle = statistics.median(total)
        draw.append(drawn - start)
        whole.append(end - drawn)
        passes.append(sum(total) / 1e3)
        spread.append(statistics.median(abs(t - middle) for t in total) / middle)
    return {
        "draw_seconds": statistics.mean(draw),
        "sample_seconds": statistics.mean(whole),
        "of_which_passes": statistics.mean(passes),
        "spread": statistics.median(spread),
    }


def main() -> int:
    """Run and write; 1 where a kind failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--max-gib", type=float, help="of a set; default: the card's")
    parser.add_argument("--num-sets", type=int, default=6, help="of each kind")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    device = torch.device(args.device)
    if device.type == "cpu":
        torch.set_num_threads(1)
    data: dict[str, Any] = {
        "hardware": dataclasses.asdict(device_fingerprint(device, 1)),
        "properties": properties(device),
        "copy_gb_per_s": copy_gb_per_s(device),
    }
    print(json.dumps(data, indent=1), flush=True)
    data["kinds"] = try_sets(device, args.max_gib, args.num_sets)
    kinds = [k for k in data["kinds"].values() if isinstance(k, dict)]
    seconds = [
        k["draw_seconds"] + k["sample_seconds"] for k in kinds if "error" not in k
    ]
    if seconds:
        data["sets_in_20_minutes"] = round(1200 / statistics.mean(seconds))
        print(f"about {data['sets_in_20_minutes']:,} sets in 20 minutes")
    args.out.write_text(json.dumps(data, indent=1) + "\n")
    return int(len(seconds) < len(kinds))


if __name__ == "__main__":
    sys.exit(main())
