"""Table sets to shard: published models, generators, loaders and task sampling."""

from torchrec_neuroshard.workloads.dlrm_dataset import generate_dlrm_tables
from torchrec_neuroshard.workloads.inputs import draw_batch, feature_names
from torchrec_neuroshard.workloads.loaders import load_json, load_tables
from torchrec_neuroshard.workloads.mlperf import mlperf_dlrm_v2
from torchrec_neuroshard.workloads.tasks import (
    PRODUCTION_WIDTHS,
    TaskConfig,
    cap_rows,
    power_of_two_widths,
    sample_tasks,
)

__all__ = [
    "PRODUCTION_WIDTHS",
    "TaskConfig",
    "cap_rows",
    "draw_batch",
    "feature_names",
    "generate_dlrm_tables",
    "load_json",
    "load_tables",
    "mlperf_dlrm_v2",
    "power_of_two_widths",
    "sample_tasks",
]
