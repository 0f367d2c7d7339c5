"""NeuroShard's search (MLSys 2023, arXiv 2305.01868) behind our interface.

Outer loop: a beam over lists of tables to halve. A state starts as all tables whole;
in each of 10 rounds every kept state tries to halve the 10 largest and the 10 costliest
of its shards, one at a time, and the 3 cheapest new states are kept. The best plan ever
seen is returned. Inner loop: for each of 11 caps on a rank's columns, 1.00 to 1.50
times the mean, shards in descending predicted cost go on the rank whose *current*
predicted cost is least, of those with memory and columns left; the cheapest of the
11 placements counts. A placement costs the largest rank's compute + backward all-to-all
+ forward all-to-all, where ranks start the latter after the first two and their wait
for the last one counts (maximum of sums, not the critical path that our simulator
reports in `SearchResult.predicted`).

Faults that are kept: the caps are never relaxed, so that there is no plan where a table
is wider than 1.5 times the mean; kept states can be the same splits in another order;
costs are cached by a rank's shards in the order in which they came; two halves of a
table on one rank are costed as two tables.

Kept as well, being the method: widths are only halved, and only to multiples of 4 (12
and 20 stay whole); greedy choice by the cost before the shard is added; no step after
it; one prediction at a time; fusion groups and stages count only through the kernels'
cost, index collectives not at all.

Held, unlike the paper: a task's least widths, most shards and, where it asks for
it, equal widths (a step then halves all shards of a table, and no rank takes two of
them). Memory is the task's count, not the paper's rows x width x 4 bytes.

Where the sources at hand are silent: a rank has memory left for a shard if it holds it
without exceeding its limit; further ties go to the lower rank; an empty rank computes
for 0 ms; halves are listed last; ties between states go to the one tried first.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from torchrec_neuroshard.costs.simulator import Simulator
from torchrec_neuroshard.costs.task import Placement, ShardingTask
from torchrec_neuroshard.errors import ConfigError, InfeasibleError
from torchrec_neuroshard.models.base import CommsModel, CostModel
from torchrec_neuroshard.papers.common import finish
from torchrec_neuroshard.papers.neuroshard_models import (
    PAPER_FEATURES,
    NeuroShardModels,
    RankTimesNet,
    columns_in_paper_batch,
    load_models,
    shard_features,
    shipped_models,
)
from torchrec_neuroshard.search.base import BudgetedSearcher, SearchResult
from torchrec_neuroshard.search.feasibility import check_memory
from torchrec_neuroshard.search.rules import require_unconstrained
from torchrec_neuroshard.tables.features import ShardFeaturizer
from torchrec_neuroshard.tables.table import COLUMN_MULTIPLE

__all__ = [
    "NeuroShardConfig",
    "NeuroShardLoops",
    "OwnCosts",
    "PaperCosts",
    "PaperSearcher",
    "SharedCosts",
]

Floats = npt.NDArray[np.float64]
Shard = tuple[int, int]
"""Table and width."""
Ranks = list[list[Shard]]

NEUROSHARD_BEAM_WIDTH = 3
"""States kept per round: NeuroShard (arXiv 2305.01868), K."""
NEUROSHARD_CANDIDATES = 10
"""Tables tried per state and criterion: NeuroShard, N."""
NEUROSHARD_CAPS: tuple[float, ...] = tuple(1.0 + 0.05 * i for i in range(11))
"""Grid of width caps relative to the mean: NeuroShard, M = 11."""
NEUROSHARD_ROUNDS = 10
"""Most halvings in a plan: NeuroShard, L."""
_DIM = PAPER_FEATURES.index("dim")


@dataclass(frozen=True, kw_only=True, slots=True)
class NeuroShardConfig:
    """The paper's settings."""

    beam_width: int = NEUROSHARD_BEAM_WIDTH
    num_candidates: int = NEUROSHARD_CANDIDATES
    """Shards tried per state, by size and again by cost."""
    max_rounds: int = NEUROSHARD_ROUNDS
    caps: tuple[float, ...] = NEUROSHARD_CAPS
    """Most columns of a rank, relative to the mean."""
    costs: Literal["own", "shared"] = "own"
    """`own`: the paper's nets, those given (`PaperSearcher(models=...)`) or those that
    come with the package for the task's device, and where there are none, `shared`,
    with a warning; `shared`: the models that the search is given, to compare searches
    alone."""
    time_budget_seconds: float = math.inf
    """No new state is tried after this; the paper knows no limit."""

    def __post_init__(self) -> None:
        if min(self.beam_width, self.num_candidates) < 1 or not self.caps:
            raise ConfigError(
                "beam_width, num_candidates and the number of caps must be at least 1, "
                f"got {self.beam_width}, {self.num_candidates}, {self.caps}"
            )
        if self.costs not in ("own", "shared"):
            raise ConfigError(f"costs must be 'own' or 'shared', got '{self.costs}'")
        if self.max_rounds < 0 or not self.time_budget_seconds > 0:
            raise ConfigError(
                "max_rounds must be at least 0 and time_budget_seconds above 0, got "
                f"{self.max_rounds} and {self.time_budget_seconds}"
            )


