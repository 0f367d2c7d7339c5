"""`neuroshard reshard` beside a copy of the same checkpoint: seconds and memory.

A checkpoint of table-wise tables with row-wise Adagrad's state is turned into one for
column-wise tables, then row-wise, then table-wise ones. Each time, copies and
conversions take turns; both end when all is on disk.

    PYTHONPATH=. python benchmarks/bench_reshard.py --gib 10 --out results/reshard
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict_saver import save
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import (
    EmbeddingShardingPlanner,
    ParameterConstraints,
    Topology,
)
from torchrec.distributed.types import ModuleSharder

from harness.options import option, read_options
from harness.pages import table, write_page
from harness.provenance import describe_run
from torchrec_neuroshard import save_plan

NUM_TABLES, DIM, WORLD_SIZE = 8, 128, 8
ROW_BYTES = 4 * (DIM + 1)
KINDS = "column_wise", "row_wise", "table_wise"
CHILD = """
import os, shutil, sys, time
from pathlib import Path
import torch
from torchrec_neuroshard import reshard
source, plan, out = map(Path, sys.argv[1:4])
size = sum(file.stat().st_size for file in source.iterdir())
torch.ones(size, dtype=torch.uint8)
Path("/proc/self/clear_refs").write_text("5")
started = time.monotonic()
if sys.argv[4] == "copy":
    shutil.copytree(source, out)
    for file in out.iterdir():
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
else:
    reshard(source, plan, out)
seconds = time.monotonic() - started
[line] = [l for l in open("/proc/self/status") if l.startswith("VmHWM")]
print(seconds, int(line.split()[1]) / 1024)
"""
"""Copies or converts, and prints seconds and the largest memory in MiB. Before that it
takes and frees memory: a virtual machine is slow to get it from its host."""


@dataclass(frozen=True)
class Config:
    """Options of the command line."""

    gib: float = option(10.0, "size of the checkpoint", quick=0.05)
    rounds: int = option(2, "copies and conversions of each step", quick=1)
    folder: str = option(".", "where the checkpoints are written for a while")
    out: str = option("results/reshard", "page and data, without suffix")


class Bags(EmbeddingBagCollectionSharder):
    """Offers on CPUs what TorchRec offers on GPUs."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Return the types of this benchmark."""
        return [*KINDS]


class Model(torch.nn.Module):
    """The tables."""

    def __init__(self, num_rows: int) -> None:
        super().__init__()
        tables = [
            EmbeddingBagConfig(
                name=f"t{i}",
                num_embeddings=num_rows,
                embedding_dim=DIM,
                feature_names=[f"f{i}"],
            )
            for i in range(NUM_TABLES)
        ]
        self.ebc = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))


def write_plan(path: Path, num_rows: int, kind: str) -> None:
    """Write TorchRec's plan with one sharding type."""
    model, names = Model(num_rows), [f"t{i}" for i in range(NUM_TABLES)]
    sharders: list[ModuleSharder[Any]] = [Bags()]
    planner = EmbeddingShardingPlanner(
        topology=Topology(WORLD_SIZE, "cpu", local_world_size=WORLD_SIZE),
        constraints={
            n: ParameterConstraints(sharding_types=[kind], min_partition=32)
            for n in names
        },
        debug=False,
    )
    save_plan(planner.plan(model, sharders), path, model=model, planner=planner)


def write_checkpoint(folder: Path, num_rows: int) -> None:
    """Write the first checkpoint: whole tables."""
    names = {f"ebc.embedding_bags.t{i}.weight": f"t{i}" for i in range(NUM_TABLES)}
    weights = {key: torch.rand(num_rows, DIM) for key in names}
    states = {
        key: {f"{name}.momentum1": torch.rand(num_rows)} for key, name in names.items()
    }
    save({"model": weights, "optimizer": {"state": states}}, checkpoint_id=folder)


def run(source: Path, plan: Path, out: Path, what: str) -> tuple[float, float]:
    """Copy or convert a checkpoint; return seconds and MiB of memory."""
    command = [sys.executable, "-W", "ignore", "-c", CHILD]
    command += [str(source), str(plan), str(out), what]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    seconds, mib = map(float, done.stdout.split())
    return seconds, mib


def measure(config: Config, folder: Path) -> list[dict[str, Any]]:
    """Return seconds and memory of each step."""
    num_rows = int(config.gib * 2**30 / NUM_TABLES / ROW_BYTES)
    write_checkpoint(folder / "0", num_rows)
    plan, found = folder / "plan.json", []
    for i, kind in enumerate(KINDS):
        source, out = folder / f"{i}", folder / f"{i + 1}"
        write_plan(plan, num_rows, kind)
        step: dict[str, Any] = {"to": kind, "copy_s": [], "reshard_s": [], "mib": []}
        for _ in range(config.rounds):
            shutil.rmtree(out, ignore_errors=True)
            os.sync()
            step["copy_s"].append(run(source, plan, folder / "copy", "copy")[0])
            shutil.rmtree(folder / "copy")
            os.sync()
            seconds, mib = run(source, plan, out, "reshard")
            step["reshard_s"].append(seconds)
            step["mib"].append(mib)
        print(step, flush=True)
        found.append(step)
        shutil.rmtree(source)
    return found


def page_text(data: dict[str, Any]) -> str:
    """Return the page."""
    made, rows = data["run"], []
    for step in data["steps"]:
        times = [step["copy_s"], step["reshard_s"]]
        copied, done = map(statistics.median, times)
        cells = ["; ".join(f"{s:.1f}" for s in seconds) for seconds in times]
        ratio, memory = f"{done / copied:.2f}", f"{max(step['mib']):,.0f}"
        rows.append([step["to"], *cells, ratio, memory])
    return f"""# `neuroshard reshard` beside a copy

A checkpoint of {data["gib"]:g} GiB has {NUM_TABLES} tables of width {DIM} with row-wise
Adagrad's state. It is turned from table-wise into column-wise, row-wise and table-wise
tables on {WORLD_SIZE} ranks. Copies and conversions take turns; both end when the files
are on disk. The start of Python is left out.

{table("to | copy [s] | reshard [s] | ratio of medians | memory [MiB]", rows)}

`{made["command"]}`, {made["date"]}, commit {made["commit"]},
{made["hardware"]["device"]}
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure all steps, and write the data and the page."""
    config = read_options(Config, arguments, __doc__ or "")
    with tempfile.TemporaryDirectory(dir=config.folder) as folder:
        data = {"run": describe_run(), "gib": config.gib}
        data["steps"] = measure(config, Path(folder))
    write_page(Path(config.out), data, page_text(data))


if __name__ == "__main__":
    main()
