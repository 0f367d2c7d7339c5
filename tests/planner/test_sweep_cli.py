"""`neuroshard sweep`: every cell is planned for what it says."""

from __future__ import annotations

import csv
import dataclasses
import math
import re
from pathlib import Path

import pytest

from torchrec_neuroshard.cli import main
from torchrec_neuroshard.report import Sweep, SweepCell

TABLES = (
    "name,num_embeddings,embedding_dim,pooling_factor\n"
    "user,2000000,64,20\nitem,100000,32,5\nshop,1000,16,3\n"
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.csv").write_text(TABLES)
    return tmp_path


def test_cells_are_planned_one_by_one(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--cards", "a100,h100", "--ranks", "1,2", "--batch-sizes", "512"]
    options += ["--group-sizes", "1", "--sync-interval", "100"]
    files = ["--csv", "s.csv", "--seconds", "0.1"]
    assert main(["sweep", "t.csv", *options, *files]) == 0
    printed = capsys.readouterr()
    assert not printed.err and "most samples per second: " in printed.out
    rows = list(csv.DictReader((folder / "s.csv").read_text().splitlines()))
    where = [(r["card"], r["num_ranks"], r["group_size"]) for r in rows]
    assert where == [
        (card, ranks, group)
        for card in ("a100", "h100")
        for ranks, group in (("1", "1"), ("2", "2"), ("2", "1"))
    ]
    by_cell = dict(zip(where, rows, strict=True))
    for row in rows:
        assert row["fits"] == "True" and "not measured" in row["kernels_source"]
        rate = float(row["samples_per_s"])
        ms = float(row["iteration_ms"])
        assert rate == pytest.approx(int(row["num_ranks"]) * 512 / ms * 1e3)
        assert 0 < float(row["kernels_ms"]) + float(row["links_ms"]) < ms * 1.001
        assert 0 < float(row["memory_bytes"]) < float(row["memory_limit_bytes"])
    # A group of one rank is planned as that rank, and pays for the average.
    alone, grouped = by_cell["h100", "1", "1"], by_cell["h100", "2", "1"]
    assert float(grouped["kernels_ms"]) == pytest.approx(
        float(alone["kernels_ms"]), rel=0.02
    )
    assert float(grouped["iteration_ms"]) > float(alone["iteration_ms"])
    faster = [float(by_cell[c, "1", "1"]["kernels_ms"]) for c in ("h100", "a100")]
    assert faster[0] < faster[1]


def cell(**fields: object) -> SweepCell:
    known = SweepCell(
        card="h100",
        num_ranks=8,
        batch_size=1_000,
        group_size=8,
        iteration_ms=4.0,
        kernels_ms=1.0,
        links_ms=3.0,
        gap=math.inf,
        memory_bytes=2**30,
        memory_limit_bytes=2**31,
        uncertainty=0.1,
        kernels_source="measured",
        links_source="published links of h100, not measured",
    )
    return dataclasses.replace(known, **fields)  # type: ignore[arg-type]


def test_limits_and_sources_are_named() -> None:
    assert cell().limit == "links" and cell().samples_per_s == 2_000_000
    assert cell(kernels_ms=3.5).limit == "kernels"
    assert cell(num_in_host_memory=1).limit == "memory"
    no_room = cell(card="v100", obstacle="no room", iteration_ms=math.nan)
    assert (no_room.limit, no_room.fits) == ("memory", False)
    lines = str(Sweep(cells=(cell(), no_room, cell(num_ranks=4)))).splitlines()
    shown = "h100 8 8 1,000 4.000 10% ? 2,000,000 1.00"
    assert lines[1].split()[:9] == shown.split()
    assert lines[2].endswith("does not fit: no room")
    assert lines[4] == "most samples per second: 8 x h100, 1,000 samples per rank"
    assert lines[5:] == [
        "h100: compute: measured; collectives: published links of h100, not measured"
    ]


def test_what_fits_nowhere_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    Path("t.csv").write_text(TABLES.replace("2000000", "200000000000"))
    assert main(["sweep", "t.csv", "--ranks", "1"]) == 1
    out = capsys.readouterr().out
    assert re.search("does not fit: .*table 'user'", out) and "nothing fits" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cards", "h100, h900"], "unknown card 'h900'"),
        (["--batch-sizes", "0"], "--batch-sizes must be above 0, got 0"),
        (["--group-sizes", "3"], "--group-sizes has 3, which is no part of any"),
    ],
)
def test_bad_options_say_the_way_out(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["sweep", "t.csv", *arguments]) == 2
    assert message in capsys.readouterr().err
