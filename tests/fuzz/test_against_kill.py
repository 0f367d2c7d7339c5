"""Each writer is killed at a fixed moment, and any writer at drawn ones."""

from __future__ import annotations

import pytest

from tests.fuzz import against_kill
from tests.fuzz.campaign import judge_drawn

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("writer", against_kill.WRITERS)
def test_old_or_new_is_whole_and_the_next_try_succeeds(writer: str) -> None:
    for way, limit in (("kill", 1), ("kill in a write", 200)):
        outcome = against_kill.judge({"writer": writer, "way": way, "limit": limit})
        assert not outcome.startswith("failure"), outcome
        assert not outcome.endswith(against_kill.WRITTEN), f"{outcome}, not ended"


@pytest.mark.nightly
def test_drawn_ends() -> None:
    judge_drawn(60, against_kill.draw, against_kill.judge)
