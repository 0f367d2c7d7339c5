"""Tables of errors on NVIDIA's tables of collectives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.pages import table
from published.nccl import (
    COLLECTIVES,
    FAMILIES,
    NcclTable,
    constants_of,
    fit_nccl,
    left_out_nccl,
    log_ratios,
    over_runs,
    predict_nccl,
    sizes_left_out,
    without_tables,
)

Floats = npt.NDArray[np.float64]
Predicted = Sequence[tuple[NcclTable, Floats]]

SIZES: Mapping[str, tuple[float, float]] = {
    "below 1 MiB": (0, 2**20),
    "1 to 32 MiB": (2**20, 2**25),
    "32 MiB and more": (2**25, np.inf),
}


def _of_size(table: NcclTable, size: str) -> npt.NDArray[np.bool_]:
    low, high = SIZES[size]
    return (table.num_bytes >= low) & (table.num_bytes < high)


def errors(predicted: Predicted) -> dict[str, Any]:
    """Return median and 90th percentile of |log ratio|, of all sizes and by size."""
    logs = [(t, log_ratios(t, us)) for t, us in predicted]
    by_size = {s: np.concatenate([v[_of_size(t, s)] for t, v in logs]) for s in SIZES}
    by_size = {"all": np.concatenate([v for _, v in logs]), **by_size}
    return {
        "timings": len(by_size["all"]),
        **{
            size: {
                "median": round(float(np.median(np.abs(v))), 4),
                "p90": round(float(np.quantile(np.abs(v), 0.9)), 4),
                "ratio": round(float(np.exp(np.median(v))), 4),
            }
            for size, v in by_size.items()
        },
    }


def _cells(found: Mapping[str, Any], *values: str) -> list[str]:
    """Return values of each size class as text."""
    return [
        " / ".join(
            f"{found[size][v]:.2f}" if v == "ratio" else f"{found[size][v]:.1%}"
            for v in values
        )
        for size in ("all", *SIZES)
    ]


def _by(
    before: Predicted, after: Predicted, key: Callable[[NcclTable], str]
) -> dict[str, dict[str, Any]]:
    """Return key -> errors before and after."""
    return {
        value: {
            name: errors([(t, us) for t, us in some if key(t) == value])
            for name, some in (("before", before), ("after", after))
        }
        for value in sorted({key(t) for t, _ in after})
    }


def _spread(tables: Sequence[NcclTable], key: Callable[[NcclTable], str]) -> Predicted:
    """Return each table with the times of another one that differs in `key` only."""
    pairs = []
    for i, one in enumerate(tables):
        for other in tables[i + 1 :]:
            ends = (one.shown, one.dtype, one.collective, one.ranks)
            same = ends == (other.shown, other.dtype, other.collective, other.ranks)
            if same and key(one) != key(other):
                both = np.isin(one.num_bytes, other.num_bytes)
                times = dict(zip(other.num_bytes, other.time_us, strict=True))
                left = one.where(both)
                pairs.append((left, np.array([times[n] for n in left.num_bytes])))
    return pairs


def evaluate(runs: Sequence[NcclTable]) -> dict[str, Any]:
    """Return errors of shipped constants and of fits with tables left out."""
    medians = over_runs(runs)
    known = [t for t in medians if t.dtype == "half" and t.family in FAMILIES]
    int8 = [t for t in medians if t.dtype == "int8" and t.family in FAMILIES]
    l40s = [t for t in medians if t.dtype == "half" and t.family not in FAMILIES]

    def shipped(tables: Sequence[NcclTable]) -> Predicted:
        return [(t, predict_nccl(t, constants_of(t))) for t in tables]

    def former(tables: Sequence[NcclTable]) -> Predicted:
        return [(t, predict_nccl(t, without_tables(constants_of(t)))) for t in tables]

    families = left_out_nccl(known, lambda t: t.family)
    half = [t for t in runs if t.dtype == "half"]
    return {
        "models": {
            "before": errors(former(known)),
            "ours": errors(shipped(known)),
            "- card left out": errors(left_out_nccl(known, lambda t: t.shown)),
            "- folder left out": errors(
                left_out_nccl(known, lambda t: (t.shown, t.folder))
            ),
            "- every other size left out": errors(sizes_left_out(known)),
            **{
                f"- all of {name} left out": errors(
                    [(t, us) for t, us in families if t.family == name]
                )
                for name in FAMILIES
            },
            "ours, int8": errors(shipped(int8)),
            "before, L40S": errors(former(l40s)),
            "ours, L40S": errors(shipped(l40s)),
        },
        "cards": _by(
            former(known + l40s),
            shipped(known + l40s),
            lambda t: f"{t.shown}, {t.collective}",
        ),
        "ranks": _by(
            former(known),
            shipped(known),
            lambda t: f"{list(COLLECTIVES)[_order(t)]}, {t.ranks} ranks",
        ),
        "spread": {
            "folders of a card": errors(
                _spread([t for t in medians if t.dtype == "half"], lambda t: t.folder)
            ),
            "runs of a folder": errors(
                [
                    pair
                    for folder in sorted({(t.shown, t.folder) for t in half})
                    for pair in _spread(
                        [t for t in half if (t.shown, t.folder) == folder],
                        lambda t: t.run,
                    )
                ]
            ),
        },
        "fitted": fit_nccl(known),
    }


def _order(t: NcclTable) -> int:
    return list(COLLECTIVES).index(t.collective)


def nccl_sections(found: Mapping[str, Any]) -> list[str]:
    """Return the sections of the page from the result of `evaluate`."""
    head = ["all sizes", *SIZES]

    def lines(entries: Mapping[str, Any]) -> list[list[str]]:
        return [
            [name, str(e["timings"]), *_cells(e, "median", "p90")]
            for name, e in entries.items()
        ]

    def changed(entries: Mapping[str, Any]) -> list[list[str]]:
        return [
            [name]
            + [
                f"{was} -> {now}"
                for was, now in zip(
                    _cells(e["before"], "median"),
                    _cells(e["after"], "median", "ratio"),
                    strict=True,
                )
            ]
            for name, e in entries.items()
        ]

    return [
        "## NCCL inside a node: NVIDIA's tables\n",
        table(["tables", "timings", *head], lines(found["models"])),
        "\nMedian / 90th percentile of |log(predicted / measured)|. *Before* are the "
        "constants fitted to one page of 8 B200. *Card left out* keeps other cards "
        "with the same links (H100 for H200, GB200 for B200); an A100 has none. A "
        "card of which all are left out has the mean launch and step of the others. "
        "L40S are predicted as H100 on PCIe; their bandwidths for 2, 4 and 8 ranks are "
        "taken from the largest sizes. int8 is not in the fit.\n",
        table(["card, collective", *head], changed(found["cards"])),
        "\nMedian |log ratio| before -> now / median of predicted over measured.\n",
        table(["collective, ranks", *head], changed(found["ranks"])),
        "\nThe same for all cards with NVLink.\n",
        table(
            ["two tables of equal card and size", "pairs", *head],
            lines(found["spread"]),
        ),
        "\nMedian / 90th percentile of |log ratio| between two tables. NVIDIA names "
        "folders "
        "by NCCL's version, 2.23 to 2.29.2. But each row has a version, too: 2.29.2 in "
        "all folders except those of A100 and L40S, 2.27.3. So these tables do not "
        "show how much versions of NCCL differ.\n",
    ]
