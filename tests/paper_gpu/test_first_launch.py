"""A first launch of ranks that each see their own GPU alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.nightly

RANK = """
import json, os, sys, warnings
import torch.distributed as dist
from torchrec.distributed.planner import Topology
from tests.builders import META, bag_config, bag_sharders, bags, make_planner
from torchrec_neuroshard.bundles import cache

dist.init_process_group("gloo")
planner = make_planner(
    topology=Topology(2, "cuda", local_world_size=2),
    cost_model="measure", comms_model=None, calibrate=1.0,
)
model = bags(*(bag_config(i, 1000, 16) for i in range(4)), device=META)
warnings.simplefilter("ignore")
planner.collective_plan(model, bag_sharders(), dist.group.WORLD)
found = [n.text for n in planner.costs.notes if n.code == "first-launch"]
found += [planner.costs.cost_model.source, *(e.key.device for e in cache.entries())]
with open(f"{sys.argv[1]}/{dist.get_rank()}.json", "w") as file:
    json.dump(found, file)
"""


def test_ranks_that_see_one_gpu_each_measure(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", str(tmp_path / "rank.py"), str(tmp_path)]
    root = Path(__file__).parents[2]
    settings = {
        "PAPER_CUDA_DEVICES": "1",
        "NEUROSHARD_CACHE": str(tmp_path / "cache"),
        "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run(
        command,
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "0.json").read_text())
    assert "sets of your tables measured" in done.stderr, (found, done.stderr[-3000:])
    assert "collectives measured" in done.stderr, (found, done.stderr[-3000:])
