"""Many plans in one process, many threads, many ranks, and a day of a monitor.

    python -m tests.fuzz.under_load --plans 200 --threads 8 --ranks 32 --reports 864

Each part says what it counted and fails where memory or open files grow, or where plans
made at the same time are not those made alone. A part is left out by a count of 0.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import logging
import multiprocessing
import os
import resource
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.planner import Topology
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.builders import bag_sharders, make_ebc, make_planner
from torchrec_neuroshard.monitor import plan_monitor
from torchrec_neuroshard.monitor.plan_monitor import PlanMonitor

WARM_UP = 0.25
"""Part of the plans or reports before memory is held against that at the end."""
MAX_LEAK_MIB = 1.0
"""Per plan, or per report."""
ENDS_SECONDS = 300.0


def resident_mib() -> float:
    """Return the memory of this process once all that is free was given back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize() / 2**20


def open_files() -> int:
    """Return how many file descriptors this process has."""
    return len(os.listdir("/proc/self/fd"))


class Growth:
    """What a process gains over repeats, after a warm-up."""

    def __init__(self, repeats: int) -> None:
        self._start, self._repeats = int(WARM_UP * repeats), repeats
        self._first: tuple[float, int] = (0.0, 0)

    def note(self, number: int) -> None:
        """Call before each repeat."""
        if number == self._start:
            self._first = resident_mib(), open_files()

    def told(self, what: str) -> tuple[str, bool]:
        """Return what has grown, and whether it may."""
        mib, files = resident_mib() - self._first[0], open_files() - self._first[1]
        each = mib / max(1, self._repeats - self._start)
        text = f"{each:.3f} MiB per {what}, {files} open files more after the warm-up"
        return text, (each < MAX_LEAK_MIB and files <= 0)


def plan_once(seed: int) -> dict[str, Any]:
    """Plan a model drawn from a seed; return the shards of its tables."""
    rng = np.random.default_rng(seed)
    sizes = [
        (int(rng.integers(10, 10**6)), 4 * int(rng.integers(1, 33)))
        for _ in range(int(rng.integers(3, 12)))
    ]
    topology = Topology(world_size=int(2 ** rng.integers(1, 3)), compute_device="cuda")
    planner = make_planner(topology=topology, search_only=False)
    plan = planner.plan(make_ebc(sizes), bag_sharders())
    return {
        f"{path}.{name}": (sharding.sharding_type, sharding.ranks)
        for path, tables in plan.plan.items()
        for name, sharding in tables.items()
    }


def many_plans(count: int, seed: int) -> tuple[str, bool]:
    """Plan again and again."""
    growth = Growth(count)
    for number in range(count):
        growth.note(number)
        plan_once(seed + number)
    return growth.told("plan")


def many_threads(count: int, seed: int) -> tuple[str, bool]:
    """Plan other models in each thread; each must be as it is alone."""
    alone = [plan_once(seed + n) for n in range(count)]
    found: list[Any] = [None] * count
    begin = threading.Barrier(count)

    def work(number: int) -> None:
        begin.wait()
        try:
            found[number] = plan_once(seed + number)
        except Exception:
            found[number] = traceback.format_exc()

    threads = [threading.Thread(target=work, args=(n,)) for n in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    odd = [n for n in range(count) if found[n] != alone[n]]
    failed = next((found[n] for n in odd if isinstance(found[n], str)), "")
    return f"{len(odd)} of {count} plans differ from those made alone {failed}", not odd


def many_ranks(count: int, seed: int) -> tuple[str, bool]:
    """Plan once for a group of gloo ranks."""
    del seed
    with tempfile.TemporaryDirectory() as name:
        context = multiprocessing.get_context("fork")
        ranks = [
            context.Process(target=_rank, args=(rank, count, name))
            for rank in range(count)
        ]
        start = time.monotonic()
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(max(0.1, start + ENDS_SECONDS - time.monotonic()))
            process.kill()
        seconds = time.monotonic() - start
        plans = [p.read_text() for p in Path(name).glob("plan*")]
    text = f"{len(plans)} of {count} ranks have {len(set(plans))} plan(s)"
    return f"{text}, {seconds:.0f} s", len(plans) == count and len(set(plans)) == 1


def _join(rank: int, world_size: int, folder: str) -> None:
    os.environ["LOCAL_WORLD_SIZE"] = str(world_size)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=ENDS_SECONDS),
    )


