"""Train TorchRec's DLRM under two plans of the same tables and compare them.

    torchrun --standalone --nproc-per-node 2 examples/train_dlrm.py
    torchrun --nproc-per-node 8 examples/train_dlrm.py --max-rows 40000000 \\
        --batch-size 8192                                    # eight GPUs, NCCL

The tables are MLPerf DLRM-v2's, with rows capped at --max-rows and multi-hot counts
kept. The stock `EmbeddingShardingPlanner` and `NeuroShardPlanner` get the same
topology, batch size, constraints and pooling factors. Both models start from the same
weights and see the same batches, block by block in alternation (A B, B A, A B, ...), so
that a machine whose speed drifts is fair to both. examples/README.md says what is
measured, and how.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import math
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torchrec
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import (
    EmbeddingBagCollectionSharder,
    ShardedEmbeddingBagCollection,
)
from torchrec.distributed.planner import (
    EmbeddingShardingPlanner,
    ParameterConstraints,
    Topology,
)
from torchrec.distributed.planner.storage_reservations import (
    FixedPercentageStorageReservation,
)
from torchrec.distributed.planner.types import PlannerError
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ShardingPlan
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_neuroshard import (
    FeatureProfile,
    NeuroShardPlanner,
    TableConfig,
    load_cost_model,
    profile_inputs,
)
from torchrec_neuroshard.collect.tbe import fbgemm_version
from torchrec_neuroshard.collect.timing import Reference, keep_freed_memory
from torchrec_neuroshard.cost_models import (
    BandwidthCommsModel,
    CommsModel,
    ConcurrentCostModel,
    load_comms_model,
)
from torchrec_neuroshard.devices import current_device_name
from torchrec_neuroshard.errors import NeuroShardError
from torchrec_neuroshard.placement import ShardingTask
from torchrec_neuroshard.planner import placement_from_plan
from torchrec_neuroshard.simulator import PredictedCosts, Simulator
from torchrec_neuroshard.workloads.inputs import draw_batch
from torchrec_neuroshard.workloads.mlperf import mlperf_dlrm_v2

SCHEMA_VERSION = 1
NUM_DENSE_FEATURES = 13
"""Of the Criteo data that MLPerf DLRM-v2 is trained on."""
STOCK, OURS = "torchrec", "neuroshard"
REFERENCE_PASSES = 5
INIT_CHUNK_ROWS = 65_536


class DemoError(Exception):
    """The demo cannot run as asked; the message says what to change."""


def option(default: Any, text: str) -> Any:
    """Return a dataclass field that is also a command-line option."""
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoConfig:
    """What to train and how long; each field is an option of the same name."""

    device: str = option("auto", "cpu, cuda, or auto: cuda where every rank has a GPU")
    cost_model: str = option("auto", "auto, cpu, h200, or the folder of a bundle")
    max_rows: int = option(100_000, "most rows of a table; the published most is 40 M")
    embedding_dim: int = option(
        128, "columns of every table; 128 is the published width"
    )
    batch_size: int = option(1_024, "samples per rank")
    bottom_layers: str = option("256", "dense layers below the interaction")
    top_layers: str = option("256,128", "dense layers above the interaction")
    min_partition: int = option(32, "narrowest column shard, for both planners")
    pairs: int = option(10, "pairs of blocks, one block per planner")
    block_iterations: int = option(8, "iterations per block; the first is not timed")
    profile_rounds: int = option(1, "global batches' worth of input that is profiled")
    embedding_lr: float = option(0.01, "learning rate of the tables (row-wise Adagrad)")
    dense_lr: float = option(0.005, "learning rate of the dense layers (Adam)")
    all_to_all_gb_per_s: float = option(
        0.0, "bandwidth to plan with; 0 measures it, or takes measured collectives"
    )
    seed: int = option(0, "makes weights, ids and clicks")
    output: str = option("demo.json", "where the results are written")

    def __post_init__(self) -> None:
        if self.device not in ("auto", "cpu", "cuda"):
            raise DemoError(f"--device is auto, cpu or cuda, not '{self.device}'")
        if not self.all_to_all_gb_per_s >= 0:
            raise DemoError(
                "--all-to-all-gb-per-s must be at least 0, got "
                f"{self.all_to_all_gb_per_s}"
            )
        for name in ("max_rows", "batch_size", "pairs", "profile_rounds"):
            if getattr(self, name) < 1:
                raise DemoError(
                    f"--{name.replace('_', '-')} must be at least 1, got "
                    f"{getattr(self, name)}"
                )
        for name in ("bottom_layers", "top_layers"):
            text = getattr(self, name)
            if not all(part.strip().isdigit() for part in text.split(",") if part):
                raise DemoError(
                    f"--{name.replace('_', '-')} is a list of sizes such as 256,128, "
                    f"not '{text}'"
                )
        if self.block_iterations < 2:
            raise DemoError(
                "--block-iterations must be at least 2 (the first is not timed), got "
                f"{self.block_iterations}"
            )
        if self.embedding_dim < 4 or self.embedding_dim % 4:
            raise DemoError(
                "--embedding-dim must be a multiple of 4, as fused kernels need, got "
                f"{self.embedding_dim}"
            )

    @classmethod
    def from_arguments(cls, arguments: Sequence[str] | None) -> DemoConfig:
        """Read the command line."""
        parser = argparse.ArgumentParser(
            description=(__doc__ or "").splitlines()[0],
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        )
        for f in dataclasses.fields(cls):
            parser.add_argument(
                "--" + f.name.replace("_", "-"),
                type=type(f.default),
                default=f.default,
                help=f.metadata["help"],
            )
        return cls(**vars(parser.parse_args(arguments)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranks:
    """This process among the others."""

    rank: int
    world_size: int
    local_world_size: int
    device: torch.device
    backend: str

    @property
    def on_gpu(self) -> bool:
        """Whether the kernels run on a GPU."""
        return self.device.type == "cuda"

    def synchronize(self) -> None:
        """Wait for this rank's device."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value, in order of rank."""
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values


