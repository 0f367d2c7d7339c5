"""Cards of trained models in Markdown: what they rest on and how wrong they are."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from torchrec_neuroshard.bundles.fit import Fitted
from torchrec_neuroshard.bundles.fit_collectives import CommsEvaluation
from torchrec_neuroshard.bundles.format import BundleInfo, CommsBundleInfo

__all__ = ["comms_card", "compute_card"]

_SHOWN_RANGES = (
    "num_lookups",
    "num_distinct",
    "log2_rows",
    "log2_width",
    "log2_pooling",
    "log2_batch",
)


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table, and an empty one below it."""
    lines = [columns, ["---"] * len(columns), *rows]
    return [*(f"| {' | '.join(cells)} |" for cells in lines), ""]


def _card(
    title: str,
    facts: Mapping[str, str],
    noise: str,
    errors: Sequence[str],
    commands: Sequence[str],
) -> str:
    """Write a card: facts, noise, errors and commands.

    Args:
        title: Its first line.
        facts: What the model was made of.
        noise: `repeatability_line` of its records.
        errors: Lines about the errors.
        commands: Those that made it.
    """
    lines = [
        f"# {title}",
        "",
        *_table(("", ""), facts.items()),
        "## Noise of the measurements",
        "",
        noise,
        "",
        "## Error on what was never seen in training",
        "",
        *errors,
        "",
        "## Made by",
        "",
        *(f"- `{command}`" for command in commands),
        "",
    ]
    return "\n".join(lines)


def compute_card(
    info: BundleInfo, noise: str, fitted: Fitted, start: BundleInfo | None
) -> str:
    """Write the card of a compute cost model.

    Args:
        info: Its description.
        noise: `repeatability_line` of its records.
        fitted: The candidates.
        start: The bundle that it was started from.
    """
    fingerprint, trained_on = info.fingerprint, info.trained_on
    facts = {
        "times": "ms of one fused `SplitTableBatchedEmbeddingBagsCodegen` over a set "
        "of shards, forward and backward, optimizer step included",
        "device": f"{fingerprint.device} ({fingerprint.device_type})",
        "threads": str(fingerprint.num_threads),
        "torch, fbgemm": f"{fingerprint.torch}, {fingerprint.fbgemm}",
        "sets to train on": str(trained_on["num_training_sets"]),
        "sets of held-out tables": str(trained_on["num_test_sets"]),
        "sets of other devices to learn from": str(trained_on["num_other_sets"]),
        "disturbed records, left out": str(trained_on["num_disturbed"]),
        "reference set, nominal": f"{info.reference_ms:.3f} ms",
        "measured": ", ".join(trained_on["created"]),
    }
    evaluations = [c.evaluation for c in fitted.candidates.values()]
    errors = [
        (
            f"**{e.name}**" if e.name == fitted.kept else e.name,
            f"{fitted.errors[e.name]:.1%}",
            *(f"{v:.1%}" for v in (e.fwd_mape, e.bwd_mape, e.total_mape)),
            *(f"{v:.1%}" for v in (e.total_median, e.cheapest_mape)),
            f"{e.bias:+.1%}",
            f"{e.inside:.0%}",
            f"{e.kendall_tau:.3f}",
        )
        for e in evaluations
    ]
    ranges = [(n, *(f"{v:.4g}" for v in info.ranges[n])) for n in _SHOWN_RANGES]
    columns = ["model", "in validation", "forward", "backward", "total"]
    columns += ["total, median", "total, cheapest tenth", "bias", "inside 90 %", "tau"]
    lines = [
        "Mean absolute percentage errors. The first column is of sets that chose the "
        "model, all others are of the sets of held-out tables. `inside 90 %` is the "
        "share of them inside the model's own 90 % interval; tau is Kendall's, of the "
        "totals.",
        "",
        *_table(columns, errors),
        fitted.verdict(),
        *(() if start is None else ("", _started_from(start))),
        "",
        "Training range; shards outside of it are warned about by name:",
        "",
        *_table(("feature", "least", "most"), ranges),
    ]
    title = f"Compute cost model `{info.name}`"
    return _card(title, facts, noise, lines, trained_on["commands"])


def _started_from(start: BundleInfo) -> str:
    """Explain the candidates of a model that was started from another one."""
    return (
        f"Started from `{start.name}`, measured on {start.fingerprint.device} "
        f"({start.trained_on.get('num_training_sets', '?')} sets to train on): "
        "`before` is that model unchanged, `refitted` has the constants of its physics "
        "fitted to this device's sets, `tuned` is that one fine-tuned on them, "
        "`physics` the fitted constants alone. But for `physics`, the training range "
        "covers what either device was measured on: where only the other one was, "
        "times are carried over."
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
        "times": "ms from the last rank's arrival until the slowest rank is through, "
        "TorchRec's copies around the collective included",
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
    columns = ["ranks", "collective", "in training", "records"]
    columns += ["median", "mean", "90th percentile", "tau"]
    lines = [
        "Absolute error relative to the measured time; tau is Kendall's.",
        "",
        *_table(columns, errors),
        f"{verdict} `linear` is a fit to these records alone; `before`, `scaled` and "
        "`tuned` start from the model of another machine.",
    ]
    title = f"Communication cost model `{info.name}`"
    return _card(title, facts, noise, lines, trained_on["commands"])
