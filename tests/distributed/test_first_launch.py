"""First launches over gloo: measured and kept, and harmless where that fails."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torchrec.distributed import DistributedModelParallel

from tests.builders import CPU, bag_config, bag_sharders, bags, make_planner
from tests.distributed.ranks import TWO_NODES, Jobs, OfJob, Results
from tests.distributed.unsharded import draw_batch
from torchrec_neuroshard.bundles import cache
from torchrec_neuroshard.bundles.descriptions import COMMS_BUNDLE
from torchrec_neuroshard.bundles.folders import PRETRAINED

pytestmark = pytest.mark.distributed

LOCAL_BATCH = 64
SIZES = [(1000, 16), (3000, 32), (500, 8), (2000, 64)]

MEASURES: dict[str, Any] = {
    "cost_model": "measure",
    "comms_model": None,
    "calibrate": 1.0,
}
SHIPPED = str(PRETRAINED / "cpu_epyc")
COPIES = f"""
import os, shutil, sys, time
time.sleep(0.3)
if os.environ["RANK"] == "0":
    open(os.environ["NEUROSHARD_CACHE"] + ".measured", "a").write("x")
    shutil.copytree({SHIPPED!r}, sys.argv[1] + "/bundle")
"""
"""Program in place of the measurement: it copies a bundle."""

ABORTS = "import os; os.abort()"
DAILY = ("twice", "aborts")
"""The jobs of the tests that are not nightly."""


def launch(pg: dist.ProcessGroup, *, trains: bool = True) -> dict[str, Any]:
    """Plan as a new process would, and train a step."""
    planner = make_planner(
        pg.size(),
        batch_size=LOCAL_BATCH,
        **MEASURES,
    )
    model = bags(*(bag_config(i, *size) for i, size in enumerate(SIZES)), device=CPU)
    sharders = bag_sharders()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plan = planner.collective_plan(model, sharders, pg)
    texts = [str(w.message) for w in caught]
    found: dict[str, Any] = {
        "warnings": [t for t in texts if "first launch" in t or "stored" in t],
        "kernels": planner.costs.cost_model.source,
        "collectives": planner.costs.comms_model.source,
        "noted": " ".join(planner.last_result.warnings if planner.last_result else ()),
    }
    if trains:
        sharded = DistributedModelParallel(
            model, device=CPU, plan=plan, sharders=sharders
        )
        keys = [f"f{i}" for i in range(len(SIZES))]
        batch = draw_batch(keys, LOCAL_BATCH, 500, dist.get_rank())
        loss = sharded(batch).values().square().mean()
        loss.backward()
        found["loss"] = float(loss)
    return found


def in_cache(folder: Path, program: str | None, action: Any) -> dict[str, Any]:
    """Run with a cache of its own and, if given, a program in place of measuring."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NEUROSHARD_CACHE", str(folder))
        # However busy and noisy the machine is under the tests.
        patch.setattr("torchrec_neuroshard.planner.first_launch.GRACE_S", 600.0)
        part = "torchrec_neuroshard.bundles.measure_job"
        if program is None:
            patch.setattr(f"{part}.judge", lambda *_: None)
        else:
            patch.setattr(f"{part}.PROGRAM", ("-c", program))
        return dict(action())


def run_twice(folder: Path) -> dict[str, Any]:
    """A launch that measures, and the one after it."""
    pg = dist.group.WORLD
    assert pg is not None
    first, second = launch(pg), launch(pg)
    dist.barrier()
    entries = cache.entries()
    return {
        "first": first,
        "second": second,
        "entries": [e.folder.name for e in entries],
        "collectives": [COMMS_BUNDLE.is_in(e.folder) for e in entries],
        "left": sorted(
            p.name for p in folder.iterdir() if p.name.startswith((".new", ".old"))
        ),
    }


def run_two_jobs(folder: Path) -> dict[str, Any]:
    """Two groups of ranks plan at once; each is a job."""
    groups: list[Any] = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = groups[dist.get_rank() // 2]
    found = launch(mine, trains=False)
    dist.barrier()
    measured = Path(f"{folder}.measured").read_text()
    return {**found, "measured": len(measured), "entries": len(cache.entries())}


def rank_jobs(num_nodes: int, rank: int, folder: Path) -> Jobs:
    world = dist.group.WORLD
    assert world is not None
    if num_nodes == TWO_NODES:
        path = folder / "two-jobs"
        return {"two jobs": lambda: in_cache(path, COPIES, lambda: run_two_jobs(path))}
    path = folder / "measured"
    jobs: Jobs = {"twice": lambda: in_cache(path, None, lambda: run_twice(path))}
    jobs["aborts"] = lambda: in_cache(folder / "aborts", ABORTS, lambda: launch(world))
    closed = folder / "closed"
    closed.touch()
    copies = COPIES.replace("open(os", "0 and open(os")
    jobs["unwritable"] = lambda: in_cache(
        closed / "cache", copies, lambda: launch(world)
    )
    return jobs


def test_first_launch_measures_and_the_next_one_remembers(results: OfJob) -> None:
    for found in results("twice"):
        (name,) = found["entries"]
        assert "-2x-" in name and found["collectives"] == [True]
        assert found["left"] == []
        for launched in (found["first"], found["second"]):
            assert launched["warnings"] == []
            assert 0 < launched["loss"] < 1e6
        # Only the first rank plans; it looks nothing up but the cache.
    first, second = (results("twice")[0][n] for n in ("first", "second"))
    assert first["kernels"] == second["kernels"] == "measured"
    assert first["collectives"] == second["collectives"]
    assert first["collectives"] == "measured"


def test_no_failure_reaches_the_job(results: OfJob) -> None:
    first, *others = results("aborts")
    (text,) = first["warnings"]
    assert "measuring at the first launch failed (" in text
    assert "process exited with code -6" in text
    assert "not measured" in first["kernels"]
    assert text in first["noted"]
    for found in (first, *others):
        assert 0 < found["loss"] < 1e6


@pytest.mark.nightly
def test_what_cannot_be_kept_serves_this_launch(results: OfJob) -> None:
    first, second = results("unwritable")
    (text,) = first["warnings"]
    assert "the bundle measured at the first launch could not be stored" in text
    assert first["kernels"] == "measured"
    assert first["loss"] > 0 and second["loss"] > 0


@pytest.mark.nightly
def test_two_jobs_on_one_empty_cache(ranks: Results) -> None:
    of_jobs = ranks(__name__, TWO_NODES, "two jobs")
    for found in of_jobs:
        assert found["warnings"] == [] and found["entries"] == 1
        assert found["measured"] == 1
    assert of_jobs[0]["kernels"] == of_jobs[2]["kernels"] == "measured"
