"""Cards of trained models in Markdown: what they rest on and how wrong they are."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from torchrec_neuroshard.cost_models.bundle import BundleInfo, CommsBundleInfo
from torchrec_neuroshard.records import CostRecord, repeatability
from torchrec_neuroshard.training.calibration import (
    BEFORE,
    LINEAR,
    SCALED,
    SCRATCH,
    TUNED,
    Calibration,
)
from torchrec_neuroshard.training.comms import CommsEvaluation
from torchrec_neuroshard.training.compute import Evaluation

__all__ = [
    "calibration_section",
    "comms_card",
    "compute_card",
    "compute_noise",
    "repeatability_line",
]

SHORT_MS = 1.0
"""Sets below this are mostly launches: their noise is told by itself."""

_SHOWN_RANGES = (
    "num_lookups",
    "num_distinct",
    "log2_rows",
    "log2_width",
    "log2_pooling",
    "log2_batch",
)

_CANDIDATES = {
    BEFORE: "the bundle started from, unchanged",
    SCALED: "the same times one factor per direction, fitted on the sets trained on",
    TUNED: "`scaled`, fine-tuned on the same sets",
    SCRATCH: "a new ensemble of the same size, trained on the same sets alone",
    LINEAR: "a linear model fitted to the same sets alone",
}


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table, and an empty one below it."""
    lines = [columns, ["---"] * len(columns), *rows]
    return [*(f"| {' | '.join(cells)} |" for cells in lines), ""]


def repeatability_line(differences: Sequence[float], unit: str = "set") -> str:
    """Say in one line how much samples differ from the same ones measured again.

    Args:
        differences: Of `records.repeatability`.
        unit: What a sample is.
    """
    if not differences:
        return f"No {unit} was measured twice."
    return (
        f"The same {unit} measured again later in the run differs by "
        f"{np.median(differences):.1%} (median), {np.mean(differences):.1%} (mean), "
        f"{np.quantile(differences, 0.9):.1%} (90th percentile), over "
        f"{len(differences)} {unit}s. No model can be better than this."
    )


def compute_noise(records: Sequence[CostRecord]) -> str:
    """Say how much kernels measured again differ, and short ones by themselves.

    Args:
        records: The steady ones, repeats among them.
    """
    line = repeatability_line(repeatability(records))
    short = repeatability(
        [r for r in records if r.repeat_of is None or r.total_ms < SHORT_MS]
    )
    if not short:
        return line
    return (
        f"{line} Below {SHORT_MS:g} ms: {np.median(short):.1%} (median), "
        f"{np.mean(short):.1%} (mean), over {len(short)}."
    )


def compute_card(
    info: BundleInfo,
    noise: str,
    evaluations: Sequence[Evaluation],
    verdict: str = "",
) -> str:
    """Write the card of a compute cost model.

    Args:
        info: Its description.
        noise: `compute_noise` of its records.
        evaluations: Errors on held-out tables: the ensemble's, then yardsticks'.
        verdict: Which of them the bundle holds, and why.
    """
    fingerprint, trained_on = info.fingerprint, info.trained_on
    facts = {
        "device": f"{fingerprint.device} ({fingerprint.device_type})",
        "threads": str(fingerprint.num_threads),
        "torch, fbgemm": f"{fingerprint.torch}, {fingerprint.fbgemm}",
        "sets to train on": str(trained_on["num_training_sets"]),
        "sets of held-out tables": str(trained_on["num_test_sets"]),
        "disturbed records, left out": str(trained_on["num_disturbed"]),
        "reference set, nominal": f"{info.reference_ms:.3f} ms",
        "measured": ", ".join(trained_on["created"]),
    }
    errors = [
        (
            e.name,
            *(f"{v:.1%}" for v in (e.fwd_mape, e.bwd_mape, e.total_mape)),
            f"{e.total_median:.1%}",
            f"{e.kendall_tau:.3f}",
        )
        for e in evaluations
    ]
    deciles = [(e.name, *(f"{v:.1%}" for v in e.decile_mape)) for e in evaluations]
    ranges = [(n, *(f"{v:.4g}" for v in info.ranges[n])) for n in _SHOWN_RANGES]
    lines = [
        f"# Compute cost model `{info.name}`",
        "",
        "Forward and backward milliseconds (optimizer step included) of one fused "
        "`SplitTableBatchedEmbeddingBagsCodegen` over a set of shards.",
        "",
        *_table(("", ""), facts.items()),
        "## Noise",
        "",
        noise,
        "",
        "## Error on sets made only of tables never seen in training",
        "",
        "Mean absolute percentage error; tau is Kendall's, of the totals. `stock` is "
        "TorchRec's formula times the one best factor, `linear` a non-negative linear "
        "model per optimizer on the same physical inputs.",
        "",
        *_table(
            ("model", "forward", "backward", "total", "total, median", "tau"), errors
        ),
        *([verdict, ""] if verdict else []),
        "Total's error by decile of measured cost:",
        "",
        *_table(
            ("up to [ms]", *(f"{ms:.3g}" for ms in evaluations[0].decile_ms)), deciles
        ),
        "## Training range",
        "",
        "Shards outside of it are warned about by name.",
        "",
        *_table(("feature", "least", "most"), ranges),
        "## Made by",
        "",
        *(f"- `{command}`" for command in trained_on["commands"]),
        "",
    ]
    return "\n".join(lines)


