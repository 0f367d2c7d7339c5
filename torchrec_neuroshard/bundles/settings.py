"""Settings of the training of cost models."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from torchrec_neuroshard.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """Settings of the training."""

    epochs: int = 120
    batch_sets: int = 256
    """Sets per step."""
    learning_rate: float = 1e-2
    """Peak learning rate; the first steps warm up, then a cosine falls to zero."""
    weight_decay: float = 1e-3
    num_members: int = 8
    """Networks in the ensemble."""
    hidden: int = 64
    latent: int = 16
    head_hidden: int = 32
    validation_share: float = 0.1
    """Share of many training sets that is left out to choose the candidate, unless
    sets were drawn for that."""
    tuning_steps: int = 500
    """Steps of fine-tuning, in batches of at most 64 sets."""
    tuning_rate: float = 3e-3
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.epochs, self.num_members, self.tuning_steps) < 1:
            raise ConfigError(
                "epochs, members and steps must be at least 1, got "
                f"{self.epochs}, {self.num_members} and {self.tuning_steps}"
            )

    def tuning(self, num_sets: int) -> TrainConfig:
        """Return the settings for fine-tuning on `num_sets` sets."""
        batch = min(64, self.batch_sets)
        epochs = -(-self.tuning_steps // max(1, -(-num_sets // batch)))
        return dataclasses.replace(
            self, epochs=epochs, batch_sets=batch, learning_rate=self.tuning_rate
        )
