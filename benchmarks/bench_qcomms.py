"""Hold the predicted cost of quantised collectives to measured ones.

First what codecs take: on one rank each codes and decodes values in turn with fused
kernels that read rows and next to nothing: in their bytes and launches counts
`planner/costs/kernels.py`. Then TorchRec's exchanges of pooled outputs themselves run
over all ranks, one codec after the other in every pass, so that a machine whose speed
drifts slows all alike, and what counts is how much longer than without codec they take,
predicted and measured. Times are those of the machine as fast as it was when the
bundle was measured, by the reference set that is read beside them.

    torchrun --nproc-per-node 2 benchmarks/bench_qcomms.py --cost-model cpu_epyc_zen5 \
        --out benchmarks/results/qcomms_gloo2_202611

writes `<out>.json` (raw) and `<out>.md`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import math
import os
import shlex
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed.dist_data import (
    PooledEmbeddingsAllToAll,
    PooledEmbeddingsReduceScatter,
)
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fbgemm_qcomm_codec import (
    CommType,
    QCommsConfig,
    get_qcomm_codecs,
    get_qcomm_codecs_registry,
)
from torchrec.distributed.planner import ParameterConstraints, Topology

from harness.provenance import commit, now
from harness.ranks import Ranks, SpeedReference, machine_speeds
from torchrec_neuroshard.collect.tbe import FusedTables, InputBatch
from torchrec_neuroshard.devices import cpu_name
from torchrec_neuroshard.planner import NeuroShardEnumerator, PlanCosts
from torchrec_neuroshard.tables import TableConfig

PLAIN = "fp32"
CODECS = ("fp16", "bf16", "int8")
CODED = (*CODECS, "mx4")
"""Codecs of which the kernels are measured; CPUs have one for MX4 in Python alone."""
SUMMED = ("fp16", "bf16")
"""Codecs that a reduce-scatter can add up."""
WAYS = ("forward", "backward")
COLUMNS, SAMPLES = (32, 128, 512), (256, 2_048)
"""Output columns of a rank; samples of a rank."""
VALUES = (2**14, 2**18, 2**22)
SUMMED_VALUES = (2**20, 2**22)
"""Coded ones of a rank; floats are half as many."""
WARM_UP, PASSES = 3, 60
EVERY = 10
"""Passes from one reading of the reference set to the next."""
PROBE_ROWS, PROBE_WIDTH, PROBE_SAMPLES, PROBE_IDS = 1_000_000, 128, 8_192, 8
"""The kernel that the time of a byte is read off, as `ShardEncoder.byte_ms` has it."""

Case = tuple[str, int, int]
"""Sharding type, columns, samples."""


def config_of(codec: str) -> QCommsConfig:
    kind = CommType(codec)
    return QCommsConfig(forward_precision=kind, backward_precision=kind)


def lookups(rows: int, width: int, samples: int, ids: int) -> Callable[[], object]:
    """The forward pass of a fused kernel."""
    table = TableConfig(name="probe", num_embeddings=rows, embedding_dim=width)
    fused = FusedTables([table], torch.device("cpu"))
    batch = InputBatch(
        torch.randint(0, rows, (samples * ids,)),
        torch.arange(samples + 1) * ids,
        None,
    )
    return lambda: fused.forward(batch)


def measure_kernels() -> list[dict[str, Any]]:
    """What codecs take, and a kernel that reads rows and a smallest one beside them.

    It is the thread's own time: others on the machine do not add to it.
    """
    launch = lookups(1, 4, 1, 1)
    read_rows = lookups(PROBE_ROWS, PROBE_WIDTH, PROBE_SAMPLES, PROBE_IDS)
    row_bytes = PROBE_WIDTH * 4
    num_bytes = PROBE_SAMPLES * (PROBE_IDS * (8 + row_bytes) + row_bytes)
    found = []
    for name, num_values in itertools.product(CODED, VALUES):
        codec = get_qcomm_codecs(config_of(name)).forward
        values, context = torch.randn(num_values), codec.create_context()
        coded = codec.encode(values, context)
        actions: dict[str, Callable[[], object]] = {
            "launch_ms": launch,
            "read_ms": read_rows,
            "encode_ms": partial(codec.encode, values, context),
            "decode_ms": partial(codec.decode, coded, context),
        }
        raw: dict[str, list[float]] = {action: [] for action in actions}
        for number in range(WARM_UP + PASSES):
            for action, act in actions.items():
                start = time.thread_time()
                act()
                if number >= WARM_UP:
                    raw[action].append((time.thread_time() - start) * 1e3)
        medians = {action: statistics.median(ms) for action, ms in raw.items()}
        byte_ms = (medians["read_ms"] - medians["launch_ms"]) / num_bytes
        found.append(
            {"codec": name, "values": num_values, "byte_ms": byte_ms, **medians}
        )
        print(found[-1], flush=True)
    return found


def measure_sums() -> list[dict[str, Any]]:
    """What adding up takes: the rank's processor time of as many bytes of each type."""
    found = []
    for values in SUMMED_VALUES:
        inputs = {PLAIN: torch.ones(dist.get_world_size(), values // 4)}
        for codec in SUMMED:
            dtype = get_qcomm_codecs(config_of(codec)).forward.quantized_dtype
            inputs[codec] = torch.ones(dist.get_world_size(), values // 2, dtype=dtype)
        raw: dict[str, list[float]] = {codec: [] for codec in inputs}
        for number in range(WARM_UP + PASSES):
            for codec, sent in inputs.items():
                output = sent.new_empty((1, sent.shape[1]))
                dist.barrier()
                start = time.process_time()
                dist.reduce_scatter_tensor(output, sent)
                if number >= WARM_UP:
                    raw[codec].append((time.process_time() - start) * 1e3)
        medians = {codec: statistics.median(ms) for codec, ms in raw.items()}
        found.append({"values": values, **medians})
    return found


def fitted(entries: Sequence[dict[str, Any]], action: str) -> tuple[float, float]:
    """Launches, and bytes of each value, through the fewest and the most values."""
    few, *_, many = entries
    value_ms = (many[action] - few[action]) / (many["values"] - few["values"])
    first_ms = max(few[action] - value_ms * few["values"], 0.0)
    return first_ms / few["launch_ms"], value_ms / many["byte_ms"]


def exchange_of(case: Case, codec: str) -> tuple[Any, torch.Tensor]:
    """TorchRec's module that moves pooled outputs, and what a rank puts into it."""
    kind, columns, samples = case
    world_size = dist.get_world_size()
    codecs = None if codec == PLAIN else get_qcomm_codecs(config_of(codec))
    group = dist.group.WORLD
    outputs = torch.randn(samples * world_size, columns, requires_grad=True)
    if kind == "row_wise":
        return PooledEmbeddingsReduceScatter(group, codecs=codecs), outputs
    return (
        PooledEmbeddingsAllToAll(
            group, [columns] * world_size, torch.device("cpu"), codecs=codecs
        ),
        outputs,
    )


def codecs_of(case: Case) -> tuple[str, ...]:
    return (PLAIN, *(SUMMED if case[0] == "row_wise" else CODECS))


def measure(
    case: Case, ranks: Ranks, reference: SpeedReference
) -> tuple[dict[str, npt.NDArray[np.float64]], list[float]]:
    """Time each codec's exchange, pass by pass.

    An exchange begins when the last rank does, and ends when the last one is through.

    Returns:
        Codec -> `passes x 2` times, forward and backward [ms]; readings of the
        reference [ms].
    """
    exchanges = {codec: exchange_of(case, codec) for codec in codecs_of(case)}
    raw: dict[str, list[list[float]]] = {codec: [] for codec in exchanges}
    readings = []
    for number in range(WARM_UP + PASSES):
        if number % EVERY == 0:
            readings.append(reference.read())
        for codec in list(exchanges)[:: 1 if number % 2 else -1]:
            module, outputs = exchanges[codec]
            times = []
            dist.barrier()
            times.append(time.perf_counter())
            received = module(outputs).wait()
            times.append(time.perf_counter())
            gradient = torch.ones_like(received)
            dist.barrier()
            times.append(time.perf_counter())
            torch.autograd.grad(received, outputs, gradient)
            times.append(time.perf_counter())
            if number >= WARM_UP:
                raw[codec].append(times)
    found = {}
    gathered = ranks.gather((raw, readings))
    for codec in exchanges:
        last_P4 = np.array([theirs[codec] for theirs, _ in gathered]).max(axis=0)
        found[codec] = (last_P4[:, 1::2] - last_P4[:, ::2]) * 1e3
    return found, [ms for _, theirs in gathered for ms in theirs]


def predict(case: Case, cost_model: str) -> dict[str, dict[str, float]]:
    """What the planner says of a table on each rank, or of one over all [ms]."""
    kind, columns, samples = case
    world_size = dist.get_world_size()
    count = 1 if kind == "row_wise" else world_size
    names = [f"t{i}" for i in range(count)]
    module = EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=n, num_embeddings=1_000, embedding_dim=columns, feature_names=[n]
            )
            for n in names
        ],
        device=torch.device("meta"),
    )
    topology = Topology(world_size=world_size, compute_device="cpu")
    constraints = {n: ParameterConstraints(sharding_types=[kind]) for n in names}
    costs = PlanCosts(topology, constraints, cost_model=cost_model)
    enumerator = NeuroShardEnumerator(topology, samples, constraints, costs=costs)
    found = {}
    for codec in codecs_of(case):
        registry = get_qcomm_codecs_registry(config_of(codec))
        sharder = Sharder(qcomm_codecs_registry=registry)
        options = enumerator.enumerate(module, [sharder])
        for number, option in enumerate(options):
            for rank, shard in enumerate(option.shards):
                shard.rank = rank if kind == "row_wise" else number
        ranks = costs.price(options).predicted().ranks
        found[codec] = {
            way: max(getattr(r, f"{way[:1]}wd_comms") for r in ranks) for way in WAYS
        }
    return found


