"""`neuroshard profile`: files of ids in, profiles out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from pyarrow import csv, parquet

from torchrec_neuroshard.cli import main
from torchrec_neuroshard.tables.loaders import load_profiles
from torchrec_neuroshard.tables.profile import profile_ids

RNG = np.random.default_rng(0)
COLUMNS: dict[str, Any] = {
    "user": RNG.integers(0, 40, 300),
    "tags": [RNG.integers(0, 9, n).tolist() for n in RNG.integers(0, 5, 300)],
    "label": RNG.random(300),
    "title": ["a"] * 300,
}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    parquet.write_table(pyarrow.table(COLUMNS), tmp_path / "data.parquet")
    return tmp_path / "data.parquet"


def test_profiles_are_those_of_the_ids(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], phases: list[str]
) -> None:
    out = tmp_path / "profiles.json"
    assert main(["profile", str(data), "--out", str(out), "--samples", "200"]) == 0
    tags = COLUMNS["tags"][:200]
    assert load_profiles(out) == {
        "user": profile_ids(COLUMNS["user"][:200], np.ones(200, dtype=np.int64)),
        "tags": profile_ids(np.concatenate(tags), np.array([len(t) for t in tags])),
    }
    shown = capsys.readouterr().out
    assert "user" in shown and "tags" in shown
    assert "not profiled: label, title\n" in shown
    assert phases == ["reading the data", "profiling", "writing"]
    assert main(["profile", str(data), "--out", "-", "--samples", "200"]) == 0
    assert capsys.readouterr().out == out.read_text()


def test_folders_and_csv_are_read_and_empty_cells_are_no_ids(tmp_path: Path) -> None:
    folder = tmp_path / "parts"
    folder.mkdir()
    for number in range(2):
        part = pyarrow.table({"item": [1, None, 3 + number], "label": [0.5] * 3})
        csv.write_csv(part, folder / f"{number}.csv")
    out = tmp_path / "profiles.json"
    assert main(["profile", str(folder), "--out", str(out)]) == 0
    [profile] = load_profiles(out).values()
    assert (profile.batch_size, profile.num_lookups) == (6, 4)
    assert profile.num_distinct == 3


def test_what_cannot_be_profiled_is_named(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = tmp_path / "bad.parquet"
    bad.write_text("not a table")
    words = tmp_path / "words.csv"
    words.write_text("a,b\nx,y\n")
    hashes = tmp_path / "hashes.parquet"
    ids = pyarrow.array([2**63 + 1], pyarrow.uint64())
    parquet.write_table(pyarrow.table({"a": ids}), hashes)
    out = tmp_path / "out.json"
    for path, options, says in (
        (data, ["--features", "usr"], "has no column 'usr'; did you mean 'user'?"),
        (
            data,
            ["--features", "title"],
            "column 'title': ids must be integers or lists",
        ),
        (tmp_path / "none.parquet", [], "there is no data at"),
        (bad, [], "cannot be read"),
        (words, [], "has no column of integers"),
        (hashes, [], f"ids must be row numbers from 0, got {2**63 + 1}"),
    ):
        assert main(["profile", str(path), "--out", str(out), *options]) == 2
        assert says in capsys.readouterr().err
        assert not out.exists()


def test_a_padding_id_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    item = [[0] * 62 + list(range(1, 39)), list(range(40, 140))]
    plain = [[i, i + 1] for i in range(2)]
    path = tmp_path / "data.parquet"
    parquet.write_table(pyarrow.table({"item": item, "plain": plain}), path)
    out = tmp_path / "profiles.json"
    assert main(["profile", str(path), "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert (
        "id 0 is 31% of 'item': padding? Without it, samples have 69.00 ids " in shown
    )
    told = "over 8 ranks, one rank serves 3.2 times its share. Also, id 1 is 50% of "
    assert shown.count("padding?") == 1 and f"{told}'plain'. Drop padding" in shown
    assert "    100     100 " in shown  # lengths: 95 % and the longest
    hot = load_profiles(out)["item"].hot_rows
    assert hot is not None and hot.top_ids[0] == (0, 62 / 200)
