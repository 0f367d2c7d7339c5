"""How repeatable a measurement was, in words."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from torchrec_neuroshard.records import CommsRecord, CostRecord, repeatability

__all__ = ["repeatability_text"]


def repeatability_text(
    records: Sequence[CostRecord | CommsRecord], of: str, unit: str
) -> str:
    """Say how repeatable a file's records are; empty for fewer than two repeats.

    Args:
        records: All of the file's.
        of: What is compared, after "repeatability".
        unit: What was measured again.
    """
    differences = repeatability(records)
    if len(differences) < 2:
        return ""
    tenth = statistics.quantiles(differences, n=10)[-1]
    return (
        f"; repeatability{of}: median {statistics.median(differences):.1%}, 90th "
        f"percentile {tenth:.1%} over {len(differences)} {unit} measured again"
    )
