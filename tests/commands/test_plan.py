"""`neuroshard plan`, `show`, `diff` and `sweep`: files in, what people look at out."""

from __future__ import annotations

import csv
import dataclasses
import io
import itertools
import json
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import ParameterConstraints
from torchrec.distributed.types import ShardingPlan

from tests.builders import (
    bag_sharders,
    make_ebc,
    make_tables,
)
from torchrec_neuroshard import load_plan
from torchrec_neuroshard.cli import main
from torchrec_neuroshard.commands import plan_run
from torchrec_neuroshard.commands.files import (
    TableFile,
    devices_named,
    find_model,
    read_constraints,
)
from torchrec_neuroshard.commands.inputs import (
    GivenModel,
    given_constraints,
    made_model,
    topology_of,
)
from torchrec_neuroshard.planner.planner import NeuroShardPlanner
from torchrec_neuroshard.planner.topology import GB_PER_S
from torchrec_neuroshard.planner.torchrec_plan import stock_plan
from torchrec_neuroshard.report import Sweep, SweepCell
from torchrec_neuroshard.tables.profile import FeatureProfile
from torchrec_neuroshard.tables.table import TableConfig

TABLES = (
    "name,num_embeddings,embedding_dim,pooling_factor\n"
    "user,200000,64,20\nitem,100000,32,\nshop,1000,16,3\n"
)
QUICK = ["--ranks", "2", "--batch-size", "256", "--seconds", "0.2"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the command runs, with a file of tables."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("t.csv").write_text(TABLES)


def read_model(name: str) -> GivenModel:
    """The model that a command line names."""
    return made_model(find_model(name))


def planner_for(
    file: str, card: str, ranks: int, batch_size: int
) -> tuple[NeuroShardPlanner, Any]:
    """What the command makes for a file of tables, and their model."""
    given = read_model(file)
    planner = NeuroShardPlanner(
        topology=topology_of(devices_named(card, ranks)),
        batch_size=batch_size,
        cost_model=card,
        constraints=dict(given.constraints),
        profiles=given.profiles,
        stats=[],
    )
    return planner, given


def refused(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 2) -> str:
    """What is said of arguments that cannot be used, or of what does not fit."""
    assert main(list(arguments)) == code
    printed = capsys.readouterr()
    assert printed.err.startswith("neuroshard: error: ") and not printed.out
    return printed.err


def test_options_are_figures_of_the_devices() -> None:
    figures = {"host_memory_gb": 512.0, "intra_gb_per_s": 90.0, "inter_gb_per_s": 9.0}
    for card, node in (("h100", 8), ("cpu", 4)):
        found = topology_of(devices_named(card, 16, node, **figures))
        assert {d.storage.ddr for d in found.devices} == {round(512e9 / node)}
        rates = found.intra_host_bw, found.inter_host_bw
        assert rates == pytest.approx((90.0 / GB_PER_S, 9.0 / GB_PER_S))
    cards = topology_of(devices_named("h100", 8, memory_gb=40.0))
    assert {d.storage.hbm for d in cards.devices} == {round(40e9)}


def test_a_share_of_the_memory_is_kept_free(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Without dense layers, the reservation takes the share and the inputs."""
    left = []
    for share in ("0.5", "0"):
        options = ["--memory-gb", "40", "--reserve", share]
        assert main(["plan", "t.csv", *QUICK, *options, "--json", "p.json"]) == 0
        ranks = json.loads(Path("p.json").read_text())["plan"]["ranks"]
        left.append(ranks[0]["memory_bytes"])
    assert left[1] - left[0] == pytest.approx(20e9)
    capsys.readouterr()
    said = refused(capsys, "plan", "t.csv", "--card", "cpu", "--reserve", "0.3")
    assert "TorchRec's reservation keeps no share of a host's memory free" in said
    for wrong, says in (("15", "must be below 1, got 15; 0.15 are 15 %"), ("-1", "0")):
        with pytest.raises(SystemExit) as ended:
            main(["plan", "t.csv", "--reserve", wrong])
        assert ended.value.code == 2 and says in capsys.readouterr().err


def test_tables_are_made_sequences(capsys: pytest.CaptureFixture[str]) -> None:
    found = find_model("t.csv", ["item", "user"])
    assert isinstance(found, TableFile)
    assert [t.pooled for t in found.read.tables] == [False, False, True]
    planned = ["plan", "t.csv", *QUICK, "--sequences", "item, user", "--out", "s.json"]
    assert main(planned) == 0
    capsys.readouterr()
    assert main(["rehearse", "s.json", "t.csv", "--sequences", "item,user"]) == 0
    capsys.readouterr()
    said = refused(capsys, "plan", "t.csv", "--sequences", "itme")
    assert "--sequences names no table: 'itme'; did you mean 'item'?" in said
    Path("m.py").write_text("def make(): ...\n")
    said = refused(capsys, "plan", "m.py:make", "--sequences", "item")
    assert "--sequences is for files of tables" in said


@pytest.mark.filterwarnings("ignore:no cost model was measured")
def test_a_sweep_is_written_as_page_and_json(
    capsys: pytest.CaptureFixture[str],
) -> None:
    files = ["--json", "s.json", "--html", "s.html"]
    command = ["sweep", "t.csv", *QUICK, "--card", "h100,a100", *files]
    assert main(command) == 0
    assert "wrote s.html" in capsys.readouterr().out
    cells = json.loads(Path("s.json").read_text())["cells"]
    assert [cell["card"] for cell in cells] == ["h100", "a100"]
    for cell in cells:
        assert cell["samples_per_s"] == pytest.approx(2 * cell["rank_samples_per_s"])
    page = Path("s.html").read_text()
    assert "Sweep of t.csv" in page and "Most samples per second: 2 x h100" in page


@pytest.mark.filterwarnings("ignore:no cost model was measured")
def test_tables_are_planned_shown_and_compared(
    capsys: pytest.CaptureFixture[str], phases: list[str]
) -> None:
    files = ["--out", "a.json", "--html", "a.html", "--json", "a.report.json"]
    assert main(["plan", "t.csv", *QUICK, "--compare", "--rehearse", *files]) == 0
    assert phases[:3] == [
        "reading the files",
        "loading torch and torchrec",
        "reading the model",
    ]
    printed = capsys.readouterr()
    # A busy machine shows its progress.
    assert re.fullmatch(r"(neuroshard: .*, \d+ s\n)*", printed.err)
    assert "t.csv: planned for 2 x h100" in printed.out
    assert "rank 1  ###" in printed.out and "all  index_comms" not in printed.out
    assert printed.out.count("For details, add --verbose.") == 1
    assert "TorchRec's own plan" in printed.out
    assert "every rank can run the plan" in printed.out
    assert (
        printed.out.count("- warning: no cost model was measured on NVIDIA H100") == 1
    )
    found = json.loads(Path("a.report.json").read_text())
    assert {t["table"] for t in found["plan"]["tables"]} == {"user", "item", "shop"}
    saved = found["compared"]["saved_ms"]
    ms = found["plan"]["iteration_ms"]
    assert found["compared"]["first"]["iteration_ms"] == pytest.approx(saved + ms)
    assert "saves" in Path("a.html").read_text()

    # What is stored is what a job loads, for the model that the tables make.
    planner, given = planner_for("t.csv", "h100", 2, 256)
    load_plan("a.json", model=given.module, planner=planner)
    assert planner.report().iteration_ms == pytest.approx(ms)

    assert main(["show", "a.json", "--verbose", "--json", "shown.json"]) == 0
    out = capsys.readouterr().out
    assert "made for 2 ranks, 2 per node (cuda); samples per rank: 256" in out
    assert f"iteration {ms:.3f} ms" in out and "all  index_comms" in out
    [shown_row] = [x.split() for x in out.splitlines() if " user " in x][-1:]
    assert shown_row[4:7] == ["user", "200,000", "64"]
    shown = json.loads(Path("shown.json").read_text())
    assert shown["ranks"] == found["plan"]["ranks"]

    Path("where.json").write_text(json.dumps({"pin": {"user": [1]}}))
    pinned = ["--placement", "where.json", "--out", "b.json"]
    assert main(["plan", "t.csv", *QUICK, *pinned]) == 0
    capsys.readouterr()
    assert main(["diff", "a.json", "b.json", "--json", "d.json"]) == 0
    out = capsys.readouterr().out
    moved = json.loads(Path("d.json").read_text())
    [move] = [m for m in moved["moves"] if m["table"] == "user"]
    assert move["after"] == "table_wise, rank 1"
    [row] = [line for line in out.splitlines() if " user " in line]
    assert move["before"] in row and row.endswith(move["after"])
    times = [moved[name]["iteration_ms"] for name in ("first", "second")]
    assert moved["saved_ms"] == pytest.approx(times[0] - times[1])
    assert f"{times[1]:.3f} ms" in out.splitlines()[0]
    assert main(["diff", "a.json", "a.json"]) == 0
    out = capsys.readouterr().out
    assert f"both take {times[0]:.3f} ms" in out
    assert "all 3 tables are placed the same" in out


def test_a_plan_that_lacks_memory_is_shown_and_not_done(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It fits by TorchRec's count of memory alone."""
    Path("c.json").write_text('{"*": {"compute_kernels": ["fused"]}}')
    files = ["--constraints", "c.json", "--json", "a.json"]
    assert main(["plan", "t.csv", *QUICK, "--memory-gb", "0.041", *files]) == 1
    assert "- error: the plan will run out of memory: rank " in capsys.readouterr().out
    notes = json.loads(Path("a.json").read_text())["plan"]["notes"]
    severe = [n["code"] for n in notes if n["severity"] == "error"]
    assert severe == ["memory"]


def test_torchrecs_plan_is_asked_for_the_same_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[float] = []

    def late(*arguments: Any, timeout_seconds: float, **named: Any) -> ShardingPlan:
        asked.append(timeout_seconds)
        return stock_plan(*arguments, timeout_seconds=600, **named)

    clock = SimpleNamespace(monotonic=itertools.count(step=30).__next__)
    monkeypatch.setattr(plan_run, "time", clock)
    monkeypatch.setattr(plan_run, "stock_plan", late)
    command = ["plan", "t.csv", "--ranks", "2", "--card", "cpu", "--compare"]
    command += ["--search", "neuroshard"]
    # Without --seconds, those of the default search.
    assert main(command) == 0
    assert "was stopped, since it had 20 s" in capsys.readouterr().out
    assert main([*command, "--seconds", "2.5"]) == 0
    assert "was stopped, since it had 2.5 s" in capsys.readouterr().out
    assert asked == [20, 2.5]


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
        twice=lambda: (make_ebc([(100, 16)]), make_ebc([(10, 16)])),
        broken=lambda: 1 / 0,
        others=lambda: (make_ebc([(100, 16)]), [EmbeddingCollectionSharder()]),
    )
    monkeypatch.setitem(sys.modules, "my_models", module)
    found = read_model("my_models:everything")
    assert list(found.constraints) == ["t0"]
    assert [type(s) for s in found.sharders] == [EmbeddingBagCollectionSharder]
    alone = read_model("my_models:alone")
    assert len(alone.sharders) > 1
    for name, message in (
        ("nothing", "must return a torch.nn.Module.*got int"),
        ("twice", "must return a torch.nn.Module.*got Embed"),
        ("broken", "broken': ZeroDivisionError: division by zero.*NEUROSHARD_DEBUG=1"),
        ("brokn", "has no function 'brokn'; did you mean 'broken'"),
        ("others", "no sharder takes a module of the EmbeddingBagCollection"),
    ):
        with pytest.raises(ValueError, match=message):
            read_model(f"my_models:{name}")
    Path("a").mkdir()
    Path("a/b.py").write_text("import my_models\nmake = my_models.alone\n")
    assert type(read_model("./a/b.py:make").module) is type(alone.module)
    with pytest.raises(ValueError, match=r"no such file. A model is a \.json"):
        read_model("table.jsn")


def test_files_of_tables_say_what_profiles_do() -> None:
    """Features of one table share its lookups, and add up to them."""
    histogram = (6.0, 3.0, *[0.0] * 15)
    profile = FeatureProfile(
        batch_size=8, num_lookups=12.0, access_histogram=histogram, pooling_std=0.5
    )
    fields: Any = {"weighted": True, "optimizer": "adam", "data_type": "fp16"}
    known = make_tables([8], 100, 1.5, num_features=2, profile=profile, **fields)
    [plain] = make_tables([4], 10, optimizer="sgd")
    tables = [*known, dataclasses.replace(plain, name="b")]
    Path("t.json").write_text(json.dumps([t.to_json() for t in tables]))
    planner, given = planner_for("t.json", "cpu", 1, 8)
    options = planner.enumerator.enumerate(given.module, given.sharders)
    read = {o.name: planner.costs.reader.table(o) for o in options}
    found = read["t0"]
    assert found.profile is not None
    assert found.profile.access_histogram == pytest.approx(histogram)
    assert (found.pooling_factor, found.num_features) == (1.5, 2)
    assert {name: getattr(found, name) for name in fields} == fields
    assert read["b"].optimizer == "sgd" and not read["b"].weighted


def test_constraints_of_all_tables_and_of_one() -> None:
    Path("c.json").write_text(
        '{"*": {"min_partition": 16, "sharding_types": ["column_wise"]}, '
        '"item": {"sharding_types": ["row_wise"], "cache_load_factor": 0.5}}'
    )
    found = given_constraints(read_constraints("c.json"), read_model("t.csv"))
    assert {c.min_partition for c in found.values()} == {16}
    assert found["user"].sharding_types == ["column_wise"]
    assert found["user"].pooling_factors == [20.0]
    assert found["item"].sharding_types == ["row_wise"]
    assert found["item"].cache_params is not None
    assert found["item"].cache_params.load_factor == 0.5


@pytest.mark.parametrize(
    ("arguments", "text", "message"),
    [
        ("--constraints f.json", '{"usr": {}}', "'usr', which .* did you mean 'user'"),
        (
            "--constraints f.json",
            '{"*": {"min_partition": "x"}}',
            "a 64-bit integer, got 'x'",
        ),
        (
            "--constraints f.json",
            '{"user": {"sharding_types": ["data_parallel"], '
            '"compute_kernels": ["fused"]}}',
            "constraints for user. None of the kernels",
        ),
        ("--placement f.json", '{"forbid_ranks": [0, 1]}', "leave no rank for"),
        (
            "--constraints f.json",
            '{"*": {"min_partition": -1}}',
            "'f.json': constraints of table '\\*': min_partition is -1",
        ),
        ("--json - --html -", "", "--html and --json are both '-'; write one of them"),
        ("--memory-gb 1e300", "", "memory_gb is 1e.300: give it in GB, not in bytes"),
        ("--placement f.json", '{"pinned": {}}', "unknown field 'pinned'.*'pin'"),
        (
            "--placement f.json",
            '{"pin": {"user": [7]}}',
            "rank 7, but the 2 ranks are 0 to 1",
        ),
        (
            "--profiles f.json",
            '{"usr": {"batch_size": 1, "num_lookups": 1}}',
            "mean 'user'",
        ),
        ("--card h10", "", "card 'h10'; did you mean 'h100'"),
        ("--out t.csv", "", "cannot write 't.csv': it is an input file"),
        ("--memory-gb 1e-5", "", "no plan for 't.csv': The reserved"),
        ("--search autoshard", "", "--seconds limits the default search, but"),
        ("--card cpu --memory-gb 3", "", "is the host's"),
    ],
)
def test_what_cannot_be_is_named(
    capsys: pytest.CaptureFixture[str], arguments: str, text: str, message: str
) -> None:
    Path("f.json").write_text(text)
    code = 1 if "--memory-gb 1e-5" in arguments else 2
    said = refused(capsys, "plan", "t.csv", *QUICK, *arguments.split(), code=code)
    assert re.search(message, said), said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("plan --ranks eight", "argument --ranks: 'eight' is not a whole number"),
        ("plan --ranks 8,16", "'8,16' is not a whole number; 'neuroshard sweep' takes"),
        ("plan --ranks 0", "argument --ranks: must be at least 1, got 0"),
        ("plan --ranks 65537", "must be at most 65,536, got 65,537"),
        ("plan --batch-size 0", "argument --batch-size: must be at least 1, got 0"),
        ("plan --memory-gb 80GB", "'80GB' is not a number; leave out the unit"),
        ("plan --seconds -1", "argument --seconds: must be finite and above 0, got -1"),
        ("plan --dense-ms nan", "must be finite and at least 0, got nan"),
        ("plan --search autoshrd", "not one of the searches; did you mean 'autoshard'"),
        ("plan --pipeline train_sparse", "did you mean 'train_sparse_dist'"),
        ("plan --memory-gib 80", "did you mean --memory-gb?"),
        ("sweep --batch-size 0", "argument --batch-size: must be at least 1, got 0"),
        ("sweep --ranks eight", "argument --ranks: 'eight' is not a whole number"),
        ("sweep --out x.json", "unknown argument '--out'"),
        ("sweep --ranks ,", "argument --ranks: is empty; separate values by commas"),
    ],
)
def test_bad_values_are_named_in_the_words_of_the_command_line(
    capsys: pytest.CaptureFixture[str], arguments: str, message: str
) -> None:
    name, *options = arguments.split()
    with pytest.raises(SystemExit, match="2"):
        main([name, "t.csv", *options])
    said = capsys.readouterr().err
    assert message in said and said.startswith(f"neuroshard {name}: error: ")
    assert len(said.splitlines()) == 2  # no usage of 20 lines above it


