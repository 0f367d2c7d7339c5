"""When a planner measures: a first launch calibrates, later launches reuse the bundle.

`bundles.measure_job` does the measuring. This module decides when to measure, collects
the shards that the search may place on a rank, and keeps failures away from the job.
The first rank decides alone, and `exchange.first_decides` tells the other ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import socket
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch.distributed as dist
from torchrec.distributed.planner.types import ShardingOption, Topology

from torchrec_neuroshard.bundles import cache
from torchrec_neuroshard.bundles.cache import CacheKey
from torchrec_neuroshard.errors import (
    ConfigError,
    NeuroShardError,
    RankFailureError,
    is_number,
)
from torchrec_neuroshard.exchange import (
    ExchangeError,
    first_decides,
    group_timeout_seconds,
)
from torchrec_neuroshard.hardware.device_types import is_accelerator
from torchrec_neuroshard.hardware.devices import current_device_name
from torchrec_neuroshard.measure.ranks import served_store
from torchrec_neuroshard.measure.records import utc_now
from torchrec_neuroshard.models.adjusted import ConcurrentCostModel
from torchrec_neuroshard.models.base import CostModel
from torchrec_neuroshard.models.compute import NeuralCostModel, PhysicalCostModel
from torchrec_neuroshard.notes import Note
from torchrec_neuroshard.planner.groups import whole_nodes
from torchrec_neuroshard.planner.option_facts import is_dense, table_name
from torchrec_neuroshard.planner.plan_costs import PlanCosts
from torchrec_neuroshard.planner.spread_options import sample_shards
from torchrec_neuroshard.planner.ways import is_placeable, narrowest_shard
from torchrec_neuroshard.tables.features import FEATURE_NAMES, table_features
from torchrec_neuroshard.tables.table import (
    COLUMN_MULTIPLE,
    MEASURED_TYPES,
    TableConfig,
    row_shard,
)

if TYPE_CHECKING:  # it loads FBGEMM, which only measuring needs
    from torchrec_neuroshard.bundles.measure_job import LaunchRequest, Member

_USUAL_SECONDS = 60.0
"""Default time budget."""
_MOST_PARTS = 4
"""A table is measured whole, in halves, and so on, up to this many column parts."""
GRACE_S = 60.0
"""Measuring processes are stopped this long after twice the budget. Starting processes
takes long on a busy machine."""
_MOST_COMPARED = 500
"""Shards of a model that are compared with a bundle's."""
_AGAIN = (
    f"Launches measure again after {cache.REJECTED_DAYS} days, after 'neuroshard cache "
    "clear', or with a number such as calibrate=60; best on a quiet machine"
)
_PATIENCE_SHARE = 0.5
"""Most time for measuring, as a share of the group's timeout. Planning comes after."""


class Offer(NamedTuple):
    """What all ranks measure for rank 0, and where they meet."""

    request: LaunchRequest
    first: Member
    """Rank 0."""


Options = Callable[[], Sequence[ShardingOption]]