class PaperCosts(ABC):
    """What the loops ask for."""

    @abstractmethod
    def compute_ms(self, shards: Sequence[Shard]) -> float:
        """Forward + backward of one rank that holds these shards, at least one."""

    @abstractmethod
    def comms_ms(self, compute_W: Floats, columns_W: Floats) -> Floats:
        """Both all-to-alls of each rank, waiting in the forward one included.

        Args:
            compute_W: Forward + backward compute [ms].
            columns_W: Output columns.

        Returns:
            `W` milliseconds.
        """


class SharedCosts(PaperCosts):
    """The models that every search of ours is given."""

    def __init__(
        self, task: ShardingTask, cost_model: CostModel, comms_model: CommsModel
    ) -> None:
        """Prepare the tables' features."""
        self._task, self._cost_model, self._comms = task, cost_model, comms_model
        self._featurizer = ShardFeaturizer(task.tables, task.batch_size)
        self._encodings: dict[Shard, Floats] = {}

    def _encoding(self, shard: Shard) -> Floats:
        if shard not in self._encodings:
            features = self._featurizer.features([shard[0]], [shard[1]])
            self._encodings[shard] = self._cost_model.encode(features)[0]
        return self._encodings[shard]

    def compute_ms(self, shards: Sequence[Shard]) -> float:
        """Add up the kernels, one per fusion group."""
        sums = np.zeros((self._task.num_groups, self._cost_model.encoding_dim))
        for shard in shards:
            sums[self._task.groups[shard[0]]] += self._encoding(shard)
        held = sorted({self._task.groups[table] for table, _ in shards})
        return float(self._cost_model.predict_sums(sums[held]).sum())

    def comms_ms(self, compute_W: Floats, columns_W: Floats) -> Floats:
        """Predict the transfers; what a rank waits is the last start minus its own."""
        return _comms_by_model(self._comms, self._task, compute_W, columns_W)


class OwnCosts(PaperCosts):
    """The paper's nets; without nets for the number of ranks, a model of collectives.

    Attributes:
        warnings: Whether the model had to stand in.
    """

    def __init__(
        self, task: ShardingTask, models: NeuroShardModels, comms_model: CommsModel
    ) -> None:
        """Prepare the tables' features.

        Args:
            task: What is to be placed.
            models: The nets.
            comms_model: Stands in for nets that were not trained.
        """
        self._task, self._net, self._comms = task, models.compute, comms_model
        self._nets = models.comms.get(task.world_size)
        self.warnings: list[str] = []
        if self._nets is None:
            known = ", ".join(map(str, sorted(models.comms))) or "none"
            self.warnings = [
                f"NeuroShard's nets of the all-to-all are for {known} ranks, not for "
                f"{task.world_size}: its search went by the collectives given "
                f"({comms_model.source}) instead"
            ]
        self._features_TF = torch.from_numpy(
            shard_features(task.tables, task.batch_size)
        )
        self._encodings: dict[Shard, torch.Tensor] = {}

    def _encoding(self, shard: Shard) -> torch.Tensor:
        if shard not in self._encodings:
            features = self._features_TF[shard[0] : shard[0] + 1].clone()
            features[0, _DIM] = shard[1]
            self._encodings[shard] = self._net.encode(features)[0]
        return self._encodings[shard]

    def compute_ms(self, shards: Sequence[Shard]) -> float:
        """Predict one kernel that holds all shards."""
        with torch.inference_mode():
            total = torch.stack([self._encoding(s) for s in shards]).sum(dim=0)
            return float(self._net.cost(total[None])[0])

    def comms_ms(self, compute_W: Floats, columns_W: Floats) -> Floats:
        """Predict backward, then forward with the starts that follow from it."""
        if self._nets is None:
            return _comms_by_model(self._comms, self._task, compute_W, columns_W)
        columns = columns_in_paper_batch(columns_W, self._task.batch_size)
        backward_W = _rank_times(self._nets.backward, columns)
        start = compute_W + backward_W
        offsets = start - start.min()
        forward_W = _rank_times(self._nets.forward, np.concatenate([columns, offsets]))
        comms: Floats = backward_W + forward_W
        return comms


def _comms_by_model(
    model: CommsModel, task: ShardingTask, compute_W: Floats, columns_W: Floats
) -> Floats:
    transfer = model.all_to_all(columns_W[None], task.batch_size)[0]
    start = compute_W + transfer[:, 1]
    comms: Floats = transfer[:, 1] + (start.max() - start) + transfer[:, 0]
    return comms


