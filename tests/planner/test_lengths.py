"""Lengths of sequences in plans: the report, its notes, and the memory of a step."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from torchrec.distributed.planner import ParameterConstraints, Topology
from torchrec.distributed.sharding_plan import get_default_sharders

from tests.builders import gpus, last_result, make_planner, sequences
from torchrec_neuroshard import FeatureProfile
from torchrec_neuroshard.notes import Note
from torchrec_neuroshard.report import PlanReport

UNEVEN = FeatureProfile.of_lengths(200, 800, 4096)
EVEN = dataclasses.replace(UNEVEN, pooling_std=0.0, common_std=0.0)
KINDS = ["table_wise", "row_wise"]


def report(profile: FeatureProfile | None, **arguments: Any) -> PlanReport:
    """The report of a plan of two sequence tables."""
    given = {
        f"s{i}": ParameterConstraints(
            sharding_types=list(KINDS),
            pooling_factors=arguments.pop(f"pooling_{i}", [1.0]),
        )
        for i in range(2)
    }
    planner = make_planner(
        topology=arguments.pop("topology", None) or gpus(4),
        batch_size=32,
        profiles={f"sf{i}": profile for i in range(2)} if profile else None,
        constraints=given,
        **arguments,
    )
    planner.plan(sequences(64, 64, rows=100_000), get_default_sharders())
    found = planner.report()
    predicted = last_result(planner).predicted
    assert found.iteration_ms == pytest.approx(predicted.expected_ms)
    return found


def codes(found: PlanReport) -> set[str]:
    return {note.code for note in found.notes}


def test_the_report_says_what_unequal_lengths_add() -> None:
    found, even = report(UNEVEN), report(EVEN)
    assert even.lengths is None
    lengths = found.lengths
    assert lengths is not None
    assert found.iteration_ms > even.iteration_ms
    assert 0 < lengths.added_ms <= found.spread_ms + 1e-9
    assert found.iteration_ms < lengths.p95_ms < 3 * found.iteration_ms
    text = found.text(verbose=True)
    assert f"unequal lengths of samples add {lengths.added_ms:.3f} ms; 95 % of " in text
    assert "and of ranks with longer samples is expected to take longer" in text
    assert "GiB with the longest of 100 batches" in text
    assert "longest of 100" not in even.text(verbose=True)
    data = found.to_json()["lengths"]
    assert data["p95_ms"] == lengths.p95_ms


def test_the_report_states_the_error_of_lookups_of_sequences() -> None:
    text = report(EVEN).text(verbose=True)
    assert "rows that are not pooled count as bags of one id: in published" in text
    cpus = Topology(world_size=2, compute_device="cpu")
    text = report(EVEN, topology=cpus, cost_model="cpu").text(verbose=True)
    assert "rows that are not pooled: measured on AMD EPYC (25/1), scaled" in text


def test_a_note_says_what_a_balancing_shuffler_saves() -> None:
    found = report(UNEVEN, dense_ms=1_000.0)
    assert found.lengths is not None
    [note] = [n for n in found.notes if n.code == "lengths"]
    assert note.severity == "warning"
    share = f"would save {found.lengths.share:.0%} of the iteration"
    assert note.text.startswith("lengths, not tables: ") and share in note.text
    # The largest of four gamma values: 256 / 32**0.5 / 200 each, and more.
    assert 0.1 < found.lengths.share < 0.4
    for quiet in (report(EVEN, dense_ms=1_000.0), report(None, dense_ms=1_000.0)):
        assert "lengths" not in codes(quiet)


def test_memory_is_that_of_the_longest_of_100_batches() -> None:
    found, even = report(UNEVEN), report(EVEN)
    longer = UNEVEN.pooling_std / 200 / 32**0.5
    uneven, usual = (max(r.used_bytes for r in f.ranks) for f in (found, even))
    weights = 100_000 * 64 * 4 / 4
    steps = (uneven - 2 * weights) / (usual - 2 * weights)
    assert 1 + 0.5 * longer < steps < 1 + 3.5 * longer


@pytest.mark.parametrize(
    ("arguments", "is_noted"),
    [
        ({}, True),
        ({"pooling_0": [500.0]}, False),
        ({"profile": UNEVEN}, False),
    ],
)
def test_unknown_lengths_are_noted(arguments: dict[str, Any], is_noted: bool) -> None:
    found = report(arguments.pop("profile", None), **arguments)
    assert ("unknown-lengths" in codes(found)) == is_noted
    if is_noted:
        [note] = [n for n in found.notes if n.code == "unknown-lengths"]
        assert "the sequences of 's0', 's1' are: they count with 1 id" in note.text
        assert isinstance(note, Note) and note.severity == "warning"
