"""Calibrating: from one device's cost model and a few sets of another to a new bundle.

Devices of one kind differ by a factor and by details, so a few hundred sets bend a
trained ensemble where thousands would be needed to make one. Candidates are the bundle
as it is, the bundle times one factor per direction, the fine-tuned ensemble and a
linear fit to the new sets alone. The one that errs least on sets of held-out tables is
kept, so that calibrating never makes it worse there.

Shapes: as in `network`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from torchrec_neuroshard.bundles.fit import (
    MEAN_ERROR,
    Evaluation,
    SetData,
    TrainConfig,
    as_cost_model,
    best_factor,
    evaluate,
    fit_linear,
    score,
    train,
    training_ranges,
)
from torchrec_neuroshard.bundles.training_loop import kept_line
from torchrec_neuroshard.errors import ConfigError, RecordError
from torchrec_neuroshard.measure.records import CostRecord
from torchrec_neuroshard.models.compute import NeuralCostModel
from torchrec_neuroshard.models.network import SetCostNetwork

__all__ = [
    "BEFORE",
    "LINEAR",
    "MIN_SETS",
    "SCALED",
    "TUNED",
    "Calibration",
    "CalibrationConfig",
    "Candidate",
    "calibrate",
    "rescale",
    "split_records",
]

BEFORE, SCALED, TUNED, LINEAR = "before", "scaled", "tuned", "linear"

MIN_SETS = 10
"""Fewest sets to fine-tune on, and fewest of held-out tables to judge by."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CalibrationConfig:
    """How to fine-tune."""

    steps: int = 500
    """Optimizer steps, about. This and the rate were best
    on sets of another device that are not among those that judge: more steps, higher
    and lower rates, and fitting the physical constants anew before, were not better."""
    batch_sets: int = 64
    """Sets per step."""
    learning_rate: float = 3e-3
    """Peak rate."""
    validation_share: float = 0.15
    """Share of the sets trained on that picks each member's best epoch."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ConfigError(f"steps must be at least 1, got {self.steps}")

    def training(self, num_sets: int, sizes: Mapping[str, int]) -> TrainConfig:
        """Return the configuration of the training.

        Args:
            num_sets: Sets to train on, those that pick the epoch included.
            sizes: Arguments of `SetCostNetwork`.
        """
        steps_per_epoch = -(
            -int(num_sets * (1 - self.validation_share)) // self.batch_sets
        )
        return TrainConfig(
            epochs=-(-self.steps // max(1, steps_per_epoch)),
            batch_sets=self.batch_sets,
            learning_rate=self.learning_rate,
            validation_share=self.validation_share,
            seed=self.seed,
            **sizes,
        )


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to predict the new device, and how well it does."""

    network: SetCostNetwork
    ranges: Mapping[str, tuple[float, float]]
    """Feature name -> smallest and largest value that it was trained on."""
    evaluation: Evaluation
    """On sets of held-out tables; its name is the candidate's."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """The candidates, and which one to keep."""

    candidates: Mapping[str, Candidate]
    """By name: `BEFORE`, `SCALED`, `TUNED`, `LINEAR`."""
    factors_2: tuple[float, float]
    """Forward and backward: what `SCALED` multiplies the bundle's times by."""
    kept: str
    """The candidate that errs least; of equals the one that changes least."""

    @property
    def errors(self) -> dict[str, float]:
        """Candidate -> what it is judged by."""
        return {n: score(c.evaluation) for n, c in self.candidates.items()}

    def verdict(self) -> str:
        """Say in one sentence what is kept and why."""
        return kept_line(self.kept, self.errors, MEAN_ERROR)


def split_records(
    records: Sequence[CostRecord],
) -> tuple[list[CostRecord], list[CostRecord]]:
    """Split measured sets by table.

    The split is the collector's: by table name, the same in every run, so that a bundle
    trained on another run has not seen the held-out tables either.

    Returns:
        Sets to fine-tune on, and sets that hold only tables kept from any training.

    Raises:
        RecordError: There are fewer than `MIN_SETS` of either.
    """
    training = [r for r in records if not r.held_out]
    held_out = [r for r in records if r.held_out and r.repeat_of is None]
    if min(len(training), len(held_out)) < MIN_SETS:
        raise RecordError(
            f"a model needs {MIN_SETS} sets to train on and {MIN_SETS} of "
            f"held-out tables to judge by, got {len(training)} and {len(held_out)}; "
            "measure more sets"
        )
    return training, held_out


def rescale(network: SetCostNetwork, factors_2: tuple[float, float]) -> SetCostNetwork:
    """Return a network whose times are multiplied by forward's and backward's factor.

    Exact for equal factors; for unequal ones the head weighs the shards of a set a
    little differently, since it does so by their total cost.
    """
    scaled = copy.deepcopy(network)
    factors = torch.tensor(factors_2)
    with torch.no_grad():
        scaled.physical_PO2.mul_(factors)
        scaled.launch_2.mul_(factors)
        # The head sees log costs among its inputs: its bias takes the shift back.
        weight, bias = scaled.head[0], scaled.head[1]
        shift = torch.log(factors) / 3.0
        bias.sub_(torch.einsum("c,mch->mh", shift, weight[:, :2])[:, None])
    return scaled


def calibrate(
    source: NeuralCostModel,
    sizes: Mapping[str, int],
    training: SetData,
    test: SetData,
    config: CalibrationConfig,
) -> Calibration:
    """Make the candidates and choose.

    The input statistics stay those of `source`, since its weights were made for them;
    training ranges are the union of old and new, of the linear fit the new alone.

    Args:
        source: The model of the other device.
        sizes: Arguments of `SetCostNetwork` of its network.
        training: Sets of the new device to fine-tune on.
        test: Its sets of held-out tables, which judge and choose.
        config: Steps and rates.
    """
    predicted = source.predict_sets(
        training.features_NF, training.set_ids_N, training.num_sets
    )
    forward, backward = map(best_factor, predicted.T, training.costs_S2.T)
    scaled = rescale(source.network, (forward, backward))
    settings = config.training(training.num_sets, sizes)
    new_ranges = training_ranges(training)
    both = {
        name: (min(source.ranges[name][0], low), max(source.ranges[name][1], high))
        for name, (low, high) in new_ranges.items()
    }
    made = {
        BEFORE: (source.network, source.ranges),
        SCALED: (scaled, source.ranges),
        TUNED: (train(training, settings, init=scaled), both),
        LINEAR: (fit_linear(training), new_ranges),
    }
    candidates = {
        name: Candidate(
            network, ranges, evaluate(name, as_cost_model(network, test, name), test)
        )
        for name, (network, ranges) in made.items()
    }
    kept = min(candidates, key=lambda n: score(candidates[n].evaluation))
    return Calibration(candidates, (forward, backward), kept)
