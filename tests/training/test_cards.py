"""What cards say."""

from __future__ import annotations

from tests.builders import make_record
from torchrec_neuroshard.records import CostRecord
from torchrec_neuroshard.tables import TableConfig
from torchrec_neuroshard.training.cards import compute_noise

TABLES = (TableConfig(name="t", num_embeddings=10, embedding_dim=4),)


def timed(index: int, ms: float, repeat_of: int | None = None) -> CostRecord:
    return make_record(TABLES, 0.25 * ms, 0.75 * ms, index=index, repeat_of=repeat_of)


def test_noise_of_short_sets_is_told_by_itself() -> None:
    firsts = [timed(0, 0.4), timed(1, 0.8), timed(2, 10.0)]
    long_ones = [timed(3, 10.5, 2), timed(4, 9.0, 2)]
    text = compute_noise([*firsts, *long_ones])
    assert "differs by 7.5% (median), 7.5% (mean)" in text and "Below" not in text
    text = compute_noise([*firsts, *long_ones, timed(5, 0.48, 0), timed(6, 0.76, 1)])
    assert "over 4 sets" in text
    assert text.endswith("Below 1 ms: 12.5% (median), 12.5% (mean), over 2.")
    assert compute_noise(firsts) == "No set was measured twice."
