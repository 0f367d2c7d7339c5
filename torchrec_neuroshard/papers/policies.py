"""Base of AutoShard and DreamShard: features, episodes, files, the search.

A policy places whole tables one after another, costliest first. All it sees of a rank
is the sum of its tables' encodings. One set of weights therefore serves any number of
tables and ranks.

Both papers have one batch size, 65,536. For other batches, `pooling_factor` is the
lookups of the batch divided by 65,536. The papers' features do not describe optimizer,
weighted lookups, the spread of bag lengths, features that share a table, or fusion
groups.

Shapes: `N` tables in all, `E` tasks side by side (one, except in training), `T` tables
of the longest task, `W` ranks of the widest task, `F` = 21 features, `K` values summed
per rank, `C` context values.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from torchrec_neuroshard.bundles.descriptions import Description
from torchrec_neuroshard.bundles.folders import PRETRAINED
from torchrec_neuroshard.bundles.format import BundleFormat
from torchrec_neuroshard.costs.simulator import Simulator
from torchrec_neuroshard.costs.task import ShardingTask, format_bytes
from torchrec_neuroshard.errors import (
    BundleMismatchError,
    ConfigError,
    InfeasibleError,
)
from torchrec_neuroshard.models.base import CostModel
from torchrec_neuroshard.papers.common import (
    PAPER_BATCH_SIZE,
    finish,
    whole_bytes,
    whole_placement,
)
from torchrec_neuroshard.search.base import Searcher, SearchResult
from torchrec_neuroshard.search.rules import require_unconstrained
from torchrec_neuroshard.search.shards import Ints
from torchrec_neuroshard.tables.access import NUM_COUNT_BINS
from torchrec_neuroshard.tables.table import TableConfig

POLICY_VERSION = 2
"""Version of the files; it changes when old files would be read differently."""

POLICY_FEATURES: tuple[str, ...] = (
    "dim",
    "row",
    "pooling_factor",
    "size",
    *(f"bin_{j}" for j in range(NUM_COUNT_BINS)),
)
"""Feature columns of AutoShard and DreamShard, in order: width; rows; lookups divided
by 65,536; weights in GB; `bin_j`, the share of distinct ids that occur 2**(j-1)+1 to
2**j times."""

TRAIN = "train one with benchmarks/papers/train.py"
"""Way out in messages about a missing or unsuitable policy."""
_GB = 1e9
ILLEGAL = -1e9
"""Logit of a full rank. Not -inf, since -inf times a probability of 0 is NaN."""


def policy_features(
    tables: Sequence[TableConfig], batch_size: int
) -> npt.NDArray[np.float32]:
    """Return the papers' features of whole tables.

    Pooling factors stay fractions. The released code truncates them to integers, so
    tables that few samples read seem unread. Sizes count each table's weight type.

    Args:
        tables: Whole tables.
        batch_size: Samples over all ranks.

    Returns:
        `N x F` float32, columns in `POLICY_FEATURES` order, not standardised.
    """
    rows = []
    for table in tables:
        profile = table.profile_at(batch_size)
        distinct = max(profile.num_distinct, 1e-9)
        head = (
            table.embedding_dim,
            table.num_embeddings,
            profile.num_lookups / PAPER_BATCH_SIZE,
            table.weight_bytes / _GB,
        )
        rows.append([*head, *(n / distinct for n in profile.access_histogram)])
    return np.array(rows, dtype=np.float32).reshape(-1, len(POLICY_FEATURES))


# Tasks as inputs of the nets.


@dataclass(frozen=True, slots=True)
class TaskView:
    """Arrays of one task. Tables are sorted by features, not in the task's order."""

    tables: npt.NDArray[np.int64]
    """Row -> index of its table in the task."""
    features: npt.NDArray[np.float32]
    """`T x F`."""
    bytes: npt.NDArray[np.float64]
    """Memory per table."""
    caps: npt.NDArray[np.float64]
    """Memory per rank; infinity: unlimited."""


def view_task(task: ShardingTask) -> TaskView:
    """Return a task's arrays."""
    caps_W = task.memory_bytes or [math.inf] * task.world_size
    features = policy_features(task.tables, task.batch_size)
    memory = whole_bytes(task)
    # A net can round differently in another row, and ties go to the first table. So
    # that the task's order does not matter, rows are sorted.
    order = np.lexsort((memory, *features.T))
    return TaskView(
        order, features[order], memory[order], np.asarray(caps_W, dtype=np.float64)
    )


