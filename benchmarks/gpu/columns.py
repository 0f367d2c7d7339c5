"""Check column shards of any width on a device, and time uneven ones.

    python benchmarks/gpu/columns.py --device cuda --out columns.json

Each case cuts tables by columns and looks up the parts in one fused kernel. The output
and, with SGD, the weights after three steps must equal those of whole tables. The case
is timed by the collector's timer, and so are the same columns cut evenly.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from torchrec_neuroshard.measure.clock import SetTimer
from torchrec_neuroshard.measure.kernels import (
    FusedTables,
    InputBatch,
    device_fingerprint,
    draw_inputs,
)
from torchrec_neuroshard.measure.sets import SampledSet
from torchrec_neuroshard.tables.access import AccessDistribution
from torchrec_neuroshard.tables.profile import zipf_profile
from torchrec_neuroshard.tables.table import TableConfig

CASES: dict[str, Sequence[tuple[int, ...]]] = {
    "whole": ((64,), (128,), (256,)),
    "halves": ((32, 32), (64, 64), (128, 128)),
    "uneven": ((48, 16), (100, 28), (12, 244)),
    "narrow": ((60, 4), (124, 4), (252, 4)),
    "four ways": ((4, 12, 20, 28), (8, 16, 40, 64), (4, 60, 64, 128)),
}
"""Widths of the parts of three tables."""
EVEN = {
    "uneven": "halves",
    "narrow": "halves",
    "four ways": "quarters",
}
CASES["quarters"] = ((16,) * 4, (32,) * 4, (64,) * 4)
STEPS, TOLERANCE = 3, 1e-5


def whole_tables(rows: int, batch_size: int, data_type: str) -> list[TableConfig]:
    """Return three tables, with one to many ids per sample."""
    return [
        TableConfig(
            name=f"t{i}",
            num_embeddings=rows,
            embedding_dim=sum(CASES["whole"][i]),
            pooling_factor=pooling,
            profile=zipf_profile(
                batch_size=batch_size, pooling_factor=pooling, num_embeddings=rows
            ),
            data_type=data_type,
            optimizer="sgd",
        )
        for i, pooling in enumerate((1.0, 5.0, 20.0))
    ]


def cut(
    tables: Sequence[TableConfig], widths: Sequence[Sequence[int]]
) -> list[TableConfig]:
    """Return the parts of all tables, one after another."""
    return [
        dataclasses.replace(t, name=f"{t.name}.{k}", embedding_dim=width)
        for t, parts in zip(tables, widths, strict=True)
        for k, width in enumerate(parts)
    ]


def repeat_inputs(
    batch: InputBatch, widths: Sequence[Sequence[int]], batch_size: int
) -> InputBatch:
    """Return the input in which every part gets the ids of its table."""
    lengths = batch.offsets.diff().view(len(widths), batch_size)
    ends = batch.offsets[::batch_size].tolist()
    parts = [
        (t, batch.indices_L[ends[t] : ends[t + 1]])
        for t, cuts in enumerate(widths)
        for _ in cuts
    ]
    offsets = torch.zeros(
        len(parts) * batch_size + 1, dtype=torch.int64, device=lengths.device
    )
    torch.cumsum(torch.cat([lengths[t] for t, _ in parts]), 0, out=offsets[1:])
    return InputBatch(torch.cat([ids for _, ids in parts]), offsets, None)


def largest_difference(
    tables: Sequence[TableConfig],
    widths: Sequence[Sequence[int]],
    batch_size: int,
    device: torch.device,
) -> tuple[float, float]:
    """Return differences of outputs and weights between parts and whole tables."""
    whole, parts = FusedTables(tables, device), FusedTables(cut(tables, widths), device)
    for weights, found in zip(
        whole.module.split_embedding_weights(), _by_table(parts, widths), strict=True
    ):
        weights.data.uniform_(-0.05, 0.05)
        for values, width, left in found:
            values.data.copy_(weights.data[:, left : left + width])
    access = [AccessDistribution.power_law(t.num_embeddings, 1.0) for t in tables]
    output_error = 0.0
    generator = torch.Generator(device=device).manual_seed(1)
    for step in range(STEPS):
        batch = draw_inputs(tables, access, batch_size, (7, step), device)
        one = whole.forward(batch)
        two = parts.forward(repeat_inputs(batch, widths, batch_size))
        with torch.no_grad():
            difference = float((one - two).abs().max() / one.abs().max())
        output_error = max(output_error, difference)
        # The gradient is large, since the collector's learning rate is small.
        grad = torch.empty_like(one).normal_(0, 1e3, generator=generator)
        torch.autograd.backward(one, grad)
        torch.autograd.backward(two, grad)
    weight_error = max(
        float((weights[:, left : left + width] - values).abs().max())
        for weights, found in zip(
            whole.module.split_embedding_weights(),
            _by_table(parts, widths),
            strict=True,
        )
        for values, width, left in found
    )
    return output_error, weight_error


def _by_table(
    kernel: FusedTables, widths: Sequence[Sequence[int]]
) -> list[list[tuple[torch.Tensor, int, int]]]:
    """Return values, width and first column of each part of each table."""
    values = iter(kernel.module.split_embedding_weights())
    return [
        [(next(values), width, sum(parts[:k])) for k, width in enumerate(parts)]
        for parts in widths
    ]


def milliseconds(
    timer: SetTimer, parts: Sequence[TableConfig], batch_size: int
) -> dict[str, float]:
    """Return forward and backward of one kernel with all parts."""
    access = [AccessDistribution.power_law(t.num_embeddings, 1.0) for t in parts]
    sampled = SampledSet(
        index=0,
        seed=(3,),
        batch_size=batch_size,
        tables=tuple(parts),
        access=tuple(access),
    )
    seeds = [(3, number) for number in range(3)]
    runs = [timer.measure(dataclasses.replace(sampled, seed=seed)) for seed in seeds]
    return {
        "fwd_ms": statistics.median(r.fwd_ms for r in runs),
        "bwd_ms": statistics.median(r.bwd_ms for r in runs),
    }


def main() -> int:
    """Run all cases and write; return 1 if a part differs from its table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--batch-size", type=int, default=65_536)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    device = torch.device(args.device)
    if device.type == "cpu":
        torch.set_num_threads(1)
    timer = SetTimer(device, 4 * args.rows * 448)
    data: dict[str, Any] = {
        "hardware": dataclasses.asdict(device_fingerprint(device, 1)),
        "options": {k: str(v) for k, v in vars(args).items()},
        "cases": {},
    }
    wrong = 0
    for data_type in ("fp32", "fp16"):
        tables = whole_tables(args.rows, args.batch_size, data_type)
        for name, widths in CASES.items():
            entry: dict[str, Any] = {"widths": [list(w) for w in widths]}
            if data_type == "fp32":  # fp16 is rounded at random
                output, weight = largest_difference(
                    tables, widths, args.batch_size, device
                )
                entry["output_difference"], entry["weight_difference"] = output, weight
                entry["equal"] = max(output, weight) <= TOLERANCE
                wrong += not entry["equal"]
            entry |= milliseconds(timer, cut(tables, widths), args.batch_size)
            data["cases"][f"{name}, {data_type}"] = entry
            print(f"{name}, {data_type}: {entry}", flush=True)
            args.out.write_text(json.dumps(data, indent=1) + "\n")
        for name, even in EVEN.items():
            entry, other = (data["cases"][f"{n}, {data_type}"] for n in (name, even))
            for phase in ("fwd_ms", "bwd_ms"):
                entry[f"{phase}_over_even"] = entry[phase] / other[phase]
    args.out.write_text(json.dumps(data, indent=1) + "\n")
    print("parts equal whole tables" if not wrong else f"{wrong} cases differ")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
