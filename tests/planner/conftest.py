from __future__ import annotations

import pytest

from torchrec_neuroshard.planner.parts import torchrec_plan


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine, TorchRec's planner is asked."""
    monkeypatch.setattr(torchrec_plan, "LEAST_STOCK_SECONDS", 15.0)
