"""A sample of the campaign: each writer, each way to end it."""

from __future__ import annotations

import pytest

from tests.fuzz import against_kill

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("writer", against_kill.WRITERS)
def test_old_or_new_is_whole_and_the_next_try_succeeds(writer: str) -> None:
    # The campaign draws all ways and moments.
    for way, limit in (("kill", 1), ("kill in a write", 200)):
        outcome = against_kill.judge({"writer": writer, "way": way, "limit": limit})
        assert not outcome.startswith("failure"), outcome
        assert not outcome.endswith(against_kill.WRITTEN), f"{outcome}, not ended"