def join_ranks(config: DemoConfig) -> Ranks:
    """Start the process group that fits the machine.

    Raises:
        DemoError: Not started by torchrun, or fewer GPUs than ranks.
    """
    missing = [n for n in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if n not in os.environ]
    if missing:
        raise DemoError(
            f"{', '.join(missing)} not set; start the ranks with 'torchrun "
            f"--standalone --nproc-per-node 2 {sys.argv[0]}'"
        )
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_rank = int(os.environ["LOCAL_RANK"])
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    kind = config.device
    if kind == "auto":
        kind = "cuda" if num_gpus >= local_world_size else "cpu"
    if kind == "cuda" and num_gpus < local_world_size:
        raise DemoError(
            f"{local_world_size} ranks on this machine need as many GPUs, it has "
            f"{num_gpus}; lower --nproc-per-node or use --device cpu"
        )
    if kind == "cuda" and not dist.is_nccl_available():
        raise DemoError(
            "this torch has no NCCL; install its CUDA build or --device cpu"
        )
    device = torch.device(kind, local_rank) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)  # one core per rank, which is what the model predicts
        keep_freed_memory()
    backend = "nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(backend)
    return Ranks(
        rank=rank,
        world_size=world_size,
        local_world_size=local_world_size,
        device=device,
        backend=backend,
    )


def check_memory(
    config: DemoConfig, ranks: Ranks, tables: Sequence[TableConfig]
) -> int:
    """Return the bytes that each rank may fill with shards.

    Raises:
        DemoError: Both models' tables do not fit in the memory that is free.
    """
    if ranks.on_gpu:
        free = torch.cuda.mem_get_info(ranks.device)[0]
    else:
        free = available_cpu_bytes() // ranks.local_world_size
    free = min(ranks.gather(free))
    need = 2 * sum(t.weight_bytes for t in tables) // ranks.world_size
    if need > 0.8 * free:
        raise DemoError(
            f"two models' tables need {need / 2**30:.1f} GiB per rank, the tightest "
            f"rank has {free / 2**30:.1f} GiB free; lower --max-rows "
            f"({config.max_rows}) or --embedding-dim ({config.embedding_dim})"
        )
    return free // 2


def available_cpu_bytes() -> int:
    """Memory that can be had without swapping; 16 GiB where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 16 * 2**30
    fields = dict(line.split(":", 1) for line in lines)
    return int(fields["MemAvailable"].split()[0]) * 1024


class ClickStream:
    """Batches whose clicks can be learnt: dense features and ids both have a say.

    A click's log-odds is a fixed linear function of the dense features plus, per
    feature, the sum of its ids' hidden scores over the root of their number.
    """

    def __init__(
        self, tables: Sequence[TableConfig], config: DemoConfig, ranks: Ranks
    ) -> None:
        self._tables, self._ranks = list(tables), ranks
        self._batch_size, self._seed = config.batch_size, config.seed
        rng = np.random.default_rng([config.seed, 1])
        direction = rng.normal(size=NUM_DENSE_FEATURES)
        self._direction = direction / np.linalg.norm(direction)

    def batch(self, number: int) -> Batch:
        """Return this rank's batch of an iteration, the same whenever asked."""
        state = np.random.SeedSequence([self._seed, self._ranks.rank, number])
        seed = int(state.generate_state(1)[0])
        rng = np.random.default_rng(seed)
        drawn = draw_batch(self._tables, self._batch_size, seed)
        dense = rng.normal(size=(self._batch_size, NUM_DENSE_FEATURES))
        log_odds = 1.5 * dense @ self._direction
        values, lengths = [], []
        for i, table in enumerate(self._tables):
            ids, bags = (np.asarray(part) for part in drawn[table.name])
            log_odds += self._scores(i, ids, bags)
            values.append(torch.from_numpy(ids))
            lengths.append(torch.from_numpy(bags))
        clicks = rng.random(self._batch_size) < 1 / (1 + np.exp(-log_odds))
        batch = Batch(
            dense_features=torch.from_numpy(dense.astype(np.float32)),
            sparse_features=KeyedJaggedTensor(
                keys=[t.name for t in self._tables],
                values=torch.cat(values),
                lengths=torch.cat(lengths),
            ),
            labels=torch.from_numpy(clicks.astype(np.int32)),
        )
        return batch.to(self._ranks.device)

    def _scores(self, feature: int, ids: np.ndarray, bags: np.ndarray) -> np.ndarray:
        hashed = (ids.astype(np.int64) * 2_654_435_761 + feature * 40_503) >> 7
        hidden = (hashed & 0xFFFF) / 0xFFFF * 2 - 1
        sample = np.repeat(np.arange(self._batch_size), bags)
        total = np.bincount(sample, weights=hidden, minlength=self._batch_size)
        share = np.sqrt(np.maximum(bags, 1) * len(self._tables))
        return np.asarray(3.0 * total / share)


