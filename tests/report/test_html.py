from __future__ import annotations

import dataclasses
import io
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from torchrec_neuroshard.report import (
    PlanComparison,
    PlanReport,
    RankReport,
    ShardReport,
    SplitReport,
    TableMove,
    TableReport,
    html_report,
    write_html,
)
from torchrec_neuroshard.report.terminal import print_report
from torchrec_neuroshard.simulator import PHASES, RankCosts

VOID = {"meta", "br"}


class Page(HTMLParser):
    """Checks that tags are closed in order, and keeps what the page shows."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.shown: list[str] = []
        self.titles: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "title":
            self.titles.append(data)
        elif data.strip() and "style" not in self.open:
            self.shown.append(" ".join(data.split()))

    @property
    def text(self) -> str:
        return " ".join(self.shown)

    def bars(self, color: str) -> list[float]:
        return [
            float(a["width"] or 0)
            for tag, a in self.tags
            if tag == "rect" and a["fill"] == color
        ]


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
REPORT = PlanReport(
    critical_path_ms=17.0,
    lower_bound_ms=16.0,
    gap=1 / 16,
    uncertainty=0.03,
    compute_source="measured",
    comms_source="datasheet, not measured",
    search_seconds=1.25,
    num_evaluated=1_234,
    num_tables=7,
    ranks=(rank(0, 1.0, 2.0, 3.0, 4.0, 5.0), rank(1, 1.0, 4.0, 3.0, 4.0, 2.0)),
    num_split=3,
    splits=(SPLIT,),
    tables=(
        TableReport(
            table="big<",
            sharding_type="row_wise",
            compute_kernel="fused",
            num_embeddings=4_000,
            embedding_dim=8,
            shards=tuple(
                ShardReport(
                    rank=rank,
                    num_embeddings=2_000,
                    embedding_dim=8,
                    used_bytes=2**28,
                    compute_ms=1.0,
                    comms_ms=0.25,
                )
                for rank in (0, 1)
            ),
        ),
    ),
    fallback=None,
    warnings=("rows < 10 & so on",),
)


@pytest.fixture(scope="module")
def page() -> Page:
    found = Page(html_report(REPORT, "Plan of <mine>"))
    assert not found.open
    return found


def test_page_needs_nothing_else() -> None:
    text = html_report(REPORT)
    assert text.startswith("<!DOCTYPE html>")
    assert not re.search(r"https?:|src=|@import|url\(|<script|<link", text)


def test_names_are_shown_as_they_are(page: Page) -> None:
    assert "user<b>&co" in page.text and "rows < 10 & so on" in page.text
    assert "Plan of <mine>" in page.text and page.titles[0] == "Plan of <mine>"


def test_bars_are_as_long_as_phases(page: Page) -> None:
    told = [t for t in page.titles if t.startswith("rank 0, ")]
    assert told == [
        f"rank 0, {name}: {ms:.3f} ms"
        for name, ms in zip(PHASES, (1, 2, 3, 4, 5), strict=True)
    ]
    # The colour of backward compute is used for nothing else.
    first, second = page.bars("#e07b39")
    assert first / second == pytest.approx(5 / 2, rel=1e-2)
    forward = page.bars("#1b6ca8")[1:]  # after that of the bound
    assert forward[0] / first == pytest.approx(2 / 5, rel=1e-2)


def test_bound_is_shown_within_the_critical_path(page: Page) -> None:
    (path,) = page.bars("#f2c9ac")
    assert page.bars("#1b6ca8")[0] / path == pytest.approx(16 / 17, rel=1e-3)
    assert "17.000 ms" in page.text and "a gap of at most 6.2%" in page.text


def test_memory_is_shown_within_what_there_is(page: Page) -> None:
    used, free = page.bars("#66c2a5")[-2:], page.bars("#ddd")
    assert [u / f for u, f in zip(used, free, strict=True)] == pytest.approx(
        [1 / 4, 2 / 4], rel=1e-2
    )
    assert "1.00 GiB of 4.00" in page.text


def test_splits_say_why_and_how_many_are_left_out(page: Page) -> None:
    assert "48 (0), 16 (1)" in page.text
    assert SPLIT.reason(17.0) in page.text
    assert "... and 2 more" in page.text
    assert "big< row_wise, 2 shards on ranks 0-1 4,000 8 0.50 2.500" in page.text


def test_slowest_ranks_stand_out(page: Page) -> None:
    worst = sum(a.get("class") == "number worst" for _, a in page.tags)
    assert worst == 2 + 1 + 2 + 2 + 1  # ranks are equal in three phases


def test_plan_without_splits_limits_or_bound() -> None:
    ranks = tuple(rank(i, 0.0, 1.0, 0.0, 0.0, 1.0, memory=None) for i in range(100))
    plain = dataclasses.replace(
        REPORT,
        ranks=ranks,
        splits=(),
        num_split=0,
        tables=(),
        warnings=(),
        gap=math.inf,
        lower_bound_ms=0.0,
        fallback="it is <faster>",
    )
    page = Page(html_report(plain))
    assert "No table is split." in page.text
    assert "; how far above the best possible is unknown." in page.text
    assert "bound 0.000 ms" not in page.text
    assert "TorchRec's own plan was taken: it is <faster>" in page.text
    assert "Warnings" not in page.text
    assert len(page.bars("#e07b39")) == 100
    assert not page.bars("#ddd")
    empty = dataclasses.replace(plain, ranks=(rank(0, *[0.0] * 5),), critical_path_ms=0)
    assert "0.000 ms" in Page(html_report(empty)).text


def test_two_plans_are_shown_side_by_side() -> None:
    other = dataclasses.replace(REPORT, critical_path_ms=20.0, num_split=1)
    move = TableMove(
        table="big<", before="row_wise, ranks 0-1", after="", moved_bytes=2**30
    )
    found = PlanComparison(
        first_name="theirs <1>",
        first=other,
        second_name="ours",
        second=REPORT,
        moves=(move,),
        notes=("batch <differs>",),
    )
    page = Page(html_report(found))
    assert not page.open
    assert "Ours takes 17.000 ms of 20.000 (-15.0%): it saves 3.000 ms" in page.text
    assert "theirs <1> ours critical path [ms] 20.000 17.000" in page.text
    assert "fwd_compute, slowest rank [ms] 4.000 4.000" in page.text
    assert "memory, fullest rank [GiB] 2.000 2.000" in page.text
    assert "1 of 7; ranks would fetch 1.00 GiB of weights." in page.text
    assert "big< row_wise, ranks 0-1 1.00 GiB" in page.text
    assert "batch <differs>" in page.text
    assert page.text.count("Memory of each rank") == 2
    assert page.text.count("rows < 10 & so on") == 1
    text = str(found)
    assert "big<: row_wise, ranks 0-1 -> not there, 1.00 GiB" in text
    assert "- batch <differs>" in text
    data = found.to_json()
    assert (data["saved_ms"], data["moved_bytes"]) == (3.0, 2**30)
    unknown = dataclasses.replace(
        found, first=dataclasses.replace(other, critical_path_ms=math.nan)
    )
    assert "is not known" in unknown.verdict and unknown.to_json()["saved_ms"] is None


def test_bars_are_as_long_as_phases_on_a_terminal() -> None:
    console = Console(file=io.StringIO(), width=200)
    print_report(REPORT, console)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    first, second = (line for line in lines if line.startswith("rank "))
    # 40 cells for the 15 ms of rank 0; 14 ms of rank 1.
    assert first.split()[2] == "i" * 3 + "F" * 5 + "f" * 8 + "b" * 11 + "B" * 13
    assert len(second.split()[2]) == round(40 * 14 / 15)
    assert first.endswith("15.000 ms     1.00 of 4.00 GiB, 25%")
    assert "- rows < 10 & so on" in lines
    colored = Console(
        file=io.StringIO(), width=200, force_terminal=True, color_system="standard"
    )
    print_report(REPORT, colored)
    shown = colored.file.getvalue()  # type: ignore[attr-defined]
    assert "\x1b[36m█████\x1b[0m" in shown


def test_file_is_written_whole(tmp_path: Path) -> None:
    path = tmp_path / "plan.html"
    write_html(REPORT, path, "mine")
    assert path.read_text(encoding="utf-8") == html_report(REPORT, "mine")
    assert [p.name for p in tmp_path.iterdir()] == ["plan.html"]
