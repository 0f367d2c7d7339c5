"""How long the host takes for a measured set, the kernels left out.

    python -m tests.paper_gpu.host_path real_tables.json [--sets 150]

Runs `neuroshard collect compute` on a paper GPU over sets of as many tables as a GPU
gets, each so small that the lookups take no time. Backward kernels and the flush of the
cache, which a paper GPU runs on the host, are left out.
"""

from __future__ import annotations

import argparse
import dataclasses
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.paper_gpu.build import build, environment

_WARM_UP = 20
"""Sets that are not counted."""


def measure(tables: Path, num_sets: int, folder: Path) -> None:
    """Print seconds of the processor and of the clock per set."""
    import torch
    from rich.console import Console

    from tests.paper_gpu import device
    from torchrec_neuroshard.collect.compute import CollectConfig, collect_compute
    from torchrec_neuroshard.collect.sampling import SamplingConfig
    from torchrec_neuroshard.record_store import RecordStore

    torch.set_num_threads(1)
    torch.autograd.backward = lambda *_: None
    device._L2_BYTES = 64
    sampling = dataclasses.replace(
        SamplingConfig.for_device("cuda", 80 * 2**30),
        rows=(10, 100),
        batch_sizes=(1, 2),
        max_weight_bytes=50 * 2**20,
    )
    marks: list[tuple[float, float]] = []
    append = RecordStore.append

    def append_and_mark(self: Any, record: Any) -> None:
        append(self, record)
        marks.append((time.process_time(), time.monotonic()))

    RecordStore.append = append_and_mark  # type: ignore[method-assign]
    config = CollectConfig(
        out=folder / "r.parquet",
        num_sets=num_sets,
        seed=3,
        device="cuda",
        tables=(tables,),
        sampling=sampling,
    )
    collect_compute(config, Console(quiet=True))
    first, last, count = marks[_WARM_UP], marks[-1], len(marks) - 1 - _WARM_UP
    cpu, clock = ((b - a) / count for a, b in zip(first, last, strict=True))
    print(
        f"{1e3 * cpu:.1f} ms of CPU and {1e3 * clock:.1f} ms by the clock a set: "
        f"{1 / clock:.0f} sets a second",
        flush=True,
    )


def main() -> int:
    """Run `measure` in a process that has paper GPUs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("tables", type=Path, help="JSON of real tables")
    parser.add_argument("--sets", type=int, default=150)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-W", "ignore", "-c"]
        command += [
            "import sys; from pathlib import Path;"
            "from tests.paper_gpu.host_path import measure;"
            "measure(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))",
            *(str(options.tables), str(options.sets), folder),
        ]
        env = {**environment(build(), gib=80), "OMP_NUM_THREADS": "1"}
        return subprocess.run(command, env=env, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
