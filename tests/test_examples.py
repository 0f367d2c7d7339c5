from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from torchrec_neuroshard import FeatureProfile
from torchrec_neuroshard.planner.links import GB_PER_S

EXAMPLES = Path(__file__).parent.parent / "examples"
PAIRS, BLOCK, DIM, BATCH = 5, 5, 16, 128
PLANNERS = ("torchrec", "neuroshard")


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # its dataclasses look themselves up here
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True)
class Demo:
    results: dict[str, Any]
    stdout: str


def run_demo(folder: Path, num_ranks: int, pairs: int) -> Demo:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(num_ranks), str(EXAMPLES / "train_dlrm.py")]
    settings = {
        "device": "cpu",
        "max-rows": 2_000,
        "embedding-dim": DIM,
        "min-partition": 4,
        "batch-size": BATCH,
        "bottom-layers": "32",
        "top-layers": "32",
        "pairs": pairs,
        "block-iterations": BLOCK,
    }
    for name, value in settings.items():
        command += [f"--{name}", str(value)]
    ended = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return Demo(json.loads((folder / "demo.json").read_text()), ended.stdout)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    return run_demo(tmp_path_factory.mktemp("demo"), 2, PAIRS)


@pytest.mark.distributed
def test_demo_runs_on_one_rank(tmp_path: Path) -> None:
    results = run_demo(tmp_path, 1, 2).results
    for planner in PLANNERS:
        plan = results["planners"][planner]["plan"]
        assert {s["rank"] for e in plan.values() for s in e["shards"]} == {0}
        assert len(results["planners"][planner]["measured"]["fwd_ms"]) == 1
    assert results["environment"]["world_size"] == 1
    assert results["all_to_all_gb_per_s"] > 0


@pytest.mark.distributed
def test_demo_loss_falls_and_is_the_same_for_both_plans(demo: Demo) -> None:
    stock, ours = (demo.results["planners"][p]["loss"]["iterations"] for p in PLANNERS)
    assert len(stock) == len(ours) == PAIRS * BLOCK
    # Same weights and batch: equal but for the order of additions. Later, row-wise
    # Adagrad keeps one state per shard, so another split trains a little differently.
    assert ours[0] == pytest.approx(stock[0], abs=1e-6)
    assert ours[:BLOCK] == pytest.approx(stock[:BLOCK], abs=1e-2)
    assert stock[0] == pytest.approx(math.log(2), abs=0.1)
    for planner in PLANNERS:
        loss = demo.results["planners"][planner]["loss"]
        assert loss["end"] < loss["start"] - 0.02


@pytest.mark.distributed
@pytest.mark.parametrize("planner", PLANNERS)
def test_demo_plan_places_every_column_once(demo: Demo, planner: str) -> None:
    plan = demo.results["planners"][planner]["plan"]
    assert sorted(plan) == sorted(t["name"] for t in demo.results["tables"])
    for entry in plan.values():
        shards = sorted(entry["shards"], key=lambda s: s["offset"])
        columns = [
            c for s in shards for c in range(s["offset"], s["offset"] + s["width"])
        ]
        assert columns == list(range(DIM))
        assert {s["rank"] for s in shards} <= {0, 1}


@pytest.mark.distributed
@pytest.mark.parametrize("planner", PLANNERS)
def test_demo_predicts_and_measures_each_rank(demo: Demo, planner: str) -> None:
    result = demo.results["planners"][planner]
    predicted, measured = result["predicted"], result["measured"]
    assert len(predicted["ranks"]) == len(measured["fwd_raw_ms"]) == 2
    path = sum(
        max(r[phase] for r in stage["ranks"])
        for stage in predicted["stages"]
        for phase in stage["ranks"][0]
    )
    assert predicted["critical_path_ms"] == pytest.approx(path)
    assert predicted["iteration_ms"] == pytest.approx(path + demo.results["dense_ms"])
    assert measured["num_timed"] == PAIRS * (BLOCK - 1)
    for fwd, bwd in zip(measured["fwd_raw_ms"], measured["bwd_raw_ms"], strict=True):
        assert 0 < fwd and 0 < bwd
        assert fwd + bwd < measured["iteration_raw_ms"]


