"""A stand-in for dynamicemb's planner, with its public signatures but no kernels.

It follows commit 43465aea of NVIDIA/recsys-examples. As there, the rows of a shard are
rounded up to whole buckets, and missing fields of the options are completed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torchrec.distributed.planner import ParameterConstraints, Topology
from torchrec.distributed.types import (
    EnumerableShardingSpec,
    ParameterSharding,
    ShardMetadata,
)
from torchrec.modules.embedding_configs import BaseEmbeddingConfig


@dataclass(eq=False)
class DynamicEmbTableOptions:
    global_hbm_for_values: int = 0
    caching: bool = False
    score_strategy: Any = None
    bucket_capacity: int = 128
    admission_counter: Any = None
    dist_type: str = "roundrobin"
    embedding_dtype: torch.dtype | None = None
    dim: int | None = None
    max_capacity: int | None = None
    local_hbm_for_values: int = 0


@dataclass
class DynamicEmbParameterConstraints(ParameterConstraints):
    use_dynamicemb: bool | None = False
    dynamicemb_options: DynamicEmbTableOptions | None = field(
        default_factory=DynamicEmbTableOptions
    )


@dataclass
class DynamicEmbParameterSharding(ParameterSharding):
    compute_kernel: str = "customized_kernel"
    customized_compute_kernel: str | None = "DynamicEmb"
    dist_type: str = "roundrobin"
    dynamicemb_options: DynamicEmbTableOptions | None = None


class DynamicEmbeddingShardingPlanner:
    def __init__(
        self,
        eb_configs: list[BaseEmbeddingConfig],
        topology: Topology,
        batch_size: int | None = None,
        constraints: dict[str, DynamicEmbParameterConstraints] | None = None,
        debug: bool = True,
        **_: Any,
    ) -> None:
        constraints = constraints or {}
        if {config.name for config in eb_configs} != set(constraints):
            raise ValueError(
                "Not all constraint keys have matching BaseEmbeddingConfig"
            )
        world_size = topology.world_size
        self._dyn_emb_plan: dict[str, ParameterSharding] = {}
        for config in eb_configs:
            options = constraints[config.name].dynamicemb_options
            if not constraints[config.name].use_dynamicemb or options is None:
                continue
            buckets = math.ceil(config.num_embeddings / world_size)
            buckets = math.ceil(buckets / options.bucket_capacity)
            options.max_capacity = rows = buckets * options.bucket_capacity
            options.local_hbm_for_values = math.ceil(
                options.global_hbm_for_values / world_size
            )
            options.dim, options.embedding_dtype = config.embedding_dim, torch.float32
            shards = [
                ShardMetadata([rows * rank, 0], [rows, options.dim], f"rank:{rank}")
                for rank in range(world_size)
            ]
            self._dyn_emb_plan[config.name] = DynamicEmbParameterSharding(
                sharding_spec=EnumerableShardingSpec(shards),
                sharding_type="row_wise",
                ranks=list(range(world_size)),
                dist_type=options.dist_type,
                dynamicemb_options=options,
            )