class PolicyNet(nn.Module, ABC):
    """Base class of a policy with its cost net.

    The nets of both papers have this form. Tables are encoded, encodings are summed per
    rank, and each rank's logit is computed from its sum and a context. The context does
    not depend on earlier choices.
    """

    mean_F: torch.Tensor
    std_F: torch.Tensor
    cost_scale_ms: torch.Tensor

    def __init__(self) -> None:
        """Make statistics that change no feature until trained or loaded."""
        super().__init__()
        self.register_buffer("mean_F", torch.zeros(len(POLICY_FEATURES)))
        self.register_buffer("std_F", torch.ones(len(POLICY_FEATURES)))
        self.register_buffer("cost_scale_ms", torch.ones(()))

    def standardise(self, features: torch.Tensor) -> torch.Tensor:
        """Return standardised features, `... x F`."""
        return (features - self.mean_F) / self.std_F

    @abstractmethod
    def single_costs(self, features_NF: torch.Tensor) -> torch.Tensor:
        """Return each table's cost alone, `N`, in any unit: it only sorts tables."""

    @abstractmethod
    def items(self, features_ETF: torch.Tensor) -> torch.Tensor:
        """Return the values of each table that are summed per rank, `E x T x K`."""

    @abstractmethod
    def context(
        self, features_ETF: torch.Tensor, count_E: torch.Tensor
    ) -> torch.Tensor:
        """Return the context of each step, the same for all ranks, `E x T x C`.

        Args:
            features_ETF: Features of all tables, in the order of placing.
            count_E: Number of tables of each task.
        """

    @abstractmethod
    def logits(self, sums_WK: torch.Tensor, context_C: torch.Tensor) -> torch.Tensor:
        """Return each rank's logit: `... x W x K` and `... x C` to `... x W`."""


@torch.no_grad()
def place(net: PolicyNet, task: ShardingTask, by: Literal["cost", "memory"]) -> Ints:
    """Return the likeliest rank with room of each table; ties go to the first rank.

    Args:
        net: The policy.
        task: The task.
        by: Whether the tables with the largest predicted cost or memory come first.

    Raises:
        InfeasibleError: A table has room on no rank.
    """
    view = view_task(task)
    features_TF = torch.from_numpy(view.features)
    costs_T = net.single_costs(features_TF).double().numpy()
    order_T = np.argsort(-(costs_T if by == "cost" else view.bytes), kind="stable")
    features_1TF = features_TF[torch.from_numpy(order_T)][None]
    items_TK = net.items(features_1TF)[0]
    context_1TC = net.context(features_1TF, torch.tensor([len(order_T)]))
    sums_1WK = items_TK.new_zeros(1, task.world_size, items_TK.shape[1])
    room_W, rank_T = view.caps.copy(), np.zeros(len(order_T), dtype=np.int64)
    for step, row in enumerate(order_T):
        full_W = torch.from_numpy(room_W < view.bytes[row])
        if full_W.all():
            raise _stuck(task, int(view.tables[row]))
        logits_1W = net.logits(sums_1WK, context_1TC[:, step])
        probs_1W = torch.log_softmax(logits_1W.masked_fill(full_W, ILLEGAL), dim=-1)
        rank = int(probs_1W.argmax())
        sums_1WK[0, rank] += items_TK[step]
        room_W[rank] -= view.bytes[row]
        rank_T[view.tables[row]] = rank
    return rank_T


# Files.


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyInfo:
    """Description of a saved policy."""

    method: str
    name: str
    hardware: str
    """Device whose costs the policy was trained on."""
    ranges: Mapping[str, tuple[float, float]]
    """`num_tables`, `world_size`, `batch_size` -> their range in training."""
    trained_on: Mapping[str, Any]
    """Tables, settings, seed and command behind the weights."""
    feature_names: tuple[str, ...] = POLICY_FEATURES
    policy_version: int = POLICY_VERSION


@dataclass(frozen=True, slots=True)
class Policy:
    """A trained net and its description."""

    net: PolicyNet
    info: PolicyInfo


