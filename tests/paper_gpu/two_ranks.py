"""What each of two ranks does with its paper GPU; see `run_rank`."""

from __future__ import annotations

import itertools
import json
import logging
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.builders import CPU
from tests.paper_gpu.pipelines import PIPELINES, journal_of, losses_on

WORLD_SIZE = 2


def run_rank(rank: int, parts: Sequence[str], folder: Path) -> None:
    """Do some parts, and write what was found to FOLDER/RANK.json."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    places = {"RANK": rank, "LOCAL_RANK": rank}
    places |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), WORLD_SIZE)
    os.environ.update({name: str(value) for name, value in places.items()})
    gpu, stores = torch.device("cuda", rank), itertools.count()
    torch.cuda.set_device(gpu)

    def in_group(backend: str, action: Any) -> Any:
        store = f"file://{folder}/store{next(stores)}"
        dist.init_process_group(
            backend, init_method=store, rank=rank, world_size=WORLD_SIZE
        )
        found = action()
        dist.destroy_process_group()
        return found

    def journals() -> dict[str, list[str]]:
        return {
            f"{name} {order}": journal_of(
                name, gpu, lookups_first=order == "lookups first"
            )
            for name in PIPELINES
            for order in ("lookups last", "lookups first")
        }

    found: dict[str, Any] = {}
    if "losses" in parts:
        found["losses"] = in_group("nccl", lambda: losses_on(gpu))
        found["losses on CPUs"] = in_group("gloo", lambda: losses_on(CPU))
    if "journals" in parts:
        found["journals"] = in_group("nccl", journals)
    (folder / f"{rank}.json").write_text(json.dumps(found))
