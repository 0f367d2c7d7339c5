from __future__ import annotations

import ast
import contextlib
import json
import logging
import math
import os
import re
import runpy
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torchrec.distributed.planner import Topology

from torchrec_neuroshard import NeuroShardPlanner
from torchrec_neuroshard.hardware.devices import cpu_name
from torchrec_neuroshard.planner.topology import CardTopology
from torchrec_neuroshard.plans.stored_plan import read_plan
from torchrec_neuroshard.tables.loaders import read_tables
from torchrec_neuroshard.tables.mlperf import mlperf_dlrm_v2

EXAMPLES = Path(__file__).parent.parent / "examples"


def run_main(name: str, *arguments: str) -> int:
    """Run an example with these options; return its exit status."""
    status: int = runpy.run_path(str(EXAMPLES / name))["main"]([*arguments])
    return status


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Ignore warnings, and undo what a script changes about logging."""
    level = logging.root.manager.disable
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # no bundle for this device; TorchRec's
            yield
    finally:
        logging.disable(level)


@pytest.mark.distributed
@pytest.mark.nightly
def test_training_saves_its_plan_and_the_loss_falls(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", str(EXAMPLES / "train_dlrm.py")]
    command += ["--max-rows", "2000", "--embedding-dim", "16", "--batch-size", "512"]
    saved = tmp_path / "plan.json"
    command += ["--steps", "30", "--save-plan", str(saved)]
    # A shipped bundle always gives the same plan, and so the same first weights.
    ended = subprocess.run(
        [*command, "--cost-model", "cpu"],
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    report, _, steps = ended.stdout.partition("steps   1 to  10: loss ")
    assert report.startswith(f"training on 2 ranks, each on {cpu_name()}\n")
    assert report.count("26 tables on 2 ranks, ") == 1  # only rank 0 prints
    assert report.endswith(f"saved the plan to {saved}\n")
    assert len(read_plan(saved).report().tables) == 26
    # Warnings and log lines of torch and TorchRec are shown.
    assert "FutureWarning" in ended.stderr and "torchrec" in ended.stderr
    losses = [float(line.split()[-1]) for line in steps.splitlines()]
    assert len(losses) == 3
    assert losses[-1] < min(losses[0], math.log(2)) - 0.1  # better than chance, too


@pytest.mark.parametrize("name", ["NVIDIA H200", "another GPU"])
def test_training_names_a_known_gpu_to_the_planner(name: str) -> None:
    find_topology = runpy.run_path(str(EXAMPLES / "train_dlrm.py"))["find_topology"]
    topology = find_topology(name, "cuda", 16, 8)
    assert (topology.world_size, topology.local_world_size) == (16, 8)
    assert topology.compute_device == "cuda"
    assert isinstance(topology, CardTopology) == (name == "NVIDIA H200")


def test_watched_training_writes_predicted_beside_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer

    lines, runs = tmp_path / "phases.jsonl", tmp_path / "runs"
    options = ("--lines", str(lines), "--tensorboard", str(runs), "--steps", "20")
    with quiet():
        runpy.run_path(str(EXAMPLES / "watch_training.py"))["main"](options)
    out = capsys.readouterr().out
    phases = "iteration index_comms fwd_compute fwd_comms bwd_comms bwd_compute"
    rows = [line.split() for line in out.splitlines()[1:]]
    assert [row[2] for row in rows if row[:2] == ["20", "all"]] == phases.split()
    assert float(next(r[5] for r in rows if r[1:3] == ["0", "fwd_compute"])) > 0
    shown = EventMultiplexer().AddRun(str(runs)).Reload()
    for kind in ("planned", "predicted", "measured"):
        points = shown.Scalars(str(runs), f"fwd_compute_ms/rank_0/{kind}")
        assert points[-1].step == 20 and points[-1].value > 0
    first = json.loads(lines.read_text().splitlines()[0])
    assert first["record"] == "plan" and first["memory_bytes"][0] > 0


def test_plan_for_gpus_places_all_columns_and_names_its_sources(
    capsys: pytest.CaptureFixture[str],
) -> None:
    few = ["--ranks", "4", "--ranks-per-node", "4"]
    assert run_main("plan_on_cpu.py", *few, "--verbose") == 0
    out = capsys.readouterr().out
    ranks = [line.split() for line in out.splitlines() if line[:5].strip().isdigit()]
    assert [int(cells[0]) for cells in ranks] == [0, 1, 2, 3]
    assert sum(int(cells[2].replace(",", "")) for cells in ranks) == 26 * 128
    assert run_main("plan_on_cpu.py", "--hbm-gb", "2") == 2
    assert "table 'cat_0' (num_embeddings=40000000" in capsys.readouterr().err


def test_profiles_survive_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script, path = "profile_my_data.py", tmp_path / "profiles.json"
    few = ["--num-batches", "2", "--batch-size", "256", "--max-rows", "10000"]
    assert run_main(script, *few, "--save", str(path)) == 0
    made = capsys.readouterr().out
    assert run_main(script, "--load", str(path)) == 0
    assert capsys.readouterr().out == made and "cat_20" in made
    path.write_text('{"cat_0": {"batch_size": 8, "num_lookups": 3, "odd": 1}}')
    assert run_main(script, "--load", str(path)) == 2
    assert "invalid feature profile" in capsys.readouterr().err


@pytest.mark.nightly
def test_tables_that_do_not_fit_get_caches(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "caches.html"
    options = ("--seconds", "0.3", "--html", str(page))
    with quiet():
        assert run_main("host_memory_caches.py", *options) == 0
    out = capsys.readouterr().out
    factors = re.findall(r"cache_load_factor ([\d.]+)", out)
    assert factors and len(factors) == out.count("(fused_uvm_caching)")
    (share,) = re.findall(r"this plan takes .* \(([-+.\d]+)%\)", out)
    assert float(share) < -5
    assert "every cache 0.2" in page.read_text(encoding="utf-8")


def test_notebook_runs_and_shows_its_reports(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = (EXAMPLES / "read_a_plan.ipynb").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    shown = {}
    for cell in json.loads(text)["cells"]:
        if cell["cell_type"] != "code":
            continue
        assert not cell["outputs"] and cell["execution_count"] is None
        code = ast.parse("".join(cell["source"]))
        last = code.body.pop() if isinstance(code.body[-1], ast.Expr) else None
        with quiet():
            exec(compile(code, cell["id"], "exec"), names)
            if isinstance(last, ast.Expr):
                value = ast.Expression(last.value)
                shown[cell["id"]] = eval(compile(value, cell["id"], "eval"), names)
    assert [value._repr_html_()[:7] for value in shown.values()] == ["<iframe"] * 2
    assert shown["report"].num_tables == 8 and len(shown["report"].ranks) == 4
    assert shown["compare"].first_name == "TorchRec's plan"
    assert capsys.readouterr().out.count("rank ") == 4


README = (EXAMPLES.parent / "README.md").read_text(encoding="utf-8")


@pytest.mark.filterwarnings("ignore:no cost model was measured on:UserWarning")
def test_readme_changes_two_lines_of_a_training_script() -> None:
    code = README.split("```diff\n", 1)[1].split("```", 1)[0]
    lines = [line[1:] for line in code.splitlines() if line[:1] in ("+", " ")]
    made: dict[str, Any] = {"topology": Topology(2, "cpu"), "constraints": {}}
    exec("\n".join(lines[:-1]), made)
    assert type(made["planner"]) is NeuroShardPlanner
    assert lines[-1].startswith("plan = planner.collective_plan(model, sharders, ")


def test_the_table_file_is_mlperfs() -> None:
    tables = read_tables(EXAMPLES / "dlrm_v2.csv").tables
    fields = ("name", "num_embeddings", "embedding_dim", "pooling_factor")
    assert [[getattr(t, f) for f in fields] for t in tables] == [
        [getattr(t, f) for f in fields] for t in mlperf_dlrm_v2()
    ]