def test_tables_that_cannot_be_built_are_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, rows, cause in (
        ("training", 10, "attribute 'training' already exists"),
        ("huge", 10**18, "overflowed with sizes=[1000000000000000000, 8]"),
        ("huge", 10**30, "table 'huge'"),
        ("a.b", 10, "got: a.b"),
    ):
        Path("t.csv").write_text(f"{TABLES}{name},{rows},8,1\n")
        said = refused(capsys, "plan", "t.csv", *QUICK)
        assert "'t.csv'" in said and cause in said
    fields = "name,num_embeddings,embedding_dim,num_features\n"
    Path("t.csv").write_text(f"{fields}u,10,8,2\nu:0,10,8,1\n")
    said = refused(capsys, "plan", "t.csv", *QUICK)
    assert "tables 'u' and 'u:0' would both read feature 'u:0'" in said


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("good.csv", "cannot read 'good.csv': No such file"),
        ("good", "'good': there is no such file"),
        ("good.txt", "'good.txt': there is no such file"),
        ("good.py:make", "'good.py:make': there is no such file"),
        ("folder/good:make", "'folder/good:make': there is no such file"),
        ("/none/good.py:make", "'/none/good.py:make': there is no such file"),
        ("t.txt", "'t.txt': files that end in '.txt' hold no model"),
        (".", "'.': it is a folder"),
        ("good:make", "No module named 'good'"),
        ("", "cannot load '': ValueError: Empty module name"),
    ],
)
def test_a_wrong_name_of_a_model_is_said_to_be_one(
    capsys: pytest.CaptureFixture[str], name: str, reason: str
) -> None:
    Path("t.txt").write_text(TABLES)
    assert reason in refused(capsys, "plan", name, *QUICK)


