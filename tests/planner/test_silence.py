"""What TorchRec says about its own parts, and when this planner passes it on."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

import pytest
from torchrec.distributed.planner import EmbeddingShardingPlanner
from torchrec.distributed.planner.stats import EmbeddingStats
from torchrec.distributed.planner.storage_reservations import (
    HeuristicalStorageReservation,
)
from torchrec.distributed.planner.types import Topology

from tests.builders import bag_sharders, make_ebc, make_planner, stock_planner

KNOWN_ISSUE = "There is a known issue with TorchRec's dense tensor size"
STATS = "--- Planner Statistics ---"
NOTHING: dict[str, Any] = {"stats": None, "storage_reservation": None}
SILENCED = "silenced: TorchRec's table of statistics"


def said_by(
    log: pytest.LogCaptureFixture, planner_of: Callable[[], EmbeddingShardingPlanner]
) -> tuple[str, list[warnings.WarningMessage]]:
    """Return the log and the warnings of a plan."""
    log.clear()
    log.set_level(logging.INFO)
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        planner_of().plan(make_ebc([(1_000, 64)] * 2), bag_sharders())
    return log.text, given


def asked() -> dict[str, Any]:
    return {
        "storage_reservation": HeuristicalStorageReservation(0.15),
        "stats": EmbeddingStats(),
    }


def test_torchrec_is_silent_about_its_own_parts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    text, given = said_by(caplog, lambda: make_planner(2, **NOTHING))
    assert KNOWN_ISSUE not in text and STATS not in text
    assert text.count(SILENCED) == 1
    assert not [w for w in given if w.category is FutureWarning]


def test_parts_that_the_caller_passes_say_what_they_say_in_torchrec(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cpus = Topology(world_size=2, compute_device="cpu")
    ours, warned = said_by(caplog, lambda: make_planner(2, **asked()))
    theirs, also_warned = said_by(caplog, lambda: stock_planner(cpus, **asked()))
    assert STATS in ours and STATS in theirs and SILENCED not in ours
    assert (KNOWN_ISSUE in ours) == (KNOWN_ISSUE in theirs)
    future, expected = (
        [str(w.message) for w in found if w.category is FutureWarning]
        for found in (warned, also_warned)
    )
    assert future == expected


def test_silence_reserves_the_same_and_leaves_the_logger() -> None:
    speaker = logging.getLogger(HeuristicalStorageReservation.__module__)
    before = list(speaker.filters)
    module, sharders = make_ebc([(1_000, 64)] * 2), bag_sharders()
    rooms = [
        make_planner(2, **NOTHING | arguments).reserve(module, sharders)
        for arguments in ({}, {"storage_reservation": asked()["storage_reservation"]})
    ]
    assert rooms[0].devices == rooms[1].devices
    assert speaker.filters == before
