"""When a planner measures: a first launch calibrates, the launches after it remember.

What is measured, and how, is `training.first_launch`'s; this module says when, gathers
what the search may put on a rank, and sees to it that no failure reaches the job.
"""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch.distributed as dist
from torchrec.distributed.planner.types import (
    ParameterConstraints,
    ShardingOption,
    Topology,
)

from torchrec_neuroshard.cost_models import ConcurrentCostModel, CostModel, cache
from torchrec_neuroshard.cost_models.cache import CacheKey
from torchrec_neuroshard.cost_models.compute import PhysicalCostModel
from torchrec_neuroshard.devices import current_device_name, is_accelerator
from torchrec_neuroshard.errors import (
    ConfigError,
    NeuroShardError,
    RankFailureError,
)
from torchrec_neuroshard.notes import Note
from torchrec_neuroshard.planner.compat import group_timeout_seconds
from torchrec_neuroshard.planner.costs.plan_costs import PlanCosts
from torchrec_neuroshard.planner.launch.from_first import ExchangeError, from_first
from torchrec_neuroshard.planner.options.spread_options import sample_shards
from torchrec_neuroshard.planner.options.table_reader import (
    is_dense,
    is_pooled,
    table_name,
)
from torchrec_neuroshard.planner.options.ways import is_placeable, narrowest_shard
from torchrec_neuroshard.planner.topology import GB_PER_S, whole_nodes
from torchrec_neuroshard.records import utc_now
from torchrec_neuroshard.tables import COLUMN_MULTIPLE, TableConfig, row_shard

if TYPE_CHECKING:
    from torchrec_neuroshard.training.first_launch import LaunchRequest

__all__ = [
    "GRACE_S",
    "USUAL_SECONDS",
    "FirstLaunch",
    "Offer",
    "check_patience",
    "error_text",
    "find_address",
    "free_port",
    "help_measure",
    "is_measurable",
]

USUAL_SECONDS = 60.0
"""Budget unless another one is asked for."""
_MEASURED_TYPES = ("fp32", "fp16")
_MOST_PARTS = 4
"""Columns of a table are measured whole, in halves, ... in so many parts."""
GRACE_S = 60.0
"""Beyond twice the budget, until what still measures is ended: starting processes
takes long on a busy machine."""
_POLL_S = 0.2
_PATIENCE_SHARE = 0.5
"""Of a group's time-out, what measuring may take at most: planning comes after it."""


class Offer(NamedTuple):
    """What rank 0 has all ranks measure, and where they meet."""

    request: LaunchRequest
    address: str
    port: int


Options = Callable[[], Sequence[ShardingOption]]


