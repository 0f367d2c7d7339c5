"""Base of AutoShard and DreamShard: features, episodes, files, the search.

A policy places whole tables one after another, costliest first. All it sees of a rank
is the sum of its tables' encodings. One set of weights therefore serves any number of
tables and ranks.

Both papers have one batch size, 65,536. For other batches, `pooling_factor` is the
lookups of the batch divided by 65,536. The papers' features do not describe optimizer,
weighted lookups, the spread of bag lengths, features that share a table, or fusion
groups.

Shapes: `N` tables in all, `E` episodes, `T` tables of the longest episode, `W` ranks of
the widest episode, `F` = 21 features, `K` values summed per rank, `C` context values.
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

from torchrec_neuroshard.bundles.find import PRETRAINED
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
_STANDARDISED = 4
"""Number of standardised columns. The shares after them stay raw."""
_GB = 1e9
_STD_FLOOR = 1e-6
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


@dataclass(frozen=True, slots=True)
class Episodes:
    """Several tasks side by side, padded, with tables in the order of placing."""

    tables_ET: npt.NDArray[np.int64]
    """Step -> index of its table in the task."""
    features_ETF: torch.Tensor
    bytes_ET: torch.Tensor
    caps_EW: torch.Tensor
    is_table_ET: torch.Tensor
    """False in the padding."""
    is_rank_EW: torch.Tensor

    def ranks(self, actions_ET: torch.Tensor, episode: int) -> npt.NDArray[np.int64]:
        """Return the rank of each table of one episode, in the task's order."""
        count = int(self.is_table_ET[episode].sum())
        ranks = np.empty(count, dtype=np.int64)
        ranks[self.tables_ET[episode, :count]] = actions_ET[episode, :count].numpy()
        return ranks


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
        """Make statistics that change no feature until `set_statistics`."""
        super().__init__()
        self.register_buffer("mean_F", torch.zeros(len(POLICY_FEATURES)))
        self.register_buffer("std_F", torch.ones(len(POLICY_FEATURES)))
        self.register_buffer("cost_scale_ms", torch.ones(()))

    def set_statistics(self, features_NF: npt.NDArray[np.float32]) -> None:
        """Standardise by the statistics of these training tables from now on."""
        head = torch.from_numpy(features_NF[:, :_STANDARDISED]).double()
        self.mean_F[:_STANDARDISED] = head.mean(dim=0).float()
        deviation = head.std(dim=0, unbiased=False).float()
        self.std_F[:_STANDARDISED] = deviation + _STD_FLOOR

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
    def context(self, episodes: Episodes) -> torch.Tensor:
        """Return the context of each step, the same for all ranks, `E x T x C`."""

    @abstractmethod
    def logits(self, sums_WK: torch.Tensor, context_C: torch.Tensor) -> torch.Tensor:
        """Return each rank's logit: `... x W x K` and `... x C` to `... x W`."""


# Episodes.


@torch.no_grad()
def arrange(
    net: PolicyNet,
    views: Sequence[TaskView],
    by: Literal["cost", "memory"] = "cost",
) -> Episodes:
    """Return tasks for `roll_out`, with the largest predicted cost or memory first."""
    lengths = [len(v.tables) for v in views]
    keys = [v.bytes for v in views]
    if by == "cost":
        flat = torch.from_numpy(np.concatenate([v.features for v in views]))
        costs = net.single_costs(flat).double().numpy()
        keys = np.split(costs, np.cumsum(lengths)[:-1])
    orders = [np.argsort(-key, kind="stable") for key in keys]
    widest = max(len(v.caps) for v in views)
    shape = len(views), max(lengths)
    tables = np.zeros(shape, dtype=np.int64)
    features = np.zeros((*shape, len(POLICY_FEATURES)), dtype=np.float32)
    memory = np.zeros(shape)
    caps = np.full((len(views), widest), -math.inf)
    for e, (view, order) in enumerate(zip(views, orders, strict=True)):
        tables[e, : len(order)] = view.tables[order]
        features[e, : len(order)] = view.features[order]
        memory[e, : len(order)] = view.bytes[order]
        caps[e, : len(view.caps)] = view.caps
    return Episodes(
        tables_ET=tables,
        features_ETF=torch.from_numpy(features),
        bytes_ET=torch.from_numpy(memory),
        caps_EW=torch.from_numpy(caps),
        is_table_ET=torch.arange(shape[1]) < torch.tensor(lengths)[:, None],
        is_rank_EW=torch.from_numpy(caps > -math.inf),
    )


@dataclass(frozen=True, slots=True)
class Rollout:
    """A policy's choices in each step of each episode."""

    actions_ET: torch.Tensor
    log_probs_ET: torch.Tensor
    """Log probabilities of the choices."""
    legal_ETW: torch.Tensor
    """True: the rank could be chosen."""
    stuck_ET: torch.Tensor
    """True: no rank had room, so the table went to the freest rank."""


