"""Gloo ranks that the tests of this folder share.

Starting a process costs more than what most tests have it do. So the ranks of a group
are started once in a session and run the jobs of every test module that is collected.
"""

from __future__ import annotations

import importlib
import json
import logging
import multiprocessing
import os
import traceback
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

NODE_SIZE = 2
ONE_NODE, TWO_NODES = 1, 2
"""Groups are named by their number of nodes."""

Jobs = dict[str, Callable[[], dict[str, Any]]]
"""What a module's `rank_jobs(num_nodes, rank, folder)` returns, by name. The jobs are
the same on all ranks, return what JSON can hold, and leave the ranks in step."""

Results = Callable[[str, int, str], list[dict[str, Any]]]
"""Module, number of nodes, job -> what each rank returned."""

OfJob = Callable[[str], list[dict[str, Any]]]
"""Job -> what each rank returned."""


def message_of(action: Callable[[], Any]) -> str:
    """Return what an action raises, as text that a rank can send."""
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def run_ranks(
    num_nodes: int, modules: Sequence[str], folder: Path, is_nightly: bool
) -> list[dict[str, Any]]:
    """Run the modules' jobs; return each rank's results by module and job.

    Only a nightly run does all jobs of a module that names its `DAILY` ones.
    """
    world_size = num_nodes * NODE_SIZE
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(
            target=_rank_main, args=(num_nodes, rank, modules, str(folder), is_nightly)
        )
        for rank in range(world_size)
    ]
    with pytest.MonkeyPatch.context() as patch:
        # TorchRec numbers the messages of its resharding by hashes of strings.
        patch.setitem(os.environ, "PYTHONHASHSEED", "0")
        for process in processes:
            process.start()
    try:
        for _ in range(400):  # seconds, not counting time that it stood still
            alive = [process for process in processes if process.is_alive()]
            if not alive:
                break
            alive[0].join(timeout=1.0)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()
    found = [folder / f"{rank}.json" for rank in range(world_size)]
    return [json.loads(p.read_text()) if p.exists() else {} for p in found]


def _rank_main(
    num_nodes: int, rank: int, modules: Sequence[str], folder: str, is_nightly: bool
) -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    os.environ["LOCAL_WORLD_SIZE"] = str(NODE_SIZE)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=num_nodes * NODE_SIZE,
        # Longer than a rank may live: a rank that waits in vain fails the tests.
        timeout=timedelta(hours=1),
    )
    results: dict[str, Any] = {name: {} for name in modules}
    for name in modules:
        module = importlib.import_module(name)
        jobs = module.rank_jobs(num_nodes, rank, Path(folder))
        for job, action in jobs.items():
            if not is_nightly and job not in getattr(module, "DAILY", jobs):
                continue
            try:
                results[name][job] = action()
            except Exception:
                # The other ranks may wait for this one: report and end all.
                results["error"] = f"in {name}, '{job}': {traceback.format_exc()}"
                return
            finally:
                Path(folder, f"{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()
