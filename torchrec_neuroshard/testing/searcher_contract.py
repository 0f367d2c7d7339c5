"""Test cases that every `Searcher` must pass."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import torch

from torchrec_neuroshard.costs.simulator import PHASES, Simulator
from torchrec_neuroshard.costs.task import Placement, ShardingTask
from torchrec_neuroshard.errors import ConfigError, InfeasibleError, PlacementError
from torchrec_neuroshard.models.base import CommsModel, CostModel
from torchrec_neuroshard.notes import Note
from torchrec_neuroshard.search.base import Searcher, SearchResult
from torchrec_neuroshard.tables.table import COLUMN_MULTIPLE, TableConfig
from torchrec_neuroshard.testing.analytic import AnalyticCommsModel, AnalyticCostModel
from torchrec_neuroshard.testing.cases import (
    expect_close,
    expect_error,
    random_task,
    sample_task,
)


class SearcherContract(ABC):
    """Test cases that every searcher must pass.

    Derive a class named `Test...` for pytest, or call the `test_` methods. They take no
    arguments and fail with an `AssertionError`.
    """

    splits_tables: bool = True
    """Whether the search splits a table by columns if it fits no rank whole."""
    num_tables: int = 12
    """Number of tables in the larger cases. Lower it for exhaustive searches."""
    tolerance: float = 1e-6
    """Relative difference allowed for rounding."""

    @abstractmethod
    def make_searcher(self, seed: int) -> Searcher:
        """Return the search under test. Ignore the seed if nothing is random."""

    def make_cost_model(self) -> CostModel:
        """Return the cost model to search with."""
        return AnalyticCostModel()

    def make_comms_model(self, task: ShardingTask) -> CommsModel:
        """Return the model of collectives to search with."""
        del task
        return AnalyticCommsModel()

    def _simulator(self, task: ShardingTask) -> Simulator:
        return Simulator(task, self.make_cost_model(), self.make_comms_model(task))

    def _search(self, task: ShardingTask, seed: int = 0) -> SearchResult:
        return self.make_searcher(seed).search(task, self._simulator(task))

    def _placed(self, task: ShardingTask) -> Placement:
        """Return the placement found, after checking that it is valid."""
        placement = self._search(task).placement
        _expect_legal(placement, task)
        return placement

    def _tasks(self) -> Sequence[ShardingTask]:
        """Return tasks that every search can solve, some with several kernels."""
        count = self.num_tables
        return (
            sample_task(count, 3),
            sample_task(count, 2, seed=1, local_world_size=1),
            sample_task(
                count,
                3,
                seed=2,
                groups=tuple(i % 3 for i in range(count)),
                stages=(0, 0, 1),
            ),
        )

    # Whether the plan is valid.

    def test_every_column_is_placed_once(self) -> None:
        """Every column is on one rank, in shards that a fused kernel can hold."""
        for task in self._tasks():
            self._placed(task)

    def test_one_rank_takes_all_tables(self) -> None:
        """On a single rank, all tables are whole."""
        shards = len(self._placed(sample_task(self.num_tables, 1)).shards)
        assert shards == self.num_tables, f"one rank holds {shards} shards"

    def test_more_ranks_than_tables(self) -> None:
        """Empty ranks are allowed, and the result has costs for all ranks."""
        task = sample_task(2, 6)
        result = self._search(task)
        _expect_legal(result.placement, task)
        ranks = len(result.predicted.ranks)
        assert ranks == 6, f"the result has costs of {ranks} ranks, but there are 6"

    # Whether the plan keeps to the task's rules.

    def test_memory_is_kept(self) -> None:
        """No rank exceeds its memory; ranks differ, and one has none."""
        count = self.num_tables
        task = sample_task(count, 4, fixed_bytes=(100_000,) * count)
        sizes = [
            task.shard_bytes(i, t.embedding_dim) for i, t in enumerate(task.tables)
        ]
        # A whole table always has room on some rank, whatever was placed before.
        room = [max(sizes) + share * sum(sizes) for share in (0.5, 0.3, 0.2)]
        caps = (0, *(math.ceil(r) for r in room))
        self._placed(dataclasses.replace(task, memory_bytes=caps))

    def test_a_table_larger_than_a_rank(self) -> None:
        """The table is split; a search without splits names it in its error."""
        task = _task_with_giant(splittable=True)
        if self.splits_tables:
            self._placed(task)
        else:
            self._expect_named(task, "a table larger than a rank")

    def test_a_table_that_fits_nowhere_is_named(self) -> None:
        """The InfeasibleError names the table."""
        task = _task_with_giant(splittable=False)
        self._expect_named(task, "a table that may not be split and fits no rank")

    def _expect_named(self, task: ShardingTask, what: str) -> None:
        message = expect_error(InfeasibleError, lambda: self._search(task), what)
        assert "giant" in message, f"the error does not name 'giant': {message}"

    def test_a_total_that_does_not_fit_is_told(self) -> None:
        """The InfeasibleError names a table or the total size."""
        first = sample_task(4, 2).tables[0]
        names = [f"table_{i}" for i in range(4)]
        task = ShardingTask(
            tables=tuple(dataclasses.replace(first, name=name) for name in names),
            world_size=2,
            batch_size=4096,
        )
        # Each table alone fits a rank.
        cap = math.ceil(1.2 * task.shard_bytes(0, first.embedding_dim))
        task = dataclasses.replace(task, memory_bytes=(cap, cap))
        message = expect_error(
            InfeasibleError,
            lambda: self._search(task),
            "tables of twice the memory of all ranks",
        )
        assert re.search("|".join(["[GMK]iB", "bytes", *names]), message) is not None, (
            f"the error names neither a table nor the total: {message}"
        )

    def test_limits_on_splits_are_kept(self) -> None:
        """The task's min_widths, max_shards and `uneven=False` are kept.

        Only unequal shards balance the two tables on the three ranks.
        """
        tables = tuple(
            TableConfig(
                name=n, num_embeddings=5000, embedding_dim=16, pooling_factor=20
            )
            for n in ("one", "other")
        )
        task = ShardingTask(tables=tables, world_size=3, batch_size=4096)
        for limits in (
            {"min_widths": (8, 16)},
            {"max_shards": (2, 1)},
            {"uneven": False},
        ):
            self._placed(dataclasses.replace(task, **limits))

    def test_random_rules_are_kept(self) -> None:
        """Random limits on shards, widths and ranks are kept, even if nothing costs.

        A search that does not support rules on ranks raises a ConfigError.
        """
        free = AnalyticCostModel(0.0, 0.0, 0.0), AnalyticCommsModel(math.inf)
        for seed in range(24):
            task = random_task(seed)
            simulator = self._simulator(task)
            if seed % 4 == 0:
                simulator = Simulator(task, *free)
            try:
                placement = self.make_searcher(0).search(task, simulator).placement
            except ConfigError:
                assert task.rules, f"random_task({seed}) has no rules on ranks"
                continue
            _expect_legal(placement, task)

    # Whether the result is right.

    def test_result_agrees_with_the_simulator(self) -> None:
        """Predicted costs are the simulator's for the placement and the models."""
        for task in self._tasks():
            result = self._search(task)
            wanted = self._simulator(task).evaluate(result.placement)
            expect_close(
                [[getattr(r, p) for p in PHASES] for r in result.predicted.ranks],
                [[getattr(r, p) for p in PHASES] for r in wanted.ranks],
                self.tolerance,
                "predicted phases of the ranks, against the simulator",
            )
            sources = (result.predicted.compute_source, result.predicted.comms_source)
            wanted_sources = (wanted.compute_source, wanted.comms_source)
            assert sources == wanted_sources, (
                f"the result names {sources} as sources, not {wanted_sources}"
            )

    def test_result_is_filled_in(self) -> None:
        """Gap, seconds, count and notes of the result are right."""
        start = time.monotonic()
        result = self._search(self._tasks()[0])
        seconds = time.monotonic() - start
        if result.lower_bound_ms > 0:
            expect_close(
                (1 + result.gap) * result.lower_bound_ms,
                result.predicted.critical_path_ms,
                self.tolerance,
                "(1 + gap) x bound, against the predicted critical path",
            )
        assert 0 <= result.search_seconds <= seconds + 0.1, (
            f"search_seconds is {result.search_seconds}, but the call took {seconds}"
        )
        assert result.num_evaluated >= 1, "num_evaluated is 0, so nothing was priced"
        assert isinstance(result.notes, tuple) and all(
            isinstance(note, Note) and note.text for note in result.notes
        ), f"notes must be a tuple of Note, not {result.notes!r}"

    def test_bound_holds(self) -> None:
        """The bound is at most the cost of the best of all plans."""
        for seed in range(4):
            task = sample_task(2, 3, seed=seed)
            optimum = _best_ms(self._simulator(task))
            result = self._search(task)
            path = result.predicted.critical_path_ms
            assert path >= optimum * (1 - self.tolerance), (
                f"a plan takes {path} ms, less than the best plan, {optimum} ms"
            )
            assert 0 <= result.lower_bound_ms <= optimum * (1 + self.tolerance), (
                f"the bound is {result.lower_bound_ms} ms, but the best plan takes "
                f"{optimum} ms"
            )

    def test_same_seed_gives_the_same_plan(self) -> None:
        """The state of Python's, NumPy's and torch's generators does not matter."""
        python, legacy = random.getstate(), np.random.get_state()
        try:
            found = []
            for state in (1, 2):
                random.seed(state)
                np.random.seed(state)
                with torch.random.fork_rng(devices=[]):
                    torch.manual_seed(state)
                    found.append(self._search(self._tasks()[-1], seed=7).placement)
            assert found[0] == found[1], "one seed gives different plans"
        finally:
            random.setstate(python)
            np.random.set_state(legacy)

    def test_has_a_name(self) -> None:
        """The name is not empty or inherited, since results and reports show it."""
        name = self.make_searcher(0).name
        assert isinstance(name, str) and name.strip() and name != Searcher.name, (
            f"the search is called {name!r}; give the class a name"
        )


