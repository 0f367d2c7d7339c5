"""A bundle's costs in the form of TorchRec's own estimator, for its own planner.

TorchRec prices a shard by four sizes (ids, bytes looked up, output, rows), each times a
coefficient, over the device's bandwidth. `hardware_perf_config` fits the coefficients
of its `HardwarePerfConfig` to what a cost model predicts of fused kernels, and says how
far off that form is: it knows no launches, no caches and no sets of tables.

Shapes: `T` tables, `S` sets of tables, `N` tables of all sets, `K` coefficients.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import optimize
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner.constants import kernel_bw_lookup
from torchrec.distributed.planner.estimator import (
    EmbeddingPerfEstimatorConfig,
    EstimatorPerfCoefficients,
    HardwarePerfConfig,
    PerfCoefficient,
    PerfCoefficientConfig,
)
from torchrec.distributed.planner.types import Topology

from torchrec_neuroshard.cost_models import CostModel
from torchrec_neuroshard.features import FEATURE_NAMES, ShardFeaturizer
from torchrec_neuroshard.planner.costs.plan_costs import PlanCosts
from torchrec_neuroshard.workloads import PRODUCTION_WIDTHS, generate_dlrm_tables

__all__ = [
    "HardwareConfigFit",
    "fit_coefficients",
    "hardware_perf_config",
    "softened",
    "torchrec_sizes",
]

Floats = npt.NDArray[np.float64]
Coefficients = tuple[float, ...]
"""Of ids, bytes looked up and output; of rows, where they are fitted."""

NUM_SETS = 400
MOST_TABLES = 20
"""Of a set; a rank's fused kernel holds about as many."""
_HELD_OUT = 4
"""One set of so many is not fitted, but tells the error."""
_EDGE = 0.3
"""Relative errors beyond count by their size, no longer by their square."""
_INDEX = {name: i for i, name in enumerate(FEATURE_NAMES)}


def softened(off: Floats) -> Floats:
    """Residuals whose squares grow with the error where it is large, not its square."""
    soft: Floats = np.sqrt(2 * _EDGE**2 * (np.sqrt(1 + (off / _EDGE) ** 2) - 1))
    return soft


def torchrec_sizes(
    features_TF: npt.NDArray[np.float32],
) -> tuple[Floats, Floats, Floats]:
    """Return what TorchRec's coefficients multiply.

    Args:
        features_TF: Features of shards.

    Returns:
        `T x 4` sizes, forward of whole rows and all others, and `T` penalties of
        narrow rows. TorchRec takes both for the forward pass of table-wise and
        column-wise shards.
    """

    def column(name: str) -> Floats:
        return features_TF[:, _INDEX[name]].astype(np.float64)

    width = np.round(2.0 ** column("log2_width"))
    lookup, ids = column("lookup_bytes"), column("num_lookups")
    penalty = np.where(width >= 128, 1.0, np.where(width >= 64, 1.15, 1.75))
    read = 8.0 * (1.0 + column("is_weighted")) * ids
    output, rows = column("output_bytes"), 2.0 ** column("log2_rows")
    widened = lookup * np.maximum(width, 32.0) / width
    return (
        np.stack([read, widened, output, rows], axis=1),
        np.stack([read, lookup, output, rows], axis=1),
        penalty,
    )


def fit_coefficients(terms_SK: Floats, ms_S: Floats, weight_S: Floats) -> Coefficients:
    """Fit TorchRec's coefficients to times: the first three, or more of them.

    Args:
        terms_SK: Milliseconds of each coefficient at 1.
        ms_S: Times, above 0.
        weight_S: What their logarithms' errors count.
    """

    def residuals(logs: Floats) -> Floats:
        off = np.log(terms_SK @ np.exp(logs)) - np.log(ms_S)
        # Without a launch and with few cards, some coefficient may be anything.
        return np.concatenate([weight_S * softened(off), logs[:3] / 3, logs[3:] / 9])

    start = np.log([1.0, 1.0, 1.0, *[0.1] * (terms_SK.shape[1] - 3)])
    return tuple(np.exp(optimize.least_squares(residuals, start).x).tolist())


@dataclass(frozen=True, kw_only=True, slots=True)
class HardwareConfigFit:
    """TorchRec's configuration that comes nearest to a cost model; `print` shows it.

    What is printed is Python that needs TorchRec alone.
    """

    config: HardwarePerfConfig
    """For `EmbeddingPerfEstimatorFactory.create_with_config`."""
    forward: Coefficients
    """Of table-wise and column-wise shards."""
    forward_of_rows: Coefficients
    """Of all others."""
    backward: Coefficients
    forward_error: tuple[float, float]
    """Relative error on sets that were not fitted: median, and 90 of 100 are below."""
    backward_error: tuple[float, float]
    num_held_out: int
    device_gb_per_s: float
    """Bandwidth of the topology that the coefficients go with."""
    source: str
    """The cost model."""

    def __str__(self) -> str:
        """Return Python that makes the configuration and registers it."""
        forward, backward = (
            f"{median:.0%} (90 % of the sets within {most:.0%})"
            for median, most in (self.forward_error, self.backward_error)
        )
        return _SOURCE.format(
            source=self.source,
            forward_error=forward,
            backward_error=backward,
            num_sets=self.num_held_out,
            bandwidth=f"{self.device_gb_per_s:,.0f} GB/s",
            forward=", ".join(f"{v:.4g}" for v in self.forward),
            forward_of_rows=", ".join(f"{v:.4g}" for v in self.forward_of_rows),
            backward=", ".join(f"{v:.4g}" for v in self.backward),
        )