def calibration_section(old: BundleInfo, new: BundleInfo, found: Calibration) -> str:
    """Write how a card's model was calibrated: the end of the card.

    Args:
        old: The bundle started from.
        new: The bundle that came of it.
        found: The candidates.
    """
    forward, backward = found.factors_2
    return "\n".join(
        [
            "",
            "## Calibration",
            "",
            f"Started from `{old.name}`, measured on {old.fingerprint.device} "
            f"({old.trained_on.get('num_training_sets', '?')} sets to train on). "
            f"{new.trained_on['num_training_sets']} sets of this device to fine-tune "
            f"on; {new.trained_on['num_test_sets']} sets of held-out tables judged the "
            "candidates and chose between them. "
            f"{found.verdict()}",
            "",
            *(f"- `{name}`: {text}" for name, text in _CANDIDATES.items()),
            "",
            f"Factors: forward {forward:.3f}, backward {backward:.3f}. `learned` above "
            f"is `{found.kept}`. "
            + (
                "Its training range is that of this device's sets alone."
                if found.kept in (SCRATCH, LINEAR)
                else "Its training range covers what either device was measured on; "
                "where only the other one was, its times are carried over, not "
                "measured."
            ),
            "",
        ]
    )


def comms_card(
    info: CommsBundleInfo,
    noise: str,
    evaluations: Sequence[CommsEvaluation],
    verdict: str,
) -> str:
    """Write the card of a model of collectives; arguments as in `compute_card`."""
    fingerprint, trained_on = info.fingerprint, info.trained_on
    low, high = info.bytes_per_rank
    inter = f"{info.inter_gb_per_s:.2f} GB/s" if info.inter_gb_per_s else "not measured"
    facts = {
        "device, backend": f"{fingerprint.device}, {info.backend}",
        "torch": fingerprint.torch,
        "cores for the ranks of a node": str(trained_on["cores"]),
        "world sizes trained on": ", ".join(map(str, info.world_sizes)),
        "records trained on": str(trained_on["num_training"]),
        "bytes per rank": f"{low:.0f} to {high:.0f}",
        "one message inside a node": f"{info.intra_gb_per_s:.2f} GB/s",
        "one message between nodes": inter,
        **{
            f"ranks whose kernels run at once: {n}": f"forward {forward:.2f}, backward "
            f"{backward:.2f} times as long"
            for n, (forward, backward) in info.compute_slowdown.items()
        },
        "measured": ", ".join(trained_on["created"]),
    }
    errors = [
        (
            str(e.world_size),
            e.collective,
            "yes" if e.trained else "no",
            str(e.num_records),
            *(f"{v:.1%}" for v in (e.median, e.mean, e.percentile_90)),
            "-" if math.isnan(e.kendall_tau) else f"{e.kendall_tau:.3f}",
        )
        for e in evaluations
    ]
    lines = [
        f"# Communication cost model `{info.name}`",
        "",
        "Milliseconds from the last rank's arrival until the slowest rank is through, "
        "TorchRec's copies around the collective included.",
        "",
        *_table(("", ""), facts.items()),
        "## Noise of the collectives",
        "",
        noise,
        "",
        "## Error on collectives never seen in training",
        "",
        "Absolute error relative to the measured time; tau is Kendall's.",
        "",
        *_table(
            (
                *("ranks", "collective", "in training", "records"),
                *("median", "mean", "90th percentile", "tau"),
            ),
            errors,
        ),
        f"{verdict} `learned`, `linear` and `bandwidth` (one latency and one bandwidth "
        "per collective) were fitted to these records alone, the others started from "
        "the model of another machine.",
        "",
        "## Collectives measured by",
        "",
        *(f"- `{command}`" for command in trained_on["commands"]),
        "",
    ]
    return "\n".join(lines)