def gather_profiles(
    profiles: dict[str, FeatureProfile], ranks: Ranks
) -> dict[str, FeatureProfile]:
    """Average the profiles that the ranks made of their own batches.

    Ids that two ranks both met cannot be told apart in histograms, so nothing is added
    up: each rank profiles as many samples as one iteration reads over all ranks, and
    the mean is the same profile with less noise.
    """
    merged = {}
    everyone = ranks.gather(profiles)
    for name, own in profiles.items():
        same = [p[name] for p in everyone]
        histograms = np.array([p.access_histogram for p in same])
        merged[name] = dataclasses.replace(
            own,
            num_lookups=float(np.mean([p.num_lookups for p in same])),
            pooling_std=float(np.sqrt(np.mean([p.pooling_std**2 for p in same]))),
            access_histogram=tuple(float(v) for v in histograms.mean(axis=0)),
        )
    return merged


def build_model(
    tables: Sequence[TableConfig], config: DemoConfig, device: torch.device
) -> DLRMTrain:
    """Build the model; its tables hold no memory until they are sharded."""
    torch.manual_seed(config.seed)
    embeddings = EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=t.name,
                embedding_dim=t.embedding_dim,
                num_embeddings=t.num_embeddings,
                feature_names=[t.name],
            )
            for t in tables
        ],
        device=torch.device("meta"),
    )
    apply_optimizer_in_backward(
        RowWiseAdagrad, embeddings.parameters(), {"lr": config.embedding_lr}
    )
    return DLRMTrain(
        DLRM(
            embedding_bag_collection=embeddings,
            dense_in_features=NUM_DENSE_FEATURES,
            dense_arch_layer_sizes=[
                *_sizes(config.bottom_layers),
                config.embedding_dim,
            ],
            over_arch_layer_sizes=[*_sizes(config.top_layers), 1],
            dense_device=device,
        )
    )


def _sizes(text: str) -> list[int]:
    return [int(size) for size in text.split(",") if size]


def measure_all_to_all(
    tables: Sequence[TableConfig], config: DemoConfig, ranks: Ranks
) -> float:
    """Bandwidth of the pooled outputs' all-to-all [bytes/ms], the slowest rank's.

    Bytes that stay on a rank are not counted, but where there is one rank alone.
    """
    columns = sum(t.embedding_dim for t in tables)
    part = config.batch_size * columns // ranks.world_size
    sent = torch.zeros(part * ranks.world_size, device=ranks.device)
    received = torch.empty_like(sent)

    def once() -> None:
        dist.all_to_all_single(received, sent)

    once_ms = median_step_ms(once, ranks)
    counted_bytes = 4 * part * max(1, ranks.world_size - 1)
    return counted_bytes / once_ms


def find_comms_model(
    config: DemoConfig, ranks: Ranks, bytes_per_ms: float
) -> CommsModel:
    """Return the bundle's measured collectives, or what one bandwidth says."""
    if not config.all_to_all_gb_per_s:
        known = load_comms_model(
            config.cost_model,
            device_type=ranks.device.type,
            world_size=ranks.world_size,
            local_world_size=ranks.local_world_size,
        )
        if known is not None:
            return known
    return BandwidthCommsModel(
        world_size=ranks.world_size,
        local_world_size=ranks.local_world_size,
        intra_gb_per_s=bytes_per_ms / 1e6,
        inter_gb_per_s=bytes_per_ms / 1e6,
        source="given" if config.all_to_all_gb_per_s else "measured at the start",
    )


def measure_memory(ranks: Ranks) -> float:
    """Bandwidth of a GPU's memory by a large copy [bytes/ms], the slowest rank's."""
    source = torch.zeros(2**28, device=ranks.device)
    target = torch.empty_like(source)

    def once() -> None:
        target.copy_(source)

    return 2 * 4 * source.numel() / median_step_ms(once, ranks)


def median_step_ms(step: Callable[[], None], ranks: Ranks, repeats: int = 7) -> float:
    """Median time of a step that all ranks do together [ms], the slowest rank's."""
    times = []
    for _ in range(repeats + 2):
        dist.barrier()
        ranks.synchronize()
        start = time.perf_counter()
        step()
        ranks.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    return max(ranks.gather(statistics.median(times[2:])))


