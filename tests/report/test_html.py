"""The report's page: its text, its data, and how a browser shows it."""

from __future__ import annotations

import base64
import csv
import dataclasses
import hashlib
import html
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from tests.report.browser import find_browser, open_page
from tests.report.test_timeline import STAGES
from torchrec_neuroshard import __version__
from torchrec_neuroshard.costs.simulator import (
    PHASES,
    PredictedCosts,
    RankCosts,
    StageCosts,
)
from torchrec_neuroshard.notes import Note
from torchrec_neuroshard.report import (
    PlanComparison,
    PlanReport,
    TableMove,
    html_report,
)
from torchrec_neuroshard.report.heat_map import MAX_ROWS, heat_map
from torchrec_neuroshard.report.page import MAX_HEADINGS
from torchrec_neuroshard.report.parts import (
    PlanBasis,
    RankReport,
    ShardReport,
    SplitReport,
    TableReport,
    WeightSync,
)
from torchrec_neuroshard.report.timeline import Timeline

HOSTILE = "</script><script>top.hacked = 1</script><img src=x onerror='top.hacked = 1'>"
"""A table's name that pages must show literally."""


def data_of(page: str) -> Any:
    """Return the data for the page's script."""
    (data,) = re.findall(r"<script[^>]* id='data'>(.*?)</script>", page, re.DOTALL)
    return json.loads(data)


def shown_of(page: str) -> str:
    """Return a page's text without tags."""
    bare = re.sub(r"<(style|script).*?</\1>|<[^>]+>", " ", page, flags=re.DOTALL)
    return " ".join(html.unescape(bare).split())


def rows_of(table: Any) -> list[dict[str, Any]]:
    """Return a table of the page's data as rows, keyed by column title."""
    _, columns, rows = table
    return [dict(zip((c[0] for c in columns), r, strict=True)) for r in rows]


def rank(number: int, *ms: float, memory: int | None = 4 * 2**30) -> RankReport:
    return RankReport(
        rank=number,
        num_shards=number + 1,
        columns=1_000 * (number + 1),
        used_bytes=(number + 1) * 2**30,
        memory_bytes=memory,
        costs=RankCosts(*ms),
    )


SPLIT = SplitReport(
    table="user<b>&co",
    shards=((48, 0), (16, 1)),
    whole_bytes=3 * 2**30,
    whole_rank=1,
    whole_ms=30.0,
    compute_change_ms=12.0,
    comms_change_ms=1.0,
)


def table(
    name: str,
    *widths: int,
    kind: str = "column_wise",
    rows: int = 4_000,
    first: int = 0,
    **shard: Any,
) -> TableReport:
    """Return a table with a shard of each width, on ranks from the first of 128."""
    return TableReport(
        table=name,
        sharding_type=kind,
        compute_kernel="fused",
        num_embeddings=4_000,
        embedding_dim=8 if kind == "row_wise" else sum(widths),
        shards=tuple(
            ShardReport(
                rank=(first + i) % 128,
                num_embeddings=rows,
                embedding_dim=width,
                **({"used_bytes": 2**20} | shard),
            )
            for i, width in enumerate(widths)
        ),
    )


COSTS: dict[str, Any] = {
    "used_bytes": 2**28,
    "compute_ms": 1.0,
    "comms_ms": 0.25,
    "path_ms": 0.5,
}
RANKS = (rank(0, 1.0, 2.0, 3.0, 4.0, 5.0), rank(1, 1.0, 4.0, 3.0, 4.0, 2.0))
COSTS_OF_RANKS = tuple(rank.costs for rank in RANKS)
REPORT = PlanReport(
    critical_path_ms=17.0,
    lower_bound_ms=16.0,
    uncertainty=0.03,
    compute_source="measured",
    comms_source="datasheet, not measured",
    search_seconds=1.25,
    num_evaluated=1_234,
    num_tables=7,
    ranks=RANKS,
    timeline=Timeline.of(PredictedCosts((StageCosts("sparse (a<b)", COSTS_OF_RANKS),))),
    splits=(SPLIT,),
    tables=(
        table(HOSTILE, 8, 8, kind="row_wise", rows=2_000, **COSTS),
        table("user<b>&co", 48, 16),
        table("b", 8, 8),
        table("c", 4, 4),
        table("whole", 8),
    ),
    fallback=None,
    notes=(Note("out-of-range", "rows < 10 & so on", "b"),),
)