_SOURCE = """\
# Nearest to {source}. On {num_sets} sets of 1 to 20 tables that were
# not fitted it is off, on median, by {forward_error} forward
# and {backward_error} backward.
# Give the topology {bandwidth} of bandwidth: the coefficients go with that.
from torchrec.distributed.planner.estimator import (
    EmbeddingPerfEstimatorConfig,
    EmbeddingPerfEstimatorFactory,
    EstimatorPerfCoefficients,
    PerfCoefficient,
    PerfCoefficientConfig,
)

backward = PerfCoefficient({backward})
whole_rows = EstimatorPerfCoefficients(PerfCoefficient({forward}), backward)
others = EstimatorPerfCoefficients(PerfCoefficient({forward_of_rows}), backward)


@EmbeddingPerfEstimatorFactory.register("neuroshard")
class NeuroShardPerfConfig(EmbeddingPerfEstimatorConfig):
    name = "neuroshard"
    coefficients = PerfCoefficientConfig(
        table_wise=whole_rows,
        column_wise=whole_rows,
        row_wise=others,
        table_row_wise=others,
        data_parallel=others,
    )
"""


def hardware_perf_config(
    topology: Topology,
    cost_model: str | Path | CostModel = "auto",
    *,
    batch_size: int,
    seed: int = 0,
) -> HardwareConfigFit:
    """Fit TorchRec's `HardwarePerfConfig` to a cost model.

    The sets of tables are drawn from those of `generate_dlrm_tables`, with widths met
    in production. Data-parallel tables and tables in the host's memory keep TorchRec's
    ratios to the fused kernel.

    Args:
        topology: The devices, with the bandwidths that TorchRec's planner will have.
        cost_model: As for `NeuroShardPlanner`.
        batch_size: Samples per rank.
        seed: Of the draws.

    Raises:
        ConfigError: There is no such cost model.
        BundleError: Its bundle cannot be used.
    """
    model = PlanCosts(topology, cost_model=cost_model).cost_model
    rng = np.random.default_rng(seed)
    tables = [t for t in generate_dlrm_tables(seed) if t.pooling_factor > 0]
    count_S = rng.integers(1, MOST_TABLES + 1, NUM_SETS)
    set_N = np.repeat(np.arange(NUM_SETS), count_S)
    featurizer = ShardFeaturizer(tables, batch_size * int(topology.world_size))
    features_NF = featurizer.features(
        rng.integers(len(tables), size=len(set_N)),
        rng.choice(PRODUCTION_WIDTHS, size=len(set_N)),
    )
    ms_S2 = model.predict_sets(features_NF, set_N, NUM_SETS)
    bytes_per_ms = kernel_bw_lookup(
        compute_device=topology.compute_device,
        compute_kernel=EmbeddingComputeKernel.FUSED.value,
        hbm_mem_bw=topology.hbm_mem_bw,
        ddr_mem_bw=topology.ddr_mem_bw,
        hbm_to_ddr_mem_bw=topology.hbm_to_ddr_mem_bw,
    )
    whole_N4, other_N4, penalty_N = torchrec_sizes(features_NF)
    fitted = np.arange(NUM_SETS) % _HELD_OUT > 0

    def fit(sizes_N4: Floats, ms_S: Floats) -> tuple[Coefficients, tuple[float, float]]:
        # Without a launch in that form, a coefficient of the rows would stand in for
        # it, and price larger tables by what they hold instead of what is read.
        terms_SK = np.zeros((NUM_SETS, 3))
        np.add.at(terms_SK, set_N, sizes_N4[:, :3] / bytes_per_ms)
        found = fit_coefficients(terms_SK[fitted], ms_S[fitted], np.ones(fitted.sum()))
        off_S = np.abs(terms_SK[~fitted] @ np.array(found) / ms_S[~fitted] - 1)
        return found, (float(np.median(off_S)), float(np.quantile(off_S, 0.9)))

    forward, forward_error = fit(whole_N4 * penalty_N[:, None], ms_S2[:, 0])
    forward_of_rows, _ = fit(other_N4, ms_S2[:, 0])
    backward, backward_error = fit(other_N4, ms_S2[:, 1])
    return HardwareConfigFit(
        config=_config(forward, forward_of_rows, backward),
        forward=forward,
        forward_of_rows=forward_of_rows,
        backward=backward,
        forward_error=forward_error,
        backward_error=backward_error,
        num_held_out=int((~fitted).sum()),
        device_gb_per_s=float(bytes_per_ms) / 1e6,
        source=f"cost model '{model.name}' ({model.hardware}, {model.source})",
    )


def _config(
    forward: Coefficients, forward_of_rows: Coefficients, backward: Coefficients
) -> Any:
    whole, others = (
        EstimatorPerfCoefficients(PerfCoefficient(*found), PerfCoefficient(*backward))
        for found in (forward, forward_of_rows)
    )

    class NeuroShardPerfConfig(EmbeddingPerfEstimatorConfig):
        name = "neuroshard"
        coefficients = PerfCoefficientConfig(
            table_wise=whole,
            column_wise=whole,
            row_wise=others,
            table_row_wise=others,
            data_parallel=others,
        )

    return NeuroShardPerfConfig()
