"""`neuroshard plan`, `show` and `diff`: files in, what people look at out."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import ParameterConstraints

from tests.builders import bag_sharders, make_ebc
from torchrec_neuroshard import load_plan
from torchrec_neuroshard.cli import main
from torchrec_neuroshard.planner.cli.given_models import (
    build_model,
    devices_named,
    read_constraints,
    read_model,
)
from torchrec_neuroshard.planner.options.table_reader import TableReader
from torchrec_neuroshard.planner.planners import NeuroShardPlanner
from torchrec_neuroshard.profiles import FeatureProfile
from torchrec_neuroshard.tables import TableConfig

TABLES = (
    "name,num_embeddings,embedding_dim,pooling_factor\n"
    "user,200000,64,20\nitem,100000,32,\nshop,1000,16,3\n"
)
QUICK = ["--ranks", "2", "--batch-size", "256", "--seconds", "0.2"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the command runs, with a file of tables."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "t.csv").write_text(TABLES)
    return tmp_path


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What is said of arguments that cannot be used."""
    assert main(list(arguments)) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("neuroshard: error: ") and not printed.out
    return printed.err


@pytest.mark.filterwarnings("ignore:no cost model was measured")
def test_tables_are_planned_shown_and_compared(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = ["--out", "a.json", "--html", "a.html", "--json", "a.report.json"]
    assert main(["plan", "t.csv", *QUICK, "--compare", "--rehearse", *files]) == 0
    printed = capsys.readouterr()
    assert not printed.err
    assert "t.csv: planned for 2 x h100" in printed.out
    assert "of GiB  index_comms" in printed.out
    assert "TorchRec's own plan" in printed.out
    assert "every rank can run it" in printed.out
    assert printed.out.count("- no cost model was measured on NVIDIA H100") == 1
    found = json.loads((folder / "a.report.json").read_text())
    assert {t["table"] for t in found["plan"]["tables"]} == {"user", "item", "shop"}
    saved = found["compared"]["saved_ms"]
    path_ms = found["plan"]["critical_path_ms"]
    assert found["compared"]["first"]["critical_path_ms"] == pytest.approx(
        saved + path_ms
    )
    assert "saves" in (folder / "a.html").read_text()

    # What is stored is what a job loads, for the model that the tables make.
    given = read_model("t.csv")
    planner = NeuroShardPlanner(
        topology=devices_named("h100", 2),
        batch_size=256,
        constraints=dict(given.constraints),
        cost_model="h100",
        stats=[],
    )
    load_plan("a.json", model=given.module, planner=planner)
    assert planner.report().critical_path_ms == pytest.approx(path_ms)

    assert main(["show", "a.json", "--json", "shown.json"]) == 0
    out = capsys.readouterr().out
    assert "made for 2 ranks, 2 per node (cuda); samples per rank: 256" in out
    assert f"critical path {path_ms:.3f} ms" in out and "user (200,000 x 64)" in out
    shown = json.loads((folder / "shown.json").read_text())
    assert sum(r["used_bytes"] for r in shown["ranks"]) >= 4 * 200_000 * 64

    [at] = next(t["ranks"] for t in found["plan"]["tables"] if t["table"] == "user")
    (folder / "where.json").write_text(json.dumps({"pin": {"user": [1 - at]}}))
    pinned = ["--placement", "where.json", "--out", "b.json"]
    assert main(["plan", "t.csv", *QUICK, *pinned]) == 0
    capsys.readouterr()
    assert main(["diff", "a.json", "b.json", "--json", "d.json"]) == 0
    out = capsys.readouterr().out
    moved = json.loads((folder / "d.json").read_text())
    [user] = [m for m in moved["moves"] if m["table"] == "user"]
    assert user["after"] == f"table_wise, rank {1 - at}"
    assert f"user: {user['before']} -> {user['after']}" in out
    paths = [moved[name]["critical_path_ms"] for name in ("first", "second")]
    assert moved["saved_ms"] == pytest.approx(paths[0] - paths[1])
    assert f"{paths[1]:.3f} ms" in out.splitlines()[0]
    assert main(["diff", "a.json", "a.json"]) == 0
    out = capsys.readouterr().out
    assert f"both take {paths[0]:.3f} ms" in out and "all 3 tables lie alike" in out


def test_a_function_may_give_sharders_and_constraints(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def everything() -> Any:
        only = ParameterConstraints(sharding_types=["table_wise"])
        return {"t0": only}, make_ebc([(100, 16)]), bag_sharders()

    module = ModuleType("my_models")
    vars(module).update(
        everything=everything,
        alone=lambda: make_ebc([(100, 16)]),
        nothing=lambda: 3,
        broken=lambda: 1 / 0,
        others=lambda: (make_ebc([(100, 16)]), [EmbeddingCollectionSharder()]),
    )
    monkeypatch.setitem(sys.modules, "my_models", module)
    found = read_model("my_models:everything")
    assert list(found.constraints) == ["t0"]
    assert [type(s) for s in found.sharders] == [EmbeddingBagCollectionSharder]
    alone = read_model("my_models:alone")
    assert alone.num_tables == 1 and len(alone.sharders) > 1
    for name, message in (
        ("nothing", "must return a torch.nn.Module.*got int"),
        ("broken", "raises ZeroDivisionError: division by zero; NEUROSHARD_DEBUG=1"),
        ("brokn", "has no function 'brokn'; did you mean 'broken'"),
        ("others", "no sharder is for a module of the EmbeddingBagCollection"),
    ):
        with pytest.raises(ValueError, match=message):
            read_model(f"my_models:{name}")
    with pytest.raises(ValueError, match=r"did you mean 'a\.b:make'"):
        read_model("./a/b.py:make")


def test_files_of_tables_say_what_profiles_do() -> None:
    """Features of one table share its lookups, and add up to them."""
    histogram = (6.0, 3.0, *[0.0] * 15)
    profile = FeatureProfile(
        batch_size=8, num_lookups=12.0, access_histogram=histogram, pooling_std=0.5
    )
    table = TableConfig(
        name="a",
        num_embeddings=100,
        embedding_dim=8,
        pooling_factor=1.5,
        num_features=2,
        profile=profile,
        optimizer="adam",
        data_type="fp16",
        weighted=True,
    )
    plain = TableConfig(name="b", num_embeddings=10, embedding_dim=4, optimizer="sgd")
    given = build_model([table, plain])
    reader = TableReader(
        world_size=1, constraints=given.constraints, profiles=given.profiles
    )
    planner = NeuroShardPlanner(
        topology=devices_named("cpu", 1),
        batch_size=8,
        cost_model="cpu",
        constraints=dict(given.constraints),
        profiles=given.profiles,
        stats=[],
    )
    options = planner.enumerator.enumerate(given.module, given.sharders)
    read = {o.name: reader.table(o) for o in options}
    assert read["a"].profile is not None
    assert read["a"].profile.access_histogram == pytest.approx(histogram)
    assert read["a"].pooling_factor == 1.5 and read["a"].num_features == 2
    assert (read["a"].optimizer, read["a"].data_type) == ("adam", "fp16")
    assert read["a"].weighted and not read["b"].weighted
    assert read["b"].optimizer == "sgd"


def test_constraints_of_all_tables_and_of_one(folder: Path) -> None:
    (folder / "c.json").write_text(
        '{"*": {"min_partition": 16, "sharding_types": ["column_wise"]}, '
        '"item": {"sharding_types": ["row_wise"], "cache_load_factor": 0.5}}'
    )
    found = read_constraints("c.json", read_model("t.csv"))
    assert {c.min_partition for c in found.values()} == {16}
    assert found["user"].sharding_types == ["column_wise"]
    assert found["user"].pooling_factors == [20.0]
    assert found["item"].sharding_types == ["row_wise"]
    assert found["item"].cache_params is not None
    assert found["item"].cache_params.load_factor == 0.5


@pytest.mark.parametrize(
    ("option", "text", "message"),
    [
        ("constraints", '{"usr": {}}', "'usr', which the model .* did you mean 'user'"),
        ("constraints", '{"*": {"min_partition": "x"}}', "a number, whole.*got 'x'"),
        (
            "constraints",
            '{"user": {"sharding_types": ["data_parallel"], '
            '"compute_kernels": ["fused"]}}',
            "constraints for user. No kernel of those",
        ),
        ("placement", '{"pinned": {}}', "unknown field 'pinned'.*'pin'"),
        ("placement", '{"pin": {"user": [7]}}', "rank 7, which is not in 0 to 1"),
        ("profiles", '{"usr": {"batch_size": 1, "num_lookups": 1}}', "mean 'user'"),
    ],
)
def test_bad_files_are_named(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    option: str,
    text: str,
    message: str,
) -> None:
    (folder / "f.json").write_text(text)
    said = refused(capsys, "plan", "t.csv", *QUICK, f"--{option}", "f.json")
    assert re.search(message, said), said


def test_tables_that_cannot_be_built_are_named(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, rows in (("training", 10), ("huge", 10**30), ("a.b", 10)):
        (folder / "t.csv").write_text(f"{TABLES}{name},{rows},8,1\n")
        said = refused(capsys, "plan", "t.csv", *QUICK)
        assert "'t.csv'" in said and f"table '{name}'" in said
    fields = "name,num_embeddings,embedding_dim,num_features\n"
    (folder / "t.csv").write_text(f"{fields}u,10,8,2\nu:0,10,8,1\n")
    said = refused(capsys, "plan", "t.csv", *QUICK)
    assert "tables 'u' and 'u:0' would both read feature 'u:0'" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--card", "h10"], "unknown card 'h10'; did you mean 'h100'? Known are v100"),
        (["--ranks", "0"], "there must be 1 to 65,536 ranks, got 0"),
        (["--out", "t.csv"], "cannot write 't.csv': that is read"),
        ([*QUICK, "--memory-gb", "1e-5"], "no plan for 't.csv': The reserved"),
        (["--search", "milp", "--seconds", "1"], "--seconds is for the default search"),
        (["--card", "cpu", "--memory-gb", "3"], "is the host's"),
    ],
)
def test_bad_options_say_the_way_out(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert message in refused(capsys, "plan", "t.csv", *arguments)


def test_other_plans_are_not_compared(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "t.csv", *QUICK, "--out", "a.json"]) == 0
    capsys.readouterr()
    data = json.loads((folder / "a.json").read_text())
    data["fingerprint"]["tables"][1]["feature_names"] = ["other"]
    (folder / "b.json").write_text(json.dumps(data))
    assert "of other tables: 'shop'" in refused(capsys, "diff", "a.json", "b.json")
    assert "cannot read the plan file" in refused(capsys, "show", "none.json")
    assert "'t.csv' is not a plan file" in refused(capsys, "show", "t.csv")
    data["report"]["ranks"] = 3
    (folder / "a.json").write_text(json.dumps(data))
    assert "stored with the plan is damaged" in refused(capsys, "show", "a.json")
    data["report"] = None
    (folder / "a.json").write_text(json.dumps(data))
    assert main(["show", "a.json"]) == 0
    out = capsys.readouterr().out
    assert "critical path not known" in out and "largest first [GiB]" in out


def test_the_page_names_the_options_and_fields(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = Path(__file__).parents[2] / "docs" / "command_line.md"
    text = page.read_text(encoding="utf-8")
    [constraints] = re.findall(r"```json\n(.*?)```", text, flags=re.DOTALL)
    (folder / "c.json").write_text(constraints)
    read = read_constraints("c.json", read_model("t.csv"))
    assert read["user"].sharding_types == ["row_wise"]
    commands = "".join(re.findall(r"```\n(neuroshard.*?)```", text, flags=re.DOTALL))
    for name in re.findall(r"^neuroshard (\w+)", commands, flags=re.MULTILINE):
        with pytest.raises(SystemExit):
            main([name, "--help"])
    known = set(re.findall(r"--[a-z][a-z-]+", capsys.readouterr().out))
    asked = set(re.findall(r"--[a-z][a-z-]+", text))
    assert asked - known <= {"--help"}
    fields = {field.name for field in dataclasses.fields(TableConfig)}
    assert fields <= set(re.findall(r"`(\w+)`", text))