def basis(**known: Any) -> PlanBasis:
    return PlanBasis(
        card="NVIDIA <H100>",
        figures=(),
        batch_size=512,
        batch_size_is_default=False,
        ids_per_sample=(),
        assumed_features=(),
        **known,
    )


def comparison() -> PlanComparison:
    theirs = (rank(0, 1.0, 2.0, 3.0, 4.0, 5.0), rank(1, 2.0, 8.0, 6.0, 8.0, 4.0))
    return PlanComparison(
        first_name="theirs <1>",
        first=dataclasses.replace(REPORT, critical_path_ms=20.0, ranks=theirs),
        second_name="ours",
        second=REPORT,
        moves=(
            TableMove(table="little", before="", after="here", moved_bytes=2**20),
            TableMove(table=HOSTILE, before="row_wise", after="", moved_bytes=2**30),
        ),
        notes=(Note("comparison", "batch <differs>"),),
    )


def test_page_holds_the_report_and_needs_nothing_else() -> None:
    page = html_report(REPORT, "Plan of <mine>")
    assert page.startswith("<!DOCTYPE html>")
    without_names = page.replace(json.dumps(HOSTILE).replace("<", "\\u003c"), "")
    assert not re.search(r"https?:|src=|@import|url\(|<link", without_names)
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    (policy,) = re.findall(r'Content-Security-Policy" content="(.*?)"', page)
    assert policy.startswith("default-src 'none'")
    assert f"script-src 'sha256-{digest}'" in policy
    # Names and figures.
    text, data = shown_of(page), data_of(page)
    assert text.startswith("Plan of <mine> Plan of <mine>")  # its title and heading
    assert "<img" not in page and "user<b>" not in page
    timeline, phases, memory, heat = data["charts"]
    assert timeline["period_ms"] == 17.0 and timeline["bound_ms"] == 16.0
    assert timeline["spans"][1] == [0, "compute", "fwd_compute", 0, 0, 1, 3, False]
    assert phases["names"] == list(PHASES)
    assert phases["rows"] == [[0, 1, 2, 3, 4, 5], [1, 1, 4, 3, 4, 2]]
    assert memory["names"] == ["used", "free"]
    assert memory["rows"] == [[0, 1, 3], [1, 2, 2]]
    assert [view["unit"] for view in heat["views"]] == ["ms", "GiB"]
    # Rank, kernels, collectives and GiB of the only table with a time.
    assert heat["tables"][0] == [HOSTILE, [[0, 1, 0.25, 0.25], [1, 1, 0.25, 0.25]]]
    ranks, tables, shards = (rows_of(table) for table in data["grids"])
    assert ranks[1] == {
        **{"rank": 1, "shards": 2, "columns": 2_000, "GiB": 2 * 2**30, "all": 14},
        **{"of GiB": 4 * 2**30},
        **dict(zip(PHASES, [1, 4, 3, 4, 2], strict=True)),
    }
    assert tables[0] == {
        **{"path": 1.0, "kernels": 1.0, "collectives": 0.25, "GiB": 2**29},
        **{"table": HOSTILE, "rows": 4_000, "columns": 8, "sharding": "row_wise"},
        **{"kernel": "fused", "shards": 2, "on": "ranks 0-1"},
    }
    assert shards[1] == {
        **{"path": 0.5, "kernels": 1.0, "collectives": 0.25, "GiB": 2**28},
        **{"table": HOSTILE, "rank": 1, "rows": 2_000, "columns": 8},
    }
    for shown in (
        SPLIT.line(17.0),
        "rows < 10 & so on",
        "Iteration 17.000 ms. Critical path 17.000 ms, estimated bound 16.000 ms, gap",
        "7 tables on 2 ranks, 4 of them split; rank 1 is the fullest: 2.00 GiB of 4.00",
    ):
        assert shown in text


