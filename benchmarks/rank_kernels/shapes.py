"""Cases of `kernels.py`: what is timed, and the tables that are drawn for it."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from torchrec_neuroshard.measure.clock import Backward, Forward
from torchrec_neuroshard.measure.kernels import InputBatch, draw_inputs
from torchrec_neuroshard.tables.access import AccessDistribution
from torchrec_neuroshard.tables.table import TableConfig

SKEW = 1.0
"""Exponent of the power law of ids."""

Passes = Iterator[tuple[Forward, Backward]]
Notes = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One kernel to time."""

    variant: str = ""
    shape: Mapping[str, Any]
    unit: str
    """What `amount` counts: `bytes` or `lookups`."""
    amount: float
    passes: Callable[[torch.device, Notes], Passes]
    """Returns endless passes; the first is the warm-up. It may set notes, which are
    functions that are called after the passes."""
    has_backward: bool = True


@dataclass(frozen=True, slots=True)
class Shape:
    """Tables that are read together."""

    tables: tuple[TableConfig, ...]
    batch_size: int

    @property
    def lookups(self) -> float:
        """Ids of a batch."""
        return self.batch_size * sum(t.pooling_factor for t in self.tables)

    def to_json(self) -> dict[str, Any]:
        """Return rows, width and mean ids per sample of each table."""
        tables = [
            [t.num_embeddings, t.embedding_dim, round(t.pooling_factor, 3)]
            for t in self.tables
        ]
        return {"batch_size": self.batch_size, "tables": tables, "skew": SKEW}

    def case(
        self, variant: str, passes: Callable[[torch.device, Notes], Passes]
    ) -> Case:
        """Return a case of this shape."""
        return Case(
            variant=variant,
            shape=self.to_json(),
            unit="lookups",
            amount=round(self.lookups),
            passes=passes,
        )

    def draw(self, device: torch.device, number: int) -> InputBatch:
        """Return input number `number`."""
        access = [
            AccessDistribution.power_law(t.num_embeddings, SKEW) for t in self.tables
        ]
        return draw_inputs(self.tables, access, self.batch_size, (11, number), device)

    def batches(self, device: torch.device) -> Iterator[InputBatch]:
        """Yield two inputs in turn, as the collector does."""
        return itertools.cycle([self.draw(device, number) for number in range(2)])


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranges:
    """Ranges of shapes, all drawn log-uniformly."""

    rows: tuple[float, float]
    batch_size: tuple[float, float]
    num_tables: tuple[float, float] = (1, 8)
    widths: tuple[int, ...] = (16, 32, 64, 128, 256)
    pooling: tuple[float, float] = (1, 50)
    one_width: bool = False
    max_bytes: float = 8 * 2**30
    max_values: float = 2**29
    """Maximum number of lookups times columns."""

    def quick(self) -> Ranges:
        """Return ranges for a rehearsal."""
        return dataclasses.replace(
            self,
            rows=(10, 500),
            batch_size=(8, 64),
            num_tables=(1, 3),
            pooling=(1, 4),
        )


def draw_shapes(count: int, ranges: Ranges, quick: bool) -> Iterator[Shape]:
    """Yield shapes, the same in every process."""
    if quick:
        count, ranges = 2, ranges.quick()
    rng = np.random.default_rng([count, int(ranges.rows[1])])

    def draw(low: float, high: float) -> float:
        return math.exp(rng.uniform(math.log(low), math.log(high)))

    while count:
        batch_size = 2 ** round(math.log2(draw(*ranges.batch_size)))
        width = int(rng.choice(ranges.widths))
        tables = tuple(
            TableConfig(
                name=str(i),
                num_embeddings=round(draw(*ranges.rows)),
                embedding_dim=width
                if ranges.one_width
                else int(rng.choice(ranges.widths)),
                pooling_factor=draw(*ranges.pooling),
            )
            for i in range(round(draw(*ranges.num_tables)))
        )
        values = sum(t.pooling_factor * t.embedding_dim for t in tables) * batch_size
        if (
            sum(t.weight_bytes for t in tables) <= ranges.max_bytes
            and values <= ranges.max_values
        ):
            count -= 1
            yield Shape(tables, batch_size)


USUAL = Ranges(rows=(1e4, 1e7), batch_size=(2048, 65536))
"""Ranges of fused kernels."""