class FirstLaunch:
    """Finds measured costs for a planner, or lets its ranks measure them.

    Attributes:
        seconds: The time budget; 0 turns measuring off.
    """

    def __init__(
        self,
        costs: PlanCosts,
        cost_model: str | Path | CostModel,
        calibrate: str | float,
    ) -> None:
        """Take the planner's settings.

        Args:
            costs: Switches to the measured models.
            cost_model: The planner's `cost_model`.
            calibrate: "auto", "never" or seconds.

        Raises:
            ConfigError: `calibrate` is something else, or contradicts `cost_model`.
        """
        self._costs = costs
        name = None if isinstance(cost_model, CostModel) else str(cost_model)
        self._must = name == "measure"
        on_gpu = is_accelerator(costs.topology.compute_device)
        usual = _USUAL_SECONDS if on_gpu or self._must else 0.0
        seconds: Any = {"auto": usual, "never": 0.0}.get(str(calibrate), calibrate)
        if not is_number(seconds) or not seconds >= 0:
            raise ConfigError(
                "calibrate must be 'auto', 'never' or a number of seconds, got "
                f"{calibrate!r}"
            )
        if not isinstance(calibrate, str) and name not in ("auto", "measure"):
            raise ConfigError(
                f"calibrate={calibrate:g} needs cost_model 'auto' or 'measure', got "
                f"{cost_model!r}; leave one of them out"
            )
        self.seconds = float(seconds)
        self._insists = self._must or not isinstance(calibrate, str)
        """Whether to measure again where an earlier measurement was rejected."""
        self._is_done = not self._must and (name != "auto" or calibrate == "never")

    def on_one_rank(self, options: Options) -> None:
        """Use measured costs from the cache; called before `plan`.

        With `cost_model="measure"`, measure here if the cache has none.
        """
        if self._is_done or not (self._must or cache.entries()):
            return
        options = functools.cache(options)
        try:
            self._is_done = self._device() is None  # it never will be here
            if self._is_done and not self._must:
                return
            if self._find(options) or not self._must:
                return
            self._is_done = True
            if not self.seconds:
                raise ConfigError(
                    "calibrate='never' forbids measuring, and the cache has no bundle"
                )
            from torchrec_neuroshard.bundles.measure_job import Member

            alone = Offer(self.request(options(), ranks=1), Member(rank=0))
            topology = self._costs.topology
            self._measure(alone, stores=int(topology.world_size) == 1)
        except Exception as error:
            self._warn(error)

    def on_all_ranks(self, options: Options, pg: dist.ProcessGroup) -> None:
        """Let all ranks measure if costs are unknown; called before `collective_plan`.

        The first rank calls this and decides. The others wait and `help_measure`.

        Raises:
            ExchangeError: A rank could not be told. No other error is raised.
        """
        if self._is_done or not self.seconds:
            return
        topology, options = self._costs.topology, functools.cache(options)
        try:
            if pg.size() != int(topology.world_size) or self._device() is None:
                return
            with contextlib.ExitStack() as locked:
                request = self._wanted(options, pg, locked)
                if request is not None:
                    first = locked.enter_context(meeting_place(topology))
                    offer = Offer(request, first)
                    first_decides(lambda: offer, pg, "looked for measured costs")
                    self._measure(offer, stores=True)
        except ExchangeError:
            raise
        except Exception as error:
            self._warn(error)
        self._is_done = True

    def _wanted(
        self, options: Options, pg: dist.ProcessGroup, locked: contextlib.ExitStack
    ) -> LaunchRequest | None:
        """Return what to measure; None: costs are known and in use.

        If another job is measuring the same, wait for its result.

        Args:
            options: Returns the model's options.
            pg: The ranks.
            locked: Holds the lock that keeps other jobs from measuring.

        Raises:
            ConfigError: The group's timeout is too short to measure.
            RankFailureError: The other job takes too long.
        """
        is_estimated = isinstance(self._alone(), PhysicalCostModel)
        if self._find(options) or not (self._must or is_estimated):
            return None
        if self._was_rejected(options):
            return None
        request = self.request(options(), ranks=pg.size())
        limit_s = request.limit_seconds
        timeout_s = group_timeout_seconds(pg)
        if pg.size() > 1 and limit_s > _PATIENCE_SHARE * timeout_s:
            raise ConfigError(
                f"it may take {limit_s:.0f} s, but the process group's timeout of "
                f"{timeout_s:.0f} s must also cover planning; pass init_process_group "
                f"a timeout of {limit_s / _PATIENCE_SHARE:.0f} s"
            )
        try:
            locked.enter_context(cache.lock(self._key(), limit_s))
        except TimeoutError:
            raise RankFailureError(
                f"another job has been measuring this device for {limit_s:.0f} s "
                "without a result"
            ) from None
        if self._find(options) or self._was_rejected(options):
            return None
        return request

    def _alone(self) -> CostModel:
        """Return the cost model of kernels that run alone, as they are measured."""
        model = self._costs.cost_model
        return model.alone if isinstance(model, ConcurrentCostModel) else model

    def _find(self, options: Options) -> bool:
        """Use a bundle from the cache if one fits these tables and this device."""
        if cache.find(self._key()) is None:  # none for this device
            return False
        entry = cache.find(*self._wanted_costs(options()))
        if entry is None:
            return False
        self._use(entry.folder, entry.key)
        self._is_done = True
        return True

    def _use(self, bundle: Path, key: CacheKey) -> None:
        """Use a bundle; tables unlike those that it measured get notes."""
        self._costs.use(bundle)
        if isinstance(model := self._alone(), NeuralCostModel):
            model.ranges |= key.ranges

    def _was_rejected(self, options: Options) -> bool:
        """Whether an earlier launch measured this in vain; tell why."""
        if self._insists or not cache.rejections():
            return False
        entry = cache.find_rejection(*self._wanted_costs(options()))
        if entry is None:
            return False
        self._tell(
            f"an earlier launch measured for {entry.seconds:.0f} s on {entry.created}, "
            f"and its result was not kept: {entry.reason}. Costs are "
            f"'{self._costs.cost_model.source}'. {_AGAIN}"
        )
        return True

    def _wanted_costs(
        self, options: Sequence[ShardingOption]
    ) -> tuple[CacheKey, npt.NDArray[np.float32]]:
        """Return the key of a model's costs, and features of some of its shards."""
        shards = list(self._shards(options))
        some = shards[:: -(-len(shards) // _MOST_COMPARED) or 1]
        if not some:
            return self._key(), np.zeros((0, len(FEATURE_NAMES)), np.float32)
        return self._key(shards), table_features(some, self._batch_size(options))

    def _batch_size(self, options: Sequence[ShardingOption]) -> int:
        """Return the samples that a kernel sees."""
        return int(options[0].batch_size) * int(self._costs.topology.world_size)

    def _device(self) -> str | None:
        """Return the name of this machine's device; None if it has none."""
        return current_device_name(self._costs.topology.compute_device)

    def _key(
        self,
        shards: Sequence[TableConfig] = (),
        ranges: Mapping[str, tuple[float, float]] | None = None,
    ) -> CacheKey:
        topology, device = self._costs.topology, self._device()
        if device is None:
            raise ConfigError(f"this machine has no {topology.compute_device} device")
        world_size = int(topology.world_size)
        return CacheKey(
            device=device,
            device_type=topology.compute_device,
            world_size=world_size,
            local_world_size=whole_nodes(world_size, topology.local_world_size),
            optimizers=tuple(sorted({t.optimizer for t in shards})),
            data_types=tuple(sorted({t.data_type for t in shards})),
            ranges=ranges or {},
        )

    def _shards(
        self, options: Sequence[ShardingOption]
    ) -> dict[TableConfig, tuple[int, int, bool]]:
        """Return the shards that the search may place.

        Returns:
            Shard -> numbers of its kernel and table, and whether it has all rows.
        """
        topology, reader = self._costs.topology, self._costs.reader
        kernels: dict[tuple[object, ...], int] = {}
        tables: dict[str, int] = {}
        found: dict[TableConfig, tuple[int, int, bool]] = {}
        for option in options:
            if is_dense(option) or not is_placeable(option, reader):
                continue
            table = reader.table(option)
            on_cpu = topology.compute_device == "cpu"
            if table.data_type not in MEASURED_TYPES or (
                on_cpu and table.optimizer == "adam"
            ):
                continue
            rows, columns = (int(n) for n in sample_shards(option)[0].size)
            is_whole = rows >= table.num_embeddings
            batch = int(option.batch_size) * int(topology.world_size)
            part = row_shard(table, rows, batch)
            kernel = option.path, is_whole, table.optimizer, table.data_type
            number = tables.setdefault(table_name(option), len(tables))
            widest = part.embedding_dim if is_whole else columns
            for parts in range(1, _MOST_PARTS + 1):
                width = widest // parts // COLUMN_MULTIPLE * COLUMN_MULTIPLE
                if width < narrowest_shard(option, reader):
                    continue
                # Rows that are not pooled have one width per kernel.
                own = (*kernel, table.weighted, table.pooled or width)
                place = kernels.setdefault(own, len(kernels)), number, is_whole
                found.setdefault(part.with_width(width), place)
        return found

    def request(self, options: Sequence[ShardingOption], ranks: int) -> LaunchRequest:
        """Return what to measure.

        Args:
            options: All options of the model.
            ranks: Number of ranks that measure.

        Raises:
            ConfigError: No table has a kernel that can be measured.
        """
        from torchrec_neuroshard.bundles.measure_job import LaunchRequest

        topology = self._costs.topology
        shards = self._shards(options)
        if not shards:
            raise ConfigError("no table has a kernel that can be measured")
        kernels, tables, are_whole = zip(*shards.values(), strict=True)
        by_rows = {k for k, whole in zip(kernels, are_whole, strict=True) if not whole}
        return LaunchRequest(
            shards=tuple(shards),
            kernels=kernels,
            tables=tables,
            row_kernels=tuple(sorted(by_rows)),
            plan_ranks=int(topology.world_size),
            batch_size=self._batch_size(options),
            device_type=topology.compute_device,
            world_size=ranks,
            local_world_size=whole_nodes(ranks, topology.local_world_size),
            seconds=self.seconds,
            grace_seconds=GRACE_S,
        )

    def _measure(self, offer: Offer, *, stores: bool) -> None:
        """Measure as rank 0 together with the other ranks; use the bundle.

        Args:
            offer: What to measure.
            stores: Whether the cache keeps the bundle, or else the reason why not.
        """
        from torchrec_neuroshard.bundles.measure_job import judge, take_part

        begin, request = time.monotonic(), offer.request
        ranges = cache.compared_ranges(
            table_features(request.shards, request.batch_size)
        )
        key = self._key(request.shards, ranges)

        def facts() -> dict[str, Any]:
            return {"created": utc_now(), "seconds": time.monotonic() - begin}

        def reject(reason: str) -> None:
            if stores:
                with contextlib.suppress(OSError):
                    cache.reject(key, reason=reason, **facts())

        with tempfile.TemporaryDirectory(prefix="neuroshard-") as scratch:
            try:
                bundle = take_part(*offer, Path(scratch))
                assert bundle is not None, "rank 0 gets one"
                verdict = judge(bundle, self._alone())
            except Exception as error:
                reject(_text_of(error))
                raise
            is_sound = verdict is None or verdict.is_sound
            trouble = ""
            if not is_sound:
                reject(str(verdict))
                again = "The next launch measures again" if self._insists else _AGAIN
                trouble = f"is not stored: {verdict}. {again}"
            elif not stores:
                trouble = (
                    "is not stored: plan() measures on one rank alone. "
                    "collective_plan() measures on all ranks and stores the result"
                )
            else:
                try:
                    bundle = cache.store(bundle, key, **facts())
                except OSError as error:
                    trouble = (
                        f"could not be stored ({error}); set NEUROSHARD_CACHE to "
                        "another folder"
                    )
            if verdict is None or not verdict.is_worse:
                self._use(bundle, key)
            if trouble:
                self._tell(
                    f"the bundle measured at the first launch {trouble}. Costs are "
                    f"'{self._costs.cost_model.source}'"
                )

    def _warn(self, error: Exception) -> None:
        self._tell(
            f"measuring at the first launch failed ({_text_of(error)}): costs are "
            f"'{self._costs.cost_model.source}'. Pass calibrate='never' to plan "
            "without, or measure beforehand with 'neuroshard calibrate'"
        )

    def _tell(self, text: str) -> None:
        """Warn, and add the text to the notes of every plan."""
        warnings.warn(text, stacklevel=4)
        self._costs.notes += (Note("first-launch", text),)


def help_measure(offer: Offer, rank: int) -> str | None:
    """Measure on another rank than the first; return what failed, or None."""
    from torchrec_neuroshard.bundles.measure_job import take_part

    try:
        with tempfile.TemporaryDirectory(prefix="neuroshard-") as scratch:
            member = dataclasses.replace(offer.first, rank=rank)
            take_part(offer.request, member, Path(scratch))
    except Exception as error:
        return f"measuring failed on rank {rank} ({_text_of(error)})"
    return None


def _text_of(error: Exception) -> str:
    """Return the error as one line of text."""
    kind = "" if isinstance(error, NeuroShardError) else f"{type(error).__name__}: "
    return kind + (str(error).strip() or repr(error)).splitlines()[0]


@contextlib.contextmanager
def meeting_place(topology: Topology) -> Iterator[Member]:
    """Serve a store in which the ranks that measure meet; yield rank 0."""
    from torchrec_neuroshard.bundles.measure_job import Member

    address = "127.0.0.1"
    if int(topology.local_world_size) < int(topology.world_size):
        address = os.environ.get("MASTER_ADDR") or socket.gethostname()
    with served_store(address) as port:
        yield Member(rank=0, address=address, port=port)