def _expect_legal(placement: Placement, task: ShardingTask) -> None:
    """Fail the case unless the placement keeps to the task."""
    try:
        placement.check(task)
    except (PlacementError, InfeasibleError) as error:
        raise AssertionError(f"an illegal placement: {error}") from error
    for i, table in enumerate(task.tables):
        widths = {s.width for s in placement.table_shards(i)}
        assert task.uneven or len(widths) == 1, (
            f"with uneven=False, table '{table.name}' has shards of widths "
            f"{sorted(widths)}"
        )


def _task_with_giant(*, splittable: bool) -> ShardingTask:
    """Return two small tables and one that fits no rank whole."""
    tables = tuple(
        TableConfig(name=name, num_embeddings=rows, embedding_dim=16)
        for name, rows in (("small", 1000), ("giant", 100_000), ("other", 1000))
    )
    return ShardingTask(
        tables=tables,
        world_size=3,
        batch_size=4096,
        memory_bytes=(int(0.7 * tables[1].weight_bytes),) * 3,
        min_widths=() if splittable else (4, 16, 4),
    )


def _best_ms(simulator: Simulator) -> float:
    """Return the critical path of the best of all plans, by pricing every one."""
    task = simulator.task
    units = [table.embedding_dim // COLUMN_MULTIPLE for table in task.tables]
    splits = [
        [
            s
            for s in itertools.product(range(n + 1), repeat=task.world_size)
            if sum(s) == n
        ]
        for n in units
    ]
    placements = (
        Placement.from_widths(
            task.world_size,
            [
                (table, COLUMN_MULTIPLE * n, rank)
                for table, split in enumerate(chosen)
                for rank, n in enumerate(split)
                if n
            ],
        )
        for chosen in itertools.product(*splits)
    )
    return min(simulator.evaluate(p).critical_path_ms for p in placements)
