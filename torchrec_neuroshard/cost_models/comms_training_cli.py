"""`neuroshard train` on records of collectives: records in, part of a bundle out."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from rich.console import Console

from torchrec_neuroshard.cost_models.card import Repeatability
from torchrec_neuroshard.cost_models.comms_bundle import (
    CommsBundleInfo,
    comms_card,
    has_comms,
    load_comms_network,
    save_comms_bundle,
)
from torchrec_neuroshard.cost_models.comms_training import (
    CommsData,
    CommsEvaluation,
    CommsTrainConfig,
    build_comms,
    evaluate_comms,
    train_comms,
)
from torchrec_neuroshard.errors import RecordError, RecordMismatchError
from torchrec_neuroshard.record_store import read_comms_records
from torchrec_neuroshard.records import (
    CommsRecord,
    command_line,
    repeatability,
)

__all__ = ["run", "train_comms_bundle"]

_TEST_EVERY = 5
"""Of the world sizes trained on, every so many records are kept for the test."""


def train_comms_bundle(
    records: Sequence[Path],
    out: Path,
    name: str,
    config: CommsTrainConfig,
    *,
    test_world_sizes: Sequence[int] = (),
    backend: str | None = None,
    before: Path | None = None,
    console: Console | None = None,
) -> list[CommsEvaluation]:
    """Train on files of collectives, judge on others, write into a bundle.

    Args:
        records: Files of one machine and backend; several world sizes, each in a run of
            its own or in one run (`--group-sizes`).
        out: Folder of the bundle; a compute model in it is kept.
        name: What the model is called.
        config: Steps and rates.
        test_world_sizes: World sizes that are only tested on.
        backend: What the records must have been measured over; None: any one.
        before: A bundle whose collectives are judged on the same records, to be shown
            beside; one of another backend, or without any, is not.
        console: Where progress is printed.

    Returns:
        The errors by world size and collective.

    Raises:
        RecordError: Too few records, or none of a world size.
        RecordMismatchError: The files are of different machines or backends, or not
            of the backend asked for.
    """
    console = console or Console()
    files = read_comms_records(records)
    headers = [header for header, _ in files]
    if backend is not None and headers[0].backend != backend:
        raise RecordMismatchError(
            f"{records[0]} was measured over {headers[0].backend}, {backend} was asked "
            f"for; measure with 'neuroshard collect comms --backend {backend}'"
        )
    _check_world_sizes({r.world_size for _, f in files for r in f}, test_world_sizes)
    training: list[CommsRecord] = []
    test: list[CommsRecord] = []
    for _, measured in files:
        for record in measured:
            kept_out = record.world_size in test_world_sizes
            source = record.index if record.repeat_of is None else record.repeat_of
            if not kept_out and source % _TEST_EVERY:
                training.append(record)
            elif record.repeat_of is None:
                test.append(record)
    links = [
        tuple(float(getattr(h, f"{side}_gb_per_s")) for h in headers)
        for side in ("intra", "inter")
    ]
    intra, inter = (_typical(values) for values in links)
    training_data = build_comms(training, intra, inter)
    test_data = build_comms(test, intra, inter)
    console.print(f"{len(training)} collectives to train on, {len(test)} to test")

    def report(step: int, loss: float, error: float) -> None:
        console.print(
            f"step {step + 1:5d}/{config.steps}  loss {loss:.5f}  validation: median "
            f"error {error:.2%}"
        )

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        network = train_comms(training_data, config, report)
    finally:
        torch.set_num_threads(threads)
    evaluations = evaluate_comms(network, training_data, test_data)
    _print_before(before, headers[0].backend, training_data, test_data, console)
    command = command_line()
    sums = [float(sum(r.bytes_per_peer)) for r in training]
    info = CommsBundleInfo(
        name=name,
        fingerprint=headers[0].fingerprint,
        backend=headers[0].backend,
        hidden=config.hidden,
        intra_gb_per_s=intra,
        inter_gb_per_s=inter,
        world_sizes=tuple(sorted({r.world_size for r in training})),
        bytes_per_rank=(min(sums), max(sums)),
        compute_slowdown=_merge([h.compute_slowdown for h in headers]),
        column_order_ms_per_mb=_merge([h.column_order_ms_per_mb for h in headers]),
        compute_reference_ms=_typical(tuple(h.compute_reference_ms for h in headers)),
        trained_on={
            "num_training": len(training),
            "num_test": len(test),
            "created": sorted({h.created[:10] for h in headers}),
            "cores": headers[0].sampling.get("cores", "unknown"),
            "seed": config.seed,
            "steps": config.steps,
            "commands": [*(h.command for h in headers), command],
        },
    )
    noise = Repeatability(
        tuple(d for _, measured in files for d in repeatability(measured))
    )
    line = noise.line().replace("set", "collective")
    save_comms_bundle(out, network, info, comms_card(info, line, evaluations))
    for e in evaluations:
        if e.collective == "all":
            console.print(
                f"{e.world_size} ranks ({'' if e.trained else 'not '}in training): "
                f"median error {e.median:.2%}, 90th percentile {e.percentile_90:.2%}, "
                f"tau {e.kendall_tau:.4f}; one latency and one bandwidth: median "
                f"{e.bandwidth_median:.2%}"
            )
    console.print(line)
    console.print(f"wrote {out}")
    return evaluations


def _print_before(
    before: Path | None,
    backend: str,
    training: CommsData,
    test: CommsData,
    console: Console,
) -> None:
    """Print how wrong another bundle's collectives are on the test's records."""
    if before is None or not has_comms(before):
        return
    network, info = load_comms_network(before)
    if info.backend != backend:
        return
    for e in evaluate_comms(network, training, test):
        if e.collective == "all":
            console.print(
                f"before, {e.world_size} ranks: median error {e.median:.2%}, 90th "
                f"percentile {e.percentile_90:.2%}, tau {e.kendall_tau:.4f} (`"
                f"{info.name}`, {info.fingerprint.device})",
                soft_wrap=True,
            )


def _merge(
    files: Sequence[Mapping[str, Sequence[float]]],
) -> dict[str, tuple[float, ...]]:
    """Median over the files of each number of ranks."""
    found: dict[int, list[Sequence[float]]] = {}
    for of_file in files:
        for count, values in of_file.items():
            found.setdefault(int(count), []).append(values)
    return {
        str(n): tuple(map(float, np.median(found[n], axis=0))) for n in sorted(found)
    }


def _check_world_sizes(known: set[int], test_world_sizes: Sequence[int]) -> None:
    absent = sorted(set(test_world_sizes) - known)
    if absent:
        raise RecordError(
            f"no records of world size {', '.join(map(str, absent))} to test on; the "
            f"files are of {', '.join(map(str, sorted(known)))}"
        )
    if known <= set(test_world_sizes):
        raise RecordError(
            "every world size is kept for the test; leave one to train on"
        )


def _typical(values: tuple[float, ...]) -> float:
    known = [v for v in values if v > 0]
    return float(np.median(known)) if known else 0.0


def run(args: argparse.Namespace) -> int:
    """Run `neuroshard train` on records of collectives."""
    train_comms_bundle(
        args.records,
        args.out,
        args.name or args.out.name,
        CommsTrainConfig(seed=args.seed),
        test_world_sizes=args.test_world_sizes,
        backend=args.backend,
    )
    return 0