def test_plan_without_splits_limits_or_bound() -> None:
    plain = dataclasses.replace(
        REPORT,
        critical_path_ms=math.nan,
        ranks=(rank(0, 0.0, 1.0, 0.0, 0.0, 1.0, memory=None),),
        splits=(),
        tables=(table("whole", 8),),
        notes=(),
        lower_bound_ms=0.0,
    )
    page = html_report(plain)
    text = shown_of(page)
    assert "on 1 rank, 0 of them split" in text
    assert "Notes" not in text and "Column splits" not in text
    assert "Iteration unknown. " in text
    ranks, tables, _ = (rows_of(table) for table in data_of(page)["grids"])
    assert "of GiB" not in ranks[0] and not {"path", "kernels"} & tables[0].keys()
    bars = str(plain).split("Ranks:\n")[1].splitlines()[:2]
    assert bars == [f"rank 0  {'#' * 40}  1.00 GiB", "# memory"]


def test_header_says_what_was_planned_and_by_which_command() -> None:
    report = dataclasses.replace(large_report(), critical_path_ms=16.0, spread_ms=0.25)
    page = html_report(report, "Plan", command="neuroshard plan '<t>.csv'")
    facts = dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", page))
    written = facts.pop("Written")
    assert written.endswith(f" by torchrec_neuroshard {__version__}")
    assert {name: html.unescape(value) for name, value in facts.items()} == {
        "Card": "NVIDIA <H100>",
        "Ranks": "128 (16 nodes of 8)",
        "Batch": "512 samples per rank",
        "Iteration": "16.250 ms",
        "Samples per second": "4,030,000 (31,500 per rank)",
        "Command": "neuroshard plan '<t>.csv'",
    }
    assert "<dt>Command" not in html_report(report) and "<t>" not in page


def test_the_page_says_what_averaging_adds() -> None:
    sync = WeightSync(
        num_replicas=2, interval=10, rank_bytes=1.0, sync_ms=5.0, source="measured"
    )
    report = dataclasses.replace(REPORT, weight_sync=sync)
    assert "Averaging between replicas adds 0.500 ms." in shown_of(html_report(report))


def test_the_page_says_what_the_slowest_of_equal_ranks_adds() -> None:
    report = dataclasses.replace(REPORT, spread_ms=0.25)
    shown = shown_of(html_report(report))
    assert "mean, which adds 0.250 ms to the critical path." in shown
    assert "Not drawn: the slowest" in shown
    assert "Not drawn" not in shown_of(html_report(REPORT))


def test_plan_files_of_earlier_versions_have_no_timeline() -> None:
    old = dataclasses.replace(REPORT, timeline=None)
    page = html_report(old)
    assert {c["kind"] for c in data_of(page)["charts"]} == {"bars", "heat map"}
    assert "One iteration" not in shown_of(page)
    assert "binding" not in old.text(verbose=True)


def memory_chart(*ranks: RankReport) -> dict[str, Any]:
    """Return the memory chart of a page of these ranks."""
    charts = data_of(html_report(dataclasses.replace(REPORT, ranks=ranks)))["charts"]
    (chart,) = (c for c in charts if c.get("unit") == "GiB")
    assert isinstance(chart, dict)
    return chart


def test_memory_is_split_into_what_fills_it() -> None:
    gib = 2.0**30
    parts = {"weights": 0.5 * gib, "optimizer": 0.0, "step": 0.5 * gib}
    split = dataclasses.replace(
        rank(0, *[1.0] * 5), parts_bytes=parts, device_bytes=5 * 2**30
    )
    chart = memory_chart(split)
    assert chart["names"] == ["weights", "step", "free", "reserved"]
    assert chart["rows"] == [[0, 0.5, 0.5, 3, 1]] and chart["limits"] == [4]
    assert chart["labels"]["step"] == "inputs, outputs and gradients of a step"
    # An overfull rank reaches into what is reserved.
    over = dataclasses.replace(
        split, used_bytes=4.5 * gib, parts_bytes={**parts, "unsplit": 3.5 * gib}
    )
    chart = memory_chart(over)
    assert chart["names"] == ["weights", "step", "unsplit", "free", "reserved"]
    assert chart["rows"] == [[0, 0.5, 0.5, 3.5, 0, 0.5]] and chart["limits"] == [4]
    # Without parts of every rank there is one bar.
    chart = memory_chart(split, rank(1, *[1.0] * 5))
    assert chart["names"] == ["used", "free", "reserved"]
    assert chart["rows"] == [[0, 1, 3, 1], [1, 2, 2, 0]]
    assert chart["limits"] == [4, None]
    unsplit = dataclasses.replace(split, parts_bytes={"unsplit": gib})
    assert memory_chart(unsplit)["names"] == ["used", "free", "reserved"]