@pytest.mark.distributed
def test_demo_judges_both_plans_alike(demo: Demo) -> None:
    stock, ours = (demo.results["planners"][p] for p in PLANNERS)
    search = ours["search"]
    # The planner's own account and the demo's simulator must agree.
    assert ours["predicted"]["critical_path_ms"] == pytest.approx(
        search["lower_bound_ms"] * (1 + search["gap"]), rel=1e-6
    )
    assert stock["search"] == {}
    assert (
        ours["predicted"]["critical_path_ms"]
        <= stock["predicted"]["critical_path_ms"] * 1.001
    )


@pytest.mark.distributed
def test_demo_prints_what_it_writes(demo: Demo) -> None:
    assert demo.stdout.count("wrote demo.json") == 1  # one rank speaks
    for planner in PLANNERS:
        loss = demo.results["planners"][planner]["loss"]
        assert f"loss {loss['start']:.4f} -> {loss['end']:.4f}" in demo.stdout
        assert f"{planner}: planned in" in demo.stdout
    for key in ("environment", "reference", "speedup", "config", "cost_model"):
        assert demo.results[key]
    profile = demo.results["tables"][20]["profile"]
    assert profile["batch_size"] == 2 * BATCH  # what both ranks read in one iteration
    assert profile["num_lookups"] == 100 * 2 * BATCH


@pytest.fixture
def train_dlrm(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return load("train_dlrm")


def set_ranks(monkeypatch: pytest.MonkeyPatch, world_size: int) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", str(world_size))


def test_demo_says_how_to_start_it(
    train_dlrm: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train_dlrm.main([]) == 2
    assert "start the ranks with 'torchrun" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.device_count() >= 64, reason="has the GPUs")
def test_demo_refuses_more_ranks_than_gpus(
    train_dlrm: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    set_ranks(monkeypatch, 64)
    assert train_dlrm.main(["--device", "cuda"]) == 2
    assert "64 ranks on this machine need as many GPUs" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--embedding-dim", "30"], "must be a multiple of 4.*got 30"),
        (["--block-iterations", "1"], "at least 2 .*got 1"),
        (["--batch-size", "0"], "--batch-size must be at least 1, got 0"),
        (["--top-layers", "64,wide"], "list of sizes such as 256,128, not '64,wide'"),
        (["--all-to-all-gb-per-s", "-1"], "at least 0, got -1.0"),
        (["--device", "tpu"], "auto, cpu or cuda, not 'tpu'"),
    ],
)
def test_demo_checks_its_settings(
    train_dlrm: ModuleType, arguments: list[str], message: str
) -> None:
    with pytest.raises(train_dlrm.DemoError, match=message):
        train_dlrm.DemoConfig.from_arguments(arguments)


def test_clicks_can_be_learnt_from_dense_features_and_ids(
    train_dlrm: ModuleType,
) -> None:
    config = train_dlrm.DemoConfig(batch_size=4_096, max_rows=200)
    tables = train_dlrm.mlperf_dlrm_v2(max_rows=200, embedding_dim=4)[:8]
    ranks = train_dlrm.Ranks(
        rank=0,
        world_size=2,
        local_world_size=2,
        device=torch.device("cpu"),
        backend="gloo",
    )
    stream = train_dlrm.ClickStream(tables, config, ranks)
    batch, again = stream.batch(3), stream.batch(3)
    assert torch.equal(batch.dense_features, again.dense_features)
    assert torch.equal(batch.sparse_features.values(), again.sparse_features.values())
    assert torch.equal(batch.labels, again.labels)
    assert not torch.equal(batch.labels, stream.batch(4).labels)

    ids = batch.sparse_features.to_dict()["cat_5"].values()  # one of 3 ids per sample
    one_hot = torch.nn.functional.one_hot(ids, 3).float()
    rates = (one_hot * batch.labels[:, None]).sum(0) / one_hot.sum(0)
    dense = torch.linalg.lstsq(
        batch.dense_features, batch.labels.float()[:, None] - 0.5
    ).solution
    explained = (batch.dense_features @ dense).squeeze(1)
    labels = batch.labels.bool()
    assert explained[labels].mean() > explained[~labels].mean() + 0.1
    assert rates.max() - rates.min() > 0.05


