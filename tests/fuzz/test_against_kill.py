"""A sample of the campaign: each writer, each way to end it."""

from __future__ import annotations

import pytest

from tests.fuzz import against_kill

pytestmark = pytest.mark.filterwarnings("ignore")

MOMENTS = {"kill": 0.8, "kill in a write": 0.5}
"""Of the ways to end; the campaign draws all moments."""


@pytest.mark.parametrize("writer", against_kill.WRITERS)
def test_old_or_new_is_whole_and_the_next_try_succeeds(writer: str) -> None:
    for way, moment in MOMENTS.items():
        case = {"writer": writer, "way": way, "moment": moment}
        outcome = against_kill.judge(case)
        assert not outcome.startswith("failure"), outcome
        assert not outcome.endswith(": "), f"{outcome}was not ended"