class FirstLaunch:
    """Finds measured costs for a planner, or has its ranks measure them.

    Attributes:
        seconds: The budget; 0 measures nothing.
    """

    def __init__(
        self,
        costs: PlanCosts,
        cost_model: str | Path | CostModel,
        calibrate: str | float,
        constraints: Mapping[str, ParameterConstraints] | None,
    ) -> None:
        """Take the planner's settings.

        Args:
            costs: Gets the models that were measured.
            cost_model: The planner's.
            calibrate: "auto", "never" or seconds.
            constraints: Table name -> TorchRec's constraints on it.

        Raises:
            ConfigError: `calibrate` is none of these, or contradicts `cost_model`.
        """
        self._costs, self._constraints = costs, constraints or {}
        self._must = isinstance(cost_model, str) and cost_model == "measure"
        applies = self._must or (
            isinstance(cost_model, str | Path) and str(cost_model) == "auto"
        )
        self.seconds = self._budget(calibrate)
        if not (isinstance(calibrate, str) or applies):
            raise ConfigError(
                f"calibrate={calibrate:g} measures for cost_model 'auto' or 'measure', "
                f"got another one ({cost_model!r}); leave one of them out"
            )
        self._is_off = not applies or (calibrate == "never" and not self._must)
        self._is_through = False

    def _budget(self, calibrate: str | float) -> float:
        if calibrate == "never":
            return 0.0
        if calibrate == "auto":
            on_gpu = is_accelerator(self._costs.topology.compute_device)
            return USUAL_SECONDS if on_gpu or self._must else 0.0
        if isinstance(calibrate, str) or not calibrate > 0:
            raise ConfigError(
                "calibrate must be 'auto', 'never' or a number of seconds above 0, got "
                f"{calibrate!r}"
            )
        return float(calibrate)

    def on_one_rank(self, options: Options) -> None:
        """Before a plan: take measured costs from the cache.

        With `cost_model="measure"` kernels are measured here where there are none.
        """
        if self._is_off or self._is_through:
            return
        try:
            if self._find(options) or not self._must:
                return
            self._is_through = True
            if self.seconds:
                request = self.request(options(), ranks=1)
                alone = int(self._costs.topology.world_size) == 1
                self._measure(Offer(request, "127.0.0.1", free_port()), alone)
                return
            reason = "calibrate='never', and the cache holds none"
        except Exception as error:
            reason = error_text(error)
        self._warn(reason)

    def on_all_ranks(self, options: Options, pg: dist.ProcessGroup) -> None:
        """Before a collective plan: have all ranks measure where nothing was.

        The first rank calls it and decides; the others wait to `help_measure`.

        Raises:
            ExchangeError: Ranks could not be told; nothing else is raised.
        """
        topology = self._costs.topology
        if self._is_off or self._is_through or not self.seconds:
            return
        try:
            is_here = current_device_name(topology.compute_device) is not None
            if pg.size() != int(topology.world_size) or not is_here:
                return
            with contextlib.ExitStack() as locked:
                offer = self._offer(options, pg, locked)
                if offer is not None:
                    from_first(offer, pg, "looked for measured costs")
                    self._measure(offer, True)
        except ExchangeError:
            raise
        except Exception as error:
            self._warn(error_text(error))
        self._is_through = True

    def _offer(
        self, options: Options, pg: dist.ProcessGroup, locked: contextlib.ExitStack
    ) -> Offer | None:
        """Decide on rank 0 what to measure; None: costs are known, and in use."""
        if self._find(options) or (not self._must and self._is_shipped()):
            return None
        topology = self._costs.topology
        request = self.request(options(), ranks=int(topology.world_size))
        key = self._key(request.shards)
        limit_s = check_patience(request, pg)
        if not locked.enter_context(cache.lock(key, limit_s)):
            end = time.monotonic() + limit_s
            while cache.is_locked(key) and time.monotonic() < end:
                time.sleep(_POLL_S)
            if self._find(options):
                return None
            raise RankFailureError(
                "another job measured this device at the same time, in vain"
            )
        # Another job may have been through since.
        if self._find(options):
            return None
        return Offer(request, find_address(topology), free_port())

    def _is_shipped(self) -> bool:
        """Whether a shipped bundle was measured on this very device."""
        return not isinstance(self._alone(), PhysicalCostModel)

    def _alone(self) -> CostModel:
        """Costs of kernels that run by themselves, as they are measured."""
        model = self._costs.cost_model
        return model.alone if isinstance(model, ConcurrentCostModel) else model

    def _find(self, options: Options) -> bool:
        """Use a bundle of the cache, if one serves these tables here."""
        if not cache.entries():
            return False
        entry = cache.find(self._key(self._shards(options())[0]))
        if entry is None:
            return False
        self._costs.use(entry.folder)
        self._is_through = True
        return True

    def _key(self, shards: Sequence[TableConfig]) -> CacheKey:
        topology = self._costs.topology
        device = current_device_name(topology.compute_device)
        if device is None:
            raise ConfigError(f"there is no {topology.compute_device} device here")
        world_size = int(topology.world_size)
        return CacheKey.here(
            device=device,
            device_type=topology.compute_device,
            world_size=world_size,
            local_world_size=whole_nodes(world_size, topology.local_world_size),
            optimizers=tuple(t.optimizer for t in shards),
            data_types=tuple(t.data_type for t in shards),
        )

    def _shards(
        self, options: Sequence[ShardingOption]
    ) -> tuple[list[TableConfig], list[int], list[int]]:
        """What the search may put on a rank: shards, their kernels, their tables."""
        topology, reader = self._costs.topology, self._costs.reader
        batch = int(options[0].batch_size) * int(topology.world_size) if options else 0
        on_cpu = topology.compute_device == "cpu"
        kernels: dict[tuple[object, ...], int] = {}
        names: dict[str, int] = {}
        found: dict[TableConfig, tuple[int, int]] = {}
        for option in options:
            if is_dense(option) or not is_placeable(option, reader):
                continue
            table = reader.table(option)
            if not is_measurable(table, on_cpu):
                continue
            rows = int(sample_shards(option)[0].size[0])
            whole = rows >= table.num_embeddings
            part = row_shard(table, rows, batch, pooled=is_pooled(option))
            key = (option.path, whole, table.optimizer, table.data_type, table.weighted)
            place = (
                kernels.setdefault(key, len(kernels)),
                names.setdefault(table_name(option), len(names)),
            )
            own = int(sample_shards(option)[0].size[1])
            widest = part.embedding_dim if whole else own
            narrowest = narrowest_shard(option, reader)
            for parts in range(1, _MOST_PARTS + 1):
                width = widest // parts // COLUMN_MULTIPLE * COLUMN_MULTIPLE
                if width >= narrowest:
                    found.setdefault(part.with_width(width), place)
        places = list(found.values())
        return list(found), [k for k, _ in places], [t for _, t in places]

    def request(self, options: Sequence[ShardingOption], ranks: int) -> LaunchRequest:
        """Say what is to be measured.

        Args:
            options: All of the model's.
            ranks: That measure.

        Raises:
            ConfigError: No table runs a kernel that can be measured.
        """
        from torchrec_neuroshard.training.first_launch import LaunchRequest

        topology = self._costs.topology
        shards, kernels, tables = self._shards(options)
        if not shards:
            raise ConfigError("no table runs a kernel that can be measured")
        return LaunchRequest(
            shards=tuple(shards),
            kernels=tuple(kernels),
            tables=tuple(tables),
            batch_size=int(options[0].batch_size) * int(topology.world_size),
            device_type=topology.compute_device,
            world_size=ranks,
            local_world_size=whole_nodes(ranks, topology.local_world_size),
            seconds=self.seconds,
            grace_seconds=GRACE_S,
            hbm_gb_per_s=topology.hbm_mem_bw * GB_PER_S,
        )

    def _measure(self, offer: Offer, stores: bool) -> None:
        """Measure with the others as rank 0; use what comes of it, and keep it."""
        from torchrec_neuroshard.training.first_launch import Member, judge, take_part

        request = offer.request
        member = Member(rank=0, address=offer.address, port=offer.port)
        begin = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="neuroshard-") as scratch:
            bundle = take_part(request, member, Path(scratch))
            assert bundle is not None, "rank 0 gets one"
            verdict = judge(bundle, self._alone())
            is_sound = verdict is None or verdict.is_sound
            if stores and is_sound:
                bundle = self._kept(bundle, request, time.monotonic() - begin)
            if verdict is None or not verdict.is_worse:
                self._costs.use(bundle)
            if not is_sound:
                self._tell(
                    f"what the first launch measured is not kept: {verdict}. Costs are "
                    f"'{self._costs.cost_model.source}', and the next launch measures "
                    "again; calibrate='never' does not"
                )

    def _kept(self, bundle: Path, request: LaunchRequest, seconds: float) -> Path:
        """Store a bundle; where that cannot be, go on with it for this launch."""
        try:
            key = self._key(request.shards)
            return cache.store(bundle, key, created=utc_now(), seconds=seconds)
        except OSError as error:
            self._tell(
                f"what was measured could not be kept ({error}); NEUROSHARD_CACHE "
                "names another folder"
            )
            return bundle

    def _warn(self, reason: str) -> None:
        self._tell(
            f"measuring at the first launch failed ({reason}): costs are "
            f"'{self._costs.cost_model.source}'. calibrate='never' plans without, "
            "'neuroshard calibrate' measures beforehand"
        )

    def _tell(self, text: str) -> None:
        """Warn, and in every plan's result, too."""
        warnings.warn(text, stacklevel=4)
        self._costs.notes += (Note("first-launch", text),)