def block(
    module: ModuleType, planner: str, pair: int, ref_ms: float, times: list[float]
) -> Any:
    steps = tuple(
        {"iteration_ms": 10 * t, "fwd_ms": t, "bwd_ms": 2 * t, "loss": t} for t in times
    )
    return module.Block(planner=planner, pair=pair, ref_ms=ref_ms, steps=steps)


def test_times_are_scaled_by_the_reference_beside_them(train_dlrm: ModuleType) -> None:
    # Rank 1 is twice as slow by the clock, and so is its reference: same scaled times.
    # The first iteration of a block (1000) is left out.
    fast = [block(train_dlrm, "a", i, 4.0, [1000.0, 3.0, 3.0]) for i in range(2)]
    slow = [block(train_dlrm, "a", i, 8.0, [1000.0, 6.0, 6.0]) for i in range(2)]
    other = [block(train_dlrm, "b", 0, 4.0, [1000.0, 9.0, 9.0])]
    measured = train_dlrm.summarise("a", [[*fast, *other], [*slow, *other]], 2.0)
    assert measured.fwd_raw_ms == (3.0, 6.0) and measured.bwd_raw_ms == (6.0, 12.0)
    assert measured.fwd_ms == (1.5, 1.5) and measured.bwd_ms == (3.0, 3.0)
    assert measured.compute_critical_path_ms == 4.5
    assert measured.iteration_raw_ms == 60.0  # the slowest rank's
    assert measured.iteration_ms == 60.0 * (2 / 4 + 2 / 8) / 2
    assert measured.num_timed == 4
    assert measured.loss == (1000.0, 4.5, 4.5) * 2
    unscaled = train_dlrm.summarise("a", [fast, slow], 0.0)  # a GPU
    assert unscaled.fwd_ms == unscaled.fwd_raw_ms


def test_critical_path_takes_the_slowest_rank_of_each_phase(
    train_dlrm: ModuleType,
) -> None:
    def steps(fwd: float, bwd: float) -> Any:
        step = {"iteration_ms": 50.0, "fwd_ms": fwd, "bwd_ms": bwd, "loss": 0.5}
        return train_dlrm.Block(planner="a", pair=0, ref_ms=1.0, steps=(step, step))

    measured = train_dlrm.summarise("a", [[steps(5.0, 1.0)], [steps(2.0, 8.0)]], 1.0)
    assert measured.compute_critical_path_ms == 13.0


def test_speedup_is_of_pairs_of_blocks(train_dlrm: ModuleType) -> None:
    ratio = train_dlrm.speedup([2.0, 4.0, 9.0], [1.0, 4.0, 3.0])
    assert ratio == {
        "median": 2.0,
        "low_quartile": 1.5,
        "high_quartile": 2.5,
        "num_pairs": 3,
    }


def test_profiles_of_the_ranks_are_averaged(train_dlrm: ModuleType) -> None:
    def profile(lookups: float, std: float, once: float) -> FeatureProfile:
        return FeatureProfile(
            batch_size=8,
            num_lookups=lookups,
            pooling_std=std,
            access_histogram=(once, 1.0, *[0.0] * 15),
        )

    mine, theirs = profile(6.0, 3.0, 4.0), profile(10.0, 1.0, 8.0)

    class TwoRanks:
        def gather(self, value: object) -> list[object]:
            return [value, {"f": theirs}]

    merged = train_dlrm.gather_profiles({"f": mine}, TwoRanks())
    assert merged == {"f": profile(8.0, math.sqrt(5.0), 6.0)}


@pytest.fixture(scope="module")
def plan_on_cpu() -> Iterator[ModuleType]:
    yield load("plan_on_cpu")