def test_a_dash_reads_tables_from_standard_input(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def pipe(text: str) -> None:
        stdin = io.TextIOWrapper(io.BytesIO(text.encode()))
        monkeypatch.setattr(sys, "stdin", stdin)

    pipe(TABLES)
    assert main(["plan", "-", *QUICK]) == 0
    assert "3 tables on 2 ranks" in capsys.readouterr().out
    pipe(TABLES.replace("num_embeddings", "rows"))
    said = refused(capsys, "plan", "-", *QUICK)
    assert "standard input, line 1, the heading: unknown field 'rows'" in said


def test_a_model_may_be_in_a_file_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model_elsewhere.py").write_text(
        "from tests.builders import make_ebc, make_tables\n"
        "make = lambda: make_ebc([(8, 4)])\n"
    )
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for name in ("../model_elsewhere.py", f"{tmp_path}/model_elsewhere.py"):
        assert list(read_model(f"{name}:make").module.state_dict())


def test_an_output_named_dash_is_printed_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def printed(*arguments: str) -> str:
        assert main(list(arguments)) == 0
        found = capsys.readouterr()
        assert "wrote" not in found.err and not Path("-").exists()
        return found.out

    plan_file = printed("plan", "t.csv", *QUICK, "--out", "-")
    Path("a.json").write_text(plan_file)
    assert json.loads(printed("show", "a.json", "--json", "-"))["ranks"]
    assert printed("diff", "a.json", "a.json", "--html", "-").startswith("<!DOCTYPE")
    sizes = ["--ranks", "2", "--seconds", "0.1", "--card", "cpu"]
    table = printed("sweep", "t.csv", *sizes, "--csv", "-")
    assert next(csv.DictReader(table.splitlines()))["card"] == "cpu"
    assert main(["rehearse", "a.json", "t.csv", "--json", "-"]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["ranks"] and "every rank can run" in shown.err
    said = refused(capsys, "train", "t.csv", "--out", "-")
    assert "--out cannot be '-': it is not text" in said


def test_other_plans_are_not_compared(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "t.csv", *QUICK, "--out", "a.json"]) == 0
    capsys.readouterr()
    data = json.loads(Path("a.json").read_text())
    data["fingerprint"]["tables"][1]["feature_names"] = ["other"]
    Path("b.json").write_text(json.dumps(data))
    assert "of different tables: 'shop'" in refused(capsys, "diff", "a.json", "b.json")
    said = refused(capsys, "show", "none.json")
    assert "cannot read the plan file 'none.json': No such file" in said
    assert "'t.csv' is not a plan file" in refused(capsys, "show", "t.csv")
    for report in ({**data["report"], "ranks": 3}, None):
        Path("a.json").write_text(json.dumps(data | {"report": report}))
        assert main(["show", "a.json", "--verbose"]) == 0
        out = capsys.readouterr().out
        assert "iteration unknown" in out and "path  kernels" not in out
        assert "the plan file has no costs that this version can read" in out