def test_the_heat_map_starts_with_the_table_that_costs_a_rank_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ms: dict[str, Any] = {"used_bytes": 0.0, "compute_ms": 0.0, "comms_ms": 0.0}
    known = [
        table("everywhere", *[4] * 3, **{**ms, "compute_ms": 0.5, "used_bytes": 1.0}),
        table("one rank", 4, **{**ms, "comms_ms": 1.0}),
        *(table(f"t{i}", 4, first=i, **{**ms, "compute_ms": 0.25}) for i in range(50)),
        table("large", 4, **{**ms, "used_bytes": 2.0}),
        table("two shards", 4, 4, first=127, **{**ms, "compute_ms": 0.125}),
    ]
    chart = heat_map(known, 128, 8)
    names = [name for name, _ in chart["tables"]]
    by_ms, by_gib = chart["views"]
    shown = [names[row] for row in by_ms["rows"]]
    assert shown == ["one rank", "everywhere", *(f"t{i}" for i in range(38))]
    assert (by_ms["left"], by_ms["most_left"]) == (len(known) - MAX_ROWS, 0.25)
    assert [names[row] for row in by_gib["rows"][:2]] == ["large", "everywhere"]
    assert by_gib["most_left"] == 0.0
    # Of many ranks there is room for fewer tables.
    wide = [table(str(i), *[4] * 100, compute_ms=1.0) for i in range(40)]
    monkeypatch.setattr("torchrec_neuroshard.report.heat_map.MAX_CELLS", 1_050)
    assert [(len(v["rows"]), v["left"]) for v in heat_map(wide, 100, 8)["views"]] == [
        (10, 30),
        (10, 30),
    ]
    # A unit without values is left out, and so is a map without units.
    assert [v["unit"] for v in heat_map(known[-2:-1], 1, 1)["views"]] == ["GiB"]
    assert heat_map([], 1, 1)["views"] == []


def test_long_pages_have_a_list_of_contents() -> None:
    page = html_report(comparison())
    (contents,) = re.findall("<nav.*?</nav>", page)
    links = re.findall(r"<a href='#(.*?)'>(.*?)</a>", contents)
    headings = re.findall(r"<h[12] id='(.*?)'>(.*?)</h[12]>", page)
    assert links == headings and len(links) > MAX_HEADINGS
    parts = re.findall(r"<li class=part><a href='.*?'>(.*?)</a>", contents)
    assert [html.unescape(part) for part in parts] == ["Ours", "Theirs <1>"]
    short = dataclasses.replace(REPORT, tables=(), notes=(), splits=(), timeline=None)
    assert "<nav" not in html_report(short)