def test_plan_for_gpus_places_all_columns_and_names_its_sources(
    plan_on_cpu: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan_on_cpu.main(["--ranks", "4", "--ranks-per-node", "4"]) == 0
    out = capsys.readouterr().out
    ranks = [line.split() for line in out.splitlines() if line[:5].strip().isdigit()]
    assert [int(cells[0]) for cells in ranks] == [0, 1, 2, 3]
    assert sum(int(cells[2].replace(",", "")) for cells in ranks) == 26 * 128
    assert "4 x H100" in out and "planned in" in out
    assert "lower bound" in out and "gap" in out
    # 100 of the 214 ids per sample read this table: no rank can take it whole.
    assert "\ncat_20: " in out and "in one piece, at best on rank" in out
    if not torch.cuda.is_available():
        assert "compute: physical estimate from bandwidth, not measured" in out
        assert "- no cost model was measured on" in out


def test_plan_for_gpus_uses_the_figures_of_the_data_sheet(
    plan_on_cpu: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    planners = []

    class Remembered(plan_on_cpu.NeuroShardPlanner):  # type: ignore[name-defined]
        def __init__(self, **arguments: Any) -> None:
            super().__init__(**arguments)
            planners.append(self)

    monkeypatch.setattr(plan_on_cpu, "NeuroShardPlanner", Remembered)
    assert plan_on_cpu.main(["--ranks", "4", "--ranks-per-node", "4"]) == 0
    (planner,) = planners
    topology = planner._topology
    assert topology.hbm_mem_bw * GB_PER_S == pytest.approx(3_350)
    assert topology.intra_host_bw * GB_PER_S == pytest.approx(450)
    assert topology.inter_host_bw * GB_PER_S == pytest.approx(50)


def test_plan_for_gpus_says_why_there_is_none(
    plan_on_cpu: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan_on_cpu.main(["--hbm-gb", "2"]) == 2
    assert "table 'cat_0' (num_embeddings=40000000" in capsys.readouterr().err
    assert plan_on_cpu.main(["--cost-model", "nowhere"]) == 2
    assert "unknown cost model 'nowhere'" in capsys.readouterr().err


@pytest.fixture(scope="module")
def profile_my_data() -> Iterator[ModuleType]:
    yield load("profile_my_data")


def test_profiles_survive_the_file(
    profile_my_data: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "profiles.json")
    arguments = ["--num-batches", "2", "--batch-size", "256", "--max-rows", "10000"]
    assert profile_my_data.main([*arguments, "--save", path]) == 0
    made = capsys.readouterr().out
    assert profile_my_data.main(["--load", path]) == 0
    assert capsys.readouterr().out == made
    cells = next(line for line in made.splitlines() if "cat_20" in line).split()
    assert cells[1:3] == ["512", "100.00"]
    assert cells[4] == f"{512 * 100:,}"
    assert float(cells[6]) == pytest.approx(
        512 * 100 / int(cells[5].replace(",", "")), abs=0.05
    )
    assert "NeuroShardPlanner(..., profiles=profiles)" in made

    assert profile_my_data.main(["--load", path, "--at-batch-size", "128"]) == 0
    thinned = capsys.readouterr().out
    cells_128 = next(line for line in thinned.splitlines() if "cat_20" in line).split()
    assert cells_128[1] == "128" and cells_128[4] == "12,800"
    assert float(cells_128[6]) < float(cells[6])  # fewer samples, less reuse


def test_bad_profile_files_are_named(
    profile_my_data: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert profile_my_data.main(["--load", str(tmp_path / "none.json")]) == 2
    assert "none.json" in capsys.readouterr().err
    bad = tmp_path / "bad.json"
    bad.write_text('{"cat_0": {"batch_size": 8, "num_lookups": 3, "odd": 1}}')
    assert profile_my_data.main(["--load", str(bad)]) == 2
    assert "not a feature profile" in capsys.readouterr().err


def test_readme_example_prints_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    text = (EXAMPLES.parent / "README.md").read_text(encoding="utf-8")
    code = text.split("```python\n", 1)[1].split("```", 1)[0]
    assert len([line for line in code.splitlines() if line]) <= 12
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # no bundle for this device; TorchRec's own
        exec(compile(code, "README.md", "exec"), {})
    out = capsys.readouterr().out
    for table in ("user", "item", "shop", "city"):
        assert f"\n{table} " in out
    assert "500000" in out and "fused" in out
