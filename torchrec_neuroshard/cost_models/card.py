"""The card of a trained bundle: what it was trained on and how wrong it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from torchrec_neuroshard.cost_models.bundle import BundleInfo
from torchrec_neuroshard.cost_models.training import Evaluation

__all__ = ["Repeatability", "compute_card"]

_SHOWN_RANGES = (
    "num_lookups",
    "num_distinct",
    "log2_rows",
    "log2_width",
    "log2_pooling",
    "log2_batch",
)


@dataclass(frozen=True, slots=True)
class Repeatability:
    """Relative differences between a set and the same set measured again later."""

    differences: tuple[float, ...]

    def line(self) -> str:
        """One line for the card."""
        if not self.differences:
            return "No set was measured twice."
        values = np.asarray(self.differences)
        return (
            f"The same set measured again later in the run differs by "
            f"{np.median(values):.1%} (median), {values.mean():.1%} (mean), "
            f"{np.quantile(values, 0.9):.1%} (90th percentile), over {len(values)} "
            "sets. No model can be better than this."
        )


def compute_card(
    info: BundleInfo,
    repeatability: Repeatability,
    evaluations: Sequence[Evaluation],
) -> str:
    """Write the card of a compute cost model in Markdown."""
    fingerprint = info.fingerprint
    trained_on = info.trained_on
    lines = [
        f"# Compute cost model `{info.name}`",
        "",
        "Forward and backward milliseconds (optimizer step included) of one fused "
        "`SplitTableBatchedEmbeddingBagsCodegen` over a set of shards.",
        "",
        "| | |",
        "| --- | --- |",
        f"| device | {fingerprint.device} ({fingerprint.device_type}) |",
        f"| threads | {fingerprint.num_threads} |",
        f"| torch, fbgemm | {fingerprint.torch}, {fingerprint.fbgemm} |",
        f"| sets to train on | {trained_on['num_training_sets']} |",
        f"| sets of held-out tables | {trained_on['num_test_sets']} |",
        f"| disturbed records, left out | {trained_on['num_disturbed']} |",
        f"| reference set, nominal | {info.reference_ms:.3f} ms |",
        f"| measured | {', '.join(trained_on['created'])} |",
        "",
        "## Noise",
        "",
        repeatability.line(),
        "",
        "## Error on sets made only of tables never seen in training",
        "",
        "Mean absolute percentage error; tau is Kendall's, of the totals. `stock` is "
        "TorchRec's formula times the one best factor, `linear` a non-negative linear "
        "model per optimizer on the same physical inputs.",
        "",
        "| model | forward | backward | total | total, median | tau |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {e.name} | {e.fwd_mape:.1%} | {e.bwd_mape:.1%} | {e.total_mape:.1%} | "
        f"{e.total_median:.1%} | {e.kendall_tau:.3f} |"
        for e in evaluations
    ]
    upper = evaluations[0].decile_ms
    lines += [
        "",
        "Total's error by decile of measured cost:",
        "",
        "| up to [ms] | " + " | ".join(f"{ms:.3g}" for ms in upper) + " |",
        "| --- |" + " --- |" * len(upper),
    ]
    lines += [
        f"| {e.name} | " + " | ".join(f"{v:.1%}" for v in e.decile_mape) + " |"
        for e in evaluations
    ]
    lines += [
        "",
        "## Training range",
        "",
        "Shards outside of it are warned about by name.",
        "",
        "| feature | least | most |",
        "| --- | --- | --- |",
    ]
    lines += [
        f"| {name} | {info.ranges[name][0]:.4g} | {info.ranges[name][1]:.4g} |"
        for name in _SHOWN_RANGES
    ]
    lines += [
        "",
        "## Made by",
        "",
        *(f"- `{command}`" for command in trained_on["commands"]),
        "",
    ]
    return "\n".join(lines)