def _rank_times(net: RankTimesNet, inputs_I: Floats) -> Floats:
    with torch.inference_mode():
        times: torch.Tensor = net(torch.from_numpy(inputs_I[None]).float())[0]
    return times.double().numpy()


class NeuroShardLoops:
    """The two loops on one task.

    Attributes:
        num_predictions: Predictions of a rank's compute so far; the cached are free.
        out_of_time: Whether the deadline ended the search.
    """

    def __init__(
        self, task: ShardingTask, costs: PaperCosts, config: NeuroShardConfig
    ) -> None:
        """Take the task and what it costs."""
        self.task, self.costs, self.config = task, costs, config
        self.num_predictions = 0
        self.out_of_time = False
        self._cache: dict[tuple[Shard, ...], float] = {}
        self._features = [t.num_features for t in task.tables]
        self._memory = task.memory_bytes or (math.inf,) * task.world_size

    def compute_ms(self, shards: Sequence[Shard]) -> float:
        """Predicted forward + backward of one rank; 0 if it holds nothing."""
        if not shards:
            return 0.0
        key = tuple(shards)
        if key not in self._cache:
            self.num_predictions += 1
            self._cache[key] = self.costs.compute_ms(key)
        return self._cache[key]

    def total_ms(self, ranks: Ranks) -> float:
        """Objective of a placement: the largest sum over a rank's parts."""
        compute = np.array([self.compute_ms(shards) for shards in ranks])
        columns = np.array([float(sum(map(self.columns, shards))) for shards in ranks])
        return float((compute + self.costs.comms_ms(compute, columns)).max())

    def columns(self, shard: Shard) -> int:
        """Output columns of a shard."""
        return shard[1] * self._features[shard[0]]

    def size_bytes(self, shard: Shard) -> float:
        """Memory that a shard counts for."""
        return self.task.shard_bytes(*shard)

    def greedy(self, shards: Sequence[Shard], cap: float) -> Ranks | None:
        """Place shards under one cap.

        Args:
            shards: Tables and halves.
            cap: Most columns of a rank, relative to the mean.

        Returns:
            Each rank's shards in the order in which they came; None where one fits
            no rank.
        """
        world_size = self.task.world_size
        limit = cap * sum(map(self.columns, shards)) / world_size
        ranks: Ranks = [[] for _ in range(world_size)]
        cost, used = [0.0] * world_size, [0.0] * world_size
        columns = [0] * world_size
        for shard in sorted(shards, key=lambda s: -self.compute_ms([s])):
            size = self.size_bytes(shard)
            free = [
                rank
                for rank in range(world_size)
                if used[rank] + size <= self._memory[rank]
                and columns[rank] + self.columns(shard) <= limit
                and (self.task.uneven or shard not in ranks[rank])
            ]
            if not free:
                return None
            rank = min(free, key=lambda r: (cost[r], used[r]))
            ranks[rank].append(shard)
            used[rank] += size
            columns[rank] += self.columns(shard)
            cost[rank] = self.compute_ms(ranks[rank])
        return ranks

    def best_of_caps(self, shards: Sequence[Shard]) -> tuple[float, Ranks | None]:
        """Return the cheapest placement over the caps and its cost, else infinity."""
        best: tuple[float, Ranks | None] = (math.inf, None)
        for cap in self.config.caps:
            ranks = self.greedy(shards, cap)
            if ranks is not None:
                cost = self.total_ms(ranks)
                if cost < best[0]:
                    best = cost, ranks
        return best

    def candidates(self, shards: Sequence[Shard]) -> Iterator[list[Shard]]:
        """Yield the states that one halving leads to."""
        places = range(len(shards))
        count = self.config.num_candidates
        largest = sorted(places, key=lambda i: -self.size_bytes(shards[i]))[:count]
        costliest = sorted(places, key=lambda i: -self.compute_ms([shards[i]]))[:count]
        for place in dict.fromkeys(largest + costliest):
            state = self._halved(shards, place)
            if state is not None:
                yield state

    def _halved(self, shards: Sequence[Shard], place: int) -> list[Shard] | None:
        """Return the state after one halving; None where it is not allowed."""
        table, width = shards[place]
        half = width // 2
        if (
            width % 2
            or half % COLUMN_MULTIPLE
            or half < self.task.min_widths[table]
            # One step halves all shards of a table where they must be equal.
            or (not self.task.uneven and place != shards.index(shards[place]))
        ):
            return None
        halved = [
            i
            for i, shard in enumerate(shards)
            if i == place or (not self.task.uneven and shard[0] == table)
        ]
        pieces = sum(t == table for t, _ in shards) + len(halved)
        most = self.task.max_shards[table]
        # Pieces on one rank are joined, so that ranks bound the shards by themselves.
        if pieces > most and (most < self.task.world_size or not self.task.uneven):
            return None
        kept = [shard for i, shard in enumerate(shards) if i not in halved]
        return kept + [(table, half)] * (2 * len(halved))

    def run(self, deadline: float = math.inf) -> tuple[float, Ranks | None]:
        """Return the cheapest placement found and its cost; None where there is none.

        Args:
            deadline: On the clock `time.monotonic`: no new state is tried after it.
        """
        whole = [(i, t.embedding_dim) for i, t in enumerate(self.task.tables)]
        best = self.best_of_caps(whole)
        beam = [whole]
        for _ in range(self.config.max_rounds):
            found: list[tuple[float, list[Shard]]] = []
            for state in (s for kept in beam for s in self.candidates(kept)):
                self.out_of_time = time.monotonic() > deadline
                if self.out_of_time:
                    return best
                cost, ranks = self.best_of_caps(state)
                found.append((cost, state))
                if cost < best[0]:
                    best = cost, ranks
            if not found:
                break
            found.sort(key=lambda f: f[0])
            beam = [state for _, state in found[: self.config.beam_width]]
        return best


