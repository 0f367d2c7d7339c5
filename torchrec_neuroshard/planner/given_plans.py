"""Plans from any source: whether they fit a model, and their options in it."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn
from torchrec.distributed.planner.types import Enumerator, Shard, ShardingOption
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    ModuleSharder,
    ParameterSharding,
    ShardingPlan,
)
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.quant.embedding_modules import (
    EmbeddingBagCollection as QuantEmbeddingBagCollection,
)
from torchrec.quant.embedding_modules import (
    EmbeddingCollection as QuantEmbeddingCollection,
)

from torchrec_neuroshard.errors import PlanFileError, check_kind
from torchrec_neuroshard.planner.checks import KNOWN_VALUES
from torchrec_neuroshard.planner.compat import sharders_by_type
from torchrec_neuroshard.planner.option_facts import (
    TABLE_MODULES,
    note_sharders,
    table_configs,
)
from torchrec_neuroshard.report.plan_tables import (
    PlanTable,
    check_shards,
    full_name,
    plan_entries,
    plan_shardings,
)

_QUANTISED = (QuantEmbeddingBagCollection, QuantEmbeddingCollection)


def placed_options(
    plan: ShardingPlan,
    module: nn.Module,
    sharders: Sequence[ModuleSharder[Any]],
    enumerator: Enumerator,
    world_size: int,
) -> list[ShardingOption]:
    """Return a plan as TorchRec's options, one per table, in the plan's order.

    They have the plan's shards and ranks, and the enumerator's estimates.

    Args:
        plan: The plan.
        module: The model before `DistributedModelParallel`.
        sharders: The sharders of its embedding modules.
        enumerator: Lists and estimates its options.
        world_size: Number of ranks.

    Raises:
        PlanFileError: The plan is incomplete or does not fit this model.
    """
    plan = planned_once(plan, module)
    tables, _ = model_tables(plan.plan, module)
    check_plan(plan, tables, world_size)
    listed: dict[tuple[str, str], list[ShardingOption]] = {}
    every = enumerator.enumerate(module, list(sharders))
    note_sharders(every, sharders_by_type(sharders))
    for option in every:
        listed.setdefault((option.path, option.name), []).append(option)
    options = []
    for path, name, sharding in plan_entries(plan.plan):
        if (path, name) not in listed:
            found = " or ".join(sorted(f"'{p}'" for p, n in listed if n == name))
            raise PlanFileError(
                f"the plan has table '{name}' in module '{path}', but the model has "
                f"it in {found or 'no module with a sharder'}: use a plan of this "
                "model"
            )
        options.append(_placed(listed[path, name], sharding))
    enumerator.populate_estimates(options)
    return options


def _placed(
    listed: Sequence[ShardingOption], sharding: ParameterSharding
) -> ShardingOption:
    """Return a copy of one of a table's options with the plan's sharding."""
    kind, kernel = sharding.sharding_type, sharding.compute_kernel
    same = [o for o in listed if (o.sharding_type, o.compute_kernel) == (kind, kernel)]
    option = copy.copy((same or listed)[0])
    # A running plan may use what the constraints forbid.
    option.sharding_type, option.compute_kernel = kind, kernel
    option.cache_params = sharding.cache_params
    if sharding.sharding_spec is None:  # replicas
        boxes = [(list(option.tensor.shape), [0, 0])] * len(sharding.ranks)
    else:
        shards = sharding.sharding_spec.shards
        boxes = [(list(m.shard_sizes), list(m.shard_offsets)) for m in shards]
    option.shards = [
        Shard(size=size, offset=offset, rank=rank)
        for (size, offset), rank in zip(boxes, sharding.ranks, strict=True)
    ]
    return option


def copied(plan: ShardingPlan) -> ShardingPlan:
    """Return a copy whose entries can be replaced, as resharding does in place."""
    return ShardingPlan(
        {
            path: EmbeddingModuleShardingPlan(module_plan)
            for path, module_plan in plan.plan.items()
        }
    )


def planned_paths(plan: ShardingPlan, model: nn.Module) -> dict[str, list[str]]:
    """Return the path under which each module is sharded -> all its paths in a plan.

    `DistributedModelParallel` shards a module once, though a model may have it under
    several paths.

    Args:
        plan: A plan.
        model: The model before `DistributedModelParallel`.
    """
    found: dict[nn.Module, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if path in plan.plan:
            found.setdefault(module, []).append(path)
    return {paths[0]: paths for paths in found.values()}


def planned_once(plan: ShardingPlan, model: nn.Module) -> ShardingPlan:
    """Return a plan without the other paths of modules; see `planned_paths`."""
    check_kind("plan", plan, ShardingPlan)
    check_kind("model", model, nn.Module)
    others = {p for _, *rest in planned_paths(plan, model).values() for p in rest}
    return ShardingPlan({p: own for p, own in plan.plan.items() if p not in others})


def _stored_columns(module: nn.Module, config: Any) -> int:
    """Return the columns of a sharded table; quantised rows include their scale."""
    if isinstance(module, _QUANTISED):
        weights = {name.split(".")[-2]: w for name, w in module.state_dict().items()}
        if config.name in weights:
            return int(weights[config.name].shape[1])
    return int(config.embedding_dim)


def model_tables(
    paths: Iterable[str], model: nn.Module
) -> tuple[tuple[PlanTable, ...], tuple[str, ...]]:
    """Return the tables inside and outside the modules of a plan.

    Args:
        paths: The plan's modules.
        model: The model before `DistributedModelParallel`.

    Returns:
        The tables inside, sorted, and the full names of the tables outside.
    """
    check_kind("model", model, nn.Module)
    modules = dict(model.named_modules(remove_duplicate=False))
    inside = {path: modules[path] for path in paths if path in modules}
    outside = {
        full_name(path, config.name)
        for path, module in modules.items()
        if isinstance(module, TABLE_MODULES)
        and module not in inside.values()
        and not any(not p or path == p or path.startswith(f"{p}.") for p in inside)
        for config in table_configs(module)
    }
    tables = {
        PlanTable(
            path=path,
            name=config.name,
            num_embeddings=int(config.num_embeddings),
            embedding_dim=_stored_columns(module, config),
            data_type=str(config.data_type.value).lower(),
            pooling=str(
                config.pooling.value.lower()
                if isinstance(config, EmbeddingBagConfig)
                else "none"
            ),
            feature_names=tuple(config.feature_names or ()),
        )
        for path, module in inside.items()
        for config in table_configs(module)
    }
    return tuple(sorted(tables)), tuple(sorted(outside))


def check_plan(
    plan: ShardingPlan, tables: Iterable[PlanTable], world_size: int
) -> None:
    """Check that a plan is complete, and that this release of TorchRec can run it.

    Raises:
        PlanFileError: A table, a shard, a rank or a kernel is missing.
    """
    for path, name, sharding in plan_entries(plan.plan):
        if sharding.compute_kernel not in KNOWN_VALUES["compute_kernels"]:
            raise PlanFileError(
                f"table '{full_name(path, name)}': this TorchRec release has no kernel "
                f"'{sharding.compute_kernel}'; use the release that made the plan"
            )
    check_shards(plan_shardings(plan), tables, world_size)
