"""Settings of the runs that measure kernels and collectives."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from torchrec_neuroshard.errors import ConfigError
from torchrec_neuroshard.measure.sets import SamplingConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectConfig:
    """Settings of a run that measures kernels."""

    out: Path
    """File of records to write or to continue."""
    num_sets: int = 5_000
    """Records that the file should hold."""
    seed: int = 0
    device: str = "cpu"
    tables: tuple[Path, ...] = ()
    """JSON files of real tables to draw from, in addition to generated tables."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    time_budget_seconds: float | None = None
    """Start no set after this time; None measures all sets."""
    started: float | None = None
    """Start of the time budget by `time.monotonic`; None starts with measuring."""
    set_seconds: float | None = None
    """Time for repeating a set, beyond its fewest passes (`PassCounts`); None takes the
    device's. A shorter time gives more sets, each less precise."""
    num_plans: int = 0
    """Plans to measure in addition, all ranks of each; see `SetSampler.plan_sets`."""

    def __post_init__(self) -> None:
        if self.num_sets < 1:
            raise ConfigError(f"num_sets must be at least 1, got {self.num_sets}")


@dataclass(frozen=True, kw_only=True, slots=True)
class CommsConfig:
    """Settings of a run that measures collectives."""

    out: Path
    """File of records to write or to continue."""
    backend: str = "gloo"
    """`gloo` (CPU) or `nccl` (CUDA)."""
    num_samples: int = 600
    """Records that the file should hold."""
    seed: int = 0
    timeout_seconds: float = 20.0
    """The run ends if a rank does not respond for this long."""
    time_budget_seconds: float = float("inf")
    """Stop after this time; the same command continues later."""
    min_samples: int = 0
    """Samples to measure even if the time is over."""
    sample_seconds: float = 0.15
    """Stop repeating a sample after this time."""
    kernel_rounds: int = 5
    """Rounds that time kernels on one rank and on several ranks at once."""
    group_sizes: tuple[int, ...] = ()
    """Sizes of further groups, each of the first ranks. One run for all world sizes
    gives them the same drift of the machine."""
    bytes_per_rank: tuple[int, int] = (1024, 2**30)
    """Smallest and largest mean number of bytes that a rank sends, including those to
    itself. The free memory caps the largest."""

    def __post_init__(self) -> None:
        low, high = self.bytes_per_rank
        if not 0 < low <= high:
            raise ConfigError(
                f"bytes_per_rank needs 0 < low <= high, got ({low}, {high})"
            )