class Sharder(EmbeddingBagCollectionSharder):
    """TorchRec's, but offering on CPUs what it offers on GPUs."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return list(super().sharding_types("cuda"))


def over_plain(entry: dict[str, Any], codec: str, way: str) -> tuple[float, ...]:
    """How many times as long an exchange takes as without codec.

    Returns:
        Predicted, and of the passes the median and its 95 % interval, by their order.
    """
    times = entry["predicted"]
    number = WAYS.index(way)
    codec_P, plain_P = (np.array(entry["passes"][c])[:, number] for c in (codec, PLAIN))
    ratio_P = np.sort(codec_P / plain_P)
    count = len(ratio_P)
    low = int(count / 2 - 0.98 * math.sqrt(count))
    median = float(np.median(ratio_P))
    return times[codec][way] / times[PLAIN][way], median, *ratio_P[[low, -1 - low]]


def report(data: dict[str, Any]) -> str:
    lines = [
        "# Quantised collectives, predicted and measured",
        "",
        f"Bundle `{data['cost_model']}` on {data['device']}, torch {data['torch']}, "
        f"{data['world_size']} gloo ranks, load {data['load'][0]:.1f}; medians of "
        f"{PASSES} passes, codecs in turn.",
        "",
        "What codecs take: *launches* of the fused forward kernel, and for each value "
        "*bytes* that such a kernel reads in that time (the thread's own; the kernels "
        "run in turn with them):",
        "",
        "| codec | coding: launches | bytes | decoding: launches | bytes |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for codec in CODED:
        entries = [e for e in data["kernels"] if e["codec"] == codec]
        cells = [
            f"{found:.2f}"
            for action in ("encode_ms", "decode_ms")
            for found in fitted(entries, action)
        ]
        lines.append(f"| {codec} | {' | '.join(cells)} |")
    byte_ms = statistics.median(e["byte_ms"] for e in data["kernels"])
    for entry in data["sums"]:
        values = entry["values"]
        more = (
            f"{codec} {(entry[codec] - entry[PLAIN]) / values / byte_ms:.1f}"
            for codec in SUMMED
        )
        lines += [
            "",
            f"A reduce-scatter of {values:,} values takes a rank's processor so many "
            f"bytes' time per value more than one of as many bytes of floats: "
            f"{', '.join(more)}.",
        ]
    if data["exchanges"]:
        lines += exchange_lines(data)
    return "\n".join(
        [
            *lines,
            "",
            f"Commit {data['commit']}, {data['date']}. `{data['command']}`",
            "",
        ]
    )


def exchange_lines(data: dict[str, Any]) -> list[str]:
    """Exchanges, predicted and measured."""
    speeds = [e["speed"] for e in data["exchanges"]]
    lines = [
        "",
        f"The machine was {min(speeds):.2f} to {max(speeds):.2f} times as fast as when "
        "the bundle was measured, which fp32's times are corrected for.",
        "",
        "TorchRec's exchange of pooled outputs, from the last rank's start to the last "
        "one's end: *fp32* in ms, codecs as times of that in the same pass, with the "
        "median's 95 % interval. *Off by* is predicted over measured.",
        "",
        "| exchange | columns | samples | codec | way | measured | 95 % | predicted | "
        "off by |",
        "| --- | ---: | ---: | --- | --- | ---: | --- | ---: | ---: |",
    ]
    spreads: dict[str, list[float]] = {}
    agreed: dict[bool, list[bool]] = {True: [], False: []}
    for entry in data["exchanges"]:
        kind, columns, samples = entry["case"]
        start = f"| {kind} | {columns} | {samples:,} |"
        for codec, way in itertools.product(entry["measured"], WAYS):
            if codec == PLAIN:
                is_so, said = (entry[s][codec][way] for s in ("measured", "predicted"))
                shown = f"{is_so:.3f} ms | | {said:.3f} ms"
            else:
                said, is_so, low, high = over_plain(entry, codec, way)
                shown = f"{is_so:.2f} | {low:.2f} to {high:.2f} | {said:.2f}"
                agreed[not low <= 1 <= high].append((is_so < 1) == (said < 1))
            off = said / is_so
            spreads.setdefault(codec, []).append(max(off, 1 / off))
            lines.append(f"{start} {codec} | {way} | {shown} | {off:.2f} |")
    lines.append("")
    for codec, seen in spreads.items():
        lines.append(
            f"- {codec}: off by a factor of {statistics.median(seen):.2f} on median, "
            f"{max(seen):.2f} at most ({len(seen)} times)."
        )
    lines += [
        "",
        "Whether a codec makes an exchange shorter was foretold in "
        f"{sum(agreed[True])} of {len(agreed[True])} times where the interval leaves "
        f"no doubt, and in {sum(agreed[False])} of the other {len(agreed[False])}.",
    ]
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--cost-model", default="cpu", help="bundle to judge")
    parser.add_argument(
        "--columns", type=int, nargs="*", default=COLUMNS, help="none: kernels alone"
    )
    parser.add_argument("--samples", type=int, nargs="+", default=SAMPLES)
    parser.add_argument("--out", type=Path, required=True, help="path without suffix")
    args = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    ranks = Ranks("gloo")
    reference = SpeedReference(ranks)
    topology = Topology(world_size=ranks.world_size, compute_device="cpu")
    costs = PlanCosts(topology, cost_model=args.cost_model)
    nominal_ms = costs.cost_model.reference_ms * reference.slowdown(
        costs.comms_model.compute_slowdown
    )
    data: dict[str, Any] = {
        "cost_model": args.cost_model,
        "device": cpu_name(),
        "torch": torch.__version__,
        "world_size": ranks.world_size,
        "load": os.getloadavg(),
        "date": now(),
        "commit": commit(),
        "command": shlex.join(["torchrun", *sys.argv]),
        "kernels": measure_kernels() if ranks.rank == 0 else [],
        "sums": measure_sums(),
        "exchanges": [],
    }
    dist.barrier()
    kinds = ("table_wise", "row_wise")
    for case in itertools.product(kinds, args.columns, args.samples):
        passes, readings = measure(case, ranks, reference)
        predicted = predict(case, args.cost_model)
        assert all(math.isfinite(ms) for t in predicted.values() for ms in t.values())
        [speed] = machine_speeds([readings], nominal_ms)
        entry = {
            "case": case,
            "speed": speed,
            "measured": {
                codec: dict(zip(WAYS, np.median(ms_P2, axis=0) * speed, strict=True))
                for codec, ms_P2 in passes.items()
            },
            "predicted": predicted,
        }
        if ranks.rank == 0:
            print(entry, flush=True)
        passes_ms = {c: np.round(ms_P2, 4).tolist() for c, ms_P2 in passes.items()}
        data["exchanges"].append({**entry, "passes": passes_ms})
    if ranks.rank == 0:
        args.out.with_suffix(".json").write_text(json.dumps(data) + "\n")
        args.out.with_suffix(".md").write_text(report(data))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
