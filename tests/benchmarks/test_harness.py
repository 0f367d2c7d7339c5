"""Small parts that the benchmarks share."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.models import NUM_BATCHES, draw_batches, profile_tables
from harness.options import option, read_options
from harness.provenance import commit
from harness.ranks import machine_speeds, scaled_median
from harness.training_runs import take_turns
from torchrec_neuroshard import profile_inputs
from torchrec_neuroshard.tables import TableConfig


@dataclass(frozen=True, kw_only=True)
class Config:
    size: int = option(8192, "samples, 10 % of them new", 64)
    name: str = option("all", "which")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], Config(size=8192, name="all")),
        (["--quick"], Config(size=64, name="all")),
        (["--quick", "--size", "3"], Config(size=3, name="all")),
        (["--name", "one"], Config(size=8192, name="one")),
    ],
)
def test_options_are_the_fields(arguments: list[str], expected: Config) -> None:
    assert read_options(Config, arguments, "Tell.") == expected


def test_changed_sources_mark_the_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*arguments: str) -> None:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", *identity, *arguments], check=True, capture_output=True)

    monkeypatch.chdir(tmp_path)
    assert commit() == "unknown"
    source, result = Path("a.py"), Path("benchmarks/results/a.json")
    result.parent.mkdir(parents=True)
    for path in (source, result):
        path.write_text("1")
    git("init")
    git("add", ".")
    git("commit", "-m", "first")
    clean = commit()
    result.write_text("2")
    Path("untracked.py").write_text("1")
    assert commit() == clean and "-" not in clean
    source.write_text("2")
    assert commit() == f"{clean}-dirty"


def test_help_names_both_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read_options(Config, ["--help"], "Tell.\nMore.")
    shown = " ".join(capsys.readouterr().out.split())
    assert "samples, 10 % of them new (default: 8192; with --quick: 64)" in shown
    assert "which (default: all)" in shown


def test_every_second_round_is_the_one_before_backwards() -> None:
    names = ["a", "b", "c", "d"]
    orders = [take_turns(names, number) for number in range(8)]
    for one, other in zip(orders[::2], orders[1::2], strict=True):
        assert other == one[::-1]
    assert all(sorted(order) == names for order in orders)
    assert len({tuple(order) for order in orders}) > 2
    assert orders == [take_turns(names, number) for number in range(8)]


def test_speeds_bring_a_round_to_the_models_milliseconds() -> None:
    speeds = machine_speeds([[4.0, 4.0, 9.0], [8.0]], nominal_ms=2.0)
    assert speeds == [0.5, 0.25]
    rounds: list[dict[str, Any]] = [{"ms": [6.0, 8.0]}, {"ms": [12.0]}]
    assert scaled_median(rounds, speeds, lambda r: r["ms"]) == 3.0
    assert machine_speeds([[4.0], [8.0]], nominal_ms=0.0) == [1.0, 1.0]
    assert machine_speeds([[0.0]], nominal_ms=2.0) == [1.0]  # GPUs have no reference


def test_profile_is_of_what_all_ranks_read_first() -> None:
    tables = [
        TableConfig(name="t", num_embeddings=50, embedding_dim=4, pooling_factor=3.0)
    ]
    cpu = torch.device("cpu")
    by_rank = [draw_batches(tables, 8, 5, rank, cpu) for rank in range(3)]
    assert [len(batches) for batches in by_rank] == [NUM_BATCHES] * 3
    drawn = {tuple(b.ids.values().tolist()) for batches in by_rank for b in batches}
    assert len(drawn) == 3 * NUM_BATCHES
    expected = profile_inputs(batches[0].ids for batches in by_rank)
    assert profile_tables(tables, 8, 5, 3) == expected
    assert expected["t"].batch_size == 24
