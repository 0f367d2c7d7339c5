"""`neuroshard plan --compare` keeps to its seconds, and says what it left out."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torchrec.distributed.types import ShardingPlan

from torchrec_neuroshard.cli import main
from torchrec_neuroshard.planner.cli import plan
from torchrec_neuroshard.planner.parts.shard_estimators import OutOfTimeError
from torchrec_neuroshard.planner.parts.torchrec_plan import stock_plan

COMPARE = ["plan", "t.json", "--ranks", "2", "--card", "cpu", "--compare"]


def test_torchrecs_plan_is_asked_for_the_same_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    table = {"name": "user", "num_embeddings": 1000, "embedding_dim": 16}
    (tmp_path / "t.json").write_text(json.dumps([table]))
    asked: list[float] = []

    def late(*arguments: Any, seconds: float, **named: Any) -> ShardingPlan:
        asked.append(seconds)
        if seconds < 5:
            raise OutOfTimeError("it had estimated 120 of 500 tables")
        return stock_plan(*arguments, seconds=600, **named)

    clock = SimpleNamespace(monotonic=itertools.count(step=30).__next__)
    monkeypatch.setattr(plan, "time", clock)
    monkeypatch.setattr(plan, "stock_plan", late)
    # Without --seconds, those of the default search.
    assert main([*COMPARE, "--search", "random"]) == 0
    assert "was stopped after 20 s" in capsys.readouterr().out
    assert main([*COMPARE, "--search", "random", "--seconds", "2.5"]) == 0
    assert "after 2.5 s: it had estimated 120 of 500" in capsys.readouterr().out
    assert asked == [20, 2.5]
