"""`neuroshard collect compute`: measure fused kernels over sampled table sets."""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.console import Console

from torchrec_neuroshard.collect.progress import measuring_progress
from torchrec_neuroshard.collect.sampling import SamplingConfig, sample_set
from torchrec_neuroshard.collect.store import RecordStore, read_header, read_records
from torchrec_neuroshard.collect.tbe import fbgemm_version
from torchrec_neuroshard.collect.timing import SetTimer
from torchrec_neuroshard.devices import cpu_name
from torchrec_neuroshard.errors import ConfigError
from torchrec_neuroshard.records import (
    CostRecord,
    Fingerprint,
    RunHeader,
    command_line,
    repeatability,
    utc_now,
)
from torchrec_neuroshard.tables import TableConfig
from torchrec_neuroshard.workloads.loaders import load_json

__all__ = [
    "NUM_ANCHORS",
    "CollectConfig",
    "add_arguments",
    "collect_compute",
    "device_fingerprint",
    "repeatability",
    "run",
    "summary",
    "unit_factor",
]

NUM_ANCHORS = 25
"""Earlier sets that a resumed run measures again, to go on in the same unit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectConfig:
    """One run of the compute collector."""

    out: Path
    """Parquet file to write or to go on with."""
    num_sets: int = 5_000
    """Records the file shall hold."""
    seed: int = 0
    device: str = "cpu"
    num_threads: int = 1
    """CPU threads of the kernel: a rank on a CPU has one core."""
    tables: tuple[Path, ...] = ()
    """JSON files of real tables to draw from beside generated ones."""
    workloads: tuple[str, ...] = ()
    """Names of the workloads to take from them; empty takes all with lookups."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)

    def __post_init__(self) -> None:
        if self.num_sets < 1 or self.num_threads < 1:
            raise ConfigError(
                "num_sets and num_threads must be at least 1, got "
                f"{self.num_sets} and {self.num_threads}"
            )