def policy_format(
    method: str, make_net: Callable[[], PolicyNet]
) -> BundleFormat[PolicyInfo, PolicyNet]:
    """Return the file format of a method's policies."""

    def check(path: Path, data: Mapping[str, Any]) -> None:
        found = data.get("method"), data.get("policy_version")
        if found != (method, POLICY_VERSION):
            raise BundleMismatchError(
                f"{path.parent} holds a policy of method and version {found}, not "
                f"{(method, POLICY_VERSION)}; take another folder or train again"
            )
        if tuple(data.get("feature_names", ())) != POLICY_FEATURES:
            raise BundleMismatchError(
                f"the policy in {path.parent} needs features that this package does "
                "not compute; train it again"
            )

    missing = f"{{folder}} is not a policy of {method}: it has no {{file}}; {TRAIN}"
    description = Description(
        info_type=PolicyInfo, check=check, info_name="policy.json", missing=missing
    )
    return BundleFormat(description=description, make_network=lambda _: make_net())


def load_policy(
    folder: str | Path, method: str, make_net: Callable[[], PolicyNet]
) -> Policy:
    """Return a folder's policy, after checking every file.

    Args:
        folder: The policy's folder.
        method: The method that the policy must have.
        make_net: Returns an untrained net of that method.

    Raises:
        BundleCorruptError: A file is missing or damaged.
        BundleMismatchError: The policy has another method or version.
    """
    return Policy(*policy_format(method, make_net).load(folder))


# The search.


class PolicySearcher(Searcher):
    """Base class of searches that place whole tables by a trained policy, in one pass.

    The policy never chooses a rank without room. If a table has room on no rank, the
    pass is repeated with the largest tables first, and a note in the result says so.
    """

    method: ClassVar[str]
    net_type: ClassVar[type[PolicyNet]]

    def __init__(
        self,
        policy: Policy | str | Path | None = None,
    ) -> None:
        """Take a policy.

        Args:
            policy: A policy or its folder. None: the shipped one.

        Raises:
            ConfigError: The policy has another method, or none is shipped.
            BundleError: The folder's policy cannot be loaded.
        """
        self.name = self.method
        if not isinstance(policy, Policy):
            shipped = sorted((PRETRAINED / "policies").glob(f"{self.method}_*"))
            if policy is None and not shipped:
                raise ConfigError(
                    f"this package has no {self.method} policy; {TRAIN} and pass its "
                    "folder"
                )
            policy = load_policy(policy or shipped[0], self.method, self.net_type)
        if policy.info.method != self.method:
            raise ConfigError(
                f"the search '{self.method}' cannot use a policy of "
                f"'{policy.info.method}'; pass a policy of '{self.method}', or use "
                f"search='{policy.info.method}'"
            )
        self.policy = policy

    def search(self, task: ShardingTask, simulator: Simulator) -> SearchResult:
        """Return the policy's placement; the models only predict its costs.

        Raises:
            InfeasibleError: A table has room on no rank.
            ConfigError: The task has rules on which ranks tables use or share.
        """
        start = time.monotonic()
        require_unconstrained(task, self.name)
        warnings = []
        try:
            ranks = place(self.policy.net, task, by="cost")
        except InfeasibleError:
            ranks = place(self.policy.net, task, by="memory")
            warnings.append(
                f"with the costliest tables first, {self.name} found no room for a "
                "table; it placed the largest tables first instead"
            )
        placement = whole_placement(task, ranks)
        placement.check(task)
        warnings += self._out_of_range(task, simulator.cost_model)
        evaluated = len(task.tables) * task.world_size
        return finish(placement, simulator, start, evaluated, warnings=warnings)

    def _out_of_range(self, task: ShardingTask, cost_model: CostModel) -> list[str]:
        info = self.policy.info
        values = {
            "num_tables": len(task.tables),
            "world_size": task.world_size,
            "batch_size": task.batch_size,
        }
        warnings = [
            f"the {self.name} policy was trained for {name} {low:g} to {high:g}, but "
            f"the task has {values[name]}; {TRAIN}"
            for name, (low, high) in info.ranges.items()
            if not low <= values[name] <= high
        ]
        if cost_model.hardware != info.hardware:
            warnings.append(
                f"the {self.name} policy was trained on costs of {info.hardware}, but "
                f"the task is for {cost_model.hardware}; {TRAIN}"
            )
        return warnings


def _stuck(task: ShardingTask, table: int) -> InfeasibleError:
    config = task.tables[table]
    needed = task.shard_bytes(table, config.embedding_dim)
    return InfeasibleError(
        f"table '{config.name}' needs {format_bytes(needed)}, and no rank has as much "
        "left. This search does not split tables and never moves one: use "
        f"search='default', raise world_size ({task.world_size}) or the memory "
        f"({format_bytes(max(task.memory_bytes))} on the largest rank)."
    )