def test_two_plans_are_shown_side_by_side() -> None:
    found = comparison()
    page = html_report(found)
    text, data = shown_of(page), data_of(page)
    for shown in (
        "Predicted (kernels: measured): ours takes 17.000 ms instead of 20.000 "
        "(-15.0%) and saves 3.000 ms per iteration.",
        "2 of 7 tables are placed differently; switching moves 1.00 GiB of weights.",
        "batch <differs>",
    ):
        assert shown in text
    ours, theirs = "Ours Iteration 17.000 ms", "Theirs <1> Iteration 20.000 ms"
    assert 0 < text.find(ours) < text.find(theirs)
    figures, moves = (rows_of(table) for table in data["grids"][:2])
    assert figures[3] == {
        **{"figure": "fwd_compute [ms]", "theirs <1>": 8.0, "ours": 4.0},
        **{"change": -0.5},
    }
    assert moves[1] == {
        **{"GiB to move": 2**30, "table": HOSTILE, "theirs <1>": "row_wise"},
        **{"ours": "absent"},
    }
    assert [c.get("title") for c in data["charts"][:3]] == ["ours", "theirs <1>", None]
    lines = str(found).splitlines()
    assert [line.split() for line in lines if "little" in line] == [
        ["0.00", "little", "absent", "here"]
    ]
    assert "- warning: batch <differs>" in lines
    assert not any("Iteration 20" in line for line in lines)
    saved = found.to_json()
    noted = {"code": "comparison", "table": None, "severity": "warning"}
    assert saved["notes"] == [{**noted, "text": "batch <differs>"}]
    assert (saved["saved_ms"], saved["moved_bytes"]) == (3.0, 2**30 + 2**20)
    source = "measured for 5 of 7 tables, 2 extrapolated (batch)"
    partly = dataclasses.replace(found.second, compute_source=source)
    verdict = dataclasses.replace(found, second=partly).verdict
    assert verdict.startswith("predicted (kernels: measured for 5 of 7 tables): ours")
    assert found.certainty == "" and saved["error"] is None
    path: dict[str, Any] = {"parts_ms": {"bwd_compute": 17.0}}
    for error, told in ((0.1, "larger than"), (0.2, "smaller than")):
        second, first = (
            dataclasses.replace(plan, compute_errors=(0.0, off), **path)
            for plan, off in ((found.second, error), (found.first, 0.0))
        )
        known = dataclasses.replace(found, second=second, first=first)
        whole = (
            f"the difference is {told} the error of a predicted iteration, {error:.0%}"
        )
        assert known.certainty.startswith(whole) and whole in str(known)
        assert dataclasses.replace(known, first=second).certainty == ""
    unknown = dataclasses.replace(
        found, first=dataclasses.replace(found.first, critical_path_ms=math.nan)
    )
    assert unknown.certainty == ""
    assert "time unknown" in unknown.verdict and unknown.to_json()["saved_ms"] is None


def test_notebooks_show_the_page_in_a_frame_of_its_own() -> None:
    for report in (REPORT, comparison()):
        shown = report._repr_html_()
        # Without allow-same-origin its script cannot reach the notebook.
        assert shown.startswith("<iframe sandbox='allow-scripts allow-downloads' ")
        page = shown.partition('srcdoc="')[2].removesuffix('"></iframe>')
        assert '"' not in page and html.unescape(page) == html_report(report)


def large_report() -> PlanReport:
    """Return a report of 2,000 tables on 128 ranks."""
    tables = (
        table(f"table_{i}", *[32] * 4, first=i, used_bytes=i) for i in range(2_000)
    )
    ranks = tuple(rank(i, 1.0, 1.0 + i, 1.0, 1.0, 1.0) for i in range(128))
    return dataclasses.replace(
        REPORT,
        ranks=ranks,
        tables=tuple(tables),
        basis=basis(ranks_per_node=8),
        timeline=Timeline.of(PredictedCosts(STAGES)),
    )