@torch.no_grad()
def roll_out(
    net: PolicyNet, episodes: Episodes, generator: torch.Generator | None = None
) -> Rollout:
    """Return a policy's placement of all tables; it never chooses a full rank.

    Args:
        net: The policy.
        episodes: From `arrange`.
        generator: Draws the choices. None: take the likeliest rank; ties go to the
            first.
    """
    items = net.items(episodes.features_ETF) * episodes.is_table_ET[..., None]
    context = net.context(episodes)
    num_episodes, length = episodes.is_table_ET.shape
    num_ranks = episodes.caps_EW.shape[1]
    sums = items.new_zeros(num_episodes, num_ranks, items.shape[2])
    room = episodes.caps_EW.clone()
    steps: list[tuple[torch.Tensor, ...]] = []
    for t in range(length):
        legal = episodes.is_rank_EW & (room >= episodes.bytes_ET[:, t, None])
        stuck = ~legal.any(dim=1)
        freest = nn.functional.one_hot(room.argmax(dim=1), num_ranks).bool()
        legal = torch.where(stuck[:, None], freest, legal)
        logits = net.logits(sums, context[:, t]).masked_fill(~legal, ILLEGAL)
        log_probs = torch.log_softmax(logits, dim=-1)
        action = _choose(log_probs, generator)
        chosen = nn.functional.one_hot(action, num_ranks)
        sums = sums + chosen[..., None] * items[:, t, None]
        room = room - torch.where(
            chosen.bool(), episodes.bytes_ET[:, t, None], torch.zeros_like(room)
        )
        log_prob = log_probs.gather(1, action[:, None])[:, 0]
        steps.append((action, log_prob, legal, stuck & episodes.is_table_ET[:, t]))
    actions, chosen_probs, legal_steps, stuck_steps = zip(*steps, strict=True)
    return Rollout(
        torch.stack(actions, dim=1),
        torch.stack(chosen_probs, dim=1),
        torch.stack(legal_steps, dim=1),
        torch.stack(stuck_steps, dim=1),
    )


def _choose(log_probs: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
    if generator is None:
        return log_probs.argmax(dim=1)
    return torch.multinomial(log_probs.exp(), 1, generator=generator)[:, 0]


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


def _format(
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

    return BundleFormat(
        info_type=PolicyInfo,
        make_network=lambda _: make_net(),
        check=check,
        info_name="policy.json",
        missing=f"{{folder}} is not a policy of {method}: it has no {{file}}; {TRAIN}",
    )


def save_policy(folder: str | Path, policy: Policy, card: str) -> None:
    """Write the policy's weights, statistics and description, and a card."""
    files = _format(policy.info.method, lambda: policy.net)
    files.save(folder, policy.net, policy.info, card)


def load_policy(
    folder: str | Path, method: str, make_net: Callable[[], PolicyNet]
) -> Policy:
    """Return the policy that `save_policy` wrote, after checking every file.

    Args:
        folder: The policy's folder.
        method: The method that the policy must have.
        make_net: Returns an untrained net of that method.

    Raises:
        BundleCorruptError: A file is missing or damaged.
        BundleMismatchError: The policy has another method or version.
    """
    return Policy(*_format(method, make_net).load(folder))


def shipped_policy(method: str) -> Path:
    """Return the folder of a method's shipped policy.

    Raises:
        ConfigError: No policy of this method is shipped.
    """
    folders = sorted((PRETRAINED / "policies").glob(f"{method}_*"))
    if not folders:
        raise ConfigError(
            f"this package has no {method} policy; {TRAIN} and pass its folder"
        )
    return folders[0]


# The search.


class PolicySearcher(Searcher):
    """Base class of searches that place whole tables by a trained policy, in one pass.

    The policy never chooses a rank without room. If a table has room on no rank, the
    pass is repeated with the largest tables first, and a note in the result says so.
    """

    method: ClassVar[str]

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
            folder = shipped_policy(self.method) if policy is None else policy
            policy = load_policy(folder, self.method, self.make_net)
        if policy.info.method != self.method:
            raise ConfigError(
                f"the search '{self.method}' cannot use a policy of "
                f"'{policy.info.method}'; pass a policy of '{self.method}', or use "
                f"search='{policy.info.method}'"
            )
        self.policy = policy

    @staticmethod
    @abstractmethod
    def make_net() -> PolicyNet:
        """Return an untrained net."""

    def search(self, task: ShardingTask, simulator: Simulator) -> SearchResult:
        """Return the policy's placement; the models only predict its costs.

        Raises:
            InfeasibleError: A table has room on no rank.
            ConfigError: The task has rules on which ranks tables use or share.
        """
        start = time.monotonic()
        require_unconstrained(task, self.name)
        ranks, warnings = self._place(task, view_task(task))
        placement = whole_placement(task, ranks)
        placement.check(task)
        warnings += self._out_of_range(task, simulator.cost_model)
        evaluated = len(task.tables) * task.world_size
        return finish(placement, simulator, start, evaluated, warnings=warnings)

    def _place(
        self, task: ShardingTask, view: TaskView
    ) -> tuple[npt.NDArray[np.int64], list[str]]:
        for by in ("cost", "memory"):
            episodes = arrange(self.policy.net, [view], by)
            rollout = roll_out(self.policy.net, episodes)
            ranks = episodes.ranks(rollout.actions_ET, 0)
            if not bool(rollout.stuck_ET.any()):
                break
        else:
            step = int(rollout.stuck_ET[0].int().argmax())
            raise _stuck(task, int(episodes.tables_ET[0, step]))
        if by == "cost":
            return ranks, []
        return ranks, [
            f"with the costliest tables first, {self.name} found no room for a table; "
            "it placed the largest tables first instead"
        ]

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