def check_patience(request: LaunchRequest, pg: dist.ProcessGroup) -> float:
    """Return what measuring takes at most [s], if the others wait so long.

    Raises:
        ConfigError: They do not.
    """
    limit_s = 2 * request.seconds + request.grace_seconds
    timeout_s = group_timeout_seconds(pg)
    if pg.size() > 1 and limit_s > _PATIENCE_SHARE * timeout_s:
        raise ConfigError(
            f"it may take {limit_s:.0f} s, and the ranks of the process group wait "
            f"{timeout_s:.0f} s for each other, planning included; give "
            f"init_process_group a timeout of {limit_s / _PATIENCE_SHARE:.0f} s"
        )
    return limit_s


def help_measure(offer: Offer, rank: int) -> str | None:
    """Measure with the first rank, on another one; return what failed, if it did."""
    from torchrec_neuroshard.training.first_launch import Member, take_part

    member = Member(rank=rank, address=offer.address, port=offer.port)
    try:
        with tempfile.TemporaryDirectory(prefix="neuroshard-") as scratch:
            take_part(offer.request, member, Path(scratch))
    except Exception as error:
        return f"measuring failed on rank {rank} ({error_text(error)})"
    return None


def error_text(error: Exception) -> str:
    """Say in a line what went wrong."""
    kind = "" if isinstance(error, NeuroShardError) else f"{type(error).__name__}: "
    return kind + (str(error).strip() or repr(error)).splitlines()[0]


def is_measurable(table: TableConfig, on_cpu: bool) -> bool:
    """Whether fused kernels over a table can be measured."""
    runs = not (on_cpu and table.optimizer == "adam")
    return runs and table.data_type in _MEASURED_TYPES


def find_address(topology: Topology) -> str:
    """Where the ranks find the first one's process."""
    if int(topology.local_world_size) >= int(topology.world_size):
        return "127.0.0.1"
    return os.environ.get("MASTER_ADDR") or socket.gethostname()


def free_port() -> int:
    """Return a port that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