class DenseOnly(nn.Module):
    """The model without its tables, to time what no plan changes."""

    def __init__(self, model: DLRM) -> None:
        super().__init__()
        self.bottom, self.interact = model.dense_arch, model.inter_arch
        self.top = model.over_arch

    def forward(self, dense: torch.Tensor, pooled: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        logits: torch.Tensor = self.top(self.interact(self.bottom(dense), pooled))
        return logits.squeeze(-1)


def measure_dense(
    tables: Sequence[TableConfig], config: DemoConfig, ranks: Ranks, batch: Batch
) -> float:
    """Time of a training step without the tables [ms]."""
    dense = DenseOnly(build_model(tables, config, ranks.device).model)
    ids = [ranks.device] if ranks.on_gpu else None
    model = DistributedDataParallel(dense, device_ids=ids)
    optimizer = torch.optim.Adam(model.parameters(), lr=config.dense_lr)
    pooled = torch.zeros(
        (config.batch_size, len(tables), config.embedding_dim),
        device=ranks.device,
        requires_grad=True,
    )

    def step() -> None:
        optimizer.zero_grad()
        logits = model(batch.dense_features, pooled)
        nn.functional.binary_cross_entropy_with_logits(
            logits, batch.labels.float()
        ).backward()
        optimizer.step()

    return median_step_ms(step, ranks)


class LookupTimer:
    """Times the fused kernels of a sharded model, forward and backward apart.

    Forward is the kernel module's call (bounds check of the ids included), backward the
    kernel's node of the autograd graph (gradients, and the optimizer that is fused into
    it). Collectives are in neither.
    """

    def __init__(self, model: nn.Module, ranks: Ranks) -> None:
        self._ranks = ranks
        self._marks: dict[str, list[Any]] = {"forward": [], "backward": []}
        self.num_kernels = 0
        for kernel in fused_kernels(model):
            self.num_kernels += 1
            kernel.register_forward_pre_hook(self._before_forward)
            kernel.register_forward_hook(self._after_forward)

    def take(self) -> tuple[float, float]:
        """Forward and backward since the last call [ms], summed over the kernels."""
        self._ranks.synchronize()
        sums = []
        for marks in self._marks.values():
            pairs = zip(marks[::2], marks[1::2], strict=True)
            sums.append(sum(self._elapsed_ms(a, b) for a, b in pairs))
            marks.clear()
        return sums[0], sums[1]

    def _mark(self, phase: str) -> None:
        if self._ranks.on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks[phase].append(event)
        else:
            self._marks[phase].append(time.perf_counter())

    def _elapsed_ms(self, start: Any, end: Any) -> float:
        if self._ranks.on_gpu:
            return float(start.elapsed_time(end))
        return float(end - start) * 1e3

    def _before_forward(self, kernel: nn.Module, inputs: Any) -> None:
        self._mark("forward")

    def _after_forward(self, kernel: nn.Module, inputs: Any, output: Any) -> None:
        self._mark("forward")
        node = kernel_node(output)
        node.register_prehook(lambda grads: self._mark("backward"))
        node.register_hook(lambda grads_in, grads_out: self._mark("backward"))


def kernel_node(output: torch.Tensor) -> Any:
    """The fused kernel's node in the autograd graph of its output."""
    node: Any = output.grad_fn
    while node is not None and "SplitLookup" not in node.name():
        node = node.next_functions[0][0]
    if node is None:
        raise DemoError("this fbgemm's kernels have no autograd node that is known")
    return node


def fused_kernels(model: nn.Module) -> Iterator[nn.Module]:
    """The fused embedding kernels that this rank runs."""
    for module in model.modules():
        if isinstance(module, ShardedEmbeddingBagCollection):
            for lookup in module._lookups:
                for part in lookup.modules():
                    if isinstance(part, SplitTableBatchedEmbeddingBagsCodegen):
                        yield part


def set_tables(
    model: nn.Module, tables: Sequence[TableConfig], seed: int, device: torch.device
) -> None:
    """Write initial weights that depend on table, row and column, not on the plan."""
    state = model.state_dict()
    for i, table in enumerate(tables):
        (key,) = (k for k in state if k.endswith(f"embedding_bags.{table.name}.weight"))
        shards = state[key].local_shards()
        bound = table.num_embeddings**-0.5
        for start in range(0, table.num_embeddings if shards else 0, INIT_CHUNK_ROWS):
            rows = min(INIT_CHUNK_ROWS, table.num_embeddings - start)
            generator = torch.Generator(device=device).manual_seed(
                (seed * 1_000 + i) * 1_000_000 + start // INIT_CHUNK_ROWS
            )
            values = torch.empty(rows, table.embedding_dim, device=device)
            values.uniform_(-bound, bound, generator=generator)
            for shard in shards:
                row, column = shard.metadata.shard_offsets
                height, width = shard.metadata.shard_sizes
                low, high = max(start, row), min(start + rows, row + height)
                if low < high:
                    shard.tensor[low - row : high - row].copy_(
                        values[low - start : high - start, column : column + width]
                    )


class Contestant:
    """One planner's model in training."""

    def __init__(
        self,
        plan: ShardingPlan,
        tables: Sequence[TableConfig],
        config: DemoConfig,
        ranks: Ranks,
    ) -> None:
        self._ranks = ranks
        self._model = DistributedModelParallel(
            build_model(tables, config, ranks.device),
            device=ranks.device,
            plan=plan,
            sharders=[EmbeddingBagCollectionSharder()],
        )
        set_tables(self._model, tables, config.seed, ranks.device)
        dense = dict(in_backward_optimizer_filter(self._model.named_parameters()))
        self._optimizer = torch.optim.Adam(dense.values(), lr=config.dense_lr)
        self._timer = LookupTimer(self._model, ranks)

    def step(self, batch: Batch) -> dict[str, float]:
        """Train on one batch; the tables' optimizer runs inside backward."""
        dist.barrier()
        self._ranks.synchronize()
        start = time.perf_counter()
        self._optimizer.zero_grad()
        loss, _ = self._model(batch)
        loss.backward()
        self._optimizer.step()
        self._ranks.synchronize()
        iteration_ms = (time.perf_counter() - start) * 1e3
        fwd_ms, bwd_ms = self._timer.take()
        return {
            "iteration_ms": iteration_ms,
            "fwd_ms": fwd_ms,
            "bwd_ms": bwd_ms,
            "loss": float(loss.detach()),
        }


class Clock:
    """How fast this rank's core is just now, by the reference set; a GPU has none."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._reference = None if ranks.on_gpu else Reference(ranks.device)

    def read(self) -> float:
        """Time of the reference [ms], all ranks at once; 0 without a reference."""
        if self._reference is None:
            return 0.0
        dist.barrier()
        self._reference.run()
        return statistics.median(self._reference.run() for _ in range(REFERENCE_PASSES))


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """One planner's turn on one rank."""

    planner: str
    pair: int
    ref_ms: float
    """Reference beside the block: mean of before and after."""
    steps: tuple[dict[str, float], ...]


def train(
    contestants: dict[str, Contestant],
    stream: ClickStream,
    clock: Clock,
    config: DemoConfig,
) -> list[Block]:
    """Train all planners' models on the same batches, block by block in turn."""
    blocks = []
    for pair in range(config.pairs):
        first = pair * config.block_iterations
        batches = [stream.batch(first + i) for i in range(config.block_iterations)]
        order = list(contestants)
        if pair % 2:
            order.reverse()
        for planner in order:
            before = clock.read()
            steps = tuple(contestants[planner].step(batch) for batch in batches)
            after = clock.read()
            blocks.append(
                Block(
                    planner=planner, pair=pair, ref_ms=(before + after) / 2, steps=steps
                )
            )
    return blocks


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What one planner's model took, over all ranks and timed iterations [ms].

    `raw` is as the clock showed it; without it, times are in the cost model's units:
    divided by the reference beside them and multiplied by its nominal time.
    """

    fwd_ms: tuple[float, ...]
    """Per rank: median forward of the fused kernels."""
    bwd_ms: tuple[float, ...]
    fwd_raw_ms: tuple[float, ...]
    bwd_raw_ms: tuple[float, ...]
    compute_critical_path_ms: float
    """Median over iterations: slowest rank's forward + slowest rank's backward."""
    iteration_ms: float
    iteration_raw_ms: float
    pair_iterations_ms: tuple[float, ...]
    """Median iteration of each block."""
    pair_critical_paths_ms: tuple[float, ...]
    loss: tuple[float, ...]
    """Mean loss over the ranks, every iteration."""
    num_timed: int


def summarise(
    planner: str, blocks_by_rank: Sequence[Sequence[Block]], nominal_ms: float
) -> Measured:
    """Put one planner's blocks of all ranks together."""
    by_rank = [[b for b in blocks if b.planner == planner] for blocks in blocks_by_rank]
    num_blocks = len(by_rank[0])
    # Ranks x blocks x timed iterations; a block's first iteration finds cold caches.
    raw = {
        name: np.array(
            [[[s[name] for s in b.steps[1:]] for b in blocks] for blocks in by_rank]
        )
        for name in ("fwd_ms", "bwd_ms", "iteration_ms")
    }
    refs = np.array([[b.ref_ms for b in blocks] for blocks in by_rank])[:, :, None]
    scale = nominal_ms / refs if nominal_ms > 0 else np.ones_like(refs)
    fwd, bwd = raw["fwd_ms"] * scale, raw["bwd_ms"] * scale
    iteration_raw = raw["iteration_ms"].max(axis=0)
    iteration = iteration_raw * scale.mean(axis=0)
    critical = fwd.max(axis=0) + bwd.max(axis=0)
    losses = np.array(
        [[s["loss"] for b in blocks for s in b.steps] for blocks in by_rank]
    )

    def per_rank(values: np.ndarray) -> tuple[float, ...]:
        return tuple(float(v) for v in np.median(values, axis=(1, 2)))

    def per_block(values: np.ndarray) -> tuple[float, ...]:
        return tuple(float(v) for v in np.median(values, axis=1))

    return Measured(
        fwd_ms=per_rank(fwd),
        bwd_ms=per_rank(bwd),
        fwd_raw_ms=per_rank(raw["fwd_ms"]),
        bwd_raw_ms=per_rank(raw["bwd_ms"]),
        compute_critical_path_ms=float(np.median(critical)),
        iteration_ms=float(np.median(iteration)),
        iteration_raw_ms=float(np.median(iteration_raw)),
        pair_iterations_ms=per_block(iteration),
        pair_critical_paths_ms=per_block(critical),
        loss=tuple(float(v) for v in losses.mean(axis=0)),
        num_timed=num_blocks * iteration.shape[1],
    )


def speedup(stock: Sequence[float], ours: Sequence[float]) -> dict[str, float]:
    """How many times faster ours is: median over pairs of blocks, and its quartiles."""
    ratios = np.array(stock) / np.array(ours)
    low, middle, high = np.percentile(ratios, [25, 50, 75])
    return {
        "median": float(middle),
        "low_quartile": float(low),
        "high_quartile": float(high),
        "num_pairs": len(ratios),
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """One planner's plan and what is expected of it."""

    plan: ShardingPlan
    seconds: float
    predicted: PredictedCosts
    search: dict[str, Any]
    """What only our planner says: bound, gap, candidates, warnings."""


def describe_plan(plan: ShardingPlan) -> dict[str, dict[str, Any]]:
    """Table name -> sharding type and shards, from TorchRec's own plan."""
    described = {}
    for module_plan in plan.plan.values():
        assert isinstance(module_plan, EmbeddingModuleShardingPlan)
        for name, parameter in module_plan.items():
            described[name] = {
                "sharding_type": parameter.sharding_type,
                "shards": [
                    {
                        "rank": rank,
                        "offset": shard.shard_offsets[1],
                        "width": shard.shard_sizes[1],
                    }
                    for rank, shard in zip(
                        parameter.ranks, parameter.sharding_spec.shards, strict=True
                    )
                ],
            }
    return described


class PlanningDesk:
    """Both planners, given the same facts, and the simulator that judges both."""

    def __init__(
        self,
        tables: Sequence[TableConfig],
        profiles: dict[str, FeatureProfile],
        config: DemoConfig,
        ranks: Ranks,
        memory_bytes: int,
        bytes_per_ms: float,
    ) -> None:
        self._tables, self._profiles = tables, profiles
        self._config, self._ranks = config, ranks
        device: dict[str, Any] = {"ddr_cap": memory_bytes}
        hbm_gb_per_s = None
        if ranks.on_gpu:
            hbm_bytes_per_ms = measure_memory(ranks)
            device = {"hbm_cap": memory_bytes, "hbm_mem_bw": hbm_bytes_per_ms}
            hbm_gb_per_s = hbm_bytes_per_ms / 1e6
        self._topology = Topology(
            world_size=ranks.world_size,
            local_world_size=ranks.local_world_size,
            compute_device=ranks.device.type,
            intra_host_bw=bytes_per_ms,
            inter_host_bw=bytes_per_ms,
            **device,
        )
        self._constraints = {
            t.name: ParameterConstraints(
                sharding_types=["table_wise", "column_wise"],
                compute_kernels=["fused"],
                min_partition=config.min_partition,
                pooling_factors=[profiles[t.name].pooling_factor],
            )
            for t in tables
        }
        with warnings.catch_warnings():
            if ranks.rank:  # rank 0 says it for all
                warnings.simplefilter("ignore")
            self.cost_model = load_cost_model(
                config.cost_model,
                device_type=ranks.device.type,
                hbm_gb_per_s=hbm_gb_per_s,
            )
        self.comms_model = find_comms_model(config, ranks, bytes_per_ms)
        # What the planner predicts with: kernels while the other ranks run theirs.
        self.concurrent = ConcurrentCostModel.of(self.cost_model, self.comms_model)

    def plan_stock(self) -> Planned:
        """Plan with TorchRec's own planner."""
        planner = EmbeddingShardingPlanner(**self._shared_arguments())
        plan, seconds = self._plan(planner)
        return Planned(
            plan=plan, seconds=seconds, predicted=self._predict(plan), search={}
        )

    def plan_ours(self) -> Planned:
        """Plan with NeuroShardPlanner."""
        planner = NeuroShardPlanner(
            **self._shared_arguments(),
            cost_model=self.cost_model,
            comms_model=self.comms_model,
            profiles=self._profiles,
        )
        plan, seconds = self._plan(planner)
        result = planner.last_result
        search = {}
        if result is not None:
            search = {
                "lower_bound_ms": result.lower_bound_ms,
                "gap": result.gap if math.isfinite(result.gap) else None,
                "search_seconds": result.search_seconds,
                "num_evaluated": result.num_evaluated,
                "warnings": list(result.warnings),
                "fallback": result.fallback,
            }
        return Planned(
            plan=plan, seconds=seconds, predicted=self._predict(plan), search=search
        )

    def _shared_arguments(self) -> dict[str, Any]:
        return {
            "topology": self._topology,
            "batch_size": self._config.batch_size,
            "constraints": self._constraints,
            "storage_reservation": FixedPercentageStorageReservation(0.15),
        }

    def _plan(self, planner: EmbeddingShardingPlanner) -> tuple[ShardingPlan, float]:
        model = build_model(self._tables, self._config, self._ranks.device)
        start = time.perf_counter()
        plan = planner.collective_plan(
            model, [EmbeddingBagCollectionSharder()], dist.group.WORLD
        )
        return plan, time.perf_counter() - start

    def _predict(self, plan: ShardingPlan) -> PredictedCosts:
        """Predict any plan by the cost model, the stock one too."""
        described = describe_plan(plan)
        placed = placement_from_plan(
            plan, self._ranks.world_size, [t.name for t in self._tables]
        )
        # Tables of one sharding type share a kernel; TorchRec runs one per type.
        types = sorted({d["sharding_type"] for d in described.values()})
        task = ShardingTask(
            tables=tuple(
                dataclasses.replace(t, profile=self._profiles[t.name])
                for t in self._tables
            ),
            world_size=self._ranks.world_size,
            batch_size=self._config.batch_size * self._ranks.world_size,
            local_world_size=self._ranks.local_world_size,
            groups=tuple(
                types.index(described[t.name]["sharding_type"]) for t in self._tables
            ),
            stages=tuple(range(len(types))),
            stage_names=tuple(types),
        )
        simulator = Simulator(task, self.concurrent, self.comms_model)
        return simulator.evaluate(placed.placement)


def as_json(planned: Planned, measured: Measured, dense_ms: float) -> dict[str, Any]:
    """One planner's part of demo.json."""
    timed = dataclasses.asdict(measured)
    loss = timed.pop("loss")
    ends = max(1, len(loss) // 8)
    return {
        "planning_seconds": planned.seconds,
        "search": planned.search,
        "plan": describe_plan(planned.plan),
        "predicted": {
            **planned.predicted.to_json(),
            "iteration_ms": planned.predicted.critical_path_ms + dense_ms,
        },
        "measured": timed,
        "loss": {
            "start": statistics.mean(loss[:ends]),
            "end": statistics.mean(loss[-ends:]),
            "iterations": loss,
        },
    }


def environment(ranks: Ranks) -> dict[str, Any]:
    """What the times belong to."""
    return {
        "device": current_device_name(ranks.device.type),
        "device_type": ranks.device.type,
        "backend": ranks.backend,
        "world_size": ranks.world_size,
        "threads_per_rank": torch.get_num_threads(),
        "torch": torch.__version__,
        "fbgemm": fbgemm_version(),
        "torchrec": getattr(torchrec, "__version__", "unknown"),
    }


def table_lines(results: dict[str, Any]) -> list[str]:
    """Both plans, a line per table."""
    lines = [
        f"{'table':<10}{'rows':>11}{'ids/sample':>11}{'distinct':>10}  "
        f"{STOCK + ' (rank:width)':<26}{OURS} (rank:width)"
    ]
    short = {"table_wise": "TW", "column_wise": "CW"}
    for table in results["tables"]:
        cells = []
        for planner in (STOCK, OURS):
            entry = results["planners"][planner]["plan"][table["name"]]
            kind = short.get(entry["sharding_type"], entry["sharding_type"])
            shards = " ".join(f"{s['rank']}:{s['width']}" for s in entry["shards"])
            cells.append(f"{kind} {shards}")
        lines.append(
            f"{table['name']:<10}{table['num_embeddings']:>11,}"
            f"{table['pooling_factor']:>11.1f}{table['num_distinct']:>10,.0f}  "
            f"{cells[0]:<26}{cells[1]}"
        )
    return lines


def planner_lines(name: str, result: dict[str, Any]) -> list[str]:
    """One planner's predicted and measured times."""
    predicted, measured = result["predicted"], result["measured"]
    search = result["search"]
    lines = [f"{name}: planned in {result['planning_seconds']:.1f} s"]
    if search:
        lines[0] += f", {search['num_evaluated']:,} rank sets evaluated"
        if search["gap"] is not None:
            lines[0] += f", predicted {search['gap']:.1%} above the lower bound"
        if search["fallback"]:
            lines.append(f"  fell back: {search['fallback']}")
        lines += [f"  warning: {text}" for text in search["warnings"]]
    lines.append(f"  {'[ms]':<24}{'predicted':>10}{'measured':>10}{'by the clock':>14}")
    for phase, key in (("forward", "fwd"), ("backward", "bwd")):
        for rank, costs in enumerate(predicted["ranks"]):
            lines.append(
                f"  {phase + ', rank ' + str(rank):<24}"
                f"{costs[key + '_compute']:>10.2f}"
                f"{measured[key + '_ms'][rank]:>10.2f}"
                f"{measured[key + '_raw_ms'][rank]:>14.2f}"
            )
    compute = max(r["fwd_compute"] for r in predicted["ranks"]) + max(
        r["bwd_compute"] for r in predicted["ranks"]
    )
    lines.append(
        f"  {'slowest fwd + bwd':<24}{compute:>10.2f}"
        f"{measured['compute_critical_path_ms']:>10.2f}"
    )
    lines.append(
        f"  {'iteration':<24}{predicted['iteration_ms']:>10.2f}"
        f"{measured['iteration_ms']:>10.2f}{measured['iteration_raw_ms']:>14.2f}"
    )
    loss = result["loss"]
    lines.append(f"  loss {loss['start']:.4f} -> {loss['end']:.4f}")
    return lines


def report(results: dict[str, Any]) -> str:
    """Everything in demo.json that a reader wants to see first."""
    where, config = results["environment"], results["config"]
    model = results["cost_model"]
    lines = [
        f"MLPerf DLRM-v2, {len(results['tables'])} tables of at most "
        f"{config['max_rows']:,} rows x {config['embedding_dim']}, "
        f"{config['batch_size']:,} samples on each of {where['world_size']} ranks",
        f"{where['device']}, {where['backend']}; torch {where['torch']}, fbgemm "
        f"{where['fbgemm']}, torchrec {where['torchrec']}",
        f"cost model '{model['name']}' ({model['source']}, {model['hardware']})",
        f"all-to-all {results['all_to_all_gb_per_s']:.2f} GB/s; collectives predicted "
        f"as {results['planners'][OURS]['predicted']['comms_source']}; dense part "
        f"{results['dense_ms']:.1f} ms, measured alone beforehand",
        "",
        *table_lines(results),
    ]
    for planner in (STOCK, OURS):
        lines += ["", *planner_lines(planner, results["planners"][planner])]
    lines.append("")
    for what, name in (("iteration", "iteration"), ("compute", "slowest fwd + bwd")):
        ratio = results["speedup"][what]
        lines.append(
            f"{name}: {OURS} is {ratio['median']:.3f} times as fast as {STOCK} "
            f"(quartiles of {ratio['num_pairs']} pairs of blocks: "
            f"{ratio['low_quartile']:.3f} to {ratio['high_quartile']:.3f})"
        )
    return "\n".join(lines)


def run(config: DemoConfig, ranks: Ranks) -> None:
    """Profile, plan twice, train both, report."""
    start = time.perf_counter()
    tables = mlperf_dlrm_v2(
        max_rows=config.max_rows, embedding_dim=config.embedding_dim
    )
    memory_bytes = check_memory(config, ranks, tables)
    stream = ClickStream(tables, config, ranks)
    first_batches = (
        stream.batch(i).sparse_features
        for i in range(config.profile_rounds * ranks.world_size)
    )
    profiles = gather_profiles(profile_inputs(first_batches), ranks)
    clock = Clock(ranks)
    bytes_per_ms = config.all_to_all_gb_per_s * 1e6
    if not bytes_per_ms:
        bytes_per_ms = measure_all_to_all(tables, config, ranks)
    before = clock.read()
    dense_raw_ms = measure_dense(tables, config, ranks, stream.batch(0))
    dense_ref_ms = statistics.mean(ranks.gather((before + clock.read()) / 2))

    desk = PlanningDesk(tables, profiles, config, ranks, memory_bytes, bytes_per_ms)
    planned = {STOCK: desk.plan_stock(), OURS: desk.plan_ours()}
    contestants = {
        name: Contestant(p.plan, tables, config, ranks) for name, p in planned.items()
    }
    blocks_by_rank = ranks.gather(train(contestants, stream, clock, config))
    if ranks.rank:
        return

    refs = [b.ref_ms for blocks in blocks_by_rank for b in blocks]
    nominal_ms = 0.0
    if not ranks.on_gpu:  # a physical estimate has no reference: take this run's own
        nominal_ms = getattr(desk.cost_model, "reference_ms", 0.0)
        nominal_ms = nominal_ms or statistics.median(refs)
        # Both references ran while the other ranks ran theirs, as kernels do.
        nominal_ms *= statistics.mean(desk.comms_model.compute_slowdown)
    dense_ms = dense_raw_ms * (nominal_ms / dense_ref_ms if nominal_ms else 1.0)
    measured = {n: summarise(n, blocks_by_rank, nominal_ms) for n in planned}
    stock, ours = measured[STOCK], measured[OURS]
    results = {
        "schema_version": SCHEMA_VERSION,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(sys.argv),
        "config": dataclasses.asdict(config),
        "environment": environment(ranks),
        "cost_model": {
            "name": desk.cost_model.name,
            "hardware": desk.cost_model.hardware,
            "source": desk.cost_model.source,
        },
        "reference": {
            "nominal_ms": nominal_ms,
            "measured_ms": [
                statistics.median(b.ref_ms for b in blocks) for blocks in blocks_by_rank
            ],
        },
        "all_to_all_gb_per_s": bytes_per_ms / 1e6,
        "dense_ms": dense_ms,
        "dense_raw_ms": dense_raw_ms,
        "tables": [
            {
                "name": t.name,
                "num_embeddings": t.num_embeddings,
                "embedding_dim": t.embedding_dim,
                "pooling_factor": profiles[t.name].pooling_factor,
                "num_distinct": profiles[t.name].num_distinct,
                "profile": profiles[t.name].to_json(),
            }
            for t in tables
        ],
        "planners": {n: as_json(planned[n], measured[n], dense_ms) for n in planned},
        "speedup": {
            "iteration": speedup(stock.pair_iterations_ms, ours.pair_iterations_ms),
            "compute": speedup(
                stock.pair_critical_paths_ms, ours.pair_critical_paths_ms
            ),
        },
        "seconds": time.perf_counter() - start,
    }
    Path(config.output).write_text(json.dumps(results, indent=1) + "\n", "utf-8")
    print(report(results))
    print(f"\nwrote {config.output} after {results['seconds']:.0f} s")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; the exit code."""
    # Notices about TorchRec's and torch's own internals, which no reader can act on.
    logging.getLogger("torchrec").setLevel(logging.ERROR)
    logging.getLogger("torch.fx").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
    try:
        config = DemoConfig.from_arguments(arguments)
        ranks = join_ranks(config)
        run(config, ranks)
    except (DemoError, NeuroShardError, PlannerError) as error:
        print(f"rank {os.environ.get('RANK', '?')}: {error}", file=sys.stderr)
        return 2
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
