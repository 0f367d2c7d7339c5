from __future__ import annotations

from typing import Any

import pytest

from tests.builders import make_record, make_tables
from torchrec_neuroshard.errors import RecordError
from torchrec_neuroshard.measure.records import (
    CostRecord,
    command_line,
    relative_spread,
    steady_records,
)


def record(**options: Any) -> CostRecord:
    return make_record(**{"tables": make_tables([8]), "bwd_ms": 2.5, **options})


def test_total_and_spread_by_hand() -> None:
    assert record().total_ms == 3.5
    # 4, 4, 2, 5 deviate from 4 by 0, 0, 2, 1.
    assert relative_spread([4, 4, 2, 5]) == 0.5 / 4


@pytest.mark.parametrize(
    ("argv", "command"),
    [
        (["/usr/bin/neuroshard", "train", "a b"], "neuroshard train 'a b'"),
        (["/x/torchrec_neuroshard/__main__.py", "train"], "neuroshard train"),
        (["/home/me/make.py", "--fast"], "make.py --fast"),
    ],
)
def test_the_command_of_a_file(
    argv: list[str], command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", argv)
    assert command_line() == command


def test_bad_records_are_refused() -> None:
    with pytest.raises(RecordError, match="record 7 has no tables"):
        record(index=7, tables=())


def passes(
    index: int, fwd: float, last_fwd: float, ref: float = 0.0, throttled: str = ""
) -> CostRecord:
    return record(
        index=index,
        num_passes=4,
        spread=relative_spread([fwd + 1, fwd + 1, last_fwd + 1, last_fwd + 1]),
        reference_ms=ref,
        throttled=throttled,
    )


def test_disturbed_records_are_left_out() -> None:
    usual = [passes(i, 1.0, 1.2, 2.0) for i in range(5)]
    jumping = passes(5, 1.0, 3.0, 2.0)  # its passes differ
    shared = passes(6, 2.0, 2.0, 3.1)  # steady passes, but a slow reference
    slower = passes(7, 2.0, 2.0, 2.9)
    assert steady_records([*usual, jumping, shared, slower]) == [*usual, slower]
    assert steady_records([]) == []
    # Without a reference, only the passes count.
    bare, jumping, slower = passes(0, 1.0, 1.2), passes(5, 1.0, 3.0), passes(6, 2, 2)
    assert steady_records([bare, jumping, slower]) == [bare, slower]


def test_most_records_stay_where_most_are_throttled_or_disturbed() -> None:
    cool = [passes(i, 1.0, 1.0) for i in range(4)]
    hot = [passes(4 + i, 1.0, 1.0, throttled="power brake") for i in range(5)]
    assert steady_records([*cool, *hot[:4]]) == cool
    assert steady_records([*cool, *hot]) == [*cool, *hot]
    restless = [passes(i, 1.0, 1.0 + 0.1 * i, 2.0 + 0.3 * i) for i in range(20)]
    assert steady_records(restless) == restless[:16]  # only the worst are left out