def device_fingerprint(device: torch.device, num_threads: int) -> Fingerprint:
    """Describe the device and libraries at hand."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = cpu_name()
    return Fingerprint(
        device=name,
        device_type=device.type,
        num_threads=num_threads,
        torch=torch.__version__,
        fbgemm=fbgemm_version(),
    )


def _base_tables(config: CollectConfig) -> list[TableConfig]:
    found: list[TableConfig] = []
    for path in config.tables:
        loaded = load_json(path)
        names = config.workloads or tuple(loaded)
        missing = sorted(set(names) - set(loaded))
        if missing:
            raise ConfigError(
                f"{path} has no workloads {missing}; it has {list(loaded)}"
            )
        for name in names:
            found.extend(loaded[name])
    return found


def collect_compute(config: CollectConfig, console: Console | None = None) -> None:
    """Measure until the file holds `config.num_sets` records.

    Raises:
        RecordMismatchError: The file holds records of another machine or run.
    """
    console = console or Console()
    device = torch.device(config.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "device 'cuda' was asked for but torch sees none; use --device cpu or run "
            "'neuroshard doctor'"
        )
    base_tables = _base_tables(config)
    header = RunHeader(
        fingerprint=device_fingerprint(device, config.num_threads),
        reference_ms=0.0,
        seed=config.seed,
        sampling={
            **_plain(dataclasses.asdict(config.sampling)),
            "workloads": sorted({t.name.rsplit("/", 1)[0] for t in base_tables}),
            "num_base_tables": len(base_tables),
        },
        command=command_line(),
        created=utc_now(),
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(config.num_threads)
    try:
        _collect(config, header, base_tables, device, console)
    finally:
        torch.set_num_threads(threads)


def _collect(
    config: CollectConfig,
    header: RunHeader,
    base_tables: Sequence[TableConfig],
    device: torch.device,
    console: Console,
) -> None:
    path = config.out
    known = read_header(path)
    if known is not None:
        known.check_same_run(header, str(path))
    timer = SetTimer(
        device,
        config.sampling.max_weight_bytes,
        reference_ms=known.reference_ms if known else None,
    )
    header = known or dataclasses.replace(header, reference_ms=timer.reference_ms)
    with (
        RecordStore(path, header) as store,
        measuring_progress(console, "sets") as progress,
    ):
        bar = progress.add_task(
            "collect", total=config.num_sets, completed=len(store.done), rate=0.0
        )
        todo = [i for i in range(config.num_sets) if i not in store.done]
        if todo and timer.reference_ms:
            earlier = _anchors(store.records)
            again = [_measure(r.index, config, base_tables, timer) for r in earlier]
            factor = unit_factor(earlier, again)
            timer.reference_ms *= factor
            if earlier:
                progress.console.print(
                    f"{len(earlier)} sets measured again after the restart: times are "
                    f"multiplied by {factor:.3f} to agree with the earlier ones"
                )
        for index in todo:
            record = _measure(index, config, base_tables, timer)
            store.append(record)
            task = progress.tasks[0]
            progress.update(bar, advance=1, rate=task.speed or 0.0)
    console.print(summary(path))


def _anchors(records: Sequence[CostRecord]) -> list[CostRecord]:
    """Records spread evenly over those of an earlier process."""
    firsts = [r for r in records if r.repeat_of is None]
    step = max(1, len(firsts) // NUM_ANCHORS)
    return firsts[::step][:NUM_ANCHORS]


def unit_factor(earlier: Sequence[CostRecord], again: Sequence[CostRecord]) -> float:
    """Factor that brings a new process's times to the unit of an earlier one.

    The reference set lies elsewhere in memory after every start and may then be faster
    or slower than before beside the same samples, by some percent.

    Returns:
        Median of earlier over new totals; 1 without any.
    """
    if not earlier:
        return 1.0
    return statistics.median(
        e.total_ms / a.total_ms for e, a in zip(earlier, again, strict=True)
    )


def _plain(data: dict[str, object]) -> dict[str, object]:
    """Tuples as lists, as JSON gives them back."""
    return {k: list(v) if isinstance(v, tuple) else v for k, v in data.items()}


def _measure(
    index: int,
    config: CollectConfig,
    base_tables: Sequence[TableConfig],
    timer: SetTimer,
) -> CostRecord:
    sampled = sample_set(index, config.seed, config.sampling, base_tables)
    source = index if sampled.repeat_of is None else sampled.repeat_of
    measured = timer.measure(
        sampled.tables, sampled.access, sampled.batch_size, (config.seed, source)
    )
    return CostRecord(
        index=index,
        repeat_of=sampled.repeat_of,
        held_out=sampled.held_out,
        batch_size=sampled.batch_size,
        tables=sampled.tables,
        fwd_raw_ms=measured.fwd_raw_ms,
        bwd_raw_ms=measured.bwd_raw_ms,
        ref_raw_ms=measured.ref_raw_ms,
        fwd_ms=measured.fwd_ms,
        bwd_ms=measured.bwd_ms,
    )


def summary(path: Path) -> str:
    """One paragraph on what a record file holds and how repeatable it is."""
    headers, records = read_records([path])
    differences = repeatability(records)
    text = (
        f"{path}: {len(records)} records on {headers[0].fingerprint.device}, "
        f"{sum(r.held_out for r in records)} of held-out tables"
    )
    if len(differences) >= 2:
        tenth = statistics.quantiles(differences, n=10)[-1]
        text += (
            f"; repeatability of the total: median "
            f"{statistics.median(differences):.1%}, 90th percentile {tenth:.1%} over "
            f"{len(differences)} sets measured again"
        )
    return text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `neuroshard collect compute`."""
    parser.add_argument("--out", type=Path, required=True, help="Parquet file")
    parser.add_argument("--num-sets", type=int, default=5_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", help="cpu or cuda[:N]")
    parser.add_argument(
        "--num-threads", type=int, default=1, help="CPU threads of the kernel"
    )
    parser.add_argument(
        "--tables",
        type=Path,
        action="append",
        default=[],
        help="JSON file of real tables to draw from (repeatable)",
    )
    parser.add_argument(
        "--workload",
        action="append",
        default=[],
        help="take only this workload of the files (repeatable)",
    )
    defaults = SamplingConfig()
    parser.add_argument("--max-shards", type=int, default=defaults.max_shards)
    parser.add_argument("--max-lookups", type=int, default=defaults.max_lookups)
    parser.add_argument(
        "--max-gib",
        type=float,
        default=defaults.max_weight_bytes / 2**30,
        help="weights of a set, and the memory set aside for them",
    )
    parser.add_argument(
        "--batch-sizes", type=int, nargs=2, default=list(defaults.batch_sizes)
    )


def run(args: argparse.Namespace) -> int:
    """Run `neuroshard collect compute`."""
    sampling = SamplingConfig(
        max_shards=args.max_shards,
        max_lookups=args.max_lookups,
        max_weight_bytes=int(args.max_gib * 2**30),
        batch_sizes=(args.batch_sizes[0], args.batch_sizes[1]),
    )
    collect_compute(
        CollectConfig(
            out=args.out,
            num_sets=args.num_sets,
            seed=args.seed,
            device=args.device,
            num_threads=args.num_threads,
            tables=tuple(args.tables),
            workloads=tuple(args.workload),
            sampling=sampling,
        )
    )
    return 0