def _rank(rank: int, world_size: int, folder: str) -> None:
    _join(rank, world_size, folder)
    planner = make_planner(
        topology=Topology(
            world_size=world_size, local_world_size=world_size, compute_device="cpu"
        )
    )
    model = make_ebc([(1000 * n, 16) for n in range(1, 65)])
    plan = planner.collective_plan(model, bag_sharders(), dist.group.WORLD)
    Path(folder, f"plan{rank}").write_text(str(plan))
    dist.destroy_process_group()


class _Model(nn.Module):
    def __init__(self, sizes: list[tuple[int, int]]) -> None:
        super().__init__()
        self.ebc = make_ebc(sizes)
        self.dense = nn.Linear(sum(dim for _, dim in sizes), 1)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        found: torch.Tensor = self.dense(self.ebc(features).values()).mean()
        return found


def long_watch(reports: int, seed: int) -> tuple[str, bool]:
    """Let a monitor report as often as it would in a day, at a clock's 100 s each."""
    with tempfile.TemporaryDirectory() as name:
        _join(0, 1, name)
        sizes = [(200, 8), (100, 16), (50, 4)]
        planner = make_planner(world_size=1)
        model = _Model(sizes)
        plan = planner.collective_plan(model, bag_sharders(), dist.group.WORLD)
        sharded = DistributedModelParallel(
            model, device=torch.device("cpu"), plan=plan, sharders=bag_sharders()
        )
        every, ahead = 8, 0.0

        def clock() -> float:
            return time.perf_counter() + ahead

        monitors: Any = plan_monitor
        monitors.time = SimpleNamespace(perf_counter=clock)
        monitor = PlanMonitor(sharded, planner, every=every, timed=1, max_overhead=1.0)
        rng, growth = np.random.default_rng(seed), Growth(reports)
        seen, last = 0, None
        for number in range(reports):
            growth.note(number)
            for _ in range(every):
                ahead += 100.0 / every
                lengths = torch.from_numpy(rng.integers(0, 4, 4 * len(sizes)))
                ids = torch.from_numpy(rng.integers(0, 50, int(lengths.sum())))
                keys = [f"f{i}" for i in range(len(sizes))]
                batch = KeyedJaggedTensor(keys, ids, lengths=lengths)
                sharded(batch).backward()
                monitor.step()
            seen += monitor.last_report is not last
            last = monitor.last_report
        text, is_well = growth.told("report")
        on = monitor.is_on
        monitor.close()
        dist.destroy_process_group()
        monitors.time = time
    hours = reports * 100 / 3600
    return f"{hours:.0f} h, {seen} reports, on: {on}; {text}", (
        is_well and on and monitor.last_report is not None
    )


PARTS: dict[str, tuple[Callable[[int, int], tuple[str, bool]], int]] = {
    "plans": (many_plans, 200),
    "threads": (many_threads, 8),
    "ranks": (many_ranks, 32),
    "reports": (long_watch, 864),
}


def main() -> int:
    """Run the parts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    for name, (_, count) in PARTS.items():
        parser.add_argument(f"--{name}", type=int, default=count)
    known = vars(parser.parse_args())
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    is_well = True
    for name, (part, _) in PARTS.items():
        if known[name]:
            start = time.monotonic()
            text, passed = part(known[name], known["seed"])
            is_well &= passed
            line = {"part": name, "count": known[name], "seed": known["seed"]}
            seconds = round(time.monotonic() - start)
            print(json.dumps({**line, "seconds": seconds, "found": text, "ok": passed}))
            sys.stdout.flush()
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())
