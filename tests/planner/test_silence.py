"""What TorchRec says about its own parts, and when this planner passes it on."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import pytest
from torchrec.distributed.planner.stats import EmbeddingStats
from torchrec.distributed.planner.storage_reservations import (
    HeuristicalStorageReservation,
)

from tests.builders import bag_sharders, make_ebc, make_planner

KNOWN_ISSUE = "There is a known issue with TorchRec's dense tensor size"
STATS = "--- Planner Statistics ---"
NOTHING: dict[str, Any] = {"stats": None, "storage_reservation": None}
SILENCED = "silenced: TorchRec's table of statistics"


def said_by(
    log: pytest.LogCaptureFixture, **arguments: Any
) -> tuple[str, list[warnings.WarningMessage]]:
    """Return the log and the warnings of a plan."""
    log.set_level(logging.INFO)
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        planner = make_planner(2, **NOTHING | arguments)
        planner.plan(make_ebc([(1_000, 64)] * 2), bag_sharders())
    return log.text, given


def test_torchrec_is_silent_about_its_own_parts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    text, given = said_by(caplog)
    assert KNOWN_ISSUE not in text and STATS not in text
    assert text.count(SILENCED) == 1
    assert not [w for w in given if w.category is FutureWarning]


def test_parts_that_the_caller_passes_say_what_they_say_in_torchrec(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pytest.warns(FutureWarning, match="HeuristicalStorageReservation is known"):
        reservation = HeuristicalStorageReservation(0.15)
    asked = {"storage_reservation": reservation, "stats": EmbeddingStats()}
    text, _ = said_by(caplog, **asked)
    assert KNOWN_ISSUE in text and STATS in text and SILENCED not in text


def test_both_reserve_the_same(caplog: pytest.LogCaptureFixture) -> None:
    """Silence changes neither the memory that is reserved nor the logger."""
    speaker = logging.getLogger(HeuristicalStorageReservation.__module__)
    before = list(speaker.filters)
    with pytest.warns(FutureWarning):
        given = HeuristicalStorageReservation(0.15)
    module, sharders = make_ebc([(1_000, 64)] * 2), bag_sharders()
    rooms = [
        make_planner(2, **NOTHING | arguments).reserve(module, sharders)
        for arguments in ({}, {"storage_reservation": given})
    ]
    assert rooms[0].devices == rooms[1].devices
    assert speaker.filters == before