@pytest.mark.skipif(find_browser() is None, reason="needs Debian's package 'chromium'")
def test_pages_work_in_a_browser(tmp_path: Path) -> None:
    """One browser opens four pages in frames, because a start takes seconds."""
    reports: dict[str, PlanReport | PlanComparison] = {
        "plan": REPORT,
        "compared": comparison(),
        "large": large_report(),
    }
    frames = "".join(
        f'<iframe id="{name}" height="9000" width="1100" '
        f'srcdoc="{html.escape(html_report(report))}"></iframe>'
        for name, report in reports.items()
    )
    shown = REPORT._repr_html_()
    # Once as it is, and once for the test to look inside, as notebooks cannot.
    sandbox = "sandbox='allow-scripts allow-downloads'"
    shown += shown.replace(sandbox, "id='notebook'").replace("640px", "9000px")
    drive = Path(__file__).with_name("drive_page.js").read_text(encoding="utf-8")
    outer = tmp_path / "outer.html"
    outer.write_text(
        "<!DOCTYPE html><meta charset='utf-8'><pre id='found'></pre>"
        f"{frames}{shown}<script>{drive}</script>",
        encoding="utf-8",
    )
    dom, said = open_page(outer)
    assert not said, "\n".join(said)
    match = re.search(r'<pre id="found">(.*?)</pre>', dom, re.DOTALL)
    assert match is not None
    found = json.loads(html.unescape(match[1]))
    assert "error" not in found, found["error"]
    assert not found["hacked"]

    plan = found["plan"]
    assert plan["tables"] == [HOSTILE, "user<b>&co", "b", "c", "whole"]
    # Rank 0's phases, upwards, on the scale of the highest bar.
    heights = plan["heights"]
    assert [h / heights[0] for h in heights] == pytest.approx([1, 2, 3, 4, 5], rel=1e-3)
    assert plan["hint"].startswith("rank 0, index_comms: 1.000 ms, fwd_compute: 2.000")
    lanes = [plan["lanes"][start : start + 4] for start in (0, 4)]
    assert lanes == [[f"rank {r}", "compute", "", "collectives"] for r in (0, 1)]
    # Rank 1's lookups last from 1 to 5 of 17 ms, and bind.
    block = plan["blocks"]["rank 1: fwd_compute, 4.000 ms, sparse (a<b), binds"]
    assert block["left"] == pytest.approx(100 / 17, rel=1e-3)
    assert block["width"] == pytest.approx(400 / 17, rel=1e-3)
    assert block["text"] == "4.000"
    # Rank 0 ends its lookups 2 ms earlier, and waits for rank 1 and both exchanges.
    waiting = plan["blocks"]["rank 0: waiting, 9.000 ms, until bwd_comms is done"]
    assert waiting["left"] == pytest.approx(300 / 17, rel=1e-3)
    assert waiting["width"] == pytest.approx(900 / 17, rel=1e-3)
    assert (
        "rank 1: waiting, 3.000 ms, until the next iteration begins" in plan["blocks"]
    )
    assert block["outlined"] and not any(
        b["outlined"] for hint, b in plan["blocks"].items() if "binds" not in hint
    )
    assert plan["times"] == ["0 ms", "5", "10", "15"]
    assert plan["bound"] == pytest.approx(1600 / 17, rel=1e-3)
    assert plan["peaks"] == ["5.000", "4.000"]  # of both ranks, where one is slower
    assert plan["notes"] == ["warning: rows < 10 & so on"]
    # Tab leads to one part of the timeline, arrow keys to the others.
    num_tabbed, *walked = plan["walk"]
    phases = "waiting", "fwd_compute", "bwd_compute", "bwd_comms", "index_comms"
    assert num_tabbed == 1 and walked == [f"rank 0: {phase}" for phase in phases]
    (at_end,) = plan["tabbed after"]
    assert at_end.startswith("rank 0: index_comms, 1.000 ms")
    assert plan["dismissed"] == [] and plan["hovered"] == plan["hint"].split(", ")
    # A click on a bar selects its rank in all charts and narrows the shards to it.
    assert plan["tapped"] == "rank 1"
    assert plan["of rank 1"] == [HOSTILE, "user<b>&co", "b", "c"]
    assert len(plan["pressed"]) == 8 + 2 + 4  # of the timeline, bars and heat map
    assert all("rank 1" in label for label in plan["pressed"])
    assert plan["selected"] == ["rank 1", "compute", "", "collectives", *"111"]
    assert plan["kept"] == "rank 1 selected4 shardsClear"
    assert plan["shards"] == 9  # after a second click
    # Enter selects, too, and Escape lets go.
    assert plan["in all charts"] == [True] * 14 and plan["let go"] == [""]
    assert plan["shards then"] == 9
    label, text = plan["heat"][1]
    times = "kernels 1.000 ms, collectives 0.250 ms"
    assert label == f"{HOSTILE}, rank 1, {times}, 0.25 GiB" and text == "1.250"
    assert plan["heat in GiB"][:3] == ["0.25", "0.25", "0.00"]
    file, saved = plan["saved"]
    assert file == "shards.csv"
    header, first, *_ = csv.reader(saved.splitlines())
    assert header[:3] == ["path [ms]", "kernels [ms]", "collectives [ms]"]
    assert header[3:] == ["GiB", "table", "rank", "rows", "columns"]
    assert first == ["0.5", "1", "0.25", "0.25", HOSTILE, "0", "2000", "8"]
    assert saved.count("\r\n") == 1 + 9
    # Perfetto's trace has a process per rank, a thread per stream, and microseconds.
    file, trace = plan["trace"]
    assert file == "iteration.trace.json"
    names = [
        (e["name"], e["pid"], e["tid"], e["args"].get("name"))
        for e in trace["traceEvents"]
        if e["ph"] == "M" and "name" in e["args"]
    ]
    assert names[:3] == [
        ("process_name", 0, 0, "rank 0"),
        ("thread_name", 0, 0, "compute"),
        ("thread_name", 0, 1, "collectives"),
    ]
    spans = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    timeline = REPORT.timeline
    assert timeline is not None
    assert [
        (e["pid"], e["cat"], e["name"], e["ts"] / 1e3, (e["ts"] + e["dur"]) / 1e3)
        for e in spans
    ] == [(s.rank, s.stream, s.phase, s.start_ms, s.end_ms) for s in timeline.spans]
    assert spans[0]["args"] == {"stage": "sparse (a<b)", "batch": 0, "binds": True}

    compared = found["compared"]
    assert compared["moves"] == ["little", HOSTILE]  # as given
    assert compared["by name, down"] == ["little", HOSTILE]
    second, first = compared["tops"]  # rank 1's 14 ms and 28 ms on one scale
    assert first / second == pytest.approx(2, rel=1e-3)

    large = found["large"]
    assert large["laid out"] == 100 and large["after scrolling"] == 200
    assert large["costliest"] == "table_0"  # as given
    assert large["by name"] == ["table_0", "table_1", "table_2"]  # 2 before 10
    assert large["filtered"] == ["table_1777", "1 of 2,000 tables"]
    every = "2,000 tables"
    assert large["filters"] == {
        "rows>=4e3 shards=4": [every, "false"],
        "rows>1e6": [f"0 of {every}", "false"],
        "rows:4,000": [every, "false"],
        "gib<1e-6": [f"269 of {every}", "false"],  # 4 x 268 bytes are less than 1,073.7
        "table=table_7": [f"1 of {every}", "false"],
        "table:table_7": [f"1 of {every}", "false"],
        "table!=table_7": [f"1,999 of {every}", "false"],
        "no:such": [f"0 of {every}", "false"],  # a word, which a name may contain
        "no>3": [f"{every}; there is no column 'no'", "true"],
        "rows>many": [f"{every}; 'many' is no number", "true"],
        "columns<=": [f"{every}; a value is missing after columns<=", "true"],
        "table>3": [f"{every}; table is text, so only = and != work", "true"],
        "table_1 rows>many": [f"1,111 of {every}; 'many' is no number", "true"],
    }
    assert large["example"] == "Filter: words, rows>1e6, gib>=0.5"
    # Stages and times of blocks, and how long collectives run beside kernels.
    beside = [block for block in large["blocks"] if "beside kernels" in block[0]]
    assert len(beside) == 4
    said, shown = beside[0]
    assert said.startswith("rank 0: fwd_comms, 3.000 ms, 1.000 ms of it beside kernels")
    assert said.endswith("sparse (row_wise), binds") and shown == "13.000"  # stage 1
    assert large["drawn"] == MAX_ROWS
    assert large["rest"].startswith("1,960 more tables are left out; they take at most")
    held = sum(s.rank == 5 for t in large_report().tables for s in t.shards)
    assert large["on rank 5"] == f"{held} of 8,000 shards" and 0 < held < 100
    assert large["sorted"][5] == "descending" and large["sorted"].count(None) == 10
    assert large["slowest"] == "127"
    assert large["nodes"] == [f"node {i}" for i in range(0, 16, 2)]
    assert large["edges"] == 16

    notebook = found["notebook"]
    assert notebook["tables"] == plan["tables"]
    assert notebook["followed"] == [True, "about:srcdoc"]
