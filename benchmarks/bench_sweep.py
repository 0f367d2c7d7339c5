"""How long `neuroshard sweep` takes for five cards, six numbers of ranks, 200 tables.

    python benchmarks/bench_sweep.py --out benchmarks/results/sweep_202611

Tables follow the DLRM dataset's published aggregates. The command runs as a user's
would, in processes of its own, imports included.
"""

from __future__ import annotations

import csv
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench_page import cpu_seconds, draw_tables
from harness.options import option, read_options
from harness.provenance import describe_run, keep_rows


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepRun:
    tables: int = option(200, "of the model", 4)
    cards: str = option("a100,h100,h200,b200,mi300x", "with commas between", "h100")
    ranks: str = option("8,16,32,64,128,256", "with commas between", "8")
    seconds: float = option(3.0, "that the search of a cell may take", 0.1)
    jobs: int = option(2, "processes", 1)
    repeats: int = option(1, "of the whole sweep", 1)
    out: str = option("", "path of the results, without suffix")


def write_tables(count: int, path: Path) -> None:
    with path.open("w", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(("name", "num_embeddings", "embedding_dim", "pooling_factor"))
        for t in draw_tables(count):
            row = t.name, t.num_embeddings, t.embedding_dim, t.pooling_factor
            lines.writerow(row)


def swept(run: SweepRun, folder: Path) -> dict[str, Any]:
    """Run the command once; returns its time, the processor's, and its cells."""
    load, before = os.getloadavg()[0], cpu_seconds()
    start = time.monotonic()
    command = [sys.executable, "-m", "torchrec_neuroshard", "sweep", "tables.csv"]
    command += ["--cards", run.cards, "--ranks", run.ranks, "--csv", "sweep.csv"]
    command += ["--seconds", str(run.seconds), "--jobs", str(run.jobs)]
    root = str(Path(__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": root}
    subprocess.run(
        command, cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL
    )
    seconds = time.monotonic() - start
    with (folder / "sweep.csv").open(newline="") as file:
        cells = list(csv.DictReader(file))
    gaps = [float(c["gap"]) for c in cells if c["fits"] == "true" and c["gap"]]
    return {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds() - before,
        "load_average": load,
        "cells": len(cells),
        "fit": sum(c["fits"] == "true" for c in cells),
        "median_gap": statistics.median(gaps) if gaps else None,
    }


def page(settings: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    lines = [
        "# How long a sweep takes",
        "",
        "| cells | that fit | by the clock [s] | CPU [s] | median gap | load before |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        gap = row["median_gap"]
        lines.append(
            f"| {row['cells']} | {row['fit']} | {row['seconds']:.1f} | "
            f"{row['cpu_seconds']:.1f} | {'?' if gap is None else f'{gap:.1%}'} | "
            f"{row['load_average']:.1f} |"
        )
    lines += [
        "",
        f"{settings['tables']} tables; cards {settings['cards']}; ranks "
        f"{settings['ranks']}; 4,096 samples per rank; {settings['seconds']:g} s per "
        f"search, {settings['jobs']} processes. CPU: of all processes, imports "
        "included. Gap: how far cells' plans are above their bounds at most.",
        "",
        f"{settings['hardware']['device']}, {os.cpu_count()} cores that other work "
        f"shares; {settings['date']}, commit {settings['commit']}. Command: "
        f"`{settings['command']}`",
        "",
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    run = read_options(SweepRun, arguments, __doc__ or "")
    told = {n: getattr(run, n) for n in ("tables", "cards", "ranks", "seconds", "jobs")}
    settings = {**describe_run(), **told}
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        write_tables(run.tables, Path(folder) / "tables.csv")
        for _ in range(run.repeats):
            rows.append(swept(run, Path(folder)))
            keep_rows(Path(run.out) if run.out else None, settings, rows, page)
    print(page(settings, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
