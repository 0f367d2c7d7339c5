"""NeuroShard's search (MLSys 2023, arXiv 2305.01868) behind our interface.

The search has two loops:

- The outer loop is a beam search over column splits. A state is a list of shards, and
  the first state has all tables whole. In each of 10 rounds, each kept state yields up
  to 20 new states, by halving one of its 10 largest or 10 costliest shards. The 3
  cheapest new states are kept. The search returns the cheapest plan of all rounds.
- The inner loop places the shards of a state. It runs once for each of 11 caps on a
  rank's columns, 1.00 to 1.50 times the mean. Shards are placed in descending predicted
  cost. Each goes to the rank with the least predicted cost so far among the ranks with
  memory and columns left. The cheapest of the 11 placements is the state's plan.

A plan costs the largest sum, over ranks, of compute, backward all-to-all and forward
all-to-all. A rank starts the forward all-to-all after the other two, and its wait for
the last rank counts. This maximum of sums is not the critical path that our simulator
reports in `SearchResult.predicted`.

Faults of the paper that we keep:

- Caps are never relaxed. A state with a shard wider than 1.5 times the mean has no
  plan.
- Two kept states can have the same splits in another order.
- Costs are cached by a rank's shards in the order in which they were placed.
- Two halves of a table on one rank are priced as two tables.

Properties of the method that we keep: widths are only halved, and only to multiples of
4, so 12 and 20 stay whole. The greedy choice compares costs before the shard is added,
and no step improves the plan afterwards. Predictions are made one at a time. Fusion
groups and stages count only in the cost of kernels, and index collectives are ignored.

Unlike the paper, the search keeps to the task's minimum widths and maximum shards. If
the task requires equal widths, a step halves all shards of a table, and no rank takes
two of them. Memory is counted as the task counts it; the paper takes rows x width x 4
bytes.

Our choices where paper and code say nothing: a shard may fill a rank's memory exactly.
Further ties between ranks go to the lower rank, ties between states to the one tried
first. An empty rank computes for 0 ms. Halves go to the end of the list.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from torchrec_neuroshard.costs.simulator import Simulator
from torchrec_neuroshard.costs.task import Placement, ShardingTask
from torchrec_neuroshard.errors import ConfigError, InfeasibleError, check_kind
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

Floats = npt.NDArray[np.float64]
Shard = tuple[int, int]
"""A table's index and the shard's width."""
Ranks = list[list[Shard]]

NEUROSHARD_BEAM_WIDTH = 3
"""States kept per round: K of NeuroShard (arXiv 2305.01868)."""
NEUROSHARD_CANDIDATES = 10
"""Shards tried per state and criterion: N of NeuroShard."""
NEUROSHARD_CAPS: tuple[float, ...] = tuple(1.0 + 0.05 * i for i in range(11))
"""Caps on a rank's columns, relative to the mean: NeuroShard has M = 11."""
NEUROSHARD_ROUNDS = 10
"""Maximum halvings in a plan: L of NeuroShard."""
_DIM = PAPER_FEATURES.index("dim")


@dataclass(frozen=True, kw_only=True, slots=True)
class NeuroShardConfig:
    """The paper's settings."""

    beam_width: int = NEUROSHARD_BEAM_WIDTH
    num_candidates: int = NEUROSHARD_CANDIDATES
    """Shards tried per state: this many by size, and as many by cost."""
    max_rounds: int = NEUROSHARD_ROUNDS
    caps: tuple[float, ...] = NEUROSHARD_CAPS
    """Maximum columns of a rank, relative to the mean."""
    costs: Literal["own", "shared"] = "own"
    """Which models price the loops. `own`: the paper's nets, from
    `PaperSearcher(models=...)` or shipped for the task's device; without nets the
    search warns and uses `shared`. `shared`: the models that `search` is given, to
    compare search algorithms alone."""
    time_budget_seconds: float = math.inf
    """Time after which no new state is tried. The paper has no limit."""

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


class SharedCosts:
    """Costs of the loops, by the models that `search` is given."""

    def __init__(
        self, task: ShardingTask, cost_model: CostModel, comms_model: CommsModel
    ) -> None:
        """Prepare the tables' features."""
        self._task, self._cost_model, self.comms_model = task, cost_model, comms_model
        self._featurizer = ShardFeaturizer(task.tables, task.batch_size)
        self._encodings: dict[Shard, Floats] = {}

    def _encoding(self, shard: Shard) -> Floats:
        if shard not in self._encodings:
            features = self._featurizer.features([shard[0]], [shard[1]])
            self._encodings[shard] = self._cost_model.encode(features)[0]
        return self._encodings[shard]

    def compute_ms(self, shards: Sequence[Shard]) -> float:
        """Return forward + backward compute of one rank's shards, at least one.

        It is the sum of the kernels, one per fusion group.
        """
        sums = np.zeros((self._task.num_groups, self._cost_model.encoding_dim))
        for shard in shards:
            sums[self._task.groups[shard[0]]] += self._encoding(shard)
        held = sorted({self._task.groups[table] for table, _ in shards})
        return float(self._cost_model.predict_sums(sums[held]).sum())

    def comms_ms(self, compute_W: Floats, columns_W: Floats) -> Floats:
        """Return the time of each rank in both all-to-alls.

        The forward one includes the wait for the rank that starts last.

        Args:
            compute_W: Forward + backward compute of each rank [ms].
            columns_W: Output columns of each rank.

        Returns:
            `W` milliseconds.
        """
        transfer = self.comms_model.all_to_all(columns_W[None], self._task.batch_size)[
            0
        ]
        start = compute_W + transfer[:, 1]
        comms: Floats = transfer[:, 1] + (start.max() - start) + transfer[:, 0]
        return comms


