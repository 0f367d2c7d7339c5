"""Pages on sequences and public jobs follow from the committed data."""

from __future__ import annotations

from pathlib import Path

import pytest

import bench_jobs
import bench_sequences
from torchrec_neuroshard.bundles.fit_sequences import fit_sequences
from torchrec_neuroshard.commands.files import find_model
from torchrec_neuroshard.commands.inputs import made_model
from torchrec_neuroshard.files import read_json
from torchrec_neuroshard.measure.records import steady_records
from torchrec_neuroshard.measure.store import read_records
from torchrec_neuroshard.models.sequences import CPU_SEQUENCES

RESULTS = Path(bench_jobs.__file__).parent / "results"


def test_the_page_of_jobs_is_that_of_the_frozen_predictions() -> None:
    found = bench_jobs.page(
        read_json(RESULTS / "jobs_202611.json"),
        read_json(bench_jobs.HERE / "published" / "jobs.json"),
    )
    assert found == (RESULTS / "jobs_202611.md").read_text("utf-8")


@pytest.mark.parametrize("job", bench_jobs.JOBS, ids=lambda job: job.name)
def test_jobs_are_read_from_the_examples(job: bench_jobs.Job) -> None:
    given = made_model(find_model(str(bench_jobs.EXAMPLES / job.tables)))
    tables = {c.name for m in given.module.modules() for c in bench_jobs._configs(m)}
    assert {*job.types} - {""} <= tables
    assert "item" in tables or "item_id" in tables


def test_the_shipped_constants_are_fitted_to_the_committed_sets() -> None:
    [header], records = read_records([bench_sequences.RECORDS])
    device, unit = header.fingerprint.device, header.reference_ms
    found = fit_sequences(steady_records(records), device, unit)
    assert found is not None
    assert (found.device, found.num_sets) == (CPU_SEQUENCES.device, 552)
    assert found.error == pytest.approx(CPU_SEQUENCES.error, rel=0.02)
    assert found.reference_ms == CPU_SEQUENCES.reference_ms
    for mine, theirs in zip(found.constants, CPU_SEQUENCES.constants, strict=True):
        assert mine == pytest.approx(theirs, rel=0.05)


def test_the_page_of_sequences_is_that_of_its_data() -> None:
    data = read_json(RESULTS / "sequences_202611.json")
    command = (
        "python benchmarks/bench_sequences.py --out benchmarks/results/sequences_202611"
    )
    found = bench_sequences.page(
        data["sequences"], data["transfer"], data["cards"], command
    )
    assert found == (RESULTS / "sequences_202611.md").read_text("utf-8")
    means = [
        sum(r["total"] for r in data["transfer"] if r["power"] == power) / 6
        for power in bench_sequences.POWERS
    ]
    assert means == pytest.approx([0.87, 0.39, 0.94], abs=0.01)