def test_the_page_names_the_options_and_fields(
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = Path(__file__).parents[2] / "docs" / "command_line.md"
    text = page.read_text(encoding="utf-8")
    [constraints] = re.findall(r"```json\n(.*?)```", text, flags=re.DOTALL)
    Path("c.json").write_text(constraints)
    read = given_constraints(read_constraints("c.json"), read_model("t.csv"))
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


# --- sweep ---


def test_cells_are_planned_one_by_one(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--card", "a100,h100", "--ranks", "1,2", "--batch-size", "512"]
    files = ["--csv", "s.csv", "--seconds", "0.1"]
    assert main(["sweep", "t.csv", *options, *files]) == 0
    printed = capsys.readouterr()
    assert not printed.err and "most samples per second: " in printed.out
    rows = list(csv.DictReader(Path("s.csv").read_text().splitlines()))
    where = [(r["card"], r["num_ranks"]) for r in rows]
    assert where == [(c, ranks) for c in ("a100", "h100") for ranks in ("1", "2")]
    by_cell = dict(zip(where, rows, strict=True))
    for row in rows:
        assert row["fits"] == "True" and "not measured" in row["kernels_source"]
        rate = float(row["samples_per_s"])
        ms = float(row["iteration_ms"])
        assert rate == pytest.approx(int(row["num_ranks"]) * 512 / ms * 1e3)
        assert 0 < float(row["kernels_ms"]) + float(row["links_ms"]) < ms * 1.001
        assert 0 < float(row["memory_bytes"]) < float(row["memory_limit_bytes"])
    faster = [float(by_cell[c, "1"]["kernels_ms"]) for c in ("h100", "a100")]
    assert faster[0] < faster[1]


def test_an_interrupted_sweep_shows_and_keeps_its_rows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original, kept = NeuroShardPlanner.plan, []

    def stopped(self: NeuroShardPlanner, *arguments: Any) -> ShardingPlan:
        kept.append(Path("s.csv").read_text() if Path("s.csv").exists() else "")
        if self.topology.world_size == last:
            raise KeyboardInterrupt
        return original(self, *arguments)

    monkeypatch.setattr(NeuroShardPlanner, "plan", stopped)
    options = ["--card", "cpu", "--ranks", "1,2,4", "--seconds", "0.1", "--csv"]
    last = 4
    assert main(["sweep", "t.csv", *options, "s.csv"]) == 130
    shown = capsys.readouterr().out
    assert "most samples per second: " in shown
    assert "not tried: 1 of 3 cells, since the command was interrupted" in shown
    rows = list(csv.DictReader(Path("s.csv").read_text().splitlines()))
    assert [row["num_ranks"] for row in rows] == ["1", "2"]
    assert [len(text.splitlines()) for text in kept] == [0, 2, 3]  # row by row
    last = 1
    assert main(["sweep", "t.csv", *options, "t.out"]) == 130
    assert not capsys.readouterr().out and not Path("t.out").exists()


def test_our_report_is_shown_and_saved_before_torchrec_plans(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*arguments: Any, **named: Any) -> ShardingPlan:
        assert Path("a.json").exists()
        raise KeyboardInterrupt

    monkeypatch.setattr(plan_run, "stock_plan", interrupted)
    assert main(["plan", "t.csv", *QUICK, "--compare", "--out", "a.json"]) == 130
    assert "iteration " in capsys.readouterr().out


def cell(**fields: Any) -> SweepCell:
    known: dict[str, Any] = {
        "card": "h100",
        "num_ranks": 8,
        "batch_size": 1_000,
        "iteration_ms": 4.0,
        "kernels_ms": 1.0,
        "links_ms": 3.0,
        "memory_bytes": 2**30,
        "memory_limit_bytes": 2**31,
        "error": 0.1,
        "kernels_source": "measured",
        "links_source": "published links of h100, not measured",
    }
    return SweepCell(**(known | fields))


def test_limits_and_sources_are_named() -> None:
    assert cell().limit == "links" and cell().samples_per_s == 2_000_000
    assert cell(kernels_ms=3.5).limit == "kernels"
    assert cell(num_in_host_memory=1).limit == "memory"
    no_room = cell(card="v100", obstacle="no room", iteration_ms=None)
    assert (no_room.limit, no_room.fits) == ("memory", False)
    cells = (no_room, cell(num_ranks=4), cell())
    text = Sweep(cells=cells, search_seconds=3.0).text(verbose=True)
    answer, table, sources = (part.splitlines() for part in text.split("\n\n"))
    assert answer == [
        "most samples per second: 8 x h100, 1,000 samples per rank, after 3 s of "
        "search per row",
        "samples per second per rank, compared with 4 ranks: 100% at 8 ranks",
    ]
    shown = "h100 8 1,000 4.000 10% 2,000,000 250,000 1.00 2.00 links best"
    assert table[2].split() == shown.split()
    assert table[1].endswith("does not fit") and "best" not in table[3]
    assert table[4].endswith("memory        no room")
    assert sources[1:] == [
        "h100: compute: measured; collectives: published links of h100, not measured"
    ]


def test_what_fits_nowhere_is_said_and_bad_options_are_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    said = refused(capsys, "sweep", "t.csv", "--card=h100, h900")
    assert "unknown card 'h900'; did you mean 'h200'" in said
    Path("t.csv").write_text(TABLES.replace("200000", "200000000000"))
    assert main(["sweep", "t.csv", "--ranks", "1"]) == 1
    out = capsys.readouterr().out
    assert re.search("memory  .*table 'user'", out) and "nothing fits" in out