class PaperSearcher(BudgetedSearcher[NeuroShardConfig]):
    """NeuroShard as published; see the module's description.

    `SearchResult.predicted` is by the models that `search` is given, whichever costs
    the loops used; there is no bound, and `num_evaluated` counts compute predictions.
    """

    name = "neuroshard"

    def __init__(
        self,
        config: NeuroShardConfig | None = None,
        *,
        models: NeuroShardModels | str | Path | None = None,
    ) -> None:
        """Take the settings.

        Args:
            config: None means the paper's.
            models: The paper's nets or their folder; None is those that come with the
                package for the device that the search's cost model is of.

        Raises:
            ConfigError: `models` are given and not used.
            BundleError: The folder cannot be used.
        """
        super().__init__(config or NeuroShardConfig())
        if self.config.costs == "shared" and models is not None:
            raise ConfigError(
                "costs='shared' takes no nets of its own, but models were given; leave "
                "them out or take costs='own'"
            )
        self.models = load_models(models) if isinstance(models, str | Path) else models

    def search(
        self, task: ShardingTask, cost_model: CostModel, comms_model: CommsModel
    ) -> SearchResult:
        """Find a placement.

        Where the paper's own nets were not trained for the number of ranks,
        `comms_model` stands in for them, and a warning says so.

        Raises:
            InfeasibleError: The tables cannot fit, or the loops find no placement.
            ConfigError: The task says which ranks tables may share or use.
        """
        start = time.monotonic()
        require_unconstrained(task, self.name)
        check_memory(task)
        costs, warnings = self._costs(task, cost_model, comms_model)
        loops = NeuroShardLoops(task, costs, self.config)
        _, ranks = loops.run(start + self.config.time_budget_seconds)
        if ranks is None:
            raise _no_plan(loops)
        if loops.out_of_time:
            warnings.append(
                f"the time budget of {self.config.time_budget_seconds:g} s was spent "
                "before the last state; this is the best plan until then"
            )
        placement = Placement.from_widths(
            task.world_size,
            [(t, w, rank) for rank, shards in enumerate(ranks) for t, w in shards],
        )
        placement.check(task)
        simulator = Simulator(task, cost_model, comms_model)
        evaluated = loops.num_predictions
        return finish(placement, simulator, start, evaluated, warnings=warnings)

    def _costs(
        self, task: ShardingTask, cost_model: CostModel, comms_model: CommsModel
    ) -> tuple[PaperCosts, list[str]]:
        shared = SharedCosts(task, cost_model, comms_model)
        if self.config.costs == "shared":
            return shared, []
        models = self.models or shipped_models(cost_model.hardware)
        if models is None:
            return shared, [
                "no nets of NeuroShard's own come with this package for "
                f"{cost_model.hardware}: it searched on the costs given. Train some "
                "with benchmarks/papers/train.py and pass PaperSearcher(models=...)"
            ]
        own = OwnCosts(task, models, comms_model)
        return own, own.warnings


def _no_plan(loops: NeuroShardLoops) -> InfeasibleError:
    task, config = loops.task, loops.config
    shards = [(i, t.embedding_dim) for i, t in enumerate(task.tables)]
    widest = max(shards, key=loops.columns)
    mean = sum(map(loops.columns, shards)) / task.world_size
    return InfeasibleError(
        f"NeuroShard's search found no plan of {len(shards)} tables on "
        f"{task.world_size} ranks: no placement keeps to the memory and to "
        f"{max(config.caps):g} times the mean of {mean:.1f} columns a rank (the widest "
        f"table, '{task.tables[widest[0]].name}', has {loops.columns(widest)}). Use "
        "search='default' or give the ranks more memory."
    )