class OwnCosts:
    """Costs by the paper's nets.

    Without nets for the number of ranks, the given model predicts the collectives.

    Attributes:
        warnings: Says if the model of collectives was used.
    """

    def __init__(
        self, task: ShardingTask, models: NeuroShardModels, shared: SharedCosts
    ) -> None:
        """Prepare the tables' features.

        Args:
            task: The task.
            models: The paper's nets.
            shared: Predicts collectives if there are no nets for the number of ranks.
        """
        self._task, self._net, self._shared = task, models.compute, shared
        self._nets = models.comms.get(task.world_size)
        self.warnings: list[str] = []
        if self._nets is None:
            known = ", ".join(map(str, sorted(models.comms))) or "none"
            self.warnings = [
                f"NeuroShard's all-to-all nets were trained for {known} ranks, not for "
                f"{task.world_size}; its search priced collectives by the given model "
                f"instead ({shared.comms_model.source})"
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
        """Return the cost of one kernel that holds all shards."""
        with torch.inference_mode():
            total = torch.stack([self._encoding(s) for s in shards]).sum(dim=0)
            return float(self._net.cost(total[None])[0])

    def comms_ms(self, compute_W: Floats, columns_W: Floats) -> Floats:
        """Return the times: backward first, which sets each rank's forward start."""
        if self._nets is None:
            return self._shared.comms_ms(compute_W, columns_W)
        columns = columns_in_paper_batch(columns_W, self._task.batch_size)
        backward_W = _rank_times(self._nets.backward, columns)
        start = compute_W + backward_W
        offsets = start - start.min()
        forward_W = _rank_times(self._nets.forward, np.concatenate([columns, offsets]))
        comms: Floats = backward_W + forward_W
        return comms


Costs = SharedCosts | OwnCosts
"""Costs by which the loops search."""


def _rank_times(net: RankTimesNet, inputs_I: Floats) -> Floats:
    with torch.inference_mode():
        times: torch.Tensor = net(torch.from_numpy(inputs_I[None]).float())[0]
    return times.double().numpy()


class NeuroShardLoops:
    """NeuroShard's two loops on one task.

    Attributes:
        num_predictions: Predictions of a rank's compute so far, without cached ones.
        out_of_time: Whether the deadline ended the search.
    """

    def __init__(
        self, task: ShardingTask, costs: Costs, config: NeuroShardConfig
    ) -> None:
        """Take the task, its costs and the settings."""
        self.task, self.costs, self.config = task, costs, config
        self.num_predictions = 0
        self.out_of_time = False
        self._cache: dict[tuple[Shard, ...], float] = {}
        self._features = [t.num_features for t in task.tables]
        self._memory = task.memory_bytes or (math.inf,) * task.world_size

    def compute_ms(self, shards: Sequence[Shard]) -> float:
        """Return the forward + backward compute of one rank; 0 without shards."""
        if not shards:
            return 0.0
        key = tuple(shards)
        if key not in self._cache:
            self.num_predictions += 1
            self._cache[key] = self.costs.compute_ms(key)
        return self._cache[key]

    def total_ms(self, ranks: Ranks) -> float:
        """Return the objective: the largest rank's compute and all-to-alls together."""
        compute = np.array([self.compute_ms(shards) for shards in ranks])
        columns = np.array([float(sum(map(self.columns, shards))) for shards in ranks])
        return float((compute + self.costs.comms_ms(compute, columns)).max())

    def columns(self, shard: Shard) -> int:
        """Return the output columns of a shard."""
        return shard[1] * self._features[shard[0]]

    def greedy(self, shards: Sequence[Shard], cap: float) -> Ranks | None:
        """Return a greedy placement under one cap.

        Args:
            shards: The shards to place.
            cap: Maximum columns of a rank, relative to the mean.

        Returns:
            Each rank's shards in the order of placing. None: a shard fits no rank.
        """
        world_size = self.task.world_size
        limit = cap * sum(map(self.columns, shards)) / world_size
        ranks: Ranks = [[] for _ in range(world_size)]
        cost, used = [0.0] * world_size, [0.0] * world_size
        columns = [0] * world_size
        for shard in sorted(shards, key=lambda s: -self.compute_ms([s])):
            size = self.task.shard_bytes(*shard)
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
        """Return the cost and placement of the best cap; infinity without a plan."""
        best: tuple[float, Ranks | None] = (math.inf, None)
        for cap in self.config.caps:
            ranks = self.greedy(shards, cap)
            if ranks is not None:
                cost = self.total_ms(ranks)
                if cost < best[0]:
                    best = cost, ranks
        return best

    def candidates(self, shards: Sequence[Shard]) -> Iterator[list[Shard]]:
        """Yield the states that one halving makes of a state."""
        places = range(len(shards))
        count = self.config.num_candidates
        sizes = [self.task.shard_bytes(*shard) for shard in shards]
        largest = sorted(places, key=lambda i: -sizes[i])[:count]
        costliest = sorted(places, key=lambda i: -self.compute_ms([shards[i]]))[:count]
        for place in dict.fromkeys(largest + costliest):
            state = self._halved(shards, place)
            if state is not None:
                yield state

    def _halved(self, shards: Sequence[Shard], place: int) -> list[Shard] | None:
        """Return the state after one halving; None if the task forbids it."""
        table, width = shards[place]
        half = width // 2
        if (
            width % 2
            or half % COLUMN_MULTIPLE
            or half < self.task.min_widths[table]
            # If widths must be equal, one step halves all shards of the table.
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
        # Pieces on one rank are joined, so a table never has more shards than ranks.
        if pieces > most and (most < self.task.world_size or not self.task.uneven):
            return None
        kept = [shard for i, shard in enumerate(shards) if i not in halved]
        return kept + [(table, half)] * (2 * len(halved))

    def run(self, deadline: float = math.inf) -> tuple[float, Ranks | None]:
        """Return the cost and ranks of the cheapest plan; infinity and None without.

        Args:
            deadline: Time of `time.monotonic()` after which no new state is tried.
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
    """NeuroShard's search as published, with the exceptions in the module's docstring.

    `SearchResult.predicted` always comes from the simulator that `search` is given,
    even if the loops used the paper's nets. There is no bound. `num_evaluated` counts
    the predictions of compute.
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
            config: The settings. None: the paper's.
            models: The paper's nets or their folder. None: the nets shipped for the
                device of the cost model that `search` is given.

        Raises:
            ConfigError: `models` are given, but `config` says not to use them.
            BundleError: The folder's nets cannot be loaded.
        """
        config = config or NeuroShardConfig()
        check_kind("config", config, NeuroShardConfig)
        super().__init__(config)
        if self.config.costs == "shared" and models is not None:
            raise ConfigError(
                "costs='shared' does not use NeuroShard's nets, but models were given; "
                "leave models out or take costs='own'"
            )
        self.models = load_models(models) if isinstance(models, str | Path) else models

    def search(self, task: ShardingTask, simulator: Simulator) -> SearchResult:
        """Return the best placement of the two loops.

        If the paper's nets were not trained for the number of ranks, the simulator's
        model predicts the collectives, and a note says so.

        Raises:
            InfeasibleError: The tables cannot fit, or the loops find no placement.
            ConfigError: The task has rules on which ranks tables use or share.
        """
        start = time.monotonic()
        require_unconstrained(task, self.name)
        check_memory(task)
        costs, warnings = self._costs(task, simulator)
        loops = NeuroShardLoops(task, costs, self.config)
        _, ranks = loops.run(start + self.config.time_budget_seconds)
        if ranks is None:
            raise _no_plan(loops)
        if loops.out_of_time:
            warnings.append(
                f"the time budget of {self.config.time_budget_seconds:g} s ended "
                "before all states were tried; this is the best plan found by then"
            )
        placement = Placement.from_widths(
            task.world_size,
            [(t, w, rank) for rank, shards in enumerate(ranks) for t, w in shards],
        )
        placement.check(task)
        evaluated = loops.num_predictions
        return finish(placement, simulator, start, evaluated, warnings=warnings)

    def _costs(
        self, task: ShardingTask, simulator: Simulator
    ) -> tuple[Costs, list[str]]:
        hardware = simulator.cost_model.hardware
        shared = SharedCosts(task, simulator.cost_model, simulator.comms_model)
        if self.config.costs == "shared":
            return shared, []
        models = self.models or shipped_models(hardware)
        if models is None:
            return shared, [
                f"this package has no nets of NeuroShard for {hardware}; "
                "its search used the given cost model instead. Train nets with "
                "benchmarks/papers/train.py and pass PaperSearcher(models=...)"
            ]
        own = OwnCosts(task, models, shared)
        return own, own.warnings


def _no_plan(loops: NeuroShardLoops) -> InfeasibleError:
    task, config = loops.task, loops.config
    shards = [(i, t.embedding_dim) for i, t in enumerate(task.tables)]
    widest = max(shards, key=loops.columns)
    mean = sum(map(loops.columns, shards)) / task.world_size
    return InfeasibleError(
        f"NeuroShard's search found no plan of {len(shards)} tables on "
        f"{task.world_size} ranks: every placement exceeds a rank's memory or "
        f"{max(config.caps):g} times the mean of {mean:.1f} columns per rank (the "
        f"widest table, '{task.tables[widest[0]].name}', has {loops.columns(widest)}). "
        "Use search='default' or give the ranks more memory."
    )
